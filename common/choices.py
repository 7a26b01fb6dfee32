"""Options that few runs give, held against the model, the prompts and what is installed, before a model loads."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from common.data import PromptSet, check_sources
from common.eval_by import check_field
from common.images import StoredImage, warn_stretched
from common.models.family import Family
from common.pairs.pair_files import Pair, pair_prompts
from common.process import print_message
from common.rewards.preservation import check_metadata, preservation
from common.scoring import Reward
from common.weights.adapter_files import check_modules, meta_transformer
from common.weights.base_weights import check_base_weights
from common.weights.lora import LoRA


def check_choices(
    options: dict[str, Any],
    family: type[Family],
    lora: LoRA | None,
    train_set: PromptSet,
    eval_set: PromptSet,
    pairs: Sequence[Pair] | None,
) -> None:
    """ValueError or RunError, in one line: an option, or a record's field, that cannot have its effect in this run.

    options: a script's, by name.
    """
    if options.get("base_weights") and importlib.util.find_spec("torchao") is None:
        raise ValueError("--base_weights: needs torchao, which is not installed: pip install torchao==0.18.0")
    check_base_weights(
        options.get("base_weights"),
        trains_lora=lora is not None,
        rollout=options.get("rollout", "local"),
        shard_ranks=options.get("shard_ranks", 1),
        train_with=options.get("train_with", ()),
    )
    if options.get("eval_by"):
        check_field(eval_set, options["eval_by"])
    check_pictures(options, family.num_sources, train_set, eval_set, pairs)
    check_negative_prompts(options, family, train_set, eval_set)
    check_lora_modules(lora, options)
    if options.get("eval_image_size") or options.get("eval_guidance_scale"):
        check_evaluation(family, options)


def check_pictures(
    options: dict[str, Any],
    num_sources: tuple[int, int],
    train_set: PromptSet,
    eval_set: PromptSet,
    pairs: Sequence[Pair] | None,
) -> None:
    """ValueError: a record has another number of pictures than the model takes. Reports pictures of another shape."""
    prompt_sets = [
        (f"--train_prompts {options['train_prompts']}", train_set),
        (f"--eval_prompts {options['eval_prompts']}", eval_set),
    ]
    if pairs is not None:
        prompt_sets.append(("--pairs", pair_prompts(pairs)))
    if check_sources(num_sources, prompt_sets) and options.get("prompt_cache") is not None:
        raise ValueError("--prompt_cache: keeps embeddings of texts, and these records have pictures as well")
    if max(num_sources):
        size = options["image_size"]
        warn_stretched("--train_prompts", sources_of(train_set), size)
        warn_stretched("--eval_prompts", sources_of(eval_set), options.get("eval_image_size") or size)
        num_masks = sum("mask" in record for record in eval_set.metadata)
        if 0 < num_masks < len(eval_set):
            of_all = f"{num_masks} of {len(eval_set)} records have a mask"
            print_message(
                f"--eval_prompts: {of_all}; preservation compares the others as a whole, which gives other scores"
            )


def sources_of(prompts: PromptSet) -> list[StoredImage]:
    """The pictures of all records, one after the other."""
    return [source for record in prompts.metadata for source in record.get("image", ())]


def watched_rewards(eval_set: PromptSet, num_frames: int) -> dict[str, Reward]:
    """What evaluations score although no option names it: `preservation`, for a model that edits images.

    A reward of what was asked for does not see what else has changed. ValueError: a record's mask leaves nothing to
    compare.
    """
    if num_frames > 1 or not any("image" in record for record in eval_set.metadata):  # it does not take videos
        return {}
    for record in eval_set.metadata:
        check_metadata(record)
    return {"preservation": preservation}


def check_lora_modules(lora: LoRA | None, options: dict[str, Any]) -> None:
    """RunError: --lora_target_modules or --lora_exclude_modules name what the model's transformer lacks."""
    if lora and (options.get("lora_target_modules") or options.get("lora_exclude_modules")):
        check_modules(meta_transformer(options["model"]), lora.config)


def check_negative_prompts(
    options: dict[str, Any], family: type[Family], train_set: PromptSet, eval_set: PromptSet
) -> None:
    """ValueError: a negative prompt, of the option or of a record, where guidance takes none or is off."""
    given = "--negative_prompt" if options.get("negative_prompt") else None
    for option, prompts in (("--train_prompts", train_set), ("--eval_prompts", eval_set)):
        for prompt, negative_prompt in zip(prompts.prompts, prompts.negatives("").prompts, strict=True):
            if negative_prompt and not given:
                given = f"{option}: the negative_prompt of {prompt!r}"
    if given and not family.has_negative_prompt:
        raise ValueError(f"{given}: {family.__name__}'s guidance takes none")
    scales = [options.get(name) or 1 for name in ("guidance_scale", "eval_guidance_scale", "kl_guidance_scale")]
    if given and max(scales) <= 1:
        raise ValueError(f"{given}: needs guidance, a --guidance_scale above 1 in a script that has it")


def check_evaluation(family: type[Family], options: dict[str, Any]) -> None:
    """ValueError: the model cannot take the size or guidance of the evaluation, as --eval_image_size ... say."""
    height, width = options["eval_image_size"] or options["image_size"]
    guidance_scale = options["eval_guidance_scale"] or options.get("guidance_scale", 1.0)
    try:
        family.check(options["model"], height, width, options["num_frames"], guidance_scale)
    except ValueError as error:
        raise ValueError(f"evaluation: {error}") from None
