"""mix_grpo's windows, written out by hand; its shared prefix; how it adds several rewards."""

import math
from types import SimpleNamespace

import mix_grpo
from common.rollout import RolloutRequest
from common.sde import draw_noise, image_seed, sde_step

import pytest
import torch

pytestmark = pytest.mark.fast


def trace(num_steps, **options):
    """First steps of the windows of rollouts 1 to num_steps; a window is sde_window_size consecutive steps."""
    args = SimpleNamespace(
        **{
            "sde_window_size": 2,
            "sde_window_range": (0, 4),
            "window_mode": "progressive",
            "seed": 1,
            "iters_per_group": 2,
            "roll_back": True,
            **options,
        }
    )
    windows = [mix_grpo.draw_sde_steps(args, step) for step in range(1, num_steps + 1)]
    starts = [window[0] for window in windows]
    assert windows == [tuple(range(start, start + args.sde_window_size)) for start in starts]
    return starts


@pytest.mark.parametrize(
    "options,expected",
    [
        ({}, [0, 0, 1, 1, 2, 2, 0, 0, 1]),
        ({"roll_back": False}, [0, 0, 1, 1, 2, 2, 2, 2, 2]),
        ({"sde_window_range": (1, 4), "iters_per_group": 1}, [1, 2, 1, 2, 1, 2, 1, 2, 1]),
        # tau 8 over [0, 4): p = 0, 1/4, 1/2; stays 8, int(6 + 2/4) = 6, int(4 + 1) = 5
        ({"window_mode": "decay", "iters_per_group": 8}, [0] * 8 + [1] * 6 + [2] * 5 + [0]),
        ({"window_mode": "decay", "iters_per_group": 1}, [0, 1, 2, 0]),
        # tau 10: l up to 13 stays 10; at 14 ceil(10 e^-.1) = 10, at 15 ceil(10 e^-.2) = 9, at 16 ceil(10 e^-.3) = 8
        (
            {"window_mode": "exp_decay", "iters_per_group": 10, "sde_window_range": (13, 18)},
            [13] * 10 + [14] * 10 + [15] * 9 + [16] * 8 + [13],
        ),
    ],
)
def test_window_traces_by_hand(options, expected):
    assert trace(len(expected), **options) == expected


def test_random_window_covers_its_range_and_nothing_else():
    starts = trace(200, window_mode="random", sde_window_range=(1, 5), sde_window_size=2)
    assert set(starts) == {1, 2, 3} and starts == trace(200, window_mode="random", sde_window_range=(1, 5))


@pytest.mark.parametrize("mode", ["progressive", "decay", "exp_decay", "random"])
def test_windows_never_shrink_or_pass_the_end(mode):
    for size in (1, 2, 3):
        options = {"window_mode": mode, "sde_window_size": size, "sde_window_range": (1, 5), "iters_per_group": 3}
        for start in trace(100, **options):
            assert 1 <= start <= 5 - size


# ---- the shared prefix -----------------------------------------------------------------------------------------------
def request_of(num_steps, sde_steps, batch=6):
    sigmas = torch.linspace(1, 0, num_steps + 1)
    return RolloutRequest(
        conditioning={"c": torch.randn(2, 3, generator=torch.Generator().manual_seed(9))},
        negative_conditioning=None,
        prompt_index=torch.arange(batch) * 2 // batch,
        seeds=[image_seed(1, 1, i) for i in range(batch)],
        timesteps=sigmas[:-1] * 1000,
        sigmas=sigmas,
        latent_shape=(1, 2, 2),
        sde_steps=sde_steps,
        sde_type="sde",
        noise_level=0.7,
        guidance_scale=1.0,
        height=16,
        width=16,
    )


