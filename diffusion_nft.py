"""DiffusionNFT (arXiv 2509.16117): online RL on the forward process, the whole algorithm in one file.

    torchrun --standalone diffusion_nft.py                       # the embedded model on a CPU, vLLM-Omni rollouts
    torchrun --standalone diffusion_nft.py --rollout local       # the training transformer samples: no vLLM needed
    torchrun --standalone --nproc_per_node 2 diffusion_nft.py    # the same images, shared by two ranks

How it works, and where it departs from the paper's code:
1. Three policies share one base: `default` (trained), `old` (samples, follows `default` slowly), and the adapters off.
2. Rollouts are ODE, without guidance; the loss noises their final images anew: no trajectory, no log-prob.
3. Timesteps are drawn per image from the sampler's own schedule, a fresh seeded permutation at every rollout.
4. `old` follows after every update_interval rollouts; its decay counts optimizer steps, as the paper's code does.
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
from common.sde import draw_noise, image_seed, sde_step

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
    name: str = "diffusion_nft"
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
    nft_beta: float = 0.1
    """how far the implicit positive and negative policies stand from `old`: v+- = v_old +- beta (v - v_old)"""
    kl_coef: float = 0.0
    """weight of mean((v - v_ref)^2), the distance to the base without adapters (paper: 1e-4)"""
    adv_mode: Literal["continuous", "positive_only", "negative_only", "one_only", "binary"] = "continuous"
    """what becomes of the advantage before r = A / (2 adv_clip_max) + 1/2: clamped, its positive or negative part, 1
    where it is positive and 0 elsewhere, or its sign"""
    timestep_fraction: float = 1.0
    """share of the sampling schedule's timesteps that every image is trained at"""
    decay_schedule: Literal["copy", "linear_to_0_5", "delayed_linear_to_0_999", "fixed"] = "linear_to_0_5"
    """d of old = d old + (1 - d) default after k optimizer steps: 0; min(.001 k, .5); 0 to k = 75, then
    min(.0075 (k - 75), .999); or old_decay"""
    old_decay: float = 0.5
    """d of the schedule `fixed`, from 0 (copy) to below 1"""
    update_interval: int = 1
    """rollouts between two updates of `old`"""
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
    check_at_least(vars(args), num_prompts=1, group_size=2, num_inference_steps=1, eval_num_inference_steps=1,
                   eval_every=1, updates_per_rollout=1, micro_batch_size=1, rollout_batch_size=1, update_interval=1)
    num_images, shards = args.num_prompts * args.group_size, args.updates_per_rollout * launched_world_size()
    args.micro_batch_size = min(args.micro_batch_size, num_images // shards or 1)
    if num_images % (shards * args.micro_batch_size):
        raise ValueError(f"--num_prompts x --group_size = {num_images} images do not divide into --updates_per_rollout "
                         f"x ranks x --micro_batch_size = {shards * args.micro_batch_size}")
    if not 0 < args.timestep_fraction <= 1 or not 0 <= args.old_decay < 1:
        raise ValueError(f"--timestep_fraction {args.timestep_fraction} must lie in (0, 1], --old_decay "
                         f"{args.old_decay} in [0, 1)")
    if args.nft_beta <= 0 or args.adv_clip_max <= 0 or args.kl_coef < 0:
        raise ValueError(f"--nft_beta {args.nft_beta} and --adv_clip_max {args.adv_clip_max} must be above 0, "
                         f"--kl_coef {args.kl_coef} at least 0")
    return family, rewards, read_prompts(args.train_prompts, rewards), read_prompts(args.eval_prompts, rewards)


# ==== 3 DATA ==========================================================================================================
def make_request(args, model, prompts, prompt_index, seeds, num_inference_steps):
    """Ask for B ODE images of `prompts`, each encoded once: prompt_index (B,) says which one, seeds (B) its noise."""
    timesteps, sigmas, latent_shape = model.schedule(num_inference_steps, args.height, args.width)  # (T,), (T + 1,)
    conditioning = model.encode_prompts(prompts, args.max_sequence_length)
    return RolloutRequest(conditioning, None, prompt_index, seeds, timesteps, sigmas, latent_shape, sde_steps=(),
                          sde_type="sde", noise_level=0.0, guidance_scale=1.0, height=args.height, width=args.width)


def draw_training_noise(args, request, step, image_index):
    """For each of B images K timesteps of the sampling schedule, (B, K), and fresh noise, (B, K, ...).

    Seeded by (seed, step, global image index), apart from the rollout's noise: the same on any number of ranks.
    """
    num_timesteps, timesteps, noise = max(1, round(args.timestep_fraction * args.num_inference_steps)), [], []
    for index in image_index.tolist():
        generator = torch.Generator().manual_seed(image_seed(args.seed, f"{step} update", index))
        chosen = torch.randperm(len(request.timesteps), generator=generator)[:num_timesteps]
        timesteps.append(request.timesteps[chosen])
        noise.append(torch.randn(num_timesteps, *request.latent_shape, generator=generator))
    return torch.stack(timesteps), torch.stack(noise)


# ==== 4 MODEL =========================================================================================================
def load_policy(args, family, device):
    """The frozen pipeline, with a trainable LoRA on its transformer, which is sharded block by block (FSDP2)."""
    dtype = getattr(torch, args.dtype)
    model = load_model(family, args.model, dtype, device)
    config = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, init_lora_weights="gaussian",
                        target_modules=list(family.lora_target_modules))
    for name in ("default", "old"):
        torch.manual_seed(args.seed)  # the same initial LoRA on every rank, and for both
        model.transformer.add_adapter(config, adapter_name=name)
    for name, p in model.transformer.named_parameters():
        p.data = p.data.float() if "lora_" in name else p.data
    use_policy(model.transformer, "default")
    # FSDP must not cast the inputs: it would round the timesteps to bf16. predict_velocity casts what is to be cast
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = [m for m in model.transformer.modules() if type(m).__name__ in model.transformer._no_split_modules]
    for module in (*blocks, model.transformer):
        fully_shard(module, mp_policy=policy)
    return model, [p for p in model.transformer.parameters() if p.requires_grad]


