"""Images on which a reward failed, --reward_failure: fills, metrics and pairs by hand, updates, and whole runs."""

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import diffusion_nft
import flow_grpo
import grpo_guard
import mix_grpo
from common.data import PromptSet
from common.errors import RunError
from common.metrics import count_failed, eval_metrics, reward_metrics
from common.pairs.made_pairs import best_and_worst
from common.rewards._loading import load_rewards
from common.run.ending import friendly_errors
from common.run.evaluation import sample_records
from common.run.plots import save_samples
from common.scoring import Scorer, fill_failed, score_images
from tests.conftest import (
    SMALL,
    TINY,
    assert_one_line,
    few_eval_prompts,
    policy_without_fsdp,
    prompt_set,
    read_metrics,
    run_here,
    torchrun,
    without_times,
)

import numpy as np
import pytest
import torch
from PIL import Image

NAN = math.nan
fast = pytest.mark.fast


def tensor(*values: float | list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


# ---- what a reward returns -------------------------------------------------------------------------------------------
IMAGES = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (10, 20, 30)]
PROMPTS = PromptSet(["first", "second", "third"], [{}, {}, {}])


def reward(*scores):
    return lambda images, prompts, metadata: [scores[image.getpixel((0, 0))[0] // 10 - 1] for image in images]


MIDDLE_FAILS = reward(0.25, ValueError("no number in the answer"), 0.75)


@fast
def test_a_failure_of_one_image_ends_the_run_with_its_reason_or_is_marked(capfd):
    rewards = {"whole": reward(1, 2, 3), "judge": MIDDLE_FAILS}
    for options in ((), ("stop",)):
        with pytest.raises(RunError) as error:
            score_images(rewards, IMAGES, PROMPTS, *options)
        assert re.search(r"judge .* 1 \(.* second\): no number in the answer; --reward_failure mask", str(error.value))
        assert isinstance(error.value.__cause__, ValueError)
    assert capfd.readouterr().err == ""
    assert_close(score_images(rewards, IMAGES, PROMPTS, "mask"), tensor([1, 0.25], [2, NAN], [3, 0.75]))
    told = r".*judge .* 1 of 3 .* 1 \(.* second\): no number in the answer\n"
    assert re.fullmatch(told, capfd.readouterr().err)


@fast
@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (
            (np.array([1.0, 2, 3]), {}),
            "2 .*3 .*tuple of ndarray and dict; .*`scores, _ =`",
        ),
        ([1.0], "1 .*3 .*list of float; "),
        ({"avg": [1.0, 2, 3]}, "dict .*3 "),
        ([1.0, "0.5", None], r"1 \(.* second\): .* '0.5', a str"),
        (np.array(["a", "b", "c"]), r"0 \(.* first\): .* 'a', a str"),
        ([1.0, None, 2.0], r"1 \(.* second\): .* None, a NoneType"),
        (torch.zeros(3, 2), r"0 \(.* first\): .* \[0.0, 0.0\], a list"),
    ],
)
def test_a_return_of_another_form_is_told_by_its_count_and_then_by_its_first_entry(returned, told):
    with pytest.raises(RunError, match=f" odd: .*{told}"):
        score_images({"odd": lambda *_: returned}, IMAGES, PROMPTS, "mask")


@fast
def test_a_key_of_a_reward_that_returns_plain_numbers_is_told():
    with pytest.raises(RunError, match=r" mine.style: .* 0 \(.* first\): .* 0.5, no dict with 'style'"):
        score_images({"mine.style": reward(0.5, 1, 2)}, IMAGES, PROMPTS)


class Unspeakable(Exception):
    def __str__(self):
        raise AttributeError("no text")


@fast
def test_an_exception_without_a_text_is_told_by_its_type(capfd):
    """Raised by a reward, or given in a score's place."""

    def raises(images, prompts, metadata):
        raise Unspeakable

    with pytest.raises(RunError, match="^reward r raised Unspeakable: "):
        score_images({"r": raises}, IMAGES, PROMPTS)
    with pytest.raises(RunError, match=r"^reward r .* 1 \(.* second\): Unspeakable; "):
        score_images({"r": reward(1, Unspeakable(), 3)}, IMAGES, PROMPTS)
    assert_close(score_images({"r": reward(1, Unspeakable(), 3)}, IMAGES, PROMPTS, "mask"), tensor([1], [NAN], [3]))


