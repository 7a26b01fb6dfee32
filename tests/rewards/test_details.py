"""What a reward says beside its score, the images of a rollout, and the rewards of a field's values."""

import json
import re

from common.data import PromptSet
from common.errors import RunError
from common.images import open_png
from common.metrics import detail_metrics, metrics_by_field
from common.rewards._loading import load_rewards, of_frames
from common.run.checks import check_field
from common.run.evaluation import sample_records
from common.run.plots import save_samples
from common.scoring import NOT_ASKED, Scorer, score_images
from tests.conftest import TINY, few_eval_prompts, on_ranks, read_metrics, run_here

import numpy as np
import pytest
import torch
from PIL import Image

IMAGES = [Image.new("RGB", (4, 2), (level, 0, 0)) for level in (10, 20, 30)]
PROMPTS = PromptSet(["first", "second", "third"], [{}] * 3)
NAN = float("nan")


def redness(images, prompts, metadata):
    """Dicts with a number and a string."""
    reds = [image.getpixel((0, 0))[0] for image in images]
    return [{"score": red / 10, "red": red, "said": f"{red} of red"} for red in reds]


def plain(images, prompts, metadata):
    return [0.5] * len(images)


# ---- what a reward returns -------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_scorer_keeps_what_a_reward_says_beside_each_score(whole_group, monkeypatch):
    monkeypatch.setattr(redness, "whole_group", whole_group, raising=False)
    scorer = Scorer({"redness": redness, "plain": plain}, PromptSet(["a"] * 3, [{}] * 3))
    scorer.add([2, 0], [IMAGES[2], IMAGES[0]])
    scorer.add([1], [IMAGES[1]])
    assert scorer.scores().tolist() == [[1, 0.5], [2, 0.5], [3, 0.5]]
    assert scorer.details == [{"redness": {"red": red, "said": f"{red} of red"}} for red in (10, 20, 30)]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("detail", "told"),
    [
        ({"red": 3}, "'score'.* red; NAME.KEY.*--reward "),
        ({"score": "high"}, "'high', a str"),
        ({"score": NAN}, "nan, a float"),
        ({"score": 1, "red": NAN}, '"red".*nan'),
        ({"score": 1, "mean": 2}, '"mean"'),
        ({"score": 1, "red": None}, '"red".*None'),
    ],
)
def test_a_dict_without_a_score_or_with_something_else_is_refused(detail, told):
    with pytest.raises(RunError, match=rf" odd: .* 1 \(.* second\): .*{told}"):
        score_images({"odd": lambda *_: [0.5, detail, ValueError("no")]}, IMAGES, PROMPTS, "mask")


@pytest.mark.fast
def test_scalars_of_numpy_and_torch_are_numbers():
    details = [{}, {}, {}]
    scored = [{"score": np.float32(0.5), "n": np.int64(3)}, {"score": torch.tensor(1), "n": torch.tensor(2.5)}, 0.25]
    scores = score_images({"odd": lambda *_: scored}, IMAGES, PROMPTS, "stop", details)
    assert scores.tolist() == [[0.5], [1], [0.25]]
    assert json.loads(json.dumps(details)) == [{"odd": {"n": 3}}, {"odd": {"n": 2.5}}, {}]


HEAD = """
calls = {"head": 0, "load": 0, "offload": 0}

def head(images, prompts, metadata):
    calls["head"] += 1
    reds = [image.getpixel((0, 0))[0] for image in images]
    return [{"score": red / 10, "style": red * 2, "red": red} if red < 30 else ValueError("too red") for red in reds]

head.load = lambda: calls.update(load=calls["load"] + 1)
head.offload = lambda: calls.update(offload=calls["offload"] + 1)
"""


