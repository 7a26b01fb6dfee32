"""common/engine/mismatch.py: log-ratios against torch's Normal, weights by hand, and what stops a run."""

import math
import re
from decimal import Decimal, getcontext
from types import SimpleNamespace

from common.engine.mismatch import (
    Factor,
    check_mismatch,
    correction_weights,
    log_ratios,
    noise_differences,
    parse_correction,
    rollout_weights,
    velocity_differences,
    velocity_limit,
)
from common.errors import RunError
from common.rollout import RolloutRequest, Trajectories
from common.sde import draw_noise, sde_step

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.fast

CLIP = 1e-4


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def weights_of(lr, text, clip_range=CLIP):
    weights, metrics = correction_weights(lr, parse_correction(text), clip_range)
    assert weights.dtype == torch.float64 and weights.shape == lr.shape
    return weights, {name: value.item() for name, value in metrics.items()}


# ---- log-ratios ------------------------------------------------------------------------------------------------------
def two_policies(sde_type, dtype=torch.float64, shift=1e-3):
    """x' (B, W, ...) drawn by an engine at W = 2 steps, and scored by a trainer whose velocity differs a little."""
    g, engine, trainer = torch.Generator().manual_seed(0), [], []
    for sigma, sigma_next in ((0.9, 0.8), (0.6, 0.35)):
        x, v, noise, dv = (torch.randn(3, 4, 5, 6, generator=g, dtype=torch.float64) for _ in range(4))
        x, v, noise, dv = x.to(dtype), v.to(dtype), noise.to(dtype), dv.to(dtype)
        engine.append(sde_step(x, v, sigma, sigma_next, 0.7, sde_type=sde_type, noise=noise))
        trainer.append(
            sde_step(x, v + shift * dv, sigma, sigma_next, 0.7, sde_type=sde_type, prev_sample=engine[-1].prev_sample)
        )
    return [[torch.stack(column, 1) for column in zip(*outputs, strict=True)] for outputs in (engine, trainer)]


def normal_log_probs(prev_samples, means, stds):
    normal = torch.distributions.Normal(means.double(), stds.double()[:, :, None, None, None])
    return normal.log_prob(prev_samples.double()).flatten(2).mean(2)  # (B, W)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps_gauss", "cps"])
def test_log_ratios_are_differences_of_gaussian_log_probs(sde_type, dtype):
    (x, log_probs, engine_means, stds, _), (_, new_log_probs, means, *_) = two_policies(sde_type, dtype)
    got = log_ratios(x, means, engine_means, stds)
    want = normal_log_probs(x, means, stds) - normal_log_probs(x, engine_means, stds)
    assert got.dtype == torch.float64 and got.shape == (3, 2) and got.abs().min() > 1e-7
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    if sde_type == "cps":  # its log-prob is unscaled
        want = (new_log_probs - log_probs).double() / (2 * stds.double() ** 2)
    else:
        want = (new_log_probs - log_probs).double()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12 if dtype == torch.float64 else 3e-6)


def test_a_difference_of_fp32_log_probs_is_round_off_where_the_means_still_tell():
    """A policy moved by 1e-6 of a velocity: lr from fp32 log-probs is over 5 times as far off fp64's as from means."""
    (x, _, engine_means, stds, _), (_, _, means, *_) = two_policies("sde", shift=1e-6)
    exact = log_ratios(x, means, engine_means, stds)
    (x, log_probs, engine_means, stds, _), (_, new_log_probs, means, *_) = two_policies(
        "sde", torch.float32, shift=1e-6
    )
    from_means, from_log_probs = log_ratios(x, means, engine_means, stds), (new_log_probs - log_probs).double()
    assert (from_log_probs - exact).abs().max() > 5 * (from_means - exact).abs().max()


