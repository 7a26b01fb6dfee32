"""Checkpoints that are complete or not there: saving, finding the one to go on from, cutting a run back to it."""

import json
import sys
import zipfile
from pathlib import Path

from common.distributed import on_rank_0
from common.errors import NothingBegun, RunError
from common.files import atomic_file
from common.refusals import UNREADABLE, brief, reason, refusing
from common.stops import say

import torch
import torch.distributed as dist

# what only a run leaves in its folder
RESULTS = ("metrics.jsonl", "checkpoints", "adapter", "best_adapter", "samples", "pairs.jsonl", "pairs")
# options that may differ between a checkpoint and the run that goes on from it without a word
EXPECTED_TO_DIFFER = ("name", "resume", "num_steps", "max_minutes", "stop_if", "keep_checkpoints", "track", "eval_only")
# what every script saves and goes on from
STATE = {"step": int, "best": float, "args": dict, "sampler": dict, "rng": list, "policies": dict, "optimizer": dict}
# what the score of an evaluation depends on, beside the weights and the settings of its rewards
OF_THE_SCORE = (
    *("reward", "reward_weights", "eval_prompts", "max_prompts", "eval_images_per_prompt", "model", "dtype"),
    *("image_size", "num_frames", "max_sequence_length", "eval_num_inference_steps", "guidance_scale"),
)
IS_FOLDER = 0x10  # the bit of a zip record's attributes that marks a folder


# ---- writing and reading one -----------------------------------------------------------------------------------------
def checkpoint_step(path):
    """The step of a file named step_000030.pt, or None where it has another name."""
    number = Path(path).stem.removeprefix("step_")
    return int(number) if number.isdecimal() else None


def saved_checkpoints(run):
    """The files run/checkpoints/step_000030.pt, by step, the oldest first; none of them is half-written."""
    folder = Path(run) / "checkpoints"
    paths = [path for path in folder.glob("step_*.pt") if checkpoint_step(path) is not None]
    return sorted(paths, key=checkpoint_step)


def save_checkpoint(run, step, state, keep):
    """Write `state` as run/checkpoints/step_000030.pt, then remove all but the newest `keep` (at least 1). On rank 0.

    state: nested dicts and lists of CPU tensors and plain values. A kill at any moment leaves the previous ones.

    Raises:
        RunError: the disk is full or fails in another way, or what was written cannot be loaded.
    """
    if not on_rank_0():
        return
    path = Path(run) / "checkpoints" / f"step_{step:06d}.pt"
    try:
        with atomic_file(path) as temporary:
            with open(temporary, "wb") as file:
                torch.save({**state, "script": Path(sys.argv[0]).stem}, file)
            load_checkpoint(temporary)  # read back before an older one goes
    except ValueError as error:  # of what was read back
        raise RunError(str(error)) from error
    saved = saved_checkpoints(run)
    up_to_this = saved[: saved.index(path) + 1]  # not those of later steps, which an older --resume left behind
    for old in up_to_this[:-keep]:
        old.unlink()
    for stale in path.parent.glob(".step_*.new"):  # left by a kill
        stale.unlink()


def load_checkpoint(path):
    """What save_checkpoint was given, every byte of it checked against the file's CRC32s. On the CPU.

    Raises:
        ValueError: naming the file and why: it is missing, truncated, corrupt, or something else.
    """
    _, state = read_checkpoint(path)
    return state


def read_checkpoint(path):
    """The name of the script that wrote a checkpoint, and its state; as load_checkpoint."""
    try:
        check_archive(path)
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(saved, dict) or not isinstance(saved.get("script"), str):
            raise ValueError("torch saved it, but no script of ours")
        return saved.pop("script"), saved
    except Exception as error:  # a flipped byte can make the readers of zip and pickle raise nearly anything
        first_line = reason(error).strip().partition("\n")[0]
        raise ValueError(brief(f"{path} is not a whole checkpoint ({first_line})")) from error


