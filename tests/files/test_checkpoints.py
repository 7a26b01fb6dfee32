"""A run that cannot be lost: kills, full disks and flipped bytes leave a checkpoint to continue from, whole."""

import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from common.distributed import restore_rng_states, rng_states
from common.errors import RunError
from common.files.checkpoints import load_checkpoint, save_checkpoint, saved_checkpoints
from common.process import STOP_SIGNALS, catch_stop_signals, stop_requested
from common.run.record import rename_record
from common.run.resuming import find_checkpoint, resume_differences, rewind
from tests.conftest import assert_same, new_run

import numpy as np
import pytest
import torch

fork = multiprocessing.get_context("fork")  # a child starts at once: torch is imported already


def state_of(step, elements=300):
    """A state whose content is a function of the step; made by NumPy, whose loops a forked child may run."""
    weight = torch.from_numpy(np.arange(elements, dtype=np.float32) + np.float32(step))
    return {
        "step": step,
        "adapter": {"a": weight, "b": weight[:7].to(torch.bfloat16)},
        "empty": {},
        "args": {"reward": ("ocr",), "rate": 0.1, "path": None},
        "list": [weight[:1].double(), True],
        "script": Path(sys.argv[0]).stem,
    }


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def save_three(run):
    for step in (5, 10, 15):
        save_checkpoint(run, step, state_of(step), 3)
    return [run / "checkpoints" / f"step_{step:06d}.pt" for step in (5, 10, 15)]


# ---- whole ones ------------------------------------------------------------------------------------------------------
def test_round_trip(tmp_path):
    save_checkpoint(tmp_path, 30, state_of(30), 2)
    path = find_checkpoint(tmp_path)
    assert path == tmp_path / "checkpoints" / "step_000030.pt"
    assert find_checkpoint(path) == path
    assert_same(load_checkpoint(path), state_of(30))
    save_checkpoint(tmp_path, 30, state_of(31), 2)  # again
    assert_same(load_checkpoint(path), state_of(31))


def test_no_checkpoint_yet(tmp_path):
    assert find_checkpoint(tmp_path / "never") is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step_000005.pt.new").write_bytes(b"half")
    assert find_checkpoint(tmp_path) is None


@pytest.mark.parametrize(("keep", "left"), [(1, [1000000]), (2, [999999, 1000000]), (9, [5, 10, 999999, 1000000])])
def test_the_newest_are_kept(tmp_path, keep, left):
    (tmp_path / "checkpoints").mkdir()
    another = tmp_path / "checkpoints" / "step_5_of_mine.pt"
    another.write_bytes(b"not one of the run's")
    for step in (5, 10, 999999, 1000000):  # by number: as text, the last one comes before 999999
        (tmp_path / "checkpoints" / f".step_{step + 1:06d}.pt.new").write_bytes(b"left by a kill")
        save_checkpoint(tmp_path, step, state_of(step), keep)
    assert names(tmp_path) == sorted([*(f"step_{step:06d}.pt" for step in left), another.name])
    assert find_checkpoint(tmp_path).name == "step_1000000.pt"


def test_a_checkpoint_never_removes_itself(tmp_path):
    """After --resume of an older one that left newer ones behind."""
    save_three(tmp_path)
    save_checkpoint(tmp_path, 7, state_of(7), 1)
    assert names(tmp_path) == ["step_000007.pt", "step_000010.pt", "step_000015.pt"]


def test_what_could_not_be_loaded_is_refused_when_saved(tmp_path):
    before = save_three(tmp_path)
    with pytest.raises(
        RunError,
        match=r"step_000020\.pt\.new .*\(Weights only load failed",
    ):
        save_checkpoint(tmp_path, 20, {"args": {"name": before[0]}}, 1)  # a Path is no plain value
    assert saved_checkpoints(tmp_path) == before
    assert len(names(tmp_path)) == 3


