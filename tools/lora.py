"""A LoRA in a file: into other names, into another strength, or into the model's weights.

    python -m tools.lora convert FILE OUT.safetensors --model MODEL [--to diffusers | comfyui | kohya] [--scale 0.8]
    python -m tools.lora merge FILE FOLDER --model MODEL [--scale 0.8] [--dtype bfloat16]

FILE is a run's adapter/ folder, or a LoRA of another tool (docs/adapters_and_checkpoints.md has what is read).
`convert` drops a text encoder's part, gives all modules one rank and multiplies alpha / rank into the B matrices.
`merge` writes the pipeline with the LoRA in its transformer's weights, for --model.
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.cpu import repair_torchvision
from common.errors import RunError, error_prefix
from common.files import atomic_file, writing
from common.models import family_class, has_two_transformers
from common.models.loading import load_pipeline
from common.weights.adapter_files import (
    KEY,
    PARTS,
    TEXT_ENCODERS,
    check_kind,
    find_file,
    is_alpha,
    read_file,
    translate,
)
from common.weights.lora import linear_shapes

import torch
from safetensors.torch import save_file

Matrices = tuple[torch.Tensor, torch.Tensor]  # A (rank, inputs) and B (outputs, rank), in fp32

# Names of Wan's own code by diffusers' names: those of its blocks, which kohya's scripts train
WAN = {
    r"blocks\.(\d+)\.attn1\.to_([qkv])": r"blocks.\1.self_attn.\2",
    r"blocks\.(\d+)\.attn1\.to_out\.0": r"blocks.\1.self_attn.o",
    r"blocks\.(\d+)\.attn2\.to_([qkv])": r"blocks.\1.cross_attn.\2",
    r"blocks\.(\d+)\.attn2\.to_out\.0": r"blocks.\1.cross_attn.o",
    r"blocks\.(\d+)\.attn2\.add_([kv])_proj": r"blocks.\1.cross_attn.\2_img",
    r"blocks\.(\d+)\.ffn\.net\.0\.proj": r"blocks.\1.ffn.0",
    r"blocks\.(\d+)\.ffn\.net\.2": r"blocks.\1.ffn.2",
}

# The same for those of Wan that are outside of its blocks
WAN_OUTSIDE = {
    r"condition_embedder\.(text|time)_embedder\.linear_1": r"\1_embedding.0",
    r"condition_embedder\.(text|time)_embedder\.linear_2": r"\1_embedding.2",
    r"condition_embedder\.image_embedder\.ff\.net\.0\.proj": "img_emb.proj.1",
    r"condition_embedder\.image_embedder\.ff\.net\.2": "img_emb.proj.3",
    r"condition_embedder\.time_proj": "time_projection.1",
    r"proj_out": "head.head",
}

# What ComfyUI calls the modules that it does not find by diffusers' names. tests/comfyui_names.py has all its names. A
# family that is not here was not looked up
COMFYUI: dict[str, dict[str, str]] = {
    "StableDiffusion3": {},
    "Flux": {},
    "QwenImage": {},
    "ZImage": {},
    "Wan": WAN | WAN_OUTSIDE,
    "WanImageToVideo": WAN | WAN_OUTSIDE,
    "Flux2Klein": {
        r"((double|single)_stream_modulation(_img|_txt)?)\.linear": r"\1.lin",
        r"time_guidance_embed\.timestep_embedder\.linear_1": "time_in.in_layer",
        r"time_guidance_embed\.timestep_embedder\.linear_2": "time_in.out_layer",
    },
}

# What kohya's scripts call a module of diffusers': its name in the model's own code, by which they train. Modules of
# one name are rows of one matrix there: q, k, v and, in FLUX.1's single blocks, the MLP. By sd-scripts (48d368f):
KOHYA = {
    "StableDiffusion3": {
        r"transformer_blocks\.(\d+)\.attn\.to_[qkv]": r"joint_blocks.\1.x_block.attn.qkv",
        r"transformer_blocks\.(\d+)\.attn\.to_out\.0": r"joint_blocks.\1.x_block.attn.proj",
        r"transformer_blocks\.(\d+)\.attn\.add_[qkv]_proj": r"joint_blocks.\1.context_block.attn.qkv",
        r"transformer_blocks\.(\d+)\.attn\.to_add_out": r"joint_blocks.\1.context_block.attn.proj",
        r"transformer_blocks\.(\d+)\.attn2\.to_[qkv]": r"joint_blocks.\1.x_block.attn2.qkv",
        r"transformer_blocks\.(\d+)\.attn2\.to_out\.0": r"joint_blocks.\1.x_block.attn2.proj",
        r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj": r"joint_blocks.\1.x_block.mlp.fc1",
        r"transformer_blocks\.(\d+)\.ff\.net\.2": r"joint_blocks.\1.x_block.mlp.fc2",
        r"transformer_blocks\.(\d+)\.ff_context\.net\.0\.proj": r"joint_blocks.\1.context_block.mlp.fc1",
        r"transformer_blocks\.(\d+)\.ff_context\.net\.2": r"joint_blocks.\1.context_block.mlp.fc2",
    },
    "Flux": {
        r"transformer_blocks\.(\d+)\.attn\.to_[qkv]": r"double_blocks.\1.img_attn.qkv",
        r"transformer_blocks\.(\d+)\.attn\.to_out\.0": r"double_blocks.\1.img_attn.proj",
        r"transformer_blocks\.(\d+)\.attn\.add_[qkv]_proj": r"double_blocks.\1.txt_attn.qkv",
        r"transformer_blocks\.(\d+)\.attn\.to_add_out": r"double_blocks.\1.txt_attn.proj",
        r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj": r"double_blocks.\1.img_mlp.0",
        r"transformer_blocks\.(\d+)\.ff\.net\.2": r"double_blocks.\1.img_mlp.2",
        r"transformer_blocks\.(\d+)\.ff_context\.net\.0\.proj": r"double_blocks.\1.txt_mlp.0",
        r"transformer_blocks\.(\d+)\.ff_context\.net\.2": r"double_blocks.\1.txt_mlp.2",
        r"single_transformer_blocks\.(\d+)\.(attn\.to_[qkv]|proj_mlp)": r"single_blocks.\1.linear1",
        r"single_transformer_blocks\.(\d+)\.proj_out": r"single_blocks.\1.linear2",
    },
    # and by musubi-tuner (30c658c), whose Wan is Wan's own code, and whose other models have diffusers' names. It
    # trains no refiner blocks of Z-Image, but loads a LoRA on them
    "Wan": WAN,
    "WanImageToVideo": WAN,
    "QwenImage": {r"(transformer_blocks\..*)": r"\1"},
    "ZImage": {r"((layers|noise_refiner|context_refiner)\..*)": r"\1"},
}


# ---- reading ---------------------------------------------------------------------------------------------------------
def read_matrices(path: str | Path, model: str) -> dict[str, Matrices]:
    """{module: (A, B)} of a LoRA for the transformer of a model, of one rank, with alpha / rank in B.

    Raises:
        ValueError: what is wrong with it; the caller names the file.
    """
    with error_prefix("not a LoRA that can be read", Exception):  # whatever a library raises over its bytes
        tensors, settings = read_file(find_file(Path(path)))
        alpha_pattern = dict(settings.get("alpha_pattern") or {})
    check_kind(settings)
    encoders = [key for key in tensors if TEXT_ENCODERS.match(key)]
    if encoders:
        print(f"left out: {len(encoders)} tensors of text encoders")
    tensors = {key: tensor for key, tensor in tensors.items() if key not in encoders}
    if alpha_pattern:
        with error_prefix("alpha_pattern"):
            tensors = alphas_by_pattern(tensors, alpha_pattern, settings.get("lora_alpha")) | tensors
    weights, alphas = translate(tensors, model)
    found: dict[str, Matrices] = {}
    for module in sorted({name.rpartition(".lora_")[0] for name in weights}):
        a = weights.get(f"{module}.lora_A.weight")
        b = weights.get(f"{module}.lora_B.weight")
        if a is None or b is None or b.shape[1] != len(a):
            raise ValueError(f"{module}: its lora_A and lora_B are not of one rank, or one is missing")
        alpha = alphas.get(module, settings.get("lora_alpha", len(a)))
        if not is_alpha(alpha):
            raise ValueError(f"{module}: its alpha, {alpha}, is not one number above 0")
        root = len(a) ** 0.5 if settings.get("use_rslora") else len(a)
        found[module] = (a, b * (alpha / root))
    rank = max(len(a) for a, _ in found.values())
    return {module: padded(a, b, rank) for module, (a, b) in found.items()}


def alphas_by_pattern(
    tensors: Mapping[str, torch.Tensor], patterns: Mapping[str, Any], lora_alpha: Any
) -> dict[str, torch.Tensor]:
    """{key: alpha} of every module, where a file without peft's alpha_pattern has them.

    patterns: {end of a module's name, or a regular expression of it: alpha}, by the names that stand in the file behind
    its prefix. lora_alpha: of the modules that no pattern fits; None: their ranks.

    Raises:
        ValueError: a pattern fits no module, or an alpha is no number above 0.
    """
    from peft.utils.other import get_pattern_key  # slow

    matches = [match for match in map(KEY.fullmatch, tensors) if match and PARTS.get(match[2], match[2]) == "lora_A"]
    for pattern in patterns:
        with error_prefix(pattern, re.error):
            fits = any(get_pattern_key([pattern], match[1]) == pattern for match in matches)
        if not fits:
            raise ValueError(f"{pattern}: fits the name of no module in the file")
    found = {}
    for match in matches:
        rest = len(tensors[match.string]) if lora_alpha is None else lora_alpha
        alpha = patterns.get(get_pattern_key(list(patterns), match[1]), rest)
        if not is_alpha(alpha):
            raise ValueError(f"{match[1]}: its alpha, {alpha}, is not one number above 0")
        found[f"{match.string[: match.end(1)]}.alpha"] = torch.tensor(float(alpha))
    return found


def padded(a: torch.Tensor, b: torch.Tensor, rank: int) -> Matrices:
    """The matrices with zeros up to that rank: the same product."""
    missing = rank - len(a)
    return torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))


# ---- writing ---------------------------------------------------------------------------------------------------------
def names_for(loader: str, module: str, family: str) -> str:
    """The name of a module for diffusers, comfyui or kohya, before the part that says which tensor it is.

    Raises:
        ValueError: we do not have the loader's names for the family, or kohya's scripts do not train the module.
    """
    if loader == "kohya":
        if family not in KOHYA:
            raise ValueError(f"--to kohya has no names for {family}, only for {', '.join(KOHYA)}")
        name = renamed(module, KOHYA[family])
        if name is None:
            raise ValueError(f"{module}: kohya's scripts have no such module of {family}")
        return "lora_unet_" + name.replace(".", "_")
    if loader == "comfyui" and family not in COMFYUI:
        raise ValueError(f"--to comfyui has no names for {family}, only for {', '.join(COMFYUI)}")
    own = renamed(module, COMFYUI[family]) if loader == "comfyui" else None
    return f"transformer.{module}" if own is None else f"diffusion_model.{own}"


def renamed(module: str, names: Mapping[str, str]) -> str | None:
    """The module's other name by {pattern of diffusers' name: other name}; None where no pattern fits."""
    for pattern, name in names.items():
        if re.fullmatch(pattern, module):
            return re.sub(pattern, name, module)
    return None


def joined(matrices: dict[str, Matrices], family: str, shapes: dict[str, tuple[int, int]]) -> dict[str, Matrices]:
    """{kohya's name: (A, B)}, where modules that are rows of one matrix there are one: its rank is the sum of theirs.

    shapes: {module: (outputs, inputs)} of the transformer. A module without a LoRA has rows of zeros.
    """
    members: dict[str, list[str]] = {}
    for module in shapes:
        with contextlib.suppress(ValueError):  # what kohya does not train
            members.setdefault(names_for("kohya", module, family), []).append(module)
    found: dict[str, list[str]] = {}
    for module in matrices:
        found.setdefault(names_for("kohya", module, family), []).append(module)
    result = {}
    for name in found:
        rows = sorted(members[name], key=place_in_matrix)
        own = [module for module in rows if module in matrices]
        a = torch.cat([matrices[module][0] for module in own])  # (sum of ranks, inputs)
        b = torch.zeros(sum(shapes[module][0] for module in rows), len(a))
        top = left = 0
        for module in rows:
            if module in own:
                block = matrices[module][1]
                b[top : top + block.shape[0], left : left + block.shape[1]] = block
                left += block.shape[1]
            top += shapes[module][0]
        result[name] = (a, b)
    return result


def place_in_matrix(module: str) -> int:
    """Where a module's rows are in the matrix that kohya's scripts train: q, k, v, then the MLP."""
    part = re.search(r"(?:to|add)_([qkv])(?:_proj)?$", module)
    return "qkv".index(part[1]) if part else 3


def convert(
    matrices: dict[str, Matrices], loader: str, family: str, shapes: dict[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """The tensors of a file for diffusers, comfyui or kohya; alpha equals the rank in each. shapes: as for `joined`."""
    tensors: dict[str, torch.Tensor] = {}
    parts = ("lora_down", "lora_up") if loader == "kohya" else ("lora_A", "lora_B")
    by_name = {names_for(loader, module, family): pair for module, pair in matrices.items()}
    if loader == "kohya":
        by_name = joined(matrices, family, shapes)
    for name, pair in by_name.items():
        for part, matrix in zip(parts, pair, strict=True):
            tensors[f"{name}.{part}.weight"] = matrix.contiguous()
        if loader == "kohya":
            tensors[f"{name}.alpha"] = torch.tensor(float(len(pair[0])))
    return tensors


@torch.no_grad()
def merge(matrices: dict[str, Matrices], model: str, folder: str, dtype: torch.dtype) -> None:
    """Write the model's pipeline to `folder` with W + B A in the place of W in its transformer."""
    pipe = load_pipeline(model, dtype)
    for module, (a, b) in matrices.items():
        weight = pipe.transformer.get_submodule(module).weight
        weight.copy_(weight.float() + b @ a)
    pipe.vae.to(dtype)
    with writing(folder):
        pipe.save_pretrained(folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("convert", "merge"):
        command = commands.add_parser(name)
        command.add_argument("file", help="a LoRA: a file, or a folder of peft's or of a run")
        command.add_argument("out", help="file to write" if name == "convert" else "folder to write")
        command.add_argument("--model", required=True, help="folder or hub id of the pipeline that it is for")
        command.add_argument("--scale", type=float, default=1.0, help="strength; 1 is the LoRA's own")
        if name == "convert":
            command.add_argument("--to", choices=("diffusers", "comfyui", "kohya"), default="diffusers")
        else:
            command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    args = parser.parse_args(argv)
    repair_torchvision()  # before diffusers is imported
    try:
        if Path(args.out).exists():
            raise ValueError(f"{args.out} exists already")
        family = ""  # which the names of diffusers do not need
        if args.command == "convert" and args.to != "diffusers":
            family = family_class(args.model).__name__
        family = family.removesuffix("Kontext").removesuffix("EditPlus")  # with the transformers of FLUX.1, Qwen-Image
        with error_prefix(f"--model {args.model}", (OSError, KeyError)):
            if has_two_transformers(args.model):
                raise ValueError("has two transformers, each with a LoRA in a file of its own, which stay as they are")
            shapes = linear_shapes(args.model)
        with error_prefix(args.file):
            matrices = read_matrices(args.file, args.model)
            scaled = {module: (a, b * args.scale) for module, (a, b) in matrices.items()}
            if not all(b.isfinite().all() for _, b in scaled.values()):
                raise ValueError(f"--scale {args.scale}: gives values that are NaN or infinite")
            if args.command == "convert":
                tensors = convert(scaled, args.to, family, shapes)
        if args.command == "convert":
            with atomic_file(args.out) as temporary:
                save_file(tensors, temporary, metadata={"format": "pt"})
        else:
            merge(scaled, args.model, args.out, getattr(torch, args.dtype))
    except (ValueError, OSError, RunError) as error:
        sys.exit(f"tools.lora: error: {error}")
    print(f"{args.out}: {len(matrices)} modules of rank {len(next(iter(matrices.values()))[0])}")


if __name__ == "__main__":
    main()
