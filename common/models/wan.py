"""Wan 2.1 and Wan 2.2 TI2V-5B, text to video (diffusers `WanPipeline`): guidance by a second pass."""

from common.bounds import check_multiples
from common.models import both_branches, on_device
from common.schedule import sigma_schedule
from common.vae import decode_in_slices

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel


class Wan:
    """Latents are (B, C, f, h, w): one frame of them for a video's first frame, and one for every four after it."""

    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    encode_images = None  # what it makes are videos

    @staticmethod
    def check(model, height, width, num_frames, guidance_scale=1.0):
        """Raises ValueError: a second transformer, a side that is no multiple of a token's, or frames left over."""
        pipeline = WanPipeline.load_config(model)
        second_transformer = pipeline.get("transformer_2", [None])[0]  # its library
        if second_transformer or pipeline.get("boundary_ratio") is not None:
            raise ValueError(f"--model {model}: is of two transformers, as A14B is; Wan 2.1 and TI2V-5B are supported")
        vae = AutoencoderKLWan.load_config(model, subfolder="vae")
        transformer = WanTransformer3DModel.load_config(model, subfolder="transformer")
        unit = vae.get("scale_factor_spatial", 8) * transformer["patch_size"][1]  # pixels of a token's side
        check_multiples(height, width, unit)
        # frames to a frame of latents; Wan 2.1's config does not name its factors
        frames = vae.get("scale_factor_temporal", 4)
        if num_frames % frames != 1 or num_frames == 1:
            raise ValueError(f"--num_frames {num_frames}: must be {frames} k + 1, and more than 1")

    @staticmethod
    def conditioning_shapes(transformer, max_sequence_length):
        """{name: shape} of the conditioning of one prompt, by the transformer's config."""
        return {"prompt_embeds": (max_sequence_length, transformer["text_dim"])}

    def __init__(self, pipe):
        self.pipe = pipe
        self.transformer = pipe.transformer

    @torch.no_grad()
    def encode_prompts(self, prompts, max_sequence_length):
        """B prompts -> {"prompt_embeds": (B, L, C)}, zeros behind the last token, in the text encoder's dtype."""
        prompt_embeds = []
        with on_device(self, "text_encoder"):
            for i in range(0, len(prompts), 32):  # UMT5's attention over thousands of prompts would not fit a GPU
                embeds, _ = self.pipe.encode_prompt(
                    prompts[i : i + 32],
                    do_classifier_free_guidance=False,
                    max_sequence_length=max_sequence_length,
                    device=self.device,
                )
                prompt_embeds.append(embeds)
        return {"prompt_embeds": torch.cat(prompt_embeds)}

    def encode_negative(self, guidance_scale, max_sequence_length):
        """Conditioning of the empty prompt, one row, for the second pass of guidance above 1; None without."""
        return self.encode_prompts([""], max_sequence_length) if guidance_scale > 1 else None

    def schedule(self, num_inference_steps, height, width, num_frames=1):
        """Timesteps (T,), sigmas (T + 1,) and the shape (C, f, h, w) of one video's latents."""
        f = (num_frames - 1) // self.pipe.vae_scale_factor_temporal + 1
        h = height // self.pipe.vae_scale_factor_spatial
        w = width // self.pipe.vae_scale_factor_spatial
        _, sigmas = sigma_schedule(self.pipe.scheduler, num_inference_steps=num_inference_steps)
        # not the scheduler's own: UniPC, which the published models come with, rounds them down to whole numbers
        timesteps = 1000 * sigmas[:-1]
        return timesteps, sigmas, (self.transformer.config.in_channels, f, h, w)

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
            # TI2V-5B's pipeline gives every token a timestep (`expand_timesteps`): in text to video they are all one
            timestep=timestep.to(latents.device).expand(len(latents)),
            encoder_hidden_states=prompt_embeds,
            return_dict=False,
        )[0]
        return velocity.float()

    @torch.no_grad()
    def decode(self, latents):
        """Latents (B, ...) -> list of B videos, lists of PIL frames, as the pipeline decodes them."""
        vae = self.pipe.vae
        scale = self.pipe.vae_scale_factor_spatial**2 * self.pipe.vae_scale_factor_temporal
        with on_device(self, "vae"):
            statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=vae.device)
            mean, std = statistics.view(2, -1, 1, 1, 1)  # (C, 1, 1, 1) each
            latents = latents.to(vae.device, vae.dtype) * std + mean
            pixels = decode_in_slices(vae, latents, scale)  # (B, 3, frames, height, width)
        return self.pipe.video_processor.postprocess_video(pixels, output_type="pil")

    @staticmethod
    def engine_pipeline():
        """vLLM-Omni's Wan with our hooks; imported in the engine's process, where vLLM is."""
        from common.engine.pipelines import SDERolloutMixin

        from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline

        class WanRollout(SDERolloutMixin, Wan22Pipeline):
            """Prompt embeddings come with the requests; the VAE is fp32, as the trainer's is."""

            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.vae.float()

            def module_name(self, name):
                return name.replace("to_out.0", "to_out")

            def weight_name(self, name):
                if name == "scale_shift_table":
                    return "output_scale_shift_prepare.scale_shift_table"
                return self.module_name(name).replace(".ffn.net.", ".ffn.net_")

            def pixels(self, output):
                return output.media.video.tensor

            def load_weights(self, weights):
                loaded = super().load_weights(weights)
                # the one weight that is loaded under another name, and told of under that name alone
                if "transformer.output_scale_shift_prepare.scale_shift_table" in loaded:
                    loaded.add("transformer.scale_shift_table")
                return loaded

        return WanRollout
