"""What a checkpoint holds of the policies and their optimizer, unsharded: any number of ranks can go on from it."""

from common.errors import NothingBegun
from common.policy import local_tensors, tensors_on_rank_0

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor


def policy_states(model):
    """{policy: its tensors, on rank 0}, without `reference`, which does not change. A collective.

    Before optimizer_state: it shards again what a forward pass without a backward has left unsharded.
    """
    states = {}
    for name in model.policies:
        if name != "reference":
            states[name], _ = tensors_on_rank_0(model, name)
    return states


def load_policy_states(model, states):
    """The reverse of policy_states; a policy that the saved run did not have begins as its `default`."""
    for name in model.policies:
        if name != "reference":
            load_policy_tensors(model, name, states.get(name, states["default"]))


@torch.no_grad()
def load_policy_tensors(model, name, tensors):
    """The reverse of policy_tensors, on any number of ranks: every rank is given all, and keeps its shards.

    Raises:
        NothingBegun: naming a tensor that one side has and the other lacks, or has in another shape.
    """
    targets = local_tensors(model, name)
    differing = targets.keys() ^ tensors.keys()  # in one of them only
    differing |= {key for key in targets.keys() & tensors.keys() if targets[key].shape != tensors[key].shape}
    if differing:
        raise NothingBegun(
            f"the checkpoint's policy {name} is not this run's: {min(differing)} is in one of them only, or of "
            "another shape; were --lora_rank, --lora_target_modules or --model changed?"
        )
    for key, target in targets.items():
        value = tensors[key].to(target.dtype)
        if isinstance(target, DTensor):
            mesh = target.device_mesh
            value = value.to(mesh.device_type)
            # src_data_rank None: every rank cuts its shard from its own copy, and none is sent
            value = distribute_tensor(value, mesh, target.placements, src_data_rank=None)
        target.copy_(value)


def optimizer_state(model, optimizer):
    """The optimizer's whole state on rank 0, {} before its first step. A collective."""
    if not optimizer.state:
        return {}
    unsharded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model.transformer, optimizer, options=unsharded)


def load_optimizer_state(model, optimizer, state):
    """The reverse of optimizer_state. A collective."""
    if state:
        # not strict: what a last block makes for nobody has a LoRA without a gradient, and so without a state of Adam
        unsharded = StateDictOptions(full_state_dict=True, strict=False)
        set_optimizer_state_dict(model.transformer, optimizer, state, options=unsharded)
