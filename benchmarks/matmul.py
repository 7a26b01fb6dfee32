"""fp32 matrix products of the embedded model's sizes: torch's own beside oneDNN's (common/cpu_matmul.py), alternated.

    OMP_NUM_THREADS=1 python benchmarks/matmul.py | tee docs/records/matmul.txt

Prints GFLOP/s, medians of 31, by the CPU's time of this process, so that other processes count little.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import cpu_matmul

import torch

SHAPES = ((5120, 128, 128), (5120, 128, 512), (5120, 512, 128), (128, 5120, 512), (5120, 128, 16), (64, 64, 64))


def gflops(function, a, b):
    began = time.process_time()
    for _ in range(10):
        function(a, b)
    return 10 * 2 * a.numel() * b.shape[1] / (time.process_time() - began) / 1e9


def main():
    cpu = subprocess.run("grep -m1 'model name' /proc/cpuinfo", shell=True, capture_output=True, text=True).stdout
    commit = subprocess.run("git rev-parse --short HEAD", shell=True, capture_output=True, text=True).stdout
    print(f"# python benchmarks/matmul.py, commit {commit.strip()}, {cpu.partition(':')[2].strip()}")
    print(f"# torch {torch.__version__}, {torch.get_num_threads()} thread: GFLOP/s of (n, k) x (k, m), medians")
    torch.set_grad_enabled(False)
    ways = {
        "torch": lambda a, b: torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1])),
        "oneDNN": lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], ""),
    }
    for n, k, m in SHAPES:
        a = torch.randn(n, k)
        b = torch.randn(k, m)
        rates = {name: [] for name in ways}
        for _ in range(31):
            for name, way in ways.items():
                rates[name].append(gflops(way, a, b))
        medians = [f"{name} {statistics.median(values):.0f}" for name, values in rates.items()]
        taken = "taken" if cpu_matmul.takes_onednn(a, b) else "left to torch"
        print(f"({n}, {k}) x ({k}, {m}): {', '.join(medians)}; {taken}")


if __name__ == "__main__":
    main()
