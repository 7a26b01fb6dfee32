"""Options held against the model, the prompts and the LoRA, before the model is loaded."""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.data import PromptSet
from common.errors import error_prefix, truncate
from common.files import digest_records, load_checkpoint
from common.models import check_schedules, has_two_transformers, pipeline_without_weights
from common.optional import optional_part, require_part
from common.options import EngineArgs, SharedArgs, parse_lr_schedule
from common.process import print_message
from common.rewards import try_rewards
from common.run.inputs import Inputs
from common.scoring import offload_rewards
from common.user_code import code_file
from common.weights import LoRA, check_modules, check_ranks_per_image
from common.workload import Workload

import torch

VLLM_MAX_RANK = 512  # of the ranks that vLLM makes LoRA layers for, the largest


def check_inputs(
    args: SharedArgs,
    inputs: Inputs,
    workload: Workload,
    *,
    schedules: Mapping[str, int],
    guidance_scale: float | None = None,
    kl_guidance_scale: float = 1.0,
    group_size: int = 0,
    given: str = "--pairs",
) -> None:
    """Hold options against the model, the prompts and the LoRA, and try users' own rewards, whose networks then leave
    the GPU to the model that loads next.

    schedules: {option: its number of sampling steps}. guidance_scale: of rollouts; None in a script without guidance.
    kl_guidance_scale: of the reference alone. group_size: images of a prompt that training scores; 0: it scores none.
    given: the option that names `inputs.pairs`.

    Raises:
        ValueError, RunError: in one line: an option or a record's field that cannot have its effect, or a reward that
            fails on a grey image.
    """
    check_ranks_per_image(
        args.ranks_per_image,
        inputs.family,
        model=args.model,
        image_size=args.image_size,
        num_frames=args.num_frames,
        max_sequence_length=args.max_sequence_length,
        # all records have as many (check_sources)
        num_sources=max((len(record.get("image", ())) for record in inputs.eval_set.metadata[:1]), default=0),
        train_with=args.train_with,
        chained_steps=workload.chained_steps,
    )
    check_weights(args, inputs)
    if "compile" in args.train_with:
        check_compiler("--train_with compile")
    if isinstance(args, EngineArgs) and args.rollout == "vllm" and "compile" in args.engine_with:
        check_compiler("--engine_with compile")
    if args.eval_by:
        check_field(inputs.eval_set, args.eval_by)
    check_pictures(args, inputs, given)
    check_edits(inputs)
    check_guidance(args, inputs, guidance_scale, kl_guidance_scale)
    if not args.eval_only:
        trained = inputs.train_set if inputs.pairs is None else prompts_of_pairs(inputs, given)
        report_shared_prompts("--train_prompts" if inputs.pairs is None else given, trained, inputs.eval_set)
    if inputs.checkpoint and not args.eval_only:
        check_updates(args.lr_schedule, load_checkpoint(inputs.checkpoint), workload)
    all_schedules = {"--eval_num_inference_steps": args.eval_num_inference_steps, **schedules}
    sampled = [(option, num_steps, args.image_size) for option, num_steps in all_schedules.items()]
    check_schedules(inputs.family, args.model, sampled, args.num_frames)
    for name, function in inputs.eval_rewards.items():
        if getattr(function, "whole_group", False) and args.eval_images_per_prompt == 1:
            told = "compares the images of a prompt, and --eval_images_per_prompt is 1"
            raise ValueError(f"reward {name} {told}: make more, or set its attribute `relative`")
    check_asked(args, inputs)
    check_curriculum(args, inputs)
    try_own_rewards(args, inputs, group_size)
    offload_rewards(dict(inputs.all_rewards))


def check_guidance(
    args: SharedArgs, inputs: Inputs, guidance_scale: float | None, kl_guidance_scale: float = 1.0
) -> None:
    """Hold the scales of guidance, and the negative prompts that they need, against the script and the model.

    guidance_scale, kl_guidance_scale: as check_inputs has them.

    Raises:
        ValueError: naming an option without effect.
    """
    if guidance_scale is None and args.eval_guidance_scale not in (None, 1):
        raise ValueError(f"--eval_guidance_scale {args.eval_guidance_scale:g}: this script has no guidance")
    largest = max(guidance_scale or 1.0, args.eval_guidance_scale or 1.0, kl_guidance_scale)
    check_negative_prompts(args, inputs, largest)
    if args.guidance_scale_2 is not None:
        given = f"--guidance_scale_2 {args.guidance_scale_2:g}"
        if not has_two_transformers(args.model):
            raise ValueError(f"{given}: {args.model} has one transformer")
        if largest <= 1:
            raise ValueError(f"{given}: needs guidance, a --guidance_scale above 1 in a script that has it")
    if args.eval_guidance_scale:
        with error_prefix("evaluation"):
            inputs.family.check(args.model, *args.image_size, args.num_frames, args.eval_guidance_scale)


