"""From --model, a diffusers folder or hub id, to its family and its loaded pipeline, or to a line that says what to do.

A family is found by the name of its file (family.py has the rule). Weights that are there as a variant alone, such as
model.fp16.safetensors, load as if they had plain names, in the trainer and in the engine.
"""

import importlib
import inspect
import json
import re
import socket
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from common.errors import RunError, error_prefix, reason
from common.models.family import ENCODERS, Family
from common.models.vae import to_bfloat16
from common.optional import optional_part
from common.process import print_message, print_once
from common.user_code import load_function

import numpy as np
import torch
from huggingface_hub import (
    get_session,
    hf_hub_download,
    hf_hub_url,
    list_repo_files,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import GatedRepoError
from safetensors import safe_open

if TYPE_CHECKING:  # importing it takes seconds
    import diffusers

SMALL_SIZE = (32, 96)
PROBE_S = 2.0  # how long the hub may take to answer before its client asks
LFS_POINTER = b"version https://git-lfs"  # how the small file begins that a clone without git-lfs has for a large one
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")  # of tokenizers; those of sentencepiece are *.model
NETWORKS = ("transformer", "vae", *ENCODERS)  # how the names of the components begin that have weights
STEM = "(diffusion_pytorch_model|pytorch_model|model)"
# A file of weights: stem, shard, variant, shard, format. A shard's number stands behind the variant, formerly before it
WEIGHTS = re.compile(rf"{STEM}(-\d+-of-\d+)?(?:\.(\w+))?(-\d+-of-\d+)?\.(safetensors|bin)")
# The index of shards: stem, format and the variant, which stands before "index" or behind it
INDEX = re.compile(rf"{STEM}\.(safetensors|bin)(?:\.(\w+))?\.index(?:\.(\w+))?\.json")


# ---- finding the family ----------------------------------------------------------------------------------------------
def find_family(
    model: str | Path,
    height: int,
    width: int,
    num_frames: int,
    guidance_scale: float = 1.0,
    max_sequence_length: int = 1,
    own: str | None = None,
    needs_weights: bool = True,
) -> type[Family]:
    """The family of a diffusers folder or hub id, after its `check` of size, frames and guidance. Loads no weights.

    own: --family, a user's own family instead of those in this folder. needs_weights: False for a plan, which a folder
    of configs is enough for.

    Raises:
        ValueError: one line that names the option and what is wrong: a model that is missing or not supported, a
            config that cannot be read, a folder's file that holds no weights, what `check` refuses, or more tokens
            than the family takes.
    """
    family = family_class(model, own)
    if num_frames > 1 and not family.makes_videos:
        raise ValueError(f"--num_frames {num_frames}: this model makes images, which have 1 frame")
    with error_prefix(f"--model {model}", (OSError, KeyError)):
        check_unquantised(model)
        check_weight_files(model, needs_weights)
        family.check(model, height, width, num_frames, guidance_scale)
    if max_sequence_length > family.longest_prompt:
        longest = f"{family.__name__} takes {family.longest_prompt} tokens at most"
        raise ValueError(f"--max_sequence_length {max_sequence_length}: {longest}")
    if not Path(model).is_dir() and (height, width) == SMALL_SIZE:  # the defaults, for a published model
        print_once(
            f"--model {model}: --image_size 32 96 is the embedded model's; docs/models.md has what this one needs"
        )
    return family


def family_class(model: str | Path, own: str | None = None) -> type[Family]:
    """The family of a diffusers folder or hub id, from its model_index.json alone; or `own`, a user's file.py:Class.

    Raises:
        ValueError: the model is missing, or no family serves its pipeline; or `own` is no family.
    """
    if own:
        family: Any = load_function(own, "--family")
        if not (isinstance(family, type) and issubclass(family, Family)):
            raise ValueError(f"--family {own}: is not a class that inherits from Family (common/models/family.py)")
        missing = [*family.__abstractmethods__]
        if not hasattr(family, "lora_target_modules"):
            missing.append("lora_target_modules")
        if missing:
            raise ValueError(f"--family {own}: lacks {', '.join(sorted(missing))}")
        return family
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
    found = [file.stem for file in Path(__file__).parent.glob("*.py") if file.stem.replace("_", "") == wanted]
    if not found:
        raise ValueError(f"--model {model}: {pipeline} is not supported; docs/models.md has the models that are")
    module = importlib.import_module(f"common.models.{found[0]}")
    name = pipeline.removesuffix("Pipeline")
    if not hasattr(module, name):
        raise ValueError(f"--model {model}: common/models/{found[0]}.py has no class {name}")
    return getattr(module, name)


def download_index(model: str) -> Path:
    """The model_index.json of a hub id, in the hub's cache. ValueError: it is a file, or cannot be downloaded."""
    if model.endswith(".gguf") or Path(model).is_file():
        raise ValueError(f"--model {model}: a single file: pass a folder in diffusers' layout")
    try:
        with error_prefix(f"--model {model}: no such folder, and no model that can be downloaded"):
            if known_folder(model) is None:
                check_reachable(hf_hub_url(model, "model_index.json"))
            return Path(hf_hub_download(model, "model_index.json"))
    except ValueError as error:
        if not isinstance(error.__cause__, GatedRepoError):
            raise
        how = "accept the licence on its page on the hub, and log in with `hf auth login` or HF_TOKEN"
        raise ValueError(f"--model {model}: it is gated; {how} (docs/quickstart_gpu.md)") from error


def check_reachable(url: str) -> None:
    """ValueError: the connection is refused, or there is no address of this name. The hub's client would ask five more
    times, with pauses of 23 s. Whatever else happens, also silence, is left to it: a slow network may work."""
    try:
        get_session().head(url, timeout=PROBE_S)
    except Exception as error:  # whose class is httpx's or httpx2's, by the version of huggingface_hub
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__ or cause
        if isinstance(cause, socket.gaierror | ConnectionRefusedError):
            raise ValueError(f"no connection to {urlsplit(url).hostname} ({reason(cause)})") from error
        # whatever else it is, the hub's client meets it again


def known_folder(model: str | Path) -> Path | None:
    """The folder, or that of a hub id in the cache, which need not be complete; None where there is neither."""
    if Path(model).is_dir():
        return Path(model)
    cached = try_to_load_from_cache(str(model), "model_index.json")
    return Path(cached).parent if isinstance(cached, str) else None


def check_unquantised(model: str | Path) -> None:
    """ValueError: a component is quantised, by the configs of a folder, or of a hub id as far as they are cached."""
    folder = known_folder(model)
    for config in sorted(folder.glob("*/config.json")) if folder else ():
        with error_prefix(config, Exception):  # whatever a file that is no config has in it
            is_quantised = json.loads(config.read_text(encoding="utf-8")).get("quantization_config")
        if is_quantised:
            what = f"{config.parent.name} is quantised: pass the full weights, in diffusers' layout"
            raise ValueError(f"--model {model}: {what}")


def check_weight_files(model: str | Path, needs_weights: bool = True) -> None:
    """Read the header of each file of weights that a folder's components load; a hub id is not looked at.

    needs_weights: whether all that the pipeline's class takes must be there, and each network's weights.

    Raises:
        ValueError: naming the file, which git-lfs has not fetched, which has no header that fits it, or which is
            missing.
    """
    if not (Path(model) / "model_index.json").is_file():
        return
    for folder in components(model, needs_all=needs_weights):
        if not folder.is_dir():  # diffusers makes a tokenizer of nothing in some cases
            raise ValueError(f"--model {model}: {folder.name}/ is missing, which model_index.json names")
        weights = find_weights(file.name for file in folder.iterdir())
        with error_prefix(f"--model {model}: {folder.name}"):
            if folder.name.startswith(NETWORKS):
                if not (folder / "config.json").is_file():
                    raise ValueError("config.json is missing")
                if needs_weights and not weights.files:
                    raise ValueError("no weights in it (*.safetensors or *.bin)")
            if folder.name.startswith("tokenizer") and not any(
                file.name in VOCABULARIES or file.suffix == ".model" for file in folder.iterdir()
            ):  # of which transformers makes a tokenizer that knows no word
                raise ValueError(f"no vocabulary in it ({', '.join(VOCABULARIES)} or *.model)")
            _check_shards(folder, weights.files)
        for name in sorted(set(weights.files.values())):
            if name.endswith(".safetensors"):
                with error_prefix(f"--model {model}: {folder.name}/{name}", Exception):  # whatever safetensors raises
                    check_header(folder / name)


def _check_shards(folder: Path, files: Mapping[str, str]) -> None:
    """ValueError: a component lacks the index of its shards, or one of them. files: of `find_weights`.

    Libraries load one format, safetensors where it is there. Beside a whole file transformers pass over an index, and
    diffusers take it.
    """
    kind = "safetensors" if any(".safetensors" in name for name in files) else "bin"
    of_kind = {plain: name for plain, name in files.items() if f".{kind}" in plain}
    indices = sorted(name for name in of_kind.values() if name.endswith(".json"))
    shards = {name for name in of_kind.values() if "-of-" in name}
    is_whole = len(of_kind) > len(indices) + len(shards)
    takes_index = kind == "safetensors" and not folder.name.startswith(ENCODERS)
    if is_whole and not (takes_index and indices):
        return
    if shards and not indices:
        raise ValueError(f"{min(shards)} is a shard, and the index of the shards is missing")
    for index in indices:
        with error_prefix(index, Exception):
            wanted = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
        for name in sorted(wanted):
            if not (folder / name).is_file():
                raise ValueError(f"{name} is missing, which {index} names")


def check_header(file: Path) -> None:
    """Raises what is wrong with a file of safetensors, by its header."""
    with open(file, "rb") as opened:
        is_pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
    if is_pointer:
        raise ValueError("a pointer of git-lfs, not weights: run `git lfs pull` in the model's folder")
    with safe_open(file, framework="pt"):
        pass


def components(model: str | Path, needs_all: bool = False) -> list[Path]:
    """The folders of the components that the pipeline in a folder has, by its model_index.json; some may be missing.

    Raises:
        ValueError: the file cannot be read or, with needs_all, lacks a component that the pipeline's class takes.
    """
    import diffusers  # slow

    index = Path(model) / "model_index.json"
    with error_prefix(f"--model {model}: model_index.json", Exception):
        entries = json.loads(index.read_text(encoding="utf-8"))
        # a component is [library, class]; other entries are numbers, versions, and [null, null] where there is none
        found = [
            index.parent / name
            for name, value in entries.items()
            if isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value)
        ]
        lacking = {"transformer", "vae", "scheduler"} - {folder.name for folder in found}
        if needs_all:
            parameters = inspect.signature(getattr(diffusers, entries["_class_name"])).parameters.values()
            lacking |= {one.name for one in parameters if one.default is one.empty} - entries.keys()
        if lacking:
            raise ValueError(f"names no {', '.join(sorted(lacking))}")
    return found


