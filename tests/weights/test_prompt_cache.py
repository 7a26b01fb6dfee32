"""Prompt embeddings on disk: each prompt is encoded once, alone, and again only if its file was cut."""

import json
import os
import re
import signal
import time
from types import SimpleNamespace

from common import process
from common.models.loading import family_class
from common.process import catch_stop_signals
from common.weights import prompt_cache
from common.weights.start import prepare_prompts
from tests.conftest import EMBEDDED, TINY, embedded_model, few_eval_prompts, on_ranks, prompt_set, run_here

import pytest
import torch

PROMPTS = ['a red sign that says "4711"', 'a sign that says "12"', ""]
LENGTH = 16


def counting(model, monkeypatch):
    """A list that collects the prompts of every later call of the family's own encode_prompts."""
    calls = []
    own = model.encode_prompts
    monkeypatch.setattr(model, "encode_prompts", lambda prompts, n: calls.append(list(prompts)) or own(prompts, n))
    return calls


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype


@pytest.mark.fast
def test_every_prompt_is_encoded_once_and_alone_and_then_read(one_rank, tmp_path, monkeypatch):
    model = embedded_model(torch.bfloat16)
    alone = [model.encode_prompts([prompt], LENGTH) for prompt in PROMPTS]
    calls = counting(model, monkeypatch)
    prepare_prompts(model, [*PROMPTS[:2], PROMPTS[0]], LENGTH, tmp_path / "cache")
    assert calls == [[prompt] for prompt in PROMPTS]
    together = model.encode_through_cache([PROMPTS[1], PROMPTS[0], PROMPTS[1]], LENGTH)
    assert len(calls) == 3
    assert_equal(together, {name: torch.cat([alone[i][name] for i in (1, 0, 1)]) for name in together})
    assert_equal(model.encode_negative(prompt_set([""]), 4.5, LENGTH), alone[2])

    another = embedded_model(torch.bfloat16)  # the next run
    calls = counting(another, monkeypatch)
    # short, although it covers vocabularies: it is hashed for every prompt
    assert len(prompt_cache.encoders_key(another)) == 128
    prepare_prompts(another, PROMPTS, LENGTH, tmp_path / "cache")
    assert_equal(another.encode_through_cache(PROMPTS[:1], LENGTH), alone[0])
    assert calls == []


@pytest.mark.fast
@pytest.mark.parametrize(
    "change",
    ["length", "a bit of an encoder", "dtype", "tokenizer's length", "a token more", "chat template", "nothing"]
    + ["a config", "diffusers.__version__", "transformers.__version__"],
)
def test_what_embeddings_depend_on_is_in_the_key(one_rank, tmp_path, monkeypatch, change):
    model = embedded_model()
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        getattr(model.pipe, name).bfloat16().float()  # as if from files in bf16: only the dtype differs then
    prepare_prompts(model, PROMPTS[:1], LENGTH, tmp_path)
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
    if change == "chat template":
        model.pipe.tokenizer_3.chat_template = "{{ messages }}"
    if change == "a config":  # also beside those that say where a copy lies
        model.pipe.text_encoder.config.hidden_act = "gelu_new"
    model.pipe.text_encoder_2.config._name_or_path = "elsewhere"
    if change.endswith("__version__"):
        monkeypatch.setattr(change, "0.1")
    calls = counting(model, monkeypatch)
    prepare_prompts(model, PROMPTS[:1], LENGTH - 1 if change == "length" else LENGTH, tmp_path)
    assert len(calls) == (0 if change == "nothing" else 2)  # the prompt and the empty prompt


@pytest.mark.fast
def test_configs_of_image_encoders_and_processors_are_in_the_key():
    """A user's own text encoder may have none."""
    model = embedded_model()
    model.pipe.text_encoder_3 = torch.nn.Linear(2, 2)
    keys = []
    for hidden_act, crop_size in (("gelu", 224), ("relu", 224), ("gelu", 112), ("gelu", 224)):
        model.pipe.image_encoder = SimpleNamespace(config={"hidden_act": hidden_act, "_name_or_path": len(keys)})
        model.pipe.feature_extractor = SimpleNamespace(to_dict=lambda size=crop_size: {"crop_size": size})
        keys.append(prompt_cache.encoders_key(model))
    assert len(set(keys)) == 3 and keys[0] == keys[3]


@pytest.mark.fast
def test_a_family_of_your_own_that_has_changed_encodes_again(tmp_path):
    """Its file decides, and not the folder that the file lies in."""
    pipe = embedded_model().pipe
    keys = []
    for folder, body in {"one": "pass", "same": "pass", "other": "template = 'a photo of '"}.items():
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir()
        parent = "from common.models.stable_diffusion_3 import StableDiffusion3"
        file.write_text(f"{parent}\n\n\nclass Mine(StableDiffusion3):\n    {body}\n")
        family = family_class(EMBEDDED, f"{file}:Mine")
        keys.append(prompt_cache.encoders_key(family(pipe)))
    assert keys[0] == keys[1] != keys[2]


