"""contrib/sft.py: its levels of noise and its weights against diffusers', and runs with a resume."""

import json
import math
import re
from types import SimpleNamespace

from common.sde import image_seed
from contrib import sft
from tests.conftest import embedded_model, few_eval_prompts, read_metrics, run_here, without_times

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from PIL import Image

pytestmark = pytest.mark.fast

PLACES = torch.tensor([5, 2, 9, 0])


def generators(seed, step):
    return [torch.Generator().manual_seed(image_seed(seed, step, place)) for place in PLACES.tolist()]


# ---- against diffusers -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"timestep_sampling": "uniform"},
        {"timestep_sampling": "logit_normal"},
        {"timestep_sampling": "logit_normal", "logit_mean": 0.5, "logit_std": 1.5},
        {"timestep_sampling": "mode"},
        {"timestep_sampling": "mode", "mode_scale": -0.5},
    ],
)
def test_levels_are_those_of_diffusers(options):
    """Of the same generators: a number for each record."""
    args = sft.Args(seed=3, train_shift=1.0, **options)
    sigmas, _, _ = sft.draw_training_noise(args, 7, PLACES, [], (1, 2, 2))
    for sigma, generator in zip(sigmas.tolist(), generators(3, 7), strict=True):
        [density] = compute_density_for_timestep_sampling(
            args.timestep_sampling, 1, args.logit_mean, args.logit_std, args.mode_scale, generator=generator
        )
        assert sigma == pytest.approx(density.item(), abs=1e-6)


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_weights_are_those_of_diffusers(weighting):
    sigmas = torch.tensor([0.1, 0.5, 0.9])
    errors = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    loss, metrics = sft.flow_matching_loss(errors, sigmas, weighting)
    weights = compute_loss_weighting_for_sd3(weighting, sigmas)
    assert loss.item() == pytest.approx((weights * errors).mean().item(), rel=1e-6)
    loss.backward()
    assert errors.grad.tolist() == pytest.approx((weights / 3).tolist(), rel=1e-6)
    assert metrics["actor/error"].item() == pytest.approx(7 / 3)
    assert metrics["actor/sigma"].item() == pytest.approx(0.5)


# ---- the levels ------------------------------------------------------------------------------------------------------
def test_a_shift_by_hand():
    """3 s / (1 + 2 s): of the uniform numbers themselves."""
    args = sft.Args(seed=3, timestep_sampling="uniform", train_shift=3.0)
    sigmas, _, _ = sft.draw_training_noise(args, 7, PLACES, [], (1, 2, 2))
    uniform = torch.stack([torch.rand((), generator=generator) for generator in generators(3, 7)])
    torch.testing.assert_close(sigmas, 3 * uniform / (1 + 2 * uniform))


def test_without_a_shift_of_its_own_the_levels_are_those_that_the_model_samples_by():
    """The embedded model's scheduler has shift 3, which its sigmas take twice at their end; and the schedule's own
    levels come out of evenly spaced draws."""
    model = embedded_model()
    _, schedule, _ = model.schedule(model.level_steps, 32, 96)
    levels = schedule.tolist()
    args = sft.Args(timestep_sampling="uniform")
    drawn = []
    for number in (0.0, 0.25, 0.5, 0.999):
        generator = SimpleNamespace()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda size, generator, number=number: torch.tensor(number))
            drawn.append(sft.draw_sigma(args, levels, generator))
    assert drawn == pytest.approx([0.0, levels[750], levels[500], levels[1]], abs=1e-5)
    assert drawn[2] == pytest.approx(3 * 0.5 / (1 + 2 * 0.5), abs=2e-3)


def test_a_records_level_noise_and_drop_are_its_own():
    args = sft.Args(seed=3, caption_dropout=0.5, train_shift=1.0)
    sigmas, noise, is_dropped = sft.draw_training_noise(args, 7, PLACES, [], (1, 2, 2))
    for row, generator in enumerate(generators(3, 7)):
        assert sigmas[row].item() == pytest.approx(torch.randn((), generator=generator).sigmoid().item(), abs=1e-7)
        assert is_dropped[row] == (torch.rand((), generator=generator) < 0.5)
        assert torch.equal(noise[row], torch.randn(1, 2, 2, generator=generator))


@pytest.mark.parametrize("dropout", [0.0, 0.1, 1.0])
def test_prompts_are_dropped_so_often(dropout):
    args = sft.Args(caption_dropout=dropout, train_shift=1.0)
    _, _, is_dropped = sft.draw_training_noise(args, 1, torch.arange(2000), [], (1,))
    share = is_dropped.double().mean().item()
    assert share == dropout if dropout in (0.0, 1.0) else abs(share - dropout) < 4 * math.sqrt(0.1 * 0.9 / 2000)


