"""Orderly stops: a signal or a time limit asks a run to finish its step, save and exit."""

import contextlib
import ctypes
import functools
import io
import math
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from common import PARENT

# A closed terminal sends SIGHUP; SLURM's --signal may be set to the last two. Ctrl-\ (SIGQUIT) still ends a run at once
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
caught_signals: list[int] = []  # the numbers of the signals that asked for a stop
_deadline = math.inf  # by perf_counter
_forking = threading.local()  # the signals that a thread blocked before it began to fork


def print_message(line: str) -> None:
    """Print `line` to stderr, once a node; safe in a signal handler, where print may not be re-entered."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):  # a terminal that has gone must not end the run
            os.write(2, f"{printable(line)}\n".encode())


@functools.cache
def print_once(line: str) -> None:
    """print_message, unless this process has printed the same line: for checks that run several times."""
    print_message(line)


def printable(text: str) -> str:
    """`text` with what does not print escaped, such as newlines, ESC, and bytes of a path that are not UTF-8."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class _LosingWriter(io.FileIO):
    """A file descriptor where what cannot be written is lost."""

    def write(self, content: Any) -> int:  # any buffer
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def outlive_terminal() -> None:
    """From now on what this process prints to a closed terminal, to `| tee` that Ctrl-C has ended, or to a full disk is
    lost, where it would end the run by an OSError."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream:  # None where the process was started without it
            file = io.BufferedWriter(_LosingWriter(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True))


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


def _remember(number: int, frame: FrameType | None) -> None:
    """The handler of stop signals: only note that one came."""
    caught_signals.append(number)
    if len(caught_signals) == 1:  # torchrun passes on what a terminal has sent to all, so that one may come twice
        _set_parent_death_signal(0)  # torchrun, which a second signal ends at once, must not take the save with it
        print_message(f"{signal.Signals(number).name}: finishing this step, then saving")


@functools.cache  # once a process: nothing can be unregistered
def _let_children_be_stopped() -> None:
    """From now on a child that this process forks, as a reward's process pool does, has default handlers of stop
    signals: with ours, terminate() would not end it, and whoever waits for it would wait for ever.

    The signals are blocked while it is forked. One that came before the child has its handlers would be lost.
    """

    def block() -> None:
        _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)

    def restore_and_unblock() -> None:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is _remember:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore_and_unblock)
    multiprocessing.util.register_after_fork(_forking, _stand_apart)


def _stand_apart(_: object) -> None:
    """In a process that multiprocessing has forked: leave the trainer's group, and end when the trainer has ended.

    A signal to the group, as torchrun and Ctrl-C send it, would end a pool's workers in the middle of a call, while the
    trainer finishes its step. The kernel's signal of a parent's death will not do: it comes when the thread ends that
    has forked. Only multiprocessing's children, because the leader of a group may not call os.setsid, as children of
    os.fork and `preexec_fn` do.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent  # this is a child

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with the trainer", daemon=True).start()


def catch_stop_signals(max_minutes: float) -> None:
    """From now on a stop signal, however often it comes, only asks for a stop, as does the end of `max_minutes` (0: no
    limit). See stop_requested. Children that this process forks have default handlers.

    A signal that this process was started to ignore, as by `nohup`, stays ignored. torchrun handles them itself.
    """
    global _deadline
    caught_signals.clear()
    _deadline = time.perf_counter() + 60 * max_minutes if max_minutes else math.inf
    _let_children_be_stopped()
    for number in STOP_SIGNALS:
        if "TORCHELASTIC_RUN_ID" in os.environ or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _remember)


def is_killed_early() -> bool:
    """Whether torchrun started this process without --shutdown_timeout: it kills a run 30 s after a signal, then."""
    given = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"} & os.environ.keys()
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{PARENT}/cmdline").read_bytes()
        return "TORCHELASTIC_RUN_ID" in os.environ and not given and b"shutdown" not in command
    return False


def stop_requested(needed_s: float = 0.0) -> bool:
    """Whether, on this rank, such a signal came, or the time that is left is less than `needed_s`."""
    return bool(caught_signals) or time.perf_counter() + needed_s >= _deadline
