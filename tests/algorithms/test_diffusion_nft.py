"""diffusion_nft's loss against its closed forms, and its schedules, noise and batches by hand."""

from types import SimpleNamespace

import diffusion_nft
from diffusion_nft import nft_loss, old_policy_decay, optimality

import pytest
import torch

pytestmark = pytest.mark.fast


def tensors(count, batch=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 2, 2, 2, generator=g, dtype=torch.float64) for _ in range(count)]


def loss_of(v, v_old, x0, noise, sigma, r, v_ref=None, **options):
    s = sigma.view(-1, 1, 1, 1)
    options = {"nft_beta": 0.1, "adv_clip_max": 5.0, "kl_coef": 0.0, **options}
    return nft_loss(v, v_old, v_ref, (1 - s) * x0 + s * noise, x0, sigma=sigma, r=r, **options)


SIGMA = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)


def test_loss_by_hand():
    """One element: sigma 1, x_t = noise = 2, x0 = 1, v_old 0, v 1, beta .5: v+ .5, v- -.5; errors .5 and 1.5."""
    one = torch.ones(1, 1, dtype=torch.float64)
    options = {
        "sigma": one[0],
        "r": torch.tensor([0.75]).double(),
        "nft_beta": 0.5,
        "adv_clip_max": 4.0,
        "kl_coef": 0.0,
    }
    loss, metrics = nft_loss(one, 0 * one, None, 2 * one, one, **options)
    assert metrics["actor/positive_loss"].item() == pytest.approx(0.25 / 0.5)
    assert metrics["actor/negative_loss"].item() == pytest.approx(2.25 / 1.5)
    assert loss.item() == pytest.approx(4 * (0.75 * 0.5 + 0.25 * 1.5) / 0.5)


def test_at_the_old_policy_both_branches_are_equal_and_the_gradient_is_the_closed_form():
    """Invariant 15: adv_clip_max (2 (2 r - 1) / D) (t^2 / w) (v_old - v_t), whatever beta is; 0 at r = 1/2."""
    v_old, x0, noise = tensors(3)
    r = torch.tensor([0.5, 0.9, 0.2], dtype=torch.float64)
    s = SIGMA.view(-1, 1, 1, 1)
    target = noise - x0
    weight = (s * (target - v_old)).abs().flatten(1).mean(1).view(-1, 1, 1, 1)
    expected = 5.0 * 2 * (2 * r.view(-1, 1, 1, 1) - 1) / 8 * s**2 / weight * (v_old - target) / 3  # mean of 3 samples
    for beta in (0.1, 1.0):
        v = v_old.clone().requires_grad_()
        loss, metrics = loss_of(v, v_old, x0, noise, SIGMA, r, nft_beta=beta)
        loss.backward()
        torch.testing.assert_close(metrics["actor/positive_loss"], metrics["actor/negative_loss"])
        torch.testing.assert_close(v.grad, expected, rtol=1e-9, atol=1e-12)
        assert v.grad[0].abs().max() < 1e-12


def test_at_the_old_policy_the_gradient_at_r_one_half_is_zero_to_the_bit():
    """In fp32, where round-off would do: Adam makes full steps of any gradient, however small."""
    v_old, x0, noise = (t.float() for t in tensors(3))
    v = v_old.clone().requires_grad_()
    loss_of(v, v_old, x0, noise, SIGMA.float(), torch.full((3,), 0.5))[0].backward()
    assert v.grad.abs().max() == 0


def test_r_one_and_beta_one_is_weighted_flow_matching():
    v, v_old, x0, noise = tensors(4)
    v.requires_grad_()
    loss, _ = loss_of(v, v_old, x0, noise, SIGMA, torch.ones(3, dtype=torch.float64), nft_beta=1.0)
    s = SIGMA.view(-1, 1, 1, 1)
    weight = (s * (noise - x0 - v)).abs().flatten(1).mean(1).detach()
    sft = (5.0 * SIGMA**2 / weight * ((v - (noise - x0)) ** 2).flatten(1).mean(1)).mean()
    torch.testing.assert_close(loss, sft, rtol=1e-9, atol=0)


