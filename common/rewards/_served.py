"""A server that a run starts for a reward: one on each node, until the run ends, however it ends.

This is no reward; `vlm_judge` uses it. Run as a program, this file is the process between a run and its server:

    python common/rewards/_served.py RUN COMMAND     (the run's process id, and a command for the shell)

A killed run cannot end its server, so this process watches the run. It imports nothing of the project.
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

OWN_NODE = "http://127.0.0.1:"
START_S = 3600.0  # the longest start, as of a collective: a server may download its model
END_S = 10.0  # from SIGTERM to SIGKILL
# torchrun's variables, from which a server would take itself for one of its workers
TORCHRUN = re.compile(
    "OMP_NUM_THREADS|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)


@functools.cache  # one server for a process, whose Popen must be kept
def serve(variable: str, command: str, url: str) -> subprocess.Popen | None:
    """Start the server of `url` on the first rank of this node; all its ranks wait until the server answers.

    variable: the environment variable that holds the shell's `command`. Returns the process between, on that rank.

    Raises:
        ValueError: `url` is not this node's, a server is there already, or the new one ends or takes an hour. The
            other ranks then wait until torchrun ends them.
    """
    if not url.startswith(OWN_NODE):
        raise ValueError(f"{variable}: each node starts a server of its own, so {url} must begin with {OWN_NODE}")
    if os.environ.get("LOCAL_RANK", "0") != "0":
        wait_until(lambda: answers(url), START_S)
        return None
    if not wait_until(lambda: not answers(url), 1.5 * END_S):  # that of a run which was just killed goes away
        raise ValueError(f"{variable}: a server answers at {url} already: unset {variable}, or choose another port")
    number, log = tempfile.mkstemp(prefix=f"{variable.lower()}-", suffix=".log")
    print(f"{variable}: starting a server; its log: {log}", file=sys.stderr, flush=True)
    between = subprocess.Popen(
        [sys.executable, "-I", __file__, str(os.getpid()), command],
        env={name: value for name, value in os.environ.items() if not TORCHRUN.fullmatch(name)},
        stdin=subprocess.DEVNULL,
        stdout=number,
        stderr=number,
        start_new_session=True,  # Ctrl-C asks the run to finish its step, for which it needs the server
    )
    os.close(number)
    wait_until(lambda: between.poll() is not None or answers(url), START_S)
    if between.poll() is not None or not answers(url):
        fault = f"no answer after {START_S:g} s" if between.returncode is None else f"exit status {between.returncode}"
        lines = ["nothing", *filter(str.strip, Path(log).read_text(errors="replace").splitlines())]
        raise ValueError(f"{variable}: {fault}; its log {log} ends with: {lines[-1].strip()}")
    return between


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds within that time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def answers(url: str) -> bool:
    """Whether a server lists its models at `url`, or answers otherwise than by 503, which says that it is loading."""
    import httpx  # slow, and `keep` runs without it

    try:
        return httpx.get(f"{url}/models", timeout=5, trust_env=False).status_code != 503
    except httpx.HTTPError:
        return False


def keep(run: int, command: str) -> int:
    """Run a shell's `command` until it ends or our parent `run` does, then end all its processes; its exit status."""
    server = subprocess.Popen(command, shell=True, start_new_session=True)
    while server.poll() is None and os.getppid() == run:
        time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):  # none of its processes is left
        os.killpg(server.pid, signal.SIGTERM)
        for _ in range(int(END_S)):
            time.sleep(1)
            server.poll()  # one that ended counts as a process until then
            os.killpg(server.pid, 0)
        os.killpg(server.pid, signal.SIGKILL)
    return server.wait()


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2]))
