"""The latents on disk of offline DPO's preference pairs. Where pairs come from: pair_files.py, made_pairs.py."""

import hashlib
import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common.checkpoints import atomic_file
from common.data import PromptSet
from common.distributed import gather_objects
from common.errors import RunError, refusing
from common.models.family import Family, hash_bits

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageOps

if TYPE_CHECKING:
    from common.pairs.pair_files import Pair, PairImage, Pairs


@contextmanager
def refusing_alone() -> Iterator[None]:
    """ValueErrors in the block become RunErrors, which each rank prints: only this rank may know of the fault."""
    try:
        yield
    except ValueError as error:
        raise RunError(str(error)) from None


def open_image(source: "Path | PairImage") -> Image.Image:
    """The image of a file or a pair, RGB, 8 bits a channel, upright as its EXIF orientation says.

    Raises:
        ValueError: naming it: not a readable image.
    """
    with refusing(f"not a readable image: {source}", Exception), Image.open(io.BytesIO(source.read_bytes())) as opened:
        opened.load()
        image: Image.Image = opened
        if image.mode.startswith("I;16"):  # 16 bits: convert() would clip them to white
            eight_bits = np.asarray(image).astype(np.float64) / 257
            image = Image.fromarray(eight_bits.round().clip(0, 255).astype(np.uint8))
        return ImageOps.exif_transpose(image).convert("RGB")


# ---- their latents on disk -------------------------------------------------------------------------------------------
def encode_pairs(
    model: Family,
    pairs: "Pairs",
    rows: Collection[int],
    *,
    folder: str | Path,
    image_size: tuple[int, int],
    max_sequence_length: int,
) -> dict[int, Path]:
    """Encode those pairs, of `rows`, that `folder` lacks: the latents of both images and the prompt's conditioning.

    A pair's key covers the prompt, its files' bytes, the size, and the bits of VAE and text encoders. Returns the
    files by row. A collective: a rank reads the images of its share alone.

    Raises:
        RunError: naming an image that cannot be read, or a pair whose images are the same.
    """
    from common.phases import with_bar

    bits = [hash_bits(tensor) for tensor in model.frozen_tensors()]
    frozen_key = hashlib.blake2b(repr(bits).encode())
    own: dict[int, Path] = {}
    shared = sorted(rows)[dist.get_rank() :: dist.get_world_size()]
    for row, pair in with_bar(pairs.select(shared), "reading pairs", len(shared)):
        key = frozen_key.copy()
        key.update(repr((pair.prompt, *image_size, max_sequence_length)).encode())
        for image in (pair.chosen, pair.rejected, *pair.sources):
            with refusing_alone(), refusing(f"not a readable image: {image}"):
                key.update(image.read_bytes())
        own[row] = Path(folder) / f"{key.hexdigest()[:32]}.pt"
    files = {row: file for of_rank in gather_objects(own) for row, file in of_rank.items()}
    first_row: dict[Path, int] = {}  # a pair that stands twice is encoded once
    for row in sorted(files):
        first_row.setdefault(files[row], row)
    missing = [row for row, file in own.items() if first_row[file] == row and not is_encoded(file)]
    for row, pair in with_bar(pairs.select(missing), f"encoding pairs into {folder}", len(missing)):
        encode_pair(model, pair, files[row], image_size, max_sequence_length)
    dist.barrier()  # a rank reads what others have encoded
    return files


def encode_pair(model: Family, pair: "Pair", file: Path, image_size: tuple[int, int], max_sequence_length: int) -> None:
    """Write a pair's latents (2, C, h, w) and conditioning to `file`; raises encode_pairs' RunError."""
    with refusing_alone():
        images = [open_image(pair.chosen), open_image(pair.rejected)]
        if images[0].size == images[1].size and images[0].tobytes() == images[1].tobytes():
            raise ValueError(f"{pair.chosen}: chosen and rejected are the same image")
    encoded = {"latents": model.encode_images(images, *image_size)}
    prompt = PromptSet([pair.prompt], [{"image": pair.sources} if pair.sources else {}])
    encoded |= model.encode(prompt, max_sequence_length, image_size)
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
