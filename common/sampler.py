"""Which images a rollout makes, and which of them are a rank's."""

from common.distributed import gather, launched_world_size
from common.noise import image_seed

import torch
import torch.distributed as dist


class GroupSampler:
    """Draws the next `prompts_per_step` prompts, `group_size` images each, and says which of those images a rank makes.

    Prompts come in the order of a permutation seeded by (seed, epoch), one epoch after another; a draw may span two
    epochs. The state is one number, the prompts drawn so far: the same whatever the number of ranks or of workers.

    The global images of a step are numbered prompt by prompt. They are cut into `num_updates` consecutive mini-batches
    (one per optimizer step), and each mini-batch into as many consecutive shards as there are ranks, so that every
    optimizer step sees the same images on any number of ranks.
    """

    def __init__(self, num_prompts, prompts_per_step, group_size, seed, num_updates=1, rank=None, world_size=None):
        rank = dist.get_rank() if rank is None else rank
        world_size = dist.get_world_size() if world_size is None else world_size
        num_images = prompts_per_step * group_size
        if num_images % (num_updates * world_size):
            raise ValueError(
                f"{prompts_per_step} prompts x {group_size} images do not divide into "
                f"{num_updates} updates x {world_size} ranks"
            )
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.group_size = group_size
        self.seed = seed
        shards = torch.arange(num_images).view(num_updates, world_size, -1)
        self.image_index = shards[:, rank].flatten()  # (B,) global numbers of this rank's images
        self.position = 0
        self._epoch_of_order = None

    def draw(self):
        """The next step's prompt rows (P,); then, for this rank's B images, their prompt's place among these (B,) and
        their global number (B,). Over all ranks, each prompt drawn occurs group_size times."""
        rows = [self._prompt_row(self.position + k) for k in range(self.prompts_per_step)]
        self.position += self.prompts_per_step
        return torch.tensor(rows), self.image_index // self.group_size, self.image_index

    def _prompt_row(self, position):
        epoch = position // self.num_prompts
        if self._epoch_of_order != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(self.num_prompts, generator=generator).tolist()
            self._epoch_of_order = epoch
        return self._order[position % self.num_prompts]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def fit_micro_batch(count, options, num_updates, micro_batch_size):
    """The micro-batch size, lowered to what a rank has of `count` samples in one of `num_updates` updates.

    Raises:
        ValueError: they do not divide into updates, ranks and micro-batches; `options` says which options make them.
    """
    world_size = launched_world_size()
    if count % (num_updates * world_size):
        raise ValueError(f"{options} = {count} cannot be cut into {num_updates} updates x {world_size} ranks")
    per_rank = count // (num_updates * world_size)
    micro_batch_size = min(micro_batch_size, per_rank)
    if per_rank % micro_batch_size:
        raise ValueError(
            f"--micro_batch_size {micro_batch_size}: a rank's share of an update, {per_rank}, cannot be cut into such "
            f"({options} = {count}, {num_updates} updates, {world_size} ranks)"
        )
    return micro_batch_size


def share_of_rank(total):
    """This rank's share of 0 .. total - 1, taken in turn by the ranks; as many on each: a surplus begins anew at 0."""
    world_size = dist.get_world_size()
    per_rank = -(-total // world_size)  # rounded up
    return [place % total for place in range(dist.get_rank(), per_rank * world_size, world_size)]


def gather_shares(rows, total):
    """Rows (B, ...) of share_of_rank(total) on every rank -> all rows (total, ...), in order, on every rank."""
    in_turn = gather(rows).transpose(0, 1)  # (B, world size, ...)
    return in_turn.flatten(0, 1)[:total]


def share_eval_images(eval_set, images_per_prompt):
    """This rank's share of an evaluation: the B images' places among all, their prompts (PromptSet) and seeds.

    The seeds are the same at every evaluation; the images of a prompt have different ones.
    """
    places = share_of_rank(len(eval_set) * images_per_prompt)
    prompts = eval_set.select(place // images_per_prompt for place in places)
    seeds = [image_seed("eval", place % images_per_prompt, place // images_per_prompt) for place in places]
    return places, prompts, seeds
