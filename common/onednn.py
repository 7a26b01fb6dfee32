"""oneDNN's fp32 matrix products in the place of torch's own, on an AMD CPU with AVX-512 and no GPU beside it.

Torch takes MKL's products, which leave other makers' AVX-512 unused, and has no switch that chooses oneDNN's.
`use_onednn` overrides aten::mm and aten::addmm by oneDNN's; the numbers stay equal to the bit, with gradient and
without. They are 1.1 to 2.3 times as fast, by the model of CPU, and `flow_grpo.py --rollout local` takes 9 % less CPU
time (docs/lab/performance.md). CLEANFLOW_ONEDNN=0 in the environment turns it off.
"""

import functools
import os
import warnings
from pathlib import Path

import torch

LEAST = 2**20  # multiplications from which oneDNN's call is worth its microseconds
overrides = torch.library.Library("aten", "IMPL")  # an override lasts as long as this object


@functools.cache
def use_onednn() -> None:
    """Override the products from here on, in this process; nothing happens on another CPU, beside a GPU, or if told."""
    if torch.cuda.is_available() or not torch.backends.mkldnn.is_available() or not is_amd():
        return
    if os.environ.get("CLEANFLOW_ONEDNN") == "0":
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
