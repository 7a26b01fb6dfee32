"""The VAE a few images at a time, and the latents of the families whose VAE is diffusers' AutoencoderKL."""

import torch

PIXELS_AT_ONCE = 1024 * 1024  # in a call of the VAE, about 3 GB of activations in fp32: 4 images of 512 x 512


@torch.no_grad()
def decode_in_slices(vae, latents, scale):
    """The VAE's latents (B, ...) -> its pixels (B, 3, ...), of at most PIXELS_AT_ONCE at once, and at least one image.

    scale: pixels of a latent. Where B are more, pixels differ by round-off from what B at once would give, on a CPU by
    1e-6 of [-1, 1].
    """
    slices = latents.split(max(1, PIXELS_AT_ONCE // (scale * latents.shape[2:].numel())))
    return torch.cat([vae.decode(images, return_dict=False)[0] for images in slices])


@torch.no_grad()
def encode_in_slices(vae, pixels):
    """Pixels (B, 3, ...) -> the VAE's latents (B, ...), the mode of its posterior, of so many at once, too."""
    slices = pixels.split(max(1, PIXELS_AT_ONCE // pixels.shape[2:].numel()))
    return torch.cat([vae.encode(images).latent_dist.mode() for images in slices])


def decode_latents(pipe, latents):
    """Latents (B, C, h, w) -> list of B PIL images, as the pipeline decodes them."""
    vae = pipe.vae
    config = vae.config
    latents = latents.to(vae.device, vae.dtype) / config.scaling_factor + (config.shift_factor or 0)
    pixels = decode_in_slices(vae, latents, scale=pipe.vae_scale_factor**2)
    return pipe.image_processor.postprocess(pixels)


def encode_pixels(pipe, images, height, width):
    """List of B PIL images, resized where they differ -> latents (B, C, h, w), the mode of the VAE's posterior."""
    vae = pipe.vae
    config = vae.config
    pixels = pipe.image_processor.preprocess(images, height, width)
    latents = encode_in_slices(vae, pixels.to(vae.device, vae.dtype))
    return (latents - (config.shift_factor or 0)) * config.scaling_factor
