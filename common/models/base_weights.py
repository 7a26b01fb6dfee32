"""--base_weights int8 or fp8: the frozen weights under a LoRA at one byte each, for a GPU that is too small otherwise.

torchao keeps the linear layers of the blocks with a scale for each output, and multiplies by them in the dtype of the
pass. Embeddings, norms and the last layer stay as they are. The saved LoRA is one of the model itself.
"""

import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from common.models.family import Family
    from common.options import SharedArgs


def check_base_weights(args: "SharedArgs") -> None:
    """Refuse what quantised weights cannot do. ValueError, in one line that names the options."""
    given = f"--base_weights {args.base_weights}"
    if not args.lora_rank and not args.lora_path:
        raise ValueError(f"{given}: needs a LoRA, as quantised weights cannot be trained")
    if getattr(args, "rollout", "local") == "vllm":
        raise ValueError(f"{given}: needs --rollout local, as the engine would sample with other weights")
    if args.shard_ranks > 1:
        raise ValueError(f"{given}: needs --shard_ranks 1, as every rank has all quantised weights")
    refused = {"cpu_offload", "compile"} & set(args.train_with)
    if refused:
        raise ValueError(f"{given}: --train_with {sorted(refused)[0]} cannot be used with it")


def linear_layers(transformer: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """{name: layer} of the layers that are quantised: the linear ones of the blocks."""
    kinds = set(transformer._no_split_modules)  # type: ignore[arg-type]  # a model's of diffusers
    found = {}
    for block, module in transformer.named_modules():
        if type(module).__name__ not in kinds:
            continue
        for name, layer in module.named_modules(prefix=block):
            if isinstance(layer, torch.nn.Linear):
                found[name] = layer
    return found


def quantise(model: "Family", base_weights: str) -> None:
    """Quantise the transformer's linear layers, one at a time, and put them on model.device.

    Call it before the transformer gets a LoRA and is sharded. model.unsharded becomes what FSDP must leave whole.
    """
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    # peft warns that it cannot merge the LoRA into these layers, which nothing here asks for
    warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated without")
    config = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[base_weights]()
    layers = linear_layers(model.transformer)
    weights = {f"{name}.weight" for name in layers}
    quantize_(model.transformer, config, lambda module, name: name in layers, device=model.device)
    model.unsharded = {parameter for name, parameter in model.transformer.named_parameters() if name in weights}
