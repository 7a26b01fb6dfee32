"""--base_weights int8, fp8 or nf4: frozen weights at a byte or half a byte each, for a GPU that is too small otherwise.

torchao keeps the linear layers of the transformer's blocks: in int8 and fp8 with a scale for each output, in nf4 (four
bits) with a scale for each 64 weights. They multiply in the dtype of the pass. The linear layers of the text encoders'
blocks are int8 with each of the three, which is the nearest to the model. Embeddings, norms and layers outside of
blocks stay as they are. The saved LoRA is one of the model itself.
"""

import math
import warnings
from collections.abc import Collection

from common.models import Family
from common.weights.lora import linear_layers

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

# of a weight: nf4 has half a byte, a scale in a byte for 64 weights, and a factor for 256 scales
WEIGHT_BYTES = {"int8": 1.0, "fp8": 1.0, "nf4": 0.516}


def check_base_weights(
    base_weights: str | None, trains_lora: bool, rollout: str, shard_ranks: int, train_with: Collection[str]
) -> None:
    """Refuse what quantised weights cannot do. ValueError, in one line that names the options."""
    if not base_weights:
        return
    given = f"--base_weights {base_weights}"
    if not trains_lora:
        raise ValueError(f"{given}: needs a LoRA, as quantised weights cannot be trained")
    if rollout == "vllm":
        raise ValueError(f"{given}: needs --rollout local, as the engine would sample with other weights")
    if shard_ranks > 1:
        raise ValueError(f"{given}: needs --shard_ranks 1, as every rank has all quantised weights")
    refused = {"cpu_offload", "compile"} & set(train_with)
    if refused:
        left = " ".join(["--train_with", *(word for word in train_with if word not in refused)])
        fault = f"--train_with {sorted(refused)[0]} cannot be used with it"
        raise ValueError(f"{given}: {fault}; {left} at the command's end takes it out")


# ---- the transformer -------------------------------------------------------------------------------------------------
def quantise(model: Family, base_weights: str) -> None:
    """Quantise the transformer's linear layers, one at a time, and put them on model.device.

    Call it before the transformer gets a LoRA and is sharded. model.unsharded becomes what FSDP must leave whole.
    """
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_, to_nf4

    # peft warns that it cannot merge the LoRA into these layers, which nothing here asks for
    warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated without")
    layers = linear_layers(model.transformer).values()
    for layer in layers:
        layer.to(model.device)
        if base_weights == "nf4":
            scales_at_once = math.gcd(layer.weight.numel() // 64, 256)  # 256 in published models
            nf4 = to_nf4(layer.weight, block_size=64, scaler_block_size=scales_at_once)
            layer.weight = torch.nn.Parameter(nf4, requires_grad=False)
        else:
            config = Int8WeightOnlyConfig() if base_weights == "int8" else Float8WeightOnlyConfig()
            quantize_(layer, config)
            layer.__class__ = FrozenLinear
    model.unsharded = {layer.get_parameter("weight") for layer in layers}


class FrozenLinear(torch.nn.Linear):
    """A linear layer whose weight is torchao's, in int8 or fp8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = FrozenProduct.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


class FrozenProduct(torch.autograd.Function):
    """y = x W^T, (..., in) -> (..., out), of a frozen quantised W (out, in).

    torchao's own product keeps W in the dtype of x for the backward pass: without activation checkpointing a step would
    hold all weights in bf16 again. This one makes them of the quantised W once more. nf4 has such a product by itself.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight  # type: ignore[attr-defined]
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient @ ctx.weight.dequantize(gradient.dtype), None  # type: ignore[attr-defined]


# ---- the text encoders -----------------------------------------------------------------------------------------------
def quantise_encoders(model: Family) -> None:
    """Quantise the linear layers of the text encoders' blocks to int8, on model.device. They wait on the CPU as before.

    A layer keeps plain tensors, values and scales, and makes torchao's tensor of them for a pass. on_device would move
    the outside of a torchao tensor alone, and the key of --prompt_cache cannot hash one.
    """
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from torchao.utils import unwrap_tensor_subclass

    for name, encoder in model.pipe.components.items():
        if name.startswith("text_encoder") and encoder is not None:
            for layer in linear_layers(encoder).values():
                quantize_(layer, Int8WeightOnlyConfig(), device=model.device)
            unwrap_tensor_subclass(encoder)
            encoder.to("cpu")
