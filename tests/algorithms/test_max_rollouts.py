"""--max_rollouts: a step's groups whose images all score the same are replaced by groups of the next prompts."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.data import GroupSampler, PromptSet, Redrawn
from common.engine import client
from common.redraw import StepRollouts
from common.run.inputs import check_batches
from common.scoring import NOT_ASKED, Scorer, has_spread
from common.sde import image_seed
from flow_grpo import Args, combine_advantages
from tests.algorithms.test_mains import CASES, OTHERS, TOY, EngineByHand, lora_of_file, options_of
from tests.conftest import assert_one_line, constant_reward, read_metrics, run_here, torchrun, without_times

import pytest
import torch
from PIL import Image

pytestmark = pytest.mark.fast

# two are drawn for a step, in this order; the images of a prompt that ends with 2 all score 0
PROMPTS = ["-0.5 1 0", "1 0.5 2", "0.75 -1 2", "1 1 0", "-1 0.5 2", "0.5 0.5 0", "0.3 1 0", "0.25 -1 0"]
# of each step: the prompt's place in the list, and the rollout in the step that made its images
GROUPS = [[(0, 0), (3, 2)], [(6, 1), (5, 0)], [(7, 0), (0, 0)]]
# no groups, or refused
WITHOUT = ("dpo_offline.py", "contrib/dmd2.py", "contrib/sft.py", "contrib/tdm_r1.py", "contrib/flow_grpo_ahead.py")
SCRIPTS = [script for script in [*CASES, *OTHERS] if script not in WITHOUT]
NUM_IMAGES = 8  # of a step, four of each prompt


def options(script: str, folder: Path, prompts: Sequence[str] = PROMPTS, **changes: Any) -> list[str]:
    (folder / "in_order.txt").write_text("\n".join(prompts) + "\n")
    of_toy = {"reward": f"{TOY}:closeness_or_0", "eval_reward": f"{TOY}:farness"}
    of_toy |= {"train_prompts": folder / "in_order.txt", "shuffle": False}
    return options_of(script, folder, **of_toy | changes)


def rollouts_of(folder: Path) -> list[list[dict]]:
    """The records of each step's images, in order."""
    files = sorted(folder.glob("rollouts/*/samples.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def assert_replaced(folder: Path) -> None:
    for step, (groups, records) in enumerate(zip(GROUPS, rollouts_of(folder), strict=True), 1):
        wanted = [(PROMPTS[row], NUM_IMAGES * rollout + 4 * place) for place, (row, rollout) in enumerate(groups)]
        wanted = [(prompt, image_seed(5, step, first + i)) for prompt, first in wanted for i in range(4)]
        assert [(record["prompt"], record["seed"]) for record in records] == wanted
        assert [record["group"] for record in records] == [0] * 4 + [1] * 4
    rows = read_metrics(folder)[1:]
    assert [row["rollout/rollouts"] for row in rows] == [3, 2, 1]
    assert [row["rollout/replaced_groups"] for row in rows] == [2, 1, 0]
    assert [row["critic/rewards/zero_std_ratio"] for row in rows] == [0, 0, 0]
    assert rows[-1]["training/epoch"] == 9 / 8


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_is_that_of_the_prompts_that_took_the_places(script, tmp_path, monkeypatch):
    """Two runs of a step: one that finds its prompts, and one that is given these, with the noise of their images."""
    assert run_here(tmp_path, script, *options(script, tmp_path, name="found", num_steps=1, max_rollouts=3)) is None
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))

    def of_third_rollout(seed: int, step: int | str, index: int) -> int:
        """The second group's images, or what a group or a part of it shares, are those of the third rollout."""
        counts = {1: NUM_IMAGES, "1 prompt": 2, "1 branch": 4}  # of such noises in a step
        if step not in counts:
            return image_seed(seed, step, index)
        count = counts[step]
        return image_seed(seed, step, index + 2 * count if index >= count // 2 else index)

    monkeypatch.setattr(module, "image_seed", of_third_rollout)
    given = options(script, tmp_path, [PROMPTS[0], PROMPTS[3]], name="given", num_steps=1)
    assert run_here(tmp_path, script, *given) is None
    found, given = (tmp_path / "runs" / name for name in ("found", "given"))
    for one, other in zip(rollouts_of(found)[0], rollouts_of(given)[0], strict=True):
        assert one["prompt"] == other["prompt"] and one["seed"] == other["seed"]
        assert one["closeness_or_0"] == pytest.approx(other["closeness_or_0"], abs=1e-6)
    for name, value in read_metrics(given)[1].items():
        if name.startswith(("actor/", "critic/")):
            assert read_metrics(found)[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for one, other in zip(lora_of_file(found / "adapter"), lora_of_file(given / "adapter"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    row = read_metrics(found)[1]
    cost = [row[f"rollout/{name}"] for name in ("rollouts", "replaced_groups", "sampled_per_trained")]
    assert cost == [3, 2, 2.0] and "rollout/rollouts" not in read_metrics(given)[1]
    assert row["actor/grad_norm"] > 0


@pytest.mark.parametrize("script", ["flow_grpo.py", "mix_grpo.py", "diffusion_nft.py"])
def test_a_resumed_run_is_the_whole_run_to_the_bit_and_two_ranks_find_the_groups_of_one(script, tmp_path):
    assert run_here(tmp_path, script, *options(script, tmp_path, name="run", max_rollouts=3)) is None
    folder = tmp_path / "runs" / "run"
    assert_replaced(folder)
    checkpoint = folder / "checkpoints" / "step_000002.pt"
    again = options(script, tmp_path, name="again", max_rollouts=3, resume=checkpoint)
    assert run_here(tmp_path, script, *again) is None
    rows, resumed = (without_times(read_metrics(tmp_path / "runs" / name)) for name in ("run", "again"))
    assert resumed == rows[3:]
    names = [f"{name}/adapter/pytorch_lora_weights.safetensors" for name in ("run", "again")]
    whole, resumed = ((tmp_path / "runs" / name).read_bytes() for name in names)
    assert whole == resumed
    two = tmp_path / "runs" / "two"
    torchrun(tmp_path, script, *options(script, tmp_path, name="two", max_rollouts=3, micro_batch_size=1), nproc=2)
    assert_replaced(two)
    for row, other in zip(rows, read_metrics(two), strict=True):
        for name, value in row.items():
            if name != "actor/ratio_std" and name.startswith(("actor/", "critic/", "rollout/", "val/")):  # of a pass
                assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("script", ["flow_grpo.py", "contrib/awm.py"])
def test_an_engine_samples_the_further_rollouts(script, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "VLLMEngine", EngineByHand)
    monkeypatch.setattr("common.engine.check_engine", lambda *of, **named: None)
    monkeypatch.setattr(EngineByHand, "started", [])
    assert run_here(tmp_path, script, *options(script, tmp_path, name="run", max_rollouts=3, rollout="vllm")) is None
    assert_replaced(tmp_path / "runs" / "run")


def test_groups_that_are_left_equal_teach_nothing_and_are_logged(tmp_path):
    changes = {"reward": constant_reward(tmp_path), "num_steps": 1, "max_rollouts": 4}
    assert run_here(tmp_path, "flow_grpo.py", *options("flow_grpo.py", tmp_path, name="run", **changes)) is None
    row = read_metrics(tmp_path / "runs" / "run")[1]
    assert row["actor/grad_norm"] == 0 and row["critic/rewards/zero_std_ratio"] == 1
    assert (row["rollout/rollouts"], row["rollout/replaced_groups"], row["rollout/sampled_per_trained"]) == (4, 6, 4.0)


@pytest.mark.parametrize(
    ("script", "changes"),
    [
        ("contrib/flow_grpo_ahead.py", {"rollout": "vllm"}),
        ("contrib/diffusion_opd.py", {"rollout": "local", "teachers": "a=b"}),
    ],
)
def test_what_cannot_replace_groups_says_so(script, changes, tmp_path):
    named = [word for name, value in changes.items() for word in (f"--{name}", value)]
    line = run_here(tmp_path, script, "--max_rollouts", 2, *named)
    assert_one_line(line, script.removeprefix("contrib/"))
    assert "--max_rollouts 2: " in line


# ---- the parts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_mini_batches", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_groups_are_the_same_on_any_number_of_ranks(world_size, num_mini_batches):
    """Four groups of six: the second and the fourth are drawn again, and then the fourth."""
    shape = {"num_prompts": 20, "prompts_per_step": 4, "group_size": 6, "seed": 5}
    whole = GroupSampler(**shape, rank=0, world_size=1)
    stream = [row for _ in range(3) for row in whole.draw()[0].tolist()]
    shape["num_mini_batches"] = num_mini_batches
    ranks = [GroupSampler(**shape, rank=rank, world_size=world_size) for rank in range(world_size)]
    for sampler in ranks:
        sampler.draw()
    for redrawn in ([1, 3], [3]):
        is_redrawn = torch.tensor([group in redrawn for group in range(4)])
        parts = [sampler.redraw(is_redrawn) for sampler in ranks]
        assert len({len(part.rows) for part in parts}) == 1  # as many passes on every rank
        assert all(len(set(part.rows.tolist())) == len(part.rows) for part in parts)
        made = [sampler.image_index[part.rows[: part.num_new]] for sampler, part in zip(ranks, parts, strict=True)]
        assert sorted(torch.cat(made).tolist()) == [6 * group + i for group in redrawn for i in range(6)]
    wanted_rows = torch.tensor([stream[0], stream[4], stream[2], stream[6]]).repeat_interleave(6)
    wanted_numbers = torch.arange(24) + torch.tensor([0, 24, 0, 48]).repeat_interleave(6)
    for sampler in ranks:
        rows, prompt_index = sampler.drawn_prompts()
        assert torch.equal(rows[prompt_index], wanted_rows[sampler.image_index])
        assert torch.equal(sampler.image_numbers, wanted_numbers[sampler.image_index])
        assert sampler.state_dict() == {"position": 7}
        rows, prompt_index, image_index = sampler.draw()  # the next step
        assert torch.equal(rows[prompt_index], torch.tensor(stream[7:11]).repeat_interleave(6)[image_index])
        assert torch.equal(sampler.image_numbers, image_index)


@pytest.mark.parametrize("whole_group", [False, True])
def test_only_the_redrawn_images_are_scored_again(whole_group, monkeypatch):
    """Two groups of two on one rank; the second is drawn again, and an image of the first fills up."""
    called: list[list[str]] = []

    def counts(images: list, prompts: list[str], metadata: list[dict]) -> list[dict]:
        called.append(prompts)
        return [{"score": image.width, "width": image.width} for image in images]

    counts.whole_group = whole_group
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    images = [Image.new("RGB", (32, 32)) for _ in range(4)]
    first = Scorer({"counts": counts}, PromptSet(["a", "a", "b", "b"], [{}] * 4))
    first.add(range(4), images)
    assert first.scores(range(4), 2)[:, 0].tolist() == [32] * 4
    called.clear()
    redrawn = Redrawn(torch.tensor([2, 3, 0]), 2)
    second = Scorer({"counts": counts}, PromptSet(["a", "a", "c", "c"], [{}] * 4), "stop", first, redrawn)
    others = [Image.new("RGB", (32, 32), "red") for _ in range(3)]
    second.add([0], others[:1])
    second.add([1, 2], others[1:])
    assert second.scores(range(4), 2)[:, 0].tolist() == [32] * 4
    assert [prompt for prompts in called for prompt in prompts] == ["c", "c"]
    assert second.images == [*images[:2], *others[:2]]
    assert [detail["counts"]["width"] for detail in second.details] == [32] * 4


def test_a_group_has_a_spread_where_two_whole_images_differ():
    nan, none = torch.nan, NOT_ASKED
    groups = {
        "differ": ([[1, 0], [0, 0]], True),
        "equal totals": ([[1, 0], [0, 0.5]], False),  # of the weights 1 and 2
        "up to round-off": ([[1, 0], [1 + 1e-9, 0]], False),
        "one whole image": ([[1, 0], [nan, 0]], False),
        "none": ([[nan, 0], [nan, 1]], False),
        "one reward asked for": ([[1, none], [2, none]], True),
        "no reward": ([[none, none], [none, none]], False),
    }
    scores = torch.tensor([row for rows, _ in groups.values() for row in rows], dtype=torch.float64)
    assert has_spread(scores, [1, 2], 2).tolist() == [wanted for _, wanted in groups.values()]
    # where advantages are each reward's own
    own = {**groups, "equal totals": (None, True)}
    assert has_spread(scores, [1, 2], 2, each_reward=True).tolist() == [wanted for _, wanted in own.values()]
    assert has_spread(torch.tensor([[1.0, 3.0], [1.0, 4.0]]), [1, 0], 2, each_reward=True).tolist() == [False]


def test_a_group_of_equal_totals_stays_where_each_rewards_own_advantages_teach():
    """Of the weights 1 and 2 its totals are 1; the normalised advantages are -1 and 1, so that their sum is not 0."""
    sampler = GroupSampler(8, 2, 4, seed=5, rank=0, world_size=1)
    scores = torch.tensor([[1, 0], [1, 0], [0, 0.5], [0, 0.5], [1, 0], [1, 0], [1, 0], [1, 0]], dtype=torch.float64)
    for aggregation, redrawn in (("normalize_then_sum", [1]), ("sum_then_normalize", [0, 1])):
        args = Args(reward=("a", "b"), reward_weights=(1, 2), group_size=4, multi_objective_aggregation=aggregation)
        advantages = combine_advantages(args, scores, 5.0).view(2, 4)
        assert (advantages == 0).all(1).nonzero()[:, 0].tolist() == redrawn
        rollouts = StepRollouts(sampler, 2, PromptSet(list("abcdefgh"), [{}] * 8))
        draws = rollouts.draw(1)
        next(draws)
        rows = sampler.group_rows.clone()
        rollouts.judge(scores, args.reward_weights, 4, aggregation)
        next(draws)
        assert (sampler.group_rows != rows).nonzero()[:, 0].tolist() == redrawn


def test_the_sampled_log_probs_are_refused_before_the_run():
    with pytest.raises(Exception, match="--max_rollouts 2: .*--old_log_prob recompute"):
        check_batches(Args(rollout="local", old_log_prob="rollout", max_rollouts=2))
    check_batches(Args(rollout="local", old_log_prob="recompute", max_rollouts=2))
    check_batches(Args(rollout="vllm", old_log_prob="rollout", max_rollouts=2))
