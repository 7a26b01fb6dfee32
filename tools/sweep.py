"""Runs of one script, a run for each seed and each value of an option: printed, started, resumed, and told at the end.

    python -m tools.sweep --seeds 1 2 3 -- flow_grpo.py --rollout local --learning_rate 1e-3 3e-3
    python -m tools.sweep --seeds 1 2 3 --devices 0 1 2 3 -- recipes/sd35_medium_1x24gb.sh --name mine
    python -m tools.sweep --seeds 1 2 3 --print_only -- contrib/awm.py

An option that takes one value and is given several is swept. A run is named for the script (or --name), the values that
are swept and its seed. Each run of a script is a process of one rank; with --devices one runs on each of these GPUs at
a time, otherwise they follow each other. Ctrl-C, SIGTERM or a closed terminal stop the runs that are going, which save
first. The same command goes on where it was ended: each run has --resume latest, and a finished one is not started
again. One that another command began under its name is left as it is, and told as such. So is a finished one whose
script, or another file of yours, has been edited since. With wandb the seeds of one setting share a group. A recipe for
several scripts has its script behind it: recipes/sd35_medium.sh flow_grpo.py --name mine.
"""

import argparse
import itertools
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import FrameType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from common.files import saved_checkpoints
from common.process import STOP_SIGNALS
from common.run.option_files import OF_THE_LORA, words_of_file
from common.run.plots import read_metrics
from common.run.record import digest, own_code, script_source
from common.run.recorded_options import CHECKOUT, as_recorded
from common.run.resuming import EXPECTED_TO_DIFFER, newest_record, records_of
from tools.plan import load_script

import tyro

RUNS = Path("runs")
CHOSEN = ("micro_batch_size", "shard_ranks")  # by a run, for its GPUs and ranks; they change rounding alone


class SweptRun(NamedTuple):
    """One run of a sweep."""

    name: str
    group: str  # the name without its seed
    start: list[str]  # torchrun and the script, or bash and the recipe
    options: list[str]  # of the script, or those added to the recipe's

    @property
    def command(self) -> list[str]:
        return self.start + self.options


# ---- which runs ------------------------------------------------------------------------------------------------------
def split_options(words: Sequence[str]) -> dict[str, list[str]]:
    """{option without its dashes: its values} of the words of a command line.

    Raises:
        ValueError: a word stands before the first option.
    """
    options: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.removeprefix("--").partition("=")
            last = options[name.replace("-", "_")] = [value] if has_value else []  # given twice, the later one counts
        elif options:
            last.append(word)
        else:
            raise ValueError(f"{word}: options of the script begin with --")
    return options


def takes_one_value(script: str, option: str) -> bool:
    """Whether an option of the script takes a single value, so that several are a sweep."""
    hints = get_type_hints(load_script(script).Args)
    if option not in hints:
        raise ValueError(f"--{option}: {script} has no such option")
    return not holds_several(hints[option])


def holds_several(hint: Any) -> bool:  # type hints have no type in common
    """Whether a value of this type hint is, or may be, a tuple, list, set, dict or the like."""
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return any(holds_several(part) for part in get_args(hint))
    return isinstance(origin, type) and issubclass(origin, Collection) and not issubclass(origin, str | bytes)


def program(script: str) -> list[str]:
    """The words that start a script. One in a folder would not find common/, where the checkout is not on the path."""
    start = ["torchrun", "--standalone", "--shutdown_timeout", "7200", script]  # two hours for a step, then its save
    if len(Path(script).parts) == 1:
        return start
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    return ["env", f"PYTHONPATH={path}", *start]


def plan_runs(script: str, words: Sequence[str], seeds: Sequence[int]) -> list[SweptRun]:
    """The runs of all combinations of the swept values, each with all seeds.

    script: a training script, or a recipe (.sh), whose options are those of the script that the words begin with, or
    of flow_grpo.py.

    Raises:
        ValueError: there is no such script or option, or an option that the sweep sets is given.
    """
    is_recipe = script.endswith(".sh")
    of_recipe = list(words[:1]) if is_recipe and words and words[0].endswith(".py") else []  # the recipe's script
    options = split_options(words[len(of_recipe) :])
    for name in ("seed", "resume"):
        if name in options:
            raise ValueError(f"--{name}: the sweep sets it")
    for file in (script, *of_recipe):
        if not Path(file).is_file():
            raise ValueError(f"{file}: no such script or recipe")
    known = (of_recipe or ["flow_grpo.py"])[0] if is_recipe else script
    names = options.pop("name", ["-".join(Path(file).stem for file in (script, *of_recipe))])
    if len(names) != 1:
        raise ValueError(f"--name {' '.join(names)}: takes one name")
    swept = [name for name, values in options.items() if len(values) > 1 and takes_one_value(known, name)]
    base_name = names[0].rstrip("/")
    if not Path(base_name).is_absolute() and Path(base_name).name != base_name:
        raise ValueError(f"--name {base_name}: must be the name of a folder, or an absolute path")
    start = ["bash", script, *of_recipe] if is_recipe else program(script)
    runs = []
    for chosen in itertools.product(*(options[name] for name in swept)):
        setting = options | {name: [value] for name, value in zip(swept, chosen, strict=True)}
        values = [f"{name}{value}".replace("/", "_") for name, value in zip(swept, chosen, strict=True)]
        group = "-".join([base_name, *values])
        for seed in seeds:
            name = f"{group}-seed{seed}"
            given = [word for option, values in setting.items() for word in (f"--{option}", *values)]
            own = ["--name", name, "--seed", str(seed), "--resume", "latest"]
            runs.append(SweptRun(name, group, start, given + own))
    return runs


