"""Code comes only from what the user names, and paths of the checkout are recorded from its root."""

import contextlib
import importlib
import json
import re
import sys
from dataclasses import asdict, fields
from pathlib import Path

import flow_grpo
from common.errors import RunError
from common.files.checkpoints import FORMAT, save_checkpoint
from common.options import Names, options_that_name
from common.run import recorded_options
from common.run.command_line import parse_args
from common.run.recorded_options import as_recorded, from_record
from tests.conftest import ROOT
from tools import sample

import pytest

SCRIPTS = ["flow_grpo", "dpo_offline", "contrib.diffusion_opd", "contrib.draft"]


def args_of(script):
    return importlib.import_module(script).Args


# ---- which options are code ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_option_whose_file_is_executed_has_the_type_that_says_so(script, tmp_path, monkeypatch):
    """Each option that takes a text is given the function of a file that leaves a trace where it is imported."""
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("common.models.loading.hf_hub_download", lambda *given: 1 / 0)  # a file is no hub id
    executed = set()
    for option in fields(module.Args):
        if "str" not in str(option.type) and "Name" not in str(option.type):
            continue
        file = tmp_path / f"given_as_{option.name}.py"
        file.write_text(f"open({str(tmp_path / option.name)!r}, 'w')\n\ndef made():\n    return ['a sign']\n")
        words = ["--teachers", "a=nowhere"] if script == "contrib.diffusion_opd" and option.name != "teachers" else []
        words += [f"--{option.name}", f"a={file}:made" if option.name == "teachers" else f"{file}:made"]
        with contextlib.suppress(ValueError, RunError, SystemExit, ZeroDivisionError):  # it is no value of most options
            module.prepare(module.check(parse_args(module.Args, "", words)))
        if (tmp_path / option.name).exists():
            executed.add(option.name)
    refused = {"curriculum"} if script == "contrib.diffusion_opd" else set()  # it reads no rewards
    assert executed == options_that_name(module.Args, Names.CODE) - refused
    assert "reward" in executed and executed <= options_that_name(module.Args, Names.FILE)


@pytest.mark.fast
def test_security_md_lists_the_options_that_are_code():
    every = [path.stem for path in ROOT.glob("*.py") if "nano" not in path.stem]
    every += [f"contrib.{path.stem}" for path in ROOT.glob("contrib/*.py")]
    of_scripts = [options_that_name(args_of(script), Names.CODE) for script in every]
    text = (ROOT / "SECURITY.md").read_text()
    section = text.split("## Files that are executed")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    listed = {name for row in rows for name in re.findall(r"--(\w+)", row)}
    assert listed == set().union(*of_scripts) | {"prompts"}  # of the tools


# ---- code from a record ----------------------------------------------------------------------------------------------
CODE = {
    "reward": ("evil.py:f.style", "ocr"),
    "eval_reward": ("evil.py/:f",),  # which the path's reader takes for evil.py
    "sde_type": "../evil.py:f",
    "family": "/elsewhere/evil.py:F",
    "train_prompts": ("signs.txt", "ocr=evil.py:f"),
    "eval_prompts": ("evil.py:f",),
}
HARMLESS = {"learning_rate": 0.5, "reward_weights": (1.0, 1.0), "negative_prompt": "evil.py:f"}


def parse(*argv):
    return parse_args(flow_grpo.Args, "", [*map(str, argv)])


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The folder of a checkout, with runs/, in a folder that has strangers' files as well."""
    folder = tmp_path / "checkout"
    (folder / "runs").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(recorded_options, "CHECKOUT", folder)
    monkeypatch.setattr(recorded_options, "RUNS", folder / "runs")
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py"])
    return folder


def save_run(folder, **options):
    """A run's record and its checkpoint."""
    saved = asdict(flow_grpo.Args(name=folder.name)) | options
    state = {"step": 3, "args": saved, "rng": [{}], "format": FORMAT}
    save_checkpoint(folder, 3, state, 1)
    (folder / "args.json").write_text(json.dumps({"args": saved, "format": FORMAT}))
    return folder


