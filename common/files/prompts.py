"""Prompts from files, whose faults are named by file and line or row before a model loads."""

import csv
import functools
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.data import PromptSet, asks_for
from common.errors import UNREADABLE, error_prefix
from common.files.paths import find_shards, source_name, split_rewards, split_source
from common.files.records import check_prompt, clean_name, clean_names, is_blank
from common.optional import optional_part
from common.process import print_message
from common.user_code import call_user_code, describe, load_function, own_file


def read_prompts(
    paths: Path | str | Sequence[Path | str],
    rewards: dict[str, Callable] | None = None,
    max_prompts: int = 0,
    *,
    others: Iterable[str] = (),
    shares: Sequence[int] = (),
) -> PromptSet:
    """Read prompts from a .txt file (one a line), from the records of a .jsonl or .json file ({"prompt": ..., anything
    else is metadata}), or from the rows of a .csv or .parquet file with a column `prompt`, which in a .parquet may have
    chats as VeRL-Omni writes them; other columns are metadata. FILE:FIELD takes the prompts from another field. A
    folder stands for its .parquet files, a pattern for the files that it fits, and path/to/file.py:function for the
    records, or prompts, that a function without arguments returns. Names of columns and fields lose the white space
    around them, and so do the cells of a .csv; byte order marks are left out wherever they stand in a text. REWARD=FILE
    and A,B=FILE say what rewards those of its prompts ask for whose records do not say it.

    "image" names the pictures that an editing model gets, and "mask" where they change (pictures.py). The prompts of
    several files follow each other. Blank lines are skipped; with max_prompts only the first so many prompts of a file
    are taken. Each prompt is shown to those of the rewards ({name: function}) that it asks for and that have a
    `check`, its metadata to those that have a `check_metadata`. others: names of the run's other rewards, which a
    record may ask for as well. shares: of each file, the share of the draws of a GroupSampler that are of its prompts;
    () if files do not matter.

    Returns a PromptSet.

    Raises:
        ValueError: naming the file and, where there is one, the line or row at fault.
    """
    several = [paths] if isinstance(paths, Path | str) else paths
    whole = PromptSet([], [])
    for path in several:
        # where rewards run, as their checks may need what belongs to that thread
        read = functools.partial(_read_file, path, rewards, max_prompts, others)
        files = sorted({str(own_file(reward)) for reward in (rewards or {}).values()})
        prompts, metadata = call_user_code(
            read, f"reading {path} with the checks of {' and '.join(files) or 'nothing'}"
        )
        whole.prompts += prompts
        whole.metadata += metadata
        whole.files += [source_name(path)] * len(prompts) if len(several) > 1 else []
        whole.shares += [(len(prompts), shares[len(whole.shares)])] if shares else []
    return whole


def _read_file(
    path: Path | str, rewards: dict[str, Callable] | None, max_prompts: int, others: Iterable[str]
) -> tuple[list[str], list[dict]]:
    """The prompts and metadata of one of read_prompts' files."""
    prompts = []
    metadata = []
    asked, _ = split_rewards(path)
    with error_prefix(path):
        if asked:
            _check_asked({"rewards": asked}, rewards, others)
    for where, record, file in _read_with_files(path):
        prompt = record.pop("prompt")
        with error_prefix(where, (*UNREADABLE, SystemExit)):  # a reward's check may exit
            if {"image", "images"} & record.keys():
                record = _find_pictures(record, file, where)
            if "rewards" in record:
                _check_asked(record, rewards, others)
            if asked:
                record.setdefault("rewards", [*asked])
            for attribute, value in (("check", prompt), ("check_metadata", record)):
                for name, reward in (rewards or {}).items():
                    if hasattr(reward, attribute) and asks_for(record, name):
                        with _naming_way_out(path, record, name, rewards or {}, others):
                            getattr(reward, attribute)(value)
            if not isinstance(record.get("negative_prompt", ""), str):
                raise ValueError('"negative_prompt": must be a string')
            record.get("negative_prompt", "").encode()  # as _as_record does with the prompt
        prompts.append(prompt)
        metadata.append(record)
    if 0 < max_prompts < len(prompts):
        print_message(f"{path}: the first {max_prompts} of its {len(prompts)} prompts (--max_prompts)")
        return prompts[:max_prompts], metadata[:max_prompts]
    return prompts, metadata


