"""A CLIP whose weights open_clip saved, as transformers' CLIPModel.

This is no reward; `hpsv2` uses it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

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


def read_open_clip(file: Path, config: str) -> Any:
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
