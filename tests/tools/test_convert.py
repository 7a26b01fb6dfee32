"""tools/convert.py: what a script reads from a parquet file, it reads from the .jsonl file made of it."""

import datetime
import io
import json
import sys

from common.files.prompts import read_prompts
from common.pairs.pair_files import read_pairs
from tools import convert

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

pytestmark = pytest.mark.fast


def write(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def run(monkeypatch, *arguments):
    """Run the command. Returns the line of an error, or None."""
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
    try:
        convert.main()
    except SystemExit as error:
        return error.code.removeprefix("tools.convert: error: ")
    return None


def image_bytes(colour, kind):
    buffer = io.BytesIO()
    Image.new("RGB", (96, 32), colour).save(buffer, kind)
    return buffer.getvalue()


def test_prompts_are_the_same_from_either_file(tmp_path, monkeypatch, capsys):
    chats = [[{"role": "user", "content": f'A mug with "Nö {i}"'}] for i in range(3)]
    rows = [{"prompt": chat, "reward_model": {"ground_truth": f"Nö {i}"}, "n": i} for i, chat in enumerate(chats)]
    source = write(tmp_path / "train.parquet", rows)
    target = tmp_path / "train.jsonl"
    assert run(monkeypatch, source, target) is None
    assert capsys.readouterr().out == "3 prompts\n"
    assert read_prompts(target) == read_prompts(source)
    assert read_prompts(target).metadata[2] == {"reward_model": {"ground_truth": "Nö 2"}, "n": 2}
    assert run(monkeypatch, source, target).startswith(f"{target}: ")


@pytest.mark.parametrize("more", [{}, {"prompt": "short"}])
def test_a_column_that_is_chosen_is_the_prompt(tmp_path, monkeypatch, more):
    captions = write(tmp_path / "captions.parquet", [{"n": 1, "caption": "a mug", **more}])
    assert run(monkeypatch, f"{captions}:caption", tmp_path / "captions.jsonl") is None
    assert read_prompts(tmp_path / "captions.jsonl") == read_prompts(f"{captions}:caption")
    assert (tmp_path / "captions.jsonl").read_text().startswith('{"prompt": "a mug", ')


def test_an_empty_number_is_null(tmp_path, monkeypatch):
    source = write(
        tmp_path / "train.parquet", [{"prompt": "a mug", "n": float("nan"), "m": {"k": [1.0, float("inf")]}}]
    )
    assert run(monkeypatch, source, tmp_path / "train.jsonl") is None
    text = (tmp_path / "train.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"prompt": "a mug", "n": None, "m": {"k": [1.0, None]}}


def test_pairs_are_the_same_from_either(tmp_path, monkeypatch, capsys):
    """The images' bytes are copied, the preferred one as chosen; ties are left out."""
    red, blue = image_bytes("red", "jpeg"), image_bytes("blue", "png")
    rows = [
        {"caption": f"{i}", "jpg_0": red, "jpg_1": blue, "label_0": 1 - label, "label_1": label}
        for i, label in enumerate((0.0, 0.5, 1.0))
    ]
    (tmp_path / "picks").mkdir()
    write(tmp_path / "picks" / "a.parquet", rows[:1])
    write(tmp_path / "picks" / "b.parquet", rows[1:])
    target = tmp_path / "pairs"
    pattern = tmp_path / "picks" / "*.parquet"
    assert run(monkeypatch, pattern, target) is None
    assert capsys.readouterr().out == "2 pairs\n"
    records = [json.loads(line) for line in (target / "pairs.jsonl").read_text().splitlines()]
    assert records[1] == {
        "prompt": "2",
        "chosen": "images/000001_chosen.png",
        "rejected": "images/000001_rejected.jpg",
    }
    for source in (target, pattern):
        pairs = [(prompt, one.read_bytes(), other.read_bytes()) for prompt, one, other, _ in read_pairs(source)]
        assert pairs == [("0", red, blue), ("2", blue, red)]


def test_every_source_of_a_pair_is_kept(tmp_path, monkeypatch):
    """Two pictures that an edit begins with, in their order."""
    red, blue, green = image_bytes("red", "png"), image_bytes("blue", "png"), image_bytes("green", "jpeg")
    row = {
        "prompt": "mix",
        "chosen": {"bytes": red},
        "rejected": {"bytes": blue},
        "image": [{"bytes": green}, {"bytes": red}],
    }
    write(tmp_path / "p.parquet", [row])
    assert run(monkeypatch, tmp_path / "p.parquet", tmp_path / "pairs") is None
    for source in (tmp_path / "p.parquet", tmp_path / "pairs"):
        (pair,) = read_pairs(source)
        assert [image.read_bytes() for image in pair.sources] == [green, red]


def test_what_cannot_be_converted_is_named(tmp_path, monkeypatch):
    dates = write(tmp_path / "dates.parquet", [{"prompt": "a mug", "day": datetime.date(2026, 1, 1)}])
    line = run(monkeypatch, dates, tmp_path / "dates.jsonl")
    assert line.startswith(f"{dates}, row 0, day: ") and not (tmp_path / "dates.jsonl").exists()
    line = run(monkeypatch, dates, tmp_path / "pairs")
    assert line.startswith(f"{dates}: ") and "prompt, chosen, rejected or caption" in line
    (tmp_path / "empty").mkdir()
    line = run(monkeypatch, tmp_path / "empty", tmp_path / "pairs")
    assert line.startswith(f"{tmp_path / 'empty'}: ") and ".parquet" in line
    (tmp_path / "ended" / "images").mkdir(parents=True)
    line = run(monkeypatch, dates, tmp_path / "ended")
    assert line.startswith(f"{tmp_path / 'ended'}: ") and "pairs.jsonl" in line
