"""Flow-GRPO (arXiv 2505.05470): GRPO for flow-matching image models, the whole algorithm in one file.

    torchrun --standalone flow_grpo.py                       # the embedded model, on a CPU
    torchrun --standalone flow_grpo.py --rollout local       # without vLLM-Omni
    torchrun --standalone --nproc_per_node 8 flow_grpo.py --model stabilityai/stable-diffusion-3.5-medium --dtype bfloat16 ...

What this file leaves out of the paper's recipe, or does otherwise:
1. No KL to the reference model (the paper adds one for long runs).
2. Advantages take one reward per image; the reference system repeats it for every trained step (algorithm details: docs/flow_grpo.md).
3. Groups are keyed by an integer, never by the prompt's text.
4. The last sampling step is always an ODE step and is never trained.
"""
# ==== 1 ARGS ==========================================================================================================
import gc
import math
import os
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from tqdm import tqdm

import common  # noqa: F401  (first: it repairs torchvision next to a CPU torch)
from common.data import GroupSampler, read_prompts
from common.models import find_family, load_pipeline
from common.rewards import load_rewards, score_images
from common.rollout import RolloutRequest, Trajectories, VLLMEngine, check_engine
from common.run import MetricLog, create_run_folder, plot_curves, save_adapter, save_checkpoint, save_grid
from common.sde import SDEType, draw_noise, image_seed, random_window_start, sde_step, sigma_schedule
from peft import LoraConfig, get_peft_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ASSETS = Path(__file__).parent / "assets"


@dataclass
class Args:
    name: str = "flow_grpo"
    """run name; everything is written to runs/<name>"""
    seed: int = 1
    """seed of the data order, the noise and the LoRA's initial weights"""
    track: bool = False
    """log to wandb as well"""

    model: str = str(ASSETS / "embedded")
    """diffusers pipeline: a folder or a hub id"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the frozen weights and the forward passes; LoRA weights, Adam and all step arithmetic are fp32 always"""
    lora_rank: int = 16
    """rank of the LoRA on the attention projections"""
    lora_alpha: int = 32
    """the LoRA acts with weight lora_alpha / lora_rank"""
    height: int = 32
    """image height in pixels"""
    width: int = 96
    """image width in pixels"""
    max_sequence_length: int = 16
    """T5 tokens per prompt; longer prompts are cut (SD3.5: up to 256)"""

    train_prompts: str = str(ASSETS / "train_prompts.txt")
    """.txt (one prompt a line) or .jsonl ("prompt" and metadata)"""
    eval_prompts: str = str(ASSETS / "eval_prompts.txt")
    """held-out prompts, one image each at every evaluation"""
    reward: tuple[str, ...] = ("ocr",)
    """ocr, ocr_contains, jpeg_compressibility, jpeg_incompressibility, or path/to/file.py:function; several are summed"""
    reward_weights: tuple[float, ...] = (1.0,)
    """weight of each reward"""

    rollout: Literal["vllm", "local"] = "vllm"
    """vllm: a vLLM-Omni engine per rank, in its own process; local: the training transformer samples"""
    rollout_batch_size: int = 32
    """most images the vLLM-Omni engine samples at once"""
    engine_timeout_s: float = 600
    """seconds to wait for one answer of the engine before the run ends with an error"""
    num_prompts: int = 16
    """prompts per rollout, over all ranks"""
    group_size: int = 8
    """images per prompt; the advantage compares them"""
    num_inference_steps: int = 10
    """sampling steps T of a rollout"""
    guidance_scale: float = 1.0
    """classifier-free guidance, part of the policy in rollout and training; 1 is none"""
    sde_type: SDEType = "sde"
    """sde (Flow-GRPO), dance, cps (unscaled log-prob) or cps_gauss; clip ranges do not carry over between them"""
    noise_level: float = 0.7
    """scale of the noise injected at SDE steps (paper: 0.7)"""
    sde_window_size: int = 0
    """SDE steps per rollout, consecutive; the others are ODE steps and not trained; 0: all but the last"""
    sde_window_range: tuple[int, int] = (0, 5)
    """steps [lo, hi) the window is drawn from, once per rollout; hi <= num_inference_steps - 1"""

    num_steps: int = 40
    """rollouts of the run"""
    updates_per_rollout: int = 2
    """optimizer steps per rollout; the first is on-policy, later ones are clipped"""
    micro_batch_size: int = 64
    """images per forward and backward pass on a rank, and per local sampling batch"""
    learning_rate: float = 1e-3
    """AdamW's; constant (paper: 3e-4)"""
    weight_decay: float = 1e-4
    """AdamW's"""
    adam_eps: float = 1e-15
    """AdamW's; tiny because the gradients can be (mean over all latent elements)"""
    max_grad_norm: float = 1.0
    """gradient clipping"""
    clip_range: float = 1e-3
    """ratio clipped to 1 +- clip_range; useful values grow as 1 / sqrt(latent elements): 1e-4 at SD3.5's 512x512"""
    adv_clip_max: float = 5.0
    """advantages are clamped to +- this"""
    norm_adv_by_std: bool = True
    """divide advantages by the standard deviation; False is Dr.GRPO"""
    global_std: bool = True
    """that deviation over all images of the rollout; False: over each prompt's group"""

    eval_every: int = 10
    """steps between evaluations; also at step 0 and at the end"""
    eval_num_inference_steps: int = 10
    """ODE steps of an evaluation image"""
    max_skipped_steps: int = 3
    """consecutive optimizer steps with a gradient that is not finite before the run stops"""


