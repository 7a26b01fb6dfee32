"""Tables from recorded runs, in Markdown: rewards and times to reach them, and where a training step's time goes.

    python benchmarks/summarize.py docs/lab/records/flow_grpo-vllm-*          # run folders
    python benchmarks/summarize.py docs/lab/records/flow_grpo-window.jsonl    # a file of several runs

Seconds are of training alone, the sum of timing_s/step: start-up, evaluations and checkpoints are apart.
A threshold counts as reached at the first evaluation at or above it.
"""

import json
import statistics
import sys
from pathlib import Path

PHASES = ("gen", "reward", "adv", "old_log_prob", "update_actor", "update_weights")
THRESHOLDS = (0.90, 0.95)


def read_rows(path: str | Path) -> dict[str, list[dict]]:
    """{run: the rows of its metrics}, of a run folder, or of a .jsonl whose lines name their run."""
    path = Path(path)
    if path.is_dir():
        return {path.name: [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]}
    runs: dict[str, list[dict]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows = runs.setdefault(row.pop("run"), [])
        if "args.json" not in row:  # a run's first line holds its command and options
            rows.append(row)
    return runs


def read_curve(rows: list[dict]) -> list[tuple[int, float, float, float]]:
    """[(step, seconds of training, reward, its standard error)] at each evaluation."""
    elapsed = 0.0
    curve = []
    for row in rows:
        elapsed += row.get("timing_s/step", 0.0)
        if "val/ocr/mean" in row:
            curve.append((row["training/global_step"], elapsed, row["val/ocr/mean"], row["val/ocr/stderr"]))
    return curve


def seconds_to(curve, threshold):
    return next((seconds for _, seconds, value, _ in curve if value >= threshold), None)


def show(value, digits=0):
    return "not reached" if value is None else f"{value:.{digits}f}"


def table(header, rows):
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |")
    print()


def learning_row(name, metrics, curve):
    """How far a run came, and when."""
    testing = [row["timing_s/testing"] for row in metrics if "timing_s/testing" in row]
    before = curve[0][2]
    steps, seconds, reward, stderr = curve[-1]
    cells = [name, f"{before:.3f}", f"{reward:.3f} ({stderr:.3f})", str(steps), f"{seconds:.0f}"]
    for threshold in THRESHOLDS:
        cells.append(show(seconds_to(curve, threshold)))
    return [*cells, f"{statistics.median(testing):.1f}", show(metrics[0].get("timing_s/startup"))]


def timing_row(name, metrics):
    """Where the time of a step goes, in the median."""
    steps = [row for row in metrics if "timing_s/step" in row][1:]  # the first one warms up
    phases = []
    for phase in PHASES:
        phases.append(statistics.median(row.get(f"timing_s/{phase}", 0.0) for row in steps))  # 0: it has no such phase
    step = statistics.median(row["timing_s/step"] for row in steps)
    rest = max(0, step - sum(phases))
    return [name, *(f"{seconds:.2f}" for seconds in (*phases, rest, step))]


def main(paths):
    runs = {}
    for path in paths:
        for name, rows in read_rows(path).items():
            runs[name] = (rows, read_curve(rows))
    reached = [f"s to {threshold:.2f}" for threshold in THRESHOLDS]
    header = ["run", "before", "after (s.e.)", "steps", "training s", *reached, "one evaluation s", "start-up s"]
    table(header, [learning_row(name, *run) for name, run in runs.items()])

    finals = [curve[-1][2] for _, curve in runs.values()]
    print(f"final reward of {len(finals)} runs: mean {statistics.mean(finals):.3f}, worst {min(finals):.3f}\n")

    header = ["median s of a step", *PHASES, "rest", "step"]
    table(header, [timing_row(name, metrics) for name, (metrics, _) in runs.items()])


if __name__ == "__main__":
    main(sys.argv[1:])
