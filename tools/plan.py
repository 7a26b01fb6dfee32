"""Memory by phase, time and bytes of a run, before anything loads: does it fit, and if not, what to change.

    python -m tools.plan h100-80 flow_grpo.py --model stabilityai/stable-diffusion-3.5-medium --image_size 512 512
    python -m tools.plan h100-80 flow_grpo.py --ranks 16 --ranks_per_node 8 OPTIONS
    python -m tools.plan a100-40 recipes/flux1_dev_1x40gb.sh OPTIONS

The options are those of the script, which may be one of ours or a fork of yours, or those added to a recipe. Nothing
loads: no weights, no reward and no engine, and no GPU is needed. It exits with 1, and one line on what to change, where
the run does not fit. docs/models.md says what is counted and what is assumed.
"""

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from common.cpu import repair_torchvision
from common.errors import RunError, error_prefix, reason, truncate
from common.files import count_sources, read_prompts
from common.models import Family, find_family
from common.options import SharedArgs
from common.plan import Blueprint, measure, planned_run, work
from common.plan.devices import DEVICES
from common.plan.needs import (
    FREE,
    GB,
    PHASES,
    Costs,
    Part,
    PlannedRun,
    Work,
    choose_options,
    describe,
    latent_bytes,
    memory_parts,
    phase_sums,
)
from common.rewards import find_reward
from common.run import parse_args
from common.run.checks import check_adam_bits, check_lora_modules
from common.user_code import code_file
from common.weights import LoRA, check_ranks_per_image, make_lora
from common.weights.base_weights import check_base_weights

import torch

# Share of the matrix rate that a step of SD3.5-medium's size reached on an H100, eager and compiled; FLUX.1-dev's and
# Qwen-Image's sizes were faster by 1.3 to 1.6 times (benchmarks/gpu/README.md)
UTILISATION = 0.2
COMPILED_UTILISATION = 0.35


class Memory(NamedTuple):
    """One of the memories of a run, and what takes it."""

    title: str
    owner: str
    parts: list[Part]
    limit_gb: float
    free: float = FREE  # share of it that must stay free
    may_be_elsewhere: bool = False  # the limit is this machine's, and the run may be meant for another one

    @property
    def peak_phase(self) -> str:
        sums = phase_sums(self.parts)
        return max(PHASES, key=lambda phase: sums[phase])

    @property
    def peak_gb(self) -> float:
        return phase_sums(self.parts)[self.peak_phase] / GB


# ---- the run ---------------------------------------------------------------------------------------------------------
def load_script(path: str) -> ModuleType:
    """A training script as a module, from its file, wherever that is. Nothing runs.

    Raises:
        ValueError: there is no such file, it cannot be imported, or it is not built like our scripts.
    """
    file = Path(path)
    name = f"planned_{file.stem}"  # a name that no module of the project has
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"{path}: no such script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and type hints look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file does at import
        told = f"{type(error).__name__}: {reason(error)}"
        if isinstance(error, ImportError) and "relative import" in str(error):
            told += "; import it absolutely, as the tools load a script by its path"
        raise ValueError(truncate(f"{path}: cannot be imported: {told}")) from error
    for needed in ("Args", "check", "workload"):
        if not hasattr(module, needed):
            raise ValueError(f"{path}: has no {needed}; a script that can be planned has Args, check and workload")
    return module


def plan(device: str, script: str, argv: Sequence[str], ranks: int = 1, ranks_per_node: int = 1) -> None:
    """Print what the run of a script with the options `argv` needs.

    Raises:
        ValueError: the script or an option is wrong, or the run does not fit.
    """
    if ranks < 1 or ranks_per_node < 1 or ranks % ranks_per_node:
        raise ValueError(f"--ranks {ranks}: must be a multiple of --ranks_per_node {ranks_per_node}, and above 0")
    # as torchrun sets them: the checks of the options ask whether images divide by ranks, and ranks by copies
    os.environ["WORLD_SIZE"] = str(ranks)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    sys.argv[0] = script  # whose checkpoint --resume may name
    module = load_script(script)
    args = module.check(parse_args(module.Args, module.__doc__ or "", list(argv)))
    options = vars(args)
    eval_set = read_prompts(args.eval_prompts, max_prompts=args.max_prompts)
    workload = module.workload(args)
    w = planned_run(workload, options, len(eval_set), ranks, ranks_per_node)
    gpu_gb = DEVICES[device].memory_gb
    if gpu_gb is None and not args.micro_batch_size:
        raise ValueError("--micro_batch_size 0: takes what fits on a GPU, and this is a CPU: pass a number")

    height, width = args.image_size
    length = args.max_sequence_length
    family = find_family(
        args.model, height, width, args.num_frames, w.guidance_scale, length, args.family, needs_weights=False
    )
    lora = make_lora(
        family,
        model=args.model,
        path=args.lora_path,
        rank=args.lora_rank,
        alpha=args.lora_alpha,
        target_modules=args.lora_target_modules,
        base_weights=args.base_weights,
    )
    num_sources = check_model(args, w, family, lora)
    with error_prefix(f"--model {args.model}", Exception):  # whatever a library raises over a stranger's configs
        dtype, vae_dtype = getattr(torch, w.dtype), getattr(torch, w.vae_dtype)
        blueprint = Blueprint(family, args.model, lora, dtype, num_sources, vae_dtype, fused_norms=device != "cpu")
    if family.num_sources[1]:
        print(f"counted: {num_sources} picture{'' if num_sources == 1 else 's'} for each record")
    print_uncounted([*args.reward, *args.eval_reward])
    if gpu_gb is not None:  # as a run on these GPUs chooses them
        world = {"ranks": ranks, "ranks_here": ranks_per_node}
        chosen = choose_options(blueprint, workload, options, gpu_gb * GB, **world)
        print(describe(chosen, ranks_per_node))
        w = planned_run(workload, options | chosen, len(eval_set), ranks, ranks_per_node)
    print(disk_line(blueprint, w, options, len(eval_set)))
    report(blueprint, w, device)


