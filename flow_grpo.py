"""Flow-GRPO (arXiv 2505.05470v5): online RL for flow-matching image models, the whole algorithm in one file.

One training step, by the paper's equations; x_s = (1 - s) x0 + s noise, v = noise - x0 (eq. 1, 2), and s, `sigma` in
the code, runs from 1 to 0. As an MDP: a state is (x, s, prompt), an action the next x, the reward is last; no critic.
  1. Sample G images for each prompt, in few steps (section 4, Denoising Reduction): `rollout`.
  2. A step x -> x' follows an SDE with the marginals of the ODE dx = v dt (ODE-to-SDE conversion, eq. 6 to 9): a
     Gaussian policy with a density: `policy_step`, by `sde` of common/sde.py.
  3. Score the images; an image's advantage compares its reward with its prompt's group (eq. 4): `compute_advantages`.
  4. The ratio of a step's new density to its old one enters a clipped objective (eq. 5): `policy_loss`.
  5. Its mean over images and trained steps (eq. 5) is maximised, less kl_coef times the KL to the reference (eq. 3, and
     the line after eq. 9): `accumulate_gradients`, `kl_divergence`, `update`.
  6. The engine that samples gets the new weights: `engine.push`. All of it, in this order: `main`, at the end.

    torchrun --standalone flow_grpo.py                       # the embedded model on a CPU, vLLM-Omni rollouts
    torchrun --standalone flow_grpo.py --rollout local       # the training transformer samples: no vLLM needed
    torchrun --standalone --nproc_per_node 2 flow_grpo.py    # the same images, shared by two ranks

Where it departs from the paper:
  - By default the first sampling step alone is stochastic and trained (--sde_window_size 0: all but the last).
  - The deviation in eq. 4 is the rollout's, as in its code (--scale_rewards group: the paper's). Advantages are of
    samples, one reward each, clamped; groups are keyed by an integer id, never by the prompt's text.
  - log_prob is a mean over the D latent elements, as in its code: the ratio is the densities' to the power 1 / D, and
    useful clip ranges are 1e-3 to 1e-5.
  - The KL, off by default, is its code's: |dt| times the one after eq. 9 (--kl_type paper: that one).
  - Where s is 1, the schedule's second sigma stands for it in 1 - s.
"""

# ==== 1 ARGS ==========================================================================================================
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

