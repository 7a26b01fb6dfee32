"""Prompts that are longer than a text encoder takes: counted once, in one line, in the place of the libraries' own.

diffusers prints the part that is cut off in each rollout and evaluation and on each rank, with all prompts' padding.
"""

import logging
import re
from typing import TYPE_CHECKING

from common.distributed import on_rank_0
from common.process import print_message

if TYPE_CHECKING:
    import diffusers

TRUNCATED = ("The following part of your input was truncated", "Token indices sequence length is longer")


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


def is_no_truncation(record: logging.LogRecord) -> bool:
    """Whether a library's message is about anything else than a prompt that was cut."""
    return not str(record.msg).startswith(TRUNCATED)
