"""Users' own files, written by hand: rewards, photos, prompts, pairs, adapters and checkpoints, good ones and odd ones.

tests/core/test_properties.py generates such files.
"""

import pickle
import re
import sys
import textwrap

from common.data import PromptSet
from common.errors import LONGEST, RunError, truncate
from common.files.checkpoints import FORMAT
from common.files.prompts import read_prompts
from common.pairs.pair_files import read_pairs
from common.pairs.pairs import is_encoded
from common.rewards._loading import load_rewards
from common.run.inputs import checkpoint_to_resume
from common.run.resuming import find_checkpoint, rewind
from common.scoring import score_images
from common.weights.adapter_files import read_lora
from tests.conftest import good_adapter, good_state, torch_bytes

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

pytestmark = pytest.mark.fast
IMAGES = [Image.new("RGB", (8, 8), "red")] * 2
PROMPTS = PromptSet(["a", "b"], [{"target": 1}, {"target": 2}])


def reward_of(folder, source, name="mine"):
    (folder / "my_file.py").write_text(textwrap.dedent(source))
    return load_rewards([f"{folder / 'my_file.py'}:{name}"], (1.0,))


# ---- rewards ---------------------------------------------------------------------------------------------------------
def test_a_reward_file_may_have_dataclasses_and_neighbours_and_be_pickled(tmp_path):
    (tmp_path / "my_neighbour_of_the_reward.py").write_text("SCORE = 0.25\n")
    rewards = reward_of(
        tmp_path,
        """
        from __future__ import annotations
        import dataclasses
        import my_neighbour_of_the_reward

        @dataclasses.dataclass
        class Judge:
            score: float = my_neighbour_of_the_reward.SCORE

        def mine(images, prompts, metadata):
            return [Judge().score] * len(images)
        """,
    )
    assert score_images(rewards, IMAGES, PROMPTS).tolist() == [[0.25], [0.25]]
    assert pickle.loads(pickle.dumps(rewards["mine"])) is rewards["mine"]


def test_two_files_of_one_name_are_two(tmp_path):
    for folder, score in (("a", 0.25), ("b", 0.75)):
        (tmp_path / folder).mkdir()
        source = f"def {folder}(images, prompts, metadata):\n    return [{score}] * len(images)\n"
        (tmp_path / folder / "same_name.py").write_text(source)
    rewards = load_rewards([f"{tmp_path}/{folder}/same_name.py:{folder}" for folder in "ab"], (1.0, 1.0))
    assert score_images(rewards, IMAGES, PROMPTS)[0].tolist() == [0.25, 0.75]


@pytest.mark.parametrize("file", ["colorsys.py", "my.rewards.py", "my_rewards_2.py"])
def test_a_file_does_not_stand_in_for_a_module_of_its_name(file, tmp_path):
    """Its own import of that name gives what is installed."""
    source = "import colorsys\n\n\ndef mine(images, prompts, metadata):\n"
    source += "    return [colorsys.rgb_to_hsv(0, 0, 1)[2]] * len(images)\n"
    (tmp_path / file).write_text(source)
    rewards = load_rewards([f"{tmp_path / file}:mine"], (1.0,))
    assert score_images(rewards, IMAGES, PROMPTS).tolist() == [[1], [1]]


def test_a_file_with_two_rewards_is_imported_once(tmp_path):
    source = (
        "count = []\n\n\ndef a(images, prompts, metadata):\n    count.append(1)\n    return [len(count)] * len(images)"
    )
    (tmp_path / "two_rewards.py").write_text(source + "\n\n\ndef b(*given):\n    return a(*given)\n")
    rewards = load_rewards([f"{tmp_path}/two_rewards.py:{name}" for name in "ab"], (1.0, 1.0))
    assert score_images(rewards, IMAGES, PROMPTS)[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            "import no_such_module_at_all",
            r"ModuleNotFoundError: No module named 'no_such_module_at_all' \(\S+my_file.py:1\)",
        ),
        ("\ndef mine(:\n    pass", r"SyntaxError: .* \(\S+my_file.py:2\)"),
        ("\n\nraise SystemExit(0)", r"SystemExit: 0 \(\S+my_file.py:3\)"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(\S+my_file.py:1\)"),
    ],
)
def test_a_reward_file_that_cannot_be_imported_is_refused_in_one_line(source, fault, tmp_path):
    with pytest.raises(ValueError, match=rf"^--reward \S+my_file.py:mine: {fault}$"):
        reward_of(tmp_path, source)


