"""Prompts and preference pairs from files, every fault named by file and line, or row, before a model loads."""

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

from common.parquet import Blob, read_rows
from common.refusals import refusing
from common.stops import say

import numpy as np
from PIL import Image, ImageOps

PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")  # columns of its rows that are read


@dataclass
class PromptSet:
    """Prompts and what else is known of them, in the order of their file."""

    prompts: list[str]
    metadata: list[dict]  # the other fields of a .jsonl record or columns of a .parquet row, for the rewards

    def __len__(self):
        return len(self.prompts)

    def select(self, rows):
        """The set of some rows, in their order, repeated where they repeat."""
        rows = [int(row) for row in rows]
        return PromptSet([self.prompts[row] for row in rows], [self.metadata[row] for row in rows])


def read_prompts(path, rewards=None, max_prompts=0):
    """Read prompts from a .txt file (one a line), a .jsonl file ({"prompt": ..., anything else is metadata}) or a
    .parquet file with a column `prompt`, of strings or of chats as VeRL-Omni writes them; other columns are metadata.

    Blank lines are skipped; with max_prompts only the first so many prompts are taken. Each prompt is shown to the
    rewards ({name: function}) that have a `check`, its metadata to those that have a `check_metadata`.

    Returns a PromptSet.

    Raises:
        ValueError: naming the file and, where there is one, the line or row at fault.
    """
    functions = (rewards or {}).values()
    checks = [reward.check for reward in functions if hasattr(reward, "check")]
    metadata_checks = [reward.check_metadata for reward in functions if hasattr(reward, "check_metadata")]
    prompts = []
    metadata = []
    for where, record in _read_records(Path(path)):
        prompt = record.pop("prompt")
        with refusing(where):
            for check in checks:
                check(prompt)
            for check in metadata_checks:
                check(record)
        prompts.append(prompt)
        metadata.append(record)
    if 0 < max_prompts < len(prompts):
        say(f"{path}: the first {max_prompts} of its {len(prompts)} prompts (--max_prompts)")
        return PromptSet(prompts[:max_prompts], metadata[:max_prompts])
    return PromptSet(prompts, metadata)


def _read_records(path):
    """[("file:line", {"prompt": ..., more})] of a prompt file; raises ValueError for what read_prompts says."""
    if path.suffix == ".parquet":
        return _read_chats(path)
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
        raise ValueError("prompts are read from .txt, .jsonl or .parquet files")
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


def _read_chats(path):
    """[("file, row N", {"prompt": ..., more})] of rows as VeRL-Omni's, whose `prompt` and `negative_prompt` are chats.

    The prompt is what the user says. What the system says before it is left out, as a pipeline has a template of its
    own. Guidance is away from the empty prompt: a negative prompt that is not blank cannot be used.
    """
    records = []
    num_systems = 0
    for where, row in read_rows(path, ["prompt"], more=True):
        with refusing(where):
            chat = _read_chat("prompt", row["prompt"])
            if not chat["user"].strip():
                raise ValueError("prompt: must not be blank")
            negative = row.pop("negative_prompt", None)
            if negative is not None and _read_chat("negative_prompt", negative)["user"].strip():
                raise ValueError("negative_prompt: must be blank, as guidance here is away from the empty prompt")
        if chat.get("system", "").strip():
            num_systems += 1
        records.append((where, row | {"prompt": chat["user"]}))
    if not records:
        raise ValueError(f"{path}: no prompts")
    if num_systems:
        say(f"{path}: {num_systems} system messages are left out: what the user says is the prompt")
    return records


def _read_chat(column, chat):
    """{role: text} of a chat of one user message, with or without a system message; a string is a user's."""
    if isinstance(chat, str):
        return {"user": chat}
    messages = chat if isinstance(chat, list) else []
    texts = {}
    for message in messages:
        if isinstance(message, dict) and message.get("role") in ("system", "user"):
            texts[message["role"]] = message.get("content")
    are_texts = all(isinstance(text, str) for text in texts.values())
    if not are_texts or "user" not in texts or len(texts) != len(messages):
        raise ValueError(f"{column}: must be a string or one user message of text, with a system message or none")
    return texts


