"""benchmarks/gpu: what its programs compute. tests/by_hand runs the programs themselves, at tiny size on a CPU."""

import json
import os
import re
import subprocess
import tarfile

import flow_grpo
from benchmarks.gpu import attention, engine_there, facts, learned, sized, trace_table
from common.run import utilisation
from tests.conftest import ROOT
from tests.gpu_programs import PROGRAMS

import pytest
import torch


# ---- at tiny size ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("there", "is_tried"),
    [("print('error: the engine cannot be had: no wheel'); sys.exit(1)", False), ("sys.exit('slow')", True)],
)
def test_the_engines_table_where_a_fact_does_not_hold(there, is_tried, tmp_path):
    """Its logs come back as well. Programs of this test stand for those that need an engine."""
    kit = tmp_path / "benchmarks" / "gpu"
    kit.mkdir(parents=True)
    (tmp_path / "flow_grpo.py").touch()
    for name in ("call5.sh", "env.sh"):
        (kit / name).write_text((PROGRAMS / name).read_text())
    (kit / "engine_there.py").write_text(f"import sys; {there}")
    (kit / "facts.py").write_text("""
import sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--results") + 1], "runs", "vllm")
folder.mkdir(parents=True)
(folder / "engine_rank0.log").write_text("a line")
print("| a fact | NOT HELD | 0.5 |")
sys.exit(1)
""")
    environment = os.environ | {"TINY": "1", "PARTS": "engine_there engine", "OUT": str(tmp_path / "out")}
    subprocess.run(["bash", str(kit / "call5.sh")], env=environment, check=True, capture_output=True)
    report = (tmp_path / "out" / "call5.md").read_text()
    assert ("| a fact | NOT HELD | 0.5 |" in report) is is_tried
    assert ("- engine: not run" in report) is not is_tried
    with tarfile.open(tmp_path / "out" / "call5.tar.gz") as tar:
        assert ("facts_engine/runs/vllm/engine_rank0.log" in tar.getnames()) is is_tried


# ---- parts -----------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_a_part_that_fails_and_one_without_time(tmp_path):
    """Each is a line of the report, without this machine's folders, and the next part is run."""
    program = f"""
        ROOT={ROOT}; LIMIT=100; . {PROGRAMS}/env.sh
        try bad 10 bash -c 'echo "ValueError: /some/where/x.py is bad"; echo after; exit 3'
        try slow 1 sleep 5
        try killed 10 bash -c 'kill -9 $$'
        try rank 10 bash -c 'echo "traceback : Signal 9 (SIGKILL) received by PID 7"; exit 1'
        try good 10 echo fine
        ENDS=0; try late 10 echo fine
        end
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("TINY", "PARTS", "ENDS")}
    subprocess.run(["bash", "-c", program, "call9.sh"], env=environment | {"OUT": str(tmp_path)}, check=True)
    report = (tmp_path / "call9.md").read_text()
    assert re.search(r"^- bad: FAILED, status 3 after \d+ s: ValueError: x.py is bad$", report, re.MULTILINE)
    assert re.search(r"^- slow: FAILED, its time was over after \d+ s$", report, re.MULTILINE)
    for name in ("killed", "rank"):  # by the kernel, where memory is full: of a program, and of a rank of torchrun
        assert re.search(rf"^- {name}: FAILED, killed after \d+ s, .*memory", report, re.MULTILINE)
    assert re.search(r"^- good: \d+ s$", report, re.MULTILINE)
    assert "- late: not run, no time left\n" in report
    with tarfile.open(tmp_path / "call9.tar.gz") as tar:
        assert tar.extractfile("logs/good.log").read() == b"fine\n"
    again = environment | {"OUT": str(tmp_path), "PARTS": "good godo"}
    subprocess.run(["bash", "-c", program, "call9.sh"], env=again, check=True)
    assert (tmp_path / "call9.md").read_text() == report
    second = (tmp_path / "call9_2.md").read_text()
    assert "- godo: not reached, or no part of this program\n" in second and "bad" not in second
    with tarfile.open(tmp_path / "call9_2.tar.gz") as tar:
        assert [name for name in tar.getnames() if name.endswith(".log")] == ["logs/good.log"]


@pytest.mark.fast
def test_whether_the_engine_can_be_had(monkeypatch, capsys):
    """Installed in another version, not installed and pip's index does not answer, and there to be installed."""
    pinned = engine_there.pinned_versions()
    monkeypatch.setattr(engine_there.importlib.metadata, "version", lambda name: "0.0.1")
    fault = engine_there.fault_of_installed(pinned)
    assert "0.0.1" in fault and pinned["vllm"] in fault
    monkeypatch.setattr(engine_there, "find_spec", lambda name: name == "pip" or None)
    for returncode, versions, told in ((1, "", "vllm for"), (0, "0.29.0", pinned["vllm"]), (0, pinned["vllm"], None)):
        done = subprocess.CompletedProcess([], returncode, stdout=f"Available versions: {versions}")
        monkeypatch.setattr(engine_there.subprocess, "run", lambda *args, done=done, **options: done)
        if told:
            with pytest.raises(SystemExit, match=f"the engine cannot be had: not installed, .*{told}"):
                engine_there.main()
        else:
            engine_there.main()
    assert "requirements-cuda.txt" in capsys.readouterr().out


