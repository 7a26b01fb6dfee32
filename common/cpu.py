"""What a run without a GPU needs: a torchvision that loads, no GPU behind an old driver, and its share of the CPUs."""

import math
import os
import sys
from contextlib import suppress
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


def quota_cores(root: Path = Path("/")) -> float:
    """How many cores' time Linux's cgroups leave this process, as `docker --cpus` and Kubernetes' limits set it.

    The smallest quota from this process's group up to the root counts. inf: there is none, or no cgroup is mounted.
    root: of the file system, for tests.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return math.inf
    own: dict[str, str] = {}  # this process's group by controller; "" is version 2
    for _, controllers, path in (line.split(":", 2) for line in groups):
        own |= dict.fromkeys(controllers.split(","), path)
    quotas = [math.inf]
    for mount in mounts:
        # proc(5): ID, parent, device, the group that is mounted, where, options, " - ", type, source, options
        fields, _, file_system = mount.partition(" - ")
        top, place = fields.split()[3:5]
        kind, *_, options = file_system.split()
        if kind == "cgroup2":
            path = own.get("", "/")
        elif kind == "cgroup" and "cpu" in options.split(","):
            path = own.get("cpu", "/")
        else:
            continue
        # in a container the mount may begin at the container's own group, which the path names from the host's root
        below = os.path.relpath(path, top)
        folder = root / place.lstrip("/")
        parts = [] if below == "." or below.startswith("..") else below.split("/")
        for depth in range(len(parts) + 1):
            quotas.append(_quota_of(folder.joinpath(*parts[:depth]), kind))
    return min(quotas)


def _quota_of(group: Path, kind: str) -> float:
    """The cores' time of one cgroup folder: microseconds of CPU time by microseconds; inf where it has no quota."""
    with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, "max", or a folder that is no cgroup
        if kind == "cgroup2":
            quota, period = map(int, (group / "cpu.max").read_text().split())
        else:
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if quota > 0:  # -1 is none
            return quota / period
    return math.inf
