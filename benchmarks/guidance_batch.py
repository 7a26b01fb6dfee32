"""Seconds of a guided forward and backward pass: both branches of guidance in one batch, or one after the other.

    OMP_NUM_THREADS=1 python benchmarks/guidance_batch.py

The embedded model with flow_grpo.py's LoRA, in fp32, on the CPU or the GPU at hand. The two ways take turns; medians of
five each, after one that is not counted.
"""

import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import models
from common.models import stable_diffusion_3
from tests.conftest import ROOT, policy_without_fsdp

import torch

BATCHES = (2, 32)
GUIDANCE = 4.5


def two_passes(forward, latents, timestep, conditioning, negative_conditioning):
    """What both_branches gives, by a pass for each branch."""
    negative = {name: row.expand_as(conditioning[name]) for name, row in negative_conditioning.items()}
    return forward(latents, timestep, conditioning), forward(latents, timestep, negative)


def seconds(model, way, inputs):
    """Of a forward pass without gradient, as in a rollout, and of one with its backward pass, as in an update."""
    stable_diffusion_3.both_branches = way
    began = now(model)
    with torch.no_grad():
        model.predict_velocity(*inputs)
    sampled = now(model)
    model.predict_velocity(*inputs).square().mean().backward()
    return sampled - began, now(model) - sampled


def now(model):
    """On a CPU the seconds that this process has had of it: other processes do not count."""
    if model.device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main(repetitions=5):
    model, _, _ = policy_without_fsdp()
    if torch.cuda.is_available():
        model.device = torch.device("cuda", 0)
        model.transformer.to(model.device)
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"# python benchmarks/guidance_batch.py: commit {git.stdout.strip()}, torch {torch.__version__}, {machine},")
    print(f"# {torch.get_num_threads()} thread(s); seconds (of a CPU: of its time), medians of {repetitions}, in turns")
    print("batch  way         forward  forward and backward")
    ways = {"one batch": models.both_branches, "two passes": two_passes}
    for batch in BATCHES:
        conditioning = model.encode_prompts(['a red sign that says "4711"'] * batch, 16)
        negative = model.encode_negative(GUIDANCE, 16)
        latents = torch.randn(batch, *model.schedule(3, 32, 96)[2], device=model.device)
        inputs = (latents, torch.tensor(700.0), conditioning, negative, GUIDANCE)
        found = {name: [] for name in ways}
        for _ in range(1 + repetitions):
            for name, way in ways.items():
                found[name].append(seconds(model, way, inputs))
        for name, times in found.items():
            forward, both = (statistics.median(column) for column in zip(*times[1:], strict=True))
            print(f"{batch:5}  {name:10}  {forward:7.4f}  {both:7.4f}", flush=True)


if __name__ == "__main__":
    main()
