"""tools/diff.py: against which script, and how many lines, on small scripts made here."""

import os
import shutil
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
    assert diff.parent_of("contrib/child.py") == ("parent.py", None)
    assert diff.parent_of("parent.py") == ("flow_grpo.py", None)
    for orphan in ("flow_grpo.py", "contrib/orphan.py"):
        with pytest.raises(ValueError, match=f"^{orphan}: .*Parent: "):
            diff.parent_of(orphan)


@pytest.mark.parametrize("order", [1, -1])
def test_a_copy_of_a_script_with_a_parent_has_that_script_as_its_own(order, scripts, tmp_path):
    lines = ["Parent: parent.py", "Parent: contrib/child.py@abc123"][::order]
    (tmp_path / "copy.py").write_text(CHILD.replace("Parent: parent.py", "\n\n".join(lines)))
    assert diff.parent_of("copy.py") == ("contrib/child.py", "abc123")


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


@pytest.fixture
def fork(scripts, tmp_path, monkeypatch):
    """fork.py, a copy of flow_grpo.py at its first commit with a loss of its own. Then flow_grpo.py gets a new option,
    in a second commit, and an edit that is not committed."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    for variable in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(variable)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a test")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "")
    parent = tmp_path / "flow_grpo.py"
    parent.write_text(PARENT)
    assert diff.git("init", "-q").returncode == 0
    commits = []
    for content in (PARENT, PARENT.replace("a\n", "a\noption\n")):
        parent.write_text(content)
        assert diff.git("add", "flow_grpo.py").returncode == diff.git("commit", "-qm", "x").returncode == 0
        commits.append(diff.git("rev-parse", "--short", "HEAD").stdout.strip())
    parent.write_text(content.replace("option\n", "not committed\n"))
    header = f'"""A fork.\n\nParent: flow_grpo.py@{commits[0]}\n"""'
    path = tmp_path / "fork.py"
    path.write_text(PARENT.replace('"""The parent."""', header).replace("\nc\n", "\nmy loss\n"))
    return path, commits


def test_a_fork_is_compared_with_its_commit_and_takes_what_the_parent_changed_since(fork, capsys):
    path, (old, new) = fork
    assert diff.changes("fork.py").keys() == {"HEADER", "LOSS"}
    assert diff.changed_lines("fork.py") == 2
    before = path.read_text()
    assert diff.update("fork.py") == 0
    assert path.read_text() == before.replace(old, new).replace("\na\n", "\na\noption\n")
    assert diff.changed_lines("fork.py") == 2
    assert f"changes of flow_grpo.py from {old} to {new}; 0 conflicts" in capsys.readouterr().out
    before = path.read_text()
    assert diff.update("fork.py") == 0 and path.read_text() == before
    assert "nothing to merge" in capsys.readouterr().out


def test_conflicts_are_marked_and_resolved_before_another_update(fork):
    path, (_, new) = fork
    path.write_text(path.read_text().replace("a\nb\n", "a\nmy option\nb\n"))
    assert diff.update("fork.py") == 1
    mine, theirs = path.read_text().partition("<<<<<<< fork.py\nmy option\n=======\n")[::2]
    assert f"Parent: flow_grpo.py@{new}" in mine and theirs.startswith(f"option\n>>>>>>> flow_grpo.py@{new}\nb\n")
    with pytest.raises(ValueError, match="^fork.py: .*<<<<<<< .*>>>>>>>"):
        diff.update("fork.py")


@pytest.mark.parametrize(
    ("parent", "refused"),
    [("flow_grpo.py@0123abc", "^Parent: flow_grpo.py@0123abc: fatal: "), ("flow_grpo.py", "`Parent: .*@COMMIT`")],
)
def test_an_update_needs_a_commit_that_is_there(fork, parent, refused):
    path, (old, _) = fork
    before = path.read_text().replace(f"flow_grpo.py@{old}", parent)
    path.write_text(before)
    with pytest.raises(ValueError, match=refused) as error:
        diff.update("fork.py")
    assert path.read_text() == before and "\n" not in str(error.value)


@pytest.mark.parametrize(("script", "code"), [("mix_grpo.py", 0), ("flow_grpo.py", 1), ("no_such.py", 1)])
def test_the_command(script, code):
    done = subprocess.run([sys.executable, "-m", "tools.diff", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    if code == 0:
        assert done.stdout.startswith("mix_grpo.py: ") and done.stderr == ""
    else:
        assert done.stderr.startswith("tools.diff: error: ") and len(done.stderr.splitlines()) == 1
