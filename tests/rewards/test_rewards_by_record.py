"""A prompt's record that names its rewards: who is called with it, its metrics, and advantages by the part alone."""

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flow_grpo
from common.data import PromptSet
from common.files.prompts import read_prompts
from common.metrics import eval_metrics, metrics_by_field, reward_metrics
from common.run.evaluation import sample_records
from common.scoring import NOT_ASKED, Scorer, fill_failed, score_images, weighted_totals
from tests.conftest import TINY, assert_one_line, on_ranks, read_metrics, run_here

import pytest
import torch
from PIL import Image

NAN = float("nan")
NO = NOT_ASKED
fast = pytest.mark.fast


def tensor(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- reading ---------------------------------------------------------------------------------------------------------
def reading_reward(seen: list) -> Any:
    """A reward whose checks write down what they see."""

    def reward(images, prompts, metadata):
        seen.extend(prompts)
        numbers = [image.getpixel((0, 0))[0] for image in images]
        return [{"score": score, "said": prompt} for score, prompt in zip(numbers, prompts, strict=True)]

    reward.check = seen.append
    reward.check_metadata = lambda record: seen.append(record.get("tag"))
    return reward


@fast
def test_a_rewards_checks_see_the_prompts_that_ask_for_it(tmp_path):
    lines = ['{"prompt": "one", "rewards": ["a"], "tag": 1}', '{"prompt": "two", "rewards": ["b", "a"], "tag": 2}']
    lines += ['{"prompt": "three", "rewards": null, "tag": 3}', '{"prompt": "four", "rewards": ["watches", "b"]}']
    (tmp_path / "mixed.jsonl").write_text("\n".join(lines))
    seen: dict[str, list] = {"a": [], "b": []}
    rewards = {name: reading_reward(seen[name]) for name in seen}
    prompts = read_prompts(tmp_path / "mixed.jsonl", rewards, others=["watches"])
    assert seen == {"a": ["one", 1, "two", 2, "three", 3], "b": ["two", 2, "three", 3, "four", None]}
    assert [prompts.asking(name) for name in ("a", "b", "watches")] == [[0, 1, 2], [1, 2, 3], [2, 3]]
    assert len(read_prompts(tmp_path / "mixed.jsonl")) == 4  # by a tool that knows no rewards


@fast
@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ('["a", "orc"]', "'orc' .*--reward and --eval_reward .* a, b, watches"),
        ('"a"', "(?!.* a, b)"),
        ("[1]", "(?!.* a, b)"),
        ("[]", ".* a, b$"),
        ('["watches"]', ".* a, b$"),
    ],
)
def test_a_record_that_names_no_reward_of_the_run_is_named(tmp_path, field, fault):
    path = tmp_path / "mixed.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{{"prompt": "p", "rewards": {field}}}\n')
    with pytest.raises(ValueError) as error:
        read_prompts(path, dict.fromkeys("ab"), others=["a", "watches"])
    assert re.match(f'{path}:3: "rewards": {fault}', str(error.value))


