"""Qwen-Image (diffusers `QwenImagePipeline`): guided by a second pass and rescaled to the first pass's norm."""

from pathlib import Path
from typing import Any

from common.models.family import Conditioning, Config, Family, Schedule, Shapes
from common.models.parts import (
    JOINT_ATTENTION,
    check_multiples,
    decode_frames,
    encode_frames,
    even_sigmas,
    shifted_schedule,
)

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage


class QwenImage(Family):
    """The transformer takes tokens (B, h w / 4, 4 C), each of 2 x 2 latents; `forward` packs them."""

    longest_prompt = 1024
    attention_kernels = ("native",)
    masks_attention = True
    lora_target_modules = JOINT_ATTENTION

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's."""
        vae = AutoencoderKLQwenImage.load_config(model, subfolder="vae")
        unit = 2 * 2 ** len(vae["temperal_downsample"])  # pixels of a token's side
        check_multiples(height, width, unit)

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        return {
            "prompt_embeds": (max_sequence_length, transformer["joint_attention_dim"]),
            "prompt_embeds_mask": (max_sequence_length,),
        }

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C), "prompt_embeds_mask": (B, L), 1 at a token and 0 behind the last}.

        L is max_sequence_length for every prompt.
        """
        embeds, mask = self.pipe.encode_prompt(prompts, device=self.device, max_sequence_length=max_sequence_length)
        if mask is None:  # these prompts are all of one length
            mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=self.device)
        missing = max_sequence_length - embeds.shape[1]
        return {"prompt_embeds": F.pad(embeds, (0, 0, 0, missing)), "prompt_embeds_mask": F.pad(mask, (0, missing))}

    def sequence_lengths(
        self, latent_shape: tuple[int, ...], max_sequence_length: int, num_sources: int
    ) -> dict[str, int]:
        _, h, w = latent_shape
        of_text = max_sequence_length + num_sources * self.source_tokens
        return {"--max_sequence_length": of_text, "--image_size": (1 + num_sources) * (h // 2) * (w // 2)}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        h, w = height // self.pipe.vae_scale_factor, width // self.pipe.vae_scale_factor
        unshifted = even_sigmas(num_inference_steps)
        timesteps, sigmas = shifted_schedule(self.pipe.scheduler, unshifted, num_tokens=(h // 2) * (w // 2))
        return timesteps, sigmas, (self.transformer.config.in_channels // 4, h, w)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        prompt_embeds = conditioning["prompt_embeds"]
        batch, _, h, w = latents.shape
        tokens, shapes = self.pack(latents, conditioning)
        velocity = self.transformer(
            hidden_states=tokens.to(prompt_embeds.dtype),
            timestep=timestep / 1000,
            encoder_hidden_states=prompt_embeds,
            encoder_hidden_states_mask=conditioning["prompt_embeds_mask"],
            img_shapes=[shapes] * batch,
            return_dict=False,
        )[0]
        velocity = velocity[:, : (h // 2) * (w // 2)]  # a family that edits has tokens of pictures behind them
        return self.unpack(velocity.float(), h, w)

    def guide(
        self, velocity: torch.Tensor, negative_velocity: torch.Tensor, guidance_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """The guided velocity, each token of which is then rescaled to the norm of its v_pos."""
        batch, channels, h, w = velocity.shape
        guided = super().guide(velocity, negative_velocity, guidance_scale)
        tokens = self.pipe._pack_latents(guided, batch, channels, h, w)
        norm = self.pipe._pack_latents(velocity, batch, channels, h, w).norm(dim=-1, keepdim=True)
        return self.unpack(tokens * (norm / tokens.norm(dim=-1, keepdim=True)), h, w)

    def pack(self, latents: torch.Tensor, conditioning: Conditioning) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        """The tokens (B, n, 4 C) of latents (B, C, h, w), and their (frames, rows, columns), picture by picture."""
        batch, channels, h, w = latents.shape
        return self.pipe._pack_latents(latents, batch, channels, h, w), [(1, h // 2, w // 2)]

    def unpack(self, tokens: torch.Tensor, h: int, w: int) -> torch.Tensor:
        """The latents (B, C, h, w) of tokens (B, h w / 4, 4 C)."""
        return self.pipe._unpack_latents(tokens, 2 * h, 2 * w, vae_scale_factor=2)[:, :, 0]

    decode_vae = decode_frames
    encode_vae = encode_frames

    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

        class QwenImageRollout(mixin, QwenImagePipeline):  # type: ignore[misc, valid-type]  # made at run time
            timestep_unit = 1000  # the transformer's input is t / 1000

            def pack(self, latents: torch.Tensor) -> torch.Tensor:
                return self._pack_latents(latents, *latents.shape)

            def unpack(self, latents: torch.Tensor) -> torch.Tensor:
                _, h, w = self.latent_shape
                return self._unpack_latents(latents, 2 * h, 2 * w, vae_scale_factor=2)[:, :, 0]

            def module_name(self, name: str) -> str:
                return name.replace("to_out.0", "to_out")

            def encode_prompt(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
                return tuple(embeds.to(self.device) for embeds in super().encode_prompt(*args, **kwargs))

        return QwenImageRollout
