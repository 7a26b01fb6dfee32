"""What is refused, or arranged, before ranks exchange anything: meeting, nodes, GPUs and cores."""

import contextlib
import math
import os
import threading
import time
from unittest import mock

from common import distributed
from common.cpu import memory_bytes, quota_cores
from common.engine.environment import engine_environment
from common.rewards._loading import load_rewards

import psutil
import pytest
import torch

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("shard_ranks", "advised"), [(0, 2), (1, None), (2, None)])
def test_nodes_with_different_numbers_of_ranks_are_refused_unless_the_shards_fit_each(
    shard_ranks, advised, monkeypatch
):
    """Nodes of 4 and 2 ranks: each rank would make its mesh by its own node, and step 1 would wait for ever."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_, **__: iter([(torch.distributed.HashStore(), 4, 6)]))
    monkeypatch.setattr(distributed, "agree_on_prefix", lambda store, rank, world_size: "start")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [4, 4, 4, 4, value, value])
    line = rf"--shard_ranks 0: .* \[2, 4\] .* {advised}"
    with pytest.raises(ValueError, match=f"^{line}$") if advised else contextlib.nullcontext():
        distributed.setup_distributed(shard_ranks)


# ---- the prefix of a start -------------------------------------------------------------------------------------------
class Killed(Exception):
    pass


class MortalStore:
    """A rank's view of the agents' store. The rank is killed at its call number `dies_at`, or with all ranks of its
    start, which torchrun ends before the next start."""

    def __init__(self, store, start_ends, dies_at=None):
        self.store, self.start_ends, self.calls_left = store, start_ends, dies_at

    def __getattr__(self, name):
        def call(*args):
            while name == "get" and not self.store.check([args[0]]) and not self.start_ends.is_set():
                time.sleep(0.001)
            if self.start_ends.is_set() or self.calls_left == 0:
                raise Killed
            if self.calls_left is not None:
                self.calls_left -= 1
            return getattr(self.store, name)(*args)

        return call


def start_ranks(store, world_size, killed=None, dies_at=None, order=1):
    """{rank: prefix} of the ranks that got one. `killed` dies at a call; the others are ended some time later."""
    prefixes, start_ends = {}, threading.Event()

    def join(rank):
        with contextlib.suppress(Killed):
            mortal = MortalStore(store, start_ends, dies_at if rank == killed else None)
            prefixes[rank] = distributed.agree_on_prefix(mortal, rank, world_size)

    threads = [threading.Thread(target=join, args=[rank]) for rank in range(world_size)[::order]]
    for thread in threads:
        thread.start()
    if killed is not None:
        threads[range(world_size)[::order].index(killed)].join(20)
        threading.Event().wait(0.1)  # the others do what they can without the lost one
        start_ends.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return prefixes


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_ranks_agree_on_a_prefix_of_their_start_whatever_earlier_starts_have_left(killed, order, monkeypatch):
    """One store, as torchrun's agents keep: a good start, three in which a rank is killed at its first, second or
    third call, and two good ones. Nobody counts the starts."""
    monkeypatch.setattr(distributed.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))
    store = torch.distributed.HashStore()
    seen = set()
    for dies_at in (None, 0, 1, 2, None, None):
        prefixes = start_ranks(store, 3, killed if dies_at is not None else None, dies_at, order)
        assert len(set(prefixes.values())) <= 1  # never one of another start
        assert not seen & set(prefixes.values())
        if dies_at is None:
            assert sorted(prefixes) == [0, 1, 2]
        seen |= set(prefixes.values())
    assert len(seen) >= 3


@pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "2", "LOCAL_RANK": "3"}])
def test_python_alone_is_a_world_of_one_which_listens_nowhere(given, monkeypatch):
    """Also in a container whose platform counts its pods as ranks, and beside what another launcher has left.

    What reads torchrun's variables finds them.
    """
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(distributed, "outlive_terminal", lambda: None)
    variables = {name: value for name, value in os.environ.items() if name not in distributed.ONE_RANK}
    process = psutil.Process()
    before = process.net_connections(kind="inet")
    with mock.patch.dict(os.environ, variables | given, clear=True):
        assert distributed.launched_world_size() == 1
        device = distributed.setup_distributed()
        try:
            assert process.net_connections(kind="inet") == before
            assert {name: os.environ[name] for name in distributed.ONE_RANK} == distributed.ONE_RANK
            assert distributed.on_rank_0() and distributed.gather_objects("one") == ["one"]
            assert distributed.shard_mesh(device).size() == 1
            # what a run may ask of one rank through torch: full weights and shards
            tensor, gathered = torch.arange(3.0), [torch.zeros(3)]
            torch.distributed.all_reduce(tensor)
            torch.distributed.all_gather(gathered, tensor)
            torch.distributed.barrier()
            assert tensor.tolist() == gathered[0].tolist() == [0, 1, 2]
        finally:
            torch.distributed.destroy_process_group()


def test_a_launcher_that_does_not_say_how_many_ranks_a_node_has_is_refused(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        distributed.setup_distributed()


# ---- a machine's cores and GPUs --------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize(
    ("ranks", "chosen", "expected"),
    [(1, None, 8), (1, "0", 8), (1, "1", 1), (1, "3", 3), (2, None, 4), (2, "1", 4), (2, "3", 3), (16, "1", 1)],
)
def test_the_threads_of_a_rank_are_a_users_choice_or_its_share_of_the_cores(ranks, chosen, expected, monkeypatch):
    """Of 8 cores. With several ranks a 1 is torchrun's own."""
    monkeypatch.setattr(distributed.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(distributed, "quota_cores", lambda: math.inf)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert distributed.threads_of_this_rank() == expected


V1 = "30 20 0:1 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct"
V2 = "30 20 0:1 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"


@pytest.mark.parametrize(
    ("group", "mount", "top", "quotas", "expected"),
    [
        ("0::/", V2, "/", {"": "150000 100000"}, 1.5),  # a container with a namespace
        ("0::/pod/one", V2, "/", {"pod": "200000 100000", "pod/one": "max 100000"}, 2),
        ("0::/pod/one", V2, "/", {"pod": "400000 100000", "pod/one": "50000 50000"}, 1),
        ("0::/pod/one", V2, "/", {"other": "100000 100000"}, math.inf),
        ("0::/../other", V2, "/", {"": "300000 100000"}, 3),  # a namespace that the process was not born in
        ("0::/", V2, "/", {"": "not a number"}, math.inf),
        ("4:cpu,cpuacct:/", V1, "/", {"": "200000"}, 2),
        ("4:cpu,cpuacct:/slurm/job", V1, "/", {"slurm": "300000", "slurm/job": "-1"}, 3),
        ("4:cpu,cpuacct:/docker/abc", V1, "/docker/abc", {"": "50000"}, 0.5),  # without a namespace
        ("4:cpu,cpuacct:/docker/abc/in", V1, "/docker/abc", {"": "-1", "in": "100000"}, 1),
        ("4:memory:/docker/abc\n3:cpu:/x", V1, "/", {"docker/abc": "100000", "x": "200000"}, 2),
    ],
)
def test_the_smallest_quota_of_a_cgroup_and_those_above_counts(tmp_path, group, mount, top, quotas, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n1:name=systemd:/\n")
    other = b"22 1 8:1 / /mnt/caf\xe9 rw - ext4 /dev/vda rw\n"  # a mount's name may be any bytes
    (tmp_path / "proc/self/mountinfo").write_bytes(other + f"{mount.format(top=top)}\n".encode())
    for name, quota in quotas.items():
        folder = tmp_path / mount.split()[4].lstrip("/") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("cpu.max" if mount is V2 else "cpu.cfs_quota_us")).write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path) == expected


