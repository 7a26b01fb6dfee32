"""A step of flow_grpo.py beside a step of the published loop's shape, in turn on the same machine: seconds by phase.

    python benchmarks/reference_loop.py              # three pairs: 256 images, ten sampling steps, nine trained
    python benchmarks/reference_loop.py --short      # a try with 32 images and one pair
    python benchmarks/reference_loop.py --our_ranks 2 --our_batch_size 32    # ours with a rank a core
    python benchmarks/reference_loop.py --our_options="--train_with compile"    # further options of flow_grpo.py
    python benchmarks/reference_loop.py --options="--dtype bfloat16 --guidance_scale 4.5"    # of both sides
    python benchmarks/reference_loop.py --only theirs --pairs 1 --num_inference_steps 3 --steps 10    # it learns

"Theirs" is the shape of the loop that was published with Flow-GRPO (arXiv 2505.05470), written here from its
description for Stable Diffusion 3 and 3.5; it is not that code. In it the whole image is one process:
  - a rollout is a number of sampling batches, each drawn, encoded (every prompt once per image) and denoised by the
    diffusers pipeline's parts; latents, log-probs and timesteps are kept; the last step is deterministic;
  - the images of a batch are scored in a thread while the next batch is sampled, and awaited at the end;
  - all samples are shuffled; an update goes through a mini-batch of them, batch by batch and timestep by timestep, and
    adds up gradients; peft's LoRA in fp32, AdamW, no FSDP; with guidance both branches are in one batch;
  - with --dtype bfloat16 the frozen weights are bf16, and passes run under autocast.
"Ours" is flow_grpo.py itself under torchrun with --rollout local. Both run on the GPU if there is one, and have the
same threads, images, prompts, sampling steps, optimizer steps, LoRA, learning rate and reward; each takes the batch
size that is fastest for it. --options are flow_grpo.py's, for both: the model, the dtype, guidance, the image's size,
the reward. A run is a process of its own; its first step is not counted.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import flow_grpo
from common.cpu import repair_torchvision
from common.distributed import threads_of_this_rank
from common.rewards._loading import load_rewards
from common.run.command_line import parse_args

import torch
from torch.nn.utils import clip_grad_norm_

ROOT = Path(__file__).parents[1]
PHASES = ("sampling", "update", "step")  # of which the first holds the rewards that are waited for


# ---- theirs ----------------------------------------------------------------------------------------------------------
def load_pipeline(args, device):
    """args.model's pipeline on `device` with a LoRA, its VAE in fp32, and the parameters that are trained."""
    repair_torchvision()  # before diffusers is imported beside a CPU build of torch
    from diffusers import DiffusionPipeline
    from diffusers.utils.logging import disable_progress_bar

    disable_progress_bar()
    dtypes = {"default": getattr(torch, args.dtype), "vae": torch.float32}
    pipe = DiffusionPipeline.from_pretrained(args.model, dtype=dtypes)
    if not type(pipe).__name__.startswith("StableDiffusion3"):
        raise SystemExit(f"--model {args.model}: must be a Stable Diffusion 3, and is a {type(pipe).__name__}")
    freeze(pipe)
    pipe.to(device)
    return pipe, add_lora(pipe, args.lora_rank, args.lora_alpha)


def freeze(pipe):
    """Let nothing of a pipeline be trained."""
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()


