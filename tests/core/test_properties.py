"""Whatever a user's file or option holds, it is read as it stands, or refused in one line: tried on generated ones.

`CLASSES` has, for each class of input, a strategy that generates it and an attempt. An attempt gives one example to the
code that reads it, and returns "accepted" or "refused". It raises where the example was neither: what is accepted must
be valid, and a refusal is one line that can be printed, is not too long, and names the file or the option. Inputs that
are written by hand are in tests/robustness/test_user_files.py.
"""

import contextlib
import functools
import importlib
import io
import json
import math
import os
import pickle
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

from common.errors import RunError
from common.files.checkpoints import FORMAT, load_checkpoint, save_checkpoint
from common.files.prompts import read_prompts
from common.files.records import clean_names, is_blank
from common.pairs.pair_files import read_pairs
from common.rewards._loading import load_rewards
from common.run.command_line import parse_args
from common.run.inputs import checkpoint_to_resume
from common.run.resuming import find_checkpoint, rewind
from common.weights.adapter_files import read_lora
from tests.conftest import SCRIPTS, assert_same, good_adapter, good_state, torch_bytes

import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

LONGEST = 700  # letters of an error
DEEP = 100_000
# JSON that is read as something else, or not at all
ODD_JSON = [
    *("null", "true", "NaN", "Infinity", "-Infinity", "1e999", "-0", "[]", "{}", '""', '" "', "'", ""),
    *('"\\ud800"', '"a\\udfff"', '"\\u0000"', '"a\\n\\u2028b"', '"\\ud83d\\ude00"'),
    *("9" * 4_000, "9" * 10_000, "-" + "9" * 10_000, "[" * DEEP, '{"a":' * DEEP, "[" * DEEP + "]" * DEEP),
]


# ---- what all attempts share -----------------------------------------------------------------------------------------
def held(read, check, names=(), errors=(ValueError,), longest=LONGEST):
    """What became of an input: `read` returns something that `check` takes, or raises one of `errors`.

    names: patterns; the error's line must match one of them.
    """
    try:
        value = read()
    except errors as error:
        line = str(error)
        assert len(line.splitlines()) == 1, f"not one line: {line!r:.300}"
        assert len(line) <= longest, f"{len(line)} letters: {line:.300}"
        assert not re.search(r"[\ud800-\udfff\0]", line), f"cannot be printed: {line!r:.300}"
        assert any(re.search(name, line) for name in names), f"does not name {names}: {line:.300}"
        return "refused"
    check(value)
    return "accepted"


@contextlib.contextmanager
def scratch():
    """A folder for one attempt."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@st.composite
def spoilt(draw, data):
    """Bytes with a few of them flipped, cut off, cut out, or put in between."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["flip", "flip", "cut", "remove", "insert"]))
        if how == "flip" and data:
            data[place] ^= draw(st.integers(1, 255))
        elif how == "cut":
            del data[place:]
        elif how == "remove":
            del data[place : place + draw(st.integers(1, 20))]
        elif how == "insert":
            data[place:place] = draw(st.binary(max_size=20))
    return bytes(data)


def json_texts():
    """JSON of any value as text, some of it no JSON."""
    plain = st.one_of(st.text(), st.integers(), st.floats()).map(json.dumps)
    return st.recursive(
        st.sampled_from(ODD_JSON) | plain,
        lambda inner: (
            st.lists(inner, max_size=3).map(lambda values: f"[{', '.join(values)}]")
            | st.tuples(st.text().map(json.dumps), inner).map(lambda pair: f"{{{pair[0]}: {pair[1]}}}")
        ),
        max_leaves=4,
    )


@st.composite
def records(draw, good):
    """A JSON object as text: the fields of `good`, {name: strategy of its text}; now and then a field is odd."""
    fields = {name: draw(texts) for name, texts in good.items()}
    if draw(st.integers(0, 3)) == 0:
        fields[draw(st.sampled_from([*good, "more"]))] = draw(json_texts())
    if draw(st.integers(0, 9)) == 0:
        del fields[draw(st.sampled_from(sorted(fields)))]
    return "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"


@st.composite
def json_lines(draw, good):
    """The bytes of a .jsonl of such records. Other JSON may be among them, and the file may be spoilt as a whole."""
    line = st.integers(0, 9).flatmap(lambda n: records(good) if n > 1 else json_texts() | st.just(" "))
    data = "\n".join(draw(st.lists(line, min_size=1, max_size=3))).encode("utf-8", "surrogatepass")
    if len(data) < DEEP and draw(st.integers(0, 3)) == 0:
        return draw(spoilt(data))
    return data


