"""One SGD update of flow_grpo.py's policy on 16 images, four of them left out; saves the LoRA. Run by torchrun."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import flow_grpo
from common.distributed import end_distributed, setup_distributed
from common.policy import tensors_on_rank_0
from common.sampler import GroupSampler

import torch


def main(path, micro_batch_size, shard_ranks):
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
    inputs = flow_grpo.check_args(args)
    device = setup_distributed()
    model, trained = flow_grpo.load_policy(args, inputs, device)
    sampler = GroupSampler(len(inputs.train_set), args.num_prompts, args.group_size, args.seed)
    request, _, image_index = flow_grpo.draw_request(args, model, sampler, inputs.train_set, step=1)
    trajectories = flow_grpo.rollout(args, model, None, request)
    old, weights, _ = flow_grpo.old_policy_terms(args, model, None, request, trajectories)
    scores = torch.linspace(-2, 2, 16)[:, None]
    scores[[2, 3, 7, 13]] = torch.nan  # a reward failed on these: unequally many on two ranks
    advantages = scores.nan_to_num()[image_index, 0]
    loss_weights = flow_grpo.loss_weights(scores, args.updates_per_rollout)[image_index]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    batch = flow_grpo.Batch(request, trajectories, old, weights, advantages, loss_weights)
    flow_grpo.update(args, model, optimizer, batch)
    adapter, _ = tensors_on_rank_0(model)
    if torch.distributed.get_rank() == 0:
        torch.save(adapter, path)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    end_distributed()
