"""Preference pairs, and files of them: a .jsonl and image files, or parquet files with pick-a-pic's columns.

Before a model loads, a fault is named by file and line or row as far as it shows without decoding an image.
"""

import io
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from common.data import read_records
from common.errors import refusing
from common.pairs.pairs import refusing_alone
from common.parquet import Blob, column_names, read_rows
from common.process import say

from PIL import Image

if TYPE_CHECKING:
    from common.source_images import SourceImage


class PairImage(Protocol):
    """An image of a pair, not decoded; its text names file and line or row."""

    def read_bytes(self) -> bytes:
        """Its content."""
        ...


class Pair(NamedTuple):
    """Two images of a prompt and, for a model that edits, of the same condition images."""

    prompt: str
    chosen: PairImage
    rejected: PairImage
    sources: Sequence["SourceImage"] = ()


class Pairs(Protocol):
    """Preference pairs, their images still in files."""

    @property
    def prompts(self) -> list[str]:
        """Of each pair."""
        ...

    @property
    def num_sources(self) -> list[int]:
        """Of each pair, how many condition images it has."""
        ...

    def __len__(self) -> int: ...

    def select(self, rows: Collection[int]) -> Iterator[tuple[int, Pair]]:
        """Yield (row, pair) of some of the pairs, in order; a RunError names a file that was damaged since."""
        ...


def read_pairs(path: Path | str) -> Pairs:
    """Read preference pairs: a .jsonl of {"prompt", "chosen", "rejected"}, the latter two image files relative to it,
    or a folder with such a pairs.jsonl ("chosen_score" and "rejected_score" may be given); or a .parquet file with
    pick-a-pic's columns or TRL's (prompt, chosen, rejected), or a folder of such. A field or column "image" has the
    pictures that were edited.

    Of the images only the beginning is looked at, and two of one size in bytes are compared: each rank does it for its
    share of the pairs, as torchrun numbers ranks. The rest shows when a pair that is drawn is encoded.

    Raises:
        ValueError: naming file and line or row: a record that cannot be used, chosen scored below rejected.
        RunError: naming them: no such image, not an image, equal images. Another rank may find no fault in its share.
    """
    path = Path(path)
    files = [path]
    with refusing(path):
        if path.is_dir():
            files = sorted(path.glob("*.parquet"))
            if (path / "pairs.jsonl").exists() or not files:
                path = path / "pairs.jsonl"
                files = [path]
    if files[0].suffix == ".parquet":
        return ParquetPairs(files)
    pairs = FilePairs()
    files_of_pairs = []
    for where, record in read_records(path):
        with refusing(where):
            chosen, rejected = [_image_of(record, kind, where, path.parent) for kind in ("chosen", "rejected")]
            _check_scores(record.get("chosen_score"), record.get("rejected_score"))
            sources = _find_sources(record.get("image"), path, where)
        pairs.append(Pair(record["prompt"], chosen, rejected, sources))
        files_of_pairs.append((where, chosen, rejected))
    for row in launched_share(len(pairs)):
        where, chosen, rejected = files_of_pairs[row]
        with refusing_alone(), refusing(where):
            _check_files(chosen, rejected)
    return pairs


def _find_sources(value: str | bytes | dict | list | None, file: Path, where: str) -> "list[SourceImage]":
    """The pictures that a pair's field or column "image" names; none without one."""
    if value is None:
        return []
    from common.source_images import find_images  # only edits have them

    return find_images("image", value, file, where)


def launched_share(total: int) -> range:
    """This rank's share of 0 .. total - 1 before the ranks are connected, by torchrun's environment."""
    return range(int(os.environ.get("RANK", "0")), total, int(os.environ.get("WORLD_SIZE", "1")))


# ---- a .jsonl --------------------------------------------------------------------------------------------------------
class ImageFile(NamedTuple):
    """An image of a pair in a file of its own."""

    where: str  # "FILE:LINE, KIND"
    path: Path

    def __str__(self) -> str:
        return f"{self.where}: {self.path}"

    def read_bytes(self) -> bytes:
        """Its content."""
        return self.path.read_bytes()


