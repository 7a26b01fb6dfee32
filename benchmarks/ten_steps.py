"""An earlier setting of docs/lab/comparison.md: ten steps, all but the last trained, larger noise and learning rate.

    python benchmarks/ten_steps.py docs/lab/records/ten_steps.jsonl --core 0 --seeds 1 2       # the runs that it lacks
    python benchmarks/ten_steps.py docs/lab/records/ten_steps.jsonl --core 1 --seeds 3         # beside it
    python benchmarks/ten_steps.py docs/lab/records/ten_steps.jsonl --table docs/lab/records/ten_steps.png

The embedded model and its OCR reward; 128 images a rollout, each run on one core. Besides OCR every evaluation asks two
rewards that no run is trained on: the sign's colour, and its size as a JPEG. A run is runs/ten_steps-NAME-seedSEED. It
resumes where it was interrupted, and becomes a JSON line of the record once it is done; with a larger --num_rollouts it
resumes from there, and becomes a line of its own. dpo_offline.py makes its pairs of as many images as 30 rollouts have.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
COLOUR = "assets/sign_colour.py:sign_colour"
IMAGES = 128  # of a rollout
COMMON = ["--num_inference_steps", 10, "--eval_num_inference_steps", 10, "--learning_rate", 2e-3]
COMMON += ["--max_prompts", 128, "--eval_images_per_prompt", 2, "--eval_reward", COLOUR, "jpeg_compressibility"]
ONLINE = ["--rollout", "local", "--num_prompts", 16, "--group_size", 8, "--eval_every", 5]
NOISE = ["--noise_level", 1.0]
ALL_STEPS = ["--sde_window_size", 0]  # but the last
SETTINGS = {
    "flow_grpo": ["flow_grpo.py", *ONLINE, *NOISE, *ALL_STEPS],
    "cps": ["flow_grpo.py", *ONLINE, *ALL_STEPS, "--sde_type", "cps", "--noise_level", 0.9, "--clip_range", 1e-4],
    "grpo_guard": ["grpo_guard.py", *ONLINE, *NOISE, *ALL_STEPS],
    "dppo": ["contrib.flow_dppo", *ONLINE, *NOISE, *ALL_STEPS],
    "mix_grpo": ["mix_grpo.py", *ONLINE, *NOISE, "--sde_window_size", 2, "--sde_window_range", 0, 9]
    + ["--iters_per_group", 5],
    "diffusion_nft": ["diffusion_nft.py", *ONLINE],
    "dpo_offline": ["dpo_offline.py", "--num_pair_prompts", 480, "--group_size", 8, "--eval_every", 10],
}
SERIES = {  # name: metric, of each step
    "reward": "critic/rewards/mean",
    "ratio_mean": "actor/ratio_mean",
    "clipped_above": "actor/pg_clipfrac_higher",
    "clipped_below": "actor/pg_clipfrac_lower",
}
HELD_OUT = {  # name: metric, of each evaluation, with the digits of the table
    "ocr": ("val/ocr/mean", 3),
    "sign_colour": ("val/sign_colour/mean", 2),
    "jpeg_compressibility": ("val/jpeg_compressibility/mean", 4),
    "diversity": ("val/diversity", 3),
    "drift": ("val/drift_from_base", 2),
}


# ---- runs ------------------------------------------------------------------------------------------------------------
def train(script, name, seed, num_steps, options, core):
    """The folder of a run that is done. script: a file of the root, or a module of contrib/."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = [script] if script.endswith(".py") else ["-m", script]
    options = ["--name", name, "--seed", seed, "--num_steps", num_steps, "--resume", "latest", *options]
    os.sched_setaffinity(0, {core})  # what is started inherits it, and takes one thread
    subprocess.run([*map(str, [*launcher, *program, *options])], cwd=ROOT, check=True)
    return ROOT / "runs" / name


