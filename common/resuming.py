"""What a resumed run does with what an earlier one left: checkpoint, options, log, best score and random states."""

import json
import random
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.checkpoints import (
    atomic_file,
    checkpoint_step,
    load_checkpoint,
    read_checkpoint,
    remove_checkpoint,
    saved_checkpoints,
)
from common.distributed import on_rank_0
from common.errors import UNREADABLE, RunError, brief, refusing
from common.models.family import family_class
from common.process import say

import numpy as np
import torch

# what every script saves, and resumes from
STATE = {"step": int, "best": float, "args": dict, "sampler": dict, "rng": list, "policies": dict, "optimizer": dict}
SCALES = ("guidance_scale", "eval_guidance_scale")
# options that may differ between a checkpoint and the run that resumes from it without a word
EXPECTED_TO_DIFFER = (
    *("name", "output_dir", "args", "resume", "eval_only"),
    *("num_steps", "max_minutes", "stop_if", "keep_checkpoints", "save_every", "save_rollouts", "track"),
)
# the options that an evaluation's score depends on, beside the weights and the settings of its rewards
OF_THE_SCORE = (
    *("reward", "reward_weights", "eval_prompts", "max_prompts", "eval_images_per_prompt", "model", "dtype"),
    *("image_size", "num_frames", "max_sequence_length", "eval_num_inference_steps", "guidance_scale"),
    *("negative_prompt", "eval_image_size", "eval_guidance_scale", "base_weights"),
)


# ---- the checkpoint --------------------------------------------------------------------------------------------------
def find_checkpoint(path: Path | str) -> Path | None:
    """The newest good checkpoint of a run folder, or None where there is no checkpoint; or `path` itself, a good file.

    A bad one is named in a line of stderr, and the one before it is taken.

    Raises:
        ValueError: `path` is a bad file, or a run folder whose checkpoints are all bad.
    """
    path = Path(path)
    with refusing(path):
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
            say(f"{problem}: using {candidate.name}")
        return candidate
    if problems:
        raise ValueError(brief("no checkpoint to resume from: " + "; ".join(problems)))
    return None


def checkpoint_of(path: Path | str) -> Path | None:
    """The checkpoint that find_checkpoint finds. It must be of this script.

    Raises:
        ValueError: as find_checkpoint; or another script, or none, wrote it.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        return None
    script = Path(sys.argv[0]).stem
    written_by, state = read_checkpoint(checkpoint)
    if written_by != script:
        raise ValueError(brief(f"--resume: {checkpoint} was written by {written_by}.py, not by {script}.py"))
    wrong = [name for name, kind in STATE.items() if not isinstance(state.get(name), kind)]
    if wrong:
        raise ValueError(brief(f"--resume: {checkpoint} is no run's: `{wrong[0]}` is missing or of another type"))
    if state["step"] < 0 or "default" not in state["policies"] or not state["rng"]:
        raise ValueError(brief(f"--resume: {checkpoint} is no run's: a step, a policy or random states are missing"))
    return checkpoint


def saved_options(resume: str) -> dict:
    """{name: value} of the options of the run that wrote the checkpoint of --resume, a file or a run folder.

    As they would be given today (`options_today`).

    Raises:
        ValueError: there is no good checkpoint, or it is of another script.
    """
    checkpoint = checkpoint_of(resume)
    if checkpoint is None:
        raise ValueError(brief(f"--resume {resume}: no checkpoint there"))
    return options_today(load_checkpoint(checkpoint))


def newest_record(run: Path) -> Path:
    """The file with a run's options: args.json or, of a resumed run, the args_step_000030.json of the highest step."""
    return [run / "args.json", *sorted(run.glob("args_step_*.json"))][-1]


# ---- guidance scales of 0.1.0, where Z-Image's g acted like g + 1 of today -------------------------------------------
def options_today(record: dict[str, Any]) -> dict[str, Any]:
    """{name: value} of a record's options, as they would be given today: guidance scales that mean what they meant to
    the run, traced steps as texts, and the engine's sleep under its name of today.

    Raises:
        ValueError: the record is of 0.1.0, and its model is not there any more.
    """
    options = dict(record["args"])
    if "format" in record:
        return options
    if options.get("profile_steps"):
        options["profile_steps"] = [str(step) for step in options["profile_steps"]]
    if options.pop("engine_sleep", False):
        options["engine_with"] = ["sleep"]
    if "model" not in options:
        return options
    for name in SCALES:
        scale = options.get(name)
        if scale and scale > 1:
            options[name] = scale + family_class(options["model"]).old_guidance_offset
    return options