def test_better_images_pull_the_velocity_towards_themselves():
    v_old, x0, noise = tensors(3)
    v = v_old.clone().requires_grad_()
    loss, _ = loss_of(v, v_old, x0, noise, SIGMA, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    loss.backward()
    towards = (-v.grad * (noise - x0 - v_old)).flatten(1).sum(1)
    assert towards[0] > 0 and towards[1] < 0 and towards[2] > 0


def test_kl_term_is_the_mean_square_to_the_reference():
    v, v_old, v_ref, x0, noise = tensors(5)
    r = torch.full((3,), 0.5, dtype=torch.float64)
    without, _ = loss_of(v, v_old, x0, noise, SIGMA, r)
    loss, metrics = loss_of(v, v_old, x0, noise, SIGMA, r, v_ref=v_ref, kl_coef=0.3)
    torch.testing.assert_close(loss - without, 0.3 * ((v - v_ref) ** 2).mean())
    torch.testing.assert_close(metrics["actor/kl_loss"], ((v - v_ref) ** 2).mean())


def test_a_weight_of_zero_takes_an_image_out_of_both_terms():
    v, v_old, v_ref, x0, noise = tensors(5)
    v.requires_grad_()
    r = torch.tensor([0.9, 0.2, 0.7], dtype=torch.float64)
    weights = torch.tensor([1, 0, 1], dtype=torch.float64)
    loss_of(v, v_old, x0, noise, SIGMA, r, v_ref=v_ref, kl_coef=0.3, sample_weights=weights)[0].backward()
    assert v.grad[1].abs().max() == 0 and v.grad[0].abs().max() > 0 and v.grad[2].abs().max() > 0


@pytest.mark.parametrize(
    "adv_mode,expected",
    [
        ("continuous", [0.0, 0.0, 0.4, 0.5, 0.55, 1.0]),
        ("positive_only", [0.5, 0.5, 0.5, 0.5, 0.55, 1.0]),
        ("negative_only", [0.0, 0.0, 0.4, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.5, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.4, 0.5, 0.6, 0.6]),
    ],
)
def test_optimality_by_hand(adv_mode, expected):
    advantages = torch.tensor([-8, -5, -1, 0, 0.5, 7], dtype=torch.float64)
    torch.testing.assert_close(optimality(advantages, adv_mode, 5.0), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    "schedule,expected",
    [
        ("copy", [0, 0, 0, 0, 0]),
        ("fixed", [0.7] * 5),
        ("linear_to_0_5", [0, 0.075, 0.076, 0.3, 0.5]),
        ("delayed_linear_to_0_999", [0, 0, 0.0075, 0.999, 0.999]),
    ],
)
def test_decay_schedules_by_hand(schedule, expected):
    assert [old_policy_decay(schedule, 0.7, k) for k in (0, 75, 76, 300, 900)] == pytest.approx(expected)


def test_training_noise_is_the_images_own():
    args = SimpleNamespace(seed=4, timestep_fraction=0.5, num_inference_steps=6)
    request = SimpleNamespace(timesteps=torch.arange(1.0, 7), latent_shape=(2, 3, 4))

    def draw(step, *image_index):
        batch = SimpleNamespace(request=request, x0=torch.empty(0), image_index=torch.tensor(image_index))
        return diffusion_nft.draw_training_noise(args, batch, step, 0)

    timesteps, noise = draw(7, 5, 11, 12)
    assert timesteps.shape == (3, 3) and noise.shape == (3, 3, 2, 3, 4)
    assert all(len(set(row.tolist())) == 3 for row in timesteps)  # of a permutation: none twice
    alone = draw(7, 11)
    assert torch.equal(alone[0][0], timesteps[1]) and torch.equal(alone[1][0], noise[1])
    later = draw(8, 5, 11, 12)
    assert not torch.equal(later[0], timesteps) and not torch.equal(later[1], noise)