# ---- weights ---------------------------------------------------------------------------------------------------------
E = math.exp
LR = tensor([1e-5, -1.5e-4], [3e-4, -1e-3], [1.9e-4, 1e-4])  # sums over the steps: -1.4e-4, -7e-4, 2.9e-4
HAND = {
    "none": [[1, 1], [1, 1], [1, 1]],
    "tis:2": [[E(1e-5), E(-1.5e-4)], [E(2e-4), E(-1e-3)], [E(1.9e-4), E(1e-4)]],
    "icepop:2": [[E(1e-5), E(-1.5e-4)], [0, 0], [E(1.9e-4), E(1e-4)]],
    "reject_k1:2": [[1, 1], [1, 0], [1, 1]],
    "reject_k2:2": [[1, 1], [0, 0], [1, 1]],  # lr^2 / 2 > 2e-8 where |lr| > 2e-4
    "reject_k3:1": [[1, 0], [0, 0], [0, 1]],  # lr^2 / 2 + lr^3 / 6 > 1e-8 where |lr| > about sqrt(2) 1e-4
    "tis_trajectory:2": [[E(-1.4e-4)] * 2, [E(-7e-4)] * 2, [E(2e-4)] * 2],
    "icepop_trajectory:2": [[E(-1.4e-4)] * 2, [0, 0], [0, 0]],
    "reject_k1_trajectory:2": [[1, 1], [0, 0], [1, 1]],
    "reject_k2_trajectory:4": [[1, 1], [0, 0], [0, 0]],  # 9.8e-9, 2.4e-7 and 4.2e-8 against 4e-8
    "reject_k3_trajectory:5": [[1, 1], [0, 0], [1, 1]],
    "tis:2,reject_k1:2": [[E(1e-5), E(-1.5e-4)], [E(2e-4), 0], [E(1.9e-4), E(1e-4)]],
    "icepop_trajectory:4, reject_k2:1": [[E(-1.4e-4), 0], [0, 0], [0, E(2.9e-4)]],
}


@pytest.mark.parametrize("text", HAND)
def test_weights_by_hand(text):
    weights, metrics = weights_of(LR, text)
    torch.testing.assert_close(weights, tensor(*HAND[text]), rtol=0, atol=1e-12)
    flat = [w for row in HAND[text] for w in row]
    want = {
        "weight_mean": sum(flat) / 6,
        "weight_min": min(flat),
        "weight_max": max(flat),
        "rejected": flat.count(0) / 6,
    }
    assert metrics == pytest.approx({f"rollout_corr/{k}": v for k, v in want.items()}, abs=1e-12)


def test_a_threshold_itself_passes():
    """With clip_range 2^-4 thresholds are exact. lr = 2 clip_range is kept, and the next float is rejected."""
    at, above = 0.125, math.nextafter(0.125, 1)
    weights = weights_of(tensor([at, above, -at, -above]), "icepop:2", 0.0625)[0]
    # torch's vectorised exp and the C library's may differ in the last place; what is rejected is 0 exactly
    torch.testing.assert_close(weights, tensor([E(at), 0, E(-at), 0]), rtol=1e-15, atol=0)
    assert weights_of(tensor([-at, -above]), "reject_k1:2", 0.0625)[0].tolist() == [[1, 0]]
    assert weights_of(tensor([at, -at, above]), "reject_k2:2", 0.0625)[0].tolist() == [[1, 1, 0]]


def test_the_published_band_acts_on_nothing_and_ours_does():
    """With |lr| from 1e-5 to 1e-3 no ratio leaves 0.5 to 2. Thresholds in units of clip_range act on some."""
    lr = torch.logspace(-5, -3, 50, dtype=torch.float64)
    lr = torch.stack([lr, -lr], 1)
    published = f"icepop:{math.log(2) / CLIP}"
    assert weights_of(lr, published)[1]["rollout_corr/rejected"] == 0
    assert lr.exp().min() > 0.5 and lr.exp().max() < 2
    for kind in ("icepop", "reject_k1", "reject_k2", "reject_k3"):
        assert 0.1 < weights_of(lr, f"{kind}:2")[1]["rollout_corr/rejected"] < 0.9, kind
    truncated = weights_of(lr, "tis:2")[0] < lr.exp()
    assert 0.1 < truncated.double().mean() < 0.9