@pytest.mark.parametrize(
    ("quota", "ranks", "expected"), [(math.inf, 1, 8), (2.5, 1, 2), (0.5, 1, 1), (6, 2, 3), (3, 4, 1)]
)
def test_a_rank_has_its_share_of_the_quota(monkeypatch, quota, ranks, expected):
    monkeypatch.setattr(distributed.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(distributed, "quota_cores", lambda: quota)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert distributed.cores_of_this_rank() == expected


@pytest.mark.parametrize(
    ("mount", "group", "limits", "expected"),
    [
        (V2, "0::/", {"": "30000"}, 30_000),
        (V2, "0::/job/step", {"job": "50000", "job/step": "max"}, 50_000),
        (V2, "0::/job", {"job": "max"}, 64_000),
        (V2, "0::/job", {"job": "90000"}, 64_000),  # more than the machine has
        (V1.replace("cpu,cpuacct", "memory"), "9:memory:/job", {"": "9223372036854771712", "job": "20000"}, 20_000),
        (V1, "9:cpu,cpuacct:/job", {"job": "20000"}, 64_000),  # of another controller
    ],
)
def test_the_memory_of_a_job_is_the_machines_or_its_limit(tmp_path, monkeypatch, mount, group, limits, expected):
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 64}[name])
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
    (tmp_path / "proc/self/mountinfo").write_text(f"{mount.format(top='/')}\n")
    for name, limit in limits.items():
        folder = tmp_path / mount.split()[4].lstrip("/") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.max" if mount is V2 else "memory.limit_in_bytes")).write_text(f"{limit}\n")
    assert memory_bytes(tmp_path) == expected


def test_without_cgroups_there_is_no_quota(tmp_path):
    assert quota_cores(tmp_path) == math.inf and 0 < memory_bytes(tmp_path) < math.inf


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_more_ranks_than_gpus_are_refused_by_each_of_them(local_rank, monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--nproc_per_node 2: .* GPU; .* 1$"):
        load_rewards(["jpeg_compressibility"], (1.0,))  # the first that a script loads
    assert used == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    load_rewards(["jpeg_compressibility"], (1.0,))
    assert used == [int(local_rank)]


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_segments_expand_in_the_trainer_alone_unless_the_user_has_set_the_allocator(variable, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: settings.append("CUDA starts"))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda setting: settings.append(setting))
    settings = []
    distributed.use_expandable_segments.cache_clear()
    for _ in range(2):
        distributed.use_own_gpu()
    expected = [] if variable else ["expandable_segments:True"]
    assert settings == [*expected, "CUDA starts", "CUDA starts"]
    environment = engine_environment("model", [0], num_threads=1)
    assert {name: value for name, value in environment.items() if "ALLOC_CONF" in name} == (
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"} if variable else {}  # the name that vLLM reads
    )
