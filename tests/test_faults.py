"""What a user sees when something breaks: one line that says what and what to do, in time, and nothing lost.

Most runs are the scripts' own `__main__` in this process, with one vLLM-Omni engine for all of them; those whose
process matters (the screen, exit codes, a kill) are started as a user starts them.
"""
import ast
import contextlib
import importlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import common.rollout
import flow_grpo
from common.rollout import VLLMEngine
from tests import broken_engine
from tests.conftest import EMBEDDED, ROOT, few_eval_prompts, read_metrics, torchrun

import pytest
import torch
import torch.distributed as dist

TINY = ["--num_prompts", 4, "--group_size", 4, "--updates_per_rollout", 1, "--num_inference_steps", 6]
TINY += ["--eval_num_inference_steps", 3]


def one_rank_environment():
    """What torchrun tells the only rank of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port)}


def run_here(folder, script, *options):
    """Run the `__main__` block of an (imported, perhaps patched) script in `folder`, as torchrun's only rank.

    Returns the line it ended with, or None.
    """
    module = importlib.import_module(script.removesuffix(".py"))
    block = ast.parse((ROOT / script).read_text()).body[-1]
    assert ast.unparse(block.test) == "__name__ == '__main__'"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (mock.patch.dict(os.environ, one_rank_environment()), contextlib.chdir(folder),
              mock.patch.object(sys, "argv", [str(ROOT / script), *map(str, options)])):
            exec(compile(ast.Module(block.body, []), script, "exec"), vars(module), {})
    except SystemExit as error:
        return error.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if dist.is_initialized():  # it ended by an error
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory):
    engine = VLLMEngine(EMBEDDED, "float32", 8, tmp_path_factory.mktemp("engine") / "engine.log", 300, num_threads=1)
    yield engine
    VLLMEngine.close(engine)


@pytest.fixture
def engine(shared_engine, monkeypatch):
    """The module's engine, in place of the one that a script starts; a run does not close it."""
    monkeypatch.setattr(flow_grpo, "start_engine", lambda *args: shared_engine)
    monkeypatch.setattr(VLLMEngine, "close", lambda self: None)
    monkeypatch.setattr(shared_engine, "timeout_s", 300)
    monkeypatch.setattr(shared_engine, "verified", False, raising=False)
    return shared_engine


def assert_one_line(line, script="flow_grpo.py"):
    assert line and line.startswith(f"{script}: error: ") and "\n" not in line, line
    print(line)


def steps_of(folder, name="flow_grpo"):
    return [row["training/global_step"] for row in read_metrics(folder / "runs" / name)]


# ---- the engine does not run the trainer's policy --------------------------------------------------------------------
DRIFT = r"at sampling step \d the trainer's log-prob is \S+ off the engine's, more than --max_logprob_drift 2.0e-06: "
BROKEN = {
    "sigmas": (DRIFT, []), "bf16_latents": (DRIFT, []), "stale": (DRIFT, []),
    "guidance": (DRIFT, ["--guidance_scale", 3]),
    "steps": ("the engine took 5 sampling steps where 6 were asked for, and gave 6 latents and 1 log-probs for 1 SDE", [])}


def train_with(breakage, folder, monkeypatch, *options):
    for name in ("_call", "verify_push"):
        monkeypatch.setattr(VLLMEngine, name, getattr(VLLMEngine, name))  # for the patch to be undone
    if breakage:
        broken_engine.break_engine(breakage)
    return run_here(folder, "flow_grpo.py", *TINY, "--num_steps", 2, "--learning_rate", 3e-3, *options,
                    *few_eval_prompts(folder, 2))


@pytest.mark.parametrize("old_log_prob", ["recompute", "rollout"])
@pytest.mark.parametrize("breakage", BROKEN)
def test_a_broken_engine_stops_the_run_at_the_first_possible_step(engine, tmp_path, monkeypatch, breakage,
                                                                  old_log_prob):
    message, options = BROKEN[breakage]
    line = train_with(breakage, tmp_path, monkeypatch, "--old_log_prob", old_log_prob, *options)
    assert_one_line(line)
    assert re.search(message, line)
    assert steps_of(tmp_path) == ([0, 1] if breakage == "stale" else [0])


@pytest.mark.parametrize("old_log_prob", ["recompute", "rollout"])
def test_the_whole_engine_passes(engine, tmp_path, monkeypatch, old_log_prob):
    assert train_with(None, tmp_path, monkeypatch, "--old_log_prob", old_log_prob) is None
    rows = read_metrics(tmp_path / "runs" / "flow_grpo")
    assert len(rows) == 3 and all(row["actor/grad_norm"] > 0 for row in rows[1:])
    assert all(row["rollout_corr/logprob_abs_diff_max"] <= 2e-6 for row in rows[1:])
