"""The exam: every algorithm against an answer that is known. docs/lab/exam.md has the mathematics and the verdicts.

    python -m benchmarks.exam                          # the runs that the record lacks; then its tables and figure
    python -m benchmarks.exam --rows flow_grpo awm     # of some rows alone
    python -m benchmarks.exam my_grpo.py --kl_coef 1   # a fork, with its own options and --price; records nothing

A run is a script as it is, by its own `main`, on the model of benchmarks/exam_model.py, in a process forked from this
one. All that is taken from it is its trained table. How the samples of a table are distributed is then integrated on a
grid of z, without drawing any (benchmarks/exam_optima.py). The record, docs/lab/records/exam.jsonl, has a line for each
row, task and seed.
"""

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import random
import runpy
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import exam_model
from benchmarks.exam_optima import (
    GROUP_SIZE,
    NUM_STEPS,
    ODE,
    TASKS,
    Sampler,
    claimed_strength,
    divergence,
    final_density,
    first_latent_share,
    moments,
    step_optimum,
    strength_of,
    tilted,
    untrained,
)
from common.cpu import repair_torchvision
from common.run import plots
from common.run import record as run_record
from common.user_code.loading import load_function
from tools.compare import paired_interval
from tools.sweep import split_options

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "benchmarks" / "exam_model.py"
RECORD = ROOT / "docs" / "lab" / "records" / "exam.jsonl"
SEEDS = (1, 2, 3)
SPENT = 0.4  # nats, at which rows without a fixed point are compared
POINTS = 12  # of a curve, beside its start
Options = dict[str, Any]

# As far as a script has them. Nothing cuts a gradient or shrinks a weight, and the learning rate falls to 0: what
# remains is the fixed point of the loss.
COMMON: Options = {
    "rollout": "local",
    "lora_rank": 0,
    "image_size": "16 16",
    "num_inference_steps": NUM_STEPS,
    "eval_num_inference_steps": 1,
    "eval_every": 10**6,
    "max_prompts": 1,
    "num_prompts": 32,
    "group_size": GROUP_SIZE,
    "micro_batch_size": 128,
    "updates_per_rollout": 2,
    "num_steps": 60,
    "learning_rate": 0.05,
    "lr_schedule": "cosine",
    "weight_decay": 0,
    "max_grad_norm": 1e9,
}


@dataclasses.dataclass
class Row:
    """A script with its options. price: its claimed beta is price std(rewards) G / (G - 1); None: it claims none."""

    script: str
    options: Options
    price: float | None = None
    noise: Sampler | None = None  # of the sampler that it trains, where all rollouts have the same; None: the ODE
    has_end: bool = True  # whether its loss has a fixed point: without one it goes on as long as it is trained


