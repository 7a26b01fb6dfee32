"""What a script loads before its model, held against the options; and the sizes that options leave open."""

import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common.checkpoints import load_checkpoint
from common.data import PromptSet, check_sources, digest_records
from common.distributed import gather_objects
from common.errors import RunError, error_prefix, truncate
from common.images import warn_stretched
from common.models.family import Family
from common.models.loading import check_schedules, pipeline_without_weights
from common.options import ArgsClass, EngineArgs, RatioArgs, SharedArgs, parse_lr_schedule
from common.pairs.pair_files import Pairs, pair_prompts
from common.plan.needs import fit_to_gpus
from common.process import print_message
from common.rewards.preservation import check_metadata, preservation
from common.scoring import Reward, offload_rewards, score_images
from common.user_code import find_namesakes
from common.weights.adapter_files import check_modules
from common.weights.base_weights import check_base_weights
from common.weights.lora import LoRA
from common.workload import Workload

import torch
from PIL import Image

NUM_GREYS = 4  # grey images for a reward that compares images, where nothing says how many a run gives it


class Inputs(NamedTuple):
    """Everything that a script's `prepare` loads before the model."""

    family: type[Family]
    rewards: dict[str, Reward]  # the trained ones, by name
    eval_rewards: dict[str, Reward]  # trained ones that are not relative, --eval_reward's and, for edits, preservation
    train_set: PromptSet
    eval_set: PromptSet
    lora: LoRA | None  # None: full weights
    checkpoint: Path | None  # to resume from
    pairs: Pairs | None = None  # of offline DPO; None: to be made

    @property
    def all_rewards(self) -> dict[str, Reward]:
        """Of training and evaluation."""
        return self.rewards | self.eval_rewards

    def num_drawn(self, num_steps: int, num_per_step: int) -> int:
        """How many prompts, or pairs, have been drawn after num_steps. A resumed run goes on from its checkpoint's
        position, at which other numbers may have been drawn in a step."""
        if not self.checkpoint:
            return num_steps * num_per_step
        state = load_checkpoint(self.checkpoint)
        return state["sampler"]["position"] + max(0, num_steps - state["step"]) * num_per_step

    def drawn_prompts(self, num_steps: int, num_prompts: int, seed: int, negative_prompt: str = "") -> list[str]:
        """The prompts that a run can ask for, which draws num_prompts in each training step: the drawn ones once each,
        the held-out ones, and what guidance moves away from."""
        both = (self.train_set.first_drawn(self.num_drawn(num_steps, num_prompts), seed), self.eval_set)
        return [text for part in both for text in (*part.prompts, *part.negatives(negative_prompt).prompts)]


