"""What a user sees when something breaks: one line that says what and what to do, in time, and nothing lost.

Most runs are the scripts' own `__main__` in this process, with one vLLM-Omni engine for all of them; those whose
process matters (the screen, exit codes, a kill) have processes of their own.
"""

import itertools
import math
import re
import signal

import flow_grpo
from common.engine.client import VLLMEngine
from common.files.checkpoints import saved_checkpoints
from tests import broken_engine
from tests.conftest import (
    EMBEDDED,
    TINY,
    assert_one_line,
    few_eval_prompts,
    forked_engines,
    needs_engine,
    read_metrics,
    run_here,
    torchrun,
)

import psutil
import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory):
    log_file = tmp_path_factory.mktemp("engine") / "engine.log"
    with forked_engines():
        engine = VLLMEngine(EMBEDDED, "float32", 8, log_file, timeout_s=300, num_threads=1)
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


# OCR and training would take most of so short a run
CHEAP = ["--reward", "jpeg_compressibility", "--num_prompts", 2, "--num_inference_steps", 4]


def steps_of(folder, name="flow_grpo"):
    return [row["training/global_step"] for row in read_metrics(folder / "runs" / name)]


# ---- the engine does not run the trainer's policy --------------------------------------------------------------------
MISMATCH = r" \d .* \S+e[+-]\d+ .* \S+e[+-]\d+: .*--rollout local"
LATENTS = r" \d .* std x .* 1\.0e-05: .* fp32 "
STALE = r" transformer_blocks\S+ .*\(\d+ of 62 "
BROKEN = {
    "sigmas": (MISMATCH, []),
    "bf16_latents": (LATENTS, []),
    "stale": (STALE, []),
    "guidance": (MISMATCH, ["--guidance_scale", 3]),
}


def train_with(breakage, folder, monkeypatch, *options):
    for name in ("_ask", "_answer", "generate", "verify_policy"):
        monkeypatch.setattr(VLLMEngine, name, getattr(VLLMEngine, name))  # for the patch to be undone
    monkeypatch.setattr(VLLMEngine, "trains", False, raising=False)
    if breakage:
        broken_engine.break_engine(breakage)
    options = [*TINY, *CHEAP, "--num_steps", 2, "--learning_rate", 3e-3, *options, *few_eval_prompts(folder, 2)]
    return run_here(folder, "flow_grpo.py", *options)


@pytest.mark.parametrize(("breakage", "old_log_prob"), [*((b, "recompute") for b in BROKEN), ("sigmas", "rollout")])
def test_a_broken_engine_stops_the_run_at_the_first_possible_step(
    engine, tmp_path, monkeypatch, breakage, old_log_prob
):
    message, options = BROKEN[breakage]
    line = train_with(breakage, tmp_path, monkeypatch, "--old_log_prob", old_log_prob, *options)
    assert_one_line(line)
    assert re.search(message, line)
    assert steps_of(tmp_path) == [0]


@pytest.mark.parametrize(
    "options",
    [
        ["--rollout_correction", "tis:2,reject_k2:4", "--epochs_per_rollout", 2],
        ["--old_log_prob", "rollout"],
        ["--lora_target_modules", "not:to_q", "not:add_k_proj", "--ema_decay", 0.9],
    ],
    ids=["corrected", "rollout", "modules, ema"],
)
def test_the_whole_engine_passes(engine, tmp_path, monkeypatch, options):
    """Also with modules of the engine's fused q, k, v that have no LoRA, and with an average pushed to evaluate."""
    assert train_with(None, tmp_path, monkeypatch, *options) is None
    rows = read_metrics(tmp_path / "runs" / "flow_grpo")
    assert len(rows) == 3 and all(row["actor/grad_norm"] > 0 for row in rows[1:])
    assert all(row["rollout_corr/logprob_abs_diff_max"] <= 2e-6 for row in rows[1:])
    if "--rollout_correction" in options:
        for row in rows[1:]:
            assert row["rollout_corr/weight_min"] <= row["rollout_corr/weight_mean"] <= row["rollout_corr/weight_max"]
            assert row["rollout_corr/weight_mean"] == pytest.approx(1, abs=1e-5) and row["rollout_corr/rejected"] == 0


