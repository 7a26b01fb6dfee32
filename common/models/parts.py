"""What some families need beside common/models/family.py: those that are distilled, or whose schedule is shifted."""

from typing import TYPE_CHECKING

from common.models.family import sigma_schedule

import torch

if TYPE_CHECKING:
    import diffusers


def check_no_guidance(guidance_scale: float) -> None:
    """Raise ValueError for guidance above 1, which a distilled model cannot take."""
    if guidance_scale > 1:
        raise ValueError(f"--guidance_scale {guidance_scale:g}: this model is distilled and takes no guidance: pass 1")


def shifted_schedule(
    scheduler: "diffusers.SchedulerMixin", sigmas: list[float], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """sigma_schedule of T sigmas from 1 to 1 / T, shifted by a mu that grows with the number of an image's tokens."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift  # slow

    c = scheduler.config
    mu = calculate_shift(num_tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
    return sigma_schedule(scheduler, mu=mu, sigmas=sigmas)
