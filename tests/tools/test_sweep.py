import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import flow_grpo
from common.run import parse_args
from common.run.record import digest
from common.run.recorded_options import as_recorded
from tests.conftest import ROOT
from tools import plan, sweep

import pytest

pytestmark = pytest.mark.fast


@pytest.fixture
def in_checkout(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def test_every_value_runs_with_every_seed_under_a_name_of_its_own(in_checkout):
    words = ["--rollout", "local", "--learning_rate", "1e-3", "3e-3", "--image_size", "32", "96"]
    runs = sweep.plan_runs("flow_grpo.py", words, seeds=[1, 2])
    assert [run.name for run in runs] == [
        "flow_grpo-learning_rate1e-3-seed1",
        "flow_grpo-learning_rate1e-3-seed2",
        "flow_grpo-learning_rate3e-3-seed1",
        "flow_grpo-learning_rate3e-3-seed2",
    ]
    assert {run.group for run in runs} == {"flow_grpo-learning_rate1e-3", "flow_grpo-learning_rate3e-3"}
    assert " ".join(runs[0].command) == (
        "torchrun --standalone --shutdown_timeout 7200 flow_grpo.py --rollout local --learning_rate 1e-3 "
        "--image_size 32 96 --name flow_grpo-learning_rate1e-3-seed1 --seed 1 --resume latest"
    )
    twice = ["--learning_rate", "1e-3", "--rollout=local", "--learning_rate", "3e-3"]  # the later one counts, as always
    (run,) = sweep.plan_runs("flow_grpo.py", twice, seeds=[1])
    assert " ".join(run.options).startswith("--learning_rate 3e-3 --rollout local --name flow_grpo-seed1 ")
    (run,) = sweep.plan_runs("flow_grpo.py", ["--name", "/data/mine/"], seeds=[1])
    assert run.name == "/data/mine-seed1"


def test_a_script_in_a_folder_finds_common(in_checkout, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/own")
    (run,) = sweep.plan_runs("contrib/awm.py", [], seeds=[1])
    assert run.command[:4] == ["env", f"PYTHONPATH={Path.cwd()}:/own", "torchrun", "--standalone"]
    assert run.command[6] == "contrib/awm.py"


def test_a_recipe_of_several_scripts_has_its_script_behind_it(in_checkout):
    words = ["mix_grpo.py", "--iters_per_group", "10", "25"]
    run, _ = sweep.plan_runs("recipes/sd35_medium.sh", words, seeds=[1])
    assert run.command[:5] == ["bash", "recipes/sd35_medium.sh", "mix_grpo.py", "--iters_per_group", "10"]
    assert run.name == "sd35_medium-mix_grpo-iters_per_group10-seed1"


@pytest.mark.parametrize(
    ("script", "words", "told"),
    [
        ("recipes/sd35_medium.sh", "no.py --name a", "no.py: "),
        ("flow_grpo.py", "--seed 3", "^--seed: "),
        ("flow_grpo.py", "--learning_rat 1 2", "--learning_rat: flow_grpo.py "),
        ("flow_grpo.py", "3", "^3: .*--"),
        ("flow_grpo.py", "--name a/b", "^--name a/b: "),
        ("flow_grpo.py", "--name a b", "^--name a b: "),
        ("flow_grpo.py", "--name", "^--name : "),
        ("recipes/no.sh", "", "recipes/no.sh: "),
        ("no.py", "", "no.py: "),
    ],
)
def test_what_cannot_be_swept_is_one_line(script, words, told, in_checkout):
    with pytest.raises(ValueError, match=told):
        sweep.plan_runs(script, words.split(), [1])


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from .losses import x", "ImportError: .*relative import.*; import it absolutely, as the tools load "),
        ("from common.errors import moved", "ImportError: cannot import name 'moved' from 'common.errors'"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'$"),
        ("def check(args:\n    return args", r"SyntaxError: .*\(mine.py, line "),
        ("1 / 0", "ZeroDivisionError: division by zero$"),
    ],
)
@pytest.mark.parametrize("tool", ["plan", "sweep"])
def test_a_script_that_cannot_be_imported_is_one_line(tool, code, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(SystemExit, match=f"^tools.{tool}: error: mine.py: cannot be imported: {told}") as ended:
        if tool == "plan":
            monkeypatch.setattr("sys.argv", ["tools/plan.py"])  # which it changes, as these
            monkeypatch.setenv("WORLD_SIZE", "1")
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
            plan.main(["cpu", "mine.py"])
        else:
            sweep.main(["--print_only", "--", "mine.py", "--kl_coef", "0.1", "0.2"])
    assert "\n" not in ended.value.code


TYPES = """
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Optional, Union

@dataclass
class Args:
    several_1: tuple[int, ...] = ()
    several_2: list[int] = ()
    several_3: Sequence[float] = ()
    several_4: set[str] = ()
    several_5: dict[str, float] = ()
    several_6: Optional[Annotated[list[int], "of layers"]] = None
    several_7: list[int] | None = None
    several_8: list = ()
    one_1: int = 1
    one_2: str = ""
    one_3: Literal["tuple", "list"] = "list"
    one_4: Annotated[float, "no tuple"] | None = None
    one_5: Union[int, str] = 1

check = workload = None
"""


def test_an_option_of_several_values_is_known_by_its_type(tmp_path):
    (tmp_path / "fork.py").write_text(TYPES)
    names = [line.split(":")[0].strip() for line in TYPES.splitlines() if re.match(" +(several|one)_", line)]
    assert len(names) == 13
    found = {name: sweep.takes_one_value(str(tmp_path / "fork.py"), name) for name in names}
    assert found == {name: name.startswith("one") for name in names}


WRITES_A_RUN = """
import json, os, pathlib, shlex, sys
name, last = sys.argv[1:]
print(f"{name} in group", os.environ["WANDB_RUN_GROUP"], "on GPU", os.environ.get("CUDA_VISIBLE_DEVICES"))
folder = pathlib.Path("runs") / name
(folder / "checkpoints").mkdir(parents=True)
(folder / "checkpoints" / f"step_{int(last):06d}.pt").touch()
(folder / "args.json").write_text(json.dumps({"args": {"num_steps": 2}, "command": shlex.join(sys.argv)}))
(folder / "metrics.jsonl").write_text(json.dumps({"training/global_step": int(last)}))
sys.exit(last == "0")
"""


def test_a_finished_run_is_not_started_again_and_every_end_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_RUN_GROUP", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.py").write_text(WRITES_A_RUN)
    command = [sys.executable, "run.py"]
    runs = [sweep.SweptRun(name, "g", command, [name, last]) for name, last in (("a", "2"), ("b", "1"), ("c", "0"))]
    ends = sweep.run_all(runs, devices=["3", "5"])
    assert ends == {"a": "finished", "b": "stopped early", "c": "failed with 1: see runs/c.log"}
    logs = {name: (tmp_path / f"runs/{name}.log").read_text() for name in "abc"}
    assert all(logs[name].startswith(f"{name} in group g on GPU ") for name in "abc")
    assert {logs[name][-2] for name in "ab"} == {"3", "5"}  # c takes the one that is free first
    again = sweep.run_all(runs[:1], devices=[])  # to start it again would fail: its folder is there
    assert again == {"a": "finished before"}
    other = runs[0]._replace(options=["--kl_coef", "0.04", *runs[0].options])
    assert sweep.run_all([other], devices=[]) == {"a": "of another command: see runs/a/args.json"}
    for more in (["--max_minutes", "60"], ["--track", "True"]):  # which may differ without a word
        same = runs[0]._replace(options=[*runs[0].options, *more])
        assert sweep.run_all([same], devices=[]) == {"a": "finished before"}


def test_a_run_that_another_command_began_is_not_continued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text("raise SystemExit(1)")
    run = sweep.SweptRun("a", "g", [sys.executable, "run.py"], ["--kl_coef", "0.04"])
    folder = tmp_path / "runs" / "a"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step_000001.pt").touch()
    (folder / "metrics.jsonl").write_text('{"training/global_step": 1}')
    (folder / "args.json").write_text(json.dumps({"args": {"num_steps": 2}, "command": "run.py --kl_coef 0.1"}))
    assert sweep.run_all([run], devices=[]) == {"a": "of another command: see runs/a/args.json"}
    assert not (tmp_path / "runs" / "a.log").exists()
    same = run._replace(options=["--kl_coef", "0.1"])
    assert sweep.run_all([same], devices=[]) == {"a": "failed with 1: see runs/a.log"}
    (folder / "checkpoints" / "step_000001.pt").unlink()  # nothing that would be continued
    assert sweep.run_all([run], devices=[]) == {"a": "failed with 1: see runs/a.log"}


def begun(script: Path, *words: str, recipe: tuple[str, ...] = ()) -> sweep.SweptRun:
    """A run of a copy of flow_grpo.py that has taken its steps, recorded as the script records it. recipe: the options
    of the recipe that has started it."""
    given = ["--name", "a", *words]
    args = flow_grpo.check(parse_args(flow_grpo.Args, "", [*recipe, *given]))
    folder = Path("runs") / "a"
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / f"step_{args.num_steps:06d}.pt").touch()
    (folder / "metrics.jsonl").write_text(json.dumps({"training/global_step": args.num_steps}))
    record = {"args": as_recorded(asdict(args), flow_grpo.Args) | {"reward_settings": {}}}
    record["command"] = shlex.join([str(script), *recipe, *given])
    (folder / "args.json").write_text(json.dumps(record))
    start = ["bash", "recipe.sh"] if recipe else [sys.executable, "-c", "raise SystemExit(1)"]
    return sweep.SweptRun("a", "g", start, [*given, "--resume", "latest"])


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A copy of flow_grpo.py in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_bytes((ROOT / "flow_grpo.py").read_bytes())
    return tmp_path / "mine.py"


