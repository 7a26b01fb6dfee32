"""flow_grpo's advantages and loss, by hand, and on a trajectory of a small policy."""

import math
from types import SimpleNamespace

import flow_grpo
import grpo_guard
import mix_grpo
from common.models.parts import sigma_schedule
from common.rollout import RolloutRequest
from contrib import flow_dppo, tempflow_grpo
from flow_grpo import (
    combine_advantages,
    compute_advantages,
    policy_loss,
    policy_step,
    recompute_log_probs,
    sample_locally,
)

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

pytestmark = pytest.mark.fast

VARIANTS = [{}, {"scale_rewards": "group"}, {"scale_rewards": "none"}]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def random_rewards(groups, group_size, seed=0):
    return torch.rand(groups * group_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- advantages, invariant 12 ----------------------------------------------------------------------------------------
def test_advantages_by_hand():
    rewards = tensor(0, 1, 2, 5)  # means .5 and 3.5; deviations .5, 1.5 and, of all, sqrt((4 + 1 + 0 + 9) / 4)
    whole = math.sqrt(3.5) + 1e-4
    cases = [
        ({}, tensor(-0.5 / whole, 0.5 / whole, -1.5 / whole, 1.5 / whole)),
        ({"scale_rewards": "group"}, tensor(-0.5 / 0.5001, 0.5 / 0.5001, -1.5 / 1.5001, 1.5 / 1.5001)),
        ({"scale_rewards": "none"}, tensor(-0.5, 0.5, -1.5, 1.5)),
        ({"scale_rewards": "none", "adv_clip_max": 1.0}, tensor(-0.5, 0.5, -1, 1)),
    ]
    for options, expected in cases:
        torch.testing.assert_close(compute_advantages(rewards, 2, **options), expected, rtol=1e-12, atol=1e-12)


def test_clamp_at_adv_clip_max():
    one_up = torch.zeros(32, dtype=torch.float64)
    one_up[3] = 1  # mean 1/32, deviation sqrt(31) / 32: 5.565 and -.1795
    advantages = compute_advantages(one_up, 32)
    assert advantages[3] == 5.0
    assert advantages[0].item() == pytest.approx(-(1 / 32) / (math.sqrt(31) / 32 + 1e-4), abs=1e-12)
    assert compute_advantages(-one_up, 32)[3] == -5.0
    free = compute_advantages(one_up, 32, adv_clip_max=6.0)[3].item()
    assert free == pytest.approx(31 / (math.sqrt(31) + 32e-4), abs=1e-12)


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("group_size", [2, 3, 24])
def test_group_sums_are_zero_before_the_clamp(options, group_size):
    advantages = compute_advantages(random_rewards(5, group_size), group_size, adv_clip_max=math.inf, **options)
    assert advantages.view(5, group_size).sum(1).abs().max() < 1e-12
    assert advantages.abs().max() > 0.01


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("group_size", [2, 3, 7, 24])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1 / 3, -0.0246, 1e9])
def test_rewards_that_are_equal_but_for_round_off_give_exactly_zero(options, group_size, value):
    constant = torch.full((group_size,), value, dtype=torch.float64)
    constant[::2] *= 1 + 5e-7  # round-off
    assert (compute_advantages(constant, group_size, **options) == 0).all()
    if value:
        constant[0] *= 1 + 1e-5  # a real difference, whatever the scale
        assert (compute_advantages(constant, group_size, **options) != 0).all()
        constant[0] = value
    others = random_rewards(2, group_size)
    advantages = compute_advantages(torch.cat([others, constant]), group_size, **options).view(3, group_size)
    assert (advantages[2] == 0).all()
    assert (advantages[:2] != 0).any()


@pytest.mark.parametrize("options", VARIANTS)
def test_permutation_equivariant(options):
    rewards = random_rewards(4, 6).view(4, 6)
    order = torch.argsort(torch.rand(4, 6, generator=torch.Generator().manual_seed(1)), 1)
    advantages = compute_advantages(rewards.flatten(), 6, **options).view(4, 6)
    shuffled = compute_advantages(rewards.gather(1, order).flatten(), 6, **options).view(4, 6)
    torch.testing.assert_close(shuffled, advantages.gather(1, order), rtol=1e-12, atol=1e-12)
    groups = compute_advantages(rewards.flip(0).flatten(), 6, **options).view(4, 6)
    torch.testing.assert_close(groups, advantages.flip(0), rtol=1e-12, atol=1e-12)


