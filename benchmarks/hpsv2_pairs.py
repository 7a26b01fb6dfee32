"""HPSv2.1's weights in transformers' CLIP beside open_clip, on shared random weights and the same pictures.

    pip install open_clip_torch    # in an environment of its own beside requirements.txt
    python benchmarks/hpsv2_pairs.py

A CLIP of open_clip with random weights is saved as HPSv2.1 is published; common/rewards/hpsv2.py reads it. Prints the
largest differences of scores and of embeddings, in fp32, for two sizes. The published weights are not needed.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu import repair_torchvision
from common.rewards._clip import embed_images, embed_prompts, load_processor
from common.rewards.hpsv2 import FILE, read_open_clip
from tests.tiny_models import CLIP_PIXELS, CLIP_WIDTH, make_clip

import numpy as np
import torch
from PIL import Image

PROMPTS = ["a red sign", 'a sign that says "4711"', "a fox in the snow, at night, with a lamp behind it"]
LAYERS = {"2 layers": 2, "5 layers": 5}


def main():
    repair_torchvision()
    import open_clip

    print("| model | scores, largest difference | embeddings | scores |")
    print("|---|---|---|---|")
    for label, layers in LAYERS.items():
        with tempfile.TemporaryDirectory() as work:
            folder = Path(make_clip(Path(work) / "clip", seed=1))
            config = set_layers(folder, layers)
            torch.manual_seed(layers)
            vision = {"image_size": CLIP_PIXELS, "layers": layers, "width": 32, "head_width": 16, "patch_size": 8}
            vision["mlp_ratio"] = 2.0
            text = {"context_length": 77, "vocab_size": config["vocab_size"], "width": 32, "heads": 2, "layers": layers}
            text |= {"mlp_ratio": 2.0}
            theirs = open_clip.model.CLIP(CLIP_WIDTH, vision, text, quick_gelu=False).eval()
            for parameter in theirs.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.2)
            torch.save({"state_dict": theirs.state_dict()}, folder / FILE)
            ours = read_open_clip(folder / FILE, str(folder))
            compare(label, theirs, ours, load_processor(("HPSV2_PROCESSOR", str(folder))))


def set_layers(folder, layers):
    """Give the config of a tiny CLIP so many layers, and open_clip's activation. Returns the text model's."""
    from transformers import CLIPConfig

    config = CLIPConfig.from_pretrained(folder)
    for part in (config.text_config, config.vision_config):
        part.num_hidden_layers = layers
        part.hidden_act = "gelu"
    config.save_pretrained(folder)
    return config.text_config.to_dict()


@torch.no_grad()
def compare(label, theirs, ours, processor):
    """Print a row of the table."""
    pixels = [np.random.default_rng(i).integers(0, 256, (4, 4, 3), dtype=np.uint8) for i in range(3)]
    images = [Image.fromarray(p).resize((64, 48), Image.Resampling.BICUBIC) for p in pixels]
    inputs = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    tokens = processor.tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    ids = tokens["input_ids"]
    last = ids.eq(processor.tokenizer.eos_token_id).int().argmax(1)
    ids = ids.masked_fill(torch.arange(77) > last[:, None], 0)  # open_clip pads with 0, and reads at the highest id
    assert (ids.argmax(1) == last).all()
    expected_images = theirs.encode_image(inputs, normalize=True)
    expected_texts = theirs.encode_text(ids, normalize=True)
    found_images = embed_images(ours, processor, images)
    found_texts = embed_prompts(ours, processor, PROMPTS)
    expected = (expected_images * expected_texts).sum(1)
    found = (found_images * found_texts).sum(1)
    off = max((found_images - expected_images).abs().max(), (found_texts - expected_texts).abs().max())
    scores = ", ".join(f"{score:.4f}" for score in expected.tolist())
    print(f"| {label} | {(found - expected).abs().max():.1e} | {off:.1e} | {scores} |")


if __name__ == "__main__":
    main()
