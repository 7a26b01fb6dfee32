"""What a run needs: memory by phase, FLOPs and bytes, from the options and the model's configs alone.

A PlannedRun says what a run does: its script's Workload, with its options. Its passes are counted by
common/plan/memory.py, which takes them without weights. The functions here add up what that means for a GPU, an
engine's GPU and a node. tools/plan.py prints it, and a run on GPUs asks which sizes they have room for (`fit_to_gpus`),
and how near their peak it comes (`work`).
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.data import PromptSet
from common.distributed import gather_objects, on_rank_0
from common.errors import RunError
from common.files import load_checkpoint
from common.models import PIXELS_AT_ONCE, Family
from common.optional import optional_part
from common.plan.memory import Blueprint, Cost
from common.process import print_message
from common.weights import LoRA
from common.workload import Workload

import torch

GB = 1e9
PHASES = ("start", "encode", "rollout", "update", "save")  # what a run does while it holds memory
# Host memory of a process without a model, as seen on a CPU, of the trainer and of the engine
TRAINER_PROCESS = 0.5 * GB
ENGINE_PROCESS = 0.8 * GB
# GPU memory that CUDA, its libraries and NCCL take for each process: an assumption
CUDA_PROCESS = 0.8 * GB
# Bytes of a weight's two moments, by --adam_bits; at 8 a moment has a scale in fp32 for 256 numbers
MOMENT_BYTES = {32: 8.0, 8: 2 * (1 + 4 / 256)}
FREE = 0.1  # share of a GPU that stays free, for the allocator's gaps and what is not counted


@dataclass
class PlannedRun(Workload):
    """A script's Workload on so many ranks, with the options of every script that memory and time depend on.

    A field with the name of an option means the same.
    """

    num_eval_images: int = 0
    """images of an evaluation, over all ranks"""
    micro_batch_size: int = 1
    """rows of a pass of the trainer"""
    dtype: str = "float32"
    vae_dtype: str = "float32"
    base_weights: str | None = None
    adam_bits: int = 32
    train_with: tuple[str, ...] = ()
    image_size: tuple[int, int] = (512, 512)
    num_frames: int = 1
    max_sequence_length: int = 256
    prompt_cache: str | None = None
    rollout: str = "local"
    rollout_batch_size: int = 0
    max_rollouts: int = 1
    engine_with: tuple[str, ...] = ()
    engine_devices: tuple[int, ...] = ()
    eval_num_inference_steps: int = 1
    eval_guidance_scale: float | None = None
    ranks: int = 1
    """ranks of all nodes"""
    ranks_here: int = 1
    """ranks of a node"""
    shard_ranks: int = 0
    ranks_per_image: int = 1

    @property
    def sampling_batch_images(self) -> int:
        """Images that the engine, or the trainer, samples at once."""
        return self.rollout_batch_size or (32 if self.has_engine else self.micro_batch_images)

    @property
    def micro_batch_images(self) -> int:
        """Images of a pass of the trainer."""
        return self.micro_batch_size * self.row_images

    @property
    def shards(self) -> int:
        """Into how many parts a copy of the weights is cut."""
        return self.shard_ranks or self.ranks_here

    @property
    def has_engine(self) -> bool:
        return self.rollout == "vllm"

    @property
    def engine_workers(self) -> int:
        """Over how many GPUs an engine is split."""
        return len(self.engine_devices) // self.ranks_here or 1

    @property
    def gathers_whole(self) -> bool:
        """Whether ranks gather the whole transformer to sample, once per rollout."""
        may_gather = not {"cpu_offload", "gather_blocks"} & set(self.train_with)
        return may_gather and self.shards > 1 and not self.has_engine

    @property
    def sequence_groups(self) -> int:
        """Among how many groups of ranks the images are divided."""
        return self.ranks // self.ranks_per_image

    @property
    def images_of_a_rank(self) -> int:
        return -(-self.num_images // self.sequence_groups)

    @property
    def trained_images_of_a_rank(self) -> int:
        return -(-self.num_trained_images // self.sequence_groups)


def planned_run(
    workload: Workload, options: Mapping[str, Any], num_eval_prompts: int, ranks: int, ranks_per_node: int
) -> PlannedRun:
    """A script's Workload on so many ranks, with so many held-out prompts. options: {name: value}, of which those that
    every script has are read."""
    of_script = {field.name: getattr(workload, field.name) for field in fields(Workload)}
    own = {field.name for field in fields(PlannedRun)} - of_script.keys()
    shared = {name: value for name, value in options.items() if name in own}
    shared["num_eval_images"] = num_eval_prompts * options["eval_images_per_prompt"]
    return PlannedRun(**of_script | shared | {"ranks": ranks, "ranks_here": ranks_per_node})


class Costs(NamedTuple):
    """What each kind of pass of a Workload costs a rank, for one image except where stated.

    The ranks of a sequence group share the transformer's passes evenly. Each of them decodes whole images.
    """

    sampling: Cost  # a sampling step
    forward: Cost  # a trained pass, but without gradient: that of a policy which only acts
    training: Cost  # a trained pass
    decoding: Cost  # by the VAE
    decoding_batch: Cost  # by the VAE, the images that are sampled at once
    trained_decoding: Cost = Cost(0, 0)  # the same with the backward pass, where the gradient comes through the VAE
    evaluation: Cost | None = None  # a sampling step of an evaluation, where its guidance differs

    @property
    def eval_sampling(self) -> Cost:
        """A sampling step of an evaluation."""
        return self.evaluation or self.sampling

    @property
    def peak_of_sampling(self) -> int:
        """Bytes of the larger sampling step, of a rollout or of an evaluation."""
        return max(self.sampling.peak_bytes, self.eval_sampling.peak_bytes)


class Part(NamedTuple):
    """Something that takes memory."""

    name: str
    num_bytes: float
    phases: tuple[str, ...]
    place: str  # device: a rank's GPU; engine: its engine's own GPU; host: each rank's; node: once for all its ranks
    advice: str  # how to make it smaller


def measure(blueprint: Blueprint, w: PlannedRun) -> Costs:
    """Take each kind of pass once, without weights."""
    size = (w.image_size, w.num_frames)
    trained = (*size, w.max_sequence_length, w.trained_guidance)
    checkpointing = "activation_checkpointing" in w.train_with
    sampling = blueprint.velocity(*size, w.max_sequence_length, w.guidance_scale)
    forward = sampling
    if w.trained_guidance != w.guidance_scale:  # offline DPO samples with guidance, and trains without
        forward = blueprint.velocity(*trained)
    training = blueprint.velocity(*trained, train=True, checkpointing=checkpointing)
    sampling, forward, training = (share_cost(cost, w.ranks_per_image) for cost in (sampling, forward, training))
    evaluation = None
    if w.eval_guidance_scale not in (None, w.guidance_scale):
        cost = blueprint.velocity(*size, w.max_sequence_length, w.eval_guidance_scale)
        evaluation = share_cost(cost, w.ranks_per_image)
    decoding = blueprint.decoding(1, *size)
    costs = Costs(sampling, forward, training, decoding=decoding, decoding_batch=decoding, evaluation=evaluation)
    return measure_decoding(blueprint, w, costs)


def share_cost(cost: Cost, ranks: int) -> Cost:
    """What one of so many ranks that share a pass has of it."""
    return Cost(cost.flops // ranks, cost.peak_bytes // ranks)


def measure_decoding(blueprint: Blueprint, w: PlannedRun, costs: Costs) -> Costs:
    """The same Costs, with what decoding the images of a pass costs for this Workload's size of a pass."""
    size = (w.image_size, w.num_frames)
    costs = costs._replace(decoding_batch=blueprint.decoding(w.sampling_batch_images, *size))
    if w.chained_steps:
        costs = costs._replace(trained_decoding=blueprint.decoding(w.micro_batch_images, *size, train=True))
    return costs


