"""A LoRA to train, and policies written to disk as diffusers loads them."""

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from common.distributed import on_rank_0
from common.errors import RunError, error_prefix, truncate
from common.files import atomic_file
from common.models import Family, has_two_transformers, pipeline_without_weights
from common.optional import optional_part
from common.process import print_message
from common.weights.policy import LoRA, tensors_on_rank_0

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:  # importing these takes seconds
    import diffusers
    import peft


ALL_LINEAR = "all-linear"
# {how the modules' names begin: the file of their LoRA}: one file, or one for each of two transformers
LORA_FILE = {"": "pytorch_lora_weights.safetensors"}
LORA_FILES = {"transformer.": LORA_FILE[""], "transformer_2.": "pytorch_lora_weights_2.safetensors"}


def make_lora(
    family: type[Family],
    *,
    rank: int,
    alpha: float,
    model: str | None = None,
    path: str | None = None,
    target_modules: Collection[str] = (),
    base_weights: str | None = None,
    checkpoint: Path | None = None,
) -> LoRA | None:
    """The LoRA to train: that of `path` for `model`, which decides rank, alpha and modules; otherwise a new one.

    Returns None for rank 0, which trains full weights. target_modules: none means the family's; "all-linear" every
    linear layer of the transformer, as in peft; "not:" leaves some out, all in it where a module has several.
    checkpoint: the one to resume from, whose policy must be alike.

    Raises:
        ValueError: one line that names the option, and what is wrong with the file or differs from the checkpoint.
    """
    lora = None
    if not path and rank == 0 and model and has_two_transformers(model):
        raise ValueError("--lora_rank 0: full weights of two transformers are not trained, a LoRA of both is")
    if path:
        tensors, config = optional_part("weights.adapter_files", "--lora_path").read_lora(path, model)
        print_message(f"--lora_path {path}: rank {config.r}, alpha {config.lora_alpha}")
        lora = LoRA(config, tensors, base_weights)
    elif rank > 0:
        from peft import LoraConfig  # slow

        excluded = [name.removeprefix("not:") for name in target_modules if name.startswith("not:")]
        targets = [name for name in target_modules if not name.startswith("not:")]
        if ALL_LINEAR in targets:  # peft knows the word for models of transformers alone
            targets = [name for name in targets if name != ALL_LINEAR] + sorted(linear_shapes(str(model)))
        if excluded and model:  # peft's names are those of single layers
            layers = sorted(linear_shapes(model))
            inside = {name: [layer for layer in layers if f".{name}." in f".{layer}."] for name in excluded}
            excluded = [layer for name in excluded for layer in inside[name] or [name]]
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            init_lora_weights="gaussian",  # which changes nothing until it is trained
            target_modules=targets or list(family.lora_target_modules),
            exclude_modules=excluded or None,
        )
        lora = LoRA(config, None, base_weights)
    if checkpoint is not None:
        check_policy(checkpoint, lora)
    return lora


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """{name: layer} of the layers that --base_weights quantises: the linear ones of the blocks of a
    transformer or text encoder."""
    kinds = set(model._no_split_modules or ())  # type: ignore[arg-type]  # names of classes, where it has them
    found = {}
    for block, module in model.named_modules():
        if type(module).__name__ not in kinds:
            continue
        for name, layer in module.named_modules(prefix=block):
            if isinstance(layer, torch.nn.Linear):
                found[name] = layer
    return found


@functools.cache
def linear_shapes(model: str) -> dict[str, tuple[int, int]]:
    """{module: (outputs, inputs)} of the linear layers of a model's transformer, from its configs alone."""
    modules = pipeline_without_weights(model).transformer.named_modules()
    return {name: (m.out_features, m.in_features) for name, m in modules if isinstance(m, torch.nn.Linear)}


def check_policy(checkpoint: Path, lora: LoRA | None) -> None:
    """ValueError: the checkpoint to resume from has not a LoRA of this rank or, for None, not full weights."""
    with error_prefix(f"--resume {checkpoint}", Exception):  # it was checked, but may be a stranger's
        state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        ranks = [len(tensor) for name, tensor in state["policies"]["default"].items() if ".lora_A." in name]
    saved_rank = min(ranks, default=0)
    rank = lora.config.r if lora else 0
    if rank != saved_rank:
        option = "--lora_path" if lora and lora.tensors is not None else "--lora_rank"
        raise ValueError(f"{option}: of rank {rank}, where {checkpoint} has the rank {saved_rank} (0: full weights)")


