"""All packages of an installation with their versions and SHA-256, from pip's report: what requirements amount to.

    python -m pip install --dry-run --ignore-installed --quiet --report report.json -r requirements.txt
    python recipes/container/pin_packages.py report.json > requirements.lock
    pip install --no-deps --require-hashes -r requirements.lock        # elsewhere: these files and no others

A hash is of the one file that pip chose here: for this operating system, processor and Python.
"""

import json
import platform
import sys
from pathlib import Path


def pinned_lines(report: dict) -> list[str]:
    """A line for each package of pip's report, by name."""
    lines = []
    for package in report["install"]:
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        sha256 = package["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} --hash=sha256:{sha256}")
    return sorted(lines, key=str.lower)


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    python = report["environment"]["python_version"]
    print(
        f"# By recipes/container/pin_packages.py, for {platform.system()} on {platform.machine()} with Python {python}."
    )
    print("\n".join(pinned_lines(report)))
