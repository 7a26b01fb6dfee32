"""benchmarks/comparison.py and its table: statistics by hand, the design's counts, resuming, and one tiny run."""

import importlib
import itertools
import json
from dataclasses import fields

from benchmarks import comparison, comparison_table
from benchmarks.comparison import ROWS, make_job

import pytest

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
    jobs |= {"run": comparison.run_jobs(record), "evaluate": comparison.evaluate_jobs()}
    counts = {stage: len(of_stage) for stage, of_stage in jobs.items()}
    # six trust regions: one run of Flow-GRPO and 5 x 5; 6 x 3 x 3 and 6 x 3; 5 rows x 8 and 7 x 6 seeds; 4 x 9 + 2 x 7
    assert counts == {"match": 26, "tune": 72, "run": 82, "evaluate": 50}
    assert {stage: runs for stage, (runs, _) in stages.items()} == counts
    assert all(len({json.dumps(job) for job in of_stage}) == len(of_stage) for of_stage in jobs.values())
    assert not {job["seed"] for job in jobs["run"]} & {comparison.TUNE_SEED}
    # of match: 1 x 5 + 3 x 5 x 5 rollouts of cost 1 and 2 x 5 x 5 of .6, 26 evaluations of .9 rollouts and starts of 12
    seconds = 18 * (80 + 0.6 * 50 + 0.9 * 26) + 12 * 26
    assert stages["match"][1] == pytest.approx(seconds / 7200)


@fast
def test_the_plan_cuts_rollouts_before_thresholds(capsys):
    def printed(seconds):
        comparison.print_plan(seconds)
        return capsys.readouterr().out

    assert "30 rollouts, 3 thresholds: nothing is cut" in printed(18)
    hours = [sum(h for _, h in comparison.plan(1000, *cut).values()) / 1000 for cut in comparison.CUTS]
    assert hours == sorted(hours, reverse=True)
    for (rollouts, thresholds), hours_per_second in list(zip(comparison.CUTS, hours, strict=True))[1:]:
        text = printed(0.97 * comparison.BUDGET_H / hours_per_second)
        assert f"{rollouts} rollouts, {thresholds} thresholds: cut" in text


@fast
@pytest.mark.parametrize(
    ("stage", "row"),
    [*(("match", row) for row in ROWS if ROWS[row]["threshold"]), *itertools.product(["tune", "run"], ROWS)],
)
def test_every_command_is_one_that_the_script_takes(stage, row, monkeypatch, tmp_path):
    from common.options import parse_args

    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    setting = ROWS[row]
    threshold = setting["threshold"][1] if setting["threshold"] else None
    job = make_job(stage, row, 3, 1e-3, threshold)
    command = comparison.command_of(job, "any")
    assert command[1:4] == ["-m", "torch.distributed.run", "--standalone"]
    module = importlib.import_module(setting["script"].removesuffix(".py"))
    args = module.check(parse_args(module.Args, module.__doc__, command[command.index("--name") :]))
    rollouts = {"match": 5, "tune": 15, "run": 30}[stage]
    if row == "dpo_offline":
        assert args.num_steps == 4 * rollouts and args.num_pair_prompts * args.group_size == 128 * rollouts
    else:
        assert args.num_steps == rollouts and args.num_prompts * args.group_size == 128
        assert args.updates_per_rollout * args.epochs_per_rollout == 4
    assert (args.eval_prompts == module.Args().eval_prompts) == (stage == "run") and args.max_prompts == 128
    assert args.seed == 3 and args.learning_rate == 1e-3 and args.num_inference_steps == 10
    if setting["threshold"]:
        assert getattr(args, setting["threshold"][0]) == threshold
        assert args.noise_level == (0.9 if row == "cps" else 0.7)
    else:
        assert not {"noise_level", "sde_type"} & {field.name for field in fields(args)}
    if row == "mix_grpo" and stage != "match":
        assert {module.trained_steps(args, step)[0] for step in range(1, rollouts + 1)} == set(range(8))


@fast
def test_tuning_and_the_table_share_no_prompt(monkeypatch, tmp_path):
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    comparison.tuning_prompts()
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
        record.append(job | {"failed": False, "steps": [{"divergence": one} for one in divergences]})
    for job in comparison.tune_jobs(record):
        reward = {3e-4: 0.7, 1e-3: 0.8, 3e-3: 0.9}[job["learning_rate"]]
        failed = job["learning_rate"] == 3e-3
        record.append(job | {"failed": failed, "evaluations": [{"ocr": 0.95}, {"ocr": reward}]})
    return record


@fast
def test_the_threshold_is_matched_and_the_last_reward_chooses():
    record = made_up_tuning()
    assert comparison.matched_threshold(record, "cps") == 0.25e-4  # 2.5e-4 is nearest to 3e-4, as a ratio
    assert comparison.matched_threshold(record, "flow_grpo") == 1e-3
    tuned = [job for job in comparison.tune_jobs(record) if job["row"] == "cps"]
    assert sorted({job["threshold"] for job in tuned}) == [0.0625e-4, 0.25e-4, 1e-4]
    assert comparison.chosen(record, "cps") == (1e-3, 0.0625e-4)  # the first of equal ones; 3e-3 has failed
    assert comparison.chosen(record, "awm") == (1e-3, None)


# ---- resuming --------------------------------------------------------------------------------------------------------
@fast
def test_what_is_recorded_is_not_run_again(tmp_path):
    path = tmp_path / "record.jsonl"
    jobs = [make_job("run", "awm", seed, 1e-3) for seed in range(1, 6)]
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
    comparison.work_through(jobs, path, [0, 1], lambda job, *_: job)
    assert sorted(line["seed"] for line in comparison.read_record(path)) == [1, 2, 3, 4, 5]
    comparison.work_through(jobs, path, [0], lambda *_: pytest.fail("all are recorded"))
    assert not comparison.is_recorded(make_job("run", "awm", 1, 3e-3), comparison.read_record(path))


