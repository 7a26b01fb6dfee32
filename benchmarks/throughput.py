"""A script's real step, by phase: seconds, images/s, FLOP/s and their share of the matrix rate, peak memory.

    torchrun --standalone benchmarks/throughput.py flow_grpo.py --rollout local
    torchrun --standalone benchmarks/throughput.py mix_grpo.py --out mix.json --model scratch/sd35m --dtype bfloat16

What comes after the script are its own options, whose defaults here are four steps and an evaluation of a micro-batch a
rank in two sampling steps. A model of a published size and random weights is made by benchmarks/random_model.py.

The script's own main runs; the first step warms up, and the medians of the others are taken from its metrics.jsonl.
FLOPs are counted, not estimated: every call of the transformer is noted with its shapes, and run again on fake tensors
under torch's counter, forward, or forward and backward where it was called with gradient. What activation checkpointing
computes a second time is not counted, nor are text encoders; the VAE has a line of its own, `decode`, whose seconds are
not among those of `gen`, and whose FLOPs are not among those of `step`. Calls inside a vLLM-Omni engine are in another
process: there it is images x steps x branches, at the trainer's shapes. FLOPs, rates and memory are of rank 0, images
of all ranks. The matrix rate is the best of square matrix products of several sizes, in the run's dtype, on its device
and threads, measured before the first step and after the last; the larger of the two counts. CPU s, the seconds that
the process computes (of gen with its decoding), is less than threads x seconds where others share the cores.

Last comes the share of a step that is spent neither in models (forward, backward, decoding, text encoders), nor in
rewards, nor waiting for the engine. On a GPU these clocks wait for it, so that the last step alone has them, and no
other line is taken from that step. Peak memory is allocated GPU memory or, without a GPU, the process's resident set.
"""

import argparse
import copy
import functools
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.distributed import on_rank_0
from common.engine.client import VLLMEngine
from common.run import friendly_errors
from common.run import run as runs
from common.run.command_line import parse_args

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[1]
PART_OF_A_PHASE = "ref"  # the reference's pass, timed within update_actor: its passes are the outer phase's
# timings that are no part of a step, all of it, or a part of another phase
NOT_OF_A_STEP = ("startup", "testing", "save_checkpoint", "step", PART_OF_A_PHASE)


# ---- the machine -----------------------------------------------------------------------------------------------------
def wait_for_gpu():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matrix_rate(dtype):
    """FLOP/s of the fastest square matrix product of several sizes, here and now."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    best = 0.0
    for n in (2048, 4096, 8192) if on_gpu else (512, 1024, 2048):
        a = torch.randn(n, n, device=device).to(dtype)
        b = torch.randn(n, n, device=device).to(dtype)
        a @ b
        products = 20 if on_gpu else 1  # in one go, as a launch takes its time
        for _ in range(5):
            wait_for_gpu()
            began = time.perf_counter()
            for _ in range(products):
                a @ b
            wait_for_gpu()
            best = max(best, products * 2 * n**3 / (time.perf_counter() - began))
    if on_gpu:
        del a, b
        torch.cuda.empty_cache()
    return best


def peak_memory_gb():
    """The peak since the last call: allocated on the GPU, and reserved; or resident on the host, twice."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 1e9
        reserved = torch.cuda.max_memory_reserved() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return peak, reserved
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from 0 again (proc(5))
    return peak, peak


def describe_machine():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    processor = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t: ")
    return f"{processor}, {torch.get_num_threads()} threads"


# ---- FLOPs -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TensorLike:
    """What the FLOPs of a call depend on."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def shapes_of(call):
    """The (args, kwargs) of a call with a TensorLike in place of each tensor."""
    return tree_map(lambda leaf: TensorLike(tuple(leaf.shape), leaf.dtype) if torch.is_tensor(leaf) else leaf, call)


def num_images(call):
    """Images of a transformer's call: rows of its first argument, or items of a list."""
    args, kwargs = call
    first = [*args, *kwargs.values()][0]
    return first.shape[0] if isinstance(first, TensorLike) else len(first)


