"""--profile_steps: traces of a rollout and of the update by torch's profiler."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.distributed import on_rank_0

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerAction, profile

# by whether passes take a gradient: the file, and what is done from a pass on, by its number; nothing from others on
FILES = {False: "trace_{step:04d}_rollout.json", True: "trace_{step:04d}.json"}
ACTIONS = {
    False: {1: ProfilerAction.RECORD_AND_SAVE},
    True: {1: ProfilerAction.RECORD, 2: ProfilerAction.RECORD_AND_SAVE},
}


@contextmanager
def profiled_step(folder: Path, step: int, profile_steps: Sequence[int]) -> Iterator[None]:
    """Write two traces for chrome://tracing to the folder, on rank 0, if `profile_steps` asks for this step.

    trace_STEP.json holds the block's first two passes with gradient through an FSDP model: forward, backward, and what
    lies between. trace_STEP_rollout.json holds its first pass, if that has no gradient, up to the next one: a sampling
    step or, where an engine samples, the trainer's first pass after it. A whole step of a real model would be
    gigabytes.
    """
    if step not in profile_steps or not on_rank_0():
        yield
        return
    is_root: dict[torch.nn.Module, bool] = {}  # a transformer; its blocks are FSDP modules as well, and begin within it
    within: torch.nn.Module | None = None  # the transformer whose forward pass is under way
    passes = {False: 0, True: 0}
    current = recorded = False  # whether the pass takes a gradient; and the one that was recorded last

    def before_forward(module: torch.nn.Module, inputs: tuple) -> None:
        nonlocal current, recorded, within
        # a block that activation checkpointing recomputes has begun within its transformer before
        if not isinstance(module, FSDPModule) or not is_root.setdefault(module, within is None):
            return
        within = module
        has_gradient = torch.is_grad_enabled()
        # those without gradient between passes of the update, such as a reference's, belong to it
        if has_gradient or not passes[True]:
            current = has_gradient
            passes[current] += 1
            profiler.step()  # saves what has been recorded until now
            if passes[current] in ACTIONS[current]:
                recorded = current

    def after_forward(module: torch.nn.Module, inputs: tuple, output: object) -> None:
        nonlocal within
        if module is within:
            within = None

    def save(ready: profile) -> None:
        ready.export_chrome_trace(str(folder / FILES[recorded].format(step=step)))

    handles = [register_module_forward_pre_hook(before_forward), register_module_forward_hook(after_forward)]
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # after the first of the two, as it should
    with profile(
        schedule=lambda _: ACTIONS[current].get(passes[current], ProfilerAction.NONE), on_trace_ready=save
    ) as profiler:
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