def read_pairs(path):
    """Read preference pairs: a .jsonl of {"prompt", "chosen", "rejected"}, the latter two image files relative to it,
    or a folder with such a pairs.jsonl ("chosen_score" and "rejected_score" may be given); or a .parquet file with
    pick-a-pic's columns, or a folder of such.

    Returns a list of (prompt, chosen, rejected), the latter two as Path; of parquet files a ParquetPairs.

    Raises:
        ValueError: naming file and line or row: no such image, not an image, equal images, chosen scored below
            rejected. Of a parquet's images only the beginning is looked at, and their bytes are compared.
    """
    path = Path(path)
    files = [path]
    with refusing(path):
        if path.is_dir():
            files = sorted(path.glob("*.parquet"))
            if (path / "pairs.jsonl").exists() or not files:
                path = path / "pairs.jsonl"
                files = [path]
    if files[0].suffix == ".parquet":
        return ParquetPairs(files)
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


class ParquetPairs:
    """The pairs of files in pick-a-pic's columns, (prompt, chosen, rejected) each, the latter two as Blob.

    The files are read anew for every pass, as they may be larger than memory. Ties are left out, and counted on the
    screen.
    """

    def __init__(self, files):
        """Reads the files to their end. Raises read_pairs' ValueError."""
        self.files = files
        self.num_pairs = 0
        for file in files:
            rows = [pair is not None for pair in _read_pick_a_pic(file)]
            num_ties = rows.count(False)
            if num_ties:
                say(f"{file}: {num_ties} of its {len(rows)} pairs are ties, which are left out")
            self.num_pairs += rows.count(True)
        if self.num_pairs == 0:
            raise ValueError(f"{files[0]}: no pairs")

    def __len__(self):
        return self.num_pairs

    def __iter__(self):
        for file in self.files:
            for pair in _read_pick_a_pic(file):
                if pair is not None:
                    yield pair


def _read_pick_a_pic(file):
    """Yield (prompt, chosen, rejected) of every row, or None for a tie."""
    for where, row in read_rows(file, PICK_A_PIC):
        with refusing(where):
            pair = _order_by_label(where, row)
        yield pair


def _order_by_label(where, row):
    labels = (row["label_0"], row["label_1"])
    if labels == (0.5, 0.5):
        return None
    if labels not in ((1, 0), (0, 1)):
        raise ValueError(f"label_0 {labels[0]}, label_1 {labels[1]}: must be 1 and 0, 0 and 1, or 0.5 and 0.5")
    if not isinstance(row["caption"], str) or not row["caption"].strip():
        raise ValueError("caption: must be a non-empty string")
    images = []
    for column in ("jpg_0", "jpg_1"):
        if not isinstance(row[column], bytes):
            raise ValueError(f"{column}: must be the bytes of an image")
        with refusing(f"{column}: not a readable image", Exception):
            Image.open(io.BytesIO(row[column])).close()  # its header: it is decoded when it is used
        images.append(Blob(f"{where}, {column}", row[column]))
    if row["jpg_0"] == row["jpg_1"]:
        raise ValueError("jpg_0 and jpg_1 are the same image")
    if labels == (0, 1):
        images.reverse()
    return row["caption"], *images


def _find_image(record, kind, folder):
    """The path of a record's image of that kind, and its size and pixels."""
    if not isinstance(record.get(kind), str):
        raise ValueError(f'a record needs "{kind}", the path of an image')
    path = folder / record[kind]
    with refusing(kind):
        if not path.is_file():
            raise ValueError(f"no such file: {path}")
        image = open_image(path)  # to its end: verify() would miss a truncated file
    return path, (image.size, image.tobytes())


def open_image(source):
    """The image of a Path or Blob, RGB, 8 bits a channel, upright as its EXIF orientation says.

    Raises:
        ValueError: naming it: not a readable image.
    """
    with refusing(f"not a readable image: {source}", Exception), Image.open(io.BytesIO(source.read_bytes())) as image:
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
