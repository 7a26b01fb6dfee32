"""The policies of a run on one base model, and which of them acts.

`default` is trained; others (`ema`, `old`, `reference`) follow it, or stay. With a LoRA each is an adapter of the one
transformer and the base is all adapters off; with full weights each is a transformer of its own.
"""

import copy
import warnings
from collections.abc import Mapping
from contextlib import contextmanager

from common.distributed import on_rank_0
from common.errors import RunError
from common.lora import read_lora

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def make_lora(path, rank, alpha, target_modules, exclude_modules=()):
    """(LoraConfig, its tensors) of the PEFT or diffusers LoRA at `path`, or (LoraConfig, None) of a new one.

    None, with `path` None and rank 0: full weights are trained.

    Raises:
        ValueError: one line that names --lora_path and what is wrong with it.
    """
    if path:
        tensors, config = read_lora(path)
        return config, tensors
    if rank == 0:
        return None
    from peft import LoraConfig  # slow, as all of peft

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        init_lora_weights="gaussian",
        target_modules=list(target_modules),
        exclude_modules=list(exclude_modules) or None,
    )
    return config, None


def add_policies(model, lora, names):
    """Give `model` the policies `names`, equal at first; `default` is the first of them and the only trainable one.

    lora: make_lora's value. A new LoRA needs no `reference`: that is the base model. A LoRA is fp32; full weights that
    are trained or averaged become so in `shard` of the scripts, block by block, and a reference keeps its dtype.

    Raises:
        RunError: a module of the LoRA that the transformer does not have.
    """
    model.is_lora = lora is not None
    if model.is_lora:
        _add_adapters(model, *lora, names)
    else:
        _copy_transformer(model, names)
    use_policy(model, "default")


def _copy_transformer(model, names):
    """A transformer for each policy; `default` has the pipeline's own. The copies share its memory until they are
    sharded, which copies: a rank never holds two whole models."""
    transformer = model.transformer
    model.policies = {}
    for name in names:
        model.policies[name] = transformer
        if name != "default":
            shared = {id(p): torch.nn.Parameter(p.data, requires_grad=False) for p in transformer.parameters()}
            model.policies[name] = copy.deepcopy(transformer, shared)


def _add_adapters(model, lora_config, lora_tensors, names):
    """An adapter of the one transformer for each policy, of `lora_tensors` or new (None)."""
    from peft import set_peft_model_state_dict

    transformer = model.transformer
    is_new = lora_tensors is None
    _check_modules(transformer, lora_config, "--lora_target_modules" if is_new else "--lora_path")
    if is_new:
        names = [name for name in names if name != "reference"]
    warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters, on purpose
    for name in names:
        transformer.add_adapter(lora_config, adapter_name=name)
    if not is_new:
        found = set_peft_model_state_dict(transformer, lora_tensors, adapter_name="default")
        if found.unexpected_keys:
            key = found.unexpected_keys[0]
            raise RunError(f"--lora_path: {type(transformer).__name__} has no module for {key}")
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model.policies = dict.fromkeys(names, transformer)
    for name in names:
        if name != "default":
            follow(model, name, 0.0)


def _check_modules(transformer, config, option):
    """Raises RunError for a target or excluded module that is not there, and where none is left.

    `option` is what gave the targets. A module is named by the end of its name: `to_q` is every to_q.
    """
    targets = sorted(config.target_modules)
    excluded = sorted(config.exclude_modules or ())
    names = [name for name, _ in transformer.named_modules()]
    for given, ends in ((option, targets), ("--lora_exclude_modules", excluded)):
        for end in ends:
            if not any(_ends_with(name, [end]) for name in names):
                raise RunError(f"{given} {end}: {type(transformer).__name__} has no such module")
    chosen = [name for name in names if _ends_with(name, targets)]
    for name in chosen:
        module = transformer.get_submodule(name)
        if not isinstance(module, torch.nn.Linear) and not _ends_with(name, excluded):
            kind = type(module).__name__
            raise RunError(f"{option} {' '.join(targets)}: {name or 'the whole model'} is a {kind}, not a linear layer")
    if all(_ends_with(name, excluded) for name in chosen):
        raise RunError(f"--lora_exclude_modules {' '.join(excluded)}: no module is left to get a LoRA")


def _ends_with(name, ends):
    """Whether a module's dotted name ends with one of `ends`, in whole parts: blocks.0.to_q with to_q, not with q."""
    return f".{name}".endswith(tuple(f".{end}" for end in ends))


