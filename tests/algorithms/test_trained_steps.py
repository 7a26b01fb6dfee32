"""Flow-GRPO's trained sampling steps, and the KL to the reference at such a step; the other GRPO scripts share both."""

from collections import Counter

import flow_grpo
from common.sde import SDEStepOutput, sde_step

import pytest
import torch

pytestmark = pytest.mark.fast

TYPES = ("sde", "dance", "cps", "cps_gauss")


# ---- the window ------------------------------------------------------------------------------------------------------
def windows(steps, seed, size, window_range):
    args = flow_grpo.Args(seed=seed, sde_window_size=size, sde_window_range=window_range, num_inference_steps=20)
    return [flow_grpo.draw_sde_steps(args, step) for step in steps]


@pytest.mark.parametrize(("size", "window_range"), [(2, (0, 5)), (1, (3, 9)), (4, (0, 4))])
def test_a_random_window_covers_its_range_evenly(size, window_range):
    low, high = window_range
    drawn = windows(range(1500), 1, size, window_range)
    assert all(window == tuple(range(window[0], window[0] + size)) for window in drawn)
    starts = Counter(window[0] for window in drawn)
    assert set(starts) == set(range(low, high - size + 1))
    assert min(starts.values()) > 0.8 * 1500 / len(starts)
    assert windows(range(50), 1, size, window_range) == drawn[:50]


def test_a_random_window_depends_on_seed_and_step():
    assert windows(range(20), 1, 2, (0, 9)) != windows(range(20), 100, 2, (0, 9))
    assert len(set(windows(range(20), 1, 2, (0, 9)))) > 3


def test_without_a_window_all_steps_except_the_last_are_trained():
    assert windows([1], 1, 0, (0, 1)) == [tuple(range(19))]


# ---- the KL ----------------------------------------------------------------------------------------------------------
def kl_divergence(out, ref, dt, sde_type, kl_type):
    args = flow_grpo.Args(sde_type=sde_type, kl_type=kl_type)
    return flow_grpo.kl_divergence(args, out, ref.prev_sample_mean, ref.velocity, dt)


@pytest.mark.parametrize(
    ("sde_type", "kl_type", "expected"),
    [  # std .5 and .25, dt -.2, mean squares .04 and .01; those of the velocities .25 and .0625
        ("sde", "paper", [0.04 / 0.5, 0.01 / 0.125]),
        ("sde", "code", [0.2 * 0.04 / 0.5, 0.2 * 0.01 / 0.125]),
        ("dance", "code", [0.04 / 0.5, 0.01 / 0.125]),
        ("cps", "code", [0.04 / 0.5, 0.01 / 0.125]),
        ("cps_gauss", "paper", [0.04 / 0.5, 0.01 / 0.125]),
        ("sde", "velocity", [0.25, 0.0625]),
        ("cps", "velocity", [0.25, 0.0625]),
    ],
)
def test_kl_by_hand(sde_type, kl_type, expected):
    mean, zero = torch.zeros(2, 3, 4, dtype=torch.float64), torch.zeros(2, 3, 4, dtype=torch.float64)
    mean[0], mean[1, :, 0] = 0.2, 0.2  # a quarter of the second sample's elements
    std = torch.tensor([0.5, 0.25], dtype=torch.float64)
    out = SDEStepOutput(mean, None, mean, std, 2.5 * mean)
    kl = kl_divergence(out, SDEStepOutput(zero, None, zero, std, zero), -0.2, sde_type, kl_type)
    torch.testing.assert_close(kl, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert kl_divergence(out, out, -0.2, sde_type, kl_type).tolist() == [0, 0]


@pytest.mark.parametrize("sde_type", TYPES)
def test_kl_is_that_of_torch_and_code_is_paper_times_dt_for_sde(sde_type):
    """Invariant 9, with std as sde_step has it: 'paper' is the divergence of the two Gaussians, per element."""
    g = torch.Generator().manual_seed(0)
    x, v, v_ref, noise = (torch.randn(3, 2, 5, generator=g, dtype=torch.float64) for _ in range(4))
    out, ref = (sde_step(x, v, 0.6, 0.35, 0.7, sde_type=sde_type, noise=noise) for v in (v, v_ref))
    std = out.transition_std[:, None, None]
    normal = [torch.distributions.Normal(o.prev_sample_mean, std) for o in (out, ref)]
    paper = kl_divergence(out, ref, -0.25, sde_type, "paper")
    torch.testing.assert_close(paper, torch.distributions.kl_divergence(*normal).flatten(1).mean(1), rtol=1e-9, atol=0)
    code = kl_divergence(out, ref, -0.25, sde_type, "code")
    torch.testing.assert_close(code, paper * (0.25 if sde_type == "sde" else 1), rtol=1e-12, atol=0)
    assert (paper > 0).all()
    velocity = kl_divergence(out, ref, -0.25, sde_type, "velocity")
    torch.testing.assert_close(velocity, ((v - v_ref) ** 2).flatten(1).mean(1), rtol=1e-12, atol=0)
