"""The latents on disk of offline DPO's preference pairs. Where pairs come from: pair_files.py, made_pairs.py."""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

from common.distributed import gather_objects, on_rank_0, with_bar
from common.errors import error_prefix
from common.files import atomic_file, remove_stale
from common.files.pictures import DECODING
from common.models import Family, encoders_key, hash_bits, settings_of
from common.pairs.pair_files import Pair, pair_prompts, refusing_alone

import torch
import torch.distributed as dist


def encode_pairs(
    model: Family,
    pairs: Sequence[Pair],
    rows: Collection[int],
    *,
    folder: str | Path,
    image_size: tuple[int, int],
    max_sequence_length: int,
) -> dict[int, Path]:
    """Encode those pairs, of `rows`, that `folder` lacks: the latents of both images and the prompt's conditioning.

    A pair's key covers the prompt, its files' bytes, the size, the VAE's bits, and what embeddings depend on
    (`encoders_key`). Returns the files by row. A collective: a rank reads the images of its share alone.

    Raises:
        RunError: naming an image that cannot be read, or a pair whose images are the same.
    """
    bits = [hash_bits(tensor) for tensor in model.picture_tensors()]
    bits.append(repr(settings_of(model.pipe.vae)))
    frozen_key = hashlib.blake2b(repr([encoders_key(model), *bits]).encode())
    own: dict[int, Path] = {}
    shared = sorted(rows)[dist.get_rank() :: dist.get_world_size()]
    for row in with_bar(shared, "reading pairs", len(shared)):
        pair = pairs[row]
        key = frozen_key.copy()
        key.update(repr((pair.prompt, *image_size, max_sequence_length, DECODING)).encode())
        for image in (pair.chosen, pair.rejected, *pair.sources):
            with refusing_alone(), error_prefix(f"{image}: not a readable image"):
                key.update(image.read_bytes())
        own[row] = Path(folder) / f"{key.hexdigest()[:32]}.pt"
    files = {row: file for of_rank in gather_objects(own) for row, file in of_rank.items()}
    first_row: dict[Path, int] = {}  # a pair that stands twice is encoded once
    for row in sorted(files):
        first_row.setdefault(files[row], row)
    missing = [row for row, file in own.items() if first_row[file] == row and not is_encoded(file)]
    if missing and on_rank_0():
        remove_stale(Path(folder).glob(".*.new"))
    for row in with_bar(missing, f"encoding pairs into {folder}", len(missing)):
        encode_pair(model, pairs[row], files[row], image_size, max_sequence_length)
    dist.barrier()  # a rank reads what others have encoded
    return files


def encode_pair(model: Family, pair: Pair, file: Path, image_size: tuple[int, int], max_sequence_length: int) -> None:
    """Write a pair's latents (2, C, h, w) and conditioning to `file`; raises encode_pairs' RunError."""
    with refusing_alone():
        images = [pair.chosen.decode(), pair.rejected.decode()]
        if images[0].size == images[1].size and images[0].tobytes() == images[1].tobytes():
            raise ValueError(f"{pair.chosen}: chosen and rejected are the same image")
    encoded = {"latents": model.encode_images(images, *image_size)}
    encoded |= model.encode(pair_prompts([pair]), max_sequence_length, image_size)
    with atomic_file(file, shared=True) as temporary, open(temporary, "wb") as opened:
        torch.save({name: tensor.cpu() for name, tensor in encoded.items()}, opened)


def is_encoded(file: Path) -> bool:
    """Whether `file` holds all of a pair, finite. A file that a failing disk has damaged is encoded again."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        return len(tensors["latents"]) == 2 and all(tensor.isfinite().all() for tensor in tensors.values())
    except Exception:  # a flipped byte can make the readers of zip and pickle raise nearly anything
        return False


def load_pairs(files: Sequence[Path], device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The latents (2, B, C, h, w), chosen first, and the conditioning of B encoded pairs, on `device`."""
    pairs = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    latents = torch.stack([pair.pop("latents") for pair in pairs], 1).to(device)
    conditioning = {name: torch.cat([pair[name] for pair in pairs]).to(device) for name in pairs[0]}
    return latents, conditioning
