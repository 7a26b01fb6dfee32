"""From --model, a diffusers folder or hub id, to its family and its loaded pipeline, or to a line that says what to do.

A family is found by the name of its file (family.py has the rule). Checkpoints are checked as people have them: the
files that are there, before anything is loaded.
"""

import importlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import RunError, error_prefix
from common.models.family import Family
from common.models.vae import to_bfloat16
from common.process import print_message, print_once
from common.user_code import load_function

import numpy as np
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError
from safetensors import safe_open

if TYPE_CHECKING:  # importing it takes seconds
    import diffusers

OTHER_TASKS = re.compile("Img2Img|Inpaint|ControlNet|Control|Fill|Edit|PAG")
OTHER_KINDS = re.compile(r"stable-diffusion-(xl|v1|2)|sdxl|sd-v1|sd15")
WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(\w+))??(?:-\d+-of-\d+)?\.(?:safetensors|bin)"
)
SMALL_SIZE = (32, 96)
LFS = b"version https://git-lfs"  # how the file begins that git-lfs leaves in the place of another
FULL = "pass the full weights, in diffusers' layout"


# ---- finding the family ----------------------------------------------------------------------------------------------
def find_family(
    model: str | Path,
    height: int,
    width: int,
    num_frames: int,
    guidance_scale: float = 1.0,
    max_sequence_length: int = 1,
    own: str | None = None,
) -> type[Family]:
    """The family of a diffusers folder or hub id, after its `check` of size, frames and guidance. Loads no weights.

    own: --family, a user's own family instead of those in this folder.

    Raises:
        ValueError: one line that names the option and what is wrong: a model that is missing or not supported, a
            config that cannot be read, what `check` refuses, or more tokens than the family takes.
    """
    family = family_class(model, own)
    with error_prefix(f"--model {model}", (OSError, KeyError)):
        check_layout(model)
        family.check(model, height, width, num_frames, guidance_scale)
    longest = family.longest_prompt
    if max_sequence_length > longest:
        raise ValueError(
            f"--max_sequence_length {max_sequence_length}: {family.__name__} takes {longest} tokens at most"
        )
    if not Path(model).is_dir() and (height, width) == SMALL_SIZE:  # the defaults, for a published model
        print_once(
            f"--model {model}: --image_size 32 96 is the embedded model's; docs/models.md has what this one needs"
        )
    return family


def family_class(model: str | Path, own: str | None = None) -> type[Family]:
    """The family of a diffusers folder or hub id, from its model_index.json alone; or `own`, a user's file.py:Class.

    Raises:
        ValueError: names what is missing, or the families that are supported.
    """
    if own:
        family: Any = load_function(own, "--family")
        if not (isinstance(family, type) and issubclass(family, Family)):
            raise ValueError(f"--family {own}: is not a class that inherits from Family (common/models/family.py)")
    else:
        family = shipped_family(model)
    missing = sorted(family.__abstractmethods__)
    if not hasattr(family, "lora_target_modules"):
        missing.append("lora_target_modules")
    if missing:
        raise ValueError(f"{inspect.getfile(family)}: {family.__name__} lacks {', '.join(missing)}")
    return family


def shipped_family(model: str | Path) -> type[Family]:
    """The family in this folder for the pipeline of a diffusers folder or hub id; raises as family_class does."""
    folder = Path(model)
    if folder.is_dir():
        index = folder / "model_index.json"
        if not index.is_file():
            raise ValueError(f"--model {model}: not a diffusers pipeline (no model_index.json)")
    else:
        index = download_index(str(model))
    with error_prefix(f"--model {model}: model_index.json", Exception):
        pipeline = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    wanted = str(pipeline).lower().removesuffix("pipeline")
    files = sorted(Path(__file__).parent.glob("*.py"))
    found = [file.stem for file in files if file.stem.replace("_", "") == wanted]
    if not found:
        raise ValueError(f"--model {model}: {pipeline} is not supported; {explain_pipeline(pipeline, files)}")
    module = importlib.import_module(f"common.models.{found[0]}")
    name = pipeline.removesuffix("Pipeline")
    if not hasattr(module, name):
        raise ValueError(f"--model {model}: common/models/{found[0]}.py has no class {name}")
    return getattr(module, name)


