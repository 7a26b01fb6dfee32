"""contrib/: each script differs from its parent by its algorithm alone, has its loss by hand, and runs."""

import contextlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import grpo_guard
from common.data import PromptSet
from common.engine import client
from common.errors import RunError
from common.files.checkpoints import load_checkpoint, saved_checkpoints
from common.files.prompts import read_prompts
from common.models.stable_diffusion_3 import StableDiffusion3
from common.rewards._loading import load_rewards
from common.rollout import RolloutRequest
from common.scoring import NOT_ASKED
from common.sde import image_seed
from contrib import (
    awm,
    crd,
    dance_grpo,
    dgpo,
    diffusion_opd,
    draft,
    flow_dppo,
    flow_grpo_ahead,
    online_dpo,
    ram,
    tempflow_grpo,
    v_grpo,
)
from dpo_offline import dpo_loss
from tests.algorithms.test_mains import EngineByHand, options_of
from tests.conftest import (
    EMBEDDED,
    ROOT,
    TINY,
    assert_same,
    brightness_reward,
    definitions,
    differing,
    few_eval_prompts,
    option_sources,
    own_options,
    policy_without_fsdp,
    read_metrics,
    run_here,
    shared_options,
    torchrun,
    unread_options,
    without_times,
)
from tools.diff import parent_of, sections

import numpy
import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file

PARENTS = {
    "contrib/awm.py": "diffusion_nft.py",
    "contrib/crd.py": "diffusion_nft.py",
    "contrib/dance_grpo.py": "flow_grpo.py",
    "contrib/dgpo.py": "diffusion_nft.py",
    "contrib/diffusion_opd.py": "flow_grpo.py",
    "contrib/dmd2.py": "contrib/draft.py",
    "contrib/draft.py": "flow_grpo.py",
    "contrib/flow_dppo.py": "grpo_guard.py",
    "contrib/flow_grpo_ahead.py": "flow_grpo.py",
    "contrib/online_dpo.py": "contrib/dgpo.py",
    "contrib/ram.py": "diffusion_nft.py",
    "contrib/sft.py": "dpo_offline.py",
    "contrib/tdm_r1.py": "contrib/dmd2.py",
    "contrib/tempflow_grpo.py": "flow_grpo.py",
    "contrib/v_grpo.py": "contrib/awm.py",
}
# Functions and classes of the parent that the algorithm changes; any other of the same name is equal to the byte.
DIFFERENT = {
    "contrib/awm.py": {"accumulate_gradients", "main"},
    "contrib/crd.py": {
        "check",
        "policy_names",
        "prepare",
        "draw_training_noise",
        "old_policy_decay",
        "follow_trained",
        "velocities_of",
        "accumulate_gradients",
        "evaluate",
        "main",
    },
    "contrib/dance_grpo.py": {"main"},
    "contrib/dgpo.py": {
        "workload",
        "check",
        "policy_names",
        "draw_training_noise",
        "accumulate_gradients",
        "update",
        "main",
    },
    "contrib/diffusion_opd.py": {
        "workload",
        "check",
        "policy_names",
        "prepare",
        "load_policy",
        "Batch",
        "accumulate_gradients",
        "update",
        "main",
    },
    "contrib/dmd2.py": {
        "workload",
        "check",
        "policy_names",
        "prepare",
        "load_policy",  # the optimizers take the parameters of their policies
        "make_request",
        "sample",
        "rollout",
        "accumulate_gradients",
        "update",
        "save",
        "load",
        "main",
    },
    "contrib/draft.py": {
        "workload",
        "check",
        "policy_names",
        "prepare",
        "load_policy",  # without --max_rollouts
        "make_request",
        "rollout",
        "accumulate_gradients",
        "update",
        "evaluate",
        "main",
    },
    "contrib/flow_dppo.py": {"policy_loss", "accumulate_gradients", "find_old_policy", "main"},
    "contrib/flow_grpo_ahead.py": {"check", "policy_names", "main"},
    "contrib/online_dpo.py": {"workload", "check", "compute_advantages", "accumulate_gradients", "main"},
    "contrib/ram.py": {
        "workload",
        "draw_training_noise",
        "policy_names",
        "follow_trained",
        "Batch",
        "accumulate_gradients",
        "update",
        "main",
    },
    "contrib/sft.py": {
        "check",
        "workload",
        "prepare",
        "make_request",
        "encode_drawn",
        "draw_training_noise",
        "policy_names",
        "load_policy",
        "flow_matching_errors",
        "update",
        "evaluate",
        "main",
    },
    "contrib/tdm_r1.py": {
        "workload",
        "check",
        "policy_names",
        "prepare",
        "load_policy",
        "make_request",
        "draw_training_noise",
        "sample",
        "rollout",
        "Batch",
        "make_batch",
        "accumulate_gradients",
        "accumulate_fake_gradients",
        "update",
        "update_fake",
        "load",
        "main",
    },
    "contrib/tempflow_grpo.py": {"check", "accumulate_gradients", "main"},
    "contrib/v_grpo.py": {
        "workload",
        "check",
        "policy_names",
        "draw_training_noise",
        "Batch",
        "accumulate_gradients",
        "update",
        "evaluate",
        "main",
    },
}
# Options of another default, bound or meaning; `name` differs in all.
DIFFERENT_OPTIONS = {
    "contrib/awm.py": {"kl_coef"},
    "contrib/crd.py": {"kl_coef", "decay_schedule", "update_interval", "micro_batch_size"},
    "contrib/dance_grpo.py": {"sde_type", "kl_coef", "num_steps", "updates_per_rollout", "learning_rate"},
    "contrib/dgpo.py": {"kl_coef", "micro_batch_size"},
    "contrib/diffusion_opd.py": {
        "group_size",
        "clip_range",
        "kl_type",
        "num_steps",
        "updates_per_rollout",
        "learning_rate",
    },
    "contrib/dmd2.py": {
        "reward",
        "num_prompts",
        "num_inference_steps",
        "guidance_scale",
        "num_steps",
        "micro_batch_size",
        "learning_rate",
    },
    "contrib/draft.py": {
        "num_prompts",
        "num_inference_steps",
        "guidance_scale",
        "num_steps",
        "micro_batch_size",
        "learning_rate",
    },
    "contrib/flow_dppo.py": {"clip_range", "kl_coef", "num_steps"},
    "contrib/flow_grpo_ahead.py": set(),
    "contrib/online_dpo.py": {"adv_mode", "group_size", "micro_batch_size"},
    "contrib/ram.py": {"decay_schedule", "old_decay", "adv_clip_max"},
    "contrib/sft.py": {"cache", "guidance_scale", "num_steps", "micro_batch_size"},
    "contrib/tdm_r1.py": {
        "num_prompts",
        "num_inference_steps",
        "teacher_guidance",
        "fake_updates",
        "fake_learning_rate",
        "noise_range",
        "num_steps",
        "micro_batch_size",
        "learning_rate",
    },
    "contrib/tempflow_grpo.py": {
        "sde_window_size",
        "sde_window_range",
        "kl_coef",
        "num_steps",
        "updates_per_rollout",
        "learning_rate",
    },
    "contrib/v_grpo.py": {"clip_range", "old_kl_coef", "micro_batch_size", "learning_rate"},
}
SCRIPTS = list(PARENTS)


# ---- what they share with their parents ------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_changes_its_parent_by_its_algorithm_alone(script):
    parent = PARENTS[script]
    assert parent_of(script) == (parent, None)
    assert differing(definitions(parent), definitions(script)) == DIFFERENT[script]
    assert differing(option_sources(parent), option_sources(script)) == DIFFERENT_OPTIONS[script] | {"name"}
    assert list(sections((ROOT / script).read_text())) == list(sections((ROOT / parent).read_text()))


@pytest.mark.fast
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_option_is_unread_or_declared_again(script):
    assert unread_options(script) == []
    again = own_options(script).keys() & shared_options().keys()
    # which needs a reward with a gradient, or may do without
    if script in ("contrib/dmd2.py", "contrib/draft.py", "contrib/sft.py", "contrib/tdm_r1.py"):
        again -= {"reward", "eval_num_inference_steps"}  # a student is evaluated in its own steps
    assert again - {"lr_schedule"} == {"name", "num_steps", "micro_batch_size"}  # one has its parent's cosine


