"""Several ranks: their connections, their seconds and memory, and which of them a collective waited for in vain."""

import os
import resource
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


def over_ranks(by_rank: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """The largest of every rank's memory peaks, and each phase's slowest rank and its seconds.

    by_rank: each rank's seconds by phase, and its peaks by metric. A straggler is long in one phase, and all others in
    the next, where they wait for it.
    """
    timing, peaks = by_rank[0]
    metrics = {name: max(of_rank[name] for _, of_rank in by_rank) for name in peaks}
    for name in timing:
        seconds = [of_rank.get(name, 0.0) for of_rank, _ in by_rank]
        metrics[f"timing_s/{name}/max"] = max(seconds)
        metrics[f"timing_s/{name}/slowest_rank"] = seconds.index(max(seconds))
    return metrics


def missing_ranks(patience_s: float = 10.0) -> str:
    """The line for a collective that timed out: which ranks were not in it. "" on ranks that another speaks for.

    The first rank that gives up closes its connections, so that all that waited fail within seconds. Each says so in
    torchrun's store, and the lowest of them reads who did not. A NCCL collective that times out ends the process
    before this can run.
    """
    store = _get_default_store()
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    try:
        store.set(f"timed out {rank}", os.uname().nodename)
        deadline = time.monotonic() + patience_s
        waiting = _reported(store, world_size)
        while time.monotonic() < deadline and len(waiting) < world_size:
            time.sleep(0.5)
            waiting = _reported(store, world_size)
    except dist.DistError as error:
        return f"a collective timed out, and torchrun's store, on the first node, does not answer: {error}"
    missing = sorted(set(range(world_size)) - set(waiting))
    if rank != min(waiting):
        time.sleep(2)  # until the other has spoken: torchrun ends all ranks when one has ended
        return ""
    if not missing:
        return "a collective timed out on all ranks: is the network down?"
    return f"rank {', '.join(map(str, missing))} of {world_size} did not arrive where the others waited"


def _reported(store: dist.Store, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if store.check([f"timed out {rank}"])]


def allow_connections(world_size: int) -> None:
    """Raise the limit of open files, often 1,024: gloo takes one or two for each other rank."""
    needed = 512 + 4 * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < needed:
        needed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
