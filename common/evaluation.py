"""What evaluations and rollouts leave behind beside the update: images, samples.jsonl, diversity and drift."""

from common.data import GroupSampler
from common.eval_by import metrics_by_field
from common.options import EngineArgs, SharedArgs
from common.plots import Picture, save_grid, save_samples
from common.run import Run
from common.scoring import Scorer, detail_metrics, eval_metrics, sample_records
from common.watch import rollout_diversity, watch_metrics

from torch import Tensor


def evaluate_samples(
    args: SharedArgs, run: Run, scorer: Scorer, *, places: list[int], seeds: list[int], scores: Tensor
) -> tuple[dict, list[Picture] | None]:
    """Metrics val/* of this rank's B evaluation images, which it also writes to samples/STEP/. A collective.

    scorer: has the images, their prompts, and what rewards say beside scores. places (B,): the images' numbers over all
    ranks. scores (B, R): NaN where a reward failed; the first rewards have --reward_weights. Returns the metrics
    (rewards, failures, diversity, drift) and, on rank 0, the first images with captions (None on other ranks).
    """
    folder = run.folder / "samples" / f"{run.step:04d}"
    records = sample_records(scorer.prompt_set, seeds, scores, scorer.rewards, scorer.details)
    grid = save_samples(folder, places, scorer.images, records)
    images_per_prompt = args.eval_images_per_prompt
    metrics: dict = eval_metrics(scores, scorer.rewards, args.reward_weights, places, images_per_prompt)
    metrics |= detail_metrics(scorer.details, "val")
    if args.eval_by:
        metrics |= metrics_by_field(
            args.eval_by,
            scorer,
            scores,
            places,
            reward_weights=args.reward_weights,
            images_per_prompt=images_per_prompt,
        )
    return metrics | watch_metrics(folder, places, scorer.images, images_per_prompt), grid


def log_rollout(
    args: EngineArgs,
    run: Run,
    scorer: Scorer,
    sampler: GroupSampler,
    *,
    seeds: list[int],
    scores: Tensor,
    advantages: Tensor,
) -> dict:
    """Metrics of a rollout that the loss does not read: critic/diversity, and what rewards say beside scores.

    Every --save_rollouts steps it also writes this rank's B images to rollouts/STEP/ and, on rank 0, their
    samples.jsonl and a grid of the first. scores (N, R) and advantages (N,) are those of all ranks' images. A
    collective.
    """
    if args.save_rollouts and run.step % args.save_rollouts == 0:
        folder = run.folder / "rollouts" / f"{run.step:04d}"
        rows = sampler.image_index  # (B,)
        records = sample_records(scorer.prompt_set, seeds, scores[rows], scorer.rewards, scorer.details)
        for record, advantage in zip(records, advantages[rows].tolist(), strict=True):
            record["advantage"] = advantage
        grid = save_samples(folder, rows.tolist(), scorer.images, records, has_surplus=False)
        if grid:
            images, captions = zip(*grid, strict=True)
            save_grid(folder / "grid.png", images, captions)
    return {"critic/diversity": rollout_diversity(scorer.images, sampler), **detail_metrics(scorer.details, "reward")}
