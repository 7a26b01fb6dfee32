"""--adam_bits 8: what refuses it, what the plan counts, moments that quantise to themselves, and runs that resume.

Most of it needs torchao, which training does not: .ci/run installs it for this file once the other tests are done.
"""

import importlib.util
import re
from contextlib import nullcontext
from types import SimpleNamespace

import flow_grpo
from common.data import PromptSet
from common.files.checkpoints import checkpoint_path, load_checkpoint, save_checkpoint
from common.models.stable_diffusion_3 import StableDiffusion3
from common.plan.memory import Blueprint
from common.plan.needs import planned_run, weight_parts
from common.run.checks import check_adam_bits
from common.run.inputs import Inputs
from common.weights import LoRA, choose_adam_kernel
from common.weights.states import load_training_state, training_state
from tests.conftest import EMBEDDED, TINY, checked, embedded_model, few_eval_prompts, good_state, read_metrics, torchrun
from tests.robustness.test_resume import assert_equal_runs

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
FULL = SimpleNamespace(is_lora=False, device=torch.device("cpu"))
BLOCK = 256  # numbers that share a scale


# ---- refused, planned ------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_what_moments_of_8_bits_are_not_for_is_refused():
    with pytest.raises(ValueError, match=r"^--adam_bits 8: .*\(--lora_rank 0\).*$"):
        check_adam_bits(8, trains_lora=True, train_with=())
    with pytest.raises(ValueError, match=r"^--adam_bits 8: .* --train_with cpu_offload.*$"):
        check_adam_bits(8, trains_lora=False, train_with=("compile", "cpu_offload"))
    check_adam_bits(8, trains_lora=False, train_with=("compile",))
    check_adam_bits(32, trains_lora=True, train_with=("cpu_offload",))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("lora", "fault"), [(None, r".*: pip install torchao==\d+\.\d+\.\d+"), (LoRA(None, None), r".*\(--lora_rank 0\).*")]
)
def test_a_run_without_torchao_or_of_a_lora_is_refused_before_its_model_loads(monkeypatch, lora, fault):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    inputs = Inputs(StableDiffusion3, {}, {}, PromptSet([], []), PromptSet([], []), lora=lora, checkpoint=None)
    with pytest.raises(ValueError, match=rf"^--adam_bits 8: {fault}$"):
        checked(flow_grpo.Args(adam_bits=8, rollout="local"), inputs)


def moments_part(adam_bits, ranks=1, train_with=()):
    """The plan's Part of the moments of the embedded model's full weights, and the number of these weights."""
    args = flow_grpo.Args(adam_bits=adam_bits, lora_rank=0, rollout="local", train_with=train_with)
    blueprint = Blueprint(StableDiffusion3, str(EMBEDDED), None, torch.float32)
    w = planned_run(flow_grpo.workload(args), vars(args), 8, ranks=ranks, ranks_per_node=ranks)
    [part] = [part for part in weight_parts(blueprint, w) if part.name.startswith("Adam's two moments")]
    return part, blueprint.num_weights


@pytest.mark.fast
def test_the_plan_counts_two_bytes_and_two_scales_and_advises_them():
    part, num_weights = moments_part(8, ranks=2)
    assert part.name == "Adam's two moments, 8 bits" and part.advice == "use more ranks, or train a LoRA (--lora_rank)"
    assert part.num_bytes == 2 * (num_weights + 4 * num_weights / BLOCK) / 2
    part, _ = moments_part(32)
    assert part.num_bytes == 2 * 4 * num_weights and part.advice.startswith("use --adam_bits 8, more ranks, or ")
    assert "--adam_bits" not in moments_part(32, train_with=("cpu_offload",))[0].advice


