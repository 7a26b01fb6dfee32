"""fp32 matrix products of the embedded model's sizes: torch's own beside oneDNN's (common/cpu_matmul.py), alternated.

    OMP_NUM_THREADS=1 python benchmarks/matmul.py | tee docs/records/matmul.txt

Prints GFLOP/s, medians of 31, by the CPU's time of this process, so that other processes count little. Then seconds of
passes of the embedded transformer with either: what a loop around it gains at most by its products, on one core and on
all. Those are of the clock, as threads wait for each other; leave the machine to it.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import cpu_matmul

import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig

ROOT = Path(__file__).parents[1]
SHAPES = ((5120, 128, 128), (5120, 128, 512), (5120, 512, 128), (128, 5120, 512), (5120, 128, 16), (64, 64, 64))
LEAST = {"torch": math.inf, "oneDNN": cpu_matmul.LEAST}  # multiplications from which oneDNN takes a product


def gflops(function, a, b):
    began = time.process_time()
    for _ in range(10):
        function(a, b)
    return 10 * 2 * a.numel() * b.shape[1] / (time.process_time() - began) / 1e9


def make_passes():
    """{name: function} of passes of the embedded transformer with a LoRA, 64 images of 32 x 96 pixels."""
    transformer = SD3Transformer2DModel.from_pretrained(ROOT / "assets" / "embedded" / "transformer")
    transformer.requires_grad_(False)
    projections = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    transformer.add_adapter(LoraConfig(r=16, lora_alpha=32, target_modules=projections))
    inputs = {
        "hidden_states": torch.randn(64, 8, 8, 24),
        "encoder_hidden_states": torch.randn(64, 32, 128),
        "pooled_projections": torch.randn(64, 128),
        "timestep": torch.full((64,), 500.0),
    }

    @torch.no_grad()
    def forward():
        transformer(**inputs)

    def forward_and_backward():
        transformer(**inputs).sample.square().mean().backward()

    return {"forward": forward, "forward and backward": forward_and_backward}


def time_passes():
    """Print the seconds of each pass with torch's products and with oneDNN's, in turn, by number of threads."""
    passes = make_passes()
    for num_threads in range(1, len(os.sched_getaffinity(0)) + 1):
        torch.set_num_threads(num_threads)
        for name, run_pass in passes.items():
            seconds = {"torch": [], "oneDNN": []}
            for _ in range(31):
                for taker, cpu_matmul.LEAST in LEAST.items():
                    began = time.perf_counter()
                    run_pass()
                    seconds[taker].append(time.perf_counter() - began)
            torch_s, onednn_s = (statistics.median(values) for values in seconds.values())
            ratio = f"{onednn_s / torch_s:.2f}"
            print(f"{name}, {num_threads} threads: torch {torch_s:.3f} s, oneDNN {onednn_s:.3f} s, ratio {ratio}")


def main():
    cpu = subprocess.run("grep -m1 'model name' /proc/cpuinfo", shell=True, capture_output=True, text=True).stdout
    commit = subprocess.run("git rev-parse --short HEAD", shell=True, capture_output=True, text=True).stdout
    print(f"# python benchmarks/matmul.py, commit {commit.strip()}, {cpu.partition(':')[2].strip()}")
    print(f"# torch {torch.__version__}, {torch.get_num_threads()} thread: GFLOP/s of (n, k) x (k, m), medians")
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
    time_passes()


if __name__ == "__main__":
    main()
