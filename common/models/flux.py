"""FLUX.1 (diffusers `FluxPipeline`): dev takes the guidance scale as an input, schnell takes no guidance."""

from pathlib import Path
from typing import Any

from common.models.family import Conditioning, Config, Family, Schedule, Shapes
from common.models.parts import JOINT_ATTENTION, check_multiples, check_no_guidance, even_sigmas, shifted_schedule
from common.process import print_once

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel


class Flux(Family):
    """The transformer takes tokens (B, h w / 4, 4 C), each of 2 x 2 latents; `forward` packs them."""

    lora_target_modules = JOINT_ATTENTION
    attention_kernels = ("native", "flash")  # cuDNN's gradient is wrong (`use_attention`)
    has_negative_prompt = False  # guidance is an input of the transformer

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's, and guidance for schnell; report a guidance of 1."""
        vae = AutoencoderKL.load_config(model, subfolder="vae")
        unit = 2 * 2 ** (len(vae["block_out_channels"]) - 1)  # pixels of a token's side
        check_multiples(height, width, unit)
        if not FluxTransformer2DModel.load_config(model, subfolder="transformer").get("guidance_embeds"):
            check_no_guidance(guidance_scale)
        elif guidance_scale == 1:
            usual = "where 3.5 (Kontext: 2.5) is usual (docs/models.md)"
            print_once(f"guidance is an input of this model's transformer, which gets 1, {usual}")

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        return {
            "prompt_embeds": (max_sequence_length, transformer["joint_attention_dim"]),
            "pooled_prompt_embeds": (transformer["pooled_projection_dim"],),
        }

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C), "pooled_prompt_embeds": (B, P)}."""
        embeds, pooled_embeds, _ = self.pipe.encode_prompt(
            prompt=prompts, prompt_2=None, max_sequence_length=max_sequence_length, device=self.device
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled_embeds}

    def sequence_lengths(
        self, latent_shape: tuple[int, ...], max_sequence_length: int, num_sources: int
    ) -> dict[str, int]:
        _, h, w = latent_shape
        return {"--max_sequence_length": max_sequence_length, "--image_size": (1 + num_sources) * (h // 2) * (w // 2)}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        h, w = height // self.pipe.vae_scale_factor, width // self.pipe.vae_scale_factor
        unshifted = even_sigmas(num_inference_steps)
        timesteps, sigmas = shifted_schedule(self.pipe.scheduler, unshifted, num_tokens=(h // 2) * (w // 2))
        return timesteps, sigmas, (self.transformer.config.in_channels // 4, h, w)

    def predict_velocity(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Conditioning,
        negative_conditioning: Conditioning | None = None,
        guidance_scale: float = 1.0,
    ) -> torch.Tensor:
        """The velocity v (B, ...), from one pass at any scale."""
        timestep = timestep.to(latents.device).expand(len(latents))
        return self.forward(latents, timestep, conditioning, guidance_scale)

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning, guidance_scale: float = 1.0
    ) -> torch.Tensor:
        """v (B, ...) in fp32. dev gets the guidance scale as an input, for which it was distilled."""
        prompt_embeds = conditioning["prompt_embeds"]
        batch, _, h, w = latents.shape
        device = latents.device
        dtype = prompt_embeds.dtype
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = latents.new_full((batch,), guidance_scale)
        tokens, positions = self.pack(latents, conditioning)
        velocity = self.transformer(
            hidden_states=tokens.to(dtype),
            timestep=timestep / 1000,
            guidance=guidance,
            pooled_projections=conditioning["pooled_prompt_embeds"],
            encoder_hidden_states=prompt_embeds,
            txt_ids=torch.zeros(prompt_embeds.shape[1], 3, device=device, dtype=dtype),
            img_ids=positions.to(dtype),
            return_dict=False,
        )[0]
        velocity = velocity[:, : (h // 2) * (w // 2)]  # a family that edits has tokens of a picture behind them
        return self.pipe._unpack_latents(velocity.float(), 2 * h, 2 * w, vae_scale_factor=2)

    def pack(self, latents: torch.Tensor, conditioning: Conditioning) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens (B, n, 4 C) of latents (B, C, h, w), and their positions (n, 3), fp32."""
        batch, channels, h, w = latents.shape
        tokens = self.pipe._pack_latents(latents, batch, channels, h, w)
        positions = self.pipe._prepare_latent_image_ids(batch, h // 2, w // 2, latents.device, torch.float32)
        return tokens, positions

    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        from vllm_omni.diffusion.models.flux import pipeline_flux

        pipeline_flux.T5EncoderModel = mixin.no_text_encoder  # type: ignore[attr-defined]  # vLLM-Omni's own, which transformers does not load

        class FluxRollout(mixin, pipeline_flux.FluxPipeline):  # type: ignore[misc, valid-type]  # made at run time
            timestep_unit = 1000  # the transformer's input is t / 1000

            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self.transformer.dtype = self.od_config.dtype  # vLLM-Omni reads it when the text encoders are gone
                # the fused layers that hold q, k and v; vLLM-Omni's LoRA manager and our parameter_slice read this
                mapping = []
                for fused, parts in self.transformer.packed_modules_mapping.items():
                    mapping += [(f".{fused}", f".{part}", shard) for part, shard in zip(parts, "qkv", strict=True)]
                self.transformer.stacked_params_mapping = mapping

            def pack(self, latents: torch.Tensor) -> torch.Tensor:
                return self._pack_latents(latents, *latents.shape)

            def unpack(self, latents: torch.Tensor) -> torch.Tensor:
                _, h, w = self.latent_shape
                return self._unpack_latents(latents, 2 * h, 2 * w, vae_scale_factor=2)

            def _unpack_latents(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                return super()._unpack_latents(*args, **kwargs).float()  # the VAE's dtype

            def encode_prompt(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
                return tuple(embeds.to(self.device) for embeds in super().encode_prompt(*args, **kwargs))

        return FluxRollout
