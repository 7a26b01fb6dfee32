"""The share of a GPU's peak, and trackers. Traces are in test_run.py, lost ranks in test_nodes.py."""

import contextlib
import multiprocessing
import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import diffusion_nft
import flow_grpo
from common import profiling
from common.models.loading import find_family
from common.plan.devices import DEVICES, find_device
from common.plan.memory import Blueprint
from common.profiling import Utilisation
from common.tracking import check_tracker, start_tracker
from tests.conftest import lora_of, needs_wandb

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
    monkeypatch.setattr(profiling, "count_in_process", lambda config, workload: receiver)
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
    monkeypatch.setattr(profiling, "count_in_process", lambda config, workload: pytest.fail("counted"))
    assert Utilisation({"dtype": "float32"}, flow_grpo.workload(flow_grpo.Args())).metrics({"actor": 8.0}) == {}


def test_what_cannot_be_counted_is_said_and_ends_no_run(has_h100, capfd):
    args = flow_grpo.Args(model="nowhere/at-all")
    utilisation = Utilisation(asdict(args), flow_grpo.workload(args))
    assert utilisation.counting.poll(timeout=120)
    assert utilisation.metrics({"actor": 8.0}) == {}
    assert utilisation.metrics({"actor": 8.0}) == {}
    assert "perf/mfu is not logged: " in capfd.readouterr().err


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
        with pytest.raises(ValueError, match=f"^--track {track}: .* not installed: pip install {package}$"):
            check_tracker(track)
    check_tracker(False)


@needs_wandb
@pytest.mark.fast
@pytest.mark.parametrize(("mode", "key"), [("online", ""), ("online", "short"), ("offline", "")])
def test_wandb_without_a_login_is_one_line(tmp_path, monkeypatch, mode, key):
    """Before rewards load. The real package, with a folder of its own as home; it asks no server."""
    import wandb

    for name in ("HOME", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name, value in (("RANK", "0"), ("WANDB_MODE", mode), ("WANDB_API_KEY", key)):
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


@pytest.mark.fast
def test_wandb_files_and_runs_go_where_its_variables_say(tmp_path, monkeypatch):
    """WANDB_RUN_GROUP and WANDB_TAGS wandb reads itself, where its `init` is not given others."""
    calls = []
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
