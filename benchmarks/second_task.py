"""Two tasks for one model, numbers (ocr) and plain signs (sign_colour): mixed, in stages, or by two teachers.

    python -m benchmarks.second_task RECORD --cores 0 1        # every run that RECORD lacks, one arm on each core
    python -m benchmarks.second_task RECORD --only stages --seed 2   # an arm again: does it give the same numbers?
    python -m benchmarks.second_task RECORD --table            # its tables

RECORD is docs/lab/records/second_task.jsonl, a line for each arm of a seed. The first command resumes where it stopped,
and does all arms of a seed before the next seed, and LATER_ARMS last. The design, docs/lab/second_task.md, is the
constants below.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

from assets import make_mixed
from benchmarks.comparison import RUNS, child, make_job, read_record, work_through
from tools.compare import as_markdown, comparison_table

# ---- the design, fixed before the first run --------------------------------------------------------------------------
SEEDS = 6
ROLLOUTS, IMAGES, GROUP = 36, 128, 8  # of an arm, over all of its parts; images of a rollout, and of a prompt
NUM_PROMPTS, COPIES = 128, 2  # of a held-out file at most, its first; images of each
EVAL_EVERY = 18  # rollouts; also before the first and after the last
OPTIONS = (
    "--learning_rate 1e-3 --lr_schedule constant --num_inference_steps 3 --eval_num_inference_steps 3 "
    "--sde_type sde --noise_level 0.7 --sde_window_size 1 --sde_window_range 0 1 --updates_per_rollout 4"
)
NO_KL = "--kl_coef 0 --clip_range 1e-3"
SUM = f"{NO_KL} --multi_objective_aggregation sum_then_normalize --scale_rewards batch"
GDPO = f"{NO_KL} --multi_objective_aggregation normalize_then_sum --scale_rewards group"
PAIR = ("numbers", "plain")  # prompt files, each with its reward, see prompts()
PAIR_OF_BOTH = ("both", "plain")  # the numbers ask for both rewards
REWARDS = {"numbers": "ocr", "both": "ocr", "plain": "assets/sign_colour.py:sign_colour"}


def part_of(name, trained, rollouts, options=SUM, starts_from=None, teachers=()):
    """A run: the prompt files that it trains on in equal shares, how long; the parts whose LoRAs it starts from."""
    part = {"name": name, "trained": trained, "rollouts": rollouts, "options": options}
    return part | {"starts_from": starts_from, "teachers": teachers}


ARMS = {  # each samples ROLLOUTS * IMAGES images, those of teachers included
    "mixed": [part_of("sum", PAIR, 36)],
    "gdpo": [part_of("gdpo", PAIR, 36, GDPO)],
    "stages": [part_of("first", PAIR[:1], 18), part_of("second", PAIR[1:], 18, starts_from="first")],
    "teachers": [
        part_of("teacher_numbers", PAIR[:1], 14),
        part_of("teacher_plain", PAIR[1:], 14),
        part_of("student", PAIR, 8, "--kl_type paper", teachers=("teacher_numbers", "teacher_plain")),
    ],
}
# A prompt that asks for one reward has the same advantages by either sum, if the deviation is of the same images. So
# these two came later, after four seeds of the others: numbers that ask for both.
LATER_ARMS = {"both_sum": [part_of("sum", PAIR_OF_BOTH, 36)], "both_gdpo": [part_of("gdpo", PAIR_OF_BOTH, 36, GDPO)]}
ALL_ARMS = ARMS | LATER_ARMS
BASE, LATER_BASE = "mixed", "both_sum"
HELD_OUT = {  # in the record: in a run's log
    "ocr of numbers": "val/numbers/ocr/mean",
    "sign_colour of plain signs": "val/plain/sign_colour/mean",
    "sign_colour of numbers": "val/numbers/sign_colour/mean",  # only LATER_ARMS are trained on it
}
BOTH = "both"  # mean of the two trained ones, by which arms are compared


# ---- one arm of a seed -----------------------------------------------------------------------------------------------
def prompts(folder):
    """Write the prompts of assets/make_mixed.py: training ones name their teacher, held-out numbers both rewards.

    `both` are the numbers to train on, with both rewards as well.
    """
    make_mixed.main(folder)
    shutil.copyfile(folder / "train/numbers.jsonl", folder / "train/both.jsonl")
    for path in sorted(folder.glob("*/*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            if path.parent.name == "train":
                record["teacher"] = f"teacher_{path.stem}"
            if path.stem == "both" or (path.parent.name, path.stem) == ("eval", "numbers"):
                record["rewards"] = ["ocr", "sign_colour"]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def folder_name(job, part):
    return f"second-{job['row']}-{part['name']}-seed{job['seed']}"


def command_of(job, part, prefix=""):
    """The command line of a part. prefix: of the names of its runs."""
    options = ["--name", prefix + folder_name(job, part), "--seed", job["seed"], "--rollout", "local"]
    options += ["--num_steps", part["rollouts"], "--eval_every", EVAL_EVERY, "--save_every", part["rollouts"]]
    options += ["--num_prompts", IMAGES // GROUP, "--group_size", GROUP, *OPTIONS.split(), *part["options"].split()]
    options += ["--max_prompts", NUM_PROMPTS, "--eval_images_per_prompt", COPIES]
    options += ["--train_prompts", *(f"runs/second_prompts/train/{name}.jsonl" for name in part["trained"])]
    options += ["--eval_prompts", *(f"runs/second_prompts/eval/{name}.jsonl" for name in PAIR)]
    options += ["--reward", *(REWARDS[name] for name in part["trained"])]
    options += ["--reward_weights", *(1 for _ in part["trained"])]
    if len(part["trained"]) > 1:
        options += ["--train_shares", *(1 for _ in part["trained"])]
    others = [REWARDS[name] for name in PAIR if REWARDS[name] not in options]
    if others:
        options += ["--eval_reward", *others]
    adapter = lambda name: f"runs/{prefix}{folder_name(job, {'name': name})}/adapter"
    if part["starts_from"]:
        options += ["--lora_path", adapter(part["starts_from"])]
    if part["teachers"]:
        options += ["--teachers", *(f"{name}={adapter(name)}" for name in part["teachers"])]
    script = ["-m", "contrib.diffusion_opd"] if part["teachers"] else ["flow_grpo.py"]
    options += ["--resume", "latest"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *script, *map(str, options)]


def train(job, core, prefix=""):
    """Run, or resume, an arm's parts one after the other on a core. Returns its line of the record."""
    parts = []
    for part in ALL_ARMS[job["row"]]:
        folder = RUNS / (prefix + folder_name(job, part))
        command = command_of(job, part, prefix)
        with open(f"{folder}.log", "w") as file:
            child(command, core, stdout=file, stderr=subprocess.STDOUT, check=True)
        evaluations = []
        for text in (folder / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            if HELD_OUT["ocr of numbers"] in line:
                values = {key: line[metric] for key, metric in HELD_OUT.items()}
                evaluations.append({"rollouts": line["training/global_step"]} | values)
        if evaluations[-1]["rollouts"] != part["rollouts"]:  # SIGTERM lets a run save and exit with 0
            raise RuntimeError(f"{folder}: {part['rollouts']} rollouts are not done: start the comparison again")
        git_hash = json.loads((folder / "args.json").read_text())["git_hash"]
        parts.append({"name": part["name"], "git_hash": git_hash, "evaluations": evaluations})
    return job | {"parts": parts}


def again(path, job, core):
    """Run an arm of a seed alone, and compare it with the record."""
    for part in ALL_ARMS[job["row"]]:
        shutil.rmtree(RUNS / f"again-{folder_name(job, part)}", ignore_errors=True)
    values = lambda line: [[[one[key] for key in HELD_OUT] for one in part["evaluations"]] for part in line["parts"]]
    now = train(job, core, "again-")
    print(now["parts"][-1]["evaluations"][-1])
    for line in read_record(path):
        if all(line[key] == job[key] for key in job):
            print(f"{'the same' if values(line) == values(now) else 'other'} numbers as recorded, at all evaluations")


# ---- tables ----------------------------------------------------------------------------------------------------------
def rows_of(part):
    """A part's evaluations as tools.compare reads a run's log."""
    rows = []
    for one in part["evaluations"]:
        both = (one["ocr of numbers"] + one["sign_colour of plain signs"]) / 2
        rows.append({BOTH: both} | {key: one[key] for key in HELD_OUT})
    return rows


def settings_of(record):
    """{label of a row: {label-seedN: rows}}: the model before training, each arm's end, and each part's."""
    settings = {}
    for line in record:
        seed = f"-seed{line['seed']}"
        for part in line["parts"]:
            label = line["row"] if part is line["parts"][-1] else f"{line['row']}, {part['name']}"
            settings.setdefault(label, {})[label + seed] = rows_of(part)
            if line["row"] in (BASE, LATER_BASE):
                settings.setdefault("before", {})["before" + seed] = rows_of(part)[:1]
    return settings


def with_all(record, arms):
    """The lines of these arms, of the seeds that have all of them, in order."""
    lines = [line for line in record if line["row"] in arms]
    seeds = [line["seed"] for line in lines]
    whole = [line for line in lines if seeds.count(line["seed"]) == len(arms)]
    return sorted(whole, key=lambda line: (line["seed"], list(arms).index(line["row"])))


def print_tables(path):
    """Print every end against the model before training; each arm against BASE; the second stage against the first; the
    student against each teacher; and the later arms, against the model before training and LATER_BASE.
    """
    record = read_record(path)
    settings, later = settings_of(with_all(record, ARMS)), settings_of(with_all(record, LATER_ARMS))
    if not settings.get("before"):
        sys.exit(f"second_task.py: error: {path}: no seed has all arms yet")
    joined = lambda groups: {name: rows for runs in groups for name, rows in runs.items()}
    every_end = joined(runs for label, runs in settings.items() if label != "before")
    pairs = [(every_end, settings["before"]), (joined(settings[arm] for arm in ARMS), settings[BASE])]
    pairs += [(settings["stages"], settings["stages, first"])]
    pairs += [(settings["teachers"], settings[f"teachers, {part['name']}"]) for part in ARMS["teachers"][:2]]
    if later:
        of_later = joined(later[arm] for arm in LATER_ARMS)
        pairs += [(of_later, later["before"]), (of_later, later[LATER_BASE])]
    for runs, against in pairs:
        print(as_markdown(comparison_table(runs, against, [BOTH, *HELD_OUT])), end="\n\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--cores", nargs="+", type=int, default=[0, 1], help="one arm on each")
    parser.add_argument("--only", choices=ALL_ARMS, metavar="ARM", help="this arm again, with --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return print_tables(args.record)
    prompts(RUNS / "second_prompts")
    if args.only:
        return again(args.record, make_job("second_task", ROLLOUTS, args.only, args.seed), args.cores[0])
    seeds = range(1, SEEDS + 1)
    rows = [*itertools.product(seeds, ARMS), *itertools.product(seeds, LATER_ARMS)]
    jobs = [make_job("second_task", ROLLOUTS, arm, seed) for seed, arm in rows]
    return work_through(jobs, args.record, args.cores, lambda job, path, core: train(job, core))


if __name__ == "__main__":
    main()
