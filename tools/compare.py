"""Runs beside each other: means over seeds, differences with their intervals, and curves with their ranges.

    python -m tools.compare runs/a runs/b
    python -m tools.compare "runs/a-seed*" --against "runs/b-seed*" --metric val/ocr/mean timing_s/step
    python -m tools.compare runs/* --output compared.png
    python -m tools.compare "runs/a-seed*" "runs/b-seed*" --step 20 --latex

Runs whose names differ by an ending -seedN are one row of the table and one curve, their mean with its range. The value
of a metric is the last that a run logged; that of seconds (timing_s/) is the median of its training steps. With --step
both are those of that step. --against compares a seed with the same seed of those runs: the interval is 95 % of the
mean paired difference, by Student's t, and p is the sign-flip test's, of six to sixteen seeds (with fewer it cannot
fall below 0.05). Neither is corrected for the number of comparisons. The default is the evaluation's means in the
table, which is Markdown or LaTeX's tabular, and the panels of a run's own curves.png; the weighted total only where all
runs have the same rewards and weights. A line names the code of yours that differs between the seeds of a row.
"""

import argparse
import glob
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from common.errors import UNREADABLE
from common.run.plots import PANELS, VAL_TOTAL, draw_panels, drawn_metrics, read_metrics
from common.run.record import own_code, script_source
from common.run.resuming import newest_record, records_of

Rows = list[dict]  # of a metrics.jsonl
OfRun = TypeVar("OfRun")
Interval = tuple[float, float | None, float | None]  # mean, low and high; without an interval None
# the 97.5 % quantiles of Student's t of 1, 2, ... degrees of freedom
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
PICTURE = "runs/compared.png"
FEWEST_FOR_P = 6  # 2 of 2^5 choices of signs are 0.0625


# ---- runs ------------------------------------------------------------------------------------------------------------
def labels_of(folders: Sequence[str]) -> list[str]:
    """The names of the runs, or their paths where two runs have the same name."""
    names = [Path(folder).resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else list(folders)


def find_folders(patterns: Sequence[str]) -> list[str]:
    """The folders of runs that the patterns name. What else lies beside runs, and a shell names for runs/*, is left
    out: tools.sweep's logs and our picture; and, in a line, a folder without metrics.

    Raises:
        ValueError: a pattern names nothing, or none is a run.
    """
    folders: list[str] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern))
        if not found:
            raise ValueError(f"{pattern}: no such run")
        for folder in (path for path in found if Path(path).is_dir()):
            if (Path(folder) / "metrics.jsonl").is_file():
                folders.append(folder)
            else:
                print(f"{folder}: no run, as it has no metrics.jsonl: left out", file=sys.stderr)
    if patterns and not folders:
        raise ValueError(f"{' '.join(patterns)}: no such run")
    return folders


def by_group(runs: dict[str, OfRun]) -> dict[str, dict[str, OfRun]]:
    """{name without -seedN: {seed: rows, or what else is given of a run}}.

    A run without a seed in its name is a group of its own, of seed "". Beside seeds of the same name it is called
    "NAME, no seed": it may have other options.
    """
    matches = {label: re.fullmatch(r"(.*?)-?seed(\d+)", label) for label in runs}
    seeded = {match[1] for match in matches.values() if match}
    groups: dict[str, dict[str, OfRun]] = {}
    for label, match in matches.items():
        if match:
            groups.setdefault(match[1], {})[match[2]] = runs[label]
        else:
            groups[f"{label}, no seed" if label in seeded else label] = {"": runs[label]}
    return groups


def at_step(runs: dict[str, Rows], step: int | None, metrics: Sequence[str]) -> dict[str, Rows]:
    """The runs with their rows of that training step alone; None: all rows. ValueError: a run lacks a metric there."""
    if step is None:
        return runs
    found = {label: [row for row in rows if row["training/global_step"] == step] for label, rows in runs.items()}
    for label, rows in found.items():
        for metric in metrics:
            if value_of(runs[label], metric) is not None and value_of(rows, metric) is None:
                raise ValueError(f"--step {step}: {label} has not logged {metric} there")
    return found