@pytest.mark.fast
def test_two_scores_of_a_reward_come_from_one_call(tmp_path, monkeypatch):
    """The first prompt asks for both, the second for the score alone; on the third the reward fails."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads.py").write_text(HEAD)
    trained = load_rewards(["heads.py:head.style", "heads.py:head.score"], [1.0, 0.5])
    rewards = load_rewards(["heads.py:head.red"], None, option="--eval_reward", trained=trained)
    assert [*trained] == ["head.style", "head.score"] and [*rewards] == [*trained, "head.red"]
    calls = trained["head.style"].__globals__["calls"]
    prompts = PromptSet(PROMPTS.prompts, [{}, {"rewards": ["head.score"]}, {}])
    scorer = Scorer(trained, prompts, "mask")
    scorer.add([0, 1, 2], IMAGES)
    scores = scorer.scores([0, 1, 2], 1)
    assert scores[:2].tolist() == [[20, 1], [NOT_ASKED, 2]] and scores[2].isnan().all()
    assert scorer.details == [{"head.style": {"red": 10}}, {"head.score": {"red": 20}}, {}]
    assert calls == {"head": 1, "load": 1, "offload": 1}
    details = [{}, {}, {}]
    scores = score_images(rewards, IMAGES[:2], PROMPTS.select([0, 1]), "stop", details[:2])
    assert scores.tolist() == [[20, 1, 10], [40, 2, 20]] and details == [{}, {}, {}] and calls["head"] == 2
    with pytest.raises(RunError, match=r" head.hue: .* 0 \(.* first\): .*'hue'.*score, style"):
        score_images(load_rewards(["heads.py:head.hue"], [1.0]), IMAGES[:1], PROMPTS.select([0]))


@pytest.mark.fast
def test_a_built_in_reward_scores_frames_of_videos(tmp_path, monkeypatch, capfd):
    """Of seven frames the second, fourth and sixth; a user's own reward gets all of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.py").write_text("def whole(images, prompts, metadata):\n    return [len(v) for v in images]\n")
    monkeypatch.setattr("common.rewards.jpeg_compressibility.jpeg_compressibility", redness)
    of_frames.cache_clear()
    names = ["jpeg_compressibility.score", "jpeg_compressibility.red", "whole.py:whole"]
    rewards = load_rewards(names, [1.0] * 3, 7, 3)
    assert re.search(r"jpeg_compressibility\.red:.*3 of its 7", capfd.readouterr().err)
    videos = [[Image.new("RGB", (4, 2), (level + 10 * k**2, 0, 0)) for k in range(7)] for level in (0, 1)]
    details = [{}, {}]
    scores = score_images(rewards, videos, PROMPTS.select([0, 2]), "stop", details)
    reds = [(10 + 90 + 250) / 3 + level for level in (0, 1)]
    assert scores.tolist() == [[pytest.approx(red / 10), pytest.approx(red), 7] for red in reds]
    assert details[0] == {"jpeg_compressibility.score": {"said": "10 of red | 90 of red | 250 of red"}}
    failing = of_frames(lambda images, *_: [0.5, 0.25, 1, ValueError("no")], 2)
    scores = score_images({"odd": failing}, videos, PROMPTS.select([0, 2]), "mask")
    assert scores[0].tolist() == [0.375] and scores[1].isnan()
    some = of_frames(lambda images, *_: [{"score": 1, "a": 1}, {"score": 3}, {"score": 4}, {"score": 4, "a": 2}], 2)
    assert score_images({"some": some}, videos, PROMPTS.select([0, 2])).tolist() == [[2], [4]]
    for frames, told in (((7, 8), "--num_frames is 7"), ((1, 1), "--num_frames is 1")):
        with pytest.raises(ValueError, match=f"^--reward_frames {frames[1]}:.*{told}"):
            load_rewards(names[2:], [1.0], *frames)


TWO_SCORES = """
def light(images, prompts, metadata):
    lights = [sum(image.convert("L").tobytes()) / 1e6 for image in images]
    return [{"score": light, "style": 1 - light} for light in lights]
"""


