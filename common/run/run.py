"""A run and its folder runs/<name>: options, source, metrics, clock, curves and checkpoints.

A kill leaves args.json, checkpoints, adapters, samples.jsonl and heartbeat.json whole, and of metrics.jsonl at worst a
last line that a resume cuts off.

What stands here is equal in all scripts, and no ablation changes it. They say what a rollout logs and what a checkpoint
holds beyond this; common/run/evaluation.py scores an evaluation.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.data import GroupSampler
from common.distributed import gather_objects, on_rank_0, rng_states
from common.errors import RunError, truncate
from common.files import (
    FORMAT,
    atomic_file,
    checkpoint_path,
    load_checkpoint,
    save_checkpoint,
    saved_checkpoints,
    writing,
)
from common.models import Family
from common.optional import optional_part
from common.options import RatioArgs, SharedArgs
from common.process import catch_stop_signals, is_killed_early, print_once, printable, stop_requested
from common.rewards import reward_settings
from common.run.clock import Clock, compile_hint
from common.run.ending import _current_run
from common.run.plots import TRAIN_TOTAL, VAL_TOTAL, WATCHED, Picture, drawn_metrics, plot_curves, save_grid
from common.run.record import (
    Contents,
    changed_contents,
    create_run_folder,
    find_contents,
    find_sources,
    rename_record,
    write_record,
)
from common.run.recorded_options import as_recorded, code_values
from common.scoring import Reward
from common.weights import save_policy
from common.workload import Workload

import torch
from tqdm import tqdm

LONG_STEP_S = 25.0  # with a checkpoint behind it, what torchrun waits for after a signal
MAX_SKIPPED = 3  # training steps in a row without one finite gradient before the run ends


class Run:
    """The folder, metrics, clock, progress bar and stop signals of one training run.

        run = Run(args, rewards, script=__file__, workload=workload(args))
        for step in range(run.step + 1, args.num_steps + 1):
            run.begin_step(step, sampler, save)
            with run.timed("gen", per_image=True):
                ...
            with run.updating():
                ...
            run.end_step({"actor/loss": loss}, has_gradient=True)
            run.log(evaluate() if step % 5 == 0 else {})
            if run.should_stop():
                break
        run.close()

    Every rank has a Run, for its own clock. Rank 0 alone shows and writes.

    Attributes:
        step: the training step that began last; 0 before the first one, or the checkpoint's of a resumed run.
        checkpoint: the checkpoint that this run resumes from, the same on all ranks, or None. load_checkpoint takes an
            earlier one where this one's shards are damaged.
        best_score: the highest weighted total, or --best_by, of an evaluation so far.
        unlogged: the metrics of a finished training step until they are logged. A checkpoint has them where the step's
            evaluation failed, which a resumed run does again.
    """

    def __init__(
        self,
        args: SharedArgs,
        rewards: dict[str, Reward],
        *,
        script: str = "",
        checkpoint: Path | None = None,
        workload: Workload | None = None,
    ) -> None:
        """Begin a run in runs/<name>, or resume it from `checkpoint`.

        rewards: {name: function} of training and evaluation, whose settings are recorded beside the options. script:
        the script's file, copied into the folder, which is made and locked. "" writes metrics alone:
        no record, lock or heartbeat, no signals, no last line of an error. workload: the script's, for speeds.

        Raises:
            RunError: another process writes to the folder or has just written to it, or it cannot be written.
        """
        self.args = args
        self.folder = args.run_folder
        # the options as they are recorded, in args.json, in checkpoints and in wandb
        options = asdict(args) | {"reward_settings": reward_settings(rewards)}
        if workload and workload.guidance_scale != 1:  # a fork may call its option otherwise, and the tools read this
            options.setdefault("guidance_scale", workload.guidance_scale)
        self.config = as_recorded(options, type(args))
        # rank 0's: each rank has looked for itself, and disks need not agree at once
        self.checkpoint = gather_objects(checkpoint)[0] if script else checkpoint
        self.step = 0
        self.best_score = -math.inf
        self._lowest_score = math.inf  # for `close`: where it is best_score, all evaluations scored the same
        self.unlogged: dict[str, float] = {}
        self._shown: Mapping[str, str] = {}  # label beside the progress bar -> metric
        self._saved_step = 0  # of the newest checkpoint
        self._sampler: GroupSampler | None = None
        self._save: Callable[[], None] | None = None
        # (step, random states, the sampler's) that belong to the weights, for save_after_failure: set by begin_step, of
        # the step before, and by end_step; None from `updating` to end_step, while the weights change
        self._policy_states: tuple[int, dict, dict] | None = None
        self._rng_to_save: dict | None = None  # after a failure, as a thread that scores may still draw numbers
        self._best_step: int | None = None  # of the best evaluation; None: unknown
        self._clock = Clock(workload.num_images if workload else 0, self.folder, args.profile_steps)
        self._phase = ""  # that is being timed
        self._updates_per_step = workload.updates_per_step if workload else 1
        self._writes = on_rank_0()
        self._stop_reason: str | None = None  # the rule that an evaluation met first
        self._owns_folder = bool(script)
        self._resumed_from = -1  # the step of the checkpoint; -1: nothing stays of an earlier run
        self._logged_to = -1  # the last step whose metrics stay
        self._has_written = False
        self._is_stopping = False
        self._has_warned = False
        self._has_seen_ratio = False
        self._num_skipped = 0  # training steps in a row without a finite gradient
        self.bar: tqdm | None = None
        self.contents: Contents = {}  # recorded as well, but not in wandb
        self._record: dict[Path, bytes] = {}  # of a resumed run, until its first line of metrics
        if script:
            catch_stop_signals(args.max_minutes)
            _current_run.append(self)
            code = code_values(options, type(args))
            found = find_contents(options, code, script) | find_sources(script) if self._writes else {}
            self.contents = gather_objects(found)[0]
            self._record = create_run_folder(self.folder, self.config, script, self.checkpoint, self.contents, code)
        trains = script and args.num_steps and not args.eval_only
        if trains and workload and self._writes and torch.cuda.is_available():  # a CPU's peak is not known
            self._clock.count_flops(options, workload)
        self._tracker: Any = None
        if args.track and self._writes:
            tracking = optional_part("run.tracking", "--track")
            self._tracker = tracking.start_tracker(args.track, self.folder, self.config)

    # ---- the clock ----
    @contextmanager
    def timed(self, name: str, *, per_image: bool = False, mfu: str | None = None) -> Iterator[None]:
        """Add the block's seconds to timing_s/<name>, to the end of the GPU's work. The time before the first block is
        startup.

        A block is also a phase of heartbeat.json, and may stand in another. per_image: log timing_per_image_ms/<name>
        as well. mfu: log perf/mfu/<mfu> of a phase that common/run/utilisation.py counts.
        """
        outer, self._phase = self._phase, name
        self._write_heartbeat(name)
        with self._clock.timed(name, per_image=per_image, mfu=mfu):
            yield
        self._phase = outer
        if outer:
            self._write_heartbeat(outer)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The phase `update_actor`, in which the weights change: from here to `end_step` a failure saves no
        checkpoint."""
        self._policy_states = None  # until `end_step`
        with self.timed("update_actor", per_image=True, mfu="actor"):
            yield

    def _write_heartbeat(self, phase: str) -> None:
        """heartbeat.json says which phase began last, and when: a watchdog finds a run that hangs, and where. `close`
        writes `finished` or `stopped`; after an error the phase stays."""
        if not self._owns_folder or not self._writes:
            return
        beat = {"step": self.step, "phase": phase, "time": time.time(), "host": os.uname().nodename, "pid": os.getpid()}
        temporary = self.folder / ".heartbeat.json.new"
        with writing(self.folder):
            temporary.write_text(json.dumps(beat) + "\n")
            temporary.replace(self.folder / "heartbeat.json")

    @property
    def has_begun_training(self) -> bool:
        """Whether this start has begun a training step."""
        return self.bar is not None

    def begin_step(
        self, step: int, sampler: GroupSampler | None = None, save: Callable[[], None] | None = None
    ) -> None:
        """Start the clock of a training step and, where one was asked for, its profiler trace.

        save: writes a checkpoint. It is called if the engine or a reward fails before the step trains, or in its
        evaluation: the steps since the last checkpoint are not lost. A push to the engine right after an update is
        in neither.
        """
        if self.bar is None:
            height, width = self.args.image_size
            num_steps = self.args.num_steps
            kind = "videos" if self.args.num_frames > 1 else "images"
            images = f"{self._clock.num_images} {kind} of {height} x {width} pixels each"
            self.print_message(f"training: steps {step} to {num_steps}, {images}")
            self.bar = tqdm(initial=step - 1, total=num_steps, disable=not self._writes)
        self._sampler, self._save = sampler, save
        self._keep_states(step - 1)
        self.step = step
        self._clock.begin_step(step)

    def end_step(self, metrics: dict, *, has_gradient: bool, shown: Mapping[str, str] | None = None) -> None:
        """Keep the metrics of a training step until `log`, and remember the states that go with its weights.

        has_gradient: whether one of the step's gradients was finite. shown: {label: metric},
        beside the progress bar.
        """
        self.unlogged = {name: float(value) for name, value in metrics.items()}
        self._shown = shown or {}
        self._num_skipped = 0 if has_gradient else self._num_skipped + 1
        self._keep_states(self.step)

    def report_ratio(self, mean: float | torch.Tensor, deviation: float | torch.Tensor, clip_range: float) -> None:
        """Warn, once, where the first ratios do not begin at 1 up to `clip_range`, or 1e-3 if that is less.

        mean and deviation: of the ratios before any weight has changed since the rollout.
        """
        if self._has_seen_ratio:
            return
        self._has_seen_ratio = True
        mean, deviation = float(mean), float(deviation)
        if max(abs(mean - 1), deviation) > min(1e-3, clip_range):
            found = f"the ratio begins at 1 {mean - 1:+.2g} +- {deviation:.1g}"
            why = "the rollout's log-probs are not those that the update computes of the same samples"
            takes_sampled = isinstance(self.args, RatioArgs) and self.args.old_log_prob == "rollout"
            advice = "pass --old_log_prob recompute, or see docs/fork.md" if takes_sampled else "see docs/fork.md"
            self.print_message(f"step {self.step}: {found}: {why}: {advice}")

    def _keep_states(self, step: int) -> None:
        """Remember the random states and the sampler's position after `step`, for save_after_failure."""
        if self._sampler:
            self._policy_states = (step, rng_states(), self._sampler.state_dict())

    def save_after_failure(self) -> None:
        """After a RolloutError: save what the failed rollout or evaluation began with. A collective."""
        save, states, self._save = self._save, self._policy_states, None
        if save is None or states is None or states[0] == self._saved_step:
            return
        self.step, self._rng_to_save, position = states
        assert self._sampler
        self._sampler.load_state_dict(position)
        is_finite = all(math.isfinite(value) for value in self.unlogged.values())
        try:
            if not all(gather_objects(is_finite)):  # `log` would have ended the run without a checkpoint
                return
            save()
            gather_objects(None)  # torchrun ends all ranks when one has ended, which must not be while another saves
        except RuntimeError as error:  # a full disk, or a rank that is gone
            self.print_message(f"step {self.step} could not be saved: {truncate(str(error))}")

    def print_message(self, line: str) -> None:
        """Print a line, once for all ranks."""
        if self._writes:
            tqdm.write(printable(line))

    # ---- the log ----
    def log(self, metrics: dict, grid: list[Picture] | None = None) -> None:
        """Append a line of metrics, and the seconds of every phase, to metrics.jsonl; then start a new timing. A
        collective.

        metrics: finite numbers or scalar tensors by name; to them come those of `end_step`. grid: an evaluation's
        captioned images, of which grid_STEP.png is made; curves.png is drawn with it. Where an evaluation meets a rule
        of --stop_if, `should_stop` says so on every rank; a line warns where the evaluation lacks the metric of a rule.

        Raises:
            RunError: on rank 0, naming the metrics that are NaN or infinite, or the folder that could not be written;
                on every rank, at the third training step in a row without a finite gradient.
        """
        self._clock.end_step()
        step = self.step
        # an evaluation before training ends nothing; that of a step may, also where a resumed run does it again
        may_stop = self.has_begun_training or bool(self.unlogged)
        metrics = self.unlogged | metrics
        self.unlogged = {}
        if self._num_skipped == MAX_SKIPPED:
            raise RunError(
                f"step {step}: no finite gradient in {MAX_SKIPPED} training steps in a row: lower --learning_rate"
            )
        metrics = metrics | self._clock.metrics(step)
        if self.args.stop_if and may_stop:
            rules = optional_part("run.stop_rules", "--stop_if")
            read = rules.read_stop_rules(self.args.stop_if)
            met, reason = rules.met_rules(read, step, metrics, self.print_message)
            self._stop_reason = self._stop_reason or reason
            metrics |= met
        self._clock.seconds = {}
        if not self._writes:
            return
        metrics = {name: float(value) for name, value in metrics.items()}
        bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise RunError(f"step {step}: not a finite number: {', '.join(bad)}; is --learning_rate too high?")
        with writing(self.folder):
            self._append(step, {"training/global_step": step, **metrics}, has_samples=grid is not None)
            if grid:
                images, captions = zip(*grid, strict=True)
                save_grid(self.folder / f"grid_{step:04d}.png", images, captions)
                plot_curves(self.folder)
        self._show(step, metrics, has_grid=bool(grid))
        if self._tracker:
            self._tracker.log(step, metrics, grid)

    def _append(self, step: int, row: dict, *, has_samples: bool) -> None:
        """Add a line to metrics.jsonl. Before the first line a resumed run is cut back to its checkpoint, and writes
        its record: one that fails earlier leaves everything as it was.

        has_samples: whether this start has written samples/ of the step."""
        path = self.folder / "metrics.jsonl"
        if self._has_written and not path.exists():
            raise RunError(f"step {step}: {path}, which this run has written, is gone")
        if not self._has_written and self._owns_folder and (path.exists() or saved_checkpoints(self.folder)):
            resuming = optional_part("run.resuming", "--resume")
            saves_rollouts = self.config.get("save_rollouts")  # not every script has the option
            # a step of the checkpoint, of which an evaluation alone is repeated, keeps what an earlier start wrote
            keeps_rollout = step <= self._resumed_from or (saves_rollouts and step % saves_rollouts == 0)
            written = [f"rollouts/{step:04d}"] if keeps_rollout else []
            written += [f"samples/{step:04d}"] if has_samples else []
            resuming.rewind(self.folder, self._resumed_from, self._logged_to, written)
        if not self._has_written:
            write_record(self._record)
            self._record = {}
        self._has_written = True
        with open(path, "a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def _show(self, step: int, metrics: dict[str, float], *, has_grid: bool) -> None:
        """Move the progress bar, warn once where nothing is learned, and print an evaluation's rewards."""
        if self.bar is not None:
            shown = {"reward": TRAIN_TOTAL, **self._shown}
            self.bar.set_postfix({label: f"{metrics[name]:.3f}" for label, name in shown.items() if name in metrics})
            self.bar.update(step - self.bar.n)
            may_compile = torch.cuda.is_available() and not self.args.base_weights
            if may_compile and "compile" not in self.args.train_with and step == self.bar.initial + 2:
                # of the second step, as the first one also warms up
                line = compile_hint(metrics["timing_s/step"], self.args.num_steps - step)
                if line:
                    self.print_message(f"step {step}: {line}")
        if metrics.get("critic/rewards/zero_std_ratio") == 1 and not self._has_warned:
            self._has_warned = True
            self.print_message(
                f"step {step}: every image scores as the others of its prompt do: nothing is learned from them"
            )
        if has_grid:
            told = [f"{name} {metrics[name]:.3f}" for name in drawn_metrics([metrics], ("val/", *WATCHED))]
            told += [f"{name} {value:g}" for name, value in metrics.items() if name.endswith("/failed") and value > 0]
            self.print_message(f"step {step}: {', '.join(told)}")

    # ---- samples, checkpoints and the end ----
    @property
    def checkpoint_path(self) -> Path:
        """checkpoints/step_000030.pt of the current step."""
        return checkpoint_path(self.folder, self.step)

    def save_checkpoint(self, state: dict, model: Family, policy: str) -> None:
        """Write checkpoints/step_000030.pt of `state`, and adapter/ of `policy` for diffusers. A collective.

        Full weights are as large as their checkpoint: their adapter/ is written when the run ends, as `should_stop` has
        said, or at the last step.
        """
        state |= {"step": self.step, "args": self.config, "contents": self.contents, "format": FORMAT}
        state |= {"updates_per_step": self._updates_per_step}
        state |= {"best": self.best_score, "lowest": self._lowest_score, "best_step": self._best_step}
        state |= {"unlogged": self.unlogged, "num_skipped": self._num_skipped}
        if self._rng_to_save:
            state["rng"] = gather_objects(self._rng_to_save)
        with self.timed("save_checkpoint"):  # after `log`: a resumed run cuts the log back to the checkpoint
            save_checkpoint(self.folder, self.step, state, self.args.keep_checkpoints)
            if model.is_lora or self._is_stopping or self.step == self.args.num_steps:
                save_policy(self.folder / "adapter", model, policy, self.args.dtype)
        self._saved_step = self.step

    def load_checkpoint(self) -> dict:
        """The state of the checkpoint to resume from, which sets this run's step, best_score and unlogged.

        The best score stays unknown where another run wrote the checkpoint, where evaluations are scored otherwise, or
        where best_adapter/ is of a later step.

        Raises:
            RunError: the checkpoint is not there any more.
        """
        assert self.checkpoint
        try:
            state = load_checkpoint(self.checkpoint)
        except ValueError as error:  # it was checked before the model loaded
            gone = "a run that trains on has removed it, or it was damaged, since this start began: start again"
            raise RunError(truncate(f"--resume {self.args.resume}: {error}: {gone}")) from error
        if "shards" in state:
            is_file = Path(str(self.args.resume)).suffix == ".pt"
            shards = optional_part("weights.shards", "--lora_rank 0")
            newest = self.checkpoint.stem
            self.checkpoint, state = shards.first_intact(self.checkpoint, state, may_be_earlier=not is_file)
            self._record = rename_record(self._record, self.folder, newest, self.checkpoint.stem)
        state["path"] = self.checkpoint
        changed = dict(changed_contents(state["contents"], self.contents))
        # prints what changed; False: another run's, or scored otherwise
        # rank 0's answer, as settings of rewards may be paths that each node has another of
        resuming = optional_part("run.resuming", "--resume")
        is_comparable = gather_objects(resuming.report_resumed(self.checkpoint, state["args"], self.config, changed))[0]
        self._lowest_score = state["lowest"] if is_comparable else math.inf
        self.step = state["step"]
        # checkpoints may be rarer than evaluations: a step that is done again may have written best_adapter/
        if is_comparable and gather_objects(resuming.step_of_best(self.folder))[0] > self.step:
            is_comparable = False
            self.print_message(f"best_adapter is of a step after {self.step}, and is chosen again")
        self._best_step = state["best_step"] if is_comparable else None
        self._saved_step = self.step
        if self.args.resume == "latest":  # otherwise nothing stays of a start that was lost
            self._resumed_from = self._logged_to = self.step
            self._num_skipped = state.get("num_skipped", 0)  # an earlier checkpoint does not say it
        if self.args.resume == "latest" and state["unlogged"]:
            self.unlogged = state["unlogged"]
            self._logged_to -= 1  # its line is written again, with the evaluation
        self.best_score = state["best"] if is_comparable else -math.inf
        return state

    def save_if_best(self, model: Family, policy: str, metrics: dict) -> None:
        """Save `policy` as best_adapter/ where its evaluation has the highest --best_by, or weighted total, so far. A
        collective."""
        name = self.args.best_by or VAL_TOTAL
        if name not in metrics:  # there is no total where all trained rewards are relative
            if self.args.best_by:
                self.print_message(f"step {self.step}: --best_by {name}: this evaluation lacks it")
            return
        score = float(metrics[name])
        self._lowest_score = min(self._lowest_score, score)
        if score > self.best_score:
            best = {"step": self.step, name: score}
            self._write_best(best | {"is_saved": False})  # first: after a kill the adapter is chosen again
            save_policy(self.folder / "best_adapter", model, policy, self.args.dtype)
            self._write_best(best)
            self.best_score = score
            self._best_step = self.step

    def _write_best(self, best: dict[str, Any]) -> None:
        """best.json says which evaluation best_adapter/ is of; "is_saved" is False there until its weights are."""
        if self._writes:
            with atomic_file(self.folder / "best_adapter" / "best.json") as temporary:
                temporary.write_text(json.dumps(best) + "\n")

    def repair_adapter(self, model: Family, policy: str) -> None:
        """Write adapter/ again where a resumed run has all its steps: a kill may have come between its last checkpoint
        and that. A collective."""
        if self.args.resume == "latest" and self.step >= self.args.num_steps:
            save_policy(self.folder / "adapter", model, policy, self.args.dtype)

    def should_stop(self) -> bool:
        """Whether a signal on any rank, too little time for another step, or a rule of --stop_if asks for the end. A
        collective."""
        longest_step_s = self._clock.longest_step()
        if longest_step_s > LONG_STEP_S and is_killed_early():
            advice = "start it with torchrun --shutdown_timeout 7200"
            print_once(f"a step takes long: torchrun kills a run 30 s after Ctrl-C, perhaps before it saved: {advice}")
        self._is_stopping = any(gather_objects(stop_requested(longest_step_s))) or self._stop_reason is not None
        return self._is_stopping

    def close(self) -> None:
        """Say how the training ended, and wait for the tracker."""
        self._save = None  # which holds the model
        self._clock.close()
        if self.bar is not None:
            self.bar.close()
        if self.args.num_steps and not self.args.eval_only:
            if self._best_step is not None and self._lowest_score == self.best_score:
                told = f"{self.folder}/best_adapter is of step {self._best_step}"
                self.print_message(f"{told}: no evaluation has scored otherwise")
            elif self._best_step is not None:
                self.print_message(f"best evaluation: step {self._best_step}, in {self.folder}/best_adapter")
            told = f"stopped after step {self.step} of {self.args.num_steps}"
            met = f", at which {self._stop_reason}" if self._stop_reason else ""
            if self.step >= self.args.num_steps:
                more = "to continue, pass --resume latest and a larger --num_steps"
                self.print_message(f"finished all {self.step} steps{met}; {more}")
            elif met:
                self.print_message(f"{told}: {self._stop_reason}; to continue, pass --resume latest without it")
            else:
                self.print_message(f"{told}; to continue, give the same command with --resume latest")
        if self._tracker:
            self._tracker.finish()
        self._write_heartbeat("stopped" if self._is_stopping and self.step < self.args.num_steps else "finished")
