"""The stochastic step against torch.distributions, hand numbers, and the noise-free propagation of a Gaussian."""

import copy
import itertools
import math
import re

from common import sde
from common.models.parts import sigma_schedule
from common.sde import (
    check_step_kind,
    check_window,
    draw_noise,
    image_seed,
    sde_step,
)

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

pytestmark = pytest.mark.fast

TYPES = ("sde", "dance", "cps", "cps_gauss")
GAUSSIAN = ("sde", "dance", "cps_gauss")


def batch(dtype=torch.float64, seed=0, shape=(3, 2, 4, 5)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]  # x, v and one more


def schedule(steps, shift=3.0):
    return sigma_schedule(FlowMatchEulerDiscreteScheduler(shift=shift), num_inference_steps=steps)


# ---- the step against hand numbers -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sde_type", "x", "v", "s", "s_next", "noise_level", "mean", "std"),
    [
        # q^2 = .64: 2 (1 - .64 .25 / 1) - 1 (1 + .64 .5 / 1) (-.25)
        ("sde", 2.0, -1.0, 0.5, 0.25, 0.8, 2.01, 0.4),
        ("dance", 2.0, -1.0, 0.5, 0.25, 0.8, 2.01, 0.4),
        # q^2 = .25 .8 / .2 = 1: (1 - .2 / 1.6) + 2 (1 + .2 / 1.6) (-.2)
        ("sde", 1.0, 2.0, 0.8, 0.6, 0.5, 0.425, math.sqrt(0.2)),
        # q^2 = .25: (1 - .25 .2 / 1.6) + 2 (1 + .25 .2 / 1.6) (-.2)
        ("dance", 1.0, 2.0, 0.8, 0.6, 0.5, 0.55625, 0.5 * math.sqrt(0.2)),
        # sin(pi / 6) = 1/2, x0 = 1 - 1.6, noise_hat = 1 + .4: -.6 .4 + 1.4 sqrt(.36 - .09)
        ("cps", 1.0, 2.0, 0.8, 0.6, 1 / 3, -0.24 + 1.4 * math.sqrt(0.27), 0.3),
        ("cps_gauss", 1.0, 2.0, 0.8, 0.6, 1 / 3, -0.24 + 1.4 * math.sqrt(0.27), 0.3),
    ],
)
def test_mean_and_std_by_hand(sde_type, x, v, s, s_next, noise_level, mean, std):
    x, v = torch.full((1, 1), x, dtype=torch.float64), torch.full((1, 1), v, dtype=torch.float64)
    out = sde_step(x, v, s, s_next, noise_level, sde_type=sde_type, noise=torch.full((1, 1), 2.0))
    assert out.prev_sample_mean.item() == pytest.approx(mean, abs=1e-12)
    assert out.transition_std.item() == pytest.approx(std, abs=1e-12)
    assert out.prev_sample.item() == pytest.approx(mean + 2 * std, abs=1e-12)


