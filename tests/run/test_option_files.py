"""Options that are not typed: from a file, and from the checkpoint that a run resumes."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import flow_grpo
from common.files.checkpoints import FORMAT
from common.options import SharedArgs
from common.run.command_line import parse_args
from common.run.option_files import without_rewards

import pytest
import yaml

pytestmark = pytest.mark.fast

BEST = "val/pickscore/mean"


def parse(*argv):
    return parse_args(flow_grpo.Args, "", [*map(str, argv)])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- --args ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("file", "write"), [("args.json", json.dumps), ("mine.yaml", json.dumps), ("mine.yaml", yaml.safe_dump)]
)
def test_a_runs_options_are_read_back_and_what_is_given_wins(file, write, here):
    """All of them, as a run records them; but not that it was resumed, and not the rewards' settings."""
    first = parse(
        *("--name=-mine", "--image_size", 64, 96, "--reward", "ocr", "jpeg_compressibility", "--kl_coef", 0.5),
        *("--negative_prompt=--blurry, 010", "--reward_weights", -1, -0.5, "--lora_path=--reward"),
    )
    record = {
        "command": "'/my runs/flow_grpo.py' --name mine",
        "format": FORMAT,
        "args": vars(first) | {"resume": "latest", "reward_settings": {}},
    }
    (here / file).write_text(write(record))
    again = parse("--args", file)
    assert vars(again) == vars(first) | {"args": file}
    given = parse("--args", file, "--name", "other", "--kl_coef", 0, "--reward", "ocr")
    assert vars(given) == vars(first) | {"args": file, "name": "other", "kl_coef": 0.0, "reward": ("ocr",)}


def test_a_recorded_guidance_that_is_no_option_of_the_script_is_left_out(here, monkeypatch):
    """Of a fork that calls its own otherwise: from its args.json, and from its checkpoint."""
    args = vars(parse_args(SharedArgs, "", ["--seed", "7", "--name", "mine"])) | {"guidance_scale": 2.0}
    (here / "args.json").write_text(json.dumps({"format": FORMAT, "args": args}))
    assert parse_args(SharedArgs, "", ["--args", "args.json"]).seed == 7
    monkeypatch.setattr("common.run.resuming.checkpoint_of", lambda run: run)
    state = {"args": args, "rng": [{}], "step": 3}
    monkeypatch.setattr("common.run.option_files.load_checkpoint", lambda run: state)
    assert parse_args(SharedArgs, "", ["--resume", "runs/mine", "--name", "other"]).seed == 7


def test_the_file_may_stand_behind_an_equals_sign(here):
    (here / "mine.json").write_text('{"learning_rate": 0.5}')
    assert parse("--args=mine.json").learning_rate == 0.5


def test_a_yaml_file(here):
    (here / "mine.yaml").write_text("name: mine\nlearning_rate: 0.001\nimage_size: [64, 96]\neval_only: true\n")
    args = parse("--args", "mine.yaml", "--learning_rate", 0.5)
    assert (args.name, args.learning_rate, args.image_size, args.eval_only) == ("mine", 0.5, (64, 96), True)


@pytest.mark.parametrize("text", ["010", "1:30", "no", "1.10", "1_000", "2001-01-01", "true", "-x", "'null'"])
def test_texts_of_yaml_are_as_written(here, text):
    (here / "mine.yaml").write_text(f"name: {text}\nlora_path:\nresume: null\nlearning_rate: 1e-4\nlora_rank: 010\n")
    args = parse("--args", "mine.yaml")
    expected = (text.strip("'"), None, None, 1e-4, 10)
    assert (args.name, args.lora_path, args.resume, args.learning_rate, args.lora_rank) == expected


def test_numbers_of_json_are_as_written(here):
    (here / "mine.json").write_text('{"name": 1.10, "lora_path": null, "eval_only": true, "image_size": [64, 96]}')
    args = parse("--args", "mine.json")
    assert (args.name, args.lora_path, args.eval_only, args.image_size) == ("1.10", None, True, (64, 96))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("learning_rate: 1\nlearning_rate: 2", "learning_rate: .*"),
        ("model:", "model: null .*"),
        ("reward: null", "reward: null .*"),
        ("reward: [ocr, ~]", "reward: null .*"),
        ("reward: [ocr, --seed, 3]", "reward: --seed .*"),
        ("model: !!binary aGVsbG8=", ".* 1: .* tag:yaml.org,2002:binary; .*"),
        ("model: !!set {a, b}", ".* 1: .* tag:yaml.org,2002:set; .*"),
        ("args: other.yaml", ".*: args; .*"),
        ("1: 2", ".*: 1; .*"),
        ('negative_prompt: ["", --reward, jpeg_compressibility]', "negative_prompt: .*"),
        ("model: {path: x}", 'model: {"path": "x"} .*'),
        ("reward: [ocr, [x]]", r"reward: .*\[\"x\"\].*"),
    ],
)
def test_what_is_no_value_is_refused_by_name(here, capfd, content, fault):
    (here / "mine.yaml").write_text(content)
    with pytest.raises(ValueError, match=f"^--args mine.yaml: {fault}$"):
        parse("--args", "mine.yaml")
    assert capfd.readouterr().err == ""