def use_policy(transformer, name):
    """Let `default`, `old` or, by None, the base model act. Only `default` ever asks for a gradient."""
    if name:
        transformer.enable_adapters()
        transformer.set_adapter(name)
    else:
        transformer.disable_adapters()
    for parameter_name, p in transformer.named_parameters():
        p.requires_grad_(".default." in parameter_name)  # peft lets the acting one ask instead


@torch.no_grad()
def update_old_policy(transformer, decay):
    """old <- decay old + (1 - decay) default, on each rank's shards; decay 0 copies to the bit."""
    parameters = dict(transformer.named_parameters())
    for name, p in parameters.items():
        if ".old." in name:
            p.lerp_(parameters[name.replace(".old.", ".default.")], 1 - decay)


def old_policy_decay(decay_schedule, old_decay, k):
    """The decay after k optimizer steps (arXiv 2509.16117; the paper's code counts these, too)."""
    return {"copy": 0.0, "linear_to_0_5": min(0.001 * k, 0.5),
            "delayed_linear_to_0_999": min(max(0.0, 0.0075 * (k - 75)), 0.999), "fixed": old_decay}[decay_schedule]


def full_adapter(transformer, name="default"):
    """The LoRA of that name on the CPU, whole: {"module.lora_A.weight": tensor}, and its LoraConfig. A collective."""
    tensors = get_peft_model_state_dict(transformer, adapter_name=name)
    return {key: p.full_tensor().detach().cpu() for key, p in tensors.items()}, transformer.peft_config[name]


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
    """Sample the request's B images with the training transformer and the acting policy, by the ODE."""
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    x = draw_noise((len(generators), *request.latent_shape), generators, model.transformer.device)  # (B, C, h, w)
    outputs, sigmas = [], request.sigmas.tolist()
    for i in range(len(request.timesteps)):
        x_i = outputs[-1].prev_sample if i else x
        v = model.predict_velocity(x_i, request.timesteps[i], request.conditioning)
        outputs.append(sde_step(x_i, v, sigmas[i], sigmas[i + 1], 0.0))
    return Trajectories.from_steps(x, outputs, model.decode(outputs[-1].prev_sample))


