"""nano_flow_grpo.py: its updates are flow_grpo.py's, and it runs by plain python."""

import dataclasses
import itertools
import math
import os
import subprocess
import sys

import flow_grpo
import nano_flow_grpo as nano
from common.data import GroupSampler
from common.sde import sde_step
from tests.conftest import ROOT, brightness_reward, few_eval_prompts, run_here

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import make_image_grid
from peft import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file

SMALL = {"num_prompts": 2, "group_size": 4, "updates_per_rollout": 2}
LORA_SCALE = 2  # flow_grpo.py writes lora_B times lora_alpha / lora_rank, for loaders that ignore the metadata


def brightness(images, prompts):
    """The reward of tests/conftest.py, as this file takes one."""
    return [np.asarray(image).mean() / 255 for image in images]


def nano_lora(folder, monkeypatch, **changes):
    """The LoRA that nano_flow_grpo.py saves in `folder` after one training step."""
    monkeypatch.setattr(nano, "reward", brightness)
    _, eval_prompts = few_eval_prompts(folder)
    nano.main(nano.Options(out=folder, eval_prompts=eval_prompts, num_steps=1, **changes))
    return load_file(folder / "pytorch_lora_weights.safetensors")


def flow_grpo_lora(folder, **changes):
    """The LoRA that flow_grpo.py saves after one training step, sampling with its own transformer."""
    options = ["--rollout", "local", "--num_steps", 1, "--micro_batch_size", 4]
    options += ["--kl_coef", 0, "--lr_schedule", "constant"]
    options += ["--reward", brightness_reward(folder), *few_eval_prompts(folder)]
    for name, value in changes.items():
        options += [f"--{name}", value]
    assert run_here(folder, "flow_grpo.py", *options) is None
    return load_file(folder / "runs" / "flow_grpo" / "adapter" / "pytorch_lora_weights.safetensors")


# ---- its updates are flow_grpo.py's ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("sde_steps", "window_size"), [(1, 1), (2, 0)])
def test_the_first_updates_have_the_gradients_of_flow_grpo(tmp_path, monkeypatch, sde_steps, window_size):
    """Two optimizer steps of both files, the first on-policy and the second not, on the same images, noise and LoRA:
    with one noisy step of three, the default, and with all but the last.

    Both take SGD for AdamW, whose first step is hardly more than the gradient's sign. 100 times the gradient moves the
    weights further than AdamW does.
    """
    for module in (torch.optim, flow_grpo):
        monkeypatch.setattr(module, "AdamW", lambda parameters, lr, **others: torch.optim.SGD(parameters, lr=lr))
    options = {**SMALL, "learning_rate": 100.0}
    found = nano_lora(tmp_path, monkeypatch, sde_steps=sde_steps, **options)
    expected = flow_grpo_lora(tmp_path, sde_window_size=window_size, **options)
    first = get_peft_model_state_dict(nano.load(nano.Options()).transformer)
    assert found.keys() == expected.keys() == {f"transformer.{name}" for name in first}
    for side, scale in (("lora_A", 1), ("lora_B", LORA_SCALE)):
        names = [name for name in first if side in name]
        moved = torch.cat([(found[f"transformer.{name}"] - first[name]).flatten() for name in names])
        expected_move = torch.cat([(expected[f"transformer.{name}"] / scale - first[name]).flatten() for name in names])
        assert expected_move.norm() > 0.1
        assert (moved - expected_move).norm() <= 2e-4 * expected_move.norm()  # round-off: 2e-5 was seen


@pytest.mark.fast
def test_its_defaults_are_flow_grpos():
    flow_grpos = flow_grpo.Args()
    for field in dataclasses.fields(nano.Options):
        if hasattr(flow_grpos, field.name) and field.name != "num_steps":  # of a run without KL and schedule
            default = getattr(flow_grpos, field.name)
            default = default[0] if field.name in ("train_prompts", "eval_prompts") else default  # the first file
            assert str(field.default) == str(default), field.name
    shared = {field.name for field in dataclasses.fields(nano.Options) if hasattr(flow_grpos, field.name)}
    assert {field.name for field in dataclasses.fields(nano.Options)} - shared == {"out", "sde_steps"}


@pytest.mark.fast
def test_it_takes_the_prompts_of_flow_grpos_sampler():
    """Over the end of an epoch, too: draws of 4 of 6 prompts."""
    sampler = GroupSampler(6, 4, 2, seed=3, rank=0, world_size=1)
    order = nano.prompt_order(6, seed=3)
    for _ in range(4):
        assert list(itertools.islice(order, 4)) == sampler.draw()[0].tolist()


