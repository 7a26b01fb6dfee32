"""Interrupted, killed and full-disk runs resume as if nothing had happened: the five scripts, under torchrun."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import flow_grpo
from common.errors import RunError
from common.files.checkpoints import checkpoint_path, checkpoint_step, load_checkpoint, saved_checkpoints
from common.run import record as run_record
from common.run.command_line import parse_args
from common.run.plots import save_samples
from common.run.record import create_run_folder
from common.run.resuming import find_checkpoint, rewind
from common.weights.lora import save_weights
from tests.conftest import (
    ROOT,
    SIBLINGS,
    SMALL,
    assert_same,
    brightness_reward,
    embedded_model,
    is_alive,
    new_run,
    read_metrics,
    run_here,
    skip_without_engine,
    torchrun,
    warm_process,
    whole_checkpoint,
    without_times,
)
from tools import sweep

import psutil
import pytest
import torch
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file

NAME = "interrupted"
FEW = [*SMALL, "--num_prompts", "2", "--num_inference_steps", "3"]  # training takes most of a run
HANDLED = "--shutdown_timeout 600 --signals_to_handle SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGUSR2"
POLICIES = {"diffusion_nft.py": ["default", "old", "ema"]}  # in a checkpoint; the others have no `old`
FULL = ["--lora_rank", 0, "--learning_rate", 1e-4, "--reward_weights", 0, 1]  # noise: the best is anywhere
NOISE = """import random, numpy, torch
random.seed(1)
numpy.random.seed(1)
def noise(images, prompts, metadata):
    return [7 * (random.random() + numpy.random.rand() + torch.rand(()).item()) % 1 for _ in images]
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """For each script: four steps with 8 optimizer steps, 6 of them a warm-up; and a reward of weight 0, by which
    metrics show whether the global random generators continue where they stood."""
    folder = tmp_path_factory.mktemp("rewards")
    noise = folder / "noise.py"
    noise.write_text(NOISE)
    common = ["--eval_every", 1, "--keep_checkpoints", 9, "--max_prompts", 2, "--ema_decay", 0.9]
    common += ["--eval_num_inference_steps", 3]
    common += ["--lr_schedule", "constant:6", "--reward", brightness_reward(folder), f"{noise}:noise"]
    common += ["--reward_weights", 1, 0]
    online = [*common, "--rollout", "local", "--kl_coef", 0.1, "--num_prompts", 2, "--group_size", 4]
    online += ["--updates_per_rollout", 2, "--num_inference_steps", 3]
    return {
        "flow_grpo.py": [*online, "--num_inference_steps", 4, "--sde_window_range", 0, 2],  # drawn again every step
        "mix_grpo.py": [*online, "--num_inference_steps", 4, "--sde_window_range", 0, 3, "--iters_per_group", 1],
        "diffusion_nft.py": online,
        "dpo_offline.py": [*common, "--num_pair_prompts", 8, "--group_size", 2, "--num_pairs", 4],
    }


def launch(folder, script, *args):
    """Start a script under torchrun, which waits for it after any signal; its output goes to folder/output.txt."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *HANDLED.split(), str(ROOT / script)]
    with open(folder / "output.txt", "wb") as output:
        return subprocess.Popen([*command, *map(str, args)], cwd=folder, stdout=output, stderr=output)


@contextlib.contextmanager
def warm_rank(folder, script, *args):
    """A run of one rank in the background: its process, and what will be the finished run. It is killed at the end."""
    started = set(psutil.Process(warm_process(None).pid).children())
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(torchrun, folder, script, *args, check=False)
        while not (ranks := set(psutil.Process(warm_process(None).pid).children()) - started):
            assert not done.done()
            time.sleep(0.02)
        (rank,) = ranks
        try:
            yield rank, done
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


def wait_for(has_ended, condition, pause_s=0.02):
    end = time.monotonic() + 300
    while not condition():
        assert not has_ended() and time.monotonic() < end
        time.sleep(pause_s)


def processes(root):
    """All processes of a run, the workers first. torchrun gives each worker a session, so no process group holds them
    all."""
    parent = psutil.Process(root.pid)
    return [*parent.children(recursive=True)[::-1], parent]


def assert_equal_runs(run, expected, first=0, step=4):
    """From `first` to `step` the metrics, and at `step` every tensor and number of the checkpoint: bit for bit."""
    rows, expected_rows = (without_times(read_metrics(folder)) for folder in (run, expected))
    assert rows[: step + 1 - first] == expected_rows[first : step + 1]
    states = [whole_checkpoint(folder / "checkpoints" / f"step_{step:06d}.pt") for folder in (run, expected)]
    for state in states:
        if first:
            del state["best"], state["lowest"], state["best_step"]  # the new folder has its own
        del state["args"]  # the name differs, and what asked for the interruption
        for group in state["optimizer"].get("param_groups", ()):
            group["betas"] = list(group["betas"])  # a tuple until it is loaded
    assert_same(*states)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, options):
    """uninterrupted(script, *more) -> the folder of a run of four steps, made on first use."""
    folder, done = tmp_path_factory.mktemp("uninterrupted"), {}

    def run(script, *more):
        name = "-".join([script[:-3], *(str(option).strip("-") for option in more)])
        if name not in done:
            torchrun(folder, script, *options[script], "--num_steps", 4, "--name", name, *more)
            done[name] = folder / "runs" / name
        return done[name]

    return run


# ---- a reward that fails ---------------------------------------------------------------------------------------------
FAILING = """import os, random, pathlib
def failing(images, prompts, metadata):
    here = pathlib.Path(__file__).parent
    calls = here / f"calls_{os.environ['RANK']}"
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    score = random.random()
    if (here / "fail.txt").read_text() == f"{len(calls.read_text())} {os.environ['RANK']}":
        raise TimeoutError("judge")
    return [score + i for i in range(len(images))]