@fast
def test_only_numbers_that_are_not_finite_make_a_failed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    monkeypatch.setattr(comparison, "measure", lambda *_: {"steps": []})
    job = make_job("run", "awm", 1, 1e-3)
    said = "step 3: not a finite number: actor/loss = nan; is --learning_rate too high?"
    for code, text, failed in [(0, "", False), (1, said, True)]:
        monkeypatch.setattr(comparison, "command_of", lambda *_, c=code, t=text: ["sh", "-c", f'echo "{t}"; exit {c}'])
        assert comparison.train(job, "any", 0)["failed"] is failed
    monkeypatch.setattr(comparison, "command_of", lambda *_: ["sh", "-c", "echo no space left; exit 1"])
    with pytest.raises(RuntimeError, match="exited with 1"):
        comparison.train(job, "any", 0)


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
        assert printed.startswith("torchrun --standalone flow_grpo.py --name comparison-again-cps-seed3 --seed 3 ")
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
                    "sign_colour": 0.9,
                    "jpeg_compressibility": -0.005,
                    "diversity": 0.2,
                    "drift": i / 9,
                }
            line = make_job("run", row, seed, *comparison.chosen(record, row)) | {"failed": False, "steps": []}
            record.append(line | {"evaluations": evaluations})
            if ROWS[row]["threshold"]:
                record.append(make_job("evaluate", row, seed) | {"ocr": 0.5 + seed / 100})
    record.append(make_job("evaluate", "cps", 0) | {"ocr": 0.432})
    return record


@fast
def test_the_table_of_a_made_up_record():
    lines = comparison_table.table_text(made_up_record()).splitlines()
    header, _, before, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    cells = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    assert list(cells) == ["flow_grpo", "cps", "grpo_guard", "flow_dppo", "diffusion_nft", "dpo_offline (apart)"]
    reward = "reward by the ODE: 3840 images, 120 optimizer steps"
    assert before[header.index(reward)] == "0.600"
    assert cells["flow_grpo"][reward] == "0.845" and cells["flow_grpo"]["p (Holm)"] == ""
    assert cells["cps"][reward] == "0.945, +0.100 [+0.100, +0.100]"
    assert {cells[row]["p (Holm)"] for row in comparison.TESTED} == {"0.031"}
    assert cells["dpo_offline (apart)"]["p (Holm)"] == ""
    # the quickest row, cps, is at 100 s when it ends; the others are at their second evaluation then
    assert cells["cps"]["after 100 s"].startswith("0.945, +0.245 [") and cells["flow_grpo"]["after 100 s"] == "0.700"
    assert cells["cps"]["reward by its own sampler"] == "0.545, +0.000 [+0.000, +0.000] (before training 0.432)"
    # NFT samples by the ODE: .945 - .545
    assert cells["diffusion_nft"]["reward by its own sampler"] == "0.945, +0.400 [+0.400, +0.400]"
    each = cells["flow_grpo"]["reward of each seed by the ODE; by its own sampler"]
    assert each == "; ".join(" ".join(f"{base + seed / 100:.3f}" for seed in range(1, 9)) for base in (0.8, 0.5))
    assert cells["cps"]["learning rate, threshold"] == "0.001, 6.25e-06"


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


# ---- one tiny run ----------------------------------------------------------------------------------------------------
def test_the_divergence_and_the_evaluation_of_a_tiny_run(tmp_path, monkeypatch):
    """The divergence is Guard's own metric; with no noisy step an evaluation gives the trainer's rewards."""
    monkeypatch.chdir(comparison.ROOT)  # as the harness starts it
    monkeypatch.setattr(comparison, "RUNS", tmp_path)
    for name, value in {"IMAGES": 16, "UPDATES": 2, "NUM_PROMPTS": 4, "MATCH_ROLLOUTS": 1}.items():
        monkeypatch.setattr(comparison, name, value)
    guard = ROWS["grpo_guard"]
    monkeypatch.setitem(guard, "options", f"{guard['options']} --output_dir {tmp_path}")
    job = make_job("match", "grpo_guard", 1, 1e-3, 5e-4)
    line = comparison.train(job, "tiny", 0)
    (step,) = line["steps"]
    # ppo_kl is the mean over the rollout's two mini-batches, of which the first has 0
    assert step["divergence"] > 1e-6 and step["divergence"] == pytest.approx(2 * step["ppo_kl"], rel=1e-4)
    (evaluation,) = line["evaluations"]
    assert evaluation["images"] == 16 and evaluation["updates"] == 2 and evaluation["seconds"] > 0
    module = importlib.import_module("grpo_guard")
    noisy = comparison.score_by_own_sampler(job, tmp_path / "tiny", chunks=2)
    monkeypatch.setattr(module, "trained_steps", lambda *_: ())
    by_ode = comparison.score_by_own_sampler(job, tmp_path / "tiny", chunks=2)
    assert by_ode["ocr"] == pytest.approx(evaluation["ocr"], abs=0.03)  # a digit of one image, read otherwise
    assert by_ode["sign_colour"] == pytest.approx(evaluation["sign_colour"], abs=1e-3)
    assert by_ode["jpeg_compressibility"] == pytest.approx(evaluation["jpeg_compressibility"], rel=1e-3)
    assert noisy["jpeg_compressibility"] != pytest.approx(by_ode["jpeg_compressibility"], rel=1e-3)
    assert list(noisy) == ["ocr", "sign_colour", "jpeg_compressibility"]
