"""A model of two transformers, one for high noise and one for low noise, as one: Wan 2.2 A14B.

A pass sends each row of a batch to the transformer of its timestep. As both are in one module, LoRA, FSDP and
checkpoints treat them like any transformer: names begin with "transformer." and "transformer_2.", which is what
diffusers calls the two parts of the pipeline.
"""

from typing import Any

import torch
import torch.distributed as dist
from diffusers.configuration_utils import ConfigMixin
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from torch._subclasses.fake_tensor import FakeTensor


class Experts(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Two transformers of one kind: `transformer` from a boundary of the timestep on, `transformer_2` below it."""

    config_name = "config.json"
    _supports_gradient_checkpointing = True

    def __init__(self, transformer: ModelMixin, transformer_2: ModelMixin, boundary: float) -> None:
        """boundary: the least timestep, of 0 to 1000, that is `transformer`'s."""
        super().__init__()
        self.transformer, self.transformer_2 = transformer, transformer_2
        self.boundary = boundary
        self._no_split_modules = transformer._no_split_modules
        self.register_to_config(**transformer.config)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor]:
        """The velocities (B, ...) of rows (B, ...), as diffusers' pipeline has them, where all rows have one timestep.

        timestep: (B,), or (B, n) of n tokens, of which a row's largest counts. inputs: the transformer's others.

        A collective: FSDP gathers weights and sums gradients on all ranks at once, so that all run the same
        transformers. One that none of this rank's rows has runs on its first row, and its output counts 0 times.
        """
        experts = (self.transformer, self.transformer_2)
        trains = [torch.is_grad_enabled() and any(p.requires_grad for p in expert.parameters()) for expert in experts]
        if isinstance(timestep, FakeTensor):  # a plan's, without numbers; a pass of either costs the same
            return experts[1 if trains == [False, True] else 0](hidden_states, timestep=timestep, **inputs)
        is_high = timestep.view(len(timestep), -1).amax(1) >= self.boundary  # (B,)
        runs = on_any_rank(torch.stack([is_high.any(), ~is_high.all()]))
        if any(trains) and not any(run and train for run, train in zip(runs, trains, strict=True)):
            runs = [run or train for run, train in zip(runs, trains, strict=True)]  # for the loss to have a gradient
        if runs == [True, False]:
            return self.transformer(hidden_states, timestep=timestep, **inputs)
        if runs == [False, True]:
            return self.transformer_2(hidden_states, timestep=timestep, **inputs)
        inputs |= {"hidden_states": hidden_states, "timestep": timestep}
        parts = []
        for expert, wanted in zip(experts, (is_high, ~is_high), strict=True):
            rows = wanted.nonzero()[:, 0]  # (b,)
            rows = rows if len(rows) else rows.new_zeros(1)
            of_rows = {name: value[rows] if torch.is_tensor(value) else value for name, value in inputs.items()}
            parts.append((expert(**of_rows)[0] * wanted[rows].view(-1, *[1] * (hidden_states.ndim - 1)), rows))
        velocity = parts[0][0].new_zeros(len(timestep), *parts[0][0].shape[1:])
        for part, rows in parts:
            velocity = velocity.index_add(0, rows, part)
        return (velocity,)


def on_any_rank(flags: torch.Tensor) -> list[bool]:
    """Which of the flags are true on any rank. A collective, unless this process is alone."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        counts = flags.int()
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        flags = counts > 0
    return flags.tolist()
