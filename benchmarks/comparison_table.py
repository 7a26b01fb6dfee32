"""The statistics, the tables and the picture of benchmarks/comparison.py, from its record alone.

    python -m benchmarks.comparison_table docs/lab/records/comparison.jsonl    # prints; draws comparison_curves.png

Fixed before the first run: the reward after the last rollout, by the ODE, is tested. A row's seeds are paired with
Flow-GRPO's, as they have the same prompts and noise. Four rows of eight seeds are tested by sign flips, with Holm's
correction over these four. Every difference has a 95 % interval over seeds, by Student's t: from before training, which
is one number, from Flow-GRPO, and from the row with the next lower reward. Intervals are not corrected. "Images
(seconds) needed" is the share of Flow-GRPO's after which the mean of a row's seeds stays at Flow-GRPO's last mean or
above; this came after the first 19 runs. A learning rate or threshold at an end of what tuning may try is marked with
*; a trust region that could not be matched, with its divergence over Flow-GRPO's at the shipped threshold.
"""

import argparse
import itertools
import math
import statistics
import sys
from pathlib import Path

from benchmarks.comparison import (
    BASE,
    HELD_OUT,
    IMAGES,
    RATES,
    ROWS,
    TESTED,
    UPDATES,
    WIDEST,
    chosen,
    lines_of,
    matched,
    read_record,
    thresholds_of,
)
from tools.compare import paired_interval, sign_flip_p

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = [*(f"C{i}" for i in range(10)), "teal", "gold", "navy"]  # the two rows that stand apart are black
FIRST_MACHINE = ("c6c8dfa", "e9841c6")  # commits of the runs there; later ones were made on faster machines


# ---- statistics ------------------------------------------------------------------------------------------------------
def holm(p_values):
    """{name: adjusted p}: the k-th smallest of m times m - k + 1, never below the one before, at most 1."""
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = largest
    return adjusted


# ---- table and picture -----------------------------------------------------------------------------------------------
def step_times(record, stage, row, is_first):
    """Seconds of a row's training steps on the first machine, or of those on later ones."""
    lines = [line for line in lines_of(record, stage, row) if "git_hash" in line]
    lines = [line for line in lines if line["git_hash"].startswith(FIRST_MACHINE) == is_first]
    return [step["seconds"] for line in lines for step in line["steps"]]


def step_seconds(record, row):
    """Median seconds of a training step on the first machine: of the row's runs, or of its tuning if they ran later.

    Learning rate and threshold do not change what a step costs. nan: the row never ran there. A record without any run
    from there is of one machine.
    """
    for stage in ("run", "tune"):
        first = step_times(record, stage, row, True)
        if first:
            return statistics.median(first)
    if any(step_times(record, "run", name, True) for name in ROWS):
        return math.nan
    return statistics.median(step_times(record, "run", row, False) or [0.0])


def runs_of(record, row):
    """A row's runs, whose `seconds` are its median seconds of a step times the steps, as the machines are shared.

    Offline DPO's pairs come before its first evaluation; their seconds are the median over seeds as well.
    """
    runs = lines_of(record, "run", row)
    a_step = step_seconds(record, row)
    before = statistics.median([run["evaluations"][0]["seconds"] for run in runs] or [0.0])
    updates = 1 if row == "dpo_offline" else UPDATES  # of a step
    count = lambda point: point | {"seconds": before + point["updates"] / updates * a_step}
    return [run | {"evaluations": [count(point) for point in run["evaluations"]]} for run in runs]


def at_seconds(line, seconds, key="ocr"):
    """A held-out value after so many seconds of training, linear between the two evaluations around it."""
    points = line["evaluations"]
    for before, after in itertools.pairwise(points):
        if before["seconds"] <= seconds <= after["seconds"]:
            share = (seconds - before["seconds"]) / (after["seconds"] - before["seconds"])
            return before[key] + share * (after[key] - before[key])
    return points[0 if seconds < points[0]["seconds"] else -1][key]  # offline DPO's pairs come before its first


