"""How would people rate the image from 1 to 10, whatever its prompt? LAION's aesthetic predictor v2.

    torchrun --standalone flow_grpo.py --reward aesthetic

It needs two sets of weights, named by environment variables. AESTHETIC_CLIP is the CLIP whose image embeddings are
rated: a hub id or a folder in transformers' layout (default openai/clip-vit-large-patch14, 1.7 GB in fp32, which the
published predictor was trained on). AESTHETIC_MODEL is the predictor: a file such as the published
sac+logos+ava1-l14-linearMSE.pth, or a hub id or folder that contains aesthetic-model.pth (default
trl-lib/ddpo-aesthetic-predictor).
"""

from typing import Any

from common.rewards._clip import embed_images, in_chunks, load_processor, read_clip
from common.rewards._networks import find_file, load_network, offload, weights_of

import torch
from PIL.Image import Image


def aesthetic(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """A rating from about 1 to 10: linear layers, without activations between them, of the image's embedding.

    The embedding has length 1. Images of today's models score about 5 to 6.5. The prompt does not count.
    """
    return score(images, prompts, metadata).tolist()


def score(images: list[Image] | torch.Tensor, prompts: list[str], metadata: list[dict]) -> torch.Tensor:
    """aesthetic (B,) of PIL images; or, with the gradient, of pixels (B, 3, H, W) in [0, 1]."""
    model, processor, layers = load()
    return in_chunks(layers, embed_images(model, processor, images))[:, 0]


def load() -> tuple[Any, Any, torch.nn.Sequential]:
    """The CLIPModel, its processor, and the layers that rate its embeddings."""
    source = weights_of("AESTHETIC_CLIP", "openai/clip-vit-large-patch14")
    model = load_network(source, read_clip)
    layers = load_network(weights_of("AESTHETIC_MODEL", "trl-lib/ddpo-aesthetic-predictor"), read_layers)
    width = model.config.projection_dim
    if layers[0].in_features != width:
        raise ValueError(f"AESTHETIC_CLIP={source[1]}: embeddings of {width}, not of {layers[0].in_features}")
    return model, load_processor(source), layers


def read_layers(name: str) -> torch.nn.Sequential:
    """The predictor's linear layers, "layers.N.weight" and "layers.N.bias" of its file, ordered by N.

    The published predictor has dropouts between them, which have no weights and do nothing here.
    """
    tensors = torch.load(find_file(name, "aesthetic-model.pth"), map_location="cpu", weights_only=True)
    layers = torch.nn.Sequential()
    for number in sorted({int(name.split(".")[1]) for name in tensors}):
        weight = tensors[f"layers.{number}.weight"]  # (outputs, inputs)
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": tensors[f"layers.{number}.bias"]})
        layers.append(layer)
    if layers[-1].out_features != 1:
        raise ValueError("its last layer does not give one number")
    return layers


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
aesthetic.settings = ("AESTHETIC_MODEL", "AESTHETIC_CLIP")  # type: ignore[attr-defined]
aesthetic.of_pixels = score  # type: ignore[attr-defined]
aesthetic.load = load  # type: ignore[attr-defined]
aesthetic.offload = offload  # type: ignore[attr-defined]
