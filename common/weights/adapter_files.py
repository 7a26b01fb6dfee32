"""Reading a LoRA to start from (--lora_path): a folder of peft's, or a folder or file of diffusers' or another tool.

Everything is read and checked before any model loads. Names with the prefix of a pipeline or of ComfyUI, kohya's with
underscores for dots, and those from before peft (lora.down, lora.up) are read here, with their alphas. Names of a
model's original code (q, k and v in one matrix, `double_blocks`) are translated by diffusers' own converters. We refuse
adapters that we could not train further exactly as they are: several ranks or alphas, DoRA, rsLoRA, biases, LoRAs of
text encoders, and those of a base whose weights PiSSA or another initialisation has changed.
"""

import json
import re
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import error_prefix, reason, truncate
from common.models import has_two_transformers
from common.process import print_once

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from peft import LoraConfig
from common.weights.lora import LORA_FILES, linear_shapes

PEFT_FILE = "adapter_model.safetensors"
PEFT_SETTINGS = "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
# A key in the file: prefixes, which we drop; the module's name; which tensor it is; the adapter's name in peft
KEY = re.compile(
    r"(?:base_model\.model\.)?(?:transformer\.|diffusion_model\.|lora_unet_|lycoris_)?(.+?)\."
    r"(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up|alpha)(?:\.(?!weight$|bias$)([^.]+))?(?:\.weight)?"
)
PARTS = {"lora_down": "lora_A", "lora.down": "lora_A", "lora_up": "lora_B", "lora.up": "lora_B"}
TEXT_ENCODERS = re.compile(r"(?:base_model\.model\.)?(?:text_encoder|lora_te|text_model|conditioner)")
# parts of the names of DoRA's, LoKr's, LoHa's and OFT's tensors; diffusers leaves some out, with a warning alone
OTHER_KINDS = re.compile("dora_scale|magnitude|lokr_|hada_|oft_")
OWN_CODE = re.compile(r"(?:joint|double|single)_blocks[._]\d")  # the names of SD3's and FLUX's own code
# peft's init_lora_weights that leave the base weights as they are. Its others change them, and none is known here
PLAIN_STARTS = {"true", "false", "gaussian", "eva", "orthogonal", "mica"}
# those that peft can undo; it writes `true` then, and twice the rank
UNDONE_STARTS = {"pissa": "PiSSA", "olora": "OLoRA", "corda": "CorDA", "lora_ga": "LoRA-GA"}
# peft's settings by which a file of lora_A and lora_B acts in another way than W + B A alpha / rank
OTHER_SETTINGS = {
    "use_dora": "DoRA",
    "kasa_config": "KaSA",
    "use_bdlora": "BD-LoRA",
    "use_qalora": "QALoRA",
    "monteclora_config": "MonteCLoRA",
    "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow",
    "layer_replication": "layer replication",
}
LARGEST = torch.finfo(torch.float32).max
CONVERT = "`python -m tools.lora convert FILE OUT --model MODEL`"


