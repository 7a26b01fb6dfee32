"""--curriculum: a user's function gives each training prompt its weight in the next step's draws."""

import json
from pathlib import Path
from typing import Any

from common.curriculum import check_weights
from common.data import GroupSampler
from common.process import print_once
from tests.algorithms.test_mains import TOY, options_of
from tests.conftest import assert_one_line, read_metrics, run_here, torchrun, without_times

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.fast

PROMPTS = ["-0.5 1 0", "1 1 0", "0.5 0.5 0", "0.3 1 0", "0.25 -1 0"]
# prompt `step` first, and beside it one that has no score yet; what it was given is written down
CURRICULUM = """
import json

def chosen(step, records, scores, weights):
    with open("given.jsonl", "a") as file:
        file.write(json.dumps([step, [record["prompt"] for record in records], scores, weights]) + "\\n")
    return [2.0 if row == step else float(score is None) / 4 for row, score in enumerate(scores)]

def count(step, records, scores, weights):
    return [1.0]

def negative(step, records, scores, weights):
    return [1.0] * (len(records) - 1) + [-1]

def nothing(step, records, scores, weights):
    return [0.0] * len(records)

def no_list(step, records, scores, weights):
    return "11111"

def raises(step, records, scores, weights):
    raise KeyError("level")
"""


def options(folder: Path, script: str = "flow_grpo.py", function: str = "chosen", **changes: Any) -> list[str]:
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "curricula.py").write_text(CURRICULUM)
    named = {"train_prompts": folder / "prompts.txt", "curriculum": f"{folder}/curricula.py:{function}"}
    return options_of(script, folder, **named | {"reward": f"{TOY}:closeness"} | changes)


