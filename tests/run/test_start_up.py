"""The first lines that a user sees, and how soon: no slow import comes before a wrong option is refused."""

import re
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace

import flow_grpo
from common.files.checkpoints import FORMAT, save_checkpoint
from common.run.checks import check_compiler, check_updates
from common.run.command_line import parse_args
from common.run.resuming import report_resumed
from tests.conftest import ROOT, TINY, new_run, run_here

import pytest
import torch
import torch._inductor.config
from torch.utils import _triton

SCRIPTS = ["flow_grpo.py", "grpo_guard.py", "mix_grpo.py", "dpo_offline.py", "diffusion_nft.py"]
SLOW = {"diffusers", "transformers", "peft", "matplotlib", "wandb", "rapidocr", "onnxruntime", "vllm", "torch._dynamo"}
SLOW |= {"pyarrow", "common.engine"}  # for a parquet alone, and for --rollout vllm alone
REFUSED = {
    "--learning_rate -1": "--learning_rate -1.0: ",
    "--train_prompts nowhere.txt": "nowhere.txt: ",
    "--reward nowhere.py:mine": "--reward nowhere.py:mine: ",
    "--name full": "runs/full ",
    "--resume nowhere": "--resume nowhere: ",
}
REFUSE = """
import importlib, os, sys, torch
sys.path.insert(0, sys.argv[1])
os.environ["WORLD_SIZE"] = "1"
for name in {scripts}:
    script = importlib.import_module(name.removesuffix(".py"))
    local = [] if name == "dpo_offline.py" else ["--rollout", "local"]
    for options in {options}:
        sys.argv = [name, *options.split(), *local]
        try:
            script.prepare(script.check(script.parse_args(script.Args, "")))
        except ValueError as error:
            print(str(error)[:40])
        else:
            print("accepted", options)
    print(name, sorted({slow} & set(sys.modules)))
"""


def test_a_wrong_option_is_refused_before_the_slow_imports(tmp_path):
    """Each slow import takes a second or more: diffusers, peft and transformers are imported once all else is right.

    One process imports the five scripts, one after the other, because torch alone takes seconds.
    """
    (tmp_path / "runs" / "full").mkdir(parents=True)
    (tmp_path / "runs" / "full" / "metrics.jsonl").touch()
    code = REFUSE.format(scripts=SCRIPTS, options=list(REFUSED), slow=SLOW)
    command = [sys.executable, "-c", code, ROOT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    expected = [line for script in SCRIPTS for line in (*REFUSED.values(), f"{script} []")]
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, expected, strict=True)), lines
    first_lines = [f"runs/{script.removesuffix('.py')}: checking options and files" for script in SCRIPTS]
    expected = sorted(first_lines * 4, key=first_lines.index)  # with --name full the run has another name
    assert [line for line in done.stderr.splitlines() if line in first_lines] == expected


