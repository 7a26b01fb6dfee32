"""FLUX.2-klein (diffusers `Flux2KleinPipeline`): base is guided by a second pass, distilled takes no guidance.

A record's pictures are references: the transformer sees their tokens behind those of the image that it makes.
"""

from pathlib import Path
from typing import Any

from common.models.family import Conditioning, Config, Family, Schedule, Shapes
from common.models.parts import JOINT_ATTENTION, check_multiples, check_no_guidance, even_sigmas, sigma_schedule
from common.models.vae import decode_in_slices, encode_in_slices

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL.Image import Image

PLACEHOLDER = "a prompt"  # vLLM-Omni's pipeline wants a text even if it gets embeddings


def add_sources(
    tokens: torch.Tensor, positions: torch.Tensor, sources: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, n, C) and positions (B, n, 4) of images, with those of S sources each, (B, S, C, h, w), behind them.

    The first number of a position tells pictures apart: 0 is the image, 10 the first source, 20 the second one.
    """
    of_each = sources.to(tokens).unbind(1)  # S of (B, C, h, w)
    at = Flux2KleinPipeline._prepare_image_ids([source[:1] for source in of_each])  # (1, S h w, 4), for all images
    packed = [Flux2KleinPipeline._pack_latents(source) for source in of_each]
    tokens = torch.cat([tokens, *packed], 1)
    return tokens, torch.cat([positions, at.expand(len(positions), -1, -1).to(positions)], 1)


class Flux2Klein(Family):
    """A latent is 2 x 2 latents of the VAE, normalised, and one token: the transformer takes (B, h w, C).

    References are brought to --image_size, so that each image of a batch has as many tokens. The stock pipeline keeps
    a picture's own size up to about a million pixels.
    """

    level_steps = 50  # the shift depends on the number of steps; at 1,000 it would leave hardly any noise
    num_sources = (0, 4)  # by Black Forest Labs' documentation; the pipeline itself counts none
    lora_target_modules = (*JOINT_ATTENTION, "to_qkv_mlp_proj")  # the last one is in the single-stream blocks
    attention_kernels = ("native", "flash")  # cuDNN's gradient is wrong (`use_attention`)

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's, and guidance for a distilled model."""
        vae = AutoencoderKLFlux2.load_config(model, subfolder="vae")
        unit = 2 * 2 ** (len(vae["block_out_channels"]) - 1)  # pixels of a token's side
        check_multiples(height, width, unit)
        if Flux2KleinPipeline.load_config(model).get("is_distilled"):
            check_no_guidance(guidance_scale)

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        return {"prompt_embeds": (max_sequence_length, transformer["joint_attention_dim"])}

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C)}: three layers of the encoder side by side, padding included."""
        embeds, _ = self.pipe.encode_prompt(prompts, device=self.device, max_sequence_length=max_sequence_length)
        return {"prompt_embeds": embeds}

    def sequence_lengths(
        self, latent_shape: tuple[int, ...], max_sequence_length: int, num_sources: int
    ) -> dict[str, int]:
        _, h, w = latent_shape
        return {"--max_sequence_length": max_sequence_length, "--image_size": (1 + num_sources) * h * w}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        unit = 2 * self.pipe.vae_scale_factor
        h, w = height // unit, width // unit
        mu = compute_empirical_mu(image_seq_len=h * w, num_steps=num_inference_steps)
        timesteps, sigmas = sigma_schedule(self.pipe.scheduler, mu=mu, sigmas=even_sigmas(num_inference_steps))
        return timesteps, sigmas, (self.transformer.config.in_channels, h, w)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        prompt_embeds = conditioning["prompt_embeds"]
        tokens = self.pipe._pack_latents(latents)
        positions = self.pipe._prepare_latent_ids(latents).to(latents.device)
        if "source_latents" in conditioning:
            tokens, positions = add_sources(tokens, positions, conditioning["source_latents"])
        velocity = self.transformer(
            hidden_states=tokens.to(prompt_embeds.dtype),
            timestep=timestep / 1000,
            guidance=None,
            encoder_hidden_states=prompt_embeds,
            txt_ids=self.pipe._prepare_text_ids(prompt_embeds).to(latents.device),
            img_ids=positions,
            return_dict=False,
        )[0]
        velocity = velocity[:, : latents[0, 0].numel()]  # behind them come the references'
        return velocity.float().transpose(1, 2).reshape(latents.shape)  # tokens are in the latents' order

    def _latent_statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation (C, 1, 1) of 2 x 2 latents of the VAE."""
        vae = self.pipe.vae
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        return vae.bn.running_mean[:, None, None], std[:, None, None]

    def decode_vae(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipe.vae
        mean, std = self._latent_statistics()
        latents = self.pipe._unpatchify_latents(latents.to(vae.device) * std + mean)
        return decode_in_slices(vae, latents, scale=self.pipe.vae_scale_factor**2)

    def encode_vae(self, images: list[Image], height: int, width: int) -> torch.Tensor:
        vae = self.pipe.vae
        pixels = self.pipe.image_processor.preprocess(images, height, width)
        mean, std = self._latent_statistics()
        latents = encode_in_slices(vae, pixels.to(vae.device))
        return (self.pipe._patchify_latents(latents) - mean) / std

    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        from vllm_omni.diffusion.data import DiffusionOutput
        from vllm_omni.diffusion.models.flux2_klein.pipeline_flux2_klein import Flux2KleinPipeline
        from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

        class Flux2KleinRollout(mixin, Flux2KleinPipeline):  # type: ignore[misc, valid-type]  # made at run time
            timestep_unit = 1000  # the transformer's input is t / 1000
            supports_request_batch = False  # the native pipeline takes one image at a time

            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self.device = self._execution_device
                self.text_encoder = torch.nn.Module()  # the native load_weights lists its parameters

            def forward(self, req: DiffusionRequestBatch, *args: Any, **kwargs: Any) -> DiffusionOutput:
                for prompt in req.prompts:
                    if isinstance(prompt, dict) and "prompt_embeds" in prompt:
                        prompt["prompt"] = PLACEHOLDER
                return super().forward(req, *args, **kwargs)

            def pack(self, latents: torch.Tensor) -> torch.Tensor:
                return self._pack_latents(latents)

            def unpack(self, latents: torch.Tensor) -> torch.Tensor:
                return latents.transpose(1, 2).reshape(len(latents), *self.latent_shape)

            def encode_prompt(self, prompt: str, **kwargs: Any) -> tuple[torch.Tensor, ...]:
                if self._run is not None:  # called for the prompt, then for "", the negative prompt
                    name = "prompt_embeds" if prompt == PLACEHOLDER else "negative_prompt_embeds"
                    kwargs["prompt_embeds"] = self.conditioning(name)
                return super().encode_prompt(prompt, **kwargs)

            def predict_noise(self, **kwargs: Any) -> torch.Tensor:
                if self._run is None or "source_latents" not in self._run.prompts[0]:
                    return super().predict_noise(**kwargs)
                of_image = kwargs["hidden_states"]
                tokens, positions = add_sources(of_image, kwargs["img_ids"], self.conditioning("source_latents"))
                kwargs |= {"hidden_states": tokens, "img_ids": positions}
                return super().predict_noise(**kwargs)[:, : of_image.shape[1]]

        return Flux2KleinRollout
