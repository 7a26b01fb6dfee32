"""The policies of a run on one base model, which of them acts, and their tensors.

`default`, peft's name, is the trained policy. The others are `ema` (its average), `old` (which follows it) and
`reference` (which stays as it is). With a LoRA every policy is an adapter of the one transformer, and the base model is
that transformer with all adapters off. With full weights every policy is a transformer of its own.
"""

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from common.distributed import failing_together, on_rank_0, set_seed
from common.errors import NothingBegun, RunError
from common.models import Family
from common.optional import optional_part
from common.weights.lora_linear import fuse_lora
from common.weights.norms import fuse_norms
from common.weights.sharding import reshard, reshard_before_steps

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from peft import LoraConfig


Optimizers = Mapping[str, torch.optim.Optimizer]  # of trained policies, by name, `default` among them


class LoRA(NamedTuple):
    """A LoRA to train."""

    config: "LoraConfig"
    tensors: dict[str, torch.Tensor] | None  # to start from; None: new ones are drawn
    base_weights: str | None = None  # the option: how the weights under it are kept


def add_policies(
    model: Family,
    lora: LoRA | None,
    names: Sequence[str],
    seed: int,
    trained: Sequence[str] = ("default",),
    of_base: Collection[str] = (),
) -> None:
    """Give `model` the policies `names`, equal at first; `default` is the first of them. The `trained` ones take a
    gradient where they act. Those `of_base` begin as the base model, also where the LoRA has tensors to start from.

    lora: make_lora's value; None: full weights. seed: of the global generators, and so of a new LoRA's weights, which
    every rank draws alike. A new LoRA needs no `reference`, which is the base model. A LoRA is fp32. Full weights that
    are trained or averaged become fp32 in `shard` of the scripts, block by block; a reference keeps its dtype.
    """
    set_seed(seed)
    model.trained = frozenset(trained)
    fuse_norms(model.transformer)
    model.is_lora = lora is not None
    if lora and lora.base_weights:
        optional_part("weights.base_weights", "--base_weights").quantise(model, lora.base_weights)
    if lora:
        _add_adapters(model, lora.config, lora.tensors, names, of_base)
    else:
        _copy_transformer(model, names)
    use_policy(model, "default")
    model.num_updates = 0
    reshard_before_steps(model)


def _copy_transformer(model: Family, names: Sequence[str]) -> None:
    """Give each policy a transformer; `default` has the pipeline's own. The others share its memory until they are
    sharded. Sharding copies, so that a rank never holds two whole models."""
    transformer = model.transformer
    model.policies = {}
    for name in names:
        model.policies[name] = transformer
        if name != "default":
            trains = name in model.trained
            shared = {id(p): torch.nn.Parameter(p.data, requires_grad=trains) for p in transformer.parameters()}
            model.policies[name] = copy.deepcopy(transformer, shared)


def _add_adapters(
    model: Family,
    lora_config: "LoraConfig",
    lora_tensors: dict[str, torch.Tensor] | None,
    names: Sequence[str],
    of_base: Collection[str],
) -> None:
    """Give each policy an adapter of the one transformer: a new one or, where they are given, the `lora_tensors`. A new
    adapter changes nothing, so that policies `of_base` keep theirs."""
    from peft import set_peft_model_state_dict

    transformer = model.transformer
    is_new = lora_tensors is None
    if is_new or "reference" in of_base:
        names = [name for name in names if name != "reference"]
    warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters, on purpose
    for name in names:
        transformer.add_adapter(lora_config, adapter_name=name)
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()  # before a file's numbers come
    if not is_new:
        found = set_peft_model_state_dict(transformer, lora_tensors, adapter_name="default")
        if found.unexpected_keys:
            key = found.unexpected_keys[0]
            raise RunError(f"--lora_path: {type(transformer).__name__} has no module for {key}")
    fuse_lora(transformer)
    model.policies = dict.fromkeys(names, transformer)
    for name in names:
        if name != "default" and (is_new or name not in of_base):
            _move(model, name, 0.0)