# ---- starting them ---------------------------------------------------------------------------------------------------
def steps_of(name: str) -> tuple[int, int]:
    """The last step that a run has logged, and the steps that it was asked for; (0, 0) before its first."""
    folder = RUNS / name
    if not (folder / "metrics.jsonl").is_file():
        return 0, 0
    try:
        asked = json.loads(newest_record(folder).read_text())["args"]["num_steps"]
        return read_metrics(folder)[-1]["training/global_step"], asked
    except (IndexError, ValueError):  # cut by a kill: a resumed run repairs it
        return 0, 0


def is_finished(run: SweptRun) -> bool:
    """Whether a run has logged its last step, by the num_steps of the command and its --args if they have it, and saved
    its checkpoint. Raises as options_with_file."""
    last, asked = steps_of(run.name)
    if asked and "args" in split_options(of_script(run.options)):
        asked = options_with_file(run)["num_steps"]
    elif "--num_steps" in run.options:
        asked = int(run.options[run.options.index("--num_steps") + 1])
    return last >= asked > 0 and (RUNS / run.name / f"checkpoints/step_{last:06d}.pt").is_file()


def of_script(words: Sequence[str]) -> list[str]:
    """The words of a command from the first option on."""
    return list(itertools.dropwhile(lambda word: not word.startswith("--"), words))


def split_command(command: str) -> tuple[str, list[str]]:
    """The script's file and the words behind it, of a recorded command, which may begin with `-m mine.my_grpo`.

    Raises:
        ValueError: it names no script.
    """
    script, *words = shlex.split(command)
    if script != "-m":
        return script, words
    module, *words = words
    file = Path(*module.split(".")).with_suffix(".py")
    return str(file if file.is_file() else CHECKOUT / file), words


def options_with_file(run: SweptRun) -> dict[str, Any]:
    """{name: value} of all options to which the command of a run that has begun and the file of its --args come now.

    Those of a recipe are in the command that the run has recorded.

    Raises:
        ValueError: the script or the file cannot be read, or an option of the file is not the script's.
    """
    script, recorded = split_command(json.loads((RUNS / run.name / "args.json").read_text())["command"])
    is_recipe = run.start[0] == "bash"
    options = (split_options(of_script(recorded)) if is_recipe else {}) | {"args": []}
    options |= split_options(of_script(run.options))
    files = options.pop("args")
    words = [word for name, values in options.items() for word in (f"--{name}", *values)]
    module = load_script(script)
    for file in files:
        words = words_of_file(file, module.Args, words, options.get("trust_code") == ["True"]) + words
    try:
        given = tyro.cli(module.Args, args=words, use_underscores=True, config=(tyro.conf.FlagConversionOff,))
    except SystemExit:
        raise ValueError(f"--args {' '.join(files)}: an option has a value that it does not take") from None
    # what a script's own `check` changes; a recipe's counts the ranks, which are not known here
    return as_recorded(asdict(given if is_recipe else module.check(given)), module.Args)


