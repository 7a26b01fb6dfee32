"""The last line of a run that failed: what went wrong, what its folder holds of use, and how to resume."""

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from common.checkpoints import saved_checkpoints
from common.errors import UNREADABLE, NothingBegun, RunError, truncate
from common.process import caught_signals
from common.ranks import missing_ranks

# what gloo and NCCL say of a rank that has ended
RANK_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL communicator was aborted")
ANOTHER_RANK_LOST = "another rank was lost; if it left no line above, it was killed, most often for memory (see dmesg)"


def exit_value(error: Exception, folder: Path | None, *, is_training: bool) -> str | int | None:
    """What the script exits with: a line for the screen, or a status. None where the error is a bug.

    folder: the run's; None before the run has begun. is_training: a training step has begun.
    """
    if isinstance(error, ValueError | RunError):
        if isinstance(error, ValueError) and folder:
            return None
        # bad options are the same on every rank, and printed once; a reward may fail to load on this rank alone
        is_everywhere = isinstance(error, ValueError) and isinstance(error.__cause__ or error, UNREADABLE)
        silent = is_everywhere and os.environ.get("LOCAL_RANK", "0") != "0"
        return 1 if silent else last_line(str(error), error, folder)
    if "Timed out waiting" in str(error):  # gloo's words
        missing = missing_ranks()
        return last_line(missing, error, folder) if missing else 1
    if not any(sign in str(error) for sign in RANK_IS_GONE):
        return None
    has_stopped = bool(caught_signals) and not is_training  # while prompts were encoded, say
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
