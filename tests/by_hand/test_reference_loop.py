"""benchmarks/reference_loop.py times the same work: its loop's gradient and advantages are flow_grpo.py's."""

import json
import types

import flow_grpo
from benchmarks import reference_loop
from tests.conftest import policy_without_fsdp, prompt_set

import pytest
import torch

NUM_IMAGES = 8
BATCH = 4


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_their_update_has_our_gradient(guidance_scale, monkeypatch):
    """Of a rollout of ours, with the same LoRA: what its optimizer steps by; its first ratio is 1 to round-off."""
    changes = {"sde_window_size": 0, "updates_per_rollout": 1, "micro_batch_size": BATCH, "group_size": 4}
    model, args, _ = policy_without_fsdp(guidance_scale=guidance_scale, **changes)
    model.transformer.set_requires_gradient_sync = lambda is_last_pass: None  # FSDP's
    prompts = ['a red sign that says "4711"', 'a blue sign that says "305"']
    prompt_index = torch.arange(NUM_IMAGES) // args.group_size
    steps = flow_grpo.draw_sde_steps(args, step=1)
    drawn = prompt_set(prompts)
    request = flow_grpo.make_request(args, model, drawn, prompt_index, list(range(NUM_IMAGES)), steps)
    ours = flow_grpo.rollout(args, model, None, request)
    rewards = torch.rand(NUM_IMAGES)
    advantages = flow_grpo.compute_advantages(rewards, args.group_size).float()
    old, _ = flow_grpo.find_old_policy(args, model, None, request, ours)
    batch = flow_grpo.Batch(request, ours, old, advantages)
    flow_grpo.accumulate_gradients(args, model, batch, torch.arange(NUM_IMAGES), None)
    expected = {name: p for name, p in model.transformer.named_parameters() if p.requires_grad}

    pipe, parameters = reference_loop.load_pipeline(args, torch.device("cpu"))
    theirs = {name: p for name, p in pipe.transformer.named_parameters() if p.requires_grad}
    assert theirs.keys() == expected.keys()
    for name, parameter in theirs.items():
        parameter.data.copy_(expected[name])
    prompt_of_image = [prompts[place] for place in prompt_index.tolist()]
    embeds, pooled = reference_loop.encode(pipe, prompt_of_image, args.max_sequence_length, guidance_scale)
    reference_loop.set_timesteps(pipe, args.num_inference_steps, args.image_size)
    samples = {
        "embeds": embeds,
        "pooled": pooled,
        "timesteps": pipe.scheduler.timesteps[:-1].repeat(NUM_IMAGES, 1),
        "latents": ours.latents[:, :-2],
        "next_latents": ours.latents[:, 1:-1],
        "log_probs": ours.log_probs,
        "rewards": rewards,
        "advantages": reference_loop.advantages_by_prompt(rewards, prompt_of_image),
    }
    assert torch.allclose(samples["advantages"], advantages, atol=1e-5)
    monkeypatch.setattr(reference_loop, "clip_grad_norm_", lambda parameters, max_norm: None)
    optimizer = types.SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    options = types.SimpleNamespace(num_inference_steps=args.num_inference_steps, their_batch_size=BATCH)
    ratios = reference_loop.train(pipe, parameters, optimizer, samples, options, args)
    assert ratios.tolist() == pytest.approx([1.0] * BATCH, abs=1e-5)
    for name, parameter in theirs.items():
        difference = (parameter.grad - expected[name].grad).norm()
        assert difference <= 1e-4 * expected[name].grad.norm(), name  # 0 where the last block drops the prompt


def test_their_step_in_bf16_with_guidance(monkeypatch, capsys):
    """Two steps of two prompts, another reward: its lines are numbers, and its first ratio is 1 to bf16's round-off."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # the test's process keeps its own
    options = reference_loop.parse_options(
        [
            *("--num_prompts", "2", "--num_inference_steps", "2", "--steps", "1", "--their_batch_size", "4"),
            "--options=--dtype bfloat16 --guidance_scale 2 --group_size 4 --reward jpeg_incompressibility",
        ]
    )
    reference_loop.run_theirs(options)
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert step["reward"] > 0 and step["first ratio off 1"] < 1e-3, step
