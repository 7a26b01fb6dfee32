"""Records of an image and its prompt, from the files that prompts come from: .jsonl, .json, .csv and .parquet.

Before a model loads, a fault is named by file and line or row as far as it shows without decoding an image.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import error_prefix
from common.files import find_shards, read_records, split_source
from common.files.pictures import StoredImage, find_images


class ImageRecord(NamedTuple):
    """An image and the prompt that it shows. The image is not decoded."""

    prompt: str
    image: StoredImage

    @property
    def images(self) -> tuple[StoredImage, ...]:
        """What is trained on."""
        return (self.image,)

    @property
    def sources(self) -> tuple[StoredImage, ...]:
        """It shows no edit."""
        return ()


def read_image_records(sources: Sequence[Path | str]) -> list[ImageRecord]:
    """Read {"prompt", "image"} of all that `sources` name, in their order. An image is a file, relative to the one that
    names it, or the bytes in a column of a .parquet, as `datasets` writes them.

    A source is what names prompts elsewhere: a .jsonl, .json, .csv or .parquet file, a folder of .parquet files, a
    pattern, FILE:FIELD where the prompt is in another field, or path/to/file.py:function. Other fields are not read.
    Of an image only the header is looked at; a damaged one shows when it is encoded. Parquet files are read whole, and
    stay in memory.

    Raises:
        ValueError: naming file and line or row: a record that cannot be used, or whose image is missing or none.
    """
    records = []
    for source in sources:
        path, field = split_source(source)
        with error_prefix(path):
            files = [path] if path.suffix == ".py" else find_shards(path)
        for file in files:  # one by one, as paths of images are relative to it
            for where, record in read_records(f"{file}:{field}" if field else file):
                with error_prefix(where):
                    if record.get("image") is None:
                        raise ValueError('a record needs "image", the path of an image, or its bytes in a parquet file')
                    images = find_images("image", record["image"], file, where)
                    if len(images) > 1:
                        raise ValueError(f'"image": has {len(images)} images; a record has one')
                records.append(ImageRecord(record["prompt"], images[0]))
    return records
