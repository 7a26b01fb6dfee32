"""Run a script on the CPU as the fake device computes it: attention by the plain formula.

    torchrun --standalone tests/fake_cuda/on_cpu.py flow_grpo.py --rollout local --num_steps 1

The CPU's fused attention sums in another order, which bf16 shows: a comparison with the device would be of the two.
"""

import runpy
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    torch.backends.cuda.enable_flash_sdp(False)  # whose CPU kernel obeys it as well
    script = Path(sys.argv[1]).resolve()
    sys.path[0] = str(script.parent)  # as Python starts a script
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")