def lines_of(data):
    """The lines of a text file that are not blank, with their numbers."""
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read().replace("\ufeff", "")
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if not is_blank(line)]


# ---- prompts ---------------------------------------------------------------------------------------------------------
def prompt_files():
    """The suffix of a prompt file, its bytes, and whether a reward looks at every prompt."""
    sign = st.text(min_size=1).map(lambda text: json.dumps(f'a sign "{text}"'))
    prompts = st.integers(0, 5).flatmap(lambda n: sign if n else st.text().map(json.dumps))
    text = st.text(st.characters(codec="utf-8")).map(str.encode)
    file = st.tuples(st.just(".jsonl"), json_lines({"prompt": prompts}))
    return st.tuples(
        file | file | st.tuples(st.sampled_from([".txt", ".jsonl"]), text | st.binary(max_size=200)),
        st.booleans(),
    )


def attempt_prompts(example):
    (suffix, data), with_reward = example
    rewards = load_rewards(["ocr"], [1.0]) if with_reward else {}

    def check(found):
        lines = lines_of(data)
        assert len(found) == len(found.metadata) == len(lines)
        for prompt, metadata, (_, line) in zip(found.prompts, found.metadata, lines, strict=True):
            record = json.loads(line) if suffix == ".jsonl" else line.strip()
            record = {"prompt": record} if isinstance(record, str) else record
            record = dict(zip(clean_names(record), record.values(), strict=True))
            assert prompt == record.pop("prompt") and prompt.strip() and prompt.encode()
            assert repr(metadata) == repr(record)  # NaN equals nothing

    with scratch() as folder:
        path = folder / f"prompts{suffix}"
        path.write_bytes(data)
        file = re.escape(str(path))
        names = [rf"^{file}:\d+: ", f"^{file}: no prompts", f"^{file}: 'utf-8' codec"]
        return held(lambda: read_prompts(path, rewards), check, names)


# ---- pairs -----------------------------------------------------------------------------------------------------------
@functools.cache
def good_images():
    """{file name: bytes} of five images that differ."""
    images = {}
    for colour, kind in (("red", "png"), ("blue", "png"), ("green", "gif"), ("white", "tiff"), ("black", "jpeg")):
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4), colour).save(buffer, kind)
        images[f"{colour}.{kind}"] = buffer.getvalue()
    return images


@st.composite
def pair_files(draw):
    """The bytes of a pairs.jsonl, and of the images beside it, one of which may be spoilt."""
    images = dict(good_images())
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(images)))
        images[name] = draw(spoilt(images[name]) | st.binary(max_size=50))
    paths = ["no.png", ".", "..", "folder.png", "nul\0", "a" * 300, "a/" * 3000, "red.png/x", "line\nbreak.png", ""]
    good_one = st.sampled_from(sorted(images))
    odd_one = st.sampled_from(paths) | st.text()
    image = st.integers(0, 9).flatmap(lambda n: good_one if n else odd_one).map(json.dumps)
    score = st.floats(-9, 9).map(json.dumps)
    good = {"prompt": st.text(min_size=1).map(json.dumps), "chosen": image, "rejected": image}
    good |= {"chosen_score": st.just("9.5") | score, "rejected_score": st.just("-9.5") | st.just("null") | score}
    return draw(json_lines(good)), images


def attempt_pairs(example):
    data, images = example

    def check(found):
        lines = lines_of(data)
        assert len(found) == len(lines)
        for (prompt, chosen, rejected, _), (_, line) in zip(found, lines, strict=True):
            record = json.loads(line)
            assert prompt == record["prompt"] and prompt.strip() and prompt.encode()
            assert chosen.content == folder / record["chosen"] and rejected.content == folder / record["rejected"]
            for image in (chosen, rejected):
                image.open().close()
            assert chosen.read_bytes() != rejected.read_bytes()
            scores = [record.get(name) for name in ("chosen_score", "rejected_score") if record.get(name) is not None]
            assert all(type(score) in (int, float) and -math.inf < score < math.inf for score in scores)
            assert len(scores) < 2 or scores[0] > scores[1]

    with scratch() as folder:
        for name, content in images.items():
            (folder / name).write_bytes(content)
        (folder / "folder.png").mkdir()
        path = folder / "pairs.jsonl"
        path.write_bytes(data)
        file = re.escape(str(path))
        names = [rf"^{file}:\d+: ", f"^{file}: no prompts", f"^{file}: 'utf-8' codec"]
        return held(lambda: read_pairs(folder), check, names, (ValueError, RunError))


