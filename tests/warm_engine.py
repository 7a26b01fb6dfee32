"""A process that has imported vLLM-Omni, and forks the engines of the runs of warm.py from itself.

Importing vLLM-Omni takes most of an engine's start. The tests of engines as processes (how they start, fail and die)
start them as a user's run does.

    python tests/warm_engine.py SOCKET  forks an engine for each connection; ends when its stdin is closed
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_BYTES = 1 << 16  # of a request
# variables that act as soon as Python, torch or a library is imported; a forked engine takes the others when it begins
ACT_AT_IMPORT = ("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")


# ---- in the process of a rank ----------------------------------------------------------------------------------------
class ForkedEngine:
    """What the trainer uses of subprocess.Popen, for a process that is another one's child."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.pid: int = json.loads(link.recv(MOST_BYTES))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once the engine has ended."""
        if self.returncode is None:
            self.link.settimeout(timeout)
            try:
                self.returncode = json.loads(self.link.recv(MOST_BYTES) or b"-9")  # nothing: warm_engine.py is gone
            except TimeoutError:
                raise subprocess.TimeoutExpired("engine", timeout) from None
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, or None while the engine runs."""
        if self.returncode is None and select.select([self.link], [], [], 0)[0]:
            self.wait()
        return self.returncode


def fork_engines(path: str, environment: dict[str, str], fork_workers: bool = False) -> None:
    """Have the engines of this process forked by the warm process that listens at `path` and began in this environment.

    An engine that needs another one, such as that of compiled blocks, is started as a user's run starts it.
    fork_workers: where an engine has several workers, it forks them as well, and starts no new Python for each.
    """
    client = importlib.import_module("common.engine.client")

    def start(command: list[str], env: dict[str, str], stdout: Any, pass_fds: list[int], **options: Any) -> Any:
        if any(env.get(name) != environment.get(name) for name in ACT_AT_IMPORT):
            return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **options)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # the pid and the exit code are two messages
        link.connect(path)
        request = {"folder": os.getcwd(), "parent": os.getpid(), "environment": env}
        request["fork_workers"] = fork_workers
        socket.send_fds(link, [json.dumps(request).encode()], [*pass_fds, stdout.fileno()])
        return ForkedEngine(link)

    client.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": start})


# ---- in the warm process ---------------------------------------------------------------------------------------------
def become_engine(request: dict[str, Any], pipe: int, log: int) -> None:
    """Take the folder, the variables, the arguments and the output that Popen would give this engine."""
    os.setsid()
    for number in (1, 2):
        os.dup2(log, number)
    print("forked by tests/warm_engine.py", flush=True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()  # as a new process would be
    importlib.import_module("numpy").random.seed()
    if request["fork_workers"]:  # whatever vLLM-Omni asks for
        set_method = multiprocessing.set_start_method
        multiprocessing.set_start_method = lambda method, force=False: set_method("fork", force=force)
    parent = request["parent"]
    sys.argv = ["server.py", str(pipe), str(parent)]
    os.getppid = lambda: parent if Path(f"/proc/{parent}").exists() else 1  # an engine ends with its parent


def serve(path: str) -> None:
    """Fork engines and report their exit codes. Returns in the processes of the engines, and when stdin is closed.

    A rank that is gone has closed its link; its engine is killed, should it hang.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}~")
    listener.listen()
    os.rename(f"{path}~", path)
    links: dict[int, socket.socket] = {}
    sys.stdout.flush()  # what the imports printed is not the engines' to print
    sys.stderr.flush()
    while True:
        ready, _, _ = select.select([listener, sys.stdin, *links.values()], [], [], 0.05 if links else None)
        if sys.stdin in ready:
            sys.exit()
        for process, link in list(links.items()):
            if link in ready:  # a rank sends nothing but the end
                links.pop(process).close()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
        if listener in ready:
            link, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(link, MOST_BYTES, 2)
            if len(files) < 2:  # the rank was killed before it asked
                link.close()
                continue
            process = os.fork()
            if not process:
                listener.close()
                for other in (link, *links.values()):
                    other.close()
                become_engine(json.loads(message), *files)
                return
            for file in files:
                os.close(file)
            links[process] = link
            with contextlib.suppress(OSError):  # the rank has been killed since
                link.send(json.dumps(process).encode())
        process, status = os.waitpid(-1, os.WNOHANG) if links else (0, 0)
        if process in links:
            with links.pop(process) as link, contextlib.suppress(OSError):
                link.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    importlib.import_module("common.engine.server")  # and vLLM
    gc.freeze()  # an engine's collections leave alone what was imported
    serve(sys.argv[1])
    runpy.run_module("common.engine.server", run_name="__main__", alter_sys=True)
    os._exit(0)  # it has closed itself: Python's exit would take longer than the engine's start
