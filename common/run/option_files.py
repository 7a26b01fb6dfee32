"""Options that are not typed: those of --args's file (JSON, YAML, a run's args.json), and a checkpoint's."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from common.distributed import launched_world_size
from common.errors import error_prefix
from common.files import check_format, load_checkpoint, saved_checkpoints
from common.optional import optional_part
from common.options import SharedArgs
from common.process import print_message
from common.run.recorded_options import as_recorded, check_code, from_record

import yaml

OF_ITS_RANKS = ("rollout_batch_size", "shard_ranks")  # not taken by another number of ranks
# in a run's args.json, and not to be repeated
OF_ONE_START = ("resume", "eval_only", "args", "trust_code", "reward_settings")
OF_THE_LORA = ("lora_rank", "lora_alpha")  # recorded as those of --lora_path's file, whose alpha may be a fraction


def given_options(argv: Sequence[str]) -> set[str]:
    """The names of the options in the words of a command line."""
    return {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")}


# ---- of a file -----------------------------------------------------------------------------------------------------
class _AsWritten(yaml.BaseLoader):
    """YAML whose values are texts as they are written, such as 010 and no, or None. Refuses tags, and a name twice."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind == "null":
            return None
        if kind not in ("str", "seq", "map"):
            raise ValueError(f"line {node.start_mark.line + 1}: has the tag {node.tag}; write the value alone")
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        return _each_once([(self.construct_object(key), self.construct_object(value)) for key, value in node.value])


_AsWritten.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of names and values as a dict. ValueError: a name is given twice, and one value would be lost."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name}: is given twice")
    return dict(pairs)


def words_of_file(path: str, args_class: type[SharedArgs], argv: Sequence[str], trusts_code: bool) -> list[str]:
    """The options in the file of --args, as words of a command line to be put before those of `argv`, which win.

    The file is an args.json, of which a start's own options are left out (--resume ...), or a JSON or YAML file of
    names and values.

    Raises:
        ValueError: naming the file: it cannot be read, has an option that the script has not, is another version's, or
            names code that is not taken.
    """
    hints = get_type_hints(args_class)
    with error_prefix(f"--args {path}", Exception):  # whatever a YAML library raises
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith((".yaml", ".yml")):
            given = yaml.load(text, _AsWritten)
        else:  # numbers as they are written, too
            given = json.loads(text, object_pairs_hook=_each_once, parse_int=str, parse_float=str)
        if not isinstance(given, dict):
            raise ValueError("expected names and values")
        is_record = isinstance(given.get("args"), dict)
        if is_record:
            check_format(given, "the file")
            has_lora = given["args"].get("lora_path") and "lora_path" not in given_options(argv)
            left_out = (*OF_ONE_START, *(OF_THE_LORA if has_lora else ()), *({"guidance_scale"} - hints.keys()))
            given = {name: value for name, value in given["args"].items() if name not in left_out}
        unknown = [str(name) for name in given if name not in hints or name == "args"]
        if unknown:
            raise ValueError(f"no such option: {', '.join(unknown)}; take it out of the file")
        if "trust_code" in given:
            raise ValueError("trust_code: no file can say that it is trusted; pass --trust_code on the command line")
        num_options = len(given)
        given = {name: value for name, value in given.items() if name not in given_options(argv)}
        given = from_record(given, args_class) if is_record else given
        words = [word for name, value in given.items() for word in _words(name, hints[name], value)]
    if not trusts_code:
        check_code(given, args_class, path, f"--args {path}: the file")
    print_message(f"--args {path}: {num_options} options; those on the command line win")
    return words


def _words(name: str, hint: Any, value: Any) -> list[str]:  # whatever a file holds
    """A value in a file as words of a command line. ValueError: the option of this type hint has no such value."""
    is_bool = "bool" in str(hint)
    values = value if isinstance(value, list) and "tuple" in str(hint) else [value]
    words = []
    for item in values:
        is_value = type(None) in get_args(hint) if item is None else is_bool and isinstance(item, bool)
        if not is_value and not isinstance(item, str):
            raise ValueError(f"{name}: {json.dumps(item)} is not a value")
        word = str(item)
        if len(values) > 1 and word.startswith("--"):
            raise ValueError(f"{name}: {word} would be another option")
        words.append(word.capitalize() if is_bool and word in ("true", "false") else word)  # as YAML has them
    if len(words) == 1:
        return [f"--{name}={words[0]}"]  # because a text may begin with a dash
    return [f"--{name}", *words]


# ---- of a checkpoint -------------------------------------------------------------------------------------------------
def options_to_resume(args: SharedArgs, argv: Sequence[str], is_trusted: bool) -> dict[str, Any]:
    """{name: value} of the options that --resume takes from a checkpoint; {} where `latest` finds none.

    is_trusted: whether code that these name is taken wherever the checkpoint lies.

    Raises:
        ValueError: there is no good checkpoint, it is of a step behind --num_steps, or it names code that is not taken.
    """
    checkpoint, state = _state_to_resume(args)
    if not state:
        return {}
    recorded = _options_of_checkpoint(args, state, argv)
    if not args.eval_only:
        check_steps(args.resume, recorded.get("num_steps", args.num_steps), state["step"])
    if not is_trusted:
        check_code(recorded, type(args), checkpoint, f"--resume {args.resume}: the checkpoint")
    return recorded