# ==== 2 SETUP =========================================================================================================
def check_args(args, world_size):
    """Everything that can be wrong before a model is loaded. Returns the model family, the rewards and both prompt sets."""
    rewards, family = load_rewards(args.reward), find_family(args.model)
    check_engine(args.rollout)
    if len(args.reward_weights) != len(args.reward):
        raise ValueError(f"--reward_weights: {len(args.reward_weights)} weights for {len(args.reward)} rewards")
    if args.group_size < 2:
        raise ValueError(f"--group_size {args.group_size}: a group needs at least 2 images to compare")
    images, parts = args.num_prompts * args.group_size, args.updates_per_rollout * world_size * args.micro_batch_size
    if images % parts:
        raise ValueError(f"--num_prompts {args.num_prompts} x --group_size {args.group_size} = {images} images do not divide into "
                         f"--updates_per_rollout {args.updates_per_rollout} x {world_size} ranks x --micro_batch_size {args.micro_batch_size}")
    low, high = args.sde_window_range
    if args.sde_window_size and not 0 <= low < low + args.sde_window_size <= high <= args.num_inference_steps - 1:
        raise ValueError(f"--sde_window_range {low} {high} does not hold a window of {args.sde_window_size} within the "
                         f"{args.num_inference_steps - 1} steps that can be trained")
    prompt_sets = [read_prompts(args.train_prompts), read_prompts(args.eval_prompts)]
    for prompts, metadata in prompt_sets:
        for reward in rewards.values():
            getattr(reward, "check", lambda prompts, metadata: None)(prompts, metadata)
    return family, rewards, prompt_sets


