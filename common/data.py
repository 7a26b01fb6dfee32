"""Prompts from files, whose faults are named by file and line or row before a model loads; and the images of a step."""

import copy
import csv
import functools
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

from common.distributed import gather, launched_world_size
from common.errors import UNREADABLE, error_prefix, truncate
from common.images import StoredImage, find_pictures
from common.parquet import check_prompt, clean_name, clean_names, find_shards, is_blank, read_chats
from common.process import print_message
from common.sde import image_seed
from common.user_code import call_user_code, describe, load_function, own_file, own_folder

import torch
import torch.distributed as dist
from PIL.Image import Image


@dataclass
class PromptSet:
    """Prompts and their metadata, in the order of their file."""

    prompts: list[str]
    metadata: list[dict]  # for the rewards: the other fields of a record or columns of a row
    files: list[str] = field(default_factory=list)  # the names of the prompts' files (source_name), if several
    shares: list[tuple[int, int]] = field(default_factory=list)  # with --train_shares: `parts`

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Iterable[int] | torch.Tensor) -> "PromptSet":
        """The prompts of some rows, in their order, repeated where they repeat."""
        rows = [int(row) for row in rows]
        files = [self.files[row] for row in rows] if self.files else []
        return PromptSet([self.prompts[row] for row in rows], [self.metadata[row] for row in rows], files)

    def asking(self, reward: str) -> list[int]:
        """The rows of those prompts that ask for a reward."""
        return [row for row, record in enumerate(self.metadata) if asks_for(record, reward)]

    def sources(self) -> list[list[Image]]:
        """The condition images of each prompt, decoded; [] where a record has none."""
        return [[source.decode() for source in record.get("image", ())] for record in self.metadata]

    def for_rewards(self) -> list[dict]:
        """A copy of the metadata, for rewards to read and change, with the pictures of an edit decoded."""
        decode = functools.cache(StoredImage.decode)  # the images of a prompt share its pictures
        copies = [copy.deepcopy(record) for record in self.metadata]  # one each: a record may be there twice
        for record in copies:
            if "image" in record:
                for name in {"image", "mask"} & record.keys():
                    record[name] = [decode(picture, has_colours=name != "mask").copy() for picture in record[name]]
        return copies

    @property
    def parts(self) -> list[tuple[int, int]]:
        """What a GroupSampler draws from: (prompts, share) of each file, or of all files together without shares."""
        return self.shares or [(len(self), 1)]

    def first_drawn(self, count: int, seed: int) -> "PromptSet":
        """The prompts among the first `count` that a GroupSampler of that seed draws, each once, in their order."""
        count = min(count, draws_with_all(self.parts, num_epochs=1))
        return self.select(dict.fromkeys(drawn_row(self.parts, seed, position) for position in range(count)))

    def negatives(self, default: str) -> "PromptSet":
        """What guidance moves the image of each prompt away from: a record's "negative_prompt", otherwise the default.

        The metadata stay, as some models that edit show the pictures to the negative prompt as well.
        """
        return PromptSet([record.get("negative_prompt", default) for record in self.metadata], self.metadata)


def digest_records(records: Iterable[object]) -> str:
    """BLAKE2b of prompts' records, the same in every process."""
    hashed = hashlib.blake2b(digest_size=16)
    for record in records:
        hashed.update(json.dumps(record, default=_as_json, sort_keys=True).encode())
    return hashed.hexdigest()


def _as_json(value: Any) -> object:
    """What JSON lacks: bytes, arrays and pictures in memory by their content, a set in order, anything else by its
    text, such as the path of a picture's file."""
    if isinstance(value, StoredImage):
        value = value.content
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