def read_record(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(run, name, seed):
    """The line of a run: its last step, what each step and each evaluation gave, at how many images and seconds."""
    args = json.loads((run / "args.json").read_text())
    images, seconds, steps, evaluations = 0, 0.0, [], []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row["training/global_step"]
        images = IMAGES * (30 if name == "dpo_offline" else step)
        seconds += sum(row.get(f"timing_s/{phase}", 0.0) for phase in ("step", "make_pairs", "encode_pairs"))
        if "timing_s/step" in row:
            steps.append({key: row.get(metric) for key, metric in SERIES.items()})
        if "val/ocr/mean" in row:
            values = {key: row[metric] for key, (metric, _) in HELD_OUT.items()}
            evaluations.append({"step": step, "images": images, "seconds": round(seconds, 1)} | values)
    return {
        "name": name,
        "seed": seed,
        "num_steps": step,
        "git_hash": args["git_hash"],
        "evaluations": evaluations,
        "steps": steps,
    }


# ---- table and picture -----------------------------------------------------------------------------------------------
def spread(values, digits):
    """The mean, and the range in brackets."""
    if any(value is None for value in values):
        return f"{sum(value is not None for value in values)} of {len(values)} reach it"
    low = min(values)
    high = max(values)
    return f"{statistics.mean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def print_table(rows):
    header, *others = rows
    for row in (header, ["---"] * len(header), *others):
        print(f"| {' | '.join(row)} |")
    print()


def longest_runs(path):
    """{name: [line of each seed]}, of a seed's lines the one with most steps."""
    lines = read_record(path)
    runs = {(line["name"], line["seed"]): line for line in sorted(lines, key=lambda line: line["num_steps"])}
    of_names = {name: [line for (of, _), line in sorted(runs.items()) if of == name] for name in SETTINGS}
    return {name: lines for name, lines in of_names.items() if lines}


def first(line, column, threshold):
    """Images or seconds of the first evaluation whose reward is at least the threshold, or None."""
    return next((point[column] for point in line["evaluations"] if point["ocr"] >= threshold), None)


def reward_at(line, seconds):
    """The held-out reward after so many seconds of training, between the two evaluations that it lies between; of
    dpo_offline.py, whose pairs come first, that before training."""
    before = [point for point in line["evaluations"] if point["seconds"] <= seconds][-1:]
    after = [point for point in line["evaluations"] if point["seconds"] > seconds][:1]
    if not before or not after:
        return (before + after)[0]["ocr"]
    before = before[0]
    share = (seconds - before["seconds"]) / (after[0]["seconds"] - before["seconds"])
    return before["ocr"] + share * (after[0]["ocr"] - before["ocr"])


def show(runs, threshold, at_seconds):
    """Where the runs end; how soon they reach a reward, and where they are after the same seconds; their ratios."""
    rows = [["", *HELD_OUT]]
    before = runs["flow_grpo"][0]["evaluations"][0]
    rows.append(["before", *(f"{before[key]:.{digits}f}" for key, (_, digits) in HELD_OUT.items())])
    for name, lines in runs.items():
        last = [line["evaluations"][-1] for line in lines]
        cells = [spread([point[key] for point in last], digits) for key, (_, digits) in HELD_OUT.items()]
        rows.append([f"{name}, {lines[0]['num_steps']} steps", *cells])
    print_table(rows)

    rows = [["", "seconds a step", f"images to {threshold}", f"seconds to {threshold}", f"after {at_seconds} s"]]
    for name, lines in runs.items():
        rates = [line["evaluations"][-1]["seconds"] / line["num_steps"] for line in lines]
        cells = [spread([first(line, column, threshold) for line in lines], 0) for column in ("images", "seconds")]
        rows.append([name, spread(rates, 1), *cells, spread([reward_at(line, at_seconds) for line in lines], 3)])
    print_table(rows)

    rows = [["", "ratio_mean - 1, first rollout", "later rollouts", "clipped above", "clipped below"]]
    for name, lines in runs.items():
        if lines[0]["steps"][0]["ratio_mean"] is None:
            continue
        drift = [f"{spread([1e4 * (line['steps'][0]['ratio_mean'] - 1) for line in lines], 2)} e-4"]
        later = [statistics.mean(step["ratio_mean"] - 1 for step in line["steps"][1:]) for line in lines]
        drift.append(f"{spread([1e4 * value for value in later], 2)} e-4")
        for key in ("clipped_above", "clipped_below"):
            drift.append(spread([statistics.mean(step[key] for step in line["steps"]) for line in lines], 3))
        rows.append([name, *drift])
    print_table(rows)


def draw(runs, path):
    """Reward by images and by seconds, the colour that is not trained on by images, and the ratio's mean by rollouts:
    the mean over seeds as a line, at their median seconds, and their range as a shade."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    panels = [("images", "ocr"), ("seconds", "ocr"), ("images", "sign_colour")]
    for number, (name, lines) in enumerate(runs.items()):
        colour = f"C{number}"
        for axis, (across, up) in zip(axes.flat, panels, strict=False):
            points = list(zip(*(line["evaluations"] for line in lines), strict=False))  # of the seeds, by evaluation
            x = [statistics.median(point[across] for point in seeds) for seeds in points]
            y = [[point[up] for point in seeds] for seeds in points]
            axis.plot(x, list(map(statistics.mean, y)), "o-", markersize=3, color=colour, label=name)
            axis.fill_between(x, list(map(min, y)), list(map(max, y)), color=colour, alpha=0.15, linewidth=0)
            axis.set(xlabel=across, ylabel=f"held-out {up}")
        if lines[0]["steps"][0]["ratio_mean"] is not None:
            steps = zip(*(line["steps"] for line in lines), strict=False)  # of the seeds, by rollout
            ratios = [1e4 * (statistics.mean(step["ratio_mean"] for step in seeds) - 1) for seeds in steps]
            axes[1, 1].plot(range(1, len(ratios) + 1), ratios, color=colour, label=name)
    axes[1, 1].set(xlabel="rollouts", ylabel="(mean ratio - 1) x 1e4")
    axes[0, 1].set(xlabel="seconds of training, one core")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), fontsize="small"
    )
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--table", type=Path, metavar="PNG", help="draw the picture, and print the tables")
    parser.add_argument("--num_rollouts", type=int, default=30)
    parser.add_argument("--names", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args()
    if args.table:
        runs = longest_runs(args.record)
        show(runs, threshold=0.8, at_seconds=150)
        draw(runs, args.table)
        return
    for seed in args.seeds:
        for name in args.names:
            num_steps = 40 if name == "dpo_offline" else args.num_rollouts
            record = read_record(args.record)  # another process may append to it
            if (name, seed, num_steps) in [(line["name"], line["seed"], line["num_steps"]) for line in record]:
                continue
            script, *options = SETTINGS[name]
            run = train(script, f"ten_steps-{name}-seed{seed}", seed, num_steps, [*COMMON, *options], args.core)
            line = measure(run, name, seed)
            with open(args.record, "a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
