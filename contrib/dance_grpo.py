"""DanceGRPO (arXiv 2505.07818v4): Flow-GRPO with constant noise and a shared start, the whole algorithm in one file.

DanceGRPO appeared together with Flow-GRPO and is nearly the same algorithm. Its SDE steps inject the same noise
everywhere, while Flow-GRPO's inject more where the image is noisier. All images of a prompt start from one noise, so
they differ only by the noise of the SDE steps.
Everything that is not named here is as in flow_grpo.py, whose header has the equations. Read `main`, at the end, first:

  1. The images of a prompt start from one noise (section 2.2, Initialization Noise): `share_initial_noise`.
  2. SDE steps have constant noise (eq. 8): --sde_type dance, by `dance` of common/sde.py.

    torchrun --standalone -m contrib.dance_grpo                       # assets/embedded, vLLM-Omni's rollouts
    torchrun --standalone -m contrib.dance_grpo --rollout local       # the training transformer samples: no vLLM needed

Where it departs from the paper: the noise level and the window have flow_grpo.py's defaults, and the deviation in the
advantages is the rollout's (--scale_rewards group: the prompt's group, as in the paper).
Other defaults than flow_grpo.py's: kl_coef 0 (there 0.06), 30 training steps (40) of four updates (two), and a constant
rate of 1e-3 (a cosine from 1.5e-3).

Parent: flow_grpo.py
"""

# ==== 1 ARGS ==========================================================================================================
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from common.data import GroupSampler, PromptSet, fit_micro_batch, share_eval_images
from common.distributed import gather_rows, mean_over_ranks, setup_distributed, shard_mesh
from common.files import read_prompts
from common.metrics import norm_ratio, reward_metrics
from common.models import Family, find_family
from common.options import (
    Bound,
    CodeOrName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RatioArgs,
    lr_factor,
)
from common.redraw import StepRollouts
from common.rewards import load_rewards, with_preservation
from common.rollout import RolloutRequest, Trajectories
from common.run import (
    Inputs,
    Run,
    check_inputs,
    checkpoint_to_resume,
    choose_sizes,
    evaluate_samples,
    friendly_errors,
    log_rollout,
    parse_args,
)
from common.scoring import Scorer, all_equal, asked_parts, fill_failed
from common.sde import SDEStepOutput, check_step_kind, check_window, image_seed, sde_step
from common.weights import (
    acting,
    choose_adam_kernel,
    follow,
    load_policies,
    load_training_state,
    make_lora,
    sampling,
    training_state,
    units_to_shard,
)
from common.workload import Workload

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import AdamW

if TYPE_CHECKING:
    from common.engine import VLLMEngine