# ---- the losses by hand ----------------------------------------------------------------------------------------------
def column(*values):
    """One element a sample, (B, 1), in fp64."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1)


# of two samples: x0 1 and 0, noise 3 and 2, sigma 1/2 and 1/4, so that x_t is 2 and 1/2 and both targets are 2
X_T = column(2.0, 0.5)
X0 = column(1.0, 0.0)
SIGMA = torch.tensor([0.5, 0.25], dtype=torch.float64)


@pytest.mark.fast
def test_awm_loss_by_hand():
    """Errors 1/4, 1, of `old` 1, 0: ratios e^.75 and e^-1, clipped to 1.5 and .5, which count: A is 1 and -1/2."""
    arguments = [column(1.5, 3.0), column(1.0, 2.0), column(1.5, 1.0), X_T, X0]
    options = {"sigma": SIGMA, "r": torch.tensor([1.0, 0.25], dtype=torch.float64)}
    options |= {"clip_range": 0.5, "old_kl_coef": 2.0, "kl_coef": 0.1}
    loss, metrics = awm.awm_loss(*arguments, **options)
    policy_loss = (-1.5 + 0.5 * 0.5) / 2
    assert loss.item() == pytest.approx(policy_loss + 2.0 * (0.25 + 1) / 2 + 0.1 * (0 + 4) / 2)
    assert metrics["actor/ratio_mean"].item() == pytest.approx((math.exp(0.75) + math.exp(-1)) / 2)
    assert metrics["actor/pg_clipfrac"] == 1 and metrics["actor/kl_loss"] == 2
    # an image that a reward failed on has the weight 0 in all three terms
    loss, _ = awm.awm_loss(*arguments, **options, sample_weights=torch.tensor([1.0, 0.0]))
    assert loss.item() == pytest.approx((-1.5 + 2.0 * 0.25 + 0.1 * 0) / 2)


@pytest.mark.fast
def test_awm_pulls_at_old_by_the_advantage():
    """Without a KL the gradient at `old` is A times that of the error, 2 (v - target), in the mean over two."""
    v = column(1.5, 3.0).requires_grad_()
    r = torch.tensor([1.0, 0.25], dtype=torch.float64)
    options = {"sigma": SIGMA, "r": r, "clip_range": 0.5, "old_kl_coef": 1.0, "kl_coef": 0.0}
    loss, metrics = awm.awm_loss(v, v.detach(), None, X_T, X0, **options)
    loss.backward()
    assert v.grad.flatten().tolist() == pytest.approx([1 * 2 * (1.5 - 2) / 2, -0.5 * 2 * (3 - 2) / 2])
    assert loss.item() == pytest.approx(-(1 - 0.5) / 2)
    assert metrics["actor/ratio_mean"] == 1 and metrics["actor/pg_clipfrac"] == 0 and metrics["actor/kl_loss"] == 0


def dgpo_options(**changes):
    r = torch.tensor([0.6, 0.4], dtype=torch.float64)
    options = {"sigma": SIGMA, "r": r, "group_size": 2, "dpo_beta": 4.0, "clip_range": 9.0, "adv_clip_max": 5.0}
    return {**options, "kl_coef": 0.0, **changes}


@pytest.mark.fast
def test_dgpo_loss_by_hand():
    """A 1 and -1, errors 1/4 and 1, of the reference 1 and 1/4: logit 4 / 2 ((1 - 1/4) - (1/4 - 1)) = 3."""
    arguments = [column(1.5, 3.0), column(1.5, 3.0), column(1.0, 2.5), X_T, X0]
    loss, metrics = dgpo.dgpo_loss(*arguments, **dgpo_options(kl_coef=0.1))
    kl = (0.25 + 0.25) / 2
    assert loss.item() == pytest.approx(math.log1p(math.exp(-3)) / 4 + 0.1 * kl)
    assert metrics["actor/margin"].item() == pytest.approx(3) and metrics["actor/kl_loss"].item() == pytest.approx(kl)
    weights = torch.tensor([1.0, 0.0])
    loss, _ = dgpo.dgpo_loss(*arguments, **dgpo_options(kl_coef=0.1), sample_weights=weights)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-3)) / 4 + 0.1 * 0.25 / 2)
    # a second prompt, whose images all score the same
    twice = [torch.cat([argument, argument]) for argument in arguments]
    r = torch.tensor([0.6, 0.4, 0.5, 0.5], dtype=torch.float64)
    loss, metrics = dgpo.dgpo_loss(*twice, **dgpo_options(sigma=SIGMA.repeat(2), r=r))
    assert loss.item() == pytest.approx((math.log1p(math.exp(-3)) + math.log(2)) / 2 / 4)
    assert metrics["actor/margin"].item() == pytest.approx(1.5)


@pytest.mark.fast
def test_dgpo_weighs_by_how_surprising_the_preference_is():
    """The gradient is that of mean(weight A error), weight = sigmoid(-logit) of the group: the authors' form."""
    torch.manual_seed(0)
    v, v_ref, x_t, x0 = torch.randn(4, 6, 5, dtype=torch.float64)
    sigma = torch.rand(6, dtype=torch.float64) + 0.1
    r = torch.rand(6, dtype=torch.float64)
    v.requires_grad_()
    options = dgpo_options(sigma=sigma, r=r, group_size=3, dpo_beta=0.7, clip_range=1e9)
    dgpo.dgpo_loss(v, v.detach(), v_ref, x_t, x0, **options)[0].backward()
    errors, ref_errors = (((w - (x_t - x0) / sigma[:, None]) ** 2).mean(1) for w in (v, v_ref))
    advantages = 5.0 * (2 * r - 1)
    logits = 0.7 / 3 * (advantages * (ref_errors - errors)).view(2, 3).sum(1)
    weights = torch.sigmoid(-logits).detach().repeat_interleave(3)
    (expected,) = torch.autograd.grad((weights * advantages * errors).mean(), v)
    torch.testing.assert_close(v.grad, expected)


@pytest.mark.fast
@pytest.mark.parametrize(("r", "trained"), [([0.6, 0.4], [False, True]), ([0.4, 0.6], [True, False])])
def test_dgpo_clips_on_the_side_of_the_advantage(r, trained):
    """Errors 1/4 and 1/4, of `old` 1/2 each: both are closer than 1 + .1, further than a better image's may go."""
    v = column(1.5, 2.5).requires_grad_()
    v_old = 2 + column(-math.sqrt(0.5), math.sqrt(0.5))
    options = dgpo_options(r=torch.tensor(r, dtype=torch.float64), clip_range=0.1)
    loss, metrics = dgpo.dgpo_loss(v, v_old, column(1.0, 1.0), X_T, X0, **options)
    loss.backward()
    assert (v.grad.flatten() != 0).tolist() == trained and metrics["actor/pg_clipfrac"] == 0.5


def crd_options(**changes):
    r = torch.tensor([0.6, 0.4], dtype=torch.float64)
    weights = torch.ones(2, dtype=torch.float64)
    options = {"sigma": SIGMA, "r": r, "group_size": 2, "crd_beta": 2.0, "adv_clip_max": 5.0}
    return {**options, "kl_coef": 0.0, "sample_weights": weights, **changes}


@pytest.mark.fast
def test_crd_loss_by_hand():
    """Errors over w, of one element: |v - 2| is 1/2, 1, of `old` 1, 1/4, so R is 1/2, -3/4; 2 R - r .4, -1.9."""
    arguments = [column(1.5, 3.0), column(1.0, 2.25), column(1.0, 2.5), X_T, X0]
    loss, metrics = crd.crd_loss(*arguments, **crd_options(kl_coef=0.1))
    policy_loss = 5 / 2 * ((0.4 + 1.9) / 2) ** 2  # both differ by that from their mean
    kl = (0.6 * 0.1 + 0.4 * 1e-4) * 0.25, (0.4 * 0.1 + 0.6 * 1e-4) * 0.25  # |v - v_ref| is 1/2 twice
    assert loss.item() == pytest.approx(policy_loss + sum(kl) / 2)
    assert metrics["actor/policy_loss"].item() == pytest.approx(policy_loss)
    assert metrics["actor/implicit_reward"].item() == pytest.approx(-1 / 8)
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.25)
    assert metrics["actor/loss"].item() == loss.item()
    # of a group with one whole image nothing but its KL is left
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    loss, _ = crd.crd_loss(*arguments, **crd_options(kl_coef=0.1, sample_weights=weights))
    assert loss.item() == pytest.approx(kl[0] / 2)


@pytest.mark.fast
def test_crd_has_the_gradient_of_a_loop_over_groups():
    """Against a loop that keeps the gradient from the mean, as Flow-Factory does; one of six images has failed."""
    torch.manual_seed(0)
    v, v_old, x_t, x0 = torch.randn(4, 6, 5, dtype=torch.float64)
    sigma = torch.rand(6, dtype=torch.float64) + 0.1
    r = torch.rand(6, dtype=torch.float64)
    v.requires_grad_()
    weights = torch.tensor([1.0, 1, 1, 1, 0, 1], dtype=torch.float64)
    options = crd_options(sigma=sigma, r=r, group_size=3, crd_beta=0.7, sample_weights=weights)
    loss, _ = crd.crd_loss(v, v_old, None, x_t, x0, **options)
    loss.backward()
    expected = torch.zeros((), dtype=torch.float64)
    for group in ([0, 1, 2], [3, 5]):
        rewards = []
        for i in group:
            target = (x_t[i] - x0[i]) / sigma[i]
            before = torch.nn.functional.mse_loss(v_old[i], target) / torch.nn.functional.l1_loss(v_old[i], target)
            scale = torch.nn.functional.l1_loss(v[i].detach(), target)
            rewards.append(before - torch.nn.functional.mse_loss(v[i], target) / scale)
        centre = sum(reward.detach() for reward in rewards) / len(group)
        r_mean = sum(r[i] for i in group) / len(group)
        for i, reward in zip(group, rewards, strict=True):
            expected = expected + (0.7 * (reward - centre) - (r[i] - r_mean)) ** 2 * 5 / 0.7 / 6
    assert loss.item() == pytest.approx(expected.item())
    (gradient,) = torch.autograd.grad(expected, v)
    torch.testing.assert_close(v.grad, gradient)


@pytest.mark.fast
def test_crd_draws_a_timestep_for_a_prompt_and_noise_for_an_image():
    args = SimpleNamespace(seed=1, timestep_fraction=0.5, num_inference_steps=10, group_size=2)
    request = SimpleNamespace(timesteps=torch.arange(10).float(), latent_shape=(2, 3))
    batch = SimpleNamespace(request=request, x0=torch.empty(0), image_index=torch.arange(4))
    timesteps, noise = crd.draw_training_noise(args, batch, 4, 0)
    assert torch.equal(timesteps[0], timesteps[1]) and torch.equal(timesteps[2], timesteps[3])
    assert not torch.equal(timesteps[1], timesteps[2]) and not torch.equal(noise[0], noise[1])


@pytest.mark.fast
def test_crd_names_its_guidance_where_a_model_takes_none(monkeypatch):
    def check(model, height, width, num_frames, guidance_scale=1.0):
        if guidance_scale > 1:
            raise ValueError("takes no guidance")

    monkeypatch.setattr(StableDiffusion3, "check", staticmethod(check))
    args = crd.Args(kl_coef=0.1, kl_guidance_scale=4.5, rollout="local")
    with pytest.raises(ValueError, match=re.escape("--kl_guidance_scale 4.5: takes no guidance")):
        crd.prepare(args)
    crd.prepare(replace(args, kl_guidance_scale=1.0))


@pytest.mark.fast
def test_crd_has_two_followers():
    """Flow-Factory's recipe: `old` from .25 by .005 to .999, `sampling` copied up to 75, then by .0075."""
    args = crd.Args()
    decays = [crd.old_policy_decay(args.decay_schedule, args.old_decay, k) for k in (0, 10, 1000)]
    assert decays == pytest.approx([0.25, 0.3, 0.999])
    decays = [crd.old_policy_decay(args.sampling_decay_schedule, args.old_decay, k) for k in (0, 75, 95, 1000)]
    assert decays == pytest.approx([0, 0, 0.15, 0.999])


def v_grpo_options(**changes):
    return {"sigma": SIGMA, "clip_range": 0.3, "old_kl_coef": 0.0, **changes}