@fast
@pytest.mark.parametrize("decorator", ["", "@torch.no_grad()"])
def test_a_reward_that_takes_other_arguments_is_told_at_its_own_line(decorator, tmp_path):
    (tmp_path / "two.py").write_text(f"import torch\n\n{decorator}\ndef two(images, prompts):\n    return []\n")
    (function,) = load_rewards([f"{tmp_path}/two.py:two"], [1.0]).values()
    with pytest.raises(RunError, match=rf" raised TypeError: two\(\) .* \({tmp_path}/two.py:[34]\)$"):
        score_images({"two": function}, IMAGES, PROMPTS)


@fast
@pytest.mark.parametrize("value", [NAN, math.inf, 10**400, None, "0.5", ValueError, KeyboardInterrupt()])
def test_nothing_but_an_exception_marks_a_failure(value):
    """A NaN of a reward's own ends the run, and so does None, which no reward may mean."""
    with pytest.raises(RunError, match=" odd: .* 1 "):
        score_images({"odd": lambda *_: [0.25, value, 0.75]}, IMAGES, PROMPTS, "mask")
    with pytest.raises(RunError, match=" odd: .* 1 .* nan"):
        score_images({"odd": lambda *_: torch.tensor([0.25, NAN, 0.75])}, IMAGES, PROMPTS, "mask")
    with pytest.raises(RunError, match=" odd: .* 0 .* inf"):
        score_images({"odd": lambda *_: [math.inf, ValueError("x"), 0.75]}, IMAGES, PROMPTS, "mask")
    with pytest.raises(RunError, match=" odd: .* 2 .* 3 "):
        score_images({"odd": lambda *_: [ValueError("x"), 0.75]}, IMAGES, PROMPTS, "mask")


@fast
def test_a_scorer_marks_failures_and_never_an_image_that_it_was_not_given():
    def whole(images, prompts, metadata):
        return [ValueError("of all"), 5.0, 6.0]

    whole.whole_group = True
    rewards = {"judge": MIDDLE_FAILS, "whole": whole}
    scorer = Scorer(rewards, PROMPTS.select([0, 0, 0]), "mask")
    scorer.add([2, 0], [IMAGES[2], IMAGES[0]])
    scorer.add([1], [IMAGES[1]])
    assert_close(scorer.scores(), tensor([0.25, NAN], [NAN, 5], [0.75, 6]))
    for rewards in ({"judge": reward(1, 2, 3)}, {"whole": whole}):
        scorer = Scorer(rewards, PROMPTS, "mask")
        scorer.add([2, 0], [IMAGES[2], IMAGES[0]])
        with pytest.raises(RunError, match="1 of 3"):
            scorer.scores()
    scorer = Scorer({"judge": MIDDLE_FAILS}, PROMPTS)
    scorer.add(range(3), IMAGES)
    with pytest.raises(RunError, match=" judge .* 1 "):
        scorer.scores()


class Unraisable(BaseException):
    """Of a kind that nobody expects."""


@fast
@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, Unraisable, MemoryError])
def test_whatever_a_reward_raises_ends_the_run_and_marks_no_image(error):
    def judged(images, prompts, metadata):
        raise error("of the judge")

    scorer = Scorer({"judged": judged}, PROMPTS, "mask")
    scorer.add(range(3), IMAGES)
    with pytest.raises(RunError, match=f" judged .*{error.__name__}: of the judge"):
        scorer.scores()


@fast
def test_a_thread_that_cannot_begin_ends_the_run(monkeypatch):
    def no_gpu():
        raise RuntimeError("no GPU")

    monkeypatch.setattr("common.scoring.use_own_gpu", no_gpu)
    scorer = Scorer({"judge": reward(1, 2, 3)}, PROMPTS, "mask")
    scorer.add(range(3), IMAGES)
    with pytest.raises(RuntimeError, match="no GPU"):
        scorer.scores()


