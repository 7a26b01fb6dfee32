"""OCR of a whole picture, by the real detector and recogniser: rendered pictures whose text is known."""

import functools
import importlib
import importlib.util
import threading
from pathlib import Path

from common.rewards._loading import load_rewards
from common.rewards.ocr_scene import ocr_scene, read_scene
from common.rewards.ocr_scene_contains import ocr_scene_contains

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

models = Path(importlib.util.find_spec("rapidocr").origin).parent / "models"
pytestmark = pytest.mark.skipif(not list(models.glob("*_det_*")), reason="RapidOCR's detector is not installed")

# {name: (width, height, [(x, y, size, text)], the text that is read)}: lines of several sizes, at several places
PICTURES = {
    "one word in a corner": (512, 512, [(330, 440, 40, "BAKERY")], "BAKERY"),
    "a line in the middle": (512, 512, [(60, 220, 64, "Hello World")], "HelloWorld"),
    "lines, the largest last": (
        512,
        512,
        [(40, 60, 28, "fresh"), (200, 180, 44, "bread"), (60, 320, 96, "DAILY")],
        "freshbreadDAILY",
    ),
    "two on one line, the right one drawn first": (
        640,
        384,
        [(360, 150, 48, "RIGHT"), (40, 150, 48, "LEFT")],
        "LEFTRIGHT",
    ),
    "a wide one": (1024, 256, [(500, 90, 60, "4711 OPEN")], "4711OPEN"),
    "a tall one of 1024": (384, 1024, [(60, 100, 50, "TOP"), (60, 900, 50, "BOTTOM")], "TOPBOTTOM"),
    "small print": (
        512,
        512,
        [(40, 100, 14, "small print here"), (300, 400, 11, "tiny 12345")],
        "smallprintheretiny12345",
    ),
    "as large as it gets": (512, 512, [(10, 100, 200, "BIG")], "BIG"),
    "a sign of one line": (96, 32, [(8, 2, 24, "4711")], "4711"),
}


def draw(name, ink="black", grounds=("white", "lightblue")):
    """The picture of that name, on a ground that changes from one colour to the other from top to bottom."""
    width, height, lines, _ = PICTURES[name]
    top, bottom = [np.asarray(Image.new("RGB", (1, 1), ground), float) for ground in grounds]
    share = np.linspace(0, 1, height)[:, None, None]
    ground = (1 - share) * top + share * bottom  # (height, 1, 3)
    image = Image.fromarray(ground.repeat(width, 1).astype(np.uint8))
    for x, y, size, text in lines:
        ImageDraw.Draw(image).text((x, y), text, fill=ink, font=ImageFont.load_default(size=size))
    return image


@pytest.fixture(scope="module")
def pictures():
    return {name: draw(name) for name in PICTURES}


@pytest.fixture(scope="module")
def read(pictures):
    """The text that is read in each picture, all in one call."""
    return dict(zip(pictures, read_scene(list(pictures.values())), strict=True))


@pytest.mark.parametrize("name", PICTURES)
def test_drawn_text_is_read(name, read):
    assert "".join(read[name].split()) == PICTURES[name][3]


@pytest.mark.fast
def test_light_text_upon_dark_ground_is_read():
    image = draw("lines, the largest last", "white", ("black", "darkred"))
    assert "".join(read_scene([image])[0].split()) == "freshbreadDAILY"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("target", "plain", "contains"),
    [
        ("fresh bread DAILY", 1, 1),  # on three lines, with other spaces and case
        ("fresh bread", 1 - 5 / 10, 1),  # the five letters of "daily" are too many
        ("bread daily", 1 - 5 / 10, 1),  # part of the text, on two lines
        ("freshbraeddaily", 1 - 2 / 15, 1 - 2 / 15),
        ("daily bread", 0, 0),  # another order: at least ten changes, capped at ten
    ],
)
def test_scores_by_hand(target, plain, contains, pictures):
    images = [pictures["lines, the largest last"]]
    prompts = [f'a window that says "{target}" at noon']
    for reward, expected in ((ocr_scene, plain), (ocr_scene_contains, contains)):
        (scored,) = reward(images, prompts, [{}])
        assert scored["score"] == pytest.approx(expected, abs=1e-12)
        assert scored["read"].lower().replace(" ", "") == "freshbreaddaily"


@pytest.mark.fast
@pytest.mark.parametrize("size", [(512, 512), (96, 32), (1024, 200)])
def test_a_picture_without_text_scores_0_because_nothing_is_read(size, caplog, capfd):
    image = Image.new("RGB", size, "grey")
    assert read_scene([image]) == [""]
    for reward in (ocr_scene, ocr_scene_contains):
        assert reward([image], ['a sign "4711"'], [{}]) == [{"score": 0, "read": ""}]
    # no warning, which a run would repeat for each image
    assert caplog.text == "" and capfd.readouterr() == ("", "")


@pytest.mark.fast
def test_no_image_or_no_quoted_text_gives_no_score():
    for images in (["no image"], [None], [Image.new("RGB", (0, 0))]):
        with pytest.raises(Exception, match=r"."):
            ocr_scene(images, ['a sign "4711"'], [{}])
    with pytest.raises(ValueError):  # a prompt for each image
        ocr_scene([Image.new("RGB", (96, 32))] * 2, ['a sign "4711"'], [{}])
    with pytest.raises(ValueError, match="OCR .*: a sign$"):
        ocr_scene([Image.new("RGB", (96, 32))], ["a sign"], [{}])


def test_what_is_read_depends_on_no_neighbour(pictures, read):
    names = list(reversed(PICTURES))
    assert read_scene([pictures[name] for name in names]) == [read[name] for name in names]
    name = "two on one line, the right one drawn first"
    assert read_scene([pictures[name].convert("RGBA")]) == [read[name]]


def test_several_threads_read_as_one_does(pictures, read, monkeypatch):
    module = importlib.import_module("common.rewards.ocr_scene")  # its function has the same name
    monkeypatch.setattr(module, "cores_of_this_rank", lambda: 3)
    monkeypatch.setattr(module, "_threads", functools.cache(module._threads.__wrapped__))
    began = threading.Barrier(3, timeout=60)  # passed only by three threads at once
    new_reader = module._new_reader
    monkeypatch.setattr(module, "_new_reader", lambda: (began.wait(), new_reader())[1])
    assert module.read_scene([pictures[name] for name in PICTURES]) == [read[name] for name in PICTURES]


@pytest.mark.fast
def test_prompts_are_checked_before_a_run():
    for reward in load_rewards(["ocr_scene", "ocr_scene_contains"], [1, 1]).values():
        reward.check('a sign "1"')
        with pytest.raises(ValueError, match="OCR .*: a sign$"):
            reward.check("a sign")