def test_an_error_names_the_users_line_and_is_cut(tmp_path):
    """Not the line of the library in which it was raised."""
    rewards = reward_of(
        tmp_path,
        """
        import json

        def parse(text):
            return json.loads(text)

        def mine(images, prompts, metadata):
            return [parse("{") for image in images]
        """,
    )
    with pytest.raises(RunError, match=r" mine .*JSONDecodeError: .*\(\S+my_file.py:5\)$"):
        score_images(rewards, IMAGES, PROMPTS)

    def long(images, prompts, metadata):
        raise ValueError("x\n" * 100_000)

    with pytest.raises(RunError) as error:
        score_images({"long": long}, IMAGES, PROMPTS)
    assert len(str(error.value)) < 700 and "\n" not in str(error.value)


def test_one_reward_does_not_change_what_the_next_one_sees():
    def vandal(images, prompts, metadata):
        images[0].paste("black", (0, 0, 8, 8))
        prompts[0] = "another"
        metadata[0]["target"] = 7
        return [0.0, 0.0]

    def honest(images, prompts, metadata):
        assert prompts == ["a", "b"] and metadata == [{"target": 1}, {"target": 2}]
        return [image.getpixel((0, 0))[0] / 255 for image in images]

    scores = score_images({"vandal": vandal, "honest": honest}, IMAGES, PROMPTS)
    assert scores.tolist() == [[0, 1], [0, 1]] and IMAGES[0].getpixel((0, 0)) == (255, 0, 0)


