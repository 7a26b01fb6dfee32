"""Rewards as functions of pixels with a gradient: they agree with their form for PIL images, and with differences."""

import sys

from assets.sign_colour import named_colour, sign_colour
from common.data import PromptSet
from common.errors import RunError
from common.rewards._clip import preprocess
from common.rewards._loading import load_rewards
from common.rewards.aesthetic import aesthetic
from common.rewards.clip_score import clip_score
from common.rewards.hpsv2 import FILE, hpsv2, pad_pixels, pad_to_square
from common.rewards.pickscore import pickscore
from common.scoring import NOT_ASKED, score_images
from contrib.draft import check_of_pixels, score_pixels
from tests.conftest import embedded_model, prompt_set
from tests.tiny_models import CLIP_WIDTH, as_open_clip, make_clip

import pytest
import torch
from transformers import CLIPModel

PROMPTS = ["a red sign", "a blue sign", "a yellow sign"]
REWARDS = {"clip_score": clip_score, "aesthetic": aesthetic, "pickscore": pickscore, "hpsv2": hpsv2}
REWARDS["sign_colour"] = sign_colour


@pytest.fixture(autouse=True, scope="module")
def weights(tmp_path_factory):
    """A tiny random CLIP, also as HPSv2.1's weights are published, and two layers that rate its embeddings."""
    folder = tmp_path_factory.mktemp("weights")
    make_clip(folder, seed=6)  # whose embeddings of these images and prompts point the same way
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for number, (inputs, outputs) in enumerate([(CLIP_WIDTH, 8), (8, 1)]):
        tensors[f"layers.{number}.weight"] = torch.randn(outputs, inputs, generator=generator)
        tensors[f"layers.{number}.bias"] = torch.randn(outputs, generator=generator)
    torch.save(tensors, folder / "aesthetic-model.pth")
    torch.save(as_open_clip(CLIPModel.from_pretrained(folder)), folder / FILE)
    of_clip = ("CLIP_SCORE_MODEL", "AESTHETIC_CLIP", "PICKSCORE_MODEL", "PICKSCORE_PROCESSOR", "HPSV2_PROCESSOR")
    with pytest.MonkeyPatch.context() as patched:
        for variable in (*of_clip, "AESTHETIC_MODEL"):
            patched.setenv(variable, str(folder))
        patched.setenv("HPSV2_MODEL", str(folder / FILE))
        yield


