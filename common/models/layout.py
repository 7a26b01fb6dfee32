"""Checkpoints as people have them: what a pipeline's folder holds, before it is loaded, and what to do about it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import refusing
from common.process import say

import torch
from huggingface_hub import try_to_load_from_cache

if TYPE_CHECKING:
    from common.models.family import Family

    import diffusers

WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(\w+))??(?:-\d+-of-\d+)?\.(?:safetensors|bin)"
)
SMALL_SIZE = (32, 96)
FULL = "pass the full weights, in diffusers' layout"


# ---- what the folder holds -----------------------------------------------------------------------------------------
def components(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, config) of the networks in a pipeline's folder, as far as they are there."""
    for name in json.loads((folder / "model_index.json").read_text(encoding="utf-8")):
        config = folder / name / "config.json"
        if config.is_file():
            with refusing(config):
                yield name, json.loads(config.read_text(encoding="utf-8"))


def variants(folder: Path) -> set[str]:
    """The variants ("" for the plain files, "fp16") of the weights in a component's folder."""
    found = [WEIGHTS.fullmatch(file.name) for file in folder.iterdir()]
    return {match[1] or "" for match in found if match}


def known_folder(model: str | Path) -> Path | None:
    """The folder, or that of a hub id in the cache, which need not be complete; None where there is neither."""
    if Path(model).is_dir():
        return Path(model)
    cached = try_to_load_from_cache(str(model), "model_index.json")
    return Path(cached).parent if isinstance(cached, str) else None


def check_layout(model: str | Path) -> None:
    """Refuse what cannot be loaded, by the files that are there: a folder's, or those of a hub id in the cache.

    Raises:
        ValueError: names the component: it is quantised, or a folder lacks its weights.
    """
    folder = known_folder(model)
    for name, config in components(folder) if folder else ():
        quantised = config.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method", "an unknown method") if isinstance(quantised, dict) else quantised
            raise ValueError(f"--model {model}: {name} is quantised ({method}): {FULL}")
        if folder == Path(model) and not variants(folder / name):
            raise ValueError(f"--model {model}: {name} has no weights (*.safetensors or *.bin)")


def check_sizes(
    family: "type[Family]", model: str | Path, image_size: tuple[int, int], max_sequence_length: int
) -> None:
    """Warn where a published model gets the embedded model's sizes, which are the defaults.

    Raises:
        ValueError: more tokens than the family takes.
    """
    longest = family.longest_prompt
    if max_sequence_length > longest:
        raise ValueError(
            f"--max_sequence_length {max_sequence_length}: {family.__name__} takes {longest} tokens at most"
        )
    if not Path(model).is_dir() and image_size == SMALL_SIZE:
        say(f"--model {model}: --image_size 32 96 is the embedded model's; docs/models.md has what this one needs")


def loading_options(model: str | Path) -> dict[str, Any]:
    """What from_pretrained needs to be told of a pipeline that is on this machine: {} for most.

    Of weights that are there as a variant alone, such as *.fp16.safetensors, its name. For encoders that the pipeline
    was saved without, as SD3 without T5, None. A line says where weights are in float8, which are loaded in --dtype.
    """
    from diffusers import DiffusionPipeline  # slow

    folder = Path(model)
    if not folder.is_dir():
        folder = Path(DiffusionPipeline.download(model))
    options: dict[str, Any] = {}
    for name, _ in components(folder):
        found = variants(folder / name)
        if not found and not Path(model).is_dir():
            folder = Path(DiffusionPipeline.download(model, variant="fp16"))
            found = variants(folder / name)
        if found and "" not in found:
            options["variant"] = sorted(found)[0]
        if any(dtype.startswith("F8") for dtype in stored_dtypes(folder / name)):
            say(f"--model {model}: {name} is stored in float8, and loaded in --dtype")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    options |= {name: None for name, value in index.items() if value == [None, None]}
    return options


def stored_dtypes(folder: Path) -> set[str]:
    """The dtypes, by safetensors' names for them, of the tensors in a folder's files; reads the headers alone."""
    found = set()
    for path in folder.glob("*.safetensors"):
        with refusing(path), open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            found |= {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return found


def load_pipeline(model: str | Path, dtype: torch.dtype) -> "diffusers.DiffusionPipeline":
    """diffusers' pipeline of a folder or hub id, its VAE in fp32."""
    from diffusers import DiffusionPipeline  # slow

    dtypes = {"default": dtype, "vae": torch.float32}
    return DiffusionPipeline.from_pretrained(model, dtype=dtypes, **loading_options(model))
