"""benchmarks/comparison.py and its table: statistics by hand, the design's counts, resuming, and one tiny run."""

import importlib
import itertools
import json
import math
import shlex
import subprocess
from dataclasses import fields
from types import SimpleNamespace

from benchmarks import comparison, comparison_table
from benchmarks.comparison import ROWS, make_job

import pytest
import torch

fast = pytest.mark.fast


# ---- statistics ------------------------------------------------------------------------------------------------------
@fast
def test_sign_flips_by_hand():
    # all eight of one sign: of 256 choices only this one and its opposite are as far from 0
    assert comparison_table.sign_flip_p([0.1, 0.2, 0.05, 0.3, 0.02, 0.08, 0.01, 0.4]) == 2 / 256
    assert comparison_table.sign_flip_p([-0.1] * 8) == 2 / 256
    # sums of +-1 +-2 +-3: 6, 4, 2, 0, 0, -2, -4, -6; as far as 1 + 2 - 3 = 0 are all, as far as -1 + 2 + 3 = 4 are four
    assert comparison_table.sign_flip_p([1, 2, -3]) == 1
    assert comparison_table.sign_flip_p([-1, 2, 3]) == 4 / 8


@fast
def test_holm_by_hand():
    adjusted = comparison_table.holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.5})
    # sorted .01, .03, .04, .5 times 4, 3, 2, 1 are .04, .09, .08, .5; the third may not be below the second
    assert {name: round(p, 12) for name, p in adjusted.items()} == {"b": 0.04, "c": 0.09, "a": 0.09, "d": 0.5}
    assert comparison_table.holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    smallest = comparison_table.holm(dict.fromkeys(comparison.TESTED, 2 / 256))
    assert smallest == dict.fromkeys(comparison.TESTED, 0.03125)


@fast
def test_paired_interval_by_hand():
    # mean 2, deviation sqrt(10 / 4) with four degrees of freedom: half is 2.776 sqrt(2.5 / 5) = 1.9629
    assert comparison_table.paired_interval([0, 1, 2, 3, 4]) == pytest.approx((2, 0.03707, 3.96293), abs=1e-5)
    # eight: deviation sqrt(2 / 7) about 1, half 2.365 sqrt(2 / 7 / 8) = 0.44694
    assert comparison_table.paired_interval([0, 1, 1, 1, 1, 1, 1, 2]) == pytest.approx((1, 0.55306, 1.44694), abs=1e-5)


# ---- the design ------------------------------------------------------------------------------------------------------
@fast
def test_the_plans_counts_are_the_jobs(monkeypatch):
    record = made_up_tuning()
    stages = comparison.plan(18)
    jobs = {"match": comparison.match_jobs(), "tune": comparison.tune_jobs(record)}
    jobs |= {"run": comparison.run_jobs(record), "evaluate": comparison.evaluate_jobs(record)}
    counts = {stage: len(of_stage) for stage, of_stage in jobs.items()}
    # six trust regions: one run of Flow-GRPO and 5 x 5. They and RAM have 3 x 3 tries, 7 rows have 3, one has none.
    # 5 rows x 8 and 10 x 6 seeds; with noisy steps 4 x 9 + 2 x 7
    assert counts == {"match": 26, "tune": 84, "run": 100, "evaluate": 50}
    assert {stage: runs for stage, (runs, _) in stages.items()} == counts
    assert all(len({json.dumps(job) for job in of_stage}) == len(of_stage) for of_stage in jobs.values())
    assert not {job["seed"] for job in jobs["run"]} & {comparison.TUNE_SEED}
    # of match: 1 x 9 + 3 x 5 x 9 rollouts of cost 1 and 2 x 5 x 9 of .6, 26 evaluations of .9 rollouts and starts of 12
    seconds = 18 * (144 + 0.6 * 90 + 0.9 * 26) + 12 * 26
    assert stages["match"][1] == pytest.approx(seconds / 7200)


@fast
def test_the_plan_cuts_rollouts_before_thresholds(capsys, monkeypatch):
    def printed(seconds):
        comparison.print_plan(seconds)
        return capsys.readouterr().out

    monkeypatch.setattr(comparison, "BUDGET_H", 24)
    # CRD's with its KL is the longest run: 12 s and 30 x 1.9 + 7 x .9 = 63.3 rollouts are 15 minutes at 14.03 s
    assert "30 rollouts, 3 thresholds: nothing is cut" in printed(14)
    assert "25 rollouts, 3 thresholds: cut, pass --cut 1\n" in printed(14.1)
    assert "20 rollouts, 1 thresholds: cut, pass --cut 3; this is too long as well" in printed(60)
    monkeypatch.setattr("sys.argv", ["comparison", "--plan", "13"])
    comparison.main()  # without a record
    assert "nothing is cut" in capsys.readouterr().out
    monkeypatch.setattr(comparison, "LONGEST_MIN", 10**6)
    hours = [sum(h for _, h in comparison.plan(1000, *cut).values()) / 1000 for cut in comparison.CUTS]
    assert hours == sorted(hours, reverse=True)
    for (rollouts, thresholds), hours_per_second in list(zip(comparison.CUTS, hours, strict=True))[1:]:
        text = printed(0.97 * comparison.BUDGET_H / hours_per_second)
        assert f"{rollouts} rollouts, {thresholds} thresholds: cut, pass --cut" in text


