"""NanoDet, a small detector of COCO's 80 objects, for the reward geneval: the network, and what it sees in images.

assets/make_nanodet.py makes its folder, assets/nanodet. The network is NanoDet of Rangi Lyu (Apache-2.0) with a CSP
backbone, a path aggregation network and three heads, whose batch norms are folded into the convolutions. What was
chosen for it (thresholds, which classes compete) stands in its folder's detector.json.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.rewards._clip import CHUNK, in_chunks
from common.rewards._geneval_rules import CLASSES, Box, Detection, Objects

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import nn

SETTINGS, WEIGHTS = "detector.json", "model.safetensors"
STRIDES = (8, 16, 32)  # pixels from one place of a map to the next
BINS = 11  # of a distance from a place to an edge of its box: 0, 1, ... 10 strides


# ---- the network -----------------------------------------------------------------------------------------------------
def activate(x: torch.Tensor) -> torch.Tensor:
    return F.leaky_relu(x, 0.1)


class Block(nn.Module):
    """Two convolutions of half the width, side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width // 2, 3, padding=1)
        self.second = nn.Conv2d(width // 2, width // 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = activate(self.first(x))
        return torch.cat([activate(self.second(x)), x], 1)


class Stage(nn.Module):
    """(B, channels, H, W) to (B, 2 * width, H / stride, W / stride): what the blocks make of the input, beside it."""

    def __init__(self, channels: int, width: int, blocks: int, stride: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(channels, width, 3, stride, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.leave = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = activate(self.enter(x))
        return torch.cat([activate(self.leave(self.blocks(x))), x], 1)


class Head(nn.Module):
    """Scores of the classes and bins of the four distances at every place of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Conv2d(128, 128, 3, padding=1)
        self.out = nn.Conv2d(128, len(CLASSES) + 4 * BINS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(activate(self.hidden(x))).flatten(2).transpose(1, 2)  # (B, H * W, 124)


class NanoDet(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings  # of detector.json
        self.stem = nn.Conv2d(3, 32, 3, 2, padding=1)
        self.stages = nn.ModuleList(
            [Stage(32, 32, 1, 1), Stage(64, 64, 2, 2), Stage(128, 128, 2, 2), Stage(256, 256, 3, 2)]
        )
        self.laterals = nn.ModuleList([nn.Conv2d(channels, 128, 1) for channels in (128, 256, 512)])
        self.heads = nn.ModuleList([Head() for _ in STRIDES])

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of normalised pixels (B, 3, H, W) in the order blue, green, red, H and W multiples of 32: scores in [0, 1]
        (B, places, 80), and logits of distances (B, places, 44), places from the finest map to the coarsest."""
        pixels = pixels.contiguous(memory_format=torch.channels_last)  # faster on a CPU
        x = F.max_pool2d(activate(self.stem(pixels)), 3, 2, padding=1)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        fine, middle, coarse = (lateral(x) for lateral, x in zip(self.laterals, maps[1:], strict=True))
        middle = middle + resize(coarse, 2)
        fine = fine + resize(middle, 2)
        middle = middle + resize(fine, 0.5)
        coarse = coarse + resize(middle, 0.5)
        outputs = torch.cat([head(x) for head, x in zip(self.heads, (fine, middle, coarse), strict=True)], 1)
        scores, distances = outputs.split([len(CLASSES), 4 * BINS], dim=-1)
        return scores.float().sigmoid(), distances.float()


def resize(x: torch.Tensor, factor: float) -> torch.Tensor:
    return F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)


def read_nanodet(folder: str) -> NanoDet:
    """The network of a folder that assets/make_nanodet.py made, in fp32."""
    settings = read_settings(folder)
    if settings is None:
        raise ValueError(f"has no {SETTINGS}")
    model = NanoDet(settings)
    weights = load_file(Path(folder) / WEIGHTS)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it


@functools.cache
def read_settings(folder: str) -> dict[str, Any] | None:
    """What a folder's detector.json says, None for what is no folder of a NanoDet.

    Raises:
        ValueError: in one line: its classes are not COCO's, or not all that compete are among them.
    """
    path = Path(folder) / SETTINGS
    if not path.is_file():
        return None
    settings = json.loads(path.read_text())
    if settings["classes"] != CLASSES or not set(settings["competing"]) <= set(CLASSES):
        raise ValueError(f"{path}: its classes are not COCO's 80 in their order")
    return settings


# ---- what it sees ----------------------------------------------------------------------------------------------------
@torch.no_grad()
def detect_in(model: NanoDet, images: Sequence[Image.Image], dtype: torch.dtype = torch.float32) -> list[Objects]:
    """The objects in each image above the lowest threshold of the settings, the surest first, equal whatever else is in
    the batch. dtype: of the network's products."""
    found = []
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        outputs = in_chunks(lambda pixels: torch.cat(read_outputs(model, pixels, dtype), -1), preprocess(model, chunk))
        for image, rows in zip(chunk, outputs.cpu(), strict=True):
            scale = torch.tensor([image.width, image.height] * 2) / model.settings["size"]
            found.append(select(rows[:, : len(CLASSES)], rows[:, len(CLASSES) :] * scale, model.settings))
    return found


def preprocess(model: NanoDet, images: Sequence[Image.Image]) -> torch.Tensor:
    """Pixels (B, 3, size, size) as the network takes them: images resized to a square, blue first, normalised."""
    size, settings = model.settings["size"], model.settings
    resized = [image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC) for image in images]
    pixels = np.stack([np.asarray(image, dtype=np.float32)[..., ::-1] for image in resized])
    pixels = (pixels - np.float32(settings["mean"])) / np.float32(settings["std"])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).to(model.stem.weight.device)


