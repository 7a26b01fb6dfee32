"""What a run needs on GPUs: bytes and FLOPs of a pass, known devices, the sizes that fit."""

from common.plan.devices import find_device
from common.plan.memory import Blueprint
from common.plan.needs import fit_to_gpus, measure, planned_run, work

__all__ = [
    "Blueprint",
    "find_device",
    "fit_to_gpus",
    "measure",
    "planned_run",
    "work",
]
