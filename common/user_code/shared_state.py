"""What a user's file shares with the run: settings of the whole process, or of the thread that runs rewards."""

import functools
import gc
import locale
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from common.process import print_once

import numpy as np
import torch
from PIL import Image, ImageFile

# Of the environment only what says which rank and which GPU a process is: a file may set other variables, and its
# libraries read them later.
VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "CUDA_VISIBLE_DEVICES",
)
LONGEST = 200  # letters of values that a message shows


class Setting(NamedTuple):
    """A setting, how a message names it, and how it is read and written."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _attribute(owner: Any, name: str, shown: str) -> Setting:
    return Setting(shown, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _variable(name: str) -> Setting:
    def write(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return Setting(name, lambda: os.environ.get(name), write)


def _set_locale(name: str) -> None:
    locale.setlocale(locale.LC_ALL, name)


def _error_filters() -> list:
    return [entry for entry in warnings.filters if entry[0] == "error"]


def _keep_error_filters(entries: list) -> None:
    warnings.filters[:] = [entry for entry in warnings.filters if entry[0] != "error" or entry in entries]  # type: ignore[index]


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's newer settings say something else
        return "mixed"


def _cuda_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _use_cuda_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _precision(owner: Any, shown: str) -> Setting:
    return _attribute(owner, "fp32_precision", f"torch.backends.{shown}fp32_precision")


backends: Any = torch.backends  # its modules are replaced when torch is imported
# Made from Python and from the libraries of requirements-core.txt. In the list is what changes the numbers of a run,
# where its files go, which pictures it can read, or whether it can go on. Gradients, default device, current GPU,
# autocast, number of threads and NumPy's errors belong to a thread. In the thread of users' files they are put back as
# well, so that every file finds what the first one found.
#
# Not in the list, as a run does not depend on it, or as it cannot be put back:
# - what a file replaces inside of a library, which nobody can list;
# - sys.path and other variables: a file may need them at its calls. Helpers of one name are refused (loading.py);
# - seeds and states of random numbers: a run seeds them after all files are imported, and its noise has generators of
#   its own;
# - signal handlers: Python sets them in the main thread alone, where no user's file runs;
# - sys.stdout and sys.stderr: the old stream may be closed by then;
# - what only changes how something is printed or drawn: loggers, ignored warnings, print options of NumPy and torch,
#   sys.excepthook, matplotlib's styles. Of diffusers, transformers, peft, wandb, onnxruntime, rapidocr, tqdm and tyro
#   we know no other setting of the whole process; those of pyarrow change its speed; httpx and filelock have none;
# - time limits of sockets, the start method of multiprocessing and the recursion limit: CleanFlow gives its own, or
#   needs no other.
#
# An older setting of torch comes before the newer ones that it changes as well.
SETTINGS = (
    # where files go, who this process is, and whether it lives
    Setting("the working directory", os.getcwd, os.chdir),
    *map(_variable, VARIABLES),
    Setting("sys.argv", lambda: list(sys.argv), lambda value: sys.argv.__setitem__(slice(None), value)),
    Setting("the locale", functools.partial(locale.setlocale, locale.LC_ALL), _set_locale),
    Setting("warnings as errors", _error_filters, _keep_error_filters),
    # tensors that the trainer makes, and their gradients
    Setting("torch's gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("torch's default device", torch.get_default_device, lambda value: torch.set_default_device(None)),
    Setting("the current GPU", _cuda_device, _use_cuda_device),
    Setting(
        "autocast",
        lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        lambda value: [torch.set_autocast_enabled(*pair) for pair in zip(("cpu", "cuda"), value, strict=True)],
    ),
    Setting(
        "torch's anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    # how products are rounded, and which kernels run
    Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("torch's deterministic mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory", "torch's filling of new memory"),
    Setting("torch's matmul precision", _matmul_precision, torch.set_float32_matmul_precision),
    _precision(backends, ""),
    _precision(backends.cudnn, "cudnn."),
    _precision(backends.mkldnn, "mkldnn."),
    _precision(backends.cuda.matmul, "cuda.matmul."),
    _precision(backends.cudnn.conv, "cudnn.conv."),
    _precision(backends.cudnn.rnn, "cudnn.rnn."),
    _precision(backends.mkldnn.matmul, "mkldnn.matmul."),
    _precision(backends.mkldnn.conv, "mkldnn.conv."),
    _precision(backends.mkldnn.rnn, "mkldnn.rnn."),
    *(
        _attribute(backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", f"{kind} reductions of torch")
        for kind in ("fp16", "bf16")
    ),
    *(
        _attribute(backends.cudnn, name, f"torch.backends.cudnn.{name}")
        for name in ("enabled", "benchmark", "deterministic")
    ),
    _attribute(backends.mkldnn, "enabled", "torch.backends.mkldnn.enabled"),
    Setting("NumPy's errors", np.geterr, lambda value: np.seterr(**value)),
    # which pictures are read
    _attribute(Image, "MAX_IMAGE_PIXELS", "PIL.Image.MAX_IMAGE_PIXELS"),
    _attribute(ImageFile, "LOAD_TRUNCATED_IMAGES", "PIL.ImageFile.LOAD_TRUNCATED_IMAGES"),
)


# The main thread itself changes these for a moment: its attention (torch's sdpa_kernel), and a checkpoint, which holds
# the collector while it gathers the optimizer's state. While it works, nobody can say who changed them.
TRAINERS_SETTINGS = (
    Setting("the garbage collector", gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    *(
        Setting(
            f"torch's {kind} attention",
            getattr(backends.cuda, f"{kind}_sdp_enabled"),
            getattr(backends.cuda, f"enable_{kind}_sdp"),
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
)


@contextmanager
def kept(subject: str, *, beside_sampling: bool) -> Iterator[None]:
    """Put back what the block changes of SETTINGS, and report it in one line that begins with `subject`, once.

    beside_sampling: the main thread does not wait for the block; TRAINERS_SETTINGS are left out.
    """
    settings = SETTINGS if beside_sampling else SETTINGS + TRAINERS_SETTINGS
    before = [setting.read() for setting in settings]
    try:
        yield
    finally:
        changes = []
        for setting, value in zip(settings, before, strict=True):
            now = setting.read()
            if now != value:
                values = f" ({value} to {now})"
                changes.append(setting.name + (values if len(values) < LONGEST else ""))
        for setting, value in (*zip(settings, before, strict=True),) if changes else ():
            if setting.read() != value:
                setting.write(value)
        if changes:
            print_once(f"{subject} changed {', '.join(changes)}, which the run shares: put back (docs/rewards.md)")
