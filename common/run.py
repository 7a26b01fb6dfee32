"""A run and its folder runs/<name>: options, source, metrics, clock, curves and checkpoints; a kill loses none of them.

What stands here is equal in all five scripts, and no ablation changes it. What a checkpoint holds, what an evaluation
does and what is logged stand in the scripts.
"""

import json
import math
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.checkpoints import (
    check_unchanged,
    checkpoint_path,
    load_checkpoint,
    lock_run,
    save_checkpoint,
    saved_checkpoints,
    writing,
)
from common.data import GroupSampler, PromptSet
from common.distributed import end_distributed, gather_objects, limit_collectives, on_rank_0
from common.errors import RunError
from common.plots import WATCHED, Picture, drawn_metrics, plot_curves, save_grid, save_samples
from common.process import catch_stop_signals, stop_requested
from common.profiling import Utilisation, profiled_step
from common.scoring import Reward, Scorer, detail_metrics, eval_metrics, reward_settings, sample_records
from common.watch import rollout_diversity, watch_metrics
from common.weights.lora import save_policy

import torch
import torch.distributed as dist
from tqdm import tqdm

if TYPE_CHECKING:
    from common.engine.client import VLLMEngine
    from common.models.family import Family
    from common.pairs.pair_files import Pairs
    from common.tracking import Tracker
    from common.weights.lora import LoRA


class Inputs(NamedTuple):
    """Everything that a script's `prepare` loads before the model."""

    family: "type[Family]"
    rewards: dict[str, Reward]  # the trained ones, by name
    eval_rewards: dict[str, Reward]  # trained ones, --eval_reward's and, for edits, preservation
    train_set: PromptSet
    eval_set: PromptSet
    lora: "LoRA | None"  # None: full weights
    checkpoint: Path | None  # to resume from
    pairs: "Pairs | None" = None  # of offline DPO; None: to be made

    def drawn_prompts(self, count: int, seed: int, negative_prompt: str = "") -> list[str]:
        """The prompts that a run of `count` draws can ask for: the drawn ones once each, the held-out ones, and what
        guidance moves away from."""
        both = (self.train_set.first_drawn(count, seed), self.eval_set)
        return [text for part in both for text in (*part.prompts, *part.negatives(negative_prompt).prompts)]

    def settle(self, options: dict) -> dict:
        """Try users' rewards. Returns `options` decided now: 0 by GPUs' room, a LoRA's by its file. A collective."""
        asked: tuple = ("eval_image_size", "eval_guidance_scale", "negative_prompt", "base_weights", "eval_by")
        asked += ("lora_target_modules", "lora_exclude_modules")
        records = (*self.train_set.metadata, *self.eval_set.metadata)
        has_fields = any({"negative_prompt", "image"} & record.keys() for record in records)
        if any(map(options.get, asked)) or has_fields or max(self.family.num_sources):
            from common.choices import check_choices

            check_choices(self, options)
        if any(":" in name for name in (*options["reward"], *options["eval_reward"])):
            from common.trial import try_rewards  # only a user's own are tried

            try_rewards(self, options)
        decided = {"lora_rank": self.lora.config.r, "lora_alpha": self.lora.config.lora_alpha} if self.lora else {}
        if options["micro_batch_size"] and not torch.cuda.is_available():
            return decided
        from common.plan.needs import fit_to_gpus

        return decided | fit_to_gpus(self, options)


MAX_SKIPPED = 3  # training steps in a row without one finite gradient before the run ends
# files and folders that only a run leaves in its folder
RESULTS = ("metrics.jsonl", "checkpoints", "adapter", "best_adapter", "samples", "rollouts", "pairs.jsonl", "pairs")
FORMAT = 2  # of args.json and of checkpoints; 0.1.0 said none (common/resuming.py)
LIBRARIES = ("torch", "diffusers", "transformers", "peft")
PATIENT_PHASES = ("reward", "testing", "save_checkpoint")  # in which one rank may take long, and the others wait
SHOWN = {"critic/rewards/mean": "reward", "actor/implicit_accuracy": "accuracy"}  # beside the progress bar