def _state_to_resume(args: SharedArgs) -> tuple[Path | str, dict[str, Any]]:
    """The checkpoint that --resume names, and what it holds; ("", {}) where `latest` finds none, and starts the run.

    Raises:
        ValueError: there is no good checkpoint.
    """
    is_latest = args.resume == "latest"
    if is_latest and (args.eval_only or not saved_checkpoints(args.run_folder)):
        return "", {}
    resuming = optional_part("run.resuming", "--resume")
    checkpoint = resuming.checkpoint_of(args.run_folder if is_latest else str(args.resume))
    return checkpoint, load_checkpoint(checkpoint)


def _options_of_checkpoint(args: SharedArgs, state: dict[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """{name: value} of the options that are taken from a checkpoint's state.

    An option that is given in `argv` wins. An evaluation may have other prompts and steps; a run that trains on has all
    of them again, and a new run that starts from a checkpoint writes where its own options say. Other rewards in `argv`
    take the place of what belonged to the checkpoint's. On another number of ranks no pass is larger than it was.
    """
    left_out: tuple[str, ...] = ("name", "max_minutes", "stop_if", *OF_ONE_START)
    if args.eval_only:
        left_out = optional_part("run.resuming", "--resume").EXPECTED_TO_DIFFER
    else:
        print_message(f"--resume {args.resume}: options that are not given are the checkpoint's")
    saved = dict(state["args"])
    before, now = len(state["rng"]), launched_world_size()
    if before != now and args.eval_only:  # which cuts no mini-batches
        left_out += ("shard_ranks",)
    elif before != now:
        left_out += OF_ITS_RANKS
        own = {name: value for name, value in saved.items() if name in vars(args).keys() - given_options(argv)}
        together = replace(args, **own).together  # of the options that the run will have
        saved["micro_batch_size"] = fit_to_ranks(state["args"]["micro_batch_size"], before, now, together)
        is_other = saved["micro_batch_size"] != state["args"]["micro_batch_size"]
        if is_other and "micro_batch_size" not in given_options(argv):
            told = "a size that divides in any case: pass another that does"
            print_message(f"{now} ranks in place of {before}: --micro_batch_size {saved['micro_batch_size']}, {told}")
    left_out += tuple(given_options(argv))
    left_out += tuple({"guidance_scale"} - vars(args).keys())  # recorded of a fork that calls its option otherwise
    recorded = {name: value for name, value in saved.items() if name not in left_out}
    if "reward" not in recorded and "reward" in state["args"]:
        trained = as_recorded({"reward": args.reward}, type(args))["reward"]
        recorded = without_rewards(recorded, [*state["args"]["reward"]], [*trained], args.eval_reward)
    with error_prefix(f"--resume {args.resume}"):
        return from_record(recorded, type(args))


def fit_to_ranks(micro_batch_size: int, before: int, now: int, together: int = 1) -> int:
    """A size that divides a rank's share of a mini-batch among `now` ranks, whatever share it divides among `before`.
    Both shares and both sizes are whole numbers of `together` images.

    The new share is the old one times before / now, a / b in lowest terms: b divides the old share, and is cancelled.
    """
    num = micro_batch_size // together
    return together * (num // math.gcd(num, now // math.gcd(before, now)))


def without_rewards(
    recorded: dict[str, Any], replaced: list[str], trained: list[str], watching: Iterable[str]
) -> dict[str, Any]:
    """The options of a checkpoint without what belongs to its rewards, `replaced`, where the command trains on others:
    their weights, those of eval_reward that are now `trained`, and a best_by that nothing is scored by any more.

    watching: the command's own eval_reward.
    """
    if replaced == trained:
        return recorded
    kept = {name: value for name, value in recorded.items() if name != "reward_weights"}
    names = [_metric_name(name) for name in trained]
    watched = [name for name in kept.get("eval_reward", ()) if _metric_name(name) not in names]
    if "eval_reward" in kept:
        kept["eval_reward"] = tuple(watched)
    gone = {*map(_metric_name, replaced)} - {*names, *map(_metric_name, (*watched, *watching))}
    if gone & {*(kept.get("best_by") or "").split("/")[-2:-1]}:  # val/FILE/REWARD/mean: a file may have any name
        del kept["best_by"]
    return kept


def _metric_name(reward: str) -> str:
    """The name under which a reward of an option is logged."""
    return reward.rpartition(":")[2]


def check_steps(resume: str | None, num_steps: int, step: int) -> None:
    """ValueError: a run that resumes from a checkpoint of `step` would begin behind its last step."""
    if resume != "latest" and num_steps <= step:
        told = f"the checkpoint of --resume {resume} is of step {step}, from which a new run counts on"
        raise ValueError(f"--num_steps {num_steps}: {told}")
    if num_steps < step:
        raise ValueError(f"--num_steps {num_steps}: the run has taken {step} already")
