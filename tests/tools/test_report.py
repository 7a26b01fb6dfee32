"""tools/report.py: each rule flags one run and not another; the page holds its pictures and asks for nothing else."""

import errno
import json
from html.parser import HTMLParser
from pathlib import Path

from common.images import save_png
from tests.conftest import ROOT
from tools import report

import pytest
from PIL import Image

pytestmark = pytest.mark.fast


def rows_of(**metrics):
    """Rows of a metrics.jsonl, of lists of values; a double underscore stands for a slash."""
    num_rows = max(map(len, metrics.values()))
    named = {name.replace("__", "/"): values for name, values in metrics.items()}
    return [{name: values[i] for name, values in named.items() if i < len(values)} for i in range(num_rows)]


# {rule: (a run that it flags, what it says, a run that it does not flag)}
CASES = {
    report.flat_reward: (
        {"critic__rewards__zero_std_ratio": [0.95] * 6, "critic__rewards__mean": [0.5] * 6},
        "zero_std_ratio is 0.95 at the end, and the reward has not risen (0.500 to 0.500)",
        {"critic__rewards__zero_std_ratio": [0.2, 0.5, 0.95], "critic__rewards__mean": [0.5, 0.7, 0.95]},
    ),
    report.still_ratio: (
        {"actor__ratio_std": [0.0, 0.0, 0.0]},
        "ratio_std is 0 in every step",
        {"actor__ratio_std": [0.0, 2e-4, 0.0]},
    ),
    report.clipped: (
        {"actor__pg_clipfrac": [0.1, 0.3, 0.5]},
        "pg_clipfrac is 0.50 at the end (healthy: below 0.3)",
        {"actor__pg_clipfrac": [0.5, 0.1, 0.04]},
    ),
    report.no_gradient: (
        {"actor__grad_norm": [0.0, 0.0, 0.1]},
        "grad_norm is 0 in 2 of 3 steps",
        {"actor__grad_norm": [0.0, 0.1, 0.1]},
    ),
    report.less_diverse: (
        {"critic__diversity": [0.2, 0.15, 0.05]},
        "critic/diversity fell from 0.200 to 0.050",
        {"critic__diversity": [0.2, 0.15, 0.12]},
    ),
    report.held_out_falls: (
        {
            "val__colour__mean": [0.9, 0.5],
            "val__colour__stderr": [0.02, 0.02],
            "val__faces__mean": [0.8, 0.6],
            "val__faces__stderr": [0.01, 0.02],
            "val__weighted_total__mean": [0.5, 0.9],
        },
        "while the total rose, val/colour/mean fell from 0.900 to 0.500 (by more than 0.080) "
        "and val/faces/mean fell from 0.800 to 0.600 (by more than 0.060)",
        {
            "val__colour__mean": [0.9, 0.85],
            "val__colour__stderr": [0.02, 0.02],
            "val__weighted_total__mean": [0.5, 0.9],
        },
    ),
    report.mismatch_grows: (
        {"rollout_corr__velocity_diff_max": [1e-3, 5e-3, 2e-2]},
        "velocity_diff_max grew from 0.001 to 0.02",
        {"rollout_corr__velocity_diff_max": [1e-7, 3e-7, 9e-7]},
    ),
}


def test_every_rule_has_a_case_and_a_paragraph():
    assert CASES.keys() == report.RULES.keys()
    begins = {rule.__name__: report.explanation(place) for rule, place in report.RULES.items()}
    assert begins["flat_reward"].startswith("zero_std_ratio near 1. All images of a prompt score the same")
    assert begins["still_ratio"].startswith("actor/grad_norm is 0, or actor/ratio_std is 0 although")
    assert begins["clipped"].startswith(
        "actor/pg_clipfrac above 0.3. Most of the update is clipped away. --clip_range is"
    )
    assert begins["no_gradient"] == begins["still_ratio"]
    assert begins["less_diverse"].startswith("That is reward hacking. val/drift_from_base jumps, critic/diversity")
    assert begins["held_out_falls"] == begins["less_diverse"]
    assert begins["mismatch_grows"].endswith("The engine's policy is not the trainer's: the engine's page.")


