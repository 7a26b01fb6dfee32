"""What the exam compares with: densities on a grid of z, and the optima that they are held against.

docs/lab/exam.md derives what is computed here. Nothing is sampled.
"""

import math

from benchmarks import exam_model
from common.sde import find_step_kind

import numpy as np
import torch

TASKS = {"gaussian": exam_model.Gaussian, "mixture": exam_model.Mixture}
NUM_STEPS = exam_model.NUM_STEPS
GROUP_SIZE = 8
GRID = np.linspace(-9, 9, 801)  # of z
SPACING = GRID[1] - GRID[0]
Sampler = tuple[str, float, int]  # kind and level of the noise, and how many steps, the first ones, are noisy
ODE: Sampler = ("sde", 0.0, 0)


# ---- densities -------------------------------------------------------------------------------------------------------
def untrained(task: str) -> torch.Tensor:
    """The table of the model before training."""
    return torch.zeros_like(exam_model.Field(*TASKS[task].mixture).table.detach())


def mean_step(task: str, table: torch.Tensor, sampler: Sampler, i: int) -> tuple[np.ndarray, float, float]:
    """Sampling step i: the mean of the next z from each z of GRID, its std, and the other directions' factor."""
    kind, level, noisy = sampler
    field = exam_model.Field(*TASKS[task].mixture)
    sigma = 1 - i / NUM_STEPS
    step = (sigma, 1 - (i + 1) / NUM_STEPS, level if i < noisy else 0.0, 1 - 1 / NUM_STEPS)
    z = torch.from_numpy(GRID)
    at = torch.full_like(z, sigma)
    with torch.no_grad():
        mean, std = find_step_kind(kind)(z, field.along(z, at, table.double()), *step)
        slope = field.coefficients(at[:1], table.double())[1].squeeze()
    factor, _ = find_step_kind(kind)(torch.ones(1, dtype=torch.float64), slope, *step)
    return mean.numpy(), std, factor.item()


def moved(density: np.ndarray, mean: np.ndarray, std: float) -> np.ndarray:
    """The density after a step: mean(z) carries it along, and Gaussian noise is a matrix on the grid."""
    if std:
        return kernel(mean, std).T @ density * SPACING
    return np.interp(GRID, mean, density / np.gradient(mean, SPACING), left=0, right=0)


