"""The policies of a run: which acts, which is trained, what follows; the KL to the reference; memory and dtype."""

import copy
import functools
import importlib
import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import flow_grpo
from benchmarks import fsdp_kernels
from common import distributed as sharding
from common.data import GroupSampler, PromptSet
from common.engine.client import EngineError
from common.errors import RolloutError, RunError
from common.models.loading import family_class
from common.models.stable_diffusion_3 import StableDiffusion3
from common.options import SharedArgs
from common.run.checks import check_lora_modules
from common.run.inputs import Inputs, choose_sizes
from common.run.run import Run
from common.sde import sde_step
from common.weights import policy as policies
from common.weights import start
from common.weights.lora import make_lora, save_policy
from common.weights.policy import (
    acting,
    add_policies,
    choose_adam_kernel,
    follow,
    load_policy_tensors,
    tensors_on_rank_0,
    use_policy,
    whole,
)
from common.weights.states import load_training_state, training_state
from tests.conftest import (
    EMBEDDED,
    SCRIPTS,
    TINY,
    UNTIMED,
    assert_same,
    brightness_reward,
    checked,
    embedded_model,
    few_eval_prompts,
    lora_of,
    new_run,
    prompt_set,
    read_metrics,
    run_here,
    torchrun,
    whole_checkpoint,
)

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

NAMES = ["default", "old", "ema", "reference"]
PROMPTS = ['a red sign that says "12"', 'a blue sign that says "345"']


@pytest.fixture(scope="module")
def lora_file(tmp_path_factory):
    """A LoRA of rank 4 that acts, in a folder as a run saves it."""
    folder = tmp_path_factory.mktemp("lora")
    model = embedded_model()
    add_policies(model, make_lora(type(model), rank=4, alpha=8), ["default"], seed=1)
    disturb(model, "default", 0.05)
    save_policy(folder, model, "default")
    return folder


@torch.no_grad()
def disturb(model, name, size=1e-3, seed=5):
    """Move policy `name`: a LoRA's B, or all of its weights; sharded ones too."""
    generator = torch.Generator().manual_seed(seed)
    for key, p in model.policies[name].named_parameters():
        if f".lora_B.{name}." in key or "lora_" not in key and not hasattr(model.transformer, "peft_config"):
            local = p.to_local() if hasattr(p, "to_local") else p
            local += torch.randn(local.shape, generator=generator) * size


@pytest.fixture(params=["lora", "lora_path", "full"])
def model(request, lora_file):
    """The embedded model with all four policies, unsharded, `default` and `ema` moved off the others."""
    model = embedded_model()
    path = lora_file if request.param == "lora_path" else None
    rank = 0 if request.param == "full" else 4
    add_policies(model, make_lora(type(model), path=path, rank=rank, alpha=8), NAMES, seed=1)
    if request.param == "full":  # what sharding does: until then they share their memory
        for policy in model.policies.values():
            for parameter in policy.parameters():
                parameter.data = parameter.data.clone()
    model.kind = request.param
    disturb(model, "default", seed=6)
    disturb(model, "ema", seed=7)
    return model


@pytest.mark.fast
def test_full_weights_are_saved_in_the_runs_dtype_and_a_lora_in_fp32(model, tmp_path):
    save_policy(tmp_path, model, "default", "bfloat16")
    (file,) = tmp_path.glob("*.safetensors")
    dtype = torch.bfloat16 if model.kind == "full" else torch.float32
    assert {tensor.dtype for tensor in load_file(file).values()} == {dtype}


def velocity(model, name):
    conditioning = model.encode_prompts(PROMPTS, 16)
    x = torch.randn(2, *model.schedule(2, 32, 96)[2], generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), acting(model, name):
        return model.predict_velocity(x, torch.tensor(700.0), conditioning)


def whole_state(model):
    """Everything that a pass of another policy could leave changed."""
    transformer = model.transformer
    state = {
        "params": [(name, p.requires_grad, p.detach().clone()) for name, p in transformer.named_parameters()],
        "training": [m.training for m in transformer.modules()],
        "which": id(transformer),
        "adapters": [
            (m._active_adapter, m._disable_adapters) for m in transformer.modules() if hasattr(m, "_disable_adapters")
        ],
        "rng": torch.get_rng_state(),
    }
    assert model.kind == "full" or state["adapters"]
    return state


def same(a, b):
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.fast
@pytest.mark.parametrize("is_new", [True, False])
def test_a_lora_is_fp32_over_a_base_in_bf16(is_new):
    """With the numbers of its file, to the bit."""
    model, another = embedded_model(torch.bfloat16), embedded_model(torch.bfloat16)
    lora = make_lora(StableDiffusion3, rank=2, alpha=2)
    add_policies(another, lora, ["default"], seed=1)
    tensors = {name: tensor + 1 / 3 for name, tensor in tensors_on_rank_0(another, "default")[0].items()}
    add_policies(model, lora if is_new else lora._replace(tensors=tensors), ["default", "ema"], seed=1)
    assert is_new or same(tensors_on_rank_0(model, "default")[0], tensors)
    for name, parameter in model.transformer.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name


@pytest.mark.fast
def test_a_lora_of_a_module_that_is_not_there_is_refused_by_its_name():
    lora = make_lora(StableDiffusion3, rank=2, alpha=2)._replace(tensors={"nowhere.lora_A.weight": torch.zeros(2, 4)})
    with pytest.raises(RunError, match="--lora_path: .*nowhere.*lora_A"):
        add_policies(embedded_model(), lora, ["default"], seed=1)


# ---- who acts --------------------------------------------------------------------------------------------------------
def test_only_default_asks_for_a_gradient_whoever_acts(model):
    trained = {
        id(p) for name, p in model.policies["default"].named_parameters() if model.kind == "full" or ".default." in name
    }
    assert len(trained) == (62 if model.kind != "full" else len(list(model.transformer.parameters())))
    for name in (*NAMES, "default"):
        use_policy(model, name)
        asking = {id(p) for policy in model.policies.values() for p in policy.parameters() if p.requires_grad}
        acting_asks = {id(p) for p in model.transformer.parameters() if p.requires_grad}
        assert asking == trained
        assert acting_asks == (trained if model.kind != "full" or name == "default" else set())


def test_a_failure_leaves_the_trained_policy_acting(model):
    """So that a run which fails in the block can save."""
    before = whole_state(model)
    with pytest.raises(RunError), acting(model, "ema"):
        raise RunError("the engine died")
    assert same(before, whole_state(model))


