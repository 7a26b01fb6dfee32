"""The statistics, the tables and the picture of benchmarks/comparison.py, from its record alone.

    python -m benchmarks.comparison_table docs/lab/records/comparison.jsonl    # prints; draws comparison_curves.png

Fixed before the first run: the reward after the last rollout, by the ODE, is tested. A row's seeds are paired with
Flow-GRPO's, as they have the same prompts and noise. Four rows of eight seeds are tested by sign flips, with Holm's
correction over these four; every row has a 95 % interval of the paired differences, by Student's t. Intervals are not
corrected. "Images (seconds) needed" is the share of Flow-GRPO's after which the mean of a row's seeds stays at
Flow-GRPO's last mean or above; this came after the first 19 runs. A learning rate or threshold at an end of its three
is marked with *; a trust region that could not be matched, with its divergence over Flow-GRPO's at the shipped
threshold.
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
    LEARNING_RATES,
    ROWS,
    TESTED,
    UPDATES,
    chosen,
    lines_of,
    matched,
    read_record,
)
from tools.compare import paired_interval, sign_flip_p

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


# ---- statistics ------------------------------------------------------------------------------------------------------
def holm(p_values):
    """{name: adjusted p}: the k-th smallest of m times m - k + 1, never below the one before, at most 1."""
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = largest
    return adjusted


# ---- table and picture -----------------------------------------------------------------------------------------------
def runs_of(record, row):
    """A row's runs, whose `seconds` are its seeds' median seconds of a step times the steps, as a machine is shared.

    Offline DPO's pairs come before its first evaluation; their seconds are the median over seeds as well.
    """
    runs = lines_of(record, "run", row)
    a_step = statistics.median([step["seconds"] for run in runs for step in run["steps"]] or [0.0])
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


def values_of(record, row, what, seconds):
    """{seed: value} of a row: a held-out metric at the end; "noisy": the reward by training's steps; "seconds": after
    `seconds` of training."""
    lines = runs_of(record, row)
    if what == "noisy":  # only where training has noise in the steps
        return {line["seed"]: line["ocr"] for line in lines_of(record, "evaluate", row) if line["seed"]}
    if what == "seconds":
        return {line["seed"]: at_seconds(line, seconds) for line in lines}
    return {line["seed"]: line["evaluations"][-1][what] for line in lines}


def paired_differences(record, row, what, seconds):
    """A row's values minus Flow-GRPO's, of the seeds that both have."""
    own, base = (values_of(record, name, what, seconds) for name in (row, BASE))
    return [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]


def cell(record, row, what, seconds, digits):
    """The mean, and the difference from Flow-GRPO with its interval."""
    values = values_of(record, row, what, seconds)
    if not values:
        return ""
    text = f"{statistics.mean(values.values()):.{digits}f}"
    differences = paired_differences(record, row, what, seconds)
    if row == BASE or len(differences) < 2:
        return text
    mean, low, high = paired_interval(differences)
    return f"{text}, {mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def adjusted_p(record):
    """{row: p} of the tested rows, of the ODE reward at the end. Empty before all of their pairs are recorded."""
    pairs = {row: paired_differences(record, row, "ocr", 0) for row in TESTED}
    if any(len(differences) < ROWS[BASE]["seeds"] for differences in pairs.values()):
        return {}
    return holm({row: sign_flip_p(differences) for row, differences in pairs.items()})


def row_name(record, row):
    failed = sum(line["failed"] for line in lines_of(record, "run", row))
    return row + (" (apart)" if ROWS[row]["is_apart"] else "") + (f", {failed} failed" if failed else "")


def choice(record, row):
    """A row's learning rate, and the threshold of its trust region; * where it is the first or last of the three."""
    learning_rate, threshold = chosen(record, row)
    text = f"{learning_rate:g}" + ("*" if learning_rate in (min(LEARNING_RATES), max(LEARNING_RATES)) else "")
    if not threshold:
        return text
    middle, ratio, is_near = matched(record, row)
    text += f", {threshold:g}" + ("" if math.isclose(threshold, middle) else "*")
    why = "its run failed" if ratio is None else f"the shipped one allows {ratio:.2g} times Flow-GRPO's divergence"
    return text + ("" if is_near else f" (not matched: {why})")


def table_text(record):
    """Four Markdown tables of a line for each row: rewards; what they cost; other held-out values; every seed."""
    rows = [row for row in ROWS if lines_of(record, "run", row)]
    together = [line for row in rows if not ROWS[row]["is_apart"] for line in runs_of(record, row)]
    whole = [line for line in together if not line["failed"]]  # a failed run is short, not quick
    seconds = min((line["evaluations"][-1]["seconds"] for line in whole), default=0.0)
    p_values = adjusted_p(record)
    start = lines_of(record, "run", rows[0])[0]["evaluations"][0]
    held_out = list(HELD_OUT.items())[1:]

    rewards = [["", "reward by the ODE", "p (Holm)", "by training's noisy steps", "before training, noisy"]]
    rewards += [["before training", f"{start['ocr']:.3f}", "", "", ""]]  # the other columns differ between rows
    costs = [["", "learning rate, threshold", "seconds", f"reward after {seconds:.0f} s"]]
    costs[0] += ["images needed", "seconds needed"]
    others = [["", *(key for key, _ in held_out), "sign_colour at Flow-GRPO's reward"]]
    others += [["before training", *(f"{start[key]:.{digits}f}" for key, (_, digits) in held_out), ""]]
    seeds = [["", "by the ODE", "by training's noisy steps"]]
    for row in rows:
        name = row_name(record, row)
        p = f"{p_values[row]:.3f}" if row in p_values else ""
        starts = [line["ocr"] for line in lines_of(record, "evaluate", row) if line["seed"] == 0]
        before = f"{starts[0]:.3f}" if starts else ""
        rewards.append([name, cell(record, row, "ocr", 0, 3), p, cell(record, row, "noisy", 0, 3), before])
        in_all = max(line["evaluations"][-1]["seconds"] for line in runs_of(record, row))
        costs.append([name, choice(record, row), f"{in_all:.0f}", cell(record, row, "seconds", seconds, 3)])
        costs[-1] += [share_needed(record, row, across) for across in ("images", "seconds")]
        others.append([name, *(cell(record, row, key, 0, digits) for key, (_, digits) in held_out)])
        others[-1].append(told(at_base_reward(record, row, "sign_colour"), 2))
        each = [values_of(record, row, what, 0) for what in ("ocr", "noisy")]
        seeds.append([name, *(" ".join(f"{values[seed]:.3f}" for seed in sorted(values)) for values in each)])
    tables = ([table[0], ["---"] * len(table[0]), *table[1:]] for table in (rewards, costs, others, seeds))
    return "\n".join("".join(f"| {' | '.join(cells)} |\n" for cells in table) for table in tables)


def draw(record, path):
    """Reward by images and by seconds; reward, held-out rewards and diversity by drift. Thin: seeds; thick: means."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
    panels = [("images", "ocr"), ("seconds", "ocr"), ("drift", "ocr")]
    panels += [("drift", key) for key in ("sign_colour", "jpeg_compressibility", "diversity")]
    rows = [row for row in ROWS if lines_of(record, "run", row)]
    for number, row in enumerate(rows):  # ten rows and ten colours; the two that stand apart come last
        lines = runs_of(record, row)
        style = {"color": f"C{number}", "linestyle": "-"}
        if ROWS[row]["is_apart"]:
            style = {"color": "black", "linestyle": "--" if row == "online_dpo" else ":"}
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
    figure.legend(handles, labels, loc="outside lower center", ncols=len(rows), fontsize="small")
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
