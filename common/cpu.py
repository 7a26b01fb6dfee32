"""What a run without a GPU needs: a torchvision that loads, no GPU behind an old driver, and an AMD CPU's AVX-512."""

import functools
import os
import sys
import warnings
from pathlib import Path

import torch


def repair_torchvision() -> None:
    """Let diffusers and transformers import torchvision beside a CPU build of torch; call it before they are imported.

    The torchvision on the package index is linked against CUDA and dies on import with "operator torchvision::nms does
    not exist". Declaring the operators' schemas first is enough for the parts that are used. torchaudio and torchcodec
    fail in the same way and are hidden. Nothing happens on a CUDA build, or where torchvision loads.
    """
    if torch.version.cuda is not None:
        return
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return  # it is not installed, so transformers does not import it either
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", schema)
        sys.modules["torchaudio"] = sys.modules["torchcodec"] = None  # type: ignore[assignment]  # None: "hidden"


def refuse_an_old_driver() -> None:
    """With a driver older than its CUDA, torch sees no GPU, and the run would train on the CPU without a word.

    Raises:
        ValueError: the driver is too old. CUDA_VISIBLE_DEVICES= asks for the CPU, and is granted.
    """
    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    try:
        torch.cuda.init()
    except RuntimeError as error:  # also where there is no driver, or no GPU
        if "too old" in str(error):
            raise ValueError(
                f"the NVIDIA driver is too old for torch's CUDA {torch.version.cuda}: update it (CUDA 13 needs 580 or "
                "later; nvidia-smi shows yours), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            ) from error


LEAST = 2**20  # multiplications from which oneDNN's call is worth its microseconds
overrides = torch.library.Library("aten", "IMPL")  # an override lasts as long as this object


@functools.cache
def use_onednn() -> None:
    """Take oneDNN's fp32 matrix products, forward and backward, on an AMD CPU with AVX-512 and no GPU beside it.

    Torch takes MKL's, which leave other makers' AVX-512 unused: oneDNN's are 1.1 to 2.3 times as fast, by the model of
    CPU. With gradient and without, the numbers stay equal to the bit.
    """
    if torch.cuda.is_available() or not torch.backends.mkldnn.is_available() or not is_amd():
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        overrides.impl("mm", mm, "CPU")
        overrides.impl("addmm", addmm, "CPU")


def is_amd() -> bool:
    """Whether this is an AMD CPU with AVX-512, on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    text = cpuinfo.read_text()
    return "AuthenticAMD" in text and "avx512f" in text


def takes_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the product (n, k) x (k, m) is of fp32 and large enough."""
    return a.dtype == b.dtype == torch.float32 and a.shape[0] * a.shape[1] * b.shape[1] >= LEAST


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aten::mm."""
    if not takes_onednn(a, b):
        return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))  # torch's own: the overload is not overridden
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, attr="none", scalars=[], algorithm="")


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """aten::addmm: beta bias + alpha a b."""
    is_plain = beta == 1 and alpha == 1 and bias.dim() == 1 and bias.shape[0] == b.shape[1]
    if not is_plain or bias.dtype != a.dtype or not takes_onednn(a, b):
        return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(a.shape[0], b.shape[1]))
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, attr="none", scalars=[], algorithm="")


def leave_cores_to_this_thread() -> None:
    """On a CPU, let the rollout's OpenMP threads sleep while they wait for each other, as long as this thread lives.

    Otherwise they spin on the core that this thread needs. Libgomp lets them sleep where it has more threads than
    cores, and this operation is large enough for this thread to start some of its own.
    """
    torch.ones(2**20)
