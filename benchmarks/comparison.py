"""Ten algorithms at ten sampling steps: tuned equally, eight or six seeds, both samplers, tests that were fixed before.

    python -m benchmarks.comparison RECORD --cores 0 1           # every run that RECORD lacks, one on each core
    python -m benchmarks.comparison RECORD --plan 18             # runs and hours, at 18 s for a rollout of Flow-GRPO
    python -m benchmarks.comparison RECORD --only cps --seed 3   # one run again, and whether it gives the same numbers
    python -m benchmarks.comparison_table RECORD                 # RECORD's table (.md) and picture (.png), beside it

RECORD is docs/lab/records/comparison.jsonl, a line for each finished run. The first command resumes where it stopped.
The design, docs/lab/comparison.md ("The design of the next comparison"), is the constants below. Stages, in order:

  match     a trust region's threshold: of the GRID, the one where Flow-GRPO's divergence is met most closely. It is
            E[(mean - old mean)^2 / (2 std^2)] over a rollout's last mini-batch, before its optimizer step. The scripts
            do not log it: actor/ppo_kl is over all mini-batches, and an estimate of it in flow_grpo.py. So these short
            runs go through `run_with_divergence`, which computes it from the means, for every kind of noise alike.
  tune      three learning rates, for trust regions three thresholds around that one; half the rollouts, one seed
  run       the choice, by the reward of the tuning prompts alone, on seeds and prompts that tuning did not see
  evaluate  the policies trained on noisy steps, by those steps; the ODE's reward is in their runs already

A run that ends with a number that is not finite is recorded as failed. Any other failure stops the comparison.
"""

import argparse
import importlib
import itertools
import json
import math
import os
import queue
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs"

# ---- the design, fixed before the first run --------------------------------------------------------------------------
NUM_ROLLOUTS = 30
TUNE_ROLLOUTS = NUM_ROLLOUTS // 2
MATCH_ROLLOUTS = 5
IMAGES, UPDATES = 128, 4  # of a rollout, in every row: equal images are equal optimizer steps
TUNE_SEED = 100  # no seed of the table
LEARNING_RATES = (3e-4, 1e-3, 3e-3)  # Flow-GRPO's published rate, the shipped one, three times that
MATCH_RATE = 1e-3
GRID = (1 / 16, 1 / 4, 1, 4, 16)  # times the shipped threshold
AROUND = (1 / 4, 1, 4)  # times the matched threshold
NUM_PROMPTS = 128  # the table's held-out prompts, the first of the file; tuning has the others
EVAL_EVERY = 5
BASE = "flow_grpo"
TESTED = ("cps", "grpo_guard", "flow_dppo", "diffusion_nft")  # against BASE, by sign flips and Holm
SDE = "--noise_level 0.7"
WINDOW = "--sde_window_size"
ALL_STEPS, ANYWHERE = f"{WINDOW} 0", "--sde_window_range 0 9"  # all but the last


def row_of(script, seeds, options="", threshold=None, cost=1.0, is_apart=False):
    """threshold: of a trust region between Gaussian steps, (option, shipped value). cost: seconds of a rollout, as a
    multiple of Flow-GRPO's, rounded up. is_apart: it learns from pairs, and is compared in no test."""
    setting = {"script": script, "seeds": seeds, "options": options, "threshold": threshold}
    return setting | {"cost": cost, "is_apart": is_apart}


