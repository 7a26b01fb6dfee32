"""What options a family cannot take, and the latents of the families whose VAE is diffusers' AutoencoderKL."""

import torch


def check_image(height, width, num_frames, unit):
    """Raises ValueError where a side is no multiple of `unit` pixels, or where a video is asked for."""
    if num_frames > 1:
        raise ValueError(f"--num_frames {num_frames}: this model makes images, of 1 frame")
    check_multiples(height, width, unit)


def check_no_guidance(guidance_scale):
    """Raises ValueError where guidance is asked of a model that takes none."""
    if guidance_scale > 1:
        raise ValueError(f"--guidance_scale {guidance_scale:g}: this model was distilled and takes none: pass 1")


def check_multiples(height, width, unit):
    """Raises ValueError where a side is no multiple of `unit` pixels, those of a token's side."""
    if height % unit or width % unit:
        raise ValueError(f"--image_size {height} {width}: must be multiples of {unit}")


@torch.no_grad()
def decode_latents(pipe, latents):
    """Latents (B, C, h, w) -> list of B PIL images, as the pipeline decodes them."""
    vae = pipe.vae
    config = vae.config
    latents = latents.to(vae.device, vae.dtype) / config.scaling_factor + config.shift_factor
    pixels = vae.decode(latents, return_dict=False)[0]
    return pipe.image_processor.postprocess(pixels)


@torch.no_grad()
def encode_pixels(pipe, images, height, width):
    """List of B PIL images, resized where they differ -> latents (B, C, h, w), the mode of the VAE's posterior."""
    vae = pipe.vae
    config = vae.config
    pixels = pipe.image_processor.preprocess(images, height, width)
    latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()
    return (latents - config.shift_factor) * config.scaling_factor
