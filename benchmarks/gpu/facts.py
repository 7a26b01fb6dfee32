"""What only a GPU can confirm, each fact as held or not, in under six minutes. No download.

    python benchmarks/gpu/facts.py                   # on a machine with a GPU
    python benchmarks/gpu/facts.py --device fake     # tries this file on the device of tests/fake_cuda
    python benchmarks/gpu/facts.py --device cpu --only bf16      # tries the facts that have this word, on a CPU
    python benchmarks/gpu/facts.py --but engine                  # without those that have this one

Our tests run the CUDA path on a CPU, where some things cannot show: a GPU's kernels and their rounding, the compiler,
vLLM-Omni beside the trainer on one GPU. Every run is flow_grpo.py on the embedded model, or on random weights of 255 M
parameters where vLLM-Omni is installed. The table is printed; the runs and their logs are in the folder of --results.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 600  # in all; a fact that is not reached is "not tried"
SMALL = ["--num_steps", "2", "--num_prompts", "8", "--group_size", "4", "--updates_per_rollout", "2"]
SMALL += ["--micro_batch_size", "8", "--max_prompts", "16", "--reward", "jpeg_incompressibility"]
LOG_PROB_LIMIT = {"float32": 1e-4, "bfloat16": 0.05}  # mean distance of engine and trainer, ours
TURNED_OFF = "the same by cuDNN, which we turn off"
CONTIGUOUS = "the same by cuDNN, from contiguous gradients"
MASKED = "gradients beside a mask are finite (pytorch 196678)"
MASKED_CUDNN = "the same beside a mask by cuDNN, which we refuse"
# what a run never takes: that one of these does not hold is no failure
OF_CUDNN = (TURNED_OFF, CONTIGUOUS, MASKED_CUDNN)
HASHED = """
import sys
import torch
from common.models import hash_bits
worst = []
for name in ("float64", "float32", "bfloat16", "float16", "int64"):
    for shape in ((1,), (7,), (3, 5, 11), (1024, 257)):
        tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(getattr(torch, name))
        for view in (tensor, tensor.transpose(0, -1)):
            if hash_bits(view) != hash_bits(view.cuda()):
                worst.append(f"{name} {tuple(view.shape)}")
sys.exit(", ".join(worst) or 0)
"""
# Attention twice in one process, as in FLUX: the gradient that comes back is part of a wider tensor, then a whole one
GRADIENTS = """
import sys
import torch
from common.weights.attention import use_attention
from contextlib import nullcontext
from types import SimpleNamespace
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
use_attention(SimpleNamespace(policies={}), "native")
cudnn = sys.argv[1] in ("cudnn", "contiguous")
torch.backends.cuda.enable_cudnn_sdp(cudnn)
generator = torch.Generator("cuda").manual_seed(0)
def draw(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)
q, k, v = (draw(4, 1280, 24, 128).transpose(1, 2).requires_grad_() for _ in range(3))
worst = 0
for gradient in (draw(4, 1280, 3072 + 12288)[..., :3072], draw(4, 1280, 3072)):
    gradient = gradient.unflatten(2, (24, 128)).transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else nullcontext():
        out = scaled_dot_product_attention(q, k, v)
        if sys.argv[1] == "contiguous":
            out.register_hook(torch.Tensor.contiguous)
        found = torch.autograd.grad(out, (q, k, v), gradient)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        expected = torch.autograd.grad(scaled_dot_product_attention(q, k, v), (q, k, v), gradient)
    errors = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(found, expected, strict=True)]
    worst = max(worst, *(error if error == error else float("inf") for error in errors))