@needs_torchao
def test_the_plan_counts_the_bytes_of_the_moments():
    """But for the maps, 2 x 1 KB for each tensor, and for small tensors, which keep fp32."""
    parameters = list(embedded_model().transformer.requires_grad_(True).parameters())
    optimizer = choose_adam_kernel(torch.optim.AdamW(parameters), FULL, adam_bits=8)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    counted = small = 0
    for moment in moments:
        if type(moment) is torch.Tensor:
            small += moment.numel()
            counted += moment.numel() * (1 + 4 / BLOCK)
        else:
            counted += moment.codes.nbytes + moment.scale.nbytes
    assert counted == moments_part(8)[0].num_bytes
    assert 0 < small < 0.03 * sum(moment.numel() for moment in moments)


# ---- moments ---------------------------------------------------------------------------------------------------------
def quantised(values, signed):
    """Values (n, BLOCK) as a moment of 8 bits: what it stands for."""
    from common.weights.adam_8bit import Adam8Bit

    moment = Adam8Bit._subclass_zeros(values, signed, BLOCK)
    moment.copy_(values)
    return moment.dequantize()


def hard_blocks(signed):
    """{name: blocks (n, BLOCK)}; with the signs of a first moment, or none for a second one."""
    g = torch.Generator().manual_seed(1)
    normal = torch.randn(64, BLOCK, generator=g)
    spread = normal * torch.exp(4 * torch.randn(64, BLOCK, generator=g))
    one = torch.zeros(2, BLOCK)
    one[0, 3], one[1, 7] = -1, 1e-30
    blocks = {
        "zeros": torch.zeros(1, BLOCK),
        "one number": one,
        "equal": torch.full((1, BLOCK), -0.3),
        "largest is negative": normal.abs() * 0.5 - 2 * torch.eye(64, BLOCK),
        "both signs of the largest": torch.tensor([0.7, -0.7]).repeat(1, BLOCK // 2),
        "heavy tails": spread,
        "denormal": normal * 1e-40,
        "denormal beside normal": torch.cat([normal[:, :128] * 1e-40, normal[:, 128:]], 1),
    }
    for exponent in (-38, -25, -19, -13, -12, -11, -6, 6, 30):  # the least scale is 1e-12
        blocks[f"1e{exponent}"] = normal * 10.0**exponent
        blocks[f"heavy tails, 1e{exponent}"] = spread * 10.0**exponent
    return blocks if signed else {name: values.abs() for name, values in blocks.items()}


@needs_torchao
@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_quantised_again_is_itself_to_the_bit(signed):
    for name, values in hard_blocks(signed).items():
        once = quantised(values, signed)
        assert torch.equal(quantised(once, signed), once), name
        assert torch.isfinite(once).all(), name


@needs_torchao
@pytest.mark.parametrize("signed", [True, False])
def test_each_code_at_each_scale_is_itself_to_the_bit(signed):
    """All 256 codes in a block, at 20,000 scales over the range of fp32."""
    from common.weights.adam_8bit import Adam8Bit

    qmap = Adam8Bit._subclass_zeros(torch.zeros(1, BLOCK), signed, BLOCK).qmap
    exponents = torch.empty(20_000).uniform_(-12, 38, generator=torch.Generator().manual_seed(1))
    scales = torch.cat([10.0**exponents, torch.tensor([1e-12])])
    values = qmap * scales[:, None]
    assert torch.equal(quantised(values, signed), values)


@needs_torchao
@pytest.mark.parametrize(("signed", "most"), [(True, 0.007), (False, 0.0036)])
def test_a_moment_is_near_what_it_is_made_of(signed, most):
    """To half a step of the map, in units of the block's largest number."""
    values = hard_blocks(signed)["heavy tails"]
    error = (quantised(values, signed) - values).abs() / values.abs().amax(1, keepdim=True)
    assert most / 4 < error.max() <= most


# ---- steps -----------------------------------------------------------------------------------------------------------
def stepped(adam_bits, gradients, lr=1e-3, eps=1e-15):
    """How far AdamW moves a weight of zeros by these gradients, one after the other; the optimizer."""
    weight = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = choose_adam_kernel(torch.optim.AdamW([weight], lr=lr, eps=eps), FULL, adam_bits)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach() / lr, optimizer


@needs_torchao
def test_a_weight_of_small_gradients_makes_no_leap_when_one_is_0():
    """Its second moment is nothing beside its block's largest. torchao's own step here is 5e10 learning rates long."""
    gradient = torch.ones(16, BLOCK)
    gradient[:, 0] = 1e-4
    last = gradient.clone()
    last[:, 0] = 0
    moved, _ = stepped(8, [gradient, gradient, last])
    assert moved.abs().max() < 3.01


@needs_torchao
def test_small_tensors_step_as_with_32_bits_and_large_ones_nearly():
    """The first step is exact in any case: it uses the moments before they are quantised."""
    g = torch.Generator().manual_seed(1)
    for shape, first, most in (((4095,), 1e-5, 1e-4), ((15, 273), 1e-5, 1e-4), ((64, 64), 1e-5, 0.06)):
        gradients = [torch.randn(shape, generator=g) for _ in range(10)]
        for number, bound in ((1, first), (10, most)):
            moved, expected = (stepped(bits, gradients[:number])[0] for bits in (8, 32))
            assert (moved - expected).norm() / expected.norm() < bound, (shape, number)
    assert (moved - expected).norm() > 0


@needs_torchao
def test_the_rate_may_change_and_stays_a_float():
    gradients = [torch.ones(64, 64)] * 2
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = choose_adam_kernel(torch.optim.AdamW([weight], lr=1.0, eps=1e-15, weight_decay=0.0), FULL, adam_bits=8)
    for rate, gradient in zip((0.5, 0.25), gradients, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = gradient
        optimizer.step()
        assert type(optimizer.param_groups[0]["lr"]) is float and optimizer.param_groups[0]["lr"] == rate
    assert weight.tolist() == pytest.approx([pytest.approx([-0.75] * 64, rel=0.01)] * 64)


@needs_torchao
def test_a_compiled_step_is_the_one_of_a_cpu(monkeypatch, one_rank):
    """As on a GPU, of FSDP's tensors: to round-off."""
    gradients = [torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    weights = []
    for compiles in (False, True):
        if compiles:
            monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: nullcontext())
        layer = torch.nn.Linear(128, 64, bias=False)
        torch.nn.init.zeros_(layer.weight)
        fully_shard(layer)
        optimizer = choose_adam_kernel(torch.optim.AdamW(layer.parameters(), lr=1e-3), FULL, adam_bits=8)
        for gradient in gradients:
            layer(torch.eye(128)).mul(gradient.T).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert hasattr(optimizer.state[layer.weight]["exp_avg"].to_local(), "codes")
        weights.append(layer.weight.full_tensor().detach())
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-6) and weights[0].abs().max() > 1e-3


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def tiny_model(seed, adam_bits):
    """Full weights of two layers, one of which has moments of 8 bits, and their optimizer."""
    torch.manual_seed(seed)
    model = SimpleNamespace(is_lora=False, frozen_policies=set(), device=torch.device("cpu"), num_updates=1)
    model.transformer = fully_shard(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 2)))
    model.policies = {"default": model.transformer}
    return model, choose_adam_kernel(torch.optim.AdamW(model.transformer.parameters(), lr=0.01), model, adam_bits)