@fast
def test_a_prompt_that_a_reward_refuses_may_ask_for_the_others_alone(tmp_path):
    """The message says how, where there are others: of a line, and of a record that names none."""

    def reads(images, prompts, metadata): ...

    def refusing(images, prompts, metadata): ...

    def refuse(value):
        if not value or "text" not in value:
            raise ValueError("needs a text")

    refusing.check = lambda prompt: refuse("")

    reads.check = refuse
    (tmp_path / "draw.txt").write_text("a text\na mug\n")
    told = r'needs a text; .*"rewards": \["b", "watches"\], .*: b,watches='
    others = {"rewards": {"reads": reads, "b": None}, "others": ["watches", "b"]}
    with pytest.raises(ValueError) as error:
        read_prompts(tmp_path / "draw.txt", **others)
    assert re.fullmatch(f"{tmp_path}/draw.txt:2: {told}{tmp_path}/draw.txt", str(error.value))
    for only_others in ((), ["watches"]):  # which a record cannot ask for alone
        with pytest.raises(ValueError, match="draw.txt:2: needs a text$"):
            read_prompts(tmp_path / "draw.txt", {"reads": reads}, others=only_others)
    (tmp_path / "draw.jsonl").write_text('{"prompt": "a mug", "rewards": ["b", "watches"]}\n')
    assert read_prompts(tmp_path / "draw.jsonl", **others).prompts == ["a mug"]
    reads.check_metadata = reads.check
    reads.check = str
    (tmp_path / "draw.jsonl").write_text('{"prompt": "a mug"}\n')
    with pytest.raises(ValueError) as error:
        read_prompts(tmp_path / "draw.jsonl", **others)
    assert re.fullmatch(f"{tmp_path}/draw.jsonl:1: {told}{tmp_path}/draw.jsonl", str(error.value))
    assert read_prompts(f"b={tmp_path}/draw.txt", **others).prompts == ["a text", "a mug"]
    with pytest.raises(ValueError, match="draw.txt:1: needs a text$") as error:  # the option has named it
        read_prompts(f"reads,b={tmp_path}/draw.txt", {"reads": refusing, "b": None})


@fast
def test_an_option_names_the_rewards_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("draw.txt").write_text("a mug\na hat\n")
    Path("more.jsonl").write_text('{"text": "a cat"}\n{"text": "a dog", "rewards": ["b"]}\n')
    Path("mine.py").write_text("def made():\n    return ['a fox']\n")
    Path("x=1").mkdir()
    Path("x=1/a.txt").write_text("an owl\n")
    read = functools.partial(read_prompts, rewards=dict.fromkeys("ab"), others=["watches"])
    prompts = read(
        ["a=draw.txt", "a, watches=more.jsonl:text", "b=mine.py:made", "x=1/a.txt", "x=1/*.txt", "b=x=1/a.txt"]
    )
    asked = [record.get("rewards") for record in prompts.metadata]
    assert asked == [["a"], ["a"], ["a", "watches"], ["b"], ["b"], None, None, ["b"]]  # a record's own win
    assert prompts.files == ["draw", "draw", "more", "more", "made", "a", "x=1", "a"]
    for wrong, fault in {
        "orc=draw.txt": "'orc' .*--reward and --eval_reward .* a, b, watches",
        "watches=draw.txt": ".* a, b$",
    }.items():
        with pytest.raises(ValueError) as error:
            read(wrong)
        assert re.match(f'{wrong}: "rewards": {fault}', str(error.value))


# ---- scoring ---------------------------------------------------------------------------------------------------------
IMAGES = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (10, 20, 30)]
PROMPTS = PromptSet(["first", "second", "third"], [{"rewards": ["a"]}, {"rewards": ["b"]}, {}])


@fast
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_reward_is_called_with_the_images_that_ask_for_it(whole_group):
    seen: dict[str, list] = {"a": [], "b": [], "never": []}
    rewards = {name: reading_reward(seen[name]) for name in seen}
    prompts = PromptSet(PROMPTS.prompts, [PROMPTS.metadata[0], PROMPTS.metadata[1], {"rewards": ["a", "b"]}])
    expected = tensor([10, NO, NO], [NO, 20, NO], [30, 30, NO])
    if whole_group:
        rewards["a"].whole_group = rewards["never"].whole_group = True
        prompts = PromptSet(["first"] * 3, [{"rewards": ["a"]}] * 3)
        expected = tensor([10, NO, NO], [20, NO, NO], [30, NO, NO])
    scorer = Scorer(rewards, prompts)
    scorer.add([0, 1, 2], IMAGES)
    assert torch.equal(scorer.scores(), expected)
    called = {"a": ["first"] * 3, "b": [], "never": []}
    assert seen == (called if whole_group else {"a": ["first", "third"], "b": ["second", "third"], "never": []})
    if not whole_group:
        said = [{name: detail["said"] for name, detail in of_image.items()} for of_image in scorer.details]
        assert said == [{"a": "first"}, {"b": "second"}, {"a": "third", "b": "third"}]