def mean_curve(lines, *keys):
    """{key: its mean over runs at each evaluation}. A run that failed keeps the values of its last evaluation."""
    curves = [line["evaluations"] for line in lines]
    longest = max(curves, key=len)
    means = {key: [] for key in keys}
    for i in range(len(longest)):
        points = [curve[min(i, len(curve) - 1)] for curve in curves]
        for key in keys:
            is_effort = key in ("images", "seconds")
            means[key].append(longest[i][key] if is_effort else statistics.mean(point[key] for point in points))
    return means


def at_base_reward(record, row, key):
    """`key` (images, seconds, a held-out value) from where on a row's mean reward is at least Flow-GRPO's last one.

    Of the seeds that both have; linear between two evaluations, as the reward is. None: never.
    """
    base, own = shared_seeds(record, row)
    if not own:
        return None
    last = mean_curve(base, "ocr")["ocr"][-1]
    curve = mean_curve(own, key, "ocr")
    points = list(zip(curve[key], curve["ocr"], strict=True))
    if points[-1][1] < last:
        return None
    for (before, low), (after, high) in reversed(list(itertools.pairwise(points))):
        if low < last:
            return before + (last - low) / (high - low) * (after - before)
    return points[0][0]


def shared_seeds(record, row):
    """Flow-GRPO's runs and a row's, of the seeds that both have."""
    base, own = runs_of(record, BASE), runs_of(record, row)
    seeds = {line["seed"] for line in base} & {line["seed"] for line in own}
    return [line for line in base if line["seed"] in seeds], [line for line in own if line["seed"] in seeds]


def told(number, digits):
    return "never" if number is None else f"{number:.{digits}f}"


def share_needed(record, row, across):
    """The images or seconds that a row needs for Flow-GRPO's last mean reward, as a share of Flow-GRPO's; as text.

    Between the start and the first evaluation only a bound is known.
    """
    needed = at_base_reward(record, row, across)
    if needed is None:
        return "never"
    if row == "dpo_offline" and across == "images":
        return "1.00"  # all are made before the first optimizer step
    base, own = (mean_curve(lines, across)[across] for lines in shared_seeds(record, row))
    return f"< {own[1] / base[-1]:.2f}" if needed < own[1] else f"{needed / base[-1]:.2f}"


def values_of(record, row, what, seconds=0):
    """{seed: value} of a row: a held-out metric at the end; "noisy": the reward by training's steps; "seconds": after
    `seconds` of training."""
    lines = runs_of(record, row)
    if what == "noisy":  # only where training has noise in the steps
        return {line["seed"]: line["ocr"] for line in lines_of(record, "evaluate", row) if line["seed"]}
    if what == "seconds":
        return {line["seed"]: at_seconds(line, seconds) for line in lines}
    return {line["seed"]: line["evaluations"][-1][what] for line in lines}


def paired_differences(record, row, what, seconds=0, base=BASE):
    """A row's values minus Flow-GRPO's or another row's, of the seeds that both have."""
    own, others = (values_of(record, name, what, seconds) for name in (row, base))
    return [own[seed] - others[seed] for seed in sorted(own.keys() & others.keys())]


def interval(differences, digits):
    """Their mean with its 95 % interval, as text. Empty where there are fewer than two."""
    if len(differences) < 2:
        return ""
    mean, low, high = paired_interval(differences)
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def start_of(record, row, what):
    """A value before training, which all runs share; by noisy steps each row has its own. None: not recorded."""
    if what == "noisy":
        starts = [line["ocr"] for line in lines_of(record, "evaluate", row) if line["seed"] == 0]
        return starts[0] if starts else None
    return lines_of(record, "run", row)[0]["evaluations"][0][what]


def cell(record, row, what, digits):
    """The mean, and its difference from before training with the interval."""
    values = values_of(record, row, what)
    start = start_of(record, row, what)
    if not values:
        return ""
    mean = f"{statistics.mean(values.values()):.{digits}f}"
    if start is None:
        return mean
    change = interval([value - start for value in values.values()], digits)
    if not change:  # of one seed
        return mean
    return f"{mean}, {change}" if start else change  # drift starts at 0