class FilePairs(list[Pair]):
    """The pairs of a .jsonl file, their images not read."""

    @property
    def prompts(self) -> list[str]:
        """Of each pair."""
        return [pair.prompt for pair in self]

    @property
    def num_sources(self) -> list[int]:
        """Of each pair, how many condition images it has."""
        return [len(pair.sources) for pair in self]

    def select(self, rows: Collection[int]) -> Iterator[tuple[int, Pair]]:
        """Yield (row, pair) of some of the pairs, in order."""
        for row in sorted(rows):
            yield row, self[row]


def _image_of(record: dict, kind: str, where: str, folder: Path) -> ImageFile:
    """A record's image of that kind."""
    if not isinstance(record.get(kind), str):
        raise ValueError(f'a record needs "{kind}", the path of an image')
    return ImageFile(f"{where}, {kind}", folder / record[kind])


def _check_files(chosen: ImageFile, rejected: ImageFile) -> None:
    """Raise ValueError for what can be seen without decoding a pair's images."""
    for kind, image in (("chosen", chosen), ("rejected", rejected)):
        with refusing(kind):
            if not image.path.is_file():
                raise ValueError(f"no such file: {image.path}")
            with refusing(f"not a readable image: {image.path}", Exception):  # whatever a library raises
                Image.open(image.path).close()  # reads the header alone
    if chosen.path.stat().st_size == rejected.path.stat().st_size and chosen.read_bytes() == rejected.read_bytes():
        raise ValueError("chosen and rejected are the same image")


def _check_scores(chosen: float | None, rejected: float | None) -> None:
    given = [score for score in (chosen, rejected) if score is not None]
    for score in given:
        if type(score) not in (int, float) or not -math.inf < score < math.inf:
            raise ValueError("chosen_score and rejected_score must be numbers, and finite")
    if len(given) == 2 and not given[0] > given[1]:
        raise ValueError(f"chosen is scored {chosen}, not above rejected, {rejected}")


# ---- parquet ---------------------------------------------------------------------------------------------------------
PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")  # columns of its rows that are read
TEXTS = ("caption", "label_0", "label_1")  # those that are small
SOURCE = ("image",)  # of pairs of edits, beside either's columns: the picture that was edited
TRL = ("prompt", "chosen", "rejected")  # TRL's columns of preferences; an image as bytes, or as datasets store it


def pair_rows(
    file: Path, *, has_images: bool, groups: Collection[int] | None = None
) -> Iterator[tuple[str, int, dict]]:
    """Yield ("FILE, row N", row group, row) of a file of pick-a-pic's or TRL's columns, under pick-a-pic's names.

    has_images: whether images are read as well, also those of a column "image". A row has the file's own names of its
    two images in "columns".
    """
    found = column_names(file)
    source = SOURCE if has_images and SOURCE[0] in found else ()
    if set(TRL) <= set(found):
        for where, group, row in read_rows(file, TRL, (*TRL, *source) if has_images else TRL[:1], groups):
            images = [stored["bytes"] if isinstance(stored, dict) else stored for stored in map(row.get, TRL[1:])]
            named = {"caption": row["prompt"], "jpg_0": images[0], "jpg_1": images[1], "label_0": 1, "label_1": 0}
            yield where, group, row | named | {"columns": TRL[1:]}
        return
    for where, group, row in read_rows(file, PICK_A_PIC, (*PICK_A_PIC, *source) if has_images else TEXTS, groups):
        yield where, group, row | {"columns": ("jpg_0", "jpg_1")}