# ---- memory ----------------------------------------------------------------------------------------------------------
def memory_parts(blueprint: Blueprint, w: PlannedRun, costs: Costs) -> list[Part]:
    """The Parts of a Workload on GPUs."""
    engine = engine_parts(blueprint, w, costs) if w.has_engine else []
    return weight_parts(blueprint, w) + pass_parts(blueprint, w, costs) + engine + waiting_parts(blueprint, w)


def latent_bytes(blueprint: Blueprint, w: PlannedRun) -> int:
    """Bytes of the fp32 latents of an image, or of a video."""
    return 4 * torch.Size(blueprint.latent_shape(w.image_size, w.num_frames)).numel()


def weight_parts(blueprint: Blueprint, w: PlannedRun) -> list[Part]:
    """Weights, Adam's moments and gradients. All are in shards, except the gradients of a LoRA and the buffers."""
    itemsize = blueprint.dtype.itemsize
    place = "host" if "cpu_offload" in w.train_with else "device"
    num_quantised = blueprint.num_linear if w.base_weights else 0  # of which every rank has all
    frozen = 0.0  # with full weights, only a reference stays as it is
    if blueprint.is_lora or "reference" in w.policies:
        frozen = itemsize * (blueprint.num_weights - num_quantised) / w.shards
    if w.base_weights:
        frozen += num_quantised * optional_part("weights.base_weights", "--base_weights").WEIGHT_BYTES[w.base_weights]
    trained = 4 * blueprint.num_trained / w.shards
    moments = MOMENT_BYTES[w.adam_bits] * blueprint.num_trained / w.shards * w.trained_policies
    in_bits = "float32" if w.adam_bits == 32 else f"{w.adam_bits} bits"
    others = [policy for policy in w.policies if policy not in ("default", "reference")]
    advice = "use more ranks, or --train_with cpu_offload"
    if not blueprint.is_lora:
        advice += ", or train a LoRA (--lora_rank)"
        if w.adam_bits == 8:  # which cannot be offloaded
            advice = advice.replace("--train_with cpu_offload, or ", "")
        elif place == "device":
            advice = f"use --adam_bits 8, {advice.removeprefix('use ')}"
    if w.base_weights:
        smaller = "" if w.base_weights == "nf4" else "use --base_weights nf4, or "
        advice = smaller + "use a larger GPU, or shards of full weights on several (--shard_ranks)"
    # prompts are cached before the transformer comes to the GPU, when the text encoders have left it
    is_late = w.prompt_cache is not None and place == "device"
    phases = PHASES[1:] if is_late else PHASES
    parts = [
        Part(f"frozen weights, {w.base_weights or w.dtype}", frozen, phases, place, advice),
        Part("trained weights, float32", trained, phases, place, advice),
        Part(f"weights of {' and '.join(others)}, float32", len(others) * trained, phases, place, advice),
        Part("frozen adapters, float32", w.frozen_adapters * trained, phases, place, advice),
        # the first optimizer step makes them, so that there are none at the start
        Part(f"Adam's two moments, {in_bits}", moments, PHASES[1:], place, advice),
        Part("buffers of the transformer", blueprint.buffer_bytes, PHASES, "device", advice),
    ]
    if blueprint.is_lora:  # whole on each rank until the last pass of an optimizer step
        parts.append(Part("gradients, float32", 4 * blueprint.num_trained, ("update",), "device", advice))
    else:
        # a block's gradients in the dtype of the pass and in fp32, while those of the block before are still exchanged
        two_blocks = 2 * (itemsize + 4) * blueprint.largest_block
        parts.append(Part("gradients, float32", trained, ("update",), place, advice))
        parts.append(Part("gradients that ranks exchange", two_blocks, ("update",), "device", advice))
    return parts


