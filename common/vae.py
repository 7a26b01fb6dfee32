"""The latents of the families whose VAE is diffusers' AutoencoderKL."""

import torch


@torch.no_grad()
def decode_latents(pipe, latents):
    """Latents (B, C, h, w) -> list of B PIL images, as the pipeline decodes them."""
    vae = pipe.vae
    config = vae.config
    latents = latents.to(vae.device, vae.dtype) / config.scaling_factor + (config.shift_factor or 0)
    pixels = vae.decode(latents, return_dict=False)[0]
    return pipe.image_processor.postprocess(pixels)


@torch.no_grad()
def encode_pixels(pipe, images, height, width):
    """List of B PIL images, resized where they differ -> latents (B, C, h, w), the mode of the VAE's posterior."""
    vae = pipe.vae
    config = vae.config
    pixels = pipe.image_processor.preprocess(images, height, width)
    latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()
    return (latents - (config.shift_factor or 0)) * config.scaling_factor
