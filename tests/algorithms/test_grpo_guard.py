"""grpo_guard's regulated ratio and its clip: by hand, and against Gaussian log-probs."""

import math

from common.sde import sde_step
from grpo_guard import policy_loss, regulated_log_ratio

import pytest
import torch

pytestmark = pytest.mark.fast


def drawn(seed=0, batch=3, sigma=0.8, sigma_next=0.6):
    """x' drawn from an old policy, then scored by a new one whose d differs from sample to sample. fp64."""
    g = torch.Generator().manual_seed(seed)
    x, v, noise = (torch.randn(batch, 2, 3, 4, generator=g, dtype=torch.float64) for _ in range(3))
    shift = torch.randn(batch, 2, 3, 4, generator=g, dtype=torch.float64) * torch.tensor([0.01, 0.3, 2]).view(
        -1, 1, 1, 1
    )
    old = sde_step(x, v, sigma, sigma_next, 0.7, noise=noise)
    new = sde_step(x, v + shift, sigma, sigma_next, 0.7, prev_sample=old.prev_sample)
    return old, new, noise


def test_regulated_log_ratio_is_mean_eps_d_and_its_definition():
    """Invariant 8: (log-ratio + mean(d^2) / (2 std^2)) std, per sample, from torch's own Normal."""
    old, new, noise = drawn()
    d = new.prev_sample_mean - old.prev_sample_mean
    got = regulated_log_ratio(old.prev_sample, new.prev_sample_mean, old.prev_sample_mean, old.transition_std)
    torch.testing.assert_close(got, (noise * d).flatten(1).mean(1), rtol=0, atol=1e-10)
    std = old.transition_std.view(-1, 1, 1, 1)
    log_probs = [
        torch.distributions.Normal(m, std).log_prob(old.prev_sample).flatten(1).mean(1)
        for m in (new.prev_sample_mean, old.prev_sample_mean)
    ]
    bias = (d**2).flatten(1).mean(1) / (2 * old.transition_std**2)
    torch.testing.assert_close(got, (log_probs[0] - log_probs[1] + bias) * old.transition_std, rtol=0, atol=1e-10)
    over_the_batch = (log_probs[0] - log_probs[1] + bias.mean()) * old.transition_std
    assert (got - over_the_batch).abs().max() > 1e-3  # the dims slip of the paper's code is another number


def test_one_sample_does_not_see_the_others():
    old, new, _ = drawn()
    whole = regulated_log_ratio(old.prev_sample, new.prev_sample_mean, old.prev_sample_mean, old.transition_std)
    for i in range(3):
        alone = regulated_log_ratio(
            *(t[i : i + 1] for t in (old.prev_sample, new.prev_sample_mean, old.prev_sample_mean, old.transition_std))
        )
        # fp64 sums of 24 products, which another batch size may add up in another order
        torch.testing.assert_close(alone, whole[i : i + 1], rtol=1e-13, atol=1e-15)


def test_independent_of_std():
    g = torch.Generator().manual_seed(1)
    mean, old_mean, eps = (torch.randn(2, 5, generator=g, dtype=torch.float64) for _ in range(3))
    ratios = [
        regulated_log_ratio(old_mean + std * eps, mean, old_mean, torch.full((2,), std, dtype=torch.float64))
        for std in (1e-3, 0.1, 3.0)
    ]
    for ratio in ratios[1:]:
        torch.testing.assert_close(ratio, ratios[0], rtol=1e-9, atol=1e-12)


def test_the_bias_keeps_its_gradient():
    """d/dmean is eps / D wherever the policy is; without the bias' gradient it would be (x' - mean) / (std D)."""
    old, new, noise = drawn()
    mean = new.prev_sample_mean.clone().requires_grad_()
    regulated_log_ratio(old.prev_sample, mean, old.prev_sample_mean, old.transition_std).sum().backward()
    torch.testing.assert_close(mean.grad, noise / noise[0].numel(), rtol=1e-9, atol=1e-12)
    std = old.transition_std.view(-1, 1, 1, 1)
    detached = (old.prev_sample - new.prev_sample_mean) / std / noise[0].numel()
    assert (mean.grad - detached).abs().max() > 1e-2


