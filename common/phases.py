"""What can take hours before the first step: prompts and pairs that are encoded, pairs that are made."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from common.distributed import on_rank_0
from common.process import caught_signals, print_message

from tqdm import tqdm

T = TypeVar("T")


def with_bar(items: Iterable[T], doing: str, total: int) -> Iterator[T]:
    """Yield the `total` items, under a progress bar on rank 0 that says what it is `doing`.

    SIGTERM or SIGINT ends the process before the next item. What was done until then lies in
    files: the next start continues behind it.
    """
    with tqdm(items, desc=doing, total=total, disable=not on_rank_0() or not total) as bar:
        for item in bar:
            if caught_signals:
                bar.close()
                print_message(f"stopped while {doing}; to continue, give the same command with --resume latest")
                raise SystemExit(0)
            yield item