class Run:
    """The folder, metrics, clock, progress bar and stop signals of one training run.

        run = Run(folder, config, script=__file__, num_images=256, num_steps=30)
        for step in range(run.step + 1, 31):
            run.begin_step(step)
            with run.timed("gen"):
                ...
            run.write({"actor/loss": loss})
            if run.should_stop():
                break
        run.close()

    Every rank has a Run, for its own clock. Rank 0 alone shows and writes.

    Attributes:
        step: the training step that began last; 0 before the first one, or the checkpoint's of a resumed run.
        checkpoint: the checkpoint that this run resumes from, the same on all ranks; or None.
        best_score: the highest weighted total of an evaluation so far.
    """

    _best_step: int | None = None  # of the best evaluation; None: unknown

    def __init__(
        self,
        folder: Path,
        config: dict | None = None,
        *,
        rewards: dict | None = None,
        script: str = "",
        checkpoint: Path | None = None,
        num_images: int = 0,
        num_steps: int = 0,
        track: str | bool = False,
        stop_if: tuple = (),
        max_minutes: float = 0.0,
        keep_checkpoints: int = 2,
    ) -> None:
        """Begin a run in runs/<name>, `folder`, or resume it from `checkpoint`. The other arguments are as the options.

        config: the options as they are recorded, in args.json, in checkpoints and in wandb. rewards: {name: function},
        by which evaluations are scored. script: the script's file, copied into the folder, which is made and locked; ""
        leaves the folder as it is. num_images: images of a training step over all ranks, for speeds.

        Raises:
            RunError: another process writes to the folder or has just written to it, or it cannot be written.
        """
        self.folder = Path(folder)
        self.config = (config or {}) | {"reward_settings": reward_settings(rewards or {})}
        # rank 0's: each rank has looked for itself, and disks need not agree at once
        self.checkpoint = gather_objects(checkpoint)[0] if script else checkpoint
        self.step = 0
        self.best_score = -math.inf
        self._rewards = list(rewards or {})  # their names
        self._num_images = num_images
        self._num_steps = num_steps
        self._keep_checkpoints = keep_checkpoints
        self._writes = on_rank_0()
        self._stop_if = stop_if
        self._stop_reason: str | None = None  # the rule that the last evaluation met
        self._timing: dict[str, float] = {}  # seconds of every phase since the last `write`, on this rank
        self._created: float | None = time.perf_counter()  # until the first phase: the time before it is the startup
        self._device_memory_gb = 0.0  # the most that was in use on the GPU, by any process, since the last `write`
        self._step_began: float | None = None  # perf_counter at the start of a training step; None outside of one
        self._begun_at = time.perf_counter()  # of the training step that began last, with its evaluation
        self._longest_step_s = 0.0
        self._owns_folder = bool(script)
        self._resumed_from = -1  # the step of the checkpoint; -1: nothing stays of an earlier run
        self._has_written = False
        self._is_stopping = False
        self._has_warned = False
        self._num_skipped = 0  # training steps in a row without a finite gradient
        self.bar: tqdm | None = None
        self._trace = ExitStack()  # holds the profiler of the current training step
        if script:
            catch_stop_signals(max_minutes)
            _begun.append(self)
            create_run_folder(self.folder, self.config, script, self.checkpoint)
        self._utilisation: Utilisation | None = None
        trains = script and num_steps and not self.config.get("eval_only")
        if trains and self._writes and torch.cuda.is_available():  # a CPU's peak is not known
            self._utilisation = Utilisation(self.config)
        self._tracker: Tracker | None = None
        if track and self._writes:
            from common.tracking import start_tracker  # only runs with --track need it

            self._tracker = start_tracker(track, self.folder, self.config)

    # ---- the clock ----
    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's seconds to timing_s/<name>; waits for the GPU. The time before the first block is startup."""
        began = time.perf_counter()
        if self._created is not None:
            self._timing["startup"] = began - self._created
            self._created = None
        self._write_heartbeat(name)
        limit_collectives(60 if self.bar is None or name in PATIENT_PHASES else 15)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # of all processes on this GPU, the engine among them
            self._device_memory_gb = max(self._device_memory_gb, (total - free) / 1e9)
        self._timing[name] = self._timing.get(name, 0.0) + time.perf_counter() - began

    def _write_heartbeat(self, phase: str) -> None:
        """heartbeat.json says which phase began last, and when: a watchdog finds a run that hangs, and where."""
        if not self._owns_folder or not self._writes:
            return
        beat = {"step": self.step, "phase": phase, "time": time.time(), "host": os.uname().nodename, "pid": os.getpid()}
        temporary = self.folder / ".heartbeat.json.new"
        with writing(self.folder):
            temporary.write_text(json.dumps(beat) + "\n")
            temporary.replace(self.folder / "heartbeat.json")

    def begin_step(self, step: int) -> None:
        """Start the clock of a training step and, where one was asked for, its profiler trace."""
        if self.bar is None:
            size = " x ".join(map(str, self.config.get("image_size", ())))
            self.say(f"training: steps {step} to {self._num_steps}, {self._num_images} of {size} pixels each")
            self.bar = tqdm(initial=step - 1, total=self._num_steps, disable=not self._writes)
        self._trace.close()  # writes the previous step's trace
        if self.config.get("profile_steps"):
            trace = profiled_step(self.folder, step, self.config["profile_steps"])
            self._trace.enter_context(trace)
        self.step = step
        self._step_began = self._begun_at = time.perf_counter()

    def say(self, line: str) -> None:
        """Print a line, once for all ranks."""
        if self._writes:
            tqdm.write(line)

    # ---- the log ----
    def write(self, metrics: dict, grid: list[Picture] | None = None) -> None:
        """Append a line of metrics, and the seconds of every phase, to metrics.jsonl; then start a new timing.

        metrics: finite numbers or scalar tensors by name. grid: an evaluation's captioned images, from which
        grid_STEP.png and curves.png are drawn. Where an evaluation meets a rule of --stop_if, `should_stop` says so on
        every rank; a line warns where the evaluation lacks the metric of a rule.

        Raises:
            RunError: naming the metrics that are NaN or infinite, or the folder that could not be written; or the third
                training step in a row had no finite gradient.
        """
        if self._step_began is not None:  # a training step, whose seconds are without its evaluation
            self._timing["step"] = time.perf_counter() - self._step_began - self._timing.get("testing", 0.0)
            self._step_began = None
        step = self.step
        if "actor/skipped_steps" in metrics:
            self._num_skipped = 0 if "actor/grad_norm" in metrics else self._num_skipped + 1
        if self._num_skipped == MAX_SKIPPED:
            raise RunError(
                f"step {step}: no finite gradient in {MAX_SKIPPED} training steps in a row: lower --learning_rate"
            )
        metrics = metrics | self._speed_metrics(step)
        if self._stop_if and self.bar is not None:  # an evaluation before training ends nothing
            from common.stop_rules import met_rules, read_stop_rules  # only runs with --stop_if need them

            met, self._stop_reason = met_rules(read_stop_rules(self._stop_if), step, metrics, self.say)
            metrics |= met
        self._timing = {}
        if not self._writes:
            return
        metrics = {name: float(value) for name, value in metrics.items()}
        bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise RunError(f"step {step}: not a finite number: {', '.join(bad)}; is --learning_rate too high?")
        with writing(self.folder):
            self._append(step, {"training/global_step": step, **metrics})
            if grid:
                images, captions = zip(*grid, strict=True)
                save_grid(self.folder / f"grid_{step:04d}.png", images, captions)
                plot_curves(self.folder)
        self._show(step, metrics, has_grid=bool(grid))
        if self._tracker:
            self._tracker.log(step, metrics, grid)

    def _append(self, step: int, row: dict) -> None:
        """Add a line to metrics.jsonl. The first one cuts a resumed run back to its checkpoint before."""
        path = self.folder / "metrics.jsonl"
        if self._has_written and not path.exists():
            raise RunError(f"step {step}: {path}, which this run has written, is gone")
        if not self._has_written and self._owns_folder and (path.exists() or saved_checkpoints(self.folder)):
            from common.resuming import rewind

            rewind(self.folder, self._resumed_from)
        self._has_written = True
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def _show(self, step: int, metrics: dict[str, float], *, has_grid: bool) -> None:
        """Move the progress bar, warn once where nothing is learned, and print an evaluation's rewards."""
        if self.bar is not None:
            self.bar.set_postfix({label: f"{metrics[name]:.3f}" for name, label in SHOWN.items() if name in metrics})
            self.bar.update(step - self.bar.n)
        if metrics.get("critic/rewards/zero_std_ratio") == 1 and not self._has_warned:
            self._has_warned = True
            self.say(f"step {step}: every image scores as the others of its prompt do: nothing is learned from them")
        if has_grid:
            told = [f"{name} {metrics[name]:.3f}" for name in drawn_metrics([metrics], ("val/", *WATCHED))]
            told += [f"{name} {value:g}" for name, value in metrics.items() if name.endswith("/failed") and value > 0]
            self.say(f"step {step}: {', '.join(told)}")

    def _speed_metrics(self, step: int) -> dict[str, float]:
        """Seconds by phase; for a training step also milliseconds per image, and images per second and rank.

        Of several ranks also each phase's slowest one, and its seconds. A collective.
        """
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._timing.items()}
        peaks = {"perf/max_memory_gb": max_memory_gb()}
        if torch.cuda.is_available():
            peaks["perf/max_device_memory_gb"] = self._device_memory_gb
            self._device_memory_gb = 0.0
            torch.cuda.reset_peak_memory_stats()
        metrics |= peaks
        if dist.is_initialized() and dist.get_world_size() > 1:
            from common.ranks import over_ranks

            metrics |= over_ranks(gather_objects((self._timing, peaks)))
        if "step" not in self._timing or not self._num_images:
            return metrics
        for name in ("gen", "reward", "update_actor"):
            if name in self._timing:
                metrics[f"timing_per_image_ms/{name}"] = 1000 * self._timing[name] / self._num_images
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        metrics["perf/time_per_step"] = self._timing["step"]
        metrics["perf/throughput"] = self._num_images / self._timing["step"] / world_size
        metrics["perf/total_num_images"] = step * self._num_images
        if self._utilisation:
            metrics |= self._utilisation.metrics(self._timing)
        return metrics

    # ---- samples, checkpoints and the end ----
    def save_samples(
        self,
        places: list[int],
        scorer: Scorer,
        *,
        seeds: list[int],
        scores: torch.Tensor,
        reward_weights: Sequence[float],
        images_per_prompt: int = 1,
    ) -> tuple[dict, list[Picture] | None]:
        """Write this rank's B evaluation images and, on rank 0, a line of samples.jsonl for each. A collective.

        places (B,): the images' numbers over all ranks. scorer: has the images, their prompts, and what rewards said of
        them. scores: (B, R) by this run's rewards, NaN where one failed; the first ones have reward_weights. Returns
        the metrics val/* (rewards, failures, diversity, drift), and the first images with captions (None on other ranks
        than 0).
        """
        folder = self.folder / "samples" / f"{self.step:04d}"
        records = sample_records(scorer.prompt_set, seeds, scores, self._rewards, scorer.details)
        grid = save_samples(folder, places, scorer.images, records)
        metrics: dict = eval_metrics(scores, self._rewards, reward_weights, places, images_per_prompt)
        metrics |= detail_metrics(scorer.details, "val")
        if self.config.get("eval_by"):
            from common.eval_by import metrics_by_field  # seldom asked for

            shares: dict = {"reward_weights": reward_weights, "images_per_prompt": images_per_prompt}
            metrics |= metrics_by_field(self.config["eval_by"], scorer, scores, places, **shares)
        return metrics | watch_metrics(folder, places, scorer.images, images_per_prompt), grid

    def watch_rollout(
        self,
        scorer: Scorer,
        sampler: GroupSampler,
        seeds: list[int],
        scores: torch.Tensor,
        advantages: torch.Tensor,
    ) -> dict:
        """Metrics of the rollout that the loss does not read: critic/diversity, and what rewards say beside scores.

        Every --save_rollouts steps it also writes this rank's B images and, on rank 0, rollouts/0005/samples.jsonl and
        a grid of the first. scores (N, R) and advantages (N,) are those of all ranks' images. A collective.
        """
        every = self.config.get("save_rollouts", 0)
        if every and self.step % every == 0:
            from common.rollouts import save_rollout  # only runs with --save_rollouts need it

            folder = self.folder / "rollouts" / f"{self.step:04d}"
            save_rollout(folder, scorer, sampler, seeds=seeds, scores=scores, advantages=advantages)
        diversity = rollout_diversity(scorer.images, sampler)
        return {"critic/diversity": diversity, **detail_metrics(scorer.details, "reward")}

    @property
    def checkpoint_path(self) -> Path:
        """checkpoints/step_000030.pt of the current step."""
        return checkpoint_path(self.folder, self.step)

    def save_checkpoint(self, state: dict, model: "Family", policy: str) -> None:
        """Write checkpoints/step_000030.pt of `state`, and adapter/ of `policy` for diffusers. A collective.

        Full weights are as large as their checkpoint: their adapter/ is written when the run ends.
        """
        state |= {"step": self.step, "args": self.config, "format": FORMAT}
        state |= {"best": self.best_score, "best_step": self._best_step}
        with self.timed("save_checkpoint"):  # after `write`: a resumed run cuts the log back to the checkpoint
            save_checkpoint(self.folder, self.step, state, self._keep_checkpoints)
            if model.is_lora or self._is_stopping or self.step == self._num_steps:
                save_policy(self.folder / "adapter", model, policy, self.config.get("dtype", "float32"))

    def load_checkpoint(self) -> dict:
        """The state of the checkpoint to resume from; `step` and `best_score` become its own.

        The best score stays unknown where another run wrote the checkpoint or other rewards score it.
        """
        from common.resuming import options_today, say_resumed

        assert self.checkpoint
        state = load_checkpoint(self.checkpoint)
        if "shards" in state:
            from common.weights.shards import first_intact  # of full weights alone

            is_file = Path(self.config["resume"]).suffix == ".pt"
            self.checkpoint, state = first_intact(self.checkpoint, state, may_be_earlier=not is_file)
        state["path"] = self.checkpoint
        is_comparable = say_resumed(self.checkpoint, options_today(state), self.config)
        self.step = state["step"]
        self._best_step = state.get("best_step") if is_comparable else None
        self._resumed_from = self.step
        self.best_score = state["best"] if is_comparable else -math.inf
        return state

    def save_if_best(self, model: "Family", policy: str, metrics: dict) -> None:
        """Save `policy` as best_adapter/ where its evaluation has the best weighted total so far. A collective."""
        score = float(metrics["val/weighted_total/mean"])
        if score > self.best_score:
            save_policy(self.folder / "best_adapter", model, policy, self.config.get("dtype", "float32"))
            self.best_score = score
            self._best_step = self.step

    def should_stop(self) -> bool:
        """Whether a signal on any rank, too little time for another step, or a rule of --stop_if asks for the end. A
        collective."""
        self._longest_step_s = max(self._longest_step_s, time.perf_counter() - self._begun_at)
        self._is_stopping = any(gather_objects(stop_requested(self._longest_step_s))) or self._stop_reason is not None
        return self._is_stopping

    def close(self, engine: "VLLMEngine | None" = None) -> None:
        """End the engine, where there is one, and say how the training ended."""
        if engine:
            engine.close()
        self._trace.close()
        if self.bar is not None:
            self.bar.close()
        if self._num_steps and not self.config.get("eval_only"):
            if self._best_step is not None:
                self.say(f"best evaluation: step {self._best_step}, in {self.folder}/best_adapter")
            told = f"stopped after step {self.step} of {self._num_steps}"
            if self._stop_reason:
                self.say(f"{told}: {self._stop_reason}; to continue, pass --resume latest without it")
            elif self.step < self._num_steps:
                self.say(f"{told}; to continue, give the same command with --resume latest")
            else:
                self.say(f"finished all {self.step} steps; to continue, pass --resume latest and a larger --num_steps")
        if self._tracker:
            self._tracker.finish()


