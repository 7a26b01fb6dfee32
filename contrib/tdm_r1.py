"""TDM-R1 (arXiv 2603.07700): a few-step student learns from any reward, by a surrogate of it, in one file.

A loss that denoises a student's images blurs them in few steps, and most rewards have no gradient. So a second
network learns the reward first. The surrogate is the teacher, trained by a group preference loss (DGPO, arXiv
2510.08425) to like the better images of a prompt more: what it says of a noised image, less what the teacher says, is a
direction in which the reward grows. The student goes there, and stays near the teacher by a distillation loss
(Trajectory Distribution Matching, TDM, arXiv 2503.06674), for which a third network, the fake score, learns what the
student draws. There is no engine. Read `main`, at the end, first. With v = noise - x0, and x0 = x_s - s v the image
that any velocity sees:

  1. The student samples G images for each prompt from noise in T steps by the ODE, x' = x + v dt. The last step's image
     is scored. The path is deterministic, so that the score is also that of every step: `rollout`.
  2. A step's end x_e at level e is noised on to a random level s, x_s = a x_e + b noise: `diffuse`. One of an image's
     steps is drawn for the student and the fake score, one of a prompt's for the surrogate.
  3. The fake score learns which image the student saw in the step: `update_fake`.
  4. The surrogate learns dx_s/ds, the better images of a prompt and not the worse ones: `surrogate_loss`,
     `update_surrogate`.
  5. The student goes by three differences: the teacher's image less the fake score's, that of the guided teacher less
     the unguided, and that of the surrogate less the teacher's: `student_loss`, `update`.

A step, or training step, is a rollout, one update of the student and those of the other two. A rank has B of the
N = num_prompts * group_size images; a micro-batch has b. An image takes T sampling steps. There are R rewards.

    torchrun --standalone -m contrib.tdm_r1                                           # the embedded model in two steps
    torchrun --standalone -m contrib.tdm_r1 --lora_path runs/dmd2/adapter             # a student of contrib/dmd2.py
    torchrun --standalone --nproc_per_node 2 -m contrib.tdm_r1 --reward jpeg_compressibility   # shared by two ranks

Parent: contrib/dmd2.py

The formulas are those of scripts/train_tdmr1_pub.py of the authors' code (Luo-Yihong/TDM-R1 at 1ee7d9f2, which names no
licence), read and not copied; of the paper we could read the abstract alone. Where it departs from that code
(docs/contrib.md has the smaller things, and what notes on the paper say):
  - The student's and the fake score's step is drawn for each image, and the surrogate's for each prompt; theirs are two
    of four for all images. Levels are drawn as the steps are, from noise_range of what is above a step's end.
  - The surrogate's loss has no gradient for an image on which it has gone max_deviation from the teacher, as its
    advantage wants; theirs takes the mean distance of the batch. Their second clip, at an average of the surrogate, is
    left out, and so is a pull of the fake score to the teacher, with the factor 0.02.
  - The noise of a prompt's images is the same for the surrogate alone; in theirs also for the student's third term.
  - Squares are halved in the student's loss, and one --adam_betas is for all three; theirs has no momentum but for the
    surrogate.
"""

# ==== 1 ARGS ==========================================================================================================
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from common.data import GroupSampler, PromptSet, fit_micro_batch, share_eval_images
from common.distributed import gather_rows, mean_over_ranks, setup_distributed, shard_mesh
from common.errors import RunError, error_prefix, reason
from common.files import read_prompts
from common.metrics import reward_metrics
from common.models import Family, find_family
from common.options import (
    Bound,
    FileOrName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SharedArgs,
    lr_factor,
)
from common.rewards import load_rewards, with_preservation
from common.rollout import RolloutRequest
from common.run import (
    Inputs,
    Run,
    check_inputs,
    checkpoint_to_resume,
    choose_sizes,
    evaluate_samples,
    friendly_errors,
    parse_args,
)
from common.scoring import Scorer, all_equal, asked_parts, fill_failed
from common.sde import draw_noise, image_seed
from common.weights import (
    acting,
    choose_adam_kernel,
    follow,
    load_policies,
    load_policy_tensors,
    load_training_state,
    make_lora,
    parameters_of,
    sampling,
    training_state,
    units_to_shard,
)
from common.workload import Workload

import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import AdamW