ROWS = {
    "flow_grpo": row_of("flow_grpo.py", 8, f"{SDE} {ALL_STEPS}", ("clip_range", 1e-3)),
    # its log-probs are not divided by 2 std^2, hence the smaller clip
    "cps": row_of("flow_grpo.py", 8, f"--sde_type cps --noise_level 0.9 {ALL_STEPS}", ("clip_range", 1e-4)),
    "grpo_guard": row_of("grpo_guard.py", 8, f"{SDE} {ALL_STEPS}", ("clip_range", 5e-4)),
    "flow_dppo": row_of("contrib.flow_dppo", 8, f"{SDE} {ALL_STEPS}", ("dppo_delta", 1e-5)),
    "mix_grpo": row_of("mix_grpo.py", 6, f"{SDE} {WINDOW} 2 {ANYWHERE}", ("clip_range", 1e-3), 0.6),
    "tempflow_grpo": row_of("contrib.tempflow_grpo", 6, f"{SDE} {WINDOW} 1 {ANYWHERE}", ("clip_range", 1e-3), 0.6),
    "diffusion_nft": row_of("diffusion_nft.py", 8, cost=1.4),
    "awm": row_of("contrib.awm", 6, cost=1.4),
    "dgpo": row_of("contrib.dgpo", 6, cost=1.4),
    "crd": row_of("contrib.crd", 6, cost=1.4),
    "online_dpo": row_of("contrib.online_dpo", 6, cost=1.4, is_apart=True),
    # as many images as the others sample, made into pairs before, and as many optimizer steps
    "dpo_offline": row_of("dpo_offline.py", 6, cost=0.7, is_apart=True),
}
EVAL_COST, STARTUP_S = 0.9, 12  # an evaluation, as a multiple of Flow-GRPO's rollout; seconds of a run's start
BUDGET_H = 24  # of two cores
# (rollouts, thresholds), the first that fits BUDGET_H: fewer rollouts first, then fewer thresholds
CUTS = ((30, 3), (25, 3), (20, 3), (20, 1))
HELD_OUT = {  # name: (metric, digits)
    "ocr": ("val/ocr/mean", 3),
    "sign_colour": ("val/sign_colour/mean", 2),
    "jpeg_compressibility": ("val/jpeg_compressibility/mean", 4),
    "diversity": ("val/diversity", 3),
    "drift": ("val/drift_from_base", 3),
}
SERIES = {"reward": "critic/rewards/mean", "ratio_mean": "actor/ratio_mean", "ppo_kl": "actor/ppo_kl"}
SERIES |= {"clipped": "actor/pg_clipfrac", "divergence": "actor/last_divergence"}


# ---- jobs ------------------------------------------------------------------------------------------------------------
def make_job(stage, row, seed, learning_rate=None, threshold=None):
    return {"stage": stage, "row": row, "seed": seed, "learning_rate": learning_rate, "threshold": threshold}


def is_recorded(job, record):
    return any(all(line[key] == job[key] for key in job) for line in record)


def lines_of(record, stage, row):
    """A row's lines of a stage, by seed."""
    return sorted((one for one in record if (one["stage"], one["row"]) == (stage, row)), key=lambda one: one["seed"])


def match_jobs():
    jobs = []
    for row, setting in ROWS.items():
        if setting["threshold"]:
            factors = (1,) if row == BASE else GRID
            for factor in factors:
                jobs.append(make_job("match", row, TUNE_SEED, MATCH_RATE, setting["threshold"][1] * factor))
    return jobs


def mean_divergence(line):
    return statistics.mean(step["divergence"] for step in line["steps"])


def matched_threshold(record, row):
    """The threshold of the GRID whose divergence is nearest to Flow-GRPO's, as a ratio; Flow-GRPO's is the shipped."""
    target = mean_divergence(lines_of(record, "match", BASE)[0])
    distance = lambda line: abs(math.log(mean_divergence(line) / target))
    return min(lines_of(record, "match", row), key=distance)["threshold"]


def tune_jobs(record):
    jobs = []
    for row, setting in ROWS.items():
        thresholds = [None]
        if setting["threshold"]:
            centre = matched_threshold(record, row)
            thresholds = [centre * factor for factor in AROUND]
        for learning_rate, threshold in itertools.product(LEARNING_RATES, thresholds):
            jobs.append(make_job("tune", row, TUNE_SEED, learning_rate, threshold))
    return jobs


def chosen(record, row):
    """(learning rate, threshold) of the highest last reward of the tuning prompts; of equal ones the first."""
    lines = [line for line in lines_of(record, "tune", row) if not line["failed"]]
    if not lines:
        raise SystemExit(f"{row}: the record has no tuning run of it that ended well")
    best = max(lines, key=lambda line: line["evaluations"][-1]["ocr"])
    return best["learning_rate"], best["threshold"]


def run_jobs(record):
    """Seed by seed, so that a record that is not finished has about as many of each row."""
    jobs = []
    for seed in range(1, max(setting["seeds"] for setting in ROWS.values()) + 1):
        for row, setting in ROWS.items():
            if seed <= setting["seeds"]:
                jobs.append(make_job("run", row, seed, *chosen(record, row)))
    return jobs


def evaluate_jobs():
    """Seed 0 is the model before training."""
    noisy = [(row, setting["seeds"]) for row, setting in ROWS.items() if setting["threshold"]]
    return [make_job("evaluate", row, seed) for row, seeds in noisy for seed in range(seeds + 1)]