FLIPPED = {"an embedding": -1, "the digest": b'"digest":"', "a name": b'"pooled', "a type": b'"F3'}  # where in the file


@pytest.mark.fast
@pytest.mark.parametrize("fault", [*FLIPPED, "cut", "empty", "not ours"])
def test_a_prompt_whose_file_is_damaged_is_encoded_again_when_it_is_read(one_rank, tmp_path, monkeypatch, capfd, fault):
    """And not at the start, which would read the whole folder."""
    model = embedded_model()
    prompts = [PROMPTS[1], PROMPTS[0], *"abcdefg"]  # of nine, the second is not among those that are compared
    prepare_prompts(model, prompts, LENGTH, tmp_path)
    expected = model.encode_through_cache(PROMPTS[:1], LENGTH)
    file = file_of(model, tmp_path, PROMPTS[0])
    whole = file.read_bytes()
    content = bytearray(whole)
    if fault in FLIPPED:
        place = FLIPPED[fault]
        content[place if isinstance(place, int) else whole.index(place) + len(place)] ^= 1
    file.write_bytes({"cut": whole[:-10], "empty": b"", "not ours": b"x" * 100}.get(fault, content))
    model = embedded_model()
    calls = counting(model, monkeypatch)
    prepare_prompts(model, prompts, LENGTH, tmp_path)
    assert calls == []
    capfd.readouterr()
    assert_equal(model.encode_through_cache([PROMPTS[0], PROMPTS[1], PROMPTS[0]], LENGTH), three(expected, model))
    told = f"--prompt_cache {tmp_path}: .*: {re.escape(PROMPTS[0])}\n"
    assert calls == [[PROMPTS[0]]] and re.fullmatch(told, capfd.readouterr().err)
    assert file.read_bytes() == whole


def file_of(model, folder, prompt):
    key = prompt_cache.encoders_key(model)
    return prompt_cache.PromptCache(folder, key, model.encode_prompts).file_of(prompt, LENGTH)


def three(one, model):
    """The first prompt's conditioning, the second's, and the first's again."""
    other = model.encode_through_cache(PROMPTS[1:2], LENGTH)
    return {name: torch.cat([one[name], other[name], one[name]]) for name in one}


@pytest.mark.fast
def test_a_file_has_the_bits_of_what_was_encoded(tmp_path):
    """Embeddings in bf16 of which the rows are not contiguous, masks, numbers, and the sign of a zero."""
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(1, 64, 512, generator=generator).bfloat16().transpose(1, 2)
    embeds[:, 60:] = -0.0
    conditioning = {"prompt_embeds": embeds, "mask": (torch.arange(512) < 60)[None].long()}
    conditioning |= {"num_tokens": torch.tensor([60]), "is_on": torch.tensor([[True, False]])}
    cache = prompt_cache.PromptCache(tmp_path, "key", lambda prompts, length: conditioning)
    cache.add("a sign", LENGTH)
    found = cache.read(["a sign"], LENGTH)
    assert_equal(found, conditioning)
    assert found["prompt_embeds"][0, 60:].signbit().all()
    assert cache.file_of("a sign", LENGTH).stat().st_mode & 0o444 == 0o444  # for all who share the folder