def resumed_guidance(checkpoint: Path, options: dict[str, Any]) -> dict[str, Any]:
    """{name: scale} of the given guidance scales that must change for the run to resume as it was.

    A scale that equals the checkpoint's is from the command of that time. Any other scale is new, and is kept.
    """
    record = load_checkpoint(checkpoint)
    today = options_today(record)
    changed = {}
    for name in SCALES:
        before = record["args"].get(name)
        if before != today.get(name) and options.get(name) == before:
            changed[name] = today[name]
            advice = f"this run takes {today[name]:g}, pass that from now on"
            say(f"{checkpoint} is of 0.1.0, where --{name} {before:g} acted like {today[name]:g}: {advice}")
    return changed


# ---- what the earlier run left ---------------------------------------------------------------------------------------
def rewind(run: Path | str, step: int) -> None:
    """Cut a run's folder back to the moment when it had just saved `step`: later checkpoints and metrics go. On rank 0.

    A last line of metrics.jsonl that a kill cut short goes as well. The resumed run's file then equals the file of a
    run that was never interrupted.

    Raises:
        RunError: a line of metrics.jsonl is not a step's metrics.
    """
    if not on_rank_0():
        return
    metrics = Path(run) / "metrics.jsonl"
    if metrics.exists():
        try:
            lines = metrics.read_bytes().splitlines(keepends=True)
            complete = [line for line in lines if line.endswith(b"\n")]
            up_to_step = [line for line in complete if json.loads(line)["training/global_step"] <= step]
        except (*UNREADABLE, KeyError, TypeError) as error:
            fault = f"{metrics}: a line is not a step's metrics ({error!r}); repair or remove it"
            raise RunError(brief(fault)) from error
        with atomic_file(metrics) as temporary:
            temporary.write_bytes(b"".join(up_to_step))
    for path in saved_checkpoints(run):
        if checkpoint_step(path) > step:
            remove_checkpoint(path)
            say(f"continuing from step {step}: the later {path} is removed")


def resume_differences(saved_options: dict, options: dict, ignore: Collection[str] = ()) -> list[str]:
    """Two dicts of options -> ["learning_rate: 0.001 -> 0.0003"] for those that differ; (1, 2) equals [1, 2]."""
    saved = json.loads(json.dumps(saved_options, default=str))
    now = json.loads(json.dumps(options, default=str))
    names = {*saved, *now} - {*ignore}
    differences = []
    for name in sorted(names):
        if name not in now:
            differences.append(f"{name} ({saved[name]}) is no option any more")
        elif name not in saved:
            differences.append(f"{name} is new: {now[name]}")
        elif saved[name] != now[name]:
            differences.append(f"{name}: {saved[name]} -> {now[name]}")
    return differences


def of_the_score(options: dict) -> dict:
    """{name: value} of the options and settings that the weighted total of an evaluation depends on."""
    found = {name: options.get(name) or None for name in OF_THE_SCORE}  # an older checkpoint lacks some
    found["vae_dtype"] = options.get("vae_dtype", "float32")
    settings = options.get("reward_settings", {})
    for reward in options.get("reward", ()):
        for variable, value in (settings.get(reward) or settings.get(reward.rpartition(":")[2], {})).items():
            if not variable.endswith("_URL"):  # a server that has moved is not another judge
                found[variable] = value
    return found


def say_resumed(path: Path | str, saved_options: dict, options: dict) -> bool:
    """Print, on rank 0, which checkpoint the run resumes from, and which options differ from the recorded ones.

    Returns whether later evaluations can be compared with the best one before: same run, same scoring.
    """
    ignored = set(EXPECTED_TO_DIFFER)
    if options.get("lr_schedule", "constant") != "constant" and not options.get("eval_only"):  # it ends at num_steps
        ignored.remove("num_steps")
    differences = resume_differences(saved_options, options, ignored)
    is_same_run = options["resume"] == "latest"
    before = of_the_score(saved_options)
    now = of_the_score(options)
    rescored = [name for name in before | now if before.get(name) != now.get(name)]
    if is_same_run and rescored:
        differences.append(f"{rescored[0]} changes the score: best_adapter is chosen again")
    if on_rank_0():
        say("; ".join([f"loaded {path}", *differences]))
    return is_same_run and not rescored


def restore_rng_states(states: dict) -> None:
    """Undo what was drawn since rng_states(); a GPU's state does nothing on a machine without one."""
    algorithm, keys, *position = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *position))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
