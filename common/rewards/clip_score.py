"""CLIPScore: does the image fit its prompt?

    torchrun --standalone flow_grpo.py --reward clip_score

It needs the weights of a CLIP. The environment variable CLIP_SCORE_MODEL names them, as a hub id or a folder in
transformers' layout, with the files of the tokenizer and the image processor. The default is
openai/clip-vit-large-patch14, 1.7 GB in fp32.
"""

from common.rewards._clip import Clip, embed_images, embed_prompts, load_processor, read_clip
from common.rewards._networks import load_network, offload, weights_of

import torch
from PIL.Image import Image


def clip_score(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """100 max(cos(image, prompt), 0) of CLIP's embeddings, which is torchmetrics' CLIPScore.

    In [0, 100]; images that fit their prompt score about 25 to 35. The paper (arXiv 2104.08718) has 2.5 instead of
    100. The reward in DiffusionNFT's code is this score / 100, with images resized bilinearly (here bicubically, as
    CLIP's processor has it).
    """
    return score(images, prompts, metadata).tolist()


def score(images: list[Image] | torch.Tensor, prompts: list[str], metadata: list[dict]) -> torch.Tensor:
    """clip_score (B,) of PIL images; or, with the gradient, of pixels (B, 3, H, W) in [0, 1]."""
    model, processor = load()
    products = embed_images(model, processor, images) * embed_prompts(model, processor, prompts)  # (B, D)
    return 100 * products.sum(1).clamp(min=0)


def load() -> Clip:
    """The CLIPModel, on own_device, and its processor."""
    source = weights_of("CLIP_SCORE_MODEL", "openai/clip-vit-large-patch14")
    return load_network(source, read_clip), load_processor(source)


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
clip_score.settings = ("CLIP_SCORE_MODEL",)  # type: ignore[attr-defined]
clip_score.of_pixels = score  # type: ignore[attr-defined]
clip_score.load = load  # type: ignore[attr-defined]
clip_score.offload = offload  # type: ignore[attr-defined]
