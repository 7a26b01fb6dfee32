"""A run is neither lost nor mixed with another: its folder, its processes, its name, what its reward may do."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import flow_grpo
from common.data import PromptSet
from common.errors import NothingBegun, RunError
from common.files.checkpoints import save_checkpoint, saved_checkpoints
from common.files.prompts import read_prompts
from common.files.records import digest_records
from common.process import print_once
from common.rewards._loading import load_rewards
from common.run.command_line import check_options
from common.run.ending import _current_run, friendly_errors
from common.run.inputs import checkpoint_to_resume, choose_sizes
from common.run.lock import check_unchanged, lock_run
from common.run.record import create_run_folder
from common.scoring import score_images
from tests.conftest import ROOT, good_state, new_run, small_workload

import psutil
import pytest
from PIL import Image

IMAGES = [Image.new("RGB", (8, 8))] * 2
PROMPTS = PromptSet(["a", "b"], [{}, {}])


# ---- the folder ------------------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("left", ["checkpoints/step_000030.pt", "adapter/x", "samples/0005/x.png", "pairs/1.png"])
def test_a_folder_with_anything_of_a_run_is_refused_and_stays(left, monkeypatch):
    """Not metrics.jsonl alone: a new run would delete the checkpoints of a run that has lost it."""
    file = Path("runs/old") / left
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    with pytest.raises(ValueError, match=r"^runs/old .*--name, .*\(.* \w+\)$"):
        checkpoint_to_resume(Path("runs/old"), None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="^runs/old .*--name"):
        flow_grpo.prepare(flow_grpo.Args(name="old", rollout="local"))
    assert file.read_text() == "precious"


@pytest.mark.fast
def test_a_start_that_failed_may_be_repeated(tmp_path):
    (tmp_path / "runs" / "new").mkdir(parents=True)
    for name in ("args.json", "source.py", "engine_rank0.log"):
        (tmp_path / "runs" / "new" / name).touch()
    assert checkpoint_to_resume(Path("runs/new"), None) is None


@pytest.mark.fast
@pytest.mark.parametrize("first", [None, "latest", "runs/other"])
def test_latest_without_a_checkpoint_does_not_forget_what_the_run_started_from(tmp_path, first):
    (tmp_path / "args.json").write_text(json.dumps({"args": {"resume": first}}))
    if first == "runs/other":
        with pytest.raises(ValueError, match=f"^--resume latest: {tmp_path} .*--resume runs/other "):
            checkpoint_to_resume(tmp_path, "latest")
    else:
        assert checkpoint_to_resume(tmp_path, "latest") is None


@pytest.mark.fast
@pytest.mark.parametrize(("words", "is_told"), [((), True), (("--shutdown_timeout", "600"), False)])
def test_a_step_that_outlasts_torchruns_patience_is_told(words, is_told, tmp_path, monkeypatch, capfd):
    """Of a process that stands for torchrun, by its command line."""
    monkeypatch.setattr("common.run.run.LONG_STEP_S", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words])
    monkeypatch.setattr("common.process.PARENT", parent.pid)
    run = new_run(tmp_path)
    print_once.cache_clear()
    time.sleep(0.5)  # until it has its command line
    run.should_stop()
    run.should_stop()
    parent.kill()
    assert capfd.readouterr().err.count("--shutdown_timeout 7200\n") == is_told


@pytest.mark.fast
def test_latest_without_a_checkpoint_says_that_the_log_begins_anew(tmp_path, capfd):
    (tmp_path / "metrics.jsonl").touch()
    assert checkpoint_to_resume(tmp_path, "latest") is None
    assert re.fullmatch(rf"{tmp_path} .*\n", capfd.readouterr().err)


@pytest.mark.fast
def test_a_start_from_another_run_may_be_repeated_until_it_has_a_checkpoint(tmp_path, monkeypatch, capfd):
    """As the message of the test above says, which would otherwise lead to "already holds a run"."""
    monkeypatch.setattr("common.run.resuming.checkpoint_of", lambda path: Path(path))
    (tmp_path / "args.json").write_text(json.dumps({"args": {"resume": "runs/other"}}))
    (tmp_path / "metrics.jsonl").touch()
    assert checkpoint_to_resume(tmp_path, "runs/other") == Path("runs/other")
    assert re.fullmatch(rf"{tmp_path} .*\n", capfd.readouterr().err)
    (tmp_path / "adapter").mkdir()  # so it had checkpoints, which somebody removed
    with pytest.raises(ValueError, match=rf"^{tmp_path} .*--name.*\("):
        checkpoint_to_resume(tmp_path, "runs/other")
    (tmp_path / "adapter").rmdir()
    (tmp_path / "args.json").write_text(json.dumps({"args": {"resume": "runs/other", "eval_only": True}}))
    with pytest.raises(ValueError, match=rf"^{tmp_path} .*--name.*\("):
        checkpoint_to_resume(tmp_path, "runs/other")
    (tmp_path / "args.json").write_text(json.dumps({"args": {"resume": "runs/other"}}))
    for resume, eval_only in ((None, False), ("runs/third", False), ("runs/other", True)):
        with pytest.raises(ValueError, match=rf"^{tmp_path} .*--name.*\("):
            checkpoint_to_resume(tmp_path, resume, eval_only)
    (tmp_path / "args.json").write_text('{"args": {')
    with pytest.raises(ValueError, match=r"args\.json: "):
        checkpoint_to_resume(tmp_path, "latest")


@pytest.mark.fast
def test_records_have_one_digest_in_every_process():
    """Of sets, whose order varies, and of what has an address in its text."""
    records = lambda size, tags: [("a sign", {"tags": tags, "image": Image.new("L", (size, 1)), "bytes": b"12"})]
    assert digest_records(records(1, {"a", "b"})) == digest_records(records(1, {"b", "a"}))
    assert digest_records(records(1, {"a", "b"})) != digest_records(records(2, {"a", "b"}))
    for names in ({1: 2, "sum": 3}, {(1, 2): 3}):  # which a function may return
        with pytest.raises(RunError, match="a sign"):
            digest_records([("a sign", {"boxes": names})])


@pytest.mark.fast
def test_ranks_that_read_other_prompts_are_refused(monkeypatch):
    inputs = SimpleNamespace(train_set=PromptSet(["a", "b"], [{}, {}]), eval_set=PromptSet(["c"], [{}]), lora=None)
    args = SimpleNamespace(micro_batch_size=1, ranks_per_image=1)
    assert choose_sizes(args, inputs, small_workload()) is args
    monkeypatch.setattr("common.run.inputs.gather_objects", lambda digest: [digest, b"of another order"])
    with pytest.raises(RunError, match="^--train_prompts: "):
        choose_sizes(args, inputs, small_workload())


@pytest.mark.fast
@pytest.mark.parametrize("name", ["..", ".", "", "a/../../b", "/", "a/b", "x" * 300, "a\0b"])
def test_a_name_that_is_not_absolute_does_not_lead_out_of_runs(name):
    with pytest.raises(ValueError, match="^--name .*: "):
        check_options(flow_grpo.Args(name=name))


@pytest.mark.fast
def test_another_scripts_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/grpo_guard.py"])
    save_checkpoint(tmp_path / "runs" / "guard", 3, good_state(), 1)
    (checkpoint,) = saved_checkpoints(tmp_path / "runs" / "guard")
    assert checkpoint_to_resume(Path("runs/new"), checkpoint) == checkpoint
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py"])
    for run, resume in ((Path("runs/new"), checkpoint), (Path("runs/guard"), "latest")):
        with pytest.raises(ValueError, match=r"^--resume: \S+ .* grpo_guard.py, .* flow_grpo.py$"):
            checkpoint_to_resume(run, resume)


@pytest.mark.fast
def test_metrics_that_are_gone_end_the_run(tmp_path):
    run = new_run(tmp_path)
    for run.step in (0, 1):
        run.log({"a": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    run.step = 2
    with pytest.raises(RunError, match=r" 2: \S+/metrics.jsonl, "):
        run.log({"a": 3.0})


@pytest.mark.fast
def test_a_checkpoint_saved_between_the_choice_and_the_lock_is_not_removed(tmp_path):
    """A process that was asked to stop may save while the next one imports."""
    run = tmp_path / "runs" / "long"
    with pytest.raises(NothingBegun, match=f"^{run} "):
        save_checkpoint(run, 5, good_state(), 2)
        check_unchanged(run, None)
    (fifth,) = saved_checkpoints(run)
    check_unchanged(run, fifth)
    check_unchanged(tmp_path / "runs" / "new", fifth)  # of another run, into a new folder
    save_checkpoint(run, 10, good_state(), 2)
    with pytest.raises(NothingBegun, match=f"^{run} "):
        check_unchanged(run, fifth)
    with pytest.raises(NothingBegun, match=f"^{run} "):
        create_run_folder(run, {}, __file__, fifth)
    assert [path.stem for path in saved_checkpoints(run)] == ["step_000005", "step_000010"]


# ---- one writer ------------------------------------------------------------------------------------------------------
HOLDER = "import sys, time; sys.path.insert(0, sys.argv[1]); "
HOLDER += "from common.run.lock import lock_run; lock_run(sys.argv[2]); "
HOLDER += "print('held', flush=True); time.sleep(60)"


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    folder = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, ROOT, folder], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=rf'^{folder} .*\(.*"pid": {holder.pid}, "host": '):
        lock_run(folder)
    holder.kill()  # the lock goes with the process
    holder.wait()
    lock_run(folder)
    lock_run(folder)  # this process has it already


@pytest.mark.fast
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capfd):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    lock_run(tmp_path / "run")
    line = capfd.readouterr().err
    assert re.fullmatch(rf"{tmp_path}/run .*Function not implemented.*\n", line)


def test_a_rank_ends_with_torchrun_also_while_it_imports(tmp_path):
    """A rank that survives a kill -9 of torchrun would write into the files of the resumed run. If torchrun was killed
    before the rank asked for a signal of that, the rank would wait for it for ever.

    test_engines_on_two_nodes_of_which_one_is_lost kills a torchrun whose rank trains."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    launcher = subprocess.Popen(
        [*command, str(ROOT / "flow_grpo.py"), "--rollout", "local"], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (ranks := psutil.Process(launcher.pid).children()):
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.01)
    time.sleep(1)  # into its imports, of which torch's is the first
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    for process in alive:
        process.kill()
    assert len(gone) == 1


