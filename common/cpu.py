"""What a run without a GPU needs: a torchvision that loads, and no GPU behind an old driver."""

import os
import sys

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
