"""Prompt files."""

import json
import re

from common.data import PromptSet
from common.files.prompts import count_sources, read_prompts, read_records
from common.pairs.pair_files import read_pairs
from common.rewards._loading import load_rewards
from common.rewards.ocr import quoted_text

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

pytestmark = pytest.mark.fast


# ---- read_prompts ----------------------------------------------------------------------------------------------------
def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_read_txt(tmp_path):
    path = write(tmp_path, "prompts.txt", 'a sign "12"\n\n  \nein Schild "Grüße"  \nlast')
    assert read_prompts(path) == PromptSet(['a sign "12"', 'ein Schild "Grüße"', "last"], [{}, {}, {}])
    assert read_prompts(str(path)).prompts[2] == "last"


def test_read_jsonl(tmp_path):
    path = write(tmp_path, "prompts.jsonl", '{"prompt": "one", "answer": [1, 2]}\n\n{"tag": "x", "prompt": "two"}\n')
    assert read_prompts(path) == PromptSet(["one", "two"], [{"answer": [1, 2]}, {"tag": "x"}])


def test_the_first_prompts_and_some_of_them(tmp_path, capfd):
    path = write(tmp_path, "prompts.jsonl", "".join(f'{{"prompt": "{name}", "n": {name}}}\n' for name in range(5)))
    prompts = read_prompts(path, max_prompts=3)
    assert len(prompts) == 3 and len(read_prompts(path)) == len(read_prompts(path, max_prompts=9)) == 5
    assert re.fullmatch(rf"{path}: .* 3 of its 5 .*\(--max_prompts\)\n", capfd.readouterr().err)
    assert prompts == PromptSet(["0", "1", "2"], [{"n": 0}, {"n": 1}, {"n": 2}])
    for rows in ([2, 0, 2], torch.tensor([2, 0, 2]), iter((2, 0, 2))):
        assert prompts.select(rows) == PromptSet(["2", "0", "2"], [{"n": 2}, {"n": 0}, {"n": 2}])
    assert len(prompts.select([])) == 0


def test_every_prompt_of_a_file_is_checked_also_beyond_the_first(tmp_path):
    path = write(tmp_path, "prompts.txt", 'a sign "1"\na sign\n')
    with pytest.raises(ValueError, match="prompts.txt:2: "):
        read_prompts(path, load_rewards(["ocr"], [1]), max_prompts=1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"prompt": "x"', "JSON"),
        ("plain text", "JSON"),
        ('{"text": "x"}', '"prompt"'),
        ('{"prompt": ""}', '"prompt"'),
        ('{"prompt": " \\t"}', '"prompt"'),
        ('{"prompt": 3}', '"prompt"'),
        ('["prompt"]', '"prompt"'),
        ('" "', '"prompt"'),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, reason):
    path = write(tmp_path, "prompts.jsonl", f'{{"prompt": "fine"}}\n\n{bad}\n')
    with pytest.raises(ValueError) as error:
        read_prompts(path)
    assert f"{path}:3: " in str(error.value)  # blank lines count
    assert re.search(reason, str(error.value))


def test_a_bad_file_is_named(tmp_path):
    for name in ("missing.txt", "missing.jsonl", "missing.csv", "missing.json", "prompts.tsv"):
        with pytest.raises(ValueError, match=name):
            read_prompts(tmp_path / name)
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match="folder.txt"):
        read_prompts(tmp_path / "folder.txt")
    for name in ("empty.txt", "empty.jsonl"):
        with pytest.raises(ValueError, match=f"{name}: no prompts"):
            read_prompts(write(tmp_path, name, "\n   \n"))


@pytest.mark.parametrize(
    ("name", "content", "way_out"),
    [
        ("prompts.txt", "ein Schild".encode("utf-16"), "convert it by `iconv -f UTF-16 -t UTF-8 OLD > NEW`"),
        ("prompts.jsonl", "\ufeffein Schild".encode("utf-16-be"), "convert it by `iconv -f UTF-16 -t UTF-8 OLD > NEW`"),
        ("prompts.txt", "Grüße".encode("latin-1"), "'utf-8' codec can't decode byte 0xfc in position 2"),
        (
            "prompts.tsv",
            b"prompt\na sign",
            ".txt, .jsonl, .json, .csv and .parquet ",
        ),
    ],
)
def test_a_file_of_another_kind_is_told_the_way_out(tmp_path, name, content, way_out):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}: ") and way_out.format(path) in str(error.value)