# ---- the last line ---------------------------------------------------------------------------------------------------
def last_line(error, begun_in=None):
    """What a script that raises `error` exits with, perhaps once its run had begun in a folder."""
    with pytest.raises(SystemExit) as ended, friendly_errors():
        if begun_in:
            # as much of a Run as is asked
            _current_run.append(SimpleNamespace(folder=begun_in, bar=None, has_begun_training=False))
        raise error
    return ended.value.code


@pytest.mark.fast
@pytest.mark.parametrize("said", ["Connection closed by peer [127.0.0.1]:4242", "Broken pipe"])
def test_a_lost_rank_is_one_line_and_a_bug_keeps_its_traceback(said):
    line = last_line(RuntimeError(f"[../third_party/gloo/gloo/transport/tcp/pair.cc:547] {said}"))
    assert re.search(r"error: [^\[]*\(see \w+\)$", line) and "\n" not in line
    with pytest.raises(RuntimeError, match="a bug"), friendly_errors():
        raise RuntimeError("a bug")


@pytest.mark.fast
def test_a_bad_option_is_printed_once_and_a_later_value_error_is_a_bug(tmp_path, monkeypatch):
    line = last_line(ValueError("--seed -1: must be at least 0"))
    assert line.endswith("error: --seed -1: must be at least 0")
    with pytest.raises(ValueError, match="^torch's$"), friendly_errors():
        _current_run.append(SimpleNamespace(folder=tmp_path, bar=None, has_begun_training=False))
        raise ValueError("torch's")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert last_line(ValueError("--seed -1: must be at least 0")) == 1  # rank 0 prints it
    alone = ValueError("--reward mine: no network")  # this rank's GPU may be the only one that is full
    alone.__cause__ = RuntimeError("out of memory")
    assert last_line(alone).endswith("error: --reward mine: no network")