print(f"off by {worst:.1e} of its norm")
sys.exit(worst > 0.05)
"""


# 704 tokens, an odd multiple of 64, of which a mask hides the last 100; all scores of a row are far below 0
MASKED_GRADIENTS = """
import sys
import torch
from contextlib import nullcontext
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
cudnn = sys.argv[1] == "masked_cudnn"
torch.backends.cuda.enable_cudnn_sdp(cudnn)
generator = torch.Generator("cuda").manual_seed(0)
def draw(tokens=704):
    return torch.randn(2, 24, tokens, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
q = draw(1) + 0.01 * draw()
k = -120 * q / q.float().norm(dim=-1, keepdim=True).to(q)  # scores of about -120
q, k, v = (x.requires_grad_() for x in (q, k, draw()))
mask = torch.ones(2, 1, 1, 704, device="cuda", dtype=torch.bool)
mask[..., -100:] = False
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else nullcontext():
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    gradients = torch.autograd.grad(out, (q, k, v), draw())
lowest = (q.float() @ k.float().mT / 128**0.5)[..., :-100].logsumexp(-1).min().item()
bad = [name for name, gradient in zip("qkv", gradients, strict=True) if not gradient.isfinite().all()]
print(f"logsumexp down to {lowest:.0f}; not finite: {', '.join(bad) or 'none'}")
sys.exit(bool(bad) or lowest > -88.7)
"""


class NotTried(Exception):
    """A fact cannot be tried here."""


class Check:
    """Runs of the scripts in a folder, until the time is over, and what they show."""

    def __init__(self, folder: Path, device: str, only: str = "", but: str | None = None) -> None:
        """device: "cuda", "fake" or "cpu". only, but: enter the facts that have this word in their text, or lack it."""
        self.folder = folder
        self.device = device
        self.only = only
        self.but = but
        self.end = time.monotonic() + (SECONDS if device == "cuda" else 3600)
        self.rows: list[tuple[str, str, str]] = []  # fact, verdict, figure

    def fact(self, text: str, show: Callable[..., tuple[bool, str]], *arguments: str) -> None:
        """Enter whether `show`, called with the arguments, finds that the fact holds. It returns (held, figure)."""
        if self.only not in text or (self.but and self.but in text):
            return
        try:
            is_held, figure = show(*arguments)
            verdict = "held" if is_held else "NOT HELD"
        except NotTried as reason:
            verdict, figure = "not tried", str(reason)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            verdict, figure = "NOT HELD", last_line(error.output)
        self.rows.append((text, verdict, figure))
        print(f"| {text} | {verdict} | {figure} |", flush=True)

    def python(self, name: str, *arguments: str | Path, device: str = "") -> None:
        """Run a program with the device, by default this check's; its output is NAME.log."""
        left = self.end - time.monotonic()
        if left < 20:
            raise NotTried("the time is over")
        command = [sys.executable]
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        device = device or self.device
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if device == "fake":
            command.append(str(ROOT / "tests" / "fake_cuda" / "launch.py"))
            environment["OMP_NUM_THREADS"] = "1"
        log = self.folder / f"{name}.log"
        with log.open("w") as output:  # a file, so that a run that is stopped leaves it
            try:
                subprocess.run(
                    [*command, *map(str, arguments)],
                    cwd=self.folder,
                    env=environment | one_rank_environment(),
                    timeout=left,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=True,
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                error.output = log.read_text(errors="replace")
                raise

    def run(self, name: str, *options: str, device: str = "") -> list[dict]:
        """The metrics of a run of flow_grpo.py."""
        self.python(name, ROOT / "flow_grpo.py", "--name", name, *SMALL, *options, device=device)
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    # ---- facts -------------------------------------------------------------------------------------------------------
    def hashes_are_equal(self) -> tuple[bool, str]:
        self.needs_device()
        program = self.folder / "hashes.py"
        program.write_text(HASHED)
        self.python("hashes", program)
        return True, "five dtypes, four shapes and their transposes"

    def gradient_of_attention(self, kernel: str) -> tuple[bool, str]:
        if self.device != "cuda":
            raise NotTried("a kernel of a GPU is meant")
        program = self.folder / "gradients.py"
        program.write_text(MASKED_GRADIENTS if kernel.startswith("masked") else GRADIENTS)
        self.python(f"gradients_{kernel}", program, kernel)
        return True, last_line((self.folder / f"gradients_{kernel}.log").read_text())

    def first_ratio_is_1(self, name: str, *options: str) -> tuple[bool, str]:
        if self.device == "fake" and "compile" in options:
            raise NotTried("no compiler on the fake device")
        row = self.run(name, "--rollout", "local", *options)[1]
        mean, std = row["actor/on_policy_ratio_mean"], row["actor/on_policy_ratio_std"]
        return (mean, std) == (1, 0), f"mean {mean}, deviation {std}"

    def equals_the_cpu(self) -> tuple[bool, str]:
        self.needs_device()
        expected = self.run("cpu", "--rollout", "local", device="cpu")
        rows = self.run("gpu", "--rollout", "local")
        names = ("val/jpeg_incompressibility/mean", "critic/rewards/mean", "actor/grad_norm")
        steps = [(row, other, name) for row, other in zip(rows, expected, strict=True) for name in names if name in row]
        worst = max(abs(row[name] / other[name] - 1) for row, other, name in steps)
        return worst < 1e-2, f"rewards and gradient norms of two steps differ by at most {worst:.1e}"

    def engine_is_the_trainer(self, dtype: str) -> tuple[bool, str]:
        """The run ends at once where a push does not change the engine's images as it must, to the bit."""
        self.needs_engine()
        rows = self.run(f"vllm_{dtype}", "--rollout", "vllm", "--dtype", dtype)[1:]
        worst = max(row["rollout_corr/logprob_abs_diff_max"] for row in rows)
        is_held = worst <= LOG_PROB_LIMIT[dtype]
        return is_held, f"log-probs differ by at most {worst:.1e}; pushed weights show to the bit"

    def sleep_gives_memory_back(self) -> tuple[bool, str]:
        self.needs_engine()
        model = self.folder / "random"
        subprocess.run([sys.executable, ROOT / "benchmarks/random_model.py", "cpu-255M", model], check=True)
        least = {}
        for name, engine_with in (("awake", []), ("asleep", ["--engine_with", "sleep"])):
            with least_memory_used() as used:
                self.run(name, "--rollout", "vllm", "--model", str(model), *engine_with)
            least[name] = used[0]
        given_back = (least["awake"] - least["asleep"]) / 1e9
        return given_back > 0.3, f"{given_back:.2f} GB of an engine with 0.5 GB of weights"

    def needs_device(self) -> None:
        if self.device == "cpu":
            raise NotTried("a CPU is compared with a GPU")

    def needs_engine(self) -> None:
        if self.device != "cuda":
            raise NotTried("an engine on a GPU is meant")
        if not find_spec("vllm_omni"):
            raise NotTried("vLLM-Omni is not installed")


@contextmanager
def least_memory_used() -> Iterator[list[int]]:
    """Yields a list with the fewest bytes that were in use on the GPU after the most had been, once the block ends."""
    import torch

    seen: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            free, total = torch.cuda.mem_get_info()
            seen.append(total - free)

    watcher = threading.Thread(target=watch)
    watcher.start()
    found: list[int] = []
    try:
        yield found
    finally:
        is_over.set()
        watcher.join()
        found.append(min(seen[seen.index(max(seen)) : -20] or seen))  # the last second is of processes that end


def one_rank_environment() -> dict[str, str]:
    """The variables that torchrun sets for the only rank of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def last_line(output: str | None) -> str:
    """The line of a log that says what went wrong."""
    lines = (output or "").splitlines()
    lines = [line for line in lines if "error" in line.lower()] or lines
    return lines[-1][:200] if lines else "no output"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "fake", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="the facts with this word")
    parser.add_argument("--but", help="the facts without this word")
    parser.add_argument("--results", type=Path, default=Path("gpu_results/facts"), help="folder of the runs and logs")
    asked = parser.parse_args(argv)
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("facts.py: error: torch sees no GPU (--device fake or cpu tries this file without one)")
    folder = asked.results.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "runs").exists():
        sys.exit(f"facts.py: error: {folder}/runs exists: remove it, or choose another --results")
    print("| fact | verdict | figure |\n|---|---|---|", flush=True)
    check = Check(folder, asked.device, asked.only, asked.but)
    check.fact("a tensor's hash is the same on both devices", check.hashes_are_equal)
    check.fact("the gradient of attention, of any strides", check.gradient_of_attention, "native")
    check.fact(TURNED_OFF, check.gradient_of_attention, "cudnn")
    check.fact(CONTIGUOUS, check.gradient_of_attention, "contiguous")
    check.fact(MASKED, check.gradient_of_attention, "masked_native")
    check.fact(MASKED_CUDNN, check.gradient_of_attention, "masked_cudnn")
    check.fact("the CPU's numbers in fp32", check.equals_the_cpu)
    half = ("--dtype", "bfloat16")
    check.fact("the first ratio is exactly 1: fp32", check.first_ratio_is_1, "fp32")
    check.fact("the first ratio is exactly 1: full weights", check.first_ratio_is_1, "full", "--lora_rank", "0")
    check.fact("the first ratio is exactly 1: bf16", check.first_ratio_is_1, "bf16", *half)
    for how in ("activation_checkpointing", "compile"):
        text = f"the first ratio is exactly 1: bf16, {how}"
        check.fact(text, check.first_ratio_is_1, f"bf16_{how}", *half, "--train_with", how)
    for dtype in ("float32", "bfloat16"):
        check.fact(f"engine and trainer agree in {dtype}", check.engine_is_the_trainer, dtype)
    check.fact("--engine_with sleep gives memory back", check.sleep_gives_memory_back)
    sys.exit(any(verdict == "NOT HELD" and text not in OF_CUDNN for text, verdict, _ in check.rows))


if __name__ == "__main__":
    main()