@pytest.mark.fast
def test_v_grpo_loss_by_hand():
    """One image with two pairs. x0_hat - x0 is 1/4, -1/4, of `old` 1/2, 0; e is |.| where there is one element: the
    ratio is exp((1/2 + 0) / 2 - (1/4 + 1/4) / 2) = 1. The mean over pairs stands in the exponent."""
    arguments = [column(1.5, 3.0), column(1.0, 2.0), X_T, X0]
    image = {"advantages": torch.tensor([2.0], dtype=torch.float64)}
    loss, metrics = v_grpo.v_grpo_loss(*arguments, **v_grpo_options(**image, old_kl_coef=0.5))
    kl = (0.25**2 + 0.25**2) / 2  # of the predicted images: sigma (v - v_old) is 1/4 twice
    assert loss.item() == pytest.approx(-2 + 0.5 * kl) and metrics["actor/kl_loss"].item() == pytest.approx(kl)
    assert metrics["actor/ratio_mean"] == 1 and metrics["actor/pg_clipfrac"] == 0
    # as two images of one pair: ratios e^1/4 and e^-1/4; the first is beyond 1.1, the second below .9, where A < 0
    images = {"advantages": torch.tensor([1.0, -3.0], dtype=torch.float64), "clip_range": 0.1}
    loss, metrics = v_grpo.v_grpo_loss(*arguments, **v_grpo_options(**images))
    assert loss.item() == pytest.approx((-1.1 + 3 * 0.9) / 2) and metrics["actor/pg_clipfrac"] == 1
    assert metrics["actor/ratio_mean"].item() == pytest.approx((math.exp(0.25) + math.exp(-0.25)) / 2)
    # an image that a reward failed on has the weight 0 in both terms
    weights = torch.tensor([1.0, 0.0])
    loss, _ = v_grpo.v_grpo_loss(*arguments, **v_grpo_options(**images) | {"old_kl_coef": 0.5}, sample_weights=weights)
    assert loss.item() == pytest.approx((-1.1 + 0.5 * 0.25**2) / 2)


@pytest.mark.fast
def test_v_grpo_has_the_gradient_of_a_loop_over_images_and_pairs():
    """Of six images with three pairs, by torch's own errors and a clip written out."""
    torch.manual_seed(0)
    v, noise, x0 = torch.randn(3, 6, 3, 5, dtype=torch.float64)
    v_old = v + 0.3 * torch.randn(6, 3, 5, dtype=torch.float64)
    x0 = x0[:, :1].expand(6, 3, 5)  # an image's pairs have one x0
    s = torch.rand(6, 3, 1, dtype=torch.float64) * 0.9 + 0.1
    x_t = (1 - s) * x0 + s * noise
    advantages = torch.randn(6, dtype=torch.float64)
    v.requires_grad_()
    flat = [tensor.flatten(0, 1) for tensor in (v, v_old, x_t, x0)]
    options = v_grpo_options(sigma=s.flatten(), advantages=advantages, clip_range=0.02, old_kl_coef=0.7)
    loss, metrics = v_grpo.v_grpo_loss(*flat, **options)
    loss.backward()
    expected = torch.zeros((), dtype=torch.float64)
    num_clipped = 0
    for i in range(6):
        log_ratio = kl = 0
        for j in range(3):
            predicted, before = (x_t[i, j] - s[i, j] * w[i, j] for w in (v, v_old))
            for images, sign in ((predicted, -1), (before, 1)):
                size = torch.nn.functional.l1_loss(images.detach(), x0[i, j])
                log_ratio = log_ratio + sign * torch.nn.functional.mse_loss(images, x0[i, j]) / size / 3
            kl = kl + torch.nn.functional.mse_loss(predicted, before) / 3
        ratio = log_ratio.exp()
        is_clipped = ratio > 1.02 if advantages[i] > 0 else ratio < 0.98
        limit = 1.02 if advantages[i] > 0 else 0.98
        num_clipped += is_clipped.item()
        expected = expected - advantages[i] * (torch.tensor(limit) if is_clipped else ratio) / 6 + 0.7 * kl / 6
    assert 0 < num_clipped < 6 and metrics["actor/pg_clipfrac"].item() == pytest.approx(num_clipped / 6)
    assert loss.item() == pytest.approx(expected.item())
    (gradient,) = torch.autograd.grad(expected, v)
    torch.testing.assert_close(v.grad, gradient)


def drawn_pairs(image_index, step=4, num_timesteps=16):
    """V-GRPO's pairs of these images, of prompts with two images each."""
    args = SimpleNamespace(seed=1, pairs_per_prompt=4, group_size=2)
    request = SimpleNamespace(timesteps=torch.arange(num_timesteps).float(), latent_shape=(2, 3))
    batch = SimpleNamespace(request=request, x0=torch.empty(0), image_index=torch.as_tensor(image_index))
    return v_grpo.draw_training_noise(args, batch, step)


@pytest.mark.fast
def test_v_grpo_shares_pairs_within_a_prompt():
    timesteps, noise = drawn_pairs(range(6))
    for pairs in (timesteps, noise):
        groups = pairs.unflatten(0, (3, 2))
        assert torch.equal(groups[:, 0], groups[:, 1])
        assert len({tuple(group.flatten().tolist()) for group in groups[:, 0]}) == 3  # a prompt's own
    assert len({tuple(row.flatten().tolist()) for row in noise[0]}) == 4  # four noises
    other_step = drawn_pairs(range(6), step=5)
    assert not torch.equal(other_step[0], timesteps) and not torch.equal(other_step[1][0], noise[0])
    # a rank that made the last images draws theirs
    rows = [5, 2, 3]
    of_rank = drawn_pairs(rows)
    assert torch.equal(of_rank[0], timesteps[rows]) and torch.equal(of_rank[1], noise[rows])


