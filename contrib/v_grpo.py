"""V-GRPO, Variational GRPO (arXiv 2604.23380): a PPO ratio of flow-matching errors, estimated with little variance.

A whole generation is one action. Flow matching's loss is a bound on minus its log-probability, and takes its place, as
in AWM. The bound is a mean over timesteps and noises, of which a step can afford a few, so its noise must not drown the
differences between the images of a prompt. We describe it as AWM (2509.25050), whose description is in contrib/awm.py,
with that of its own parent. Read `main`, at the end, first:

  1. Sample images with the trained policy itself, by any solver, without guidance. There is no policy `old`: theta_old
     is the trained one before the update.
  2. Advantages are compared within a prompt. They can be clipped softly, eta tanh(A / eta) (eq. 17): `clip_softly`.
  3. All images of a prompt share K pairs of a timestep and a noise, which stay for the whole update. There is one
     timestep of each of K equal parts of the sampling schedule: `draw_training_noise`.
  4. The error of a pair is that of the predicted image, divided by its own size (eq. 14):
     mean((x0_hat - x0)^2) / mean |x0_hat - x0|. Minus an image's mean error over its pairs stands for its log-prob.
  5. The ratio to theta_old is clipped as in PPO: `v_grpo_loss`.
  6. Optionally the predicted images are kept near those of theta_old, at the same pairs (eq. 16): `v_grpo_loss`.

    torchrun --standalone -m contrib.v_grpo                       # assets/embedded, vLLM-Omni's rollouts
    torchrun --standalone -m contrib.v_grpo --rollout local       # the training transformer samples: no vLLM needed

We read its equations and what others say of its code, tang-bd/v-grpo, but not the code. Our choices:
  - The schedule that is cut into parts is the sampler's. A number of timesteps that K does not divide is cut all the
    same, into parts of equal probability: of 3 timesteps, 4 pairs have at least one of them twice.
  - The mean of squares over the mean of absolutes, as in their code; eq. 14 has a sum of squares.
  - Pairs are a prompt's own, as in the paper; in their code they are those of a whole mini-batch.
  - The error of theta_old is divided by its own size, that of the trained policy by its own: at theta_old both agree.
  - The KL is a mean over elements. Advantages are DiffusionNFT's, clamped to adv_clip_max before eq. 17.

Parent: contrib/awm.py
"""

# ==== 1 ARGS ==========================================================================================================
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from common.data import GroupSampler, PromptSet, fit_micro_batch, share_eval_images
from common.distributed import gather_rows, mean_over_ranks, setup_distributed, shard_mesh
from common.files import read_prompts
from common.metrics import reward_metrics
from common.models import Family, find_family
from common.options import Bound, EngineArgs, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, lr_factor
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
from common.sde import image_seed, sde_step
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
class Args(EngineArgs):  # and the shared options, in common/options.py; parse_args refuses values beyond a Bound
    # ---- run
    name: str = "v_grpo"
    """the run's folder is runs/<name>, or an absolute path; it must not hold a run yet, unless you resume it"""

    # ---- rollout
    num_prompts: PositiveInt = 32
    """prompts per rollout, over all ranks"""
    group_size: Annotated[int, Bound(at_least=2)] = 8
    """images per prompt, at least 2: the reward of each is compared with the group's mean"""
    num_inference_steps: PositiveInt = 3
    """sampling steps of a training image (Flow-GRPO: 10, and 40 in evaluation)"""

    # ---- algorithm
    clip_range: PositiveFloat = 1e-2
    """exp(old error - error) of an image is clipped to 1 +- this (paper: 6e-3 to 1e-2)"""
    old_kl_coef: NonNegativeFloat = 0.0
    """factor of mean((x0_hat - x0_hat_old)^2), the distance to the policy that sampled"""
    pairs_per_prompt: PositiveInt = 4
    """K, pairs of a timestep and a noise that all images of a prompt are trained at (paper: 4)"""
    adv_soft_clip: NonNegativeFloat = 0.0
    """eta of eta tanh(advantage / eta) (paper: 3, where a rollout has one optimizer step); 0: advantages stay"""
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
    """samples per pass on a rank, a multiple of pairs_per_prompt: an image is as many samples in the update, and one in
    a local sampling batch; lowered to a mini-batch's share"""
    learning_rate: NonNegativeFloat = 3e-3
    """learning rate of AdamW (paper: 3e-4)"""

    @property
    def together(self) -> int:
        """--micro_batch_size is a multiple of it: a pass has all pairs of its images."""
        return self.pairs_per_prompt