def rollout(args, model, engine, request):
    """Trajectories on the training device: of W = 0 steps, so that `latents` (B, 1, ...) are the final ones."""
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
# None: the forward process needs no probability of a trajectory. What takes its place is how optimal an image is.
def optimality(advantages, adv_mode, adv_clip_max):
    """r = clip(A / (2 m) + 1/2, 0, 1), m = adv_clip_max (arXiv 2509.16117), of A (N,) as adv_mode shapes it."""
    m = adv_clip_max
    shaped = {"continuous": advantages.clamp(-m, m), "positive_only": advantages.clamp(0, m),
              "negative_only": advantages.clamp(-m, 0), "one_only": (advantages > 0).to(advantages),
              "binary": advantages.sign()}[adv_mode]
    return (shaped / (2 * m) + 0.5).clamp(0, 1)


# ==== 9 LOSS ==========================================================================================================
def nft_loss(v, v_old, v_ref, x_t, x0, sigma, r, nft_beta, adv_clip_max, kl_coef):
    """adv_clip_max mean(r L+ / beta + (1 - r) L- / beta) + kl_coef mean((v - v_ref)^2) (arXiv 2509.16117).

    L+- = mean((x0_hat+- - x0)^2) / w+- per sample, with x0_hat = x_t - sigma v+-, v+ = beta v + (1 - beta) v_old,
    v- = (1 + beta) v_old - beta v, and w+- = mean |x0_hat+- - x0|, at least 1e-5, in fp64 and without gradient.
    Velocities, x_t and x0 (B, ...), sigma and r (B,); v_ref is None where kl_coef is 0. Returns loss and metrics.
    """
    sigma = sigma.view(-1, *[1] * (x0.dim() - 1))

    def error(velocity):  # (B,)
        difference = x_t - sigma * velocity - x0
        weight = difference.detach().double().abs().flatten(1).mean(1).clamp(min=1e-5)
        return (difference**2).flatten(1).mean(1) / weight

    shift = nft_beta * (v - v_old)  # exactly 0 at v_old, so that both gradients cancel there where r is 1/2
    positive, negative = error(v_old + shift), error(v_old - shift)
    loss = adv_clip_max * (r * positive + (1 - r) * negative).mean() / nft_beta
    kl = loss.new_zeros(()) if v_ref is None else ((v - v_ref) ** 2).mean()
    loss = loss + kl_coef * kl
    metrics = {"loss": loss, "positive_loss": positive.mean(), "negative_loss": negative.mean(), "kl_loss": kl,
               "old_deviation": ((v - v_old) ** 2).mean()}
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def update(args, model, params, optimizer, request, x0, timesteps, noise, r):
    """updates_per_rollout optimizer steps on this rank's B images. Returns metrics, means over passes and ranks.

    A pass is one of the K timesteps of one micro-batch; the passes of a mini-batch add up to its mean gradient.
    """
    kept, grad_norms = [], []
    for mini_batch in torch.arange(len(x0)).chunk(args.updates_per_rollout):
        micro_batches = mini_batch.split(args.micro_batch_size)
        num_passes, passes = len(micro_batches) * timesteps.shape[1], []
        for rows, k in itertools.product(micro_batches, range(timesteps.shape[1])):
            last = rows is micro_batches[-1] and k == timesteps.shape[1] - 1
            model.transformer.set_requires_gradient_sync(last)  # between ranks, once per optimizer step
            t, conditioning = timesteps[rows, k], request.select(rows).conditioning  # (len(rows),)
            sigma = (t / 1000).to(x0.device)
            s = sigma.view(-1, *[1] * (x0.dim() - 1))
            x_t = (1 - s) * x0[rows] + s * noise[rows, k].to(x0.device)
            velocities = []
            for name in ("old", None) if args.kl_coef else ("old",):
                use_policy(model.transformer, name)
                with torch.no_grad():
                    velocities.append(model.predict_velocity(x_t, t, conditioning))
            use_policy(model.transformer, "default")
            v_old, v_ref = velocities if args.kl_coef else (*velocities, None)
            loss, metrics = nft_loss(model.predict_velocity(x_t, t, conditioning), v_old, v_ref, x_t, x0[rows], sigma,
                                     r[rows], args.nft_beta, args.adv_clip_max, args.kl_coef)
            (loss / num_passes).backward()
            passes.append(metrics)
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
    request = make_request(args, model, mine, torch.arange(len(rows)), seeds, args.eval_num_inference_steps)
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
             "old": full_adapter(model.transformer, "old")[0],
             "optimizer": get_optimizer_state_dict(model.transformer, optimizer, options=whole)}
    if dist.get_rank() == 0:
        save_adapter(folder / "adapter", type(model.pipe), adapter, config)
        save_checkpoint(folder / "checkpoint", state)