# A mixture's deviation falls as a mode is lost, which divides beta as well: with twice the KL some of the mode remains.
KL_FACTOR = {"gaussian": 1, "mixture": 2}  # of kl_coef or 1 / reward_multiplier, and so of the price
ALL_STEPS: Options = {"sde_window_size": 0, "kl_type": "paper"}  # every sampling step but the last is noisy and trained
# A window moves over them: a step is trained in a part of the rollouts alone, and needs more of them.
WINDOW: Options = {"sde_window_range": "0 9", "kl_type": "paper", "num_steps": 120, "learning_rate": 0.1}
NO_KL: Options = {"kl_coef": 0, "learning_rate": 0.03}  # 60 rollouts at this rate are a budget: there is no end
PAIRS: Options = {"num_pairs": 64, "num_steps": 150, "num_pair_prompts": 256, "dpo_beta": 1024}
SDE = ("sde", 0.7, NUM_STEPS - 1)
ROWS = {
    "flow_grpo": Row("flow_grpo.py", ALL_STEPS | {"kl_coef": 1}, 1.0, SDE),
    "grpo_guard": Row("grpo_guard.py", ALL_STEPS | {"kl_coef": 6}, None, SDE),
    "mix_grpo": Row("mix_grpo.py", WINDOW | {"sde_window_size": 4, "iters_per_group": 1, "kl_coef": 1}, 1.0),
    "diffusion_nft, KL": Row("diffusion_nft.py", {"kl_coef": 1}),
    "dpo_offline, Bradley-Terry": Row("dpo_offline.py", PAIRS),
    "flow_grpo, memoryless": Row(
        "flow_grpo.py", ALL_STEPS | {"kl_coef": 1, "noise_level": 2**0.5}, 1.0, ("sde", 2**0.5, NUM_STEPS - 1)
    ),
    "flow_grpo, first step": Row(
        "flow_grpo.py", {"kl_coef": 1, "kl_type": "paper", "learning_rate": 0.15}, 1.0, ("sde", 0.7, 1)
    ),
    "flow_grpo, no KL": Row("flow_grpo.py", ALL_STEPS | NO_KL, None, SDE, has_end=False),
    "diffusion_nft": Row("diffusion_nft.py", NO_KL, has_end=False),
    "dpo_offline": Row("dpo_offline.py", PAIRS, has_end=False),
    "awm, KL": Row("contrib/awm.py", {"kl_coef": 0.2}, 1.0),
    "dance_grpo": Row("contrib/dance_grpo.py", ALL_STEPS | {"kl_coef": 1}, 1.0, ("dance", 0.7, NUM_STEPS - 1)),
    "tempflow_grpo": Row("contrib/tempflow_grpo.py", WINDOW | {"sde_window_size": 1, "kl_coef": 4}),
    "flow_dppo": Row("contrib/flow_dppo.py", ALL_STEPS | {"kl_coef": 1}, 1.0, SDE),
    "crd, KL": Row("contrib/crd.py", {"kl_coef": 2}),
    "ram": Row("contrib/ram.py", {"reward_multiplier": 1}, 1.0),
    "awm": Row("contrib/awm.py", NO_KL, has_end=False),
    "crd": Row("contrib/crd.py", NO_KL, has_end=False),
    "dgpo": Row("contrib/dgpo.py", {"learning_rate": 0.03}, has_end=False),
    "online_dpo": Row("contrib/online_dpo.py", {"learning_rate": 0.03}, has_end=False),
    "v_grpo": Row("contrib/v_grpo.py", {"learning_rate": 0.03}, has_end=False),
}


# ---- a run -----------------------------------------------------------------------------------------------------------
def write_pairs(task: str, folder: Path, count: int, seed: int) -> Path:
    """pairs.jsonl of pairs from the model before training; the better one is chosen with P = sigmoid(z - z')."""
    generator = torch.Generator().manual_seed(seed)
    choice = random.Random(seed)
    field = exam_model.Field(*TASKS[task].mixture)
    x = torch.randn(2 * count, exam_model.DIMENSION, generator=generator)
    with torch.no_grad():
        for i in range(NUM_STEPS):
            x = x - field(x, torch.full([len(x)], 1 - i / NUM_STEPS)) / NUM_STEPS
    images = exam_model.to_images(x.view(-1, 1, exam_model.SIDE, exam_model.SIDE))
    rewards = exam_model.height(images, [], [])
    lines = []
    for i in range(count):
        names = [f"{i}_a.png", f"{i}_b.png"]
        for name, image in zip(names, images[2 * i : 2 * i + 2], strict=True):
            image.save(folder / name, compress_level=0)
        is_first = choice.random() < 1 / (1 + math.exp(rewards[2 * i + 1] - rewards[2 * i]))
        chosen, rejected = names if is_first else reversed(names)
        lines.append(json.dumps({"prompt": "a sample", "chosen": chosen, "rejected": rejected}) + "\n")
    path = folder / "pairs.jsonl"
    path.write_text("".join(lines))
    return path