ENDS = [
    ("kl_coef: 0.5\nnum_steps: 2\n", "finished before"),
    ("num_steps: 2\nkl_coef: 0.50\n", "finished before"),  # the same values
    ("kl_coef: 0.4\nnum_steps: 2\n", "of another command: see runs/a/args.json"),
    ("num_steps: 2\n", "of another command: see runs/a/args.json"),  # the script's own kl_coef
    ("kl_coef: 0.5\nnum_steps: 2\nseed: 7\n", "of another command: see runs/a/args.json"),
    ("kl_coef: 0.5\nnum_steps: 3\nkeep_checkpoints: 1\n", "failed with 1: see runs/a.log"),  # goes on, as its steps may
    ("kl_coef: 0.5\nnum_step: 2\n", "--args mine.yaml: no such option: num_step; take it out of the file"),
    ("kl_coef: much\nnum_steps: 2\n", "--args mine.yaml: an option has a value that it does not take"),
]


@pytest.mark.parametrize(("content", "end"), ENDS)
@pytest.mark.parametrize("is_another_file", [False, True])
def test_a_file_of_options_counts_by_what_it_holds_now(content, end, is_another_file, script):
    """Edited in place, or another file."""
    Path("mine.yaml").write_text("kl_coef: 0.5\nnum_steps: 2\n")
    run = begun(script, "--args", "mine.yaml")
    if is_another_file:
        Path("mine.yaml").rename("old.yaml")
        record = json.loads(Path("runs/a/args.json").read_text())
        record["command"] = record["command"].replace("mine.yaml", "old.yaml")
        Path("runs/a/args.json").write_text(json.dumps(record))
    Path("mine.yaml").write_text(content)
    assert sweep.run_all([run], devices=[]) == {"a": end}