def test_all_rejected_is_a_loss_of_zero():
    lr = tensor([0.1, -0.2], [0.3, 0.4])
    weights, metrics = weights_of(lr, "icepop:2")
    log_prob = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    loss = (weights * -log_prob.exp()).mean()
    loss.backward()
    assert loss.item() == 0 and log_prob.grad.abs().max() == 0 and metrics["rollout_corr/rejected"] == 1


@pytest.mark.parametrize("kind", ["tis", "icepop", "reject_k1", "reject_k2", "reject_k3"])
def test_nan_stays_nan_and_a_ratio_far_off_stays_finite(kind):
    lr = tensor([math.nan, 0.0], [0.0, 0.0])
    assert weights_of(lr, f"{kind}:2")[0].isnan().tolist() == [[True, False], [False, False]]
    assert weights_of(lr, f"{kind}_trajectory:2")[0].isnan().tolist() == [[True, True], [False, False]]
    assert math.isnan(weights_of(lr, f"{kind}:2")[1]["rollout_corr/weight_mean"])
    assert weights_of(tensor([1e4, -1e4]), f"{kind}:2")[0].isfinite().all()


@pytest.mark.parametrize("lr", [1e-6, -1e-6, 1e-4, -1e-3])
def test_k3_keeps_its_digits(lr):
    """A threshold just below k3 rejects it, one just above keeps it, to 1e-8. fp32 has no right digit of it."""
    getcontext().prec = 50
    k3 = float(Decimal(lr).exp() - 1 - Decimal(lr))
    assert k3 == pytest.approx(lr**2 / 2 + lr**3 / 6, rel=1e-7)
    for factor, weight in ((1 - 1e-8, 0), (1 + 1e-8, 1)):
        assert weights_of(tensor([lr]), f"reject_k3:{k3 * factor!r}", 1.0)[0].item() == weight
    if abs(lr) < 1e-5:
        single = torch.tensor(lr, dtype=torch.float32)
        assert abs((single.exp() - 1 - single).item() / k3 - 1) > 1


def test_full_weights_are_unbiased_and_truncation_leans_to_the_engine():
    """Engine N(0, 1), trainer N(0.3, 1): E_engine[w x] is the trainer's mean 0.3, by Gauss-Hermite quadrature.

    Truncated where the ratio is above C, at x > c, it is 0.3 Phi(c - 0.3) - phi(c - 0.3) + C phi(c).
    """

    def moments(x, density, text):
        x, zeros = torch.from_numpy(x).view(-1, 1, 1), torch.zeros(len(x), 1, 1, dtype=torch.float64)
        lr = log_ratios(x, zeros + 0.3, zeros, torch.ones(len(x), 1))
        w = weights_of(lr, text, 1.0)[0].flatten().numpy() * density
        return w.sum(), (w * x.flatten().numpy()).sum()

    nodes, density = np.polynomial.hermite_e.hermegauss(60)
    assert moments(nodes, density / math.sqrt(2 * math.pi), "tis:100") == pytest.approx((1, 0.3), abs=1e-10)

    grid = np.linspace(-10, 10, 400001)
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    phi, Phi = lambda x: E(-x * x / 2) / math.sqrt(2 * math.pi), lambda x: (1 + math.erf(x / math.sqrt(2))) / 2
    c = (0.1 + 0.045) / 0.3
    total, first = moments(grid, density, "tis:0.1")
    assert first == pytest.approx(0.3 * Phi(c - 0.3) - phi(c - 0.3) + E(0.1) * phi(c), abs=1e-8)
    assert 0 < first < 0.3 and 0 < first / total < 0.3
    total, first = moments(grid, density, "icepop:0.1")  # a band of -0.18 to 0.48 in x, not centred on 0.3
    low, high = (-0.1 + 0.045) / 0.3 - 0.3, c - 0.3
    assert total == pytest.approx(Phi(high) - Phi(low), abs=1e-4)
    assert first == pytest.approx(0.3 * (Phi(high) - Phi(low)) - phi(high) + phi(low), abs=1e-4)


