"""NanoDet for the reward geneval: outputs as recorded from the package's graph, the same in any batch, and the rules on
rendered scenes. benchmarks/nanodet_pairs.py compares it with the graph on 100 images."""

import json
import random
from pathlib import Path

from assets.scenes import draw_scene, kinds, random_scenes
from common.files.prompts import read_prompts
from common.rewards import _box_colours
from common.rewards import geneval as geneval_file
from common.rewards._box_colours import colours_of_boxes, to_lab
from common.rewards._geneval_rules import CLASSES, COLOURS, Detection, fraction_right
from common.rewards._nanodet import detect_in, preprocess, read_nanodet, read_outputs, read_settings, select
from common.rewards.geneval import geneval

import pytest
import torch
from PIL import Image, ImageChops

FOLDER = Path(__file__).parents[2] / "assets" / "nanodet"
REFERENCE = Path(__file__).with_name("nanodet_reference.json")
RED, BLUE = (204, 36, 36), (40, 88, 208)


@pytest.fixture
def nanodet(monkeypatch):
    monkeypatch.setenv("GENEVAL_DETECTOR", str(FOLDER))
    monkeypatch.delenv("GENEVAL_CLIP", raising=False)
    monkeypatch.delenv("GENEVAL_DTYPE", raising=False)
    monkeypatch.setattr("common.rewards._networks.LOADED", {})


def clause(name, count=1, **more):
    return {"class": name, "count": count, **more}


# ---- the network -----------------------------------------------------------------------------------------------------
@pytest.mark.fast
@torch.no_grad()
def test_outputs_are_those_of_the_packages_graph():
    """Of places at which the graph is surest, and of some others, as benchmarks/nanodet_pairs.py recorded them."""
    reference = json.loads(REFERENCE.read_text())
    image = draw_scene(reference["record"], random.Random(0))
    model = read_nanodet(str(FOLDER))
    scores, distances = model(preprocess(model, [image]))
    assert scores.shape == (1, 52**2 + 26**2 + 13**2, 80) and distances.shape == (1, 3549, 44)
    for row in reference["places"]:
        torch.testing.assert_close(scores[0, row["place"]], torch.tensor(row["scores"]), atol=1e-4, rtol=0)
        torch.testing.assert_close(distances[0, row["place"]], torch.tensor(row["distances"]), atol=1e-4, rtol=1e-4)
    assert scores.max() > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_image_is_seen_the_same_in_any_batch(nanodet, dtype):
    """To the bit: alone, first of three, and last of eleven, which take two passes."""
    model = read_nanodet(str(FOLDER)).requires_grad_(False)
    images = [image for image, _ in random_scenes("counting", 11, seed=3)]
    for one, batch in ((0, images[:3]), (10, images)):
        alone, beside = detect_in(model, [images[one]], dtype)[0], detect_in(model, batch, dtype)[one]
        assert alone and alone == beside


@torch.no_grad()
def test_bf16_sees_what_fp32_sees(nanodet, monkeypatch):
    """The scores of the surest places differ by 8 bits' rounding in every layer, and scenes are right as before."""
    model = read_nanodet(str(FOLDER)).requires_grad_(False)
    scenes = random_scenes("two_object", 4, seed=5)
    pixels = preprocess(model, [image for image, _ in scenes])
    (scores, boxes), (rounded, moved) = read_outputs(model, pixels), read_outputs(model, pixels, torch.bfloat16)
    assert rounded.dtype == moved.dtype == torch.float32
    sure = scores.amax(2) > 0.3
    assert 0 < (rounded - scores).abs()[sure].max() < 0.05
    assert 0 < (moved - boxes)[sure].abs().max() < 6  # of 416 pixels
    judged = []
    for dtype in ("float32", "bfloat16"):
        monkeypatch.setenv("GENEVAL_DTYPE", dtype)
        judged.append(geneval([image for image, _ in scenes], [""] * 4, [record for _, record in scenes]))
    assert judged[0] == judged[1] and judged[0][0]["score"] == 1


