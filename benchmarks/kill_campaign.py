"""Kill training runs with SIGKILL, every script in every phase: each time the next start must lose nothing.

    python benchmarks/kill_campaign.py docs/lab/records/kills.jsonl            # the kills of the plan that it lacks
    python benchmarks/kill_campaign.py docs/lab/records/kills.jsonl --table    # what it holds, in Markdown
    python benchmarks/kill_campaign.py docs/lab/records/kills_full.jsonl --full    # 20 kills of full weights' shards

A kill has a run (script, engine, ranks), a victim (a rank, torchrun, a vLLM-Omni engine, or everything at once) and a
phase. The runs say their phase themselves: this file is their --reward as well. The plan is the same list for the same
--seed. The kills of a run follow each other in one folder: every start resumes from what the last kill left, and proves
that it can. Then a JSON line is appended to the record, so that a campaign that was itself interrupted can be continued
by the same command.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import run as runs
from common.checkpoints import checkpoint_step, load_checkpoint, saved_checkpoints
from common.resuming import find_checkpoint
from common.rewards.ocr import ocr

import psutil

ROOT = Path(__file__).parents[1]
NAME = "campaign"
REWARD = f"{Path(__file__).resolve()}:ocr_and_phases"
OPTIONS = f"--name {NAME} --resume latest --group_size 4 --eval_every 1 --max_prompts 4 --num_steps 1000".split()
OPTIONS += ["--reward", REWARD]
ONLINE = ["--num_prompts", "4", "--rollout"]
FULL_WEIGHTS = ("--lora_rank", "0", "--learning_rate", "1e-5")
OFFLINE = ["--num_pair_prompts", "8", "--num_pairs", "4"]  # dpo_offline.py's

ONLINE_SCRIPTS = ["flow_grpo.py", "grpo_guard.py", "mix_grpo.py", "diffusion_nft.py"]
TRAINING = ["testing", "gen", "reward", "old_log_prob", "update_actor", "update_weights", "writing", "between"]
PHASES = {script: ["starting", "loading", *TRAINING] for script in ONLINE_SCRIPTS}
PHASES["diffusion_nft.py"].remove("old_log_prob")
PHASES["dpo_offline.py"] = ["make_pairs", "starting", "loading", "testing", "update_actor", "writing", "between"]
EARLY = ("starting", "loading", "make_pairs")  # before a start has resumed from a checkpoint

STARTING_S = 5.0  # a kill while starting comes within so many seconds of its victim's own start
BETWEEN_S = 0.02  # and one between two phases, within so many of the end of the first
LIMIT_S = 30.0  # within which no process of a killed run may be left


SHORTEST_S = 0.005  # a phase lasts at least so long, to be seen by whoever polls its file


class Kill(NamedTuple):
    """Who is killed when, in which run."""

    script: str  # relative to the repository, or absolute
    engine: str  # local, or vllm; dpo_offline.py has no engine: local
    ranks: int
    victim: str  # rank 0, rank 1, torchrun, engine (that of one rank) or everything
    phase: str  # of PHASES; writing: a checkpoint's temporary file is there, half-written


# ---- a run that says its phase ---------------------------------------------------------------------------------------
def ocr_and_phases(images, prompts, metadata):
    """The ocr reward. Its `load`, which every rank calls before the model loads, makes the run say its phases."""
    return ocr(images, prompts, metadata)


def say_phases():
    """From now on this rank's phase stands in the file phase_rankR of the folder that the run was started in.

    It is `loading` until the first phase, then a phase's name in metrics.jsonl ("gen", "update_actor" ...), and
    `between` from the end of one to the next.
    """
    file = os.open(f"phase_rank{os.environ.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT)
    timed = runs.Run.timed

    def say(phase):
        os.pwrite(file, phase.ljust(20).encode(), 0)  # in one write: a reader never finds a half of it
        time.sleep(SHORTEST_S)

    @contextmanager
    def timed_and_said(run, name):
        say(name)
        with timed(run, name):
            yield
        say("between")

    runs.Run.timed = timed_and_said
    say("loading")


ocr_and_phases.check = ocr.check
ocr_and_phases.load = say_phases


# ---- the plan --------------------------------------------------------------------------------------------------------
def plan(seed):
    """The campaign's kills, run by run, [[Kill ...] ...]: of all that can be combined, as many as are said here."""
    runs = [
        deal(seed, "dpo_offline.py", "local", 1, count=21),
        deal(seed, "dpo_offline.py", "local", 2, count=8),
        deal(seed, "flow_grpo.py", "vllm", 2, count=4),
    ]
    for number, script in enumerate(ONLINE_SCRIPTS):
        runs.append(deal(seed, script, "local", 1, count=30))  # all there are
        runs.append(deal(seed, script, "local", 2, count=8, first=8 * number))
        runs.append(deal(seed, script, "vllm", 1, count=6, first=10 * number))
    return runs


