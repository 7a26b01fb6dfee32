"""What a checkpoint holds of training: the policies' tensors, the optimizer's moments and count, and random states."""

from pathlib import Path

from common.distributed import gather_objects, on_rank_0, restore_rng_states, rng_states
from common.models import Family
from common.optional import optional_part
from common.process import print_message
from common.weights.policy import Optimizers, load_policy_tensors, tensors_on_rank_0

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

KERNELS = {"foreach", "fused"}  # settings of an optimizer that change no number, and depend on the device


def training_state(model: Family, optimizer: torch.optim.Optimizer | Optimizers, path: Path) -> dict:
    """All that training changes in this process, for any number of ranks to resume from. A collective.

    {"policies": tensors of every policy that is not frozen, "optimizer": its moments, "num_updates": the steps it has
    taken, "rng": every rank's random states}. A LoRA's tensors are on rank 0's CPU, and not there on other ranks. Full
    weights are written beside the checkpoint's `path`, by each rank its own (common/weights/shards.py).

    optimizer: the trained policy's; or those of several policies, by name, `default` among them. Then "optimizers" has
    the moments of the others.
    """
    optimizers = by_policy(optimizer)
    counts = {"rng": gather_objects(rng_states()), "num_updates": model.num_updates}
    if not model.is_lora:
        return counts | optional_part("weights.shards", "--lora_rank 0").save_shards(path, model, optimizers)
    policies = {}
    # before the optimizer's state: this shards again what a forward pass without a backward left whole
    for name in model.policies:
        if name not in model.frozen_policies:
            policies[name], _ = tensors_on_rank_0(model, name)
    moments = {name: _moments(model, each) for name, each in optimizers.items()}
    state = counts | {"policies": policies, "optimizer": moments.pop("default")}
    return state | {"optimizers": moments} if moments else state


def by_policy(optimizer: torch.optim.Optimizer | Optimizers) -> Optimizers:
    """Optimizers by their policies' names; a single one is the trained policy's."""
    return {"default": optimizer} if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def _moments(model: Family, optimizer: torch.optim.Optimizer) -> dict:
    """An optimizer's state of a LoRA: none before its first step. A collective."""
    if not optimizer.state:
        return {}
    unsharded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model.transformer, optimizer, options=unsharded)


def load_training_state(model: Family, optimizer: torch.optim.Optimizer | Optimizers, state: dict) -> None:
    """The reverse of training_state. A policy that the saved run did not have begins as its trained policy, and its
    optimizer anew.

    The optimizer's settings become the saved ones, but for the kernels that it computes with.

    state: as Run.load_checkpoint returns it, with the checkpoint's "path".

    Raises:
        NothingBegun: naming a tensor that only one of the two has, or that has another shape.
    """
    optimizers = by_policy(optimizer)
    model.num_updates = state["num_updates"]
    policies = state["policies"]
    for name in model.policies:
        if name not in model.frozen_policies and "shards" not in state:
            load_policy_tensors(model, name, policies.get(name, policies["default"]))
    if "shards" in state:
        optional_part("weights.shards", "--lora_rank 0").load_shards(state, model, optimizers)
    else:
        moments = {"default": state["optimizer"], **state.get("optimizers", {})}
        for name, each in optimizers.items():
            _load_moments(model, each, moments.get(name, {}))
    num_ranks = len(state["rng"])
    if num_ranks != dist.get_world_size() and on_rank_0():
        now = dist.get_world_size()
        saved_by = f"saved by {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        # 8-bit moments (common/weights/adam_8bit.py) are rounded again where a shard's blocks begin elsewhere
        in_8_bits = any(getattr(each, "in_8_bits", False) for each in optimizers.values())
        how_near = "the 8 bits of Adam's moments" if in_8_bits else "round-off"
        print_message(f"{saved_by}, resumed by {now}: equal to an uninterrupted run to {how_near}")
    restore_rng_states(state["rng"][dist.get_rank() % len(state["rng"])])


def _load_moments(model: Family, optimizer: torch.optim.Optimizer, moments: dict) -> None:
    """The reverse of _moments; {} leaves the optimizer as it is. A collective."""
    if not moments:
        return
    # not strict: a LoRA may have had no gradient yet, as a last block that feeds nothing or the second of two
    # transformers, so that Adam has no state of it
    unsharded = StateDictOptions(full_state_dict=True, strict=False)
    kernels = [{name: group[name] for name in KERNELS & group.keys()} for group in optimizer.param_groups]
    # a script may have given a group, after its own resume, a setting that its optimizer does not begin with
    pairs = zip(moments["param_groups"], optimizer.param_groups, strict=True)
    groups = [{name: value for name, value in saved.items() if name in own} for saved, own in pairs]
    moments = moments | {"param_groups": groups}
    set_optimizer_state_dict(model.transformer, optimizer, moments, options=unsharded)
    for name, parameter in model.transformer.named_parameters():
        if name not in moments["state"]:  # torch has given it moments of 0, with a step counted
            optimizer.state.pop(parameter, None)
    for group, own in zip(optimizer.param_groups, kernels, strict=True):
        group.update(own)