# ---- a rollout's scores and advantages -------------------------------------------------------------------------------
# four groups of three: all whole; the second reward failed on one image; one whole image; none
SCORES = tensor(
    *([0, 1], [3, 1], [6, 1]),
    *([1, 2], [9, NAN], [3, 2]),
    *([NAN, 5], [7, 7], [NAN, NAN]),
    *([NAN, 0], [0, NAN], [NAN, NAN]),
)
COMPARED = [0, 1, 2, 3, 5]
# the second group's mean is (2, 2), without the 9; the last group gets the mean of all six whole images
FILLED = tensor(
    *([0, 1], [3, 1], [6, 1]),
    *([1, 2], [2, 2], [3, 2]),
    *([7, 7], [7, 7], [7, 7]),
    *[[20 / 6, 14 / 6]] * 3,
)


def grpo_options(**changes: Any) -> Any:
    """The options that flow_grpo's combine_advantages reads."""
    usual = {"group_size": 3, "reward_weights": (1.0, 1.0), "scale_rewards": "batch"}
    return SimpleNamespace(**usual | {"multi_objective_aggregation": "sum_then_normalize"} | changes)


def advantages_of(args: Any, scores: torch.Tensor) -> torch.Tensor:
    """Advantages as the scripts compute them."""
    names = ["a", "b", "c"][: scores.shape[1]]
    filled, is_compared = fill_failed(scores, names, args.group_size)
    return flow_grpo.combine_advantages(args, filled, 5.0).where(is_compared, 0.0)


@fast
def test_failed_images_get_the_mean_of_their_groups_whole_images():
    given = SCORES.clone()
    filled, is_compared = fill_failed(given, ["a", "b"], 3)
    assert_close(filled, FILLED)
    assert torch.equal(filled[COMPARED], SCORES[COMPARED])
    assert is_compared.nonzero().flatten().tolist() == COMPARED
    assert_close(given, SCORES)  # the metrics are computed from these, and need the NaN


@fast
@pytest.mark.parametrize("num_rewards", [1, 2, 3])
def test_scores_without_a_failure_stay_as_they_are(num_rewards):
    scores = torch.rand(12, num_rewards, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    filled, is_compared = fill_failed(scores, "abc"[:num_rewards], 3)
    assert torch.equal(filled, scores) and is_compared.all()
    weights = torch.linspace(1, 2, num_rewards, dtype=torch.float64)
    args = grpo_options(reward_weights=tuple(weights.tolist()))
    # a product of matrices may add up in another order
    assert_close(advantages_of(args, scores), flow_grpo.compute_advantages(scores @ weights, 3))


@fast
def test_a_rollout_without_two_whole_images_of_a_prompt_ends_the_run():
    told = " a .* 4 of 6.* b .* 3 of 6"
    with pytest.raises(RunError, match=told):
        fill_failed(SCORES[6:], ["a", "b"], 3)
    with pytest.raises(RunError, match=" a .* 3 of 3.* b .* 0 of 3"):
        fill_failed(tensor([NAN, 1], [NAN, 2], [NAN, 3]), ["a", "b"], 3)
    _, is_compared = fill_failed(SCORES[3:], ["a", "b"], 3)
    assert is_compared.nonzero().flatten().tolist() == [0, 2]


@fast
@pytest.mark.parametrize("scale_rewards", ["batch", "group", "none"])
def test_advantages_by_hand(scale_rewards):
    """Totals 1, 4, 7 | 3, 4, 5 | 14 | 17 / 3: two groups differ, around 4 both, and all twelve totals make S."""
    of_batch = math.sqrt((66 + 50 + 588 + 289 / 3) / 12 - (83 / 12) ** 2)
    divisors = {
        "batch": tensor(of_batch) + 1e-4,
        "group": tensor(*[math.sqrt(6)] * 3, *[math.sqrt(2 / 3)] * 9) + 1e-4,
        "none": tensor(1),
    }
    centred = tensor(-3, 0, 3, -1, 0, 1, 0, 0, 0, 0, 0, 0)
    advantages = advantages_of(grpo_options(scale_rewards=scale_rewards), SCORES)
    assert_close(advantages, centred / divisors[scale_rewards])
    others = [row for row in range(12) if row not in COMPARED]
    assert advantages[others].tolist() == [0.0] * 7  # exactly, whatever the fill's round-off


@fast
def test_a_failed_image_is_filled_in_every_rewards_own_advantage():
    """Reward b, whose groups are all equal, adds nothing: a's advantages, divided by their own deviation."""
    args = grpo_options(reward_weights=(1.0, 10.0), multi_objective_aggregation="normalize_then_sum")
    centred = tensor(-3, 0, 3, -1, 0, 1, 0, 0, 0, 0, 0, 0)
    a = FILLED[:, 0]  # 0, 3, 6 | 1, 2, 3 | 7 | 20 / 6
    own = centred / ((a.square().mean() - a.mean() ** 2).sqrt() + 1e-4)
    assert_close(advantages_of(args, SCORES), own / ((own.square().sum() / 12).sqrt() + 1e-4))


@fast
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, -123.456])
@pytest.mark.parametrize("num_rewards", [1, 3])
@pytest.mark.parametrize("num_failed", [0, 1, 2, 6, 7, 8])
def test_equal_groups_have_advantages_of_exactly_0(value, num_rewards, num_failed):
    """A mean such as 0.1 + 0.1 + 0.1 over 3 differs from 0.1; AdamW would make whole steps of such round-off."""
    scores = value * torch.linspace(1, 2, num_rewards, dtype=torch.float64).expand(16, num_rewards)
    scores = scores.clone()
    scores[8 : 8 + num_failed, -1] = NAN  # of the second group
    filled, is_compared = fill_failed(scores, "abc"[:num_rewards], 8)
    assert torch.equal(filled, scores[:1].expand(16, -1))
    assert is_compared.sum() == {0: 16, 1: 15, 2: 14, 6: 10, 7: 8, 8: 8}[num_failed]
    for scale_rewards in ("batch", "group", "none"):
        for aggregation in ("sum_then_normalize", "normalize_then_sum"):
            args = grpo_options(
                group_size=8, reward_weights=(0.3, 1.7, -0.9)[:num_rewards], scale_rewards=scale_rewards
            )
            args.multi_objective_aggregation = aggregation
            assert advantages_of(args, scores).tolist() == [0.0] * 16
            assert flow_grpo.combine_advantages(args, filled, 5.0).tolist() == [0.0] * 16