def check_model(args: SharedArgs, w: PlannedRun, family: type[Family], lora: LoRA | None) -> int:
    """Refuse what a run would refuse of the options and the model. Returns how many pictures a record has.

    Raises:
        ValueError: naming an option.
    """
    if w.has_engine and not family.has_engine_pipeline(args.model):
        raise ValueError(f"--rollout vllm: {family.__name__} has no engine for this model: pass --rollout local")
    check_base_weights(
        args.base_weights,
        trains_lora=lora is not None,
        rollout=getattr(args, "rollout", "local"),
        shard_ranks=args.shard_ranks,
        train_with=args.train_with,
    )
    check_adam_bits(args.adam_bits, lora is not None, args.train_with)
    check_lora_modules(lora, vars(args))
    # a run with --pairs does not read --train_prompts
    prompts = args.eval_prompts if w.drawn_prompts == 0 else args.train_prompts
    num_sources = count_sources(family.num_sources, prompts[0])
    if num_sources and w.prompt_cache is not None:
        raise ValueError("--prompt_cache: keeps embeddings of texts, and these records have pictures as well")
    check_ranks_per_image(
        args.ranks_per_image,
        family,
        model=args.model,
        image_size=args.image_size,
        num_frames=args.num_frames,
        max_sequence_length=args.max_sequence_length,
        num_sources=num_sources,
        train_with=args.train_with,
        chained_steps=w.chained_steps,
    )
    return num_sources


def disk_line(blueprint: Blueprint, w: PlannedRun, options: dict[str, Any], num_eval_prompts: int) -> str:
    """What the run's folder and --prompt_cache take, in a line. Samples and logs are not counted."""
    averages = sum(policy not in ("default", "reference") for policy in w.policies)
    # fp32: the weights, Adam's two moments of each trained policy, and other policies
    trained = 4 * blueprint.num_trained * (1 + 2 * w.trained_policies + averages)
    adapter = 4 * blueprint.num_trained if blueprint.is_lora else blueprint.dtype.itemsize * blueprint.num_weights
    kept = options["keep_checkpoints"]
    parts = [f"checkpoints {kept} x {size(trained)}", f"adapter/ and best_adapter/ {size(2 * adapter)}"]
    if w.prompt_cache is not None:
        each = blueprint.conditioning_bytes(w.max_sequence_length, w.image_size, w.num_frames)
        if w.drawn_prompts == 0:
            parts.append(f"{w.prompt_cache} at most {size(each)} for each prompt of the pairs")
        else:
            per_step = w.num_prompts * options.get("max_rollouts", 1)
            limit = w.drawn_prompts or options["num_steps"] * per_step
            train_set = read_prompts(options["train_prompts"], shares=options["train_shares"])
            seed = options["seed"] if options["shuffle"] else None
            drawn_set = train_set if options.get("curriculum") else train_set.first_drawn(limit, seed)
            drawn = len(drawn_set) + num_eval_prompts + 1  # and the empty one
            parts.append(f"{w.prompt_cache} at most {size(drawn * each)} for {drawn:,} prompts")
    return f"disk: {', '.join(parts)}"


def print_uncounted(rewards: Iterable[str]) -> None:
    """Say which networks of rewards are not counted. A reward's own file is not imported: that may load a network."""
    yours = [name for name in rewards if code_file(name)]
    networks = [name for name in rewards if name not in yours and hasattr(find_reward(name), "offload")]
    if networks:
        print(f"not counted: the networks of {', '.join(networks)}, whose sizes docs/rewards.md has")
    if yours:
        print(f"not counted: whatever {', '.join(yours)} loads")


