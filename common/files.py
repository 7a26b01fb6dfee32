"""Files that a kill leaves complete, and a full disk told in one line."""

import os
from contextlib import contextmanager
from pathlib import Path

from common.errors import RunError

from safetensors import SafetensorError


@contextmanager
def writing(path):
    """A full or failing disk ends the block, and with it the run, by a RunError that names `path`."""
    try:
        yield
    except RunError:
        raise  # it names its file already
    except (OSError, RuntimeError, SafetensorError) as error:
        # Closing its archive, torch raises "unexpected pos"; what the file raised before is that error's context
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError | SafetensorError):
            raise  # nothing to do with the disk
        reason = getattr(cause, "strerror", None) or cause
        raise RunError(f"{path} could not be written ({reason})") from error


@contextmanager
def atomic_file(path, shared=False):
    """Yield the path of a temporary file that takes the place of `path` once the block has ended and it is on disk.

    A kill, an exception or a full disk at any moment leaves the previous `path`, or the new one, complete; only a kill
    leaves the temporary file. A full disk raises `writing`'s RunError. shared: other processes may write it, too.
    """
    path = Path(path)
    owner = f".{os.getpid()}" if shared else ""
    temporary = path.with_name(f".{path.name}{owner}.new")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            sync(temporary)  # before the rename, which must not reach the disk ahead of the content
            temporary.replace(path)
            sync(path.parent)  # the new name is on disk too
        finally:
            temporary.unlink(missing_ok=True)


def sync(path):
    """Wait until a file's content, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
