"""Rows of parquet files, and prompts in them. Only runs that name such a file import this one, and pyarrow."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import refusing
from common.process import say

ROWS_AT_ONCE = 64  # in memory: rows of pick-a-pic hold two images each


class Blob(NamedTuple):
    """Bytes of a row, under the names by which those of a file are read from its Path."""

    where: str  # "FILE, row N, COLUMN"
    content: bytes

    def __str__(self) -> str:
        return self.where

    def read_bytes(self) -> bytes:
        """Its content."""
        return self.content


def column_names(path: Path) -> list[str]:
    """The columns of a file; [] of one that cannot be read, which read_rows then names."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_schema(path).names
    except (OSError, pyarrow.ArrowException):
        return []


def read_rows(
    path: Path, needed: Sequence[str], columns: Sequence[str] | None = None, groups: Collection[int] | None = None
) -> Iterator[tuple[str, int, dict]]:
    """Yield ("FILE, row N", row group, {column: value}) of every row, N from 0.

    needed: the columns that the file must have. columns: those to read, None for all. groups: numbers of the row groups
    to read, None for all.

    Raises:
        ValueError: naming the file: it is missing, no parquet, damaged, or lacks one of those columns.
    """
    with refusing(path):
        if not path.is_file():
            raise ValueError("no such file")
    batches = _read_batches(path, needed, columns, groups)
    while True:
        with refusing(path, Exception):  # whatever a damaged file makes pyarrow raise
            batch = next(batches, None)
        if batch is None:
            return
        group, first, rows = batch
        for number, row in enumerate(rows, first):
            yield f"{path}, row {number}", group, row


def _read_batches(
    path: Path, needed: Sequence[str], columns: Sequence[str] | None, groups: Collection[int] | None
) -> Iterator[tuple[int, int, list[dict]]]:
    """Yield (row group, number of the first row, rows); raises whatever pyarrow does."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        found = file.schema_arrow.names
        if not set(needed) <= set(found):
            raise ValueError(f"expected the columns {', '.join(needed)}; found {', '.join(found) or 'none'}")
        end = 0
        for group in range(file.num_row_groups):
            first = end
            end += file.metadata.row_group(group).num_rows
            if groups is None or group in groups:
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    yield group, first, batch.to_pylist()
                    first += batch.num_rows


# ---- what the rows are -----------------------------------------------------------------------------------------------
def read_chats(path: Path) -> list[tuple[str, dict]]:
    """[("file, row N", {"prompt": ..., more})] of rows as VeRL-Omni's, whose `prompt` and `negative_prompt` are chats.

    The prompt is what the user says. What the system says before it is left out, as a pipeline has a template of its
    own.
    """
    records = []
    num_systems = 0
    for where, _, row in read_rows(path, ["prompt"]):
        with refusing(where):
            chat = _read_chat("prompt", row["prompt"])
            if not chat["user"].strip():
                raise ValueError("prompt: must not be blank")
            if "images" in row:  # verl marks their places in the text; a pipeline here has no such marks
                chat["user"] = chat["user"].replace("<image>", "").strip()
            negative = row.pop("negative_prompt", None)
            text = _read_chat("negative_prompt", negative)["user"].strip() if negative is not None else ""
            if text:
                row["negative_prompt"] = text
        if chat.get("system", "").strip():
            num_systems += 1
        records.append((where, row | {"prompt": chat["user"]}))
    if not records:
        raise ValueError(f"{path}: no prompts")
    if num_systems:
        say(f"{path}: {num_systems} system messages are left out: what the user says is the prompt")
    return records


def _read_chat(column: str, chat: str | list) -> dict[str, str]:
    """{role: text} of a chat of one user message, with or without a system message; a string is a user's."""
    if isinstance(chat, str):
        return {"user": chat}
    messages = chat if isinstance(chat, list) else []
    texts: dict = {}
    for message in messages:
        if isinstance(message, dict) and message.get("role") in ("system", "user"):
            texts[message["role"]] = message.get("content")
    are_texts = all(isinstance(text, str) for text in texts.values())
    if not are_texts or "user" not in texts or len(texts) != len(messages):
        raise ValueError(f"{column}: must be a string or one user message of text, with a system message or none")
    return texts
