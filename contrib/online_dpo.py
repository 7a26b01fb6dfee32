"""Online DPO: Diffusion-DPO's loss (arXiv 2311.12908v1) on pairs of the policy's own images, the whole algorithm.

dpo_offline.py makes or reads its pairs once. Here every rollout makes new ones: the best and the worst image of every
prompt. The others are not trained on.
The loss is that of DGPO (contrib/dgpo.py) for groups of two, and everything that is not named here is as in that
script. Read `main`, at the end, first:

  1. A prompt's best image gets the advantage 1 and its worst -1: `compute_advantages`. Where all its images score the
     same, it teaches nothing.
  2. dpo_offline.py's loss (eq. 14) over dpo_beta makes the best preferred to the worst: `pairs_of`, and `dgpo_loss`
     with groups of two.

    torchrun --standalone -m contrib.online_dpo                       # assets/embedded, vLLM-Omni's rollouts
    torchrun --standalone -m contrib.online_dpo --rollout local       # the training transformer samples: no vLLM needed

Where it departs from online DPO as it is known for language models: the clip of DGPO remains (--clip_range 1000: none),
and `old` samples, which follows the trained policy.

Parent: contrib/dgpo.py
"""

# ==== 1 ARGS ==========================================================================================================
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from common.data import GroupSampler, PromptSet, fit_micro_batch, share_eval_images
from common.distributed import gather_rows, mean_over_ranks, setup_distributed, shard_mesh
from common.files import read_prompts
from common.metrics import norm_ratio, reward_metrics
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
from common.scoring import Scorer, all_equal, fill_failed, weighted_totals
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
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import AdamW

if TYPE_CHECKING:
    from common.engine import VLLMEngine


@dataclass
class Args(EngineArgs):  # and the shared options, in common/options.py; parse_args refuses values beyond a Bound
    # ---- run
    name: str = "online_dpo"
    """the run's folder is runs/<name>, or an absolute path; it must not hold a run yet, unless you resume it"""

    # ---- rollout
    num_prompts: PositiveInt = 32
    """prompts per rollout, over all ranks"""
    group_size: Annotated[int, Bound(at_least=2)] = 8
    """images per prompt, at least 2, of which the best and the worst are trained on"""
    num_inference_steps: PositiveInt = 3
    """sampling steps of a training image (Flow-GRPO: 10, and 40 in evaluation)"""

    # ---- algorithm
    dpo_beta: PositiveFloat = 100.0
    """factor of the errors' differences in the logit; a larger one keeps nearer to the reference (code: 10 to 5000)"""
    clip_range: PositiveFloat = 1e-2
    """an image whose exp(old error - error) is further than this from 1, as its advantage wants, is not trained on
    (DGPO's README: 1e-5 to 1e-4)"""
    kl_coef: PositiveFloat = 1e-3
    """factor of mean((v - v_ref)^2), the distance to the model before training (DGPO's code: 1e-3 to 0.02)"""
    adv_mode: Literal["continuous", "positive_only", "negative_only", "one_only", "binary"] = "continuous"
    """A' in r = A' / 2 + 1/2, from an image's A: 1, 0 or -1. continuous: A; positive_only: max(A, 0);
    negative_only: min(A, 0); one_only: 1 if A > 0, otherwise 0; binary: the sign of A"""
    timestep_fraction: Annotated[float, Bound(above=0, at_most=1)] = 1.0
    """share of the sampling schedule's timesteps that every image is trained at"""
    decay_schedule: Literal["copy", "linear_to_0_5", "delayed_linear_to_0_999", "fixed"] = "linear_to_0_5"
    """the d of old = d old + (1 - d) trained after k optimizer steps. copy: 0; linear_to_0_5: min(0.001 k, 0.5);
    delayed_linear_to_0_999: 0 up to k = 75, then min(0.0075 (k - 75), 0.999); fixed: old_decay"""
    old_decay: Annotated[float, Bound(at_least=0, below=1)] = 0.5
    """d of the schedule `fixed`, from 0 (copy) to below 1"""
    update_interval: PositiveInt = 1
    """rollouts between two updates of `old`"""

    # ---- optimization
    num_steps: NonNegativeInt = 30
    """training steps of the run, each a rollout and its updates"""
    updates_per_rollout: PositiveInt = 4
    """mini-batches that a rollout is cut into, an optimizer step each; the later ones are off-policy"""
    epochs_per_rollout: PositiveInt = 1
    """how often each of those mini-batches is trained on, an optimizer step each time"""
    micro_batch_size: NonNegativeInt = 64
    """images per pass on a rank, and by default per local sampling batch: an even number, so that pairs are whole;
    lowered to a rank's share of a mini-batch, which it must divide"""
    learning_rate: NonNegativeFloat = 1e-3
    """learning rate of AdamW (Flow-GRPO: 3e-4)"""

    @property
    def together(self) -> int:
        """--micro_batch_size is a multiple of it: a pass has whole pairs."""
        return 2


