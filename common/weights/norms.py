"""RMS norms of a transformer in one kernel.

diffusers' norms of queries and keys in Stable Diffusion 3, Qwen-Image and Z-Image are eight operators in fp32.
`F.rms_norm` computes the same numbers in fp32. In bf16 it rounds once, where diffusers' own rounds before the weight as
well. On a GPU it is one kernel, which keeps no fp32 copy for the backward pass.

Krea 2's are that kernel between two casts, and multiply by 1 + weight, which diffusers keeps in fp32: beside 1, bf16
has steps of 1/128 above and 1/256 below, so the sum of a bf16 weight is taken in fp32 here as well.
"""

import torch
import torch.nn.functional as F


def fuse_norms(transformer: torch.nn.Module) -> None:
    """Let diffusers' RMS norms with a weight and no bias compute by `F.rms_norm`, over the last dimension (..., C).

    Parameters and their names stay. A pass whose weight has another dtype than its input is diffusers' own, which then
    also gives the dtype of its output: fp32 weights without mixed precision are multiplied in fp32.
    """
    from diffusers.models.normalization import RMSNorm  # slow
    from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm

    class FusedRMSNorm(RMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            # asked in each pass: FSDP gives a pass its weights in another dtype than the optimizer's
            if self.weight.dtype != hidden_states.dtype:
                return super().forward(hidden_states)
            return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)

    class FusedKrea2RMSNorm(Krea2RMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            scale = self.weight.float() + 1.0
            return F.rms_norm(hidden_states.float(), scale.shape, scale, self.eps).to(hidden_states.dtype)

    for module in transformer.modules():
        # an own class of a user's model may compute otherwise, so that subclasses stay
        if type(module) is Krea2RMSNorm:
            module.__class__ = FusedKrea2RMSNorm
        elif type(module) is RMSNorm and module.bias is None and module.weight is not None and module.weight.ndim == 1:
            module.__class__ = FusedRMSNorm
