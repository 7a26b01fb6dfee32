"""contrib/tdm_r1.py: its losses against the authors' forms and a known optimum, its draws, and runs with a resume."""

import re
from types import SimpleNamespace

from common.files.checkpoints import load_checkpoint
from common.models.stable_diffusion_3 import StableDiffusion3
from common.weights.lora import save_weights
from common.weights.policy import tensors_on_rank_0
from contrib import dmd2, tdm_r1
from tests.algorithms.test_contrib import Shifting, request_of
from tests.conftest import (
    ROOT,
    assert_same,
    brightness_reward,
    few_eval_prompts,
    policy_without_fsdp,
    read_metrics,
    run_here,
    torchrun,
    whole_checkpoint,
    without_times,
)

import pytest
import torch
from safetensors.torch import load_file, save_file

INDEX = torch.tensor([5, 2, 9, 0])


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the forward process ---------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_a_steps_end_is_noised_on():
    """To as much noise as the level has; by the authors' weights, and their target of the surrogate."""
    x_end, noise = random(2, 3, 1, 2, 2)
    end, sigma = torch.tensor([[0.0, 0.3, 0.6], [0.4, 0.9, 0.61]], dtype=torch.float64)
    x_s, velocity = tdm_r1.diffuse(x_end, end, sigma, noise)
    e, s = (level.view(-1, 1, 1, 1) for level in (end, sigma))
    alpha = (1 - s) / (1 - e)
    beta = (s**2 - (e * alpha) ** 2) ** 0.5
    torch.testing.assert_close(x_s, x_end * alpha + beta * noise)
    torch.testing.assert_close(((alpha * e) ** 2 + beta**2).sqrt(), s)
    target = -x_end / (1 - e) + noise / beta * (s + e**2 * alpha / (1 - e))
    torch.testing.assert_close(velocity, target)
    further, _ = tdm_r1.diffuse(x_end, end, sigma + 1e-7, noise)
    torch.testing.assert_close((further - x_s) / 1e-7, velocity, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x_s[:1], dmd2.noised(x_end[:1], sigma[:1], noise[:1]))
    torch.testing.assert_close(velocity[:1], (noise - x_end)[:1])


# ---- the student's loss ----------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("share", [0.7, 0.0, 1.0])
def test_the_students_gradient_is_that_of_the_authors_form(share):
    """Half that of three squared distances to x0 moved, two over mean |x0 - guided| and one over mean |x0 - surrogate|,
    with tdm_weight = 1 - share."""
    x0, *images = random(6, 4, 2, 3, 5)
    x0.requires_grad_()
    seen = tdm_r1.Seen(*images)
    loss, metrics = tdm_r1.student_loss(x0, seen, share)
    (gradient,) = torch.autograd.grad(loss, x0)
    own = x0.detach()
    weight, weight_of_reward = (
        (own - image).abs().mean(dim=[1, 2, 3], keepdim=True) for image in (seen.guided, seen.surrogate)
    )
    err_cfg = (own + seen.guided - seen.teacher - x0).square()
    err_kl = (own + seen.teacher - seen.fake - x0).square()
    err_reward = (own + seen.surrogate - seen.teacher_there - x0).square()
    theirs = (1 - share) * (err_cfg / weight).mean() + share * (err_reward / weight_of_reward).mean()
    theirs = theirs + (err_kl / weight).mean()
    (expected,) = torch.autograd.grad(theirs, x0)
    torch.testing.assert_close(gradient, expected / 2)
    assert metrics["actor/loss"] == loss and metrics["actor/teacher_distance"].item() == pytest.approx(weight.mean())


@pytest.mark.fast
def test_a_student_of_which_all_see_the_same_stays():
    """Also where that is x0 itself; and the gradient is finite."""
    x0 = torch.ones(2, 1, 2, 2, requires_grad=True)
    for image in (torch.zeros(2, 1, 2, 2), x0.detach()):
        tdm_r1.student_loss(x0, tdm_r1.Seen(*[image] * 5), 0.7)[0].backward()
        assert (x0.grad == 0).all()


