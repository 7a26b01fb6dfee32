"""MixGRPO (arXiv 2507.21802): Flow-GRPO with a sliding window of SDE steps, the whole algorithm in one file.

    torchrun --standalone mix_grpo.py                       # the embedded model on a CPU, vLLM-Omni rollouts
    torchrun --standalone mix_grpo.py --rollout local       # the training transformer samples: no vLLM needed
    torchrun --standalone mix_grpo.py --flash_ratio 0.5 --num_inference_steps 8    # half of the later steps, by 2M

What it does otherwise than flow_grpo.py, and where it departs from the paper's code:
1. Steps inside the window are stochastic and trained; the window moves on during training and never shrinks.
2. The images of a prompt start from the same noise, so the steps before the window are computed once per prompt.
3. Several rewards have advantages of their own, which are then added with their weights.
"""
# ==== 1 ARGS ==========================================================================================================
import gc
import itertools
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from common.data import GroupSampler, check_at_least, read_prompts
from common.distributed import gather, gather_objects, launched_world_size, setup_distributed, timed
from common.models import find_family, load_model
from common.rewards import load_rewards, reward_metrics, score_images
from common.rollout import RolloutRequest, Trajectories, VLLMEngine, check_engine
from common.run import MetricLog, check_run_folder, create_run_folder, save_adapter, save_checkpoint, speed_metrics
from common.sde import SDEType, draw_noise, image_seed, multistep_ode_step, random_window_start, sde_step

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
    name: str = "mix_grpo"
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
    """weight of each reward's own advantages in their sum"""
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
    """consecutive SDE steps per rollout, the others being ODE steps and not trained"""
    sde_window_range: tuple[int, int] = (0, 2)
    """[lo, hi) of steps the window lies in; hi is at most num_inference_steps - 1"""
    window_mode: Literal["progressive", "random", "decay", "exp_decay"] = "progressive"
    """progressive: moves every iters_per_group rollouts; decay, exp_decay: stays ever shorter; random: drawn anew"""
    window_stride: int = 1
    """steps by which the window moves on"""
    iters_per_group: int = 25
    """rollouts at one position of the window (paper: 25)"""
    roll_back: bool = True
    """past the end the window returns to lo; False: it stays there"""
    shared_initial_noise: bool = True
    """the images of a prompt start from the same noise, and share the steps before the window"""
    flash_ratio: float = 1.0
    """share of the steps after the window that is taken, by DPM-Solver++ 2M; 1: all of them, by Euler"""
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
    clip_range: float = 1e-3
    """the ratio is clipped to 1 +- this; useful values shrink as 1 / sqrt(latent elements): 1e-4 for SD3.5 at 512"""
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
                   eval_every=1, updates_per_rollout=1, micro_batch_size=1, rollout_batch_size=1, sde_window_size=1,
                   window_stride=1, iters_per_group=1)
    num_images, shards = args.num_prompts * args.group_size, args.updates_per_rollout * launched_world_size()
    args.micro_batch_size = min(args.micro_batch_size, num_images // shards or 1)
    if num_images % (shards * args.micro_batch_size):
        raise ValueError(f"--num_prompts x --group_size = {num_images} images do not divide into --updates_per_rollout "
                         f"x ranks x --micro_batch_size = {shards * args.micro_batch_size}")
    (low, high), size, last = args.sde_window_range, args.sde_window_size, args.num_inference_steps - 1
    if not 0 <= low <= high - size <= last - size:
        raise ValueError(f"--sde_window_range {low} {high}: no window of {size} fits in it and in 0 to {last - 1}")
    if not 0 < args.flash_ratio <= 1:
        raise ValueError(f"--flash_ratio {args.flash_ratio} is not in (0, 1]")
    if args.noise_level <= 0:
        raise ValueError(f"--noise_level {args.noise_level}: without noise there is no log-prob to train")
    return family, rewards, read_prompts(args.train_prompts, rewards), read_prompts(args.eval_prompts, rewards)


# ==== 3 DATA ==========================================================================================================
def make_request(args, model, prompts, prompt_index, seeds, num_inference_steps, sde_steps):
    """Ask for B images of `prompts`, each encoded once: prompt_index (B,) says which one, seeds (B) its noise."""
    timesteps, sigmas, latent_shape = model.schedule(num_inference_steps, args.height, args.width)  # (T,), (T + 1,)
    conditioning = model.encode_prompts(prompts, args.max_sequence_length)
    negative = model.encode_prompts([""], args.max_sequence_length) if args.guidance_scale > 1 else None
    return RolloutRequest(conditioning, negative, prompt_index, seeds, timesteps, sigmas, latent_shape, sde_steps,
                          args.sde_type, args.noise_level, args.guidance_scale, args.height, args.width)


def window_start(args, step):
    """First SDE step of rollout `step` (from 1), by the options alone: the same on any rank, with nothing to resume.

    Rollouts at position l, with p = (l - lo) / (hi - lo) and tau = iters_per_group: tau (progressive),
    int(tau (1 - p) + max(1, tau // 4) p) (decay), ceil(tau exp(-0.1 max(0, l - 13))) (exp_decay).
    """
    (low, high), size, tau = args.sde_window_range, args.sde_window_size, args.iters_per_group
    if args.window_mode == "random":
        return random_window_start(args.seed, step, size, args.sde_window_range)

    def stay(position):
        p = (position - low) / (high - low)
        return {"progressive": tau, "decay": max(1, int(tau * (1 - p) + max(1, tau // 4) * p)),
                "exp_decay": math.ceil(tau * math.exp(-0.1 * max(0, position - 13)))}[args.window_mode]

    start, left = low, stay(low)
    for _ in range(step - 1):
        left -= 1
        if left == 0:
            start += args.window_stride
            if start > high - size:
                start = low if args.roll_back else high - size
            left = stay(start)
    return start


def trained_steps(args, step):
    """The SDE steps of this rollout, which are the ones trained: the window."""
    start = window_start(args, step)
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
    previous, sigmas = None, request.sigmas.tolist()
    for i in range(len(request.timesteps)):
        x_i = outputs[-1].prev_sample if i else x
        if request.multistep_from is None or i < request.multistep_from:
            outputs.append(policy_step(model, request, x_i, i, generator=generators))
        else:  # Flash: no step after the window is trained
            v = model.predict_velocity(x_i, request.timesteps[i], request.conditioning, request.negative_conditioning,
                                       request.guidance_scale)
            out, previous = multistep_ode_step(x_i, v, sigmas[i], sigmas[i + 1], previous)
            outputs.append(out)
    return Trajectories.from_steps(x, outputs, model.decode(outputs[-1].prev_sample))


def thin_out(request, flash_ratio):
    """The request with the n steps after its window thinned out to ceil(flash_ratio n), for the 2M solver."""
    end, last = request.sde_steps[-1] + 1, len(request.timesteps)
    count = math.ceil(flash_ratio * (last - end))
    rows = [*range(end), *(end + j * (last - end) // count for j in range(count))]
    return replace(request, timesteps=request.timesteps[rows], sigmas=request.sigmas[[*rows, last]], multistep_from=end)


def share_prefix(args, model, engine, request, step):
    """Take the ODE steps before the window, once per prompt, and return the request for the rest of them.

    All images of a prompt start from its noise, seeded by (seed, step, prompt), and are one until the window begins.
    """
    start, (rows, place) = request.sde_steps[0], request.prompt_index.unique(return_inverse=True)
    rows = rows[torch.arange(gather(torch.tensor([len(rows)])).max().item()) % len(rows)]  # as many on every rank
    seeds = [image_seed(args.seed, f"{step} prompt", row) for row in rows.tolist()]
    if start:
        prefix = replace(request, prompt_index=rows, seeds=seeds, timesteps=request.timesteps[:start],
                         sigmas=request.sigmas[: start + 1], sde_steps=(), multistep_from=None)
        latents = rollout(args, model, engine, prefix).latents[:, -1]
    else:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        latents = draw_noise((len(seeds), *request.latent_shape), generators, model.transformer.device)
    later = None if request.multistep_from is None else request.multistep_from - start
    return replace(request, initial_latents=latents[place], timesteps=request.timesteps[start:], multistep_from=later,
                   sigmas=request.sigmas[start:], sde_steps=tuple(i - start for i in request.sde_steps))


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
def recompute_log_probs(args, model, request, latents):
    """log_probs (B, W) of the W trained steps of latents (B, T + 1, ...), now, in the update's micro-batches."""
    parts = []
    for rows in torch.arange(len(latents)).split(args.micro_batch_size):
        part, x = request.select(rows), latents[rows]
        parts.append(torch.stack([policy_step(model, part, x[:, i], i, prev_sample=x[:, i + 1]).log_prob
                                  for i in request.sde_steps], 1))
    return torch.cat(parts)


# ==== 9 LOSS ==========================================================================================================
def policy_loss(log_prob, old_log_prob, advantages, clip_range):
    """Mean over samples of max(-A ratio, -A clip(ratio, 1 - clip_range, 1 + clip_range)) (arXiv 2505.05470, eq. 5).

    All (B,). Returns the loss and its metrics, scalars without gradient.
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()  # (B,)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)).mean()
    higher = ((ratio > 1 + clip_range) & (advantages > 0)).double().mean()
    lower = ((ratio < 1 - clip_range) & (advantages < 0)).double().mean()
    metrics = {"loss": loss, "pg_clipfrac": higher + lower, "pg_clipfrac_higher": higher, "pg_clipfrac_lower": lower,
               "ratio_mean": ratio.mean(), "ratio_std": ratio.std(correction=0), "ppo_kl": -log_ratio.mean()}
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def update(args, model, params, optimizer, request, latents, old_log_probs, advantages):
    """updates_per_rollout optimizer steps on this rank's B images. Returns metrics, means over passes and ranks.

    A pass is one trained step of one micro-batch; the passes of a mini-batch add up to its mean gradient.
    """
    kept, grad_norms = [], []
    for number, mini_batch in enumerate(torch.arange(len(advantages)).chunk(args.updates_per_rollout)):
        micro_batches = mini_batch.split(args.micro_batch_size)
        num_passes, passes = len(micro_batches) * len(request.sde_steps), []
        for rows, (w, i) in itertools.product(micro_batches, enumerate(request.sde_steps)):
            last = rows is micro_batches[-1] and i == request.sde_steps[-1]
            model.transformer.set_requires_gradient_sync(last)  # between ranks, once per optimizer step
            x, next_x = latents[rows, i], latents[rows, i + 1]
            log_prob = policy_step(model, request.select(rows), x, i, prev_sample=next_x).log_prob  # (len(rows),)
            loss, metrics = policy_loss(log_prob, old_log_probs[rows, w], advantages[rows], args.clip_range)
            (loss / num_passes).backward()
            passes.append(metrics)
            off = (log_prob.detach() - old_log_probs[rows, w]).abs().max().item()
            if number == 0 and off > (1e-6 if args.dtype == "float32" else 1e-4):
                raise RuntimeError(f"step {i}: the first update's log-ratio is {off:.1e}, not 0 to round-off: the old "
                                   "log-probs do not come from the same arithmetic as the update's")
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
                if args.flash_ratio < 1:
                    request = thin_out(request, args.flash_ratio)
                if args.shared_initial_noise:
                    request = share_prefix(args, model, engine, request, step)
                trajectories = rollout(args, model, engine, request)

            with timed(timing, "reward"):
                mine = [prompts[i] for i in prompt_index], [metadata[i] for i in prompt_index]
                local_scores = score_images(rewards, trajectories.images, *mine)  # (B, R)

            with timed(timing, "adv"):
                scores = torch.empty(num_images, len(rewards), dtype=torch.float64)
                scores[gather(image_index).flatten()] = gather(local_scores).flatten(0, 1)  # (N, R), on every rank
                weights = torch.tensor(args.reward_weights, dtype=torch.float64)
                totals = scores @ weights  # (N,)
                advantages = sum(weight * compute_advantages(column, args.group_size, args.adv_clip_max,
                                                             args.norm_adv_by_std, args.global_std)
                                 for weight, column in zip(weights, scores.T, strict=True))  # (N,)

            with timed(timing, "old_log_prob"):
                old_log_probs = trajectories.log_probs  # (B, W)
                if engine:  # another implementation of the policy: its log-probs are compared, not trained on
                    old_log_probs = recompute_log_probs(args, model, request, trajectories.latents)
                difference = gather((old_log_probs - trajectories.log_probs).abs())
                metrics |= reward_metrics(scores, totals, rewards, args.group_size)
                metrics |= rollout_metrics(advantages, difference, sde_steps)

            with timed(timing, "update_actor"):
                metrics |= update(args, model, params, optimizer, request, trajectories.latents, old_log_probs,
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