def test_a_dropped_prompt_is_the_empty_one():
    conditioning = {"embeds": torch.ones(3, 4, 2), "mask": torch.ones(3, 4, dtype=torch.long)}
    no_prompt = {"embeds": torch.zeros(1, 4, 2), "mask": torch.tensor([[1, 0, 0, 0]])}
    dropped = sft.drop_prompts(conditioning, no_prompt, torch.tensor([False, True, False]))
    assert dropped["embeds"].sum((1, 2)).tolist() == [8, 0, 8]
    assert dropped["mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]


# ---- runs ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def records(tmp_path):
    """16 images of even colours and their prompts. Returns the first options of a short run."""
    lines = []
    for number in range(16):
        Image.new("RGB", (96, 32), (16 * number, 0, 255 - 16 * number)).save(tmp_path / f"{number}.png")
        lines.append(json.dumps({"prompt": f"colour {number}", "image": f"{number}.png"}) + "\n")
    (tmp_path / "records.jsonl").write_text("".join(lines))
    options = ["--records", "records.jsonl", "--num_records", 8, "--micro_batch_size", 4, "--lr_schedule", "constant"]
    return [*options, "--caption_dropout", 0.25, "--eval_every", 2, *few_eval_prompts(tmp_path, 2)]


@pytest.mark.parametrize("weights", [["--ema_decay", 0.5], ["--lora_rank", 0, "--learning_rate", 1e-4]])
def test_a_run_without_a_reward_learns_and_resumes_to_the_bit(tmp_path, records, weights):
    options = [*records, *weights]
    assert run_here(tmp_path, "contrib/sft.py", *options, "--name", "whole", "--num_steps", 4) is None
    assert run_here(tmp_path, "contrib/sft.py", *options, "--name", "parts", "--num_steps", 2) is None
    more = ["--name", "parts", "--num_steps", 4, "--resume", "latest"]
    assert run_here(tmp_path, "contrib/sft.py", *options, *more) is None
    runs = [tmp_path / "runs" / name for name in ("whole", "parts")]
    whole, parts = (without_times(read_metrics(run)) for run in runs)
    assert [row["training/global_step"] for row in whole] == [0, 1, 2, 3, 4] and parts == whole
    files = [sorted((run / "adapter").glob("*.safetensors")) for run in runs]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]] and files[0]
    assert all(row["actor/grad_norm"] > 0 and row["actor/loss"] == row["actor/error"] for row in whole[1:])
    assert whole[4]["val/drift_from_base"] > 0 == whole[0]["val/drift_from_base"]
    assert not [name for name in whole[4] if name.startswith(("val/ocr", "val/weighted", "critic/"))]
    assert (runs[0] / "grid_0004.png").is_file() and (runs[0] / "samples" / "0004" / "samples.jsonl").is_file()
    assert not (runs[0] / "best_adapter").exists()
    assert len(list((tmp_path / "cache").rglob("*.pt"))) == 1  # of all 16 records, which both runs draw


def test_a_reward_chooses_the_best_adapter(tmp_path, records):
    options = [*records, "--num_steps", 1, "--reward", "jpeg_compressibility"]
    options += ["--eval_reward", "jpeg_incompressibility"]
    assert run_here(tmp_path, "contrib/sft.py", *options) is None
    run = tmp_path / "runs" / "sft"
    rows = read_metrics(run)
    assert "val/jpeg_compressibility/mean" in rows[1] and "val/jpeg_incompressibility/mean" in rows[1]
    assert rows[1]["val/weighted_total/mean"] == rows[1]["val/jpeg_compressibility/mean"]
    assert (run / "best_adapter" / "best.json").is_file()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ([], "--records: "),
        (["--records", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--records", "records.jsonl", "--train_prompts", "records.jsonl"], "--train_prompts: .*--records"),
        (["--records", "records.jsonl", "--train_shares", 1], "--train_shares: .*--records"),
        (["--records", "no_image.jsonl"], 'no_image.jsonl:1: .*"image"'),
        (["--records", "records.jsonl", "--mode_scale", 2], "--mode_scale 2"),
        (["--records", "records.jsonl", "--num_records", 8, "--micro_batch_size", 3], "--micro_batch_size 3"),
    ],
)
def test_a_fault_ends_a_run_before_the_model_loads(tmp_path, records, monkeypatch, options, fault):
    (tmp_path / "no_image.jsonl").write_text('{"prompt": "p"}\n')
    monkeypatch.setattr(sft, "load_policies", lambda *given: pytest.fail("the model was loaded"))
    line = run_here(tmp_path, "contrib/sft.py", *options)
    assert re.match(f"sft.py: error: {fault}", line) and "\n" not in line.strip()
