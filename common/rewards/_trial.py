"""Each of a user's own rewards is tried on grey images, before the model is loaded."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from common.data import PromptSet
from common.errors import RunError
from common.process import print_message
from common.scoring import Reward, score_images
from common.user_code import find_namesakes

from PIL import Image

NUM_GREYS = 4  # grey images for a reward that compares images, where nothing says how many a run gives it


def try_rewards(
    rewards: Mapping[str, Reward],
    prompts: PromptSet,
    image_size: tuple[int, int],
    num_frames: int,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Score a grey image, or video, of the first prompt that asks for it with each of a user's own rewards.

    A reward with `whole_group` gets as many as `sizes` says, once for each number. An exception in the place of a score
    is no fault here: a real image may have what a grey one lacks.

    Raises:
        RunError: in one line with the user's file and line: a reward raised, or did not return a score an image; or it
            has imported a helper of which another user's file has a namesake.
    """
    height, width = image_size

    @functools.cache  # one for each shade, in however many places of the groups
    def grey(shade: int) -> Any:
        image = Image.new("RGB", (width, height), (shade,) * 3)
        return image if num_frames == 1 else [image] * num_frames

    asked = {name: function for name, function in rewards.items() if prompts.asking(name)}
    if asked:
        print_message(f"trying reward {', '.join(asked)} on grey images")
    for name, function in asked.items():
        of_groups = getattr(function, "whole_group", False)
        for count in (sizes or {}).get(name, [NUM_GREYS]) if of_groups else [1]:
            # several shades: where all images are equal, a reward that divides by their deviation would have none
            images = [grey((128 + 20 * i) % 256) for i in range(count)]
            try:
                score_images({name: function}, images, prompts.select(prompts.asking(name)[:1] * count), "mask")
            except RunError as error:
                what = "a grey image" if count == 1 else f"{count} grey images"
                raise RunError(f"tried on {what} before the run: {error}") from error.__cause__
        if namesakes := find_namesakes():
            raise RunError(f"reward {name}: {namesakes}")
