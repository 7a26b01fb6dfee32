"""Condition images: the pictures that a prompt's record names, for a model that edits them."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.data import PromptSet, read_records
from common.errors import RunError, brief, reason, refusing
from common.process import say

import numpy as np
from PIL import Image, ImageOps

if TYPE_CHECKING:
    from common.models.family import Family
    from common.pairs.pair_files import Pairs

SIDES = (16, 8192)  # pixels; a larger picture would take seconds and hundreds of MB to decode
SAME_SHAPE = 0.05  # relative: the most by which two aspect ratios differ that pass as one
ORIENTATION = 274  # the tag of EXIF
QUARTER_TURNS = (5, 6, 7, 8)  # its values for pictures that lie on their side
OTHER_NAMES = ("images", "media", "media_refs")  # of a record's field "image", elsewhere


class SourceImage:
    """A picture of a record. Its header has been read; it is decoded where it is used, and not kept."""

    def __init__(self, where: str, content: Path | bytes, field: str = "image") -> None:
        """where: how messages and samples.jsonl name it. content: its file, or the bytes of a parquet row.

        Raises:
            ValueError: it is missing, no picture, animated, or has a side out of SIDES.
        """
        self.where = where
        self.content = content
        found_at = f'"{field}": {self.place}'
        try:
            with self._file() as image:
                self.size = _upright_size(image)
                frames = getattr(image, "n_frames", 1)
                is_photo = image.format == "MPO"  # cameras' JPEG, with a preview or depth map behind the picture
        except Exception as error:  # Pillow raises nearly anything over a damaged header
            raise ValueError(f"{found_at}: {reason(error)}") from error
        if frames > 1 and not is_photo:
            raise ValueError(f"{found_at}: has {frames} frames")
        if min(self.size) < SIDES[0] or max(self.size) > SIDES[1]:
            size = " x ".join(map(str, self.size))
            raise ValueError(f"{found_at}: {size} pixels; sides have {SIDES[0]} to {SIDES[1]}")

    def __str__(self) -> str:
        return self.where

    @property
    def place(self) -> Path | str:
        """Its file, or the row that has its bytes."""
        return self.content if isinstance(self.content, Path) else self.where

    def _file(self) -> Image.Image:
        return Image.open(self.content if isinstance(self.content, Path) else io.BytesIO(self.content))

    def read_bytes(self) -> bytes:
        """Its file's content."""
        return self.content.read_bytes() if isinstance(self.content, Path) else self.content

    def decode(self) -> Image.Image:
        """The picture as RGB with 8 bits, turned upright as its EXIF says, on white where it is transparent.

        Raises:
            RunError: it is damaged behind its header.
        """
        try:
            with self._file() as image:
                upright = ImageOps.exif_transpose(image)
                if upright.mode.startswith("I"):  # 16 bits, which convert would clip
                    upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
                if not upright.has_transparency_data:
                    return upright.convert("RGB")
                layer = upright.convert("RGBA")
                on_white = Image.new("RGBA", layer.size, "white")
                return Image.alpha_composite(on_white, layer).convert("RGB")
        except Exception as error:
            raise RunError(brief(f"{self.place}: cannot be decoded ({reason(error)})")) from error


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) once the picture is turned as its EXIF says, which is read from the header."""
    # without EXIF in its header, getexif would decode a whole PNG to look behind the pixels
    has_exif = image.format != "PNG" or "exif" in image.info
    orientation = image.getexif().get(ORIENTATION, 1) if has_exif else 1
    width, height = image.size
    return (height, width) if orientation in QUARTER_TURNS else (width, height)


def find_pictures(record: dict, prompts: Path, where: str) -> dict:
    """A record whose fields "image" and "mask", as far as it has them, are lists of SourceImage (`find_images`).

    Other systems' names of "image" are read too: a column `images` (verl), and `media` or `media_refs`, lists of
    {"modality": "image", "role": ..., "uri": path} (UniRL). A field of another form is metadata, as without pictures. A
    null, or an empty list under such a name, is none.

    Raises:
        ValueError: as find_images; two of the names, media that are no images, or a mask without a picture.
    """
    named = {name: record[name] for name in OTHER_NAMES if _names_pictures(name, record.get(name))}
    nulls = [name for name in ("image", "mask", *OTHER_NAMES) if name in record and record[name] is None]
    nulls += [name for name in OTHER_NAMES if record.get(name) == []]
    rest = {name: value for name, value in record.items() if name not in named and name not in nulls}
    for name, values in named.items():
        if "image" in rest:
            raise ValueError(f'"{name}": the record names pictures by two fields')
        if name != "images":
            wrong = [one["modality"] for one in values if one["modality"] != "image"]
            if wrong:
                raise ValueError(f'"{name}": has the modality {wrong[0]!r}, where images are taken')
            values = [one.get("uri") for one in values]
        rest["image"] = values
    if "image" not in rest:
        if "image" in nulls and "mask" in rest:
            raise ValueError('"mask": needs "image", the picture that it belongs to')
        return rest
    given = {name: rest[name] for name in ("image", "mask") if name in rest}
    return rest | {name: find_images(name, value, prompts, where) for name, value in given.items()}


def _names_pictures(name: str, value: str | bytes | dict | list | None) -> bool:
    """Whether a field of that name has the form in which the other system names pictures; it may be anyone's field."""
    if not isinstance(value, list) or not value:
        return False
    if name == "images":
        return all(isinstance(one, str | bytes) or (isinstance(one, dict) and "bytes" in one) for one in value)
    return all(isinstance(one, dict) and "modality" in one for one in value)


