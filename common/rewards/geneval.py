"""GenEval: are the objects that a prompt names there, in number, colour and place? (arXiv 2310.11513)

    torchrun --standalone flow_grpo.py --reward geneval --train_prompts evaluation_metadata.jsonl ...

Prompts are the published .jsonl records: {"prompt", "tag", "include": [{"class", "count", "color", "position"}],
"exclude"}. The score is 1 where all is right, else 0. `--reward geneval.soft` trains on fractions instead, as
Flow-GRPO does (_geneval_rules.py: fraction_right).

GENEVAL_DETECTOR names the detector of COCO's 80 objects, a hub id or a folder: a Mask2Former of transformers (default
facebook/mask2former-swin-small-coco-instance), or assets/nanodet, which is in this repository and needs no GPU. A
Mask2Former comes with a CLIP for colours, GENEVAL_CLIP (default openai/clip-vit-large-patch14). With NanoDet colours
are judged by the pixels of a box (_box_colours.py), unless GENEVAL_CLIP is set. GENEVAL_DTYPE=bfloat16 lets a NanoDet
compute in bf16, which takes a third of the time on a CPU with AMX.

The published code has Mask2Former and CLIP from mmdet and open_clip. We could not compare the published weights.
transformers resizes an image to a square for the detector and finds masks at 384 x 384, where mmdet keeps the image's
shape; boxes are that coarse. NanoDet is another and a weaker judge, with thresholds and classes of its own
(detector.json in its folder; docs/lab/scenes.md says what it gets wrong): a score by it is no published GenEval number.
Call it "GenEval's rules, NanoDet at .3".
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

from common.rewards import _geneval_rules as rules
from common.rewards._box_colours import colours_of_boxes
from common.rewards._clip import embed_images, embed_prompts, load_processor, read_clip
from common.rewards._geneval_rules import CLASSES, COLOURS, Detection, Objects, fraction_right, is_right, kept
from common.rewards._nanodet import NanoDet, detect_in, read_nanodet, read_settings
from common.rewards._networks import Source, check_hub, load_network, offload, read_whole, refusing_weights, weights_of

import torch
from PIL import Image

COLOUR_PROMPTS = ("a photo of a {0} {1}", "a photo of a {0}-colored {1}", "a photo of a {0} object")
THRESHOLD = {"counting": 0.9}  # of a detection's score, by the prompt's tag
OTHER_THRESHOLD = 0.3


# ---- the reward ------------------------------------------------------------------------------------------------------
def geneval(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[dict[str, float]]:
    """score: 1 where the image is right by the published rules (is_right), else 0; soft: fraction_right."""
    rgb = [image.convert("RGB") for image in images]
    scores = []
    for image, record, objects in zip(rgb, metadata, find_objects(rgb, metadata), strict=True):
        colours = functools.partial(colours_of, image)
        right = float(is_right(record, objects, colours))
        scores.append({"score": right, "soft": fraction_right(record, objects, colours)})
    return scores


def check_metadata(record: dict) -> None:
    """Raise ValueError where a prompt's record is not GenEval's, or names a class that NanoDet is not to look for."""
    rules.check_metadata(record)
    source = detector_source()
    with refusing_weights(source):
        settings = read_settings(source[1])
    for clause in [*record["include"], *(record.get("exclude") or [])]:
        if settings and clause["class"] not in settings["competing"]:
            told = ", ".join(settings["competing"])
            raise ValueError(f"geneval: {source[0]}={source[1]} looks for no {clause['class']}, only for {told}")


def find_objects(images: list[Image.Image], metadata: list[dict]) -> list[Objects]:
    """The objects of each image that are surer than the threshold of its record's tag."""
    settings = read_settings(detector_source()[1])
    if settings:
        found = detect_in(load()[0], images, detector_dtype())
        thresholds, other = settings["thresholds"], settings["other_threshold"]
    else:
        found = [detect(image) for image in images]
        thresholds, other = THRESHOLD, OTHER_THRESHOLD
    tags = [record["tag"] for record in metadata]
    return [kept(objects, thresholds.get(tag, other)) for objects, tag in zip(found, tags, strict=True)]