def test_each_policy_acts_as_itself(model):
    base = embedded_model()
    if model.kind == "lora_path":  # the reference is that adapter and not the base
        base.transformer.add_adapter(model.transformer.peft_config["reference"])
    v = {name: velocity(model, name) for name in NAMES}
    assert torch.equal(v["old"], v["reference"])  # where default began
    for a, b in (("default", "old"), ("ema", "old"), ("default", "ema")):
        assert (v[a] - v[b]).abs().max() > 1e-4, (a, b)
    base.kind, base.policies = None, {"default": base.transformer}
    with torch.no_grad():
        x = torch.randn(2, *base.schedule(2, 32, 96)[2], generator=torch.Generator().manual_seed(2))
        v_base = base.predict_velocity(x, torch.tensor(700.0), base.encode_prompts(PROMPTS, 16))
    assert torch.equal(v["reference"], v_base) == (model.kind != "lora_path")


@pytest.mark.parametrize("name", NAMES)
def test_another_policys_pass_leaves_no_trace(model, name):
    """Invariant 9: adapters, requires_grad flags, modes and RNG are as before."""
    before = whole_state(model)
    velocity(model, name)
    assert same(whole_state(model), before)


def test_follow(model):
    before = {name: tensors_on_rank_0(model, name)[0] for name in model.policies}
    follow(model, "old", 0.25)
    after = {name: tensors_on_rank_0(model, name)[0] for name in model.policies}
    for key, value in after["old"].items():
        torch.testing.assert_close(value, 0.25 * before["old"][key] + 0.75 * before["default"][key], rtol=0, atol=1e-6)
    assert not same(after["old"], before["old"])
    assert same({**after, "old": None}, {**before, "old": None})  # the others have not moved
    follow(model, "old", 0.0)
    assert same(tensors_on_rank_0(model, "old")[0], before["default"])
    assert torch.equal(velocity(model, "old"), velocity(model, "default"))


def test_policy_tensors_come_back_and_are_copies(model):
    tensors = tensors_on_rank_0(model, "ema")[0]
    kept = {key: value.clone() for key, value in tensors.items()}
    load_policy_tensors(model, "old", tensors)
    assert same(tensors_on_rank_0(model, "old")[0], kept)
    for value in tensors.values():
        value.zero_()
    assert same(tensors_on_rank_0(model, "ema")[0], kept) and same(tensors_on_rank_0(model, "old")[0], kept)


@pytest.mark.parametrize("change", ["less", "more", "shape"])
def test_tensors_of_another_policy_are_refused_in_a_line(model, change):
    tensors = tensors_on_rank_0(model)[0]
    key = sorted(tensors)[3]
    if change == "shape":
        tensors[key] = tensors[key][:-1]
    elif change == "more":
        key = "a.new.weight"
        tensors[key] = torch.zeros(1)
    else:
        del tensors[key]
    before = tensors_on_rank_0(model)[0]
    with pytest.raises(RunError) as error:
        load_policy_tensors(model, "default", tensors)
    assert key in str(error.value) and "--lora_rank" in str(error.value) and "\n" not in str(error.value)
    assert same(tensors_on_rank_0(model)[0], before)


# ---- which modules ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "exclude", "count"),
    [
        ((), (), 31),
        (("to_q", "proj_out"), (), None),
        (("attn.to_q", "ff.net.2"), (), None),
        ((), ("to_q", "to_k"), None),
        (("all-linear",), ("to_q", "norm_out.linear"), None),
    ],
)
def test_exactly_those_modules_get_a_lora(target, exclude, count):
    model = embedded_model()
    ends = target or model.lora_target_modules
    if target == ("all-linear",):
        ends = tuple(name for name, _ in model.transformer.named_modules())
    linear = torch.nn.Linear

    def chosen(name, module):
        return (
            isinstance(module, linear)
            and any(name == end or name.endswith(f".{end}") for end in ends)
            and not any(name == end or name.endswith(f".{end}") for end in exclude)
        )

    expected = {name for name, module in model.transformer.named_modules() if chosen(name, module)}
    target_modules = (*target, *(f"not:{end}" for end in exclude))
    lora = make_lora(type(model), model=str(EMBEDDED), rank=4, alpha=32, target_modules=target_modules)
    add_policies(model, lora, ["default"], seed=1)
    got = {key.rpartition(".lora_")[0] for key in tensors_on_rank_0(model)[0]}
    assert got == expected and len(got) == (count or len(got))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q",), "--lora_target_modules q: SD3Transformer2DModel .*"),  # names are whole: to_q is none
        (("to_q", "to_z"), "--lora_target_modules to_z: SD3Transformer2DModel .*"),
        (("to_q", "not:to_z"), "--lora_target_modules not:to_z: SD3Transformer2DModel .*"),
        (
            ("to_q", "attn"),
            "--lora_target_modules: transformer_blocks.0.attn .* Attention, .*",
        ),
        (
            ("pos_embed.proj",),
            "--lora_target_modules: pos_embed.proj .* Conv2d, .*",
        ),
    ],
)
def test_a_module_that_cannot_get_a_lora_is_named(targets, message):
    args = SharedArgs(lora_rank=4, lora_target_modules=targets)
    no_prompts = PromptSet([], [])
    lora = lora_of(args, StableDiffusion3)
    inputs = Inputs(StableDiffusion3, {}, {}, no_prompts, no_prompts, lora=lora, checkpoint=None)
    with pytest.raises(RunError, match=f"^{message}$"):
        checked(args, inputs)  # before a model loads


def test_modules_of_an_option_beside_a_loras_file_are_refused():
    with pytest.raises(ValueError, match="^--lora_target_modules: .*--lora_path "):
        check_lora_modules(None, {"lora_path": "lora", "lora_target_modules": ("nosuch",)})
    with pytest.raises(ValueError, match="^--lora_target_modules: .*--lora_rank 0 "):
        check_lora_modules(None, {"lora_path": None, "lora_target_modules": ("to_q",)})


def test_a_rank_that_vllm_has_no_layers_for_is_refused():
    options = {"lora_path": None, "lora_target_modules": (), "rollout": "vllm"}
    check_lora_modules(make_lora(StableDiffusion3, rank=512, alpha=8), options)
    too_large = make_lora(StableDiffusion3, rank=513, alpha=8)
    with pytest.raises(
        ValueError, match="^--rollout vllm takes a LoRA of rank 512 at most, not 513: pass --rollout lo"
    ):
        check_lora_modules(too_large, options)
    check_lora_modules(too_large, options | {"rollout": "local"})


