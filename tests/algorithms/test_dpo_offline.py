"""dpo_offline's loss against its closed forms."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import dpo_offline
from common.sde import image_seed
from dpo_offline import dpo_loss

import pytest
import torch

pytestmark = pytest.mark.fast


def errors(chosen, rejected):
    return torch.tensor([chosen, rejected], dtype=torch.float64)


def test_policy_equal_to_reference_gives_log_two():
    e = errors([0.3, 0.9], [0.5, 0.1])
    loss, metrics = dpo_loss(e, e, 2000.0)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-7)
    assert metrics["actor/implicit_accuracy"] == 0.5  # ties count one half
    assert metrics["actor/margin"] == metrics["actor/logit_scale"] == 0


def test_loss_by_hand():
    """Chosen better than the reference by .1, rejected worse by .2: logit 10 / 2 (.1 + .2)."""
    loss, metrics = dpo_loss(errors([0.4], [0.9]), errors([0.5], [0.7]), 10.0)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1.5)))
    assert metrics["actor/chosen_reward"].item() == pytest.approx(0.5)
    assert metrics["actor/rejected_reward"].item() == pytest.approx(-1.0)
    assert metrics["actor/margin"].item() == metrics["actor/logit_scale"].item() == pytest.approx(1.5)
    assert metrics["actor/implicit_accuracy"] == 1


def test_accuracy_counts_a_small_margin_and_half_a_tie():
    _, metrics = dpo_loss(errors([0.1, 0.2, 0.3], [0.2, 0.2, 0.2]), errors([0.0] * 3, [0.0] * 3), dpo_beta=2.0)
    assert metrics["actor/margin"].item() == pytest.approx(0.0) and metrics["actor/implicit_accuracy"].item() == 0.5
    _, metrics = dpo_loss(errors([0.1, 0.1], [0.2, 0.1]), errors([0.0] * 2, [0.0] * 2), dpo_beta=2.0)
    assert metrics["actor/implicit_accuracy"].item() == 0.75


def test_swapping_winner_and_loser_flips_the_logit():
    e, ref = errors([0.4, 0.2], [0.9, 0.3]), errors([0.5, 0.1], [0.7, 0.6])
    loss, metrics = dpo_loss(e, ref, 10.0)
    swapped, flipped = dpo_loss(e.flip(0), ref.flip(0), 10.0)
    assert flipped["actor/margin"] == -metrics["actor/margin"]
    assert flipped["actor/implicit_accuracy"] == 1 - metrics["actor/implicit_accuracy"]
    assert (swapped - loss).item() == pytest.approx(metrics["actor/margin"].item())  # softplus(x) - softplus(-x) = x


def test_an_identical_pair_has_no_gradient():
    theta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    both = ((theta - torch.tensor([[1.0, 2], [1, 2]])) ** 2).double()
    dpo_loss(both, both.detach() + 0.1, 50.0)[0].backward()
    assert theta.grad.item() == pytest.approx(0, abs=1e-12)


def test_bradley_terry_optimum():
    """A free difference z of errors, winner known to win with probability p: the optimum is logit(p) = -beta / 2 z."""
    p, beta, z = 0.8, 4.0, torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([z], lr=0.1)
    zero = torch.zeros(1, dtype=torch.float64)
    for _ in range(2000):
        optimizer.zero_grad()
        won = dpo_loss(torch.stack([z, zero]), torch.stack([zero, zero]), beta)[0]
        lost = dpo_loss(torch.stack([zero, z]), torch.stack([zero, zero]), beta)[0]
        (p * won + (1 - p) * lost).backward()
        optimizer.step()
    assert (-beta / 2 * z).item() == pytest.approx(math.log(p / (1 - p)), abs=1e-6)


def test_a_pairs_sigma_and_noise_are_its_own():
    sigmas, noise = dpo_offline.draw_training_noise(dpo_offline.Args(seed=3), 7, torch.tensor([5, 2]), (1, 2, 2))
    for row, number in enumerate((5, 2)):
        generator = torch.Generator().manual_seed(image_seed(3, 7, number))
        assert sigmas[row] == torch.randn((), generator=generator).sigmoid()
        assert torch.equal(noise[row], torch.randn(1, 2, 2, generator=generator))


def test_a_micro_batch_of_one_pair_gives_the_gradient_of_four(one_rank, monkeypatch):
    """v = w x, and a reference with w = 0; the latents, sigma and noise of every pair are its own."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 1, 2, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(4, 1, 2, 2, generator=generator, dtype=torch.float64)
    sigmas = torch.tensor([0.2, 0.4, 0.6, 0.9], dtype=torch.float64)
    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    model = SimpleNamespace(device=torch.device("cpu"), is_lora=True, predict_velocity=lambda x, *more: w * x)
    model.transformer = SimpleNamespace(set_requires_gradient_sync=lambda wanted: None)

    @contextmanager
    def acting(model, policy):
        w.data -= 0.3
        yield
        w.data += 0.3

    def step(args, model, optimizer):
        gradients.append(w.grad.item())
        w.grad = None
        return 1.0

    gradients = []
    monkeypatch.setattr(dpo_offline, "acting", acting)
    monkeypatch.setattr(dpo_offline, "optimizer_step", step)
    monkeypatch.setattr(dpo_offline, "load_pairs", lambda rows, device: (latents[:, rows], {}))
    optimizer = SimpleNamespace(param_groups=[{"lr": 1.0}])
    losses = []
    for micro_batch_size in (4, 1):
        args = dpo_offline.Args(micro_batch_size=micro_batch_size, dpo_beta=2.0)
        metrics = dpo_offline.update(args, model, optimizer, [0, 1, 2, 3], sigmas=sigmas, noise=noise)
        losses.append(metrics["actor/loss"])
    s = sigmas.view(4, 1, 1, 1)
    x, target = (1 - s) * latents + s * noise, noise - latents
    e, e_ref = (((w_of * x - target) ** 2).flatten(2).mean(2) for w_of in (w, 0))
    loss = torch.nn.functional.softplus((e - e_ref)[0] - (e - e_ref)[1]).mean()  # beta / 2 = 1
    loss.backward()
    assert losses == pytest.approx([loss.item()] * 2, rel=1e-9) and gradients == pytest.approx([w.grad.item()] * 2)