# ---- files of weights ------------------------------------------------------------------------------------------------
class Weights(NamedTuple):
    """The files of weights that a component loads."""

    files: dict[str, str]  # {the plain name: the file's name}, the shards' index included
    variant: str  # "" for plain files
    others: list[str]  # variants that are there as well


def find_weights(names: Iterable[str]) -> Weights:
    """Of the names of a component's files: the plain files of weights or, without any, those of one variant.

    Of several variants it is that of the highest precision: fp32, then bf16 and fp16, then others by name. Shards keep
    their names, by which their index finds them.
    """
    by_variant: dict[str, dict[str, str]] = {}
    for name in names:
        if match := WEIGHTS.fullmatch(name):
            stem, shard, variant, shard_behind, kind = match.groups()
            plain = name if shard or shard_behind else f"{stem}.{kind}"
        elif match := INDEX.fullmatch(name):
            stem, kind, before, behind = match.groups()
            variant, plain = before or behind, f"{stem}.{kind}.index.json"
        else:
            continue
        by_variant.setdefault(variant or "", {})[plain] = name
    having = {variant: files for variant, files in by_variant.items() if not all(map(INDEX.fullmatch, files))}
    first = ["", "fp32", "bf16", "fp16"]
    variant, *others = [*(name for name in first if name in having), *sorted(having.keys() - {*first})] or [""]
    return Weights(having.get(variant, {}), variant, others)


