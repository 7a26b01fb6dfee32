"""Flow-GRPO on one page: reinforcement learning of an image model, with plain PyTorch, diffusers and peft.

The model draws eight signs for each of 32 prompts, and an OCR network reads them. Images that read better than their
prompt's other images become more likely, the others less likely. Then it draws again. That is the whole algorithm.

    python nano_flow_grpo.py                      # the embedded model, some minutes on two CPU cores
    python nano_flow_grpo.py --noise_level 0.5    # every line of `Options` is an option

Read this file first and flow_grpo.py next. This file has no sharding over GPUs, no engine, no resuming, no guidance,
no KL and no other model families. It takes 30 steps at a
constant rate. Otherwise the algorithm and its defaults are the same: a test shows that the first updates of
both files have the same gradients.

Equations are those of the paper (Flow-GRPO, arXiv 2505.05470v5), signs those of diffusers: an image x0 and noise make
x = (1 - sigma) x0 + sigma noise, and the model predicts the velocity v = noise - x0. Sampling walks from sigma 1, pure
noise, down to sigma 0, the image.
"""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.cpu import repair_torchvision
from common.rewards.ocr import ocr
from common.sde import image_seed

import torch
import tyro
from PIL.Image import Image
from torch import Tensor

repair_torchvision()  # for a torchvision that does not fit the CPU's torch: diffusers could not be imported
from diffusers import StableDiffusion3Pipeline as Pipeline  # noqa: E402
from diffusers.utils import make_image_grid  # noqa: E402
from peft import LoraConfig, get_peft_model_state_dict  # noqa: E402

ASSETS = Path(__file__).parent / "assets"
LORA_MODULES = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
Conditioning = dict[str, Tensor]  # B encoded prompts, by the names of the transformer's arguments


@dataclass
class Options:
    # ---- the model and its prompts
    model: str = str(ASSETS / "embedded")  # Stable Diffusion 3 or 3.5: a diffusers folder or hub id
    train_prompts: Path = ASSETS / "train_prompts.txt"  # one per line
    eval_prompts: Path = ASSETS / "eval_prompts.txt"  # never trained on: for the score before and after
    image_size: tuple[int, int] = (32, 96)  # height and width in pixels
    max_sequence_length: int = 16  # tokens per prompt (SD3.5: 256)
    out: Path = Path("runs/nano_flow_grpo")  # folder for the LoRA and some images; older ones are overwritten
    seed: int = 1  # of the LoRA's first weights, the order of the prompts and all noise
    # ---- rollout
    num_prompts: int = 32  # prompts per training step
    group_size: int = 8  # images per prompt
    num_inference_steps: int = 3  # sampling steps per image
    sde_steps: int = 1  # the first so many of them add noise and are trained; the last one must not
    noise_level: float = 0.7  # how much noise they add: a in the paper
    # ---- update
    num_steps: int = 30  # training steps: a rollout and its updates each
    updates_per_rollout: int = 2  # optimizer steps per rollout, each on its share of the images
    clip_range: float = 1e-3  # the ratio is clipped to 1 +- this; PPO's 0.2 would never act, see gaussian_log_prob
    adv_clip_max: float = 5.0  # advantages are clamped to +- this
    learning_rate: float = 1.5e-3  # of AdamW


def reward(images: list[Image], prompts: list[str]) -> list[float]:
    """One number per image, larger is better. Put your own here: nothing below knows what is rewarded."""
    return [scored["score"] for scored in ocr(images, prompts, [{}] * len(prompts))]


# ---- the model as a policy -------------------------------------------------------------------------------------------
def load(options: Options) -> Pipeline:
    """The pipeline with a LoRA on its transformer's attention, the only weights that are trained."""
    pipe = Pipeline.from_pretrained(options.model)
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    pipe.scheduler.set_timesteps(options.num_inference_steps, device=pipe.device)
    pipe.transformer.requires_grad_(False)
    # one matrix of each pair starts random and the other at 0, so that the LoRA changes nothing until it has learned
    torch.manual_seed(options.seed)
    config = LoraConfig(r=16, lora_alpha=32, init_lora_weights="gaussian", target_modules=LORA_MODULES)
    pipe.transformer.add_adapter(config)
    return pipe


@torch.no_grad()
def encode(pipe: Pipeline, options: Options, prompts: list[str]) -> Conditioning:
    length = options.max_sequence_length
    encoded = pipe.encode_prompt(prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=length)
    embeds, _, pooled, _ = encoded  # (B, L, C), and (B, P) for the prompt as a whole; guidance would need the others
    return {"encoder_hidden_states": embeds, "pooled_projections": pooled}


