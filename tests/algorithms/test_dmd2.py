"""contrib/dmd2.py: its gradient against the authors' form and a known optimum, its draws, and runs with a resume."""

import json
import re
from types import SimpleNamespace

from common.files.checkpoints import load_checkpoint
from common.models.stable_diffusion_3 import StableDiffusion3
from contrib import dmd2
from tests.algorithms.test_contrib import Shifting, request_of
from tests.conftest import (
    assert_same,
    few_eval_prompts,
    read_metrics,
    run_here,
    torchrun,
    whole_checkpoint,
    without_times,
)

import pytest
import torch
from safetensors.torch import load_file

INDEX = torch.tensor([5, 2, 9, 0])


# ---- the loss --------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_the_gradient_is_that_of_the_authors_form():
    """Of half the squared distance to x0 - grad, grad = (p_real - p_fake) / mean |p_real|, as in sd_guidance.py."""
    generator = torch.Generator().manual_seed(0)
    x0, real, fake = torch.randn(3, 4, 2, 3, 5, generator=generator, dtype=torch.float64)
    x0.requires_grad_()
    loss, metrics = dmd2.distribution_matching_loss(x0, real, fake)
    (gradient,) = torch.autograd.grad(loss, x0)
    p_real, p_fake = x0.detach() - real, x0.detach() - fake
    grad = (p_real - p_fake) / p_real.abs().mean(dim=[1, 2, 3], keepdim=True)
    theirs = 0.5 * torch.nn.functional.mse_loss(x0, (x0 - grad).detach(), reduction="mean")
    (expected,) = torch.autograd.grad(theirs, x0)
    torch.testing.assert_close(gradient, expected)
    assert loss.item() == pytest.approx(theirs.item()) and metrics["actor/loss"] == loss
    assert metrics["actor/teacher_distance"].item() == pytest.approx(p_real.abs().mean().item())


@pytest.mark.fast
def test_a_student_that_draws_as_the_teacher_does_stays():
    """Both scores see the same image, also where that is x0 itself; and the gradient is finite."""
    x0 = torch.ones(2, 1, 2, 2, requires_grad=True)
    for seen in (torch.zeros(2, 1, 2, 2), x0.detach()):
        dmd2.distribution_matching_loss(x0, seen, seen)[0].backward()
        assert (x0.grad == 0).all()


@pytest.mark.fast
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (0.5, 1.0), (-0.5, 1.0), (0.0, 1.5), (0.0, 0.6)])
def test_the_gradient_leads_to_the_teachers_distribution(mean, deviation):
    """The teacher draws images of 64 numbers from N(0, 1); the student's mean and deviation go there, by the exact
    scores of both."""

    def seen(x_s, s, mean, deviation):  # E[x0 | x_s] of N(mean, deviation^2)
        variance = ((1 - s) * deviation) ** 2 + s**2
        return mean + (1 - s) * deviation**2 / variance * (x_s - (1 - s) * mean)

    generator = torch.Generator().manual_seed(1)
    z, noise = torch.randn(2, 1000, 64, generator=generator, dtype=torch.float64)
    s = 0.02 + 0.96 * torch.rand(1000, generator=generator, dtype=torch.float64)
    of_mean = torch.tensor(mean, dtype=torch.float64, requires_grad=True)
    of_deviation = torch.tensor(deviation, dtype=torch.float64, requires_grad=True)
    x0 = of_mean + of_deviation * z
    x_s = dmd2.noised(x0.detach(), s, noise)
    real, fake = (seen(x_s, s[:, None], *params) for params in ((0.0, 1.0), (mean, deviation)))
    dmd2.distribution_matching_loss(x0, real, fake)[0].backward()
    for gradient, distance in ((of_mean.grad.item(), mean), (of_deviation.grad.item(), deviation - 1)):
        if distance:
            assert gradient * distance > 0.01
        else:
            assert abs(gradient) < 0.02


# ---- what is drawn ---------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_levels_and_steps_are_an_images_own():
    """Within the range of the schedule, the same whichever images a rank has, and others in another update."""
    args = dmd2.Args(seed=3, num_inference_steps=4, noise_range=(0.25, 0.75))
    schedule = [(1 - i / 1000) ** 2 for i in range(1001)]
    many = torch.arange(500)
    sigmas, noise = dmd2.draw_training_noise(args, "7 update", many, schedule, (1, 2, 2))
    assert sigmas.min() >= 0.25**2 - 1e-3 and sigmas.max() <= 0.75**2 + 1e-3 and sigmas.std() > 0.1
    own, own_noise = dmd2.draw_training_noise(args, "7 update", INDEX, schedule, (1, 2, 2))
    assert torch.equal(own, sigmas[INDEX]) and torch.equal(own_noise, noise[INDEX])
    other, _ = dmd2.draw_training_noise(args, "7 fake 0", INDEX, schedule, (1, 2, 2))
    assert not torch.equal(other, own)
    steps = dmd2.draw_trained_steps(args, 7, many)
    assert torch.equal(dmd2.draw_trained_steps(args, 7, INDEX), steps[INDEX])
    assert all(80 < count < 170 for count in steps.bincount().tolist())


