"""The reward of what an edit leaves as it was."""

import io
import json

from common.files.prompts import read_prompts
from common.rewards.preservation import preservation
from common.scoring import score_images

import numpy as np
import pytest
from PIL import Image, ImageFilter

pytestmark = pytest.mark.fast


def plain(level, size=(40, 20)):
    return Image.new("RGB", size, (level,) * 3)


def half_white(size=(40, 20)):
    """Left black, right white."""
    picture = plain(0, size)
    picture.paste(plain(255, (size[0] // 2, size[1])), (size[0] // 2, 0))
    return picture


def test_equal_pictures_score_1_and_black_and_white_score_0():
    record = {"image": [plain(0)]}
    assert preservation([plain(0), plain(255), plain(51)], [""] * 3, [record] * 3) == pytest.approx([1, 0, 0.8])


def test_under_a_mask_nothing_counts():
    """A mask that is white on the right: the left half decides, pixel by pixel and without a blur."""
    source, mask = half_white(), half_white()
    record = {"image": [source], "mask": [mask]}
    changed_right = plain(0)
    changed_left = plain(255)
    assert preservation([changed_right, changed_left], [""] * 2, [record] * 2) == pytest.approx([1, 0])
    one_pixel = source.copy()
    one_pixel.putpixel((3, 5), (255, 255, 255))  # of 400 that are compared
    assert preservation([one_pixel], [""], [record]) == pytest.approx([1 - (1 / 400) ** 0.5])


def test_without_a_mask_blurred_pictures_are_compared():
    """The radius is a 16th of the shorter side: 4 of 64 pixels."""
    source = plain(0, (64, 64))
    edit = source.copy()
    edit.paste(plain(255, (6, 6)), (20, 30))
    (score,) = preservation([edit], [""], [{"image": [source]}])
    blurred = np.asarray(edit.filter(ImageFilter.GaussianBlur(4)), dtype=float) / 255
    assert score == pytest.approx(1 - np.sqrt((blurred**2).mean()))
    unblurred = 1 - (36 / 64**2) ** 0.5
    assert unblurred + 0.03 < score < 1


def test_a_mask_whose_dark_spot_vanishes_fails_the_image():
    """The spot of one pixel lies between those that a smaller size keeps."""
    mask = plain(255)
    mask.putpixel((0, 0), (0, 0, 0))
    small = plain(0, (8, 4))
    (score,) = preservation([small], [""], [{"image": [plain(0)], "mask": [mask]}])
    assert isinstance(score, ValueError) and str(score).startswith('"mask": it is white everywhere once')


def test_a_source_of_another_size_is_brought_to_the_edits():
    assert preservation([plain(51)], [""], [{"image": [plain(51, (90, 70))]}]) == pytest.approx([1])


def test_records_are_checked_and_pictures_are_read(tmp_path):
    for name, picture in {
        "a.png": half_white(),
        "mask.png": half_white(),
        "white.png": plain(255),
        "one.png": plain(1),
    }.items():
        file = io.BytesIO()
        picture.save(file, "PNG")
        (tmp_path / name).write_bytes(file.getvalue())
    path = tmp_path / "edits.jsonl"
    rewards = {"preservation": preservation}
    record = {"prompt": "make it red", "image": "a.png", "mask": "mask.png"}
    path.write_text(json.dumps(record) + "\n")
    prompts = read_prompts(path, rewards)
    assert score_images(rewards, [plain(0)], prompts).tolist() == [[1.0]]
    refused = {
        json.dumps({"prompt": "make it red"}): '.*"image"',
        json.dumps(record | {"mask": "white.png"}): '"mask": ',
        json.dumps(record | {"mask": "one.png"}): '"mask": .* 1 of 255',
        json.dumps(record | {"mask": "none.png"}): '"mask": .*/none.png: ',
    }
    for line, message in refused.items():
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=f"edits.jsonl:1: {message}"):
            read_prompts(path, rewards)
