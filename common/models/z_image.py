"""Z-Image (diffusers `ZImagePipeline`): base is guided by a second pass, Turbo takes no guidance (--guidance_scale 1).

The pipeline counts guidance from 0, and we count it from 1 as in every family: our 5 is the pipeline's 4.
"""

from pathlib import Path

from common.models.family import Conditioning, Config, Family, Schedule, Shapes, both_branches, check_image, on_device
from common.models.parts import shifted_schedule
from common.models.vae import decode_latents, encode_pixels

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from PIL.Image import Image


class ZImage(Family):
    """The transformer takes lists of images and of prompts, and 1 - t / 1000 as its timestep. It returns -v."""

    attention_kernels = ("native", "cudnn")  # flash takes no mask, and prompts are padded
    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    # vLLM-Omni's pipeline calls the scheduler itself, image by image, where we have no hook
    engine_pipeline = None

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's, and videos."""
        vae = AutoencoderKL.load_config(model, subfolder="vae")
        unit = 2 * 2 ** (len(vae["block_out_channels"]) - 1)  # pixels of a token's side
        check_image(height, width, num_frames, unit)

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        """{name: shape} of one prompt's conditioning, from the transformer's config."""
        return {"prompt_embeds": (max_sequence_length, transformer["cap_feat_dim"]), "num_tokens": ()}

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C), with zeros behind a prompt's last token; "num_tokens": (B,)}."""
        prompt_embeds = []
        num_tokens = []
        with on_device(self, "text_encoder"):
            # thousands of prompts at once would not fit on a GPU
            for i in range(0, len(prompts), 32):
                per_prompt, _ = self.pipe.encode_prompt(
                    list(prompts[i : i + 32]),
                    device=self.device,
                    do_classifier_free_guidance=False,
                    max_sequence_length=max_sequence_length,
                )
                for embeds in per_prompt:  # (tokens of this prompt, C)
                    missing = max_sequence_length - len(embeds)
                    prompt_embeds.append(F.pad(embeds, (0, 0, 0, missing)))
                    num_tokens.append(len(embeds))
        return {"prompt_embeds": torch.stack(prompt_embeds), "num_tokens": torch.tensor(num_tokens)}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        """Timesteps (T,), sigmas (T + 1,), and the shape (C, h, w) of one image's latents."""
        h = height // self.pipe.vae_scale_factor
        w = width // self.pipe.vae_scale_factor
        # computed in fp32, unlike the other pipelines' sigmas
        unshifted = get_default_z_image_sigmas(num_inference_steps)
        timesteps, sigmas = shifted_schedule(self.pipe.scheduler, unshifted, num_tokens=(h // 2) * (w // 2))
        return timesteps, sigmas, (self.transformer.in_channels, h, w)

    def predict_velocity(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Conditioning,
        negative_conditioning: Conditioning | None = None,
        guidance_scale: float = 1.0,
    ) -> torch.Tensor:
        """v (B, ...) in fp32. Guidance g above 1 gives v_neg + g (v_pos - v_neg), with gradient through both.

        The pipeline has v_pos + s (v_pos - v_neg), which is the same for s = g - 1.
        """
        if guidance_scale <= 1:
            return self._forward(latents, timestep, conditioning)
        velocity, negative = both_branches(self._forward, latents, timestep, conditioning, negative_conditioning)
        return negative + guidance_scale * (velocity - negative)

    def _forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        prompt_embeds = conditioning["prompt_embeds"]
        num_tokens = conditioning["num_tokens"].tolist()
        images = latents.to(prompt_embeds.dtype)[:, :, None]  # (B, C, 1 frame, h, w)
        prompts = [embeds[:count] for embeds, count in zip(prompt_embeds, num_tokens, strict=True)]
        timestep = timestep.to(latents.device).expand(len(latents))
        outputs = self.transformer(list(images), 1 - timestep / 1000, prompts, return_dict=False)[0]
        return -torch.stack([output.float() for output in outputs])[:, :, 0]

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
        for module in (pipe.vae, pipe.text_encoder):
            tensors += module.state_dict().values()
        return tensors
