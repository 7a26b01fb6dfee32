"""One sampling step of a flow-matching model: stochastic (SDE), with the density of where it lands, or an ODE step.

Convention: x_s = (1 - s) x0 + s noise with s = sigma in [0, 1] (1 is pure noise); the model predicts v = noise - x0;
sampling runs sigma downwards, so dt = sigma_next - sigma is negative. x0 = x - s v and noise = x + (1 - s) v are the
model's estimates.

A step kind is a function (x, v, sigma, sigma_next, noise_level, *, sigma_max) -> (mean, std): x, v and mean are
(B, ...), the others are floats. `sde_step` draws x' = mean + std eps and computes its log-prob. At noise_level 0 a kind
must be the Euler step x + v dt with std 0. Your own, `--sde_type path/to/file.py:function`, has a Gaussian log-prob.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.user_code import describe, load_function

import torch
from torch import Tensor

MeanAndStd = tuple[Tensor, float]  # (B, ...), and one number for all B


# ---- step kinds --------------------------------------------------------------------------------------------------
def sde(
    x: Tensor,
    v: Tensor,
    sigma: float,
    sigma_next: float,
    noise_level: float,
    sigma_max: float | None = None,
) -> MeanAndStd:
    """Flow-GRPO (arXiv 2505.05470v5, eq. 9), noise q = noise_level sqrt(s / (1 - min(s, sigma_max))).

    mean = x + [v + q^2 / (2 s) (x + (1 - s) v)] dt, std = q sqrt(-dt). The schedule starts at pure noise, where 1 - s
    is 0: there the schedule's second sigma, sigma_max, stands for s.

    Raises:
        ValueError: 1 - min(s, sigma_max) is below 1e-6.
    """
    capped_sigma = sigma if sigma_max is None else min(sigma, sigma_max)
    if noise_level > 0 and capped_sigma > 1 - 1e-6:
        raise ValueError(
            f"{_describe(sigma, sigma_next)} starts at pure noise: pass sigma_max < 1, the schedule's second sigma"
        )
    q_squared = noise_level**2 * sigma / (1 - capped_sigma) if noise_level > 0 else 0.0
    return _sde_of_noise(x, v, sigma, sigma_next, q_squared)


def dance(
    x: Tensor,
    v: Tensor,
    sigma: float,
    sigma_next: float,
    noise_level: float,
    sigma_max: float | None = None,
) -> MeanAndStd:
    """DanceGRPO (arXiv 2505.07818v4, eq. 8): the step of `sde` with constant noise q = noise_level."""
    return _sde_of_noise(x, v, sigma, sigma_next, noise_level**2)


def _sde_of_noise(x: Tensor, v: Tensor, sigma: float, sigma_next: float, q_squared: float) -> MeanAndStd:
    """mean = x (1 + q^2 dt / (2 s)) + v (1 + q^2 (1 - s) / (2 s)) dt, Flow-GRPO's eq. 9 by x and v."""
    dt = sigma_next - sigma  # negative: where the paper has sqrt(dt), here stands sqrt(-dt)
    x_coefficient = 1 + q_squared * dt / (2 * sigma)
    v_coefficient = (1 + q_squared * (1 - sigma) / (2 * sigma)) * dt
    mean = x_coefficient * x + v_coefficient * v
    std = math.sqrt(q_squared * -dt)
    return mean, std


def cps(
    x: Tensor,
    v: Tensor,
    sigma: float,
    sigma_next: float,
    noise_level: float,
    sigma_max: float | None = None,
) -> MeanAndStd:
    """Coefficients-preserving sampling (arXiv 2509.05952; eq. 3 of Flow-DPPO, arXiv 2606.11025v2).

    With s' = sigma_next: std = s' sin(noise_level pi / 2), mean = x0 (1 - s') + noise sqrt(s'^2 - std^2), so that
    signal and noise keep the schedule's coefficients. Its log-prob is -mean((x' - mean)^2), unscaled, as in that
    paper's code: published clip ranges keep their meaning.
    """
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    noise_coefficient = math.sqrt(max(0.0, sigma_next**2 - std**2))
    x_coefficient = (1 - sigma_next) + noise_coefficient
    v_coefficient = noise_coefficient * (1 - sigma) - (1 - sigma_next) * sigma
    mean = x_coefficient * x + v_coefficient * v
    return mean, std


def cps_gauss(
    x: Tensor,
    v: Tensor,
    sigma: float,
    sigma_next: float,
    noise_level: float,
    sigma_max: float | None = None,
) -> MeanAndStd:
    """The step of `cps` with the Gaussian log-prob of the other kinds."""
    return cps(x, v, sigma, sigma_next, noise_level)


