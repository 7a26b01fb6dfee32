"""Fifteen settings at ten sampling steps, each tuned and its choice widened; six or eight seeds, fixed tests.

    python -m benchmarks.comparison RECORD --cores 0 1           # every run that RECORD lacks, one on each core
    python -m benchmarks.comparison --plan 18                    # runs, hours and the --cut, at 18 s for a rollout
    python -m benchmarks.comparison RECORD --cut 1               # the same, shorter: CUTS[1]; later starts keep to it
    python -m benchmarks.comparison RECORD --only cps --seed 3   # one run again, and whether it gives the same numbers
    python -m benchmarks.comparison_table RECORD                 # its tables, and beside it a picture

RECORD is docs/lab/records/comparison.jsonl, a line for each finished run. The first command resumes where it stopped.
The design, docs/lab/comparison.md ("The design"), is the constants below. Stages, in order:

  match     a trust region's threshold: of the GRID, the one where Flow-GRPO's divergence is met most closely. It is
            E[(mean - old mean)^2 / (2 std^2)] over a rollout's last mini-batch, before its optimizer step, at each
            trained step. The scripts do not log it: actor/ppo_kl is over all mini-batches and steps, and an estimate of
            it in flow_grpo.py. So these short runs go through `run_with_divergence`, which computes it from the means.
  tune      three learning rates, for trust regions three thresholds around that one, for RAM three values of eta;
            half the rollouts, one seed; no row whose choice is given
  widen     the neighbours of a row's choice that were not tried, learning rate or threshold, until it beats them all
  run       the choice, by the reward of the tuning prompts alone, on seeds and prompts that tuning did not see
  evaluate  the policies trained on noisy steps, by those steps, each right after its run; the ODE's reward is in the
            runs already

A run that ends with a number that is not finite is recorded as failed. Any other failure stops the comparison, as does
a run that SIGTERM ended early.
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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs"

# ---- the design, fixed before the first run --------------------------------------------------------------------------
# (rollouts, thresholds): fewer rollouts first, then fewer thresholds. --cut K takes the K-th, 0 the full design
CUTS = ((30, 3), (25, 3), (20, 3), (20, 1))
MATCH_ROLLOUTS = 9  # as many as a window of one has positions
IMAGES, UPDATES = 128, 4  # of a rollout, in every row: equal images are equal optimizer steps
TUNE_SEED = 100  # no seed of the table
LEARNING_RATES = (3e-4, 1e-3, 3e-3)  # Flow-GRPO's published rate, the shipped one, three times that
RATES = (1e-4, *LEARNING_RATES, 1e-2)  # as far as widening goes
MATCH_RATE = 1e-3
GRID = (1 / 16, 1 / 4, 1, 4, 16)  # times the shipped threshold
MATCHED_WITHIN = 4  # a divergence further from Flow-GRPO's, as a ratio, matches nothing
AROUND = {3: (1 / 4, 1, 4), 1: (1,)}  # times the matched threshold, by the number of thresholds
WIDEST = {3: (1 / 64, 1 / 16, 1 / 4, 1, 4, 16, 64), 1: (1,)}  # as far as widening goes
NUM_PROMPTS = 128  # the table's held-out prompts, the first of the file; tuning has the others
EVAL_EVERY = 5
BASE = "flow_grpo"
TESTED = ("cps", "grpo_guard", "flow_dppo", "diffusion_nft")  # against BASE, by sign flips and Holm
SDE = "--noise_level 0.7"
NO_KL = "--kl_coef 0"
WINDOW = "--sde_window_size"
ALL_STEPS, ANYWHERE = f"{WINDOW} 0", "--sde_window_range 0 9"  # all but the last


def row_of(script, seeds, options="", threshold=None, cost=1.0, is_apart=False, has_gaussian_steps=True, choice=None):
    """threshold: what is tuned beside the learning rate, (option, shipped value). Between Gaussian steps it bounds, and
    is matched first; without them it is another option, tuned around the shipped value. cost: seconds of a rollout, as
    a multiple of Flow-GRPO's, rounded up. is_apart: it learns from pairs, and is compared in no test.
    choice: a (learning rate, threshold) that is given, and so not tuned."""
    setting = {"script": script, "seeds": seeds, "options": options, "threshold": threshold}
    setting |= {"is_noisy": bool(threshold) and has_gaussian_steps}  # in training, between the sampling steps
    return setting | {"cost": cost, "is_apart": is_apart, "choice": choice}


ROWS = {
    "flow_grpo": row_of("flow_grpo.py", 8, f"{SDE} {ALL_STEPS} {NO_KL}", ("clip_range", 1e-3)),
    # its log-probs are not divided by 2 std^2, hence the smaller clip
    "cps": row_of("flow_grpo.py", 8, f"--sde_type cps --noise_level 0.9 {ALL_STEPS} {NO_KL}", ("clip_range", 1e-4)),
    "grpo_guard": row_of("grpo_guard.py", 8, f"{SDE} {ALL_STEPS} {NO_KL}", ("clip_range", 5e-4)),
    "flow_dppo": row_of("contrib.flow_dppo", 8, f"{SDE} {ALL_STEPS}", ("dppo_delta", 1e-5)),
    "mix_grpo": row_of("mix_grpo.py", 6, f"{SDE} {WINDOW} 2 {ANYWHERE} {NO_KL}", ("clip_range", 1e-3), 0.6),
    "tempflow_grpo": row_of("contrib.tempflow_grpo", 6, f"{SDE} {WINDOW} 1 {ANYWHERE}", ("clip_range", 1e-3), 0.6),
    "diffusion_nft": row_of("diffusion_nft.py", 8, "--kl_coef 0", cost=1.4),
    "awm": row_of("contrib.awm", 6, cost=1.4),
    "dgpo": row_of("contrib.dgpo", 6, cost=1.45),
    "crd": row_of("contrib.crd", 6, cost=1.4),
    # with the KL of its code, which came after all other runs: at CRD's own rate
    "crd_kl": row_of("contrib.crd", 6, "--kl_coef 0.1 --kl_guidance_scale 4.5", cost=1.9, choice=(3e-3, None)),
    "v_grpo": row_of("contrib.v_grpo", 6, cost=1.2),
    # the KL that bounds how far it moves costs 1 / reward_multiplier
    "ram": row_of("contrib.ram", 6, threshold=("reward_multiplier", 3.0), cost=1.4, has_gaussian_steps=False),
    "online_dpo": row_of("contrib.online_dpo", 6, cost=1.4, is_apart=True),
    # as many images as the others sample, made into pairs before, and as many optimizer steps
    "dpo_offline": row_of("dpo_offline.py", 6, "--dpo_beta 100 --num_pairs 64", cost=0.7, is_apart=True),
}
EVAL_COST, STARTUP_S = 0.9, 12  # an evaluation, as a multiple of Flow-GRPO's rollout; seconds of a run's start
BUDGET_H = 9.5  # of two cores, for everything: 7 that we could spend first, the rest for the rows that came later
LONGEST_MIN = 15  # of one core, for one run
HELD_OUT = {  # name: (metric, digits)
    "ocr": ("val/ocr/mean", 3),
    "sign_colour": ("val/sign_colour/mean", 2),
    "jpeg_compressibility": ("val/jpeg_compressibility/mean", 4),
    "diversity": ("val/diversity", 3),
    "drift": ("val/drift_from_base", 3),
}
SERIES = {"seconds": "timing_s/step", "reward": "critic/rewards/mean", "ratio_mean": "actor/ratio_mean"}
SERIES |= {"ppo_kl": "actor/ppo_kl", "clipped": "actor/pg_clipfrac"}
NOT_FINITE = ("not a finite number: ", "no finite gradient in ")  # what common/run/run.py says of a failed run
DIVERGENCE = "actor/last_divergence/"  # and the sampling step


# ---- jobs ------------------------------------------------------------------------------------------------------------
def make_job(stage, rollouts, row, seed, learning_rate=None, threshold=None):
    of_row = {"row": row, "seed": seed, "learning_rate": learning_rate, "threshold": threshold}
    return {"stage": stage, "rollouts": rollouts} | of_row


def is_recorded(job, record):
    return any(all(line.get(key) == job[key] for key in job) for line in record)


def cut_of(record):
    """(rollouts, thresholds) of the last --cut."""
    cuts = [(line["rollouts"], line["thresholds"]) for line in record if line["stage"] == "cut"]
    return cuts[-1] if cuts else CUTS[0]


def rollouts_of(record, stage):
    rollouts, _ = cut_of(record)
    return {"match": MATCH_ROLLOUTS, "tune": rollouts // 2}.get(stage, rollouts)


def lines_of(record, stage, row):
    """A row's lines of a stage, of the cut's length, in an order that does not depend on which core was first."""
    wanted = (stage, row, rollouts_of(record, stage))
    lines = [one for one in record if (one["stage"], one["row"], one["rollouts"]) == wanted]
    return sorted(lines, key=lambda one: (one["seed"], one["learning_rate"] or 0, one["threshold"] or 0))


def match_jobs():
    jobs = []
    for row, setting in ROWS.items():
        if setting["is_noisy"]:
            factors = (1,) if row == BASE else GRID
            for factor in factors:
                of_run = {"learning_rate": MATCH_RATE, "threshold": setting["threshold"][1] * factor}
                jobs.append(make_job("match", MATCH_ROLLOUTS, row, TUNE_SEED, **of_run))
    return jobs


def mean_divergence(line):
    """The geometric mean over trained steps of each step's mean over rollouts.

    Every step counts by its ratio to Flow-GRPO's. A plain mean would be the last trained step's alone, whose divergence
    is hundreds of times the others' in cps; a median would be one step's as well.
    """
    of_steps = {}
    for rollout in line["steps"]:
        for i, divergence in rollout["divergences"].items():
            of_steps.setdefault(i, []).append(divergence)
    return statistics.geometric_mean(statistics.mean(values) for values in of_steps.values())


def matched(record, row):
    """(threshold, its divergence over Flow-GRPO's, whether that is near): of the GRID the nearest, as a ratio, and of
    equal ones the nearest to the shipped; where none is near the shipped one, with the ratio None if its run failed.
    A threshold that bounds no Gaussian step is the shipped one."""
    shipped = ROWS[row]["threshold"][1]
    if not ROWS[row]["is_noisy"]:
        return shipped, None, True
    whole = [line for line in lines_of(record, "match", row) if not line["failed"]]
    base = [line for line in lines_of(record, "match", BASE) if not line["failed"]]
    if not base:
        raise SystemExit(f"{BASE}: the record has no matching run of it that ended well")
    ratios = {line["threshold"]: mean_divergence(line) / mean_divergence(base[0]) for line in whole}
    near = [threshold for threshold, ratio in ratios.items() if 1 / MATCHED_WITHIN <= ratio <= MATCHED_WITHIN]
    distance = lambda threshold: (abs(math.log(ratios[threshold])), abs(math.log(threshold / shipped)))
    threshold = min(near, key=distance, default=shipped)
    return threshold, ratios.get(threshold), bool(near)


def thresholds_of(record, row, factors=AROUND):
    """Those that tuning tries, or with WIDEST those that widening may try."""
    if not ROWS[row]["threshold"]:
        return [None]
    return [matched(record, row)[0] * factor for factor in factors[cut_of(record)[1]]]


def tuned_rows():
    return [row for row, setting in ROWS.items() if not setting["choice"]]


def tune_jobs(record):
    rollouts = rollouts_of(record, "tune")
    jobs = []
    for row in tuned_rows():
        for choice in itertools.product(LEARNING_RATES, thresholds_of(record, row)):
            jobs.append(make_job("tune", rollouts, row, TUNE_SEED, *choice))
    return jobs


def widening_jobs(record):
    """What tuning has not tried next to each row's choice, the other value kept, and within WIDEST."""
    jobs = []
    for row in tuned_rows():
        rate, threshold = chosen(record, row)
        thresholds = thresholds_of(record, row, WIDEST)
        choices = [(near, threshold) for near in neighbours(RATES, rate)]
        choices += [(rate, near) for near in neighbours(thresholds, threshold)]
        jobs += [make_job("tune", rollouts_of(record, "tune"), row, TUNE_SEED, *choice) for choice in choices]
    return [job for job in jobs if not is_recorded(job, record)]


def neighbours(values, value):
    """Of `value` in `values`: the one before and the one after, as far as there are."""
    place = values.index(value)
    return [*values[max(place - 1, 0) : place], *values[place + 1 : place + 2]]


def chosen(record, row):
    """(learning rate, threshold) of the highest last reward of the tuning prompts; of equal ones the lowest."""
    if ROWS[row]["choice"]:
        return ROWS[row]["choice"]
    tried = thresholds_of(record, row, WIDEST)  # before a cut there may have been more
    lines = [line for line in lines_of(record, "tune", row) if line["threshold"] in tried and not line["failed"]]
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
                jobs.append(make_job("run", rollouts_of(record, "run"), row, seed, *chosen(record, row)))
    return jobs


def evaluations_of(job):
    """What follows a run that was trained on noisy steps, while its folder is there."""
    is_noisy = job["stage"] == "run" and ROWS[job["row"]]["is_noisy"]
    return [make_job("evaluate", job["rollouts"], job["row"], job["seed"])] if is_noisy else []


def evaluate_jobs(record):
    """Seed 0 is the model before training. The others follow their runs, except where a kill came between."""
    rollouts = rollouts_of(record, "evaluate")
    noisy = [(row, setting["seeds"]) for row, setting in ROWS.items() if setting["is_noisy"]]
    return [make_job("evaluate", rollouts, row, seed) for row, seeds in noisy for seed in range(seeds + 1)]


# ---- one run ---------------------------------------------------------------------------------------------------------
def folder_name(job):
    values = [f"{job[key]:g}" for key in ("learning_rate", "threshold") if job[key] is not None]
    return "-".join(["comparison", job["stage"], str(job["rollouts"]), job["row"], *values, f"seed{job['seed']}"])


def tuning_prompts():
    """The held-out prompts that the table never sees, as a file of runs/."""
    path = RUNS / "comparison_tuning_prompts.txt"
    prompts = (ROOT / "assets/eval_prompts.txt").read_text().splitlines()[NUM_PROMPTS:]
    text = "\n".join(prompts) + "\n"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{path.name}.{threading.get_ident()}")  # the other core's run may be reading it
        temporary.write_text(text)
        temporary.replace(path)
    return os.path.relpath(path, ROOT)


def options_of(job, name):
    """The script's command line, but for --resume."""
    setting = ROWS[job["row"]]
    rollouts = job["rollouts"]
    every = rollouts if job["stage"] == "match" else EVAL_EVERY
    options = ["--name", name, "--seed", job["seed"], "--learning_rate", job["learning_rate"]]
    options += ["--lr_schedule", "constant"]
    options += ["--num_inference_steps", 10, "--eval_num_inference_steps", 10]
    options += ["--max_prompts", NUM_PROMPTS, "--eval_images_per_prompt", 2]
    options += ["--eval_reward", "assets/sign_colour.py:sign_colour", "jpeg_compressibility"]
    if job["row"] == "dpo_offline":  # a step is an optimizer step, and the images are made before
        options += ["--num_steps", rollouts * UPDATES, "--eval_every", every * UPDATES]
        options += ["--num_pair_prompts", rollouts * IMAGES // 8, "--group_size", 8]
    else:
        options += ["--rollout", "local", "--num_prompts", IMAGES // 8, "--group_size", 8]
        options += ["--num_steps", rollouts, "--eval_every", every, "--updates_per_rollout", UPDATES]
    options += setting["options"].split()
    if job["row"] == "mix_grpo":  # as long at a position as leaves a rollout for the last of eight
        options += ["--iters_per_group", max(1, (rollouts - 1) // 7)]
    if job["threshold"] is not None:
        options += [f"--{setting['threshold'][0]}", job["threshold"]]
    if job["stage"] != "run":
        options += ["--eval_prompts", tuning_prompts()]
    return [str(option) for option in options]


def command_of(job, name):
    script = ROWS[job["row"]]["script"]
    program = [script] if script.endswith(".py") else ["-m", script]
    if job["stage"] == "match":
        program = ["-m", "benchmarks.comparison", "divergence", script.removesuffix(".py")]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *program, *options_of(job, name)]


def child(command, core, **options):
    """A process of one thread on one core, as the printed command starts it."""
    pinned = ["taskset", "-c", str(core), *command]
    return subprocess.run(pinned, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, **options)


def train(job, name, core):
    """Run, or resume, a job on one core. Returns its line of the record. RuntimeError: the run is not the whole job."""
    log = RUNS / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    begun = RUNS / name / "args.json"
    options = shlex.join([*options_of(job, name), "--resume", "latest"])
    if begun.exists() and not json.loads(begun.read_text())["command"].endswith(f" {options}"):
        raise RuntimeError(f"{RUNS / name}: other options have begun it: remove it and start the comparison again")
    with open(log, "w") as file:
        command = [*command_of(job, name), "--resume", "latest"]
        code = child(command, core, stdout=file, stderr=subprocess.STDOUT).returncode
    if code and not any(reason in log.read_text() for reason in NOT_FINITE):
        raise RuntimeError(f"{' '.join(command)} exited with {code}: read {log}")
    line = job | {"failed": bool(code)} | measure(RUNS / name, job["row"])
    expected = job["rollouts"] * (UPDATES if job["row"] == "dpo_offline" else 1)
    if not code and len(line["steps"]) != expected:  # SIGTERM lets a run save and exit with 0
        raise RuntimeError(f"{name}: {len(line['steps'])} of {expected} steps: start the comparison again")
    return line


def measure(folder, row):
    """What each step and each evaluation of a run gave, at how many images, optimizer steps and seconds."""
    seconds, steps, evaluations = 0.0, [], []
    metrics = folder / "metrics.jsonl"  # none where the first step of a matching run was not finite
    for text in metrics.read_text().splitlines() if metrics.exists() else ():
        line = json.loads(text)
        rollouts = line["training/global_step"] / (UPDATES if row == "dpo_offline" else 1)
        seconds += sum(line.get(f"timing_s/{phase}", 0.0) for phase in ("step", "make_pairs", "encode_pairs"))
        if "timing_s/step" in line:
            steps.append({key: line[metric] for key, metric in SERIES.items() if metric in line})
            divergences = {key.removeprefix(DIVERGENCE): line[key] for key in line if key.startswith(DIVERGENCE)}
            if divergences:  # {sampling step: its mean over images}
                steps[-1]["divergences"] = divergences
        if "val/ocr/mean" in line:
            counts = {"images": int(rollouts * IMAGES), "updates": int(rollouts * UPDATES), "seconds": seconds}
            evaluations.append(counts | {key: line[metric] for key, (metric, _) in HELD_OUT.items() if metric in line})
    git_hash = json.loads((folder / "args.json").read_text())["git_hash"]
    return {"git_hash": git_hash, "evaluations": evaluations, "steps": steps}


def run_with_divergence(script, argv):
    """Run a script whose log gets DIVERGENCE of each trained step, the mean over a rollout's last mini-batch."""
    from common.run.command_line import parse_args
    from common.run.ending import friendly_errors

    module = importlib.import_module(script)
    accumulate, update = module.accumulate_gradients, module.update
    divergences = {}

    def moving_window(args, step):  # one further each rollout, so that all positions that training visits are seen
        low, high = args.sde_window_range
        start = low + (step - 1) % (high - args.sde_window_size - low + 1)
        return tuple(range(start, start + args.sde_window_size))

    def accumulate_and_measure(args, model, batch, mini_batch, *others):
        sampled = batch.trajectories.select(mini_batch)
        now = module.recompute_log_probs(args, model, batch.request.select(mini_batch), sampled)
        squares = ((now.prev_sample_means - sampled.prev_sample_means) ** 2).flatten(2).mean(2)  # (images, SDE steps)
        of_steps = (squares / (2 * sampled.transition_stds**2)).mean(0).tolist()
        divergences.clear()  # of the mini-batch before
        divergences.update({f"{DIVERGENCE}{i}": of_steps[w] for w, i in enumerate(batch.request.step_numbers)})
        return accumulate(args, model, batch, mini_batch, *others)

    module.accumulate_gradients = accumulate_and_measure
    module.update = lambda *given: update(*given) | divergences
    with friendly_errors():
        args = module.check(parse_args(module.Args, module.__doc__, argv))
        if args.sde_window_size:
            module.draw_sde_steps = moving_window
        module.main(args, module.prepare(args))


def own_sampler(job, name, core):
    """An evaluation by the sampler that a policy was trained with, in a process of its own: its line of the record."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.comparison", "own", json.dumps(job), name]
    printed = child(command, core, stdout=subprocess.PIPE, check=True).stdout
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    told = {"git_hash": git.stdout.strip() or None, "seconds": time.perf_counter() - began}  # its start among them
    return job | told | json.loads(printed.splitlines()[-1])


def score_by_own_sampler(run, adapter, chunks=8):
    """Rewards of the table's prompts and noise where the steps that training samples with noise have noise; `images`.

    run: the job of the policy's training. adapter: the run's folder, or None for the model before training. Where the
    window moves, `chunks` of its positions are taken, spread over those of the run, each for every eighth image.
    """
    from common.cpu import repair_torchvision

    repair_torchvision()  # before diffusers is imported
    from common.files.prompts import read_prompts
    from common.models.loading import find_family, load_model
    from common.rewards._loading import load_rewards
    from common.run.command_line import parse_args
    from common.scoring import score_images
    from common.sde import image_seed
    from tools.sample import read_policy, use

    import torch

    module = importlib.import_module(ROWS[run["row"]]["script"].removesuffix(".py"))
    args = parse_args(module.Args, module.__doc__, options_of(run, "none"))
    rewards = load_rewards([*args.reward, *args.eval_reward])
    size = (*args.image_size, args.num_frames)
    family = find_family(args.model, *size, args.guidance_scale, args.max_sequence_length, args.family)
    model = load_model(family, args.model, torch.float32, "cpu")
    if adapter:
        use(model, *read_policy(adapter, args.model))
    held_out = read_prompts(args.eval_prompts, max_prompts=args.max_prompts)
    copies = args.eval_images_per_prompt
    places = range(len(held_out) * copies)
    windows = sorted({module.draw_sde_steps(args, step) for step in range(1, args.num_steps + 1)})
    scores = []
    for chunk in range(chunks):
        rows = places[chunk::chunks]
        prompts = held_out.select(place // copies for place in rows)
        seeds = [image_seed("eval", place % copies, place // copies) for place in rows]
        sde_steps = windows[(2 * chunk + 1) * len(windows) // (2 * chunks)]  # of eight windows each one once
        request = module.make_request(args, model, prompts, torch.arange(len(rows)), seeds, sde_steps=sde_steps)
        scores.append(score_images(rewards, module.sample_locally(model, request).images, prompts))
    means = torch.cat(scores).mean(0).tolist()
    return {"images": len(places)} | dict(zip(rewards, means, strict=True))


# ---- all of them -----------------------------------------------------------------------------------------------------
def read_record(path):
    """Its lines, except a last one that a kill cut short."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def append(path, line):
    """Add a line to the record, in place of a last one that a kill cut short."""
    whole = path.read_bytes() if path.exists() else b""
    with open(path, "ab") as file:
        file.truncate(whole.rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")


def record_cut(path, cut):
    """Let everything from now on be of this cut, which is decided before the table's first run."""
    record = read_record(path)
    if CUTS[cut] != cut_of(record):
        if any(line["stage"] == "run" for line in record):
            raise SystemExit(f"--cut {cut}: {path} has runs of another cut: begin another record")
        append(path, {"stage": "cut", "row": None, "rollouts": CUTS[cut][0], "thresholds": CUTS[cut][1]})


def work_through(jobs, path, cores, do=None, follow=evaluations_of, name=folder_name):
    """Do the jobs that the record lacks, one on each core, and append a line for each that is finished.

    follow: the jobs that come right after one; name: what a finished one is called."""
    todo = [job for job in jobs if not is_recorded(job, read_record(path))]
    free: queue.SimpleQueue = queue.SimpleQueue()
    count = itertools.count(1)
    writing = threading.Lock()
    stopping = threading.Event()  # one has raised: what runs may end, nothing else starts
    for core in cores:
        free.put(core)

    def work(job):
        core = free.get()
        try:
            if not stopping.is_set():
                for one in (job, *follow(job)):
                    line = (do or do_job)(one, path, core)
                    with writing:
                        append(path, line)
                        failed = ", failed" if line.get("failed") else ""
                        if one is job:
                            print(f"{next(count)} of {len(todo)}: {name(job)}{failed}", flush=True)
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
    record = read_record(path)
    row = job["row"]
    run = make_job("run", job["rollouts"], row, max(job["seed"], 1), *chosen(record, row))
    # a run that failed before its second evaluation has saved nothing: its policy is the model before training
    unsaved = [one["seed"] for one in lines_of(record, "run", row) if one["failed"] and len(one["evaluations"]) < 2]
    name = "" if job["seed"] in (0, *unsaved) else folder_name(run)
    return own_sampler(run | {"stage": "evaluate"}, name, core) | job


def compare_all(path, cores):
    work_through(match_jobs(), path, cores)
    work_through(tune_jobs(read_record(path)), path, cores)
    while jobs := widening_jobs(read_record(path)):
        work_through(jobs, path, cores)
    work_through(run_jobs(read_record(path)), path, cores)
    work_through(evaluate_jobs(read_record(path)), path, cores)


def again(path, row, seed, core):
    """Run one seed of one row alone, printing a command that does so, and compare it with the record."""
    record = read_record(path)
    job = make_job("run", rollouts_of(record, "run"), row, seed, *chosen(record, row))
    name = f"comparison-again-{row}-seed{seed}"
    shutil.rmtree(RUNS / name, ignore_errors=True)
    free = next(f"{name}-{i}" for i in itertools.count(2) if not (RUNS / f"{name}-{i}").exists())
    command = ["taskset", "-c", str(core), "torchrun", *command_of(job, free)[3:]]
    print(f"OMP_NUM_THREADS=1 {shlex.join(command)}", flush=True)
    values = lambda line: [{key: point[key] for key in HELD_OUT} for point in line["evaluations"]]
    now = train(job, name, core)
    print(f"reward {now['evaluations'][-1]['ocr']}")
    for line in lines_of(record, "run", row):
        if line["seed"] == seed:
            verdict = "the same numbers" if values(line) == values(now) else "other numbers"
            print(f"recorded {line['evaluations'][-1]['ocr']}: {verdict} at all evaluations")


def plan(seconds, num_rollouts=CUTS[0][0], num_thresholds=CUTS[0][1]):
    """{stage: (runs, hours of two cores)}, at so many seconds for a rollout of Flow-GRPO on one core."""
    counts = {"match": 0, "tune": 0, "run": 0, "evaluate": 0}
    spent = dict.fromkeys(counts, 0.0)

    def add(stage, runs, rollouts, evaluations, cost):
        counts[stage] += runs
        start = STARTUP_S if runs else 0
        spent[stage] += runs * (start + seconds * (rollouts * cost + evaluations * EVAL_COST))

    for row, setting in ROWS.items():
        cost = setting["cost"]
        if setting["is_noisy"]:
            add("match", 1 if row == BASE else len(GRID), MATCH_ROLLOUTS, 1, cost)
            add("evaluate", setting["seeds"] + 1, 0, 1, cost)
        runs = len(LEARNING_RATES) * (num_thresholds if setting["threshold"] else 1)
        if not setting["choice"]:
            add("tune", runs, num_rollouts // 2, 1 + math.ceil(num_rollouts // 2 / EVAL_EVERY), cost)
        add("run", setting["seeds"], num_rollouts, 1 + num_rollouts // EVAL_EVERY, cost)
    return {stage: (counts[stage], spent[stage] / 3600 / 2) for stage in counts}


def print_plan(seconds):
    """Print the first cut whose runs take at most BUDGET_H together and LONGEST_MIN each, or the last cut."""
    longest = max(setting["cost"] for setting in ROWS.values())
    for num_rollouts, num_thresholds in CUTS:
        stages = plan(seconds, num_rollouts, num_thresholds)
        hours = sum(of_stage for _, of_stage in stages.values())
        rollouts = num_rollouts * longest + EVAL_COST * (1 + num_rollouts // EVAL_EVERY)
        minutes = (STARTUP_S + seconds * rollouts) / 60
        fits = hours <= BUDGET_H and minutes <= LONGEST_MIN
        if fits:
            break
    for stage, (runs, of_stage) in stages.items():
        print(f"{stage:9}{runs:4} runs {of_stage:5.1f} h of two cores")
    total = sum(runs for runs, _ in stages.values())
    print(f"{'all':9}{total:4} runs {hours:5.1f} h, of {BUDGET_H} h at most")
    print(f"the longest run alone, on one core: {minutes:.1f} minutes, of {LONGEST_MIN} at most")
    cut = CUTS.index((num_rollouts, num_thresholds))
    told = f"cut, pass --cut {cut}" if cut else "nothing is cut"
    print(f"{num_rollouts} rollouts, {num_thresholds} thresholds: {told}{'' if fits else '; this is too long as well'}")


def main():
    if sys.argv[1:2] == ["divergence"]:  # the command of a matching run
        return run_with_divergence(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["own"]:  # that of an evaluation
        run = json.loads(sys.argv[2]) | {"stage": "run"}
        return print(json.dumps(score_by_own_sampler(run, sys.argv[3] and RUNS / sys.argv[3])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", help="needed except by --plan")
    parser.add_argument("--cores", nargs="+", type=int, default=[0, 1], help="one run on each")
    parser.add_argument("--plan", type=float, metavar="SECONDS", help="of a rollout of Flow-GRPO; starts nothing")
    parser.add_argument("--cut", type=int, choices=range(len(CUTS)), help="how much is cut, kept in RECORD; see --plan")
    parser.add_argument("--only", choices=ROWS, metavar="ROW", help="one run of this row again, with --seed")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.plan:
        return print_plan(args.plan)
    if not args.record:
        parser.error("RECORD is needed")
    if args.only:
        return again(args.record, args.only, args.seed, args.cores[0])
    if args.cut is not None:
        record_cut(args.record, args.cut)
    return compare_all(args.record, args.cores)


if __name__ == "__main__":
    main()