def test_a_record_leaves_rank_and_alpha_to_the_file_of_its_lora(here):
    """Whose alpha may be a fraction, which the option is not."""
    options = {"lora_path": "mine.safetensors", "lora_rank": 4, "lora_alpha": 0.5, "seed": 3}
    (here / "args.json").write_text(json.dumps({"format": FORMAT, "args": options}))
    args = parse("--args", "args.json")
    assert (args.lora_path, args.seed, args.lora_alpha) == ("mine.safetensors", 3, flow_grpo.Args().lora_alpha)
    (here / "args.json").write_text(json.dumps({"format": FORMAT, "args": options | {"lora_alpha": 8}}))
    args = parse("--args", "args.json", "--lora_path", "None")  # a new one of that size
    assert (args.lora_path, args.lora_rank, args.lora_alpha) == (None, 4, 8)


def test_a_value_that_the_option_does_not_take_is_named_below_its_file(here, capfd):
    (here / "mine.yaml").write_text("num_steps: 3.5")
    with pytest.raises(SystemExit):
        parse("--args", "mine.yaml")
    told = capfd.readouterr().err
    assert told.startswith("--args mine.yaml: 1 options") and "Error parsing --num_steps" in told


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{": lora_rnk; ": 4}', ": lora_rnk; "),
        ("[]", ""),
        ("{", "Expecting property name"),
        ('{"seed": 1}'.encode("utf-16"), "`iconv -f UTF-16 -t UTF-8 OLD > NEW`$"),
        ('{"seed": 1, "seed": 2}', "seed: "),
        ('{"reward": null}', "reward: null "),
        ('{"model": true}', "model: true "),
        (None, "No such file"),
        ('{"args": {"seed": 3}}', " CleanFlow: .* None, "),
        ('{"args": {"seed": 3}, "format": 99}', " 99, "),
    ],
)
def test_a_bad_file_is_named(here, content, fault):
    if content is not None:
        (here / "mine.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"^--args mine.json: .*{fault}") as error:
        parse("--args", "mine.json")
    assert "\n" not in str(error.value)


def test_a_value_of_a_file_is_held_to_its_bound(here):
    (here / "mine.json").write_text('{"learning_rate": -1}')
    with pytest.raises(ValueError, match="^--learning_rate -1.0: .* 0"):
        parse("--args", "mine.json")


def test_two_files_are_refused(here):
    for name in ("one.json", "two.json"):
        (here / name).write_text("{}")
    with pytest.raises(ValueError, match="^--args: "):
        parse("--args", "one.json", "--args=two.json")


# ---- on the command line ---------------------------------------------------------------------------------------------
def test_a_command_line_may_be_empty(here):
    assert parse() == flow_grpo.Args()


def test_a_list_may_be_empty(here):
    assert parse("--stop_if", "--seed", 3).stop_if == ()


# ---- --resume -------------------------------------------------------------------------------------------------------
def test_a_resumed_run_has_the_checkpoints_options_unless_they_are_given(here, monkeypatch, capfd):
    given = ["--guidance_scale", 2, "--num_steps", 40, "--max_minutes", 5, "--micro_batch_size", 4]
    saved = vars(parse("--name", "mine", *given, "--stop_if", "val/ocr/mean<0.1"))
    (here / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    ranks = [1]
    states = {Path("runs/mine"): {"args": saved}}
    monkeypatch.setattr("common.run.resuming.checkpoint_of", lambda run: run)
    monkeypatch.setattr(
        "common.run.option_files.load_checkpoint", lambda run: states[run] | {"rng": [{}] * ranks[0], "step": 3}
    )
    assert parse("--name", "mine", "--resume", "latest").num_steps == flow_grpo.Args.num_steps  # nothing is saved yet
    (here / "runs" / "mine" / "checkpoints" / "step_000005.pt").touch()
    capfd.readouterr()
    args = parse("--name", "mine", "--resume", "latest", "--num_steps", 50)
    assert (args.guidance_scale, args.num_steps, args.max_minutes, args.resume) == (2.0, 50, 0.0, "latest")
    assert (args.micro_batch_size, args.stop_if) == (4, ())  # what ended it would end it again
    ranks[0] = 2  # its share of a mini-batch was half as large
    assert parse("--name", "mine", "--resume", "latest").micro_batch_size == 4
    assert "--resume latest: " in capfd.readouterr().err
    assert parse("--name", "other", "--resume", "latest").guidance_scale == 1.0  # another run's are not taken
    ranks[0] = 1
    states["runs/mine"] = {"args": saved | {"seed": 7}}
    args = parse("--name", "other", "--resume", "runs/mine", "--num_steps", 50)  # unless it is named
    expected = parse("--name", "other", "--seed", 7, *given, "--num_steps", 50, "--max_minutes", 0)
    assert args == replace(expected, resume="runs/mine")
    assert "--resume runs/mine: " in capfd.readouterr().err


def test_on_other_ranks_no_pass_is_larger_than_it_was(here, monkeypatch):
    """A rank's share of a mini-batch, 48 among four ranks, is 24 among eight, 64 among three and 192 on one."""
    saved = vars(parse("--name", "mine", "--num_prompts", 48, "--micro_batch_size", 12, "--rollout_batch_size", 6))
    state = {"args": saved, "rng": [{}] * 4, "step": 3}
    monkeypatch.setattr("common.run.resuming.checkpoint_of", lambda run: run)
    monkeypatch.setattr("common.run.option_files.load_checkpoint", lambda run: state)
    sizes = {}
    for ranks in (4, 8, 3, 1):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        resumed = parse("--name", "other", "--resume", "runs/mine", "--num_steps", 50)
        measured = parse("--name", "other", "--resume", "runs/mine", "--eval_only", "True")
        sizes[ranks] = [flow_grpo.check(resumed).micro_batch_size, resumed.rollout_batch_size]
        assert [flow_grpo.check(measured).micro_batch_size, measured.rollout_batch_size] == [12, 6]
    assert sizes == {4: [12, 6], 8: [6, 0], 3: [4, 0], 1: [12, 0]}
    given = parse("--name", "other", "--resume", "runs/mine", "--num_steps", 50, "--micro_batch_size", 64)
    assert given.micro_batch_size == 64


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("dgpo", ("--group_size", 8), 8),
        ("crd", ("--group_size", 8), 8),
        ("tdm_r1", ("--group_size", 8), 8),
        ("v_grpo", ("--pairs_per_prompt", 4), 4),
        ("online_dpo", (), 2),
    ],
)
def test_on_other_ranks_a_pass_has_whole_groups_still(name, options, size, here, monkeypatch):
    """Two such groups in a pass are one among two ranks in place of one, and one is one."""
    module = importlib.import_module(f"contrib.{name}")
    monkeypatch.setattr("common.run.resuming.checkpoint_of", lambda run: run)
    for groups in (2, 1):
        given = ["--name", "mine", "--num_prompts", 24, "--micro_batch_size", groups * size, *options]
        saved = vars(parse_args(module.Args, "", [*map(str, given)]))
        state = {"args": saved, "rng": [{}], "step": 3}
        monkeypatch.setattr("common.run.option_files.load_checkpoint", lambda run, state=state: state)
        monkeypatch.setenv("WORLD_SIZE", "2")
        again = ["--name", "other", "--resume", "runs/mine", "--num_steps", "50"]
        assert module.check(parse_args(module.Args, "", again)).micro_batch_size == size
        monkeypatch.delenv("WORLD_SIZE")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # what the checkpoint says of its rewards goes where the rewards go
        (["--reward", "ocr_scene"], {"eval_reward": ("aesthetic", "hpsv2")}),
        (["--reward", "aesthetic"], {"eval_reward": ("hpsv2",)}),
        (["--reward", "ocr"], {"eval_reward": ("aesthetic", "hpsv2")}),
        (["--reward", "ocr", "pickscore", "--eval_reward"], {"reward_weights": (2.0, 3.0), "best_by": BEST}),
        (["--reward", "ocr_scene", "--eval_reward", "pickscore"], {"best_by": BEST, "eval_reward": ("pickscore",)}),
        (["--reward", "pickscore", "--reward_weights", 5], {"reward_weights": (5.0,), "best_by": BEST}),
        (["--reward_weights", 5, 6], {"reward_weights": (5.0, 6.0), "best_by": BEST, "reward": ("ocr", "pickscore")}),
    ],
)
@pytest.mark.parametrize("eval_only", ["True", "False"])
def test_other_rewards_take_the_place_of_the_checkpoints_weights(here, monkeypatch, given, expected, eval_only):
    old = ["--reward", "ocr", "pickscore", "--reward_weights", 2, 3, "--best_by", BEST]
    saved = vars(parse("--name", "mine", *old, "--eval_reward", "aesthetic", "hpsv2"))
    monkeypatch.setattr("common.run.resuming.checkpoint_of", Path)
    monkeypatch.setattr("common.run.option_files.load_checkpoint", lambda run: {"args": saved, "rng": [{}], "step": 3})
    args = parse("--name", "other", "--resume", "runs/mine", "--eval_only", eval_only, *given)
    usual = {"reward_weights": (1.0,), "best_by": None, "eval_reward": ("aesthetic", "hpsv2")}
    usual["eval_reward"] = () if given[-1] == "--eval_reward" else usual["eval_reward"]
    assert {name: getattr(args, name) for name in usual | expected} == usual | expected


@pytest.mark.parametrize(("best_by", "stays"), [("val/ocr/pickscore/mean", True), ("val/scenes/ocr/mean", False)])
def test_a_best_by_of_a_file_that_has_a_replaced_rewards_name_stays(best_by, stays):
    recorded = {"best_by": best_by, "reward_weights": (1.0, 1.0)}
    left = without_rewards(recorded, replaced=["ocr", "pickscore"], trained=["pickscore"], watching=())
    assert left == ({"best_by": best_by} if stays else {})