def setup_distributed():
    """Join torchrun's world. Returns rank, world size and this rank's device; CPU ranks share the cores."""
    if "RANK" not in os.environ:
        raise ValueError("start this script with torchrun: torchrun --standalone " + Path(__file__).name)
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(max(1, os.cpu_count() // local_size))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def timed(timing, name):
    """Add the block's seconds to timing[name]."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    timing[name] = timing.get(name, 0.0) + time.perf_counter() - start


def gather(tensor):
    """(B, ...) of every rank -> (world size, B, ...), the same on all."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


# ==== 3 DATA ==========================================================================================================
def make_request(args, family, pipe, prompts, prompt_index, seeds, num_inference_steps, sde_steps):
    """A RolloutRequest for the images `prompt_index` (B,) of `prompts`; the distinct prompts are encoded once each."""
    latent_shape, image_seq_len = family.latent_shape(pipe, args.height, args.width)
    timesteps, sigmas = sigma_schedule(pipe.scheduler, num_inference_steps, image_seq_len)  # (T,), (T + 1,)
    with torch.no_grad():
        conditioning = family.encode_prompts(pipe, prompts, args.max_sequence_length)
        negative = family.encode_prompts(pipe, [""], args.max_sequence_length) if args.guidance_scale > 1 else None
    return RolloutRequest(conditioning, negative, prompt_index, seeds, timesteps, sigmas, tuple(sde_steps), args.noise_level, args.sde_type,
                          args.guidance_scale, args.height, args.width, latent_shape)


def trained_steps(args, step):
    """The SDE steps of this rollout, which are the ones trained: a window, or all but the last."""
    if not args.sde_window_size:
        return range(args.num_inference_steps - 1)
    start = random_window_start(args.seed, step, args.sde_window_size, args.sde_window_range)
    return range(start, start + args.sde_window_size)


# ==== 4 MODEL =========================================================================================================
def load_policy(args, family, device):
    """The frozen pipeline with a trainable LoRA on its transformer, sharded block by block (FSDP2)."""
    dtype = getattr(torch, args.dtype)
    pipe = load_pipeline(args.model, dtype, device)
    transformer = pipe.transformer
    torch.manual_seed(args.seed)  # the same initial LoRA on every rank
    transformer.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, init_lora_weights="gaussian",
                                       target_modules=list(family.lora_target_modules)))
    params = [p for p in transformer.parameters() if p.requires_grad]
    for p in params:
        p.data = p.data.float()
    # inputs are cast by the family, not by FSDP, which would round the timesteps to bf16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [m for m in transformer.modules() if type(m).__name__ in transformer._no_split_modules]:
        fully_shard(module, mp_policy=policy)
    fully_shard(transformer, mp_policy=policy)
    return pipe, [p for p in transformer.parameters() if p.requires_grad]


def full_adapter(transformer):
    """The whole LoRA on the CPU, {"module.lora_A.weight": tensor}; every rank takes part in gathering it."""
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().cpu().clone() for k, v in get_peft_model_state_dict(transformer).items()}


# ==== 5 ENGINE ========================================================================================================
def start_engine(args, folder, rank, device):
    """This rank's vLLM-Omni engine, loading in the background; None with --rollout local."""
    if args.rollout == "local":
        return None
    gpu = device.index if device.type == "cuda" else None
    return VLLMEngine(args.model, args.dtype, args.rollout_batch_size, folder / f"engine_rank{rank}.log", args.engine_timeout_s, gpu,
                      torch.get_num_threads())


# ==== 6 ROLLOUT =======================================================================================================
@torch.no_grad()
def sample_locally(family, pipe, request):
    """Sample a request with the training transformer: B images, each step SDE or ODE as the request says."""
    sigmas, device = request.sigmas.tolist(), pipe.transformer.device
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    x = draw_noise((len(request.seeds), *request.latent_shape), generators, device)  # (B, C, H, W)
    latents, means, log_probs, stds = [x], [], [], []
    for i, t in enumerate(request.timesteps):
        noise_level = request.noise_level if i in request.sde_steps else 0.0
        v = predict(family, pipe.transformer, request, x, t)
        out = sde_step(x, v, sigmas[i], sigmas[i + 1], noise_level, sde_type=request.sde_type, sigma_max=sigmas[1], generator=generators)
        x = out.prev_sample
        latents.append(x)
        if i in request.sde_steps:
            means.append(out.prev_sample_mean), log_probs.append(out.log_prob), stds.append(out.transition_std)
    empty = torch.zeros(len(x), 0, device=device)
    means, log_probs, stds = (torch.stack(values, 1) if values else empty for values in (means, log_probs, stds))
    return Trajectories(torch.stack(latents, 1), means, log_probs, stds, family.decode(pipe, x))


def rollout(args, family, pipe, engine, request):
    """Sample a request with either engine. Returns Trajectories on the training device, images as PIL."""
    if engine is None:  # in the update's micro-batches, so that the same arithmetic gives the same log-probs
        return Trajectories.cat([sample_locally(family, pipe, request.select(rows))
                                 for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size)])
    out = engine.generate(request)
    images = pipe.image_processor.postprocess(out.images)
    return Trajectories(*(t.to(pipe.transformer.device) for t in (out.latents, out.prev_sample_means, out.log_probs, out.transition_stds)), images)


