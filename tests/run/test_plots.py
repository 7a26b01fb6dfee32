"""Curves and grids: their sizes, colours and captions."""

import json
from decimal import Decimal

from common.rewards._loading import load_rewards
from common.run import plots
from common.run.plots import PANELS, drawn_metrics, plot_curves, save_grid, save_samples

import numpy as np
import pytest
import torch.distributed as dist
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

pytestmark = pytest.mark.fast


# ---- curves ----------------------------------------------------------------------------------------------------------
def write_metrics(folder, step, metrics):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"training/global_step": step, **metrics}) + "\n")


def test_plot_curves(tmp_path):
    write_metrics(tmp_path, 0, {"val/ocr/mean": 0.2, "val/ocr/stderr": 0.02})
    plot_curves(tmp_path)
    sparse = Image.open(tmp_path / "curves.png").convert("RGB").tobytes()
    for step in range(1, 11):
        metrics = {
            "critic/rewards/mean": 0.2 + step / 20,
            "critic/rewards/zero_std_ratio": 0,
            "actor/pg_clipfrac": 0.1,
            "actor/grad_norm": 1 / step,
            "rollout_corr/logprob_abs_diff_mean": 1e-7,
        }
        if step % 5 == 0:
            metrics |= {"val/ocr/mean": 0.3 + step / 20, "val/ocr/stderr": 0.02}
            metrics |= {"val/jpeg/mean": 0.5, "val/jpeg/stderr": 0.0}
        write_metrics(tmp_path, step, metrics)
    plot_curves(tmp_path)
    picture = Image.open(tmp_path / "curves.png")
    assert picture.format == "PNG"
    assert picture.size == (1210, 770)  # 11 x 7 inches of 110 dots
    assert picture.convert("RGB").tobytes() != sparse


def test_curves_have_a_colour_for_each_reward_and_the_panels_of_the_script(tmp_path, monkeypatch):
    rows = '{"training/global_step": 0, "val/ocr/mean": 0.5, "val/ocr/stderr": 0.1, "val/red/mean": 0.1, '
    rows += '"val/red/stderr": 0.1, "actor/implicit_accuracy": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    figures = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or real(self, *a, **k))
    plot_curves(tmp_path)
    panels = figures[0].axes
    assert [panel.get_title() for panel in panels] == ["reward", "accuracy of the pairs"]
    colours = {line.get_color() for line in panels[0].get_lines()}
    assert len(colours) == 2 and "black" not in colours


@pytest.mark.parametrize("names", [("ocr",), ("ocr", "red")])
def test_a_reward_has_one_colour_in_training_and_evaluation(names, tmp_path, monkeypatch):
    row = {"critic/rewards/mean": 0.5, "val/weighted_total/mean": 0.5}
    row |= {f"{where}/{name}/mean": 0.5 for where in ("critic/rewards", "val") for name in names}
    write_metrics(tmp_path, 0, row)
    drawn = {}
    monkeypatch.setattr(plots, "draw_panels", lambda panels, path: drawn.update(panels))
    plot_curves(tmp_path)
    colours = {name: colour for name, _, _, colour in drawn["reward"]}
    assert len(set(colours.values())) == len(colours) / 2 == (3 if len(names) > 1 else 1)
    assert all(colours[f"critic/rewards/{name}/mean"] == colours[f"val/{name}/mean"] for name in names)


def test_no_number_beside_a_panel_is_cut_off(tmp_path):
    """Numbers of many places in the lower left panel: the picture's edges are white."""
    rows = []
    for i in range(31):
        row = {"training/global_step": i, "critic/rewards/mean": 0.6 + i / 100, "actor/grad_norm": 0.003 + i / 7500}
        row |= {"critic/rewards/zero_std_ratio": i / 100, "rollout_corr/logprob_abs_diff_max": i / 1e8}
        rows.append(json.dumps(row) + "\n")
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    plot_curves(tmp_path)
    pixels = np.asarray(Image.open(tmp_path / "curves.png").convert("L"))
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 255).all()


def test_the_weighted_total_is_drawn_where_there_are_several_rewards():
    one = [{"val/ocr/mean": 1.0, "val/weighted_total/mean": 0.5}]
    two = [{"val/ocr/mean": 1.0, "val/red/mean": 0.0, "val/weighted_total/mean": 0.5}]
    rollout = {"critic/rewards/mean": 0.5, "critic/rewards/ocr/mean": 1.0}
    assert drawn_metrics(one, PANELS["reward"]) == ["val/ocr/mean"]
    assert drawn_metrics([rollout, *one], PANELS["reward"]) == ["critic/rewards/ocr/mean", "val/ocr/mean"]
    rollout["critic/rewards/red/mean"] = 0.0
    assert drawn_metrics([rollout], PANELS["reward"]) == sorted(rollout)
    assert drawn_metrics(two, PANELS["reward"]) == ["val/ocr/mean", "val/red/mean", "val/weighted_total/mean"]
    with pytest.raises(ValueError, match="--reward .*weighted_total: .*weighted_total"):
        load_rewards([f"{__file__}:weighted_total"], (1.0,))


def weighted_total(images, prompts, metadata):
    return [0.0] * len(images)


# ---- grids and samples -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "count", "options", "expected"),
    [
        ((96, 32), 32, {}, (8 * 196, 4 * 82)),  # enlarged 200 // 96 = 2 times; a line of 14 below each, gaps of 4
        ((32, 16), 10, {}, (5 * 196, 2 * 114)),  # enlarged 6 times; two rows of five, not of eight and two
        ((512, 512), 1, {}, (516, 530)),
        ((10, 10), 3, {"columns": 2}, (2 * 204, 2 * 218)),
        ((96, 32), 3, {"caption": "a prompt\nits scores"}, (3 * 196, 96)),
    ],
)
def test_save_grid_size(tmp_path, size, count, options, expected):
    captions = ["caption"] * (count - 1) + [options.pop("caption", "caption")]
    save_grid(tmp_path / "grid.png", [Image.new("RGB", size, "red")] * count, captions, **options)
    assert Image.open(tmp_path / "grid.png").size == expected