@contextmanager
def _naming_way_out(
    path: Path | str, record: dict, name: str, rewards: Iterable[str], others: Iterable[str]
) -> Iterator[None]:
    """Add to the ValueError of a reward's check how a prompt is left to the other rewards, if there are some: a record
    or its file, `path`, must ask for one of `rewards`, and may ask for `others`."""
    try:
        yield
    except ValueError as error:
        left = [reward for reward in rewards if reward != name]
        if "rewards" in record or not left or split_rewards(path)[0]:
            raise
        asked = list(dict.fromkeys([*left, *(reward for reward in others if reward != name)]))
        of_file = f"{','.join(asked)}={path}"
        advice = f'a record may ask for other rewards alone: "rewards": {json.dumps(asked)}, and its file: {of_file}'
        raise ValueError(f"{error}; {advice}") from error


def _check_asked(record: dict, rewards: dict[str, Callable] | None, others: Iterable[str]) -> None:
    """Drop "rewards" where it is null, as columns of a table are. ValueError: it names no reward, or one that is not
    the run's (rewards and others; None: not known)."""
    asked = record["rewards"]
    if asked is None:
        del record["rewards"]
        return
    if not isinstance(asked, list) or not all(isinstance(name, str) for name in asked):
        raise ValueError('"rewards": must be a list of names')
    known = dict.fromkeys([*(rewards or ()), *others])
    for name in asked:
        if rewards is not None and name not in known:
            told = f"--reward and --eval_reward name {', '.join(known)}"
            raise ValueError(f'"rewards": {name!r} is no reward of this run; {told}')
    if rewards and not rewards.keys() & set(asked):
        raise ValueError(f'"rewards": asks for none of {", ".join(rewards)}')


def read_records(source: Path | str) -> list[tuple[str, dict]]:
    """[("file:line", {"prompt": ..., more})] of what holds prompts; takes the same and raises as read_prompts does."""
    return [(where, record) for where, record, _ in _read_with_files(source)]


def _read_with_files(source: Path | str) -> list[tuple[str, dict, Path]]:
    """read_records, each with the file beside which its pictures are: of a folder any file in the folder itself."""
    path, field = split_source(source)
    source = split_rewards(source)[1]
    entries: Iterable[tuple[str, object, Path]]
    advice = ", and FILE:FIELD names another field"
    if path.suffix == ".py" and field:
        entries, field, advice = ((*entry, path) for entry in _call_function(str(source))), "prompt", ""
    else:
        with error_prefix(path):
            files = find_shards(path)
        field = clean_name(field) or "prompt"
        in_folder = path / "shards" if path.is_dir() else None
        entries = ((*entry, in_folder or file) for file in files for entry in _read_entries(file, field))
    records = []
    for where, entry, file in entries:
        with error_prefix(where):
            records.append((where, _as_record(entry, field, advice), file))
    if not records:
        raise ValueError(f"{source}: no prompts")
    return records


@functools.cache  # it may take long, and the record of a run asks again
def _call_function(location: str) -> list[tuple[str, object]]:
    """(Place, record or prompt) of all that a user's function, path/to/file.py:function, returns."""
    function = load_function(location, "prompts of")

    def call() -> tuple[bool, list]:
        returned = function()
        is_one = returned is None or isinstance(returned, str | dict)  # no list of letters or keys
        return is_one, [returned] if is_one else list(returned)

    try:
        is_one, entries = call_user_code(call, f"prompts of {location}", own_file(function))
    except (Exception, SystemExit) as error:
        raise ValueError(f"prompts of {location}: {describe(error, function)}") from error
    if is_one:
        raise ValueError(f"prompts of {location}: it returned a {type(entries[0]).__name__}, not a list or a generator")
    return [(f"{location}, record {number}", entry) for number, entry in enumerate(entries)]


def _read_entries(path: Path, field: str) -> Iterator[tuple[str, object]]:
    """(Place, record or prompt) of all that a file has. One at a time, so that the first at fault is named."""
    if path.suffix == ".parquet":
        yield from optional_part("files.parquet", str(path)).read_chats(path, field)
        return
    with error_prefix(path):
        text = _read_text(path)
        if path.suffix == ".txt" and field != "prompt":
            raise ValueError(f"has no field {field}: each line of a .txt is a prompt")
        entries = _parse_json(text) if path.suffix == ".json" else []
        if not isinstance(entries, list):
            raise ValueError("must be a list of records or prompts: [...]")
    if path.suffix == ".json":
        yield from ((f"{path}, record {number}", entry) for number, entry in enumerate(entries))
    elif path.suffix == ".csv":
        yield from _read_csv(path, text)
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if not is_blank(line):
                with error_prefix(f"{path}:{number}"):
                    entry = line.strip() if path.suffix == ".txt" else _parse_json(line)
                yield f"{path}:{number}", entry


