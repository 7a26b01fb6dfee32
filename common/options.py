"""The options that all scripts share, and the bounds of an option's value.

An option is a dataclass field with its docstring below it; a comment `# ---- run` begins a group of docs/options.md.
Bounds stand beside the field that they bound, `clip_range: PositiveFloat = 1e-3`; `parse_args` checks them. The type of
an option that names files or code says so, `family: CodeOrName | None = None`: records then have its paths from the
checkout's root, a run keeps its code, and code is not taken from a stranger's record.
"""

import math
import re
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

ASSETS = Path(__file__).parents[1] / "assets"


# ---- bounds ----------------------------------------------------------------------------------------------------------
class Bound(NamedTuple):
    """The limits of an option's value, or of each of its values; a float must also be finite."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def holds(self, value: float) -> bool:
        """Whether `value` is within the limits."""
        return self.at_least <= value <= self.at_most and self.above < value < self.below

    def __str__(self) -> str:
        words = [f"{name.replace('_', ' ')} {limit}" for name, limit in self._asdict().items() if math.isfinite(limit)]
        return " and ".join(words)


PositiveInt = Annotated[int, Bound(at_least=1)]
NonNegativeInt = Annotated[int, Bound(at_least=0)]
PositiveFloat = Annotated[float, Bound(above=0)]
NonNegativeFloat = Annotated[float, Bound(at_least=0)]


# ---- files and code --------------------------------------------------------------------------------------------------
class Names(Flag):
    """What the text of an option may name."""

    FILE = auto()  # a file or folder, also before :NAME or behind NAME=
    CODE = auto()  # path/to/file.py:NAME, which is executed


FileOrName = Annotated[str, Names.FILE]
CodeOrName = Annotated[str, Names.FILE | Names.CODE]


def options_that_name(args_class: type, kind: Names) -> set[str]:
    """The options of a dataclass whose types say that they may name files, or code."""
    hints = get_type_hints(args_class, include_extras=True)
    return {name for name, hint in hints.items() if any(kind in named for named in _marks(hint))}


def _marks(hint: Any) -> list[Names]:  # type hints have no type in common
    own = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Names)]
    return own + [mark for part in get_args(hint) for mark in _marks(part)]


def parse_lr_schedule(text: str) -> tuple[str, int]:
    """The kind of --lr_schedule, and the optimizer steps of its warm-up. ValueError: there is no such schedule."""
    found = re.fullmatch(r"(constant|linear|cosine)(?::([0-9]+))?", text)
    if found is None:
        raise ValueError(f"--lr_schedule {text}: must be constant, linear or cosine, or with a warm-up: linear:100")
    return found[1], int(found[2] or 0)


def lr_factor(schedule: str, k: int, num_updates: int) -> float:
    """The factor of the learning rate, in (0, 1], at the k-th of a run's num_updates optimizer steps; k from 1."""
    kind, num_warmup_steps = parse_lr_schedule(schedule)
    k = k if kind == "constant" else min(k, num_updates)
    if kind == "constant" or k < num_warmup_steps:
        return min(1, k / max(1, num_warmup_steps))
    end = num_updates + 1  # the factor is 0 at the step behind the last one
    if kind == "linear":
        return (end - k) / (end - num_warmup_steps)
    share = (k - num_warmup_steps) / (end - num_warmup_steps)
    return (1 + math.cos(math.pi * share)) / 2


