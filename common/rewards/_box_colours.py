"""The colour of an object by the pixels of its box, for detectors without masks in the reward geneval."""

import functools
import math
from collections.abc import Sequence

from common.rewards._geneval_rules import COLOURS, Detection

import numpy as np
from PIL import Image

SHADES = {  # RGB of 255, some for each colour; "grey" is of none
    "red": ((204, 36, 36), (150, 24, 24), (232, 84, 72)),
    "orange": ((244, 140, 24), (216, 108, 28)),
    "yellow": ((248, 216, 48), (204, 176, 40), (255, 238, 140)),
    "green": ((48, 152, 64), (28, 92, 40), (128, 200, 120)),
    "blue": ((40, 88, 208), (28, 48, 120), (108, 168, 236)),
    "purple": ((124, 52, 168), (76, 36, 104), (164, 120, 204)),
    "pink": ((248, 148, 192), (232, 92, 152), (255, 204, 222)),
    "brown": ((120, 72, 40), (80, 48, 28), (160, 108, 68)),
    "black": ((0, 0, 0), (32, 32, 36), (64, 64, 68)),
    "white": ((255, 255, 255), (232, 232, 232), (200, 200, 200)),
    "grey": ((132, 132, 132),),
}
NEUTRAL = 0.5  # what a black or white pixel counts beside one of another colour: wheels and windows are no paint
RING = 3  # pixels around a box, by whose median the ground is known
MOST = 2**16  # pixels of a box that are looked at; of a larger box every second row and column, or every third ...
NEAR = 16.0  # of CIELAB: pixels so near to the ground are not the object's


def colours_of_boxes(image: Image.Image, detections: Sequence[Detection]) -> list[str]:
    """For each box the colour of most of its pixels, each named by the nearest shade, without those of the ground; of
    pixels that are all grey "grey", which no record asks for."""
    pixels = np.asarray(image.convert("RGB"), dtype=float)
    return [colour_of(pixels, each.box) for each in detections]


def colour_of(pixels: np.ndarray, box: Sequence[float]) -> str:
    """The colour of a box in an image (H, W, 3) of 255."""
    height, width = pixels.shape[:2]
    left, top = min(max(round(box[0]), 0), width - 1), min(max(round(box[1]), 0), height - 1)
    right, bottom = min(max(round(box[2]), left + 1), width), min(max(round(box[3]), top + 1), height)
    around = np.zeros((height, width), dtype=bool)
    around[max(top - RING, 0) : bottom + RING, max(left - RING, 0) : right + RING] = True
    around[top:bottom, left:right] = False
    step = math.ceil(math.sqrt((bottom - top) * (right - left) / MOST))
    inside = to_lab(pixels[top:bottom:step, left:right:step].reshape(-1, 3))
    if around.any():
        far = np.linalg.norm(inside - np.median(to_lab(pixels[around]), axis=0), axis=1) > NEAR
        inside = inside[far] if far.any() else inside
    names, shades = lab_shades()
    nearest = np.linalg.norm(inside[:, None] - shades, axis=2).argmin(1)
    votes = dict.fromkeys(COLOURS, 0.0)
    for name, count in zip(names, np.bincount(nearest, minlength=len(names)), strict=True):
        if name in votes:
            votes[name] += float(count) * (NEUTRAL if name in ("black", "white") else 1.0)
    return max(votes, key=lambda name: votes[name]) if any(votes.values()) else "grey"


@functools.cache
def lab_shades() -> tuple[list[str], np.ndarray]:
    """The names of all SHADES, and the shades (S, 3) in CIELAB."""
    names = [name for name, shades in SHADES.items() for _ in shades]
    return names, to_lab(np.array([shade for shades in SHADES.values() for shade in shades], dtype=float))


def to_lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of sRGB (..., 3) of 255, white D65."""
    share = rgb / 255
    linear = np.where(share > 0.04045, ((share + 0.055) / 1.055) ** 2.4, share / 12.92)
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    xyz = linear @ to_xyz.T / (0.95047, 1.0, 1.08883)
    bent = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = np.moveaxis(bent, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)
