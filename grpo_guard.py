"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a ratio that stays centred on 1, the whole algorithm in one file.

    torchrun --standalone grpo_guard.py                          # the embedded model on a CPU, vLLM-Omni rollouts
    torchrun --standalone grpo_guard.py --rollout local          # the training transformer samples: no vLLM needed
    torchrun --standalone grpo_guard.py --trust_region dppo      # Flow-DPPO's mask in place of the clip

What it does otherwise than flow_grpo.py, the paper and its code:
1. The log-ratio is regulated, mean(eps * d), with d = mean - old mean: no bias, and the same scale at every step.
2. It is reduced per sample (the paper's code averages the bias over the batch) and its bias keeps its gradient.
3. The loss of a step is divided by its |dt|, so that every step pulls alike.
"""
# ==== 1 ARGS ==========================================================================================================
import gc
import itertools
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from common.data import GroupSampler, check_at_least, read_prompts
from common.distributed import gather, gather_objects, launched_world_size, setup_distributed, timed
from common.models import find_family, load_model
from common.rewards import load_rewards, reward_metrics, score_images
from common.rollout import RolloutRequest, Trajectories, VLLMEngine, check_engine
from common.run import MetricLog, check_run_folder, create_run_folder, save_adapter, save_checkpoint, speed_metrics
from common.sde import SDEType, draw_noise, image_seed, random_window_start, sde_step

import torch
import torch.distributed as dist
import tyro
from peft import LoraConfig, get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm

ASSETS = Path(__file__).parent / "assets"
MAX_SKIPPED = 3  # rollouts in a row without one finite gradient before the run stops


@dataclass
class Args:
    name: str = "grpo_guard"
    """everything is written to runs/<name>, which must not hold a run yet"""
    seed: int = 1
    """seed of the data order, the noise and the LoRA's initial weights"""
    track: bool = False
    """log to wandb too, with the validation images"""
    model: str = str(ASSETS / "embedded")
    """diffusers pipeline: a folder or a hub id"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the frozen weights and the forward passes; LoRA, Adam, sampling arithmetic and the VAE are fp32 always"""
    lora_rank: int = 16
    """rank of the LoRA on the attention projections"""
    lora_alpha: int = 32
    """the LoRA acts with weight lora_alpha / lora_rank"""
    height: int = 32
    """image height in pixels"""
    width: int = 96
    """image width in pixels"""
    max_sequence_length: int = 16
    """T5 tokens per prompt, longer ones are cut (SD3.5: 256)"""
    train_prompts: str = str(ASSETS / "train_prompts.txt")
    """.txt, one prompt a line, or .jsonl, {"prompt": ...} with any metadata for the rewards"""
    eval_prompts: str = str(ASSETS / "eval_prompts.txt")
    """held-out prompts, one image each at every evaluation"""
    reward: tuple[str, ...] = ("ocr",)
    """ocr, ocr_contains, jpeg_compressibility, jpeg_incompressibility, path/to/file.py:function; several are added"""
    reward_weights: tuple[float, ...] = (1.0,)
    """weight of each reward in the sum"""
    rollout: Literal["vllm", "local"] = "vllm"
    """vllm: a vLLM-Omni engine per rank in a process of its own; local: the training transformer samples"""
    rollout_batch_size: int = 32
    """images the vLLM-Omni engine samples at once, at most"""
    engine_timeout_s: float = 600
    """seconds to wait for an answer of the engine before the run stops with an error"""
    num_prompts: int = 32
    """prompts per rollout, over all ranks"""
    group_size: int = 8
    """images per prompt, which the advantage compares; at least 2"""
    num_inference_steps: int = 3
    """sampling steps of a rollout (the paper: 10, and 40 in evaluation)"""
    guidance_scale: float = 1.0
    """classifier-free guidance in rollout, training and evaluation alike; 1 is none"""
    sde_type: SDEType = "sde"
    """stochastic step: sde (Flow-GRPO), dance, cps (unscaled log-prob), cps_gauss; clip ranges differ between them"""
    noise_level: float = 0.7
    """scale of the noise injected at SDE steps (paper: 0.7), above 0"""
    sde_window_size: int = 1
    """consecutive SDE steps per rollout, the others being ODE steps and not trained; 0: all but the last"""
    sde_window_range: tuple[int, int] = (0, 1)
    """with a window: [lo, hi) of steps it is drawn from, once per rollout; hi is at most num_inference_steps - 1"""
    num_steps: int = 30
    """rollouts of the run"""
    updates_per_rollout: int = 4
    """optimizer steps per rollout; only the first is on-policy"""
    micro_batch_size: int = 64
    """images per forward and backward pass on a rank, and per local sampling batch; lowered to what a rank has"""
    learning_rate: float = 1e-3
    """AdamW's, constant (Flow-GRPO's paper: 3e-4)"""
    weight_decay: float = 1e-4
    """AdamW's"""
    adam_eps: float = 1e-15
    """AdamW's; small, because gradients of a mean over all latent elements are (5e-9 RMS has been seen)"""
    max_grad_norm: float = 1.0
    """gradient norm above which it is scaled down"""
    trust_region: Literal["clip", "dppo"] = "clip"
    """clip: PPO's, on the regulated ratio; dppo: Flow-DPPO's mask (arXiv 2606.11025), which ignores adv_clip_max"""
    dppo_delta: float = 1e-5
    """divergence mean(d^2) / (2 std^2) from which dppo drops a sample that moves further away"""
    clip_range: float = 5e-4
    """the regulated ratio is clipped to 1 +- this (paper: 2e-6 for OCR at 512x512, 4e-6 for PickScore)"""
    adv_clip_max: float = 5.0
    """advantages are clamped to +- this"""
    norm_adv_by_std: bool = True
    """divide advantages by the rewards' standard deviation; False is Dr.GRPO"""
    global_std: bool = True
    """take that deviation over the whole rollout; False: over each prompt's group"""
    eval_every: int = 5
    """steps between evaluations and checkpoints; there is one of each at the end, and an evaluation at step 0"""
    eval_num_inference_steps: int = 3
    """ODE steps per evaluation image (the paper: 40)"""


# ==== 2 SETUP =========================================================================================================
def check_args(args):
    """Refuse what cannot work before any model loads. Returns the model family, the rewards and the two prompt sets."""
    family, rewards = find_family(args.model), load_rewards(args.reward)
    check_engine(args.rollout)
    check_run_folder(Path("runs") / args.name)
    if len(args.reward_weights) != len(args.reward):
        raise ValueError(f"--reward_weights: {len(args.reward_weights)} weights for {len(args.reward)} rewards")
    check_at_least(vars(args), num_prompts=1, group_size=2, num_inference_steps=2, eval_num_inference_steps=1,
                   eval_every=1, updates_per_rollout=1, micro_batch_size=1, rollout_batch_size=1, sde_window_size=0)
    num_images, shards = args.num_prompts * args.group_size, args.updates_per_rollout * launched_world_size()
    args.micro_batch_size = min(args.micro_batch_size, num_images // shards or 1)
    if num_images % (shards * args.micro_batch_size):
        raise ValueError(f"--num_prompts x --group_size = {num_images} images do not divide into --updates_per_rollout "
                         f"x ranks x --micro_batch_size = {shards * args.micro_batch_size}")
    (low, high), size, last = args.sde_window_range, args.sde_window_size, args.num_inference_steps - 1
    if size and not 0 <= low <= high - size <= last - size:
        raise ValueError(f"--sde_window_range {low} {high}: no window of {size} fits in it and in 0 to {last - 1}")
    if args.noise_level <= 0:
        raise ValueError(f"--noise_level {args.noise_level}: without noise there is no log-prob to train")
    if args.clip_range <= 0 or args.dppo_delta <= 0:
        raise ValueError(f"--clip_range {args.clip_range} and --dppo_delta {args.dppo_delta} must be above 0")
    return family, rewards, read_prompts(args.train_prompts, rewards), read_prompts(args.eval_prompts, rewards)


# ==== 3 DATA ==========================================================================================================
def make_request(args, model, prompts, prompt_index, seeds, num_inference_steps, sde_steps):
    """Ask for B images of `prompts`, each encoded once: prompt_index (B,) says which one, seeds (B) its noise."""
    timesteps, sigmas, latent_shape = model.schedule(num_inference_steps, args.height, args.width)  # (T,), (T + 1,)
    conditioning = model.encode_prompts(prompts, args.max_sequence_length)
    negative = model.encode_prompts([""], args.max_sequence_length) if args.guidance_scale > 1 else None
    return RolloutRequest(conditioning, negative, prompt_index, seeds, timesteps, sigmas, latent_shape, sde_steps,
                          args.sde_type, args.noise_level, args.guidance_scale, args.height, args.width)


def trained_steps(args, step):
    """The SDE steps of this rollout, which are the ones trained: a random window, or all but the last step."""
    if not args.sde_window_size:
        return tuple(range(args.num_inference_steps - 1))
    start = random_window_start(args.seed, step, args.sde_window_size, args.sde_window_range)
    return tuple(range(start, start + args.sde_window_size))


# ==== 4 MODEL =========================================================================================================
def load_policy(args, family, device):
    """The frozen pipeline, with a trainable LoRA on its transformer, which is sharded block by block (FSDP2)."""
    dtype = getattr(torch, args.dtype)
    model = load_model(family, args.model, dtype, device)
    torch.manual_seed(args.seed)  # the same initial LoRA on every rank
    model.transformer.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, init_lora_weights="gaussian",
                                             target_modules=list(family.lora_target_modules)))
    for p in model.transformer.parameters():
        p.data = p.data.float() if p.requires_grad else p.data
    # FSDP must not cast the inputs: it would round the timesteps to bf16. predict_velocity casts what is to be cast
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = [m for m in model.transformer.modules() if type(m).__name__ in model.transformer._no_split_modules]
    for module in (*blocks, model.transformer):
        fully_shard(module, mp_policy=policy)
    return model, [p for p in model.transformer.parameters() if p.requires_grad]


