"""Rows of a parquet file, in their order. pyarrow is imported by the first read: without a parquet nothing needs it."""

from typing import NamedTuple

from common.refusals import refusing

ROWS_AT_ONCE = 64  # in memory: rows of pick-a-pic hold two images each


class Blob(NamedTuple):
    """Bytes of a row, under the names by which those of a file are read from its Path."""

    where: str  # "FILE, row N, COLUMN"
    content: bytes

    def __str__(self):
        return self.where

    def read_bytes(self):
        return self.content


def read_rows(path, needed, more=False):
    """Yield ("FILE, row N", {column: value}) of every row, N from 0: of the columns `needed`, or with `more` of all.

    Raises:
        ValueError: naming the file: it is missing, no parquet, damaged, or lacks one of those columns.
    """
    with refusing(path):
        if not path.is_file():
            raise ValueError("no such file")
    number = 0
    batches = _read_batches(path, needed, more)
    while True:
        with refusing(path, Exception):  # whatever a damaged file makes pyarrow raise
            batch = next(batches, None)
        if batch is None:
            return
        for row in batch:
            yield f"{path}, row {number}", row
            number += 1


def _read_batches(path, needed, more):
    """Yield lists of rows; raises whatever pyarrow does."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        found = file.schema_arrow.names
        if not set(needed) <= set(found):
            raise ValueError(f"expected the columns {', '.join(needed)}; found {', '.join(found) or 'none'}")
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=None if more else list(needed)):
            yield batch.to_pylist()