class Affine:
    """A model of the shape the scripts use: v = x (t / 1000) + c, no network. It keeps what it was asked to decode."""

    device = torch.device("cpu")
    transformer = torch.nn.Identity()
    pipe = SimpleNamespace(components={})  # no VAE

    def __init__(self):
        self.decoded = []

    def predict_velocity(self, x, timestep, conditioning, negative=None, guidance_scale=1.0):
        return x * timestep / 1000 + conditioning["c"].sum(1).view(-1, 1, 1, 1)

    def decode(self, latents):
        self.decoded.append(latents)
        return [None] * len(latents)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_shared_prefix_equals_the_unshared_one(start, monkeypatch):
    """Invariant 14: every image taken from its prompt's noise through the whole schedule, by hand."""
    monkeypatch.setattr(mix_grpo, "gather_objects", lambda value: [value])  # a world of one
    args, model = mix_grpo.Args(seed=3, micro_batch_size=4), Affine()
    request = request_of(8, (start, start + 1))
    shared = mix_grpo.share_prefix(args, model, None, request, 5, numbers=torch.tensor([2, 2, 2, 7, 7, 7]))
    assert shared.sde_steps == (0, 1) and shared.sigma_max == request.sigma_max
    got = mix_grpo.rollout(args, model, None, shared)
    sigmas = request.sigmas.tolist()
    starts = [torch.Generator().manual_seed(image_seed(3, "5 prompt", (2, 7)[i * 2 // 6])) for i in range(6)]
    x = draw_noise((6, 1, 2, 2), starts)
    generators, c = [torch.Generator().manual_seed(seed) for seed in request.seeds], request.select(torch.arange(6))
    for i, t in enumerate(request.timesteps):
        v = model.predict_velocity(x, t, c.conditioning)
        noise_level = 0.7 if i in request.sde_steps else 0.0
        noise = {"sigma_max": sigmas[1], "generator": generators}
        out = sde_step(x, v, sigmas[i], sigmas[i + 1], noise_level, **noise)
        if i == start:
            torch.testing.assert_close(got.log_probs[:, 0], out.log_prob)
        x = out.prev_sample
    torch.testing.assert_close(got.latents[:, -1], x)
    assert torch.equal(got.latents[0, 0], got.latents[2, 0])  # one prompt, one beginning
    assert not torch.equal(got.latents[0, -1], got.latents[2, -1])
    assert not torch.equal(got.latents[0, 0], got.latents[3, 0])


@pytest.mark.parametrize("start", [1, 3])
def test_the_shared_prefix_is_not_decoded(start, monkeypatch):
    """Its latents are no images yet, and decoding them would cost as much as decoding a rollout of as many prompts."""
    monkeypatch.setattr(mix_grpo, "gather_objects", lambda value: [value])  # a world of one
    args, model = mix_grpo.Args(seed=3, micro_batch_size=4), Affine()
    numbers = torch.tensor([2, 2, 2, 7, 7, 7])
    shared = mix_grpo.share_prefix(args, model, None, request_of(8, (start, start + 1)), 5, numbers=numbers)
    assert model.decoded == []
    trajectories = mix_grpo.rollout(args, model, None, shared)
    assert torch.equal(torch.cat(model.decoded), trajectories.latents[:, -1])  # the model still decodes the images


# ---- several rewards -------------------------------------------------------------------------------------------------
def test_each_reward_is_normalised_on_its_own_by_default():
    """Algorithm 1, line 17: the rewards' scales do not matter."""
    scores = torch.tensor([[0, 10], [4, 0], [1, 2], [1, 6]], dtype=torch.float64)
    args = mix_grpo.Args(group_size=2, reward_weights=(1.0, 0.5))
    scaled = mix_grpo.combine_advantages(args, scores * torch.tensor([1.0, 100.0]), 5.0)
    torch.testing.assert_close(scaled, mix_grpo.combine_advantages(args, scores, 5.0), rtol=0, atol=1e-4)
    args.reward_weights = (1.0,)
    own = 2 / (math.sqrt(2.25) + 1e-4)  # of 0, 4, 1, 1 the variance is 2.25
    assert mix_grpo.combine_advantages(args, scores[:, :1], 5.0).tolist() == pytest.approx([-own, own, 0, 0])
