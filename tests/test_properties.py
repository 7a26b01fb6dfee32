"""Whatever a user's file or option holds, it is read as it stands or refused in one line: tried on generated ones.

benchmarks/hostile_inputs.py tries the same on thousands.
"""

import io
import re
import sys

from common.checkpoints import find_checkpoint, open_run, rewind
from common.data import read_pairs, read_prompts
from common.errors import RunError
from common.lora import read_lora
from common.refusals import LONGEST, brief
from tests import hostile

import pytest
import torch
from hypothesis import given, settings
from PIL import Image
from safetensors.torch import save_file

pytestmark = pytest.mark.fast


def bounded(examples):
    """The same examples at every run, and none remembered."""
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


# ---- generated -------------------------------------------------------------------------------------------------------
@bounded(100)
@given(hostile.prompt_files())
def test_prompt_files(example):
    """Prompts and metadata are those of the file's lines, or one line names the file, and the line where it is one."""
    hostile.attempt_prompts(example)


@bounded(100)
@given(hostile.prompt_files())
def test_the_line_that_is_named_is_the_first_at_fault(example):
    """The lines before it are taken alone, and with it they are not."""
    (suffix, data), _ = example
    with hostile.scratch() as folder:
        path = folder / f"prompts{suffix}"
        path.write_bytes(data)
        try:
            read_prompts(path)
        except ValueError as error:
            number = re.match(rf"{path}:(\d+): ", str(error))
            if not number:
                return  # nothing of it can be read
            lines = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read().split("\n")
            before = lines[: int(number[1]) - 1]
            path.write_text("\n".join([*before, lines[len(before)]]))
            with pytest.raises(ValueError, match=re.escape(number[0])):
                read_prompts(path)
            path.write_text("\n".join(before))
            if any(line.strip() for line in before):
                read_prompts(path)


@bounded(100)
@given(hostile.pair_files())
def test_pairs(example):
    """Pairs are those of the file's lines, of images that differ and scores in order, or one line names the line."""
    hostile.attempt_pairs(example)


@bounded(100)
@given(hostile.parquet_files())
def test_parquet_files(example):
    """Rows of a damaged file are prompts or pairs that can be used, or one line names the file, or the row."""
    hostile.attempt_parquet(example)


@bounded(100)
@given(hostile.adapters())
def test_adapters(example):
    """Every weight of the file is a finite fp32 matrix of the rank, alpha a number above 0; or it is refused."""
    hostile.attempt_adapter(example)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@bounded(100)
@given(hostile.checkpoints())
def test_files_that_resume_names(example):
    """A file is gone on with only if it holds what the scripts save, each of its type."""
    hostile.attempt_checkpoint(example)


@bounded(100)
@given(hostile.damaged_checkpoints())
def test_damaged_checkpoints(example):
    """A checkpoint of which bytes have changed is refused, or loads as it was saved, to the bit."""
    hostile.attempt_damaged_checkpoint(example)


@bounded(100)
@given(hostile.metric_files())
def test_metrics_of_a_resumed_run(example):
    """Of any metrics.jsonl the whole lines up to the step are kept as they are, or one line names the file."""
    hostile.attempt_metrics(example)


@bounded(100)
@given(hostile.odd_paths())
def test_paths(example):
    """Folders, pipes, nothing at all and names that no file can have are refused by a line that can be printed."""
    hostile.attempt_path(example)


@bounded(30)
@given(hostile.command_lines())
def test_options(example):
    """Values of any kind are refused by what names them, or taken: numbers that are finite, a name that is a folder."""
    hostile.attempt_options(example)


def test_an_attempt_fails_where_an_input_does_not_hold():
    """Of what must not pass each kind is noticed: another error, two lines, a long one, no name, a wrong value."""

    def raises(error):
        def read():
            raise error

        return read

    with pytest.raises(KeyError):
        hostile.held(raises(KeyError("x")), None, [""])
    for message in ("a file\nb", "a file" + "x" * 700, "something", "a file \ud800"):
        with pytest.raises(AssertionError):
            hostile.held(raises(ValueError(message)), None, ["^a file"])
    with pytest.raises(ZeroDivisionError):
        hostile.held(lambda: 0, lambda value: 1 / value)
    assert hostile.held(raises(ValueError("a file: x")), None, ["^a file"]) == "refused"
    assert hostile.held(lambda: 1, lambda value: 1 / value) == "accepted"


# ---- by hand ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[" * 100_000, "not JSON that can be read: maximum recursion depth exceeded"),
        ('{"prompt": "a", "n": ' + '{"a":' * 100_000, "not JSON that can be read: maximum recursion depth exceeded"),
        ('{"prompt": "a", "n": ' + "9" * 10_000 + "}", "not JSON that can be read: Exceeds the limit"),
        (r'{"prompt": "half a pair \ud800"}', "'utf-8' codec can't encode character '\\ud800' in position 12"),
        (r'{"prompt": "a\nsign"}', r"OCR needs a prompt with text in double quotes, got: a\nsign"),
        ('{"prompt": "' + "x" * 5000 + '"}', "OCR needs a prompt with text in double quotes, got: xxx"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(line, fault, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "\\"1\\""}}\n\n{line}\n')
    with pytest.raises(ValueError) as error:
        read_prompts(path, hostile.load_rewards(["ocr"], [1.0]))
    message = str(error.value)
    assert message.startswith(f"{path}:3: {fault}") and "\n" not in message and len(message) <= 700