# ---- the option ------------------------------------------------------------------------------------------------------
def test_parse():
    assert parse_correction("none") == []
    assert parse_correction("tis:2") == [Factor("tis", per_trajectory=False, threshold=2.0)]
    assert parse_correction("icepop_trajectory:3e1, reject_k1:0.5,reject_k1_trajectory:4") == [
        Factor("icepop", per_trajectory=True, threshold=30.0),
        Factor("reject_k1", per_trajectory=False, threshold=0.5),
        Factor("reject_k1", per_trajectory=True, threshold=4.0),
    ]


NOT_A_FACTOR = ".* KIND:THRESHOLD .* reject_k1, "
TWICE = ".* tis "
ERRORS = {
    "": f"'' {NOT_A_FACTOR}",
    "tis:2,": f"'' {NOT_A_FACTOR}",
    "none,tis:2": f"'none' {NOT_A_FACTOR}",
    "TIS:2": f"'TIS:2' {NOT_A_FACTOR}",
    "reject_k4:2": f"'reject_k4:2' {NOT_A_FACTOR}",
    "tis_trajectory_trajectory:2": f"'tis_trajectory_trajectory:2' {NOT_A_FACTOR}",
    "tis:": f"'tis:' {NOT_A_FACTOR}",
    "tis:two": f"'tis:two' {NOT_A_FACTOR}",
    "icepop:0": f"'icepop:0' {NOT_A_FACTOR}",
    "tis:2:3": f"'tis:2:3' {NOT_A_FACTOR}",
    "reject_k1:-4": f"'reject_k1:-4' {NOT_A_FACTOR}",
    "tis:nan": f"'tis:nan' {NOT_A_FACTOR}",
    "tis:1e999": f"'tis:1e999' {NOT_A_FACTOR}",
    "tis:2,icepop:3": TWICE,
    "tis:2,tis_trajectory:3": TWICE,
}


@pytest.mark.parametrize("text", ERRORS)
def test_parse_errors(text):
    with pytest.raises(ValueError) as error:
        parse_correction(text)
    assert re.match(f"--rollout_correction {text}: {ERRORS[text]}", str(error.value)) and "\n" not in str(error.value)


# ---- the gate --------------------------------------------------------------------------------------------------------
SIGMAS = [1.0, 0.9, 0.6, 0.35, 0.0]
SDE_STEPS = (0, 2)


def rollout_of(velocity_error=0.0, sde_type="sde", noise_level=0.7, size=6, **changes):
    """A request of 3 images, the trajectories of an engine whose velocity is too long by a share, and the trainer's."""
    request = RolloutRequest(
        conditioning={"prompt_embeds": torch.zeros(3, 1)},
        negative_conditioning=None,
        prompt_index=torch.arange(3),
        seeds=[7, 8, 9],
        timesteps=1000 * torch.tensor(SIGMAS[:-1]),
        sigmas=torch.tensor(SIGMAS),
        latent_shape=(4, size, size),
        sde_steps=SDE_STEPS,
        sde_type=sde_type,
        noise_level=noise_level,
        guidance_scale=1.0,
        height=8,
        width=8,
        **changes,
    )
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    x = request.first_latents(generators, "cpu")
    first = x
    steps = []
    scores = []
    for i in range(4):
        v = torch.cos(3 * x)
        level = noise_level if i in SDE_STEPS else 0.0
        options = {"sde_type": sde_type, "sigma_max": request.sigma_max}
        engine_v = v * (1 + velocity_error)
        steps.append(sde_step(x, engine_v, SIGMAS[i], SIGMAS[i + 1], level, generator=generators, **options))
        if i in SDE_STEPS:
            x_next = steps[-1].prev_sample
            scores.append(sde_step(x, v, SIGMAS[i], SIGMAS[i + 1], level, prev_sample=x_next, **options))
        x = steps[-1].prev_sample
    trajectories = Trajectories.from_steps(first, steps, images=[None] * 3)
    scored = Trajectories(
        latents=trajectories.latents,
        prev_sample_means=torch.stack([out.prev_sample_mean for out in scores], 1),
        log_probs=torch.stack([out.log_prob for out in scores], 1),
        transition_stds=trajectories.transition_stds,
        images=trajectories.images,
    )
    return request, trajectories, scored