@dataclass
class Args(RatioArgs):  # which has the shared options (common/options.py); parse_args refuses values beyond a Bound
    # ---- run
    name: str = "dance_grpo"
    """the run's folder is runs/<name>, or an absolute path; it must not hold a run yet, unless you resume it"""

    # ---- rollout
    num_prompts: PositiveInt = 32
    """prompts per rollout, over all ranks"""
    group_size: Annotated[int, Bound(at_least=2)] = 8
    """images per prompt, at least 2: the reward of each is compared with the group's mean"""
    num_inference_steps: Annotated[int, Bound(at_least=2)] = 3
    """sampling steps of a training image (Flow-GRPO: 10, and 40 in evaluation)"""
    guidance_scale: Annotated[float, Bound(at_least=1)] = 1.0
    """guidance in rollout and training, and in evaluation unless --eval_guidance_scale differs, as the model takes it
    (docs/models.md); 1 turns it off, but for FLUX.1's guidance embedding"""
    sde_type: CodeOrName = "dance"
    """formula of the SDE steps: sde, dance, cps, cps_gauss (docs/flow_grpo.md), or your own path/to/file.py:function"""
    noise_level: PositiveFloat = 0.7
    """scale of the noise that SDE steps inject (Flow-GRPO: 0.7); at most 1 for cps and cps_gauss"""
    sde_window_size: NonNegativeInt = 1
    """consecutive sampling steps that are SDE steps and trained; 0: all but the last, whatever the range"""
    sde_window_range: tuple[int, int] = (0, 1)
    """the window is drawn, once per rollout, within sampling steps lo to hi - 1, counted from 0; hi is
    at most num_inference_steps - 1"""

    # ---- algorithm
    clip_range: PositiveFloat = 1e-3
    """the ratio is clipped to 1 +- this; small, because log-probs are means over the latent (SD3.5 at 512: 1e-4)"""
    kl_coef: NonNegativeFloat = 0.0
    """factor of the KL to the reference, the model before training (Flow-GRPO: 0.04 for OCR, 0.01 for PickScore)"""
    kl_type: Literal["code", "paper", "velocity"] = "code"
    """code: with --sde_type sde the KL times the step's |dt|, as published coefficients assume; paper: without |dt|;
    velocity: the mean squared difference of the velocities, as in DiffusionNFT, on whose scale kl_coef then is"""
    adv_clip_max: PositiveFloat = 5.0
    """advantages are clamped to +- this"""
    scale_rewards: Literal["batch", "group", "none"] = "batch"
    """divide advantages by the deviation of the rollout's rewards (batch), of the group's, or not at all (Dr.GRPO)"""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """with several rewards. sum_then_normalize: advantages of their weighted sum; normalize_then_sum: weighted sum of
    each reward's own advantages, divided by that sum's deviation over the rollout (GDPO if --scale_rewards is group)"""

    # ---- optimization
    num_steps: NonNegativeInt = 30
    """training steps of the run, each a rollout and its updates"""
    updates_per_rollout: PositiveInt = 4
    """mini-batches that a rollout is cut into, an optimizer step each; the later ones are off-policy"""
    epochs_per_rollout: PositiveInt = 1
    """how often each of those mini-batches is trained on, an optimizer step each time"""
    micro_batch_size: NonNegativeInt = 64
    """images per pass on a rank, and by default per local sampling batch; lowered to a rank's share of a mini-batch,
    which it must divide; 0: what fits a GPU"""
    learning_rate: NonNegativeFloat = 1e-3
    """learning rate of AdamW (Flow-GRPO: 3e-4)"""


# ==== 2 SETUP =========================================================================================================
def check(args: Args) -> Args:
    """Refuse options that cannot work together. Returns them, micro_batch_size lowered to a rank's mini-batch."""
    check_step_kind(args.sde_type, args.noise_level)
    if args.eval_only:  # no mini-batches are cut
        return args
    num_images = args.num_prompts * args.group_size
    micro_batch_size = fit_micro_batch(
        num_images, args.updates_per_rollout, args.micro_batch_size, ranks_per_image=args.ranks_per_image
    )
    if args.sde_window_size:
        check_window(args.sde_window_range, args.sde_window_size, args.num_inference_steps)
    sums_advantages = len(args.reward) > 1 and args.multi_objective_aggregation == "normalize_then_sum"
    if sums_advantages and args.scale_rewards == "none":
        raise ValueError("--multi_objective_aggregation normalize_then_sum: needs --scale_rewards group or batch")
    return replace(args, micro_batch_size=micro_batch_size)


def workload(args: Args) -> Workload:
    """What a training step samples, trains and keeps: for the plan, the sizes that fit, and perf/mfu."""
    return Workload(
        num_images=args.num_prompts * args.group_size,
        num_prompts=args.num_prompts,
        sampled_steps=args.num_inference_steps,
        trained_steps=args.sde_window_size or args.num_inference_steps - 1,
        policies=tuple(policy_names(args)),
        acting_passes=int(args.kl_coef > 0),
        guidance_scale=args.guidance_scale,
        trained_guidance=args.guidance_scale,
        updates=args.updates_per_rollout,
        epochs=args.epochs_per_rollout,
        recomputes_log_probs=args.old_log_prob == "recompute",
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
    # diffusers and peft, which take seconds to import, come last
    height, width = args.image_size
    length = args.max_sequence_length
    family = find_family(args.model, height, width, args.num_frames, args.guidance_scale, length, args.family)
    if args.rollout == "vllm":
        from common.engine import check_engine

        check_engine(family, args.model, args.engine_devices, args.rollout_correction)
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
        group_size=args.group_size,
    )
    return inputs


