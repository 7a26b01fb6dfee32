"""Users' own files: rewards with dataclasses, neighbours and bugs; photos that are rotated, of 16 bits, or the same."""

import json
import pickle
import textwrap

from benchmarks import plot_runs
from common import pictures
from common.data import PromptSet, open_image, read_pairs
from common.errors import RunError
from common.pictures import PANELS, drawn_metrics, plot_curves, save_grid
from common.rewards import load_rewards, score_images

import numpy as np
import pytest
import torch
from PIL import Image

pytestmark = pytest.mark.fast
IMAGES = [Image.new("RGB", (8, 8), "red")] * 2
PROMPTS = PromptSet(["a", "b"], [{"target": 1}, {"target": 2}])


def reward_of(folder, source, name="mine"):
    (folder / "my_file.py").write_text(textwrap.dedent(source))
    return load_rewards([f"{folder / 'my_file.py'}:{name}"], (1.0,))


# ---- rewards ---------------------------------------------------------------------------------------------------------
def test_a_reward_file_may_have_dataclasses_and_neighbours_and_be_pickled(tmp_path):
    (tmp_path / "my_neighbour_of_the_reward.py").write_text("SCORE = 0.25\n")
    rewards = reward_of(
        tmp_path,
        """
        from __future__ import annotations
        import dataclasses
        import my_neighbour_of_the_reward

        @dataclasses.dataclass
        class Judge:
            score: float = my_neighbour_of_the_reward.SCORE

        def mine(images, prompts, metadata):
            return [Judge().score] * len(images)
        """,
    )
    assert score_images(rewards, IMAGES, PROMPTS).tolist() == [[0.25], [0.25]]
    assert pickle.loads(pickle.dumps(rewards["mine"])) is rewards["mine"]


def test_two_files_of_one_name_are_two(tmp_path):
    for folder, score in (("a", 0.25), ("b", 0.75)):
        (tmp_path / folder).mkdir()
        source = f"def {folder}(images, prompts, metadata):\n    return [{score}] * len(images)\n"
        (tmp_path / folder / "same_name.py").write_text(source)
    rewards = load_rewards([f"{tmp_path}/{folder}/same_name.py:{folder}" for folder in "ab"], (1.0, 1.0))
    assert score_images(rewards, IMAGES, PROMPTS)[0].tolist() == [0.25, 0.75]


@pytest.mark.parametrize("file", ["colorsys.py", "my.rewards.py", "my_rewards_2.py"])
def test_a_file_does_not_stand_in_for_a_module_of_its_name(file, tmp_path):
    """Its own import of that name gives what is installed."""
    source = "import colorsys\n\n\ndef mine(images, prompts, metadata):\n"
    source += "    return [colorsys.rgb_to_hsv(0, 0, 1)[2]] * len(images)\n"
    (tmp_path / file).write_text(source)
    rewards = load_rewards([f"{tmp_path / file}:mine"], (1.0,))
    assert score_images(rewards, IMAGES, PROMPTS).tolist() == [[1], [1]]


def test_a_file_with_two_rewards_is_imported_once(tmp_path):
    source = (
        "count = []\n\n\ndef a(images, prompts, metadata):\n    count.append(1)\n    return [len(count)] * len(images)"
    )
    (tmp_path / "two_rewards.py").write_text(source + "\n\n\ndef b(*given):\n    return a(*given)\n")
    rewards = load_rewards([f"{tmp_path}/two_rewards.py:{name}" for name in "ab"], (1.0, 1.0))
    assert score_images(rewards, IMAGES, PROMPTS)[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            "import no_such_module_at_all",
            r"ModuleNotFoundError: No module named 'no_such_module_at_all' \(\S+my_file.py:1\)",
        ),
        ("\ndef mine(:\n    pass", r"SyntaxError: .* \(\S+my_file.py:2\)"),
        ("\n\nraise SystemExit(0)", r"SystemExit: 0 \(\S+my_file.py:3\)"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(\S+my_file.py:1\)"),
    ],
)
def test_a_reward_file_that_cannot_be_imported_is_told_in_one_line(source, fault, tmp_path):
    with pytest.raises(ValueError, match=rf"^--reward \S+my_file.py:mine: {fault}$"):
        reward_of(tmp_path, source)


def test_an_error_names_the_users_line_and_is_cut(tmp_path):
    """Not the line of the library in which it was raised."""
    rewards = reward_of(
        tmp_path,
        """
        import json

        def parse(text):
            return json.loads(text)

        def mine(images, prompts, metadata):
            return [parse("{") for image in images]
        """,
    )
    with pytest.raises(RunError, match=r"^reward mine raised JSONDecodeError: .* \(\S+my_file.py:5\)$"):
        score_images(rewards, IMAGES, PROMPTS)

    def long(images, prompts, metadata):
        raise ValueError("x\n" * 100_000)

    with pytest.raises(RunError) as error:
        score_images({"long": long}, IMAGES, PROMPTS)
    assert len(str(error.value)) < 700 and "\n" not in str(error.value)