def test_the_scores_of_a_reward_have_weights_of_their_own(tmp_path):
    (tmp_path / "two_scores.py").write_text(TWO_SCORES)
    options = [*TINY, "--rollout", "local", *few_eval_prompts(tmp_path), "--num_steps", 1]
    options += ["--reward", "two_scores.py:light.style", "two_scores.py:light.score", "--reward_weights", 1, 0.5]
    assert run_here(tmp_path, "flow_grpo.py", *options, "--best_by", "val/light.style/mean") is None
    before, after = read_metrics(next((tmp_path / "runs").iterdir()))
    totals = (before, "val", "val/weighted_total/mean"), (after, "critic/rewards", "critic/rewards/mean")
    for row, prefix, total in totals:
        style, score = (row[f"{prefix}/light.{key}/mean"] for key in ("style", "score"))
        assert style + score == pytest.approx(1) and row[total] == pytest.approx(style + score / 2)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["details", "advantage", "prompt"])
def test_a_reward_is_not_named_as_another_field_of_its_records(name, tmp_path):
    (tmp_path / "mine.py").write_text(f"def {name}(images, prompts, metadata):\n    return [0.0] * len(images)\n")
    with pytest.raises(ValueError, match=f"^--reward mine.py:{name}: .*{name}:"):
        load_rewards([f"mine.py:{name}"], [1.0])


@pytest.mark.fast
def test_a_failed_image_and_a_plain_score_have_no_details():
    details = [{}, {}, {}]
    mixed = [{"score": 1, "read": "a"}, ValueError("no"), 0.25]
    scores = score_images({"mixed": lambda *_: mixed}, IMAGES, PROMPTS, "mask", details)
    assert scores[[0, 2], 0].tolist() == [1, 0.25] and scores[1].isnan()
    assert details == [{"mixed": {"read": "a"}}, {}, {}]


@pytest.mark.fast
def test_means_of_the_numbers_are_over_all_ranks_images(monkeypatch):
    """Rank 0 has two images, and rank 1 one; strings are no numbers."""
    of_ranks = [[{"a": {"red": 1, "said": "x"}}, {"a": {"red": 2.0}, "b": {"n": 5}}], [{"a": {"red": 6}}, {}]]
    found, _ = on_ranks(monkeypatch, 2, lambda rank: detail_metrics(of_ranks[rank], "reward"))
    assert found == [{"reward/a/red": 3.0, "reward/b/n": 5.0}] * 2


@pytest.mark.fast
def test_details_stand_in_the_records_and_below_the_images(one_rank, tmp_path):
    details = [{"a": {"read": "4711"}}, {}, {"a": {"read": "25"}, "b": {"sure": 0.5, "answer": "yes"}}]
    scores = torch.tensor([[0.5, 1], [0.25, 2], [1, 3]], dtype=torch.float64)
    records = sample_records(PROMPTS, [7, 8, 9], scores, ["a", "b"], details)
    assert records[0] == {"prompt": "first", "seed": 7, "a": 0.5, "b": 1, "details": {"a": {"read": "4711"}}}
    assert "details" not in records[1]
    grid = save_samples(tmp_path, [0, 1, 2], IMAGES, records)
    assert [caption for _, caption in grid] == [
        "first\na 0.50  b 1.00\nread 4711",
        "second\na 0.25  b 2.00",
        "third\na 1.00  b 3.00\nread 25\nsure 0.50  answer yes",
    ]