@pytest.mark.fast
def test_a_dtype_that_the_detector_cannot_have_is_refused(nanodet, monkeypatch):
    monkeypatch.setenv("GENEVAL_DTYPE", "fp8")
    with pytest.raises(ValueError, match="^GENEVAL_DTYPE=fp8: .*float32.*bfloat16"):
        geneval_file.load()
    monkeypatch.setenv("GENEVAL_DTYPE", "bfloat16")
    monkeypatch.setenv("GENEVAL_DETECTOR", "facebook/mask2former-swin-small-coco-instance")
    with pytest.raises(ValueError, match="^GENEVAL_DTYPE=bfloat16: .*NanoDet.*GENEVAL_DETECTOR.*mask2former"):
        geneval_file.load()


@pytest.mark.fast
def test_boxes_reach_from_the_middle_of_a_place():
    """A stub whose distances are all 2 strides: the first place of stride 8 has its middle at 4, so -12 to 20."""

    def model(pixels):
        distances = torch.full((1, 21, 4, 11), -100.0)
        distances[..., 2] = 100.0
        return torch.zeros(1, 21, 80), distances.flatten(2)

    _, boxes = read_outputs(model, torch.zeros(1, 3, 32, 32))
    assert boxes[0, 0].tolist() == [-12, -12, 20, 20]
    assert boxes[0, 1].tolist() == [-4, -12, 28, 20]  # the next to the right
    assert boxes[0, 20].tolist() == [-48, -48, 80, 80]  # the only place of stride 32


@pytest.mark.fast
def test_of_boxes_that_overlap_the_surer_one_stays():
    settings = {"competing": ["cup", "bird"], "other_threshold": 0.3, "thresholds": {"counting": 0.2}, "iou": 0.5}
    scores = torch.zeros(5, 80)
    cup, bird, dog = (CLASSES.index(name) for name in settings["competing"] + ["dog"])
    scores[0, cup], scores[0, dog] = 0.5, 0.9  # dogs do not compete
    scores[1, cup] = 0.6
    scores[2, bird] = 0.55  # overlaps the surer cup by 9 / 11
    scores[3, cup] = 0.25
    scores[4, cup] = 0.15  # below the lowest threshold
    boxes = torch.tensor([[50, 0, 60, 10], [0, 0, 10, 10], [1, 0, 11, 10], [5, 0, 15, 10], [80, 0, 90, 10]]).float()
    found = select(scores, boxes, settings)
    assert {name: [(round(each.score, 2), each.box[0]) for each in of] for name, of in found.items()} == {
        "cup": [(0.6, 0), (0.5, 50), (0.25, 5)]  # the last overlaps by a third
    }


@pytest.mark.fast
def test_the_settings_name_classes_of_coco(tmp_path):
    settings = read_settings(str(FOLDER))
    assert settings["classes"] == CLASSES and kinds() == settings["competing"] and len(kinds()) >= 8
    assert read_settings("facebook/mask2former-swin-small-coco-instance") is None
    (tmp_path / "detector.json").write_text(json.dumps(settings | {"classes": CLASSES[::-1]}))
    with pytest.raises(ValueError, match="detector.json: its classes are not COCO's 80"):
        read_settings(str(tmp_path))


# ---- colours ---------------------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("colour", COLOURS)
def test_colours_by_the_pixels_of_a_box(colour):
    """A painted car has black wheels and light windows, and its ground another colour."""
    record = {"tag": "colors", "include": [clause("car", color=colour)]}
    image = draw_scene(record, random.Random(0))
    grey = Image.new("RGB", (60, 60), (128, 128, 128))
    paint = {"red": RED, "blue": BLUE}.get(colour)
    if paint:
        grey.paste(paint, (20, 20, 40, 40))
        grey.paste((10, 10, 10), (20, 36, 40, 40))
        assert colours_of_boxes(grey, [Detection((20.2, 19.8, 40, 40), 1.0)]) == [colour]
    box = ImageChops.difference(image, Image.new("RGB", image.size, image.getpixel((0, 0)))).getbbox()
    assert colours_of_boxes(image, [Detection(box, 1.0)]) == [colour]


