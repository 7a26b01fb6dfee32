"""What a resumed run does with what an earlier one left: checkpoint, options, log, best score and random states."""

import json
import math
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from common.distributed import on_rank_0
from common.errors import UNREADABLE, RunError, error_prefix, truncate
from common.files import (
    atomic_file,
    check_format,
    checkpoint_step,
    load_checkpoint,
    remove_checkpoint,
    saved_checkpoints,
)
from common.process import print_message

OF_A_START = ("name", "args", "resume", "eval_only", "trust_code")
# options that may differ between a checkpoint and the run that resumes it, or evaluates it, without a word
EXPECTED_TO_DIFFER = (
    *OF_A_START,
    *("num_steps", "max_minutes", "stop_if", "keep_checkpoints", "save_every", "save_rollouts", "track"),
)
# the options that an evaluation's score depends on, beside the weights and the settings of its rewards
OF_THE_SCORE = (
    *("reward", "reward_weights", "eval_prompts", "max_prompts", "eval_images_per_prompt", "model", "dtype"),
    *("vae_dtype", "image_size", "num_frames", "max_sequence_length", "eval_num_inference_steps", "guidance_scale"),
    *("guidance_scale_2", "negative_prompt", "eval_guidance_scale", "base_weights", "best_by", "reward_frames"),
    "family",
)


# ---- the checkpoint --------------------------------------------------------------------------------------------------
def find_checkpoint(path: Path | str) -> Path | None:
    """The newest good checkpoint of a run folder, or None where there is no checkpoint; or `path` itself, a good file.

    A bad one is named in a line of stderr, and the one before it is taken.

    Raises:
        ValueError: `path` is a bad file, or a run folder whose checkpoints are all bad.
    """
    path = Path(path)
    with error_prefix(path):
        is_file = path.suffix == ".pt" or path.is_file()
        newest_first = [path] if is_file else saved_checkpoints(path)[::-1]
    problems = []
    for candidate in newest_first:
        try:
            load_checkpoint(candidate)
        except ValueError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            print_message(f"{problem}: using {candidate.name}")
        return candidate
    if problems:
        raise ValueError(truncate("no checkpoint to resume from: " + "; ".join(problems)))
    return None


def checkpoint_of(path: Path | str) -> Path:
    """The checkpoint that find_checkpoint finds. It must be of this script.

    Raises:
        ValueError: as find_checkpoint; or there is none, or another script, none, or a version with another format
            wrote it.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ValueError(truncate(f"--resume {path}: no checkpoint there"))
    script = Path(sys.argv[0]).stem
    state = load_checkpoint(checkpoint)
    if state["script"] != script:
        raise ValueError(truncate(f"--resume: {checkpoint} was written by {state['script']}.py, not by {script}.py"))
    check_format(state, f"--resume: {checkpoint}")
    return checkpoint


def newest_record(run: Path) -> Path:
    """The file with a run's options: args.json or, of a resumed run, the args_step_000030.json of the highest step."""
    return records_of(run)[-1]


def records_of(run: Path) -> list[Path]:
    """The files with a run's options, in the order of its starts: args.json, and one of each resume."""
    return [run / "args.json", *sorted(run.glob("args_step_*.json"))]


def records_at(run: Path, step: int) -> list[Path]:
    """The files with the options that the evaluation of a step can have had: the newest from before the step and, where
    the run was resumed at this step, which can do the evaluation again, that one too."""
    by_step = {checkpoint_step(file.stem.removeprefix("args_")): file for file in run.glob("args_step_*.json")}
    before = [number for number in by_step if 0 <= number < step]
    first = by_step[max(before)] if before else run / "args.json"
    return [first, by_step[step]] if step in by_step else [first]


# ---- what the earlier run left ---------------------------------------------------------------------------------------
def rewind(run: Path | str, step: int, logged_to: int, written: Collection[str] = ()) -> None:
    """Cut a run's folder back: checkpoints and records of steps after `step` go, and metrics, samples, rollouts and
    grids of steps after `logged_to`, but for the folders (samples/0031) that this start has `written`.

    A last line of metrics.jsonl that a kill cut short goes as well. The resumed run's file then equals the file of a
    run that was never interrupted.

    Raises:
        RunError: a line of metrics.jsonl is not a step's metrics.
    """
    metrics = Path(run) / "metrics.jsonl"
    if metrics.exists():
        try:
            lines = metrics.read_bytes().splitlines(keepends=True)
            complete = [line for line in lines if line.endswith(b"\n")]
            up_to_step = [line for line in complete if json.loads(line)["training/global_step"] <= logged_to]
        except (*UNREADABLE, KeyError, TypeError) as error:
            fault = f"{metrics}: a line is not a step's metrics ({error!r}); repair or remove it"
            raise RunError(truncate(fault)) from error
        with atomic_file(metrics) as temporary:
            temporary.write_bytes(b"".join(up_to_step))
    for path in saved_checkpoints(run):
        if checkpoint_step(path) > step:
            remove_checkpoint(path)
            print_message(f"continuing from step {step}: the later {path} is removed")
    later = _find_later(Path(run), step, logged_to, written)
    for path in later:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    if later:
        names = ", ".join(str(path.relative_to(run)) for path in later)
        print_message(truncate(f"continuing from step {step}: also removed, as they are of later steps: {names}"))