# ==== 7 ADVANTAGE =====================================================================================================
def compute_advantages(rewards, group_size, adv_clip_max=5.0, norm_adv_by_std=True, global_std=True):
    """A = (r - mean of its group) / (S + 1e-4), clamped (arXiv 2505.05470, eq. 4); fp64, population standard deviation.

    rewards: (P * group_size,) of the whole rollout, group by group. S is over all of them, or over each group.
    A group of equal rewards gets exactly 0. Returns (P * group_size,).
    """
    groups = rewards.double().view(-1, group_size)
    centred = groups - groups[:, :1]  # equal rewards become exact zeros
    centred = centred - centred.mean(1, keepdim=True)
    if norm_adv_by_std:
        std = groups.std(correction=0) if global_std else groups.std(1, keepdim=True, correction=0)
        centred = centred / (std + 1e-4)
    return centred.clamp(-adv_clip_max, adv_clip_max).flatten()


# ==== 8 LOG PROB ======================================================================================================
def predict(family, transformer, request, latents, timestep):
    """Velocity (B, ...) of the policy, guidance included, at one timestep."""
    negative = request.negative_conditioning and {k: v.expand(len(latents), *v.shape[1:]) for k, v in request.negative_conditioning.items()}
    timesteps = timestep.to(latents.device).expand(len(latents))  # (B,), fp32
    return family.predict_velocity(transformer, latents, timesteps, request.conditioning, negative, request.guidance_scale)


def score_step(family, transformer, request, latents, i):
    """The policy's SDEStepOutput for the stored transition i of latents (B, T + 1, ...)."""
    sigmas = request.sigmas.tolist()
    v = predict(family, transformer, request, latents[:, i], request.timesteps[i])
    return sde_step(latents[:, i], v, sigmas[i], sigmas[i + 1], request.noise_level, sde_type=request.sde_type, sigma_max=sigmas[1],
                    prev_sample=latents[:, i + 1])


@torch.no_grad()
def recompute_log_probs(family, transformer, request, latents, micro_batch_size):
    """log_probs (B, W) of the W trained steps under the current weights, in the update's micro-batches."""
    parts = []
    for rows in torch.arange(len(latents)).split(micro_batch_size):
        part = request.select(rows)
        parts.append(torch.stack([score_step(family, transformer, part, latents[rows], i).log_prob for i in request.sde_steps], 1))
    return torch.cat(parts)