def run_script(script: Path, options: Options, log: Path) -> None:
    """What `torchrun script` would start, in this process, its output in a file. Options of COMMON that the script does
    not have are left out.

    Raises:
        RuntimeError: with the end of the output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.path.insert(0, str(script.parent))
    known = {field.name for field in dataclasses.fields(runpy.run_path(str(script))["Args"])}
    options = {name: value for name, value in COMMON.items() if name in known} | options
    sys.argv = [str(script)]
    for name, value in options.items():
        sys.argv += [f"--{name}", *str(value).split()]
    plots.draw_panels = lambda panels, path: Path(path).touch()  # the half of a run's seconds, and not of the algorithm
    run_record.user_code = lambda *given: {}
    opened = os.open(log, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(opened, number)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except (Exception, SystemExit) as error:
        raise RuntimeError(f"{script}: {error}\n{log.read_text()[-2000:]}") from error


def run(job: tuple[str, Row, str, int]) -> dict:
    """Run a row's script in this process, which is not used again. Returns the line of the record: the curves, by the
    ODE and by the sampler that was trained, of what the tables before some optimizer steps sample."""
    name, row, task, seed = job
    began = time.perf_counter()
    script = Path(row.script) if Path(row.script).is_file() else ROOT / row.script
    location = f"{MODEL}:{TASKS[task].__name__}"
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text("".join(f"sample {i}\n" for i in range(512)))
        options: Options = {"family": location, "reward": f"{MODEL}:height", "name": f"{folder}/run", "seed": seed}
        options |= {"train_prompts": prompts, "eval_prompts": prompts} | row.options
        if "kl_coef" in row.options:
            options["kl_coef"] = float(row.options["kl_coef"]) * KL_FACTOR[task]
        if "reward_multiplier" in row.options:  # contrib/ram.py's, one over a kl_coef
            options["reward_multiplier"] = float(row.options["reward_multiplier"]) / KL_FACTOR[task]
        if "    cache: " in script.read_text():
            options["cache"] = Path(folder) / "cache"
        if name.endswith("Bradley-Terry"):
            options["pairs"] = write_pairs(task, Path(folder), 1024, seed)
        run_script(script.resolve(), options, Path(folder) / "log.txt")
    family: Any = load_function(location, "--family")  # the script's own copy of the class
    history = family.loaded[-1].transformer.history
    line = {"row": name, "task": task, "seed": seed, "script": row.script, "options": row.options}
    line |= {"updates": len(history), "seconds": round(time.perf_counter() - began, 1)}
    line["ode"] = curve(task, history, ODE)
    if row.noise:
        line["trained"] = curve(task, history, row.noise)
    return line


def curve(task: str, history: list[torch.Tensor], sampler: Sampler) -> list[dict[str, float]]:
    """KL to the start, moments and the other directions' variance, over the start's, of POINTS + 1 of the tables."""
    reference, rest_before = final_density(task, history[0], sampler)
    points = []
    for place in sorted({round(i * (len(history) - 1) / POINTS) for i in range(POINTS + 1)}):
        density, rest = final_density(task, history[place], sampler)
        point = {"update": place, "kl": divergence(density, reference)} | moments(density)
        point["rest"] = rest / rest_before
        points.append({key: round(value, 5) for key, value in point.items()})
    return points


def run_or_explain(job: tuple[str, Row, str, int]) -> dict:
    try:
        return run(job)
    except RuntimeError as error:
        return {"row": job[0], "task": job[2], "seed": job[3], "error": str(error)}


def run_all(jobs: list[tuple[str, Row, str, int]], processes: int, record: Path | None) -> list[dict]:
    """The lines of all jobs, each run in a process of its own, forked from this one, which has the slow imports."""
    repair_torchvision()
    for name in ("diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3", "tyro"):
        __import__(name)
    torch.set_num_threads(1)
    lines = []
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for line in pool.imap_unordered(run_or_explain, jobs):
            if "error" in line:
                print(f"{line['row']}, {line['task']}, seed {line['seed']} failed: {line['error']}", file=sys.stderr)
                continue
            print(f"{line['row']}, {line['task']}, seed {line['seed']}: {line['seconds']} s", flush=True)
            lines.append(line)
            if record:
                with open(record, "a") as file:
                    file.write(json.dumps(line) + "\n")
    return lines


# ---- verdicts --------------------------------------------------------------------------------------------------------
def biases(line: dict, price: float | None) -> dict[str, float]:
    """How a run's last table differs from the claimed optimum or, without a price, from the optimum of the same KL.

    By the sampler that was trained: the mean in deviations of the model before training, the variance as a share of the
    optimum's, the mass of the low mode; and what was claimed.
    """
    # a script of one's own, which says its noise, may be called as a row
    noise = line["noise"] if "noise" in line else ROWS[line["row"]].noise
    reference, _ = final_density(line["task"], untrained(line["task"]), noise or ODE)
    last = line["trained" if noise else "ode"][-1]
    if price:
        strength = claimed_strength(reference, price * KL_FACTOR[line["task"]])
    else:
        strength = strength_of(reference, last["kl"])
    optimum = moments(tilted(reference, strength))
    std = math.sqrt(moments(reference)["variance"])
    return {
        "KL": last["kl"],
        "mean": last["mean"] / std,
        "mean*": optimum["mean"] / std,
        "bias of mean": (last["mean"] - optimum["mean"]) / std,
        "bias of variance": last["variance"] / optimum["variance"] - 1,
        "mass": last["mass"],
        "mass*": optimum["mass"],
        "bias of mass": last["mass"] - optimum["mass"],
        "other directions": last["rest"] - 1,
    }


def interval(values: list[float]) -> str:
    """The mean and, of several seeds, its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:+.3f}"
    mean, low, high = paired_interval(values)
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def table_text(lines: list[dict], task: str, prices: dict[str, float | None], claimed: bool) -> str:
    """A Markdown table, a line for each row: against the claimed optimum, or against the optimum of the KL spent."""
    columns = ["bias of mean", "bias of variance", "bias of mass", "other directions"]
    if task == "gaussian":
        columns.remove("bias of mass")
    shown = ["mean", "mean*"] if task == "gaussian" else ["mass", "mass*"]
    text = (
        f"| {task}: seeds | KL | {' | '.join([*shown, *columns])} |\n"
        + "|---" * (2 + len(shown) + len(columns))
        + "|\n"
    )
    for name in dict.fromkeys([*ROWS, *(line["row"] for line in lines)]):
        of_row = [line for line in lines if line["row"] == name and line["task"] == task]
        is_own = of_row and "noise" in of_row[0]
        if not of_row or (claimed and not prices.get(name)) or not (is_own or ROWS[name].has_end):
            continue
        found = [biases(line, prices[name] if claimed else None) for line in of_row]
        cells = [f"{statistics.mean(bias[key] for bias in found):.3f}" for key in ("KL", *shown)]
        cells += [interval([bias[key] for bias in found]) for key in columns]
        text += f"| `{name}`: {len(of_row)} | {' | '.join(cells)} |\n"
    return text