# ---- the networks ----------------------------------------------------------------------------------------------------
def detector_source() -> Source:
    return weights_of("GENEVAL_DETECTOR", "facebook/mask2former-swin-small-coco-instance")


def detector_dtype() -> torch.dtype:
    """GENEVAL_DTYPE; raises ValueError if it is neither float32 nor bfloat16."""
    name = os.environ.get("GENEVAL_DTYPE") or "float32"
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"GENEVAL_DTYPE={name}: must be float32 or bfloat16")
    return getattr(torch, name)


def load() -> tuple[Any, Any, Any, Any]:
    """The detector and its image processor, the CLIP and its processor, None for what a NanoDet does without; raises
    load_network's ValueError, and one where GENEVAL_DTYPE cannot be."""
    source, dtype = detector_source(), detector_dtype()
    if dtype != torch.float32 and not read_settings(source[1]):
        raise ValueError(f"GENEVAL_DTYPE=bfloat16: needs a NanoDet in GENEVAL_DETECTOR, not {source[1]}")
    detector = load_network(source, read_detector)
    is_nanodet = isinstance(detector, NanoDet)
    processor = None if is_nanodet else load_image_processor(source)
    if is_nanodet and not os.environ.get("GENEVAL_CLIP"):
        return detector, processor, None, None
    clip = weights_of("GENEVAL_CLIP", "openai/clip-vit-large-patch14")
    return detector, processor, load_network(clip, read_clip), load_processor(clip)


def read_detector(name: str) -> Any:
    """The NanoDet of a folder that has a detector.json, or the Mask2Former of a hub id or folder."""
    if read_settings(name):
        return read_nanodet(name)
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
        check_hub(source[1])
        return AutoImageProcessor.from_pretrained(source[1], use_fast=False)


def detect(image: Image.Image) -> Objects:
    """All objects that the Mask2Former sees, whatever their scores."""
    detector, processor, _, _ = load()
    inputs = processor(image, return_tensors="pt").to(detector.device)
    (result,) = processor.post_process_instance_segmentation(
        detector(**inputs), threshold=0.0, target_sizes=[(image.height, image.width)], return_binary_maps=True
    )
    objects: Objects = {}
    if not result["segments_info"]:  # then `segmentation` is one empty map, of no object
        return objects
    for entry, found in zip(result["segments_info"], result["segmentation"], strict=True):
        mask = Image.fromarray((found.cpu().numpy() > 0).astype("uint8") * 255)
        box = mask.getbbox()
        if box:
            objects.setdefault(CLASSES[entry["label_id"]], []).append(Detection(box, entry["score"], mask))
    return objects


def colours_of(image: Image.Image, name: str, detections: Sequence[Detection]) -> list[str]:
    """The colour of each object of a class: by CLIP, which sees it alone on grey, or by the pixels of its box."""
    _, _, model, processor = load()
    if model is None:
        return colours_of_boxes(image, detections)
    grey = Image.new("RGB", image.size, "#999")
    crops = []
    for each in detections:
        shown = Image.composite(image, grey, each.mask) if each.mask else image
        left, top, right, bottom = each.box
        crops.append(shown.crop((round(left), round(top), round(right), round(bottom))))
    scores = embed_images(model, processor, crops) @ colour_embeddings(os.environ.get("GENEVAL_CLIP", ""), name).T
    return [COLOURS[best] for best in scores.argmax(1).tolist()]


@functools.cache
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
geneval.settings = ("GENEVAL_DETECTOR", "GENEVAL_CLIP", "GENEVAL_DTYPE")  # type: ignore[attr-defined]
geneval.parts = ("soft",)  # type: ignore[attr-defined]
geneval.check_metadata = check_metadata  # type: ignore[attr-defined]
geneval.load = load  # type: ignore[attr-defined]
geneval.offload = offload  # type: ignore[attr-defined]
