"""CLIPScore: does the image fit its prompt? And what it shares with the other rewards that ask a CLIP.

The environment variable CLIP_SCORE_MODEL names the weights, by default openai/clip-vit-large-patch14 (1.7 GB in fp32):
a hub id, or a folder in transformers' layout with the tokenizer's and the image processor's files. REWARD_OFFLOAD=1
moves the networks of the built-in rewards from the GPU to the CPU's memory between rollouts.
"""

import functools
import os

from common.refusals import refusing
from common.stops import say

import torch

CHUNK = 8  # images of a forward pass, or prompts
MAX_TOKENS = 77  # of a prompt, its two ends included: CLIP has no more positions, and longer prompts are cut
LOADED = {}  # {hub id or folder: its CLIPModel}


@torch.no_grad()
def clip_score(images, prompts, metadata):
    """100 max(cos(image, prompt), 0) of CLIP's embeddings: torchmetrics' CLIPScore (arXiv 2104.08718 has 2.5 for 100).

    In [0, 100]; images that fit their prompt score about 25 to 35. The reward of DiffusionNFT's code is this / 30.
    """
    model, processor = load()
    products = embed_images(model, processor, images) * embed_prompts(model, processor, prompts)  # (B, D)
    cosines = products.sum(1)  # (B,)
    return (100 * cosines.clamp(min=0)).tolist()


def load():
    """The CLIPModel and its processor."""
    source = weights_of("CLIP_SCORE_MODEL", "openai/clip-vit-large-patch14")
    return load_clip(source), load_processor(source)


def weights_of(variable, default):
    """(variable, the hub id or folder that it names)."""
    return variable, os.environ.get(variable) or default


def load_clip(source):
    """The CLIPModel of weights_of's `source`, frozen, in fp32, on own_device; loaded once, for all rewards that ask.

    Raises:
        ValueError: naming the variable, and what is wrong with what it names; or REWARD_OFFLOAD is neither 0 nor 1.
    """
    wants_offload()
    name = source[1]
    if name not in LOADED:
        with refusing_weights(source):
            LOADED[name] = _read_clip(name)
    return LOADED[name].to(own_device())


def _read_clip(name):
    from transformers import CLIPModel  # slow
    from transformers.utils import logging

    say(f"loading {name}")
    logging.disable_progress_bar()
    # "auto" would take the checkpoint's dtype; and what a checkpoint lacks would be drawn at random
    model, found = CLIPModel.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
    if found["missing_keys"]:
        raise ValueError(f"not a whole CLIP: {len(found['missing_keys'])} of its tensors are missing")
    return model.requires_grad_(False).eval()


def offload():
    """The networks leave the GPU until they are asked again, if REWARD_OFFLOAD is 1."""
    if wants_offload():
        for model in LOADED.values():
            model.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def wants_offload():
    """Whether REWARD_OFFLOAD is 1; raises ValueError where it is neither that nor 0."""
    value = os.environ.get("REWARD_OFFLOAD", "").strip() or "0"
    if value not in ("0", "1"):
        raise ValueError(f"REWARD_OFFLOAD={value}: must be 0 or 1")
    return value == "1"


@functools.cache
def load_processor(source):
    """The CLIPProcessor of weights_of's `source`. Its images are resized by PIL, with or without torchvision.

    Raises:
        ValueError: as load_clip.
    """
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPProcessor  # slow

    with refusing_weights(source):
        return CLIPProcessor(CLIPImageProcessorPil.from_pretrained(source[1]), AutoTokenizer.from_pretrained(source[1]))


def refusing_weights(source):
    """Whatever transformers raises over missing or broken weights becomes a ValueError of one line."""
    variable, name = source
    return refusing(f"cannot load {variable}={name}, set it to a hub id or a folder", Exception)


def own_device():
    """This rank's GPU, the current device of every thread that calls rewards; or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def embed_images(model, processor, images):
    """Embeddings (B, D) of length 1 of B PIL images, of whatever sizes."""
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]  # (B, 3, 224, 224)
    embeddings = in_chunks(lambda rows: model.get_image_features(rows).pooler_output, pixels.to(model.device))
    return embeddings / embeddings.norm(dim=-1, keepdim=True)


def embed_prompts(model, processor, prompts):
    """Embeddings (B, D) of length 1 of B prompts, each cut to MAX_TOKENS tokens, of which the last is the end's."""
    tokens = processor.tokenizer(
        prompts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
    )["input_ids"]  # (B, 77)
    # no mask of the padding: attention is causal, and the embedding is read where the prompt ends
    embeddings = in_chunks(lambda rows: model.get_text_features(rows).pooler_output, tokens.to(model.device))
    return embeddings / embeddings.norm(dim=-1, keepdim=True)


def in_chunks(function, rows):
    """function(rows) of rows (B, ...), CHUNK of them a call, the last call filled up with the last row.

    Matrix products of other sizes round otherwise: an image's score would depend on how many are scored with it.
    """
    parts = []
    for chunk in rows.split(CHUNK):
        fill = chunk[-1:].expand(CHUNK - len(chunk), *chunk.shape[1:])
        parts.append(function(torch.cat([chunk, fill]))[: len(chunk)])
    return torch.cat(parts)


clip_score.settings = ("CLIP_SCORE_MODEL",)
clip_score.load = load
clip_score.offload = offload
