"""What a run of each script on the toy model must end with, by loops that call nothing of the scripts.

Everything is in fp64, an image is a row of four numbers, and the whole rollout is on one rank. `Expected` has what the
run must log, save and evaluate. Prompts are drawn by GroupSampler and noise is seeded by image_seed, which are common's
and have tests of their own.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.data import GroupSampler
from common.sde import image_seed
from tests.algorithms.toy_family import START, closeness_of, numbers_of

import torch
from torch import Tensor

Policy = tuple[Tensor, Tensor]  # a LoRA's A (1, 7) and B (4, 1)
Metrics = dict[str, float]


@dataclass
class Options:
    """The options that runs by hand know, by their names."""

    seed: int = 5
    num_steps: int = 3
    eval_every: int = 2
    num_prompts: int = 2
    group_size: int = 4
    num_inference_steps: int = 4
    noise_level: float = 0.7
    sde_window_size: int = 2
    sde_window_range: tuple[int, int] = (0, 3)
    guidance_scale: float = 1.5
    eval_guidance_scale: float = 2.5
    eval_num_inference_steps: int = 3
    eval_images_per_prompt: int = 2
    clip_range: float = 0.01
    kl_coef: float = 5.0
    adv_clip_max: float = 1.2
    updates_per_rollout: int = 2
    epochs_per_rollout: int = 2
    learning_rate: float = 0.03
    lr_schedule: str = "cosine:3"
    weight_decay: float = 0.1
    adam_betas: tuple[float, float] = (0.8, 0.95)
    adam_eps: float = 1e-6
    max_grad_norm: float = 0.2
    ema_decay: float = 0.3
    lora_alpha: int = 2
    num_pairs: int = 4  # of dpo_offline.py
    dpo_beta: float = 20.0
    dppo_delta: float = 1e-4  # of contrib/flow_dppo.py
    # by how much the velocity is too large that samples. Samples that the trainer finds less likely than the engine are
    # then rejected (--rollout_correction reject_k1)
    engine_error: float = 0.0


@dataclass
class Expected:
    """Of a run: its rows of metrics, policies after each step, evaluations and rollouts."""

    rows: list[Metrics] = field(default_factory=list)
    policies: list[dict[str, Policy]] = field(default_factory=list)  # after each step; the first is the start
    rollouts: list[list[dict[str, Any]]] = field(default_factory=list)  # {"prompt", "seed", "score", "advantage"}


def velocity(o: Options, policy: Policy | None, x: Tensor, s: Tensor | float, c: Tensor, scale: float = 1.0) -> Tensor:
    """v (n, 4) of a policy (None: the base model) at x (n, 4), s (n,) or a number and c (n, 2), with guidance."""
    weight = START.double()
    if policy is not None:
        a, b = policy
        weight = weight + o.lora_alpha * b @ a
    sigma = torch.as_tensor(s, dtype=torch.float64).expand(len(x))[:, None]
    with_prompt = torch.cat([x, c, sigma], 1) @ weight.T
    without = torch.cat([x, 0 * c, sigma], 1) @ weight.T
    return without + scale * (with_prompt - without)


def sigmas_of(num_steps: int) -> list[float]:
    return (torch.linspace(1, 0, num_steps + 1) ** 1.5).tolist()


class Run:
    """What all scripts share: the trained policy and its average, Adam, evaluation, the draw of a rollout."""

    def __init__(self, o: Options, start: Policy, train_prompts: list[str], eval_prompts: list[str]) -> None:
        self.o = o
        self.trained = tuple(tensor.double().clone().requires_grad_() for tensor in start)
        self.average = self.copy()
        self.old = self.copy()
        adam = {"betas": o.adam_betas, "eps": o.adam_eps, "weight_decay": o.weight_decay}
        self.adam = torch.optim.AdamW(self.trained, lr=1.0, **adam)
        self.num_updates = 0
        self.train_prompts, self.eval_prompts = train_prompts, eval_prompts
        self.sampler = self.sampler_of(len(train_prompts), o.num_prompts, o.group_size, o.updates_per_rollout)
        self.expected = Expected()

    def sampler_of(self, *sizes: int) -> GroupSampler:
        return GroupSampler(*sizes, seed=self.o.seed, rank=0, world_size=1)

    def copy(self) -> Policy:
        return tuple(tensor.detach().clone() for tensor in self.trained)

    def draw(self) -> list[str]:
        """The prompt of each of the N images."""
        rows, prompt_index, _ = self.sampler.draw()
        return [self.train_prompts[row] for row in rows[prompt_index].tolist()]

    def optimizer_step(self, loss: Tensor, updates_of_run: int) -> Metrics:
        self.adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.o.max_grad_norm).item()
        self.num_updates += 1
        k, warmup, end = self.num_updates, 3, updates_of_run + 1
        factor = k / warmup if k < warmup else (1 + math.cos(math.pi * (k - warmup) / (end - warmup))) / 2
        self.adam.param_groups[0]["lr"] = self.o.learning_rate * factor
        self.adam.step()
        decay = min(self.o.ema_decay, (1 + k) / (10 + k))
        for mean, tensor in zip(self.average, self.trained, strict=True):
            mean.copy_(decay * mean + (1 - decay) * tensor.detach())
        return {"actor/grad_norm": norm, "actor/lr": self.o.learning_rate * factor}

    def ode(self, policy: Policy, x: Tensor, c: Tensor, sigmas: list[float], scale: float) -> Tensor:
        for s, s_next in zip(sigmas, sigmas[1:], strict=False):
            x = x + (s_next - s) * (1 + self.o.engine_error) * velocity(self.o, policy, x, s, c, scale)
        return x

    def evaluate(self, scale: float) -> float:
        """The mean reward of the average's images."""
        o = self.o
        scores = []
        for row, prompt in enumerate(self.eval_prompts):
            for number in range(o.eval_images_per_prompt):
                x, c = noise_of(image_seed("eval", number, row)), codes([prompt])
                x0 = self.ode(self.average, x, c, sigmas_of(o.eval_num_inference_steps), scale)
                scores.append(closeness_of(x0[0].tolist(), prompt))
        return sum(scores) / len(scores)

    def end_step(self, metrics: Metrics, scale: float = 1.0) -> None:
        number = len(self.expected.rows)  # of training steps so far
        if number % self.o.eval_every == 0 or number == self.o.num_steps:
            metrics = metrics | {"val/closeness/mean": self.evaluate(scale)}
        if number:
            metrics = metrics | {"training/epoch": self.sampler.epoch, "actor/skipped_steps": 0}
        self.expected.rows.append(metrics)
        policies = {"default": self.copy(), "ema": tuple(tensor.clone() for tensor in self.average)}
        self.expected.policies.append(policies | {"old": tuple(tensor.clone() for tensor in self.old)})