def test_options_stand_in_a_file_or_in_the_command(script):
    """A run without the file that it began with has not its options, and a recipe's win over a file's."""
    Path("mine.yaml").write_text("kl_coef: 0.5\nnum_steps: 2\n")
    run = begun(script, "--args", "mine.yaml")
    assert not sweep.has_this_command(run._replace(options=["--name", "a", "--num_steps", "2"]))
    run = begun(script, "--args", "mine.yaml", recipe=("--kl_coef", "0.3", "--num_steps", "4"))
    assert sweep.run_all([run], devices=[]) == {"a": "finished before"}
    Path("mine.yaml").write_text("kl_coef: 0.6\nnum_steps: 9\n")
    assert sweep.run_all([run], devices=[]) == {"a": "finished before"}
    Path("mine.yaml").write_text("learning_rate: 0.6\n")
    assert sweep.run_all([run], devices=[]) == {"a": "of another command: see runs/a/args.json"}


def test_a_run_of_other_code_is_told_with_its_files(script):
    """The script, a file that it imports and a reward; not common/, which each pull changes, nor a file that is gone.
    A resumed run has a record of each start."""
    files = {
        "source mine.py": script,
        "source my_losses.py": Path("my_losses.py"),
        "code/own/red.py": Path("own/red.py"),
    }
    Path("own").mkdir()
    for file in (files["source my_losses.py"], files["code/own/red.py"]):
        file.write_text("x = 1\n")
    run = begun(script)
    record = json.loads(Path("runs/a/args.json").read_text())
    names = ["code/own/red.py", "source my_losses.py", "source mine.py"]  # as a run records them, the script last
    record["contents"] = {name: digest([files[name]]) for name in names}
    record["contents"] |= {"source common/": "1 bytes, blake2b 0", "code/gone.py": "1 bytes, blake2b 0"}
    Path("runs/a/args.json").write_text(json.dumps(record))
    assert sweep.run_all([run], devices=[]) == {"a": "finished before"}
    for name, file in files.items():
        kept = file.read_bytes()
        file.write_bytes(kept + b"# edited\n")
        end = sweep.run_all([run], devices=[])["a"]
        assert end.startswith("finished before, ") and file.name in end
        assert not any(other.name in end for other in files.values() if other != file)
        resumed = record | {"contents": record["contents"] | {name: digest([file])}}
        Path("runs/a/args_step_000001.json").write_text(json.dumps(resumed))
        assert file.name in sweep.run_all([run], devices=[])["a"]  # its first steps are of other code still
        Path("runs/a/args.json").write_text(json.dumps(resumed))
        assert sweep.run_all([run], devices=[]) == {"a": "finished before"}
        file.write_bytes(kept)
        Path("runs/a/args_step_000001.json").unlink()
        Path("runs/a/args.json").write_text(json.dumps(record))


