"""Every model family with every script: on one rank and resumed, on two ranks, and with vLLM-Omni's rollouts; and
some with an engine of two workers.

    python benchmarks/families.py docs/lab/records/families.jsonl                     # the cells that the record lacks
    python benchmarks/families.py docs/lab/records/families.jsonl --only flux z_image

The models are the tiny random checkpoints of tests/tiny_models.py. A cell is a family, a script and a way to run it;
once it is done a JSON line is appended to the record, and the page beside it, families.md, is written again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.files.prompts import read_prompts
from common.models.loading import family_class
from tests.conftest import ROOT, SCRIPTS, brightness_reward, read_metrics, torchrun, without_times
from tests.tiny_models import FAMILIES, make_checkpoint

import torch
from PIL import Image
from safetensors.torch import load_file

ADAPTER = "adapter/pytorch_lora_weights.safetensors"
OPTIONS = ["--eval_every", 1, "--max_prompts", 2, "--max_sequence_length", 160, "--num_inference_steps", 3]
# micro-batches of one size on one rank and on two
ONLINE = ["--num_prompts", 4, "--group_size", 4, "--updates_per_rollout", 1, "--micro_batch_size", 4]
OFFLINE = ["--num_pair_prompts", 4, "--group_size", 4, "--num_pairs", 2, "--micro_batch_size", 1]  # dpo_offline.py's
OF_FAMILY = {family: ["--num_frames", 5] for family in FAMILIES if family.startswith("wan")}
REFUSED = {(family, "dpo_offline.py") for family in OF_FAMILY}  # pairs are of images, not of videos
WAYS = ["local", "2 ranks", "vllm", "2 workers"]
LIMITS = {"log_prob": 1e-6, "reward": 1e-3, "metrics": 3e-3, "adapter": 5e-2}

PAGE = """# Every family with every script

    python benchmarks/families.py docs/lab/records/families.jsonl

{held} of {count} cells held. Commit {commits}, torch {torch},
{cpu}; {seconds:,.0f} s.

| family | script | resumed | two ranks: metrics, adapter | vllm: log-probs, reward | two workers: the same | seconds |
|---|---|---|---|---|---|---|
{rows}

- Tiny random weights of the family's real classes, two steps of 16 images, guidance 3 (diffusion_nft.py has none).
- Resumed: the adapter after two steps, and after one and another after `--resume latest`, is of the same bytes.
- Two ranks: the largest relative difference of a metric from the run on one rank, of values below 1e-3 over 1e-3, held
  to 3e-3 (rewards spread by 1e-3 there, of which a grey level of one pixel is 1e-4 to 1e-3); and the norm of the
  adapters' difference over that of what was trained, held to 5e-2 (Adam magnifies round-off where gradients are near
  zero).
- vllm: the largest difference of a log-prob between engine and trainer, held to 1e-6 (diffusion_nft.py has none), and
  of the first rollout's mean reward from the local run's, relative, held to 1e-3. `-`: there is no engine.
- Two workers: an engine that is split over two (`--engine_devices 1 2`). Only families that need pictures were
  tried in this way here; tests/engine/test_tensor_parallel.py tries others.
"""


def ways(family, script, folder):
    """Those that there are to run a script with a family."""
    if (family, script) in REFUSED:
        return []
    has_engine = script != "dpo_offline.py" and family_class(folder / "model").has_engine_pipeline(folder / "model")
    if not has_engine:
        return WAYS[:2]
    has_pictures = family_class(folder / "model").num_sources[0]
    return WAYS if has_pictures and script == "flow_grpo.py" else WAYS[:3]


def adapter_difference(run, expected):
    """The norm of the difference of two adapters' B matrices, which begin at 0, over the norm of the expected ones."""
    found, expected = load_file(run / ADAPTER), load_file(expected / ADAPTER)
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


def edits(folder):
    """Options with a file of prompts, each with a picture."""
    path = folder / "edits.jsonl"
    prompts = read_prompts(ROOT / "assets" / "train_prompts.txt").prompts[:8]
    lines = []
    for i, prompt in enumerate(prompts):
        picture = Image.linear_gradient("L").rotate(40 * i).resize((96, 32)).convert("RGB")
        picture.save(folder / f"{i}.png")
        lines.append(json.dumps({"prompt": prompt, "image": f"{i}.png"}) + "\n")
    path.write_text("".join(lines))
    return ["--train_prompts", path, "--eval_prompts", path]


