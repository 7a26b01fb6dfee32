"""GenEval: are the objects that a prompt names there, in number, colour and place? (arXiv 2310.11513)

    torchrun --standalone flow_grpo.py --reward geneval --train_prompts evaluation_metadata.jsonl ...

Prompts are the published .jsonl records: {"prompt", "tag", "include": [{"class", "count", "color", "position"}],
"exclude"}. Two networks of transformers see the images, named by environment variables as hub ids or folders: a
Mask2Former of COCO's 80 objects, GENEVAL_DETECTOR (default facebook/mask2former-swin-small-coco-instance), and a CLIP
for colours, GENEVAL_CLIP (default openai/clip-vit-large-patch14). The published code has the same architectures from
mmdet and open_clip. We could not compare the published weights. transformers resizes an image to a square for the
detector and finds masks at 384 x 384, where mmdet keeps the image's shape; boxes are that coarse.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

from common.rewards._clip import embed_images, embed_prompts, load_processor, read_clip
from common.rewards._geneval_rules import CLASSES, COLOURS, Detection, Objects, check_metadata, is_right, kept
from common.rewards._networks import Source, load_network, offload, read_whole, refusing_weights, weights_of

import torch
from PIL import Image

COLOUR_PROMPTS = ("a photo of a {0} {1}", "a photo of a {0}-colored {1}", "a photo of a {0} object")
THRESHOLD = {"counting": 0.9}  # of a detection's score, by the prompt's tag
OTHER_THRESHOLD = 0.3


# ---- the reward ------------------------------------------------------------------------------------------------------
def geneval(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """1 where the image is right by the published rules (_geneval_rules.py), else 0."""
    scores = []
    for image, record in zip(images, metadata, strict=True):
        rgb = image.convert("RGB")
        objects = kept(detect(rgb), THRESHOLD.get(record["tag"], OTHER_THRESHOLD))
        scores.append(float(is_right(record, objects, functools.partial(colours_of, rgb))))
    return scores


# ---- the networks ----------------------------------------------------------------------------------------------------
def load() -> tuple[Any, Any, Any, Any]:
    """The detector and its image processor, the CLIP and its processor; raises load_network's ValueError."""
    source = weights_of("GENEVAL_DETECTOR", "facebook/mask2former-swin-small-coco-instance")
    detector = load_network(source, read_detector)
    clip = weights_of("GENEVAL_CLIP", "openai/clip-vit-large-patch14")
    return detector, load_image_processor(source), load_network(clip, read_clip), load_processor(clip)


def read_detector(name: str) -> Any:
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


def detect(image: Image.Image) -> Objects:
    """All objects that the detector sees, whatever their scores."""
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
