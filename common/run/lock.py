"""The lock that keeps a second process out of a run's folder."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from common.distributed import on_rank_0
from common.errors import NothingBegun
from common.files import checkpoint_step, load_checkpoint, saved_checkpoints
from common.process import print_message

from filelock import FileLock, Timeout


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