STEP_KINDS = {function.__name__: function for function in (sde, dance, cps, cps_gauss)}


def find_step_kind(sde_type: str) -> Callable[..., MeanAndStd]:
    """The function of a step kind: one of those above by its name, or a user's own, path/to/file.py:function.

    Raises:
        ValueError: in one line that names --sde_type.
    """
    if ":" in sde_type:
        return load_function(sde_type, "--sde_type")
    if sde_type not in STEP_KINDS:
        kinds = ", ".join(STEP_KINDS)
        raise ValueError(f"--sde_type {sde_type}: unknown; use one of {kinds}, or path/to/file.py:function")
    return STEP_KINDS[sde_type]


def check_step_kind(sde_type: str, noise_level: float) -> None:
    """Try a step kind at a noise level, before any model loads.

    Raises:
        ValueError: in one line that names --sde_type and --noise_level: it is unknown, raises, or does not give a mean
            of the samples' shape and a std above 0, both finite in fp32; gives an image another step beside other
            images, or when asked again; or is not the Euler step at noise_level 0.
    """
    step_kind = find_step_kind(sde_type)
    refused = f"--sde_type {sde_type} --noise_level {noise_level}:"
    if step_kind in (cps, cps_gauss) and noise_level > 1:
        raise ValueError(f"{refused} it is the sine's argument in units of pi / 2: at most 1")
    x = torch.linspace(-1, 1, 12).view(2, 2, 3)
    v = x.square() - 0.5
    # the first image again, as the second one beside another first one
    moved_x, moved_v = torch.stack([-3 * x[1], x[0]]), torch.stack([2 * v[1], v[0]])
    for sigma, sigma_next in ((1.0, 0.9), (0.6, 0.5)):
        step = _describe(sigma, sigma_next)
        try:
            mean, std = step_kind(x, v, sigma, sigma_next, noise_level, sigma_max=0.9)
            ode_mean, ode_std = step_kind(x, v, sigma, sigma_next, 0.0, sigma_max=0.9)
            has_shape = mean.shape == ode_mean.shape == x.shape
            std_in_fp32 = float(torch.tensor(float(std)))
            is_finite = bool(mean.isfinite().all()) and 0 < std_in_fp32 < math.inf
            moved, moved_std = step_kind(moved_x, moved_v, sigma, sigma_next, noise_level, sigma_max=0.9)
            is_own = has_shape and math.isclose(std, moved_std) and torch.allclose(mean[0], moved[1])
            euler = x + v * (sigma_next - sigma)
            is_euler = has_shape and float(ode_std) == 0 and torch.allclose(ode_mean, euler)
        except (Exception, SystemExit) as error:  # a user's own function can raise anything
            told = describe(error, step_kind)
            raise ValueError(f"{refused} {step} raised {told}") from error
        if not has_shape:
            raise ValueError(f"{refused} {step} gives no mean of the samples' shape {tuple(x.shape)}")
        if not is_finite:
            raise ValueError(f"{refused} {step} gives std {std:g} and a mean of up to {mean.abs().max():g}")
        if not is_own:
            raise ValueError(
                f"{refused} {step} of an image changes with the images beside it, or from call to call: the mean must "
                "depend on this image's x and v alone, and std on neither; sde_step draws the noise"
            )
        if not is_euler:
            raise ValueError(f"{refused} at noise_level 0 {step} is not the Euler step x + v dt with std 0")


# ---- taking a step ---------------------------------------------------------------------------------------------------
class SDEStepOutput(NamedTuple):
    """One sampling step of B images; everything in fp32 (fp64 for fp64 samples)."""

    prev_sample: Tensor  # (B, ...), the sample at sigma_next
    log_prob: Tensor  # (B,), mean over elements; None where std is 0
    prev_sample_mean: Tensor  # (B, ...)
    transition_std: Tensor  # (B,), standard deviation of the injected noise
    velocity: Tensor  # (B, ...), the model's v; None where std is 0: an evaluation would keep one for every step