class ParquetPairs:
    """The pairs of parquet files, their images as Blob.

    Images are read from the files when they are asked for, as they may be larger than memory. Ties are left out, and
    counted on the screen.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Reads labels and captions, and in this rank's share of the row groups the headers of the images.

        Raises:
            ValueError, RunError: as read_pairs.
        """
        self.prompts: list[str] = []
        self.num_sources: list[int] = []
        self._places: list[tuple[Path, int, str]] = []  # of each pair: its file, row group and "FILE, row N"
        for file in files:
            num_sources = int(SOURCE[0] in column_names(file))
            num_rows = 0
            num_ties = 0
            for where, group, row in pair_rows(file, has_images=False):
                num_rows += 1
                with refusing(where):
                    _check_texts(row)
                if row["label_0"] == 0.5:
                    num_ties += 1
                    continue
                self.prompts.append(row["caption"])
                self.num_sources.append(num_sources)
                self._places.append((file, group, where))
            if num_ties:
                say(f"{file}: {num_ties} of its {num_rows} pairs are ties, which are left out")
        if not self.prompts:
            raise ValueError(f"{files[0]}: no pairs")
        groups = list(self._groups(range(len(self))))
        for number in launched_share(len(groups)):
            file, group = groups[number]
            with refusing_alone():
                for where, _, row in pair_rows(file, has_images=True, groups={group}):
                    with refusing(where):
                        if row["label_0"] != 0.5:  # a tie, which is left out
                            _check_images(row)
                            _sources_of(where, row)

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Pair]:
        for _, pair in self.select(range(len(self))):
            yield pair

    def select(self, rows: Collection[int]) -> Iterator[tuple[int, Pair]]:
        """Yield (row, pair) of some of the pairs, in order; only the row groups that hold them are read.

        Raises:
            RunError: naming a file that was damaged since.
        """
        for (file, group), wanted in self._groups(sorted(rows)).items():
            with refusing_alone():
                for where, _, row in pair_rows(file, has_images=True, groups={group}):
                    if where in wanted:
                        yield wanted[where], _order_by_label(where, row)

    def _groups(self, rows: Iterable[int]) -> dict[tuple[Path, int], dict[str, int]]:
        """The row groups that hold some of the pairs, and which: {(file, row group): {"FILE, row N": row}}."""
        groups: dict[tuple[Path, int], dict[str, int]] = {}
        for row in rows:
            file, group, where = self._places[row]
            groups.setdefault((file, group), {})[where] = row
        return groups


def _check_texts(row: dict) -> None:
    """Raise ValueError for labels or a caption that cannot be used."""
    labels = (row["label_0"], row["label_1"])
    if labels not in ((1, 0), (0, 1), (0.5, 0.5)):
        raise ValueError(f"label_0 {labels[0]}, label_1 {labels[1]}: must be 1 and 0, 0 and 1, or 0.5 and 0.5")
    is_tie = labels == (0.5, 0.5)
    if not is_tie and (not isinstance(row["caption"], str) or not row["caption"].strip()):
        name = "prompt" if row["columns"] == TRL[1:] else "caption"
        raise ValueError(f"{name}: must be a non-empty string")


def _check_images(row: dict) -> None:
    """Raise ValueError for images that cannot be used, as far as that shows without decoding them."""
    first, second = row["columns"]
    for column, image in ((first, row["jpg_0"]), (second, row["jpg_1"])):
        if not isinstance(image, bytes):
            raise ValueError(f"{column}: must be the bytes of an image")
        with refusing(f"{column}: not a readable image", Exception):
            Image.open(io.BytesIO(image)).close()  # its header: it is decoded when it is drawn
    if row["jpg_0"] == row["jpg_1"]:
        raise ValueError(f"{first} and {second} are the same image")


def _sources_of(where: str, row: dict) -> "list[SourceImage]":
    """The pictures of a row's column "image"; ValueError for none or several, as num_sources is the column's."""
    if SOURCE[0] not in row:
        return []
    sources = _find_sources(row[SOURCE[0]], Path(where), where)
    if len(sources) != 1:
        raise ValueError('"image": each pair of a .parquet must have one picture')
    return sources


def _order_by_label(where: str, row: dict) -> Pair:
    first, second = row["columns"]
    images = [Blob(f"{where}, {first}", row["jpg_0"]), Blob(f"{where}, {second}", row["jpg_1"])]
    if row["label_0"] == 0:
        images.reverse()
    chosen, rejected = images
    return Pair(row["caption"], chosen, rejected, _sources_of(where, row))