@pytest.mark.parametrize("rule", CASES, ids=lambda rule: rule.__name__)
def test_a_rule_flags_one_run_and_not_the_other(rule):
    wrong, what, fine = CASES[rule]
    options = {"updates_per_rollout": 2}
    assert report.find_faults(rows_of(**wrong), options) == ([report.Finding(what, report.RULES[rule])], 1)
    assert rule(rows_of(**fine), options) is None
    assert report.find_faults(rows_of(**fine), options) == ([], 1)
    for name in wrong:  # renamed in a fork; a reward alone is no other's
        renamed = {f"my_{other}" if name == other else other: values for other, values in wrong.items()}
        if rule is not report.held_out_falls or "total" in name:
            assert report.find_faults(rows_of(**renamed), options) == ([], 0)
    assert report.find_faults([], options) == ([], 0)


def test_a_rule_of_evaluations_needs_two_and_their_errors():
    wrong, _, _ = CASES[report.held_out_falls]
    once = {name: values[:1] for name, values in wrong.items()}
    without_errors = {name: values for name, values in wrong.items() if "stderr" not in name}
    for less in (once, without_errors):
        assert report.find_faults(rows_of(**less), {}) == ([], 0)


def test_a_ratio_of_1_is_right_where_a_rollout_has_one_update():
    wrong, _, _ = CASES[report.still_ratio]
    assert report.find_faults(rows_of(**wrong), {"updates_per_rollout": 1, "epochs_per_rollout": 1}) == ([], 1)
    for renamed in ({}, {"updates_per_rollout": 1}, {"epochs_per_rollout": 1}):  # in a fork, whose value is not known
        assert report.find_faults(rows_of(**wrong), renamed) == ([], 0)


