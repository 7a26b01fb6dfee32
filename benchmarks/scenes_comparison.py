"""The scripts on scenes of objects: each at the best of its learning rates, three or six seeds, GenEval's six parts.

    python -m benchmarks.scenes_comparison RECORD --cores 0 1       # every run that RECORD lacks, one on each core
    python -m benchmarks.scenes_comparison --plan                   # its hours, without a run
    python -m benchmarks.scenes_comparison RECORD --only mix_grpo --seed 2    # a run again: the same numbers?
    python -m benchmarks.scenes_comparison RECORD --table           # its tables

RECORD is docs/lab/records/scenes_comparison.jsonl, a line for each finished run. The first command resumes where it
stopped. The design, docs/lab/scenes.md ("The scripts on scenes"), is the constants below. Stages, in order:

  tune      each of RATES, half the rollouts, one seed, on prompts of training; then the neighbour of a choice at the
            edge, so that a row has four trials at most
  run       the choice, by the reward of tuning alone, seed by seed; right after it tools.bench scores its policy, and
            the model before training: every held-out prompt, two images each

The detector and the VAE compute in bf16, which wants a CPU with AMX.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.comparison import NOT_FINITE, RUNS, child, make_job, neighbours, read_record, work_through
from benchmarks.from_nothing import RL, as_words
from tools.compare import as_markdown, comparison_table

# ---- the design, fixed before the first run, but for SEEDS: three until the table of three had been seen -------------
SEEDS, OF_CONTRIB, TUNE_SEED = 6, 3, 100  # the runs of a row of the root, and of contrib
ROLLOUTS, IMAGES, UPDATES = 30, 128, 2  # of a run; of a rollout, images and optimizer steps
RATES, WIDEST = (3e-4, 1e-3, 3e-3), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # tuned; as far as a choice at the edge may go
NUM_PROMPTS, EVAL_EVERY = 192, 15  # of evaluations while training; held-out ones, when tuning the first of training
SCENES = {"train": "assets/scenes_train.jsonl", "held_out": "assets/scenes_eval.jsonl"}
MODEL = "--model assets/embedded_scenes --image_size 128 128 --max_sequence_length 16"
REWARD, RIGHT = "geneval.soft", "geneval"  # trained on and tuned by; reported
NO_KL = "--kl_coef 0"
BASE, ALL = "flow_grpo", "all six parts"
SETTINGS = {"GENEVAL_DETECTOR": "assets/nanodet", "GENEVAL_DTYPE": "bfloat16"}
# seconds of one core with AMX: a rollout with its updates, an evaluation, a policy's bench, a run's start
ROLLOUT_S, EVAL_S, BENCH_S, START_S = 8.5, 8, 60, 15


ROWS = {  # script or module, its options, the seconds of a rollout as a multiple of Flow-GRPO's
    "flow_grpo": ("flow_grpo.py", NO_KL, 1.0),
    "grpo_guard": ("grpo_guard.py", NO_KL, 1.0),
    "mix_grpo": ("mix_grpo.py", NO_KL, 1.0),
    "diffusion_nft": ("diffusion_nft.py", NO_KL, 1.5),
    # as many images as the others sample, made into pairs before, and as many optimizer steps
    "dpo_offline": ("dpo_offline.py", "", 1.0),
    # of contrib, without a KL but for DGPO's, which must have one
    "awm": ("contrib.awm", NO_KL, 1.5),
    "dgpo": ("contrib.dgpo", "", 1.5),
    "crd": ("contrib.crd", NO_KL, 1.5),
    "v_grpo": ("contrib.v_grpo", "", 1.2),
    "ram": ("contrib.ram", "", 1.5),
    "flow_dppo": ("contrib.flow_dppo", NO_KL, 1.0),
}


# ---- jobs ------------------------------------------------------------------------------------------------------------
def tuned(record, row):
    """{rate: reward of the tuning prompts at the end} of the trials that ended well."""
    trials = [line for line in record if (line["stage"], line["row"], line["failed"]) == ("tune", row, False)]
    return {line["learning_rate"]: line["evaluations"][-1][REWARD] for line in trials}


def chosen(record, row):
    rates = tuned(record, row)
    if not rates:
        raise SystemExit(f"{row}: the record has no trial of it that ended well")
    return max(sorted(rates), key=rates.get)


def tune_jobs():
    return [make_job("tune", ROLLOUTS // 2, row, TUNE_SEED, rate) for row in ROWS for rate in RATES]


def widening_jobs(record):
    """The neighbour of a choice that is the lowest or the highest rate of RATES."""
    jobs = []
    for row in ROWS:
        rate = chosen(record, row)
        if rate in (RATES[0], RATES[-1]):
            (further,) = set(neighbours(WIDEST, rate)) - set(RATES)
            jobs.append(make_job("tune", ROLLOUTS // 2, row, TUNE_SEED, further))
    return jobs


def num_seeds(row):
    return OF_CONTRIB if ROWS[row][0].startswith("contrib.") else SEEDS


def run_jobs(record):
    rows = [(row, num_seeds(row), chosen(record, row)) for row in ROWS]
    seeds = range(1, SEEDS + 1)
    return [make_job("run", ROLLOUTS, row, seed, rate) for seed in seeds for row, last, rate in rows if seed <= last]


# ---- one run ---------------------------------------------------------------------------------------------------------
def folder_name(job):
    return f"scenes-{job['stage']}-{job['row']}-{job['learning_rate']:g}-seed{job['seed']}"


def command_of(job, name):
    script, options, _ = ROWS[job["row"]]
    steps = job["rollouts"]
    words = ["--name", name, "--seed", job["seed"], "--learning_rate", job["learning_rate"], *MODEL.split()]
    words += ["--vae_dtype", "bfloat16", "--reward", REWARD, "--eval_reward", RIGHT, "--train_prompts", SCENES["train"]]
    words += ["--eval_prompts", SCENES["train" if job["stage"] == "tune" else "held_out"], "--max_prompts", NUM_PROMPTS]
    words += ["--num_inference_steps", 3, "--eval_num_inference_steps", 3, "--group_size", 8]
    words += [*as_words(RL), *options.split()]  # the recipe's LoRA, of the layers that see the prompt, and its EMA
    if job["row"] == "dpo_offline":  # a step is an optimizer step
        words += ["--num_steps", steps * UPDATES, "--eval_every", EVAL_EVERY * UPDATES]
        words += ["--num_pair_prompts", steps * IMAGES // 8, "--num_pairs", IMAGES // UPDATES]
    else:
        words += ["--rollout", "local", "--num_prompts", IMAGES // 8, "--updates_per_rollout", UPDATES]
        words += ["--num_steps", steps, "--eval_every", EVAL_EVERY]
    program = [script] if script.endswith(".py") else ["-m", script]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *program, *map(str, words)]


def train(job, core, prefix=""):
    """Run, or resume, a job on a core. Returns its line of the record."""
    name = prefix + folder_name(job)
    code = run_or_resume(command_of(job, name), name, core)
    line = job | {"failed": bool(code)} | measure(RUNS / name)
    if not code and line["steps"] != job["rollouts"] * (UPDATES if job["row"] == "dpo_offline" else 1):
        raise RuntimeError(f"{name}: {line['steps']} steps: start the comparison again")  # SIGTERM lets a run save
    return line | ({"bench": bench(RUNS / name, core)} if job["stage"] == "run" and not code else {})


def run_or_resume(command, name, core):
    """Run a command on a core, or resume it. Returns its exit code; RuntimeError if it failed, unless a loss or its
    gradient was not finite."""
    command = [*command, "--resume", "latest"]
    check_begun(RUNS / name, command)
    RUNS.mkdir(exist_ok=True)
    with open(RUNS / f"{name}.log", "w") as file:
        code = child(command, core, stdout=file, stderr=subprocess.STDOUT).returncode
    log = (RUNS / f"{name}.log").read_text()
    if code and not any(reason in log for reason in NOT_FINITE):
        raise RuntimeError(f"{name} exited with {code}: read runs/{name}.log")
    return code


def check_begun(folder, command):
    """RuntimeError: a run was begun here with other options, or with another detector or dtype of it."""
    if not (folder / "args.json").exists():
        return
    begun = json.loads((folder / "args.json").read_text())
    of_script = shlex.join(command[command.index("--name") :])
    is_same = all(settings == SETTINGS for settings in begun["args"]["reward_settings"].values())
    if not begun["command"].endswith(f" {of_script}") or not is_same:
        raise RuntimeError(f"{folder}: other options have begun it: remove it and start the comparison again")


def measure(folder):
    """What each evaluation of a run gave, at how many steps and seconds."""
    evaluations, seconds, steps = [], 0.0, 0
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        seconds += sum(line.get(f"timing_s/{phase}", 0.0) for phase in ("step", "make_pairs", "encode_pairs"))
        steps += "timing_s/step" in line
        if f"val/{RIGHT}/mean" in line:
            values = {name: line[f"val/{name}/mean"] for name in (REWARD, RIGHT)}
            values |= {name: line[f"val/{name}"] for name in ("drift_from_base", "diversity") if f"val/{name}" in line}
            evaluations.append({"step": steps, "seconds": seconds} | values)
    git_hash = json.loads((folder / "args.json").read_text())["git_hash"]
    return {"git_hash": git_hash, "steps": steps, "evaluations": evaluations}


def bench(run, core):
    """{"base" or "trained": {part: share of right images}} of the model before training and of a run's policy."""
    out = RUNS / f"{run.name}-bench"
    words = [sys.executable, "-m", "tools.bench", "assets/embedded_scenes", "--runs", run, "--output", out]
    words += ["--prompts", SCENES["held_out"], "--reward", RIGHT, "--images_per_prompt", 2]
    child([str(word) for word in words], core, stdout=subprocess.DEVNULL, check=True)
    parts = {"base": {}, "trained": {}}
    for row in json.loads((out / "bench.json").read_text())["benches"][0]["table"]:
        parts["base" if row["policy"] == "base" else "trained"][row["part"] or ALL] = row["mean"][0]
    return parts


