"""How much of what V-GRPO's surrogate sees between the images of a prompt is noise, with and without its three means.

    OMP_NUM_THREADS=1 python -m benchmarks.surrogate_noise

One rollout of the embedded model before training, 16 prompts of 8 images. The surrogate of an image is its error, a
mean over K = 4 pairs of a timestep and a noise. It is computed with 16 independent draws of all pairs, for these
variants, of which each adds to the line before: pairs of an image's own; shared by a prompt's images; a timestep of
each part of the schedule; eq. 14's error instead of that of v. Printed of each:

  variation: deviation of the surrogate within a prompt, over its mean there, as an average
  noise:     share of the variance within a prompt that changes from draw to draw
"""

from dataclasses import replace

from common.cpu import repair_torchvision
from common.files.prompts import read_prompts
from common.models.family import Family
from common.models.loading import find_family, load_model
from common.sde import image_seed
from contrib import v_grpo

import torch
from torch import Tensor

NUM_PROMPTS = 16
NUM_DRAWS = 16


def draw_pairs(args: v_grpo.Args, batch: v_grpo.Batch, draw: int, shares: bool, is_stratified: bool) -> list[Tensor]:
    """Timesteps (B, K) and noise (B, K, ...) as V-GRPO draws them, or without sharing, or without parts."""
    options = replace(args, group_size=args.group_size if shares else 1)
    if is_stratified:
        return list(v_grpo.draw_training_noise(options, batch, draw))
    one = replace(options, pairs_per_prompt=1)  # of the whole schedule
    steps = range(draw * args.pairs_per_prompt, (draw + 1) * args.pairs_per_prompt)
    drawn = [v_grpo.draw_training_noise(one, batch, step) for step in steps]
    return [torch.cat(parts, 1) for parts in zip(*drawn, strict=True)]


@torch.no_grad()
def surrogates(args: v_grpo.Args, model: Family, batch: v_grpo.Batch, pairs: list[Tensor], is_weighted: bool) -> Tensor:
    """The error (B,) of each image, in fp64: eq. 14's, or that of v."""
    timesteps, noise = pairs
    rows = torch.arange(len(batch.x0))
    v, x_t, x0, sigma = v_grpo.predict_pairs(model, batch, rows, timesteps=timesteps, noise=noise)
    sigma = sigma.view(-1, 1, 1, 1)
    errors = (v - (x_t - x0) / sigma).double()  # of v; times sigma, of the predicted image
    if is_weighted:
        errors = sigma * errors
        values = (errors**2).flatten(1).mean(1) / errors.abs().flatten(1).mean(1)
    else:
        values = (errors**2).flatten(1).mean(1)
    return values.view(len(batch.x0), args.pairs_per_prompt).mean(1)


def main() -> None:
    repair_torchvision()
    args = v_grpo.Args(num_prompts=NUM_PROMPTS)
    size = (*args.image_size, args.num_frames)
    family = find_family(args.model, *size, 1.0, args.max_sequence_length)
    model = load_model(family, args.model, torch.float32, "cpu")
    num_images = NUM_PROMPTS * args.group_size
    prompts = read_prompts(args.train_prompts).select(range(NUM_PROMPTS))
    image_index = torch.arange(num_images)
    seeds = [image_seed(args.seed, 1, index) for index in range(num_images)]
    request = v_grpo.make_request(args, model, prompts, image_index // args.group_size, seeds)
    x0 = v_grpo.sample_locally(model, request.select(image_index)).latents[:, -1]
    batch = v_grpo.Batch(request, x0, torch.zeros(num_images), torch.ones(num_images), image_index)
    variants = [
        ("an image's own pairs, error of v", False, False, False),
        ("shared by a prompt", True, False, False),
        ("and of each part of the schedule", True, True, False),
        ("and the error of eq. 14: V-GRPO", True, True, True),
    ]
    print(f"{'':34} {'variation':>10} {'noise':>7}")
    for name, shares, is_stratified, is_weighted in variants:
        drawn = []
        for draw in range(NUM_DRAWS):
            pairs = draw_pairs(args, batch, draw, shares, is_stratified)
            drawn.append(surrogates(args, model, batch, pairs, is_weighted))
        values = torch.stack(drawn).unflatten(1, (NUM_PROMPTS, args.group_size))  # (draws, prompts, G)
        variation = (values.std(2) / values.mean(2)).mean()
        centred = values - values.mean(2, keepdim=True)
        noise = centred.var(0).mean() / centred.pow(2).mean()
        print(f"{name:34} {variation:10.3f} {noise:7.2f}", flush=True)


if __name__ == "__main__":
    main()
