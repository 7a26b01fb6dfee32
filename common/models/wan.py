"""Wan 2.1 and Wan 2.2 TI2V-5B, text to video (diffusers `WanPipeline`): guided by a second pass."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.models.family import (
    Conditioning,
    Config,
    Family,
    Schedule,
    Shapes,
    both_branches,
    check_multiples,
    on_device,
    sigma_schedule,
)
from common.models.vae import decode_in_slices

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from PIL.Image import Image


class Wan(Family):
    """Latents are (B, C, f, h, w): one frame of latents for the first frame, and one for every four frames after it."""

    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    encode_images = None  # it makes videos

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse models of two transformers, sides that are no multiple of a token's, and leftover frames."""
        pipeline = WanPipeline.load_config(model)
        second_transformer = pipeline.get("transformer_2", [None])[0]  # [library, class]
        if second_transformer or pipeline.get("boundary_ratio") is not None:
            raise ValueError(f"--model {model}: has two transformers, like A14B; Wan 2.1 and TI2V-5B are supported")
        vae = AutoencoderKLWan.load_config(model, subfolder="vae")
        transformer = WanTransformer3DModel.load_config(model, subfolder="transformer")
        unit = vae.get("scale_factor_spatial", 8) * transformer["patch_size"][1]  # pixels of a token's side
        check_multiples(height, width, unit)
        # frames per frame of latents; Wan 2.1's config does not name its factors
        frames = vae.get("scale_factor_temporal", 4)
        if num_frames % frames != 1 or num_frames == 1:
            raise ValueError(f"--num_frames {num_frames}: must be {frames} k + 1, and more than 1")

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        """{name: shape} of one prompt's conditioning, from the transformer's config."""
        return {"prompt_embeds": (max_sequence_length, transformer["text_dim"])}

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C)}, with zeros behind a prompt's last token."""
        prompt_embeds = []
        with on_device(self, "text_encoder"):
            # thousands of prompts at once would not fit on a GPU
            for i in range(0, len(prompts), 32):
                # WanPipeline's method, also for image to video: that pipeline's own fails where ftfy is not installed
                embeds = WanPipeline._get_t5_prompt_embeds(
                    self.pipe, prompts[i : i + 32], max_sequence_length=max_sequence_length, device=self.device
                )
                prompt_embeds.append(embeds)
        return {"prompt_embeds": torch.cat(prompt_embeds)}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        """Timesteps (T,), sigmas (T + 1,), and the shape (C, f, h, w) of one video's latents."""
        f = (num_frames - 1) // self.pipe.vae_scale_factor_temporal + 1
        h = height // self.pipe.vae_scale_factor_spatial
        w = width // self.pipe.vae_scale_factor_spatial
        _, sigmas = sigma_schedule(self.pipe.scheduler, num_inference_steps=num_inference_steps)
        # not the scheduler's own timesteps: the published models come with UniPC, which rounds them down
        timesteps = 1000 * sigmas[:-1]
        return timesteps, sigmas, (self.transformer.config.out_channels, f, h, w)

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
            # TI2V-5B's pipeline gives each token a timestep (`expand_timesteps`); in text to video all are equal
            timestep=timestep.to(latents.device).expand(len(latents)),
            encoder_hidden_states=prompt_embeds,
            return_dict=False,
        )[0]
        return velocity.float()

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> list[list[Image]]:
        """Latents (B, ...) -> B videos as lists of PIL frames, as the pipeline decodes them."""
        vae = self.pipe.vae
        scale = self.pipe.vae_scale_factor_spatial**2 * self.pipe.vae_scale_factor_temporal
        with on_device(self, "vae"):
            statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=vae.device)
            mean, std = statistics.view(2, -1, 1, 1, 1)  # (C, 1, 1, 1) each
            latents = latents.to(vae.device, vae.dtype) * std + mean
            pixels = decode_in_slices(vae, latents, scale)  # (B, 3, frames, height, width)
        return self.to_images(pixels)

    @staticmethod
    def engine_pipeline() -> type:
        """vLLM-Omni's Wan with our hooks. For the engine's process only: it imports vLLM."""
        from common.engine.pipelines import SDERolloutMixin

        from vllm_omni.diffusion.data import DiffusionOutput
        from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline

        class WanRollout(SDERolloutMixin, Wan22Pipeline):
            """Requests bring prompt embeddings, not prompts. The VAE is fp32, like the trainer's."""

            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self.vae.float()

            def module_name(self, name: str) -> str:
                return name.replace("to_out.0", "to_out")

            def weight_name(self, name: str) -> str:
                if name == "scale_shift_table":
                    return "output_scale_shift_prepare.scale_shift_table"
                return self.module_name(name).replace(".ffn.net.", ".ffn.net_")

            def pixels(self, output: DiffusionOutput) -> torch.Tensor:
                return output.media.video.tensor

            def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
                loaded = super().load_weights(weights)
                # one weight is loaded under another name, and only that name is returned
                if "transformer.output_scale_shift_prepare.scale_shift_table" in loaded:
                    loaded.add("transformer.scale_shift_table")
                return loaded

        return WanRollout
