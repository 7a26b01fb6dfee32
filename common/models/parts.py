"""What several families need beside common/models/family.py: checks, schedules, targets of a LoRA, Qwen-Image's VAE."""

from typing import TYPE_CHECKING

from common.models.family import Family
from common.models.vae import decode_in_slices, encode_in_slices

import numpy as np
import torch
from PIL.Image import Image

if TYPE_CHECKING:  # importing it takes seconds
    import diffusers

# lora_target_modules of attention, and of attention with weights of its own for the prompt's tokens
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT_ATTENTION = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


# ---- checks ----------------------------------------------------------------------------------------------------------
def check_multiples(height: int, width: int, unit: int) -> None:
    """Raise ValueError for a side that is no multiple of `unit`, the side of a token in pixels."""
    if height % unit or width % unit:
        raise ValueError(f"--image_size {height} {width}: must be multiples of {unit}")


def check_no_guidance(guidance_scale: float) -> None:
    """Raise ValueError for guidance above 1, which a distilled model cannot take."""
    if guidance_scale > 1:
        raise ValueError(f"--guidance_scale {guidance_scale:g}: this model is distilled and takes no guidance: pass 1")


# ---- schedules -------------------------------------------------------------------------------------------------------
def sigma_schedule(
    scheduler: "diffusers.SchedulerMixin", **options: float | list[float] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Timesteps (T,) in (0, 1000] and sigmas (T + 1,) from about 1 to 0 of a scheduler, fp32 on the CPU.

    The scheduler's sigmas must be flow matching's; FlowMatchEulerDiscreteScheduler is the usual one. `options` are
    arguments of its set_timesteps, as the family's pipeline passes them: num_inference_steps or sigmas, and mu.
    Timesteps are not rounded.
    """
    scheduler.set_timesteps(device="cpu", **options)
    return scheduler.timesteps.float().clone(), scheduler.sigmas.float().clone()


def even_sigmas(num_inference_steps: int) -> list[float]:
    """T sigmas from 1 to 1 / T, equally far from each other, from which most pipelines start."""
    return np.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()


def shifted_schedule(
    scheduler: "diffusers.SchedulerMixin", sigmas: list[float], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """sigma_schedule of T sigmas from 1 to 1 / T, shifted by a mu that grows with the number of an image's tokens."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift  # slow

    c = scheduler.config
    mu = calculate_shift(num_tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
    return sigma_schedule(scheduler, mu=mu, sigmas=sigmas)


# ---- AutoencoderKLQwenImage, to which an image is a video of one frame: methods of a family --------------------------
def latent_statistics(vae: "diffusers.AutoencoderKLQwenImage") -> torch.Tensor:
    """Mean and standard deviation of the VAE's latents, stacked: (2, C, 1, 1, 1)."""
    statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=vae.device)
    return statistics.view(2, -1, 1, 1, 1)


def decode_frames(model: Family, latents: torch.Tensor) -> torch.Tensor:
    """A family's `decode_vae`: latents (B, C, h, w) -> pixels (B, 3, H, W), as the pipeline decodes them."""
    pipe = model.pipe
    mean, std = latent_statistics(pipe.vae)
    latents = latents.to(pipe.vae.device)[:, :, None] * std + mean  # (B, C, 1 frame, h, w)
    return decode_in_slices(pipe.vae, latents, scale=pipe.vae_scale_factor**2)[:, :, 0]


def encode_frames(model: Family, images: list[Image], height: int, width: int) -> torch.Tensor:
    """A family's `encode_vae`: B PIL images -> latents (B, C, h, w), the mode of the VAE's posterior."""
    pipe = model.pipe
    pixels = pipe.image_processor.preprocess(images, height, width)
    pixels = pixels.to(pipe.vae.device)[:, :, None]  # (B, 3, 1 frame, height, width)
    mean, std = latent_statistics(pipe.vae)
    return ((encode_in_slices(pipe.vae, pixels) - mean) / std)[:, :, 0]
