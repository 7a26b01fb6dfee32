"""The share of a GPU's peak, and trackers. Traces are in test_run.py, lost ranks in test_nodes.py."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import diffusion_nft
import flow_grpo
from common.models.loading import find_family
from common.plan.devices import DEVICES, find_device
from common.plan.memory import Blueprint
from common.run import utilisation as mfu
from common.run.tracking import check_tracker, start_tracker
from common.run.utilisation import Utilisation
from tests.conftest import ROOT, lora_of, needs_tensorboard, needs_wandb, new_run

import pytest
import torch
from PIL import Image


# ---- the share of the peak -------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_gpus_are_known_by_cudas_names():
    assert find_device("NVIDIA H100 80GB HBM3") == DEVICES["h100-80"]
    assert find_device("NVIDIA GeForce RTX 4090") == DEVICES["rtx4090"]
    assert find_device("NVIDIA A100-SXM4-40GB").bfloat16 == 312
    assert find_device("NVIDIA H100 PCIe") is None and find_device("Tesla T4") is None


@pytest.fixture
def has_h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")


@pytest.mark.fast
def test_utilisation_by_hand(has_h100, monkeypatch):
    """2 s at the peak in 8 s; a phase that a step does not have is not logged. Nobody waits for the count."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    monkeypatch.setattr(mfu, "count_in_process", lambda config, workload: receiver)
    utilisation = Utilisation({"dtype": "bfloat16"}, flow_grpo.workload(flow_grpo.Args()))
    assert utilisation.metrics({"actor": 8.0}) == {}
    sender.send({"actor": 2.0 * 989e12, "actor_infer": 1.0 * 989e12})
    sender.close()
    assert utilisation.metrics({"actor": 8.0, "gen": 3.0}) == {"perf/mfu/actor": 0.25}
    assert utilisation.metrics({"actor": 4.0, "actor_infer": 4.0}) == {
        "perf/mfu/actor": 0.5,
        "perf/mfu/actor_infer": 0.25,
    }


@pytest.mark.fast
def test_a_gpu_that_we_do_not_know_has_no_utilisation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU of next year")
    monkeypatch.setattr(mfu, "count_in_process", lambda config, workload: pytest.fail("counted"))
    assert Utilisation({"dtype": "float32"}, flow_grpo.workload(flow_grpo.Args())).metrics({"actor": 8.0}) == {}


def test_what_cannot_be_counted_is_said_and_ends_no_run(has_h100, capfd):
    args = flow_grpo.Args(model="nowhere/at-all")
    utilisation = Utilisation(asdict(args), flow_grpo.workload(args))
    assert utilisation.counting.poll(timeout=120)
    assert utilisation.metrics({"actor": 8.0}) == {}
    assert utilisation.metrics({"actor": 8.0}) == {}
    assert "perf/mfu " in capfd.readouterr().err


@pytest.mark.parametrize("module", [flow_grpo, diffusion_nft])
def test_flops_are_those_of_a_ranks_passes(has_h100, monkeypatch, module):
    """A rank's step of a run without a KL: images x passes x the FLOPs of a pass. A process of its own counts them,
    which leaves this one's random states alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = module.Args(kl_coef=0.0)
    state = torch.get_rng_state()
    utilisation = Utilisation(asdict(args), module.workload(args))
    assert utilisation.counting.poll(timeout=120)
    assert set(utilisation.metrics({"actor": 1.0})) == {"perf/mfu/actor"}
    assert torch.equal(torch.get_rng_state(), state)
    flops = utilisation.flops
    family = find_family(args.model, *args.image_size, 1, 1.0)
    lora = lora_of(args, family)
    blueprint = Blueprint(family, args.model, lora, torch.float32)
    cost = blueprint.velocity(args.image_size, 1, args.max_sequence_length, 1.0, train=True)
    share = args.num_prompts * args.group_size // 2
    if module is flow_grpo:
        passes = share * args.epochs_per_rollout * (args.sde_window_size or args.num_inference_steps - 1)
        assert flops["actor"] == passes * cost.flops
        assert set(flops) == {"actor", "actor_infer"}
        assert flops["actor_infer"] < flops["actor"] / 2  # a backward pass is more than a forward pass
    else:
        assert set(flops) == {"actor"}


# ---- trackers --------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for track, package in ((True, "wandb"), ("wandb", "wandb"), ("tensorboard", "tensorboard")):
        with pytest.raises(ValueError, match=f"^--track {track}: .*pip install {package}$"):
            check_tracker(track)
    check_tracker(False)


@needs_wandb
@pytest.mark.fast
@pytest.mark.parametrize("rank", ["0", None])
@pytest.mark.parametrize(("mode", "key"), [("online", ""), ("online", "short"), ("offline", "")])
def test_wandb_without_a_login_is_one_line(tmp_path, monkeypatch, mode, key, rank):
    """Before rewards load, with torchrun and without. The real package, with a folder of its own as home; it asks no
    server."""
    import wandb

    for name in ("HOME", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name, value in (("RANK", rank), ("WORLD_SIZE", rank and "1")):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    for name, value in (("WANDB_MODE", mode), ("WANDB_API_KEY", key)):
        monkeypatch.setenv(name, value)
    wandb.teardown()  # its settings are read once a process
    try:
        with contextlib.ExitStack() as refused:
            if mode == "online":
                line = "^--track wandb: run `wandb login`, or set WANDB_MODE=offline: [^\n]+$"
                refused.enter_context(pytest.raises(ValueError, match=line))
            check_tracker("wandb")
    finally:
        wandb.teardown()


class Writer:
    """In the place of torch's SummaryWriter, which needs the package tensorboard."""

    def __init__(self, folder, purge_step):
        self.calls = [("folder", folder, purge_step)]
        Writer.last = self

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