# ==== 2 SETUP =========================================================================================================
def check(args: Args) -> Args:
    """Refuse options that cannot work together. Returns them, micro_batch_size lowered to a rank's mini-batch."""
    if args.eval_only:  # no mini-batches are cut
        return args
    num_images = args.num_prompts * 2
    micro_batch_size = fit_micro_batch(
        num_images,
        args.updates_per_rollout,
        args.micro_batch_size,
        "--num_prompts x 2",
        ranks_per_image=args.ranks_per_image,
        together=2,
    )
    if micro_batch_size % 2 or not micro_batch_size:
        told = f"a rank's passes have {micro_batch_size} images, and must hold whole pairs"
        raise ValueError(f"--micro_batch_size {args.micro_batch_size}: {told}")
    return replace(args, micro_batch_size=micro_batch_size)


def workload(args: Args) -> Workload:
    """What a training step samples, trains and keeps: for the plan, the sizes that fit, and perf/mfu."""
    return Workload(
        num_images=args.num_prompts * args.group_size,
        num_prompts=args.num_prompts,
        sampled_steps=args.num_inference_steps,
        trained_steps=int(args.timestep_fraction * args.num_inference_steps) or 1,
        policies=tuple(policy_names(args)),
        acting_passes=2,  # `old`'s, and the reference's
        updates=args.updates_per_rollout,
        epochs=args.epochs_per_rollout,
        acting_epochs=args.epochs_per_rollout,  # on noise that each epoch draws again
        trained_images=2 * args.num_prompts,  # the best and the worst of each group
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


def draw_training_noise(args: Args, batch: "Batch", step: int, epoch: int) -> tuple[Tensor, Tensor]:
    """For each of B images K timesteps of the sampling schedule, (B, K), and fresh noise, (B, K, ...).

    Seeded by (seed, step, epoch, prompt), apart from the rollout's noise: the same on any number of ranks.
    """
    request = batch.request
    # truncated, as in the paper's code: 0.99 of 10 timesteps are 9
    num_timesteps = max(1, int(args.timestep_fraction * args.num_inference_steps))  # K
    purpose = f"{step} update" if epoch == 0 else f"{step} update {epoch}"  # in the seed, in the step's place
    timesteps = []
    noise = []
    for index in batch.image_index.tolist():
        generator = torch.Generator().manual_seed(image_seed(args.seed, purpose, index // args.group_size))
        chosen = torch.randperm(len(request.timesteps), generator=generator)[:num_timesteps]
        timesteps.append(request.timesteps[chosen])
        noise.append(torch.randn(num_timesteps, *request.latent_shape, generator=generator))
    return torch.stack(timesteps).to(batch.x0.device), torch.stack(noise)


# ==== 4 MODEL =========================================================================================================
def policy_names(args: Args) -> list[str]:
    """The policies that a run keeps (common/weights/policy.py)."""
    names = ["default", "old"]  # the former is peft's name for the trained one
    if args.ema_decay > 0:
        names.append("ema")
    if not args.eval_only:  # the loss compares with it, whatever the KL
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


def old_policy_decay(decay_schedule: str, old_decay: float, k: int) -> float:
    """d of old <- d old + (1 - d) trained, after k optimizer steps (figure 8, with k instead of iterations)."""
    if decay_schedule == "copy":
        return 0.0
    if decay_schedule == "linear_to_0_5":
        return min(0.001 * k, 0.5)
    if decay_schedule == "delayed_linear_to_0_999":
        return min(max(0.0, 0.0075 * (k - 75)), 0.999)
    return old_decay


def follow_trained(args: Args, model: Family) -> float:
    """Let `old` follow the trained policy (Algorithm 1, line 14). Returns the decay d."""
    k = model.num_updates  # optimizer steps taken so far
    decay = old_policy_decay(args.decay_schedule, args.old_decay, k)
    follow(model, "old", decay)
    return decay


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
    r: Tensor  # (B,), optimality
    sample_weights: Tensor  # (B,), 1, or 0 for images that are not compared
    image_index: Tensor  # (B,), the images' numbers over all ranks


# ==== 7 ADVANTAGE =====================================================================================================
def compute_advantages(args: Args, scores: Tensor, is_compared: Tensor) -> Tensor:
    """Advantages (N,) by the weighted sum of R rewards, scores (N, R), group by group: 1 for a group's best image, -1
    for its worst, 0 for the others.

    The first of equal images counts. A group whose images all score the same has 0 only. Images that are not compared,
    is_compared (N,), are neither best nor worst.
    """
    totals = weighted_totals(scores, args.reward_weights)  # (N,)
    best = totals.where(is_compared, -math.inf).view(-1, args.group_size).argmax(1)  # (P,)
    worst = totals.where(is_compared, math.inf).view(-1, args.group_size).argmin(1)
    marks = (F.one_hot(best, args.group_size) - F.one_hot(worst, args.group_size)).double()  # (P, G)
    return marks.masked_fill(all_equal(totals.view(-1, args.group_size)), 0.0).flatten()


def pairs_of(batch: Batch, advantages: Tensor, group_size: int) -> Batch:
    """The part of a rank's batch that is trained on: the two images of each group that have an advantage.

    Where all images of a group score the same, two of them stand in for these. advantages: (N,), of all ranks. `check`
    lets no group be cut.
    """
    groups = advantages[batch.image_index].abs().view(-1, group_size)  # (P, G)
    first_rows = torch.arange(0, len(batch.x0), group_size)[:, None]
    rows = (first_rows + groups.topk(2).indices).flatten()  # (2 P,)
    return Batch(
        batch.request.select(rows), batch.x0[rows], batch.r[rows], batch.sample_weights[rows], batch.image_index[rows]
    )


# ==== 8 LOG PROB ======================================================================================================
# None: the forward process needs no density of a trajectory. How optimal an image is takes its place.
def optimality(advantages: Tensor, adv_mode: str, adv_clip_max: float) -> Tensor:
    """r = clip(A / (2 m) + 1/2, 0, 1), m = adv_clip_max (section 3.3, Optimality Reward), of advantages A (N,)."""
    m = adv_clip_max
    if adv_mode == "continuous":
        shaped_advantages = advantages.clamp(-m, m)
    elif adv_mode == "positive_only":
        shaped_advantages = advantages.clamp(0, m)
    elif adv_mode == "negative_only":
        shaped_advantages = advantages.clamp(-m, 0)
    elif adv_mode == "one_only":
        shaped_advantages = (advantages > 0).to(advantages)
    else:  # binary
        shaped_advantages = advantages.sign()
    return (shaped_advantages / (2 * m) + 0.5).clamp(0, 1)


# ==== 9 LOSS ==========================================================================================================
def dgpo_loss(
    v: Tensor,
    v_old: Tensor,
    v_ref: Tensor,
    x_t: Tensor,
    x0: Tensor,
    *,
    sigma: Tensor,
    r: Tensor,
    group_size: int,
    dpo_beta: float,
    clip_range: float,
    adv_clip_max: float,
    kl_coef: float,
    sample_weights: Tensor | float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean(-log sigmoid(R+ - R-)) / dpo_beta over groups + kl_coef mean((v - v_ref)^2).

    R+ - R- = dpo_beta / G sum_i A_i (e_ref_i - e_i), e = mean((v - (noise - x0))^2) per sample, in fp64, where A is
    adv_clip_max (2 r - 1). An e has no gradient where exp(e_old - e) is beyond 1 +- clip_range on the side of A.
    Velocities, x_t and x0 (B, ...); sigma, r and sample_weights, of the second term, (B,), group by group; r is 1/2
    for an image that a reward failed on. Returns the loss, to be minimised, and its metrics, scalars without gradient.
    """
    target = (x_t - x0) / sigma.view(-1, *[1] * (x0.dim() - 1))  # noise - x0

    def error(velocity: Tensor) -> Tensor:  # (B,)
        return ((velocity - target).double() ** 2).flatten(1).mean(1)

    advantages = adv_clip_max * (2 * r - 1)
    ratio = (error(v_old) - error(v)).exp()
    is_far = torch.where(advantages > 0, ratio > 1 + clip_range, ratio < 1 - clip_range)
    errors = torch.where(is_far, error(v).detach(), error(v))
    logits = dpo_beta * (advantages * (error(v_ref) - errors)).view(-1, group_size).mean(1)  # (groups,)
    loss = -F.logsigmoid(logits).mean() / dpo_beta
    kl = (sample_weights * ((v - v_ref) ** 2).flatten(1).mean(1)).mean()
    loss = loss + kl_coef * kl
    metrics = {"loss": loss, "margin": logits.mean(), "kl_loss": kl}
    metrics["pg_clipfrac"] = (is_far & (advantages != 0)).double().mean()
    metrics["old_deviation"] = ((v - v_old) ** 2).mean()
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def noise_images(x0: Tensor, t: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The forward process at timesteps t (b,) in (0, 1000]: sigma (b,) = t / 1000, and x_t (b, ...) of x0 and noise."""
    sigma = (t / 1000).to(x0.device)
    s = sigma.view(-1, *[1] * (x0.dim() - 1))
    x_t = (1 - s) * x0 + s * noise.to(x0.device)
    return sigma, x_t


@torch.no_grad()
def velocities_of(args: Args, model: Family, policy: str, batch: Batch, *, timesteps: Tensor, noise: Tensor) -> Tensor:
    """Velocities (B, K, ...) of a policy that stays as it is meanwhile, in the update's micro-batches."""
    parts = []
    with acting(model, policy):
        for rows in torch.arange(len(batch.x0)).split(args.micro_batch_size):
            conditioning = batch.request.select(rows).conditioning
            eps = noise[rows].to(batch.x0.device)  # (b, K, ...)
            rows = rows.to(batch.x0.device)  # once: a GPU waits for every index that comes from the CPU
            columns = []
            for k in range(timesteps.shape[1]):
                t = timesteps[rows, k]  # (b,)
                _, x_t = noise_images(batch.x0[rows], t, eps[:, k])
                columns.append(model.predict_velocity(x_t, t, conditioning))
            parts.append(torch.stack(columns, 1))
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
    v_ref: Tensor,
) -> list[dict[str, Tensor]]:
    """Add up the gradient of a mini-batch's loss: the mean over its images and their K timesteps.

    mini_batch: rows of the batch; timesteps (B, K), noise (B, K, ...); v_old and v_ref (B, K, ...): velocities_of `old`
    and of the reference. A pass, forward and backward, is one timestep of one micro-batch.
    Micro-batches are equally large, and FSDP averages over ranks: all images weigh the same. Returns the metrics of
    every pass.
    """
    num_timesteps = timesteps.shape[1]  # K
    micro_batches = mini_batch.split(args.micro_batch_size)
    num_passes = len(micro_batches) * num_timesteps
    # FSDP averages gradients over the ranks in every backward pass; the last pass alone is enough, so we switch it off
    # until then. Not for full weights: their unsharded fp32 gradients are as large as the model and would not fit
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes: list[dict[str, Tensor]] = []
    for rows in micro_batches:
        conditioning = batch.request.select(rows).conditioning
        eps = noise[rows].to(batch.x0.device)  # (b, K, ...)
        rows = rows.to(batch.x0.device)
        for k in range(num_timesteps):
            if len(passes) == num_passes - 1:
                model.transformer.set_requires_gradient_sync(True)
            t = timesteps[rows, k]  # (b,)
            x0 = batch.x0[rows]
            sigma, x_t = noise_images(x0, t, eps[:, k])
            v = model.predict_velocity(x_t, t, conditioning)
            loss, metrics = dgpo_loss(
                v,
                v_old[rows, k],
                v_ref[rows, k],
                x_t,
                x0,
                sigma=sigma,
                r=batch.r[rows],
                sample_weights=batch.sample_weights[rows],
                group_size=2,
                adv_clip_max=1.0,
                dpo_beta=args.dpo_beta,
                clip_range=args.clip_range,
                kl_coef=args.kl_coef,
            )
            metrics["actor/velocity_norm"] = norm_ratio(v, v_ref[rows, k])
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
    for epoch in range(args.epochs_per_rollout):
        # drawn again in every epoch, as in the paper's code
        timesteps, noise = draw_training_noise(args, batch, step, epoch)
        v_old = velocities_of(args, model, "old", batch, timesteps=timesteps, noise=noise)
        v_ref = velocities_of(args, model, "reference", batch, timesteps=timesteps, noise=noise)
        for mini_batch in mini_batches:
            passes = accumulate_gradients(
                args, model, batch, mini_batch, timesteps=timesteps, noise=noise, v_old=v_old, v_ref=v_ref
            )
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
        with acting(model, args.evaluated_policy, engine, in_engine="old"):  # in the engine as well
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
            engine.push_policy(model, "old")
    if args.eval_only or run.unlogged or not run.checkpoint:
        run.log(*evaluate(args, run, model, engine, inputs))
    last_step = run.step if args.eval_only else args.num_steps  # --eval_only takes no training step

    for step in range(run.step + 1, last_step + 1):
        run.begin_step(step, sampler, lambda: save(args, run, model, optimizer, sampler))  # saves if a rollout fails

        # one rollout; with --max_rollouts also further ones, in which other prompts replace those of equal rewards
        for prompt_rows, prompt_index, numbers in rollouts.draw(step):  # (U,) of train_set; (B,) of these U; (B,)
            # sample G images for each prompt with `old`, which the engine holds already (Algorithm 1, line 3)
            with run.timed("gen", per_image=True):
                prompts = inputs.train_set.select(prompt_rows)
                seeds = [image_seed(args.seed, step, number) for number in numbers.tolist()]
                request = make_request(args, model, prompts, prompt_index, seeds)
                scorer = rollouts.scorer(inputs.rewards, prompts.select(prompt_index), args.reward_failure)
                with acting(model, "old"):
                    trajectories = rollouts.merge(rollout(args, model, engine, rollouts.part(request), scorer))

            # score them; most were scored while others were sampled, but rewards of whole groups begin here
            with run.timed("reward", per_image=True):
                # (N, R): NaN where scoring failed, -inf where a prompt's record does not ask for the reward
                scores = gather_rows(scorer.scores(image_index, args.group_size), image_index)
                rollouts.judge(scores, args.reward_weights, args.group_size)

        # compare the images of a prompt (Flow-GRPO, eq. 4); a failed image, or one without others, gets 0
        with run.timed("adv"):
            filled, is_compared = fill_failed(scores, inputs.rewards, args.group_size)  # (N, R), (N,)
            advantages = compute_advantages(args, filled, is_compared)  # (N,)
            r = optimality(advantages, args.adv_mode, adv_clip_max=1.0)  # (N,): 1, 0 and 1/2
            metrics = reward_metrics(scores, advantages, inputs.rewards, args.reward_weights, args.group_size)
            metrics |= log_rollout(args, run, scorer, sampler, seeds=seeds, scores=scores, advantages=advantages)
            metrics["critic/optimality/mean"] = r[is_compared].mean()

        # make the best image of a prompt preferred to the worst, on the forward process
        with run.updating():
            local_r = r[image_index].to(device, torch.float32)  # (B,)
            sample_weights = is_compared[image_index].to(device, torch.float32)  # (B,)
            batch = Batch(request, trajectories.latents[:, -1], local_r, sample_weights, image_index)
            metrics |= update(args, model, optimizer, pairs_of(batch, advantages, args.group_size), step)

        # `old` follows, and the next rollout samples with it (line 14)
        with run.timed("update_weights"):
            if step % args.update_interval == 0:
                metrics["old_policy/decay"] = follow_trained(args, model)
            if engine:
                engine.push_policy(model, "old")

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
