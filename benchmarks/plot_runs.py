"""Overlay the curves of several runs in one picture: a panel a metric, a colour a run.

    python benchmarks/plot_runs.py runs/a runs/b
    python benchmarks/plot_runs.py runs/* --metrics val/ocr/mean actor/grad_norm --output compared.png

By default the metrics are those that a run's own curves.png shows. A metric that a run lacks is left out of its curves.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.pictures import PANELS, draw_panels, drawn_metrics, read_metrics


def overlay(runs, metrics, path):
    """Write the picture of `metrics`, None: those that the runs' own curves show. runs: {label: rows}.

    Raises:
        ValueError: a metric that no run has.
    """
    if metrics is None:
        every_row = [row for rows in runs.values() for row in rows]
        metrics = [name for wanted in PANELS.values() for name in drawn_metrics(every_row, wanted)]
    panels = {}
    for name in metrics:
        panels[name] = []
        for number, (label, rows) in enumerate(runs.items()):
            if any(name in row for row in rows):
                panels[name].append((label, name, rows, f"C{number}"))
        if not panels[name]:
            raise ValueError(f"no run has the metric {name}")
    draw_panels(panels, path)


def labels_of(folders):
    """The runs' names or, where two are called the same, their paths."""
    names = [Path(folder).resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


if __name__ == "__main__":
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
