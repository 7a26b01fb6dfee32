"""One writer a run folder: a lock that is held as long as the process lives, however it ends."""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from common.distributed import on_rank_0
from common.errors import NothingBegun
from common.stops import say

LOCK_FILE = ".lock"
_held = {}  # {path: descriptor of the open file that holds its lock}


def lock_run(folder):
    """Take the run folder for this process, until it ends. Rank 0 does it, for all ranks.

    The lock is the operating system's, on runs/<name>/.lock: it goes with the process, and holds on a shared file
    system that knows locks; where there are none, a line says so.

    Raises:
        NothingBegun: another process holds it; the line names it.
    """
    path = Path(folder).resolve() / LOCK_FILE
    if not on_rank_0() or path in _held:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            say(f"{path.parent} cannot be locked ({error.strerror}): see yourself that no other run writes to it")
            return
        advice = "wait for it, or end it, or choose another --name"
        raise NothingBegun(f"{folder} is being written by another process ({holder}): {advice}") from None
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(record).encode() + b"\n")
    except OSError:  # a full disk
        os.close(descriptor)
        raise
    _held[path] = descriptor