def use_policy(model: Family, name: str) -> None:
    """Let policy `name` act in `model.transformer`; only trained ones ever require a gradient. Random states stay.

    `reference` is the base model where the policies are LoRAs without one of that name.
    """
    if model.is_lora:
        if name in model.policies:
            model.transformer.enable_adapters()
            model.transformer.set_adapter(name)
        else:
            model.transformer.disable_adapters()
        for key, parameter in model.transformer.named_parameters():
            # peft makes the acting one trainable instead
            parameter.requires_grad_(any(f".{policy}." in key for policy in model.trained))
    else:
        model.transformer = model.policies[name]
        model.transformer.requires_grad_(name in model.trained)


class Engine(Protocol):
    """As much of a rollout engine as `acting` needs."""

    def push(self, tensors: Mapping[str, torch.Tensor], config: "LoraConfig | None") -> object:
        """Let the engine sample by these weights: a LoRA's, or all of them (None)."""


@contextmanager
def acting(model: Family, name: str, engine: Engine | None = None, in_engine: str = "default") -> Iterator[None]:
    """Let policy `name` act within the block, and `default` again after it, also where the block fails.

    Where an engine is given, `name` is pushed to it for the block. The engine holds the policy `in_engine` before the
    block, and gets it back after the block unless that fails.

    Raises:
        RolloutError: the engine failed on a rank at a LoRA. All can save.
        EngineError: at full weights, on this rank. Others may be waiting for its shards, in the midst of their push.
    """
    together = failing_together if model.is_lora else nullcontext
    use_policy(model, name)
    try:
        if engine and name != in_engine:
            with together():
                engine.push(*policy_tensors(model, name))
        yield
    finally:
        use_policy(model, "default")
    if engine and name != in_engine:
        with together():
            engine.push(*policy_tensors(model, in_engine))


def parameters_of(model: Family, name: str) -> list[torch.nn.Parameter]:
    """The parameters of policy `name`, which is trained: for its optimizer."""
    parameters = model.policies[name].named_parameters()
    return [parameter for key, parameter in parameters if not model.is_lora or f".{name}." in key]


def follow(model: Family, name: str, decay: float) -> None:
    """policy <- decay policy + (1 - decay) trained, on each rank's shards; decay 0 copies to the bit.

    Raises:
        ValueError: no checkpoint holds this policy, so that a resumed run would begin it anew.
    """
    if name in model.frozen_policies:
        why = f"no checkpoint holds {name}, so that a resumed run would begin it anew"
        raise ValueError(f"follow: {why}: give load_policy a policy of another name, and let that one follow and act")
    _move(model, name, decay)


@torch.no_grad()
def _move(model: Family, name: str, decay: float) -> None:
    default = model.policies["default"]
    policy = model.policies[name]
    for transformer in (default, policy):
        reshard(transformer)
    source = dict(default.named_parameters())
    for key, target in policy.named_parameters():
        if not model.is_lora:
            target.lerp_(source[key].to(target.dtype), 1 - decay)
        elif f".{name}." in key:
            key_of_default = key.replace(f".{name}.", ".default.")
            target.lerp_(source[key_of_default], 1 - decay)


def local_tensors(model: Family, name: str) -> dict[str, torch.Tensor]:
    """{key: this rank's tensor of policy `name`}, sharing its memory; peft's keys have no adapter name."""
    if model.is_lora:
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(model.transformer, adapter_name=name)
    return model.policies[name].state_dict()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which each rank has a shard -> all of it, which is a collective; any other as it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def policy_tensors(model: Family, name: str = "default") -> "tuple[dict[str, torch.Tensor], LoraConfig | None]":
    """This rank's tensors of policy `name`, to be asked for one by one with `whole`; its LoraConfig, or None for full
    weights.

    Names are relative to the transformer: "module.lora_A.weight", or a parameter's own name.
    """
    lora_config = model.transformer.peft_config[name] if model.is_lora else None
    return local_tensors(model, name), lora_config


