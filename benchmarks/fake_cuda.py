"""Scripts, ranks and options on the CUDA device made of host memory, against the same runs on the CPU.

    python benchmarks/fake_cuda.py > docs/lab/records/fake_cuda.md     # the table, half an hour on two cores
    python benchmarks/fake_cuda.py --only resume                       # the rows that have this word
    python benchmarks/fake_cuda.py --mutations                         # `.to(device)` taken out, place by place

Every metric but times and memory is compared, relative to its size. In fp32 the bound is 1e-5 up to the first optimizer
step, and 1e-3 after it: Adam's first step is the gradient's sign, which round-off decides where the gradient is about
0, and a pixel has 256 levels. In bf16, which turns a reward's last digit into 4e-5 of a gradient, the bounds are 1e-4
and 2e-3. In bf16 and with a learned reward the bound of a metric is at least twice what one and two CPU ranks differ
by. The CPU computes attention and convolutions by the plain formulas, as the device does (tests/fake_cuda/on_cpu.py).
tests/fake_cuda says what the device cannot see. Mutations are made in a copy of the checkout; a run of the changed copy
must fail. The transformer's own inputs need no `.to(device)`, as FSDP moves them.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.conftest import ROOT, brightness_reward, read_metrics
from tests.fake_cuda import build
from tests.fake_cuda.runs import NAME, distances, last_lines, run_script
from tests.tiny_models import make_clip

ONLINE = ["--num_steps", "1", "--num_prompts", "4", "--group_size", "4", "--updates_per_rollout", "1"]
ONLINE += ["--micro_batch_size", "2", "--max_prompts", "4", "--rollout", "local"]
OFFLINE = ["--num_steps", "1", "--num_pair_prompts", "4", "--group_size", "4", "--num_pairs", "4"]
OFFLINE += ["--micro_batch_size", "1", "--max_prompts", "4"]
FULL = ["--lora_rank", "0", "--learning_rate", "1e-5"]
ROUND_OFF = {"float32": 1e-5, "bfloat16": 1e-4}
AFTER_ADAM = {"float32": 1e-3, "bfloat16": 2e-3}


class Row(NamedTuple):
    """A run of the table."""

    name: str
    script: str
    ranks: int = 1
    options: tuple[str, ...] = ()
    then: tuple[str, ...] = ()  # a second start with these options more, on two ranks
    clip: bool = False  # with the rewards clip_score, of a tiny CLIP, which leaves the device between rollouts

    @property
    def is_bf16(self) -> bool:
        return "bfloat16" in self.options


HALF = ("--dtype", "bfloat16")
ALL = ("--guidance_scale", "2", "--kl_coef", "0.04", "--ema_decay", "0.9")
SHARDED = ("--shard_ranks", "2")
ROWS = [
    Row("LoRA", "flow_grpo.py"),
    Row("a copy on each of two ranks", "flow_grpo.py", 2),
    Row("shards of two ranks", "flow_grpo.py", 2, SHARDED),
    Row("two copies of two shards", "flow_grpo.py", 4, (*SHARDED, "--kl_coef", "0.04")),
    Row("guidance, KL, EMA", "flow_grpo.py", 1, ALL),
    Row("guidance, KL, EMA", "flow_grpo.py", 2, (*HALF, *ALL, "--train_with", "activation_checkpointing")),
    Row("prompt_cache", "flow_grpo.py", 2, (*HALF, "--prompt_cache", "cache", "--guidance_scale", "2")),
    Row("full weights", "flow_grpo.py", 2, (*FULL, "--kl_coef", "0.04", "--ema_decay", "0.9")),
    Row("full weights, cpu_offload", "flow_grpo.py", 1, (*FULL, *HALF, "--train_with", "cpu_offload")),
    Row("clip_score", "flow_grpo.py", 1, clip=True),
    Row("resume on two ranks", "flow_grpo.py", 1, ("--ema_decay", "0.9"), ("--num_steps", "2", "--resume", "latest")),
    Row("LoRA", "grpo_guard.py", 2, ALL),
    Row("LoRA", "mix_grpo.py", 2, ("--kl_coef", "0.04")),
    Row("LoRA", "mix_grpo.py", 1, HALF),
    Row("LoRA", "diffusion_nft.py", 2, ("--kl_coef", "1e-4")),
    Row("full weights", "diffusion_nft.py", 1, (*FULL, "--kl_coef", "0")),
    Row("LoRA", "dpo_offline.py", 2),
    Row("full weights", "dpo_offline.py", 1, (*FULL, *HALF)),
]

# ---- what a mutation takes out: (file, text, what stands there then, the row that must fail) -------------------------
IN_UPDATE = "local_advantages = advantages[image_index].to(device, torch.float32)"
MUTATIONS = [
    ("flow_grpo.py", IN_UPDATE, IN_UPDATE.replace("device, ", ""), ROWS[0]),
    ("diffusion_nft.py", "r[image_index].to(device, torch.float32)", "r[image_index].float()", ROWS[14]),
    ("diffusion_nft.py", "is_compared[image_index].to(device,", "is_compared[image_index].to(", ROWS[14]),
    ("dpo_offline.py", "s = sigmas[rows].to(model.device)", "s = sigmas[rows]", ROWS[16]),
    ("dpo_offline.py", "eps = noise[rows].to(model.device)", "eps = noise[rows]", ROWS[16]),
    ("common/sde.py", "drawn.pin_memory().to(device, non_blocking=True)", "drawn", ROWS[0]),
    ("common/models/family.py", "tensor.data.to(model.device, non", "tensor.data.to(non", ROWS[0]),
    ("common/models/family.py", "pixels.to(vae.device)", "pixels", ROWS[16]),
    ("common/pairs/pairs.py", "for pair in pairs], 1).to(device)", "for pair in pairs], 1)", ROWS[16]),
    ("common/rewards/_clip.py", "pixels.to(model.device)", "pixels", ROWS[9]),
]  # fmt: skip


def start(row: Row, folder: Path, on_cuda: bool, ranks: int, root: Path = ROOT) -> tuple[int, str]:
    """Make the runs of a row in a new folder. Returns the exit code and the output of the last one."""
    folder.mkdir(parents=True)
    options = [*(OFFLINE if row.script == "dpo_offline.py" else ONLINE), "--reward", brightness_reward(folder)]
    environment = {"FAKE_CUDA_DEVICES": ""}
    if row.clip:
        options += ["clip_score", "--reward_weights", "1", "1"]
        environment |= {"CLIP_SCORE_MODEL": str(make_clip(folder / "clip", seed=1)), "REWARD_OFFLOAD": "1"}
    if "--prompt_cache" in row.options:  # it would take all training prompts
        prompts = folder / "prompts.txt"
        prompts.write_text("".join(f'a sign that says "{number}"\n' for number in range(100, 108)))
        options += ["--train_prompts", str(prompts)]
    options += row.options
    with mock.patch.dict(os.environ, environment):
        done = run_script(folder, row.script, *options, ranks=ranks, on_cuda=on_cuda, root=root)
        if row.then and done.returncode == 0:
            done = run_script(folder, row.script, *options, *row.then, ranks=2, on_cuda=on_cuda, root=root)
    return done.returncode, done.stdout


def metrics_of(row: Row, folder: Path, on_cuda: bool, ranks: int) -> list[dict]:
    """The metrics of a row's run, which must succeed."""
    code, output = start(row, folder, on_cuda, ranks)
    if code:
        raise RuntimeError(last_lines(output))
    return read_metrics(folder / "runs" / NAME)


