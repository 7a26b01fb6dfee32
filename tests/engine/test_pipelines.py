"""What the engine's process changes in vLLM-Omni, seen without an engine. These tests import vLLM-Omni."""

import importlib
import socket
import typing
from datetime import timedelta

from common.run.checks import VLLM_MAX_RANK
from tests.conftest import needs_engine

import pytest
import torch
import torch.nn.functional as F

pytestmark = needs_engine


def test_engines_that_start_together_do_not_share_a_port(monkeypatch):
    """Each is given a port that was free some seconds before. Alone in its group, it takes one that is free now."""
    from common.engine.pipelines import listen_on_loopback

    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "TCPStore", rendezvous.TCPStore)  # to put it back
    listen_on_loopback()
    options = {"is_master": True, "timeout": timedelta(seconds=20), "wait_for_workers": False}
    with socket.create_server(("127.0.0.1", 0)) as other:  # of an engine that was a moment earlier
        port = other.getsockname()[1]
        store = rendezvous.TCPStore("localhost", port, world_size=1, **options)
        store.set("key", "value")
        assert store.get("key") == b"value" and store.port != port
        with pytest.raises(OSError, match="in use"):  # of several workers, the others know this port alone
            rendezvous.TCPStore("localhost", port, world_size=2, **options)


def test_norms_of_an_engine_on_a_gpu_round_as_the_trainers(monkeypatch):
    """vLLM-Omni's RMS norm, of Wan, is a kernel of vLLM's there, which rounds before the weight as well."""
    from common.engine.pipelines import use_trainers_norms

    from vllm_omni.diffusion.layers.norm import RMSNorm

    def of_a_gpu(norm, x):
        return F.rms_norm(x, (64,), eps=norm.variance_epsilon) * norm.weight

    monkeypatch.setattr(RMSNorm, "_forward_fused", of_a_gpu)
    monkeypatch.setattr(RMSNorm, "dispatch_forward", lambda norm: norm.forward_cuda)
    torch.manual_seed(0)
    block = torch.nn.Sequential(RMSNorm(64, eps=1e-6, dtype=torch.bfloat16))
    with torch.no_grad():
        block[0].weight += torch.randn(64)
    x = torch.randn(8, 64).bfloat16()
    expected = F.rms_norm(x, (64,), block[0].weight, 1e-6)
    assert not torch.equal(block(x), expected)
    use_trainers_norms(block)
    assert torch.equal(block(x), expected)
    assert list(block.state_dict()) == ["0.weight"]


def test_the_largest_rank_is_vllms():
    from vllm.config.lora import MaxLoRARanks

    assert max(typing.get_args(MaxLoRARanks)) == VLLM_MAX_RANK
