"""Parquet files as .jsonl: VeRL-Omni's prompts, or pick-a-pic's pairs with their images.

    python -m tools.convert train.parquet train.jsonl          # prompts, for --train_prompts and --eval_prompts
    python -m tools.convert 'pick_a_pic/train-*.parquet' pairs # pairs, for dpo_offline.py --pairs pairs

The target says which it is: a .jsonl file holds prompts, a folder holds pairs. The source of pairs is a .parquet file
or a pattern of such files. The scripts read both kinds of parquet as they are; a .jsonl can be read and edited
by you.
"""

import argparse
import io
import json
import sys
from pathlib import Path

from common.errors import RunError, error_prefix
from common.files import atomic_file, read_records, without_nan
from common.pairs import read_pairs

from PIL import Image


def convert_prompts(source: Path, target: Path) -> int:
    """Write the records that a script reads from a parquet file, or from FILE:COLUMN, to a .jsonl file. Returns how
    many there are. A NaN becomes null.

    Raises:
        ValueError: the file cannot be read, or a column cannot be written as JSON; in one line that names it.
    """
    lines = []
    for where, record in read_records(source):  # "prompt" is the chosen column, and that name's own "original_prompt"
        for column, value in record.items():
            # each column by itself, to name the one at fault: bytes and dates are not JSON, for example
            with error_prefix(f"{where}, {column}", TypeError):
                json.dumps(value)
        record = {"prompt": record["prompt"]} | record  # first in its line
        lines.append(json.dumps(without_nan(record), ensure_ascii=False, allow_nan=False) + "\n")
    with atomic_file(target) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def convert_pairs(source: Path, target: Path) -> int:
    """Write the pairs of parquet files to a folder: pairs.jsonl, and the images' own bytes below images/.

    Returns how many pairs there are.

    Raises:
        ValueError, RunError: a file cannot be read; in one line that names it.
    """
    pairs = read_pairs(source)
    (target / "images").mkdir(parents=True)
    lines = []
    for number, pair in enumerate(pairs):
        record: dict[str, str | list[str]] = {"prompt": pair.prompt}
        sources = [(f"image{i}", source) for i, source in enumerate(pair.sources)]  # of an editing model
        files: dict[str, str] = {}
        for kind, image in (("chosen", pair.chosen), ("rejected", pair.rejected), *sources):
            content = image.read_bytes()
            files[kind] = f"images/{number:06d}_{kind}.{suffix_of(content)}"
            (target / files[kind]).write_bytes(content)  # not decoded: a JPEG would lose by being saved again
        record |= {"chosen": files.pop("chosen"), "rejected": files.pop("rejected")}
        if files:
            record["image"] = list(files.values())
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    with atomic_file(target / "pairs.jsonl") as temporary:  # last: a folder with it is whole
        temporary.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def suffix_of(content: bytes) -> str:
    """png, jpg, webp ..., by the first bytes of an image."""
    with Image.open(io.BytesIO(content)) as image:
        name = (image.format or "image").lower()
    return "jpg" if name == "jpeg" else name


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a .parquet file, FILE:COLUMN or, for pairs, a pattern")
    parser.add_argument("target", type=Path, help="a .jsonl file for prompts, a folder for pairs; a new one")
    args = parser.parse_args()
    try:
        if args.target.exists():
            advice = "name another target"
            if args.target.is_dir() and not (args.target / "pairs.jsonl").exists():
                advice = f"it has no pairs.jsonl, as after a start that was ended: remove it, or {advice}"
            raise ValueError(f"{args.target}: exists already; {advice}")
        if args.target.suffix == ".jsonl":
            print(f"{convert_prompts(args.source, args.target)} prompts")
        else:
            print(f"{convert_pairs(args.source, args.target)} pairs")
    except (OSError, ValueError, RunError) as error:
        sys.exit(f"tools.convert: error: {error}")


if __name__ == "__main__":
    main()