def fake_copy(module, dtype, lora_config=None):
    """A copy of a diffusers model without its weights, and the mode to call it in.

    With a LoRA that alone asks for a gradient, without one all does.
    """
    kind = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("diffusers."))  # FSDP's come first
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        bare = kind.from_config(module.config)
        if lora_config:
            bare.add_adapter(lora_config, "default")
    torch.set_default_dtype(torch.float32)
    for name, parameter in bare.named_parameters():
        parameter.requires_grad_(lora_config is None or "lora_" in name)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        return copy.deepcopy(bare), mode


def count_flops(function, mode, call, with_backward=False):
    """FLOPs of function(*args, **kwargs), and of its backward pass, at the shapes of `call`."""
    counter = FlopCounterMode(display=False)
    with mode, torch.device("meta"), counter, torch.set_grad_enabled(with_backward):
        is_shape = lambda leaf: isinstance(leaf, TensorLike)
        make = lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype) if is_shape(leaf) else leaf
        args, kwargs = tree_map(make, call)
        outputs = function(*args, **kwargs)
        if with_backward:
            sum(output.float().sum() for output in tree_leaves(outputs) if torch.is_tensor(output)).backward()
    return counter.get_total_flops()


# ---- what a step does ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pass:
    """A call of the transformer."""

    shapes: str  # key of Meter.calls
    with_gradient: bool
    with_lora: bool