def check_inputs(
    args: SharedArgs,
    inputs: Inputs,
    workload: Workload,
    *,
    schedules: Mapping[str, int],
    guidance_scale: float | None = None,
    kl_guidance_scale: float = 1.0,
    group_size: int = 0,
) -> Inputs:
    """Hold options against the model, the prompts and the LoRA, and try users' own rewards. Returns the inputs.

    schedules: {option: its number of sampling steps}. guidance_scale: of rollouts; None in a script without guidance.
    kl_guidance_scale: of the reference alone. group_size: images of a prompt that training scores; 0: it scores none.

    An evaluation of edits gets the reward `preservation`, although no option names it: a reward of what was asked for
    does not see what else has changed.

    Raises:
        ValueError, RunError: in one line: an option or a record's field that cannot have its effect, or a reward that
            fails on a grey image.
    """
    options = vars(args)
    if args.base_weights and importlib.util.find_spec("torchao") is None:
        raise ValueError("--base_weights: needs torchao, which is not installed: pip install torchao==0.18.0")
    check_base_weights(
        args.base_weights,
        trains_lora=inputs.lora is not None,
        rollout=options.get("rollout", "local"),
        shard_ranks=args.shard_ranks,
        train_with=args.train_with,
    )
    if "compile" in args.train_with:
        check_compiler("--train_with compile")
    if options.get("rollout") == "vllm" and "compile" in options["engine_with"]:
        check_compiler("--engine_with compile")
    if args.eval_by:
        check_field(inputs.eval_set, args.eval_by)
    check_pictures(args, inputs)
    if guidance_scale is None and args.eval_guidance_scale not in (None, 1):
        raise ValueError(f"--eval_guidance_scale {args.eval_guidance_scale:g}: this script has no guidance")
    check_negative_prompts(args, inputs, max(guidance_scale or 1.0, args.eval_guidance_scale or 1.0, kl_guidance_scale))
    if not args.eval_only:
        trained = inputs.train_set if inputs.pairs is None else pair_prompts(inputs.pairs)
        report_shared_prompts("--train_prompts" if inputs.pairs is None else "--pairs", trained, inputs.eval_set)
    check_lora_modules(inputs.lora, options)
    if inputs.checkpoint and not args.eval_only:
        check_updates(args.lr_schedule, load_checkpoint(inputs.checkpoint), workload)
    all_schedules = {"--eval_num_inference_steps": args.eval_num_inference_steps, **schedules}
    sampled = [(option, num_steps, args.image_size) for option, num_steps in all_schedules.items()]
    check_schedules(inputs.family, args.model, sampled, args.num_frames)
    if args.eval_guidance_scale:
        with error_prefix("evaluation"):
            inputs.family.check(args.model, *args.image_size, args.num_frames, args.eval_guidance_scale)
    if args.num_frames == 1 and any("image" in record for record in inputs.eval_set.metadata):
        asking = inputs.eval_set.asking("preservation")
        for row in asking:
            with error_prefix(f"--eval_prompts: the record of {inputs.eval_set.prompts[row]!r}"):
                check_metadata(inputs.eval_set.metadata[row])
        if asking:
            inputs.eval_rewards.setdefault("preservation", preservation)
    for name, function in inputs.eval_rewards.items():
        if getattr(function, "whole_group", False) and args.eval_images_per_prompt == 1:
            told = "compares the images of a prompt, and --eval_images_per_prompt is 1"
            raise ValueError(f"reward {name} {told}: make more, or set its attribute `relative`")
    check_asked(args, inputs)
    own = {name.rpartition(":")[2] for name in (*args.reward, *args.eval_reward) if ":" in name}
    if own:
        tried = {name: function for name, function in inputs.all_rewards.items() if name in own}
        both = (inputs.eval_set, inputs.train_set)
        prompts = PromptSet([p for part in both for p in part.prompts], [r for part in both for r in part.metadata])
        try_rewards(tried, prompts, args.image_size, args.num_frames, call_sizes(args, inputs, group_size))
    offload_rewards(dict(inputs.all_rewards))  # networks leave the GPU to the model that loads now, if asked
    return inputs


def check_compiler(option: str) -> None:
    """ValueError, in one line that names the option: this machine lacks what torch.compile needs.

    On a CPU that is a C++ compiler; on a GPU Triton, which builds its launchers with a C compiler. Both compile against
    Python's headers.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler  # slow
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton, has_triton_package

    missing = None
    if torch.cuda.is_available():
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        if not has_triton_package():
            missing = "Triton, which is not installed: pip install triton"
        elif not has_triton():
            missing = "a GPU that Triton knows, of compute capability 7.0 or later"
        elif not compiler or not shutil.which(compiler):
            missing = f"a C compiler, and there is no {compiler or 'gcc'} (apt install gcc, or set CC)"
    else:
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            missing = f"a C++ compiler, and there is no {os.environ.get('CXX', 'g++')} (apt install g++, or set CXX)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not missing and not header.exists():
        missing = f"Python's headers, and there is no {header} (apt install python3-dev)"
    if missing:
        raise ValueError(f"{option}: needs {missing}; or leave compile out")


def check_asked(args: SharedArgs, inputs: Inputs) -> None:
    """ValueError: an option names a reward that no prompt asks for. Reports where no evaluation chooses a best one."""
    of_options = [("--reward", "--train_prompts", inputs.rewards, inputs.train_set)]
    watching = {name: f for name, f in inputs.eval_rewards.items() if name not in inputs.rewards}
    of_options.append(("--eval_reward", "--eval_prompts", watching, inputs.eval_set))
    for option, file, rewards, prompts in of_options:
        for name in rewards:
            if len(prompts) and not prompts.asking(name):  # with --pairs there are none to train on
                raise ValueError(f'{option} {name}: no prompt of {file} asks for it in its "rewards"')
    scored = {name for name in inputs.eval_rewards if inputs.eval_set.asking(name)}
    for name in inputs.rewards.keys() - scored:
        if args.best_by and args.best_by.startswith(f"val/{name}/") and not args.eval_only:
            why = "is relative" if name not in inputs.eval_rewards else "is asked for by no held-out prompt"
            raise ValueError(f"--best_by {args.best_by}: {name} {why}, so no evaluation logs it")
    if not (args.eval_only or args.best_by or inputs.rewards.keys() & scored):
        told = "no evaluation scores a --reward; name a metric with --eval_reward and --best_by"
        print_message(f"no best_adapter will be written: {told}")


def check_field(eval_set: PromptSet, field: str) -> None:
    """ValueError: no held-out prompt's record has the field, or one has there neither a string nor a number."""
    off = "; --eval_by None turns it off"
    found = [record.get(field) for record in eval_set.metadata]
    if all(value is None for value in found):
        raise ValueError(f"--eval_by {field}: no record of --eval_prompts has a field of that name{off}")
    for prompt, value in zip(eval_set.prompts, found, strict=True):
        if value is not None and not isinstance(value, str | int | float):
            raise ValueError(f"--eval_by {field}: the record of the prompt {prompt!r} has no text or number there{off}")


