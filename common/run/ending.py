"""How a script ends: in one line for an error that a user can cause."""

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.cpu import repair_torchvision
from common.distributed import end_distributed
from common.errors import UNREADABLE, NothingBegun, RolloutError, RunError, truncate
from common.files import saved_checkpoints
from common.process import stop_requested

# what gloo and NCCL say of a rank that has ended, or hangs
RANK_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
    "Timed out waiting",
)
ANOTHER_RANK_LOST = "another rank was lost; if it left no line above, it hangs, or was killed for memory (see dmesg)"


# ---- a whole script --------------------------------------------------------------------------------------------------
_current_run: list[Any] = []  # the Run of this process, once it has begun


@contextmanager
def friendly_errors() -> Iterator[None]:
    """The whole of a script: expected errors end it with one line and no traceback; a good end leaves torchrun's world.

    Expected are a RunError and, until the run has begun, a ValueError: bad options or files. A collective that fails
    because another rank is gone also ends in one line; the lost rank's own line is the one to read. Every other
    exception is a bug and keeps its traceback.
    """
    _current_run.clear()
    repair_torchvision()  # before diffusers is imported
    if "triton" not in sys.modules:  # whose library would print at exit that what is frozen has leaked
        gc.freeze()  # what has been imported is no garbage: to look through it takes seconds at the end of a process
    try:
        yield
    except (ValueError, RuntimeError) as error:  # a RunError is a RuntimeError, as what torch raises
        run = _current_run[0] if _current_run else None
        is_training = run is not None and run.has_begun_training
        if run and run.bar is not None:
            run.bar.close()  # the last line is one of its own
        if run and isinstance(error, RolloutError):
            run.save_after_failure()
        value = exit_value(error, run.folder if run else None, is_training)
        if value is None:
            raise
        raise SystemExit(value) from None
    end_distributed()


def exit_value(error: Exception, folder: Path | None, is_training: bool) -> str | int | None:
    """What the script exits with: a line for the screen, or a status. None where the error is a bug.

    folder: the run's; None before the run has begun. is_training: a training step has begun.
    """
    if isinstance(error, ValueError | RunError):
        if isinstance(error, ValueError) and folder:
            return None
        if isinstance(error, RolloutError) and not str(error):  # another rank has the line
            return 1
        # bad options are the same on every rank, and printed once. A reward's `load` may raise anything else, which is
        # the error's cause then, on this rank alone
        is_everywhere = isinstance(error, ValueError) and isinstance(error.__cause__ or error, UNREADABLE)
        silent = is_everywhere and os.environ.get("LOCAL_RANK", "0") != "0"
        return 1 if silent else last_line(str(error), error, folder)
    if not any(sign in str(error) for sign in RANK_IS_GONE):
        return None
    # the lost rank may have stopped as asked, while prompts were encoded, say: its --max_minutes may have ended a
    # minute before this rank's
    has_stopped = stop_requested(60.0) and not is_training
    return 0 if has_stopped else last_line(ANOTHER_RANK_LOST, error, folder)


def last_line(message: str, error: Exception, folder: Path | None) -> str:
    """The message and, where a run had begun, what its folder holds of use now."""
    line = f"{Path(sys.argv[0]).name}: error: {truncate(message)}"
    if folder is None or isinstance(error, NothingBegun) or not folder.is_dir():
        return line
    if error.__cause__:  # what a user's reward raised, for example
        path = folder / f"traceback_rank{os.environ.get('RANK', '0')}.txt"
        with suppress(OSError):  # a full disk, which may be the error itself
            path.write_text("".join(traceback.format_exception(error)))
            line += f"; traceback: {truncate(str(path))}"
    saved = saved_checkpoints(folder)
    if saved:
        line += f"; to resume from {saved[-1].name}, give the same command with --resume latest"
    return line
