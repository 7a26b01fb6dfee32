"""Images and videos of a run: PIL images, and lists of PIL frames."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence


def save_png(path: Path | str, image: Image.Image | list[Image.Image]) -> None:
    """Write a PIL image, or a video (a list of PIL frames) as an animated PNG, which holds every frame to the bit."""
    first, *others = image if isinstance(image, list) else [image]
    if others:
        first.save(path, compress_level=1, save_all=True, append_images=others)
    else:
        first.save(path, compress_level=1)  # faster than the default level, for larger files


def open_png(path: Path | str) -> Image.Image | list[Image.Image]:
    """The PIL image, or the list of PIL frames, that save_png wrote there."""
    with Image.open(path) as file:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(file)]
    return frames[0] if len(frames) == 1 else frames


def as_images(pixels: np.ndarray) -> list:
    """PIL images of pixels (B, H, W, 3) uint8; videos, lists of PIL frames, of (B, F, H, W, 3)."""
    return [Image.fromarray(part) if part.ndim == 3 else as_images(part) for part in pixels]


def as_one_picture(image: Image.Image | list[Image.Image]) -> Image.Image:
    """A PIL image as it is; a video as its first, middle and last frame, one below the other."""
    if not isinstance(image, list):
        return image
    shown = sorted({0, len(image) // 2, len(image) - 1})
    width, height = image[0].size
    picture = Image.new("RGB", (width, len(shown) * height))
    for row, number in enumerate(shown):
        picture.paste(image[number], (0, row * height))
    return picture