def codes(prompts: list[str]) -> Tensor:
    return torch.tensor([numbers_of(prompt)[:2] for prompt in prompts], dtype=torch.float64)


def noise_of(seed: int) -> Tensor:
    return torch.randn(1, 4, generator=torch.Generator().manual_seed(seed)).double()


def advantages_of(o: Options, scores: list[float | None]) -> list[float]:
    """(score - its group's mean) / the rollout's deviation, where a failed score (None) is its group's mean."""
    groups = [scores[i : i + o.group_size] for i in range(0, len(scores), o.group_size)]
    centred = []
    filled = []
    for group in groups:
        whole = [score for score in group if score is not None]
        mean = sum(whole) / len(whole)
        filled += [mean if score is None else score for score in group]
        centred += [0.0 if score is None else score - mean for score in group]
    mean = sum(filled) / len(filled)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in filled) / len(filled)) + 1e-4
    return [max(-o.adv_clip_max, min(o.adv_clip_max, score / deviation)) for score in centred]


def rollout_metrics(o: Options, scores: list[float | None], advantages: list[float]) -> Metrics:
    whole = [score for score in scores if score is not None]
    kept = [advantage for advantage, score in zip(advantages, scores, strict=True) if score is not None]
    return {
        "critic/rewards/mean": sum(whole) / len(whole),
        "critic/rewards/closeness/failed": len(scores) - len(whole),
        "critic/advantages/max": max(kept),
        "critic/advantages/min": min(kept),
    }


def mean_of(rows: list[Metrics]) -> Metrics:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


# ---- scripts whose ratio is that of densities ------------------------------------------------------------------------
@dataclass
class Step:
    """An SDE step of b images: from x to x_next, by the old policy with old_mean."""

    x_next: Tensor
    old_mean: Tensor
    std: float
    dt: float
    advantages: Tensor
    o: Options