def add_lora(pipe, rank, alpha, dtype=torch.float32):
    """Give the transformer a LoRA on its attention projections. Returns the parameters, which are trained."""
    from peft import LoraConfig

    projections = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    lora = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=projections)
    pipe.transformer.add_adapter(lora)
    parameters = [p for p in pipe.transformer.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    return parameters


def encode(pipe, prompts, max_sequence_length, guidance_scale=1.0):
    """Prompts (B) -> embeddings (B, branches, L, C), pooled (B, branches, P). With guidance, "" is the first branch."""
    embeds, negative, pooled, negative_pooled = pipe.encode_prompt(
        prompt=prompts,
        prompt_2=None,
        prompt_3=None,
        device=pipe.transformer.device,
        do_classifier_free_guidance=guidance_scale > 1,
        max_sequence_length=max_sequence_length,
    )
    if guidance_scale <= 1:
        return embeds[:, None], pooled[:, None]
    return torch.stack([negative, embeds], dim=1), torch.stack([negative_pooled, pooled], dim=1)


def set_timesteps(pipe, num_inference_steps, image_size):
    """Set the scheduler's timesteps and sigmas as the pipeline does, on the transformer's device."""
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    config = pipe.scheduler.config
    shift = {}
    if config.use_dynamic_shifting:
        unit = pipe.vae_scale_factor * pipe.transformer.config.patch_size
        num_tokens = (image_size[0] // unit) * (image_size[1] // unit)
        sizes = (config.base_image_seq_len, config.max_image_seq_len)
        shift["mu"] = calculate_shift(num_tokens, *sizes, config.base_shift, config.max_shift)
    pipe.scheduler.set_timesteps(num_inference_steps, device=pipe.transformer.device, **shift)


def predict(pipe, latents, timestep, embeds, pooled, guidance_scale=1.0, with_autocast=None):
    """The velocity (B, ...), fp32, at latents (B, ...) and timesteps (B,), of what `encode` returns.

    with_autocast: by default where the transformer's frozen weights are not fp32.
    """
    transformer = pipe.transformer
    dtype = embeds.dtype
    if with_autocast is None:
        with_autocast = dtype != torch.float32
    branches = embeds.shape[1]
    with torch.autocast(latents.device.type, dtype=torch.bfloat16, enabled=with_autocast):
        velocity = transformer(
            hidden_states=torch.cat([latents] * branches).to(dtype),
            timestep=timestep.repeat(branches),
            encoder_hidden_states=embeds.transpose(0, 1).flatten(0, 1),  # (branches x B, L, C)
            pooled_projections=pooled.transpose(0, 1).flatten(0, 1),
            return_dict=False,
        )[0]
    velocity = velocity.float()
    if branches == 1:
        return velocity
    negative, positive = velocity.chunk(2)
    return negative + guidance_scale * (positive - negative)


def sde_step_with_log_prob(scheduler, velocity, i, sample, noise_level, prev_sample=None):
    """An SDE step (Flow-GRPO, eq. 9) of B samples at step i: the next sample, drawn or as given, and log-probs (B,)."""
    sigma = scheduler.sigmas[i]
    dt = scheduler.sigmas[i + 1] - sigma
    capped = torch.where(sigma == 1, scheduler.sigmas[1], sigma)
    std_dev_t = torch.sqrt(sigma / (1 - capped)) * noise_level
    drift = velocity * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt
    mean = sample * (1 + std_dev_t**2 / (2 * sigma) * dt) + drift
    std = std_dev_t * torch.sqrt(-dt)
    if prev_sample is None:
        prev_sample = mean + std * torch.randn_like(mean)
    log_prob = -((prev_sample.detach() - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(2 * math.pi) / 2
    return prev_sample, log_prob.mean(dim=tuple(range(1, log_prob.ndim)))


def clipped_loss(log_prob, old_log_prob, advantages, clip_range):
    """The loss of B samples (Flow-GRPO, eq. 5) and their ratios (B,)."""
    ratio = torch.exp(log_prob - old_log_prob)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(unclipped, clipped).mean(), ratio


@torch.no_grad()
def sample_batch(pipe, prompts, options, args):
    """Sample an image of each of B prompts. Returns the images and what training needs of them, (B, ...) each."""
    scheduler = pipe.scheduler
    device = pipe.transformer.device
    embeds, pooled = encode(pipe, prompts, args.max_sequence_length, args.guidance_scale)
    height, width = args.image_size
    channels = pipe.transformer.config.in_channels
    size = (height // pipe.vae_scale_factor, width // pipe.vae_scale_factor)
    latents = torch.randn(len(prompts), channels, *size, device=device)
    set_timesteps(pipe, options.num_inference_steps, args.image_size)
    all_latents = [latents]
    all_log_probs = []
    for i, t in enumerate(scheduler.timesteps):
        velocity = predict(pipe, latents, t.expand(len(prompts)), embeds, pooled, args.guidance_scale)
        if i < options.num_inference_steps - 1:
            latents, log_prob = sde_step_with_log_prob(scheduler, velocity, i, latents, args.noise_level)
            all_log_probs.append(log_prob)
        else:
            latents = latents + velocity * (scheduler.sigmas[i + 1] - scheduler.sigmas[i])
        all_latents.append(latents)

    pixels = pipe.vae.decode(latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor).sample
    images = pipe.image_processor.postprocess(pixels)
    all_latents = torch.stack(all_latents, dim=1)  # (B, T + 1, ...)
    sample = {
        "embeds": embeds,
        "pooled": pooled,
        "timesteps": scheduler.timesteps[:-1].repeat(len(prompts), 1),  # (B, T - 1)
        "latents": all_latents[:, :-2],  # (B, T - 1, ...), before each trained step
        "next_latents": all_latents[:, 1:-1],  # after it
        "log_probs": torch.stack(all_log_probs, dim=1),  # (B, T - 1)
    }
    return images, sample


def score(reward, images, prompts):
    """A reward of ours of B images: a list of B numbers."""
    returned = reward(images, prompts, [{} for _ in prompts])
    return [one["score"] if isinstance(one, dict) else one for one in returned]


def rollout(pipe, prompts, options, args, reward, executor):
    """Sample every prompt's image, batch by batch, scored in threads. Returns the samples as one, rewards included."""
    futures = []
    samples = []
    for start in range(0, len(prompts), options.their_batch_size):
        batch = prompts[start : start + options.their_batch_size]
        images, sample = sample_batch(pipe, batch, options, args)
        futures.append(executor.submit(score, reward, images, batch))
        time.sleep(0)  # lets the thread begin
        samples.append(sample)
    rewards = torch.tensor([reward for future in futures for reward in future.result()])  # (N,)
    collated = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    return collated | {"rewards": rewards.to(pipe.transformer.device)}


def advantages_by_prompt(rewards, prompts):
    """Each reward (N,) less its prompt's mean, over the deviation of all."""
    advantages = torch.empty_like(rewards)
    for prompt in dict.fromkeys(prompts):
        rows = torch.tensor([i for i, other in enumerate(prompts) if other == prompt], device=rewards.device)
        advantages[rows] = rewards[rows] - rewards[rows].mean()
    return advantages / (rewards.std(correction=0) + 1e-4)


def train(pipe, parameters, optimizer, samples, options, args):
    """The optimizer steps on a rollout's samples, shuffled. Returns the ratios (B,) of the first pass."""
    num_samples = len(samples["rewards"])
    device = samples["rewards"].device
    order = torch.randperm(num_samples, device=device)
    samples = {name: values[order] for name, values in samples.items()}
    first_ratios = None
    for mini_batch in torch.arange(num_samples, device=device).chunk(args.updates_per_rollout):
        batches = mini_batch.split(options.their_batch_size)
        num_timesteps = options.num_inference_steps - 1
        for rows in batches:
            sample = {name: values[rows] for name, values in samples.items()}
            advantages = sample["advantages"].clamp(-args.adv_clip_max, args.adv_clip_max)
            for j in range(num_timesteps):
                x = sample["latents"][:, j]
                x_next = sample["next_latents"][:, j]
                t = sample["timesteps"][:, j]
                velocity = predict(pipe, x, t, sample["embeds"], sample["pooled"], args.guidance_scale)
                _, log_prob = sde_step_with_log_prob(pipe.scheduler, velocity, j, x, args.noise_level, x_next)
                loss, ratio = clipped_loss(log_prob, sample["log_probs"][:, j], advantages, args.clip_range)
                (loss / (len(batches) * num_timesteps)).backward()
                if first_ratios is None:
                    first_ratios = ratio.detach()
        clip_grad_norm_(parameters, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return first_ratios


def run_theirs(options):
    """Train for options.steps steps after one of warming up. Prints a JSON line a step."""
    torch.set_num_threads(threads_of_this_rank())
    torch.manual_seed(options.seed)
    args = both_args(options)
    on_gpu = torch.cuda.is_available()
    pipe, parameters = load_pipeline(args, torch.device("cuda" if on_gpu else "cpu"))
    (reward,) = load_rewards(args.reward).values()
    optimizer = torch.optim.AdamW(
        parameters, lr=args.learning_rate, betas=args.adam_betas, eps=args.adam_eps, weight_decay=args.weight_decay
    )
    train_prompts = Path(args.train_prompts[0]).read_text().splitlines()
    with ThreadPoolExecutor(max_workers=8) as executor:
        for _ in range(options.steps + 1):
            began = time.perf_counter()
            places = torch.randint(len(train_prompts), (options.num_prompts,)).tolist()
            prompts = [train_prompts[place] for place in places for _ in range(args.group_size)]  # N
            samples = rollout(pipe, prompts, options, args, reward, executor)
            sampled = time.perf_counter()
            samples["advantages"] = advantages_by_prompt(samples["rewards"], prompts)
            ratios = train(pipe, parameters, optimizer, samples, options, args)
            if on_gpu:
                torch.cuda.synchronize()
            ended = time.perf_counter()
            told = {
                "step": ended - began,
                "sampling": sampled - began,
                "update": ended - sampled,
                "reward": samples["rewards"].mean().item(),
                "first ratio off 1": (ratios - 1).abs().max().item(),
            }
            print(json.dumps(told), flush=True)


# ---- both ------------------------------------------------------------------------------------------------------------
def both_args(options):
    """flow_grpo.py's options, as --options changes them."""
    return parse_args(flow_grpo.Args, flow_grpo.__doc__, shlex.split(options.options))


def start_theirs(options, folder, number):
    """Run "theirs" in a process of its own. Returns a dict a step."""
    command = [sys.executable, __file__, "--in_process", "--seed", str(number)]
    for name in ("num_prompts", "num_inference_steps", "steps", "their_batch_size", "options"):
        command.append(f"--{name}={getattr(options, name)}")
    steps = []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            steps.append(json.loads(line))
            print("theirs", number, line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"the loop of their shape ended with exit code {process.returncode}")
    return steps


def start_ours(options, folder, number):
    """Run flow_grpo.py, as its users do. Returns a dict a step."""
    name = f"ours{number}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", options.our_ranks]
    command += [ROOT / "flow_grpo.py", "--name", name]
    command += ["--rollout", "local", "--num_inference_steps", options.num_inference_steps, "--sde_window_size", 0]
    command += ["--num_prompts", options.num_prompts, "--micro_batch_size", options.our_batch_size, "--seed", number]
    command += ["--kl_coef", 0, "--lr_schedule", "constant"]
    # two prompts of evaluation, which are not timed
    command += ["--num_steps", options.steps + 1, "--eval_every", 10_000, "--max_prompts", 2]
    command += shlex.split(options.options) + shlex.split(options.our_options)
    subprocess.run([*map(str, command)], cwd=folder, check=True, stdout=sys.stderr)
    lines = (Path(folder) / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps = []
    for row in map(json.loads, lines[1:]):
        step = row["timing_s/step"]
        update = row["timing_s/update_actor"]
        reward = row["critic/rewards/mean"]
        steps.append({"step": step, "sampling": step - update, "update": update, "reward": reward})
        steps[-1]["first ratio off 1"] = abs(row["actor/on_policy_ratio_mean"] - 1) + row["actor/on_policy_ratio_std"]
        print("ours", number, json.dumps(steps[-1]), flush=True)
    return steps


def medians(steps):
    """Of every phase over the steps that are counted: all but the first."""
    return {phase: statistics.median(row[phase] for row in steps[1:]) for phase in PHASES}


def main(options):
    runs = {"ours": [], "theirs": []}
    starters = {"ours": start_ours, "theirs": start_theirs}
    sides = [options.only] if options.only else ["ours", "theirs"]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, options.pairs + 1):
            for side in sides:
                runs[side].append(medians(starters[side](options, folder, number)))

    args = both_args(options)
    num_images = options.num_prompts * args.group_size
    cores = len(os.sched_getaffinity(0))
    print(
        f"\n{num_images} images, {options.num_inference_steps} sampling steps, all but the last trained, "
        f"{args.updates_per_rollout} optimizer steps; cores: {cores}; seconds, medians of {options.pairs} "
        f"runs of {options.steps} steps; images at once: ours {options.our_batch_size} on {options.our_ranks} rank(s), "
        f"theirs {options.their_batch_size}; further options: {options.options or 'none'}; "
        f"of ours: {options.our_options or 'none'}\n"
    )
    print("| phase |", " | ".join(sides), "| ours / theirs, median of pairs |")
    print("|---" * (len(sides) + 2) + "|")
    for phase in PHASES:
        cells = [f"{statistics.median(run[phase] for run in runs[side]):.2f}" for side in sides]
        ratio = ""
        if not options.only:
            pairs = zip(runs["ours"], runs["theirs"], strict=True)
            ratio = f"{statistics.median(ours[phase] / theirs[phase] for ours, theirs in pairs):.3f}"
        print(f"| {phase} |", " | ".join(cells), f"| {ratio} |")


def parse_options(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side, in turn")
    parser.add_argument("--steps", type=int, default=2, help="steps of a run that are counted, after the first")
    parser.add_argument("--num_prompts", type=int, default=32, help="of a rollout, with 8 images each")
    parser.add_argument("--num_inference_steps", type=int, default=10, help="sampling steps, all but the last trained")
    parser.add_argument("--our_ranks", type=int, default=1, help="ranks that share ours")
    parser.add_argument("--options", default="", help="options of flow_grpo.py, for both; one reward")
    parser.add_argument("--our_options", default="", help="further options of flow_grpo.py, for ours")
    parser.add_argument("--our_batch_size", type=int, default=64, help="--micro_batch_size of flow_grpo.py")
    parser.add_argument("--their_batch_size", type=int, default=64, help="images of a sampling and of a training batch")
    parser.add_argument("--only", choices=["ours", "theirs"], help="one side alone")
    parser.add_argument("--short", action="store_true", help="4 prompts, one pair, one step")
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--in_process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.short:
        options.num_prompts = 4
        options.pairs = 1
        options.steps = 1
        options.our_batch_size = 8
        options.their_batch_size = 8
    return options


if __name__ == "__main__":
    options = parse_options()
    if options.in_process:
        run_theirs(options)
    else:
        main(options)