@pytest.mark.fast
@pytest.mark.parametrize("mean", [-0.3, 0.3, 0.7])
def test_the_gradient_leads_to_the_distribution_that_the_reward_tilts(mean):
    """The teacher draws images of 64 numbers from N(0, 1), and the surrogate is that tilted by exp(0.3 x): N(0.3, 1).
    With share 1 the student's mean goes there, by the exact scores of all three."""

    def seen(x_s, s, mean):  # E[x0 | x_s] of N(mean, 1)
        return mean + (1 - s) / ((1 - s) ** 2 + s**2) * (x_s - (1 - s) * mean)

    z, noise = random(2, 1000, 64, seed=1)
    s = 0.02 + 0.96 * torch.rand(1000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    of_mean = torch.tensor(mean, dtype=torch.float64, requires_grad=True)
    x0 = of_mean + z
    x_s, _ = tdm_r1.diffuse(x0.detach(), torch.zeros(1000, dtype=torch.float64), s, noise)
    teacher, tilted, fake = (seen(x_s, s[:, None], of) for of in (0.0, 0.3, mean))
    tdm_r1.student_loss(x0, tdm_r1.Seen(fake, teacher, teacher, tilted, teacher), 1.0)[0].backward()
    if mean == 0.3:
        assert abs(of_mean.grad.item()) < 0.02
    else:
        assert of_mean.grad.item() * (mean - 0.3) > 0.05


# ---- the surrogate's loss --------------------------------------------------------------------------------------------
OPTIONS_OF_LOSS = {"group_size": 3, "dpo_beta": 0.7, "max_deviation": 9e9, "kl_coef": 0.0}


@pytest.mark.fast
def test_the_surrogates_gradient_is_that_of_the_authors_form():
    """Of t_weight (mean(weight A error) + beta distance), weight = sigmoid(sum_i A_i beta_dpo (error_i - ref error_i) /
    G) of the group."""
    v, v_ref, target = random(3, 6, 2, 5)
    v.requires_grad_()
    advantages = random(6, seed=3)
    options = {**OPTIONS_OF_LOSS, "kl_coef": 0.3}
    weights = torch.full((6,), 0.5, dtype=torch.float64)
    loss, metrics = tdm_r1.surrogate_loss(v, v_ref, target, advantages, weights, **options)
    (gradient,) = torch.autograd.grad(loss, v)
    dsm, ref_dsm = ((target - w).square().reshape(6, -1).mean(1) for w in (v, v_ref))
    sums = (advantages * 0.7 * (dsm - ref_dsm) / 3).view(2, 3).sum(1)
    group_weights = torch.sigmoid(sums).detach().repeat_interleave(3)
    reg = (v - v_ref).square().reshape(6, -1).mean(1).mean()
    (expected,) = torch.autograd.grad(0.5 * ((group_weights * advantages * dsm).mean() + 0.3 * reg), v)
    torch.testing.assert_close(gradient, expected)
    assert metrics["surrogate/margin"].item() == pytest.approx(-sums.mean().item())
    assert metrics["surrogate/deviation"].item() == pytest.approx(reg.item())


@pytest.mark.fast
def test_the_surrogates_loss_by_hand():
    """A 1 and -1, errors 1/4 and 1, of the teacher 1 and 1/4: logit 4 / 2 ((1 - 1/4) - (1/4 - 1)) = 3."""
    v, v_ref, target = (torch.tensor(row, dtype=torch.float64).view(2, 1) for row in ([1.5, 3], [1, 2.5], [2, 2]))
    options = {"group_size": 2, "dpo_beta": 4.0, "max_deviation": 9e9, "kl_coef": 0.1}
    loss, _ = tdm_r1.surrogate_loss(v, v_ref, target, torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]), **options)
    assert loss.item() == pytest.approx(0.5 * (torch.log1p(torch.tensor(-3.0).exp()).item() / 4 + 0.1 * 0.25))


@pytest.mark.fast
def test_an_image_that_has_moved_far_as_wanted_has_no_gradient():
    """Target 0, teacher 1, as far as 1.5^2 is allowed. Of the better images the first has a smaller error, but moved
    too far; the second's is larger. Of the worse ones it is the other way round."""
    v_ref, target = torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    v = torch.tensor([[-0.9], [3.0], [3.0], [-0.9]], dtype=torch.float64, requires_grad=True)
    advantages, weights = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(4)
    options = {"group_size": 4, "dpo_beta": 1.0, "max_deviation": 2.25, "kl_coef": 0.0}
    loss, metrics = tdm_r1.surrogate_loss(v, v_ref, target, advantages, weights, **options)
    loss.backward()
    assert (v.grad.flatten() == 0).tolist() == [True, False, True, False] and metrics["surrogate/clipfrac"] == 0.5
    loss, metrics = tdm_r1.surrogate_loss(v, v_ref, target, advantages, weights, **{**options, "max_deviation": 5.0})
    assert metrics["surrogate/clipfrac"] == 0
    # with nothing to prefer there is no gradient
    v.grad = None
    tdm_r1.surrogate_loss(v, v_ref, target, torch.zeros(4), weights, **options)[0].backward()
    assert (v.grad == 0).all()