# common before torch and diffusers: it repairs torchvision next to a CPU torch
from common import checkpoints, correction
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
from common.schedule import check_window, random_window_start
from common.sde import check_step_kind, kl_divergence, sde_step
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
    name: str = "flow_grpo"
    """everything is written to runs/<name>, which must not hold a run yet (or see resume)"""

    # ---- rollout
    num_prompts: PositiveInt = 32
    """prompts per rollout, over all ranks"""
    group_size: Annotated[int, Bound(at_least=2)] = 8
    """images per prompt, at least 2: each image's reward is compared with those of the others"""
    num_inference_steps: Annotated[int, Bound(at_least=2)] = 3
    """sampling steps of a training image (Flow-GRPO: 10, and 40 in evaluation)"""
    guidance_scale: Annotated[float, Bound(at_least=1)] = 1.0
    """guidance in rollout, training and evaluation alike, as the model takes it (docs/models.md); 1: no second pass"""
    sde_type: str = "sde"
    """kind of stochastic steps: sde (Flow-GRPO's), dance, cps (unscaled log-prob), cps_gauss, or file.py:function"""
    noise_level: PositiveFloat = 0.7
    """noise injected at stochastic steps, above 0 (Flow-GRPO: 0.7): its scale for sde and dance; for cps at most 1"""
    sde_window_size: NonNegativeInt = 1
    """consecutive sampling steps that are stochastic and trained; the others follow the ODE. 0: all but the last"""
    sde_window_range: tuple[int, int] = (0, 1)
    """the window is drawn, once per rollout, within steps lo to hi - 1; hi at most num_inference_steps - 1"""

    # ---- algorithm
    clip_range: PositiveFloat = 1e-3
    """the ratio is clipped to 1 +- this; small, as log-probs are means over the latent: 1e-4 for SD3.5 at 512"""
    kl_coef: NonNegativeFloat = 0.0
    """weight of the KL to the reference: the model before training (Flow-GRPO: .04 for OCR, .01 for PickScore)"""
    kl_type: Literal["code", "paper"] = "code"
    """code: of a sde step the KL times its |dt|, as published coefficients assume; paper: the KL itself"""
    adv_clip_max: PositiveFloat = 5.0
    """advantages are clamped to +- this"""
    scale_rewards: Literal["batch", "group", "none"] = "batch"
    """divide advantages by the rewards' deviation over the rollout (batch) or the prompt's group; none: Dr.GRPO"""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """advantages of several rewards: of their weighted sum; or each one's own, added and normalised again (GDPO)"""
    old_log_prob: Literal["rollout", "recompute"] = "recompute"
    """whose log-probs the ratio starts from: rollout, the engine's; recompute, the trainer's (local: the same)"""
    rollout_correction: str = "none"
    """importance weights against the engine's mismatch: none, or KIND:THRESHOLD, joined by commas; kinds tis, icepop,
    reject_k1, _k2, _k3, each also as tis_trajectory ...; thresholds in clip_range (k2, k3: in its square)"""
    max_velocity_drift: PositiveFloat | None = None
    """stop where the engine's velocity is off the trainer's by more than this share; None: by dtype and guidance"""

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
    check_step_kind(args.sde_type, args.noise_level)
    num_images = args.num_prompts * args.group_size
    updates = args.updates_per_rollout
    args.micro_batch_size = fit_micro_batch(num_images, "--num_prompts x --group_size", updates, args.micro_batch_size)
    if args.sde_window_size:
        check_window(args.sde_window_range, args.sde_window_size, args.num_inference_steps)
    correction.check_correction(args.rollout_correction, args.rollout, args.old_log_prob)
    if args.max_velocity_drift is None:
        args.max_velocity_drift = correction.default_drift_limit(args.dtype, args.guidance_scale)

    rewards = load_rewards(args.reward, args.reward_weights, args.num_frames, load=not args.plan)
    eval_rewards = load_eval_rewards(args.eval_reward, rewards, args.num_frames, load=not args.plan)
    train_set = read_prompts(args.train_prompts, rewards)
    eval_set = read_prompts(args.eval_prompts, eval_rewards, args.max_prompts)
    checkpoint = checkpoints.open_run(Path("runs") / args.name, args.resume, args.eval_only)
    # what imports diffusers and peft, which takes seconds, comes last
    family = find_family(args.model)
    check_model(family, args.model, *args.image_size, args.num_frames, args.guidance_scale)
    check_engine(args.rollout, family, args.model, args.engine_devices, args.engine_tensor_parallel)
    targets = args.lora_target_modules or family.lora_target_modules
    lora = make_lora(args.lora_path, args.lora_rank, args.lora_alpha, targets, args.lora_exclude_modules)
    checkpoints.check_policy(checkpoint, lora)
    return Inputs(family, rewards, eval_rewards, train_set, eval_set, lora=lora, checkpoint=checkpoint)


# ==== 3 DATA ==========================================================================================================
def make_request(args, model, prompts, prompt_index, seeds, *, sde_steps=(), num_inference_steps=None):
    """Ask for B images of `prompts`, each encoded once: prompt_index (B,) says which one, seeds (B) its noise."""
    num_inference_steps = num_inference_steps or args.num_inference_steps
    height, width = args.image_size
    timesteps, sigmas, latent_shape = model.schedule(num_inference_steps, height, width, args.num_frames)
    return RolloutRequest(
        conditioning=model.encode_prompts(prompts, args.max_sequence_length),
        negative_conditioning=model.encode_negative(args.guidance_scale, args.max_sequence_length),
        prompt_index=prompt_index,
        seeds=seeds,
        timesteps=timesteps,  # (T,)
        sigmas=sigmas,  # (T + 1,)
        latent_shape=latent_shape,  # (C, h, w), of a video (C, f, h, w)
        sde_steps=sde_steps,
        sde_type=args.sde_type,
        noise_level=args.noise_level,
        guidance_scale=args.guidance_scale,
        height=height,
        width=width,
    )


