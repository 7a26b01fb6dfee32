"""The commands of README.md and docs/, and the recipes of docs/models.md, for three steps on a CPU.

    python benchmarks/readme_commands.py docs/records/readme_commands.txt                    # those the record lacks
    python benchmarks/readme_commands.py docs/records/readme_commands.txt --only README.md
    python benchmarks/readme_commands.py docs/records/readme_commands.txt --only SD3.5-medium Wan2.1-1.3B

Every flag is as it is written, but for these. A published model becomes the tiny random checkpoint of its family
(tests/tiny_models.py), of 8 x 8 pixels to a latent; SD3.5's has all of its three kinds of block. Eight ranks become
two; a rank makes two images, in one update; there are two evaluation prompts. Prompts are made up, my_rewards.py is the
README's. A recipe is run on two ranks, offline DPO's with a reward that tells a random model's images apart; a preset
is run, not planned. A row of each command is appended to the record.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.conftest import ROOT, read_metrics, torchrun
from tests.published_models import PUBLISHED, recipes
from tests.tiny_models import make_checkpoint

import pyarrow.parquet

NUM_STEPS = 3
IMAGES_PER_RANK = 2
INPUTS = ["--train_prompts", "train.txt", "--eval_prompts", "test.txt"]  # which recipes and presets leave to the reader
EIGHT_PIXELS = ("stable_diffusion_3", "flux", "z_image")  # whose tiny VAEs have 4 x 4 to a latent else
HEADER = """# The commands of README.md and docs/, on a CPU

    python benchmarks/readme_commands.py docs/records/readme_commands.txt

As written, but for: tiny random checkpoints of the published models' families (SD3.5's has its three kinds of block),
at most two ranks, two images a rank in one update, two evaluation prompts, three steps.

- Engine against trainer, the largest of the steps: the relative difference of velocities, |difference of log-probs|.
- Ratio: 1 - its mean, and its deviation, the largest of the steps; each step has one update, so that both are 0 where
  old and new log-probs are of one policy.

| command | ranks | steps | velocities | log-probs | ratio: 1 - mean | deviation | seconds | commit |
|---|---|---|---|---|---|---|---|---|
"""


def commands_of_pages():
    """{page and command, on one line: (ranks, script, options)} of the torchrun commands that stand in code blocks.

    Not those of a script that a page makes, as docs/more_algorithms.md does: its test applies and runs it. Nor those
    that ask a server, which benchmarks/judge.py and tests/test_reward_servers.py run.
    """
    commands = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.search(r"torchrun --standalone (?:--nproc_per_node (\d+) )?(\w+\.py)(.*)", line)
                if found and (ROOT / found[2]).is_file():
                    ranks, script, options = found.groups()
                    options = shlex.split(options, comments=True)
                    if {"vlm_judge", "http_scorer"} & set(options):
                        continue
                    name = " ".join([page.name, script, *options])
                    if "--plan" in options:
                        place = options.index("--plan")
                        del options[place : place + 2]
                        options = ["--reward", "my_rewards.py:redness", *INPUTS, *options]  # a later one wins
                    commands.setdefault(name, (int(ranks or 1), script, options))
    return commands


def commands_of_recipes():
    """{model and script: (ranks, script, options)}; docs/models.md says what to add to its lines."""
    commands = {}
    for (model, script), options in recipes().items():
        # a reward that tells a random model's images apart
        reward = "my_rewards.py:motion" if "--num_frames" in options else "jpeg_incompressibility"
        options = ["--reward", reward, *INPUTS, *options]  # the recipe's own reward, if any, wins
        if script == "dpo_offline.py":
            options += ["--reward", reward]  # OCR reads nothing in a random model's images: no pairs
        commands[f"{model} {script}"] = (2, script, options)
    return commands


def write_inputs(folder):
    """The files that the commands name: prompts, the README's reward, and a step kind of docs/new_algorithm.md."""
    prompts = [f'a red sign that says "{number}"' for number in range(100, 108)]
    for name in ("train.txt", "test.txt", "held_out.txt"):
        (folder / name).write_text("\n".join(prompts) + "\n")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "a sign that says \\"{n}\\""}}\n' for n in range(8)))
    of_videos = "\n\ndef motion(videos, prompts, metadata):\n"
    of_videos += "    return redness([video[0] for video in videos], prompts, metadata)\n"
    (folder / "my_rewards.py").write_text(python_block(ROOT / "README.md", "# my_rewards.py") + of_videos)
    (folder / "my_steps.py").write_text(python_block(ROOT / "docs" / "new_algorithm.md", "# my_steps.py"))
    pairs = folder / "my_pairs.jsonl"
    images = [ROOT / "docs" / name for name in ("before_after.png", "curve.png")]
    pair = f'{{"prompt": "a sign", "chosen": "{images[0]}", "rejected": "{images[1]}"}}\n'
    pairs.write_text(pair * IMAGES_PER_RANK)
    row = {"caption": "a sign", "jpg_0": images[0].read_bytes(), "jpg_1": images[1].read_bytes()}
    rows = [row | {"label_0": 1.0, "label_1": 0.0}] * IMAGES_PER_RANK
    pick_a_pic = folder / "pickapic_v2" / "data" / "train-00000-of-00645.parquet"
    pick_a_pic.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), pick_a_pic)


