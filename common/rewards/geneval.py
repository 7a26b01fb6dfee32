"""GenEval: are the objects that a prompt names there, in number, colour and place? (arXiv 2310.11513)

    torchrun --standalone flow_grpo.py --reward geneval --train_prompts evaluation_metadata.jsonl ...

Prompts are the published .jsonl records: {"prompt", "tag", "include": [{"class", "count", "color", "position"}],
"exclude"}. Two networks of transformers see the images, named by environment variables as hub ids or folders: a
Mask2Former of COCO's 80 objects, GENEVAL_DETECTOR (default facebook/mask2former-swin-small-coco-instance), and a CLIP
for colours, GENEVAL_CLIP (default openai/clip-vit-large-patch14). The published code has the same architectures from
mmdet and open_clip. We could not compare the published weights.
"""

import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from common.process import print_message
from common.rewards.clip_score import (
    embed_images,
    embed_prompts,
    load_clip,
    load_processor,
    own_device,
    refusing_weights,
    wants_offload,
    weights_of,
)
from common.rewards.clip_score import (
    offload as offload_clips,
)

import torch
from PIL import Image

if TYPE_CHECKING:  # slow
    from transformers import CLIPModel, CLIPProcessor, Mask2FormerForUniversalSegmentation

# COCO's objects in the order of the detector's labels, three of them under the names that the prompts have
NAMES = """
    person|bicycle|car|motorcycle|airplane|bus|train|truck|boat|traffic light|fire hydrant|stop sign
    parking meter|bench|bird|cat|dog|horse|sheep|cow|elephant|bear|zebra|giraffe|backpack|umbrella|handbag
    tie|suitcase|frisbee|skis|snowboard|sports ball|kite|baseball bat|baseball glove|skateboard|surfboard
    tennis racket|bottle|wine glass|cup|fork|knife|spoon|bowl|banana|apple|sandwich|orange|broccoli|carrot
    hot dog|pizza|donut|cake|chair|couch|potted plant|bed|dining table|toilet|tv|laptop|computer mouse
    tv remote|computer keyboard|cell phone|microwave|oven|toaster|sink|refrigerator|book|clock|vase|scissors
    teddy bear|hair drier|toothbrush
"""
CLASSES = [name.strip() for name in re.split(r"[|\n]", NAMES.strip())]
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
COLOUR_PROMPTS = ("a photo of a {0} {1}", "a photo of a {0}-colored {1}", "a photo of a {0} object")
THRESHOLD = {"counting": 0.9}  # of a detection's score, by the prompt's tag
OTHER_THRESHOLD = 0.3
MOST = 16  # detections of a class
MARGIN = 0.1  # of both sizes: nearer objects are neither left nor right of each other


class Detection(NamedTuple):
    """An object that the detector has found."""

    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels
    score: float
    mask: Image.Image | None = None  # mode L, of the image's size: 255 where it is


Objects = dict[str, list[Detection]]  # by class, the surest first
Colours = Callable[[str, list[Detection]], Sequence[str]]  # of the detections of a class


