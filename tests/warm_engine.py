"""A process that has imported vLLM-Omni, and forks the engines of the runs of warm.py from itself.

Importing vLLM-Omni takes most of an engine's start. The tests of engines as processes (how they start, fail and die)
start them as a user's run does.

    python tests/warm_engine.py SOCKET  forks an engine for each connection; ends when its stdin is closed
"""

import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_BYTES = 1 << 16  # of a request


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


def fork_engines(path: str, environment: dict[str, str]) -> None:
    """Have the engines of this process forked by the warm process that listens at `path` and has this environment."""
    client = importlib.import_module("common.engine.client")

    def start(command: list[str], env: dict[str, str], stdout: Any, pass_fds: list[int], **options: Any) -> Any:
        if env != environment:
            return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **options)
        while not os.path.exists(path):  # it still imports
            time.sleep(0.05)
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        request = {"folder": os.getcwd(), "parent": os.getpid()}
        socket.send_fds(link, [json.dumps(request).encode()], [*pass_fds, stdout.fileno()])
        return ForkedEngine(link)

    client.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": start})


# ---- in the warm process ---------------------------------------------------------------------------------------------
def become_engine(request: dict[str, Any], pipe: int, log: int) -> None:
    """Take the folder, the arguments and the output that Popen would give this engine."""
    os.setsid()
    os.chdir(request["folder"])
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    parent = request["parent"]
    sys.argv = ["server.py", str(pipe), str(parent)]
    os.getppid = lambda: parent if Path(f"/proc/{parent}").exists() else 1  # an engine ends with its parent


def serve(path: str) -> None:
    """Fork engines and report their exit codes. Returns in the processes of the engines, and when stdin is closed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}~")
    listener.listen()
    os.rename(f"{path}~", path)
    links: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 0.05 if links else None)
        if sys.stdin in ready:
            sys.exit()
        if listener in ready:
            link, _ = listener.accept()
            message, (pipe, log), _, _ = socket.recv_fds(link, MOST_BYTES, 2)
            process = os.fork()
            if not process:
                listener.close()
                for other in (link, *links.values()):
                    other.close()
                become_engine(json.loads(message), pipe, log)
                return
            os.close(pipe)
            os.close(log)
            link.send(json.dumps(process).encode())
            links[process] = link
        if links and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with links.pop(ended[0]) as link:
                link.send(json.dumps(os.waitstatus_to_exitcode(ended[1])).encode())


if __name__ == "__main__":
    from common.engine.server import prepare

    prepare()  # before vLLM is imported
    importlib.import_module("common.engine.omni")
    serve(sys.argv[1])
    runpy.run_module("common.engine.server", run_name="__main__", alter_sys=True)
