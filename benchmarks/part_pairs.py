"""Parts of a training step before and after they were made faster, in turn on the same machine, as ratios.

    torchrun --standalone -m benchmarks.part_pairs adamw    # AdamW of as many tensors as the LoRA of SD3.5-medium has,
                                                            # each so small that what the host does is the time
    python -m benchmarks.part_pairs png                     # 64 pictures of 512 x 512 as PNG: four threads, or one
    python -m benchmarks.part_pairs ocr_scene               # 16 pictures of 512 x 512 read: two threads, or one
    python -m benchmarks.part_pairs merged --model FOLDER   # a pass with a LoRA of rank 32 merged into the weights,
                                                            # beside them, or none at all

The ways take turns, so that other work on the machine meets all of them. Prints medians, and of the ratios pair by pair
the median, least and greatest, for docs/lab/records/part_pairs.txt.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.cpu import repair_torchvision
from common.distributed import end_distributed, setup_distributed
from common.images import save_png
from common.rewards import ocr_scene

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.distributed.fsdp import fully_shard

Ways = dict[str, Callable[[], object]]
RANK = 32
NUM_TENSORS = 2 * (24 * 8 + 13 * 4)  # of SD3.5-medium's LoRA: two for each adapted matrix
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def adamw() -> Ways:
    """Two optimizers over equal parameters, which are FSDP's as in a run."""
    ways: Ways = {}
    for name, foreach in (("together", True), ("one by one", None)):
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(8, 8)) for _ in range(NUM_TENSORS))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ways[name] = optimizer.step
    return ways


def png() -> Ways:
    pictures = [picture(seed) for seed in range(64)]
    folder = Path(tempfile.mkdtemp())

    def write(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(save_png, [folder / f"{i}.png" for i in range(len(pictures))], pictures))

    return {"four threads": lambda: write(4), "one thread": lambda: write(1)}


def read_scenes() -> Ways:
    pictures = [picture(seed) for seed in range(16)]
    pools = {name: ThreadPoolExecutor(count) for name, count in (("two threads", 2), ("one thread", 1))}

    def read(name: str) -> None:
        ocr_scene._threads = lambda: pools[name]
        ocr_scene.read_scene(pictures)

    return {name: lambda name=name: read(name) for name in pools}


def picture(seed: int) -> Image.Image:
    """Smooth colours, noise of a decoder's size and a line of text."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
        (512, 512), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(coarse, dtype=np.int16) + rng.integers(-3, 4, (512, 512, 3))
    drawn = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    ImageDraw.Draw(drawn).text((60, 200), f"HELLO {seed}", fill="white", font=ImageFont.load_default(80))
    return drawn


def merged(model_dir: str, dtype: str) -> Ways:
    """A pass without gradient of one batch of 4 images of 256 x 256, as an evaluation makes."""
    import diffusers
    from peft import LoraConfig

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights="gaussian", target_modules=TARGETS)
    transformers = {}
    for name in ("merged", "beside", "none"):
        transformer = diffusers.SD3Transformer2DModel.from_pretrained(model_dir, subfolder="transformer", dtype=kind)
        if name != "none":
            transformer.add_adapter(lora)
        if name == "merged":
            transformer.fuse_lora()
        transformers[name] = transformer.requires_grad_(False)
    config = transformers["none"].config
    x = torch.randn(4, config.in_channels, 32, 32, dtype=kind)
    text = torch.randn(4, 77, config.joint_attention_dim, dtype=kind)
    pooled = torch.randn(4, config.pooled_projection_dim, dtype=kind)
    given = {"hidden_states": x, "encoder_hidden_states": text, "pooled_projections": pooled}

    def forward(name: str) -> None:
        with torch.no_grad():
            transformers[name](timestep=torch.full((4,), 500.0, dtype=kind), **given)

    return {name: lambda name=name: forward(name) for name in transformers}


def compare(title: str, ways: Ways, pairs: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # what only a first call does is no part of it
    for _ in range(pairs):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    print(f"{title}, commit {commit.stdout.strip()}, {torch.get_num_threads()} threads of torch")
    for name, times in seconds.items():
        print(f"  {name}: {1e3 * statistics.median(times):.1f} ms")
    first, *others = ways
    for other in others:
        ratios = sorted(after / before for after, before in zip(seconds[first], seconds[other], strict=True))
        print(f"  {first} / {other}: {statistics.median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["adamw", "png", "ocr_scene", "merged"])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--model", help="of merged: a folder of benchmarks/random_model.py")
    parser.add_argument("--dtype", default="float32", help="of merged")
    asked = parser.parse_args()
    repair_torchvision()
    if asked.part == "adamw":
        setup_distributed()
        compare("adamw", adamw(), asked.pairs)
        end_distributed()
    elif asked.part == "merged":
        compare(f"merged, {asked.dtype}", merged(asked.model, asked.dtype), asked.pairs)
    else:
        compare(asked.part, {"png": png, "ocr_scene": read_scenes}[asked.part](), asked.pairs)


if __name__ == "__main__":
    main()