def step(model, optimizer, seed):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    model.transformer(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def numbers(model, optimizer):
    """Every weight and moment by name, in fp32."""
    found = {}
    for key, parameter in model.transformer.named_parameters():
        found[key] = parameter.full_tensor().detach()
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][name].to_local()
            found[f"{name} {key}"] = moment.dequantize() if hasattr(moment, "codes") else moment
    return found


@needs_torchao
@pytest.mark.parametrize(("saved_bits", "bits"), [(8, 8), (8, 32), (32, 8)])
def test_a_checkpoint_fits_moments_of_8_and_of_32_bits(saved_bits, bits, tmp_path, one_rank):
    """What 8 bits stand for is loaded to the bit, into either; 32 bits are rounded to 8."""
    model, optimizer = tiny_model(1, saved_bits)
    for seed in range(3):
        step(model, optimizer, seed)
    path = checkpoint_path(tmp_path, 3)
    save_checkpoint(tmp_path, 3, good_state() | training_state(model, optimizer, path) | {"step": 3}, 9)
    other, its_optimizer = tiny_model(2, bits)
    load_training_state(other, its_optimizer, load_checkpoint(path) | {"path": path})
    expected, found = numbers(model, optimizer), numbers(other, its_optimizer)
    assert expected.keys() == found.keys() and len(found) == 3 * 4
    is_8 = hasattr(its_optimizer.state[other.transformer[0].weight]["exp_avg"].to_local(), "codes")
    assert is_8 == (bits == 8)
    for name, tensor in expected.items():
        if saved_bits == 8 or name.removeprefix("exp_avg ").removeprefix("exp_avg_sq ") != "0.weight":
            assert torch.equal(found[name], tensor), name
        elif name != "0.weight":
            assert 0 < (found[name] - tensor).norm() / tensor.norm() < 0.02, name
    for each, of_each in ((model, optimizer), (other, its_optimizer)):
        step(each, of_each, 4)
    if saved_bits == bits:  # and it goes on alike
        expected, found = numbers(model, optimizer), numbers(other, its_optimizer)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# ---- runs ------------------------------------------------------------------------------------------------------------