def where_spent(line: dict) -> dict[str, float] | None:
    """A run where its ODE samples have the KL of SPENT to the model before training, linear between two points of its
    curve, against the optimum there. None: they never have."""
    points = line["ode"]
    for before, after in itertools.pairwise(points):
        if before["kl"] <= SPENT <= after["kl"]:
            share = (SPENT - before["kl"]) / (after["kl"] - before["kl"])
            found = {key: before[key] + share * (after[key] - before[key]) for key in before}
            reference, _ = final_density(line["task"], untrained(line["task"]), ODE)
            optimum = moments(tilted(reference, strength_of(reference, SPENT)))
            std = math.sqrt(moments(reference)["variance"])
            return {
                "share of the run": found["update"] / points[-1]["update"],
                "bias of mean": (found["mean"] - optimum["mean"]) / std,
                "bias of variance": found["variance"] / optimum["variance"] - 1,
                "bias of mass": found["mass"] - optimum["mass"],
                "other directions": found["rest"] - 1,
            }
    return None


def budget_text(lines: list[dict], task: str) -> str:
    """A Markdown table, a line for each row without an end, by the ODE: where it has spent SPENT."""
    columns = ["share of the run", "bias of mean", "bias of variance", "bias of mass", "other directions"]
    if task == "gaussian":
        columns.remove("bias of mass")
    text = f"| {task}: seeds | {' | '.join(columns)} |\n" + "|---" * (1 + len(columns)) + "|\n"
    for name, row in ROWS.items():
        of_row = [line for line in lines if line["row"] == name and line["task"] == task]
        found = [at for line in of_row if (at := where_spent(line))]
        if row.has_end or not of_row:
            continue
        cells = [interval([at[key] for at in found]) if found else "never" for key in columns]
        text += f"| `{name}`: {len(of_row)} | {' | '.join(cells)} |\n"
    return text


