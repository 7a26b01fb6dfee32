"""A run's model as it begins: the pipeline, its prompts, and the policies on it."""

from collections.abc import Sequence

from common.models.family import Family
from common.models.loading import load_model
from common.options import SharedArgs
from common.weights.adapter_files import LoRA
from common.weights.attention import use_attention
from common.weights.base_weights import quantise_encoders
from common.weights.policy import add_policies
from common.weights.prompt_cache import prepare_prompts

import torch


def load_policies(
    args: SharedArgs,
    family: type[Family],
    lora: LoRA | None,
    names: Sequence[str],
    prompts: list[str],
    device: torch.device,
) -> Family:
    """The pipeline of --model with the policies `names`, equal at first, before they are sharded.

    names: `default` first, peft's name for the trained one. prompts: those that the run can ask for. Too long ones are
    reported, and so is a model to which several are the same; --prompt_cache is filled with them.
    """
    model = load_model(family, args.model, getattr(torch, args.dtype), device, args.vae_dtype)
    if args.base_weights:
        quantise_encoders(model)  # add_policies quantises the transformer, under the LoRA
    prepare_prompts(model, prompts, args.max_sequence_length, args.prompt_cache)
    add_policies(model, lora, names, args.seed)
    use_attention(model, args.attention)  # "native" as well, which switches cuDNN's attention off
    return model