@dataclass
class Args(SharedArgs):  # and the shared options, in common/options.py; parse_args refuses values beyond a Bound
    # ---- run
    name: str = "tdm_r1"
    """the run's folder is runs/<name>, or an absolute path; it must not hold a run yet, unless you resume it"""

    # ---- model
    student: FileOrName | None = None
    """with --lora_rank 0: folder of the few-step student's transformer in diffusers' form, such as adapter/ of a run of
    contrib/dmd2.py, where --model is the teacher; None: the student begins as the teacher. A LoRA's is --lora_path"""

    # ---- rollout
    num_prompts: PositiveInt = 8
    """prompts per training step, over all ranks"""
    group_size: Annotated[int, Bound(at_least=2)] = 8
    """images per prompt, at least 2: the reward of each is compared with the group's mean (TDM-R1: 24)"""
    num_inference_steps: PositiveInt = 2
    """sampling steps of the student (TDM-R1: 4)"""
    eval_num_inference_steps: PositiveInt = 2
    """sampling steps of an evaluation image; give as many as num_inference_steps"""
    guidance_scale: Annotated[float, Bound(at_least=1)] = 1.0
    """the student's own guidance, in training and evaluation alike; 1 turns it off, but for FLUX.1's guidance
    embedding"""

    # ---- algorithm
    teacher_guidance: Annotated[float, Bound(at_least=1)] = 2.0
    """the teacher's guidance, which the student learns to do without (TDM-R1: 4.5)"""
    surrogate_guidance: Annotated[float, Bound(at_least=1)] = 2.0
    """the surrogate's guidance, as the student asks it (TDM-R1: 2.5 to 4.5)"""
    surrogate_share: Annotated[float, Bound(at_least=0, at_most=1)] = 0.7
    """factor of the surrogate's direction in the student's loss; that of the teacher's guidance is 1 minus this. 0:
    TDM, without a reward"""
    surrogate_level: Annotated[float, Bound(at_least=0, below=1)] = 0.3
    """the surrogate is trained and asked at levels above this sigma, also after a step that ends below it (TDM-R1:
    0.25 to 0.55)"""
    dpo_beta: PositiveFloat = 10.0
    """factor of the errors' differences in the surrogate's logit (TDM-R1: 1 or 10)"""
    kl_coef: NonNegativeFloat = 1e-3
    """factor of mean((v - v_ref)^2) in the surrogate's loss, its distance to the teacher"""
    max_deviation: PositiveFloat = 0.05
    """an image on which that distance is larger than this is no longer learned from, where the error has moved as its
    advantage wants"""
    surrogate_updates: PositiveInt = 1
    """updates of the surrogate in a training step (TDM-R1: 1)"""
    surrogate_learning_rate: NonNegativeFloat = 1e-3
    """constant learning rate of the surrogate's AdamW (TDM-R1: 3e-4)"""
    fake_updates: PositiveInt = 2
    """updates of the fake score in a training step (TDM-R1: 1)"""
    fake_learning_rate: NonNegativeFloat = 1e-3
    """constant learning rate of the fake score's AdamW (TDM-R1: 3e-4)"""
    noise_range: Annotated[tuple[float, float], Bound(above=0, at_most=1)] = (0.02, 0.98)
    """a step's end is noised to a level between these shares of what is above it, drawn evenly, of which the model's
    own scheduler then makes what it does when it samples"""
    adv_clip_max: PositiveFloat = 5.0
    """advantages are clamped to +- this"""
    scale_rewards: Literal["batch", "group", "none"] = "batch"
    """divide advantages by the deviation of the rollout's rewards (batch), of the group's, or not at all (Dr.GRPO)"""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """with several rewards. sum_then_normalize: advantages of their weighted sum; normalize_then_sum: weighted sum of
    each reward's own advantages, divided by that sum's deviation over the rollout (GDPO if --scale_rewards is group)"""

    # ---- optimization
    num_steps: NonNegativeInt = 50
    """training steps of the run, each of them one update of the student"""
    micro_batch_size: NonNegativeInt = 64
    """images per pass on a rank, and per sampling batch: a multiple of group_size, so that groups are whole; lowered to
    what a rank has"""
    learning_rate: NonNegativeFloat = 5e-4
    """learning rate of the student's AdamW (TDM-R1: 7.5e-5)"""

    @property
    def together(self) -> int:
        """--micro_batch_size is a multiple of it: a pass has whole groups."""
        return self.group_size


# ==== 2 SETUP =========================================================================================================
def check(args: Args) -> Args:
    """Refuse options that cannot work together. Returns them, micro_batch_size lowered to what a rank has."""
    if args.student and args.lora_rank > 0:
        raise ValueError(f"--student {args.student}: full weights, for --lora_rank 0; a LoRA's are --lora_path")
    if args.guidance_scale_2 is not None:
        raise ValueError("--guidance_scale_2: would take the place of each network's own guidance: leave it out")
    if args.eval_only:  # no mini-batches are cut
        return args
    low, high = args.noise_range
    if low >= high:
        raise ValueError(f"--noise_range {low:g} {high:g}: the first must be smaller")
    micro_batch_size = fit_micro_batch(
        args.num_prompts * args.group_size, 1, args.micro_batch_size, ranks_per_image=args.ranks_per_image
    )
    if micro_batch_size % args.group_size or not micro_batch_size:
        told = f"a rank's passes have {micro_batch_size} images, and must hold whole groups of {args.group_size}"
        raise ValueError(f"--micro_batch_size {args.micro_batch_size}: {told}")
    sums_advantages = len(args.reward) > 1 and args.multi_objective_aggregation == "normalize_then_sum"
    if sums_advantages and args.scale_rewards == "none":
        raise ValueError("--multi_objective_aggregation normalize_then_sum: needs --scale_rewards group or batch")
    return replace(args, micro_batch_size=micro_batch_size)


def workload(args: Args) -> Workload:
    """What a training step samples, trains and keeps: for the plan, the sizes that fit, and perf/mfu."""
    trained_steps = 1 + args.fake_updates + args.surrogate_updates
    guided = sum(2 if scale > 1 else 1 for scale in (args.teacher_guidance, args.surrogate_guidance))
    branches = 2 if args.guidance_scale > 1 else 1  # of a pass with the student's guidance
    acting_passes = guided / branches + 3 + args.surrogate_updates  # by the fake score once, else by the teacher
    return Workload(
        num_images=args.num_prompts * args.group_size,
        num_prompts=args.num_prompts,
        sampled_steps=args.num_inference_steps,
        trained_steps=trained_steps,
        policies=tuple(policy_names(args)),
        trained_policies=len(TRAINED),
        acting_passes=acting_passes / trained_steps,
        guidance_scale=args.guidance_scale,
        trained_guidance=args.guidance_scale,
    )


def prepare(args: Args) -> Inputs:
    """Load and check all but the model: rewards, prompts, the LoRA, which checkpoint. An error names what is wrong."""
    rewards = load_rewards(args.reward, args.reward_weights, args.num_frames, args.reward_frames)
    eval_rewards = load_rewards(  # the trained ones, without those that only compare a group, then its own
        args.eval_reward, None, args.num_frames, args.reward_frames, option="--eval_reward", trained=rewards
    )
    trained_on = () if args.eval_only else args.train_prompts  # read with the rewards, which a record may name
    train_set = read_prompts(trained_on, rewards, others=eval_rewards, shares=args.train_shares)
    eval_set = read_prompts(args.eval_prompts, eval_rewards, args.max_prompts, others=rewards)
    eval_rewards = with_preservation(eval_rewards, eval_set, args.num_frames)  # where images are edited
    checkpoint = checkpoint_to_resume(args.run_folder, args.resume, args.eval_only)  # or None
    if args.student and not checkpoint and not any(Path(args.student).glob("*.safetensors")):
        raise ValueError(f"--student {args.student}: no folder with a transformer's .safetensors")
    # diffusers and peft, which take seconds to import, come last
    height, width = args.image_size
    length = args.max_sequence_length
    family = find_family(args.model, height, width, args.num_frames, args.guidance_scale, length, args.family)
    asked = {"teacher_guidance": args.teacher_guidance, "surrogate_guidance": args.surrogate_guidance}
    for name, scale in {} if args.eval_only else asked.items():
        with error_prefix(f"--{name} {scale:g}"):
            family.check(args.model, height, width, args.num_frames, scale)
    lora = make_lora(
        family,
        model=args.model,
        path=args.lora_path,
        rank=args.lora_rank,
        alpha=args.lora_alpha,
        target_modules=args.lora_target_modules,
        base_weights=args.base_weights,
        checkpoint=checkpoint,
    )
    inputs = Inputs(family, rewards, eval_rewards, train_set, eval_set, lora=lora, checkpoint=checkpoint)
    check_inputs(
        args,
        inputs,
        workload(args),
        schedules={"--num_inference_steps": args.num_inference_steps},
        guidance_scale=args.guidance_scale,
        kl_guidance_scale=1.0 if args.eval_only else max(asked.values()),
        group_size=args.group_size,
    )
    return inputs