"""


@pytest.mark.parametrize(
    ("script", "call", "saved", "nproc", "options"),
    [
        # after the trial's call and step 0's; this one the rollout's of step 2, on the second rank alone
        ("flow_grpo.py", 4, 1, 2, ["--lora_rank", 0, "--num_steps", 2]),
        ("diffusion_nft.py", 5, 2, 1, ["--num_steps", 3]),  # of step 2's evaluation, which the resumed run does again
    ],
)
def test_a_reward_that_fails_loses_no_step_before(tmp_path, script, call, saved, nproc, options):
    (tmp_path / "failing.py").write_text(FAILING)
    given = [*FEW, "--rollout", "local", "--eval_every", 2, "--max_prompts", 2, *options]
    given += ["--updates_per_rollout", 1, "--micro_batch_size", 16, "--reward", "failing.py:failing"]

    def start(name, fails_at, *more):
        for calls in tmp_path.glob("calls_*"):
            calls.unlink()
        (tmp_path / "fail.txt").write_text(fails_at)
        return torchrun(tmp_path, script, *given, "--name", name, *more, nproc=nproc, check=not fails_at)

    start("whole", "")
    failed = start(NAME, f"{call} {nproc - 1}")
    run = tmp_path / "runs" / NAME
    assert failed.returncode == 1
    assert re.search(rf" step_{saved:06d}\.pt, .*--resume latest", failed.stdout)
    assert f"traceback_rank{nproc - 1}.txt" in failed.stdout
    assert [checkpoint_step(path) for path in saved_checkpoints(run)] == [saved]
    start(NAME, "", "--resume", "latest")
    assert_equal_runs(run, tmp_path / "runs" / "whole", step=options[-1])


def test_a_start_from_another_run_that_was_lost_is_repeated_from_where_that_run_is_now(tmp_path):
    """Nothing of the lost one's log stays, which had begun at an earlier step of the other run."""

    def train(name, num_steps, *more):
        options = [*FEW, "--rollout", "local", "--name", name, "--num_steps", num_steps, "--eval_every", 9]
        options += ["--max_prompts", 1, "--reward", brightness_reward(tmp_path), *more]
        assert run_here(tmp_path, "flow_grpo.py", *options) is None
        return [row["training/global_step"] for row in read_metrics(tmp_path / "runs" / name)]

    train("other", 1)
    assert train("new", 2, "--resume", "runs/other") == [2]
    for name in ("checkpoints", "adapter", "best_adapter"):  # as if it had been killed before it saved
        shutil.rmtree(tmp_path / "runs" / "new" / name)
    train("other", 3, "--resume", "latest")
    assert train("new", 4, "--resume", "runs/other") == [4]


OF_A_RANK = """import os
os.environ["PLACE"] = "/scratch/" + os.environ["RANK"]  # as a path that each node has another of
def of_a_rank(images, prompts, metadata):
    return [{"score": 0.5, "length": len(prompt)} for prompt in prompts]
of_a_rank.settings = ("PLACE",)
"""


def test_ranks_with_settings_of_their_own_resume_together_and_count_each_image_once(tmp_path):
    """Three held-out prompts on two ranks, one of which has one of them only to have two. Then a kill is imitated that
    came after the last checkpoint and before adapter/."""
    (tmp_path / "own.py").write_text(OF_A_RANK)
    prompts = tmp_path / "p.txt"
    prompts.write_text('a "1"\na red "22"\na red sign "333"\n')
    options = [*FEW, "--rollout", "local", "--max_prompts", 3, "--eval_prompts", prompts, "--eval_every", 1]
    options += ["--reward", "own.py:of_a_rank", "--name", NAME, "--num_steps", 1]
    torchrun(tmp_path, "flow_grpo.py", *options, nproc=2)
    run = tmp_path / "runs" / NAME
    mean = sum(map(len, prompts.read_text().splitlines())) / 3
    assert [row["val/of_a_rank/length"] for row in read_metrics(run)] == pytest.approx([mean] * 2)
    adapter = run / "adapter" / "pytorch_lora_weights.safetensors"
    content = adapter.read_bytes()
    adapter.unlink()
    output = torchrun(tmp_path, "flow_grpo.py", *options, "--resume", "latest", nproc=2).stdout
    assert "step_000001.pt" in output and "best_adapter is chosen again" not in output
    assert adapter.read_bytes() == content


