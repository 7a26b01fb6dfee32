"""Several nodes: two torchrun agents of a rank each, which meet by a rendezvous of their own, as on two machines."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

from common.run.ending import ANOTHER_RANK_LOST
from tests.conftest import (
    ROOT,
    TINY,
    assert_one_line,
    brightness_reward,
    few_eval_prompts,
    is_alive,
    needs_engine,
    read_metrics,
    torchrun,
    warm_engines,
)
from tests.conftest import without_times as untimed

import psutil
import pytest

STEPS = ["--num_steps", 3, "--eval_every", 1]
LONGEST_S = 60  # from the loss of a node to the end of the other


@pytest.fixture(scope="module", autouse=True)
def one_core():
    """An agent gives its ranks all cores of what it takes for its own machine, and threads change the last bit."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def free_port():
    """A port that no other process gets meanwhile: below the ports that the system deals out, and by this one's id."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if tried.connect_ex(("127.0.0.1", port)):  # nobody answers
                return port
    raise OSError("no port is free")


def start_nodes(folder, *options, script=ROOT / "flow_grpo.py", max_restarts=0):
    """The two agents; what each prints is in folder/nodeN.log."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "nodes"]
    command += ["--max_restarts", max_restarts]
    command += [script, *options]
    agents = []
    for node in range(2):
        with open(folder / f"node{node}.log", "w") as log:
            agents.append(subprocess.Popen([*map(str, command)], cwd=folder, stdout=log, stderr=log))
    return agents


