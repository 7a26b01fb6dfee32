"""The velocity and its gradient by one rank alone and by two that share its tokens, of each family. Run by torchrun."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.distributed import setup_distributed
from common.models import Family, family_class, load_model
from common.run.ending import friendly_errors
from common.weights.sequence import divide_sequence, sequence_mesh

import torch
import torch.distributed as dist

LENGTH, IMAGE_SIZE, NUM_FRAMES = 8, (32, 64), 5


def velocity_and_gradient(model: Family) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, ...) of two images whose prompts have other lengths, with guidance; and the gradient of all weights."""
    torch.manual_seed(1)
    timesteps, _, latent_shape = model.schedule(4, *IMAGE_SIZE, NUM_FRAMES if model.makes_videos else 1)
    num_sources = model.num_sources[0]
    length = LENGTH + num_sources * model.source_tokens
    shapes = model.conditioning_shapes(model.transformer.config, length)
    if num_sources:
        shapes |= model.source_shapes(latent_shape, num_sources)
    both = []
    for kept in ((length, length - 3), (length - 5, 2)):  # tokens of each prompt, and of each negative prompt
        conditioning = {name: torch.randn(2, *shape) for name, shape in shapes.items()}
        for name in conditioning:
            if name.endswith("mask"):
                conditioning[name] = (torch.arange(length) < torch.tensor(kept)[:, None]).long()
        both.append(conditioning)
    latents = torch.randn(2, *latent_shape)
    velocity = model.predict_velocity(latents, timesteps[1], *both, guidance_scale=3.0)
    (velocity * torch.randn(velocity.shape)).sum().backward()
    gradients = []
    for parameter in model.transformer.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
        dist.all_reduce(gradient)
        gradients.append(gradient.flatten() / dist.get_world_size())  # the mean over ranks, as FSDP takes it
    return velocity.detach(), torch.cat(gradients)


def main(path: str, folders: list[str]) -> None:
    setup_distributed(ranks_per_image=2)
    found = {}
    for folder in folders:
        model = load_model(family_class(folder), folder, torch.float32, "cpu")
        model.transformer.requires_grad_(True)
        velocity, gradient = velocity_and_gradient(model)
        divide_sequence(model.transformer, sequence_mesh("cpu"))
        shared_velocity, shared_gradient = velocity_and_gradient(model)
        of_velocity = (shared_velocity - velocity).abs().max() / velocity.abs().max()
        of_gradient = (shared_gradient - gradient).norm() / gradient.norm()
        found[Path(folder).name] = [of_velocity.item(), of_gradient.item()]
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    with friendly_errors():
        main(sys.argv[1], sys.argv[2:])
