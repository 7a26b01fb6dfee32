"""What an option means that names prompts: a file, a field of it, a folder, a pattern."""

import glob
import re
from collections.abc import Iterable
from pathlib import Path

from common.errors import truncate
from common.process import print_once


def split_rewards(source: Path | str) -> tuple[list[str], str]:
    """(The rewards, what holds the prompts) of an option's REWARD=FILE, or A,B=FILE; no rewards where it names none.

    A file or a pattern that has a = in its name, and is there, is taken as it is.
    """
    text = str(source)
    names, equals, rest = text.partition("=")
    if not equals or "/" in names or any(_is_there(path) for path in (text, text.rpartition(":")[0])):
        return [], text
    return [name.strip() for name in names.split(",")], rest


def _is_there(path: str) -> bool:
    return bool(path) and (Path(path).exists() or ("*" in path and bool(glob_stars(Path(path)))))


def split_source(source: Path | str) -> tuple[Path, str]:
    """(FILE, FIELD) of prompts that an option names as FILE:FIELD, or as file.py:function; FIELD is "" without one.
    Rewards before a = are left out."""
    source = split_rewards(source)[1]
    file, _, field = source.rpartition(":")
    return (Path(source), "") if not file or "/" in field or Path(source).exists() else (Path(file), field)


def source_name(source: Path | str) -> str:
    """What metrics call the prompts: the function, or the file without .jsonl, a pattern without its *."""
    path, field = split_source(source)
    name = path.name if path.is_dir() else path.stem  # a folder's may have a dot: v1.5
    return field if path.suffix == ".py" else name.replace("*", "").strip("-_") or path.parent.name


SPLIT = re.compile(r"(?<![a-z])(train|validation|valid|val|dev|test|eval)(?![a-z])")  # in the name of a file or folder


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
