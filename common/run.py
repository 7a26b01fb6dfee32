"""A run and its folder runs/<name>: options, source, metrics, clock, curves and checkpoints.

A kill leaves args.json, checkpoints, adapters, samples.jsonl and heartbeat.json whole, and of metrics.jsonl at worst a
last line that a resume cuts off.

What stands here is equal in all scripts, and no ablation changes it. They say what a rollout logs and what a checkpoint
holds beyond this; common/evaluation.py scores an evaluation.
"""

import json
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from common import checkpoints
from common.checkpoints import FORMAT, atomic_file, saved_checkpoints, writing
from common.cpu import repair_torchvision
from common.data import GroupSampler
from common.distributed import end_distributed, gather_objects, on_rank_0, rng_states
from common.errors import UNREADABLE, NothingBegun, RolloutError, RunError, error_prefix, truncate
from common.models.family import Family
from common.options import RatioArgs, SharedArgs
from common.plots import TRAIN_TOTAL, VAL_TOTAL, WATCHED, Picture, drawn_metrics, plot_curves, save_grid
from common.process import catch_stop_signals, is_killed_early, print_message, print_once, printable, stop_requested
from common.profiling import Utilisation, compile_hint, profiled_step
from common.recorded_options import as_recorded, code_values
from common.resuming import checkpoint_of, report_resumed, rewind, step_of_best
from common.run_record import (
    Contents,
    changed_contents,
    create_run_folder,
    find_contents,
    find_sources,
    write_record,
)
from common.scoring import Reward, reward_settings
from common.stop_rules import met_rules, read_stop_rules
from common.tracking import start_tracker
from common.weights.lora import save_policy
from common.weights.shards import first_intact
from common.workload import Workload

import torch
import torch.distributed as dist
from tqdm import tqdm

