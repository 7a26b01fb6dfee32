"""Qwen-Image (diffusers `QwenImagePipeline`): guidance by a second pass, rescaled to the first one's norm."""

from common.bounds import check_image
from common.models import both_branches, on_device
from common.schedule import shifted_schedule
from common.vae import decode_in_slices, encode_in_slices

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage


class QwenImage:
    """Latents are (B, C, h, w) outside; the transformer takes tokens (B, h w / 4, 4 C), of 2 x 2 latents each."""

    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    @staticmethod
    def check(model, height, width, num_frames, guidance_scale=1.0):
        """Raises ValueError where a side is no multiple of a token's, and for a video."""
        vae = AutoencoderKLQwenImage.load_config(model, subfolder="vae")
        unit = 2 * 2 ** len(vae["temperal_downsample"])  # pixels of a token's side
        check_image(height, width, num_frames, unit)

    @staticmethod
    def conditioning_shapes(transformer, max_sequence_length):
        """{name: shape} of the conditioning of one prompt, by the transformer's config."""
        return {
            "prompt_embeds": (max_sequence_length, transformer["joint_attention_dim"]),
            "prompt_embeds_mask": (max_sequence_length,),
        }

    def __init__(self, pipe):
        self.pipe = pipe
        self.transformer = pipe.transformer

    @torch.no_grad()
    def encode_prompts(self, prompts, max_sequence_length):
        """B prompts -> {"prompt_embeds": (B, L, C), "prompt_embeds_mask": (B, L), 1 where there is a token}.

        L is max_sequence_length for every prompt: what is behind a prompt's last token is masked.
        """
        prompt_embeds = []
        masks = []
        with on_device(self, "text_encoder"):
            for i in range(0, len(prompts), 32):  # the encoder's attention over thousands would not fit a GPU
                embeds, mask = self.pipe.encode_prompt(
                    prompts[i : i + 32], device=self.device, max_sequence_length=max_sequence_length
                )
                if mask is None:  # no prompt of these is shorter than another
                    mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=self.device)
                missing = max_sequence_length - embeds.shape[1]
                prompt_embeds.append(F.pad(embeds, (0, 0, 0, missing)))
                masks.append(F.pad(mask, (0, missing)))
        return {"prompt_embeds": torch.cat(prompt_embeds), "prompt_embeds_mask": torch.cat(masks)}

    def encode_negative(self, guidance_scale, max_sequence_length):
        """Conditioning of the empty prompt, one row, for the second pass of guidance above 1; None without."""
        return self.encode_prompts([""], max_sequence_length) if guidance_scale > 1 else None

    def schedule(self, num_inference_steps, height, width, num_frames=1):
        """Timesteps (T,), sigmas (T + 1,) and the shape (C, h, w) of one image's latents."""
        h = height // self.pipe.vae_scale_factor
        w = width // self.pipe.vae_scale_factor
        unshifted = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        timesteps, sigmas = shifted_schedule(self.pipe.scheduler, unshifted, num_tokens=(h // 2) * (w // 2))
        return timesteps, sigmas, (self.transformer.config.in_channels // 4, h, w)

    def predict_velocity(self, latents, timestep, conditioning, negative_conditioning=None, guidance_scale=1.0):
        """v (B, ...) in fp32 at fp32 latents (B, ...) and timesteps in (0, 1000], one or (B,), kept floats.

        Guidance above 1 adds the negative branch (one row, for all), with gradient through both; each token's guided
        velocity is rescaled to the norm that it has without guidance.
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

    def _forward(self, latents, timestep, conditioning):
        """v of the tokens, (B, h w / 4, 4 C)."""
        prompt_embeds = conditioning["prompt_embeds"]
        batch, channels, h, w = latents.shape
        tokens = self.pipe._pack_latents(latents, batch, channels, h, w)
        timestep = timestep.to(latents.device).expand(batch)
        velocity = self.transformer(
            hidden_states=tokens.to(prompt_embeds.dtype),
            timestep=timestep / 1000,
            encoder_hidden_states=prompt_embeds,
            encoder_hidden_states_mask=conditioning["prompt_embeds_mask"],
            img_shapes=[[(1, h // 2, w // 2)]] * batch,
            return_dict=False,
        )[0]
        return velocity.float()

    def _latent_statistics(self):
        """Mean and standard deviation of the VAE's latents, stacked: (2, C, 1, 1, 1)."""
        config = self.pipe.vae.config
        statistics = torch.tensor([config.latents_mean, config.latents_std], device=self.pipe.vae.device)
        return statistics.view(2, -1, 1, 1, 1)

    @torch.no_grad()
    def decode(self, latents):
        """Latents (B, ...) -> list of B PIL images, as the pipeline decodes them."""
        vae = self.pipe.vae
        with on_device(self, "vae"):
            mean, std = self._latent_statistics()
            latents = latents.to(vae.device, vae.dtype)[:, :, None] * std + mean  # (B, C, 1 frame, h, w)
            pixels = decode_in_slices(vae, latents, scale=self.pipe.vae_scale_factor**2)
        return self.pipe.image_processor.postprocess(pixels[:, :, 0])

    @torch.no_grad()
    def encode_images(self, images, height, width):
        """List of B PIL images, resized where they differ -> latents (B, ...), the mode of the VAE's posterior."""
        vae = self.pipe.vae
        pixels = self.pipe.image_processor.preprocess(images, height, width)
        with on_device(self, "vae"):
            mean, std = self._latent_statistics()
            pixels = pixels.to(vae.device, vae.dtype)[:, :, None]  # (B, 3, 1 frame, height, width)
            latents = encode_in_slices(vae, pixels)
        return ((latents - mean) / std)[:, :, 0]

    def frozen_tensors(self):
        """All numbers of the model that latents and conditioning depend on, in a fixed order."""
        tensors = [self._latent_statistics()]
        for module in (self.pipe.vae, self.pipe.text_encoder):
            tensors += module.state_dict().values()
        return tensors

    @staticmethod
    def engine_pipeline():
        """vLLM-Omni's Qwen-Image with our hooks; imported in the engine's process, where vLLM is."""
        from common.engine.pipelines import SDERolloutMixin

        from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

        class QwenImageRollout(SDERolloutMixin, QwenImagePipeline):
            """Prompt embeddings come with the requests; the VAE is fp32, as the trainer's is."""

            timestep_unit = 1000  # of the transformer's input: it takes t / 1000

            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.vae.float()

            def pack(self, latents):
                return self._pack_latents(latents, *latents.shape)

            def unpack(self, latents):
                _, h, w = self._run.latent_shape
                return self._unpack_latents(latents, 2 * h, 2 * w, vae_scale_factor=2)[:, :, 0]

            def module_name(self, name):
                return name.replace("to_out.0", "to_out")

            def encode_prompt(self, *args, **kwargs):
                return tuple(embeds.to(self.device) for embeds in super().encode_prompt(*args, **kwargs))

        return QwenImageRollout
