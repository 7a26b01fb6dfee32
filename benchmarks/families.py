"""Every model family with every script: on one rank and resumed, on two ranks, and with vLLM-Omni's rollouts.

    python benchmarks/families.py docs/records/families.jsonl                     # the cells that the record lacks
    python benchmarks/families.py docs/records/families.jsonl --only flux z_image

The models are the tiny random checkpoints of tests/tiny_models.py, with guidance where a script has it; a run takes two
steps. A cell is a family, a script and a way to run it. Once it is done a JSON line is appended to the record, and the
table beside it, families.md, is written anew.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.models import find_family
from tests.conftest import SCRIPTS, brightness_reward, read_metrics, torchrun, without_times
from tests.tiny_models import FAMILIES, make_checkpoint

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
GIT = ["git", "describe", "--always", "--dirty"]
COMMIT = subprocess.run(GIT, cwd=ROOT, capture_output=True, text=True).stdout.strip()  # of the run's beginning
WAYS = ["local", "2 ranks", "vllm"]
OPTIONS = ["--eval_every", 1, "--max_prompts", 2, "--max_sequence_length", 160, "--num_inference_steps", 3]
# as many images in a micro-batch on one rank as on two
ONLINE = ["--num_prompts", 4, "--group_size", 4, "--updates_per_rollout", 1, "--micro_batch_size", 4]
OFFLINE = ["--num_pair_prompts", 4, "--group_size", 4, "--num_pairs", 2, "--micro_batch_size", 1]  # dpo_offline.py's
OF_FAMILY = {"wan": ["--num_frames", 5]}
REFUSED = {("wan", "dpo_offline.py")}  # pairs are of images, not of videos

LOG_PROB_LIMIT = 1e-6  # between engine and trainer
METRICS_LIMIT = 1e-3  # relative, between one rank and two: a grey level of a pixel is 1e-4 of an advantage
ADAPTER_LIMIT = 1e-2  # relative, of its norm: Adam magnifies round-off where gradients are near zero


def cells_of(family, folder, script):
    """The ways to run a script that the family has."""
    if (family, script) in REFUSED:
        return []
    has_engine = script != "dpo_offline.py" and find_family(folder / "model").engine_pipeline is not None
    return WAYS if has_engine else WAYS[:2]


def run(folder, script, options, name, num_steps, *more, nproc=1):
    """The folder of a run of so many steps, which is not made again."""
    done = folder / "runs" / name
    if not (done / "checkpoints" / f"step_{num_steps:06d}.pt").exists():
        torchrun(folder, script, *options, "--name", name, "--num_steps", num_steps, *more, nproc=nproc)
    return done


def adapter(run):
    return load_file(run / "adapter" / "pytorch_lora_weights.safetensors")


def adapter_difference(run, expected):
    """The norm of the difference of two adapters' B matrices, which begin at 0, over the norm of the expected ones."""
    found, expected = adapter(run), adapter(expected)
    assert found.keys() == expected.keys()
    keys = [key for key in expected if "lora_B" in key]
    difference = torch.cat([(found[key] - expected[key]).flatten() for key in keys]).norm()
    return (difference / torch.cat([expected[key].flatten() for key in keys]).norm()).item()


def metrics_difference(run, expected):
    """The largest relative difference of two runs' metrics; of values below 1e-3, as losses are, over 1e-3."""
    worst = 0.0
    for row, other in zip(without_times(read_metrics(run)), without_times(read_metrics(expected)), strict=True):
        assert row.keys() == other.keys()
        worst = max([worst, *(abs(row[key] - other[key]) / max(abs(other[key]), 1e-3) for key in other)])
    return worst


def try_cell(family, script, way, folder):
    """Run a cell in the folder of its family. Returns its measurements, among them whether it `held`."""
    options = ["--model", folder / "model", *OPTIONS, "--reward", brightness_reward(folder)]
    options += OFFLINE if script == "dpo_offline.py" else ONLINE
    options += OF_FAMILY.get(family, [])
    if script != "diffusion_nft.py":
        options += ["--guidance_scale", 3]
    local = options if script == "dpo_offline.py" else [*options, "--rollout", "local"]
    stem = script.removesuffix(".py")
    whole = run(folder, script, local, f"{stem}-whole", 2)

    if way == "local":
        run(folder, script, local, f"{stem}-cut", 1)
        cut = run(folder, script, local, f"{stem}-cut", 2, "--resume", "latest")
        first, second = (path / "adapter" / "pytorch_lora_weights.safetensors" for path in (whole, cut))
        return {"held": first.read_bytes() == second.read_bytes()}
    if way == "2 ranks":
        ranks = run(folder, script, local, f"{stem}-ranks", 2, nproc=2)
        found = {"metrics": metrics_difference(ranks, whole), "adapter": adapter_difference(ranks, whole)}
        return {"held": found["metrics"] <= METRICS_LIMIT and found["adapter"] <= ADAPTER_LIMIT, **found}
    engine = run(folder, script, [*options, "--rollout", "vllm"], f"{stem}-vllm", 2)
    rows, expected = read_metrics(engine), read_metrics(whole)
    # DiffusionNFT has no log-probs: of it only the first rollout's images are compared
    drifts = [row.get("rollout_corr/logprob_abs_diff_max", 0.0) for row in rows]
    rewards = [some[1]["critic/rewards/mean"] for some in (rows, expected)]
    found = {"log_prob": max(drifts), "reward": abs(rewards[0] / rewards[1] - 1)}
    return {"held": found["log_prob"] <= LOG_PROB_LIMIT and found["reward"] <= METRICS_LIMIT, **found}


