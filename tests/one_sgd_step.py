"""One SGD update of flow_grpo.py's policy on 16 images, four of them left out; saves the LoRA. Run by torchrun."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))
import flow_grpo
from common.data import GroupSampler
from common.distributed import setup_distributed
from common.run.ending import friendly_errors
from common.sde import image_seed
from common.weights.policy import tensors_on_rank_0

import torch


def main(path: str, micro_batch_size: int, shard_ranks: int) -> None:
    args = flow_grpo.Args(
        rollout="local",
        num_prompts=4,
        group_size=4,
        micro_batch_size=micro_batch_size,
        shard_ranks=shard_ranks,
        updates_per_rollout=1,
        num_inference_steps=5,
        sde_window_size=0,
        max_grad_norm=1e9,
        learning_rate=1.0,
    )
    args = flow_grpo.check(args)
    inputs = flow_grpo.prepare(args)
    device = setup_distributed()
    model, parameters = flow_grpo.load_policy(args, inputs, device)
    sampler = GroupSampler(len(inputs.train_set), args.num_prompts, args.group_size, seed=args.seed)
    prompt_rows, prompt_index, image_index = sampler.draw()
    drawn = inputs.train_set.select(prompt_rows)
    seeds = [image_seed(args.seed, 1, index) for index in image_index.tolist()]
    sde_steps = flow_grpo.draw_sde_steps(args, step=1)
    request = flow_grpo.make_request(args, model, drawn, prompt_index, seeds, sde_steps=sde_steps)
    trajectories = flow_grpo.rollout(args, model, None, request)
    old, _ = flow_grpo.find_old_policy(args, model, None, request, trajectories)
    advantages = torch.linspace(-2, 2, 16)
    advantages[[2, 3, 7, 13]] = 0  # a reward failed on these: unequally many on two ranks
    batch = flow_grpo.Batch(request, trajectories, old, advantages[image_index])
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    untimed = SimpleNamespace(timed=lambda name: nullcontext())  # in the place of a Run
    flow_grpo.update(args, untimed, model, optimizer, batch)
    adapter, _ = tensors_on_rank_0(model)
    if torch.distributed.get_rank() == 0:
        torch.save(adapter, path)


if __name__ == "__main__":
    with friendly_errors():
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
