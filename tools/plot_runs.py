"""Overlay the curves of several runs in one picture: a panel per metric, a colour per run.

    python -m tools.plot_runs runs/a runs/b
    python -m tools.plot_runs runs/* --metrics val/ocr/mean actor/grad_norm --output compared.png

Runs whose names differ by an ending -seedN share a colour. By default the metrics are those that a run's own curves.png
shows. A run that lacks a metric has no curve in its panel.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from common.plots import PANELS, draw_panels, drawn_metrics, read_metrics


def overlay(runs: dict[str, list[dict]], metrics: Sequence[str] | None, path: str | Path) -> None:
    """Write the picture of `metrics`, or for None of the metrics that the runs' own curves show.

    runs: {label: rows of metrics.jsonl}.

    Raises:
        ValueError: no run has one of the metrics.
    """
    if metrics is None:
        every_row = [row for rows in runs.values() for row in rows]
        metrics = [name for wanted in PANELS.values() for name in drawn_metrics(every_row, wanted)]
    panels: dict[str, list[tuple[str, str, list[dict], str]]] = {}
    of_seeds = [re.sub(r"-?seed\d+$", "", label) for label in runs]  # seeds share a colour, and an entry of the legend
    colours = {group: f"C{number}" for number, group in enumerate(dict.fromkeys(of_seeds))}
    for name in metrics:
        panels[name] = []
        for group, (label, rows) in zip(of_seeds, runs.items(), strict=True):
            if any(name in row for row in rows):
                count = of_seeds.count(group)
                shown = label if count == 1 else f"{group}, {count} seeds"
                is_drawn = any(shown == curve[0] for curve in panels[name])
                panels[name].append((f"_{label}" if is_drawn else shown, name, rows, colours[group]))
        if not panels[name]:
            raise ValueError(f"no run has the metric {name}")
    draw_panels(panels, path)


def labels_of(folders: Sequence[str]) -> list[str]:
    """The names of the runs, or their paths where two runs have the same name."""
    names = [Path(folder).resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else list(folders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or any folder with a metrics.jsonl")
    parser.add_argument("--metrics", nargs="+", metavar="NAME")
    parser.add_argument("--output", default="runs/compared.png", help="the picture's file (%(default)s)")
    args = parser.parse_args()
    try:
        runs = {label: read_metrics(run) for label, run in zip(labels_of(args.runs), args.runs, strict=True)}
        overlay(runs, args.metrics, args.output)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(args.output)


if __name__ == "__main__":
    main()
