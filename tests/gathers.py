"""How often ranks gather weights to sample, whole and block by block, and what they sample. Run by torchrun."""

import json
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
import flow_grpo
from common.data import GroupSampler
from common.distributed import setup_distributed
from common.run.ending import friendly_errors
from common.sde import image_seed
from common.weights.policy import acting

import torch
import torch.distributed as dist


def main(path: str) -> None:
    args = flow_grpo.Args(
        rollout="local", num_prompts=2, group_size=4, micro_batch_size=2, updates_per_rollout=1, ema_decay=0.9
    )
    args = flow_grpo.check(args)
    inputs = flow_grpo.prepare(args)
    device = setup_distributed()
    model, parameters = flow_grpo.load_policy(args, inputs, device)
    sampler = GroupSampler(len(inputs.train_set), args.num_prompts, args.group_size, seed=args.seed)
    prompt_rows, prompt_index, image_index = sampler.draw()
    drawn = inputs.train_set.select(prompt_rows)
    seeds = [image_seed(args.seed, 1, index) for index in image_index.tolist()]
    request = flow_grpo.make_request(args, model, drawn, prompt_index, seeds, sde_steps=(0,))

    def sample(*train_with: str) -> tuple[int, int, torch.Tensor]:
        """(how often this rank gathers, bytes that it then has, latents)"""
        args.train_with = train_with
        with mock.patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gather:
            trajectories = flow_grpo.rollout(args, model, None, request)
        return gather.call_count, sum(call.args[0].nbytes for call in gather.call_args_list), trajectories.latents

    num_gathers, num_bytes, first = sample()
    with torch.no_grad():
        for parameter in parameters:  # what was whole must not be what is sampled with next
            parameter.to_local().add_(0.05)
    changed = sample()[2]
    by_block, _, same_by_block = sample("gather_blocks")
    with acting(model, "ema"):  # which has not followed
        averaged = sample()[2]
    offloaded = sample("cpu_offload")[0]
    if dist.get_rank() == 0:
        found = {
            "gathers": {"once": num_gathers, "by block": by_block, "cpu_offload": offloaded},
            "bytes": num_bytes,
            "same": [torch.equal(changed, same_by_block), torch.equal(averaged, first)],
            "moved": not torch.equal(changed, first),
        }
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    with friendly_errors():
        main(sys.argv[1])
