"""What keeps the five scripts and common/ readable: bounds on density, sections in order, options read and explained.

Everything here is asked of the five scripts by name: a script of your own beside them is left alone.
"""

import ast
import re
import subprocess
import sys

from tests.conftest import ROOT, SCRIPTS, own_options, readme_row, shared_options
from tests.density import broken_bounds, measure

import pytest

pytestmark = pytest.mark.fast

SECTIONS = [
    "ARGS",
    "SETUP",
    "DATA",
    "MODEL",
    "ENGINE",
    "ROLLOUT",
    "ADVANTAGE",
    "LOG PROB",
    "LOSS",
    "EVAL",
    "CHECKPOINT",
    "MAIN",
]
# in the rooms where users add files, those of the project
OURS = {
    "rewards": [
        "__init__",
        "aesthetic",
        "clip_score",
        "geneval",
        "hpsv2",
        "http_scorer",
        "jpeg_compressibility",
        "jpeg_incompressibility",
        "json_http",
        "ocr",
        "ocr_contains",
        "ocr_scene",
        "ocr_scene_contains",
        "pickscore",
        "scoring",
        "vlm_judge",
        "watch",
    ],
    "models": [
        "__init__",
        "adapter_files",
        "family",
        "flux",
        "flux2_klein",
        "krea2",
        "lora",
        "memory",
        "prompt_cache",
        "qwen_image",
        "stable_diffusion_3",
        "vae",
        "wan",
        "wan_image_to_video",
        "z_image",
    ],
}
COMMON = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "common").rglob("*.py")
    if path.stem in OURS.get(path.parent.name, {path.stem})
)


# ---- density ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_reads_easily(script):
    assert broken_bounds(ROOT / script) == []


@pytest.mark.parametrize("path", COMMON)
def test_a_file_of_common_reads_easily(path):
    assert broken_bounds(ROOT / path) == []


# a file of six lines of logic, whose counts stand in the test below
DENSE = '''"""A docstring."""

import os


def f(a, b):  # one
    """Another."""
    a, b = b, a
    a, b = b + 1, (a > 2) * b
    c = os.path.join(a, b, "x", "y", "z", "{long}")
    # two
    return [d for d in c]
'''.replace("{long}", "w" * 60)


def test_measures_by_hand(tmp_path):
    path = tmp_path / "dense.py"
    path.write_text(DENSE)
    found = measure(path)
    sizes = [3, 6, 12, 11, 5]  # of the def's head, the swap, the packed assignment, the call and the return
    expected = {
        "lines": 12,
        "code": 6,
        "tokens": 60,
        "tokens/line": 60 / 6,
        "max_stmt": 12,
        "nodes/stmt": sum(sizes) / 5,
        ">100cols%": 20.0,
        "packed": 1,
        "bool_arith": 1,
        "positional": 6,
        "locals": 4,
        "function": 7,
        "main": 0,
        "comments": 2 / 6,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    broken = [line.split(": ")[1].split()[0] for line in broken_bounds(path)]
    assert broken == [">100cols%", "packed", "bool_arith", "positional"]


def test_the_counter_as_a_command(tmp_path):
    command = [sys.executable, "tests/density.py", "common/rollout.py"]
    done = subprocess.run([*command, "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "common/rollout.py" in done.stdout and done.stderr == ""
    (tmp_path / "dense.py").write_text(DENSE)
    done = subprocess.run([*command, tmp_path / "dense.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "positional 6 is above 5 (positional arguments of a call, at most)" in done.stderr


# ---- the five scripts ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_stand_in_order(script):
    banners = re.findall(r"^# ==== (\d+) ([A-Z ]+?) =+$", (ROOT / script).read_text(), re.MULTILINE)
    assert banners == [(str(i), name) for i, name in enumerate(SECTIONS, 1)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_is_read_and_explained(script):
    owners = {script: "args", "common/weights/lora.py": "args", "common/options.py": "self"}  # not check_options
    read = set()
    for file, owner in owners.items():
        nodes = ast.walk(ast.parse((ROOT / file).read_text()))
        read |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == owner}
    run = (ROOT / "common" / "run.py").read_text()
    read |= set(re.findall(r'self\.config(?:\.get\(|\[)"(\w+)"', run))  # Run is given them all, to record them
    read.add("args")  # by common/option_files.py, before the others are
    options = shared_options() | own_options(script)
    assert [f"--{name} is never read" for name in options if name not in read] == []
    assert [f"--{name} has no docstring" for name, docstring in options.items() if not docstring] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_shows_forty_options_at_most(script):
    assert len(own_options(script)) <= 40


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_stand_alone(script):
    """No script imports another."""
    imported = set()
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    assert not {name.removesuffix(".py") for name in SCRIPTS} & imported


# ---- pages -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_readme_table_is_true(script):
    found = measure(ROOT / script)
    assert f"| {found['lines']} ({found['code']}) |" in readme_row(script)


def test_the_readmes_excerpt_is_mains_training_step():
    """Every line of it, in order, except for clocks, comments, metrics and the question whether there is an engine."""
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    excerpt = next(block for block in blocks if "sampler.draw()" in block).split("```")[0]
    loop = (ROOT / "flow_grpo.py").read_text().split("        run.begin_step(step)\n")[1].split("# RUN LOGIC")[0]
    left_out = ("#", "with run.timed", "metrics = reward_metrics", "metrics |= run.watch", "if engine:")
    lines = [line.strip() for line in loop.splitlines()]
    expected = [line for line in lines if line and not line.startswith(left_out)]
    assert [line.strip() for line in excerpt.splitlines()] == expected


# ---- a fork ----------------------------------------------------------------------------------------------------------
def test_no_test_lists_the_scripts_of_the_top_level():
    """A sixth script beside the five fails nothing: they are named, and never looked for."""
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"\bROOT\.(r?glob\(.*\.py|iterdir\(|walk\()", path.read_text()), path.name