@pytest.mark.fast
def test_a_box_beyond_the_image_has_a_colour():
    image = Image.new("RGB", (20, 20), BLUE)
    boxes = [(-5.0, -5.0, 25.0, 25.0), (30.0, 30.0, 40.0, 40.0), (19.6, 4.0, 19.9, 9.0)]  # the last is rounded to 20
    assert colours_of_boxes(image, [Detection(box, 1.0) for box in boxes]) == ["blue"] * 3


@pytest.mark.fast
def test_of_a_large_box_not_all_pixels_are_looked_at(monkeypatch):
    """A distance to each shade of every pixel of a large image takes seconds and gigabytes."""
    looked_at = []
    monkeypatch.setattr(_box_colours, "to_lab", lambda rgb: looked_at.append(len(rgb)) or to_lab(rgb))
    image = Image.new("RGB", (1024, 768), BLUE)
    image.paste(RED, (10, 10, 900, 700))
    assert colours_of_boxes(image, [Detection((10, 10, 900, 700), 1.0)]) == ["red"]
    assert 2**14 < max(looked_at) <= 2**16


@pytest.mark.fast
def test_a_grey_object_has_no_colour_that_a_record_asks_for():
    image = Image.new("RGB", (60, 60), BLUE)
    image.paste((132, 132, 132), (20, 20, 40, 40))
    (colour,) = colours_of_boxes(image, [Detection((20, 20, 40, 40), 1.0)])
    assert colour not in COLOURS


# ---- the reward ------------------------------------------------------------------------------------------------------
def test_scenes_are_right_and_spoilt_records_wrong(nanodet):
    """Through the reward itself: places, numbers and colours of three scenes, and of records that are not theirs."""
    placed = [clause("laptop"), clause("teddy bear", position=["left of", 0])]
    records = [
        {"tag": "position", "include": placed},
        {"tag": "counting", "include": [clause("laptop", 3)], "exclude": [clause("laptop", 4)]},
        {"tag": "color_attr", "include": [clause("car", color="green"), clause("teddy bear", color="blue")]},
    ]
    images = [draw_scene(record, random.Random(0)) for record in records]
    assert geneval(images, [""] * 3, records) == [{"score": 1.0, "soft": 1.0}] * 3
    wrong = [
        {"tag": "position", "include": [placed[0], clause("teddy bear", position=["right of", 0])]},
        {"tag": "counting", "include": [clause("laptop", 2)], "exclude": [clause("laptop", 3)]},
        {"tag": "color_attr", "include": [clause("car", color="blue"), clause("teddy bear", color="blue")]},
    ]
    softs = [2 / 3, 1 / 2, 3 / 4]
    assert geneval(images, [""] * 3, wrong) == [{"score": 0.0, "soft": soft} for soft in softs]


