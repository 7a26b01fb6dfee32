"""What a user sees first, and how soon: the imports before the first line, and before a wrong option is refused."""

import subprocess
import sys

import flow_grpo
from common.checkpoints import save_checkpoint, say_resumed
from common.options import parse_args
from common.run import RunLog
from tests.conftest import ROOT

import pytest

SCRIPTS = ["flow_grpo.py", "grpo_guard.py", "mix_grpo.py", "dpo_offline.py", "diffusion_nft.py"]
SLOW = {"diffusers", "transformers", "peft", "matplotlib", "wandb", "rapidocr", "onnxruntime", "vllm", "torch._dynamo"}
SLOW |= {"pyarrow"}  # for a parquet alone
pytestmark = pytest.mark.fast

REFUSED = """
import importlib, os, sys, torch
sys.path.insert(0, sys.argv[1])
script = importlib.import_module(sys.argv[2].removesuffix(".py"))
sys.argv[0] = sys.argv[2]
os.environ["WORLD_SIZE"] = "1"
for options in ({options}):
    try:
        script.check_args(script.parse_args(script.Args, "", [*options.split(), {local}]))
    except ValueError as error:
        print(str(error)[:40])
    else:
        print("accepted", options)
print(sorted({slow} & set(sys.modules)))
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_wrong_option_is_refused_before_the_slow_imports(script, tmp_path):
    """Each of them takes a second or more: diffusers, peft and transformers are imported once all else is in order."""
    (tmp_path / "runs" / "full").mkdir(parents=True)
    (tmp_path / "runs" / "full" / "metrics.jsonl").touch()
    refused = {
        "--learning_rate -1": "--learning_rate -1.0: must be at least 0",
        "--train_prompts nowhere.txt": "nowhere.txt: no such file",
        "--reward nowhere.py:mine": "--reward nowhere.py:mine: no such file n",
        "--name full": "runs/full already holds a run: choose an",
        "--resume nowhere": "--resume nowhere: no checkpoint there",
    }
    local = "" if script == "dpo_offline.py" else "'--rollout', 'local'"
    code = REFUSED.format(options=list(refused), local=local, slow=SLOW)
    command = [sys.executable, "-c", code, ROOT, script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [*refused.values(), "[]"]
    assert done.stderr.splitlines()[0] == f"runs/{script.removesuffix('.py')}: checking options and files"


# ---- lines -----------------------------------------------------------------------------------------------------------
def test_training_is_announced_and_its_end_too(tmp_path, capsys):
    log = RunLog(tmp_path, num_images=256)
    assert list(log.steps(range(11, 14))) == [11, 12, 13]
    shown = capsys.readouterr()
    assert shown.out == "training: steps 11 to 13, of 256 images each\n"
    assert "| 13/13 [" in shown.err and "| 10/13 [" in shown.err  # the bar counts the run's steps, not the start's

    log = RunLog(tmp_path)
    for step in log.steps(range(11, 14)):
        log.write(step, {})
        if step == 12:  # as asked by a signal
            break
    log.close()
    stopped = "stopped after step 12 of 13; --resume latest goes on, with the same command\n"
    assert capsys.readouterr().out.endswith(stopped)

    log = RunLog(tmp_path)
    assert list(log.steps(range(31, 31))) == []  # the run was finished before
    log.close()
    shown = capsys.readouterr()
    assert shown.out == "finished: all 30 steps are done; --resume latest goes on, with a larger --num_steps\n"
    assert shown.err == ""

    log = RunLog(tmp_path)
    list(log.steps(range(31, 21)))  # of a run that has more steps than are asked for now
    log.close()
    assert capsys.readouterr().out.startswith("finished: all 30 steps are done;")


def test_a_rollout_of_equal_rewards_is_told_once(tmp_path, capsys):
    log = RunLog(tmp_path)
    for step, ratio in enumerate([0.5, 1.0, 1.0]):
        log.write(step, {"critic/rewards/zero_std_ratio": ratio})
    told = "step 1: every image scores as the others of its prompt do: nothing is learned from them\n"
    assert capsys.readouterr().out == told


def test_another_score_is_not_compared_with_the_best_one_so_far(capfd):
    saved = {"reward": ("ocr",), "reward_weights": (1.0,), "eval_prompts": "a.txt", "resume": "latest"}
    assert say_resumed("c.pt", saved, saved)
    assert capfd.readouterr().err == "loaded c.pt\n"
    assert not say_resumed("c.pt", saved, saved | {"resume": "runs/other"})
    assert not say_resumed("c.pt", saved, saved | {"reward_weights": (2.0,)})
    told = "reward_weights: [1.0] -> [2.0]; reward_weights changes the score: best_adapter is chosen anew\n"
    assert capfd.readouterr().err.endswith(f"loaded c.pt; {told}")


def test_another_judge_is_another_score_and_another_address_or_watched_reward_is_not(capfd):
    saved = {"reward": ("vlm_judge",), "eval_reward": ("pickscore",), "resume": "latest"}
    judge = {"VLM_JUDGE_URL": "http://one", "VLM_JUDGE_MODEL": "one"}
    saved |= {"reward_settings": {"vlm_judge": judge, "pickscore": {"PICKSCORE_MODEL": "one"}}}

    def resume(**changes):
        settings = saved["reward_settings"] | changes
        is_comparable = say_resumed("c.pt", saved, saved | {"reward_settings": settings})
        return is_comparable, capfd.readouterr().err

    assert resume() == (True, "loaded c.pt\n")
    for moved in ({"vlm_judge": judge | {"VLM_JUDGE_URL": "http://two"}}, {"pickscore": {}}):
        is_comparable, told = resume(**moved)
        assert is_comparable and told.startswith("loaded c.pt; reward_settings: {") and "changes" not in told
    changes = {"VLM_JUDGE_MODEL": judge | {"VLM_JUDGE_MODEL": "two"}}
    changes["VLM_JUDGE_RANGE"] = judge | {"VLM_JUDGE_RANGE": "0,5"}
    for variable, settings in changes.items():
        is_comparable, told = resume(vlm_judge=settings)
        assert not is_comparable and told.endswith(f"; {variable} changes the score: best_adapter is chosen anew\n")


# ---- evaluation only -------------------------------------------------------------------------------------------------
def parse(*options):
    return parse_args(flow_grpo.Args, "", list(options))


def test_evaluation_only_takes_the_options_of_the_checkpoint(tmp_path, monkeypatch):
    """All but those of the start itself; what is given on the command line comes first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py"])
    saved = {"name": "long", "lora_rank": 4, "image_size": (64, 96), "reward": ("a.py:b", "ocr"), "num_steps": 7}
    saved |= {"an option of before": 1, "track": True}
    state = {"step": 3, "best": 0.5, "args": saved, "sampler": {}, "rng": [{}], "policies": {"default": {}}}
    save_checkpoint(tmp_path / "runs" / "long", 3, state | {"optimizer": {}}, 1)
    args = parse("--resume", "runs/long", "--eval_only", "True", "--name", "look", "--reward", "ocr")
    expected = flow_grpo.Args(name="look", resume="runs/long", eval_only=True, lora_rank=4, image_size=(64, 96))
    assert args == expected
    assert parse("--resume", "runs/long") == flow_grpo.Args(resume="runs/long")  # training takes its own
    with pytest.raises(ValueError, match="^--resume nowhere: no checkpoint there$"):
        parse("--resume", "nowhere", "--eval_only", "True")
