"""The programs of benchmarks/gpu at tiny size."""

import os
import re
import subprocess
import tarfile
from pathlib import Path

from tests.conftest import ROOT

PROGRAMS = ROOT / "benchmarks" / "gpu"


def run_program(program: Path, folder: Path, parts: str, **variables: str) -> str:
    """Run some parts of a program at tiny size. Returns its report, which shows no folder of this machine."""
    environment = os.environ | {"TINY": "1", "PARTS": parts, "OUT": str(folder / "out"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(program)],
        cwd=folder,
        env=environment | variables,
        text=True,
        timeout=1200,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    report = (folder / "out" / f"{program.stem}.md").read_text()
    logs = folder / "out" / f"{program.stem}.tar.gz"
    with tarfile.open(logs) as tar:
        names = [name for name in tar.getnames() if re.fullmatch(r"logs/\w+\.log", name)]
        packed = {name: tar.extractfile(name).read().decode() for name in names}
    assert done.returncode == 0 and "FAILED" not in report, done.stdout + "".join(packed.values())[-6000:]
    assert sorted(packed) == sorted(f"logs/{part}.log" for part in parts.split())
    assert not re.search(r"(^|[\s\"'=(])/\w+/", report), report
    return report