# ==== 2 SETUP =========================================================================================================
def check(args: Args) -> Args:
    """Refuse options that cannot work together. Returns them, micro_batch_size lowered to a rank's mini-batch."""
    if args.eval_only:  # no mini-batches are cut
        return args
    num_images = args.num_prompts * args.group_size
    fit_micro_batch(
        num_images, args.updates_per_rollout, 0, ranks_per_image=args.ranks_per_image
    )  # mini-batches are of whole images
    counted = "--num_prompts x --group_size x --pairs_per_prompt"
    num_samples = num_images * args.pairs_per_prompt
    micro_batch_size = fit_micro_batch(
        num_samples, args.updates_per_rollout, args.micro_batch_size, counted, ranks_per_image=args.ranks_per_image
    )
    if micro_batch_size % args.pairs_per_prompt or not micro_batch_size:
        wanted = f"must be a multiple of --pairs_per_prompt {args.pairs_per_prompt}"
        raise ValueError(f"--micro_batch_size {micro_batch_size}: {wanted}, as a pass has all pairs of its images")
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
        trained_steps=args.pairs_per_prompt,
        policies=tuple(policy_names(args)),
        acting_passes=1,  # of the trained policy, which is its own `old`
        updates=args.updates_per_rollout,
        epochs=args.epochs_per_rollout,
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
    family = find_family(args.model, height, width, args.num_frames, 1.0, length, args.family)
    if args.rollout == "vllm":
        from common.engine import check_engine

        check_engine(family, args.model, args.engine_devices)
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
        group_size=args.group_size,
    )
    return inputs


# ==== 3 DATA ==========================================================================================================
def make_request(
    args: Args, model: Family, prompts: PromptSet, prompt_index: Tensor, seeds: list[int]
) -> RolloutRequest:
    """A request for B ODE images of U prompts, encoded: prompt_index (B,) says which prompt, seeds (B) the noise."""
    height, width = args.image_size
    timesteps, sigmas, latent_shape = model.schedule(args.num_inference_steps, height, width, args.num_frames)
    return RolloutRequest(
        conditioning=model.encode(prompts, args.max_sequence_length, args.image_size, args.num_frames),
        negative_conditioning=None,  # no guidance
        prompt_index=prompt_index,
        seeds=seeds,
        timesteps=timesteps,  # (T,)
        sigmas=sigmas,  # (T + 1,), on the CPU, as they become Python's floats
        latent_shape=latent_shape,  # (C, h, w); (C, f, h, w) for a video
        height=height,
        width=width,
    )


def draw_training_noise(args: Args, batch: "Batch", step: int) -> tuple[Tensor, Tensor]:
    """For each of B images the K pairs of its prompt: timesteps of the sampling schedule, (B, K), noise, (B, K, ...).

    The k-th timestep is drawn from the k-th of K equal parts of the schedule. Seeded by (seed, step, prompt), apart
    from the rollout's noise: the same for all images of a prompt, and on any number of ranks.
    """
    request = batch.request
    num_pairs = args.pairs_per_prompt  # K
    timesteps = []
    noise = []
    for index in batch.image_index.tolist():
        prompt = index // args.group_size  # its number in this step
        generator = torch.Generator().manual_seed(image_seed(args.seed, f"{step} update", prompt))
        offsets = torch.rand(num_pairs, generator=generator, dtype=torch.float64)
        places = (torch.arange(num_pairs) + offsets) / num_pairs  # (K,), one in each part of [0, 1)
        timesteps.append(request.timesteps[(places * len(request.timesteps)).long()])
        noise.append(torch.randn(num_pairs, *request.latent_shape, generator=generator))
    return torch.stack(timesteps).to(batch.x0.device), torch.stack(noise)


# ==== 4 MODEL =========================================================================================================
def policy_names(args: Args) -> list[str]:
    """The policies that a run keeps (common/weights/policy.py)."""
    names = ["default"]  # peft's name for the trained one
    if args.ema_decay > 0:
        names.append("ema")
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
    """Sample the request's B images with the training transformer and the acting policy, by the ODE."""
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    first_latents = request.first_latents(generators, model.device)  # (B, ...)
    outputs = []
    x = first_latents
    for i in range(len(request.timesteps)):
        v = model.predict_velocity(x, request.timesteps[i], request.conditioning)
        sigma, sigma_next = request.sigmas[i : i + 2].tolist()
        outputs.append(sde_step(x, v, sigma, sigma_next, noise_level=0.0))
        x = outputs[-1].prev_sample  # the next x, by diffusers' name
    return Trajectories.from_steps(first_latents, outputs, model.decode(x))


