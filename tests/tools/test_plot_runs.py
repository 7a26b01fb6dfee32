"""tools/plot_runs.py: whose curves stand in which panel."""

from tools import plot_runs

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
    plot_runs.overlay(runs, None, tmp_path / "runs.png")
    reward, grad_norm = figures[0].axes
    assert [panel.get_title() for panel in (reward, grad_norm)] == ["val/ocr/mean", "actor/grad_norm"]
    assert reward.get_legend_handles_labels()[1] == ["a", "b"]
    assert grad_norm.get_legend_handles_labels()[1] == ["b"]
    assert reward.get_lines()[0].get_ydata().tolist() == [0.5, 0.75]
    assert grad_norm.get_lines()[0].get_color() == "C1"  # a run's colour is the same in all panels
    with pytest.raises(ValueError, match="no run has the metric actor/loss"):
        plot_runs.overlay(runs, ["actor/loss"], tmp_path / "runs.png")


def test_seeds_share_a_colour_and_an_entry_of_the_legend(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self))
    names = ("crd-seed1", "teacher", "crd-seed2")
    runs = {name: [{"training/global_step": i, "actor/loss": 1.0} for i in range(2)] for name in names}
    plot_runs.overlay(runs, ["actor/loss"], tmp_path / "runs.png")
    (panel,) = figures[0].axes
    assert panel.get_legend_handles_labels()[1] == ["crd, 2 seeds", "teacher"]
    assert [line.get_color() for line in panel.get_lines()] == ["C0", "C1", "C0"]


def test_runs_of_one_name_are_labelled_by_their_paths():
    assert plot_runs.labels_of(["x/a", "y/b"]) == ["a", "b"]
    assert plot_runs.labels_of(["x/a", "y/a"]) == ["x/a", "y/a"]
