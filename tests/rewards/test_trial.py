"""A user's own reward, tried on grey images before a model loads."""

from common.data import PromptSet
from common.errors import RunError
from common.inputs import try_rewards

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


def test_several_images_differ():
    """As a reward that divides by their deviation needs it."""

    def mine(images, prompts, metadata):
        levels = torch.tensor([float(image.getpixel((0, 0))[0]) for image in images])
        return (levels - levels.mean()) / levels.std()

    mine.whole_group = True
    tried(mine)


def test_an_image_that_cannot_be_scored_is_no_fault_of_the_reward(capfd):
    tried(lambda images, prompts, metadata: [ValueError("no face")])
    assert capfd.readouterr().err.startswith("trying reward mine on grey images\nreward mine failed on 1 of 1 images")


FAULTS = [
    ([0.5, 0.5], "it returned 2 things for 1 images: a list of float"),
    (None, "it returned a NoneType for 1 images"),
    (["x"], "the score must be .*, got 'x', a str"),
    ([{"read": "4"}], "score"),
]


@pytest.mark.parametrize(("returned", "fault"), FAULTS)
def test_what_is_no_score_is_a_fault_and_the_line_says_when(returned, fault):
    with pytest.raises(RunError, match=f"^tried on a grey image before the run: .*{fault}"):
        tried(lambda images, prompts, metadata: returned)


def test_what_a_reward_raises_keeps_its_place():
    def mine(images, prompts, metadata):
        raise OSError("no weights")

    with pytest.raises(RunError, match="^tried on a grey image before the run: reward mine raised OSError") as error:
        tried(mine)
    assert isinstance(error.value.__cause__, OSError)