KILLING = """import gc, os, pathlib, signal, numpy
from common.engine.client import VLLMEngine
def killing(images, prompts, metadata):
    here = pathlib.Path(__file__).parent
    calls = here / f"calls_{os.environ['RANK']}"
    with open(calls, "a") as file:
        file.write(".")
    if (here / "kill").exists() and calls.name == "calls_1" and len(calls.read_text()) == 7:
        [engine] = [found for found in gc.get_objects() if isinstance(found, VLLMEngine)]
        os.kill(engine.process.pid, signal.SIGKILL)
    return [numpy.asarray(image).mean() for image in images]
"""


def test_an_engine_that_dies_while_it_samples_loses_no_step_before(tmp_path):
    """The second rank's, after a trial, step 0 and a rollout of four images a rank; three are to come. It and the first
    rank, which has sampled its own, save together."""
    skip_without_engine()
    (tmp_path / "killing.py").write_text(KILLING)
    given = [*FEW, "--rollout", "vllm", "--rollout_batch_size", 1, "--num_steps", 2, "--eval_every", 9]
    given += ["--max_prompts", 2, "--updates_per_rollout", 1, "--micro_batch_size", 8, "--reward", "killing.py:killing"]
    torchrun(tmp_path, "flow_grpo.py", *given, "--name", "whole", nproc=2)
    (tmp_path / "calls_1").unlink()
    (tmp_path / "kill").touch()
    failed = torchrun(tmp_path, "flow_grpo.py", *given, "--name", NAME, nproc=2, check=False)
    assert failed.returncode == 1
    told = r" generate .* -9, SIGKILL\)"
    assert re.search(told, failed.stdout) and " step_000001.pt, " in failed.stdout
    run = tmp_path / "runs" / NAME
    assert [checkpoint_step(path) for path in saved_checkpoints(run)] == [1]
    torchrun(tmp_path, "flow_grpo.py", *given, "--name", NAME, "--resume", "latest", nproc=2)
    assert_equal_runs(run, tmp_path / "runs" / "whole", step=2)


def test_a_resumed_run_names_what_has_other_contents_and_chooses_the_best_again(tmp_path, monkeypatch, capfd):
    """Options that are the same, and files that are not."""
    model = shutil.copytree(ROOT / "assets" / "embedded", tmp_path / "model")
    prompts = tmp_path / "p.txt"
    prompts.write_text('a red sign that says "1234"\na red sign that says "4321"\n')
    options = [*FEW, "--rollout", "local", "--eval_every", 1, "--train_prompts", "p.txt", "--eval_prompts", "p.txt"]
    options += ["--model", "model", "--reward", f"{Path(brightness_reward(tmp_path)).name}", "--learning_rate", 0]
    assert run_here(tmp_path, "flow_grpo.py", *options, "--num_steps", 1) is None
    best_step = lambda step: load_checkpoint(checkpoint_path(tmp_path / "runs" / "flow_grpo", step))["best_step"]
    assert best_step(1) == 0  # nothing is learned, and no later one is better
    capfd.readouterr()
    assert run_here(tmp_path, "flow_grpo.py", *options, "--num_steps", 2, "--resume", "latest") is None
    assert " step_000001.pt " not in capfd.readouterr().err and best_step(2) == 0
    prompts.write_text('a red sign that says "7777"\na red sign that says "8888"\n')
    with open(tmp_path / "brightness.py", "a") as file:
        file.write("# on another scale\n")
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x3f")
    assert run_here(tmp_path, "flow_grpo.py", *options, "--num_steps", 3, "--resume", "latest") is None
    told = [line for line in capfd.readouterr().err.splitlines() if " step_000002.pt " in line]
    changed = ["--eval_prompts p.txt ", "--model model ", "--train_prompts p.txt ", "code/brightness.py "]
    assert len(told) == 4 and all(line.startswith(name) for line, name in zip(told, changed, strict=True))
    assert ["best_adapter" in line for line in told] == [True, True, False, True]
    assert best_step(3) == 3
    assert (tmp_path / "runs/flow_grpo/code_step_000002/brightness.py").read_text().endswith("scale\n")


