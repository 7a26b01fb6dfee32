"""LAION's aesthetic predictor v2: how would people rate the image from 1 to 10, whatever its prompt?

The environment variable AESTHETIC_MODEL names its weights: a file such as the published
sac+logos+ava1-l14-linearMSE.pth, or a hub id or folder with aesthetic-model.pth, by default
trl-lib/ddpo-aesthetic-predictor. AESTHETIC_CLIP names the CLIP whose embeddings it rates, as CLIP_SCORE_MODEL does; the
published ones go with the default, openai/clip-vit-large-patch14 (1.7 GB in fp32).
"""

import functools
from pathlib import Path

from common.rewards.clip_score import (
    embed_images,
    in_chunks,
    load_clip,
    load_processor,
    offload,
    own_device,
    refusing_weights,
    weights_of,
)

import torch


@torch.no_grad()
def aesthetic(images, prompts, metadata):
    """A rating from about 1 to 10: of the image's embedding, of length 1, by linear layers (no activation between).

    Images of today's models score about 5 to 6.5. The prompt does not count.
    """
    model, processor, layers = load()
    ratings = in_chunks(layers, embed_images(model, processor, images))  # (B, 1)
    return ratings[:, 0].tolist()


def load():
    """The CLIPModel, its processor and the layers on top."""
    source = weights_of("AESTHETIC_CLIP", "openai/clip-vit-large-patch14")
    model = load_clip(source)
    layers = load_layers(weights_of("AESTHETIC_MODEL", "trl-lib/ddpo-aesthetic-predictor"))
    width = model.config.projection_dim
    if layers[0].in_features != width:
        raise ValueError(f"AESTHETIC_CLIP={source[1]}: embeddings of {width}, not of {layers[0].in_features}")
    return model, load_processor(source), layers


@functools.cache
def load_layers(source):
    """The predictor's linear layers on own_device: "layers.N.weight" and "layers.N.bias" of its file, by rising N. The
    dropouts between them have no weights, and are left out.

    Raises:
        ValueError: as load_clip.
    """
    from huggingface_hub import hf_hub_download  # slow

    with refusing_weights(source):
        path = Path(source[1])
        if path.is_dir():
            path = path / "aesthetic-model.pth"
        elif not path.is_file():
            path = hf_hub_download(source[1], "aesthetic-model.pth")
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        layers = torch.nn.Sequential()
        for number in sorted({int(name.split(".")[1]) for name in tensors}):
            weight = tensors[f"layers.{number}.weight"]  # (outputs, inputs)
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
            layer.load_state_dict({"weight": weight, "bias": tensors[f"layers.{number}.bias"]})
            layers.append(layer)
        if layers[-1].out_features != 1:
            raise ValueError("its last layer does not give one number")
        return layers.requires_grad_(False).to(own_device())


aesthetic.settings = ("AESTHETIC_MODEL", "AESTHETIC_CLIP")
aesthetic.load = load
aesthetic.offload = offload
