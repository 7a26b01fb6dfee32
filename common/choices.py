"""Options that few runs give, held against the model, the prompts and what is installed, before a model loads."""

import importlib.util
from typing import TYPE_CHECKING, Any

from common.eval_by import check_field
from common.process import say
from common.source_images import check_sources, say_stretched
from common.weights.adapter_files import check_modules, meta_transformer
from common.weights.base_weights import check_base_weights

if TYPE_CHECKING:
    from common.models.family import Family
    from common.run import Inputs
    from common.weights.lora import LoRA


def check_choices(inputs: "Inputs", options: dict[str, Any]) -> None:
    """ValueError or RunError, in one line: an option, or a record's field, that cannot have its effect in this run.

    Evaluations of a model that edits images get the reward `preservation`, which does not take videos.
    """
    if options.get("base_weights") and importlib.util.find_spec("torchao") is None:
        raise ValueError("--base_weights: needs torchao, which is not installed: pip install torchao==0.18.0")
    check_base_weights(
        options.get("base_weights"),
        trains_lora=inputs.lora is not None,
        rollout=options.get("rollout", "local"),
        shard_ranks=options.get("shard_ranks", 1),
        train_with=options.get("train_with", ()),
    )
    if options.get("eval_by"):
        check_field(inputs.eval_set, options["eval_by"])
    check_pictures(inputs, options)
    check_negative_prompts(inputs, options)
    check_lora_modules(inputs.lora, options)
    if options.get("eval_image_size") or options.get("eval_guidance_scale"):
        check_evaluation(inputs.family, options)
    if "image" in inputs.eval_set.metadata[0] and options["num_frames"] == 1:
        watch_preservation(inputs)


def check_pictures(inputs: "Inputs", options: dict[str, Any]) -> None:
    """ValueError: a record has another number of pictures than the model takes. Reports pictures of another shape."""
    prompt_sets = (
        (f"--train_prompts {options['train_prompts']}", inputs.train_set),
        (f"--eval_prompts {options['eval_prompts']}", inputs.eval_set),
    )
    check_sources(inputs.family, prompt_sets, inputs.pairs, options.get("prompt_cache"))
    if max(inputs.family.num_sources):
        size = options["image_size"]
        say_stretched("--train_prompts", inputs.train_set, size)
        eval_size = options.get("eval_image_size") or size
        say_stretched("--eval_prompts", inputs.eval_set, eval_size)
        num_masks = sum("mask" in record for record in inputs.eval_set.metadata)
        if 0 < num_masks < len(inputs.eval_set):
            of_all = f"{num_masks} of {len(inputs.eval_set)} records have a mask"
            say(f"--eval_prompts: {of_all}; preservation compares the others as a whole, which gives other scores")


def watch_preservation(inputs: "Inputs") -> None:
    """Let evaluations of a model that edits score `preservation` too, unless an option names it: a reward of what was
    asked for does not see what else has changed. ValueError: a record's mask leaves nothing to compare."""
    from common.rewards.preservation import check_metadata, preservation

    for record in inputs.eval_set.metadata:
        check_metadata(record)
    inputs.eval_rewards.setdefault("preservation", preservation)


def check_lora_modules(lora: "LoRA | None", options: dict[str, Any]) -> None:
    """RunError: --lora_target_modules or --lora_exclude_modules name what the model's transformer lacks."""
    if lora and (options.get("lora_target_modules") or options.get("lora_exclude_modules")):
        check_modules(meta_transformer(options["model"]), lora.config, "--lora_target_modules")


def check_negative_prompts(inputs: "Inputs", options: dict[str, Any]) -> None:
    """ValueError: a negative prompt, of the option or of a record, where guidance takes none or is off."""
    given = "--negative_prompt" if options.get("negative_prompt") else None
    for option, prompts in (("--train_prompts", inputs.train_set), ("--eval_prompts", inputs.eval_set)):
        for prompt, negative_prompt in zip(prompts.prompts, prompts.negatives("").prompts, strict=True):
            if negative_prompt and not given:
                given = f"{option}: the negative_prompt of {prompt!r}"
    if given and not inputs.family.has_negative_prompt:
        raise ValueError(f"{given}: {inputs.family.__name__}'s guidance takes none")
    scales = [options.get(name) or 1 for name in ("guidance_scale", "eval_guidance_scale", "kl_guidance_scale")]
    if given and max(scales) <= 1:
        raise ValueError(f"{given}: needs guidance, a --guidance_scale above 1 in a script that has it")


def check_evaluation(family: "type[Family]", options: dict[str, Any]) -> None:
    """ValueError: the model cannot take the size or guidance of the evaluation, as --eval_image_size ... say."""
    height, width = options["eval_image_size"] or options["image_size"]
    guidance_scale = options["eval_guidance_scale"] or options.get("guidance_scale", 1.0)
    try:
        family.check(options["model"], height, width, options["num_frames"], guidance_scale)
    except ValueError as error:
        raise ValueError(f"evaluation: {error}") from None
