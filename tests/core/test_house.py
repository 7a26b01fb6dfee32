"""tests/house.py: what it counts, on small trees made here; and that the project is within its bounds."""

import subprocess
import sys
from pathlib import Path

from tests import house
from tests.conftest import ROOT

import pytest

pytestmark = pytest.mark.fast

SCRIPT = """
import math
from common import store, tools_of_ours
from common.shapes import Shape, area as size
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.hints import Hint


def main(run) -> int:
    from common.engine.client import Engine

    engine = Engine(store.path, store.path)
    run.log(engine.push, run.folder, math.pi)
    return size(Shape(store.name))
"""


@pytest.fixture
def tree(tmp_path):
    """A project of a script and a few files of common/."""
    files = {
        "script.py": SCRIPT,
        "common/__init__.py": "",
        "common/store.py": "def save() -> None:\n    from common.late import x\n    from common.rewards import ocr\n",
        "common/tools_of_ours.py": "",
        "common/shapes.py": "try:\n    import common.deep\nexcept ImportError:\n    pass\n",
        "common/deep.py": "",
        "common/late.py": "",
        "common/hints.py": "",
        "common/engine/__init__.py": "",
        "common/engine/client.py": "",
        "common/models/stable_diffusion_3.py": "from common.vae import y\n",
        "common/vae.py": "\n\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


# ---- a script --------------------------------------------------------------------------------------------------------
def test_names_and_attributes_of_a_script(tree):
    assert house.names(tree, "script.py") == {"Shape", "size", "Engine", "Hint", "store.path", "store.name"}
    assert house.reach(tree, "script.py") == {"run.write", "run.folder", "engine.push"}
    assert house.main_lines(tree, "script.py") == 6
    assert house.main_lines(tree, "common/store.py") == 0


def test_a_copy_needs_what_is_imported_except_what_an_option_names(tree):
    """Late imports are followed, those inside of try as well; a late one of the engine or a reward is not."""
    needed = house.closure(tree, "script.py")
    assert needed == {
        Path("common/__init__.py"),
        Path("common/store.py"),
        Path("common/late.py"),
        Path("common/tools_of_ours.py"),
        Path("common/shapes.py"),
        Path("common/deep.py"),
        Path("common/models/stable_diffusion_3.py"),
        Path("common/vae.py"),
    }
    lines = 3 + 4 + 1 + 2  # of store, shapes, stable_diffusion_3 and vae
    values = {"names": 6, "reach": 3, "files": 8, "lines": lines, "main": 6}
    assert house.measure(tree, "script.py") == values
    (tree / "script.py").write_text("from common.engine import client\n")  # at the top it is needed
    assert Path("common/engine/client.py") in house.closure(tree, "script.py")


def test_circles_are_found_through_late_imports(tree):
    files = house.files_of_common(tree)
    assert house.circles(tree, files) == []
    (tree / "common" / "late.py").write_text("def f():\n    from common import store\n")
    assert house.circles(tree, files) == ["common/late.py -> common/store.py -> common/late.py"]
    (tree / "common" / "late.py").write_text("def f():\n    from common.engine import client\n")  # a room of an option
    (tree / "common" / "engine" / "client.py").write_text("import common.late\n")
    assert house.circles(tree, files) == []


# ---- functions and classes -------------------------------------------------------------------------------------------
CLASSES = """
class Large:
    def __init__(self, a: int): ...
    def one(self) -> None: ...
    def two(self, *args, **kwargs) -> "int": ...
    def _hidden(self, b: object) -> Any: ...

class Derived(Large):
    def three(self): ...

def no_return(a: int): ...
async def no_parameter(a, *, b: int) -> None: ...
def keyword(*, b) -> None: ...
"""


def test_signatures_and_methods_are_counted(tree):
    path = tree / "common" / "late.py"
    path.write_text(CLASSES)
    assert [line.split()[1] for line in house.untyped(path)] == ["no_return", "no_parameter", "keyword", "three"]
    assert house.vague_annotations(path) == 2
    assert house.public_methods(path) == {"Large": 2}


WIDE = "class Wide:\n" + "".join(f"    def f{number}(self) -> None: ...\n" for number in range(13))
VAGUE = "def f(" + "".join(f"a{number}: object, " for number in range(16)) + ") -> None: ...\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("script.py", "def main() -> None:\n" + "    pass\n" * 80, "script.py: main 81 (at most 80)"),
        ("script.py", "def f(a) -> None:\n    pass\n", "script.py:1 f: lacks a type"),
        ("common/late.py", WIDE, "common/late.py: Wide has 13 public methods (at most 12)"),
        ("common/late.py", VAGUE, "16 annotations say Any or object (at most 15)"),
        ("common/late.py", "import common.deep\n" * 4625, "script.py: lines 4629 (at most 4625)"),
        (
            "common/deep.py",
            "import common.late\n",
            "circle of imports: common/deep.py -> common/late.py -> common/deep.py",
        ),
    ],
)
def test_a_broken_bound_is_a_line(tree, name, text, expected):
    (tree / "script.py").write_text("from common import store\n")
    (tree / "common" / "late.py").write_text("import common.deep\n")
    (tree / "common" / "store.py").write_text("import common.late\n")
    assert house.broken_bounds(tree, ["script.py"]) == []
    (tree / name).write_text(text)
    assert house.broken_bounds(tree, ["script.py"]) == [expected]


def test_a_room_of_thirteen_files_is_one_too_many(tree):
    for number in range(12):
        (tree / "common" / "engine" / f"f{number}.py").write_text("")
        (tree / "common" / "models" / f"f{number}.py").write_text("")  # a file a model
    (tree / "script.py").write_text("")
    assert house.broken_bounds(tree, ["script.py"]) == ["common/engine: 13 files (at most 12)"]


# ---- the project -----------------------------------------------------------------------------------------------------
def test_the_project_is_within_its_bounds():
    assert house.broken_bounds(ROOT) == []


def test_the_command():
    command = [sys.executable, "tests/house.py", "--check", "flow_grpo.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == ("broken: " in done.stdout) and done.stderr == ""
    assert "flow_grpo.py" in done.stdout and "common/engine" in done.stdout
