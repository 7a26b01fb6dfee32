"""Run a script on the CPU as the fake device computes it: attention and convolutions by the plain formulas.

    torchrun --standalone tests/fake_cuda/on_cpu.py flow_grpo.py --rollout local --num_steps 1

The CPU's fused attention and oneDNN's convolutions sum in another order, which bf16 shows: a comparison with the device
would be of the two.
"""

import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

fast_conv2d = functional.conv2d


def plain_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] | str = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """torch.nn.functional.conv2d by the kernel that the device's convolutions end in."""
    if isinstance(padding, str) or dilation != (1, 1) or groups > 1:
        return fast_conv2d(x, weight, bias, stride, padding, dilation, groups)
    x = x.contiguous()  # its backward pass fails for pixels with their channels last
    return torch._C._nn.thnn_conv2d(x, weight, weight.shape[2:], bias, stride, padding)


if __name__ == "__main__":
    torch.backends.cuda.enable_flash_sdp(False)  # whose CPU kernel obeys it as well
    functional.conv2d = plain_conv2d
    script = Path(sys.argv[1]).resolve()
    sys.path[0] = str(script.parent)  # as Python starts a script
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")
