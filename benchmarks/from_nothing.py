"""From random weights to RL: scenes drawn by code, supervised flow matching, RL by a script, the six parts of GenEval.

    python -m benchmarks.from_nothing runs/laptop                        # an hour of two CPU cores
    python -m benchmarks.from_nothing runs/gpu --size gpu                # meant for half an hour of one GPU
    python -m benchmarks.from_nothing runs/gpu --size gpu --parts sft    # some parts alone
    python -m benchmarks.from_nothing runs/try --size tiny               # a few minutes: does it work?

Parts: draw, sft, rl, bench, report. Each begins from what the others left in the folder, and says in a line what it
lacks; the same command goes on after a kill. What is drawn at random at first is the transformer: the VAE and the text
encoders are those of assets/embedded_scenes. The judge is NanoDet by GenEval's rules (docs/lab/scenes.md). README.md in
the folder is the model card of what came out, with the table; report.html has curves and pictures. `gpu`
has not been run.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from assets.make_embedded import MAX_TOKENS
from assets.make_embedded_scenes import make_transformer, write_scenes
from assets.scenes import SIDE
from common.files import atomic_file
from common.run.record import git_state

import torch
import tyro

ROOT = Path(__file__).parents[1]
TRAIN, HELD_OUT = ROOT / "assets" / "scenes_train.jsonl", ROOT / "assets" / "scenes_eval.jsonl"
Part = Literal["draw", "sft", "rl", "bench", "report"]
PARTS: tuple[Part, ...] = get_args(Part)

COMMON = {"max_sequence_length": MAX_TOKENS, "max_prompts": 96}
SFT = {
    "eval_num_inference_steps": 10,
    "lr_schedule": "cosine:100",
    "ema_decay": 0.999,
    "weight_decay": 0.01,
    "caption_dropout": 0.08,
}
RL = {  # as in recipes/embedded_scenes.sh: a LoRA of the layers that see the prompt
    "ema_decay": 0.9,
    "lora_target_modules": (
        *("linear_1", "linear_2", "context_embedder", "norm1_context.linear"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    ),
}
FAST = {"dtype": "bfloat16", "train_with": "compile"}


@dataclass(frozen=True)
class Size:
    """What a size draws, trains and measures; options are those of contrib/sft.py, of the RL script, of tools.bench."""

    transformer: dict[str, int]
    num_scenes: int
    sft: dict[str, Any]
    rl: dict[str, Any]
    images_per_prompt: int = 2
    max_prompts: int = 0


SIZES = {
    "tiny": Size(
        transformer={"layers": 2, "heads": 2, "head_dim": 16},  # a last block has no to_add_out
        num_scenes=24,
        sft={"num_steps": 4, "num_records": 8, "eval_every": 4, "max_prompts": 6},
        rl={"num_steps": 2, "num_prompts": 2, "group_size": 4, "updates_per_rollout": 1, "max_prompts": 6},
        images_per_prompt=1,
        max_prompts=12,
    ),
    "laptop": Size(
        transformer={"layers": 4, "heads": 4, "head_dim": 32},
        num_scenes=20_000,
        sft={"num_steps": 6000, "num_records": 48, "eval_every": 500, "train_with": "compile"},
        rl={"num_steps": 40, "eval_every": 10, "num_prompts": 24, "group_size": 8, "micro_batch_size": 48},
    ),
    "gpu": Size(
        transformer={"layers": 6, "heads": 8, "head_dim": 64},
        num_scenes=20_000,
        sft={"num_steps": 6000, "num_records": 256, "eval_every": 1000, "save_every": 1000, "learning_rate": 5e-4}
        | FAST,
        rl={"num_steps": 150, "eval_every": 25, "group_size": 16, "micro_batch_size": 128} | FAST,
    ),
}


@dataclass
class Args:
    folder: tyro.conf.Positional[Path]
    """where everything is written"""
    model: Path = ROOT / "assets" / "embedded_scenes"
    """pipeline whose VAE and text encoders are taken"""
    size: Literal["tiny", "laptop", "gpu"] = "laptop"
    """how large model, steps and pictures are"""
    script: str = "flow_grpo.py"
    """the script that trains by RL; one with the options of flow_grpo.py's rollout"""
    parts: tuple[Part, ...] = PARTS
    """the parts to do"""
    seed: int = 0
    """seed of the first weights, of the scenes and of both runs"""
    options: tuple[str, ...] = ()
    """further options of the RL script, as NAME=VALUE"""


# ---- parts -----------------------------------------------------------------------------------------------------------
def draw(args: Args, size: Size) -> None:
    """The pipeline with a transformer of random weights, and the scenes."""
    if not args.model.exists():
        raise SystemExit(f"{args.model}: has VAE and text encoders; python -m assets.make_embedded_scenes makes it")
    new = args.folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(args.model, new, ignore=shutil.ignore_patterns("transformer"))
    torch.manual_seed(args.seed)
    transformer = make_transformer(**size.transformer)
    transformer.save_pretrained(new / "transformer")
    millions = sum(weight.numel() for weight in transformer.parameters()) / 1e6
    print(f"a transformer of {millions:.1f} M random weights", flush=True)
    new.rename(args.folder / "random")
    write_scenes(args.folder / "scenes", size.num_scenes, args.seed)


