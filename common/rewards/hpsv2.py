"""HPSv2.1: which image would people prefer? A CLIP ViT-H-14 trained on 798,000 of their choices (arXiv 2306.09341).

    torchrun --standalone flow_grpo.py --reward hpsv2

It needs two things, named by environment variables. HPSV2_MODEL is the published weights, open_clip's: a file, or a hub
id with HPS_v2.1_compressed.pt in it (default xswu/HPSv2, 3.9 GB). HPSV2_PROCESSOR is a CLIP of the same size in
transformers' layout (default laion/CLIP-ViT-H-14-laion2B-s32B-b79K), for its config, tokenizer and image processor.
"""

from common.rewards._clip import Clip, embed_images, embed_prompts, load_processor
from common.rewards._networks import find_file, load_network, offload, weights_of
from common.rewards._open_clip import read_open_clip

import torch
import torch.nn.functional as F
from PIL import Image

FILE = "HPS_v2.1_compressed.pt"


def hpsv2(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """cos(image, prompt), which the published code prints.

    In fp32, where the published code runs in half precision on a GPU. An image that is not square is padded, as there.
    """
    return score(images, prompts, metadata).tolist()


def score(images: list[Image.Image] | torch.Tensor, prompts: list[str], metadata: list[dict]) -> torch.Tensor:
    """hpsv2 (B,) of PIL images; or, with the gradient, of pixels (B, 3, H, W) in [0, 1]."""
    model, processor = load()
    side = processor.image_processor.crop_size["height"]
    if isinstance(images, torch.Tensor):
        images = pad_pixels(images, side)
    else:
        images = [pad_to_square(image, side) for image in images]
    products = embed_images(model, processor, images) * embed_prompts(model, processor, prompts)  # (B, D)
    return products.sum(1)


def pad_to_square(image: Image.Image, side: int) -> Image.Image:
    """An image that is not square, its longest side resized to `side`, in the middle of a black square.

    That is HPSv2's transform (hpsv2/src/open_clip/transform.py at 866735e). CLIP's processor would cut the sides off.
    """
    if image.width == image.height:
        return image  # which the processor resizes
    scale = side / max(image.size)
    resized = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (side, side))
    square.paste(resized, ((side - resized.width) // 2, (side - resized.height) // 2))
    return square


def pad_pixels(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """pad_to_square of pixels (B, 3, H, W) in [0, 1], (B, 3, side, side) unless they are square, with the gradient."""
    height, width = pixels.shape[2:]
    if height == width:
        return pixels
    resized = [round(length * side / max(height, width)) for length in (height, width)]
    pixels = F.interpolate(pixels, resized, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = ((side - length) // 2 for length in resized)
    return F.pad(pixels, (left, side - resized[1] - left, top, side - resized[0] - top))


def load() -> Clip:
    """The CLIPModel with the published weights and its processor; raises load_network's ValueError."""
    source = weights_of("HPSV2_MODEL", "xswu/HPSv2")
    clip = weights_of("HPSV2_PROCESSOR", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
    processor = load_processor(clip)  # a megabyte, before the gigabytes
    return load_network(source, lambda name: read_open_clip(find_file(name, FILE), clip[1])), processor


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
hpsv2.settings = ("HPSV2_MODEL", "HPSV2_PROCESSOR")  # type: ignore[attr-defined]
hpsv2.of_pixels = score  # type: ignore[attr-defined]
hpsv2.load = load  # type: ignore[attr-defined]
hpsv2.offload = offload  # type: ignore[attr-defined]