@pytest.mark.fast
def test_a_surrogate_learns_where_the_reward_grows():
    """Images from N(0, 1), their sum as the reward: the image that it sees exceeds the teacher's, at either of two ends
    of steps, where it starts as the teacher."""
    x0, noise = random(2, 512, 16, seed=4)
    advantages = x0.sum(1) / x0.sum(1).std()
    for e in (0.0, 0.5):
        end, s = torch.full((512,), e, dtype=torch.float64), torch.full((512,), 0.7, dtype=torch.float64)
        x_end = (1 - e) * x0 + e * random(512, 16, seed=5)
        x_s, target = tdm_r1.diffuse(x_end, end, s, noise)
        v_ref = (0.7 - 0.3) / (0.3**2 + 0.7**2) * x_s  # E[noise - x0 | x_s]
        offset = torch.zeros((), dtype=torch.float64, requires_grad=True)
        options = {**OPTIONS_OF_LOSS, "group_size": 8, "dpo_beta": 10.0}
        weights = torch.ones(512, dtype=torch.float64)
        tdm_r1.surrogate_loss(v_ref + offset, v_ref, target, advantages, weights, **options)[0].backward()
        assert offset.grad > 0.01  # a smaller velocity: x_s - s v is larger


# ---- what is drawn ---------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_levels_are_above_a_steps_end_and_an_images_own():
    """As in contrib/dmd2.py where a step ends at an image; the same whichever images a rank has."""
    args = tdm_r1.Args(seed=3, noise_range=(0.25, 0.75))
    schedule = [(1 - i / 1000) ** 2 for i in range(1001)]
    many = torch.arange(500)
    drawn = [args, "7 update", many, schedule, (1, 2, 2)]
    sigmas, noise = tdm_r1.draw_training_noise(*drawn, torch.zeros(500))
    before, noise_before = dmd2.draw_training_noise(dmd2.Args(seed=3, noise_range=(0.25, 0.75)), *drawn[1:])
    torch.testing.assert_close(sigmas, before)
    assert torch.equal(noise, noise_before)
    above, _ = tdm_r1.draw_training_noise(*drawn, torch.full((500,), 0.25))  # half way up
    assert above.min() >= 0.625**2 - 1e-3 and above.max() <= 0.875**2 + 1e-3 and above.std() > 0.05
    drawn[2] = INDEX
    own, own_noise = tdm_r1.draw_training_noise(*drawn, torch.zeros(4))
    assert torch.equal(own, sigmas[INDEX]) and torch.equal(own_noise, noise[INDEX])


@pytest.mark.fast
def test_the_surrogates_draws_are_a_prompts_own_and_later_steps_are_likelier():
    """And above its level, also behind a step that ends at an image."""
    args = tdm_r1.Args(seed=3, num_inference_steps=4, group_size=2, surrogate_level=0.5)
    schedule = [1 - i / 1000 for i in range(1001)]
    request = SimpleNamespace(sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]), latent_shape=(1, 2, 2))
    batch = SimpleNamespace(image_index=torch.arange(1000), request=request)
    steps, sigmas, noise = tdm_r1.draw_for_surrogate(args, "7 surrogate 0", batch, schedule)
    for values in (steps, sigmas, noise):
        assert torch.equal(values[::2], values[1::2])
    counts = steps[::2].bincount().tolist()
    assert all(abs(count - 50 * (k + 1)) < 35 for k, count in enumerate(counts)) and len(counts) == 4
    assert (sigmas > request.sigmas[steps + 1]).all() and sigmas.min() > 0.5 and sigmas.max() < 1
    batch.image_index = torch.tensor([6, 7, 3, 2])
    own = tdm_r1.draw_for_surrogate(args, "7 surrogate 0", batch, schedule)
    assert all(torch.equal(a, b[batch.image_index]) for a, b in zip(own, (steps, sigmas, noise), strict=True))