def plan_of_full_weights(seed):
    """20 kills of one run on two ranks, each of which writes shards."""
    victims = ("rank 0", "rank 1", "torchrun", "everything")
    phases = ("writing", "testing", "update_actor", "loading", "starting")
    kills = [Kill("flow_grpo.py", "local", 2, victim, phase) for phase in phases for victim in victims]
    random.Random(seed).shuffle(kills)
    return [kills]


def deal(seed, script, engine, ranks, count, first=0):
    """`count` kills of a run: of its victims x phases, shuffled, those from number `first` on, the last before the
    first again; so that scripts share out what one of them alone has no time for."""
    victims = [*(f"rank {rank}" for rank in range(ranks)), "torchrun", "everything"]
    if engine == "vllm":
        victims.append("engine")
    kills = [Kill(script, engine, ranks, victim, phase) for victim in victims for phase in PHASES[script]]
    random.Random(f"{seed} {engine} {ranks}").shuffle(kills)
    first %= len(kills)
    chosen = [*kills[first:], *kills[:first]][:count]
    return sorted(chosen, key=lambda kill: kill.phase != "make_pairs")  # pairs are made once a run, at its beginning


# ---- what a run has written ------------------------------------------------------------------------------------------
def newest_step(run):
    """The step of the newest checkpoint, -1 where there is none."""
    saved = saved_checkpoints(run)
    return checkpoint_step(saved[-1]) if saved else -1


def loadable_step(run):
    """The step that a start would resume from: the newest checkpoint whose every byte is right. -1: none."""
    checkpoint = find_checkpoint(run)
    return load_checkpoint(checkpoint)["step"] if checkpoint else -1