def test_a_resumed_run_says_that_its_script_or_common_changed(tmp_path, monkeypatch, capfd):
    """In one line with the checkpoint's name; of what has not changed it says nothing."""
    common = shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    script = shutil.copy(ROOT / "flow_grpo.py", tmp_path)
    monkeypatch.setattr(run_record, "COMMON", common)  # whose files the record counts, and nothing else
    monkeypatch.setattr(flow_grpo, "__file__", script)
    options = [*FEW, "--rollout", "local", "--updates_per_rollout", 1, "--max_prompts", 1, "--eval_every", 9]
    options += ["--reward", brightness_reward(tmp_path), "--resume", "latest"]

    def told(num_steps):
        assert run_here(tmp_path, "flow_grpo.py", *options, "--num_steps", num_steps) is None
        return [line for line in capfd.readouterr().err.splitlines() if "source.py" in line]

    assert told(1) == told(2) == []
    with open(common / "sde.py", "a") as file:
        file.write("# changed\n")
    (line,) = told(3)
    assert "common/" in line and "flow_grpo.py" not in line and "step_000002.pt" in line
    with open(script, "a") as file:
        file.write("# changed\n")
    (line,) = told(4)  # step 3 was saved by the changed common/
    assert "flow_grpo.py" in line and "common/:" not in line and "step_000003.pt" in line
    assert (tmp_path / "runs/flow_grpo/source_step_000003.py").read_text().endswith("# changed\n")


# ---- stops, orderly and not ------------------------------------------------------------------------------------------
def stop_by_signal(script, folder, options):
    """Send a signal in step 2 of a run: SIGTERM to the rank, or SIGUSR1 to torchrun, which passes it on and calls that
    a failure, where the rank ends well."""
    options, run = [*options, "--name", NAME, "--num_steps", 1000], folder / "runs" / NAME
    has_saved = checkpoint_path(run, 1).exists
    if script == "flow_grpo.py":
        with warm_rank(folder, script, *options) as (rank, done):
            wait_for(done.done, has_saved)
            rank.send_signal(signal.SIGTERM)
            code, output = done.result(60).returncode, done.result().stdout
        assert code == 0 and output.count("SIGTERM: finishing this step, then saving\n") == 1
    else:
        root = launch(folder, script, *options)
        try:
            wait_for(lambda: root.poll() is not None, has_saved)
            root.send_signal(signal.SIGUSR1)
            code, output = root.wait(60), (folder / "output.txt").read_text()
        finally:
            root.kill()
        assert code == 1 and output.count("SIGUSR1: finishing this step, then saving\n") == 1


def interrupt(script, folder, options, whole):
    """Run `script` in `folder` under the name NAME to a stop in step 2 or 3, in one of four ways; `whole` is the
    uninterrupted run. Returns the first step of its metrics."""
    if script in ("flow_grpo.py", "diffusion_nft.py"):
        stop_by_signal(script, folder, options)
    elif script == "mix_grpo.py":  # from a checkpoint of another run, for as long as a step
        first = whole / "checkpoints" / "step_000001.pt"
        done = torchrun(folder, script, *options, "--name", NAME, "--resume", first, "--max_minutes", 1e-6)
        assert f"loaded {first}; max_minutes: 0.0 -> 1e-06\n" in done.stdout  # and no other option differs
        return 2
    else:
        torchrun(folder, script, *options, "--name", NAME, "--num_steps", 2)
    return 0


def newest_step(run):
    """The step of the newest checkpoint that can be loaded, -1 where there is none."""
    checkpoint = find_checkpoint(run)
    return checkpoint_step(checkpoint) if checkpoint else -1


def metrics_up_to(run, step):
    """The bytes of metrics.jsonl that a run keeps if it resumes from `step`; a kill may cut the last line short."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True) if step >= 0 else []
    whole = [line for line in lines if line.endswith(b"\n")]
    return b"".join(line for line in whole if json.loads(line)["training/global_step"] <= step)


# in place of a script: it is killed in the write of its second checkpoint, of which the first half or all is on disk
KILLED = """import os, runpy, signal, sys
sys.path[0] = {root!r}
replace, saved = os.replace, []

