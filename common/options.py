"""The options that all five scripts share, what bounds an option, and the command line in titled groups.

An option is a dataclass field with its docstring below it; a comment `# ---- run` begins a group of --help. Bounds
stand beside the field they bound and are checked in one place, `check_options`.
"""

import ast
import inspect
import math
import os
import re
import textwrap
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args, get_type_hints

from common.bounds import Bound, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from common.checkpoints import EXPECTED_TO_DIFFER, saved_options
from common.rewards import reward_settings
from common.stops import say
from common.watch import check_stop_rules, read_stop_rules

import tyro

ASSETS = Path(__file__).parents[1] / "assets"
GROUPS = ("run", "model", "policy", "data", "reward", "rollout", "algorithm", "optimization", "evaluation")


@dataclass
class SharedArgs:
    """Options of the same meaning and default in every script; a script's own `Args` adds to them."""

    # ---- run
    seed: Annotated[int, Bound(at_least=0, at_most=2**32 - 1)] = 1
    """seed of the data order, the noise and the LoRA's initial weights"""
    track: bool = False
    """log to wandb too, with a table of validation images"""
    resume: str | None = None
    """`latest` goes on from this run's newest checkpoint, if any; or the checkpoint or run folder to go on from"""
    keep_checkpoints: PositiveInt = 2
    """keep the newest so many checkpoints"""
    max_minutes: NonNegativeFloat = 0.0
    """finish the step, save and exit after this time, as after SIGTERM or SIGINT; 0: no limit"""
    profile_steps: Annotated[tuple[int, ...], Bound(at_least=0)] = ()
    """steps of which a torch profiler trace is written, trace_STEP.json, large, for chrome://tracing"""
    eval_only: bool = False
    """evaluate and exit, under a new name: the checkpoint of --resume, with the options it has, or the model"""
    plan: Literal["rtx4090", "a100-40", "a100-80", "h100-80", "h200-141", "cpu"] | None = None
    """print what the run would need of memory and time on such devices, load nothing, and exit; with 1, and a line on
    what to change, where it does not fit"""

    # ---- model
    model: str = str(ASSETS / "embedded")
    """diffusers pipeline: a folder or a hub id"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of frozen weights and forward passes; trained weights, Adam, sampling and the VAE are fp32 always"""
    train_with: tuple[Literal["activation_checkpointing", "cpu_offload", "compile"], ...] = ()
    """activation_checkpointing recomputes activations in the backward pass; cpu_offload keeps weights and Adam on the
    CPU; compile compiles every block"""
    shard_ranks: NonNegativeInt = 0
    """ranks that share one copy of the transformer, each a shard of it, at most a node's; 0: all of a node; 1: each has
    a copy, which needs more memory and no gathering of weights"""
    gather_for_sampling: bool = True
    """without an engine, sample with the transformer whole on every rank, gathered once for all images of a rollout
    (DPO: of a prompt); False, and always with cpu_offload: a block at a time in every pass, to save memory"""
    image_size: Annotated[tuple[int, int], Bound(at_least=1)] = (32, 96)
    """height and width of images in pixels"""
    num_frames: PositiveInt = 1
    """frames of a video, of a model that makes videos (docs/models.md); of images 1"""
    max_sequence_length: PositiveInt = 16
    """tokens per prompt, longer ones are cut (SD3.5: 256 of T5; others: docs/models.md)"""
    prompt_cache: str | None = None
    """folder, seen by all ranks, to keep prompt embeddings in, each made once, so that the text encoders leave the GPU
    for the CPU; None: made anew for each rollout"""

    # ---- policy
    lora_rank: NonNegativeInt = 16
    """rank of the trained LoRA; 0: none, all weights are trained (at a learning rate of 1e-5 or so)"""
    lora_alpha: PositiveInt = 32
    """the LoRA acts with weight lora_alpha / lora_rank"""
    lora_path: str | None = None
    """PEFT or diffusers LoRA to start from, with its own rank and modules; it is then the reference, if there is one"""
    lora_target_modules: tuple[str, ...] = ()
    """modules that get a LoRA, by the end of their names; none given: the attention projections"""
    lora_exclude_modules: tuple[str, ...] = ()
    """modules that get no LoRA although they are targets, by the end of their names"""

    # ---- data
    train_prompts: str = str(ASSETS / "train_prompts.txt")
    """prompts to train on: .txt, one a line; .jsonl, {"prompt": ...} with any metadata for the rewards; or .parquet, as
    VeRL-Omni's (docs/flow_grpo.md)"""
    eval_prompts: str = str(ASSETS / "eval_prompts.txt")
    """held-out prompts, sampled at every evaluation: a file like train_prompts"""

    # ---- reward
    reward: tuple[str, ...] = ("ocr",)
    """ocr, ocr_contains (a sign's one line), ocr_scene, ocr_scene_contains (text anywhere), jpeg_compressibility,
    jpeg_incompressibility, path/to/file.py:function; pickscore, clip_score, aesthetic, vlm_judge, http_scorer, which
    find their models and servers by environment variables (docs/rewards.md); several are added"""
    reward_weights: tuple[float, ...] = (1.0,)
    """weight of each reward in the sum"""
    reward_failure: Literal["stop", "mask"] = "stop"
    """where a reward cannot score an image, as a judge whose answer holds no number: end the run, or leave the image
    out of its group and the loss, and count it; a server that is gone ends the run in any case"""

    # ---- optimization
    lr_warmup_steps: NonNegativeInt = 0
    """optimizer steps over which the learning rate rises to learning_rate; it is constant from there"""
    weight_decay: NonNegativeFloat = 1e-4
    """weight decay of AdamW"""
    max_grad_norm: PositiveFloat = 1.0
    """gradient norm above which the gradient is scaled down to it"""
    ema_decay: Annotated[float, Bound(at_least=0, below=1)] = 0.0
    """evaluate, and save for diffusers, an average of the weights, of decay min(this, (1 + k) / (10 + k)) after k
    optimizer steps; 0: none"""

    # ---- evaluation
    eval_every: PositiveInt = 5
    """steps between evaluations and checkpoints; there is one of each at the end, and an evaluation at step 0"""
    eval_num_inference_steps: PositiveInt = 3
    """sampling steps of an evaluation image, all deterministic (Flow-GRPO's paper: 40)"""
    max_prompts: NonNegativeInt = 0
    """use only the first so many held-out prompts; 0: all"""
    eval_images_per_prompt: PositiveInt = 1
    """images of each held-out prompt, each from a fixed seed of its own; of several their diversity is logged"""
    eval_reward: tuple[str, ...] = ()
    """rewards, named as for reward, that score evaluations alone, and are not in the weighted total"""
    stop_if: tuple[str, ...] = ()
    """save and exit after a step whose evaluation meets one of these, in quotes: 'val/aesthetic/mean<5.2', or with >"""


