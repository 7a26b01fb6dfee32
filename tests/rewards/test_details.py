"""What a reward says beside its score, the images of a rollout, and the rewards of a field's values."""

import json

from common.data import PromptSet
from common.errors import RunError
from common.evaluation import detail_metrics, metrics_by_field, sample_records
from common.images import open_png
from common.inputs import check_field
from common.plots import save_samples
from common.scoring import Scorer, load_rewards, score_images
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
        ({"red": 3}, "the score must be a finite number or an exception, got None"),
        ({"score": "high"}, "the score must be a finite number or an exception, got 'high'"),
        ({"score": NAN}, "the score must be a finite number or an exception, got nan"),
        ({"score": 1, "red": NAN}, '"red" must be a finite number or a string, got nan'),
        ({"score": 1, "mean": 2}, '"mean" is logged of each reward; give it another name'),
        ({"score": 1, "red": None}, '"red" must be a finite number or a string, got None'),
    ],
)
def test_a_dict_without_a_score_or_with_something_else_is_refused(detail, told):
    with pytest.raises(RunError, match=rf"^reward odd: image 1 \(prompt: second\): {told}$"):
        score_images({"odd": lambda *_: [0.5, detail, ValueError("no")]}, IMAGES, PROMPTS, "mask")


@pytest.mark.fast
def test_scalars_of_numpy_and_torch_are_numbers():
    details = [{}, {}, {}]
    scored = [{"score": np.float32(0.5), "n": np.int64(3)}, {"score": torch.tensor(1), "n": torch.tensor(2.5)}, 0.25]
    scores = score_images({"odd": lambda *_: scored}, IMAGES, PROMPTS, "stop", details)
    assert scores.tolist() == [[0.5], [1], [0.25]]
    assert json.loads(json.dumps(details)) == [{"odd": {"n": 3}}, {"odd": {"n": 2.5}}, {}]


@pytest.mark.fast
@pytest.mark.parametrize("name", ["details", "advantage", "prompt"])
def test_a_reward_is_not_named_as_another_field_of_its_records(name, tmp_path):
    (tmp_path / "mine.py").write_text(f"def {name}(images, prompts, metadata):\n    return [0.0] * len(images)\n")
    with pytest.raises(ValueError, match=f"^--reward mine.py:{name}: .* records something else as {name}: rename"):
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
    with pytest.raises(
        ValueError, match="^--eval_by kind: no record of --eval_prompts has a field of that name; --eval_"
    ):
        check_field(PromptSet(["a", "b"], [{"kin": "x"}, {"kind": None}]), "kind")
    with pytest.raises(ValueError, match="^--eval_by kind: the record of the prompt 'b' has no text or number there; "):
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
    assert [row["actor/lr"] for row in rows[1:]] == pytest.approx([1e-3 * 2 / 3, 1e-3 / 3])  # 0 at step 3
