"""Wan 2.1 and Wan 2.2, text to video (diffusers `WanPipeline`): guided by a second pass."""

from pathlib import Path

from common.models.family import Conditioning, Config, Family, Schedule, Shapes
from common.models.loading import has_two_transformers
from common.models.parts import ATTENTION, check_multiples, latent_statistics, sigma_schedule
from common.models.vae import decode_in_slices

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel


class Wan(Family):
    """Latents are (B, C, f, h, w): one frame of latents for the first frame, and one for every four frames after it."""

    lora_target_modules = ATTENTION
    makes_videos = True

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's, leftover frames, and two transformers that do not fit."""
        vae = AutoencoderKLWan.load_config(model, subfolder="vae")
        transformer = WanTransformer3DModel.load_config(model, subfolder="transformer")
        is_of_two = has_two_transformers(model)
        boundary = WanPipeline.load_config(model).get("boundary_ratio")
        if is_of_two != (boundary is not None):
            told = "two transformers, like A14B, need a boundary_ratio between them, and one takes none"
            raise ValueError(f"--model {model}: model_index.json: {told}")
        if is_of_two:
            other = WanTransformer3DModel.load_config(model, subfolder="transformer_2")
            differing = [name for name in transformer if name[0] != "_" and other.get(name) != transformer[name]]
            if differing:
                raise ValueError(f"--model {model}: its two transformers differ in {differing[0]}")
        unit = vae.get("scale_factor_spatial", 8) * transformer["patch_size"][1]  # pixels of a token's side
        check_multiples(height, width, unit)
        # frames per frame of latents; Wan 2.1's config does not name its factors
        frames = vae.get("scale_factor_temporal", 4)
        if num_frames % frames != 1 or num_frames == 1:
            raise ValueError(f"--num_frames {num_frames}: must be {frames} k + 1, and more than 1")

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        return {"prompt_embeds": (max_sequence_length, transformer["text_dim"])}

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C)}, with zeros behind a prompt's last token."""
        # WanPipeline's method, also for image to video: that pipeline's own fails where ftfy is not installed
        embeds = WanPipeline._get_t5_prompt_embeds(
            self.pipe, prompts, max_sequence_length=max_sequence_length, device=self.device
        )
        return {"prompt_embeds": embeds}

    def sequence_lengths(
        self, latent_shape: tuple[int, ...], max_sequence_length: int, num_sources: int
    ) -> dict[str, int]:
        """Every rank has the whole text, which attention to it reads alone."""
        _, f, h, w = latent_shape
        _, rows, columns = self.transformer.config.patch_size
        return {"--image_size and --num_frames": f * (h // rows) * (w // columns)}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        f = (num_frames - 1) // self.pipe.vae_scale_factor_temporal + 1
        h = height // self.pipe.vae_scale_factor_spatial
        w = width // self.pipe.vae_scale_factor_spatial
        _, sigmas = sigma_schedule(self.pipe.scheduler, num_inference_steps=num_inference_steps)
        # not the scheduler's own timesteps: the published models come with UniPC, which rounds them down
        timesteps = 1000 * sigmas[:-1]
        return timesteps, sigmas, (self.transformer.config.out_channels, f, h, w)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        prompt_embeds = conditioning["prompt_embeds"]
        velocity = self.transformer(
            hidden_states=latents.to(prompt_embeds.dtype),
            # TI2V-5B's pipeline gives each token a timestep (`expand_timesteps`); in text to video all are equal
            timestep=timestep,
            encoder_hidden_states=prompt_embeds,
            encoder_hidden_states_image=conditioning.get("source_embeds"),  # of image to video
            return_dict=False,
        )[0]
        return velocity.float()

    def decode_vae(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, ...) -> pixels (B, 3, F, H, W), as the pipeline decodes them."""
        vae = self.pipe.vae
        scale = self.pipe.vae_scale_factor_spatial**2 * self.pipe.vae_scale_factor_temporal
        mean, std = latent_statistics(vae)  # (C, 1, 1, 1) each
        return decode_in_slices(vae, latents.to(vae.device) * std + mean, scale)

    def guidance_at(self, timestep: torch.Tensor, guidance_scale: float) -> float | torch.Tensor:
        """--guidance_scale_2 below the boundary of a model of two transformers: (B, 1, 1, 1, 1)."""
        if self.guidance_scale_2 is None:
            return guidance_scale
        is_high = timestep >= self.transformer.boundary
        return torch.where(is_high, guidance_scale, self.guidance_scale_2).view(-1, 1, 1, 1, 1)

    @classmethod
    def has_engine_pipeline(cls, model: str | Path) -> bool:
        return not has_two_transformers(model)  # vLLM-Omni has them, and our hooks do not

    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        from vllm_omni.diffusion.data import DiffusionOutput
        from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline

        class WanRollout(mixin, Wan22Pipeline):  # type: ignore[misc, valid-type]  # made at run time
            def module_name(self, name: str) -> str:
                return name.replace("to_out.0", "to_out")

            def weight_name(self, name: str) -> str:
                if name == "scale_shift_table":
                    return "output_scale_shift_prepare.scale_shift_table"
                return self.module_name(name).replace(".ffn.net.", ".ffn.net_")

            def pixels(self, output: DiffusionOutput) -> torch.Tensor:
                return output.media.video.tensor

        return WanRollout
