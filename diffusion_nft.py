"""DiffusionNFT (arXiv 2509.16117v2): online RL on the forward process, the whole algorithm in one file.

One training step, by the paper's equations; x_s = (1 - s) x0 + s noise, v = noise - x0. Three policies share one base:
`default` is trained, `old` samples and follows it, and with a KL the reference stays:
  1. Sample images with `old`, by any solver, without guidance (Algorithm 1, line 3): `rollout`.
  2. Rewards, compared within a prompt, become optimality probabilities r in [0, 1] (section 3.3, Optimality Reward;
     Algorithm 1, lines 4, 5): `compute_advantages`, `optimality`.
  3. The forward process noises the final images anew; no trajectory or log-prob (Algorithm 1, line 9): `noise_images`.
  4. Around v_old stand an implicit positive and a negative policy, v+- = v_old +- beta (v - v_old) (lines 10, 11);
     flow matching draws v+ to images by r and v- by 1 - r (theorem 3.2, eq. 5; Adaptive Loss Weighting): `nft_loss`.
  5. The loss is a mean over images and their timesteps: `accumulate_gradients`, `update`.
  6. `old` follows (Soft Update of Sampling Policy; line 14): `old_policy_decay`, `follow` in `main`.

    torchrun --standalone diffusion_nft.py                       # the embedded model on a CPU, vLLM-Omni rollouts
    torchrun --standalone diffusion_nft.py --rollout local       # the training transformer samples: no vLLM needed
    torchrun --standalone --nproc_per_node 2 diffusion_nft.py    # the same images, shared by two ranks

Where it departs from the paper:
  - Timesteps are drawn per image from the sampler's own schedule, a fresh permutation in every epoch.
  - The decay of `old` counts optimizer steps, as in the paper's code, where the paper counts iterations.
  - The factors adv_clip_max and 1 / beta of the loss, and the KL, are its code's; the error is of x0, s times eq. 5's.
"""

# ==== 1 ARGS ==========================================================================================================
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

# common before torch and diffusers: it repairs torchvision next to a CPU torch
from common import checkpoints
from common.bounds import Bound, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from common.data import PromptSet, read_prompts
from common.distributed import end_distributed, gather_objects, gather_rows, mean_over_ranks, setup_distributed
from common.engine.client import VLLMEngine, check_engine, engine_gpus
from common.errors import RunError, one_line
from common.failures import leave_out_failed, loss_weights
from common.models import check_model, compile_block, find_family, load_model
from common.noise import image_seed
from common.options import EngineArgs, check_options, parse_args, recorded
from common.plan import show_plan
from common.policy import acting, add_policies, follow, gathered, make_lora, policy_tensors
from common.policy_state import load_optimizer_state, load_policy_states, optimizer_state, policy_states
from common.prompt_cache import cache_prompts
from common.rewards import Scorer, eval_metrics, load_eval_rewards, load_rewards, reward_metrics, sample_records
from common.rng import restore_rng_states, rng_states, set_seed
from common.rollout import RolloutRequest, Trajectories
from common.run import RunLog, close, create_run_folder, save_if_best, save_policy, save_samples
from common.sampler import GroupSampler, fit_micro_batch, share_eval_images
from common.sde import sde_step
from common.sharding import shard_mesh
from common.stops import catch_stop_signals
from common.watch import rollout_diversity, watch_metrics

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

MAX_SKIPPED = 3  # rollouts in a row without one finite gradient before the run stops
ADAM_EPS = 1e-15  # small, because gradients of a mean over all latent elements are (5e-9 RMS has been seen)