# ---- KL --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kl_type", ["code", "paper"])
@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps_gauss"])
def test_the_optimum_in_one_dimension(sde_type, kl_type):
    """Invariant 10: reward c x, advantages neither normalised nor clipped: the mean ends at mu0 + c q^2 / b.

    The expectation over the policy's samples is exact: Gauss-Hermite nodes, their weights being those of the loss.
    """
    c, b, x = 0.8, 2.5, torch.tensor([[0.3]], dtype=torch.float64)
    s, s_next, level = 0.6, 0.35, 0.7
    q2 = {"sde": level**2 * s / (1 - s), "dance": level**2, "cps_gauss": (s_next * math.sin(level * math.pi / 2)) ** 2}[
        sde_type
    ]
    if sde_type != "cps_gauss" and not (kl_type == "code" and sde_type == "sde"):
        q2 *= s - s_next  # std^2
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(20))
    weights = weights / weights.sum() * len(nodes)  # policy_loss takes the mean

    def step(v, **kwargs):
        return sde_step(x.expand(20, 1), v.expand(20, 1), s, s_next, level, sde_type=sde_type, **kwargs)

    args = flow_grpo.Args(sde_type=sde_type, kl_type=kl_type)
    ref = step(torch.tensor(0.2).double(), noise=nodes[:, None])
    ref_mean = ref.prev_sample_mean
    v = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([v], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.985)
    for _ in range(600):
        with torch.no_grad():
            drawn = step(v, noise=nodes[:, None])
        out = step(v, prev_sample=drawn.prev_sample)
        loss, _ = flow_grpo.policy_loss(out.log_prob, drawn.log_prob, c * drawn.prev_sample[:, 0], 1e9, weights)
        kl = flow_grpo.kl_divergence(args, out, ref_mean, ref.velocity, s_next - s).mean()
        optimizer.zero_grad()
        (loss + b * kl).backward()
        optimizer.step()
        scheduler.step()
    found = step(v, noise=nodes[:, None]).prev_sample_mean[0, 0].item()
    assert found == pytest.approx(ref_mean[0, 0].item() + c * q2 / b, abs=1e-3)
    assert abs(c * q2 / b) > 0.01 and kl.item() == pytest.approx((c * q2 / b) ** 2 / (2 * q2), abs=1e-3)


def rollout_of(args, model, sde_steps=(1, 2)):
    drawn = prompt_set(PROMPTS)
    places = torch.tensor([0, 0, 1, 1])
    request = flow_grpo.make_request(args, model, drawn, places, [1, 2, 3, 4], sde_steps)
    return request, flow_grpo.rollout(args, model, None, request)


def inputs_of(args, rewards=None):
    """What `prepare` would load, except for the prompts."""
    family = family_class(EMBEDDED)
    lora = lora_of(args, family)
    prompts = PromptSet(PROMPTS, [{}] * len(PROMPTS))
    return Inputs(family, rewards, rewards, train_set=prompts, eval_set=prompts, lora=lora, checkpoint=None)


def policy(lora_path=None, **changes):
    """flow_grpo's arguments, and in this process its policy and the parameters that are trained."""
    args = flow_grpo.Args(
        rollout="local",
        num_inference_steps=4,
        updates_per_rollout=1,
        lora_path=lora_path and str(lora_path),
        **changes,
    )
    return args, *flow_grpo.load_policy(args, inputs_of(args), torch.device("cpu"))


def batch_of(module, request, trajectories, advantages):
    """A local rollout as a script's update takes it."""
    ones = torch.ones_like(trajectories.log_probs)
    old = module.OldPolicy(trajectories.log_probs, trajectories.prev_sample_means, ones)
    return module.Batch(request, trajectories, old, advantages)


def one_update(args, model, optimizer, advantages):
    """An update on four images; Adam-free with an SGD optimizer of rate 1, whose change is minus the gradient."""
    return flow_grpo.update(args, UNTIMED, model, optimizer, batch_of(flow_grpo, *rollout_of(args, model), advantages))


ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -2.0])


@pytest.mark.fast
def test_what_adams_epsilon_does_to_a_learning_rate():
    """--help and docs/flow_grpo.md: at gradients of 5e-9, 1e-8 makes a step a third of what 1e-15 makes it."""
    moved = {}
    for eps in (flow_grpo.Args().adam_eps, 1e-8):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([weight], lr=3e-4, eps=eps)
        for _ in range(3):
            weight.grad = torch.tensor([5e-9])
            optimizer.step()
        moved[eps] = -weight.item()
    assert moved[1e-15] == pytest.approx(3 * 3e-4, rel=1e-4)
    assert moved[1e-8] == pytest.approx(3e-4, rel=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_resumed_run_steps_with_its_own_settings(script, monkeypatch):
    """Adam's state brings the settings of the run that saved it; --weight_decay, --adam_betas and --adam_eps win."""
    module = importlib.import_module(script.removesuffix(".py"))
    weight = torch.nn.Parameter(torch.zeros(1))
    saved = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5, eps=1e-15).state_dict()
    monkeypatch.setattr(module, "load_training_state", lambda model, optimizer, state: optimizer.load_state_dict(saved))
    args = module.Args(weight_decay=0.25, adam_betas=(0.5, 0.75), adam_eps=1e-8)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    sampler = GroupSampler(4, 4, 2, seed=1, rank=0, world_size=1)
    run = SimpleNamespace(load_checkpoint=lambda: {"sampler": sampler.state_dict()}, repair_adapter=lambda *_: None)
    module.load(args, run, None, optimizer, sampler)
    [group] = optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.25, (0.5, 0.75), 1e-8)


@pytest.mark.parametrize("kind", ["lora", "lora_path", "full"])
def test_kl_is_zero_at_first_and_its_gradient_is_not_after_a_step(kind, lora_file, one_rank):
    """Invariant 9, in an update without any advantage: what moves is the KL's doing."""
    args, model, trained = policy(
        lora_file if kind == "lora_path" else None,
        kl_coef=0.5,
        learning_rate=1e-3,
        lora_rank=0 if kind == "full" else 16,
        weight_decay=0.0,
    )
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, eps=args.adam_eps)
    reference = tensors_on_rank_0(model, "reference")[0] if "reference" in model.policies else {}
    metrics = one_update(args, model, optimizer, 0 * ADVANTAGES)
    assert metrics["actor/kl_loss"] == 0 and metrics["actor/grad_norm"] == 0
    metrics = one_update(args, model, optimizer, ADVANTAGES)
    assert metrics["actor/kl_loss"] == 0 and metrics["actor/grad_norm"] > 0
    first = one_update(args, model, optimizer, 0 * ADVANTAGES)
    assert first["actor/kl_loss"] > 0 and first["actor/grad_norm"] > 0
    args.learning_rate = 0.1
    optimizer = torch.optim.SGD(trained)  # no momentum from the steps before
    kl = [one_update(args, model, optimizer, 0 * ADVANTAGES)["actor/kl_loss"] for _ in range(3)]
    assert kl[0] > kl[1] > kl[2] > 0  # back towards the reference
    if reference:
        assert same(tensors_on_rank_0(model, "reference")[0], reference)


