"""FLUX.1 Kontext (diffusers `FluxKontextPipeline`): edits the picture of a record, as its prompt says."""

from typing import Any

from common.models.family import Conditioning
from common.models.flux import Flux

import torch


class FluxKontext(Flux):
    """FLUX.1 dev whose transformer also sees the tokens of a picture, behind those of the image that it makes.

    The picture is brought to --image_size, so that each image of a batch has as many tokens. The stock pipeline
    brings it to the nearest of 17 sizes of about a million pixels, unless it is called with _auto_resize=False.
    """

    num_sources = (1, 1)

    def pack(self, latents: torch.Tensor, conditioning: Conditioning) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens (B, 2 n, 4 C) of latents and picture, and their positions (2 n, 3), whose first axis tells them
        apart."""
        tokens, positions = super().pack(latents, conditioning)
        of_source, at = super().pack(conditioning["source_latents"][:, 0].to(latents), conditioning)
        at[:, 0] = 1
        return torch.cat([tokens, of_source], 1), torch.cat([positions, at])

    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        """vLLM-Omni's FLUX.1 with our hooks and the pictures' tokens: its Kontext pipeline takes no batch."""

        class FluxKontextRollout(Flux.engine_pipeline(mixin)):  # type: ignore[misc]  # made at run time
            def predict_noise(self, hidden_states: torch.Tensor, img_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
                tokens = self.pack(self.conditioning("source_latents")[:, 0].to(hidden_states))
                at = img_ids.clone()  # the picture is as large as the image
                at[..., 0] = 1
                both = {"hidden_states": torch.cat([hidden_states, tokens], 1), "img_ids": torch.cat([img_ids, at])}
                return super().predict_noise(**both, **kwargs)[:, : hidden_states.shape[1]]

        return FluxKontextRollout
