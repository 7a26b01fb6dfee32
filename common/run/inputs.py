"""What a script loads before its model, and the sizes that options leave open."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common.data import PromptSet
from common.distributed import gather_objects, ranks_per_image
from common.errors import UNREADABLE, RunError, error_prefix
from common.files import digest_records, load_checkpoint, saved_checkpoints
from common.models import Family
from common.optional import optional_part, require_part
from common.options import ArgsClass, EngineArgs, RatioArgs, SharedArgs
from common.process import print_message
from common.scoring import Reward
from common.weights import LoRA
from common.workload import Workload

import torch

# files and folders that only a run leaves in its folder
RESULTS = ("metrics.jsonl", "checkpoints", "adapter", "best_adapter", "samples", "rollouts", "pairs.jsonl", "pairs")
BEGINS_ANEW = "the run begins anew, and so does its log"


class Inputs(NamedTuple):
    """Everything that a script's `prepare` loads before the model."""

    family: type[Family]
    rewards: dict[str, Reward]  # the trained ones, by name
    eval_rewards: dict[str, Reward]  # trained ones that are not relative, --eval_reward's and, for edits, preservation
    train_set: PromptSet
    eval_set: PromptSet
    lora: LoRA | None  # None: full weights
    checkpoint: Path | None  # to resume from
    pairs: list[Any] | None = None  # given pairs or records to train on (common/pairs/); None: there are none

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

    def drawn_prompts(self, num_steps: int, num_prompts: int, seed: int | None, negative_prompt: str = "") -> list[str]:
        """The prompts that a run can ask for, which draws num_prompts in each training step: the drawn ones once each,
        the held-out ones, and what guidance moves away from."""
        both = (self.train_set.first_drawn(self.num_drawn(num_steps, num_prompts), seed), self.eval_set)
        return [text for part in both for text in (*part.prompts, *part.negatives(negative_prompt).prompts)]


def choose_sizes(args: ArgsClass, inputs: Inputs, workload: Workload) -> ArgsClass:
    """The options with what they leave open: the rank and alpha of --lora_path's file and, on GPUs, what fits where
    micro_batch_size or shard_ranks is 0. A collective.

    Raises:
        RunError: --micro_batch_size 0 without a GPU; ranks have read other prompts; or a script does not pass
            --ranks_per_image on.
    """
    for option, prompts in (("train_prompts", inputs.train_set), ("eval_prompts", inputs.eval_set)):
        records = [*zip(prompts.prompts, prompts.metadata, strict=True), prompts.files, prompts.shares]
        if len(set(gather_objects(digest_records(records)))) > 1:
            raise RunError(
                f"--{option}: ranks have read other prompts, or another order: a function must not change it"
            )
    if args.ranks_per_image != ranks_per_image():
        told = "main of this script does not give it to setup_distributed (docs/fork.md)"
        raise RunError(f"--ranks_per_image {args.ranks_per_image}: {told}")
    if inputs.lora:
        args = replace(args, lora_rank=inputs.lora.config.r, lora_alpha=inputs.lora.config.lora_alpha)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    may_copy = torch.cuda.is_available() and inputs.lora and ranks_here > 1 and not args.shard_ranks
    if may_copy or not args.micro_batch_size:
        left_open = "--shard_ranks 0, the default on several GPUs" if args.micro_batch_size else "--micro_batch_size 0"
        plan = optional_part("plan", left_open)
        fitting = plan.fit_to_gpus(inputs.family, inputs.lora, inputs.eval_set, inputs.checkpoint, vars(args), workload)
        args = replace(args, micro_batch_size=fitting["micro_batch_size"], shard_ranks=fitting["shard_ranks"])
    check_batches(args)
    return args


def check_batches(args: SharedArgs) -> None:
    """RunError: --old_log_prob rollout would take log-probs of local batches that are not the update's, once its size
    is final, or because of --max_rollouts."""
    takes_sampled = isinstance(args, RatioArgs) and args.rollout == "local" and args.old_log_prob == "rollout"
    if isinstance(args, EngineArgs) and takes_sampled and args.rollout_batch_size not in (0, args.micro_batch_size):
        why = f"log-probs of other batches than the update's, of {args.micro_batch_size}, round otherwise"
        raise RunError(f"--rollout_batch_size {args.rollout_batch_size}: {why}: pass --old_log_prob recompute")
    if isinstance(args, EngineArgs) and takes_sampled and args.max_rollouts > 1:
        why = "a further rollout samples in other batches than the update, in which log-probs round otherwise"
        raise RunError(f"--max_rollouts {args.max_rollouts}: {why}: pass --old_log_prob recompute")


def checkpoint_to_resume(folder: Path | str, resume: str | None, eval_only: bool = False) -> Path | None:
    """The checkpoint that --resume means, or None: `latest` is the newest of this run, if any; else a file or a run.

    A start from another run that was lost before its first checkpoint may be repeated, and begins anew.

    Raises:
        ValueError: the run's folder holds a run that would be overwritten, or there is no good checkpoint.
    """
    if resume == "latest" and eval_only:
        advice = "let --resume name the run or checkpoint to evaluate"
        raise ValueError(f"--eval_only writes under a new --name: {advice}")
    record = Path(folder) / "args.json"
    began_from = None  # the --resume of a start that trained, and has not saved yet
    if resume and record.is_file() and not saved_checkpoints(folder):
        with error_prefix(record, (*UNREADABLE, KeyError, TypeError)):
            options = json.loads(record.read_text(encoding="utf-8"))["args"]
            began_from = None if options.get("eval_only") else options.get("resume")
    if resume == "latest" and not saved_checkpoints(folder):
        if began_from not in (None, "latest"):  # the run would begin with the model before any training
            advice = f"start it with --resume {began_from} again"
            raise ValueError(f"--resume latest: {folder} has no checkpoint yet: {advice}")
        if (Path(folder) / "metrics.jsonl").exists():
            require_part("run.resuming", "--resume latest")  # which empties the log
            print_message(f"{folder} has no checkpoint yet: {BEGINS_ANEW}")
        return None
    if resume == "latest":
        return optional_part("run.resuming", "--resume").checkpoint_of(folder)
    found = [name for name in RESULTS if (Path(folder) / name).exists()]
    is_repeated = resume is not None and resume == began_from and not eval_only and "adapter" not in found
    if found and is_repeated:
        print_message(f"{folder} has no checkpoint yet: {BEGINS_ANEW}")
    elif found:
        advice = "choose another --name" + ("" if eval_only else ", or continue it with --resume latest")
        raise ValueError(f"{folder} already holds a run: {advice} (found {found[0]})")
    return optional_part("run.resuming", "--resume").checkpoint_of(resume) if resume else None