def pass_parts(blueprint: Blueprint, w: PlannedRun, costs: Costs) -> list[Part]:
    """The trainer's own passes, and what a rank keeps of a rollout."""
    n = w.micro_batch_images
    images = f"{n} image{'s' if n > 1 else ''}"
    if w.ranks_per_image > 1:
        images += f", 1/{w.ranks_per_image} of the tokens"
    advice = "lower --micro_batch_size" if n > 1 else "use smaller images"
    to_train = advice
    if "activation_checkpointing" not in w.train_with:
        to_train += ", or --train_with activation_checkpointing"
    # a rank's share of a rollout: latents, embeddings and, at the trained steps, the means of two policies and the
    # reference's velocities
    num_tensors = w.sampled_steps + 1 + 3 * w.trained_steps
    num_prompts = min(w.num_prompts, w.images_of_a_rank)
    kept = num_tensors * latent_bytes(blueprint, w) * w.images_of_a_rank
    kept += num_prompts * blueprint.conditioning_bytes(w.max_sequence_length, w.image_size, w.num_frames)
    # where ranks' images need different ones of two transformers, a rank passes one image more, to run what others do
    rows = n + (w.ranks > 1 and blueprint.has_two_transformers)
    activations = rows * max(1, w.chained_steps) * costs.training.peak_bytes  # a chain holds those of its passes
    both = ("rollout", "update")
    parts = [
        part_of_fsdp(blueprint, w),
        Part(f"activations of {images}", activations, ("update",), "device", to_train),
        Part("decoding with a gradient", costs.trained_decoding.peak_bytes, ("update",), "device", advice),
        Part("trajectories and embeddings", kept, both, "device", "use more ranks, or fewer images a step"),
    ]
    if not w.has_engine:
        # the larger of the two: images are decoded when they have been sampled
        sampled = w.sampling_batch_images
        taken = max(sampled * costs.peak_of_sampling, costs.decoding_batch.peak_bytes)
        to_sample = advice if sampled == n else "lower --rollout_batch_size"
        name = f"sampling and decoding {sampled} image{'s' if sampled > 1 else ''}"
        parts.append(Part(name, taken, ("rollout",), "device", to_sample))
    if w.gathers_whole:
        num_gathered = blueprint.num_weights + blueprint.largest_block  # one more block, in a buffer
        if blueprint.is_lora:
            num_gathered += num_adapted(blueprint, w)
        gathered = blueprint.dtype.itemsize * num_gathered
        by_block = "add --train_with gather_blocks"
        parts.append(Part("weights gathered to sample", gathered, ("rollout",), "device", by_block))
    return parts


