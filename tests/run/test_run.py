"""A run and its folder: atomic writes, metrics, clocks, records, resuming; and a rank that is alone."""

import contextlib
import hashlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
import types
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import flow_grpo
from common import process
from common.data import GroupSampler, PromptSet
from common.distributed import gather, gather_objects, restore_rng_states
from common.errors import NothingBegun, RunError
from common.files.checkpoints import save_checkpoint, saved_checkpoints
from common.files.disk import atomic_file
from common.files.prompts import _call_function
from common.models.family import Family
from common.options import SharedArgs
from common.plan import needs
from common.rewards._loading import load_rewards
from common.run.clock import over_ranks
from common.run.inputs import Inputs, checkpoint_to_resume, choose_sizes
from common.run.record import changed_contents, create_run_folder, find_contents, find_sources, write_record
from common.run.recorded_options import code_values
from common.run.resuming import newest_record
from common.run.run import Run
from common.scoring import Scorer
from common.user_code.loading import load_function
from common.weights.adapter_files import read_lora
from tests.conftest import ROOT, new_run, read_metrics, small_workload

import pytest
import torch
import torch.distributed as dist
from PIL import Image


# ---- what a GPU has room for -----------------------------------------------------------------------------------------
@pytest.mark.fast
def test_without_a_gpu_options_stay_and_a_micro_batch_of_0_is_refused():
    inputs = Inputs(Family, {}, {}, PromptSet([], []), PromptSet([], []), lora=None, checkpoint=None)
    args = SharedArgs(micro_batch_size=4)
    assert choose_sizes(args, inputs, small_workload()) == args
    with pytest.raises(RunError, match="^--micro_batch_size 0: .* GPU"):
        choose_sizes(replace(args, micro_batch_size=0), inputs, small_workload())


@pytest.mark.fast
def test_a_resumed_run_names_the_micro_batch_that_was_chosen_for_it(tmp_path, monkeypatch):
    """It decides the order of sums, so that another one would change the last digits."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8, 8))
    monkeypatch.setattr(needs, "gather_objects", lambda value: [value])
    monkeypatch.setattr(needs, "Blueprint", lambda *args: None)

    def choose_options(*args, saved_size, **world):
        return {"shard_ranks": 0, "micro_batch_size": saved_size}

    monkeypatch.setattr(needs, "choose_options", choose_options)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    checkpoint = Path("step_000001.pt")  # a bare name, as --resume may give
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(needs, "load_checkpoint", lambda path: {"args": {"micro_batch_size": 16}})
    prompts = PromptSet(["a sign"], [{}])
    inputs = Inputs(Family, {}, {}, prompts, prompts, lora=None, checkpoint=checkpoint)
    assert choose_sizes(SharedArgs(micro_batch_size=0), inputs, small_workload()).micro_batch_size == 16
    assert choose_sizes(SharedArgs(micro_batch_size=8), inputs, small_workload()).micro_batch_size == 8
    inputs = inputs._replace(checkpoint=None)
    assert choose_sizes(SharedArgs(micro_batch_size=0), inputs, small_workload()).micro_batch_size == 0  # none is known


# ---- atomic_file -----------------------------------------------------------------------------------------------------
def write_version(path, text, fail=False):
    with atomic_file(path) as temporary:
        temporary.write_text(text)
        if fail:
            raise KeyboardInterrupt


def test_atomic_file_creates_and_replaces(tmp_path):
    path = tmp_path / "deep" / "state.pt"
    for text in ("old", "new", "third"):
        write_version(path, text)
        assert path.read_text() == text
        assert [p.name for p in path.parent.iterdir()] == ["state.pt"]  # nothing left beside it


def test_atomic_file_that_raises_leaves_the_previous_one(tmp_path):
    path = tmp_path / "state.pt"
    with pytest.raises(KeyboardInterrupt):
        write_version(path, "old", fail=True)
    assert not path.exists()
    write_version(path, "old")
    with pytest.raises(KeyboardInterrupt):
        write_version(path, "new", fail=True)
    assert path.read_text() == "old"
    write_version(path, "third")
    assert path.read_text() == "third"


def test_a_kill_at_the_rename_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    write_version(path, "old")

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", killed)
    with contextlib.suppress(KeyboardInterrupt):
        write_version(path, "new")
    assert path.read_text() == "old"


# ---- Run: the log ----------------------------------------------------------------------------------------------------
def metrics_of(folder):
    """metrics.jsonl without the process's memory, which stands in every line."""
    rows = read_metrics(folder)
    assert all(0.1 < row.pop("perf/max_memory_gb") < 100 for row in rows)  # of this process, which has imported torch
    return rows


def write(run, step, metrics, grid=None):
    """Write a line as an evaluation outside of a training step does."""
    run.step = step
    run.log(metrics, grid)


def test_a_run_writes_one_line_per_step(tmp_path):
    run = new_run(tmp_path)
    write(run, 0, {"val/ocr/mean": 0.25})
    write(run, 1, {"a": torch.tensor(0.5), "b": 3, "c": True})
    run.close()
    assert metrics_of(tmp_path) == [
        {"training/global_step": 0, "val/ocr/mean": 0.25},
        {"training/global_step": 1, "a": 0.5, "b": 3.0, "c": 1.0},
    ]
    write(new_run(tmp_path), 2, {"a": 1})  # appends
    assert len(read_metrics(tmp_path)) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_run_refuses_metrics_that_are_not_finite(tmp_path, value):
    run = new_run(tmp_path)
    write(run, 6, {"actor/loss": 1.0})
    with pytest.raises(RunError) as error:
        write(run, 7, {"actor/loss": 1.0, "actor/grad_norm": value})
    assert "step 7" in str(error.value)
    assert "actor/grad_norm" in str(error.value)
    assert "actor/loss" not in str(error.value)
    assert len(read_metrics(tmp_path)) == 1


