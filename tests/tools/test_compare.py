"""tools/compare.py: its statistics, by hand, and whose curves stand in which panel."""

import json
import re

from common.run.plots import read_metrics
from tools import compare

import numpy as np
import pytest
from matplotlib.figure import Figure

pytestmark = pytest.mark.fast


def test_a_run_has_a_curve_in_each_panel_that_it_has_the_metric_of(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self))
    runs = {
        "a": [{"training/global_step": 5 * i, "val/ocr/mean": 0.5 + i / 4, "val/ocr/stderr": 0.1} for i in range(2)],
        "b": [{"training/global_step": 0, "val/ocr/mean": 0.25, "val/ocr/stderr": 0.1, "actor/grad_norm": 2.0}],
    }
    compare.overlay(runs, None, tmp_path / "runs.png")
    reward, grad_norm = figures[0].axes
    assert [panel.get_title() for panel in (reward, grad_norm)] == ["val/ocr/mean", "actor/grad_norm"]
    assert reward.get_legend_handles_labels()[1] == ["a", "b"]
    assert grad_norm.get_legend_handles_labels()[1] == ["b"]
    assert reward.get_lines()[0].get_ydata().tolist() == [0.5, 0.75]
    assert grad_norm.get_lines()[0].get_color() == "C1"  # a run's colour is the same in all panels
    with pytest.raises(ValueError, match=" actor/loss"):
        compare.overlay(runs, ["actor/loss"], tmp_path / "runs.png")


def test_seeds_are_one_curve_with_their_range(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self))
    runs = {
        name: [{"training/global_step": i, "actor/loss": value + i} for i in range(num_steps)]
        for name, value, num_steps in (("crd-seed1", 1.0, 3), ("teacher", 5.0, 2), ("crd-seed2", 3.0, 2))
    }
    compare.overlay(runs, ["actor/loss"], tmp_path / "runs.png")
    (panel,) = figures[0].axes
    assert panel.get_legend_handles_labels()[1] == ["crd, 2 seeds", "teacher"]
    assert panel.get_lines()[0].get_ydata().tolist() == [2.0, 3.0]  # of the steps that both have
    assert [line.get_color() for line in panel.get_lines()] == ["C0", "C1"]
    (band,) = panel.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} == {(0, 1), (0, 3), (1, 2), (1, 4)}


def of_seeds(name, values):
    return {f"{name}-seed{seed}": [{"val/ocr/mean": 0.1}, {"val/ocr/mean": v}] for seed, v in values.items()}


def test_a_row_has_its_mean_range_and_paired_difference():
    a = of_seeds("a", {1: 0.5, 2: 0.7, 3: 0.9})
    b = of_seeds("b", {1: 0.4, 2: 0.4, 4: 0.0})
    table = compare.as_markdown(compare.comparison_table(a, b, ["val/ocr/mean"]))
    # seeds 1 and 2: +0.1 and +0.3; t of one degree of freedom is 12.706, its standard error 0.1
    two, three = table.splitlines()[2:]
    assert two == "| b | 3 | 0.267 (0.000 to 0.400) |"
    assert three.startswith("| a | 3 | 0.700 (0.500 to 0.900), +0.200 [-1.071, +1.471] in 2 ")
    one = compare.comparison_table({"c": [{"val/ocr/mean": 0.25}]}, {}, ["val/ocr/mean"])
    assert one == [["", "seeds", "val/ocr/mean"], ["c", "1", "0.250"]]
    with pytest.raises(ValueError, match=" actor/loss"):
        compare.comparison_table(a, b, ["actor/loss"])
    with pytest.raises(ValueError, match="--against: .* a, b"):
        compare.comparison_table(a, a | b, ["val/ocr/mean"])


def test_a_run_without_a_seed_is_no_seed_of_its_namesake():
    """README's first run is runs/flow_grpo, a sweep's are runs/flow_grpo-seed1 and so on."""
    runs = {"flow_grpo": [{"a": 0.1}], "flow_grpo-seed1": [{"a": 0.9}], "flow_grpo-seed2": [{"a": 0.9}], "other": []}
    groups = compare.by_group(runs)
    assert {name: list(seeds) for name, seeds in groups.items()} == {
        "flow_grpo, no seed": [""],
        "other": [""],
        "flow_grpo": ["1", "2"],
    }


