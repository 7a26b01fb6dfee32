"""Metrics of a rollout and of an evaluation: scores, what rewards say beside them, diversity, norms of velocities."""

import math
from collections.abc import Iterable, Sequence

from common.data import GroupSampler, gather_shares
from common.distributed import gather, gather_groups, gather_objects
from common.errors import RolloutError
from common.images import as_one_picture
from common.rollout import Images
from common.scoring import (
    NOT_ASKED,
    TOTAL,
    Details,
    Reward,
    Scorer,
    all_equal,
    count_by_reward,
    is_relative,
    weighted_totals,
)

import numpy as np
import torch

LARGEST = 96  # pixels of the longer side of a reduced picture


# ---- pictures --------------------------------------------------------------------------------------------------------
def small_pictures(images: Images) -> torch.Tensor:
    """The pixels (B, D) uint8 of B images or videos of one size, reduced so that no side is longer than LARGEST.

    Means over boxes of whole pixels keep composition and colour and drop texture. The embedded model's images are
    small enough as they are. A video is its first, middle and last frame.
    """
    rows = []
    for image in images:
        picture = as_one_picture(image).convert("RGB")
        picture = picture.reduce(math.ceil(max(picture.size) / LARGEST))
        rows.append(torch.from_numpy(np.array(picture)).flatten())
    return torch.stack(rows)


