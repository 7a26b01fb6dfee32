"""The commands of README.md, docs/ and recipes/, for three steps on a CPU.

    python benchmarks/run_commands.py docs/lab/records/run_commands.txt                # those that the record lacks
    python benchmarks/run_commands.py docs/lab/records/run_commands.txt --only README.md
    python benchmarks/run_commands.py docs/lab/records/run_commands.txt --only sd35_medium wan21
    python benchmarks/run_commands.py --list

Every option is as it is written, with these substitutions. A published model becomes the tiny random checkpoint of its
family (tests/tiny_models.py), with 8 x 8 pixels per latent; SD3.5's has all of its three kinds of block. At most two
ranks run; a rank makes two images, in one update; there are two evaluation prompts. A video is 96 x 160 x 9: at the
recipes' sizes a command takes an hour. Prompts are made up, my_rewards.py is the quickstart's, my_grpo.py a copy of
flow_grpo.py. A recipe's offline DPO has a reward that tells a random model's images apart. tools.plan gets the
published configs, without substitution. A row per command is appended to the record.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.algorithms.test_contrib import write_teacher
from tests.conftest import ROOT, read_metrics
from tests.published_models import PUBLISHED, recipe_commands, started_by, write_configs
from tests.tiny_models import make_checkpoint

import pyarrow.parquet

NUM_STEPS = 3
IMAGES_PER_RANK = 2
VIDEO = (96, 160, 9)  # height, width and frames
INPUTS = ["--train_prompts", "train.txt", "--eval_prompts", "test.txt"]  # which recipes and presets leave to the reader
OF_EDITS = ["--train_prompts", "edits.jsonl", "--eval_prompts", "edits.jsonl"]
EIGHT_PIXELS = ("stable_diffusion_3", "flux", "flux_kontext", "z_image")  # whose tiny VAEs have 4 x 4 to a latent else
OURS = re.compile(r'(LAUNCH="[^"]*" +)?(bash recipes/|torchrun --standalone |python -m tools\.).*')
HEADER = """# The commands of README.md, docs/ and recipes/, on a CPU

    python benchmarks/run_commands.py docs/lab/records/run_commands.txt

As written, with these substitutions: tiny random checkpoints of the published models' families (SD3.5's has its three
kinds of block), at most two ranks, two images a rank in one update, two evaluation prompts, three steps; videos are
96 x 160 x 9.

- Engine against trainer, the largest of the steps: the relative difference of velocities, |difference of log-probs|.
- Ratio: 1 - its mean, and its deviation, the largest of the steps; each step has one update, so that both are 0 where
  old and new log-probs are of one policy.

| command | ranks | steps | velocities | log-probs | ratio: 1 - mean | deviation | seconds | commit |
|---|---|---|---|---|---|---|---|---|
"""


class Command(NamedTuple):
    """A command that a reader would type."""

    program: str  # SCRIPT.py, or contrib.NAME or tools.NAME
    options: list[str]
    ranks: int = 1


# ---- which commands there are ----------------------------------------------------------------------------------------
def commands_of_pages():
    """{page and command, on one line: Command} of the commands that stand in code blocks.

    Not those that ask a server of rewards, which tests/rewards/test_reward_servers.py runs.
    """
    commands = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                found = OURS.search(line)
                words = shlex.split(found[0], comments=True) if found else []
                command = parse(list(words))
                if command and not {"vlm_judge", "http_scorer"} & set(command.options):
                    commands.setdefault(" ".join([page.name, *words]), command)
    return commands


def parse(words):
    """The Command of a line, or None where it is none of ours."""
    launcher = []
    if words and words[0].startswith("LAUNCH="):
        launcher = words.pop(0).removeprefix("LAUNCH=").split()
        if launcher[:2] != ["python", "-m"]:  # of several nodes
            return None
    if words[:1] == ["bash"] and words[1].startswith("recipes/"):
        started = started_by(ROOT / words[1], *words[2:])
        if launcher:
            return Command(launcher[2], [*launcher[3:], started.script, *started.options])
        return Command(started.script, started.options, started.ranks)
    if words[:2] == ["python", "-m"] and words[2].startswith("tools."):
        return Command(words[2], [word for word in words[3:] if word != "..."])
    if words[:2] != ["torchrun", "--standalone"]:
        return None
    words = words[2:]
    ranks = 1
    if words[0] == "--nproc_per_node":
        ranks = int(words[1])
        words = words[2:]
    if words[0] == "-m":
        words = words[1:]
    return Command(words[0], words[1:], ranks) if re.fullmatch(r"\w+\.py|contrib\.\w+", words[0]) else None


def commands_of_recipes():
    """{recipe and, where it has settings for several, script: Command}; with what a reader adds."""
    commands = {}
    for name, command in recipe_commands().items():
        # a reward that tells a random model's images apart
        reward = "my_rewards.py:motion" if "--num_frames" in command.options else "jpeg_incompressibility"
        inputs = OF_EDITS if any(word in name for word in ("kontext", "edit", "wan21_image")) else INPUTS
        options = ["--reward", reward, *inputs, *command.options]  # the recipe's own reward, if any, wins
        if command.script == "dpo_offline.py":
            options += ["--reward", reward]  # OCR reads nothing in a random model's images: no pairs
        commands[name] = Command(command.script, options, command.ranks)
    return commands


# ---- what they need --------------------------------------------------------------------------------------------------
def write_inputs(folder):
    """The files that the commands name: prompts, the quickstart's reward, a fork, a step kind of docs/fork.md."""
    (folder / "assets").symlink_to(ROOT / "assets")
    shutil.copy(ROOT / "flow_grpo.py", folder / "my_grpo.py")
    prompts = [f'a red sign that says "{number}"' for number in range(100, 108)]
    for name in ("train.txt", "test.txt", "held_out.txt"):
        (folder / name).write_text("\n".join(prompts) + "\n")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "a sign that says \\"{n}\\""}}\n' for n in range(8)))
    of_videos = "\n\ndef motion(videos, prompts, metadata):\n"
    of_videos += "    return redness([video[0] for video in videos], prompts, metadata)\n"
    of_edits = "\n\nasked = redness\n"
    (folder / "my_rewards.py").write_text(
        python_block(ROOT / "docs" / "quickstart_gpu.md", "# my_rewards.py") + of_videos + of_edits
    )
    (folder / "my_steps.py").write_text(python_block(ROOT / "docs" / "fork.md", "# my_steps.py"))
    edit = {"prompt": "make the sign red", "image": str(ROOT / "docs" / "curve.png")}
    for name in ("edits", "train", "test"):
        (folder / f"{name}.jsonl").write_text((json.dumps(edit) + "\n") * 8)
    for number, name in enumerate(("ocr", "colour")):  # teachers of contrib/diffusion_opd.py
        (folder / "runs" / name).mkdir(parents=True)
        write_teacher(folder / "runs" / name / "adapter", number, 16)
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
    blocks = page.read_text().split("```python\n")
    return next(block for block in blocks if block.startswith(first_line)).partition("```")[0]