def python_block(page, first_line):
    """The code block of a page that begins with a line."""
    return next(block for block in page.read_text().split("```python\n") if block.startswith(first_line)).split("```")[
        0
    ]


def tiny_model(model, folder):
    """The folder of the tiny checkpoint that stands for `model`, a hub id or a folder's name; made once."""
    others = {"path/to/sd3-pipeline": "stable_diffusion_3", "/tmp/tiny": "flux"}
    family = PUBLISHED[model][0] if model in PUBLISHED else others[model]
    made = folder / "models" / family
    if not made.exists():
        options = {"vae_factor": 8} if family in EIGHT_PIXELS else {}
        make_checkpoint(family, made, **options)
    return made


def smaller(script, ranks, options, folder):
    """Ranks, and options with what this machine has no room for replaced."""
    ranks = min(ranks, 2)
    options = list(options)
    if "--model" in options:
        place = options.index("--model") + 1
        options[place] = str(tiny_model(options[place], folder))
    num_images = ranks * IMAGES_PER_RANK
    options += ["--num_steps", NUM_STEPS, "--max_prompts", 2]
    if script == "dpo_offline.py":
        options += ["--num_pairs", num_images, "--num_pair_prompts", num_images, "--group_size", 2]
    else:
        options += ["--num_prompts", ranks, "--group_size", IMAGES_PER_RANK, "--updates_per_rollout", 1]
    return ranks, options


def run(ranks, script, options, folder):
    """Run a command. Returns the columns of its row after the first."""
    ranks, options = smaller(script, ranks, options, folder)
    name = options[options.index("--name") + 1] if "--name" in options else script.removesuffix(".py")
    run_folder = folder / "runs" / name
    if "--resume" not in options and "--help" not in options:
        shutil.rmtree(run_folder, ignore_errors=True)
    began = time.perf_counter()
    torchrun(folder, script, *options, nproc=ranks, timeout=3600)
    seconds = time.perf_counter() - began
    if "--help" in options:
        return [ranks, "help", "-", "-", "-", "-", f"{seconds:.0f}"]
    rows = [row for row in read_metrics(run_folder) if "actor/loss" in row]
    columns = [ranks, len(rows) if rows else "evaluation"]
    columns.append(largest(rows, "rollout_corr/velocity_diff_max"))
    columns.append(largest(rows, "rollout_corr/logprob_abs_diff_max"))
    columns.append(largest(rows, "actor/ratio_mean", less=1))
    columns.append(largest(rows, "actor/ratio_std"))
    return [*columns, f"{seconds:.0f}"]


def largest(rows, key, less=0):
    """The largest absolute value of a metric, less a number; "-" where there is none."""
    values = [abs(row[key] - less) for row in rows if key in row]
    return f"{max(values):.1e}" if values else "-"


def main(args):
    commands = commands_of_pages() | commands_of_recipes()
    record = args.record.read_text() if args.record.exists() else HEADER
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    os.environ["WANDB_MODE"] = "offline"
    failed = False
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_inputs(folder)
        for name, command in commands.items():
            if f"| `{name}` |" in record or not name.startswith(tuple(args.only)):
                continue
            try:
                columns = run(*command, folder)
            except Exception as error:  # the others are wanted all the same
                print(error, file=sys.stderr)
                failed = True
                continue
            row = " | ".join(map(str, [f"`{name}`", *columns, git.stdout.strip()]))
            print(f"| {row} |", flush=True)
            record += f"| {row} |\n"
            args.record.write_text(record)
    sys.exit(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help=".md")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="pages or models")
    parser.add_argument("--list", action="store_true", help="print the commands alone")
    args = parser.parse_args()
    if args.list:
        print("\n".join(commands_of_pages() | commands_of_recipes()))
    else:
        main(args)
