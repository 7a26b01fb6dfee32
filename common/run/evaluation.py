"""What evaluations and rollouts leave behind beside the update: images, samples.jsonl and metrics."""

import math
from collections.abc import Iterable, Sequence

from common.data import GroupSampler, PromptSet
from common.distributed import data_rank, data_world_size
from common.files import source_name, writing
from common.metrics import detail_metrics, eval_metrics, metrics_by_field, rollout_diversity
from common.options import EngineArgs, SharedArgs
from common.run.plots import Picture, save_grid, save_samples
from common.run.run import Run
from common.run.watch import watch_metrics
from common.scoring import (
    NOT_ASKED,
    Details,
    Scorer,
)

import torch


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
    is_own = [place % data_world_size() == data_rank() for place in places]
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
    """Metrics of a rollout that the loss does not read: critic/diversity, what rewards say beside scores and, with
    --max_rollouts, what replaced groups have cost.

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
    metrics = {"critic/diversity": rollout_diversity(scorer.images, sampler)}
    cost = sampler.redraw_metrics() if args.max_rollouts > 1 else {}
    return metrics | detail_metrics(scorer.details, "reward") | cost


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