@pytest.mark.fast
def test_fractions_by_hand():
    at = lambda left, top: Detection((left, top, left + 20, top + 20), 0.9)
    red = lambda name, found: ["red"] * len(found)
    three = {"cup": [at(0, 0), at(40, 0), at(80, 0)]}
    for asked, expected in ((3, 1), (4, 3 / 4), (2, 1 / 2), (1, 0)):  # one of three: -1, which counts as 0
        assert fraction_right({"include": [clause("cup", asked)]}, three, red) == expected
    coloured = {"include": [clause("cup", 3, color="red"), clause("bird", color="red")]}
    assert fraction_right(coloured, three, red) == 2 / 4
    mixed = lambda name, found: ["red", "blue", "red"]
    assert fraction_right({"include": [clause("cup", 3, color="red")]}, three, mixed) == pytest.approx((1 + 2 / 3) / 2)
    placed = {"include": [clause("cup"), clause("bird", position=["left of", 0])]}
    assert fraction_right(placed, {"cup": [at(80, 0)], "bird": [at(0, 0)]}, red) == 1
    assert fraction_right(placed, {"cup": [at(0, 0)], "bird": [at(80, 0)]}, red) == 2 / 3
    assert fraction_right(placed, {"bird": [at(0, 0)]}, red) == 1 / 3  # nothing to be left of
    assert fraction_right(placed, {"cup": [at(80, 0)], "bird": [at(0, 0), at(0, 40)]}, red) == 1 / 3
    counted = {"include": [clause("cup", 3)], "exclude": [clause("cup", 4)]}  # GenEval's own kind of "exclude"
    assert fraction_right(counted, three | {"cup": [*three["cup"], at(120, 0)]}, red) == pytest.approx(2 / 3)
    without = {"include": [clause("cup", 3)], "exclude": [clause("bird", 2)]}
    assert [fraction_right(without, three | {"bird": [at(0, 0)] * count}, red) for count in (1, 2)] == [1, 1 / 2]


@pytest.mark.fast
def test_thresholds_are_those_of_the_detectors_file(nanodet, monkeypatch):
    settings = read_settings(str(FOLDER)) | {"thresholds": {"counting": 0.6}, "other_threshold": 0.3}
    monkeypatch.setattr(geneval_file, "read_settings", lambda folder: settings)
    monkeypatch.setattr(geneval_file, "load", lambda: (None,) * 4)
    monkeypatch.setattr(
        geneval_file, "detect_in", lambda model, images, dtype: [{"cup": [Detection((0, 0, 9, 9), 0.5)]}] * len(images)
    )
    records = [{"tag": tag, "include": [clause("cup")]} for tag in ("counting", "colors")]
    scores = geneval([Image.new("RGB", (9, 9))] * 2, [""] * 2, records)
    assert [each["score"] for each in scores] == [0, 1]


@pytest.mark.fast
def test_a_class_that_the_detector_is_not_to_look_for_is_named(nanodet, tmp_path):
    (tmp_path / "mine.jsonl").write_text(
        json.dumps({"prompt": "a zebra", "tag": "single_object", "include": [clause("zebra")]})
    )
    with pytest.raises(ValueError, match="mine.jsonl:1: .*GENEVAL_DETECTOR=.*nanodet looks for no zebra, only for "):
        read_prompts(tmp_path / "mine.jsonl", {"geneval": geneval})


def test_a_clip_overrides_the_pixels(nanodet, tmp_path, monkeypatch):
    from tests.tiny_models import make_clip

    make_clip(tmp_path / "clip", seed=1)
    assert geneval_file.load()[2:] == (None, None)
    monkeypatch.setenv("GENEVAL_CLIP", str(tmp_path / "clip"))
    monkeypatch.setattr(geneval_file, "colours_of_boxes", lambda *args: pytest.fail("judged by pixels"))
    image = Image.new("RGB", (40, 40), RED)
    geneval_file.colour_embeddings.cache_clear()
    (colour,) = geneval_file.colours_of(image, "car", [Detection((5, 5, 30, 30), 0.9)])
    geneval_file.colour_embeddings.cache_clear()
    assert colour in COLOURS


# ---- scenes ----------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_records_of_scenes_are_genevals():
    for tag in ("single_object", "two_object", "counting", "colors", "position", "color_attr"):
        for image, record in random_scenes(tag, 8, seed=0):
            assert image.size == (128, 128) and record["tag"] == tag
            geneval_file.check_metadata(record)
    assert [r for _, r in random_scenes("position", 3, seed=1)] == [r for _, r in random_scenes("position", 3, seed=1)]
