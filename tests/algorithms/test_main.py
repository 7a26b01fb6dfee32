"""What the `main` of a script hands to its functions: the step, Adam's options, diffusion_nft's batch."""

import inspect
import json

import diffusion_nft
import dpo_offline
from tests.conftest import ROOT, TINY, brightness_reward, few_eval_prompts, read_metrics, run_here

import pytest
import torch

PAIRS = ["--num_pair_prompts", 4, "--group_size", 2, "--num_pairs", 2, "--num_inference_steps", 2]


def test_pairs_noise_is_that_of_the_step_and_adam_and_order_as_asked(tmp_path, monkeypatch):
    """Of pairs that dpo_offline.py makes itself. test_mains.py has the other scripts' and those of a file, by hand, and
    test_max_rollouts.py prompts in their order."""
    steps = []
    draw = dpo_offline.draw_training_noise

    def watched(*values, **named):
        steps.append(inspect.signature(draw).bind(*values, **named).arguments["step"])
        return draw(*values, **named)

    monkeypatch.setattr(dpo_offline, "draw_training_noise", watched)
    options = [*PAIRS, "--num_steps", 2, "--seed", 3, "--shuffle", "False"]
    options += ["--weight_decay", 0.25, "--adam_betas", 0.5, 0.75, "--adam_eps", 1e-6]
    options += ["--reward", brightness_reward(tmp_path), *few_eval_prompts(tmp_path, 2)]
    assert run_here(tmp_path, "dpo_offline.py", "--name", "run", *options) is None
    assert steps == [1, 2]
    run = tmp_path / "runs" / "run"
    in_order = (ROOT / "assets" / "train_prompts.txt").read_text().splitlines()
    pairs = (run / "pairs.jsonl").read_text().splitlines()
    assert [json.loads(pair)["prompt"] for pair in pairs] == in_order[:4]
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
