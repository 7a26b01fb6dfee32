"""The CPU platform that vLLM-Omni's diffusion engine lacks.

vLLM-Omni finds it through the entry point in `plugin/`, a folder that `client.py` puts on the engine process's path: no
install, and nothing outside that process sees it.
"""

import psutil
import torch
import vllm.model_executor.layers.utils as linear_utils
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def register():
    """Entry point: the platform's name, or None where there is a GPU."""
    return None if torch.cuda.is_available() else "common.engine.cpu_platform.CpuOmniPlatform"


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with the questions vLLM-Omni adds; memory figures are the host's."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        if selected_backend not in (None, "TORCH_SDPA"):
            raise ValueError(f"attention backend {selected_backend}: there is only TORCH_SDPA on a CPU")
        return "common.engine.cpu_worker.CpuSDPABackend"

    @classmethod
    def get_diffusion_worker_cls(cls):
        return "common.engine.cpu_worker.CpuDiffusionWorker"

    @classmethod
    def supports_torch_inductor(cls):
        return False

    @classmethod
    def supports_cpu_offload(cls):
        return False

    @classmethod
    def get_torch_device(cls, local_rank=None):
        return torch.device("cpu")

    @classmethod
    def set_device(cls, device):
        return None

    @classmethod
    def get_device_count(cls):
        return 64  # that workers of one engine may take: a CPU is as many as are asked for

    @classmethod
    def get_device_version(cls):
        return None

    @classmethod
    def synchronize(cls):
        return None

    @classmethod
    def empty_cache(cls):
        return None

    @classmethod
    def get_free_memory(cls, device=None):
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device=None):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return psutil.virtual_memory().total

    @classmethod
    def reset_peak_memory_stats(cls, device=None):
        return None

    @classmethod
    def max_memory_reserved(cls, device=None):
        return 0

    @classmethod
    def max_memory_allocated(cls, device=None):
        return 0

    @classmethod
    def get_current_memory_usage(cls, device=None):
        return psutil.Process().memory_info().rss


def _keep_linear_weight(layer, remove_weight):
    """vLLM's CPU backend prepacks linear weights and drops the parameter; an engine that takes new weights keeps it."""
    layer.cpu_linear = torch.nn.functional.linear


linear_utils.dispatch_cpu_unquantized_gemm = _keep_linear_weight
# between the workers of an engine: gloo. vLLM's own, in shared memory, needs names that its LLM workers agree on, and a
# kill would leave it in /dev/shm
CpuPlatform.get_device_communicator_cls = classmethod(
    lambda cls: "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
)
