"""What a reward says of an image beside its score: {"score": 0.5, "read": "4711"} in the place of 0.5."""

import math
from collections.abc import Sequence

from common.errors import RunError, brief

LOGGED = ("mean", "stderr", "failed")  # of each reward, which no detail may be called


def split_details(name: str, returned: Sequence) -> tuple[list, dict[int, dict]]:
    """What reward `name` returned, with the scores in the place of its dicts; and what else these hold, by image.

    Raises:
        RunError: a dict has no score, or holds what is neither a finite number nor a string, or a name of LOGGED.
    """
    scores = list(returned)
    details = {}
    for i, said in enumerate(returned):
        if not isinstance(said, dict):
            continue
        values = {}
        for key, value in {"score": None, **said}.items():
            if hasattr(value, "item"):  # a scalar of NumPy or torch
                value = value.item()
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if key in LOGGED or not (is_number or (isinstance(value, str) and key != "score")):
                what = "be called otherwise" if key in LOGGED else "be a finite number"
                what += "" if key == "score" or key in LOGGED else " or a string"
                raise RunError(f'reward {name}: image {i}: "{key}" must {what}, got {brief(repr(value))}')
            values[key] = value
        scores[i] = values.pop("score")
        details[i] = values
    return scores, details