# ---- bad ones --------------------------------------------------------------------------------------------------------
def flip_in_tensor(data):
    place = data.index(np.float32(15 + 200).tobytes())  # element 200 of adapter.a, as nothing else is
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def mark_as_folder(data):
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data/0")) + 38  # its attributes in the zip's directory
    return data[:place] + b"\x10" + data[place + 1 :]


BAD = {  # what is done to a good file -> the reason given
    "flipped": (flip_in_tensor, "bad CRC32 of archive/data/0"),
    "folder": (mark_as_folder, "archive/data/0 .*"),
    "empty": (lambda data: b"", "File is not a zip file"),
    "garbage": (lambda data: b"garbage" * 1000, "File is not a zip file"),
    "zeros": (lambda data: bytes(len(data)), "File is not a zip file"),
    "half": (lambda data: data[: len(data) // 2], "File is not a zip file"),
    "one byte short": (lambda data: data[:-1], "File is not a zip file"),
    "no first byte": (lambda data: data[1:], "Invalid argument"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_checkpoint_is_named_and_the_one_before_taken(tmp_path, capfd, how):
    (spoil, why), paths = BAD[how], save_three(tmp_path)
    good = [path.read_bytes() for path in paths]
    paths[2].write_bytes(spoil(good[2]))
    line = rf"{paths[2]} .*\({why}\)"
    for call in (find_checkpoint, load_checkpoint):
        with pytest.raises(ValueError) as error:
            call(paths[2])
        assert re.search(line, str(error.value)) and "\n" not in str(error.value)
    assert capfd.readouterr().err == ""

    assert find_checkpoint(tmp_path) == paths[1]
    assert re.fullmatch(rf"{line}: .* step_000010\.pt\n", capfd.readouterr().err)
    assert_same(load_checkpoint(paths[1]), state_of(10))
    assert [path.read_bytes() for path in paths] == [good[0], good[1], spoil(good[2])]  # looking changes nothing

    paths[0].write_bytes(spoil(good[0]))
    paths[1].write_bytes(b"")
    with pytest.raises(ValueError) as error:
        find_checkpoint(tmp_path)
    assert all(str(path) in str(error.value) for path in paths)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.pt .*\(No such file or directory\)"):
        find_checkpoint(tmp_path / "nothing.pt")


def test_one_node_warns_once(tmp_path, capfd, monkeypatch):
    paths = save_three(tmp_path)
    paths[2].write_bytes(b"")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert find_checkpoint(tmp_path) == paths[1]
        assert capfd.readouterr().err.count("\n") == lines


def test_any_byte_may_flip(tmp_path):
    """A changed byte, wherever it stands, is either noticed or changes nothing that was saved."""
    save_checkpoint(tmp_path, 5, {"a": torch.arange(5.0), "step": 5}, 1)
    path = find_checkpoint(tmp_path)
    saved = load_checkpoint(path)
    data, noticed = path.read_bytes(), 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            assert_same(load_checkpoint(path), saved)
        except ValueError:
            noticed += 1
    assert noticed > len(data) / 2  # the others are padding and dates


def test_any_length_is_noticed(tmp_path):
    save_checkpoint(tmp_path, 5, {"a": torch.arange(5.0)}, 1)
    path = find_checkpoint(tmp_path)
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        with pytest.raises(ValueError):
            load_checkpoint(path)


# ---- kills -----------------------------------------------------------------------------------------------------------
def save_forever(run, first, reports):
    torch.set_num_threads(1)
    for step in range(first, 100_000):
        save_checkpoint(run, step, state_of(step, 250_000 * (1 + step % 5)), 2)  # 1 to 5 MB
        os.write(reports, f"{step}\n".encode())


def test_kill_minus_nine_loses_nothing(tmp_path):
    """Twenty kills at random moments of a process that does nothing but save, in one run folder."""
    rng, first, in_a_write = random.Random(0), 1, 0
    for _ in range(20):
        reader, writer = os.pipe()
        child = fork.Process(target=save_forever, args=(tmp_path, first, writer))
        child.start()
        os.close(writer)
        with open(reader) as reports:
            done = [int(reports.readline())]
            time.sleep(rng.uniform(0.005, 0.2))
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            done += [int(line) for line in reports]
        assert child.exitcode == -signal.SIGKILL
        path = find_checkpoint(tmp_path)
        found = load_checkpoint(path)
        assert found["step"] in (done[-1], done[-1] + 1)  # the last one is on disk, perhaps not yet reported
        assert path.name == f"step_{found['step']:06d}.pt"
        assert_same(found, state_of(found["step"], 250_000 * (1 + found["step"] % 5)))
        assert 1 <= len(saved_checkpoints(tmp_path)) <= 3  # three: killed before the oldest went
        in_a_write += any(name.endswith(".new") for name in names(tmp_path))
        first = found["step"] + 1
    print(f"{in_a_write} of 20 kills during a write, {first - 1} checkpoints")
    save_checkpoint(tmp_path, first, state_of(first), 2)
    assert names(tmp_path) == [f"step_{step:06d}.pt" for step in (first - 1, first)]  # the remains are gone


def test_a_kill_between_the_write_and_the_rename(tmp_path, monkeypatch):
    paths = save_three(tmp_path)
    monkeypatch.setattr(type(tmp_path), "replace", lambda *args: os._exit(9))
    child = fork.Process(target=save_checkpoint, args=(tmp_path, 20, state_of(20), 1))
    child.start()
    child.join()
    assert child.exitcode == 9
    assert names(tmp_path) == [".step_000020.pt.new", *(path.name for path in paths)]
    assert find_checkpoint(tmp_path) == paths[2]


# ---- full disks ------------------------------------------------------------------------------------------------------
@contextmanager
def largest_file(size):
    """Writes beyond `size` bytes of a file fail, as on a full disk but with EFBIG; Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("elements", [1_000_000, 262_100])  # 4 MB; and the tensor fits, but not the zip's directory
def test_a_disk_that_fills_up(tmp_path, elements):
    paths = save_three(tmp_path)
    with largest_file(1 << 20), pytest.raises(RunError) as error:
        save_checkpoint(tmp_path, 20, {"a": torch.ones(elements)}, 1)
    new = tmp_path / "checkpoints" / "step_000020.pt"
    assert re.fullmatch(rf"{new} .*\(File too large\)", str(error.value))
    assert names(tmp_path) == [path.name for path in paths]  # no temporary file, and none was removed
    assert_same(load_checkpoint(find_checkpoint(tmp_path)), state_of(15))
    save_checkpoint(tmp_path, 20, {"a": torch.ones(elements)}, 1)
    assert names(tmp_path) == [new.name]


def test_the_first_checkpoint_does_not_fit(tmp_path):
    with largest_file(1 << 20), pytest.raises(RunError, match=r"\(File too large\)$"):
        save_checkpoint(tmp_path, 5, {"a": torch.ones(1_000_000)}, 1)
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root; test_a_disk_that_fills_up needs nothing")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk):
    save_checkpoint(small_disk, 5, state_of(5, 270_000), 2)  # 1.1 MB
    save_checkpoint(small_disk, 10, state_of(10, 270_000), 2)
    for elements in (270_000, 1_000_000):  # keeping two takes room for three; 4 MB never fits
        with pytest.raises(RunError) as error:
            save_checkpoint(small_disk, 15, state_of(15, elements), 2)
        path = f"{small_disk}/checkpoints/step_000015.pt"
        assert re.fullmatch(rf"{path} .*\(No space left on device\)", str(error.value))
        assert names(small_disk) == ["step_000005.pt", "step_000010.pt"]
        assert_same(load_checkpoint(find_checkpoint(small_disk)), state_of(10, 270_000))
    (small_disk / "checkpoints" / "step_000005.pt").unlink()
    save_checkpoint(small_disk, 15, state_of(15, 270_000), 2)
    assert names(small_disk) == ["step_000010.pt", "step_000015.pt"]


def test_an_error_of_another_kind_is_not_called_a_full_disk(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="^a bug$") as error:
        save_checkpoint(tmp_path, 5, {}, 1)
    assert not isinstance(error.value, RunError)
    assert names(tmp_path) == []


# ---- rewind ----------------------------------------------------------------------------------------------------------
def test_rewind_by_hand(tmp_path, capfd):
    run = new_run(tmp_path)
    for step in range(13):
        run.step = step
        run.log({"loss": step / 3})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"training/global_step": 13, "lo')  # as a kill leaves it
    paths = save_three(tmp_path)
    rewind(tmp_path, 10, 10)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:11])
    assert saved_checkpoints(tmp_path) == paths[:2]
    assert re.fullmatch(f".* 10: .* {paths[2]} .*\n", capfd.readouterr().err)
    rewind(tmp_path, 10, 10)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:11])
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "checkpoints"}


def test_rewind_removes_what_other_steps_left(tmp_path, capfd):
    """Which tools would take for the newest record and the last evaluation. What the user put there stays."""
    kept = ["args.json", "source.py", "args_step_000005.json", "args_step_000010.json", "grid_best.png"]
    kept += ["grid_0010.png"]
    kept += ["samples/0000/samples.jsonl", "samples/0010/samples.jsonl", "samples/mine/samples.jsonl"]
    later = ["args_step_000015.json", "source_step_000015.py", "uncommitted_step_000015.diff", "grid_0015.png"]
    later += ["code_step_000015/mine.py", "samples/0011/samples.jsonl", "samples/0015/samples.jsonl"]
    later += ["rollouts/0011/samples.jsonl", "rollouts/0015/samples.jsonl"]
    for name in kept + later:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    rewind(tmp_path, 10, 10, ["samples/0011", "rollouts/0011"])
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*kept, "samples/0011/samples.jsonl", "rollouts/0011/samples.jsonl"}
    assert re.fullmatch(".* 10: .*args_step_000015.json, .*rollouts/0015, samples/0015, .*\n", capfd.readouterr().err)
    rewind(tmp_path, -1, -1, ["samples/0000"])  # a run that begins again
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    names = ["args.json", "source.py", "grid_best.png", "samples/0000/samples.jsonl", "samples/mine/samples.jsonl"]
    assert left == {*names}


def test_rewind_drops_an_unfinished_line_even_if_it_reads_well(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 0}\n{"training/global_step": 1}')
    rewind(tmp_path, 10, 10)  # a following line would be written onto it
    assert (tmp_path / "metrics.jsonl").read_text() == '{"training/global_step": 0}\n'


def test_rewind_without_metrics(tmp_path):
    rewind(tmp_path, 10, 10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["{oops", "[]", '{"loss": 1}'])
def test_rewind_refuses_what_is_no_metrics_file(tmp_path, line):
    text = '{"training/global_step": 0}\n' + line + '\n{"training/global_step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(RunError, match=r"metrics\.jsonl: "):
        rewind(tmp_path, 1, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_resume_differences():
    saved = {"seed": 1, "learning_rate": 1e-3, "reward": ["ocr"], "name": "a", "old": True, "path": None}
    now = {"seed": 1, "learning_rate": 3e-4, "reward": ("ocr",), "name": "b", "new": 2, "path": "x"}
    assert resume_differences(saved, now, {"name"}) == [
        "learning_rate: 0.001 -> 0.0003",
        "new: None -> 2",
        "old: True -> None",
        "path: None -> x",
    ]
    assert resume_differences(saved, saved) == []
    assert resume_differences({"reward": ("ocr",)}, {"reward": ("ocr", "jpeg")}) == [
        "reward: ['ocr'] -> ['ocr', 'jpeg']"
    ]


# ---- random states ---------------------------------------------------------------------------------------------------
def draw():
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]  # noqa: NPY002
    numbers += torch.randn(3).tolist() + torch.rand(17).tolist() + [random.getrandbits(64)]
    return numbers + (torch.randn(5, device="cuda").tolist() if torch.cuda.is_available() else [])


@pytest.mark.parametrize("before", range(4))
def test_random_states_round_trip(tmp_path, before):
    """By way of a checkpoint; with an odd number of draws before, half a pair of Gaussians is waiting."""
    for _ in range(before):
        draw()
    save_checkpoint(tmp_path, 1, {"rng": [rng_states()]}, 1)
    first, second = draw(), draw()
    assert first != second
    restore_rng_states(load_checkpoint(find_checkpoint(tmp_path))["rng"][0])
    assert [draw(), draw()] == [first, second]


# ---- stops -----------------------------------------------------------------------------------------------------------
def work_until_stopped(ready):
    catch_stop_signals(0)
    assert not stop_requested()
    os.write(ready, b".")
    steps = 0
    while not stop_requested():
        time.sleep(0.02)
        steps += 1
    time.sleep(0.2)  # finishes its step, and takes a second and a third signal
    assert stop_requested()


@pytest.mark.parametrize(
    "numbers", [[number] for number in STOP_SIGNALS] + [[signal.SIGINT, signal.SIGHUP, signal.SIGTERM]]
)
def test_a_signal_asks_for_a_stop(capfd, numbers):
    reader, writer = os.pipe()
    child = fork.Process(target=work_until_stopped, args=(writer,))
    child.start()
    os.close(writer)
    assert os.read(reader, 1) == b"."
    for number in numbers:
        os.kill(child.pid, number)
        time.sleep(0.05)
    child.join(20)
    assert child.exitcode == 0
    assert re.fullmatch(f"{numbers[0].name}: .*\n", capfd.readouterr().err)


@pytest.mark.fast
@pytest.mark.parametrize("torchrun", [False, True])
def test_an_ignored_signal_stays_ignored_without_torchrun(torchrun, monkeypatch, own_handlers):
    """As under `nohup python`. torchrun handles signals itself, and passes them on."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    catch_stop_signals(0)
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop_requested() is torchrun
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop_requested()


def test_time_limit(monkeypatch, own_handlers):
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    catch_stop_signals(2)
    now[0] = 1100.0
    assert [stop_requested(needed) for needed in (0, 19, 20, 60)] == [False, False, True, True]  # 20 s are left
    for minutes, at_once in ((2, True), (0, False)):  # 0: never
        now[0] = 1000.0
        catch_stop_signals(minutes)
        for seconds, asked in ((0, False), (119, False), (120, True), (1e9, True)):
            now[0] = 1000.0 + seconds
            assert stop_requested() is (asked and at_once)
    catch_stop_signals(0)


@pytest.mark.fast
@pytest.mark.parametrize("of_rank_0", ["step_000010.pt", None])
def test_every_rank_resumes_from_the_checkpoint_of_rank_0(of_rank_0, monkeypatch, tmp_path, own_handlers):
    """Another rank, whose disk does not show the newest yet, or shows one that rank 0 has not found."""
    monkeypatch.setattr("common.run.run.gather_objects", lambda ours: [of_rank_0, ours])
    run = new_run(tmp_path / "run", script=__file__, checkpoint="step_000005.pt")
    assert run.checkpoint == of_rank_0


def test_a_record_has_the_name_of_the_checkpoint_that_was_loaded(tmp_path):
    """The newest one has a damaged shard: evaluations after step 30 are of this record."""
    files = {"args": b"1", "source": b"2"}
    record = {tmp_path / f"{name}_step_000040.json": content for name, content in files.items()}
    record[tmp_path / "code_step_000040" / "a_step_000040.py"] = b"3"
    expected = {tmp_path / f"{name}_step_000030.json": content for name, content in files.items()}
    expected[tmp_path / "code_step_000030" / "a_step_000040.py"] = b"3"
    assert rename_record(record, tmp_path, "step_000040", "step_000030") == expected
