"""How many operators FSDP adds to a pass of a LoRA on one rank, at the module count of SD3.5-medium.

    torchrun --standalone benchmarks/fsdp_kernels.py > docs/lab/records/fsdp_kernels.md

The transformer has SD3.5-medium's blocks, and tiny widths, so that the count takes seconds on a CPU. An operator that
computes or copies counts as a kernel; a view, or new memory, does not. Each pass is one of bf16 with a LoRA in fp32. It
is counted without FSDP, with the LoRA in bf16; with all weights under FSDP, which casts and copies them in every pass;
with the LoRA alone under FSDP; and as flow_grpo.py shards it, where the LoRA is cast once per optimizer step. "last of
a step" is the pass that averages the gradient over the ranks.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import flow_grpo
from common.distributed import end_distributed, setup_distributed
from common.models.family import Family
from common.models.loading import family_class
from common.weights.lora import make_lora
from common.weights.policy import add_policies
from common.weights.sharding import reshard
from tests.published_models import PUBLISHED
from tests.tiny_models import EMBEDDED, FAMILIES

import diffusers
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

SD35_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
NEW_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
CPU = torch.device("cpu")


class Kernels(TorchDispatchMode):
    """Counts the operators that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:  # an operator may return anything
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in NEW_MEMORY and name != "_unsafe_view" and not name.startswith("_local"):
            self.count += 1
        return func(*args, **(kwargs or {}))


def kernels(work: Callable[[], object]) -> int:
    """The number of operators that `work` needs."""
    with Kernels() as counter:
        work()
    return counter.count


def tiny_sd35_medium(args: flow_grpo.Args) -> Family:
    """SD3.5-medium's blocks at tiny widths, in bf16 and with a LoRA in fp32, not sharded yet."""
    pipe = FAMILIES["stable_diffusion_3"]()
    published = PUBLISHED[SD35_MEDIUM][2]
    config = {name: value for name, value in pipe.transformer.config.items() if not name.startswith("_")}
    config |= {name: published[name] for name in ("num_layers", "dual_attention_layers", "qk_norm")}
    transformer = diffusers.SD3Transformer2DModel(**config).to(torch.bfloat16)
    pipe.register_modules(transformer=transformer.requires_grad_(False).eval())
    model = family_class(EMBEDDED)(pipe)
    model.device = CPU
    add_policies(model, make_lora(type(model), rank=args.lora_rank, alpha=args.lora_alpha), ["default"], args.seed)
    return model


def without_fsdp(args: flow_grpo.Args, model: Family) -> None:
    """All weights in bf16, as a model that only samples has them."""
    model.transformer.to(torch.bfloat16)


def all_weights(args: flow_grpo.Args, model: Family) -> None:
    """FSDP of every weight, which it casts and copies in every pass."""
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    transformer = model.transformer
    blocks = [m for m in transformer.modules() if type(m).__name__ in transformer._no_split_modules]
    for module in [*blocks, transformer]:
        fully_shard(module, mp_policy=precision)


def as_flow_grpo(args: flow_grpo.Args, model: Family) -> None:
    flow_grpo.shard(args, model, CPU)


def lora_alone(args: flow_grpo.Args, model: Family) -> None:
    """As flow_grpo.py shards it, except that the LoRA is cast again in every pass."""
    flow_grpo.shard(args, model, CPU)
    model.transformer.set_reshard_after_forward(True)
    model.transformer.set_reshard_after_backward(True)


WAYS = {
    "without FSDP": without_fsdp,
    "FSDP of all weights": all_weights,
    "FSDP of the LoRA, cast in every pass": lora_alone,
    "as `flow_grpo.py` shards it": as_flow_grpo,
}


def count_passes(way: Callable[[flow_grpo.Args, Family], None]) -> dict[str, int]:
    """{kind of pass: operators}, of passes in the order of an update between two optimizer steps."""
    args = flow_grpo.Args(rollout="local", dtype="bfloat16")
    model = tiny_sd35_medium(args)
    way(args, model)
    with torch.no_grad():
        x = torch.randn(1, *model.schedule(2, 32, 32)[2])
        conditioning = model.encode_prompts(["a red sign"], 16)
        conditioning = {name: tensor.to(torch.bfloat16) for name, tensor in conditioning.items()}

    def sample() -> None:
        with torch.no_grad():
            model.predict_velocity(x, torch.tensor(700.0), conditioning)

    def train() -> None:
        model.predict_velocity(x, torch.tensor(700.0), conditioning).square().mean().backward()

    def exchange(wanted: bool) -> None:
        if way is not without_fsdp:
            model.transformer.set_requires_gradient_sync(wanted)

    sample()  # FSDP prepares itself in its first pass
    reshard(model.transformer)  # as an optimizer step does
    first = kernels(sample)
    forward = kernels(sample)
    exchange(False)
    train()
    both = kernels(train)  # it adds to a gradient, as all passes of an update but the first
    exchange(True)
    last = kernels(train)
    return {"first forward": first, "forward": forward, "forward and backward": both, "last of a step": last}


def main() -> None:
    setup_distributed()
    counts = {name: count_passes(way) for name, way in WAYS.items()}
    kinds = list(counts["without FSDP"])
    print(f"# Operators of a pass, SD3.5-medium's modules with a LoRA, one rank, torch {torch.__version__}\n")
    print(f"| | {' | '.join(kinds)} |")
    print("|---" * (len(kinds) + 1) + "|")
    for name, of_way in counts.items():
        cells = [f"{of_way[kind]:,} ({of_way[kind] / counts['without FSDP'][kind]:.2f})" for kind in kinds]
        print(f"| {name} | {' | '.join(cells)} |")
    end_distributed()


if __name__ == "__main__":
    main()
