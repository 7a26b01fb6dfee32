"""Preference pairs from files: a .jsonl and image files, or parquet files with TRL's or pick-a-pic's columns.

Before a model loads, a fault is named by file and line or row as far as it shows without decoding an image.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from common.data import PromptSet
from common.errors import RunError, error_prefix
from common.files import check_prompt, find_shards, read_records
from common.files.pictures import StoredImage, check_header, find_pictures
from common.optional import optional_part
from common.pairs.record_files import ImageRecord
from common.process import print_message

TRL = ("prompt", "chosen", "rejected")  # TRL's columns of preferences; an image as bytes, or as datasets store it
PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")  # columns of its rows that are read


class Pair(NamedTuple):
    """Two images of a prompt and, for a model that edits, of the same condition images. None of them is decoded."""

    prompt: str
    chosen: StoredImage
    rejected: StoredImage
    sources: Sequence[StoredImage] = ()

    @property
    def images(self) -> tuple[StoredImage, ...]:
        """What is trained on."""
        return (self.chosen, self.rejected)


Pairs = list[Pair]


def read_pairs(path: Path | str) -> Pairs:
    """Read preference pairs: a .jsonl of {"prompt", "chosen", "rejected"}, the latter two image files relative to it,
    or a folder with such a pairs.jsonl ("chosen_score" and "rejected_score" may be given); or a .parquet file with
    pick-a-pic's columns or TRL's (prompt, chosen, rejected), a folder of such files, or a pattern of them,
    "data/train-*.parquet".
    A field or column "image", or verl's `images`, has the pictures that were edited.

    Of the images only the header is looked at, unless both have as many bytes: each rank does it for its share of the
    pairs, as torchrun numbers ranks. The rest shows when a pair that is drawn is encoded. Parquet files are read whole,
    and stay in memory.

    Raises:
        ValueError: naming file and line or row: a record that cannot be used, chosen scored below rejected; or a
            folder without pairs.
        RunError: naming them: no such image, or not an image. Another rank may find no fault in its share.
    """
    kept = Path(path) / "pairs.jsonl"  # by this project's own runs
    with error_prefix(path):
        files = [kept] if kept.exists() else find_shards(Path(path))
    read = _read_parquet if files[0].suffix == ".parquet" else _read_jsonl
    pairs = [pair for file in files for pair in read(file)]
    if not pairs:
        raise ValueError(f"{files[0]}: no pairs")
    for row in range(int(os.environ.get("RANK", "0")), len(pairs), int(os.environ.get("WORLD_SIZE", "1"))):
        for image in pairs[row].images:
            with refusing_alone():
                check_header(image, str(image))
        chosen, rejected = pairs[row].chosen, pairs[row].rejected
        with refusing_alone():
            if chosen.num_bytes == rejected.num_bytes and chosen.read_bytes() == rejected.read_bytes():
                raise ValueError(f"{chosen}: chosen and rejected are the same image")
    return pairs


def pair_prompts(pairs: Sequence[Pair | ImageRecord]) -> PromptSet:
    """The prompts of pairs, or of records, with the pictures that were edited."""
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
    rows = optional_part("files.parquet", str(path)).read_rows(path, TRL, PICK_A_PIC, also=["image", "images"])
    num_ties = 0
    for where, row in rows:
        with error_prefix(where):
            prompt, *columns = TRL
            if "caption" in row:
                labels = (row["label_0"], row["label_1"])
                if labels not in ((1, 0), (0, 1), (0.5, 0.5)):
                    raise ValueError(
                        f"label_0 {labels[0]!r}, label_1 {labels[1]!r}: must be 1 and 0, 0 and 1, or 0.5 and 0.5"
                    )
                if labels == (0.5, 0.5):
                    num_ties += 1
                    continue
                prompt = "caption"
                columns = ["jpg_0", "jpg_1"] if labels == (1, 0) else ["jpg_1", "jpg_0"]
            check_prompt(prompt, row[prompt])
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
    """The pictures that a record's field or column "image" names, or verl's `images`; none without one."""
    named = {field: record[field] for field in ("image", "images") if field in record}
    return find_pictures(named, file, where).get("image", [])


def _check_scores(chosen: float | None, rejected: float | None) -> None:
    for score in (chosen, rejected):
        if score is not None and (type(score) not in (int, float) or not -math.inf < score < math.inf):
            raise ValueError(f"chosen is scored {chosen}, not above rejected, {rejected}: {score} is no finite number")
    if chosen is not None and rejected is not None and not chosen > rejected:
        raise ValueError(f"chosen is scored {chosen}, not above rejected, {rejected}")