def value_of(rows: Rows, metric: str) -> float | None:
    """A run's last value of a metric; the median of its training steps for seconds. None where it was never logged."""
    values = [row[metric] for row in rows if metric in row]
    if metric.startswith("timing_s/"):
        values = [row[metric] for row in rows if metric in row and "timing_s/step" in row]
        return statistics.median(values) if values else None
    return values[-1] if values else None


def rewards_of(folder: str) -> dict[str, float] | None:
    """{reward: weight} of a run's total; None where its options cannot be read."""
    try:
        options = json.loads(newest_record(Path(folder)).read_text(encoding="utf-8"))["args"]
        return dict(zip(options["reward"], options["reward_weights"], strict=True))
    except (*UNREADABLE, KeyError, TypeError):
        return None


def comparable_metrics(metrics: Sequence[str], folders: Sequence[str]) -> list[str]:
    """The metrics that the table has by default: without the weighted total, as a line says, where the runs in these
    folders add it up of other rewards or with other weights."""
    totals = [rewards for folder in folders if (rewards := rewards_of(folder)) is not None]
    if VAL_TOTAL not in metrics or all(rewards == totals[0] for rewards in totals):
        return list(metrics)
    told = "is of other rewards or weights in some of these runs: left out of the table"
    print(f"{VAL_TOTAL}: {told} (--metric {VAL_TOTAL} shows it)", file=sys.stderr)
    return [metric for metric in metrics if metric != VAL_TOTAL]


def name_other_code(folders: dict[str, str]) -> None:
    """Print a line for each group of seeds whose scripts, or whose files of the user's, differ. folders: by label."""
    for group, seeds in by_group(folders).items():
        found: dict[str, dict[str, str]] = {}  # {file, "" for the script: {its digest: its name in the records}}
        for file in (file for folder in seeds.values() for file in records_of(Path(folder)) if len(seeds) > 1):
            try:
                contents = own_code(dict(json.loads(file.read_text(encoding="utf-8"))["contents"]))
                for name, digest in contents.items():
                    found.setdefault("" if name == script_source(contents) else name, {})[digest] = name
            except (*UNREADABLE, KeyError, TypeError):  # an older record says nothing
                continue
        differing = {name for digests in found.values() if len(digests) > 1 for name in digests.values()}
        if differing:
            names = ", ".join(sorted(name.removeprefix("source ") for name in differing))
            told = f"not all of the same code, and their mean is shown: {names} differs (source.py, code/ of each)"
            print(f"{group}: its runs are {told}", file=sys.stderr)


def name_shorter(runs: dict[str, Rows]) -> None:
    """Print a line that names the runs which end before the others, as a kill leaves one."""
    ends = {label: max(row["training/global_step"] for row in rows) for label, rows in runs.items() if rows}
    last = max(ends.values(), default=0)
    shorter = [f"{label} at step {end}" for label, end in ends.items() if end < last]
    if shorter:
        advice = "their last values are compared as they are; --step takes those of one step"
        print(f"ended before step {last} of the longest run: {', '.join(shorter)}: {advice}", file=sys.stderr)


# ---- statistics ------------------------------------------------------------------------------------------------------
def paired_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of at least two paired differences, 95 % by Student's t."""
    count = len(differences)
    mean = statistics.mean(differences)
    half = t_975(count - 1) * statistics.stdev(differences) / count**0.5
    return mean, mean - half, mean + half


def t_975(freedom: float) -> float:
    """The 97.5 % quantile of Student's t of at least one degree of freedom, to 3 %; to 0.001 of a whole number."""
    if freedom >= len(T_975):
        return 1.95996 + 2.3723 / freedom + 2.8225 / freedom**2
    below = int(freedom)
    low, high = (math.log(T_975[df - 1] if df <= len(T_975) else t_975(df)) for df in (below, below + 1))
    share = (1 / below - 1 / freedom) / (1 / below - 1 / (below + 1))  # the logarithm is nearly linear in 1 / freedom
    return math.exp(low + share * (high - low)) if share else T_975[below - 1]


