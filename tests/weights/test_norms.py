"""RMS norms in one kernel: which modules get it, what it computes, and that nothing else changes."""

from contextlib import nullcontext

import flow_grpo
from common.models.loading import family_class, load_model
from common.plan.memory import Meter, fused_rms_norms
from common.weights import policy
from common.weights.norms import fuse_norms
from common.weights.policy import add_policies
from tests.conftest import UNTIMED, embedded_model, lora_of, prompt_set
from tests.tiny_models import make_checkpoint

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from torch._subclasses.fake_tensor import FakeTensorMode

CLASSES = [RMSNorm, Krea2RMSNorm]
# how many norms of each tiny family have the kernel now. FLUX and Wan have torch's own, which is that kernel
FUSED = {"stable_diffusion_3": 20, "qwen_image": 9, "z_image": 25, "krea2": 18, "flux": 0, "wan": 0}


def norms(kind, dtype, seed=0):
    """diffusers' norm with drawn weights, and an equal one that is fused."""
    pair = torch.nn.ModuleList([kind(48, eps=1e-6), kind(48, eps=1e-6)])
    weight = torch.randn(48, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for norm in pair:
        norm.weight.data = weight.clone()
    fuse_norms(torch.nn.ModuleList([pair[1]]))
    assert type(pair[0]) is kind and type(pair[1]) is not kind
    return pair


def inputs(dtype, is_transposed=True):
    """(B, heads, tokens, C), as the projections of an attention give it: a view."""
    x = torch.randn(2, 33, 3, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x.transpose(1, 2) if is_transposed else x


def output_and_gradients(norm, x):
    x = x.detach().requires_grad_()
    y = norm(x)
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, norm.weight], weights)]


@pytest.mark.fast
def test_a_norm_by_hand():
    """x = (3, 4) has a mean square of 12.5."""
    for kind, factors in ((RMSNorm, (2.0, 0.5)), (Krea2RMSNorm, (1.0, -0.5))):  # Krea 2's are added to 1
        norm = torch.nn.ModuleList([kind(2, eps=0.5)])
        norm[0].weight.data = torch.tensor(factors)
        fuse_norms(norm)
        expected = torch.tensor([2 * 3.0, 0.5 * 4.0]) / 13**0.5
        torch.testing.assert_close(norm[0](torch.tensor([[3.0, 4.0]])), expected[None])


@pytest.mark.fast
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_in_fp32_output_and_gradients_are_diffusers_to_the_bit(kind, is_transposed):
    stock, fused = (output_and_gradients(n, inputs(torch.float32, is_transposed)) for n in norms(kind, torch.float32))
    for a, b in zip(stock, fused, strict=True):
        assert torch.equal(a, b)


@pytest.mark.fast
@pytest.mark.parametrize("kind", CLASSES)
def test_in_bf16_it_rounds_once(kind):
    stock, fused = norms(kind, torch.bfloat16)
    x = inputs(torch.bfloat16)
    factors = fused.weight.float() + (kind is Krea2RMSNorm)  # 1 is added in fp32, which diffusers keeps the weight in
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * factors
    assert torch.equal(fused(x), exact.to(torch.bfloat16))
    if kind is RMSNorm:
        assert (fused(x) - exact).abs().mean() < 0.8 * (stock(x) - exact).abs().mean()


@pytest.mark.fast
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_weight_of_another_dtype_is_diffusers_own_pass(kind, dtypes, monkeypatch):
    """Krea 2's has the weight in fp32 there."""
    monkeypatch.setattr(F, "rms_norm", F.rms_norm if kind is Krea2RMSNorm else None)  # RMSNorm's own has no kernel
    pair = norms(kind, dtypes[1])
    if kind is Krea2RMSNorm:
        pair[0].float()
    stock, fused = (output_and_gradients(n, inputs(dtypes[0])) for n in pair)
    for a, b in zip(stock, fused, strict=True):
        assert torch.equal(a.to(b.dtype), b)
        assert a.dtype == b.dtype or kind is Krea2RMSNorm


@pytest.mark.fast
def test_norms_that_compute_otherwise_stay():
    class OwnRMSNorm(RMSNorm):
        def forward(self, hidden_states):
            return hidden_states

    with_bias = RMSNorm(4, eps=1e-6, bias=True)
    kept = [with_bias, RMSNorm(4, eps=1e-6, elementwise_affine=False), RMSNorm((3, 4), eps=1e-6), OwnRMSNorm(4, 1e-6)]
    kinds = [type(module) for module in kept]
    fuse_norms(torch.nn.ModuleList(kept))
    assert [type(module) for module in kept] == kinds


