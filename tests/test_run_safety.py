"""A run is neither lost nor mixed with another: its folder, its processes, its name, what its reward may do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import flow_grpo
from common.checkpoints import check_unchanged, open_run, save_checkpoint, saved_checkpoints
from common.data import PromptSet
from common.errors import NothingBegun, RunError, one_line
from common.lock import lock_run
from common.options import check_options
from common.rewards import score_images
from common.run import RunLog, create_run_folder
from tests.conftest import ROOT, TINY, few_eval_prompts
from tests.hostile import good_state

import psutil
import pytest
from PIL import Image

IMAGES = [Image.new("RGB", (8, 8))] * 2
PROMPTS = PromptSet(["a", "b"], [{}, {}])


# ---- the folder ------------------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("left", ["checkpoints/step_000030.pt", "adapter/x", "samples/0005/x.png", "pairs/1.png"])
def test_a_folder_with_anything_of_a_run_is_refused_and_stays(left, tmp_path, monkeypatch):
    """metrics.jsonl alone was looked for, and a new run deleted the checkpoints of one that had lost it."""
    monkeypatch.chdir(tmp_path)
    file = Path("runs/old") / left
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    with pytest.raises(ValueError, match=r"^runs/old already holds a run: choose another --name, .* \(found \w+\)$"):
        open_run(Path("runs/old"), None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="already holds a run"):
        flow_grpo.check_args(flow_grpo.Args(name="old", rollout="local"))
    assert file.read_text() == "precious"


@pytest.mark.fast
def test_a_start_that_failed_may_be_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "new").mkdir(parents=True)
    for name in ("args.json", "source.py", "engine_rank0.log"):
        (tmp_path / "runs" / "new" / name).touch()
    assert open_run(Path("runs/new"), None) is None


@pytest.mark.fast
@pytest.mark.parametrize("name", ["..", ".", "", "a/../../b", "/tmp/elsewhere", "a/b", "x" * 300, "a\0b"])
def test_a_name_does_not_lead_out_of_runs(name):
    with pytest.raises(ValueError, match="^--name .*: must be the name of one folder, of at most 200 bytes$"):
        check_options(flow_grpo.Args(name=name))


@pytest.mark.fast
def test_another_scripts_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/some/where/grpo_guard.py"])
    save_checkpoint(tmp_path / "runs" / "guard", 3, good_state(), 1)
    (checkpoint,) = saved_checkpoints(tmp_path / "runs" / "guard")
    assert open_run(Path("runs/new"), checkpoint) == checkpoint
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py"])
    for run, resume in ((Path("runs/new"), checkpoint), (Path("runs/guard"), "latest")):
        with pytest.raises(ValueError, match=r"^--resume: \S+ was written by grpo_guard.py, not by flow_grpo.py$"):
            open_run(run, resume)


@pytest.mark.fast
def test_metrics_that_are_gone_end_the_run(tmp_path):
    log = RunLog(tmp_path)
    log.write(0, {"a": 1.0})
    log.write(1, {"a": 2.0})
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"^step 2: \S+/metrics.jsonl, which this run has written, is gone$"):
        log.write(2, {"a": 3.0})


@pytest.mark.fast
def test_a_checkpoint_saved_between_the_choice_and_the_lock_is_not_removed(tmp_path):
    """By a process that was asked to stop, and saved, while the next one imported: it was taken for a later step's."""
    run = tmp_path / "runs" / "long"
    with pytest.raises(NothingBegun, match="was written to while this run was starting: give the same command"):
        save_checkpoint(run, 5, good_state(), 2)
        check_unchanged(run, None)
    (fifth,) = saved_checkpoints(run)
    check_unchanged(run, fifth)
    check_unchanged(tmp_path / "runs" / "new", fifth)  # of another run, into a new folder
    save_checkpoint(run, 10, good_state(), 2)
    with pytest.raises(NothingBegun, match="was written to while this run was starting"):
        check_unchanged(run, fifth)
    with pytest.raises(NothingBegun, match="was written to"):
        create_run_folder(run, {}, __file__, fifth)
    assert [path.stem for path in saved_checkpoints(run)] == ["step_000005", "step_000010"]