def mean_interval(
    values: Sequence[float | None], groups: Iterable[list[int]], clusters: Sequence[int] | None = None
) -> Interval | None:
    """(mean, low, high), 95 %: the mean over groups of the means over their rows, by Student's t.

    clusters: of each row, None: its own. Rows of one cluster, copies of a prompt, are no further ones for the spread:
    the variance of a mean m of n rows is C / (C - 1) sum_c (sum_(i in c) (x_i - m))^2 / n^2 over its C clusters.

    The variances of the groups' means add up, and t has Welch's degrees of freedom. A group of one cluster has no
    variance, so there is no interval then, (mean, None, None); and nothing, None, where a group has no value.
    """
    means, parts = [], []
    for rows in groups:
        kept = {row: value for row in rows if (value := values[row]) is not None}
        if not kept:
            return None
        mean = statistics.mean(kept.values())
        sums: dict[int, float] = {}
        for row, value in kept.items():
            cluster = clusters[row] if clusters else row
            sums[cluster] = sums.get(cluster, 0.0) + value - mean
        means.append(mean)
        squares = sum(of_cluster**2 for of_cluster in sums.values())
        others = len(sums) - 1
        parts.append((len(sums) / others * squares / len(kept) ** 2 if others else 0.0, others))
    mean = statistics.fmean(means)
    if not all(others for _, others in parts):
        return mean, None, None
    variance = sum(part for part, _ in parts)  # of the sum of the groups' means
    if not variance:
        return mean, mean, mean
    freedom = variance**2 / sum(part**2 / others for part, others in parts)
    half = t_975(freedom) * variance**0.5 / len(parts)
    return mean, mean - half, mean + half


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of their sum among the sums of all 2^n choices of signs."""
    observed = abs(sum(differences))
    flips = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [abs(sum(sign * one for sign, one in zip(signs, differences, strict=True))) for signs in flips]
    return sum(one >= observed - 1e-12 for one in sums) / len(flips)


# ---- table and picture -----------------------------------------------------------------------------------------------
def comparison_table(runs: dict[str, Rows], against: dict[str, Rows], metrics: Sequence[str]) -> list[list[str]]:
    """Cells: a line for each group of seeds, and for each metric its mean, range and difference from `against`.

    Raises:
        ValueError: no run has one of the metrics; `against` is of several groups.
    """
    groups = by_group(runs)
    base_groups = by_group(against)
    if len(base_groups) > 1:
        raise ValueError(f"--against: must be the seeds of one setting, got those of {', '.join(base_groups)}")
    base = next(iter(base_groups.values()), {})
    lines = [["", "seeds", *metrics]]
    for group, seeds in (base_groups | groups).items():
        cells = [group, str(len(seeds))]
        for metric in metrics:
            cells.append(cell(seeds, {} if group in base_groups else base, metric))
        lines.append(cells)
    for column, metric in enumerate(metrics, 2):
        if not any(line[column] for line in lines[1:]):
            raise ValueError(f"no run has the metric {metric}")
    return lines


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table of lines of cells, the first of which are the names of the columns."""
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def as_latex(lines: Sequence[Sequence[str]]) -> str:
    """The same table as a tabular, which needs no package."""
    head, *body = [" & ".join(re.sub(r"([&%$#_{}])", r"\\\1", cell) for cell in line) + r" \\" for line in lines]
    rows = [rf"\begin{{tabular}}{{{'l' * len(lines[0])}}}", r"\hline", head, r"\hline", *body, r"\hline"]
    return "\n".join([*rows, r"\end{tabular}"])


def cell(seeds: dict[str, Rows], base: dict[str, Rows], metric: str) -> str:
    """A metric's mean and range over seeds, its paired difference from the base's seeds, and p."""
    values = {seed: value for seed, rows in seeds.items() if (value := value_of(rows, metric)) is not None}
    if not values:
        return ""
    of = ".3f" if max(map(abs, values.values())) >= 0.05 else ".3g"  # a gradient's norm, or a KL
    text = f"{statistics.mean(values.values()):{of}}"
    if len(values) > 1:
        text += f" ({min(values.values()):{of}} to {max(values.values()):{of}})"
    of_base = {seed: value_of(base[seed], metric) for seed in base.keys() & values.keys()}
    differences = [values[seed] - value for seed, value in sorted(of_base.items()) if value is not None]
    if len(differences) < 2:
        return text
    mean, low, high = paired_interval(differences)
    text += f", {mean:+{of}} [{low:+{of}}, {high:+{of}}]"
    if len(differences) < len(values):
        text += f" in {len(differences)} shared seeds"
    return text + (f", p {sign_flip_p(differences):.3f}" if FEWEST_FOR_P <= len(differences) <= 16 else "")