def find_images(field: str, value: str | bytes | dict | list, prompts: Path, where: str) -> list[SourceImage]:
    """The pictures of a record's field, "image" or "mask": a path relative to the prompt file, or bytes as `datasets`
    writes them to parquet, {"bytes": ..., "path": ...}; or a list of these.

    where: "file:line" or "file, row N" of the record.

    Raises:
        ValueError: a path or bytes are missing, or as SourceImage.
    """
    found = []
    for i, one in enumerate(value if isinstance(value, list) else [value]):
        content = one.get("bytes") or one.get("path") if isinstance(one, dict) else one
        if isinstance(content, str) and content:
            found.append(SourceImage(content, prompts.parent / content, field))
        elif isinstance(content, bytes):
            found.append(SourceImage(f"{where}, {field} {i}", content, field))
        else:
            raise ValueError(f'"{field}": must be a path, or bytes in a parquet file, or a list of these')
    if not found:
        raise ValueError(f'"{field}": must not be empty')
    return found


def show_sources(
    record: dict, picture: Image.Image | None, sample: Image.Image | list[Image.Image]
) -> tuple[dict, Image.Image | None]:
    """A sample's record with the names of its condition images; and its picture, if any, with them to its left.

    The picture is the sample, or shows a few frames of it; condition images are brought to the size of a frame.
    """
    named = record | {"image": [str(source) for source in record["image"]]}
    if picture is None:
        return named, None
    size = sample[0].size if isinstance(sample, list) else sample.size
    beside = Image.new("RGB", (size[0] * (len(record["image"]) + 1), picture.height), "white")
    for column, source in enumerate(record["image"]):
        beside.paste(source.decode().resize(size), (column * size[0], 0))
    beside.paste(picture, (beside.width - size[0], 0))
    return named, beside


def count_sources(family: "type[Family]", options: dict[str, Any]) -> int:  # a run's options, of any type
    """Condition images of each prompt: where the family lets the records decide, as many as the first record has.

    Raises:
        ValueError: that record cannot be read, or names a picture that cannot be used.
    """
    least, most = family.num_sources
    if least == most:
        return least
    # all files of a run have equally many pictures; a run with --pairs does not read --train_prompts
    path = Path(options["eval_prompts"] if options.get("pairs") else options["train_prompts"])
    where, record = read_records(path)[0]
    with refusing(where):
        found = len(find_pictures(record, path, where).get("image", ()))
        if found > most:
            raise ValueError(f'has {found} "image"; {family.__name__} takes {least} to {most}')
    return max(least, found)  # a plan may be asked for before there are records


def check_sources(
    family: "type[Family]",
    prompt_sets: Sequence[tuple[str, PromptSet]],
    pairs: "Pairs | None" = None,
    prompt_cache: str | None = None,
) -> None:
    """Compare the number of pictures of each record with the number that the model takes.

    prompt_sets: with the options that named them. pairs: those of --pairs.

    Raises:
        ValueError: in one line that names the option and the prompt.
    """
    least, most = family.num_sources
    counts = [
        (option, prompts.prompts, [len(record.get("image", ())) for record in prompts.metadata])
        for option, prompts in prompt_sets
    ]
    if pairs is not None:
        counts.append(("--pairs", pairs.prompts, pairs.num_sources))
    taken = str(most or "none") if least == most else f"{least} to {most}"
    first = next((of_records[0] for _, _, of_records in counts if of_records), 0)
    if first and prompt_cache is not None:
        raise ValueError("--prompt_cache: keeps embeddings of texts, and these records have pictures as well")
    for option, prompts, of_records in counts:
        for number, (prompt, count) in enumerate(zip(prompts, of_records, strict=True), start=1):
            pictures = f"{count or 'no'} picture{'s' if count > 1 else ''}"
            found = f'{option}: record {number}, {prompt!r}, has {pictures} ("image")'
            if not least <= count <= most:
                raise ValueError(brief(f"{found}; {family.__name__} takes {taken}"))
            if count != first:
                raise ValueError(brief(f"{found}; the first of all has {first or 'none'}, and each must have as many"))


def say_stretched(option: str, prompts: PromptSet, image_size: tuple[int, int]) -> None:
    """Report the pictures whose aspect ratio differs from that of (height, width), to which they will be brought."""
    height, width = image_size
    sources = [source for record in prompts.metadata for source in record.get("image", ())]
    stretched = []
    for source in sources:
        stretch = (source.size[0] / source.size[1]) / (width / height)
        if max(stretch, 1 / stretch) > 1 + SAME_SHAPE:
            stretched.append(source)
    if stretched:
        first = f"{stretched[0]} is {stretched[0].size[0]} wide and {stretched[0].size[1]} high"
        counts = f"{len(stretched)} of {len(sources)} pictures"
        shape = f"the image, {width} wide and {height} high"
        advice = f"they are stretched to it ({first}): crop them first, or change the size"
        say(f"{option}: {counts} have another shape than {shape}; {advice}")
