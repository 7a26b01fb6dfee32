"""benchmarks/exam.py: its model's velocity and densities by second computations, and a script that sits it."""

import math
import subprocess
import sys

from benchmarks import exam_model, exam_optima
from common.sde import sde_step
from tests.conftest import ROOT

import numpy as np
import pytest
import torch


@pytest.mark.fast
@pytest.mark.parametrize("task", exam_optima.TASKS)
def test_the_velocity_is_that_of_the_path(task):
    """E[noise - x0 | z], where noise = (z - (1 - s) x0) / s: sums over a grid of x0."""
    weights, means, std = exam_optima.TASKS[task].mixture
    field = exam_model.Field(weights, means, std)
    x0 = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    prior = sum(w * (-(((x0 - m) / std) ** 2) / 2).exp() for w, m in zip(weights, means, strict=True))
    z = torch.tensor([-2.0, -0.3, 0.7, 1.9], dtype=torch.float64)
    for s in (0.95, 0.5, 0.2):
        noise = (z[:, None] - (1 - s) * x0) / s  # (4, x0)
        posterior = prior * (-(noise**2) / 2).exp()
        expected = (posterior * (noise - x0)).sum(1) / posterior.sum(1)
        velocity = field.along(z, torch.full_like(z, s), field.table.double())
        assert velocity.tolist() == pytest.approx(expected.tolist(), abs=1e-4), s
    off_direction = torch.zeros(1, exam_model.DIMENSION)
    off_direction[0, :2] = torch.tensor([1.0, -1.0])  # z = 0: standard normal, (2 s - 1) / ((1 - s)^2 + s^2) x
    v = field(off_direction, torch.tensor([0.8]))
    assert (v[0, 0] - v[0, 1]).item() == pytest.approx(2 * 0.6 / 0.68)


@pytest.mark.fast
@pytest.mark.parametrize("task", exam_optima.TASKS)
@pytest.mark.parametrize("level", [0.0, 0.7])
def test_the_density_is_that_of_samples(task, level):
    """Of a table that is not 0, by the ODE and by SDE steps: moments and the other directions' variance."""
    field = exam_model.Field(*exam_optima.TASKS[task].mixture)
    generator = torch.Generator().manual_seed(0)
    field.table.data = 0.3 * torch.randn(field.table.shape, generator=generator)
    x = torch.randn(20000, exam_model.DIMENSION, generator=generator)
    for i in range(10):
        sigma = 1 - i / 10
        with torch.no_grad():
            v = field(x, torch.full([len(x)], sigma))
        noise_level = level if i < 9 else 0.0
        x = sde_step(x, v, sigma, max(0.0, sigma - 0.1), noise_level, sigma_max=0.9, generator=generator).prev_sample
    z = x.sum(1) / exam_model.DIMENSION**0.5
    density, rest = exam_optima.final_density(task, field.table.detach(), ("sde", level, 9))
    found = exam_optima.moments(density)
    assert found["mean"] == pytest.approx(z.mean().item(), abs=0.03)
    assert found["variance"] == pytest.approx(z.var().item(), rel=0.03)
    assert found["mass"] == pytest.approx((z < 0).double().mean().item(), abs=0.015)
    assert rest == pytest.approx(x.var(1).mean().item(), rel=0.01)


@pytest.mark.fast
def test_optima_of_a_gaussian():
    """N(0, 1) tilted by exp(2 z) is N(2, 1), with a KL of 2; at price 1 the strength is 7/8, as the deviation is 1."""
    normal = exam_optima.tilted(np.exp(-(exam_optima.GRID**2) / 2), 0)
    optimum = exam_optima.tilted(normal, 2)
    assert exam_optima.moments(optimum)["mean"] == pytest.approx(2, abs=1e-6)
    assert exam_optima.moments(optimum)["variance"] == pytest.approx(1, abs=1e-6)
    assert exam_optima.divergence(optimum, normal) == pytest.approx(2, abs=1e-6)
    assert exam_optima.strength_of(normal, 2) == pytest.approx(2, abs=1e-6)
    assert exam_optima.claimed_strength(normal, 1) == pytest.approx(7 / 8, abs=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("counts_later_kl", [True, False])
def test_the_best_steps_of_a_gaussian(counts_later_kl):
    """A first latent that no step moves keeps its share rho^2 of the variance: the mean is (1 - rho^2) of the claim.

    With a linear reward the KL of a step depends on no sample, so that its gradient misses nothing."""
    sampler = ("sde", 0.7, 9)
    reference, variance = exam_optima.final_density("gaussian", exam_optima.untrained("gaussian"), sampler)
    share = exam_optima.first_latent_share("sde", 0.7, [1 - i / 10 for i in range(11)], 9)
    optimum = exam_optima.step_optimum("gaussian", sampler, 1.0, counts_later_kl)
    found = exam_optima.moments(optimum)
    assert found["mean"] == pytest.approx((1 - share) * 7 / 8 * variance**0.5, abs=1e-3)
    assert found["variance"] == pytest.approx(variance, rel=1e-3)


@pytest.mark.fast
def test_what_the_first_latent_decides():
    """All where no step is noisy. From N(0, 1) to N(0, 1) it is exp(-integral of q^2 / V), V = (1 - s)^2 + s^2: with
    constant q exp(-q^2 pi / 2); with Flow-GRPO's q it falls as T^(-level^2); at sqrt(2) the first step ends it."""
    even = lambda num_steps: [1 - i / num_steps for i in range(num_steps + 1)]
    share = lambda kind, level, num_steps: exam_optima.first_latent_share(kind, level, even(num_steps), num_steps - 1)
    assert exam_optima.first_latent_share("sde", 0.7, even(400), 0) == 1
    assert share("dance", 0.7, 800) == pytest.approx(math.exp(-0.49 * math.pi / 2), rel=1e-3)
    assert share("sde", 0.7, 3200) / share("sde", 0.7, 800) == pytest.approx(4**-0.49, rel=0.02)
    assert share("sde", 2**0.5, 50) < 1e-9


@pytest.mark.fast
def test_an_image_is_its_latents():
    latents = 3 * torch.randn(4, 1, exam_model.SIDE, exam_model.SIDE, generator=torch.Generator().manual_seed(0))
    images = exam_model.to_images(latents)
    assert (exam_model.to_latents(images) - latents).abs().max() < 4e-6
    assert exam_model.height(images, [], []) == pytest.approx((latents.sum((1, 2, 3)) / 16).tolist(), abs=1e-4)


def test_a_script_sits_the_exam():
    """flow_grpo.py ends where its own objective has its optimum: (7/8) (1 - 0.085) deviations, 0.07 below the claim."""
    options = ["--tasks", "gaussian", "--seeds", "1", "--processes", "1", "--price", "1", "--kl_coef=1"]
    command = [sys.executable, "-m", "benchmarks.exam", "flow_grpo.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    against_claim = [line for line in done.stdout.splitlines() if line.startswith("| `flow_grpo`")][0]
    _, _, _, mean, claimed, bias, variance, other, _ = (cell.strip() for cell in against_claim.split("|"))
    assert float(claimed) == pytest.approx(0.875, abs=2e-3)
    assert float(mean) == pytest.approx(0.80, abs=0.05)
    assert float(bias) == pytest.approx(-0.075, abs=0.05)
    assert float(variance) == pytest.approx(0, abs=0.1)
    assert float(other) == pytest.approx(0, abs=0.05)