def asks_for(record: dict, reward: str) -> bool:
    """Whether a prompt's record asks for a reward: its field "rewards" names it, or it has no such field."""
    return reward in record.get("rewards", (reward,))


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
    around them, and so do the cells of a .csv; byte order marks are left out wherever they stand in a text.

    "image" names the pictures that an editing model gets, and "mask" where they change (common/images.py). The prompts
    of several files follow each other. Blank lines are skipped; with max_prompts only the first so many prompts of a
    file are taken. Each prompt is shown to those of the rewards ({name: function}) that it asks for and that have a
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
    for where, record in read_records(path):
        prompt = record.pop("prompt")
        with error_prefix(where, (*UNREADABLE, SystemExit)):  # a reward's check may exit
            if {"image", "images"} & record.keys():
                record = _find_pictures(record, path, where)
            if "rewards" in record:
                _check_asked(record, rewards, others)
            for attribute, value in (("check", prompt), ("check_metadata", record)):
                for name, reward in (rewards or {}).items():
                    if hasattr(reward, attribute) and asks_for(record, name):
                        with _naming_way_out(record, name, rewards or {}, others):
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
def _naming_way_out(record: dict, name: str, rewards: Iterable[str], others: Iterable[str]) -> Iterator[None]:
    """Add to the ValueError of a reward's check how a prompt is left to the other rewards, if there are some: a record
    must ask for one of `rewards`, and may ask for `others`."""
    try:
        yield
    except ValueError as error:
        left = [reward for reward in rewards if reward != name]
        if "rewards" in record or not left:
            raise
        asked = list(dict.fromkeys([*left, *(reward for reward in others if reward != name)]))
        advice = f'a record may ask for other rewards alone: "rewards": {json.dumps(asked)} (docs/rewards.md)'
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


def split_source(source: Path | str) -> tuple[Path, str]:
    """(FILE, FIELD) of prompts that an option names as FILE:FIELD, or as file.py:function; FIELD is "" without one."""
    file, _, field = str(source).rpartition(":")
    return (Path(source), "") if not file or "/" in field or Path(source).exists() else (Path(file), field)


def source_name(source: Path | str) -> str:
    """What metrics call the prompts: the function, or the file without .jsonl, a pattern without its *."""
    path, field = split_source(source)
    name = path.name if path.is_dir() else path.stem  # a folder's may have a dot: v1.5
    return field if path.suffix == ".py" else name.replace("*", "").strip("-_") or path.parent.name


def read_records(source: Path | str) -> list[tuple[str, dict]]:
    """[("file:line", {"prompt": ..., more})] of what holds prompts; takes the same and raises as read_prompts does."""
    path, field = split_source(source)
    entries: Iterable[tuple[str, object]]
    advice = ", and FILE:FIELD names another field"
    if path.suffix == ".py" and field:
        entries, field, advice = _call_function(str(source)), "prompt", ""
    else:
        with error_prefix(path):
            files = find_shards(path)
        field = clean_name(field) or "prompt"
        entries = (entry for file in files for entry in _read_entries(file, field))
    records = []
    for where, entry in entries:
        with error_prefix(where):
            records.append((where, _as_record(entry, field, advice)))
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
        raise ValueError(f"prompts of {location}: {describe(error, own_folder(function))}") from error
    if is_one:
        raise ValueError(f"prompts of {location}: it returned a {type(entries[0]).__name__}, not a list or a generator")
    return [(f"{location}, record {number}", entry) for number, entry in enumerate(entries)]


def _read_entries(path: Path, field: str) -> Iterator[tuple[str, object]]:
    """(Place, record or prompt) of all that a file has. One at a time, so that the first at fault is named."""
    if path.suffix == ".parquet":
        yield from read_chats(path, field)
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


def _find_pictures(record: dict, source: Path | str, where: str) -> dict:
    """find_pictures, whose paths are relative to the folder that holds the files."""
    path, _ = split_source(source)
    return find_pictures(record, path / "shards" if path.is_dir() else path, where)


def count_sources(num_sources: tuple[int, int], path: Path | str) -> int:
    """Condition images of each prompt: where the model lets the records decide, as many as the file's first has.

    num_sources: the fewest and the most that the model takes.

    Raises:
        ValueError: that record cannot be read, or names a picture that cannot be used.
    """
    least, most = num_sources
    if least == most:
        return least
    where, record = read_records(path)[0]  # all files of a run have equally many pictures
    with error_prefix(where):
        found = len(_find_pictures(record, path, where).get("image", ()))
        if found > most:
            raise ValueError(f'has {found} "image"; the model takes {least} to {most}')
    return max(least, found)  # a plan may be asked for before there are records


