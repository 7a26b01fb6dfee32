"""docs/make_options.py: docs/options.md is what the sources say, and the words for a type are right."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from common.options import Bound, PositiveFloat, SharedArgs
from docs import make_options
from tests.conftest import ROOT

import pytest

pytestmark = pytest.mark.fast


@dataclass
class Small:
    # ---- run
    kind: Literal["a", "b|c"] = "a"
    """one of two, for runs/<name>"""
    limit: PositiveFloat | None = None
    """a bound"""

    # ---- extra
    sizes: Annotated[tuple[int, int], Bound(at_least=1)] = (32, 96)
    """two numbers
    on two lines"""
    names: tuple[str, ...] = ("x", "y")
    """several"""
    path: str = str(ROOT / "assets" / "embedded")
    """in the checkout"""
    track: bool = False
    """a switch"""


def test_rows_by_hand() -> None:
    rows = list(map(str, make_options.rows_of(Small).values()))
    assert rows == [
        r"| `--kind` | `a` or `b\|c` | `a` | one of two, for runs/\<name> |",
        "| `--limit` | number, above 0 | none | a bound |",
        "| `--sizes` | 2 values: integer, at least 1 | `32 96` | two numbers on two lines |",
        "| `--names` | several: text | `x y` | several |",
        "| `--path` | text | `assets/embedded` | in the checkout |",
        "| `--track` | `True` or `False` | `False` | a switch |",
    ]
    lines = make_options.tables(list(make_options.rows_of(Small).values()), 2)
    assert [line for line in lines if line.startswith("#")] == ["## run", "## extra"]


def test_the_page_has_every_option_of_every_script() -> None:
    page = make_options.page()
    for script in make_options.SCRIPTS:
        section = page.split(f"\n## {script}\n")[1].split("\n## ")[0]
        above = page.split(f"\n## {make_options.BASE}\n")[0]
        missing = [
            option.name
            for option in fields(make_options.args_class(script))
            if f"`--{option.name}`" not in section and f"| `--{option.name}` |" not in above
        ]
        assert missing == []
    assert all(f"| `--{option.name}` |" in page for option in fields(SharedArgs))


def test_a_script_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    make_options.main(["mix_grpo.py"])
    printed = capsys.readouterr().out
    assert printed.startswith("# mix_grpo.py\n\n## run\n")
    assert all(f"| `--{option.name}` |" in printed for option in fields(make_options.args_class("mix_grpo.py")))


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == make_options.page()
