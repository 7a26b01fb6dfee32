"""Steps of two runs, in turn on the same machine: how much longer one takes than the other, as a ratio.

    python benchmarks/step_pairs.py engines    # the default run: --rollout vllm beside --rollout local
    python benchmarks/step_pairs.py window     # ten steps: MixGRPO's window of 2, at each of its positions, beside
                                               # Flow-GRPO, which trains all but the last
    python benchmarks/step_pairs.py window_alone    # the same with a reward that takes no time
    python benchmarks/step_pairs.py ranks      # the default step, --rollout local, of two ranks beside one
    python benchmarks/step_pairs.py gather     # of two ranks, ten steps: weights gathered once to sample, beside a
                                               # block at a time in every pass

A run's first step is not counted. Of the others the mean is taken, so that each position of the window counts once, and
the engine's start, evaluations and checkpoints are no part of it. Prints a table for docs/lab/performance.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEN_STEPS = ["--rollout", "local", "--num_inference_steps", 10]
EVERY_POSITION = ["--sde_window_size", 2, "--sde_window_range", 0, 9, "--iters_per_group", 1]
NO_TIME = ["--reward", "jpeg_compressibility"]  # to score an image: what is left is rollout and update
BY_BLOCK = ["--gather_for_sampling", False]
COMPARED = {
    # name: [(label, ranks, script, number of steps, options) of the first, of the second]
    "engines": [
        ("vllm", 1, "flow_grpo.py", 5, ["--rollout", "vllm"]),
        ("local", 1, "flow_grpo.py", 5, ["--rollout", "local"]),
    ],
    "window": [
        # starts 0 to 7, one rollout at each; the ninth step is at 0 again, in place of the first
        ("mix_grpo.py", 1, "mix_grpo.py", 9, [*TEN_STEPS, *EVERY_POSITION]),
        ("flow_grpo.py", 1, "flow_grpo.py", 3, [*TEN_STEPS, "--sde_window_size", 0]),
    ],
    "window_alone": [
        ("mix_grpo.py", 1, "mix_grpo.py", 9, [*TEN_STEPS, *EVERY_POSITION, *NO_TIME]),
        ("flow_grpo.py", 1, "flow_grpo.py", 3, [*TEN_STEPS, "--sde_window_size", 0, *NO_TIME]),
    ],
    "ranks": [
        ("2 ranks", 2, "flow_grpo.py", 5, ["--rollout", "local", "--micro_batch_size", 32]),
        ("1 rank", 1, "flow_grpo.py", 5, ["--rollout", "local"]),
    ],
    "gather": [
        ("once", 2, "flow_grpo.py", 5, [*TEN_STEPS, *NO_TIME, "--micro_batch_size", 32]),
        ("every pass", 2, "flow_grpo.py", 5, [*TEN_STEPS, *NO_TIME, "--micro_batch_size", 32, *BY_BLOCK]),
    ],
}


def mean_step(folder, ranks, script, num_steps, options):
    """Run a script. Returns the mean of its steps but the first: {"rollout": s, "update": s, "step": s}."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    command += [ROOT / script, "--name", "run", "--num_steps", num_steps, *options]
    command += ["--eval_every", 10_000, "--max_prompts", 2]
    subprocess.run(["rm", "-rf", Path(folder) / "runs"], check=True)
    subprocess.run([*map(str, command)], cwd=folder, check=True, stdout=sys.stderr)
    rows = map(json.loads, (Path(folder) / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if "actor/loss" in row][1:]
    rollout = statistics.mean(row["timing_s/gen"] + row["timing_s/reward"] for row in steps)
    update = statistics.mean(row["timing_s/update_actor"] + row["timing_s/update_weights"] for row in steps)
    return {"rollout": rollout, "update": update, "step": statistics.mean(row["timing_s/step"] for row in steps)}


def main(options):
    compared = COMPARED[options.compared]
    runs = {label: [] for label, *_ in compared}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.pairs):
            for label, *command in compared:
                runs[label].append(mean_step(folder, *command))
                print(label, json.dumps(runs[label][-1]), file=sys.stderr, flush=True)

    first, second = runs
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    print(
        f"\n{options.compared}, commit {git.stdout.strip()}, cores: {len(os.sched_getaffinity(0))}; seconds of a step,"
    )
    print(f"medians of {options.pairs} runs; of the ratios pair by pair: median [all]\n")
    print(f"| phase | {first} | {second} | {first} / {second} |\n|---|---|---|---|")
    for phase in ("rollout", "update", "step"):
        medians = [f"{statistics.median(run[phase] for run in runs[label]):.2f}" for label in runs]
        ratios = [a[phase] / b[phase] for a, b in zip(runs[first], runs[second], strict=True)]
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {phase} | {' | '.join(medians)} | {statistics.median(ratios):.2f} [{listed}] |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compared", choices=COMPARED)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each, in turn")
    main(parser.parse_args())
