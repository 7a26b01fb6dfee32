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
from common.plan.needs import measure, work, workload_of
from common.process import end_with_parent, print_message
from common.weights.lora import make_lora

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerAction, profile

PHASES = {"update_actor": ("update", "actor"), "old_log_prob": ("old log-probs", "actor_infer")}


# ---- the share of the peak -------------------------------------------------------------------------------------------
def count_flops(config: dict[str, Any]) -> dict[str, float]:  # options of any type
    """{timed phase: FLOPs of the transformer's matrix products}, for a rank's training step.

    config: the run's options by name. Counted by a pass of each kind without weights, as the plan does. Recomputed
    activations are not counted.
    """
    height, width = config["image_size"]
    guidance_scale = config.get("guidance_scale", 1.0)
    family = find_family(config["model"], height, width, config["num_frames"], guidance_scale, own=config["family"])
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
    w = workload_of(config | {"train_with": ()}, 0, ranks, ranks_here)  # recomputed activations are no model FLOPs
    dtype = getattr(torch, config["dtype"])
    num_sources = count_sources(family.num_sources, config["eval_prompts"][0])  # all records of a run have as many
    blueprint = Blueprint(family, config["model"], lora, dtype, num_sources)
    counted = work(w, measure(blueprint, w))
    return {timed: counted[name].transformer for timed, (name, _) in PHASES.items() if name in counted}


def count_in_process(config: dict[str, Any]) -> Connection:
    """Call count_flops in a process of its own, which ends with this one. Returns the pipe that will bring its value.

    For a large model it takes half a minute of Python, in which a GPU would wait for its next kernels. It also seeds
    the global generators.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    context.Process(target=_send_flops, args=(sender, config), daemon=True).start()
    sender.close()
    return receiver


def _send_flops(sender: Connection, config: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to this process as well
    end_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the passes have no memory, and need no GPU
    torch.set_num_threads(1)
    repair_torchvision()  # before the model's family imports diffusers
    try:
        sender.send(count_flops(config))
    except Exception as error:  # the run can do without
        print_message(f"perf/mfu is not logged: {type(error).__name__}: {' '.join(str(error).split())}")


class Utilisation:
    """The share of this GPU's peak that the phases of a run reach: model FLOPs utilisation, 0 to 1."""

    def __init__(self, config: dict[str, Any]) -> None:
        """config: the run's options by name, whose FLOPs are being counted from now on."""
        device = find_device(torch.cuda.get_device_name())
        self.peak = device and (device.bfloat16 if config["dtype"] == "bfloat16" else device.float32)  # in TFLOP/s
        self.flops: dict[str, float] = {}  # by timed phase
        self.counting = count_in_process(config) if self.peak else None

    def metrics(self, timing: dict[str, float]) -> dict[str, float]:
        """perf/mfu/actor of the update and perf/mfu/actor_infer of the old log-probs. timing: seconds of the phases.

        {} until the FLOPs are counted, which is not waited for, and for a GPU whose peak we do not know.
        """
        if self.counting and self.counting.poll():
            with suppress(EOFError):  # the process has said why
                self.flops = self.counting.recv()
            self.counting = None
        found = {}
        for phase, flops in self.flops.items():
            if self.peak and timing.get(phase):
                found[f"perf/mfu/{PHASES[phase][1]}"] = flops / (1e12 * self.peak) / timing[phase]
        return found


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
