"""How much of the source an edit leaves as it was. It knows nothing of the prompt, and an edit that changes nothing
scores best: use it beside a reward of what was asked for.

    torchrun --standalone flow_grpo.py --model FLUX.1-KONTEXT --reward ocr_scene preservation --reward_weights 1 0.5

It needs nothing.
"""

import numpy as np
from PIL import ImageFilter
from PIL.Image import Image, Resampling

BLUR = 1 / 16  # the blur's radius without a mask, as a share of the image's shorter side


def preservation(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[float | Exception]:
    """1 minus the root mean square difference of an edit from its source: 1 if they are equal, 0 from black to white.

    metadata: dicts with "image", whose first picture is the source, brought to the edit's size. With "mask", a picture
    that is white where the prompt asks for a change, only the pixels below half of white are compared. Without one all
    are, on blurred pictures: small changes of the text or of an object's edge then cost little, and a large change
    that was asked for costs as much as one that was not.
    """
    return [_score(image, record) for image, record in zip(images, metadata, strict=True)]


def _score(image: Image, record: dict) -> float | Exception:
    source = record["image"][0].resize(image.size, Resampling.LANCZOS)
    edit = image.convert("RGB")
    kept = np.ones((image.height, image.width), dtype=bool)
    if "mask" in record:
        mask = record["mask"][0].convert("L").resize(image.size, Resampling.NEAREST)
        kept = np.asarray(mask) < 128
        if not kept.any():
            return ValueError('"mask": it is white everywhere once it has the size of the edit')
    else:
        blur = ImageFilter.GaussianBlur(BLUR * min(image.size))
        source, edit = source.filter(blur), edit.filter(blur)
    difference = (np.asarray(edit, dtype=np.float64) - np.asarray(source, dtype=np.float64))[kept] / 255
    return 1 - float(np.sqrt(np.mean(difference**2)))


def check_metadata(record: dict) -> None:
    """Raises ValueError for a record without a source, whose mask leaves nothing to compare, or has 1 for white."""
    if "image" not in record:
        raise ValueError('the reward preservation needs "image", the picture that is edited')
    if "mask" in record:
        mask = np.asarray(record["mask"][0].decode(has_colours=False).convert("L"))
        if mask.min() >= 128:
            raise ValueError('"mask": it is white everywhere, and leaves nothing to compare')
        if 0 < mask.max() < 128:
            raise ValueError(f'"mask": its lightest pixel is {mask.max()} of 255, and white must be 255')


preservation.check_metadata = check_metadata  # type: ignore[attr-defined]