def hand_loss(log_ratios, advantages, **options):
    """Loss of one-element samples with std 1: eps = 1, d = log_ratio."""
    mean = torch.tensor(log_ratios, dtype=torch.float64).view(-1, 1).requires_grad_()
    old_mean, one = torch.zeros_like(mean), torch.ones(len(mean), dtype=torch.float64)
    advantages = torch.tensor(advantages, dtype=torch.float64)
    options = {"clip_range": 0.1, **options}
    loss, metrics = policy_loss(torch.ones_like(mean), mean, old_mean, one, advantages, dt=-0.25, **options)
    loss.backward()
    return loss.item(), mean.grad.flatten().tolist(), {k: v.item() for k, v in metrics.items()}


@pytest.mark.parametrize(
    "log_ratio,advantage,moves",
    [(0.5, 1, False), (0.5, -1, True), (-0.5, 1, True), (-0.5, -1, False), (0.05, 1, True), (-0.05, -1, True)],
)
def test_clip_by_sign_and_side(log_ratio, advantage, moves):
    loss, grad, metrics = hand_loss([log_ratio], [advantage])
    ratio = torch.tensor(log_ratio, dtype=torch.float64).exp().item()
    used = ratio if moves else (1.1 if advantage > 0 else 0.9)
    assert loss == pytest.approx(-advantage * used / 0.25, rel=1e-12)  # over |dt|
    assert grad[0] == pytest.approx(-advantage * ratio / 0.25 if moves else 0, rel=1e-12)
    assert metrics["actor/pg_clipfrac"] == (not moves)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_papers_clip_of_2e_6_acts_in_fp32(advantage):
    """Where the ratio's neighbours are 1.2e-7 apart above 1: 3e-6 off is clipped, 1.9e-6 off is not, to 1e-9."""
    one = torch.ones(1)
    for log_ratio in (1.9e-6, 3e-6):
        mean = torch.tensor([[math.copysign(log_ratio, advantage)]])
        at = (one[:, None], mean, torch.zeros(1, 1), one, torch.tensor([advantage]))
        loss, metrics = policy_loss(*at, dt=-1.0, clip_range=2e-6)
        assert abs(loss.item() + advantage) == pytest.approx(min(log_ratio, 2e-6), abs=1e-9)
        assert metrics["actor/pg_clipfrac"] == (log_ratio > 2e-6)


def test_first_update_is_reinforce():
    """At the old policy: ratio 1, nothing clipped, loss -mean A / |dt|, gradient -A eps / (D |dt|)."""
    loss, grad, metrics = hand_loss([0.0, 0.0], [2, -1])
    assert loss == pytest.approx(-0.5 / 0.25) and grad == pytest.approx([-2 / 2 / 0.25, 1 / 2 / 0.25])
    assert metrics["actor/pg_clipfrac"] == 0 and metrics["actor/ratio_mean"] == 1


def test_a_weight_multiplies_its_samples_loss():
    weights = torch.tensor([0.0, 2.0], dtype=torch.float64)
    loss, grad, metrics = hand_loss([0.05, -0.05], [1, 1], sample_weights=weights)
    want = -math.exp(-0.05) / 0.25
    assert loss == pytest.approx(want) and grad == pytest.approx([0, want])
    assert metrics["actor/loss"] == loss


def test_ppo_kl_is_the_gaussian_kl():
    """Per element d^2 / (2 std^2), of d .3 and -.1."""
    assert hand_loss([0.3, -0.1], [1, 1])[2]["actor/ppo_kl"] == pytest.approx((0.09 + 0.01) / 2 / 2, rel=1e-12)