@fast
def test_a_cut_is_recorded_and_lines_of_another_length_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    path = tmp_path / "record.jsonl"
    before = made_up_tuning()
    path.write_text("".join(json.dumps(line) + "\n" for line in before))
    comparison.record_cut(path, 0)  # what holds already
    assert comparison.read_record(path) == before
    comparison.record_cut(path, 1)
    record = comparison.read_record(path)
    assert {job["rollouts"] for job in comparison.match_jobs()} == {9}
    assert {job["rollouts"] for job in comparison.tune_jobs(record)} == {12}
    assert {job["rollouts"] for job in comparison.evaluate_jobs(record)} == {25}
    assert not any(comparison.is_recorded(job, record) for job in comparison.tune_jobs(record))
    with pytest.raises(SystemExit, match="no tuning run"):
        comparison.chosen(record, "cps")
    jobs = [make_job("tune", rollouts, "cps", 100, 1e-3, 1e-4) for rollouts in (15, 12)]
    assert comparison.folder_name(jobs[0]) == "comparison-tune-15-cps-0.001-0.0001-seed100"
    assert len({comparison.folder_name(job) for job in jobs}) == 2
    comparison.append(path, make_job("run", 25, "awm", 1, 1e-3))
    with pytest.raises(SystemExit, match="has runs of another cut"):
        comparison.record_cut(path, 2)


@fast
def test_a_cut_to_one_threshold_chooses_by_that_one():
    record = [*made_up_tuning(), {"stage": "cut", "row": None, "rollouts": 30, "thresholds": 1}]
    assert {job["threshold"] for job in comparison.tune_jobs(record) if job["row"] == "cps"} == {0.25e-4}
    assert comparison.chosen(record, "cps") == (1e-3, 0.25e-4)
    counts = comparison.plan(18, 30, 1)
    assert counts["tune"][0] == len(comparison.tune_jobs(record)) == 42


@fast
@pytest.mark.parametrize(
    ("stage", "row"),
    [*(("match", row) for row in ROWS if ROWS[row]["is_noisy"]), *itertools.product(["tune", "run"], ROWS)],
)
def test_every_command_is_one_that_the_script_takes(stage, row, monkeypatch, tmp_path):
    from common.run.command_line import parse_args

    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    setting = ROWS[row]
    threshold = setting["threshold"][1] if setting["threshold"] else None
    rollouts = {"match": 9, "tune": 15, "run": 30}[stage]
    job = make_job(stage, rollouts, row, 3, 1e-3, threshold)
    command = comparison.command_of(job, "any")
    assert command[1:4] == ["-m", "torch.distributed.run", "--standalone"]
    module = importlib.import_module(setting["script"].removesuffix(".py"))
    args = module.check(parse_args(module.Args, module.__doc__, command[command.index("--name") :]))
    if row == "dpo_offline":
        assert args.num_steps == 4 * rollouts and args.num_pair_prompts * args.group_size == 128 * rollouts
        assert (args.dpo_beta, args.num_pairs) == (100, 64)
    else:
        assert args.num_steps == rollouts and args.num_prompts * args.group_size == 128
        assert args.updates_per_rollout * args.epochs_per_rollout == 4
    assert (args.eval_prompts == module.Args().eval_prompts) == (stage == "run") and args.max_prompts == 128
    assert args.seed == 3 and args.learning_rate == 1e-3 and args.num_inference_steps == 10
    if row in ("flow_grpo", "diffusion_nft", "crd"):
        assert args.kl_coef == 0
    if setting["threshold"]:
        assert getattr(args, setting["threshold"][0]) == threshold
    if setting["is_noisy"]:
        assert args.noise_level == (0.9 if row == "cps" else 0.7)
    else:
        assert not {"noise_level", "sde_type"} & {field.name for field in fields(args)}


