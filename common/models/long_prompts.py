"""Prompts that are longer than a text encoder takes: counted once, in one line, in the place of the libraries' own.

diffusers prints the part that is cut off whenever it encodes, in each rollout and evaluation and on each rank, and with
it the padding of all other prompts of the batch.
"""

import logging
import re
from typing import TYPE_CHECKING

from common.distributed import on_rank_0
from common.process import say

if TYPE_CHECKING:
    import diffusers

TRUNCATED = ("The following part of your input was truncated", "Token indices sequence length is longer")


def count_long_prompts(pipe: "diffusers.DiffusionPipeline", prompts: list[str], max_sequence_length: int) -> None:
    """Say how many of the prompts each tokenizer cuts, and silence the libraries about it.

    CLIP takes as many tokens as its own limit, every other encoder max_sequence_length. Those of a chat template are
    not counted.
    """
    for module in (type(pipe).__module__, "transformers.tokenization_utils_base"):
        logging.getLogger(module).addFilter(is_no_truncation)
    if not on_rank_0():
        return
    distinct = [prompt for prompt in dict.fromkeys(prompts) if prompt]  # "": guidance from no prompt
    cut: dict[str, None] = {}
    for name, tokenizer in sorted(pipe.components.items()):
        if not name.startswith("tokenizer") or tokenizer is None:
            continue
        encoder = re.sub("Tokenizer(Fast)?$", "", type(tokenizer).__name__)
        limit = tokenizer.model_max_length if encoder == "CLIP" else max_sequence_length
        num_cut = sum(len(tokens) > limit for tokens in tokenizer(distinct).input_ids)
        if num_cut:
            cut[f"{num_cut:,} by {encoder} (after {limit} tokens)"] = None  # two encoders may have one tokenizer
    if cut:
        say(f"prompts cut off, of {len(distinct):,}: {', '.join(cut)}; the longest: {max(distinct, key=len)[:60]!r}")


def is_no_truncation(record: logging.LogRecord) -> bool:
    """Whether a library's message is about anything else than a prompt that was cut."""
    return not str(record.msg).startswith(TRUNCATED)