@pytest.mark.fast
def test_a_trained_step_begins_where_sampling_was_and_sees_its_image():
    """The affine model v = x s + c: x' = x + v dt. The last step's image is the one that is sampled."""
    model = Shifting()
    request = request_of(4, ()).select(torch.arange(6))
    inputs, estimates = dmd2.sample(model, request)
    assert inputs.shape == estimates.shape == (6, 4, 1, 2, 2) and not estimates.requires_grad
    x = inputs[:, 0]
    for i, s in enumerate((1.0, 0.75, 0.5, 0.25)):
        v = model.predict_velocity(x, torch.tensor(1000 * s), request.conditioning).detach()
        torch.testing.assert_close(inputs[:, i], x)
        torch.testing.assert_close(estimates[:, i], x - s * v)
        x = x - 0.25 * v
    torch.testing.assert_close(estimates[:, 3], x)


# ---- runs ------------------------------------------------------------------------------------------------------------
OPTIONS = ["--num_prompts", 4, "--micro_batch_size", 2, "--fake_updates", 2, "--eval_num_inference_steps", 2]
OPTIONS += ["--reward", "jpeg_compressibility", "--save_every", 1, "--keep_checkpoints", 3]
FULL = ["--lora_rank", 0, "--learning_rate", 1e-4, "--fake_learning_rate", 1e-4]


@pytest.mark.parametrize("weights", [["--ema_decay", 0.5], FULL])
def test_a_run_resumes_to_the_bit_and_two_ranks_do_as_one(tmp_path, weights):
    """Student, fake score, and the moments of both."""
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), *weights]
    options += ["--num_steps", 2]
    assert run_here(tmp_path, "contrib/dmd2.py", *options, "--name", "whole") is None
    torchrun(tmp_path, "contrib/dmd2.py", *options, "--name", "ranks2", nproc=2)
    resumed = ["--name", "parts", "--resume", tmp_path / "runs/whole/checkpoints/step_000001.pt"]
    assert run_here(tmp_path, "contrib/dmd2.py", *options, *resumed) is None
    rows = {name: without_times(read_metrics(tmp_path / "runs" / name)) for name in ("whole", "ranks2", "parts")}
    assert rows["parts"] == rows["whole"][2:]
    for step in (1, 2):
        for metric in ("actor/loss", "actor/grad_norm", "actor/fake_loss", "actor/fake_grad_norm"):
            assert rows["ranks2"][step][metric] == pytest.approx(rows["whole"][step][metric], rel=1e-4), metric
            assert rows["whole"][step][metric] > 0
    runs = [tmp_path / "runs" / name for name in ("whole", "parts")]
    whole, parts = (whole_checkpoint(run / "checkpoints" / "step_000002.pt") for run in runs)
    assert set(whole["policies"]) == {"default", "fake"} | ({"ema"} if "--ema_decay" in weights else set())
    for part in ("policies", "optimizer", "optimizers", "tensors"):
        assert_same(parts.get(part), whole.get(part))
    if weights is FULL:
        differs = [f"policies/{key}" for key in ("default/proj_out.weight", "fake/proj_out.weight")]
        student, fake = (whole["tensors"][name] for name in differs)
    else:
        name = "transformer_blocks.0.attn.to_q.lora_B.weight"
        student, fake = (whole["policies"][policy][name] for policy in ("default", "fake"))
    assert not torch.equal(student, fake)
    files = [sorted((run / "adapter").glob("*.safetensors")) for run in runs]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]] and files[0]