def test_recorded_runs_of_the_embedded_task_look_fine():
    records = ROOT / "docs" / "lab" / "records"
    for name in ("flow_grpo-local-seed1", "grpo_guard-local-seed2", "dpo_offline-local-seed3"):
        rows = [json.loads(line) for line in (records / name / "metrics.jsonl").read_text().splitlines()]
        options = json.loads((records / name / "args.json").read_text())["args"]
        found, could_look = report.find_faults(rows, options)
        assert found == [], name
        assert could_look == {"flow_grpo": 4, "grpo_guard": 4, "dpo_offline": 1}[name.partition("-")[0]]


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.found = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("img", "input", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def make_run(folder, learning_rate, colours):
    """A run of two evaluations: two prompts, whose images change from one of these colours to the next."""
    (folder / "samples").mkdir(parents=True)
    rows = [{"training/global_step": step, "val/ocr/mean": 0.5 + step / 10, "val/ocr/stderr": 0.01} for step in (0, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {"command": "flow_grpo.py --name <b>", "git_hash": "abc", "args": {"learning_rate": learning_rate}}
    record |= {"device": "CPU, 2 cores", "versions": {"torch": "2.13.0"}}
    (folder / "args.json").write_text(json.dumps(record))
    for step, colour in zip((0, 5), colours, strict=True):
        place = folder / "samples" / f"{step:04d}"
        place.mkdir()
        lines = []
        for i, score in enumerate((0.25, 1.0)):
            save_png(place / f"{i:05d}.png", Image.new("RGB", (8, 4), colour if i else "white"))
            lines.append(json.dumps({"file": f"{i:05d}.png", "prompt": f"a <sign> {i}", "seed": 3, "ocr": score}))
        (place / "samples.jsonl").write_text("\n".join(lines))
        save_png(folder / f"grid_{step:04d}.png", Image.new("RGB", (16, 8), colour))
    return folder


def test_the_page_is_whole_and_self_contained(tmp_path, capsys):
    runs = [make_run(tmp_path / "one", 1e-4, ("red", "blue")), make_run(tmp_path / "two", 1e-3, ("red", "red"))]
    report.main([*map(str, runs), "--output", str(tmp_path / "report.html")])
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    text = (tmp_path / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    images = [attributes for tag, attributes in tags.found if tag == "img"]
    # the curves; two grids, and three kinds of two samples before and after, of each run
    assert len(images) == 1 + 2 * (2 + 3 * 2 * 2)
    assert all(image["src"].startswith("data:image/png;base64,") and image["alt"] for image in images)
    assert not any("http" in str(value) for _, attributes in tags.found for value in attributes.values())
    assert "<tr><td>learning_rate</td><td>0.0001</td><td>0.001</td></tr>" in text
    assert "a &lt;sign&gt; 1 (ocr 1.000)" in text and "flow_grpo.py --name &lt;b&gt;" in text
    assert text.count(" 0 of 7 rules ") == 2 and 'class="fine"' not in text  # their evaluations have no total
    for title, value in {"commit": "abc", "device": "CPU, 2 cores", "torch": "2.13.0"}.items():
        assert f"<tr><td>{title}</td><td>{value}</td><td>{value}</td></tr>" in text


def test_the_page_is_green_where_rules_could_look_and_says_how_many(tmp_path):
    folder = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    rows = [{"training/global_step": step, "actor/grad_norm": 0.5, "actor/pg_clipfrac": 0.1} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report.page([folder])
    assert " 2 of 7 rules " in text and 'class="fine"' in text and 'class="wrong"' not in text
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | {"actor/grad_norm": 0.0}) + "\n" for row in rows))
    text = report.page([folder])
    assert " 2 of 7 rules " in text and 'class="fine"' not in text and 'class="wrong"' in text


def test_the_commit_of_a_scripts_own_repository_has_a_row(tmp_path):
    folder = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    assert "abc-dirty" not in report.page([folder])
    record = json.loads((folder / "args.json").read_text()) | {"script_git_hash": "abc-dirty"}
    (folder / "args.json").write_text(json.dumps(record))
    assert "<td>abc</td>" in report.page([folder]) and "<td>abc-dirty</td>" in report.page([folder])


def test_a_resumed_run_shows_the_record_of_its_highest_step(tmp_path):
    folder = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    record = json.loads((folder / "args.json").read_text())
    for step, learning_rate in ((30, 3e-4), (5, 2e-4)):
        resumed = record | {"command": f"resumed {step}", "args": {"learning_rate": learning_rate}}
        (folder / f"args_step_{step:06d}.json").write_text(json.dumps(resumed))
    assert "<tr><td>command</td><td>resumed 30</td></tr>" in report.page([folder])


def test_samples_are_ordered_by_score_and_by_change(tmp_path):
    """The folders are of steps 9995 and 10000: their order is that of numbers, not of names."""
    folder = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    (folder / "samples/0000").rename(folder / "samples/9995")
    (folder / "samples/0005").rename(folder / "samples/10000")
    first, second = report.read_samples(folder, [])
    assert (second.before.getpixel((0, 0)), second.after.getpixel((0, 0))) == ((255, 0, 0), (0, 0, 255))
    assert (first.score, second.score) == (0.25, 1.0)
    assert first.change == 0 and second.change == pytest.approx((2 / 3) ** 0.5)  # two of three colours, by 255


def test_the_best_sample_has_the_highest_weighted_total_of_all_its_scores(tmp_path):
    """By hand: the plain mean would put the third first, and the one whose OCR failed before the first."""
    folder = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    options = {"reward": ["ocr", "mine.py:clip"], "reward_weights": [1.0, 0.01]}
    (folder / "args.json").write_text(json.dumps({"args": options}))
    scores = [{"ocr": 1.0, "clip": 28.0}, {"ocr": None, "clip": 36.0}, {"ocr": 0.0, "clip": 40.0}, {"clip": 30.0}]
    lines = []
    for number, of_sample in enumerate(scores):
        save_png(folder / f"samples/0005/{number:05d}.png", Image.new("RGB", (8, 4), "red"))
        record = {"file": f"{number:05d}.png", "prompt": f"number {number}", "seed": 3, "watched": 99.0 - number}
        lines.append(json.dumps(record | of_sample))
    (folder / "samples/0005/samples.jsonl").write_text("\n".join(lines))
    samples = report.read_samples(folder, [])
    assert [sample.score for sample in samples] == [pytest.approx(1.28), None, pytest.approx(0.4), pytest.approx(0.3)]
    best, worst = report.page([folder]).partition("<h3>Best</h3>")[2].split("<h3>")[:2]
    orders = [[part[:1] for part in text.split("number ")[1:]] for text in (best, worst)]
    assert orders == [["0", "2", "3"], ["3", "2", "0"]]
    (folder / "args.json").write_text(json.dumps({"args": {}}))  # of several scales none is better
    assert "<h3>Best</h3>" not in report.page([folder]) and "<h3>Most changed</h3>" in report.page([folder])


def test_an_image_of_another_prompt_is_no_before(tmp_path):
    folder = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    lines = (folder / "samples/0005/samples.jsonl").read_text()
    (folder / "samples/0005/samples.jsonl").write_text(lines.replace("a <sign> 1", "a green car"))
    first, second = report.read_samples(folder, [])
    assert first.before and second.before is None and second.change == 0


@pytest.mark.parametrize(
    ("resumed_at", "changes", "named"),
    [
        (2, {"args": {"eval_num_inference_steps": 8}}, ["eval_num_inference_steps: 6 -> 8"]),
        (2, {"args": {"eval_guidance_scale": 3.0}}, ["guidance_scale: 1.0 -> 3.0"]),
        (2, {"contents": {"code/mine.py": "2"}}, ["code/mine.py has other contents"]),
        (5, {"args": {"negative_prompt": "blur"}}, ["negative_prompt: None -> blur"]),  # it may have evaluated again
        (2, {"args": {"learning_rate": 1.0, "reward_weights": [2.0]}, "contents": {"source common/": "2"}}, []),
        (6, {"args": {"eval_num_inference_steps": 8}}, []),  # behind both
    ],
)
def test_images_that_were_sampled_or_scored_otherwise_are_no_before(tmp_path, resumed_at, changes, named):
    folder = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    options = {"eval_num_inference_steps": 6, "guidance_scale": 1.0, "reward": ["mine.py:f"], "reward_weights": [1.0]}
    contents = {"code/mine.py": "1", "source common/": "1"}
    (folder / "args.json").write_text(json.dumps({"args": options, "contents": contents}))
    resumed = {"args": options | changes.get("args", {}), "contents": contents | changes.get("contents", {})}
    (folder / f"args_step_{resumed_at:06d}.json").write_text(json.dumps(resumed))
    assert report.evaluation_differences(folder, 0, 5) == named
    assert all(bool(sample.before) != bool(named) for sample in report.read_samples(folder, []))
    text = report.page([folder])
    assert all(name.replace(">", "&gt;") in text for name in named)
    assert ("each at the first evaluation" in text) != bool(named)


def cut(file, size=-30):  # bytes, into the pixels of a PNG
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("metrics.jsonl, line 2", lambda run: cut(run / "metrics.jsonl")),
        ("metrics.jsonl, line 1", lambda run: (run / "metrics.jsonl").write_text('{"val/ocr/mean": null}\n')),
        ("metrics.jsonl, line 1", lambda run: (run / "metrics.jsonl").write_text('{"val/ocr/mean": 0.5}\n')),
        ("metrics.jsonl", lambda run: (run / "metrics.jsonl").unlink()),
        ("args.json", lambda run: (run / "args.json").write_text("{}")),
        ("args.json", lambda run: (run / "args.json").write_text('{"args": {}, "versions": 3}')),
        ("args.json", lambda run: (run / "args.json").write_text('{"args": {"updates_per_rollout": []}}')),
        ("args.json", lambda run: (run / "args.json").unlink()),
        ("grid_0005.png", lambda run: cut(run / "grid_0005.png")),
        ("samples/0005/00001.png", lambda run: cut(run / "samples" / "0005" / "00001.png")),
        ("samples/0000/00001.png", lambda run: cut(run / "samples" / "0000" / "00001.png")),
        ("samples/0005/samples.jsonl, line 2", lambda run: cut(run / "samples" / "0005" / "samples.jsonl")),
        ("samples/0005/samples.jsonl, line 1", lambda run: (run / "samples/0005/samples.jsonl").write_text("[]")),
        ("samples/0005/samples.jsonl, line 1", lambda run: (run / "samples/0005/samples.jsonl").write_text('{"a": 1}')),
    ],
)
def test_what_cannot_be_read_is_left_out_and_named(tmp_path, name, spoil):
    """The page has the rest, which is wanted most for a run that died."""
    run = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    spoil(run)
    text = report.page([run])
    left_out = text.partition("<h2>Left out, as it cannot be read</h2>")[2].partition("</ul>")[0]
    assert f"{run}/{name}: " in left_out and left_out.count("<li>") == 1
    assert text.count("<img") >= 2


def test_users_own_grid_and_null_versions_are_passed_over(tmp_path):
    run = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    (run / "grid_best.png").touch()
    (run / "args.json").write_text('{"args": {}, "versions": null, "command": null}')
    assert "Left out" not in report.page([run])


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    run = make_run(tmp_path / "one", 1e-4, ("red", "blue"))
    (run / "report.html").write_text("before")

    def full_disk(path, text, **_):
        path.write_bytes(text.encode()[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(SystemExit, match="^tools.report: error: .*report.html.*space left"):
        report.main([str(run)])
    assert (run / "report.html").read_text() == "before"


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="^tools.report: error: .*metrics.jsonl"):
        report.main([str(tmp_path)])