# ---- what is printed -------------------------------------------------------------------------------------------------
def report(blueprint: Blueprint, w: PlannedRun, device: str) -> None:
    """Print the tables and, last, a line per memory with its peak.

    Raises:
        ValueError: a memory is too small; after the tables have been printed.
    """
    costs = measure(blueprint, w)
    held = memories(blueprint, w, costs, device)
    for memory in held:
        print("\n".join(memory_table(memory)))
    print("\n".join(work_table(w, costs, device)))
    if w.has_engine:
        pushed, answered = pipe_bytes(blueprint, w)
        print(f"between a rank and its engine, a step: {size(pushed)} pushed, {size(answered)} answered")
    for memory in held:
        print(check_fits(memory, device))


def pipe_bytes(blueprint: Blueprint, w: PlannedRun) -> tuple[int, int]:
    """Bytes that a rank pushes to its engine in a step, and bytes that the engine answers."""
    pixels = 3 * w.image_size[0] * w.image_size[1] * w.num_frames  # a byte per colour
    num_latents = w.sampled_steps + 1 + w.trained_steps  # and the means of the trained steps
    answers = w.images_of_a_rank * (num_latents * latent_bytes(blueprint, w) + pixels)
    return blueprint.dtype.itemsize * blueprint.num_trained, answers


def on_one_memory(parts: Iterable[Part], engine_workers: int) -> list[Part]:
    """The Parts of a run on a CPU: nothing waits elsewhere, nothing is CUDA's, and all memory is the host's."""
    kept = []
    for part in parts:
        # what is "in use" on a GPU has come from the host, where it is counted as waiting; nothing is pinned
        if not part.name.endswith(("CUDA", "in use", "pinned")):
            num_bytes = part.num_bytes * (engine_workers if part.place == "engine" else 1)
            kept.append(part._replace(num_bytes=num_bytes, place="node" if part.place == "node" else "host"))
    return kept


def memories(blueprint: Blueprint, w: PlannedRun, costs: Costs, device: str) -> list[Memory]:
    """The GPU of a rank, the GPU of an engine if it has its own, and the memory of a node, in this order."""
    parts = memory_parts(blueprint, w, costs)
    of_this_machine = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 1)
    limit_gb = DEVICES[device].memory_gb or of_this_machine
    if device == "cpu":
        parts = on_one_memory(parts, w.engine_workers)
    of_device = [part for part in parts if part.place == "device"]
    of_engine = [part for part in parts if part.place == "engine"]
    of_node = []
    for part in parts:
        if part.place == "host":  # each rank's, so that a node has it once per rank
            of_node.append(part._replace(num_bytes=part.num_bytes * w.ranks_here))
        elif part.place == "node":
            of_node.append(part)

    found = []
    if of_device:
        found.append(Memory(f"each of {w.ranks} GPUs, {device}", "a GPU", of_device, limit_gb))
    if of_engine:
        num_gpus = w.ranks * w.engine_workers
        found.append(Memory(f"each of {num_gpus} GPUs of the engines", "an engine's GPU", of_engine, limit_gb))
    node = Memory(f"a node's memory, {w.ranks_here} ranks", "this machine", of_node, of_this_machine, free=0)
    found.append(node._replace(may_be_elsewhere=device != "cpu"))
    return found


def memory_table(memory: Memory) -> list[str]:
    """Lines of a table of Parts, a column per phase, with their sums last: in MB if all of it is below 10 GB."""
    unit, num_bytes, decimals = ("MB", 1e6, 1) if memory.peak_gb < 10 else ("GB", GB, 2)
    lines = [f"{f'{unit} of {memory.title}':46}" + "".join(f"{phase:>9}" for phase in PHASES)]
    for part in memory.parts:
        cell = f"{part.num_bytes / num_bytes:9.{decimals}f}"
        if part.num_bytes and part.phases:
            lines.append(f"  {part.name:44}" + "".join(cell if phase in part.phases else " " * 9 for phase in PHASES))
    sums = phase_sums(memory.parts)
    lines.append(f"  {'all':44}" + "".join(f"{sums[phase] / num_bytes:9.{decimals}f}" for phase in PHASES))
    return lines


def size(num_bytes: float) -> str:
    """Bytes as a reader of the plan wants them: 7.25 GB, and below a tenth of a GB 0.3 MB."""
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= 0.1 * GB else f"{num_bytes / 1e6:.1f} MB"