def rollout(
    args: Args, model: Family, engine: "VLLMEngine | None", request: RolloutRequest, scorer: Scorer | None = None
) -> Trajectories:
    """Trajectories of ODE steps, whose latents (B, 1, ...) are the final ones; the scorer gets finished images."""
    if engine:
        finished = scorer.add if scorer else None
        return engine.generate(request, finished=finished).to(model.device)
    parts = []
    gathers_once = not {"cpu_offload", "gather_blocks"} & set(args.train_with)  # all weights, not a block in each pass
    with sampling(model, gathers_once):  # and the VAE stays on the device
        for rows in torch.arange(len(request.seeds)).split(args.rollout_batch_size or args.micro_batch_size):
            parts.append(sample_locally(model, request.select(rows)))
            if scorer:
                scorer.add(rows.tolist(), parts[-1].images)
    return Trajectories.cat(parts)


class Batch(NamedTuple):
    """A rollout as the update takes it: B images of this rank."""

    request: RolloutRequest
    x0: Tensor  # (B, ...), final latents of the rollout
    advantages: Tensor  # (B,)
    sample_weights: Tensor  # (B,), 1, or 0 for images that are not compared
    image_index: Tensor  # (B,), the images' numbers over all ranks


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
# None: the forward process needs no density of a trajectory. Minus an image's error takes its place, in v_grpo_loss.
def clip_softly(advantages: Tensor, eta: float) -> Tensor:
    """eta tanh(A / eta) of advantages A (N,) (eq. 17); A where eta is 0."""
    return eta * (advantages / eta).tanh() if eta else advantages