@pytest.mark.fast
def test_without_a_compiler_compile_is_refused_before_the_model_loads(tmp_path, monkeypatch, capfd):
    options = [*TINY, "--rollout", "local", "--reward", "jpeg_incompressibility", "--train_with", "compile"]
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "no-such-c++"))
    monkeypatch.setenv("CXX", "no-such-c++")
    line = run_here(tmp_path, "flow_grpo.py", *options)
    assert line.startswith("flow_grpo.py: error: --train_with compile: ") and "C++" in line and "no-such-c++" in line
    assert "loading" not in capfd.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        ("triton", "pip install triton"),
        ("capability", "7.0"),
        ("CC", " no-such-cc "),
        ("gcc", " gcc "),
        ("header", "Python.h"),
    ],
)
def test_what_compiling_on_a_gpu_lacks_is_named(lacking, named, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there = {"triton", "capability"}
    monkeypatch.setattr(_triton, "has_triton_package", lambda: "triton" in there)
    monkeypatch.setattr(_triton, "has_triton", lambda: "capability" in there)
    monkeypatch.delenv("CC", raising=False)
    header = tmp_path / "Python.h"
    header.touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_compiler("--train_with compile")
    there.discard(lacking)
    if lacking == "header":
        header.unlink()
    elif lacking == "gcc":
        (tmp_path / "gcc").unlink()
    elif lacking == "CC":
        monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(ValueError, match=f"^--engine_with compile: .*{named}"):
        check_compiler("--engine_with compile")


# ---- lines -----------------------------------------------------------------------------------------------------------
def take_steps(run, steps):
    """Take training steps, of which nothing is learned from the second on."""
    for step in steps:
        run.begin_step(step)
        run.log({"critic/rewards/zero_std_ratio": 0.5 if step == steps[0] else 1.0})


@pytest.mark.fast
def test_training_is_announced_and_its_end_as_well(tmp_path, capsys):
    run = new_run(tmp_path, image_size=(32, 96), num_images=256, num_steps=13)
    take_steps(run, range(11, 13))
    shown = capsys.readouterr()
    assert re.match(".* 11 to 13, 256 .* 32 x 96 .*\n", shown.out)
    assert "| 10/13 [" in shown.err and "| 12/13 [" in shown.err  # the bar counts the run's steps, not the start's
    run.close()  # as asked by a signal
    assert re.fullmatch(".* 12 of 13; .*--resume latest\n", capsys.readouterr().out)

    finished = ".* {} .*; .*--resume latest .*--num_steps\n"
    run = new_run(tmp_path, num_steps=13)
    take_steps(run, range(13, 14))
    run.close()
    assert re.search(finished.format(13), capsys.readouterr().out)

    for last_step in (30, 40):  # the run was finished before; it has more steps than are asked for now
        run = new_run(tmp_path, num_steps=30)
        run.step = last_step
        run.close()
        shown = capsys.readouterr()
        assert re.fullmatch(finished.format(last_step), shown.out)
        assert shown.err == ""


@pytest.mark.fast
def test_rollouts_of_equal_rewards_are_reported_once(tmp_path, capsys):
    take_steps(new_run(tmp_path, num_steps=3), range(1, 4))
    shown = capsys.readouterr().out
    assert shown.count(" 2: ") == 1 and " 1: " not in shown and " 3: " not in shown


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "is_said"),
    [({}, True), ({"num_steps": 8}, False), ({"train_with": ("compile",)}, False), ({"base_weights": "int8"}, False)],
)
def test_a_long_eager_run_on_a_gpu_says_what_compiling_saves(changes, is_said, tmp_path, capsys, monkeypatch):
    """Of steps of 300 s, the first one of which takes longer: the rest of 22 takes more than half an hour."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    run = new_run(tmp_path, **{"num_steps": 22} | changes)
    for step in (1, 2, 3):
        run.begin_step(step)
        clock[0] += 900 if step == 1 else 300
        run.log({})
    said = [line for line in capsys.readouterr().out.splitlines() if "--train_with compile" in line]
    assert len(said) == is_said
    # 20 steps of 300 s, of which 1 - 1 / 1.74 would be saved
    assert not said or (said[0].startswith("step 2: 20 ") and "1.7 h" in said[0] and "0.7 h" in said[0])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("mean", "deviation", "clip_range", "told"),
    [
        (1.0, 6e-4, 1e-3, ""),
        (1.0, 6e-4, 1.0, ""),
        (1.0, 6e-4, 1e-4, "1 +0 +- 0.0006"),
        (1.00002, 0.0, 1e-5, "1 +2e-05 +- 0"),
        (1.289, 0.0, 1.0, "1 +0.29 +- 0"),
        (1.0, 0.03, 1e-3, "1 +0 +- 0.03"),
    ],
)
def test_a_ratio_that_does_not_begin_at_1_is_reported(mean, deviation, clip_range, told, tmp_path, capsys):
    """A fork that samples otherwise than it computes log-probs. After the first step the policy may be another one."""
    run = new_run(tmp_path, num_steps=2)
    for step in (1, 2):
        run.begin_step(step)
        run.report_ratio(mean, deviation, clip_range)
    shown = capsys.readouterr().out
    assert shown.count(" +- ") == bool(told)
    assert not told or f" {told}: " in shown


@pytest.mark.fast
def test_another_score_is_not_compared_with_the_best_one_so_far(capfd):
    saved = {"reward": ("ocr",), "reward_weights": (1.0,), "eval_prompts": "a.txt", "resume": "latest"}
    assert report_resumed("c.pt", saved, saved)
    assert capfd.readouterr().err == "loaded c.pt\n"
    assert not report_resumed("c.pt", saved, saved | {"resume": "runs/other"})
    assert not report_resumed("c.pt", saved, saved | {"best_by": "val/ocr_contains/mean"})
    assert not report_resumed("c.pt", saved, saved | {"family": "mine.py:Mine"})
    assert not report_resumed("c.pt", saved, saved | {"reward_weights": (2.0,)})
    told = r"loaded c\.pt; reward_weights: \[1\.0\] -> \[2\.0\]; reward_weights .*: best_adapter .*\n$"
    assert re.search(told, capfd.readouterr().err)


@pytest.mark.fast
def test_another_judge_of_the_same_name_is_another_score():
    """Where it chooses the best; a reward that is only watched does not."""
    saved = {"reward": ("ocr",), "eval_reward": ("a.py:judge.style", "b.py:other"), "resume": "latest"}
    saved |= {"best_by": "val/judge.style/mean"}
    assert report_resumed("c.pt", saved, saved | {"eval_reward": ["a.py:judge.style", "c.py:other"]})
    assert not report_resumed("c.pt", saved, saved | {"eval_reward": ("c.py:judge.style", "b.py:other")})


@pytest.mark.fast
def test_a_checkpoint_from_before_an_option_has_the_score_of_its_default(capfd):
    saved = {"reward": ("ocr",), "resume": "latest", "vae_dtype": "float32"}
    now = saved | {"negative_prompt": "", "eval_guidance_scale": None, "base_weights": None}
    assert report_resumed("c.pt", saved, now)
    assert not report_resumed("c.pt", saved, now | {"vae_dtype": "bfloat16"})
    assert not report_resumed("c.pt", saved, now | {"base_weights": "int8"})
    assert not report_resumed("c.pt", saved, now | {"negative_prompt": "blurry"})


@pytest.mark.fast
def test_more_steps_are_told_where_they_change_the_learning_rate(capfd):
    saved = {"resume": "latest", "num_steps": 100, "lr_schedule": "constant"}
    report_resumed("c.pt", saved, saved | {"num_steps": 200})
    assert capfd.readouterr().err == "loaded c.pt\n"
    linear = saved | {"lr_schedule": "linear"}
    report_resumed("c.pt", linear, linear | {"num_steps": 200})
    assert capfd.readouterr().err == "loaded c.pt; num_steps: 100 -> 200\n"
    # a run that starts from another run's checkpoint names all that it changes
    other = {"resume": "runs/other", "name": "new", "num_steps": 200, "keep_checkpoints": 5}
    report_resumed("c.pt", saved | {"name": "old"}, saved | other)
    assert capfd.readouterr().err == "loaded c.pt; keep_checkpoints: None -> 5; num_steps: 100 -> 200\n"


@pytest.mark.fast
def test_another_judge_is_another_score_and_another_address_or_watched_reward_is_not(capfd):
    saved = {"reward": ("vlm_judge",), "eval_reward": ("pickscore",), "resume": "latest"}
    judge = {"VLM_JUDGE_URL": "http://one", "VLM_JUDGE_MODEL": "one"}
    saved |= {"reward_settings": {"vlm_judge": judge, "pickscore": {"PICKSCORE_MODEL": "one"}}}

    def resume(**changes):
        settings = saved["reward_settings"] | changes
        is_comparable = report_resumed("c.pt", saved, saved | {"reward_settings": settings})
        return is_comparable, capfd.readouterr().err

    assert resume() == (True, "loaded c.pt\n")
    for moved in ({"vlm_judge": judge | {"VLM_JUDGE_URL": "http://two"}}, {"pickscore": {}}):
        is_comparable, told = resume(**moved)
        assert is_comparable and told.startswith("loaded c.pt; reward_settings: {") and "best_adapter" not in told
    changes = {"VLM_JUDGE_MODEL": judge | {"VLM_JUDGE_MODEL": "two"}}
    changes["VLM_JUDGE_RANGE"] = judge | {"VLM_JUDGE_RANGE": "0,5"}
    for variable, settings in changes.items():
        is_comparable, told = resume(vlm_judge=settings)
        assert not is_comparable and re.search(f"; {variable} .* best_adapter .*\n$", told)


@pytest.mark.fast
def test_a_resume_says_in_one_line_that_the_script_or_common_changed(capfd):
    """The best adapter stays the best one: most changes of code change no score."""
    saved = {"name": "a", "resume": "latest", "reward": ("ocr",)}
    changed = {"source common/": False, "source flow_grpo.py": False}
    assert report_resumed("c.pt", saved, saved, changed)
    _, line = capfd.readouterr().err.splitlines()
    assert "flow_grpo.py" in line and "common/" in line and "c.pt" in line


# ---- evaluation only -------------------------------------------------------------------------------------------------
def parse(*options):
    return parse_args(flow_grpo.Args, "", list(options))


@pytest.mark.fast
def test_evaluation_only_takes_the_options_of_the_checkpoint(tmp_path, monkeypatch):
    """All but those of the start itself; what is given on the command line comes first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py"])
    monkeypatch.setenv("WORLD_SIZE", "1")  # and no RANK: as a plan, which logs in nowhere
    monkeypatch.delenv("RANK", raising=False)  # which a script that ran in this process has set
    saved = {"name": "long", "lora_rank": 4, "image_size": (64, 96), "reward": ("a.py:b", "ocr"), "num_steps": 7}
    saved |= {"an option of before": 1, "track": True}
    state = {"step": 3, "best": 0.5, "args": saved, "sampler": {}, "rng": [{}], "policies": {"default": {}}}
    save_checkpoint(tmp_path / "runs" / "long", 3, state | {"optimizer": {}, "format": FORMAT}, 1)
    args = parse("--resume", "runs/long", "--eval_only", "True", "--name", "look", "--reward", "ocr")
    expected = flow_grpo.Args(name="look", resume="runs/long", eval_only=True, lora_rank=4, image_size=(64, 96))
    assert args == expected
    trained = parse("--resume", "runs/long", "--reward", "ocr")  # a new run that trains on
    assert trained == replace(expected, name="flow_grpo", eval_only=False, num_steps=7, track=True)
    with pytest.raises(ValueError, match="^--num_steps 2: .* 3 "):
        parse("--name", "long", "--resume", "latest", "--num_steps", "2")
    told = "--num_steps 3: .*--resume runs/long .* 3, .*"
    with pytest.raises(ValueError, match=f"^{told}$"):
        parse("--resume", "runs/long", "--num_steps", "3")
    with pytest.raises(ValueError, match="^--resume nowhere: "):
        parse("--resume", "nowhere", "--eval_only", "True")


