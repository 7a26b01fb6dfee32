"""The lists of packages in pyproject.toml, the requirements files and the container are equal, and each is pinned."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

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


def test_the_container_has_the_versions_of_the_requirements_and_of_ci() -> None:
    """By its text alone: nothing here builds it."""
    text = (ROOT / "recipes" / "container" / "Containerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {name for name, _ in steps} == {"FROM", "RUN", "COPY", "ENV", "WORKDIR"} and steps[0][0] == "FROM"
    python = re.fullmatch(r"python:([\d.]+)-slim-\w+", steps[0][1])
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert python and f'python-version: "{python[1]}"' in workflow  # on which every test runs
    (copied,) = [rest.split()[:-1] for name, rest in steps if name == "COPY"]
    asked = ["requirements-cuda.txt"]
    asked += re.findall(r"^-r (.*)$", (ROOT / "requirements-cuda.txt").read_text(), re.M)
    assert sorted(copied) == sorted(asked)
    (installed,) = [rest for name, rest in steps if name == "RUN" and rest.startswith("pip ")]
    assert "-r /requirements/requirements-cuda.txt" in installed
    known = (ROOT / ".ci" / "run").read_text() + "\n".join(line for file in asked for line in pinned(file))
    named = re.findall(r"[\w-]+==[\w.]+", text)
    assert named and all(package in known for package in named)
    cuda = re.search(r"cuda>=(\d+)\.", text)
    assert cuda and f"CUDA {cuda[1]} " in (ROOT / "requirements-cuda.txt").read_text()


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cuda.txt"])
def test_the_lock_has_the_versions_of_the_requirements(file: str) -> None:
    """And nothing but names, versions and hashes: no address of an index."""
    lock = (ROOT / file).with_suffix(".lock").read_text()
    lines = [line for line in lock.splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)==([\w.+!]+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found)
    versions = {match[1].lower(): match[2].partition("+")[0] for match in found if match}
    for part in (file, "requirements-core.txt", "requirements-dev.txt"):
        for line in pinned(part):
            name, _, version = line.partition("==")
            assert versions[name.strip().lower()] == version.strip(), line


def test_a_lock_is_pips_report(tmp_path: Path) -> None:
    """Of a report as pip writes it: a line a package, in order of names, whatever the index called the file."""
    packages = [("zlib-ng", "1.0", "b" * 64), ("Aenum", "3.1.16", "a" * 64), ("torch", "2.13.0+cpu", "c" * 64)]
    install = [
        {
            "metadata": {"name": name, "version": version},
            "download_info": {"url": "file:///somewhere.whl", "archive_info": {"hashes": {"sha256": digest}}},
        }
        for name, version, digest in packages
    ]
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"environment": {"python_version": "3.11"}, "install": install}))
    command = [sys.executable, ROOT / "recipes" / "container" / "pin_packages.py", report]
    first, *lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert first.startswith("# ") and first.endswith(" with Python 3.11.")
    expected = [f"Aenum==3.1.16 --hash=sha256:{'a' * 64}", f"torch==2.13.0+cpu --hash=sha256:{'c' * 64}"]
    assert lines == [*expected, f"zlib-ng==1.0 --hash=sha256:{'b' * 64}"]