@pytest.mark.fast
def test_tensorboard_gets_scalars_and_pictures(tmp_path, monkeypatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    tracker = start_tracker("tensorboard", tmp_path, {})
    red, blue = Image.new("RGB", (3, 2), "red"), Image.new("RGB", (3, 2), "blue")
    tracker.log(7, {"actor/loss": 0.5}, [(red, "a mug"), (blue, "a film")])
    tracker.log(8, {"actor/loss": 0.25}, None)
    tracker.finish()
    images = {call[1]: call for call in Writer.last.calls if call[0] == "add_image"}
    assert Writer.last.calls[0] == ("folder", str(tmp_path / "tensorboard"), 7)  # what came before stays
    assert [call[1:] for call in Writer.last.calls if call[0] == "add_scalar"] == [
        ("actor/loss", 0.5, 7),
        ("actor/loss", 0.25, 8),
    ]
    assert images["val/0"][2].shape == (2, 3, 3) and images["val/0"][2][0, 0].tolist() == [255, 0, 0]
    assert images["val/1"][2][0, 0].tolist() == [0, 0, 255] and images["val/1"][3:] == (7, "HWC")
    assert Writer.last.calls[-1] == ("close",)


@needs_tensorboard
@pytest.mark.fast
def test_tensorboards_files_have_what_was_logged(tmp_path):
    """The real package, of the pinned version: what it writes is read back by its own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    check_tracker("tensorboard")
    tracker = start_tracker("tensorboard", tmp_path, {})
    tracker.log(7, {"actor/loss": 0.5}, [(Image.new("RGB", (3, 2), "red"), "a mug")])
    tracker.log(8, {"actor/loss": 0.25}, None)
    tracker.finish()
    assert not tracker.is_lost
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("actor/loss")] == [(7, 0.5), (8, 0.25)]
    [picture] = found.Images("val/0")
    assert (picture.step, picture.width, picture.height) == (7, 3, 2)


@pytest.mark.fast
def test_wandb_files_and_runs_go_where_its_variables_say(tmp_path, monkeypatch):
    """WANDB_RUN_GROUP and WANDB_TAGS wandb reads itself, where its `init` is not given others."""
    calls = []
    monkeypatch.setenv("WANDB_DATA_DIR", "")
    monkeypatch.delenv("WANDB_DATA_DIR")  # and again behind the test
    wandb = SimpleNamespace(init=lambda **options: calls.append(options))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for variable in ("WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    start_tracker(True, tmp_path, {"seed": 1})
    monkeypatch.setenv("WANDB_DIR", "/elsewhere")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    start_tracker("wandb", tmp_path, {"seed": 1})
    first, second = calls
    assert first["dir"] == str(tmp_path) and second["dir"] == "/elsewhere"
    assert first["project"] == "cleanflow" and second["project"] == "mine"
    assert not {"group", "tags"} & first.keys()
    assert first["id"] == second["id"] == (tmp_path / "wandb_id.txt").read_text()


PICTURE = (Image.new("RGB", (8, 8), "red"), "a sign")


class Broken(Exception):
    """As wandb.Error, a type of a package's own, without a text."""


def break_tracker(monkeypatch, package, place, error):
    """Put a package in a tracker's place, whose function of a name raises."""

    def call(name):
        def attempt(*args, **kwargs):
            if name == place:
                raise error
            return stub

        return attempt

    stub = SimpleNamespace()
    names = ("init", "log", "Image", "Table", "finish", "SummaryWriter")
    for name in (*names, "add_scalar", "add_image", "add_text", "flush", "close"):
        setattr(stub, name, call(name))
    monkeypatch.setitem(sys.modules, package, stub)
    monkeypatch.setenv("WANDB_DATA_DIR", "")
    monkeypatch.delenv("WANDB_DATA_DIR")  # and again behind the test


@pytest.mark.fast
@pytest.mark.parametrize("error", [ConnectionResetError("Connection lost"), OSError(28, "No space left"), Broken()])
@pytest.mark.parametrize(
    ("track", "place"),
    [
        *(("wandb", place) for place in ("init", "log", "Image", "Table", "finish")),
        *(("tensorboard", place) for place in ("SummaryWriter", "add_scalar", "add_image", "add_text", "flush")),
        ("tensorboard", "close"),
    ],
)
def test_an_error_of_a_tracker_is_one_line_and_the_run_goes_on(tmp_path, monkeypatch, capfd, track, place, error):
    package = "wandb" if track == "wandb" else "torch.utils.tensorboard"
    break_tracker(monkeypatch, package, place, error)
    run = new_run(tmp_path, track=track)
    for step in range(3):
        run.step = step
        run.log({"actor/loss": 0.5}, [PICTURE])
    run.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if "--track" in line]
    assert len(lines) == 1
    assert all(part in lines[0] for part in (f"--track {track}", type(error).__name__, str(run.folder)))
    rows = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3 and (run.folder / "grid_0002.png").is_file()


