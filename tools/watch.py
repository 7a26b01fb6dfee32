"""Signs of reward hacking in a run, from its files alone: diversity and drift of its samples, and rules that it met.

    python -m tools.watch runs/flow_grpo
    python -m tools.watch runs/flow_grpo 'val/ocr/mean<0.5' 'val/drift_from_base>0.2'

A row per evaluation whose samples the run kept. Diversity is the mean difference between two images of a prompt, where
a prompt has several (--eval_images_per_prompt). Drift is the mean difference between an image and the image of the same
prompt and seed before training. Both are RMS pixel differences in [0, 1], as a run itself logs them. A rule is written
like one of --stop_if, and is held against the metrics of every evaluation.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import UNREADABLE, refusing
from common.images import as_one_picture, open_png
from common.plots import read_metrics
from common.stop_rules import read_stop_rules
from common.watch import base_samples, diversity, rms_difference, small_pictures

import torch


class Evaluation(NamedTuple):
    """What the samples of one evaluation show."""

    step: int
    num_images: int
    diversity: float | None  # None: an image per prompt
    drift: float | None  # None: no images of the same prompts and seeds before training


def watch_samples(run: Path) -> list[Evaluation]:
    """The evaluations of a run whose samples it kept, in order.

    Raises:
        ValueError: there are none, or a file cannot be read; in one line that names it.
    """
    folders = sorted(run.glob("samples/*/samples.jsonl"))
    if not folders:
        raise ValueError(f"{run}: has no samples of an evaluation")
    base = base_samples(run.absolute())  # absolute, like the paths of the runs that it was started from
    before = read_samples(base) if base else None
    images_per_prompt = read_images_per_prompt(run)
    found = []
    for folder in (file.parent for file in folders):
        seeds, pictures = read_samples(folder)
        spread = None
        if images_per_prompt > 1:
            spread = diversity(pictures.view(-1, images_per_prompt, pictures.shape[1])).mean().item()
        drift = None
        # images of other prompts or seeds, or of another size, say nothing about drift
        if before and before[0] == seeds and before[1].shape == pictures.shape:
            drift = rms_difference(pictures, before[1]).mean().item()
        found.append(Evaluation(int(folder.name), len(pictures), spread, drift))
    return found


def read_samples(folder: Path) -> tuple[list[tuple[str, int]], torch.Tensor]:
    """The (prompt, seed) of each image of an evaluation, and the images as small_pictures (N, D)."""
    with refusing(folder / "samples.jsonl", (*UNREADABLE, KeyError, TypeError)):
        records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        seeds = [(record["prompt"], record["seed"]) for record in records]
        files = [folder / record["file"] for record in records]
    images = []
    for file in files:
        with refusing(file, Exception):  # whatever a damaged file makes PIL raise
            images.append(as_one_picture(open_png(file)))
    return seeds, small_pictures(images)


def read_images_per_prompt(run: Path) -> int:
    """--eval_images_per_prompt of a run; 1 where its options are not known."""
    try:
        return json.loads((run / "args.json").read_text())["args"]["eval_images_per_prompt"]
    except (*UNREADABLE, KeyError, TypeError):
        return 1


def met_rules(run: Path, texts: Sequence[str]) -> list[str]:
    """A line for each rule: the evaluations that met it.

    Raises:
        ValueError: a rule cannot be read, or no evaluation logs its metric.
    """
    rules = read_stop_rules(texts)
    with refusing(run / "metrics.jsonl"):
        rows = [row for row in read_metrics(run) if any(name.startswith("val/") for name in row)]
    lines = []
    for rule in rules:
        logged = [row for row in rows if rule.metric in row]
        if not logged:
            known = sorted({name for row in rows for name in row if name.startswith("val/")})
            raise ValueError(f"{rule}: no evaluation logs {rule.metric}; there are {', '.join(known) or 'none'}")
        met = []
        for row in logged:
            if rule.holds(row[rule.metric]):
                met.append(f"step {row['training/global_step']} ({row[rule.metric]:.4g})")
        lines.append(f"{rule}: met at {', '.join(met)}" if met else f"{rule}: not met by {len(logged)} evaluations")
    return lines


def table(evaluations: Sequence[Evaluation]) -> list[str]:
    """Lines of a table of them."""
    lines = [f"{'step':>6}{'images':>8}{'diversity':>11}{'drift':>8}"]
    for one in evaluations:
        shown = ["-" if value is None else f"{value:.4f}" for value in (one.diversity, one.drift)]
        lines.append(f"{one.step:6}{one.num_images:8}{shown[0]:>11}{shown[1]:>8}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("rules", nargs="*", metavar="RULE", help="'val/ocr/mean<0.5' or with >, in quotes")
    args = parser.parse_args()
    try:
        lines = table(watch_samples(args.run))
        lines += met_rules(args.run, args.rules)
    except ValueError as error:
        sys.exit(f"tools.watch: error: {error}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