def finish(agents, timeout):
    """Wait for the agents; none is left behind. Returns their exit codes."""
    try:
        deadline = time.monotonic() + timeout
        return [agent.wait(max(0, deadline - time.monotonic())) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


def ranks_of(agent):
    """{RANK: process} of an agent's ranks."""
    children = psutil.Process(agent.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def logs(folder):
    return "".join((folder / f"node{node}.log").read_text() for node in range(2))


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    """The folder, options and metrics of a run of two ranks on one node, with a copy of the weights each, as on two."""
    folder = tmp_path_factory.mktemp("one")
    options = [*TINY, "--num_prompts", 2, "--num_inference_steps", 3, *few_eval_prompts(folder, 2)]
    options += ["--reward", brightness_reward(folder)]
    torchrun(folder, "flow_grpo.py", *options, "--rollout", "local", *STEPS, "--shard_ranks", 1, nproc=2)
    return folder, options, untimed(read_metrics(folder / "runs" / "flow_grpo"))


# flow_grpo.py with engines that the warm process forks
FORKED = """import runpy, sys
sys.path[:0] = [{root!r}]
from tests.warm_engine import fork_engines
fork_engines(*{engines!r})
sys.path[0] = {root!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def lose_a_node(folder, options, checkpoint):
    """Kill rank 1's agent as soon as the run's checkpoint is there; the other node ends in one line that names it."""
    script = folder / "flow_grpo.py"
    script.write_text(FORKED.format(root=str(ROOT), engines=warm_engines(), script=str(ROOT / "flow_grpo.py")))
    agents = start_nodes(folder, *options, script=script)
    deadline = time.monotonic() + 300
    while not checkpoint.exists():
        assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents), logs(folder)
        time.sleep(0.02)
    ranks = {rank: process for agent in agents for rank, process in ranks_of(agent).items()}
    assert [process.environ()["LOCAL_RANK"] for process in ranks.values()] == ["0", "0"]
    lost = next(agent for agent in agents if 1 in ranks_of(agent))
    processes = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]
    processes.remove(psutil.Process())
    assert len(processes) == 6  # agents, ranks, engines
    lost.kill()

    exit_codes = finish(agents, LONGEST_S)
    assert sorted(exit_codes) == [-signal.SIGKILL, 1], logs(folder)
    deadline = time.monotonic() + LONGEST_S
    while any(map(is_alive, processes)):  # neither ranks nor engines
        assert time.monotonic() < deadline
        time.sleep(0.05)
    survivor = 1 - agents.index(lost)
    log = (folder / f"node{survivor}.log").read_text()
    line = re.search(r"^flow_grpo.py: error: .*\(see \w+\).*$", log, re.MULTILINE)
    assert line, log
    assert_one_line(line[0])
    assert re.search(f" {checkpoint.name}, .*--resume latest", line[0])
    assert "Traceback" not in log.split(line[0])[0]


@needs_engine
def test_engines_on_two_nodes_of_which_one_is_lost(one_node, tmp_path):
    """The steps before the loss and after it, an engine on each node, are those of a run of two ranks on one node that
    nothing disturbed, with --rollout local, to round-off. test_two_agents_restart_a_lost_rank has them to the bit, and
    two nodes that continue. Here both ranks continue on one node, without engines."""
    _, options, expected = one_node
    options = [*options, *STEPS, "--resume", "latest"]
    run = tmp_path / "runs" / "flow_grpo"
    lose_a_node(tmp_path, options, run / "checkpoints" / "step_000001.pt")
    # by rank, not by local rank, of which both are 0
    assert all((run / f"engine_rank{rank}.log").stat().st_size > 0 for rank in range(2))
    local = [*options, "--rollout", "local", "--shard_ranks", 1]  # a copy of the weights each, as on two nodes
    assert (
        "loaded runs/flow_grpo/checkpoints/step_000001.pt; rollout: vllm -> local"
        in torchrun(tmp_path, "flow_grpo.py", *local, nproc=2).stdout
    )
    rows = untimed(read_metrics(run))
    assert [row["training/global_step"] for row in rows] == [row["training/global_step"] for row in expected]
    names = ("critic/rewards/mean", "critic/rewards/std_mean", "critic/advantages/max", "critic/diversity")
    names += ("actor/loss", "actor/ratio_mean", "val/brightness/mean", "val/drift_from_base")
    assert set(names) <= set().union(*expected)
    for got, row in zip(rows, expected, strict=True):
        for name in row.keys() & set(names):
            assert got[name] == pytest.approx(row[name], abs=1e-5), (name, row["training/global_step"])
    assert rows[-1]["actor/grad_norm"] == pytest.approx(expected[-1]["actor/grad_norm"], rel=1e-3)


# ---- the SLURM script of docs/cluster.md -----------------------------------------------------------------------------
FAKE_SRUN = """#!{python}
# starts its command once for each of two nodes, as srun does: the exit code is the highest
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = [subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": str(node)}}) for node in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""
FAKE_SCONTROL = """#!/bin/bash
echo "$@" >>scontrol.log
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.2\\n'; fi
"""
# starts the ranks of a node, which SLURM_PROCID tells, and ends with 1 where one of them fails, as torchrun does
FAKE_TORCHRUN = """#!{python}
import os, subprocess, sys
at = sys.argv.index("flow_grpo.py")
given = dict(zip(sys.argv[1:at:2], sys.argv[2:at:2], strict=True))
nodes, ranks = int(given["--nnodes"]), int(given["--nproc_per_node"])
first = int(os.environ["SLURM_PROCID"]) * ranks
world = {{"WORLD_SIZE": str(nodes * ranks)}}
command = [sys.executable, *sys.argv[at:]]
started = [subprocess.Popen(command, env=os.environ | world | {{"RANK": str(first + i)}}) for i in range(ranks)]
sys.exit(int(any([rank.wait() for rank in started])))
"""
# in place of flow_grpo.py: its folder's file `plan` says whether it saves a checkpoint, and its exit code
FAKE_SCRIPT = """
import os, sys
from pathlib import Path

saves, exit_code = Path("plan").read_text().split()
if os.environ["RANK"] == "0":
    folder = Path("runs", sys.argv[sys.argv.index("--name") + 1], "checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    if saves == "yes":
        (folder / f"step_{len(os.listdir(folder)):06d}.pt").touch()
    print("ranks:", os.environ["WORLD_SIZE"], "arguments:", *sys.argv[1:], flush=True)
sys.exit(int(exit_code))
"""


def slurm_script():
    """The script as the page shows it."""
    (script,) = re.findall(
        r"^```bash\n(#!/bin/bash\n.*?)^```$", (ROOT / "docs" / "cluster.md").read_text(), re.M | re.S
    )
    return script


def test_the_slurm_script_is_requeued_as_long_as_it_gets_on(tmp_path):
    """It is requeued after a start that failed but saved; not after a success, nor where nothing was saved. The test
    below has the real torchrun."""
    script = tmp_path / "cluster.sh"
    script.write_text(slurm_script())
    subprocess.run(["bash", "-n", script], check=True)
    programs = {"srun": FAKE_SRUN.format(python=sys.executable), "scontrol": FAKE_SCONTROL, "flow_grpo.py": FAKE_SCRIPT}
    programs["torchrun"] = FAKE_TORCHRUN.format(python=sys.executable)
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port() - 20_000), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    job["SLURM_CPUS_PER_TASK"] = "1"
    paths = f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    for plan, exit_code, requeued in (("yes 3", 1, True), ("no 3", 1, False), ("yes 0", 0, False)):
        (tmp_path / "plan").write_text(plan)
        (tmp_path / "scontrol.log").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", script, "large", "--kl_coef", "0.04"],
            cwd=tmp_path,
            env=os.environ | job | {"PATH": paths},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == exit_code, done.stderr
        assert "ranks: 2 arguments: --name large --resume latest --kl_coef 0.04\n" in done.stdout
        calls = (tmp_path / "scontrol.log").read_text().splitlines()
        assert calls == ["show hostnames node[1-2]", *[f"requeue {job['SLURM_JOB_ID']}"] * requeued]


# like srun, a process group a node, which gets the signal of --signal when the job's time is nearly up: file `up`
SIGNALLING_SRUN = """#!{python}
import os, signal, subprocess, sys, time
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = [subprocess.Popen(command, start_new_session=True) for node in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
while any(task.poll() is None for task in tasks):
    time.sleep(0.1)
    if os.path.exists("up"):
        os.remove("up")
        for task in tasks:
            os.killpg(task.pid, signal.SIGTERM)
sys.exit(max(task.returncode for task in tasks))
"""
# runs the job as its #SBATCH lines ask, and again as long as `scontrol requeue` says so
FAKE_SBATCH = """#!{python}
import os, re, subprocess, sys
from pathlib import Path
asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\\S+)$", Path(sys.argv[1]).read_text(), re.M))
job = {{"SLURM_JOB_NUM_NODES": asked["nodes"], "SLURM_GPUS_ON_NODE": asked["gpus-per-node"]}}
job |= {{"SLURM_CPUS_PER_TASK": asked["cpus-per-task"], "SLURM_JOB_NODELIST": "node"}}
while True:
    Path("scontrol.log").unlink(missing_ok=True)
    status = subprocess.run(["bash", *sys.argv[1:]], env=os.environ | job).returncode
    print("job ended:", status, flush=True)
    if "requeue" not in Path("scontrol.log").read_text():
        sys.exit(status)
"""
# in place of flow_grpo.py: its first start takes steps until a signal asks for a stop, which it notes; then it saves.
# The second one finds the checkpoint, and has nothing more to do
PATIENT_SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, "ROOT")
from common.process import catch_stop_signals, stop_requested

folder = Path("runs", sys.argv[sys.argv.index("--name") + 1], "checkpoints")
is_first = not folder.exists()
catch_stop_signals(0)
Path(f"seen_{'first' if is_first else 'second'}_{os.environ['RANK']}_of_{os.environ['WORLD_SIZE']}").touch()
if is_first:
    while not stop_requested():
        time.sleep(0.05)
    time.sleep(1)  # the rest of the step
    if os.environ["RANK"] == "0":
        folder.mkdir(parents=True)
        (folder / "step_000001.pt").touch()
    else:
        while not folder.exists():
            time.sleep(0.05)
"""


def test_the_slurm_script_goes_on_after_its_time_limit(tmp_path):
    """SIGTERM near the end of the time reaches every rank of two nodes with two each; the run saves, and the job is
    queued again and finishes."""
    script, nodes, gpus = slurm_script(), 2, 2
    for option, value in (("nodes", nodes), ("gpus-per-node", gpus), ("cpus-per-task", 1)):
        script, count = re.subn(rf"^(#SBATCH --{option}=).*$", rf"\g<1>{value}", script, flags=re.M)
        assert count == 1
    assert re.search("^#SBATCH --signal=TERM@", script, re.M)
    (tmp_path / "cluster.sh").write_text(script)
    programs = {"srun": SIGNALLING_SRUN.format(python=sys.executable), "scontrol": FAKE_SCONTROL}
    programs |= {"sbatch": FAKE_SBATCH.format(python=sys.executable)}
    programs |= {"flow_grpo.py": PATIENT_SCRIPT.replace("ROOT", str(ROOT))}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    paths = f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": paths, "SLURM_JOB_ID": str(free_port() - 20_000)}
    with open(tmp_path / "output", "w") as output:
        job = subprocess.Popen(["sbatch", "cluster.sh", "large"], cwd=tmp_path, env=environment, stdout=output)
    deadline = time.monotonic() + 120
    ranks = range(nodes * gpus)
    while not all((tmp_path / f"seen_first_{rank}_of_{len(ranks)}").exists() for rank in ranks):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.1)
    (tmp_path / "up").touch()
    assert job.wait(120) == 0
    assert (tmp_path / "output").read_text().splitlines() == ["job ended: 1", "job ended: 0"]
    assert all((tmp_path / f"seen_second_{rank}_of_{len(ranks)}").exists() for rank in ranks)


# a reward that kills one rank in a phase of step 2, in the first start only; the other rank is busy at that time
FATAL = """import os, signal, time
import numpy, torch
is_first = not os.path.exists("lost")

def lose(moment):
    is_late = os.path.exists("runs/flow_grpo/checkpoints/step_000001.pt")
    if moment != "MOMENT" or not is_late or not is_first:
        return
    if os.environ["RANK"] == "VICTIM":
        open("lost", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(8)

def doomed(function, moment):
    def call(*args, **kwargs):
        lose(moment)
        return function(*args, **kwargs)
    return call

torch.save = doomed(torch.save, "save")

def brightness(images, prompts, metadata):
    lose("rollout")
    return [numpy.asarray(image).mean() / 255 for image in images]
"""


def doomed(folder, options, moment, victim):
    """The options of a run whose rank `victim` is killed at that moment."""
    (folder / "brightness.py").write_text(FATAL.replace("MOMENT", moment).replace("VICTIM", str(victim)))
    options = ["brightness.py:brightness" if "brightness.py" in str(option) else option for option in options]
    return [*options, "--rollout", "local", *STEPS, "--resume", "latest"]


def assert_undisturbed(folder, one_node):
    """The metrics and the adapter of the run in this folder are those of the run that nothing disturbed."""
    undisturbed, _, expected = one_node
    assert untimed(read_metrics(folder / "runs" / "flow_grpo")) == expected
    (adapter,) = (undisturbed / "runs" / "flow_grpo" / "adapter").glob("*.safetensors")
    assert (folder / "runs" / "flow_grpo" / "adapter" / adapter.name).read_bytes() == adapter.read_bytes()


def test_two_agents_restart_a_lost_rank(one_node, tmp_path):
    """--max_restarts with --resume latest: a rank is killed after step 1, both come back, and nothing differs.

    In this rollout the other rank is busy when that happens: its agent restarts it because the first one waits, and
    does not count. The agents' restart counts then differ.
    """
    _, options, _ = one_node
    agents = start_nodes(tmp_path, *doomed(tmp_path, options, "rollout", 1), max_restarts=3)
    deadline = time.monotonic() + 300
    first, counts = set(), {}  # process ids; restart counts by rank, of the second start
    while len(counts) < 2:
        assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents), logs(tmp_path)
        time.sleep(0.5)
        with contextlib.suppress(psutil.Error):  # a rank that ends just now
            ranks = {rank: process for agent in agents for rank, process in ranks_of(agent).items()}
            if not (tmp_path / "lost").exists():
                first |= {process.pid for process in ranks.values()}
            for rank, process in ranks.items():
                if process.pid not in first:
                    counts[rank] = int(process.environ()["TORCHELASTIC_RESTART_COUNT"])
    assert finish(agents, 300) == [0, 0], logs(tmp_path)
    assert sorted(counts.values()) == [0, 1]
    assert "step_000001.pt" in logs(tmp_path)
    assert_undisturbed(tmp_path, one_node)


def test_a_rank_that_is_lost_while_it_saves_costs_no_step_before(one_node, tmp_path):
    """The first rank of one node's two, of which no rank is left. What the next start has is as if nothing had been."""
    _, options, _ = one_node
    options = [*doomed(tmp_path, options, "save", 0), "--shard_ranks", 1]
    assert torchrun(tmp_path, "flow_grpo.py", *options, nproc=2, check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "lost").exists()
    assert "step_000001.pt" in torchrun(tmp_path, "flow_grpo.py", *options, nproc=2).stdout
    assert_undisturbed(tmp_path, one_node)


ALONE = """import os, sys
from common import distributed
from common.run import friendly_errors
os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
os.environ["MASTER_PORT"] = sys.argv[2]
distributed.JOIN_TIMEOUT /= 100
with friendly_errors():
    distributed.setup_distributed()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_joins_alone_ends_in_one_line(rank, tmp_path):
    """After three seconds, here. Rank 1 waits for a store, and rank 0 for rank 1."""
    (tmp_path / "alone.py").write_text(ALONE)
    port = free_port()
    done = torchrun(tmp_path, tmp_path / "alone.py", rank, port, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "error: " in line]
    assert re.match(f"alone.py: error: .* {rank}: 2 .* 127.0.0.1:{port} ", line)
    assert "Traceback" not in done.stdout


HANGS = """import datetime, os, time
from torch.distributed.distributed_c10d import _set_pg_timeout
from common.distributed import gather_objects, setup_distributed
from common.run import friendly_errors
with friendly_errors():
    setup_distributed()
    _set_pg_timeout(datetime.timedelta(seconds=3))
    gather_objects("all are here")
    if os.environ["RANK"] == "1":
        time.sleep(300)
    time.sleep(int(os.environ["RANK"]) / 4)
    gather_objects("all but one")
"""


def test_a_collective_that_times_out_ends_in_one_line(tmp_path):
    """Rank 1 of 3 hangs. The others give up after three seconds."""
    (tmp_path / "hangs.py").write_text(HANGS)
    done = torchrun(tmp_path, tmp_path / "hangs.py", nproc=3, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("hangs.py: error: ")]
    assert done.returncode == 1
    assert set(lines) == {f"hangs.py: error: {ANOTHER_RANK_LOST}"}