@dataclass
class Args(EngineArgs):
    # ---- run
    name: str = "diffusion_nft"
    """everything is written to runs/<name>, which must not hold a run yet (or see resume)"""

    # ---- rollout
    num_prompts: PositiveInt = 32
    """prompts per rollout, over all ranks"""
    group_size: Annotated[int, Bound(at_least=2)] = 8
    """images per prompt, at least 2: each image's reward is compared with those of the others"""
    num_inference_steps: PositiveInt = 3
    """sampling steps of a training image (Flow-GRPO: 10, and 40 in evaluation)"""

    # ---- algorithm
    nft_beta: PositiveFloat = 0.1
    """how far the implicit positive and negative policies stand from `old`: v+- = v_old +- beta (v - v_old)"""
    kl_coef: NonNegativeFloat = 0.0
    """weight of mean((v - v_ref)^2), the distance to the model before training (paper: 1e-4)"""
    adv_mode: Literal["continuous", "positive_only", "negative_only", "one_only", "binary"] = "continuous"
    """what becomes of the advantage before r = A / (2 adv_clip_max) + 1/2: clamped, its positive or negative part, 1
    where it is positive and 0 elsewhere, or its sign"""
    timestep_fraction: Annotated[float, Bound(above=0, at_most=1)] = 1.0
    """share of the sampling schedule's timesteps that every image is trained at"""
    decay_schedule: Literal["copy", "linear_to_0_5", "delayed_linear_to_0_999", "fixed"] = "linear_to_0_5"
    """d of old = d old + (1 - d) default after k optimizer steps: 0; min(.001 k, .5); 0 to k = 75, then
    min(.0075 (k - 75), .999); or old_decay"""
    old_decay: Annotated[float, Bound(at_least=0, below=1)] = 0.5
    """d of the schedule `fixed`, from 0 (copy) to below 1"""
    update_interval: PositiveInt = 1
    """rollouts between two updates of `old`"""
    adv_clip_max: PositiveFloat = 5.0
    """advantages are clamped to +- this"""
    scale_rewards: Literal["batch", "group", "none"] = "batch"
    """divide advantages by the rewards' deviation over the rollout (batch) or the prompt's group; none: Dr.GRPO"""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """advantages of several rewards: of their weighted sum; or each one's own, added and normalised again (GDPO)"""

    # ---- optimization
    num_steps: NonNegativeInt = 30
    """training steps of the run: a rollout and its updates each"""
    updates_per_rollout: PositiveInt = 4
    """mini-batches that a rollout is cut into, an optimizer step each; only the first is on-policy"""
    epochs_per_rollout: PositiveInt = 1
    """passes over those mini-batches"""
    micro_batch_size: PositiveInt = 64
    """images per forward and backward pass on a rank, and per local sampling batch; at most a mini-batch's share"""
    learning_rate: NonNegativeFloat = 1e-3
    """learning rate of AdamW (Flow-GRPO: 3e-4)"""


# ==== 2 SETUP =========================================================================================================
class Inputs(NamedTuple):
    """What `check_args` makes of the arguments before any model loads."""

    family: type  # a class of common/models
    rewards: dict  # {name: function}
    eval_rewards: dict  # those, and behind them those of --eval_reward
    train_set: PromptSet
    eval_set: PromptSet
    lora: tuple | None  # make_lora's; None: full weights
    checkpoint: Path | None  # to go on from


def check_args(args):
    """Refuse what cannot work before any model loads. Returns the run's Inputs."""
    check_options(args)
    num_images = args.num_prompts * args.group_size
    updates = args.updates_per_rollout
    args.micro_batch_size = fit_micro_batch(num_images, "--num_prompts x --group_size", updates, args.micro_batch_size)

    rewards = load_rewards(args.reward, args.reward_weights, args.num_frames, load=not args.plan)
    eval_rewards = load_eval_rewards(args.eval_reward, rewards, args.num_frames, load=not args.plan)
    train_set = read_prompts(args.train_prompts, rewards)
    eval_set = read_prompts(args.eval_prompts, eval_rewards, args.max_prompts)
    checkpoint = checkpoints.open_run(Path("runs") / args.name, args.resume, args.eval_only)
    # what imports diffusers and peft, which takes seconds, comes last
    family = find_family(args.model)
    check_model(family, args.model, *args.image_size, args.num_frames)
    check_engine(args.rollout, family, args.model, args.engine_devices, args.engine_tensor_parallel)
    targets = args.lora_target_modules or family.lora_target_modules
    lora = make_lora(args.lora_path, args.lora_rank, args.lora_alpha, targets, args.lora_exclude_modules)
    checkpoints.check_policy(checkpoint, lora)
    return Inputs(family, rewards, eval_rewards, train_set, eval_set, lora=lora, checkpoint=checkpoint)