def use_policy(model, name):
    """Let policy `name` act in `model.transformer`; only `default` ever asks for a gradient. RNGs are not touched.

    `reference` is the base model where the policies are LoRAs without one of that name.
    """
    if model.is_lora:
        if name in model.policies:
            model.transformer.enable_adapters()
            model.transformer.set_adapter(name)
        else:
            model.transformer.disable_adapters()
        for key, parameter in model.transformer.named_parameters():
            parameter.requires_grad_(".default." in key)  # peft lets the acting one ask instead
    else:
        model.transformer = model.policies[name]
        model.transformer.requires_grad_(name == "default")


@contextmanager
def acting(model, name, engine=None, in_engine="default"):
    """Within the block policy `name` acts, and after it `default` does.

    Where an engine is given, `name` acts in it, too; it holds the policy `in_engine` before the block, and after it.
    """
    in_another = engine is not None and name != in_engine
    use_policy(model, name)
    if in_another:
        engine.push(*policy_tensors(model, name))
    yield
    use_policy(model, "default")
    if in_another:
        engine.push(*policy_tensors(model, in_engine))


@contextmanager
def gathered(model, is_wanted):
    """Within the block, whose passes take no gradient, every rank keeps the acting transformer's weights whole from its
    first pass on, in place of gathering a block at a time in every pass. The numbers are the same to the bit.

    Where it is not wanted, or where one rank's shards are all of it, passes gather a block at a time as ever.
    """
    transformer = model.transformer
    shards = [p.device_mesh.size(-1) for p in transformer.parameters() if isinstance(p, DTensor)]
    units = [module for module in transformer.modules() if isinstance(module, FSDPModule)]
    is_kept = is_wanted and max(shards, default=1) > 1
    if is_kept:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
    yield
    if is_kept:
        # the root keeps its weights after a forward pass, as it does by default: backward needs them at once
        for unit in units:
            unit.set_reshard_after_forward(unit is not transformer, recurse=False)
            unit.reshard()


@torch.no_grad()
def follow(model, name, decay):
    """policy <- decay policy + (1 - decay) default, on each rank's shards; decay 0 copies to the bit."""
    default = model.policies["default"]
    policy = model.policies[name]
    for transformer in (default, policy):
        if isinstance(transformer, FSDPModule):  # a forward pass without a backward leaves the root's weights unsharded
            transformer.reshard()
    source = dict(default.named_parameters())
    for key, target in policy.named_parameters():
        if not model.is_lora:
            target.lerp_(source[key].to(target.dtype), 1 - decay)
        elif f".{name}." in key:
            key_of_default = key.replace(f".{name}.", ".default.")
            target.lerp_(source[key_of_default], 1 - decay)


def local_tensors(model, name):
    """{key: this rank's tensor of policy `name`}, sharing its memory; peft's keys have no adapter name."""
    if model.is_lora:
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(model.transformer, adapter_name=name)
    return model.policies[name].state_dict()


class PolicyTensors(Mapping):
    """A policy's tensors by name, each gathered from all ranks when it is asked for: a rank never holds all of them.

    Asking is a collective, and so is going through them, `items`.
    """

    def __init__(self, of_this_rank):
        self.of_this_rank = of_this_rank  # {name: this rank's shard, or a whole tensor}

    def __getitem__(self, name):
        tensor = self.of_this_rank[name].detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def __iter__(self):
        return iter(self.of_this_rank)

    def __len__(self):
        return len(self.of_this_rank)

    def numel(self, name):
        """Elements of a tensor, which is not gathered for it."""
        return self.of_this_rank[name].numel()


def policy_tensors(model, name="default"):
    """The unsharded tensors of policy `name`, as a PolicyTensors; and its LoraConfig, or None for full weights.

    Names are relative to the transformer: "module.lora_A.weight", or a parameter's own name.
    """
    lora_config = model.transformer.peft_config[name] if model.is_lora else None
    return PolicyTensors(local_tensors(model, name)), lora_config


def tensors_on_rank_0(model, name="default"):
    """{name: copy on the CPU} of all tensors of a policy on rank 0, {} on the others; its LoraConfig. A collective."""
    tensors, lora_config = policy_tensors(model, name)
    kept = {}
    for key, tensor in tensors.items():
        if on_rank_0():
            kept[key] = tensor.cpu().clone()
    return kept, lora_config
