"""The VAE on a few images at a time, and pixels as images."""

from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:  # importing it takes seconds
    import diffusers

PIXELS_AT_ONCE = 1024 * 1024  # per call of the VAE: 4 images of 512 x 512, about 3 GB of activations in fp32
PIXELS_ON_CPU = 256 * 1024  # where activations that leave the caches are slow


def images_at_once(pixels_of_one: int, device: torch.device) -> int:
    """How many images a call of the VAE takes: as many as have PIXELS_AT_ONCE pixels, on a CPU PIXELS_ON_CPU; at least
    one."""
    pixels = PIXELS_AT_ONCE if device.type != "cpu" else min(PIXELS_AT_ONCE, PIXELS_ON_CPU)
    return max(1, pixels // pixels_of_one)


def decode_in_slices(vae: "diffusers.ModelMixin", latents: torch.Tensor, scale: int) -> torch.Tensor:
    """The VAE's latents (B, ...) -> its pixels (B, 3, ...); `scale` is the number of pixels per latent.

    A call takes `images_at_once`. Pixels in [-1, 1] differ from those of a single call for all B by round-off, on a CPU
    by 1e-6. Where latents have a gradient, each call is checkpointed: the backward pass decodes again, and holds the
    activations of one call.
    """

    def decode(images: torch.Tensor) -> torch.Tensor:
        return vae.decode(images, return_dict=False)[0]

    num_images = images_at_once(scale * latents.shape[2:].numel(), latents.device)
    slices = [images.to(vae.dtype) for images in latents.split(num_images)]
    if torch.is_grad_enabled() and latents.requires_grad:
        return torch.cat([checkpoint(decode, part, use_reentrant=False, preserve_rng_state=False) for part in slices])
    return torch.cat([decode(part) for part in slices])


@torch.no_grad()
def encode_in_slices(vae: "diffusers.ModelMixin", pixels: torch.Tensor) -> torch.Tensor:
    """Pixels (B, 3, ...) -> the VAE's latents (B, ...) in fp32, in calls as decoding's; of a posterior its mode."""
    num_images = images_at_once(pixels.shape[2:].numel(), pixels.device)
    slices = pixels.split(num_images)
    encoded = [vae.encode(images.to(vae.dtype)) for images in slices]
    # AutoencoderDC has no posterior
    latents = [one.latent_dist.mode() if hasattr(one, "latent_dist") else one.latent for one in encoded]
    return torch.cat([of_slice.float() for of_slice in latents])


def to_bfloat16(vae: "diffusers.ModelMixin", device: torch.device | str) -> None:
    """Let the VAE compute in bf16. Buffers, among them FLUX.2's statistics of latents, stay in fp32.

    device: where it will compute. On a CPU kernels of images are in torch's channels_last, which is faster.
    """
    on_cpu = torch.device(device).type == "cpu"
    for parameter in vae.parameters():
        layout = torch.channels_last if on_cpu and parameter.ndim == 4 else torch.preserve_format
        parameter.data = parameter.data.to(torch.bfloat16, memory_format=layout)


def to_unit_range(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels in about [-1, 1] -> in [0, 1], in fp32 and with their gradient, as diffusers' image processor does it."""
    return (pixels.float() / 2 + 0.5).clamp(0, 1)


def quantize(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels in [0, 1], (B, 3, H, W) or (B, 3, F, H, W) of videos -> uint8 (B, H, W, 3) or (B, F, H, W, 3).

    Rounded as diffusers' image processor does it, but on the pixels' device: a quarter of the bytes leaves it.
    """
    return (pixels * 255).round().to(torch.uint8).movedim(1, -1).contiguous()
