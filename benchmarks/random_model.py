"""A checkpoint of random weights and a published model's size, or of a size for a CPU: nothing is downloaded.

    python benchmarks/random_model.py stabilityai/stable-diffusion-3.5-medium scratch/sd35m
    python benchmarks/random_model.py black-forest-labs/FLUX.1-dev scratch/flux --tiny     # to try what uses it
    python benchmarks/random_model.py cpu-255M scratch/cpu

The transformer and the VAE have their published sizes; the text encoders have the published widths, but few or thin
layers, and tokenizers of a few hundred tokens: each prompt is encoded once. `cpu-255M` is a Stable Diffusion 3 of 12
blocks of width 768 beside the tiny text encoders and VAE of tests/tiny_models.py. A checkpoint takes two bytes a
parameter on the disk, up to 45 GB.
"""

import argparse
import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.published_models import PUBLISHED, VAES
from tests.tiny_models import FAMILIES, make_checkpoint

import diffusers
import torch

CPU_MODEL = "cpu-255M"
CPU_TRANSFORMER = {  # what differs from the tiny one
    "num_layers": 12,
    "attention_head_dim": 64,
    "num_attention_heads": 12,
    "caption_projection_dim": 768,
    "dual_attention_layers": (),
}
CLIP_L = {"hidden_size": 768, "projection_dim": 768, "max_position_embeddings": 77}
CLIP_G = {"hidden_size": 1280, "projection_dim": 1280, "max_position_embeddings": 77}
QWEN_2_5_ROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
TEXT_ENCODERS = {  # family: {text encoder: what differs in its config from that of the tiny one}
    "stable_diffusion_3": {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "text_encoder_3": {"d_model": 4096}},
    "flux": {"text_encoder": CLIP_L, "text_encoder_2": {"d_model": 4096}},
    "flux2_klein": {"text_encoder": {"hidden_size": 2560}},
    "qwen_image": {
        "text_encoder": {
            "text_config": {"hidden_size": 3584, "num_attention_heads": 28, "rope_parameters": QWEN_2_5_ROPE},
            "vision_config": {"out_hidden_size": 3584},
        }
    },
    "wan": {"text_encoder": {"d_model": 4096}},
    "z_image": {"text_encoder": {"hidden_size": 2560}},
}


def wider(encoder, changes):
    """A new text encoder like the tiny one, with `changes` in its config."""
    config = copy.deepcopy(encoder.config)
    for name, value in changes.items():
        if name.endswith("_config"):
            for key, inner in value.items():
                setattr(getattr(config, name), key, inner)
        else:
            setattr(config, name, value)
    return type(encoder)(config)


def random_transformer(kind, config):
    """Drawn where that is fast, and in bf16 from the first: Qwen-Image's 20 billion in fp32 fill an 80 GB GPU."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        transformer = kind(**config)
    torch.set_default_dtype(torch.float32)
    return transformer


def make_full_size(hub_id, folder):
    """Write the checkpoint of a published model's size, of random weights, to `folder`."""
    family, transformer_class, config, _ = PUBLISHED[hub_id]
    torch.manual_seed(0)
    pipe = FAMILIES[family]()
    parts = {name: wider(getattr(pipe, name), changes) for name, changes in TEXT_ENCODERS[family].items()}
    parts["vae"] = type(pipe.vae)(**VAES[family])
    parts["transformer"] = random_transformer(getattr(diffusers, transformer_class), config)
    pipe.register_modules(**parts)
    if family == "stable_diffusion_3":
        pipe.tokenizer.model_max_length = pipe.tokenizer_2.model_max_length = 77
    pipe.save_pretrained(folder)


def make_cpu_size(folder):
    """Write the checkpoint of CPU_MODEL to `folder`."""
    torch.manual_seed(0)
    pipe = FAMILIES["stable_diffusion_3"]()
    config = {name: value for name, value in pipe.transformer.config.items() if not name.startswith("_")}
    pipe.register_modules(transformer=random_transformer(type(pipe.transformer), config | CPU_TRANSFORMER))
    pipe.save_pretrained(folder)


if __name__ == "__main__":
    sizes = [hub_id for hub_id, (family, *_) in PUBLISHED.items() if family in VAES and family in TEXT_ENCODERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*sizes, CPU_MODEL], metavar="NAME", help="a hub id, or cpu-255M")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="of the model's family, but tiny")
    args = parser.parse_args()
    if args.name == CPU_MODEL:
        make_cpu_size(args.folder)
    elif args.tiny:
        make_checkpoint(PUBLISHED[args.name][0], args.folder)
    else:
        make_full_size(args.name, args.folder)
