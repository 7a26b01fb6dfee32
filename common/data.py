"""Prompts and preference pairs from files, every fault named by file and line before a model loads."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from common.refusals import refusing
from common.stops import say

import numpy as np
from PIL import Image, ImageOps


@dataclass
class PromptSet:
    """Prompts and what else is known of them, in the order of their file."""

    prompts: list[str]
    metadata: list[dict]  # the other fields of a .jsonl record, for the rewards

    def __len__(self):
        return len(self.prompts)

    def select(self, rows):
        """The set of some rows, in their order, repeated where they repeat."""
        rows = [int(row) for row in rows]
        return PromptSet([self.prompts[row] for row in rows], [self.metadata[row] for row in rows])


def read_prompts(path, rewards=None, max_prompts=0):
    """Read prompts from a .txt file (one a line) or a .jsonl file ({"prompt": ..., anything else is metadata}).

    Blank lines are skipped; with max_prompts only the first so many prompts are taken. Each prompt is shown to the
    rewards ({name: function}) that have a `check`. Returns a PromptSet.

    Raises:
        ValueError: naming the file and, where there is one, the line at fault.
    """
    checks = [reward.check for reward in (rewards or {}).values() if hasattr(reward, "check")]
    prompts = []
    metadata = []
    for where, record in _read_records(Path(path)):
        prompt = record.pop("prompt")
        with refusing(where):
            for check in checks:
                check(prompt)
        prompts.append(prompt)
        metadata.append(record)
    if 0 < max_prompts < len(prompts):
        say(f"{path}: the first {max_prompts} of its {len(prompts)} prompts (--max_prompts)")
        return PromptSet(prompts[:max_prompts], metadata[:max_prompts])
    return PromptSet(prompts, metadata)


def _read_records(path):
    """[("file:line", {"prompt": ..., more})] of a prompt file; raises ValueError for what read_prompts says."""
    with refusing(path):
        lines = _read_lines(path)
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        with refusing(where):
            record = _parse_record(line) if path.suffix == ".jsonl" else {"prompt": line.strip()}
        records.append((where, record))
    return records


def _read_lines(path):
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError("prompts are read from .txt or .jsonl files")
    if not path.is_file():
        raise ValueError("no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error}") from None
    if not text.strip():
        raise ValueError("no prompts")
    return text.split("\n")


def _parse_record(line):
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter of thousands of brackets
        raise ValueError(f"not JSON that can be read: {error}") from None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError('a record needs "prompt", a non-empty string')
    prompt.encode()  # raises UnicodeEncodeError for half of a surrogate pair, which JSON can write and UTF-8 cannot
    return record


def read_pairs(path):
    """Read preference pairs: a .jsonl of {"prompt", "chosen", "rejected"}, the latter two image files relative to it,
    or a folder with such a pairs.jsonl. "chosen_score" and "rejected_score" may be given.

    Returns a list of (prompt, chosen, rejected), the latter two as Path.

    Raises:
        ValueError: naming file and line: no such image, not an image, equal images, chosen scored below rejected.
    """
    path = Path(path)
    with refusing(path):
        if path.is_dir():
            path = path / "pairs.jsonl"
    pairs = []
    for where, record in _read_records(path):
        with refusing(where):
            chosen, chosen_pixels = _find_image(record, "chosen", path.parent)
            rejected, rejected_pixels = _find_image(record, "rejected", path.parent)
            if chosen_pixels == rejected_pixels:
                raise ValueError("chosen and rejected are the same image")
            _check_scores(record.get("chosen_score"), record.get("rejected_score"))
        pairs.append((record["prompt"], chosen, rejected))
    return pairs


def _find_image(record, kind, folder):
    """The path of a record's image of that kind, and its size and pixels."""
    if not isinstance(record.get(kind), str):
        raise ValueError(f'a record needs "{kind}", the path of an image')
    path = folder / record[kind]
    with refusing(kind):
        if not path.is_file():
            raise ValueError(f"no such file: {path}")
    with refusing(f"{kind}: not a readable image: {path}", Exception):
        image = open_image(path)  # to its end: verify() would miss a truncated file
    return path, (image.size, image.tobytes())


def open_image(path):
    """The file's image, RGB, 8 bits a channel, upright as its EXIF orientation says."""
    with Image.open(path) as image:
        image.load()
        if image.mode.startswith("I;16"):  # 16 bits: convert() would clip them to white
            eight_bits = np.asarray(image).astype(np.float64) / 257
            image = Image.fromarray(eight_bits.round().clip(0, 255).astype(np.uint8))
        return ImageOps.exif_transpose(image).convert("RGB")


def _check_scores(chosen, rejected):
    given = [score for score in (chosen, rejected) if score is not None]
    for score in given:
        if type(score) not in (int, float) or not -math.inf < score < math.inf:
            raise ValueError("chosen_score and rejected_score must be numbers, and finite")
    if len(given) == 2 and not chosen > rejected:
        raise ValueError(f"chosen is scored {chosen}, not above rejected, {rejected}")