@fast
def test_metrics_are_of_the_images_that_are_compared():
    advantages = advantages_of(grpo_options(scale_rewards="none"), SCORES)
    metrics = reward_metrics(SCORES, advantages, dict.fromkeys("ab"), (1, 1), 3)
    expected = {
        "critic/rewards/mean": 20 / 5,
        "critic/rewards/max": 7,
        "critic/rewards/min": 1,
        "critic/rewards/std_mean": (math.sqrt(6) + 1) / 2,
        "critic/rewards/zero_std_ratio": 0,
        "critic/rewards/group_size": 3,
        "critic/rewards/skipped_groups": 2,
        "critic/rewards/a/failed": 4,
        "critic/rewards/a/mean": 13 / 5,
        "critic/rewards/b/failed": 4,
        "critic/rewards/b/mean": 7 / 5,
        "critic/advantages/mean": 0,
        "critic/advantages/max": 3,
        "critic/advantages/min": -3,
    }
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected, abs=1e-12)


@fast
@pytest.mark.parametrize(
    ("cause", "rank_1_tells"),
    [(None, False), (FileNotFoundError("no such file"), False), (RuntimeError("out of memory"), True)],
)
def test_what_a_reward_raises_as_it_loads_is_told_by_the_rank_it_happens_on(cause, rank_1_tells, monkeypatch):
    """Missing files and settings are missed by all ranks, and told once."""
    for rank, tells in (("0", True), ("1", rank_1_tells)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended, friendly_errors():
            raise ValueError("--reward clip_score: it did not load") from cause
        assert str(ended.value).endswith("error: --reward clip_score: it did not load") == tells


# ---- an evaluation ---------------------------------------------------------------------------------------------------
@fast
def test_an_evaluation_leaves_images_and_prompts_out(monkeypatch):
    """Three prompts of two images on two ranks; of the second prompt one image is left, of the third none."""
    scores = tensor([1, 0], [2, 4], [6, 1], [5, NAN], [NAN, 1], [NAN, NAN])
    monkeypatch.setattr("common.metrics.gather", lambda places: torch.tensor([[0, 2, 4], [1, 3, 5]]))
    monkeypatch.setattr("common.data.gather", lambda of_rank_0: torch.stack([scores[0::2], scores[1::2]]))
    metrics = eval_metrics(scores[0::2], ["a", "b"], (1, 2), [0, 2, 4], images_per_prompt=2)
    # by prompt a 1.5 and 6, b 2 and 1, a + 2 b 5.5 and 8
    expected = {
        "val/a/failed": 2,
        "val/b/failed": 2,
        "val/a/mean": 3.75,
        "val/a/stderr": 2.25 / math.sqrt(2),
        "val/b/mean": 1.5,
        "val/b/stderr": 0.5 / math.sqrt(2),
        "val/weighted_total/mean": 6.75,
        "val/weighted_total/stderr": 1.25 / math.sqrt(2),
    }
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected, abs=1e-12)
    told = " a .* 2 of 3.* b .* 2 of 3"
    with pytest.raises(RunError, match=told):
        count_failed(scores[3:], ["a", "b"], 2)


