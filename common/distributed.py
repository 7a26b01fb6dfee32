"""Torchrun's world and this machine: joining it, waiting in it, gathering over the ranks, FSDP's mesh, random states.

One rank alone exchanges nothing. Gloo's threads would copy with OpenMP threads of their own, and where there are more
of those than cores, libgomp puts all of them to sleep while they wait, which makes an update a quarter slower.
"""

import functools
import gc
import math
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

from common.cpu import quota_cores, refuse_an_old_driver
from common.errors import RolloutError, RunError
from common.process import end_with_parent, outlive_terminal, print_message, stop_requested

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

T = TypeVar("T")


ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # as torchrun would set them
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # loading, an engine's start, prompts, pairs or rewards may take long
JOIN_TIMEOUT = timedelta(minutes=5)  # from one rank that joins to the last: all have done the same until then
_ranks_per_image = 1  # setup_distributed sets it


def launched_world_size() -> int:
    """The number of ranks that torchrun starts; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def use_own_gpu() -> None:
    """Make this rank's GPU, where there are GPUs, the thread's current device. ValueError: fewer GPUs than ranks."""
    if torch.cuda.is_available():
        use_expandable_segments()  # before CUDA starts
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_gpus = torch.cuda.device_count()
        if num_ranks > num_gpus:
            raise ValueError(f"torchrun --nproc_per_node {num_ranks}: each rank needs a GPU; here are {num_gpus}")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


@functools.cache  # once, although threads of rewards call use_own_gpu while the GPU works
def use_expandable_segments() -> None:
    """Let torch's allocator of GPU memory grow its segments, so that memory freed in one phase serves the next.

    A user's own PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF stays as it is. This sets no such variable: torch has
    read them when it was imported, and the engine's process would inherit it.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def cores_of_this_rank() -> int:
    """This rank's share of the cores that this process may use, by its affinity and by its quota: at least 1.

    A share of a core does not count: where threads wait for each other, one that is held back holds back all.
    """
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, quota_cores()) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def threads_of_this_rank() -> int:
    """OMP_NUM_THREADS if a user has set it, otherwise this rank's share of the cores."""
    chosen = int(os.environ.get("OMP_NUM_THREADS") or 0)
    if chosen == 1 and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":  # torchrun says 1 where nobody has chosen
        chosen = 0
    return chosen or cores_of_this_rank()


def setup_distributed(shard_ranks: int = 0, ranks_per_image: int = 1) -> torch.device:
    """Join torchrun's world, where shard_ranks is shard_mesh's; python alone is a world of one. Returns the device.

    ranks_per_image: the option; so many ranks in a row are a sequence group. Where not all ranks join within
    JOIN_TIMEOUT, this process ends in one line.

    Raises:
        ValueError: each node has its own number of ranks to shard over, or a launcher of several ranks did not say how
            many this node has.
    """
    global _ranks_per_image
    _ranks_per_image = ranks_per_image
    world_size = launched_world_size()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # python alone has a shell for a parent, which it may outlive
    if "TORCHELASTIC_RUN_ID" in os.environ or "WORLD_SIZE" not in os.environ:
        outlive_terminal()
    if world_size == 1:
        # for who reads them; without WORLD_SIZE, others of them are left from somewhere else
        os.environ.update(ONE_RANK | os.environ if "WORLD_SIZE" in os.environ else ONE_RANK)
    elif "LOCAL_WORLD_SIZE" not in os.environ:
        raise ValueError(f"WORLD_SIZE is {world_size}, without LOCAL_WORLD_SIZE: start {sys.argv[0]} with torchrun")
    torch.set_num_threads(threads_of_this_rank())
    if torch.cuda.is_available():
        use_own_gpu()
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        refuse_an_old_driver()
        device = torch.device("cpu")
    if world_size == 1:
        be_alone(device)
        return device
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with joining_in_time():
        store, rank, world_size = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        store = dist.PrefixStore(agree_on_prefix(store, rank, world_size), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
        sizes = sorted(set(gather_objects(int(os.environ["LOCAL_WORLD_SIZE"]))))
    if len(sizes) > 1 and not shard_ranks:  # meshes by each rank's own node would wait for each other in step 1
        raise ValueError(f"--shard_ranks 0: nodes have {sizes} ranks: make them equal, or pass {math.gcd(*sizes)}")
    return device


def be_alone(device: torch.device) -> None:
    """Make a world of this process, with its store in this process.

    Its collectives on the CPU are torch's "fake" ones, which are right for one rank: what it would receive is what it
    has. Gloo would listen on the address of this machine's name.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers "fake"; others have no use for it

    backend = "cpu:fake,cuda:nccl" if device.type == "cuda" else "fake"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)


def agree_on_prefix(store: dist.Store, rank: int, world_size: int) -> str:
    """A prefix for keys of `store` that the ranks of one start share, and no other start has. Waits for all ranks.

    `torchrun --max_restarts` keeps its store, in which a rank would find where the others listened before a restart.
    Nothing that it sets says which start this is: TORCHELASTIC_RESTART_COUNT counts the failures of one node's ranks.
    So rank 0 draws the prefix. Each other rank draws a word, and takes the prefix that answers this word: only a rank 0
    that lives at the same time can have read it. Words that an earlier start has left are answered too, which nobody
    reads; rank 0 is done when all others have confirmed its own prefix.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"start/word of rank {rank}", own)
        prefix = store.get(f"start/answer to {own}").decode()
        store.add(f"start/confirmed {prefix}", 1)
        return prefix
    while store.add(f"start/confirmed {own}", 0) < world_size - 1:
        for other in range(1, world_size):
            if store.check([f"start/word of rank {other}"]):
                store.set(f"start/answer to {store.get(f'start/word of rank {other}').decode()}", own)
        time.sleep(0.05)
    return own


