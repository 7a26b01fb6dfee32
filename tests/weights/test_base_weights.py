"""--base_weights: what refuses it, what the plan counts, and a LoRA trained over a quantised base.

The last needs torchao, which training does not: .ci/run installs it for this file once the other tests are done.
"""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import flow_grpo
from common.data import PromptSet
from common.models import encoders_key
from common.models.loading import load_model
from common.models.stable_diffusion_3 import StableDiffusion3
from common.plan.memory import Blueprint
from common.plan.needs import planned_run, waiting_parts, weight_parts
from common.run.command_line import parse_args
from common.run.inputs import Inputs
from common.weights.base_weights import WEIGHT_BYTES, check_base_weights, linear_layers, quantise_encoders
from common.weights.start import prepare_prompts
from tests.conftest import EMBEDDED, TINY, checked, embedded_model, few_eval_prompts, lora_of, read_metrics, torchrun
from tests.models.test_models import FakeGPU

import pytest
import torch

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
OF_THE_BLOCKS = 2_146_304  # weights of the embedded model's linear layers in blocks
OF_THE_ENCODERS = 393_216  # and of its text encoders'
LENGTH = 16  # tokens of a prompt
PROMPTS = ['a red sign that says "4711"', "a blue sign"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"trains_lora": False}, ".* LoRA, .*"),
        ({"rollout": "vllm"}, ".*--rollout local, .*"),
        ({"shard_ranks": 2}, ".*--shard_ranks 1, .*"),
        ({"train_with": ("cpu_offload",)}, "--train_with cpu_offload .*; --train_with .*"),
        (
            {"train_with": ("activation_checkpointing", "compile")},
            "--train_with compile .*; --train_with activation_checkpointing .*",
        ),
    ],
)
def test_what_quantised_weights_cannot_do_is_refused(changes, told):
    allowed = {"trains_lora": True, "rollout": "local", "shard_ranks": 1, "train_with": ("activation_checkpointing",)}
    with pytest.raises(ValueError, match=f"^--base_weights int8: {told}$"):
        check_base_weights("int8", **allowed | changes)
    check_base_weights(None, **allowed | changes)
    check_base_weights("nf4", **allowed)


@pytest.mark.fast
@pytest.mark.parametrize("words", [(), ("activation_checkpointing",)])
def test_the_last_train_with_replaces_a_recipes(words):
    argv = ["--rollout", "local", "--train_with", "compile", "--base_weights", "int8", "--train_with", *words]
    assert parse_args(flow_grpo.Args, "", argv).train_with == words


