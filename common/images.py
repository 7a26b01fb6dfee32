"""Images on disk: those that records name, their headers checked, decoded where they are used; and those of a run."""

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import RunError, error_prefix, reason, truncate
from common.process import print_message

import numpy as np
from PIL import Image, ImageOps, ImageSequence

SIDES = (16, 8192)  # pixels; a larger picture would take seconds and hundreds of MB to decode
SAME_SHAPE = 0.05  # relative: the most by which two aspect ratios differ that pass as one
ORIENTATION = 274  # the tag of EXIF
QUARTER_TURNS = (5, 6, 7, 8)  # its values for pictures that lie on their side
OTHER_NAMES = ("images", "media", "media_refs")  # of a record's field "image", elsewhere


@dataclass(frozen=True)
class StoredImage:
    """An image in a file, or in the bytes of a parquet row. It is read where it is used, and not kept."""

    where: str  # how messages and samples.jsonl name it
    content: Path | bytes

    def __str__(self) -> str:
        return self.where

    @property
    def place(self) -> Path | str:
        """Its file, or the row that has its bytes."""
        return self.content if isinstance(self.content, Path) else self.where

    @property
    def num_bytes(self) -> int:
        """The length of its content."""
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)

    def read_bytes(self) -> bytes:
        """Its content."""
        return self.content.read_bytes() if isinstance(self.content, Path) else self.content

    def open(self) -> Image.Image:
        """The image as Pillow has it before it is decoded: its header."""
        return Image.open(self.content if isinstance(self.content, Path) else io.BytesIO(self.content))

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """(width, height) once it is turned as its EXIF says, which is read from the header."""
        with self.open() as image:
            # without EXIF in its header, getexif would decode a whole PNG to look behind the pixels
            has_exif = image.format != "PNG" or "exif" in image.info
            orientation = image.getexif().get(ORIENTATION, 1) if has_exif else 1
            return image.size[::-1] if orientation in QUARTER_TURNS else image.size

    def decode(self) -> Image.Image:
        """The picture as RGB with 8 bits, turned upright as its EXIF says, on white where it is transparent.

        Raises:
            RunError: it is damaged behind its header.
        """
        try:
            with self.open() as image:
                upright = ImageOps.exif_transpose(image)
                if upright.mode.startswith("I"):  # 16 bits, which convert would clip
                    upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
                if not upright.has_transparency_data:
                    return upright.convert("RGB")
                layer = upright.convert("RGBA")
                on_white = Image.new("RGBA", layer.size, "white")
                return Image.alpha_composite(on_white, layer).convert("RGB")
        except Exception as error:
            raise RunError(truncate(f"{self.place}: cannot be decoded ({reason(error)})")) from error

    def decode_for_pair(self) -> Image.Image:
        """The image of a preference pair: RGB with 8 bits, upright as its EXIF says; transparency is ignored.

        Raises:
            ValueError: naming it: not a readable image.
        """
        with error_prefix(f"{self}: not a readable image", Exception), self.open() as opened:
            opened.load()
            image: Image.Image = opened
            if image.mode.startswith("I;16"):  # 16 bits: convert() would clip them to white
                eight_bits = np.asarray(image).astype(np.float64) / 257
                image = Image.fromarray(eight_bits.round().clip(0, 255).astype(np.uint8))
            return ImageOps.exif_transpose(image).convert("RGB")


# ---- condition images, of a model that edits -------------------------------------------------------------------------
def check_header(image: StoredImage) -> None:
    """Raise ValueError, without its place: it is missing, no picture, animated, or has a side out of SIDES."""
    with image.open() as opened:
        frames = getattr(opened, "n_frames", 1)
        is_photo = opened.format == "MPO"  # cameras' JPEG, with a preview or depth map behind the picture
    if frames > 1 and not is_photo:
        raise ValueError(f"has {frames} frames")
    if min(image.size) < SIDES[0] or max(image.size) > SIDES[1]:
        size = " x ".join(map(str, image.size))
        raise ValueError(f"{size} pixels; sides have {SIDES[0]} to {SIDES[1]}")


def find_pictures(record: dict, prompts: Path, where: str) -> dict:
    """A record whose fields "image" and "mask", as far as it has them, are lists of StoredImage (`find_images`).

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


def find_images(field: str, value: str | bytes | dict | list, prompts: Path, where: str) -> list[StoredImage]:
    """The pictures of a record's field, "image" or "mask": a path relative to the prompt file, or bytes as `datasets`
    writes them to parquet, {"bytes": ..., "path": ...}; or a list of these.

    where: "file:line" or "file, row N" of the record.

    Raises:
        ValueError: a path or bytes are missing, or as check_header.
    """
    found = []
    for i, one in enumerate(value if isinstance(value, list) else [value]):
        content = one.get("bytes") or one.get("path") if isinstance(one, dict) else one
        if isinstance(content, str) and content:
            found.append(StoredImage(content, prompts.parent / content))
        elif isinstance(content, bytes):
            found.append(StoredImage(f"{where}, {field} {i}", content))
        else:
            raise ValueError(f'"{field}": must be a path, or bytes in a parquet file, or a list of these')
        # over a damaged header Pillow raises nearly anything
        with error_prefix(f'"{field}": {found[-1].place}', Exception):
            check_header(found[-1])
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


def warn_stretched(option: str, sources: Sequence[StoredImage], image_size: tuple[int, int]) -> None:
    """Report the pictures whose aspect ratio differs from that of (height, width), to which they will be brought."""
    height, width = image_size
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
        print_message(f"{option}: {counts} have another shape than {shape}; {advice}")


# ---- images and videos of a run --------------------------------------------------------------------------------------
def save_png(path: Path | str, image: Image.Image | list[Image.Image]) -> None:
    """Write a PIL image, or a video (a list of PIL frames) as an animated PNG, which holds every frame to the bit."""
    first, *others = image if isinstance(image, list) else [image]
    if others:
        first.save(path, compress_level=1, save_all=True, append_images=others)
    else:
        first.save(path, compress_level=1)  # faster than the default level, for larger files


def open_png(path: Path | str) -> Image.Image | list[Image.Image]:
    """The PIL image, or the list of PIL frames, that save_png wrote there."""
    with Image.open(path) as file:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(file)]
    return frames[0] if len(frames) == 1 else frames


def as_images(pixels: np.ndarray) -> list:
    """PIL images of pixels (B, H, W, 3) uint8; videos, lists of PIL frames, of (B, F, H, W, 3)."""
    return [Image.fromarray(part) if part.ndim == 3 else as_images(part) for part in pixels]


def as_one_picture(image: Image.Image | list[Image.Image]) -> Image.Image:
    """A PIL image as it is; a video as its first, middle and last frame, one below the other."""
    if not isinstance(image, list):
        return image
    shown = sorted({0, len(image) // 2, len(image) - 1})
    width, height = image[0].size
    picture = Image.new("RGB", (width, len(shown) * height))
    for row, number in enumerate(shown):
        picture.paste(image[number], (0, row * height))
    return picture