# ==== 3 DATA ==========================================================================================================
def make_request(
    args: Args,
    model: Family,
    prompts: PromptSet,
    prompt_index: Tensor,
    seeds: list[int],
    sde_steps: tuple[int, ...] = (),
) -> RolloutRequest:
    """A request for B images of U prompts, encoded: prompt_index (B,) says which prompt, seeds (B) which noise."""
    height, width = args.image_size
    length = args.max_sequence_length
    negatives = prompts.negatives(args.negative_prompt)
    timesteps, sigmas, latent_shape = model.schedule(args.num_inference_steps, height, width, args.num_frames)
    return RolloutRequest(
        conditioning=model.encode(prompts, length, args.image_size, args.num_frames),
        negative_conditioning=model.encode_negative(negatives, args.guidance_scale, length),  # None: no second pass
        prompt_index=prompt_index,
        seeds=seeds,
        timesteps=timesteps.to(model.device),  # (T,), 1000 sigma, which predict_velocity takes
        sigmas=sigmas,  # (T + 1,), on the CPU, as they become Python's floats
        latent_shape=latent_shape,  # (C, h, w); (C, f, h, w) for a video
        height=height,
        width=width,
        sde_steps=sde_steps,
        sde_type=args.sde_type,
        noise_level=args.noise_level,
        guidance_scale=args.guidance_scale,
    )


def share_initial_noise(
    args: Args, model: Family, request: RolloutRequest, step: int, numbers: Tensor
) -> RolloutRequest:
    """Let all images of a prompt start from one noise (DanceGRPO, section 2.2), seeded by numbers (B,), each image's
    prompt among the step's P."""
    generators = []
    for prompt in numbers.tolist():
        seed = image_seed(args.seed, f"{step} prompt", prompt)
        generators.append(torch.Generator().manual_seed(seed))
    noise = request.first_latents(generators, model.device)  # (B, C, h, w)
    return replace(request, initial_latents=noise)


def draw_sde_steps(args: Args, step: int) -> tuple[int, ...]:
    """The SDE steps of this rollout, which are the trained ones: a random window, or all but the last sampling step.

    step: the training step, whose window is the same for every image and rank.
    """
    if args.sde_window_size == 0:
        return tuple(range(args.num_inference_steps - 1))
    low, high = args.sde_window_range
    start = random.Random(args.seed + step).randint(low, high - args.sde_window_size)
    return tuple(range(start, start + args.sde_window_size))


# ==== 4 MODEL =========================================================================================================
def policy_names(args: Args) -> list[str]:
    """The policies that a run keeps (common/weights/policy.py)."""
    names = ["default"]  # peft's name for the trained one
    if args.ema_decay > 0:
        names.append("ema")
    if args.kl_coef > 0 and not args.eval_only:
        names.append("reference")  # of a new LoRA that is the base model
    return names


def load_policy(args: Args, inputs: Inputs, device: torch.device) -> tuple[Family, list[torch.nn.Parameter]]:
    """The pipeline and its policies, sharded; and the parameters that are trained."""
    # at most, in a step; a curriculum may draw any
    num_prompts = len(inputs.train_set) if args.curriculum else args.num_prompts * args.max_rollouts
    prompts = inputs.drawn_prompts(args.num_steps, num_prompts, args.order_seed, args.negative_prompt)
    model = load_policies(args, inputs.family, inputs.lora, policy_names(args), prompts, device)
    shard(args, model, device)
    return model, [p for p in model.transformer.parameters() if p.requires_grad]


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
def start_engine(args: Args, folder: Path, device: torch.device) -> "VLLMEngine | None":
    """This rank's vLLM-Omni engine, loading in the background while the trainer loads; None with --rollout local."""
    if args.rollout == "local":
        return None
    from common.engine import launch

    return launch(args, folder, device)


# ==== 6 ROLLOUT =======================================================================================================
@torch.no_grad()
def sample_locally(model: Family, request: RolloutRequest) -> Trajectories:
    """Sample the request's B images with the training transformer, by the SDE and ODE steps that it asks for."""
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    first_latents = request.first_latents(generators, model.device)  # (B, ...)
    outputs = []
    x = first_latents
    for i in range(len(request.timesteps)):
        outputs.append(policy_step(model, request, x, i, generator=generators))  # an SDE step draws from each
        x = outputs[-1].prev_sample  # the next x, by diffusers' name
    return Trajectories.from_steps(first_latents, outputs, model.decode(x))


