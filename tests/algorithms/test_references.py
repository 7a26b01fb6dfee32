"""Conventions of the reference implementations that are easily missed: what they do at the edges, by hand."""

import math
from types import SimpleNamespace

import diffusion_nft
from common.rewards.ocr import ocr_score
from common.sde import image_seed

import pytest
import torch

pytestmark = pytest.mark.fast


# ---- DiffusionNFT ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("fraction", "steps", "trained"), [(0.99, 10, 9), (0.5, 3, 1), (0.5, 5, 2), (0.01, 10, 1)])
def test_the_share_of_timesteps_is_truncated(fraction, steps, trained):
    """As in the paper's code and in VeRL-Omni: .99 of 10 steps trains 9; at least one."""
    args = SimpleNamespace(seed=1, timestep_fraction=fraction, num_inference_steps=steps)
    request = SimpleNamespace(timesteps=torch.arange(steps).float(), latent_shape=(2, 3))
    batch = SimpleNamespace(request=request, x0=torch.empty(0), image_index=torch.tensor([0, 5]))
    timesteps, noise = diffusion_nft.draw_training_noise(args, batch, 4, 0)
    assert timesteps.shape == (2, trained) and noise.shape == (2, trained, 2, 3)


def test_every_epoch_draws_timesteps_and_noise_again():
    args = SimpleNamespace(seed=1, timestep_fraction=0.5, num_inference_steps=10)
    request = SimpleNamespace(timesteps=torch.arange(10).float(), latent_shape=(2, 3))
    batch = SimpleNamespace(request=request, x0=torch.empty(0), image_index=torch.arange(6))
    draws = [diffusion_nft.draw_training_noise(args, batch, 4, epoch) for epoch in (0, 1, 0)]
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

    def draw(args, batch, step, epoch):
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


# ---- OCR -------------------------------------------------------------------------------------------------------------
def test_ocr_score_normalises_both_texts():
    assert ocr_score("Hello", "Hello") == 1.0
    assert ocr_score("hel lo", "HEL LO") == 1.0
    assert ocr_score("xx HELLO", "Hel lo", contains=True) == 1.0