def variants_of(model: Path) -> dict[str, Weights]:
    """{component: the files of the variant that it loads} of a folder, without those that have plain files."""
    folders = [folder for folder in components(model) if folder.is_dir()]
    found = {folder.name: find_weights(file.name for file in folder.iterdir()) for folder in folders}
    return {name: weights for name, weights in found.items() if weights.variant}


@contextmanager
def plain_weights(folder: Path) -> Iterator[Path]:
    """A pipeline's folder in which each component has plain files of weights and no others.

    It is `folder` itself where that has no variants. Otherwise it is a folder of links, for as long as the block runs:
    libraries look for plain names, and vLLM-Omni would load a variant's files beside the plain ones.
    """
    names = {part.name: {file.name for file in part.iterdir()} for part in folder.iterdir() if part.is_dir()}
    of_variants = {part: {name for name in files if is_of_variant(name)} for part, files in names.items()}
    if not any(of_variants.values()):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="cleanflow_") as temporary:
        for item in folder.absolute().iterdir():
            link = Path(temporary) / item.name
            if not of_variants.get(item.name):
                link.symlink_to(item)
                continue
            link.mkdir()
            others = {name: name for name in names[item.name] - of_variants[item.name]}
            for plain, name in (others | find_weights(names[item.name]).files).items():
                (link / plain).symlink_to(item / name)
        yield Path(temporary)


def is_of_variant(name: str) -> bool:
    """Whether a file is one of weights, or their index, with a variant in its name."""
    weights, index = WEIGHTS.fullmatch(name), INDEX.fullmatch(name)
    return bool((weights and weights[3]) or (index and (index[3] or index[4])))


