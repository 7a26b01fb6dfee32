"""What the five scripts share: SDE maths, rewards, data, model families, rollout engines, the run folder.

Importing this package repairs one thing: next to a CPU build of torch, the registry's torchvision (linked against CUDA)
dies on import with "operator torchvision::nms does not exist", and transformers imports torchvision. Declaring the
operators' schemas first is enough for the parts that are used; torchaudio and torchcodec fail the same way and are
hidden. The scripts import `common` before diffusers. Nothing happens on a CUDA build, or where torchvision loads.
And it makes fp32 twice as fast on an AMD CPU: common/cpu_matmul.py.
"""

import sys

import common.stops  # noqa: F401  (notes this process's parent, before the seconds that torch's import takes)
from common.cpu_matmul import use_onednn

import torch


def _repair_torchvision():
    if torch.version.cuda is not None:
        return
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return  # not installed, so transformers does not import it either
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", schema)
        sys.modules["torchaudio"] = sys.modules["torchcodec"] = None


_repair_torchvision()
use_onednn()