def part_of_fsdp(blueprint: Blueprint, w: PlannedRun) -> Part:
    """What FSDP holds whole for a pass, beside its shards.

    Of a LoRA that each rank has whole: its tensors in the dtype of the pass, from the first pass after an optimizer
    step to the next one. Otherwise blocks: it gathers the next one early, and from several ranks into a buffer first.
    """
    advice = "use --dtype bfloat16"
    itemsize = blueprint.dtype.itemsize
    if blueprint.is_lora and w.shards == 1 and "cpu_offload" not in w.train_with:
        num_bytes = itemsize * num_adapted(blueprint, w)
        return Part("the LoRA as passes read it", num_bytes, ("encode", "rollout", "update"), "device", advice)
    # in a rollout of whole weights no block is gathered
    phases = ("update",) if w.gathers_whole else ("rollout", "update")
    num_blocks = 2 if w.shards == 1 else 3
    num_bytes = itemsize * (blueprint.outside_blocks + num_blocks * blueprint.largest_block)
    return Part("blocks as FSDP gathers them", num_bytes, phases, "device", advice)


def num_adapted(blueprint: Blueprint, w: PlannedRun) -> int:
    """The numbers in the adapters of all policies, and in frozen ones."""
    num_adapters = sum(policy != "reference" for policy in w.policies) + w.frozen_adapters
    return blueprint.num_trained * num_adapters