# ==== 3 DATA ==========================================================================================================
def make_request(args, model, prompts, prompt_index, seeds, *, num_inference_steps=None):
    """Ask for B ODE images of `prompts`, each encoded once: prompt_index (B,) says which one, seeds (B) its noise."""
    num_inference_steps = num_inference_steps or args.num_inference_steps
    height, width = args.image_size
    timesteps, sigmas, latent_shape = model.schedule(num_inference_steps, height, width, args.num_frames)
    return RolloutRequest(
        conditioning=model.encode_prompts(prompts, args.max_sequence_length),
        negative_conditioning=None,
        prompt_index=prompt_index,
        seeds=seeds,
        timesteps=timesteps,  # (T,)
        sigmas=sigmas,  # (T + 1,)
        latent_shape=latent_shape,  # (C, h, w), of a video (C, f, h, w)
        sde_steps=(),
        sde_type="sde",
        noise_level=0.0,
        guidance_scale=1.0,
        height=height,
        width=width,
    )


def draw_request(args, model, sampler, train_set, step):
    """This rank's B of the N images of rollout `step`: the request, their prompts, and their numbers (B,) of the N."""
    prompt_rows, prompt_index, image_index = sampler.draw()  # (P,); (B,) of these P; (B,) of all N
    prompts = train_set.select(prompt_rows)
    seeds = [image_seed(args.seed, step, index) for index in image_index.tolist()]
    request = make_request(args, model, prompts.prompts, prompt_index, seeds)
    return request, prompts.select(prompt_index), image_index


def draw_training_noise(args, request, step, epoch, image_index):
    """For each of B images K timesteps of the sampling schedule, (B, K), and fresh noise, (B, K, ...).

    Seeded by (seed, step, epoch, global image index), apart from the rollout's noise: the same on any number of ranks.
    """
    # truncated, as in the paper's code: .99 of 10 steps trains 9
    num_timesteps = int(args.timestep_fraction * args.num_inference_steps) or 1  # K
    purpose = f"{step} update" if epoch == 0 else f"{step} update {epoch}"
    timesteps = []
    noise = []
    for index in image_index.tolist():
        generator = torch.Generator().manual_seed(image_seed(args.seed, purpose, index))
        chosen = torch.randperm(len(request.timesteps), generator=generator)[:num_timesteps]
        timesteps.append(request.timesteps[chosen])
        noise.append(torch.randn(num_timesteps, *request.latent_shape, generator=generator))
    return torch.stack(timesteps), torch.stack(noise)


# ==== 4 MODEL =========================================================================================================
def load_policy(args, inputs, device):
    """The pipeline and its policies (common/policy.py), sharded; and the parameters that are trained."""
    model = load_model(inputs.family, args.model, getattr(torch, args.dtype), device)
    prompts = inputs.train_set.prompts + inputs.eval_set.prompts
    cache_prompts(model, prompts, args.max_sequence_length, args.prompt_cache)
    set_seed(args.seed)  # the same initial LoRA on every rank
    policies = ["default", "old"]
    if args.ema_decay > 0:
        policies.append("ema")
    if args.kl_coef > 0:
        policies.append("reference")
    add_policies(model, inputs.lora, policies)
    model.evaluated_policy = "ema" if args.ema_decay > 0 else "default"  # and saved for diffusers
    shard(args, model, device)
    return model, [p for p in model.transformer.parameters() if p.requires_grad]


def shard(args, model, device):
    """FSDP2: every block of the transformer, then the rest of it."""
    dtype = getattr(torch, args.dtype)
    # FSDP must not cast the inputs: it would round the timesteps to bf16. predict_velocity casts what is to be cast
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    on_cpu = "cpu_offload" in args.train_with
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_cpu else OffloadPolicy()
    options = {"mesh": shard_mesh(device, args.shard_ranks), "mp_policy": precision, "offload_policy": offload}
    # with a LoRA one transformer for all policies, else one each; the dict keeps one order on all ranks
    for transformer in dict.fromkeys(model.policies.values()):
        if "activation_checkpointing" in args.train_with:
            transformer.enable_gradient_checkpointing()
        blocks = [m for m in transformer.modules() if type(m).__name__ in transformer._no_split_modules]
        for module in [*blocks, transformer]:
            if "compile" in args.train_with and module is not transformer:
                compile_block(module)
            if not model.is_lora and transformer is not model.policies.get("reference"):
                module.float()  # what is trained or averaged; a block at a time, as the whole model may not fit
            fully_shard(module, **options)


