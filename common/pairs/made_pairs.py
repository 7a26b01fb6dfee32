"""Preference pairs of a model's own images: the best and the worst of each prompt."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.data import PromptSet, share_of_rank
from common.distributed import data_rank, data_world_size, gather_objects, on_rank_0, sequence_rank, with_bar
from common.errors import RunError
from common.files import atomic_file, remove_stale, writing
from common.images import save_png
from common.process import print_message
from common.rollout import Images
from common.scoring import all_equal

import torch
import torch.distributed as dist

# the options of every script that a model's pairs depend on
DECIDING = ["seed", "model", "dtype", "image_size", "max_sequence_length", "lora_path"]
DECIDING += ["train_prompts", "reward", "reward_weights", "reward_failure"]
DECIDING += ["negative_prompt", "base_weights", "train_shares", "shuffle", "family", "vae_dtype", "attention"]


def best_and_worst(totals: torch.Tensor) -> tuple[int, int] | None:
    """Places of the highest and the lowest of totals (G,) that are not NaN; None where none is higher than another."""
    best = int(totals.nan_to_num(-torch.inf).argmax())
    worst = int(totals.nan_to_num(torch.inf).argmin())
    kept = totals[~totals.isnan()]
    return None if len(kept) == 0 or all_equal(kept) else (best, worst)


def rows_to_make(
    folder: Path, num_prompts: int, options: dict[str, Any], contents: Mapping[str, str], sampling: Mapping[str, float]
) -> Iterator[tuple[int, bool]]:
    """Yield (row, whether it is this rank's) of the prompts whose pairs are still missing after an interrupted start.

    options, contents: Run.config and Run.contents. sampling: how the script samples pairs, by any names. A start with
    other values of these, other settings of rewards or contents of what options name does not count: its pairs are
    removed. The ranks sample together, each as many prompts: where they cannot share evenly, some of them another
    rank's too. Of a sequence group the first rank has them. A collective.
    """
    made_of = {name: digest for name, digest in contents.items() if not name.startswith(("--eval_prompts ", "source "))}
    deciding = {name: options[name] for name in DECIDING} | dict(sampling)
    for reward in (name.rpartition(":")[2] for name in options["reward"]):
        settings = options["reward_settings"].get(reward, {})
        # a server that has moved is not another judge
        deciding |= {variable: value for variable, value in settings.items() if not variable.endswith("_URL")}
    made_by = json.dumps({**deciding, "contents": made_of}, indent=1, default=str)
    if on_rank_0():
        known = folder / "pairs" / "made_by.json"
        if not known.exists() or known.read_text() != made_by:
            if known.exists():
                print_message(f"{known.parent}: other options or files made these pairs; they are made again")
            with writing(folder / "pairs"):
                shutil.rmtree(folder / "pairs", ignore_errors=True)
                known.parent.mkdir(parents=True)
                known.write_text(made_by)
        remove_stale((folder / "pairs").glob(".*.new"), age_s=-math.inf)  # the folder is this run's alone
    missing = gather_objects([row for row in range(num_prompts) if not record_file(folder, row).exists()])[0]
    if len(missing) < num_prompts and on_rank_0():
        print_message(
            f"of {num_prompts} prompts, {num_prompts - len(missing)} made their pairs before the run was interrupted"
        )
    share = share_of_rank(len(missing)) if missing else []
    own = range(data_rank(), len(missing), data_world_size())
    rows = [(missing[place], i < len(own) and sequence_rank() == 0) for i, place in enumerate(share)]
    return with_bar(rows, "making pairs", len(share), together=True)


def record_file(folder: Path, row: int) -> Path:
    """Where a prompt's record is, once its images have been compared."""
    return folder / "pairs" / f"{row:05d}.json"


def save_pair(folder: Path, row: int, prompts: PromptSet, images: Images, totals: torch.Tensor) -> None:
    """Write the best and the worst of a prompt's images by totals (G,), NaN where a reward failed, to folder/pairs, and
    last the prompt's record. Its pair is None where no image scores higher than another.

    prompts: the one prompt, once or more; its condition images are written too.
    """
    places = best_and_worst(totals)
    pair: dict = {}
    with writing(folder / "pairs"):
        for kind, i in zip(("chosen", "rejected"), places or (), strict=False):
            file = f"pairs/{row:05d}_{kind}.png"
            save_png(folder / file, images[i])
            pair |= {"prompt": prompts.prompts[0], kind: file, f"{kind}_score": totals[i].item()}
        for i, source in enumerate(prompts.select([0]).sources()[0] if pair else ()):
            file = f"pairs/{row:05d}_image{i}.png"
            save_png(folder / file, source)
            pair.setdefault("image", []).append(file)
        with atomic_file(record_file(folder, row), shared=True) as temporary:
            temporary.write_text(json.dumps({"pair": pair or None, "failed": int(totals.isnan().sum())}))


def write_pairs(folder: Path, num_prompts: int) -> str:
    """Write folder/pairs.jsonl of the records of all prompts. Returns a line about them. A collective.

    Raises:
        RunError: no prompt made a pair.
    """
    dist.barrier()  # a rank reads what the others have written
    records = [json.loads(record_file(folder, row).read_text()) for row in range(num_prompts)]
    by_row = {row: record["pair"] for row, record in enumerate(records) if record["pair"]}
    num_failed = sum(record["failed"] for record in records)
    failures = f"; a reward failed on {num_failed} of their images" if num_failed else ""
    if not by_row:
        raise RunError(f"--num_pair_prompts {num_prompts}: the images of every prompt score the same{failures}")
    if on_rank_0():
        with atomic_file(folder / "pairs.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(by_row[row], allow_nan=False) + "\n" for row in sorted(by_row)))
    dist.barrier()  # before other ranks read the file
    return f"{len(by_row)} pairs of {num_prompts} prompts{failures}"
