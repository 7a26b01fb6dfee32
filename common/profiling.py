"""How well a run uses its GPUs: the share of their peak that each phase reaches, and traces of the update."""

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.cpu import repair_torchvision
from common.data import count_sources
from common.models.loading import find_family
from common.plan.devices import find_device
from common.plan.memory import Blueprint
from common.plan.needs import measure, work, workload_of
from common.process import end_with_parent, print_message
from common.weights.lora import make_lora

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import profile, record_function

PHASES = {"update_actor": ("update", "actor"), "old_log_prob": ("old log-probs", "actor_infer")}
TRACED_PASSES = 2


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
    num_sources = count_sources(family.num_sources, config["train_prompts"][0])
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
