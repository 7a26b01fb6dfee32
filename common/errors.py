"""Errors that end a script in one line on the screen."""
import sys
from contextlib import contextmanager
from pathlib import Path


class RunError(RuntimeError):
    """What stopped a run, and what to do about it."""


@contextmanager
def one_line(error_type):
    """An error of that type ends the script with its message, without a traceback; others are bugs and keep theirs."""
    try:
        yield
    except error_type as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: error: {error}") from None
