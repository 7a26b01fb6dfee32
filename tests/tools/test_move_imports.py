"""tools/move_imports.py, on sources that import what has moved."""

import importlib

from tools import move_imports as tool

import pytest

pytestmark = pytest.mark.fast

BEFORE = """from common.data import GroupSampler, read_prompts
from common.scoring import (
    Scorer,  # of a rollout
    load_rewards as load,
)
from common.sde import sde_step


def start():
    from common.engine.launch import check_engine  # late

    return check_engine
"""
AFTER = """from common.data import GroupSampler
from common.files import read_prompts
from common.rewards import load_rewards as load
from common.scoring import Scorer
from common.sde import sde_step


def start():
    from common.engine import check_engine  # late

    return check_engine
"""


def test_names_are_taken_from_where_they_are_and_all_else_stays():
    assert tool.move_imports(BEFORE) == AFTER
    assert tool.move_imports(AFTER) == AFTER


def test_every_name_is_where_the_table_says():
    for module, places in tool.MOVED.items():
        for place, names in places.items():
            found = importlib.import_module(place)
            assert all(hasattr(found, name) for name in names.split()), (module, place)


def test_a_file_that_is_no_python_is_named(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def (")
    monkeypatch.setattr("sys.argv", ["move_imports", str(tmp_path / "mine.py")])
    with pytest.raises(SystemExit, match="mine.py"):
        tool.main()
    assert (tmp_path / "mine.py").read_text() == "def ("
