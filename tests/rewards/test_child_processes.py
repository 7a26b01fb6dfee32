"""Processes that a reward starts: pools, time limits by terminate(), os.fork. They end when they are told to."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
REWARDS = """
import multiprocessing, os, signal, subprocess, sys, time
from concurrent.futures import ProcessPoolExecutor

fork = multiprocessing.get_context("fork")


def width(size):
    return float(size[0])


def sizes(images):
    return [image.size for image in images]


def pool(images, prompts, metadata):
    for _ in range(4):
        with fork.Pool(2) as workers:
            scores = workers.map(width, sizes(images))
    return scores


def pool_with_a_time_limit(images, prompts, metadata):
    workers = fork.Pool(1)
    try:
        workers.map_async(time.sleep, [60] * len(images)).get(timeout=0.2)
    except multiprocessing.TimeoutError:
        workers.terminate()
        workers.join()
    return [96.0] * len(images)


def executor(images, prompts, metadata):
    with ProcessPoolExecutor(1, mp_context=fork) as workers:
        return list(workers.map(width, sizes(images)))


def terminated_at_once(images, prompts, metadata):
    for _ in range(20):  # the signal may come before the child is ready for it
        worker = fork.Process(target=time.sleep, args=(60,))
        worker.start()
        worker.terminate()
        worker.join()
        assert worker.exitcode == -signal.SIGTERM
    return [96.0] * len(images)


def every_stop_signal(images, prompts, metadata):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(3)
        os.kill(child, number)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    return [96.0] * len(images)


def child_that_exits(images, prompts, metadata):
    for leave, code in ((lambda: sys.exit(0), 0), (lambda: sys.exit(3), 3), (lambda: 1 / 0, 1), (lambda: None, 0)):
        child = os.fork()
        if not child:
            leave()
            return [0.0] * len(images)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    return [96.0] * len(images)


def command_that_prepares(images, prompts, metadata):
    command = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: None)
    command.terminate()
    assert command.wait() == -signal.SIGTERM
    return [96.0] * len(images)
"""
# each reward in a process of its own, whose children are ended with it if it hangs
TRIAL = """
import json, os, signal, sys, time
from common.data import PromptSet
from common.process import STOP_SIGNALS, catch_stop_signals, caught_signals
from common.scoring import Scorer, load_rewards
from PIL import Image


def run(name):
    os.setsid()
    catch_stop_signals(0)
    scorer = Scorer(load_rewards([f"my_processes.py:{name}"]), PromptSet(["a"] * 2, [{}] * 2))
    scorer.add(range(2), [Image.new("RGB", (96, 32))] * 2)
    assert scorer.scores().tolist() == [[96.0]] * 2 and not caught_signals
    for number in STOP_SIGNALS:  # this process still notes them
        os.kill(os.getpid(), number)
    assert set(caught_signals) == set(STOP_SIGNALS)
    os._exit(0)


codes = {}
for name in sys.argv[1:]:
    process = os.fork()
    if not process:
        try:
            run(name)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 30
    while not (ended := os.waitpid(process, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    if not ended[0]:
        os.killpg(process, signal.SIGKILL)
        ended = os.waitpid(process, 0)
    codes[name] = os.waitstatus_to_exitcode(ended[1])
print(json.dumps(codes))
"""
NAMES = [line.split("(")[0].removeprefix("def ") for line in REWARDS.splitlines() if "(images, prompts" in line]


@pytest.fixture(scope="module")
def exit_codes(tmp_path_factory):
    """{reward: the exit code of the process that called it}."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "my_processes.py").write_text(textwrap.dedent(REWARDS))
    command = [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{TRIAL}", *NAMES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_rewards_processes_end(name, exit_codes):
    codes, output = exit_codes
    assert codes[name] != -signal.SIGKILL, f"it hung:\n{output}"
    assert codes[name] == 0, output
