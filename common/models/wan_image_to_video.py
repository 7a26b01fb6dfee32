"""Wan, image to video (diffusers `WanImageToVideoPipeline`): a record's picture is the first frame of its video."""

from pathlib import Path
from typing import Any

from common.data import PromptSet
from common.models.family import Conditioning, Config, Shapes, on_device
from common.models.parts import latent_statistics
from common.models.vae import encode_in_slices
from common.models.wan import Wan

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
from PIL.Image import Image

TEXT_TOKENS = 512  # that a transformer with an image encoder takes: its attention splits text from picture there
IMAGE_TOKENS = 257  # that the published image encoder, a CLIP ViT-H/14 at 224 pixels, makes of a picture


class WanImageToVideo(Wan):
    """There are two kinds of checkpoint.

    - Wan 2.1 I2V: beside the latents the transformer gets those of a video which is the picture and then grey frames,
      and a mask of the first frame. Where the checkpoint has an image encoder, the blocks also read its embeddings.
    - Wan 2.2 TI2V-5B (the pipeline's `expand_timesteps`): the picture's latents stand in for the first frame of the
      latents, at timestep 0. The transformer never sees what the latents hold there, and its velocity for that frame
      means nothing.

    The second kind needs a velocity for the first frame that the rest of the project can treat like any other. We take
    v = (x - source) / sigma, the flow whose data is the picture alone: x - sigma v is the picture at each step, and the
    last step, which has no noise, ends there. This v depends on no weights, so the frame adds 0 to a log-ratio, a KL
    divergence and the gradient (docs/editing_and_video.md has what that means for --clip_range).
    """

    num_sources = (1, 1)

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """As Wan, and refuse a transformer that takes no picture, or a first and a last frame."""
        Wan.check(model, height, width, num_frames, guidance_scale)
        transformer = WanTransformer3DModel.load_config(model, subfolder="transformer")
        if transformer.get("pos_embed_seq_len"):
            raise ValueError(f"--model {model}: takes a first and a last frame, which is not supported")
        vae = AutoencoderKLWan.load_config(model, subfolder="vae")
        wanted = vae["z_dim"]
        if not WanImageToVideoPipeline.load_config(model).get("expand_timesteps"):
            wanted = 2 * vae["z_dim"] + vae.get("scale_factor_temporal", 4)
        if transformer["in_channels"] != wanted:
            channels = f"{transformer['in_channels']} input channels in place of {wanted}"
            raise ValueError(f"--model {model}: its transformer has {channels}, so it takes no picture")

    @staticmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        length = max_sequence_length if transformer.get("image_dim") is None else TEXT_TOKENS
        return {"prompt_embeds": (length, transformer["text_dim"])}

    def source_shapes(self, latent_shape: tuple[int, ...], count: int) -> Shapes:
        """{name: shape} of the conditioning of one picture, for a video whose latents have this shape (C, f, h, w)."""
        channels, frames, height, width = latent_shape
        if self.pipe.config.expand_timesteps:
            frames = 1
        shapes: Shapes = {"source_latents": (channels, frames, height, width)}
        image_dim = self.transformer.config.image_dim
        if image_dim is not None:
            shapes["source_embeds"] = (IMAGE_TOKENS, image_dim)
        return shapes

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """B prompts -> {"prompt_embeds": (B, L, C)}, with zeros behind a prompt's last token.

        With an image encoder L is TEXT_TOKENS; a prompt is still cut at max_sequence_length.
        """
        prompt_embeds = super().encode_batch(prompts, max_sequence_length)["prompt_embeds"]
        if self.transformer.config.image_dim is not None:
            missing = TEXT_TOKENS - prompt_embeds.shape[1]
            prompt_embeds = torch.nn.functional.pad(prompt_embeds, (0, 0, 0, missing))
        return {"prompt_embeds": prompt_embeds}

    def encode(
        self, prompts: PromptSet, max_sequence_length: int, image_size: tuple[int, int], num_frames: int = 1
    ) -> Conditioning:
        """Conditioning of B prompts and of their pictures, as the first frames of videos of num_frames frames."""
        conditioning = self.encode_prompts(prompts.prompts, max_sequence_length)
        pictures = [of_record[0] for of_record in prompts.sources()]
        conditioning["source_latents"] = self.encode_first_frames(pictures, image_size, num_frames)
        if self.transformer.config.image_dim is not None:
            conditioning["source_embeds"] = self.embed_pictures(pictures)
        return conditioning

    @torch.no_grad()
    def encode_first_frames(self, pictures: list[Image], image_size: tuple[int, int], num_frames: int) -> torch.Tensor:
        """B pictures, brought to image_size -> latents (B, C, f, h, w) in fp32, as the VAE is, of the picture and
        num_frames - 1 grey frames; or (B, C, 1, h, w), of the picture alone, with `expand_timesteps`.
        """
        vae = self.pipe.vae
        if self.pipe.config.expand_timesteps:
            num_frames = 1
        latents = []
        with on_device(self, "vae"):
            mean, std = latent_statistics(vae)  # (C, 1, 1, 1) each
            for picture in pictures:  # one at a time: the pixels of 81 frames of 480 x 832 take 400 MB
                pixels = self.pipe.video_processor.preprocess(picture, *image_size).to(vae.device)
                frames = pixels.new_zeros(1, 3, num_frames, *image_size)
                frames[:, :, 0] = pixels
                latents.append((encode_in_slices(vae, frames) - mean) / std)
        return torch.cat(latents)

    @torch.no_grad()
    def embed_pictures(self, pictures: list[Image]) -> torch.Tensor:
        """B pictures -> the image encoder's embeddings (B, N, C).

        It sees a picture in its own shape, as in the stock pipeline, and crops and resizes it itself.
        """
        with on_device(self, "image_encoder"):
            embeds = [self.pipe.encode_image(picture, self.device) for picture in pictures]
        return torch.cat(embeds)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        source = conditioning["source_latents"].to(latents)
        expands = self.pipe.config.expand_timesteps
        inputs, of_tokens = with_source(latents, timestep, source, self.transformer.config, expands)
        velocity = super().forward(inputs, of_tokens, conditioning)
        if expands:
            return towards_source(velocity, latents, timestep, source)
        return velocity

    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        """vLLM-Omni's Wan, text to video, with our hooks and the pictures.

        Its image-to-video pipeline encodes pictures itself, and does not read `expand_timesteps` from the checkpoint.
        """

        class WanImageToVideoRollout(Wan.engine_pipeline(mixin)):  # type: ignore[misc]  # made at run time
            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                embedder = self.transformer.condition_embedder.image_embedder
                if embedder is not None:  # diffusers' epsilon, where vLLM-Omni has 1e-6
                    embedder.norm1.eps = embedder.norm2.eps = 1e-5

            def predict_noise(self, hidden_states: torch.Tensor, timestep: torch.Tensor, **kwargs: Any) -> torch.Tensor:
                source = self.conditioning("source_latents").to(hidden_states)
                config = self.transformer_config
                if config.image_dim is not None:
                    kwargs["encoder_hidden_states_image"] = self.conditioning("source_embeds").to(hidden_states)
                inputs, of_tokens = with_source(hidden_states, timestep, source, config, self.expand_timesteps)
                return super().predict_noise(hidden_states=inputs, timestep=of_tokens, **kwargs)

            def scheduler_step_maybe_with_cfg(
                self,
                noise_pred: torch.Tensor,
                t: torch.Tensor,
                latents: torch.Tensor,
                *args: Any,
                **kwargs: Any,
            ) -> torch.Tensor:
                if self.expand_timesteps:
                    timestep = self._run.timestep.to(self.device)
                    source = self.conditioning("source_latents").to(latents)
                    noise_pred = towards_source(noise_pred, latents, timestep, source)
                return super().scheduler_step_maybe_with_cfg(noise_pred, t, latents, *args, **kwargs)

        return WanImageToVideoRollout