def test_a_group_is_compared_with_itself_alone():
    rewards = random_rewards(2, 4)
    advantages = compute_advantages(rewards, 4, scale_rewards="group")
    other = compute_advantages(torch.cat([rewards[:4], rewards[4:] * 9 + 100]), 4, scale_rewards="group")
    assert torch.equal(advantages[:4], other[:4])


def test_advantages_are_fp64():
    rewards = tensor(1000.0, 1000.01).float()  # neighbours in fp32 are 6.1e-5 apart there
    gap = (rewards[1].double() - rewards[0].double()).item()
    advantages = compute_advantages(rewards, 2)
    assert advantages.dtype == torch.float64
    assert advantages[1].item() == pytest.approx(gap / 2 / (gap / 2 + 1e-4), rel=1e-9)


# ---- several rewards -------------------------------------------------------------------------------------------------
def combined(scores, aggregation, scale_rewards="group", weights=(1.0, 1.0), adv_clip_max=5.0):
    args = SimpleNamespace(
        group_size=2, scale_rewards=scale_rewards, multi_objective_aggregation=aggregation, reward_weights=weights
    )
    return combine_advantages(args, scores, adv_clip_max)


# two rewards of three groups of two: totals 0, 1 | 0, 2 | 1, 2
BINARY = torch.tensor([[0, 0], [1, 0], [0, 0], [1, 1], [1, 0], [1, 1]], dtype=torch.float64)


