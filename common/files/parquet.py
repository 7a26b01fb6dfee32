"""Rows of parquet files, and the prompts in them."""

import json
from collections.abc import Sequence
from pathlib import Path

from common.errors import error_prefix
from common.files.records import clean_name, clean_names, is_blank, is_chat
from common.process import print_message


def read_rows(
    path: Path, *layouts: Sequence[str], also: Sequence[str] | None = None, advice: str = ""
) -> list[tuple[str, dict]]:
    """[("FILE, row N", {column: value})] of every row, N from 0.

    layouts: lists of columns; the file must have all of one of these lists, and the first such list is read. also:
    further columns that are read if the file has them, None for all. advice: the end of a message about columns. Names
    are without what does not show around them.

    Raises:
        ValueError: naming the file: it is missing, no parquet, damaged, lacks those columns, or has one twice.
    """
    import pyarrow.parquet  # optional

    with error_prefix(path, Exception):  # whatever a damaged file makes pyarrow raise
        if not path.is_file():
            raise ValueError("no such file")
        with pyarrow.parquet.ParquetFile(path) as file:
            stored = file.schema_arrow.names
            found = [clean_name(name) for name in stored]
            needed = next((layout for layout in layouts if set(layout) <= set(found)), None)
            if needed is None:
                expected = f"expected the columns {' or '.join(', '.join(layout) for layout in layouts)}"
                raise ValueError(f"{expected}; found {', '.join(found) or 'none'}{advice}")
            is_read = [also is None or name in {*needed, *also} for name in found]
            names = clean_names(name for name, is_one in zip(found, is_read, strict=True) if is_one)
            columns = [name for name, is_one in zip(stored, is_read, strict=True) if is_one]
            rows = file.read(None if also is None else columns).rename_columns(names).to_pylist()
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows)]


def read_chats(path: Path, column: str = "prompt") -> list[tuple[str, dict]]:
    """[("file, row N", {column: prompt, more})] of rows as VeRL-Omni's, whose `prompt` and `negative_prompt` are chats.

    The prompt is what the user says. What the system says before it is left out, as a pipeline has a template of its
    own. A chat may be written as a JSON text.
    """
    records = []
    num_systems = 0
    for where, row in read_rows(path, [column], advice="; FILE:COLUMN names another"):
        with error_prefix(where):
            chat = _read_chat(column, row[column])
            if is_blank(chat["user"]):
                raise ValueError(f"{column}: must not be blank")
            if "images" in row:  # verl marks their places in the text; a pipeline here has no such marks
                chat["user"] = chat["user"].replace("<image>", "").strip()
            negative = row.pop("negative_prompt", None)
            text = _read_chat("negative_prompt", negative)["user"].strip() if negative is not None else ""
            if not is_blank(text):
                row["negative_prompt"] = text
        if chat.get("system", "").strip():
            num_systems += 1
        records.append((where, row | {column: chat["user"]}))
    if not records:
        raise ValueError(f"{path}: no prompts")
    if num_systems:
        print_message(f"{path}: {num_systems} system messages are left out: what the user says is the prompt")
    return records


def _read_chat(column: str, chat: str | list) -> dict[str, str]:
    """{role: text} of a chat of one user message, with or without a system message; a string is a user's, unless it is
    the JSON of a chat."""
    if isinstance(chat, str):
        if not is_chat(chat):
            return {"user": chat}
        with error_prefix(f"{column}: is a chat as text, and no JSON that can be read"):
            chat = json.loads(chat)
        chat = [chat] if isinstance(chat, dict) else chat
    messages = chat if isinstance(chat, list) else []
    texts: dict = {}
    for message in messages:
        if isinstance(message, dict) and message.get("role") in ("system", "user"):
            texts[message["role"]] = message.get("content")
    are_texts = all(isinstance(text, str) for text in texts.values())
    if not are_texts or "user" not in texts or len(texts) != len(messages):
        raise ValueError(f"{column}: must be a string or one user message of text, with a system message or none")
    return texts
