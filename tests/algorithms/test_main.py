"""What the `main` of a script hands to its functions: the step, Adam's options, diffusion_nft's batch."""

import importlib
import inspect
import json
from pathlib import Path

import diffusion_nft
from common.sde import image_seed
from tests.conftest import ROOT, SCRIPTS, TINY, brightness_reward, few_eval_prompts, read_metrics, run_here

import pytest
import torch

PAIRS = ["--num_pair_prompts", 4, "--group_size", 2, "--num_pairs", 2, "--num_inference_steps", 2]
# what each script seeds by the step besides its images
SEEDED = {
    "flow_grpo.py": ["draw_sde_steps"],
    "grpo_guard.py": ["draw_sde_steps"],
    "mix_grpo.py": ["draw_sde_steps", "share_prefix"],
    "diffusion_nft.py": ["draw_training_noise"],
    "dpo_offline.py": ["draw_training_noise"],
}


def seeds_of(rollout: Path) -> list[int]:
    return [json.loads(line)["seed"] for line in (rollout / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_windows_noise_and_seeds_are_those_of_the_step_and_adam_and_order_as_asked(script, tmp_path, monkeypatch):
    module = importlib.import_module(script.removesuffix(".py"))
    steps = {name: [] for name in SEEDED[script]}

    def watch(name):
        function = getattr(module, name)

        def watched(*values, **named):
            steps[name].append(inspect.signature(function).bind(*values, **named).arguments["step"])
            return function(*values, **named)

        monkeypatch.setattr(module, name, watched)

    for name in SEEDED[script]:
        watch(name)
    options = PAIRS if script == "dpo_offline.py" else [*TINY, "--rollout", "local", "--save_rollouts", 1]
    options += ["--num_steps", 2, "--seed", 3, "--weight_decay", 0.25, "--adam_betas", 0.5, 0.75, "--adam_eps", 1e-6]
    options += ["--reward", brightness_reward(tmp_path), *few_eval_prompts(tmp_path, 2), "--shuffle", "False"]
    assert run_here(tmp_path, script, "--name", "run", *options) is None
    assert steps == {name: [1, 2] for name in SEEDED[script]}
    run = tmp_path / "runs" / "run"
    in_order = (ROOT / "assets" / "train_prompts.txt").read_text().splitlines()
    if script == "dpo_offline.py":
        pairs = (run / "pairs.jsonl").read_text().splitlines()
        assert [json.loads(pair)["prompt"] for pair in pairs] == in_order[:4]
    else:
        for step in (1, 2):
            samples = (run / "rollouts" / f"{step:04d}" / "samples.jsonl").read_text().splitlines()
            drawn = [json.loads(sample)["prompt"] for sample in samples]
            assert drawn == [prompt for prompt in in_order[4 * step - 4 : 4 * step] for _ in range(4)]
            assert seeds_of(run / "rollouts" / f"{step:04d}") == [image_seed(3, step, index) for index in range(16)]
    state = torch.load(run / "checkpoints" / "step_000002.pt", weights_only=True)
    [group] = state["optimizer"]["param_groups"]
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.25, (0.5, 0.75), 1e-6)


def test_diffusion_nft_trains_as_asked_without_what_failed(tmp_path, monkeypatch):
    """Of each prompt's images 0, 2 and 3 score 0, 2 and 3, around 5 / 3, and image 1 fails."""
    (tmp_path / "by_place.py").write_text(
        "def by_place(images, prompts, metadata):\n"
        "    return [ValueError('no') if i % 4 == 1 else float(i % 4) for i in range(len(images))]\n"
    )
    losses = []
    loss = diffusion_nft.nft_loss
    monkeypatch.setattr(diffusion_nft, "nft_loss", lambda *of, **named: losses.append(named) or loss(*of, **named))
    options = [*TINY, "--rollout", "local", "--updates_per_rollout", 2, "--num_steps", 2, "--nft_beta", 0.3]
    options += ["--adv_mode", "binary", "--decay_schedule", "linear_to_0_5", "--timestep_fraction", 0.2]
    options += ["--reward", "by_place.py:by_place", "--reward_failure", "mask", *few_eval_prompts(tmp_path, 2)]
    assert run_here(tmp_path, "diffusion_nft.py", "--name", "run", *options) is None
    assert len(losses) == 4  # two steps, two mini-batches of two groups, a timestep
    for named in losses:
        assert named["nft_beta"] == 0.3
        assert named["r"].tolist() == pytest.approx([0.4, 0.5, 0.6, 0.6] * 2)  # 1/2 and the sign over 2 x 5
        assert named["sample_weights"].tolist() == [1, 0, 1, 1] * 2
    # 0.001 for each optimizer step so far
    decays = [row["old_policy/decay"] for row in read_metrics(tmp_path / "runs" / "run")[1:]]
    assert decays == pytest.approx([0.002, 0.004])