# ---- one writer ------------------------------------------------------------------------------------------------------
HOLDER = "import sys, time; sys.path.insert(0, sys.argv[1]); from common.lock import lock_run; lock_run(sys.argv[2]); "
HOLDER += "print('held', flush=True); time.sleep(60)"


@pytest.mark.fast
def test_two_processes_do_not_write_to_one_folder(tmp_path):
    folder = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, ROOT, folder], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=rf'is being written by another process \(.*"pid": {holder.pid}, "host": '):
        lock_run(folder)
    holder.kill()  # the lock goes with the process
    holder.wait()
    lock_run(folder)
    lock_run(folder)  # this process has it already


def test_ranks_end_with_torchrun_however_it_ends(tmp_path):
    """After kill -9 of torchrun its workers went on for minutes, and a resumed run beside them mixed their files."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = ["--rollout", "local", "--name", "run", *TINY, *few_eval_prompts(tmp_path), "--num_steps", 500]
    launcher = subprocess.Popen(
        [*command, str(ROOT / "flow_grpo.py"), *map(str, options)], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "runs" / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.5)
    ranks = [process for process in psutil.Process(launcher.pid).children() if process.is_running()]
    assert len(ranks) == 2
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=20)
    for process in alive:
        process.kill()
    assert len(gone) == 2


def test_ranks_end_with_torchrun_also_while_they_import(tmp_path):
    """A torchrun that was killed before its ranks had asked to be told of it left them waiting for it for ever."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launcher = subprocess.Popen(
        [*command, str(ROOT / "flow_grpo.py"), "--rollout", "local"], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(ranks := psutil.Process(launcher.pid).children()) < 2:
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.01)
    time.sleep(1)  # into their imports, of which torch's is the first
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    for process in alive:
        process.kill()
    assert len(gone) == 2


@pytest.mark.fast
@pytest.mark.parametrize("said", ["Connection closed by peer [127.0.0.1]:4242", "Broken pipe"])
def test_a_lost_rank_is_told_in_a_line(said):
    with pytest.raises(SystemExit) as ended, one_line(RunError):
        raise RuntimeError(f"[../third_party/gloo/gloo/transport/tcp/pair.cc:547] {said}")
    assert "error: another rank was lost; " in ended.value.code and "\n" not in ended.value.code
    with pytest.raises(RuntimeError, match="a bug"), one_line(RunError):
        raise RuntimeError("a bug")


@pytest.mark.fast
def test_an_errors_line_can_be_printed():
    with pytest.raises(SystemExit) as ended, one_line(RunError):
        raise RunError("reward mine: score nan for image 0 (prompt: a\nb\ud800)")
    assert ended.value.code.endswith(r"error: reward mine: score nan for image 0 (prompt: a\nb\ud800)")


@pytest.mark.fast
def test_a_checkpoint_is_advised_where_there_is_one_and_the_run_had_begun(tmp_path):
    def end_with(error):
        with pytest.raises(SystemExit) as ended, one_line(RunError, tmp_path):
            raise error
        return ended.value.code

    assert end_with(RunError("no space")).endswith("error: no space")
    (tmp_path / "checkpoints").mkdir()
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step_{step:06d}.pt").touch()
    advice = "; go on from step_000010.pt: the same command with --resume latest"
    assert end_with(RunError("no space")).endswith("error: no space" + advice)
    assert end_with(RuntimeError("Broken pipe")).endswith("(see dmesg)" + advice)
    assert end_with(NothingBegun("in use")).endswith("error: in use")  # its checkpoints are another process's
    assert not list(tmp_path.glob("traceback*"))


# ---- rewards ---------------------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("code", [0, 1, None, "message"])
def test_a_reward_that_exits_is_a_failure(code):
    """sys.exit(0) in a reward ended the run as a success, without a message or a checkpoint."""

    def leaves(images, prompts, metadata):
        sys.exit(code)

    with pytest.raises(RunError, match="^reward leaves raised SystemExit: "):
        score_images({"leaves": leaves}, IMAGES, PROMPTS)


@pytest.mark.fast
def test_a_reward_that_changes_the_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def wanders(images, prompts, metadata):
        os.chdir("elsewhere")
        return [0.0] * len(images)

    with pytest.raises(RunError, match=r"^reward wanders changed the working directory to \S+/elsewhere"):
        score_images({"wanders": wanders}, IMAGES, PROMPTS)
