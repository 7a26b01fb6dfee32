"""Options as a run's records have them: paths in this checkout from its root, and code that no stranger's record names.

A record is a checkpoint, an args.json, or a file of --args. Which options name files and code, their types say
(common/options.py).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.errors import truncate
from common.files import glob_stars, split_rewards
from common.options import ASSETS, Names, SharedArgs, options_that_name
from common.user_code import code_file

CHECKOUT = ASSETS.parent
RUNS = CHECKOUT / "runs"  # whose records may name code


# ---- paths -----------------------------------------------------------------------------------------------------------
def as_recorded(options: Mapping[str, Any], args_class: type[SharedArgs]) -> dict[str, Any]:
    """The options with paths in this checkout from its root, "assets/embedded": a copy of the checkout has its own
    files, and the records of two machines agree. Other paths stay as they are."""
    return _change_paths(options, args_class, lambda name, text: from_root(text))


def from_record(options: Mapping[str, Any], args_class: type[SharedArgs]) -> dict[str, Any]:
    """The options of a record with relative paths that mean files of this checkout as paths to these.

    Where the checkout is the working directory, they stay as they are.

    Raises:
        ValueError: naming the option: a path leads to one file from the working directory, and to another one from the
            checkout.
    """
    if Path.cwd().samefile(CHECKOUT):
        return dict(options)
    defaults = {field.name: field.default for field in fields(args_class)}  # --cache has a relative one
    return _change_paths(
        options, args_class, lambda name, text: text if text == defaults[name] else _find_in_checkout(name, text)
    )


def _change_paths(
    options: Mapping[str, Any], args_class: type[SharedArgs], change: Callable[[str, str], str]
) -> dict[str, Any]:
    """The options with `change` (option, text) in the place of each text that may be a path."""
    changed = dict(options)
    for name in options_that_name(args_class, Names.FILE).intersection(options):
        value = options[name]
        if isinstance(value, list | tuple):
            changed[name] = type(value)(change(name, text) if isinstance(text, str) else text for text in value)
        elif isinstance(value, str):
            changed[name] = change(name, value)
    return changed


def from_root(text: str) -> str:
    """An absolute path in this checkout, also behind NAME= or before :NAME, from the checkout's root. Any other text
    stays as it is."""
    name, equals, path = text.partition("=")
    if equals and "/" not in name:  # a teacher, ocr=/path
        return f"{name}={from_root(path)}"
    if os.path.isabs(text):
        path = os.path.normpath(text)
        for root in (CHECKOUT, CHECKOUT.resolve()):  # it may be reached by a link
            if Path(path).is_relative_to(root) and Path(path) != root:
                return str(Path(path).relative_to(root))
    return text


def _find_in_checkout(name: str, text: str) -> str:
    label, equals, path = text.partition("=")
    if equals and "/" not in label:
        return f"{label}={_find_in_checkout(name, path)}"
    if os.path.isabs(text) or not (there := _find(CHECKOUT, text)):
        return text
    here = _find(Path.cwd(), text)
    if here and not here.samefile(there):
        raise ValueError(f"--{name} {text}: is both {here} and {there}: give --{name} again")
    return text if here else str(CHECKOUT / text)


def _find(folder: Path, text: str) -> Path | None:
    """The file or folder, or the first that a pattern fits, which a relative path means, also before :NAME."""
    for path in (text, text.rpartition(":")[0]):
        if path and (folder / path).exists():
            return folder / path
        if "*" in path and (found := glob_stars(folder / path)):
            return found[0]
    return None


# ---- code ------------------------------------------------------------------------------------------------------------
def code_values(options: Mapping[str, Any], args_class: type[SharedArgs]) -> list[str]:
    """The texts path/to/file.py:NAME of the options that may name code; of prompts without their rewards."""
    return [split_rewards(text)[1] for texts in _named_code(options, args_class).values() for text in texts]


def _named_code(options: Mapping[str, Any], args_class: type[SharedArgs]) -> dict[str, list[str]]:
    """{option: its values that are code}."""
    found = {}
    for name in sorted(options_that_name(args_class, Names.CODE).intersection(options)):
        if texts := [text for text in _texts(options[name]) if code_file(text)]:
            found[name] = texts
    return found


def _texts(value: object) -> list[str]:
    return [text for text in (value if isinstance(value, list | tuple) else [value]) if isinstance(text, str)]


def _meant(code: str) -> tuple[Path | None, str]:
    """The file that a text path/to/file.py:NAME leads to, and the name, whichever way it is written."""
    file = code_file(code)
    return file and file.resolve(), code.rpartition(":")[2]


def check_code(options: Mapping[str, Any], args_class: type[SharedArgs], file: Path | str, subject: str) -> None:
    """ValueError: the record in `file` names code, and lies outside this checkout's runs/, links followed.

    options: those that would be taken from the record. subject: the record, "--resume other/run: the checkpoint".
    """
    defaults = {field.name: field.default for field in fields(args_class)}
    named = []
    for name, texts in _named_code(options, args_class).items():
        of_script = {_meant(text) for text in _texts(defaults[name])}
        if strange := [text for text in texts if _meant(text) not in of_script]:
            named.append(f"--{name} {' '.join(strange)}")
    if named and not Path(file).resolve().is_relative_to(RUNS.resolve()):
        advice = "give these options again, or pass --trust_code True"
        raise ValueError(truncate(f"{subject} names code, and is not in {RUNS}: {advice}: {'; '.join(named)}"))
