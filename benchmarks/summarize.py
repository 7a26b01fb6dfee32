"""Tables from run folders, in Markdown: rewards and times to reach them, and where a training step's time goes.

    python benchmarks/summarize.py docs/records/flow_grpo-vllm-*

Seconds are of training alone, the sum of timing_s/step: starting the engine, evaluations and checkpoints are listed apart.
A threshold counts as reached at the first evaluation at or above it.
"""
import json
import statistics
import sys
from pathlib import Path

PHASES = ("gen", "reward", "adv", "old_log_prob", "update_actor", "update_weights")
THRESHOLDS = (0.90, 0.95)


def read_run(folder):
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    elapsed, curve = 0.0, []
    for row in rows:
        elapsed += row.get("timing_s/step", 0.0)
        if "val/ocr/mean" in row:
            curve.append((row["training/global_step"], elapsed, row["val/ocr/mean"], row["val/ocr/stderr"]))
    return rows, curve


def seconds_to(curve, threshold):
    return next((seconds for _, seconds, value, _ in curve if value >= threshold), None)


def show(value, digits=0):
    return "not reached" if value is None else f"{value:.{digits}f}"


def main(folders):
    runs = {Path(folder).name: read_run(folder) for folder in folders}
    print("| run | before | after (s.e.) | steps | training s | " + " | ".join(f"s to {t:.2f}" for t in THRESHOLDS) +
          " | one evaluation s | start-up s |\n|---" * 1 + "|---" * (6 + len(THRESHOLDS)) + "|")
    for name, (rows, curve) in runs.items():
        times = " | ".join(show(seconds_to(curve, t)) for t in THRESHOLDS)
        testing = statistics.median(row["timing_s/testing"] for row in rows if "timing_s/testing" in row)
        startup = rows[0].get("timing_s/startup")
        print(f"| {name} | {curve[0][2]:.3f} | {curve[-1][2]:.3f} ({curve[-1][3]:.3f}) | {curve[-1][0]} | {curve[-1][1]:.0f} | "
              f"{times} | {testing:.1f} | {show(startup)} |")
    finals = [curve[-1][2] for _, curve in runs.values()]
    print(f"\nfinal reward over {len(finals)} runs: mean {statistics.mean(finals):.3f}, worst {min(finals):.3f}; seconds to: " + "; ".join(
        f"{t:.2f}: " + ", ".join(show(seconds_to(curve, t)) for _, curve in runs.values()) for t in THRESHOLDS))
    print("\n| median s of a step | " + " | ".join(PHASES) + " | rest | step |\n|---" + "|---" * (len(PHASES) + 2) + "|")
    for name, (rows, _) in runs.items():
        steps = [row for row in rows if "timing_s/step" in row][1:]  # the first one warms up
        phases = [statistics.median(row[f"timing_s/{phase}"] for row in steps) for phase in PHASES]
        step = statistics.median(row["timing_s/step"] for row in steps)
        print(f"| {name} | " + " | ".join(f"{seconds:.2f}" for seconds in phases) + f" | {max(0, step - sum(phases)):.2f} | {step:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
