"""Options that are not typed: from a file, and from the checkpoint that a run resumes; names of other trainers."""

import json
import sys
from pathlib import Path

import flow_grpo
from common.checkpoints import FORMAT
from common.command_line import parse_args

import pytest
import yaml

pytestmark = pytest.mark.fast


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
def test_a_runs_options_are_read_back_and_what_is_given_wins(file, write, here, monkeypatch, capfd):
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
    monkeypatch.setattr(sys, "argv", ["/somewhere/flow_grpo.py"])
    again = parse("--args", file)
    assert "wrote it" not in capfd.readouterr().err
    assert vars(again) == vars(first) | {"args": file}
    given = parse("--args", file, "--name", "other", "--kl_coef", 0, "--reward", "ocr")
    assert vars(given) == vars(first) | {"args": file, "name": "other", "kl_coef": 0.0, "reward": ("ocr",)}
    monkeypatch.setattr(sys, "argv", ["grpo_guard.py"])
    parse("--args", file)
    assert f"--args {file}: a run of flow_grpo.py wrote it; " in capfd.readouterr().err


def test_the_file_may_stand_behind_an_equals_sign(here):
    (here / "mine.json").write_text('{"learning_rate": 0.5}')
    assert parse("--args=mine.json").learning_rate == 0.5


def test_a_yaml_file(here):
    (here / "mine.yaml").write_text("name: mine\nlearning_rate: 0.001\nimage_size: [64, 96]\neval_only: true\n")
    args = parse("--args", "mine.yaml", "--learning_rate", 0.5)
    assert (args.name, args.learning_rate, args.image_size, args.eval_only) == ("mine", 0.5, (64, 96), True)


@pytest.mark.parametrize("text", ["010", "1:30", "no", "1.10", "1_000", "2001-01-01", "true", "-x"])
def test_texts_of_yaml_are_as_written(here, text):
    (here / "mine.yaml").write_text(f"name: {text}\nlora_path:\neval_guidance_scale: null\nlearning_rate: 1e-4\n")
    args = parse("--args", "mine.yaml")
    assert (args.name, args.lora_path, args.eval_guidance_scale, args.learning_rate) == (text, None, None, 1e-4)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("learning_rate: 1\nlearning_rate: 2", "learning_rate: is given twice"),
        ('{"seed": 1, "seed": 2}', "seed: is given twice"),
        ("args: other.yaml", "no such option: args; take it out of the file"),
        ("1: 2\non: 3", "no such option: 1, on; take it out of the file"),
        ('negative_prompt: ["", --reward, jpeg_compressibility]', "negative_prompt: .* is not a value"),
        ("reward: [ocr, --seed, 3]", "reward: '--seed' would be another option"),
        ("model:", "model: None is not a value"),
        ("reward: null", "reward: None is not a value"),
        ("model: {path: x}", "model: {'path': 'x'} is not a value"),
        ("model: !!binary aGVsbG8=", "model: b'hello' is not a value"),
        ("model: x\nnum_steps: 3.0", "num_steps: '3.0' is not what the option takes"),
        ("eval_only: 0", "eval_only: '0' is not what the option takes"),
        ("image_size: 32 96", "image_size: '32 96' is not what the option takes"),
    ],
)
def test_what_is_no_value_is_refused_by_name(here, capfd, content, fault):
    """Each was taken as something else, or refused without the file's name."""
    (here / "mine.yaml").write_text(content)
    with pytest.raises(ValueError, match=f"^--args mine.yaml: {fault}$"):
        parse("--args", "mine.yaml")
    assert capfd.readouterr().err == ""


def test_two_files_are_refused(here):
    with pytest.raises(ValueError, match="^--args other.json mine.json: give one file$"):
        parse("--args", "mine.json", "--args=other.json")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"lora_rnk": 4}', "no such option: lora_rnk; take it out of the file$"),
        ("[]", "expected names and values$"),
        ("{", "Expecting property name"),
        (None, "No such file"),
        ('{"args": {"seed": 3}}', r"the file was written by another version of CleanFlow: its format is None, and \S+"),
        ('{"args": {"seed": 3}, "format": 99}', "its format is 99, and this version reads format "),
    ],
)
def test_a_bad_file_is_named(here, content, fault):
    if content is not None:
        (here / "mine.json").write_text(content)
    with pytest.raises(ValueError, match=f"^--args mine.json: .*{fault}") as error:
        parse("--args", "mine.json")
    assert "\n" not in str(error.value)


def test_a_value_of_a_file_is_held_to_its_bound(here):
    (here / "mine.json").write_text('{"learning_rate": -1}')
    with pytest.raises(ValueError, match="^--learning_rate -1.0: must be at least 0"):
        parse("--args", "mine.json")


# ---- other trainers' names -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--track"], "^--track: needs a value, such as True$"),
        (["--track", "--seed", "3"], "^--track: needs a value, such as True$"),
        (["--image_size", "--seed", "3"], "^--image_size: needs a value, such as 32 96$"),
        (["--prompt_cache"], "^--prompt_cache: needs a value$"),
    ],
)
def test_an_option_without_a_value_is_told_one(here, words, fault):
    with pytest.raises(ValueError, match=fault):
        parse(*words)


def test_a_command_line_may_be_empty(here):
    assert parse() == flow_grpo.Args()


def test_a_list_may_be_empty(here):
    assert parse("--stop_if", "--seed", 3).stop_if == ()


def test_names_of_other_trainers_are_told_ours():
    names = {"--lr": "learning_rate", "--max-train-steps": "num_steps", "--resolution": "image_size"}
    for theirs, ours in names.items():
        with pytest.raises(ValueError, match=f"^{theirs}: no such option; here it is --{ours}$"):
            parse(theirs, 1)
    with pytest.raises(ValueError, match="^--lr=1e-4: no such option"):
        parse("--lr=1e-4")


# ---- --resume latest -------------------------------------------------------------------------------------------------
def test_a_resumed_run_has_the_checkpoints_options_unless_they_are_given(here, monkeypatch, capfd):
    given = ["--guidance_scale", 2, "--num_steps", 40, "--max_minutes", 5, "--micro_batch_size", 4]
    saved = vars(parse("--name", "mine", *given, "--stop_if", "val/ocr/mean<0.1"))
    (here / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    ranks = [1]
    states = {Path("runs/mine"): {"args": saved}}
    monkeypatch.setattr("common.command_line.checkpoint_of", lambda run: run)
    monkeypatch.setattr("common.command_line.load_checkpoint", lambda run: states[run] | {"rng": [{}] * ranks[0]})
    assert parse("--name", "mine", "--resume", "latest").num_steps == flow_grpo.Args.num_steps  # nothing is saved yet
    (here / "runs" / "mine" / "checkpoints" / "step_000005.pt").touch()
    capfd.readouterr()
    args = parse("--name", "mine", "--resume", "latest", "--num_steps", 50)
    assert (args.guidance_scale, args.num_steps, args.max_minutes, args.resume) == (2.0, 50, 0.0, "latest")
    assert (args.micro_batch_size, args.stop_if) == (4, ())  # what ended it would end it again
    ranks[0] = 2  # it was fitted to another share
    assert parse("--name", "mine", "--resume", "latest").micro_batch_size == flow_grpo.Args.micro_batch_size
    assert "--resume latest: options that are not given are the checkpoint's\n" in capfd.readouterr().err
    assert parse("--name", "other", "--resume", "latest").guidance_scale == 1.0  # another run's are not taken