def tensors_on_rank_0(
    model: Family, name: str = "default", dtype: torch.dtype | None = None
) -> "tuple[dict[str, torch.Tensor], LoraConfig | None]":
    """{name: copy on the CPU} of all tensors of a policy on rank 0, {} on the others; its LoraConfig. A collective."""
    tensors, lora_config = policy_tensors(model, name)
    kept = {}
    for key, shard in tensors.items():
        tensor = whole(shard)
        if on_rank_0():
            kept[key] = tensor.to("cpu", dtype, copy=True)
    return kept, lora_config


class ShardsAdamW(torch.optim.AdamW):
    """torch's AdamW, which computes on each rank's shards as the plain tensors that they are.

    The numbers are the same to the bit, as AdamW has no sum over a tensor. Given FSDP's tensors, torch works out anew
    for each operator of the first step how all of them are sharded: half a second for a LoRA of 62 tensors, 8 for 500.
    The moments stay tensors of FSDP, which checkpoints gather."""

    def _init_group(self, group: dict[str, Any], *of_step: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *of_step)
        for tensors in of_step:  # weights, gradients, moments, counts
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return has_complex


def choose_adam_kernel(optimizer: torch.optim.AdamW, model: Family, adam_bits: int = 32) -> torch.optim.AdamW:
    """An AdamW of the same tensors and settings that steps sooner, in the place of one that has not stepped yet.

    One kernel for all tensors of a LoRA (foreach), and on a GPU for full weights one that needs no room (fused), on
    this rank's shards. torch's own takes FSDP's tensors one after the other. The numbers are the same to the bit. For
    adam_bits 8 it is torchao's. Another optimizer of a copy is returned as it is.

    Raises:
        RunError: adam_bits 8, and the optimizer is no AdamW.
    """
    if type(optimizer) is not torch.optim.AdamW:
        if adam_bits == 8:
            raise RunError(f"--adam_bits 8: this script's optimizer is no AdamW but {type(optimizer).__name__}")
        return optimizer
    if adam_bits == 8:
        eight: torch.optim.AdamW = optional_part("weights.adam_8bit", "--adam_bits 8").in_8_bits(optimizer)
        return eight
    on_shards = ShardsAdamW(optimizer.param_groups)
    for group in on_shards.param_groups:
        group["foreach"] = model.is_lora
        group["fused"] = not model.is_lora and model.device.type == "cuda"
    return on_shards


# ---- tensors of a checkpoint -----------------------------------------------------------------------------------------
def check_same_tensors(name: str, own: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Raises NothingBegun, naming a tensor of policy `name` that only one side has, or that has another shape."""
    differing = own.keys() ^ saved.keys()  # in one of them only
    differing |= {key for key in own.keys() & saved.keys() if own[key].shape != saved[key].shape}
    if differing:
        raise NothingBegun(
            f"the checkpoint's policy {name} is not this run's: {min(differing)} is in one of them only, or of "
            "another shape; were --lora_rank, --lora_target_modules or --model changed?"
        )


@torch.no_grad()
def load_policy_tensors(model: Family, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Copy whole tensors into policy `name`; every rank is given all of them, and keeps its shards.

    Raises:
        NothingBegun: as check_same_tensors.
    """
    targets = local_tensors(model, name)
    check_same_tensors(name, targets, tensors)
    for key, target in targets.items():
        value = tensors[key].to(target.dtype)
        if isinstance(target, DTensor):
            mesh = target.device_mesh
            value = value.to(mesh.device_type)
            # src_data_rank None: every rank cuts its shard from its own copy, and none is sent
            value = distribute_tensor(value, mesh, target.placements, src_data_rank=None)
        target.copy_(value)
