"""The difference between the rollout engine's policy and the trainer's: measure it, stop at it, or weight by it.

Both implement one policy, so lr = trainer - engine log-prob of what the engine sampled is round-off; more than that
is either a mistake (`check_engine_drift` stops the run) or the price of the engine's arithmetic (`correction_weights`).
As log-probs are means over elements, |lr| can be of the size of clip_range (1e-5 to 1e-3): thresholds are in its units.
"""

import math
from typing import NamedTuple

from common.distributed import gather, mean_over_ranks
from common.errors import RunError
from common.noise import draw_noise
from common.sde import sde_step

import torch

NOISE_LIMIT = 1e-5  # of noise_differences: fp32 rounds to 1e-7, fp16 to 1e-4, bf16 to 1e-3
IMPORTANCE_WEIGHTS = ("tis", "icepop")
KINDS = (*IMPORTANCE_WEIGHTS, "reject_k1", "reject_k2", "reject_k3")


class Factor(NamedTuple):
    """One factor of the weight of a (sample, step) in the loss."""

    kind: str  # one of KINDS
    per_trajectory: bool  # of the sum of lr over the W steps
    threshold: float  # in units of clip_range, or of its square


def log_ratios(prev_samples, means, engine_means, stds):
    """lr = trainer - engine Gaussian log-prob of W steps, mean over elements, from the difference of means in fp64.

    With d = mean - engine_mean and eps = (prev_sample - engine_mean) / std:  lr = mean(eps d) / std - mean(d^2) /
    (2 std^2). A difference of fp32 log-probs is round-off at 1e-7, and those of `cps` are unscaled. prev_samples, means
    and engine_means are (B, W, ...), stds (B, W) is of both policies. Returns (B, W).
    """
    columns = []
    for w in range(stds.shape[1]):  # a step at a time: fp64 of all of them would be large
        engine_mean = engine_means[:, w].double()
        d = means[:, w].double() - engine_mean
        std = stds[:, w].double().view(-1, *[1] * (d.dim() - 1))
        eps = (prev_samples[:, w].double() - engine_mean) / std
        per_element = eps * d / std - d**2 / (2 * std**2)
        columns.append(per_element.flatten(1).mean(1))
    return torch.stack(columns, 1)


def rollout_weights(text, request, trajectories, scored, clip_range):
    """Weights (B, W) in fp32 of --rollout_correction `text`, and their metrics; 1 and no metrics for none.

    request: what the engine sampled the Trajectories of; scored: the same as the trainer scores them.
    """
    factors = parse_correction(text)
    if not factors:
        return torch.ones_like(scored.log_probs), {}
    prev_samples = trajectories.latents[:, [i + 1 for i in request.sde_steps]]  # (B, W, ...)
    engine_means = trajectories.prev_sample_means
    lr = log_ratios(prev_samples, scored.prev_sample_means, engine_means, trajectories.transition_stds)
    weights, metrics = correction_weights(lr, factors, clip_range)
    return weights.float(), metrics


def parse_correction(text):
    """ "none" -> []; "tis:2,reject_k2_trajectory:4" -> [Factor("tis", False, 2.0), Factor("reject_k2", True, 4.0)].

    Raises:
        ValueError: naming --rollout_correction, what is wrong and the accepted forms.
    """
    factors = []
    for part in [] if text == "none" else text.split(","):
        name, _, number = part.strip().partition(":")
        try:
            threshold = float(number)
        except ValueError:
            threshold = math.nan
        factor = Factor(name.removesuffix("_trajectory"), name.endswith("_trajectory"), threshold)
        fault = _fault(factor, factors, name, number)
        if fault:
            accepted = "none, or KIND:THRESHOLD, several joined by commas, KIND being"
            kinds = ", ".join(KINDS)
            raise ValueError(
                f"--rollout_correction {text}: {fault}; accepted: {accepted} {kinds}, each also as KIND_trajectory"
            )
        factors.append(factor)
    return factors


def check_correction(text, rollout, old_log_prob):
    """Raises ValueError for a --rollout_correction that is none, or that has no two policies to compare."""
    if parse_correction(text) and (rollout != "vllm" or old_log_prob != "recompute"):
        raise ValueError("--rollout_correction needs --rollout vllm and --old_log_prob recompute")


