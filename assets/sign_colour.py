"""A reward of one's own, as an example, and a second one for the embedded model: is the sign of its prompt's colour?

    torchrun --standalone flow_grpo.py --reward ocr assets/sign_colour.py:sign_colour --reward_weights 1 1
    torchrun --standalone flow_grpo.py --eval_reward assets/sign_colour.py:sign_colour        # only watched

OCR does not see colours, and they drift while it is trained on alone (docs/rewards.md). Its gradient by the pixels,
`of_pixels`, is what contrib/draft.py trains on.
"""

import re

import numpy as np

# of a sign's ground, RGB of 255, as make_embedded.py paints it, but for up to 10 in each channel
COLOURS = {
    "white": (244, 244, 240),
    "grey": (150, 152, 156),
    "black": (28, 28, 32),
    "red": (196, 48, 44),
    "orange": (238, 142, 44),
    "yellow": (246, 216, 72),
    "green": (52, 142, 78),
    "blue": (48, 86, 184),
    "purple": (122, 66, 158),
    "pink": (242, 170, 196),
}
TOLERANCE = 64  # of 255: a sign so far off scores 0


def named_colour(prompt):
    """The first colour that a prompt names, as (R, G, B); ValueError where it names none."""
    named = [word for word in re.findall(r"[a-z]+", prompt.lower()) if word in COLOURS]
    if not named:
        raise ValueError(f"the prompt names none of the colours {', '.join(COLOURS)}")
    return COLOURS[named[0]]


def sign_colour(images, prompts, metadata):
    """max(0, 1 - d / TOLERANCE), in [0, 1]: 1 at the named colour, .92 at what it was painted with, .5 at 32 off it.

    d: distance of the image's median colour, which is the ground's, as digits cover less than half of a sign, from the
    colour that the prompt names: mean over channels, of 255.
    """
    scores = []
    for image, prompt in zip(images, prompts, strict=True):
        pixels = np.asarray(image.convert("RGB"), dtype=float).reshape(-1, 3)
        distance = np.abs(np.median(pixels, axis=0) - named_colour(prompt)).mean()
        scores.append(max(0.0, 1 - distance / TOLERANCE))
    return scores


def of_pixels(pixels, prompts, metadata):
    """sign_colour (B,) of pixels (B, 3, H, W) in [0, 1], with the gradient, which reaches the median pixels."""
    medians = 255 * pixels.flatten(2).quantile(0.5, dim=2)  # (B, 3); of an even number the mean of two, as NumPy's
    distances = (medians - pixels.new_tensor([named_colour(prompt) for prompt in prompts])).abs().mean(1)
    return (1 - distances / TOLERANCE).clamp(min=0)


sign_colour.of_pixels = of_pixels
sign_colour.check = named_colour  # shown every prompt before a model loads
