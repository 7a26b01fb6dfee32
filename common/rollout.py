"""A rollout's request and its trajectories: the same two records, whichever engine samples."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.sde import SDEStepOutput, draw_noise

import torch
from torch.utils._pytree import tree_map_only

# PIL images, or videos: lists of PIL images
Images = list


def rows_of(tensors: dict[str, torch.Tensor], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Some rows (n,) of each tensor, wherever it is. They are moved once to a device: a GPU waits for every index."""
    rows_on = functools.cache(rows.to)
    named = tensors.items()
    return {name: tensor[rows_on(tensor.device)] for name, tensor in named}


@dataclass
class RolloutRequest:
    """B images or videos of U prompts, in T sampling steps: all that a policy needs to make them."""

    conditioning: dict[str, torch.Tensor]
    """the transformer's inputs about the U prompts, (U, ...) each"""
    negative_conditioning: dict[str, torch.Tensor] | None
    """the same for their negative prompts, or for the one that all have, (1, ...) each; None without guidance"""
    prompt_index: torch.Tensor
    """(B,), each image's row of `conditioning`"""
    seeds: list[int]
    """B seeds of each image's noise: its initial latents first, unless they are given, then a draw for each SDE step"""
    timesteps: torch.Tensor
    """(T,) fp32 in (0, 1000], best on the model's device"""
    sigmas: torch.Tensor
    """(T + 1,) fp32 in [0, 1]"""
    latent_shape: tuple[int, ...]
    """(C, h, w) of one image; (C, f, h, w) of a video"""
    height: int
    """of an image in pixels"""
    width: int
    """of an image in pixels"""
    sde_steps: tuple[int, ...] = ()
    """the W SDE steps, of 0..T-1; the others are ODE steps"""
    sde_type: str = "sde"
    """step kind of the SDE steps: see sde_step"""
    noise_level: float = 0.0
    """scale of the noise that SDE steps inject"""
    guidance_scale: float = 1.0
    """as the family's predict_velocity takes it; 1 needs no second pass"""
    sigma_max: float | None = None
    """see sde_step; None: the schedule's second sigma, sigmas[1]"""
    initial_latents: torch.Tensor | None = None
    """(B, C, h, w) at the first sigma; None: drawn from the seeds"""
    first_step: int = 0
    """this request's first sampling step in the whole schedule, where it is the rest of a longer request"""

    def __post_init__(self) -> None:
        if self.sigma_max is None:
            self.sigma_max = self.sigmas[1].item()

    @property
    def step_numbers(self) -> tuple[int, ...]:
        """The W SDE steps, numbered in the whole schedule."""
        return tuple(self.first_step + i for i in self.sde_steps)

    def first_latents(self, generators: list[torch.Generator], device: torch.device | str) -> torch.Tensor:
        """(B, C, h, w) at the first sigma: `initial_latents`, or the first draw of each of the B generators."""
        if self.initial_latents is not None:
            return self.initial_latents
        return draw_noise((len(generators), *self.latent_shape), generators, device)

    def cpu(self) -> "RolloutRequest":
        """The same request with its tensors on the CPU, for another process."""
        return RolloutRequest(**tree_map_only(torch.Tensor, torch.Tensor.cpu, vars(self)))

    def select(self, rows: torch.Tensor) -> "RolloutRequest":
        """The same request for some of its images, `rows` (N,); conditioning is expanded to one row per image."""
        prompts = self.prompt_index[rows]  # (N,)
        start = self.initial_latents
        if start is not None:
            start = start[rows]
        return replace(
            self,
            conditioning=rows_of(self.conditioning, prompts),
            negative_conditioning=self.negatives_of(prompts),
            prompt_index=torch.arange(len(prompts)),
            seeds=[self.seeds[row] for row in rows.tolist()],
            initial_latents=start,
        )

    def negatives_of(self, prompts: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """The negative conditioning of some prompts (n,): (n, ...), or the one row (1, ...) of all."""
        negative = self.negative_conditioning
        if negative is None or all(len(tensor) == 1 for tensor in negative.values()):
            return negative
        return rows_of(negative, prompts)

    def select_steps(self, start: int, end: int) -> "RolloutRequest":
        """The same request for the sampling steps start .. end - 1 of its schedule."""
        return replace(
            self,
            timesteps=self.timesteps[start:end],
            sigmas=self.sigmas[start : end + 1],
            sde_steps=tuple(i - start for i in self.sde_steps if start <= i < end),
            first_step=self.first_step + start,
        )


@dataclass
class Trajectories:
    """How B images were sampled in T steps, W of them SDE steps, in the request's order; every tensor is fp32."""

    latents: torch.Tensor
    """(B, T + 1, ...), from noise to the final latents; (B, 1, ...), the final ones, where W is 0"""
    prev_sample_means: torch.Tensor
    """(B, W, ...), of the SDE steps"""
    log_probs: torch.Tensor
    """(B, W), of the policy that sampled, or of the one that a script has scored the samples by"""
    transition_stds: torch.Tensor
    """(B, W)"""
    images: Images
    """B PIL images, or B videos: lists of PIL frames"""
    velocities: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """(B, W, ...), of the SDE steps, as recompute_log_probs of the scripts computes them; otherwise empty"""

    @staticmethod
    def from_steps(initial: torch.Tensor, outputs: Sequence[SDEStepOutput], images: Images) -> "Trajectories":
        """From the initial latents (B, ...), the SDEStepOutput of each of the T steps, SDE and ODE, and the images."""
        sde_outputs = [out for out in outputs if out.log_prob is not None]
        if not sde_outputs:
            final = outputs[-1].prev_sample
            no_steps = initial.new_zeros(len(initial), 0)
            return Trajectories(
                latents=final[:, None],
                prev_sample_means=no_steps,
                log_probs=no_steps,
                transition_stds=no_steps,
                images=images,
            )
        return Trajectories(
            latents=torch.stack([initial, *(out.prev_sample for out in outputs)], 1),
            prev_sample_means=torch.stack([out.prev_sample_mean for out in sde_outputs], 1),
            log_probs=torch.stack([out.log_prob for out in sde_outputs], 1),
            transition_stds=torch.stack([out.transition_std for out in sde_outputs], 1),
            images=images,
        )

    def select(self, rows: torch.Tensor) -> "Trajectories":
        """The trajectories of some of the images, `rows` (N,)."""
        return Trajectories(
            latents=self.latents[rows],
            prev_sample_means=self.prev_sample_means[rows],
            log_probs=self.log_probs[rows],
            transition_stds=self.transition_stds[rows],
            images=[self.images[row] for row in rows.tolist()],
        )

    def to(self, device: torch.device | str) -> "Trajectories":
        """The same trajectories with their tensors on `device`."""
        return Trajectories(**tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), vars(self)))

    @staticmethod
    def cat(parts: Sequence["Trajectories"]) -> "Trajectories":
        """The images of several trajectories as one, part after part."""
        return Trajectories(
            latents=torch.cat([part.latents for part in parts]),
            prev_sample_means=torch.cat([part.prev_sample_means for part in parts]),
            log_probs=torch.cat([part.log_probs for part in parts]),
            transition_stds=torch.cat([part.transition_stds for part in parts]),
            images=[image for part in parts for image in part.images],
        )