# ==== 3 DATA ==========================================================================================================
def make_request(
    args: Args, model: Family, prompts: PromptSet, prompt_index: Tensor, seeds: list[int]
) -> RolloutRequest:
    """A request for B images of U prompts, encoded: prompt_index (B,) says which prompt, seeds (B) which noise."""
    height, width = args.image_size
    length = args.max_sequence_length
    negatives = prompts.negatives(args.negative_prompt)
    timesteps, sigmas, latent_shape = model.schedule(args.num_inference_steps, height, width, args.num_frames)
    asked = max(args.guidance_scale, args.teacher_guidance, args.surrogate_guidance)
    return RolloutRequest(
        conditioning=model.encode(prompts, length, args.image_size, args.num_frames),
        negative_conditioning=model.encode_negative(negatives, asked, length),  # None: no second pass of any policy
        prompt_index=prompt_index,
        seeds=seeds,
        timesteps=timesteps.to(model.device),  # (T,), 1000 sigma, which predict_velocity takes
        sigmas=sigmas,  # (T + 1,), on the CPU, as they become Python's floats
        latent_shape=latent_shape,  # (C, h, w); (C, f, h, w) for a video
        height=height,
        width=width,
        guidance_scale=args.guidance_scale,
    )


def draw_trained_steps(args: Args, step: int, image_index: Tensor) -> Tensor:
    """Which of an image's T sampling steps is trained (B,), drawn evenly, seeded by (seed, step, image)."""
    generators = [torch.Generator().manual_seed(image_seed(args.seed, f"{step} step", i)) for i in image_index.tolist()]
    return torch.cat([torch.randint(args.num_inference_steps, (1,), generator=g) for g in generators])


def draw_training_noise(
    args: Args, purpose: str, index: Tensor, schedule: list[float], latent_shape: tuple[int, ...], ends: Tensor
) -> tuple[Tensor, Tensor]:
    """For each of B images a level sigma (B,) above its `ends` (B,), by noise_range, and noise (B, ...).

    Seeded by (seed, purpose, index): purpose names the training step and the update; index (B,) is the image's number,
    or its prompt's. schedule: sigmas of the model's own, from 1 to 0. In Python's fp64: an image's number does not
    depend on which others are drawn.
    """
    low, high = args.noise_range
    places = numpy.linspace(0, 1, len(schedule))  # of the schedule's sigmas, upwards
    generators = [torch.Generator().manual_seed(image_seed(args.seed, purpose, i)) for i in index.tolist()]
    sigmas = []
    for generator, end in zip(generators, ends.tolist(), strict=True):
        first = numpy.interp(end, schedule[::-1], places).item()
        s = first + (1 - first) * (low + (high - low) * torch.rand((), generator=generator).item())
        sigmas.append(numpy.interp(s, places, schedule[::-1]).item())
    return torch.tensor(sigmas), draw_noise((len(generators), *latent_shape), generators)


def draw_for_surrogate(
    args: Args, purpose: str, batch: "Batch", schedule: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """For each of B images a sampling step (B,), a level above its end and above surrogate_level (B,), and noise
    (B, ...), equal for the images of a prompt and seeded by (seed, purpose, prompt). The k-th of the T steps is drawn
    with a probability proportional to k."""
    groups = batch.image_index // args.group_size
    generators = [torch.Generator().manual_seed(image_seed(args.seed, f"{purpose} step", i)) for i in groups.tolist()]
    weights = torch.arange(args.num_inference_steps) + 1.0
    steps = torch.cat([torch.multinomial(weights, 1, generator=generator) for generator in generators])
    ends = batch.request.sigmas[steps + 1].clamp(min=args.surrogate_level)
    return steps, *draw_training_noise(args, purpose, groups, schedule, batch.request.latent_shape, ends)


# ==== 4 MODEL =========================================================================================================
TRAINED = ("default", "fake", "surrogate")  # the student, by peft's name, the fake score, and the learned reward
GRADIENTS = {"actor/grad_norm", "actor/fake_grad_norm", "surrogate/grad_norm"}  # of these, as metrics
OF_BASE = ("fake", "surrogate", "reference")  # the last is the teacher


def policy_names(args: Args) -> list[str]:
    """The policies that a run keeps (common/weights/policy.py)."""
    names = ["default"]
    if args.ema_decay > 0:
        names.append("ema")
    if not args.eval_only:
        names += OF_BASE
    return names


def load_policy(args: Args, inputs: Inputs, device: torch.device) -> Family:
    """The pipeline and its policies, sharded: the student begins as it was made, the others as the teacher."""
    prompts = inputs.drawn_prompts(args.num_steps, args.num_prompts, args.order_seed, args.negative_prompt)
    model = load_policies(
        args, inputs.family, inputs.lora, policy_names(args), prompts, device, trained=TRAINED, of_base=OF_BASE
    )
    shard(args, model, device)
    if args.student and not inputs.checkpoint:
        load_student(args.student, model)
    return model


def load_student(folder: str, model: Family) -> None:
    """Give the student, and its average, the full weights of a transformer's folder.

    Raises:
        RunError: in one line: a file is broken, or of another model.
    """
    tensors: dict[str, Tensor] = {}
    try:
        for file in sorted(Path(folder).glob("*.safetensors")):  # one, or the parts of a large model
            tensors |= load_file(file)
        for name in model.policies.keys() - set(OF_BASE):
            load_policy_tensors(model, name, tensors)
    except Exception as error:
        raise RunError(f"--student {folder}: {reason(error)}") from error


def make_optimizer(args: Args, model: Family, policy: str, learning_rate: float) -> AdamW:
    """AdamW of a policy that is trained."""
    parameters = parameters_of(model, policy)
    optimizer = AdamW(
        parameters, lr=learning_rate, betas=args.adam_betas, eps=args.adam_eps, weight_decay=args.weight_decay
    )
    return choose_adam_kernel(optimizer, model, args.adam_bits)  # foreach, fused, or torchao's of 8 bits


def constant_rates(args: Args) -> dict[str, float]:
    """The learning rates of the policies that are trained beside the student."""
    if args.eval_only:
        return {}
    return {"fake": args.fake_learning_rate, "surrogate": args.surrogate_learning_rate}


def shard(args: Args, model: Family, device: torch.device) -> None:
    """FSDP2: every block of the transformer, then the rest of it. A family's `forward` casts what it should."""
    dtype = getattr(torch, args.dtype)
    # FSDP must not cast the inputs: it would round the timesteps to bf16
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    on_cpu = "cpu_offload" in args.train_with
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_cpu else OffloadPolicy()
    mesh = shard_mesh(device, args.shard_ranks)
    for module in units_to_shard(model, mesh, dtype, args.train_with):  # each made ready: compiled, in fp32 ...
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=model.unsharded)