def read_outputs(
    model: NanoDet, pixels: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (B, places, 80) and boxes (B, places, 4), left, top, right, bottom in pixels of the network's input, both
    in fp32. dtype: of the network's products."""
    with torch.autocast(pixels.device.type, dtype, enabled=dtype != torch.float32):
        scores, distances = model(pixels)
    centres, strides = [], []
    for stride in STRIDES:
        height, width = (side // stride for side in pixels.shape[2:])
        down, across = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres.append((torch.stack([across, down], -1).reshape(-1, 2) + 0.5) * stride)
        strides.append(torch.full((height * width, 1), float(stride)))
    centre, step = torch.cat(centres).to(pixels.device), torch.cat(strides).to(pixels.device)
    shares = distances.unflatten(-1, (4, BINS)).softmax(-1)
    lengths = (shares * torch.arange(BINS, device=pixels.device)).sum(-1) * step  # (B, places, 4)
    return scores, torch.cat([centre - lengths[..., :2], centre + lengths[..., 2:]], -1)


def select(scores: torch.Tensor, boxes: torch.Tensor, settings: dict[str, Any]) -> Objects:
    """The objects of one image: every place is of its surest competing class, and of two boxes that overlap by more
    than the settings' `iou`, whatever their classes, the surer one stays."""
    competing = [CLASSES.index(name) for name in settings["competing"]]
    best, classes = scores[:, competing].max(1)
    lowest = min([settings["other_threshold"], *settings["thresholds"].values()])
    rows = best.argsort(descending=True, stable=True)
    objects: Objects = {}
    taken: list[Detection] = []
    for row in rows[: int((best > lowest).sum())].tolist():
        left, top, right, bottom = boxes[row].tolist()
        one = Detection((left, top, right, bottom), best[row].item())
        if all(overlap(one.box, other.box) <= settings["iou"] for other in taken):
            taken.append(one)
            objects.setdefault(settings["competing"][classes[row]], []).append(one)
    return objects


def overlap(one: Box, other: Box) -> float:
    """Intersection over union of two boxes."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(across, 0.0) * max(down, 0.0)
    return shared / (area(one) + area(other) - shared) if shared else 0.0


def area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
