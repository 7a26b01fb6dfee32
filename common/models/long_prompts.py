"""Prompts that are longer than a text encoder takes: counted once, in one line, in the place of the libraries' own.

diffusers prints the part that is cut off in each rollout and evaluation and on each rank, with all prompts' padding.
The count leaves out the template that a pipeline puts around prompts. A line says so where it takes all the tokens, so
that nothing is left of any prompt.
"""

import logging
import math
import re
from typing import TYPE_CHECKING

from common.distributed import on_rank_0
from common.models.family import Family
from common.process import print_message

import torch

if TYPE_CHECKING:
    import diffusers

TRUNCATED = ("The following part of your input was truncated", "Token indices sequence length is longer")
NUM_COMPARED = 8  # prompts


def count_long_prompts(pipe: "diffusers.DiffusionPipeline", prompts: list[str], max_sequence_length: int) -> None:
    """Say how many of the prompts each tokenizer cuts, and silence the libraries about it.

    CLIP takes as many tokens as its limit, others max_sequence_length. Tokens of a chat template are not counted.
    """
    for module in (type(pipe).__module__, "transformers.tokenization_utils_base"):
        logging.getLogger(module).addFilter(is_no_truncation)
    if not on_rank_0():
        return
    distinct = [prompt for prompt in dict.fromkeys(prompts) if prompt]  # "": guidance from no prompt
    cut: dict[str, str] = {}  # the longest prompt, by what to say: two encoders may have one tokenizer
    for name, tokenizer in sorted(pipe.components.items()):
        if not name.startswith("tokenizer") or tokenizer is None:
            continue
        encoder = re.sub("Tokenizer(Fast)?$", "", type(tokenizer).__name__)
        limit = tokenizer.model_max_length if encoder == "CLIP" else max_sequence_length
        lengths = {prompt: len(ids) for prompt, ids in zip(distinct, tokenizer(distinct).input_ids, strict=True)}
        num_cut = sum(length > limit for length in lengths.values())
        if num_cut:
            cut[f"{num_cut:,} by {encoder} (after {limit} tokens)"] = max(distinct, key=lengths.__getitem__)
    if cut:
        longest = next(iter(cut.values()))
        print_message(f"prompts cut off, of {len(distinct):,}: {', '.join(cut)}; the longest starts {longest[:60]!r}")


def report_alike_prompts(model: Family, prompts: list[str], max_sequence_length: int) -> None:
    """Say where prompts are the same to the transformer: NUM_COMPARED of them at most, from the first to the last.

    A model that needs source images is left out, and so is one without a tokenizer.
    """
    has_tokenizer = any(name.startswith("tokenizer") for name in model.pipe.components)
    # a tokenizer may drop case and spaces
    distinct = list({" ".join(prompt.lower().split()): prompt for prompt in prompts if prompt}.values())
    if not has_tokenizer or model.num_sources[0] > 0 or len(distinct) < 2:
        return
    compared = distinct[:: math.ceil(len(distinct) / NUM_COMPARED)]
    conditioning = model.encode_through_cache(compared, max_sequence_length)  # (B, ...) each
    if all(torch.equal(tensor, tensor[:1].expand_as(tensor)) for tensor in conditioning.values()):
        why = "a template or a beginning that they share may take all of --max_sequence_length's tokens"
        print_message(f"{len(compared)} prompts are the same to the model: {why}")


def is_no_truncation(record: logging.LogRecord) -> bool:
    """Whether a library's message is about anything else than a prompt that was cut."""
    return not str(record.msg).startswith(TRUNCATED)
