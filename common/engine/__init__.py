"""The vLLM-Omni rollout engine: a process of its own, and the trainer's end of the pipe to it.

The trainer's side needs no vLLM: `environment.py` checks what must be there, `client.py` starts the process and talks
to it, `mismatch.py` compares its policy with the trainer's. The engine's side: `server.py` is the process, `omni.py`
loads vLLM-Omni and samples, and the hooks in `pipelines.py` make its pipelines sample as the trainer does. Where there
is no GPU, vLLM-Omni finds its platform in `cpu_platform.py` and `cpu_worker.py`, through the entry point in `plugin/`.
Both sides use `messages.py`, the format of their calls and answers.
"""

from common.engine.client import VLLMEngine, launch
from common.engine.environment import check_engine
from common.engine.mismatch import check_mismatch, log_ratios, rollout_weights

__all__ = [
    "VLLMEngine",
    "check_engine",
    "check_mismatch",
    "launch",
    "log_ratios",
    "rollout_weights",
]