def old_policy_decay(decay_schedule, old_decay, k):
    """d of old <- d old + (1 - d) default, after k optimizer steps (figure 8, with k in place of iterations)."""
    if decay_schedule == "copy":
        return 0.0
    if decay_schedule == "linear_to_0_5":
        return min(0.001 * k, 0.5)
    if decay_schedule == "delayed_linear_to_0_999":
        return min(max(0.0, 0.0075 * (k - 75)), 0.999)
    return old_decay


# ==== 5 ENGINE ========================================================================================================
def start_engine(args, folder, device):
    """This rank's vLLM-Omni engine, loading in the background while the trainer loads; None with --rollout local."""
    if args.rollout == "local":
        return None
    gpus = engine_gpus(args.engine_devices, args.engine_tensor_parallel, device)
    options = {"log_file": folder / f"engine_rank{dist.get_rank()}.log", "gpus": gpus, "sleeps": args.engine_sleep}
    return VLLMEngine(args.model, args.dtype, args.rollout_batch_size, timeout_s=args.engine_timeout_s, **options)


# ==== 6 ROLLOUT =======================================================================================================
@torch.no_grad()
def sample_locally(model, request):
    """Sample the request's B images with the training transformer and the acting policy, by the ODE."""
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    first_latents = request.first_latents(generators, model.device)  # (B, C, h, w)
    outputs = []
    x = first_latents
    for i in range(len(request.timesteps)):
        v = model.predict_velocity(x, request.timesteps[i], request.conditioning)
        sigma, sigma_next = request.sigmas[i : i + 2].tolist()
        outputs.append(sde_step(x, v, sigma, sigma_next, noise_level=0.0))
        x = outputs[-1].prev_sample
    return Trajectories.from_steps(first_latents, outputs, model.decode(x))


def rollout(args, model, engine, request, finished=None):
    """Trajectories of W = 0 steps, latents (B, 1, ...) the final ones; finished(rows, images) is told of each batch."""
    if engine:
        return engine.generate(request, finished=finished).to(model.device)
    # micro_batch_size images at once
    parts = []
    with gathered(model, args.gather_for_sampling and "cpu_offload" not in args.train_with):
        for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size):
            parts.append(sample_locally(model, request.select(rows)))
            if finished:
                finished(rows.tolist(), parts[-1].images)
    return Trajectories.cat(parts)


class Batch(NamedTuple):
    """A rollout as the update takes it: B images of this rank."""

    request: RolloutRequest
    x0: torch.Tensor  # (B, ...), final latents of the rollout
    r: torch.Tensor  # (B,), optimality
    weights: torch.Tensor  # (B,), 0 of images left out, 1 where none is
    image_index: torch.Tensor  # (B,), the images' numbers over all ranks


# ==== 7 ADVANTAGE =====================================================================================================
def compute_advantages(rewards, group_size, adv_clip_max=5.0, scale_rewards="batch"):
    """A = (r - mean of the group) / (S + 1e-4), clamped to +- adv_clip_max (Flow-GRPO, eq. 4), in fp64.

    rewards: (P * group_size,), group by group; NaN is left out and gets 0, as equal rewards do, exactly. S is the
    population standard deviation of each "group" (the paper) or of all ("batch", its code); "none" does not divide.
    """
    groups = rewards.double().view(-1, group_size)  # (P, G)
    centred = groups - groups.nanmedian(1, keepdim=True).values  # one of them, so that equal rewards are exact zeros
    centred = centred - centred.nanmean(1, keepdim=True)
    if scale_rewards == "batch":
        centred = centred / (groups[~groups.isnan()].std(correction=0) + 1e-4)
    elif scale_rewards == "group":
        centred = centred / (centred.square().nanmean(1, keepdim=True).sqrt() + 1e-4)
    return centred.where(~groups.isnan(), 0.0).clamp(-adv_clip_max, adv_clip_max).flatten()


