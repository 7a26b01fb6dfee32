"""--profile_steps: traces of the update by torch's profiler."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.distributed import on_rank_0

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerAction, profile


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
