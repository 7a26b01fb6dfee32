"""What a run needs of its machine: a torchvision that loads, no old driver, and its share of CPUs and memory."""

import math
import os
import sys
from collections.abc import Iterator
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
    return min((_quota_of(group, kind) for group, kind in _own_groups("cpu", root)), default=math.inf)


def memory_bytes(root: Path = Path("/")) -> float:
    """The machine's memory, or the part of it that Linux's cgroups leave this process, as `docker --memory`, SLURM and
    Kubernetes' limits set it: the smallest limit from its group up to the root."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(_limit_of(group, kind) for group, kind in _own_groups("memory", root))])


def _own_groups(controller: str, root: Path) -> Iterator[tuple[Path, str]]:
    """The folders of this process's cgroup and of those above it that have the controller, with "cgroup" (version 1) or
    "cgroup2"."""
    try:
        groups = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    own: dict[str, str] = {}  # this process's group by controller; "" is version 2
    for _, controllers, path in (line.split(":", 2) for line in groups):
        own |= dict.fromkeys(controllers.split(","), path)
    for mount in mounts:
        # proc(5): ID, parent, device, the group that is mounted, where, options, " - ", type, source, options
        fields, _, file_system = mount.partition(" - ")
        top, place = fields.split()[3:5]
        kind, *_, options = file_system.split()
        if kind == "cgroup2":
            path = own.get("", "/")
        elif kind == "cgroup" and controller in options.split(","):
            path = own.get(controller, "/")
        else:
            continue
        # in a container the mount may begin at the container's own group, which the path names from the host's root
        below = os.path.relpath(path, top)
        folder = root / place.lstrip("/")
        parts = [] if below == "." or below.startswith("..") else below.split("/")
        for depth in range(len(parts) + 1):
            yield folder.joinpath(*parts[:depth]), kind


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


def _limit_of(group: Path, kind: str) -> float:
    """The bytes of memory of one cgroup folder; inf, or in version 1 a huge number, where it has no limit."""
    with suppress(OSError, ValueError):  # no such file, or "max"
        return int((group / ("memory.max" if kind == "cgroup2" else "memory.limit_in_bytes")).read_text())
    return math.inf