def over_next(record, rows, row):
    """The row whose mean reward is the next lower one, and the difference from it with the interval."""
    rewards = {name: statistics.mean(values_of(record, name, "ocr").values()) for name in rows}
    lower = [name for name in rows if rewards[name] < rewards[row]]
    if not lower:
        return ""
    below = max(lower, key=rewards.get)
    return f"{below} {interval(paired_differences(record, row, 'ocr', base=below), 3)}"


def adjusted_p(record):
    """{row: p} of the tested rows, of the ODE reward at the end. Empty before all of their pairs are recorded."""
    pairs = {row: paired_differences(record, row, "ocr") for row in TESTED}
    if any(len(differences) < ROWS[BASE]["seeds"] for differences in pairs.values()):
        return {}
    return holm({row: sign_flip_p(differences) for row, differences in pairs.items()})


def row_name(record, row):
    failed = sum(line["failed"] for line in lines_of(record, "run", row))
    return row + (" (apart)" if ROWS[row]["is_apart"] else "") + (f", {failed} failed" if failed else "")


def choice(record, row):
    """A row's learning rate and threshold; * where it is the first or the last that widening may try."""
    learning_rate, threshold = chosen(record, row)
    if ROWS[row]["choice"]:
        return f"{learning_rate:g} (given)"
    thresholds = thresholds_of(record, row, WIDEST)
    text = f"{learning_rate:g}" + ("*" if learning_rate in (RATES[0], RATES[-1]) else "")
    if not threshold:
        return text
    _, ratio, is_near = matched(record, row)
    text += f", {threshold:g}" + ("*" if threshold in (thresholds[0], thresholds[-1]) else "")
    why = "its run failed" if ratio is None else f"the shipped one allows {ratio:.2g} times Flow-GRPO's divergence"
    return text + ("" if is_near else f" (not matched: {why})")


def table_text(record):
    """Five Markdown tables of a line for each row: against the start; against Flow-GRPO; what it took; every seed; and
    what tuning gave."""
    rows = [row for row in ROWS if lines_of(record, "run", row)]
    metrics = [("ocr", 3), ("noisy", 3), *((key, digits) for key, (_, digits) in list(HELD_OUT.items())[1:])]
    names = ["reward by the ODE", "by training's noisy steps", *(key for key, _ in metrics[2:])]
    p_values = adjusted_p(record)

    against_start = [["", *names]]
    starts = ["" if key == "noisy" else f"{start_of(record, rows[0], key):.{digits}f}" for key, digits in metrics]
    against_start.append(["before training", *starts])  # by noisy steps they differ between rows
    against_base = [["", names[0], "p (Holm)", *names[1:], "reward over the next lower row's"]]
    seeds = [["", *names[:2]]]
    for row in rows:
        name = row_name(record, row)
        against_start.append([name, *(cell(record, row, key, digits) for key, digits in metrics)])
        if row != BASE:
            differences = [interval(paired_differences(record, row, key), digits) for key, digits in metrics]
            p = f"{p_values[row]:.3f}" if row in p_values else ""
            against_base.append([name, differences[0], p, *differences[1:], over_next(record, rows, row)])
        each = [values_of(record, row, what) for what in ("ocr", "noisy")]
        seeds.append([name, *(" ".join(f"{values[seed]:.3f}" for seed in sorted(values)) for values in each)])
    every = (against_start, against_base, costs_of(record, rows), seeds, tuning_of(record))
    tables = ([table[0], ["---"] * len(table[0]), *table[1:]] for table in every)
    return "\n".join("".join(f"| {' | '.join(cells)} |\n" for cells in table) for table in tables)


