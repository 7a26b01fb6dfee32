"""PickScore (arXiv 2305.01569): which image would people pick? A CLIP trained on 500,000 of their choices.

The environment variable PICKSCORE_MODEL names the weights, by default yuvalkirstain/PickScore_v1 (3.9 GB in fp32), and
PICKSCORE_PROCESSOR the tokenizer and image processor, by default laion/CLIP-ViT-H-14-laion2B-s32B-b79K, which it was
trained with: hub ids, or folders in transformers' layout.
"""

from common.rewards.clip_score import embed_images, embed_prompts, load_clip, load_processor, offload, weights_of

import torch


@torch.no_grad()
def pickscore(images, prompts, metadata):
    """exp(logit_scale) cos(image, prompt) / 26, as in Flow-GRPO's code; without the 26 it is the paper's score.

    exp(logit_scale) is about 100: images of today's models score about .75 to .9.
    """
    model, processor = load()
    products = embed_images(model, processor, images) * embed_prompts(model, processor, prompts)  # (B, D)
    cosines = products.sum(1)  # (B,)
    return (model.logit_scale.exp() * cosines / 26).tolist()


def load():
    """The CLIPModel and its processor."""
    model = weights_of("PICKSCORE_MODEL", "yuvalkirstain/PickScore_v1")
    processor = weights_of("PICKSCORE_PROCESSOR", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
    return load_clip(model), load_processor(processor)


pickscore.settings = ("PICKSCORE_MODEL", "PICKSCORE_PROCESSOR")
pickscore.load = load
pickscore.offload = offload
