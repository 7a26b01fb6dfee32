"""A user's own rewards, tried on grey images before a model loads: what they return."""

from collections.abc import Mapping
from typing import Any

from common.data import PromptSet
from common.errors import RunError
from common.process import print_message
from common.scoring import Reward, offload_rewards, score_images

from PIL import Image

WHOLE_BATCH = 4  # grey images for a reward that compares images


def try_rewards(
    rewards: Mapping[str, Reward], eval_set: PromptSet, image_size: tuple[int, int], num_frames: int
) -> None:
    """Score a grey image, or video, of the first held-out prompt with each reward.

    A reward with `whole_batch` gets several. An exception in the place of a score is no fault here: a real image may
    have what a grey one lacks.

    Raises:
        RunError: in one line with the user's file and line: a reward raised, or did not return a score an image.
    """
    height, width = image_size
    # several greys: where all images are equal, a reward that divides by their deviation would have none
    greys = [Image.new("RGB", (width, height), (128 + 20 * i,) * 3) for i in range(WHOLE_BATCH)]
    images: Any = greys if num_frames == 1 else [[grey] * num_frames for grey in greys]
    print_message(f"trying reward {', '.join(rewards)} on grey images")
    for name, function in rewards.items():
        count = WHOLE_BATCH if getattr(function, "whole_batch", False) else 1
        try:
            score_images({name: function}, images[:count], eval_set.select([0] * count), "mask")
        except RunError as error:
            what = "a grey image" if count == 1 else f"{count} grey images"
            raise RunError(f"tried on {what} before the run: {error}") from error.__cause__
    offload_rewards(dict(rewards))  # networks leave the GPU to the model, if asked