def draw_request(args, model, sampler, train_set, step):
    """This rank's B of the N images of rollout `step`: the request, their prompts, and their numbers (B,) of the N."""
    prompt_rows, prompt_index, image_index = sampler.draw()  # (P,); (B,) of these P; (B,) of all N
    prompts = train_set.select(prompt_rows)
    seeds = [image_seed(args.seed, step, index) for index in image_index.tolist()]
    request = make_request(args, model, prompts.prompts, prompt_index, seeds, sde_steps=trained_steps(args, step))
    return request, prompts.select(prompt_index), image_index


def trained_steps(args, step):
    """The SDE steps of this rollout, which are the ones trained: a random window, or all but the last step.

    The window is drawn once a rollout, the same for every image and rank.
    """
    if args.sde_window_size == 0:
        return tuple(range(args.num_inference_steps - 1))
    start = random_window_start(args.seed, step, args.sde_window_size, args.sde_window_range)
    return tuple(range(start, start + args.sde_window_size))


# ==== 4 MODEL =========================================================================================================
def load_policy(args, inputs, device):
    """The pipeline and its policies (common/policy.py), sharded; and the parameters that are trained."""
    model = load_model(inputs.family, args.model, getattr(torch, args.dtype), device)
    prompts = inputs.train_set.prompts + inputs.eval_set.prompts
    cache_prompts(model, prompts, args.max_sequence_length, args.prompt_cache)
    set_seed(args.seed)  # the same initial LoRA on every rank
    policies = ["default"]
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
    """Sample the request's B images with the training transformer, each step SDE or ODE as the request says."""
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    first_latents = request.first_latents(generators, model.device)  # (B, C, h, w)
    outputs = []
    x = first_latents
    for i in range(len(request.timesteps)):
        outputs.append(policy_step(model, request, x, i, generator=generators))
        x = outputs[-1].prev_sample
    return Trajectories.from_steps(first_latents, outputs, model.decode(x))


def rollout(args, model, engine, request, finished=None):
    """Trajectories of the request's images, on the training device; finished(rows, images) is told of every batch."""
    if engine:
        # of the engine's means, as large as its latents, the check of its drift takes a micro-batch
        reads_all = args.rollout_correction != "none" or args.old_log_prob == "rollout"
        num_means = len(request.seeds) if reads_all else args.micro_batch_size
        return engine.generate(request, num_means=num_means, finished=finished).to(model.device)
    # the update's own batches: its first log-probs are these to the bit, and the ratio exactly 1
    parts = []
    with gathered(model, args.gather_for_sampling and "cpu_offload" not in args.train_with):
        for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size):
            parts.append(sample_locally(model, request.select(rows)))
            if finished:
                finished(rows.tolist(), parts[-1].images)
    return Trajectories.cat(parts)


class Batch(NamedTuple):
    """A rollout as the update takes it: B images of this rank, W trained steps."""

    request: RolloutRequest
    trajectories: Trajectories  # latents (B, T + 1, ...), log_probs (B, W) of the policy that sampled
    old_policy: Trajectories  # the same latents, with the log_probs (B, W) and means that the ratio starts from
    correction_weights: torch.Tensor  # (B, W), 1 without a rollout correction
    advantages: torch.Tensor  # (B,)
    weights: torch.Tensor  # (B,), 0 of images left out, 1 where none is


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
def policy_step(model, request, x, i, **draw_or_score):
    """Sampling step i of the policy from x (B, ...): where it goes, with the density of going there (Flow-GRPO, eq. 9).

    An SDE step (kind `sde`), with q = noise_level sqrt(s / (1 - s)), 1 - s at least 1 - sigmas[1], eps ~ N(0, 1):
        x' = x + [v + q^2 / (2 s) (x + (1 - s) v)] dt + q sqrt(-dt) eps,    dt = sigma_next - sigma < 0.
    It is a Gaussian policy: log_prob (B,) is the *mean* over elements of log N(x'; mean, std). Other steps are the
    ODE's Euler step x + v dt. Returns SDEStepOutput, in which x' is `prev_sample`, diffusers' name; generator=... draws
    it, prev_sample=... gives it. request: of the same B images (`request.select`).
    """
    v = model.predict_velocity(
        x, request.timesteps[i], request.conditioning, request.negative_conditioning, request.guidance_scale
    )
    sigma, sigma_next = request.sigmas[i : i + 2].tolist()
    noise_level = request.noise_level if i in request.sde_steps else 0.0
    return sde_step(
        x, v, sigma, sigma_next, noise_level, sde_type=request.sde_type, sigma_max=request.sigma_max, **draw_or_score
    )