@fast
def test_the_window_of_mix_grpo_visits_every_position_at_any_length(monkeypatch, tmp_path):
    import mix_grpo
    from common.run.command_line import parse_args

    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    for rollouts in {n for cut, _ in comparison.CUTS for n in (cut, cut // 2)}:
        job = make_job("run", rollouts, "mix_grpo", 1, 1e-3, 1e-3)
        args = parse_args(mix_grpo.Args, "", comparison.options_of(job, "any"))
        assert {mix_grpo.draw_sde_steps(args, step)[0] for step in range(1, rollouts + 1)} == set(range(8))


@fast
def test_tuning_and_the_table_share_no_prompt(monkeypatch, tmp_path):
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    comparison.tuning_prompts()
    written = (tmp_path / "comparison_tuning_prompts.txt").stat().st_ino
    comparison.tuning_prompts()  # another run's start leaves it as it is
    assert (tmp_path / "comparison_tuning_prompts.txt").stat().st_ino == written
    assert [path.name for path in tmp_path.iterdir()] == ["comparison_tuning_prompts.txt"]
    tuning = (tmp_path / "comparison_tuning_prompts.txt").read_text().splitlines()
    held_out = (comparison.ROOT / "assets/eval_prompts.txt").read_text().splitlines()
    assert len(set(tuning)) == 128 and set(tuning) | set(held_out[:128]) == set(held_out)
    assert not set(tuning) & set(held_out[:128])
    assert not set(tuning) & set((comparison.ROOT / "assets/train_prompts.txt").read_text().splitlines())


# ---- choices ---------------------------------------------------------------------------------------------------------
def made_up_tuning():
    """Matching, where cps meets Flow-GRPO's divergence at a quarter of its clip; and tuning, where 1e-3 is best."""
    record = []
    for job in comparison.match_jobs():
        factor = job["threshold"] / ROWS[job["row"]]["threshold"][1]
        divergences = [2e-4, 4e-4] if job["row"] == "flow_grpo" else [1e-3 * factor, 1e-3 * factor]
        steps = [{"divergences": {"0": one, "8": 500 * one}} for one in divergences]
        record.append(job | {"failed": False, "steps": steps})
    for job in comparison.tune_jobs(record):
        reward = {3e-4: 0.7, 1e-3: 0.8, 3e-3: 0.9}[job["learning_rate"]]
        failed = job["learning_rate"] == 3e-3
        record.append(job | {"failed": failed, "evaluations": [{"ocr": 0.95}, {"ocr": reward, "sign_colour": 0.9}]})
    return record


@fast
def test_the_threshold_is_matched_and_the_last_reward_chooses():
    record = made_up_tuning()
    # 2.5e-4 is nearest to 3e-4, as a ratio
    assert comparison.matched(record, "cps") == (0.25e-4, pytest.approx(2.5 / 3), True)
    assert comparison.matched(record, "flow_grpo") == (1e-3, 1, True)
    tuned = [job for job in comparison.tune_jobs(record) if job["row"] == "cps"]
    assert sorted({job["threshold"] for job in tuned}) == [0.0625e-4, 0.25e-4, 1e-4]
    # RAM's bounds no Gaussian step: it is not matched, and is tuned around the shipped one
    assert sorted({job["threshold"] for job in comparison.tune_jobs(record) if job["row"] == "ram"}) == [0.75, 3, 12]
    assert "ram" not in {job["row"] for job in comparison.match_jobs()}
    # a choice that is given is not tuned
    assert comparison.chosen(record, "crd_kl") == (3e-3, None)
    assert "crd_kl" not in {job["row"] for job in comparison.tune_jobs(record)}
    assert comparison.chosen(record, "cps") == (1e-3, 0.0625e-4)  # the lowest of equal ones; 3e-3 has failed
    assert comparison.chosen(record, "awm") == (1e-3, None)
    # in whatever order the cores finished
    assert comparison.chosen(record[::-1], "cps") == (1e-3, 0.0625e-4)


def matching(divergences):
    """A record of Flow-GRPO's matching run, of divergence 1 at steps 0 to 8, and of cps's: {factor: of each step}."""
    record = []
    for job in comparison.match_jobs():
        factor = job["threshold"] / ROWS[job["row"]]["threshold"][1]
        of_steps = [1] * 9 if job["row"] == "flow_grpo" else divergences.get(factor)
        if job["row"] in ("flow_grpo", "cps"):
            steps = [{"divergences": {str(i): one for i, one in enumerate(of_steps)}}] if of_steps else []
            record.append(job | {"failed": not of_steps, "steps": steps})
    return record


@fast
def test_one_step_does_not_decide_the_match():
    # the last step of cps is hundreds of times the others: by a plain mean even the strictest is 5 times too far
    record = matching({factor: [factor] * 8 + [700 * factor] for factor in comparison.GRID})
    assert comparison.matched(record, "cps") == (0.25e-4, pytest.approx(700 ** (1 / 9) / 4), True)


@fast
def test_windows_count_each_step_once():
    steps = [{"divergences": divergences} for divergences in ({"0": 2, "1": 8}, {"1": 24})]
    assert comparison.mean_divergence({"steps": steps}) == pytest.approx((2 * 16) ** 0.5)


@fast
def test_where_nothing_is_near_or_all_are_equal_the_shipped_threshold_is_taken():
    far = matching({factor: [0.01 * factor] * 9 for factor in comparison.GRID})
    assert comparison.matched(far, "cps") == (1e-4, pytest.approx(0.01), False)
    # nothing is clipped from the shipped one on
    equal = matching({factor: [0.5 * min(factor, 1)] * 9 for factor in comparison.GRID})
    assert comparison.matched(equal, "cps") == (1e-4, pytest.approx(0.5), True)
    below = matching({factor: [0.5 if factor <= 1 else 8] * 9 for factor in comparison.GRID})
    assert comparison.matched(below, "cps") == (1e-4, pytest.approx(0.5), True)


@fast
def test_a_failed_matching_run_is_left_out(tmp_path):
    some = matching({1 / 4: [0.3] * 9, 4: [1.2] * 9})  # the others have failed at step 1
    assert comparison.matched(some, "cps") == (4e-4, pytest.approx(1.2), True)
    assert comparison.matched(matching({}), "cps") == (1e-4, None, False)
    (tmp_path / "args.json").write_text('{"git_hash": "abc"}')  # and left no metrics.jsonl
    assert comparison.measure(tmp_path, "cps") == {"git_hash": "abc", "evaluations": [], "steps": []}


# ---- resuming --------------------------------------------------------------------------------------------------------
@fast
def test_what_is_recorded_is_not_run_again(tmp_path, capsys):
    path = tmp_path / "record.jsonl"
    jobs = [make_job("run", 30, "awm", seed, 1e-3) for seed in range(1, 6)]
    path.write_text(json.dumps(jobs[1] | {"failed": False}) + "\n")
    done = []

    def stops_at_four(job, _path, core):
        if job["seed"] == 4:
            raise RuntimeError("the disk is full")
        done.append((job["seed"], core))
        return job | {"failed": False}

    with pytest.raises(RuntimeError, match="the disk is full"):
        comparison.work_through(jobs, path, [7], stops_at_four)
    assert done == [(1, 7), (3, 7)] and [line["seed"] for line in comparison.read_record(path)] == [2, 1, 3]
    capsys.readouterr()
    comparison.work_through(jobs, path, [0, 1], lambda job, *_: job | {"failed": job["seed"] == 5})
    printed = sorted(capsys.readouterr().out.splitlines())
    assert [line[:7] for line in printed] == ["1 of 2:", "2 of 2:"]
    assert {line[8:] for line in printed} == {
        "comparison-run-30-awm-0.001-seed4",
        "comparison-run-30-awm-0.001-seed5, failed",
    }
    assert sorted(line["seed"] for line in comparison.read_record(path)) == [1, 2, 3, 4, 5]
    comparison.work_through(jobs, path, [0], lambda *_: pytest.fail("all are recorded"))
    for other in (make_job("run", 30, "awm", 1, 3e-3), make_job("run", 25, "awm", 1, 1e-3)):
        assert not comparison.is_recorded(other, comparison.read_record(path))


@fast
def test_a_noisy_policy_is_evaluated_right_after_its_run(tmp_path):
    path = tmp_path / "record.jsonl"
    jobs = [make_job("run", 30, "cps", 1, 1e-3, 1e-4), make_job("run", 30, "awm", 1, 1e-3)]
    jobs.append(make_job("tune", 30, "cps", 1, 1e-3, 1e-4))
    comparison.work_through(jobs, path, [0], lambda job, *_: job | {"failed": False})
    done = [(line["stage"], line["row"]) for line in comparison.read_record(path)]
    assert done == [("run", "cps"), ("evaluate", "cps"), ("run", "awm"), ("tune", "cps")]
    expected = next(
        job for job in comparison.evaluate_jobs(made_up_tuning()) if (job["row"], job["seed"]) == ("cps", 1)
    )
    assert comparison.is_recorded(expected, comparison.read_record(path))


@fast
def test_a_half_written_last_line_is_ignored_and_replaced(tmp_path):
    path = tmp_path / "record.jsonl"
    for half in ('{"stage": "ru', '{"stage": "run"}'):  # the second lacks its newline alone
        path.write_text('{"stage": "match"}\n' + half)
        assert comparison.read_record(path) == [{"stage": "match"}]
        comparison.append(path, {"stage": "tune"})
        assert path.read_text() == '{"stage": "match"}\n{"stage": "tune"}\n'
    path.unlink()
    comparison.append(path, {"stage": "tune"})
    assert comparison.read_record(path) == [{"stage": "tune"}]


@fast
def test_only_numbers_that_are_not_finite_make_a_failed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    monkeypatch.setattr(comparison, "measure", lambda *_: {"steps": [{}] * 30})
    job = make_job("run", 30, "awm", 1, 1e-3)
    said = "step 3: not a finite number: actor/loss = nan; is --learning_rate too high?"
    for code, text, failed in [(0, "", False), (1, said, True)]:
        monkeypatch.setattr(comparison, "command_of", lambda *_, c=code, t=text: ["sh", "-c", f'echo "{t}"; exit {c}'])
        assert comparison.train(job, "any", 0)["failed"] is failed
    monkeypatch.setattr(comparison, "command_of", lambda *_: ["sh", "-c", "echo no space left; exit 1"])
    with pytest.raises(RuntimeError, match="exited with 1"):
        comparison.train(job, "any", 0)


@fast
def test_a_run_that_was_stopped_is_not_a_finished_one(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    monkeypatch.setattr(comparison, "command_of", lambda *_: ["sh", "-c", "test $OMP_NUM_THREADS = 1"])
    for row, num_steps in [("awm", 30), ("dpo_offline", 120)]:
        job = make_job("run", 30, row, 1, 1e-3)
        for found in (num_steps - 1, 0):
            monkeypatch.setattr(comparison, "measure", lambda *_, n=found: {"steps": [{}] * n})
            with pytest.raises(RuntimeError, match=f"any: {found} of {num_steps} steps: start the comparison again"):
                comparison.train(job, "any", 0)
        monkeypatch.setattr(comparison, "measure", lambda *_, n=num_steps: {"steps": [{}] * n})
        assert comparison.train(job, "any", 0)["failed"] is False


@fast
def test_a_folder_of_other_options_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    monkeypatch.setattr(comparison, "measure", lambda *_: {"steps": [{}] * 30})
    monkeypatch.setattr(comparison, "command_of", lambda *_: ["true"])
    job = make_job("run", 30, "awm", 1, 1e-3)
    begun = ["/any/contrib/awm.py", *comparison.options_of(job, "any"), "--resume", "latest"]
    (tmp_path / "any").mkdir()
    (tmp_path / "any/args.json").write_text(json.dumps({"command": shlex.join(begun)}))
    assert comparison.train(job, "any", 0)["failed"] is False
    monkeypatch.setattr(comparison, "IMAGES", 64)
    with pytest.raises(RuntimeError, match="any: other options have begun it: remove it"):
        comparison.train(job, "any", 0)


@fast
def test_a_run_that_saved_nothing_is_evaluated_as_before_training(tmp_path, monkeypatch):
    path = tmp_path / "record.jsonl"
    record = made_up_record()
    for line in record:
        if line["stage"] == "run" and line["row"] == "cps" and line["seed"] in (3, 4):
            line["failed"] = True
            line["evaluations"] = line["evaluations"][: 1 if line["seed"] == 3 else 2]
    path.write_text("".join(json.dumps(line) + "\n" for line in record))
    monkeypatch.setattr(comparison, "own_sampler", lambda run, name, core: run | {"name": name})
    jobs = [job for job in comparison.evaluate_jobs(record) if job["row"] == "cps"]
    names = {job["seed"]: comparison.do_job(job, path, 0)["name"] for job in jobs}
    assert names[0] == names[3] == ""
    assert names[4] == "comparison-run-30-cps-0.001-6.25e-06-seed4" and names[5].endswith("seed5")


@fast
def test_an_evaluations_line_says_its_code_seconds_and_images(monkeypatch):
    job = make_job("evaluate", 30, "cps", 1, 1e-3, 1e-4)
    printed = "a line of a library\n" + json.dumps({"images": 256, "ocr": 0.5}) + "\n"
    monkeypatch.setattr(comparison, "child", lambda *_, **__: subprocess.CompletedProcess([], 0, printed))
    line = comparison.own_sampler(job, "any", 0)
    assert line | job == line and line["ocr"] == 0.5 and line["images"] == 256 and line["seconds"] >= 0
    assert set(line) - set(job) == {"ocr", "images", "seconds", "git_hash"}


@fast
def test_a_run_again_prints_its_command_and_the_verdict(tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.jsonl"
    record = made_up_record()
    path.write_text("".join(json.dumps(line) + "\n" for line in record))
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    (recorded,) = [line for line in record if (line["stage"], line["row"], line["seed"]) == ("run", "cps", 3)]
    slower = recorded | {"evaluations": [point | {"seconds": 999} for point in recorded["evaluations"]]}
    other = slower | {"evaluations": [point | {"ocr": point["ocr"] + 1e-9} for point in slower["evaluations"]]}
    for now, verdict in [(slower, "the same numbers"), (other, "other numbers")]:
        monkeypatch.setattr(comparison, "train", lambda job, name, core, line=now: line)
        comparison.again(path, "cps", 3, 0)
        printed = capsys.readouterr().out
        name = "comparison-again-cps-seed3-2" if verdict == "the same numbers" else "comparison-again-cps-seed3-3"
        command = f"OMP_NUM_THREADS=1 taskset -c 0 torchrun --standalone flow_grpo.py --name {name} --seed 3 "
        assert printed.startswith(command)
        (tmp_path / name).mkdir()  # someone has used the command
        assert "--clip_range 6.25e-06" in printed and f"{verdict} at all evaluations" in printed


# ---- the table -------------------------------------------------------------------------------------------------------
def made_up_record():
    """Flow-GRPO at .8 + seed / 100, the tested rows .1 above it; offline DPO in three seeds, slower than the others."""
    record = made_up_tuning()
    for row in ("flow_grpo", *comparison.TESTED, "dpo_offline"):
        for seed in range(1, 4 if row == "dpo_offline" else 9):
            rewards = [0.6, 0.7, 0.8 + seed / 100 + (0.1 if row in comparison.TESTED else 0)]
            evaluations = []
            for i, reward in enumerate(rewards):
                seconds = i * (50 if row == "cps" else 100)
                evaluations.append({"images": 1920 * i, "updates": 60 * i, "seconds": seconds, "ocr": reward})
                evaluations[-1] |= {
                    "sign_colour": 0.9 - i / 10,
                    "jpeg_compressibility": -0.005,
                    "diversity": 0.2,
                    "drift": i / 9,
                }
            num_steps = 120 if row == "dpo_offline" else 30
            steps = [{"seconds": evaluations[-1]["seconds"] / num_steps}] * num_steps
            steps[:seed] = [{"seconds": 999}] * seed  # the machine was shared, for fewer than half of the steps
            line = make_job("run", 30, row, seed, *comparison.chosen(record, row)) | {"failed": False, "steps": steps}
            line["git_hash"] = "1234567"
            record.append(line | {"evaluations": evaluations})
            if ROWS[row]["threshold"]:
                record.append(make_job("evaluate", 30, row, seed) | {"ocr": 0.5 + seed / 100})
    record.append(make_job("evaluate", 30, "cps", 0) | {"ocr": 0.432})
    return record


def tables(text):
    """[{row: {column: cell}}] of the tables, the line before training included."""
    found = []
    for table in text.split("\n\n"):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        found.append({row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows})
    return found


@fast
def test_the_tables_of_a_made_up_record():
    start, base, costs, seeds, tuning = tables(comparison_table.table_text(made_up_record()))
    rows = ["flow_grpo", "cps", "grpo_guard", "flow_dppo", "diffusion_nft", "dpo_offline (apart)"]
    assert list(costs) == list(seeds) == rows and list(base) == rows[1:] and list(start) == ["before training", *rows]
    assert start["before training"]["reward by the ODE"] == "0.600"
    # .81 to .88 have a deviation of .0245: half is 2.365 x .0245 / sqrt(8) = .0205
    assert start["flow_grpo"]["reward by the ODE"] == "0.845, +0.245 [+0.225, +0.265]"
    assert start["cps"]["sign_colour"] == "0.70, -0.20 [-0.20, -0.20]"
    assert base["cps"]["reward by the ODE"] == "+0.100 [+0.100, +0.100]"
    assert {base[row]["p (Holm)"] for row in comparison.TESTED} == {"0.031"}
    assert base["dpo_offline (apart)"]["p (Holm)"] == ""
    noisy = [start[row]["by training's noisy steps"] for row in ("flow_grpo", "cps", "diffusion_nft")]
    # before training Flow-GRPO's is not recorded, that of cps is .432, and NFT's steps have no noise
    assert noisy == ["0.545", "0.545, +0.113 [+0.093, +0.133]", ""]
    assert base["cps"]["by training's noisy steps"] == "+0.000 [+0.000, +0.000]"
    assert base["cps"]["sign_colour"] == "+0.00 [+0.00, +0.00]"
    lower = [base[row]["reward over the next lower row's"] for row in ("cps", "dpo_offline (apart)")]
    assert lower == ["flow_grpo +0.100 [+0.100, +0.100]", ""]  # offline DPO's .82 is the lowest
    # the quickest row, cps, is at 100 s when it ends; the others are at their second evaluation then
    after = [(costs[row]["reward after 100 s"], costs[row]["against Flow-GRPO's"]) for row in ("cps", "flow_grpo")]
    assert after == [("0.945", "+0.245 [+0.225, +0.265]"), ("0.700", "")]
    assert [costs[row]["seconds"] for row in rows] == ["200", "100", "200", "200", "200", "200"]
    # .7 + .245 x .592 is Flow-GRPO's .845, at 1.592 of two intervals; those of cps take half as long
    needed = [(costs[row]["images needed"], costs[row]["seconds needed"]) for row in rows[:3]]
    assert needed == [("1.00", "1.00"), ("0.80", "0.40"), ("0.80", "0.80")]
    assert costs["dpo_offline (apart)"]["images needed"] == "1.00"  # .82, as Flow-GRPO's seeds 1 to 3
    assert costs["cps"]["sign_colour at Flow-GRPO's reward"] == "0.74"  # .9 - .1 x 1.592
    each = [" ".join(f"{base + seed / 100:.3f}" for seed in range(1, 9)) for base in (0.8, 0.5)]
    assert list(seeds["flow_grpo"].values()) == each
    assert tuning["awm"] == {"threshold (times the matched)": "", "0.0001": "", "0.0003": "0.700 (0.90)"} | {
        "0.001": "**0.800 (0.90)**",
        "0.003": "failed",
        "0.01": "",
    }
    assert tuning["cps"]["threshold (times the matched)"] == "0.0001 (4)"  # the last of its three


@fast
def test_a_choice_at_the_end_of_what_may_be_tried_is_marked(monkeypatch):
    record = made_up_record()
    assert comparison_table.choice(record, "cps") == "0.001, 6.25e-06"  # a quarter of the matched one
    assert comparison_table.choice(record, "ram") == "0.001, 0.75"  # its lowest of equal ones
    monkeypatch.setattr(comparison_table, "WIDEST", comparison.AROUND)
    monkeypatch.setattr(comparison_table, "RATES", (1e-3, 3e-3))
    assert comparison_table.choice(record, "cps") == "0.001*, 6.25e-06*"
    assert comparison_table.choice(record, "crd_kl") == "0.003 (given)"


@fast
def test_seconds_are_those_of_the_first_machine():
    record = made_up_record()
    for line in record:
        if "steps" in line and line["stage"] == "run":
            later = line["row"] in ("cps", "grpo_guard")
            line["git_hash"] = "1234567" if later else "c6c8dfa0000"
        if line["stage"] == "tune" and line["row"] == "cps":
            line |= {"git_hash": "e9841c60000", "steps": [{"seconds": one} for one in (4, 5, 99)]}
    *_, costs, _, _ = tables(comparison_table.table_text(record))
    # 30 steps of 5 s are those of its tuning; Guard was never there, and is not timed
    timed = [costs[row]["seconds"] for row in ("flow_grpo", "cps", "grpo_guard")]
    assert timed == ["200", "150", ""]
    assert costs["cps"]["reward after 150 s"].startswith("0.945")
    guard = costs["grpo_guard"]
    assert [guard["reward after 150 s"], guard["seconds needed"], guard["images needed"]] == ["", "", "0.80"]
    for line in record:
        if "git_hash" in line:
            line["git_hash"] = "1234567"
    assert comparison_table.step_seconds(record, "grpo_guard") == pytest.approx(200 / 30)  # a record of one machine


@fast
def test_what_a_row_needs_for_flow_grpos_reward():
    """By hand: Flow-GRPO ends at .84 (seeds 1 to 8: .845); .6 to .7 to the end are two equal intervals."""
    record = made_up_record()
    lines = [line for line in record if (line["stage"], line["row"]) == ("run", "cps")]
    rewards = [0.6, 0.9, 0.945]  # there before its second evaluation
    for line in lines:
        for point, reward in zip(line["evaluations"], rewards, strict=True):
            point["ocr"] = reward
    assert comparison_table.share_needed(record, "cps", "images") == "< 0.50"
    assert comparison_table.share_needed(record, "cps", "seconds") == "< 0.25"
    for line in lines:
        line["evaluations"][1]["ocr"], line["evaluations"][2]["ocr"] = 0.9, 0.8  # there, and below it again
    assert comparison_table.share_needed(record, "cps", "images") == "never"
    for line in lines:
        line["evaluations"][0]["ocr"], line["evaluations"][1]["ocr"], line["evaluations"][2]["ocr"] = 0.9, 0.7, 0.99
    assert comparison_table.share_needed(record, "cps", "images") == "0.75"  # the last time: (.845 - .7) / .29 = .5
    lines[0]["seed"] = 9
    record.remove(lines[7])  # cps has the seeds 2 to 7 of Flow-GRPO's: mean .845, too
    assert comparison_table.share_needed(record, "cps", "images") == "0.75"
    lines = [line for line in record if (line["stage"], line["row"]) == ("run", "dpo_offline")]
    for line in lines:
        line["evaluations"][-1]["ocr"] = 0.9
    assert comparison_table.share_needed(record, "dpo_offline", "images") == "1.00"


@fast
def test_the_table_says_which_threshold_could_not_be_matched():
    record = made_up_record()
    for line in record:
        if line["stage"] == "match" and line["row"] == "cps":
            line["steps"] = [{"divergences": {"0": 60, "8": 0.06}}]  # sqrt(60 x .06) = 1.9, of Flow-GRPO's .0067
        if line["stage"] in ("tune", "run") and line["row"] == "cps":
            line["threshold"] = 1e-4
    (row,) = [line for line in comparison_table.table_text(record).splitlines() if line.startswith("| cps | 0.001")]
    assert "| 0.001, 0.0001 (not matched: the shipped one allows 2.8e+02 times Flow-GRPO's divergence) |" in row


@fast
def test_a_failed_run_keeps_its_last_values_and_shortens_nothing(monkeypatch, tmp_path):
    record = made_up_record()
    (failed,) = [line for line in record if (line["stage"], line["row"], line["seed"]) == ("run", "flow_grpo", 2)]
    failed["failed"] = True
    failed["evaluations"] = failed["evaluations"][:2]
    failed["steps"] = [{"seconds": 3}]
    text = comparison_table.table_text(record)
    assert "| reward after 100 s |" in text and "flow_grpo, 1 failed" in text
    drawn = []
    plot = comparison_table.plt.Axes.plot
    keep = lambda self, x, y, *form, **style: drawn.append((style, x, y)) or plot(self, x, y, *form, **style)
    monkeypatch.setattr(comparison_table.plt.Axes, "plot", keep)
    comparison_table.draw(record, tmp_path / "curves.png")
    means = [(x, y) for style, x, y in drawn if style.get("label") == "flow_grpo"]
    assert means[0][0] == [0, 1920, 3840]  # images, of all evaluations
    assert means[0][1][2] == pytest.approx((7 * 0.8 + (1 + 3 + 4 + 5 + 6 + 7 + 8) / 100 + 0.7) / 8)  # .7: its last


@fast
def test_no_p_before_all_pairs_are_there():
    record = [line for line in made_up_record() if (line["stage"], line["row"], line["seed"]) != ("run", "cps", 8)]
    assert comparison_table.adjusted_p(record) == {}
    assert "0.031" not in comparison_table.table_text(record)


@fast
def test_the_reward_after_equal_seconds():
    line = {"evaluations": [{"seconds": 10, "ocr": 0.5}, {"seconds": 20, "ocr": 0.7}, {"seconds": 40, "ocr": 0.8}]}
    rewards = [comparison_table.at_seconds(line, seconds) for seconds in (0, 10, 15, 30, 50)]
    assert rewards == pytest.approx([0.5, 0.5, 0.6, 0.75, 0.8])


@fast
def test_the_picture_is_drawn(tmp_path):
    comparison_table.draw(made_up_record(), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# ---- windows ---------------------------------------------------------------------------------------------------------
@fast
@pytest.mark.parametrize("rollouts", [30, 25, 20])
@pytest.mark.parametrize("row", ["mix_grpo", "tempflow_grpo", "flow_grpo"])
def test_an_evaluation_has_windows_of_the_whole_run(row, rollouts, monkeypatch):
    """MixGRPO's eight windows once each. Nothing is sampled here."""
    module = importlib.import_module(ROWS[row]["script"].removesuffix(".py"))
    windows = []
    monkeypatch.setattr("common.models.loading.find_family", lambda *_: None)
    monkeypatch.setattr("common.models.loading.load_model", lambda *_: None)
    monkeypatch.setattr("common.rewards._loading.load_rewards", lambda *_: {"ocr": None})
    monkeypatch.setattr("common.scoring.score_images", lambda *_: torch.zeros(1, 1))
    monkeypatch.setattr(module, "make_request", lambda *_, sde_steps: windows.append(sde_steps))
    monkeypatch.setattr(module, "sample_locally", lambda *_: SimpleNamespace(images=[]))
    told = comparison.score_by_own_sampler(make_job("run", rollouts, row, 1, 1e-3, 1e-3), None)
    assert told == {"images": 256, "ocr": 0}
    expected = {"mix_grpo": {(i, i + 1) for i in range(8)}, "flow_grpo": {tuple(range(9))}}
    assert len(windows) == 8
    if row in expected:
        assert set(windows) == expected[row]
    else:
        assert len(set(windows)) >= 7 and set(windows) <= {(i,) for i in range(9)}


@fast
@pytest.mark.parametrize(("row", "positions"), [("mix_grpo", 8), ("tempflow_grpo", 9), ("flow_grpo", 1)])
def test_matching_sees_every_position_of_the_window(row, positions, monkeypatch, tmp_path):
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    script = ROWS[row]["script"].removesuffix(".py")
    module = importlib.import_module(script)
    for name in ("accumulate_gradients", "update", "draw_sde_steps"):
        monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    seen = []
    monkeypatch.setattr(module, "prepare", lambda args: None)
    main = lambda args, _: seen.extend(module.draw_sde_steps(args, step) for step in range(1, args.num_steps + 1))
    monkeypatch.setattr(module, "main", main)
    job = make_job("match", comparison.MATCH_ROLLOUTS, row, 100, 1e-3, 1e-3)
    comparison.run_with_divergence(script, comparison.options_of(job, "any"))
    assert len(set(seen)) == positions and {i for window in seen for i in window} == set(range(9))


@fast
def test_a_step_is_measured_under_its_number_in_the_whole_schedule(monkeypatch):
    """mix_grpo.py trains on a request that begins at its window, whose steps are 0 and 1 in it."""
    import mix_grpo

    means = torch.ones(4, 2, 3)
    sampled = SimpleNamespace(prev_sample_means=0 * means, transition_stds=torch.tensor([1.0, 2.0]).expand(4, 2))
    request = SimpleNamespace(sde_steps=(0, 1), step_numbers=(5, 6), select=lambda rows: None)
    batch = SimpleNamespace(request=request, trajectories=SimpleNamespace(select=lambda rows: sampled))
    found = {}

    def main(args, _):
        mix_grpo.accumulate_gradients(args, None, batch, None)
        found.update(mix_grpo.update())

    fakes = {"prepare": lambda args: None, "main": main, "draw_sde_steps": None, "update": lambda: {"loss": 1}}
    fakes |= {"check": lambda args: args, "accumulate_gradients": lambda *_: None}
    fakes["recompute_log_probs"] = lambda *_: SimpleNamespace(prev_sample_means=means)
    for name, fake in fakes.items():
        monkeypatch.setattr(mix_grpo, name, fake)
    comparison.run_with_divergence("mix_grpo", ["--rollout", "local"])
    # 1 / (2 std^2), each step's std is its own
    assert found == {"loss": 1, f"{comparison.DIVERGENCE}5": 0.5, f"{comparison.DIVERGENCE}6": 0.125}


# ---- one tiny run ----------------------------------------------------------------------------------------------------
def test_the_divergence_and_the_evaluation_of_a_tiny_run(tmp_path, monkeypatch):
    """The divergence is Guard's own metric; with no noisy step an evaluation gives the trainer's rewards."""
    monkeypatch.chdir(comparison.ROOT)  # as the harness starts it
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    for name, value in {"IMAGES": 16, "UPDATES": 2, "NUM_PROMPTS": 4}.items():
        monkeypatch.setattr(comparison, name, value)
    name = str(tmp_path / "tiny")
    job = make_job("match", 1, "grpo_guard", 1, 1e-3, 5e-4)
    line = comparison.train(job, name, 0)
    (step,) = line["steps"]
    # ppo_kl is the mean over the rollout's two mini-batches, of which the first has 0
    divergences = step["divergences"]
    assert list(divergences) == [str(i) for i in range(9)] and min(divergences.values()) > 1e-7
    assert sum(divergences.values()) / 9 == pytest.approx(2 * step["ppo_kl"], rel=1e-4)
    evaluation = line["evaluations"][-1]  # the other one is of step 0
    assert evaluation["images"] == 16 and evaluation["updates"] == 2 and evaluation["seconds"] > 0
    module = importlib.import_module("grpo_guard")
    noisy = comparison.score_by_own_sampler(job, tmp_path / "tiny", chunks=2)
    monkeypatch.setattr(module, "draw_sde_steps", lambda *_: ())
    by_ode = comparison.score_by_own_sampler(job, tmp_path / "tiny", chunks=2)
    # its folder is taken again by the same command alone
    assert comparison.train(job, name, 0)["steps"] == line["steps"]
    monkeypatch.setattr(comparison, "IMAGES", 32)
    with pytest.raises(RuntimeError, match="tiny: other options have begun it"):
        comparison.train(job, name, 0)
    assert by_ode["ocr"] == pytest.approx(evaluation["ocr"], abs=0.03)  # a digit of one image, read otherwise
    assert by_ode["sign_colour"] == pytest.approx(evaluation["sign_colour"], abs=1e-3)
    assert by_ode["jpeg_compressibility"] == pytest.approx(evaluation["jpeg_compressibility"], rel=1e-3)
    assert noisy["jpeg_compressibility"] != pytest.approx(by_ode["jpeg_compressibility"], rel=1e-3)
    assert list(noisy) == ["images", "ocr", "sign_colour", "jpeg_compressibility"]


def test_tuning_widens_until_no_neighbour_is_better():
    """A reward that grows with the threshold and falls with the rate away from 1e-3, tried from the first grid on."""
    shipped = ROWS["grpo_guard"]["threshold"][1]
    record = [make_job("cut", 20, None, 0) | {"thresholds": 3}]
    for row, factors in (("flow_grpo", (1,)), ("grpo_guard", comparison.GRID)):
        for factor in factors:
            job = make_job("match", comparison.MATCH_ROLLOUTS, row, 100, 1e-3, ROWS[row]["threshold"][1] * factor)
            divergence = 1.0 if factor in (1, 1 / 16) and row == "flow_grpo" or factor == 1 / 16 else 100.0
            record.append(job | {"failed": False, "steps": [{"divergences": {"0": divergence}}]})

    def tried(job):
        score = -abs(math.log(job["learning_rate"] / 1e-3)) + 0.1 * math.log((job["threshold"] or 1) / shipped)
        return job | {"failed": False, "steps": [], "evaluations": [{"ocr": score}]}

    others = [row for row in ROWS if row != "grpo_guard"]
    record += [tried(job) for job in comparison.tune_jobs(record) if job["row"] == "grpo_guard"]
    with pytest.MonkeyPatch.context() as patch:
        for row in others:
            patch.delitem(comparison.ROWS, row)
        rounds = 0
        while jobs := comparison.widening_jobs(record):
            assert not any(comparison.is_recorded(job, record) for job in jobs)
            record += [tried(job) for job in jobs]
            rounds += 1
        assert comparison.chosen(record, "grpo_guard") == (1e-3, 4 * shipped)  # 64 times the matched 16th: the widest
    assert rounds == 3  # two thresholds more, then the rates beside the last one
