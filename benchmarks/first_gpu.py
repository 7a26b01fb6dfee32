"""What only a GPU can confirm, each fact as held or not, in under ten minutes. No download.

    python benchmarks/first_gpu.py                 # on a machine with a GPU
    python benchmarks/first_gpu.py --fake          # tries this file on the device made of host memory (tests/fake_cuda)

Our tests run the CUDA path on a CPU, where some things cannot show: a GPU's kernels and their rounding, the compiler,
vLLM-Omni beside the trainer on one GPU. Every run is flow_grpo.py on the embedded model, or on random weights of 255 M
parameters. The report is gpu_results/first_gpu.md, with the logs beside it. Please send it to us in an issue: the
project was made without a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SECONDS = 600  # in all; a fact that is not reached is "not tried"
SMALL = ["--num_steps", "2", "--num_prompts", "8", "--group_size", "4", "--updates_per_rollout", "2"]
SMALL += ["--micro_batch_size", "8", "--max_prompts", "16", "--reward", "jpeg_incompressibility"]
LOG_PROB_LIMIT = {"float32": 1e-4, "bfloat16": 0.05}  # mean distance of engine and trainer, ours
HASHED = """
import sys
import torch
from common.models.family import hash_bits
worst = []
for name in ("float64", "float32", "bfloat16", "float16", "int64"):
    for shape in ((1,), (7,), (3, 5, 11), (1024, 257)):
        tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(getattr(torch, name))
        for view in (tensor, tensor.transpose(0, -1)):
            if hash_bits(view) != hash_bits(view.cuda()):
                worst.append(f"{name} {tuple(view.shape)}")
sys.exit(", ".join(worst) or 0)
"""


class NotTried(Exception):
    """A fact cannot be tried here."""


class Check:
    """Runs of the scripts in a folder, until the time is over, and what they show."""

    def __init__(self, folder: Path, is_fake: bool) -> None:
        self.folder = folder
        self.is_fake = is_fake
        self.end = time.monotonic() + (3600 if is_fake else SECONDS)
        self.rows: list[tuple[str, str, str]] = []  # fact, verdict, figure

    def fact(self, text: str, show: Callable[..., tuple[bool, str]], *arguments: str) -> None:
        """Enter whether `show`, called with the arguments, finds that the fact holds. It returns (held, figure)."""
        try:
            is_held, figure = show(*arguments)
            verdict = "held" if is_held else "NOT HELD"
        except NotTried as reason:
            verdict, figure = "not tried", str(reason)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            verdict, figure = "NOT HELD", last_line(error.output)
        self.rows.append((text, verdict, figure))
        print(f"{verdict:9}  {text}: {figure}", flush=True)

    def python(self, name: str, *arguments: str | Path) -> None:
        """Run a program with the device; its output is NAME.log."""
        left = self.end - time.monotonic()
        if left < 20:
            raise NotTried("the ten minutes are over")
        command = [sys.executable]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        if self.is_fake:
            command.append(str(ROOT / "tests" / "fake_cuda" / "launch.py"))
            environment |= {"OMP_NUM_THREADS": "1"}
        from tests.conftest import one_rank_environment

        done = subprocess.run(
            [*command, *map(str, arguments)],
            cwd=self.folder,
            env=environment | one_rank_environment(),
            timeout=left,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        (self.folder / f"{name}.log").write_text(done.stdout)
        done.check_returncode()

    def run(self, name: str, *options: str) -> list[dict]:
        """The metrics of a run of flow_grpo.py."""
        self.python(name, ROOT / "flow_grpo.py", "--name", name, *SMALL, *options)
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    # ---- facts -------------------------------------------------------------------------------------------------------
    def hashes_are_equal(self) -> tuple[bool, str]:
        program = self.folder / "hashes.py"
        program.write_text(HASHED)
        self.python("hashes", program)
        return True, "five dtypes, four shapes and their transposes"

    def first_ratio_is_1(self, name: str, *options: str) -> tuple[bool, str]:
        if self.is_fake and "compile" in options:
            raise NotTried("no compiler on the fake device")
        row = self.run(name, "--rollout", "local", *options)[1]
        mean, std = row["actor/on_policy_ratio_mean"], row["actor/on_policy_ratio_std"]
        return (mean, std) == (1, 0), f"mean {mean}, deviation {std}"

    def equals_the_cpu(self) -> tuple[bool, str]:
        with without_gpu():
            was_fake, self.is_fake = self.is_fake, False
            try:
                expected = self.run("cpu", "--rollout", "local")
            finally:
                self.is_fake = was_fake
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
        return worst <= LOG_PROB_LIMIT[
            dtype
        ], f"log-probs differ by at most {worst:.1e}; pushed weights show to the bit"

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

    def needs_engine(self) -> None:
        if self.is_fake or not find_spec("vllm_omni"):
            raise NotTried("vLLM-Omni is not installed" if not self.is_fake else "no engine on the fake device")


@contextmanager
def without_gpu() -> Iterator[None]:
    """Processes that start within the block see no GPU."""
    saved = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if saved is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = saved


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


def last_line(output: str | bytes | None) -> str:
    """The line of a log that says what went wrong."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    lines = [line for line in text.splitlines() if "error" in line.lower()] or text.splitlines()
    return lines[-1][:200] if lines else "no output"


def versions(is_fake: bool) -> list[str]:
    """The hardware and the software, a line each."""
    import torch

    lines = ["the fake device" if is_fake else "no GPU"]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        lines = [f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 1e9:.0f} GB"]
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines.append(f"driver {subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()[0]}")
    lines.append(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return [*lines, f"commit {commit.stdout.strip() or 'unknown'}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="on the device made of host memory: tries this file")
    parser.add_argument("--results", type=Path, default=Path("gpu_results"), help="folder of the report and logs")
    asked = parser.parse_args()
    import torch

    if not asked.fake and not torch.cuda.is_available():
        sys.exit("first_gpu.py: torch sees no GPU (--fake tries this file without one)")
    folder = asked.results.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "runs").exists():
        sys.exit(f"first_gpu.py: {folder}/runs exists: remove it, or choose another --results")
    began = time.monotonic()
    check = Check(folder, asked.fake)
    check.fact("a tensor's hash is the same on both devices", check.hashes_are_equal)
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

    lines = ["# benchmarks/first_gpu.py", "", *(f"- {line}" for line in versions(asked.fake)), ""]
    lines += ["| fact | verdict | figure |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in check.rows]
    lines += ["", f"{time.monotonic() - began:.0f} s."]
    (folder / "first_gpu.md").write_text("\n".join(lines) + "\n")
    print(f"{folder / 'first_gpu.md'}: please send it to us")
    sys.exit(any(verdict == "NOT HELD" for _, verdict, _ in check.rows))


if __name__ == "__main__":
    main()
