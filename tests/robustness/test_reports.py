"""The reproductions of tests/robustness/reports/, run as their reporters ran them, on warm ranks: each prints OK."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

import pytest

REPORTS = Path(__file__).parent / "reports"
# a line of the log that each leaves besides the OK that it prints
TOLD = {
    "bugs_copied_clone.sh": "loaded ",
    "eval-prompts-code.sh": "--trust_code True",  # refused, instead of run
    "optimizer-without-step.sh": "finished all 2 steps",
    "moving-reference-resume.sh": "no checkpoint holds reference",  # refused, so that nothing is compared
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What the reproductions need of a checkout. They write forks of the script into it."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "common", folder / "common", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "assets", folder / "assets", ignore=shutil.ignore_patterns("*edit*"))
    shutil.copy(ROOT / "flow_grpo.py", folder)
    return folder


@pytest.mark.parametrize("report", sorted(path.name for path in REPORTS.glob("*.sh")))
def test_a_report_is_answered(report, checkout, tmp_path, warm_torchrun):
    programs = f"{warm_torchrun}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = os.environ | {"TMPDIR": str(tmp_path), "PATH": programs}
    command = ["bash", REPORTS / report]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=500)
    logs = "".join(path.read_text() for path in tmp_path.rglob("log*") if path.is_file())
    assert done.stdout.split()[-1:] == ["OK"] and "FAIL" not in done.stdout, done.stdout + logs
    assert TOLD[report] in logs, done.stdout + logs
