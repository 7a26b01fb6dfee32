"""Conventions of the reference implementations that are easily missed: what they do at the edges, by hand."""

import math
from types import SimpleNamespace

import diffusion_nft
import grpo_guard
from common.noise import image_seed
from common.rewards.ocr import ocr_score
from common.sde import multistep_ode_step

import pytest
import torch

pytestmark = pytest.mark.fast


# ---- DiffusionNFT ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("fraction", "steps", "trained"), [(0.99, 10, 9), (0.5, 3, 1), (0.5, 5, 2), (0.01, 10, 1)])
def test_the_share_of_timesteps_is_truncated(fraction, steps, trained):
    """As in the paper's code and in VeRL-Omni: .99 of 10 steps trains 9; at least one."""
    args = SimpleNamespace(seed=1, timestep_fraction=fraction, num_inference_steps=steps)
    request = SimpleNamespace(timesteps=torch.arange(steps).float(), latent_shape=(2, 3))
    timesteps, noise = diffusion_nft.draw_training_noise(args, request, 4, 0, torch.tensor([0, 5]))
    assert timesteps.shape == (2, trained) and noise.shape == (2, trained, 2, 3)


def test_every_epoch_draws_timesteps_and_noise_anew():
    args = SimpleNamespace(seed=1, timestep_fraction=0.5, num_inference_steps=10)
    request = SimpleNamespace(timesteps=torch.arange(10).float(), latent_shape=(2, 3))
    index = torch.arange(6)
    draws = [diffusion_nft.draw_training_noise(args, request, 4, epoch, index) for epoch in (0, 1, 0)]
    assert torch.equal(draws[0][0], draws[2][0]) and torch.equal(draws[0][1], draws[2][1])
    assert not torch.equal(draws[0][0], draws[1][0])
    assert (draws[0][1] - draws[1][1]).abs().min() > 0
    # the first epoch's draw is that of (seed, step, image) alone
    generator = torch.Generator().manual_seed(image_seed(1, "4 update", 3))
    assert torch.equal(draws[0][0][3], torch.randperm(10, generator=generator)[:5].float())


def test_an_update_draws_for_each_of_its_epochs(monkeypatch):
    """Once an epoch, for all of its mini-batches, and with them what policies say there that do not change."""
    draws = []
    used = []
    frozen = []

    def draw(args, request, step, epoch, image_index):
        draws.append((step, epoch))
        return epoch, epoch

    def velocities_of(args, model, policy, batch, *, timesteps, noise):
        frozen.append((policy, timesteps, noise))
        return f"{policy} {timesteps}"

    def accumulate(args, model, batch, mini_batch, *, timesteps, noise, v_old, v_ref):
        assert (v_old, v_ref) == (f"old {timesteps}", f"reference {timesteps}")
        used.append((timesteps, noise, mini_batch.tolist()))
        return []

    monkeypatch.setattr(diffusion_nft, "draw_training_noise", draw)
    monkeypatch.setattr(diffusion_nft, "velocities_of", velocities_of)
    monkeypatch.setattr(diffusion_nft, "accumulate_gradients", accumulate)
    monkeypatch.setattr(diffusion_nft, "optimizer_step", lambda *args: math.inf)
    batch = SimpleNamespace(x0=torch.zeros(4, 1), request=None, image_index=None)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    args = SimpleNamespace(updates_per_rollout=2, epochs_per_rollout=2, kl_coef=0.1)
    metrics = diffusion_nft.update(args, None, optimizer, batch, 7)
    assert draws == [(7, 0), (7, 1)]
    assert frozen == [("old", 0, 0), ("reference", 0, 0), ("old", 1, 1), ("reference", 1, 1)]
    assert used == [(0, 0, [0, 1]), (0, 0, [2, 3]), (1, 1, [0, 1]), (1, 1, [2, 3])]
    assert metrics == {"actor/skipped_steps": 4, "actor/lr": 0.1}


# ---- Flow-DPPO -------------------------------------------------------------------------------------------------------
def test_dppo_is_the_plain_ratio_without_reweighting():
    """-A exp(log_prob - old_log_prob), mean log-probs, not divided by |dt|; masked where the divergence would grow."""
    generator = torch.Generator().manual_seed(0)
    old_mean, eps, shift = (torch.randn(4, 3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    std = torch.full((4,), 0.3, dtype=torch.float64)
    x_next = old_mean + 0.3 * eps
    mean = (old_mean + 0.02 * shift).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, -1.0], dtype=torch.float64)

    def log_prob(m):
        return torch.distributions.Normal(m, 0.3).log_prob(x_next).flatten(1).mean(1)

    ratio = (log_prob(mean) - log_prob(old_mean)).exp()
    divergence = ((mean - old_mean) ** 2).flatten(1).mean(1) / (2 * 0.3**2)
    delta = divergence.median().item()
    is_masked = (divergence >= delta) & (advantages * (ratio - 1) > 0)
    assert 0 < is_masked.sum() < 4
    want = torch.where(is_masked, 0.0, -advantages * ratio).mean()
    options = {"clip_range": 1e-3, "trust_region": "dppo", "dppo_delta": delta}
    for dt in (-0.25, -0.01):
        got, _ = grpo_guard.policy_loss(x_next, mean, old_mean, std, advantages, dt=dt, **options)
        assert got.item() == pytest.approx(want.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(got, mean)
    (expected,) = torch.autograd.grad(want, mean)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-15)


def test_the_sign_of_dppos_mask_is_the_plain_ratios():
    """Where 0 < mean(eps d) < mean(d^2) / (2 std) the regulated ratio is above 1 and the plain one below."""
    old_mean = torch.zeros(1, 2, dtype=torch.float64)
    mean = torch.tensor([[0.2, 0.2]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    x_next = torch.tensor([[0.09, 0.09]], dtype=torch.float64)  # eps d = .018 < d^2 / 2 = .02
    options = {"dt": -0.5, "clip_range": 1e-3, "trust_region": "dppo", "dppo_delta": 1e-3}
    loss, metrics = grpo_guard.policy_loss(x_next, mean, old_mean, one, one, **options)
    ratio = math.exp(0.018 - 0.02)
    assert loss.item() == pytest.approx(-ratio, rel=1e-12)  # A > 0 draws it back to 1: not masked
    assert metrics["actor/ratio_mean"].item() == pytest.approx(ratio, rel=1e-12)


# ---- OCR and the solver ----------------------------------------------------------------------------------------------
def test_ocr_score_normalises_both_texts():
    assert ocr_score("Hello", "Hello") == 1.0
    assert ocr_score("hel lo", "HEL LO") == 1.0
    assert ocr_score("xx HELLO", "Hel lo", contains=True) == 1.0
    with pytest.raises(ValueError, match="empty"):
        ocr_score("hello", " \n")


def test_the_2m_solver_says_that_it_cannot_start_at_pure_noise():
    x = torch.zeros(1, 2)
    _, previous = multistep_ode_step(x, x, 1.0, 0.9)
    with pytest.raises(ValueError, match="sigma 1"):
        multistep_ode_step(x, x, 0.9, 0.8, previous)