def full_adapter(transformer):
    """The LoRA on the CPU, whole: {"module.lora_A.weight": tensor}, and its LoraConfig. A collective."""
    tensors = {name: p.full_tensor().detach().cpu() for name, p in get_peft_model_state_dict(transformer).items()}
    return tensors, transformer.peft_config["default"]


# ==== 5 ENGINE ========================================================================================================
def start_engine(args, folder, rank, device):
    """This rank's vLLM-Omni engine, loading in the background while the trainer loads; None with --rollout local."""
    if args.rollout == "local":
        return None
    return VLLMEngine(args.model, args.dtype, args.rollout_batch_size, folder / f"engine_rank{rank}.log",
                      args.engine_timeout_s, visible_device=device.index, num_threads=torch.get_num_threads())


# ==== 6 ROLLOUT =======================================================================================================
@torch.no_grad()
def sample_locally(model, request):
    """Sample the request's B images with the training transformer, each step SDE or ODE as the request says."""
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    x, outputs = request.initial_latents, []  # (B, C, h, w)
    if x is None:
        x = draw_noise((len(generators), *request.latent_shape), generators, model.transformer.device)
    for i in range(len(request.timesteps)):
        outputs.append(policy_step(model, request, outputs[-1].prev_sample if i else x, i, generator=generators))
    return Trajectories.from_steps(x, outputs, model.decode(outputs[-1].prev_sample))