def downloaded(model: str | Path) -> Path:
    """A folder as it is; the folder of a hub id in the cache, with what its components load and no more.

    diffusers downloads plain files. Components that have none get those of a variant.
    """
    from diffusers import DiffusionPipeline  # slow

    if Path(model).is_dir():
        return Path(model)
    folder = Path(DiffusionPipeline.download(str(model)))
    wanted = []
    for part in components(folder):
        there = [file.name for file in part.iterdir()] if part.is_dir() else []
        if part.name.startswith(NETWORKS) and not find_weights(there).files:
            prefix = f"{part.name}/"
            names = [name.removeprefix(prefix) for name in list_repo_files(str(model)) if name.startswith(prefix)]
            wanted += [prefix + name for name in find_weights(names).files.values()]
    return Path(snapshot_download(str(model), allow_patterns=wanted)) if wanted else folder


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
                raise ValueError(f"the scheduler of {model} makes sigmas that are not finite or do not decrease")


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
        for name in ("transformer", "transformer_2", "vae"):
            if name != "transformer_2" or is_of_two(index):
                part_class = getattr(diffusers, index[name][1])
                parts[name] = part_class.from_config(part_class.load_config(model, subfolder=name))
                parts[name].requires_grad_(False).eval()
    parts["scheduler"] = getattr(diffusers, index["scheduler"][1]).from_pretrained(model, subfolder="scheduler")
    return with_one_transformer(pipeline_class(**parts))


def is_of_two(index: Mapping[str, Any]) -> bool:
    """Whether a model_index.json names two transformers, one for high and one for low noise."""
    return bool((index.get("transformer_2") or [None])[0])  # [library, class], or [null, null]


def has_two_transformers(model: str | Path) -> bool:
    """Whether the pipeline of a folder or hub id has two transformers, by its model_index.json."""
    from diffusers import DiffusionPipeline  # slow

    return is_of_two(DiffusionPipeline.load_config(model))


def with_one_transformer(pipe: "diffusers.DiffusionPipeline") -> "diffusers.DiffusionPipeline":
    """The pipeline with a module of its two transformers, if it has two, as its one `transformer`."""
    if getattr(pipe, "transformer_2", None) is not None:
        boundary = pipe.config.boundary_ratio * pipe.scheduler.config.num_train_timesteps
        experts = optional_part("models.experts", "--model, which has two transformers,")
        pipe.transformer, pipe.transformer_2 = experts.Experts(pipe.transformer, pipe.transformer_2, boundary), None
    return pipe


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
        to_bfloat16(pipe.vae, device)
    # For --train_with compile: SD3.5 has three kinds of block, each with three graphs (with gradient, without, and
    # recomputed by activation checkpointing). By default dynamo stops compiling after 8.
    torch._dynamo.config.recompile_limit = 64
    loaded = family(pipe)
    loaded.device = torch.device(device)
    return loaded


def check_transformer(folder: Path) -> None:
    """ValueError: the files of a transformer lack a weight that its config has: diffusers would draw it at random."""
    transformer = pipeline_without_weights(folder).transformer
    parts = {"transformer": transformer}
    if has_two_transformers(folder):
        parts = dict(transformer.named_children())
    for part, module in parts.items():
        names = find_weights(file.name for file in (folder / part).iterdir()).files.values()
        held: set[str] = set()
        for name in names:
            if name.endswith(".safetensors"):
                with safe_open(folder / part / name, framework="pt") as opened:
                    held |= set(opened.keys())
        wanted = [name for name, _ in module.named_parameters()]
        lacking = [name for name in wanted if name not in held]
        is_readable = all(name.endswith((".safetensors", ".json")) for name in names)  # a pickle has no header
        if lacking and is_readable:
            count = f"{len(lacking)} of its {len(wanted)} weights"
            raise ValueError(f"{part}: its files lack {count}, such as {lacking[0]}")


def load_pipeline(model: str | Path, dtype: torch.dtype) -> "diffusers.DiffusionPipeline":
    """diffusers' pipeline of a folder or hub id, its VAE in fp32, without the encoders that it was saved without.

    A line names the components that are there as a variant alone.
    """
    from diffusers import DiffusionPipeline  # slow

    dtypes = {"default": dtype, "vae": torch.float32}
    folder = downloaded(model)
    for name, weights in variants_of(folder).items():
        others = f", and not {', '.join(weights.others)}" if weights.others else ""
        print_message(f"--model {model}: {name} has no plain weights: loading its variant {weights.variant}{others}")
    check_transformer(folder)
    with plain_weights(folder) as plain:
        index = DiffusionPipeline.load_config(str(plain))
        missing = {name: None for name, value in index.items() if value == [None, None]}  # as SD3's T5 may be
        pipe = DiffusionPipeline.from_pretrained(str(plain), dtype=dtypes, **missing)
    pipe.register_to_config(_name_or_path=str(folder))  # not that of the links, as it is saved with full weights
    for name in ("transformer", "vae"):
        pipe.components[name].register_to_config(_name_or_path=str(folder / name))
    return with_one_transformer(pipe)