def outside(checkout, kind):
    """The words that name a record outside of runs/ which names code."""
    run = save_run(checkout.parent / "stranger", **CODE, **HARMLESS)
    (run / "flat.yaml").write_text(json.dumps(CODE | {"learning_rate": "0.5"}))
    if kind == "link":
        (checkout / "runs" / "link").symlink_to(run)
    if kind == "linked checkpoint":
        own = save_run(checkout / "runs" / "own")
        (own / "checkpoints" / "step_000004.pt").symlink_to(run / "checkpoints" / "step_000003.pt")
    return {
        "run": ["--resume", run],
        "checkpoint": ["--resume", run / "checkpoints" / "step_000003.pt"],
        "link": ["--resume", "runs/link"],
        "linked checkpoint": ["--resume", "runs/own"],
        "beside runs/": ["--resume", "runs/../../stranger"],
        "evaluation": ["--resume", run, "--eval_only", "True"],
        "args.json": ["--args", run / "args.json"],
        "flat file": ["--args", run / "flat.yaml"],
        # the file says where the run lies that `latest` means
        "latest of a file's run": ["--args", named(run), "--resume", "latest"],
    }[kind]


def named(run):
    file = run / "name.json"
    file.write_text(json.dumps({"name": str(run)}))
    return file


KINDS = ["run", "checkpoint", "link", "linked checkpoint", "beside runs/", "evaluation", "args.json", "flat file"]
KINDS += ["latest of a file's run"]


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_outside_runs_names_no_code(kind, checkout):
    words = outside(checkout, kind)
    with pytest.raises(ValueError, match="--trust_code True") as error:
        parse(*words)
    told = str(error.value)
    assert "\n" not in told and all(f"--{name} " in told for name in CODE)
    assert not any(f"--{name} " in told for name in HARMLESS)

    again = [*words, "--reward", "ocr", "ocr_contains", "--sde-type", "cps", "--family=None", "--eval_reward"]
    again += ["--train_prompts", "mine.py:f"]
    with pytest.raises(ValueError, match="eval_prompts") as error:
        parse(*again)
    assert "--reward " not in str(error.value) and "--train_prompts " not in str(error.value)
    args = parse(*again, "--eval_prompts", "mine.txt")
    assert (args.reward, args.sde_type, args.family) == (("ocr", "ocr_contains"), "cps", None)
    assert args.learning_rate == 0.5  # the rest is the record's

    args = parse(*words, "--trust_code", "True")
    assert {name: getattr(args, name) for name in CODE} == CODE


@pytest.mark.fast
def test_runs_of_this_checkout_go_on_without_asking(checkout):
    save_run(checkout / "runs" / "mine", **CODE, **HARMLESS, trust_code=True)
    for words in (
        ["--name", "mine", "--resume", "latest"],
        ["--resume", "runs/mine"],
        ["--args", "runs/mine/args.json"],
    ):
        args = parse(*words)
        assert {name: getattr(args, name) for name in CODE} == CODE
    moved = checkout.parent / "disk"
    (checkout / "runs").rename(moved)
    (checkout / "runs").symlink_to(moved)  # runs/ itself may lie on another disk
    assert parse("--resume", "runs/mine").family == CODE["family"]


@pytest.mark.fast
def test_latest_is_the_users_own_run_wherever_the_command_names_it(checkout):
    run = save_run(checkout.parent / "scratch", **CODE, **HARMLESS)
    assert parse("--name", run, "--resume", "latest").family == CODE["family"]


@pytest.mark.fast
@pytest.mark.parametrize("write", [lambda given: given, lambda given: {"args": given, "format": FORMAT}])
def test_no_file_trusts_itself(write, checkout):
    (checkout / "mine.json").write_text(json.dumps(write(CODE | {"trust_code": True})))
    with pytest.raises(ValueError, match="trust"):
        parse("--args", "mine.json")
    run = save_run(checkout.parent / "stranger", **CODE, trust_code=True)
    for words in ([], ["--eval_only", "True"]):
        with pytest.raises(ValueError, match="--trust_code True"):
            parse("--resume", run, *words)