@dataclass
class EngineArgs(SharedArgs):
    """The options of the scripts whose images a rollout engine samples."""

    # ---- rollout
    rollout: Literal["vllm", "local"] = "vllm"
    """who samples: vllm, a vLLM-Omni engine per rank in a process of its own; local, the training transformer"""
    rollout_batch_size: PositiveInt = 32
    """images the vLLM-Omni engine samples at once, at most; local takes micro_batch_size"""
    engine_timeout_s: PositiveFloat = 600
    """seconds to wait for a batch of images of the engine, or another answer, before the run stops with an error"""
    engine_sleep: bool = False
    """the engine's weights leave the GPU after each rollout, which takes seconds, and the update has their memory"""
    engine_devices: Annotated[tuple[int, ...], Bound(at_least=0)] = ()
    """GPUs for the engines alone, --engine_tensor_parallel indices for each rank of a machine, a rank's next to each
    other, behind the ranks' own; none: they share those"""
    engine_tensor_parallel: PositiveInt = 1
    """workers that an engine's transformer is split over, each on a GPU of --engine_devices; must divide its heads"""


def check_options(args):
    """Hold every option against the bound beside its field, the run's name against leaving runs/, and copies of the
    weights against the ranks there are.

    Raises:
        ValueError: in one line that names the option, its value and what it must be.
    """
    rewards = [name.rpartition(":")[2] for name in (*args.reward, *args.eval_reward)]
    check_stop_rules(read_stop_rules(args.stop_if), rewards, args.eval_images_per_prompt)
    ranks_of_a_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if args.shard_ranks and ranks_of_a_node % args.shard_ranks:
        raise ValueError(f"--shard_ranks {args.shard_ranks}: does not divide the {ranks_of_a_node} ranks of a node")
    name = args.name
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > 200:
        raise ValueError(f"--name {name}: must be the name of one folder, of at most 200 bytes")
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        given = getattr(args, name)
        values = given if isinstance(given, tuple) else (given,)
        bounds = _bounds(hint)
        for value in values:
            if value is None:
                continue
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{name} {value}: must be a finite number")
            for bound in bounds:
                if not bound.holds(value):
                    raise ValueError(f"--{name} {value}: must be {bound}")


