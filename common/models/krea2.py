"""Krea 2 (diffusers `Krea2Pipeline`): base is guided by a second pass, distilled (Turbo) takes no guidance.

The pipeline counts guidance from 0, and we count it from 1 as in every family: our 5.5 is the pipeline's 4.5.
"""

from pathlib import Path
from typing import Any

from common.models.family import Conditioning, Config, Family, Schedule, Shapes
from common.models.parts import (
    ATTENTION,
    check_multiples,
    check_no_guidance,
    decode_frames,
    encode_frames,
    even_sigmas,
    shifted_schedule,
    sigma_schedule,
)

import torch
from diffusers import AutoencoderKLQwenImage, Krea2Pipeline

DISTILLED_MU = 1.15  # the shift of a distilled model's schedule at every size, a number of the pipeline's __call__


class Krea2(Family):
    """The transformer takes tokens (B, h w / 4, 4 C), each of 2 x 2 latents; `forward` packs them.

    A prompt has the states of several layers of the text encoder, which the transformer joins in blocks of its own.
    """

    attention_kernels = ("native",)
    masks_attention = True
    lora_target_modules = ATTENTION
    is_split_by_engine = False  # vLLM-Omni's transformer has layers that every worker would hold whole

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse sides that are no multiple of a token's, and guidance for a distilled model."""
        vae = AutoencoderKLQwenImage.load_config(model, subfolder="vae")
        pipeline = Krea2Pipeline.load_config(model)
        unit = pipeline.get("patch_size", 2) * 2 ** len(vae["temperal_downsample"])  # pixels of a token's side
        check_multiples(height, width, unit)
        if pipeline.get("is_distilled"):
            check_no_guidance(guidance_scale)

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        return {
            "prompt_embeds": (max_sequence_length, transformer["num_text_layers"], transformer["text_hidden_dim"]),
            "prompt_embeds_mask": (max_sequence_length,),
        }

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, layers, C), "prompt_embeds_mask": (B, L), 1 at a token}.

        L is max_sequence_length for every prompt. The template's last five tokens stand at its end, behind the zeros.
        """
        embeds, mask = self.pipe.encode_prompt(prompts, device=self.device, max_sequence_length=max_sequence_length)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask.long()}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        patch = self.pipe.patch_size
        h = height // self.pipe.vae_scale_factor
        w = width // self.pipe.vae_scale_factor
        unshifted = even_sigmas(num_inference_steps)
        if self.pipe.config.is_distilled:
            timesteps, sigmas = sigma_schedule(self.pipe.scheduler, mu=DISTILLED_MU, sigmas=unshifted)
        else:
            num_tokens = (h // patch) * (w // patch)
            timesteps, sigmas = shifted_schedule(self.pipe.scheduler, unshifted, num_tokens=num_tokens)
        return timesteps, sigmas, (self.transformer.config.in_channels // patch**2, h, w)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        prompt_embeds = conditioning["prompt_embeds"]
        batch, channels, h, w = latents.shape
        patch = self.pipe.patch_size
        scale = self.pipe.vae_scale_factor
        tokens = self.pipe._pack_latents(latents, batch, channels, h, w)
        positions = self.pipe.prepare_position_ids(prompt_embeds.shape[1], h // patch, w // patch, latents.device)
        velocity = self.transformer(
            hidden_states=tokens.to(prompt_embeds.dtype),
            encoder_hidden_states=prompt_embeds,
            timestep=timestep / 1000,
            position_ids=positions,
            encoder_attention_mask=conditioning["prompt_embeds_mask"].bool(),
            return_dict=False,
        )[0]
        return self.pipe._unpack_latents(velocity.float(), scale * h, scale * w)[:, :, 0]

    decode_vae = decode_frames
    encode_vae = encode_frames

    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        from vllm_omni.diffusion.models.krea2.pipeline_krea2 import Krea2Pipeline as NativePipeline

        class Krea2Rollout(mixin, NativePipeline):  # type: ignore[misc, valid-type]  # made at run time
            as_one_request = True
            timestep_unit = 1000  # the transformer's input is t / 1000

            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self.transformer.stacked_params_mapping = []  # q, k and v are layers of their own

            @property
            def do_classifier_free_guidance(self) -> bool:
                return self._guidance_scale > 1  # ours, which counts from 1

            def pack(self, latents: torch.Tensor) -> torch.Tensor:
                return self._pack_latents(latents, *latents.shape)

            def unpack(self, latents: torch.Tensor) -> torch.Tensor:
                _, h, w = self.latent_shape
                scale = self.vae_scale_factor
                return self._unpack_latents(latents, scale * h, scale * w)[:, :, 0]

            def _extract_prompts(self, prompts: list) -> tuple[list[str], list[str]]:
                """For each prompt the fields that hold its embeddings, which encode_prompt reads."""
                return ["prompt_embeds"] * len(prompts), ["negative_prompt_embeds"] * len(prompts)

            def encode_prompt(self, prompt: list[str], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
                name = prompt[0]
                return self.conditioning(name), self.conditioning(f"{name}_mask").bool()

            def predict_noise(self, **kwargs: Any) -> torch.Tensor:
                return self.transformer(**kwargs).float()  # a tensor, where other transformers return a tuple

            def diffuse(self, latents: torch.Tensor, timesteps: torch.Tensor, **given: Any) -> torch.Tensor:
                """The native loop by our hooks. It calls the transformer and the scheduler itself."""
                guided = self.do_classifier_free_guidance
                for t in timesteps:
                    inputs = inputs_of("", latents, given)
                    negative = inputs_of("negative_", latents, given) if guided else None
                    scale = given["guidance_scale"]
                    v = self.predict_noise_maybe_with_cfg(guided, scale, inputs, negative, cfg_normalize=False)
                    latents = self.scheduler_step_maybe_with_cfg(v, t, latents, guided)
                return latents

        return Krea2Rollout


def inputs_of(prefix: str, latents: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """What the transformer takes for a branch of guidance, except for the timestep. given: `diffuse`'s arguments."""
    return {
        "hidden_states": latents,
        "encoder_hidden_states": given[f"{prefix}prompt_embeds"],
        "encoder_attention_mask": given[f"{prefix}prompt_embeds_mask"],
        "position_ids": given["position_ids"],
    }
