"""How a step of Flow-GRPO grows with GPUs, group size, resolution and steps: modelled from counted FLOPs and bytes.

    python benchmarks/scaling.py | tee docs/records/scaling.txt

Nothing of it was run on a GPU. SD3.5-medium with the paper's recipe (README.md), by its published configs, in bf16, on
nodes of eight H100 SXM. FLOPs and memory are --plan's (common/plan.py), at 40 % of the matrix rate. Traffic is counted
as FSDP2 makes it with the scripts' settings, and assumed not to overlap with the computing. Rows of 48 x 24 images, and
of 1024 x 1024, are of micro-batches of one image, the others of two:

- a pass gathers the frozen weights of a node's shards twice, forward and backward, and a pass without gradient once;
- an optimizer step exchanges a LoRA's gradients in fp32 once; of full weights every pass does, within the node and over
  the nodes;
- every rank hands its engine the trained weights through the host's memory, and takes back latents and images.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import plan
from common.blueprint import Blueprint
from common.models import find_family
from common.policy import make_lora
from tests.published_models import write_configs

import torch

MODEL = "stabilityai/stable-diffusion-3.5-medium"
RANKS_OF_A_NODE = 8
UPDATES = 4  # optimizer steps of a rollout
WITHIN_NODE = 300e9  # bytes/s of a rank's collectives: about two thirds of NVLink 4's 450e9 in a direction
BETWEEN_NODES = 40e9  # of a rank with a 400 Gb/s adapter of its own
TO_ENGINE = 2e9  # through the host's memory, with a GPU's copy at either end

PAPER = plan.Workload(
    num_images=48 * 24,
    sampled_steps=10,
    trained_steps=9,
    policies=("default",),
    num_eval_images=1000,
    micro_batch_images=2,
    trained_guidance=4.5,
    dtype="bfloat16",
    guidance_scale=4.5,
    rollout="vllm",
    rollout_batch_size=8,
    old_log_prob="recompute",
    num_prompts=48,
    eval_num_inference_steps=40,
    ranks=8,
    ranks_here=RANKS_OF_A_NODE,
)


def seconds(blueprint, w, costs):
    """{what: seconds} of a rank's step, and its FLOPs of an evaluation apart."""
    rate = plan.DEVICES["h100-80"].bfloat16 * 1e12 * plan.UTILISATION
    spent = {phase: flops / rate for phase, flops in plan.work(w, costs).items()}
    is_lora = blueprint.num_trained < blueprint.num_weights
    num_copies = w.ranks // w.shards
    passes = -(-w.images_of_a_rank // w.micro_batch_images) * w.trained_steps
    weights = blueprint.dtype.itemsize * blueprint.num_weights * (1 - 1 / w.shards)
    # recomputed log-probs gather once, a pass of the update twice
    spent["gather weights"] = 3 * passes * weights / WITHIN_NODE
    gradients = 4 * blueprint.num_trained
    exchanges = UPDATES if is_lora else passes
    over_copies = 2 * gradients / w.shards * (1 - 1 / num_copies)
    over_copies /= BETWEEN_NODES if w.ranks > w.ranks_here else WITHIN_NODE
    spent["exchange gradients"] = exchanges * (gradients * (1 - 1 / w.shards) / WITHIN_NODE + over_copies)
    spent["engine's pipe"] = sum(plan.pipe_bytes(blueprint, w)) / TO_ENGINE
    return spent


def row(name, blueprint, w):
    costs = plan.measure(blueprint, w)
    spent = seconds(blueprint, w, costs)
    evaluation = spent.pop("evaluation")
    parts = [part for part in plan.memory_parts(blueprint, w, costs) if part.place == "device"]
    peak = max(plan.phase_sums(parts).values()) / plan.GB
    total = sum(spent.values())
    cells = [f"{value:8.2f}" for value in spent.values()]
    per_gpu = w.num_images / total / w.ranks
    print(
        f"{name:30}{w.images_of_a_rank:7}" + "".join(cells) + f"{total:8.1f}{per_gpu:9.3f}{evaluation:8.1f}{peak:7.1f}"
    )


def main():
    print(__doc__.split("\n\n")[2])
    head = ("images", "rollout", "old lp", "update", "gather", "grads", "pipe", "step", "img/s/GPU", "eval", "GB")
    folder = Path(tempfile.mkdtemp())
    family = find_family(write_configs(MODEL, folder))
    for kind, rank in (("LoRA of rank 32", 32), ("full weights", 0)):
        lora = make_lora(None, rank, 2 * rank, family.lora_target_modules) if rank else None
        blueprint = Blueprint(family, str(folder), lora, torch.bfloat16)
        widths = (7, *[8] * 7, 9, 8, 7)
        print(f"\n{kind:30}" + "".join(f"{title:>{width}}" for title, width in zip(head, widths, strict=True)))
        for ranks in (8, 16, 32, 64, 128, 256):
            row(f"{ranks} GPUs, 48 x 24 images", blueprint, replace(PAPER, ranks=ranks, micro_batch_images=1))
        for ranks in (8, 64, 256, 1024):
            w = replace(PAPER, ranks=ranks, num_images=144 * ranks, num_prompts=6 * ranks)
            row(f"{ranks} GPUs, 144 images each", blueprint, w)
        if not rank:
            continue
        for ranks in (8, 1024):
            w = replace(PAPER, ranks=ranks, num_images=144 * ranks, num_prompts=6 * ranks, shard_ranks=1)
            row(f"{ranks} GPUs, a copy each", blueprint, w)
        row("8 GPUs, groups of 48", blueprint, replace(PAPER, num_images=2 * PAPER.num_images))
        row("8 GPUs, 20 steps", blueprint, replace(PAPER, sampled_steps=20, trained_steps=19))
        row("8 GPUs, window of 2 steps", blueprint, replace(PAPER, trained_steps=2))
        row("8 GPUs, 256 x 256", blueprint, replace(PAPER, image_size=(256, 256)))
        large = replace(PAPER, image_size=(1024, 1024), micro_batch_images=1, rollout_batch_size=2)
        row("8 GPUs, 1024 x 1024", blueprint, large)


if __name__ == "__main__":
    main()
