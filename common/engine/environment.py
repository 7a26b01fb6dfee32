"""What a rollout engine needs before it starts: vLLM-Omni, GPUs, and the environment of its process.

`check_engine` refuses what cannot work, before any model loads. `engine_gpus` says which GPUs the engine of a rank
gets, and `engine_environment` which variables its process sees.
"""

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from common.engine.mismatch import parse_correction
from common.models import Family

import torch

TIMEOUT_S = 1800.0  # longer than any start, chunk of images or push should take
# The trainer's variables that the engine gets. No key to a service is among them, and nothing of torchrun's (RANK,
# WORLD_SIZE ...), from which an engine would take itself for one of torchrun's workers. Nor is VLLM_PORT: each of a
# machine's engines would look for its port from there on, at the same time.
ENGINE_VARIABLES = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ|TMPDIR|TMP|TEMP|LD_LIBRARY_PATH|LD_PRELOAD|"
    "VIRTUAL_ENV|PYTHON.*|(LC|XDG|CONDA)_.*|CC|CXX|CPATH|LIBRARY_PATH|"
    "(HTTP|HTTPS|ALL|NO|http|https|all|no)_(PROXY|proxy)|"
    "(REQUESTS|CURL)_CA_BUNDLE|SSL_CERT_(FILE|DIR)|"
    "VLLM_(?!API_KEY|PORT$).*|(HF|TRANSFORMERS|DIFFUSERS)_.*|HUGGING.*|"
    "(TORCH|TORCHINDUCTOR|PYTORCH|ATEN|TRITON|FLASHINFER)_.*|"
    "(CUDA|NVIDIA|NCCL|CUBLAS|CUDNN|GOMP|KMP|MKL|MALLOC|GLIBC)_.*|"
    "OMP_(WAIT_POLICY|PROC_BIND|PLACES)"
)


# ---- what must be there ----------------------------------------------------------------------------------------------
def check_engine(
    family: type[Family], model: str, engine_devices: Sequence[int], rollout_correction: str = "none"
) -> None:
    """Check that --rollout vllm can work: GPUs, hooks for the model's family, vLLM-Omni, attention heads.

    model: a diffusers folder or hub id. The others are the options --engine_devices and --rollout_correction.

    Raises:
        ValueError: naming the option, what is missing, and what to do.
    """
    parse_correction(rollout_correction)
    check_devices(engine_devices)
    if not family.has_engine_pipeline(model):
        told = f"{family.__name__} has no hooks into vLLM-Omni's steps for this model"
        raise ValueError(f"--rollout vllm: {told}: pass --rollout local")
    if importlib.util.find_spec("vllm_omni") is None:
        raise ValueError(
            "--rollout vllm needs vLLM-Omni, which is not installed: pip install -r requirements.txt "
            "(requirements-cuda.txt on a GPU; if pip fails, see docs/quickstart_gpu.md), or pass --rollout local"
        )
    if num_workers(engine_devices) > 1:
        check_heads(family, model, engine_devices)


def check_devices(engine_devices: Sequence[int]) -> None:
    """Check that --engine_devices names equally many GPUs for the engine of each rank of this machine.

    The first GPUs are the ranks' own, so none of them may be named. On a CPU any numbers do: they count workers.

    Raises:
        ValueError: naming the option, and what it must be.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_gpus = torch.cuda.device_count()
    option = f"--engine_devices {' '.join(map(str, engine_devices))}"
    if len(engine_devices) % num_ranks or len(set(engine_devices)) < len(engine_devices):
        each = f"for each of the {num_ranks} ranks of this machine"
        raise ValueError(f"{option}: must be equally many GPUs {each}, and each GPU once")
    for index in engine_devices:
        if num_gpus and not num_ranks <= index < num_gpus:
            raise ValueError(
                f"{option}: of the {num_gpus} GPUs seen here, from 0, "
                f"the first {num_ranks} are the ranks' own; {index} is none of the others"
            )


def check_heads(family: type[Family], model: str, engine_devices: Sequence[int]) -> None:
    """Raises ValueError unless vLLM-Omni splits the transformer, and its attention heads are dealt out equally."""
    from diffusers import AutoModel  # slow

    workers = num_workers(engine_devices)
    option = f"--engine_devices {' '.join(map(str, engine_devices))}: {workers} for each engine"
    if not family.is_split_by_engine:
        raise ValueError(f"{option}, but vLLM-Omni does not split {family.__name__}: each would hold all of it")
    num_heads = AutoModel.load_config(model, subfolder="transformer")["num_attention_heads"]
    if num_heads % workers:
        raise ValueError(f"{option} do not divide the model's {num_heads} heads")


# ---- what the engine of a rank gets ----------------------------------------------------------------------------------
def num_workers(engine_devices: Sequence[int]) -> int:
    """How many workers each engine of this machine is split over: its share of --engine_devices, or 1 without them."""
    return len(engine_devices) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) or 1


def engine_gpus(engine_devices: Sequence[int], device: torch.device) -> tuple[int | None, ...]:
    """The CUDA index of each worker of the engine whose rank trains on `device`; None for each worker on a CPU.

    Without --engine_devices the engine shares its rank's GPU.
    """
    workers = num_workers(engine_devices)
    if engine_devices and device.type == "cuda":
        return tuple(engine_devices[device.index * workers :][:workers])
    return (device.index,) * workers


def engine_environment(
    model: str | Path, gpus: Sequence[int | None], num_threads: int, compiles: bool = False
) -> dict[str, str]:
    """The environment variables of an engine's process: those of this process that it needs, and its own settings.

    gpus: as from engine_gpus. num_threads: of each of its processes, on a CPU. compiles: whether torch.compile works.
    """
    env = {name: value for name, value in os.environ.items() if ENGINE_VARIABLES.fullmatch(name)}
    here = Path(__file__).parent
    python_path = [str(here.parents[1]), str(here / "plugin"), *env.get("PYTHONPATH", "").split(os.pathsep)]
    # without the empty ones, which would be the working directory
    env["PYTHONPATH"] = os.pathsep.join(path for path in python_path if path)
    env["VLLM_NO_USAGE_STATS"] = "1"
    env.setdefault("VLLM_OMNI_DLO_DP_WAVE_TIMEOUT", f"{TIMEOUT_S:g}")  # of a chunk on several workers; else 600 s
    if Path(model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
        env.pop("HF_TOKEN", None)  # a model that is a folder needs none
        env.pop("HUGGING_FACE_HUB_TOKEN", None)
    env["GLOO_SOCKET_IFNAME"] = "lo"  # all its workers are on this machine
    if gpus[0] is None:
        env["TORCHDYNAMO_DISABLE"] = "0" if compiles else "1"
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # one malloc arena: memory that was freed in one arena is not reused in another, and the engine would grow
        env["MALLOC_ARENA_MAX"] = "1"
        env["OMP_NUM_THREADS"] = str(num_threads)
    else:
        visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        own = [visible[i] if i is not None and i < len(visible) else str(i) for i in gpus]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        # Qwen-Image's queries and keys are rotated in fp32, as the trainer's, by one kernel; otherwise in bf16 where a
        # batch has less than 2,048 tokens
        env.setdefault("VLLM_OMNI_FUSED_QK_NORM_ROPE_MIN_TOKENS", "0")
        # vLLM's memory pool of --engine_with sleep cannot have segments that grow, and turns them off where this name
        # asks for them; the newer one, which torch takes as well, it does not read
        if "PYTORCH_ALLOC_CONF" in env:
            env["PYTORCH_CUDA_ALLOC_CONF"] = env.pop("PYTORCH_ALLOC_CONF")
    return env