@fast
def test_a_reward_that_only_watches_leaves_no_image_out_of_the_others(one_rank):
    """Two trained rewards, one watching, on three prompts of an image; the second prompt is without its first score."""
    scores = tensor([1, 0, NAN], [NAN, 4, 5], [3, 2, 7])
    metrics = eval_metrics(scores, ["a", "b", "watches"], (1, 2), [0, 1, 2], images_per_prompt=1)
    means = {"a": 2, "b": 1, "watches": 6, "weighted_total": 4}
    assert {name: metrics[f"val/{name}/mean"].item() for name in means} == means
    assert [metrics[f"val/{name}/failed"].item() for name in ("a", "b", "watches")] == [1, 0, 1]
    with pytest.raises(RunError, match=" watches .* 3 of 3"):
        count_failed(scores.index_fill(1, torch.tensor([2]), NAN), ["a", "b", "watches"], 2)


@fast
def test_a_failure_is_written_as_one(one_rank, tmp_path):
    records = sample_records(PROMPTS, [7, 8, 9], tensor([0.5, 1], [NAN, 2], [0.25, 3]), ["a", "b"])
    assert records[1] == {"prompt": "second", "seed": 8, "a": None, "b": 2.0}
    for name in ("00003.png", "2024.png", "cover.png"):  # of a start that made more images; the user's own
        (tmp_path / name).touch()
    grid = save_samples(tmp_path, [0, 1, 2], IMAGES, records)
    assert sorted(file.stem for file in tmp_path.glob("*.png")) == ["00000", "00001", "00002", "2024", "cover"]
    assert [caption for _, caption in grid] == [
        "first\na 0.50  b 1.00",
        "second\na failed  b 2.00",
        "third\na 0.25  b 3.00",
    ]
    assert '"a": null, "b": 2.0' in (tmp_path / "samples.jsonl").read_text().splitlines()[1]


# ---- pairs -----------------------------------------------------------------------------------------------------------
@fast
@pytest.mark.parametrize(
    ("totals", "places"),
    [
        ((3, 1, 2), (0, 1)),
        ((NAN, 1, 2), (2, 1)),
        ((3, NAN, 3), None),
        ((NAN, 1, NAN), None),
        ((NAN, NAN, NAN), None),
        ((1 / 3, NAN, 1 / 3 + 1e-8), None),  # round-off
        ((1e9, NAN, 1e9 + 2e3), (2, 0)),
    ],
)
def test_a_failure_makes_no_pair(totals, places):
    assert best_and_worst(tensor(*totals)) == places


# ---- updates ---------------------------------------------------------------------------------------------------------
WORDS = ['a red sign that says "12"', 'a blue sign that says "345"']
KEPT = torch.tensor([0, 2])  # of four images; the others were filled
EVERY = torch.arange(4)
ADVANTAGES = torch.tensor([1.0, 0.0, 0.5, 0.0])