@pytest.mark.fast
def test_a_fake_score_that_stands_still_is_the_teacher(tmp_path):
    """Without guidance and without updates of it, both see the same images: no step of the student is taken."""
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), "--teacher_guidance", 1, "--fake_learning_rate", 0]
    assert run_here(tmp_path, "contrib/dmd2.py", *options, "--num_steps", 1) is None
    run = tmp_path / "runs" / "dmd2"
    row = read_metrics(run)[1]
    assert row["actor/grad_norm"] == row["actor/score_difference"] == 0 and row["actor/fake_loss"] > 0
    tensors = load_file(run / "adapter" / "pytorch_lora_weights.safetensors")
    assert all((tensor == 0).all() for name, tensor in tensors.items() if "lora_B" in name)
    state = load_checkpoint(run / "checkpoints" / "step_000001.pt")
    assert state["num_updates"] == 0 and state["optimizers"]["fake"]["param_groups"][0]["lr"] == 0
    assert json.loads((run / "heartbeat.json").read_text())["phase"] == "finished"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"noise_range": (0.5, 0.5)}, "--noise_range 0.5 0.5: "),
        ({"num_prompts": 6, "micro_batch_size": 4}, "--micro_batch_size 4: "),
    ],
)
def test_options_that_do_not_fit_are_refused(monkeypatch, options, fault):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=re.escape(fault)):
        dmd2.check(dmd2.Args(**options))


@pytest.mark.fast
def test_a_negative_prompt_is_the_teachers(tmp_path):
    """Which the student's own guidance of 1 does not refuse; without the teacher's there is nothing to move away."""
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), "--negative_prompt", "blurry", "--num_steps", 0]
    assert run_here(tmp_path, "contrib/dmd2.py", *options) is None
    line = run_here(tmp_path, "contrib/dmd2.py", *options, "--teacher_guidance", 1, "--name", "other")
    assert "--negative_prompt: needs guidance" in line


@pytest.mark.fast
def test_a_guidance_that_the_teacher_cannot_take_is_refused(tmp_path, monkeypatch):
    """By the option's name, before the model loads; an evaluation alone has no teacher."""

    def check(model, height, width, num_frames, guidance_scale=1.0):
        if guidance_scale > 1:
            raise ValueError("takes no guidance")

    monkeypatch.setattr(StableDiffusion3, "check", staticmethod(check))
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2)]
    line = run_here(tmp_path, "contrib/dmd2.py", *options)
    assert line == "dmd2.py: error: --teacher_guidance 4: takes no guidance"
    assert run_here(tmp_path, "contrib/dmd2.py", *options, "--eval_only", "True") is None


@pytest.mark.fast
def test_no_reward_sees_the_training_prompts(tmp_path):
    """They may be none that `ocr` reads, and may ask for rewards of another script's run."""
    records = [{"prompt": "no quotes at all"}, {"prompt": "a dog", "rewards": ["geneval"]}]
    (tmp_path / "captions.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), "--num_steps", 0, "--train_prompts", "captions.jsonl"]
    assert run_here(tmp_path, "contrib/dmd2.py", *options, "--reward", "ocr") is None


@pytest.mark.fast
def test_an_update_of_the_fake_score_without_a_finite_gradient_is_left_out(tmp_path, monkeypatch):
    """It is counted, and the others of the step count; without any the run ends, as with the student's own."""
    accumulate, broken = dmd2.accumulate_fake_gradients, [True, False]

    def accumulated(args, model, batch, sigmas, noise):
        return accumulate(args, model, batch, sigmas, noise * (float("nan") if broken.pop(0) else 1))

    monkeypatch.setattr(dmd2, "accumulate_fake_gradients", accumulated)
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2)]
    assert run_here(tmp_path, "contrib/dmd2.py", *options, "--num_steps", 1) is None
    row = read_metrics(tmp_path / "runs" / "dmd2")[1]
    assert row["actor/skipped_fake_steps"] == 1 and row["actor/fake_grad_norm"] > 0 and row["actor/fake_loss"] > 0
    broken += [True] * 8
    line = run_here(tmp_path, "contrib/dmd2.py", *options, "--num_steps", 4, "--name", "other")
    assert "finite" in line and len(broken) == 2


@pytest.mark.fast
def test_the_teachers_guidance_asks_for_a_negative_prompt():
    """Also where the student has none; without either there is no second pass."""
    asked = []
    model = SimpleNamespace(
        schedule=lambda *size: (torch.ones(2), torch.ones(3), (1, 2, 2)),
        encode=lambda *given: {},
        encode_negative=lambda negatives, scale, length: asked.append(scale),
        device=torch.device("cpu"),
    )
    prompts = SimpleNamespace(negatives=lambda text: [text])
    for guidance, teacher in ((1.0, 4.0), (2.0, 1.0), (1.0, 1.0)):
        args = dmd2.Args(guidance_scale=guidance, teacher_guidance=teacher)
        dmd2.make_request(args, model, prompts, torch.tensor([0]), [1])
    assert asked == [4.0, 2.0, 1.0]
