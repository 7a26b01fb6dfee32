"""--attention: which kernel computes the transformer's attention, in the trainer and in the engine alike.

Two kernels round differently. A trainer and an engine with one kernel each would begin every update with a ratio that
is not 1, so one option sets both.
"""

import importlib.util

from common.errors import RunError
from common.models import Family, family_class

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# why a kernel is refused where the transformer passes a mask
WITH_A_MASK = {
    "cudnn": "its gradients become NaN beside a mask (pytorch issue 196678), which {} passes: take native",
    "flash": "it takes no mask, which {} passes: take native",
}
DIFFUSERS_NAMES = {"native": "native", "cudnn": "_native_cudnn", "flash": "flash"}
SDPA_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION}  # of torch, for Stable Diffusion 3, which calls torch directly


def check_machine(attention: str) -> None:
    """Refuse a kernel that this machine has not, before anything is loaded.

    Raises:
        ValueError: in one line that names --attention and what it needs.
    """
    given = f"--attention {attention}"
    if attention != "native" and not torch.cuda.is_available():
        raise ValueError(f"{given}: needs a GPU; a CPU has native alone")
    if attention == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError(f"{given}: needs the package flash-attn (pip install flash-attn)")


def check_attention(attention: str, model: str, dtype: str, family: str | None = None) -> None:
    """Refuse a kernel that the model cannot take, before anything is loaded.

    attention, model, dtype and family are the options of these names.

    Raises:
        ValueError: in one line that names the option and what it needs.
    """
    given = f"--attention {attention}"
    if dtype != "bfloat16":
        raise ValueError(f"{given}: needs --dtype bfloat16")
    found = family_class(model, family)
    if found.masks_attention:
        raise ValueError(f"{given}: {WITH_A_MASK[attention].format(found.__name__)}")
    if attention not in found.attention_kernels:
        raise ValueError(f"{given}: {found.__name__} takes {' or '.join(found.attention_kernels)}")


def use_attention(model: Family, attention: str) -> None:
    """Let the transformers of all policies compute attention by that kernel. Call it before the first pass.

    native is torch's choice without cuDNN, which torch prefers on an H100. torch 2.11 keeps cuDNN's plan of a backward
    pass by the shapes and strides of query, key and value, but not by the strides of the gradient that it gets. FLUX's
    blocks of two kinds differ in nothing else, and on an H100 the gradient became garbage where the second kind begins
    (docs/lab/records/gpu_first_h100_flux.md). vLLM turns cuDNN off in the engine, too.

    Raises:
        RunError: a part of the transformer, of a user's own family, does not let its kernel be chosen.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # `sdpa_kernel` below still asks for it by name
    if attention == "native":
        return
    from diffusers.models.attention_processor import JointAttnProcessor2_0
    from diffusers.utils import logging

    class JointAttnProcessor(JointAttnProcessor2_0):
        """Stable Diffusion 3's, which diffusers' set_attention_backend does not reach.

        The kernel is chosen here, in each call, so that activation checkpointing computes again with the same one.
        """

        def __call__(
            self,
            attn: torch.nn.Module,
            hidden_states: torch.Tensor,
            encoder_hidden_states: torch.Tensor | None = None,
            attention_mask: torch.Tensor | None = None,
        ) -> torch.Tensor:
            with sdpa_kernel(SDPA_BACKENDS[attention]):
                return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask)

    logging.get_logger("diffusers.models.modeling_utils").setLevel(logging.ERROR)  # it warns of an experiment
    for transformer in model.policies.values():
        transformer.set_attention_backend(DIFFUSERS_NAMES[attention])
        for module in transformer.modules():
            processor = getattr(module, "processor", None)
            if isinstance(processor, JointAttnProcessor2_0):
                module.processor = JointAttnProcessor()
            elif processor is not None and not hasattr(processor, "_attention_backend"):
                told = f"{type(processor).__name__} calls torch's kernel and no other: take native"
                raise RunError(f"--attention {attention}: {type(transformer).__name__}'s {told}")
