"""hpsv2: open_clip's names read into transformers' CLIP. benchmarks/hpsv2_pairs.py compares it with open_clip."""

from common.rewards._clip import embed_images
from common.rewards._loading import load_rewards
from common.rewards.hpsv2 import FILE, hpsv2
from tests.tiny_models import make_hpsv2

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

PROMPTS = ["a red sign", 'a sign that says "4711"']
IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.radial_gradient("L").convert("RGB").resize((90, 90))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny CLIP, its weights as HPSv2.1's are published, and the variables that name them."""
    folder = make_hpsv2(tmp_path)
    monkeypatch.setenv("HPSV2_MODEL", str(tmp_path))
    monkeypatch.setenv("HPSV2_PROCESSOR", str(folder))
    monkeypatch.setattr("common.rewards._networks.LOADED", {})
    return folder


@torch.no_grad()
def test_scores_are_the_cosines_of_the_same_weights(folder, tmp_path, monkeypatch):
    model = CLIPModel.from_pretrained(folder).eval()
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(IMAGES, return_tensors="pt")["pixel_values"]
    images = model.get_image_features(pixels).pooler_output
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        texts.append(model.get_text_features(**tokenizer([prompt], return_tensors="pt")).pooler_output)
    expected = torch.nn.functional.cosine_similarity(images, torch.cat(texts)).tolist()
    scores = hpsv2(IMAGES, PROMPTS, [{}] * 2)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-2
    monkeypatch.setenv("HPSV2_MODEL", str(tmp_path / FILE))  # the file itself
    assert hpsv2(IMAGES, PROMPTS, [{}] * 2) == scores


@pytest.mark.parametrize("size", [(180, 90), (90, 180), (61, 90)])
def test_an_image_that_is_not_square_is_padded_not_cropped(folder, monkeypatch, size):
    """As HPSv2's transform has it: the longest side resized, then black on both sides, one more right and below."""
    seen = []
    monkeypatch.setattr("common.rewards.hpsv2.embed_images", lambda *args: seen.extend(args[2]) or embed_images(*args))
    image = Image.radial_gradient("L").convert("RGB").resize(size)
    with_sides = image.copy()
    for x in (0, size[0] - 4):
        with_sides.paste((255, 0, 0), (x, 0, x + 4, size[1]))
    scores = hpsv2([image, with_sides, IMAGES[0]], PROMPTS[:1] * 3, [{}] * 3)
    assert abs(scores[0] - scores[1]) > 1e-4
    side = CLIPImageProcessorPil.from_pretrained(folder).crop_size["height"]
    width, height = (round(length * side / max(size)) for length in size)
    left, top = (side - width) // 2, (side - height) // 2
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    expected = np.pad(resized, ((top, side - height - top), (left, side - width - left), (0, 0)))
    assert np.array_equal(seen[0], expected)
    assert seen[2] is IMAGES[0]


def test_weights_that_are_not_whole_are_named(folder, tmp_path):
    state = torch.load(tmp_path / FILE)
    del state["state_dict"]["visual.ln_pre.weight"]
    torch.save(state, tmp_path / FILE)
    told = f"^--reward hpsv2:.*HPSV2_MODEL={tmp_path}.*pre_layrnorm"
    with pytest.raises(ValueError, match=told) as error:
        load_rewards(["hpsv2"], [1.0])
    assert "\n" not in str(error.value)
    (tmp_path / FILE).unlink()
    with pytest.raises(ValueError, match="No such file"):
        load_rewards(["hpsv2"], [1.0])