def rollout(args, model, engine, request):
    """Trajectories on the training device; local ones in the update's micro-batches, for log-probs equal to the bit."""
    if engine:
        return engine.generate(request).to(model.transformer.device)
    return Trajectories.cat([sample_locally(model, request.select(rows))
                             for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size)])


# ==== 7 ADVANTAGE =====================================================================================================
def compute_advantages(rewards, group_size, adv_clip_max=5.0, norm_adv_by_std=True, global_std=True):
    """A = (r - mean of the group) / (S + 1e-4), clamped to +- adv_clip_max (arXiv 2505.05470, eq. 4), in fp64.

    rewards: (P * group_size,) of the whole rollout, group by group. S is the population standard deviation of all of
    them (global_std) or of each group. A group of equal rewards gets exactly 0. Returns (P * group_size,).
    """
    groups = rewards.double().view(-1, group_size)
    centred = groups - groups[:, :1]  # first, so that equal rewards are exact zeros
    centred = centred - centred.mean(1, keepdim=True)
    if norm_adv_by_std:
        std = groups.std(correction=0) if global_std else groups.std(1, keepdim=True, correction=0)
        centred = centred / (std + 1e-4)
    return centred.clamp(-adv_clip_max, adv_clip_max).flatten()


# ==== 8 LOG PROB ======================================================================================================
def policy_step(model, request, x, i, **kwargs):
    """SDEStepOutput of the policy at step i from x (B, ...): drawn with a generator, or scored with a prev_sample."""
    v = model.predict_velocity(x, request.timesteps[i], request.conditioning, request.negative_conditioning,
                               request.guidance_scale)
    sigmas, noise_level = request.sigmas.tolist(), request.noise_level if i in request.sde_steps else 0.0
    return sde_step(x, v, sigmas[i], sigmas[i + 1], noise_level, sde_type=request.sde_type,
                    sigma_max=request.sigma_max, **kwargs)