@contextmanager
def joining_in_time() -> Iterator[None]:
    """End this process in one line unless the block is done within JOIN_TIMEOUT, so that torchrun can start again.

    From a thread: neither gloo nor NCCL returns while it connects, and a short timeout of a group at its start would
    stay that of each gloo `recv`.
    """

    def give_up() -> None:
        rank, num_ranks, address, port = map(os.environ.get, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        minutes = JOIN_TIMEOUT.total_seconds() / 60
        why = "one has ended with a line of its own, still loads what its reward needs, or does not reach that address"
        line = f"rank {rank}: {num_ranks} ranks did not meet at {address}:{port} within {minutes:g} minutes; {why}"
        os.write(2, f"{Path(sys.argv[0]).name}: error: {line}\n".encode())
        os._exit(1)

    timer = threading.Timer(JOIN_TIMEOUT.total_seconds(), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ---- waiting ---------------------------------------------------------------------------------------------------------
def with_bar(items: Iterable[T], doing: str, total: int, *, together: bool = False) -> Iterator[T]:
    """Yield the `total` items, under a progress bar on rank 0 that says what it is `doing`: what can take hours before
    the first step.

    A signal or the end of --max_minutes ends the process before the next item. What was done until then lies in files:
    the next start continues behind it. together: the ranks need each other for an item, so they end before the same.
    """
    with tqdm(items, desc=doing, total=total, disable=not on_rank_0() or not total) as bar:
        for item in bar:
            if any(gather_objects(stop_requested())) if together else stop_requested():
                bar.close()
                stop_early(doing)
            yield item


def stop_early(doing: str) -> NoReturn:
    """End this process, which was asked to stop before the first step."""
    advice = "give the same command again (with --resume latest if it has made pairs)"
    print_message(f"stopped while {doing}; to continue, {advice}")
    raise SystemExit(0)


def end_distributed() -> None:
    """Leave torchrun's world, after everything that used it is out of scope.

    FSDP's threads end with their modules: without the collection about half of the CPU runs abort at exit.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- sequence groups: ranks in a row that work on the same images, a part of the tokens each ------------------------
def ranks_per_image() -> int:
    """The ranks of a sequence group; 1: every rank has images of its own."""
    return _ranks_per_image


def sequence_rank() -> int:
    """This rank's place in its sequence group. The first, 0, scores and saves the images for all of them."""
    return dist.get_rank() % _ranks_per_image


def data_rank() -> int:
    """The number of this rank's sequence group, of data_world_size: which share of the images is its own."""
    return dist.get_rank() // _ranks_per_image


def data_world_size() -> int:
    """Among how many sequence groups the images are divided: the number of ranks, where each has its own."""
    return dist.get_world_size() // _ranks_per_image


# ---- gathering -------------------------------------------------------------------------------------------------------
def on_rank_0() -> bool:
    """Whether this process writes the run's files: it is the first of torchrun's world, or alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """(B, ...) of every rank -> (world size, B, ...), the same on all ranks; for one rank a view of the tensor."""
    if dist.get_world_size() == 1:
        return tensor.unsqueeze(0)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def gather_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each rank's rows (B, ...) and their places (B,) among all N -> all rows (N, ...) in order, on every rank. The
    ranks of a sequence group have the same rows."""
    every_place = gather(places)[::_ranks_per_image].flatten()  # (N,)
    every_row = gather(rows)[::_ranks_per_image].flatten(0, 1)  # (N, ...), rank by rank
    in_order = torch.empty_like(every_row)
    in_order[every_place] = every_row
    return in_order


def gather_groups(rows: torch.Tensor, places: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's rows (B, ...) and their places (B,) among all -> whole groups (g, group_size, ...) of rows, and the
    place of each group's first row (g,).

    A group is group_size places in a row. It comes to the rank that has its first place, so that a row travels once or
    not at all. Where several ranks have a place, as share_of_rank's surplus, the first of them counts. A collective.
    """
    rank = dist.get_rank()
    of_ranks = gather(places)  # (world size, B)
    ranks = torch.arange(len(of_ranks)).repeat_interleave(len(places))  # of of_ranks.flatten()
    rank_of = torch.full([int(of_ranks.max()) + 1], len(of_ranks))
    rank_of.scatter_reduce_(0, of_ranks.flatten(), ranks, "amin")
    counts = rank_of[places] == rank
    rows, places = rows[counts], places[counts]
    owners = rank_of[places - places % group_size]  # (B,)
    firsts = places[places % group_size == 0]  # (g,), each its group's
    sources = rank_of[(firsts[:, None] + torch.arange(group_size)).flatten()]  # (g * group_size,)
    sent = {other: rows[owners == other] for other in owners.unique().tolist() if other != rank}
    sending = [dist.isend(part, other) for other, part in sent.items()]
    groups = rows.new_empty(len(sources), *rows.shape[1:])
    groups[sources == rank] = rows[owners == rank]
    for other in sources.unique().tolist():
        if other != rank:
            part = rows.new_empty(int((sources == other).sum()), *rows.shape[1:])
            dist.recv(part, other)
            groups[sources == other] = part
    for work in sending:
        assert work  # this process is in the group
        work.wait()
    return groups.view(len(firsts), group_size, *rows.shape[1:]), firsts


def gather_objects(value: T) -> list[T]:
    """One picklable value of every rank -> the list of them, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


@contextmanager
def failing_together(alone: bool = False) -> Iterator[None]:
    """A RunError within it, on any rank, is a RolloutError on all of them; `alone`: on this rank. A collective."""
    error = None
    try:
        yield
    except RunError as caught:
        error = caught
    has_failed = [error is not None] if alone else gather_objects(error is not None)
    if any(has_failed):
        raise RolloutError(str(error or "")) from (error and error.__cause__)


def mean_over_ranks(passes: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    """The metrics of every rank's passes, scalar tensors by name -> their means over all passes and ranks."""
    names = list(passes[0])
    rows = torch.stack([torch.stack([metrics[name] for name in names]) for metrics in passes])  # (passes, names)
    means = gather(rows.mean(0)).mean(0)
    return dict(zip(names, means.tolist(), strict=True))


def shard_mesh(device: torch.device, shard_ranks: int = 0) -> DeviceMesh:
    """The mesh on which `shard_ranks` neighbouring ranks share one copy of the weights; other ranks have other copies.

    0 means the ranks of a node, as nodes are connected more slowly. The mesh of one copy is (ranks,), the mesh of
    several is (copies, ranks).
    """
    shard_ranks = shard_ranks or int(os.environ["LOCAL_WORLD_SIZE"])
    num_copies = dist.get_world_size() // shard_ranks
    if num_copies > 1:
        return init_device_mesh(device.type, (num_copies, shard_ranks), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (shard_ranks,), mesh_dim_names=("shard",))


# ---- random states, which a reward may draw from ---------------------------------------------------------------------
def set_seed(seed: int) -> None:
    """Seed this process's global generators: Python's, NumPy's, and torch's on every device. seed: 0 to 2^32 - 1."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (a reward may use it)
    torch.manual_seed(seed)


def rng_states() -> dict:
    """States of this process's global generators: Python's, NumPy's, torch's on the CPU and on its current GPU."""
    algorithm, keys, *position = np.random.get_state(legacy=True)  # noqa: NPY002  (a reward may use it)
    states: dict = {
        "python": random.getstate(),
        # as a tensor, because a checkpoint holds no arrays; torch has no arithmetic for uint32
        "numpy": [algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), *position],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng_states(states: dict) -> None:
    """Undo what was drawn since rng_states(); a GPU's state does nothing on a machine without one."""
    algorithm, keys, *position = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *position))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
