"""How far a quantised base and its text encoders are from the model's own:  python benchmarks/base_weights.py

Of the embedded model, on 32 held-out prompts, at the three timesteps of its evaluation. It needs torchao.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu import repair_torchvision
from common.files.prompts import read_prompts
from common.models.family import Conditioning, Family
from common.models.loading import family_class, load_model
from common.options import ASSETS
from common.weights.base_weights import quantise, quantise_encoders

import torch

repair_torchvision()


def load(dtype: torch.dtype, base_weights: str | None = None) -> Family:
    """The embedded model; with base_weights, its text encoders in int8."""
    folder = ASSETS / "embedded"
    model = load_model(family_class(folder), folder, dtype, torch.device("cpu"))
    if base_weights:
        quantise_encoders(model)
    return model


def encode(model: Family) -> Conditioning:
    """The embeddings of 32 held-out prompts."""
    return model.encode_prompts(read_prompts(ASSETS / "eval_prompts.txt").prompts[:32], 16)


@torch.no_grad()
def velocities(model: Family, conditioning: Conditioning) -> list[torch.Tensor]:
    """The velocity at each timestep, from latents that are equal in all calls."""
    timesteps, _, shape = model.schedule(3, 32, 96)
    x = torch.randn(32, *shape, generator=torch.Generator().manual_seed(1))
    return [model.predict_velocity(x, timestep, conditioning) for timestep in timesteps]


def distance(a: torch.Tensor, full: torch.Tensor) -> str:
    """|a - full| / |full|."""
    return f"{((a.float() - full.float()).norm() / full.float().norm()).item():.4f}"


def compare(dtype: torch.dtype) -> None:
    """Print a line for the encoders, and a line for each type of weight: the transformer alone, then with encoders."""
    model = load(dtype)
    conditioning = encode(model)
    full = velocities(model, conditioning)
    quantised = encode(load(dtype, "int8"))
    found = [f"{name} {distance(quantised[name], conditioning[name])}" for name in conditioning]
    print(f"text encoders in int8 under {dtype}: {', '.join(found)}")
    both = {"whole": model}
    for base_weights in ("int8", "fp8", "nf4"):
        both[base_weights] = load(dtype)
        quantise(both[base_weights], base_weights)
    for name, model in both.items():
        alone = zip(velocities(model, conditioning), full, strict=True)
        with_encoders = zip(velocities(model, quantised), full, strict=True)
        line = " ".join(distance(v, v_full) for v, v_full in alone)
        print(f"{name} under {dtype}: {line}; with encoders: {' '.join(distance(*pair) for pair in with_encoders)}")


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        compare(dtype)