def sde_step(
    sample: Tensor,
    model_output: Tensor,
    sigma: float,
    sigma_next: float,
    noise_level: float,
    *,
    sde_type: str = "sde",
    sigma_max: float | None = None,
    prev_sample: Tensor | None = None,
    noise: Tensor | None = None,
    generator: torch.Generator | list[torch.Generator] | None = None,
) -> SDEStepOutput:
    """One sampling step from `sigma` to `sigma_next`: x' = mean + std eps, drawn or given, and its log-prob.

    log_prob is the *mean* over all non-batch elements of the Normal(mean, std) log-density at the detached x'
    (published clip ranges depend on the mean); "cps" has -mean((x' - mean)^2) instead.

    Args:
        sample, model_output: x and v, (B, ...), any float dtype; the arithmetic is fp32, or fp64 if `sample` is.
        sigma, sigma_next: floats, 0 <= sigma_next < sigma <= 1.
        noise_level: float >= 0 ("cps": <= 1). Pass 0 for the last step; this function does not know which step is last.
        sde_type: sde, dance, cps, cps_gauss, or path/to/file.py:function.
        sigma_max: stands for sigma in 1 - sigma of "sde" where sigma exceeds it: the schedule's second sigma.
        prev_sample: x' (B, ...), to take this sample instead of drawing one. The name is that of diffusers.
        noise: eps (B, ...) to use; wins over `generator`.
        generator: a torch.Generator, or a list, one per image (each draws its own image, so batching does not matter).

    Raises:
        ValueError: sigma_next >= sigma; "sde" at sigma 1 without sigma_max; prev_sample given where std is 0.
    """
    dtype = torch.float64 if sample.dtype == torch.float64 else torch.float32
    step = _describe(sigma, sigma_next)
    if not sigma_next < sigma:
        raise ValueError(f"{step} does not go down")
    step_kind = find_step_kind(sde_type)
    velocity = model_output.to(dtype)
    mean, std = step_kind(sample.to(dtype), velocity, sigma, sigma_next, noise_level, sigma_max=sigma_max)
    transition_std = mean.new_full((len(mean),), std)  # (B,)

    if std == 0:
        if prev_sample is not None:
            raise ValueError(f"{step} is deterministic (noise_level {noise_level}): it has no log-prob")
        return SDEStepOutput(mean, None, mean, transition_std, None)  # type: ignore[arg-type]  # an ODE step has no density

    stds = transition_std.view(-1, *[1] * (mean.dim() - 1))  # (B, 1, ...)
    if prev_sample is None:
        eps = draw_noise(mean.shape, generator, mean.device, dtype) if noise is None else noise.to(mean)
        prev_sample = mean + stds * eps
    # detached: the gradient of the log-prob is by the mean alone
    square = (prev_sample.detach().to(dtype) - mean) ** 2
    log_density = -square / (2 * stds**2) - stds.log() - math.log(2 * math.pi) / 2
    log_density = -square if step_kind is cps else log_density
    log_prob = log_density.flatten(1).mean(1)  # (B,)
    return SDEStepOutput(prev_sample.to(dtype), log_prob, mean, transition_std, velocity)


def _describe(sigma: float, sigma_next: float) -> str:
    return f"the step from sigma {sigma} to {sigma_next}"


# ---- noise -----------------------------------------------------------------------------------------------------------
def image_seed(seed: int | str, step: int | str, index: int) -> int:
    """An image's noise seed, from (run seed, training step, global image index) alone: the same on all ranks."""
    text = f"{seed} {step} {index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return number >> 1  # 63 bits: torch takes no more


def draw_noise(
    shape: Sequence[int],
    generator: torch.Generator | list[torch.Generator] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal noise of `shape` (B, ...) on `device`.

    With a list of B generators each image draws its own. Noise is drawn where the generator lives (by our protocol on
    the CPU) and then moved: the same numbers on any device.

    Raises:
        ValueError: there are not as many generators as images.
    """
    if isinstance(generator, list | tuple):
        if len(generator) != shape[0]:
            raise ValueError(f"{len(generator)} generators for a batch of {shape[0]}")
        drawn = torch.cat([draw_noise((1, *shape[1:]), g, g.device, dtype) for g in generator])
        if drawn.device.type == "cpu" and torch.device(device).type == "cuda":  # the host does not wait for the copy
            return drawn.pin_memory().to(device, non_blocking=True)
        return drawn.to(device)
    drawn_on = device if generator is None else generator.device
    noise = torch.randn(shape, generator=generator, device=drawn_on, dtype=dtype)
    return noise.to(device)


# ---- the window of SDE steps -------------------------------------------------------------------------


def check_window(window_range: tuple[int, int], size: int, num_inference_steps: int) -> None:
    """Hold an SDE window of `size` steps against [lo, hi) and the schedule, whose last step is never stochastic.

    Raises:
        ValueError: naming --sde_window_range: no such window lies in both.
    """
    low, high = window_range
    last = num_inference_steps - 1
    if not 0 <= low <= high - size <= last - size:
        advice = f"0 {last} is the widest range of {num_inference_steps} sampling steps"
        raise ValueError(f"--sde_window_range {low} {high}: --sde_window_size {size} does not fit in it; {advice}")