class Meter:
    """Notes, while a script's main runs, what its steps do; `install` puts it in."""

    def __init__(self, num_steps):
        self.on_gpu = torch.cuda.is_available()
        self.last_step = num_steps
        self.step = None  # None outside of training
        self.phase = "start"
        self.calls = {}  # text: (args, kwargs) as shapes, of the transformer
        self.passes = defaultdict(Counter)  # (step, phase): {Pass: times}
        self.engine_images = Counter()  # (step, phase): images x sampling steps x branches of guidance in an engine
        self.decodes = Counter()  # text of a VAE's call, in one step: times
        self.decode_calls = {}
        self.decode_s = Counter()  # step: seconds
        self.cpu_s = Counter()  # (step, phase): seconds that this process computes, on all its threads
        self.intervals = []  # (kind, began, ended), of the step so far
        self.shares = []  # of each clocked step: {kind: share}
        self.memory_gb = {}  # phase: peak
        self.reserved_gb = 0.0
        self.device_gb = 0.0  # in use on the GPU after a phase, by all processes
        self.matrix_rates = []

    def measured_steps(self):
        """After the one that warms up; on a GPU without the last, whose clocks wait for it."""
        return range(2, self.last_step if self.on_gpu else self.last_step + 1)

    def is_clocked(self):
        in_training = self.step is not None and self.step > 1 and self.phase not in NOT_OF_A_STEP
        return in_training and (self.step == self.last_step or not self.on_gpu)

    @contextmanager
    def clock(self, kind):
        """Note the interval of the block as one of `kind`."""
        if not self.is_clocked():
            yield
            return
        wait_for_gpu()
        began = time.perf_counter()
        yield
        wait_for_gpu()
        self.intervals.append((kind, began, time.perf_counter()))

    def clocked(self, kind, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            with self.clock(kind):
                return function(*args, **kwargs)

        return call

    def note_memory(self):
        peak, reserved = peak_memory_gb()
        self.memory_gb[self.phase] = max(peak, self.memory_gb.get(self.phase, 0.0))
        self.reserved_gb = max(reserved, self.reserved_gb)
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info()
            self.device_gb = max((total - free) / 1e9, self.device_gb)

    def note_shares(self, step_s):
        """The step's shares: what is hidden behind the models or the engine is not counted twice."""
        so_far = 0.0
        shares = {}
        for kinds in (["models"], ["models", "engine"], ["models", "engine", "rewards"]):
            share = covered([(began, ended) for kind, began, ended in self.intervals if kind in kinds]) / step_s
            shares[kinds[-1]] = share - so_far
            so_far = share
        self.shares.append(shares | {"neither": 1 - so_far})

    # ---- where it is put in
    def install(self, script, inputs, dtype):
        self._install_in_run(dtype)
        load_policy = script.load_policy

        def load_and_watch(*args):
            model, parameters = load_policy(*args)
            self._install_in_model(model)
            return model, parameters

        script.load_policy = load_and_watch
        for name, reward in inputs.rewards.items():
            inputs.rewards[name] = self.clocked("rewards", reward)
        torch.Tensor.backward = self.clocked("models", torch.Tensor.backward)
        generate = VLLMEngine.generate

        def generate_and_note(engine, request, *args, **kwargs):
            branches = 1 if request.negative_conditioning is None else 2
            passes = len(request.seeds) * len(request.timesteps) * branches
            self.engine_images[self.step, self.phase] += passes
            with self.clock("engine"):
                return generate(engine, request, *args, **kwargs)

        VLLMEngine.generate = generate_and_note

    def _install_in_run(self, dtype):
        timed = runs.Run.timed
        begin_step = runs.Run.begin_step
        write = runs.Run.log
        close = runs.Run.close

        @contextmanager
        def timed_and_noted(run, name, **options):
            if name == PART_OF_A_PHASE:
                with timed(run, name, **options):
                    yield
                return
            self.note_memory()  # of what came before
            outer = self.phase
            self.phase = name
            began = time.process_time()
            with timed(run, name, **options):
                yield
            self.cpu_s[self.step, name] += time.process_time() - began
            self.note_memory()
            self.phase = "between" if outer == "start" else outer

        def begin_step_and_note(run, step, *args):
            if self.step is None:
                self.matrix_rates.append(matrix_rate(dtype))
            self.step = step
            begin_step(run, step, *args)

        def write_and_note(run, *args, **kwargs):
            if self.is_clocked():
                self.note_shares(time.perf_counter() - run._clock._step_began - run._clock.seconds.get("testing", 0.0))
            self.intervals.clear()
            write(run, *args, **kwargs)

        def close_and_note(run, *args):
            self.step = None
            self.matrix_rates.append(matrix_rate(dtype))
            close(run, *args)

        runs.Run.timed = timed_and_noted
        runs.Run.begin_step = begin_step_and_note
        runs.Run.log = write_and_note
        runs.Run.close = close_and_note

    def _install_in_model(self, model):
        self.model = model
        for transformer in dict.fromkeys(model.policies.values()):
            self._install_in_transformer(transformer)
        model.encode_prompts = self.clocked("models", model.encode_prompts)
        decode = model.decode
        decode_by_vae = model.pipe.vae.decode

        def decode_and_time(*args):
            wait_for_gpu()
            began = time.perf_counter()
            with self.clock("models"):
                images = decode(*args)
            if self.phase != "testing":
                self.decode_s[self.step] += time.perf_counter() - began
            return images

        def decode_and_note(*args, **kwargs):
            if self.step == 1 and self.phase != "testing":
                call = shapes_of((args, kwargs))
                self.decode_calls[repr(call)] = call
                self.decodes[repr(call)] += 1
            return decode_by_vae(*args, **kwargs)

        model.decode = decode_and_time
        model.pipe.vae.decode = decode_and_note

    def _install_in_transformer(self, transformer):
        lora_layer = next((m for m in transformer.modules() if hasattr(m, "lora_A")), None)
        open_clocks = []

        def before(module, args, kwargs):
            call = shapes_of((args, kwargs))
            with_lora = lora_layer is not None and not lora_layer.disable_adapters
            self.calls[repr(call)] = call
            self.passes[self.step, self.phase][Pass(repr(call), torch.is_grad_enabled(), with_lora)] += 1
            open_clocks.append(self.clock("models"))
            open_clocks[-1].__enter__()

        def after(module, args, output):
            open_clocks.pop().__exit__(None, None, None)

        transformer.register_forward_pre_hook(before, with_kwargs=True)
        transformer.register_forward_hook(after)

    # ---- what comes of it
    def flops(self, dtype):
        """{(step, phase): FLOPs of the transformer}, and those of the VAE in a step."""
        transformer = self.model.transformer
        lora_config = transformer.peft_config["default"] if self.model.is_lora else None
        counted = {}

        def count(one):
            if one not in counted:
                config = lora_config if one.with_lora else None
                copied, mode = fake_copy(transformer, dtype, config)
                counted[one] = count_flops(copied, mode, self.calls[one.shapes], one.with_gradient)
            return counted[one]

        totals = Counter()
        for key, passes in self.passes.items():
            totals[key] += sum(times * count(one) for one, times in passes.items())
        for key, images in self.engine_images.items():
            call = next(one.shapes for passes in self.passes.values() for one in passes)
            without_gradient = Pass(call, with_gradient=False, with_lora=self.model.is_lora)
            totals[key] += images * count(without_gradient) / num_images(self.calls[call])
        vae, mode = fake_copy(self.model.pipe.vae, self.model.pipe.vae.dtype)
        of_vae = [times * count_flops(vae.decode, mode, self.decode_calls[key]) for key, times in self.decodes.items()]
        return totals, sum(of_vae)

    def image_passes(self, step):
        """{phase: {"forward": images, "forward and backward": images}} of a step, a branch of guidance an image."""
        table = defaultdict(Counter)
        for (at, phase), passes in self.passes.items():
            if at != step or phase in NOT_OF_A_STEP:
                continue
            for one, times in passes.items():
                kind = "forward and backward" if one.with_gradient else "forward"
                table[phase][kind] += times * num_images(self.calls[one.shapes])
        for (at, phase), images in self.engine_images.items():
            if at == step and phase not in NOT_OF_A_STEP:
                table[phase]["forward"] += images
        return table


def covered(intervals):
    """Seconds of the union of intervals (began, ended)."""
    total = 0.0
    reached = -math.inf
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, reached))
        reached = max(ended, reached)
    return total


