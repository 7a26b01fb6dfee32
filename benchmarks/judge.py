"""vlm_judge on a CPU: vLLM serves a tiny random vision-language model beside vLLM-Omni's rollouts of flow_grpo.py.

    python benchmarks/judge.py docs/records/judge.md

The model is tests/tiny_judge.py's, whose scores mean nothing: it is the path that is run. Writes the seconds of each
phase, and how many of the judge's answers held no score.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.conftest import ROOT, read_metrics, torchrun
from tests.tiny_judge import make_judge

OPTIONS = ["--reward", "vlm_judge", "--reward_failure", "mask", "--num_steps", "3", "--num_prompts", "4"]
OPTIONS += ["--rollout_batch_size", "8", "--micro_batch_size", "8", "--max_prompts", "8"]
SERVE = ["--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager", "--dtype", "float32"]
PHASES = ["gen", "reward", "adv", "old_log_prob", "update_actor", "update_weights", "step"]


def start_judge(folder, port, log):
    """The process of a vLLM that serves the model in `folder` on the port of this machine, once it answers."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--port", str(port), *SERVE]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    print(" ".join(command), flush=True)
    judge = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    began = time.monotonic()
    while judge.poll() is None and time.monotonic() - began < 600:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5)
            print(f"answers after {time.monotonic() - began:.0f} s", flush=True)
            return judge
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    judge.kill()
    raise SystemExit(f"the judge did not start: {log.name}")


def main(path):
    folder = Path(tempfile.mkdtemp())
    make_judge(folder / "judge")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(folder / "judge.log", "w") as log:
        judge = start_judge(folder / "judge", port, log)
        os.environ |= {"VLM_JUDGE_URL": f"http://127.0.0.1:{port}/v1", "VLM_JUDGE_MODEL": str(folder / "judge")}
        try:
            torchrun(folder, "flow_grpo.py", *OPTIONS)
        finally:
            judge.terminate()
            judge.wait()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    lines = [__doc__, f"flow_grpo.py {' '.join(OPTIONS)}, commit {commit.stdout.strip()}; seconds", ""]
    lines.append(" | ".join(["| step", *PHASES, "images without a score", "reward mean |"]))
    lines.append("|---" * (len(PHASES) + 3) + "|")
    for row in read_metrics(folder / "runs" / "flow_grpo")[1:]:
        seconds = [f"{row[f'timing_s/{phase}']:.2f}" for phase in PHASES]
        failed = f"{row['critic/rewards/vlm_judge/failed']:.0f} of 32"
        score = f"{row['critic/rewards/mean']:.3f} |"
        lines.append(" | ".join([f"| {row['training/global_step']}", *seconds, failed, score]))
    Path(path).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="file to write")
    main(parser.parse_args().path)
