"""The noise protocol: every image has a generator of its own, so that neither ranks nor batches change an image.

An image's generator draws its initial latents first, then once for each SDE step; ODE steps draw nothing.
"""

import hashlib

import torch


def image_seed(seed, step, index):
    """An image's noise seed, from (run seed, training step, global image index) alone: the same on all ranks."""
    text = f"{seed} {step} {index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return number >> 1  # 63 bits: torch takes no more


def draw_noise(shape, generator=None, device="cpu", dtype=torch.float32):
    """Standard normal noise of `shape` (B, ...) on `device`.

    With a list of B generators each image draws its own. Noise is drawn where the generator lives (by our protocol on
    the CPU) and then moved: the same numbers on any device.

    Raises:
        ValueError: there are not as many generators as images.
    """
    if isinstance(generator, list | tuple):
        if len(generator) != shape[0]:
            raise ValueError(f"{len(generator)} generators for a batch of {shape[0]}")
        drawn = [draw_noise((1, *shape[1:]), g, g.device, dtype) for g in generator]
        return torch.cat(drawn).to(device)  # at once: each move to a GPU waits for it
    drawn_on = device if generator is None else generator.device
    noise = torch.randn(shape, generator=generator, device=drawn_on, dtype=dtype)
    return noise.to(device)