# ---- the report ------------------------------------------------------------------------------------------------------
def measured_rows(meter, folder):
    """The lines of a run's metrics.jsonl that count. The program ends where there are none, as a signal stopped it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["training/global_step"] in meter.measured_steps()]
    if not measured:
        last = rows[-1]["training/global_step"] if rows else 0
        raise SystemExit(f"throughput.py: error: the run stopped after step {last}: no step that counts was finished")
    return measured


def summarize(meter, folder, args, command):
    """The figures of a run, for JSON."""
    rows = measured_rows(meter, folder)
    steps = [row["training/global_step"] for row in rows]
    images = round(rows[0]["perf/throughput"] * rows[0]["timing_s/step"]) * int(os.environ["WORLD_SIZE"])
    flops, vae_flops = meter.flops(getattr(torch, args.dtype))
    rate = max(meter.matrix_rates)
    names = [name.removeprefix("timing_s/") for name in rows[0] if name.startswith("timing_s/")]
    names = [name for name in names if "/" not in name]  # without the slowest rank's
    phases = {}
    for name in [name for name in names if name not in NOT_OF_A_STEP] + ["step"]:
        seconds = statistics.median(row[f"timing_s/{name}"] for row in rows)
        if name == "step" and vae_flops:
            phases["decode"] = {
                "cpu_s": 0.0,  # is in gen's
                "s": statistics.median(meter.decode_s[step] for step in steps),
                "tflop": vae_flops / 1e12,
                "peak_gb": meter.memory_gb["gen"],
            }
            phases["gen"]["s"] -= phases["decode"]["s"]
        wanted = set(names) - set(NOT_OF_A_STEP) if name == "step" else {name}
        keys = [key for key in flops if key[0] in steps and key[1] in wanted]
        phases[name] = {
            "s": seconds,
            "cpu_s": statistics.median(meter.cpu_s[step, name] for step in steps),
            "tflop": sum(flops[key] for key in keys) / len(steps) / 1e12,
            "peak_gb": max(meter.memory_gb.values()) if name == "step" else meter.memory_gb[name],
        }
    phases["step"]["cpu_s"] = sum(phase["cpu_s"] for phase in phases.values())
    for phase in phases.values():
        phase["images_per_s"] = images / phase["s"] if phase["s"] else math.inf
        phase["tflop_per_s"] = phase["tflop"] / phase["s"] if phase["s"] else 0.0
        phase["share_of_matrix_rate"] = phase["tflop_per_s"] * 1e12 / rate
    shares = {}  # of a run on a GPU that was stopped: its last step would have had the clocks
    if meter.shares:
        shares = {kind: statistics.median(step[kind] for step in meter.shares) for kind in meter.shares[0]}
    git = subprocess.run("git rev-parse --short HEAD", shell=True, cwd=ROOT, capture_output=True, text=True)
    return {
        "command": command,
        "commit": git.stdout.strip() or "unknown",
        "machine": describe_machine(),
        "torch": torch.__version__,
        "ranks": int(os.environ["WORLD_SIZE"]),
        "images": images,
        "steps": len(steps),
        "matrix_tflop_per_s": [measured / 1e12 for measured in meter.matrix_rates],
        "phases": phases,
        "image_passes": meter.image_passes(steps[-1]),
        "shares": shares,
        "peak_gb": max(meter.memory_gb.values()),
        "peak_gb_by_phase": meter.memory_gb,
        "peak_reserved_gb": meter.reserved_gb,
        "device_gb": meter.device_gb,
    }


def as_table(figures):
    """The figures as Markdown."""
    before, after = figures["matrix_tflop_per_s"]
    lines = [
        f"    {figures['command']}",
        "",
        f"{figures['machine']}, torch {figures['torch']}, {figures['ranks']} ranks, commit {figures['commit']};",
        f"medians of {figures['steps']} steps of {figures['images']} images. Matrix rate: {before:.3g} TFLOP/s before, "
        f"{after:.3g} after.",
        "",
        "| phase | s | CPU s | images/s | TFLOP | TFLOP/s | of the matrix rate | peak GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, phase in figures["phases"].items():
        rate = f"{phase['tflop']:.4g} | {phase['tflop_per_s']:.3g} | {phase['share_of_matrix_rate']:.1%}"
        if not phase["tflop"]:
            rate = "- | - | -"
        if phase["s"] < 5e-4:
            continue
        per_second = f"{phase['images_per_s']:.3g}"
        cpu = f"{phase['cpu_s']:.3f}" if phase["cpu_s"] else "-"
        lines.append(f"| {name} | {phase['s']:.3f} | {cpu} | {per_second} | {rate} | {phase['peak_gb']:.2f} |")
    shares = [f"{kind} {share:.1%}" for kind, share in figures["shares"].items()]
    if shares:
        lines += ["", f"Shares of a step: {', '.join(shares)}."]
    if figures["device_gb"]:
        reserved = f"{figures['peak_reserved_gb']:.1f} GB reserved by rank 0's process"
        lines.append(f"At most {reserved}, {figures['device_gb']:.1f} GB in use on its GPU after a phase.")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", metavar="SCRIPT", help="flow_grpo.py, say")
    parser.add_argument("--out", type=Path, help="write the figures there, too, as JSON")
    ours, options = parser.parse_known_args()
    script = importlib.import_module(ours.script.removesuffix(".py"))
    defaults = ["--name", f"throughput-{script.__name__}", "--num_steps", "4", "--eval_every", "1000000"]
    defaults += ["--eval_num_inference_steps", "2"]
    with friendly_errors():
        args = script.check(parse_args(script.Args, __doc__, [*defaults, *options]))  # the last one of an option counts
        if args.num_steps < 3:
            raise ValueError(f"--num_steps {args.num_steps}: must be at least 3: one warms up, one is for the clocks")
        # a micro-batch a rank: a block that has been compiled for one size is compiled for any at the next
        max_prompts = args.max_prompts or args.micro_batch_size * int(os.environ["WORLD_SIZE"])
        args = replace(args, max_prompts=max_prompts)
        inputs = script.prepare(args)
        meter = Meter(args.num_steps)
        meter.install(script, inputs, getattr(torch, args.dtype))
        script.main(args, inputs)
        if on_rank_0():
            command = " ".join(["benchmarks/throughput.py", ours.script, *options])
            figures = summarize(meter, Path("runs") / args.name, args, command)
            print(as_table(figures))
            if ours.out:
                ours.out.write_text(json.dumps(figures, indent=1) + "\n")
        meter.model = None


if __name__ == "__main__":
    main()
