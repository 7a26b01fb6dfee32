"""The mismatch between the rollout engine's policy and the trainer's: measure it, stop at it, or weight by it.

Engine and trainer implement one policy, so their log-probs of the engine's samples should differ by round-off alone. A
larger difference is a mistake, at which `check_mismatch` stops the run, or it is the price of the engine's arithmetic,
for which `rollout_weights` corrects (--rollout_correction). lr is the log-ratio, the trainer's log-prob minus the
engine's. Log-probs are means over elements, so |lr| can be of the size of clip_range, 1e-5 to 1e-3; thresholds are
therefore in units of clip_range.
"""

import math
import re
from typing import NamedTuple

from common.distributed import gather
from common.errors import RunError
from common.rollout import RolloutRequest, Trajectories
from common.sde import draw_noise, sde_step

import torch

NOISE_LIMIT = 1e-5  # largest noise_differences: fp32 rounds to 1e-7, fp16 to 1e-4, bf16 to 1e-3
FACTOR = re.compile(r"(tis|icepop|reject_k1|reject_k2|reject_k3)(_trajectory)?:(\d*\.?\d+(?:e[+-]?\d+)?)")


# ---- the option --rollout_correction ---------------------------------------------------------------------------------
class Factor(NamedTuple):
    """One factor of the weight of an (image, SDE step) in the loss."""

    kind: str
    per_trajectory: bool  # whether lr is summed over the W steps first
    threshold: float  # in units of clip_range, or of its square


def parse_correction(text: str) -> list[Factor]:
    """Read the option: "none" -> []; "tis:2,reject_k2_trajectory:4" -> two Factors, of thresholds 2 and 4.

    Raises:
        ValueError: naming --rollout_correction, the fault, and the accepted forms.
    """
    factors: list[Factor] = []
    for part in [] if text == "none" else text.split(","):
        found = FACTOR.fullmatch(part.strip())
        if not found or not 0 < float(found[3]) < math.inf:
            raise ValueError(
                f"--rollout_correction {text}: {part!r} is not KIND:THRESHOLD with a KIND of tis, icepop, reject_k1, "
                "reject_k2 or reject_k3, or one of them with _trajectory at its end, and a THRESHOLD above 0"
            )
        factors.append(Factor(found[1], bool(found[2]), float(found[3])))
    if sum(factor.kind in ("tis", "icepop") for factor in factors) > 1:
        raise ValueError(f"--rollout_correction {text}: two of tis and icepop would weight by the ratio twice")
    return factors


