"""A LoRA's product on a GPU: what it computes, where peft's own pass stays, and that nothing else changes.

`on_gpu` is patched where a CPU stands for a GPU.
"""

import copy

import flow_grpo
from common.weights import lora_linear
from common.weights.base_weights import FrozenLinear
from common.weights.lora_linear import LoRAProduct, fuse_lora
from common.weights.policy import add_policies
from tests.conftest import UNTIMED, embedded_model, lora_of, prompt_set

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(lora_linear, "on_gpu", lambda x: True)


def two_layers(adapters=("default",), dtype=torch.float64, base=torch.nn.Linear, **settings):
    """Two linear layers of one input with a LoRA of rank 3, alpha 5: as peft has them, and with the product."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(6, 8), "k": torch.nn.Linear(6, 8, bias=False)})
    model.requires_grad_(False)
    for layer in model.values():
        layer.__class__ = base
    config = LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, target_modules=["q", "k"], **settings)
    for name in adapters:
        inject_adapter_in_model(config, model, adapter_name=name)
    model.to(dtype)
    fused = copy.deepcopy(model)
    fuse_lora(fused)
    return model, fused


def output_and_gradients(model):
    """Of both layers, whose input (2, 5, 6) is a view."""
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    x = x.to(next(model.parameters()).dtype).requires_grad_()
    y = model["q"](x) * model["k"](x)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *trained], allow_unused=True)]


def equal(ours, theirs):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.fast
def test_the_product_by_hand():
    """x = (1, 2), W = (3 4), c = 10, A = (5 6), B = 7, s = 0.5: y = 3 + 8 + 10 + 0.5 * (5 + 12) * 7."""
    x, weight, bias = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[3.0, 4.0]]), torch.tensor([10.0])
    a, b = torch.tensor([[5.0, 6.0]], requires_grad=True), torch.tensor([[7.0]], requires_grad=True)
    y = LoRAProduct.apply(x.requires_grad_(), weight, bias, a, b, 0.5)
    assert y.tolist() == [[[80.5]]]
    y.backward(torch.tensor([[[2.0]]]))
    assert x.grad.tolist() == [[[2 * (3 + 0.5 * 5 * 7), 2 * (4 + 0.5 * 6 * 7)]]]
    assert a.grad.tolist() == [[2 * 0.5 * 7 * 1, 2 * 0.5 * 7 * 2]]
    assert b.grad.tolist() == [[2 * 0.5 * (5 + 12)]]


@pytest.mark.fast
@pytest.mark.parametrize("has_bias", [False, True])
def test_its_gradient_is_that_of_finite_differences(has_bias):
    shapes = {"x": (2, 3, 4), "weight": (5, 4), "bias": (5,), "a": (2, 4), "b": (5, 2)}
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    for name in ("x", "a", "b"):
        given[name].requires_grad_()
    bias = given["bias"] if has_bias else None
    assert torch.autograd.gradcheck(LoRAProduct.apply, (given["x"], given["weight"], bias, given["a"], given["b"], 0.7))


@pytest.mark.fast
def test_on_a_gpu_it_is_pefts_pass_up_to_round_off(as_on_a_gpu):
    peft, fused = two_layers()
    assert all(type(layer) is not lora.Linear for layer in fused.values())
    assert list(fused.state_dict()) == list(peft.state_dict())
    ours, theirs = output_and_gradients(fused), output_and_gradients(peft)
    assert not equal(ours, theirs)  # so it was another pass
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.fast
def test_a_cpu_has_pefts_pass_to_the_bit():
    peft, fused = two_layers(dtype=torch.float32)
    assert equal(output_and_gradients(fused), output_and_gradients(peft))


def disable(model):
    for layer in model.values():
        layer.enable_adapters(False)


def merge(model):
    for layer in model.values():
        layer.merge()


def merge_and_take_out(model):
    merge(model)
    for layer in model.values():
        layer.unmerge()


def both_adapters(model):
    for layer in model.values():
        layer.set_adapter(["default", "other"])


@pytest.mark.fast
@pytest.mark.parametrize("change", [disable, merge, both_adapters])
def test_what_else_peft_does_stays_to_the_bit(change, as_on_a_gpu):
    pair = two_layers(("default", "other"), dtype=torch.float32)
    for model in pair:
        change(model)
        for parameter in model.parameters():  # something to differentiate, also where no adapter is read
            parameter.requires_grad_()
    assert equal(*map(output_and_gradients, pair))


@pytest.mark.fast
def test_an_adapter_that_was_merged_and_taken_out_acts_again(as_on_a_gpu):
    peft, fused = two_layers()
    before = output_and_gradients(fused)
    merge_and_take_out(fused)
    for a, b in zip(output_and_gradients(fused), before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.fast
@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"use_dora": True}, {"base": FrozenLinear}], ids=str)
def test_layers_that_compute_otherwise_stay(settings):
    """With dropout, of DoRA, and over a quantised base."""
    _, kept = two_layers(**settings)
    assert all(type(layer) is lora.Linear for layer in kept.values())


@pytest.mark.parametrize("train_with", [(), ("activation_checkpointing",)])
def test_in_bf16_the_first_ratio_is_exactly_1(train_with, one_rank, as_on_a_gpu, monkeypatch):
    """A rollout and an update of the embedded model under FSDP. A LoRA that acts: B is drawn."""
    calls = []
    monkeypatch.setattr(lora_linear, "on_gpu", lambda x: calls.append(x.dtype) or True)
    args = flow_grpo.Args(rollout="local", dtype="bfloat16", updates_per_rollout=1, train_with=train_with)
    model = embedded_model(torch.bfloat16)
    add_policies(model, lora_of(args, type(model)), ["default"], args.seed)
    for name, parameter in model.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    flow_grpo.shard(args, model, torch.device("cpu"))
    trained = [parameter for parameter in model.transformer.parameters() if parameter.requires_grad]
    with torch.no_grad():
        drawn = prompt_set(['a sign that says "7K42"', 'a sign that says "93AB"'])
        request = flow_grpo.make_request(args, model, drawn, torch.tensor([0, 1]), [0, 1], sde_steps=(0, 1))
    trajectories = flow_grpo.rollout(args, model, None, request)
    old, _ = flow_grpo.find_old_policy(args, model, None, request, trajectories)
    batch = flow_grpo.Batch(request, trajectories, old, torch.tensor([1.0, -1.0]))
    metrics = flow_grpo.update(args, UNTIMED, model, torch.optim.SGD(trained, lr=1.0), batch)
    assert metrics["actor/ratio_mean"] == 1 and metrics["actor/ratio_std"] == 0
    assert metrics["actor/grad_norm"] > 0
    assert calls and set(calls) == {torch.bfloat16}