def sft(args: Args, size: Size) -> None:
    """Supervised flow matching of all weights. It leaves the pipeline `base`."""
    run = args.folder / "sft"
    options: dict[str, Any] = {"name": run, "model": args.folder / "random", "image_size": (SIDE, SIDE)}
    options |= {"records": args.folder / "scenes" / "records.jsonl", "cache": args.folder / "cache", "lora_rank": 0}
    options |= {"eval_prompts": HELD_OUT, "reward": "geneval", "seed": args.seed} | COMMON | SFT | size.sft
    options["micro_batch_size"] = options["num_records"]
    resume(run, options)
    start("torch.distributed.run", "--standalone", "-m", "contrib.sft", *as_words(options))
    new = args.folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(args.model, new, ignore=shutil.ignore_patterns("transformer"))
    shutil.copytree(run / "adapter", new / "transformer")
    new.rename(args.folder / "base")


def rl(args: Args, size: Size) -> None:
    """A LoRA on `base` by the script, rewarded by fractions of what a prompt asks for."""
    run = args.folder / "rl"
    options: dict[str, Any] = {"name": run, "model": args.folder / "base", "image_size": (SIDE, SIDE)}
    options |= {"seed": args.seed}
    options |= {"kl_coef": 0.005} if args.script in ("flow_grpo.py", "grpo_guard.py", "mix_grpo.py") else {}
    options |= {"rollout": "local", "train_prompts": TRAIN, "eval_prompts": HELD_OUT}
    options |= {"reward": "geneval.soft", "eval_reward": "geneval"} | COMMON | RL | size.rl
    options |= dict(option.split("=", 1) for option in args.options)
    resume(run, options)
    start("torch.distributed.run", "--standalone", args.script, *as_words(options))


def bench(args: Args, size: Size) -> None:
    """Base and policy on the held-out records, with the same noise."""
    prompts = HELD_OUT
    if size.max_prompts:  # the first have all parts
        lines = HELD_OUT.read_text().splitlines()
        prompts = args.folder / "held_out.jsonl"
        prompts.write_text("\n".join(lines[: size.max_prompts]) + "\n")
    options = {"run": args.folder / "rl", "prompts": prompts, "reward": "geneval", "output": args.folder / "bench"}
    options |= {"images_per_prompt": size.images_per_prompt, "batch_size": 64}
    start("tools.bench", args.folder / "base", *as_words(options))


def report(args: Args, size: Size) -> None:
    """report.html of both runs, and README.md, the model card with the table."""
    start("tools.report", args.folder / "rl", args.folder / "sft", "--output", args.folder / "report.html")
    seconds = json.loads((args.folder / "seconds.json").read_text())
    with atomic_file(args.folder / "README.md") as new:
        new.write_text(card(args, size, seconds, (args.folder / "bench" / "table.md").read_text()))


# ---- around them -----------------------------------------------------------------------------------------------------
# what a part needs of those before it, and what it leaves
NEEDS = {"sft": "scenes/records.jsonl", "rl": "base", "bench": "rl/adapter", "report": "bench/table.md"}
LEAVES = {"draw": "scenes/records.jsonl", "sft": "base", "rl": "rl/adapter"}


def as_words(options: dict[str, Any]) -> list[str]:
    """{"image_size": (128, 128)} as --image_size 128 128."""
    words = []
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def resume(run: Path, options: dict[str, Any]) -> None:
    """Go on with a run that was ended."""
    if (run / "checkpoints").exists():
        options["resume"] = "latest"


def start(module: str, *words: Any) -> None:
    """Run a module of the project, with NanoDet as GenEval's detector."""
    command = [sys.executable, "-m", module, *map(str, words)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"GENEVAL_DETECTOR": "assets/nanodet"})


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t: ")
    return f"{len(os.sched_getaffinity(0))} cores of {name}"


def card(args: Args, size: Size, seconds: dict[str, float], table: str) -> str:
    """The model card: what it is, how it came to be, how long that took, what it scores."""
    command = f"python -m benchmarks.from_nothing {args.folder.name} --size {args.size} --script {args.script}"
    commit, _, _ = git_state(ROOT)
    spent = ", ".join(f"{part} {seconds[part]:.0f}" for part in PARTS if part in seconds)
    return f"""---
license: apache-2.0
pipeline_tag: text-to-image
tags: [flow-matching, reinforcement-learning, cleanflow]
---
# Scenes, from random weights

A Stable Diffusion 3 of toy size that draws one to four of eight kinds of emoji on a ground of {SIDE} px. `base` is
the pipeline after supervised flow matching of a random transformer on scenes that code drew; `rl/adapter` is a LoRA on
it by {args.script}, rewarded by GenEval's rules as fractions. VAE and text encoders come from assets/embedded_scenes,
and were not trained here. The sprites are of Noto Emoji (Apache-2.0).

    {command} --seed {args.seed}

Commit {commit or "unknown"}, {hardware()}. Seconds: {spent}.

GenEval's rules, NanoDet at .3: no published GenEval numbers. Held-out pairs, colours and numbers.

{table}
"""


FUNCTIONS: dict[str, Callable[[Args, Size], None]]
FUNCTIONS = {"draw": draw, "sft": sft, "rl": rl, "bench": bench, "report": report}


def main(args: Args) -> None:
    size = SIZES[args.size]
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    clock = args.folder / "seconds.json"
    for part in [part for part in PARTS if part in args.parts]:
        if part in LEAVES and (args.folder / LEAVES[part]).exists():
            continue
        if part in NEEDS and not (args.folder / NEEDS[part]).exists():
            raise SystemExit(f"{part}: needs {NEEDS[part]} of an earlier part in {args.folder}")
        began = time.time()
        FUNCTIONS[part](args, size)
        seconds = json.loads(clock.read_text()) if clock.exists() else {}
        seconds[part] = seconds.get(part, 0) + time.time() - began
        clock.write_text(json.dumps(seconds))
        print(f"{part}: {seconds[part]:.0f} s", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
