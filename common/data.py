"""A set of prompts; which images a rollout makes of them, and which of these are a rank's."""

import copy
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.distributed import data_rank, data_world_size, gather, launched_world_size, ranks_per_image
from common.process import print_once
from common.sde import image_seed

import torch
from PIL.Image import Image


@dataclass
class PromptSet:
    """Prompts and their metadata, in the order of their file."""

    prompts: list[str]
    metadata: list[dict]  # for the rewards: the other fields of a record or columns of a row
    files: list[str] = field(default_factory=list)  # the names of the prompts' files (source_name), if several
    shares: list[tuple[int, int]] = field(default_factory=list)  # with --train_shares: `parts`

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Iterable[int] | torch.Tensor) -> "PromptSet":
        """The prompts of some rows, in their order, repeated where they repeat."""
        rows = [int(row) for row in rows]
        files = [self.files[row] for row in rows] if self.files else []
        return PromptSet([self.prompts[row] for row in rows], [self.metadata[row] for row in rows], files)

    def asking(self, reward: str) -> list[int]:
        """The rows of those prompts that ask for a reward."""
        return [row for row, record in enumerate(self.metadata) if asks_for(record, reward)]

    def sources(self) -> list[list[Image]]:
        """The condition images of each prompt, decoded; [] where a record has none."""
        return [[source.decode() for source in record.get("image", ())] for record in self.metadata]

    def for_rewards(self) -> list[dict]:
        """A copy of the metadata, for rewards to read and change, with the pictures of an edit decoded."""

        @functools.cache  # the images of a prompt share its pictures
        def decode(picture: Any, has_colours: bool) -> Image:  # a StoredImage of common/files/pictures.py
            return picture.decode(has_colours=has_colours)

        copies = [copy.deepcopy(record) for record in self.metadata]  # one each: a record may be there twice
        for record in copies:
            if "image" in record:
                for name in {"image", "mask"} & record.keys():
                    record[name] = [decode(picture, name != "mask").copy() for picture in record[name]]
        return copies

    @property
    def parts(self) -> list[tuple[int, int]]:
        """What a GroupSampler draws from: (prompts, share) of each file, or of all files together without shares."""
        return self.shares or [(len(self), 1)]

    def first_drawn(self, count: int, seed: int | None) -> "PromptSet":
        """The prompts among the first `count` that a GroupSampler of that seed draws, each once, in their order."""
        count = min(count, draws_with_all(self.parts, num_epochs=1))
        return self.select(dict.fromkeys(drawn_row(self.parts, seed, position) for position in range(count)))

    def negatives(self, default: str) -> "PromptSet":
        """What guidance moves the image of each prompt away from: a record's "negative_prompt", otherwise the default.

        The metadata stay, as some models that edit show the pictures to the negative prompt as well.
        """
        return PromptSet([record.get("negative_prompt", default) for record in self.metadata], self.metadata)


def asks_for(record: dict, reward: str) -> bool:
    """Whether a prompt's record asks for a reward: its field "rewards" names it, or it has no such field."""
    return reward in record.get("rewards", (reward,))


# ---- which images a rollout makes, and which of them are a rank's ----------------------------------------------------
@functools.lru_cache(maxsize=64)  # two epochs of each of several files
def epoch_order(num_prompts: int, seed: int | None, epoch: int, file: int = 0) -> list[int]:
    """The rows of all prompts, or of a file's, in the order in which an epoch draws them; seed None: as they stand."""
    if seed is None:
        return list(range(num_prompts))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + (file << 24))  # torch reads 32 bits
    return torch.randperm(num_prompts, generator=generator).tolist()


@functools.lru_cache(maxsize=1)
def shared_draws(shares: tuple[int, ...]) -> list[tuple[int, int]]:
    """(file, number of its draw) of sum(shares) draws, evenly spread: of shares 2 1 the files 0, 1, 0."""
    # draw j of a file stands in the middle of the j-th of `share` equal parts
    draws = [((2 * j + 1) / share, file, j) for file, share in enumerate(shares) for j in range(share)]
    return [(file, j) for _, file, j in sorted(draws)]