def tiny_model(model, folder):
    """The folder of the tiny checkpoint that stands for `model`, a hub id or a folder's name; made once.

    A model of the project's stands for itself.
    """
    if (folder / model).is_dir():  # assets/embedded_edit
        return folder / model
    others = {"path/to/sd3-pipeline": "stable_diffusion_3", "/tmp/tiny": "flux"}
    family = PUBLISHED[model][0] if model in PUBLISHED else others[model]
    made = folder / "models" / family
    if not made.exists():
        options = {"vae_factor": 8} if family in EIGHT_PIXELS else {}
        make_checkpoint(family, made, **options)
    return made


def smaller(command, folder):
    """The command, with what this machine has no room for replaced."""
    ranks = min(command.ranks, 2)
    options = list(command.options)
    if "--model" in options:
        place = options.index("--model") + 1
        options[place] = str(tiny_model(options[place], folder))
    if "--num_frames" in options:
        options += ["--image_size", *VIDEO[:2], "--num_frames", VIDEO[2]]
    num_images = ranks * IMAGES_PER_RANK
    options += ["--num_steps", NUM_STEPS, "--max_prompts", 2]
    if command.program == "dpo_offline.py":
        options += ["--num_pairs", num_images, "--num_pair_prompts", num_images, "--group_size", 2]
    else:
        options += ["--num_prompts", ranks, "--group_size", IMAGES_PER_RANK, "--updates_per_rollout", 1]
    return Command(command.program, [*map(str, options)], ranks)


# ---- running them ----------------------------------------------------------------------------------------------------
def start(words, folder):
    """Run a program of the project in the folder, as from the project's root. Returns the seconds it took."""
    began = time.perf_counter()
    paths = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=paths, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{(done.stdout + done.stderr)[-6000:]}")
    return time.perf_counter() - began


def run(command, folder):
    """Run a command. Returns the columns of its row after the first."""
    if command.program.startswith("tools."):
        return run_tool(command, folder)
    ranks, options = command.ranks, command.options
    if "--help" not in options:
        command = smaller(command, folder)
        ranks, options = command.ranks, command.options
    name = command.program.removesuffix(".py").removeprefix("contrib.").replace("my_grpo", "flow_grpo")  # a copy
    if "--name" in options:
        name = options[options.index("--name") + 1]
    run_folder = folder / "runs" / name
    if "--resume" not in options or "--eval_only" in options:  # two pages have the same evaluation
        shutil.rmtree(run_folder, ignore_errors=True)
    script = [str(in_folder(command.program, folder))]
    if command.program.startswith("contrib."):
        script = ["-m", command.program]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    seconds = start([*launcher, *script, *options], folder)
    if "--help" in options:
        return [ranks, "help", "-", "-", "-", "-", f"{seconds:.0f}"]
    rows = [row for row in read_metrics(run_folder) if "actor/loss" in row]
    columns = [ranks, len(rows) if rows else "evaluation"]
    columns.append(largest(rows, "rollout_corr/velocity_diff_max"))
    columns.append(largest(rows, "rollout_corr/logprob_abs_diff_max"))
    columns.append(largest(rows, "actor/ratio_mean", less=1))
    columns.append(largest(rows, "actor/ratio_std"))
    return [*columns, f"{seconds:.0f}"]


def run_tool(command, folder):
    """Run a tool. Returns the columns of its row after the first."""
    options = [str(in_folder(option, folder)) if option.endswith(".py") else option for option in command.options]
    if "--model" in options:
        place = options.index("--model") + 1
        options[place] = str(write_configs(options[place], folder / "configs" / options[place]))
    seconds = start(["-m", command.program, *options], folder)
    return ["-", "tool", "-", "-", "-", "-", f"{seconds:.0f}"]


def in_folder(file, folder):
    """The file in the folder, where it is one of the reader's, else that of the project."""
    return folder / file if (folder / file).exists() else ROOT / file


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
                columns = run(command, folder)
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
    parser.add_argument("record", type=Path, nargs="?", help=".md or .txt")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="pages or models")
    parser.add_argument("--list", action="store_true", help="print the commands alone")
    args = parser.parse_args()
    if args.list:
        print("\n".join(commands_of_pages() | commands_of_recipes()))
    elif args.record is None:
        parser.error("name the record")
    else:
        main(args)