def bound(name: str, dtype: str) -> float:
    """The bound of "METRIC at STEP"."""
    metric, _, step = name.rpartition(" at ")
    is_after = int(step) > 1 or (int(step) == 1 and metric.startswith("val/"))
    return (AFTER_ADAM if is_after else ROUND_OFF)[dtype]


def compare(row: Row, folder: Path) -> tuple[bool, str]:
    """Whether the device has the CPU's numbers, and a cell about it."""
    try:
        found = metrics_of(row, folder / "cuda", True, row.ranks)
        expected = metrics_of(row, folder / "cpu", False, row.ranks)
        far = distances(found, expected)
        dtype = "bfloat16" if row.is_bf16 else "float32"
        bounds = {name: bound(name, dtype) for name in far}
        if row.is_bf16 or row.clip:
            other = metrics_of(row, folder / "other", False, 3 - min(row.ranks, 2))
            bounds = {name: max(bounds[name], 2 * on_cpu) for name, on_cpu in distances(other, expected).items()}
    except RuntimeError as error:
        return False, str(error).replace("\n", " ")
    over = [name for name, distance in far.items() if not distance <= bounds[name]]
    worst = max(far, key=lambda name: far[name])
    cell = f"{far[worst]:.1e} ({worst})"
    return not over, cell + (f"; beyond its bound: {', '.join(over[:3])}" if over else "")


def print_table(work: Path, only: str) -> bool:
    """Print a line per row. Returns whether all hold."""
    print("| run | script | ranks | options | largest distance of a metric | verdict |\n|---|---|---|---|---|---|")
    all_hold = True
    for number, row in enumerate(ROWS):
        if only in f"{row.name} {row.script} {' '.join(row.options)}":
            holds, cell = compare(row, work / str(number))
            all_hold &= holds
            options = " ".join(row.options + row.then) or "-"
            verdict = "holds" if holds else "DIFFERENT"
            print(f"| {row.name} | {row.script} | {row.ranks} | {options} | {cell} | {verdict} |", flush=True)
    return all_hold


def print_mutations(work: Path) -> bool:
    """Print a line per mutation. Returns whether each is found."""
    copy = work / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "cache", "__pycache__"))
    print("| file | taken out of | run | what it says |\n|---|---|---|---|")
    all_found = True
    for number, (file, text, instead, row) in enumerate(MUTATIONS):
        source = (copy / file).read_text()
        (copy / file).write_text(source.replace(text, instead))
        code, output = start(row, work / f"mutation{number}", True, row.ranks, root=copy)
        (copy / file).write_text(source)
        all_found &= code != 0
        said = last_lines(output).splitlines()[-1][:160] if code else "NOT FOUND"
        print(f"| {file} | `{text}` | {row.script} | {said} |", flush=True)
    return all_found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows that have this word in their name, script or options")
    parser.add_argument("--mutations", action="store_true", help="take `.to(device)` out, place by place")
    asked = parser.parse_args()
    for file, text, _, _ in MUTATIONS if asked.mutations else ():
        if (ROOT / file).read_text().count(text) != 1:
            parser.error(f"{file}: {text!r} stands there {(ROOT / file).read_text().count(text)} times")
    build.built_library()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sys.exit(not (print_mutations(work) if asked.mutations else print_table(work, asked.only)))


if __name__ == "__main__":
    main()
