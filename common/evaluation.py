"""What evaluations and rollouts leave behind beside the update: images, samples.jsonl and metrics."""

import math
from collections.abc import Iterable, Sequence

from common.checkpoints import writing
from common.data import GroupSampler, PromptSet, gather_shares, source_name
from common.distributed import gather, gather_objects
from common.errors import RolloutError
from common.options import EngineArgs, SharedArgs
from common.plots import Picture, save_grid, save_samples
from common.run import Run
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
from common.watch import rollout_diversity, watch_metrics

import torch
import torch.distributed as dist


def evaluate_samples(
    args: SharedArgs, run: Run, scorer: Scorer, *, places: list[int], seeds: list[int], scores: torch.Tensor
) -> tuple[dict, list[Picture] | None]:
    """Metrics val/* of this rank's B evaluation images, which it also writes to samples/STEP/. A collective.

    scorer: has the images, their prompts, and what rewards say beside scores. places (B,): the images' numbers over all
    ranks. scores (B, R): NaN where a reward failed; the first rewards are --reward's. Returns the metrics
    (rewards, failures, diversity, drift) and, on rank 0, the first images with captions (None on other ranks).
    """
    folder = run.folder / "samples" / f"{run.step:04d}"
    images_per_prompt = args.eval_images_per_prompt
    records = sample_records(scorer.prompt_set, seeds, scores, scorer.rewards, scorer.details)
    groups = [place // images_per_prompt for place in places]
    add_origin(records, scorer.prompt_set, args.eval_prompts, run.step, groups)
    grid = save_samples(folder, places, scorer.images, records)
    trained = zip((name.rpartition(":")[2] for name in args.reward), args.reward_weights, strict=True)
    reward_weights = [weight for name, weight in trained if name in scorer.rewards]  # without relative ones
    files = scorer.prompt_set.files
    metrics: dict = eval_metrics(scores, scorer.rewards, reward_weights, places, images_per_prompt, files)
    # without the surplus images, which another rank has as well (share_of_rank)
    is_own = [place % dist.get_world_size() == dist.get_rank() for place in places]
    metrics |= detail_metrics([detail for detail, own in zip(scorer.details, is_own, strict=True) if own], "val")
    if args.eval_by:
        metrics |= metrics_by_field(args.eval_by, scorer, scores, reward_weights, places, images_per_prompt)
    has_start = not args.eval_only or args.resume is not None  # a model or LoRA alone would be compared with itself
    options = vars(args) if has_start else None
    return metrics | watch_metrics(folder, places, scorer.images, images_per_prompt, options), grid


def log_rollout(
    args: EngineArgs,
    run: Run,
    scorer: Scorer,
    sampler: GroupSampler,
    *,
    seeds: list[int],
    scores: torch.Tensor,
    advantages: torch.Tensor | None,
) -> dict:
    """Metrics of a rollout that the loss does not read: critic/diversity, and what rewards say beside scores.

    Every --save_rollouts steps it also writes this rank's B images to rollouts/STEP/ and, on rank 0, their
    samples.jsonl and a grid of the first. scores (N, R) and advantages (N,), None where the loss takes none, are those
    of all ranks' images. A collective.
    """
    if args.save_rollouts and run.step % args.save_rollouts == 0:
        folder = run.folder / "rollouts" / f"{run.step:04d}"
        rows = sampler.image_index  # (B,)
        records = sample_records(scorer.prompt_set, seeds, scores[rows], scorer.rewards, scorer.details)
        if advantages is not None:
            for record, advantage in zip(records, advantages[rows].tolist(), strict=True):
                record["advantage"] = advantage
        add_origin(records, scorer.prompt_set, args.train_prompts, run.step, (rows // sampler.group_size).tolist())
        grid = save_samples(folder, rows.tolist(), scorer.images, records, has_surplus=False)
        if grid:
            images, captions = zip(*grid, strict=True)
            with writing(folder):
                save_grid(folder / "grid.png", images, captions)
    return {"critic/diversity": rollout_diversity(scorer.images, sampler), **detail_metrics(scorer.details, "reward")}


# ---- metrics ---------------------------------------------------------------------------------------------------------
def sample_records(
    prompts: PromptSet, seeds: list[int], scores: torch.Tensor, names: Iterable[str], details: Sequence[Details] = ()
) -> list[dict]:
    """The records of B images, {"prompt": ..., "seed": ..., "<reward>": score ..., "details": {"<reward>": ...}}.

    A score is None where the reward failed, and missing where it was not asked for; details, and "image" of an edit,
    are there where there are some.
    """
    names = list(names)
    records = []
    for prompt, metadata, seed, row in zip(prompts.prompts, prompts.metadata, seeds, scores.tolist(), strict=True):
        scored = [(name, score) for name, score in zip(names, row, strict=True) if score != NOT_ASKED]
        by_name = {name: None if math.isnan(score) else score for name, score in scored}
        sources = {"image": metadata["image"]} if "image" in metadata else {}
        records.append({"prompt": prompt, "seed": seed, **sources, **by_name})
    for record, detail in zip(records, details, strict=False):  # () where none are known
        if detail:
            record["details"] = detail
    return records


def add_origin(
    records: Sequence[dict], prompts: PromptSet, option: Sequence[str], step: int, groups: Sequence[int]
) -> None:
    """Add to the records of B images the training step, the number of their prompt among those of the step, the name of
    its file, and its metadata: what else the file says of it, pictures apart.

    option: --eval_prompts or --train_prompts, which names the file where there is only one. groups (B,).
    """
    files = prompts.files or [source_name(option[0])] * len(records)
    for record, metadata, group, file in zip(records, prompts.metadata, groups, files, strict=True):
        rest = {name: value for name, value in metadata.items() if name not in ("image", "mask")}
        record |= {"step": step, "group": group, "prompt_file": file, "metadata": rest}


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