def test_a_run_draws_a_grid_and_curves_after_an_evaluation(tmp_path):
    run = new_run(tmp_path)
    write(run, 0, {"val/ocr/mean": 0.25, "val/ocr/stderr": 0.01}, [(Image.new("RGB", (96, 32)), "caption")] * 3)
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "grid_0000.png", "curves.png"}
    write(run, 1, {"critic/rewards/mean": 0.25})
    assert not (tmp_path / "grid_0001.png").exists()


class Clock:
    """time.perf_counter, which passes only in `spend` and where the test moves `now`."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def spend(self, run, name, seconds):
        with run.updating() if name == "update_actor" else run.timed(name, per_image=name in ("gen", "reward")):
            self.now += seconds


def test_speed_metrics_by_hand(tmp_path, monkeypatch, capfd):
    """Two ranks, 128 images per step; what the seconds of each phase become, and into which line."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    # the second rank needs twice as long for `gen` and half as long for all else, and a third of the memory
    factors = {"gen": 2.0}

    def gather(ours):
        timing, peaks = ours
        theirs = {name: seconds * factors.get(name, 0.5) for name, seconds in timing.items()}
        return [ours, (theirs, {name: peak / 3 for name, peak in peaks.items()})]

    monkeypatch.setattr("common.run.clock.gather_objects", gather)
    run = new_run(tmp_path, num_images=128, num_steps=6)
    clock.now += 5.0  # until the first phase
    clock.spend(run, "testing", 2.0)
    write(run, 0, {})
    for step in (5, 6):
        run.begin_step(step)
        clock.spend(run, "gen", 1.2)
        clock.spend(run, "reward", 0.32)
        clock.spend(run, "gen", 2.0)
        clock.spend(run, "update_actor", 4.0)
        clock.now += 0.48  # between the phases
        if step == 6:
            clock.spend(run, "testing", 3.0)
        run.log({"critic/rewards/mean": 0.5})
        clock.spend(run, "save_checkpoint", 7.0)
    assert "reward=0.500" in capfd.readouterr().err
    write(run, 7, {})  # the training steps are over
    rows = metrics_of(tmp_path)
    slowest = [{name: row.pop(name) for name in [*row] if name.endswith(("/max", "/slowest_rank"))} for row in rows]
    assert slowest[1] == pytest.approx(
        {
            "timing_s/gen/max": 6.4,
            "timing_s/gen/slowest_rank": 1,
            "timing_s/reward/max": 0.32,
            "timing_s/reward/slowest_rank": 0,
            "timing_s/update_actor/max": 4.0,
            "timing_s/update_actor/slowest_rank": 0,
            "timing_s/step/max": 8.0,
            "timing_s/step/slowest_rank": 0,
        }
    )
    evaluated, first, second, after = rows
    assert evaluated == {"training/global_step": 0, "timing_s/startup": 5.0, "timing_s/testing": 2.0}
    trained = {
        "critic/rewards/mean": 0.5,
        "timing_s/gen": 3.2,
        "timing_s/reward": 0.32,
        "timing_s/update_actor": 4.0,
        "timing_s/step": 8.0,
        "timing_per_image_ms/gen": 25.0,
        "timing_per_image_ms/reward": 2.5,
        "timing_per_image_ms/update_actor": 31.25,
        "perf/time_per_step": 8.0,
        "perf/throughput": 8.0,
    }
    assert first == pytest.approx(trained | {"training/global_step": 5, "perf/total_num_images": 640})
    later = {"training/global_step": 6, "perf/total_num_images": 768}
    later |= {"timing_s/testing": 3.0, "timing_s/save_checkpoint": 7.0}  # the step's 8 s hold neither
    assert second == pytest.approx(trained | later)
    assert after == {"training/global_step": 7, "timing_s/save_checkpoint": 7.0}


def test_memory_is_the_largest_of_all_ranks():
    ranks = [({"gen": 1.0}, {"peak": 3.0}), ({"gen": 1.5}, {"peak": 2.0}), ({"gen": 1.25}, {"peak": 4.0})]
    assert over_ranks(ranks) == {"peak": 4.0, "timing_s/gen/max": 1.5, "timing_s/gen/slowest_rank": 1}


@pytest.mark.parametrize(("num_steps", "end"), [(7, "finished"), (8, "stopped")])
def test_a_heartbeat_names_the_phase_that_a_run_hangs_in_and_how_it_ended(num_steps, end, tmp_path, monkeypatch):
    run = new_run(tmp_path, num_steps=num_steps)
    run._owns_folder = True  # as a script's run does
    run.step = 7
    before = time.time()
    with run.timed("update_actor"):  # which goes on after a phase within it
        with run.timed("ref"):
            assert json.loads((tmp_path / "heartbeat.json").read_text())["phase"] == "ref"
        assert json.loads((tmp_path / "heartbeat.json").read_text())["phase"] == "update_actor"
    with run.timed("reward"):
        beat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert beat["step"] == 7 and beat["phase"] == "reward" and beat["pid"] == os.getpid() and beat["host"]
    assert before <= beat["time"] <= time.time()
    monkeypatch.setattr("common.run.run.gather_objects", lambda ours: [True])  # a signal, in the last step or before
    assert run.should_stop()
    run.close()
    beat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert beat["step"] == 7 and beat["phase"] == end
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat.json"]