@pytest.mark.fast
def test_a_trained_step_is_where_sampling_was():
    """The affine model v = x s + c: x' = x + v dt. The last step's image is the one that is sampled."""
    model, request = Shifting(), request_of(4, ()).select(torch.arange(6))
    states, estimates = tdm_r1.sample(model, request)
    assert states.shape == (6, 5, 1, 2, 2) and estimates.shape == (6, 4, 1, 2, 2) and not estimates.requires_grad
    for i, s in enumerate((1.0, 0.75, 0.5, 0.25)):
        v = model.predict_velocity(states[:, i], torch.tensor(1000 * s), request.conditioning).detach()
        torch.testing.assert_close(states[:, i + 1], states[:, i] - 0.25 * v)
        torch.testing.assert_close(estimates[:, i], states[:, i] - s * v)
    torch.testing.assert_close(estimates[:, 3], states[:, 4])
    args = tdm_r1.Args(seed=3, num_inference_steps=4)
    batch = tdm_r1.make_batch(args, request, torch.arange(6), states, estimates, torch.zeros(6), 7)
    steps = tdm_r1.draw_trained_steps(args, 7, torch.arange(6))
    assert len(steps.unique()) > 1
    for n, i in enumerate(steps.tolist()):
        assert torch.equal(batch.x[n], states[n, i]) and torch.equal(batch.x_end[n], states[n, i + 1])
        assert torch.equal(batch.x0[n], estimates[n, i])
        assert (batch.sigma[n], batch.end[n]) == (request.sigmas[i], request.sigmas[i + 1])


# ---- runs ------------------------------------------------------------------------------------------------------------
OPTIONS = ["--num_prompts", 2, "--group_size", 2, "--micro_batch_size", 2, "--fake_updates", 2, "--save_every", 1]
OPTIONS += ["--reward", "jpeg_compressibility", "--keep_checkpoints", 3, "--eval_num_inference_steps", 2]
FULL = ["--lora_rank", 0, "--learning_rate", 1e-4, "--fake_learning_rate", 1e-4, "--surrogate_learning_rate", 1e-4]
LOSSES = ("actor/loss", "actor/grad_norm", "actor/fake_loss", "actor/fake_grad_norm", "surrogate/loss")
POLICIES = {"default", "fake", "surrogate"}


@pytest.mark.parametrize("weights", [["--ema_decay", 0.5], FULL])
def test_a_run_resumes_to_the_bit_and_two_ranks_do_as_one(tmp_path, weights):
    """Student, fake score, surrogate, and the moments of all three."""
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), *weights, "--reward", brightness_reward(tmp_path)]
    options += ["--trust_code", "True"]
    options += ["--num_steps", 2]
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options, "--name", "whole") is None
    torchrun(tmp_path, "contrib/tdm_r1.py", *options, "--name", "ranks2", nproc=2)
    resumed = ["--name", "parts", "--resume", tmp_path / "runs/whole/checkpoints/step_000001.pt"]
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options, *resumed) is None
    rows = {name: without_times(read_metrics(tmp_path / "runs" / name)) for name in ("whole", "ranks2", "parts")}
    assert rows["parts"] == rows["whole"][2:]
    for step in (1, 2):
        for metric in (*LOSSES, "surrogate/grad_norm"):
            assert rows["ranks2"][step][metric] == pytest.approx(rows["whole"][step][metric], rel=1e-3), metric
            assert rows["whole"][step][metric] > 0
    runs = [tmp_path / "runs" / name for name in ("whole", "parts")]
    whole, parts = (whole_checkpoint(run / "checkpoints" / "step_000002.pt") for run in runs)
    assert set(whole["policies"]) == POLICIES | ({"ema"} if "--ema_decay" in weights else set())
    for part in ("policies", "optimizer", "optimizers", "tensors"):
        assert_same(parts.get(part), whole.get(part))
    if weights is FULL:
        tensors = [whole["tensors"][f"policies/{policy}/proj_out.weight"] for policy in sorted(POLICIES)]
    else:
        name = "transformer_blocks.0.attn.to_q.lora_B.weight"
        tensors = [whole["policies"][policy][name] for policy in sorted(POLICIES)]
    assert len({tuple(tensor.flatten().tolist()) for tensor in tensors}) == 3
    files = [sorted((run / "adapter").glob("*.safetensors")) for run in runs]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]] and files[0]