@pytest.mark.parametrize("name", FUSED)
def test_a_familys_norms_and_names(name, tmp_path):
    folder = str(make_checkpoint(name, tmp_path))
    model = load_model(family_class(folder), folder, torch.float32, "cpu")
    names = list(model.transformer.state_dict())
    add_policies(model, None, ["default", "reference"], seed=0)  # full weights: the second one is a copy
    for transformer in model.policies.values():
        assert list(transformer.state_dict()) == names
        fused = [module for module in transformer.modules() if type(module).__name__.startswith("Fused")]
        assert len(fused) == FUSED[name]
        assert not any(type(module) in CLASSES for module in transformer.modules())


def embedded_policy(args, is_fused, monkeypatch):
    """The embedded model in bf16, sharded as a run does, with the kernel or with diffusers' norms."""
    with monkeypatch.context() as patch:
        if not is_fused:
            patch.setattr(policy, "fuse_norms", lambda transformer: None)
        model = embedded_model(torch.bfloat16)
        add_policies(model, lora_of(args, type(model)), ["default"], args.seed)
    flow_grpo.shard(args, model, torch.device("cpu"))
    return model


def test_a_rollout_in_bf16_is_near_diffusers_and_its_first_ratio_is_1(one_rank, monkeypatch):
    """The embedded model's norms have trained weights. The images are those of ten steps."""
    args = flow_grpo.Args(rollout="local", dtype="bfloat16", updates_per_rollout=1)
    images = []
    for is_fused in (False, True):
        model = embedded_policy(args, is_fused, monkeypatch)
        trained = [parameter for parameter in model.transformer.parameters() if parameter.requires_grad]
        with torch.no_grad():
            drawn = prompt_set(['a sign that says "7K42"', 'a sign that says "93AB"'])
            request = flow_grpo.make_request(
                args, model, drawn, torch.arange(2).repeat(4), list(range(8)), sde_steps=()
            )
        images.append(np.stack([np.asarray(i, float) for i in flow_grpo.rollout(args, model, None, request).images]))
    assert 0 < np.abs(images[1] - images[0]).mean() < 0.5  # of 255
    with torch.no_grad():
        request = flow_grpo.make_request(args, model, drawn, torch.tensor([0, 1]), [0, 1], sde_steps=(0, 1))
    trajectories = flow_grpo.rollout(args, model, None, request)
    old, _ = flow_grpo.find_old_policy(args, model, None, request, trajectories)
    batch = flow_grpo.Batch(request, trajectories, old, torch.tensor([1.0, -1.0]))
    metrics = flow_grpo.update(args, UNTIMED, model, torch.optim.SGD(trained, lr=1.0), batch)
    assert metrics["actor/ratio_mean"] == 1 and metrics["actor/ratio_std"] == 0
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize("lora_rank", [0, 16])
def test_fsdp_gives_the_kernel_weights_of_the_passes_dtype(lora_rank, one_rank, monkeypatch):
    """Full weights are trained in fp32, and a pass in bf16 gets them in bf16."""
    args = flow_grpo.Args(rollout="local", dtype="bfloat16", lora_rank=lora_rank)
    model = embedded_policy(args, True, monkeypatch)
    trained = [parameter for parameter in model.transformer.parameters() if parameter.requires_grad]
    dtypes = []
    native = F.rms_norm

    def noted(x, shape, weight=None, eps=None):
        dtypes.append((x.dtype, weight.dtype))
        return native(x, shape, weight, eps)

    monkeypatch.setattr(F, "rms_norm", noted)
    encoded = {name: tensor.bfloat16() for name, tensor in model.encode_prompts(["a sign"], 16).items()}
    latents = torch.zeros(1, *model.schedule(2, 32, 96)[2])
    model.predict_velocity(latents, torch.tensor(700.0), encoded).square().mean().backward()
    num_norms = sum(type(module).__name__ == "FusedRMSNorm" for module in model.transformer.modules())
    assert dtypes == [(torch.bfloat16, torch.bfloat16)] * num_norms and num_norms > 0
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    assert gradients and all(gradient.dtype == torch.float32 for gradient in gradients)


@pytest.mark.fast
@pytest.mark.parametrize(("is_fused", "kept"), [(True, 2 * 64 + 4), (False, 2 * 64 + 4 * 64 + 4)])
def test_a_plans_norm_keeps_what_the_kernel_keeps(is_fused, kept):
    """Bytes for each row of 64: the output in bf16, and of the kernel a number in fp32. A CPU keeps x in
    fp32 as well."""
    norm = norms(RMSNorm, torch.bfloat16)[1]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(10, 64, dtype=torch.bfloat16, requires_grad=True)
        norm.weight = torch.nn.Parameter(torch.empty(64, dtype=torch.bfloat16), requires_grad=False)
    with mode, fused_rms_norms() if is_fused else nullcontext(), Meter([x, norm.weight]) as meter:
        y = norm(x)
        assert y.shape == x.shape and y.dtype == x.dtype
        assert meter.live_bytes == pytest.approx(10 * kept, rel=0.02)
        y.sum().backward()
    assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
