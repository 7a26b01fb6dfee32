"""How much of a rollout's gradient is signal: the cosine between the gradients of independent rollouts of one policy.

    OMP_NUM_THREADS=2 python -m benchmarks.gradient_agreement --rollout local --num_steps 8 --name /tmp/agreement
    OMP_NUM_THREADS=2 python -m benchmarks.gradient_agreement diffusion_nft --rollout local --num_steps 8 ...

Options are those of flow_grpo.py, or of the script that is named first, which must have rollouts and --kl_coef.
Nothing is learned: each of --num_steps rollouts, of other prompts and other noise, gives its gradient of the policy's
loss (without the KL) and is forgotten. Printed is the mean cosine over all pairs, and their deviation over the root of
the number of rollouts. Of a gradient that is signal plus independent noise the cosine is the share of the squared
length that is signal, so that it grows with the number of images until it nears 1.
"""

import importlib
import math
import sys

from common.cpu import repair_torchvision
from common.run import friendly_errors, parse_args

import torch

FIXED = ("--updates_per_rollout", "1", "--kl_coef", "0")
gradients = []


def keep_gradient(args, model, optimizer):
    """In the place of a script's optimizer_step."""
    trained = [p.grad.full_tensor() for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    gradients.append(torch.cat([gradient.flatten() for gradient in trained]).double())
    optimizer.zero_grad()
    return gradients[-1].norm().item()


def main():
    repair_torchvision()
    words = sys.argv[1:]
    name = words.pop(0) if words and not words[0].startswith("-") else "flow_grpo"
    script = importlib.import_module(name)
    with friendly_errors():
        args = script.check(parse_args(script.Args, __doc__, [*words, *FIXED]))
        script.optimizer_step = keep_gradient
        script.main(args, script.prepare(args))
    directions = torch.stack([gradient / gradient.norm() for gradient in gradients])
    count = len(directions)
    cosines = directions @ directions.T
    others = cosines[~torch.eye(count, dtype=torch.bool)]
    error = others.std().item() / math.sqrt(count)
    print(f"cosine {others.mean():.3f} +- {error:.3f}, {count} rollouts of {args.num_prompts * args.group_size} images")


if __name__ == "__main__":
    main()