@pytest.mark.fast
def test_the_reward_reaches_the_student_through_the_surrogate_alone(tmp_path):
    """With --surrogate_share 0 a reward and its negative train the same student; the surrogates differ. With a share so
    do the students."""
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), "--num_steps", 1]
    states = {}
    for share in (0, 0.7):
        for reward in ("jpeg_compressibility", "jpeg_incompressibility"):
            name = f"{reward}_{share}"
            given = ["--name", name, "--reward", reward, "--surrogate_share", share]
            assert run_here(tmp_path, "contrib/tdm_r1.py", *options, *given) is None
            states[reward, share] = load_checkpoint(tmp_path / "runs" / name / "checkpoints" / "step_000001.pt")
    for share in (0, 0.7):
        one, other = (
            states[reward, share]["policies"] for reward in ("jpeg_compressibility", "jpeg_incompressibility")
        )
        is_same = {
            policy: all(torch.equal(one[policy][key], other[policy][key]) for key in one[policy]) for policy in one
        }
        assert is_same == {"default": share == 0, "fake": True, "surrogate": False}


@pytest.mark.fast
def test_a_student_that_is_a_lora_has_the_base_model_as_its_teacher(tmp_path):
    """Of which the fake score and the surrogate begin as well, so that both see what the teacher sees."""
    model, _, config = policy_without_fsdp()
    tensors, _ = tensors_on_rank_0(model)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_weights(tmp_path / "student", model.pipe, tensors, config)
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), "--lora_path", "student", "--num_steps", 1]
    options += ["--fake_learning_rate", 0, "--surrogate_learning_rate", 0, "--learning_rate", 0]
    options += ["--teacher_guidance", 1, "--surrogate_guidance", 1]
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options) is None
    run = tmp_path / "runs" / "tdm_r1"
    row = read_metrics(run)[1]
    assert row["actor/score_difference"] == row["actor/reward_difference"] == row["surrogate/deviation"] == 0
    policies = load_checkpoint(run / "checkpoints" / "step_000001.pt")["policies"]
    assert policies.keys() == POLICIES
    for policy, tensors in policies.items():
        assert all((tensor == 0).all() == (policy != "default") for key, tensor in tensors.items() if "lora_B" in key)


@pytest.mark.fast
def test_a_student_of_full_weights_has_the_model_as_its_teacher(tmp_path):
    """Student and average begin as the folder's transformer, the others as --model."""
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), *FULL, "--num_steps", 1]
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options, "--name", "trained") is None
    folder = tmp_path / "runs" / "trained" / "adapter"
    given = ["--student", folder, "--ema_decay", 0.5]
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options, *given, "--name", "more", "--learning_rate", 0) is None
    state = whole_checkpoint(tmp_path / "runs" / "more" / "checkpoints" / "step_000001.pt")
    before = whole_checkpoint(tmp_path / "runs" / "trained" / "checkpoints" / "step_000001.pt")
    [file] = folder.glob("*.safetensors")
    student = load_file(file)
    for name, tensor in student.items():
        for policy in ("default", "ema"):
            torch.testing.assert_close(state["tensors"][f"policies/{policy}/{name}"], tensor)
    key = "policies/{}/proj_out.weight"
    assert not torch.equal(state["tensors"][key.format("fake")], state["tensors"][key.format("default")])
    torch.testing.assert_close(
        state["tensors"][key.format("fake")], before["tensors"][key.format("fake")], rtol=0, atol=1e-3
    )
    only = ["--student", folder, "--eval_only", "True", "--name", "only"]
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options, *only) is None
    of_student, trained = (read_metrics(tmp_path / "runs" / name)[-1] for name in ("only", "trained"))
    assert of_student["val/weighted_total/mean"] == pytest.approx(trained["val/weighted_total/mean"], rel=1e-6)
    # a resumed run needs it no more; a new one names it
    resumed = ["--student", "nowhere", "--resume", tmp_path / "runs" / "more", "--name", "resumed", "--num_steps", 2]
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options, "--ema_decay", 0.5, *resumed) is None
    line = run_here(tmp_path, "contrib/tdm_r1.py", *options, "--student", "nowhere", "--name", "other")
    assert line == "tdm_r1.py: error: --student nowhere: no folder with a transformer's .safetensors"
    save_file({"proj_out.weight": torch.zeros(2)}, folder / "part.safetensors")  # which is read last
    for written in (None, b"no tensors"):
        if written:
            (folder / "part.safetensors").write_bytes(written)
        line = run_here(tmp_path, "contrib/tdm_r1.py", *options, "--student", folder, "--name", f"broken_{written}")
        assert "--student" in line and "\n" not in line