def read_lora(path: str | Path, model: str | Path | None = None) -> "tuple[dict[str, torch.Tensor], LoraConfig]":
    """A transformer's LoRA as ({"module.lora_A.weight": fp32 tensor}, LoraConfig), with the names that peft uses.

    model: the folder or hub id that it is for; names of other tools are translated to those of its transformer, and
    every module must be there. None: they are diffusers' already.

    A model of two transformers has a file for each, LORA_FILES, of which one may be missing.

    Rank and modules are the tensors' own. Alpha comes from the file's `.alpha` tensors; without those, from its
    settings; without settings, it is the rank. Settings that matter in training only (dropout, an initialisation that
    leaves the base weights alone) are dropped.

    Raises:
        ValueError: one line that names --lora_path and what is wrong with the file.
    """
    from peft import LoraConfig  # slow

    weights: dict[str, torch.Tensor] = {}
    of_parts = set()
    with error_prefix(f"--lora_path {path}"):
        with error_prefix("not a LoRA that can be read", Exception):
            files = find_files(Path(path))
        is_of_two = model is not None and has_two_transformers(model)
        if is_of_two and "" in files:  # the first transformer's alone
            files = {"transformer.": files[""]}
            other = LORA_FILES["transformer_2."]
            print_once(f"{path}: for the transformer of high noise; that of low noise would be {other} beside it")
        if model is not None and not is_of_two and "" not in files:
            raise ValueError(f"{files['transformer_2.'].name} is for a second transformer, and {model} has one")
        for prefix, file in files.items():
            with error_prefix(file.name) if len(files) > 1 else nullcontext():
                part, rank, alpha = read_part(file, None if model is None else str(model), prefix)
            weights |= {prefix + name: tensor for name, tensor in part.items()}
            of_parts.add((rank, alpha))
        if len(of_parts) > 1:
            raise ValueError(f"(rank, alpha) of its two files differ: {sorted(of_parts)}")
    modules = sorted({name.rpartition(".lora_")[0] for name in weights})
    # peft takes every module whose name ends with one of these, such as each block's proj_out with the last layer's
    ends = {f".{name}" for name in modules}
    layers = set(linear_shapes(str(model))) - set(modules) if model is not None else set()
    others = sorted(layer for layer in layers if any(layer[i:] in ends for i, dot in enumerate(layer) if dot == "."))
    return weights, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, exclude_modules=others or None)


def read_part(file: Path, model: str | None, prefix: str) -> tuple[dict[str, torch.Tensor], int, float]:
    """The tensors of one file, its rank and its alpha. prefix: how the names of the model's modules begin that it is
    for, without which they are given. Raises as read_lora."""
    with error_prefix("not a LoRA that can be read", Exception):
        tensors, settings = read_file(file)
    check_kind(settings)
    weights, alphas = translate(tensors, model, prefix)
    modules, rank = modules_and_rank(weights, settings)
    some_lack_alpha = alphas and sorted(alphas) != modules
    if len(set(alphas.values())) > 1 or some_lack_alpha or settings.get("alpha_pattern"):
        raise ValueError(f"its alphas differ between modules: {CONVERT} gives it one")
    if settings.get("use_rslora"):
        raise ValueError("use_rslora, which divides alpha by the root of the rank, is not supported")
    alpha = alphas.get(modules[0], settings.get("lora_alpha", rank))
    if not is_alpha(alpha):
        raise ValueError(f"its lora_alpha, {alpha}, is not one number above 0")
    return weights, rank, alpha


def find_files(path: Path) -> dict[str, Path]:
    """{how the names of the modules begin: the file of their LoRA}: one of "", or those that are there of LORA_FILES.

    Where there is a file for a second transformer, the other beside it is for the first. Raises as find_file.
    """
    of_second = LORA_FILES["transformer_2."]
    folder = path.parent if path.name in LORA_FILES.values() else path
    if not (folder / of_second).is_file() and (folder / "lora" / of_second).is_file():  # of flow_grpo's checkpoint-N
        folder = folder / "lora"
    if (folder / of_second).is_file():
        return {prefix: folder / name for prefix, name in LORA_FILES.items() if (folder / name).is_file()}
    return {"": find_file(path)}


