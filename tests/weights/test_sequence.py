"""common/weights/sequence.py: ranks that compute an image together train as one rank does."""

import functools
import json
import re

import flow_grpo
from common.run import parse_args
from contrib import draft
from tests.conftest import CONSTANT, cut_after_a_step, few_eval_prompts, read_metrics, torchrun
from tests.tiny_models import make_checkpoint

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

LORA = "adapter/pytorch_lora_weights.safetensors"
FULL = "adapter/diffusion_pytorch_model.safetensors"
VIDEO = ["--num_frames", 5, "--image_size", 16, 32]  # 2 x 2 tokens in a frame of Wan's latents
DIVIDED = ["flux", "flux_kontext", "flux2_klein", "qwen_image", "qwen_image_edit_plus", "wan", "wan_ti2v"]
DIVIDED += ["wan_image_to_video", "wan_ti2v_image"]
FAMILIES = {
    "wan": [*VIDEO, "--max_sequence_length", 15],  # which need not divide
    "flux": ["--max_sequence_length", 32],
    "qwen_image": ["--max_sequence_length", 160],
}
# brightness, beside which it says how many letters the prompt has; each call is noted
REWARD = """import os
import numpy


def bright(images, prompts, metadata):
    with open(f"calls_{os.environ['RANK']}", "a") as file:
        file.write(f"{len(images)}\\n")
    scores = [float(numpy.asarray(image).mean()) / 255 for image in images]
    return [{"score": score, "letters": len(prompt)} for score, prompt in zip(scores, prompts)]


def brightest(images, prompts, metadata):
    scores = [float(numpy.asarray(image).mean()) for image in images]
    return [(score - min(scores)) / 255 for score in scores]


brightest.whole_group = True
"""
TRIAL = "1\n"  # of a user's reward, on every rank, before the model loads


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a family's tiny checkpoint, made once."""
    return functools.cache(lambda family: make_checkpoint(family, tmp_path_factory.mktemp(family)))


def train(folder, script, model, name, *more, nproc=1, ranks_per_image=1):
    """Two training steps in folder/runs/NAME, with a reference, an average of the weights and two evaluations."""
    (folder / "bright.py").write_text(REWARD)
    options = ["--model", model, "--name", name, "--ranks_per_image", ranks_per_image, *few_eval_prompts(folder, 3)]
    options += ["--reward", "bright.py:bright", "--num_steps", 2, "--eval_every", 2, "--micro_batch_size", 2]
    # a step of Adam that is as large as its gradient: one half as large, or round-off where it is 0, must show as such
    options += ["--adam_eps", 1, "--learning_rate", 10, "--max_grad_norm", 1e9, "--ema_decay", 0.5, *CONSTANT]
    if script != "dpo_offline.py":
        options += ["--rollout", "local", "--num_prompts", 2, "--group_size", 4, "--save_rollouts", 1]
    torchrun(folder, script, *options, *more, nproc=nproc)
    return folder / "runs" / name


def assert_same_training(run, other, weights=LORA, atol=1e-6):
    """Metrics, but for those of time and memory, the saved weights and images are those of the other run."""
    for row, wanted in zip(read_metrics(run), read_metrics(other), strict=True):
        apart = ("timing", "perf/")
        row, wanted = ({k: v for k, v in each.items() if not k.startswith(apart)} for each in (row, wanted))
        assert row == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    ours, theirs = load_file(run / weights), load_file(other / weights)
    assert weights == FULL or max(tensor.abs().max() for name, tensor in theirs.items() if "lora_B" in name) > 1e-3
    assert_close(ours, theirs, rtol=1e-3, atol=atol)
    for folder in ("samples/0000", "samples/0002"):
        assert places(run / folder) == places(other / folder)


def places(folder):
    """The files and prompts of an evaluation's images, in order."""
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert sorted(file.name for file in folder.glob("*.png")) == [record["file"] for record in records]
    return [(record["file"], record["prompt"]) for record in records]


def test_two_ranks_have_the_velocity_and_the_gradient_of_one(checkpoint, tmp_path):
    """Of every family that divides its tokens: masks of prompts, source images, a timestep for each token."""
    folders = {checkpoint(name).name: name for name in DIVIDED}
    torchrun(tmp_path, "tests/shared_velocities.py", tmp_path / "found.json", *map(checkpoint, DIVIDED), nproc=2)
    for folder, (of_velocity, of_gradient) in json.loads((tmp_path / "found.json").read_text()).items():
        assert of_velocity < 1e-5 and of_gradient < 1e-5, folders[folder]


@pytest.mark.parametrize(
    ("script", "family"), [("flow_grpo.py", "wan"), ("mix_grpo.py", "flux"), ("diffusion_nft.py", "qwen_image")]
)
def test_two_ranks_that_share_each_image_train_as_one_does(script, family, checkpoint, tmp_path):
    """Gradients, reference, average, rewards and evaluations; half of the ranks score, and all images are scored."""
    options = [*FAMILIES[family], "--num_inference_steps", 3]
    if script != "diffusion_nft.py":  # which has no guidance
        options += ["--guidance_scale", 3]
    one = train(tmp_path, script, checkpoint(family), "one", *options)
    calls = (tmp_path / "calls_0").read_text()
    (tmp_path / "calls_0").unlink()
    two = train(tmp_path, script, checkpoint(family), "two", *options, nproc=2, ranks_per_image=2)
    assert_same_training(two, one)
    assert (tmp_path / "calls_0").read_text() == calls and (tmp_path / "calls_1").read_text() == TRIAL