def check_curriculum(args: SharedArgs, inputs: Inputs) -> None:
    """Ask --curriculum for weights once, as before the first step. Raises RunError: what it returns is none."""
    if isinstance(args, EngineArgs) and args.curriculum and not args.eval_only:
        scores = torch.full((len(inputs.train_set),), torch.nan, dtype=torch.float64)
        part = optional_part("curriculum", "--curriculum")
        part.ask_curriculum(args.curriculum, 1, inputs.train_set, scores, torch.ones_like(scores))


def try_own_rewards(args: SharedArgs, inputs: Inputs, group_size: int) -> None:
    """Try the rewards of users' files on grey images. Raises RunError: one fails."""
    own = {name.rpartition(":")[2] for name in (*args.reward, *args.eval_reward) if code_file(name)}
    if not own:
        return
    tried = {name: function for name, function in inputs.all_rewards.items() if name in own}
    both = (inputs.eval_set, inputs.train_set)
    prompts = PromptSet([p for part in both for p in part.prompts], [r for part in both for r in part.metadata])
    try_rewards(tried, prompts, args.image_size, args.num_frames, call_sizes(args, inputs, group_size))


def check_weights(args: SharedArgs, inputs: Inputs) -> None:
    """ValueError, RunError: an option of the weights cannot have its effect, or needs what is not there."""
    if inputs.lora is None:
        require_part("weights.shards", "--lora_rank 0")
    if args.prompt_cache is not None:
        require_part("weights.prompt_cache", "--prompt_cache")
    if args.base_weights:
        base_weights = optional_part("weights.base_weights", "--base_weights")
        if importlib.util.find_spec("torchao") is None:
            raise ValueError("--base_weights: needs torchao, which is not installed: pip install torchao==0.18.0")
        base_weights.check_base_weights(
            args.base_weights,
            trains_lora=inputs.lora is not None,
            rollout=args.rollout if isinstance(args, EngineArgs) else "local",
            shard_ranks=args.shard_ranks,
            train_with=args.train_with,
        )
    if args.adam_bits == 8:
        require_part("weights.adam_8bit", "--adam_bits 8")
        check_adam_bits(args.adam_bits, inputs.lora is not None, args.train_with)
        if importlib.util.find_spec("torchao") is None:
            raise ValueError("--adam_bits 8: needs torchao, which is not installed: pip install torchao==0.18.0")
        if torch.cuda.is_available():
            check_compiler("--adam_bits 8")
    check_lora_modules(inputs.lora, vars(args))


def check_adam_bits(adam_bits: int, trains_lora: bool, train_with: Collection[str]) -> None:
    """ValueError, in one line that names the options: what moments of 8 bits are not for."""
    if adam_bits == 8 and trains_lora:
        raise ValueError("--adam_bits 8: is for full weights (--lora_rank 0); a LoRA's moments are small")
    if adam_bits == 8 and "cpu_offload" in train_with:
        raise ValueError("--adam_bits 8: cannot be used with --train_with cpu_offload, which keeps Adam on the CPU")


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
        raise ValueError(f"{option}: needs {missing}; or leave it out")


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
    if args.best_by and not args.eval_only:
        check_best_by(args.best_by, inputs)
    if not (args.eval_only or args.best_by or inputs.rewards.keys() & scored):
        told = "no evaluation scores a --reward; name a metric with --eval_reward and --best_by"
        print_message(f"no best_adapter will be written: {told}")


def check_best_by(best_by: str, inputs: Inputs) -> None:
    """ValueError: the metric is of a held-out file none of whose prompts asks for its reward."""
    files = inputs.eval_set.files
    for file in dict.fromkeys(files):
        prompts = inputs.eval_set.select(row for row, other in enumerate(files) if other == file)
        for name in inputs.eval_rewards:
            if best_by.startswith(f"val/{file}/{name}/") and not prompts.asking(name):
                raise ValueError(f"--best_by {best_by}: no prompt of {file} asks for {name}, so no evaluation logs it")


def check_field(eval_set: PromptSet, field: str) -> None:
    """ValueError: no held-out prompt's record has the field, or one has there neither a string nor a number."""
    off = "; --eval_by None turns it off"
    found = [record.get(field) for record in eval_set.metadata]
    if all(value is None for value in found):
        raise ValueError(f"--eval_by {field}: no record of --eval_prompts has a field of that name{off}")
    for prompt, value in zip(eval_set.prompts, found, strict=True):
        if value is not None and not isinstance(value, str | int | float):
            raise ValueError(f"--eval_by {field}: the record of the prompt {prompt!r} has no text or number there{off}")


