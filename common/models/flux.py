"""FLUX.1 (diffusers `FluxPipeline`): dev, which takes its guidance as an input, and schnell, which takes none."""

from common.bounds import check_image, check_no_guidance
from common.models import on_device
from common.schedule import shifted_schedule
from common.vae import decode_latents, encode_pixels

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel


class Flux:
    """Latents are (B, C, h, w) outside; the transformer takes tokens (B, h w / 4, 4 C), of 2 x 2 latents each."""

    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    @staticmethod
    def check(model, height, width, num_frames, guidance_scale=1.0):
        """Raises ValueError where a side is no multiple of a token's, for a video, and for guidance of schnell."""
        vae = AutoencoderKL.load_config(model, subfolder="vae")
        unit = 2 * 2 ** (len(vae["block_out_channels"]) - 1)  # pixels of a token's side
        check_image(height, width, num_frames, unit)
        if not FluxTransformer2DModel.load_config(model, subfolder="transformer").get("guidance_embeds"):
            check_no_guidance(guidance_scale)

    @staticmethod
    def conditioning_shapes(transformer, max_sequence_length):
        """{name: shape} of the conditioning of one prompt, by the transformer's config."""
        return {
            "prompt_embeds": (max_sequence_length, transformer["joint_attention_dim"]),
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
                embeds, pooled_embeds, _ = self.pipe.encode_prompt(
                    prompt=prompts[i : i + 32],
                    prompt_2=None,
                    max_sequence_length=max_sequence_length,
                    device=self.device,
                )
                prompt_embeds.append(embeds)
                pooled.append(pooled_embeds)
        return {"prompt_embeds": torch.cat(prompt_embeds), "pooled_prompt_embeds": torch.cat(pooled)}

    def encode_negative(self, guidance_scale, max_sequence_length):
        """None: guidance takes no second pass."""

    def schedule(self, num_inference_steps, height, width, num_frames=1):
        """Timesteps (T,), sigmas (T + 1,) and the shape (C, h, w) of one image's latents."""
        h = height // self.pipe.vae_scale_factor
        w = width // self.pipe.vae_scale_factor
        unshifted = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        timesteps, sigmas = shifted_schedule(self.pipe.scheduler, unshifted, num_tokens=(h // 2) * (w // 2))
        return timesteps, sigmas, (self.transformer.config.in_channels // 4, h, w)

    def predict_velocity(self, latents, timestep, conditioning, negative_conditioning=None, guidance_scale=1.0):
        """v (B, ...) in fp32 at fp32 latents (B, ...) and timesteps in (0, 1000], one or (B,), kept floats."""
        prompt_embeds = conditioning["prompt_embeds"]
        batch, channels, h, w = latents.shape
        ids = {"device": latents.device, "dtype": prompt_embeds.dtype}
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = latents.new_full((batch,), guidance_scale)
        tokens = self.pipe._pack_latents(latents, batch, channels, h, w)
        timestep = timestep.to(latents.device).expand(batch)
        image_ids = self.pipe._prepare_latent_image_ids(batch, h // 2, w // 2, **ids)
        velocity = self.transformer(
            hidden_states=tokens.to(prompt_embeds.dtype),
            timestep=timestep / 1000,
            guidance=guidance,
            pooled_projections=conditioning["pooled_prompt_embeds"],
            encoder_hidden_states=prompt_embeds,
            txt_ids=torch.zeros(prompt_embeds.shape[1], 3, **ids),
            img_ids=image_ids,
            return_dict=False,
        )[0]
        return self.pipe._unpack_latents(velocity.float(), 2 * h, 2 * w, vae_scale_factor=2)

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
        for module in (pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
            tensors += module.state_dict().values()
        return tensors

    @staticmethod
    def engine_pipeline():
        """vLLM-Omni's FLUX.1 with our hooks; imported in the engine's process, where vLLM is."""
        from common.engine.pipelines import SDERolloutMixin

        from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline

        class FluxRollout(SDERolloutMixin, FluxPipeline):
            """Prompt embeddings come with the requests; the VAE is fp32, as the trainer's is."""

            timestep_unit = 1000  # of the transformer's input: it takes t / 1000

            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.vae.float()
                self.transformer.dtype = self.od_config.dtype  # vLLM-Omni asks for it once the text encoders are gone
                # which fused layers hold q, k and v: vLLM-Omni's LoRA manager and our parameter_name look here
                mapping = []
                for fused, parts in self.transformer.packed_modules_mapping.items():
                    mapping += [(f".{fused}", f".{part}", shard) for part, shard in zip(parts, "qkv", strict=True)]
                self.transformer.stacked_params_mapping = mapping

            def pack(self, latents):
                return self._pack_latents(latents, *latents.shape)

            def unpack(self, latents):
                _, h, w = self._run.latent_shape
                return self._unpack_latents(latents, 2 * h, 2 * w, vae_scale_factor=2)

            def _unpack_latents(self, *args, **kwargs):
                return super()._unpack_latents(*args, **kwargs).float()  # as the VAE: the dummy run's are rounded

            def encode_prompt(self, *args, **kwargs):
                return tuple(embeds.to(self.device) for embeds in super().encode_prompt(*args, **kwargs))

        return FluxRollout