def test_one_reward_does_not_change_what_the_next_one_sees():
    def vandal(images, prompts, metadata):
        images[0].paste("black", (0, 0, 8, 8))
        prompts[0] = "another"
        metadata[0]["target"] = 7
        return [0.0, 0.0]

    def honest(images, prompts, metadata):
        assert prompts == ["a", "b"] and metadata == [{"target": 1}, {"target": 2}]
        return [image.getpixel((0, 0))[0] / 255 for image in images]

    scores = score_images({"vandal": vandal, "honest": honest}, IMAGES, PROMPTS)
    assert scores.tolist() == [[0, 1], [0, 1]] and IMAGES[0].getpixel((0, 0)) == (255, 0, 0)


# ---- photos ----------------------------------------------------------------------------------------------------------
def test_16_bits_are_not_clipped_to_white(tmp_path):
    grey = np.array([[0, 257 * 100], [257 * 200, 65535]], dtype=np.uint16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    assert np.asarray(open_image(tmp_path / "grey.png"))[:, :, 0].tolist() == [[0, 100], [200, 255]]


def test_a_photo_stands_upright(tmp_path):
    photo = Image.new("RGB", (40, 20), "white")
    photo.paste("red", (0, 0, 20, 20))  # left, as the camera stored it
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise: what is left comes to the top
    photo.save(tmp_path / "photo.png", exif=exif)
    upright = open_image(tmp_path / "photo.png")
    assert upright.size == (20, 40)
    assert upright.getpixel((10, 5)) == (255, 0, 0) and upright.getpixel((10, 35)) == (255, 255, 255)


def test_equal_pixels_in_two_files_are_one_image(tmp_path):
    image = Image.new("RGB", (8, 8), "red")
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "b.bmp")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "a.png", "rejected": "b.bmp"}\n')
    with pytest.raises(ValueError, match=r"pairs.jsonl:1: chosen and rejected are the same image$"):
        read_pairs(tmp_path)


def test_a_corrupt_cache_entry_is_encoded_anew(tmp_path):
    import dpo_offline

    good = {"latents": torch.zeros(2, 1), "prompt_embeds": torch.zeros(1, 3)}
    for name, tensors in (("good", good), ("nan", {**good, "latents": torch.full((2, 1), torch.nan)})):
        torch.save(tensors, tmp_path / f"{name}.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:100])
    (tmp_path / "noise.pt").write_bytes(b"\0" * 500)
    torch.save({"latents": torch.zeros(1, 1)}, tmp_path / "half.pt")
    found = {
        name: dpo_offline.is_encoded(tmp_path / f"{name}.pt") for name in ("good", "nan", "cut", "noise", "half", "no")
    }
    assert found == {"good": True, "nan": False, "cut": False, "noise": False, "half": False, "no": False}


# ---- pictures --------------------------------------------------------------------------------------------------------
def test_a_caption_is_measured_in_linear_time_and_survives_line_breaks(tmp_path, monkeypatch):
    from PIL import ImageDraw

    measured = []
    real = ImageDraw.ImageDraw.textlength
    monkeypatch.setattr(
        ImageDraw.ImageDraw, "textlength", lambda self, text: measured.append(len(text)) or real(self, text)
    )
    save_grid(tmp_path / "grid.png", [Image.new("RGB", (96, 32))] * 2, ["x" * 5000, "two\nlines"])
    assert sum(measured) < 200 * 200 and max(measured) <= 200


def test_curves_have_a_colour_for_each_reward_and_the_panels_of_the_script(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

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


def test_a_reward_has_one_colour_in_training_and_evaluation():
    totals = {"val/red/mean": 0.1, "val/ocr/mean": 0.5, "val/weighted_total/mean": 0.6}
    drawn = [(name, pictures._drawn_with([totals], f"critic/rewards/{name}")) for name in ("ocr/mean", "mean")]
    assert drawn == [("ocr/mean", "val/ocr/mean"), ("mean", "val/weighted_total/mean")]
    alone = totals | {"val/weighted_total/mean": 0.5}  # red is only watched
    assert pictures._drawn_with([alone], "critic/rewards/mean") == "val/ocr/mean"
    assert pictures._drawn_with([alone], "val/red/mean") == "val/red/mean"


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
    assert drawn_metrics([rollout, *one], PANELS["reward"]) == ["critic/rewards/mean", "val/ocr/mean"]
    rollout["critic/rewards/red/mean"] = 0.0
    assert drawn_metrics([rollout], PANELS["reward"]) == sorted(rollout)
    assert drawn_metrics(two, PANELS["reward"]) == ["val/ocr/mean", "val/red/mean", "val/weighted_total/mean"]
    with pytest.raises(ValueError, match="--reward .*weighted_total is what their weighted sum is logged as"):
        load_rewards([f"{__file__}:weighted_total"], (1.0,))


def weighted_total(images, prompts, metadata):
    return [0.0] * len(images)


def test_plot_runs_overlays_a_curve_a_run(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

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
    assert plot_runs.labels_of(["x/a", "y/b"]) == ["a", "b"]
    assert plot_runs.labels_of(["x/a", "y/a"]) == ["x/a", "y/a"]