# ---- correct for the mismatch: weights of the loss -------------------------------------------------------------------
def rollout_weights(
    text: str, request: RolloutRequest, trajectories: Trajectories, recomputed: Trajectories, clip_range: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weights (B, W) in fp32 by --rollout_correction `text`, and their metrics. "none" gives ones and no metrics.

    trajectories: what the engine sampled for `request`; recomputed: the same as the trainer scores it.
    """
    factors = parse_correction(text)
    if not factors:
        return torch.ones_like(recomputed.log_probs), {}
    lr = log_ratios(
        prev_samples=trajectories.latents[:, [i + 1 for i in request.sde_steps]],
        means=recomputed.prev_sample_means,
        engine_means=trajectories.prev_sample_means,
        stds=trajectories.transition_stds,
    )
    weights, metrics = correction_weights(lr, factors, clip_range)
    return weights.float(), metrics


def log_ratios(
    prev_samples: torch.Tensor, means: torch.Tensor, engine_means: torch.Tensor, stds: torch.Tensor
) -> torch.Tensor:
    """lr (B, W) of W steps in fp64: trainer - engine Gaussian log-prob, mean over elements, from the two means.

    With d = mean - engine_mean and eps = (prev_sample - engine_mean) / std:  lr = mean(eps d) / std - mean(d^2) /
    (2 std^2). Subtracting two fp32 log-probs would leave round-off at 1e-7, and the log-probs of `cps` are unscaled.
    prev_samples, means and engine_means are (B, W, ...). stds (B, W) holds for both policies.
    """
    columns = []
    for w in range(stds.shape[1]):  # one step at a time, as fp64 of all steps would be large
        engine_mean = engine_means[:, w].double()
        d = means[:, w].double() - engine_mean
        std = stds[:, w].double().view(-1, *[1] * (d.dim() - 1))
        eps = (prev_samples[:, w].double() - engine_mean) / std
        per_element = eps * d / std - d**2 / (2 * std**2)
        columns.append(per_element.flatten(1).mean(1))
    return torch.stack(columns, 1)


def correction_weights(
    log_ratios: torch.Tensor, factors: list[Factor], clip_range: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weight of every (image, step) in the loss, the product of its factors: (..., W) of log_ratios (..., W), in fp64.

    t is threshold * clip_range, for k2 and k3 threshold * clip_range^2. A factor per trajectory takes the sum of lr
    over the W steps instead of lr.

    - tis: min(exp(lr), exp(t)); icepop: exp(lr) where |lr| <= t, otherwise 0
    - reject_k1, _k2, _k3: 0 where k1 = -lr, k2 = lr^2 / 2, k3 = exp(lr) - 1 - lr is above t, otherwise 1

    Rejected elements still count in the loss's mean, so the loss is 0 where all are rejected. NaN stays NaN.
    Also returns metrics, scalars over all weights.
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


def _weight(factor: Factor, lr: torch.Tensor, clip_range: float) -> torch.Tensor:
    """The weights of one factor, in the shape of lr."""
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


# ---- stop at a mismatch that is more than round-off ------------------------------------------------------------------
def velocity_limit(dtype: str, request: RolloutRequest) -> float:
    """The relative difference of velocities up to which it is round-off. dtype: "float32" or "bfloat16".

    Guidance g by a second pass adds up the rounding of two branches, which are nearly equal, with the weights g and
    1 - g. Where guidance is an input of the transformer, as FLUX.1's, there is one.
    """
    limit = {"float32": 1e-4, "bfloat16": 0.03}[dtype]
    if request.negative_conditioning is not None:
        limit *= math.hypot(request.guidance_scale, request.guidance_scale - 1)
    return limit


def check_mismatch(
    request: RolloutRequest,
    trajectories: Trajectories,
    recomputed: Trajectories,
    *,
    dtype: str,
    log_ratio_limit: float = math.inf,
    log_ratios: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Stop where the engine's steps are not the trainer's, on any rank. Returns metrics of the mismatch. A collective.

    Args:
        trajectories: what the engine sampled for `request`.
        recomputed: the same as the trainer scores it.
        dtype: "float32" or "bfloat16", the dtype of the forward passes.
        log_ratio_limit: largest |log-ratio| at which the update may start.
        log_ratios: (B, W), at which it starts; None: the trainer's log-probs less the engine's.

    Raises:
        RunError: in one line, the sampling step with the largest difference, and where to look.
    """
    noise = gather(noise_differences(request, trajectories)).flatten(0, 1)  # (images of all ranks, W)
    velocity = gather(velocity_differences(request, trajectories, recomputed.prev_sample_means)).flatten(0, 1)
    log_prob = gather((recomputed.log_probs - trajectories.log_probs).abs()).flatten(0, 1)
    log_ratio = log_prob if log_ratios is None else gather(log_ratios.abs()).flatten(0, 1)
    faults = [
        (
            noise,
            NOISE_LIMIT,
            "samples are {} off mean + std x the noise of their seeds, more than {}: does it keep fp32 latents?",
        ),
        (
            velocity,
            velocity_limit(dtype, request),
            "velocity is {} off the trainer's, more than {}: they do not run the same policy. Compare sigmas, number "
            "of steps, guidance and weights with --rollout local, which is right",
        ),
        (
            log_ratio,
            log_ratio_limit,
            "log-prob is off the trainer's: the log-ratio would start at {}, more than half of --clip_range, {}. Pass "
            "--old_log_prob recompute",
        ),
    ]
    for differences, limit, fault in faults:
        worst = differences.amax(0)  # (W,); amax and argmax take NaN for the largest
        w = int(worst.argmax())
        if not worst[w] <= limit:
            text = fault.format(f"{worst[w].item():.1e}", f"{limit:.1e}")
            raise RunError(f"at sampling step {request.step_numbers[w]} the engine's {text}")
    metrics = {
        "velocity_diff_max": velocity.max(),
        "logprob_abs_diff_mean": log_prob.mean(),
        "logprob_abs_diff_max": log_prob.max(),
    }
    for w, i in enumerate(request.step_numbers):
        metrics[f"velocity_diff_max/{i}"] = velocity[:, w].max()
        metrics[f"logprob_abs_diff_max/{i}"] = log_prob[:, w].max()
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def check_sampling(request: RolloutRequest, ours: Trajectories, engines: Trajectories, dtype: str) -> None:
    """Stop where the script's own sampling of `request` does not end at the engine's latents.

    RMS(ours - engine's) / RMS(ours - first latents) of the final latents is the relative difference of the velocities
    along the way. Its limit is twice velocity_limit, as the rounding of a step is input of the next step.

    Raises:
        RunError: in one line.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    final = ours.latents[:, -1]
    moved = _rms(final - request.first_latents(generators, final.device))
    difference = (_rms(final - engines.latents[:, -1]) / moved).max().item()
    limit = 2 * velocity_limit(dtype, request)
    if not difference <= limit:
        raise RunError(
            f"the engine's {'SDE' if request.sde_steps else 'ODE'} image is {difference:.1e} off the image of this "
            f"script's sample_locally, more than {limit:.1e}: the engine samples by common/sde.py, not by this "
            "script's section 6. Use --rollout local, or bring your sampling to the engine as docs/fork.md says. If "
            "you did not change it, engine and trainer differ: see docs/engine.md"
        )


def velocity_differences(request: RolloutRequest, trajectories: Trajectories, means: torch.Tensor) -> torch.Tensor:
    """RMS(mean - engine_mean) / RMS(mean - mean at v = 0) of B samples at the W SDE steps, over elements: (B, W).

    A mean is a x + b v, so this is the relative difference of the two velocities. Unlike a difference of log-probs it
    does not depend on the schedule, the noise or the number of elements. means (B, W, ...): the trainer's.
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


def noise_differences(request: RolloutRequest, trajectories: Trajectories) -> torch.Tensor:
    """RMS(x' - engine_mean - std eps) / RMS(x') of B samples at the W SDE steps: (B, W). eps is their seeds' noise.

    It is the rounding of fp32, whatever the dtype of the forward pass, unless the engine keeps latents in bf16 or draws
    other noise. The first column also compares the latents that the engine began with to the seeds.
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


def _rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square (B,) of (B, ...) over all dimensions except the first, in fp64."""
    return x.double().square().flatten(1).mean(1).sqrt()
