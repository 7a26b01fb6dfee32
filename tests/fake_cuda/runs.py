"""Runs of the scripts on the fake device and on the CPU, and how they are compared."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from common.files.prompts import read_prompts
from common.models.loading import find_family
from common.plan.memory import Blueprint
from common.plan.needs import measure, memory_parts, phase_sums, planned_run
from common.run.command_line import parse_args
from tests.conftest import ROOT, lora_of, one_rank_environment
from tools.plan import load_script

import torch

LAUNCH = ROOT / "tests" / "fake_cuda" / "launch.py"
ON_CPU = ROOT / "tests" / "fake_cuda" / "on_cpu.py"
NAME = "run"  # of every run


def run_script(
    folder: Path,
    script: str,
    *options: object,
    ranks: int = 1,
    on_cuda: bool = True,
    root: Path = ROOT,
    name: str = NAME,
    timeout: float = 900,
) -> subprocess.CompletedProcess[str]:
    """Run a script of the project under `root` in `folder`, on the fake device or on the CPU.

    One rank needs no torchrun. The ranks' reports are in `folder`. Returns the finished process, its output as text.
    """
    command = [sys.executable]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FAKE_CUDA_REPORT": str(folder)}
    if ranks == 1:
        environment |= one_rank_environment()
    else:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command.append(str(LAUNCH if on_cuda else ON_CPU))
    command += [str(root / script), "--name", name, *map(str, options)]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def last_lines(output: str) -> str:
    """The lines of a failed run that say why: the error, and none of torchrun's own."""
    lines = [line for line in output.splitlines() if "Error" in line or "error:" in line or "fake CUDA" in line]
    return "\n".join([line for line in lines if "ChildFailedError" not in line][-4:]) or output[-2000:]


def report(folder: Path, rank: int = 0) -> dict[str, Any]:
    """What a rank asked of the device."""
    return json.loads((folder / f"rank{rank}.json").read_text())


def phase_sum(report: dict[str, Any], phase: str, count: str) -> int:
    """A count, summed over all times that the phase was gone through."""
    return sum(row[count] for row in report["phases"] if row["phase"] == phase)


def phase_peak(report: dict[str, Any], phase: str) -> int:
    """The most bytes that were held on the device in a phase."""
    return max((row["peak_bytes"] for row in report["phases"] if row["phase"] == phase), default=0)


# ---- what is compared ------------------------------------------------------------------------------------------------
# Metrics that are held against more than their own size. A loss is a sum of terms of about 1 that cancel. An advantage
# is a reward's distance from its group's mean, and a reward follows pixels of 256 levels, which round-off may turn.
SCALES = {"actor/loss": 1.0, "critic/advantages/": 5.0, "critic/rewards/std_mean": 1.0}
SMALLEST = 0.1  # of other metrics: log-probs and ratios are differences of larger numbers


def distances(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
    """{metric at step: the distance between two runs, relative to the metric's scale}; infinite where one lacks it."""
    found: dict[str, float] = {}
    for row, other in zip(rows, expected, strict=True):
        for name in row.keys() | other.keys():
            if name.startswith(("timing_", "perf/")):
                continue
            distance = math.inf
            if name in row and name in other:
                scale = next((size for start, size in SCALES.items() if name.startswith(start)), 0.0)
                scale = max(scale, abs(other[name]), 1e-3 if "grad_norm" in name else SMALLEST)
                distance = abs(row[name] - other[name]) / scale
            found[f"{name} at {row['training/global_step']}"] = distance
    return found


# the phases of a run and those of a plan
PHASES = {"start": "start", "encode": "encode", "gen": "rollout", "update_actor": "update", "save_checkpoint": "save"}


def planned_bytes(script: str, options: list[str]) -> dict[str, float]:
    """{phase: bytes that tools/plan.py counts on the device of one rank}, without what CUDA takes for itself."""
    module = load_script(str(ROOT / script))
    with mock.patch.dict(os.environ, one_rank_environment()):
        args = module.check(parse_args(module.Args, "", options))
    eval_set = read_prompts(args.eval_prompts, max_prompts=args.max_prompts)
    w = planned_run(module.workload(args), vars(args), len(eval_set), ranks=1, ranks_per_node=1)
    family = find_family(args.model, *args.image_size, args.num_frames, args.guidance_scale, args.max_sequence_length)
    lora = lora_of(args, family)
    # this device computes an RMS norm as a CPU does
    blueprint = Blueprint(family, args.model, lora, getattr(torch, args.dtype), fused_norms=False)
    parts = memory_parts(blueprint, w, measure(blueprint, w))
    return phase_sums(part for part in parts if part.place == "device" and part.name != "CUDA")
