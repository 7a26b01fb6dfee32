"""What is refused, or arranged, before ranks exchange anything: nodes and GPUs."""

import contextlib

from common import distributed
from common.engine.launch import engine_environment
from common.scoring import load_rewards

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
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [4, 4, 4, 4, value, value])
    line = rf"--shard_ranks 0: nodes have \[2, 4\] ranks: make them equal, or pass {advised}"
    with pytest.raises(ValueError, match=f"^{line}$") if advised else contextlib.nullcontext():
        distributed.setup_distributed(shard_ranks)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("ranks", "chosen", "expected"),
    [(1, None, 8), (1, "0", 8), (1, "1", 1), (1, "3", 3), (2, None, 4), (2, "1", 4), (2, "3", 3), (16, "1", 1)],
)
def test_the_threads_of_a_rank_are_a_users_choice_or_its_share_of_the_cores(ranks, chosen, expected, monkeypatch):
    """Of 8 cores. With several ranks a 1 is torchrun's own."""
    monkeypatch.setattr(distributed.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert distributed.threads_of_this_rank() == expected


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_more_ranks_than_gpus_are_refused_by_each_of_them(local_rank, monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"^torchrun --nproc_per_node 2: each rank needs a GPU; here are 1$"):
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
        {variable: "max_split_size_mb:512"} if variable else {}
    )
