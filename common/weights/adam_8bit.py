"""--adam_bits 8: AdamW whose two moments are kept in 8 bits a number, for full weights.

torchao's AdamW8bit keeps a byte for each number, and a scale in fp32 for each 256 of them (2110.02861). A tensor of
which a rank has fewer than 4096 numbers, or no multiple of 256, keeps moments in fp32. Weights, gradients and the
arithmetic of a step are fp32 as well.

Where it departs from torchao, in the lowest code of each map:
  - The first moment's stands for -1, not -0.993. The largest number of a block then is a code exactly, whatever its
    sign, and quantising what codes stand for gives these codes again. A checkpoint can therefore hold plain fp32
    moments (common/weights/shards.py), and a resumed run continues to the bit.
  - The second moment's stands for the second lowest number, 3.25e-7 of the block's largest, not for 0. Otherwise a
    weight whose gradients are small against its block's has a second moment of 0 beside a first one that is not 0: it
    would move by exp_avg / adam_eps as soon as a gradient is 0.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit


class Adam8Bit(AdamW8bit):
    """torchao's AdamW8bit, whose rates are floats, as the scripts set them."""

    in_8_bits = True  # for load_training_state, which knows no torchao

    @staticmethod
    def _subclass_zeros(p: torch.Tensor, signed: bool, block_size: int) -> OptimState8bit:
        moment = OptimState8bit.zeros(p.shape, signed, block_size, p.device, dtype=p.dtype)
        moment.qmap[0] = -1 if signed else moment.qmap[1]
        return moment

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its rate stays a float."""
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = rate

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take an optimizer step: one kernel for each tensor, which torch.compile makes at the first step on a GPU."""
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)  # as a float it would be compiled in
        # for a CPU compiling would take 10 to 20 seconds for each shape
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            loss = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return loss


def in_8_bits(optimizer: torch.optim.AdamW) -> Adam8Bit:
    """An optimizer of the same tensors, with the same settings, in the place of one that has not stepped yet."""
    names = ("params", "lr", "betas", "eps", "weight_decay")
    return Adam8Bit([{name: group[name] for name in names} for group in optimizer.param_groups])
