"""common/weights/sequence.py: ranks that compute an image together train as one rank does."""

import functools
import json

from tests.conftest import CONSTANT, few_eval_prompts, read_metrics, run_here, torchrun
from tests.tiny_models import make_checkpoint

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

ADAPTER = "adapter/pytorch_lora_weights.safetensors"
VIDEO = ["--num_frames", 5, "--image_size", 16, 32]  # 2 x 2 tokens in a frame of Wan's latents
# guidance 3: a second pass, whose negative prompt is masked elsewhere than the prompt; FLUX.1 takes it as an input
FAMILIES = {
    "wan": [*VIDEO, "--max_sequence_length", 15],  # which need not divide
    "flux": ["--max_sequence_length", 32],
    "qwen_image": ["--max_sequence_length", 160],
    "flux2_klein": ["--max_sequence_length", 160],
}
# brightness, beside which it says how many letters the prompt has; each call is noted
REWARD = """import os
import numpy


def bright(images, prompts, metadata):
    with open(f"calls_{os.environ['RANK']}", "a") as file:
        file.write(f"{len(images)}\\n")
    scores = [float(numpy.asarray(image).mean()) / 255 for image in images]
    return [{"score": score, "letters": len(prompt)} for score, prompt in zip(scores, prompts)]
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a family's tiny checkpoint, made once."""
    return functools.cache(lambda family: make_checkpoint(family, tmp_path_factory.mktemp(family)))


def train(folder, script, model, name, *more, nproc=1, ranks_per_image=1):
    """Two training steps in folder/runs/NAME, with a reference, an average of the weights and three evaluations."""
    (folder / "bright.py").write_text(REWARD)
    options = ["--model", model, "--name", name, "--ranks_per_image", ranks_per_image, *few_eval_prompts(folder, 3)]
    options += ["--reward", "bright.py:bright", "--num_steps", 2, "--eval_every", 1, "--micro_batch_size", 2]
    # a step of Adam that is as large as its gradient: one half as large, or round-off where it is 0, must show as such
    options += ["--adam_eps", 1, "--learning_rate", 10, "--max_grad_norm", 1e9, "--ema_decay", 0.5, *CONSTANT]
    if script != "dpo_offline.py":
        options += ["--rollout", "local", "--num_prompts", 2, "--group_size", 4, "--save_rollouts", 1]
    torchrun(folder, script, *options, *more, nproc=nproc)
    return folder / "runs" / name


def assert_same_training(run, other, atol=1e-6):
    """Metrics, but for those of time and memory, the adapter and the saved images are those of the other run."""
    for row, wanted in zip(read_metrics(run), read_metrics(other), strict=True):
        apart = ("timing", "perf/", "slowest")
        row, wanted = ({k: v for k, v in each.items() if not k.startswith(apart)} for each in (row, wanted))
        assert row == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    ours, theirs = load_file(run / ADAPTER), load_file(other / ADAPTER)
    assert max(tensor.abs().max() for name, tensor in theirs.items() if "lora_B" in name) > 1e-3  # from 0
    assert_close(ours, theirs, rtol=1e-3, atol=atol)
    for folder in ("samples/0000", "samples/0002"):
        assert places(run / folder) == places(other / folder)


def places(folder):
    """The files and prompts of an evaluation's images, in order."""
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert sorted(file.name for file in folder.glob("*.png")) == [record["file"] for record in records]
    return [(record["file"], record["prompt"]) for record in records]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_that_share_each_image_train_as_one_does(family, checkpoint, tmp_path):
    """Gradients, reference, average, rewards and evaluations; half of the ranks score, and all images are scored."""
    options = [*FAMILIES[family], "--num_inference_steps", 3, "--guidance_scale", 3]
    one = train(tmp_path, "flow_grpo.py", checkpoint(family), "one", *options)
    calls = (tmp_path / "calls_0").read_text()
    (tmp_path / "calls_0").unlink()
    two = train(tmp_path, "flow_grpo.py", checkpoint(family), "two", *options, nproc=2, ranks_per_image=2)
    assert_same_training(two, one)
    assert (tmp_path / "calls_0").read_text() == calls
