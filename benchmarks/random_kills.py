"""Kill a run on two ranks at random times, and resume it until it finishes: it must equal an undisturbed run.

    python -m benchmarks.random_kills --work FOLDER

SIGKILL comes a random time after a start, or after its first step has begun, to rank 0, rank 1, torchrun or all of the
run's processes; the next start has --resume latest. The longest times are the undisturbed run's start and three of its
steps. The shares of them and the victims follow from --seed. Where a rank is to be killed that torchrun has not started
yet, everything is killed. After the last kill the run goes on to its end.

Compared are the metrics without times, the adapters' bytes and the last checkpoint's policies. Prints a table in
Markdown, a row per kill. Exits with 1 where the two runs differ, or a process of a killed run is left after a minute.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from common.files.checkpoints import checkpoint_step, load_checkpoint, saved_checkpoints

import psutil
import torch

ROOT = Path(__file__).parents[1]
OPTIONS: dict[str, object] = {
    "--rollout": "local",
    "--reward": "jpeg_compressibility",
    "--num_prompts": 2,
    "--group_size": 4,
    "--num_inference_steps": 4,
    "--updates_per_rollout": 1,
    "--max_prompts": 2,
    "--eval_num_inference_steps": 3,
    "--eval_every": 4,
    "--save_every": 1,
    "--ema_decay": 0.9,
    "--lr_schedule": "constant:20",
}
STEPS = 3  # a kill comes at most so many steps after the first one of a start has begun
VICTIMS = ("rank 0", "rank 1", "torchrun", "everything")
LIMIT_S = 60.0  # within which no process of a killed run may be left


def start(work: Path, name: str, num_steps: int) -> subprocess.Popen[bytes]:
    """Start, or resume, the run `name` in `work` on two ranks; what it prints is added to NAME.log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(ROOT / "flow_grpo.py"), "--name", name, "--num_steps", str(num_steps), "--resume", "latest"]
    command += [str(part) for option in OPTIONS.items() for part in option]
    with open(work / f"{name}.log", "ab") as log:
        return subprocess.Popen(command, cwd=work, stdout=log, stderr=log)


def wait_for_training(torchrun: subprocess.Popen[bytes], log: Path, starts: int) -> None:
    """Wait until the log says for the starts-th time that the run trains, or until the run ends."""
    while torchrun.poll() is None and log.read_text().count("training: steps ") < starts:
        time.sleep(0.05)


def kill(victim: str, torchrun: subprocess.Popen[bytes]) -> tuple[str, float]:
    """SIGKILL to the victim. Returns whom it hit, and the seconds until no process of the run was left.

    Raises RuntimeError where one is left after LIMIT_S.
    """
    parent = psutil.Process(torchrun.pid)
    everything = [parent, *parent.children(recursive=True)]
    ranks = {f"rank {p.environ()['RANK']}": p for p in everything[1:] if p.is_running() and "RANK" in p.environ()}
    if victim.startswith("rank") and victim not in ranks:
        victim = "everything"
    for process in everything if victim == "everything" else [ranks.get(victim, parent)]:
        process.kill()
    killed = time.monotonic()
    torchrun.wait(LIMIT_S)
    _, left = psutil.wait_procs(everything, LIMIT_S)
    if left:
        raise RuntimeError(f"left {LIMIT_S:.0f} s after {victim} was killed: {left}")
    return victim, time.monotonic() - killed


def newest_step(run: Path) -> int | None:
    """The step of the newest checkpoint, or None."""
    saved = saved_checkpoints(run)
    return checkpoint_step(saved[-1]) if saved else None


def logged_step(run: Path) -> int | None:
    """The last step in metrics.jsonl, or None."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["training/global_step"] if lines else None


def rows_without_times(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, without times, speeds and memory."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(("timing_", "perf/"))} for row in rows]


def differences(run: Path, expected: Path) -> list[str]:
    """What is not equal in two finished runs, to the bit."""
    found = []
    if rows_without_times(run) != rows_without_times(expected):
        found.append("metrics.jsonl")
    for name in ("adapter", "best_adapter"):
        path = f"{name}/pytorch_lora_weights.safetensors"
        if (run / path).read_bytes() != (expected / path).read_bytes():
            found.append(path)
    states = [load_checkpoint(saved_checkpoints(folder)[-1]) for folder in (run, expected)]
    if states[0]["policies"].keys() != states[1]["policies"].keys():
        found.append("the last checkpoint's policies")
    for policy, tensors in states[0]["policies"].items():
        others = states[1]["policies"][policy]
        if tensors.keys() != others.keys() or not all(torch.equal(tensors[key], others[key]) for key in tensors):
            found.append(f"the policy {policy} of the last checkpoint")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder of the two runs; it must not exist")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    runs = options.work.resolve() / "runs"

    began = time.monotonic()
    whole = start(options.work, "whole", options.num_steps)
    wait_for_training(whole, options.work / "whole.log", 1)
    longest = {"start": time.monotonic() - began}
    if whole.wait():
        raise SystemExit(f"the undisturbed run failed: see {options.work}/whole.log")
    longest["first step"] = STEPS * (time.monotonic() - began - longest["start"]) / options.num_steps
    in_words = ", ".join(f"{seconds:.1f} s after the {moment}" for moment, seconds in longest.items())
    print(f"{options.num_steps} steps. Kills come at most {in_words}.\n", flush=True)

    draw = random.Random(options.seed)
    log = options.work / "killed.log"
    print("| kill | of | s | after its | newest checkpoint | last step logged | until no process, s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for number in range(1, options.kills + 1):
        moment, victim = draw.choice(list(longest)), draw.choice(VICTIMS)
        lifetime = draw.uniform(0, longest[moment])
        begun = log.read_text().count("training: steps ") if log.exists() else 0
        torchrun = start(options.work, "killed", options.num_steps)
        if moment == "first step":
            wait_for_training(torchrun, log, begun + 1)
        try:
            code = torchrun.wait(lifetime)
        except subprocess.TimeoutExpired:
            hit, seconds = kill(victim, torchrun)
        else:
            raise SystemExit(f"start {number} ended by itself (exit code {code}): see {log}, or raise --num_steps")
        saved, logged = newest_step(runs / "killed"), logged_step(runs / "killed")
        print(f"| {number} | {hit} | {lifetime:.1f} | {moment} | {saved} | {logged} | {seconds:.1f} |", flush=True)
    if start(options.work, "killed", options.num_steps).wait():
        raise SystemExit(f"the last start failed: see {log}")
    differ = differences(runs / "killed", runs / "whole")
    print(f"\nAfter {options.kills} kills: " + (", ".join(differ) + " differ" if differ else "equal to the bit"))
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
