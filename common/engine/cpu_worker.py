"""Attention and worker of the CPU platform (`cpu_platform.py`), which vLLM-Omni imports by name once it is known."""

from contextlib import nullcontext

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerProc


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


def send_outputs(worker):
    """The thread that hands what was sampled to the engine, where that has several workers. vLLM-Omni's own copies it
    on a stream of the accelerator: where there is none it ends at once, and the engine waits for ever."""
    while (item := worker._async_output_queue.get()) is not None:
        output, output_id, _ = item
        answer = AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id)
        try:
            answer.output = pack_diffusion_output_shm(output)
        except Exception as error:
            answer.error = f"{type(error).__name__}: {error}"
        try:
            worker._enqueue_result(answer)
        finally:
            with worker._async_output_done:
                worker._async_output_pending = max(0, worker._async_output_pending - 1)
                worker._async_output_done.notify_all()


WorkerProc._async_output_loop = send_outputs
