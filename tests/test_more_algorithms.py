"""docs/more_algorithms.md, as a reader follows it: its diffs apply, their losses are as by hand, the scripts run."""

import importlib.util
import math
import shutil
import subprocess
import sys

from dpo_offline import dpo_loss
from tests.conftest import ROOT, TINY, brightness_reward, constant_reward, few_eval_prompts, read_metrics, torchrun

import pytest
import torch

BASES = {"awm": "diffusion_nft", "dgpo": "diffusion_nft", "online_dpo": "dgpo"}  # in the page's order
RUN = [*TINY, "--rollout", "local", "--micro_batch_size"]  # 4 prompts x 4 images, one update a rollout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout with the three scripts beside the one they are made of."""
    folder = tmp_path_factory.mktemp("cleanflow")
    for name in ("common", "assets"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "diffusion_nft.py", folder)
    diffs = (ROOT / "docs" / "more_algorithms.md").read_text().split("```diff\n")[1:]
    for (name, base), diff in zip(BASES.items(), diffs, strict=True):
        shutil.copy(folder / f"{base}.py", folder / f"{name}.py")
        diff = diff.split("```")[0]
        assert diff.startswith(f"--- {base}.py\n+++ {name}.py\n")
        subprocess.run(["patch", f"{name}.py"], input=diff, text=True, cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def scripts(checkout):
    """The three scripts, imported, by name."""
    modules = {}
    for name in BASES:
        spec = importlib.util.spec_from_file_location(name, checkout / f"{name}.py")
        modules[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    yield modules
    for name in BASES:
        del sys.modules[name]


def column(*values):
    """One element a sample, (B, 1), in fp64."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1)


# ---- losses ----------------------------------------------------------------------------------------------------------
# of two samples: x0 1 and 0, noise 3 and 2, sigma 1/2 and 1/4, so that x_t is 2 and 1/2 and both targets are 2
X_T = column(2.0, 0.5)
X0 = column(1.0, 0.0)
SIGMA = torch.tensor([0.5, 0.25], dtype=torch.float64)


@pytest.mark.fast
def test_awm_loss_by_hand(scripts):
    """Errors 1/4, 1, of `old` 1, 0: ratios e^.75 and e^-1, clipped to 1.5 and .5, which count: A is 1 and -1/2."""
    loss, metrics = scripts["awm"].awm_loss(
        column(1.5, 3.0),
        column(1.0, 2.0),
        column(1.5, 1.0),
        X_T,
        X0,
        sigma=SIGMA,
        r=torch.tensor([1.0, 0.25], dtype=torch.float64),
        clip_range=0.5,
        old_kl_coef=2.0,
        kl_coef=0.1,
    )
    policy_loss = (-1.5 + 0.5 * 0.5) / 2
    assert loss.item() == pytest.approx(policy_loss + 2.0 * (0.25 + 1) / 2 + 0.1 * (0 + 4) / 2)
    assert metrics["actor/ratio_mean"].item() == pytest.approx((math.exp(0.75) + math.exp(-1)) / 2)
    assert metrics["actor/pg_clipfrac"] == 1 and metrics["actor/kl_loss"] == 2


@pytest.mark.fast
def test_awm_pulls_at_old_by_the_advantage(scripts):
    """Without a KL the gradient at `old` is A times that of the error, 2 (v - target), in the mean over two."""
    v = column(1.5, 3.0).requires_grad_()
    r = torch.tensor([1.0, 0.25], dtype=torch.float64)
    options = {"sigma": SIGMA, "r": r, "clip_range": 0.5, "old_kl_coef": 1.0, "kl_coef": 0.0}
    loss, metrics = scripts["awm"].awm_loss(v, v.detach(), None, X_T, X0, **options)
    loss.backward()
    assert v.grad.flatten().tolist() == pytest.approx([1 * 2 * (1.5 - 2) / 2, -0.5 * 2 * (3 - 2) / 2])
    assert loss.item() == pytest.approx(-(1 - 0.5) / 2)
    assert metrics["actor/ratio_mean"] == 1 and metrics["actor/pg_clipfrac"] == 0 and metrics["actor/kl_loss"] == 0


def dgpo_options(**changes):
    r = torch.tensor([0.6, 0.4], dtype=torch.float64)
    options = {"sigma": SIGMA, "r": r, "group_size": 2, "dpo_beta": 4.0, "clip_range": 9.0, "adv_clip_max": 5.0}
    return {**options, "kl_coef": 0.0, **changes}


@pytest.mark.fast
def test_dgpo_loss_by_hand(scripts):
    """A 1 and -1, errors 1/4 and 1, of the reference 1 and 1/4: logit 4 / 2 ((1 - 1/4) - (1/4 - 1)) = 3."""
    arguments = [column(1.5, 3.0), column(1.5, 3.0), column(1.0, 2.5), X_T, X0]
    loss, metrics = scripts["dgpo"].dgpo_loss(*arguments, **dgpo_options(kl_coef=0.1))
    kl = (0.25 + 0.25) / 2
    assert loss.item() == pytest.approx(math.log1p(math.exp(-3)) / 4 + 0.1 * kl)
    assert metrics["actor/margin"].item() == pytest.approx(3) and metrics["actor/kl_loss"].item() == pytest.approx(kl)
    # a second prompt, whose images all score the same
    twice = [torch.cat([argument, argument]) for argument in arguments]
    r = torch.tensor([0.6, 0.4, 0.5, 0.5], dtype=torch.float64)
    loss, metrics = scripts["dgpo"].dgpo_loss(*twice, **dgpo_options(sigma=SIGMA.repeat(2), r=r))
    assert loss.item() == pytest.approx((math.log1p(math.exp(-3)) + math.log(2)) / 2 / 4)
    assert metrics["actor/margin"].item() == pytest.approx(1.5)


@pytest.mark.fast
def test_dgpo_weighs_by_how_surprising_the_preference_is(scripts):
    """The gradient is that of mean(weight A error), weight = sigmoid(-logit) of the group: the authors' form."""
    torch.manual_seed(0)
    v, v_ref, x_t, x0 = torch.randn(4, 6, 5, dtype=torch.float64)
    sigma = torch.rand(6, dtype=torch.float64) + 0.1
    r = torch.rand(6, dtype=torch.float64)
    v.requires_grad_()
    options = dgpo_options(sigma=sigma, r=r, group_size=3, dpo_beta=0.7, clip_range=1e9)
    scripts["dgpo"].dgpo_loss(v, v.detach(), v_ref, x_t, x0, **options)[0].backward()
    errors, ref_errors = (((w - (x_t - x0) / sigma[:, None]) ** 2).mean(1) for w in (v, v_ref))
    advantages = 5.0 * (2 * r - 1)
    logits = 0.7 / 3 * (advantages * (ref_errors - errors)).view(2, 3).sum(1)
    weights = torch.sigmoid(-logits).detach().repeat_interleave(3)
    (expected,) = torch.autograd.grad((weights * advantages * errors).mean(), v)
    torch.testing.assert_close(v.grad, expected)


@pytest.mark.fast
@pytest.mark.parametrize(("r", "trained"), [([0.6, 0.4], [False, True]), ([0.4, 0.6], [True, False])])
def test_dgpo_clips_on_the_side_of_the_advantage(scripts, r, trained):
    """Errors 1/4 and 1/4, of `old` 1/2 each: both are closer than 1 + .1, further than a better image's may go."""
    v = column(1.5, 2.5).requires_grad_()
    v_old = 2 + column(-math.sqrt(0.5), math.sqrt(0.5))
    options = dgpo_options(r=torch.tensor(r, dtype=torch.float64), clip_range=0.1)
    loss, metrics = scripts["dgpo"].dgpo_loss(v, v_old, column(1.0, 1.0), X_T, X0, **options)
    loss.backward()
    assert (v.grad.flatten() != 0).tolist() == trained and metrics["actor/pg_clipfrac"] == 0.5


@pytest.mark.fast
def test_online_dpo_has_the_loss_of_offline_dpo(scripts):
    """Of three pairs, best first or last: dpo_offline.dpo_loss over dpo_beta."""
    torch.manual_seed(0)
    v, v_ref, x_t, x0 = torch.randn(4, 6, 5, dtype=torch.float64)
    sigma = torch.rand(6, dtype=torch.float64) + 0.1
    r = torch.tensor([1.0, 0, 0, 1, 1, 0], dtype=torch.float64)
    options = dgpo_options(sigma=sigma, r=r, dpo_beta=3.0, adv_clip_max=1.0)
    loss, metrics = scripts["online_dpo"].dgpo_loss(v, v, v_ref, x_t, x0, **options)
    target = (x_t - x0) / sigma[:, None]
    best = torch.tensor([0, 3, 4])
    worst = torch.tensor([1, 2, 5])
    errors, ref_errors = (((w - target) ** 2).mean(1)[torch.stack([best, worst])] for w in (v, v_ref))
    expected, expected_metrics = dpo_loss(errors, ref_errors, 3.0)
    assert loss.item() == pytest.approx(expected.item() / 3)
    assert metrics["actor/margin"].item() == pytest.approx(expected_metrics["actor/margin"].item())


@pytest.mark.fast
def test_online_dpo_marks_the_best_and_the_worst(scripts):
    rewards = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.3, 0.3, 0.2, 0.2, 0.9])
    marks = scripts["online_dpo"].compute_advantages(rewards, 3)
    assert marks.tolist() == [-1, 1, 0, 0, 0, 0, -1, 0, 1]
    assert scripts["online_dpo"].optimality(marks, "continuous", 1.0).tolist()[:3] == [0, 1, 0.5]


