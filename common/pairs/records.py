"""The latents on disk of records, an image and its prompt each. Where records come from: record_files.py.

A file holds many records, and is mapped into memory. A file each would be 40,000 files, to be found, opened and synced.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from common.data import PromptSet
from common.distributed import gather_objects, on_rank_0, with_bar
from common.errors import error_prefix
from common.files import atomic_file, remove_stale
from common.files.pictures import DECODING
from common.models import PROMPTS_AT_ONCE, Family, encoders_key, hash_bits, settings_of
from common.pairs.pair_files import refusing_alone
from common.pairs.record_files import ImageRecord

import torch
import torch.distributed as dist

RECORDS_OF_A_FILE = 128


class EncodedRecord(NamedTuple):
    """A record's place in a file: row `row` of the tensors (n, ...) of its n records, `latents` and conditioning."""

    tensors: dict[str, torch.Tensor]
    row: int


def encode_records(
    model: Family,
    records: Sequence[ImageRecord],
    rows: Collection[int],
    *,
    folder: str | Path,
    image_size: tuple[int, int],
    max_sequence_length: int,
) -> dict[int, EncodedRecord]:
    """Encode those records, of `rows`, that `folder` lacks: the image's latents and the prompt's conditioning.

    A record's key covers its prompt and its file's bytes. The name of the folder below `folder` covers the size, the
    VAE's bits, and what embeddings depend on (`encoders_key`). Returns the records by row. A collective: a rank reads
    the images of its share alone.

    Raises:
        RunError: naming an image that cannot be read.
    """
    bits = [hash_bits(tensor) for tensor in model.picture_tensors()]
    bits.append(repr(settings_of(model.pipe.vae)))
    frozen = repr([encoders_key(model), *bits, *image_size, max_sequence_length, DECODING]).encode()
    place = Path(folder) / f"records_{hashlib.blake2b(frozen, digest_size=8).hexdigest()}"
    remove_damaged(place)
    own: dict[int, str] = {}
    shared = sorted(rows)[dist.get_rank() :: dist.get_world_size()]
    for row in with_bar(shared, "reading records", len(shared)):
        image = records[row].image
        with refusing_alone(), error_prefix(f"{image}: not a readable image"):
            own[row] = record_key(records[row].prompt, image.read_bytes())
    keys = {row: key for of_rank in gather_objects(own) for row, key in of_rank.items()}
    known = find_encoded(place.glob("*.pt"))
    missing = {keys[row]: records[row] for row in sorted(keys) if keys[row] not in known}
    share = list(missing)[dist.get_rank() :: dist.get_world_size()]
    parts = [share[start : start + RECORDS_OF_A_FILE] for start in range(0, len(share), RECORDS_OF_A_FILE)]
    for part in with_bar(parts, f"encoding {len(missing)} records into {folder}", len(parts)):
        encode_part(model, {key: missing[key] for key in part}, place, image_size, max_sequence_length)
    dist.barrier()  # a rank reads what others have encoded
    if missing:
        known = find_encoded(place.glob("*.pt"))
    return {row: known[key] for row, key in keys.items()}


def record_key(prompt: str, content: bytes) -> str:
    """What tells a record from others: a hash of its prompt and of the bytes of its image."""
    return hashlib.blake2b(repr(prompt).encode() + b"\n" + content, digest_size=16).hexdigest()


def encode_part(
    model: Family, records: dict[str, ImageRecord], place: Path, image_size: tuple[int, int], max_sequence_length: int
) -> None:
    """Write a file of some records, by their keys.

    Images are encoded one by one, and prompts in full batches, the last filled up with a prompt that is left out again:
    on a CPU the bits of a record do not depend on which others are encoded.
    """
    latents = []
    for record in records.values():
        with refusing_alone():
            image = record.image.decode()
        latents.append(model.encode_images([image], *image_size).cpu())
    prompts = [record.prompt for record in records.values()]
    filled = prompts + prompts[:1] * (-len(prompts) % PROMPTS_AT_ONCE)
    conditioning = model.encode(PromptSet(filled, [{}] * len(filled)), max_sequence_length, image_size)
    tensors = {"latents": torch.cat(latents)}
    for name, tensor in conditioning.items():
        tensors[name] = tensor[: len(prompts)].cpu().clone()  # torch.save would write all rows of a view
    file = place / f"{hashlib.blake2b(repr(list(records)).encode(), digest_size=16).hexdigest()}.pt"
    content = {"keys": list(records), "tensors": tensors}
    with atomic_file(file, shared=True) as temporary, open(temporary, "wb") as opened:
        torch.save(content, opened)


def find_encoded(files: Iterable[Path]) -> dict[str, EncodedRecord]:
    """The records of files by their keys. Their tensors are read from the disk where they are used."""
    found: dict[str, EncodedRecord] = {}
    for file in sorted(files):
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        found |= {key: EncodedRecord(content["tensors"], row) for row, key in enumerate(content["keys"])}
    return found


def remove_damaged(place: Path) -> None:
    """Remove the files that a failing disk has damaged, whose records are then encoded again. A collective: a rank
    reads its share of the files."""
    files = sorted(place.glob("*.pt"))[dist.get_rank() :: dist.get_world_size()]
    for file in files:
        if not is_whole(file):
            file.unlink(missing_ok=True)
    if on_rank_0():
        remove_stale(place.glob(".*.new"))
    dist.barrier()


def is_whole(file: Path) -> bool:
    """Whether `file` holds all tensors of its records, finite."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        lengths = {len(tensor) for tensor in content["tensors"].values()}
        is_finite = all(tensor.isfinite().all() for tensor in content["tensors"].values())
        return "latents" in content["tensors"] and lengths == {len(content["keys"])} and is_finite
    except Exception:  # a flipped byte can make the readers of zip and pickle raise nearly anything
        return False


def load_records(
    encoded: Sequence[EncodedRecord], device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The latents (B, C, h, w) and the conditioning of B encoded records, on `device`."""
    names = encoded[0].tensors.keys()
    stacked = {name: torch.stack([one.tensors[name][one.row] for one in encoded]).to(device) for name in names}
    return stacked.pop("latents"), stacked
