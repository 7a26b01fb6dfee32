"""Reading a LoRA to start from: a PEFT adapter folder, or diffusers' folder or file, before any model is loaded."""

import json
import re
from pathlib import Path

from common.refusals import refusing

import torch
from safetensors import safe_open

PEFT_FILE = "adapter_model.safetensors"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
# of a transformer's tensor, with the prefixes of peft and of a pipeline: its module, and what it is of it
KEY = re.compile(r"(?:base_model\.model\.)?(?:transformer\.)?(?!text_encoder)(.+)\.(lora_[AB]\.weight|alpha)")
LARGEST = torch.finfo(torch.float32).max
TAKEN = "in it, where only a transformer's lora_A and lora_B are taken"


def read_file(path):
    """All tensors of a LoRA and its settings, {} where there are none; OSError or ValueError where it is none."""
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
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  (it is no dict)
        metadata = opened.metadata() or {}
    settings = json.loads(metadata.get(LORA_ADAPTER_METADATA_KEY, "{}"))
    if is_peft:
        settings = json.loads(peft_settings.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError("its settings are not a JSON object")
    if not any(".lora_A." in key for key in tensors):  # the names of before peft; diffusers decides in the same way
        tensors = convert_unet_state_dict_to_peft(tensors)
    return tensors, {key.removeprefix("transformer."): value for key, value in settings.items()}


def read_lora(path):
    """A transformer's LoRA -> ({"module.lora_A.weight": fp32 tensor}, LoraConfig), as peft names them.

    Rank and modules are those of the tensors; alpha is the `.alpha` tensors', else the settings', else the rank.
    Settings that matter in training only (dropout, initialisation) are left behind.

    Raises:
        ValueError: one line that names --lora_path and what is wrong with it.
    """
    from peft import LoraConfig  # slow

    with refusing(f"--lora_path {path}"):
        with refusing("not a LoRA that can be read", Exception):
            tensors, settings = read_file(Path(path))
        weights, alphas = sort_tensors(tensors)
        modules, rank = modules_and_rank(weights, settings)
        some_lack_it = alphas and sorted(alphas) != modules
        if len(set(alphas.values())) > 1 or some_lack_it or settings.get("alpha_pattern"):
            raise ValueError("its alphas differ between modules, which is not supported")
        if settings.get("use_rslora"):
            raise ValueError("use_rslora, which divides alpha by the rank's root, is not supported")
        alpha = settings.get("lora_alpha", rank)
        if alphas:
            alpha = alphas[modules[0]]
        if not is_alpha(alpha):
            raise ValueError(f"its lora_alpha, {alpha}, is not one number above 0")
    return weights, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules)


def sort_tensors(tensors):
    """The tensors of a file -> {"module.lora_A.weight": fp32 tensor}, {module: alpha}; ValueError for any other."""
    weights = {}
    alphas = {}
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


def is_alpha(value):
    """Whether it is a number above 0 that fp32 has."""
    return type(value) in (int, float) and 0 < value < LARGEST


def modules_and_rank(weights, settings):
    """The names of a LoRA's modules, sorted, and their one rank; ValueError where they are not pairs of that rank."""
    modules = sorted({name.rpartition(".lora_")[0] for name in weights})
    pairs = {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
    if weights.keys() != pairs:
        raise ValueError("there is a lora_A without its lora_B in it, or the reverse")
    # A is (rank, inputs), B is (outputs, rank)
    ranks = {tensor.shape[0 if ".lora_A." in name else 1] for name, tensor in weights.items()}
    rank = min(ranks)
    if len(ranks) > 1 or settings.get("r", rank) != rank or settings.get("rank_pattern"):
        raise ValueError("its ranks differ between modules or from its settings, which is not supported")
    return modules, rank
