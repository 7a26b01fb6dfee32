"""What torch's kernels of attention cost at the shapes of published models: forward, and forward with backward.

    python benchmarks/gpu/attention.py                    # on a GPU, in bf16, one or two minutes
    python benchmarks/gpu/attention.py --tiny             # tries this file, on a CPU too

A line of JSON for each shape and kernel, from a process of its own: cuDNN keeps the plan of a call, which may serve
another one wrongly. native is torch's choice without cuDNN, as --attention native has it: with a mask that is the
memory-efficient kernel, as flash takes none. contiguous is cuDNN with a hook that makes the gradient of its output
contiguous, which may bring cuDNN back for FLUX. Gradients come as FLUX's single blocks give them, as a slice of a wider
tensor, where the shape says so. not_finite counts the gradient's numbers that are NaN or infinite, and off_by is the
distance of q's, k's or v's gradient, the worst of them, from that of the memory-efficient kernel (on a CPU, from plain
products) as a share of its norm: facts.py allows 0.05. It is null beside a NaN.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# rows, tokens, heads, width of a head, whether a mask is passed, whether the gradient is a slice
SHAPES = {
    "SD3.5 medium, 8 images": (16, 1024 + 333, 24, 64, False, False),
    "Qwen-Image, 2 images, masked": (4, 1024 + 256, 24, 128, True, False),
    "Qwen-Image, 2 images, no mask": (4, 1024 + 256, 24, 128, False, False),
    "FLUX.1, 4 images, single block": (4, 1024 + 256, 24, 128, False, True),
}
KERNELS = ("native", "cudnn", "contiguous")
REPEAT = 10


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ms(function):
    """Median milliseconds of REPEAT calls, after one that warms up."""
    function()
    clock = []
    for _ in range(REPEAT):
        wait()
        began = time.perf_counter()
        function()
        wait()
        clock.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(clock), 3)


def distance(found, expected):
    """The worst distance of a gradient from the expected one, as a share of its norm; None if one is not finite."""
    shares = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(found, expected, strict=True)]
    return float(f"{max(shares):.1e}") if all(map(math.isfinite, shares)) else None


def measure(name, kernel, shape):
    """Print the figures of a kernel at a shape, or why it does not take it."""
    rows, tokens, heads, width, is_masked, is_slice = shape
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes):
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16, generator=generator)

    q, k, v = (draw(rows, tokens, heads, width).transpose(1, 2).requires_grad_() for _ in range(3))
    wider = draw(rows, tokens, heads * width * (5 if is_slice else 1))  # as a single block joins it with its MLP
    gradient = wider[..., : heads * width].unflatten(2, (heads, width)).transpose(1, 2)
    mask = None
    if is_masked:
        mask = torch.ones(rows, 1, 1, tokens, device=device, dtype=torch.bool)
        mask[::2, ..., -tokens // 16 :] = False
    torch.backends.cuda.enable_cudnn_sdp(kernel != "native")

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if on_gpu and kernel != "native" else nullcontext():
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if kernel == "contiguous" and out.requires_grad:
            out.register_hook(torch.Tensor.contiguous)
        return out

    def both():
        return torch.autograd.grad(forward(), (q, k, v), gradient)

    try:
        figures = {"forward_ms": median_ms(torch.no_grad()(forward))}
        figures |= {"forward_and_backward_ms": median_ms(both)}
        found = both()
        figures |= {"not_finite": sum((~each.isfinite()).sum().item() for each in found)}
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if on_gpu else SDPBackend.MATH):
            expected = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        figures |= {"off_by": distance(found, torch.autograd.grad(expected, (q, k, v), gradient))}
    except RuntimeError as error:  # no kernel of that kind for this shape, or this GPU
        figures = {"error": str(error).splitlines()[0][:200]}
    print(json.dumps({"what": f"{name}, {kernel}", **figures}), flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="shapes of a few tokens")
    parser.add_argument("--shape", choices=SHAPES, help="with --kernel: this one alone, in this process")
    parser.add_argument("--kernel", choices=KERNELS)
    options = parser.parse_args(argv)
    if (options.shape is None) is not (options.kernel is None):
        parser.error("--shape and --kernel need each other")
    if options.shape:
        shape = SHAPES[options.shape]
        measure(options.shape, options.kernel, (2, 64, 2, 16, *shape[4:]) if options.tiny else shape)
        return
    failed = False
    for name in SHAPES:
        for kernel in KERNELS:
            command = [sys.executable, __file__, "--shape", name, "--kernel", kernel]
            done = subprocess.run([*command, *(["--tiny"] if options.tiny else [])])
            failed |= done.returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