@pytest.mark.fast
def test_v_grpo_takes_a_timestep_of_each_part_of_the_schedule():
    """Of 16 timesteps one of each four. Of three, four pairs have the first first and the last last, and all are
    equally likely."""
    timesteps, _ = drawn_pairs(range(0, 400, 2))
    assert torch.equal(timesteps // 4, torch.arange(4.0).expand(200, 4)) and len(timesteps.unique()) == 16
    timesteps, _ = drawn_pairs(range(0, 2000, 2), num_timesteps=3)
    assert (timesteps[:, 0] == 0).all() and (timesteps[:, 3] == 2).all()
    shares = [(timesteps == t).double().mean().item() for t in range(3)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.01)


@pytest.mark.fast
def test_v_grpos_passes_have_all_pairs_of_an_image():
    """The gradient of six images in passes of two, against the loss of each image alone, its pairs one by one."""
    args = v_grpo.Args(micro_batch_size=4, pairs_per_prompt=2, group_size=3, clip_range=0.1, old_kl_coef=0.5)
    model = Shifting()
    x0 = torch.randn(6, 1, 2, 2, generator=torch.Generator().manual_seed(1))
    advantages = torch.tensor([1.0, -1, 2, 0.5, -2, -0.5])
    batch = v_grpo.Batch(request_of(4, ()), x0, advantages, torch.ones(6), torch.arange(6))
    timesteps, noise = v_grpo.draw_training_noise(args, batch, 1)
    v_old = v_grpo.old_velocities(args, model, batch, timesteps=timesteps, noise=noise)
    model.shift.data += 0.05
    passes = v_grpo.accumulate_gradients(
        args, model, batch, torch.arange(6), timesteps=timesteps, noise=noise, v_old=v_old
    )
    shift = torch.tensor(0.05, requires_grad=True)
    losses = []
    for i in range(6):
        velocities = []
        x_t = []
        for k in range(2):
            s = timesteps[i, k] / 1000
            x_t.append((1 - s) * x0[i] + s * noise[i, k])
            velocities.append(x_t[k] * s + batch.request.conditioning["c"][i // 3].sum())
        v = torch.stack(velocities)
        torch.testing.assert_close(v_old[i], v)
        options = {"sigma": timesteps[i] / 1000, "clip_range": 0.1, "old_kl_coef": 0.5}
        loss, _ = v_grpo.v_grpo_loss(
            v + shift, v, torch.stack(x_t), x0[i].expand(2, 1, 2, 2), **options, advantages=advantages[i : i + 1]
        )
        losses.append(loss)
    torch.stack(losses).mean().backward()
    assert len(passes) == 3
    torch.testing.assert_close(model.shift.grad, shift.grad)
    assert sum(row["actor/loss"] for row in passes).item() / 3 == pytest.approx(sum(losses).item() / 6, rel=1e-5)


@pytest.mark.fast
def test_v_grpo_clips_advantages_softly():
    advantages = torch.tensor([-6.0, 0.0, 0.01, 3.0], dtype=torch.float64)
    soft = v_grpo.clip_softly(advantages, 3.0)
    assert soft.tolist() == pytest.approx([-3 * math.tanh(2), 0, 0.01, 3 * math.tanh(1)], abs=1e-7)
    assert torch.equal(v_grpo.clip_softly(advantages, 0.0), advantages)


@pytest.mark.fast
def test_ram_loss_by_hand():
    """Targets 1 + 2 * 1 * (2 - 1) = 3 and 2.5 + 2 * -.5 * (2 - 2.25) = 2.75, from which v is 3/2 and 1/4 away."""
    arguments = [column(1.5, 3.0), column(1.0, 2.25), column(1.0, 2.5), X_T, X0]
    options = {"sigma": SIGMA, "advantages": torch.tensor([1.0, -0.5]), "reward_multiplier": 2.0}
    loss, metrics = ram.ram_loss(*arguments, **options)
    assert loss.item() == pytest.approx((2.25 + 0.0625) / 2) and metrics["actor/loss"] == loss
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.25)
    assert metrics["actor/old_deviation"].item() == pytest.approx((0.25 + 0.5625) / 2)
    # an image that a reward failed on has the weight 0: even the pull to the reference is gone
    loss, metrics = ram.ram_loss(*arguments, **options, sample_weights=torch.tensor([1.0, 0.0]))
    assert loss.item() == pytest.approx(2.25 / 2) and metrics["actor/kl_loss"].item() == pytest.approx(0.25 / 2)


@pytest.mark.fast
def test_ram_has_the_gradient_of_two_errors_and_that_of_awm():
    """That of mean((v - v_ref)^2) + eta A mean((v - v_target)^2) where v_old is v, and 2 eta A (v_old - v) more
    elsewhere. Of AWM's loss at `old`, whose KL has the factor 1 / eta."""
    torch.manual_seed(0)
    v, v_old, v_ref, x_t, x0 = torch.randn(5, 6, 5, dtype=torch.float64)
    sigma = torch.rand(6, dtype=torch.float64) + 0.1
    advantages = torch.randn(6, dtype=torch.float64).clamp(-1, 1)
    v.requires_grad_()
    eta = 4.0
    options = {"sigma": sigma, "advantages": advantages, "reward_multiplier": eta}
    gradients = []
    for old in (v.detach(), v_old):
        loss, _ = ram.ram_loss(v, old, v_ref, x_t, x0, **options)
        gradients += torch.autograd.grad(loss, v)
    error = ((v - (x_t - x0) / sigma[:, None]) ** 2).mean(1)
    (expected,) = torch.autograd.grad((((v - v_ref) ** 2).mean(1) + eta * advantages * error).mean(), v)
    torch.testing.assert_close(gradients[0], expected)
    more = 2 * eta * advantages[:, None] * (v_old - v.detach()) / v.numel()
    torch.testing.assert_close(gradients[1], expected + more)
    options = {"sigma": sigma, "r": (advantages + 1) / 2, "clip_range": 1.0, "old_kl_coef": 1.0, "kl_coef": 1 / eta}
    loss, _ = awm.awm_loss(v, v.detach(), v_ref, x_t, x0, **options)
    torch.testing.assert_close(gradients[0], eta * torch.autograd.grad(loss, v)[0])


@pytest.mark.fast
@pytest.mark.parametrize(("mean", "rests"), [(0.6, True), (0.5, False)])
def test_ram_rests_at_the_tilted_gaussian(mean, rests):
    """Of N(0, 1) with the reward x0 and eta .6 that is N(.6, 1). Gauss-Hermite sums over x0 and the noise: the gradient
    is 0 along a shift of v and along a slope, which is what the velocity of a Gaussian has."""
    nodes, weights = (torch.from_numpy(values) for values in numpy.polynomial.hermite_e.hermegauss(5))
    x0, noise = (mean + nodes).repeat_interleave(5)[:, None], nodes.repeat(5)[:, None]
    weights = torch.outer(weights, weights).flatten() / weights.sum() ** 2  # they add up to 1
    for s in (0.9, 0.3):
        x_t = (1 - s) * x0 + s * noise
        slope = (2 * s - 1) / ((1 - s) ** 2 + s**2)
        v = slope * (x_t - (1 - s) * mean) - mean
        v_now = v.clone().requires_grad_()
        sigma = torch.full((25,), s, dtype=torch.float64)
        options = {"sigma": sigma, "advantages": x0[:, 0] - mean, "reward_multiplier": 0.6}
        loss, _ = ram.ram_loss(v_now, v, slope * x_t, x_t, x0, **options, sample_weights=25 * weights)
        loss.backward()
        along = [v_now.grad.sum().item(), (v_now.grad * x_t).sum().item()]
        assert (along == pytest.approx([0, 0], abs=1e-12)) == rests


@pytest.mark.fast
def test_ram_in_its_authors_regime():
    """`old` ramps by rollouts, and timesteps are continuous, of density 2 t."""
    request = SimpleNamespace(timesteps=torch.tensor([1000.0, 500.0]), latent_shape=(1,))
    batch = SimpleNamespace(request=request, image_index=torch.arange(500), x0=torch.zeros(500, 1))
    args = ram.Args(linear_timesteps=8)
    timesteps, noise = ram.draw_training_noise(args, batch, step=3, epoch=0)
    again, _ = ram.draw_training_noise(args, SimpleNamespace(**vars(batch) | {"image_index": torch.tensor([7])}), 3, 0)
    assert timesteps.shape == (500, 8) and noise.shape == (500, 8, 1)
    assert torch.equal(again[0], timesteps[7])  # on any number of ranks
    sigma = timesteps.double() / 1000
    assert sigma.min() > 0 and sigma.max() <= 1
    for limit in (0.25, 0.5, 0.75):  # P(t < limit) = limit^2, at most four deviations off
        share = (sigma < limit).double().mean().item()
        assert abs(share - limit**2) < 4 * (limit**2 * (1 - limit**2) / sigma.numel()) ** 0.5
    assert ram.workload(args).trained_steps == 8

    followed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ram, "follow", lambda model, name, decay: followed.append((name, decay)))
        for step in (1, 40, 90, 200):
            ram.follow_trained(ram.Args(decay_schedule="ramp_to_0_9"), SimpleNamespace(num_updates=4 * step), step)
    assert followed == [("old", pytest.approx(decay)) for decay in (0.01, 0.4, 0.9, 0.9)]


@pytest.mark.fast
def test_online_dpo_has_the_loss_of_offline_dpo():
    """Of three pairs, best first or last: dpo_offline.dpo_loss over dpo_beta."""
    torch.manual_seed(0)
    v, v_ref, x_t, x0 = torch.randn(4, 6, 5, dtype=torch.float64)
    sigma = torch.rand(6, dtype=torch.float64) + 0.1
    r = torch.tensor([1.0, 0, 0, 1, 1, 0], dtype=torch.float64)
    options = dgpo_options(sigma=sigma, r=r, dpo_beta=3.0, adv_clip_max=1.0)
    loss, metrics = online_dpo.dgpo_loss(v, v, v_ref, x_t, x0, **options)
    target = (x_t - x0) / sigma[:, None]
    best = torch.tensor([0, 3, 4])
    worst = torch.tensor([1, 2, 5])
    errors, ref_errors = (((w - target) ** 2).mean(1)[torch.stack([best, worst])] for w in (v, v_ref))
    expected, expected_metrics = dpo_loss(errors, ref_errors, 3.0)
    assert loss.item() == pytest.approx(expected.item() / 3)
    assert metrics["actor/margin"].item() == pytest.approx(expected_metrics["actor/margin"].item())


@pytest.mark.fast
def test_online_dpo_marks_the_best_and_the_worst():
    args = SimpleNamespace(group_size=3, reward_weights=(1.0, 10.0))
    rewards = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.3 + 1e-8, 0.3, 0.2, 0.2, 0.9], dtype=torch.float64)
    scores = torch.stack([rewards, torch.zeros(9, dtype=torch.float64)], 1)
    everything = torch.ones(9, dtype=torch.bool)
    marks = online_dpo.compute_advantages(args, scores, everything)
    assert marks.tolist() == [-1, 1, 0, 0, 0, 0, -1, 0, 1]
    assert online_dpo.optimality(marks, "continuous", 1.0).tolist()[:3] == [0, 1, 0.5]
    # the weights decide, and images that a reward failed on are neither best nor worst
    scores[2, 1] = 0.1
    assert online_dpo.compute_advantages(args, scores, everything).tolist()[:3] == [-1, 0, 1]
    is_compared = torch.tensor([True, True, False, True, False, False, False, False, False])
    is_compared[3] = False  # as fill_failed leaves a group with one whole image
    assert online_dpo.compute_advantages(args, scores, is_compared).tolist() == [-1, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.fast
def test_online_dpo_trains_on_the_pairs_of_its_rank():
    """A rank that made the images 6 to 11 of 12, two groups of three; the images of the second all score the same."""
    marks = torch.tensor([0.0, 1, -1, 1, -1, 0, -1, 0, 1, 0, 0, 0], dtype=torch.float64)
    request = request_of(3, ())
    index = torch.arange(6, 12)
    batch = online_dpo.Batch(request, torch.arange(6.0), marks[6:] / 2 + 0.5, torch.arange(6.0), index)
    pairs = online_dpo.pairs_of(batch, marks, group_size=3)
    first, second = pairs.image_index.view(2, 2).tolist()
    assert sorted(first) == [6, 8] and set(second) < {9, 10, 11}
    rows = pairs.image_index - 6
    assert torch.equal(pairs.x0, batch.x0[rows]) and torch.equal(pairs.sample_weights, batch.sample_weights[rows])
    assert torch.equal(pairs.r, batch.r[rows]) and pairs.r.tolist()[2:] == [0.5, 0.5]
    assert pairs.request.seeds == [request.seeds[row] for row in rows.tolist()]


@pytest.mark.fast
def test_nothing_is_learned_where_all_images_score_the_same():
    """A is 0, and r 1/2: at `old` and the reference the gradient of every loss is exactly 0."""
    r = torch.full((2,), 0.5, dtype=torch.float64)
    start = column(1.5, 3.0)
    options = {"sigma": SIGMA, "r": r, "clip_range": 0.5, "kl_coef": 1.0}
    groups = {"group_size": 2, "dpo_beta": 4.0, "adv_clip_max": 5.0}
    for loss_function, more in ((awm.awm_loss, {"old_kl_coef": 1.0}), (dgpo.dgpo_loss, groups)):
        v = start.clone().requires_grad_()
        loss_function(v, start, start, X_T, X0, **options, **more)[0].backward()
        assert (v.grad == 0).all()
    v = start.clone().requires_grad_()
    indifferent = v_grpo_options(advantages=torch.zeros(1, dtype=torch.float64), old_kl_coef=1.0)
    v_grpo.v_grpo_loss(v, start, X_T, X0, **indifferent)[0].backward()
    assert (v.grad == 0).all()
    v = start.clone().requires_grad_()
    crd.crd_loss(v, start, start, X_T, X0, **crd_options(r=r, kl_coef=1.0))[0].backward()
    assert (v.grad == 0).all()
    v = start.clone().requires_grad_()
    options = {"sigma": SIGMA, "advantages": torch.zeros(2), "reward_multiplier": 50.0}
    ram.ram_loss(v, start, start, X_T, X0, **options)[0].backward()
    assert (v.grad == 0).all()


@pytest.mark.fast
def test_groups_that_are_cut_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    cuts = ((dgpo, 4, " 8"), (crd, 4, " 8"), (online_dpo, 1, ""))
    for script, size, fault in cuts:
        for given in (size, 0):
            told = f"--micro_batch_size {given}: .* {given} .*{fault}"
            with pytest.raises(ValueError, match=told):
                script.check(script.Args(micro_batch_size=given))
        script.check(script.Args(micro_batch_size=8))
    # no micro-batch would do where a rank's share of a mini-batch cuts a group: 12 images of groups of 8, or 4, or 3
    shares = ((dgpo, 6, 4, 12), (crd, 6, 4, 12), (dgpo, 2, 4, 4), (online_dpo, 6, 4, 3))
    for script, num_prompts, updates, share in shares:
        fault = f"^--num_prompts .* {share}, .*--updates_per_rollout {updates}"
        for given in (8, 64):
            with pytest.raises(ValueError, match=fault):
                script.check(script.Args(num_prompts=num_prompts, updates_per_rollout=updates, micro_batch_size=given))
    for size in (0, 2):
        with pytest.raises(ValueError, match=f"--micro_batch_size {size}: .*--pairs_per_prompt 4"):
            v_grpo.check(v_grpo.Args(micro_batch_size=size))


# ---- Flow-DPPO -------------------------------------------------------------------------------------------------------
def dppo_loss(log_ratios, advantages, **options):
    """Loss of one-element samples with std 1: eps = 1, d = log_ratio."""
    mean = column(*log_ratios).requires_grad_()
    one = torch.ones(len(mean), dtype=torch.float64)
    advantages = torch.tensor(advantages, dtype=torch.float64)
    loss, metrics = flow_dppo.policy_loss(
        torch.ones_like(mean), mean, torch.zeros_like(mean), one, advantages, dppo_delta=0.02, **options
    )
    loss.backward()
    return loss.item(), mean.grad.flatten().tolist(), {k: v.item() for k, v in metrics.items()}


@pytest.mark.fast
def test_dppo_drops_what_moves_on_beyond_delta_and_keeps_the_denominator():
    """delta .02 is |d| = .2: of four samples the first (up, A > 0) and the last (down, A < 0) are dropped."""
    loss, grad, metrics = dppo_loss([0.3, -0.3, 0.1, -0.3], [1, 1, 1, -7])
    ratios = [math.exp(d - d**2 / 2) for d in (0.3, -0.3, 0.1, -0.3)]  # the plain ones
    assert loss == pytest.approx(-(ratios[1] + ratios[2]) / 4, rel=1e-12)
    assert grad == pytest.approx([0, -ratios[1] * 1.3 / 4, -ratios[2] * 0.9 / 4, 0], rel=1e-12)
    assert metrics["actor/pg_clipfrac_higher"] == metrics["actor/pg_clipfrac_lower"] == 0.25
    assert metrics["actor/pg_clipfrac"] == 0.5
    assert metrics["actor/ppo_kl"] == pytest.approx((3 * 0.09 + 0.01) / 2 / 4, rel=1e-12)


@pytest.mark.fast
def test_dppos_first_update_is_reinforce():
    """At the old policy: ratio 1, nothing dropped, loss -mean A, gradient -A eps / D."""
    loss, grad, metrics = dppo_loss([0.0, 0.0], [2, -1])
    assert loss == pytest.approx(-0.5) and grad == pytest.approx([-2 / 2, 1 / 2])
    assert metrics["actor/pg_clipfrac"] == 0 and metrics["actor/ratio_mean"] == 1


@pytest.mark.fast
def test_dppos_weights_multiply_the_samples_losses():
    weights = torch.tensor([0.0, 2.0], dtype=torch.float64)
    loss, grad, metrics = dppo_loss([0.05, -0.05], [1, 1], sample_weights=weights)
    want = -math.exp(-0.05 - 0.05**2 / 2)
    assert loss == pytest.approx(want) and grad == pytest.approx([0, want * 1.05])  # the slope of d - d^2 / 2
    assert metrics["actor/loss"] == loss


@pytest.mark.fast
def test_dppo_has_the_plain_ratio_of_log_probs():
    """-A exp(log_prob - old_log_prob) of torch's own Normal, mean log-probs; masked where the divergence would grow."""
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
    got, _ = flow_dppo.policy_loss(x_next, mean, old_mean, std, advantages, dppo_delta=delta)
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(got, mean)
    (expected,) = torch.autograd.grad(want, mean)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.fast
def test_the_sign_of_dppos_mask_is_the_plain_ratios():
    """Where 0 < mean(eps d) < mean(d^2) / (2 std) the regulated ratio is above 1 and the plain one below."""
    old_mean = torch.zeros(1, 2, dtype=torch.float64)
    mean = torch.tensor([[0.2, 0.2]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    x_next = torch.tensor([[0.09, 0.09]], dtype=torch.float64)  # eps d = .018 < d^2 / 2 = .02
    assert grpo_guard.regulated_log_ratio(x_next, mean, old_mean, one) > 0
    loss, metrics = flow_dppo.policy_loss(x_next, mean, old_mean, one, one, dppo_delta=1e-3)
    ratio = math.exp(0.018 - 0.02)
    assert loss.item() == pytest.approx(-ratio, rel=1e-12)  # A > 0 draws it back to 1: not masked
    assert metrics["actor/ratio_mean"].item() == pytest.approx(ratio, rel=1e-12)


@pytest.mark.fast
def test_dppo_does_not_clamp_advantages():
    assert "adv_clip_max" not in own_options("contrib/flow_dppo.py")
    args = flow_dppo.Args(group_size=32)
    scores = torch.zeros(32, 1, dtype=torch.float64)
    scores[0] = 1
    assert flow_dppo.combine_advantages(args, scores, math.inf).max() > 5.5


@pytest.mark.fast
@pytest.mark.parametrize(("error", "is_held"), [(2e-5, False), (9e-5, True)])  # relative, of the engine's velocity
@pytest.mark.parametrize("sde_type", ["cps", "cps_gauss"])
def test_dppo_holds_the_engine_by_its_own_ratio(monkeypatch, sde_type, error, is_held):
    """cps and cps_gauss take the same steps. Their log-probs differ by 2 std^2, and Flow-DPPO's ratio does not."""

    class Off(Affine):
        def predict_velocity(self, *of):
            return (1 + error) * super().predict_velocity(*of)

    monkeypatch.setattr("common.engine.mismatch.gather", lambda rows: rows[None])  # of one rank
    request = replace(request_of(4, (0,)), sde_type=sde_type, noise_level=0.3)
    trajectories = flow_dppo.sample_locally(Off(), request.select(torch.arange(6)))
    args = flow_dppo.Args(old_log_prob="rollout", micro_batch_size=6, clip_range=1e-4)
    outcome = pytest.raises(RunError, match="log-ratio .*--clip_range") if is_held else contextlib.nullcontext()
    with outcome:
        flow_dppo.find_old_policy(args, Affine(), object(), request, trajectories)


# ---- a request and models without a network --------------------------------------------------------------------------
def request_of(num_steps, sde_steps, batch=6):
    """A request of `batch` images of two prompts, for the model below."""
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
    """A model of the shape the scripts use: v = x (t / 1000) + c, no network."""

    device = torch.device("cpu")
    transformer = torch.nn.Identity()
    pipe = SimpleNamespace(components={})  # no VAE

    def predict_velocity(self, x, timestep, conditioning, negative=None, guidance_scale=1.0):
        return x * timestep.reshape(-1, 1, 1, 1) / 1000 + conditioning["c"].sum(1).view(-1, 1, 1, 1)

    def decode(self, latents):
        return [None] * len(latents)


class Shifting(Affine):
    """The model of above with a weight that shifts its velocity, in the shape accumulate_gradients takes."""

    is_lora = True

    def __init__(self):
        self.shift = torch.zeros((), requires_grad=True)
        self.transformer = SimpleNamespace(set_requires_gradient_sync=lambda wanted: None)

    def predict_velocity(self, x, timestep, *conditioning):
        return super().predict_velocity(x, timestep, *conditioning) + self.shift


# ---- DanceGRPO -------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_dance_starts_all_images_of_a_prompt_from_one_noise():
    """From the prompt's own seed, whichever images a rank makes."""
    args = SimpleNamespace(seed=3)
    numbers = torch.tensor([2, 2, 2, 7, 7, 7])  # the images' prompts among the step's
    request = dance_grpo.share_initial_noise(args, Affine(), request_of(4, (0,)), 5, numbers)
    latents = request.first_latents([], "cpu")  # (6, ...), three images of each of two prompts
    assert torch.equal(latents[0], latents[1]) and torch.equal(latents[0], latents[2])
    assert torch.equal(latents[3], latents[5]) and not torch.equal(latents[0], latents[3])
    expected = torch.randn(1, 1, 2, 2, generator=torch.Generator().manual_seed(image_seed(3, "5 prompt", 7)))
    assert torch.equal(latents[4:5], expected)
    other_step = dance_grpo.share_initial_noise(args, Affine(), request_of(4, (0,)), 6, numbers)
    assert not torch.equal(other_step.initial_latents[0], latents[0])
    assert dance_grpo.Args().sde_type == "dance"


# ---- DiffusionOPD ----------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_distillation_loss_by_hand():
    """Two samples, two teachers: KLs 1, 2 and 3, 4; the first learns from the first alone, the second from both."""
    kls = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    loss, metrics = diffusion_opd.distillation_loss(kls, weights, ["ocr", "colour"])
    assert loss.item() == pytest.approx((1 + 0.75 + 3) / 2)
    assert metrics["actor/kl_ocr"] == 2 and metrics["actor/kl_colour"] == 3 and metrics["actor/loss"] == loss
    loss.backward()
    assert kls.grad.tolist() == [[0.5, 0], [0.125, 0.375]]


@pytest.mark.fast
@pytest.mark.parametrize("trained_step", [0, 1, 2])
def test_the_students_loss_is_torchs_kl_to_its_teachers(trained_step):
    """At the student's own latents, by torch.distributions, per element; value and gradient."""
    args = diffusion_opd.Args(micro_batch_size=6, teachers=("a=x", "b=y"))
    model = Shifting()
    request = request_of(4, (trained_step,))
    with torch.no_grad():
        trajectories = diffusion_opd.sample_locally(model, request.select(torch.arange(6)))
    student = trajectories.prev_sample_means  # (6, 1, ...)
    means = [student + 0.1, student - 0.3]
    old = diffusion_opd.OldPolicy(trajectories.log_probs, student, torch.ones(6, 1))
    weights = torch.tensor([[1.0, 0], [0, 1], [0.5, 0.5]]).repeat(2, 1)
    batch = diffusion_opd.Batch(request, trajectories, old, weights)
    teachers = [replace(trajectories, prev_sample_means=m, velocities=m) for m in means]
    passes = diffusion_opd.accumulate_gradients(args, model, batch, torch.arange(6), teachers)
    std = trajectories.transition_stds[0, 0].item()
    s = 1 - trained_step / 4
    slope = -0.25 * (1 + (std / 0.5) ** 2 * (1 - s) / (2 * s))  # of the mean by v
    shift = torch.zeros((), requires_grad=True)
    policy = torch.distributions.Normal(student[:, 0] + slope * shift, std)
    kls = [torch.distributions.kl_divergence(policy, torch.distributions.Normal(m[:, 0], std)) for m in means]
    loss = sum((weights[:, k] * kl.flatten(1).mean(1)).mean() for k, kl in enumerate(kls))
    loss.backward()
    assert passes[0]["actor/loss"].item() == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(model.shift.grad, shift.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.fast
def test_a_prompt_names_its_teacher_or_learns_from_all():
    records = [{"teacher": "b"}, {}]
    prompts = PromptSet(["x", "y"], records)
    args = diffusion_opd.Args(teachers=("a=x", "b=y"))
    assert diffusion_opd.weigh_teachers(args, prompts).tolist() == [[0, 1], [0.5, 0.5]]
    args = diffusion_opd.Args(teachers=("a=x", "b=y"), teacher_weights=(3.0, 1.0))
    assert diffusion_opd.weigh_teachers(args, prompts).tolist() == [[0, 1], [3, 1]]
    records[1]["teacher"] = "c"
    with pytest.raises(ValueError, match="--train_prompts .*: .* 'y' .* 'c', .*--teachers"):
        diffusion_opd.weigh_teachers(args, prompts)


@pytest.mark.fast
def test_teachers_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    args = diffusion_opd.Args(rollout="local")
    with pytest.raises(ValueError, match="^--teachers: .* NAME=PATH "):
        diffusion_opd.check(args)
    with pytest.raises(ValueError, match="--teacher_weights: 1 .* 2 .*--teachers"):
        diffusion_opd.check(replace(args, teachers=("a=x", "b=y"), teacher_weights=(1.0,)))
    with pytest.raises(ValueError, match="--teacher_weights: .* 0$"):
        diffusion_opd.check(replace(args, teachers=("a=x", "b=y"), teacher_weights=(0.0, 0.0)))
    for given in ("a", "=x", "a=", "a b=x"):
        with pytest.raises(ValueError, match=f"--teachers {given}: .* NAME=PATH, "):
            diffusion_opd.read_teachers(replace(args, teachers=(given,)))
    with pytest.raises(ValueError, match=f"--teachers a: {tmp_path}/none: "):
        diffusion_opd.read_teachers(replace(args, teachers=(f"a={tmp_path}/none",)))
    options = teachers_of(tmp_path, rank=2)
    with pytest.raises(ValueError, match="--teachers ocr: .* 2, .* 16"):
        diffusion_opd.prepare(replace(args, teachers=tuple(options[1:])))


# ---- TempFlow-GRPO ---------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_tempflow_starts_the_images_of_a_seed_from_one_noise():
    """Six images of one prompt in seeds of two; alike on a rank that makes the last four."""
    args = SimpleNamespace(seed=3)
    numbers = torch.arange(6) // 2
    latents = tempflow_grpo.share_initial_noise(args, Affine(), request_of(4, (1,)), 5, numbers).initial_latents
    assert torch.equal(latents[0], latents[1]) and torch.equal(latents[4], latents[5])
    assert not torch.equal(latents[1], latents[2])
    expected = torch.randn(1, 1, 2, 2, generator=torch.Generator().manual_seed(image_seed(3, "5 branch", 2)))
    assert torch.equal(latents[4:5], expected)
    rest = tempflow_grpo.share_initial_noise(args, Affine(), request_of(4, (1,), 4), 5, numbers[2:])
    assert torch.equal(rest.initial_latents, latents[2:])


@pytest.mark.fast
def test_tempflows_images_part_at_the_branching_step():
    """Those of a seed are equal up to sampling step 1, the branching one, and different from there on."""
    args = SimpleNamespace(seed=3)
    request = tempflow_grpo.share_initial_noise(args, Affine(), request_of(4, (1,)), 5, torch.arange(6) // 2)
    latents = tempflow_grpo.sample_locally(Affine(), request.select(torch.arange(6))).latents  # (6, 5, ...)
    assert torch.equal(latents[0, :2], latents[1, :2]) and not torch.equal(latents[0, :2], latents[2, :2])
    assert not torch.equal(latents[0, 2], latents[1, 2])


@pytest.mark.fast
def test_tempflow_compares_within_a_prompt_or_a_seed():
    """Of one prompt, two seeds of two images, 0 1 and 4 7: the deviation is that of all four, or none."""
    scores = torch.tensor([[0.0], [1.0], [4.0], [7.0]], dtype=torch.float64)
    options = {"group_size": 4, "branches_per_seed": 2, "scale_rewards": "none", "adv_clip_max": 9.0}
    args = tempflow_grpo.Args(**options)
    assert tempflow_grpo.compare_images(args, scores, ["a"]).tolist() == [-3, -2, 1, 4]
    args = tempflow_grpo.Args(**options, advantage_group="seed")
    assert tempflow_grpo.compare_images(args, scores, ["a"]).tolist() == [-0.5, 0.5, -1.5, 1.5]
    args = tempflow_grpo.Args(**{**options, "scale_rewards": "batch"}, advantage_group="seed")
    std = scores.std(correction=0).item() + 1e-4
    assert tempflow_grpo.compare_images(args, scores, ["a"]).tolist() == pytest.approx(
        [x / std for x in (-0.5, 0.5, -1.5, 1.5)]
    )


@pytest.mark.fast
@pytest.mark.parametrize("branching_step", [0, 1, 2])
def test_tempflow_weighs_the_loss_by_the_noise_of_the_step(branching_step):
    """Against -A times torch's own log-density, whose gradient at the old policy is the loss's, times 2.25 std."""
    args = tempflow_grpo.Args(micro_batch_size=3, weight_scale=2.25)
    model = Shifting()
    request = request_of(4, (branching_step,))
    with torch.no_grad():
        trajectories = tempflow_grpo.sample_locally(model, request.select(torch.arange(6)))
    advantages = torch.tensor([1.0, -1, 2, 0.5, -2, -0.5])
    old = tempflow_grpo.OldPolicy(trajectories.log_probs, trajectories.prev_sample_means, torch.ones(6, 1))
    batch = tempflow_grpo.Batch(request, trajectories, old, advantages)
    passes = tempflow_grpo.accumulate_gradients(args, model, batch, torch.arange(6), None)
    # by hand: sigmas 1, .75, .5, .25; 1 - s at least .25; q = .7 sqrt(s / (1 - s)), std = q sqrt(.25)
    s = 1 - branching_step / 4
    std = 0.7 * math.sqrt(s / max(1 - s, 0.25)) * 0.5
    assert passes[0]["actor/noise_weight"].item() == pytest.approx(2.25 * std)
    slope = -0.25 * (1 + (std / 0.5) ** 2 * (1 - s) / (2 * s))  # of the mean by v
    shift = torch.zeros((), requires_grad=True)
    mean = trajectories.prev_sample_means[:, 0] + slope * shift
    density = torch.distributions.Normal(mean, std).log_prob(trajectories.latents[:, branching_step + 1])
    loss = -(2.25 * std * advantages * density.flatten(1).mean(1)).mean()
    loss.backward()
    torch.testing.assert_close(model.shift.grad, shift.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.fast
def test_tempflow_refuses_seeds_that_do_not_fit(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="--branches_per_seed 3: .*--group_size 8"):
        tempflow_grpo.check(tempflow_grpo.Args(branches_per_seed=3))
    with pytest.raises(ValueError, match="--advantage_group seed: .*--branches_per_seed .* 2, "):
        tempflow_grpo.check(tempflow_grpo.Args(branches_per_seed=1, advantage_group="seed"))


@pytest.mark.fast
@pytest.mark.parametrize("size", [0, 2])
def test_tempflow_has_one_branching_step(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", "1")
    options = {"num_inference_steps": 4, "sde_window_range": (0, 3)}
    with pytest.raises(ValueError, match=f"^--sde_window_size {size}: .*1.*$"):
        tempflow_grpo.check(tempflow_grpo.Args(sde_window_size=size, **options))
    tempflow_grpo.check(tempflow_grpo.Args(sde_window_size=size, eval_only=True, **options))  # which branches nowhere
    tempflow_grpo.check(tempflow_grpo.Args(**options))
    with pytest.raises(ValueError, match="--sde_window_range 0 4: "):
        tempflow_grpo.check(tempflow_grpo.Args(num_inference_steps=4, sde_window_range=(0, 4)))


# ---- DRaFT and ReFL --------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_draft_follows_the_weighted_sum_of_what_prompts_ask_for():
    """Weights 2 and 0.5. The second prompt asks for the second reward, the third for none."""
    scores = torch.tensor([[1.0, 4.0], [NOT_ASKED, 6.0], [NOT_ASKED, NOT_ASKED]], dtype=torch.float64)
    scores.requires_grad_()
    loss, metrics = draft.reward_loss(scores, (2.0, 0.5))
    loss.backward()
    assert loss.item() == pytest.approx(-((2 + 2) + 3) / 3) and metrics["actor/loss"] == loss
    assert scores.grad.flatten().tolist() == pytest.approx([-2 / 3, -0.5 / 3, 0, -0.5 / 3, 0, 0])
    means = draft.score_metrics(SimpleNamespace(reward_weights=(2.0, 0.5)), scores.detach(), {"a": None, "b": None})
    assert means == {"critic/rewards/a/mean": 1, "critic/rewards/b/mean": 5, "critic/rewards/mean": 3.5}


@pytest.mark.fast
def test_the_steps_that_draft_and_refl_train():
    assert draft.trained_steps(draft.Args(num_inference_steps=5, gradient_steps=2), step=1) == (3, 4)
    args = draft.Args(num_inference_steps=5, method="refl", refl_range=(2, 4))
    assert {draft.trained_steps(args, step) for step in range(20)} == {(2,), (3,)}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"gradient_steps": 4}, "--gradient_steps 4: .*--num_inference_steps, 3"),
        ({"method": "refl", "refl_range": (1, 4)}, "--refl_range 1 4: 0 3 .* 3 "),
        ({"method": "refl", "refl_range": (2, 2)}, "--refl_range 2 2: 0 3 "),
        ({"method": "refl", "gradient_steps": 2}, "--gradient_steps 2: --method refl .*--refl_range"),
        ({"num_prompts": 6, "micro_batch_size": 4}, "--micro_batch_size 4: "),
    ],
)
def test_draft_refuses_steps_that_do_not_fit(monkeypatch, options, fault):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=fault):
        draft.check(draft.Args(**options))


@pytest.mark.fast
def test_draft_refuses_a_reward_without_a_gradient(tmp_path):
    line = run_here(tmp_path, "contrib/draft.py", "--reward", "ocr")
    assert re.fullmatch(r"draft\.py: error: --reward ocr: .* of_pixels, .*\(docs/rewards\.md\)", line)


def test_draft_has_no_graph_before_its_steps():
    """ReFL's image is x - s v at its step; of DRaFT's steps, only the last K see a gradient. By the affine model."""
    model = Shifting()
    request = request_of(4, ()).select(torch.arange(6))
    whole = draft.sample(model, request)
    assert not whole.requires_grad
    shifts = {}
    for steps in ((3,), (2, 3), (0, 1, 2, 3)):
        sampled = draft.sample(model, request, steps)
        assert torch.equal(sampled, whole)
        (shifts[steps],) = torch.autograd.grad(sampled.sum(), model.shift)
    # x' = x + (x s + shift) dt at s 1, .75, .5, .25 with dt -1/4: each later step multiplies by 1 - s / 4
    num = sampled.numel()
    assert shifts[3,].item() == pytest.approx(-num / 4, rel=1e-5)
    assert shifts[2, 3].item() == pytest.approx(-num / 4 * (1 + 15 / 16), rel=1e-5)
    every = 1 + 15 / 16 + 15 / 16 * 7 / 8 + 15 / 16 * 7 / 8 * 13 / 16
    assert shifts[0, 1, 2, 3].item() == pytest.approx(-num / 4 * every, rel=1e-5)
    jumped = draft.sample(model, request, (1,))  # from s = .75
    (shift,) = torch.autograd.grad(jumped.sum(), model.shift)
    assert shift.item() == pytest.approx(-num * 0.75, rel=1e-5)


# ---- as users run them -----------------------------------------------------------------------------------------------
def test_a_script_is_started_as_a_module(tmp_path):
    """torchrun --standalone -m contrib.awm, as its header says, at the root."""
    options = [*TINY, "--num_steps", 1, *few_eval_prompts(tmp_path, 2), "--reward", brightness_reward(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "contrib.awm", "--rollout", "local"]
    done = subprocess.run(
        [*command, *map(str, options)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # where a user would stand
        text=True,
        timeout=420,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert read_metrics(tmp_path / "runs" / "awm")[1]["actor/grad_norm"] > 0


def teachers_of(tmp_path, rank=16):
    """Options of two teachers: LoRAs of random weights for the embedded model, as save_weights writes them."""
    options = ["--teachers"]
    for number, name in enumerate(("ocr", "colour")):
        file = write_teacher(tmp_path / name, number, rank)
        options.append(f"{name}={file}")
    return options


def write_teacher(folder, seed, rank, width=0):
    """A LoRA of the first block's attention in the format of diffusers. width: added to the inputs of lora_A."""
    transformer = SD3Transformer2DModel.from_config(
        SD3Transformer2DModel.load_config(EMBEDDED, subfolder="transformer")
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_v"):
        linear = transformer.get_submodule(module)
        a = torch.randn(rank, linear.in_features + width, generator=generator)
        b = torch.randn(linear.out_features, rank, generator=generator)
        tensors[f"transformer.{module}.lora_A.weight"] = a * 0.1
        tensors[f"transformer.{module}.lora_B.weight"] = b * 0.1
    folder.mkdir()
    save_file(tensors, folder / "pytorch_lora_weights.safetensors")
    return folder


SEED_AND_ADAM = ["--seed", 3, "--weight_decay", 0.25, "--adam_betas", 0.5, 0.75, "--adam_eps", 1e-6]
SEED_AND_ADAM += ["--shuffle", "False"]


def adam_options(run, num_steps):
    """(weight_decay, betas, eps) of the optimizer in the checkpoint of step num_steps."""
    (group,) = load_checkpoint(run / "checkpoints" / f"step_{num_steps:06d}.pt")["optimizer"]["param_groups"]
    return group["weight_decay"], group["betas"], group["eps"]


def assert_seed_and_adam(run, num_steps):
    """SEED_AND_ADAM reached the run: its first images have the seed's noise and the file's first prompts, and Adam its
    options."""
    samples = [json.loads(line) for line in (run / "rollouts" / "0001" / "samples.jsonl").read_text().splitlines()]
    drawn = read_prompts(ROOT / "assets" / "train_prompts.txt").prompts[:4]
    assert [sample["prompt"] for sample in samples] == [prompt for prompt in drawn for _ in range(4)]
    assert [sample["seed"] for sample in samples] == [image_seed(3, 1, i) for i in range(16)]
    assert adam_options(run, num_steps) == (0.25, (0.5, 0.75), 1e-6)


# those of which test_mains.py has no loop by hand, which it compares with two ranks
ON_TWO_RANKS = [f"contrib/{name}.py" for name in ("crd", "diffusion_opd", "online_dpo", "v_grpo")]


# whose own tests run them
ELSEWHERE = [f"contrib/{name}.py" for name in ("dmd2", "draft", "flow_grpo_ahead", "sft", "tdm_r1")]


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in ELSEWHERE])
def test_a_script_runs_and_on_two_ranks_as_on_one(tmp_path, script):
    """With the same images and the same first update, as the groups that a loss takes are whole on every rank. The
    seed and Adam's options are not the defaults: each script's own `main` hands them on."""
    options = [*TINY, *SEED_AND_ADAM, "--save_rollouts", 1, "--num_steps", 2]
    options += [*few_eval_prompts(tmp_path, 2), "--reward", brightness_reward(tmp_path)]
    options += ["--num_inference_steps", 3, "--rollout", "local"]
    options += ["--micro_batch_size", 2 if script == "contrib/online_dpo.py" else 4]
    options += teachers_of(tmp_path) if script == "contrib/diffusion_opd.py" else []
    run = tmp_path / "runs" / "ranks1"
    assert run_here(tmp_path, script, "--name", "ranks1", *options) is None
    one = read_metrics(run)
    assert_seed_and_adam(run, num_steps=2)
    if script in ON_TWO_RANKS:
        torchrun(tmp_path, script, "--name", "ranks2", *options, "--num_steps", 1, nproc=2)
        assert_seed_and_adam(tmp_path / "runs" / "ranks2", num_steps=1)
        two = read_metrics(tmp_path / "runs" / "ranks2")
        assert one[1]["critic/rewards/mean"] == pytest.approx(two[1]["critic/rewards/mean"], abs=1e-6)
        for metric in ("actor/loss", "actor/grad_norm"):
            assert two[1][metric] == pytest.approx(one[1][metric], rel=1e-3, abs=1e-5), metric
    assert one[2]["actor/grad_norm"] > 0 and one[2]["actor/skipped_steps"] == 0 and "val/brightness/mean" in one[2]
    assert json.loads((run / "args.json").read_text())["args"]["name"] == "ranks1"
    assert (run / "source.py").read_text() == (ROOT / script).read_text()
    assert (run / "adapter" / "pytorch_lora_weights.safetensors").is_file()


@pytest.fixture
def redness(tmp_path):
    """--reward of a file with a form for pixels."""
    path = tmp_path / "red.py"
    path.write_text(
        "import numpy\n\n\ndef redness(images, prompts, metadata):\n"
        "    return [numpy.asarray(image)[..., 0].mean() / 255 for image in images]\n\n\n"
        "redness.of_pixels = lambda pixels, prompts, metadata: pixels[:, 0].mean((1, 2))\n"
    )
    return ["--reward", f"{path}:redness"]


@pytest.mark.parametrize("changes", [["--gradient_steps", 2], ["--method", "refl"], ["--lora_rank", 0]])
def test_draft_learns_and_two_ranks_do_as_one(tmp_path, redness, changes):
    options = [*redness, *few_eval_prompts(tmp_path, 4), "--num_prompts", 8, "--micro_batch_size", 2, *changes]
    options += ["--lr_schedule", "constant", "--learning_rate", 1e-4 if "--lora_rank" in changes else 5e-3]
    options += ["--weight_decay", 0.25]
    run = tmp_path / "runs" / "ranks1"
    assert run_here(tmp_path, "contrib/draft.py", "--name", "ranks1", *options, "--num_steps", 4) is None
    torchrun(tmp_path, "contrib/draft.py", "--name", "ranks2", *options, "--num_steps", 1, nproc=2)
    one, two = (read_metrics(tmp_path / "runs" / name) for name in ("ranks1", "ranks2"))
    for metric in ("critic/rewards/redness/mean", "actor/loss", "actor/grad_norm", "val/redness/mean"):
        rows = (two[0], one[0]) if metric.startswith("val") else (two[1], one[1])
        assert rows[0][metric] == pytest.approx(rows[1][metric], rel=1e-4, abs=1e-6), metric
    assert one[1]["actor/grad_norm"] > 0 and one[1]["actor/loss"] == -one[1]["critic/rewards/mean"]
    if "--lora_rank" not in changes:  # a checkpoint of full weights has no settings of Adam
        assert (
            adam_options(run, 4)
            == adam_options(tmp_path / "runs" / "ranks2", 1)
            == (*(0.25, draft.Args().adam_betas, draft.Args().adam_eps),)
        )
    assert one[4]["val/redness/mean"] > one[0]["val/redness/mean"] + 0.02
    assert (run / "source.py").read_text() == (ROOT / "contrib/draft.py").read_text()


@pytest.mark.parametrize("steps", [(0, 1, 2), (0,)])
def test_the_gradient_of_draft_is_that_of_differences(one_rank, redness, steps):
    """Of the embedded model with its VAE, along the gradient by its LoRA, where all steps taken keep their graph."""
    model, _, _ = policy_without_fsdp()
    model.transformer.set_requires_gradient_sync = lambda wanted: None
    args = draft.Args(micro_batch_size=2)
    rewards = load_rewards([redness[1]], [1.0])
    prompts = PromptSet(["a red sign", "a blue sign", "a green sign", "a grey sign"], [{}] * 4)
    request = draft.make_request(args, model, prompts, torch.arange(4), [1, 2, 3, 4])
    draft.accumulate_gradients(args, model, rewards, prompts, request, steps)
    weights = [p for p in model.transformer.parameters() if p.requires_grad]
    gradients = [p.grad.clone() for p in weights]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()

    def loss_at(distance):
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight += distance / norm * gradient
        _, scores = draft.accumulate_gradients(args, model, rewards, prompts, request, steps)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= distance / norm * gradient
        return -scores.mean().item()

    assert (loss_at(5e-3) - loss_at(-5e-3)) / 1e-2 == pytest.approx(norm, rel=1e-4)


def test_a_resumed_student_has_the_teachers_that_are_given(tmp_path):
    """No checkpoint holds a teacher. Another file under the same name teaches from the next step on; the same file
    gives the weights of an uninterrupted run."""
    options = [*TINY, *few_eval_prompts(tmp_path, 2), "--reward", brightness_reward(tmp_path), "--rollout", "local"]
    first = write_teacher(tmp_path / "first", 0, 16)
    second = write_teacher(tmp_path / "second", 1, 16)
    script = "contrib/diffusion_opd.py"
    assert run_here(tmp_path, script, *options, "--name", "cut", "--num_steps", 1, "--teachers", f"a={first}") is None
    state = load_checkpoint(saved_checkpoints(tmp_path / "runs/cut")[-1])
    assert set(state["policies"]) == {"default"}
    ends = {}
    for name, folder in (("whole", first), ("same", first), ("other", second)):
        resumed = ["--teachers", f"a={folder}", "--num_steps", 2, "--name", name]
        resumed += ["--resume", tmp_path / "runs/cut"] if name != "whole" else []
        assert run_here(tmp_path, script, *options, *resumed) is None
        ends[name] = load_file(tmp_path / "runs" / name / "adapter/pytorch_lora_weights.safetensors")
    assert_same(ends["same"], ends["whole"])
    assert any(not torch.equal(tensor, ends["whole"][name]) for name, tensor in ends["other"].items())


def test_a_teacher_of_another_shape_is_named(tmp_path):
    options = ["--teachers", f"wide={write_teacher(tmp_path / 'wide', 0, 16, width=3)}", "--rollout", "local"]
    line = run_here(tmp_path, "contrib/diffusion_opd.py", *TINY, *options)
    assert line.startswith("diffusion_opd.py: error: --teachers wide: ")
    assert re.search(r"to_q\.lora_A\.weight .* 131 ", line)


def test_v_grpo_does_the_same_with_an_engine(tmp_path):
    """In the second step as well, for which the engine has got the trained policy. The second epoch is compared with
    the policy before the first one."""
    options = [*TINY, "--num_steps", 2, *few_eval_prompts(tmp_path, 2), "--reward", brightness_reward(tmp_path)]
    options += ["--micro_batch_size", 4, "--learning_rate", 0.01, "--updates_per_rollout", 1, "--epochs_per_rollout", 2]
    assert run_here(tmp_path, "contrib/v_grpo.py", "--name", "local", "--rollout", "local", *options) is None
    torchrun(tmp_path, "contrib/v_grpo.py", "--name", "vllm", "--rollout", "vllm", *options)
    local, vllm = (read_metrics(tmp_path / "runs" / name) for name in ("local", "vllm"))
    assert local[2]["critic/rewards/mean"] != local[1]["critic/rewards/mean"] and local[1]["actor/kl_loss"] > 0
    for row, other in zip(local[1:], vllm[1:], strict=True):
        assert row["critic/rewards/mean"] == pytest.approx(other["critic/rewards/mean"], abs=1e-5)
        assert row["actor/loss"] == pytest.approx(other["actor/loss"], rel=1e-3, abs=1e-6)
    assert local[2]["val/brightness/mean"] == pytest.approx(vllm[2]["val/brightness/mean"], abs=1e-5)


def test_the_engine_samples_the_same_images_of_a_seed(tmp_path):
    """RAM samples by diffusion_nft.py's functions, to the byte, which test_siblings.py runs with engines."""
    script = "contrib/tempflow_grpo.py"
    options = [*TINY, "--num_steps", 1, *few_eval_prompts(tmp_path, 2), "--reward", brightness_reward(tmp_path)]
    options += ["--sde_window_range", 1, 2]
    assert run_here(tmp_path, script, "--name", "local", "--rollout", "local", *options) is None
    torchrun(tmp_path, script, "--name", "vllm", "--rollout", "vllm", *options)
    local, vllm = (read_metrics(tmp_path / "runs" / name)[1] for name in ("local", "vllm"))
    assert local["critic/rewards/mean"] == pytest.approx(vllm["critic/rewards/mean"], abs=1e-6)
    assert local["actor/grad_norm"] == pytest.approx(vllm["actor/grad_norm"], rel=1e-3)
    assert vllm["rollout_corr/logprob_abs_diff_max"] <= 2e-6


# ---- Flow-GRPO one rollout ahead -------------------------------------------------------------------------------------
def same_rewards(first, second):
    """Whether two rows of metrics are of the same images."""
    names = [name for name in first if name.startswith("critic/")]
    return [first[name] for name in names] == [second[name] for name in names]


@pytest.mark.fast
@pytest.mark.parametrize(("save_every", "expected"), [(0, [1, 2, 4, 5]), (2, [1, 5])])
def test_nothing_is_sampled_ahead_across_an_evaluation_or_a_checkpoint(save_every, expected):
    args = flow_grpo_ahead.Args(num_steps=7, eval_every=3, save_every=save_every)
    assert [step for step in range(9) if flow_grpo_ahead.samples_ahead(args, step)] == expected


@pytest.mark.fast
def test_an_evaluation_of_rollouts_ahead_needs_no_engine():
    flow_grpo_ahead.check(flow_grpo_ahead.Args(rollout="local", eval_only=True))
    with pytest.raises(ValueError, match="^--rollout local: .*--rollout vllm"):
        flow_grpo_ahead.check(flow_grpo_ahead.Args(rollout="local"))


@pytest.fixture
def engine_by_hand(monkeypatch):
    """The toy model's engine, in this process, which samples what is ahead as soon as it is asked to."""

    class Started:
        def __init__(self, target, daemon):
            self.start = target

    monkeypatch.setattr(flow_grpo_ahead, "threading", SimpleNamespace(Thread=Started))
    monkeypatch.setattr(client, "VLLMEngine", EngineByHand)
    monkeypatch.setattr("common.engine.check_engine", lambda *of, **named: None)
    monkeypatch.setattr(EngineByHand, "started", [])


def test_a_rollout_ahead_is_sampled_by_the_policy_before_the_update(tmp_path, engine_by_hand):
    ahead = "contrib/flow_grpo_ahead.py"
    rows = {}
    for name, script, changes in (
        ("flow", "flow_grpo.py", {}),
        ("still", "flow_grpo.py", {"learning_rate": 0}),
        ("never_ahead", ahead, {"eval_every": 1}),
        ("ahead", ahead, {}),
    ):
        changes = {"num_steps": 2, "rollout": "vllm"} | changes
        command = options_of("flow_grpo.py", tmp_path, name=name, **changes)
        assert run_here(tmp_path, script, *command) is None
        rows[name] = read_metrics(tmp_path / "runs" / name)
    # with nothing ahead it is Flow-GRPO, to the bit; otherwise the second rollout is that of the first policy
    assert all(same_rewards(*pair) for pair in zip(rows["never_ahead"], rows["flow"], strict=True))
    assert same_rewards(rows["ahead"][2], rows["still"][2]) and not same_rewards(rows["ahead"][2], rows["flow"][2])
    assert [row["training/staleness"] for row in rows["ahead"][1:]] == [0, 1]
    assert [row["training/staleness"] for row in rows["never_ahead"][1:]] == [0, 0]


def test_the_engines_of_two_ranks_sample_ahead_as_that_of_one(tmp_path):
    options = [*TINY, *SEED_AND_ADAM, "--save_rollouts", 1, "--num_steps", 2, *few_eval_prompts(tmp_path, 2)]
    options += ["--reward", brightness_reward(tmp_path), "--rollout", "vllm", "--learning_rate", 0.1]
    rows = {}
    for nproc in (1, 2):
        torchrun(tmp_path, "contrib/flow_grpo_ahead.py", "--name", f"ranks{nproc}", *options, nproc=nproc)
        rows[nproc] = read_metrics(tmp_path / "runs" / f"ranks{nproc}")
        assert_seed_and_adam(tmp_path / "runs" / f"ranks{nproc}", num_steps=2)
    assert [row["training/staleness"] for row in rows[1][1:]] == [0, 1]
    # the ratio is that to the policy that sampled, which the engine's log-probs belong to
    assert rows[1][1]["actor/on_policy_ratio_std"] == 0 < rows[1][2]["actor/on_policy_ratio_std"]
    assert rows[1][2]["rollout_corr/logprob_abs_diff_max"] <= 2e-6
    for one, two in zip(rows[1][1:], rows[2][1:], strict=True):
        for name in ("critic/rewards/mean", "actor/ratio_mean", "actor/grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-4), name


def test_what_was_ahead_of_a_signal_is_sampled_again(tmp_path, engine_by_hand):
    reward = tmp_path / "ending.py"
    reward.write_text(
        "import os, pathlib, signal\nfrom tests.algorithms.toy_family import closeness\n\nrollouts = 0\n\n\n"
        "def ending(images, prompts, metadata):\n"
        f"    global rollouts\n    told = pathlib.Path({str(tmp_path / 'told')!r})\n    if told.exists():\n"
        "        rollouts += len(images) > 4  # an evaluation has four images\n        if rollouts == 3:\n"
        "            told.unlink()\n            os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return closeness(images, prompts, metadata)\n"
    )
    script = "contrib/flow_grpo_ahead.py"
    changes = {"num_steps": 4, "eval_every": 5, "eval_images_per_prompt": 1, "rollout": "vllm"}
    changes |= {"reward": f"{reward}:ending", "trust_code": True}

    def run(name, *more):
        return run_here(tmp_path, script, *options_of(script, tmp_path, name=name, **changes), *more)

    assert run("whole") is None
    (tmp_path / "told").touch()  # the third rollout, which is ahead in the second step, ends the next run
    assert not run("stopped")
    stopped = tmp_path / "runs" / "stopped"
    assert len(read_metrics(stopped)) == 1 + 2 and not (tmp_path / "told").exists()
    assert run("stopped", "--resume", "latest") is None
    whole = without_times(read_metrics(tmp_path / "runs" / "whole"))
    assert without_times(read_metrics(stopped)) == whole
    assert [row["training/staleness"] for row in whole[1:]] == [0, 1, 1, 1]


@pytest.mark.fast
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_runs_of_a_script_have_its_name(script):
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    assert module.Args().name == module.__name__.removeprefix("contrib.")