# ---- as users run them -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", BASES)
def test_a_script_runs_on_one_rank_and_two(checkout, name):
    """With the same first update: the groups that a loss takes are whole on every rank."""
    options = [*RUN, 2 if name == "online_dpo" else 4, "--num_steps", 2]
    options += [*few_eval_prompts(checkout), "--reward", brightness_reward(checkout)]
    runs = []
    for nproc in (1, 2):
        torchrun(checkout, checkout / f"{name}.py", "--name", f"{name}{nproc}", *options, nproc=nproc)
        runs.append(read_metrics(checkout / "runs" / f"{name}{nproc}"))
    one, two = runs
    assert one[1]["critic/rewards/mean"] == pytest.approx(two[1]["critic/rewards/mean"], abs=1e-6)
    for metric in ("actor/loss", "actor/grad_norm"):
        assert two[1][metric] == pytest.approx(one[1][metric], rel=1e-3, abs=1e-5), metric
    assert one[2]["actor/grad_norm"] > 0 and one[2]["actor/skipped_steps"] == 0 and "val/brightness/mean" in one[2]


@pytest.mark.parametrize("name", BASES)
def test_nothing_is_learned_from_a_constant_reward(checkout, name):
    options = [*RUN, 4, "--num_steps", 1, *few_eval_prompts(checkout), "--reward", constant_reward(checkout)]
    torchrun(checkout, checkout / f"{name}.py", "--name", f"constant_{name}", *options)
    assert read_metrics(checkout / "runs" / f"constant_{name}")[1]["actor/grad_norm"] == 0


def test_groups_that_are_cut_are_refused(checkout):
    for name, size, fault in (("dgpo", 2, "whole groups of 4"), ("online_dpo", 1, "whole pairs")):
        done = torchrun(checkout, checkout / f"{name}.py", "--name", "cut", *RUN, size, check=False)
        assert f"--micro_batch_size {size}: must hold {fault}" in done.stdout