@pytest.mark.fast
def test_files_are_spread_over_sub_folders_and_nothing_waits_for_the_disk(one_rank, tmp_path, monkeypatch):
    """50,000 files in one folder are slow. A file that a power cut has damaged is found when it is read."""
    monkeypatch.setattr("os.fsync", lambda descriptor: pytest.fail("waited"))
    folder = tmp_path / "kept"
    prepare_prompts(embedded_model(), [f"{i}" for i in range(9)], LENGTH, folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 10 and len({file.parent for file in files}) > 5
    assert all(file.parent.parent == folder and file.name[:2] == file.parent.name for file in files)


@pytest.mark.fast
def test_ranks_share_the_prompts(tmp_path, monkeypatch):
    """Each prompt is encoded by one rank."""
    encoded = []

    def on_rank(rank):
        encode = lambda prompts, length: encoded.append(prompts[0]) or {"prompt_embeds": torch.ones(1, length, 8)}
        cache = prompt_cache.PromptCache(tmp_path / "kept", "key", encode)
        cache.add_missing([f"prompt {i}" for i in range(10)], LENGTH)

    on_ranks(monkeypatch, 3, on_rank)
    assert sorted(encoded) == [f"prompt {i}" for i in range(10)]
    on_ranks(monkeypatch, 2, on_rank)
    assert len(encoded) == 10


def test_a_run_with_a_cache_is_the_run_without_and_encodes_what_it_will_draw(tmp_path):
    """Up to the round-off of encoding prompts together or alone. Two runs with one cache are equal. Two of the twelve
    training prompts, the held-out ones and the empty one are encoded."""
    many = tmp_path / "many.txt"
    many.write_text("".join(f'a sign that says "{number}"\n' for number in range(1000, 1012)))
    options = ["--rollout", "local", *TINY, *few_eval_prompts(tmp_path, 2), "--train_prompts", many]
    options += ["--num_steps", 1, "--num_prompts", 2]
    rewards = {}
    for name, cache in {"without": [], "with": ["--prompt_cache", "kept"], "again": ["--prompt_cache", "kept"]}.items():
        assert run_here(tmp_path, "flow_grpo.py", "--name", name, *options, *cache) is None
        last = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1]
        rewards[name] = {key: json.loads(last)[key] for key in ("critic/rewards/mean", "actor/grad_norm")}
    assert rewards["with"] == rewards["again"]
    assert rewards["with"] == pytest.approx(rewards["without"], rel=1e-4)
    assert len(list((tmp_path / "kept").glob("*/*"))) == 2 + 2 + 1


@pytest.mark.fast
def test_a_prompt_that_is_not_in_the_cache_is_encoded_and_reported(one_rank, tmp_path, monkeypatch, capfd):
    model = embedded_model()
    prepare_prompts(model, PROMPTS[:1], LENGTH, tmp_path)
    loading, encoding = capfd.readouterr().err.splitlines()[:2]  # a progress bar follows
    assert loading == f"loading {EMBEDDED}"
    assert re.match(f"--prompt_cache {tmp_path}: .* 2 ", encoding)
    expected = embedded_model().encode_prompts([PROMPTS[1]], LENGTH)
    capfd.readouterr()
    assert_equal(model.encode_through_cache([PROMPTS[1]], LENGTH), expected)
    told = f"--prompt_cache {tmp_path}: .*: {re.escape(PROMPTS[1])}\n"
    assert re.fullmatch(told, capfd.readouterr().err)
    model.encode_through_cache([PROMPTS[1]], LENGTH)
    assert capfd.readouterr().err == ""


@pytest.mark.fast
@pytest.mark.parametrize("by", ["SIGTERM", "--max_minutes"])
def test_a_stop_while_prompts_are_encoded_keeps_those_that_are(
    one_rank, tmp_path, monkeypatch, own_handlers, capfd, by
):
    """It comes while the second of four prompts is encoded. The next start encodes the other two, and removes what a
    kill has left an hour ago."""
    encoded = []

    def encode(prompts, length):
        encoded.append(prompts[0])
        if len(encoded) == 2 and by == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif len(encoded) == 2:
            monkeypatch.setattr(process, "_deadline", 0.0)
        return {"prompt_embeds": torch.ones(1, length, 8)}

    cache = prompt_cache.PromptCache(tmp_path, "key", encode)
    catch_stop_signals(0)
    with pytest.raises(SystemExit) as ended:
        cache.add_missing(["a", "bb", "ccc", "dddd"], LENGTH)
    assert ended.value.code == 0 and encoded == ["a", "bb"]
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.match(f".* {tmp_path}; .*--resume latest", last)
    catch_stop_signals(0)
    old, young = (cache.file_of("ccc", LENGTH).with_name(f".{name}.new") for name in ("old", "young"))
    for file in (old, young):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 3700,) * 2)
    cache.add_missing(["a", "bb", "ccc", "dddd"], LENGTH)
    assert encoded == ["a", "bb", "ccc", "dddd"]
    assert young.exists() and not old.exists()  # another run may be writing the young one


@pytest.mark.fast
def test_two_runs_write_one_cache(tmp_path, monkeypatch):
    """Neither removes the other's file: their temporary files have different names."""
    names = []
    own = prompt_cache.save_file
    monkeypatch.setattr(prompt_cache, "save_file", lambda t, path, **kw: names.append(path.name) or own(t, path, **kw))
    for _ in range(2):
        cache = prompt_cache.PromptCache(tmp_path, "key", lambda prompts, length: {"prompt_embeds": torch.ones(1, 2)})
        cache.add("a sign", LENGTH)
    file = cache.file_of("a sign", LENGTH)
    assert len(set(names)) == 2 and all(re.fullmatch(rf"\.{file.name}\..+\.new", name) for name in names)
    assert list(file.parent.iterdir()) == [file]
