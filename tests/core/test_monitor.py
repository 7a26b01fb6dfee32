"""common/monitor: the share of a GPU's peak, trackers. Traces are in test_run.py, missing ranks in test_nodes.py."""

import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import diffusion_nft
import flow_grpo
from common import profiling
from common.models.loading import find_family
from common.plan.devices import DEVICES, find_device
from common.plan.memory import Blueprint
from common.profiling import count_flops, utilisation
from common.tracking import check_tracker, start_tracker
from tests.conftest import lora_of

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


@pytest.mark.fast
def test_utilisation_by_hand(monkeypatch):
    """2 s at the peak in 8 s; a phase that a step does not have is not logged. It is counted once."""
    counts = [{"update_actor": 2.0, "old_log_prob": 1.0}]
    monkeypatch.setattr(profiling, "count_flops", lambda config: counts.pop())
    config = {"name": "by hand", "model": "any"}
    assert utilisation({}, {"update_actor": 8.0}) == {}
    assert utilisation(config, {"update_actor": 8.0, "gen": 3.0}) == {"perf/mfu/actor": 0.25}
    assert utilisation(config, {"update_actor": 4.0, "old_log_prob": 4.0}) == {
        "perf/mfu/actor": 0.5,
        "perf/mfu/actor_infer": 0.25,
    }


@pytest.mark.parametrize("module", [flow_grpo, diffusion_nft])
def test_flops_are_those_of_a_ranks_passes(monkeypatch, module):
    """A rank's step of the default run: images x passes x the FLOPs of a pass."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = module.Args()
    seconds = count_flops(asdict(args))
    family = find_family(args.model, *args.image_size, 1, 1.0)
    lora = lora_of(args, family)
    blueprint = Blueprint(family, args.model, lora, torch.float32)
    cost = blueprint.velocity(args.image_size, 1, args.max_sequence_length, 1.0, train=True)
    share = args.num_prompts * args.group_size // 2
    if module is flow_grpo:
        passes = share * args.epochs_per_rollout * (args.sde_window_size or args.num_inference_steps - 1)
        assert seconds["update_actor"] == pytest.approx(passes * cost.flops / 67e12)
        assert set(seconds) == {"update_actor", "old_log_prob"}
        assert seconds["old_log_prob"] < seconds["update_actor"] / 2  # a backward pass is more than a forward pass
    else:
        assert set(seconds) == {"update_actor"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU of next year")
    assert count_flops(asdict(args)) == {}


# ---- trackers --------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for track, package in ((True, "wandb"), ("wandb", "wandb"), ("tensorboard", "tensorboard")):
        with pytest.raises(ValueError, match=f"^--track {track}: .* not installed: pip install {package}$"):
            check_tracker(track)
    check_tracker(False)


class Writer:
    """In the place of torch's SummaryWriter, which needs the package tensorboard."""

    def __init__(self, folder, purge_step):
        self.calls = [("folder", folder, purge_step)]
        Writer.last = self

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


@pytest.mark.fast
def test_tensorboard_gets_scalars_and_first_frames(tmp_path, monkeypatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    tracker = start_tracker("tensorboard", tmp_path, {})
    red, blue = Image.new("RGB", (3, 2), "red"), Image.new("RGB", (3, 2), "blue")
    tracker.log(7, {"actor/loss": 0.5}, [(red, "a mug"), ([blue, red], "a film")])
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
def test_wandb_files_go_where_its_variable_says(tmp_path, monkeypatch):
    calls = []
    wandb = SimpleNamespace(init=lambda **options: calls.append(options))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    start_tracker(True, tmp_path, {"seed": 1})
    monkeypatch.setenv("WANDB_DIR", "/elsewhere")
    start_tracker("wandb", tmp_path, {"seed": 1})
    first, second = calls
    assert first["dir"] == str(tmp_path) and second["dir"] == "/elsewhere"
    assert first["id"] == second["id"] == (tmp_path / "wandb_id.txt").read_text()