# ---- optimizer steps -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [4, 0])
def test_average_and_warm_up_by_hand(rank, one_rank):
    args, model, trained = policy(ema_decay=0.26, lr_schedule="constant:4", learning_rate=2e-3, lora_rank=rank)
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0)
    average = tensors_on_rank_0(model, "ema")[0]
    start = copy.deepcopy(average)
    rates = []
    for k in (None, 1, 2, None, 3, 4, 5, 6):
        gradient = math.nan if k is None else 0.1 * k
        for p in trained:
            p.grad = torch.zeros_like(p) + gradient
        flow_grpo.optimizer_step(args, model, optimizer)
        if k:  # 2/11, 3/12, then ema_decay, as 4/13 is above it
            decay, default = min(0.26, (1 + k) / (10 + k)), tensors_on_rank_0(model)[0]
            average = {key: decay * v + (1 - decay) * default[key] for key, v in average.items()}
            rates.append(optimizer.param_groups[0]["lr"])
        for key, value in tensors_on_rank_0(model, "ema")[0].items():
            torch.testing.assert_close(value, average[key], rtol=0, atol=5e-7)
    assert rates == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3, 2e-3])
    assert not same(average, start)


def test_a_gradient_is_scaled_down_to_max_grad_norm_and_never_up(one_rank):
    args, model, trained = policy(max_grad_norm=0.5, learning_rate=1.0, lora_rank=4, lr_schedule="constant")
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for norm, moved_by in ((2.0, 0.5), (0.25, 0.25)):
        before = tensors_on_rank_0(model)[0]
        for p in trained:
            p.grad = torch.zeros_like(p) + norm / math.sqrt(sum(p.numel() for p in trained))
        assert flow_grpo.optimizer_step(args, model, optimizer) == pytest.approx(norm, rel=1e-4)
        moved = [value - before[key] for key, value in tensors_on_rank_0(model)[0].items()]
        assert torch.cat([m.flatten() for m in moved]).norm().item() == pytest.approx(moved_by, rel=1e-3)


def test_the_seed_is_that_of_every_generator(one_rank):
    """A reward may draw from any."""
    draws = []
    for seed in (5, 5, 6):
        policy(seed=seed)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))  # noqa: NPY002
    assert draws[0] == draws[1] and all(one != other for one, other in zip(draws[0], draws[2], strict=True))


def test_a_checkpoint_before_the_first_optimizer_step_takes_none(one_rank, tmp_path):
    """torch would step Adam once, to have a state to save: warm-up, average and Adam itself would be one ahead."""
    args, model, trained = policy(name="run", ema_decay=0.9, resume="latest")
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    sampler = GroupSampler(8, 4, 4, seed=1)
    args = replace(args, name=str(tmp_path / args.name))
    run = Run(args, {})
    run.best_score = 0.5
    run.step = 1
    flow_grpo.save(args, run, model, optimizer, sampler)
    assert not optimizer.state
    resumed = Run(args, {}, checkpoint=run.folder / "checkpoints" / "step_000001.pt")
    flow_grpo.load(args, resumed, model, optimizer, sampler)
    assert (resumed.step, resumed.best_score) == (1, 0.5)
    assert not optimizer.state
    for p in trained:
        p.grad = torch.ones_like(p)
    flow_grpo.optimizer_step(args, model, optimizer)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    run.step = 2
    flow_grpo.save(args, run, model, optimizer, sampler)
    other = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.5)
    changed = replace(args, resume=str(run.folder), name="another", weight_decay=0.5)
    another = Run(changed, {}, checkpoint=run.folder / "checkpoints" / "step_000002.pt")
    flow_grpo.load(changed, another, model, other, sampler)
    assert (another.step, another.best_score) == (2, -math.inf)  # the best one is another run's
    assert {int(state["step"]) for state in other.state.values()} == {1}
    assert other.param_groups[0]["weight_decay"] == 0.5


def test_evaluation_uses_the_average_and_leaves_the_trained_weights_alone(one_rank, tmp_path):
    args, model, trained = policy(ema_decay=0.9, eval_num_inference_steps=3)
    disturb(model, "default", 0.1)
    inputs = inputs_of(args, {"zero": lambda images, prompts, metadata: [0.0] * len(images)})
    run = new_run(tmp_path, inputs.eval_rewards)
    before = {name: tensors_on_rank_0(model, name)[0] for name in model.policies}
    flags = [p.requires_grad for p in model.transformer.parameters()]

    def images(ema_decay):
        _, shown = flow_grpo.evaluate(replace(args, ema_decay=ema_decay), run, model, None, inputs)
        return [image.tobytes() for image, _ in shown]

    averaged = images(0.9)
    assert same({name: tensors_on_rank_0(model, name)[0] for name in model.policies}, before)
    assert flags == [p.requires_grad for p in model.transformer.parameters()]
    assert sum(flags) == len(trained) > 0
    of_default = images(0.0)
    assert of_default != averaged
    follow(model, "ema", 0.0)
    assert images(0.9) == of_default


@pytest.mark.parametrize(("kind", "asked"), [("lora", [False, True]), ("full", [True, True])])
@pytest.mark.parametrize("script", ["flow_grpo", "grpo_guard", "mix_grpo"])
def test_gradients_are_exchanged_once_per_update_and_of_full_weights_in_every_pass(script, kind, asked, one_rank):
    """Four passes; FSDP hears only of changes. Otherwise full weights' gradients would be kept whole."""
    module = importlib.import_module(script)
    args, model, _ = policy(lora_rank=4 if kind == "lora" else 0)
    batch = batch_of(module, *rollout_of(args, model), ADVANTAGES)
    calls = []
    model.transformer.set_requires_gradient_sync = calls.append
    module.accumulate_gradients(module.Args(micro_batch_size=2), model, batch, torch.arange(4), None)
    assert calls == asked


def test_the_references_means_are_computed_once_a_rollout(one_rank, monkeypatch):
    args, model, trained = policy(kl_coef=0.5, epochs_per_rollout=2)
    args.updates_per_rollout = 2
    acted = []
    real = flow_grpo.acting
    monkeypatch.setattr(flow_grpo, "acting", lambda model, name, *more: acted.append(name) or real(model, name, *more))
    one_update(args, model, torch.optim.SGD(trained), ADVANTAGES)
    assert acted == ["reference"]