def step_text(lines: list[dict], task: str) -> str:
    """A Markdown table of the rows whose KL is that of fixed noisy steps: mean and mass of the claimed optimum, of the
    best steps, of the steps where the KL's own gradient ends, and measured."""
    columns = ["claimed optimum", "best steps", "its gradient's end", "measured"]
    text = f"| {task} | {' | '.join(columns)} |\n" + "|---" * (1 + len(columns)) + "|\n"
    for name, row in ROWS.items():
        of_row = [line for line in lines if line["row"] == name and line["task"] == task]
        if not (row.price and row.noise and of_row):
            continue
        price = row.price * KL_FACTOR[task]
        reference, _ = final_density(task, untrained(task), row.noise)
        std = math.sqrt(moments(reference)["variance"])
        optima = [tilted(reference, claimed_strength(reference, price))]
        optima += [step_optimum(task, row.noise, price, counts_later_kl) for counts_later_kl in (True, False)]
        found = [moments(optimum) for optimum in optima]
        found.append({key: statistics.mean(line["trained"][-1][key] for line in of_row) for key in found[0]})
        cells = [f"{at['mean'] / std:.3f}" + (f", {at['mass']:.3f}" if task == "mixture" else "") for at in found]
        text += f"| `{name}` | {' | '.join(cells)} |\n"
    return text


def first_latent_text() -> str:
    """What the first latent decides, by schedule, kind and level of the noise."""
    even = [1 - i / NUM_STEPS for i in range(NUM_STEPS + 1)]
    text = "| noise | 10 even steps | 10 steps, shift 3 | 40 steps, shift 3 |\n|---|---|---|---|\n"
    schedules = [even, shifted(10), shifted(40)]
    kinds = [("sde", 0.5), ("sde", 0.7), ("sde", 1.0), ("sde", 1.2), ("sde", 2**0.5), ("dance", 0.3), ("dance", 0.7)]
    for kind, level in kinds:
        shares = [first_latent_share(kind, level, sigmas, len(sigmas) - 2) for sigmas in schedules]
        text += f"| `{kind}` {level:.3g} | {' | '.join(f'{share:.3f}' for share in shares)} |\n"
    shares = [first_latent_share("sde", 0.7, sigmas, 1) for sigmas in schedules]
    return text + f"| `sde` 0.7, first step alone | {' | '.join(f'{share:.3f}' for share in shares)} |\n"


def shifted(num_steps: int, shift: float = 3.0) -> list[float]:
    """Stable Diffusion 3's sigmas: shift s / (1 + (shift - 1) s) of even s."""
    even = [1 - i / num_steps for i in range(num_steps + 1)]
    return [shift * s / (1 + (shift - 1) * s) for s in even]


