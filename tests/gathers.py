"""How often ranks gather weights to sample, whole and block by block, and what they sample. Run by torchrun."""

import json
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
import flow_grpo
from common.distributed import end_distributed, setup_distributed
from common.policy import follow
from common.sampler import GroupSampler

import torch
import torch.distributed as dist


def main(path):
    args = flow_grpo.Args(
        rollout="local", num_prompts=2, group_size=4, micro_batch_size=2, updates_per_rollout=1, ema_decay=0.9
    )
    inputs = flow_grpo.check_args(args)
    device = setup_distributed()
    model, trained = flow_grpo.load_policy(args, inputs, device)
    sampler = GroupSampler(len(inputs.train_set), args.num_prompts, args.group_size, args.seed)
    request, _, _ = flow_grpo.draw_request(args, model, sampler, inputs.train_set, step=1)

    def sample(whole):
        args.gather_for_sampling = whole
        with mock.patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gather:
            trajectories = flow_grpo.rollout(args, model, None, request)
        return gather.call_count, trajectories.latents

    whole = sample(True)
    by_block = sample(False)
    with torch.no_grad():
        for parameter in trained:  # what was whole must not be what is sampled with next
            parameter.to_local().add_(0.05)
    after = [sample(True)[1], sample(False)[1]]
    follow(model, "ema", 0.0)
    with flow_grpo.acting(model, "ema"):
        averaged = sample(True)[1]
    if dist.get_rank() == 0:
        Path(path).write_text(
            json.dumps(
                {
                    "gathers": [whole[0], by_block[0]],
                    "same": [torch.equal(whole[1], by_block[1]), torch.equal(*after), torch.equal(after[0], averaged)],
                    "moved": not torch.equal(whole[1], after[0]),
                }
            )
        )


if __name__ == "__main__":
    main(sys.argv[1])
    end_distributed()
