"""benchmarks/from_nothing.py at its tiny size: all parts, and a start that goes on."""

import json
import os
import runpy
import sys

from benchmarks import from_nothing
from tests.conftest import ROOT, torchrun

import pytest


def test_from_random_weights_to_a_report(tmp_path, monkeypatch, capsys):
    """A policy of random weights draws nothing right yet. A second start has nothing left to train."""
    folder, started = tmp_path / "made", []

    def start(module, *words):  # as a start does, without its imports
        started.append(module)
        if module == "torch.distributed.run":
            *_, script = words[: 3 if words[1] == "-m" else 2]
            options = words[3 if words[1] == "-m" else 2 :]
            script = f"{script.replace('.', '/')}.py" if words[1] == "-m" else script
            torchrun(tmp_path, script, *options)
        else:
            with monkeypatch.context() as patch:
                patch.chdir(ROOT)
                patch.setattr(sys, "argv", [module, *map(str, words)])
                patch.setattr(os, "environ", os.environ.copy())
                runpy.run_module(module, run_name="__main__")

    monkeypatch.setenv("GENEVAL_DETECTOR", str(ROOT / "assets" / "nanodet"))
    monkeypatch.setattr(from_nothing, "start", start)
    from_nothing.main(from_nothing.Args(folder=folder, size="tiny", parts=("draw", "sft")))
    with pytest.raises(SystemExit, match="bench: needs rl/adapter of an earlier part"):
        from_nothing.main(from_nothing.Args(folder=folder, size="tiny", parts=("bench",)))
    from_nothing.main(from_nothing.Args(folder=folder, size="tiny"))
    assert started == ["torch.distributed.run"] * 2 + ["tools.bench", "tools.report"]
    assert "| base |" in (folder / "bench" / "table.md").read_text() and (folder / "report.html").exists()
    card = (folder / "README.md").read_text()
    assert "--size tiny" in card and "| base |" in card
    assert set(json.loads((folder / "seconds.json").read_text())) == set(from_nothing.PARTS)