# ==== 5 ENGINE ========================================================================================================
# None: the few steps of a student are cheap, and no weights have to be pushed.


# ==== 6 ROLLOUT =======================================================================================================
def estimate(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """The image x0 = x - sigma v (B, ...) that a velocity v (B, ...) at x sees; sigma (B,)."""
    return x - sigma.view(-1, *[1] * (x.dim() - 1)).to(x.device) * v


@torch.no_grad()
def sample(model: Family, request: RolloutRequest) -> tuple[Tensor, Tensor]:
    """Sample B images by the ODE, x' = x + v dt, dt = sigma_next - sigma < 0.

    Returns the states that the T steps lead through (B, T + 1, ...), from the noise to the image, and the image that
    each step saw (`estimate`), (B, T, ...).
    """
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    x = request.first_latents(generators, model.device)  # (B, C, h, w)
    states = [x]
    estimates = []
    for i in range(len(request.timesteps)):
        v = model.predict_velocity(
            x, request.timesteps[i], request.conditioning, request.negative_conditioning, request.guidance_scale
        )
        sigma, sigma_next = request.sigmas[i : i + 2].tolist()
        estimates.append(x - sigma * v)
        x = x + (sigma_next - sigma) * v
        states.append(x)
    return torch.stack(states, 1), torch.stack(estimates, 1)


@torch.no_grad()
def rollout(args: Args, model: Family, request: RolloutRequest, scorer: Scorer) -> tuple[Tensor, Tensor]:
    """Sample the request's images, micro_batch_size at once; the scorer gets images as they are finished. Returns what
    `sample` does."""
    parts = []
    gathers_once = not {"cpu_offload", "gather_blocks"} & set(args.train_with)  # all weights, not a block in each pass
    with sampling(model, gathers_once):  # and the VAE stays on the device
        for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size):
            parts.append(sample(model, request.select(rows)))
            states, _ = parts[-1]
            scorer.add(rows.tolist(), model.decode(states[:, -1]))
    states, estimates = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    return states, estimates


class Batch(NamedTuple):
    """A rollout as the updates take it: B images of this rank, each at the step that is trained."""

    request: RolloutRequest
    image_index: Tensor  # (B,), the images' numbers over all ranks
    states: Tensor  # (B, T + 1, ...), of the whole path
    advantages: Tensor  # (B,)
    x: Tensor  # (B, ...), what the step began with
    sigma: Tensor  # (B,), there
    x_end: Tensor  # (B, ...), what it ended with
    end: Tensor  # (B,), sigma there
    x0: Tensor  # (B, ...), the image that the student saw in x


def make_batch(
    args: Args,
    request: RolloutRequest,
    image_index: Tensor,
    states: Tensor,
    estimates: Tensor,
    advantages: Tensor,
    step: int,
) -> Batch:
    """Take each image of a rollout at its trained step."""
    steps = draw_trained_steps(args, step, image_index)  # (B,)
    rows = torch.arange(len(steps))
    return Batch(
        request=request,
        image_index=image_index,
        states=states,
        advantages=advantages,
        x=states[rows, steps],
        sigma=request.sigmas[steps],
        x_end=states[rows, steps + 1],
        end=request.sigmas[steps + 1],
        x0=estimates[rows, steps],
    )


# ==== 7 ADVANTAGE =====================================================================================================
def compute_advantages(
    rewards: Tensor, group_size: int, adv_clip_max: float = 5.0, scale_rewards: str = "batch"
) -> Tensor:
    """A = (reward - mean of the group) / (S + 1e-4), clamped to +- adv_clip_max (Flow-GRPO, eq. 4), in fp64.

    rewards: (P * group_size,), group by group. S is the population standard deviation of the "group" (the paper) or of
    all rewards ("batch", its code); "none" does not divide. Returns (P * group_size,).
    """
    groups = rewards.double().view(-1, group_size)  # (P, G)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale_rewards == "batch":
        advantages = advantages / (groups.std(correction=0) + 1e-4)
    elif scale_rewards == "group":
        advantages = advantages / (groups.std(1, correction=0, keepdim=True) + 1e-4)
    # rewards that are equal up to round-off give exactly 0: with nothing to learn there must be no optimizer step
    return advantages.masked_fill(all_equal(groups), 0.0).clamp(-adv_clip_max, adv_clip_max).flatten()