def engine_parts(blueprint: Blueprint, w: PlannedRun, costs: Costs) -> list[Part]:
    """A rank's engine, a process on the rank's GPU or on GPUs of its own, where each Part is one GPU's.

    Workers that share a transformer share its weights. Activations are counted as if they were not split; attention's
    are.
    """
    place = "engine" if w.engine_devices else "device"
    advice = "pass --engine_with sleep, or --rollout local, for which the ranks share the weights"
    if w.engine_devices:
        advice = "split the engines over more --engine_devices"
    workers = w.engine_workers
    n = min(w.sampling_batch_images, w.images_of_a_rank)  # images that the engine samples at once
    fits_at_once = n * w.image_size[0] * w.image_size[1] <= PIXELS_AT_ONCE
    num_decoded = n if fits_at_once else 1  # as in common/engine/pipelines.py
    taken = max(n * costs.peak_of_sampling, num_decoded * costs.decoding.peak_bytes)
    # of a worker: its share of the transformer, the LoRA and the VAE
    num_weights = blueprint.num_weights - blueprint.num_split + blueprint.num_split / workers
    if blueprint.is_lora:
        num_weights += blueprint.num_trained
    weights = blueprint.dtype.itemsize * num_weights + blueprint.fp32_buffer_bytes + blueprint.vae_bytes
    # an engine that sleeps is awake when it loads, when it samples, and for a push at the end of the update; otherwise
    # its weights wait in the node's memory
    awake = ("start", "rollout") if "sleep" in w.engine_with else PHASES
    asleep = tuple(phase for phase in PHASES if phase not in awake)
    to_sample = "lower --rollout_batch_size" if n > 1 else advice
    processes = ENGINE_PROCESS * (1 if workers == 1 else 1 + workers)  # its own, and its workers' if it is split
    return [
        Part("engine: its transformer and VAE", weights, awake, place, advice),
        Part("engine: its transformer and VAE, asleep", workers * weights, asleep, "host", advice),
        Part(f"engine: sampling and decoding {n} images", taken, ("rollout",), place, to_sample),
        Part("engine: CUDA", CUDA_PROCESS, PHASES, place, advice),
        Part("engine: process", processes, PHASES, "host", advice),
    ]


def waiting_parts(blueprint: Blueprint, w: PlannedRun) -> list[Part]:
    """What waits on the host until the GPU needs it, and everything else of the host."""
    fewer = "use fewer ranks a node"
    larger = "use a machine with more memory"
    encoded = ("encode",) if w.prompt_cache is None else ("start",)
    decoded = () if w.has_engine else ("rollout",)  # an engine has its own VAE
    if w.chained_steps:
        decoded = (*decoded, "update")
    if blueprint.num_sources:  # the VAE encodes pictures with the prompts, engine or not
        decoded = ("encode", *decoded)
    # each policy; Adam's moments of the trained ones, and adapter/
    saved = 4 * (num_adapted(blueprint, w) + (2 * w.trained_policies + 1) * blueprint.num_trained)
    if not blueprint.is_lora:  # each rank writes its shards as they are, and rank 0 gathers adapter/
        saved = blueprint.dtype.itemsize * blueprint.num_weights
    files = blueprint.dtype.itemsize * blueprint.num_weights + blueprint.buffer_bytes
    in_use = waiting = blueprint.text_encoder_bytes
    if w.base_weights:  # then they are int8, and wait as int8 once the start, the peak of a node, is over
        in_use -= blueprint.num_encoder_linear * (blueprint.dtype.itemsize - 1)
    parts = [
        Part("CUDA", CUDA_PROCESS, PHASES, "device", fewer),
        Part("text encoders, in use", in_use, encoded, "device", "pass --prompt_cache FOLDER"),
        Part("VAE, in use", blueprint.vae_bytes, decoded, "device", "pass --rollout vllm"),
        Part("text encoders and VAE, waiting", waiting + blueprint.vae_bytes, PHASES, "host", fewer),
        Part("process", TRAINER_PROCESS, PHASES, "host", fewer),
        Part("the transformer's files, mapped", files, ("start",), "node", larger),
        Part("a checkpoint and adapter/, being saved", saved, ("save",), "node", larger),
    ]
    if w.prompt_cache is None:
        rounding = blueprint.pinned_encoder_bytes - waiting
        parts.insert(4, Part("text encoders, rounded up as pinned", rounding, PHASES, "host", fewer))
    return parts


