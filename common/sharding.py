"""Over which ranks FSDP shards the weights."""

import os

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def shard_mesh(device, shard_ranks=0):
    """The mesh on which `shard_ranks` neighbours share one copy of the weights, and all other ranks have copies of it.

    0: the ranks of a node, as nodes are slower apart. Of one copy the mesh is (ranks,), of several (copies, ranks).
    """
    shard_ranks = shard_ranks or int(os.environ["LOCAL_WORLD_SIZE"])
    num_copies = dist.get_world_size() // shard_ranks
    shape = (shard_ranks,)
    names = ("shard",)
    if num_copies > 1:
        shape = (num_copies, shard_ranks)
        names = ("replicate", "shard")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)