@fast
@pytest.mark.parametrize("script", [flow_grpo, grpo_guard, mix_grpo])
def test_an_advantage_of_0_adds_nothing_to_a_loss(script):
    """The sum over samples stays as it is, and the filled image still counts in the mean: 2 / 3 of the loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    old_mean = torch.randn(3, 4, generator=generator, dtype=torch.float64)

    def loss_of(advantages: list[float], moved_by: list[float]) -> float:
        """The loss of samples whose means (grpo_guard) or log-probs have moved since the rollout."""
        count = len(moved_by)
        moved = tensor(*moved_by)
        if script is grpo_guard:
            new_mean = old_mean[:count] + moved[:, None]
            std = torch.full((count,), 0.5).double()
            means = (x[:count], new_mean, old_mean[:count], std)
            return script.policy_loss(*means, tensor(*advantages), dt=-0.1, clip_range=1e-3)[0].item()
        return script.policy_loss(moved, torch.zeros(count), tensor(*advantages), 1e-3)[0].item()

    kept = loss_of([1.5, -0.5], [0.01, 0.2])
    assert abs(kept) > 0.1
    for moved in (0.0, -0.3, 5.0):
        assert loss_of([1.5, -0.5, 0.0], [0.01, 0.2, moved]) == pytest.approx(kept * 2 / 3, rel=1e-12)


class Sums(NamedTuple):
    """A mini-batch's gradient by parameter and its loss, both times the number of images: sums, and no means."""

    gradients: dict[str, torch.Tensor]
    loss: float


def sums_of(model: Any, num_images: int, accumulate: Callable[[], list[dict]]) -> Sums:
    """What `accumulate` adds up on an unsharded model."""
    model.transformer.set_requires_gradient_sync = lambda is_last_pass: None  # FSDP's
    model.transformer.zero_grad()
    passes = accumulate()
    trained = {name: num_images * p.grad for name, p in model.transformer.named_parameters() if p.requires_grad}
    assert any(gradient.abs().max() > 1e-4 for gradient in trained.values())
    return Sums(trained, num_images * torch.stack([metrics["actor/loss"] for metrics in passes]).mean().item())


def assert_same_sums(first: Sums, second: Sums) -> None:
    assert first.loss == pytest.approx(second.loss, abs=4e-6)
    for name, gradient in first.gradients.items():
        torch.testing.assert_close(gradient, second.gradients[name], rtol=1e-4, atol=4e-6, msg=name)


@pytest.mark.parametrize("script", [flow_grpo, grpo_guard, mix_grpo])
def test_a_filled_image_changes_no_gradient(script):
    """Whatever the image is, and in micro-batches of one image as of four."""
    model, _, _ = policy_without_fsdp()
    args = script.Args(rollout="local", num_inference_steps=4, micro_batch_size=4)
    drawn = prompt_set(WORDS)
    prompt_index = torch.tensor([0, 0, 1, 1])
    request = script.make_request(args, model, drawn, prompt_index, [1, 2, 3, 4], sde_steps=(1, 2))
    sampled = script.rollout(args, model, None, request)
    others = sampled.latents.clone()
    others[[1, 3]] = others[[3, 1]]
    ones = torch.ones_like(sampled.log_probs)

    def sums(rows: torch.Tensor, micro_batch_size: int, latents: torch.Tensor) -> Sums:
        args.micro_batch_size = micro_batch_size
        trajectories = replace(sampled, latents=latents).select(rows)
        old = script.OldPolicy(sampled.log_probs[rows], sampled.prev_sample_means[rows], ones[rows])
        batch = script.Batch(request.select(rows), trajectories, old, ADVANTAGES[rows])
        everything = torch.arange(len(rows))
        return sums_of(model, len(rows), lambda: script.accumulate_gradients(args, model, batch, everything, None))

    kept = sums(KEPT, 2, sampled.latents)
    for micro_batch_size in (4, 1):
        assert_same_sums(sums(EVERY, micro_batch_size, sampled.latents), kept)
    # with other latents in the filled images' place, their ratios are not 1
    assert_same_sums(sums(EVERY, 4, others), kept)


