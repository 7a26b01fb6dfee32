"""FLUX.2-klein (diffusers `Flux2KleinPipeline`): base, guided by a second pass; distilled, which takes no guidance."""

from common.bounds import check_image, check_no_guidance
from common.models import both_branches, on_device
from common.schedule import sigma_schedule
from common.vae import decode_in_slices, encode_in_slices

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

PLACEHOLDER = "a prompt"  # in place of the text: vLLM-Omni's pipeline insists on one where embeddings are given


class Flux2Klein:
    """Latents (B, C, h, w) are 2 x 2 latents of the VAE each, normalised; the transformer takes tokens (B, h w, C)."""

    lora_target_modules = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
        "to_qkv_mlp_proj",  # in the single-stream blocks
    )

    @staticmethod
    def check(model, height, width, num_frames, guidance_scale=1.0):
        """Raises ValueError where a side is no multiple of a token's, for a video, and for guidance if distilled."""
        vae = AutoencoderKLFlux2.load_config(model, subfolder="vae")
        unit = 2 * 2 ** (len(vae["block_out_channels"]) - 1)  # pixels of a token's side
        check_image(height, width, num_frames, unit)
        if Flux2KleinPipeline.load_config(model).get("is_distilled"):
            check_no_guidance(guidance_scale)

    @staticmethod
    def conditioning_shapes(transformer, max_sequence_length):
        """{name: shape} of the conditioning of one prompt, by the transformer's config."""
        return {"prompt_embeds": (max_sequence_length, transformer["joint_attention_dim"])}

    def __init__(self, pipe):
        self.pipe = pipe
        self.transformer = pipe.transformer

    @torch.no_grad()
    def encode_prompts(self, prompts, max_sequence_length):
        """B prompts -> {"prompt_embeds": (B, L, C)}, of three layers of the encoder, its padding included."""
        prompt_embeds = []
        with on_device(self, "text_encoder"):
            for i in range(0, len(prompts), 32):  # the encoder's attention over thousands would not fit a GPU
                embeds, _ = self.pipe.encode_prompt(
                    prompts[i : i + 32], device=self.device, max_sequence_length=max_sequence_length
                )
                prompt_embeds.append(embeds)
        return {"prompt_embeds": torch.cat(prompt_embeds)}

    def encode_negative(self, guidance_scale, max_sequence_length):
        """Conditioning of the empty prompt, one row, for the second pass of guidance above 1; None without."""
        return self.encode_prompts([""], max_sequence_length) if guidance_scale > 1 else None

    def schedule(self, num_inference_steps, height, width, num_frames=1):
        """Timesteps (T,), sigmas (T + 1,) and the shape (C, h, w) of one image's latents."""
        unit = 2 * self.pipe.vae_scale_factor
        h = height // unit
        w = width // unit
        mu = compute_empirical_mu(image_seq_len=h * w, num_steps=num_inference_steps)
        unshifted = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        timesteps, sigmas = sigma_schedule(self.pipe.scheduler, mu=mu, sigmas=unshifted)
        return timesteps, sigmas, (self.transformer.config.in_channels, h, w)

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
        batch = len(latents)
        prompt_embeds = conditioning["prompt_embeds"]
        tokens = self.pipe._pack_latents(latents)
        timestep = timestep.to(latents.device).expand(batch)
        velocity = self.transformer(
            hidden_states=tokens.to(prompt_embeds.dtype),
            timestep=timestep / 1000,
            guidance=None,
            encoder_hidden_states=prompt_embeds,
            txt_ids=self.pipe._prepare_text_ids(prompt_embeds).to(latents.device),
            img_ids=self.pipe._prepare_latent_ids(latents).to(latents.device),
            return_dict=False,
        )[0]
        return velocity.float().transpose(1, 2).reshape(latents.shape)  # the tokens are in the latents' order

    def _latent_statistics(self):
        """Mean and standard deviation (C, 1, 1) of the VAE's latents, 2 x 2 of them together."""
        vae = self.pipe.vae
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        return vae.bn.running_mean[:, None, None], std[:, None, None]

    @torch.no_grad()
    def decode(self, latents):
        """Latents (B, ...) -> list of B PIL images, as the pipeline decodes them."""
        vae = self.pipe.vae
        with on_device(self, "vae"):
            mean, std = self._latent_statistics()
            latents = self.pipe._unpatchify_latents(latents.to(vae.device, vae.dtype) * std + mean)
            pixels = decode_in_slices(vae, latents, scale=self.pipe.vae_scale_factor**2)
        return self.pipe.image_processor.postprocess(pixels)

    @torch.no_grad()
    def encode_images(self, images, height, width):
        """List of B PIL images, resized where they differ -> latents (B, ...), the mode of the VAE's posterior."""
        vae = self.pipe.vae
        pixels = self.pipe.image_processor.preprocess(images, height, width)
        with on_device(self, "vae"):
            mean, std = self._latent_statistics()
            latents = encode_in_slices(vae, pixels.to(vae.device, vae.dtype))
        return (self.pipe._patchify_latents(latents) - mean) / std

    def frozen_tensors(self):
        """All numbers of the model that latents and conditioning depend on, in a fixed order."""
        return [*self.pipe.vae.state_dict().values(), *self.pipe.text_encoder.state_dict().values()]

    @staticmethod
    def engine_pipeline():
        """vLLM-Omni's FLUX.2-klein with our hooks; imported in the engine's process, where vLLM is."""
        from common.engine.pipelines import SDERolloutMixin

        from vllm_omni.diffusion.models.flux2_klein.pipeline_flux2_klein import Flux2KleinPipeline

        class Flux2KleinRollout(SDERolloutMixin, Flux2KleinPipeline):
            """Prompt embeddings come with the requests, which the native pipeline does not ask for; the VAE is fp32, as
            the trainer's is."""

            timestep_unit = 1000  # of the transformer's input: it takes t / 1000
            supports_request_batch = False  # the native one takes an image at a time

            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.vae.float()
                self.device = self._execution_device

            def forward(self, req, *args, **kwargs):
                for prompt in req.prompts:
                    if isinstance(prompt, dict) and "prompt_embeds" in prompt:
                        prompt["prompt"] = PLACEHOLDER
                return super().forward(req, *args, **kwargs)

            def pack(self, latents):
                return self._pack_latents(latents)

            def unpack(self, latents):
                return latents.transpose(1, 2).reshape(len(latents), *self._run.latent_shape)

            def encode_prompt(self, prompt, **kwargs):
                if self._run is not None:  # asked twice: for the prompt, and for "", the negative one
                    name = "prompt_embeds" if prompt == PLACEHOLDER else "negative_prompt_embeds"
                    kwargs["prompt_embeds"] = self._run.prompts[0][name][None].to(self.device)
                return super().encode_prompt(prompt, **kwargs)

            def load_weights(self, weights):
                self.text_encoder = self.text_encoder or torch.nn.Module()  # let go by now; its parameters are listed
                return super().load_weights(weights)

        return Flux2KleinRollout