def half_written(run):
    """Checkpoints of which the write has begun and not ended: (name, time), as a later one may have the same name."""
    found = set()
    shards = [path for path in (run / "checkpoints").glob("step_*.shards") if not path.with_suffix(".pt").exists()]
    for path in [*(run / "checkpoints").glob(".step_*.new"), *shards]:
        with suppress(FileNotFoundError):  # it is whole by now
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def metric_lines(run):
    """The whole lines of metrics.jsonl, as bytes."""
    if not (run / "metrics.jsonl").exists():
        return []
    return [line for line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def step_of(line):
    return json.loads(line)["training/global_step"]


def up_to(lines, last):
    return [line for line in lines if step_of(line) <= last]


def seconds_of(run, phase):
    """How long the phase took when it was logged last; 0 where it never was."""
    if phase == "between":
        return BETWEEN_S
    name = "timing_s/startup" if phase == "loading" else f"timing_s/{phase}"
    for line in metric_lines(run)[::-1]:
        if name in line.decode():
            return json.loads(line)[name]
    return 0.0


def phase_of(folder, rank):
    path = folder / f"phase_rank{rank}"
    return path.read_text().strip() if path.exists() else "starting"


# ---- a run's processes -----------------------------------------------------------------------------------------------
def start(kill, folder, extra=()):
    """Start the run of `kill` in `folder`, by torchrun; its output is added to campaign.log."""
    for path in folder.glob("phase_rank*"):
        path.unlink()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(kill.ranks)]
    own = OFFLINE if kill.script == "dpo_offline.py" else [*ONLINE, kill.engine]
    with open(folder / "campaign.log", "ab") as log:
        return subprocess.Popen(
            [*torchrun, str(ROOT / kill.script), *OPTIONS, *own, *map(str, extra)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def processes(root):
    """All processes of a run, the workers first. torchrun gives each worker a session, so no process group holds them
    all."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(root.pid)
        return [*parent.children(recursive=True)[::-1], parent]
    return []


def victims_of(kill, root):
    """The processes to be killed: none, where they have not been started yet."""
    if kill.victim == "torchrun":
        return [psutil.Process(root.pid)]
    everything = processes(root)
    if kill.victim == "everything":
        return everything
    chosen = []
    for process in everything:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if kill.victim == "engine":
                command = " ".join(process.cmdline())  # which vLLM-Omni changes once it has loaded
                is_victim = "common.engine.server" in command or command.startswith("vLLM-Omni")
            else:
                is_rank = process.ppid() == root.pid
                is_victim = is_rank and process.environ().get("RANK") == kill.victim.removeprefix("rank ")
            if is_victim:
                chosen.append(process)
    return chosen[:1]


def processes_left(folder, known):
    """Living processes of a run: of those that were `known`, and all whose working directory is its folder, except this
    process, which may work there itself."""
    left = set()
    for process in {*known, *psutil.process_iter()} - {psutil.Process()}:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            ours = process in known or process.cwd() == str(folder)
            if ours and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.add(process)
    return left


def end(victims):
    """SIGKILL to all of them at once."""
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()


def shared_memory():
    """The files of shared memory, {(name, inode)}."""
    found = set()
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):
            found.add((path.name, str(path.stat().st_ino)))
    return found


def shared_memory_left(before):
    """Names of files of shared memory that are new since `before`, and that no living process, of another run, maps.

    By inode: a semaphore is mapped under another name. Some are there for a moment only: hence the second look.
    """
    new = shared_memory() - before
    for pause_s in (1, 0) if new else ():
        mapped = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                mapped |= {line.split()[4] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
        new = {(name, inode) for name, inode in new if inode not in mapped}
        time.sleep(pause_s)
        new &= shared_memory()
    return sorted(name for name, inode in new)


# ---- kills -----------------------------------------------------------------------------------------------------------
class Standing(NamedTuple):
    """What stands when a run is started."""

    found: int  # step of the newest whole checkpoint, -1: none
    lines: list  # of metrics.jsonl, up to that step
    stale: set  # half_written
    memory: set  # shared_memory
    log_size: int  # bytes of campaign.log


def standing(folder):
    run = folder / "runs" / NAME
    found = loadable_step(run)
    log = folder / "campaign.log"
    log_size = log.stat().st_size if log.exists() else 0
    return Standing(found, up_to(metric_lines(run), found), half_written(run), shared_memory(), log_size)


def campaign(kills, folder, seed=0, extra=(), new_checkpoints=(0, 1), keep=print):
    """Start the run of `kills`, all of one script, engine and ranks, in `folder`, and kill and restart it as they say.

    A run that is there is continued. Options `extra` go to the script. new_checkpoints: how many, from and to, a
    start writes before the phase of its kill; none where that is one of EARLY. keep(record): called once a later
    start, if need be an additional last one, has resumed from what the kill left.

    Returns a record a kill: what `strike` found, and its `problems`, none where nothing was lost.

    Raises:
        AssertionError: a start ended by itself, or did not come to the phase in which it was to be killed.
    """
    folder = Path(folder).resolve()
    records = []
    unproven = []  # of these, from which no later start has gone on yet
    end(processes_left(folder, set()))  # of a campaign that was interrupted
    last_start = kills[-1]._replace(victim="everything", phase="writing")
    for kill in [*kills, last_start]:
        rng = random.Random(f"{seed} {kill}")
        is_last = len(records) == len(kills)
        before = standing(folder)
        new = 1 if is_last else rng.randint(*new_checkpoints)
        root = start(kill, folder, extra)
        try:
            known, victims = wait_for_moment(kill, root, folder, before.found, new, rng)
            record = strike(kill, root, folder, before, known, victims)
        finally:
            end(processes(root))
            root.wait()
        if kill.phase not in EARLY:
            for earlier in unproven:
                earlier["problems"] += continuation_problems(folder, before)
                keep(earlier)
            unproven = []
        if not is_last:
            records.append(record)
            unproven.append(record)
    return records


def wait_for_moment(kill, root, folder, found, new, rng):
    """Return in the kill's phase, at a random time of it; if it is not EARLY, `new` checkpoints after the one `found`.

    Returns the run's processes, and those to be killed.
    """
    run = folder / "runs" / NAME
    rank = 1 if kill.victim == "rank 1" else 0

    def wait_for(condition, poll_s=0.001, timeout_s=600):
        deadline = time.monotonic() + timeout_s
        while not condition():
            if root.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join((folder / "campaign.log").read_text(errors="replace").splitlines()[-15:])
                raise AssertionError(f"{kill}: the run ended or hangs (exit code {root.poll()}):\n{tail}")
            time.sleep(poll_s)

    wait_for(lambda: victims_of(kill, root), poll_s=0.02)
    if kill.phase == "starting":
        time.sleep(rng.uniform(0, STARTING_S))
        return set(processes(root)), victims_of(kill, root)

    if kill.phase in EARLY:
        wait_for(lambda: phase_of(folder, rank) == kill.phase)
        time.sleep(rng.uniform(0, seconds_of(run, kill.phase)))
        return set(processes(root)), victims_of(kill, root)

    def trains():  # a run with another reward file does not say so, but saves
        return phase_of(folder, rank) in TRAINING or newest_step(run) > found

    wait_for(lambda: newest_step(run) >= found + new and trains())
    known = set(processes(root))  # before the phase, which may be a short one
    victims = victims_of(kill, root)
    late_s = rng.uniform(0, seconds_of(run, kill.phase))
    stale = half_written(run)
    if kill.phase == "writing":
        wait_for(lambda: half_written(run) - stale)
    else:
        wait_for(lambda: phase_of(folder, rank) == kill.phase)
        time.sleep(late_s)
    return known, victims


def strike(kill, root, folder, before, known, victims):
    """Kill the victims, and wait until nothing of the run is left. Returns the record."""
    run = folder / "runs" / NAME
    lines = metric_lines(run)
    seen = newest_step(run)
    end(victims)
    began = time.monotonic()
    was_in = [phase_of(folder, rank) for rank in range(kill.ranks)]
    left = known
    while left and time.monotonic() < began + LIMIT_S:
        time.sleep(0.05)
        root.poll()
        left = processes_left(folder, known)
    seconds = time.monotonic() - began
    names = sorted(" ".join(process.cmdline())[:80] for process in left)

    after = standing(folder)
    steps = [step_of(line) for line in metric_lines(run)]
    record = kill._asdict() | {"was_in": was_in, "seen": seen, "found": after.found, "last": max(steps, default=-1)}
    record["writing"] = bool(after.stale - before.stale)
    record |= {"seconds": round(seconds, 2), "left": names, "shared_memory": shared_memory_left(before.memory)}
    record |= {"exit_code": root.poll(), "said": last_said(kill, folder, before.log_size)}
    record["problems"] = problems_of(kill, record, up_to(lines, seen), after.lines)
    end(left)
    return record


def last_said(kill, folder, log_begins):
    """The script's last line in the log since then: an error's or, where it had no time to say one, any that has words;
    torchrun's, too, which reports the rank that was killed."""
    with open(folder / "campaign.log", "rb") as log:
        log.seek(log_begins)
        text = log.read().decode(errors="replace").replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    errors = re.findall(rf"{Path(kill.script).name}: error: .*", text)  # also behind the bar of a rank that was killed
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if re.search(r"\w", line)]
    return [*lines, *errors][-1] if lines else ""


def problems_of(kill, record, lines, lines_after):
    """What the kill has lost or left, a line each. lines, lines_after: of metrics.jsonl, before and after it."""
    problems = []
    if record["found"] < record["seen"]:
        problems.append(f"checkpoint {record['seen']} was on disk, {record['found']} is the newest that can be loaded")
    if lines_after[: len(lines)] != lines:
        problems.append(f"metrics up to step {record['seen']} are not what they were")
    if record["left"]:
        problems.append(f"processes left after {LIMIT_S:g} s: {record['left']}")
    if record["shared_memory"]:
        problems.append(f"shared memory left: {record['shared_memory']}")
    if record["exit_code"] == 0:
        problems.append("torchrun ended as if nothing had been")
    if must_say(kill) and ": error: " not in record["said"]:
        problems.append("the rest of the run ended without a line of ours")
    return problems


def must_say(kill):
    """Whether someone is left to tell of it: the engine's rank or, once it trains, a rank of another rank."""
    if kill.victim == "engine":
        return True
    return kill.victim.startswith("rank") and kill.ranks > 1 and kill.phase not in EARLY


def continuation_problems(folder, before):
    """How the start that has just been killed did not resume what stood `before` it, a line each."""
    problems = []
    lines = metric_lines(folder / "runs" / NAME)
    steps = [step_of(line) for line in lines]
    gaps = [step for step, next_step in zip(steps, steps[1:], strict=False) if next_step != step + 1]
    if lines[: len(before.lines)] != before.lines or gaps:
        equal = sum(a == b for a, b in zip(lines, before.lines, strict=False))
        problems.append(
            f"the run did not continue from step {before.found}: metrics.jsonl has steps {steps}, of which the first "
            f"{equal} lines are as they were at the kill"
        )
    return problems


# ---- the record ------------------------------------------------------------------------------------------------------
def read_record(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_plan(path, seed, work_folder, planned, extra=()):
    """Do the planned kills that the record lacks, and add them. Returns how many were not held."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    done = {(record["seed"], *(record[field] for field in Kill._fields)) for record in read_record(path)}
    failed = 0

    def keep(record):
        nonlocal failed
        failed += bool(record["problems"])
        line = json.dumps({"seed": seed, **record, "commit": commit})
        with open(path, "a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    for kills in planned:
        missing = [kill for kill in kills if (seed, *kill) not in done]
        if missing:
            script, engine, ranks = missing[0][:3]
            folder = Path(work_folder) / f"{Path(script).stem}_{engine}_{ranks}"
            folder.mkdir(exist_ok=True)
            campaign(missing, folder, seed, extra=extra, keep=keep)
    return failed


def table(records):
    """All kills of a record, and those of each script, engine, number of ranks, victim and phase: rows of Markdown."""
    rows = [
        "| kills of | tried | in phase | held | most lost | most again | seconds | in /dev/shm |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        row("all", records),
    ]
    for field in Kill._fields:
        for value in dict.fromkeys(record[field] for record in records):
            rows.append(row(f"{field}: {value}", [record for record in records if record[field] == value]))
    return "\n".join(rows)


def found_in_its_phase(record):
    """Whether the signal came before a rank had left the phase: some take a few milliseconds."""
    if record["phase"] == "writing":
        return record["writing"]  # a half-written file was left
    if record["victim"] == "engine" and record["phase"] == "starting":
        return record["was_in"][0] == "loading"  # what its rank does while the engine starts
    return record["phase"] in record["was_in"]


def row(name, records):
    """Most lost: steps whose checkpoint was on disk before the kill; again: steps logged, but not saved. Seconds: the
    longest until no process of the run was left. In /dev/shm: files of shared memory left, of all kills."""
    hit = sum(found_in_its_phase(record) for record in records)
    held = sum(not record["problems"] for record in records)
    lost = max(max(0, record["seen"] - record["found"]) for record in records)
    again = max(record["last"] - record["found"] for record in records)
    seconds = max(record["seconds"] for record in records)
    files = sum(len(record["shared_memory"]) for record in records)
    return f"| {name} | {len(records)} | {hit} | {held} | {lost} | {again} | {seconds:.1f} | {files} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help=".jsonl, a line a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print the record's table, kill nothing")
    parser.add_argument("--full", action="store_true", help="full weights, whose checkpoints are shards")
    args = parser.parse_args()
    failed = 0
    if not args.table:
        planned = plan_of_full_weights(args.seed) if args.full else plan(args.seed)
        extra = FULL_WEIGHTS if args.full else ()
        with tempfile.TemporaryDirectory() as folder:
            failed = run_plan(args.record, args.seed, folder, planned, extra)
    print(table(read_record(args.record)))
    sys.exit(f"{failed} kills were not held" if failed else 0)
