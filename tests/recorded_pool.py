"""What vLLM-Omni's engine lays in the pool that --engine_with sleep empties, seen on a CPU.

    recorded_pool.py MODEL OUTPUT [MODEL OUTPUT ...]

For each model a process of its own, forked from this one, which has imported vLLM-Omni, starts the engine's own
classes, with a recording context in place of the pool, samples two images, and writes

  pooled    bytes that were in memory as the pool's context ended, and came into it inside: what sleep moves
  dropped   those of them that nothing holds any more after sampling. A GPU would move them for ever: memory that is
            freed after the context goes back to the pool, and not to the GPU
  outside   names of the pipeline's tensors that are not in the pool: what stays on the GPU

to OUTPUT, as JSON. tests/engine/test_sleep.py starts it.
"""

import contextlib
import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

from common.engine.server import omni  # first: it repairs what vLLM imports

# isort: split
from common.engine.cpu_worker import CpuDiffusionWorker
from common.models.loading import family_class
from common.rollout import RolloutRequest

import torch
from diffusers import AutoModel

warnings.simplefilter("ignore")  # gc also finds objects whose attributes are deprecated

pools: list[dict[int, int]] = []
workers: list[CpuDiffusionWorker] = []


def memory() -> dict[int, int]:
    """{address: bytes} of all tensors that live in this process."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


@contextlib.contextmanager
def recorded(worker: CpuDiffusionWorker, tag: str) -> Iterator[None]:
    """In place of CuMemAllocator.use_memory_pool."""
    assert tag == "weights"
    workers.append(worker)
    before = memory()
    yield
    pools.append({address: size for address, size in memory().items() if address not in before})


def request_for(model: str) -> RolloutRequest:
    """Two images of a prompt whose embeddings are zeros."""
    family = family_class(model)
    transformer = AutoModel.load_config(model, subfolder="transformer")
    conditioning = {}
    for name, shape in family.conditioning_shapes(transformer, 16).items():
        is_mask = name.endswith("mask")
        conditioning[name] = torch.ones(1, *shape, dtype=torch.long) if is_mask else torch.zeros(1, *shape)
    channels = AutoModel.load_config(model, subfolder="vae")["latent_channels"]
    return RolloutRequest(
        conditioning=conditioning,
        negative_conditioning=None,
        prompt_index=torch.zeros(2, dtype=torch.long),
        seeds=[0, 1],
        timesteps=torch.tensor([1000.0, 500.0]),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        latent_shape=(channels, 8, 16),
        height=32,
        width=64,
        sde_steps=(0,),
        noise_level=0.7,
    )


def main(model: str, output: str) -> None:
    CpuDiffusionWorker._maybe_get_memory_pool_context = recorded  # type: ignore[assignment,method-assign]
    options = {"model": model, "dtype": "float32", "max_num_seqs": 2, "enable_sleep_mode": True, "enforce_eager": True}
    engine = omni.load_engine(options, num_workers=1)
    omni.generate(engine, request_for(model), lora=False, is_last=True)
    (pool,) = pools  # it is entered once
    now = memory()
    runner = workers[0].model_runner
    assert runner is not None and runner.pipeline is not None
    named = [*runner.pipeline.named_parameters(), *runner.pipeline.named_buffers()]
    outside = [name for name, tensor in named if tensor.nbytes and tensor.untyped_storage().data_ptr() not in pool]
    dropped = sum(size for address, size in pool.items() if address not in now)
    found = {"pooled": sum(pool.values()), "dropped": dropped, "outside": outside}
    Path(output).write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    failed = 0
    for model, output in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        process = os.fork()
        if not process:
            code = 1
            try:
                main(model, output)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # Python's exit would take longer than the engine's start
        failed |= os.waitpid(process, 0)[1]
    sys.exit(bool(failed))