def phase_sums(parts: Iterable[Part]) -> dict[str, float]:
    """{phase: bytes}."""
    parts = list(parts)
    return {phase: sum(part.num_bytes for part in parts if phase in part.phases) for phase in PHASES}


# ---- what a GPU has room for -----------------------------------------------------------------------------------------
def gpu_peak(blueprint: Blueprint, w: PlannedRun, costs: Costs) -> float:
    """The most bytes that a rank's GPU holds."""
    return max(phase_sums(part for part in memory_parts(blueprint, w, costs) if part.place == "device").values())


def choose_shard_ranks(blueprint: Blueprint, w: PlannedRun, costs: Costs, gpu_bytes: float) -> int:
    """What --shard_ranks 0 stands for on GPUs: 1, a copy of the weights on every rank, or 0, one for a node's ranks.

    A copy saves gathering the weights in every pass. It needs a LoRA, whose base has no gradients or moments, and nine
    tenths of a GPU.
    """
    if w.shard_ranks or w.ranks_here == 1 or not blueprint.is_lora or "cpu_offload" in w.train_with:
        return w.shard_ranks
    if w.base_weights:  # of which every rank has all
        return 1
    return 1 if gpu_peak(blueprint, replace(w, shard_ranks=1), costs) <= (1 - FREE) * gpu_bytes else 0