def combine_advantages(args: Args, scores: Tensor, adv_clip_max: float) -> Tensor:
    """Advantages (N,) of scores (N, R) of R rewards. sum_then_normalize: the advantages of the scores' weighted sum.
    normalize_then_sum: each reward's own advantages, unclamped, are added by weight, and their sum is divided by its
    deviation over the rollout (--scale_rewards group: GDPO, 2601.05242). adv_clip_max: inf in contrib/flow_dppo.py.

    Scores are -inf where a prompt's record does not ask for the reward. Images whose prompts ask for the same rewards
    are normalised apart from the others, as if they were the whole rollout (docs/rewards.md)."""
    advantages = torch.zeros(len(scores), dtype=torch.float64)
    for rows, columns in asked_parts(scores):  # one part, unless records name theirs; of whole groups, in order
        part = scores[rows[:, None], columns]  # (n, r)
        scale_rewards = args.scale_rewards
        if args.multi_objective_aggregation == "normalize_then_sum" and len(columns) > 1:
            own_advantages = [compute_advantages(r, args.group_size, math.inf, scale_rewards) for r in part.T]
            part = torch.stack(own_advantages, 1)  # (n, r), advantages from here on
            scale_rewards = "batch"  # their sum has group mean 0 already: what is left is to divide it, and to clamp
        weights = part.new_tensor(args.reward_weights)[columns]  # (r,)
        totals = (part * weights).sum(1)  # (n,); @ would round equal rows differently
        advantages[rows] = compute_advantages(totals, args.group_size, adv_clip_max, scale_rewards)
    return advantages