def replace_or_die(source, target):
    if os.path.basename(target).startswith("step_"):
        saved.append(target)
    if len(saved) > 1:
        os.truncate(source, int(os.path.getsize(source) * {share}))
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = replace_or_die
runpy.run_path({script!r}, run_name="__main__")
"""


def kill_in_a_write(script, folder, options):
    """Resume a run, which is killed in the write of a checkpoint after the first one of this start.

    It must have continued from the newest whole checkpoint. Returns the step of the newest now.
    """
    run, killed = folder / "runs" / NAME, folder / script
    found = newest_step(run)
    before = metrics_up_to(run, found)
    share = 0.5 if found < 1 else 1
    killed.write_text(KILLED.format(root=str(ROOT), script=str(ROOT / script), share=share))
    options = [*options, "--name", NAME, "--resume", "latest", "--num_steps", 1000]
    done = torchrun(folder, killed, *options, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list((run / "checkpoints").glob(".step_*.new"))
    if found >= 0:
        assert f"loaded runs/{NAME}/checkpoints/step_{found:06d}.pt\n" in done.stdout
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    assert newest_step(run) == found + 1 or found < 0
    return newest_step(run)


@pytest.mark.parametrize(
    ("by", "command", "rollout"),
    [
        ("closing", "trap '' HUP; exec {}", "vllm"),  # as under nohup, whose SIGHUP torchrun handles again
        ("Ctrl-C", "{} 2>&1 | tee output.txt", "local"),  # ends tee as well
    ],
)
def test_a_run_in_a_terminal_saves(tmp_path, by, command, rollout):
    """A real terminal is closed, or gets Ctrl-C, in step 2 of a run that saves at its end. What the reward prints from
    then on cannot be written. test_stopped_then_resumed_equals_uninterrupted signals torchrun itself."""
    if rollout == "vllm":
        skip_without_engine()
    (tmp_path / "loud.py").write_text(
        "def loud(images, prompts, metadata):\n    print('scored', flush=True)\n    return list(range(len(images)))\n"
    )
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone {HANDLED}"
    options = f"--name {NAME} --rollout {rollout} --num_steps 1000 --eval_every 1000"
    options += " --num_prompts 2 --group_size 2 --updates_per_rollout 1 --max_prompts 2 --reward loud.py:loud"
    line = command.format(f"{torchrun} {ROOT / 'flow_grpo.py'} {options}")
    terminal, inside = os.openpty()
    own_session = ["setsid", "--ctty", "sh", "-c", line]
    heeds = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where pytest itself is under nohup
    root = subprocess.Popen(own_session, cwd=tmp_path, stdin=inside, stdout=inside, stderr=inside, preexec_fn=heeds)
    os.close(inside)
    os.set_blocking(terminal, False)
    run = tmp_path / "runs" / NAME

    def has_made_a_step():
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 65536)
        return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") > 1

    try:
        wait_for(lambda: root.poll() is not None, has_made_a_step)
        started = processes(root)
        if by == "Ctrl-C":
            os.write(terminal, b"\x03")
        else:
            os.close(terminal)
        end = time.monotonic() + 60
        while any(map(is_alive, started)):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        for process in processes(root) if root.poll() is None else ():
            process.kill()
    last = read_metrics(run)[-1]["training/global_step"]
    assert [checkpoint_step(path) for path in saved_checkpoints(run)] == [last] and last < 900
    assert (run / "adapter").is_dir()


@pytest.mark.parametrize("script", [script for script in SIBLINGS if script != "grpo_guard.py"])
def test_stopped_then_resumed_equals_uninterrupted(options, uninterrupted, tmp_path, script):
    """Invariant 17. The second start continues to step 4. That of diffusion_nft.py, whose state has a third policy, is
    killed once it has saved a step, and a third one continues. test_kills_from_the_first_start_on kills flow_grpo.py.
    grpo_guard.py saves and loads by that one's functions, to the byte.
    """
    whole, run = uninterrupted(script), tmp_path / "runs" / NAME
    first = interrupt(script, tmp_path, options[script], whole)
    stopped_at = load_checkpoint(saved_checkpoints(run)[-1])["step"]
    assert stopped_at in (2, 3) and read_metrics(run)[-1]["training/global_step"] == stopped_at
    before = (run / "metrics.jsonl").read_bytes()
    newest = stopped_at
    if script == "diffusion_nft.py":
        newest = kill_in_a_write(script, tmp_path, options[script])
    if newest < 4:
        torchrun(tmp_path, script, *options[script], "--name", NAME, "--resume", "latest", "--num_steps", 4)
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    assert_equal_runs(run, whole, first)
    state = load_checkpoint(run / "checkpoints" / "step_000004.pt")
    assert list(state["policies"]) == POLICIES.get(script, ["default", "ema"])
    assert state["optimizer"]["state"] and state["optimizer"]["param_groups"][0]["lr"] > 0


def test_stopped_then_resumed_to_the_end_equals_uninterrupted(options, uninterrupted, tmp_path):
    whole, run = uninterrupted("flow_grpo.py"), tmp_path / "runs" / NAME
    interrupt("flow_grpo.py", tmp_path, options["flow_grpo.py"], whole)
    stopped_at = saved_checkpoints(run)[-1]
    assert stopped_at.stem in ("step_000002", "step_000003")
    output = torchrun(
        tmp_path, "flow_grpo.py", *options["flow_grpo.py"], "--name", NAME, "--resume", "latest", "--num_steps", 4
    ).stdout
    assert f"loaded runs/{NAME}/checkpoints/{stopped_at.name}\n" in output
    assert_equal_runs(run, whole)
    assert len(read_metrics(run)) == 5
    for name in ("adapter", "best_adapter"):
        assert_same(*(load_file(r / name / "pytorch_lora_weights.safetensors") for r in (run, whole)))
    for file in ("args.json", f"args_{stopped_at.stem}.json", f"source_{stopped_at.stem}.py"):
        assert (run / file).exists()


def test_kills_from_the_first_start_on(options, uninterrupted, tmp_path):
    """From nothing, with --resume latest from the first start on: what the kills leave is what none would have."""
    while kill_in_a_write("flow_grpo.py", tmp_path, options["flow_grpo.py"]) < 3:
        pass
    run, whole = tmp_path / "runs" / NAME, uninterrupted("flow_grpo.py")
    newest = newest_step(run)
    assert_equal_runs(run, whole, step=newest)
    before = [load_checkpoint(checkpoint_path(folder, newest - 1))["policies"] for folder in (run, whole)]
    assert_same(*before)


def test_a_killed_sweep_goes_on_and_its_run_is_as_if_none_had_been(
    options, uninterrupted, tmp_path, monkeypatch, capsys, own_handlers, warm_torchrun
):
    """Its command of torchrun, as it stands in the run's args.json, is found to be the same one."""
    run = tmp_path / "swept-seed1"
    monkeypatch.chdir(ROOT)  # as a sweep's paths need it
    words = list(map(str, ["--name", tmp_path / "swept", *options["flow_grpo.py"], "--num_steps", 4]))
    (swept,) = sweep.plan_runs("flow_grpo.py", words, seeds=[1])
    with warm_rank(tmp_path, "flow_grpo.py", *swept.options) as (rank, done):
        wait_for(done.done, checkpoint_path(run, 1).exists)
        rank.kill()
        assert done.result(30).returncode == -signal.SIGKILL
    assert 1 <= newest_step(run) < 4
    for end in ("finished", "finished before"):
        with pytest.raises(SystemExit) as ended:
            sweep.main(["--seeds", "1", "--", "flow_grpo.py", *words])
        output = capsys.readouterr().out
        assert ended.value.code == 0 and output.splitlines()[-1] == f"{run}  step 4 of 4  {end}", output
    assert_equal_runs(run, uninterrupted("flow_grpo.py"))


