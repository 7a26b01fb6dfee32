"""How a step of Flow-GRPO grows with GPUs, group size, resolution and steps: modelled from counted FLOPs and bytes.

    python benchmarks/scaling.py | tee docs/lab/records/scaling.txt

Nothing of it was run on eight GPUs. SD3.5-medium with recipes/sd35_medium_8x80gb.sh, by its published configs, in bf16,
on nodes of eight H100 SXM, with engines (--rollout vllm --rollout_batch_size 16 --engine_with compile) except in the
rows of --rollout local, which is the recipe's own. FLOPs, memory and rates are those of tools/plan.py: 35 % of the
matrix rate of bf16, which one H100 reached with --train_with compile, and 20 % of TF32's for the VAE. Traffic is
counted as FSDP2 makes it with the scripts' settings, and assumed not to overlap with the computing. --shard_ranks is 0,
as by default, except in the rows of shards: the same function as in a run chooses between a copy of the weights for
each rank and shards of a node.
Micro-batches are the largest of at most 9 images that divide a rank's share of an optimizer step:

- of shards a pass gathers the frozen weights twice, forward and backward, and a pass without gradient once;
- without an engine the weights are gathered once to sample, or a block at a time in every pass;
- an optimizer step exchanges a LoRA's gradients in fp32 once; of full weights every pass does, within the node (grads)
  and between the copies, over the nodes where there are several (copies);
- every rank hands its engine the trained weights through the host's memory, and takes back latents and images.
"""

import functools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu import repair_torchvision
from common.models.loading import family_class
from common.plan import needs
from common.plan.memory import Blueprint
from common.weights.lora import make_lora
from tests.published_models import write_configs
from tools.plan import COMPILED_UTILISATION, DEVICES, UTILISATION, pipe_bytes

import torch

MODEL = "stabilityai/stable-diffusion-3.5-medium"
RANKS_OF_A_NODE = 8
UPDATES = 2  # optimizer steps of a rollout
GPU = DEVICES["h100-80"]
WITHIN_NODE = 300e9  # bytes/s of a rank's collectives: about two thirds of NVLink 4's 450e9 in a direction
BETWEEN_NODES = 40e9  # of a rank with a 400 Gb/s adapter of its own
TO_ENGINE = 2e9  # through the host's memory, with a GPU's copy at either end

RECIPE = needs.PlannedRun(
    num_images=48 * 24,
    sampled_steps=10,
    trained_steps=9,
    policies=("default", "ema", "reference"),
    acting_passes=1,
    num_eval_images=1000,
    micro_batch_size=9,
    trained_guidance=4.5,
    dtype="bfloat16",
    guidance_scale=4.5,
    rollout="vllm",
    rollout_batch_size=16,
    recomputes_log_probs=True,
    num_prompts=48,
    train_with=("compile",),
    engine_with=("compile",),
    eval_num_inference_steps=40,
    ranks=8,
    ranks_here=RANKS_OF_A_NODE,
)