LONG_STEP_S = 25.0  # with a checkpoint behind it, what torchrun waits for after a signal
MAX_SKIPPED = 3  # training steps in a row without one finite gradient before the run ends
# files and folders that only a run leaves in its folder
RESULTS = ("metrics.jsonl", "checkpoints", "adapter", "best_adapter", "samples", "rollouts", "pairs.jsonl", "pairs")
BEGINS_ANEW = "the run begins anew, and so does its log"
# what gloo and NCCL say of a rank that has ended, or hangs
RANK_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
    "Timed out waiting",
)
ANOTHER_RANK_LOST = "another rank was lost; if it left no line above, it hangs, or was killed for memory (see dmesg)"


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
        self._num_images = workload.num_images if workload else 0
        self._updates_per_step = workload.updates_per_step if workload else 1
        self._writes = on_rank_0()
        self._stop_reason: str | None = None  # the rule that an evaluation met first
        self._timing: dict[str, float] = {}  # seconds of every phase since the last `log`, on this rank
        self._per_image: set[str] = set()  # phases whose milliseconds per image are logged
        self._mfu_phases: dict[str, str] = {}  # name of perf/mfu/<name> -> its phase
        self._created: float | None = time.perf_counter()  # until the first phase: the time before it is the startup
        self._device_memory_gb = 0.0  # the most that was in use on the GPU, by any process, since the last `log`
        self._step_began: float | None = None  # perf_counter at the start of a training step, until `log`
        self._last_step_began = time.perf_counter()  # the same, but kept beyond `log`, for `should_stop`
        self._longest_step_s = 0.0
        self._owns_folder = bool(script)
        self._resumed_from = -1  # the step of the checkpoint; -1: nothing stays of an earlier run
        self._logged_to = -1  # the last step whose metrics stay
        self._has_written = False
        self._is_stopping = False
        self._has_warned = False
        self._has_seen_ratio = False
        self._num_skipped = 0  # training steps in a row without a finite gradient
        self.bar: tqdm | None = None
        self._trace = ExitStack()  # holds the profiler of the current training step
        self.contents: Contents = {}  # recorded as well, but not in wandb
        self._record: dict[Path, bytes] = {}  # of a resumed run, until its first line of metrics
        if script:
            catch_stop_signals(args.max_minutes)
            _current_run.append(self)
            code = code_values(options, type(args))
            found = find_contents(options, code) | find_sources(script) if self._writes else {}
            self.contents = gather_objects(found)[0]
            self._record = create_run_folder(self.folder, self.config, script, self.checkpoint, self.contents, code)
        self._utilisation: Utilisation | None = None
        trains = script and args.num_steps and not args.eval_only
        if trains and self._writes and torch.cuda.is_available():  # a CPU's peak is not known
            self._utilisation = Utilisation(options, workload) if workload else None
        self._tracker = start_tracker(args.track, self.folder, self.config) if args.track and self._writes else None

    # ---- the clock ----
    @contextmanager
    def timed(self, name: str, *, per_image: bool = False, mfu: str | None = None) -> Iterator[None]:
        """Add the block's seconds to timing_s/<name>, to the end of the GPU's work. The time before the first block is
        startup.

        A block is also a phase of heartbeat.json. per_image: log timing_per_image_ms/<name> as well. mfu: log
        perf/mfu/<mfu> of a phase that common/profiling.py counts.
        """
        if per_image:
            self._per_image.add(name)
        if mfu:
            self._mfu_phases[mfu] = name
        began = time.perf_counter()
        if self._created is not None:
            self._timing["startup"] = began - self._created
            self._created = None
        self._write_heartbeat(name)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # of all processes on this GPU, the engine among them
            self._device_memory_gb = max(self._device_memory_gb, (total - free) / 1e9)
        self._timing[name] = self._timing.get(name, 0.0) + time.perf_counter() - began

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
            self.print_message(
                f"training: steps {step} to {num_steps}, {self._num_images} {kind} of {height} x {width} pixels each"
            )
            self.bar = tqdm(initial=step - 1, total=num_steps, disable=not self._writes)
        self._trace.close()  # writes the previous step's trace
        self._trace.enter_context(profiled_step(self.folder, step, self.args.profile_steps))
        self._sampler, self._save = sampler, save
        self._keep_states(step - 1)
        self.step = step
        self._step_began = self._last_step_began = time.perf_counter()

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
        if self._step_began is not None:  # a training step, whose seconds are without its evaluation
            self._timing["step"] = time.perf_counter() - self._step_began - self._timing.get("testing", 0.0)
            self._step_began = None
        step = self.step
        # an evaluation before training ends nothing; that of a step may, also where a resumed run does it again
        may_stop = self.has_begun_training or bool(self.unlogged)
        metrics = self.unlogged | metrics
        self.unlogged = {}
        if self._num_skipped == MAX_SKIPPED:
            raise RunError(
                f"step {step}: no finite gradient in {MAX_SKIPPED} training steps in a row: lower --learning_rate"
            )
        metrics = metrics | self._speed_metrics(step)
        if self.args.stop_if and may_stop:
            met, reason = met_rules(read_stop_rules(self.args.stop_if), step, metrics, self.print_message)
            self._stop_reason = self._stop_reason or reason
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
        """Add a line to metrics.jsonl. Before the first line a resumed run is cut back to its checkpoint, and writes
        its record: one that fails earlier leaves everything as it was."""
        path = self.folder / "metrics.jsonl"
        if self._has_written and not path.exists():
            raise RunError(f"step {step}: {path}, which this run has written, is gone")
        if not self._has_written and self._owns_folder and (path.exists() or saved_checkpoints(self.folder)):
            rewind(self.folder, self._resumed_from, self._logged_to)
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

    def _speed_metrics(self, step: int) -> dict[str, float]:
        """Seconds by phase, and memory peaks; for a training step also milliseconds per image, images per second and
        rank, and perf/mfu where it is counted.

        Of several ranks also each phase's slowest one, and its seconds. A collective.
        """
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._timing.items()}
        if torch.cuda.is_available():  # of this process, and of all on its GPU
            peaks = {"perf/max_memory_gb": torch.cuda.max_memory_allocated() / 1e9}
            peaks["perf/max_device_memory_gb"] = self._device_memory_gb
            self._device_memory_gb = 0.0
            torch.cuda.reset_peak_memory_stats()
        else:  # of this process on the host; Linux counts in kB
            peaks = {"perf/max_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
        metrics |= peaks
        if dist.is_initialized() and dist.get_world_size() > 1:
            metrics |= over_ranks(gather_objects((self._timing, peaks)))
        if "step" not in self._timing or not self._num_images:
            return metrics
        for name in self._timing:
            if name in self._per_image:
                metrics[f"timing_per_image_ms/{name}"] = 1000 * self._timing[name] / self._num_images
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        metrics["perf/time_per_step"] = self._timing["step"]
        metrics["perf/throughput"] = self._num_images / self._timing["step"] / world_size
        metrics["perf/total_num_images"] = step * self._num_images
        if self._utilisation:
            seconds = {name: self._timing.get(phase, 0.0) for name, phase in self._mfu_phases.items()}
            metrics |= self._utilisation.metrics(seconds)
        return metrics

    # ---- samples, checkpoints and the end ----
    @property
    def checkpoint_path(self) -> Path:
        """checkpoints/step_000030.pt of the current step."""
        return checkpoints.checkpoint_path(self.folder, self.step)

    def save_checkpoint(self, state: dict, model: Family, policy: str) -> None:
        """Write checkpoints/step_000030.pt of `state`, and adapter/ of `policy` for diffusers. A collective.

        Full weights are as large as their checkpoint: their adapter/ is written when the run ends, as `should_stop` has
        said, or at the last step.
        """
        state |= {"step": self.step, "args": self.config, "contents": self.contents, "format": FORMAT}
        state |= {"updates_per_step": self._updates_per_step}
        state |= {"best": self.best_score, "lowest": self._lowest_score, "best_step": self._best_step}
        state |= {"unlogged": self.unlogged}
        if self._rng_to_save:
            state["rng"] = gather_objects(self._rng_to_save)
        with self.timed("save_checkpoint"):  # after `log`: a resumed run cuts the log back to the checkpoint
            checkpoints.save_checkpoint(self.folder, self.step, state, self.args.keep_checkpoints)
            if model.is_lora or self._is_stopping or self.step == self.args.num_steps:
                save_policy(self.folder / "adapter", model, policy, self.args.dtype)
        self._saved_step = self.step

    def load_checkpoint(self) -> dict:
        """The state of the checkpoint to resume from, which sets this run's step, best_score and unlogged.

        The best score stays unknown where another run wrote the checkpoint, where evaluations are scored otherwise, or
        where best_adapter/ is of a later step.
        """
        assert self.checkpoint
        state = checkpoints.load_checkpoint(self.checkpoint)
        if "shards" in state:
            is_file = Path(str(self.args.resume)).suffix == ".pt"
            self.checkpoint, state = first_intact(self.checkpoint, state, may_be_earlier=not is_file)
        state["path"] = self.checkpoint
        changed = dict(changed_contents(state.get("contents", {}), self.contents))
        # prints what changed; False: another run's, or scored otherwise
        # rank 0's answer, as settings of rewards may be paths that each node has another of
        is_comparable = gather_objects(report_resumed(self.checkpoint, state["args"], self.config, changed))[0]
        self._lowest_score = state.get("lowest", -math.inf) if is_comparable else math.inf
        self.step = state["step"]
        # checkpoints may be rarer than evaluations: a step that is done again may have written best_adapter/
        if is_comparable and gather_objects(step_of_best(self.folder))[0] > self.step:
            is_comparable = False
            self.print_message(f"best_adapter is of a step after {self.step}, and is chosen again")
        self._best_step = state.get("best_step") if is_comparable else None
        self._saved_step = self.step
        if self.args.resume == "latest":  # otherwise nothing stays of a start that was lost
            self._resumed_from = self._logged_to = self.step
        if self.args.resume == "latest" and state.get("unlogged"):
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
            if self._writes:  # first: after a kill between the two the adapter is chosen again
                with atomic_file(self.folder / "best_adapter" / "best.json") as temporary:
                    temporary.write_text(json.dumps({"step": self.step, name: score}) + "\n")
            save_policy(self.folder / "best_adapter", model, policy, self.args.dtype)
            self.best_score = score
            self._best_step = self.step

    def repair_adapter(self, model: Family, policy: str) -> None:
        """Write adapter/ again where a resumed run has all its steps: a kill may have come between its last checkpoint
        and that. A collective."""
        if self.args.resume == "latest" and self.step >= self.args.num_steps:
            save_policy(self.folder / "adapter", model, policy, self.args.dtype)

    def should_stop(self) -> bool:
        """Whether a signal on any rank, too little time for another step, or a rule of --stop_if asks for the end. A
        collective."""
        self._longest_step_s = max(self._longest_step_s, time.perf_counter() - self._last_step_began)
        if self._longest_step_s > LONG_STEP_S and is_killed_early():
            advice = "start it with torchrun --shutdown_timeout 600"
            print_once(f"a step takes long: torchrun kills a run 30 s after Ctrl-C, perhaps before it saved: {advice}")
        self._is_stopping = any(gather_objects(stop_requested(self._longest_step_s))) or self._stop_reason is not None
        return self._is_stopping

    def close(self) -> None:
        """Say how the training ended, and wait for the tracker."""
        self._save = None  # which holds the model
        self._trace.close()
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


# ---- the folder ------------------------------------------------------------------------------------------------------
def checkpoint_to_resume(folder: Path | str, resume: str | None, eval_only: bool = False) -> Path | None:
    """The checkpoint that --resume means, or None: `latest` is the newest of this run, if any; else a file or a run.

    A start from another run that was lost before its first checkpoint may be repeated, and begins anew.

    Raises:
        ValueError: the run's folder holds a run that would be overwritten, or there is no good checkpoint.
    """
    if resume == "latest" and eval_only:
        advice = "let --resume name the run or checkpoint to evaluate"
        raise ValueError(f"--eval_only writes under a new --name: {advice}")
    record = Path(folder) / "args.json"
    began_from = None  # the --resume of a start that trained, and has not saved yet
    if resume and record.is_file() and not saved_checkpoints(folder):
        with error_prefix(record, (*UNREADABLE, KeyError, TypeError)):
            options = json.loads(record.read_text(encoding="utf-8"))["args"]
            began_from = None if options.get("eval_only") else options.get("resume")
    if resume == "latest" and not saved_checkpoints(folder):
        if began_from not in (None, "latest"):  # the run would begin with the model before any training
            advice = f"start it with --resume {began_from} again"
            raise ValueError(f"--resume latest: {folder} has no checkpoint yet: {advice}")
        if (Path(folder) / "metrics.jsonl").exists():
            print_message(f"{folder} has no checkpoint yet: {BEGINS_ANEW}")
        return None
    if resume == "latest":
        return checkpoint_of(folder)
    found = [name for name in RESULTS if (Path(folder) / name).exists()]
    is_repeated = resume is not None and resume == began_from and not eval_only and "adapter" not in found
    if found and is_repeated:
        print_message(f"{folder} has no checkpoint yet: {BEGINS_ANEW}")
    elif found:
        advice = "choose another --name" + ("" if eval_only else ", or continue it with --resume latest")
        raise ValueError(f"{folder} already holds a run: {advice} (found {found[0]})")
    return checkpoint_of(resume) if resume else None


def over_ranks(by_rank: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """The largest of every rank's memory peaks, and each phase's slowest rank and its seconds.

    by_rank: each rank's seconds by phase, and its peaks by metric. A straggler is long in one phase, and all others in
    the next, where they wait for it.
    """
    timing, peaks = by_rank[0]
    metrics = {name: max(of_rank[name] for _, of_rank in by_rank) for name in peaks}
    for name in timing:
        seconds = [of_rank.get(name, 0.0) for of_rank, _ in by_rank]
        metrics[f"timing_s/{name}/max"] = max(seconds)
        metrics[f"timing_s/{name}/slowest_rank"] = seconds.index(max(seconds))
    return metrics


# ---- a whole script --------------------------------------------------------------------------------------------------
_current_run: list[Run] = []  # the run of this process, once it has begun


@contextmanager
def friendly_errors() -> Iterator[None]:
    """The whole of a script: expected errors end it with one line and no traceback; a good end leaves torchrun's world.

    Expected are a RunError and, until the run has begun, a ValueError: bad options or files. A collective that fails
    because another rank is gone also ends in one line; the lost rank's own line is the one to read. Every other
    exception is a bug and keeps its traceback.
    """
    _current_run.clear()
    repair_torchvision()  # before diffusers is imported
    try:
        yield
    except (ValueError, RuntimeError) as error:  # a RunError is a RuntimeError, as what torch raises
        run = _current_run[0] if _current_run else None
        is_training = run is not None and run.has_begun_training
        if run and run.bar is not None:
            run.bar.close()  # the last line is one of its own
        if run and isinstance(error, RolloutError):
            run.save_after_failure()
        value = exit_value(error, run.folder if run else None, is_training)
        if value is None:
            raise
        raise SystemExit(value) from None
    end_distributed()


def exit_value(error: Exception, folder: Path | None, is_training: bool) -> str | int | None:
    """What the script exits with: a line for the screen, or a status. None where the error is a bug.

    folder: the run's; None before the run has begun. is_training: a training step has begun.
    """
    if isinstance(error, ValueError | RunError):
        if isinstance(error, ValueError) and folder:
            return None
        if isinstance(error, RolloutError) and not str(error):  # another rank has the line
            return 1
        # bad options are the same on every rank, and printed once. A reward's `load` may raise anything else, which is
        # the error's cause then, on this rank alone
        is_everywhere = isinstance(error, ValueError) and isinstance(error.__cause__ or error, UNREADABLE)
        silent = is_everywhere and os.environ.get("LOCAL_RANK", "0") != "0"
        return 1 if silent else last_line(str(error), error, folder)
    if not any(sign in str(error) for sign in RANK_IS_GONE):
        return None
    # the lost rank may have stopped as asked, while prompts were encoded, say: its --max_minutes may have ended a
    # minute before this rank's
    has_stopped = stop_requested(60.0) and not is_training
    return 0 if has_stopped else last_line(ANOTHER_RANK_LOST, error, folder)


def last_line(message: str, error: Exception, folder: Path | None) -> str:
    """The message and, where a run had begun, what its folder holds of use now."""
    line = f"{Path(sys.argv[0]).name}: error: {truncate(message)}"
    if folder is None or isinstance(error, NothingBegun) or not folder.is_dir():
        return line
    if error.__cause__:  # what a user's reward raised, for example
        path = folder / f"traceback_rank{os.environ.get('RANK', '0')}.txt"
        with suppress(OSError):  # a full disk, which may be the error itself
            path.write_text("".join(traceback.format_exception(error)))
            line += f"; traceback: {truncate(str(path))}"
    saved = saved_checkpoints(folder)
    if saved:
        line += f"; to resume from {saved[-1].name}, give the same command with --resume latest"
    return line