@pytest.mark.fast
@pytest.mark.parametrize("is_in_checkout", [True, False])
def test_a_scripts_own_file_of_code_needs_no_trust(is_in_checkout, checkout, monkeypatch):
    """Wherever the command is started; a file of the same name elsewhere is another one."""
    monkeypatch.setattr(recorded_options, "CHECKOUT", ROOT)
    monkeypatch.chdir(ROOT if is_in_checkout else checkout)
    draft = args_of("contrib.draft")
    monkeypatch.setattr(sys, "argv", ["draft.py"])
    (checkout / "args.json").write_text(json.dumps({"args": as_recorded(asdict(draft()), draft), "format": FORMAT}))
    (reward,) = parse_args(draft, "", ["--args", f"{checkout}/args.json"]).reward
    assert Path(reward).resolve() == Path(draft().reward[0])
    (checkout / "args.json").write_text(json.dumps({"reward": ["sign_colour.py:sign_colour"]}))
    with pytest.raises(ValueError, match="--reward sign_colour.py"):
        parse_args(draft, "", ["--args", f"{checkout}/args.json"])


@pytest.mark.fast
def test_the_tools_take_a_runs_family_from_runs_alone(checkout):
    run = save_run(checkout.parent / "stranger", family="evil.py:F")
    with pytest.raises(ValueError, match="--family evil.py:F"):
        sample.read_options(run)
    assert sample.read_options(run, trusts_code=True)["family"] == "evil.py:F"
    assert sample.read_options(run, family="mine.py:F")["family"] == "mine.py:F"
    assert sample.read_options(run, family="None")["family"] is None
    own = save_run(checkout / "runs" / "own", family="mine.py:F")
    assert sample.read_options(own)["family"] == "mine.py:F"


# ---- paths -----------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_paths_of_the_checkout_are_recorded_from_its_root_and_found_in_another(tmp_path, monkeypatch):
    given = {
        "model": f"{ROOT}/assets/embedded/",
        "lora_path": f"{ROOT}/contrib/../runs/a/adapter",
        "train_prompts": (f"{ROOT}/assets/train_prompts.txt:text", "assets/eval_prompts.txt", "/data/own.txt"),
        "reward": ("ocr", f"{ROOT}/assets/sign_colour.py:sign_colour"),
        "teachers": (f"a={ROOT}/runs/a/adapter", "b=/data/b"),
        "prompt_cache": f"{ROOT}x/cache",
        "negative_prompt": f"{ROOT}/assets",
        "cache": "cache",
    }
    recorded = as_recorded(given, args_of("contrib.diffusion_opd"))
    assert recorded == given | {
        "model": "assets/embedded",
        "lora_path": "runs/a/adapter",
        "train_prompts": ("assets/train_prompts.txt:text", "assets/eval_prompts.txt", "/data/own.txt"),
        "reward": ("ocr", "assets/sign_colour.py:sign_colour"),
        "teachers": ("a=runs/a/adapter", "b=/data/b"),
    }
    copy = tmp_path / "copy"
    (copy / "assets" / "embedded").mkdir(parents=True)
    (copy / "runs" / "a" / "adapter").mkdir(parents=True)
    for name in ("train_prompts.txt", "sign_colour.py"):
        (copy / "assets" / name).touch()
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "eval_prompts.txt").touch()  # the user's own, from the working directory
    monkeypatch.setattr(recorded_options, "CHECKOUT", copy)
    monkeypatch.chdir(tmp_path)
    found = from_record(json.loads(json.dumps(recorded)), args_of("contrib.diffusion_opd"))
    assert found == json.loads(json.dumps(recorded)) | {
        "model": f"{copy}/assets/embedded",
        "lora_path": f"{copy}/runs/a/adapter",
        "train_prompts": [f"{copy}/assets/train_prompts.txt:text", "assets/eval_prompts.txt", "/data/own.txt"],
        "reward": ["ocr", f"{copy}/assets/sign_colour.py:sign_colour"],
        "teachers": [f"a={copy}/runs/a/adapter", "b=/data/b"],
    }
    monkeypatch.chdir(copy)
    assert from_record(recorded, args_of("contrib.diffusion_opd")) == recorded


@pytest.mark.fast
def test_a_path_that_means_two_files_is_asked_for(checkout, monkeypatch, tmp_path):
    """From a working directory that is no checkout, and has a file of the same name."""
    run = save_run(checkout / "runs" / "mine", train_prompts=("data/train-*",))
    for folder in (checkout, tmp_path):
        (folder / "data").mkdir()
        (folder / "data" / "train-1.parquet").touch()
    monkeypatch.chdir(tmp_path)
    for words in (["--resume", run], ["--args", run / "args.json"]):
        with pytest.raises(ValueError, match="--train_prompts"):
            parse(*words)
        assert parse(*words, "--train_prompts", "own.txt").train_prompts == ("own.txt",)
