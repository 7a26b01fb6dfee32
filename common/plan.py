"""--plan: memory by component, seconds a step and bytes to the engine, before anything loads; and what cannot fit.

What is counted and what is assumed is said in the output, and on docs/models.md.
"""

import os
from dataclasses import dataclass, fields
from typing import NamedTuple

from common.blueprint import Blueprint, Cost
from common.distributed import launched_world_size
from common.vae import PIXELS_AT_ONCE

import torch

GB = 1e9
PHASES = ("start", "encode", "rollout", "update", "save")  # what is being done while memory is held
UTILISATION = 0.4  # of the matrix rate
# A process of the trainer and of the engine without a model, in host memory, as on a CPU; and what CUDA, its libraries
# and NCCL take of a GPU for each, which is an assumption
TRAINER_PROCESS = 0.5 * GB
ENGINE_PROCESS = 0.8 * GB
CUDA_PROCESS = 0.8 * GB


class Device(NamedTuple):
    """What runs a rank, and the engine of the rank."""

    memory_gb: float | None  # in 1e9 bytes, of all processes on it; None: as much as this machine has
    bfloat16: float | None  # matrix rate in TFLOP/s; without one no seconds are told
    float32: float | None


# Rates of dense matrix products by NVIDIA's data sheets, of H100 SXM, H200 SXM and A100; of the RTX 4090 by the
# whitepaper on its architecture, with accumulation in fp32. float32 is torch's default, without TF32
DEVICES = {
    "rtx4090": Device(24, 165, 82.6),
    "a100-40": Device(40, 312, 19.5),
    "a100-80": Device(80, 312, 19.5),
    "h100-80": Device(80, 989, 67),
    "h200-141": Device(141, 989, 67),
    "cpu": Device(None, None, None),
}


