"""How far the velocities of a quantised base are from the model's own:  python benchmarks/base_weights.py

Of the embedded model, on 32 held-out prompts at the three timesteps of its evaluation. It needs torchao.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.data import read_prompts
from common.models.base_weights import quantise
from common.models.cpu import repair_torchvision
from common.models.family import family_class, load_model
from common.options import ASSETS

import torch

repair_torchvision()


@torch.no_grad()
def distances(base_weights: str, dtype: torch.dtype) -> list[float]:
    """|v - v_full| / |v_full| at each timestep."""
    folder = ASSETS / "embedded"
    model = load_model(family_class(folder), folder, dtype, torch.device("cpu"))
    conditioning = model.encode_prompts(read_prompts(ASSETS / "eval_prompts.txt").prompts[:32], 16)
    timesteps, _, shape = model.schedule(3, 32, 96)
    x = torch.randn(32, *shape, generator=torch.Generator().manual_seed(1))
    full = [model.predict_velocity(x, timestep, conditioning) for timestep in timesteps]
    quantise(model, base_weights)
    quantised = [model.predict_velocity(x, timestep, conditioning) for timestep in timesteps]
    return [((v - v_full).norm() / v_full.norm()).item() for v, v_full in zip(quantised, full, strict=True)]


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        for base_weights in ("int8", "fp8"):
            found = " ".join(f"{distance:.4f}" for distance in distances(base_weights, dtype))
            print(f"{base_weights} under {dtype}: {found}")