def test_a_step_may_have_few_phases(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    run = new_run(tmp_path, num_images=10, num_steps=1)
    run.begin_step(1)
    clock.spend(run, "encode_pairs", 0.5)
    run.log({})
    assert metrics_of(tmp_path) == [
        {
            "training/global_step": 1,
            "timing_s/startup": 0.0,
            "timing_s/encode_pairs": 0.5,
            "timing_s/step": 0.5,
            "perf/time_per_step": 0.5,
            "perf/throughput": 20.0,
            "perf/total_num_images": 10,
        }
    ]


def test_the_other_ranks_write_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("common.run.clock.gather_objects", lambda ours: [ours, ours])
    create_run_folder(tmp_path / "run", OPTIONS, __file__)
    run = new_run(tmp_path, profile_steps=(1,), track=True, num_images=4, num_steps=2)
    run.print_message("of rank 0")
    for step in (1, 2):
        run.begin_step(step)
        with run.timed("gen"):
            pass
        run.log({"actor/loss": math.nan}, [(Image.new("RGB", (96, 32)), "caption")])
    run.close()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_profile_steps_are_traced_alone_and_two_passes_of_each(tmp_path, monkeypatch, num_passes):
    """And the first pass without a gradient, in a file of its own. Passes of another module, later ones without a
    gradient, and what follows the second pass with one are not traced."""
    monkeypatch.setattr("common.run.profiling.FSDPModule", torch.nn.Linear)
    model = torch.nn.Linear(2, 2)
    run = new_run(tmp_path, profile_steps=(4, 6), num_steps=7)
    for step in range(3, 7):
        run.begin_step(step)
        for _ in range(num_passes):
            with torch.no_grad():
                model(torch.ones(2)).sin()
        for _ in range(num_passes):
            torch.nn.ReLU()(model(torch.ones(2)).cumsum(0)).sum().backward()
            with torch.no_grad():
                model.weight.cos()
    run.close()
    files = [f"trace_{step:04d}{rest}.json" for step in (4, 6) for rest in ("", "_rollout")]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    for file in files:
        events = json.loads((tmp_path / file).read_text())["traceEvents"]
        names = [event.get("name", "") for event in events]
        counts = [names.count(f"aten::{name}") for name in ("linear", "sin", "relu", "cos")]
        assert counts == ([1, 1, 0, 0] if "rollout" in file else [n := min(num_passes, 2), 0, n, n])


def test_passes_of_every_policy_are_traced(tmp_path, monkeypatch):
    """With full weights another transformer samples, and further ones may take gradients. A block is recomputed in the
    backward pass, where it is no pass of its own."""
    monkeypatch.setattr("common.run.profiling.FSDPModule", torch.nn.Linear)
    outer, inner = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    outer.forward = lambda x: inner(x).tanh()  # its derivative, and sigmoid's, are operations of other names
    others = [torch.nn.Linear(2, 2) for _ in range(3)]
    run = new_run(tmp_path, profile_steps=(1,), num_steps=2)
    run.begin_step(1)
    with torch.no_grad():
        others[0](torch.ones(2))
    outer(torch.ones(2)).sum().backward()
    inner(torch.ones(2))  # as activation checkpointing calls it
    for other in others[1:]:
        other(torch.ones(2)).sigmoid().sum().backward()
    run.close()
    names = {}
    for file in ("trace_0001.json", "trace_0001_rollout.json"):
        events = json.loads((tmp_path / file).read_text())["traceEvents"]
        names[file] = [event.get("name", "") for event in events]
    update, rollout = names.values()
    operations = ("linear", "tanh", "tanh_backward", "sigmoid", "sigmoid_backward")
    counts = [update.count(f"aten::{operation}") for operation in operations]
    assert counts == [3, 1, 1, 1, 1]
    assert rollout.count("aten::linear") == 1 and not rollout.count("aten::tanh")


def test_a_run_stops_where_its_longest_step_would_not_fit_any_more(tmp_path, monkeypatch, own_handlers):
    """With 10 minutes: steps of 3, 4 and 1 minutes end after the second, as 3 minutes are left and one took 4."""
    clock = Clock(monkeypatch)
    run = new_run(tmp_path, num_steps=5)
    process.catch_stop_signals(10)
    monkeypatch.setattr("common.run.run.gather_objects", lambda ours: [ours])
    stopped = []
    for step, minutes in enumerate((3, 4, 1), 1):
        run.begin_step(step)
        clock.now += 60 * minutes
        stopped.append(run.should_stop())
    assert stopped == [False, True, True]


def test_three_steps_without_a_finite_gradient_are_too_many(tmp_path):
    run = new_run(tmp_path)
    for step, has_gradient in enumerate((False, False, True, False, False), 4):
        run.begin_step(step)
        run.end_step({}, has_gradient=has_gradient)
        run.log({})
        run.log({})  # an evaluation's, which has no gradient, does not count
    run.begin_step(9)
    run.end_step({}, has_gradient=False)
    with pytest.raises(RunError, match=" 9: .* 3 .*--learning_rate$"):
        run.log({})


@pytest.mark.fast
@pytest.mark.parametrize(
    ("metrics", "saved", "is_trained", "is_saved"),
    [
        (None, 3, False, True),  # in the rollout of step 5: the fourth is not saved yet
        (None, 4, False, False),
        (None, 3, True, False),  # in the update: the policy is of no step
        ({"a": 1.0}, 4, True, True),  # in the evaluation of step 5
        ({"a": math.nan}, 4, True, False),
    ],
)
def test_only_a_whole_step_is_saved_after_a_failure(tmp_path, one_rank, metrics, saved, is_trained, is_saved):
    sampler = GroupSampler(10, 2, 2, seed=1)
    run = new_run(tmp_path, num_steps=9)
    run._saved_step = saved
    torch.manual_seed(1)
    calls = []

    def save():
        restore_rng_states(run._rng_to_save)
        calls.append((run.step, sampler.position, torch.rand(()).item()))

    run.begin_step(5, sampler, save)
    began_with = torch.Generator().manual_seed(1)
    sampler.draw()
    expected = (4, 0, torch.rand((), generator=began_with).item())
    torch.rand(())
    if is_trained:
        with run.updating():
            pass
    if metrics:
        run.end_step(metrics, has_gradient=True)
        expected = (5, 2, torch.rand((), generator=began_with).item())
        torch.rand(())
    run.save_after_failure()
    assert calls == ([expected] if is_saved else [])
    run.save_after_failure()  # never twice
    assert len(calls) == is_saved


@pytest.mark.fast
def test_a_name_does_not_act_on_the_terminal(tmp_path, capfd):
    run = new_run(tmp_path)
    for write in (run.print_message, process.print_message):
        write("runs/a\x1b[31m\nb: 日本")
        told = capfd.readouterr()
        assert told.out + told.err == "runs/a\\x1b[31m\\nb: 日本\n"


# ---- Run: resuming ---------------------------------------------------------------------------------------------------
# what a checkpoint has of a run beside its step, its best score and its options
NOTHING_YET = {"contents": {}, "lowest": math.inf, "best_step": None, "unlogged": {}}


@pytest.mark.parametrize("name", NOTHING_YET)
def test_a_checkpoint_that_lacks_an_entry_is_no_checkpoint_of_a_new_run(tmp_path, one_rank, own_handlers, name):
    """A default in its place would be a best score, or a metric, that no run had."""
    folder = tmp_path / "run"
    run = new_run(folder, resume="latest", script=__file__)
    state = NOTHING_YET | {"step": 1, "best": 0.5, "args": run.config}
    save_checkpoint(folder, 1, {key: value for key, value in state.items() if key != name}, 1)
    again = new_run(folder, resume="latest", script=__file__, checkpoint=saved_checkpoints(folder)[-1])
    with pytest.raises(KeyError, match=name):
        again.load_checkpoint()


def test_a_resumed_run_cuts_its_folder_back_only_when_it_writes(tmp_path, one_rank, own_handlers):
    """Until then it may still fail, and the folder must stay as it is."""
    folder = tmp_path / "run"
    run = new_run(folder, resume="latest", script=__file__, num_steps=3)
    for step in (1, 2, 3):
        run.begin_step(step)
        run.log({"a": step})
        save_checkpoint(folder, step, NOTHING_YET | {"step": step, "best": step / 10, "args": run.config}, 3)
    *_, second, third = saved_checkpoints(folder)
    before = (folder / "metrics.jsonl").read_bytes()

    with pytest.raises(NothingBegun, match=str(folder)):  # the third checkpoint must be another process's
        new_run(folder, resume="latest", script=__file__, checkpoint=second)
    third.unlink()
    (folder / "args_step_000003.json").write_text("{}")  # of a start that went on from the third
    for step in ("0003", "0004"):
        (folder / "samples" / step).mkdir(parents=True)
    resumed = new_run(folder, resume="latest", script=__file__, checkpoint=second, num_steps=3)
    assert resumed.load_checkpoint()["step"] == resumed.step == 2
    assert resumed.best_score == 0.2
    assert (folder / "metrics.jsonl").read_bytes() == before
    resumed.begin_step(3)
    assert newest_record(folder) == folder / "args_step_000003.json"  # as it may still be refused
    resumed.log({"a": 4}, grid=[])  # the samples of step 3 are its own
    assert [path.name for path in (folder / "samples").iterdir()] == ["0003"]
    assert newest_record(folder) == folder / "args_step_000002.json"
    assert (folder / "source_step_000002.py").read_bytes() == Path(__file__).read_bytes()
    assert [row["a"] for row in read_metrics(folder)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("step", "best"), [(0, 0.5), (1, 0.5), (3, -math.inf), ("cut", -math.inf), (None, 0.5), ("of old", -math.inf)]
)
def test_a_best_adapter_that_a_later_step_wrote_is_chosen_again(tmp_path, one_rank, own_handlers, capsys, step, best):
    """Evaluations may be more frequent than checkpoints, and the run may be killed between them, twice: what says which
    step wrote best_adapter/ stays with it, whatever the log has by then."""
    folder = tmp_path / "run"
    run = new_run(folder, resume="latest", script=__file__, num_steps=4)
    save_checkpoint(folder, 1, NOTHING_YET | {"step": 1, "best": 0.5, "best_step": 0, "args": run.config}, 3)
    if step is not None:
        (folder / "best_adapter").mkdir()
        (folder / "best_adapter" / "pytorch_lora_weights.safetensors").touch()
        if step != "of old":  # whose commit wrote none
            content = '{"st' if step == "cut" else json.dumps({"step": step})
            (folder / "best_adapter" / "best.json").write_text(content)
    for _ in range(2):
        again = new_run(folder, resume="latest", script=__file__, checkpoint=saved_checkpoints(folder)[-1], num_steps=4)
        again.load_checkpoint()
        assert again.best_score == best
        assert bool(re.search("best_adapter .* 1", capsys.readouterr().out)) == (best != 0.5)
        again.begin_step(2)
        again.log({"a": 1})


def test_a_checkpoint_that_is_removed_while_the_model_loads_is_named(tmp_path, one_rank):
    """By the run that is evaluated, which trains on and keeps two."""
    run = new_run(tmp_path / "run", script=__file__)
    save_checkpoint(run.folder, 1, NOTHING_YET | {"step": 1, "best": 0.5, "args": run.config}, 3)
    (checkpoint,) = saved_checkpoints(run.folder)
    other = new_run(tmp_path / "other", resume=str(run.folder), script=__file__, checkpoint=checkpoint)
    checkpoint.unlink()
    with pytest.raises(RunError, match=f"^--resume {run.folder}: .*{checkpoint.name}"):
        other.load_checkpoint()


@pytest.mark.parametrize("save_rollouts", [0, 2])
def test_a_step_that_is_repeated_keeps_the_rollouts_of_this_start_alone(tmp_path, one_rank, save_rollouts):
    """Step 2 was logged, and its rollout written, after the last checkpoint."""

    def start(**options):
        run = new_run(tmp_path / "run", script=__file__, num_steps=4, **options)
        run.config["save_rollouts"] = save_rollouts  # of a script that has it
        return run

    run = start()
    save_checkpoint(run.folder, 1, NOTHING_YET | {"step": 1, "best": 0.5, "best_step": 0, "args": run.config}, 3)
    (run.folder / "rollouts" / "0002").mkdir(parents=True)
    again = start(resume="latest", checkpoint=saved_checkpoints(run.folder)[-1])
    again.load_checkpoint()
    again.begin_step(2)
    again.log({"a": 1})
    assert (run.folder / "rollouts" / "0002").exists() == (save_rollouts == 2)


def test_a_step_whose_evaluation_is_repeated_keeps_its_rollouts(tmp_path, one_rank):
    """Whether this start saves any: its checkpoint stands, and its metrics were not logged."""
    run = new_run(tmp_path / "run", script=__file__, num_steps=4)
    unlogged = NOTHING_YET | {"step": 2, "best": 0.5, "best_step": 0, "args": run.config, "unlogged": {"a": 1.0}}
    save_checkpoint(run.folder, 2, unlogged, 3)
    (run.folder / "rollouts" / "0002").mkdir(parents=True)
    (checkpoint,) = saved_checkpoints(run.folder)
    again = new_run(run.folder, script=__file__, num_steps=4, resume="latest", checkpoint=checkpoint)
    again.load_checkpoint()
    again.log({"a": 1})
    assert (run.folder / "rollouts" / "0002").exists()


@pytest.mark.parametrize("best_by", [None, "val/watched/mean"])
def test_the_best_adapter_is_that_of_the_highest_total_or_best_by(best_by, tmp_path, monkeypatch, capsys):
    saved = []
    monkeypatch.setattr("common.run.run.save_policy", lambda *given: saved.append(given))
    run = new_run(tmp_path, num_steps=4, best_by=best_by)
    for step, score in enumerate((0.25, 0.25, 0.5, 0.375)):
        run.step = step
        metrics = {"val/weighted_total/mean": torch.tensor(score), "val/watched/mean": torch.tensor(1 - score)}
        if best_by:
            metrics = dict(zip(metrics, reversed(metrics.values()), strict=True))
        run.save_if_best("model", "ema", metrics)
    assert saved == [(tmp_path / "best_adapter", "model", "ema", "float32")] * 2
    told = json.loads((tmp_path / "best_adapter" / "best.json").read_text())
    assert told == {"step": 2, best_by or "val/weighted_total/mean": 0.5} and run.best_score == 0.5
    run.close()
    assert re.match(f".* 2, .*{tmp_path}/best_adapter\n", capsys.readouterr().out)


@pytest.mark.fast
def test_a_best_adapter_that_is_not_yet_saved_is_marked(tmp_path, one_rank, own_handlers, monkeypatch):
    """The disk is full, or a kill comes, before the weights of the better step: a resume chooses them again."""
    run = new_run(tmp_path, script=__file__, num_steps=4, resume="latest")
    file = tmp_path / "best_adapter" / "best.json"
    monkeypatch.setattr("common.run.run.save_policy", lambda *given: None)
    run.step = 1
    run.save_if_best("model", "ema", {"val/weighted_total/mean": 0.25})
    assert json.loads(file.read_text()) == {"step": 1, "val/weighted_total/mean": 0.25}
    save_checkpoint(tmp_path, 2, NOTHING_YET | {"step": 2, "best": 0.25, "best_step": 1, "args": run.config}, 3)

    def full(*given):
        raise RunError("no space left")

    monkeypatch.setattr("common.run.run.save_policy", full)
    run.step = 3
    with pytest.raises(RunError, match="no space"):
        run.save_if_best("model", "ema", {"val/weighted_total/mean": 0.5})
    assert json.loads(file.read_text()) == {"step": 3, "val/weighted_total/mean": 0.5, "is_saved": False}
    again = new_run(tmp_path, script=__file__, num_steps=4, resume="latest", checkpoint=saved_checkpoints(tmp_path)[-1])
    again.load_checkpoint()
    assert again.best_score == -math.inf  # of step 1, whose weights a kill may have replaced


def test_without_a_difference_no_step_is_the_best(tmp_path, monkeypatch, capsys):
    """Not even after a resume; relative rewards have no total, and nothing is saved."""
    saved = []
    monkeypatch.setattr("common.run.run.save_policy", lambda *given: saved.append(given))
    run = new_run(tmp_path, num_steps=4)
    for step in range(3):
        run.step = step
        run.save_if_best("model", "ema", {"val/weighted_total/mean": 0.5})
    run.close()
    told = capsys.readouterr().out
    assert told.count("best_adapter") == 1 and len(saved) == 1
    assert re.search(rf"{tmp_path}/best_adapter .* 0: ", told)
    for best_by in (None, "val/ocr/mean"):
        run = new_run(tmp_path, num_steps=4, best_by=best_by)
        run.save_if_best("model", "ema", {"val/drift_from_base": 0.5})
        run.close()
        told = capsys.readouterr().out
        assert "best" not in told.replace("--best_by", "") and ("--best_by val/ocr/mean: " in told) == bool(best_by)
    assert len(saved) == 1


# ---- the folder ------------------------------------------------------------------------------------------------------
OPTIONS = {"name": "test", "learning_rate": 0.5, "reward": ("ocr",), "resume": "latest"}


def test_create_run_folder(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("print('the source')\n")
    folder = tmp_path / "runs" / "test"
    monkeypatch.setattr("common.run.record.COMMON", tmp_path / "common")
    create_run_folder(folder, OPTIONS, script)
    record = json.loads((folder / "args.json").read_text())
    assert record["args"] == {"name": "test", "learning_rate": 0.5, "reward": ["ocr"], "resume": "latest"}
    assert record["git_hash"] is None  # not in a repository
    assert record["command"] and "script_git_hash" not in record
    assert torch.cuda.is_available() or record["device"] == f"CPU, {os.cpu_count()} cores"
    assert record["versions"]["torch"] == torch.__version__
    assert (folder / "source.py").read_text() == "print('the source')\n"
    checkpoint_to_resume(folder, None)  # nothing was measured yet
    new_run(folder).log({"a": 1})
    with pytest.raises(ValueError, match=f"{folder} .*metrics.jsonl"):
        checkpoint_to_resume(folder, None)
    assert json.loads((folder / "args.json").read_text()) == record
    checkpoint_to_resume(tmp_path / "runs" / "another", None)
    (folder / "traceback_rank1.txt").write_text("what ended the run")
    create_run_folder(folder, OPTIONS, script)  # resumes, mended
    assert not (folder / "traceback_rank1.txt").exists()


@pytest.mark.fast
def test_the_settings_of_rewards_are_recorded_and_no_key(tmp_path, monkeypatch):
    mine = tmp_path / "mine.py"
    mine.write_text("def mine(images, prompts, metadata):\n    return []\n\n\nmine.settings = ('MINE',)\n")
    variables = {"VLM_JUDGE_URL": "http://judge/v1", "VLM_JUDGE_RANGE": "", "VLM_JUDGE_API_KEY": "secret", "MINE": "7"}
    variables |= {"VLM_JUDGE_MODEL": "tiny", "PICKSCORE_MODEL": "folder", "CLIP_SCORE_MODEL": "not asked"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PICKSCORE_PROCESSOR", raising=False)
    args = flow_grpo.Args(reward=("ocr", "vlm_judge", f"{mine}:mine"), eval_reward=("pickscore",))
    rewards = load_rewards([*args.reward, *args.eval_reward], load=False)
    create_run_folder(tmp_path / "run", Run(args, rewards).config, __file__)
    text = (tmp_path / "run" / "args.json").read_text()
    options = json.loads(text)["args"]
    assert options.pop("reward_settings") == {
        "vlm_judge": {"VLM_JUDGE_URL": "http://judge/v1", "VLM_JUDGE_MODEL": "tiny"},
        "mine": {"MINE": "7"},
        "pickscore": {"PICKSCORE_MODEL": "folder"},
    }
    in_checkout = {"model": "assets/embedded", "train_prompts": ["assets/train_prompts.txt"]}
    in_checkout["eval_prompts"] = ["assets/eval_prompts.txt"]
    assert options == json.loads(json.dumps(asdict(args))) | in_checkout
    assert "secret" not in text and "not asked" not in text


@pytest.mark.fast
def test_the_guidance_of_a_fork_is_recorded_by_the_name_that_others_read(tmp_path):
    """Where its own option is called otherwise. A script without guidance has none."""
    args = SharedArgs(name=str(tmp_path))
    guided = Run(args, {}, workload=replace(small_workload(), guidance_scale=2.0))
    assert guided.config["guidance_scale"] == 2
    assert "guidance_scale" not in Run(args, {}, workload=small_workload()).config


@pytest.mark.fast
def test_a_run_keeps_the_users_code_and_digests_of_what_it_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "mine_too"):
        (tmp_path / f"{name}.py").write_text(
            "import besides_mine\n\n\ndef mine(images, prompts, metadata):\n    return []\n"
        )
    (tmp_path / "besides_mine.py").write_text("x = 1\n")
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "question.txt").write_text("{prompt}?")
    (tmp_path / "p.txt").write_text("a sign\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr("common.run.record.NUM_PIECES", 2)  # a file of more than 2 MiB is read in two pieces
    load_rewards(["mine.py:mine"], load=False)
    load_function("mine_too.py:mine", "--sde_type")
    options = OPTIONS | {"reward": ("mine.py:mine.style",), "sde_type": "mine_too.py:mine", "model": "model"}
    options |= {"eval_prompts": "p.txt", "reward_settings": {"vlm_judge": {"VLM_JUDGE_PROMPT": "question.txt"}}}
    code = code_values(options, flow_grpo.Args)
    contents = find_contents(options, code)
    create_run_folder(tmp_path / "run", options, Path(flow_grpo.__file__), None, contents, code)
    kept = {path.name for path in (tmp_path / "run" / "code").iterdir()}
    assert kept == {"mine.py", "mine_too.py", "besides_mine.py", "question.txt"}
    assert (tmp_path / "run" / "code" / "besides_mine.py").read_text() == "x = 1\n"
    assert json.loads((tmp_path / "run" / "args.json").read_text())["contents"] == contents
    assert contents.keys() == {*(f"code/{name}" for name in kept), "--model model", "--eval_prompts p.txt"}
    # an evaluation alone reads no training prompts, so it does not call their function either
    alone = options | {"eval_only": True, "train_prompts": "no_such.py:function", "pairs": "p.txt"}
    alone |= {"teachers": ("a=p.txt",), "records": ("p.txt",)}
    assert find_contents(alone, code).keys() == contents.keys()
    expected = hashlib.blake2b(b"a sign\n", digest_size=16).hexdigest()
    assert contents["--eval_prompts p.txt"] == f"7 bytes, blake2b {expected}"
    for file, is_of_score in (("p.txt", True), ("besides_mine.py", True), ("question.txt", True)):
        (tmp_path / file).write_text("another")
        (changed,) = changed_contents(contents, find_contents(options, code))
        assert changed[0].endswith(file) and changed[1] is is_of_score
        contents = find_contents(options, code)
    (tmp_path / "model" / "a.safetensors").write_bytes(bytes(3 * 2**20 - 1) + b"1")
    assert list(changed_contents(contents, find_contents(options, code))) == [("--model model", True)]

    # records may name another field; scores do not depend on what is trained on
    before = find_contents({"records": ("p.txt:caption",)})
    assert list(before) == ["--records p.txt:caption"]
    (tmp_path / "p.txt").write_text("one more")
    after = find_contents({"records": ("p.txt:caption",)})
    assert list(changed_contents(before, after)) == [("--records p.txt:caption", False)]

    # packages below the folder that others have imported are not the reward's
    package = tmp_path / "src" / "package.py"
    package.parent.mkdir()
    package.write_text("")
    module = types.ModuleType("package")
    module.__file__ = str(package)
    monkeypatch.setitem(sys.modules, "package", module)
    # a setting may be a long text, and a model of the hub be there in part
    options["reward_settings"] = {"mine": {"RUBRIC": "long " * 1000}}
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    monkeypatch.setattr("common.run.record.known_folder", lambda model: snapshot)
    contents = find_contents(options | {"model": "someone/model"})
    assert contents["--model someone/model"] == "commit abc"
    assert not any("package" in name or "RUBRIC" in name for name in contents)


@pytest.mark.fast
def test_the_digest_of_prompts_covers_whatever_names_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    function = "from pathlib import Path\ndef listed():\n    return Path('list').read_text().splitlines()\n"
    (tmp_path / "prompts_of_mine.py").write_text(function)
    files = {
        "q.csv:text": "q.csv",
        "data": "data/a.csv",
        "data/train-*": "data/train-1.parquet",
        "prompts_of_mine.py:listed": "list",  # what it reads, and returns
    }
    for file in files.values():
        Path(file).write_text("a\nb")
    options = {"train_prompts": list(files), "eval_prompts": ["prompts_of_mine.py:listed"]}
    code = code_values(options, flow_grpo.Args)
    before = find_contents(options, code)
    told = {f"--train_prompts {source}" for source in files}
    assert before.keys() == {*told, "--eval_prompts prompts_of_mine.py:listed", "code/prompts_of_mine.py"}
    assert before["--train_prompts prompts_of_mine.py:listed"].startswith("2 records, blake2b ")
    for source, file in files.items():
        Path(file).write_text("a\nc")
        _call_function.cache_clear()  # as another run's process
        after = find_contents(options, code)
        changed = [name for name, _ in changed_contents(before, after)]
        assert f"--train_prompts {source}" in changed
        assert ("--eval_prompts prompts_of_mine.py:listed" in changed) == (file == "list")
        before = after


def make_repository(folder):
    """A repository with a script, whose commit is returned."""
    folder.mkdir()
    (folder / "script.py").write_text("")
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", f"of {folder}"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.fast
@pytest.mark.parametrize("place", ["checkout/mine", "elsewhere"])
def test_a_script_in_a_repository_of_its_own_has_both_commits(tmp_path, monkeypatch, place):
    """CleanFlow's, with what differs from it, and that of the script's repository."""
    monkeypatch.setattr("common.run.record.COMMON", tmp_path / "checkout" / "common")
    head = make_repository(tmp_path / "checkout")
    own = make_repository(tmp_path / place)
    (tmp_path / "checkout" / "script.py").write_text("mended = True\n")
    create_run_folder(tmp_path / "run", OPTIONS, tmp_path / place / "script.py")
    record = json.loads((tmp_path / "run" / "args.json").read_text())
    assert (record["git_hash"], record["script_git_hash"]) == (f"{head}-dirty", own)
    assert (tmp_path / "run" / "uncommitted.diff").read_bytes().endswith(b"+mended = True\n")
    (tmp_path / place / "script.py").write_text("edited = True\n")
    (tmp_path / "script.py").symlink_to(tmp_path / place / "script.py")
    create_run_folder(tmp_path / "linked", OPTIONS, tmp_path / "script.py")
    record = json.loads((tmp_path / "linked" / "args.json").read_text())
    assert (record["git_hash"], record["script_git_hash"]) == (f"{head}-dirty", f"{own}-dirty")


def test_create_run_folder_records_git_and_how_much_of_it_is_left_out(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    monkeypatch.setattr("common.run.record.COMMON", repository / "common")
    head = make_repository(repository)
    create_run_folder(tmp_path / "run", OPTIONS, repository / "script.py")
    assert json.loads((tmp_path / "run" / "args.json").read_text())["git_hash"] == head
    (repository / "script.py").write_text("mended = True\n")
    (repository / "new.py").write_text("")
    (repository / "contrib").mkdir()
    (repository / "contrib" / "fork.py").write_text("")
    create_run_folder(tmp_path / "other", OPTIONS, repository / "contrib" / "fork.py")
    record = json.loads((tmp_path / "other" / "args.json").read_text())
    assert (record["git_hash"], record["untracked"]) == (f"{head}-dirty", ["contrib/fork.py", "new.py"])
    diff = (tmp_path / "other" / "uncommitted.diff").read_bytes()
    assert diff.endswith(b"+mended = True\n")
    assert not (tmp_path / "run" / "uncommitted.diff").exists()
    monkeypatch.setattr("common.run.record.LONGEST_DIFF", len(diff) - 7)
    monkeypatch.setattr("common.run.record.MOST_UNTRACKED", 1)
    create_run_folder(tmp_path / "cut", OPTIONS, repository / "contrib" / "fork.py")
    record = json.loads((tmp_path / "cut" / "args.json").read_text())
    assert record["untracked"] == ["contrib/fork.py", "and 1 more"]
    left = (tmp_path / "cut" / "uncommitted.diff").read_bytes()
    assert left == diff[:-7] + b"\n7 more bytes are left out\n"


def test_a_resumed_run_keeps_the_first_record(tmp_path, monkeypatch):
    monkeypatch.setattr("common.run.record.COMMON", tmp_path / "common")  # where git has no changes
    script = tmp_path / "script.py"
    script.write_text("first = True\n")
    folder = tmp_path / "run"
    create_run_folder(folder, OPTIONS, script, Path("another/step_000002.pt"))
    names = {path.name for path in folder.iterdir()}
    assert names == {".lock", ".lock_holder.json", "args.json", "source.py"}  # the first of this folder
    script.write_text("first = False\n")
    save_checkpoint(folder, 4, {"step": 4}, 1)
    fourth = folder / "checkpoints" / "step_000004.pt"
    record = create_run_folder(folder, OPTIONS | {"learning_rate": 0.25}, script, fourth)
    script.write_text("edited = True\n")  # while the run loads
    assert newest_record(folder) == folder / "args.json"  # until the run has begun: it may be refused
    write_record(record)
    rates = [
        json.loads((folder / f"args{end}.json").read_text())["args"]["learning_rate"] for end in ("", "_step_000004")
    ]
    assert rates == [0.5, 0.25]
    assert (folder / "source.py").read_text() == "first = True\n"
    assert (folder / "source_step_000004.py").read_text() == "first = False\n"


@pytest.mark.fast
@pytest.mark.parametrize(("package", "by_path"), [("", True), ("my_package", False), ("my_other_package", True)])
def test_a_run_keeps_what_its_script_imports_from_beside_it(tmp_path, monkeypatch, package, by_path):
    """As `python my_grpo.py`, as `python -m my_package.my_grpo`, and by its path with the root on the path. No score
    depends on it."""
    monkeypatch.setattr("common.run.record.COMMON", tmp_path / "common")
    folder = tmp_path / package
    folder.mkdir(exist_ok=True)
    for name in ("my_grpo", "my_losses", "unused"):
        (folder / f"{name}.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"{package}.my_losses".lstrip(".")
    monkeypatch.setitem(sys.modules, name, importlib.import_module(name))  # and away after the test
    script = SimpleNamespace(__file__=str(folder / "my_grpo.py"), __package__=None if by_path else package)
    monkeypatch.setitem(sys.modules, "__main__", script)
    before = find_contents({}, (), script.__file__)
    assert before.keys() == {f"source {name.replace('.', '/')}.py"}
    (folder / "my_losses.py").write_text("x = 2\n")
    assert [score for _, score in changed_contents(before, find_contents({}, (), script.__file__))] == [False]
    create_run_folder(tmp_path / "run", {}, script.__file__)
    assert [path.name for path in (tmp_path / "run" / "code").rglob("*.py")] == ["my_losses.py"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("is_script", "module", "start"),
    [(True, "mine.my_grpo", "-m mine.my_grpo"), (True, None, "/mine/my_grpo.py"), (False, "x.y", "/mine/my_grpo.py")],
)
def test_a_run_of_a_module_is_recorded_as_one(tmp_path, monkeypatch, is_script, module, start):
    """`python -m mine.my_grpo` leaves the file's path in sys.argv, which without -m does not find common/. Another
    program may run the script: pytest, for example."""
    script = tmp_path / "my_grpo.py"
    script.write_text("")
    file = str(script) if is_script else str(tmp_path / "other.py")
    main = SimpleNamespace(__file__=file, __package__="", __spec__=module and SimpleNamespace(name=module))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr("sys.argv", ["/mine/my_grpo.py", "--name", "a b"])
    create_run_folder(tmp_path / "run", {}, script)
    assert json.loads((tmp_path / "run" / "args.json").read_text())["command"] == f"{start} --name 'a b'"


@pytest.mark.fast
def test_the_script_and_each_file_of_common_have_a_part_in_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr("common.run.record.COMMON", tmp_path / "common")
    script = tmp_path / "mine.py"
    inner = tmp_path / "common" / "models" / "a.py"
    inner.parent.mkdir(parents=True)
    (tmp_path / "common" / "b.py").write_text("b = 1\n")
    inner.write_text("a = 1\n")
    script.write_text("mine = 1\n")
    before = find_sources(script)
    (tmp_path / "common" / "b.pyc").write_text("no source")
    assert list(changed_contents(before, find_sources(script))) == []
    (tmp_path / "common" / "question.txt").write_text("{prompt}?")
    assert list(changed_contents(before, find_sources(script))) == [("source common/", False)]
    before = find_sources(script)
    inner.write_text("a = 2\n")
    assert list(changed_contents(before, find_sources(script))) == [("source common/", False)]
    script.write_text("mine = 2\n")
    assert [name for name, _ in changed_contents(before, find_sources(script))] == ["source common/", "source mine.py"]


# ---- weights ---------------------------------------------------------------------------------------------------------
SAVE = """
import sys
from common.cpu import repair_torchvision
repair_torchvision()
from common.weights.lora import save_weights
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig

modules = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj"]
config = LoraConfig(r=2, lora_alpha=4, target_modules=modules, exclude_modules=["proj_out", "proj_in", "norm"])
tensors = {f"a.{name}.lora_{side}.weight": torch.ones(2, 2) for name in modules for side in "AB"}
for number in range(8):
    save_weights(f"{sys.argv[1]}/{number}", StableDiffusion3Pipeline, tensors, config)
"""


def test_equal_adapters_are_equal_bytes_in_every_process(tmp_path):
    """Sets of names are in another order under another hash seed, and a safetensors header is in every file: of its two
    entries either one may come first, by chance."""
    files = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", SAVE, str(tmp_path / seed)]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed})
        files |= {path.read_bytes() for path in (tmp_path / seed).glob("*/pytorch_lora_weights.safetensors")}
    assert len(files) == 1
    tensors, config = read_lora(tmp_path / "1" / "0")  # it is a LoRA still
    # trained with alpha / rank = 4 / 2, which stands in the B matrices, so that nobody has to read the metadata
    for name, tensor in tensors.items():
        assert torch.equal(tensor, torch.full((2, 2), 2.0 if ".lora_B." in name else 1.0))
    assert len(tensors) == 12 and (config.r, config.lora_alpha) == (2, 2)


# ---- one rank alone --------------------------------------------------------------------------------------------------
@pytest.fixture
def two_threads():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(2**20).sqrt()  # the main thread's second one has begun
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.fast
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_one_rank_alone_gets_its_own_and_starts_no_thread(one_rank, two_threads):
    """Gloo's threads would copy a tensor of 2^20 elements with OpenMP threads of their own, beyond the cores."""
    rows = torch.rand(2**20)
    assert torch.equal(rows.clone(), rows)  # torch's own threads start at the first large operation
    before = set(os.listdir("/proc/self/task"))
    assert torch.equal(gather(rows), rows[None])
    assert gather_objects(rows.numpy().tobytes()) == [rows.numpy().tobytes()]
    assert set(os.listdir("/proc/self/task")) <= before


@pytest.mark.fast
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_rollouts_add_no_threads(two_threads):
    """The thread of rewards keeps its OpenMP threads: with them there are more than cores, so that those of the rollout
    leave it theirs (common/distributed.py). A Scorer's own thread ends with it."""
    deadline = time.monotonic() + 60

    def score():
        width = lambda images, prompts, metadata: [image.width for image in images]
        scorer = Scorer({"width": width}, PromptSet(["a"], [{}]))
        scorer.add([0], [Image.new("RGB", (7, 3))])
        assert scorer.scores().tolist() == [[7.0]]

    score()
    before = set(os.listdir("/proc/self/task"))
    for _ in range(3):
        score()
    while set(os.listdir("/proc/self/task")) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(os.listdir("/proc/self/task")) - before
