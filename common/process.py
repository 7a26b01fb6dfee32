"""Orderly stops: a signal or a time limit asks a run to finish its step, save and exit."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import time
from types import FrameType

from common import PARENT

caught_signals: list[int] = []  # the numbers of the signals that asked for a stop
_deadline = math.inf  # by perf_counter


def print_message(line: str) -> None:
    """Print `line` to stderr, once a node; safe in a signal handler, where print may not be re-entered."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):  # a terminal that has gone must not end the run
            os.write(2, f"{printable(line)}\n".encode())


def printable(text: str) -> str:
    """`text` with what does not print escaped, such as newlines, ESC, and bytes of a path that are not UTF-8."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def end_with_parent() -> None:
    """End this process when torchrun does, however that ends: ranks that outlive it would go on writing. On Linux.

    If it ended already, while this process was importing, no signal comes any more: this process then ends at once.
    """
    _set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != PARENT:
        os.kill(os.getpid(), signal.SIGKILL)


def _set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # of prctl(2)
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def catch_stop_signals(max_minutes: float) -> None:
    """From now on SIGTERM and SIGINT (Ctrl-C), however often they come, only ask for a stop, as does the end of
    `max_minutes` (0: no limit). See stop_requested."""
    global _deadline
    caught_signals.clear()
    _deadline = time.perf_counter() + 60 * max_minutes if max_minutes else math.inf

    def remember(number: int, frame: FrameType | None) -> None:
        caught_signals.append(number)
        if len(caught_signals) == 1:  # torchrun passes on what a terminal has sent to all, so that one may come twice
            _set_parent_death_signal(0)  # torchrun, which a second signal ends at once, must not take the save with it
            print_message(f"{signal.Signals(number).name}: finishing this step, then saving")

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)


def stop_requested(needed_s: float = 0.0) -> bool:
    """Whether, on this rank, such a signal came, or the time that is left is less than `needed_s`."""
    return bool(caught_signals) or time.perf_counter() + needed_s >= _deadline