# ==== 8 LOG PROB ======================================================================================================
# None: no step has a density. Errors of the surrogate take its place, and images that networks see in a noised one.
def diffuse(x_end: Tensor, end: Tensor, sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The forward process from x_end at level e on to s > e: x_s = a x_end + b noise, and dx_s/ds, (B, ...) each.

    a = (1 - s) / (1 - e), b = sqrt(s^2 - (e a)^2), so that x_s has s noise in all, where x_end has e. end and
    sigma: e and s, (B,).
    """
    noise = noise.to(x_end.device)
    e, s = (level.view(-1, *[1] * (x_end.dim() - 1)).to(x_end.device) for level in (end, sigma))
    a = (1 - s) / (1 - e)
    b = (s**2 - (e * a) ** 2).sqrt()
    velocity = -x_end / (1 - e) + (s + e**2 * a / (1 - e)) / b * noise
    return a * x_end + b * noise, velocity


@torch.no_grad()
def velocities_of(
    args: Args, model: Family, policy: str, batch: Batch, x_s: Tensor, sigma: Tensor, guidance: float
) -> Tensor:
    """Velocities (B, ...) of a policy with this guidance at x_s (B, ...) of levels sigma (B,)."""
    parts = []
    with acting(model, policy):
        for rows in torch.arange(len(x_s)).split(args.micro_batch_size):
            request = batch.request.select(rows)
            v = model.predict_velocity(
                x_s[rows], sigma[rows] * 1000, request.conditioning, request.negative_conditioning, guidance
            )
            parts.append(v)
    return torch.cat(parts)


# ==== 9 LOSS ==========================================================================================================
class Seen(NamedTuple):
    """The images that networks see in a student's noised one, (B, ...) each."""

    fake: Tensor  # by the fake score
    teacher: Tensor
    guided: Tensor  # by the teacher with its guidance
    surrogate: Tensor  # with its guidance, at a level of its own
    teacher_there: Tensor  # at that level


def student_loss(x0: Tensor, seen: Seen, surrogate_share: float) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss whose gradient by x0 is -D / number of elements, in fp64. With k = surrogate_share:

        D = (teacher - fake) / w + (1 - k) (guided - teacher) / w + k (surrogate - teacher_there) / w_r,

    where w = mean |x0 - guided| and w_r = mean |x0 - surrogate| of each image. The first term is TDM's reverse KL, the
    second guidance as a reward, and the third the surrogate reward's gradient.
    x0 (B, ...): the student's images. Returns the loss, to be minimised, and its metrics, scalars without gradient.
    """
    with torch.no_grad():
        # in fp64, in which a difference of two alike images keeps its digits
        fake, teacher, guided, surrogate, teacher_there = (image.double() for image in seen)

        def distance(image: Tensor) -> Tensor:
            return (x0.double() - image).abs().flatten(1).mean(1).clamp(min=1e-8).view(-1, *[1] * (x0.dim() - 1))

        matching = (teacher - fake) / distance(guided)
        guidance = (guided - teacher) / distance(guided)
        reward = (surrogate - teacher_there) / distance(surrogate)
        direction = matching + (1 - surrogate_share) * guidance + surrogate_share * reward
    target = (x0.double() + direction).detach()
    loss = 0.5 * ((x0.double() - target) ** 2).mean()
    metrics = {"loss": loss, "teacher_distance": distance(guided).mean(), "score_difference": matching.abs().mean()}
    metrics |= {"guidance_difference": guidance.abs().mean(), "reward_difference": reward.abs().mean()}
    return loss, {f"actor/{name}": value.detach() for name, value in metrics.items()}


def surrogate_loss(
    v: Tensor,
    v_ref: Tensor,
    target: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    group_size: int,
    dpo_beta: float,
    max_deviation: float,
    kl_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean(w -log sigmoid(R+ - R-)) / dpo_beta over groups + kl_coef mean(w d), d = mean((v - v_ref)^2) per image.

    R+ - R- = dpo_beta / G sum_i A_i (e_ref_i - e_i), e = mean((v - target)^2) per image, in fp64: DGPO's loss of what
    the surrogate and the teacher say of a group. An e has no gradient where d is above max_deviation and e is on that
    side of e_ref which A wants. v, v_ref and target (b, ...): velocities of surrogate and teacher, and dx_s/ds.
    advantages A and weights w (b,), group by group, one w in each. Returns the loss, to be minimised, and its metrics,
    scalars without gradient.
    """
    errors, ref_errors = (((velocity - target).double() ** 2).flatten(1).mean(1) for velocity in (v, v_ref))  # (b,)
    deviations = ((v - v_ref).double() ** 2).flatten(1).mean(1)
    has_moved = torch.where(advantages > 0, errors < ref_errors, errors > ref_errors)
    is_far = (deviations > max_deviation) & has_moved
    kept = torch.where(is_far, errors.detach(), errors)
    logits = dpo_beta * (advantages * (ref_errors - kept)).view(-1, group_size).mean(1)  # (groups,)
    preference = -(weights.view(-1, group_size)[:, 0] * F.logsigmoid(logits)).mean() / dpo_beta
    loss = preference + kl_coef * (weights * deviations).mean()
    metrics = {"loss": loss, "margin": logits.mean(), "deviation": deviations.mean()}
    metrics["clipfrac"] = (is_far & (advantages != 0)).double().mean()
    return loss, {f"surrogate/{name}": value.detach().double() for name, value in metrics.items()}


def accumulate_gradients(args: Args, model: Family, batch: Batch, seen: Seen) -> list[dict[str, Tensor]]:
    """Add up the student's gradient of student_loss over this rank's B images, at their trained steps.

    A pass, forward and backward, is one micro-batch. Micro-batches of one size and FSDP's average over ranks weigh
    images alike. Returns the metrics of every pass.
    """
    micro_batches = torch.arange(len(batch.x0)).split(args.micro_batch_size)
    # FSDP averages gradients over the ranks in every backward pass; the last pass alone is enough, so we switch it off
    # until then. Not for full weights: their unsharded fp32 gradients are as large as the model and would not fit
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes: list[dict[str, Tensor]] = []
    for rows in micro_batches:
        if len(passes) == len(micro_batches) - 1:
            model.transformer.set_requires_gradient_sync(True)
        request = batch.request.select(rows)
        x, sigma = batch.x[rows], batch.sigma[rows]
        v = model.predict_velocity(
            x, sigma * 1000, request.conditioning, request.negative_conditioning, request.guidance_scale
        )
        of_rows = Seen(*(image[rows] for image in seen))
        loss, metrics = student_loss(estimate(x, v, sigma), of_rows, args.surrogate_share)
        (loss / len(micro_batches)).backward()
        passes.append(metrics)
    return passes


def accumulate_fake_gradients(
    args: Args, model: Family, batch: Batch, sigmas: Tensor, noise: Tensor
) -> list[dict[str, Tensor]]:
    """Add up the fake score's gradient of mean((v - (x_s - x0) / s)^2): which image the student saw in the step whose
    end was noised.

    `fake` acts. sigmas (B,), noise (B, ...). Passes and ranks as in accumulate_gradients.
    """
    micro_batches = torch.arange(len(batch.x0)).split(args.micro_batch_size)
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    x_s, _ = diffuse(batch.x_end, batch.end, sigmas, noise)
    targets = (x_s - batch.x0) / sigmas.view(-1, *[1] * (x_s.dim() - 1)).to(x_s.device)
    passes: list[dict[str, Tensor]] = []
    for rows in micro_batches:
        if len(passes) == len(micro_batches) - 1:
            model.transformer.set_requires_gradient_sync(True)
        request = batch.request.select(rows)
        v = model.predict_velocity(
            x_s[rows],
            sigmas[rows] * 1000,
            request.conditioning,
            request.negative_conditioning,
            request.guidance_scale,
        )
        loss = ((v - targets[rows]) ** 2).mean()
        (loss / len(micro_batches)).backward()
        passes.append({"actor/fake_loss": loss.detach().double()})
    return passes


def accumulate_surrogate_gradients(
    args: Args, model: Family, batch: Batch, steps: Tensor, sigmas: Tensor, noise: Tensor
) -> list[dict[str, Tensor]]:
    """Add up the surrogate's gradient of surrogate_loss at the sampling steps `steps` (B,), equal in a group.

    A group's weight is k / T at the k-th of its T steps. sigmas (B,), noise (B, ...). Passes and ranks as in
    accumulate_gradients, but of whole groups.
    """
    x_s, targets = diffuse(
        batch.states[torch.arange(len(steps)), steps + 1], batch.request.sigmas[steps + 1], sigmas, noise
    )
    v_ref = velocities_of(args, model, "reference", batch, x_s, sigmas, args.guidance_scale)
    weights = ((steps + 1) / args.num_inference_steps).to(x_s.device)  # (B,)
    micro_batches = torch.arange(len(x_s)).split(args.micro_batch_size)
    passes: list[dict[str, Tensor]] = []
    with acting(model, "surrogate"):
        model.transformer.set_requires_gradient_sync(not model.is_lora)
        for rows in micro_batches:
            if len(passes) == len(micro_batches) - 1:
                model.transformer.set_requires_gradient_sync(True)
            request = batch.request.select(rows)
            v = model.predict_velocity(
                x_s[rows],
                sigmas[rows] * 1000,
                request.conditioning,
                request.negative_conditioning,
                request.guidance_scale,
            )
            loss, metrics = surrogate_loss(
                v,
                v_ref[rows],
                targets[rows],
                batch.advantages[rows],
                weights[rows],
                group_size=args.group_size,
                dpo_beta=args.dpo_beta,
                max_deviation=args.max_deviation,
                kl_coef=args.kl_coef,
            )
            (loss / len(micro_batches)).backward()
            passes.append(metrics)
    return passes


def optimizer_step(args: Args, model: Family, optimizer: AdamW) -> float:
    """Clip the gradient, take one AdamW step at the schedule's rate, update the EMA. Returns the norm before clipping,
    equal on all ranks.

    The step is left out where the norm is not finite, or is 0: AdamW would move the weights with nothing to learn.
    """
    group = optimizer.param_groups[0]
    norm = torch.nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm)
    grad_norm = norm.full_tensor().item()  # type: ignore[attr-defined]  # FSDP's is a DTensor
    if 0 < grad_norm < math.inf:
        model.num_updates += 1  # a checkpoint holds this count
        k = model.num_updates
        num_updates = args.num_steps * workload(args).updates_per_step  # of the whole run
        group["lr"] = args.learning_rate * lr_factor(args.lr_schedule, k, num_updates)
        optimizer.step()
        if args.ema_decay > 0:
            follow(model, "ema", min(args.ema_decay, (1 + k) / (10 + k)))  # the average's decay, smaller at first
    optimizer.zero_grad()
    return grad_norm