def combine_advantages(args, scores, adv_clip_max):
    """Advantages (N,) of R rewards by their scores (N, R): those of the weighted sum or, with normalize_then_sum, the
    weighted sum of each one's own, divided by that sum's deviation over the rollout (GDPO, arXiv 2601.05242)."""
    scale_rewards = args.scale_rewards
    if args.multi_objective_aggregation == "normalize_then_sum" and scores.shape[1] > 1 and scale_rewards != "none":
        own_advantages = [compute_advantages(r, args.group_size, math.inf, scale_rewards) for r in scores.T]
        scores = torch.stack(own_advantages, 1).where(~scores.isnan(), torch.nan)
        scale_rewards = "batch"
    totals = scores @ torch.tensor(args.reward_weights, dtype=torch.float64)  # (N,)
    return compute_advantages(totals, args.group_size, adv_clip_max, scale_rewards)


# ==== 8 LOG PROB ======================================================================================================
# None: the forward process needs no probability of a trajectory. What takes its place is how optimal an image is.
def optimality(advantages, adv_mode, adv_clip_max):
    """r = clip(A / (2 m) + 1/2, 0, 1), m = adv_clip_max (section 3.3, Optimality Reward), of A (N,) by adv_mode."""
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
def nft_loss(v, v_old, v_ref, x_t, x0, *, sigma, r, nft_beta, adv_clip_max, kl_coef, weights=1.0):
    """adv_clip_max mean(r L+ / beta + (1 - r) L- / beta) + kl_coef mean((v - v_ref)^2) (eq. 5, weighted as in 3.3).

    L+- = mean((x0_hat+- - x0)^2) / w+- per sample, with x0_hat = x_t - sigma v+-, v+ = beta v + (1 - beta) v_old,
    v- = (1 + beta) v_old - beta v, and w+- = mean |x0_hat+- - x0|, at least 1e-5, in fp64 and without gradient.
    Velocities, x_t and x0 (B, ...), sigma, r and the weights of both terms (B,); v_ref None without KL. Returns loss
    (minimise), metrics.
    """
    sigma = sigma.view(-1, *[1] * (x0.dim() - 1))

    def weighted_error(velocity):  # (B,)
        difference = x_t - sigma * velocity - x0
        weight = difference.detach().double().abs().flatten(1).mean(1).clamp(min=1e-5)
        return (difference**2).flatten(1).mean(1) / weight

    shift = nft_beta * (v - v_old)  # exactly 0 at v_old, so that both gradients cancel there where r is 1/2
    positive = weighted_error(v_old + shift)
    negative = weighted_error(v_old - shift)
    loss = adv_clip_max * (weights * (r * positive + (1 - r) * negative)).mean() / nft_beta
    kl = loss.new_zeros(()) if v_ref is None else (weights * ((v - v_ref) ** 2).flatten(1).mean(1)).mean()
    loss = loss + kl_coef * kl
    metrics = {"loss": loss, "positive_loss": positive.mean(), "negative_loss": negative.mean(), "kl_loss": kl}
    metrics["old_deviation"] = ((v - v_old) ** 2).mean()
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def noise_images(x0, t, noise):
    """The forward process at timesteps t (b,) in (0, 1000]: sigma (b,) = t / 1000, and x_t (b, ...) of x0 and noise."""
    sigma = (t / 1000).to(x0.device)
    s = sigma.view(-1, *[1] * (x0.dim() - 1))
    x_t = (1 - s) * x0 + s * noise.to(x0.device)
    return sigma, x_t


@torch.no_grad()
def velocities_of(args, model, policy, batch, *, timesteps, noise):
    """Velocities (B, K, ...) of a policy that stays while another is trained, in the update's micro-batches."""
    parts = []
    with acting(model, policy):
        for rows in torch.arange(len(batch.x0)).split(args.micro_batch_size):
            conditioning = batch.request.select(rows).conditioning
            columns = []
            for k in range(timesteps.shape[1]):
                t = timesteps[rows, k]  # (b,)
                _, x_t = noise_images(batch.x0[rows], t, noise[rows, k])
                columns.append(model.predict_velocity(x_t, t, conditioning))
            parts.append(torch.stack(columns, 1))
    return torch.cat(parts)