def test_weights_of_a_rollout_are_the_trainers_density_over_the_engines():
    """A velocity that is 1 % too long, at both SDE steps; the threshold truncates one ratio of the six, the largest."""
    request, trajectories, scored = rollout_of(0.01)
    x_next = trajectories.latents[:, [i + 1 for i in SDE_STEPS]]
    lr = normal_log_probs(x_next, scored.prev_sample_means, trajectories.transition_stds)
    lr -= normal_log_probs(x_next, trajectories.prev_sample_means, trajectories.transition_stds)
    limit = lr.flatten().sort().values[-2:].mean().item()
    assert lr.min() < -1e-4 and limit > 1e-5
    weights, metrics = rollout_weights("tis:1", request, trajectories, scored, clip_range=limit)
    torch.testing.assert_close(weights, lr.clamp(max=limit).exp().float(), rtol=0, atol=1e-7)
    assert metrics["rollout_corr/weight_max"].item() == pytest.approx(E(limit), rel=1e-9)


@pytest.fixture
def alone(monkeypatch):
    """A world of one rank."""
    monkeypatch.setattr("common.engine.mismatch.gather", lambda tensor: tensor[None])


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("noise_level", [0.1, 0.7])
@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps", "cps_gauss"])
def test_the_difference_of_velocities_knows_no_other_scale(sde_type, noise_level, size):
    """A velocity that is 1 % too long is 1 % off, for every step and kind of step, noise and number of elements."""
    request, trajectories, scored = rollout_of(0.01, sde_type, noise_level, size)
    differences = velocity_differences(request, trajectories, scored.prev_sample_means)
    torch.testing.assert_close(differences, torch.full((3, 2), 0.01, dtype=torch.float64), rtol=1e-3, atol=0)


def test_what_was_drawn_is_the_noise_of_the_seeds():
    request, trajectories, _ = rollout_of()
    assert noise_differences(request, trajectories).max() < 2e-7
    others = rollout_of()[0]
    others.seeds[1] = 1
    different = noise_differences(others, trajectories)
    assert different[1].min() > 0.1 and different[[0, 2]].max() < 2e-7
    # with initial latents given, a generator's first draw is the first step's
    start = draw_noise((3, 4, 6, 6))
    request, trajectories, _ = rollout_of(initial_latents=start)
    assert noise_differences(request, trajectories).max() < 2e-7


@pytest.mark.parametrize("column", [0, 1, 3])
def test_latents_rounded_to_bf16_are_seen(column):
    """The first latents and those at which a step ends, whatever the dtype of the forward passes."""
    request, trajectories, _ = rollout_of()
    latents = trajectories.latents.clone()
    latents[1, column] = latents[1, column].bfloat16().float()
    differences = noise_differences(request, trajectories.__class__(**{**vars(trajectories), "latents": latents}))
    assert 5e-4 < differences.max() < 5e-3
    assert differences[[0, 2]].max() < 2e-7