@torch.no_grad()
def recompute_log_probs(args, model, request, trajectories, images):
    """The trajectories of `images` (N,) with the acting policy's log_probs and means, in the update's micro-batches."""
    log_probs = []
    means = []
    for rows in images.split(args.micro_batch_size):
        sub_request = request.select(rows)
        x = trajectories.latents[rows]  # (b, T + 1, ...)
        outs = [policy_step(model, sub_request, x[:, i], i, prev_sample=x[:, i + 1]) for i in request.sde_steps]
        log_probs.append(torch.stack([out.log_prob for out in outs], 1))
        means.append(torch.stack([out.prev_sample_mean for out in outs], 1))
    scored = trajectories.select(images)
    return replace(scored, log_probs=torch.cat(log_probs), prev_sample_means=torch.cat(means))


def old_policy_terms(args, model, engine, request, trajectories):
    """What the ratio starts from: the rollout as sampled or, where an engine made it, as the trainer scores it.

    Returns it with the rollout correction's weights (B, W), 1 without one, and metrics of how far the two are apart,
    which is a RunError where it is more than round-off.
    """
    no_weights = torch.ones_like(trajectories.log_probs)
    if engine is None:
        return trajectories, no_weights, {}
    keeps_engines = args.old_log_prob == "rollout"  # a micro-batch is enough to see whether they are one policy
    images = torch.arange(args.micro_batch_size if keeps_engines else len(request.seeds))
    scored = recompute_log_probs(args, model, request, trajectories, images)
    log_prob_limit = args.clip_range / 2 if keeps_engines else math.inf
    metrics = correction.check_engine_drift(request, trajectories, scored, args.max_velocity_drift, log_prob_limit)
    if keeps_engines:
        return trajectories, no_weights, metrics
    correction_weights, weight_metrics = correction.rollout_weights(
        args.rollout_correction, request, trajectories, scored, args.clip_range
    )
    return scored, correction_weights, metrics | weight_metrics


def reference_means(args, model, batch):
    """The reference's means (B, W, ...) of the trained steps, for the KL; once a rollout, as it does not change."""
    images = torch.arange(len(batch.advantages))
    with acting(model, "reference"):
        return recompute_log_probs(args, model, batch.request, batch.trajectories, images).prev_sample_means


# ==== 9 LOSS ==========================================================================================================
def policy_loss(log_prob, old_log_prob, advantages, clip_range, weights=1.0):
    """Mean over samples of max(-A ratio, -A clip(ratio, 1 +- clip_range)): minus eq. 5 of Flow-GRPO at one step, no KL.

    ratio = exp(log_prob - old_log_prob). All (B,); a sample's loss is multiplied by its weight.
    Returns the loss, to be minimised, and its metrics, scalars without gradient.
    """
    log_ratio = log_prob - old_log_prob  # (B,)
    ratio = log_ratio.exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    # the maximum is the pessimistic one: the clip takes away what would be gained beyond it, and nothing else
    loss = (weights * torch.maximum(unclipped_loss, clipped_loss)).mean()

    higher = ((ratio > 1 + clip_range) & (advantages > 0)).double().mean()
    lower = ((ratio < 1 - clip_range) & (advantages < 0)).double().mean()
    metrics = {"loss": loss, "ratio_mean": ratio.mean(), "ratio_std": ratio.std(correction=0)}
    metrics |= {"pg_clipfrac": higher + lower, "pg_clipfrac_higher": higher, "pg_clipfrac_lower": lower}
    metrics["ppo_kl"] = -log_ratio.mean()
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def accumulate_gradients(args, model, batch, mini_batch, ref_means):
    """Add up the gradient of a mini-batch's loss: the mean over its images and the W trained steps (Flow-GRPO, eq. 5).

    mini_batch: rows of the batch. A pass, forward and backward, is one sampling step of one micro-batch. Micro-batches
    are of one size, and FSDP averages over ranks. ref_means: reference_means', for the KL. Returns each pass's metrics.
    """
    latents = batch.trajectories.latents  # (B, T + 1, ...)
    dts = batch.request.sigmas.diff().tolist()  # T, negative
    sde_steps = batch.request.sde_steps
    micro_batches = mini_batch.split(args.micro_batch_size)
    num_passes = len(micro_batches) * len(sde_steps)
    # ranks exchange gradients once per optimizer step, in its last pass; of full weights, whose gradients before the
    # exchange are as large as the whole model in fp32, in every pass
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes = []
    for rows in micro_batches:
        sub_request = batch.request.select(rows)
        for w, i in enumerate(sde_steps):  # w: column of log_probs; i: sampling step
            x = latents[rows, i]
            x_next = latents[rows, i + 1]
            if rows is micro_batches[-1] and i == sde_steps[-1]:
                model.transformer.set_requires_gradient_sync(True)
            out = policy_step(model, sub_request, x, i, prev_sample=x_next)
            old_log_prob = batch.old_policy.log_probs[rows, w]
            weights = batch.weights[rows] * batch.correction_weights[rows, w]
            loss, metrics = policy_loss(out.log_prob, old_log_prob, batch.advantages[rows], args.clip_range, weights)
            if args.kl_coef:
                kl = batch.weights[rows] * kl_divergence(out, ref_means[rows, w], dts[i], args.sde_type, args.kl_type)
                loss = loss + args.kl_coef * kl.mean()  # eq. 3 subtracts it from what is maximised
                metrics["actor/kl_loss"] = kl.mean().detach().double()
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


