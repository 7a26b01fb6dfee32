"""Pictures that records and pairs name: checked by their header, and decoded where they are used.

One rule decodes pictures, masks and pairs alike (`StoredImage.open` and `decode`).
"""

import functools
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import RunError, error_prefix, reason, truncate
from common.process import print_message

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

DECODING = "sRGB, on white"  # what decode makes of a file: part of the key of what is kept of pictures
SAME_SHAPE = 0.05  # relative: the most by which two aspect ratios differ that pass as one
# Pillow reads more, some (EPS) by calling a program. Its JPEG also reads a camera's MPO.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
# of 255: the most by which colours move under a profile that counts as sRGB's own, of which there are many
SAME_COLOUR = 2


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
        """Of its file, which is not read for it."""
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)

    @property
    def digested(self) -> Path | bytes:
        """What stands for it in a digest of records: the path, or the bytes."""
        return self.content

    def read_bytes(self) -> bytes:
        """Its content."""
        return self.content.read_bytes() if isinstance(self.content, Path) else self.content

    def open(self) -> Image.Image:
        """The image as Pillow has it before it is decoded: its header.

        Raises:
            ValueError: without its place: it is missing, no picture of FORMATS, has several frames, floats or 32 bits.
        """
        if isinstance(self.content, Path) and not self.content.is_file():
            raise ValueError("no such file")
        try:
            image = Image.open(
                self.content if isinstance(self.content, Path) else io.BytesIO(self.content), "r", FORMATS
            )
        except UnidentifiedImageError:
            raise ValueError(f"not a readable image; images are read from {', '.join(FORMATS)}") from None
        fault = ""
        # the first frame of an MPO is the photograph; behind it are previews or a depth map
        num_frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        if num_frames > 1:
            fault = f"has {num_frames} frames; save one of them as a file of its own"
        elif image.mode in ("I", "F"):
            fault = f"has Pillow's mode {image.mode}; save it with 8 or 16 bits per channel"
        if fault:
            image.close()
            raise ValueError(fault)
        return image

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """(width, height) of the upright picture, from the header."""
        with self.open() as image:
            turned = image.format != "TIFF" and _orientation(image) >= 5  # Pillow turns a TIFF's size itself
            return image.size[::-1] if turned else image.size

    def decode(self, has_colours: bool = True) -> Image.Image:
        """The picture as sRGB with 8 bits, turned upright as its EXIF says, on white where it is transparent.

        Its colour profile is applied, unless its values are no colours: those of a mask. Of grey with 16 bits the upper
        8 are taken. Nothing else of EXIF is read: a broken tag does not matter.

        Raises:
            RunError: it is damaged behind its header.
        """
        try:
            with self.open() as opened:
                opened.load()  # which turns a TIFF
                image: Image.Image = opened
                if opened.mode.startswith("I;16"):  # convert would clip it
                    grey = np.asarray(opened)
                    image = Image.fromarray((grey >> 8).astype(np.uint8))
                    if "transparency" in opened.info:  # one shade, of 16 bits
                        image.putalpha(Image.fromarray(grey != opened.info["transparency"]).convert("L"))
                if has_colours and opened.info.get("icc_profile"):
                    image = _as_srgb(image, opened.info["icc_profile"], str(self.place))
                if image.has_transparency_data:
                    layer = image.convert("RGBA")
                    image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
                image = image.convert("RGB")
                image.info = {}  # exif_transpose would write all tags again
                image.getexif()[ExifTags.Base.Orientation] = _orientation(opened)
                return ImageOps.exif_transpose(image)
        except Exception as error:
            raise RunError(truncate(f"{self.place}: cannot be decoded ({reason(error)})")) from error


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation of an opened image, 1 to 8; 1 where it has none that can be read."""
    with suppress(Exception):  # whatever broken EXIF makes Pillow raise
        # not image.getexif(): a PNG's decodes the picture, to look behind it
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
        if isinstance(value, int) and 1 <= value <= 8:
            return value
    return 1


_reported: set[str] = set()  # faults of colour profiles


def _as_srgb(image: Image.Image, profile: bytes, name: str) -> Image.Image:
    """An image in the colours that its profile says, as RGB or RGBA. It stays as it is where the profile is sRGB's, and
    where it cannot be used, which a line says of `name`, the first with that fault."""
    mode = {"1": "L", "L": "L", "LA": "L", "CMYK": "CMYK"}.get(image.mode, "RGB")
    if mode == "L" and profile[16:20] == b"RGB ":  # its colour space: a tool has kept it where it made the picture grey
        mode = "RGB"
    try:
        transform = _to_srgb(profile, mode)
    except (ImageCms.PyCMSError, OSError, ImportError) as error:  # the last is of a Pillow without LittleCMS
        if (fault := reason(error)) not in _reported:  # a data set may have 100,000 such pictures
            _reported.add(fault)
            line = truncate(f"{name}: its colour profile cannot be used ({fault})")
            print_message(f"{line}; it is read as sRGB, and so is each picture with this fault")
        return image
    if transform is None:
        return image
    colours = ImageCms.applyTransform(image.convert(mode), transform)
    assert colours  # it is not changed in place
    if image.has_transparency_data:
        colours.putalpha(image.convert("RGBA").getchannel("A"))
    return colours


@functools.lru_cache(maxsize=64)  # a camera's photographs have the same
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """What brings pixels of a mode, L, RGB or CMYK, from a profile's colours to sRGB; None where they stay the same.

    Raises:
        ImageCms.PyCMSError, OSError: the profile is damaged, or of another mode.
    """
    transform = ImageCms.buildTransform(
        ImageCms.ImageCmsProfile(io.BytesIO(profile)),
        ImageCms.createProfile("sRGB"),
        mode,
        "RGB",
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    if mode == "CMYK":
        return transform
    levels = np.arange(0, 256, 1 if mode == "L" else 15, dtype=np.uint8)
    pixels = levels[None] if mode == "L" else np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, -1, 3)
    before = Image.fromarray(pixels)
    after = ImageCms.applyTransform(before, transform)
    moved = np.asarray(after, dtype=int) - np.asarray(before.convert("RGB"), dtype=int)
    return transform if abs(moved).max() > SAME_COLOUR else None


def check_header(image: StoredImage, name: str) -> None:
    """Raise ValueError, which begins with `name`, for an image whose header cannot be read."""
    with error_prefix(name, Exception):  # over a damaged header Pillow raises nearly anything
        _ = image.size


# ---- condition images, of a model that edits -------------------------------------------------------------------------
def find_pictures(record: dict, prompts: Path, where: str) -> dict:
    """A record whose fields "image" and "mask", as far as it has them, are lists of StoredImage (`find_images`).

    verl's column `images` is read as "image"; no list, it is metadata. A null, or an empty list of verl's, is none.

    Raises:
        ValueError: as find_images; both "image" and `images`, or a mask without a picture.
    """
    fields = ("image", "mask", "images")
    record = {name: value for name, value in record.items() if name not in fields or value is not None}
    if isinstance(record.get("images"), list):
        if "image" in record:
            raise ValueError('"images": the record names pictures by two fields')
        images = record.pop("images")
        record |= {"image": images} if images else {}
    if "mask" in record and "image" not in record:
        raise ValueError('"mask": needs "image", the picture that it belongs to')
    given = {name: record[name] for name in ("image", "mask") if name in record}
    return record | {name: find_images(name, value, prompts, where) for name, value in given.items()}


def find_images(field: str, value: str | bytes | dict | list, prompts: Path, where: str) -> list[StoredImage]:
    """The pictures of a record's field, "image" or "mask": a path relative to the prompt file, or bytes as `datasets`
    writes them to parquet, {"bytes": ..., "path": ...}; or a list of these.

    where: "file:line" or "file, row N" of the record.

    Raises:
        ValueError: a path or bytes are missing, or the header cannot be read.
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
        check_header(found[-1], f'"{field}": {found[-1].place}')
    if not found:
        raise ValueError(f'"{field}": must not be empty')
    return found


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