@pytest.mark.parametrize("reward", ["ocr", "ocr_contains"])
@pytest.mark.parametrize("prompt", ["a sign", 'a sign "12', 'a sign ""', 'a sign " \t "', 'a sign "" and "12"'])
def test_ocr_refuses_a_prompt_without_a_target(tmp_path, reward, prompt):
    text = write(tmp_path, "prompts.txt", f'a sign "1"\n{prompt}\n')
    lines = write(tmp_path, "prompts.jsonl", f'{{"prompt": "a \\"1\\""}}\n{json.dumps({"prompt": prompt})}\n')
    for path in (text, lines):
        assert len(read_prompts(path)) == 2  # fine without the reward
        assert len(read_prompts(path, load_rewards(["jpeg_compressibility"], [1]))) == 2
        with pytest.raises(ValueError) as error:
            read_prompts(path, load_rewards(["jpeg_compressibility", reward], [1, 1]))
        assert f"{path}:2: " in str(error.value)


def test_a_users_check_sees_every_prompt(tmp_path):
    def reward(images, prompts, metadata):
        return [0.0] * len(images)

    seen = []
    reward.check = seen.append
    read_prompts(write(tmp_path, "prompts.txt", "a\nb\n\nc\n"), {"mine": reward})
    assert seen == ["a", "b", "c"]


# ---- files of others, as they are published --------------------------------------------------------------------------
# the columns that VeRL-Omni's examples/flowgrpo_trainer/data_process/qwenimage_ocr.py writes
MESSAGES = pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()}))
VERL_OMNI = pyarrow.schema(
    {
        "data_source": pyarrow.string(),
        "prompt": MESSAGES,
        "negative_prompt": MESSAGES,
        "ability": pyarrow.string(),
        "reward_model": pyarrow.struct({"style": pyarrow.string(), "ground_truth": pyarrow.string()}),
        "extra_info": pyarrow.struct({"split": pyarrow.string(), "index": pyarrow.int64()}),
    }
)


