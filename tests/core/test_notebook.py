"""docs/first_run.ipynb: its commands are taken by their script, and its code does what it says."""

import json
import shlex

import flow_grpo
from common.run.command_line import parse_args
from tests.conftest import ROOT

import pytest
from PIL import Image

pytestmark = pytest.mark.fast

NOTEBOOK = json.loads((ROOT / "docs" / "first_run.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
TORCHRUN = "!torchrun --standalone flow_grpo.py"


def test_it_is_a_notebook_without_outputs():
    assert NOTEBOOK["nbformat"] == 4
    assert {cell["cell_type"] for cell in NOTEBOOK["cells"]} == {"code", "markdown"}
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"])


def test_it_begins_with_the_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    commands = [cell for cell in CELLS if cell.startswith("!")]
    assert commands[0].removeprefix("!").replace(" --quiet", "") in readme
    assert commands[1] == TORCHRUN and TORCHRUN.removeprefix("!") in readme


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.startswith(TORCHRUN)])
def test_a_command_is_taken_by_the_script(cell):
    args = flow_grpo.check(parse_args(flow_grpo.Args, "", shlex.split(cell.removeprefix(TORCHRUN))))
    grids = [name for name in ("grid_0000.png", "grid_0040.png") if any(name in other for other in CELLS)]
    if args.name == "flow_grpo":  # the pictures of its first and its last evaluation
        assert grids == ["grid_0000.png", f"grid_{args.num_steps:04d}.png"]


def test_its_reward_prefers_red(tmp_path):
    (cell,) = (cell for cell in CELLS if cell.startswith("%%writefile my_rewards.py\n"))
    names: dict = {}
    exec(cell.partition("\n")[2], names)
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    assert names["redness"]([red, blue], ["a", "b"], [{}, {}]) == [1, 0]


def test_all_other_cells_are_python():
    for cell in CELLS:
        if not cell.startswith(("!", "%%")):
            compile(cell, "cell", "exec")
