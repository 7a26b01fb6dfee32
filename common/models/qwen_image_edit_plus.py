"""Qwen-Image-Edit-Plus (diffusers `QwenImageEditPlusPipeline`): makes an image of one to four pictures of a record."""

from typing import Any

from common.data import PromptSet
from common.models.family import Conditioning, on_device
from common.models.qwen_image import QwenImage

import torch
import torch.nn.functional as F
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock
from PIL.Image import Image

SLIMMEST = 100  # as wide as high, or as high as wide; the text encoder's processor refuses 200


class QwenImageEditPlus(QwenImage):
    """Qwen-Image whose text encoder sees the pictures, and whose transformer has their tokens behind the image's.

    The transformer gets each picture at --image_size, so that each image of a batch has as many tokens; the stock
    pipeline brings it to about a million pixels. The text encoder sees it at about 384 x 384 pixels, in its own shape,
    as in the stock pipeline. So does the negative prompt.

    --max_sequence_length counts the tokens of the prompt and of the template behind it, as for Qwen-Image. Room for the
    pictures, source_tokens each, is added to it: a picture never cuts the prompt off.
    """

    num_sources = (1, 4)
    source_tokens = 256  # at most 235 of 28 x 28 pixels each, whatever a picture's shape, and its label

    def encode(
        self, prompts: PromptSet, max_sequence_length: int, image_size: tuple[int, int], num_frames: int = 1
    ) -> Conditioning:
        """encode_edits of B prompts and their pictures, and the pictures' latents at image_size."""
        sources = prompts.sources()
        conditioning = self.encode_edits(prompts.prompts, sources, max_sequence_length)
        return conditioning | self.encode_sources(sources, *image_size)

    def encode_negative(
        self, negatives: PromptSet, guidance_scale: float, max_sequence_length: int
    ) -> Conditioning | None:
        """encode_edits of U negative prompts, each with the pictures of its record; None without guidance."""
        if guidance_scale <= 1:
            return None
        return self.encode_edits(negatives.prompts, negatives.sources(), max_sequence_length)

    @torch.no_grad()
    def encode_edits(self, prompts: list[str], sources: list[list[Image]], max_sequence_length: int) -> Conditioning:
        """B prompts and the S pictures of each -> {"prompt_embeds": (B, n, C), "prompt_embeds_mask": (B, n)}.

        n is max_sequence_length + S source_tokens, whatever the pictures' shapes. The mask is 1 at a token and 0
        behind the last. Each prompt is encoded alone, as by the stock pipeline: none depends on another's pictures.
        """
        prompt_embeds = []
        masks = []
        with on_device(self, "text_encoder"):
            for prompt, pictures in zip(prompts, sources, strict=True):
                seen = [self.pipe.image_processor.resize(picture, *size_to_see(picture)) for picture in pictures]
                embeds, _ = self.pipe.encode_prompt([prompt], image=seen or None, device=self.device)
                mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=self.device)
                # below 0 where the prompt is cut off
                missing = max_sequence_length + len(pictures) * self.source_tokens - embeds.shape[1]
                prompt_embeds.append(F.pad(embeds, (0, 0, 0, missing)))
                masks.append(F.pad(mask, (0, missing)))
        return {"prompt_embeds": torch.cat(prompt_embeds), "prompt_embeds_mask": torch.cat(masks)}

    def pack(self, latents: torch.Tensor, conditioning: Conditioning) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        """The tokens (B, (1 + S) n, 4 C) of latents and S pictures, and the 1 + S (frames, rows, columns) of these."""
        tokens, shapes = super().pack(latents, conditioning)
        sources = conditioning["source_latents"].to(latents)  # (B, S, C, h, w)
        of_sources, _ = super().pack(sources.flatten(0, 1), conditioning)  # (B S, n, 4 C)
        of_sources = of_sources.unflatten(0, sources.shape[:2]).flatten(1, 2)  # (B, S n, 4 C)
        return torch.cat([tokens, of_sources], 1), shapes * (1 + sources.shape[1])

    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        """vLLM-Omni's Qwen-Image with our hooks and the pictures' tokens: its pipeline for edits takes no batch."""

        class QwenImageEditPlusRollout(QwenImage.engine_pipeline(mixin)):  # type: ignore[misc]  # made at run time
            def predict_noise(self, hidden_states: torch.Tensor, img_shapes: list, **kwargs: Any) -> torch.Tensor:
                sources = self.conditioning("source_latents")  # (B, S, C, h, w)
                tokens = self.pack(sources.flatten(0, 1).to(hidden_states))
                tokens = tokens.unflatten(0, sources.shape[:2]).flatten(1, 2)
                both = {
                    "hidden_states": torch.cat([hidden_states, tokens], 1),
                    "img_shapes": [shapes * (1 + sources.shape[1]) for shapes in img_shapes],
                }
                return super().predict_noise(**both, **kwargs)[:, : hidden_states.shape[1]]

        return QwenImageEditPlusRollout


def size_to_see(picture: Image) -> tuple[int, int]:
    """(height, width) at which the text encoder sees a picture: the stock pipeline's, about 384 x 384 pixels."""
    ratio = min(max(picture.width / picture.height, 1 / SLIMMEST), SLIMMEST)
    width, height = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, ratio)
    return height, width