def has_this_command(run: SweptRun) -> bool:
    """Whether a run was started with the command's options, but for those that may differ, such as --num_steps; a
    recipe has more. With a file of --args all options count that the run has recorded, as the file may have changed.
    Not if its record cannot be read. Raises as options_with_file."""
    try:
        record = json.loads((RUNS / run.name / "args.json").read_text())
        options, recorded = dict(record["args"]), shlex.split(record["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    started, asked = (split_options(of_script(words)) for words in (recorded, run.options))
    has_file = "args" in started or "args" in asked
    started, asked = ({k: v for k, v in of.items() if k not in EXPECTED_TO_DIFFER} for of in (started, asked))
    if asked != ({name: started.get(name) for name in asked} if run.start[0] == "bash" else started):
        return False
    if not has_file:
        return True
    now = json.loads(json.dumps(options_with_file(run), default=str))
    left_out = {*EXPECTED_TO_DIFFER, *CHOSEN, *(OF_THE_LORA if now["lora_path"] else ())}
    return all(options[name] == now[name] for name in (options.keys() & now.keys()) - left_out)


def is_of_another(run: SweptRun) -> bool:
    """Whether another command has begun a run of this name, which --resume latest would continue. Raises as
    options_with_file."""
    folder = RUNS / run.name
    return bool(saved_checkpoints(folder)) and (folder / "args.json").is_file() and not has_this_command(run)


def told_of_code(run: SweptRun) -> str:
    """What the end of a finished run adds where the script, or a file of the user's, is not what it was when the run or
    a resume of it began: the files. "" where its records do not say."""
    changed: dict[str, None] = {}
    for file in records_of(RUNS / run.name):
        try:
            record = json.loads(file.read_text())
            contents, command = own_code(dict(record["contents"])), record["command"]
            script = run.start[-1] if run.start[-1].endswith(".py") else split_command(command)[0]
            for name, content in contents.items():
                found = Path(script) if name == script_source(contents) else find_code(name)
                if found and found.is_file() and digest([found]) != content:
                    changed[name.removeprefix("source ")] = None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    folder = RUNS / run.name
    told = f", by other code than now: {', '.join(changed)} (what it was: {folder}/source.py, {folder}/code)"
    return told if changed else ""


def find_code(name: str) -> Path | None:
    """The file now that a record names "source mine/losses.py" or "code/mine/red.py"; see user_code."""
    path = name.removeprefix("source ").removeprefix("code/")
    return next((root / path for root in (CHECKOUT, Path.cwd(), Path("/")) if (root / path).is_file()), None)


def run_all(runs: Sequence[SweptRun], devices: Sequence[str]) -> dict[str, str]:
    """Start every run that is not finished, as many at a time as there are devices. Returns {name: how it ended}."""
    free: queue.Queue[str] = queue.Queue()
    for device in devices or [""]:
        free.put(device)
    running: set[subprocess.Popen[bytes]] = set()

    def stop(number: int, frame: FrameType | None) -> None:
        for process in list(running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # it finishes its step and saves
        raise KeyboardInterrupt

    def end_of(run: SweptRun) -> str:
        try:
            return start(run)
        except (ValueError, OSError) as error:  # of a file of --args
            return str(error)

    def start(run: SweptRun) -> str:
        if is_of_another(run):
            return f"of another command: see {RUNS / run.name}/args.json"
        if is_finished(run):
            return "finished before"
        device = free.get()
        try:
            environment = {"WANDB_RUN_GROUP": Path(run.group).name} | dict(os.environ)
            if device:
                environment["CUDA_VISIBLE_DEVICES"] = device
            on = f"CUDA_VISIBLE_DEVICES={device} " if device else ""
            log_file = RUNS / f"{run.name}.log"
            print(f"{on}{shlex.join(run.command)}  # its output: {log_file}", flush=True)
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(log_file, "a") as log:
                # a session of its own: a shell, as that of a user's recipe, need not pass a signal on
                process = subprocess.Popen(run.command, env=environment, stdout=log, stderr=log, start_new_session=True)
            running.add(process)
            code = process.wait()
            running.remove(process)
        finally:
            free.put(device)
        if code:
            return f"failed with {code}: see {RUNS / run.name}.log"
        return "finished" if is_finished(run) else "stopped early"

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores one
            signal.signal(number, stop)
    with ThreadPoolExecutor(len(devices) or 1) as pool:
        try:
            ends = list(pool.map(end_of, runs))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise SystemExit("tools.sweep: interrupted; the same command goes on") from None
    return {
        run.name: end + (told_of_code(run) if end.startswith("finished") else "")
        for run, end in zip(runs, ends, strict=True)
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--devices", nargs="+", default=[], metavar="GPU", help="one run at a time on each of them")
    parser.add_argument("--print_only", action="store_true", help="print the commands and start nothing")
    parser.add_argument("script", help="a training script or a recipe, after --")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its options; one with several values is swept")
    args = parser.parse_args(argv)
    try:
        runs = plan_runs(args.script, args.options, args.seeds)
    except ValueError as error:
        sys.exit(f"tools.sweep: error: {error}")
    if args.print_only:
        print("\n".join(shlex.join(run.command) for run in runs))
        return
    ends = run_all(runs, args.devices)
    width = max(map(len, ends))
    for name, end in ends.items():
        last, asked = steps_of(name)
        print(f"{name.ljust(width)}  step {last} of {asked}  {end}")
    sys.exit(any(not end.startswith("finished") for end in ends.values()))


if __name__ == "__main__":
    main()