def policy(
    pipe: Pipeline,
    prompts: Conditioning,
    x: Tensor,
    i: int,
    noise_level: float,
) -> tuple[Tensor, float]:
    """Sampling step i from x (B, C, h, w) as a policy: the mean and deviation of the Gaussian that draws the next x.

    This is eq. 9. With dt = sigma_next - sigma, eps ~ N(0, 1) and q = noise_level sqrt(sigma / (1 - sigma)),
        x_next = x + [v + q^2 / (2 sigma) (x + (1 - sigma) v)] dt + q sqrt(-dt) eps.
    The term with q^2 removes noise as fast as eps adds it, so that the images stay as good as the ODE's. Without noise
    (noise_level 0) the step is the ODE's: x + v dt.
    """
    timestep = pipe.scheduler.timesteps[i].expand(len(x))  # (B,), 1000 sigma
    v = pipe.transformer(x, timestep=timestep, **prompts).sample  # (B, C, h, w)

    sigma, sigma_next = pipe.scheduler.sigmas[i : i + 2].tolist()
    dt = sigma_next - sigma  # negative, as sigma falls: where the paper has sqrt(dt) we need sqrt(-dt)
    # the first sigma is 1, where q would be infinite: there the second sigma stands for it, as in the paper's code
    capped_sigma = min(sigma, pipe.scheduler.sigmas[1].item())
    q = noise_level * math.sqrt(sigma / (1 - capped_sigma))
    noise = x + (1 - sigma) * v  # how much of it the model sees in x, as v = noise - x0
    mean = x + (v + q**2 / (2 * sigma) * noise) * dt
    return mean, q * math.sqrt(-dt)


def gaussian_log_prob(x: Tensor, mean: Tensor, std: float) -> Tensor:
    """log N(x; mean, std) of B samples (B,): the *mean* over the elements of a latent, as in the paper's code.

    The density itself would be the sum, over thousands of elements, and its ratio would leave any clip range at once.
    """
    eps = (x - mean) / std
    log_density = -(eps**2) / 2 - math.log(std) - math.log(2 * math.pi) / 2  # (B, C, h, w)
    return log_density.flatten(1).mean(1)


# ---- rollout ---------------------------------------------------------------------------------------------------------
class Transition(NamedTuple):
    """One noisy sampling step of B images."""

    i: int  # which step of the schedule
    x: Tensor  # (B, C, h, w), the state
    x_next: Tensor  # (B, C, h, w), the action: where the step went
    log_prob: Tensor  # (B,), how likely that was for the policy that went there


class Rollout(NamedTuple):
    """B images and how they came about."""

    images: list[Image]
    prompts: Conditioning
    transitions: list[Transition]  # of the SDE steps


