"""benchmarks/scenes_comparison.py: which trials it makes, what it chooses by, and its tables. No run starts."""

import importlib
import json
import shlex
from contextlib import nullcontext
from pathlib import Path

from benchmarks import scenes_comparison
from benchmarks.comparison import ROOT, is_recorded
from benchmarks.scenes_comparison import (
    RATES,
    ROWS,
    SETTINGS,
    check_begun,
    chosen,
    command_of,
    compare_all,
    print_tables,
    run_jobs,
    tune_jobs,
    widening_jobs,
)
from common.run import parse_args

import pytest

pytestmark = pytest.mark.fast


def trial(row, rate, reward, failed=False):
    job = next(job for job in tune_jobs() if job["row"] == row)
    evaluations = [{"geneval.soft": 0.9, "geneval": 0.9}, {"geneval.soft": reward, "geneval": 0.1}]
    return job | {"learning_rate": rate, "failed": failed, "evaluations": evaluations}


def trials(best):
    """Of every row, with `best` ahead."""
    return [trial(row, rate, 0.5 if rate == best else 0.3) for row in ROWS for rate in RATES]


def test_a_choice_at_the_edge_gets_one_more_trial():
    assert not widening_jobs(trials(1e-3))
    assert {job["learning_rate"] for job in widening_jobs(trials(3e-4))} == {1e-4}
    assert {job["learning_rate"] for job in widening_jobs(trials(3e-3))} == {1e-2}
    again = trials(3e-3) + [trial(row, 1e-2, 0.6) for row in ROWS]
    assert [is_recorded(job, again) for job in widening_jobs(trials(3e-3))] == [True] * len(ROWS)
    assert chosen(again, "mix_grpo") == 1e-2
    assert not widening_jobs(again)  # four trials at most


def test_a_choice_goes_by_the_last_reward_of_trials_that_ended_well():
    record = [trial("mix_grpo", 3e-4, 0.4), trial("mix_grpo", 1e-3, 0.4), trial("mix_grpo", 3e-3, 0.7, failed=True)]
    assert chosen(record, "mix_grpo") == 3e-4  # of equal ones the lower
    with pytest.raises(SystemExit, match="flow_grpo"):
        chosen(record, "flow_grpo")


def test_trials_see_no_pair_colour_number_or_place_of_the_table(monkeypatch):
    monkeypatch.chdir(ROOT)
    tuned, run = tune_jobs()[0], run_jobs(trials(1e-3))[0]
    seen = []
    for job in (tuned, run):
        words = command_of(job, "x")
        records = map(json.loads, Path(words[words.index("--eval_prompts") + 1]).read_text().splitlines())
        seen.append({record["prompt"] for record in records if record["tag"] != "single_object"})
    assert len(seen[0]) > 200 and len(seen[1]) > 100 and not seen[0] & seen[1]
    assert (tuned["seed"], tuned["rollouts"]) == (100, run["rollouts"] // 2)
    seeds = [seed for seed in range(1, 7) for row in ROWS if seed <= 3 or not ROWS[row][0].startswith("contrib")]
    assert [job["seed"] for job in run_jobs(trials(1e-3))] == seeds and len(seeds) == 5 * 6 + 6 * 3


def test_all_stages_follow_one_another_and_nothing_else(tmp_path, monkeypatch, capsys):
    """With runs that end at once, of which those at the highest rate learn most."""

    def ends_at_once(job, core):
        return job | {"failed": False, "evaluations": [{"geneval.soft": job["learning_rate"]}]}

    monkeypatch.setattr(scenes_comparison, "train", ends_at_once)
    compare_all(tmp_path / "record.jsonl", [0])
    record = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in record] == ["tune"] * 4 * len(ROWS) + ["run"] * 48
    assert {line["learning_rate"] for line in record if line["stage"] == "run"} == {1e-2}
    assert "48 of 48: scenes-run-dpo_offline-0.01-seed6" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["", "options", "detector"])
def test_a_run_that_other_settings_have_begun_is_not_continued(change, tmp_path):
    job = tune_jobs()[0]
    command = [*command_of(job, "x"), "--resume", "latest"]
    check_begun(tmp_path, command)  # nothing was begun
    began = [*command_of(job | {"learning_rate": 7} if change == "options" else job, "x")[4:], "--resume", "latest"]
    settings = SETTINGS | ({"GENEVAL_DTYPE": "float32"} if change == "detector" else {})
    begun = {"command": shlex.join(began), "args": {"reward_settings": {"geneval": settings}}}
    (tmp_path / "args.json").write_text(json.dumps(begun))
    with pytest.raises(RuntimeError, match="other options") if change else nullcontext():
        check_begun(tmp_path, command)


def test_every_row_makes_as_many_images_and_updates(monkeypatch):
    monkeypatch.chdir(ROOT)
    for job in run_jobs(trials(1e-3)):
        command = command_of(job, "x")
        script, words = command[command.index("--name") - 1], command[command.index("--name") :]
        module = importlib.import_module(script.removesuffix(".py"))
        args = module.check(parse_args(module.Args, "", words))
        if job["row"] == "dpo_offline":
            assert args.num_pair_prompts * args.group_size == 30 * 128
            assert args.num_steps * args.num_pairs * 2 == 30 * 128 * 2
        else:
            assert args.num_steps * args.num_prompts * args.group_size == 30 * 128
            assert args.updates_per_rollout == 2


def test_the_tables_compare_with_the_model_before_and_with_flow_grpo(tmp_path, capsys, monkeypatch):
    lines = [one for one in trials(1e-3) if one["row"] in ("flow_grpo", "mix_grpo")]
    monkeypatch.setattr(scenes_comparison, "ROWS", {row: ROWS[row] for row in ("flow_grpo", "mix_grpo")})
    for job in run_jobs(lines):
        share = (0.3 if job["row"] == "flow_grpo" else 0.4) + job["seed"] / 100
        bench = {"base": {"all six parts": 0.1, "colors": 0.0}, "trained": {"all six parts": share, "colors": 0.2}}
        last = {"geneval.soft": 0.5, "seconds": 60.0, "drift_from_base": 0.1}
        lines.append(job | {"failed": False, "evaluations": [last], "bench": bench})
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_tables(path)
    printed = capsys.readouterr().out
    assert "| mix_grpo | 6 | 0.435 (0.410 to 0.460), +0.335 [" in printed  # against the model before training
    assert "| mix_grpo | 6 | 0.435 (0.410 to 0.460), +0.100 [" in printed  # against flow_grpo.py
    assert "**0.500**" in printed