def costs_of(record, rows):
    """What each row took, and where its curve reaches Flow-GRPO's reward. No seconds of a row that is not timed."""
    ends = {row: max(line["evaluations"][-1]["seconds"] for line in runs_of(record, row)) for row in rows}
    timed = [row for row in rows if not math.isnan(ends[row])]
    together = [row for row in timed if not ROWS[row]["is_apart"]]
    whole = [line for row in together for line in runs_of(record, row) if not line["failed"]]  # a failed run is short
    seconds = min((line["evaluations"][-1]["seconds"] for line in whole), default=0.0)
    table = [["", "learning rate, threshold", "seconds", f"reward after {seconds:.0f} s", "against Flow-GRPO's"]]
    table[0] += ["images needed", "seconds needed", "sign_colour at Flow-GRPO's reward"]
    for row in rows:
        in_all, after, difference, needed = "", "", "", ""
        if row in timed:
            in_all = f"{ends[row]:.0f}"
            after = f"{statistics.mean(values_of(record, row, 'seconds', seconds).values()):.3f}"
            difference = "" if row == BASE else interval(paired_differences(record, row, "seconds", seconds), 3)
            needed = share_needed(record, row, "seconds")
        table.append([row_name(record, row), choice(record, row), in_all, after, difference])
        table[-1] += [share_needed(record, row, "images"), needed, told(at_base_reward(record, row, "sign_colour"), 2)]
    return table


def tuning_of(record):
    """The last reward (and sign_colour) of each tuning run, a line for each threshold of a row; the choice is bold."""
    table = [["", "threshold (times the matched)", *(f"{rate:g}" for rate in RATES)]]
    for row in ROWS:
        if ROWS[row]["choice"]:
            continue
        tried = {(line["learning_rate"], line["threshold"]): line for line in lines_of(record, "tune", row)}
        for threshold in sorted({threshold for _, threshold in tried}, key=lambda value: value or 0):
            label = f"{threshold:g} ({threshold / matched(record, row)[0]:g})" if threshold else ""
            cells = []
            for rate in RATES:
                line = tried.get((rate, threshold))
                point = line["evaluations"][-1] if line and not line["failed"] else None
                text = f"{point['ocr']:.3f} ({point['sign_colour']:.2f})" if point else "failed" if line else ""
                cells.append(f"**{text}**" if (rate, threshold) == chosen(record, row) else text)
            table.append([row, label, *cells])
    return table


def draw(record, path):
    """Reward by images and by seconds; reward, held-out rewards and diversity by drift. Thin: seeds; thick: means."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
    panels = [("images", "ocr"), ("seconds", "ocr"), ("drift", "ocr")]
    panels += [("drift", key) for key in ("sign_colour", "jpeg_compressibility", "diversity")]
    rows = [row for row in ROWS if lines_of(record, "run", row)]
    colours = iter(COLOURS)
    for row in rows:
        lines = runs_of(record, row)
        if ROWS[row]["is_apart"]:
            style = {"color": "black", "linestyle": "--" if row == "online_dpo" else ":"}
        else:
            style = {"color": next(colours), "linestyle": "-"}
        for axis, (across, up) in zip(axes.flat, panels, strict=True):
            for line in lines:
                curve = mean_curve([line], across, up)
                axis.plot(curve[across], curve[up], **style, alpha=0.3, linewidth=0.6)
            mean = mean_curve(lines, across, up)
            axis.plot(mean[across], mean[up], "o", markersize=3, label=row, **style)
            axis.set(xlabel="drift from the start" if across == "drift" else across, ylabel=f"held-out {up}, ODE")
    axes[0, 0].set_xlabel(f"images sampled ({IMAGES // UPDATES} for each optimizer step)")
    axes[0, 1].set_xlabel("seconds of training, one core")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=(len(rows) + 1) // 2, fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    path = parser.parse_args().record
    record = read_record(path)
    if not lines_of(record, "run", BASE):
        sys.exit(f"{path}: has no run of {BASE} yet")
    print(table_text(record))
    draw(record, path.with_name(f"{path.stem}_curves.png"))


if __name__ == "__main__":
    main()
