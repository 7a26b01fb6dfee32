"""The run folder runs/<name>: options, source, metrics, pictures, images and weights; a kill loses none of them."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

from common.checkpoints import check_unchanged
from common.distributed import gather_objects_on_rank_0, on_rank_0
from common.errors import RunError
from common.files import atomic_file, writing
from common.lock import lock_run
from common.pictures import WATCHED, as_one_picture, drawn_metrics, plot_curves, save_grid, save_png
from common.policy import tensors_on_rank_0
from common.watch import read_stop_rules

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tqdm import tqdm


def create_run_folder(folder, config, script, checkpoint=None):
    """Make `folder`, with args.json (the `recorded` options, the command, the git hash) and a copy of the script.

    Where the run in it goes on from `checkpoint`, these stand beside the first ones, under the checkpoint's name. Rank
    0 does it, and locks the folder first.

    Raises:
        RunError: another process is writing to the folder, or has just written to it, or it cannot be written.
    """
    folder = Path(folder)
    if not on_rank_0():
        return
    with writing(folder):
        lock_run(folder)
        check_unchanged(folder, checkpoint)
        suffix = ""
        if checkpoint and (folder / "args.json").exists():
            suffix = f"_{Path(checkpoint).stem}"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("traceback_rank*.txt"):  # of what ended the run then
            old.unlink()
        # by a shell, which leaves the hash out where there is no git, instead of raising
        git = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(script).parent, capture_output=True, text=True)
        record = {"command": " ".join(sys.argv), "git_hash": git.stdout.strip() or None, "args": config}
        (folder / f"args{suffix}.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
        shutil.copy(script, folder / f"source{suffix}.py")


# ---- metrics ---------------------------------------------------------------------------------------------------------
class RunLog:
    """The run's clock, progress bar and metrics: a JSON line a step in metrics.jsonl, pictures after an evaluation.

        log = RunLog(folder, num_images=256)
        for step in log.steps(range(1, 31)):
            with log.timed("gen"):
                ...
            log.write(step, {"actor/loss": loss})
        log.close()

    Every rank has one, for its own clock; rank 0 alone shows and writes.
    track: to wandb, too, with the options `config`. num_images: of a step, over all ranks; what speeds are divided by.
    profile_steps: steps of which a torch profiler trace is written, trace_STEP.json.
    """

    def __init__(self, folder, track=False, config=None, num_images=0, profile_steps=()):
        self.folder = Path(folder)
        self.writes = on_rank_0()
        self.num_images = num_images
        self.profile_steps = profile_steps if self.writes else ()
        self.timing = {}  # seconds of every phase since the last `write`, of this rank
        self.created = time.perf_counter()  # until the first phase is timed: what comes before is the startup
        self.step_began = None  # perf_counter at the start of the step; None outside of `steps`
        self.has_written = False
        self.has_warned = False
        self.bar = None
        self.done = None  # step that was written last, or that the run goes on from; None outside of training
        self.last = None  # step of the run
        self.stop_rules = []
        self.stop_reason = None  # what the last evaluation has told of a rule that it meets
        self.wandb = start_wandb(self.folder, config) if track and self.writes else None

    def steps(self, numbers, stop_if=()):
        """Yield each step of the range `numbers` under a progress bar; a trace is written once its step has ended.

        stop_if: rules (common/watch.py) that evaluations among these steps are held against: see `write`.
        """
        self.stop_rules = read_stop_rules(stop_if)
        self.done = numbers.start - 1
        self.last = numbers.stop - 1
        if numbers:
            self.say(f"training: steps {numbers.start} to {self.last}, of {self.num_images} images each")
        self.bar = tqdm(numbers, initial=self.done, total=self.last, disable=not self.writes or not numbers)
        try:
            for step in self.bar:
                with self._profiled(step):
                    self.step_began = time.perf_counter()
                    yield step
        finally:  # also where the caller's loop breaks
            self.step_began = None

    @contextmanager
    def timed(self, name):
        """Add the block's seconds to timing[name]; waits for the GPU. What came before the first block is `startup`."""
        began = time.perf_counter()
        if self.created is not None:
            self.timing["startup"] = began - self.created
            self.created = None
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - began

    def say(self, line):
        """Print a line, once for all ranks."""
        if self.writes:
            tqdm.write(line)

    def show(self, **metrics):
        """Put numbers beside the progress bar."""
        self.bar.set_postfix({name: f"{value:.3f}" for name, value in metrics.items()})

    def write(self, step, metrics, grid=None):
        """Write the metrics, finite numbers or scalar tensors, and the timing under their names; start a new timing.

        grid: an evaluation's list of (PIL image, caption), for which grid_STEP.png and curves.png are drawn, too.
        A rule of --stop_if that an evaluation of a step meets is written, too, and told in `stop_reason`, on all ranks.
        Of one whose metric this evaluation lacks, a drift that could not be measured, a line says so.

        Raises:
            RunError: naming the metrics that are NaN or infinite, or the folder that could not be written.
        """
        if self.step_began is not None:  # a step of training, whose seconds are without its evaluation
            self.timing["step"] = time.perf_counter() - self.step_began - self.timing.get("testing", 0.0)
            self.done = step
        metrics = metrics | self._speed_metrics(step) | self._met_stop_rules(step, metrics)
        self.timing = {}
        if not self.writes:
            return
        metrics = {name: float(value) for name, value in metrics.items()}
        bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise RunError(f"step {step}: not a finite number: {', '.join(bad)}; is --learning_rate too high?")
        with writing(self.folder):
            if self.has_written and not (self.folder / "metrics.jsonl").exists():
                raise RunError(f"step {step}: {self.folder}/metrics.jsonl, which this run has written, is gone")
            self.has_written = True
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"training/global_step": step, **metrics}) + "\n")
            if grid:
                images, captions = zip(*grid, strict=True)
                save_grid(self.folder / f"grid_{step:04d}.png", images, captions)
                plot_curves(self.folder)
        if metrics.get("critic/rewards/zero_std_ratio") == 1 and not self.has_warned:
            self.has_warned = True
            self.say(f"step {step}: every image scores as the others of its prompt do: nothing is learned from them")
        if grid:
            val = [f"{name} {metrics[name]:.3f}" for name in drawn_metrics([metrics], ("val/", *WATCHED))]
            val += [f"{name} {value:g}" for name, value in metrics.items() if name.endswith("/failed") and value > 0]
            tqdm.write(f"step {step}: {', '.join(val)}")
        if self.wandb:
            self._write_to_wandb(step, metrics, grid)

    def close(self):
        """Say how a training ended that ended well."""
        if self.last is not None:
            self.bar.close()
            if self.stop_reason:
                told = f"stopped after step {self.done} of {self.last}: {self.stop_reason}"
                self.say(f"{told}; without it --resume latest goes on")
            elif self.done < self.last:
                self.say(
                    f"stopped after step {self.done} of {self.last}; --resume latest goes on, with the same command"
                )
            else:
                self.say(
                    f"finished: all {self.done} steps are done; --resume latest goes on, with a larger --num_steps"
                )
        if self.wandb:
            self.wandb.finish()

    def _write_to_wandb(self, step, metrics, grid):
        table = {}
        if grid:
            rows = [[step, caption, self.wandb.Image(image)] for image, caption in grid]
            table["val/images"] = self.wandb.Table(["step", "prompt and score", "image"], rows)
        self.wandb.log(metrics | table, step=step)

    def _met_stop_rules(self, step, metrics):
        """What is written of the rules (of `steps`) that these metrics, where they are of an evaluation, meet."""
        if not any(name.startswith("val/") for name in metrics):
            return {}
        met = []
        for rule in self.stop_rules:
            if rule.metric not in metrics:
                self.say(f"step {step}: --stop_if {rule} cannot end the run: the evaluation lacks {rule.metric}")
            elif rule.holds(float(metrics[rule.metric])):
                met.append(rule)
        if met:
            told = [f"{rule.metric} is {float(metrics[rule.metric]):.4g} (--stop_if {rule})" for rule in met]
            self.stop_reason = ", ".join(told)
        return {f"training/stop_if/{rule}": 1.0 for rule in met}

    def _speed_metrics(self, step):
        """Seconds by phase, and for a step of training also per image and as throughput, images/s per rank."""
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.timing.items()}
        metrics["perf/max_memory_gb"] = max_memory_gb()
        if "step" not in self.timing or not self.num_images:
            return metrics
        for name in ("gen", "reward", "update_actor"):
            if name in self.timing:
                metrics[f"timing_per_image_ms/{name}"] = 1000 * self.timing[name] / self.num_images
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        metrics["perf/time_per_step"] = self.timing["step"]
        metrics["perf/throughput"] = self.num_images / self.timing["step"] / world_size
        metrics["perf/total_num_images"] = step * self.num_images
        return metrics

    def _profiled(self, step):
        """The context of a step: where a trace of it is asked for a torch profiler, else nothing."""
        if step not in self.profile_steps:
            return nullcontext()
        return profiled_step(self.folder / f"trace_{step:04d}.json", step)