def check_fits(memory: Memory, device: str) -> str:
    """A line on the peak. It warns where this machine is too small, but need not be the one that the run is for.

    Raises:
        ValueError: the peak is above the limit; in a line that names its largest part and how to make it smaller.
    """
    phase = memory.peak_phase
    limit = f"the {memory.limit_gb:g} GB of {memory.owner}"
    is_above = memory.peak_gb > memory.limit_gb * (1 - memory.free)
    if memory.may_be_elsewhere:
        line = f"peak {memory.peak_gb:.2f} GB of a node's memory, in the phase {phase}"
        too_small = f"; this machine has {memory.limit_gb:g} GB: too little, if it is such a node"
        return line + too_small if is_above else line
    if is_above:
        if memory.free:
            limit += ", of which a tenth must stay free"
        largest = max((part for part in memory.parts if phase in part.phases), key=lambda part: part.num_bytes)
        raise ValueError(
            f"{device}: the run needs {memory.peak_gb:.1f} GB of {limit}, in the phase {phase}; "
            f"the largest part is {largest.name}, {largest.num_bytes / GB:.1f} GB: {largest.advice}"
        )
    return f"peak {memory.peak_gb:.2f} GB of {limit}, in the phase {phase}"


def work_table(w: PlannedRun, costs: Costs, device: str) -> list[str]:
    """Lines of FLOPs and, where the device's matrix rate is known, seconds."""
    rate = getattr(DEVICES[device], w.dtype)
    vae_rate = DEVICES[device].bfloat16 if w.vae_dtype == "bfloat16" else DEVICES[device].tf32
    share = COMPILED_UTILISATION if "compile" in w.train_with else UTILISATION
    title = f"a step of a rank, {w.images_of_a_rank} images"
    assumed = f"at {share:.0%} of {rate} TFLOP/s, the VAE at {UTILISATION:.0%} of {vae_rate}" if rate else ""
    phases = work(w, costs)
    evaluation = phases.pop("evaluation")
    whole = Work(sum(each.transformer for each in phases.values()), sum(each.vae for each in phases.values()))
    unit, flops = ("PFLOP", 1e15) if sum(whole) >= 1e15 else ("TFLOP", 1e12)
    lines = [f"{title:46}{unit:>9}{'seconds' if rate else '':>9}  {assumed}"]
    rows = [*phases.items(), ("all", whole), (f"not in a step: an evaluation of {w.num_eval_images}", evaluation)]
    for name, done in rows:
        seconds = ""
        if rate and vae_rate:
            seconds = f"{done.seconds(rate * 1e12 * share, vae_rate * 1e12 * UTILISATION):9.1f}"
        lines.append(f"  {name:44}{sum(done) / flops:9.3f}{seconds}")
    if rate and w.micro_batch_images < 8:
        at_2 = "with 2, an image of SD3.5-medium took 2.15 times as long on an H100"
        lines.append(f"  seconds are those of micro-batches of 8 or more: {at_2}")
    return lines


def plan_recipe(device: str, recipe: Path, options: list[str], ranks: int | None, ranks_per_node: int | None) -> int:
    """Plan the command that a recipe starts, with as many ranks as it starts unless `ranks` says otherwise.

    Returns the exit status.
    """
    if not recipe.is_file():
        sys.exit(f"tools.plan: error: {recipe}: no such file")
    started = re.search(r"LAUNCH:-[^}]*--nproc_per_node (\d+)", recipe.read_text(encoding="utf-8"))
    ranks = ranks or (int(started[1]) if started else 1)
    launch = [sys.executable, "-m", "tools.plan", device, "--ranks", str(ranks)]
    launch += ["--ranks_per_node", str(ranks_per_node or ranks)]
    environment = os.environ | {"LAUNCH": shlex.join(launch)}
    return subprocess.run(["bash", str(recipe), *options], env=environment).returncode


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --rank, say, must not become our --ranks: unknown options are the script's
    )
    parser.add_argument("device", choices=DEVICES, help="what each rank runs on")
    parser.add_argument("script", help="flow_grpo.py or recipes/NAME.sh, for example; its options come behind it")
    parser.add_argument("--ranks", type=int, help="ranks of all nodes (default: a recipe's, otherwise 1)")
    parser.add_argument("--ranks_per_node", type=int, help="ranks of a node (default: all of them)")
    asked, options = parser.parse_known_args(argv)
    if asked.script.endswith(".sh"):
        sys.exit(plan_recipe(asked.device, Path(asked.script), options, asked.ranks, asked.ranks_per_node))
    repair_torchvision()  # before the model's family imports diffusers
    ranks = asked.ranks or 1
    try:
        plan(asked.device, asked.script, options, ranks, asked.ranks_per_node or ranks)
    except (ValueError, RunError) as error:
        sys.exit(f"tools.plan: error: {error}")


if __name__ == "__main__":
    main()
