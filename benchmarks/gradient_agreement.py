"""How much of a rollout's gradient is signal: the cosine between the gradients of independent rollouts of one policy.

    OMP_NUM_THREADS=2 python -m benchmarks.gradient_agreement --rollout local --num_steps 8 --name /tmp/agreement
    OMP_NUM_THREADS=2 python -m benchmarks.gradient_agreement diffusion_nft --rollout local --num_steps 8 ...
    OMP_NUM_THREADS=2 python -m benchmarks.gradient_agreement by_layer --rollout local --num_steps 8 --lora_rank 0 ...

Options are those of flow_grpo.py, or of the script that is named first, which must have rollouts and --kl_coef.
Nothing is learned: each of --num_steps rollouts, of other prompts and other noise, gives its gradient of the policy's
loss (without the KL) and is forgotten. Printed is the mean cosine over all pairs, and their deviation over the root of
the number of rollouts. Of a gradient that is signal plus independent noise the cosine is the share of the squared
length that is signal, so that it grows with the number of images until it nears 1.

by_layer, after the script's name, adds a table of layers, those of all blocks together: which are worth a LoRA? With
--lora_rank 0 it has all of the transformer. Every rollout's gradient stays in the CPU's memory, 4 bytes a weight.
"""

import importlib
import math
import re
import sys

from common.cpu import repair_torchvision
from common.run import friendly_errors, parse_args

import torch

FIXED = ("--updates_per_rollout", "1", "--kl_coef", "0")
gradients = []  # of each rollout {parameter: its gradient, flat, in fp32}


def keep_gradient(args, model, optimizer):
    """In the place of a script's optimizer_step."""
    trained = {name: p.grad for name, p in model.transformer.named_parameters() if p.grad is not None}
    gradients.append({name: gradient.full_tensor().float().cpu().flatten() for name, gradient in trained.items()})
    optimizer.zero_grad()
    return sum(gradient.double().square().sum().item() for gradient in gradients[-1].values()) ** 0.5


def layer_of(name):
    """A parameter's layer, alike for all blocks: transformer_blocks.3.attn.to_q.lora_A.default.weight is
    transformer_blocks.N.attn.to_q."""
    layer = re.sub(r"\.(lora_[AB]\.\w+\.)?(weight|bias)$", "", name)
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", layer)


def agreement(names):
    """The mean cosine of all pairs of rollouts, their deviation over the root of the number of rollouts, and the root
    of the mean squared length, of the gradients of these parameters."""
    products = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for name in names:
        rows = torch.stack([gradient[name] for gradient in gradients]).double()  # (rollouts, numbers)
        products += rows @ rows.T
    squares = products.diagonal()
    cosines = products / squares.outer(squares).sqrt().clamp_min(1e-300)  # 0 where there is no gradient
    others = cosines[~torch.eye(len(gradients), dtype=torch.bool)]
    error = others.std().item() / math.sqrt(len(gradients))
    return others.mean().item(), error, squares.mean().sqrt().item()


def print_layers():
    layers = {}
    for name in gradients[0]:
        layers.setdefault(layer_of(name), []).append(name)
    print("\n| layer | numbers | length of its gradient | cosine |\n|---|---|---|---|")
    rows = [(*agreement(names), layer, names) for layer, names in layers.items()]
    for cosine, error, length, layer, names in sorted(rows, key=lambda row: -row[0]):
        count = sum(gradients[0][name].numel() for name in names)
        print(f"| {layer} | {count:,} | {length:.1e} | {cosine:.3f} +- {error:.3f} |")


def main():
    repair_torchvision()
    words = sys.argv[1:]
    name = "flow_grpo" if not words or words[0].startswith("-") or words[0] == "by_layer" else words.pop(0)
    by_layer = words[:1] == ["by_layer"]
    script = importlib.import_module(name)
    with friendly_errors():
        args = script.check(parse_args(script.Args, __doc__, [*words[by_layer:], *FIXED]))
        script.optimizer_step = keep_gradient
        script.main(args, script.prepare(args))
    cosine, error, _ = agreement(list(gradients[0]))
    num_images = args.num_prompts * args.group_size
    print(f"cosine {cosine:.3f} +- {error:.3f}, {len(gradients)} rollouts of {num_images} images")
    if by_layer:
        print_layers()


if __name__ == "__main__":
    main()
