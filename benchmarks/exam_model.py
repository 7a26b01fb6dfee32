"""A model whose every answer is known: a Gaussian, or a mixture of two, in 256 latents. The family that sits the exam.

    torchrun --standalone flow_grpo.py --family benchmarks/exam_model.py:Gaussian \\
        --reward benchmarks/exam_model.py:height --lora_rank 0 --rollout local --image_size 16 16

z is the projection of a sample's D = 256 latents on one direction; the reward is z, and the D - 1 other directions are
standard normal. The velocity is the exact one of a mixture's path. At every sigma of the schedule its coefficients have
a trainable correction, 0 at first, so that the model before training and every tilted distribution p exp(z / beta) are
both among what it can be. An image has 24 bits for each latent: it is exact to 4e-6.
Everything else (--model's pipeline: text encoders, VAE) is there because scripts load it, and is not used.
docs/lab/exam.md has the mathematics.
"""

from pathlib import Path
from typing import ClassVar

from common.models.family import Conditioning, Family, Schedule, Shapes

import numpy as np
import torch
from PIL import Image
from torch import Tensor

NUM_STEPS = 10  # sampling steps; the knots of the correction are their sigmas 1, 0.9, ..., 0
SIDE = 16  # an image is SIDE x SIDE pixels, a latent each
DIMENSION = SIDE * SIDE
SCALE = 2**18  # a latent x is round(x * SCALE) + 2^23, in three bytes


