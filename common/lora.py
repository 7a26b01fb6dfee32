"""Reading a LoRA to start from: a PEFT adapter folder, or diffusers' folder or file, before any model is loaded."""

import json
import math
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

PEFT_FILE = "adapter_model.safetensors"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
# of a transformer's tensor, with the prefixes of peft and of a pipeline: its module, and what it is of it
KEY = re.compile(r"(?:base_model\.model\.)?(?:transformer\.)?(?!text_encoder)(.+)\.(lora_[AB]\.weight|alpha)")
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
        settings = json.loads(peft_settings.read_text())
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

    refused = f"--lora_path {path}:"
    try:
        tensors, settings = read_file(Path(path))
    except (OSError, SafetensorError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{refused} not a LoRA that can be read: {reason}") from None
    weights = {}  # "module.lora_A.weight": fp32 tensor
    alphas = {}  # module: number
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if not match:
            raise ValueError(f"{refused} {key} {TAKEN}")
        module, part = match.groups()
        if part == "alpha":
            if tensor.numel() != 1 or not 0 < tensor.item() < math.inf:
                raise ValueError(f"{refused} {key} is not one number above 0")
            alphas[module] = tensor.item()
        else:
            if tensor.dim() != 2 or 0 in tensor.shape:
                raise ValueError(f"{refused} {key} has the shape {tuple(tensor.shape)}, where matrices are taken")
            if not tensor.isfinite().all():
                raise ValueError(f"{refused} {key} has values that are NaN or infinite")
            weights[f"{module}.{part}"] = tensor.float()
    if not weights:
        raise ValueError(f"{refused} no tensor {TAKEN}")

    modules = sorted({name.rpartition(".lora_")[0] for name in weights})
    pairs = {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
    if weights.keys() != pairs:
        raise ValueError(f"{refused} there is a lora_A without its lora_B in it, or the reverse")

    # A is (rank, inputs), B is (outputs, rank)
    ranks = {tensor.shape[0 if ".lora_A." in name else 1] for name, tensor in weights.items()}
    rank = min(ranks)
    ranks.add(settings.get("r", rank))
    if len(ranks) > 1 or settings.get("rank_pattern"):
        raise ValueError(f"{refused} its ranks differ between modules or from its settings, which is not supported")

    some_lack_it = alphas and sorted(alphas) != modules
    if len(set(alphas.values())) > 1 or some_lack_it or settings.get("alpha_pattern"):
        raise ValueError(f"{refused} its alphas differ between modules, which is not supported")
    if settings.get("use_rslora"):
        raise ValueError(f"{refused} use_rslora, which divides alpha by the rank's root, is not supported")
    alpha = settings.get("lora_alpha", rank)
    if alphas:
        alpha = alphas[modules[0]]
    return weights, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules)