def full_weights(tmp_path):
    """Options of a run of two steps, four optimizer steps, of full weights."""
    options = [*TINY, "--rollout", "local", "--lora_rank", 0, "--learning_rate", 1e-4, "--kl_coef", 0, "--seed", 3]
    options += [*few_eval_prompts(tmp_path, 2), "--reward", "jpeg_compressibility", "--updates_per_rollout", 2]
    return [*options, "--num_steps", 2, "--eval_every", 9, "--save_every", 1, "--keep_checkpoints", 9]


@needs_torchao
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_to_the_bit_and_on_other_ranks_nearly(ranks, tmp_path):
    options = [*full_weights(tmp_path), "--adam_bits", 8]
    torchrun(tmp_path, "flow_grpo.py", *options, "--name", "whole", nproc=ranks)
    whole = tmp_path / "runs" / "whole"
    first = ["--resume", whole / "checkpoints" / "step_000001.pt"]
    torchrun(tmp_path, "flow_grpo.py", *options, *first, "--name", "again", nproc=ranks)
    assert_equal_runs(tmp_path / "runs" / "again", whole, 2, 2)
    done = torchrun(tmp_path, "flow_grpo.py", *options, *first, "--name", "others", nproc=3 - ranks)
    assert re.search(f"saved by {ranks} .*, resumed by {3 - ranks}: .* to .*8 bits", done.stdout)
    [row], expected = read_metrics(tmp_path / "runs" / "others"), read_metrics(whole)[2]
    assert row["training/global_step"] == 2
    assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.01)


@needs_torchao
def test_a_short_training_goes_as_with_32_bits(tmp_path):
    """Four optimizer steps move the weights as far, and to nearly the same place."""
    start = embedded_model().transformer.state_dict()
    moved = []
    for bits in (32, 8):
        torchrun(tmp_path, "flow_grpo.py", *full_weights(tmp_path), "--adam_bits", bits, "--name", f"bits{bits}")
        weights = load_file(tmp_path / "runs" / f"bits{bits}" / "adapter" / "diffusion_pytorch_model.safetensors")
        moved.append(torch.cat([(weights[key] - start[key]).flatten() for key in start]))
    assert 0 < (moved[1] - moved[0]).norm() / moved[0].norm() < 0.15
    rows = [read_metrics(tmp_path / "runs" / f"bits{bits}")[-1] for bits in (32, 8)]
    for name in ("critic/rewards/mean", "actor/grad_norm"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=0.05), name