# ---- --eval_by -------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_rewards_of_a_fields_values_by_hand(monkeypatch):
    """Four prompts of two images over two ranks, dealt one by one; the second image of the last prompt failed."""
    field = ["signs", "signs", None, None]
    scores = torch.tensor([[1, 10], [3, 30], [5, 50], [7, 70], [2, 0], [4, 0], [8, 0], [NAN, 0]], dtype=torch.float64)

    def of_rank(rank):
        places = [place for place in range(8) if place % 2 == rank]
        prompts = PromptSet(["p"] * 4, [{"kind": field[place // 2]} if place < 6 else {} for place in places])
        scorer = Scorer({"a": plain, "watches": plain}, prompts)
        return metrics_by_field("kind", scorer, scores[places], (0.5,), places, images_per_prompt=2)

    (metrics, others), _ = on_ranks(monkeypatch, 2, of_rank)
    assert metrics == others
    assert {name: value.item() for name, value in metrics.items()} == {
        "val/signs/a/mean@2": 4,  # (1 + 3) / 2 and (5 + 7) / 2
        "val/signs/a/best@2": 5,  # 3 and 7
        "val/signs/watches/mean@2": 40,
        "val/signs/watches/best@2": 50,
        "val/signs/weighted_total/mean@2": 2,
        "val/signs/weighted_total/best@2": 2.5,
        "val/unknown/a/mean@2": 5.5,  # (2 + 4) / 2 and 8
        "val/unknown/a/best@2": 6,
        "val/unknown/watches/mean@2": 0,
        "val/unknown/watches/best@2": 0,
        "val/unknown/weighted_total/mean@2": 2.75,
        "val/unknown/weighted_total/best@2": 3,
    }


@pytest.mark.fast
def test_a_field_that_no_record_has_is_named_before_anything_loads():
    for record in ({}, {"kind": None}, {"kind": 3}):
        check_field(PromptSet(["a", "b"], [{"kind": "x"}, record]), "kind")
    with pytest.raises(ValueError, match="^--eval_by kind:.*--eval_prompts.*--eval_"):
        check_field(PromptSet(["a", "b"], [{"kin": "x"}, {"kind": None}]), "kind")
    with pytest.raises(ValueError, match="^--eval_by kind:.*'b'"):
        check_field(PromptSet(["a", "b"], [{"kind": "x"}, {"kind": ["x"]}]), "kind")


# ---- in a run --------------------------------------------------------------------------------------------------------
def test_a_run_writes_its_rollouts_and_what_the_reward_read(tmp_path):
    few_eval_prompts(tmp_path, 2)
    prompts = [{"prompt": f'a red sign that says "{text}"', "kind": kind} for text, kind in (("11", "a"), ("25", "b"))]
    (tmp_path / "kinds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))
    options = ["--rollout", "local", "--num_steps", 2, "--save_rollouts", 2, *TINY, "--lr_schedule", "linear"]
    options += ["--eval_prompts", "kinds.jsonl", "--eval_by", "kind"]
    assert run_here(tmp_path, "flow_grpo.py", *options) is None
    run = tmp_path / "runs" / "flow_grpo"
    assert [path.name for path in (run / "rollouts").iterdir()] == ["0002"]
    folder = run / "rollouts" / "0002"
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [record["file"] for record in records] == [f"{place:05d}.png" for place in range(16)]
    assert len({record["prompt"] for record in records[:4]}) == 1 and len({record["seed"] for record in records}) == 16
    rows = read_metrics(run)
    mean = sum(record["ocr"] for record in records) / 16
    assert rows[2]["critic/rewards/ocr/mean"] == pytest.approx(mean, abs=1e-12)
    first = {"step": 2, "group": 0, "prompt_file": "train_prompts", "metadata": {}}
    assert first.items() <= records[3].items() and first | {"group": 3} == {name: records[12][name] for name in first}
    evaluated = [json.loads(line) for line in (run / "samples/0002/samples.jsonl").read_text().splitlines()]
    origin = {"step": 2, "group": 1, "prompt_file": "kinds", "metadata": {"kind": "b"}}
    assert origin.items() <= evaluated[1].items()
    assert max(record["advantage"] for record in records) == pytest.approx(rows[2]["critic/advantages/max"])
    assert all(isinstance(record["details"]["ocr"]["read"], str) for record in records)
    assert open_png(folder / "00015.png").size == (96, 32) and (folder / "grid.png").is_file()
    by_kind = [rows[2][f"val/{kind}/ocr/mean@1"] for kind in "ab"]
    assert sum(by_kind) / 2 == pytest.approx(rows[2]["val/ocr/mean"], abs=1e-12)
    assert [row["actor/lr"] for row in rows[1:]] == pytest.approx([1.5e-3 * 2 / 3, 1.5e-3 / 3])  # 0 at step 3