def chat(text, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def verl_row(index, **changes):
    row = {
        "data_source": "flow_grpo/ocr",
        "prompt": chat(f'A mug with "No {index}" on it', "Describe the image:"),
        "negative_prompt": chat(" ", "Describe the image:"),
        "ability": "ocr",
        "reward_model": {"style": "model", "ground_truth": f"No {index}"},
        "extra_info": {"split": "train", "index": index},
    }
    return row | changes


def write_rows(path, rows, schema=VERL_OMNI):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
    return path


def test_read_verl_omni_rows(tmp_path, capfd):
    path = write_rows(tmp_path / "train.parquet", [verl_row(index) for index in range(100)])
    prompts = read_prompts(path, load_rewards(["ocr"], [1]))
    assert prompts.prompts == [f'A mug with "No {index}" on it' for index in range(100)]
    assert prompts.metadata[7] == {
        "data_source": "flow_grpo/ocr",
        "ability": "ocr",
        "reward_model": {"style": "model", "ground_truth": "No 7"},
        "extra_info": {"split": "train", "index": 7},
    }
    for prompt, metadata in zip(prompts.prompts, prompts.metadata, strict=True):
        assert quoted_text(prompt) == metadata["reward_model"]["ground_truth"].replace(" ", "").lower()
    assert re.fullmatch(f"{path}: 100 .*\n", capfd.readouterr().err)
    assert read_prompts(str(path), max_prompts=3) == prompts.select(range(3))


def test_a_negative_prompt_that_is_not_blank_is_read(tmp_path):
    rows = [verl_row(0), verl_row(1, negative_prompt=chat(" blurry ", "Describe the image:"))]
    prompts = read_prompts(write_rows(tmp_path / "train.parquet", rows))
    assert prompts.negatives("dark").prompts == ["dark", "blurry"]
    assert "negative_prompt" not in prompts.metadata[0]
    lines = write(tmp_path, "a.jsonl", '{"prompt": "a", "negative_prompt": ""}\n{"prompt": "b"}\n')
    assert read_prompts(lines).negatives("dark").prompts == ["", "dark"]  # an empty one is one
    with pytest.raises(ValueError, match='a.jsonl:2: "negative_prompt":'):
        read_prompts(write(tmp_path, "a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "negative_prompt": 3}\n'))


def test_read_verl_omni_rows_of_a_user_alone(tmp_path, capfd):
    """Those of sd3_ocr.py: no system message, no negative prompt; and a column of strings."""
    fields = {name: VERL_OMNI.field(name).type for name in ("data_source", "prompt", "ability", "reward_model")}
    fields["extra_info"] = pyarrow.struct({"split": "string", "index": "int64", "raw_prompt": "string"})
    row = verl_row(0, prompt=chat("A mug"), extra_info={"split": "test", "index": 0, "raw_prompt": "A mug"})
    del row["negative_prompt"]
    read = read_prompts(write_rows(tmp_path / "sd3.parquet", [row], pyarrow.schema(fields)))
    expected = {name: row[name] for name in ("data_source", "ability", "reward_model", "extra_info")}
    assert read == PromptSet(["A mug"], [expected])
    strings = pyarrow.schema({"prompt": "string", "tag": "string"})
    read = read_prompts(write_rows(tmp_path / "strings.parquet", [{"prompt": "A mug", "tag": "x"}], strings))
    assert read == PromptSet(["A mug"], [{"tag": "x"}])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": None}, "prompt: "),
        ({"prompt": []}, "prompt: "),
        ({"prompt": [{"role": "system", "content": "S"}]}, "prompt: "),
        ({"prompt": [*chat("a mug"), {"role": "assistant", "content": "Yes"}]}, "prompt: "),
        ({"prompt": [*chat("a mug"), *chat("a cup")]}, "prompt: "),
        ({"prompt": [{"role": "user", "content": None}]}, "prompt: "),
        ({"prompt": [{"role": None, "content": "a mug"}]}, "prompt: "),
        ({"prompt": [None]}, "prompt: "),
        ({"prompt": chat(" \t")}, "prompt: "),
        ({"negative_prompt": []}, "negative_prompt: "),
        ({"prompt": chat("a mug without a text")}, "OCR "),
    ],
)
def test_a_bad_row_is_named(tmp_path, changes, reason):
    """The 71st of 80, in the second batch of those that are read at once."""
    rows = [verl_row(index, **(changes if index == 70 else {})) for index in range(80)]
    path = write_rows(tmp_path / "train.parquet", rows)
    with pytest.raises(ValueError) as error:
        read_prompts(path, load_rewards(["ocr"], [1]), max_prompts=1)
    assert str(error.value).startswith(f"{path}, row 70: {reason}")


def test_a_bad_parquet_is_named(tmp_path):
    good = write_rows(tmp_path / "good.parquet", [verl_row(index) for index in range(3)])
    read_prompts(good)
    faults = {}
    for name, data in (("cut", good.read_bytes()[:-100]), ("text", b"a mug\n" * 20), ("empty", b"")):
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(data)
        faults[path] = "arquet"  # its own words: no magic bytes, too small to be a Parquet file
    (tmp_path / "folder.parquet").mkdir()
    faults[tmp_path / "none.parquet"] = ""
    faults[tmp_path / "folder.parquet"] = ".parquet"
    faults[write_rows(tmp_path / "rows.parquet", [])] = "no prompts"
    other = pyarrow.schema({"caption": "string", "jpg_0": "binary"})
    columns = write_rows(tmp_path / "columns.parquet", [{"caption": "a mug", "jpg_0": b""}], other)
    faults[columns] = "prompt; found caption, jpg_0; FILE:COLUMN "
    for path, fault in faults.items():
        with pytest.raises(ValueError) as error:
            read_prompts(path)
        message = str(error.value)
        assert message.startswith(f"{path}: ") and fault in message and "\n" not in message


# ---- shards, tables, lists and functions -----------------------------------------------------------------------------
CAPTIONS = pyarrow.schema({"caption": "string", "n": "int64"})


@pytest.mark.parametrize(("given", "name"), [("data", "data"), ("data/train-*.parquet", "train"), ("da*/tr*", "tr")])
def test_the_shards_of_a_split_are_one_file(tmp_path, monkeypatch, capfd, given, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for shard in range(3):
        rows = [{"caption": f"{shard}{row}", "n": row} for row in range(2)]
        write_rows(tmp_path / "data" / f"train-0000{shard}-of-00003.parquet", rows, CAPTIONS)
    expected = PromptSet(["00", "01", "10", "11", "20", "21"], [{"n": 0}, {"n": 1}] * 3)
    assert read_prompts(f"{given}:caption") == expected
    assert f"{given}: takes train-00000-of-00003.parquet, train-00001-of-00003.p" in capfd.readouterr().err
    assert read_prompts([f"{given}:caption", write(tmp_path, "a.txt", "a")]).files == [name] * 6 + ["a"]
    write_rows(tmp_path / "data" / "train-00001-of-00003.parquet", [{"caption": " ", "n": 1}], CAPTIONS)
    with pytest.raises(ValueError, match="^data/train-00001-of-00003.parquet, row 0: caption: "):
        read_prompts(f"{given}:caption")


def test_a_pattern_in_a_folder_with_brackets_finds_its_files(tmp_path):
    (tmp_path / "x[1]").mkdir()
    write_rows(tmp_path / "x[1]" / "train-0.parquet", [{"caption": "a", "n": 0}], CAPTIONS)
    assert read_prompts(f"{tmp_path}/x[1]/train-*.parquet:caption").prompts == ["a"]


def test_files_of_several_splits_are_not_one_file(tmp_path, monkeypatch):
    """Nor is a folder one level up. Each pattern that a message gives is taken, and fits what it should."""
    monkeypatch.chdir(tmp_path)
    names = ["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "validation_unique-00000-of-00001"]
    (tmp_path / "pp" / "data").mkdir(parents=True)
    for name in names:
        write_rows(tmp_path / "pp" / "data" / f"{name}.parquet", [{"caption": name, "n": 0}], CAPTIONS)
    patterns = [f"pp/data/{split}-*.parquet" for split in ("test", "train", "validation_unique")]
    told = " or ".join(f"'{pattern}'" for pattern in patterns)
    for given, fault in (
        ("pp", told),
        ("pp/data", told),
        ("pp/data/*.parquet", told),
        ("pp/*/t*", told[: told.rindex(" or ")]),
    ):
        with pytest.raises(ValueError) as error:
            read_prompts(f"{given}:caption")
        assert str(error.value).startswith(f"{given}: ") and str(error.value).endswith(f": {fault}")
    read = [read_prompts(f"{pattern}:caption").prompts for pattern in patterns]
    assert read == [names[2:3], names[:2], names[3:]]


def test_splits_may_be_folders_of_numbered_files(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        write_rows(tmp_path / split / "0000.parquet", [{"caption": split, "n": 0}], CAPTIONS)
    told = rf": '{tmp_path}/test/\[0-9]\*.parquet' or '{tmp_path}/train/\[0-9]\*.p"
    with pytest.raises(ValueError, match=told):
        read_prompts(f"{tmp_path}/*/*.parquet:caption")
    assert read_prompts(f"{tmp_path}/test/[0-9]*.parquet:caption").prompts == ["test"]


def test_the_names_of_shards_may_end_in_a_digest(tmp_path):
    for name in ("train-00000-of-00001-0a1b", "train-00001-of-00002-1b2c"):  # as the hub's old ones
        write_rows(tmp_path / f"{name}.parquet", [{"caption": name, "n": 0}], CAPTIONS)
    assert len(read_prompts(f"{tmp_path}:caption")) == 2
    with pytest.raises(ValueError, match=r"none-\*.parquet: "):
        read_prompts(tmp_path / "none-*.parquet")


def test_pictures_in_a_folder_of_shards_lie_beside_them(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    schema = pyarrow.schema({"prompt": "string", "image": "string"})
    path = write_rows(tmp_path / "train-0.parquet", [{"prompt": "a", "image": "a.png"}], schema)
    for source in (path, tmp_path, tmp_path / "*.parquet"):
        assert read_prompts(source).sources()[0][0].size == (8, 8)
        assert count_sources((0, 2), source) == 1


def test_pictures_of_a_pattern_lie_beside_the_file_that_names_them(tmp_path):
    for size in (8, 16):
        folder = tmp_path / f"set-{size:02d}"
        folder.mkdir()
        Image.new("RGB", (size, size)).save(folder / "a.png")
        write(folder, "edits.jsonl", '{"prompt": "a", "image": "a.png"}')
    pattern = tmp_path / "set-*" / "edits.jsonl"
    assert [source[0].size for source in read_prompts(pattern).sources()] == [(8, 8), (16, 16)]
    assert count_sources((0, 2), pattern) == 1


def test_read_csv(tmp_path):
    """As spreadsheets write them: a byte order mark, lines that end in CR LF, quoted commas and line breaks."""
    text = '\ufeffid,text,negative_prompt\r\n1,"a sign ""12"", red",\r\n\r\n2,"two\r\nlines",blurry\r\n'
    path = tmp_path / "prompts.csv"
    path.write_bytes(text.encode())
    first, second = {"id": "1"}, {"id": "2", "negative_prompt": "blurry"}
    assert read_prompts(f"{path}:text") == PromptSet(['a sign "12", red', "two\nlines"], [first, second])


@pytest.mark.parametrize(
    "text",
    [
        "prompt, answer\na red sign, 4711\n",
        " prompt ,answer \na red sign ,4711\t\n",
        '"prompt", "answer"\n"a red sign", "4711"\n',
        "\ufeffprompt,\u00a0answer\u200b\r\na red sign,4711\r\n",
        "prompt,answer,,\na red sign,4711,,\n",  # a spreadsheet's empty columns
    ],
)
def test_blanks_around_the_names_and_cells_of_a_csv_do_not_count(tmp_path, text):
    path = write(tmp_path, "prompts.csv", text)
    assert read_prompts(path) == PromptSet(["a red sign"], [{"answer": "4711"}])
    assert read_prompts(f"{path}: answer").prompts == ["4711"]


def test_blanks_around_names_do_not_count_in_other_files(tmp_path):
    """Values stay as they are."""
    for name, text in (
        ("a.jsonl", '{"prompt ": "a", "\\ufeffanswer": " 1"}'),
        ("a.json", '[{" prompt": "a", "answer ": " 1"}]'),
    ):
        assert read_prompts(write(tmp_path, name, text)) == PromptSet(["a"], [{"answer": " 1"}])
    table = pyarrow.table({"\ufeffprompt": ["a"], "answer ": [" 1"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read_prompts(tmp_path / "a.parquet") == PromptSet(["a"], [{"answer": " 1"}])


def write_columns(path, *names):
    """A parquet file of one row with columns of these names, which may be equal."""
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]) for _ in names], names=list(names))
    pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize("twice", [("tag", "tag"), ("prompt", "prompt"), ("tag", " tag"), ("tag\u200b", "tag")])
def test_two_columns_or_fields_of_one_name_are_refused(tmp_path, twice):
    names = [*twice, *({"prompt"} - {*twice})]
    fields = ", ".join(f'"{name}": "a"' for name in names)
    write(tmp_path, "a.csv", f"{','.join(names)}\n{','.join('a' for _ in names)}\n")
    write(tmp_path, "a.jsonl", f'{{"prompt": "fine"}}\n\n{{{fields}}}\n')
    write(tmp_path, "a.json", f"[{{{fields}}}]")
    write_columns(tmp_path / "a.parquet", *names)
    for name, place in (("a.csv", ":1: "), ("a.jsonl", ":3: "), ("a.json", ""), ("a.parquet", ": ")):
        with pytest.raises(ValueError, match=f'^{tmp_path / name}{place}.*"{twice[0].strip(chr(0x200B))}"[^\n]*$'):
            read_prompts(tmp_path / name)


def test_a_name_twice_within_a_field_is_refused_and_no_name_at_all_may_have_no_text_twice(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"prompt": "a", "more": {"n": 1, "n": 2}}')
    with pytest.raises(ValueError, match=f'^{path}:1: "n" '):
        read_prompts(path)
    path = write(tmp_path, "a.csv", "prompt,,\na,,\nb,x,y\n")
    with pytest.raises(ValueError, match=f"^{path}:3: "):
        read_prompts(path)


def test_columns_of_a_parquet_without_a_name_are_refused(tmp_path):
    write_columns(tmp_path / "a.parquet", "prompt", " ", "")
    with pytest.raises(ValueError, match=f"^{tmp_path}/a.parquet: "):
        read_prompts(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["\u0e17\u0e35\u0e48", "cafe\u0301", "\u0301", "\u0d28\u0d4d\u200d"])
def test_a_name_keeps_the_marks_at_its_end(tmp_path, name):
    """In Thai, in a decomposed accent, and in a letter that U+200D changes."""
    path = write(tmp_path, "a.csv", f"n,\ufeff {name}\u200b\n1,a\n")
    write_columns(tmp_path / "a.parquet", f" {name}", "n")
    for field in (name, f"\u200b{name} "):
        assert read_prompts(f"{path}:{field}") == PromptSet(["a"], [{"n": "1"}])
        assert read_prompts(f"{tmp_path}/a.parquet:{field}").prompts == ["a"]


def test_columns_that_pairs_do_not_read_may_have_one_name(tmp_path):
    write_columns(tmp_path / "a.parquet", "prompt", "chosen", "rejected", "tag", "tag")
    with pytest.raises(ValueError, match="row 0: chosen: "):
        read_pairs(tmp_path / "a.parquet")


def test_byte_order_marks_of_files_that_are_put_together_are_left_out(tmp_path):
    for name, texts in (("a.txt", ("a\n", "b\n")), ("a.jsonl", ('{"prompt": "a"}\n', '{"prompt": "b"}\n'))):
        (tmp_path / name).write_bytes(b"".join(text.encode("utf-8-sig") for text in texts))
        assert read_prompts(tmp_path / name).prompts == ["a", "b"]
    parts = ["prompt,n\na,1\n", "prompt,n\nb,2\n"]
    (tmp_path / "a.csv").write_bytes(b"".join(text.encode("utf-8-sig") for text in parts))
    with pytest.raises(ValueError, match=f"^{tmp_path}/a.csv:3: "):
        read_prompts(tmp_path / "a.csv")
    assert read_prompts(write(tmp_path, "a.csv", "prompt\na\nprompt\n")).prompts == ["a", "prompt"]


INVISIBLE = ["\u200b", "\u200b \u2060", "\ufeff", "\u00ad", "\u3164", "\u2800", "\x00", "\u00a0\u202f"]


@pytest.mark.parametrize("text", INVISIBLE)
def test_a_line_on_which_nothing_shows_is_no_prompt(tmp_path, text):
    """Lines count with it. A family of emoji, which U+200D joins, shows."""
    family = "\U0001f469\u200d\U0001f467"
    path = write(tmp_path, "a.txt", f"a\n{text}\n{family}\n")
    assert [where for where, _ in read_records(path)] == [f"{path}:1", f"{path}:3"]
    assert read_prompts(path).prompts == ["a", family]
    assert len(read_prompts(write(tmp_path, "a.jsonl", f'{{"prompt": "a"}}\n{text}\n{{"prompt": "b"}}'))) == 2
    with pytest.raises(ValueError, match='a.jsonl:1: .*"prompt"'):
        read_prompts(write(tmp_path, "a.jsonl", json.dumps({"prompt": text})))
    with pytest.raises(ValueError, match='a.csv:2: .*"prompt"'):
        read_prompts(write(tmp_path, "a.csv", f"prompt,n\n{text},1\n"))
    with pytest.raises(ValueError, match="a.parquet, row 0: prompt: "):
        read_prompts(write_rows(tmp_path / "a.parquet", [{"prompt": text}], pyarrow.schema({"prompt": "string"})))


A_CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a red sign"}]


@pytest.mark.parametrize(
    "text",
    [json.dumps(A_CHAT), json.dumps(A_CHAT[1]), json.dumps([{"content": "a red sign", "role": "user"}], indent=1)],
)
def test_a_chat_as_text_is_read_in_parquet_and_refused_elsewhere(tmp_path, text):
    schema = pyarrow.schema({"prompt": "string", "negative_prompt": "string"})
    path = write_rows(tmp_path / "a.parquet", [{"prompt": text, "negative_prompt": text}], schema)
    assert read_prompts(path) == PromptSet(["a red sign"], [{"negative_prompt": "a red sign"}])
    write(tmp_path, "a.jsonl", json.dumps({"prompt": text}))
    write(tmp_path, "a.csv", 'prompt\n"{}"\n'.format(text.replace('"', '""')))
    write(tmp_path, "a.txt", " ".join(text.split()))
    for name in ("a.jsonl", "a.csv", "a.txt"):
        with pytest.raises(ValueError, match=rf"^{tmp_path / name}:\d+: prompt: [^\n]*$"):
            read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    "text", [str(A_CHAT), json.dumps(A_CHAT)[:-3], json.dumps(json.dumps(A_CHAT)), json.dumps([*A_CHAT, *A_CHAT])]
)
def test_a_chat_as_text_that_cannot_be_read_is_refused(tmp_path, text):
    """As Python writes it, cut off, written twice, and of several messages."""
    path = write_rows(tmp_path / "a.parquet", [{"prompt": text}], pyarrow.schema({"prompt": "string"}))
    with pytest.raises(ValueError, match=r"a.parquet, row 0: prompt: [^\n]*$"):
        read_prompts(path)


def test_prompts_with_brackets_are_prompts(tmp_path):
    texts = ["[a red sign]", '{"a": 1}', 'a sign that says "role":', "[{not a chat}]"]
    texts += ['{"role": "hero", "style": "oil"}', '[{"content": "a red sign"}]', "{'role': 'hero'}"]
    assert read_prompts(write(tmp_path, "a.txt", "\n".join(texts))).prompts == texts
    rows = [{"prompt": text} for text in texts]
    path = write_rows(tmp_path / "a.parquet", rows, pyarrow.schema({"prompt": "string"}))
    assert read_prompts(path).prompts == texts


def test_read_json(tmp_path):
    """HPSv2's benchmark prompts are lists of strings; others publish lists of records."""
    path = write(tmp_path, "anime.json", '["a fox", {"prompt": "a mug", "tag": "x"}]')
    assert read_prompts(path) == PromptSet(["a fox", "a mug"], [{}, {"tag": "x"}])
    path = write(tmp_path, "set.jsonl", '{"text": "a", "prompt": "short", "n": 1}\n')
    assert read_prompts(f"{path}:text") == PromptSet(["a"], [{"n": 1, "original_prompt": "short"}])
    path = write(tmp_path, "a:b.txt", "a")  # a file is a file, whatever its name
    assert read_prompts(path).prompts == ["a"]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "prompt,n\na fox,1\na mug, red,2\n", ":3: .* 2 "),
        ("a.csv", "prompt,n\na fox\n", ":2: .* 2 "),
        ("a.csv", 'prompt\n"a fox\n', ":2: unexpected end of data"),
        ("a.csv", "prompt,n\na fox,1\n,2\n", ':3: .*"prompt", .* n, .* FILE:FIELD'),
        (
            "a.csv",
            'n,prompt\n1, "hello" on a sign\n',
            ":2: ',' expected after '\"'; ",
        ),
        ("a.csv", "prompt,n\n", ": no prompts"),
        ("a.json", '["a",\n b]', ": .* JSON .*: Expecting value: line 2 column 2"),
        ("a.json", '{"prompt": "a"}', r": .*\[\.\.\.\]"),
        ("a.json", "[]", ": no prompts"),
        ("a.jsonl", '{"caption": "a"}\n{', ':1: .*"prompt"'),  # the first at fault
        ("a.csv", "prompt,n\n,1\na,b,c\n", ':2: .*"prompt"'),
        ("a.json", '["a", 3]', ', record 1: .*"prompt"'),
        (
            "a.jsonl",
            '{"caption": "a"}',
            ':1: .*"prompt", .* caption, .* FILE:FIELD',
        ),
        ("a.txt:caption", "a", ": .* caption: .* .txt "),
    ],
)
def test_a_fault_of_a_table_or_list_is_named(tmp_path, name, text, told):
    path = write(tmp_path, name.partition(":")[0], text)
    with pytest.raises(ValueError) as error:
        read_prompts(tmp_path / name)
    assert re.match(f"{path}{told}", str(error.value)) and "\n" not in str(error.value)


