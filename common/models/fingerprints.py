"""What embeddings and latents that are kept on disk depend on, for the keys of their files."""

import hashlib
import inspect
from pathlib import Path

from common.models.family import Family

import torch


def encoders_key(model: Family) -> str:
    """A hash of everything but the prompt that embeddings depend on: encoders' bits, tokenizers, the family's code,
    library versions."""
    import diffusers
    import transformers

    parts: list[object] = [diffusers.__version__, transformers.__version__, hash_code(model)]
    for name, component in sorted(model.pipe.components.items()):
        if name.startswith("text_encoder") and component is not None:
            parts += [hash_bits(tensor) for tensor in component.state_dict().values()]
        if name.startswith("tokenizer") and component is not None:
            vocabulary = sorted(component.get_vocab().items())
            parts += [type(component).__name__, vocabulary]
            parts += [component.model_max_length, component.chat_template]
    # hashed once per run, because vocabularies are megabytes
    return hashlib.blake2b(repr(parts).encode()).hexdigest()


def hash_code(model: Family) -> str:
    """A hash of the files that define the model's family and the families that it inherits from, without family.py."""
    families = [c for c in type(model).__mro__ if issubclass(c, Family) and c is not Family]
    code = [(c.__name__, Path(inspect.getfile(c)).read_bytes()) for c in families]
    return hashlib.blake2b(repr(code).encode()).hexdigest()


def hash_bits(tensor: torch.Tensor) -> str:
    """A fingerprint of a tensor's dtype and bits, for the keys of caches. torch.hash_tensor alone ignores the dtype."""
    return f"{tensor.dtype} {torch.hash_tensor(tensor).view(torch.int64).item()}"