@dataclass
class Workload:
    """A run as far as memory and time depend on it. Fields that are options have their names and their meaning."""

    num_images: int
    """trained on in a step, over all ranks"""
    sampled_steps: int
    """passes without gradient that make an image of a rollout; 0: none is made"""
    trained_steps: int
    """passes with gradient of an image, in an epoch"""
    policies: tuple[str, ...]
    """that the run has; `default` is trained, `ema` only follows, any other acts once for every trained pass"""
    num_eval_images: int
    """of an evaluation, over all ranks"""
    micro_batch_images: int
    """of a pass of the trainer"""
    trained_guidance: float
    """guidance_scale in those passes"""
    dtype: str = "float32"
    train_with: tuple[str, ...] = ()
    image_size: tuple[int, int] = (512, 512)
    num_frames: int = 1
    max_sequence_length: int = 256
    prompt_cache: str | None = None
    guidance_scale: float = 1.0
    rollout: str = "local"
    rollout_batch_size: int = 1
    engine_sleep: bool = False
    engine_devices: tuple[int, ...] = ()
    engine_tensor_parallel: int = 1
    old_log_prob: str = "rollout"
    num_prompts: int = 1
    epochs_per_rollout: int = 1
    eval_num_inference_steps: int = 1
    ranks: int = 1
    """over all nodes"""
    ranks_here: int = 1
    """of a node"""
    shard_ranks: int = 0
    """that share one copy of the weights; 0: those of a node"""
    gather_for_sampling: bool = True
    acting_epochs: int = 1
    """epochs in which reference and old policy make their passes, each; 1: once a rollout"""

    @property
    def shards(self):
        """Parts that a copy of the weights is in."""
        return self.shard_ranks or self.ranks_here

    @property
    def has_engine(self):
        return self.rollout == "vllm"

    @property
    def engine_batch(self):
        """Images that the engine samples at once."""
        return min(self.rollout_batch_size, self.images_of_a_rank)

    @property
    def images_of_a_rank(self):
        return -(-self.num_images // self.ranks)


class Costs(NamedTuple):
    """Of the passes of a Workload, of one image each."""

    sampling: Cost  # a sampling step
    scoring: Cost  # a trained pass, but without gradient
    training: Cost  # a trained pass
    training_otherwise: Cost  # the same with activation checkpointing, if it is without it, or without
    decoding: Cost  # the VAE's
    decoding_batch: Cost  # of the trainer's images at once


class Part(NamedTuple):
    """What takes memory."""

    name: str
    num_bytes: float
    phases: tuple[str, ...]
    place: str  # device: a rank's GPU; engine: its engine's own; host: each rank's; node: once for all ranks of a node
    advice: str  # what makes it smaller


# ---- what a run needs ------------------------------------------------------------------------------------------------
def measure(blueprint, w):
    """The Costs of a Workload."""
    size = (w.image_size, w.num_frames)
    trained = (*size, w.max_sequence_length, w.trained_guidance)
    checkpointing = "activation_checkpointing" in w.train_with
    sampling = blueprint.velocity(*size, w.max_sequence_length, w.guidance_scale)
    scoring = sampling
    if w.trained_guidance != w.guidance_scale:
        scoring = blueprint.velocity(*trained)
    training = blueprint.velocity(*trained, train=True, checkpointing=checkpointing)
    otherwise = blueprint.velocity(*trained, train=True, checkpointing=not checkpointing)
    decoding = blueprint.decoding(1, *size)
    decoding_batch = blueprint.decoding(w.micro_batch_images, *size)
    return Costs(sampling, scoring, training, otherwise, decoding=decoding, decoding_batch=decoding_batch)


def memory_parts(blueprint, w, costs):
    """The Parts of a Workload on GPUs."""
    weights = weight_parts(blueprint, w)
    engine = engine_parts(blueprint, w, costs) if w.has_engine else []
    return weights + pass_parts(blueprint, w, costs) + engine + waiting_parts(blueprint, w)


def weight_parts(blueprint, w):
    """Weights and what belongs to them: in shards, but for a LoRA's gradients and the buffers."""
    itemsize = blueprint.dtype.itemsize
    is_lora = blueprint.num_trained < blueprint.num_weights
    place = "host" if "cpu_offload" in w.train_with else "device"
    frozen = 0
    if is_lora or "reference" in w.policies:
        frozen = itemsize * blueprint.num_weights / w.shards
    trained = 4 * blueprint.num_trained / w.shards
    averages = [policy for policy in w.policies if policy not in ("default", "reference")]
    advice = "use more ranks, or --train_with cpu_offload"
    if not is_lora:
        advice += ", or train a LoRA (--lora_rank)"
    names = " and ".join(averages)
    held = {
        f"frozen weights, {w.dtype}": frozen,
        "trained weights, float32": trained,
        f"weights of {names}, float32": len(averages) * trained,
    }
    parts = [Part(name, num_bytes, PHASES, place, advice) for name, num_bytes in held.items()]
    parts.append(Part("Adam's two moments, float32", 2 * trained, PHASES[1:], place, advice))
    parts.append(Part("buffers of the transformer", blueprint.buffer_bytes, PHASES, "device", advice))
    if is_lora:  # each rank's own until an optimizer step's last pass
        parts.append(Part("gradients, float32", 4 * blueprint.num_trained, ("update",), "device", advice))
    else:
        two_blocks = 2 * (itemsize + 4) * blueprint.largest_block
        parts.append(Part("gradients, float32", trained, ("update",), place, advice))
        parts.append(Part("gradients that ranks exchange", two_blocks, ("update",), "device", advice))
    return parts


def pass_parts(blueprint, w, costs):
    """What the trainer's own passes take, and what is kept of a rollout."""
    n = w.micro_batch_images
    images = f"{n} image{'s' if n > 1 else ''}"
    advice = "lower --micro_batch_size" if n > 1 else "use smaller images"
    to_train = advice
    if "activation_checkpointing" not in w.train_with:
        to_train += ", or --train_with activation_checkpointing"
    # FSDP gathers the next block while one is at work, from several ranks into a buffer first
    num_blocks = 2 if w.shards == 1 else 3
    gathered = blueprint.dtype.itemsize * (blueprint.outside_blocks + num_blocks * blueprint.largest_block)
    latent_bytes = 4 * torch.Size(blueprint.latent_shape(w.image_size, w.num_frames)).numel()
    kept = w.sampled_steps + 1 + 2 * w.trained_steps  # latents, and the means of two policies
    num_prompts = min(w.num_prompts, w.images_of_a_rank)
    trajectories = kept * latent_bytes * w.images_of_a_rank
    trajectories += num_prompts * blueprint.conditioning_bytes(w.max_sequence_length)
    both = ("rollout", "update")
    keeps_whole = w.gather_for_sampling and "cpu_offload" not in w.train_with and w.shards > 1 and not w.has_engine
    block_by_block = ("update",) if keeps_whole else both
    parts = [
        Part("blocks as FSDP gathers them", gathered, block_by_block, "device", "train in --dtype bfloat16"),
        Part(f"activations of {images}", n * costs.training.peak_bytes, ("update",), "device", to_train),
        Part("trajectories and embeddings", trajectories, both, "device", "use more ranks, or fewer images a step"),
    ]
    if not w.has_engine:
        taken = max(n * costs.sampling.peak_bytes, costs.decoding_batch.peak_bytes)
        parts.append(Part(f"sampling and decoding {images}", taken, ("rollout",), "device", advice))
    if keeps_whole:
        num_gathered = blueprint.num_weights + blueprint.largest_block  # and one in a buffer
        if blueprint.num_trained < blueprint.num_weights:  # the adapters of all policies
            num_gathered += blueprint.num_trained * sum(policy != "reference" for policy in w.policies)
        whole = blueprint.dtype.itemsize * num_gathered
        parts.append(
            Part("weights gathered to sample", whole, ("rollout",), "device", "pass --gather_for_sampling False")
        )
    return parts


def engine_parts(blueprint, w, costs):
    """The engine of a rank, a process on the same GPU, or on one of its own; or split over several of these, of which
    this is each. Activations are counted as if they were not split, which attention's are."""
    place = "engine" if w.engine_devices else "device"
    advice = "pass --engine_sleep True, or --rollout local, for which the ranks share the weights"
    if w.engine_devices:
        advice = "raise --engine_tensor_parallel, with more --engine_devices"
    workers = w.engine_tensor_parallel
    here = 1 if w.engine_devices else workers  # of the workers, on a CPU all
    n = w.engine_batch
    fits_at_once = n * w.image_size[0] * w.image_size[1] <= PIXELS_AT_ONCE
    num_decoded = n if fits_at_once else 1  # as in common/engine/pipelines.py
    taken = max(n * costs.sampling.peak_bytes, num_decoded * costs.decoding.peak_bytes)
    num_weights = blueprint.num_weights - blueprint.num_split + blueprint.num_split / workers
    transformer = blueprint.dtype.itemsize * num_weights + blueprint.fp32_buffer_bytes
    if blueprint.num_trained < blueprint.num_weights:
        transformer += blueprint.dtype.itemsize * blueprint.num_trained  # the LoRA
    weights = transformer + blueprint.vae_bytes
    awake = ("start", "rollout") if w.engine_sleep else PHASES
    asleep = tuple(phase for phase in PHASES if phase not in awake)
    to_sample = "lower --rollout_batch_size" if n > 1 else advice
    parts = [
        Part("engine: its transformer and VAE", here * weights, awake, place, advice),
        Part("engine: its transformer and VAE, asleep", workers * weights, asleep, "host", advice),
        Part(f"engine: sampling and decoding {n} images", here * taken, ("rollout",), place, to_sample),
    ]
    text_encoders = here * blueprint.text_encoder_bytes
    processes = ENGINE_PROCESS * (1 if workers == 1 else 1 + workers)
    parts.append(Part("engine: text encoders, until it has started", text_encoders, ("start",), place, advice))
    parts.append(Part("engine: CUDA", CUDA_PROCESS, PHASES, place, advice))
    parts.append(Part("engine: process", processes, PHASES, "host", advice))
    return parts


def waiting_parts(blueprint, w):
    """What waits on the host until it is needed on the GPU, and the rest of the host's."""
    on_use = "pass --prompt_cache FOLDER"
    fewer = "use fewer ranks a node"
    larger = "use a machine with more memory"
    encoded = ("encode",) if w.prompt_cache is None else ()
    decoded = () if w.has_engine else ("rollout",)
    num_policies = sum(policy != "reference" for policy in w.policies)
    saved = 4 * blueprint.num_trained * (2 + num_policies)  # Adam's moments, too
    files = blueprint.dtype.itemsize * blueprint.num_weights + blueprint.buffer_bytes
    waiting = blueprint.text_encoder_bytes + blueprint.vae_bytes
    parts = [
        Part("CUDA", CUDA_PROCESS, PHASES, "device", fewer),
        Part("text encoders, in use", blueprint.text_encoder_bytes, encoded, "device", on_use),
        Part("VAE, in use", blueprint.vae_bytes, decoded, "device", "pass --rollout vllm"),
    ]
    parts.append(Part("text encoders and VAE, waiting", waiting, PHASES, "host", fewer))
    parts.append(Part("process", TRAINER_PROCESS, PHASES, "host", fewer))
    parts.append(Part("the transformer's files, mapped", files, ("start",), "node", larger))
    parts.append(Part("a checkpoint being saved", saved, ("save",), "node", larger))
    return parts


def on_one_memory(parts):
    """The Parts of a run on a CPU, where nothing waits elsewhere and nothing is CUDA's: all are the host's."""
    kept = []
    for part in parts:
        if not part.name.endswith(("CUDA", "in use")):
            kept.append(part._replace(place="host" if part.place in ("device", "engine") else part.place))
    return kept


def work(w, costs):
    """{phase: FLOPs} of a rank's step; the last one is an evaluation, apart."""
    n = w.images_of_a_rank
    passes = n * w.trained_steps
    num_acting = sum(policy not in ("default", "ema") for policy in w.policies)
    flops = {}
    if w.sampled_steps:
        flops["rollout"] = n * (w.sampled_steps * costs.sampling.flops + costs.decoding.flops)
    if w.has_engine and w.old_log_prob == "recompute":
        flops["old log-probs"] = passes * costs.scoring.flops
    trained = w.epochs_per_rollout * costs.training.flops
    flops["update"] = passes * (trained + w.acting_epochs * num_acting * costs.scoring.flops)
    evaluated = -(-w.num_eval_images // w.ranks)
    flops["evaluation"] = evaluated * (w.eval_num_inference_steps * costs.sampling.flops + costs.decoding.flops)
    return flops


def pipe_bytes(blueprint, w):
    """(bytes pushed to a rank's engine, bytes of its answers) in a step."""
    latent_bytes = 4 * torch.Size(blueprint.latent_shape(w.image_size, w.num_frames)).numel()
    pixels = 3 * w.image_size[0] * w.image_size[1] * w.num_frames
    answers = w.images_of_a_rank * ((w.sampled_steps + 1) * latent_bytes + pixels)
    return blueprint.dtype.itemsize * blueprint.num_trained, answers


# ---- what is printed -------------------------------------------------------------------------------------------------
def table(parts, title):
    """Lines of a table of Parts, in GB, a column a phase and their sums last."""
    lines = [f"{title:46}" + "".join(f"{phase:>9}" for phase in PHASES)]
    for part in parts:
        cells = [f"{part.num_bytes / GB:9.2f}" if phase in part.phases else f"{'':9}" for phase in PHASES]
        if part.num_bytes and part.phases:
            lines.append(f"  {part.name:44}" + "".join(cells))
    sums = phase_sums(parts)
    lines.append(f"  {'all':44}" + "".join(f"{sums[phase] / GB:9.2f}" for phase in PHASES))
    return lines


def phase_sums(parts):
    """{phase: bytes}."""
    return {phase: sum(part.num_bytes for part in parts if phase in part.phases) for phase in PHASES}


def check_fits(parts, limit_gb, device, whose):
    """Says the peak in a line. Raises ValueError, naming the largest part of it, where it is above the limit."""
    sums = phase_sums(parts)
    phase = max(sums, key=sums.get)
    peak_gb = sums[phase] / GB
    if peak_gb > limit_gb:
        largest = max((part for part in parts if phase in part.phases), key=lambda part: part.num_bytes)
        raise ValueError(
            f"--plan {device}: {peak_gb:.1f} GB are needed of the {limit_gb:g} GB of {whose}, in the phase {phase}; "
            f"the largest part is {largest.name}, {largest.num_bytes / GB:.1f} GB: {largest.advice}"
        )
    return f"peak {peak_gb:.2f} GB of the {limit_gb:g} GB of {whose}, in the phase {phase}"


def work_table(w, costs, device):
    """Lines of FLOPs and, where the device's matrix rate is known, seconds."""
    rate = getattr(DEVICES[device], w.dtype)
    title = f"a step of a rank, {w.images_of_a_rank} images"
    assumed = f"at {UTILISATION:.0%} of {rate} TFLOP/s" if rate else ""
    lines = [f"{title:46}{'PFLOP':>9}{'seconds' if rate else '':>9}  {assumed}"]
    flops = work(w, costs)
    evaluation = flops.pop("evaluation")
    rows = [*flops.items(), ("all", sum(flops.values())), (f"apart: an evaluation of {w.num_eval_images}", evaluation)]
    for name, count in rows:
        seconds = f"{count / (rate * 1e12 * UTILISATION):9.1f}" if rate else ""
        lines.append(f"  {name:44}{count / 1e15:9.3f}{seconds}")
    return lines


def report(blueprint, w, device):
    """The lines of a plan, the last of them check_fits'.

    Raises:
        ValueError: check_fits'; after the other lines have been printed.
    """
    costs = measure(blueprint, w)
    parts = memory_parts(blueprint, w, costs)
    limit_gb = DEVICES[device].memory_gb
    if device == "cpu":
        parts = on_one_memory(parts)
        limit_gb = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 1)
    host = []
    for part in parts:
        if part.place == "host":
            host.append(part._replace(num_bytes=part.num_bytes * w.ranks_here))
        elif part.place == "node":
            host.append(part)
    on_device = [part for part in parts if part.place == "device"]
    on_engine = [part for part in parts if part.place == "engine"]

    if on_device:
        print("\n".join(table(on_device, f"GB of each of {w.ranks} GPUs, {device}")))
    if on_engine:
        print("\n".join(table(on_engine, f"GB of each of {w.ranks * w.engine_tensor_parallel} GPUs of the engines")))
    print("\n".join(table(host, f"GB of a node's memory, {w.ranks_here} ranks")))
    otherwise = w.micro_batch_images * costs.training_otherwise.peak_bytes / GB
    word = "without" if "activation_checkpointing" in w.train_with else "with"
    print(f"activations {word} activation checkpointing: {otherwise:.2f} GB")
    print("\n".join(work_table(w, costs, device)))
    if w.has_engine:
        pushed, answered = pipe_bytes(blueprint, w)
        print(f"between a rank and its engine, a step: {pushed / 1e6:.0f} MB pushed, {answered / 1e6:.0f} MB answered")
    if device == "cpu":
        print(check_fits(host, limit_gb, device, "this machine"))
    else:
        print(check_fits(on_device, limit_gb, device, "a GPU"))
    if on_engine:
        print(check_fits(on_engine, limit_gb, device, "an engine's GPU"))


def workload(options, num_eval_prompts, **counts):
    """The Workload of a script's options, {name: value}; counts: its fields that are not what they are for most.

    `policies` are those besides default, ema and reference.
    """
    policies = ["default", *counts.pop("policies", ())]
    if options["ema_decay"] > 0:
        policies.append("ema")
    if options.get("kl_coef", 0) > 0:
        policies.append("reference")
    ranks = launched_world_size()
    values = {
        "num_images": options.get("num_prompts", 1) * options["group_size"],
        "sampled_steps": options["num_inference_steps"],
        "micro_batch_images": options["micro_batch_size"],
        "num_eval_images": num_eval_prompts * options["eval_images_per_prompt"],
        "trained_guidance": options.get("guidance_scale", 1.0),
    }
    values["ranks"] = ranks
    values["ranks_here"] = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    names = {field.name for field in fields(Workload)}
    shared = {name: value for name, value in options.items() if name in names}
    return Workload(**shared | values | counts, policies=tuple(policies))


def show_plan(options, inputs, **counts):
    """Print what the run of these options would need on the devices of --plan; on rank 0, as it is the same on all.

    options: a script's, {name: value}; inputs: its Inputs; counts: see workload. Returns None, to exit with.

    Raises:
        ValueError: it cannot fit; in a line that names the largest part, and what to change.
    """
    if int(os.environ.get("RANK", "0")) > 0:
        return
    networks = [name for name, reward in inputs.eval_rewards.items() if hasattr(reward, "offload")]
    if networks:
        print(f"not counted: the networks of {', '.join(networks)}, docs/rewards.md has their sizes")
    w = workload(options, len(inputs.eval_set), **counts)
    blueprint = Blueprint(inputs.family, options["model"], inputs.lora, getattr(torch, w.dtype))
    report(blueprint, w, options["plan"])
