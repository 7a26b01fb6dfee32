"""Pages, docstrings and messages: words we do not use, links that lead somewhere, lines that fit."""

import re
from pathlib import Path

from tests.conftest import ROOT, SCRIPTS

import pytest

pytestmark = pytest.mark.fast

GENERATED = {"docs/options.md"}  # rows of its tables are as long as their text
ROOMS = ["common", "tools", "contrib"]
FOLDERS = ["docs", "recipes", "contrib", ".github"]
TOP_LEVEL = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES = [ROOT / name for name in TOP_LEVEL if (ROOT / name).is_file()]
for folder in FOLDERS:
    PAGES += sorted((ROOT / folder).rglob("*.md"))
SOURCES = [ROOT / script for script in SCRIPTS]
for folder in ROOMS:
    SOURCES += sorted((ROOT / folder).rglob("*.py"))

# "resumes from", "says", "again" are the words that we use
AVOIDED = re.compile(r"\b((go|goes|gone|going) +on +(from|with)|(is|are) +told|anew)\b", re.IGNORECASE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def headings(page: Path) -> set[str]:
    """What a link may name behind #: the page's headings, as GitHub turns them into anchors."""
    anchors: dict[str, int] = {}
    for line in without_blocks(page.read_text()).splitlines():
        if re.match(r"#{1,6} ", line):
            title = re.sub(r"\[([^\]]*)\](\([^)]*\))?", r"\1", line.lstrip("#").strip())  # a link's text
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            count = anchors.get(anchor, 0)
            anchors[anchor] = count + 1
            if count:
                anchors[f"{anchor}-{count}"] = 1
    return set(anchors)


def without_blocks(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures that are no address."""
    text = re.sub(r"`[^`\n]*`", "code", without_blocks(page.read_text()))  # brackets in code are no links
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead to no file, no folder, or no heading."""
    broken = []
    for target in links(page):
        place, _, heading = target.partition("#")
        file = (page.parent / place).resolve() if place else page
        if not file.exists() or (heading and file.suffix == ".md" and heading not in headings(file)):
            broken.append(target)
    return broken


def avoided_words(path: Path) -> list[str]:
    """Each line, by its number, on which a word stands that we avoid; also where a line's end parts it."""
    text = path.read_text()
    joined = re.sub(r"\n *#? *", lambda found: " " * len(found[0]), text)  # as long as before
    found = []
    for match in AVOIDED.finditer(joined):
        line = text.count("\n", 0, match.start()) + 1
        found.append(f"line {line}: {' '.join(match[0].split())}")
    return found


# ---- words -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "path", [page for page in PAGES if "records" not in page.parts] + SOURCES, ids=lambda path: name_of(path)
)
def test_plain_words(path: Path) -> None:
    """Pages outside the records, and sources with their docstrings, help and messages."""
    assert avoided_words(path) == []


def test_how_words_are_found(tmp_path: Path) -> None:
    path = tmp_path / "page.py"
    path.write_text(
        "# It goes\n    # on with the\n# next. The user\nis told; encoded Anew\nShe goes on along a sinew.\n"
    )
    assert avoided_words(path) == ["line 1: goes on with", "line 4: is told", "line 4: Anew"]


# ---- links -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_how_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text(
        "# One `name` more, and [a link](x)\n## Twice\n## Twice\n```\n# no heading\n```\n"
    )
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md#one-name-more-and-a-link) [b](#here) [c](other.md#twice-1) ![d](none.png) [e](#there)\n"
        "[f](other.md#no-heading) `[g](nothing)` [h][i] [j](https://example.com/x#y)\n\n[i]: missing/\n"
        "```\n[k](nothing)\n```\n"
    )
    assert broken_links(page) == ["none.png", "#there", "other.md#no-heading", "missing/"]


# ---- benchmarks ------------------------------------------------------------------------------------------------------
def lost_benchmarks(text: str) -> list[str]:
    """The files of benchmarks/ that a page names and that are gone, where its paragraph does not name their commit."""
    lost = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        if not re.search(r"commit\s+addf11e", paragraph):
            named = re.findall(r"\bbenchmarks/[a-z0-9_/]+\.(?:py|sh)\b", paragraph)
            lost += [name for name in named if not (ROOT / name).is_file()]
    return lost


@pytest.mark.parametrize("page", [page for page in PAGES if "records" not in page.parts], ids=name_of)
def test_every_benchmark_that_a_page_names_is_there(page: Path) -> None:
    assert lost_benchmarks(page.read_text()) == []


def test_how_lost_benchmarks_are_found() -> None:
    text = "`benchmarks/gpu/call1.sh` and\n`benchmarks/gpu/none.py`.\n\n`benchmarks/none.py` of commit addf11e.\n"
    assert lost_benchmarks(text) == ["benchmarks/gpu/none.py"]


# ---- lines -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_line_of_a_page_passes_120_columns(page: Path) -> None:
    if name_of(page) in GENERATED:
        pytest.skip("generated")
    lines = page.read_text().splitlines()
    # a row of a table cannot be wrapped; the README's are short
    lines = [line for line in lines if not line.startswith("|") or page.name == "README.md"]
    assert [line for line in lines if len(line) > 120] == []