def check_modules(transformer: torch.nn.Module, config: "peft.LoraConfig", given: Sequence[str]) -> None:
    """Raises RunError for a target or excluded module that does not exist, and where no module is left.

    A module is named by the end of its name: `to_q` means every to_q. given: what --lora_target_modules was given.
    """
    targets = sorted(config.target_modules)
    excluded = sorted(config.exclude_modules or ())
    modules = dict(transformer.named_modules())
    for sign, end in [*(("", end) for end in targets), *(("not:", end) for end in excluded)]:
        if not any(_ends_with(name, [end]) for name in modules):
            raise RunError(f"--lora_target_modules {sign}{end}: {type(transformer).__name__} has no such module")
    chosen = [name for name in modules if _ends_with(name, targets) and not _ends_with(name, excluded)]
    if not chosen:
        left_out = truncate(" ".join(name for name in given if name.startswith("not:")))
        raise RunError(f"--lora_target_modules {left_out}: no module is left to get a LoRA")
    for name in chosen:
        if not isinstance(modules[name], torch.nn.Linear):
            raise RunError(f"--lora_target_modules: {name} is a {type(modules[name]).__name__}, not a linear layer")


def _ends_with(name: str, ends: Sequence[str]) -> bool:
    """Whether a module's dotted name ends with one of `ends`, in whole parts: blocks.0.to_q with to_q, not with q."""
    return f".{name}".endswith(tuple(f".{end}" for end in ends))


# ---- writing ---------------------------------------------------------------------------------------------------------
def save_policy(folder: str | Path, model: Family, name: str, dtype: str = "float32") -> None:
    """Write policy `name` of the model to `folder` as diffusers loads it. A collective.

    dtype: of full weights, which are trained in fp32; a LoRA stays fp32.
    """
    wanted = None if model.is_lora else getattr(torch, dtype)
    save_weights(folder, model.pipe, *tensors_on_rank_0(model, name, wanted))


def save_weights(
    folder: str | Path,
    pipe: "diffusers.DiffusionPipeline",
    tensors: Mapping[str, torch.Tensor],
    lora_config: "peft.LoraConfig | None",
) -> None:
    """Write a policy's tensors as diffusers loads them; rank 0 writes. Equal policies give equal bytes.

    tensors: by names relative to the transformer. With a lora_config they are a LoRA, for
    `pipe.load_lora_weights(folder)`, and that of a second transformer is a file of its own (LORA_FILES). Without one
    they are full weights, for the transformer class's `from_pretrained`.

    A LoRA's B matrices are multiplied by alpha / rank, and its metadata say alpha = rank. A loader that ignores the
    metadata therefore gives the LoRA the same strength.
    """
    if not on_rank_0():
        return
    folder = Path(folder)
    if lora_config is None:
        with atomic_file(folder / "diffusion_pytorch_model.safetensors") as temporary:
            pipe.transformer.save_config(folder)
            save_file(dict(tensors), temporary)
            temporary.chmod(0o644)  # safetensors lets only the owner read
        return
    scale = lora_config.lora_alpha / lora_config.r
    scaled = {name: tensor * scale if ".lora_B." in name else tensor for name, tensor in tensors.items()}
    files = LORA_FILES if all(name.startswith(tuple(LORA_FILES)) for name in tensors) else LORA_FILE
    with ExitStack() as all_or_none:
        for prefix, file in files.items():
            settings = lora_config.to_dict() | {"lora_alpha": lora_config.r}
            for name, value in settings.items():
                if isinstance(value, set):  # module names; a set's order differs from process to process
                    others = tuple(files.keys() - {prefix})
                    settings[name] = sorted(end.removeprefix(prefix) for end in value if not end.startswith(others))
            layers = {name.removeprefix(prefix): scaled[name] for name in scaled if name.startswith(prefix)}
            if not layers:
                continue
            temporary = all_or_none.enter_context(atomic_file(folder / file))
            pipe.save_lora_weights(
                folder,
                transformer_lora_layers=layers,
                weight_name=temporary.name,
                transformer_lora_adapter_metadata=settings,
            )
            sort_metadata(temporary)
            temporary.chmod(0o644)


def sort_metadata(path: str | Path) -> None:
    """Sort the metadata in a safetensors file's header by name: safetensors writes them in a random order."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")  # bytes of the header, which is JSON padded with spaces
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        file.seek(8)
        file.write(text.encode().ljust(size))  # the same entries, so the same length