def test_p_is_the_share_of_signs_that_give_as_large_a_sum():
    assert compare.sign_flip_p([1.0] * 6) == 2 / 64
    assert compare.sign_flip_p([1.0, 1.0, -1.0]) == 1.0  # sums 3, 1, ...: at least 1 always
    a = of_seeds("a", dict.fromkeys(range(6), 0.5))
    b = of_seeds("b", {seed: 0.1 * seed / 5 for seed in range(6)})
    assert compare.comparison_table(a, b, ["val/ocr/mean"])[-1][-1].endswith(", p 0.031")


def parts_of(*sizes):
    """Groups of rows of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize(
    ("sizes", "stds", "covering"),
    [
        ([3], [2], (0.935, 0.965)),
        ([40], [2], (0.935, 0.965)),
        ([20, 30, 10], [2, 2, 2], (0.935, 0.965)),
        ([4] * 20, [2] * 20, (0.935, 0.97)),  # half-widths that add in quadrature cover 99.9 %
        ([4] * 4, [2] * 4, (0.935, 0.975)),
        ([2] * 6, [2] * 6, (0.935, 0.985)),  # 100 %, and 5 times as wide
        ([5, 40], [6, 1], (0.925, 0.965)),
    ],
)
def test_intervals_cover_at_95_percent(sizes, stds, covering):
    """Of few seeds, of many prompts, and of the mean of the means of parts, with few prompts each and other spreads."""
    random = np.random.default_rng(0)
    spread = np.repeat(stds, sizes)
    covered = 0
    for _ in range(4000):
        drawn = (1.0 + spread * random.normal(size=sum(sizes))).tolist()
        _, low, high = compare.mean_interval(drawn, parts_of(*sizes))
        covered += low <= 1.0 <= high
    assert covering[0] < covered / 4000 < covering[1]


@pytest.mark.parametrize("sizes", [[40], [20, 30]])
def test_intervals_of_copied_prompts_cover_at_95_percent(sizes):
    """Five images of each prompt as rows of their own, which spread 0.3 as far as prompts: without clusters 61 %."""
    random = np.random.default_rng(0)
    clusters = np.repeat(np.arange(sum(sizes)), 5).tolist()
    covered = 0
    for _ in range(2000):
        prompts = 1.0 + random.normal(size=sum(sizes))
        drawn = (np.repeat(prompts, 5) + 0.3 * random.normal(size=5 * sum(sizes))).tolist()
        _, low, high = compare.mean_interval(drawn, parts_of(*(5 * size for size in sizes)), clusters)
        covered += low <= 1.0 <= high
    assert 0.935 < covered / 2000 < 0.965


def test_an_interval_of_two_groups_by_hand():
    """Variances of the means 1 / 12 and 4 / 12: (5 / 12)^2 / (1 / 144 / 3 + 16 / 144 / 3) = 75 / 17 degrees, whose
    quantile is 2.6772 by scipy."""
    mean, low, high = compare.mean_interval([0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 2.0, 2.0], parts_of(4, 4))
    half = 2.6772 * (5 / 12) ** 0.5 / 2
    assert mean == 0.75
    assert (mean - low, high - mean) == pytest.approx((half, half), rel=0.01)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (1.5, 6.0843), (4.5, 2.6593), (9, 2.2622), (120, 1.9799)]
)
def test_quantiles_of_students_t(freedom, quantile):
    """By scipy.stats.t.ppf(0.975, freedom)."""
    assert compare.t_975(freedom) == pytest.approx(quantile, rel=0.02 if freedom % 1 else 3e-4)


@pytest.mark.parametrize(
    ("values", "sizes", "expected"),
    [
        ([0.25], [1], (0.25, None, None)),
        ([0.0, 1.0, 0.75], [2, 1], (0.625, None, None)),
        ([0.5, 0.5, 1.0, 1.0], [2, 2], (0.75, 0.75, 0.75)),
        ([0.5, None], [1, 1], None),
    ],
)
def test_a_mean_without_an_interval(values, sizes, expected):
    """A group of one value has a mean and no spread; a group of none has neither."""
    assert compare.mean_interval(values, parts_of(*sizes)) == expected


def test_seconds_are_the_median_of_training_steps():
    rows = [{"timing_s/testing": 9.0}, *({"timing_s/step": s, "timing_s/testing": 1.0} for s in (3.0, 1.0, 2.0))]
    assert compare.value_of(rows, "timing_s/step") == 2.0
    assert compare.value_of(rows, "timing_s/testing") == 1.0
    assert compare.value_of(rows, "val/ocr/mean") is None


def test_runs_of_one_name_are_labelled_by_their_paths():
    assert compare.labels_of(["x/a", "y/b"]) == ["a", "b"]
    assert compare.labels_of(["x/a", "y/a"]) == ["x/a", "y/a"]


def test_a_last_line_that_a_kill_has_cut_is_left_out_and_named(tmp_path, capfd):
    file = tmp_path / "metrics.jsonl"
    whole = '{"training/global_step": 5, "val/ocr/mean": 0.5}\n'
    file.write_text(whole + '{"training/global_step": 6, "val/o')
    assert read_metrics(tmp_path) == [json.loads(whole)]
    told = capfd.readouterr().err
    assert told.startswith(f"{file}, line 2: ") and told.count("\n") == 1
    file.write_text(whole + whole.strip())  # whole, but for its end
    assert len(read_metrics(tmp_path)) == 2 and capfd.readouterr().err == ""
    for wrong in (whole + '{"val/o\n', '{"val/o\n' + whole):  # no kill leaves these
        file.write_text(wrong)
        with pytest.raises(SystemExit, match=f"^tools.compare: error: {file}: "):
            compare.main([str(tmp_path)])


def test_seeds_of_other_code_are_named(tmp_path, capsys, monkeypatch):
    """Those of one group, by the script and the user's own files. Each start of a run has a record."""
    monkeypatch.setattr(compare, "overlay", lambda *args: None)
    contents = {"code/red.py": "1", "source my_losses.py": "1", "source mine.py": "1", "source common/": "1"}

    def names_told(changed, of_another_group=()):
        """The files that the line names where the second seed has these other contents."""
        for name, other in (("a-seed1", {}), ("a-seed2", changed), ("b-seed1", dict(of_another_group))):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "metrics.jsonl").write_text('{"training/global_step": 1, "val/ocr/mean": 0.5}\n')
            (folder / "args.json").write_text(json.dumps({"contents": contents | other}))
        compare.main([f"{tmp_path}/*seed*", "--output", str(tmp_path / "compared.png")])
        told = capsys.readouterr().err
        assert not told or told.startswith("a: ") and told.count("\n") == 1
        return set(re.findall(r"\b\w+\.py", told)) - {"source.py"}

    assert names_told({}, {"source mine.py": "2"}) == set()
    assert names_told({"source common/": "2", "--train_prompts a.txt": "2"}) == set()
    assert names_told({"source mine.py": "2"}) == {"mine.py"}
    assert names_told({"source my_losses.py": "2", "code/red.py": "2"}) == {"red.py", "my_losses.py"}
    resumed = {"contents": contents | {"source mine.py": "2"}}
    (tmp_path / "a-seed1" / "args_step_000001.json").write_text(json.dumps(resumed))
    assert names_told({}) == {"mine.py"}
    for broken in ("{", "[]", '{"contents": null}', '{"contents": {"source mine.py": 1}}'):
        (tmp_path / "a-seed1" / "args_step_000001.json").write_text(broken)
        names_told({})