@torch.no_grad()
def recompute_steps(args, model, request, latents):
    """log_probs (B, W) and means (B, W, ...) of the W trained steps of latents (B, T + 1, ...), in micro-batches."""
    parts = []
    for rows in torch.arange(len(latents)).split(args.micro_batch_size):
        part, x = request.select(rows), latents[rows]
        steps = [policy_step(model, part, x[:, i], i, prev_sample=x[:, i + 1]) for i in request.sde_steps]
        parts.append((torch.stack([s.log_prob for s in steps], 1), torch.stack([s.prev_sample_mean for s in steps], 1)))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


# ==== 9 LOSS ==========================================================================================================
def regulated_log_ratio(prev_sample, mean, old_mean, std):
    """mean(eps * d) per sample, d = mean - old_mean, eps = (prev_sample - old_mean) / std (arXiv 2510.22319).

    Equal to (log_prob - old_log_prob + mean(d^2) / (2 std^2)) * std of Gaussian log-probs, without their cancellation.
    All (B, ...), std (B,). Returns (B,).
    """
    eps = (prev_sample - old_mean) / std.view(-1, *[1] * (mean.dim() - 1))
    return (eps * (mean - old_mean)).flatten(1).mean(1)


def policy_loss(prev_sample, mean, old_mean, std, dt, advantages, args):
    """Mean over samples of max(-A ratio, -A clip(ratio)) / |dt|, with the regulated ratio (arXiv 2510.22319).

    With dppo in place of the clip: -A ratio, dropped where the divergence has reached dppo_delta and would grow.
    prev_sample, mean, old_mean (B, ...); std, advantages (B,). Returns the loss and its metrics, without gradient.
    """
    log_ratio = regulated_log_ratio(prev_sample, mean, old_mean, std).double()  # the clip may be as fine as fp32's ulp
    ratio, clip_range = log_ratio.exp(), args.clip_range  # (B,)
    divergence = ((mean - old_mean) ** 2).flatten(1).mean(1) / (2 * std**2)  # (B,), KL to the old step, per element
    if args.trust_region == "clip":
        per_sample = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))
        outside = (ratio - 1).abs() > clip_range
    else:  # a dropped sample still counts in the mean
        outside = divergence.detach() >= args.dppo_delta
        per_sample = torch.where(outside & (advantages * (ratio.detach() - 1) > 0), 0.0, -advantages * ratio)
    loss = per_sample.mean() / abs(dt)
    higher = (outside & (ratio > 1) & (advantages > 0)).double().mean()
    lower = (outside & (ratio < 1) & (advantages < 0)).double().mean()
    metrics = {"loss": loss, "pg_clipfrac": higher + lower, "pg_clipfrac_higher": higher, "pg_clipfrac_lower": lower,
               "ratio_mean": ratio.mean(), "ratio_std": ratio.std(correction=0), "ppo_kl": divergence.mean()}
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def update(args, model, params, optimizer, request, latents, old_means, advantages):
    """updates_per_rollout optimizer steps on this rank's B images. Returns metrics, means over passes and ranks.

    A pass is one trained step of one micro-batch; the passes of a mini-batch add up to its mean gradient.
    """
    kept, grad_norms, dts = [], [], request.sigmas.diff().tolist()
    for number, mini_batch in enumerate(torch.arange(len(advantages)).chunk(args.updates_per_rollout)):
        micro_batches = mini_batch.split(args.micro_batch_size)
        num_passes, passes = len(micro_batches) * len(request.sde_steps), []
        for rows, (w, i) in itertools.product(micro_batches, enumerate(request.sde_steps)):
            last = rows is micro_batches[-1] and i == request.sde_steps[-1]
            model.transformer.set_requires_gradient_sync(last)  # between ranks, once per optimizer step
            x, next_x = latents[rows, i], latents[rows, i + 1]
            out, dt = policy_step(model, request.select(rows), x, i, prev_sample=next_x), dts[i]
            loss, metrics = policy_loss(next_x, out.prev_sample_mean, old_means[rows, w], out.transition_std, dt,
                                        advantages[rows], args)
            (loss / num_passes).backward()
            passes.append(metrics)
            off = abs(metrics["actor/ratio_mean"].item() - 1) + metrics["actor/ratio_std"].item()
            if number == 0 and off > (1e-6 if args.dtype == "float32" else 1e-4):
                raise RuntimeError(f"step {i}: the first update's log-ratio is {off:.1e}, not 0 to round-off: the old "
                                   "means do not come from the same arithmetic as the update's")
        grad_norm = torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm).full_tensor().item()
        if math.isfinite(grad_norm):  # it is over all ranks: they skip together
            grad_norms.append(grad_norm)
            kept += passes
            if grad_norm > 0:  # where all rewards are equal there is nothing to learn, and no weight to decay
                optimizer.step()
        optimizer.zero_grad()
    counts = {"actor/skipped_steps": args.updates_per_rollout - len(grad_norms), "actor/lr": args.learning_rate}
    if not kept:
        return counts
    means = gather(torch.stack([torch.stack([m[name] for m in kept]).mean() for name in kept[0]])).mean(0).tolist()
    return {**counts, "actor/grad_norm": sum(grad_norms) / len(grad_norms), **dict(zip(kept[0], means, strict=True))}