def clipped(step: Step, ratio: Tensor, advantages: Tensor) -> Tensor:
    bounded = ratio.clamp(1 - step.o.clip_range, 1 + step.o.clip_range)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def flow_grpo_loss(step: Step, mean: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, ratio), each (b,)."""
    new, old = (torch.distributions.Normal(m, step.std).log_prob(step.x_next).mean(1) for m in (mean, step.old_mean))
    ratio = (new - old).exp()
    return clipped(step, ratio, step.advantages), ratio


def grpo_guard_loss(step: Step, mean: Tensor) -> tuple[Tensor, Tensor]:
    eps = (step.x_next - step.old_mean) / step.std
    ratio = (eps * (mean - step.old_mean)).mean(1).exp()
    return clipped(step, ratio, step.advantages) / -step.dt, ratio


def flow_dppo_loss(step: Step, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Without a clip: dropped where the KL to the old step is at its bound and A lets it grow."""
    new, old = (torch.distributions.Normal(m, step.std) for m in (mean, step.old_mean))
    ratio = (new.log_prob(step.x_next) - old.log_prob(step.x_next)).mean(1).exp()
    is_far = torch.distributions.kl_divergence(new, old).mean(1) >= step.o.dppo_delta
    is_dropped = is_far & (step.advantages * (ratio - 1) > 0)
    return torch.where(is_dropped, 0.0, -step.advantages * ratio), ratio


def tempflow_loss(step: Step, mean: Tensor) -> tuple[Tensor, Tensor]:
    loss, ratio = flow_grpo_loss(step, mean)
    return 2.25 * step.std * loss, ratio


def random_window(o: Options, step: int) -> tuple[int, ...]:
    low, high = o.sde_window_range
    start = random.Random(o.seed + step).randint(low, high - o.sde_window_size)
    return tuple(range(start, start + o.sde_window_size))


def sliding_window(o: Options, step: int) -> tuple[int, ...]:
    """--iters_per_group 1: one further in every rollout, and back to the start."""
    low, high = o.sde_window_range
    start = low + (step - 1) % (high - low - o.sde_window_size + 1)
    return tuple(range(start, start + o.sde_window_size))


