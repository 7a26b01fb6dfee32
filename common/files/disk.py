"""Files that a kill leaves complete, and a line that names the file where a disk is full."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import RunError

from safetensors import SafetensorError


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
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
def atomic_file(path: Path | str, shared: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file that takes the place of `path` once the block has ended and it is on disk.

    A kill, an exception or a full disk at any moment leaves the previous `path`, or the new one, complete; only a kill
    leaves the temporary file. A full disk raises `writing`'s RunError. shared: other processes may write it as well.
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


def remove_stale(temporary_files: Iterable[Path], age_s: float = 3600.0) -> None:
    """Remove the temporary files that a kill has left. A younger one may be another run's, which is writing it."""
    for file in temporary_files:
        with suppress(OSError):  # another run removes them too
            if time.time() - file.stat().st_mtime >= age_s:
                file.unlink()


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