def compare_all(path, cores):
    for jobs_of in (lambda record: tune_jobs(), widening_jobs, run_jobs):
        jobs = jobs_of(read_record(path))
        do = lambda job, path, core: train(job, core)
        work_through(jobs, path, cores, do, follow=lambda job: (), name=folder_name)


def again(path, row, seed, core):
    """Run one seed of one row again, and compare its evaluations with the record."""
    (line,) = [one for one in read_record(path) if (one["stage"], one["row"], one["seed"]) == ("run", row, seed)]
    job = {key: line[key] for key in make_job(*[None] * 4)}
    shutil.rmtree(RUNS / f"again-{folder_name(job)}", ignore_errors=True)
    values = lambda line: [[one[key] for key in (REWARD, RIGHT)] for one in line["evaluations"]]
    same = values(train(job, core, "again-")) == values(line)
    print(f"{folder_name(job)}: {'the same' if same else 'other'} numbers as recorded, at all evaluations")


# ---- tables ----------------------------------------------------------------------------------------------------------
def runs_of(record, row, policy="trained"):
    """{row-seedN: what tools.compare reads}: the parts of a row's policies, and of each run seconds and drift."""
    runs = {}
    for line in record:
        if (line["stage"], line["row"], line["failed"]) == ("run", row, False):
            last = line["evaluations"][-1]
            of_run = {"seconds": last["seconds"], "drift": last["drift_from_base"]} if policy == "trained" else {}
            runs[f"{row if policy == 'trained' else 'before'}-seed{line['seed']}"] = [line["bench"][policy] | of_run]
    return runs


