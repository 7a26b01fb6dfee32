"""The weights that a run trains: policies, LoRA, how FSDP holds them, and what a checkpoint has of them."""

from common.weights.attention import check_attention, check_machine
from common.weights.lora import LORA_FILES, check_modules, linear_layers, make_lora, save_policy
from common.weights.policy import (
    LoRA,
    acting,
    add_policies,
    choose_adam_kernel,
    follow,
    load_policy_tensors,
    parameters_of,
    policy_tensors,
    whole,
)
from common.weights.sequence import check_ranks_per_image
from common.weights.sharding import reshard, sampling, units_to_shard
from common.weights.start import load_policies
from common.weights.states import load_training_state, training_state

__all__ = [
    "LORA_FILES",
    "LoRA",
    "acting",
    "add_policies",
    "check_attention",
    "check_machine",
    "check_modules",
    "check_ranks_per_image",
    "choose_adam_kernel",
    "follow",
    "linear_layers",
    "load_policies",
    "load_policy_tensors",
    "load_training_state",
    "make_lora",
    "parameters_of",
    "policy_tensors",
    "reshard",
    "sampling",
    "save_policy",
    "training_state",
    "units_to_shard",
    "whole",
]
