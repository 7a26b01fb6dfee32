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


@pytest.mark.parametrize("before", ["x = 1; ", "try: pass\nexcept ImportError: "])
def test_an_import_beside_other_code_is_left_to_the_user(tmp_path, monkeypatch, before):
    source = f"{before}from common.data import read_prompts, GroupSampler\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.setattr("sys.argv", ["move_imports", str(tmp_path / "mine.py")])
    with pytest.raises(SystemExit, match=f"mine.py: line {source.count(chr(10))}: "):
        tool.main()
    assert (tmp_path / "mine.py").read_text() == source


def test_other_ends_of_lines_stay(tmp_path, monkeypatch):
    source = "a = '\u2028'\r\n\f\r\nfrom common.data import read_prompts\r\n"
    (tmp_path / "mine.py").write_bytes(source.encode())
    monkeypatch.setattr("sys.argv", ["move_imports", str(tmp_path / "mine.py")])
    tool.main()
    assert (tmp_path / "mine.py").read_bytes().decode() == source.replace("common.data", "common.files")


def test_what_is_not_there_any_more_is_named(tmp_path, monkeypatch):
    source = "import common.checkpoints\nfrom common import sde, watch\nfrom common.data import shuffled\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.setattr("sys.argv", ["move_imports", str(tmp_path / "mine.py")])
    with pytest.raises(SystemExit) as error:
        tool.main()
    told = str(error.value).splitlines()[:-1]
    assert [line.partition(": ")[2].partition(": ")[0] for line in told] == ["line 1", "line 2", "line 3"]
    assert "common.checkpoints" in told[0] and "watch" in told[1] and "shuffled" in told[2]