def accumulate_gradients(args, model, batch, mini_batch, *, timesteps, noise, v_old, v_ref):
    """Add up the gradient of a mini-batch's loss: the mean over its images and their K timesteps (eq. 5).

    mini_batch: rows of the batch; timesteps (B, K), noise (B, K, ...); v_old and v_ref (B, K, ...): what velocities_of
    gives there for `old` and for the reference, None without KL. A pass, forward and backward, is one timestep of one
    micro-batch. Micro-batches are of one size, and FSDP averages over ranks. Returns the metrics of every pass.
    """
    num_timesteps = timesteps.shape[1]  # K
    micro_batches = mini_batch.split(args.micro_batch_size)
    num_passes = len(micro_batches) * num_timesteps
    # ranks exchange gradients once per optimizer step, in its last pass; of full weights, whose gradients before the
    # exchange are as large as the whole model in fp32, in every pass
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes = []
    for rows in micro_batches:
        conditioning = batch.request.select(rows).conditioning
        for k in range(num_timesteps):
            if rows is micro_batches[-1] and k == num_timesteps - 1:
                model.transformer.set_requires_gradient_sync(True)
            t = timesteps[rows, k]  # (b,)
            x0 = batch.x0[rows]
            sigma, x_t = noise_images(x0, t, noise[rows, k])
            v = model.predict_velocity(x_t, t, conditioning)
            loss, metrics = nft_loss(
                v,
                v_old[rows, k],
                None if v_ref is None else v_ref[rows, k],
                x_t,
                x0,
                sigma=sigma,
                r=batch.r[rows],
                weights=batch.weights[rows],
                nft_beta=args.nft_beta,
                adv_clip_max=args.adv_clip_max,
                kl_coef=args.kl_coef,
            )
            (loss / num_passes).backward()
            passes.append(metrics)
    return passes


def optimizer_step(args, model, optimizer):
    """Clip the gradient, take one AdamW step, let the average follow. Returns the norm before, the same on all ranks.

    No step is taken where the norm is not finite, or is 0: nothing to learn, and no weight to decay.
    """
    group = optimizer.param_groups[0]
    grad_norm = torch.nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm).full_tensor().item()
    if 0 < grad_norm < math.inf:
        state = optimizer.state[group["params"][0]]
        k = int(state.get("step", 0)) + 1  # this is the k-th step, by Adam's own count, which a checkpoint restores
        group["lr"] = args.learning_rate * min(1, k / max(1, args.lr_warmup_steps))
        optimizer.step()
        if args.ema_decay > 0:
            follow(model, "ema", min(args.ema_decay, (1 + k) / (10 + k)))
    optimizer.zero_grad()
    return grad_norm