# ---- parquet ---------------------------------------------------------------------------------------------------------
@functools.cache
def good_parquet(reader):
    """The bytes of three rows as VeRL-Omni's, or of three pairs in pick-a-pic's columns, one of them a tie."""
    if reader == "prompts":
        chat = [{"role": "system", "content": "S"}, {"role": "user", "content": 'a sign "12"'}]
        rows = [{"prompt": chat, "extra_info": {"index": index}} for index in range(3)]
    else:
        red, blue = good_images()["red.png"], good_images()["blue.png"]
        rows = [{"caption": "c", "jpg_0": red, "jpg_1": blue, "label_0": x, "label_1": 1 - x} for x in (1.0, 0.5, 0.0)]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def parquet_files():
    """A reader, and the bytes of a file that it reads, spoilt."""
    return st.sampled_from(["prompts", "pairs"]).flatmap(lambda name: st.tuples(st.just(name), spoilt_parquet(name)))


def spoilt_parquet(reader):
    return spoilt(good_parquet(reader)) | st.binary(max_size=200)


def attempt_parquet(example):
    reader, data = example

    def check(found):
        if reader == "prompts":
            assert 0 < len(found) == len(found.metadata)
            assert all(isinstance(prompt, str) and prompt.strip() and prompt.encode() for prompt in found.prompts)
            return
        pairs = list(found)
        assert 0 < len(found) == len(pairs)
        assert all(prompt.strip() and chosen.content != rejected.content for prompt, chosen, rejected, _ in pairs)

    with scratch() as folder, contextlib.redirect_stderr(io.StringIO()):  # which reports ties
        path = folder / "file.parquet"
        path.write_bytes(data)
        names = [f"^{re.escape(str(path))}(, row \\d+)?: "]
        return held(lambda: READERS[reader][0](path), check, names, (ValueError, RunError))


# ---- adapters --------------------------------------------------------------------------------------------------------
def safetensors_bytes(header, data):
    """A file of safetensors: the header as text, and the tensors' bytes."""
    return len(header).to_bytes(8, "little") + header + data


