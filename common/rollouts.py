"""The images of a rollout, saved as an evaluation's are (--save_rollouts): reward hacking shows in them first."""

from pathlib import Path

from common.data import GroupSampler
from common.plots import save_grid, save_samples
from common.scoring import Scorer, sample_records

import torch


def save_rollout(
    folder: Path,
    scorer: Scorer,
    sampler: GroupSampler,
    *,
    seeds: list[int],
    scores: torch.Tensor,
    advantages: torch.Tensor,
) -> None:
    """Write this rank's B images to `folder` and, on rank 0, their samples.jsonl and a grid of the first, grid.png.

    scores (N, R) and advantages (N,) are those of all ranks' images. A collective.
    """
    rows = sampler.image_index  # (B,)
    own_scores = scores[rows]
    own_advantages = advantages[rows].tolist()
    records = sample_records(scorer.prompt_set, seeds, own_scores, scorer.rewards, scorer.details)
    for record, advantage in zip(records, own_advantages, strict=True):
        record["advantage"] = advantage
    places = rows.tolist()
    grid = save_samples(folder, places, scorer.images, records, has_surplus=False)
    if grid:
        images, captions = zip(*grid, strict=True)
        path = folder / "grid.png"
        save_grid(path, images, captions)