def test_the_engine_has_nothing_that_a_kill_could_leave(shared_engine):
    """tqdm's lock between processes was a file in /dev/shm, with a process of its own to remove it."""
    shared_engine.wait_ready()
    process = psutil.Process(shared_engine.process.pid)
    assert process.children(recursive=True) == []
    assert not [mapped.path for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm")]


# ---- the engine is gone ----------------------------------------------------------------------------------------------
@needs_engine
def test_an_engine_killed_in_a_rollout_ends_the_process_in_one_line_on_the_screen(tmp_path):
    options = [*TINY, *CHEAP, "--rollout", "vllm", "--num_steps", 3, "--eval_every", 1, *few_eval_prompts(tmp_path, 2)]
    done = torchrun(tmp_path, "tests/broken_engine.py", "killed", *options, check=False)
    assert done.returncode == 1
    lines = [line for line in re.split(r"[\r\n]", done.stdout) if line.strip() and not re.search("it/s|s/it", line)]
    line = lines[-1]
    assert "Traceback" not in done.stdout and not any("error" in other for other in lines[:-1]), done.stdout
    assert_one_line(line, "broken_engine.py")
    for part in (
        r" generate .* -9, SIGKILL\)",
        r" step_000001\.pt, .*--resume latest",
        r"runs/flow_grpo/engine_rank0\.log",
    ):
        assert re.search(part, line)
    assert steps_of(tmp_path) == [0, 1]
    assert (tmp_path / "runs/flow_grpo/checkpoints/step_000001.pt").exists()  # as the line says


@needs_engine
def test_an_engine_killed_in_a_push_of_full_weights_ends_both_ranks(tmp_path):
    """The second rank's, in step 2. The first rank, whose own engine lives, does not wait for it, and no engine stays.
    A line says which engine died in what, and from where to resume: from step 1."""
    options = [*TINY, *CHEAP, "--rollout", "vllm", "--lora_rank", 0, "--learning_rate", 1e-4, "--num_steps", 3]
    options += ["--eval_every", 1, *few_eval_prompts(tmp_path, 2)]
    done = torchrun(tmp_path, "tests/broken_engine.py", "killed_in_push", *options, nproc=2, check=False)
    assert done.returncode == 1
    (line,) = re.findall(r"broken_engine\.py: error: .* push_weights .*", done.stdout)
    for part in (
        r" -9, SIGKILL\)",
        r"engine_rank1\.log",
        r" step_000001\.pt, ",
    ):
        assert re.search(part, line)
    assert steps_of(tmp_path) == [0, 1]
    assert [path.name for path in saved_checkpoints(tmp_path / "runs" / "flow_grpo")] == ["step_000001.pt"]
    here = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path) and p != psutil.Process()]
    _, left = psutil.wait_procs(here, 30)
    assert not left


# ---- no gradient -----------------------------------------------------------------------------------------------------
def nan_loss(monkeypatch, calls, policy_loss=flow_grpo.policy_loss):
    """flow_grpo's policy_loss gets NaN advantages in those of its calls."""
    count = itertools.count()

    def broken(log_prob, old_log_prob, advantages, *args):
        return policy_loss(log_prob, old_log_prob, advantages * (math.nan if next(count) in calls else 1), *args)

    monkeypatch.setattr(flow_grpo, "policy_loss", broken)


LOCAL = [*TINY, *CHEAP, "--rollout", "local", "--learning_rate", 3e-3]


