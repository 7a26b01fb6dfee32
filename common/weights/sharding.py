"""How FSDP2 holds the policies' weights: which modules it shards, what a rank keeps whole, and when that is dropped.

A script calls `fully_shard` itself, for each module of `units_to_shard`. Passes leave the root's weights whole and, of
a LoRA that each rank has, its casts; an optimizer step would leave those out of date. `reshard_before_steps`, which
`add_policies` calls, drops them, whatever the optimizer of these weights is.
"""

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from common.distributed import ranks_per_image
from common.errors import RunError
from common.models import Family, on_device
from common.weights.sequence import divide_sequence, sequence_mesh

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


def units_to_shard(
    model: Family, mesh: DeviceMesh, dtype: torch.dtype, train_with: Collection[str]
) -> Iterator[torch.nn.Module]:
    """Yield the modules that `fully_shard` is called for: each transformer's blocks, by diffusers' list of their
    classes, then the rest of it. A module is made ready when it is yielded.

    That is: activation checkpointing and compiling (--train_with), division among the ranks of a sequence group
    (--ranks_per_image), fp32 for full weights that are trained or averaged, and, where one rank has a whole copy of a
    LoRA's base, frozen weights that FSDP leaves out (model.unsharded).
    """
    # FSDP would copy and cast all weights in every pass even where a rank has them whole: there it gets the LoRA alone
    lora_alone = model.is_lora and mesh.size(-1) == 1 and "cpu_offload" not in train_with  # one rank to a copy
    if lora_alone:
        keep_frozen_whole(model, dtype)
    groups = sequence_mesh(mesh.device_type) if ranks_per_image() > 1 else None
    # with a LoRA all policies share one transformer; dict.fromkeys drops the repeats, in one order on all ranks
    for transformer in dict.fromkeys(model.policies.values()):
        if groups:
            divide_sequence(transformer, groups)
        if "activation_checkpointing" in train_with:
            transformer.enable_gradient_checkpointing()
        blocks = [m for m in transformer.modules() if type(m).__name__ in transformer._no_split_modules]
        for module in [*blocks, transformer]:
            if "compile" in train_with and module is not transformer:
                # without this, the graphs with and without gradient round bf16 at different places: Flow-GRPO's first
                # ratio is 1 +- 6e-4 instead of 1
                module.compile(options={"emulate_precision_casts": True})
            if not model.is_lora and transformer is not model.policies.get("reference"):
                module.float()  # trained or averaged weights; a block at a time, as the whole model may not fit
            yield module
        if lora_alone:  # the LoRA is cast in the first pass after an optimizer step, and stays so until the next one
            transformer.set_reshard_after_forward(False)
            transformer.set_reshard_after_backward(False)


@torch.no_grad()
def keep_frozen_whole(model: Family, dtype: torch.dtype) -> None:
    """Put a LoRA's frozen weights on model.device in `dtype`, and into `model.unsharded`, which FSDP leaves out.

    They are copied one at a time, out of the checkpoint's mapped file. Quantised weights are there already.
    """
    for name, parameter in model.transformer.named_parameters():
        if "lora_" not in name and parameter not in model.unsharded:
            parameter.data = parameter.data.to(model.device, dtype, copy=True)
            model.unsharded.add(parameter)
    for buffer in model.transformer.buffers():
        buffer.data = buffer.data.to(model.device)


def reshard(transformer: torch.nn.Module) -> None:
    """Put FSDP's shards back in the place of whole weights, in all modules where a pass has left those.

    The optimizer's tensors are the shards. A pass leaves the root's weights whole if it has no gradient, and a LoRA of
    which each rank has all in any case.
    """
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reshard_before_steps(model: Family) -> None:
    """From now on, before an optimizer of FSDP's tensors takes a step, put the shards of the model's policies back.

    An AdamW of 32 bits is refused where --adam_bits is 8. Any other optimizer is not ours: a reward may have one, which
    steps in the reward's thread while the trainer passes.
    """
    found = weakref.ref(model)  # the hook must not keep a model that nobody else has

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
            return
        model = found()
        if model and model.adam_bits == 8 and isinstance(optimizer, torch.optim.AdamW):
            told = "this script does not take the optimizer that choose_adam_kernel returns (docs/fork.md)"
            raise RunError(f"--adam_bits 8: {told}")
        for transformer in dict.fromkeys(model.policies.values()) if model else ():
            reshard(transformer)

    weakref.finalize(model, register_optimizer_step_pre_hook(before_step).remove)


@contextmanager
def gathered(model: Family, is_wanted: bool) -> Iterator[None]:
    """Let every rank keep the acting transformer's weights whole within the block, from its first pass on.

    Passes in the block take no gradient. Without this, every pass gathers the weights a block at a time; the numbers
    are the same to the bit. Nothing happens where it is not wanted, or where a rank holds all weights anyway.
    """
    transformer = model.transformer
    shards = [p.device_mesh.size(-1) for p in transformer.parameters() if isinstance(p, DTensor)]
    units = [module for module in transformer.modules() if isinstance(module, FSDPModule)]
    is_kept = is_wanted and max(shards, default=1) > 1
    if is_kept:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
    yield
    if is_kept:
        # the root keeps its weights after a forward pass, as it does by default: backward needs them at once
        for unit in units:
            unit.set_reshard_after_forward(unit is not transformer, recurse=False)
            unit.reshard()


@contextmanager
def sampling(model: Family, gathers: bool) -> Iterator[None]:
    """Let the VAE stay on the device within the block and, where `gathers`, the acting transformer's weights whole."""
    with on_device(model, "vae"), gathered(model, gathers):
        yield