# ==== 9 LOSS ==========================================================================================================
def policy_loss(log_prob, old_log_prob, advantages, clip_range):
    """Clipped surrogate, mean over samples: max(-A ratio, -A clip(ratio, 1 - eps, 1 + eps)) (arXiv 2505.05470, eq. 5).

    All (B,). Returns the loss and its metrics (detached scalars).
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    with torch.no_grad():
        higher = ((ratio > 1 + clip_range) & (advantages > 0)).double().mean()
        lower = ((ratio < 1 - clip_range) & (advantages < 0)).double().mean()
        metrics = {"actor/pg_clipfrac": higher + lower, "actor/pg_clipfrac_higher": higher, "actor/pg_clipfrac_lower": lower,
                   "actor/ratio_mean": ratio.mean(), "actor/ratio_std": ratio.std(correction=0), "actor/ppo_kl": -log_ratio.mean()}
    loss = torch.maximum(unclipped, clipped).mean()
    return loss, {"actor/loss": loss.detach(), **metrics}


def update(args, family, transformer, params, optimizer, request, trajectories, old_log_probs, advantages):
    """updates_per_rollout optimizer steps over this rank's images. Returns metrics, means over micro-batches and ranks.

    Every pass is one trained step of one micro-batch; their gradients add up to the mini-batch's mean before each step.
    """
    totals, grad_norms, skipped = {}, [], 0
    num_passes = len(advantages) // args.updates_per_rollout // args.micro_batch_size * len(request.sde_steps)
    for number, mini_batch in enumerate(torch.arange(len(advantages)).chunk(args.updates_per_rollout)):
        largest, done = 0.0, 0
        for rows in mini_batch.split(args.micro_batch_size):
            part, latents = request.select(rows), trajectories.latents[rows]
            for w, i in enumerate(request.sde_steps):
                done += 1
                transformer.set_requires_gradient_sync(done == num_passes)
                log_prob = score_step(family, transformer, part, latents, i).log_prob
                loss, metrics = policy_loss(log_prob, old_log_probs[rows, w], advantages[rows], args.clip_range)
                (loss / num_passes).backward()
                largest = max(largest, (log_prob.detach() - old_log_probs[rows, w]).abs().max().item())
                for k, v in metrics.items():
                    totals[k] = totals.get(k, 0.0) + v.double() / (num_passes * args.updates_per_rollout)
        if number == 0 and not largest <= (1e-6 if args.dtype == "float32" else 1e-4):
            raise RuntimeError(f"the ratio of the first update is off by {largest:.1e}: rollout and update do not compute the same log-prob")
        grad_norm = torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm).full_tensor()
        if grad_norm.isfinite():
            grad_norms.append(grad_norm.item())
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad()
    names = sorted(totals)
    means = gather(torch.stack([totals[k] for k in names]).to(params[0].device)).mean(0).tolist()
    return {**dict(zip(names, means, strict=True)), "actor/grad_norm": sum(grad_norms) / max(1, len(grad_norms)), "actor/skipped_steps": skipped}


# ==== 10 EVAL =========================================================================================================
def evaluate(args, family, pipe, engine, rewards, prompts, metadata):
    """ODE images of the held-out prompts, one each, from the same seeds every time.

    Returns metrics (mean and standard error of each reward) and, for the grid, the first 32 images with their scores.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_local = math.ceil(len(prompts) / world_size)  # every rank samples as many; the surplus repeats prompts and is dropped
    index = torch.arange(num_local) * world_size + rank
    rows = (index % len(prompts)).tolist()
    local_prompts = [prompts[row] for row in rows]
    seeds = [image_seed("eval", 0, row) for row in rows]
    request = make_request(args, family, pipe, local_prompts, torch.arange(num_local), seeds, args.eval_num_inference_steps, ())
    images = rollout(args, family, pipe, engine, request).images
    scores = score_images(rewards, images, local_prompts, [metadata[row] for row in rows])  # (num_local, R)
    everything = gather(scores).transpose(0, 1).flatten(0, 1)[: len(prompts)]  # (prompts, R), in their order
    metrics = {}
    for name, column in zip(rewards, everything.unbind(1), strict=True):
        metrics |= {f"val/{name}/mean": column.mean().item(), f"val/{name}/stderr": (column.std() / len(column) ** 0.5).item()}
    shown = [(i, image) for i, image in zip(index.tolist(), images, strict=True) if i < min(32, len(prompts))]
    parts = [None] * world_size
    dist.all_gather_object(parts, shown)
    grid = [(image, f"{prompts[i][-20:]} {everything[i].mean():.2f}") for i, image in sorted(sum(parts, []), key=lambda pair: pair[0])]
    return metrics, grid


# ==== 11 CHECKPOINT ===================================================================================================
def save(args, folder, pipe, optimizer, sampler, step):
    """The adapter in diffusers' layout, and a checkpoint of all that changes. Every rank takes part; rank 0 writes."""
    adapter = full_adapter(pipe.transformer)
    moments = {i: {k: v.full_tensor().cpu() if hasattr(v, "full_tensor") else v for k, v in state.items()}
               for i, state in optimizer.state_dict()["state"].items()}
    if dist.get_rank() == 0:
        save_adapter(folder / "adapter", type(pipe), adapter, pipe.transformer.peft_config["default"])
        state = {"step": step, "adapter": adapter, "optimizer": moments, "sampler": sampler.state_dict(), "rng": torch.get_rng_state()}
        save_checkpoint(folder / "checkpoint", {**state, "args": asdict(args)})


