"""How well a run uses its GPUs: the share of their peak that each phase reaches, and traces of the update."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import profile, record_function

PHASES = {"update_actor": ("update", "actor"), "old_log_prob": ("old log-probs", "actor_infer")}
TRACED_PASSES = 2
_counted: dict[str, dict[str, float]] = {}  # count_flops' value of the runs of this process, by name


# ---- the share of the peak -------------------------------------------------------------------------------------------
def count_flops(config: dict[str, Any]) -> dict[str, float]:  # options of any type
    """{timed phase: seconds that its matrix products would take this GPU at its peak}, for a rank's training step.

    config: the run's options by name. Counted by a pass of each kind without weights, as the plan does; of the
    transformer alone. {} for a GPU whose peak we do not know.
    """
    from common.data import count_sources
    from common.models.loading import find_family
    from common.plan.devices import find_device  # the plan's rooms, which a trace needs none of
    from common.plan.memory import Blueprint
    from common.plan.needs import measure, work, workload_of
    from common.weights.lora import make_lora

    device = find_device(torch.cuda.get_device_name())
    peak = device and (device.bfloat16 if config["dtype"] == "bfloat16" else device.float32)
    if not peak:
        return {}
    height, width = config["image_size"]
    family = find_family(config["model"], height, width, config["num_frames"], config.get("guidance_scale", 1.0))
    lora = make_lora(
        family,
        model=config["model"],
        path=config["lora_path"],
        rank=config["lora_rank"],
        alpha=config["lora_alpha"],
        target_modules=config["lora_target_modules"],
        exclude_modules=config["lora_exclude_modules"],
        base_weights=config["base_weights"],
    )
    ranks, ranks_here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    w = workload_of(config | {"train_with": ()}, 0, ranks, ranks_here)  # recomputed activations are no model FLOPs
    dtype = getattr(torch, config["dtype"])
    prompts = config["eval_prompts"] if config.get("pairs") else config["train_prompts"]
    blueprint = Blueprint(family, config["model"], lora, dtype, count_sources(family.num_sources, prompts))
    counted = work(w, measure(blueprint, w))
    named = {timed: name for timed, (name, _) in PHASES.items() if name in counted}
    return {timed: counted[name].transformer / (1e12 * peak) for timed, name in named.items()}


def utilisation(config: dict[str, Any], timing: dict[str, float]) -> dict[str, float]:
    """perf/mfu/actor of the update and perf/mfu/actor_infer of the old log-probs: model FLOPs utilisation, 0 to 1.

    config: the run's options, whose FLOPs are counted once. timing: the seconds of the phases.
    """
    name = config.get("name", "")
    if name not in _counted:
        _counted[name] = count_flops(config) if "model" in config else {}  # a Run need not be a script's
    at_peak = _counted[name]
    phases = [phase for phase in at_peak if timing.get(phase)]
    return {f"perf/mfu/{PHASES[phase][1]}": at_peak[phase] / timing[phase] for phase in phases}


# ---- traces ----------------------------------------------------------------------------------------------------------
def traced_steps(profile_steps: Sequence[str], num_ranks: int) -> dict[int, int]:
    """{step: rank} of --profile_steps, each a STEP, which is traced on rank 0, or a STEP:RANK.

    Raises:
        ValueError: it is neither, there is no such rank, or a step is there twice.
    """
    found = {}
    for written in profile_steps:
        step, _, rank = written.partition(":")
        if not re.fullmatch("[0-9]+(:[0-9]+)?", written) or int(rank or 0) >= num_ranks:
            wanted = f"must be STEP or STEP:RANK, with a rank below {num_ranks}"
            raise ValueError(f"--profile_steps {written}: {wanted}, the number of ranks")
        if int(step) in found:
            raise ValueError(f"--profile_steps {written}: step {int(step)} is there twice; one rank traces a step")
        found[int(step)] = int(rank or 0)
    return found


@contextmanager
def profiled_step(folder: Path, step: int, profile_steps: Sequence[str]) -> Iterator[None]:
    """Write folder/trace_STEP.json, for chrome://tracing, if `profile_steps` asks for this step of this rank.

    It holds the block's first TRACED_PASSES passes with gradient through an FSDP model: forward, backward, and what
    lies between. A whole step of a real model would be gigabytes.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if traced_steps(profile_steps, num_ranks).get(step) != rank:
        yield
        return
    profiler = profile()
    seen: list[torch.nn.Module] = []  # the outermost model, once for each of its passes
    marker = record_function(f"ProfilerStep#{step}")

    def stop() -> None:
        marker.__exit__(None, None, None)
        profiler.stop()
        profiler.export_chrome_trace(str(folder / f"trace_{step:04d}.json"))

    def before_forward(module: torch.nn.Module, inputs: tuple) -> None:
        if not isinstance(module, FSDPModule) or not torch.is_grad_enabled() or (seen and module is not seen[0]):
            return
        seen.append(module)
        if len(seen) == 1:
            profiler.start()
            marker.__enter__()
        elif len(seen) == TRACED_PASSES + 1:
            stop()

    handle = register_module_forward_pre_hook(before_forward)
    try:
        yield
    finally:
        handle.remove()
        if 0 < len(seen) <= TRACED_PASSES:
            stop()
