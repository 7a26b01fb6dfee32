"""A curriculum: a user's own function that says, before each step, how likely each training prompt is to be drawn.

    def curriculum(step, records, scores, weights):
        return [...]  # M weights

step: the training step that is drawn next, from 1. records: the M prompts and what their records say else, as dicts,
{"prompt": ..., "level": 3}, without pictures. scores: M, the mean weighted total of the images of each prompt's last
group; None until it has been drawn. weights: M, what the function returned last; at first all are 1. It returns M
weights, not negative and not all 0: a prompt is drawn with a chance in proportion to its own.

The function must not keep anything from one call to the next: scores and weights are in the checkpoint, and nothing
else of it. Each rank tries it before the model loads, as for step 1. Later rank 0 alone calls it. All this is in the
thread of users' files.
"""

import functools
import math
from collections.abc import Sequence

from common.data import PromptSet
from common.distributed import failing_together, gather_objects, on_rank_0
from common.errors import RunError
from common.scoring import as_scalar
from common.user_code import call_user_code, describe, load_function, own_file

import torch

PICTURES = ("image", "mask")  # fields of an edit's record


def next_weights(
    location: str, step: int, train_set: PromptSet, scores: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weights (M,) of the training prompts in the draws of `step`, the same on every rank. A collective.

    location: --curriculum. scores (M,): NaN where a prompt has none yet. weights (M,): those of the step before.

    Raises:
        RolloutError: as ask_curriculum.
    """
    found = None
    with failing_together():
        if on_rank_0():
            found = ask_curriculum(location, step, train_set, scores, weights)
    return torch.tensor(gather_objects(found)[0], dtype=torch.float64)


def ask_curriculum(
    location: str, step: int, train_set: PromptSet, scores: torch.Tensor, weights: torch.Tensor
) -> list[float]:
    """What the function returns, M weights. Raises RunError in one line: it raised, or gave no such weights."""
    function = load_function(location, "--curriculum")
    records = []
    for prompt, metadata in zip(train_set.prompts, train_set.metadata, strict=True):
        records.append({"prompt": prompt} | {key: value for key, value in metadata.items() if key not in PICTURES})
    known = [None if math.isnan(score) else score for score in scores.tolist()]
    call = functools.partial(function, step, records, known, weights.tolist())
    try:
        returned = call_user_code(call, f"--curriculum {location}", own_file(function))
    except BaseException as error:  # sys.exit(0) is no Exception
        raise RunError(f"--curriculum {location} raised {describe(error, function)}") from error
    if hasattr(returned, "tolist"):  # an array of NumPy, a tensor
        returned = returned.tolist()
    return check_weights(returned, len(train_set), f"--curriculum {location}, step {step}")


def check_weights(returned: object, count: int, subject: str) -> list[float]:
    """The weights as floats. RunError, in a line that begins with `subject`: they are not `count` that can be drawn
    by."""
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != count:
        size = f" of {len(returned)}" if isinstance(returned, Sequence) else ""
        raise RunError(f"{subject}: it returned a {type(returned).__name__}{size}; return {count} weights")
    returned = [as_scalar(weight) for weight in returned]  # a list may have numbers of NumPy or torch
    for row, weight in enumerate(returned):
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise RunError(f"{subject}: weight {row} is {weight!r}; a weight is a finite number, at least 0")
    if not sum(returned) > 0:
        raise RunError(f"{subject}: all {count} weights are 0: no prompt could be drawn")
    return [float(weight) for weight in returned]