# ==== 9 LOSS ==========================================================================================================
def v_grpo_loss(
    v: Tensor,
    v_old: Tensor,
    x_t: Tensor,
    x0: Tensor,
    *,
    sigma: Tensor,
    advantages: Tensor,
    clip_range: float,
    old_kl_coef: float,
    sample_weights: Tensor | float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean(max(-A ratio, -A clip(ratio))) + old_kl_coef mean((x0_hat - x0_hat_old)^2) (eq. 16), over b images.

    ratio = exp(mean over pairs of e(v_old) - e(v)), clipped to 1 +- clip_range, with x0_hat = x_t - sigma v and
    e(v) = mean((x0_hat - x0)^2) / w per pair, where w = mean |x0_hat - x0|, at least 1e-5, in fp64 and without gradient
    (eq. 14). Velocities, x_t and x0 (b K, ...) and sigma (b K,): an image's K pairs after each other; advantages and
    sample_weights, of both terms, (b,). Returns the loss, to be minimised, and its metrics, scalars without gradient.
    """
    sigma = sigma.view(-1, *[1] * (x0.dim() - 1))

    def weighted_error(velocity: Tensor) -> Tensor:
        difference = x_t - sigma * velocity - x0
        weight = difference.detach().double().abs().flatten(1).mean(1).clamp(min=1e-5)  # (b K,)
        return (difference**2).flatten(1).mean(1) / weight

    log_ratio = (weighted_error(v_old) - weighted_error(v)).view(len(advantages), -1).mean(1)  # (b,)
    ratio = log_ratio.exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    is_clipped = (clipped_loss > unclipped_loss).double()
    loss = (sample_weights * torch.maximum(unclipped_loss, clipped_loss)).mean()
    distances = ((sigma * (v - v_old)) ** 2).flatten(1).mean(1)  # (b K,), of the predicted images
    old_kl = (sample_weights * distances.view(len(advantages), -1).mean(1)).mean()
    loss = loss + old_kl_coef * old_kl
    metrics = {"loss": loss, "ratio_mean": ratio.mean(), "pg_clipfrac": is_clipped.mean(), "kl_loss": old_kl}
    metrics["old_deviation"] = ((v - v_old) ** 2).mean()
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def noise_images(x0: Tensor, t: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The forward process at timesteps t (b,) in (0, 1000]: sigma (b,) = t / 1000, and x_t (b, ...) of x0 and noise."""
    sigma = (t / 1000).to(x0.device)
    s = sigma.view(-1, *[1] * (x0.dim() - 1))
    x_t = (1 - s) * x0 + s * noise.to(x0.device)
    return sigma, x_t


def predict_pairs(
    model: Family, batch: Batch, rows: Tensor, *, timesteps: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The acting policy's velocity of b images of the batch, `rows`, at all their K pairs, in one pass.

    timesteps (B, K), noise (B, K, ...). Returns v, x_t and x0 (b K, ...) and sigma (b K,), an image's pairs after each
    other.
    """
    num_pairs = timesteps.shape[1]  # K
    conditioning = batch.request.select(rows.repeat_interleave(num_pairs)).conditioning
    eps = noise[rows].flatten(0, 1)  # (b K, ...)
    rows = rows.to(batch.x0.device)  # once: a GPU waits for every index that comes from the CPU
    t = timesteps[rows].flatten()  # (b K,)
    x0 = batch.x0[rows].repeat_interleave(num_pairs, 0)  # (b K, ...)
    sigma, x_t = noise_images(x0, t, eps)
    return model.predict_velocity(x_t, t, conditioning), x_t, x0, sigma


@torch.no_grad()
def old_velocities(args: Args, model: Family, batch: Batch, *, timesteps: Tensor, noise: Tensor) -> Tensor:
    """Velocities (B, K, ...) of the trained policy before the update, in the update's micro-batches."""
    num_pairs = timesteps.shape[1]  # K
    parts = []
    for rows in torch.arange(len(batch.x0)).split(args.micro_batch_size // num_pairs):
        v, *_ = predict_pairs(model, batch, rows, timesteps=timesteps, noise=noise)
        parts.append(v.unflatten(0, (len(rows), num_pairs)))
    return torch.cat(parts)


def accumulate_gradients(
    args: Args,
    model: Family,
    batch: Batch,
    mini_batch: Tensor,
    *,
    timesteps: Tensor,
    noise: Tensor,
    v_old: Tensor,
) -> list[dict[str, Tensor]]:
    """Add up the gradient of a mini-batch's loss, the mean over its images.

    mini_batch: rows of the batch; timesteps (B, K), noise and v_old (B, K, ...). A pass, forward and backward, is a
    micro-batch of images with all of their K pairs, as the exponential of a ratio is of the mean over them.
    Micro-batches are equally large, and FSDP averages over ranks: all images weigh the same. Returns the metrics of
    every pass.
    """
    micro_batches = mini_batch.split(args.micro_batch_size // timesteps.shape[1])
    num_passes = len(micro_batches)
    # FSDP averages gradients over the ranks in every backward pass; the last pass alone is enough, so we switch it off
    # until then. Not for full weights: their unsharded fp32 gradients are as large as the model and would not fit
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes: list[dict[str, Tensor]] = []
    for rows in micro_batches:
        if len(passes) == num_passes - 1:
            model.transformer.set_requires_gradient_sync(True)
        v, x_t, x0, sigma = predict_pairs(model, batch, rows, timesteps=timesteps, noise=noise)
        rows = rows.to(batch.x0.device)
        loss, metrics = v_grpo_loss(
            v,
            v_old[rows].flatten(0, 1),
            x_t,
            x0,
            sigma=sigma,
            advantages=batch.advantages[rows],
            sample_weights=batch.sample_weights[rows],
            clip_range=args.clip_range,
            old_kl_coef=args.old_kl_coef,
        )
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


def update(args: Args, model: Family, optimizer: AdamW, batch: Batch, step: int) -> dict[str, float]:
    """epochs_per_rollout x updates_per_rollout optimizer steps on a rank's B images. Returns metrics over all ranks."""
    # rows in order, not shuffled, as GroupSampler dealt them: a mini-batch is the same on any number of ranks
    mini_batches = torch.arange(len(batch.x0)).chunk(args.updates_per_rollout)
    grad_norms = []
    finite_passes = []  # of the optimizer steps whose gradient is finite
    metrics: dict[str, float] = {}
    # once: theta_old is the policy before the first optimizer step, and all epochs keep its pairs
    timesteps, noise = draw_training_noise(args, batch, step)
    v_old = old_velocities(args, model, batch, timesteps=timesteps, noise=noise)
    for mini_batch in args.epochs_per_rollout * mini_batches:
        passes = accumulate_gradients(args, model, batch, mini_batch, timesteps=timesteps, noise=noise, v_old=v_old)
        grad_norm = optimizer_step(args, model, optimizer)
        if math.isfinite(grad_norm):  # it is over all ranks: they skip together
            grad_norms.append(grad_norm)
            finite_passes += passes
    num_updates = args.epochs_per_rollout * len(mini_batches)
    metrics["actor/skipped_steps"] = num_updates - len(grad_norms)  # norms not finite; those of 0 are not counted
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
        eval_args = replace(args, num_inference_steps=args.eval_num_inference_steps)
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
            # sample G images for each prompt with the current policy
            with run.timed("gen", per_image=True):
                prompts = inputs.train_set.select(prompt_rows)
                seeds = [image_seed(args.seed, step, number) for number in numbers.tolist()]
                request = make_request(args, model, prompts, prompt_index, seeds)
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
            advantages = clip_softly(advantages, args.adv_soft_clip)
            metrics = reward_metrics(scores, advantages, inputs.rewards, args.reward_weights, args.group_size)
            metrics |= log_rollout(args, run, scorer, sampler, seeds=seeds, scores=scores, advantages=advantages)

        # match the better images and unmatch the others, at the pairs of their prompt (eq. 14, 16)
        with run.updating():
            local_advantages = advantages[image_index].to(device, torch.float32)  # (B,)
            sample_weights = is_compared[image_index].to(device, torch.float32)  # (B,)
            batch = Batch(request, trajectories.latents[:, -1], local_advantages, sample_weights, image_index)
            metrics |= update(args, model, optimizer, batch, step)

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
