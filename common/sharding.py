"""Over which ranks FSDP shards the weights."""

import os

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def shard_mesh(device):
    """The mesh over which weights are sharded: the ranks of a node, replicated over the nodes, which are slower apart.

    On one node of N ranks it is (N,), on M of them (M, N).
    """
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    num_nodes = dist.get_world_size() // ranks_here
    shape = (ranks_here,)
    names = ("shard",)
    if num_nodes > 1:
        shape = (num_nodes, ranks_here)
        names = ("replicate", "shard")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)
