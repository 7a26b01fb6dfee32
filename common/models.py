"""What differs between model families: encoding prompts, predicting the velocity, decoding latents. One small object each.

A family's functions take the diffusers pipeline (or its transformer) and reuse the pipeline's own parts. `conditioning` is a dict of
tensors, (B, ...) each: what the transformer is told about the prompts.
"""
import json
from pathlib import Path

import torch
from diffusers import DiffusionPipeline


class StableDiffusion3:
    """Stable Diffusion 3 and 3.5 (diffusers `StableDiffusion3Pipeline`), and the embedded model, which is one."""

    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    @staticmethod
    def encode_prompts(pipe, prompts, max_sequence_length):
        """Prompts (list of B) -> {"prompt_embeds": (B, L, C), "pooled_prompt_embeds": (B, P)} in the text encoders' dtype."""
        prompt_embeds, _, pooled_prompt_embeds, _ = pipe.encode_prompt(
            prompt=prompts, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length,
            device=pipe.text_encoder.device)
        return {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled_prompt_embeds}

    @staticmethod
    def latent_shape(pipe, height, width):
        """(C, H / 8, W / 8) of one image's latents, and its number of image tokens (for dynamic shifting)."""
        channels, patch = pipe.transformer.config.in_channels, pipe.transformer.config.patch_size
        h, w = height // pipe.vae_scale_factor, width // pipe.vae_scale_factor
        return (channels, h, w), (h // patch) * (w // patch)

    @staticmethod
    def predict_velocity(transformer, latents, timesteps, conditioning, negative_conditioning=None, guidance_scale=1.0):
        """v (B, ...) fp32 at fp32 latents (B, ...) and timesteps (B,) in (0, 1000].

        Guidance above 1 adds the negative branch: v_neg + guidance_scale (v_pos - v_neg), with gradient through both.
        """
        def forward(c):
            return transformer(
                hidden_states=latents.to(c["prompt_embeds"].dtype), timestep=timesteps, encoder_hidden_states=c["prompt_embeds"],
                pooled_projections=c["pooled_prompt_embeds"], return_dict=False)[0].float()

        velocity = forward(conditioning)
        if guidance_scale > 1:
            negative = forward(negative_conditioning)
            velocity = negative + guidance_scale * (velocity - negative)
        return velocity

    @staticmethod
    def decode(pipe, latents):
        """Latents (B, ...) -> list of B PIL images, as the pipeline decodes them."""
        latents = latents.to(pipe.vae.device, pipe.vae.dtype) / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        return pipe.image_processor.postprocess(pipe.vae.decode(latents, return_dict=False)[0])


FAMILIES = {"StableDiffusion3Pipeline": StableDiffusion3}


def find_family(model):
    """Family of a diffusers folder or hub id, from its model_index.json, before anything is loaded.

    Raises:
        ValueError: naming what is missing, or the pipelines that are supported.
    """
    folder = Path(model)
    if folder.is_dir():
        index = folder / "model_index.json"
        if not index.is_file():
            raise ValueError(f"model {model}: not a diffusers pipeline (no model_index.json)")
        name = json.loads(index.read_text())["_class_name"]
    else:
        try:
            name = DiffusionPipeline.load_config(model)["_class_name"]
        except OSError as error:
            raise ValueError(f"model {model}: neither a folder nor a model that can be fetched: {str(error).splitlines()[0]}") from None
    if name not in FAMILIES:
        raise ValueError(f"model {model}: {name} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def load_pipeline(model, dtype, device):
    """Frozen diffusers pipeline in eval mode; the VAE stays fp32 (its rounding would show in the images)."""
    pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=dtype)
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval().to(device)
    pipe.vae.to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe
