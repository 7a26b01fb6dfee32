"""The command line of a script: its options, from there, from a file and from a checkpoint, and their checks."""

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

from common.checkpoints import load_checkpoint, saved_checkpoints
from common.data import source_name
from common.errors import error_prefix
from common.options import ArgsClass, Bound, EngineArgs, RatioArgs, SharedArgs, parse_lr_schedule
from common.process import print_message
from common.recorded_options import check_code, from_record
from common.resuming import EXPECTED_TO_DIFFER, check_format, checkpoint_of
from common.stop_rules import check_stop_rules
from common.tracking import check_tracker
from common.weights.attention import check_attention

import tyro
import yaml
from docstring_parser import parse_from_object

# the options that people set first
FIRST = (
    *("name", "model", "image_size", "train_prompts", "eval_prompts", "pairs", "reward", "rollout"),
    *("num_steps", "num_prompts", "group_size", "learning_rate", "eval_every", "resume"),
)
# recorded as they were fitted to a rank's share of the images, or to its GPU
OF_ITS_RANKS = ("micro_batch_size", "rollout_batch_size", "shard_ranks")
# in a run's args.json, and not to be repeated
OF_ONE_START = ("resume", "eval_only", "args", "trust_code", "reward_settings")


def parse_args(args_class: type[ArgsClass], description: str, argv: list[str] | None = None) -> ArgsClass:
    """The options from the command line, within their bounds; the script's first line goes to the screen.

    Those not given come from the file of --args or, with --resume, from the checkpoint. Code that these name is taken
    without --trust_code only from runs/ of this checkout, and from the run that the command itself names and resumes
    with `latest`. --help prints the options that people set first, --help_all is tyro's own help of all; both exit.

    Raises:
        ValueError: an option is out of bounds, there is no good file or checkpoint to take options from, or it names
            code that is not taken.
    """
    is_script = argv is None  # a caller with words of its own, such as tools.plan, says itself what it does
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print_help(args_class, description)
    if "--help_all" in argv:
        config = (tyro.conf.FlagConversionOff,)
        tyro.cli(args_class, args=["--help"], description=description, use_underscores=True, config=config)
    args = _parse(args_class, argv, {})
    own_name, trusts_code = args.name, args.trust_code  # the command's alone: a file may say what it likes
    if sum(word.partition("=")[0] == "--args" for word in argv) > 1:
        raise ValueError("--args: is given twice; one file has all options that are not on the command line")
    if args.args is not None:
        argv = _words_of_file(args.args, args_class, argv, trusts_code) + argv
        args = _parse(args_class, argv, {})
    if is_script:
        print_message(f"{args.run_folder}: checking options and files")
    if args.resume:
        is_own = args.resume == "latest" and args.name == own_name  # wherever it lies
        checkpoint, state = _state_to_resume(args)
        recorded = _options_of_checkpoint(args, state, argv) if state else {}
        args = _parse(args_class, argv, recorded)
        if state and not args.eval_only:
            check_steps(args, state)
        if not (is_own or trusts_code):
            check_code(recorded, args_class, checkpoint, f"--resume {args.resume}: the checkpoint")
    check_options(args)
    return args


def _parse(args_class: type[ArgsClass], argv: list[str], defaults: dict) -> ArgsClass:
    """The options from `argv`, with other defaults than the fields' where `defaults` has them, by name."""
    known = {field.name for field in fields(args_class)}
    default = args_class(**{name: value for name, value in defaults.items() if name in known})
    config = (tyro.conf.FlagConversionOff,)
    return tyro.cli(args_class, args=argv, default=default, use_underscores=True, config=config, add_help=False)


# ---- help ------------------------------------------------------------------------------------------------------------
def read_docstrings(args_class: type) -> dict[str, str]:
    """{name: docstring} of a dataclass's options, from the source of the class and of its bases."""
    parts = reversed(args_class.__mro__[:-1])
    docstrings = [docstring for part in parts for docstring in parse_from_object(part).params]
    return {docstring.arg_name: " ".join((docstring.description or "").split()) for docstring in docstrings}


def print_help(args_class: type, description: str) -> NoReturn:
    """Print the script's header and tyro's help of the options of FIRST that it has, and exit."""
    hints = get_type_hints(args_class, include_extras=True)
    texts = read_docstrings(args_class)
    defaults = {field.name: field.default for field in fields(args_class)}
    first_ones = [name for name in FIRST if name in defaults]
    shown = [(name, Annotated[hints[name], tyro.conf.arg(help=texts[name])], defaults[name]) for name in first_ones]
    more = f"--help_all shows all {len(defaults)} options."
    first = make_dataclass(args_class.__name__, shown)
    tyro.cli(first, args=["--help"], description=f"{description.strip()}\n\n{more}", use_underscores=True)
    raise SystemExit(0)


# ---- options that are not typed --------------------------------------------------------------------------------------
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


