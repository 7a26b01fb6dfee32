"""perf/mfu: the share of its peak that a GPU reaches in each phase of a run."""

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from common.cpu import repair_torchvision
from common.files import count_sources
from common.models import find_family
from common.plan import Blueprint, find_device, measure, planned_run, work
from common.process import end_with_parent, print_message
from common.weights import make_lora
from common.workload import Workload

import torch

PLANNED = {"actor": "update", "actor_infer": "old log-probs"}  # perf/mfu/<name> -> the phase, as the plan calls it


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
