"""Reading a LoRA to start from (--lora_path): a folder of peft's, or a folder or file of diffusers'.

Everything is read and checked before any model loads. Older key names (lora.down, lora.up) are read as diffusers reads
them. We refuse adapters that we could not train further exactly as they are: several ranks or alphas, DoRA, rsLoRA,
biases, and LoRAs of text encoders.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import RunError, refusing
from common.weights.adapter_names import translate

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from peft import LoraConfig

PEFT_FILE = "adapter_model.safetensors"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
# A key in the file: the prefixes of peft and of a pipeline, which we drop; the module's name; which tensor it is.
KEY = re.compile(r"(?:base_model\.model\.)?(?:transformer\.)?(?!text_encoder)(.+)\.(lora_[AB]\.weight|alpha)")
LARGEST = torch.finfo(torch.float32).max
CONVERT = "`python -m tools.lora convert FILE OUT --model MODEL` gives it one"
TAKEN = "in it, where only a transformer's lora_A and lora_B are taken"


class LoRA(NamedTuple):
    """A LoRA to train."""

    config: "LoraConfig"
    tensors: dict[str, torch.Tensor] | None  # to start from; None: new ones are drawn
    base_weights: str | None = None  # the option: how the weights under it are kept


def read_lora(path: str | Path, model: str | Path | None = None) -> "tuple[dict[str, torch.Tensor], LoraConfig]":
    """A transformer's LoRA as ({"module.lora_A.weight": fp32 tensor}, LoraConfig), with the names that peft uses.

    model: the folder or hub id that it is for; names of other tools are translated to those of its transformer, and
    every module must be there. None: they are diffusers' already.

    Rank and modules are the tensors' own. Alpha comes from the file's `.alpha` tensors; without those, from its
    settings; without settings, it is the rank. Settings that matter in training only (dropout, initialisation) are
    dropped.

    Raises:
        ValueError: one line that names --lora_path and what is wrong with the file.
    """
    from peft import LoraConfig  # slow

    with refusing(f"--lora_path {path}"):
        with refusing("not a LoRA that can be read", Exception):
            tensors, settings = read_file(Path(path))
        if model is not None:
            tensors = translate(tensors, model)
        weights, alphas = sort_tensors(tensors)
        modules, rank = modules_and_rank(weights, settings)
        some_lack_alpha = alphas and sorted(alphas) != modules
        if len(set(alphas.values())) > 1 or some_lack_alpha or settings.get("alpha_pattern"):
            raise ValueError(f"its alphas differ between modules: {CONVERT}")
        if settings.get("use_rslora"):
            raise ValueError("use_rslora, which divides alpha by the root of the rank, is not supported")
        alpha = settings.get("lora_alpha", rank)
        if alphas:
            alpha = alphas[modules[0]]
        if not is_alpha(alpha):
            raise ValueError(f"its lora_alpha, {alpha}, is not one number above 0")
    return weights, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules)


def read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a LoRA, and its settings ({} if it has none). Raises OSError or ValueError if it is not a LoRA."""
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY  # slow
    from diffusers.utils import convert_unet_state_dict_to_peft

    peft_settings = path / "adapter_config.json"
    is_peft = peft_settings.is_file()
    file = path
    missing = "there is no such file or folder"
    if path.is_dir():
        file = path / (PEFT_FILE if is_peft else DIFFUSERS_FILE)
        missing = f"there is no {file.name} in it"
    if not file.is_file():
        raise OSError(missing)
    with safe_open(file, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  (not a dict: no iteration)
        metadata = opened.metadata() or {}
    settings = json.loads(metadata.get(LORA_ADAPTER_METADATA_KEY, "{}"))
    if is_peft:
        settings = json.loads(peft_settings.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError("its settings are not a JSON object")
    if not any(".lora_A." in key for key in tensors) and any(".lora.down." in key for key in tensors):
        tensors = convert_unet_state_dict_to_peft(tensors)  # key names from before peft
    return tensors, {key.removeprefix("transformer."): value for key, value in settings.items()}


def sort_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """A file's tensors as {"module.lora_A.weight": fp32 tensor} and {module: alpha}.

    Raises:
        ValueError: names a tensor that belongs to neither, or whose shape or values cannot be a LoRA's.
    """
    weights: dict[str, torch.Tensor] = {}
    alphas: dict[str, float] = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if not match:
            raise ValueError(f"{key} {TAKEN}")
        module, part = match.groups()
        name = f"{module}.{part}"
        if name in weights or module in alphas and part == "alpha":
            raise ValueError(f"{name} is in it twice, with a prefix and without")
        if part == "alpha":
            if tensor.numel() != 1 or not is_alpha(tensor.item()):
                raise ValueError(f"{key} is not one number above 0")
            alphas[module] = tensor.item()
            continue
        if tensor.dim() != 2 or 0 in tensor.shape:
            raise ValueError(f"{key} has the shape {tuple(tensor.shape)}, where matrices are taken")
        if not tensor.is_floating_point():
            raise ValueError(f"{key} is of {tensor.dtype}, where floating-point numbers are taken")
        weights[name] = tensor.float()
        if not weights[name].isfinite().all():
            raise ValueError(f"{key} has values that are NaN or infinite")
    if not weights:
        raise ValueError(f"no tensor {TAKEN}")
    return weights, alphas


def is_alpha(value: object) -> bool:  # whatever a JSON file says
    """Whether the value is a number above 0 that fp32 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST


def modules_and_rank(weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> tuple[list[str], int]:
    """The names of a LoRA's modules, sorted, and the rank that all of them have.

    Raises:
        ValueError: a matrix lacks its partner, or the ranks differ between modules or from the settings.
    """
    modules = sorted({name.rpartition(".lora_")[0] for name in weights})
    pairs = {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
    if weights.keys() != pairs:
        raise ValueError("there is a lora_A without its lora_B in it, or the reverse")
    # A is (rank, inputs), B is (outputs, rank)
    ranks = {tensor.shape[0 if ".lora_A." in name else 1] for name, tensor in weights.items()}
    rank = min(ranks)
    if len(ranks) > 1 or settings.get("r", rank) != rank or settings.get("rank_pattern"):
        raise ValueError(f"its ranks differ, between modules or from its settings: {CONVERT}")
    return modules, rank


# ---- a checkpoint to resume from -------------------------------------------------------------------------------------
def check_policy(checkpoint: Path, lora: LoRA | None) -> None:
    """Hold the LoRA that is trained (None: full weights) against the policy of the checkpoint to resume from.

    Raises:
        ValueError: one of them is a LoRA and the other full weights, or the LoRAs are of other ranks or modules.
    """
    with refusing(f"--resume {checkpoint}", Exception):  # it was checked, but may be a stranger's
        state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        tensors = state["policies"]["default"].items()
        saved = {name.rpartition(".lora_")[0]: len(tensor) for name, tensor in tensors if ".lora_A." in name}
    if lora is None:
        if saved:
            raise ValueError(f"--lora_rank 0: {checkpoint} has a LoRA")
        return
    config, given_tensors, _ = lora
    rank_option = "--lora_rank"
    modules_option = "--lora_target_modules"
    if given_tensors is not None:
        rank_option = modules_option = "--lora_path"
    if not saved:
        raise ValueError(f"{rank_option}: {checkpoint} has full weights and no LoRA")
    rank = min(saved.values())
    if rank != config.r:
        raise ValueError(f"{rank_option}: of rank {config.r}, where the LoRA of {checkpoint} has the rank {rank}")
    targets = sorted(config.target_modules)
    is_target = {(module, target): f".{module}".endswith(f".{target}") for module in saved for target in targets}
    unknown = [module for module in saved if not any(is_target[module, target] for target in targets)]
    missing = [target for target in targets if not any(is_target[module, target] for module in saved)]
    if unknown:
        raise ValueError(f"{modules_option}: the LoRA of {checkpoint} has {unknown[0]} among its modules")
    if missing and not config.exclude_modules:  # which may have taken out all of a target
        raise ValueError(f"{modules_option}: the LoRA of {checkpoint} has no {missing[0]} among its modules")


def check_modules(transformer: torch.nn.Module, config: "LoraConfig", option: str) -> None:
    """Raises RunError for a target or excluded module that does not exist, and where no module is left.

    `option` gave the targets. A module is named by the end of its name: `to_q` means every to_q.
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


def _ends_with(name: str, ends: Sequence[str]) -> bool:
    """Whether a module's dotted name ends with one of `ends`, in whole parts: blocks.0.to_q with to_q, not with q."""
    return f".{name}".endswith(tuple(f".{end}" for end in ends))