@pytest.mark.fast
def test_a_package_that_is_damaged_is_one_line_too(tmp_path, monkeypatch, capfd):
    for track, package in (("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")):
        monkeypatch.setitem(sys.modules, package, None)  # an ImportError
        tracker = start_tracker(track, tmp_path, {})
        tracker.log(0, {"actor/loss": 0.5}, None)
        tracker.finish()
        assert capfd.readouterr().err.count(f"--track {track}: ") == 1


def track_in_process(folder, code, **variables):
    """A process that has `tracker`, of the real wandb offline, and `kill` of its helper, runs `code`."""
    start = f"""
import os, pathlib, signal, subprocess, time
from PIL import Image
from common.run.tracking import check_tracker, start_tracker
check_tracker("wandb")
tracker = start_tracker("wandb", pathlib.Path({str(folder)!r}), {{"seed": 1}})
images = [(Image.new("RGB", (96, 32), (i, 0, 0)), "a sign") for i in range(4)]
def kill(number=signal.SIGKILL):
    for child in subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.split():
        if "wandb-core" in open(f"/proc/{{child}}/cmdline").read():
            os.kill(int(child), number)
    time.sleep(0.5)
"""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = mine | {"WANDB_MODE": "offline", "RANK": "0", "WORLD_SIZE": "1"} | variables
    command = [sys.executable, "-c", start + code, "--an_option_of_mine"]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@needs_wandb
@pytest.mark.parametrize(
    "code",
    [
        "kill(); tracker.log(0, {'x': 1.0}, None); tracker.log(1, {'x': 1.0}, images); tracker.finish()",
        "tracker.log(0, {'x': 1.0}, None); kill(); tracker.log(1, {'x': 1.0}, images); tracker.finish()",
        "tracker.log(0, {'x': 1.0}, images); kill(); tracker.finish()",
    ],
    ids=["before metrics", "before images", "before the end"],
)
def test_wandbs_helper_may_be_killed(tmp_path, code):
    done = track_in_process(tmp_path, code + "\nprint('goes on')")
    assert done.returncode == 0 and done.stdout.endswith("goes on\n"), done.stderr
    assert done.stderr.count("--track wandb: ") == 1 and "Traceback" not in done.stderr


@needs_wandb
def test_wandbs_copies_of_images_are_in_the_run_folder(tmp_path):
    """Not in the home directory, which in a container nobody can write to. WANDB_DATA_DIR names another place."""
    code = "tracker.log(0, {'x': 1.0}, images); tracker.finish()"
    done = track_in_process(tmp_path, code, HOME="/proc/nowhere")
    assert done.returncode == 0 and "--track" not in done.stderr and "environment variables" not in done.stderr
    assert any(path.is_file() for path in (tmp_path / "wandb" / "artifacts").rglob("*"))
    done = track_in_process(tmp_path, code, WANDB_DATA_DIR="/proc/nowhere")
    assert done.returncode == 0 and done.stderr.count("--track wandb: ") == 1


@needs_wandb
def test_wandb_gets_nothing_of_the_code(tmp_path):
    """Unless a variable of wandb's asks for it; others turn the rest off. What a run offline keeps is what `wandb sync`
    sends."""
    code = "print('a line of mine'); tracker.log(0, {'x': 1.0}, images); tracker.finish()"

    def sent(folder, **variables):
        folder.mkdir()
        done = track_in_process(folder, code, **variables)
        assert done.returncode == 0, done.stderr
        files = [path for path in (folder / "wandb").rglob("*") if path.is_file() and "logs" not in path.parts]
        return b"".join(path.read_bytes() for path in files)

    plain = sent(tmp_path / "plain")
    least = {"WANDB_CONSOLE": "off", "WANDB__DISABLE_MACHINE_INFO": "true", "WANDB__DISABLE_STATS": "true"}
    off = sent(tmp_path / "off", **least)
    on = sent(tmp_path / "on", WANDB_DISABLE_GIT="false", WANDB__SAVE_REQUIREMENTS="true")
    assert b"seed" in off and b"a sign" in off
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    for word in filter(None, ("requirements.txt", commit.strip())):  # no commit where the clone has no git
        assert word.encode() not in plain
        assert word.encode() in on
    for word in ("a line of mine", "--an_option_of_mine", "proc.memory", sys.executable):
        assert word.encode() not in off
        assert word.encode() in plain