def some_pixels(name, size):
    """Three images (3, 3, H, W) in [0, 1]: for sign_colour of about the prompts' colours, otherwise of several."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(3, 3, 4, 4, generator=generator)
    if name == "sign_colour":
        pixels = torch.tensor([named_colour(prompt) for prompt in PROMPTS])[:, :, None, None] / 255 * 0.9
    pixels = torch.nn.functional.interpolate(pixels, size, mode="bicubic")
    return (pixels + 0.05 * torch.randn(pixels.shape, generator=generator)).clamp(0, 1)


# with these random networks; what CLIP sees differs by 3 of 255 at most
@pytest.mark.parametrize(
    ("name", "distance"),
    [("clip_score", 1.0), ("aesthetic", 0.2), ("pickscore", 1e-2), ("hpsv2", 1e-2), ("sign_colour", 5e-3)],
)
@pytest.mark.parametrize("size", [(64, 64), (32, 96), (70, 53), (24, 24)])
def test_a_reward_of_pixels_is_that_of_the_image(name, distance, size):
    """As near as rounding to bytes allows: before PIL resizes, between its two passes, and after them."""
    pixels = some_pixels(name, size).requires_grad_()
    rewards = {name: REWARDS[name]}
    scores = score_pixels(rewards, pixels, prompt_set(PROMPTS))
    images = embedded_model().to_images(pixels.detach())
    expected = score_images(rewards, images, prompt_set(PROMPTS))
    assert scores.dtype == torch.float64 and len(set(expected.flatten().tolist())) == 3
    torch.testing.assert_close(scores.detach(), expected, rtol=0, atol=distance)
    if name != "sign_colour":
        processor = REWARDS[name].load()[1]
        if name == "hpsv2":
            side = processor.image_processor.crop_size["height"]
            images = [pad_to_square(image, side) for image in images]
            pixels = pad_pixels(pixels, side)
        seen = processor.image_processor(images, return_tensors="pt")["pixel_values"]
        std = torch.tensor(processor.image_processor.image_std)[:, None, None]
        assert (255 * std * (preprocess(processor, pixels.detach()) - seen)).abs().max() < 3


@pytest.mark.parametrize("name", REWARDS)
def test_the_gradient_is_that_of_differences(name):
    """Along the gradient or, as a median moves with all pixels, along one shift of all pixels."""
    pixels = some_pixels(name, (48, 64)).requires_grad_()

    def total(values):
        return score_pixels({name: REWARDS[name]}, values, prompt_set(PROMPTS)).sum()

    (gradient,) = torch.autograd.grad(total(pixels), pixels)
    assert gradient.flatten(1).norm(dim=1).min() > 0
    direction = gradient
    if name == "sign_colour":
        direction = gradient.sum((2, 3), keepdim=True).expand_as(gradient)
    step = 1e-3 * direction / direction.norm()
    difference = total(pixels + step) - total(pixels - step)
    assert difference.item() == pytest.approx(2 * (gradient * step).sum().item(), rel=2e-2)


def test_an_image_is_scored_by_what_its_prompt_asks_for():
    """Scores of each reward for its own prompts, which get nothing from the others."""
    seen = []

    def redness(images, prompts, metadata):
        raise AssertionError

    def of_pixels(pixels, prompts, metadata):
        seen.append((prompts, metadata))
        return pixels[:, 0].mean((1, 2))

    redness.of_pixels = of_pixels
    records = [{"rewards": ["redness"], "n": 1}, {"rewards": ["sign_colour"], "n": 2}, {"n": 3}]
    pixels = some_pixels("sign_colour", (8, 8)).requires_grad_()
    scores = score_pixels({"sign_colour": sign_colour, "redness": redness}, pixels, PromptSet(PROMPTS, records))
    assert (scores == NOT_ASKED).tolist() == [[True, False], [False, True], [False, False]]
    assert [prompts for prompts, _ in seen] == [[PROMPTS[0], PROMPTS[2]]] and [r["n"] for r in seen[0][1]] == [1, 3]
    assert scores[[0, 2], 1].tolist() == pytest.approx(pixels[[0, 2], 0].mean((1, 2)).tolist())
    scores[[0, 2], 1].sum().backward()
    assert pixels.grad[1].abs().max() == 0 and pixels.grad[0, 0].min() > 0 and pixels.grad[0, 1:].abs().max() == 0


@pytest.mark.parametrize(
    ("of_pixels", "fault"),
    [
        (lambda pixels, prompts, metadata: 1 / 0, "of_pixels .*division by zero"),
        (lambda pixels, prompts, metadata: sys.exit(0), "of_pixels.*SystemExit"),
        (lambda pixels, prompts, metadata: pixels.mean(), r"of_pixels.*\(\).*\(3,\)"),
        (lambda pixels, prompts, metadata: [0.5] * 3, r"of_pixels.*list.*\(3,\)"),
        (lambda pixels, prompts, metadata: pixels.detach()[:, 0, 0, 0], "of_pixels"),
        (lambda pixels, prompts, metadata: pixels[:, 0, 0, 0] / 0, "of_pixels .*inf"),
    ],
)
def test_what_of_pixels_must_return(of_pixels, fault):
    def reward(images, prompts, metadata):
        raise AssertionError

    reward.of_pixels = of_pixels
    pixels = some_pixels("clip_score", (8, 8)).requires_grad_()
    with pytest.raises(RunError, match=f" mine: .*{fault}"):
        score_pixels({"mine": reward}, pixels, prompt_set(PROMPTS))


def test_one_number_of_several_has_no_gradient_of_its_own():
    """of_pixels gives one tensor: head.style and head.content would both get it."""
    with pytest.raises(ValueError, match="^--reward sign_colour.red: of_pixels "):
        check_of_pixels({"sign_colour.red": sign_colour})
    with pytest.raises(ValueError, match="^--reward ocr:.*of_pixels"):
        check_of_pixels({"ocr": lambda images, prompts, metadata: [1.0]})
    with pytest.raises(ValueError, match="^--reward clip_score: .*of_pixels .*--num_frames "):
        check_of_pixels(load_rewards(["clip_score"], load=False, num_frames=33, reward_frames=3), 33)