@pytest.mark.fast
def test_its_step_is_the_sde_of_common():
    """Every step of the schedule, the first from pure noise and the last without noise, with its log-prob."""
    pipe = nano.load(nano.Options())
    conditioning = nano.encode(pipe, nano.Options(), ['a red sign that says "12"'] * 2)
    x, x_next = torch.randn(2, 2, 8, 8, 24, generator=torch.Generator().manual_seed(0))
    sigmas = pipe.scheduler.sigmas.tolist()
    for i, noise_level in ((0, 0.7), (1, 0.7), (2, 0.0)):
        with torch.no_grad():
            timestep = pipe.scheduler.timesteps[i].expand(2)
            v = pipe.transformer(x, timestep=timestep, **conditioning).sample
            mean, std = nano.policy(pipe, conditioning, x, i, noise_level)
        scored = {"prev_sample": x_next} if noise_level else {}
        out = sde_step(x, v, sigmas[i], sigmas[i + 1], noise_level, sigma_max=sigmas[1], **scored)
        torch.testing.assert_close(mean, out.prev_sample_mean, rtol=1e-5, atol=1e-6)
        assert std == pytest.approx(out.transition_std[0].item(), rel=1e-6)
        if noise_level:
            log_prob = nano.gaussian_log_prob(x_next, mean, std)
            torch.testing.assert_close(log_prob, out.log_prob, rtol=1e-5, atol=1e-6)


@pytest.mark.fast
def test_advantages_and_loss_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64)  # deviation sqrt(1 / 8)
    advantages = nano.compute_advantages(rewards, group_size=2, adv_clip_max=1.0)
    assert advantages.tolist() == [1, -1, 0, 0]
    advantages = nano.compute_advantages(rewards, group_size=2, adv_clip_max=5.0)
    assert advantages.tolist() == pytest.approx([0.5 / (0.125**0.5 + 1e-4), -0.5 / (0.125**0.5 + 1e-4), 0, 0])
    round_off = torch.tensor([1.0, 1 + 1e-8, 0.5, 0.5], dtype=torch.float64)
    assert nano.compute_advantages(round_off, group_size=2, adv_clip_max=5.0).tolist() == [0, 0, 0, 0]
    log_prob = torch.tensor([0.2, -0.2, 0.2, 0.0], dtype=torch.float64).requires_grad_()
    old_log_prob = torch.zeros(4, dtype=torch.float64)
    loss = nano.policy_loss(log_prob, old_log_prob, torch.tensor([1.0, -1.0, -1.0, 2.0]), clip_range=0.1)
    loss.backward()
    # the first two are where they should go, and clipped; the third is not; the last is on-policy
    assert loss.item() == pytest.approx((-1.1 + 0.9 + math.exp(0.2) - 2) / 4)
    assert log_prob.grad.tolist() == pytest.approx([0, 0, math.exp(0.2) / 4, -2 / 4])


# ---- as users run it -------------------------------------------------------------------------------------------------
def test_it_runs_by_plain_python_and_diffusers_loads_its_lora(tmp_path):
    """From any folder, with its own reward; the saved LoRA draws the picture of after the training."""
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    options += ["--num_steps=2", "--eval_prompts", few_eval_prompts(tmp_path)[1], "--out", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, ROOT / "nano_flow_grpo.py", *map(str, options)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["before training", "step 1", "step 2", "after training"]

    options = nano.Options()
    pipe = StableDiffusion3Pipeline.from_pretrained(options.model)
    pipe.scheduler.set_timesteps(options.num_inference_steps)
    prompts = (tmp_path / "eval.txt").read_text().splitlines()
    seeds = [nano.image_seed("eval", 0, index) for index in range(len(prompts))]
    for when in ("before", "after"):
        if when == "after":
            pipe.load_lora_weights(tmp_path / "out")
        images = nano.sample(pipe, options, nano.encode(pipe, options, prompts), seeds, sde_steps=0).images
        drawn = np.asarray(make_image_grid(images, rows=len(images), cols=1)).astype(int)
        saved = np.asarray(Image.open(tmp_path / "out" / f"{when}.png")).astype(int)
        assert np.abs(drawn - saved).max() <= 1, when
    before = np.asarray(Image.open(tmp_path / "out" / "before.png")).astype(int)
    assert np.abs(before - saved).max() > 10
