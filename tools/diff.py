"""What a script changes in the script that it was copied from, section by section.

    python -m tools.diff mix_grpo.py        # against flow_grpo.py
    python -m tools.diff contrib/awm.py     # against the script of the line `Parent: diffusion_nft.py` in its docstring
    python -m tools.diff my_grpo.py         # against flow_grpo.py, or as it was: `Parent: flow_grpo.py@COMMIT`
    python -m tools.diff --update my_grpo.py

--update merges into the script what its parent has changed from that commit to HEAD, and marks conflicts. Imports from
common/ are brought to where the names are now, as `python -m tools.move_imports` does. Paths are as seen from the root
of the project.
"""

import argparse
import difflib
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tools.move_imports import move_imports

ROOT = Path(__file__).parents[1]
BASE = "flow_grpo.py"
PARENT = re.compile(r"^Parent: (\S+\.py)(?:@(\S+))?", re.MULTILINE)
BOLD = "\033[1m"
RED = "\033[31m"
GREEN = "\033[32m"


class Parent(NamedTuple):
    """The script that another one was copied from, as its docstring says."""

    script: str
    commit: str | None  # None: as it is in the working tree

    def __str__(self) -> str:
        return f"{self.script}@{self.commit}" if self.commit else self.script

    def text(self) -> str:
        """Its source. ValueError: the commit, or the script in that commit, is not there."""
        if self.commit is None:
            return (ROOT / self.script).read_text()
        done = git("show", f"{self.commit}:./{self.script}")
        if done.returncode:
            raise ValueError(f"Parent: {self}: {done.stderr.strip().splitlines()[0]}")
        return done.stdout


def git(*args: str) -> subprocess.CompletedProcess[str]:
    """What git does and says, in the project's root."""
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)


def parent_of(script: str) -> Parent:
    """The script that `script` was copied from. Both are paths as seen from the root, or absolute. A copy of a script
    that names its own parent has two lines: that of the copy has a commit.

    Raises:
        ValueError: there is none. flow_grpo.py has no parent, and a script of contrib/ must name its own.
    """
    named = list(PARENT.finditer((ROOT / script).read_text().partition("\n# ==== ")[0]))
    if named:
        line = next((line for line in reversed(named) if line[2]), named[0])
        return Parent(line[1], line[2])
    path = (ROOT / script).resolve()
    if path == ROOT / BASE or path.parent == ROOT / "contrib":
        raise ValueError(f"{script}: has no parent: no line `Parent: SCRIPT.py` stands in its docstring")
    return Parent(BASE, None)


def sections(text: str) -> dict[str, list[str]]:
    """{name of a section: its lines}, in order. The header docstring comes first, as HEADER."""
    parts = re.split(r"^# ==== \d+ ([A-Z ]+?) =+\n", text, flags=re.MULTILINE)
    return {name: part.splitlines() for name, part in zip(["HEADER", *parts[1::2]], parts[::2], strict=True)}


def changes(script: str) -> dict[str, list[str]]:
    """{name of a section: the lines of its unified diff against the parent, without context}. Equal sections are left
    out."""
    before = sections(parent_of(script).text())
    after = sections((ROOT / script).read_text())
    found = {}
    # by section, so that a function which moved to another section counts as removed and added, and nothing else shifts
    for name in [*after, *(name for name in before if name not in after)]:
        diff = difflib.unified_diff(before.get(name, []), after.get(name, []), lineterm="", n=0)
        lines = list(diff)[2:]  # without the two file names
        if lines:
            found[name] = lines
    return found


def changed_lines(script: str) -> int:
    """Added plus removed lines, those of the header docstring not counted."""
    diffs = changes(script)
    diffs.pop("HEADER", None)
    return sum(line[0] in "+-" for lines in diffs.values() for line in lines)


def paint(text: str, colour: str) -> str:
    """The text in a colour, on a terminal."""
    return f"{colour}{text}\033[0m" if sys.stdout.isatty() else text


def show(script: str) -> None:
    """Print the changes."""
    parent = parent_of(script)
    print(paint(f"{script}: {changed_lines(script)} lines added or removed against {parent}", BOLD))
    for name, lines in changes(script).items():
        added = sum(line[0] == "+" for line in lines)
        removed = sum(line[0] == "-" for line in lines)
        print("\n" + paint(f"{name}  +{added} -{removed}", BOLD))
        for line in lines:
            if line.startswith("@@"):
                print("  ...")
            else:
                print(paint(line, GREEN if line[0] == "+" else RED))


def update(script: str) -> int:
    """Merge what the parent has changed since the script's commit into the script. Returns the number of conflicts.

    Raises:
        ValueError: the script names no commit, or one that is not there, or has conflicts of an earlier merge.
    """
    parent = parent_of(script)
    text = (ROOT / script).read_text()
    if parent.commit is None:
        line = f"`Parent: {parent.script}@COMMIT`"
        raise ValueError(f"{script}: --update needs the commit that it was copied from: a line {line} in its docstring")
    if "\n<<<<<<< " in text:
        raise ValueError(f"{script}: resolve its conflicts first, between <<<<<<< and >>>>>>>")
    head = Parent(parent.script, git("rev-parse", "--short", "HEAD").stdout.strip())
    if git("rev-parse", "--short", parent.commit).stdout.strip() == head.commit:
        print(f"{script}: {parent.script} is at {head.commit}, from which it was copied: there is nothing to merge")
        return 0
    own, before = text, parent.text()
    with suppress(SyntaxError):  # a script that is being edited: its imports stay as they are
        own, before = move_imports(text), move_imports(before)  # both, so that moved imports are no conflict
    versions = {script: own, str(parent): before, str(head): head.text()}
    command = ["merge-file", "-p"]
    with tempfile.TemporaryDirectory() as folder:
        for number, (label, content) in enumerate(versions.items()):
            file = Path(folder, str(number))
            file.write_text(content)
            command += ["-L", label]
        merged = git(*command, *(f"{folder}/{number}" for number in range(3)))
    if merged.returncode > 127:  # no number of conflicts
        raise ValueError(f"git merge-file: {merged.stderr.strip()}")
    (ROOT / script).write_text(merged.stdout.replace(f"Parent: {parent}", f"Parent: {head}", 1))
    print(f"{script}: changes of {parent.script} from {parent.commit} to {head.commit}; {merged.returncode} conflicts")
    return merged.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", metavar="SCRIPT.py", help="its path, as seen from the root of the project")
    parser.add_argument("--update", action="store_true", help="merge the parent's changes into the script")
    args = parser.parse_args()
    try:
        if not args.update:
            show(args.script)
        elif update(args.script):
            sys.exit(f"tools.diff: {args.script}: resolve the lines between <<<<<<< and >>>>>>>")
    except FileNotFoundError as error:
        sys.exit(f"tools.diff: error: {error.filename}: no such file")
    except ValueError as error:
        sys.exit(f"tools.diff: error: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    main()
