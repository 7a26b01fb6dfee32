"""benchmarks/throughput.py: the FLOPs of published sizes, and the passes of a step, against closed forms."""

import json

from benchmarks.throughput import Meter, TensorLike, count_flops, covered, fake_copy, measured_rows
from common.models.stable_diffusion_3 import StableDiffusion3
from common.run.run import Run
from common.weights.lora import make_lora
from tests.conftest import brightness_reward, new_run, torchrun
from tests.published_models import GEOMETRY, PUBLISHED

import diffusers
import pytest
import torch

SD35_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"


def test_flops_of_sd35_medium_at_512():
    """2.48 TFLOP a forward and image; 5.31 forward and backward with a LoRA of rank 32."""
    _, kind, config, _ = PUBLISHED[SD35_MEDIUM]
    with torch.device("meta"):
        transformer = getattr(diffusers, kind)(**config)
    latents, _, conditioning = GEOMETRY[SD35_MEDIUM]
    call = {
        "hidden_states": (2, *latents),
        "timestep": (2,),
        "encoder_hidden_states": (2, *conditioning["prompt_embeds"]),
        "pooled_projections": (2, *conditioning["pooled_prompt_embeds"]),
    }
    call = {name: TensorLike(shape, torch.bfloat16) for name, shape in call.items()}
    lora_config = make_lora(StableDiffusion3, rank=32, alpha=64).config
    copied, mode = fake_copy(transformer, torch.bfloat16, lora_config)
    of_one_image = [count_flops(copied, mode, ((), call), backward) / 2 / 1e12 for backward in (False, True)]
    assert [round(tflop, 2) for tflop in of_one_image] == [2.48, 5.31]


@pytest.mark.fast
def test_seconds_covered_by_intervals_that_overlap():
    assert covered([(7, 8), (1, 3), (2, 5), (2.5, 3), (3.5, 5.5)]) == 4.5 + 1
    assert covered([]) == 0


@pytest.mark.fast
@pytest.mark.parametrize("rows, last", [([0, 1], 1), ([], 0)])
def test_a_run_that_stopped_before_a_step_that_counts(rows, last, tmp_path):
    """One line, as the first step warms up."""
    lines = [json.dumps({"training/global_step": step}) + "\n" for step in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(SystemExit, match=f"throughput.py: error: the run stopped after step {last}: no step"):
        measured_rows(Meter(num_steps=4), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"training/global_step": 2}\n')
    assert measured_rows(Meter(num_steps=4), tmp_path) == [{"training/global_step": 2}]


@pytest.mark.fast
def test_phases_of_a_run_are_noted_with_their_options(tmp_path, monkeypatch):
    """`updating`, and a phase that is logged per image."""
    for name in ("timed", "begin_step", "log", "close"):
        monkeypatch.setattr(Run, name, getattr(Run, name))  # put back after the test
    meter = Meter(num_steps=2)
    meter._install_in_run(torch.float32)
    run = new_run(tmp_path)
    meter.step = 1
    with run.timed("gen", per_image=True):
        assert meter.phase == "gen"
    with run.updating():
        assert meter.phase == "update_actor"
    assert set(meter.cpu_s) == {(1, "gen"), (1, "update_actor")}


@pytest.mark.parametrize("with_engine", [False, True])
def test_the_passes_of_a_step(with_engine, tmp_path):
    """Eight images, four steps, two of them trained, guidance, a KL: each branch counts, and the reference's too."""
    options = ["--rollout", "vllm" if with_engine else "local", "--num_prompts", 2, "--group_size", 4]
    options += ["--updates_per_rollout", 1, "--micro_batch_size", 4, "--num_inference_steps", 4, "--guidance_scale", 3]
    options += ["--sde_window_size", 2, "--sde_window_range", 0, 2, "--kl_coef", 0.1, "--num_steps", 3]
    options += ["--reward", brightness_reward(tmp_path)]
    torchrun(tmp_path, "benchmarks/throughput.py", "flow_grpo.py", "--out", tmp_path / "figures.json", *options)
    figures = json.loads((tmp_path / "figures.json").read_text())
    expected = {"gen": {"forward": 8 * 4 * 2}}
    if with_engine:
        expected["old_log_prob"] = {"forward": 8 * 2 * 2}
    expected["update_actor"] = {"forward": 8 * 2 * 2, "forward and backward": 8 * 2 * 2}
    assert figures["image_passes"] == expected
    phases = figures["phases"]
    forward = phases["gen"]["tflop"] / (8 * 4 * 2)
    assert phases["update_actor"]["tflop"] > 2.5 * forward * 8 * 2 * 2
    if with_engine:
        assert phases["old_log_prob"]["tflop"] == pytest.approx(8 * 2 * 2 * forward)
    assert ("decode" in phases) is not with_engine
    total = sum(phase["tflop"] for name, phase in phases.items() if name not in ("step", "decode"))
    assert phases["step"]["tflop"] == pytest.approx(total)
    assert sum(figures["shares"].values()) == pytest.approx(1)
    assert (figures["shares"]["engine"] > 0) is with_engine
    assert figures["matrix_tflop_per_s"][0] > 0 and figures["images"] == 8
    assert figures["peak_gb"] >= phases["update_actor"]["peak_gb"]
