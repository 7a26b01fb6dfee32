"""What embeddings and latents that are kept on disk depend on, for the keys of their files."""

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.models.family import ENCODERS, Family

import torch

PROCESSORS = ("processor", "image_processor", "feature_extractor")  # how their names begin

NO_SETTING = ("name_or_path", "dtype", "torch_dtype", "transformers_version")  # tensors have a dtype of their own


def encoders_key(model: Family) -> str:
    """A hash of everything but the prompt that embeddings depend on: encoders' bits and configs, tokenizers,
    processors, the pipeline's own settings, the family's code, library versions."""
    import diffusers
    import transformers

    parts: list[object] = [diffusers.__version__, transformers.__version__, hash_code(model)]
    components = model.pipe.components
    parts.append({name: value for name, value in settings_of(model.pipe).items() if name not in components})
    for name, component in sorted(components.items()):
        if name.startswith("text_encoder") and component is not None:
            parts += [hash_bits(tensor) for tensor in component.state_dict().values()]
        if name.startswith((*ENCODERS, *PROCESSORS)) and component is not None:
            parts += [type(component).__name__, settings_of(component)]
        if name.startswith("tokenizer") and component is not None:
            vocabulary = sorted(component.get_vocab().items())
            parts += [type(component).__name__, vocabulary]
            parts += [component.model_max_length, component.chat_template]
    # hashed once per run, because vocabularies are megabytes
    return hashlib.blake2b(repr(parts).encode()).hexdigest()


def settings_of(component: Any) -> dict[str, Any]:
    """A component's or a pipeline's config, without versions and without where it lies."""
    config = getattr(component, "config", component)
    if hasattr(config, "to_dict"):  # of transformers; its processors are their own
        return without_places(config.to_dict())
    return without_places(dict(config)) if isinstance(config, Mapping) else {}  # a user's own encoder may have none


def without_places(config: dict[str, Any]) -> dict[str, Any]:
    """A config, with those in it, without what a copy in another folder or dtype has otherwise."""
    kept = {str(name): value for name, value in config.items() if name not in NO_SETTING}
    kept = {name: value for name, value in sorted(kept.items()) if not name.startswith("_")}
    return {name: without_places(value) if isinstance(value, dict) else value for name, value in kept.items()}


def hash_code(model: Family) -> str:
    """A hash of the files that define the model's family and the families that it inherits from, without family.py."""
    families = [c for c in type(model).__mro__ if issubclass(c, Family) and c is not Family]
    code = [(c.__name__, Path(inspect.getfile(c)).read_bytes()) for c in families]
    return hashlib.blake2b(repr(code).encode()).hexdigest()


def hash_bits(tensor: torch.Tensor) -> str:
    """A fingerprint of a tensor's dtype and bits, for the keys of caches. torch.hash_tensor alone ignores the dtype."""
    return f"{tensor.dtype} {torch.hash_tensor(tensor).view(torch.int64).item()}"