@st.composite
def headers(draw):
    """A file of safetensors whose header says odd dtypes, shapes, places, names or settings."""
    dtypes = ["F32", "F16", "BF16", "F64", "I64", "U8", "BOOL", "C64", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "X", ""]
    names = ["a.lora_A.weight", "a.lora_B.weight", "transformer.a.lora_A.weight", "a.alpha", "a.lora.down.weight"]
    names += ["a.lora.up.weight", "b\nb.lora_A.weight", "text_encoder.a.lora_A.weight", "lora_A.weight", "x" * 2000]
    header = {}
    place = 0
    for name in draw(st.lists(st.sampled_from(names[:5] * 3 + names), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(["F32"] * 12 + dtypes))
        shape = draw(st.sampled_from([[2, 2], [2, 2], [1, 1], [], [0, 2], [2**40, 2**40], [-1], [2.5], None, [4]]))
        end = place + draw(st.sampled_from([16, 16, 16, 4, 8, 0, 32, 2**60, -1]))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
        place = end if 0 <= end < 1000 else place
    text = json.dumps(header)
    if draw(st.booleans()):
        settings = json.dumps(draw(json_texts() | adapter_settings("transformer.")))
        text = text[:-1] + ("," if header else "") + f'"__metadata__": {{"lora_adapter_metadata": {settings}}}}}'
    numbers = draw(st.sampled_from([b"\0\0\x80\x3f", b"\0\0\xc0\x7f", b"\x01\x02\x03\x04", b"\xff\xff\xff\x7e"]))
    return safetensors_bytes(text.encode("utf-8", "surrogatepass"), numbers * (place // 4 + draw(st.integers(0, 1))))


def adapter_settings(prefix=""):
    """The text of an adapter_config.json, or of the metadata that diffusers writes instead."""
    good = {f"{prefix}r": st.just("2"), f"{prefix}lora_alpha": st.just("4") | json_texts()}
    good |= {f"{prefix}{name}": st.just("{}") for name in ("rank_pattern", "alpha_pattern")}
    good[f"{prefix}use_rslora"] = st.just("false")
    return records(good)


@st.composite
def adapters(draw):
    """The bytes of an adapter's file, and of its adapter_config.json, or None."""
    tensors = good_adapter()
    if draw(st.booleans()):
        kinds = [torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
        name = draw(st.sampled_from(sorted(tensors)))
        value = draw(st.sampled_from([1.0, -2.0, 1e300, math.inf, math.nan]))
        tensors[name] = torch.full_like(tensors[name], value, dtype=torch.float64).to(draw(st.sampled_from(kinds)))
    if draw(st.booleans()):
        alpha = draw(st.sampled_from([1.0, 0.0, -1.0, 1e300, math.inf, math.nan]))
        tensors["transformer.a.alpha"] = torch.tensor(alpha, dtype=torch.float64)
    data = safetensors.torch.save(tensors)
    file = draw(st.just(data) | spoilt(data) | headers() | headers() | st.binary(max_size=100))
    config = draw(st.none() | (adapter_settings() | json_texts()).map(lambda text: text.encode("utf-8", "replace")))
    return file, config


def attempt_adapter(example):
    file, config = example

    def check(found):
        weights, lora = found
        header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
        given = [name for name in header if name.endswith(".weight")]
        assert len(weights) == len(given) >= 2
        assert type(lora.lora_alpha) in (int, float) and 0 < torch.tensor(lora.lora_alpha / lora.r) < math.inf
        for name, tensor in weights.items():
            assert tensor.dtype == torch.float32 and tensor.dim() == 2 and tensor.isfinite().all()
            assert tensor.shape[0 if "lora_A" in name else 1] == lora.r
        assert all(header[name]["dtype"] in ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E8M0") for name in given)

    with scratch() as folder:
        name = "adapter_model.safetensors" if config is not None else "pytorch_lora_weights.safetensors"
        (folder / name).write_bytes(file)
        if config is not None:
            (folder / "adapter_config.json").write_bytes(config)
        return held(lambda: read_lora(folder), check, [f"^--lora_path {folder}: "])


# ---- checkpoints -----------------------------------------------------------------------------------------------------
@functools.cache
def good_checkpoint():
    """The bytes of a whole checkpoint of flow_grpo.py."""
    with scratch() as folder, mock.patch.object(sys, "argv", ["flow_grpo.py"]):
        save_checkpoint(folder, 10, good_state(), 1)
        return (folder / "checkpoints" / "step_000010.pt").read_bytes()


def zipped(members):
    """A whole zip file of {name: bytes}, uncompressed, as torch writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def saved_values():
    """Values that torch.save can write and that --resume may name by mistake."""
    odd = st.one_of(
        st.sampled_from([None, True, -1, 10**400, math.nan, "", "flow_grpo", b"x", (), [], {}, [{}], {1: 2}]),
        st.just(torch.ones(3)),
        st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    )
    changed = st.tuples(st.sampled_from(["format", "script", "more"]), odd)
    state = changed.map(lambda change: {"script": "flow_grpo", **good_state(), change[0]: change[1]})
    missing = st.sampled_from(["format", "script"]).map(
        lambda name: {key: value for key, value in [*good_state().items(), ("script", "flow_grpo")] if key != name}
    )
    return odd | state | state | missing | st.just(dict(good_adapter()))


@st.composite
def repacked(draw):
    """A whole zip file, its checksums right, of a checkpoint's parts, of which one is spoilt, renamed or left out."""
    with zipfile.ZipFile(io.BytesIO(good_checkpoint())) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw(st.sampled_from(["archive/data.pkl"] * 8 + sorted(members)))
    data = members.pop(name)
    how = draw(st.sampled_from(["spoilt"] * 8 + ["renamed", "without", "deep", "not a pickle"]))
    deep = b"\x80\x02" + b"(" * DEEP + b"l" * DEEP + b"."
    if how == "spoilt":
        members[name] = draw(spoilt(data))
    elif how == "renamed":
        members["x"] = data
    elif how != "without":
        members[name] = deep if how == "deep" else draw(st.binary(max_size=50))
    return zipped(members)


def checkpoints():
    """The bytes of a file that --resume names."""
    data = good_checkpoint()
    others = [data, b"", pickle.dumps([1, 2]), pickle.dumps(good_state), zipped({}), zipped({"document.xml": b"<"})]
    return st.one_of(
        spoilt(data), repacked(), repacked(), saved_values().map(torch_bytes), st.sampled_from(others), st.binary()
    )


def attempt_checkpoint(example):
    with scratch() as folder, mock.patch.object(sys, "argv", ["flow_grpo.py"]):
        path = folder / "step_000010.pt"
        path.write_bytes(example)

        def check(found):
            assert found == path
            state = load_checkpoint(path)
            assert (state["script"], state["format"]) == ("flow_grpo", FORMAT)

        return held(lambda: checkpoint_to_resume(folder / "runs" / "new", str(path)), check, [re.escape(str(path))])


def damaged_checkpoints():
    """The bytes of a checkpoint after a few of them were flipped, cut or moved."""
    return spoilt(good_checkpoint())


def attempt_damaged_checkpoint(example):
    with scratch() as folder:
        path = folder / "step_000010.pt"
        path.write_bytes(example)
        check = lambda found: assert_same(found, {**good_state(), "script": "flow_grpo"})
        return held(lambda: load_checkpoint(path), check, [re.escape(str(path))])


# ---- metrics of a resumed run ----------------------------------------------------------------------------------------
def metric_files():
    """The bytes of a metrics.jsonl; its last line is whole in most of them."""
    files = json_lines({"training/global_step": st.integers(8, 12).map(str), "loss": st.floats(-1, 1).map(str)})
    return st.tuples(files, st.sampled_from([b"\n", b"\n", b""])).map(b"".join)


def attempt_metrics(example):
    with scratch() as folder:
        path = folder / "metrics.jsonl"
        path.write_bytes(example)

        def check(_):
            complete = [line for line in example.splitlines(keepends=True) if line.endswith(b"\n")]
            left = path.read_bytes().splitlines(keepends=True)
            assert left == [line for line in complete if json.loads(line)["training/global_step"] <= 10]

        return held(lambda: rewind(folder, 10, 10), check, [f"^{path}: "], (RunError,))


# ---- paths -----------------------------------------------------------------------------------------------------------
READERS = {
    "prompts": (read_prompts, ".txt"),
    "pairs": (read_pairs, ".jsonl"),
    "adapter": (read_lora, ".safetensors"),
    "checkpoint": (find_checkpoint, ".pt"),
}


def odd_paths():
    """A reader, the middle of a file's name, and what stands there, which no reader can read."""
    middles = ["", "\udcff", "\n", "\0", " ", "\u2028", "%s{}", "²", "a" * 300, "/a" * 3000, "/../", "\x1b[31m", "ü"]
    there = st.sampled_from(["nothing", "folder", "pipe", "empty file", "full folder"])
    return st.tuples(st.sampled_from(sorted(READERS)), st.sampled_from(middles) | st.text(), there, st.booleans())


def attempt_path(example):
    reader, middle, there, with_suffix = example
    read, suffix = READERS[reader]
    with scratch() as folder, mock.patch.object(sys, "argv", ["flow_grpo.py"]):
        path = f"{folder}/odd{middle}{suffix if with_suffix else ''}"
        with contextlib.suppress(OSError, ValueError):  # the system takes no such name
            make_odd(path, there)

        def check(value):
            assert value is None and reader == "checkpoint"  # a run that has none yet

        return held(lambda: read(path), check, [rf"{folder}/odd"])


def make_odd(path, there):
    """Put something at a path that no reader can read."""
    if there == "pipe":
        os.mkfifo(path)
    elif there == "empty file":
        Path(path).write_bytes(b"")
    elif there != "nothing":
        os.mkdir(path)
    if there == "full folder":
        for name in ("pairs.jsonl", "adapter_config.json", "adapter_model.safetensors"):
            os.makedirs(f"{path}/{name}")
        for name in ("pytorch_lora_weights.safetensors", "checkpoints/step_000010.pt", "checkpoints/step_².pt"):
            os.makedirs(f"{path}/{name}")


# ---- options ---------------------------------------------------------------------------------------------------------
@st.composite
def command_lines(draw):
    """A script, and some of its options with values of any kind that a shell can pass, without line breaks."""
    script = draw(st.sampled_from(SCRIPTS))
    defaults = vars(importlib.import_module(script.removesuffix(".py")).Args())
    numbers = ["0", "-1", "1", "2", "nan", "-inf", "1e999", "1e-999", "1_0", "٣", "0x10", "1.", "9" * 400, "9" * 5000]
    words = ["", "True", "None", "none", "local", "[]", "{}", "a" * 300, "..", "/", "a/b", "\udcff", "%s", "{0}", "="]
    letters = st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])
    number = st.floats().map(str) | st.integers().map(str)
    value = st.sampled_from(numbers + words) | st.text(letters, max_size=5) | number
    command = []
    for option in draw(st.lists(st.sampled_from(sorted(defaults)), min_size=1, max_size=2, unique=True)):
        default = defaults[option]
        count = len(default) if isinstance(default, tuple) and default else 1
        command += [f"--{option}", *draw(st.lists(value, min_size=count, max_size=count))]
    return script, command


def attempt_options(example):
    script, command = example
    args_class = importlib.import_module(script.removesuffix(".py")).Args

    def read():
        return parse_args(args_class, "", command)

    def check(args):
        assert Path("runs", args.name).parent == Path("runs")
        for value in vars(args).values():
            for part in value if isinstance(value, tuple) else [value]:
                assert not isinstance(part, float) or math.isfinite(part)

    printed = io.StringIO()
    quiet = mock.patch.dict(os.environ, {"LOCAL_RANK": "1"})  # a rank that prints no line
    with quiet, contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            # a message repeats the value as it was given, however long it is
            longest = LONGEST + sum(map(len, command))
            names = [re.escape(word[:50]) for word in command if word]
            return held(read, check, names, longest=longest)
        except SystemExit as error:  # tyro's own box, with the option's help
            assert error.code == 2 and any(word[:20] in printed.getvalue() for word in command if word)
            return "refused"


CLASSES = {
    "prompt files": (prompt_files, attempt_prompts),
    "pairs and their images": (pair_files, attempt_pairs),
    "parquet files": (parquet_files, attempt_parquet),
    "adapters": (adapters, attempt_adapter),
    "files that --resume names": (checkpoints, attempt_checkpoint),
    "damaged checkpoints": (damaged_checkpoints, attempt_damaged_checkpoint),
    "metrics of a resumed run": (metric_files, attempt_metrics),
    "paths": (odd_paths, attempt_path),
    "options": (command_lines, attempt_options),
}


# ---- the tests -------------------------------------------------------------------------------------------------------
def try_examples(strategy, attempt, count):
    """Give `count` examples to an attempt: the same ones in every run of the tests, and none remembered."""

    @settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @given(strategy)
    def try_one(example):
        attempt(example)

    try_one()


# files with headers or a hundred lines take long to generate, and tyro takes long to write its boxes
SLOW = ("prompt files", "files that --resume names", "adapters", "options")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "name", [name if name in SLOW else pytest.param(name, marks=pytest.mark.fast) for name in CLASSES]
)
def test_what_is_generated_is_read_as_it_stands_or_refused_in_one_line(name):
    strategy, attempt = CLASSES[name]
    try_examples(strategy(), attempt, 30 if name == "options" else 100)


def attempt_named_line(example):
    """The lines before the named one are accepted alone, and refused with it."""
    (suffix, data), _ = example
    with scratch() as folder:
        path = folder / f"prompts{suffix}"
        path.write_bytes(data)
        try:
            read_prompts(path)
        except ValueError as error:
            number = re.match(rf"{path}:(\d+): ", str(error))
            if not number:
                return  # the file is refused as a whole
            lines = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read().split("\n")
            before = lines[: int(number[1]) - 1]
            path.write_text("\n".join([*before, lines[len(before)]]))
            with pytest.raises(ValueError, match=re.escape(number[0])):
                read_prompts(path)
            path.write_text("\n".join(before))
            if any(line.strip() for line in before):
                read_prompts(path)


@pytest.mark.fast
def test_the_line_that_is_named_is_the_first_at_fault():
    try_examples(prompt_files(), attempt_named_line, 100)


@pytest.mark.fast
def test_an_attempt_fails_where_an_input_does_not_hold():
    """An attempt notices another error, two lines, a long line, a line without the name, and a wrong value."""

    def raises(error):
        def read():
            raise error

        return read

    with pytest.raises(KeyError):
        held(raises(KeyError("x")), None, [""])
    for message in ("a file\nb", "a file" + "x" * 700, "something", "a file \ud800"):
        with pytest.raises(AssertionError):
            held(raises(ValueError(message)), None, ["^a file"])
    with pytest.raises(ZeroDivisionError):
        held(lambda: 0, lambda value: 1 / value)
    assert held(raises(ValueError("a file: x")), None, ["^a file"]) == "refused"
    assert held(lambda: 1, lambda value: 1 / value) == "accepted"