def test_save_grid_places_images_row_by_row(tmp_path):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    save_grid(tmp_path / "grid.png", [Image.new("RGB", (10, 10), c) for c in colours], [""] * 3, columns=2)
    grid = Image.open(tmp_path / "grid.png")  # cells of 204 x 218
    places = ((5, 5), (209, 5), (5, 223), (209, 223))
    assert [grid.getpixel(place) for place in places] == [*colours, (255, 255, 255)]
    with pytest.raises(ValueError):
        save_grid(tmp_path / "grid.png", [Image.new("RGB", (10, 10))], ["a", "b"])


def test_a_caption_is_measured_in_linear_time_and_survives_line_breaks(tmp_path, monkeypatch):
    measured = []
    real = ImageDraw.ImageDraw.textlength
    monkeypatch.setattr(
        ImageDraw.ImageDraw, "textlength", lambda self, text: measured.append(len(text)) or real(self, text)
    )
    save_grid(tmp_path / "grid.png", [Image.new("RGB", (96, 32))] * 2, ["x" * 5000, "two\nlines"])
    assert sum(measured) < 200 * 200 and max(measured) <= 200
    high = 64, 64 + 9  # the rows of an x of the caption, of which the dots that mark a cut have the lowest alone
    first = Image.open(tmp_path / "grid.png").convert("L").crop((1, high[0], 8, high[1] - 2))
    assert first.getextrema() == (255, 255)


def of_rank(places):
    """What a rank that has made the images of these places gives to save_samples."""
    images = [Image.new("RGB", (4, 2), (place, 0, 0)) for place in places]
    records = [{"prompt": f"p{place}", "seed": place, "ocr": place / 4, "jpeg": -1.0} for place in places]
    return places, images, records


def test_save_samples_puts_every_ranks_images_in_order(tmp_path, monkeypatch):
    """Two ranks share five images, and each writes its own; the last place of the second is one that fills up."""
    given = {}  # by rank: what it hands to rank 0

    def all_gather_object(parts, value):
        given[dist.get_rank()] = value
        parts[:] = [value, given[1]]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    places, images, records = of_rank([1, 3, 0])
    images[2] = Image.new("RGB", (4, 2), (99, 0, 0))  # made by another rank, and so not to the bit
    assert save_samples(tmp_path / "samples", places, images, records) is None
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["00001.png", "00003.png"]
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    shown = save_samples(tmp_path / "samples", *of_rank([0, 2, 4]))
    scores = ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert [caption for _, caption in shown] == [f"p{i}\nocr {score}  jpeg -1.00" for i, score in enumerate(scores)]
    assert [image.getpixel((0, 0))[0] for image, _ in shown] == [0, 1, 2, 3, 4]
    lines = [json.loads(line) for line in (tmp_path / "samples" / "samples.jsonl").read_text().splitlines()]
    assert [list(line) for line in lines] == [["file", "prompt", "seed", "ocr", "jpeg"]] * 5
    assert lines[3] == {"file": "00003.png", "prompt": "p3", "seed": 3, "ocr": 0.75, "jpeg": -1.0}
    for place, line in enumerate(lines):
        assert Image.open(tmp_path / "samples" / line["file"]).getpixel((0, 0)) == (place, 0, 0)
    given[1] = {place: (record, None) for place, (record, _) in given[1].items()}  # none of its images is shown
    assert len(save_samples(tmp_path / "samples", *of_rank([0, 2, 4]), shown=1)) == 1


NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (NAN, None),
        (-float("inf"), None),
        (np.float32("nan"), None),
        (np.float64("inf"), None),
        (Decimal("NaN"), None),
        ([1, [NAN]], [1, [None]]),
        ({"a": (NAN, 2.5)}, {"a": [None, 2.5]}),
        ({NAN: 1, -float("inf"): NAN}, {"NaN": 1, "-Infinity": None}),
        (10**400, 10**400),
        ("NaN", "NaN"),
        (Decimal("1.5"), "1.5"),
        (True, True),
    ],
)
def test_samples_are_strict_json_whatever_a_table_holds(tmp_path, one_rank, value, written):
    """Python alone reads the word NaN. The record that rewards see is not changed."""
    record = {"prompt": "p", "seed": 1, "metadata": {"n": value}}
    before = repr(record)
    save_samples(tmp_path, [0], [Image.new("RGB", (4, 2))], [record])
    text = (tmp_path / "samples.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["metadata"] == {"n": written}
    assert repr(record) == before


def test_a_saved_video_has_all_its_frames_and_a_grid_shows_three(tmp_path, one_rank):
    """Also where a frame is the one before it."""
    levels = [10, 20, 20, 30, 40, 50]
    video = [Image.new("RGB", (4, 2), (level, 0, level)) for level in levels]
    shown = save_samples(tmp_path / "samples", [0], [video], [{"prompt": "p", "seed": 1}])
    saved = Image.open(tmp_path / "samples" / "00000.png")
    assert saved.n_frames == len(video)
    for number, frame in enumerate(video):
        saved.seek(number)
        assert saved.convert("RGB").tobytes() == frame.tobytes()
    ((picture, caption),) = shown
    assert picture.size == (4, 6) and caption == "p"
    assert [picture.getpixel((0, y))[0] for y in (0, 2, 4)] == [levels[0], levels[3], levels[5]]
