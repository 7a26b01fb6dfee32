"""The task of scenes: what is held out, how prompts become tokens, and benchmarks/from_nothing.py's order."""

import json
from collections import Counter

from assets.make_embedded import MAX_TOKENS, make_clip_tokenizer, make_t5_tokenizer
from assets.make_embedded_scenes import Args, words, write_scenes, write_task
from assets.scenes import TAGS, is_held_out, kinds
from benchmarks import from_nothing
from common.rewards._geneval_rules import check_metadata
from tests.conftest import ROOT

import pytest

pytestmark = pytest.mark.fast


def read_task(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "assets" / f"scenes_{name}.jsonl").read_text().splitlines()]


def asked_of(record: dict) -> set:
    """The pairs of kinds, kinds in a colour and kinds in a number that a record asks for."""
    clauses = record["include"]
    asked = {(clause["class"], clause["color"]) for clause in clauses if "color" in clause}
    asked |= {(clause["class"], clause["count"]) for clause in clauses if clause["count"] > 1}
    if len(clauses) == 2:
        asked.add(frozenset(clause["class"] for clause in clauses))
    return asked


# ---- records ---------------------------------------------------------------------------------------------------------
def test_the_records_are_of_all_parts_alike_and_in_turn() -> None:
    for name, of_a_part in (("train", 256), ("eval", 64)):
        records = read_task(name)
        assert Counter(record["tag"] for record in records) == dict.fromkeys(TAGS, of_a_part)
        assert [record["tag"] for record in records[:6]] == list(TAGS)
        for record in records:
            check_metadata(record)


def test_each_held_out_record_asks_for_something_that_no_other_asks_for() -> None:
    trained = set().union(*map(asked_of, read_task("train")))
    held_out = [record for record in read_task("eval") if record["tag"] != "single_object"]
    assert all(asked_of(record) - trained for record in held_out)
    assert not any(is_held_out(record) for record in read_task("train"))
    of_a_kind = Counter(clause["class"] for record in held_out for clause in record["include"])
    assert of_a_kind.keys() == set(kinds()) and max(of_a_kind.values()) < 3 * min(of_a_kind.values())


def test_the_files_are_what_the_program_writes(tmp_path) -> None:
    write_task(Args(out=tmp_path / "embedded_scenes"))
    for name in ("train", "eval"):
        file = f"scenes_{name}.jsonl"
        assert (tmp_path / file).read_bytes() == (ROOT / "assets" / file).read_bytes()


# ---- prompts and pictures --------------------------------------------------------------------------------------------
def test_every_word_is_a_token() -> None:
    clip, t5 = make_clip_tokenizer(words()), make_t5_tokenizer(words())
    for tokenizer, around in ((clip, 2), (t5, 1)):
        assert [word for word in words() if len(tokenizer(word).input_ids) != 1 + around] == []
        prompts = [record["prompt"] for name in ("train", "eval") for record in read_task(name)]
        assert max(len(tokenizer(prompt).input_ids) for prompt in prompts) <= MAX_TOKENS
        assert tokenizer.unk_token_id not in {token for p in prompts for token in tokenizer(p).input_ids[:-1]}


def test_scenes_are_drawn_alike_in_any_order(tmp_path) -> None:
    write_scenes(tmp_path / "three", 3, seed=5)
    write_scenes(tmp_path / "two", 2, seed=5)
    lines = (tmp_path / "three" / "records.jsonl").read_text().splitlines()
    assert (tmp_path / "two" / "records.jsonl").read_text().splitlines() == lines[:2]
    image = json.loads(lines[1])["image"]
    assert (tmp_path / "three" / image).read_bytes() == (tmp_path / "two" / image).read_bytes()


# ---- from nothing ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("part", "lacks"), [("sft", "scenes/records.jsonl"), ("rl", "base"), ("bench", "rl/adapter")])
def test_a_part_says_what_it_lacks(part, lacks, tmp_path) -> None:
    with pytest.raises(SystemExit, match=f"^{part}: .*{lacks}.*{tmp_path.name}"):
        from_nothing.main(from_nothing.Args(tmp_path, parts=(part,)))


def test_without_the_embedded_model_nothing_is_drawn(tmp_path) -> None:
    with pytest.raises(SystemExit, match="no_model.*make_embedded_scenes"):
        from_nothing.main(from_nothing.Args(tmp_path / "out", tmp_path / "no_model", "tiny", parts=("draw",)))
    assert not (tmp_path / "out" / "random").exists()


def test_a_part_that_has_left_its_result_is_not_done_again(tmp_path, monkeypatch) -> None:
    done = []
    functions = {part: lambda *_, part=part: done.append(part) for part in from_nothing.PARTS}
    monkeypatch.setattr(from_nothing, "FUNCTIONS", functions)
    for folder in ("scenes", "base", "rl/adapter", "bench"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("scenes/records.jsonl", "bench/table.md"):
        (tmp_path / file).touch()
    from_nothing.main(from_nothing.Args(tmp_path))
    assert done == ["bench", "report"]  # which are short, and never done by halves
    seconds = json.loads((tmp_path / "seconds.json").read_text())
    assert list(seconds) == done
