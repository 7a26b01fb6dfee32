"""What one of many ranks has to do for its own images:  python -m benchmarks.ranks [--ranks 8 1024]

Draws a step, encodes its prompts, compares the pictures of each prompt and keeps embeddings on disk, as a given rank of
a world that is not there: nothing is sent. Counted are the prompts that are encoded, the pairs of pictures that
are compared, the bytes that torch's operators write, and the most that are alive at once. Images and prompts a rank are
the same for every number of ranks, and so should the counts be. The encoder is a stand-in of Stable Diffusion 3.5's
shapes, at a 64th of its width.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from common import metrics
from common.data import GroupSampler, PromptSet, epoch_order
from common.weights.prompt_cache import PromptCache

import torch
import torch.distributed as dist
from PIL import Image
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

Counts = dict[str, int]
NUM_TOKENS, WIDTH = 333, 64


class Bytes(TorchDispatchMode):
    """Counts what operators write, and what is alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.peak = 0
        self.alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.written += tensor.nbytes
                self.alive[StorageWeakRef(storage)] = storage.nbytes()
        self.alive = {storage: size for storage, size in self.alive.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a world whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_rank(
    rank: int, world_size: int, *, images: int, group_size: int, num_mini_batches: int, side: int, num_prompts: int
) -> dict[str, Counts]:
    """{part of a step: counts} of one rank that has `images` of a step's images, of num_prompts prompts in the file."""
    encoded: list[str] = []

    def encode(prompts: Sequence[str], max_sequence_length: int) -> dict[str, torch.Tensor]:
        encoded.extend(prompts)
        return {"prompt_embeds": torch.ones(len(prompts), max_sequence_length, WIDTH, dtype=torch.bfloat16)}

    prompts_per_step = images * world_size // group_size
    train_set = PromptSet([f"prompt {row}" for row in range(num_prompts)], [{}] * num_prompts)
    pictures = [Image.effect_noise((side, side), 50).convert("RGB") for _ in range(images)]
    found: dict[str, Counts] = {}

    def counted(name: str, work: Callable[[], Any]) -> Any:
        with Bytes() as of_torch:
            value = work()
        found[name] = {"written": of_torch.written, "peak": of_torch.peak}
        return value

    dealt = functools.partial(
        GroupSampler, num_prompts, prompts_per_step, group_size, seed=1, num_mini_batches=num_mini_batches
    )
    # the one collective whose answer decides what a rank does: the places of all ranks' images
    places = torch.stack([dealt(rank=r, world_size=world_size).image_index for r in range(world_size)])
    with as_rank(rank, world_size), tempfile.TemporaryDirectory() as folder:
        sampler = dealt()
        epoch_order.cache_clear()  # another rank, which is another process, has not drawn it for this one
        rows, *_ = counted("draw", sampler.draw)
        own = train_set.select(rows).prompts
        counted("encode", lambda: encode(own, NUM_TOKENS))
        found["encode"]["prompts"] = len(encoded)

        compared: list[int] = []
        pdist = torch.pdist
        with (
            mock.patch.object(torch, "pdist", lambda group: compared.append(len(group)) or pdist(group)),
            mock.patch("common.distributed.gather", lambda own_places: places.clone()),
        ):
            counted("diversity", lambda: metrics.rollout_diversity(pictures, sampler))
        found["diversity"]["pairs"] = sum(size * (size - 1) // 2 for size in compared)

        encoded.clear()
        cache = PromptCache(Path(folder), "key", encode)
        drawn = train_set.first_drawn(prompts_per_step, seed=1).prompts
        with mock.patch("common.weights.prompt_cache.gather_objects", lambda value: [value] * world_size):
            counted("cache, filled", lambda: cache.add_missing(drawn, NUM_TOKENS))
        found["cache, filled"]["prompts"] = len(encoded)
        for prompt in own:  # which other ranks encode
            cache.add(prompt, NUM_TOKENS)
        counted("cache, read", lambda: cache.read(own, NUM_TOKENS))
        found["cache, read"]["prompts"] = len(own)
    return found


def count_largest(world_size: int, **sizes: int) -> dict[str, Counts]:
    """The largest counts of some ranks: the first two, which share a group, two in the middle and the last."""
    largest: dict[str, Counts] = {}
    for rank in sorted({0, 1, world_size // 2, world_size // 2 + 1, world_size - 1}):
        for part, counts in count_rank(rank, world_size, **sizes).items():
            for name, value in counts.items():
                before = largest.setdefault(part, {}).get(name, 0)
                largest[part][name] = max(before, value)
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    args = parser.parse_args()
    sizes = {"images": 144, "group_size": 24, "num_mini_batches": 4, "side": 512, "num_prompts": 50_000}
    print(", ".join(f"{name} {value}" for name, value in sizes.items()))
    columns = [count_largest(world_size, **sizes) for world_size in args.ranks]
    print(f"{'':28}", *(f"{world_size:>13,}" for world_size in args.ranks), "    last / first")
    for part, counts in columns[0].items():
        for name in counts:
            values = [column[part][name] for column in columns]
            print(
                f"{part + ', ' + name:28}", *(f"{value:>13,}" for value in values), f"{values[-1] / values[0]:>16.3f}"
            )


if __name__ == "__main__":
    main()