def test_the_gate_passes_round_off_and_tells_how_much_it_is(alone):
    request, trajectories, scored = rollout_of(0.01)
    metrics = check_mismatch(request, trajectories, scored, dtype="bfloat16")
    names = ("velocity_diff_max", "velocity_diff_max/0", "velocity_diff_max/2")
    assert all(metrics[f"rollout_corr/{name}"] == pytest.approx(0.01, rel=1e-3) for name in names)
    log_prob = (scored.log_probs - trajectories.log_probs).abs()
    assert metrics["rollout_corr/logprob_abs_diff_mean"] == log_prob.mean()
    assert metrics["rollout_corr/logprob_abs_diff_max"] == log_prob.max() > log_prob[:, 1].min()
    assert metrics["rollout_corr/logprob_abs_diff_max/2"] == log_prob[:, 1].max()


def test_the_gate_stops_another_policy_in_one_line(alone):
    request, trajectories, scored = rollout_of(0.01)
    scored.prev_sample_means[2, 1] += 1.0
    with pytest.raises(RunError, match=" 2 .*--rollout local") as error:
        check_mismatch(request, trajectories, scored, dtype="bfloat16")
    message = str(error.value)
    more_than = " 3.0e-02: "
    for hint in (more_than, "--rollout local"):
        assert hint in message, hint
    assert "\n" not in message and isinstance(error.value, RuntimeError)


def test_the_gate_stops_rounded_latents_and_a_ratio_that_starts_off(alone):
    request, trajectories, scored = rollout_of()
    rounded = trajectories.__class__(**{**vars(trajectories), "latents": trajectories.latents.bfloat16().float()})
    with pytest.raises(RunError, match=r" \d .* fp32 "):
        check_mismatch(request, rounded, scored, dtype="bfloat16")
    scored.log_probs[0, 1] += 1e-3
    check_mismatch(request, trajectories, scored, dtype="float32")
    with pytest.raises(RunError, match=" 2 .* 1.0e-03, .*--old_log_prob recompute"):
        check_mismatch(request, trajectories, scored, dtype="float32", log_ratio_limit=5e-4)
    own = 0.1 * (scored.log_probs - trajectories.log_probs)  # GRPO-Guard's are std times these
    check_mismatch(request, trajectories, scored, dtype="float32", log_ratio_limit=5e-4, log_ratios=own)
    with pytest.raises(RunError, match=" 2 .* 1.0e-04, .* 5.0e-05"):
        check_mismatch(request, trajectories, scored, dtype="float32", log_ratio_limit=5e-5, log_ratios=own)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 1])
def test_the_gate_stops_at_nan_wherever_it_is(bad, column, alone):
    for row in range(3):
        request, trajectories, scored = rollout_of()
        scored.prev_sample_means[row, column] = bad
        with pytest.raises(RunError, match=f" {SDE_STEPS[column]} "):
            check_mismatch(request, trajectories, scored, dtype="bfloat16")


def test_the_limit_follows_dtype_and_guidance(alone):
    one_pass = SimpleNamespace(guidance_scale=4.0, negative_conditioning=None)  # FLUX.1's guidance is an input
    assert velocity_limit("float32", one_pass) == 1e-4
    assert velocity_limit("bfloat16", one_pass) == 0.03
    two_passes = SimpleNamespace(guidance_scale=4.0, negative_conditioning={"prompt_embeds": torch.zeros(1)})
    assert velocity_limit("bfloat16", two_passes) == pytest.approx(0.03 * 5)  # 4 and -3: the root of 16 + 9
    request, trajectories, rescored = rollout_of(0.1)  # 10 % off
    request.guidance_scale, request.negative_conditioning = 4.0, two_passes.negative_conditioning
    check_mismatch(request, trajectories, rescored, dtype="bfloat16")
    for dtype, guidance_scale in (("bfloat16", 1.0), ("float32", 4.0)):
        request.guidance_scale = guidance_scale
        with pytest.raises(RunError, match=" 1.0e-01 .*--rollout local"):
            check_mismatch(request, trajectories, rescored, dtype=dtype)