def test_a_nan_gradient_is_skipped_and_counted_and_the_run_continues(tmp_path, monkeypatch):
    """The first step takes no optimizer step at all, and saving takes none in its place."""
    nan_loss(monkeypatch, {0, 1, 4})
    assert (
        run_here(
            tmp_path,
            "flow_grpo.py",
            *LOCAL,
            "--num_steps",
            3,
            "--updates_per_rollout",
            2,
            "--eval_every",
            1,
            "--keep_checkpoints",
            2,
            "--ema_decay",
            0.5,
            *few_eval_prompts(tmp_path, 2),
        )
        is None
    )
    rows = read_metrics(tmp_path / "runs" / "flow_grpo")[1:]
    assert [row["actor/skipped_steps"] for row in rows] == [2, 0, 1]
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    saved = sorted((tmp_path / "runs" / "flow_grpo" / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step_000002.pt", "step_000003.pt"]
    for path, steps in zip(saved, (2, 3), strict=True):  # optimizer steps that were taken
        state = torch.load(path, weights_only=True)
        assert {s["step"].item() for s in state["optimizer"]["state"].values()} == {steps}
        assert all(v.isfinite().all() for policy in state["policies"].values() for v in policy.values())


def test_three_steps_without_a_finite_gradient_end_the_run_and_change_no_weight(tmp_path, monkeypatch):
    """A resumed run counts on from its checkpoint's steps; a new run that starts from it does not."""
    options = [*LOCAL, "--num_steps", 5, "--eval_every", 2, *few_eval_prompts(tmp_path, 2)]
    for again in ([], ["--resume", "latest"]):
        nan_loss(monkeypatch, set(range(9)))
        line = run_here(tmp_path, "flow_grpo.py", *options, *again)
        assert_one_line(line)
        assert re.search(" 3: .* 3 .*--learning_rate", line)
    nan_loss(monkeypatch, set(range(9)))
    line = run_here(tmp_path, "flow_grpo.py", *options, "--name", "other", "--resume", "runs/flow_grpo")
    assert re.search(" 5: .* 3 .*--learning_rate", line)
    rows = read_metrics(tmp_path / "runs" / "flow_grpo")
    assert [row.get("actor/skipped_steps") for row in rows] == [None, 1, 1] and "actor/grad_norm" not in rows[1]
    state = torch.load(tmp_path / "runs/flow_grpo/checkpoints/step_000002.pt", weights_only=True)
    assert all(v.abs().max() == 0 for k, v in state["policies"]["default"].items() if "lora_B" in k)


# ---- rewards ---------------------------------------------------------------------------------------------------------
REWARD = """
calls = []
def mine(images, prompts, metadata):
    calls.append(len(images))
    if len(calls) < 4:  # the trial, the evaluation before training, a step
        return [i % 3 for i in range(len(images))]
    return {}
"""
REWARDS = {
    "{}['no such key']": r" mine .*KeyError: 'no such key' \(\S*mine.py:7\); .*"
    r"runs/flow_grpo/traceback_rank0.txt; .* step_000001.pt, .*--resume latest$",
    "[0.5, float('nan')] * (len(images) // 2)": r" mine: .* 1 \(.* sign that says .* nan",
}


@pytest.mark.parametrize("returned", REWARDS)
def test_a_reward_that_breaks_is_named_and_what_was_measured_is_kept(tmp_path, returned):
    """tests/rewards/test_failures.py has the other values that are no scores."""
    (tmp_path / "mine.py").write_text(REWARD.format(returned))
    line = run_here(
        tmp_path, "flow_grpo.py", *LOCAL, "--reward", tmp_path / "mine.py:mine", *few_eval_prompts(tmp_path, 2)
    )
    assert_one_line(line)
    assert re.search(REWARDS[returned], line)
    assert steps_of(tmp_path) == [0, 1]
    trace = tmp_path / "runs/flow_grpo/traceback_rank0.txt"
    if "traceback" in REWARDS[returned]:
        assert "line 7, in mine" in trace.read_text()
    else:
        assert not trace.exists()  # no exception of the user's is behind the line


# ---- options ---------------------------------------------------------------------------------------------------------
CORRECTION = "--rollout_correction: .*--rollout vllm .*--old_log_prob recompute"
BAD = {  # one or two of each stage of a start; tests/core/test_options.py has all bounds
    # the options alone
    "--adv_clip_max -1": "--adv_clip_max -1.0: .* 0$",
    "--rollout_correction tis:2 --old_log_prob rollout --rollout vllm": CORRECTION,
    "--rollout_correction tis:2": CORRECTION,
    # files and folders
    "--eval_only True --resume latest": "--eval_only .*--name: .*--resume ",
    "--resume nothing": "--resume nothing: ",
    "--resume nothing.pt": r"nothing.pt .*\(No such file or directory\)",
    # the family
    "--image_size 32 94": "--image_size 32 94: .* 8$",
    "--image_size 100000 96": "--image_size 100000 96: ",
    "--rollout_correction nonsense --rollout vllm": "--rollout_correction nonsense: 'nonsense' .* KIND:",
    # the LoRA
    "--lora_path no/such": "--lora_path no/such: .*No such file or directory",
    "--lora_path .": "--lora_path .: .* other$",
    "--lora_path other": "--lora_path other: transformer.blocks.7.to_q.lora_A.weight: ",
    "--lora_target_modules to_q nowhere": "--lora_target_modules nowhere: SD3Transformer2DModel ",
    "--lora_target_modules not:nowhere": "--lora_target_modules not:nowhere: SD3Transformer2DModel ",
    "--lora_target_modules to_q not:to_q": "--lora_target_modules not:to_q: ",
}


@pytest.mark.parametrize("options", BAD)
def test_a_bad_option_ends_in_one_line(tmp_path, options):
    (tmp_path / "other").mkdir()
    tensors = {f"transformer.blocks.7.to_q.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"}
    save_file(tensors, tmp_path / "other" / "pytorch_lora_weights.safetensors")
    line = run_here(tmp_path, "flow_grpo.py", "--rollout", "local", *options.split())
    assert_one_line(line)
    assert re.search(BAD[options], line)
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_another_runs_checkpoint_is_refused(tmp_path, capfd):
    """Its rank, or its modules, are not this run's; a line about the rank comes before the model loads."""
    options = [*LOCAL, "--num_steps", 1, *few_eval_prompts(tmp_path, 2)]
    assert run_here(tmp_path, "flow_grpo.py", "--name", "one", *options) is None
    saved = "runs/one/checkpoints/step_000001.pt"
    refused = {
        "--lora_rank 4": f"--lora_rank: .* 4, .*{saved} .* 16 ",
        "--lora_rank 0": f"--lora_rank: .* 0, .*{saved} .* 16 ",
    }
    capfd.readouterr()
    options += ["--num_steps", 2]
    for changed, message in refused.items():
        line = run_here(tmp_path, "flow_grpo.py", "--name", "b", "--resume", "runs/one", *changed.split(), *options)
        assert_one_line(line)
        assert re.search(message, line)
    assert "loading" not in capfd.readouterr().err
    fewer = ["--name", "b", "--resume", "runs/one", "--lora_target_modules", "to_q"]
    line = run_here(tmp_path, "flow_grpo.py", *fewer, *options)
    assert_one_line(line)
    assert re.search(r" default .* transformer_blocks\.0\.attn\.add_k_proj\.lora_A", line)
    # all of two targets
    without = ["--name", "without", "--lora_target_modules", "not:to_q", "not:add_k_proj", *options]
    assert run_here(tmp_path, "flow_grpo.py", *without) is None
    assert run_here(tmp_path, "flow_grpo.py", *without, "--resume", "latest") is None


# ---- the last test: it takes the engine with it ----------------------------------------------------------------------
def test_a_stuck_engine_ends_the_run_within_its_time(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "timeout_s", 20)
    monkeypatch.setattr(engine, "rollouts", 0, raising=False)
    line = train_with("stuck", tmp_path, monkeypatch)
    assert_one_line(line)
    assert re.search(
        r" generate .* 20 s .*: \S+engine.log; .* step_000001.pt, .*--resume latest$",
        line,
    )
    assert engine.process.wait(10) == -signal.SIGKILL
    assert steps_of(tmp_path) == [0, 1]