def test_a_schedule_that_counts_optimizer_steps_keeps_their_number(tmp_path, monkeypatch):
    """Adam's count goes on, and would be held against a total of the new number alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py"])
    saved = {"updates_per_rollout": 4, "epochs_per_rollout": 1, "lr_schedule": "cosine"}
    saved |= {"shard_ranks": 2, "micro_batch_size": 8}
    state = {"step": 3, "best": 0.5, "args": saved, "sampler": {}, "rng": [{}] * 2, "policies": {"default": {}}}
    save_checkpoint(tmp_path / "runs" / "flow_grpo", 3, state | {"optimizer": {}, "format": FORMAT}, 1)
    saved_state = {"updates_per_step": 4}

    def check(*words):
        args = parse("--resume", "latest", *words)
        check_updates(args.lr_schedule, saved_state, flow_grpo.workload(args))
        return args.updates_per_rollout

    with pytest.raises(ValueError, match="--lr_schedule cosine: .* 1, .* 4"):
        check("--updates_per_rollout", "1")
    check("--updates_per_rollout", "2", "--epochs_per_rollout", "2")  # as many
    assert check("--updates_per_rollout", "1", "--lr_schedule", "constant") == 1 and check() == 4
    alone = parse("--resume", "runs/flow_grpo", "--eval_only", "True", "--name", "look")  # on one rank, not two
    assert alone.shard_ranks == 0