def _given(argv: Sequence[str]) -> set[str]:
    """The names of the options in the words of a command line."""
    return {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")}


def _words_of_file(path: str, args_class: type[SharedArgs], argv: Sequence[str], trusts_code: bool) -> list[str]:
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
            given = {name: value for name, value in given["args"].items() if name not in OF_ONE_START}
        unknown = [str(name) for name in given if name not in hints or name == "args"]
        if unknown:
            raise ValueError(f"no such option: {', '.join(unknown)}; take it out of the file")
        if "trust_code" in given:
            raise ValueError("trust_code: no file can say that it is trusted; pass --trust_code on the command line")
        num_options = len(given)
        given = {name: value for name, value in given.items() if name not in _given(argv)}
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


def _state_to_resume(args: SharedArgs) -> tuple[Path | str, dict[str, Any]]:
    """The checkpoint that --resume names, and what it holds; ("", {}) where `latest` finds none, and starts the run.

    Raises:
        ValueError: there is no good checkpoint.
    """
    is_latest = args.resume == "latest"
    if is_latest and (args.eval_only or not saved_checkpoints(args.run_folder)):
        return "", {}
    checkpoint = checkpoint_of(args.run_folder if is_latest else str(args.resume))
    return checkpoint, load_checkpoint(checkpoint)


def _options_of_checkpoint(args: SharedArgs, state: dict[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """{name: value} of the options that are taken from a checkpoint's state.

    An option that is given in `argv` wins. An evaluation may have other prompts and steps; a run that trains on has all
    of them again, and a new run that starts from a checkpoint writes where its own options say.
    """
    left_out: tuple[str, ...] = ("name", "max_minutes", "stop_if", *OF_ONE_START)
    if args.eval_only:
        left_out = EXPECTED_TO_DIFFER
    else:
        print_message(f"--resume {args.resume}: options that are not given are the checkpoint's")
    if len(state["rng"]) != int(os.environ.get("WORLD_SIZE", "1")):
        left_out += OF_ITS_RANKS
    left_out += tuple(_given(argv))
    recorded = {name: value for name, value in state["args"].items() if name not in left_out}
    with error_prefix(f"--resume {args.resume}"):
        return from_record(recorded, type(args))


# ---- checks ----------------------------------------------------------------------------------------------------------
def check_steps(args: SharedArgs, state: dict[str, Any]) -> None:
    """ValueError: the run would begin behind its last step."""
    if args.resume != "latest" and args.num_steps <= state["step"]:
        told = f"the checkpoint of --resume {args.resume} is of step {state['step']}, from which a new run counts on"
        raise ValueError(f"--num_steps {args.num_steps}: {told}")
    if args.num_steps < state["step"]:
        raise ValueError(f"--num_steps {args.num_steps}: the run has taken {state['step']} already")


def check_options(args: SharedArgs) -> None:
    """Hold every option against its bound, and those that belong together against each other.

    Raises:
        ValueError: in one line that names the option, its value and what it must be.
    """
    parse_lr_schedule(args.lr_schedule)
    for option in ("train_prompts", "eval_prompts"):
        if not getattr(args, option):
            raise ValueError(f"--{option}: needs a file")
    files = [source_name(file) for file in args.eval_prompts] if len(args.eval_prompts) > 1 else []
    for name in files:
        if files.count(name) > 1:
            raise ValueError(f"--eval_prompts: two files are named {name}, and so would be their metrics; rename one")
    scored_by = (*args.reward, *args.eval_reward)
    if not args.eval_only:  # which a run's own rewards may not be scored by
        check_stop_rules(args.stop_if, scored_by, args.eval_images_per_prompt, args.eval_by, args.best_by, files)
    check_tracker(args.track)
    if args.attention != "native":
        check_attention(args.attention, args.model, args.dtype, args.family)
    ranks_of_a_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if args.shard_ranks and ranks_of_a_node % args.shard_ranks:
        raise ValueError(f"--shard_ranks {args.shard_ranks}: does not divide the {ranks_of_a_node} ranks of a node")
    folder = Path(args.name)
    is_whole = folder.is_absolute() or args.name == folder.name
    if not is_whole or folder.name in ("", "..") or "\0" in args.name or len(os.fsencode(folder.name)) > 200:
        raise ValueError(f"--name {args.name}: must be the name of a folder, of at most 200 bytes, or an absolute path")
    if isinstance(args, EngineArgs) and args.rollout == "vllm" and args.vae_dtype != "float32":
        raise ValueError(f"--vae_dtype {args.vae_dtype}: needs --rollout local; the engine's VAE is float32")
    if isinstance(args, EngineArgs) and args.rollout == "local" and args.engine_devices:
        devices = " ".join(map(str, args.engine_devices))
        raise ValueError(f"--engine_devices {devices}: with --rollout local there is no engine")
    if isinstance(args, RatioArgs) and args.rollout_correction != "none":
        compares = args.rollout == "vllm" and args.old_log_prob == "recompute"
        if not compares:
            raise ValueError("--rollout_correction: needs --rollout vllm and --old_log_prob recompute")
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        _check_bounds(name, getattr(args, name), _bounds(hint))
    if args.train_shares and len(args.train_shares) != len(args.train_prompts):
        counts = f"{len(args.train_shares)} shares for {len(args.train_prompts)} files of --train_prompts"
        raise ValueError(f"--train_shares: {counts}; give one for each")


def _check_bounds(name: str, given: tuple | float | None, bounds: list[Bound]) -> None:
    """Raises ValueError where the value of option `name`, or one of its values, is out of bounds."""
    for value in given if isinstance(given, tuple) else (given,):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{name} {value}: must be a finite number")
        for bound in bounds:
            if value is not None and not bound.holds(value):
                raise ValueError(f"--{name} {value}: must be {bound}")


def _bounds(hint: type) -> list[Bound]:
    """The bounds in a type hint, such as that in `PositiveFloat | None`."""
    bounds = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Bound)]
    for part in get_args(hint):
        bounds += _bounds(part)
    return bounds
