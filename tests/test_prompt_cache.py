"""Prompt embeddings on disk: encoded once, by themselves, and what a disk has changed is encoded anew."""

import json

from common import prompt_cache
from common.prompt_cache import cache_prompts
from tests.conftest import EMBEDDED, TINY, embedded_model, few_eval_prompts, run_here

import pytest
import torch

pytestmark = pytest.mark.fast

PROMPTS = ['a red sign that says "4711"', 'a sign that says "12"', ""]
LENGTH = 16


def counting(model, monkeypatch):
    """The prompts that the family itself encodes from now on, call by call."""
    calls = []
    own = model.encode_prompts
    monkeypatch.setattr(model, "encode_prompts", lambda prompts, n: calls.append(list(prompts)) or own(prompts, n))
    return calls


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype


def test_every_prompt_is_encoded_once_by_itself_and_read_from_then_on(one_rank, tmp_path, monkeypatch):
    model = embedded_model(torch.bfloat16)
    alone = [model.encode_prompts([prompt], LENGTH) for prompt in PROMPTS]
    calls = counting(model, monkeypatch)
    cache_prompts(model, [*PROMPTS[:2], PROMPTS[0]], LENGTH, tmp_path / "cache")
    assert calls == [[prompt] for prompt in PROMPTS]
    together = model.encode_prompts([PROMPTS[1], PROMPTS[0], PROMPTS[1]], LENGTH)
    assert len(calls) == 3
    assert_equal(together, {name: torch.cat([alone[i][name] for i in (1, 0, 1)]) for name in together})
    assert_equal(model.encode_negative(4.5, LENGTH), alone[2])

    another = embedded_model(torch.bfloat16)  # the next run
    calls = counting(another, monkeypatch)
    assert len(prompt_cache.encoders_key(another)) == 128  # not the vocabularies: it goes into every prompt's key
    cache_prompts(another, PROMPTS, LENGTH, tmp_path / "cache")
    assert_equal(another.encode_prompts(PROMPTS[:1], LENGTH), alone[0])
    assert calls == []


@pytest.mark.parametrize(
    "change", ["length", "a bit of an encoder", "dtype", "tokenizer's length", "a token more", "nothing"]
)
def test_what_embeddings_depend_on_is_in_the_key(one_rank, tmp_path, monkeypatch, change):
    model = embedded_model()
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        getattr(model.pipe, name).bfloat16().float()  # as files in bf16 are: the dtype alone tells them apart
    cache_prompts(model, PROMPTS[:1], LENGTH, tmp_path)
    model = embedded_model(torch.bfloat16 if change == "dtype" else torch.float32)
    if change != "dtype":
        for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
            getattr(model.pipe, name).bfloat16().float()
    if change == "a bit of an encoder":
        weight = next(model.pipe.text_encoder_3.parameters())
        weight.data.view(-1).view(torch.int32)[0] ^= 1
    if change == "tokenizer's length":
        model.pipe.tokenizer.model_max_length = 7
    if change == "a token more":
        model.pipe.tokenizer_3.add_tokens(["zzz"])
    calls = counting(model, monkeypatch)
    cache_prompts(model, PROMPTS[:1], LENGTH - 1 if change == "length" else LENGTH, tmp_path)
    assert len(calls) == (0 if change == "nothing" else 2)  # it, and the empty one


@pytest.mark.parametrize("fault", ["a flipped bit", "cut", "empty", "not ours"])
def test_a_damaged_file_is_encoded_anew(one_rank, tmp_path, monkeypatch, fault):
    model = embedded_model()
    cache_prompts(model, PROMPTS[:1], LENGTH, tmp_path)
    expected = model.encode_prompts(PROMPTS[:1], LENGTH)
    file = max(tmp_path.glob("*.safetensors"))  # the prompt's, or the empty one's
    content = bytearray(file.read_bytes())
    if fault == "a flipped bit":
        content[-1] ^= 1
    file.write_bytes({"cut": content[:-10], "empty": b"", "not ours": b"x" * 100}.get(fault, content))
    model = embedded_model()
    calls = counting(model, monkeypatch)
    cache_prompts(model, PROMPTS[:1], LENGTH, tmp_path)
    assert len(calls) == 1
    assert_equal(model.encode_prompts(PROMPTS[:1], LENGTH), expected)
    assert prompt_cache.read_conditioning(file) is not None


def test_a_run_with_a_cache_is_the_run_without(tmp_path, monkeypatch):
    """But for the round-off of encoding prompts together or each by itself; a run of the same cache is the same."""
    few = few_eval_prompts(tmp_path, 4)
    options = ["--rollout", "local", *TINY, *few, "--train_prompts", few[1], "--num_steps", 1]
    rewards = {}
    for name, cache in {"without": [], "with": ["--prompt_cache", "kept"], "again": ["--prompt_cache", "kept"]}.items():
        assert run_here(tmp_path, "flow_grpo.py", "--name", name, *options, *cache) is None
        last = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1]
        rewards[name] = {key: json.loads(last)[key] for key in ("critic/rewards/mean", "actor/grad_norm")}
    assert rewards["with"] == rewards["again"]
    assert rewards["with"] == pytest.approx(rewards["without"], rel=1e-4)
    assert len(list((tmp_path / "kept").iterdir())) == 5  # and the negative one


def test_a_prompt_that_is_not_there_is_encoded_and_told(one_rank, tmp_path, monkeypatch, capfd):
    model = embedded_model()
    cache_prompts(model, PROMPTS[:1], LENGTH, tmp_path)
    assert capfd.readouterr().err == "loading " + str(EMBEDDED) + "\n"
    expected = embedded_model().encode_prompts([PROMPTS[1]], LENGTH)
    capfd.readouterr()
    assert_equal(model.encode_prompts([PROMPTS[1]], LENGTH), expected)
    assert capfd.readouterr().err == f"--prompt_cache {tmp_path}: not there, and encoded now: {PROMPTS[1]}\n"
    model.encode_prompts([PROMPTS[1]], LENGTH)
    assert capfd.readouterr().err == ""


def test_two_runs_write_one_cache(tmp_path, monkeypatch):
    """Neither takes the other's file away: their temporary files have names of their own."""
    conditioning = {"prompt_embeds": torch.ones(1, 2)}
    names = []
    own = prompt_cache.save_file
    monkeypatch.setattr(prompt_cache, "save_file", lambda t, path, **k: names.append(path.name) or own(t, path, **k))
    for process in (11, 22):
        monkeypatch.setattr("common.files.os.getpid", lambda process=process: process)
        prompt_cache.write_conditioning(tmp_path / "x.safetensors", conditioning)
    assert names == [".x.safetensors.11.new", ".x.safetensors.22.new"]
    assert_equal(prompt_cache.read_conditioning(tmp_path / "x.safetensors"), conditioning)