# ---- the folder ------------------------------------------------------------------------------------------------------
def open_run(run: Path | str, resume: str | None, eval_only: bool = False) -> Path | None:
    """The checkpoint that --resume means, or None: `latest` is the newest of this run, if any; else a file or a run.

    Raises:
        ValueError: the folder `run` holds a run that would be overwritten, or there is no good checkpoint.
    """
    if resume == "latest" and eval_only:
        advice = "let --resume name the run or checkpoint to evaluate"
        raise ValueError(f"--eval_only writes under a new --name: {advice}")
    if resume:
        from common.resuming import checkpoint_of  # only --resume needs it
    if resume == "latest":
        return checkpoint_of(run)
    found = [name for name in RESULTS if (Path(run) / name).exists()]
    if found:
        advice = "choose another --name" + ("" if eval_only else ", or continue it with --resume latest")
        raise ValueError(f"{run} already holds a run: {advice} (found {found[0]})")
    if not resume:
        return None
    checkpoint = checkpoint_of(resume)
    if checkpoint is None:
        raise ValueError(f"--resume {resume}: no checkpoint there")
    return checkpoint


def create_run_folder(folder: Path, config: dict, script: Path | str, checkpoint: Path | None = None) -> None:
    """Make `folder`, with args.json (the options, the command, the git hash, the machine) and a copy of the script.

    A resumed run keeps the first ones, and writes its own beside them under the checkpoint's name. Rank 0 does all
    this, and locks the folder first.

    Raises:
        RunError: another process writes to the folder or has just written to it, or it cannot be written.
    """
    if not on_rank_0():
        return
    with writing(folder):
        lock_run(folder)
        check_unchanged(folder, checkpoint)
        suffix = f"_{checkpoint.stem}" if checkpoint and (folder / "args.json").exists() else ""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("traceback_rank*.txt"):  # of an earlier end
            old.unlink()
        # by a shell, which leaves the hash out where there is no git, instead of raising
        git = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(script).parent, capture_output=True, text=True)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
        machine = {"device": device, "format": FORMAT, "versions": {name: version(name) for name in LIBRARIES}}
        record = {"command": shlex.join(sys.argv), "git_hash": git.stdout.strip() or None, **machine, "args": config}
        (folder / f"args{suffix}.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
        shutil.copy(script, folder / f"source{suffix}.py")


def max_memory_gb() -> float:
    """Peak memory of this process: allocated on its GPU since the last reset or, without one, resident on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts in kB


# ---- a whole script --------------------------------------------------------------------------------------------------
_begun: list[Run] = []  # the run of this process, once it has begun


@contextmanager
def one_line() -> Iterator[None]:
    """The whole of a script: expected errors end it with one line and no traceback; a good end leaves torchrun's world.

    Expected are a RunError and, until the run has begun, a ValueError: bad options or files. A collective that fails
    because another rank is gone also ends in one line; the lost rank's own line is the one to read. Every other
    exception is a bug and keeps its traceback.
    """
    _begun.clear()
    if torch.version.cuda is None:  # beside a CPU build of torch, diffusers cannot import torchvision as it is
        from common.cpu import repair_torchvision

        repair_torchvision()
    try:
        yield
    except (ValueError, RuntimeError) as error:  # a RunError is a RuntimeError, as what torch raises
        from common.failing import exit_value

        value = exit_value(error, _begun[0] if _begun else None)
        if value is None:
            raise
        raise SystemExit(value) from None
    end_distributed()