def close(engine, log):
    """End the engine, where there is one, and the log."""
    if engine:
        engine.close()
    log.close()


@contextmanager
def profiled_step(path, step):
    """Write a trace of the block, also of one that is left early, for chrome://tracing; in it ProfilerStep#STEP."""
    profiler = torch.profiler.profile(on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)))
    with profiler, torch.profiler.record_function(f"ProfilerStep#{step}"):
        yield


def start_wandb(folder, config):
    """wandb, with a run begun in it or, where `folder` was tracked before, gone on with."""
    import wandb  # slow, and seldom asked for

    known = folder / "wandb_id.txt"
    if not known.exists():
        known.write_text(os.urandom(4).hex())
    run = {"project": "cleanflow", "name": folder.name, "id": known.read_text().strip(), "resume": "allow"}
    wandb.init(**run, dir=folder, config=config)
    return wandb


def max_memory_gb():
    """Peak memory of this process so far: allocated on its GPU or, where there is none, resident on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts in kB


# ---- images and weights ----------------------------------------------------------------------------------------------
def save_samples(folder, places, images, records, shown=32):
    """Write a rank's images as folder/PLACE.png, and rank 0 a line for each in samples.jsonl: its file, and its record.

    places (B,): the images' numbers over all ranks; one that a rank has only to have as many as the others is left to
    the rank whose turn it is. images: B PIL images, or B videos, lists of PIL frames, each of which becomes one
    animated PNG. records: B dicts {"prompt": ..., "seed": ..., "<reward>": score ...}, of which the prompt and all
    scores are the caption, several scores on a line of their own. A collective: rank 0 gets the first `shown` as (PIL
    image, caption); the others None.
    """
    folder = Path(folder)
    samples = {}  # by place: its record and, of those shown, its picture
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for place, image, record in zip(places, images, records, strict=True):
            if place % dist.get_world_size() == dist.get_rank():
                save_png(folder / f"{place:05d}.png", image)
                samples[place] = (record, as_one_picture(image) if place < shown else None)
    parts = gather_objects_on_rank_0(samples)
    if parts is None:
        return None
    by_place = {place: sample for part in parts for place, sample in part.items()}
    lines = []  # of samples.jsonl
    grid = []
    for place, (record, picture) in sorted(by_place.items()):
        lines.append(json.dumps({"file": f"{place:05d}.png", **record}) + "\n")
        if picture:
            scores = {name: score for name, score in record.items() if name not in ("prompt", "seed")}
            told = [f"{name} failed" if score is None else f"{name} {score:.2f}" for name, score in scores.items()]
            prompt = " ".join(record["prompt"].split())
            line_of_scores = "  ".join(told)
            separator = "\n" if len(told) > 1 else "  "
            grid.append((picture, f"{prompt}{separator}{line_of_scores}".strip()))
    with atomic_file(folder / "samples.jsonl") as temporary:
        temporary.write_text("".join(lines))
    return grid


def save_policy(folder, model, name):
    """Write policy `name` of the model as diffusers loads it. A collective."""
    save_weights(folder, model.pipe, *tensors_on_rank_0(model, name))


def save_if_best(folder, model, metrics, best_score):
    """Save the evaluated policy as best_adapter if its weighted total is the best so far. Returns the best so far."""
    score = metrics["val/weighted_total/mean"].item()
    if score > best_score:
        save_policy(folder / "best_adapter", model, model.evaluated_policy)
    return max(score, best_score)


def save_weights(folder, pipe, tensors, lora_config):
    """Write a policy as diffusers loads it: a LoRA, or full weights where lora_config is None. Rank 0 writes.

    A LoRA is for `pipe.load_lora_weights(folder)`. Its B matrices are written times alpha / rank, with alpha = rank in
    the metadata: a loader that ignores metadata gives it the same strength. Full weights are for the transformer's
    `from_pretrained(folder)`. tensors: keys relative to the transformer. Equal policies give equal bytes.
    """
    if not on_rank_0():
        return
    folder = Path(folder)
    if lora_config is None:
        with atomic_file(folder / "diffusion_pytorch_model.safetensors") as temporary:
            pipe.transformer.save_config(folder)
            save_file(tensors, temporary)
            temporary.chmod(0o644)  # safetensors lets only its owner read
        return
    scale = lora_config.lora_alpha / lora_config.r
    tensors = {name: tensor * scale if ".lora_B." in name else tensor for name, tensor in tensors.items()}
    settings = lora_config.to_dict() | {"lora_alpha": lora_config.r}
    for name, value in settings.items():
        if isinstance(value, set):  # of module names, which else stand in another order in every process
            settings[name] = sorted(value)
    with atomic_file(folder / "pytorch_lora_weights.safetensors") as temporary:
        pipe.save_lora_weights(
            folder,
            transformer_lora_layers=tensors,
            weight_name=temporary.name,
            transformer_lora_adapter_metadata=settings,
        )
        sort_metadata(temporary)
        temporary.chmod(0o644)


def sort_metadata(path):
    """Put the metadata in a safetensors file's header, whose entries it writes in a random order, by their names."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")  # bytes of the header, JSON that spaces fill up
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        file.seek(8)
        file.write(text.encode().ljust(size))  # the same entries, so that it takes the same room