def check_archive(path):
    """Raises ValueError, or what zipfile raises, where the zip file at `path` is damaged."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("it is no file")  # a pipe would be waited for
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
        if damaged:
            raise ValueError(f"bad CRC32 of {damaged}")
        # the one flag outside the checksums that harms: torch takes the record for a folder and reads nothing of it
        for record in archive.infolist():
            if record.external_attr & IS_FOLDER:
                raise ValueError(f"{record.filename} is marked as a folder")


# ---- going on from one -----------------------------------------------------------------------------------------------
def find_checkpoint(path):
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


def open_run(run, resume, eval_only=False):
    """The checkpoint that --resume means, or None: `latest` is the newest of this run, if any; else a file or a run.

    Raises:
        ValueError: the folder `run` holds a run that would be overwritten, or there is no good checkpoint.
    """
    if resume == "latest" and eval_only:
        raise ValueError("--eval_only writes under a new --name: let --resume name the run or checkpoint to evaluate")
    if resume == "latest":
        return of_this_script(find_checkpoint(run))
    found = [name for name in RESULTS if (Path(run) / name).exists()]
    if found:
        advice = "choose another --name" + ("" if eval_only else ", or go on with --resume latest")
        raise ValueError(f"{run} already holds a run: {advice} (found {found[0]})")
    if not resume:
        return None
    checkpoint = find_checkpoint(resume)
    if checkpoint is None:
        raise ValueError(f"--resume {resume}: no checkpoint there")
    return of_this_script(checkpoint)


def from_rank_0(checkpoint):
    """The checkpoint that rank 0 has found, on every rank: each looks for itself, and disks need not agree at once."""
    found = [checkpoint]
    dist.broadcast_object_list(found)
    return found[0]


def saved_options(resume):
    """{name: value} of the options of the run that wrote the checkpoint of --resume, a file or a run folder.

    Raises:
        ValueError: there is no good checkpoint, or it is of another script.
    """
    checkpoint = of_this_script(find_checkpoint(resume))
    if checkpoint is None:
        raise ValueError(brief(f"--resume {resume}: no checkpoint there"))
    return load_checkpoint(checkpoint)["args"]


def of_this_script(checkpoint):
    """The checkpoint, or None as it is given; raises ValueError where no script, or another one, has written it."""
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


def check_policy(checkpoint, lora):
    """Hold what is trained, make_lora's value, against the policy of the checkpoint that the run goes on from, if any.

    Raises:
        ValueError: one of them is a LoRA and the other full weights, or the LoRAs are of other ranks or modules.
    """
    if checkpoint is None:
        return
    with refusing(f"--resume {checkpoint}", Exception):  # it was checked, but may be a stranger's
        tensors = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["policies"]["default"]
        saved = {name.rpartition(".lora_")[0]: len(tensor) for name, tensor in tensors.items() if ".lora_A." in name}
    if lora is None:
        if saved:
            raise ValueError(f"--lora_rank 0: {checkpoint} has a LoRA")
        return
    config, given_tensors = lora
    rank_option = "--lora_rank"
    modules_option = "--lora_target_modules"
    if given_tensors is not None:
        rank_option = modules_option = "--lora_path"
    if not saved:
        raise ValueError(f"{rank_option}: {checkpoint} has full weights and no LoRA")
    rank = min(saved.values())
    if rank != config.r:
        raise ValueError(f"{rank_option}: of rank {config.r}, where the LoRA of {checkpoint} has the rank {rank}")
    targets = sorted(config.target_modules)
    unknown = [module for module in saved if not any(f".{module}".endswith(f".{target}") for target in targets)]
    missing = [target for target in targets if not any(f".{module}".endswith(f".{target}") for module in saved)]
    if unknown:
        raise ValueError(f"{modules_option}: the LoRA of {checkpoint} has {unknown[0]} among its modules")
    if missing and not config.exclude_modules:  # which may have taken out all of a target
        raise ValueError(f"{modules_option}: the LoRA of {checkpoint} has no {missing[0]} among its modules")


def check_unchanged(run, checkpoint):
    """Raises NothingBegun where another process has saved in `run` since `checkpoint` was chosen to go on from.

    Under the run's lock: from here on nobody else saves. A newer one that is bad was passed over in the choice.
    """
    is_own = checkpoint is not None and Path(checkpoint).is_relative_to(run)
    chosen = checkpoint_step(checkpoint) if is_own else -1
    for path in saved_checkpoints(run):
        if checkpoint_step(path) > chosen and is_good(path):
            raise NothingBegun(f"{run} was written to while this run was starting: give the same command again")


def is_good(path):
    try:
        load_checkpoint(path)
    except ValueError:
        return False
    return True


def rewind(run, step):
    """Make the run folder that of a run which has just saved `step`: later checkpoints and metrics go. On rank 0.

    A last line of metrics.jsonl that a kill cut short goes, too; the resumed run's file then equals that of a run that
    was never interrupted.

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
            path.unlink()
            say(f"continuing from step {step}: {path}, of a later step, is removed")


def resume_differences(saved_options, options, ignore=()):
    """Two dicts of options -> ["learning_rate: 0.001 -> 0.0003"] for those that differ; (1, 2) equals [1, 2]."""
    saved = json.loads(json.dumps(saved_options, default=str))
    now = json.loads(json.dumps(options, default=str))
    names = {*saved, *now} - {*ignore}
    differences = []
    for name in sorted(names):
        if saved.get(name) != now.get(name):
            before = saved.get(name, "not an option")
            after = now.get(name, "not an option")
            differences.append(f"{name}: {before} -> {after}")
    return differences


def of_the_score(options):
    """{name: value} of what the weighted total of an evaluation depends on, beside the weights."""
    found = {name: options.get(name) for name in OF_THE_SCORE}
    for reward in options.get("reward", ()):
        for variable, value in options.get("reward_settings", {}).get(reward, {}).items():
            if not variable.endswith("_URL"):  # a server that has moved is not another judge
                found[variable] = value
    return found


def say_resumed(path, saved_options, options):
    """Print, on rank 0, which checkpoint the run has taken, and which options differ; both are `recorded` ones.

    Returns whether evaluations from here on can be compared with the best one before: of this run, and scored alike.
    """
    differences = resume_differences(saved_options, options, EXPECTED_TO_DIFFER)
    is_same_run = options["resume"] == "latest"
    before = of_the_score(saved_options)
    now = of_the_score(options)
    rescored = [name for name in before | now if before.get(name) != now.get(name)]
    if is_same_run and rescored:
        differences.append(f"{rescored[0]} changes the score: best_adapter is chosen anew")
    if on_rank_0():
        say("; ".join([f"loaded {path}", *differences]))
    return is_same_run and not rescored