SCORED = '{{"prompt": "p", "chosen": "a.png", "rejected": "b.png", "chosen_score": {}}}'
IMAGE = '{{"prompt": "p", "chosen": {}, "rejected": "b.png"}}'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (SCORED.format("NaN"), "must be numbers, and finite"),
        (SCORED.format("Infinity"), "must be numbers, and finite"),
        (SCORED.format("1e999"), "must be numbers, and finite"),
        (SCORED.format("true"), "must be numbers, and finite"),
        (SCORED.format("9" * 10_000), "not JSON that can be read: Exceeds the limit"),
        (SCORED.format("-" + "9" * 4_000)[:-1] + ', "rejected_score": 1}', "chosen is scored -999"),
        (IMAGE.format(f'"{"a" * 300}"'), "chosen: File name too long"),
        (IMAGE.format(f'"{"a/" * 3000}"'), "chosen: File name too long"),
        (IMAGE.format(r'"nul\u0000"'), r"chosen: no such file: .*/nul\\x00$"),
        (IMAGE.format(r'"half\ud800"'), r"chosen: no such file: .*/half\\ud800$"),
        (IMAGE.format('".."'), "chosen: no such file: "),
        (IMAGE.format('"pairs.jsonl"'), "chosen: not a readable image: "),
    ],
)
def test_a_pair_that_cannot_be_used_is_named(line, fault, tmp_path):
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (4, 4), colour).save(tmp_path / name)
    (tmp_path / "pairs.jsonl").write_text(SCORED.format(1) + "\n" + line)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/pairs.jsonl:2: .*{fault}") as error:
        read_pairs(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 700


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ("[]", "not a LoRA that can be read: its settings are not a JSON object"),
        ("[" * 100_000, "not a LoRA that can be read: maximum recursion depth exceeded"),
        ('{"r": ' + "9" * 10_000 + "}", "not a LoRA that can be read: Exceeds the limit"),
        ('{"r": [2]}', "its ranks differ between modules or from its settings"),
        ('{"lora_alpha": "4"}', "its lora_alpha, 4, is not one number above 0"),
        ('{"lora_alpha": null}', "its lora_alpha, None, is not one number above 0"),
        ('{"lora_alpha": NaN}', "its lora_alpha, nan, is not one number above 0"),
        ('{"lora_alpha": ' + "9" * 4_000 + "}", "its lora_alpha, 999"),
    ],
)
def test_settings_of_an_adapter(config, fault, tmp_path):
    save_file(hostile.good_adapter(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ValueError) as error:
        read_lora(tmp_path)
    message = str(error.value)
    assert message.startswith(f"--lora_path {tmp_path}: {fault}") and "\n" not in message and len(message) <= 700


@pytest.mark.parametrize(
    ("name", "tensor", "fault"),
    [
        ("transformer.a.lora_A.weight", torch.ones(2, 3, dtype=torch.int64), "is of torch.int64, where floating-point"),
        ("transformer.a.lora_A.weight", torch.ones(2, 3, dtype=torch.complex64), "is of torch.complex64, where"),
        ("transformer.a.lora_A.weight", torch.full((2, 3), 1e300, dtype=torch.float64), "has values that are NaN or"),
        ("transformer.a.alpha", torch.tensor(1j), "is not one number above 0"),
        ("a.lora_A.weight", torch.zeros(2, 3), "is in it twice, with a prefix and without"),
    ],
)
def test_tensors_of_an_adapter(name, tensor, fault, tmp_path):
    save_file(hostile.good_adapter() | {name: tensor}, tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(ValueError, match=rf"^--lora_path {tmp_path}: \S+ {fault}"):
        read_lora(tmp_path)


def test_float8_is_read_as_it_is(tmp_path):
    tensors = {name: (tensor * 1.5).to(torch.float8_e4m3fn) for name, tensor in hostile.good_adapter().items()}
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors")
    weights, _ = read_lora(tmp_path)
    assert torch.equal(weights["a.lora_A.weight"], torch.full((2, 3), 1.5))


NOT_OURS = "is not a whole checkpoint (torch saved it, but no script of ours)"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (torch.ones(3), NOT_OURS),
        ([1, 2], NOT_OURS),
        ({"state_dict": {"a": torch.ones(3)}}, NOT_OURS),
        ({**hostile.good_state(), "script": None}, NOT_OURS),
        ({"script": "flow_grpo"}, "is no run's: `step` is missing or of another type"),
        (
            {**hostile.good_state(), "script": "flow_grpo", "rng": {}},
            "is no run's: `rng` is missing or of another type",
        ),
        (
            {**hostile.good_state(), "script": "flow_grpo", "rng": []},
            "is no run's: a step, a policy or random states are",
        ),
        ({**hostile.good_state(), "script": "x\ny"}, r"was written by x\ny.py, not by flow_grpo.py"),
    ],
)
def test_what_torch_saved_and_is_no_checkpoint(value, fault, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py"])
    path = tmp_path / "step_000010.pt"
    path.write_bytes(hostile.torch_bytes(value))
    with pytest.raises(ValueError) as error:
        open_run(tmp_path / "new", str(path))
    assert f"{path} {fault}" in str(error.value) and "\n" not in str(error.value)


def test_a_metric_line_of_brackets_and_a_step_in_other_digits(tmp_path):
    (tmp_path / "checkpoints" / "step_².pt").mkdir(parents=True)  # a digit that is no number
    assert find_checkpoint(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(RunError, match=r"^\S+/metrics\.jsonl: a line is not a step's metrics \(RecursionError"):
        rewind(tmp_path, 10)


def test_brief():
    assert brief("Grüße, 日本 \\n") == "Grüße, 日本 \\n"
    assert brief("a\nb\tc\0\x1b[31m\u2028\udcff\ud800") == r"a\nb\tc\x00\x1b[31m\u2028\udcff\ud800"
    assert brief("a" * LONGEST) == "a" * LONGEST
    assert brief("a" * LONGEST + "b") == "a" * (LONGEST // 2) + " ... " + "a" * (LONGEST // 2 - 1) + "b"
