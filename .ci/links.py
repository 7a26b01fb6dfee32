"""Lists the links of the tracked pages that lead to no file, no folder or no heading; exits with 1 if there is one.

Addresses with a scheme, such as https:, are not looked at.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def without_blocks(text: str) -> str:
    """A page without its blocks of code, each of whose lines is left empty."""
    return re.sub(r"^( *)```.*?^\1```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)


def anchors_of(page: Path) -> set[str]:
    """What a link may name behind #: the headings of a page, as GitHub turns them into anchors."""
    anchors: set[str] = set()
    counts: dict[str, int] = {}
    for title in re.findall(r"^#{1,6} +(.*)$", without_blocks(page.read_text()), re.M):
        title = re.sub(r"\[([^\]]*)\](\([^)]*\))?", r"\1", title.strip())  # the text of a link
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = counts.get(anchor, 0)
        counts[anchor] = count + 1
        anchors.add(f"{anchor}-{count}" if count else anchor)
    return anchors


def links_of(page: Path) -> list[tuple[int, str]]:
    """(line, target) of the links and images of a page, except addresses with a scheme."""
    text = without_blocks(page.read_text())
    text = re.sub(r"`[^`]*`", lambda code: re.sub(r"[^\n]", "c", code[0]), text)  # brackets in code are no links
    links = []
    for match in re.finditer(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.M):
        target = match[1] or match[2]
        if not re.match(r"[a-z]+:", target):
            links.append((text.count("\n", 0, match.start()) + 1, target))
    return links


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    return file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors_of(file))


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    broken = 0
    for name in listed.stdout.splitlines():
        page = ROOT / name
        for line, target in links_of(page) if page.exists() else []:
            if not leads_somewhere(page, target):
                print(f"{name}:{line}: {target} leads nowhere")
                broken += 1
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
