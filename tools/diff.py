"""What a script changes in the script that it was copied from, section by section.

    python -m tools.diff mix_grpo.py        # against flow_grpo.py
    python -m tools.diff contrib/awm.py     # against the script of the line `Parent: diffusion_nft.py` in its docstring

A script of yours without such a line is compared with flow_grpo.py. Paths are as seen from the root of the project.
"""

import argparse
import ast
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = "flow_grpo.py"
BOLD = "\033[1m"
RED = "\033[31m"
GREEN = "\033[32m"


def parent_of(script: str) -> str:
    """The script that `script` was copied from. Both are paths as seen from the root, or absolute.

    Raises:
        ValueError: there is none. flow_grpo.py has no parent, and a script of contrib/ must name its own.
    """
    docstring = ast.get_docstring(ast.parse((ROOT / script).read_text())) or ""
    named = re.search(r"^Parent: (\S+\.py)\b", docstring, re.MULTILINE)
    if named:
        return named[1]
    path = (ROOT / script).resolve()
    if path == ROOT / BASE or path.parent == ROOT / "contrib":
        raise ValueError(f"{script}: has no parent: no line `Parent: SCRIPT.py` stands in its docstring")
    return BASE


def sections(script: str) -> dict[str, list[str]]:
    """{name of a section: its lines}, in order. The header docstring comes first, as HEADER."""
    parts = re.split(r"^# ==== \d+ ([A-Z ]+?) =+\n", (ROOT / script).read_text(), flags=re.MULTILINE)
    return {name: text.splitlines() for name, text in zip(["HEADER", *parts[1::2]], parts[::2], strict=True)}


def changes(script: str) -> dict[str, list[str]]:
    """{name of a section: the lines of its unified diff against the parent, without context}. Equal sections are left
    out."""
    before = sections(parent_of(script))
    after = sections(script)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", metavar="SCRIPT.py", help="its path, as seen from the root of the project")
    script = parser.parse_args().script
    try:
        show(script)
    except FileNotFoundError as error:
        sys.exit(f"tools.diff: error: {error.filename}: no such file")
    except ValueError as error:
        sys.exit(f"tools.diff: error: {error}")


if __name__ == "__main__":
    main()