@pytest.mark.fast
def test_without_torchao_a_run_is_refused_before_its_model_loads(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    inputs = Inputs(StableDiffusion3, {}, {}, PromptSet([], []), PromptSet([], []), lora=None, checkpoint=None)
    with pytest.raises(ValueError, match=r"^--base_weights: .*: pip install torchao==\d+\.\d+\.\d+$"):
        checked(flow_grpo.Args(base_weights="int8", rollout="local"), inputs)


@pytest.mark.fast
@pytest.mark.parametrize(("base_weights", "num_bytes"), [("int8", 1), ("fp8", 1), ("nf4", 0.516)])
def test_the_plan_counts_the_quantised_weights_of_the_blocks(base_weights, num_bytes):
    """On two ranks: the quantised weights on both, and half of the rest in bf16. Encoders' blocks: a byte a weight."""
    args = flow_grpo.Args(base_weights=base_weights, rollout="local", dtype="bfloat16")
    lora = lora_of(args, StableDiffusion3)
    assert lora.base_weights == base_weights
    blueprint = Blueprint(StableDiffusion3, str(EMBEDDED), lora, torch.bfloat16)
    layers = linear_layers(embedded_model().transformer).values()
    assert blueprint.num_linear == sum(layer.weight.numel() for layer in layers) == OF_THE_BLOCKS
    w = planned_run(flow_grpo.workload(args), vars(args) | {"shard_ranks": 2}, 8, ranks=2, ranks_per_node=2)
    parts = {part.name: part.num_bytes for part in weight_parts(blueprint, w)}
    rest = blueprint.num_weights - OF_THE_BLOCKS
    assert parts[f"frozen weights, {base_weights}"] == pytest.approx(num_bytes * OF_THE_BLOCKS + 2 * rest / 2)
    waiting = {part.name: part.num_bytes for part in waiting_parts(blueprint, w)}
    whole = {part.name: part.num_bytes for part in waiting_parts(blueprint, replace(w, base_weights=None))}
    name = "text encoders, in use"
    assert whole[name] - waiting[name] == OF_THE_ENCODERS


@needs_torchao
@pytest.mark.parametrize(
    ("base_weights", "least", "most"), [("int8", 0.003, 0.008), ("fp8", 0.01, 0.03), ("nf4", 0.04, 0.1)]
)
def test_the_quantised_base_is_near_the_model_and_as_small_as_the_plan_says(base_weights, least, most):
    from common.weights.base_weights import quantise

    model = embedded_model()
    with torch.no_grad():
        conditioning = model.encode_prompts(PROMPTS[:1], LENGTH)
        x = torch.randn(1, *model.schedule(3, 32, 96)[2], generator=torch.Generator().manual_seed(1))
        before = model.predict_velocity(x, torch.tensor(700.0), conditioning)
        quantise(model, base_weights)
        after = model.predict_velocity(x, torch.tensor(700.0), conditioning)
    assert least < (after - before).norm() / before.norm() < most
    assert len(model.unsharded) == len(linear_layers(model.transformer)) > 50
    num_bytes = sum(part.nbytes for weight in model.unsharded for part in plain_tensors(weight))
    # scales are in fp32 here, and these layers are small: an int8 output has a scale for 128 weights
    assert WEIGHT_BYTES[base_weights] <= num_bytes / OF_THE_BLOCKS < WEIGHT_BYTES[base_weights] + 0.04


def plain_tensors(tensor):
    """The tensors that a torchao tensor is made of."""
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


@needs_torchao
@pytest.mark.parametrize("base_weights", ["int8", "fp8", "nf4"])
def test_a_pass_keeps_no_whole_weights_for_its_gradient_which_is_exact(base_weights):
    """The bytes that autograd keeps of a layer, and the input's gradient by the weights that the layer stands for."""
    from common.weights.base_weights import quantise

    layer = torch.nn.Linear(512, 256)
    model = SimpleNamespace(transformer=OneBlock(layer), device=torch.device("cpu"))
    quantise(model, base_weights)
    kept = []
    x = torch.randn(8, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(x)
    weight = layer(torch.eye(512)) - layer.bias  # (in, out)
    for node in (y.grad_fn, *(function for function, _ in y.grad_fn.next_functions)):
        kept += getattr(node, "__dict__", {}).values()  # what a Function of ours keeps by itself
    # the quantised weight itself, or nothing
    assert not [one for one in kept if type(one) is torch.Tensor and one.numel() >= layer.weight.numel()]
    assert torch.allclose(y, x @ weight + layer.bias, atol=1e-5)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    assert torch.allclose(x.grad, upstream @ weight.T, atol=1e-5)
    assert layer.weight.grad is None


class OneBlock(torch.nn.Module):
    """A transformer of one block, which is a linear layer."""

    _no_split_modules = ("Linear", "FrozenLinear")

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)


# ---- text encoders ---------------------------------------------------------------------------------------------------
@needs_torchao
def test_quantised_text_encoders_are_near_the_whole_ones_and_come_to_the_device(monkeypatch):
    whole = embedded_model()
    model = load_model(StableDiffusion3, EMBEDDED, torch.float32, "cpu")
    quantise_encoders(model)
    conditioning = model.encode_prompts(PROMPTS, LENGTH)
    for name, expected in whole.encode_prompts(PROMPTS, LENGTH).items():
        assert 0.001 < (conditioning[name] - expected).norm() / expected.norm() < 0.01
    tensors = zip(model.transformer.parameters(), whole.transformer.parameters(), strict=True)
    assert all(torch.equal(tensor, expected) for tensor, expected in tensors)  # its turn comes after the prompts
    encoders = [getattr(model.pipe, name) for name in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    tensors = [tensor for encoder in encoders for tensor in encoder.state_dict().values()]
    assert sum(tensor.numel() for tensor in tensors if tensor.dtype == torch.int8 and tensor.dim()) > OF_THE_ENCODERS
    assert all(type(tensor) is torch.Tensor for tensor in tensors)  # whose data on_device can exchange
    gpu = FakeGPU(model, monkeypatch)
    for encoder in encoders:
        encoder.register_forward_hook(lambda *_: gpu.events.append(gpu.places()))
    for name, tensor in model.encode_prompts(PROMPTS, LENGTH).items():
        assert torch.equal(tensor, conditioning[name])
    assert gpu.events == ["encoders there, VAE waiting"] * 3 and gpu.places() == "encoders waiting, VAE waiting"


@needs_torchao
def test_a_prompt_cache_of_whole_encoders_is_not_read_with_quantised_ones(one_rank, tmp_path):
    whole = embedded_model()
    prepare_prompts(whole, PROMPTS, LENGTH, tmp_path)
    num_files = len(list(tmp_path.rglob("*.safetensors")))
    model = load_model(StableDiffusion3, EMBEDDED, torch.float32, "cpu")
    quantise_encoders(model)
    expected = model.encode_prompts(PROMPTS[:1], LENGTH)
    prepare_prompts(model, PROMPTS, LENGTH, tmp_path)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2 * num_files
    for name, tensor in model.encode_through_cache(PROMPTS[:1], LENGTH).items():
        assert torch.equal(tensor, expected[name])
    again = load_model(StableDiffusion3, EMBEDDED, torch.float32, "cpu")
    quantise_encoders(again)
    assert encoders_key(again) == encoders_key(model)


# ---- runs ------------------------------------------------------------------------------------------------------------
@needs_torchao
@pytest.mark.parametrize(
    ("base_weights", "ranks", "more"),
    [
        ("int8", 1, ()),
        ("int8", 2, ()),
        ("fp8", 1, ("--train_with", "activation_checkpointing")),
        ("nf4", 1, ("--train_with", "activation_checkpointing")),
        ("nf4", 2, ()),
    ],
)
def test_a_lora_is_trained_over_a_quantised_base(base_weights, ranks, more, tmp_path):
    """From a first ratio of exactly 1; its adapter acts on the model itself, and the run resumes."""
    options = ["--rollout", "local", "--base_weights", base_weights, *TINY, "--kl_coef", 0.04, *more]
    options += [*few_eval_prompts(tmp_path, 2), "--prompt_cache", tmp_path / "embeddings"]
    torchrun(tmp_path, "flow_grpo.py", *options, "--num_steps", 1, nproc=ranks)
    torchrun(tmp_path, "flow_grpo.py", *options, "--num_steps", 2, "--resume", "latest", nproc=ranks)
    rows = read_metrics(tmp_path / "runs" / "flow_grpo")
    for row in rows[1:]:
        assert row["actor/on_policy_ratio_mean"] == 1 and row["actor/on_policy_ratio_std"] == 0
        assert row["actor/grad_norm"] > 0
    pipe = embedded_model().pipe
    pipe.load_lora_weights(tmp_path / "runs" / "flow_grpo" / "adapter")
    adapted = [p for name, p in pipe.transformer.named_parameters() if "lora_B" in name]
    assert [bool(p.abs().max() > 0) for p in adapted].count(True) == 30  # the last block reads no query of the prompt
