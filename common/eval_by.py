"""Rewards of an evaluation for each value of a field of its prompts' records, such as data_source (--eval_by)."""

from collections.abc import Sequence

from common.data import PromptSet, gather_shares
from common.distributed import gather_objects
from common.scoring import TOTAL, Scorer, count_failed

import torch


def check_field(eval_set: PromptSet, field: str) -> None:
    """ValueError: a held-out prompt's record lacks the field, or has there what is neither a string nor a number."""
    for prompt, record in zip(eval_set.prompts, eval_set.metadata, strict=True):
        if not isinstance(record.get(field), str | int | float):
            told = f"the record of the prompt {prompt!r} has no text or number of that name"
            raise ValueError(f"--eval_by {field}: {told}; --eval_by None turns it off")


def metrics_by_field(
    field: str,
    scorer: Scorer,
    scores: torch.Tensor,
    places: Sequence[int],
    *,
    reward_weights: Sequence[float],
    images_per_prompt: int,
) -> dict[str, torch.Tensor]:
    """val/<value>/<reward>/mean@n and best@n: means over the prompts of one value, of their n images' mean or best.

    scores (B, R) and places (B,) are of this rank's images, the scorer's; the first rewards have a weight and make the
    total. Images that a reward failed on do not count, as in eval_metrics; a prompt without any other is left out.
    best@n is there where n > 1. A collective.
    """
    names = list(scorer.rewards)
    values = [record[field] for record in scorer.prompt_set.metadata]
    of_ranks = gather_objects(list(zip(places, values, strict=True)))
    value_of = dict(pair for of_rank in of_ranks for pair in of_rank)
    num_images = len(value_of)
    scores, _ = count_failed(gather_shares(scores, num_images), names, len(reward_weights))  # (M, R)
    totals = (scores[:, : len(reward_weights)] * scores.new_tensor(reward_weights)).sum(1, keepdim=True)
    by_prompt = torch.cat([scores, totals], 1).view(-1, images_per_prompt, scores.shape[1] + 1)  # (P, n, R + 1)
    value_of_prompt = [str(value_of[place]) for place in range(0, num_images, images_per_prompt)]
    metrics = {}
    for value in sorted(set(value_of_prompt)):
        rows = [row for row, other in enumerate(value_of_prompt) if other == value]
        for name, of_prompts in zip([*names, TOTAL], by_prompt[rows].unbind(2), strict=True):  # (prompts, n)
            kept = of_prompts[~of_prompts.isnan().all(1)]
            if not len(kept):
                continue
            metrics[f"val/{value}/{name}/mean@{images_per_prompt}"] = kept.nanmean(1).mean()
            if images_per_prompt > 1:
                best = kept.nan_to_num(-torch.inf).amax(1)
                metrics[f"val/{value}/{name}/best@{images_per_prompt}"] = best.mean()
    return metrics
