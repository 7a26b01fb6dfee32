"""LoRAs of other tools: the names of their tensors, translated to those of the model's transformer in diffusers.

Names with the prefix of a pipeline or of ComfyUI, and kohya's with underscores for dots, are translated here. Names of
a model's original code (q, k and v in one matrix, `double_blocks`) are translated by diffusers' own converters.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import torch

# prefixes, which we drop; the module; which tensor it is
KEY = re.compile(
    r"(?:base_model\.model\.)?(?:transformer\.|diffusion_model\.|lora_unet_|lycoris_)?(.+?)\."
    r"(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up|alpha)(?:\.default)?(?:\.weight)?"
)
PARTS = {"lora_down": "lora_A", "lora.down": "lora_A", "lora_up": "lora_B", "lora.up": "lora_B"}
TEXT_ENCODERS = re.compile(r"(?:base_model\.model\.)?(?:text_encoder|lora_te|text_model|conditioner)")
OTHER_KINDS = {  # a part of a tensor's name -> what it is
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "lokr_": "LoKr",
    "hada_": "LoHa",
    "oft_": "OFT",
}


def meta_transformer(model: str) -> torch.nn.Module:
    """A model's transformer without memory, from its configs alone."""
    import diffusers  # slow

    index = diffusers.DiffusionPipeline.load_config(model)
    transformer_class = getattr(diffusers, index["transformer"][1])
    with torch.device("meta"):
        return transformer_class.from_config(transformer_class.load_config(model, subfolder="transformer"))


@functools.cache
def linear_shapes(model: str) -> dict[str, tuple[int, int]]:
    """{module: (outputs, inputs)} of the linear layers of a model's transformer, from its configs alone."""
    layers = {name: m for name, m in meta_transformer(model).named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


def is_of_text_encoder(key: str) -> bool:
    """Whether a tensor is part of a text encoder's LoRA."""
    return TEXT_ENCODERS.match(key) is not None


def translate(tensors: Mapping[str, torch.Tensor], model: str | Path) -> dict[str, torch.Tensor]:
    """A file's tensors with the names of the model's transformer, {"MODULE.lora_A.weight"} and {"MODULE.alpha"}.

    Raises:
        ValueError: names a tensor that has no place in the transformer, what it is, and what to do.
    """
    for part, kind in OTHER_KINDS.items():
        key = next((key for key in tensors if part in key), None)
        if key:
            tool = "diffusers (load_lora_weights, fuse_lora, save_pretrained)" if kind == "DoRA" else "its own tool"
            merge = f"merge it with {tool} and pass that as --model"
            raise ValueError(f"it is a {kind} ({key}), which is not trained here: {merge}")
    encoder = next((key for key in tensors if is_of_text_encoder(key)), None)
    if encoder:
        convert = f"`python -m tools.lora convert FILE OUT --model {model}` leaves it out"
        raise ValueError(f"{encoder} is a text encoder's, which is not trained here: {convert}")
    found, unknown = rename(tensors, str(model))
    if unknown:
        found, unknown = rename(by_diffusers(tensors, str(model)) or tensors, str(model))
    if unknown:
        told = "is it another model's LoRA? If diffusers does not convert its names, save it with diffusers' own"
        raise ValueError(f"{unknown[0]}: the transformer of {model} has no such module; {told}")
    check_shapes(found, str(model))
    return found


def rename(tensors: Mapping[str, torch.Tensor], model: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors whose module the transformer has, by our names, and the keys of the others."""
    known = linear_shapes(model)
    by_underscores = {module.replace(".", "_"): module for module in known}
    found = {}
    unknown = []
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        module = match and (match[1] if match[1] in known else by_underscores.get(match[1]))
        if not match or not module:
            unknown.append(key)
            continue
        part = PARTS.get(match[2], match[2])
        name = f"{module}.{part}" if part == "alpha" else f"{module}.{part}.weight"
        if name in found:
            raise ValueError(f"{name} is in it twice, with a prefix and without")
        found[name] = tensor
    return found, unknown


def by_diffusers(tensors: Mapping[str, torch.Tensor], model: str) -> dict[str, torch.Tensor] | None:
    """The tensors as the converters of diffusers' pipeline name them; None where it has none, or they fail."""
    import diffusers  # slow

    pipeline_class = getattr(diffusers, diffusers.DiffusionPipeline.load_config(model)["_class_name"])
    try:
        converted = pipeline_class.lora_state_dict({key: tensor.clone() for key, tensor in tensors.items()})
    except Exception:  # whatever a converter raises over names that it does not know
        return None
    return converted if isinstance(converted, dict) else converted[0]


def check_shapes(tensors: Mapping[str, torch.Tensor], model: str) -> None:
    """ValueError: a matrix does not fit its module."""
    known = linear_shapes(model)
    for name, tensor in tensors.items():
        module, _, part = name.partition(".lora_")
        if not part or tensor.dim() != 2:
            continue
        outputs, inputs = known[module]
        size = tensor.shape[1] if part.startswith("A") else tensor.shape[0]
        expected = inputs if part.startswith("A") else outputs
        if size != expected:
            raise ValueError(f"{name} is for {size} features, where the transformer of {model} has {expected}")