# ---- one run ---------------------------------------------------------------------------------------------------------
def folder_name(job):
    parts = ["comparison", job["stage"], job["row"], f"{job['learning_rate']:g}"]
    if job["threshold"] is not None:
        parts.append(f"{job['threshold']:g}")
    return "-".join([*parts, f"seed{job['seed']}"])


def tuning_prompts():
    """The held-out prompts that the table never sees, as a file of runs/."""
    path = RUNS / "comparison_tuning_prompts.txt"
    prompts = (ROOT / "assets/eval_prompts.txt").read_text().splitlines()[NUM_PROMPTS:]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(prompts) + "\n")
    return os.path.relpath(path, ROOT)


def options_of(job, name):
    """The script's command line, but for --resume."""
    setting = ROWS[job["row"]]
    rollouts = {"match": MATCH_ROLLOUTS, "tune": TUNE_ROLLOUTS, "run": NUM_ROLLOUTS}[job["stage"]]
    options = ["--name", name, "--seed", job["seed"], "--learning_rate", job["learning_rate"]]
    options += ["--num_inference_steps", 10, "--eval_num_inference_steps", 10]
    options += ["--max_prompts", NUM_PROMPTS, "--eval_images_per_prompt", 2]
    options += ["--eval_reward", "assets/sign_colour.py:sign_colour", "jpeg_compressibility"]
    if job["row"] == "dpo_offline":  # a step is an optimizer step, and the images are made before
        options += ["--num_steps", rollouts * UPDATES, "--eval_every", EVAL_EVERY * UPDATES]
        options += ["--num_pair_prompts", rollouts * IMAGES // 8, "--group_size", 8]
    else:
        options += ["--rollout", "local", "--num_prompts", IMAGES // 8, "--group_size", 8]
        options += ["--num_steps", rollouts, "--eval_every", EVAL_EVERY, "--updates_per_rollout", UPDATES]
    options += setting["options"].split()
    if job["row"] == "mix_grpo":  # every position of the window, in a run of any length
        options += ["--iters_per_group", math.ceil(rollouts / 8)]
    if job["threshold"] is not None:
        options += [f"--{setting['threshold'][0]}", job["threshold"]]
    if job["stage"] != "run":
        options += ["--eval_prompts", tuning_prompts()]
    if job["stage"] == "match":
        options += ["--eval_at_start", False]
    return [str(option) for option in options]


def command_of(job, name):
    script = ROWS[job["row"]]["script"]
    program = [script] if script.endswith(".py") else ["-m", script]
    if job["stage"] == "match":
        program = ["-m", "benchmarks.comparison", "divergence", script.removesuffix(".py")]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *program, *options_of(job, name)]


def train(job, name, core):
    """Run, or resume, a job on one core. Returns its line of the record."""
    log = RUNS / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    command = ["taskset", "-c", str(core), *command_of(job, name), "--resume", "latest"]
    with open(log, "w") as file:
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    if code and not is_not_finite(log.read_text()):
        raise RuntimeError(f"{' '.join(command)} exited with {code}: read {log}")
    return job | {"failed": bool(code)} | measure(RUNS / name, job["row"])


def is_not_finite(text):
    """Whether common/run.py ended the run for this reason."""
    return "not a finite number: " in text or "no finite gradient in " in text


def measure(folder, row):
    """What each step and each evaluation of a run gave, at how many images, optimizer steps and seconds."""
    seconds, steps, evaluations = 0.0, [], []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        rollouts = line["training/global_step"] / (UPDATES if row == "dpo_offline" else 1)
        seconds += sum(line.get(f"timing_s/{phase}", 0.0) for phase in ("step", "make_pairs", "encode_pairs"))
        if "timing_s/step" in line:
            steps.append({key: line[metric] for key, metric in SERIES.items() if metric in line})
        if "val/ocr/mean" in line:
            counts = {"images": int(rollouts * IMAGES), "updates": int(rollouts * UPDATES), "seconds": seconds}
            evaluations.append(counts | {key: line[metric] for key, (metric, _) in HELD_OUT.items() if metric in line})
    git_hash = json.loads((folder / "args.json").read_text())["git_hash"]
    return {"git_hash": git_hash, "evaluations": evaluations, "steps": steps}


def run_with_divergence(script, argv):
    """Run a script whose log gets actor/last_divergence, the mean over a rollout's last mini-batch (see above)."""
    from common.options import parse_args
    from common.run import one_line

    module = importlib.import_module(script)
    accumulate, update = module.accumulate_gradients, module.update
    divergences = []

    def accumulate_and_measure(args, model, batch, mini_batch, *others):
        sampled = batch.trajectories.select(mini_batch)
        now = module.recompute_log_probs(args, model, batch.request.select(mini_batch), sampled)
        squares = ((now.prev_sample_means - sampled.prev_sample_means) ** 2).flatten(2).mean(2)  # (images, SDE steps)
        divergences.append((squares / (2 * sampled.transition_stds**2)).mean().item())
        return accumulate(args, model, batch, mini_batch, *others)

    module.accumulate_gradients = accumulate_and_measure
    module.update = lambda *given: update(*given) | {"actor/last_divergence": divergences[-1]}
    with one_line():
        args = module.check(parse_args(module.Args, module.__doc__, argv))
        module.main(args, module.prepare(args))


def own_sampler(job, name, core):
    """An evaluation by the sampler that a policy was trained with, in a process of its own: its line of the record."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.comparison", "own", json.dumps(job), name]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return job | json.loads(printed.splitlines()[-1])


def score_by_own_sampler(run, adapter, chunks=8):
    """Rewards of the table's prompts and noise where the steps that training samples with noise have noise.

    run: the job of the policy's training. adapter: the run's folder, or None for the model before training. A window
    that moves is taken from `chunks` rollouts spread over the run, each for every eighth image.
    """
    from common.models.cpu import repair_torchvision

    repair_torchvision()  # before diffusers is imported
    from common.data import read_prompts
    from common.models.family import find_family, load_model
    from common.options import parse_args
    from common.rewards.scoring import load_rewards, score_images
    from common.sde import image_seed
    from tools.sample import read_policy, use

    import torch

    module = importlib.import_module(ROWS[run["row"]]["script"].removesuffix(".py"))
    args = parse_args(module.Args, module.__doc__, options_of(run, "none"))
    rewards = load_rewards([*args.reward, *args.eval_reward])
    size = (*args.image_size, args.num_frames)
    family = find_family(args.model, *size, args.guidance_scale, args.max_sequence_length)
    model = load_model(family, args.model, torch.float32, "cpu", None)
    if adapter:
        use(model, *read_policy(adapter, args.model))
    held_out = read_prompts(args.eval_prompts, max_prompts=args.max_prompts)
    copies = args.eval_images_per_prompt
    places = range(len(held_out) * copies)
    scores = []
    for chunk in range(chunks):
        rows = places[chunk::chunks]
        prompts = held_out.select(place // copies for place in rows)
        seeds = [image_seed("eval", place % copies, place // copies) for place in rows]
        encoded = module.encode_prompts(args, model, prompts)
        sde_steps = module.trained_steps(args, 1 + chunk * args.num_steps // chunks)
        request = module.make_request(args, model, encoded, torch.arange(len(rows)), seeds, sde_steps=sde_steps)
        scores.append(score_images(rewards, module.sample_locally(model, request).images, prompts))
    means = torch.cat(scores).mean(0).tolist()
    return dict(zip(rewards, means, strict=True))


# ---- all of them -----------------------------------------------------------------------------------------------------
def read_record(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def work_through(jobs, path, cores, do=None):
    """Do the jobs that the record lacks, one on each core, and append a line for each that is finished."""
    todo = [job for job in jobs if not is_recorded(job, read_record(path))]
    free: queue.SimpleQueue = queue.SimpleQueue()
    writing = threading.Lock()
    stopping = threading.Event()  # one has raised: what runs may end, nothing else starts
    for core in cores:
        free.put(core)

    def work(job):
        core = free.get()
        try:
            if not stopping.is_set():
                line = (do or do_job)(job, path, core)
                with writing, open(path, "a") as file:
                    file.write(json.dumps(line) + "\n")
        except BaseException:
            stopping.set()
            raise
        finally:
            free.put(core)

    with ThreadPoolExecutor(len(cores)) as pool:
        try:
            for one in [pool.submit(work, job) for job in todo]:
                one.result()
        except BaseException:  # Ctrl-C, which the runs get as well: they save
            stopping.set()
            raise


def do_job(job, path, core):
    if job["stage"] != "evaluate":
        return train(job, folder_name(job), core)
    run = make_job("run", job["row"], max(job["seed"], 1), *chosen(read_record(path), job["row"]))
    return own_sampler(run | {"stage": "evaluate"}, folder_name(run) if job["seed"] else "", core) | job


def compare_all(path, cores):
    work_through(match_jobs(), path, cores)
    work_through(tune_jobs(read_record(path)), path, cores)
    work_through(run_jobs(read_record(path)), path, cores)
    work_through(evaluate_jobs(), path, cores)


def again(path, row, seed, core):
    """Run one seed of one row alone, printing its command, and compare it with the record."""
    record = read_record(path)
    job = make_job("run", row, seed, *chosen(record, row))
    name = f"comparison-again-{row}-seed{seed}"
    shutil.rmtree(RUNS / name, ignore_errors=True)
    print(shlex.join(["torchrun", *command_of(job, name)[3:]]), flush=True)
    values = lambda line: [{key: point[key] for key in HELD_OUT} for point in line["evaluations"]]
    now = train(job, name, core)
    print(f"reward {now['evaluations'][-1]['ocr']}")
    for line in lines_of(record, "run", row):
        if line["seed"] == seed:
            verdict = "the same numbers" if values(line) == values(now) else "other numbers"
            print(f"recorded {line['evaluations'][-1]['ocr']}: {verdict} at all evaluations")


def plan(seconds, num_rollouts=NUM_ROLLOUTS, num_thresholds=3):
    """{stage: (runs, hours of two cores)}, at so many seconds for a rollout of Flow-GRPO on one core."""
    counts = {"match": 0, "tune": 0, "run": 0, "evaluate": 0}
    spent = dict.fromkeys(counts, 0.0)

    def add(stage, runs, rollouts, evaluations, cost):
        counts[stage] += runs
        start = STARTUP_S if runs else 0
        spent[stage] += runs * (start + seconds * (rollouts * cost + evaluations * EVAL_COST))

    for row, setting in ROWS.items():
        cost = setting["cost"]
        has_region = setting["threshold"] is not None
        if has_region:
            add("match", 1 if row == BASE else len(GRID), MATCH_ROLLOUTS, 1, cost)
            add("evaluate", setting["seeds"] + 1, 0, 1, cost)
        runs = len(LEARNING_RATES) * (num_thresholds if has_region else 1)
        add("tune", runs, num_rollouts // 2, 1 + num_rollouts // 2 // EVAL_EVERY, cost)
        add("run", setting["seeds"], num_rollouts, 1 + num_rollouts // EVAL_EVERY, cost)
    return {stage: (counts[stage], spent[stage] / 3600 / 2) for stage in counts}


def print_plan(seconds):
    for num_rollouts, num_thresholds in CUTS:
        stages = plan(seconds, num_rollouts, num_thresholds)
        hours = sum(of_stage for _, of_stage in stages.values())
        if hours <= BUDGET_H:
            break
    for stage, (runs, of_stage) in stages.items():
        print(f"{stage:9}{runs:4} runs {of_stage:5.1f} h of two cores")
    total = sum(runs for runs, _ in stages.values())
    print(f"{'all':9}{total:4} runs {hours:5.1f} h, of {BUDGET_H} h at most")
    is_cut = (num_rollouts, num_thresholds) != CUTS[0]
    print(f"{num_rollouts} rollouts, {num_thresholds} thresholds: {'cut' if is_cut else 'nothing is cut'}")
    longest = max(setting["cost"] for setting in ROWS.values())
    minutes = (STARTUP_S + seconds * (num_rollouts * longest + EVAL_COST * (1 + num_rollouts // EVAL_EVERY))) / 60
    print(f"the longest run alone, on one core: {minutes:.0f} minutes")


def main():
    if sys.argv[1:2] == ["divergence"]:  # the command of a matching run
        return run_with_divergence(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["own"]:  # that of an evaluation
        run = json.loads(sys.argv[2]) | {"stage": "run"}
        return print(json.dumps(score_by_own_sampler(run, sys.argv[3] and RUNS / sys.argv[3])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--cores", nargs="+", type=int, default=[0, 1], help="one run on each")
    parser.add_argument("--plan", type=float, metavar="SECONDS", help="of a rollout of Flow-GRPO; starts nothing")
    parser.add_argument("--only", choices=ROWS, metavar="ROW", help="one run of this row again, with --seed")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.plan:
        return print_plan(args.plan)
    if args.only:
        return again(args.record, args.only, args.seed, args.cores[0])
    return compare_all(args.record, args.cores)


if __name__ == "__main__":
    main()