class Field(torch.nn.Module):
    """v(x, sigma) = along(z, sigma) u + slope(sigma) (x - z u), with u = (1, ..., 1) / sqrt(D) and z = x u.

    along(z) = sum_k share_k(z) (a_k z + b_k), share = softmax_k(g_k z + l_k). For a mixture of weights w_k, means m_k
    and deviations s_k it is E[noise - x0 | z] if, with V_k = (1 - sigma)^2 s_k^2 + sigma^2 and m = (1 - sigma) m_k,
    a_k = (sigma - (1 - sigma) s_k^2) / V_k, b_k = -a_k m - m_k, g_k = m / V_k, l_k = log w_k - m^2 / (2 V_k), where all
    s_k are equal. `table` (knots, 4 n + 1) is the correction to a, b, g, l of n components, and to the slope.
    """

    _no_split_modules: ClassVar[list[str]] = []  # FSDP's units

    def __init__(self, weights: tuple[float, ...], means: tuple[float, ...], std: float) -> None:
        super().__init__()
        self.mixture = (weights, means, std)
        self.table = torch.nn.Parameter(torch.zeros(NUM_STEPS + 1, 4 * len(means) + 1))
        self.history: list[Tensor] = []  # the trained table before every optimizer step

    def coefficients(self, sigma: Tensor, table: Tensor) -> tuple[list[Tensor], Tensor]:
        """[a, b, g, l], each (B, n), and the slope (B, 1) of the other directions, at sigma (B,)."""
        weights, means, std = (torch.tensor(value, dtype=table.dtype) for value in self.mixture)
        s = sigma.to(table.dtype)[:, None]
        variance = ((1 - s) * std) ** 2 + s**2
        m = (1 - s) * means
        a = ((s - (1 - s) * std**2) / variance).expand_as(m)
        exact = [a, -a * m - means, m / variance, weights.log() - m**2 / (2 * variance)]
        slope = (2 * s - 1) / ((1 - s) ** 2 + s**2)
        place = (1 - sigma.double()) * NUM_STEPS  # among the knots; linear between two of them
        lower = place.round().where((place - place.round()).abs() < 1e-4, place.floor()).clamp(0, NUM_STEPS - 1)
        share = (place - lower).clamp(0, 1).to(table.dtype)[:, None]
        correction = (1 - share) * table[lower.long()] + share * table[lower.long() + 1]
        parts = correction[:, :-1].chunk(4, dim=1)
        return [part + change for part, change in zip(exact, parts, strict=True)], slope + correction[:, -1:]

    def along(self, z: Tensor, sigma: Tensor, table: Tensor) -> Tensor:
        """The velocity (B,) of the projections z (B,)."""
        (a, b, g, bias), _ = self.coefficients(sigma, table)
        shares = (g * z[:, None] + bias).softmax(1)
        return (shares * (a * z[:, None] + b)).sum(1)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The velocity (B, D) at x (B, D) and sigma (B,)."""
        is_trained = torch.is_grad_enabled() and self.table.requires_grad
        if is_trained and not (self.history and torch.equal(self.history[-1], self.table)):
            self.history.append(self.table.detach().clone())
        (a, b, g, bias), slope = self.coefficients(sigma, self.table)
        u = DIMENSION**-0.5
        z = u * x.sum(1, keepdim=True)  # (B, 1)
        velocity = ((g * z + bias).softmax(1) * (a * z + b)).sum(1, keepdim=True)
        return velocity * u + slope * (x - z * u)

    def save_config(self, folder: Path) -> None:
        """A checkpoint's adapter/ asks for it; the mixture is the family's."""


class Gaussian(Family):
    """z ~ N(0, 1)."""

    lora_target_modules = ()
    mixture: ClassVar[tuple[tuple[float, ...], tuple[float, ...], float]] = ((1.0,), (0.0,), 1.0)
    loaded: ClassVar[list["Gaussian"]] = []  # in this process: the last one is the run's

    def __init__(self, pipe: object) -> None:
        super().__init__(pipe)
        self.transformer = self.pipe.transformer = Field(*self.mixture)
        self.loaded.append(self)

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        if (height, width, num_frames) != (SIDE, SIDE, 1) or guidance_scale != 1:
            raise ValueError(f"--image_size: must be {SIDE} {SIDE}, of one frame and without guidance")

    @staticmethod
    def conditioning_shapes(transformer: object, max_sequence_length: int) -> Shapes:
        return {"prompt": (1,)}

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        return {"prompt": torch.zeros(len(prompts), 1)}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        sigmas = torch.linspace(1, 0, num_inference_steps + 1)
        return 1000 * sigmas[:-1], sigmas, (1, SIDE, SIDE)

    def forward(self, latents: Tensor, timestep: Tensor, conditioning: Conditioning) -> Tensor:
        return self.transformer(latents.flatten(1), timestep / 1000).view_as(latents)

    def decode(self, latents: Tensor) -> list[Image.Image]:
        return to_images(latents)

    def encode_images(self, images: list[Image.Image], height: int, width: int) -> Tensor:
        return to_latents(images)

    def picture_tensors(self) -> list[Tensor]:
        return [torch.tensor([float(SCALE)])]


class Mixture(Gaussian):
    """z ~ N(-1.5, 0.5^2) / 2 + N(1.5, 0.5^2) / 2."""

    mixture = ((0.5, 0.5), (-1.5, 1.5), 0.5)
    loaded: ClassVar[list[Gaussian]] = []


def to_images(latents: Tensor) -> list[Image.Image]:
    """Latents (B, 1, 16, 16) -> B images whose pixels' three bytes are the latents; those beyond +-32 are cut."""
    numbers = (latents[:, 0].double() * SCALE).round().clamp(1 - 2**23, 2**23 - 1).long().numpy() + 2**23
    pixels = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], -1).astype(np.uint8)
    return [Image.fromarray(rows) for rows in pixels]


def to_latents(images: list[Image.Image]) -> Tensor:
    """The reverse of to_images."""
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in images]).astype(np.int64)
    numbers = (pixels[..., 0] << 16) + (pixels[..., 1] << 8) + pixels[..., 2] - 2**23
    return torch.from_numpy(numbers / SCALE).float()[:, None]


def height(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """The reward: z."""
    return (to_latents(images).flatten(1).double().sum(1) / DIMENSION**0.5).tolist()
