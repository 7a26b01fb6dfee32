"""Errors that end a script in one line on the screen."""

import os
import sys
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

from common.refusals import UNREADABLE, brief

# what gloo and NCCL say of a rank that has ended
RANK_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL communicator was aborted")
ANOTHER_RANK_LOST = "another rank was lost; if it left no line above, it was killed, most often for memory (see dmesg)"


class RunError(RuntimeError):
    """What stopped a run, and what to do about it."""


class NothingBegun(RunError):
    """What kept a start from going on: its folder is another process's, or the checkpoint another policy's. No way on
    is advised."""


@contextmanager
def one_line(error_type, run=None):
    """An error of that type ends the script with its message, without a traceback; others are bugs and keep theirs.

    A collective that fails because another rank is gone ends it in a line, too: that rank's own is the one to read.
    run: the run's folder. The line then says what the run can go on from, and where the traceback of what caused it is.
    """
    try:
        yield
    except error_type as error:
        # bad arguments are the same on every rank, and told once; a reward may fail to load on this rank alone
        is_everywhere = error_type is ValueError and isinstance(error.__cause__ or error, UNREADABLE)
        silent = is_everywhere and os.environ.get("LOCAL_RANK", "0") != "0"
        raise SystemExit(1 if silent else _line(error, run, error)) from None
    except RuntimeError as error:
        if not any(sign in str(error) for sign in RANK_IS_GONE):
            raise
        raise SystemExit(_line(ANOTHER_RANK_LOST, run, error)) from None


def _line(message, run, error):
    """The script's last line: the message and, of a run that had begun, what its folder holds of use now."""
    from common.checkpoints import saved_checkpoints  # which imports this file

    told = f"{Path(sys.argv[0]).name}: error: {brief(str(message))}"
    if run is None or not run.is_dir() or isinstance(error, NothingBegun):
        return told
    if error.__cause__:  # what a user's reward raised, say
        path = run / f"traceback_rank{os.environ.get('RANK', '0')}.txt"
        with suppress(OSError):  # a full disk, which may be the error itself
            path.write_text("".join(traceback.format_exception(error)))
            told += f"; traceback: {brief(str(path))}"
    saved = saved_checkpoints(run)
    if saved:
        told += f"; go on from {saved[-1].name}: the same command with --resume latest"
    return told
