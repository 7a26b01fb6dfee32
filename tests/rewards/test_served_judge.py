"""The judge's server that a run starts itself (VLM_JUDGE_SERVE), with real processes and a judge of a few lines."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common.rewards import _served
from common.rewards._loading import load_rewards
from tests.conftest import ROOT, free_port

import httpx
import pytest

pytestmark = pytest.mark.fast

# a judge with a worker process, as vLLM has them: it says in files who they are, and gives every image the score 7
JUDGE = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({"data": [{"id": "tiny"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"message": {"content": "Score: 7"}}]})

worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
torchruns = [name for name in os.environ["TORCHRUNS"].split() if name in os.environ]
open(f"judge-{os.getpid()}", "w").write(f"{torchruns} {os.environ['CUDA_VISIBLE_DEVICES']}")
open(f"judge-{worker.pid}", "w").write("worker")
server.serve_forever()
"""
# of which any makes a server take itself for a worker
TORCHRUNS = (
    "RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE ROLE_NAME"
)
TORCHRUNS += " MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS"
RUN = """
import signal
import sys
from common.rewards.vlm_judge import load, vlm_judge
from PIL import Image

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
load()
scores = vlm_judge([Image.new("RGB", (4, 4))] * 2, ["a", "b"], [{}, {}])
print([score["score"] for score in scores], flush=True)
sys.stdin.read()
"""


def is_alive(process: int) -> bool:
    """Whether it runs; a process that has ended, and that nobody has waited for, does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks of one node, in tmp_path, that ask one judge for two scores each, and then wait."""
    port = free_port()
    (tmp_path / "judge.py").write_text(JUDGE)
    settings = dict.fromkeys(TORCHRUNS.split(), "1") | {
        "TORCHRUNS": TORCHRUNS,
        "VLM_JUDGE_URL": f"http://127.0.0.1:{port}/v1",
        "VLM_JUDGE_MODEL": "tiny",
        "VLM_JUDGE_SERVE": f"true; CUDA_VISIBLE_DEVICES=7 '{sys.executable}' judge.py {port}",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
    }
    ranks = []
    for number in range(2):
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RUN],
                cwd=tmp_path,
                env=os.environ | settings | {"LOCAL_RANK": str(number)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    yield ranks
    for rank in ranks:
        rank.communicate()  # closes its stdin


def next_line(rank: subprocess.Popen[str]) -> str:
    """The next line that a rank prints."""
    assert rank.stdout
    return rank.stdout.readline()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", ["kill", "ctrl-c", "finished"])
def test_two_ranks_ask_one_judge_which_ends_with_its_run(
    two_ranks: list[subprocess.Popen[str]], end: str, tmp_path: Path
) -> None:
    assert list(map(next_line, two_ranks)) == ["[0.7, 0.7]\n"] * 2
    files = {file.read_text(): int(file.name.partition("-")[2]) for file in tmp_path.glob("judge-*")}
    assert set(files) == {"[] 7", "worker"}  # no second judge; torchrun's variables are not passed on
    assert all(map(is_alive, files.values()))
    first = two_ranks[0]
    if end == "finished":
        first.communicate()
    else:
        os.killpg(first.pid, signal.SIGKILL if end == "kill" else signal.SIGINT)
    first.wait(60)
    deadline = time.monotonic() + 30
    while any(map(is_alive, files.values())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, files.values()))


@pytest.mark.parametrize(
    ("command", "url", "message"),
    [
        (
            "echo loading; echo ' no such model: tiny' >&2; exit 3",
            None,
            ".* 3; .* {log} .*: no such model: tiny",
        ),
        ("exit 1", None, ".* 1; .* {log} "),
        (
            "true",
            "http://judge:8000/v1",
            ".* http://judge:8000/v1 ",
        ),
    ],
)
def test_a_judge_that_cannot_start_ends_the_run_in_one_line(
    command: str, url: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("VLM_JUDGE_URL", url or f"http://127.0.0.1:{free_port()}/v1")
    monkeypatch.setenv("VLM_JUDGE_MODEL", "tiny")
    monkeypatch.setenv("VLM_JUDGE_SERVE", command)
    with pytest.raises(ValueError) as error:
        load_rewards(["vlm_judge"], [1])
    log = next(tmp_path.glob("vlm_judge_serve-*.log"), None)
    assert re.match(f"--reward vlm_judge: VLM_JUDGE_SERVE: {message.format(log=log)}", str(error.value))


@pytest.mark.parametrize(("status", "is_ready"), [(200, True), (404, True), (503, False)])
def test_a_server_that_says_that_it_is_loading_is_not_ready(
    status: int, is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("httpx.get", lambda url, **options: httpx.Response(status))
    assert _served.answers("http://127.0.0.1:8000/v1") is is_ready


def test_a_server_of_another_run_is_not_taken_for_the_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_served, "END_S", 0)
    monkeypatch.setattr(_served, "answers", lambda url: True)
    with pytest.raises(ValueError, match="^VLM_JUDGE_SERVE: .*http://127.0.0.1:8000/v1"):
        _served.serve("VLM_JUDGE_SERVE", "true", "http://127.0.0.1:8000/v1")