def _find_later(run: Path, step: int, logged_to: int, written: Collection[str]) -> list[Path]:
    """A run's records of starts after `step`, and its samples, rollouts and grids of steps after `logged_to`."""
    last_of = {
        r"(?:args|source|uncommitted|code)_step_(\d+)(?:\.\w+)?": step,
        r"grid_(\d+)\.png": logged_to,
        r"(?:samples|rollouts)/(\d+)": logged_to,
    }
    found = []
    for path in sorted([*run.glob("*"), *run.glob("samples/*"), *run.glob("rollouts/*")]):
        name = path.relative_to(run).as_posix()
        numbers = [(int(match[1]), last) for form, last in last_of.items() if (match := re.fullmatch(form, name))]
        if any(number > last for number, last in numbers) and name not in written:
            found.append(path)
    return found


def step_of_best(run: Path | str) -> float:
    """The step whose evaluation wrote, or began to write, a run's best_adapter/; 0 without one, inf if not known."""
    file = Path(run) / "best_adapter" / "best.json"
    try:
        if not file.exists():  # an earlier commit wrote none
            return math.inf if any(file.parent.glob("*.safetensors")) else 0
        return int(json.loads(file.read_text())["step"])
    except (*UNREADABLE, KeyError, TypeError):
        return math.inf


def resume_differences(saved_options: dict, options: dict, ignore: Collection[str] = ()) -> list[str]:
    """Two dicts of options -> ["learning_rate: 0.001 -> 0.0003"] for those that differ; (1, 2) equals [1, 2], and a
    name that is not there None."""
    saved = json.loads(json.dumps(saved_options, default=str))
    now = json.loads(json.dumps(options, default=str))
    names = sorted({*saved, *now} - {*ignore})
    return [f"{name}: {saved.get(name)} -> {now.get(name)}" for name in names if saved.get(name) != now.get(name)]


def of_the_score(options: dict) -> dict:
    """{name: value} of the options and settings that the weighted total of an evaluation depends on."""
    found = {name: options.get(name) or None for name in OF_THE_SCORE}  # an older checkpoint lacks some
    settings = options.get("reward_settings", {})
    watching = options.get("eval_reward", ())
    if found["best_by"]:  # by a reward's name, of which another file may have one as well
        best_by = found["best_by"].split("/")
        found["eval_reward"] = [name for name in watching if name.rpartition(":")[2] in best_by]
    for reward in (*options.get("reward", ()), *(watching if found["best_by"] else ())):
        for variable, value in (settings.get(reward) or settings.get(reward.rpartition(":")[2], {})).items():
            if not variable.endswith("_URL"):  # a server that has moved is not another judge
                found[variable] = value
    return found


def report_resumed(
    path: Path | str, saved_options: dict, options: dict, changed: Mapping[str, bool] | None = None
) -> bool:
    """Print, on rank 0, which checkpoint the run resumes from, and which options differ from the recorded ones; then a
    line for each name that is `changed`: it has other contents, and whether the score depends on them. The script and
    common/, named as in find_sources, have one line.

    A new run that starts from another run's checkpoint names all options that it changes.

    Returns whether later evaluations can be compared with the best one before: same run, same scoring.
    """
    is_same_run = options["resume"] == "latest"
    ignored = set(EXPECTED_TO_DIFFER if is_same_run or options.get("eval_only") else OF_A_START)
    is_constant = options.get("lr_schedule", "constant").startswith("constant")
    if not is_constant and not options.get("eval_only"):  # the schedule ends at num_steps
        ignored.discard("num_steps")
    differences = resume_differences(saved_options, options, ignored)
    before = of_the_score(saved_options)
    now = of_the_score(options)
    rescored = [name for name in before | now if before.get(name) != now.get(name)]
    if is_same_run and rescored:
        differences.append(f"{rescored[0]} changes the score: best_adapter is chosen again")
    if on_rank_0():
        print_message("; ".join([f"loaded {path}", *differences]))
        sources = [name.removeprefix("source ") for name in changed or () if name.startswith("source ")]
        if sources:
            before_it = "what they were, source.py and the git_hash of args.json say"
            told = f"other code than when {Path(path).name} was saved; {before_it}"
            print_message(f"{' and '.join(sources)}: {told}")
        for name, scores in (changed or {}).items():
            if name.startswith("source "):
                continue
            told = ": best_adapter is chosen again" if is_same_run and scores else ""
            print_message(truncate(f"{name} has other contents than when {Path(path).name} was saved{told}"))
    return is_same_run and not rescored and not any((changed or {}).values())
