"""What others do with the same random weights on the same GPU: seconds per image, for the rollout and for the update.

    python benchmarks/gpu/peers.py sd35m --batch 8      # the pipeline, and the published loop's passes
    python benchmarks/gpu/peers.py flux --batch 4 --text_tokens 256      # FLUX.1: the pipeline alone
    python benchmarks/gpu/peers.py tiny-sd35m --batch 2 --image_size 32 96 --text_tokens 16 --steps 3    # on a CPU

Sampling: diffusers' own pipeline from embeddings to PIL images, in bf16. Decoding: its VAE in fp32, in bf16, and in
bf16 with channels last, and how far the pixels are from those of fp32. Training: the passes of the loop that was
published with Flow-GRPO, whose functions are those of benchmarks/reference_loop.py: peft's LoRA in fp32 under
autocast, no FSDP, both branches of guidance in one batch, a step of AdamW at the end. Then the same without autocast
and with a LoRA in bf16: the least that a pass of this model can cost, and by how much the ratio of a step leaves 1
where the images are sampled in one batch and trained in two. Sampling and training are measured twice: with
the attention kernel that torch chooses, which on an H100 is cuDNN's, and without cuDNN, as --attention native has it.

A line of JSON each; medians of --repeat after one that warms up. launched_s are the seconds until the host has given
the GPU all its work: near to s, the host is what limits.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import reference_loop
from benchmarks.gpu import sized
from common.cpu import repair_torchvision

import torch

DTYPE = torch.bfloat16
NOISE_LEVEL = 0.7
CLIP_RANGE = 1e-4
STEP = 1  # the sampling step that is trained


def allowing_kernels():
    """Yield the name of a choice of attention kernels, which holds until the next one."""
    for kernels, with_cudnn in (("torch's choice", True), ("no cuDNN", False)):
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        yield kernels


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(what, num_images, repeat, function):
    """Print the seconds of a function, those until it returns to the host, and the peak of the GPU's memory."""
    function()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock = []
    launched = []
    for _ in range(repeat):
        wait()
        began = time.perf_counter()
        function()
        launched.append(time.perf_counter() - began)
        wait()
        clock.append(time.perf_counter() - began)
    seconds = statistics.median(clock)
    figures = {"s": seconds, "s_per_image": seconds / num_images, "launched_s": statistics.median(launched)}
    if on_gpu:
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    rounded = {name: round(value, 4) for name, value in figures.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


def conditioning(pipe, num_rows, num_tokens):
    """Random embeddings (B, L, C) and pooled (B, P), as the transformer takes them."""
    config = pipe.transformer.config
    device = pipe.transformer.device
    embeds = torch.randn(num_rows, num_tokens, config.joint_attention_dim, device=device, dtype=DTYPE)
    pooled = torch.randn(num_rows, config.pooled_projection_dim, device=device, dtype=DTYPE)
    return embeds, pooled


def measure_decoding(pipe, options):
    """The VAE in fp32 and bf16; leaves it in bf16, as a pipeline that is loaded in bf16 has it."""
    vae = pipe.vae
    size = (side // pipe.vae_scale_factor for side in options.image_size)
    latents = torch.randn(4, vae.config.latent_channels, *size, device=vae.device)
    expected = None
    for what, dtype, memory_format in (
        ("fp32", torch.float32, torch.contiguous_format),
        ("bf16", DTYPE, torch.contiguous_format),
        ("bf16, channels last", DTYPE, torch.channels_last),
    ):
        vae.to(dtype=dtype, memory_format=memory_format)
        x = latents.to(dtype=dtype, memory_format=memory_format)

        @torch.no_grad()
        def decode(x=x):
            return vae.decode(x).sample

        measure(f"decode 4 images, {what}", 4, options.repeat, decode)
        pixels = ((decode().float() / 2 + 0.5).clamp(0, 1) * 255).round()
        if expected is None:
            expected = pixels
        else:
            off = (pixels - expected).abs()
            figures = {"mean": round(off.mean().item(), 4), "most": off.max().item()}
            print(json.dumps({"what": f"levels of 255 off fp32, {what}, random weights", **figures}), flush=True)
    vae.to(memory_format=torch.contiguous_format)


def measure_pipeline(pipe, options, is_sd3, kernels):
    """Sampling by diffusers' pipeline, with decoding and without. kernels: what its attention may take."""
    embeds, pooled = conditioning(pipe, options.batch, options.text_tokens)
    height, width = options.image_size
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "height": height, "width": width}
    given |= {"num_inference_steps": options.steps, "guidance_scale": options.guidance_scale}
    if is_sd3 and options.guidance_scale > 1:
        negative, negative_pooled = conditioning(pipe, options.batch, options.text_tokens)
        given |= {"negative_prompt_embeds": negative, "negative_pooled_prompt_embeds": negative_pooled}
    pipe.set_progress_bar_config(disable=True)
    for kind in ("pil", "latent"):
        measure(
            f"diffusers pipeline, {options.steps} steps, {kind}, {kernels}",
            options.batch,
            options.repeat,
            torch.no_grad()(lambda kind=kind: pipe(**given, output_type=kind)),
        )


def measure_training(pipe, parameters, options, with_autocast, kernels):
    """Forward, forward and backward, and an optimizer step of one batch, as the published loop takes them."""
    guidance = options.guidance_scale
    branches = 2 if guidance > 1 else 1
    embeds, pooled = conditioning(pipe, branches * options.batch, options.text_tokens)
    embeds = embeds.unflatten(0, (options.batch, branches))
    pooled = pooled.unflatten(0, (options.batch, branches))
    size = (side // pipe.vae_scale_factor for side in options.image_size)
    x = torch.randn(options.batch, pipe.transformer.config.in_channels, *size, device=embeds.device)
    x_next = torch.randn_like(x)
    advantages = torch.randn(options.batch, device=embeds.device)
    reference_loop.set_timesteps(pipe, options.steps, options.image_size)
    timestep = pipe.scheduler.timesteps[STEP].expand(options.batch)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def velocity(rows=slice(None)):
        given = (x[rows], timestep[rows], embeds[rows], pooled[rows])
        return reference_loop.predict(pipe, *given, guidance, with_autocast)

    def forward_and_backward():
        _, log_prob = reference_loop.sde_step_with_log_prob(pipe.scheduler, velocity(), STEP, x, NOISE_LEVEL, x_next)
        loss, _ = reference_loop.clipped_loss(log_prob, log_prob.detach(), advantages, CLIP_RANGE)
        loss.backward()

    def step():
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    how = f"{'LoRA in fp32, autocast' if with_autocast else 'LoRA in bf16'}, no FSDP, {kernels}"
    measure(f"forward, {how}", options.batch, options.repeat, torch.no_grad()(velocity))
    measure(f"forward and backward, {how}", options.batch, options.repeat, forward_and_backward)
    measure(f"clip and AdamW, {how}", options.batch, options.repeat, step)
    optimizer.zero_grad()
    if not with_autocast:
        with torch.no_grad():
            halves = torch.cat([velocity(slice(options.batch // 2)), velocity(slice(options.batch // 2, None))])
            off = ratio_off_1(pipe.scheduler, x, velocity(), halves)
        what = f"ratios off 1, sampled in batches of {options.batch} and trained in {options.batch // 2}, {kernels}"
        print(json.dumps({"what": what, "most": float(f"{off:.1e}")}), flush=True)


def ratio_off_1(scheduler, x, velocity, other):
    """The largest |ratio - 1| of a step from x (B, ...) that is sampled with a velocity and scored with another."""
    x_next, old = reference_loop.sde_step_with_log_prob(scheduler, velocity, STEP, x, NOISE_LEVEL)
    _, new = reference_loop.sde_step_with_log_prob(scheduler, other, STEP, x, NOISE_LEVEL, x_next)
    return (torch.exp(new - old) - 1).abs().max().item()


def parse_options(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sized.NAMES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image_size", type=int, nargs=2, default=(512, 512))
    parser.add_argument("--text_tokens", type=int, default=333, help="77 of the CLIPs and 256 of T5")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--guidance_scale", type=float, default=4.5)
    parser.add_argument("--lora_rank", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args(argv)


def main(argv=None):
    options = parse_options(argv)
    repair_torchvision()
    from diffusers import DiffusionPipeline

    folder = sized.make_folder(options.model)
    sized.draw_transformers()
    pipe = DiffusionPipeline.from_pretrained(folder, dtype={"default": DTYPE, "vae": torch.float32})
    reference_loop.freeze(pipe)
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    is_sd3 = type(pipe).__name__.startswith("StableDiffusion3")
    measure_decoding(pipe, options)
    for kernels in allowing_kernels():
        measure_pipeline(pipe, options, is_sd3, kernels)
    if is_sd3:
        parameters = reference_loop.add_lora(pipe, options.lora_rank, 2 * options.lora_rank)
        for kernels in allowing_kernels():
            measure_training(pipe, parameters, options, True, kernels)
        for parameter in parameters:
            parameter.grad = None
            parameter.data = parameter.data.to(DTYPE)
        for kernels in allowing_kernels():
            measure_training(pipe, parameters, options, False, kernels)


if __name__ == "__main__":
    main()
