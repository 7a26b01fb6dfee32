"""tools/compare.py: its statistics, by hand, and whose curves stand in which panel."""

import json

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
    with pytest.raises(ValueError, match="no run has the metric actor/loss"):
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
    assert table.splitlines()[2:] == [
        "| b | 3 | 0.267 (0.000 to 0.400) |",
        "| a | 3 | 0.700 (0.500 to 0.900), +0.200 [-1.071, +1.471] in 2 shared seeds |",
    ]
    one = compare.comparison_table({"c": [{"val/ocr/mean": 0.25}]}, {}, ["val/ocr/mean"])
    assert one == [["", "seeds", "val/ocr/mean"], ["c", "1", "0.250"]]
    with pytest.raises(ValueError, match="no run has the metric actor/loss"):
        compare.comparison_table(a, b, ["actor/loss"])
    with pytest.raises(ValueError, match="--against: must be the seeds of one setting, got those of a, b"):
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


@pytest.mark.parametrize("groups", [[range(3)], [range(40)], [range(20), range(20, 50), range(50, 60)]])
def test_intervals_cover_at_95_percent(groups):
    """Of few seeds, of many prompts, and of the mean of the means of parts."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(4000):
        drawn = random.normal(1.0, 2.0, size=groups[-1].stop).tolist()
        _, low, high = compare.mean_interval(drawn, [list(rows) for rows in groups])
        covered += low <= 1.0 <= high
    assert 0.935 < covered / 4000 < 0.965


def test_seconds_are_the_median_of_training_steps():
    rows = [{"timing_s/testing": 9.0}, *({"timing_s/step": s, "timing_s/testing": 1.0} for s in (3.0, 1.0, 2.0))]
    assert compare.value_of(rows, "timing_s/step") == 2.0
    assert compare.value_of(rows, "timing_s/testing") == 1.0
    assert compare.value_of(rows, "val/ocr/mean") is None


def test_runs_of_one_name_are_labelled_by_their_paths():
    assert compare.labels_of(["x/a", "y/b"]) == ["a", "b"]
    assert compare.labels_of(["x/a", "y/a"]) == ["x/a", "y/a"]


def test_a_line_that_a_kill_has_cut_is_named_by_its_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"val/ocr/mean": 0.5}\n{"val/o')
    with pytest.raises(SystemExit, match=f"^tools.compare: error: {tmp_path}/metrics.jsonl: Unterminated string"):
        compare.main([str(tmp_path)])


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
    assert shown.err == f"{tmp_path}/new/bench_embedded: no run, as it has no metrics.jsonl: left out\n"


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
    told = "^tools.compare: error: --step 10: my_r#n-seed2 has not logged val/ocr/mean there"
    with pytest.raises(SystemExit, match=told):
        compare.main([*given, "10"])
