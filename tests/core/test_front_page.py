"""docs/make_front_page.py: the README's pictures are those of the records."""

from docs import make_front_page

import pytest
from PIL import Image

pytestmark = pytest.mark.fast


def test_the_pictures_are_made_of_the_records(tmp_path):
    make_front_page.compose_grids(tmp_path / "before_after.png")
    make_front_page.compose_scenes(tmp_path / "scenes.png")
    for name in ("before_after.png", "scenes.png"):
        made, shown = (Image.open(folder / name).convert("RGB") for folder in (tmp_path, make_front_page.DOCS))
        assert made.size == shown.size and made.tobytes() == shown.tobytes()
    curve = make_front_page.read_curve(make_front_page.RECORDS / "default-flow_grpo-seed1", "ocr")
    assert curve[0] == (0, pytest.approx(0.643, abs=1e-3))
    assert [step for step, _ in curve] == list(range(0, 41, 5)) and curve[-1][1] > 0.9