def print_tables(path):
    """The trials; every row against the model before training, and against BASE."""
    record = read_record(path)
    print(as_markdown([["", *map(str, WIDEST)], *([row, *trial_cells(record, row)] for row in ROWS)]))
    before = runs_of(record, BASE, "base")
    if before:
        runs = {name: values for row in ROWS for name, values in runs_of(record, row).items()}
        parts = list(next(iter(before.values()))[0])
        print("", as_markdown(comparison_table(runs, before, parts)), "", sep="\n")
        print(as_markdown(comparison_table(runs, runs_of(record, BASE), [ALL, "seconds", "drift"])))


def trial_cells(record, row):
    rates = tuned(record, row)
    best = max(sorted(rates), key=rates.get, default=None)
    mark = lambda rate: f"**{rates[rate]:.3f}**" if rate == best else f"{rates[rate]:.3f}"
    return [mark(rate) if rate in rates else "" for rate in WIDEST]


def print_plan():
    total = 0.0
    for row, (_, _, cost) in ROWS.items():
        trials = (len(RATES) + 1) * (START_S + ROLLOUT_S * cost * ROLLOUTS / 2 + 2 * EVAL_S)
        seeds = num_seeds(row)
        runs = seeds * (START_S + ROLLOUT_S * cost * ROLLOUTS + 3 * EVAL_S + BENCH_S)
        total += trials + runs
        print(f"{row:14} {len(RATES) + 1} trials {trials / 60:5.1f} min, {seeds} runs {runs / 60:5.1f} min of one core")
    print(f"in all {total / 3600 / 2:.1f} h of two cores")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", help="needed except by --plan")
    parser.add_argument("--cores", nargs="+", type=int, default=[0, 1], help="one run on each")
    parser.add_argument("--plan", action="store_true", help="hours; starts nothing")
    parser.add_argument("--only", choices=ROWS, metavar="ROW", help="one run of this row again, with --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.plan:
        return print_plan()
    if not args.record:
        parser.error("RECORD is needed")
    if args.table:
        return print_tables(args.record)
    os.environ.update(SETTINGS)
    os.environ.pop("GENEVAL_CLIP", None)  # which would judge colours in place of the pixels
    if args.only:
        return again(args.record, args.only, args.seed, args.cores[0])
    return compare_all(args.record, args.cores)


if __name__ == "__main__":
    main()
