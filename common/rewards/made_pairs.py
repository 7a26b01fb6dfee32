"""Preference pairs of a model's own images: the best and the worst of each prompt. Runs without --pairs import this."""

import json
from pathlib import Path

from common.checkpoints import atomic_file, writing
from common.distributed import gather_objects, on_rank_0
from common.errors import RunError
from common.plots import save_png
from common.rewards.pair_files import read_pairs
from common.rewards.pairs import Pairs
from common.rollout import Images

import torch
import torch.distributed as dist


def best_and_worst(totals: torch.Tensor) -> tuple[int, int] | None:
    """Places of the highest and the lowest of totals (G,) that are not NaN; None where none is higher than another."""
    kept = (~totals.isnan()).nonzero().flatten()
    if len(kept) == 0:
        return None
    best = int(kept[totals[kept].argmax()])
    worst = int(kept[totals[kept].argmin()])
    return None if totals[best] == totals[worst] else (best, worst)


def save_pair(folder: Path, row: int, prompt: str, images: Images, totals: torch.Tensor) -> dict | None:
    """Write the best and the worst of a prompt's images by totals (G,) to folder/pairs; NaN: a reward failed.

    Returns the pair's record; None where no image scores higher than another.
    """
    places = best_and_worst(totals)
    if places is None:
        return None
    record: dict = {"prompt": prompt}
    with writing(folder / "pairs"):
        (folder / "pairs").mkdir(parents=True, exist_ok=True)
        for kind, i in zip(("chosen", "rejected"), places, strict=True):
            file = f"pairs/{row:05d}_{kind}.png"
            save_png(folder / file, images[i])
            record |= {kind: file, f"{kind}_score": totals[i].item()}
    return record


def write_pairs(folder: Path, records: dict[int, dict | None], num_failed: int, num_prompts: int) -> str:
    """Write folder/pairs.jsonl of every rank's records, by row; num_failed images failed. A collective.

    Returns a line about them.

    Raises:
        RunError: no prompt made a pair.
    """
    by_row = {row: record for of_rank in gather_objects(records) for row, record in of_rank.items() if record}
    num_failed = sum(gather_objects(num_failed))
    failures = f"; a reward failed on {num_failed} of their images" if num_failed else ""
    if not by_row:
        raise RunError(f"--num_pair_prompts {num_prompts}: the images of every prompt score the same{failures}")
    if on_rank_0():
        with atomic_file(folder / "pairs.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(by_row[row]) + "\n" for row in sorted(by_row)))
    dist.barrier()  # before other ranks read the file
    return f"{len(by_row)} pairs of {num_prompts} prompts{failures}"


def read_made_pairs(folder: Path) -> Pairs:
    """The pairs that this run wrote; raises RunError where they were damaged since."""
    file = folder / "pairs.jsonl"
    try:
        return read_pairs(file)
    except (ValueError, RunError) as error:
        raise RunError(f"{error}; remove {file} to have the pairs made again") from None