def test_a_filled_image_changes_no_gradient_of_diffusion_nft():
    """Its weight of 0 takes it out of both terms of the loss."""
    model, _, _ = policy_without_fsdp()
    args = diffusion_nft.Args(rollout="local", num_inference_steps=4, kl_coef=0.3, micro_batch_size=4)
    drawn = prompt_set(WORDS)
    request = diffusion_nft.make_request(args, model, drawn, torch.tensor([0, 0, 1, 1]), [1, 2, 3, 4])
    x0 = diffusion_nft.rollout(args, model, None, request).latents[:, -1]
    r = diffusion_nft.optimality(ADVANTAGES, "continuous", 5.0)
    assert r.tolist() == pytest.approx([0.6, 0.5, 0.55, 0.5])
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0])
    whole = diffusion_nft.Batch(request, x0, r, weights, EVERY)
    timesteps, noise = diffusion_nft.draw_training_noise(args, whole, 1, 0)
    v_old = torch.randn(noise.shape, generator=torch.Generator().manual_seed(0))
    v_ref = torch.randn(noise.shape, generator=torch.Generator().manual_seed(1))

    def sums(rows: torch.Tensor, micro_batch_size: int) -> Sums:
        args.micro_batch_size = micro_batch_size
        batch = diffusion_nft.Batch(request.select(rows), x0[rows], r[rows], weights[rows], rows)
        drawn = {"timesteps": timesteps[rows], "noise": noise[rows], "v_old": v_old[rows], "v_ref": v_ref[rows]}
        everything = torch.arange(len(rows))
        accumulate = lambda: diffusion_nft.accumulate_gradients(args, model, batch, everything, **drawn)
        return sums_of(model, len(rows), accumulate)

    kept = sums(KEPT, 2)
    assert_same_sums(sums(EVERY, 4), kept)
    assert_same_sums(sums(EVERY, 1), kept)


# ---- runs ------------------------------------------------------------------------------------------------------------
# brightness, which fails on about a third of the images
FLAKY = """
import numpy


def flaky(images, prompts, metadata):
    scores = []
    for image in images:
        brightness = numpy.asarray(image).mean() / 255
        steps = int(brightness * 200)
        scores.append(ValueError("an odd image") if steps % 3 == 0 else brightness)
    return scores
"""


def flaky_reward(folder):
    path = folder / "flaky.py"
    path.write_text(FLAKY)
    return ["--reward", f"{path}:flaky", "--reward_failure", "mask"]


def test_a_run_continues_with_failed_images_masked(tmp_path, capfd):
    """And its resumed half is the same run. The gradients of Guard and MixGRPO are held above, runs of flow_grpo.py
    below."""
    script = "diffusion_nft.py"
    options = [*TINY, "--rollout", "local", "--num_steps", 2, "--updates_per_rollout", 2, "--kl_coef", 0.1]
    options += [*flaky_reward(tmp_path), *few_eval_prompts(tmp_path)]
    assert run_here(tmp_path, script, *options, "--name", "whole") is None
    rows = read_metrics(tmp_path / "runs" / "whole")
    assert 0 < rows[0]["val/flaky/failed"] < 8
    assert all(0 < row["critic/rewards/flaky/failed"] < 16 for row in rows[1:])
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    samples = (tmp_path / "runs/whole/samples/0000/samples.jsonl").read_text()
    assert samples.count('"flaky": null') == rows[0]["val/flaky/failed"] and "NaN" not in samples
    assert " flaky " in capfd.readouterr().err
    # a run that is resumed in the middle is the same run
    half = ["--name", "half", "--eval_every", 1]
    assert run_here(tmp_path, script, *options, *half, "--num_steps", 1) is None
    assert run_here(tmp_path, script, *options, *half, "--resume", "latest") is None
    again = read_metrics(tmp_path / "runs" / "half")
    assert without_times(again)[2] == without_times(rows)[2]