def _fault(factor, earlier, name, number):
    """What is wrong with a factor after those before it, or None."""
    if factor.kind not in KINDS:
        return f"unknown kind {name!r}"
    if not 0 < factor.threshold < math.inf:
        return f"{name} needs a threshold above 0, not {number!r}"
    if (factor.kind, factor.per_trajectory) in [(other.kind, other.per_trajectory) for other in earlier]:
        return f"{name} is given twice"
    if factor.kind in IMPORTANCE_WEIGHTS and any(other.kind in IMPORTANCE_WEIGHTS for other in earlier):
        return "two of tis and icepop would weight by the ratio twice"
    return None


def correction_weights(log_ratios, factors, clip_range):
    """Weight of every (sample, step) in the loss: the product of `factors` (parse_correction's).

    With t = threshold * clip_range, * clip_range^2 for k2 and k3, and the sum of lr over the W steps in place of lr
    where it is per trajectory:

    - tis: min(exp(lr), exp(t)); icepop: exp(lr) where |lr| <= t, else 0
    - reject_k1, _k2, _k3: 0 where k1 = -lr, k2 = lr^2 / 2, k3 = exp(lr) - 1 - lr is above t, else 1

    What is rejected still counts in the loss's mean: where all is, the loss is 0. NaN stays NaN.
    log_ratios is (..., W). Returns weights (..., W) in fp64, and metrics, scalars over all of them.
    """
    weights = torch.ones_like(log_ratios, dtype=torch.float64)
    for factor in factors:
        lr = log_ratios.double()
        if factor.per_trajectory:
            lr = lr.sum(-1, keepdim=True).expand_as(lr)
        weights = weights * _weight(factor, lr, clip_range)
    values = {
        "weight_mean": weights.mean(),
        "weight_min": weights.min(),
        "weight_max": weights.max(),
        "rejected": (weights == 0).double().mean(),
    }
    return weights, {f"rollout_corr/{name}": value for name, value in values.items()}


def _weight(factor, lr, clip_range):
    """One factor's weights, of the shape of lr."""
    if factor.kind == "tis":
        return lr.clamp(max=factor.threshold * clip_range).exp()
    if factor.kind == "icepop":
        return torch.where(lr.abs() > factor.threshold * clip_range, 0.0, lr.exp())
    if factor.kind == "reject_k1":
        k = -lr
        limit = factor.threshold * clip_range
    else:
        k = lr**2 / 2 if factor.kind == "reject_k2" else lr.expm1() - lr
        limit = factor.threshold * clip_range**2
    return torch.where(k > limit, 0.0, 1 + 0 * k)  # 0 * NaN is NaN


# ---- the gate --------------------------------------------------------------------------------------------------------
def default_drift_limit(dtype_name, guidance_scale):
    """The largest relative difference of velocities that passes for round-off, where --max_velocity_drift does not say.

    Guidance g > 1 adds up the rounding of two branches, which are nearly equal, with the weights g and 1 - g.
    """
    limit = {"float32": 1e-4, "bfloat16": 0.03}[dtype_name]
    if guidance_scale > 1:
        limit *= math.hypot(guidance_scale, guidance_scale - 1)
    return limit


def velocity_differences(request, trajectories, means):
    """RMS(mean - engine_mean) / RMS(mean - mean at v = 0) of M samples at the W SDE steps, over elements: (M, W).

    A mean is a x + b v: this is the relative difference of the two velocities, whatever the schedule, the noise and the
    number of elements, which log-probs depend on. means (M, W, ...) are the trainer's, of the request's M images.
    """
    columns = []
    for w, i in enumerate(request.sde_steps):
        x = trajectories.latents[:, i]
        sigma, sigma_next = request.sigmas[i : i + 2].tolist()
        at_rest = sde_step(
            x,
            torch.zeros_like(x),
            sigma,
            sigma_next,
            request.noise_level,
            sde_type=request.sde_type,
            sigma_max=request.sigma_max,
            prev_sample=x,
        ).prev_sample_mean
        difference = means[:, w] - trajectories.prev_sample_means[:, w]
        columns.append(_rms(difference) / _rms(means[:, w] - at_rest))
    return torch.stack(columns, 1)


