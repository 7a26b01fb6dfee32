"""fp32 matrix products on a CPU by oneDNN, where torch takes MKL, which leaves the AVX-512 of other makers unused."""

import warnings
from pathlib import Path

import torch

LEAST = 2**20  # multiplications from which oneDNN's call is worth its microseconds
overrides = torch.library.Library("aten", "IMPL")  # an override lasts as long as this object


def use_onednn():
    """Override torch.mm and torch.addmm, forward and backward, where it helps: on an AMD CPU, beside no GPU.

    1.1 to 2.3 times as fast there, by the model of CPU (docs/records/matmul.txt). With gradient and without the numbers
    are equal to the bit, as before.
    """
    if torch.cuda.is_available() or not torch.backends.mkldnn.is_available() or not is_amd():
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        overrides.impl("mm", mm, "CPU")
        overrides.impl("addmm", addmm, "CPU")


def is_amd():
    """Whether this is an AMD CPU with AVX-512. On Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    text = cpuinfo.read_text()
    return "AuthenticAMD" in text and "avx512f" in text


def takes_onednn(a, b):
    """Whether the product (n, k) x (k, m) is of fp32 and large enough."""
    return a.dtype == b.dtype == torch.float32 and a.shape[0] * a.shape[1] * b.shape[1] >= LEAST


def mm(a, b):
    """aten::mm."""
    if not takes_onednn(a, b):
        return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))  # torch's own: the overload is not overridden
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, attr="none", scalars=[], algorithm="")


def addmm(bias, a, b, *, beta=1, alpha=1):
    """aten::addmm: beta bias + alpha a b."""
    is_plain = beta == 1 and alpha == 1 and bias.dim() == 1 and bias.shape[0] == b.shape[1]
    if not is_plain or bias.dtype != a.dtype or not takes_onednn(a, b):
        return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(a.shape[0], b.shape[1]))
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, attr="none", scalars=[], algorithm="")
