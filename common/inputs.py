"""What a script loads before its model, held against the options; and the sizes that options leave open."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from common.choices import check_choices, watched_rewards
from common.data import PromptSet
from common.models.family import Family
from common.options import ArgsClass, SharedArgs
from common.pairs.pair_files import Pairs
from common.plan.needs import fit_to_gpus
from common.scoring import Reward
from common.trial import try_rewards
from common.weights.lora import LoRA

import torch


class Inputs(NamedTuple):
    """Everything that a script's `prepare` loads before the model."""

    family: type[Family]
    rewards: dict[str, Reward]  # the trained ones, by name
    eval_rewards: dict[str, Reward]  # trained ones, --eval_reward's and, for edits, preservation
    train_set: PromptSet
    eval_set: PromptSet
    lora: LoRA | None  # None: full weights
    checkpoint: Path | None  # to resume from
    pairs: Pairs | None = None  # of offline DPO; None: to be made

    def drawn_prompts(self, count: int, seed: int, negative_prompt: str = "") -> list[str]:
        """The prompts that a run of `count` draws can ask for: the drawn ones once each, the held-out ones, and what
        guidance moves away from."""
        both = (self.train_set.first_drawn(count, seed), self.eval_set)
        return [text for part in both for text in (*part.prompts, *part.negatives(negative_prompt).prompts)]


def check_inputs(args: SharedArgs, inputs: Inputs) -> Inputs:
    """Hold options against the model, the prompts and the LoRA, and try users' own rewards. Returns the inputs.

    Raises:
        ValueError, RunError: in one line: an option or a record's field that cannot have its effect, or a reward that
            fails on a grey image.
    """
    check_choices(vars(args), inputs.family, inputs.lora, inputs.train_set, inputs.eval_set, inputs.pairs)
    for name, reward in watched_rewards(inputs.eval_set, args.num_frames).items():
        inputs.eval_rewards.setdefault(name, reward)
    own = {name.rpartition(":")[2] for name in (*args.reward, *args.eval_reward) if ":" in name}
    if own:
        tried = {name: function for name, function in inputs.eval_rewards.items() if name in own}
        try_rewards(tried, inputs.eval_set, args.image_size, args.num_frames)
    return inputs


def choose_sizes(args: ArgsClass, inputs: Inputs) -> ArgsClass:
    """The options with what they leave open: the rank and alpha of --lora_path's file and, on GPUs, what fits where
    micro_batch_size or shard_ranks is 0. A collective.

    Raises:
        RunError: --micro_batch_size 0 without a GPU.
    """
    if inputs.lora:
        args = replace(args, lora_rank=inputs.lora.config.r, lora_alpha=inputs.lora.config.lora_alpha)
    if args.micro_batch_size and not torch.cuda.is_available():
        return args
    fitting = fit_to_gpus(inputs.family, inputs.lora, inputs.eval_set, inputs.checkpoint, vars(args))
    return replace(args, micro_batch_size=fitting["micro_batch_size"], shard_ranks=fitting["shard_ranks"])
