"""A user's own reward, tried on grey images before a model loads."""

import re

import flow_grpo
from common.data import PromptSet
from common.errors import RunError
from common.rewards._trial import try_rewards
from common.run.command_line import parse_args

import pytest
import torch

pytestmark = pytest.mark.fast


def tried(function):
    """Try the reward `mine`."""
    eval_set = PromptSet(["a", "b"], [{"kind": 1}, {"kind": 2}])
    try_rewards({"mine": function}, eval_set, image_size=(8, 24), num_frames=1)


def test_a_reward_gets_a_grey_image_of_the_first_prompt():
    seen = []

    def mine(images, prompts, metadata):
        seen.append(([image.size for image in images], images[0].getpixel((0, 0)), prompts, metadata))
        return [0.5]

    tried(mine)
    assert seen == [([(24, 8)], (128, 128, 128), ["a"], [{"kind": 1}])]


def test_a_reward_that_compares_images_gets_several():
    def mine(images, prompts, metadata):
        assert len(images) == len(prompts) == len(metadata) == 4
        return [1 / (len(images) - 1)] * 4

    mine.whole_group = True
    tried(mine)


EIGHT = """
def eight(images, prompts, metadata):
    if len(images) != 8:
        raise ValueError(f"{len(images)} images")
    return [float(i) for i in range(8)]


eight.whole_group = True
"""
OPTIONS = {
    "trained": (["--group_size", 8, "--reward", "eight.py:eight"], 8, None),
    "trained, of another size in evaluations": (["--group_size", 8, "--reward", "eight.py:eight"], 4, 4),
    "trained in groups of another size": (["--group_size", 4, "--reward", "eight.py:eight"], 8, 4),
    "evaluated": (["--group_size", 4, "--eval_reward", "eight.py:eight"], 8, None),
    "evaluated in groups of another size": (["--group_size", 8, "--eval_reward", "eight.py:eight"], 2, 2),
    "evaluated only": (["--group_size", 4, "--eval_only", True, "--reward", "eight.py:eight"], 8, None),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_reward_of_whole_groups_is_tried_on_as_many_images_as_it_will_get(kind, tmp_path):
    options, eval_images, refused = OPTIONS[kind]
    (tmp_path / "eight.py").write_text(EIGHT)
    (tmp_path / "signs.txt").write_text('a sign that says "1"\n')
    options = [*options, "--rollout", "local", "--eval_images_per_prompt", eval_images, "--eval_prompts", "signs.txt"]
    args = parse_args(flow_grpo.Args, "", [str(option) for option in options])
    if refused is None:
        assert "eight" in flow_grpo.prepare(args).all_rewards
    else:
        with pytest.raises(RunError, match=f" {refused} .*: {refused} "):
            flow_grpo.prepare(args)


def test_a_large_group_of_grey_videos_takes_no_more_memory_than_its_shades():
    def mine(images, prompts, metadata):
        assert len(images) == 200 and all(len(video) == 50 for video in images)
        assert len({id(frame) for video in images for frame in video}) <= 64
        return [0.5] * len(images)

    mine.whole_group = True
    try_rewards({"mine": mine}, PromptSet(["a"], [{}]), (8, 24), 50, {"mine": [200]})


def test_several_images_differ():
    """As a reward that divides by their deviation needs it."""

    def mine(images, prompts, metadata):
        levels = torch.tensor([float(image.getpixel((0, 0))[0]) for image in images])
        return (levels - levels.mean()) / levels.std()

    mine.whole_group = True
    tried(mine)


def test_an_image_that_cannot_be_scored_is_no_fault_of_the_reward(capfd):
    tried(lambda images, prompts, metadata: [ValueError("no face")])
    assert re.match(r".* mine .*\n.* mine .* 1 of 1 ", capfd.readouterr().err)


FAULTS = [
    ([0.5, 0.5], " 2 .* 1 .*list of float"),
    (None, " NoneType "),
    (["x"], "'x', a str"),
    ([{"read": "4"}], "score"),
]


@pytest.mark.parametrize(("returned", "fault"), FAULTS)
def test_what_is_no_score_is_a_fault_and_the_line_says_when(returned, fault):
    with pytest.raises(RunError, match=f" mine: .*{fault}"):
        tried(lambda images, prompts, metadata: returned)


def test_what_a_reward_raises_keeps_its_place():
    def mine(images, prompts, metadata):
        raise OSError("no weights")

    with pytest.raises(RunError, match=" mine .*OSError") as error:
        tried(mine)
    assert isinstance(error.value.__cause__, OSError)