def update(args, model, optimizer, batch, step):
    """epochs_per_rollout x updates_per_rollout optimizer steps on a rank's B images. Returns metrics over all ranks."""
    # consecutive, not shuffled: GroupSampler has dealt them so that any number of ranks updates on the same images
    mini_batches = torch.arange(len(batch.x0)).chunk(args.updates_per_rollout)
    grad_norms = []
    finite_passes = []  # of the updates whose gradient is finite
    metrics = {}
    for epoch in range(args.epochs_per_rollout):
        # drawn anew in every epoch, as in the paper's code
        timesteps, noise = draw_training_noise(args, batch.request, step, epoch, batch.image_index)
        drawn = {"timesteps": timesteps, "noise": noise}
        v_old = velocities_of(args, model, "old", batch, **drawn)
        v_ref = velocities_of(args, model, "reference", batch, **drawn) if args.kl_coef else None
        for mini_batch in mini_batches:
            passes = accumulate_gradients(args, model, batch, mini_batch, **drawn, v_old=v_old, v_ref=v_ref)
            grad_norm = optimizer_step(args, model, optimizer)
            if math.isfinite(grad_norm):  # it is over all ranks: they skip together
                grad_norms.append(grad_norm)
                finite_passes += passes
    metrics["actor/skipped_steps"] = args.epochs_per_rollout * len(mini_batches) - len(grad_norms)
    metrics["actor/lr"] = optimizer.param_groups[0]["lr"]
    if grad_norms:
        metrics["actor/grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics |= mean_over_ranks(finite_passes)
    return metrics


# ==== 10 EVAL =========================================================================================================
def evaluate(args, model, engine, inputs, folder):
    """ODE images of every held-out prompt, from the same seeds every time, shared by the ranks, written to `folder`.

    Returns its metrics (rewards, failures, diversity, drift) and, on rank 0, 32 images as (PIL image, caption).
    """
    places, prompts, seeds = share_eval_images(inputs.eval_set, args.eval_images_per_prompt)  # B of this rank
    steps = args.eval_num_inference_steps
    index = torch.arange(len(places))
    request = make_request(args, model, prompts.prompts, index, seeds, num_inference_steps=steps)
    with acting(model, model.evaluated_policy, engine, "old"):
        scorer = Scorer(inputs.eval_rewards, prompts, args.reward_failure)
        images = rollout(args, model, engine, request, scorer.add).images
    scores = scorer.scores()  # (B, R)
    grid = save_samples(folder, places, images, sample_records(prompts, seeds, scores, inputs.eval_rewards))
    num_prompts = len(inputs.eval_set)
    metrics = eval_metrics(scores, inputs.eval_rewards, args.reward_weights, num_prompts, args.eval_images_per_prompt)
    return metrics | watch_metrics(folder, places, images, args.eval_images_per_prompt), grid


# ==== 11 CHECKPOINT ===================================================================================================
def save(args, model, optimizer, sampler, *, step, best_score):
    """Write all that changes, for any number of ranks to go on from, and the policy for diffusers. A collective."""
    folder = Path("runs") / args.name
    state = {
        "step": step,
        "best": best_score,
        "args": recorded(args),
        "sampler": sampler.state_dict(),
        "rng": gather_objects(rng_states()),
        "policies": policy_states(model),
        "optimizer": optimizer_state(model, optimizer),
    }
    checkpoints.save_checkpoint(folder, step, state, args.keep_checkpoints)
    save_policy(folder / "adapter", model, model.evaluated_policy)


def load(args, path, model, optimizer, sampler):
    """Restore what `save` wrote, on any number of ranks. Returns the step and the best evaluation's score so far."""
    state = checkpoints.load_checkpoint(path)
    load_policy_states(model, state["policies"])
    load_optimizer_state(model, optimizer, state["optimizer"])
    optimizer.param_groups[0]["weight_decay"] = args.weight_decay  # the rate is set at every step
    sampler.load_state_dict(state["sampler"])
    restore_rng_states(state["rng"][dist.get_rank() % len(state["rng"])])
    is_comparable = checkpoints.say_resumed(path, state["args"], recorded(args))
    return state["step"], state["best"] if is_comparable else -math.inf


# ==== 12 MAIN =========================================================================================================
def main(args, inputs):
    device = setup_distributed()
    inputs = inputs._replace(checkpoint=checkpoints.from_rank_0(inputs.checkpoint))
    stop_requested = catch_stop_signals(args.max_minutes)
    folder = Path("runs") / args.name
    create_run_folder(folder, recorded(args), __file__, inputs.checkpoint)
    log = RunLog(folder, args.track, recorded(args), args.num_prompts * args.group_size, args.profile_steps)

    # the engine loads in a process of its own while the policy loads in this one
    engine = start_engine(args, folder, device)
    model, parameters = load_policy(args, inputs, device)
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=args.weight_decay, eps=ADAM_EPS)
    sampler = GroupSampler(
        len(inputs.train_set), args.num_prompts, args.group_size, args.seed, args.updates_per_rollout
    )
    if engine:
        # prove, before hours are spent, that what is pushed changes the engine's images
        probe = make_request(args, model, inputs.eval_set.prompts[:1], torch.tensor([0]), seeds=[0])
        engine.verify_push(*policy_tensors(model), probe)

    # go on where a checkpoint ends, or begin
    first_step = 0
    best_score = -math.inf
    if inputs.checkpoint:
        first_step, best_score = load(args, inputs.checkpoint, model, optimizer, sampler)
        if engine:  # which holds the policy of before the checkpoint
            engine.push(*policy_tensors(model, "old"))
    checkpoints.rewind(folder, first_step if inputs.checkpoint else -1)  # -1: nothing stays of a run without one

    # the score that training starts from or, with eval_only, the one that is asked for
    if args.eval_only or not inputs.checkpoint:
        with log.timed("testing"):
            metrics, grid = evaluate(args, model, engine, inputs, folder / "samples" / f"{first_step:04d}")
        if not args.eval_only:
            best_score = save_if_best(folder, model, metrics, best_score)
        log.write(first_step, metrics, grid)
    if args.eval_only:
        close(engine, log)
        return

    skipped_in_a_row = 0
    for step in log.steps(range(first_step + 1, args.num_steps + 1), args.stop_if):
        # sample G images for each prompt with `old`, which the engine holds already
        with log.timed("gen"):
            request, prompts, image_index = draw_request(args, model, sampler, inputs.train_set, step)
            scorer = Scorer(inputs.rewards, prompts, args.reward_failure)
            with acting(model, "old"):
                trajectories = rollout(args, model, engine, request, scorer.add)

        # score them, each rank its own; most have been scored while others were sampled
        with log.timed("reward"):
            scores = scorer.scores()  # (B, R), NaN where a reward failed

        # compare the images of a prompt with each other, over all ranks (Flow-GRPO, eq. 4)
        with log.timed("adv"):
            scores = gather_rows(scores, image_index)  # (N, R)
            scores, metrics = leave_out_failed(scores, inputs.rewards, args.group_size)
            totals = scores @ torch.tensor(args.reward_weights, dtype=torch.float64)  # (N,)
            advantages = combine_advantages(args, scores, args.adv_clip_max)  # (N,)
            r = optimality(advantages, args.adv_mode, args.adv_clip_max)  # (N,)
            metrics |= reward_metrics(scores, totals, advantages, inputs.rewards, args.group_size)
            metrics["critic/diversity"] = rollout_diversity(trajectories.images, image_index, args.group_size)
            metrics["critic/optimality/mean"] = r[~totals.isnan()].mean()

        # draw the velocity to the better images and away from the others, on the forward process (eq. 5)
        with log.timed("update_actor"):
            local_r = r[image_index].to(device, torch.float32)  # (B,)
            weights = loss_weights(scores, args.updates_per_rollout)[image_index].to(device)  # (B,)
            batch = Batch(request, trajectories.latents[:, -1], local_r, weights, image_index)
            metrics |= update(args, model, optimizer, batch, step)
        skipped_in_a_row = 0 if "actor/grad_norm" in metrics else skipped_in_a_row + 1
        if skipped_in_a_row == MAX_SKIPPED:
            raise RunError(f"step {step}: no finite gradient in {MAX_SKIPPED} rollouts: lower --learning_rate")

        # `old` follows, and the next rollout samples with it
        with log.timed("update_weights"):
            if step % args.update_interval == 0:
                k = int(optimizer.state.get(parameters[0], {}).get("step", 0))  # optimizer steps taken so far
                metrics["old_policy/decay"] = old_policy_decay(args.decay_schedule, args.old_decay, k)
                follow(model, "old", metrics["old_policy/decay"])
            if engine:
                engine.push(*policy_tensors(model, "old"))
        metrics["training/epoch"] = sampler.position / sampler.num_prompts
        log.show(reward=totals.nanmean().item())

        # evaluate, log and save; a stop that one rank was asked for is a stop of all
        grid = None
        is_due = step % args.eval_every == 0 or step == args.num_steps
        if is_due:
            with log.timed("testing"):
                val_metrics, grid = evaluate(args, model, engine, inputs, folder / "samples" / f"{step:04d}")
                best_score = save_if_best(folder, model, val_metrics, best_score)
            metrics |= val_metrics
        log.write(step, metrics, grid)
        stopping = any(gather_objects(stop_requested())) or log.stop_reason is not None
        if is_due or stopping:
            with log.timed("save_checkpoint"):  # after the log, which a resumed run cuts back to the checkpoint
                save(args, model, optimizer, sampler, step=step, best_score=best_score)
        if stopping:
            break

    close(engine, log)


if __name__ == "__main__":
    with one_line(ValueError):
        args = parse_args(Args, __doc__)
        inputs = check_args(args)
        if args.plan:
            counts = {"trained_steps": int(args.timestep_fraction * args.num_inference_steps) or 1, "policies": ["old"]}
            raise SystemExit(show_plan(asdict(args), inputs, **counts, acting_epochs=args.epochs_per_rollout))
    with one_line(RunError, Path("runs") / args.name):
        main(args, inputs)
    end_distributed()