def traffic(blueprint, w):
    """{what: (bytes of a rank's step, bytes/s)}."""
    is_lora = blueprint.num_trained < blueprint.num_weights
    num_copies = w.ranks // w.shards
    batches = -(-w.images_of_a_rank // w.micro_batch_images)
    weights = blueprint.dtype.itemsize * blueprint.num_weights * (1 - 1 / w.shards)
    # a pass of the update gathers twice, one without gradient once
    times = 2 * batches * w.trained_steps
    if w.has_engine:
        times += batches * w.trained_steps  # recomputed log-probs
    else:
        times += 1 if w.gathers_whole else batches * w.sampled_steps
    gradients = 4 * blueprint.num_trained
    exchanges = UPDATES if is_lora else batches * w.trained_steps
    over_copies = 2 * gradients / w.shards * (1 - 1 / num_copies)
    return {
        "gather": (times * weights, WITHIN_NODE),
        "grads": (exchanges * gradients * (1 - 1 / w.shards), WITHIN_NODE),
        "copies": (exchanges * over_copies, BETWEEN_NODES if w.ranks > w.ranks_here else WITHIN_NODE),
        "pipe": (sum(pipe_bytes(blueprint, w)) if w.has_engine else 0, TO_ENGINE),
    }


def with_micro_batch(w):
    """The same with the largest micro-batch, of at most its own size, that divides a rank's share of an update."""
    share = w.images_of_a_rank // UPDATES
    fitting = max(n for n in range(1, w.micro_batch_images + 1) if share % n == 0)
    return replace(w, micro_batch_size=fitting)


def laid_out(blueprint, w):
    """(The Workload with the micro-batch and the copies of the weights that its run has, its Costs)."""
    w = with_micro_batch(w)
    costs = needs.measure(blueprint, w)
    chosen = needs.choose_shard_ranks(blueprint, w, costs, GPU.memory_gb * needs.GB)
    return replace(w, shard_ranks=chosen), costs


def print_times(name, blueprint, w):
    """Seconds of a rank's step, images a second and GPU, seconds of an evaluation, and the peak of a GPU's memory."""
    w, costs = laid_out(blueprint, w)
    rate = GPU.bfloat16 * 1e12 * COMPILED_UTILISATION
    vae_rate = GPU.tf32 * 1e12 * UTILISATION
    computing = {phase: done.seconds(rate, vae_rate) for phase, done in needs.work(w, costs).items()}
    spent = [computing["rollout"], computing.get("old log-probs", 0), computing["update"]]
    spent += [num_bytes / bytes_per_s for num_bytes, bytes_per_s in traffic(blueprint, w).values()]
    parts = [part for part in needs.memory_parts(blueprint, w, costs) if part.place == "device"]
    peak = max(needs.phase_sums(parts).values()) / needs.GB
    cells = [f"{value:8.2f}" for value in spent]
    per_gpu = w.num_images / sum(spent) / w.ranks
    tail = f"{sum(spent):8.1f}{per_gpu:10.3f}{computing['evaluation']:7.1f}{peak:7.1f}"
    print(f"{name:26}{w.images_of_a_rank:6}{w.micro_batch_images:4}{w.shards:7}{''.join(cells)}{tail}")


def print_bytes(name, blueprint, w):
    """GB of a rank's step."""
    w, _ = laid_out(blueprint, w)
    cells = [f"{num_bytes / needs.GB:9.1f}" for num_bytes, _ in traffic(blueprint, w).values()]
    print(f"{name:33}{''.join(cells)}")


def workloads():
    """{name: PlannedRun}."""
    rows = {}
    for ranks in (8, 16, 32, 72, 144, 288):  # the scripts take those that divide 1,152 images in 2 updates
        rows[f"{ranks} GPUs, 48 x 24 images"] = replace(RECIPE, ranks=ranks)
    for ranks in (8, 64, 256, 1024):
        rows[f"{ranks} GPUs, 144 images each"] = replace(
            RECIPE, ranks=ranks, num_images=144 * ranks, num_prompts=6 * ranks
        )
    for ranks in (8, 1024):
        rows[f"{ranks} GPUs, shards"] = replace(rows[f"{ranks} GPUs, 144 images each"], shard_ranks=RANKS_OF_A_NODE)
    rows["8 GPUs, groups of 48"] = replace(RECIPE, num_images=2 * RECIPE.num_images)
    rows["8 GPUs, 20 steps"] = replace(RECIPE, sampled_steps=20, trained_steps=19)
    rows["8 GPUs, window of 2 steps"] = replace(RECIPE, trained_steps=2)
    rows["8 GPUs, 256 x 256"] = replace(RECIPE, image_size=(256, 256))
    rows["8 GPUs, 1024 x 1024"] = replace(RECIPE, image_size=(1024, 1024), micro_batch_size=1, rollout_batch_size=2)
    rows["8 GPUs, --rollout local"] = replace(RECIPE, rollout="local")
    by_block = {"shard_ranks": RANKS_OF_A_NODE, "train_with": ("gather_blocks", "compile")}
    rows["8 GPUs, local, by block"] = replace(RECIPE, rollout="local", **by_block)
    return rows


def main():
    print(__doc__.split("\n\n")[2])
    times = ("images", "mb", "shards", "rollout", "old lp", "update", "gather", "grads", "copies", "pipe", "step")
    times += ("img/s/GPU", "eval", "GB")
    repair_torchvision()  # before diffusers is imported beside a CPU build of torch
    folder = Path(tempfile.mkdtemp())
    family = family_class(write_configs(MODEL, folder))
    for kind, rank in (("LoRA of rank 32", 32), ("full weights", 0)):
        lora = make_lora(family, rank=rank, alpha=2 * rank or 1)
        blueprint: Any = Blueprint(family, str(folder), lora, torch.bfloat16)
        for counted in ("velocity", "decoding"):  # each kind of pass once, as the rows share them
            setattr(blueprint, counted, functools.cache(getattr(blueprint, counted)))
        widths = (6, 4, 7, *[8] * 8, 10, 7, 7)
        title = f"{kind}, seconds"
        print(f"\n{title:26}" + "".join(f"{name:>{width}}" for name, width in zip(times, widths, strict=True)))
        for name, w in workloads().items():
            print_times(name, blueprint, w)
        title = f"{kind}, GB of a rank's step"
        print(f"\n{title:33}" + "".join(f"{name:>9}" for name in traffic(blueprint, RECIPE)))
        for name, w in workloads().items():
            print_bytes(name, blueprint, w)


if __name__ == "__main__":
    main()