# ---- sampling in batches of its own ----------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("rollout_batch_size", [0, 2, 3, 4])
def test_images_are_sampled_in_batches_of_their_own(rollout_batch_size, one_rank, monkeypatch):
    """By default in the update's, whose log-probs are the rollout's. Of other batches they are taken again, as the
    update computes them."""
    args, model, _ = policy(micro_batch_size=2, rollout_batch_size=rollout_batch_size, kl_coef=0.0)
    request, _ = rollout_of(args, model)
    sizes = []
    real = flow_grpo.sample_locally
    monkeypatch.setattr(
        flow_grpo, "sample_locally", lambda model, part: sizes.append(len(part.seeds)) or real(model, part)
    )
    trajectories = flow_grpo.rollout(args, model, None, request)
    assert sizes == {3: [3, 1], 4: [4]}.get(rollout_batch_size, [2, 2])
    old, metrics = flow_grpo.find_old_policy(args, model, None, request, trajectories)
    assert metrics == {}
    of_the_update = flow_grpo.recompute_log_probs(args, model, request, trajectories).log_probs
    assert torch.equal(old.log_probs, of_the_update)
    assert (old.log_probs is trajectories.log_probs) == (rollout_batch_size in (0, 2))
    # images of a further rollout were in other batches
    old, _ = flow_grpo.find_old_policy(replace(args, max_rollouts=2), model, None, request, trajectories)
    assert old.log_probs is not trajectories.log_probs and torch.equal(old.log_probs, of_the_update)


@pytest.mark.fast
def test_log_probs_of_other_batches_are_refused_as_old_ones():
    """Of the size that `check` has lowered: 64 images in two updates are micro-batches of 32 at most."""
    given = {"rollout": "local", "num_prompts": 8, "group_size": 8, "micro_batch_size": 64, "old_log_prob": "rollout"}

    def choose(**more):
        args = flow_grpo.check(flow_grpo.Args(**given | more))
        return choose_sizes(args, inputs_of(args, {}), flow_grpo.workload(args))

    assert choose(rollout_batch_size=32).micro_batch_size == 32
    choose(rollout_batch_size=64, old_log_prob="recompute")
    with pytest.raises(RunError, match="--rollout_batch_size 64: .*32.*--old_log_prob recompute"):
        choose(rollout_batch_size=64)


@pytest.mark.fast
def test_a_script_that_does_not_pass_ranks_per_image_on_is_refused():
    """As a copy of one from before the option: its ranks would each make whole images."""
    args = flow_grpo.check(flow_grpo.Args(rollout="local"))
    with pytest.raises(RunError, match="--ranks_per_image 2: .* setup_distributed"):
        choose_sizes(replace(args, ranks_per_image=2), inputs_of(args, {}), flow_grpo.workload(args))


# ---- the optimizer ---------------------------------------------------------------------------------------------------
OPTIMIZERS = {
    "adamw": lambda trained: torch.optim.AdamW(trained, lr=9.0),
    "sgd": lambda trained: torch.optim.SGD(trained, lr=9.0),  # which keeps no state at all
    "momentum": lambda trained: torch.optim.SGD(trained, lr=9.0, momentum=0.9),
    "adagrad": lambda trained: torch.optim.Adagrad(trained, lr=9.0),
}


