"""--base_weights: what refuses it, what the plan counts, and a LoRA trained over a quantised base.

The last needs torchao, which training does not: .ci/run installs it for this file once the other tests are done.
"""

import importlib.util

import flow_grpo
from common.data import PromptSet
from common.models.base_weights import check_base_weights, linear_layers
from common.models.memory import Blueprint
from common.models.needs import weight_parts, workload_of
from common.models.stable_diffusion_3 import StableDiffusion3
from common.run import Inputs
from tests.conftest import EMBEDDED, TINY, embedded_model, few_eval_prompts, read_metrics, torchrun

import pytest
import torch

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
OF_THE_BLOCKS = 2_146_304  # weights of the embedded model's linear layers in blocks


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora_rank": 0}, "needs a LoRA, as quantised weights cannot be trained"),
        ({"rollout": "vllm"}, "needs --rollout local, as the engine would sample with other weights"),
        ({"shard_ranks": 2}, "needs --shard_ranks 1, as every rank has all quantised weights"),
        ({"train_with": ("cpu_offload",)}, "--train_with cpu_offload cannot be used with it"),
        ({"train_with": ("activation_checkpointing", "compile")}, "--train_with compile cannot be used with it"),
    ],
)
def test_what_quantised_weights_cannot_do_is_refused(changes, told):
    options = {"base_weights": "int8", "rollout": "local"} | changes
    with pytest.raises(ValueError, match=f"^--base_weights int8: {told}$"):
        check_base_weights(flow_grpo.Args(**options))
    check_base_weights(flow_grpo.Args(base_weights="fp8", rollout="local", train_with=("activation_checkpointing",)))


@pytest.mark.fast
def test_without_torchao_a_run_is_refused_before_its_model_loads(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    inputs = Inputs(StableDiffusion3, {}, {}, PromptSet([], []), PromptSet([], []), lora=None, checkpoint=None)
    with pytest.raises(ValueError, match=r"^--base_weights: needs torchao, .*: pip install torchao==\d+\.\d+\.\d+$"):
        inputs.settle({"reward": (), "eval_reward": (), "base_weights": "int8"})


@pytest.mark.fast
def test_the_plan_counts_a_byte_for_each_weight_of_the_blocks():
    """On two ranks: the bytes of a byte each on both, and half of the rest in bf16."""
    args = flow_grpo.Args(base_weights="int8", rollout="local", dtype="bfloat16")
    lora = flow_grpo.make_lora(args, StableDiffusion3)
    assert lora.base_weights == "int8"
    blueprint = Blueprint(StableDiffusion3, str(EMBEDDED), lora, torch.bfloat16)
    layers = linear_layers(embedded_model().transformer).values()
    assert blueprint.num_linear == sum(layer.weight.numel() for layer in layers) == OF_THE_BLOCKS
    w = workload_of(vars(args) | {"shard_ranks": 2}, 8, ranks=2, ranks_per_node=2)
    parts = {part.name: part.num_bytes for part in weight_parts(blueprint, w)}
    rest = blueprint.num_weights - OF_THE_BLOCKS
    assert parts["frozen weights, int8"] == OF_THE_BLOCKS + 2 * rest / 2


@needs_torchao
@pytest.mark.parametrize(("base_weights", "least", "most"), [("int8", 0.003, 0.008), ("fp8", 0.01, 0.03)])
def test_the_quantised_base_is_near_the_model_and_its_layers_take_a_byte(base_weights, least, most):
    from common.models.base_weights import quantise

    model = embedded_model()
    with torch.no_grad():
        conditioning = model.encode_prompts(['a red sign that says "4711"'], 16)
        x = torch.randn(1, *model.schedule(3, 32, 96)[2], generator=torch.Generator().manual_seed(1))
        before = model.predict_velocity(x, torch.tensor(700.0), conditioning)
        quantise(model, base_weights)
        after = model.predict_velocity(x, torch.tensor(700.0), conditioning)
    assert least < (after - before).norm() / before.norm() < most
    assert len(model.unsharded) == len(linear_layers(model.transformer)) > 50
    assert {weight.qdata.itemsize for weight in model.unsharded} == {1}


@needs_torchao
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lora_is_trained_over_a_quantised_base(ranks, tmp_path):
    """From a first ratio of exactly 1; its adapter acts on the model itself, and the run resumes."""
    options = ["--rollout", "local", "--base_weights", "int8", *TINY, "--kl_coef", 0.04, *few_eval_prompts(tmp_path, 2)]
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