# ---- invariant 1: the log-density ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("sde_type", GAUSSIAN)
def test_log_prob_is_the_mean_normal_log_density(sde_type, dtype, tolerance):
    x, v, elsewhere = batch(dtype)
    drawn = sde_step(x, v, 0.8, 0.65, 0.6, sde_type=sde_type, generator=torch.Generator().manual_seed(1))
    scored = sde_step(x, v, 0.8, 0.65, 0.6, sde_type=sde_type, prev_sample=elsewhere)
    for out, where in ((drawn, drawn.prev_sample), (scored, elsewhere)):
        normal = torch.distributions.Normal(out.prev_sample_mean.double(), out.transition_std[0].double())
        expected = normal.log_prob(where.double()).mean((1, 2, 3))
        assert out.log_prob.shape == out.transition_std.shape == (3,)
        assert out.log_prob.dtype == dtype
        torch.testing.assert_close(out.log_prob.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(scored.prev_sample, elsewhere)
    assert scored.log_prob.unique().numel() == 3  # by sample, not over the batch


def test_cps_log_prob_is_the_unscaled_square():
    x, v, elsewhere = batch()
    out = sde_step(x, v, 0.8, 0.65, 0.6, sde_type="cps", prev_sample=elsewhere)
    expected = -(elsewhere - out.prev_sample_mean).square().mean((1, 2, 3))
    torch.testing.assert_close(out.log_prob, expected, rtol=1e-12, atol=0)
    gauss = sde_step(x, v, 0.8, 0.65, 0.6, sde_type="cps_gauss", prev_sample=elsewhere)
    assert torch.equal(out.prev_sample_mean, gauss.prev_sample_mean)
    # log-ratio_cps = 2 std^2 log-ratio_gauss
    other = [
        sde_step(x, v + 0.1, 0.8, 0.65, 0.6, sde_type=kind, prev_sample=elsewhere).log_prob
        for kind in ("cps", "cps_gauss")
    ]
    variance = gauss.transition_std.square()
    torch.testing.assert_close(other[0] - out.log_prob, 2 * variance * (other[1] - gauss.log_prob))


@pytest.mark.parametrize("sde_type", TYPES)
def test_scoring_what_was_drawn_gives_the_same_bits(sde_type):
    x, v, _ = batch(torch.float32)
    drawn = sde_step(x, v, 0.8, 0.65, 0.6, sde_type=sde_type, generator=torch.Generator().manual_seed(1))
    scored = sde_step(x, v, 0.8, 0.65, 0.6, sde_type=sde_type, prev_sample=drawn.prev_sample)
    assert torch.equal(drawn.log_prob, scored.log_prob)


@pytest.mark.parametrize("sde_type", GAUSSIAN)
def test_gradient_of_log_prob_flows_through_the_mean_alone(sde_type):
    x, v, noise = batch()
    v.requires_grad_()
    drawn = sde_step(x, v, 0.8, 0.65, 0.6, sde_type=sde_type, noise=noise)
    d_mean = torch.autograd.grad(drawn.prev_sample_mean.sum(), v, retain_graph=True)[0]  # the mean is affine in v
    gradient = torch.autograd.grad(drawn.log_prob.sum(), v)[0]
    # d/dmean of the mean log-density: (x' - mean) / std^2 / D = eps / std / D
    torch.testing.assert_close(gradient, d_mean * noise / drawn.transition_std[0] / noise[0].numel())
    given = drawn.prev_sample.detach().clone().requires_grad_()
    sde_step(x, v, 0.8, 0.65, 0.6, sde_type=sde_type, prev_sample=given).log_prob.sum().backward()
    assert given.grad is None
    torch.testing.assert_close(v.grad, gradient)


# ---- invariant 2: no noise -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("s", "s_next"), [(1.0, 0.9), (0.7, 0.6), (0.3, 0.0)])
@pytest.mark.parametrize("sde_type", TYPES)
def test_noise_level_0_is_the_euler_step(sde_type, s, s_next):
    x, v, elsewhere = batch()
    out = sde_step(x, v, s, s_next, 0.0, sde_type=sde_type, generator=torch.Generator())
    torch.testing.assert_close(out.prev_sample, x + v * (s_next - s), rtol=1e-12, atol=1e-12)
    assert torch.equal(out.prev_sample, out.prev_sample_mean)
    assert out.log_prob is None
    assert torch.equal(out.transition_std, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=f" {s} .* {s_next} "):
        sde_step(x, v, s, s_next, 0.0, sde_type=sde_type, prev_sample=elsewhere)


@pytest.mark.parametrize("sde_type", TYPES)
def test_an_ode_step_draws_nothing(sde_type):
    x, v, _ = batch()
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    sde_step(x, v, 0.7, 0.6, 0.0, sde_type=sde_type, generator=generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("sde_type", ["cps", "cps_gauss"])
def test_cps_step_to_zero_is_deterministic(sde_type):
    x, v, elsewhere = batch()
    out = sde_step(x, v, 0.3, 0.0, 0.8, sde_type=sde_type)
    torch.testing.assert_close(out.prev_sample, x - 0.3 * v)
    assert out.log_prob is None
    with pytest.raises(ValueError, match=" 0.3 .* 0.0"):
        sde_step(x, v, 0.3, 0.0, 0.8, sde_type=sde_type, prev_sample=elsewhere)


# ---- invariant 3 -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("s", [0.2, 0.5, 0.9])
def test_sde_at_a_matched_level_is_dance(s):
    x, v, noise = batch()
    sde = sde_step(x, v, s, s - 0.1, 0.7, sde_type="sde", noise=noise)
    dance = sde_step(x, v, s, s - 0.1, 0.7 * math.sqrt(s / (1 - s)), sde_type="dance", noise=noise)
    for a, b in zip(sde, dance, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    if s != 0.5:
        assert not torch.allclose(sde.transition_std, sde_step(x, v, s, s - 0.1, 0.7, sde_type="dance").transition_std)


# ---- invariant 4: the schedule's ends --------------------------------------------------------------------------------
def test_check_values_of_the_sd3_schedule():
    timesteps, sigmas = schedule(10)
    expected = torch.tensor([1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0])
    torch.testing.assert_close(sigmas, expected, rtol=0, atol=5.1e-5)
    x = torch.zeros(1, 1)
    stds = [
        sde_step(x, x, s, s_next, 0.7, sde_type="sde", sigma_max=sigmas[1].item()).transition_std
        for s, s_next in itertools.pairwise(sigmas.tolist())
    ]
    expected = torch.tensor([0.7000, 0.7430, 0.5362, 0.4459, 0.3918, 0.3528, 0.3191, 0.2820, 0.2254, 0.0063])
    torch.testing.assert_close(torch.cat(stds), expected, rtol=0, atol=5.1e-5)
    assert timesteps.dtype == sigmas.dtype == torch.float32
    assert timesteps.shape == (10,)
    torch.testing.assert_close(timesteps, 1000 * sigmas[:-1])
    assert (timesteps != timesteps.round()).sum() >= 8  # never cut to integers


@pytest.mark.parametrize("sde_type", TYPES)
def test_finite_at_both_ends(sde_type):
    _, sigmas = schedule(10)
    x, v, _ = batch(torch.float32)
    for i in range(10):
        s, s_next = sigmas[i].item(), sigmas[i + 1].item()
        out = sde_step(x, v, s, s_next, 0.7, sde_type=sde_type, sigma_max=sigmas[1].item())
        assert out.prev_sample.isfinite().all()
        assert out.prev_sample_mean.isfinite().all()
        assert out.log_prob is None or out.log_prob.isfinite().all()
        x = out.prev_sample


def test_sigma_max():
    x, v, noise = batch()
    for s in (1.0, 1 - 1e-7):
        with pytest.raises(ValueError, match="sigma_max"):
            sde_step(x, v, s, 0.9, 0.7, sde_type="sde")
        for sde_type in ("dance", "cps", "cps_gauss"):
            sde_step(x, v, s, 0.9, 0.7, sde_type=sde_type)  # these have no denominator
    # q^2 = .49 / (1 - .96), std = sqrt(12.25 .04) = .7
    assert sde_step(x, v, 1.0, 0.96, 0.7, sde_type="sde", sigma_max=0.96).transition_std[0].item() == pytest.approx(0.7)
    # below sigma_max it plays no part
    low = [sde_step(x, v, 0.8, 0.7, 0.7, noise=noise, sigma_max=bound).prev_sample for bound in (None, 0.96)]
    assert torch.equal(*low)


def test_a_schedule_that_starts_below_1():
    x, v, _ = batch()
    out = sde_step(x, v, 0.9999, 0.96, 0.7, sde_type="sde", sigma_max=0.96)
    assert out.transition_std[0].item() == pytest.approx(0.7 * math.sqrt(0.9999 / 0.04 * 0.0399))
    steep = sde_step(x, v, 0.9999, 0.96, 0.7, sde_type="sde")  # without sigma_max: q^2 = .49 .9999 / .0001
    assert steep.transition_std[0].item() == pytest.approx(0.7 * math.sqrt(9999 * 0.0399))
    assert steep.prev_sample.isfinite().all()


# ---- invariant 5: marginals ------------------------------------------------------------------------------------------
MEAN, STD = 1.5, 0.5  # of the 1-D data


def exact_velocity(x, s):
    """E[noise - x0 | x_s = x] for x0 ~ N(MEAN, STD^2), by the regression of a jointly Gaussian pair."""
    variance = (1 - s) ** 2 * STD**2 + s**2
    return -MEAN + (s - (1 - s) * STD**2) / variance * (x - (1 - s) * MEAN)


@pytest.mark.parametrize(
    ("sde_type", "noise_level", "ratios"),
    [
        ("sde", 0.7, {10: 0.8421, 40: 0.9590, 1000: 0.9995}),
        ("sde", 0.0, {10: 0.7184, 40: 0.9292, 1000: 0.9971}),
        ("cps", 0.8, {10: 0.6154, 40: 0.7415, 1000: 0.8018}),
    ],
)
def test_marginal_std_by_propagation(sde_type, noise_level, ratios):
    probe = torch.tensor([[0.0], [1.0]], dtype=torch.float64)  # a step is affine in x: two points give its coefficients
    for steps, ratio in ratios.items():
        sigmas = schedule(steps)[1].tolist()
        mean, variance = 0.0, 1.0
        for s, s_next in zip(sigmas[:-2], sigmas[1:-1], strict=True):
            v = exact_velocity(probe, s)
            out = sde_step(probe, v, s, s_next, noise_level, sde_type=sde_type, sigma_max=sigmas[1])
            constant, slope = out.prev_sample_mean[0].item(), out.prev_sample_mean.diff(dim=0).item()
            mean, variance = constant + slope * mean, slope**2 * variance + out.transition_std[0].item() ** 2
        s = sigmas[-2]
        exact = math.sqrt((1 - s) ** 2 * STD**2 + s**2)
        assert math.sqrt(variance) / exact == pytest.approx(ratio, abs=1e-3), steps
    if sde_type == "sde":  # 1000 steps: the mean too
        assert mean == pytest.approx((1 - s) * MEAN, abs=5e-3)


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("s", "s_next"), [(0.5, 0.5), (0.5, 0.6)])
def test_sigma_must_go_down(s, s_next):
    x, v, _ = batch()
    with pytest.raises(ValueError, match=f" {s} .* {s_next} "):
        sde_step(x, v, s, s_next, 0.7)


def test_unknown_sde_type():
    x, v, _ = batch()
    with pytest.raises(ValueError, match="^--sde_type ode: .* sde, dance, cps, cps_gauss"):
        sde_step(x, v, 0.5, 0.4, 0.7, sde_type="ode")


# ---- kinds as functions, and one of the user's own -------------------------------------------------------------------
@pytest.mark.parametrize("sde_type", TYPES)
@pytest.mark.parametrize(("s", "s_next"), [(0.9, 0.8), (0.5, 0.1)])
def test_kinds_are_functions_in_their_papers_form(sde_type, s, s_next):
    x, v, noise = batch()
    dt = s_next - s
    if sde_type in ("sde", "dance"):  # arXiv 2505.05470, eq. 9, and 2505.07818
        q = 0.6 * math.sqrt(s / (1 - s)) if sde_type == "sde" else 0.6
        expected = x + (v + q**2 / (2 * s) * (x + (1 - s) * v)) * dt
        expected_std = q * math.sqrt(-dt)
    else:  # arXiv 2509.05952: of the predicted x0 and noise
        expected_std = s_next * math.sin(0.6 * math.pi / 2)
        expected = (1 - s_next) * (x - s * v) + math.sqrt(s_next**2 - expected_std**2) * (x + (1 - s) * v)
    mean, std = getattr(sde, sde_type)(x, v, s, s_next, 0.6, None)
    assert isinstance(std, float) and std == pytest.approx(expected_std, rel=1e-12)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    out = sde_step(x, v, s, s_next, 0.6, sde_type=sde_type, noise=noise)
    assert torch.equal(out.prev_sample_mean, mean) and out.transition_std.tolist() == [std] * 3


# eq. 9 as a user might write it: sorted as the paper has it, and not as ours, by x and v
OWN_STEP_KIND = """
def flow_sde(x, v, sigma, sigma_next, noise_level, sigma_max):
    dt = sigma_next - sigma
    q_squared = noise_level**2 * sigma / (1 - min(sigma, sigma_max or 1)) if noise_level else 0.0
    mean = x + (v + q_squared / (2 * sigma) * (x + (1 - sigma) * v)) * dt
    return mean, (q_squared * -dt) ** 0.5
number = 3
"""


@pytest.fixture
def own_step_kind(tmp_path):
    path = tmp_path / "my_steps.py"
    path.write_text(OWN_STEP_KIND)
    return f"{path}:flow_sde"


@pytest.mark.parametrize(("s", "s_next", "noise_level"), [(0.8, 0.65, 0.6), (1.0, 0.9, 0.6), (0.3, 0.0, 0.0)])
def test_a_kind_of_the_users_own_is_drawn_and_scored_as_ours(own_step_kind, s, s_next, noise_level):
    x, v, elsewhere = batch()
    ways = [{"generator": torch.Generator()}]
    if noise_level:
        ways.append({"prev_sample": elsewhere})
    for way in ways:
        own, ours = (
            sde_step(x, v, s, s_next, noise_level, sde_type=kind, sigma_max=0.96, **copy.deepcopy(way))
            for kind in (own_step_kind, "sde")
        )
        assert (own.log_prob is None) == (ours.log_prob is None) == (noise_level == 0)
        for a, b in zip(own, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        if noise_level:  # a Gaussian, by torch's own
            normal = torch.distributions.Normal(own.prev_sample_mean, own.transition_std[0])
            expected = normal.log_prob(own.prev_sample).mean((1, 2, 3))
            torch.testing.assert_close(own.log_prob, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=rf" {s} .* {s_next} .*\(noise_level 0.0\)"):
        sde_step(x, v, s, s_next, 0.0, sde_type=own_step_kind, sigma_max=0.96, prev_sample=elsewhere)


def test_a_kind_that_is_not_there_is_one_line(own_step_kind, tmp_path):
    path = own_step_kind.rpartition(":")[0]
    (tmp_path / "text.txt").write_text("")
    wrong = {
        f"{tmp_path}/nowhere.py:flow_sde": "nowhere.py",
        f"{path}:dance": " dance",
        f"{path}:number": " number",
        f"{path}:": path,
        f"{tmp_path}/text.txt:flow_sde": " .py ",
    }
    for kind, message in wrong.items():
        with pytest.raises(ValueError) as error:
            sde.find_step_kind(kind)
        text = str(error.value)
        assert text.startswith(f"--sde_type {kind}: ") and message in text and "\n" not in text


STEP_KINDS = """
import torch
def raises(x, v, sigma, sigma_next, noise_level, sigma_max):
    raise KeyError("mine")
def of_another_shape(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x.sum(), 0.1
def silent(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x, 0.0
def not_a_number(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x, float("nan")
def without_std(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x[None]
def not_euler(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x, noise_level
def of_the_mean_image(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x + v * (sigma_next - sigma) + noise_level * x.mean(0), noise_level
def of_the_batch_std(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x + v * (sigma_next - sigma), noise_level * float(x.std())
def of_the_batch_velocity(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x + v * (sigma_next - sigma), noise_level * float(v.abs().mean())
def drawn_twice(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x + v * (sigma_next - sigma) + noise_level * torch.randn_like(x), noise_level
def of_the_first_std(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x + v * (sigma_next - sigma), noise_level * float(x[0].std())
def of_the_first_image(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x + v * (sigma_next - sigma) + noise_level * x[:1], noise_level
def of_the_mean_sum(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x + v * (sigma_next - sigma) + noise_level * (x + v).mean(0), noise_level
def not_euler_below_1(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x + v * (sigma_next - sigma) + float(sigma < 1), noise_level
takes_less = lambda x, v: x
"""


OF_OTHERS = r" 1\.0 .* 0\.9 .* x and v .*sde_step"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("raises", "KeyError: 'mine'"),
        ("of_another_shape", r" 1\.0 .* \(2, 2, 3\)"),
        ("silent", " std 0 "),
        ("not_a_number", " std nan "),
        ("without_std", "ValueError: not enough values to unpack"),
        ("not_euler", r" noise_level 0 .* 1\.0 .* 0\.9 .* Euler "),
        (
            "not_euler_below_1",
            r" noise_level 0 .* 0\.6 .* 0\.5 .* Euler ",
        ),
        ("of_the_mean_image", OF_OTHERS),
        ("of_the_batch_std", OF_OTHERS),
        ("of_the_batch_velocity", OF_OTHERS),
        ("of_the_first_std", OF_OTHERS),
        ("of_the_first_image", OF_OTHERS),
        ("of_the_mean_sum", OF_OTHERS),
        ("drawn_twice", OF_OTHERS),
        ("takes_less", "TypeError"),
    ],
)
def test_a_kind_of_the_users_own_is_tried_before_a_model_loads(name, fault, tmp_path):
    (tmp_path / "kinds.py").write_text(STEP_KINDS)
    with pytest.raises(ValueError) as error:
        check_step_kind(f"{tmp_path}/kinds.py:{name}", 0.7)
    message = str(error.value)
    assert message.startswith(f"--sde_type {tmp_path}/kinds.py:{name} --noise_level 0.7:")
    assert re.search(fault, message) and "\n" not in message


@pytest.mark.parametrize(
    ("sde_type", "noise_level", "fault"),
    [
        ("sde", 1e-320, r" 1\.0 .* 0\.9 .* std 0 "),  # its square is 0
        ("sde", 1e308, "OverflowError"),
        ("cps", 2.0, " pi / 2: .* 1$"),
        ("cps_gauss", 2.0, " pi / 2: .* 1$"),
    ],
)
def test_a_noise_level_that_a_kind_cannot_take_is_refused(sde_type, noise_level, fault):
    with pytest.raises(ValueError) as error:
        check_step_kind(sde_type, noise_level)
    assert str(error.value).startswith(f"--sde_type {sde_type} --noise_level {noise_level}: ")
    assert re.search(fault, str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("window_range", "size", "steps"),
    [((-1, 1), 1, 3), ((1, 1), 1, 3), ((1, 0), 1, 3), ((0, 3), 1, 3), ((0, 9), 1, 3), ((0, 2), 3, 9), ((7, 11), 4, 6)],
)
def test_a_window_that_does_not_fit_is_refused(window_range, size, steps):
    """The last of the schedule's steps is never stochastic."""
    low, high = window_range
    expected = f"^--sde_window_range {low} {high}: --sde_window_size {size} .* 0 {steps - 1} .* {steps} "
    with pytest.raises(ValueError, match=expected):
        check_window(window_range, size, steps)
    check_window((0, steps - 1), 1, steps)


# ---- noise and dtypes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sde_type", TYPES)
def test_one_generator_per_image_makes_batching_irrelevant(sde_type):
    x, v, _ = batch(torch.float32)
    generators = [torch.Generator().manual_seed(10 + i) for i in range(3)]
    together = sde_step(x, v, 0.8, 0.6, 0.7, sde_type=sde_type, generator=generators).prev_sample
    for i in (2, 0, 1):
        own = [torch.Generator().manual_seed(10 + i)]
        alone = sde_step(x[i : i + 1], v[i : i + 1], 0.8, 0.6, 0.7, sde_type=sde_type, generator=own)
        # the same noise; mean + std eps may end in another vector lane, with another rounding of the last place
        torch.testing.assert_close(alone.prev_sample[0], together[i], rtol=1e-6, atol=1e-6)


def test_draw_noise():
    a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    noise = draw_noise((2, 3, 4), [a, b])
    assert torch.equal(noise[1], torch.randn(3, 4, generator=torch.Generator().manual_seed(2)))
    assert not torch.equal(draw_noise((2, 3, 4), [a, b]), noise)  # a generator moves on
    with pytest.raises(ValueError, match="^2 .* 3$"):
        draw_noise((3, 4), [a, b])
    many = draw_noise((200, 100), torch.Generator().manual_seed(0))
    assert abs(many.mean()) < 0.03
    assert many.std().item() == pytest.approx(1, abs=0.03)


def test_noise_wins_over_the_generator():
    x, v, noise = batch()
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    out = sde_step(x, v, 0.8, 0.6, 0.7, noise=noise, generator=generator)
    torch.testing.assert_close((out.prev_sample - out.prev_sample_mean) / out.transition_std[0], noise)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("sde_type", TYPES)
def test_arithmetic_is_fp32_for_bf16_input(sde_type):
    x, v, noise = batch(torch.bfloat16)
    out = sde_step(x, v, 0.8, 0.6, 0.7, sde_type=sde_type, noise=noise)
    full = sde_step(x.float(), v.float(), 0.8, 0.6, 0.7, sde_type=sde_type, noise=noise.float())
    exact = sde_step(x.double(), v.double(), 0.8, 0.6, 0.7, sde_type=sde_type, noise=noise.double())
    for a, b, c in zip(out, full, exact, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
        torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=2e-6)
        assert c.dtype == torch.float64


# ---- seeds, windows, schedules ---------------------------------------------------------------------------------------
def test_image_seed_is_stable_and_distinct():
    # printf "1 0 0" | b2sum -l 64 gives c447c3bd68ad511c, "7 3 41" c7af152cd00fc51e; halved to 63 bits
    assert image_seed(1, 0, 0) == 0xC447C3BD68AD511C // 2
    assert image_seed(7, 3, 41) == 0xC7AF152CD00FC51E // 2
    seeds = {image_seed(seed, step, index) for seed in range(3) for step in range(12) for index in range(112)}
    assert len(seeds) == 3 * 12 * 112  # "1 11 1" is not "1 1 11"
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sigma_schedule_is_a_copy():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    timesteps, sigmas = sigma_schedule(scheduler, num_inference_steps=10)
    kept = timesteps.clone(), sigmas.clone()
    scheduler.timesteps.zero_()
    scheduler.sigmas.zero_()
    sigma_schedule(scheduler, num_inference_steps=4)
    assert torch.equal(timesteps, kept[0])
    assert torch.equal(sigmas, kept[1])