def test_two_ranks_mask_the_images_that_one_masks(tmp_path):
    """Invariant 11 with failures, which fall on the ranks unevenly: first updates to round-off."""
    options = ["--rollout", "local", "--num_steps", 1, *SMALL, "--updates_per_rollout", 2, "--kl_coef", 0.1]
    options += [*flaky_reward(tmp_path), *few_eval_prompts(tmp_path)]
    torchrun(tmp_path, "flow_grpo.py", "--name", "one", *options)
    torchrun(tmp_path, "flow_grpo.py", "--name", "two", *options, nproc=2)
    one, two = (read_metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    for name in ("val/flaky/failed", "val/flaky/mean"):
        assert two[0][name] == pytest.approx(one[0][name], abs=1e-6), name
    assert 0 < one[1]["critic/rewards/flaky/failed"] < 16 and one[1]["actor/grad_norm"] > 0
    for name in ("rewards/flaky/failed", "rewards/skipped_groups", "rewards/mean", "rewards/std_mean"):
        assert two[1][f"critic/{name}"] == pytest.approx(one[1][f"critic/{name}"], abs=1e-6), name
    for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm"):
        assert two[1][name] == pytest.approx(one[1][name], abs=1e-5), name


def test_dpo_offline_makes_no_pair_of_a_failure(tmp_path, capfd):
    options = [*flaky_reward(tmp_path), "--num_pair_prompts", 6, "--group_size", 3, "--num_pairs", 2]
    options += ["--num_steps", 1, *few_eval_prompts(tmp_path)]
    assert run_here(tmp_path, "dpo_offline.py", *options) is None
    out, err = capfd.readouterr()
    assert re.search(r"--num_pair_prompts|pairs", out) and "an odd image" in err
    rows = read_metrics(tmp_path / "runs" / "dpo_offline")
    assert 0 < rows[0]["val/flaky/failed"] < 8 and rows[1]["actor/grad_norm"] > 0


@pytest.mark.parametrize("script", ["flow_grpo.py", "dpo_offline.py"])
def test_a_reward_that_fails_on_every_image_ends_the_run_even_so(tmp_path, script):
    path = tmp_path / "never.py"
    path.write_text("def never(images, prompts, metadata):\n    return [ValueError('no')] * len(images)\n")
    options = ["--reward", f"{path}:never", "--reward_failure", "mask", *few_eval_prompts(tmp_path, 2)]
    if script == "flow_grpo.py":
        options += [*TINY, "--rollout", "local"]
        told = " never .* 2 of 2$"
    else:
        options += ["--num_pair_prompts", 2, "--group_size", 2, "--num_pairs", 2]
        told = "--num_pair_prompts 2: .*; .* 4 "
    line = run_here(tmp_path, script, *options)
    assert_one_line(line, script)
    assert re.search(told, line)


def test_without_mask_the_first_failure_ends_the_run(tmp_path):
    options = [*flaky_reward(tmp_path)[:2], *TINY, "--rollout", "local", *few_eval_prompts(tmp_path)]
    line = run_here(tmp_path, "flow_grpo.py", *options)
    assert_one_line(line)
    assert " flaky " in line and "an odd image; --reward_failure mask" in line


# ---- before a model loads --------------------------------------------------------------------------------------------
BAD_REWARDS = """
def two(images, prompts):
    return [0.0] * len(images)

class Scorer:
    def __init__(self, images, prompts, metadata): pass

def scalar(images, prompts, metadata):
    return 0.5

def column(images, prompts, metadata):
    import torch
    return torch.zeros(len(images), 1)

def nothing(images, prompts, metadata):
    pass

def raises(images, prompts, metadata):
    return [metadata[0]["answer"]]
"""


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("two", r" two .*TypeError: two\(\) takes 2 positional arguments but 3 were given"),
        ("Scorer", " Scorer: .* Scorer "),
        ("scalar", " scalar: .* float "),
        ("column", r" column: .* 0 .* \[0.0\]"),
        ("nothing", " nothing: .* NoneType "),
        ("raises", r" raises .*KeyError: 'answer' \(.*mine.py:19\)"),
    ],
)
def test_a_reward_is_tried_before_a_model_loads(tmp_path, name, fault, capfd):
    (tmp_path / "mine.py").write_text(BAD_REWARDS)
    line = run_here(tmp_path, "flow_grpo.py", "--rollout", "local", *TINY, "--reward", f"mine.py:{name}")
    assert re.search(f"^flow_grpo.py: error: .*{fault}", line), line
    assert "loading" not in capfd.readouterr().err and not (tmp_path / "runs").exists()