def noise_differences(request, trajectories):
    """RMS(x' - engine_mean - std eps) / RMS(x') of M samples at the W SDE steps, eps the noise of their seeds: (M, W).

    0 but for the rounding of fp32, whatever the dtype of the forward pass. An engine that keeps latents in bf16, or
    draws other noise, shows here; the latents that it began with are held against the seeds in the first column.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    latents = trajectories.latents
    first_latents = request.first_latents(generators, latents.device)
    columns = []
    for w, i in enumerate(request.sde_steps):
        eps = draw_noise(first_latents.shape, generators, latents.device)
        std = trajectories.transition_stds[:, w].view(-1, *[1] * (eps.dim() - 1))
        x_next = latents[:, i + 1]
        columns.append(_rms(x_next - trajectories.prev_sample_means[:, w] - std * eps) / _rms(x_next))
    columns[0] = columns[0].maximum(_rms(latents[:, 0] - first_latents) / _rms(first_latents))
    return torch.stack(columns, 1)


def _rms(x):
    """Root mean square (B,) of (B, ...) over all but the first dimension, in fp64."""
    return x.double().square().flatten(1).mean(1).sqrt()


def check_engine_drift(request, trajectories, scored, limit, log_prob_limit=math.inf):
    """Stop where the engine's steps are not the trainer's, on any rank. Returns metrics of how far they are apart.

    request: what was asked of the engine, trajectories: what it gave, scored: the same as the trainer scores it, of all
    images or of the first. limit is of velocity_differences, log_prob_limit of |trainer - engine| log-probs. A
    collective.

    Raises:
        RunError: in one line, the sampling step with the largest difference, and what to look at.
    """
    num_images = min(len(scored.prev_sample_means), len(trajectories.prev_sample_means))  # M
    images = torch.arange(num_images)
    request = request.select(images)
    trajectories = trajectories.select(images)
    scored = scored.select(images)
    noise = gather(noise_differences(request, trajectories)).flatten(0, 1)  # (all M, W)
    velocity = gather(velocity_differences(request, trajectories, scored.prev_sample_means)).flatten(0, 1)
    log_prob = gather((scored.log_probs - trajectories.log_probs).abs()).flatten(0, 1)
    noise_fault = "samples are {} off mean + std x the noise of their seeds, more than {}: does it keep fp32 latents?"
    velocity_fault = (
        "velocity is {} off the trainer's, more than --max_velocity_drift {}: they do not run the same policy. Look "
        "at sigmas, number of steps, guidance, weights; --rollout local is the oracle. Raise --max_velocity_drift only "
        "if this is the round-off of --dtype"
    )
    log_prob_fault = (
        "log-prob is {} off the trainer's, more than half of --clip_range, {}: the ratio would start there. Pass "
        "--old_log_prob recompute"
    )
    _check(noise, request.step_numbers, NOISE_LIMIT, noise_fault)
    _check(velocity, request.step_numbers, limit, velocity_fault)
    _check(log_prob, request.step_numbers, log_prob_limit, log_prob_fault)
    return drift_metrics(velocity, log_prob, request.step_numbers)


def _check(differences, step_numbers, limit, fault):
    """Raises RunError with the largest of `differences` (M, W) where it is above `limit`, or NaN."""
    worst = differences.amax(0)  # (W,); amax and argmax take NaN for the largest
    w = worst.argmax().item()
    if not worst[w] <= limit:
        told = fault.format(f"{worst[w].item():.1e}", f"{limit:.1e}")
        raise RunError(f"at sampling step {step_numbers[w]} the engine's {told}")


def on_policy_metrics(passes):
    """The ratio's mean and deviation in the passes of an update's first mini-batch, over all ranks: 1 and 0 to the bit
    where the forward pass that gave the old log-probs is the update's."""
    means = mean_over_ranks(passes)
    names = ("ratio_mean", "ratio_std")
    return {f"actor/on_policy_{name}": means[f"actor/{name}"] for name in names}


def drift_metrics(velocity, log_prob, step_numbers):
    """Relative differences of velocities, and differences of log-probs, (M, W) each: scalars, also of each step."""
    metrics = {
        "rollout_corr/velocity_diff_max": velocity.max(),
        "rollout_corr/logprob_abs_diff_mean": log_prob.mean(),
        "rollout_corr/logprob_abs_diff_max": log_prob.max(),
    }
    for w, i in enumerate(step_numbers):
        metrics[f"rollout_corr/velocity_diff_max/{i}"] = velocity[:, w].max()
        metrics[f"rollout_corr/logprob_abs_diff_max/{i}"] = log_prob[:, w].max()
    return metrics