@fast
def test_a_reward_that_fails_is_not_one_that_was_not_asked():
    scores = score_images({"a": lambda images, *_: [ValueError("odd")] * len(images)}, IMAGES, PROMPTS, "mask")
    assert scores.isnan().flatten().tolist() == [True, False, True] and scores[1] == NO
    records = sample_records(PROMPTS, [7, 8, 9], scores, ["a"])
    assert records == [
        {"prompt": "first", "seed": 7, "a": None},
        {"prompt": "second", "seed": 8},
        {"prompt": "third", "seed": 9, "a": None},
    ]


# ---- advantages ------------------------------------------------------------------------------------------------------
WEIGHTS = (0.3, 1.7, -0.9, 0.6, 1.1)
ASKED = [[0], [1, 4], [0, 2, 4], [0, 1, 2, 3, 4]]  # rewards of each part
GROUP_SIZE = 4
PART_OF = [0, 1, 2, 3, 2, 1, 0, 3, 1, 0, 2, 2, 3]  # of each of 13 prompts


def mixed_scores(num_failed: int) -> torch.Tensor:
    """Scores (52, 5) of the prompts, random ones where they are asked for, of which some failed."""
    generator = torch.Generator().manual_seed(num_failed)
    scores = torch.randn(len(PART_OF) * GROUP_SIZE, 5, generator=generator, dtype=torch.float64) * 3
    for prompt, part in enumerate(PART_OF):
        rows = range(prompt * GROUP_SIZE, (prompt + 1) * GROUP_SIZE)
        scores[rows] = scores[rows].where(torch.tensor([r in ASKED[part] for r in range(5)]), NO)
    for row in range(2, 2 + num_failed):  # the last image of the first part's first prompt is whole or not
        scores[row, ASKED[PART_OF[row // GROUP_SIZE]][-1]] = NAN
    return scores


def advantages_of(scores: torch.Tensor, weights: tuple[float, ...], scale: str, aggregation: str) -> torch.Tensor:
    """As the scripts compute them."""
    args: Any = SimpleNamespace(group_size=GROUP_SIZE, reward_weights=weights, scale_rewards=scale)
    args.multi_objective_aggregation = aggregation
    filled, is_compared = fill_failed(scores, "abcde"[: scores.shape[1]], GROUP_SIZE)
    return flow_grpo.combine_advantages(args, filled, 5.0).where(is_compared, 0.0)


@fast
@pytest.mark.parametrize("num_failed", [0, 1, 5, 9])  # 5: a prompt's images but one; 9: all of a prompt's
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["batch", "group"])
def test_each_part_of_a_mixed_rollout_has_the_advantages_of_the_part_alone(scale, aggregation, num_failed):
    """To the bit, by a run with all rewards, and by one that has only those that the part asks for."""
    scores = mixed_scores(num_failed)
    mixed = advantages_of(scores, WEIGHTS, scale, aggregation)
    for part, columns in enumerate(ASKED):
        rows = [row for row in range(len(scores)) if PART_OF[row // GROUP_SIZE] == part]
        assert torch.equal(mixed[rows], advantages_of(scores[rows], WEIGHTS, scale, aggregation))
        weights = tuple(WEIGHTS[column] for column in columns)
        own = advantages_of(scores[rows][:, columns].contiguous(), weights, scale, aggregation)
        assert torch.equal(mixed[rows], own) and own.abs().max() > 0.1


# ---- metrics ---------------------------------------------------------------------------------------------------------
@fast
def test_totals_are_of_what_was_asked_for():
    scores = tensor([1, 10], [2, NO], [NO, 30], [NO, NO], [NAN, NO], [NAN, 3])
    assert weighted_totals(scores, (-1, 0.5)).tolist()[:4] == [4, -2, 15, NO]
    assert weighted_totals(scores, (-1, 0.5)).isnan().tolist() == [False] * 4 + [True] * 2


@fast
def test_metrics_of_a_rollout_are_over_the_prompts_that_ask():
    """Two prompts of two images ask for a, for b, and nobody for c; an image of a third failed."""
    scores = tensor([1, NO, NO], [3, NO, NO], [NO, 10, NO], [NO, 10, NO], [5, 1, NO], [NAN, 3, NO])
    metrics = reward_metrics(scores, torch.zeros(6), dict.fromkeys("abc"), (1, 2, 1), 2)
    found = {name.removeprefix("critic/rewards/"): float(value) for name, value in metrics.items()}
    assert (found["a/mean"], found["b/mean"], found["a/failed"]) == (2, 10, 1) and "c/mean" not in found
    assert (found["mean"], found["max"], found["min"]) == (11, 20, 1)  # totals 1, 3, 20, 20
    assert found["std_mean"] == 0.5 and found["zero_std_ratio"] == 0.5


@fast
def test_metrics_of_an_evaluation_are_over_the_prompts_that_ask(one_rank):
    """Two trained rewards and two that watch; the third prompt's first image failed, and nobody asks for the last."""
    scores = tensor([1, NO, 7, NO], [3, NO, 9, NO], [NO, 4, NO, NO], [NO, 6, NO, NO], [NAN, 1, 2, NO], [5, 3, 2, NO])
    names, places = ["a", "b", "watches", "never"], list(range(6))
    metrics = eval_metrics(scores, names, (1, 2), places, images_per_prompt=2)
    means = {"a": 3.5, "b": 4, "watches": 5, "weighted_total": (2 + 10 + 11) / 3}
    assert {name: metrics[f"val/{name}/mean"].item() for name in means} == pytest.approx(means)
    assert metrics["val/a/failed"] == 1 and not [name for name in metrics if "never" in name]
    metrics = eval_metrics(scores[:, 2:], names[2:], (), places, images_per_prompt=2)
    assert metrics.keys() == {"val/watches/failed", "val/watches/mean", "val/watches/stderr"}
    prompts = PromptSet(["p"] * 6, [{"kind": kind} for kind in "xxyyyy"])
    scorer: Any = SimpleNamespace(rewards=dict.fromkeys(names), prompt_set=prompts)
    metrics = metrics_by_field("kind", scorer, scores, (1, 2), places, images_per_prompt=2)
    means = {"x/a": 2, "x/watches": 8, "x/weighted_total": 2, "y/a": 5, "y/b": 4, "y/watches": 2}
    means |= {"y/weighted_total": 10.5}
    found = {name: value.item() for name, value in metrics.items() if name.endswith("mean@2")}
    assert found == {f"val/{name}/mean@2": value for name, value in means.items()}
    assert metrics["val/x/a/best@2"] == 3 and metrics["val/y/weighted_total/best@2"] == 11.5  # 12 and 11


# ---- several files ---------------------------------------------------------------------------------------------------
@fast
def test_prompts_of_several_files_follow_each_other(tmp_path, capfd):
    (tmp_path / "signs.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "mugs.jsonl").write_text('{"prompt": "four", "tag": 4}\n{"prompt": "five", "rewards": ["orc"]}\n')
    paths = [str(tmp_path / "signs.txt"), tmp_path / "mugs.jsonl"]
    prompts = read_prompts(paths, max_prompts=2)
    assert re.fullmatch(rf"{paths[0]}: .* 2 of its 3 .*\(--max_prompts\)\n", capfd.readouterr().err)
    metadata = [{}, {}, {"tag": 4}, {"rewards": ["orc"]}]
    assert prompts == PromptSet(["one", "two", "four", "five"], metadata, ["signs"] * 2 + ["mugs"] * 2)
    assert prompts.select([3, 0]).files == ["mugs", "signs"]
    with pytest.raises(ValueError, match="mugs.jsonl:2: .*\"rewards\": 'orc'"):
        read_prompts(paths, {"a": None})
    assert read_prompts([paths[1]]) == read_prompts(paths[1]) and read_prompts(paths[1]).files == []


@fast
def test_each_held_out_file_has_metrics_of_its_own(monkeypatch):
    """Two rewards, of which the second file's prompts ask for one; two images of each of four prompts, on two ranks."""
    scores = tensor([1, 2], [3, 2], [5, 2], [7, NAN], [NO, 6], [NO, 8], [NO, NAN], [NO, NAN])
    files = ["x", "x", "y", "y"]

    def of_rank(rank):
        places = [place for place in range(8) if place % 2 == rank]
        return eval_metrics(scores[places], "ab", (1, 10), places, 2, [files[place // 2] for place in places])

    (metrics, others), _ = on_ranks(monkeypatch, 2, of_rank)
    assert metrics == others
    found = {name: value.item() for name, value in metrics.items() if name.endswith("/mean")}
    means = {"a": 3.5, "b": (2 + 2 + 7) / 3, "weighted_total": (22 + 25 + 70) / 3}
    means |= {"x/a": 3.5, "x/b": 2, "x/weighted_total": 23.5, "y/b": 7, "y/weighted_total": 70}
    assert found == pytest.approx({f"val/{name}/mean": value for name, value in means.items()})
    assert metrics["val/x/a/stderr"].item() == pytest.approx(1.5 / 2**0.5)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--eval_prompts", "x.txt", "more/x.jsonl"], "--eval_prompts: .* x,"),
        (["--train_prompts"], "--train_prompts: "),
        (["--train_shares", 2, 1], "--train_shares: 2 .* 1 .*--train_prompts"),
        (["--train_shares", 0], "--train_shares 0: .* 1"),
        (["--eval_prompts", "x.txt", "y.txt", "--best_by", "val/z/ocr/mean"], "val/z/ocr/mean"),
    ],
)
def test_files_that_cannot_be_told_apart_are_refused(tmp_path, options, fault):
    line = run_here(tmp_path, "flow_grpo.py", *options)
    assert_one_line(line)
    assert re.search(fault, line)


# ---- in a run --------------------------------------------------------------------------------------------------------
REWARDS = """
def bright(images, prompts, metadata):
    assert all("bright" in prompt for prompt in prompts)
    return [sum(image.convert("L").tobytes()) / 1e6 for image in images]

def red(images, prompts, metadata):
    assert all("red" in prompt for prompt in prompts)
    return [sum(image.tobytes()[::3]) / 1e6 for image in images]
"""


def write_prompts(folder, name, records):
    (folder / name).write_text("".join(json.dumps({"prompt": p, "rewards": r}) + "\n" for p, r in records))
    return name


@pytest.mark.parametrize("script", ["flow_grpo.py", "dpo_offline.py", "contrib/online_dpo.py"])
def test_a_run_trains_each_prompt_on_its_rewards(tmp_path, script):
    """The rewards refuse prompts of the other kind. Two held-out files ask for one of them.

    Of three prompts in a row the second is of the second file: one of the two that offline DPO makes pairs of.
    """
    (tmp_path / "mine.py").write_text(REWARDS)
    both = [("a bright sign", ["bright"]), ("a red sign", ["red"]), ("a bright red sign", ["red", "bright"])]
    options = ["--reward", "mine.py:bright", "mine.py:red", "--reward_weights", 1, 2, "--num_steps", 2]
    options += ["--train_prompts", write_prompts(tmp_path, "more.jsonl", both[1:])]
    options += [write_prompts(tmp_path, "one.jsonl", both[:1]), "--train_shares", 2, 1]
    evaluated = [write_prompts(tmp_path, f"{name}.jsonl", [(f"a red {name}", ["red"])] * 2) for name in ("mug",)]
    (tmp_path / "hat.txt").write_text("a red hat\n" * 2)
    options += ["--eval_prompts", evaluated[0], "red=hat.txt", "--best_by", "val/hat/red/mean"]
    if script == "dpo_offline.py":
        options += ["--num_pair_prompts", 2, "--group_size", 4, "--num_pairs", 2]
    else:
        options += [*TINY, "--rollout", "local", "--save_rollouts", 1, "--num_prompts", 3]
    options += ["--num_inference_steps", 2, "--eval_num_inference_steps", 1]
    assert run_here(tmp_path, script, *options) is None
    run = next((tmp_path / "runs").iterdir())
    rows = read_metrics(run)
    assert rows[2]["val/weighted_total/mean"] == pytest.approx(2 * rows[2]["val/red/mean"])
    assert rows[2]["val/mug/red/mean"] + rows[2]["val/hat/red/mean"] == pytest.approx(2 * rows[2]["val/red/mean"])
    assert not [name for name in rows[2] if name.startswith("val/bright")] and rows[2]["actor/grad_norm"] > 0
    assert (run / "best_adapter").is_dir()
    if script == "dpo_offline.py":
        pairs = [json.loads(line) for line in (run / "pairs.jsonl").read_text().splitlines()]
        assert len(pairs) == 2 and pairs[1]["prompt"] == "a bright sign"
    else:
        records = [json.loads(line) for line in (run / "rollouts/0001/samples.jsonl").read_text().splitlines()]
        kinds = {record["prompt"]: sorted(record.keys() & {"bright", "red"}) for record in records}
        assert kinds == {prompt: sorted(asked) for prompt, asked in both}
        of_red = [record["red"] for record in records if "red" in record]
        assert rows[1]["critic/rewards/red/mean"] == pytest.approx(sum(of_red) / 8)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ([], '--reward red:.*--train_prompts.*"rewards"'),
        (
            ["--eval_reward", "mine.py:red"],
            '--eval_reward red:.*--eval_prompts.*"rewards"',
        ),
        (["--best_by", "val/bright/mean"], "--best_by val/bright/mean: bright "),
    ],
)
def test_a_reward_that_nobody_asks_for_is_named_before_a_model_loads(tmp_path, options, fault):
    (tmp_path / "mine.py").write_text(REWARDS)
    trained = ["mine.py:bright"] if "--eval_reward" in options else ["mine.py:bright", "mine.py:red"]
    asked = [["red", "bright"]] if "--best_by" in options else [["bright"]]
    evaluated = ["bright"] if "--eval_reward" in options else ["red"]
    options = [*options, *TINY, "--rollout", "local", "--reward", *trained]
    options += ["--reward_weights", *[1] * len(trained)]
    options += ["--train_prompts", write_prompts(tmp_path, "train.jsonl", [("a bright red sign", r) for r in asked])]
    options += ["--eval_prompts", write_prompts(tmp_path, "eval.jsonl", [("a bright red mug", evaluated)])]
    line = run_here(tmp_path, "flow_grpo.py", *options)
    assert_one_line(line)
    assert re.search(fault, line)


def test_a_best_by_of_a_file_that_does_not_ask_for_its_reward_is_refused(tmp_path):
    """Otherwise no evaluation would log it, and the run would have no best_adapter/."""
    (tmp_path / "mine.py").write_text(REWARDS)
    for name in ("bright", "red"):
        (tmp_path / f"{name}s.txt").write_text(f"a {name} mug\n")
    options = [*TINY, "--rollout", "local", "--reward", "mine.py:bright", "mine.py:red", "--reward_weights", 1, 1]
    options += ["--train_prompts", write_prompts(tmp_path, "train.jsonl", [("a bright red sign", ["bright", "red"])])]
    options += ["--eval_prompts", "bright=brights.txt", "red=reds.txt", "--best_by", "val/reds/bright/mean"]
    line = run_here(tmp_path, "flow_grpo.py", *options, "--num_steps", 0)
    assert_one_line(line)
    assert re.search("--best_by val/reds/bright/mean: .* reds .* bright", line)
