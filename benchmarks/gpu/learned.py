"""What runs learned, a line each: held-out rewards, seconds of a step, the first ratio, memory.

python benchmarks/gpu/learned.py runs/bf16 runs/fp32
"""

import json
import statistics
import sys
from pathlib import Path

HELD_OUT = "val/geneval/mean"
RATIO = "actor/on_policy_ratio_mean"


def line_of(folder):
    """A run's line, for Markdown; of a run that ended before its first step, that it did."""
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [row for row in rows if "timing_s/step" in row]
    if not steps:
        return f"- {folder.name}: no step"
    told = [f"step {statistics.median(row['timing_s/step'] for row in steps):.2f} s"]
    rewards = [f"{row[HELD_OUT]:.3f}" for row in rows if HELD_OUT in row]
    if rewards:
        told.insert(0, f"held-out reward {', '.join(rewards)}")
    ratios = [(row[RATIO], row["actor/on_policy_ratio_std"]) for row in steps if RATIO in row]
    if ratios:
        off = [ratio for ratio in ratios if ratio != (1.0, 0.0)]
        told.append(f"first ratio exactly 1 in {len(ratios) - len(off)} of {len(ratios)} steps")
        told += [f"first one off: mean {mean}, deviation {std}" for mean, std in off[:1]]
    told.append(f"{steps[-1].get('perf/max_memory_gb', 0):.2f} GB")
    return f"- {folder.name}: {len(steps)} steps; {'; '.join(told)}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(line_of(Path(name)))