def rollout(
    args: Args, model: Family, engine: "VLLMEngine | None", request: RolloutRequest, scorer: Scorer | None = None
) -> Trajectories:
    """The trajectories of the request's images, on the training device; the scorer gets images as they are finished."""
    if engine:
        finished = scorer.add if scorer else None
        return engine.generate(request, finished=finished).to(model.device)
    parts = []
    gathers_once = not {"cpu_offload", "gather_blocks"} & set(args.train_with)  # all weights, not a block in each pass
    with sampling(model, gathers_once):  # and the VAE stays on the device
        # by default the update's own micro-batches: its first log-probs are these, and the ratio is exactly 1
        for rows in torch.arange(len(request.seeds)).split(args.rollout_batch_size or args.micro_batch_size):
            parts.append(sample_locally(model, request.select(rows)))
            if scorer:
                scorer.add(rows.tolist(), parts[-1].images)
    return Trajectories.cat(parts)


class OldPolicy(NamedTuple):
    """The policy that sampled, as the update needs it: the ratio's denominator. B images, W trained steps."""

    log_probs: Tensor  # (B, W)
    means: Tensor  # (B, W, ...), for a loss that compares means: of grpo_guard.py and its copies
    sample_weights: Tensor  # (B, W), factors of the loss that make up for the engine's mismatch, or 1


class Batch(NamedTuple):
    """A rollout as the update takes it: B images of this rank."""

    request: RolloutRequest
    trajectories: Trajectories  # latents (B, T + 1, ...)
    old: OldPolicy
    advantages: Tensor  # (B,)


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
def policy_step(
    model: Family,
    request: RolloutRequest,
    x: Tensor,
    i: int,
    *,
    generator: list[torch.Generator] | None = None,
    prev_sample: Tensor | None = None,
) -> SDEStepOutput:
    """Sampling step i of the policy from x (B, ...): where it goes, with the density of going there (Flow-GRPO, eq. 9).

    An SDE step of --sde_type sde, with q = noise_level sqrt(s / (1 - min(s, sigma_max))), s = sigma, eps ~ N(0, 1):
        x' = x + [v + q^2 / (2 s) (x + (1 - s) v)] dt + q sqrt(-dt) eps,    dt = sigma_next - sigma < 0.
    It is a Gaussian policy: log_prob (B,) is the *mean* over elements of log N(x'; mean, std). Other steps are the
    ODE's Euler step x + v dt, without a density. `generator`, one for each image, draws x'; or x' is given as
    `prev_sample` (B, ...), diffusers' name for it. request: of these B images alone, as `select` gives it, a row of
    conditioning for each.
    """
    v = model.predict_velocity(
        x, request.timesteps[i], request.conditioning, request.negative_conditioning, request.guidance_scale
    )
    sigma, sigma_next = request.sigmas[i : i + 2].tolist()
    noise_level = request.noise_level if i in request.sde_steps else 0.0
    return sde_step(
        x,
        v,
        sigma,
        sigma_next,
        noise_level,
        sde_type=request.sde_type,
        sigma_max=request.sigma_max,  # the schedule's second
        generator=generator,
        prev_sample=prev_sample,
    )


@torch.no_grad()
def recompute_log_probs(args: Args, model: Family, request: RolloutRequest, trajectories: Trajectories) -> Trajectories:
    """The same trajectories with log_probs, means and velocities of the acting policy: the trained one, except within
    `acting`."""
    log_probs = []
    means = []
    velocities = []
    for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size):
        sub_request = request.select(rows)
        x = trajectories.latents[rows]  # (b, T + 1, ...)
        outs = [policy_step(model, sub_request, x[:, i], i, prev_sample=x[:, i + 1]) for i in request.sde_steps]
        log_probs.append(torch.stack([out.log_prob for out in outs], 1))
        means.append(torch.stack([out.prev_sample_mean for out in outs], 1))
        velocities.append(torch.stack([out.velocity for out in outs], 1))
    return replace(
        trajectories,
        log_probs=torch.cat(log_probs),
        prev_sample_means=torch.cat(means),
        velocities=torch.cat(velocities),
    )


