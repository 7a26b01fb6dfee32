"""Preference pairs from files: a .jsonl and image files, or parquet files with TRL's or pick-a-pic's columns.

Before a model loads, a fault is named by file and line or row as far as it shows without decoding an image.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from common.data import PromptSet, read_records
from common.errors import RunError, error_prefix, truncate
from common.images import StoredImage, check_header, find_images
from common.parquet import read_rows
from common.process import print_message

TRL = ("prompt", "chosen", "rejected")  # TRL's columns of preferences; an image as bytes, or as datasets store it
PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")  # columns of its rows that are read
SPLIT = re.compile(r"(train|validation|valid|val|test|dev|eval)[-_.]")  # what begins the names of a split's files
SHARD = re.compile(r"-\d+-of-\d+$")  # and ends them, where there are several


class Pair(NamedTuple):
    """Two images of a prompt and, for a model that edits, of the same condition images. None of them is decoded."""

    prompt: str
    chosen: StoredImage
    rejected: StoredImage
    sources: Sequence[StoredImage] = ()


Pairs = list[Pair]


def read_pairs(path: Path | str) -> Pairs:
    """Read preference pairs: a .jsonl of {"prompt", "chosen", "rejected"}, the latter two image files relative to it,
    or a folder with such a pairs.jsonl ("chosen_score" and "rejected_score" may be given); or a .parquet file with
    pick-a-pic's columns or TRL's (prompt, chosen, rejected), or a folder of such, or a pattern, "data/train-*.parquet".
    A field or column "image" has the pictures that were edited.

    Of the images only the beginning is looked at, and two of one size in bytes are compared: each rank does it for its
    share of the pairs, as torchrun numbers ranks. The rest shows when a pair that is drawn is encoded. Parquet files
    are read whole, and stay in memory.

    Raises:
        ValueError: naming file and line or row: a record that cannot be used, chosen scored below rejected; or a
            folder without pairs, or with several splits.
        RunError: naming them: no such image, not an image, equal images. Another rank may find no fault in its share.
    """
    with error_prefix(path):
        files = _find_files(Path(path))
    read = _read_parquet if files[0].suffix == ".parquet" else _read_jsonl
    pairs = [pair for file in files for pair in read(file)]
    if not pairs:
        raise ValueError(f"{files[0]}: no pairs")
    for row in range(int(os.environ.get("RANK", "0")), len(pairs), int(os.environ.get("WORLD_SIZE", "1"))):
        with refusing_alone():
            _check_images(pairs[row])
    return pairs


def _find_files(path: Path) -> list[Path]:
    """The file itself, or the files that a folder or a pattern stands for; a line names what a pattern or folder of
    .parquet files has."""
    if path.is_dir():
        if (path / "pairs.jsonl").exists():
            return [path / "pairs.jsonl"]
        files = sorted(path.glob("*.parquet"))
        below = sorted({file.parent for kind in ("pairs.jsonl", "*.parquet") for file in path.glob(f"*/{kind}")})
        if not files:
            advice = f"; {below[0]} has some: give that folder" if below else ""
            raise ValueError(f"has no pairs.jsonl and no .parquet files{advice}")
        names = sorted({SHARD.sub("", file.stem) for file in files if SPLIT.match(file.name)})
        if len(names) > 1:
            one = "train" if "train" in names else names[0]
            pattern = path / (f"{one}.parquet" if (path / f"{one}.parquet").exists() else f"{one}-*.parquet")
            raise ValueError(f"has several splits, {', '.join(names)}; give the files of one: --pairs '{pattern}'")
    elif "*" in path.name and not path.exists():
        files = sorted(path.parent.glob(path.name))
        if not files:
            raise ValueError("there are no such files")
    else:
        return [path]
    print_message(truncate(f"--pairs {path}: takes {', '.join(file.name for file in files)}"))
    return files


def pair_prompts(pairs: Sequence[Pair]) -> PromptSet:
    """The prompts of pairs, with the pictures that were edited."""
    records: list[dict] = [{"image": pair.sources} if pair.sources else {} for pair in pairs]
    return PromptSet([pair.prompt for pair in pairs], records)


@contextmanager
def refusing_alone() -> Iterator[None]:
    """ValueErrors in the block become RunErrors, which each rank prints: only this rank may know of the fault."""
    try:
        yield
    except ValueError as error:
        raise RunError(str(error)) from None


def _read_jsonl(path: Path) -> Iterator[Pair]:
    for where, record in read_records(path):
        with error_prefix(where):
            images = []
            for kind in ("chosen", "rejected"):
                if not isinstance(record.get(kind), str):
                    raise ValueError(f'a record needs "{kind}", the path of an image')
                file = path.parent / record[kind]
                images.append(StoredImage(f"{where}: {kind}: {file}", file))
            _check_scores(record.get("chosen_score"), record.get("rejected_score"))
            chosen, rejected = images
            pair = Pair(record["prompt"], chosen, rejected, _find_sources(record, path, where))
        yield pair


def _read_parquet(path: Path) -> Iterator[Pair]:
    """Ties are left out, and counted on the screen."""
    rows = read_rows(path, TRL, PICK_A_PIC, also=["image"])
    num_ties = 0
    for where, row in rows:
        with error_prefix(where):
            prompt, *columns = TRL
            if "caption" in row:
                labels = (row["label_0"], row["label_1"])
                if labels not in ((1, 0), (0, 1), (0.5, 0.5)):
                    raise ValueError(
                        f"label_0 {labels[0]}, label_1 {labels[1]}: must be 1 and 0, 0 and 1, or 0.5 and 0.5"
                    )
                if labels == (0.5, 0.5):
                    num_ties += 1
                    continue
                prompt = "caption"
                columns = ["jpg_0", "jpg_1"] if labels == (1, 0) else ["jpg_1", "jpg_0"]
            if not isinstance(row[prompt], str) or not row[prompt].strip():
                raise ValueError(f"{prompt}: must be a non-empty string")
            images = []
            for column in columns:
                content = row[column].get("bytes") if isinstance(row[column], dict) else row[column]
                if not isinstance(content, bytes):
                    raise ValueError(f"{column}: must be the bytes of an image")
                images.append(StoredImage(f"{where}: {column}", content))
            chosen, rejected = images
            pair = Pair(row[prompt], chosen, rejected, _find_sources(row, path, where))
        yield pair
    if num_ties:
        print_message(f"{path}: {num_ties} of its {len(rows)} pairs are ties, which are left out")


def _find_sources(record: dict, file: Path, where: str) -> list[StoredImage]:
    """The pictures that a record's field or column "image" names; none without one."""
    return [] if record.get("image") is None else find_images("image", record["image"], file, where)


def _check_scores(chosen: float | None, rejected: float | None) -> None:
    given = [score for score in (chosen, rejected) if score is not None]
    for score in given:
        if type(score) not in (int, float) or not -math.inf < score < math.inf:
            raise ValueError("chosen_score and rejected_score must be numbers, and finite")
    if len(given) == 2 and not given[0] > given[1]:
        raise ValueError(f"chosen is scored {chosen}, not above rejected, {rejected}")


def _check_images(pair: Pair) -> None:
    """Raise ValueError for what can be seen without decoding a pair's images."""
    for image in (pair.chosen, pair.rejected):
        with error_prefix(str(image), Exception):  # over a damaged header Pillow raises nearly anything
            check_header(image)
    if pair.chosen.num_bytes == pair.rejected.num_bytes and pair.chosen.read_bytes() == pair.rejected.read_bytes():
        raise ValueError(f"{pair.chosen}: chosen and rejected are the same image")