def update(
    args: Args,
    model: Family,
    optimizer: AdamW,
    batch: Batch,
    levels: tuple[Tensor, Tensor],
    surrogate_levels: tuple[Tensor, Tensor],
) -> dict[str, float]:
    """One optimizer step of the student on this rank's B images. Returns metrics over all ranks.

    levels: sigmas (B,) and noise (B, ...) of the teacher and the fake score. surrogate_levels: of the surrogate.
    """

    def look(policy: str, x_s: Tensor, sigmas: Tensor, guidance: float) -> Tensor:
        return estimate(x_s, velocities_of(args, model, policy, batch, x_s, sigmas, guidance), sigmas)

    x_s, _ = diffuse(batch.x_end, batch.end, *levels)
    x_r, _ = diffuse(batch.x_end, batch.end, *surrogate_levels)
    seen = Seen(
        fake=look("fake", x_s, levels[0], args.guidance_scale),
        teacher=look("reference", x_s, levels[0], args.guidance_scale),
        guided=look("reference", x_s, levels[0], args.teacher_guidance),
        surrogate=look("surrogate", x_r, surrogate_levels[0], args.surrogate_guidance),
        teacher_there=look("reference", x_r, surrogate_levels[0], args.guidance_scale),
    )
    passes = accumulate_gradients(args, model, batch, seen)
    grad_norm = optimizer_step(args, model, optimizer)
    metrics: dict[str, float] = {}
    metrics["actor/skipped_steps"] = 0
    metrics["actor/lr"] = optimizer.param_groups[0]["lr"]
    if math.isfinite(grad_norm):  # it is over all ranks: they skip together
        metrics["actor/grad_norm"] = grad_norm
        metrics |= mean_over_ranks(passes)
    else:
        metrics["actor/skipped_steps"] = 1
    return metrics


