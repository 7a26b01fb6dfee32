"""A run: its options, its folder with everything that it leaves there, and how it ends."""

from common.run.checks import check_inputs
from common.run.command_line import parse_args
from common.run.ending import friendly_errors
from common.run.evaluation import evaluate_samples, log_rollout
from common.run.inputs import Inputs, checkpoint_to_resume, choose_sizes
from common.run.run import Run

__all__ = [
    "Inputs",
    "Run",
    "check_inputs",
    "checkpoint_to_resume",
    "choose_sizes",
    "evaluate_samples",
    "friendly_errors",
    "log_rollout",
    "parse_args",
]
