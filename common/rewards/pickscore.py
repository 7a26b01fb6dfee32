"""PickScore: which image would people pick? A CLIP trained on 500,000 of their choices (arXiv 2305.01569).

    torchrun --standalone flow_grpo.py --reward pickscore

It needs two things, named by environment variables as hub ids or as folders in transformers' layout: the weights,
PICKSCORE_MODEL (default yuvalkirstain/PickScore_v1, 3.9 GB in fp32), and the tokenizer and image processor that the
weights were trained with, PICKSCORE_PROCESSOR (default laion/CLIP-ViT-H-14-laion2B-s32B-b79K).
"""

from common.rewards._clip import Clip, embed_images, embed_prompts, load_processor, read_clip
from common.rewards._networks import load_network, offload, weights_of

import torch
from PIL.Image import Image


def pickscore(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """exp(logit_scale) cos(image, prompt) / 26, as in Flow-GRPO's code. Times 26 it is the paper's score.

    exp(logit_scale) is about 100, and images of today's models score about 0.75 to 0.9.
    """
    return score(images, prompts, metadata).tolist()


def score(images: list[Image] | torch.Tensor, prompts: list[str], metadata: list[dict]) -> torch.Tensor:
    """pickscore (B,) of PIL images; or, with the gradient, of pixels (B, 3, H, W) in [0, 1]."""
    model, processor = load()
    products = embed_images(model, processor, images) * embed_prompts(model, processor, prompts)  # (B, D)
    return model.logit_scale.exp() * products.sum(1) / 26


def load() -> Clip:
    """The CLIPModel and its processor."""
    model = weights_of("PICKSCORE_MODEL", "yuvalkirstain/PickScore_v1")
    processor = weights_of("PICKSCORE_PROCESSOR", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
    return load_network(model, read_clip), load_processor(processor)


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
pickscore.settings = ("PICKSCORE_MODEL", "PICKSCORE_PROCESSOR")  # type: ignore[attr-defined]
pickscore.of_pixels = score  # type: ignore[attr-defined]
pickscore.load = load  # type: ignore[attr-defined]
pickscore.offload = offload  # type: ignore[attr-defined]