def constant_step(args: Args, optimizer: AdamW) -> float:
    """Clip the gradient and take one AdamW step at the constant rate. Returns the norm before clipping, equal on all
    ranks. The step is left out where the norm is not finite, or is 0."""
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], args.max_grad_norm)
    grad_norm = norm.full_tensor().item()  # type: ignore[attr-defined]  # FSDP's is a DTensor
    if 0 < grad_norm < math.inf:
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def update_fake(
    args: Args, model: Family, optimizer: AdamW, batch: Batch, levels: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """An optimizer step of the fake score on this rank's B images for each of `levels`, sigmas (B,) and noise (B, ...).

    Returns metrics over all ranks.
    """
    grad_norms = []
    finite_passes = []  # of the optimizer steps whose gradient is finite
    num_skipped = 0
    for sigmas, noise in levels:
        with acting(model, "fake"):
            passes = accumulate_fake_gradients(args, model, batch, sigmas, noise)
        grad_norm = constant_step(args, optimizer)
        if math.isfinite(grad_norm):  # it is over all ranks: they skip together
            grad_norms.append(grad_norm)
            finite_passes += passes
        else:
            num_skipped += 1
    metrics: dict[str, float] = {"actor/skipped_fake_steps": num_skipped}
    if grad_norms:
        metrics["actor/fake_grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics |= mean_over_ranks(finite_passes)
    return metrics


def update_surrogate(
    args: Args, model: Family, optimizer: AdamW, batch: Batch, draws: Iterable[tuple[Tensor, Tensor, Tensor]]
) -> dict[str, float]:
    """An optimizer step of the surrogate on this rank's B images for each of `draws`: sampling steps (B,), sigmas (B,)
    and noise (B, ...). Returns metrics over all ranks."""
    grad_norms = []
    finite_passes = []  # of the optimizer steps whose gradient is finite
    num_skipped = 0
    for steps, sigmas, noise in draws:
        passes = accumulate_surrogate_gradients(args, model, batch, steps, sigmas, noise)
        grad_norm = constant_step(args, optimizer)
        if math.isfinite(grad_norm):  # it is over all ranks: they skip together
            grad_norms.append(grad_norm)
            finite_passes += passes
        else:
            num_skipped += 1
    metrics: dict[str, float] = {"surrogate/skipped_steps": num_skipped}
    if grad_norms:
        metrics["surrogate/grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics |= mean_over_ranks(finite_passes)
    return metrics


# ==== 10 EVAL =========================================================================================================
def evaluate(args: Args, run: Run, model: Family, inputs: Inputs) -> tuple[dict, list | None]:
    """Images of every held-out prompt, from the same seeds every time, shared by the ranks, and scored as PIL images.

    Returns their metrics (rewards, failures, diversity, drift) and, on rank 0, up to 32 images as (PIL image, caption).
    Except with --eval_only, the policy of the best evaluation is saved.
    """
    with run.timed("testing"):
        places, prompts, seeds = share_eval_images(inputs.eval_set, args.eval_images_per_prompt)  # B each: this rank's
        eval_guidance = args.eval_guidance_scale or args.guidance_scale  # at least 1, or None
        eval_args = replace(args, num_inference_steps=args.eval_num_inference_steps, guidance_scale=eval_guidance)
        prompt_index = torch.arange(len(places))  # a prompt for each image; prompts may repeat
        request = make_request(eval_args, model, prompts, prompt_index, seeds)
        with acting(model, args.evaluated_policy):
            scorer = Scorer(inputs.eval_rewards, prompts, args.reward_failure)
            rollout(eval_args, model, request, scorer)
            scores = scorer.scores(places, args.eval_images_per_prompt)  # (B, R), of inputs.eval_rewards
        metrics, grid = evaluate_samples(args, run, scorer, places=places, seeds=seeds, scores=scores)
        if not args.eval_only:
            run.save_if_best(model, args.evaluated_policy, metrics)
    return metrics, grid


# ==== 11 CHECKPOINT ===================================================================================================
def save(args: Args, run: Run, model: Family, optimizers: dict[str, AdamW], sampler: GroupSampler) -> None:
    """Write all that training changes, for any number of ranks to resume from; and the policy for diffusers, of full
    weights only at the end."""
    state = training_state(model, optimizers, run.checkpoint_path)  # full weights are written now, beside this path
    state["sampler"] = sampler.state_dict()
    run.save_checkpoint(state, model, args.evaluated_policy)


def load(args: Args, run: Run, model: Family, optimizers: dict[str, AdamW], sampler: GroupSampler) -> None:
    """Restore what `save` wrote, on any number of ranks; and the run's step, best score and unlogged metrics."""
    state = run.load_checkpoint()
    load_training_state(model, optimizers, state)
    sampler.load_state_dict(state["sampler"])
    for optimizer in optimizers.values():
        adam = optimizer.param_groups[0]
        adam["weight_decay"] = args.weight_decay  # this run's; the student's rate is set at every optimizer step
        adam["betas"] = args.adam_betas
        adam["eps"] = args.adam_eps
    for name, learning_rate in constant_rates(args).items():
        optimizers[name].param_groups[0]["lr"] = learning_rate
    run.repair_adapter(model, args.evaluated_policy)  # of a run that has all its steps


# ==== 12 MAIN =========================================================================================================
def main(args: Args, inputs: Inputs) -> None:
    device = setup_distributed(args.shard_ranks, args.ranks_per_image)
    args = choose_sizes(args, inputs, workload(args))  # what fits, where an option is 0; rank and alpha of --lora_path
    run = Run(args, inputs.all_rewards, script=__file__, checkpoint=inputs.checkpoint, workload=workload(args))
    model = load_policy(args, inputs, device)
    optimizers = {"default": make_optimizer(args, model, "default", args.learning_rate)}
    optimizers |= {name: make_optimizer(args, model, name, rate) for name, rate in constant_rates(args).items()}
    sampler = GroupSampler(inputs.train_set.parts, args.num_prompts, args.group_size, seed=args.order_seed)
    num_tensors = len(optimizers["default"].param_groups[0]["params"])
    run.print_message(f"{sampler}; {'LoRA' if model.is_lora else 'full weights'}, {num_tensors} tensors")
    _, levels, latent_shape = model.schedule(model.level_steps, *args.image_size, args.num_frames)
    schedule = levels.tolist()

    # RUN LOGIC, the same in all scripts: resume; evaluate first, or redo the evaluation that failed (run.unlogged)
    if run.checkpoint:
        load(args, run, model, optimizers, sampler)
    if args.eval_only or run.unlogged or not run.checkpoint:
        run.log(*evaluate(args, run, model, inputs))
    last_step = run.step if args.eval_only else args.num_steps  # --eval_only takes no training step

    for step in range(run.step + 1, last_step + 1):
        run.begin_step(step, sampler, lambda: save(args, run, model, optimizers, sampler))  # saves if a rollout fails

        # the student samples G images for each prompt, which are scored as they are finished
        with run.timed("gen", per_image=True):
            prompt_rows, prompt_index, image_index = sampler.draw()  # (U,) of train_set; (B,) of these U; (B,)
            prompts = inputs.train_set.select(prompt_rows)
            seeds = [image_seed(args.seed, step, index) for index in image_index.tolist()]
            request = make_request(args, model, prompts, prompt_index, seeds)
            scorer = Scorer(inputs.rewards, prompts.select(prompt_index), args.reward_failure)
            states, estimates = rollout(args, model, request, scorer)
        with run.timed("reward", per_image=True):
            # (N, R): NaN where scoring failed, -inf where a prompt's record does not ask for the reward
            scores = gather_rows(scorer.scores(image_index, args.group_size), image_index)

        # compare the images of a prompt (Flow-GRPO, eq. 4); a failed image, or one without others, gets 0
        with run.timed("adv"):
            filled, is_compared = fill_failed(scores, inputs.rewards, args.group_size)  # (N, R), (N,)
            advantages = combine_advantages(args, filled, args.adv_clip_max).where(is_compared, 0.0)  # (N,)
            metrics = reward_metrics(scores, advantages, inputs.rewards, args.reward_weights, args.group_size)

        with run.updating():
            local_advantages = advantages[image_index].to(device)  # (B,)
            batch = make_batch(args, request, image_index, states, estimates, local_advantages, step)
            # the fake score learns what the student draws, and the surrogate which images of a prompt are better
            of_fake = (
                draw_training_noise(args, f"{step} fake {k}", image_index, schedule, latent_shape, batch.end)
                for k in range(args.fake_updates)
            )
            metrics |= update_fake(args, model, optimizers["fake"], batch, of_fake)
            of_surrogate = (
                draw_for_surrogate(args, f"{step} surrogate {k}", batch, schedule)
                for k in range(args.surrogate_updates)
            )
            metrics |= update_surrogate(args, model, optimizers["surrogate"], batch, of_surrogate)
            # the student goes where the teacher, its guidance and the surrogate point
            ends = batch.end, batch.end.clamp(min=args.surrogate_level)
            own, asked = (
                draw_training_noise(args, f"{step} {purpose}", image_index, schedule, latent_shape, end)
                for purpose, end in zip(("update", "reward"), ends, strict=True)
            )
            metrics |= update(args, model, optimizers["default"], batch, own, asked)

        # RUN LOGIC, the same in all scripts: evaluate, log, save, stop
        metrics |= {"training/epoch": sampler.epoch}
        # keeps them until `log`
        run.end_step(metrics, has_gradient=metrics.keys() >= GRADIENTS)
        is_due = step % args.eval_every == 0 or step == args.num_steps
        val_metrics, grid = evaluate(args, run, model, inputs) if is_due else ({}, None)
        run.log(val_metrics, grid)  # ends the run at a NaN, or after three steps in a row without a finite gradient
        stopping = run.should_stop()  # asked before `save`, which writes more at the end
        if step % (args.save_every or args.eval_every) == 0 or step == args.num_steps or stopping:
            save(args, run, model, optimizers, sampler)
        if stopping:
            break

    run.close()


if __name__ == "__main__":
    with friendly_errors():  # an expected error ends the script in one line, without a traceback
        args = check(parse_args(Args, __doc__))
        main(args, prepare(args))