def rms_difference(pictures: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Root mean square difference (B,) of pictures (B, D) uint8 from others, as a share of a channel's range."""
    return ((pictures.double() - others.double()) / 255).square().mean(1).sqrt()


def diversity(groups: torch.Tensor) -> torch.Tensor:
    """Mean rms_difference between two pictures of each group (P,), fp64; 0 where all are equal.

    groups: (P, group_size, D) uint8. In [0, 1]; black and white pictures are 1 apart.
    """
    means = torch.empty(len(groups), dtype=torch.float64)
    for i, group in enumerate(groups):
        distances = torch.pdist(group.double() / 255)  # (G (G - 1) / 2,), square roots of sums over D
        means[i] = distances.mean() / math.sqrt(group.shape[1])
    return means


def rollout_diversity(images: Images, sampler: GroupSampler) -> torch.Tensor:
    """Mean `diversity` of a rollout's groups, from this rank's B images. A collective.

    The pictures of a group meet on one rank. A gather of all pictures would be 3.3 GB on each of 1,024 ranks.
    """
    groups, _ = gather_groups(small_pictures(images), sampler.image_index, sampler.group_size)
    return gather(diversity(groups).sum()).sum() / sampler.prompts_per_step


def norm_ratio(v: torch.Tensor, v_ref: torch.Tensor) -> torch.Tensor:
    """Mean over samples of |v| / |v_ref|, fp64 and without gradient; both (B, ...). A sample
    whose reference is 0 counts as 1.

    Above 1 the velocities have grown beyond the reference's. NormGuard (arXiv 2606.27771) sees contrast and saturation
    grow with them, where no reward does.
    """
    norms, ref_norms = (x.detach().flatten(1).double().norm(dim=1) for x in (v, v_ref))
    return torch.where(ref_norms == 0, 1.0, norms / ref_norms).mean()


def detail_metrics(details: Sequence[Details], prefix: str) -> dict[str, float]:
    """{prefix/<reward>/<key>: mean} of the numbers in the details of all ranks' images. A collective."""
    numbers: dict[str, list[float]] = {}
    for of_rank in gather_objects([detail for detail in details if detail]):
        for detail in of_rank:
            for name, said in detail.items():
                for key, value in said.items():
                    if not isinstance(value, str):
                        numbers.setdefault(f"{prefix}/{name}/{key}", []).append(float(value))
    return {name: math.fsum(values) / len(values) for name, values in sorted(numbers.items())}


def reward_metrics(
    scores: torch.Tensor,
    advantages: torch.Tensor | None,
    rewards: dict[str, Reward],
    reward_weights: Sequence[float],
    group_size: int,
) -> dict[str, torch.Tensor | float]:
    """Statistics of a rollout's scores (N, R), NaN where a reward failed, and of its advantages (N,),
    or None where a loss takes no advantages.

    std_mean is the mean over groups of the population standard deviation of the weighted total. zero_std_ratio is the
    share of groups whose images all score the same, from which nothing is learned. Only whole images count, in groups
    with at least two of them; <reward>/failed and skipped_groups count the others. <reward>/mean is over the images
    whose prompts ask for it. mean, max and min are those of the weighted total without relative rewards. A mean is
    missing where there is nothing to take it of.
    """
    has_failed = scores.isnan()  # (N, R)
    is_whole = ~has_failed.any(1).view(-1, group_size)  # (P, G)
    is_kept = is_whole & (is_whole.sum(1, keepdim=True) >= 2)
    totals = weighted_totals(scores, reward_weights)  # (N,)
    groups = [group[kept] for group, kept in zip(totals.view(-1, group_size), is_kept, strict=True)]
    groups = [group for group in groups if len(group)]
    deviations = torch.stack([group.std(correction=0) for group in groups])
    are_equal = torch.cat([all_equal(group) for group in groups])  # the std of equal values can be 1e-17
    metrics: dict[str, torch.Tensor | float] = {}
    for r, name in enumerate(rewards):
        metrics[f"critic/rewards/{name}/failed"] = has_failed[:, r].sum()
        kept = scores[is_kept.flatten(), r]
        if (kept != NOT_ASKED).any():
            metrics[f"critic/rewards/{name}/mean"] = kept[kept != NOT_ASKED].mean()
    metrics["critic/rewards/skipped_groups"] = (~is_kept).all(1).sum()
    absolute = [r for r, function in enumerate(rewards.values()) if not is_relative(function)]
    absolute_totals = weighted_totals(scores[:, absolute], [reward_weights[r] for r in absolute])[is_kept.flatten()]
    absolute_totals = absolute_totals[absolute_totals != NOT_ASKED]
    if len(absolute_totals):
        metrics["critic/rewards/mean"] = absolute_totals.mean()
        metrics["critic/rewards/max"] = absolute_totals.max()
        metrics["critic/rewards/min"] = absolute_totals.min()
    metrics["critic/rewards/std_mean"] = deviations.mean()
    metrics["critic/rewards/zero_std_ratio"] = are_equal.double().mean()
    metrics["critic/rewards/group_size"] = group_size
    if advantages is not None:
        kept_advantages = advantages[is_kept.flatten()]
        metrics["critic/advantages/mean"] = kept_advantages.mean()
        metrics["critic/advantages/max"] = kept_advantages.max()
        metrics["critic/advantages/min"] = kept_advantages.min()
    return metrics


def eval_metrics(
    scores: torch.Tensor,
    names: Iterable[str],
    reward_weights: Sequence[float],
    places: Sequence[int],
    images_per_prompt: int,
    files: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """Mean and standard error over held-out prompts of every reward and of the weighted total. A collective.

    scores (B, R) are of this rank's images, places (B,) their numbers among all, prompt by prompt. The first rewards
    have a weight and make the total; those behind them only watch. A prompt is left out of a mean if it does not ask
    for the reward, or if the reward scored none of its images; failed images are counted. A reward that no prompt asks
    for has no metrics. files (B,): where the prompts are of several files, val/<file>/<reward>/mean are those of each.
    """
    names = list(names)
    num_images = int(gather(torch.tensor(places)).max()) + 1
    scores, metrics = count_failed(gather_shares(scores, num_images), names, len(reward_weights))
    scores = scores.view(num_images // images_per_prompt, images_per_prompt, len(names)).nanmean(1)  # (prompts, R)
    totals = weighted_totals(scores[:, : len(reward_weights)], reward_weights)  # (prompts,)
    parts = {"val": list(range(len(scores)))}  # rows of the prompts
    for row, file in enumerate(gather_values(files, places, images_per_prompt) if files else ()):
        parts.setdefault(f"val/{file}", []).append(row)
    for prefix, rows in parts.items():
        for name, of_prompts in zip([*names, TOTAL], [*scores[rows].T, totals[rows]], strict=True):
            kept = of_prompts[of_prompts.isfinite()]
            if len(kept):
                metrics[f"{prefix}/{name}/mean"] = kept.mean()
                metrics[f"{prefix}/{name}/stderr"] = kept.std(correction=0) / len(kept) ** 0.5
    return metrics


def gather_values(values: Sequence[str], places: Sequence[int], images_per_prompt: int) -> list[str]:
    """The value of every held-out prompt, in order, of the values (B,) of this rank's images. A collective."""
    of_ranks = gather_objects(list(zip(places, values, strict=True)))
    value_of = dict(pair for of_rank in of_ranks for pair in of_rank)  # by place
    return [value_of[place] for place in range(0, len(value_of), images_per_prompt)]


def metrics_by_field(
    field: str,
    scorer: Scorer,
    scores: torch.Tensor,
    reward_weights: Sequence[float],
    places: Sequence[int],
    images_per_prompt: int,
) -> dict[str, torch.Tensor]:
    """val/<value>/<reward>/mean@n and best@n: means over the prompts of one value, of their n images' mean or best.

    <value>: of a field of the prompts' records, such as data_source (--eval_by), or "unknown" where a record lacks it.
    scores (B, R), reward_weights and places (B,) are eval_metrics', and so is what counts. best@n is there where n > 1.
    A collective.
    """
    names = list(scorer.rewards)
    found = [record.get(field) for record in scorer.prompt_set.metadata]
    values = ["unknown" if value is None else str(value) for value in found]
    value_of_prompt = gather_values(values, places, images_per_prompt)
    num_images = len(value_of_prompt) * images_per_prompt
    scores, _ = count_failed(gather_shares(scores, num_images), names, len(reward_weights))  # (M, R)
    totals = weighted_totals(scores[:, : len(reward_weights)], reward_weights)[:, None]
    by_prompt = torch.cat([scores, totals], 1).view(-1, images_per_prompt, scores.shape[1] + 1)  # (P, n, R + 1)
    metrics = {}
    for value in sorted(set(value_of_prompt)):
        rows = [row for row, other in enumerate(value_of_prompt) if other == value]
        for name, of_prompts in zip([*names, TOTAL], by_prompt[rows].unbind(2), strict=True):  # (prompts, n)
            kept = of_prompts[of_prompts.isfinite().any(1)]
            if len(kept):
                metrics[f"val/{value}/{name}/mean@{images_per_prompt}"] = kept.nanmean(1).mean()
            if len(kept) and images_per_prompt > 1:
                best = kept.nan_to_num(-torch.inf).amax(1)
                metrics[f"val/{value}/{name}/best@{images_per_prompt}"] = best.mean()
    return metrics


def count_failed(scores: torch.Tensor, names: Sequence[str], num_trained: int) -> tuple[torch.Tensor, dict]:
    """An evaluation's scores (M, R) and metrics, the number of images that each reward failed on.

    Where one of the first num_trained rewards failed, the scores of all of these that were asked for become NaN: the
    image is not part of their means. The rewards behind them only watch, and each loses its own failures alone.

    Raises:
        RolloutError: a reward that was asked for has no image with a score left.
    """
    has_failed = scores.isnan()
    is_left_out = has_failed[:, :num_trained].any(1)
    is_asked = scores != NOT_ASKED
    scores = scores.clone()
    scores[is_left_out, :num_trained] = torch.nan
    scores[~is_asked] = NOT_ASKED
    if (is_asked.any(0) & ~scores.isfinite().any(0)).any():
        raise RolloutError(f"no image of the evaluation has its scores: {count_by_reward(has_failed, names)}")
    metrics = {f"val/{name}/failed": has_failed[:, r].sum() for r, name in enumerate(names) if is_asked[:, r].any()}
    return scores, metrics
