"""Stable Diffusion 3 and 3.5 (diffusers `StableDiffusion3Pipeline`), and the embedded model, which is one."""

from common.bounds import check_image
from common.models import both_branches, on_device
from common.schedule import sigma_schedule
from common.vae import decode_latents, encode_pixels

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift


class StableDiffusion3:
    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    @staticmethod
    def check(model, height, width, num_frames, guidance_scale=1.0):
        """Raises ValueError: a size that is no multiple of a patch, or beyond the table of positions."""
        vae = AutoencoderKL.load_config(model, subfolder="vae")
        transformer = SD3Transformer2DModel.load_config(model, subfolder="transformer")
        unit = 2 ** (len(vae["block_out_channels"]) - 1) * transformer["patch_size"]  # pixels of a token's side
        check_image(height, width, num_frames, unit)
        largest = transformer["pos_embed_max_size"] * unit
        if max(height, width) > largest:
            raise ValueError(f"--image_size {height} {width}: this model has positions for {largest} pixels a side")

    @staticmethod
    def conditioning_shapes(transformer, max_sequence_length):
        """{name: shape} of the conditioning of one prompt, by the transformer's config."""
        return {
            "prompt_embeds": (77 + max_sequence_length, transformer["joint_attention_dim"]),  # CLIP's tokens, then T5's
            "pooled_prompt_embeds": (transformer["pooled_projection_dim"],),
        }

    def __init__(self, pipe):
        self.pipe = pipe
        self.transformer = pipe.transformer

    @torch.no_grad()
    def encode_prompts(self, prompts, max_sequence_length):
        """B prompts -> {"prompt_embeds": (B, L, C), "pooled_prompt_embeds": (B, P)} in the text encoders' dtype."""
        prompt_embeds = []
        pooled = []
        with on_device(self, "text_encoder"):
            for i in range(0, len(prompts), 32):  # T5's attention over thousands of prompts would not fit a GPU
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

    def encode_negative(self, guidance_scale, max_sequence_length):
        """Conditioning of the empty prompt, one row, for the second pass of guidance above 1; None without."""
        return self.encode_prompts([""], max_sequence_length) if guidance_scale > 1 else None

    def schedule(self, num_inference_steps, height, width, num_frames=1):
        """Timesteps (T,), sigmas (T + 1,) and the shape (C, h, w) of one image's latents."""
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

    def predict_velocity(self, latents, timestep, conditioning, negative_conditioning=None, guidance_scale=1.0):
        """v (B, ...) in fp32 at fp32 latents (B, ...) and timesteps in (0, 1000], one or (B,), kept floats.

        Guidance above 1 adds the negative branch (one row, for all): v_neg + guidance_scale (v_pos - v_neg), with
        gradient through both.
        """
        if guidance_scale <= 1:
            return self._forward(latents, timestep, conditioning)
        velocity, negative = both_branches(self._forward, latents, timestep, conditioning, negative_conditioning)
        return negative + guidance_scale * (velocity - negative)

    def _forward(self, latents, timestep, conditioning):
        prompt_embeds = conditioning["prompt_embeds"]
        velocity = self.transformer(
            hidden_states=latents.to(prompt_embeds.dtype),
            timestep=timestep.to(latents.device).expand(len(latents)),
            encoder_hidden_states=prompt_embeds,
            pooled_projections=conditioning["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity.float()

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
        for module in (pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
            if module is not None:
                tensors += module.state_dict().values()
        return tensors

    @staticmethod
    def engine_pipeline():
        """vLLM-Omni's Stable Diffusion 3 with our hooks; imported in the engine's process, where vLLM is."""
        from common.engine.pipelines import SDERolloutMixin

        from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline

        class StableDiffusion3Rollout(SDERolloutMixin, StableDiffusion3Pipeline):
            """Prompt embeddings come with the requests; the VAE is fp32, as the trainer's is."""

            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.vae.float()
                # a buffer, which stays fp32 here and is rounded in the trainer's transformer
                self.transformer.pos_embed.to(self.od_config.dtype)

            def encode_prompt(self, *args, **kwargs):
                return tuple(embeds.to(self.device) for embeds in super().encode_prompt(*args, **kwargs))

        return StableDiffusion3Rollout
