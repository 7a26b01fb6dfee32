"""Attention and worker of the CPU platform (`cpu_platform.py`), which vLLM-Omni imports by name once it is known."""

from contextlib import nullcontext

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker


class CpuSDPAImpl(SDPAImpl):
    def forward(self, query, key, value, attn_metadata=None):  # the base class dispatches to known accelerators only
        return self._forward_impl(query, key, value, attn_metadata)


class CpuSDPABackend(SDPABackend):
    @staticmethod
    def get_impl_cls():
        return CpuSDPAImpl


class CpuDiffusionWorker(DiffusionWorker):
    """Sleep mode needs CUDA's virtual memory; on CPU there is no device memory to give back. As on a GPU, where the
    weights would be gone, one that sleeps does not sample."""

    is_asleep = False

    def sleep(self, level=1):
        self.is_asleep = True
        return 0

    def wake_up(self, tags=None):
        self.is_asleep = False
        return True

    def execute_model(self, *args, **kwargs):
        self._check_awake()
        return super().execute_model(*args, **kwargs)

    def execute_model_batch(self, *args, **kwargs):
        self._check_awake()
        return super().execute_model_batch(*args, **kwargs)

    def _check_awake(self):
        if self.is_asleep:
            raise RuntimeError("the worker sleeps: it is to be woken before it samples")

    def _maybe_get_memory_pool_context(self, tag):
        return nullcontext()