def mean_rows(runs: Sequence[Rows], metric: str) -> Rows:
    """The mean over runs at the steps that all of them have, with the range as metric/low and metric/high."""
    curves = [{row["training/global_step"]: row[metric] for row in rows if metric in row} for rows in runs]
    rows = []
    for step in sorted(set.intersection(*map(set, curves))):
        values = [curve[step] for curve in curves]
        low, high = f"{metric}/low", f"{metric}/high"
        rows.append(
            {"training/global_step": step, metric: statistics.mean(values), low: min(values), high: max(values)}
        )
    return rows


def overlay(runs: dict[str, Rows], metrics: Sequence[str] | None, path: str | Path) -> None:
    """Write the picture of `metrics`, or for None of the metrics that the runs' own curves show.

    runs: {label: rows of metrics.jsonl}; those of one group are drawn as their mean, with a band from min to max.

    Raises:
        ValueError: no run has one of the metrics.
    """
    if metrics is None:
        every_row = [row for rows in runs.values() for row in rows]
        metrics = [name for wanted in PANELS.values() for name in drawn_metrics(every_row, wanted)]
    panels: dict[str, list[tuple[str, str, Rows, str]]] = {}
    for name in metrics:
        panels[name] = []
        for number, (group, seeds) in enumerate(by_group(runs).items()):
            having = {seed: rows for seed, rows in seeds.items() if any(name in row for row in rows)}
            if len(having) > 1:
                label = f"{group}, {len(having)} seeds"
                panels[name].append((label, name, mean_rows(list(having.values()), name), f"C{number}"))
            for seed, rows in having.items() if len(having) == 1 else ():
                panels[name].append((f"{group}-seed{seed}" if seed else group, name, rows, f"C{number}"))
        if not panels[name]:
            raise ValueError(f"no run has the metric {name}")
    draw_panels(panels, path)


def free_name(path: Path) -> Path:
    """The path, or path-2, path-3, ... where files of the names before are there."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(file for file in itertools.chain([path], numbered) if not file.exists())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or patterns of them in quotes")
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="the seeds to compare with")
    parser.add_argument("--metric", nargs="+", metavar="NAME")
    parser.add_argument("--step", type=int, help="take the table's values from this training step")
    parser.add_argument("--latex", action="store_true", help="print the table for LaTeX")
    parser.add_argument("--output", help=f"the picture's file (default: {PICTURE}, or -2, -3 ...)")
    args = parser.parse_args(argv)
    output = Path(args.output) if args.output else free_name(Path(PICTURE))
    replaces = output.exists()
    try:
        folders, base_folders = find_folders(args.runs), find_folders(args.against)
        labels = labels_of([*folders, *base_folders])  # which tell runs of one name in two places apart
        runs = {label: read_metrics(folder) for label, folder in zip(labels, folders, strict=False)}
        against = {
            label: read_metrics(folder) for label, folder in zip(labels[len(folders) :], base_folders, strict=True)
        }
        name_other_code(dict(zip(labels, [*folders, *base_folders], strict=True)))
        every_row = [row for rows in (runs | against).values() for row in rows]
        metrics = args.metric or comparable_metrics(drawn_metrics(every_row, ("val/",)), [*folders, *base_folders])
        if args.step is None:
            name_shorter(against | runs)
        of_step, against_of_step = (at_step(some, args.step, metrics) for some in (runs, against))
        table = comparison_table(of_step, against_of_step, metrics)
        print(as_latex(table) if args.latex else as_markdown(table))
        output.parent.mkdir(parents=True, exist_ok=True)
        overlay(against | runs, args.metric, output)
    except (OSError, ValueError) as error:
        sys.exit(f"tools.compare: error: {error}")
    print(f"{output} (replaced)" if replaces else output)


if __name__ == "__main__":
    main()