# ---- the reward ------------------------------------------------------------------------------------------------------
def geneval(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """1 where the image is right by the published rules, else 0."""
    return [score_image(image, record) for image, record in zip(images, metadata, strict=True)]


def score_image(image: Image.Image, record: dict) -> float:
    """1 or 0 for an image by its prompt's record."""
    image = image.convert("RGB")
    objects = kept(detect(image), THRESHOLD.get(record["tag"], OTHER_THRESHOLD))
    return float(is_right(record, objects, lambda name, found: colours_of(image, name, found)))


def check_metadata(record: dict) -> None:
    """Raise ValueError where a prompt's record is not GenEval's."""
    clauses = record.get("include")
    if not isinstance(record.get("tag"), str) or not isinstance(clauses, list) or not clauses:
        raise ValueError('the reward geneval needs "tag" and "include", as in GenEval\'s evaluation_metadata.jsonl')
    for number, clause in enumerate([*record["include"], *record.get("exclude", [])]):
        if clause.get("class") not in CLASSES:
            raise ValueError(f"geneval: the class {clause.get('class')!r} is none of COCO's 80")
        if type(clause.get("count")) is not int or clause["count"] < 1:
            raise ValueError(f"geneval: the count of {clause['class']} must be a whole number above 0")
        if clause.get("color", "red") not in COLOURS:
            raise ValueError(f"geneval: the color {clause['color']!r} is none of {', '.join(COLOURS)}")
        if "position" in clause and not 0 <= clause["position"][1] < number:
            raise ValueError(f"geneval: the position of {clause['class']} must be of an earlier clause")


# ---- the published rules ---------------------------------------------------------------------------------------------
def is_right(record: dict, objects: Objects, colours: Colours) -> bool:
    """Whether the objects fulfil every clause of "include" and none of "exclude".

    A clause of "include" looks at its `count` surest objects: they must be so many, all of its colour, and each of
    them in its place relative to each object of an earlier clause, which must itself be fulfilled. colours(class,
    detections) names a colour for each.
    """
    fulfilled: list[list[Detection] | None] = []
    for clause in record["include"]:
        name = clause["class"]
        found: list[Detection] | None = objects.get(name, [])[: clause["count"]]
        if not has_colour_and_count(clause, found or [], colours):
            found = None
        elif "position" in clause:
            place, number = clause["position"]
            others = fulfilled[number]
            if others is None or any(place not in places_of(a, b) for a in found or [] for b in others):
                found = None
        fulfilled.append(found)
    excluded = record.get("exclude", [])
    too_many = any(len(objects.get(clause["class"], [])) >= clause["count"] for clause in excluded)
    return None not in fulfilled and not too_many


def has_colour_and_count(clause: dict, found: list[Detection], colours: Colours) -> bool:
    """Whether a clause's objects are as many as it says and, where it names a colour, all of that."""
    if len(found) < clause["count"]:
        return False
    if "color" not in clause:
        return True
    return all(colour == clause["color"] for colour in colours(clause["class"], found))


def places_of(one: Detection, other: Detection) -> set[str]:
    """Where one object is relative to the other: of "left of", "right of", "above", "below", none, one or two.

    The way between their centres, shortened in each direction by MARGIN of both sizes, must be more than half of the
    whole way.
    """
    offsets = []
    shortened = []
    for low, high in ((0, 2), (1, 3)):  # across, down
        offset = (one.box[low] + one.box[high] - other.box[low] - other.box[high]) / 2
        sizes = abs(one.box[high] - one.box[low]) + abs(other.box[high] - other.box[low])
        offsets.append(offset)
        shortened.append(math.copysign(max(abs(offset) - MARGIN * sizes, 0), offset))
    if all(abs(part) < 1e-3 for part in shortened):
        return set()
    across, down = (part / math.hypot(*offsets) for part in shortened)
    found = {"left of": across < -0.5, "right of": across > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {place for place, is_there in found.items() if is_there}


def kept(objects: Objects, threshold: float) -> Objects:
    """The objects above the score, at most MOST of a class, the surest first."""
    found = {}
    for name, detections in objects.items():
        sure = [each for each in detections if each.score > threshold]
        found[name] = sorted(sure, key=lambda each: each.score, reverse=True)[:MOST]
    return {name: detections for name, detections in found.items() if detections}


# ---- the networks ----------------------------------------------------------------------------------------------------
DETECTORS: "dict[str, tuple[Mask2FormerForUniversalSegmentation, Any]]" = {}  # with its image processor, by source


def load() -> "tuple[Mask2FormerForUniversalSegmentation, Any, CLIPModel, CLIPProcessor]":
    """The detector and its image processor, the CLIP and its processor, on own_device.

    Raises:
        ValueError: names the variable and what is wrong with its files.
    """
    wants_offload()
    source = weights_of("GENEVAL_DETECTOR", "facebook/mask2former-swin-small-coco-instance")
    name = source[1]
    if name not in DETECTORS:
        with refusing_weights(source):
            DETECTORS[name] = read_detector(name)
    detector, processor = DETECTORS[name]
    clip = weights_of("GENEVAL_CLIP", "openai/clip-vit-large-patch14")
    return detector.to(own_device()), processor, load_clip(clip), load_processor(clip)


def read_detector(name: str) -> "tuple[Mask2FormerForUniversalSegmentation, Any]":
    """The Mask2Former of a hub id or folder, frozen, and its image processor."""
    from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation  # slow

    print_message(f"loading {name}")
    model, found = Mask2FormerForUniversalSegmentation.from_pretrained(name, output_loading_info=True)
    if found["missing_keys"]:
        raise ValueError(f"not a whole Mask2Former: {len(found['missing_keys'])} of its tensors are missing")
    if model.config.num_labels != len(CLASSES):
        raise ValueError(f"knows {model.config.num_labels} classes, where COCO has {len(CLASSES)}")
    return model.requires_grad_(False).eval(), AutoImageProcessor.from_pretrained(name, use_fast=False)


@torch.no_grad()
def detect(image: Image.Image) -> Objects:
    """All objects that the detector sees, whatever their scores."""
    detector, processor, _, _ = load()
    inputs = processor(image, return_tensors="pt").to(detector.device)
    size = [(image.height, image.width)]
    options = {"threshold": 0.0, "target_sizes": size, "return_binary_maps": True}
    (result,) = processor.post_process_instance_segmentation(detector(**inputs), **options)
    objects: Objects = {}
    for entry, found in zip(result["segments_info"], result["segmentation"], strict=True):
        mask = Image.fromarray((found.cpu().numpy() > 0).astype("uint8") * 255)
        box = mask.getbbox()
        if box:
            objects.setdefault(CLASSES[entry["label_id"]], []).append(Detection(box, entry["score"], mask))
    return objects


def colours_of(image: Image.Image, name: str, detections: Sequence[Detection]) -> list[str]:
    """The colour of each object of a class, by CLIP, which sees it alone on grey."""
    _, _, model, processor = load()
    grey = Image.new("RGB", image.size, "#999")
    crops = []
    for each in detections:
        shown = Image.composite(image, grey, each.mask) if each.mask else image
        left, top, right, bottom = each.box
        crops.append(shown.crop((round(left), round(top), round(right), round(bottom))))
    scores = embed_images(model, processor, crops) @ colour_embeddings(os.environ.get("GENEVAL_CLIP", ""), name).T
    return [COLOURS[best] for best in scores.argmax(1).tolist()]


@functools.cache
@torch.no_grad()
def colour_embeddings(clip: str, name: str) -> torch.Tensor:
    """(colours, D): the mean of CLIP's embeddings of the COLOUR_PROMPTS for a class, of length 1. clip: its source."""
    _, _, model, processor = load()
    rows = []
    for colour in COLOURS:
        texts = [prompt.format(colour, name) for prompt in COLOUR_PROMPTS]
        mean = embed_prompts(model, processor, texts).mean(0)
        rows.append(mean / mean.norm())
    return torch.stack(rows)


def offload() -> None:
    """Move the networks to the CPU until they are needed again, if REWARD_OFFLOAD is 1."""
    if wants_offload():
        for detector, _ in DETECTORS.values():
            detector.to("cpu")
        colour_embeddings.cache_clear()
    offload_clips()


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
geneval.settings = ("GENEVAL_DETECTOR", "GENEVAL_CLIP")  # type: ignore[attr-defined]
geneval.check_metadata = check_metadata  # type: ignore[attr-defined]
geneval.load = load  # type: ignore[attr-defined]
geneval.offload = offload  # type: ignore[attr-defined]
