"""The worker of the CPU platform (`cpu_platform.py`), which vLLM-Omni imports by name once it is known."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerProc


class CpuDiffusionWorker(DiffusionWorker):
    """A worker without GPU memory: it has none to give back when it sleeps."""

    def init_device(self) -> None:
        super().init_device()
        SDPAImpl.forward = SDPAImpl._forward_impl  # torch's attention; its own `forward` knows a few accelerators alone
        # this process's WorkerProc, if it has one, starts the thread after its worker
        WorkerProc._async_output_loop = send_outputs

    def sleep(self, level: int = 1) -> int:
        return 0

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        return True

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()


def send_outputs(worker: WorkerProc) -> None:
    """The thread of a worker process that hands its images to the engine: WorkerProc._async_output_loop on a CPU.

    vLLM-Omni's own thread copies them on a stream of the accelerator. Where there is no accelerator it ends at once,
    and the engine would wait for ever.
    """
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