def test_four_ranks_in_two_groups_train_as_two_ranks_do(checkpoint, tmp_path):
    """Two copies of the weights, whose shards are within a group; activation checkpointing; a reward of whole groups,
    and two evaluation images of a prompt, of which a group of ranks has one."""
    options = [*FAMILIES["wan"], "--num_inference_steps", 3, "--updates_per_rollout", 1, "--eval_images_per_prompt", 2]
    options += ["--reward", "bright.py:bright", "bright.py:brightest", "--reward_weights", 1, 0.5, "--shard_ranks", 2]
    options += ["--train_with", "activation_checkpointing"]
    two = train(tmp_path, "flow_grpo.py", checkpoint("wan"), "two", *options, nproc=2)
    four = train(tmp_path, "flow_grpo.py", checkpoint("wan"), "four", *options, nproc=4, ranks_per_image=2)
    assert_same_training(four, two)


def test_full_weights_and_their_reference_share_images(checkpoint, tmp_path):
    """Each policy has a transformer of its own; the ranks of a group make pairs together, which one of them scores."""
    options = [*FAMILIES["flux"], "--num_inference_steps", 3, "--lora_rank", 0, "--num_pair_prompts", 3]
    options += ["--group_size", 2, "--num_pairs", 2, "--learning_rate", 1]
    one = train(tmp_path, "dpo_offline.py", checkpoint("flux"), "one", *options)
    two = train(tmp_path, "dpo_offline.py", checkpoint("flux"), "two", *options, nproc=2, ranks_per_image=2)
    assert_same_training(two, one, FULL, atol=1e-4)
    assert (tmp_path / "calls_1").read_text() == TRIAL
    before, after = load_file(checkpoint("flux") / FULL.replace("adapter", "transformer")), load_file(one / FULL)
    assert max((after[name] - before[name]).abs().max() for name in before) > 0.1


def test_a_run_of_a_group_resumes_as_it_was_and_without_the_group(checkpoint, tmp_path):
    """To the bit on the same ranks; one rank alone goes on to round-off."""
    options = [*FAMILIES["flux"], "--num_inference_steps", 3]
    options += ["--save_every", 1]
    whole = train(tmp_path, "flow_grpo.py", checkpoint("flux"), "whole", *options, nproc=2, ranks_per_image=2)
    for name, nproc in (("cut", 2), ("alone", 1)):
        run = tmp_path / "runs" / name
        cut_after_a_step(whole, run)
        rest = [*options, "--resume", "latest"]
        train(tmp_path, "flow_grpo.py", checkpoint("flux"), name, *rest, nproc=nproc, ranks_per_image=nproc)
        assert_same_training(run, whole)
        assert ((run / LORA).read_bytes() == (whole / LORA).read_bytes()) == (nproc == 2)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("family", "ranks", "options", "told"),
    [
        ("flux", 2, ["--rollout", "vllm"], "needs --rollout local, as an engine samples with the GPUs of its own rank"),
        ("flux", 3, [], "does not divide the 4 ranks of a node"),
        ("flux", 4, [], "does not divide the 2 attention heads of Flux's transformer"),
        ("flux", 2, ["--max_sequence_length", 15], "does not divide the 15 tokens that --max_sequence_length gives"),
        ("flux", 2, ["--image_size", 24, 24], "does not divide the 9 tokens that --image_size gives"),
        (
            "wan",
            2,
            ["--image_size", 16, 16, "--num_frames", 9, "--reward_frames", 1],
            "does not divide the 3 tokens that",
        ),
        ("stable_diffusion_3", 2, [], "StableDiffusion3's transformer does not divide its tokens"),
        ("z_image", 2, [], "ZImage's transformer does not divide its tokens"),
        ("krea2", 2, [], "Krea2's transformer does not divide its tokens"),
        ("flux", 2, ["--train_with", "compile"], "not with --train_with compile"),
        ("flux", 2, ["--num_prompts", 3, "--group_size", 3], "= 9 cannot be cut into 2 mini-batches x 2 groups of 2"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_a_model_loads(
    family, ranks, options, told, checkpoint, tmp_path, monkeypatch
):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    given = ["--model", checkpoint(family), "--rollout", "local", "--ranks_per_image", ranks]
    given += ["--name", tmp_path / "run", "--image_size", 32, 64, "--reward", "jpeg_compressibility", *options]
    with pytest.raises(ValueError, match=f"^--.*{re.escape(told)}") as caught:
        flow_grpo.prepare(flow_grpo.check(parse_args(flow_grpo.Args, "", list(map(str, given)))))
    assert "\n" not in str(caught.value)


OF_PIXELS = """def grey(images, prompts, metadata):
    return [0.5 for image in images]


grey.of_pixels = lambda pixels, prompts, metadata: pixels.mean((1, 2, 3))
"""


@pytest.mark.fast
def test_a_gradient_through_several_passes_is_refused(checkpoint, tmp_path, monkeypatch):
    """A rank has the gradient of its own tokens of a step, and the step before needs that of all."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    (tmp_path / "grey.py").write_text(OF_PIXELS)
    given = ["--model", str(checkpoint("flux")), "--ranks_per_image", "2", "--reward", f"{tmp_path}/grey.py:grey"]
    with pytest.raises(ValueError, match="^--ranks_per_image 2: not in this script, "):
        draft.prepare(draft.check(parse_args(draft.Args, "", [*given, "--name", f"{tmp_path}/run"])))