def draw_noise(pipe: Pipeline, options: Options, generators: list[torch.Generator]) -> Tensor:
    """Noise (B, C, h, w). Each image has its own generator, on the CPU: the same noise in any batch, on any machine."""
    sides = [pixels // pipe.vae_scale_factor for pixels in options.image_size]
    shape = (1, pipe.transformer.config.in_channels, *sides)
    noise = [torch.randn(shape, generator=generator) for generator in generators]
    return torch.cat(noise).to(pipe.device)


@torch.no_grad()
def sample(
    pipe: Pipeline,
    options: Options,
    prompts: Conditioning,
    seeds: list[int],
    sde_steps: int,
) -> Rollout:
    """Draw B images, the first sde_steps of their sampling steps with noise."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = draw_noise(pipe, options, generators)  # pure noise, sigma 1
    transitions = []
    for i in range(options.num_inference_steps):
        if i < sde_steps:
            mean, std = policy(pipe, prompts, x, i, options.noise_level)
            x_next = mean + std * draw_noise(pipe, options, generators)
            log_prob = gaussian_log_prob(x_next, mean, std)
            transitions.append(Transition(i, x, x_next, log_prob))
        else:
            x_next, _ = policy(pipe, prompts, x, i, noise_level=0.0)
        x = x_next

    latents = x / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    pixels = pipe.vae.decode(latents).sample  # (B, 3, H, W) in [-1, 1]
    return Rollout(pipe.image_processor.postprocess(pixels), prompts, transitions)


# ---- advantage and update --------------------------------------------------------------------------------------------
def compute_advantages(rewards: Tensor, group_size: int, adv_clip_max: float) -> Tensor:
    """How much better each image is than the others of its prompt (eq. 4), from rewards (N,), group after group.

    The group's mean stands for PPO's critic. The deviation is that of all N rewards, as in the paper's code. The paper
    divides by the group's own, which makes as much of a group of nearly equal images as of any other.
    """
    groups = rewards.view(-1, group_size)
    spread = groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)
    is_equal = spread <= 1e-6 * groups.abs().amax(1, keepdim=True)  # but for round-off: nothing to learn from
    centred = (groups - groups.mean(1, keepdim=True)).masked_fill(is_equal, 0.0)
    advantages = centred / (rewards.std(correction=0) + 1e-4)
    return advantages.clamp(-adv_clip_max, adv_clip_max).flatten()


def policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Minus the clipped objective of PPO and of eq. 5, the mean over B samples; we leave out eq. 5's KL."""
    ratio = (log_prob - old_log_prob).exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    # the larger loss is the pessimistic one: a ratio that is already where its advantage wants it gains nothing more
    return torch.maximum(unclipped_loss, clipped_loss).mean()


def update(
    pipe: Pipeline,
    options: Options,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    advantages: Tensor,
) -> None:
    """One optimizer step: the mean of the loss over the rollout's images and SDE steps (eq. 5)."""
    for i, x, x_next, old_log_prob in rollout.transitions:
        # how likely is the same action now? x and x_next are data, the mean has the gradient
        mean, std = policy(pipe, rollout.prompts, x, i, options.noise_level)
        log_prob = gaussian_log_prob(x_next, mean, std)
        loss = policy_loss(log_prob, old_log_prob, advantages, options.clip_range)
        (loss / len(rollout.transitions)).backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()


# ---- the loop --------------------------------------------------------------------------------------------------------
def prompt_order(num_prompts: int, seed: int) -> Iterator[int]:
    """Numbers of prompts without end: all of them in random order, then all of them in another order, and so on."""
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        yield from torch.randperm(num_prompts, generator=generator).tolist()


def evaluate(pipe: Pipeline, options: Options, when: str) -> None:
    """Print the mean reward of the held-out prompts, sampled without noise and from the same seeds each time."""
    prompts = options.eval_prompts.read_text().splitlines()
    seeds = [image_seed("eval", 0, index) for index in range(len(prompts))]
    encoded = encode(pipe, options, prompts)
    images = sample(pipe, options, encoded, seeds, sde_steps=0).images
    shown = images[:8]
    make_image_grid(shown, rows=len(shown), cols=1).save(options.out / f"{when}.png")
    score = sum(reward(images, prompts)) / len(prompts)
    print(f"{when} training: held-out reward {score:.3f}", flush=True)


def main(options: Options) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    pipe = load(options)
    parameters = [p for p in pipe.transformer.parameters() if p.requires_grad]
    # the loss is a mean over thousands of elements: its gradients are smaller than Adam's usual eps, 1e-8
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=1e-4, eps=1e-15)
    train_prompts = options.train_prompts.read_text().splitlines()
    order = prompt_order(len(train_prompts), options.seed)
    num_images = options.num_prompts * options.group_size
    mini_batches = torch.arange(num_images).chunk(options.updates_per_rollout)  # numbers of images
    evaluate(pipe, options, "before")

    for step in range(1, options.num_steps + 1):
        started = time.time()
        # sample group_size images of each prompt, a mini-batch at a time
        prompts = [train_prompts[row] for row in itertools.islice(order, options.num_prompts)]
        encoded = encode(pipe, options, prompts)
        rollouts = []
        for rows in mini_batches:
            conditioning = {name: tensor[rows // options.group_size] for name, tensor in encoded.items()}
            seeds = [image_seed(options.seed, step, row) for row in rows.tolist()]
            rollouts.append(sample(pipe, options, conditioning, seeds, options.sde_steps))

        # compare the images of a prompt with each other
        images = [image for rollout in rollouts for image in rollout.images]
        prompt_of_image = [prompt for prompt in prompts for _ in range(options.group_size)]
        rewards = torch.tensor(reward(images, prompt_of_image), dtype=torch.float64)  # (N,)
        advantages = compute_advantages(rewards, options.group_size, options.adv_clip_max)
        advantages = advantages.float().to(pipe.device)

        # learn: only the first update is on-policy, the later ones are why the loss has a ratio and a clip
        for rollout, rows in zip(rollouts, mini_batches, strict=True):
            update(pipe, options, optimizer, rollout, advantages[rows])
        print(f"step {step}: reward {rewards.mean():.3f}, {time.time() - started:.1f} s", flush=True)

    evaluate(pipe, options, "after")
    settings = pipe.transformer.peft_config["default"].to_dict()
    lora = get_peft_model_state_dict(pipe.transformer)
    pipe.save_lora_weights(options.out, lora, transformer_lora_adapter_metadata=settings)
    print(f'load it with pipe.load_lora_weights("{options.out}")')


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
