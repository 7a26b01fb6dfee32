"""Options that are not typed: from --args FILE, and from the checkpoint that a run resumes or evaluates."""

import json
import os
import re
import sys
from dataclasses import MISSING, Field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.checkpoints import load_checkpoint, saved_checkpoints
from common.errors import error_prefix
from common.process import print_message
from common.resuming import EXPECTED_TO_DIFFER, check_format, find_checkpoint, saved_options

if TYPE_CHECKING:
    from common.options import SharedArgs

# what other trainers call our options
OTHER_NAMES = {
    "lr": "learning_rate",
    "max_train_steps": "num_steps",
    "max_steps": "num_steps",
    "train_batch_size": "micro_batch_size",
    "resolution": "image_size",
    "rank": "lora_rank",
    "pretrained_model_name_or_path": "model",
    "output_dir": "name",
    "resume_from_checkpoint": "resume",
    "report_to": "track",
    "gradient_checkpointing": "train_with",
    "num_generations": "group_size",
    "config": "args",
}
# recorded as they were fitted to a rank's share of the images, or to its GPU
OF_ITS_RANKS = ("micro_batch_size", "rollout_batch_size", "shard_ranks")
OF_ONE_START = ("resume", "eval_only", "args", "reward_settings")  # in a run's args.json, and not to be repeated


def suggest(argv: list[str], fields: dict[str, Field]) -> None:
    """ValueError: an option has another trainer's name, and we have one that means it; or it has no value."""
    for word in argv:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word == "--plan":
            raise ValueError("--plan: no such option; `python -m tools.plan --help` plans a run")
        if word.startswith("--") and name not in fields and OTHER_NAMES.get(name) in fields:
            raise ValueError(f"{word}: no such option; here it is --{OTHER_NAMES[name]}")
    for word, following in zip(argv, [*argv[1:], "--"], strict=False):
        name = word.removeprefix("--").replace("-", "_")
        takes_none = name in fields and "..." in str(fields[name].type)  # a list of any length
        if word.startswith("--") and following.startswith("--") and name in fields and not takes_none:
            default = fields[name].default
            example = not default if isinstance(default, bool) else default
            values = " ".join(map(str, example)) if isinstance(example, tuple) else example
            raise ValueError(f"{word}: needs a value" + (f", such as {values}" if values not in (None, "") else ""))


def words_of_file(argv: list[str], fields: dict[str, Field]) -> list[str]:
    """The options in the file of --args, as words of a command line to be put before the given ones, which win.

    Another trainer's name for one of our options is refused first, with ours (`suggest`).

    The file is an args.json, of which a start's own options are left out (--resume ...), or a JSON or YAML file of
    names and values.

    Raises:
        ValueError: naming the file: it cannot be read, has an option that the script has not, or is another version's.
    """
    suggest(argv, fields)
    named = [word.partition("=")[2] for word in argv if word.startswith("--args=")]
    named += [value for word, value in zip(argv, argv[1:], strict=False) if word == "--args"]
    if not named:
        return []
    path = Path(named[-1])
    with error_prefix(f"--args {path}", Exception):  # whatever a YAML library raises
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            import yaml  # slow, and seldom asked for

            given = yaml.safe_load(text)
        else:
            given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("expected names and values")
        if isinstance(given.get("args"), dict):
            script = re.search(r"[^/\s'\"]+\.py\b", given.get("command") or "")
            if script and script[0] != Path(sys.argv[0]).name != "plan.py":
                told = "options such as clip_range may have other units there"
                print_message(f"--args {path}: a run of {script[0]} wrote it; {told}")
            check_format(given, "the file")
            given = {name: value for name, value in given["args"].items() if name not in OF_ONE_START}
        unknown = [name for name in given if name not in fields]
        if unknown:
            raise ValueError(f"no such option: {', '.join(unknown)}; take it out of the file")
    words = []
    for name, value in given.items():
        default = fields[name].default
        values = value if isinstance(value, list) else [value]
        if default is MISSING or value != (list(default) if isinstance(default, tuple) else default):
            words += [f"--{name}", *map(str, values)]
    print_message(f"--args {path}: {len(given)} options; those on the command line win")
    return words


def defaults_of_checkpoint(args: "SharedArgs") -> dict[str, Any]:
    """{name: value} of the checkpoint that --eval_only evaluates or --resume latest resumes; {} where there is none.

    An option that is given wins. An evaluation may have other prompts and steps; a resumed run has all of them again.

    Raises:
        ValueError: there is no good checkpoint to take options from.
    """
    if args.eval_only and args.resume not in (None, "latest"):
        saved = saved_options(str(args.resume))
        return {name: value for name, value in saved.items() if name not in EXPECTED_TO_DIFFER}
    folder = args.run_folder
    if args.resume == "latest" and not args.eval_only and saved_checkpoints(folder):
        print_message("--resume latest: options that are not given are the checkpoint's")
        left_out: tuple[str, ...] = ("name", "max_minutes", "stop_if", *OF_ONE_START)
        saved = saved_options(str(folder))
        newest = find_checkpoint(folder)
        if newest and len(load_checkpoint(newest)["rng"]) != int(os.environ.get("WORLD_SIZE", "1")):
            left_out += OF_ITS_RANKS
        return {name: value for name, value in saved.items() if name not in left_out}
    return {}
