"""The GPUs whose memory and rates are known: what tools/plan.py and perf/mfu count with."""

from typing import NamedTuple


class Device(NamedTuple):
    """The device that a rank runs on, and its engine."""

    memory_gb: float | None  # in 1e9 bytes, for all processes on it; None: as much as this machine has
    bfloat16: float | None  # matrix rate in TFLOP/s; None: no seconds are printed
    float32: float | None
    tf32: float | None  # of the VAE, whose convolutions torch does in TF32


# Rates of dense matrix products: for H100 SXM, H200 SXM and A100 from NVIDIA's data sheets; for the RTX 4090 from the
# whitepaper on its architecture, with accumulation in fp32. torch's matrix products in float32 do without TF32
DEVICES = {
    "rtx4090": Device(24, 165, 82.6, 82.6),
    "a100-40": Device(40, 312, 19.5, 156),
    "a100-80": Device(80, 312, 19.5, 156),
    "h100-80": Device(80, 989, 67, 494),
    "h200-141": Device(141, 989, 67, 494),
    "cpu": Device(None, None, None, None),
}
# a part of the name that CUDA gives a GPU. "H100 PCIe" and "H100 NVL" are slower cards of the same name
NAMES = {"RTX 4090": "rtx4090", "A100": "a100-80", "H100 80GB HBM3": "h100-80", "H200": "h200-141"}


def find_device(name: str) -> Device | None:
    """The Device of a GPU by CUDA's name for it, such as "NVIDIA H100 80GB HBM3"; None for one that we do not know."""
    return next((DEVICES[known] for part, known in NAMES.items() if part in name), None)
