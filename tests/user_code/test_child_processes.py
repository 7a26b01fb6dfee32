"""Processes that a reward starts: pools, time limits by terminate(), os.fork. When they end, and when they do not."""

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
import multiprocessing, os, signal, subprocess, sys, threading, time
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


def stop_the_group():
    for number in (signal.SIGTERM, signal.SIGINT):  # as torchrun's agent and Ctrl-C do
        os.killpg(os.getpgrp(), number)


def slow_width(size):
    time.sleep(0.5)
    return float(size[0])


def pool_in_a_stopped_group(images, prompts, metadata):
    with fork.Pool(2) as workers:
        workers.map(width, sizes(images))
        scores = workers.map_async(slow_width, sizes(images))
        time.sleep(0.2)
        stop_the_group()
        return scores.get(timeout=20)


def executor_in_a_stopped_group(images, prompts, metadata):
    with ProcessPoolExecutor(1, mp_context=fork) as workers:
        list(workers.map(width, sizes(images)))
        scores = [workers.submit(slow_width, size) for size in sizes(images)]
        time.sleep(0.2)
        stop_the_group()
        return [score.result(timeout=20) for score in scores]


def child_of_a_short_thread(images, prompts, metadata):
    worker = fork.Process(target=lambda: (time.sleep(2.5), sys.exit(7)))
    thread = threading.Thread(target=worker.start)
    thread.start()
    thread.join()
    worker.join()
    assert worker.exitcode == 7
    return [96.0] * len(images)


def child_of_a_killed_parent(images, prompts, metadata):
    reader, writer = os.pipe()
    parent = os.fork()
    if not parent:
        worker = fork.Process(target=time.sleep, args=(60,))
        worker.start()
        os.write(writer, str(worker.pid).encode())
        time.sleep(60)
    os.close(writer)
    worker = int(os.read(reader, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(reader, 1) == b""  # the worker has ended as well
    return [96.0] * len(images)


def commands_in_their_own_sessions(images, prompts, metadata):
    for options in ({"start_new_session": True, "preexec_fn": lambda: None}, {"preexec_fn": os.setsid}):
        subprocess.run(["true"], check=True, **options)
    return [96.0] * len(images)


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
from common.rewards import load_rewards
from common.scoring import Scorer
from PIL import Image


def run(name):
    os.setsid()
    catch_stop_signals(0)
    scorer = Scorer(load_rewards([f"my_processes.py:{name}"]), PromptSet(["a"] * 2, [{}] * 2))
    scorer.add(range(2), [Image.new("RGB", (96, 32))] * 2)
    assert scorer.scores().tolist() == [[96.0]] * 2
    assert set(caught_signals) == ({signal.SIGTERM, signal.SIGINT} if "stopped" in name else set())
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
