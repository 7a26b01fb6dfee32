"""A run's model as it begins: the pipeline, its prompts, and the policies on it."""

from collections.abc import Collection, Sequence
from pathlib import Path

from common.models import Family, count_long_prompts, load_model, pin_encoders, report_alike_prompts
from common.optional import optional_part
from common.options import SharedArgs
from common.weights.attention import use_attention
from common.weights.policy import LoRA, add_policies

import torch


def load_policies(
    args: SharedArgs,
    family: type[Family],
    lora: LoRA | None,
    names: Sequence[str],
    prompts: list[str],
    device: torch.device,
    trained: Sequence[str] = ("default",),
    of_base: Collection[str] = (),
) -> Family:
    """The pipeline of --model with the policies `names`, equal at first, before they are sharded.

    names: `default` first, peft's name for the trained one. trained: those that have an optimizer. of_base: those that
    begin as the model itself, also with --lora_path. prompts: those that the run can ask for. Too long ones are
    reported, and so is a model to which several are the same; --prompt_cache is filled with them.
    """
    model = load_model(family, args.model, getattr(torch, args.dtype), device, args.vae_dtype)
    if args.base_weights:
        # add_policies quantises the transformer, under the LoRA
        optional_part("weights.base_weights", "--base_weights").quantise_encoders(model)
    model.guidance_scale_2, model.adam_bits = args.guidance_scale_2, args.adam_bits
    prepare_prompts(model, prompts, args.max_sequence_length, args.prompt_cache)
    add_policies(model, lora, names, args.seed, trained, of_base)
    use_attention(model, args.attention)  # "native" as well, which switches cuDNN's attention off
    return model


def prepare_prompts(model: Family, prompts: list[str], max_sequence_length: int, folder: str | Path | None) -> None:
    """Report the prompts that are too long, and a model to which several are the same. Let the model read those of
    `folder`, unless it is None. A collective."""
    count_long_prompts(model.pipe, prompts, max_sequence_length)
    if folder is None:
        pin_encoders(model)  # which come to the device for each rollout
    else:
        optional_part("weights.prompt_cache", "--prompt_cache").fill_cache(model, prompts, max_sequence_length, folder)
    report_alike_prompts(model, prompts, max_sequence_length)