def find_old_policy(
    args: Args, model: Family, engine: "VLLMEngine | None", request: RolloutRequest, trajectories: Trajectories
) -> tuple[OldPolicy, dict]:
    """The policy that sampled, and metrics of how far engine and trainer disagree; beyond a gate the run ends.

    Its log-probs are the rollout's with --old_log_prob rollout, or where the trainer sampled in the update's own
    micro-batches; otherwise they are computed once more. Its sample weights are those of --rollout_correction.
    """
    ones = torch.ones_like(trajectories.log_probs)  # (B, W)
    sampled = OldPolicy(trajectories.log_probs, trajectories.prev_sample_means, ones)
    if engine is None and args.rollout_batch_size in (0, args.micro_batch_size) and args.max_rollouts == 1:
        return sampled, {}
    if engine is None:  # other batches round otherwise
        recomputed = recompute_log_probs(args, model, request, trajectories)
        return OldPolicy(recomputed.log_probs, recomputed.prev_sample_means, ones), {}
    from common.engine import check_mismatch, rollout_weights

    takes_sampled = args.old_log_prob == "rollout"
    if takes_sampled:  # a micro-batch is enough to see whether engine and trainer are one policy
        rows = torch.arange(args.micro_batch_size)
        request = request.select(rows)
        trajectories = trajectories.select(rows)  # `sampled` has all
    recomputed = recompute_log_probs(args, model, request, trajectories)
    metrics = check_mismatch(
        request,
        trajectories,
        recomputed,
        dtype=args.dtype,
        log_ratio_limit=args.clip_range / 2 if takes_sampled else math.inf,
    )
    if takes_sampled:
        return sampled, metrics
    sample_weights, weight_metrics = rollout_weights(
        args.rollout_correction, request, trajectories, recomputed, args.clip_range
    )
    return OldPolicy(recomputed.log_probs, recomputed.prev_sample_means, sample_weights), metrics | weight_metrics


