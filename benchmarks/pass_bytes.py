"""Operators and bytes of a training pass by the module they come from, at the true size of SD3.5-medium, without a GPU.

    python benchmarks/pass_bytes.py > docs/lab/records/pass_bytes.md

The transformer has fake tensors, which have shapes and no memory. Each operator that computes or copies counts, with
the bytes that it reads and writes. Modules' hooks say which module it comes from, and autograd's sequence numbers say
it of the backward pass. The pass is forward and backward of one sampling step with a LoRA in bf16: 8 images of
512 x 512 with guidance, so 16 rows of 1,024 + 333 tokens. Matrix products and attention are counted apart: a GPU is
limited by its matrix rate in them, and by its memory in the rest.

On a CPU the kernels of a GPU must be stood for: of an RMS norm by `fused_rms_norms` of common/plan/memory.py, which has
one operator each way. Views do not count, nor does the loss. Where several layers have one input, adding its gradients
counts for the layer whose gradient comes second.
"""

import bisect
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.fsdp_kernels import NEW_MEMORY, SD35_MEDIUM
from common.models.loading import family_class
from common.plan.memory import Blueprint, fused_rms_norms
from common.weights import lora_linear, policy
from common.weights.lora import make_lora
from tests.published_models import write_configs

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MATMUL = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
NO_WORK = NEW_MEMORY | {"_unsafe_view", "detach", "device"}
Key = tuple[str, bool]  # where from, and whether in the backward pass


class Sources(TorchDispatchMode):
    """Counts operators and their bytes by source. "matmul" and "attention" are sources of their own."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.operators: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()
        self.within: list[str] = ["outside of the transformer"]  # classes of the modules that are running
        # from these sequence numbers of autograd on, nodes come from these sources; both ascend
        self.starts: list[int] = [0]
        self.sources: list[str] = [self.within[0]]
        self.hooks = []
        for module in transformer.modules():
            name = type(module).__name__.removeprefix("Fused").removeprefix("FSDP")
            self.hooks.append(module.register_forward_pre_hook(self.entering(name)))
            self.hooks.append(module.register_forward_hook(self.leave))

    def entering(self, name: str) -> Callable:
        def enter(module: torch.nn.Module, args: Any) -> None:
            self.within.append(name)
            self.mark()

        return enter

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self.within.pop()
        self.mark()

    def mark(self) -> None:
        self.starts.append(torch._C._autograd._get_sequence_nr())
        self.sources.append(self.within[-1])

    def source(self) -> Key:
        """Of the operator that runs now."""
        if torch._C._current_graph_task_id() < 0:
            return self.within[-1], False
        node = torch._C._current_autograd_node()
        if node.name() == "torch::autograd::AccumulateGrad":
            return "gradients of the LoRA", True
        return self.sources[bisect.bisect_right(self.starts, node._sequence_nr()) - 1], True

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:  # an operator may return anything
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in NO_WORK:
            return out
        source, is_backward = self.source()
        if name in MATMUL:
            source = "matrix products"
        elif "scaled_dot_product" in name:
            source = "attention"
        self.operators[source, is_backward] += 1
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor):
                # an expanded tensor is read from less memory than it has numbers
                self.bytes[source, is_backward] += min(tensor.nbytes, tensor.untyped_storage().nbytes())
        return out


def count(folder: str | Path, *, rank: int, images: int, size: tuple[int, int], tokens: int, **fused: bool) -> Sources:
    """A pass with guidance of the model whose configs are in `folder`. fused: `norms` and `lora`, as on a GPU."""
    with ExitStack() as stack:
        if fused["norms"]:
            stack.enter_context(fused_rms_norms())
        else:
            stack.enter_context(mock.patch.object(policy, "fuse_norms", lambda transformer: None))
        if fused["lora"]:
            stack.enter_context(mock.patch.object(lora_linear, "on_gpu", lambda x: True))
        family = family_class(folder)
        lora = make_lora(family, rank=rank, alpha=2 * rank)
        blueprint = Blueprint(family, str(folder), lora, torch.bfloat16)
        model = blueprint.model
        timesteps, _, shape = model.schedule(2, *size)
        counter = Sources(model.transformer)
        with blueprint.mode:
            one = blueprint.conditioning(tokens, size, 1)
            conditioning = {name: tensor.expand(images, *tensor.shape[1:]) for name, tensor in one.items()}
            latents = torch.zeros(images, *shape)
            with counter:
                velocity = model.predict_velocity(latents, timesteps[0], conditioning, conditioning, 4.5)
            gradient = torch.ones_like(velocity)
            with counter:
                torch.autograd.backward(velocity, gradient)
        return counter


def total(counts: Mapping[Key, int], *, apart: Sequence[str] = ()) -> int:
    return sum(number for (source, _), number in counts.items() if source not in apart)


def table(ways: Mapping[str, Sources]) -> list[str]:
    """Lines: a row for each source, largest first, with operators and GB, forward / backward, of each way."""
    first = next(iter(ways.values()))
    sources = {source for counter in ways.values() for source, _ in counter.operators}
    size = {source: first.bytes[source, False] + first.bytes[source, True] for source in sources}
    lines = ["| source | " + " | ".join(f"{way}: operators | GB" for way in ways) + " |"]
    lines.append("|---" * (1 + 2 * len(ways)) + "|")
    for source in sorted(sources, key=lambda source: (-size[source], source)):
        cells = []
        for counter in ways.values():
            keys = [(source, False), (source, True)]
            cells.append(" / ".join(f"{counter.operators[key]:,}" for key in keys))
            cells.append(" / ".join(f"{counter.bytes[key] / 1e9:.1f}" for key in keys))
        lines.append(f"| {source} | {' | '.join(cells)} |")
    apart = ("matrix products", "attention")
    cells = []
    for counter in ways.values():
        cells += [f"**{total(counter.operators):,}**", f"**{total(counter.bytes, apart=apart) / 1e9:.0f}**"]
    lines.append(f"| **all operators; GB outside of matrix products and attention** | {' | '.join(cells)} |")
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        configs = write_configs(SD35_MEDIUM, Path(folder) / "model")
        ways = {
            "before": {"norms": False, "lora": False},
            "norms in one kernel": {"norms": True, "lora": False},
            "and the LoRA's": {"norms": True, "lora": True},
        }
        sizes = {"rank": 32, "images": 8, "size": (512, 512), "tokens": 256}
        counted = {name: count(configs, **sizes, **way) for name, way in ways.items()}
    print(f"# A pass of SD3.5-medium, 8 images with guidance, LoRA of rank 32, bf16, torch {torch.__version__}\n")
    print("Forward / backward. Counted on fake tensors, no time was measured.\n")
    print("\n".join(table(counted)))


if __name__ == "__main__":
    main()
