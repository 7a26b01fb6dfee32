"""Z-Image (diffusers `ZImagePipeline`): base, guided by a second pass; Turbo, whose --guidance_scale stays 1."""

from common.bounds import check_image
from common.models import both_branches, on_device
from common.schedule import shifted_schedule
from common.vae import decode_latents, encode_pixels

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas


class ZImage:
    """Latents are (B, C, h, w). The transformer takes lists of images and of prompts, and 1 - t / 1000; it gives -v."""

    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    engine_pipeline = None  # vLLM-Omni's calls the scheduler itself, an image at a time: there is no hook for our steps

    @staticmethod
    def check(model, height, width, num_frames, guidance_scale=1.0):
        """Raises ValueError where a side is no multiple of a token's, and for a video."""
        vae = AutoencoderKL.load_config(model, subfolder="vae")
        unit = 2 * 2 ** (len(vae["block_out_channels"]) - 1)  # pixels of a token's side
        check_image(height, width, num_frames, unit)

    @staticmethod
    def conditioning_shapes(transformer, max_sequence_length):
        """{name: shape} of the conditioning of one prompt, by the transformer's config."""
        return {"prompt_embeds": (max_sequence_length, transformer["cap_feat_dim"]), "num_tokens": ()}

    def __init__(self, pipe):
        self.pipe = pipe
        self.transformer = pipe.transformer

    @torch.no_grad()
    def encode_prompts(self, prompts, max_sequence_length):
        """B prompts -> {"prompt_embeds": (B, L, C), zeros behind a prompt's last token; "num_tokens": (B,)}."""
        prompt_embeds = []
        num_tokens = []
        with on_device(self, "text_encoder"):
            for i in range(0, len(prompts), 32):  # the encoder's attention over thousands would not fit a GPU
                per_prompt, _ = self.pipe.encode_prompt(
                    list(prompts[i : i + 32]),
                    device=self.device,
                    do_classifier_free_guidance=False,
                    max_sequence_length=max_sequence_length,
                )
                for embeds in per_prompt:  # (its tokens, C)
                    prompt_embeds.append(F.pad(embeds, (0, 0, 0, max_sequence_length - len(embeds))))
                    num_tokens.append(len(embeds))
        return {"prompt_embeds": torch.stack(prompt_embeds), "num_tokens": torch.tensor(num_tokens)}

    def encode_negative(self, guidance_scale, max_sequence_length):
        """Conditioning of the empty prompt, one row, for the second pass of guidance above 1; None without."""
        return self.encode_prompts([""], max_sequence_length) if guidance_scale > 1 else None

    def schedule(self, num_inference_steps, height, width, num_frames=1):
        """Timesteps (T,), sigmas (T + 1,) and the shape (C, h, w) of one image's latents."""
        h = height // self.pipe.vae_scale_factor
        w = width // self.pipe.vae_scale_factor
        unshifted = get_default_z_image_sigmas(num_inference_steps)  # of fp32, unlike other pipelines'
        timesteps, sigmas = shifted_schedule(self.pipe.scheduler, unshifted, num_tokens=(h // 2) * (w // 2))
        return timesteps, sigmas, (self.transformer.in_channels, h, w)

    def predict_velocity(self, latents, timestep, conditioning, negative_conditioning=None, guidance_scale=1.0):
        """v (B, ...) in fp32 at fp32 latents (B, ...) and timesteps in (0, 1000], one or (B,), kept floats.

        Guidance above 1 (its pipeline's above 0, which our 1 is) adds the negative branch (one row, for all):
        v_pos + guidance_scale (v_pos - v_neg), as its pipeline has it, with gradient through both.
        """
        if guidance_scale <= 1:
            return self._forward(latents, timestep, conditioning)
        velocity, negative = both_branches(self._forward, latents, timestep, conditioning, negative_conditioning)
        return velocity + guidance_scale * (velocity - negative)

    def _forward(self, latents, timestep, conditioning):
        prompt_embeds = conditioning["prompt_embeds"]
        num_tokens = conditioning["num_tokens"].tolist()
        images = latents.to(prompt_embeds.dtype)[:, :, None]  # (B, C, 1 frame, h, w)
        prompts = [embeds[:count] for embeds, count in zip(prompt_embeds, num_tokens, strict=True)]
        timestep = timestep.to(latents.device).expand(len(latents))
        outputs = self.transformer(list(images), 1 - timestep / 1000, prompts, return_dict=False)[0]
        return -torch.stack([output.float() for output in outputs])[:, :, 0]

    def decode(self, latents):
        """Latents (B, ...) -> list of B PIL images, as the pipeline decodes them."""
        with on_device(self, "vae"):
            return decode_latents(self.pipe, latents)

    def encode_images(self, images, height, width):
        """List of B PIL images, resized where they differ -> latents (B, ...), the mode of the VAE's posterior."""
        with on_device(self, "vae"):
            return encode_pixels(self.pipe, images, height, width)

    def frozen_tensors(self):
        """All numbers of the model that latents and conditioning depend on, in a fixed order."""
        pipe = self.pipe
        tensors = [torch.tensor([pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor])]
        for module in (pipe.vae, pipe.text_encoder):
            tensors += module.state_dict().values()
        return tensors
