"""benchmarks/gpu: its programs run at tiny size on a CPU, from the checkout and as carried. Before a call on a GPU."""

import json
import re
import tarfile
from importlib.util import find_spec

from benchmarks.from_nothing import PARTS
from tests.conftest import ROOT
from tests.gpu_programs import PROGRAMS, run_program

import pytest


def test_plan_peers_and_a_step_of_ours(tmp_path):
    """With frozen weights given to FSDP, and random weights that are drawn instead of read."""
    report = run_program(PROGRAMS / "call2.sh", tmp_path, "plan peers frozen")
    told = {row["what"]: row for row in map(json.loads, re.findall(r"^\{.*\}$", report, re.MULTILINE))}
    assert told["decode 4 images, fp32"]["s"] > 0 and told["decode 4 images, bf16, channels last"]["s"] > 0
    for kernels in ("torch's choice", "no cuDNN"):
        for what in (
            "diffusers pipeline, 3 steps, pil",
            "forward, LoRA in fp32, autocast, no FSDP",
            "forward and backward, LoRA in fp32, autocast, no FSDP",
            "forward and backward, LoRA in bf16, no FSDP",
            "clip and AdamW, LoRA in bf16, no FSDP",
        ):
            assert told[f"{what}, {kernels}"]["s"] > 0
        assert 0 <= told[f"ratios off 1, sampled in batches of 2 and trained in 1, {kernels}"]["most"] < 1e-2
    assert "B of each of 1 GPUs, h100-80" in report and "it/s" not in report
    assert 0 < told["levels of 255 off fp32, bf16, random weights"]["mean"] < 16
    assert re.search(r"^\| update_actor \| [\d.]+ \|", report, re.MULTILINE), report
    assert "--model tiny-sd35m" in report and "compile" not in report


def test_facts_in_a_carried_checkout(tmp_path):
    """As carry.sh leaves one, with a copy of the program in .gpu/, and no git: carried packages reach every process."""
    tree = tmp_path / "tree"
    (tree / ".gpu").mkdir(parents=True)
    for name in ("flow_grpo.py", "common", "assets", "benchmarks"):
        (tree / name).symlink_to(ROOT / name)
    (tree / ".gpu" / "call1.sh").write_text((PROGRAMS / "call1.sh").read_text())
    (tree / ".gpu" / "COMMIT").write_text("1234abc\n")
    carried = tmp_path / "sitecustomize.py"  # which every Python imports that finds it
    carried.write_text("import os, sys\nprint(sys.orig_argv[1:], file=open(os.environ['MARKS'], 'a'))\n")
    with tarfile.open(tree / ".gpu" / "site.tar.xz", "w:xz") as tar:
        tar.add(carried, "sitecustomize.py")
    marks = tmp_path / "marks"
    report = run_program(
        tree / ".gpu" / "call1.sh", tmp_path, "facts", ONLY="fp32", MARKS=str(marks), TMPDIR=str(tmp_path)
    )
    assert "commit 1234abc, " in report
    assert "| the CPU's numbers in fp32 | not tried | a CPU is compared with a GPU |" in report
    assert "| the first ratio is exactly 1: fp32 | held | mean 1.0, deviation 0.0 |" in report
    assert str(tree / "flow_grpo.py") in marks.read_text()


@pytest.mark.skipif(find_spec("vllm_omni") is None, reason="vLLM-Omni is not installed")
def test_attention_and_the_engine(tmp_path):
    """The engine's facts are of a GPU; that it is there is said first."""
    report = run_program(PROGRAMS / "call5.sh", tmp_path, "engine_there attention engine")
    parts = re.findall(r"^- (\w+): \d+ s$", report, re.MULTILINE)
    assert parts == ["engine_there", "attention", "engine"]
    assert "the engine is there" in report
    told = {row["what"]: row for row in map(json.loads, re.findall(r"^\{.*\}$", report, re.MULTILINE))}
    assert len(told) == 4 * 3 and all(row["not_finite"] == 0 and row["off_by"] < 0.05 for row in told.values())
    assert "| engine and trainer agree in bfloat16 | not tried | an engine on a GPU is meant |" in report


def test_from_nothing(tmp_path):
    """All parts of benchmarks/from_nothing.py at its tiny size: a policy of random weights draws nothing right yet."""
    folder = tmp_path / "made"
    report = run_program(PROGRAMS / "call4.sh", tmp_path, "draw sft rl bench report", FOLDER=str(folder))
    assert "| base |" in report and (tmp_path / "out" / "call4_report.html").exists()
    card = (tmp_path / "out" / "call4_README.md").read_text()
    assert "--size tiny" in card and set(json.loads((folder / "seconds.json").read_text())) == set(PARTS)