def choose_options(
    blueprint: Blueprint,
    workload: Workload,
    options: Mapping[str, Any],
    gpu_bytes: float,
    *,
    ranks: int,
    ranks_here: int,
    saved_size: int = 0,
) -> dict[str, int]:
    """--shard_ranks and --micro_batch_size of a run on such GPUs, by its options, {name: value}: what 0 stands for.

    gpu_bytes: of a GPU, without what something else holds there.
    The micro-batch is the largest that divides a rank's share of an optimizer step and leaves a tenth of the GPU free.
    A resumed run keeps the `saved_size` that was chosen for it, as another one would add up in another order, unless
    it does not divide the share of so many ranks.
    """
    size = options["micro_batch_size"]
    # without images of an evaluation, which take no memory of their own
    w = planned_run(workload, {**options, "micro_batch_size": size or 1}, 0, ranks, ranks_here)
    costs = measure(blueprint, w)
    shard_ranks = choose_shard_ranks(blueprint, w, costs, gpu_bytes)
    share = max(1, w.trained_images_of_a_rank // (w.row_images * w.updates))  # rows; an evaluation cuts none
    if not size and saved_size and share % saved_size == 0:
        size = saved_size
    if not size:
        divisors = [divisor for divisor in range(share, 0, -1) if share % divisor == 0]
        for size in divisors:  # the last one is 1, which is taken in any case
            w = replace(w, shard_ranks=shard_ranks, micro_batch_size=size)
            if gpu_peak(blueprint, w, measure_decoding(blueprint, w, costs)) <= (1 - FREE) * gpu_bytes:
                break
    return {"shard_ranks": shard_ranks, "micro_batch_size": size}


def bytes_left() -> float:
    """The bytes of this rank's GPU that the run may take: without the networks of rewards, which are loaded by now, and
    without what other processes hold, such as a judge's server. CUDA's own are in a plan. Networks that wait on the
    host (REWARD_OFFLOAD=1) are not known here."""
    free, total = torch.cuda.mem_get_info()
    return total - max(0, total - free - CUDA_PROCESS)


def fit_to_gpus(
    family: type[Family],
    lora: LoRA | None,
    eval_set: PromptSet,
    checkpoint: Path | None,
    options: Mapping[str, Any],
    workload: Workload,
) -> dict[str, int]:
    """choose_options on this machine's GPUs, by the one where least is left. Rank 0 counts, and says what it chose. A
    collective.

    lora: None for full weights. checkpoint: the one that the run resumes from, if any.

    Raises:
        RunError: --micro_batch_size 0 without a GPU, or a family's pass cannot be planned.
    """
    if not torch.cuda.is_available():
        raise RunError("--micro_batch_size 0: takes what fits on a GPU, and this machine has none: pass a number")
    chosen = {name: options[name] for name in ("shard_ranks", "micro_batch_size")}
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    may_copy = lora and ranks_here > 1 and not options["shard_ranks"]
    gpu_bytes = min(gather_objects(bytes_left()))
    if on_rank_0() and (may_copy or not options["micro_batch_size"]):
        num_sources = len(eval_set.metadata[0].get("image", ()))  # all records have as many (check_sources)
        dtype, vae_dtype = (getattr(torch, options[name]) for name in ("dtype", "vae_dtype"))
        saved_size = load_checkpoint(checkpoint)["args"]["micro_batch_size"] if checkpoint else 0
        try:
            chosen = choose_options(
                Blueprint(family, options["model"], lora, dtype, num_sources, vae_dtype),
                workload,
                options,
                gpu_bytes,
                ranks=int(os.environ["WORLD_SIZE"]),
                ranks_here=ranks_here,
                saved_size=saved_size,
            )
        except RunError as error:
            raise RunError(f"{error}: pass --micro_batch_size and --shard_ranks, above 0") from error
        print_message(describe(chosen, ranks_here))
    return gather_objects(chosen)[0]


def describe(chosen: dict[str, int], ranks_here: int) -> str:
    """The line of a run and of a plan about choose_options' value."""
    sharing = chosen["shard_ranks"] or ranks_here
    owner = "each rank" if sharing == 1 else f"{sharing} ranks"
    return f"a copy of the transformer for {owner}; micro-batches of {chosen['micro_batch_size']}"


# ---- work ------------------------------------------------------------------------------------------------------------
class Work(NamedTuple):
    """FLOPs of a phase. Their rates differ."""

    transformer: float  # in --dtype
    vae: float = 0  # in --vae_dtype; convolutions in fp32 torch does in TF32 on a GPU

    def seconds(self, rate: float, vae_rate: float) -> float:
        """At so many FLOPs a second of the one and of the other."""
        return self.transformer / rate + self.vae / vae_rate


def work(w: PlannedRun, costs: Costs) -> dict[str, Work]:
    """{phase: Work} of a rank's step. The last phase, an evaluation, is not part of a step."""
    n = w.images_of_a_rank
    num_trained = w.trained_images_of_a_rank
    passes = num_trained * w.trained_steps
    phases = {}
    if w.sampled_steps:
        decoded = 0 if w.chained_steps else n  # otherwise in the update
        phases["rollout"] = Work(n * w.sampled_steps * costs.sampling.flops, decoded * costs.decoding.flops)
    # else they are the update's own, to the bit
    is_others = w.has_engine or w.sampling_batch_images != w.micro_batch_images or w.max_rollouts > 1
    if w.recomputes_log_probs and is_others:
        phases["old log-probs"] = Work(passes * costs.forward.flops)
    trained = w.epochs * costs.training.flops
    acting = w.acting_epochs * w.acting_passes * costs.forward.flops
    vae = num_trained / w.micro_batch_images * costs.trained_decoding.flops
    phases["update"] = Work(passes * (trained + acting), vae)
    evaluated = -(-w.num_eval_images // w.sequence_groups)
    sampled = evaluated * w.eval_num_inference_steps * costs.eval_sampling.flops
    phases["evaluation"] = Work(sampled, evaluated * costs.decoding.flops)
    return phases
