"""Where do proxy and truth part? Scenes, trained on NanoDet's soft score and watched by a judge that no run trains on.

    python -m benchmarks.scenes_hacking RECORD --cores 0 1    # every run that RECORD lacks, one on each core
    python -m benchmarks.scenes_hacking RECORD --table        # its table, of docs/lab/scenes_hacking.md

RECORD is docs/lab/records/scenes_hacking.jsonl, a line for each finished run. Two algorithms, three strengths of KL,
two seeds: the runs of benchmarks/scenes_comparison.py, at the learning rates that were chosen there, with evaluations
every five rollouts by GenEval's rules with NanoDet and with the judge of benchmarks/scenes_judge.py. `exact` is the
truth: what is asked, and nothing else.
"""

import argparse
import json
import os
from pathlib import Path

from benchmarks import scenes_comparison
from benchmarks.comparison import RUNS, make_job, read_record, work_through
from benchmarks.scenes_comparison import ROLLOUTS, SETTINGS
from tools.compare import as_markdown

SEEDS, EVAL_EVERY = (1, 2), 5
RATES = {"flow_grpo": 3e-3, "diffusion_nft": 3e-4}  # as scenes_comparison.py chose
KLS = {"flow_grpo": (0.0, 0.02, 0.1), "diffusion_nft": (0.0, 0.1, 1.0)}  # their KLs have scales of their own
JUDGE = "benchmarks/scenes_judge.py:second_judge"
SCORES = {  # of an evaluation, and what the log calls them
    "geneval.soft": "val/geneval.soft/mean",
    "geneval": "val/geneval/mean",
    "judge.soft": "val/second_judge/soft",
    "judge": "val/second_judge/mean",
    "exact": "val/second_judge/exact",
    "drift": "val/drift_from_base",
    "diversity": "val/diversity",
}


def jobs():
    return [
        make_job(f"kl{kl:g}", ROLLOUTS, row, seed, rate)
        for seed in SEEDS
        for row, rate in RATES.items()
        for kl in KLS[row]
    ]


def folder_name(job):
    return f"hacking-{job['row']}-{job['stage']}-seed{job['seed']}"


def command_of(job, name):
    """A run of the comparison with a KL, and with two judges more often."""
    words = scenes_comparison.command_of(job, name)
    words += ["--kl_coef", job["stage"].removeprefix("kl"), "--eval_every", str(EVAL_EVERY)]
    return [*words, "--eval_reward", "geneval", JUDGE]


def measure(folder):
    """The scores of each evaluation of a run, and after how many rollouts."""
    evaluations = []
    steps = 0
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        steps += "timing_s/step" in line
        if SCORES["exact"] in line:
            evaluations.append({"step": steps} | {key: line[name] for key, name in SCORES.items() if name in line})
    if not evaluations:
        raise RuntimeError(f"{folder}/metrics.jsonl: no evaluation has {SCORES['exact']}")
    git_hash = json.loads((folder / "args.json").read_text())["git_hash"]
    return {"git_hash": git_hash, "evaluations": evaluations}


def train(job, path, core):
    name = folder_name(job)
    code = scenes_comparison.run_or_resume(command_of(job, name), name, core)
    line = job | {"failed": bool(code)} | measure(RUNS / name)
    if not code and line["evaluations"][-1]["step"] != job["rollouts"]:  # SIGTERM lets a run save
        raise RuntimeError(f"{name}: it was stopped: start this again")
    return line


def print_table(path):
    """A line for each evaluation of each run."""
    rows = [["", "KL", "seed", "step", "geneval.soft", "geneval", "judge", "exact", "drift"]]
    for line in read_record(path):
        told = [line["row"], line["stage"].removeprefix("kl"), str(line["seed"])]
        for at in line["evaluations"]:
            scores = [f"{at[key]:.3f}" for key in ("geneval.soft", "geneval", "judge", "exact")]
            rows.append([*told, str(at["step"]), *scores, f"{at.get('drift', 0.0):.3f}"])
            told = ["", "", ""]
    print(as_markdown(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--cores", nargs="+", type=int, default=[0, 1], help="one run on each")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return print_table(args.record)
    os.environ.update(SETTINGS)
    os.environ.pop("GENEVAL_CLIP", None)  # which would judge colours in place of the pixels
    return work_through(jobs(), args.record, args.cores, train, follow=lambda job: (), name=folder_name)


if __name__ == "__main__":
    main()
