"""Qwen-Image (diffusers `QwenImagePipeline`): guided by a second pass and rescaled to the first pass's norm."""

from pathlib import Path
from typing import Any

from common.models.family import Conditioning, Config, Family, Schedule, Shapes, both_branches, check_image, on_device
from common.models.parts import decode_frames, encode_frames, latent_statistics, shifted_schedule

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from PIL.Image import Image


class QwenImage(Family):
    """The transformer takes tokens (B, h w / 4, 4 C), each of 2 x 2 latents; they are packed in predict_velocity."""

    longest_prompt = 1024
    attention_kernels = ("native", "cudnn")  # flash takes no mask, and prompts are padded
    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's, and videos."""
        vae = AutoencoderKLQwenImage.load_config(model, subfolder="vae")
        unit = 2 * 2 ** len(vae["temperal_downsample"])  # pixels of a token's side
        check_image(height, width, num_frames, unit)

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        """{name: shape} of one prompt's conditioning, from the transformer's config."""
        return {
            "prompt_embeds": (max_sequence_length, transformer["joint_attention_dim"]),
            "prompt_embeds_mask": (max_sequence_length,),
        }

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C), "prompt_embeds_mask": (B, L), 1 at a token and 0 behind the last}.

        L is max_sequence_length for every prompt.
        """
        prompt_embeds = []
        masks = []
        with on_device(self, "text_encoder"):
            # thousands of prompts at once would not fit on a GPU
            for i in range(0, len(prompts), 32):
                embeds, mask = self.pipe.encode_prompt(
                    prompts[i : i + 32], device=self.device, max_sequence_length=max_sequence_length
                )
                if mask is None:  # these prompts are all of one length
                    mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=self.device)
                missing = max_sequence_length - embeds.shape[1]
                prompt_embeds.append(F.pad(embeds, (0, 0, 0, missing)))
                masks.append(F.pad(mask, (0, missing)))
        return {"prompt_embeds": torch.cat(prompt_embeds), "prompt_embeds_mask": torch.cat(masks)}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        """Timesteps (T,), sigmas (T + 1,), and the shape (C, h, w) of one image's latents."""
        h = height // self.pipe.vae_scale_factor
        w = width // self.pipe.vae_scale_factor
        unshifted = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()
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
        """v (B, ...) in fp32. Guidance g above 1 gives v_neg + g (v_pos - v_neg), with gradient through both.

        Each token's guided velocity is then rescaled to the norm of its v_pos.
        """
        if guidance_scale <= 1:
            velocity = self._forward(latents, timestep, conditioning)
        else:
            velocity, negative = both_branches(self._forward, latents, timestep, conditioning, negative_conditioning)
            guided = negative + guidance_scale * (velocity - negative)
            norm = velocity.norm(dim=-1, keepdim=True)
            velocity = guided * (norm / guided.norm(dim=-1, keepdim=True))
        h, w = latents.shape[2:]
        return self.pipe._unpack_latents(velocity, 2 * h, 2 * w, vae_scale_factor=2)[:, :, 0]

    def _forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """The tokens' v, (B, h w / 4, 4 C)."""
        prompt_embeds = conditioning["prompt_embeds"]
        batch, _, h, w = latents.shape
        tokens, shapes = self.pack(latents, conditioning)
        timestep = timestep.to(latents.device).expand(batch)
        velocity = self.transformer(
            hidden_states=tokens.to(prompt_embeds.dtype),
            timestep=timestep / 1000,
            encoder_hidden_states=prompt_embeds,
            encoder_hidden_states_mask=conditioning["prompt_embeds_mask"],
            img_shapes=[shapes] * batch,
            return_dict=False,
        )[0]
        velocity = velocity[:, : (h // 2) * (w // 2)]  # a family that edits has tokens of pictures behind them
        return velocity.float()

    def pack(self, latents: torch.Tensor, conditioning: Conditioning) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        """The tokens (B, n, 4 C) of latents (B, C, h, w), and their (frames, rows, columns), picture by picture."""
        batch, channels, h, w = latents.shape
        return self.pipe._pack_latents(latents, batch, channels, h, w), [(1, h // 2, w // 2)]

    def decode(self, latents: torch.Tensor) -> list[Image]:
        """Latents (B, ...) -> B PIL images, as the pipeline decodes them."""
        with on_device(self, "vae"):
            return self.to_images(decode_frames(self.pipe, latents))

    def encode_images(self, images: list[Image], height: int, width: int) -> torch.Tensor:
        """B PIL images -> latents (B, ...), the mode of the VAE's posterior. Images of another size are resized."""
        with on_device(self, "vae"):
            return encode_frames(self.pipe, images, height, width)

    def frozen_tensors(self) -> list[torch.Tensor]:
        """All tensors of the VAE and the text encoders, and the VAE's scale and shift."""
        tensors = [latent_statistics(self.pipe.vae)]
        for module in (self.pipe.vae, self.pipe.text_encoder):
            tensors += module.state_dict().values()
        return tensors

    @staticmethod
    def engine_pipeline() -> type:
        """vLLM-Omni's Qwen-Image with our hooks. For the engine's process only: it imports vLLM."""
        from common.engine.pipelines import SDERolloutMixin

        from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

        class QwenImageRollout(SDERolloutMixin, QwenImagePipeline):
            """Requests bring prompt embeddings, not prompts. The VAE is fp32, like the trainer's."""

            timestep_unit = 1000  # the transformer's input is t / 1000

            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self.vae.float()

            def pack(self, latents: torch.Tensor) -> torch.Tensor:
                return self._pack_latents(latents, *latents.shape)

            def unpack(self, latents: torch.Tensor) -> torch.Tensor:
                assert self._run is not None  # tokens come from a batch under way
                _, h, w = self._run.latent_shape
                return self._unpack_latents(latents, 2 * h, 2 * w, vae_scale_factor=2)[:, :, 0]

            def module_name(self, name: str) -> str:
                return name.replace("to_out.0", "to_out")

            def encode_prompt(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
                return tuple(embeds.to(self.device) for embeds in super().encode_prompt(*args, **kwargs))

        return QwenImageRollout