def check_sources(num_sources: tuple[int, int], prompt_sets: Sequence[tuple[str, PromptSet]]) -> int:
    """Compare the pictures of each record with those that the model takes. Returns how many each record has.

    num_sources: the fewest and the most that the model takes. prompt_sets: with the options that named them.

    Raises:
        ValueError: in one line that names the option and the prompt.
    """
    least, most = num_sources
    taken = str(most or "none") if least == most else f"{least} to {most}"
    records = [
        (option, number, prompt, len(metadata.get("image", ())))
        for option, prompts in prompt_sets
        for number, (prompt, metadata) in enumerate(zip(prompts.prompts, prompts.metadata, strict=True), start=1)
    ]
    first = records[0][-1] if records else 0
    for option, number, prompt, count in records:
        pictures = f"{count or 'no'} picture{'s' if count > 1 else ''}"
        found = f'{option}: record {number}, {prompt!r}, has {pictures} ("image")'
        if not least <= count <= most:
            raise ValueError(truncate(f"{found}; the model takes {taken}"))
        if count != first:
            raise ValueError(truncate(f"{found}; the first of all has {first or 'none'}, and each must have as many"))
    return first


# ---- which images a rollout makes, and which of them are a rank's ----------------------------------------------------
@functools.lru_cache(maxsize=64)  # two epochs of each of several files
def epoch_order(num_prompts: int, seed: int, epoch: int, file: int = 0) -> list[int]:
    """The rows of all prompts, or of a file's, in the order in which an epoch draws them."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + (file << 24))  # torch reads 32 bits
    return torch.randperm(num_prompts, generator=generator).tolist()


@functools.lru_cache(maxsize=1)
def shared_draws(shares: tuple[int, ...]) -> list[tuple[int, int]]:
    """(file, number of its draw) of sum(shares) draws, evenly spread: of shares 2 1 the files 0, 1, 0."""
    # draw j of a file stands in the middle of the j-th of `share` equal parts
    draws = [((2 * j + 1) / share, file, j) for file, share in enumerate(shares) for j in range(share)]
    return [(file, j) for _, file, j in sorted(draws)]


def drawn_row(parts: Sequence[tuple[int, int]], seed: int, position: int) -> int:
    """The row of the prompt that is drawn at a position, from 0. parts: (prompts, share) of each file."""
    shares = tuple(share for _, share in parts)
    turn, place = divmod(position, sum(shares))
    file, j = shared_draws(shares)[place]
    num_prompts, share = parts[file]
    epoch, place = divmod(turn * share + j, num_prompts)
    return sum(number for number, _ in parts[:file]) + epoch_order(num_prompts, seed, epoch, file)[place]


def draws_with_all(parts: Sequence[tuple[int, int]], num_epochs: int) -> int:
    """After how many draws every file has been drawn so often. parts: (prompts, share) of each file."""
    return sum(share for _, share in parts) * max(-(-num_epochs * number // share) for number, share in parts)


class GroupSampler:
    """Draws the next `prompts_per_step` prompts, `group_size` images each, and says which of those images a rank makes.

    Prompts come in the order of a permutation seeded by (seed, epoch), one epoch after another; a draw may span two
    epochs. Of several parts with shares (--train_shares) each has epochs of its own, and they take turns: of
    sum(shares) prompts in a row each part has exactly its share. The state is one number, the prompts drawn so far: the
    same whatever the number of ranks or of workers.

    The images of a step are numbered over all ranks, prompt by prompt. They are cut into num_mini_batches consecutive
    mini-batches, one per optimizer step, and each mini-batch into as many consecutive shares as there are ranks. Every
    optimizer step then sees the same images on any number of ranks.
    """

    def __init__(
        self,
        num_prompts: int | Sequence[tuple[int, int]],
        prompts_per_step: int,
        group_size: int,
        num_mini_batches: int = 1,
        *,
        seed: int,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """num_prompts: how many there are to draw from, or the `parts` of a PromptSet. Of 0 nothing is drawn."""
        rank = dist.get_rank() if rank is None else rank
        world_size = dist.get_world_size() if world_size is None else world_size
        self.parts = [(num_prompts, 1)] if isinstance(num_prompts, int) else num_prompts
        num_images = prompts_per_step * group_size
        if sum(number for number, _ in self.parts) and num_images % (num_mini_batches * world_size):
            raise ValueError(
                f"{prompts_per_step} prompts x {group_size} images do not divide into "
                f"{num_mini_batches} mini-batches x {world_size} ranks"
            )
        self.prompts_per_step = prompts_per_step
        self.group_size = group_size
        self.seed = seed
        self.num_mini_batches = num_mini_batches
        self.world_size = world_size
        mini_batch = num_images // num_mini_batches
        share = mini_batch // world_size
        starts = torch.arange(num_mini_batches) * mini_batch + rank * share  # (num_mini_batches,)
        # global numbers of this rank's images, (B,)
        self.image_index = (starts[:, None] + torch.arange(share)).flatten()
        self.position = 0

    def __str__(self) -> str:
        if not sum(number for number, _ in self.parts):
            return "no prompts to train on"
        num_images = self.prompts_per_step * self.group_size
        sizes = f"{num_images} images = {self.prompts_per_step} prompts x {self.group_size}"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"{sizes}; {self.num_mini_batches} optimizer steps of {num_images // self.num_mini_batches}; {ranks}"

    @property
    def epoch(self) -> float:
        """How often a prompt has been drawn so far, the mean over all prompts."""
        return self.position / sum(number for number, _ in self.parts)

    def upcoming(self, num_steps: int) -> set[int]:
        """The rows of all prompts that the ranks together draw in the next steps."""
        # two epochs' worth has every row
        count = min(num_steps * self.prompts_per_step, draws_with_all(self.parts, num_epochs=2))
        return {drawn_row(self.parts, self.seed, self.position + k) for k in range(count)}

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next step on this rank: its U prompts and its B images of them, of P prompts and N images over all ranks.

        Returns the rows (U,) of the prompts; which of these U each image is of (B,); and the images' numbers (B,) among
        the N, which are numbered prompt by prompt: image i is of prompt i // group_size of the P.
        """
        own, prompt_index = (self.image_index // self.group_size).unique(return_inverse=True)  # own: (U,) of the P
        rows = [drawn_row(self.parts, self.seed, self.position + k) for k in own.tolist()]
        self.position += self.prompts_per_step
        return torch.tensor(rows), prompt_index, self.image_index

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def fit_micro_batch(
    count: int, num_mini_batches: int, micro_batch_size: int, options: str = "--num_prompts x --group_size"
) -> int:
    """The micro-batch size, lowered to a rank's share of a mini-batch if that is smaller. 0 stays 0.

    Raises:
        ValueError: `count` images (or pairs), made by `options`, do not divide into mini-batches, ranks, micro-batches.
    """
    world_size = launched_world_size()
    if count % (num_mini_batches * world_size):
        raise ValueError(f"{options} = {count} cannot be cut into {num_mini_batches} mini-batches x {world_size} ranks")
    per_rank = count // (num_mini_batches * world_size)
    micro_batch_size = min(micro_batch_size, per_rank)
    if micro_batch_size and per_rank % micro_batch_size:
        raise ValueError(
            f"--micro_batch_size {micro_batch_size}: a rank's share of a mini-batch, {per_rank}, cannot be cut into it "
            f"({options} = {count}, {num_mini_batches} mini-batches, {world_size} ranks)"
        )
    return micro_batch_size


def share_of_rank(total: int) -> list[int]:
    """This rank's share of 0 .. total - 1, dealt to the ranks in turn; the same number for each, from 0 again."""
    world_size = dist.get_world_size()
    per_rank = -(-total // world_size)  # rounded up
    return [place % total for place in range(dist.get_rank(), per_rank * world_size, world_size)]


def gather_shares(rows: torch.Tensor, total: int) -> torch.Tensor:
    """Rows (B, ...) of share_of_rank(total) on every rank -> all rows (total, ...), in order, on every rank."""
    in_turn = gather(rows).transpose(0, 1)  # (B, world size, ...)
    return in_turn.flatten(0, 1)[:total]


def share_eval_images(eval_set: PromptSet, images_per_prompt: int) -> tuple[list[int], PromptSet, list[int]]:
    """This rank's share of an evaluation: the B images' places among all, their prompts (PromptSet) and seeds.

    The seeds are the same at every evaluation; the images of a prompt have different ones. They go by the prompt's
    place in its file, so that they do not depend on other files.
    """
    places = share_of_rank(len(eval_set) * images_per_prompt)
    rows = [place // images_per_prompt for place in places]
    firsts = {name: eval_set.files.index(name) for name in set(eval_set.files)}  # the first row of each, if several
    of_file = [row - firsts[eval_set.files[row]] if firsts else row for row in rows]
    seeds = [image_seed("eval", place % images_per_prompt, row) for place, row in zip(places, of_file, strict=True)]
    return places, eval_set.select(rows), seeds