def test_runs_of_one_name_in_two_places_are_compared(tmp_path, capsys):
    for place, value in (("new", 0.5), ("old", 0.25)):
        for seed in (1, 2):
            folder = tmp_path / place / f"ocr-seed{seed}"
            folder.mkdir(parents=True)
            row = {"training/global_step": 1, "val/ocr/mean": value}
            (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "new" / "ocr-seed1.log").touch()  # as tools.sweep leaves one beside the run
    new, old = (str(tmp_path / place / "ocr-seed*") for place in ("new", "old"))
    compare.main([new, "--against", old, "--output", str(tmp_path / "pictures" / "compared.png")])
    assert "0.500 (0.500 to 0.500), +0.250 [+0.250, +0.250]" in capsys.readouterr().out
    (tmp_path / "new" / "bench_embedded").mkdir()  # of tools.bench
    compare.main([*map(str, (tmp_path / "new").iterdir()), "--output", str(tmp_path / "new" / "compared.png")])
    shown = capsys.readouterr()
    assert "0.500 (0.500 to 0.500)" in shown.out
    assert re.fullmatch(rf"{tmp_path}/new/bench_embedded: .*metrics\.jsonl.*\n", shown.err)


@pytest.mark.parametrize("changes", [{}, {"reward_weights": [1.0, 0.5]}, {"reward": ["ocr", "own.py:clip"]}])
def test_totals_of_other_rewards_are_not_compared(tmp_path, capsys, monkeypatch, changes):
    monkeypatch.setattr(compare, "overlay", lambda *args: None)
    options = {"reward": ["ocr", "clip"], "reward_weights": [1.0, 0.1]}
    for name, of_run in (("a", options), ("b", options | changes)):
        (tmp_path / name).mkdir()
        row = {"training/global_step": 1, "val/ocr/mean": 0.5, "val/clip/mean": 28.0, "val/weighted_total/mean": 3.3}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / name / "args.json").write_text(json.dumps({"args": of_run}))
    given = [str(tmp_path / "a"), "--against", str(tmp_path / "b"), "--output", str(tmp_path / "compared.png")]
    compare.main(given)
    shown = capsys.readouterr()
    assert ("val/weighted_total/mean" in shown.out.splitlines()[0]) != bool(changes)
    assert ("val/weighted_total/mean" in shown.err) == bool(changes)
    compare.main([*given, "--metric", "val/weighted_total/mean"])
    assert "| val/weighted_total/mean |" in capsys.readouterr().out


