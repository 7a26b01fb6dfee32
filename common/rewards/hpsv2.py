"""HPSv2.1: which image would people prefer? A CLIP ViT-H-14 trained on 798,000 of their choices (arXiv 2306.09341).

    torchrun --standalone flow_grpo.py --reward hpsv2

It needs two things, named by environment variables. HPSV2_MODEL is the published weights, open_clip's: a file, or a hub
id with HPS_v2.1_compressed.pt in it (default xswu/HPSv2, 3.9 GB). HPSV2_PROCESSOR is a CLIP of the same size in
transformers' layout (default laion/CLIP-ViT-H-14-laion2B-s32B-b79K), for its config, tokenizer and image processor.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from common.rewards._networks import find_file, load_network, offload, weights_of
from common.rewards.clip_score import embed_images, embed_pixels, embed_prompts, load_processor, preprocess

import torch
import torch.nn.functional as F
from PIL import Image

if TYPE_CHECKING:  # slow
    from transformers import CLIPModel, CLIPProcessor

FILE = "HPS_v2.1_compressed.pt"
NAMES = {  # of open_clip, as regular expressions -> of transformers
    r"^visual\.class_embedding$": "vision_model.embeddings.class_embedding",
    r"^visual\.positional_embedding$": "vision_model.embeddings.position_embedding.weight",
    r"^visual\.conv1\.": "vision_model.embeddings.patch_embedding.",
    r"^visual\.ln_pre\.": "vision_model.pre_layrnorm.",  # spelt so in transformers
    r"^visual\.ln_post\.": "vision_model.post_layernorm.",
    r"^visual\.proj$": "visual_projection.weight",
    r"^visual\.transformer\.resblocks\.": "vision_model.encoder.layers.",
    r"^positional_embedding$": "text_model.embeddings.position_embedding.weight",
    r"^token_embedding\.": "text_model.embeddings.token_embedding.",
    r"^ln_final\.": "text_model.final_layer_norm.",
    r"^text_projection$": "text_projection.weight",
    r"^transformer\.resblocks\.": "text_model.encoder.layers.",
    r"\.ln_1\.": ".layer_norm1.",
    r"\.ln_2\.": ".layer_norm2.",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
    r"\.attn\.": ".self_attn.",
}
TRANSPOSED = ("visual_projection.weight", "text_projection.weight")  # open_clip multiplies by them from the right


@torch.no_grad()
def hpsv2(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """cos(image, prompt), which the published code prints.

    In fp32, where the published code runs in half precision on a GPU. An image that is not square is padded, as there.
    """
    model, processor = load()
    side = processor.image_processor.crop_size["height"]
    images = [pad_to_square(image, side) for image in images]
    products = embed_images(model, processor, images) * embed_prompts(model, processor, prompts)  # (B, D)
    return products.sum(1).tolist()


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


def of_pixels(pixels: torch.Tensor, prompts: list[str], metadata: list[dict]) -> torch.Tensor:
    """hpsv2 (B,) of pixels (B, 3, H, W) in [0, 1], with the gradient."""
    model, processor = load()
    with torch.no_grad():
        prompt_embeds = embed_prompts(model, processor, prompts)
    pixels = pad_pixels(pixels, processor.image_processor.crop_size["height"])
    return (embed_pixels(model, preprocess(processor, pixels)) * prompt_embeds).sum(1)


def pad_pixels(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """pad_to_square of pixels (B, 3, H, W) in [0, 1], (B, 3, side, side) unless they are square, with the gradient."""
    height, width = pixels.shape[2:]
    if height == width:
        return pixels
    resized = [round(length * side / max(height, width)) for length in (height, width)]
    pixels = F.interpolate(pixels, resized, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = ((side - length) // 2 for length in resized)
    return F.pad(pixels, (left, side - resized[1] - left, top, side - resized[0] - top))


def load() -> "tuple[CLIPModel, CLIPProcessor]":
    """The CLIPModel with the published weights and its processor; raises load_network's ValueError."""
    source = weights_of("HPSV2_MODEL", "xswu/HPSv2")
    clip = weights_of("HPSV2_PROCESSOR", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
    processor = load_processor(clip)  # a megabyte, before the gigabytes
    return load_network(source, lambda name: read_open_clip(find_file(name, FILE), clip[1])), processor


def read_open_clip(file: Path, config: str) -> "CLIPModel":
    """A CLIPModel of transformers, in fp32, with the weights of an open_clip file; config: its config's hub id or
    folder."""
    from transformers import CLIPConfig, CLIPModel  # slow

    checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    model = CLIPModel(CLIPConfig.from_pretrained(config))
    model.load_state_dict(rename(checkpoint.get("state_dict", checkpoint)), strict=True)
    return model


def rename(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """open_clip's tensors under transformers' names, in fp32; q, k and v come in one matrix there."""
    found = {}
    for name, tensor in tensors.items():
        if name == "attn_mask":  # a constant
            continue
        for pattern, replacement in NAMES.items():
            name = re.sub(pattern, replacement, name)
        tensor = tensor.float()
        if ".in_proj_" in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                found[name.replace(".in_proj_", f".{part}_proj.")] = rows
        else:
            found[name] = tensor.T.contiguous() if name in TRANSPOSED else tensor
    return found


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
hpsv2.settings = ("HPSV2_MODEL", "HPSV2_PROCESSOR")  # type: ignore[attr-defined]
hpsv2.of_pixels = of_pixels  # type: ignore[attr-defined]
hpsv2.load = load  # type: ignore[attr-defined]
hpsv2.offload = offload  # type: ignore[attr-defined]