def read_file(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a LoRA, and its settings ({} if it has none). Raises whatever a library does."""
    if not file.is_file():  # a named pipe would be waited for
        raise OSError(f"No such file or directory: {file}")
    with safe_open(file, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  (not a dict: no iteration)
        metadata = opened.metadata() or {}
    settings = json.loads(metadata.get("lora_adapter_metadata", "{}"))  # diffusers' LORA_ADAPTER_METADATA_KEY
    peft_settings = file.parent / PEFT_SETTINGS
    if file.name == PEFT_FILE and peft_settings.is_file():
        settings = json.loads(peft_settings.read_text(encoding="utf-8"))
    return tensors, {key.removeprefix("transformer."): value for key, value in settings.items()}


def find_file(path: Path) -> Path:
    """The file of a LoRA: `path`, or that in its folder, or in the only folder of it that has one, which a line names.

    peft puts an adapter with a name of its own into a folder of that name, and flow_grpo's checkpoint-N has lora/. A
    run's folder is not searched: which of its LoRAs is meant, a user says.

    Raises:
        ValueError: a folder has no LoRA, or several of its folders have one, or a run's best_adapter/ has.
    """
    if not path.is_dir():
        return path
    if (path / PEFT_SETTINGS).is_file():
        if not (path / PEFT_FILE).is_file() and (path / "adapter_model.bin").is_file():
            raise ValueError("adapter_model.bin is a pickle, which is not read: save it by peft as safetensors")
        return path / PEFT_FILE
    if (path / DIFFUSERS_FILE).is_file():
        return path / DIFFUSERS_FILE
    folders = sorted({file.parent for name in (PEFT_SETTINGS, DIFFUSERS_FILE) for file in path.glob(f"*/{name}")})
    of_peft = [folder for folder in folders if (folder / PEFT_SETTINGS).is_file() and folder.name != "best_adapter"]
    if len(folders) == 1 and (of_peft or folders[0].name == "lora"):
        file = find_file(folders[0])
        print_once(f"{path}: takes {file}")
        return file
    if folders:
        raise ValueError(f"LoRAs are in folders of it: pass one of {', '.join(map(str, folders))}")
    full_weights = ("diffusion_pytorch_model", "model")  # how the names of their files begin
    beside = sorted(file.name for file in path.glob("*.safetensors") if not file.name.startswith(full_weights))
    wanted = f"neither {PEFT_SETTINGS} nor {DIFFUSERS_FILE} in it or in a folder of it"
    raise ValueError(f"{wanted}{f'; to read a file, pass {path / beside[0]}' if beside else ''}")


def check_kind(settings: Mapping[str, Any]) -> None:
    """Refuse, by its settings, an adapter that is no W + B A alpha / rank over the model's own W.

    Raises:
        ValueError: names the setting, and the way out.
    """
    kind = str(settings.get("peft_type") or "LORA")
    if kind != "LORA":
        raise ValueError(f"peft_type {kind}: only LORA is trained here: merge it with peft, for --model")
    for name, known_as in OTHER_SETTINGS.items():
        if settings.get(name):
            raise ValueError(f"{name}: {known_as}, which is not trained here: merge it with peft, for --model")
    start = settings.get("init_lora_weights")
    word = str(True if start is None else start).lower()
    if word in PLAIN_STARTS:
        return
    undone = [known_as for prefix, known_as in UNDONE_STARTS.items() if word.startswith(prefix)]
    if undone:
        way = "save it by peft's save_pretrained with path_initial_model_for_weight_conversion"
        raise ValueError(f"init_lora_weights {start}: {undone[0]} has changed the base weights under it: {way}")
    changed = "LoftQ has" if word == "loftq" else "it may have"
    way = "merge it with peft into its own base, for --model"
    raise ValueError(f"init_lora_weights {start}: {changed} changed the base weights under it: {way}")


# ---- names -----------------------------------------------------------------------------------------------------------
def translate(
    tensors: Mapping[str, torch.Tensor], model: str | None, prefix: str = ""
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """A file's tensors with the names of the model's transformer: {"module.lora_A.weight": fp32} and {module: alpha}.

    prefix: as read_part has it.

    Raises:
        ValueError: names a tensor that has no place in the transformer or cannot be a LoRA's, and what to do.
    """
    for key in tensors:
        if OTHER_KINDS.search(key):
            raise ValueError(f"{key} is of another kind than LoRA, which is not trained here: merge it with its tool")
        if TEXT_ENCODERS.match(key):
            raise ValueError(f"{key} is a text encoder's, which is not trained here: {CONVERT} leaves it out")
    shapes = None
    if model is not None:
        found = linear_shapes(model).items()
        shapes = {name.removeprefix(prefix): shape for name, shape in found if name.startswith(prefix)}
    weights, alphas, unknown = sort_tensors(tensors, shapes)
    if unknown and model is not None:
        converted, fault = by_diffusers(tensors, model)
        own_code = next((key for key in unknown if OWN_CODE.search(key)), "")
        weights, alphas, unknown = sort_tensors(converted or tensors, shapes)
        if unknown and "joint_blocks" in own_code:
            way = "which diffusers does not convert: pass a LoRA with diffusers' names"
            raise ValueError(f"{own_code}: a name of SD3's own code, as sd-scripts writes it, {way}")
        if unknown and own_code and fault.startswith("Flux"):
            what = f"a name of FLUX's own code, which diffusers' converter does not take ({fault})"
            raise ValueError(f"{own_code}: {what}: pass a LoRA with diffusers' names, of this model's width")
        if unknown:
            raise ValueError(
                f"{unknown[0]}: the transformer of {model} has no such module: is it another model's LoRA?"
            )
    if unknown or not weights:
        key = unknown[0] if unknown else "no tensor"
        raise ValueError(f"{key} in it, where only a transformer's lora_A and lora_B are taken")
    return weights, alphas


def sort_tensors(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, int]] | None
) -> tuple[dict[str, torch.Tensor], dict[str, float], list[str]]:
    """{"module.lora_A.weight": fp32}, {module: alpha} and the keys that belong to neither.

    shapes: {module: (outputs, inputs)} of the transformer; None takes any module.

    Raises:
        ValueError: names a tensor whose shape or values cannot be such a LoRA's, or the adapters where it has several.
    """
    by_underscores = {module.replace(".", "_"): module for module in shapes or ()}
    weights: dict[str, torch.Tensor] = {}
    alphas: dict[str, float] = {}
    unknown = []
    matches = {key: KEY.fullmatch(key) for key in tensors}
    adapters = {match[3] for match in matches.values() if match and match[3]}
    if len(adapters) > 1:
        raise ValueError(f"several adapters in it, {', '.join(sorted(adapters))}: keep the tensors of one")
    for key, tensor in tensors.items():
        match = matches[key]
        module = match and match[1]
        if shapes is not None and module not in shapes:
            module = by_underscores.get(module or "")
        if not match or not module:
            unknown.append(key)
            continue
        part = PARTS.get(match[2], match[2])
        name = f"{module}.{part}" if part == "alpha" else f"{module}.{part}.weight"
        if name in weights or (part == "alpha" and module in alphas):
            raise ValueError(f"{name} is in it twice, with a prefix and without")
        if part == "alpha":
            if tensor.numel() != 1 or not is_alpha(tensor.item()):
                raise ValueError(f"{key} is not one number above 0")
            alphas[module] = tensor.item()
            continue
        matrix = tensor.float()
        if matrix.dim() != 2 or 0 in matrix.shape or not tensor.is_floating_point() or not matrix.isfinite().all():
            raise ValueError(f"{key} is no matrix of finite floating-point numbers")
        side = 1 if part == "lora_A" else 0  # A is (rank, inputs), B is (outputs, rank)
        if shapes is not None and tensor.shape[side] != shapes[module][side]:
            features = f"{tensor.shape[side]} features, where the transformer has {shapes[module][side]}"
            raise ValueError(f"{key} is for {features}")
        weights[name] = matrix
    return weights, alphas, unknown


def by_diffusers(tensors: Mapping[str, torch.Tensor], model: str) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors as the pipeline's `lora_state_dict` names them; or none, and "PIPELINE: why it does not".

    Its converters drop some alphas, and some tensors. So alpha / rank is in the B matrices before, alpha is the rank
    after, and the names are converted once more with a number of its own in each tensor, to see which are left.

    Raises:
        ValueError: names a tensor that the converter leaves out, or an alpha that is no number above 0.
    """
    import diffusers  # slow

    pipeline_class = getattr(diffusers, diffusers.DiffusionPipeline.load_config(model)["_class_name"])
    scaled = with_alpha_in_b(tensors)
    numbered = {key: tensor for key, tensor in scaled.items() if not key.endswith(".alpha")}
    numbers = {key: float(i) for i, key in enumerate(numbered, 1) if KEY.fullmatch(key) or numbered[key].any()}
    numbered = {key: torch.full(scaled[key].shape, number) for key, number in numbers.items()}
    try:
        converted = pipeline_class.lora_state_dict(dict(scaled))
        traces = pipeline_class.lora_state_dict(scaled | numbered).values()
    except Exception as error:  # whatever a converter raises over names that it does not know
        return {}, truncate(f"{pipeline_class.__name__}: {reason(error)}")
    found = {number for trace in traces for edge in edges(trace) for number in edge.unique().tolist()}
    lost = [key for key, number in numbers.items() if number not in found and not is_copy(key, numbers)]
    if lost:
        told = f"{pipeline_class.__name__}'s converter leaves it out"
        raise ValueError(f"{lost[0]}: {told}: pass a LoRA with diffusers' names, or without it")
    converted = {key: tensor for key, tensor in converted.items() if not key.endswith(".alpha")}
    if any(key.endswith(".alpha") for key in tensors):
        ranks = {key: len(tensor) for key, tensor in converted.items() if key.endswith(".lora_A.weight")}
        converted |= {key.replace(".lora_A.weight", ".alpha"): torch.tensor(rank) for key, rank in ranks.items()}
    return converted, ""


def with_alpha_in_b(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA that acts as before, with the rank as the alpha of each module that has one.

    Raises:
        ValueError: names an alpha that is no number above 0.
    """
    changed = dict(tensors)
    parts: dict[str, dict[str, str]] = {}  # {module as the file names it: {lora_A, lora_B or alpha: key}}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if match and match[2] == "alpha" and not (tensor.numel() == 1 and is_alpha(tensor.item())):
            raise ValueError(f"{key} is not one number above 0")
        if match:
            parts.setdefault(match[1], {})[PARTS.get(match[2], match[2])] = key
    for keys in parts.values():
        if keys.keys() == {"lora_A", "lora_B", "alpha"}:
            rank = len(tensors[keys["lora_A"]])
            changed[keys["lora_B"]] = tensors[keys["lora_B"]].float() * (tensors[keys["alpha"]].item() / rank)
            changed[keys["alpha"]] = torch.tensor(float(rank))
    return changed


def is_copy(key: str, keys: Collection[str]) -> bool:
    """Whether a tensor is of q, k and v in one matrix, or of the layer behind them, that the file has singly as well:
    a trainer of Z-Image writes both, and the converter takes the single ones."""
    single = {".qkv.": (".to_q.", ".to.q."), ".out.": (".to_out.0.",)}
    return any(key.replace(fused, name) in keys for fused, names in single.items() if fused in key for name in names)


def edges(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The first column and the first row of a matrix, in which each block of it has a part; else the tensor."""
    return [tensor[:, 0], tensor[0]] if tensor.dim() == 2 else [tensor]


# ---- values ----------------------------------------------------------------------------------------------------------
def is_alpha(value: object) -> bool:  # whatever a JSON file says
    """Whether the value is a number above 0 that fp32 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST


def modules_and_rank(weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> tuple[list[str], int]:
    """The names of a LoRA's modules, sorted, and the rank that all of them have.

    Raises:
        ValueError: a matrix lacks its partner, or the ranks differ between modules or from the settings.
    """
    modules = sorted({name.rpartition(".lora_")[0] for name in weights})
    pairs = {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
    if weights.keys() != pairs:
        raise ValueError("there is a lora_A without its lora_B in it, or the reverse")
    # A is (rank, inputs), B is (outputs, rank)
    ranks = {tensor.shape[0 if ".lora_A." in name else 1] for name, tensor in weights.items()}
    rank = min(ranks)
    if len(ranks) > 1 or settings.get("r", rank) != rank or settings.get("rank_pattern"):
        raise ValueError(f"its ranks differ, between modules or from its settings: {CONVERT} gives it one")
    return modules, rank
