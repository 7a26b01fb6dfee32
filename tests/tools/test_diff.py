"""tools/diff.py: against which script, and how many lines, on small scripts made here."""

import subprocess
import sys

from tests.conftest import ROOT
from tools import diff

import pytest

pytestmark = pytest.mark.fast

BANNER = "# ==== {} {} " + "=" * 20 + "\n"
PARENT = '"""The parent."""\n' + BANNER.format(1, "ARGS") + "a\nb\n" + BANNER.format(9, "LOSS") + "c\n"
CHILD = PARENT.replace('"""The parent."""', '"""A child.\n\nParent: parent.py\n"""').replace("b\n", "B\n")
CHILD += BANNER.format(10, "LOG PROB") + "new\n"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A root with parent.py, flow_grpo.py, contrib/child.py and contrib/orphan.py."""
    monkeypatch.setattr(diff, "ROOT", tmp_path)
    (tmp_path / "contrib").mkdir()
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "flow_grpo.py").write_text(PARENT.replace("c\n", "d\ne\n"))
    (tmp_path / "contrib" / "child.py").write_text(CHILD)
    (tmp_path / "contrib" / "orphan.py").write_text(PARENT)


def test_a_parent_is_named_or_is_flow_grpo(scripts):
    assert diff.parent_of("contrib/child.py") == "parent.py"
    assert diff.parent_of("parent.py") == "flow_grpo.py"
    for orphan in ("flow_grpo.py", "contrib/orphan.py"):
        with pytest.raises(ValueError, match=f"^{orphan}: has no parent"):
            diff.parent_of(orphan)


def test_changes_are_counted_without_the_header(scripts, capsys):
    changes = diff.changes("contrib/child.py")
    assert {name: lines for name, lines in changes.items() if name != "HEADER"} == {
        "ARGS": ["@@ -2 +2 @@", "-b", "+B"],
        "LOG PROB": ["@@ -0,0 +1 @@", "+new"],
    }
    assert diff.changed_lines("contrib/child.py") == 3
    assert diff.changed_lines("parent.py") == 3
    diff.show("contrib/child.py")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "contrib/child.py: 3 lines added or removed against parent.py"
    assert "ARGS  +1 -1" in lines and "LOG PROB  +1 -0" in lines


@pytest.mark.parametrize(("script", "code"), [("mix_grpo.py", 0), ("flow_grpo.py", 1), ("no_such.py", 1)])
def test_the_command(script, code):
    done = subprocess.run([sys.executable, "-m", "tools.diff", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    if code == 0:
        assert done.stdout.startswith("mix_grpo.py: ") and done.stderr == ""
    else:
        assert done.stderr.startswith("tools.diff: error: ") and len(done.stderr.splitlines()) == 1