def drawn_row(parts: Sequence[tuple[int, int]], seed: int | None, position: int) -> int:
    """The row of the prompt that is drawn at a position, from 0. parts: (prompts, share) of each file."""
    shares = tuple(share for _, share in parts)
    turn, place = divmod(position, sum(shares))
    file, j = shared_draws(shares)[place]
    num_prompts, share = parts[file]
    epoch, place = divmod(turn * share + j, num_prompts)
    return sum(number for number, _ in parts[:file]) + epoch_order(num_prompts, seed, epoch, file)[place]


def draws_with_all(parts: Sequence[tuple[int, int]], num_epochs: int) -> int:
    """After how many draws every file has been drawn so often. parts: (prompts, share) of each file."""
    return sum(share for _, share in parts) * max(-(-num_epochs * number // share) for number, share in parts)


class Redrawn(NamedTuple):
    """Which of a rank's B images a further rollout of a step makes, for other prompts than before."""

    rows: torch.Tensor  # (n,), as many on every rank: sharded weights need equally many passes of all
    num_new: int  # the first so many are images of other prompts; the rest only fills up, and is thrown away


class GroupSampler:
    """Draws the next `prompts_per_step` prompts, `group_size` images each, and says which of those images a rank makes.

    Prompts come in the order of a permutation seeded by (seed, epoch), or of their file where seed is None, one epoch
    after another; a draw may span two epochs. Of several parts with shares (--train_shares) each has epochs of its own,
    and they take turns: of sum(shares) prompts in a row each part has exactly its share. The state is one number, the
    prompts drawn so far: the same whatever the number of ranks or of workers.

    The images of a step are numbered over all ranks, prompt by prompt. They are cut into num_mini_batches consecutive
    mini-batches, one per optimizer step, and each mini-batch into as many consecutive shares as there are ranks. Every
    optimizer step then sees the same images on any number of ranks.

    Groups of a step may be drawn again (common/redraw.py). The j-th of them, over all ranks, gets the j-th of the next
    prompts, and keeps its place in the step and its ranks.
    """

    def __init__(
        self,
        num_prompts: int | Sequence[tuple[int, int]],
        prompts_per_step: int,
        group_size: int,
        num_mini_batches: int = 1,
        *,
        seed: int | None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """num_prompts: how many there are to draw from, or the `parts` of a PromptSet. Of 0 nothing is drawn. rank and
        world_size: by default data_rank() and data_world_size(), as the ranks of a sequence group have the same images.
        """
        rank = data_rank() if rank is None else rank
        world_size = data_world_size() if world_size is None else world_size
        self.parts = [(num_prompts, 1)] if isinstance(num_prompts, int) else num_prompts
        num_images = prompts_per_step * group_size
        if sum(number for number, _ in self.parts) and num_images % (num_mini_batches * world_size):
            raise ValueError(
                f"{prompts_per_step} prompts x {group_size} images do not divide into "
                f"{num_mini_batches} mini-batches x {world_size} ranks"
            )
        self.prompts_per_step = prompts_per_step
        self.group_size = group_size
        self.seed = seed
        self.num_mini_batches = num_mini_batches
        self.world_size = world_size
        mini_batch = num_images // num_mini_batches
        share = mini_batch // world_size
        starts = torch.arange(num_mini_batches) * mini_batch + rank * share  # (num_mini_batches,)
        # global numbers of this rank's images, (B,)
        self.image_index = (starts[:, None] + torch.arange(share)).flatten()
        self.position = 0
        # of a curriculum (common/curriculum.py), (M,) each: how likely each prompt is, and what its last group scored,
        # NaN until it has one; None: prompts are drawn in epochs
        self.weights: torch.Tensor | None = None
        self.scores: torch.Tensor | None = None
        self.scored_prompts = ""  # a digest of the prompts that these belong to
        # of the step that was drawn last: the row of each group's prompt, and its rollout in the step, (P,) each
        self.group_rows = torch.zeros(prompts_per_step, dtype=torch.long)
        self.group_rollouts = torch.zeros_like(self.group_rows)
        self.num_rollouts = 0
        self.num_redrawn = 0  # groups
        self.num_sampled = 0  # images over all ranks

    def __str__(self) -> str:
        if not sum(number for number, _ in self.parts):
            return "no prompts to train on"
        num_images = self.prompts_per_step * self.group_size
        sizes = f"{num_images} images = {self.prompts_per_step} prompts x {self.group_size}"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        if ranks_per_image() > 1:
            ranks = f"{self.world_size} x {ranks_per_image()} ranks"
        return f"{sizes}; {self.num_mini_batches} optimizer steps of {num_images // self.num_mini_batches}; {ranks}"

    @property
    def epoch(self) -> float:
        """How often a prompt has been drawn so far, the mean over all prompts."""
        return self.position / sum(number for number, _ in self.parts)

    def upcoming(self, num_steps: int) -> set[int]:
        """The rows of all prompts that the ranks together draw in the next steps."""
        # two epochs' worth has every row
        count = min(num_steps * self.prompts_per_step, draws_with_all(self.parts, num_epochs=2))
        return {drawn_row(self.parts, self.seed, self.position + k) for k in range(count)}

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next step on this rank: its U prompts and its B images of them, of P prompts and N images over all ranks.

        Returns the rows (U,) of the prompts; which of these U each image is of (B,); and the images' numbers (B,) among
        the N, which are numbered prompt by prompt: image i is of prompt i // group_size of the P.
        """
        self.group_rows = self._next_rows(self.prompts_per_step)
        self.group_rollouts = torch.zeros_like(self.group_rows)
        self.num_rollouts, self.num_redrawn = 1, 0
        self.num_sampled = self.prompts_per_step * self.group_size
        return *self.drawn_prompts(), self.image_index

    def redraw(self, is_redrawn: torch.Tensor) -> Redrawn:
        """Draw a further prompt for each of the step's groups that is_redrawn (P,) names, for another rollout."""
        count = int(is_redrawn.sum())
        self.group_rows[is_redrawn] = self._next_rows(count)
        self.group_rollouts[is_redrawn] = self.num_rollouts
        is_new = is_redrawn.repeat_interleave(self.group_size)  # (N,)
        by_rank = is_new.view(self.num_mini_batches, self.world_size, -1).sum((0, 2))  # (world size,), of images
        is_own = is_new[self.image_index]  # (B,)
        rows = torch.cat([is_own.nonzero()[:, 0], (~is_own).nonzero()[:, 0]])
        per_rank = int(by_rank.max())
        self.num_rollouts += 1
        self.num_redrawn += count
        self.num_sampled += per_rank * self.world_size
        return Redrawn(rows[:per_rank], int(is_own.sum()))

    def drawn_prompts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's U prompts of the step: their rows (U,), and which of these U each image is of (B,)."""
        own, prompt_index = (self.image_index // self.group_size).unique(return_inverse=True)  # own: (U,) of the P
        return self.group_rows[own], prompt_index

    def _next_rows(self, count: int) -> torch.Tensor:
        """The rows (count,) of the next prompts over all ranks."""
        positions = range(self.position, self.position + count)
        self.position += count
        if self.weights is None:
            rows = [drawn_row(self.parts, self.seed, position) for position in positions]
        else:  # each draw by a seed of its own: no other draw changes it
            seeds = [image_seed(str(self.seed), "prompt", position) for position in positions]
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            rows = [int(torch.multinomial(self.weights, 1, generator=generator)) for generator in generators]
        return torch.tensor(rows, dtype=torch.long)

    def begin_curriculum(self, prompts: str) -> None:
        """Draw by weights from now on, all 1 at first. prompts: a digest of those that are drawn from."""
        self.scored_prompts = prompts
        num_prompts = sum(number for number, _ in self.parts)
        self.weights = torch.ones(num_prompts, dtype=torch.float64)
        self.scores = torch.full_like(self.weights, torch.nan)

    @property
    def image_numbers(self) -> torch.Tensor:
        """This rank's image_index (B,), counted on over the step's rollouts: no two images of a step share a number."""
        num_images = self.prompts_per_step * self.group_size
        return self.image_index + num_images * self.group_rollouts[self.image_index // self.group_size]

    def redraw_metrics(self) -> dict[str, float]:
        """What the rollouts of the step that was drawn last have cost: rollouts, groups that were replaced, and images
        that all ranks sampled for each image that is trained on."""
        per_image = self.num_sampled / (self.prompts_per_step * self.group_size)
        return {
            "rollout/rollouts": self.num_rollouts,
            "rollout/replaced_groups": self.num_redrawn,
            "rollout/sampled_per_trained": per_image,
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"position": self.position}
        if self.weights is not None and self.scores is not None:
            state |= {"weights": self.weights.clone(), "scores": self.scores.clone(), "prompts": self.scored_prompts}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        if self.weights is None or "weights" not in state or not len(self.weights):  # --eval_only has no prompts
            return
        if state["prompts"] == self.scored_prompts:
            self.weights, self.scores = state["weights"].clone(), state["scores"].clone()
        else:
            counts = f"{len(state['weights'])} of the checkpoint, {len(self.weights)} here"
            print_once(f"--curriculum: the training prompts are not the checkpoint's ({counts}): its scores begin anew")


def fit_micro_batch(
    count: int,
    num_mini_batches: int,
    micro_batch_size: int,
    options: str = "--num_prompts x --group_size",
    *,
    ranks_per_image: int = 1,
    together: int = 1,
) -> int:
    """The micro-batch size, lowered to a rank's share of a mini-batch if that is smaller. 0 stays 0.

    ranks_per_image: the option; so many ranks share a mini-batch's share. together: so many images, a group's, must
    stand in one mini-batch on one rank.

    Raises:
        ValueError: `count` images (or pairs), made by `options`, do not divide into mini-batches, ranks, micro-batches.
    """
    world_size = launched_world_size() // ranks_per_image
    ranks = f"{world_size} ranks" if ranks_per_image == 1 else f"{world_size} groups of {ranks_per_image} ranks"
    if count % (num_mini_batches * world_size):
        raise ValueError(f"{options} = {count} cannot be cut into {num_mini_batches} mini-batches x {ranks}")
    per_rank = count // (num_mini_batches * world_size)
    if per_rank % together:
        raise ValueError(
            f"{options} = {count}: a rank's share of a mini-batch, {per_rank}, cuts a group of {together} images. "
            f"--num_prompts must be a multiple of {num_mini_batches * world_size} "
            f"(--updates_per_rollout {num_mini_batches}, {ranks})"
        )
    micro_batch_size = min(micro_batch_size, per_rank)
    if micro_batch_size and per_rank % micro_batch_size:
        raise ValueError(
            f"--micro_batch_size {micro_batch_size}: a rank's share of a mini-batch, {per_rank}, cannot be cut into it "
            f"({options} = {count}, {num_mini_batches} mini-batches, {ranks})"
        )
    return micro_batch_size


def share_of_rank(total: int) -> list[int]:
    """This rank's share of 0 .. total - 1, dealt to the ranks in turn; the same number for each, from 0 again.

    The ranks of a sequence group have the same share.
    """
    world_size = data_world_size()
    per_rank = -(-total // world_size)  # rounded up
    return [place % total for place in range(data_rank(), per_rank * world_size, world_size)]


def gather_shares(rows: torch.Tensor, total: int) -> torch.Tensor:
    """Rows (B, ...) of share_of_rank(total) on every rank -> all rows (total, ...), in order, on every rank."""
    of_groups = gather(rows)[:: ranks_per_image()]  # (sequence groups, B, ...)
    in_turn = of_groups.transpose(0, 1)
    return in_turn.flatten(0, 1)[:total]


def share_eval_images(eval_set: PromptSet, images_per_prompt: int) -> tuple[list[int], PromptSet, list[int]]:
    """This rank's share of an evaluation: the B images' places among all, their prompts (PromptSet) and seeds.

    The seeds are the same at every evaluation; the images of a prompt have different ones. They go by the prompt's
    place in its file, so that they do not depend on other files.
    """
    places = share_of_rank(len(eval_set) * images_per_prompt)
    rows = [place // images_per_prompt for place in places]
    firsts = {name: eval_set.files.index(name) for name in set(eval_set.files)}  # the first row of each, if several
    of_file = [row - firsts[eval_set.files[row]] if firsts else row for row in rows]
    seeds = [image_seed("eval", place % images_per_prompt, row) for place, row in zip(places, of_file, strict=True)]
    return places, eval_set.select(rows), seeds
