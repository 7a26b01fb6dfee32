"""Prompt embeddings kept in a folder: each prompt is encoded once, and the text encoders do not come back."""

import hashlib
from pathlib import Path

from common.files import atomic_file
from common.models import on_device
from common.refusals import brief
from common.stops import say

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


def cache_prompts(model, prompts, max_sequence_length, folder):
    """Encode those of the prompts, and of the empty one, that `folder` lacks; model.encode_prompts reads it afterwards.

    The text encoders come to the device once, and again for a prompt that is none of these. A prompt is encoded by
    itself: its embedding depends on no other. folder None: nothing is kept. A collective: ranks share the work.
    """
    if folder is None:
        return
    encode = model.encode_prompts  # the family's own
    with on_device(model, "text_encoder"):  # a GPU hashes gigabytes faster
        key = encoders_key(model)
    is_complete = False

    def encode_prompts(prompts, max_sequence_length):
        rows = []
        for prompt in prompts:
            name = hashlib.blake2b(repr((key, max_sequence_length, prompt)).encode(), digest_size=16).hexdigest()
            file = Path(folder) / f"{name}.safetensors"
            conditioning = read_conditioning(file)
            if conditioning is None:
                if is_complete:
                    say(brief(f"--prompt_cache {folder}: not there, and encoded now: {prompt}"))
                conditioning = encode([prompt], max_sequence_length)
                write_conditioning(file, conditioning)
            rows.append(conditioning)
        return {field: torch.cat([row[field].to(model.device) for row in rows]) for field in rows[0]}

    distinct = list(dict.fromkeys([*prompts, ""]))  # "": of the second pass of guidance
    with on_device(model, "text_encoder"):
        for prompt in distinct[dist.get_rank() :: dist.get_world_size()]:
            encode_prompts([prompt], max_sequence_length)
    dist.barrier()  # a rank reads what others have encoded
    is_complete = True
    model.encode_prompts = encode_prompts


def encoders_key(model):
    """A hash of what embeddings depend on besides the prompt: encoders' bits, tokenizers, and the libraries."""
    import diffusers
    import transformers

    parts = [diffusers.__version__, transformers.__version__, type(model).__name__]
    for name, component in sorted(model.pipe.components.items()):
        if name.startswith("text_encoder") and component is not None:
            parts += [hash_bits(tensor) for tensor in component.state_dict().values()]
        if name.startswith("tokenizer"):
            vocabulary = sorted(component.get_vocab().items())
            parts += [type(component).__name__, vocabulary, component.model_max_length, component.chat_template]
    return hashlib.blake2b(repr(parts).encode()).hexdigest()  # once: a vocabulary is megabytes


def hash_bits(tensor):
    """A text that tells tensors of other values, or another dtype, apart; hash_tensor alone knows no dtype."""
    return f"{tensor.dtype} {torch.hash_tensor(tensor).view(torch.int64).item()}"


def write_conditioning(file, conditioning):
    """Write the conditioning of one prompt, with a hash of each tensor's bits."""
    hashes = {field: hash_bits(tensor) for field, tensor in conditioning.items()}
    tensors = {field: tensor.cpu().contiguous() for field, tensor in conditioning.items()}
    with atomic_file(file, shared=True) as temporary:
        save_file(tensors, temporary, metadata=hashes)


def read_conditioning(file):
    """What write_conditioning wrote; None where there is no such file, or a disk has changed a bit of it."""
    try:
        with safe_open(file, framework="pt") as opened:
            conditioning = {field: opened.get_tensor(field) for field in opened.keys()}  # noqa: SIM118  (it is no dict)
            hashes = opened.metadata()
    except (OSError, SafetensorError):
        return None
    as_written = {field: hash_bits(tensor) for field, tensor in conditioning.items()} == hashes
    return conditioning if as_written else None