def try_family(family, work, record, lacking):
    """Append a line to the record for each cell that it lacks."""
    folder = Path(work) / family
    if not (folder / "model" / "model_index.json").exists():
        make_checkpoint(family, folder / "model")
    for script in SCRIPTS:
        for way in cells_of(family, folder, script):
            if not lacking(family, script, way):
                continue
            began = time.perf_counter()
            try:
                found = try_cell(family, script, way, folder)
            except Exception as error:  # the rest of the table is wanted all the same
                found = {"held": False, "problem": str(error)[-600:]}
            cell = {"family": family, "script": script, "way": way, "commit": COMMIT, **found}
            cell["seconds"] = time.perf_counter() - began
            print(json.dumps(cell), flush=True)
            with open(record, "a") as file:
                file.write(json.dumps(cell) + "\n")


def read_record(path):
    """{(family, script, way): its newest line}."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return {(cell["family"], cell["script"], cell["way"]): cell for cell in map(json.loads, lines)}


def said(cell):
    """A cell's text in the table."""
    if not cell:
        return "-"
    if "problem" in cell:
        return "failed"
    numbers = [f"{cell[name]:.0e}" for name in ("log_prob", "metrics", "adapter", "reward") if name in cell]
    return ("" if cell["held"] else "NOT HELD ") + (", ".join(numbers) or "equal")


def table(cells):
    """The record as a page in Markdown."""
    held = sum(cell["held"] for cell in cells.values())
    seconds = sum(cell["seconds"] for cell in cells.values())
    model = "an unknown CPU"
    if Path("/proc/cpuinfo").exists():
        model = Path("/proc/cpuinfo").read_text().split("model name\t: ")[-1].splitlines()[0]
    lines = [
        "# Every family with every script",
        "",
        "    python benchmarks/families.py docs/records/families.jsonl",
        "",
        f"{held} of {len(cells)} cells held. Commit {', '.join(sorted({cell['commit'] for cell in cells.values()}))};",
        f"{model}, {os.cpu_count()} cores, torch {torch.__version__}; {seconds:,.0f} s.",
        "",
        "| family | script | resumed | two ranks: metrics, adapter | vllm: log-probs, rewards | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for family, script in dict.fromkeys(key[:2] for key in cells):
        row = [cells.get((family, script, way)) for way in WAYS]
        texts = [said(cell) for cell in row]
        took = sum(cell["seconds"] for cell in row if cell)
        lines.append(f"| {family} | {script} | {' | '.join(texts)} | {took:.0f} |")
    return "\n".join([*lines, "", NOTES])


NOTES = """\
- Tiny random weights of the family's real classes, two steps of 16 images, guidance 3 (diffusion_nft.py has none).
- Resumed: the adapter after two steps, and after one and another after `--resume latest`, is of the same bytes.
- Two ranks: the largest relative difference of a metric from the run on one rank, of values below 1e-3 over 1e-3; and
  the norm of the adapters' difference over that of what was trained. Held: 1e-3 and 1e-2; Adam magnifies round-off.
- vllm: the largest difference of a log-prob between engine and trainer, held to 1e-6 (diffusion_nft.py has none: 0),
  and the first rollout's mean reward against the local one's, relative. Z-Image has no engine, dpo_offline.py no use.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help=".jsonl, a line a cell; the table is written beside it")
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--jobs", type=int, default=1, help="families at the same time")
    args = parser.parse_args()
    known = read_record(args.record)
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(args.jobs) as pool:
        tried = [
            pool.submit(try_family, family, work, args.record, lambda *cell: cell not in known) for family in args.only
        ]
        for family in tried:
            family.result()
            args.record.with_suffix(".md").write_text(table(read_record(args.record)))
    sys.exit(not all(cell["held"] for cell in read_record(args.record).values()))
