"""The command line of a script: its options, from there, from a file and from a checkpoint, and their checks."""

import math
import os
import sys
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, NoReturn, get_args, get_type_hints

from common.files import source_name
from common.optional import optional_part, require_part
from common.options import ArgsClass, Bound, EngineArgs, RatioArgs, SharedArgs, parse_lr_schedule
from common.process import print_message
from common.weights import check_attention, check_machine

import tyro
from docstring_parser import parse_from_object

# the options that people set first
FIRST = (
    *("name", "model", "image_size", "train_prompts", "eval_prompts", "pairs", "records", "reward", "rollout"),
    *("num_steps", "num_prompts", "group_size", "learning_rate", "eval_every", "resume"),
)
OF_THE_ENGINE = ("engine_devices", "engine_with")


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
        files = optional_part("run.option_files", "--args")
        argv = files.words_of_file(args.args, args_class, argv, trusts_code) + argv
        args = _parse(args_class, argv, {})
    if is_script:
        print_message(f"{args.run_folder}: checking options and files")
    if args.resume:
        is_own = args.resume == "latest" and args.name == own_name  # wherever it lies
        files = optional_part("run.option_files", "--resume")
        args = _parse(args_class, argv, files.options_to_resume(args, argv, is_own or trusts_code))
    if is_script:  # a plan is for another machine
        check_machine(args.attention)
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


# ---- checks ----------------------------------------------------------------------------------------------------------
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
    if (args.stop_if or args.best_by) and not args.eval_only:  # which a run's own rewards may not be scored by
        rules = optional_part("run.stop_rules", "--stop_if" if args.stop_if else "--best_by")
        rules.check_stop_rules(args.stop_if, scored_by, args.eval_images_per_prompt, args.eval_by, args.best_by, files)
    if args.track:
        optional_part("run.tracking", "--track").check_tracker(args.track)
    if args.profile_steps:
        require_part("run.profiling", "--profile_steps")
    if isinstance(args, EngineArgs) and args.rollout == "vllm":
        require_part("engine", "--rollout vllm")
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
    if isinstance(args, EngineArgs) and args.rollout == "local":
        for name in OF_THE_ENGINE:
            if getattr(args, name):
                words = " ".join(map(str, getattr(args, name)))
                told = f"with --rollout local there is no engine; --{name} without a word leaves out a record's"
                raise ValueError(f"--{name} {words}: {told}")
    if isinstance(args, RatioArgs) and args.rollout_correction != "none":
        compares = args.rollout == "vllm" and args.old_log_prob == "recompute"
        if not compares:
            raise ValueError("--rollout_correction: needs --rollout vllm and --old_log_prob recompute")
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        _check_bounds(name, getattr(args, name), _bounds(hint))
    given = f"--ranks_per_image {args.ranks_per_image}"
    if ranks_of_a_node % args.ranks_per_image:
        raise ValueError(f"{given}: does not divide the {ranks_of_a_node} ranks of a node")
    if isinstance(args, EngineArgs) and args.rollout == "vllm" and args.ranks_per_image > 1:
        raise ValueError(f"{given}: needs --rollout local, as an engine samples with the GPUs of its own rank")
    if args.train_shares and len(args.train_shares) != len(args.train_prompts):
        counts = f"{len(args.train_shares)} shares for {len(args.train_prompts)} files of --train_prompts"
        raise ValueError(f"--train_shares: {counts}; give one for each")
    if isinstance(args, EngineArgs) and args.curriculum and (args.train_shares or not args.shuffle):
        other = "--train_shares" if args.train_shares else "--shuffle False"
        raise ValueError(f"--curriculum {args.curriculum}: draws by its own weights: leave out {other}")


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