# ---- from another run ------------------------------------------------------------------------------------------------
def test_full_weights_and_the_best_of_them(options, uninterrupted, tmp_path):
    """Also from another run's checkpoint into a new one."""
    whole = uninterrupted("flow_grpo.py", *FULL)
    torchrun(
        tmp_path,
        "flow_grpo.py",
        *options["flow_grpo.py"],
        *FULL,
        "--name",
        "other",
        "--num_steps",
        4,
        "--resume",
        whole / "checkpoints" / "step_000002.pt",
    )
    assert_equal_runs(tmp_path / "runs" / "other", whole, 3)
    scores = [row["val/noise/mean"] for row in read_metrics(whole)]
    best = scores.index(max(scores))
    states = [whole_checkpoint(path) for path in saved_checkpoints(whole)]  # of steps 1 to 4
    assert 1 <= best <= 2 and [state["best"] for state in states[best - 1 :]] == [max(scores)] * (5 - best)
    policies = {}  # `ema` by step
    for step, state in enumerate(states, 1):
        found = {name: tensor for name, tensor in state["tensors"].items() if name.startswith("policies/ema/")}
        policies[step] = {name.removeprefix("policies/ema/"): tensor for name, tensor in found.items()}
    assert not any("lora" in key for key in policies[4]) and list(states[3]["policies"]) == ["default", "ema"]
    assert not torch.equal(policies[best]["pos_embed.proj.weight"], policies[4]["pos_embed.proj.weight"])
    best_of_two = scores.index(max(scores[3:]))  # a new folder has a best of its own
    for folder, step in (
        (whole / "best_adapter", best),
        (whole / "adapter", 4),
        (tmp_path / "runs" / "other" / "best_adapter", best_of_two),
    ):
        saved = load_file(folder / "diffusion_pytorch_model.safetensors")
        assert saved.keys() == policies[step].keys()
        assert all(torch.equal(value, policies[step][key]) for key, value in saved.items())


def test_the_engine_gets_the_resumed_weights(options, uninterrupted, tmp_path):
    """Invariant 17 with vLLM-Omni, whose batches need not be those of the first run: to round-off."""
    whole = uninterrupted("flow_grpo.py", "--rollout", "vllm", "--learning_rate", 1e-2)
    torchrun(
        tmp_path,
        "flow_grpo.py",
        *options["flow_grpo.py"],
        "--rollout",
        "vllm",
        "--learning_rate",
        1e-2,
        "--num_steps",
        4,
        "--resume",
        whole / "checkpoints" / "step_000002.pt",
    )
    rows, expected = read_metrics(tmp_path / "runs" / "flow_grpo"), read_metrics(whole)[3:]
    assert [row["training/global_step"] for row in rows] == [3, 4]
    for row, other in zip(rows, expected, strict=True):
        assert row["rollout_corr/logprob_abs_diff_max"] <= 2e-6
        for name in ("critic/rewards/mean", "val/brightness/mean", "actor/ppo_kl", "actor/kl_loss"):
            assert row[name] == pytest.approx(other[name], rel=0, abs=2e-6), name