def test_a_run_that_ended_before_the_others_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "overlay", lambda *args: None)
    for seed, last in ((1, 10), (2, 5), (3, 10)):
        (tmp_path / f"a-seed{seed}").mkdir()
        rows = [{"training/global_step": step, "val/ocr/mean": 0.5} for step in range(0, last + 1, 5)]
        (tmp_path / f"a-seed{seed}" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [str(tmp_path / "a-seed*"), "--output", str(tmp_path / "compared.png")]
    compare.main(given)
    assert re.fullmatch(".* step 10 .*: a-seed2 at step 5: .*--step .*\n", capsys.readouterr().err)
    compare.main([*given, "--step", "5"])
    assert capsys.readouterr().err == ""


def test_the_values_of_a_step_in_latex(tmp_path, capsys):
    for seed, values in ((1, (0.25, 0.75, 0.5)), (2, (0.5, 1.0))):
        folder = tmp_path / f"my_r#n-seed{seed}"
        folder.mkdir()
        rows = [{"training/global_step": 5 * i, "val/ocr/mean": value} for i, value in enumerate(values)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [str(tmp_path / "my_r#n-seed*"), "--output", str(tmp_path / "compared.png"), "--step"]
    compare.main([*given, "5", "--latex"])
    assert capsys.readouterr().out.splitlines()[:-1] == [
        r"\begin{tabular}{lll}",
        r"\hline",
        r" & seeds & val/ocr/mean \\",
        r"\hline",
        r"my\_r\#n & 2 & 0.875 (0.750 to 1.000) \\",
        r"\hline",
        r"\end{tabular}",
    ]
    told = "^tools.compare: error: --step 10: my_r#n-seed2 .* val/ocr/mean "
    with pytest.raises(SystemExit, match=told):
        compare.main([*given, "10"])


def test_an_older_picture_is_kept_or_named(tmp_path, monkeypatch, capsys):
    """The default name is a free one. A name that is given is taken, and a line says what it replaces."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"training/global_step": 1, "val/ocr/mean": 0.5}\n')
    pictures = []
    for given in ([], [], [], ["--output", "runs/compared.png"], ["--output", "other.png"]):
        compare.main(["runs/a", *given])
        pictures.append(capsys.readouterr().out.splitlines()[-1])
    assert pictures[:3] == ["runs/compared.png", "runs/compared-2.png", "runs/compared-3.png"]
    assert pictures[3].startswith("runs/compared.png ") and pictures[4] == "other.png"
    assert all((tmp_path / name.split(" ")[0]).is_file() for name in pictures)
