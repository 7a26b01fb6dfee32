"""--ranks_per_image: the ranks of a sequence group compute one image or video together, a part of its tokens each.

Outside attention a rank has its part of the tokens. In attention it has all tokens and its part of the heads, for which
queries, keys and values travel within the group (DeepSpeed-Ulysses, arXiv 2309.14509). diffusers' context parallelism
does that. It divides what its plan of the transformer names, and gathers the output, so that every rank of the group
has the whole velocity.

Each rank computes the same loss of it. The gather's backward pass keeps only the gradient of the rank's own part, so a
parameter's gradient is the sum over the group. FSDP averages over all ranks, which divides that sum by the ranks of a
group once too often: the gradient of the output is multiplied by their number.
"""

import functools
import logging
from typing import TYPE_CHECKING

from common.distributed import data_world_size, ranks_per_image
from common.models import Family, pipeline_without_weights

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:  # importing it takes seconds
    import diffusers

NOISY = ("diffusers.models.modeling_utils", "diffusers.hooks.context_parallel")


def check_ranks_per_image(
    ranks: int,
    family: type[Family],
    *,
    model: str,
    image_size: tuple[int, int],
    num_frames: int,
    max_sequence_length: int,
    num_sources: int,
    train_with: tuple[str, ...],
    chained_steps: int,
) -> None:
    """Refuse what so many ranks cannot divide, by the model's configs. 1 rank divides nothing.

    num_sources: source images of a prompt. chained_steps: of the script's Workload. The others are options.

    Raises:
        ValueError: in one line that names the option and what it needs.
    """
    if ranks == 1:
        return
    given = f"--ranks_per_image {ranks}"
    if chained_steps:
        raise ValueError(f"{given}: not in this script, whose gradient comes through several passes: leave it out")
    if "compile" in train_with:
        raise ValueError(f"{given}: not with --train_with compile: leave one of them out")
    blank = family(pipeline_without_weights(model))
    latent_shape = blank.schedule(2, *image_size, num_frames)[2]
    lengths = blank.sequence_lengths(latent_shape, max_sequence_length, num_sources)
    if not lengths:
        which = "docs/models.md has the models that do"
        raise ValueError(f"{given}: {family.__name__}'s transformer does not divide its tokens among ranks: {which}")
    heads = blank.transformer.config.num_attention_heads
    if heads % ranks:
        raise ValueError(f"{given}: does not divide the {heads} attention heads of {family.__name__}'s transformer")
    for option, length in lengths.items():
        if length % ranks:
            raise ValueError(f"{given}: does not divide the {length} tokens that {option} gives: change one of them")


def sequence_mesh(device_type: str) -> DeviceMesh:
    """The mesh (sequence groups, 1, ranks of a group), with the names that diffusers looks for. A collective."""
    return init_device_mesh(
        device_type, (data_world_size(), 1, ranks_per_image()), mesh_dim_names=("data", "ring", "ulysses")
    )


def divide_sequence(transformer: "diffusers.ModelMixin", mesh: DeviceMesh) -> None:
    """Let the ranks of a sequence group compute this transformer's passes together. Call it before `fully_shard`, with
    the attention kernel and the LoRA as they will stay."""
    from diffusers import ContextParallelConfig  # slow
    from diffusers.models._modeling_parallel import ContextParallelOutput

    for name in NOISY:  # an experiment, it warns; and a plan may name an input that has other dimensions here
        logging.getLogger(name).setLevel(logging.ERROR)
    ranks = mesh.size(-1)
    # a model of two transformers has a plan for each
    for part in [transformer] if transformer._cp_plan else transformer.children():
        part.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks, mesh=mesh))
        for name, plan in part._cp_plan.items():
            if isinstance(plan, ContextParallelOutput):  # its forward gathers, and hooks see what it returns
                part.get_submodule(name).register_forward_hook(functools.partial(scale_gradient, ranks))


def scale_gradient(factor: int, module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    """A forward hook that multiplies the gradient of the module's output."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * factor)