def rollouts_of(folder: Path) -> list[list[dict]]:
    files = sorted(folder.glob("rollouts/*/samples.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.parametrize("script", ["flow_grpo.py", "diffusion_nft.py"])
def test_it_sees_the_scores_and_gives_the_weights(script, tmp_path):
    assert run_here(tmp_path, script, *options(tmp_path, script, name="run")) is None
    given = [json.loads(line) for line in (tmp_path / "given.jsonl").read_text().splitlines()]
    assert [step for step, *_ in given] == [1, 1, 2, 3]  # tried before the model loads
    scores: list[float | None] = [None] * 5
    weights = [1.0] * 5
    rollouts = rollouts_of(tmp_path / "runs" / "run")
    for (step, prompts, given_scores, given_weights), records in zip(given[1:], rollouts, strict=True):
        assert prompts == PROMPTS and given_weights == weights
        assert given_scores == pytest.approx(scores, abs=1e-9)
        weights = [2.0 if row == step else float(score is None) / 4 for row, score in enumerate(scores)]
        for group in (records[:4], records[4:]):
            row = PROMPTS.index(group[0]["prompt"])
            assert weights[row] > 0 and {record["prompt"] for record in group} == {PROMPTS[row]}
            scores[row] = sum(record["closeness"] for record in group) / 4
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step_000002.pt"
    assert run_here(tmp_path, script, *options(tmp_path, script, name="again", resume=checkpoint)) is None
    rows, again = (without_times(read_metrics(tmp_path / "runs" / name)) for name in ("run", "again"))
    assert again == rows[3:]
    assert json.loads((tmp_path / "given.jsonl").read_text().splitlines()[-1]) == given[-1]


def test_two_ranks_draw_as_one(tmp_path):
    assert run_here(tmp_path, "flow_grpo.py", *options(tmp_path, name="one", max_rollouts=2)) is None
    torchrun(tmp_path, "flow_grpo.py", *options(tmp_path, name="two", max_rollouts=2, micro_batch_size=1), nproc=2)
    one, two = (rollouts_of(tmp_path / "runs" / name) for name in ("one", "two"))
    for records, others in zip(one, two, strict=True):
        assert [(r["prompt"], r["seed"]) for r in records] == [(r["prompt"], r["seed"]) for r in others]


@pytest.mark.parametrize("function", ["count", "negative", "nothing", "no_list", "raises", "missing"])
def test_what_is_no_weights_ends_in_a_line_before_the_model_loads(function, tmp_path):
    line = run_here(tmp_path, "flow_grpo.py", *options(tmp_path, function=function, name="run"))
    assert_one_line(line, "flow_grpo.py")
    assert f"--curriculum {tmp_path}/curricula.py:{function}" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("script", "changes"),
    [
        ("flow_grpo.py", {"shuffle": False}),
        ("flow_grpo.py", {"train_shares": 1}),
        ("contrib/flow_grpo_ahead.py", {"rollout": "vllm"}),
        ("contrib/diffusion_opd.py", {"teachers": "a=b"}),
    ],
)
def test_what_has_draws_of_its_own_refuses_it(script, changes, tmp_path):
    changed = [word for name, value in changes.items() for word in (f"--{name}", value)]
    line = run_here(tmp_path, script, "--curriculum", "my.py:function", *changed)
    assert_one_line(line, script.removeprefix("contrib/"))
    assert "--curriculum my.py:function: " in line


def test_draws_go_by_the_weights_and_by_their_place_alone():
    def sampler(prompts_per_step: int) -> GroupSampler:
        made = GroupSampler(4, prompts_per_step, 2, seed=3, rank=0, world_size=1)
        made.begin_curriculum("abcd")
        made.weights = torch.tensor([1.0, 3.0, 0.0, 4.0])
        return made

    one = sampler(2000)
    rows = one.draw()[0]
    counts = torch.bincount(rows, minlength=4) / 2000
    torch.testing.assert_close(counts, torch.tensor([0.125, 0.375, 0.0, 0.5]), rtol=0, atol=0.04)
    other = sampler(500)
    assert torch.equal(torch.cat([other.draw()[0] for _ in range(4)]), rows)


def test_a_checkpoint_of_other_prompts_begins_the_scores_anew(capfd):
    def sampler(count: int, prompts: str | None) -> GroupSampler:
        made = GroupSampler(count, 2, 2, seed=3, rank=0, world_size=1)
        if prompts is not None:
            made.begin_curriculum(prompts)
        return made

    saved = sampler(3, "abc")
    saved.scores = torch.tensor([0.5, 0.25, torch.nan], dtype=torch.float64)
    saved.weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    saved.draw()
    state = saved.state_dict()
    same = sampler(3, "abc")
    same.load_state_dict(state)
    assert torch.equal(same.draw()[0], saved.draw()[0]) and same.scores[:2].tolist() == [0.5, 0.25]
    nothing = sampler(0, "")  # of --eval_only
    nothing.load_state_dict(state)
    assert "".join(capfd.readouterr()) == ""
    for other in (sampler(4, "abcd"), sampler(3, "acb")):
        print_once.cache_clear()
        other.load_state_dict(state)
        assert other.position == 2 and set(other.weights.tolist()) == {1.0} and other.scores.isnan().all()
        assert "--curriculum: " in "".join(capfd.readouterr())
    plain = sampler(3, None)  # without a curriculum
    plain.load_state_dict(state)
    assert plain.state_dict() == {"position": 2}


def test_a_resumed_run_of_other_prompts_has_no_scores_yet(tmp_path):
    """As many prompts, in another order: a score would be another prompt's."""
    assert run_here(tmp_path, "flow_grpo.py", *options(tmp_path, name="run", num_steps=1)) is None
    changed = options(tmp_path, name="run", num_steps=2, resume="latest")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[::-1]) + "\n")
    assert run_here(tmp_path, "flow_grpo.py", *changed) is None
    step, prompts, scores, weights = json.loads((tmp_path / "given.jsonl").read_text().splitlines()[-1])
    assert (step, prompts, scores, weights) == (2, PROMPTS[::-1], [None] * 5, [1.0] * 5)


def test_weights_may_be_numbers_of_numpy_and_torch():
    for weights in (np.array([1, 2], np.float32), torch.tensor([1, 2])):
        assert check_weights(list(weights), 2, "--curriculum") == [1.0, 2.0]