def test_read_what_a_function_returns(tmp_path):
    """It is called once; records are the caller's own."""
    path = write(
        tmp_path,
        "my_prompts.py",
        "calls = []\n"
        "def signs():\n"
        "    calls.append(1)\n"
        "    yield {'prompt': 'a', 'calls': len(calls)}\n"
        "    yield 'b'\n"
        "def bad():\n    return [{'caption': 'a'}]\n"
        "def none():\n    return []\n"
        "def one():\n    return 'a fox'\n"
        "def record():\n    return {'prompt': 'a fox'}\n"
        "def forgotten():\n    ['a fox']\n"
        "def broken():\n    return open('/none/none')\n",
    )
    for _ in range(2):
        assert read_prompts(f"{path}:signs") == PromptSet(["a", "b"], [{"calls": 1}, {}])
    assert read_prompts([f"{path}:signs", f"{path}:signs"]).files == ["signs"] * 4
    for name, told in (
        (":bad", f'{path}:bad, record 0: .*"prompt", .* caption'),
        (":one", f".* {path}:one: .* str, "),
        (":record", f".* {path}:record: .* dict, "),
        (":forgotten", f".* {path}:forgotten: .* NoneType, "),
        (":none", f"{path}:none: no prompts"),
        (":broken", f".* {path}:broken: FileNotFoundError: .Errno 2. No such file or directory"),
        (":other", f".* {path}:other: {path} .* other"),
        ("", f"{path}: .* .txt, .jsonl, .json, .csv and .parquet .*file.py:function"),
    ):
        with pytest.raises(ValueError) as error:
            read_prompts(f"{path}{name}")
        assert re.match(told, str(error.value)) and "FILE:FIELD" not in str(error.value)
    with pytest.raises(ValueError, match=f":signs: .*{tmp_path}/none.py$"):
        read_prompts(f"{tmp_path}/none.py:signs")


