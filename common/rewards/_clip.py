"""CLIP for rewards: embeddings of length 1 of images and prompts, equal whatever else is embedded with them.

This is no reward; those with a CLIP use it.
"""

import functools
from collections.abc import Callable
from typing import Any

from common.rewards._networks import Source, check_hub, read_whole, refusing_weights

import torch
import torch.nn.functional as F
from PIL.Image import Image

Clip = tuple[Any, Any]  # a CLIPModel of transformers, and its CLIPProcessor
CHUNK = 8  # images, or prompts, in a forward pass
MAX_TOKENS = 77  # of a prompt, both ends included: CLIP has no more positions, so longer prompts are cut


def read_clip(name: str) -> Any:  # a CLIPModel
    """The CLIPModel of a hub id or folder, in fp32."""
    from transformers import CLIPModel  # slow

    return read_whole(CLIPModel, name, "CLIP")


@functools.cache
def load_processor(source: Source) -> Any:  # a CLIPProcessor
    """The CLIPProcessor of a `source`. PIL resizes the images, so that scores do not depend on torchvision.

    Raises:
        ValueError: as load_network.
    """
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPProcessor  # slow

    name = source[1]
    with refusing_weights(source):
        check_hub(name)
        images = CLIPImageProcessorPil.from_pretrained(name)
        return CLIPProcessor(images, AutoTokenizer.from_pretrained(name))


def embed_images(model: Any, processor: Any, images: list[Image] | torch.Tensor) -> torch.Tensor:
    """Embeddings (B, D) of length 1 of B PIL images of any size; or, with the gradient, of pixels (B, 3, H, W) in
    [0, 1]."""
    if isinstance(images, torch.Tensor):
        pixels = preprocess(processor, images)  # (B, 3, 224, 224)
    else:
        pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    embeddings = in_chunks(lambda rows: model.get_image_features(rows).pooler_output, pixels.to(model.device))
    return embeddings / embeddings.norm(dim=-1, keepdim=True)


def preprocess(processor: Any, pixels: torch.Tensor) -> torch.Tensor:
    """What the image processor makes of pixels (B, 3, H, W) in [0, 1], (B, 3, 224, 224): resized, cut and normalised.

    The gradient goes through. PIL rounds to bytes before and after it resizes, which changes a score a little: see
    docs/rewards.md.
    """
    config = processor.image_processor
    height, width = pixels.shape[2:]
    shortest = config.size["shortest_edge"]
    resized = [shortest * side // min(height, width) for side in (height, width)]
    pixels = F.interpolate(pixels, resized, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (resized[0] - config.crop_size["height"]) // 2, (resized[1] - config.crop_size["width"]) // 2
    pixels = pixels[:, :, top : top + config.crop_size["height"], left : left + config.crop_size["width"]]
    mean, std = pixels.new_tensor([config.image_mean, config.image_std])[:, :, None, None]  # (3, 1, 1) each
    return (pixels - mean) / std


def embed_prompts(model: Any, processor: Any, prompts: list[str]) -> torch.Tensor:
    """Embeddings (B, D) of length 1 of B prompts, each cut to MAX_TOKENS tokens with its end token kept."""
    tokens = processor.tokenizer(
        prompts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
    )["input_ids"]  # (B, 77)
    # padding needs no mask: attention is causal, and the embedding is read at the prompt's end
    embeddings = in_chunks(lambda rows: model.get_text_features(rows).pooler_output, tokens.to(model.device))
    return embeddings / embeddings.norm(dim=-1, keepdim=True)


def in_chunks(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """function(rows) for rows (B, ...), in calls of exactly CHUNK rows; the last call is filled up with the last row.

    Matrix products of another size round differently. Without a fixed size, an image's score would depend on how many
    images are scored with it.
    """
    parts = []
    for chunk in rows.split(CHUNK):
        fill = chunk[-1:].expand(CHUNK - len(chunk), *chunk.shape[1:])
        parts.append(function(torch.cat([chunk, fill]))[: len(chunk)])
    return torch.cat(parts)