def test_a_run_that_was_started_as_a_module_is_read(script):
    Path("mine.yaml").write_text("kl_coef: 0.5\nnum_steps: 2\n")
    run = begun(script, "--args", "mine.yaml")
    record = json.loads(Path("runs/a/args.json").read_text())
    record["command"] = record["command"].replace(str(script), "-m forks.mine")
    Path("runs/a/args.json").write_text(json.dumps(record))
    Path("forks").mkdir()
    script.rename("forks/mine.py")
    assert sweep.run_all([run], devices=[]) == {"a": "finished before"}
    Path("mine.yaml").write_text("kl_coef: 0.4\nnum_steps: 2\n")
    assert sweep.run_all([run], devices=[]) == {"a": "of another command: see runs/a/args.json"}


def test_more_steps_are_a_run_that_goes_on_and_a_cut_log_is_no_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(WRITES_A_RUN)
    run = sweep.SweptRun("a", "g", [sys.executable, "run.py"], ["a", "2"])
    sweep.run_all([run], devices=[])
    assert sweep.is_finished(run)
    longer = run._replace(options=["a", "--num_steps", "3", "2"])
    assert not sweep.is_finished(longer) and sweep.has_this_command(longer)
    (tmp_path / "runs/a/checkpoints/step_000002.pt").rename(tmp_path / "checkpoint")
    assert not sweep.is_finished(run)
    (tmp_path / "checkpoint").rename(tmp_path / "runs/a/checkpoints/step_000002.pt")
    assert sweep.is_finished(run)
    (tmp_path / "runs/a/metrics.jsonl").write_text('{"training/glo')
    assert not sweep.is_finished(run)


@pytest.mark.parametrize(
    ("end", "status"),
    [("finished", 0), ("finished before", 0), ("stopped early", 1), ("failed with 1: see a.log", 1)],
)
def test_the_exit_status_says_whether_every_run_is_finished(end, status, in_checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "RUNS", tmp_path)
    monkeypatch.setattr(sweep, "run_all", lambda runs, devices: {runs[0].name: end, runs[1].name: "finished"})
    with pytest.raises(SystemExit) as ended:
        sweep.main(["--seeds", "1", "2", "--", "flow_grpo.py"])
    assert ended.value.code == status


def default_signals():
    """For a process that starts: a test run in the background, or under nohup, ignores some of these."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_sweep_stops_its_run_and_starts_no_other(number, tmp_path):
    worker = "trap 'echo saved; exit 0' INT; echo started; for i in $(seq 600); do sleep 0.1; done"
    recipe = tmp_path / "recipe.sh"  # a shell that starts a process, as recipes do
    recipe.write_text('bash -c "$WORKER" $1 && true')
    code = "import sys; from tools import sweep; names = ['a', 'b']; "
    code += f"sweep.run_all([sweep.SweptRun(n, 'g', ['bash', {str(recipe)!r}], [n]) for n in names], [])"
    environment = os.environ | {"WORKER": worker, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=default_signals,
    )
    log = tmp_path / "runs/a.log"
    deadline = time.monotonic() + 60
    while not (log.is_file() and "started" in log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert told == b"tools.sweep: interrupted; the same command goes on\n"
    assert log.read_text() == "started\nsaved\n"
    assert not (tmp_path / "runs/b.log").exists()