# ==== 10 EVAL =========================================================================================================
def evaluate(args, model, engine, rewards, prompts, metadata):
    """One ODE image of every held-out prompt, from the same seeds every time, shared by the ranks.

    Returns each reward's mean and standard error, and the first 32 images as (PIL image, caption).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = torch.arange(math.ceil(len(prompts) / world_size)) * world_size + rank
    rows = (places % len(prompts)).tolist()  # as many on every rank: a surplus wraps, and is dropped below
    mine, seeds = [prompts[row] for row in rows], [image_seed("eval", 0, row) for row in rows]
    request = make_request(args, model, mine, torch.arange(len(rows)), seeds, args.eval_num_inference_steps, ())
    images = rollout(args, model, engine, request).images
    scores = score_images(rewards, images, mine, [metadata[row] for row in rows])  # (B, R)
    scores = gather(scores).transpose(0, 1).flatten(0, 1)[: len(prompts)]  # (prompts, R), in the prompts' order
    kinds = {"mean": scores.mean(0), "stderr": scores.std(0, correction=0) / len(prompts) ** 0.5}  # (R,) each
    metrics = {f"val/{name}/{kind}": values[r] for r, name in enumerate(rewards) for kind, values in kinds.items()}
    shown = dict(sum(gather_objects(list(zip(places.tolist(), images, strict=True))[:32]), []))
    return metrics, [(shown[i], f"{prompts[i]}  {scores[i, 0]:.2f}") for i in range(min(32, len(prompts)))]


# ==== 11 CHECKPOINT ===================================================================================================
def save(args, folder, model, optimizer, sampler, step):
    """Write the adapter as diffusers does, and a checkpoint of all that changes. A collective; rank 0 writes."""
    whole, (adapter, config) = StateDictOptions(full_state_dict=True, cpu_offload=True), full_adapter(model.transformer)
    state = {"step": step, "args": asdict(args), "adapter": adapter, "sampler": sampler.state_dict(),
             "optimizer": get_optimizer_state_dict(model.transformer, optimizer, options=whole)}
    if dist.get_rank() == 0:
        save_adapter(folder / "adapter", type(model.pipe), adapter, config)
        save_checkpoint(folder / "checkpoint", state)


# ==== 12 MAIN =========================================================================================================
def rollout_metrics(advantages, difference, sde_steps):
    """Of the advantages (N,) and of the log-prob difference |trainer - engine| (ranks, B, W)."""
    return {"critic/advantages/mean": advantages.mean(), "critic/advantages/max": advantages.max(),
            "critic/advantages/min": advantages.min(), "rollout_corr/logprob_abs_diff_mean": difference.mean(),
            "rollout_corr/logprob_abs_diff_max": difference.max(),
            **{f"rollout_corr/logprob_abs_diff_max/{i}": difference[..., w].max() for w, i in enumerate(sde_steps)}}


def main(args, family, rewards, train_set, eval_set):
    rank, world_size, device, began = *setup_distributed(), time.perf_counter()
    folder, num_images = Path("runs") / args.name, args.num_prompts * args.group_size
    if rank == 0:
        create_run_folder(folder, args, __file__)
        print(f"{args.num_prompts} prompts x {args.group_size} images = {num_images} images a rollout, for "
              f"{args.updates_per_rollout} optimizer steps of {num_images // args.updates_per_rollout} images each")
    log = MetricLog(folder, args, args.track) if rank == 0 else None
    engine = start_engine(args, folder, rank, device)
    model, params = load_policy(args, family, device)
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate, weight_decay=args.weight_decay, eps=args.adam_eps)
    sampler = GroupSampler(len(train_set[0]), args.num_prompts, args.group_size, args.seed, args.updates_per_rollout,
                           rank, world_size)
    if engine:
        probe = make_request(args, model, eval_set[0][:1], torch.tensor([0]), [0], args.num_inference_steps, ())
        engine.verify_push(*full_adapter(model.transformer), probe)
    timing, skipped_in_a_row = {"startup": time.perf_counter() - began}, 0
    for step in (bar := tqdm(range(args.num_steps + 1), disable=rank > 0)):
        metrics, grid, start = {}, None, time.perf_counter()
        if step:  # step 0 only evaluates
            with timed(timing, "gen"):
                prompt_rows, prompt_index, image_index = sampler.draw()  # (P,), (B,), (B,): our B of N images
                prompts, metadata = ([column[row] for row in prompt_rows] for column in train_set)
                seeds = [image_seed(args.seed, step, index) for index in image_index.tolist()]
                sde_steps = trained_steps(args, step)
                request = make_request(args, model, prompts, prompt_index, seeds, args.num_inference_steps, sde_steps)
                trajectories = rollout(args, model, engine, request)

            with timed(timing, "reward"):
                mine = [prompts[i] for i in prompt_index], [metadata[i] for i in prompt_index]
                local_scores = score_images(rewards, trajectories.images, *mine)  # (B, R)

            with timed(timing, "adv"):
                scores = torch.empty(num_images, len(rewards), dtype=torch.float64)
                scores[gather(image_index).flatten()] = gather(local_scores).flatten(0, 1)  # (N, R), on every rank
                totals = scores @ torch.tensor(args.reward_weights, dtype=torch.float64)  # (N,)
                adv_clip_max = args.adv_clip_max if args.trust_region == "clip" else math.inf
                advantages = compute_advantages(totals, args.group_size, adv_clip_max, args.norm_adv_by_std,
                                                args.global_std)  # (N,)

            with timed(timing, "old_log_prob"):
                old_log_probs, old_means = trajectories.log_probs, trajectories.prev_sample_means  # (B, W), (B, W, ...)
                if engine:  # another implementation of the policy: its log-probs are compared, not trained on
                    old_log_probs, old_means = recompute_steps(args, model, request, trajectories.latents)
                difference = gather((old_log_probs - trajectories.log_probs).abs())
                metrics |= reward_metrics(scores, totals, rewards, args.group_size)
                metrics |= rollout_metrics(advantages, difference, sde_steps)

            with timed(timing, "update_actor"):
                metrics |= update(args, model, params, optimizer, request, trajectories.latents, old_means,
                                  advantages[image_index].to(device, torch.float32))
            skipped_in_a_row = (skipped_in_a_row + 1) * (metrics["actor/skipped_steps"] == args.updates_per_rollout)
            if skipped_in_a_row == MAX_SKIPPED:
                raise RuntimeError(f"step {step}: no finite gradient in {MAX_SKIPPED} rollouts: lower --learning_rate")

            with timed(timing, "update_weights"):
                if engine:
                    engine.push_lora(*full_adapter(model.transformer))

            timing["step"] = time.perf_counter() - start
            metrics["training/epoch"] = sampler.position / len(train_set[0])
            bar.set_postfix(reward=f"{totals.mean():.3f}")

        if step % args.eval_every == 0 or step == args.num_steps:
            with timed(timing, "testing"):
                val, grid = evaluate(args, model, engine, rewards, *eval_set)
                metrics |= val
            if step:
                with timed(timing, "save_checkpoint"):
                    save(args, folder, model, optimizer, sampler, step)
        if log:
            log.log(step, metrics | speed_metrics(timing, step, num_images, world_size), grid)
        timing = {}

    for opened in filter(None, (engine, log)):
        opened.close()
    del model, params, optimizer
    gc.collect()  # FSDP's threads end with their modules: without this about half of the CPU runs abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__, use_underscores=True, config=(tyro.conf.FlagConversionOff,))
    try:
        checked = check_args(args)
    except ValueError as error:
        raise SystemExit(f"{Path(__file__).name}: error: {error}") from None
    main(args, *checked)