def download_index(model: str) -> Path:
    """The model_index.json of a hub id, in the hub's cache.

    Raises:
        ValueError: it is a file, or cannot be downloaded; of a gated model, in a line that says how it can.
    """
    if model.endswith(".gguf"):
        what = "a GGUF file holds quantised weights of a transformer alone"
        raise ValueError(f"--model {model}: {what}: pass the full weights, in diffusers' layout")
    if Path(model).is_file():
        convert = f'PIPELINE.from_single_file("{model}").save_pretrained("FOLDER")'
        raise ValueError(
            f"--model {model}: a single file: convert it, {convert}, where PIPELINE is diffusers' class, such as "
            "StableDiffusion3Pipeline, and pass FOLDER"
        )
    try:
        if model.startswith((".", "/", "~")) or model.count("/") > 1:  # a path, and no hub id
            raise ValueError(f"--model {model}: no such folder")
        with error_prefix(f"--model {model}: no such folder, and no model that can be downloaded"):
            return Path(hf_hub_download(model, "model_index.json"))
    except ValueError as error:
        if OTHER_KINDS.search(model.lower()):
            old = "it looks like a model of before flow matching, which is not supported"
            raise ValueError(f"{error}; {old}") from error
        if not isinstance(error.__cause__, GatedRepoError):
            raise
        how = "accept the licence on its page on the hub, and log in with `hf auth login` or HF_TOKEN"
        raise ValueError(f"--model {model}: it is gated; {how} (docs/quickstart_gpu.md)") from error


def explain_pipeline(pipeline: str, files: list[Path]) -> str:
    """Which families there are, and what may be done about a pipeline class without one. files: of common/models/."""
    known = []
    for file in files:  # wan_image_to_video.py is of a family: it has a class WanImageToVideo(...)
        classes = re.findall(r"^class (\w+)\((?!ABC|NamedTuple)", file.read_text("utf-8"), re.MULTILINE)
        if file.stem.replace("_", "") in map(str.lower, classes):
            known.append(file.stem)
    told = f"supported: {', '.join(known)}"
    plain = OTHER_TASKS.sub("", pipeline)
    if plain != pipeline and plain.lower().removesuffix("pipeline") in [stem.replace("_", "") for stem in known]:
        told += f'; if its weights are those of {plain}, change "_class_name" in its model_index.json to that'
    return told


