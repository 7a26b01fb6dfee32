"""What a prompt's record may have: its text, the names of its fields, and how it is hashed and written as JSON."""

import functools
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal
from numbers import Real
from typing import Any

from common.errors import RunError, truncate

UNSEEN = {"Cc", "Cf", "Mn", "Zl", "Zp", "Zs"}  # Unicode's categories of what shows nothing by itself
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and symbols that show nothing
# around a name; no combining mark, with which words end, and no joiner, which changes the letter before it
EDGE = rf"[\s\ufeff\u200b\u2060\u00ad\u180e{FILLERS}]+"
# how the text of a chat begins that pandas or a database wrote: '[{"role": ', or Python's "[{'content': "
CHAT = re.compile(r"""["'\s]*\[?\s*\{\s*\\*["'](role|content)\\*["']\s*:""")
KEY = re.compile(r"""["'](role|content)\\*["']\s*:""")


# ---- text -----------------------------------------------------------------------------------------------------------
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


def check_prompt(name: str, text: object) -> None:
    """Raise ValueError, which begins with the field's name, for what is no text, is blank, or is a chat as text."""
    if not isinstance(text, str) or is_blank(text):
        raise ValueError(f"{name}: must be a non-empty string")
    if is_chat(text):
        raise ValueError(f"{name}: is a chat as text ({text[:40]}...): give the text that the user says")


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


# ---- JSON -----------------------------------------------------------------------------------------------------------
def digest_records(records: Iterable[object]) -> str:
    """BLAKE2b of prompts' records, the same in every process. RunError: a dict in one has names of several types, or
    of a type that JSON does not have."""
    hashed = hashlib.blake2b(digest_size=16)
    for record in records:
        try:
            text = json.dumps(record, default=_as_json, sort_keys=True)
        except TypeError as error:
            raise RunError(truncate(f"a record's names cannot be written as JSON's ({error}): {record}")) from error
        hashed.update(text.encode())
    return hashed.hexdigest()


def _as_json(value: Any) -> object:
    """What JSON lacks: bytes, arrays and pictures in memory by their content, a set in order, anything else by its
    text, such as the path of a picture's file."""
    value = getattr(value, "digested", value)  # a StoredImage's own word
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    content = value.tobytes() if hasattr(value, "tobytes") else value
    return hashlib.blake2b(content).hexdigest() if isinstance(content, bytes) else str(value)


def without_nan(value: Any) -> Any:  # whatever a record holds
    """A record, or a value in it, as JSON may have it: None for numbers that are NaN, as empty cells of tables are, or
    infinite, and their name, "NaN", for one that is a key. JSON has neither, although Python writes them."""
    if isinstance(value, dict):
        is_odd = lambda name: isinstance(name, float) and not math.isfinite(name)
        return {json.dumps(name) if is_odd(name) else name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    if isinstance(value, Decimal):
        return value if value.is_finite() else None
    if isinstance(value, Real):  # numpy's too; isfinite would overflow for a long int
        return None if value != value or value in (math.inf, -math.inf) else value
    return value
