"""How well a run uses its GPUs: the share of their peak that each phase reaches, and traces of the update."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.cpu import repair_torchvision
from common.data import count_sources
from common.distributed import on_rank_0
from common.models.loading import find_family
from common.plan.devices import find_device
from common.plan.memory import Blueprint
from common.plan.needs import measure, planned_run, work
from common.process import end_with_parent, print_message
from common.weights.lora import make_lora
from common.workload import Workload

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerAction, profile

# Of a step of Stable Diffusion 3.5 medium's size on an H100 (docs/lab/performance.md)
COMPILED_SPEEDUP = 1.74
LONG_RUN_S = 1800.0
PLANNED = {"actor": "update", "actor_infer": "old log-probs"}  # perf/mfu/<name> -> the phase, as the plan calls it


# ---- the share of the peak -------------------------------------------------------------------------------------------
def count_flops(config: dict[str, Any], workload: Workload) -> dict[str, float]:  # options of any type
    """{name of perf/mfu/<name>: FLOPs of the transformer's matrix products}, for a rank's training step.

    config: the run's options by name. Counted by a pass of each kind without weights, as the plan does. Recomputed
    activations are not counted.
    """
    height, width = config["image_size"]
    frames, own = config["num_frames"], config["family"]
    guidance_scale = workload.guidance_scale
    family = find_family(config["model"], height, width, frames, guidance_scale, own=own, needs_weights=False)
    lora = make_lora(
        family,
        model=config["model"],
        path=config["lora_path"],
        rank=config["lora_rank"],
        alpha=config["lora_alpha"],
        target_modules=config["lora_target_modules"],
        base_weights=config["base_weights"],
    )
    ranks, ranks_here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    options = config | {"train_with": ()}  # recomputed activations are no model FLOPs
    w = planned_run(workload, options, 0, ranks, ranks_here)
    dtype = getattr(torch, config["dtype"])
    num_sources = count_sources(family.num_sources, config["eval_prompts"][0])  # all records of a run have as many
    blueprint = Blueprint(family, config["model"], lora, dtype, num_sources)
    counted = work(w, measure(blueprint, w))
    return {name: counted[phase].transformer for name, phase in PLANNED.items() if phase in counted}


def count_in_process(config: dict[str, Any], workload: Workload) -> Connection:
    """Call count_flops in a process of its own, which ends with this one. Returns the pipe that will bring its value.

    For a large model it takes half a minute of Python, in which a GPU would wait for its next kernels. It also seeds
    the global generators.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    context.Process(target=_send_flops, args=(sender, config, workload), daemon=True).start()
    sender.close()
    return receiver


def _send_flops(sender: Connection, config: dict[str, Any], workload: Workload) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to this process as well
    end_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the passes have no memory, and need no GPU
    torch.set_num_threads(1)
    repair_torchvision()  # before the model's family imports diffusers
    try:
        sender.send(count_flops(config, workload))
    except Exception as error:  # the run can do without
        print_message(f"perf/mfu is not logged: {type(error).__name__}: {' '.join(str(error).split())}")


class Utilisation:
    """The share of this GPU's peak that the phases of a run reach: model FLOPs utilisation, 0 to 1."""

    def __init__(self, config: dict[str, Any], workload: Workload) -> None:
        """config: the run's options by name. The FLOPs of its workload are being counted from now on."""
        device = find_device(torch.cuda.get_device_name())
        self.peak = device and (device.bfloat16 if config["dtype"] == "bfloat16" else device.float32)  # in TFLOP/s
        self.flops: dict[str, float] = {}  # by name of perf/mfu/<name>
        self.counting = count_in_process(config, workload) if self.peak else None

    def metrics(self, seconds: dict[str, float]) -> dict[str, float]:
        """perf/mfu/actor of the update and perf/mfu/actor_infer of the old log-probs. seconds: of the step, by name.

        {} until the FLOPs are counted, which is not waited for, and for a GPU whose peak we do not know.
        """
        if self.counting and self.counting.poll():
            with suppress(EOFError):  # the process has said why
                self.flops = self.counting.recv()
            self.counting = None
        found = {}
        for name, flops in self.flops.items():
            if self.peak and seconds.get(name):
                found[f"perf/mfu/{name}"] = flops / (1e12 * self.peak) / seconds[name]
        return found


def compile_hint(step_s: float, num_steps: int) -> str | None:
    """A line on what --train_with compile would save of that many more steps; None where they take half an hour or
    less.

    step_s: seconds of a step of an eager run on a GPU.
    """
    left_s = step_s * num_steps
    if left_s <= LONG_RUN_S:
        return None
    saved_s = left_s * (1 - 1 / COMPILED_SPEEDUP)
    return (
        f"{num_steps} more steps take {left_s / 3600:.1f} h, of which --train_with compile would save "
        f"{saved_s / 3600:.1f} h: on an H100 it made steps of Stable Diffusion 3.5 medium's size {COMPILED_SPEEDUP} "
        "times as fast"
    )


# ---- traces ----------------------------------------------------------------------------------------------------------
@contextmanager
def profiled_step(folder: Path, step: int, profile_steps: Sequence[int]) -> Iterator[None]:
    """Write folder/trace_STEP.json, for chrome://tracing, on rank 0, if `profile_steps` asks for this step.

    It holds the block's first two passes with gradient through an FSDP model: forward, backward, and what lies between.
    A whole step of a real model would be gigabytes.
    """
    if step not in profile_steps or not on_rank_0():
        yield
        return
    actions = {1: ProfilerAction.RECORD, 2: ProfilerAction.RECORD_AND_SAVE}  # by pass; 0 is all before the first one
    outermost: list[torch.nn.Module] = []  # the model, whose blocks are FSDP modules as well

    def before_forward(module: torch.nn.Module, inputs: tuple) -> None:
        if isinstance(module, FSDPModule) and torch.is_grad_enabled():
            outermost.append(module)
            if module is outermost[0]:
                profiler.step()

    handle = register_module_forward_pre_hook(before_forward)
    with profile(
        schedule=lambda number: actions.get(number, ProfilerAction.NONE),
        on_trace_ready=lambda ready: ready.export_chrome_trace(str(folder / f"trace_{step:04d}.json")),
    ) as profiler:
        try:
            yield
        finally:
            handle.remove()
