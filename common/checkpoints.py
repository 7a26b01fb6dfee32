"""Checkpoints that are complete or not there, and what a run may write to; common/resuming.py finds them again.

At the end: files that a kill leaves complete, and the lock that keeps a second process out of a run's folder.
"""

import json
import os
import shutil
import socket
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.distributed import on_rank_0
from common.errors import NothingBegun, RunError, reason, truncate
from common.process import print_message

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

FORMAT = 5  # of args.json and of checkpoints; a file of another format is refused (common/resuming.py)
IS_FOLDER = 0x10  # the bit of a zip record's attributes that marks a folder


# ---- writing and reading one -----------------------------------------------------------------------------------------
def checkpoint_step(path: Path | str) -> int:
    """The step of a file named step_000030.pt, or -1 where it has another name."""
    number = Path(path).stem.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def saved_checkpoints(run: Path | str) -> list[Path]:
    """The files run/checkpoints/step_000030.pt, by step, the oldest first; none of them is half-written."""
    folder = Path(run) / "checkpoints"
    paths = [path for path in folder.glob("step_*.pt") if checkpoint_step(path) >= 0]
    return sorted(paths, key=checkpoint_step)


def checkpoint_path(run: Path | str, step: int) -> Path:
    """run/checkpoints/step_000030.pt."""
    return Path(run) / "checkpoints" / f"step_{step:06d}.pt"


def shards_of(path: Path) -> Path:
    """The folder with the tensors of a checkpoint of full weights (common/weights/shards.py); a LoRA has none."""
    return path.with_suffix(".shards")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: its file first, as shards without it are no checkpoint."""
    path.unlink()
    shutil.rmtree(shards_of(path), ignore_errors=True)


def save_checkpoint(run: Path | str, step: int, state: dict, keep: int) -> None:
    """Write `state` as run/checkpoints/step_000030.pt, then remove all but the newest `keep` (at least 1). On rank 0.

    state: nested dicts and lists of CPU tensors and plain values. A kill at any moment leaves the previous ones.

    Raises:
        RunError: the disk is full or fails in another way, or what was written cannot be loaded.
    """
    if not on_rank_0():
        return
    path = checkpoint_path(run, step)
    try:
        with atomic_file(path) as temporary:
            with open(temporary, "wb") as file:
                torch.save({**state, "script": Path(sys.argv[0]).stem}, file)
            load_checkpoint(temporary)  # read back before an older one goes
    except ValueError as error:  # of what was read back
        raise RunError(str(error)) from error
    saved = saved_checkpoints(run)
    up_to_this = saved[: saved.index(path) + 1]  # not those of later steps, which an older --resume left behind
    for old in up_to_this[:-keep]:
        remove_checkpoint(old)
    for stale in path.parent.glob(".step_*.new"):  # left by a kill
        stale.unlink()
    for folder in path.parent.glob("step_*.shards"):  # as well, where no file came
        if not folder.with_suffix(".pt").exists():
            shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(path: Path | str) -> dict:
    """What save_checkpoint was given, and the name of the `script` that wrote it, on the CPU. Every byte is checked
    against the file's CRC32s.

    Raises:
        ValueError: naming the file and why: it is missing, truncated, corrupt, or something else.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError("it is no file")  # a pipe would be waited for
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            if damaged:
                raise ValueError(f"bad CRC32 of {damaged}")
            # the one flag outside the checksums that harms: torch takes the record for a folder and reads none of it
            for record in archive.infolist():
                if record.external_attr & IS_FOLDER:
                    raise ValueError(f"{record.filename} is marked as a folder")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(saved, dict) or not isinstance(saved.get("script"), str):
            raise ValueError("torch saved it, but no script of ours")
        for name, (size, _) in saved.get("shards", {}).items():  # their CRC32s are checked by all ranks together
            file = Path(path).parent / name
            if not file.is_file() or file.stat().st_size != size:
                raise ValueError(f"{name} is missing or truncated")
        return saved
    except Exception as error:  # a flipped byte can make the readers of zip and pickle raise nearly anything
        first_line = reason(error).strip().partition("\n")[0]
        raise ValueError(truncate(f"{path} is not a whole checkpoint ({first_line})")) from error


# ---- a run's folder --------------------------------------------------------------------------------------------------
def check_unchanged(run: Path, checkpoint: Path | None) -> None:
    """Raises NothingBegun where another process has saved in `run` since `checkpoint` was chosen to resume from.

    Call it under the run's lock: nobody else can save any more.
    """
    chosen = checkpoint_step(checkpoint) if checkpoint and Path(checkpoint).is_relative_to(run) else -1
    for path in saved_checkpoints(run):
        if checkpoint_step(path) > chosen:
            with suppress(ValueError):  # a bad one, which was passed over in the choice
                load_checkpoint(path)
                raise NothingBegun(f"{run} was written to while this run was starting: give the same command again")


# ---- files -----------------------------------------------------------------------------------------------------------
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


# ---- the run's lock --------------------------------------------------------------------------------------------------
_locks: dict[Path, FileLock] = {}  # of the run folders that this process holds


def lock_run(folder: Path | str) -> None:
    """Take the run folder for this process, until it ends. Rank 0 does it, for all ranks.

    The lock is the operating system's (flock), on runs/<name>/.lock: it goes with the process, and holds on a shared
    file system that knows locks; where there are none, a line says so. .lock_holder.json beside it says who holds it.

    Raises:
        NothingBegun: another process holds it; the line names it.
    """
    path = Path(folder).resolve()
    if not on_rank_0() or path in _locks:
        return
    path.mkdir(parents=True, exist_ok=True)
    holder_file = path / ".lock_holder.json"
    lock = FileLock(path / ".lock", timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        holder = holder_file.read_text(errors="replace").strip() if holder_file.is_file() else "unknown"
        advice = "wait for it, or end it, or choose another --name"
        raise NothingBegun(f"{folder} is being written by another process ({holder}): {advice}") from None
    except (OSError, NotImplementedError) as error:
        print_message(f"{path} cannot be locked ({error}): make sure yourself that no other run writes to it")
        return
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        holder_file.write_text(json.dumps(record) + "\n")
    except OSError:  # a full disk
        lock.release()
        raise
    _locks[path] = lock
