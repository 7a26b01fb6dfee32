"""Seconds to the first line, to --help, and to the refusal of a wrong option, of every script.

    python benchmarks/start_up.py            # median of 3 each, after one that is not counted

A script is started as torchrun starts its workers; torchrun's own second or two come before. Prints a Markdown table.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ["flow_grpo.py", "grpo_guard.py", "mix_grpo.py", "dpo_offline.py", "diffusion_nft.py"]
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
CASES = {  # what is measured: the options
    "first line": [],
    "--help": ["--help"],
    "--learning_rate -1": ["--learning_rate", "-1"],
    "--train_prompts nowhere.txt": ["--train_prompts", "nowhere.txt"],
}


def seconds(script, case, folder):
    """From the start of the process to its first line or, in all other cases, to its end."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, ROOT / script, *CASES[case]],
        cwd=folder,
        env=os.environ | ONE_RANK,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    if case == "first line":
        process.stderr.readline()
    else:
        process.stderr.read()
    took = time.perf_counter() - began
    process.kill()
    process.wait()
    return took


def main(repetitions=3):
    print("| script |", " | ".join(CASES), "|")
    print("|---" * (len(CASES) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS:
            medians = []
            for case in CASES:
                times = [seconds(script, case, folder) for _ in range(1 + repetitions)]
                medians.append(f"{statistics.median(times[1:]):.1f}")
            print(f"| {script} |", " | ".join(medians), "|", flush=True)


if __name__ == "__main__":
    main()