# ---- options ---------------------------------------------------------------------------------------------------------
@dataclass
class SharedArgs:
    """Options of every script, whose own `Args` adds to them.

    It may change a default, or a unit: DPO's micro_batch_size counts pairs.
    """

    # ---- run
    name: str = ""
    """the run's folder is runs/<name>, or an absolute path; it must not hold a run yet, unless you resume it"""
    seed: Annotated[int, Bound(at_least=0, at_most=2**32 - 1)] = 1
    """seed of the data order, the training noise, the windows of SDE steps and the LoRA's initial weights"""
    track: bool | Literal["wandb", "tensorboard"] = False
    """also log metrics and validation images to wandb (True means wandb; files go to WANDB_DIR, if set) or to
    TensorBoard"""
    args: str | None = None
    """read options from this file first, an args.json of this script, or YAML or JSON of names and values; options
    on the command line win over it"""
    resume: str | None = None
    """`latest` resumes this run from its newest checkpoint, or starts the run if there is none; a checkpoint file or a
    run folder starts a new run from that checkpoint, whose steps count. Options that you do not pass are the
    checkpoint's, but for name, max_minutes and stop_if, and on another number of ranks rollout_batch_size and
    shard_ranks; micro_batch_size is lowered there to what divides"""
    trust_code: bool = False
    """take options that are code, such as --reward FILE.py:function, also from a checkpoint of --resume, or a file of
    --args, outside this checkout's runs/ (SECURITY.md); otherwise give them again"""
    keep_checkpoints: PositiveInt = 2
    """how many of the newest checkpoints to keep"""
    max_minutes: NonNegativeFloat = 0.0
    """finish the step, save and exit after this many minutes, as after a signal, also before the first step, while
    prompts are cached or pairs made; 0: no limit"""
    profile_steps: Annotated[tuple[int, ...], Bound(at_least=1)] = ()
    """training steps that rank 0 traces with torch's profiler; trace_STEP.json holds two passes of the update,
    trace_STEP_rollout.json a sampling step, or with an engine the trainer's pass after it"""
    eval_only: bool = False
    """evaluate and exit, under a new --name: the checkpoint of --resume, with its options, or otherwise the model"""

    # ---- model
    model: FileOrName = str(ASSETS / "embedded")
    """diffusers pipeline: a folder or a hub id"""
    family: CodeOrName | None = None
    """your own path/to/file.py:Class that adapts the pipeline (docs/fork.md); None: the family in common/models/"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of frozen weights and forward passes; trained weights, Adam's and the sampling steps' arithmetic, and
    latents are always fp32"""
    vae_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the VAE; bfloat16 needs --rollout local, decodes 1.4 times as fast on an H100, and moves pixels by 0.2
    (embedded model) or 0.9 (random weights of SD3.5's shape) of 255 on average, and by 3 or 12 at most"""
    attention: Literal["native", "cudnn", "flash"] = "native"
    """attention kernel of the transformer, here and in the engine: native (torch chooses among its own, but for
    cuDNN's), cudnn (in torch, bfloat16 on a GPU) or flash (the package flash-attn); not every model takes all three
    (docs/engine.md)"""
    base_weights: Literal["int8", "fp8", "nf4"] | None = None
    """keep a LoRA's base in int8 or fp8 (a byte per weight) or nf4 (half a byte), and text encoders in int8; needs
    --rollout local"""
    train_with: tuple[Literal["activation_checkpointing", "cpu_offload", "gather_blocks", "compile"], ...] = ()
    """activation_checkpointing recomputes activations in the backward pass; cpu_offload keeps weights and Adam on the
    CPU; gather_blocks: where --rollout local (or DPO) samples, ranks that share the weights gather a block at a time in
    every pass, not the whole transformer once, which saves memory; compile compiles every block"""
    shard_ranks: NonNegativeInt = 0
    """ranks that share one copy of the transformer, a shard each; 1: every rank has a copy, which needs more memory and
    gathers no weights. 0: 1 on GPUs where a LoRA's base fits so, otherwise all ranks of a node"""
    ranks_per_image: PositiveInt = 1
    """ranks that compute an image or video together, a part of its tokens each (Ulysses), where one of them does not
    fit on a GPU; needs --rollout local, and FLUX.1, FLUX.2-klein, Qwen-Image or Wan (docs/models.md)"""
    image_size: Annotated[tuple[int, int], Bound(at_least=1)] = (32, 96)
    """height and width of images in pixels"""
    num_frames: PositiveInt = 1
    """frames of a video, for models that make videos (docs/editing_and_video.md); 1 for images"""
    max_sequence_length: PositiveInt = 16
    """tokens per prompt; longer prompts are cut (SD3.5: 256 of T5; others: docs/models.md)"""
    prompt_cache: FileOrName | None = None
    """folder, seen by all ranks, that keeps prompt embeddings: each prompt is encoded once, and the text encoders leave
    the GPU. None: prompts are encoded again in each rollout"""

    # ---- policy
    lora_rank: NonNegativeInt = 16
    """rank of the trained LoRA; 0: no LoRA, all weights are trained (learning rate about 1e-5; embedded model: 1e-4)"""
    lora_alpha: PositiveInt = 32
    """the LoRA is added to the weights with the factor lora_alpha / lora_rank"""
    lora_path: FileOrName | None = None
    """PEFT or diffusers LoRA to start from, with its own rank, alpha and modules; it is also the reference, if there is
    one"""
    lora_target_modules: tuple[str, ...] = ()
    """modules that get a LoRA, by the end of their names; if none are given, the attention projections. all-linear
    means every linear layer. not:NAME leaves out those that end so, or are in it, as in
    `to_q to_k not:blocks.0.attn.to_k`"""

    # ---- data
    train_prompts: tuple[CodeOrName, ...] = (str(ASSETS / "train_prompts.txt"),)
    """prompts to train on: .txt, one per line; .jsonl, .json or .csv, {"prompt": ...} with any metadata for the
    rewards; .parquet, or a folder of its shards; FILE:FIELD for another field, or your own path/to/file.py:function
    (docs/flow_grpo.md); edits also have an "image" (docs/editing_and_video.md)"""
    train_shares: Annotated[tuple[int, ...], Bound(at_least=1)] = ()
    """with several files of train_prompts: the share of each file in the prompts that are drawn, such as 2 1; if none
    are given, all prompts are drawn equally often"""
    shuffle: bool = True
    """draw the prompts, or the pairs of offline DPO, in a new random order in every epoch; False: in the order of their
    file, again and again"""
    eval_prompts: tuple[CodeOrName, ...] = (str(ASSETS / "eval_prompts.txt"),)
    """held-out prompts, files like those of train_prompts; of several, the rewards of each are also logged, as
    val/FILE/REWARD/mean. ocr=FILE asks for this reward alone"""
    negative_prompt: str = ""
    """the text that guidance moves images away from; a prompt's record may have a "negative_prompt" of its own"""
    guidance_scale_2: Annotated[float, Bound(at_least=1)] | None = None
    """guidance at low noise, in a model of two transformers (Wan 2.2 A14B), wherever there is guidance; None: the same
    as at high noise"""

    # ---- reward
    reward: tuple[CodeOrName, ...] = ("ocr",)
    """ocr, ocr_contains (a sign's one line), ocr_scene, ocr_scene_contains (text anywhere), jpeg_compressibility,
    jpeg_incompressibility, preservation (of edits), or your own path/to/file.py:function; file.py:judge.style takes
    the number `style` that judge returns, in the place of its score. pickscore, hpsv2, geneval, clip_score, aesthetic,
    vlm_judge and http_scorer, also as vlm_judge:NAME, find models and servers by variables (docs/rewards.md)"""
    reward_weights: tuple[float, ...] = (1.0,)
    """weight of each reward in their sum, the total. A resumed run with another --reward does not take the
    checkpoint's weights"""
    reward_frames: NonNegativeInt = 0
    """of videos: the score of a built-in reward is the mean over this many frames, evenly spaced; your own rewards get
    the whole video. 0: built-in rewards refuse videos"""
    reward_failure: Literal["stop", "mask"] = "stop"
    """when a reward cannot score an image, for example because a judge's answer holds no number: stop ends the run;
    mask gives the image its group's mean score and advantage 0, and counts it. A lost server always ends the run"""

    # ---- optimization
    num_steps: NonNegativeInt = 30
    """training steps of the run"""
    micro_batch_size: NonNegativeInt = 64
    """images per pass on a rank; 0: what fits on a GPU"""
    lr_schedule: str = "constant"
    """constant, or linear or cosine, by which the learning rate falls to nearly 0 at num_steps (if you resume with more
    steps, it rises again). constant:N, linear:N and cosine:N first let it rise over N optimizer steps"""
    weight_decay: NonNegativeFloat = 1e-4
    """weight decay of AdamW"""
    adam_betas: Annotated[tuple[float, float], Bound(at_least=0, below=1)] = (0.9, 0.999)
    """decays of AdamW's two averages, of gradients and of their squares"""
    adam_eps: PositiveFloat = 1e-15
    """AdamW's epsilon (published codes: 1e-8); a gradient of RMS g, say 5e-9, moves weights by
    learning_rate * g / (g + adam_eps)"""
    adam_bits: Literal[32, 8] = 32
    """bits of each number in AdamW's two averages; 8 takes a quarter of their memory, is for full weights, and needs
    torchao (docs/adapters_and_checkpoints.md)"""
    max_grad_norm: PositiveFloat = 1.0
    """the largest norm of a gradient; a larger gradient is scaled down to it"""
    ema_decay: Annotated[float, Bound(at_least=0, below=1)] = 0.0
    """evaluate, and save for diffusers, an average of the weights with decay min(this, (1 + k) / (10 + k)) after k
    optimizer steps; 0: no average"""

    # ---- evaluation
    eval_every: PositiveInt = 5
    """training steps between evaluations; step 0 and the last step have one as well. A new best one saves its adapter
    in best_adapter/"""
    save_every: NonNegativeInt = 0
    """training steps between checkpoints; the last step and an early stop save one as well. 0: every eval_every"""
    eval_num_inference_steps: PositiveInt = 3
    """sampling steps of an evaluation image, all of them ODE steps (Flow-GRPO's paper: 40)"""
    eval_guidance_scale: Annotated[float, Bound(at_least=1)] | None = None
    """guidance of evaluation images, in scripts that have guidance_scale; None: guidance_scale"""
    max_prompts: NonNegativeInt = 0
    """use only this many held-out prompts, the first ones of each file; 0: all"""
    eval_images_per_prompt: PositiveInt = 1
    """images of each held-out prompt, each from its own fixed seed; their diversity is logged if there are several"""
    eval_by: str | None = None
    """a field of the held-out prompts' records, such as data_source: also log the rewards of each of its values, and of
    `unknown`, the prompts whose records lack it"""
    eval_reward: tuple[CodeOrName, ...] = ()
    """rewards, named as for --reward, that only score evaluations; they are not part of the weighted total"""
    best_by: str | None = None
    """the metric of an evaluation whose highest value chooses best_adapter/, such as val/ocr/mean; None: the weighted
    total of the trained rewards, without those that are `relative` (docs/rewards.md)"""
    stop_if: tuple[str, ...] = ()
    """save and exit after an evaluation that meets one of these, in quotes: 'val/aesthetic/mean<5.2', or with >; that
    of step 0 ends nothing, and one that a resumed run does again ends it a step later"""

    @property
    def run_folder(self) -> Path:
        """The folder of this run."""
        return Path("runs") / self.name

    @property
    def together(self) -> int:
        """--micro_batch_size is a multiple of it."""
        return 1

    @property
    def order_seed(self) -> int | None:
        """The seed of the order in which prompts, or pairs, are drawn; None: the order of their file."""
        return self.seed if self.shuffle else None

    @property
    def evaluated_policy(self) -> str:
        """The policy that is evaluated, and saved for diffusers: the average of the weights, if there is one."""
        return "ema" if self.ema_decay > 0 else "default"  # peft's name for the trained one


@dataclass
class EngineArgs(SharedArgs):
    """The options of the scripts whose images a rollout engine samples."""

    # ---- data
    curriculum: CodeOrName | None = None
    """your own path/to/file.py:function (step, records, scores, weights), which gives the weight of each training
    prompt in the draws of the next step, from what it scored (docs/flow_grpo.md); None: prompts are drawn in epochs"""

    # ---- rollout
    rollout: Literal["vllm", "local"] = "vllm"
    """vllm: a vLLM-Omni engine per rank samples, in a process of its own; local: the training transformer samples"""
    max_rollouts: PositiveInt = 1
    """rollouts of a training step at most: while some prompts' images all score the same, a further rollout makes
    images of other prompts in their place (DAPO's dynamic sampling, docs/flow_grpo.md); 1: they stay, and teach
    nothing"""
    save_rollouts: NonNegativeInt = 0
    """training steps between rollouts whose images are saved with their rewards and advantages; 0: none is saved"""
    rollout_batch_size: NonNegativeInt = 0
    """at most how many images are sampled at once; 0: 32 by the engine, and micro_batch_size with --rollout local"""
    engine_with: tuple[Literal["sleep", "compile"], ...] = ()
    """sleep moves the engine's weights out of GPU memory after each rollout and push, which takes seconds and makes
    room for the update; compile compiles its blocks, which takes a minute or more at the first rollout"""
    engine_devices: Annotated[tuple[int, ...], Bound(at_least=0)] = ()
    """GPUs for the engines alone, by index, after the ranks' own: equally many for each rank of a node, the first
    rank's first. An engine's transformer is split over its GPUs, whose number must divide its heads. If none are given,
    each engine shares its rank's GPU"""


@dataclass
class RatioArgs(EngineArgs):
    """The options of the scripts whose loss compares a step's density with that of the old policy."""

    # ---- rollout
    old_log_prob: Literal["rollout", "recompute"] = "recompute"
    """log-probs that the ratio starts from: the engine's (rollout) or the trainer's (recompute); equal if local, in
    the update's own batches (--rollout_batch_size 0)"""
    rollout_correction: str = "none"
    """sample weights that make up for the engine's mismatch: none, or KIND:THRESHOLD, several joined by commas. The
    kinds are tis, icepop, reject_k1, reject_k2 and reject_k3, each also with _trajectory at its end. A threshold is in
    units of clip_range, or of its square for k2 and k3 (docs/engine.md)"""


ArgsClass = TypeVar("ArgsClass", bound=SharedArgs)
