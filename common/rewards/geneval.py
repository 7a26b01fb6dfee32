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

from common.rewards._networks import Source, load_network, offload, read_whole, refusing_weights, weights_of
from common.rewards.clip_score import embed_images, embed_prompts, load_processor, read_clip

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
    scores = []
    for image, record in zip(images, metadata, strict=True):
        rgb = image.convert("RGB")
        objects = kept(detect(rgb), THRESHOLD.get(record["tag"], OTHER_THRESHOLD))
        scores.append(float(is_right(record, objects, functools.partial(colours_of, rgb))))
    return scores


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
    fulfilled: list[list[Detection]] = []  # the objects of each clause; none where it is not fulfilled
    for clause in record["include"]:
        name = clause["class"]
        found = objects.get(name, [])[: clause["count"]]
        is_fulfilled = len(found) == clause["count"]
        if is_fulfilled and "color" in clause:
            is_fulfilled = all(colour == clause["color"] for colour in colours(name, found))
        if is_fulfilled and "position" in clause:
            place, number = clause["position"]
            others = fulfilled[number]
            is_fulfilled = len(others) > 0 and all(place in places_of(a, b) for a in found for b in others)
        fulfilled.append(found if is_fulfilled else [])
    excluded = record.get("exclude", [])
    too_many = any(len(objects.get(clause["class"], [])) >= clause["count"] for clause in excluded)
    return all(fulfilled) and not too_many


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
def load() -> "tuple[Mask2FormerForUniversalSegmentation, Any, CLIPModel, CLIPProcessor]":
    """The detector and its image processor, the CLIP and its processor; raises load_network's ValueError."""
    source = weights_of("GENEVAL_DETECTOR", "facebook/mask2former-swin-small-coco-instance")
    detector = load_network(source, read_detector)
    clip = weights_of("GENEVAL_CLIP", "openai/clip-vit-large-patch14")
    return detector, load_image_processor(source), load_network(clip, read_clip), load_processor(clip)


def read_detector(name: str) -> "Mask2FormerForUniversalSegmentation":
    """The Mask2Former of a hub id or folder."""
    from transformers import Mask2FormerForUniversalSegmentation  # slow

    model = read_whole(Mask2FormerForUniversalSegmentation, name, "Mask2Former")
    if model.config.num_labels != len(CLASSES):
        raise ValueError(f"knows {model.config.num_labels} classes, where COCO has {len(CLASSES)}")
    return model


@functools.cache
def load_image_processor(source: Source) -> Any:  # of Mask2Former
    """The detector's image processor; raises ValueError as load_network."""
    from transformers import AutoImageProcessor  # slow

    with refusing_weights(source):
        return AutoImageProcessor.from_pretrained(source[1], use_fast=False)


@torch.no_grad()
def detect(image: Image.Image) -> Objects:
    """All objects that the detector sees, whatever their scores."""
    detector, processor, _, _ = load()
    inputs = processor(image, return_tensors="pt").to(detector.device)
    (result,) = processor.post_process_instance_segmentation(
        detector(**inputs), threshold=0.0, target_sizes=[(image.height, image.width)], return_binary_maps=True
    )
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


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
geneval.settings = ("GENEVAL_DETECTOR", "GENEVAL_CLIP")  # type: ignore[attr-defined]
geneval.check_metadata = check_metadata  # type: ignore[attr-defined]
geneval.load = load  # type: ignore[attr-defined]
geneval.offload = offload  # type: ignore[attr-defined]
