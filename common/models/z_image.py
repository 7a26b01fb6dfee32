"""Z-Image (diffusers `ZImagePipeline`): base is guided by a second pass, Turbo takes no guidance (--guidance_scale 1).

The pipeline counts guidance from 0, and we count it from 1 as in every family: our 5 is the pipeline's 4.
"""

from pathlib import Path

from common.models.family import Conditioning, Config, Family, Schedule, Shapes
from common.models.parts import ATTENTION, check_multiples, shifted_schedule

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas


class ZImage(Family):
    """The transformer takes lists of images and of prompts, and 1 - t / 1000 as its timestep. It returns -v."""

    attention_kernels = ("native",)
    masks_attention = True
    lora_target_modules = ATTENTION
    # no engine_pipeline: vLLM-Omni's calls the scheduler itself, image by image, where we have no hook

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's."""
        vae = AutoencoderKL.load_config(model, subfolder="vae")
        unit = 2 * 2 ** (len(vae["block_out_channels"]) - 1)  # pixels of a token's side
        check_multiples(height, width, unit)

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        return {"prompt_embeds": (max_sequence_length, transformer["cap_feat_dim"]), "num_tokens": ()}

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C), with zeros behind a prompt's last token; "num_tokens": (B,)}."""
        per_prompt, _ = self.pipe.encode_prompt(
            list(prompts),
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        padded = [F.pad(embeds, (0, 0, 0, max_sequence_length - len(embeds))) for embeds in per_prompt]  # (L, C) each
        num_tokens = [len(embeds) for embeds in per_prompt]
        return {"prompt_embeds": torch.stack(padded), "num_tokens": torch.tensor(num_tokens)}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        h = height // self.pipe.vae_scale_factor
        w = width // self.pipe.vae_scale_factor
        # computed in fp32, unlike the other pipelines' sigmas
        unshifted = get_default_z_image_sigmas(num_inference_steps)
        timesteps, sigmas = shifted_schedule(self.pipe.scheduler, unshifted, num_tokens=(h // 2) * (w // 2))
        return timesteps, sigmas, (self.transformer.in_channels, h, w)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        prompt_embeds = conditioning["prompt_embeds"]
        num_tokens = conditioning["num_tokens"].tolist()
        images = latents.to(prompt_embeds.dtype)[:, :, None]  # (B, C, 1 frame, h, w)
        prompts = [embeds[:count] for embeds, count in zip(prompt_embeds, num_tokens, strict=True)]
        outputs = self.transformer(list(images), 1 - timestep / 1000, prompts, return_dict=False)[0]
        return -torch.stack([output.float() for output in outputs])[:, :, 0]
