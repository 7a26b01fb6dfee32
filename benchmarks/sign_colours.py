"""What becomes of the signs' colours, which OCR does not see: trained on OCR alone, with a reward for them, with a KL.

    python -m benchmarks.sign_colours docs/records/sign_colours.jsonl             # the runs that it lacks, in turn
    python -m benchmarks.sign_colours docs/records/sign_colours.jsonl --table     # what it holds, in Markdown

Three settings (SETTINGS), three seeds, one thread (--core). A run is runs/sign_colours-SETTING-seedSEED, goes on where
it was interrupted, and becomes a JSON line of the record once it is done, so that the campaign does, too. `off` is the
share of the held-out signs whose sign_colour is below .5: more than 32 of 255 off the colour that is asked for.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.comparison import print_table, spread

ROOT = Path(__file__).parents[1]
COLOUR = "assets/sign_colour.py:sign_colour"
SETTINGS = {
    "ocr": ["--eval_reward", COLOUR],
    "ocr-colour": ["--reward", "ocr", COLOUR, "--reward_weights", "1", "1"],
    "ocr-kl04": ["--eval_reward", COLOUR, "--kl_coef", "0.04"],
}
SEEDS = (1, 2, 3)
COLUMNS = {"ocr": 3, "sign_colour": 3, "off": 2, "drift": 3, "seconds": 0}  # of the table, with their digits


def train(script, name, seed, num_steps, options, core):
    """The folder of a run that is done."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", script, "--name", name, "--seed", seed]
    command += ["--num_steps", num_steps, "--resume", "latest", *options]
    os.sched_setaffinity(0, {core})  # of what is started, too, which then takes one thread
    subprocess.run([*map(str, command)], cwd=ROOT, check=True)
    return ROOT / "runs" / name


def measure(run, setting, seed):
    """The line of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    step = last["training/global_step"]
    samples = [json.loads(line) for line in (run / f"samples/{step:04d}/samples.jsonl").read_text().splitlines()]
    return {
        "setting": setting,
        "seed": seed,
        "steps": step,
        "git_hash": json.loads((run / "args.json").read_text())["git_hash"],
        "ocr": last["val/ocr/mean"],
        "sign_colour": last["val/sign_colour/mean"],
        "off": sum(sample["sign_colour"] < 0.5 for sample in samples) / len(samples),
        "drift": last["val/drift_from_base"],
        "seconds": sum(row.get("timing_s/step", 0.0) for row in rows),
        "before": {"ocr": rows[0]["val/ocr/mean"], "sign_colour": rows[0]["val/sign_colour/mean"]},
    }


def read_record(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(record):
    """The record as a table: mean over seeds, and their range."""
    before = record[0]["before"]
    rows = [["setting", "steps, seeds", *COLUMNS]]
    rows.append(["before", "", f"{before['ocr']:.3f}", f"{before['sign_colour']:.3f}", "", "", ""])
    for setting in SETTINGS:
        lines = [line for line in record if line["setting"] == setting]
        if lines:
            cells = [spread([line[name] for line in lines], digits) for name, digits in COLUMNS.items()]
            rows.append([setting, f"{lines[0]['steps']}, {len(lines)}", *cells])
    print_table(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--num_steps", type=int, default=30)
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args()
    record = read_record(args.record)
    if args.table:
        show(record)
        return
    done = {(line["setting"], line["seed"], line["steps"]) for line in record}
    for seed in SEEDS:
        for setting in SETTINGS:
            if (setting, seed, args.num_steps) in done:
                continue
            name = f"sign_colours-{setting}-seed{seed}"
            options = ["--rollout", "local", *SETTINGS[setting]]
            run = train("flow_grpo.py", name, seed, args.num_steps, options, args.core)
            line = measure(run, setting, seed)
            with open(args.record, "a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