def run_of_ratios(
    run: Run,
    loss_of: Callable[[Step, Tensor], tuple[Tensor, Tensor]],
    window_of: Callable[[Options, int], tuple[int, ...]] = random_window,
    kind: str = "sde",
    first_noise: str = "",
    images_of_noise: int = 4,
) -> Expected:
    """kind: "dance" has constant noise, and a KL without |dt|. first_noise: the purpose in the seed of the noise from
    which images_of_noise images start together; "": each has its own."""
    o = run.o
    sigmas = sigmas_of(o.num_inference_steps)
    dts = [s_next - s for s, s_next in zip(sigmas, sigmas[1:], strict=False)]
    num_images = o.num_prompts * o.group_size
    num_updates = o.num_steps * o.updates_per_rollout * o.epochs_per_rollout
    run.end_step({}, o.eval_guidance_scale)

    def mean_and_std(policy: Policy | None, x: Tensor, i: int, c: Tensor, error: float = 0.0) -> tuple[Tensor, float]:
        s = sigmas[i]
        v = (1 + error) * velocity(o, policy, x, s, c, o.guidance_scale)
        q = o.noise_level * (math.sqrt(s / (1 - min(s, sigmas[1]))) if kind == "sde" else 1)
        drift = v + q**2 / (2 * s) * (x + (1 - s) * v)
        return x + drift * dts[i], q * math.sqrt(-dts[i])

    for number in range(1, o.num_steps + 1):
        prompts = run.draw()
        c = codes(prompts)
        window = window_of(o, number)
        seeds = [image_seed(o.seed, number, n) for n in range(num_images)]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        if first_noise:
            owners = [n // images_of_noise for n in range(num_images)]
            x = torch.cat([noise_of(image_seed(o.seed, f"{number} {first_noise}", owner)) for owner in owners])
        else:
            x = torch.cat([torch.randn(1, 4, generator=generator).double() for generator in generators])
        old = run.copy()
        taken = {}  # by the sampling step: x, x_next, the mean and std of the old policy
        for i in range(o.num_inference_steps):
            if i in window:
                engine_mean, std = mean_and_std(old, x, i, c, o.engine_error)
                mean, _ = mean_and_std(old, x, i, c)
                eps = torch.cat([torch.randn(1, 4, generator=generator).double() for generator in generators])
                x_next = engine_mean + std * eps
                is_likelier = (eps * (mean - engine_mean)).mean(1) / std >= ((mean - engine_mean) ** 2).mean(1) / (
                    2 * std**2
                )
                weights = is_likelier.double() if o.engine_error else torch.ones(num_images, dtype=torch.float64)
                taken[i] = x, x_next, mean, std, weights
                x = x_next
            else:
                x = run.ode(old, x, c, sigmas[i : i + 2], o.guidance_scale)
        scores = [closeness_of(row, prompt) for row, prompt in zip(x.tolist(), prompts, strict=True)]
        advantages = advantages_of(o, scores)
        records = zip(prompts, seeds, scores, advantages, strict=True)
        keys = ("prompt", "seed", "closeness", "advantage")
        run.expected.rollouts.append([dict(zip(keys, record, strict=True)) for record in records])
        passes = []
        updates = []
        for rows in list(torch.arange(num_images).chunk(o.updates_per_rollout)) * o.epochs_per_rollout:
            terms = []
            for i in window:
                x, x_next, old_mean, std, weights = taken[i]
                step = Step(x_next[rows], old_mean[rows], std, dts[i], torch.tensor(advantages)[rows].double(), o)
                mean, _ = mean_and_std(run.trained, x[rows], i, c[rows])
                reference, _ = mean_and_std(None, x[rows], i, c[rows])
                loss, ratio = loss_of(step, mean)
                loss = weights[rows] * loss
                kl = ((mean - reference) ** 2).mean(1) / (2 * std**2)
                kl = kl * -dts[i] if kind == "sde" else kl  # times |dt|, as published
                terms.append((loss + o.kl_coef * kl).mean())
                passes.append(
                    {
                        "actor/loss": loss.mean().item(),
                        "actor/ratio_mean": ratio.mean().item(),
                        "actor/kl_loss": kl.mean().item(),
                    }
                )
            updates.append(run.optimizer_step(sum(terms) / len(terms), num_updates))
        metrics = rollout_metrics(o, scores, advantages) | mean_of(passes) | mean_of(updates)
        metrics["actor/lr"] = updates[-1]["actor/lr"]
        run.end_step(metrics | {"actor/on_policy_ratio_mean": 1.0}, o.eval_guidance_scale)
    return run.expected


# ---- scripts of the forward process ----------------------------------------------------------------------------------
@dataclass
class Noised:
    """b images x0, noised to x_t at sigma s (b, 1), with the velocities there of the old policy and the base model."""

    x0: Tensor
    x_t: Tensor
    s: Tensor
    v_old: Tensor
    v_ref: Tensor
    advantages: Tensor
    is_whole: Tensor  # (b,), 1, or 0 where a reward failed
    o: Options


def nft_loss(images: Noised, v: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, KL), each a number."""
    m, beta = images.o.adv_clip_max, 0.3
    r = images.advantages / (2 * m) + 0.5

    def error(side: int) -> Tensor:
        predicted = images.x_t - images.s * (images.v_old + side * beta * (v - images.v_old))
        distance = (predicted.detach() - images.x0).abs().mean(1)
        return ((predicted - images.x0) ** 2).mean(1) / distance

    policy = m / beta * (images.is_whole * (r * error(1) + (1 - r) * error(-1))).mean()
    kl = (images.is_whole * ((v - images.v_ref) ** 2).mean(1)).mean()
    return policy + images.o.kl_coef * kl, kl


def awm_loss(images: Noised, v: Tensor) -> tuple[Tensor, Tensor]:
    """With --old_kl_coef 0.5."""
    target = (images.x_t - images.x0) / images.s
    ratio = (((images.v_old - target) ** 2).mean(1) - ((v - target) ** 2).mean(1)).exp()
    a, bound = images.advantages / images.o.adv_clip_max, images.o.clip_range
    policy = -torch.minimum(a * ratio, a * ratio.clamp(1 - bound, 1 + bound))
    old_kl, kl = (((v - other) ** 2).mean(1) for other in (images.v_old, images.v_ref))
    total = images.is_whole * (policy + 0.5 * old_kl + images.o.kl_coef * kl)
    return total.mean(), (images.is_whole * kl).mean()


def dgpo_loss(images: Noised, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of whole groups: -log sigmoid of the mean of A times how much nearer v is than the base model, over beta."""
    o = images.o
    target = (images.x_t - images.x0) / images.s
    e, e_old, e_ref = (((w - target) ** 2).mean(1) for w in (v, images.v_old, images.v_ref))
    ratio = (e_old - e).exp()
    is_far = torch.where(images.advantages > 0, ratio > 1 + o.clip_range, ratio < 1 - o.clip_range)
    gained = images.advantages * (e_ref - torch.where(is_far, e.detach(), e))
    logits = o.dpo_beta * gained.view(-1, o.group_size).mean(1)
    kl = (images.is_whole * ((v - images.v_ref) ** 2).mean(1)).mean()
    return torch.log1p((-logits).exp()).mean() / o.dpo_beta + o.kl_coef * kl, kl


def ram_loss(images: Noised, v: Tensor) -> tuple[Tensor, Tensor]:
    """With --reward_multiplier 2."""
    towards = (images.x_t - images.x0) / images.s - images.v_old
    target = images.v_ref + 2 * images.advantages[:, None] * towards
    errors, kl = (((v - other) ** 2).mean(1) for other in (target, images.v_ref))
    return (images.is_whole * errors).mean(), (images.is_whole * kl).mean()


def run_of_noised(
    run: Run, loss_of: Callable[[Noised, Tensor], tuple[Tensor, Tensor]], old_decay: float, images_of_noise: int = 1
) -> Expected:
    """Sampled by `old`, which after each rollout's updates keeps old_decay of itself. images_of_noise images are noised
    alike."""
    o = run.o
    sigmas = sigmas_of(o.num_inference_steps)
    num_images = o.num_prompts * o.group_size
    num_updates = o.num_steps * o.updates_per_rollout * o.epochs_per_rollout
    run.end_step({})
    for number in range(1, o.num_steps + 1):
        prompts = run.draw()
        c = codes(prompts)
        seeds = [image_seed(o.seed, number, n) for n in range(num_images)]
        x0 = run.ode(run.old, torch.cat([noise_of(seed) for seed in seeds]), c, sigmas, 1.0)
        scores = [closeness_of(row, prompt) for row, prompt in zip(x0.tolist(), prompts, strict=True)]
        advantages = advantages_of(o, scores)
        records = zip(prompts, seeds, scores, advantages, strict=True)
        keys = ("prompt", "seed", "closeness", "advantage")
        run.expected.rollouts.append([dict(zip(keys, record, strict=True)) for record in records])
        passes = []
        updates = []
        for epoch in range(o.epochs_per_rollout):
            timesteps, noise = [], []
            for n in range(num_images):  # all of the schedule's timesteps, in an order of the image's own
                purpose = f"{number} update {epoch}" if epoch else f"{number} update"
                generator = torch.Generator().manual_seed(image_seed(o.seed, purpose, n // images_of_noise))
                order = torch.randperm(o.num_inference_steps, generator=generator)
                timesteps.append(torch.tensor(sigmas)[order])
                noise.append(torch.randn(o.num_inference_steps, 4, generator=generator))
            s_of, eps_of = torch.stack(timesteps).double(), torch.stack(noise).double()
            for rows in torch.arange(num_images).chunk(o.updates_per_rollout):
                terms = []
                for k in range(o.num_inference_steps):
                    s = s_of[rows, k][:, None]
                    x_t = (1 - s) * x0[rows] + s * eps_of[rows, k]
                    v, v_old, v_ref = (
                        velocity(o, policy, x_t, s[:, 0], c[rows]) for policy in (run.trained, run.old, None)
                    )
                    a = torch.tensor(advantages)[rows].double()
                    whole = torch.tensor([float(scores[row] is not None) for row in rows.tolist()])
                    loss, kl = loss_of(Noised(x0[rows], x_t, s, v_old, v_ref, a, whole.double(), o), v)
                    terms.append(loss)
                    passes.append({"actor/loss": loss.item(), "actor/kl_loss": kl.item()})
                updates.append(run.optimizer_step(sum(terms) / len(terms), num_updates))
        for old, tensor in zip(run.old, run.trained, strict=True):
            old.copy_(old_decay * old + (1 - old_decay) * tensor.detach())
        metrics = rollout_metrics(o, scores, advantages) | mean_of(passes) | mean_of(updates)
        metrics["actor/lr"] = updates[-1]["actor/lr"]
        run.end_step(metrics | {"old_policy/decay": old_decay})
    return run.expected


# ---- records ---------------------------------------------------------------------------------------------------------
def run_of_records(run: Run, records: list[tuple[str, Tensor]], num_records: int, caption_dropout: float) -> Expected:
    """records: (prompt, its image (1, 4)). With --loss_weighting cosmap, and the model's own schedule as the shift."""
    o = run.o
    run.sampler = run.sampler_of(len(records), num_records, 1)
    run.end_step({}, o.eval_guidance_scale)
    for number in range(1, o.num_steps + 1):
        rows, _, _ = run.sampler.draw()
        losses, errors, levels, num_dropped = [], [], [], 0
        for n, row in enumerate(rows.tolist()):
            prompt, x0 = records[row]
            generator = torch.Generator().manual_seed(image_seed(o.seed, number, n))
            s = torch.randn((), generator=generator).sigmoid().double() ** 1.5  # toy_family's schedule
            if torch.rand((), generator=generator) < caption_dropout:
                prompt, num_dropped = "", num_dropped + 1
            eps = torch.randn(1, 4, generator=generator).double()
            x_s = (1 - s) * x0.double() + s * eps
            v = velocity(o, run.trained, x_s, s, codes([prompt]))
            errors.append(((v - (eps - x0.double())) ** 2).mean())
            losses.append(2 / (math.pi * (s**2 + (1 - s) ** 2)) * errors[-1])
            levels.append(s)
        loss = sum(losses) / num_records
        metrics = run.optimizer_step(loss, o.num_steps)
        metrics |= {"actor/loss": loss.item(), "actor/error": sum(errors).item() / num_records}
        metrics |= {"actor/sigma": sum(levels).item() / num_records, "actor/dropped_prompts": num_dropped / num_records}
        run.end_step(metrics, o.eval_guidance_scale)
    return run.expected


# ---- pairs -----------------------------------------------------------------------------------------------------------
def run_of_pairs(run: Run, pairs: list[tuple[str, Tensor, Tensor]]) -> Expected:
    """pairs: (prompt, the chosen image (1, 4), the rejected one)."""
    o = run.o
    run.sampler = run.sampler_of(len(pairs), o.num_pairs, 1)
    run.end_step({}, o.eval_guidance_scale)
    for number in range(1, o.num_steps + 1):
        rows, _, _ = run.sampler.draw()
        losses, margins = [], []
        for n, row in enumerate(rows.tolist()):
            prompt, *images = pairs[row]
            generator = torch.Generator().manual_seed(image_seed(o.seed, number, n))
            s = torch.randn((), generator=generator).sigmoid().double()
            eps = torch.randn(1, 4, generator=generator).double()
            gained = []  # of the chosen and the rejected image: by how much v is nearer than the base model's
            for x0 in images:
                x_s = (1 - s) * x0.double() + s * eps
                errors = [
                    ((velocity(o, policy, x_s, s, codes([prompt])) - (eps - x0.double())) ** 2).mean()
                    for policy in (None, run.trained)
                ]
                gained.append(errors[0] - errors[1])
            margins.append(o.dpo_beta / 2 * (gained[0] - gained[1]))
            losses.append(torch.log1p((-margins[-1]).exp()))
        loss = sum(losses) / len(losses)
        metrics = run.optimizer_step(loss, o.num_steps)
        metrics |= {"actor/loss": loss.item(), "actor/margin": sum(margins).item() / len(margins)}
        run.end_step(metrics, o.eval_guidance_scale)
    return run.expected


# ---- a student, a teacher and a fake score ---------------------------------------------------------------------------
def run_of_dmd2(
    run: Run, teacher_guidance: float, fake_updates: int, fake_learning_rate: float, noise_range: tuple[float, float]
) -> Expected:
    """The fake score begins as the student does; the teacher is the base model."""
    o = run.o
    low, high = noise_range
    schedule, sigmas = sigmas_of(1000), sigmas_of(o.num_inference_steps)
    run.sampler = run.sampler_of(len(run.train_prompts), o.num_prompts, 1)
    fake = tuple(tensor.requires_grad_() for tensor in run.copy())
    adam = {"betas": o.adam_betas, "eps": o.adam_eps, "weight_decay": o.weight_decay}
    fake_adam = torch.optim.AdamW(fake, lr=fake_learning_rate, **adam)

    def end_step(metrics: Metrics) -> None:
        run.end_step(metrics, o.eval_guidance_scale)
        run.expected.policies[-1]["fake"] = tuple(tensor.detach().clone() for tensor in fake)

    def generator_of(purpose: str, n: int) -> torch.Generator:
        return torch.Generator().manual_seed(image_seed(o.seed, purpose, n))

    def noise(purpose: str) -> tuple[Tensor, Tensor]:
        levels, eps = [], []
        for n in range(o.num_prompts):
            generator = generator_of(purpose, n)
            place = (1 - low - (high - low) * torch.rand((), generator=generator).item()) * 1000
            below = schedule[int(place)]
            levels.append(below + (place - int(place)) * (schedule[int(place) + 1] - below))
            eps.append(torch.randn(1, 4, generator=generator).double())
        return torch.tensor(levels, dtype=torch.float64), torch.cat(eps)

    end_step({})
    for number in range(1, o.num_steps + 1):
        c = codes(run.draw())

        def image(policy: Policy | None, x: Tensor, s: Tensor, scale: float, c: Tensor = c) -> Tensor:
            return x - s[:, None] * velocity(o, policy, x, s, c, scale)

        starts, levels = [], []
        for n in range(o.num_prompts):
            chosen = torch.randint(o.num_inference_steps, (1,), generator=generator_of(f"{number} step", n)).item()
            first = noise_of(image_seed(o.seed, number, n))
            starts.append(run.ode(run.copy(), first, c[n : n + 1], sigmas[: chosen + 1], o.guidance_scale))
            levels.append(sigmas[chosen])
        x, s = torch.cat(starts), torch.tensor(levels, dtype=torch.float64)
        x0 = image(run.copy(), x, s, o.guidance_scale)
        levels, eps = noise(f"{number} update")
        x_s = (1 - levels[:, None]) * x0 + levels[:, None] * eps
        real = image(None, x_s, levels, teacher_guidance)
        seen = image(fake, x_s, levels, o.guidance_scale).detach()
        direction = (seen - real) / (x0 - real).abs().mean(1, keepdim=True)
        loss = (direction * image(run.trained, x, s, o.guidance_scale)).mean()  # of the gradient that is wanted
        metrics = run.optimizer_step(loss, o.num_steps)
        metrics["actor/loss"] = (direction**2).mean().item() / 2
        updates = []
        for k in range(fake_updates):
            levels, eps = noise(f"{number} fake {k}")
            x_s = (1 - levels[:, None]) * x0 + levels[:, None] * eps
            loss = ((velocity(o, fake, x_s, levels, c, o.guidance_scale) - (eps - x0)) ** 2).mean()
            fake_adam.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(fake, o.max_grad_norm).item()
            updates.append({"actor/fake_grad_norm": norm, "actor/fake_loss": loss.item()})
            fake_adam.step()
        end_step(metrics | mean_of(updates))
    return run.expected


# ---- and a surrogate of the reward -----------------------------------------------------------------------------------
def run_of_tdm_r1(
    run: Run,
    teacher_guidance: float,
    surrogate_guidance: float,
    surrogate_share: float,
    surrogate_level: float,
    max_deviation: float,
    fake_updates: int,
    fake_learning_rate: float,
    surrogate_updates: int,
    surrogate_learning_rate: float,
    noise_range: tuple[float, float],
) -> Expected:
    """Fake score and surrogate begin as the student does, which is the teacher: the base model."""
    o = run.o
    low, high = noise_range
    schedule, sigmas = sigmas_of(1000), sigmas_of(o.num_inference_steps)
    num_images, size = o.num_prompts * o.group_size, o.group_size
    run.sampler = run.sampler_of(len(run.train_prompts), o.num_prompts, size)
    others = {name: tuple(tensor.requires_grad_() for tensor in run.copy()) for name in ("fake", "surrogate")}
    adam = {"betas": o.adam_betas, "eps": o.adam_eps, "weight_decay": o.weight_decay}
    rates = {"fake": fake_learning_rate, "surrogate": surrogate_learning_rate}
    adams = {name: torch.optim.AdamW(policy, lr=rates[name], **adam) for name, policy in others.items()}

    def end_step(metrics: Metrics) -> None:
        run.end_step(metrics, o.eval_guidance_scale)
        run.expected.policies[-1] |= {
            name: tuple(tensor.detach().clone() for tensor in policy) for name, policy in others.items()
        }

    def step_of(name: str, loss: Tensor) -> float:
        adams[name].zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(others[name], o.max_grad_norm).item()
        adams[name].step()
        return norm

    def generator_of(purpose: str, n: int) -> torch.Generator:
        return torch.Generator().manual_seed(image_seed(o.seed, purpose, n))

    def noise(purpose: str, owners: list[int], ends: list[float]) -> tuple[Tensor, Tensor]:
        """Levels (n, 1) above the ends, (1 - place)^1.5 in the schedule, read between its two nearest; and noise."""
        levels, eps = [], []
        for owner, end in zip(owners, ends, strict=True):
            generator = generator_of(purpose, owner)
            below = max(i for i, sigma in enumerate(schedule) if sigma >= end)
            after = min(below + 1, 1000)
            step = schedule[below] - schedule[after]
            start = (below + ((schedule[below] - end) / step if step else 0)) / 1000  # 0 at sigma 1, and 1 at 0
            place = 1000 * start * (1 - low - (high - low) * torch.rand((), generator=generator).item())
            i = int(place)
            levels.append([schedule[i] + (place - i) * (schedule[i + 1] - schedule[i])])
            eps.append(torch.randn(1, 4, generator=generator).double())
        return torch.tensor(levels, dtype=torch.float64), torch.cat(eps)

    def noised_on(x: Tensor, ends: list[float], s: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """x at level s, and its derivative by s, from dual numbers."""
        e = torch.tensor(ends, dtype=torch.float64)[:, None]

        def at(level: Tensor) -> Tensor:
            a = (1 - level) / (1 - e)
            return a * x + (level**2 - (a * e) ** 2).sqrt() * eps

        return torch.func.jvp(at, (s,), (torch.ones_like(s),))

    end_step({})
    for number in range(1, o.num_steps + 1):
        prompts = run.draw()
        c = codes(prompts)
        x = torch.cat([noise_of(image_seed(o.seed, number, n)) for n in range(num_images)])
        path = [x]
        for i in range(o.num_inference_steps):
            path.append(run.ode(run.copy(), path[-1], c, sigmas[i : i + 2], o.guidance_scale))
        scores = [closeness_of(row, prompt) for row, prompt in zip(path[-1].tolist(), prompts, strict=True)]
        advantages = advantages_of(o, scores)
        metrics = rollout_metrics(o, scores, advantages)

        def v_of(policy: Policy | None, x: Tensor, s: Tensor, scale: float = o.guidance_scale, c: Tensor = c) -> Tensor:
            return velocity(o, policy, x, s[:, 0], c, scale)

        chosen = [
            torch.randint(o.num_inference_steps, (1,), generator=generator_of(f"{number} step", n)).item()
            for n in range(num_images)
        ]
        x, x_end = (torch.stack([path[i + after][n] for n, i in enumerate(chosen)]) for after in (0, 1))
        s = torch.tensor([[sigmas[i]] for i in chosen], dtype=torch.float64)
        ends = [sigmas[i + 1] for i in chosen]
        x0 = x - s * v_of(run.copy(), x, s)
        rows = []
        for k in range(fake_updates):
            level, eps = noise(f"{number} fake {k}", list(range(num_images)), ends)
            x_s, _ = noised_on(x_end, ends, level, eps)
            loss = ((x_s - level * v_of(others["fake"], x_s, level) - x0) ** 2 / level**2).mean()
            rows.append({"actor/fake_loss": loss.item(), "actor/fake_grad_norm": step_of("fake", loss)})
        metrics |= mean_of(rows)
        rows = []
        for k in range(surrogate_updates):
            owners = [n // size for n in range(num_images)]
            generators = [generator_of(f"{number} surrogate {k} step", owner) for owner in owners]
            weights = torch.arange(1.0, o.num_inference_steps + 1)
            steps = [torch.multinomial(weights, 1, generator=generator).item() for generator in generators]
            own_ends = [sigmas[i + 1] for i in steps]
            of_step = torch.stack([path[i + 1][n] for n, i in enumerate(steps)])
            raised = [max(end, surrogate_level) for end in own_ends]
            level, eps = noise(f"{number} surrogate {k}", owners, raised)
            x_s, towards = noised_on(of_step, own_ends, level, eps)
            v, v_ref = v_of(others["surrogate"], x_s, level), v_of(None, x_s, level)
            error, ref_error = (((w - towards) ** 2).mean(1) for w in (v, v_ref))
            deviation = ((v - v_ref) ** 2).mean(1)
            terms, margins = [], []
            for first in range(0, num_images, size):
                logit = 0.0
                for n in range(first, first + size):
                    gained = ref_error[n] - error[n]
                    if deviation[n] > max_deviation and gained * (1 if advantages[n] > 0 else -1) > 0:
                        gained = gained.detach()
                    logit = logit + o.dpo_beta / size * advantages[n] * gained
                share = (steps[first] + 1) / o.num_inference_steps
                preference = torch.log1p((-logit).exp()) / o.dpo_beta
                terms.append(share * (preference + o.kl_coef * deviation[first : first + size].mean()))
                margins.append(logit.item())
            loss = sum(terms) / len(terms)
            row = {"surrogate/loss": loss.item(), "surrogate/margin": sum(margins) / len(margins)}
            row["surrogate/deviation"] = deviation.mean().item()
            rows.append(row | {"surrogate/grad_norm": step_of("surrogate", loss)})
        metrics |= mean_of(rows)

        def look(policy: Policy | None, x_s: Tensor, s: Tensor, scale: float, v_of: Any = v_of) -> Tensor:
            return (x_s - s * v_of(policy, x_s, s, scale)).detach()

        level, eps = noise(f"{number} update", list(range(num_images)), ends)
        x_s, _ = noised_on(x_end, ends, level, eps)
        fake = look(others["fake"], x_s, level, o.guidance_scale)
        plain, guided = (look(None, x_s, level, scale) for scale in (o.guidance_scale, teacher_guidance))
        level, eps = noise(f"{number} reward", list(range(num_images)), [max(end, surrogate_level) for end in ends])
        x_s, _ = noised_on(x_end, ends, level, eps)
        liked = look(others["surrogate"], x_s, level, surrogate_guidance)
        there = look(None, x_s, level, o.guidance_scale)
        far, far_there = ((x0 - image).abs().mean(1, keepdim=True) for image in (guided, liked))
        direction = (plain - fake + (1 - surrogate_share) * (guided - plain)) / far
        direction = direction + surrogate_share * (liked - there) / far_there
        student = x - s * v_of(run.trained, x, s)
        metrics |= run.optimizer_step(-(direction * student).mean(), o.num_steps)
        end_step(metrics | {"actor/loss": (direction**2).mean().item() / 2})
    return run.expected