def check_pictures(args: SharedArgs, inputs: Inputs) -> None:
    """ValueError: a record has another number of pictures than the model takes. Reports pictures of another shape."""
    prompt_sets = [
        (f"--train_prompts {' '.join(args.train_prompts)}", inputs.train_set),
        (f"--eval_prompts {' '.join(args.eval_prompts)}", inputs.eval_set),
    ]
    if inputs.pairs is not None:
        prompt_sets.append(("--pairs", pair_prompts(inputs.pairs)))
        own = inputs.pairs[int(os.environ.get("RANK", "0")) :: int(os.environ.get("WORLD_SIZE", "1"))]
        images = [image for pair in own for image in (pair.chosen, pair.rejected)]  # whose headers are read
        warn_stretched("--pairs", images, args.image_size)
    num_sources = inputs.family.num_sources
    if check_sources(num_sources, prompt_sets) and args.prompt_cache is not None:
        raise ValueError("--prompt_cache: keeps embeddings of texts, and these records have pictures as well")
    if max(num_sources):
        for option, prompts in (("--train_prompts", inputs.train_set), ("--eval_prompts", inputs.eval_set)):
            sources = [source for record in prompts.metadata for source in record.get("image", ())]
            warn_stretched(option, sources, args.image_size)


def report_shared_prompts(option: str, trained: PromptSet, held_out: PromptSet) -> None:
    """Say how many held-out prompts, with their pictures if they are edits, are trained on as well."""

    def key(prompt: str, record: dict) -> str:
        return digest_records([prompt, record["image"]]) if "image" in record else prompt

    known = {key(*pair) for pair in zip(trained.prompts, trained.metadata, strict=True)}
    shared = [p for p, record in zip(held_out.prompts, held_out.metadata, strict=True) if key(p, record) in known]
    if shared:
        told = f"{len(shared)} of its {len(held_out)} prompts are in {option} as well, {shared[0]!r} for example"
        print_message(truncate(f"--eval_prompts: {told}: evaluations do not show what new prompts would score"))


def check_lora_modules(lora: LoRA | None, options: Mapping[str, Any]) -> None:
    """ValueError: --lora_target_modules beside a --lora_path, whose file says which. RunError: the model's transformer
    lacks one of them."""
    if options["lora_path"] and options["lora_target_modules"]:
        raise ValueError("--lora_target_modules: the file of --lora_path says which modules it adapts")
    if lora and options["lora_target_modules"]:
        check_modules(pipeline_without_weights(options["model"]).transformer, lora.config)


def check_updates(lr_schedule: str, state: Mapping[str, Any], workload: Workload) -> None:
    """ValueError: another number of optimizer steps in a training step than in the checkpoint's run would put
    --lr_schedule, which counts them, out of step with the checkpoint's count."""
    before, now = state["updates_per_step"], workload.updates_per_step
    if before != now and parse_lr_schedule(lr_schedule)[0] != "constant":
        told = f"counts optimizer steps, of which a training step has {now}, and the checkpoint's run had {before}"
        raise ValueError(f"--lr_schedule {lr_schedule}: {told}: keep their number, or pass --lr_schedule constant")


def check_negative_prompts(args: SharedArgs, inputs: Inputs, guidance_scale: float) -> None:
    """ValueError: a negative prompt, of the option or of a record, where guidance takes none or is off.

    guidance_scale: the largest that the run has.
    """
    given = "--negative_prompt" if args.negative_prompt else None
    for option, prompts in (("--train_prompts", inputs.train_set), ("--eval_prompts", inputs.eval_set)):
        for prompt, negative_prompt in zip(prompts.prompts, prompts.negatives("").prompts, strict=True):
            if negative_prompt and not given:
                given = f"{option}: the negative_prompt of {prompt!r}"
    if given and not inputs.family.has_negative_prompt:
        raise ValueError(f"{given}: {inputs.family.__name__}'s guidance takes none")
    if given and guidance_scale <= 1:
        raise ValueError(f"{given}: needs guidance, a --guidance_scale above 1 in a script that has it")