def _parse_json(text: str) -> Any:  # whatever JSON holds
    """The value of a JSON text. ValueError: it is none, or a record in it has a name twice."""
    twice = []

    def as_dict(pairs: list[tuple[str, Any]]) -> dict:
        record = dict(pairs)
        if len(record) < len(pairs):
            twice.append(next(name for name in record if [key for key, _ in pairs].count(name) > 1))
        return record

    with error_prefix("not JSON that can be read"):
        value = json.loads(text, object_pairs_hook=as_dict)
    if twice:
        raise ValueError(f'"{twice[0]}" stands twice in a record, and one value would be lost')
    return value


def _read_text(path: Path) -> str:
    if path.suffix not in (".txt", ".jsonl", ".json", ".csv"):
        raise ValueError("prompts are read from .txt, .jsonl, .json, .csv and .parquet files, and file.py:function")
    if not path.is_file():
        raise ValueError("no such file")
    # a mark stands at the beginning of each file that `cat` has put together
    text = path.read_text(encoding="utf-8").replace("\ufeff", "")
    if is_blank(text):
        raise ValueError("no prompts")
    return text


def _read_csv(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """The rows below the line that names the columns, with the line on which each ends. Cells lose the white space
    around them, and an empty cell is no field."""
    table = csv.reader(io.StringIO(text), strict=True, skipinitialspace=True)
    try:
        first = next(table)
        names = clean_names(first, may_lack=True)
        for row in table:
            if not row:
                continue
            if len(row) != len(names):
                columns = f"the {len(names)} columns of the first line"
                raise ValueError(f"has more or fewer cells than {columns}; text with a comma needs quotes")
            if row == first and len(names) > 1:  # of one column it may be a prompt
                raise ValueError("is the line of names again: give files that are put together one by one")
            cells = [(name, cell.strip()) for name, cell in zip(names, row, strict=True) if not is_blank(cell)]
            if [name for name, _ in cells].count("") > 1:
                raise ValueError("has text in two columns without a name")
            yield f"{path}:{table.line_num}", dict(cells)
    except (ValueError, csv.Error) as error:
        way = "; put a cell that has quotes in quotes as a whole, and write each quote in it twice"
        advice = way if "expected after" in str(error) else ""
        raise ValueError(f"{path}:{table.line_num}: {error}{advice}") from None


def _as_record(entry: object, field: str, advice: str) -> dict:
    """An entry's record with its prompt, which stands in `field`, as "prompt"; the entry may be the prompt alone.

    advice: for a record that has other fields, at the end of the error."""
    record = {field: entry} if isinstance(entry, str) else {}
    if isinstance(entry, dict):
        texts = iter(clean_names(name for name in entry if isinstance(name, str)))
        record = {next(texts) if isinstance(name, str) else name: value for name, value in entry.items()}
    prompt = record.pop(field, None)
    if not isinstance(prompt, str) or is_blank(prompt):
        found = f"; it has {', '.join(map(str, record))}{advice}" if record else ""
        raise ValueError(f'a record needs "{field}", a non-empty string{found}')
    check_prompt(field, prompt)
    if field != "prompt" and "prompt" in record:
        record.setdefault("original_prompt", record.pop("prompt"))
    prompt.encode()  # raises UnicodeEncodeError for half of a surrogate pair, which JSON can write and UTF-8 cannot
    return record | {"prompt": prompt}


def _find_pictures(record: dict, file: Path, where: str) -> dict:
    """find_pictures of a part that may be missing."""
    return optional_part("files.pictures", where).find_pictures(record, file, where)


def count_sources(num_sources: tuple[int, int], path: Path | str) -> int:
    """Condition images of each prompt: where the model lets the records decide, as many as the file's first has.

    num_sources: the fewest and the most that the model takes.

    Raises:
        ValueError: that record cannot be read, or names a picture that cannot be used.
    """
    least, most = num_sources
    if least == most:
        return least
    where, record, file = _read_with_files(path)[0]  # all files of a run have equally many pictures
    with error_prefix(where):
        found = len(_find_pictures(record, file, where).get("image", ()))
        if found > most:
            raise ValueError(f'has {found} "image"; the model takes {least} to {most}')
    return max(least, found)  # a plan may be asked for before there are records
