"""The clock of a run: seconds by phase, and the speeds, memory peaks and traces that are measured beside them."""

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common.distributed import gather_objects
from common.optional import optional_part, require_part
from common.process import print_message
from common.workload import Workload

import torch
import torch.distributed as dist

# Of a step of Stable Diffusion 3.5 medium's size on an H100 (docs/lab/performance.md)
COMPILED_SPEEDUP = 1.74
LONG_RUN_S = 1800.0


class Clock:
    """Seconds of every phase on this rank, since the last line of metrics."""

    def __init__(self, num_images: int, folder: Path, profile_steps: Sequence[int] = ()) -> None:
        """num_images: of a training step, over all ranks; 0: not known. Steps of `profile_steps` are traced to
        `folder`."""
        self.num_images = num_images
        self.folder = folder
        self.profile_steps = profile_steps
        self.seconds: dict[str, float] = {}  # by phase
        self.longest_step_s = 0.0
        self._per_image: set[str] = set()  # phases whose milliseconds per image are logged
        self._mfu_phases: dict[str, str] = {}  # name of perf/mfu/<name> -> its phase
        self._utilisation: Any = None  # common/run/utilisation.py's, once `count_flops` is called
        self._created: float | None = time.perf_counter()  # until the first phase: the time before it is the startup
        self._device_memory_gb = 0.0  # the most that was in use on the GPU, by any process, since the last line
        self._step_began: float | None = None  # perf_counter at the start of a training step, until its line
        self._last_step_began = time.perf_counter()  # the same, but kept beyond that
        self._trace = ExitStack()  # holds the profiler of the current training step

    def count_flops(self, options: Mapping[str, Any], workload: Workload) -> None:
        """From now on log perf/mfu; not where common/run/utilisation.py or common/plan/ is not there."""
        try:
            for part in ("run.utilisation", "plan"):
                require_part(part, "perf/mfu is not logged")
        except ValueError as error:
            print_message(str(error))
            return
        self._utilisation = optional_part("run.utilisation", "perf/mfu").Utilisation(options, workload)

    @contextmanager
    def timed(self, name: str, *, per_image: bool, mfu: str | None) -> Iterator[None]:
        """Add the block's seconds to timing_s/<name>, to the end of the GPU's work. The time before the first block is
        startup. per_image and mfu: as `Run.timed` has them."""
        if per_image:
            self._per_image.add(name)
        if mfu:
            self._mfu_phases[mfu] = name
        began = time.perf_counter()
        if self._created is not None:
            self.seconds["startup"] = began - self._created
            self._created = None
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # of all processes on this GPU, the engine among them
            self._device_memory_gb = max(self._device_memory_gb, (total - free) / 1e9)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def begin_step(self, step: int) -> None:
        """Start the clock of a training step and, where one was asked for, its profiler trace."""
        self._trace.close()  # writes the previous step's trace
        if self.profile_steps:
            profiling = optional_part("run.profiling", "--profile_steps")
            self._trace.enter_context(profiling.profiled_step(self.folder, step, self.profile_steps))
        self._step_began = self._last_step_began = time.perf_counter()

    def end_step(self) -> None:
        """Stop the clock of a training step, if one runs; its evaluation's seconds are not its own."""
        if self._step_began is not None:
            self.seconds["step"] = time.perf_counter() - self._step_began - self.seconds.get("testing", 0.0)
            self._step_began = None

    def longest_step(self) -> float:
        """Seconds of the longest training step so far, with its evaluation and its checkpoint."""
        self.longest_step_s = max(self.longest_step_s, time.perf_counter() - self._last_step_began)
        return self.longest_step_s

    def close(self) -> None:
        """Write the last step's trace."""
        self._trace.close()

    def metrics(self, step: int) -> dict[str, float]:
        """Seconds by phase, and memory peaks; for a training step also milliseconds per image, images per second and
        rank, and perf/mfu where it is counted.

        Of several ranks also each phase's slowest one, and its seconds. A collective.
        """
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        if torch.cuda.is_available():  # of this process, and of all on its GPU
            peaks = {"perf/max_memory_gb": torch.cuda.max_memory_allocated() / 1e9}
            peaks["perf/max_device_memory_gb"] = self._device_memory_gb
            self._device_memory_gb = 0.0
            torch.cuda.reset_peak_memory_stats()
        else:  # of this process on the host; Linux counts in kB
            peaks = {"perf/max_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
        metrics |= peaks
        if dist.is_initialized() and dist.get_world_size() > 1:
            metrics |= over_ranks(gather_objects((self.seconds, peaks)))
        if "step" not in self.seconds or not self.num_images:
            return metrics
        for name in self.seconds:
            if name in self._per_image:
                metrics[f"timing_per_image_ms/{name}"] = 1000 * self.seconds[name] / self.num_images
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        metrics["perf/time_per_step"] = self.seconds["step"]
        metrics["perf/throughput"] = self.num_images / self.seconds["step"] / world_size
        metrics["perf/total_num_images"] = step * self.num_images
        if self._utilisation:
            seconds = {name: self.seconds.get(phase, 0.0) for name, phase in self._mfu_phases.items()}
            metrics |= self._utilisation.metrics(seconds)
        return metrics


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


def compile_hint(step_s: float, num_steps: int) -> str | None:
    """A line on what --train_with compile would save of that many more steps; None where they take half an hour or
    less.

    step_s: seconds of a step of an eager run on a GPU.
    """
    left_s = step_s * num_steps
    if left_s <= LONG_RUN_S:
        return None
    saved_s = left_s * (1 - 1 / COMPILED_SPEEDUP)
    return (
        f"{num_steps} more steps take {left_s / 3600:.1f} h, of which --train_with compile would save "
        f"{saved_s / 3600:.1f} h: on an H100 it made steps of Stable Diffusion 3.5 medium's size {COMPILED_SPEEDUP} "
        "times as fast"
    )