def steps_with(optimizer, args, model, trained, numbers):
    """Optimizer steps with made-up gradients, which depend on the step's number. Returns the rates."""
    rates = []
    for number in numbers:
        for i, p in enumerate(trained):
            p.grad = torch.full_like(p, 0.01 * number + 0.001 * i)
        flow_grpo.optimizer_step(args, model, optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.fast
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rate_and_average_count_the_steps_of_any_optimizer(name, one_rank, tmp_path):
    """Not all of them keep a count: after 3 of 6 steps a resumed run goes on to the bit, with its own kernels."""
    options = {"lr_schedule": "linear:3", "num_steps": 6, "learning_rate": 0.3, "ema_decay": 0.9, "kl_coef": 0.0}
    args, model, trained = policy(**options)
    optimizer = OPTIMIZERS[name](trained)
    assert steps_with(optimizer, args, model, trained, (1, 2, 3)) == pytest.approx([0.1, 0.2, 0.3])
    assert model.num_updates == 3
    state = training_state(model, optimizer, tmp_path / "step_000003.pt") | {"path": tmp_path / "step_000003.pt"}
    torch.save(state, tmp_path / "state.pt")
    later = steps_with(optimizer, args, model, trained, (4, 5, 6))
    assert later == pytest.approx([0.3 * part for part in (0.75, 0.5, 0.25)])

    args, resumed, trained = policy(**options)
    optimizer = OPTIMIZERS[name](trained)
    optimizer.param_groups[0]["foreach"] = False
    load_training_state(resumed, optimizer, torch.load(tmp_path / "state.pt", weights_only=False))
    assert resumed.num_updates == 3 and optimizer.param_groups[0]["foreach"] is False
    assert steps_with(optimizer, args, resumed, trained, (4, 5, 6)) == later
    for policy_name in ("default", "ema"):
        once, again = (tensors_on_rank_0(each, policy_name)[0] for each in (model, resumed))
        assert all(torch.equal(tensor, again[key]) for key, tensor in once.items()), policy_name

    # a copy's `load` that still sets betas, of an optimizer that has none: the next start loads what was saved then
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    state = training_state(resumed, optimizer, tmp_path / "again.pt") | {"path": tmp_path / "again.pt"}
    another = OPTIMIZERS[name](trained)
    load_training_state(resumed, another, state)
    assert ("betas" in another.param_groups[0]) == (name == "adamw") and resumed.num_updates == 6


@pytest.mark.fast
def test_a_lora_without_a_gradient_yet_begins_its_moments_after_a_resume(one_rank, tmp_path):
    """As the transformer of low noise, where the first steps train that of high noise: torch would count a step."""
    args, model, trained = policy(lr_schedule="constant", learning_rate=0.3)
    optimizer = torch.optim.AdamW(trained, lr=0.3)
    steps_with(optimizer, args, model, trained[:4], (1, 2))
    torch.save(training_state(model, optimizer, tmp_path / "s.pt") | {"path": tmp_path / "s.pt"}, tmp_path / "state.pt")
    steps_with(optimizer, args, model, trained, (3, 4))

    args, resumed, trained = policy(lr_schedule="constant", learning_rate=0.3)
    optimizer = torch.optim.AdamW(trained, lr=0.3)
    load_training_state(resumed, optimizer, torch.load(tmp_path / "state.pt", weights_only=False))
    assert len(optimizer.state) == 4
    steps_with(optimizer, args, resumed, trained, (3, 4))
    once, again = (tensors_on_rank_0(each)[0] for each in (model, resumed))
    assert all(torch.equal(tensor, again[key]) for key, tensor in once.items())


@pytest.mark.fast
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_chosen_adam_steps_on_shards_and_has_the_numbers_of_torchs(lora_rank, one_rank, monkeypatch):
    """Weights and moments, which stay tensors of FSDP; torch works out no sharding of operators over all tensors."""
    options = {"lr_schedule": "constant", "learning_rate": 0.3, "lora_rank": lora_rank, "kl_coef": 0.0}
    settings = {"lr": 0.3, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}
    args, expected, trained = policy(**options)
    reference = torch.optim.AdamW(trained, **settings)
    steps_with(reference, args, expected, trained, (1, 2, 3))

    args, model, trained = policy(**options)
    optimizer = choose_adam_kernel(torch.optim.AdamW(trained, **settings), model)
    assert optimizer.param_groups[0] | {"params": [], "foreach": None, "fused": None} == (
        reference.param_groups[0] | {"params": [], "foreach": None, "fused": None}
    )
    seen = []
    module = importlib.import_module("torch.optim.adam")
    adam = module.adam
    monkeypatch.setattr(module, "adam", lambda *lists, **rest: (seen.append(lists), adam(*lists, **rest)))
    steps_with(optimizer, args, model, trained, (1, 2, 3))
    assert len(seen) == 3 and not any(isinstance(one, DTensor) for lists in seen for part in lists for one in part)
    assert_same(tensors_on_rank_0(model)[0], tensors_on_rank_0(expected)[0])
    for one, other in zip(optimizer.state.values(), reference.state.values(), strict=True):
        assert isinstance(one["exp_avg"], DTensor)
        assert_same({k: whole(v) for k, v in one.items()}, {k: whole(v) for k, v in other.items()})


@pytest.mark.fast
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_another_optimizer_of_a_copy_stays_what_it_is(name):
    optimizer = OPTIMIZERS[name]([torch.nn.Parameter(torch.ones(2))])
    assert choose_adam_kernel(optimizer, None) is optimizer
    with pytest.raises(RunError, match="--adam_bits 8: .* (SGD|Adagrad)"):
        choose_adam_kernel(optimizer, None, 8)


@pytest.mark.fast
def test_an_optimizer_of_32_bits_is_refused_where_8_are_asked_for(one_rank):
    """As in a copy of a script that does not take what choose_adam_kernel returns."""
    args, model, trained = policy()
    model.adam_bits = 8
    with pytest.raises(RunError, match="--adam_bits 8: "):
        steps_with(torch.optim.AdamW(trained), args, model, trained, (1,))


@pytest.mark.fast
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_step_of_any_optimizer_drops_the_weights_that_passes_left_whole(lora_rank, one_rank):
    """Where FSDP kept what a pass had cast, the next pass would run on the weights from before the step. No script
    calls anything for it."""
    args, model, trained = policy(lora_rank=lora_rank, dtype="bfloat16", kl_coef=0.0)
    request, trajectories = rollout_of(args, model)

    def velocity():
        with torch.no_grad():
            x = trajectories.latents[:, 0]
            return model.predict_velocity(x, request.timesteps[0], request.select(torch.arange(len(x))).conditioning)

    before = velocity()
    assert torch.equal(before, velocity())
    for p in trained:
        p.grad = torch.full_like(p, 1.0)
    torch.optim.SGD(trained, lr=0.1).step()
    assert not torch.equal(before, velocity())


@pytest.mark.fast
def test_another_optimizer_leaves_the_policies_alone(one_rank, monkeypatch):
    """A reward that trains a network of its own steps in its thread while the trainer passes."""
    _, model, trained = policy(kl_coef=0.0)
    resharded = []
    monkeypatch.setattr("common.weights.sharding.reshard", resharded.append)
    own = torch.nn.Linear(3, 1)
    own(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(own.parameters(), lr=0.1).step()
    assert resharded == []
    for p in trained:
        p.grad = torch.zeros_like(p)
    torch.optim.SGD(trained, lr=0.1).step()
    assert model.transformer in resharded


@pytest.mark.fast
def test_a_policy_that_no_checkpoint_holds_cannot_follow(one_rank):
    _, model, _ = policy(kl_coef=0.1, lora_rank=0)
    with pytest.raises(ValueError, match="reference"):
        follow(model, "reference", 0.9)


# ---- shards ----------------------------------------------------------------------------------------------------------
def test_weights_are_gathered_once_to_sample(tmp_path):
    """By two ranks, of 4 blocks and the root, 4 images, 2 at once, 3 steps: each of them once, or in every pass, but
    for the root's, which stay. The images are equal to the bit, also after the weights have changed. Offloaded weights
    are not kept."""
    torchrun(tmp_path, "tests/gathers.py", tmp_path / "out.json", nproc=2)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["same"] == [True, True] and found["moved"]
    assert found["gathers"] == {"once": 4 + 1, "by block": 4 * 2 * 3 + 1, "cpu_offload": 4 * 2 * 3 + 1}

    model, args = embedded_model(), flow_grpo.Args()
    lora = lora_of(args, type(model))
    add_policies(model, lora, ["default", "ema"], seed=1)
    num_bytes = sum(p.nbytes for p in model.transformer.parameters())  # with both adapters, whichever acts
    assert found["bytes"] == pytest.approx(num_bytes, rel=0.002)  # FSDP pads


@pytest.mark.parametrize(
    ("world", "of_a_node", "shard_ranks", "shape"),
    [(2, 2, 0, (2,)), (4, 2, 0, (2, 2)), (4, 4, 2, (2, 2)), (4, 2, 1, (4, 1)), (1, 1, 0, (1,))],
)
def test_over_which_ranks_the_weights_are_sharded(world, of_a_node, shard_ranks, shape, monkeypatch):
    """Over those of a node, each node with a copy, where --shard_ranks does not say."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_a_node))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    monkeypatch.setattr(sharding, "init_device_mesh", lambda device, shape, mesh_dim_names: (shape, mesh_dim_names))
    names = ("replicate", "shard")[-len(shape) :]
    assert sharding.shard_mesh(torch.device("cpu"), shard_ranks) == (shape, names)


def test_fsdp_adds_few_operators_to_a_lora_that_a_rank_has_whole(one_rank):
    """At SD3.5-medium's module count it was 1.61 and 1.51 while frozen weights were FSDP's, and 1.33 and 1.29 while the
    LoRA was cast in every pass."""
    bare = fsdp_kernels.count_passes(fsdp_kernels.without_fsdp)
    sharded = fsdp_kernels.count_passes(fsdp_kernels.as_flow_grpo)
    assert bare["forward"] > 3000
    for kind in ("forward", "forward and backward", "last of a step"):
        assert sharded[kind] <= 1.06 * bare[kind], kind
    assert sharded["first forward"] <= 1.34 * bare["first forward"]  # which casts the LoRA


@pytest.mark.parametrize(("changes", "is_out"), [({}, True), ({"train_with": ("cpu_offload",)}, False)])
def test_frozen_weights_are_left_out_of_fsdp_in_the_dtype_of_a_pass(changes, is_out, one_rank):
    """Those of a LoRA that a rank has whole; offloaded ones come from the CPU, block by block."""
    _, model, trained = policy(dtype="bfloat16", ema_decay=0.5, **changes)
    frozen = [p for name, p in model.transformer.named_parameters() if "lora_" not in name]
    assert {isinstance(p, DTensor) for p in frozen} == {not is_out}
    assert {p.dtype for p in frozen} == {torch.bfloat16} and (set(frozen) == model.unsharded) == is_out
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in trained)


def test_what_passes_have_cast_is_not_what_is_stepped_averaged_or_saved(one_rank):
    """In bf16, where the two differ: a pass leaves the LoRA cast, and the fp32 one stays the policy."""
    args, model, trained = policy(dtype="bfloat16", ema_decay=0.5, learning_rate=0.1)
    disturb(model, "default", 0.05)
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    own = tensors_on_rank_0(model)[0]
    before = velocity(model, "default")
    assert not any(isinstance(p, DTensor) for p in model.transformer.parameters())  # the cast ones
    assert same(tensors_on_rank_0(model)[0], own) and not same({k: v.bfloat16().float() for k, v in own.items()}, own)

    velocity(model, "default")
    follow(model, "ema", 0.0)
    assert same(tensors_on_rank_0(model, "ema")[0], own)
    assert torch.equal(velocity(model, "ema"), before)

    for p in trained:
        p.grad = torch.ones_like(p)
    velocity(model, "default")
    args.ema_decay = 0.0  # to follow would put the shards back too
    flow_grpo.optimizer_step(args, model, optimizer)
    assert not torch.equal(velocity(model, "default"), before)
    stepped = tensors_on_rank_0(model)[0]
    assert all(not torch.equal(stepped[key], own[key]) for key in own)

    load_policy_tensors(model, "default", own)  # as a resumed run does
    assert torch.equal(velocity(model, "default"), before)


def test_policies_of_full_weights_share_their_memory_until_they_are_sharded():
    model = embedded_model()
    add_policies(model, None, ["default", "ema", "reference"], seed=1)
    for name in ("ema", "reference"):
        pairs = zip(model.policies["default"].parameters(), model.policies[name].parameters(), strict=True)
        assert all(one.data_ptr() == other.data_ptr() and one is not other for one, other in pairs)


def test_full_weights_become_fp32_a_block_at_a_time(one_rank, monkeypatch):
    """As FSDP takes it: no rank holds the whole model in fp32 beside its shards."""
    most = 0
    real = flow_grpo.fully_shard

    def observed(module, **options):
        nonlocal most
        whole = [p for p in model_of[0].transformer.parameters() if not isinstance(p, DTensor)]
        most = max(most, sum(p.numel() for p in whole if p.dtype == torch.float32))
        real(module, **options)

    model_of = []
    real_add = start.add_policies
    monkeypatch.setattr(start, "add_policies", lambda model, *more: model_of.append(model) or real_add(model, *more))
    monkeypatch.setattr(flow_grpo, "fully_shard", observed)
    _, model, _ = policy(lora_rank=0, dtype="bfloat16")
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.transformer.transformer_blocks]
    total = sum(p.numel() for p in model.transformer.parameters())
    assert 0 < most <= max(*blocks, total - sum(blocks))


# ---- what it is trained with -----------------------------------------------------------------------------------------
def gradient(**changes):
    """(gradient {name: tensor}, metrics, calls of the first block) of one update, by an SGD step of rate 1."""
    args, model, trained = policy(learning_rate=1.0, max_grad_norm=1e9, kl_coef=0.0, **changes)
    disturb(model, "default", 0.02)
    before = tensors_on_rank_0(model)[0]
    batch = batch_of(flow_grpo, *rollout_of(args, model), ADVANTAGES)
    calls = []
    model.transformer.transformer_blocks[0].attn.register_forward_pre_hook(lambda *_: calls.append(1))
    metrics = flow_grpo.update(args, UNTIMED, model, torch.optim.SGD(trained, lr=1.0), batch)
    return {key: before[key] - v for key, v in tensors_on_rank_0(model)[0].items()}, metrics, len(calls)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The gradient that all memory savers should give."""
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        found = gradient()
    torch.distributed.destroy_process_group()
    return found


def assert_same_gradient(found, plain, tolerance):
    assert max(v.abs().max() for v in plain[0].values()) > 1e-4
    for key, value in plain[0].items():
        torch.testing.assert_close(found[0][key], value, rtol=0, atol=tolerance)
    for name in ("actor/loss", "actor/grad_norm"):
        assert found[1][name] == pytest.approx(plain[1][name], abs=tolerance)


def test_activation_checkpointing_recomputes_and_gives_the_same_gradient(plain, one_rank):
    found = gradient(train_with=("activation_checkpointing",))
    assert plain[2] == 2 and found[2] == 4  # two trained steps, forward; and again in their backward passes
    assert_same_gradient(found, plain, 1e-6)


def test_cpu_offload_gives_the_same_gradient(plain, one_rank):
    assert_same_gradient(gradient(train_with=("cpu_offload",)), plain, 1e-6)


def test_compiled_blocks_give_the_same_gradient(plain, one_rank, monkeypatch):
    """The graphs alone, which takes seconds; tests/models/test_families.py has inductor translate them to C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    found = gradient(train_with=("compile",))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it did compile
    assert_same_gradient(found, plain, 1e-5)


def test_other_batches_compile_blocks_again_twice(one_rank, monkeypatch):
    """A last smaller micro-batch of an evaluation, once for all sizes; and one image alone, a batch of one without
    guidance. The update compiles nothing again."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()  # sizes that other tests have shown to it
    torch._dynamo.utils.counters.clear()
    changes = {"train_with": ("compile",), "micro_batch_size": 4, "eval_num_inference_steps": 2}
    args, model, trained = policy(**changes)
    optimizer = torch.optim.SGD(trained, lr=0.1)
    prompts = prompt_set(PROMPTS)
    eval_args = replace(args, num_inference_steps=args.eval_num_inference_steps)

    def evaluate_and_train(num_images):
        """Whether anything was compiled."""
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        places = torch.zeros(num_images, dtype=torch.long)
        request = flow_grpo.make_request(eval_args, model, prompts, places, list(range(num_images)))
        flow_grpo.rollout(eval_args, model, None, request)
        one_update(args, model, optimizer, ADVANTAGES)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs

    assert evaluate_and_train(4) and not evaluate_and_train(8)
    compiled = [evaluate_and_train(num_images) for num_images in (7, 5, 6)]
    assert compiled == [True, True, False]


def test_bfloat16_keeps_what_is_trained_in_fp32(one_rank):
    args, model, trained = policy(dtype="bfloat16", ema_decay=0.5)
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    metrics = one_update(args, model, optimizer, ADVANTAGES)
    assert metrics["actor/grad_norm"] > 0 and all(math.isfinite(value) for value in metrics.values())
    dtypes = {"lora": set(), "base": set(), "adam": set()}
    for name, p in model.transformer.named_parameters():
        dtypes["lora" if "lora_" in name else "base"].add(p.dtype)
    dtypes["adam"] = {v.dtype for state in optimizer.state.values() for v in state.values()}
    assert dtypes == {"lora": {torch.float32}, "base": {torch.bfloat16}, "adam": {torch.float32}}
    assert {name.split(".")[-2] for name, _ in model.transformer.named_parameters() if "lora_" in name} == {
        "default",
        "ema",
    }
    assert model.pipe.vae.dtype == torch.float32


def test_full_weights_in_bfloat16_are_trained_in_fp32(one_rank):
    args, model, trained = policy(dtype="bfloat16", lora_rank=0, kl_coef=0.1, ema_decay=0.5, learning_rate=1e-5)
    metrics = one_update(args, model, torch.optim.AdamW(trained, lr=1e-5), ADVANTAGES)
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/kl_loss"] == 0
    assert {name: {p.dtype for p in policy.parameters()} for name, policy in model.policies.items()} == {
        "default": {torch.float32},
        "ema": {torch.float32},
        "reference": {torch.bfloat16},
    }


# ---- whole runs ------------------------------------------------------------------------------------------------------
def test_a_run_with_memory_savers_is_the_plain_run_and_bfloat16_runs(tmp_path):
    options = [
        *TINY,
        "--rollout",
        "local",
        "--num_steps",
        1,
        "--epochs_per_rollout",
        2,
        "--micro_batch_size",
        8,
        "--updates_per_rollout",
        2,
        "--clip_range",
        0.1,  # where all samples are clipped the gradient is exactly 0, and no step is taken
        *few_eval_prompts(tmp_path, 2),
    ]
    for name, extra in (
        ("plain", []),
        ("savers", ["--train_with", "activation_checkpointing", "cpu_offload"]),
        ("bf16", ["--dtype", "bfloat16", "--ema_decay", 0.9, "--kl_coef", 0.01]),
    ):
        assert run_here(tmp_path, "flow_grpo.py", "--name", name, *options, *extra) is None
    rows = {name: read_metrics(tmp_path / "runs" / name)[1] for name in ("plain", "savers", "bf16")}
    measured = [name for name in rows["plain"] if not name.startswith(("timing", "perf"))]
    assert len(measured) > 20 and rows["savers"].keys() == rows["plain"].keys()
    for name in measured:
        assert rows["savers"][name] == pytest.approx(rows["plain"][name], abs=1e-6), name
    assert rows["bf16"]["actor/grad_norm"] > 0 and rows["bf16"]["actor/skipped_steps"] == 0
    state = torch.load(tmp_path / "runs/plain/checkpoints/step_000001.pt", weights_only=True)
    assert {s["step"].item() for s in state["optimizer"]["state"].values()} == {4}  # 2 epochs x 2 updates
    state = torch.load(tmp_path / "runs/bf16/checkpoints/step_000001.pt", weights_only=True)
    assert {v.dtype for policy in state["policies"].values() for v in policy.values()} == {torch.float32}


def test_full_weights_with_engines_on_two_ranks_as_without_on_one(tmp_path):
    """--lora_rank 0: the engine is sent all weights; adapter/ is a transformer for diffusers."""
    options = [
        *TINY,
        "--lora_rank",
        0,
        "--learning_rate",
        1e-4,
        "--num_prompts",
        2,
        "--num_steps",
        2,
        "--kl_coef",
        0.01,
        "--ema_decay",
        0.9,
        "--reward",
        brightness_reward(tmp_path),
        *few_eval_prompts(tmp_path, 2),
    ]
    torchrun(tmp_path, "flow_grpo.py", "--name", "vllm", *options, nproc=2)  # each gathers for its own engine
    options += ["--rollout", "local", "--num_steps", 1]
    assert run_here(tmp_path, "flow_grpo.py", "--name", "one", *options) is None
    rows = {name: read_metrics(tmp_path / "runs" / name) for name in ("vllm", "one")}
    assert rows["vllm"][2]["rollout_corr/logprob_abs_diff_max"] <= 2e-6  # what step 1 trained was pushed
    assert rows["vllm"][2]["actor/kl_loss"] > 0
    for name in ("actor/loss", "actor/grad_norm", "critic/rewards/mean"):
        assert rows["vllm"][1][name] == pytest.approx(rows["one"][1][name], abs=1e-5), name

    run = tmp_path / "runs" / "vllm"
    assert {path.name for path in (run / "adapter").iterdir()} == {"config.json", "diffusion_pytorch_model.safetensors"}
    tensors = whole_checkpoint(run / "checkpoints" / "step_000002.pt")["tensors"]  # two ranks wrote them
    ema, default = (
        {name.removeprefix(first): tensor for name, tensor in tensors.items() if name.startswith(first)}
        for first in ("policies/ema/", "policies/default/")
    )
    loaded = SD3Transformer2DModel.from_pretrained(run / "adapter")
    assert same(dict(loaded.state_dict()), ema)
    assert not same(default, ema)
    base = load_file(EMBEDDED / "transformer" / "diffusion_pytorch_model.safetensors")
    assert not same(ema, {key: value.float() for key, value in base.items()})


@pytest.mark.parametrize(("at", "begun"), [("ema", False), ("default", True)])
@pytest.mark.parametrize(("is_lora", "fault"), [(True, RolloutError), (False, EngineError)])
def test_after_a_push_that_fails_the_trained_policy_acts(one_rank, monkeypatch, at, begun, is_lora, fault):
    """At a LoRA all ranks fail together, so that a checkpoint can still be saved. At full weights others may wait for
    this rank's shards, and a collective would wait for them."""
    model = SimpleNamespace(is_lora=is_lora)
    acted = []
    monkeypatch.setattr(policies, "use_policy", lambda model, name: acted.append(name))
    monkeypatch.setattr(policies, "policy_tensors", lambda model, name: (name,))

    class Engine:
        def push(self, name):
            if name == at:
                raise EngineError("it is gone")

    has_begun = False
    with pytest.raises(fault, match="^it is gone$") as caught, acting(model, "ema", Engine()):
        has_begun = True
    assert acted == ["ema", "default"] and has_begun == begun and type(caught.value) is fault