def kernel(mean: np.ndarray, std: float) -> np.ndarray:
    """The density of each z of GRID (columns) around each mean (rows)."""
    return np.exp(-(((GRID - mean[:, None]) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))


def final_density(task: str, table: torch.Tensor, sampler: Sampler) -> tuple[np.ndarray, float]:
    """The density of z on GRID after all sampling steps, and the variance of any other direction."""
    density, variance = np.exp(-(GRID**2) / 2) / math.sqrt(2 * math.pi), 1.0
    for i in range(NUM_STEPS):
        mean, std, factor = mean_step(task, table, sampler, i)
        variance = variance * factor**2 + std**2
        density = moved(density, mean, std)
    return density / (density.sum() * SPACING), variance


def divergence(density: np.ndarray, other: np.ndarray) -> float:
    """KL of a density to another one, in nats."""
    ratio = np.maximum(density, 1e-300) / np.maximum(other, 1e-300)
    return float((density * np.log(ratio)).sum() * SPACING)


# ---- optima ----------------------------------------------------------------------------------------------------------
def tilted(density: np.ndarray, strength: float) -> np.ndarray:
    """p exp(strength z) / Z, the optimum of E[z] - KL / strength."""
    weights = density * np.exp(strength * (GRID - GRID.max()))
    return weights / (weights.sum() * SPACING)


def moments(density: np.ndarray) -> dict[str, float]:
    """Mean and variance of z, and the mass of z < 0, which is the mixture's mode of low reward."""
    mean = float((density * GRID).sum() * SPACING)
    variance = float((density * (GRID - mean) ** 2).sum() * SPACING)
    below = GRID < 0
    mass = float((density[below].sum() + density[GRID == 0].sum() / 2) * SPACING)
    return {"mean": mean, "variance": variance, "mass": mass}


def claimed_strength(reference: np.ndarray, price: float) -> float:
    """1 / beta where beta = price std G / (G - 1), std being that of the rewards of the optimum itself."""
    strength = 1.0
    for _ in range(200):  # damped: a larger strength can mean a smaller deviation, and so a larger strength
        std = math.sqrt(moments(tilted(reference, strength))["variance"])
        strength = 0.9 * strength + 0.1 * (GROUP_SIZE - 1) / (GROUP_SIZE * price * std)
    return strength


def strength_of(reference: np.ndarray, nats: float) -> float:
    """The strength whose optimum has this KL to the reference."""
    low, high = 0.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(tilted(reference, middle), reference) < nats else (low, middle)
    return low


def first_latent_share(kind: str, level: float, sigmas: list[float], noisy: int, std: float = 1.0) -> float:
    """rho^2 of the Gaussian model: the share of the final variance that the first latent decides.

    By linear propagation of x' = f x + noise. 1 - rho^2 is the share that an optimum with a fixed first latent tilts.
    """
    step_kind = find_step_kind(kind)
    one = torch.ones(1, dtype=torch.float64)
    of_first, of_noise = 1.0, 0.0
    for i, (sigma, sigma_next) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        slope = (sigma - (1 - sigma) * std**2) / ((1 - sigma) ** 2 * std**2 + sigma**2)
        factor, noise = step_kind(one, slope * one, sigma, sigma_next, level if i < noisy else 0.0, sigmas[1])
        of_first *= factor.item() ** 2
        of_noise = of_noise * factor.item() ** 2 + noise**2
    return of_first / (of_first + of_noise)


def step_optimum(task: str, sampler: Sampler, price: float, counts_later_kl: bool) -> np.ndarray:
    """The density of z where every noisy step's mean is the best one, at the KL of the steps, for beta as claimed.

    Backwards over the steps: mean(z) maximises W(m) - beta (m - m_ref)^2 / (2 std^2), where W(m) is the expectation of
    the next step's value around m. A step's value is this maximum or, without counts_later_kl, W alone: the gradient
    of a KL that is computed at the samples, as they are, does not see that a step decides where later KLs are paid.
    """
    steps = [mean_step(task, untrained(task), sampler, i) for i in range(NUM_STEPS)]
    reference, _ = final_density(task, untrained(task), sampler)
    std_of_rewards = math.sqrt(moments(reference)["variance"])
    for _ in range(12):  # beta depends on the deviation of what it leads to
        beta = price * std_of_rewards * GROUP_SIZE / (GROUP_SIZE - 1)
        value, means = GRID, [mean for mean, _, _ in steps]
        for i in reversed(range(NUM_STEPS)):
            mean, std, _ = steps[i]
            if not std:
                value = np.interp(mean, GRID, value)
                continue
            weights = kernel(GRID, std)
            expected = weights @ value / weights.sum(1)
            gain = expected - beta * (GRID - mean[:, None]) ** 2 / (2 * std**2)  # (z, m)
            best = gain.argmax(1).clip(1, len(GRID) - 2)
            rows = np.arange(len(GRID))
            left, top, right = (gain[rows, best + shift] for shift in (-1, 0, 1))
            means[i] = GRID[best] + SPACING * (left - right) / (2 * (left - 2 * top + right))  # of a parabola
            value = top if counts_later_kl else np.interp(means[i], GRID, expected)
        density = np.exp(-(GRID**2) / 2) / math.sqrt(2 * math.pi)
        for mean, (_, std, _) in zip(means, steps, strict=True):
            density = moved(density, mean, std)
        change = math.sqrt(moments(density)["variance"]) - std_of_rewards
        if abs(change) < 1e-3:
            break
        std_of_rewards += change / 2  # damped, as in claimed_strength
    return density
