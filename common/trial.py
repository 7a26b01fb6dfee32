"""A user's own reward, tried before a model loads: its arguments, and what it returns for a grey image."""

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.errors import RunError
from common.process import say
from common.scoring import offload_rewards, score_images

from PIL import Image

if TYPE_CHECKING:
    from common.inputs import Inputs


WHOLE_BATCH = 4  # grey images for a reward that compares images


def check_arguments(function: Callable, reward: str) -> None:
    """Raise ValueError where a function cannot be called as a reward is; it names `reward`, the file and the line."""
    signature = None
    with contextlib.suppress(ValueError, TypeError):  # some callables of C have none
        signature = inspect.signature(function)
    if signature is None:
        return
    try:
        signature.bind([], [], [])
    except TypeError as error:
        code = getattr(function, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        called = "it is called with images, prompts and metadata"
        raise ValueError(f"{reward}: takes {signature}, and {called}: {error}{place}") from None


def try_rewards(inputs: "Inputs", options: dict[str, Any]) -> None:
    """Score a grey image, or video, of the first held-out prompt with each reward from a user's file.

    A reward with `whole_batch` gets several. An exception in the place of a score is no fault here: a real image may
    have what a grey one lacks.

    Raises:
        RunError: in one line with the user's file and line: a reward raised, or did not return a score an image.
    """
    if not any(":" in name for name in (*options["reward"], *options["eval_reward"])):
        return
    own = {name.rpartition(":")[2] for name in (*options["reward"], *options["eval_reward"]) if ":" in name}
    rewards = {name: function for name, function in inputs.eval_rewards.items() if name in own}
    height, width = options["image_size"]
    # several greys: where all images are equal, a reward that divides by their deviation would have none
    greys = [Image.new("RGB", (width, height), (128 + 20 * i,) * 3) for i in range(WHOLE_BATCH)]
    images: Any = greys if options["num_frames"] == 1 else [[grey] * options["num_frames"] for grey in greys]
    say(f"trying reward {', '.join(rewards)} on grey images")
    for name, function in rewards.items():
        count = WHOLE_BATCH if getattr(function, "whole_batch", False) else 1
        try:
            score_images({name: function}, images[:count], inputs.eval_set.select([0] * count), "mask")
        except RunError as error:
            what = "a grey image" if count == 1 else f"{count} grey images"
            raise RunError(f"tried on {what} before the run: {error}") from error.__cause__
    offload_rewards(rewards)  # networks leave the GPU to the model, if asked
