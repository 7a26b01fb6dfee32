"""Torchrun's world: joining it, and gathering over it.

One rank alone exchanges nothing: gloo's threads would copy with OpenMP threads of their own, and where there are more
of those than cores, libgomp lets all sleep where they wait for each other, which costs an update a quarter.
"""

import gc
import os
import sys
from datetime import timedelta

from common.stops import end_with_parent

import torch
import torch.distributed as dist


def launched_world_size():
    """The number of ranks torchrun starts.

    Raises:
        ValueError: the script was not started by torchrun.
    """
    if "WORLD_SIZE" not in os.environ:
        raise ValueError(f"start it with torchrun: torchrun --standalone {sys.argv[0]}")
    return int(os.environ["WORLD_SIZE"])


def use_own_gpu():
    """Make this rank's GPU, where there are GPUs, the current device of the thread."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def leave_cores_to_this_thread():
    """On a CPU: let the rollout's OpenMP threads sleep where they wait for each other, as long as this thread lives.

    They spin else, on the core that this thread needs. Libgomp lets them sleep where it has more threads than cores:
    this operation is large enough for this thread to start some of its own.
    """
    torch.ones(2**20)


def setup_distributed():
    """Join torchrun's world. Returns this rank's device; on CPU the ranks of a machine share its cores."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    # an hour: one rank's reward, or its checkpoint, may take its time
    timeout = timedelta(hours=1)
    if torch.cuda.is_available():
        use_own_gpu()
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    else:
        device = torch.device("cpu")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(max(1, cores // ranks_here))  # torchrun leaves each rank one
        dist.init_process_group("gloo", timeout=timeout)
    return device


def end_distributed():
    """Leave torchrun's world, after all that used it is out of scope.

    FSDP's threads end with their modules: without the collection about half of the CPU runs abort at exit.
    """
    gc.collect()
    dist.destroy_process_group()


def on_rank_0():
    """Whether this process writes the run's files: it is the first of torchrun's world, or alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather(tensor):
    """(B, ...) of every rank -> (world size, B, ...), the same on all of them; of one rank the tensor itself."""
    if dist.get_world_size() == 1:
        return tensor.unsqueeze(0)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def gather_rows(rows, places):
    """Each rank's rows (B, ...) and their places (B,) among all N -> all rows (N, ...) in order, on every rank."""
    every_place = gather(places).flatten()  # (N,)
    every_row = gather(rows).flatten(0, 1)  # (N, ...), rank by rank
    in_order = torch.empty_like(every_row)
    in_order[every_place] = every_row
    return in_order


def gather_objects(value):
    """One picklable value of every rank -> the list of them, by rank."""
    if dist.get_world_size() == 1:
        return [value]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def gather_objects_on_rank_0(value):
    """One picklable value of every rank -> on rank 0 the list of them, by rank; None on the others."""
    if dist.get_world_size() == 1:
        return [value]
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, parts)
    return parts


def mean_over_ranks(passes):
    """Passes of every rank, each {name: scalar tensor} -> {name: float}, the mean over all."""
    names = list(passes[0])
    rows = torch.stack([torch.stack([metrics[name] for name in names]) for metrics in passes])  # (passes, names)
    means = gather(rows.mean(0)).mean(0)
    return dict(zip(names, means.tolist(), strict=True))
