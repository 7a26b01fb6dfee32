"""The second judge of scenes, and the runs that it watches. No run starts."""

import importlib
import json
import random
from pathlib import Path

from assets.scenes import CELLS, GROUNDS, SIDE, TAGS, draw_records, draw_scene, load_sprite
from benchmarks import scenes_hacking
from benchmarks.geneval_scenes import spoil
from benchmarks.scenes_judge import KINDS, OWN, Judge, draw, is_all, look, loss_of, second_judge, to_maps
from common.rewards._geneval_rules import COLOURS, Detection
from common.run import parse_args
from common.user_code import load_function
from tests.conftest import ROOT

import pytest
import torch
from PIL import Image

pytestmark = pytest.mark.fast


def scene(*objects):
    """An image of sprites (kind, paint) in the cells of a scene."""
    image = Image.new("RGB", (SIDE, SIDE), GROUNDS[0])
    for (kind, paint), cell in zip(objects, CELLS, strict=False):
        sprite = load_sprite(kind, paint)
        image.paste(sprite, cell, sprite)
    return image


def test_true_records_are_right_and_false_ones_are_not():
    rng = random.Random(5)
    records = [record for tag in TAGS for record in draw_records(tag, 8, 5)]
    images = [draw_scene(record, rng, grid=16) for record in records]
    right = [one["score"] for one in second_judge(images, [], records)]
    false = [one["score"] for one in second_judge(images, [], [spoil(record, rng, KINDS) for record in records])]
    assert sum(right) >= 45 and sum(false) <= 2


def test_what_is_too_many_is_right_by_the_rules_and_not_exact():
    one = {"tag": "single_object", "include": [{"class": "laptop", "count": 1}], "prompt": "a photo of a laptop"}
    laptop, car = ("laptop", None), ("car", "blue")
    images = [scene(laptop), scene(laptop, laptop), scene(laptop, car), scene(car)]
    scores = second_judge(images, [], [one] * 4)
    assert [score["score"] for score in scores] == [1, 1, 1, 0]
    assert [score["exact"] for score in scores] == [1, 0, 0, 0]
    assert scores[0]["soft"] == 1 and scores[1]["soft"] == 0


def test_an_image_is_judged_alike_in_any_batch():
    rng = random.Random(6)
    images = [draw(rng)[0] for _ in range(5)]
    assert [objects for objects, _ in look(images)] == [look([image])[0][0] for image in images]


def test_own_colours_have_the_name_of_their_paint():
    painted = [{"tag": "colors", "include": [{"class": kind, "count": 1, "color": OWN[kind]}]} for kind in KINDS]
    scores = second_judge([scene((kind, None)) for kind in KINDS], [], painted)
    assert [score["exact"] for score in scores] == [1.0] * len(KINDS)


def test_a_half_seen_object_is_neither_there_nor_absent():
    shares = {0.9: "there", 0.5: "not taught", 0.2: "absent"}
    for share, told in shares.items():
        heat, taught, paints = to_maps([("car", "blue", 24.0, 24.0, share)])
        number = KINDS.index("car")
        assert (heat[number, 3, 3] == 1) == (told == "there")
        assert (taught[number, 3, 3] == 0) == (told == "not taught")
        assert paints[3, 3].item() == (COLOURS.index("blue") if told == "there" else -1)
    logits = torch.zeros(1, len(KINDS) + len(COLOURS), 16, 16, requires_grad=True)
    heat, taught, paints = to_maps([("car", "blue", 24.0, 24.0, 0.5), ("clock", "red", 88.0, 88.0, 1.0)])
    loss_of(logits, heat[None], taught[None], paints[None]).backward()
    car = logits.grad[0, KINDS.index("car")]
    assert car[3, 3] == 0 and car[12, 12] > 0  # a heat that is too high falls, where it is taught
    assert logits.grad[0, KINDS.index("clock"), 11, 11] < 0
    assert logits.grad[0, len(KINDS) + COLOURS.index("red"), 11, 11] < 0


def test_what_an_object_shows_is_what_is_not_covered():
    """Of 200 pictures: shares are in [0, 1], and some are of each kind that training tells apart."""
    rng = random.Random(0)
    shares = [one[4] for _ in range(200) for one in draw(rng)[1]]
    assert all(0 <= share <= 1 + 1e-6 for share in shares)
    assert min(sum(share >= 0.65 for share in shares), sum(share <= 0.35 for share in shares)) > 20


def test_all_asked_and_nothing_else():
    two = {"include": [{"class": "car", "count": 2}]}
    box = Detection((0, 0, 1, 1), 1.0)
    assert is_all(two, {"car": [box, box]}) and is_all(two, {"car": [box, box], "clock": []})
    assert not is_all(two, {"car": [box]}) and not is_all(two, {"car": [box, box], "clock": [box]})


def test_the_judge_is_a_reward_of_the_scripts(monkeypatch):
    monkeypatch.chdir(ROOT)
    reward = load_function(scenes_hacking.JUDGE, "--eval_reward")
    assert reward.__name__ == "second_judge" and set(reward.parts) == {"soft", "exact"}
    assert sum(each.numel() for each in Judge().parameters()) < 600_000


def test_runs_have_the_comparisons_options_with_a_kl_and_two_judges(monkeypatch):
    monkeypatch.chdir(ROOT)
    jobs = scenes_hacking.jobs()
    assert len({scenes_hacking.folder_name(job) for job in jobs}) == len(jobs) == 12
    for job in jobs:
        words = scenes_hacking.command_of(job, "x")[4:]
        script = Path(words[0]).stem
        args = parse_args(importlib.import_module(script).Args, "", words[1:])
        assert args.kl_coef == float(job["stage"].removeprefix("kl")) and args.eval_every == 5
        assert args.reward == ("geneval.soft",) and len(args.eval_reward) == 2


def test_what_is_recorded_of_a_run_is_what_its_log_has(tmp_path):
    (tmp_path / "args.json").write_text('{"git_hash": "abc"}')
    with pytest.raises(RuntimeError, match="second_judge"):
        (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1, "timing_s/step": 1.0}\n')
        scenes_hacking.measure(tmp_path)
    values = {name: number / 10 for number, name in enumerate(scenes_hacking.SCORES.values())}
    lines = [values, {"timing_s/step": 1.0}, {"timing_s/step": 1.0} | values]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured = scenes_hacking.measure(tmp_path)
    assert [one["step"] for one in measured["evaluations"]] == [0, 2]
    assert measured["git_hash"] == "abc" and measured["evaluations"][1]["exact"] == values["val/second_judge/exact"]
