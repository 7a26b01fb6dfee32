"""Errors that a user can cause: each ends the script in one line that names the option, file or line at fault."""

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.process import printable


class RunError(RuntimeError):
    """A run cannot continue; the message says why, and what to do about it."""


class RolloutError(RunError):
    """Sampling or scoring failed on this rank or, where there is no message, on another. All ranks raise it together,
    so that they can still save."""


class NothingBegun(RunError):
    """A run could not start: another process owns its folder, or the checkpoint is of another policy. Resuming would
    not help, and is not advised."""


LONGEST = 600  # letters of a line
UNREADABLE = (ValueError, OSError, RecursionError)  # raised by reading text and JSON


@contextmanager
def error_prefix(
    subject: str | Path, errors: type[BaseException] | tuple[type[BaseException], ...] = UNREADABLE
) -> Iterator[None]:
    """Errors of these types in the block become ValueError("subject: reason"), on one line.

    subject: a file, perhaps with a line, or an option. errors: Exception where a library reads the file, which can
    raise nearly anything over a flipped byte.
    """
    try:
        yield
    except errors as error:
        raise ValueError(truncate(f"{subject}: {reason(error)}")) from error


def reason(error: BaseException) -> str:
    """The message of an exception; an OSError's without its number and its file, which is named already. That of a
    file in UTF-16 has the way out."""
    if isinstance(error, UnicodeDecodeError) and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return f"{error}; convert it by `iconv -f UTF-16 -t UTF-8 OLD > NEW`"
    if isinstance(error, SystemExit):
        return repr(error)
    return getattr(error, "strerror", None) or message_of(error) or type(error).__name__


def message_of(error: BaseException) -> str:
    """str(error); nothing of a user's exception that cannot say what it is."""
    try:
        return str(error)
    except Exception:  # whatever its __str__ raises
        return ""


def truncate(text: str) -> str:
    """`text` on one line: letters that do not print are escaped, and the middle of a long text is left out."""
    line = printable(text)
    if len(line) <= LONGEST:
        return line
    half = LONGEST // 2
    return f"{line[:half]} ... {line[-half:]}"
