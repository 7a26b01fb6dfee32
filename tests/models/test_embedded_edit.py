"""The embedded task of edits: what its records ask for, its masks, and that the script draws what is committed."""

import random
import re

from assets import make_embedded_edit
from assets.make_embedded import COLOURS, LIGHT, Style, draw, load_fonts, luminance
from assets.make_embedded_edit import all_but_ink, new_colour, random_pair, text_band
from assets.sign_colour import named_colour, sign_colour
from common.files.prompts import read_prompts
from common.rewards.ocr import ocr, quoted_text, recognize
from common.rewards.preservation import preservation
from tests.conftest import ROOT

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.fast

STYLE = Style((244, 244, 240), (0, 0, 0), "DejaVuSans", 22, (0.5, 0.5))


@pytest.fixture(scope="module")
def fonts():
    return load_fonts()


@pytest.fixture(scope="module")
def task():
    rewards = {"ocr": ocr, "sign_colour": sign_colour, "preservation": preservation}
    return [read_prompts(ROOT / f"assets/edit_{name}.jsonl", rewards) for name in ("train", "eval")]


def test_no_number_and_no_sign_is_in_both_files(task):
    """Of a sign that is repainted, the number is the sign's own, and stands in several records of the same file."""
    assert [len(prompts) for prompts in task] == [64 * 16, 64 * 4]
    numbers = [{quoted_text(prompt) for prompt in prompts.prompts} for prompts in task]
    signs = [{str(record["image"][0]) for record in prompts.metadata} for prompts in task]
    assert not numbers[0] & numbers[1] and not signs[0] & signs[1]
    assert [len(names) for names in signs] == [64, 64]
    repainted = [sum(prompt.startswith("make") for prompt in prompts.prompts) for prompts in task]
    assert repainted == [64 * 4, 64]


def test_the_prompts_say_what_the_signs_are(task):
    """The colour of a sign whose number changes is the prompt's already, and the number of one that is repainted."""
    for prompt, record in zip(task[1].prompts, task[1].metadata, strict=True):
        sign = record["image"][0].decode()
        assert sign.size == (96, 32)
        ground = np.median(np.asarray(sign).reshape(-1, 3), axis=0)
        is_repainted = prompt.startswith("make the sign")
        assert (np.abs(ground - named_colour(prompt)).max() <= 10) == (not is_repainted)
        assert str(record["mask"][0]).endswith("ground.png" if is_repainted else "band.png")
    (prompt, record) = next(pair for pair in zip(task[1].prompts, task[1].metadata, strict=True) if "make" in pair[0])
    assert recognize([record["image"][0].decode()]) == [quoted_text(prompt)]


def test_the_committed_files_are_the_scripts(tmp_path, fonts):
    make_embedded_edit.write_task(make_embedded_edit.Args(out=tmp_path / "model"), fonts)
    for name in ("edit_train.jsonl", "edit_eval.jsonl"):
        assert (tmp_path / name).read_text() == (ROOT / "assets" / name).read_text()
    files = sorted(path.name for path in (tmp_path / "edit_signs").iterdir())
    assert files == sorted(path.name for path in (ROOT / "assets/edit_signs").iterdir()) and len(files) == 128 * 3
    for name in files[::17]:
        made, committed = (Image.open(folder / "edit_signs" / name) for folder in (tmp_path, ROOT / "assets"))
        assert np.array_equal(np.asarray(made), np.asarray(committed))


def test_masks_leave_what_must_not_change(fonts):
    sign = np.asarray(draw("12", STYLE._replace(ground=(255, 255, 255)), fonts))
    is_ink = sign[:, :, 0] < 128
    ground = np.asarray(all_but_ink("12", STYLE, fonts))
    assert np.array_equal(ground == 0, is_ink) and is_ink.any()
    band = np.asarray(text_band("12", STYLE, fonts))
    rows = np.flatnonzero(is_ink.any(axis=1))
    is_band = np.zeros(32, dtype=bool)
    is_band[rows[0] - 1 : rows[-1] + 2] = True
    assert np.array_equal(band == 255, np.tile(is_band[:, None], 96)) and set(np.unique(band)) == {0, 255}


def test_a_pair_differs_by_what_its_prompt_says(fonts):
    rng = random.Random(0)
    seen = set()
    for _ in range(40):
        source, prompt, target = random_pair(rng, fonts)
        before, after = (np.asarray(picture).reshape(-1, 3) for picture in (source, target))
        changed = re.fullmatch(r'(change) the (\w+) sign to "\d+"|(make) the sign "\d+" (\w+)', prompt)
        colour = COLOURS[changed[2] or changed[4]]
        same_ground = np.array_equal(np.median(before, axis=0), np.median(after, axis=0))
        assert same_ground == bool(changed[1]) and np.abs(np.median(after, axis=0) - colour).max() <= 10
        seen.add(changed[1] or changed[3])
    assert seen == {"change", "make"}
    for name in COLOURS:
        other = new_colour(name, rng)
        assert other != name and (luminance(COLOURS[other]) > LIGHT) == (luminance(COLOURS[name]) > LIGHT)


def test_rewards_tell_a_good_edit_from_none_and_from_a_spoilt_one(fonts):
    """The edit that was asked for has the best sum, and preservation alone is best where nothing is changed."""
    source = draw("4711", STYLE, fonts)
    asked = draw("0823", STYLE, fonts)
    spoilt = draw("0823", STYLE._replace(ground=COLOURS["yellow"]), fonts)
    record = {"image": [source], "mask": [text_band("4711", STYLE, fonts)]}
    scores = []
    for image in (asked, source, spoilt):
        arguments = [image], ['change the white sign to "0823"'], [record]
        scores.append([ocr(*arguments)[0]["score"], preservation(*arguments)[0]])
    assert scores[0] == [1, 1] and scores[1] == [0, 1]
    assert scores[2][0] == 1 and scores[2][1] < 0.7
