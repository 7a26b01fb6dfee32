"""What of the user's cannot be read is refused in one line: it names the file or the option, and it can be printed."""

from contextlib import contextmanager

LONGEST = 600  # letters of a line
UNREADABLE = (ValueError, OSError, RecursionError)  # what reading text and JSON raises


@contextmanager
def refusing(subject, errors=UNREADABLE):
    """Errors of these types in the block become ValueError("subject: reason"), on one line.

    subject: a file, perhaps with a line, or an option. errors: Exception where a library reads the file, which can
    raise nearly anything over a flipped byte.
    """
    try:
        yield
    except errors as error:
        raise ValueError(brief(f"{subject}: {reason(error)}")) from error


def reason(error):
    """What an exception says, an OSError without its number and its file, which is named already."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def brief(text):
    """`text` as it can stand on one line: what does not print is escaped, and of a long one the middle is left out."""
    printable = [letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text]
    line = "".join(printable)
    if len(line) <= LONGEST:
        return line
    half = LONGEST // 2
    return f"{line[:half]} ... {line[-half:]}"