def test_two_rewards_at_once_count_for_more_than_one_where_each_is_normalised_first():
    """GDPO, figure 2: the sum's own normalisation hides how many rewards an image has gained."""
    summed = combined(BINARY, "sum_then_normalize").view(3, 2)
    torch.testing.assert_close(summed[:, 1], tensor(1, 1, 1), rtol=0, atol=3e-4)  # .5 / .5001, 1 / 1.0001, .5 / .5001
    own = 0.5 / 0.5001  # of a reward that one of two images has; sums: own, 2 own, own
    deviation = own * math.sqrt((1 + 4 + 1) / 3)
    expected = tensor(own, 2 * own, own) / (deviation + 1e-4)
    advantages = combined(BINARY, "normalize_then_sum").view(3, 2)
    torch.testing.assert_close(advantages[:, 1], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(advantages.sum(1), tensor(0, 0, 0), rtol=0, atol=1e-12)


def test_weighted_rewards_by_hand():
    """0, 4 | 1, 1 and 10, 0 | 2, 6: off their means by 2 | 0 and 5 | 2; of the whole the variances are 2.25, 14.75."""
    scores = torch.tensor([[0, 10], [4, 0], [1, 2], [1, 6]], dtype=torch.float64)
    weights = (1.0, 0.5)
    first, second = math.sqrt(2.25) + 1e-4, math.sqrt(14.75) + 1e-4
    sums = [
        -2 / first + 0.5 * 5 / second,
        -0.5 * 2 / second,
    ]  # of each group's first image
    deviation = math.sqrt((sums[0] ** 2 + sums[1] ** 2) / 2) + 1e-4
    expected = [sums[0] / deviation, -sums[0] / deviation, sums[1] / deviation, -sums[1] / deviation]
    advantages = combined(scores, "normalize_then_sum", "batch", weights)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    clamped = combined(scores, "normalize_then_sum", "batch", weights, adv_clip_max=1.0)
    assert clamped.tolist() == pytest.approx([max(-1, min(1, a)) for a in expected], abs=1e-12)
    # weighted sums 5, 4 | 2, 4; deviation sqrt(((1.25^2 + .25^2) + (1.75^2 + .25^2)) / 4)
    whole = math.sqrt((1.25**2 + 0.25**2 + 1.75**2 + 0.25**2) / 4) + 1e-4
    expected = [0.5 / whole, -0.5 / whole, -1 / whole, 1 / whole]
    assert combined(scores, "sum_then_normalize", "batch", weights).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scale_rewards", ["batch", "group"])
def test_one_reward_alone_is_the_same_either_way(scale_rewards):
    """`none`, which leaves nothing to normalise by, is refused with normalize_then_sum."""
    one = random_rewards(3, 2)[:, None]
    two = torch.stack([one[:, 0], random_rewards(3, 2, seed=1)], 1)
    for scores, weights in ((one, (2.0,)), (two, (1.0, 0.5))):
        given = (scale_rewards, weights)
        is_same = torch.equal(
            combined(scores, "normalize_then_sum", *given), combined(scores, "sum_then_normalize", *given)
        )
        assert is_same == (scores is one)


def test_equal_scores_of_every_reward_are_exactly_zero_either_way():
    scores = torch.cat([BINARY, torch.tensor([[0.1, 0.7]] * 2, dtype=torch.float64)])
    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        for scale_rewards in ("batch", "group", "none"):
            advantages = combined(scores, aggregation, scale_rewards)
            assert advantages[-2:].tolist() == [0, 0] and advantages[:2].abs().min() > 0.1


@pytest.mark.parametrize("num_rewards", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("group_size", [3, 7, 8, 24])
def test_equal_scores_of_many_rewards_are_exactly_zero(num_rewards, group_size):
    """A matrix product may round equal rows differently, by their place; from five columns on MKL's does."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(num_rewards, generator=generator).tolist()
    args = SimpleNamespace(
        group_size=group_size,
        reward_weights=weights,
        scale_rewards="batch",
        multi_objective_aggregation="sum_then_normalize",
    )
    for num_prompts in range(1, 20):
        of_prompts = torch.rand(num_prompts, num_rewards, generator=generator, dtype=torch.float64)
        scores = of_prompts.repeat_interleave(group_size, 0)
        assert combine_advantages(args, scores, 5.0).tolist() == [0.0] * len(scores)


# ---- the loss, invariants 6 and 7 ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "higher", "lower"),
    [
        # gradient with respect to log_prob; clip_range .05
        (2.0, 0.90, -1.80, -1.80, 0, 0),  # below, A > 0: max(-1.8, -1.9)
        (2.0, 1.02, -2.04, -2.04, 0, 0),
        (2.0, 1.10, -2.10, 0.0, 1, 0),  # above, A > 0: max(-2.2, -2.1)
        (-2.0, 0.90, 1.90, 0.0, 0, 1),  # below, A < 0: max(1.8, 1.9)
        (-2.0, 1.02, 2.04, 2.04, 0, 0),
        (-2.0, 1.10, 2.20, 2.20, 0, 0),  # above, A < 0: max(2.2, 2.1)
        (0.0, 1.10, 0.0, 0.0, 0, 0),
        (0.0, 0.90, 0.0, 0.0, 0, 0),
    ],
)
def test_clip_truth_table(advantage, ratio, loss, gradient, higher, lower):
    old = tensor(-1.3)
    log_prob = (old + math.log(ratio)).requires_grad_()
    value, metrics = policy_loss(log_prob, old, tensor(advantage), 0.05)
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert log_prob.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert metrics["actor/pg_clipfrac_higher"] == higher
    assert metrics["actor/pg_clipfrac_lower"] == lower
    assert metrics["actor/pg_clipfrac"] == higher + lower
    assert metrics["actor/loss"].item() == value.item()
    assert not any(metric.requires_grad for metric in metrics.values())


def test_loss_is_the_mean_of_the_table():
    old = tensor(-1.0, -2.0, 0.5, 0.0)
    ratio = tensor(1.1, 0.9, 1.1, 1.02)
    loss, metrics = policy_loss(old + ratio.log(), old, tensor(2, -2, -2, 2), 0.05)
    assert loss.item() == pytest.approx((-2.1 + 1.9 + 2.2 - 2.04) / 4, abs=1e-12)
    expected = {
        "pg_clipfrac": 0.5,
        "pg_clipfrac_higher": 0.25,
        "pg_clipfrac_lower": 0.25,
        "ratio_mean": 1.03,
        "ratio_std": math.sqrt((0.07**2 + 0.13**2 + 0.07**2 + 0.01**2) / 4),
        "ppo_kl": -math.log(1.1 * 0.9 * 1.1 * 1.02) / 4,
    }
    assert {name: metrics[f"actor/{name}"].item() for name in expected} == pytest.approx(expected, abs=1e-12)


def test_a_weight_multiplies_its_samples_loss():
    old, ratio = tensor(-1.0, -2.0), tensor(1.02, 0.98)
    log_prob = (old + ratio.log()).requires_grad_()
    loss, _ = policy_loss(log_prob, old, tensor(1, 3), 0.05, tensor(0, 0.5))
    loss.backward()
    assert loss.item() == pytest.approx(-3 * 0.98 * 0.5 / 2, abs=1e-12)
    torch.testing.assert_close(log_prob.grad, tensor(0, -3 * 0.98 * 0.5 / 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip_range", [1e-5, 1e-3, 0.2])
def test_on_policy_loss_and_gradient_are_reinforce(dtype, clip_range):
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(16, generator=generator, dtype=dtype)
    advantages = torch.randn(16, generator=generator, dtype=dtype)
    advantages[0] = 0
    log_prob = old.clone().requires_grad_()
    loss, metrics = policy_loss(log_prob, old, advantages, clip_range)
    loss.backward()
    reinforce = old.clone().requires_grad_()
    (-(advantages * reinforce).mean()).backward()
    torch.testing.assert_close(log_prob.grad, reinforce.grad, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.detach(), -advantages.mean())
    assert metrics["actor/ratio_mean"] == 1
    for name in ("pg_clipfrac", "pg_clipfrac_higher", "pg_clipfrac_lower", "ratio_std", "ppo_kl"):
        assert metrics[f"actor/{name}"] == 0


def test_old_log_prob_takes_no_part_in_the_gradient_of_the_ratio():
    old = tensor(-1.0, -2.0)
    log_prob = (old + tensor(0.01, -0.01)).requires_grad_()
    policy_loss(log_prob, old, tensor(1.0, 1.0), 0.2)[0].backward()
    torch.testing.assert_close(log_prob.grad, -tensor(0.01, -0.01).exp() / 2)  # -A ratio / B


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_nan_in_nan_out(position, advantage):
    inputs = [tensor(-1.0, -1.0), tensor(-1.0, -1.0), tensor(advantage, advantage)]
    inputs[position][1] = math.nan
    loss, metrics = policy_loss(*inputs, 0.1)
    assert loss.isnan()
    assert metrics["actor/loss"].isnan()


# ---- a whole trajectory, invariant 6 ---------------------------------------------------------------------------------
class LinearModel:
    """v = a x + b c + timestep / 1000, elementwise; a stand-in for a family of common/models."""

    device = torch.device("cpu")
    transformer = SimpleNamespace(set_requires_gradient_sync=lambda wanted: None)
    is_lora = True

    def __init__(self):
        self.a, self.b = torch.tensor(0.3, requires_grad=True), torch.tensor(-0.2, requires_grad=True)

    def predict_velocity(self, latents, timestep, conditioning, negative_conditioning=None, guidance_scale=1.0):
        return self.a * latents + self.b * conditioning["c"][:, :, None, None] + timestep / 1000

    def decode(self, latents):
        return [None] * len(latents)


def make_request(sde_steps, sde_type="sde", num_images=6, num_inference_steps=6):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    timesteps, sigmas = sigma_schedule(scheduler, num_inference_steps=num_inference_steps)
    conditioning = {"c": torch.randn(2, 4, generator=torch.Generator().manual_seed(0))}
    index, seeds = torch.arange(num_images) % 2, [100 + i for i in range(num_images)]
    return RolloutRequest(
        conditioning=conditioning,
        negative_conditioning=None,
        prompt_index=index,
        seeds=seeds,
        timesteps=timesteps,
        sigmas=sigmas,
        latent_shape=(4, 2, 3),
        sde_steps=sde_steps,
        sde_type=sde_type,
        noise_level=0.7,
        guidance_scale=1.0,
        height=16,
        width=24,
    )


@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps", "cps_gauss"])
@pytest.mark.parametrize("sde_steps", [(0, 1, 2, 3, 4), (2, 3)])
def test_rescoring_a_trajectory_gives_ratio_exactly_1(sde_type, sde_steps):
    model, request = LinearModel(), make_request(sde_steps, sde_type)
    rows = torch.arange(6)
    trajectories = sample_locally(model, request.select(rows))
    assert trajectories.latents.shape == (6, 7, 4, 2, 3)
    assert trajectories.log_probs.shape == (6, len(sde_steps))
    again = recompute_log_probs(SimpleNamespace(micro_batch_size=6), model, request, trajectories)
    assert torch.equal(again.log_probs, trajectories.log_probs)
    assert torch.equal(again.prev_sample_means, trajectories.prev_sample_means)
    assert torch.equal(again.latents, trajectories.latents) and again.images == trajectories.images
    some = (request.select(rows[:4]), trajectories.select(rows[:4]))
    again = recompute_log_probs(SimpleNamespace(micro_batch_size=6), model, *some)
    assert again.log_probs.shape == (4, len(sde_steps)) and again.latents.shape[0] == len(again.images) == 4
    # another micro-batch size: vectors end elsewhere and sums have another order, round-off of fp32
    again = recompute_log_probs(SimpleNamespace(micro_batch_size=2), model, request, trajectories)
    torch.testing.assert_close(again.log_probs, trajectories.log_probs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again.prev_sample_means, trajectories.prev_sample_means, rtol=1e-6, atol=1e-6)

    advantages = compute_advantages(random_rewards(2, 3), 3).float()
    for w, i in enumerate(sde_steps):
        log_prob = policy_step(
            model, request.select(rows), trajectories.latents[:, i], i, prev_sample=trajectories.latents[:, i + 1]
        ).log_prob
        loss, metrics = policy_loss(log_prob, trajectories.log_probs[:, w], advantages, 1e-6)
        gradient = torch.autograd.grad(loss, (model.a, model.b), retain_graph=True)
        reinforce = torch.autograd.grad(-(advantages * log_prob).mean(), (model.a, model.b))
        torch.testing.assert_close(gradient, reinforce, rtol=1e-5, atol=1e-9)
        assert all(g != 0 for g in gradient)
        torch.testing.assert_close(loss.detach(), -advantages.mean(), rtol=0, atol=1e-7)
        assert metrics["actor/ratio_mean"] == 1
        assert metrics["actor/pg_clipfrac"] == 0


def test_noise_protocol():
    """One generator per image: the initial latents first, then one draw per SDE step, none on ODE steps."""
    model, sde_steps = LinearModel(), (1, 3)
    request = make_request(sde_steps).select(torch.tensor([4, 1]))
    trajectories = sample_locally(model, request)
    for row, seed in enumerate([104, 101]):
        generator = torch.Generator().manual_seed(seed)
        initial, *noise = [torch.randn(4, 2, 3, generator=generator) for _ in range(3)]
        assert torch.equal(trajectories.latents[row, 0], initial)
        for w, i in enumerate(sde_steps):
            drawn = trajectories.latents[row, i + 1] - trajectories.prev_sample_means[row, w]
            torch.testing.assert_close(drawn, trajectories.transition_stds[row, w] * noise[w], rtol=1e-5, atol=1e-6)
        for i in (0, 2, 4, 5):  # the others are Euler steps
            x = trajectories.latents[row, i]
            v = model.predict_velocity(x[None], request.timesteps[i], {"c": request.conditioning["c"][row : row + 1]})[
                0
            ]
            euler = x + v * (request.sigmas[i + 1] - request.sigmas[i])
            torch.testing.assert_close(trajectories.latents[row, i + 1], euler, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kl_type", ["code", "velocity"])
@pytest.mark.parametrize("script", [flow_grpo, grpo_guard, mix_grpo, flow_dppo, tempflow_grpo])
def test_a_trained_step_has_its_own_dt_and_reference(script, kl_type):
    """Sampling steps 1 and 3 of 6, columns 0 and 1 of the trained ones, from a reference whose `a` is 0.1 less."""
    model, request = LinearModel(), make_request((1, 3))
    trajectories = sample_locally(model, request.select(torch.arange(6)))
    args = script.Args(micro_batch_size=3, kl_type=kl_type, kl_coef=0.1, sde_type="sde")
    with torch.no_grad():
        model.a -= 0.1
        reference = script.recompute_log_probs(args, model, request, trajectories)
        model.a += 0.1
    advantages = torch.tensor([1.0, -1, 2, 0.5, -2, -0.5])
    old = script.OldPolicy(trajectories.log_probs, trajectories.prev_sample_means, torch.ones(6, 2))
    batch = script.Batch(request, trajectories, old, advantages)
    passes = iter(script.accumulate_gradients(args, model, batch, torch.arange(6), reference))
    sigmas = request.sigmas.tolist()
    for rows in (slice(0, 3), slice(3, 6)):
        for i in (1, 3):
            s, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
            kl = (0.1 * trajectories.latents[rows, i]).square().mean().item()  # of v - v_ref = 0.1 x
            q_squared = 0.7**2 * s / (1 - s)
            if kl_type == "code":  # the means differ by dt (1 + q^2 (1 - s) / (2 s)) times what the velocities do
                kl *= (dt * (1 + q_squared * (1 - s) / (2 * s))) ** 2 / (2 * q_squared)
            metrics = next(passes)
            assert metrics["actor/kl_loss"].item() == pytest.approx(kl, rel=1e-4)
            if script is grpo_guard:  # whose ratio is 1
                assert metrics["actor/loss"].item() == pytest.approx(-advantages[rows].mean().item() / -dt, rel=1e-4)


@pytest.mark.parametrize(("old_log_prob", "limit", "num_checked"), [("rollout", 2.5e-4, 2), ("recompute", math.inf, 6)])
@pytest.mark.parametrize("script", [flow_grpo, grpo_guard, flow_dppo])
def test_an_engine_is_held_to_half_the_clip_where_the_ratio_starts_from_its_log_probs(
    script, old_log_prob, limit, num_checked, monkeypatch
):
    """On a first micro-batch, in the log-ratio of the script's own loss; with recomputed ones there is no limit."""
    model, request = LinearModel(), make_request((1, 3))
    trajectories = sample_locally(model, request.select(torch.arange(6)))  # the engine's, which another `a` scores
    model.a.data -= 1e-3
    checked = []
    monkeypatch.setattr("common.engine.check_mismatch", lambda *of, **options: checked.append((of, options)) or {})
    args = script.Args(micro_batch_size=2, old_log_prob=old_log_prob, clip_range=5e-4)
    old, _ = script.find_old_policy(args, model, object(), request, trajectories)
    [((_, sampled, recomputed), options)] = checked
    assert options["log_ratio_limit"] == limit and len(sampled.latents) == len(recomputed.latents) == num_checked
    assert torch.equal(old.log_probs, (trajectories if old_log_prob == "rollout" else recomputed).log_probs)
    if script is grpo_guard:  # mean(eps d) of the seeds' noise
        noise = sampled.latents[:, [2, 4]] - sampled.prev_sample_means
        noise = noise / sampled.transition_stds[:, :, None, None, None]
        expected = (noise * (recomputed.prev_sample_means - sampled.prev_sample_means)).flatten(2).mean(2)
        torch.testing.assert_close(options["log_ratios"], expected, rtol=1e-4, atol=1e-9)
    elif script is flow_dppo:  # of its Gaussian steps
        stds = sampled.transition_stds[:, :, None, None, None].double()
        of_trainer, of_engine = (
            torch.distributions.Normal(policy.prev_sample_means.double(), stds).log_prob(sampled.latents[:, [2, 4]])
            for policy in (recomputed, sampled)
        )
        expected = (of_trainer - of_engine).flatten(2).mean(2)
        torch.testing.assert_close(options["log_ratios"], expected, rtol=1e-4, atol=1e-9)
    else:  # check_mismatch's own, of Gaussian log-probs
        assert "log_ratios" not in options
