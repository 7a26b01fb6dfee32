"""The CPU platform that vLLM-Omni's diffusion engine lacks.

vLLM-Omni finds it through the entry point in `plugin/`, a folder that `environment.py` puts on the path of the engine's
process. Nothing is installed, and no other process sees it.
"""

import os

import torch
import vllm.model_executor.layers.utils as linear_utils
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def register() -> str | None:
    """Entry point: the platform's name, or None where there is a GPU. Each process of an engine calls it."""
    if torch.cuda.is_available():
        return None
    adapt_vllm()
    return "common.engine.cpu_platform.CpuOmniPlatform"


def adapt_vllm() -> None:
    """Two changes of vLLM's CPU backend, in this process."""
    linear_utils.dispatch_cpu_unquantized_gemm = keep_linear_weight
    # The workers of an engine exchange tensors by gloo. vLLM's own way, in shared memory, needs names on which only its
    # LLM workers agree, and would stay in /dev/shm after a kill.
    CpuPlatform.get_device_communicator_cls = classmethod(
        lambda cls: "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    )


def keep_linear_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Leave a linear layer's weight as it is. vLLM would pack it and drop it, and the layer could take no new one."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # a function, where torch has modules


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform, with answers to the questions that vLLM-Omni adds."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend not in (None, "TORCH_SDPA"):
            raise ValueError(f"attention backend {selected_backend}: there is only TORCH_SDPA on a CPU")
        return "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"  # cpu_worker.py lets it run here

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "common.engine.cpu_worker.CpuDiffusionWorker"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return os.environ.get("TORCHDYNAMO_DISABLE") != "1"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 64  # a CPU takes any number of workers; this is more than anyone asks for

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        return None

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0