def _bounds(hint):
    """The bounds of a type hint, those inside of `PositiveFloat | None` too."""
    bounds = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Bound)]
    for part in get_args(hint):
        bounds += _bounds(part)
    return bounds


class Option(NamedTuple):
    """What a field's surroundings in the source say of it."""

    group: str
    help: str


def read_options(args_class):
    """{name: Option} of a dataclass and its bases, from the comments and docstrings of their source."""
    options = {}
    for part in reversed(args_class.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(part))
        lines = source.splitlines()
        body = ast.parse(source).body[0].body
        for statement, docstring in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                titles = re.findall(r"^    # ---- (\w+)$", "\n".join(lines[: statement.lineno]), re.MULTILINE)
                is_docstring = isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
                text = " ".join(docstring.value.value.split()) if is_docstring else ""  # wrapped anew for the screen
                options[statement.target.id] = Option(titles[-1] if titles else "algorithm", text)
    return options


def parse_args(args_class, description, argv=None):
    """An `args_class` from the command line, and the script's first line on the screen.

    With --eval_only an option that is not given is that of the checkpoint of --resume.

    Raises:
        ValueError: there is no good checkpoint to take them from.
    """
    args = _parse(args_class, description, argv, {})
    say(f"runs/{args.name}: checking options and files")
    if args.eval_only and args.resume not in (None, "latest"):
        saved = saved_options(args.resume)
        of_the_model = {name: value for name, value in saved.items() if name not in EXPECTED_TO_DIFFER}
        args = _parse(args_class, description, argv, of_the_model)
    return args


def _parse(args_class, description, argv, defaults):
    """An `args_class` from the command line, whose --help shows its options in titled groups, GROUPS first.

    tyro titles nested dataclasses: one is made for each group, and its fields are handed on to `args_class`. defaults:
    {name: value} of options that have another default than their field's; names that are no options are left out.
    """
    options = read_options(args_class)
    hints = get_type_hints(args_class, include_extras=True)
    titles = dict.fromkeys([*GROUPS, *(option.group for option in options.values())])
    groups = []
    for title in titles:
        members = [f for f in fields(args_class) if options[f.name].group == title]
        columns = []
        for f in members:
            hint = Annotated[hints[f.name], tyro.conf.arg(help=options[f.name].help)]
            columns.append((f.name, hint, field(default=defaults.get(f.name, f.default))))
        if columns:
            group = make_dataclass(title, columns)
            groups.append((title, group, field(default_factory=group)))
    parsed = tyro.cli(
        make_dataclass("Options", groups),
        description=description,
        args=argv,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.OmitArgPrefixes),
    )
    values = {}
    for group in fields(parsed):
        values |= vars(getattr(parsed, group.name))
    return args_class(**values)


def recorded(args):
    """asdict(args) and, as `reward_settings`, the environment variables that the scores of its rewards depend on."""
    return asdict(args) | {"reward_settings": reward_settings([*args.reward, *args.eval_reward])}
