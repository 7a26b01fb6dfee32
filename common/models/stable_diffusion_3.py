"""Stable Diffusion 3 and 3.5 (diffusers `StableDiffusion3Pipeline`). The embedded model is of this family."""

from pathlib import Path
from typing import Any

from common.models.family import (
    Conditioning,
    Config,
    Family,
    Schedule,
    Shapes,
    both_branches,
    check_image,
    on_device,
    sigma_schedule,
)
from common.models.vae import decode_latents, encode_pixels

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from PIL.Image import Image


class StableDiffusion3(Family):
    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    attention_kernels = ("native", "cudnn")

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's or have more tokens than positions, and videos."""
        vae = AutoencoderKL.load_config(model, subfolder="vae")
        transformer = SD3Transformer2DModel.load_config(model, subfolder="transformer")
        pixels_per_latent = 2 ** (len(vae["block_out_channels"]) - 1)
        unit = pixels_per_latent * transformer["patch_size"]  # pixels of a token's side
        check_image(height, width, num_frames, unit)
        largest = transformer["pos_embed_max_size"] * unit
        if max(height, width) > largest:
            raise ValueError(f"--image_size {height} {width}: this model has positions for {largest} pixels a side")

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        """{name: shape} of one prompt's conditioning, from the transformer's config."""
        return {
            # 77 tokens of the CLIPs, then T5's
            "prompt_embeds": (77 + max_sequence_length, transformer["joint_attention_dim"]),
            "pooled_prompt_embeds": (transformer["pooled_projection_dim"],),
        }

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C), "pooled_prompt_embeds": (B, P)} in the text encoders' dtype."""
        prompt_embeds = []
        pooled = []
        with on_device(self, "text_encoder"):
            # thousands of prompts at once would not fit on a GPU
            for i in range(0, len(prompts), 32):
                embeds, _, pooled_embeds, _ = self.pipe.encode_prompt(
                    prompt=prompts[i : i + 32],
                    prompt_2=None,
                    prompt_3=None,
                    do_classifier_free_guidance=False,
                    max_sequence_length=max_sequence_length,
                    device=self.device,
                )
                prompt_embeds.append(embeds)
                pooled.append(pooled_embeds)
        return {"prompt_embeds": torch.cat(prompt_embeds), "pooled_prompt_embeds": torch.cat(pooled)}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        """Timesteps (T,), sigmas (T + 1,), and the shape (C, h, w) of one image's latents."""
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

    def predict_velocity(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Conditioning,
        negative_conditioning: Conditioning | None = None,
        guidance_scale: float = 1.0,
    ) -> torch.Tensor:
        """v (B, ...) in fp32. Guidance g above 1 gives v_neg + g (v_pos - v_neg), with gradient through both."""
        if guidance_scale <= 1:
            return self._forward(latents, timestep, conditioning)
        velocity, negative = both_branches(self._forward, latents, timestep, conditioning, negative_conditioning)
        return negative + guidance_scale * (velocity - negative)

    def _forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        prompt_embeds = conditioning["prompt_embeds"]
        velocity = self.transformer(
            hidden_states=latents.to(prompt_embeds.dtype),
            timestep=timestep.to(latents.device).expand(len(latents)),
            encoder_hidden_states=prompt_embeds,
            pooled_projections=conditioning["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity.float()

    def decode(self, latents: torch.Tensor) -> list[Image]:
        """Latents (B, ...) -> B PIL images, as the pipeline decodes them."""
        with on_device(self, "vae"):
            return self.to_images(decode_latents(self.pipe, latents))

    def encode_images(self, images: list[Image], height: int, width: int) -> torch.Tensor:
        """B PIL images -> latents (B, ...), the mode of the VAE's posterior. Images of another size are resized."""
        with on_device(self, "vae"):
            return encode_pixels(self.pipe, images, height, width)

    def frozen_tensors(self) -> list[torch.Tensor]:
        """All tensors of the VAE and the text encoders, and the VAE's scale and shift."""
        pipe = self.pipe
        tensors = [torch.tensor([pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor])]
        for module in (pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
            if module is not None:
                tensors += module.state_dict().values()
        return tensors

    @staticmethod
    def engine_pipeline() -> type:
        """vLLM-Omni's Stable Diffusion 3 with our hooks. For the engine's process only: it imports vLLM."""
        from common.engine.pipelines import SDERolloutMixin

        from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline

        class StableDiffusion3Rollout(SDERolloutMixin, StableDiffusion3Pipeline):
            """Requests bring prompt embeddings, not prompts. The VAE is fp32, like the trainer's."""

            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self.vae.float()
                # a buffer: vLLM-Omni leaves it in fp32, the trainer's transformer has it in --dtype
                self.transformer.pos_embed.to(self.od_config.dtype)

            def encode_prompt(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
                return tuple(embeds.to(self.device) for embeds in super().encode_prompt(*args, **kwargs))

        return StableDiffusion3Rollout