# ==== 9 LOSS ==========================================================================================================
def policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float, sample_weights: Tensor | float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over samples of max(-A ratio, -A clip(ratio, 1 +- clip_range)): minus Flow-GRPO's eq. 5 at one step, no KL.

    ratio = exp(log_prob - old_log_prob). All (B,); a sample's loss is multiplied by its weight.
    Returns the loss, to be minimised, and its metrics, scalars without gradient.
    """
    log_ratio = log_prob - old_log_prob  # (B,)
    ratio = log_ratio.exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    # the maximum is the pessimistic one: past the clip range a sample gains nothing, but can still lose
    loss = (sample_weights * torch.maximum(unclipped_loss, clipped_loss)).mean()

    is_higher = ratio > 1 + clip_range
    is_lower = ratio < 1 - clip_range
    higher = (is_higher & (advantages > 0)).double().mean()
    lower = (is_lower & (advantages < 0)).double().mean()
    metrics = {"loss": loss, "ratio_mean": ratio.mean(), "ratio_std": ratio.std(correction=0)}
    metrics |= {"pg_clipfrac": higher + lower, "pg_clipfrac_higher": higher, "pg_clipfrac_lower": lower}
    metrics["ppo_kl"] = -log_ratio.mean()
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def kl_divergence(args: Args, out: SDEStepOutput, ref_mean: Tensor, ref_velocity: Tensor, dt: float) -> Tensor:
    """KL (B,) per latent element, of a step's Gaussian to the reference's: mean((mean - ref_mean)^2) / (2 variance).

    --kl_type paper (Flow-GRPO, after eq. 9): the variance is std^2. --kl_type code, as published coefficients assume:
    q^2 = std^2 / -dt with --sde_type sde (q: `policy_step`), else std^2. --kl_type velocity: mean((v - v_ref)^2), with
    no factor, as in DiffusionNFT (after its eq. 5) and Flow-Factory (`v-based`); v is with guidance. dt < 0.
    ref_mean and ref_velocity (B, ...): the reference's, of the same samples.
    """
    if args.kl_type == "velocity":
        return ((out.velocity - ref_velocity) ** 2).flatten(1).mean(1)
    variance = out.transition_std**2  # (B,)
    if args.kl_type == "code" and args.sde_type == "sde":
        variance = variance / -dt
    return ((out.prev_sample_mean - ref_mean) ** 2).flatten(1).mean(1) / (2 * variance)


def accumulate_gradients(
    args: Args, model: Family, batch: Batch, mini_batch: Tensor, reference: Trajectories | None
) -> list[dict[str, Tensor]]:
    """Add up the gradient of a mini-batch's loss: the mean over its images and the W trained steps (Flow-GRPO, eq. 5).

    mini_batch: rows of the batch. A pass, forward and backward, is one sampling step of one micro-batch. Micro-batches
    are equally large, and FSDP averages over ranks: all images weigh the same. reference: the batch's own
    trajectories as the reference scores them, for the KL. Returns the metrics of every pass.
    """
    latents = batch.trajectories.latents  # (B, T + 1, ...)
    sde_steps = batch.request.sde_steps
    dts = batch.request.sigmas.diff().tolist()  # T, negative
    micro_batches = mini_batch.split(args.micro_batch_size)
    num_passes = len(micro_batches) * len(sde_steps)
    # FSDP averages gradients over the ranks in every backward pass; the last pass alone is enough, so we switch it off
    # until then. Not for full weights: their unsharded fp32 gradients are as large as the model and would not fit
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes: list[dict[str, Tensor]] = []
    for rows in micro_batches:
        sub_request = batch.request.select(rows)
        rows = rows.to(latents.device)  # after `select`, and once: a GPU waits for every index that comes from the CPU
        for w, i in enumerate(sde_steps):  # w: column of the W trained steps; i: sampling step
            x = latents[rows, i]
            x_next = latents[rows, i + 1]
            if len(passes) == num_passes - 1:
                model.transformer.set_requires_gradient_sync(True)
            out = policy_step(model, sub_request, x, i, prev_sample=x_next)
            old_log_prob = batch.old.log_probs[rows, w]
            weights = batch.old.sample_weights[rows, w]
            loss, metrics = policy_loss(out.log_prob, old_log_prob, batch.advantages[rows], args.clip_range, weights)
            if reference is not None:
                ref_velocity = reference.velocities[rows, w]
                metrics["actor/velocity_norm"] = norm_ratio(out.velocity, ref_velocity)
                kl = kl_divergence(args, out, reference.prev_sample_means[rows, w], ref_velocity, dts[i]).mean()
                loss = loss + args.kl_coef * kl  # Flow-GRPO's eq. 3 subtracts it from the objective
                metrics["actor/kl_loss"] = kl.detach().double()
            (loss / num_passes).backward()
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


def update(args: Args, run: Run, model: Family, optimizer: AdamW, batch: Batch) -> dict[str, float]:
    """epochs_per_rollout x updates_per_rollout optimizer steps on a rank's B images. Returns metrics over all ranks."""
    reference = None
    if args.kl_coef:  # the reference's means and velocities, once per rollout, as they do not change
        with run.timed("ref"), acting(model, "reference"):
            reference = recompute_log_probs(args, model, batch.request, batch.trajectories)
    # rows in order, not shuffled, as GroupSampler dealt them: a mini-batch is the same on any number of ranks
    of_epoch = torch.arange(len(batch.advantages)).chunk(args.updates_per_rollout)
    mini_batches = [rows for _ in range(args.epochs_per_rollout) for rows in of_epoch]
    grad_norms = []
    finite_passes = []  # of the optimizer steps whose gradient is finite
    metrics: dict[str, float] = {}
    for number, mini_batch in enumerate(mini_batches):
        passes = accumulate_gradients(args, model, batch, mini_batch, reference)
        if number == 0:  # on-policy: the ratio is 1 to the bit, except with an engine and --old_log_prob rollout
            means = mean_over_ranks(passes)
            metrics["actor/on_policy_ratio_mean"] = means["actor/ratio_mean"]
            metrics["actor/on_policy_ratio_std"] = means["actor/ratio_std"]
        grad_norm = optimizer_step(args, model, optimizer)
        if math.isfinite(grad_norm):  # it is over all ranks: they skip together
            grad_norms.append(grad_norm)
            finite_passes += passes
    metrics["actor/skipped_steps"] = len(mini_batches) - len(grad_norms)  # norms not finite; those of 0 do not count
    metrics["actor/lr"] = optimizer.param_groups[0]["lr"]
    if grad_norms:
        metrics["actor/grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics |= mean_over_ranks(finite_passes)
    return metrics


# ==== 10 EVAL =========================================================================================================
def evaluate(
    args: Args, run: Run, model: Family, engine: "VLLMEngine | None", inputs: Inputs
) -> tuple[dict, list | None]:
    """ODE images of every held-out prompt, from the same seeds every time, shared by the ranks.

    Returns their metrics (rewards, failures, diversity, drift) and, on rank 0, up to 32 images as (PIL image, caption).
    Except with --eval_only, the policy of the best evaluation is saved.
    """
    with run.timed("testing"):
        places, prompts, seeds = share_eval_images(inputs.eval_set, args.eval_images_per_prompt)  # B each: this rank's
        eval_guidance = args.eval_guidance_scale or args.guidance_scale  # at least 1, or None
        eval_args = replace(args, num_inference_steps=args.eval_num_inference_steps, guidance_scale=eval_guidance)
        prompt_index = torch.arange(len(places))  # a prompt for each image; prompts may repeat
        request = make_request(eval_args, model, prompts, prompt_index, seeds)  # without SDE steps
        with acting(model, args.evaluated_policy, engine):  # in the engine as well
            scorer = Scorer(inputs.eval_rewards, prompts, args.reward_failure)
            rollout(eval_args, model, engine, request, scorer)  # its images go to the scorer
            scores = scorer.scores(places, args.eval_images_per_prompt)  # (B, R), of inputs.eval_rewards
        metrics, grid = evaluate_samples(args, run, scorer, places=places, seeds=seeds, scores=scores)
        if not args.eval_only:
            run.save_if_best(model, args.evaluated_policy, metrics)
    return metrics, grid


# ==== 11 CHECKPOINT ===================================================================================================
def save(args: Args, run: Run, model: Family, optimizer: AdamW, sampler: GroupSampler) -> None:
    """Write all that training changes, for any number of ranks to resume from; and the policy for diffusers, of full
    weights only at the end."""
    state = training_state(model, optimizer, run.checkpoint_path)  # full weights are written now, beside this path
    state["sampler"] = sampler.state_dict()
    run.save_checkpoint(state, model, args.evaluated_policy)


def load(args: Args, run: Run, model: Family, optimizer: AdamW, sampler: GroupSampler) -> None:
    """Restore what `save` wrote, on any number of ranks; and the run's step, best score and unlogged metrics."""
    state = run.load_checkpoint()
    load_training_state(model, optimizer, state)
    sampler.load_state_dict(state["sampler"])
    adam = optimizer.param_groups[0]
    adam["weight_decay"] = args.weight_decay  # this run's; the rate is set at every optimizer step
    adam["betas"] = args.adam_betas
    adam["eps"] = args.adam_eps
    run.repair_adapter(model, args.evaluated_policy)  # of a run that has all its steps


# ==== 12 MAIN =========================================================================================================
def main(args: Args, inputs: Inputs) -> None:
    device = setup_distributed(args.shard_ranks, args.ranks_per_image)
    args = choose_sizes(args, inputs, workload(args))  # what fits, where an option is 0; rank and alpha of --lora_path
    run = Run(args, inputs.all_rewards, script=__file__, checkpoint=inputs.checkpoint, workload=workload(args))
    engine = start_engine(args, run.folder, device)  # it loads while the policy does
    model, parameters = load_policy(args, inputs, device)
    optimizer = AdamW(
        parameters, lr=args.learning_rate, betas=args.adam_betas, eps=args.adam_eps, weight_decay=args.weight_decay
    )
    optimizer = choose_adam_kernel(optimizer, model, args.adam_bits)  # foreach, fused, or torchao's of 8 bits
    parts = inputs.train_set.parts  # (number of prompts, share): of each file with --train_shares, else of all
    sampler = GroupSampler(parts, args.num_prompts, args.group_size, args.updates_per_rollout, seed=args.order_seed)
    image_index = sampler.image_index  # (B,), which of a step's N images are this rank's
    rollouts = StepRollouts(sampler, args.max_rollouts, inputs.train_set, args.curriculum)
    run.print_message(f"{sampler}; {'LoRA' if model.is_lora else 'full weights'}, {len(parameters)} tensors")
    if engine:  # the first push, and a proof that it acts and that the engine samples as we do, which any weights give
        one_image = make_request(args, model, inputs.eval_set.select([0]), torch.tensor([0]), seeds=[0])
        engine.verify_policy(model, one_image, sample_locally)

    # RUN LOGIC, the same in all scripts: resume; evaluate first, or redo the evaluation that failed (run.unlogged)
    if run.checkpoint:
        load(args, run, model, optimizer, sampler)
        if engine:  # it still holds the policy from before `load`
            engine.push_policy(model)
    if args.eval_only or run.unlogged or not run.checkpoint:
        run.log(*evaluate(args, run, model, engine, inputs))
    last_step = run.step if args.eval_only else args.num_steps  # --eval_only takes no training step

    for step in range(run.step + 1, last_step + 1):
        run.begin_step(step, sampler, lambda: save(args, run, model, optimizer, sampler))  # saves if a rollout fails

        # one rollout; with --max_rollouts also further ones, in which other prompts replace those of equal rewards
        for prompt_rows, prompt_index, numbers in rollouts.draw(step):  # (U,) of train_set; (B,) of these U; (B,)
            # sample G images for each prompt with the current policy (Flow-GRPO, eq. 9)
            with run.timed("gen", per_image=True):
                prompts = inputs.train_set.select(prompt_rows)
                seeds = [image_seed(args.seed, step, number) for number in numbers.tolist()]
                request = make_request(args, model, prompts, prompt_index, seeds, sde_steps=draw_sde_steps(args, step))
                request = share_initial_noise(args, model, request, step, numbers // args.group_size)
                scorer = rollouts.scorer(inputs.rewards, prompts.select(prompt_index), args.reward_failure)
                trajectories = rollouts.merge(rollout(args, model, engine, rollouts.part(request), scorer))

            # score them; most were scored while others were sampled, but rewards of whole groups begin here
            with run.timed("reward", per_image=True):
                # (N, R): NaN where scoring failed, -inf where a prompt's record does not ask for the reward
                scores = gather_rows(scorer.scores(image_index, args.group_size), image_index)
                rollouts.judge(scores, args.reward_weights, args.group_size, args.multi_objective_aggregation)

        # compare the images of a prompt (Flow-GRPO, eq. 4); a failed image, or one without others, gets 0
        with run.timed("adv"):
            filled, is_compared = fill_failed(scores, inputs.rewards, args.group_size)  # (N, R), (N,)
            advantages = combine_advantages(args, filled, args.adv_clip_max).where(is_compared, 0.0)  # (N,)
            metrics = reward_metrics(scores, advantages, inputs.rewards, args.reward_weights, args.group_size)
            metrics |= log_rollout(args, run, scorer, sampler, seeds=seeds, scores=scores, advantages=advantages)

        # the density of the samples under the policy that sampled them, from the trainer or from the rollout
        with run.timed("old_log_prob", mfu="actor_infer"):
            old, mismatch_metrics = find_old_policy(args, model, engine, request, trajectories)

        # make the sampling steps that led to better images likelier (Flow-GRPO, eq. 5)
        with run.updating():
            local_advantages = advantages[image_index].to(device, torch.float32)  # (B,)
            batch = Batch(request, trajectories, old, local_advantages)
            metrics |= update(args, run, model, optimizer, batch) | mismatch_metrics
            mean, deviation = metrics["actor/on_policy_ratio_mean"], metrics["actor/on_policy_ratio_std"]
            run.report_ratio(mean, deviation, args.clip_range)

        # the next rollout samples with the new weights
        with run.timed("update_weights"):
            if engine:
                engine.push_policy(model)

        # RUN LOGIC, the same in all scripts: evaluate, log, save, stop
        metrics |= {"training/epoch": sampler.epoch}
        run.end_step(metrics, has_gradient="actor/grad_norm" in metrics)  # keeps them until `log`
        is_due = step % args.eval_every == 0 or step == args.num_steps
        val_metrics, grid = evaluate(args, run, model, engine, inputs) if is_due else ({}, None)
        run.log(val_metrics, grid)  # ends the run at a NaN, or after three steps in a row without a finite gradient
        stopping = run.should_stop()  # asked before `save`, which writes more at the end
        if step % (args.save_every or args.eval_every) == 0 or step == args.num_steps or stopping:
            save(args, run, model, optimizer, sampler)
        if stopping:
            break

    if engine:
        engine.close()
    run.close()


if __name__ == "__main__":
    with friendly_errors():  # an expected error ends the script in one line, without a traceback
        args = check(parse_args(Args, __doc__))
        main(args, prepare(args))