# ---- what the folder holds -------------------------------------------------------------------------------------------
def components(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, config) of the networks in a pipeline's folder, as far as they are there."""
    for name in json.loads((folder / "model_index.json").read_text(encoding="utf-8")):
        config = folder / name / "config.json"
        if config.is_file():
            with error_prefix(config):
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
        ValueError: names the component, which is quantised or has no weights, or the file that holds no weights.
    """
    folder = known_folder(model)
    if folder is None:
        return
    for name, config in components(folder):
        quantised = config.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method", "an unknown method") if isinstance(quantised, dict) else quantised
            raise ValueError(f"--model {model}: {name} is quantised ({method}): {FULL}")
        if folder == Path(model) and not variants(folder / name):
            raise ValueError(f"--model {model}: {name} has no weights (*.safetensors or *.bin)")
        with error_prefix(f"--model {model}"):
            stored_dtypes(folder / name)


# ---- schedules -------------------------------------------------------------------------------------------------------
def check_schedules(
    family: type[Family], model: str, schedules: Sequence[tuple[str, int, tuple[int, int]]], num_frames: int
) -> None:
    """Make each schedule once, from the model's configs.

    schedules: (option, number of sampling steps, (height, width)).

    Raises:
        ValueError: naming the option: its sigmas are not finite, or do not decrease. With the terminal shift of
            Qwen-Image, for example, the only sigma of one step is 0 / 0.
    """
    with error_prefix(f"--model {model}", Exception):  # whatever a library raises over a stranger's files
        blank = family(pipeline_without_weights(model))
    for option, num_steps, size in schedules:
        with error_prefix(f"{option} {num_steps}", Exception), np.errstate(all="ignore"):
            _, sigmas, _ = blank.schedule(num_steps, *size, num_frames)
            if not sigmas.isfinite().all() or (sigmas.diff() >= 0).any():
                first = ", ".join(f"{sigma:g}" for sigma in sigmas[:4].tolist())
                fault = f"the scheduler of --model {model} makes sigmas that are not finite or do not decrease"
                raise ValueError(f"{fault}: {first}{' ...' if num_steps > 3 else ''}")


def pipeline_without_weights(model: str | Path) -> "diffusers.DiffusionPipeline":
    """The pipeline of a folder or hub id, from its configs: a transformer and a VAE on the meta device, and a
    scheduler. Its other components are None."""
    import diffusers  # slow

    index = diffusers.DiffusionPipeline.load_config(model)
    pipeline_class = getattr(diffusers, index["_class_name"])
    parts: dict[str, Any] = {}
    for name, parameter in inspect.signature(pipeline_class).parameters.items():
        value = index.get(name)
        is_component = value is None or isinstance(value, list)  # [library, class]
        if parameter.default is parameter.empty or not is_component:
            parts[name] = None if is_component else value
    with torch.device("meta"):
        for name in ("transformer", "vae"):
            part_class = getattr(diffusers, index[name][1])
            parts[name] = part_class.from_config(part_class.load_config(model, subfolder=name))
            parts[name].requires_grad_(False).eval()
    parts["scheduler"] = getattr(diffusers, index["scheduler"][1]).from_pretrained(model, subfolder="scheduler")
    return pipeline_class(**parts)


# ---- loading ---------------------------------------------------------------------------------------------------------
def load_model(
    family: type[Family],
    model: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    vae_dtype: str = "float32",
) -> Family:
    """Load a pipeline, frozen and in eval mode, and give it to its family.

    Everything stays on the CPU. Later fully_shard moves the transformer to `device`, block by block, and `on_device`
    moves the rest. The VAE is fp32, or bf16 by vae_dtype.
    """
    import transformers  # slow, as diffusers is
    from diffusers.utils.logging import disable_progress_bar

    print_message(f"loading {model}")
    disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # whose output is a view; we do not write into it
    try:
        with error_prefix(f"--model {model}", Exception):  # whatever a library raises over a stranger's files
            pipe = load_pipeline(model, dtype)
    except ValueError as error:
        raise RunError(str(error)) from error
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    if vae_dtype == "bfloat16":
        to_bfloat16(pipe.vae)
    # For --train_with compile: SD3.5 has three kinds of block, each with three graphs (with gradient, without, and
    # recomputed by activation checkpointing). By default dynamo stops compiling after 8.
    torch._dynamo.config.recompile_limit = 64
    loaded = family(pipe)
    loaded.device = torch.device(device)
    return loaded


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
            print_message(f"--model {model}: {name} is stored in float8, and loaded in --dtype")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    options |= {name: None for name, value in index.items() if value == [None, None]}
    return options


def stored_dtypes(folder: Path) -> set[str]:
    """The dtypes, by safetensors' names for them, of the tensors in a folder's files; reads the headers alone.

    Raises:
        ValueError: a file has no header that fits it, as one that git-lfs has not fetched, or one that is cut.
    """
    found = set()
    for path in sorted(file for file in folder.iterdir() if WEIGHTS.fullmatch(file.name)):
        with error_prefix(path, Exception):  # whatever a damaged header makes safetensors raise
            with open(path, "rb") as opened:
                is_pointer = opened.read(len(LFS)) == LFS
            if is_pointer:
                size = path.stat().st_size
                raise ValueError(f"a git-lfs pointer of {size} bytes, not weights: run `git lfs pull` in its folder")
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as weights:
                    found |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    return found


def load_pipeline(model: str | Path, dtype: torch.dtype) -> "diffusers.DiffusionPipeline":
    """diffusers' pipeline of a folder or hub id, its VAE in fp32."""
    from diffusers import DiffusionPipeline  # slow

    dtypes = {"default": dtype, "vae": torch.float32}
    return DiffusionPipeline.from_pretrained(model, dtype=dtypes, **loading_options(model))
