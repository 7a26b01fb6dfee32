"""--prompt_cache FOLDER: every prompt is encoded once and its embeddings are kept in the folder.

A run whose prompts are all in the folder encodes nothing. Several runs may share a folder. A prompt has a file of its
own, FOLDER/ab/abcd....safetensors, as a folder of 100,000 names is slow. Files are looked for at the start, and checked
when they are read: a prompt whose file is damaged is encoded again, so nothing waits here for the disk.
"""

import hashlib
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from common.distributed import gather_objects, on_rank_0, with_bar
from common.errors import truncate
from common.files import remove_stale, writing
from common.models import Conditioning, Family, encoders_key, on_device
from common.process import print_message

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

FORMAT = 4  # part of every name: files of another format are not found, and their prompts encoded again


def fill_cache(model: Family, prompts: list[str], max_sequence_length: int, folder: str | Path) -> None:
    """Encode into `folder` those prompts that it lacks, the empty one included, and let the model read the folder.

    The text encoders come to the device once for all prompts; later they come again only for a prompt that was not
    among these, or whose file is damaged. A collective: the ranks share the work.
    """
    with on_device(model, "text_encoder"):  # a GPU hashes gigabytes faster
        cache = PromptCache(Path(folder), encoders_key(model), model.encode_prompts)
        cache.add_missing([*prompts, ""], max_sequence_length)  # "": the negative prompt of guidance
    dist.barrier()  # a rank reads what the others have encoded
    model.kept_conditioning = cache.read


class PromptCache:
    """The files of a folder. Each prompt is encoded alone, so that its embedding does not depend on other prompts."""

    def __init__(self, folder: Path, key: str, encode: Callable[[list[str], int], Conditioning]) -> None:
        """key: of all but the prompt and the length that embeddings depend on. encode: the family's encode_prompts."""
        self.folder = folder
        self.key = key
        self.encode = encode

    def file_of(self, prompt: str, max_sequence_length: int) -> Path:
        """Where a prompt's conditioning is, or would be."""
        name = repr((FORMAT, self.key, max_sequence_length, prompt)).encode()
        digest = hashlib.blake2b(name, digest_size=16).hexdigest()
        return self.folder / digest[:2] / f"{digest}.safetensors"

    def add(self, prompt: str, max_sequence_length: int) -> Conditioning:
        """Encode a prompt and write its file, which is whole or not there. Returns the conditioning, on the CPU."""
        encoded = self.encode([prompt], max_sequence_length)
        conditioning = {field: tensor.cpu().contiguous() for field, tensor in encoded.items()}
        file = self.file_of(prompt, max_sequence_length)
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.new")  # another run may write the same file
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file(conditioning, temporary, metadata={"digest": digest(conditioning)})
            temporary.chmod(0o644)  # safetensors lets only the owner read, and runs of others may share the folder
            temporary.replace(file)
        return conditioning

    def add_missing(self, prompts: Sequence[str], max_sequence_length: int) -> None:
        """Add the prompts that have no file yet, this rank its share of them. A collective."""
        own = list(dict.fromkeys(prompts))[dist.get_rank() :: dist.get_world_size()]
        missing = [prompt for prompt in own if not self.file_of(prompt, max_sequence_length).is_file()]
        num_missing = sum(gather_objects(len(missing)))
        if num_missing and on_rank_0():
            remove_stale(self.folder.glob("*/.*.new"))
            print_message(f"--prompt_cache {self.folder}: encoding {num_missing:,} prompts that it lacks")
        for prompt in with_bar(missing, f"encoding prompts into {self.folder}", len(missing)):
            self.add(prompt, max_sequence_length)

    def read(self, prompts: Sequence[str], max_sequence_length: int) -> Conditioning:
        """The conditioning of prompts. One that has no file, or a damaged one, is encoded, which a line says."""
        found = {}
        for prompt in dict.fromkeys(prompts):
            conditioning = read_conditioning(self.file_of(prompt, max_sequence_length))
            if conditioning is None:
                what = "encoding a prompt that was not prepared, or whose file is not whole"
                print_message(truncate(f"--prompt_cache {self.folder}: {what}: {prompt}"))
                conditioning = self.add(prompt, max_sequence_length)
            found[prompt] = conditioning
        fields = found[prompts[0]]
        return {field: torch.cat([found[prompt][field] for prompt in prompts]) for field in fields}


def read_conditioning(file: Path) -> Conditioning | None:
    """The conditioning in a prompt's file, on the CPU; None: there is no file, or it is not as it was written."""
    try:
        with safe_open(file, framework="pt") as opened:
            conditioning = {field: opened.get_tensor(field) for field in opened.keys()}  # noqa: SIM118  (not a dict)
            written = (opened.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None
    return conditioning if digest(conditioning) == written else None


def digest(conditioning: Conditioning) -> str:
    """A hash of the names, shapes, dtypes and bits of tensors. Safetensors itself checks lengths alone."""
    return hashlib.blake2b(save(conditioning)).hexdigest()