def test_the_number_of_ranks_may_change(options, uninterrupted, tmp_path):
    """Steps 1 and 2 on one rank, 3 on two, 4 on one; and keep_checkpoints, and which options are said to differ."""
    whole, run = uninterrupted("flow_grpo.py"), tmp_path / "runs" / "ranks"
    mine = [*options["flow_grpo.py"], "--name", "ranks", "--keep_checkpoints", 1]
    second, third = whole / "checkpoints" / "step_000002.pt", run / "checkpoints" / "step_000003.pt"
    done = torchrun(tmp_path, "flow_grpo.py", *mine, "--num_steps", 3, "--resume", second, nproc=2)
    assert done.stdout.count("loaded ") == 1
    differences = "keep_checkpoints: 9 -> 1; micro_batch_size: 4 -> 2; num_steps: 4 -> 3"
    assert f"loaded {second}; {differences}\n" in done.stdout
    assert done.stdout.count("saved by 1 rank, resumed by 2: equal to an uninterrupted run to round-off\n") == 1
    assert saved_checkpoints(run) == [third] and len(load_checkpoint(third)["rng"]) == 2
    done = torchrun(tmp_path, "flow_grpo.py", *mine, "--num_steps", 4, "--resume", "latest", "--rollout_batch_size", 16)
    differences = "rollout_batch_size: 0 -> 16"  # the micro-batch is no larger than it was
    assert f"loaded runs/ranks/checkpoints/{third.name}; {differences}\n" in done.stdout
    assert [path.stem for path in saved_checkpoints(run)] == ["step_000004"]
    rows, expected = read_metrics(run), read_metrics(whole)[3:]
    assert [row["training/global_step"] for row in rows] == [3, 4]
    for row, other in zip(rows, expected, strict=True):
        for name in ("critic/rewards/mean", "critic/rewards/brightness/mean", "val/brightness/mean"):
            assert row[name] == pytest.approx(other[name], abs=1e-6), name
        for name in ("actor/loss", "actor/grad_norm", "actor/kl_loss"):
            assert row[name] == pytest.approx(other[name], abs=1e-5), name
        assert row["training/epoch"] == other["training/epoch"] and row["actor/lr"] == other["actor/lr"]


