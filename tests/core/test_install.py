"""What a user without the right driver, licence or index reads: one line that says what to do."""

from common.cpu import refuse_an_old_driver
from common.distributed import setup_distributed
from common.models import loading
from common.models.loading import family_class

import httpx
import pytest
import torch
import torch.distributed as dist
from huggingface_hub.errors import GatedRepoError

pytestmark = pytest.mark.fast


# ---- the driver ------------------------------------------------------------------------------------------------------
@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch):
    """without_gpu(what torch says): a build of torch for CUDA 13.0 that sees no GPU, for that reason."""

    def call(reason: str) -> None:
        def init() -> None:
            raise RuntimeError(reason)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name in ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    return call


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by ..."


def test_a_driver_that_is_too_old_does_not_train_on_the_cpu(without_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before a process group is made; the CPU is there for who asks for it."""
    without_gpu(TOO_OLD)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    with pytest.raises(ValueError, match=" NVIDIA .* CUDA 13.0: ") as error:
        setup_distributed()
    assert "580" in str(error.value) and "\n" not in str(error.value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refuse_an_old_driver()


@pytest.mark.parametrize("reason", ["Found no NVIDIA driver on your system.", "No CUDA GPUs are available"])
def test_no_gpu_is_no_error(reason: str, without_gpu) -> None:
    without_gpu(reason)
    refuse_an_old_driver()


# ---- gated models ----------------------------------------------------------------------------------------------------
def test_a_gated_model_names_licence_and_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this error does: the others keep the hub's own words."""
    response = httpx.Response(403, request=httpx.Request("GET", "https://example.com"))

    def download(*_: str) -> str:
        raise GatedRepoError("403 Client Error.\n\nCannot access gated repo.", response=response)

    monkeypatch.setattr(loading, "check_reachable", str)
    monkeypatch.setattr(loading, "hf_hub_download", download)
    with pytest.raises(ValueError, match="^--model some/model: ") as error:
        family_class("some/model")
    assert "hf auth login" in str(error.value) and "HF_TOKEN" in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
