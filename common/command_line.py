"""The command line of a script: its options, from there, from a file and from a checkpoint, and their checks."""

import math
import os
import sys
from dataclasses import fields
from typing import get_args, get_type_hints

from common.help import help_text
from common.option_files import defaults_of_checkpoint, words_of_file
from common.options import ArgsClass, Bound, EngineArgs, RatioArgs, SharedArgs
from common.process import print_message
from common.profiling import traced_steps
from common.stop_rules import check_stop_rules
from common.tracking import check_tracker
from common.weights.attention import check_attention

import tyro


def parse_args(args_class: type[ArgsClass], description: str, argv: list[str] | None = None) -> ArgsClass:
    """The options from the command line, within their bounds; the script's first line goes to the screen.

    Those not given come from the file of --args or, with --eval_only or --resume latest, from the checkpoint. --help
    prints the options that people set first, --help_all is tyro's own help of all; both exit.

    Raises:
        ValueError: an option is out of bounds, or there is no good file or checkpoint to take options from.
    """
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(help_text(args_class, description))
        raise SystemExit(0)
    if "--help_all" in argv:
        config = (tyro.conf.FlagConversionOff,)
        tyro.cli(args_class, args=["--help"], description=description, use_underscores=True, config=config)
    known = {field.name: field for field in fields(args_class)}
    argv = words_of_file(argv, known) + argv
    args = _parse(args_class, argv, {})
    print_message(f"{args.run_folder}: checking options and files")
    if args.resume:
        args = _parse(args_class, argv, defaults_of_checkpoint(args))
    check_options(args)
    return args


def _parse(args_class: type[ArgsClass], argv: list[str], defaults: dict) -> ArgsClass:
    """The options from `argv`, with other defaults than the fields' where `defaults` has them, by name."""
    known = {field.name for field in fields(args_class)}
    default = args_class(**{name: value for name, value in defaults.items() if name in known})
    config = (tyro.conf.FlagConversionOff,)
    return tyro.cli(args_class, args=argv, default=default, use_underscores=True, config=config, add_help=False)


# ---- checks ----------------------------------------------------------------------------------------------------------
def check_options(args: SharedArgs) -> None:
    """Hold every option against its bound, and those that belong together against each other.

    Raises:
        ValueError: in one line that names the option, its value and what it must be.
    """
    check_stop_rules(args.stop_if, (*args.reward, *args.eval_reward), args.eval_images_per_prompt, args.eval_by)
    check_tracker(args.track)
    traced_steps(args.profile_steps, num_ranks=int(os.environ.get("WORLD_SIZE", "1")))
    if args.attention != "native":
        check_attention(args.attention, args.model, args.dtype)
    ranks_of_a_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if args.shard_ranks and ranks_of_a_node % args.shard_ranks:
        raise ValueError(f"--shard_ranks {args.shard_ranks}: does not divide the {ranks_of_a_node} ranks of a node")
    name = args.name
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > 200:
        raise ValueError(f"--name {name}: must be the name of one folder, of at most 200 bytes")
    if isinstance(args, EngineArgs) and args.rollout == "vllm" and args.vae_dtype != "float32":
        raise ValueError(f"--vae_dtype {args.vae_dtype}: needs --rollout local; the engine's VAE is float32")
    if isinstance(args, EngineArgs) and args.rollout == "local":
        if args.engine_devices:
            devices = " ".join(map(str, args.engine_devices))
            raise ValueError(f"--engine_devices {devices}: with --rollout local there is no engine")
        if args.engine_tensor_parallel > 1:
            workers = args.engine_tensor_parallel
            raise ValueError(f"--engine_tensor_parallel {workers}: with --rollout local there is no engine")
    if isinstance(args, RatioArgs) and args.rollout_correction != "none":
        compares = args.rollout == "vllm" and args.old_log_prob == "recompute"
        if not compares:
            raise ValueError("--rollout_correction: needs --rollout vllm and --old_log_prob recompute")
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        _check_bounds(name, getattr(args, name), _bounds(hint))
    if args.eval_guidance_scale not in (None, 1) and not hasattr(args, "guidance_scale"):
        raise ValueError(f"--eval_guidance_scale {args.eval_guidance_scale:g}: this script has no guidance")


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