def test_the_mean_goes_where_the_reward_says(tmp_path):
    """On the exam's Gaussian, in two steps: by the reward's negative the mean is 0.3 below 0 after 30 steps."""
    model = ROOT / "benchmarks" / "exam_model.py"
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    prompts = ["--train_prompts", tmp_path / "prompts.txt", "--eval_prompts", tmp_path / "prompts.txt"]
    options = ["--family", f"{model}:Gaussian", "--reward", f"{model}:height", "--reward_weights", -1]
    options += ["--lora_rank", 0, "--image_size", 16, 16, "--num_prompts", 2, "--group_size", 32, *prompts]
    options += ["--teacher_guidance", 1, "--surrogate_guidance", 1, "--fake_learning_rate", 0.05, "--fake_updates", 5]
    options += ["--surrogate_learning_rate", 0.02, "--learning_rate", 0.02, "--num_steps", 30, "--eval_every", 30]
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options, "--eval_images_per_prompt", 64) is None
    before, after = (read_metrics(tmp_path / "runs" / "tdm_r1")[step]["val/height/mean"] for step in (0, 30))
    assert abs(before) < 0.15 and before - after > 0.15


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"noise_range": (0.5, 0.5)}, "--noise_range 0.5 0.5: "),
        ({"num_prompts": 3, "group_size": 2, "micro_batch_size": 4}, "--micro_batch_size 4: "),
        (
            {"group_size": 8, "micro_batch_size": 4},
            "--micro_batch_size 4: a rank's passes have 4 images, and must hold",
        ),
        ({"student": "x"}, "--student x: full weights, for --lora_rank 0"),
        (
            {
                "reward": ("ocr", "jpeg_compressibility"),
                "multi_objective_aggregation": "normalize_then_sum",
                "scale_rewards": "none",
            },
            "--multi_objective_aggregation normalize_then_sum: ",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(monkeypatch, options, fault):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=re.escape(fault)):
        tdm_r1.check(tdm_r1.Args(**options))


@pytest.mark.fast
@pytest.mark.parametrize("option", ["teacher_guidance", "surrogate_guidance"])
def test_a_guidance_that_the_model_cannot_take_is_refused(tmp_path, monkeypatch, option):
    """By the option's name, before the model loads; an evaluation alone needs none."""

    def check(model, height, width, num_frames, guidance_scale=1.0):
        if guidance_scale > 1:
            raise ValueError("takes no guidance")

    monkeypatch.setattr(StableDiffusion3, "check", staticmethod(check))
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), "--teacher_guidance", 1, "--surrogate_guidance", 1]
    line = run_here(tmp_path, "contrib/tdm_r1.py", *options, f"--{option}", 4)
    assert line == f"tdm_r1.py: error: --{option} 4: takes no guidance"
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options, f"--{option}", 4, "--eval_only", "True") is None


@pytest.mark.fast
def test_an_update_of_the_surrogate_without_a_finite_gradient_is_left_out(tmp_path, monkeypatch):
    """It is counted, and the others of the step count; without any the run ends, as with the student's own."""
    accumulate, broken = tdm_r1.accumulate_surrogate_gradients, [True, False]

    def accumulated(args, model, batch, steps, sigmas, noise):
        return accumulate(args, model, batch, steps, sigmas, noise * (float("nan") if broken.pop(0) else 1))

    monkeypatch.setattr(tdm_r1, "accumulate_surrogate_gradients", accumulated)
    options = [*OPTIONS, *few_eval_prompts(tmp_path, 2), "--surrogate_updates", 2]
    assert run_here(tmp_path, "contrib/tdm_r1.py", *options, "--num_steps", 1) is None
    row = read_metrics(tmp_path / "runs" / "tdm_r1")[1]
    assert row["surrogate/skipped_steps"] == 1 and row["surrogate/grad_norm"] > 0
    broken += [True] * 8
    line = run_here(tmp_path, "contrib/tdm_r1.py", *options, "--num_steps", 4, "--name", "other")
    assert "finite" in line and len(broken) == 2