def update(args, model, optimizer, batch):
    """epochs_per_rollout x updates_per_rollout optimizer steps on a rank's B images. Returns metrics over all ranks."""
    ref_means = reference_means(args, model, batch) if args.kl_coef else None
    # consecutive, not shuffled: GroupSampler has dealt them so that any number of ranks updates on the same images
    mini_batches = torch.arange(len(batch.advantages)).chunk(args.updates_per_rollout)
    grad_norms = []
    finite_passes = []  # of the updates whose gradient is finite
    metrics = {}
    for epoch in range(args.epochs_per_rollout):
        for mini_batch in mini_batches:
            passes = accumulate_gradients(args, model, batch, mini_batch, ref_means)
            if epoch == 0 and mini_batch is mini_batches[0]:
                metrics |= correction.on_policy_metrics(passes)  # nothing has changed since the rollout
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
    with acting(model, model.evaluated_policy, engine):
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
            engine.push(*policy_tensors(model))
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
        # sample G images for each prompt with the current policy (Flow-GRPO, eq. 9)
        with log.timed("gen"):
            request, prompts, image_index = draw_request(args, model, sampler, inputs.train_set, step)
            scorer = Scorer(inputs.rewards, prompts, args.reward_failure)
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
            metrics |= reward_metrics(scores, totals, advantages, inputs.rewards, args.group_size)
            metrics["critic/diversity"] = rollout_diversity(trajectories.images, image_index, args.group_size)

        # the density of what was sampled, under the policy that sampled it
        with log.timed("old_log_prob"):
            old_policy, correction_weights, drift_metrics = old_policy_terms(args, model, engine, request, trajectories)

        # make the steps that led to better images more likely (Flow-GRPO, eq. 5)
        with log.timed("update_actor"):
            local_advantages = advantages[image_index].to(device, torch.float32)  # (B,)
            weights = loss_weights(scores, args.updates_per_rollout)[image_index].to(device)  # (B,)
            batch = Batch(request, trajectories, old_policy, correction_weights, local_advantages, weights=weights)
            metrics |= drift_metrics | update(args, model, optimizer, batch)
        skipped_in_a_row = 0 if "actor/grad_norm" in metrics else skipped_in_a_row + 1
        if skipped_in_a_row == MAX_SKIPPED:
            raise RunError(f"step {step}: no finite gradient in {MAX_SKIPPED} rollouts: lower --learning_rate")

        # the next rollout samples with the new weights
        with log.timed("update_weights"):
            if engine:
                engine.push(*policy_tensors(model))
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
            raise SystemExit(show_plan(asdict(args), inputs, trained_steps=len(trained_steps(args, 1))))
    with one_line(RunError, Path("runs") / args.name):
        main(args, inputs)
    end_distributed()
