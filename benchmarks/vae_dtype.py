"""How far the pixels of a VAE in bf16 (--vae_dtype) are from those in fp32, in 8-bit values, on a CPU.

    python -m benchmarks.vae_dtype > docs/lab/records/vae_dtype.txt

The embedded model decodes images that it has sampled itself. A VAE of SD3.5's shape has random weights and decodes
random latents, so that its pixels have no structure but as many layers and channels as the real one's.
"""

from pathlib import Path

from common.cpu import repair_torchvision
from common.models.loading import family_class, load_model
from common.models.vae import decode_in_slices, quantize, to_bfloat16, to_unit_range
from common.options import ASSETS

import torch

SD35 = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


@torch.no_grad()
def compare(name: str, vae: torch.nn.Module, latents: torch.Tensor) -> str:
    """The difference in a line. latents: as the VAE takes them. The VAE is in bf16 afterwards."""
    scale = 64 if "SD3.5" in name else 16
    whole = quantize(to_unit_range(decode_in_slices(vae, latents, scale))).int()  # (B, H, W, 3)
    to_bfloat16(vae, latents.device)
    distance = (quantize(to_unit_range(decode_in_slices(vae, latents, scale))).int() - whole).abs()
    shares = ", ".join(f"{(distance <= n).float().mean():.2%} by at most {n}" for n in (0, 1, 2))
    size = " x ".join(map(str, whole.shape[:3]))
    return f"{name}, {size}: mean {distance.float().mean():.3f}, max {distance.max()} of 255; {shares}"


@torch.no_grad()
def sampled_latents(num_images: int, num_steps: int = 10) -> tuple[torch.nn.Module, torch.Tensor]:
    """The embedded model's VAE, and the latents of images of held-out prompts."""
    folder = str(ASSETS / "embedded")
    model = load_model(family_class(folder), folder, torch.float32, "cpu")
    prompts = Path(ASSETS / "eval_prompts.txt").read_text().splitlines()[:num_images]
    conditioning = model.encode_prompts(prompts, 16)
    timesteps, sigmas, shape = model.schedule(num_steps, 32, 96)
    generators = [torch.Generator().manual_seed(seed) for seed in range(num_images)]
    x = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
    for i, dt in enumerate(sigmas.diff()):
        x = x + model.predict_velocity(x, timesteps[i], conditioning) * dt
    vae = model.pipe.vae
    return vae, x / vae.config.scaling_factor + (vae.config.shift_factor or 0)


def main() -> None:
    repair_torchvision()  # before diffusers is imported
    from diffusers import AutoencoderKL

    print(f"torch {torch.__version__}")
    print(compare("the embedded model's images", *sampled_latents(32)))
    for seed in range(2):
        torch.manual_seed(seed)
        vae = AutoencoderKL(**SD35).eval()
        print(compare(f"random weights of SD3.5's shape, seed {seed}", vae, torch.randn(1, 16, 32, 32)))


if __name__ == "__main__":
    main()