def test_a_corrupt_cache_entry_is_encoded_again(tmp_path):
    good = {"latents": torch.zeros(2, 1), "prompt_embeds": torch.zeros(1, 3)}
    for name, tensors in (("good", good), ("nan", {**good, "latents": torch.full((2, 1), torch.nan)})):
        torch.save(tensors, tmp_path / f"{name}.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:100])
    (tmp_path / "noise.pt").write_bytes(b"\0" * 500)
    torch.save({"latents": torch.zeros(1, 1)}, tmp_path / "half.pt")
    found = {name: is_encoded(tmp_path / f"{name}.pt") for name in ("good", "nan", "cut", "noise", "half", "no")}
    assert found == {"good": True, "nan": False, "cut": False, "noise": False, "half": False, "no": False}


# ---- prompts and pairs -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[" * 100_000, ".* JSON .*: maximum recursion depth exceeded"),
        ('{"prompt": "a", "n": ' + '{"a":' * 100_000, ".* JSON .*: maximum recursion depth exceeded"),
        ('{"prompt": "a", "n": ' + "9" * 10_000 + "}", ".* JSON .*: Exceeds the limit"),
        (r'{"prompt": "half a pair \ud800"}', r"'utf-8' codec can't encode character '\\ud800' in position 12"),
        (r'{"prompt": "a\nsign"}', r"OCR .*: a\\nsign"),
        ('{"prompt": "' + "x" * 5000 + '"}', "OCR .*: xxx"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(line, fault, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "\\"1\\""}}\n\n{line}\n')
    with pytest.raises(ValueError) as error:
        read_prompts(path, load_rewards(["ocr"], [1.0]))
    message = str(error.value)
    assert re.match(f"{path}:3: {fault}", message) and "\n" not in message and len(message) <= 700


SCORED = '{{"prompt": "p", "chosen": "a.png", "rejected": "b.png", "chosen_score": {}}}'
IMAGE = '{{"prompt": "p", "chosen": {}, "rejected": "b.png"}}'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (SCORED.format("NaN")[:-1] + ', "rejected_score": 1}', " nan, .* 1: "),
        (SCORED.format("9" * 10_000), " JSON .*: Exceeds the limit"),
        (SCORED.format("-" + "9" * 4_000)[:-1] + ', "rejected_score": 1}', " -999"),
        (IMAGE.format(f'"{"a" * 300}"'), "chosen: .*: File name too long"),
        (IMAGE.format(f'"{"a/" * 3000}"'), "chosen: .*: File name too long"),
        (IMAGE.format(r'"nul\u0000"'), r"chosen: .*/nul\\x00: "),
        (IMAGE.format(r'"half\ud800"'), r"chosen: .*/half\\ud800: "),
        (IMAGE.format('".."'), r"chosen: .*/\.\.: "),
        (IMAGE.format('"pairs.jsonl"'), "chosen: .*/pairs.jsonl: "),
    ],
)
def test_a_pair_that_cannot_be_used_is_named(line, fault, tmp_path):
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (16, 16), colour).save(tmp_path / name)
    (tmp_path / "pairs.jsonl").write_text(SCORED.format(1) + "\n" + line)
    with pytest.raises((ValueError, RunError), match=rf"^{tmp_path}/pairs.jsonl:2: .*{fault}") as error:
        read_pairs(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 700


# ---- adapters --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ("[]", ".* LoRA .*: 'list' object has no attribute 'items'"),
        ("[" * 100_000, ".* LoRA .*: maximum recursion depth exceeded"),
        ('{"r": ' + "9" * 10_000 + "}", ".* LoRA .*: Exceeds the limit"),
        ('{"r": [2]}', r".* tools\.lora convert"),
        ('{"lora_alpha": "4"}', ".* lora_alpha, 4, "),
        ('{"lora_alpha": null}', ".* lora_alpha, None, "),
        ('{"lora_alpha": NaN}', ".* lora_alpha, nan, "),
        ('{"lora_alpha": ' + "9" * 4_000 + "}", ".* lora_alpha, 999"),
    ],
)
def test_settings_of_an_adapter(config, fault, tmp_path):
    save_file(good_adapter(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ValueError) as error:
        read_lora(tmp_path)
    message = str(error.value)
    assert re.match(f"--lora_path {tmp_path}: {fault}", message) and "\n" not in message and len(message) <= 700


ODD_TENSORS = {
    "transformer.a.lora_A.weight": [
        (torch.full((2, 3), torch.nan), ""),
        (torch.full((2, 3), 1e300, dtype=torch.float64), ""),  # in fp32
        (torch.ones(2), ""),
        (torch.ones(0, 3), ""),
        (torch.ones(2, 3, dtype=torch.int64), ""),
        (torch.ones(2, 3, dtype=torch.complex64), ""),
    ],
    "transformer.a.lora_B.weight": [(torch.full((3, 2), torch.inf), "")],
    "transformer.a.alpha": [
        (torch.ones(2), " 0$"),
        (torch.tensor(torch.nan), " 0$"),
        (torch.tensor(1j), " 0$"),
    ],
    "a.lora_A.weight": [(torch.zeros(2, 3), "")],
}


@pytest.mark.parametrize("name", ODD_TENSORS)
def test_tensors_of_an_adapter(name, tmp_path):
    for tensor, fault in ODD_TENSORS[name]:
        save_file(good_adapter() | {name: tensor}, tmp_path / "pytorch_lora_weights.safetensors")
        with pytest.raises(ValueError) as error:
            read_lora(tmp_path)
        message = str(error.value)
        assert re.match(f"--lora_path {tmp_path}: .*{name} .*{fault}", message) and "\n" not in message


def test_float8_is_read_as_it_is(tmp_path):
    tensors = {name: (tensor * 1.5).to(torch.float8_e4m3fn) for name, tensor in good_adapter().items()}
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors")
    weights, _ = read_lora(tmp_path)
    assert torch.equal(weights["a.lora_A.weight"], torch.full((2, 3), 1.5))


# ---- checkpoints and metrics -----------------------------------------------------------------------------------------
NOT_OURS = r" .*\(.*\)$"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (torch.ones(3), NOT_OURS),
        ([1, 2], NOT_OURS),
        ({"state_dict": {"a": torch.ones(3)}}, NOT_OURS),
        ({**good_state(), "script": None}, NOT_OURS),
        (
            {**good_state(), "script": "flow_grpo", "format": 1},
            f" .* CleanFlow: .* 1, .* {FORMAT}",
        ),
        ({**good_state(), "script": "x\ny"}, r" .* x\\ny.py, .* flow_grpo.py"),
    ],
)
def test_what_torch_saved_and_is_no_checkpoint(value, fault, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py"])
    path = tmp_path / "step_000010.pt"
    path.write_bytes(torch_bytes(value))
    with pytest.raises(ValueError) as error:
        checkpoint_to_resume(tmp_path / "new", str(path))
    assert re.search(f"{path}{fault}", str(error.value)) and "\n" not in str(error.value)


def test_a_metric_line_of_brackets_and_a_step_in_other_digits(tmp_path):
    (tmp_path / "checkpoints" / "step_².pt").mkdir(parents=True)  # a digit that is no number
    assert find_checkpoint(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(RunError, match=r"^\S+/metrics\.jsonl: .*\(RecursionError"):
        rewind(tmp_path, 10, 10)


# ---- the line of an error --------------------------------------------------------------------------------------------
def test_a_text_of_a_message_is_cut_in_its_middle_and_has_no_control_characters():
    assert truncate("Grüße, 日本 \\n") == "Grüße, 日本 \\n"
    assert truncate("a\nb\tc\0\x1b[31m\u2028\udcff\ud800") == r"a\nb\tc\x00\x1b[31m\u2028\udcff\ud800"
    assert truncate("a" * LONGEST) == "a" * LONGEST
    assert truncate("a" * LONGEST + "b") == "a" * (LONGEST // 2) + " ... " + "a" * (LONGEST // 2 - 1) + "b"
