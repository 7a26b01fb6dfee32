"""Stable Diffusion 3 and 3.5 (diffusers `StableDiffusion3Pipeline`). The embedded model is of this family."""

from pathlib import Path
from typing import Any

from common.models.family import Conditioning, Config, Family, Schedule, Shapes
from common.models.parts import JOINT_ATTENTION, check_multiples, sigma_schedule

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift


class StableDiffusion3(Family):
    lora_target_modules = JOINT_ATTENTION
    attention_kernels = ("native", "cudnn")

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's or have more tokens than positions."""
        vae = AutoencoderKL.load_config(model, subfolder="vae")
        transformer = SD3Transformer2DModel.load_config(model, subfolder="transformer")
        pixels_per_latent = 2 ** (len(vae["block_out_channels"]) - 1)
        unit = pixels_per_latent * transformer["patch_size"]  # pixels of a token's side
        check_multiples(height, width, unit)
        largest = transformer["pos_embed_max_size"] * unit
        if max(height, width) > largest:
            raise ValueError(f"--image_size {height} {width}: this model has positions for {largest} pixels a side")

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        return {
            # 77 tokens of the CLIPs, then T5's
            "prompt_embeds": (77 + max_sequence_length, transformer["joint_attention_dim"]),
            "pooled_prompt_embeds": (transformer["pooled_projection_dim"],),
        }

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C), "pooled_prompt_embeds": (B, P)}."""
        embeds, _, pooled_embeds, _ = self.pipe.encode_prompt(
            prompt=prompts,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
            device=self.device,
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled_embeds}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        config = self.transformer.config
        unit = self.pipe.vae_scale_factor * config.patch_size
        num_tokens = (height // unit) * (width // unit)
        c = self.pipe.scheduler.config
        mu = None
        if c.get("use_dynamic_shifting"):
            mu = calculate_shift(num_tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
        timesteps, sigmas = sigma_schedule(self.pipe.scheduler, num_inference_steps=num_inference_steps, mu=mu)
        latent_size = (height // self.pipe.vae_scale_factor, width // self.pipe.vae_scale_factor)
        return timesteps, sigmas, (config.in_channels, *latent_size)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        prompt_embeds = conditioning["prompt_embeds"]
        velocity = self.transformer(
            hidden_states=latents.to(prompt_embeds.dtype),
            timestep=timestep,
            encoder_hidden_states=prompt_embeds,
            pooled_projections=conditioning["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity.float()

    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline

        class StableDiffusion3Rollout(mixin, StableDiffusion3Pipeline):  # type: ignore[misc, valid-type]  # made at run time
            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                # a buffer: vLLM-Omni leaves it in fp32, the trainer's transformer has it in --dtype
                self.transformer.pos_embed.to(self.od_config.dtype)

            def encode_prompt(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
                return tuple(embeds.to(self.device) for embeds in super().encode_prompt(*args, **kwargs))

        return StableDiffusion3Rollout