@pytest.mark.parametrize("script", ["diffusion_nft.py", "dpo_offline.py"])
def test_the_number_of_ranks_may_change_in_the_others(script, options, uninterrupted, tmp_path):
    """From one to two: these have a third policy, or pairs. Guard and MixGRPO save and load by flow_grpo.py's
    functions, to the byte."""
    whole, run = uninterrupted(script), tmp_path / "runs" / "ranks"
    more = ["--name", "ranks", "--num_steps", 3, "--resume", whole / "checkpoints" / "step_000002.pt"]
    torchrun(tmp_path, script, *options[script], *more, nproc=2)
    (third,), expected = read_metrics(run), read_metrics(whole)[3]
    for name in ("actor/loss", "actor/grad_norm"):
        assert third[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    for name in ("training/epoch", "actor/lr", "critic/rewards/brightness/mean", "old_policy/decay"):
        assert third.get(name) == pytest.approx(expected.get(name), abs=1e-6), name


@pytest.mark.parametrize("script", ["flow_grpo.py", "diffusion_nft.py", "dpo_offline.py"])
def test_eval_only_of_a_checkpoint(uninterrupted, tmp_path, script):
    """With the options that the checkpoint has, and those that are given."""
    whole = uninterrupted(script)
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    checkpoint = whole / "checkpoints" / "step_000003.pt"
    what = ["--name", "measured", "--eval_only", "True", "--resume", checkpoint, "--weight_decay", 0.25]
    what += ["--trust_code", "True"]  # of a run outside the checkout, whose reward is a file
    said = torchrun(tmp_path, script, *what).stdout
    assert f"loaded {checkpoint}; weight_decay: 0.0001 -> 0.25\n" in said
    assert said.index("runs/measured: checking options") < said.index("loading ") < said.index("loaded ")
    assert "training: " not in said and " pairs, " not in said
    [row] = read_metrics(tmp_path / "runs" / "measured")
    expected = read_metrics(whole)[3]
    assert row["training/global_step"] == 3
    assert {name for name in row if not name.startswith(("timing_", "perf/", "val/"))} == {"training/global_step"}
    assert all(row[f"val/brightness/{kind}"] == expected[f"val/brightness/{kind}"] for kind in ("mean", "stderr"))
    assert not (tmp_path / "runs" / "measured" / "checkpoints").exists()
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


# ---- bad checkpoints and full disks ----------------------------------------------------------------------------------
def test_a_truncated_checkpoint_costs_a_step(options, uninterrupted, tmp_path):
    whole, run = uninterrupted("flow_grpo.py"), tmp_path / "runs" / "copy"
    shutil.copytree(whole, run)
    last = run / "checkpoints" / "step_000004.pt"
    os.truncate(last, last.stat().st_size - 1000)
    done = torchrun(
        tmp_path, "flow_grpo.py", *options["flow_grpo.py"], "--name", "copy", "--num_steps", 4, "--resume", "latest"
    )
    path = "runs/copy/checkpoints/step_00000"
    assert re.search(rf"{path}4.pt .*\(File is not a zip file\): .* step_000003.pt\n", done.stdout)
    assert f"loaded {path}3.pt\n" in done.stdout
    assert_equal_runs(run, whole)
    assert len(read_metrics(run)) == 5


@pytest.fixture
def small_disk(tmp_path):
    """mount(MB) -> a folder on a disk of that size, at most one."""

    def mount(size):
        disk = tmp_path / "disk"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            disk.rmdir()
            pytest.skip("mounting a tmpfs needs root")
        return disk

    yield mount
    if (tmp_path / "disk").exists():
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_full_disk_ends_the_run_in_one_line(options, uninterrupted, small_disk):
    """The second checkpoint of a run does not fit: the first one stays, and so does room to say why."""
    whole = uninterrupted("flow_grpo.py")
    disk = small_disk(4000)
    done = torchrun(disk, "flow_grpo.py", *options["flow_grpo.py"], "--name", "full", check=False)
    assert done.returncode == 1
    path = "runs/full/checkpoints/step_000002.pt"
    advice = "; .* runs/full/traceback_rank0.txt; .* step_000001.pt, .*--resume latest\n"
    assert re.search(rf"flow_grpo\.py: error: {path} .*\(No space left on device\){advice}", done.stdout)
    assert "Traceback" not in done.stdout.split("torch/distributed/elastic")[0]  # torchrun's own comes after it
    run = disk / "runs" / "full"
    assert [p.stem for p in saved_checkpoints(run)] == ["step_000001"]
    assert_equal_runs(run, whole, step=1)


def test_every_other_file_that_does_not_fit_is_an_error_of_one_line(small_disk, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["x" * 9000])
    disk, image = small_disk(64), Image.effect_noise((400, 400), 90)
    (disk / "metrics.jsonl").write_text('{"training/global_step": 0}\n' * 30)
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    pipe = embedded_model().pipe
    tensors = {"attn.to_q.lora_A.weight": torch.ones(999)}
    lora = LoraConfig(r=1)
    record = {"prompt": "a", "seed": 1, "ocr": 1.0}
    writers = {
        disk: lambda: new_run(disk).log({f"m{i}": i for i in range(9000)}),
        disk / "samples": lambda: save_samples(disk / "samples", [0], [image], [record]),
        disk / "adapter" / "pytorch_lora_weights.safetensors": lambda: save_weights(
            disk / "adapter", pipe, tensors, lora
        ),
        disk / "best_adapter" / "diffusion_pytorch_model.safetensors": lambda: save_weights(
            disk / "best_adapter", pipe, tensors, None
        ),
        disk / "run": lambda: create_run_folder(disk / "run", asdict(flow_grpo.Args()), ROOT / "flow_grpo.py"),
        disk / "metrics.jsonl": lambda: rewind(disk, 0, 0),
    }
    for path, write in writers.items():
        with pytest.raises(RunError) as error:
            write()
        assert re.match(rf"{path} .*\(", str(error.value)) and "\n" not in str(error.value)
        assert "No space left on device" in str(error.value)


# ---- before anything loads -------------------------------------------------------------------------------------------
@pytest.fixture
def find(monkeypatch):
    """find(*options) -> the checkpoint that flow_grpo.py would resume from, in the test's folder."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py"])  # whose checkpoints they are

    def find(*options):
        trusting = ["--trust_code=True"] if "--resume" in options and "latest" not in options else []  # runs of tests
        args = parse_args(flow_grpo.Args, "", ["--rollout=local", *trusting, *map(str, options)])
        return flow_grpo.prepare(args).checkpoint

    return find


def test_what_resume_means(uninterrupted, find, tmp_path):
    whole = uninterrupted("flow_grpo.py")
    assert find("--resume", "latest") is None  # there is nothing: it begins
    more = ("--num_steps", 5)
    assert find("--resume", whole, *more) == whole / "checkpoints" / "step_000004.pt"
    assert find("--resume", whole / "checkpoints" / "step_000001.pt") == whole / "checkpoints" / "step_000001.pt"
    (tmp_path / "runs" / "flow_grpo").mkdir(parents=True)
    assert find("--resume", "latest") is None
    shutil.copy(whole / "metrics.jsonl", tmp_path / "runs" / "flow_grpo")
    assert find("--resume", "latest") is None  # killed before its first checkpoint
    for options in ([], ["--resume", whole, *more], ["--resume", whole, "--eval_only", "True"]):
        with pytest.raises(ValueError) as error:
            find(*options)
        advice = "--name" + ("" if "True" in options else ", .*--resume latest")
        assert re.fullmatch(rf"runs/flow_grpo .*{advice} \(.* metrics\.jsonl\)", str(error.value))
    with pytest.raises(ValueError, match="^--eval_only .*--name: "):
        find("--resume", "latest", "--eval_only", "True")
    for nothing in (tmp_path / "runs" / "flow_grpo", "no/such/run"):
        with pytest.raises(ValueError, match=f"^--resume {nothing}: "):
            find("--name", "new", "--resume", nothing)
    with pytest.raises(ValueError, match=r": no/such\.pt "):
        find("--name", "new", "--resume", "no/such.pt")