def draw(lines: list[dict], path: Path) -> None:
    """Mean or mass, and variance, by the KL spent, by the ODE; the optimum of each KL is the black line."""
    figure, axes = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
    panels = [("gaussian", "mean"), ("gaussian", "variance"), ("mixture", "mass"), ("mixture", "variance")]
    names = list(dict.fromkeys(line["row"] for line in lines))
    for axis, (task, key) in zip(axes.flat, panels, strict=True):
        reference, _ = final_density(task, untrained(task), ODE)
        optima = [tilted(reference, strength) for strength in np.linspace(0, 4, 60)]
        spent = [divergence(optimum, reference) for optimum in optima]
        axis.plot(spent, [moments(optimum)[key] for optimum in optima], color="black", linewidth=2, label="optimum")
        for number, name in enumerate(names):
            curves = [line["ode"] for line in lines if line["row"] == name and line["task"] == task]
            if not curves:
                continue
            mean = lambda what: [statistics.mean(c[i][what] for c in curves) for i in range(len(curves[0]))]  # noqa: B023
            style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10]}
            axis.plot(mean("kl"), mean(key), **style, marker=".", linewidth=1, label=name)
        what = {"mean": "mean of z", "variance": "variance of z", "mass": "mass of the low mode"}[key]
        axis.set(xlabel="KL to the model before training, nats", ylabel=what, title=task, xlim=(0, 2))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def sit(script: str, options: list[str], price: float | None, tasks: list[str], seeds: int, processes: int) -> str:
    """The tables of a script that has no row. The options are its own, `--name value`."""
    given: Options = {option: " ".join(values) for option, values in split_options(options).items()}
    row = Row(script, given, price)
    defaults = vars(runpy.run_path(script)["Args"]())
    for option in ("kl_coef", "reward_multiplier"):  # which a task multiplies, as it does the price
        if option in defaults:
            given.setdefault(option, defaults[option])
    if "sde_window_size" in defaults:
        is_mix = "iters_per_group" in defaults  # whose window is never all steps: those of MixGRPO's row
        steps = {name: value for name, value in ROWS["mix_grpo"].options.items() if name != "kl_coef"}
        row.options = (steps if is_mix else ALL_STEPS) | given
        used = defaults | row.options
        if str(used["sde_window_size"]) == "0":
            row.noise = (used["sde_type"], float(used["noise_level"]), NUM_STEPS - 1)
    name = Path(script).stem
    jobs = [(name, row, task, seed) for task in tasks for seed in range(1, seeds + 1)]
    lines = [line | {"noise": row.noise} for line in run_all(jobs, processes, None)]
    if len(lines) < len(jobs):
        sys.exit(1)  # with its error on the screen
    text = ""
    for task in tasks:
        if price:
            text += f"\nagainst the claimed optimum\n{table_text(lines, task, {name: price}, True)}"
        text += f"\nagainst the optimum of the KL spent\n{table_text(lines, task, {name: None}, False)}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "script", nargs="?", help="a script of yours, with an Args; the options that follow are its own"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="the base distributions")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds 1 to this")
    parser.add_argument(
        "--price",
        type=float,
        help="of your script: its beta over std(rewards) G / (G - 1); the mixture doubles it and kl_coef, and halves"
        " reward_multiplier",
    )
    parser.add_argument("--processes", type=int, default=2, help="runs at once")
    parser.add_argument("--table", action="store_true", help="make no run")
    args, options = parser.parse_known_args()
    if args.script and not Path(args.script).is_file():
        parser.error(f"{args.script}: no such script")
    if "--seed" in (option.partition("=")[0] for option in options):
        parser.error("--seed: the exam sets it; --seeds says how many")
    if args.script:
        print(sit(args.script, options, args.price, args.tasks, args.seeds, args.processes))
        return
    if options:
        parser.error(f"{options[0]}: options of a script need the script before them")
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []
    done = {(line["row"], line["task"], line["seed"]) for line in lines}
    wanted = [(row, task, seed) for seed in range(1, args.seeds + 1) for task in args.tasks for row in args.rows]
    jobs = [(row, ROWS[row], task, seed) for row, task, seed in wanted if (row, task, seed) not in done]
    if not args.table:
        lines += run_all(jobs, args.processes, RECORD)
    prices = {name: row.price for name, row in ROWS.items()}
    for claimed, title in ((True, "Against the claimed optimum"), (False, "Against the optimum of the KL spent")):
        for task in TASKS:
            print(f"{title}\n\n{table_text(lines, task, prices, claimed)}")
    for task in TASKS:
        print(f"Without an end, where {SPENT} nats are spent\n\n{budget_text(lines, task)}")
    for task in TASKS:
        print(f"The steps' own optimum\n\n{step_text(lines, task)}")
    print(f"The first latent's share\n\n{first_latent_text()}")
    draw(lines, RECORD.with_suffix(".png"))


if __name__ == "__main__":
    main()