def check_pictures(args: SharedArgs, inputs: Inputs, given: str) -> None:
    """ValueError: a record has another number of pictures than the model takes. Reports pictures of another shape.

    given: check_inputs'."""
    prompt_sets = [
        (f"--train_prompts {' '.join(args.train_prompts)}", inputs.train_set),
        (f"--eval_prompts {' '.join(args.eval_prompts)}", inputs.eval_set),
    ]
    if inputs.pairs is not None:
        prompt_sets.append((given, prompts_of_pairs(inputs, given)))
        own = inputs.pairs[int(os.environ.get("RANK", "0")) :: int(os.environ.get("WORLD_SIZE", "1"))]
        images = [image for pair in own for image in pair.images]  # whose headers are read
        optional_part("files.pictures", given).warn_stretched(given, images, args.image_size)
    num_sources = inputs.family.num_sources
    if check_sources(num_sources, prompt_sets) and args.prompt_cache is not None:
        raise ValueError("--prompt_cache: keeps embeddings of texts, and these records have pictures as well")
    if max(num_sources):
        for option, prompts in (("--train_prompts", inputs.train_set), ("--eval_prompts", inputs.eval_set)):
            sources = [source for record in prompts.metadata for source in record.get("image", ())]
            optional_part("files.pictures", option).warn_stretched(option, sources, args.image_size)


def check_edits(inputs: Inputs) -> None:
    """ValueError: a held-out record has no picture that `preservation` can compare with. `read_prompts` has asked the
    rewards that options name."""
    preservation = inputs.eval_rewards.get("preservation")
    if preservation is None or not hasattr(preservation, "check_metadata"):
        return
    for row in inputs.eval_set.asking("preservation"):
        with error_prefix(f"--eval_prompts: the record of {inputs.eval_set.prompts[row]!r}"):
            preservation.check_metadata(inputs.eval_set.metadata[row])


def check_sources(num_sources: tuple[int, int], prompt_sets: Sequence[tuple[str, PromptSet]]) -> int:
    """Compare the pictures of each record with those that the model takes. Returns how many each record has.

    num_sources: the fewest and the most that the model takes. prompt_sets: with the options that named them.

    Raises:
        ValueError: in one line that names the option and the prompt.
    """
    least, most = num_sources
    taken = str(most or "none") if least == most else f"{least} to {most}"
    records = [
        (option, number, prompt, len(metadata.get("image", ())))
        for option, prompts in prompt_sets
        for number, (prompt, metadata) in enumerate(zip(prompts.prompts, prompts.metadata, strict=True), start=1)
    ]
    first = records[0][-1] if records else 0
    for option, number, prompt, count in records:
        pictures = f"{count or 'no'} picture{'s' if count > 1 else ''}"
        found = f'{option}: record {number}, {prompt!r}, has {pictures} ("image")'
        if not least <= count <= most:
            raise ValueError(truncate(f"{found}; the model takes {taken}"))
        if count != first:
            raise ValueError(truncate(f"{found}; the first of all has {first or 'none'}, and each must have as many"))
    return first


def prompts_of_pairs(inputs: Inputs, given: str) -> PromptSet:
    """The prompts of the pairs or records, with the pictures that were edited. given: check_inputs'."""
    return optional_part("pairs", given).pair_prompts(inputs.pairs)


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
    """ValueError: --lora_target_modules beside a --lora_path, whose file says which, or without a LoRA; or a rank that
    vLLM has no LoRA layers for. RunError: the model's transformer lacks one of the modules."""
    if lora and options.get("rollout") == "vllm" and lora.config.r > VLLM_MAX_RANK:
        raise ValueError(
            f"--rollout vllm takes a LoRA of rank {VLLM_MAX_RANK} at most, not {lora.config.r}: pass --rollout local"
        )
    if options["lora_path"] and options["lora_target_modules"]:
        raise ValueError("--lora_target_modules: the file of --lora_path says which modules it adapts")
    if not lora and options["lora_target_modules"]:
        told = "names modules of a LoRA, and --lora_rank 0 trains all weights; without a word it leaves out a record's"
        raise ValueError(f"--lora_target_modules: {told}")
    if lora and options["lora_target_modules"]:
        transformer = pipeline_without_weights(options["model"]).transformer
        check_modules(transformer, lora.config, options["lora_target_modules"])


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