def test_read_flow_grpos_files(tmp_path):
    """Lines of the kinds that its dataset/ocr, dataset/pickscore and dataset/geneval have."""
    signs = ['A shop window with a neon sign that reads "Open Late". Rain on the glass.', 'A mug, "Number 1" on it.']
    ocr_file = write(tmp_path, "train.txt", "\n".join(signs))  # no line break after the last
    assert read_prompts(ocr_file, load_rewards(["ocr_contains"], [1])) == PromptSet(signs, [{}, {}])
    # lone quotes, letters that do not print, a tab, what separates lines elsewhere
    odd = [
        "'a fox, by no one",
        'a "fox',
        "a\u200bfox, \U0001f98a",
        "a\tfox",
        "a fox\u2028at night",
        "ein Fuchs, grün,,",
    ]
    assert read_prompts(write(tmp_path, "pickscore.txt", "\n".join(odd) + "\n")).prompts == odd
    records = [
        {"tag": "counting", "include": [{"class": "fox", "count": 2}], "exclude": [{"class": "fox", "count": 3}]},
        {"tag": "color_attr", "include": [{"class": "fox", "count": 1, "color": "red"}, {"class": "mug", "count": 1}]},
    ]
    lines = [json.dumps({**record, "prompt": f"a photo {i}"}) for i, record in enumerate(records)]
    geneval = write(tmp_path, "train_metadata.jsonl", "\n".join(lines) + "\n")
    assert read_prompts(geneval) == PromptSet(["a photo 0", "a photo 1"], records)