def with_source(
    latents: torch.Tensor, timestep: torch.Tensor, source: torch.Tensor, config: Any, expand_timesteps: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the transformer takes for latents (B, C, f, h, w) and a timestep (B,): they, and the picture's latents.

    Without expand_timesteps: latents, masks of the first frame, and the source's latents (B, C, f, h, w), one behind
    the other, (B, in_channels, f, h, w), and the same timestep. There is a mask for each of the frames that a frame of
    latents stands for. With it: latents whose first frame is the source's (B, C, 1, h, w), and a timestep per token
    (B, n), 0 in the first frame.
    """
    batch, channels, frames, height, width = latents.shape
    if not expand_timesteps:
        masks = latents.new_zeros(batch, config.in_channels - 2 * channels, frames, height, width)
        masks[:, :, 0] = 1
        return torch.cat([latents, masks, source], 1), timestep
    tokens = height // config.patch_size[1] * (width // config.patch_size[2])  # of a frame
    of_tokens = timestep[:, None].repeat(1, frames * tokens)
    of_tokens[:, :tokens] = 0
    return torch.cat([source, latents[:, :, 1:]], 2), of_tokens


def towards_source(
    velocity: torch.Tensor, latents: torch.Tensor, timestep: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """A velocity (B, C, f, h, w) whose first frame is (x - source) / sigma, at latents x (B, C, f, h, w).

    timestep: 1000 sigma, one number or (B,). source: the picture's latents, (B, C, 1, h, w).
    """
    sigma = timestep.view(-1, 1, 1, 1, 1) / 1000
    of_source = (latents[:, :, :1] - source) / sigma
    return torch.cat([of_source, velocity[:, :, 1:]], 2)