# ==== 12 MAIN =========================================================================================================
def advantage_metrics(advantages, r):
    """Of the advantages (N,) and of how optimal the images are, r (N,)."""
    return {"critic/advantages/mean": advantages.mean(), "critic/advantages/max": advantages.max(),
            "critic/advantages/min": advantages.min(), "critic/optimality/mean": r.mean()}


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
        probe = make_request(args, model, eval_set[0][:1], torch.tensor([0]), [0], args.num_inference_steps)
        engine.verify_push(*full_adapter(model.transformer), probe)
    timing, skipped_in_a_row = {"startup": time.perf_counter() - began}, 0
    for step in (bar := tqdm(range(args.num_steps + 1), disable=rank > 0)):
        metrics, grid, start = {}, None, time.perf_counter()
        if step:  # step 0 only evaluates
            with timed(timing, "gen"):
                prompt_rows, prompt_index, image_index = sampler.draw()  # (P,), (B,), (B,): our B of N images
                prompts, metadata = ([column[row] for row in prompt_rows] for column in train_set)
                seeds = [image_seed(args.seed, step, index) for index in image_index.tolist()]
                request = make_request(args, model, prompts, prompt_index, seeds, args.num_inference_steps)
                use_policy(model.transformer, "old")  # the engine holds it already
                trajectories = rollout(args, model, engine, request)
                use_policy(model.transformer, "default")

            with timed(timing, "reward"):
                mine = [prompts[i] for i in prompt_index], [metadata[i] for i in prompt_index]
                local_scores = score_images(rewards, trajectories.images, *mine)  # (B, R)

            with timed(timing, "adv"):
                scores = torch.empty(num_images, len(rewards), dtype=torch.float64)
                scores[gather(image_index).flatten()] = gather(local_scores).flatten(0, 1)  # (N, R), on every rank
                totals = scores @ torch.tensor(args.reward_weights, dtype=torch.float64)  # (N,)
                advantages = compute_advantages(totals, args.group_size, args.adv_clip_max, args.norm_adv_by_std,
                                                args.global_std)  # (N,)
                r = optimality(advantages, args.adv_mode, args.adv_clip_max)  # (N,)
                metrics |= reward_metrics(scores, totals, rewards, args.group_size) | advantage_metrics(advantages, r)

            with timed(timing, "update_actor"):
                metrics |= update(args, model, params, optimizer, request, trajectories.latents[:, -1],
                                  *draw_training_noise(args, request, step, image_index),
                                  r[image_index].to(device, torch.float32))
            skipped_in_a_row = (skipped_in_a_row + 1) * (metrics["actor/skipped_steps"] == args.updates_per_rollout)
            if skipped_in_a_row == MAX_SKIPPED:
                raise RuntimeError(f"step {step}: no finite gradient in {MAX_SKIPPED} rollouts: lower --learning_rate")

            with timed(timing, "update_weights"):
                if step % args.update_interval == 0:
                    k = int(optimizer.state[params[0]].get("step", 0))  # optimizer steps taken so far
                    metrics["old_policy/decay"] = old_policy_decay(args.decay_schedule, args.old_decay, k)
                    update_old_policy(model.transformer, metrics["old_policy/decay"])
                if engine:
                    engine.push_lora(*full_adapter(model.transformer, "old"))

            timing["step"] = time.perf_counter() - start
            metrics["training/epoch"] = sampler.position / len(train_set[0])
            bar.set_postfix(reward=f"{totals.mean():.3f}")

        if step % args.eval_every == 0 or step == args.num_steps:
            with timed(timing, "testing"):
                if engine:  # the trained policy is what is evaluated
                    engine.push_lora(*full_adapter(model.transformer))
                val, grid = evaluate(args, model, engine, rewards, *eval_set)
                metrics |= val
                if engine:
                    engine.push_lora(*full_adapter(model.transformer, "old"))
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