@pytest.mark.fast
def test_an_errors_line_can_be_printed():
    line = last_line(RunError("reward mine: score nan for image 0 (prompt: a\nb\ud800)"))
    assert line.endswith(r"error: reward mine: score nan for image 0 (prompt: a\nb\ud800)")


@pytest.mark.fast
def test_a_checkpoint_is_advised_where_there_is_one_and_the_run_had_begun(tmp_path):
    assert last_line(RunError("no space"), tmp_path).endswith("error: no space")
    (tmp_path / "checkpoints").mkdir()
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step_{step:06d}.pt").touch()
    advice = "; .* step_000010.pt, .*--resume latest$"
    assert re.search("error: no space" + advice, last_line(RunError("no space"), tmp_path))
    assert last_line(RunError("no space")).endswith("error: no space")
    assert re.search(r"\(see \w+\)" + advice, last_line(RuntimeError("Broken pipe"), tmp_path))
    assert last_line(NothingBegun("in use"), tmp_path).endswith("error: in use")  # another process's checkpoints
    assert not list(tmp_path.glob("traceback*"))


# ---- rewards ---------------------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("code", [0, 1, None, "message"])
def test_a_reward_that_exits_is_a_failure(code):
    """Otherwise sys.exit(0) in a reward would end the run as a success, without a message or a checkpoint."""

    def leaves(images, prompts, metadata):
        sys.exit(code)

    with pytest.raises(RunError, match=" leaves .*SystemExit: "):
        score_images({"leaves": leaves}, IMAGES, PROMPTS)


LEAVES = """
import sys

def mine(images, prompts, metadata):
    return [0.0] * len(images)

mine.{hook} = lambda *given: sys.exit(0)
"""


@pytest.mark.fast
@pytest.mark.parametrize("hook", ["load", "check", "check_metadata"])
def test_what_a_reward_has_beside_its_call_may_not_exit_either(hook, tmp_path):
    (tmp_path / "mine.py").write_text(LEAVES.format(hook=hook))
    (tmp_path / "signs.txt").write_text("a sign")
    with pytest.raises(ValueError, match=r"(--reward mine|signs.txt:1): SystemExit\(0\)$"):
        read_prompts(tmp_path / "signs.txt", load_rewards((f"{tmp_path / 'mine.py'}:mine",), (1.0,)))


@pytest.mark.fast
def test_a_reward_that_changes_the_directory_is_named(tmp_path):
    (tmp_path / "elsewhere").mkdir()

    def wanders(images, prompts, metadata):
        os.chdir("elsewhere")
        return [0.0] * len(images)

    with pytest.raises(RunError, match=" wanders "):
        score_images({"wanders": wanders}, IMAGES, PROMPTS)
