"""A linear layer with a LoRA in fewer passes over its output, on a GPU.

peft multiplies B's output by alpha / rank and adds it to the layer's own, two kernels that read and write a tensor as
wide as the output; the backward pass has as many, and adds the two gradients of the input. Here B's product is added
where it is made. In fp32 and bf16 the numbers are peft's up to round-off.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable


def fuse_lora(transformer: torch.nn.Module) -> None:
    """Let peft's linear layers compute by LoRAProduct in passes on a GPU, where one adapter acts.

    Adapters, their names and what peft does with them stay. A CPU keeps peft's pass: q, k and v of one input would add
    up their gradients in another order. So do layers whose base is quantised, and adapters with dropout, a bias or a
    variant of peft's such as DoRA, which nothing here makes.
    """
    from peft.tuners import lora  # slow

    class FusedLoRALinear(lora.Linear):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            base = self.base_layer
            active = [name for name in self.active_adapters if name in self.lora_A]
            if args or kwargs or self.disable_adapters or self.merged or len(active) != 1 or not on_gpu(x):
                return super().forward(x, *args, **kwargs)
            a, b = self.lora_A[active[0]].weight, self.lora_B[active[0]].weight
            if base.weight.requires_grad or not x.dtype == base.weight.dtype == a.dtype == b.dtype:
                return super().forward(x)
            return LoRAProduct.apply(x, base.weight, base.bias, a, b, self.scaling[active[0]])

    layer: Any  # peft's types are not read
    for layer in transformer.modules():
        if type(layer) is not lora.Linear or type(layer.base_layer) is not torch.nn.Linear:
            continue
        is_plain = type(layer.base_layer.weight) is torch.nn.Parameter  # not torchao's
        is_plain &= all(isinstance(dropout, torch.nn.Identity) for dropout in layer.lora_dropout.values())
        if is_plain and not layer.lora_variant and not any(layer.lora_bias.values()):
            layer.__class__ = FusedLoRALinear


def on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


class LoRAProduct(torch.autograd.Function):
    """y = x W^T + c + s (x A^T) B^T, (..., in) -> (..., out), of frozen W (out, in) and c; A (r, in), B (out, r)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (N, in)
        hidden = F.linear(rows, a)  # (N, r)
        y = F.linear(rows, weight, bias).addmm_(hidden, b.t(), alpha=scale)
        ctx.save_for_backward(rows, weight, a, b, hidden)
        ctx.scale = scale  # type: ignore[attr-defined]
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, a, b, hidden = ctx.saved_tensors
        grad_y = gradient.reshape(-1, gradient.shape[-1])
        grad_hidden = (grad_y @ b).mul_(ctx.scale)  # (N, r)
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_y @ weight).addmm_(grad_hidden, a).view(*gradient.shape[:-1], -1)
        if ctx.needs_input_grad[3]:
            grad_a = grad_hidden.t() @ rows
        if ctx.needs_input_grad[4]:
            grad_b = (grad_y.t() @ hidden).mul_(ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None
