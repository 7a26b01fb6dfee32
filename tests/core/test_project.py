"""The lists of packages in pyproject.toml and in the requirements files are equal, and each package is pinned."""

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