# ==== 12 MAIN =========================================================================================================
def main(args):
    family, rewards, (train_set, eval_set) = check_args(args, int(os.environ.get("WORLD_SIZE", 1)))
    rank, world_size, device = setup_distributed()
    folder = Path("runs") / args.name
    if rank == 0:
        create_run_folder(folder, args, __file__)
        print(f"{args.num_prompts} prompts x {args.group_size} images = {args.num_prompts * args.group_size} images a rollout, in "
              f"{args.updates_per_rollout} optimizer steps; {len(trained_steps(args, 0))} of {args.num_inference_steps} steps trained")
    dist.barrier()
    engine = start_engine(args, folder, rank, device)
    log = MetricLog(folder, args, args.track) if rank == 0 else None
    pipe, params = load_policy(args, family, device)
    transformer = pipe.transformer
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate, weight_decay=args.weight_decay, eps=args.adam_eps)
    sampler = GroupSampler(len(train_set[0]), args.num_prompts, args.group_size, args.seed, args.updates_per_rollout, rank, world_size)
    weights = torch.tensor(args.reward_weights, dtype=torch.float64)  # (R,)
    skipped_in_a_row, num_images = 0, 0
    if engine:
        probe = make_request(args, family, pipe, eval_set[0][:1], torch.tensor([0]), [0], args.num_inference_steps, ())
        startup_s = engine.wait_ready()
        engine.verify_push(full_adapter(transformer), transformer.peft_config["default"], probe)
        if rank == 0:
            print(f"vLLM-Omni ready after {startup_s:.0f} s")

    bar = tqdm(range(args.num_steps + 1), disable=rank > 0, unit="step")
    for step in bar:
        timing, metrics, grid = {}, {}, None
        start = time.perf_counter()
        if step:
            # rollout: num_prompts x group_size images over all ranks, B of them here
            prompt_rows, prompt_index, image_index = sampler.draw()
            prompts = [train_set[0][row] for row in prompt_rows]
            with timed(timing, "gen"):
                seeds = [image_seed(args.seed, step, index) for index in image_index.tolist()]
                request = make_request(args, family, pipe, prompts, prompt_index, seeds, args.num_inference_steps, trained_steps(args, step))
                trajectories = rollout(args, family, pipe, engine, request)

            with timed(timing, "reward"):
                metadata = [train_set[1][prompt_rows[i]] for i in prompt_index]
                local = score_images(rewards, trajectories.images, [prompts[i] for i in prompt_index], metadata)  # (B, R)

            with timed(timing, "adv"):
                scores = torch.empty(args.num_prompts * args.group_size, len(rewards), dtype=torch.float64)
                scores[gather(image_index).flatten()] = gather(local).flatten(0, 1)  # in global order, the same on every rank
                advantages = compute_advantages(scores @ weights, args.group_size, args.adv_clip_max, args.norm_adv_by_std, args.global_std)
                metrics |= reward_metrics(scores, rewards, weights, advantages, args.group_size)

            with timed(timing, "old_log_prob"):
                old_log_probs = trajectories.log_probs  # (B, W)
                if engine:  # another implementation of the same policy: its log-probs are only compared
                    old_log_probs = recompute_log_probs(family, transformer, request, trajectories.latents, args.micro_batch_size)
                metrics |= drift_metrics(old_log_probs, trajectories.log_probs, request.sde_steps)

            with timed(timing, "update_actor"):
                local_advantages = advantages[image_index].to(device, torch.float32)
                metrics |= update(args, family, transformer, params, optimizer, request, trajectories, old_log_probs, local_advantages)
            skipped_in_a_row = skipped_in_a_row + 1 if metrics["actor/skipped_steps"] == args.updates_per_rollout else 0
            if skipped_in_a_row >= args.max_skipped_steps:
                raise RuntimeError(f"no finite gradient in {skipped_in_a_row} rollouts in a row: stopped at step {step}")

            with timed(timing, "update_weights"):
                if engine:
                    engine.push_lora(full_adapter(transformer), transformer.peft_config["default"])

        train_s = time.perf_counter() - start
        if step % args.eval_every == 0 or step == args.num_steps:
            with timed(timing, "testing"):
                val, grid = evaluate(args, family, pipe, engine, rewards, *eval_set)
                metrics |= val
        if step and (step % args.eval_every == 0 or step == args.num_steps):
            with timed(timing, "save_checkpoint"):
                save(args, folder, pipe, optimizer, sampler, step)
        if rank == 0:
            num_images += args.num_prompts * args.group_size if step else 0
            report(args, log, bar, folder, step, metrics, timing, train_s, num_images, world_size, grid)

    if engine:
        engine.close()
    if rank == 0:
        log.close()
        print(f"done: {folder}/ holds metrics.jsonl, curves.png, grids, checkpoint and adapter")
    del pipe, transformer, params, optimizer, engine
    gc.collect()  # FSDP's threads end with their modules; without this about half of the CPU runs abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,), description=__doc__))
    except ValueError as error:
        raise SystemExit(f"{Path(__file__).name}: {error}") from None
