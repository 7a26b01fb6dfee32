"""Prompts that are longer than a text encoder takes: one line, and none of the libraries' own."""

import logging
import re

from common.models.long_prompts import count_long_prompts, is_no_truncation
from common.weights.start import prepare_prompts
from tests.conftest import embedded_model

import pytest

pytestmark = pytest.mark.fast


class Words:
    """A tokenizer that makes a token of each word, and one of the end."""

    def __init__(self, model_max_length):
        self.model_max_length = model_max_length

    def __call__(self, prompts):
        return type("Encoding", (), {"input_ids": [[*prompt.split(), "end"] for prompt in prompts]})


class CLIPTokenizer(Words):
    pass


class T5TokenizerFast(Words):
    pass


class Pipe:
    def __init__(self, **components):
        self.components = components


LONGEST = "one two three four five six " + "7" * 40  # 68 letters
PROMPTS = ["one two three", "one two", "one two three", LONGEST, "word" * 40]  # the last is one token, and not cut


def test_each_encoder_counts_the_distinct_prompts_that_it_cuts(capfd):
    """CLIP's own limit is 3 tokens, T5's the option's 5; both CLIPs have one tokenizer."""
    clip = CLIPTokenizer(3)
    pipe = Pipe(tokenizer=clip, tokenizer_2=clip, tokenizer_3=T5TokenizerFast(512), tokenizer_4=None, vae=None)
    count_long_prompts(pipe, PROMPTS, 5)
    expected = r".* 4: 2 by CLIP \(after 3 tokens\), 1 by T5 \(after 5 tokens\)"
    assert re.fullmatch(f"{expected}; .* '{LONGEST[:60]}'\n", capfd.readouterr().err)
    count_long_prompts(Pipe(tokenizer=T5TokenizerFast(512)), PROMPTS, 8)
    assert capfd.readouterr().err == ""


def test_the_libraries_say_nothing_of_it(one_rank, capfd, caplog):
    """The embedded model's encoders take 16 tokens."""
    model = embedded_model()
    long = "a red sign that says " + "4711 " * 40
    with caplog.at_level(logging.WARNING):
        prepare_prompts(model, [long, "a sign"], 16, None)
        model.encode_prompts([long, "a sign"], 16)
    said = capfd.readouterr().err
    assert " 2: 1 by " in said
    assert "truncated" not in said + caplog.text and "longer than the specified" not in said + caplog.text


@pytest.mark.parametrize("folder", [None, "cache"])
def test_a_template_that_leaves_nothing_of_the_prompts_is_reported(folder, one_rank, tmp_path, capfd, monkeypatch):
    """The embedded model's encoders take 16 tokens. Prompts that differ in case and spaces alone may be the same."""
    model = embedded_model()
    own = model.encode_batch
    prompts = ["a sign", "a red sign", "A  sign"]
    prepare_prompts(model, prompts, 16, folder and tmp_path / "without")
    monkeypatch.setattr(model, "encode_batch", lambda texts, n: own(["x " * 40 + text for text in texts], n))
    model.kept_conditioning = None
    prepare_prompts(model, prompts[::2], 16, folder and tmp_path / "alike")
    model.kept_conditioning = None
    assert "--max_sequence_length" not in capfd.readouterr().err
    prepare_prompts(model, prompts, 16, folder and tmp_path / folder)
    assert "--max_sequence_length" in capfd.readouterr().err


def test_other_messages_pass():
    record = logging.LogRecord("diffusers", logging.WARNING, "", 0, "a component is missing", (), None)
    assert is_no_truncation(record)