def call_sizes(args: SharedArgs, inputs: Inputs, group_size: int) -> dict[str, list[int]]:
    """The numbers of images of a prompt with which this run calls a reward of whole groups, by reward. group_size:
    check_inputs'."""
    sizes: dict[str, list[int]] = {}
    if group_size and not (args.eval_only or inputs.pairs):  # training calls them
        sizes = {name: [group_size] for name in inputs.rewards if inputs.train_set.asking(name)}
    for name in inputs.eval_rewards:
        if inputs.eval_set.asking(name):
            sizes[name] = list(dict.fromkeys([*sizes.get(name, []), args.eval_images_per_prompt]))
    return sizes


def try_rewards(
    rewards: Mapping[str, Reward],
    prompts: PromptSet,
    image_size: tuple[int, int],
    num_frames: int,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Score a grey image, or video, of the first prompt that asks for it with each of a user's own rewards.

    A reward with `whole_group` gets as many as `sizes` says, once for each number. An exception in the place of a score
    is no fault here: a real image may have what a grey one lacks.

    Raises:
        RunError: in one line with the user's file and line: a reward raised, or did not return a score an image; or it
            has imported a helper of which another user's file has a namesake.
    """
    height, width = image_size

    @functools.cache  # one for each shade, in however many places of the groups
    def grey(shade: int) -> Any:
        image = Image.new("RGB", (width, height), (shade,) * 3)
        return image if num_frames == 1 else [image] * num_frames

    asked = {name: function for name, function in rewards.items() if prompts.asking(name)}
    if asked:
        print_message(f"trying reward {', '.join(asked)} on grey images")
    for name, function in asked.items():
        of_groups = getattr(function, "whole_group", False)
        for count in (sizes or {}).get(name, [NUM_GREYS]) if of_groups else [1]:
            # several shades: where all images are equal, a reward that divides by their deviation would have none
            images = [grey((128 + 20 * i) % 256) for i in range(count)]
            try:
                score_images({name: function}, images, prompts.select(prompts.asking(name)[:1] * count), "mask")
            except RunError as error:
                what = "a grey image" if count == 1 else f"{count} grey images"
                raise RunError(f"tried on {what} before the run: {error}") from error.__cause__
        if namesakes := find_namesakes():
            raise RunError(f"reward {name}: {namesakes}")


def choose_sizes(args: ArgsClass, inputs: Inputs, workload: Workload) -> ArgsClass:
    """The options with what they leave open: the rank and alpha of --lora_path's file and, on GPUs, what fits where
    micro_batch_size or shard_ranks is 0. A collective.

    Raises:
        RunError: --micro_batch_size 0 without a GPU; or ranks have read other prompts.
    """
    for option, prompts in (("train_prompts", inputs.train_set), ("eval_prompts", inputs.eval_set)):
        records = [*zip(prompts.prompts, prompts.metadata, strict=True), prompts.files, prompts.shares]
        if len(set(gather_objects(digest_records(records)))) > 1:
            raise RunError(
                f"--{option}: ranks have read other prompts, or another order: a function must not change it"
            )
    if inputs.lora:
        args = replace(args, lora_rank=inputs.lora.config.r, lora_alpha=inputs.lora.config.lora_alpha)
    if args.micro_batch_size and not torch.cuda.is_available():
        check_batches(args)
        return args
    fitting = fit_to_gpus(inputs.family, inputs.lora, inputs.eval_set, inputs.checkpoint, vars(args), workload)
    args = replace(args, micro_batch_size=fitting["micro_batch_size"], shard_ranks=fitting["shard_ranks"])
    check_batches(args)
    return args


def check_batches(args: SharedArgs) -> None:
    """RunError: --old_log_prob rollout would take log-probs of local batches that are not the update's, once its size
    is final."""
    takes_sampled = isinstance(args, RatioArgs) and args.rollout == "local" and args.old_log_prob == "rollout"
    if isinstance(args, EngineArgs) and takes_sampled and args.rollout_batch_size not in (0, args.micro_batch_size):
        why = f"log-probs of other batches than the update's, of {args.micro_batch_size}, round otherwise"
        raise RunError(f"--rollout_batch_size {args.rollout_batch_size}: {why}: pass --old_log_prob recompute")
