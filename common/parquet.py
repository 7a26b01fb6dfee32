"""Rows of parquet files, the shards of a data set, and prompts in them; and what all tables of prompts share."""

import functools
import glob
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.errors import error_prefix, truncate
from common.process import print_message, print_once

SPLIT = re.compile(r"(?<![a-z])(train|validation|valid|val|dev|test|eval)(?![a-z])")  # in the name of a file or folder
# how the text of a chat begins that pandas or a database wrote: '[{"role": ', or Python's "[{'content': "
CHAT = re.compile(r"""["'\s]*\[?\s*\{\s*\\*["'](role|content)\\*["']\s*:""")
KEY = re.compile(r"""["'](role|content)\\*["']\s*:""")
UNSEEN = {"Cc", "Cf", "Mn", "Zl", "Zp", "Zs"}  # Unicode's categories of what shows nothing by itself
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and symbols that show nothing
# around a name; no combining mark, with which words end, and no joiner, which changes the letter before it
EDGE = rf"[\s\ufeff\u200b\u2060\u00ad\u180e{FILLERS}]+"


def find_shards(path: Path) -> list[Path]:
    """The file itself; or the .parquet files of a folder, or the files that a pattern fits, which a line names.

    Raises:
        ValueError: there is none, or they are of several splits, such as train-*.parquet and test-*.parquet.
    """
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        if not files:
            below = _name_patterns(path.glob("*/*.parquet"))
            advice = f"; give those of a folder in it: {' or '.join(below)}" if below else ""
            raise ValueError(truncate(f"the folder has no .parquet files{advice}"))
        is_mixed = len(_name_patterns(files)) > 1
    elif "*" not in str(path) or path.exists():
        return [path]
    else:
        files = glob_stars(path)
        if not files:
            raise ValueError("there are no such files")
        named = [SPLIT.search(file.name) or SPLIT.search(file.parent.name) for file in files]
        is_mixed = len({match[0] for match in named if match}) > 1
    if is_mixed:
        patterns = " or ".join(_name_patterns(files))
        raise ValueError(truncate(f"has files of several splits; give one of them: {patterns}"))
    print_once(truncate(f"{path}: takes {', '.join(file.name for file in files)}"))
    return files


def glob_stars(path: Path) -> list[Path]:
    """The files that a pattern fits, sorted. Only * and [0-9] are special: a folder may have brackets in its name."""
    pattern = glob.escape(str(path)).replace("[*]", "*").replace("[[]0-9]", "[0-9]")
    return sorted(Path(file) for file in glob.glob(pattern))


def _name_patterns(files: Iterable[Path]) -> list[str]:
    """A pattern in quotes for each kind of files, which is how their names begin: 'data/train-*.parquet'."""
    kinds = {(file.parent, re.split(r"\d", file.stem)[0] or "[0-9]", file.suffix) for file in files}
    return sorted(f"'{folder}/{start}*{suffix}'" for folder, start, suffix in kinds)


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has only white space and signs without an image, such as U+200B and U+FEFF."""
    return all(unicodedata.category(letter) in UNSEEN or letter in FILLERS for letter in text)


def clean_names(names: Iterable[str], may_lack: bool = False) -> list[str]:
    """The names of columns or fields without what does not show at their ends.

    may_lack: whether several may be blank, as a spreadsheet's empty columns are.

    Raises:
        ValueError: two are equal then.
    """
    cleaned = [clean_name(name) for name in names]
    twice = [name for name in cleaned if cleaned.count(name) > 1 and not (may_lack and not name)]
    if twice:
        raise ValueError(f'"{twice[0]}" is the name of two columns or fields, of which one would be lost: rename one')
    return cleaned


@functools.cache  # the records of a file have the same
def clean_name(name: str) -> str:
    """A name without the white space, byte order marks and fillers without an image at its ends."""
    return re.sub(rf"^{EDGE}|{EDGE}$", "", name)


def is_chat(text: str) -> bool:
    """Whether a text is a chat: the JSON of messages that all have a role and a content, also if it was written twice;
    or what begins as such and is no JSON, as Python writes a chat, or one that is cut off."""
    if not CHAT.match(text):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {match[1] for match in KEY.finditer(text)} == {"role", "content"}
    if isinstance(value, str):
        return is_chat(value)
    messages = value if isinstance(value, list) else [value]
    return all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages)


def check_prompt(name: str, text: object) -> None:
    """Raise ValueError, which begins with the field's name, for what is no text, is blank, or is a chat as text."""
    if not isinstance(text, str) or is_blank(text):
        raise ValueError(f"{name}: must be a non-empty string")
    if is_chat(text):
        raise ValueError(f"{name}: is a chat as text ({text[:40]}...): give the text that the user says")


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