@pytest.mark.fast
def test_an_engine_whose_import_crashes_and_a_python_without_pip(monkeypatch):
    """A signal leaves no line on stderr."""
    pinned = engine_there.pinned_versions()
    monkeypatch.setattr(engine_there.importlib.metadata, "version", lambda name: pinned[name.removesuffix("-cpu")])
    for stderr, told in (("", "status -11"), ("Traceback\nImportError: no libcuda\n", "ImportError: no libcuda")):
        done = subprocess.CompletedProcess([], -11, stdout="", stderr=stderr)
        monkeypatch.setattr(engine_there.subprocess, "run", lambda *args, done=done, **options: done)
        assert told in engine_there.fault_of_installed(pinned)
    monkeypatch.setattr(engine_there, "find_spec", lambda name: None)
    assert "no pip" in engine_there.fault_of_index(pinned)


@pytest.mark.fast
def test_runs_of_sized_count_no_flops(monkeypatch):
    monkeypatch.setattr(utilisation, "count_in_process", utilisation.count_in_process)  # put back after the test
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    sized.count_no_flops()
    found = utilisation.Utilisation({"dtype": "bfloat16"}, flow_grpo.workload(flow_grpo.Args()))
    assert found.metrics({"actor": 8.0}) == {}


@pytest.mark.fast
def test_how_far_a_kernels_gradient_is_off(capsys):
    """Of the worst of two; of one that is NaN nothing can be said; and a kernel at a shape, by torch's own products."""
    expected = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert attention.distance([torch.tensor([3.0, 4.5]), torch.tensor([1.0])], expected) == 0.1
    assert attention.distance([torch.tensor([3.0, float("nan")]), torch.tensor([1.0])], expected) is None
    attention.main(["--tiny", "--shape", "Qwen-Image, 2 images, masked", "--kernel", "native"])
    row = json.loads(capsys.readouterr().out)
    assert row["not_finite"] == 0 and row["off_by"] < 0.05


@pytest.mark.fast
def test_children_of_facts_keep_the_python_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    program = "import os, sys; sys.exit(os.environ['PYTHONPATH'])"
    check = facts.Check(tmp_path, "cpu")
    check.fact("a path", lambda: check.python("path", "-c", program))
    assert check.rows == [("a path", "NOT HELD", f"{ROOT}{os.pathsep}/elsewhere")]


@pytest.mark.fast
def test_table_of_a_trace():
    """Two kernels of which the second one overlaps the first, a pause, and a copy: busy 4 + 2 of 10 ms."""
    events = [
        {"cat": "kernel", "name": "sm90_gemm_bf16", "ts": 1000, "dur": 3000},
        {
            "cat": "kernel",
            "name": "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<",
            "ts": 3000,
            "dur": 2000,
        },
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 9000, "dur": 2000},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 5},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 9, "dur": 5},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 50},
    ]
    lines = trace_table.as_table(events)
    assert lines[0] == ("10.0 ms, of which a kernel runs in 60.0%; 3 kernels, 1 launches; waits of the host: 1")
    assert "| matrix products | 3.00 | 50.0% | 1 |" in lines
    assert "| pointwise | 2.00 | 33.3% | 1 |" in lines
    assert "| copies and casts | 2.00 | 33.3% | 1 |" in lines
    assert "| `Memcpy HtoD` | 2.00 | 1 |" in lines
    with pytest.raises(ValueError, match="no trace of a GPU"):
        trace_table.as_table(events[3:])


@pytest.mark.fast
def test_line_of_a_run(tmp_path):
    rows = [{"training/global_step": 0, "val/geneval/mean": 0.25}]
    for step, std in ((1, 0.0), (2, 0.5), (3, 0.0)):
        ratio = {"actor/on_policy_ratio_mean": 1.0, "actor/on_policy_ratio_std": std}
        rows.append({"training/global_step": step, "timing_s/step": float(step), "perf/max_memory_gb": 2.5, **ratio})
    rows[-1]["val/geneval/mean"] = 0.75
    folder = tmp_path / "bf16"
    folder.mkdir()
    assert learned.line_of(folder) == "- bf16: no step"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert learned.line_of(folder) == (
        "- bf16: 3 steps; held-out reward 0.250, 0.750; step 2.00 s; first ratio exactly 1 in 2 of 3 steps; "
        "first one off: mean 1.0, deviation 0.5; 2.50 GB"
    )
