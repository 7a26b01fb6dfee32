"""What several test files use: runs of the scripts, the embedded model with its policies, small inputs, the options.

Test modules import from here and never from each other. Scripts are imported inside the functions that need them, so
that one which cannot be imported fails its own tests only.
"""

import ast
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

from common import lock
from common.models import find_family, load_model
from common.policy import add_policies, make_lora

import pytest
import torch
import torch.distributed as dist

if "PYTEST_XDIST_WORKER" in os.environ:  # pytest -n 2: a core for each worker, and for what it starts
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["PYTEST_XDIST_WORKER"][2:]) % len(cores)]})
    torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "assets" / "embedded"
SCRIPTS = ["flow_grpo.py", "grpo_guard.py", "mix_grpo.py", "diffusion_nft.py", "dpo_offline.py"]
SIBLINGS = SCRIPTS[1:]
SMALL = ["--num_prompts", "4", "--group_size", "4", "--micro_batch_size", "4", "--num_inference_steps", "6"]
SMALL += ["--eval_num_inference_steps", "6"]
TINY = ["--num_prompts", 4, "--group_size", 4, "--updates_per_rollout", 1, "--num_inference_steps", 6]
TINY += ["--eval_num_inference_steps", 3]


# ---- runs of the scripts ---------------------------------------------------------------------------------------------
def torchrun(folder, script, *args, nproc=1, check=True, timeout=420):
    """Run a script of the repository as a user does, in `folder`. Returns the finished process, output as text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    done = subprocess.run(
        [*command, str(ROOT / script), *map(str, args)],
        cwd=folder,
        text=True,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert not check or done.returncode == 0, done.stdout[-6000:]
    return done


def one_rank_environment():
    """What torchrun tells the only rank of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_here(folder, script, *options):
    """Run the `__main__` block of an (imported, perhaps patched) script in `folder`, as torchrun's only rank.

    Returns the line it ended with, or None.
    """
    module = importlib.import_module(script.removesuffix(".py"))
    block = ast.parse((ROOT / script).read_text()).body[-1]
    assert ast.unparse(block.test) == "__name__ == '__main__'"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (
            mock.patch.dict(os.environ, one_rank_environment()),
            contextlib.chdir(folder),
            mock.patch.object(sys, "argv", [str(ROOT / script), *map(str, options)]),
        ):
            exec(compile(ast.Module(block.body, []), script, "exec"), vars(module), {})
    except SystemExit as error:
        return error.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if dist.is_initialized():  # it ended by an error
            dist.destroy_process_group()
        while lock._held:  # a run's lock lasts as long as its process, which here goes on
            os.close(lock._held.popitem()[1])


def assert_one_line(line, script="flow_grpo.py"):
    """That a run ended with a line of the form of every error: "SCRIPT: error: ..."."""
    assert line and line.startswith(f"{script}: error: ") and "\n" not in line, line
    print(line)


def read_metrics(run):
    """The lines of a run's metrics.jsonl, in order."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def without_times(rows):
    """Metrics without those that no two runs share: times, speeds and memory."""
    return [{k: v for k, v in row.items() if not k.startswith(("timing_", "perf/"))} for row in rows]


def assert_same(state, expected):
    """That two states of a run, of nested dicts and lists, are equal: types, order of keys, and tensors to the bit."""
    assert type(state) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert state.dtype == expected.dtype and torch.equal(state, expected)
    elif isinstance(expected, dict):
        assert list(state) == list(expected)
        for key, value in expected.items():
            assert_same(state[key], value)
    elif isinstance(expected, list | tuple):
        for one, other in zip(state, expected, strict=True):
            assert_same(one, other)
    else:
        assert state == expected


# ---- small inputs ----------------------------------------------------------------------------------------------------
def brightness_reward(folder):
    """A reward that moves no more than the pixels do, where runs are compared to round-off: what OCR reads may turn on
    one grey level of one pixel."""
    path = Path(folder) / "brightness.py"
    path.write_text(
        "import numpy\n\n\ndef brightness(images, prompts, metadata):\n"
        "    return [numpy.asarray(image).mean() / 255 for image in images]\n"
    )
    return f"{path}:brightness"


def brightness_and_redness(folder):
    """Two such rewards."""
    brightness = brightness_reward(folder)
    path = Path(folder) / "redness.py"
    path.write_text(
        "import numpy\n\n\ndef redness(images, prompts, metadata):\n"
        "    return [numpy.asarray(image)[..., 0].mean() / 255 for image in images]\n"
    )
    return [brightness, f"{path}:redness"]


def constant_reward(folder):
    """A reward from which nothing is to be learned."""
    path = Path(folder) / "constant.py"
    path.write_text("def constant(images, prompts, metadata):\n    return [0.1] * len(images)\n")
    return f"{path}:constant"


def few_eval_prompts(folder, count=8):
    """A file with the first held-out prompts, for runs whose evaluation should be short."""
    path = Path(folder) / "eval.txt"
    path.write_text("\n".join((ROOT / "assets" / "eval_prompts.txt").read_text().splitlines()[:count]) + "\n")
    return ["--eval_prompts", path]


# ---- the embedded model in this process ------------------------------------------------------------------------------
@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    """A world of this process alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def embedded_model(dtype=torch.float32):
    """The embedded model as it is, without a policy."""
    return load_model(find_family(EMBEDDED), EMBEDDED, dtype, torch.device("cpu"))


def policy_without_fsdp(trained=True, **changes):
    """The embedded model with flow_grpo's LoRA, unsharded; `trained` gives it a LoRA that acts. `changes` are options.

    Returns the model, flow_grpo's Args and the LoraConfig.
    """
    flow_grpo = importlib.import_module("flow_grpo")
    args = dataclasses.replace(flow_grpo.Args(), num_inference_steps=6, eval_num_inference_steps=6, **changes)
    model = embedded_model()
    lora = make_lora(None, args.lora_rank, args.lora_alpha, model.lora_target_modules)
    torch.manual_seed(args.seed)
    add_policies(model, lora, ["default"])
    model.evaluated_policy = "default"
    if trained:
        for name, p in model.transformer.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.05)
    return model, args, lora[0]


# ---- options and the README ------------------------------------------------------------------------------------------
def declared_options(path, class_name):
    """{name of a field: its docstring, or None} of a dataclass, from its source."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    body = next(node for node in classes if node.name == class_name).body
    options = {}
    for field, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            is_docstring = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            options[field.target.id] = below.value.value if is_docstring else None
    return options


def shared_options():
    """The options that all five scripts have, by name, with their docstrings."""
    return declared_options(ROOT / "common" / "options.py", "SharedArgs")


def own_options(script):
    """The options that a script declares itself, by name, with their docstrings."""
    return declared_options(ROOT / script, "Args")


def readme_row(script):
    """A script's row in the README's table."""
    lines = (ROOT / "README.md").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"| [`{script}`]"))