def measure(family, script, way, folder):
    """Run a cell in the folder of its family. Returns what was measured, for LIMITS, and whether it held."""
    stem = script.removesuffix(".py")
    options = ["--model", folder / "model", *OPTIONS, "--reward", brightness_reward(folder)]
    options += [*(OFFLINE if script == "dpo_offline.py" else ONLINE), *OF_FAMILY.get(family, [])]
    if family_class(folder / "model").num_sources[0]:
        options += edits(folder)
    if script != "diffusion_nft.py":
        options += ["--guidance_scale", 3]
    local = [] if script == "dpo_offline.py" else ["--rollout", "local"]

    def run(name, num_steps, *more, nproc=1):
        done = folder / "runs" / f"{stem}-{name}"
        if not (done / "checkpoints" / f"step_{num_steps:06d}.pt").exists():  # the whole run is of all three cells
            torchrun(folder, script, *options, "--name", done.name, "--num_steps", num_steps, *more, nproc=nproc)
        return done

    whole = run("whole", 2, *local)
    if way == "local":
        run("cut", 1, *local)
        resumed = run("cut", 2, *local, "--resume", "latest")
        return {"held": (resumed / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()}
    if way == "2 ranks":
        ranks = run("ranks", 2, *local, nproc=2)
        found = {"metrics": metrics_difference(ranks, whole), "adapter": adapter_difference(ranks, whole)}
    else:
        engine = ["--rollout", "vllm", *(["--engine_devices", 1, 2] if way == "2 workers" else [])]
        rows, expected = read_metrics(run(way.replace(" ", "_"), 2, *engine)), read_metrics(whole)
        found = {"reward": abs(rows[1]["critic/rewards/mean"] / expected[1]["critic/rewards/mean"] - 1)}
        if script != "diffusion_nft.py":
            found["log_prob"] = max(row["rollout_corr/logprob_abs_diff_max"] for row in rows[1:])
    return {"held": all(value <= LIMITS[name] for name, value in found.items()), **found}


def try_script(family, script, folder, record, commit):
    """Append a line to the record for each cell of the two that it lacks."""
    for way in ways(family, script, folder):
        if (family, script, way) in read_record(record):
            continue
        began = time.perf_counter()
        try:
            found = measure(family, script, way, folder)
        except Exception as error:  # the rest of the table is wanted all the same
            found = {"held": False, "problem": str(error)[-600:]}
        cell = {"family": family, "script": script, "way": way, "commit": commit, **found}
        line = json.dumps(cell | {"seconds": time.perf_counter() - began})
        print(line, flush=True)
        with open(record, "a") as file:
            file.write(line + "\n")


def read_record(path):
    """{(family, script, way): its newest line}."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(cell["family"], cell["script"], cell["way"]): cell for cell in map(json.loads, lines)}


def said(cell):
    """A cell's text in the table."""
    if not cell:
        return "-"
    numbers = [f"{cell[name]:.0e}" for name in ("log_prob", "metrics", "adapter", "reward") if name in cell]
    text = "failed" if "problem" in cell else ", ".join(numbers) or "equal"
    return text if cell["held"] else f"NOT HELD: {text}"


def page(cells):
    """The record in Markdown."""
    rows = []
    for family, script in sorted({key[:2] for key in cells}):
        row = [cells.get((family, script, way)) for way in WAYS]
        seconds = sum(cell["seconds"] for cell in row if cell)
        rows.append(f"| {family} | {script} | {' | '.join(map(said, row))} | {seconds:.0f} |")
    cpu = subprocess.run("lscpu | sed -n 's/^Model name: *//p'; nproc", shell=True, capture_output=True, text=True)
    return PAGE.format(
        held=sum(cell["held"] for cell in cells.values()),
        count=len(cells),
        commits=", ".join(sorted({cell["commit"] for cell in cells.values()})),
        torch=torch.__version__,
        cpu=" x ".join(cpu.stdout.splitlines()[::-1]),
        seconds=sum(cell["seconds"] for cell in cells.values()),
        rows="\n".join(rows),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help=".jsonl, a line a cell")
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--jobs", type=int, default=1, help="scripts of a family at the same time")
    args = parser.parse_args()
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(args.jobs) as pool:
        folders = {family: Path(work) / family for family in args.only}
        for family, folder in folders.items():
            make_checkpoint(family, folder / "model")
        tried = []
        for script in SCRIPTS:
            for family, folder in folders.items():
                tried.append(pool.submit(try_script, family, script, folder, args.record, git.stdout.strip()))
        for one in tried:
            one.result()
            args.record.with_suffix(".md").write_text(page(read_record(args.record)))
    sys.exit(not all(cell["held"] for cell in read_record(args.record).values()))
