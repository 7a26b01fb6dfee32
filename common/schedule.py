"""When a sampler takes its steps, and which of them are stochastic."""

import math
import random
from dataclasses import replace


def sigma_schedule(scheduler, **options):
    """The sampler's own schedule: timesteps (T,) in (0, 1000] and sigmas (T + 1,) from about 1 to 0, fp32 on the CPU.

    `scheduler` is a diffusers one whose sigmas are flow matching's, FlowMatchEulerDiscreteScheduler most
    often; `options` are of its set_timesteps, given as the family's pipeline gives them: num_inference_steps or sigmas,
    and mu. Timesteps stay floats.
    """
    scheduler.set_timesteps(device="cpu", **options)
    return scheduler.timesteps.float().clone(), scheduler.sigmas.float().clone()


def shifted_schedule(scheduler, sigmas, num_tokens):
    """sigma_schedule of T sigmas, from 1 to 1 / T, shifted by a mu that grows with the number of an image's tokens."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift  # slow

    c = scheduler.config
    mu = calculate_shift(num_tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
    return sigma_schedule(scheduler, mu=mu, sigmas=sigmas)


def random_window_start(seed, step, size, window_range):
    """First step of an SDE window of `size` steps: uniform over [lo, hi - size], inclusive, from Random(seed + step).

    One draw per training step, the same for every sample and every rank.
    """
    low, high = window_range
    return random.Random(seed + step).randint(low, high - size)


def check_window(window_range, size, num_inference_steps):
    """Hold an SDE window of `size` steps against [lo, hi) and the schedule, whose last step is never stochastic.

    Raises:
        ValueError: naming --sde_window_range: no such window lies in both.
    """
    low, high = window_range
    last = num_inference_steps - 1
    if not 0 <= low <= high - size <= last - size:
        advice = f"0 {last} is the widest range of {num_inference_steps} sampling steps"
        raise ValueError(f"--sde_window_range {low} {high}: --sde_window_size {size} does not fit in it; {advice}")


def thin_out(request, flash_ratio):
    """The request with the n steps after its window thinned out to ceil(flash_ratio n), for the 2M solver (Flash)."""
    end = request.sde_steps[-1] + 1  # first step after the window
    num_steps = len(request.timesteps)
    count = math.ceil(flash_ratio * (num_steps - end))
    steps = [*range(end), *(end + j * (num_steps - end) // count for j in range(count))]
    sigmas = request.sigmas[[*steps, num_steps]]
    return replace(request, timesteps=request.timesteps[steps], sigmas=sigmas, multistep_from=end)
