"""Each family against diffusers' own pipeline and against vLLM-Omni, on tiny random checkpoints and published sizes."""

import contextlib
import copy
import inspect
import io
import json
import re
import shutil
from unittest import mock

import flow_grpo
from common.data import PromptSet
from common.engine.client import VLLMEngine
from common.engine.environment import check_engine
from common.engine.mismatch import check_mismatch
from common.files.pictures import StoredImage
from common.models.family import Family
from common.models.loading import family_class, load_model
from common.models.qwen_image_edit_plus import QwenImageEditPlus, size_to_see
from common.weights.adapter_files import read_lora
from common.weights.lora import make_lora, save_weights
from common.weights.policy import acting, add_policies, tensors_on_rank_0
from tests.comfyui_names import BY_DIFFUSERS_NAME, names_in_a_file, starred
from tests.conftest import (
    TINY,
    UNTIMED,
    assert_one_line,
    brightness_reward,
    few_eval_prompts,
    forked_engines,
    prompt_set,
    read_metrics,
    run_and_resume,
    run_here,
    torchrun,
)
from tests.published_models import GEOMETRY, PUBLISHED, VAE_FACTOR
from tests.tiny_models import FAMILIES, make_checkpoint
from tools import lora

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

PROMPTS = ['a red sign that says "123"', "a sign"]
SEEDS = [3, 4, 5]  # for images of the first, the second and again the first prompt
LENGTH = 160  # tokens: the tiny tokenizers spell out the templates around Qwen's prompts
HEIGHT, WIDTH = 32, 64
NUM_FRAMES = 5  # in a video
GUIDANCE = 3.0
COUNT_FROM_0 = ["Krea2Pipeline", "ZImagePipeline"]  # their 2 is our 3, and their 0 is our 1, no guidance
WITHOUT_HOOKS = ["z_image"]  # these sample with --rollout local only
WITH_REFERENCES = ["flux2_klein:1", "flux2_klein:2"]  # family:pictures, where the records decide
WITH_ENGINE = [name for name in FAMILIES if name not in WITHOUT_HOOKS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a family's tiny checkpoint, made once. A number of pictures behind the name says nothing here."""
    folders = {}

    def make(name):
        family = name.partition(":")[0]
        if family not in folders:
            folders[family] = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return folders[family]

    return make


def load(folder, dtype=torch.float32):
    model = load_model(family_class(folder), str(folder), dtype, "cpu")
    model.pipe.set_progress_bar_config(disable=True)
    model.published_scheduler = model.pipe.scheduler
    least, most = model.num_sources
    model.num_pictures = most if least else 0  # at most, for each of our prompts
    # our ODE steps are Euler's, and this scheduler is of higher order
    if not isinstance(model.pipe.scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        shift = model.pipe.scheduler.config.flow_shift
        model.pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    return model


def load_as(name, checkpoint):
    """The model of a family, or of family:pictures, whose prompts have so many."""
    model = load(checkpoint(name))
    if ":" in name:
        model.num_pictures = int(name.partition(":")[2])
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, checkpoint):
    return load_as(request.param, checkpoint)


with_references = pytest.mark.parametrize("model", [*FAMILIES, *WITH_REFERENCES], indirect=True)


def picture(seed, width=WIDTH, height=HEIGHT):
    """A condition image: smooth colours, by default of the size that a request asks for."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


# their second pictures have other shapes, which give the prompts of Qwen-Image-Edit-Plus different numbers of tokens
PICTURES = {PROMPTS[0]: [picture(0), picture(2, 48, 80)], PROMPTS[1]: [picture(1), picture(3, 300, 90)]}


def prompts_for(model, prompts=PROMPTS):
    """The prompts, each with its pictures where the model gets some."""
    if not model.num_pictures:
        return prompt_set(prompts)
    return with_pictures({prompt: PICTURES[prompt][: model.num_pictures] for prompt in prompts})


def with_pictures(pictures):
    """The prompts of {prompt: its pictures}, whose records have these."""
    records = []
    for prompt, of_prompt in pictures.items():
        sources = []
        for one in of_prompt:
            file = io.BytesIO()
            one.save(file, "PNG")
            sources.append(StoredImage(prompt, file.getvalue()))
        records.append({"image": sources})
    return PromptSet(list(pictures), records)


def request_for(
    model, sde_steps=(), num_inference_steps=4, guidance_scale=GUIDANCE, size=(HEIGHT, WIDTH), prompts=None
):
    options = {"image_size": size, "max_sequence_length": LENGTH, "guidance_scale": guidance_scale}
    if model.makes_videos:
        options["num_frames"] = NUM_FRAMES
    args = flow_grpo.Args(rollout="local", num_inference_steps=num_inference_steps, **options)
    with torch.no_grad():
        drawn = prompts or prompts_for(model)
        request = flow_grpo.make_request(args, model, drawn, torch.tensor([0, 1, 0]), SEEDS, sde_steps=sde_steps)
    return args, request


def first_latents(request):
    return request.first_latents([torch.Generator().manual_seed(seed) for seed in request.seeds], "cpu")


def packed(model, latents):
    """Latents (B, ...) as the stock pipeline holds them in its loop."""
    if not hasattr(model.pipe, "_pack_latents"):
        return latents
    takes_shape = len(inspect.signature(model.pipe._pack_latents).parameters) > 1
    return model.pipe._pack_latents(latents, *(latents.shape if takes_shape else ()))


@contextlib.contextmanager
def pictures_at(height, width):
    """Let the stock Qwen-Image-Edit-Plus bring pictures to this size for its VAE, not to about a million pixels."""
    stock = edit_plus.calculate_dimensions

    def dimensions(area, ratio):
        return (width, height) if area == edit_plus.VAE_IMAGE_SIZE else stock(area, ratio)

    with mock.patch.object(edit_plus, "calculate_dimensions", dimensions):
        yield


def made_frames(model, latents):
    """Latents or a velocity as the stock pipeline holds them, without a first frame whose values it never uses."""
    return latents[:, :, 1:] if max(model.num_sources) and model.pipe.config.get("expand_timesteps") else latents


def stock_arguments(pipe, height, width):
    """What the stock pipeline's call needs beside what all take, such as the name of a switch that changes the size."""
    if isinstance(pipe, diffusers.FluxKontextPipeline):
        return {"_auto_resize": False, "max_area": height * width}
    return {}


def stock_call(pipe, latents, prompts, num_inference_steps, guidance=None, size=(HEIGHT, WIDTH), references=()):
    """The images or videos of the pipeline's own call, and its scheduler's latents and velocity at each step."""
    options = inspect.signature(pipe.__call__).parameters
    if {"image", "num_frames"} <= options.keys() and len(prompts) > 1:  # one picture a call
        rows = [
            stock_call(pipe, latents[i : i + 1], prompts[i : i + 1], num_inference_steps) for i in range(len(prompts))
        ]
        steps = zip(*(steps for _, steps in rows), strict=True)
        steps = [tuple(torch.cat(tensors) for tensors in zip(*of_rows, strict=True)) for of_rows in steps]
        return [video for videos, _ in rows for video in videos], steps
    frames = {"num_frames": NUM_FRAMES} if "num_frames" in options else {}
    if isinstance(pipe, diffusers.FluxKontextPipeline):
        frames = {"image": [PICTURES[prompt][0] for prompt in prompts]}
    if references:
        frames = {"image": references}
    if isinstance(pipe, diffusers.QwenImageEditPlusPipeline):
        if len(prompts) > 1:  # it takes one at a time
            calls = []
            for i in range(len(prompts)):
                calls.append(stock_call(pipe, latents[i : i + 1], prompts[i : i + 1], num_inference_steps, guidance))
            images = [image for (image,), _ in calls]
            of_steps = zip(*(steps for _, steps in calls), strict=True)
            return images, [tuple(map(torch.cat, zip(*of_step, strict=True))) for of_step in of_steps]
        frames = {"image": PICTURES[prompts[0]]}
    elif {"image", "num_frames"} <= options.keys():
        frames["image"] = PICTURES[prompts[0]][0]
    # Wan's attention splits text from picture at 512 tokens, and its pipeline pads a prompt to max_sequence_length
    splits = getattr(pipe.transformer.config, "image_dim", None) is not None
    if guidance is None:
        guidance = {"guidance_scale": GUIDANCE - (type(pipe).__name__ in COUNT_FROM_0)}
        if "true_cfg_scale" in options and not getattr(pipe.transformer.config, "guidance_embeds", False):
            guidance = {"true_cfg_scale": GUIDANCE}
        if "negative_prompt" in options and not getattr(pipe.transformer.config, "guidance_embeds", False):
            guidance["negative_prompt"] = [""] * len(prompts)
    steps = []
    real = pipe.scheduler.step

    def recording(velocity, t, latents, *args, **kwargs):
        steps.append((latents, velocity))
        return real(velocity, t, latents, *args, **kwargs)

    pipe.scheduler.step = recording
    with pictures_at(*size):
        made = pipe(
            prompt=list(prompts),
            height=size[0],
            width=size[1],
            num_inference_steps=num_inference_steps,
            latents=latents,
            max_sequence_length=512 if splits else LENGTH,
            output_type="pil",
            return_dict=False,
            **stock_arguments(pipe, *size),
            **frames,
            **guidance,
        )
    del pipe.scheduler.step
    return made[0], steps


def stock_latents(model, latents):
    """Noise as the stock pipeline takes it: packed, except for FLUX.2, which packs it itself."""
    return latents if hasattr(model.pipe, "_patchify_latents") else packed(model, latents)


def assert_same_images(ours, theirs):
    """To one level of 255. Videos are compared frame by frame, as numpy stacks them."""
    for one, other in zip(ours, theirs, strict=True):
        assert np.shape(one) == np.shape(other)
        assert np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max() <= 1
    assert np.asarray(theirs[0]).std() > 1  # a picture, not a plane


def assert_same_steps(model, request, steps):
    """Our ODE steps of three images have the latents and velocities of stock_call's steps."""
    x = first_latents(request)
    of_images = request.select(torch.arange(3))
    for i, (latents, velocity) in enumerate(steps):
        torch.testing.assert_close(made_frames(model, packed(model, x)), made_frames(model, latents), rtol=0, atol=2e-5)
        guided = (of_images.conditioning, of_images.negative_conditioning, GUIDANCE)
        with torch.no_grad():
            predicted = model.predict_velocity(x, request.timesteps[i], *guided)
        # the round-off of a step goes into the next, and guidance enlarges it
        ours, theirs = (made_frames(model, v) for v in (packed(model, predicted), velocity))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max())
        x = x + predicted * (request.sigmas[i + 1] - request.sigmas[i])


# ---- against diffusers -----------------------------------------------------------------------------------------------
def test_schedule_velocity_and_image_are_the_stock_pipelines(model):
    args, request = request_for(model)
    prompts = [PROMPTS[row] for row in request.prompt_index]
    images, steps = stock_call(model.pipe, stock_latents(model, first_latents(request)), prompts, 4)
    sigmas, timesteps = model.pipe.scheduler.sigmas, model.pipe.scheduler.timesteps
    torch.testing.assert_close(request.sigmas, sigmas, rtol=0, atol=1e-7)
    torch.testing.assert_close(request.timesteps, timesteps, rtol=0, atol=1e-4)
    assert_same_steps(model, request, steps)
    ours = flow_grpo.rollout(args, model, None, request).images
    assert_same_images(ours, images)
    if model.makes_videos:
        assert [len(video) for video in ours] == [NUM_FRAMES] * 3


@pytest.mark.parametrize("num_pictures", [1, 2])
@pytest.mark.parametrize("size", [(64, 64), (64, 96)])  # the stock pipeline refuses sides below 64 pixels
def test_references_give_the_stock_pipelines_velocity_and_image(size, num_pictures, checkpoint):
    """FLUX.2-klein with guidance. Its pipeline shows the same pictures to all prompts of a call."""
    model = load(checkpoint("flux2_klein"))
    pictures = [picture(seed, width=size[1], height=size[0]) for seed in range(num_pictures)]
    args, request = request_for(model, size=size, prompts=with_pictures(dict.fromkeys(PROMPTS, pictures)))
    assert request.conditioning["source_latents"].shape == (2, num_pictures, *request.latent_shape)
    prompts = [PROMPTS[row] for row in request.prompt_index]
    images, steps = stock_call(model.pipe, first_latents(request), prompts, 4, size=size, references=pictures)
    assert_same_steps(model, request, steps)
    assert_same_images(flow_grpo.rollout(args, model, None, request).images, images)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 32), (256, 512), (1024, 1024)])
@pytest.mark.parametrize("num_inference_steps", [2, 10, 28])
def test_the_schedule_at_other_sizes(model, monkeypatch, height, width, num_inference_steps):
    """Equal to the stock pipeline's, with the scheduler it is published with, stopped where its loop would begin."""
    monkeypatch.setattr(model.pipe, "scheduler", model.published_scheduler)

    class Caught(Exception):
        pass

    def first_forward(*args, **kwargs):
        raise Caught

    monkeypatch.setattr(model.transformer, "forward", first_forward)
    if model.num_pictures and model.makes_videos:  # it encodes a video of the picture first, when it has the schedule
        monkeypatch.setattr(model.pipe, "prepare_latents", first_forward)
    options = {"height": height, "width": width, "num_inference_steps": num_inference_steps}
    options |= stock_arguments(model.pipe, height, width)
    if model.num_pictures:
        pictures = PICTURES[PROMPTS[0]][: model.num_pictures]
        options["image"] = pictures if model.num_pictures > 1 else pictures[0]
    if model.num_pictures and model.makes_videos:
        options["num_frames"] = NUM_FRAMES
    with pytest.raises(Caught), pictures_at(HEIGHT, WIDTH):
        model.pipe(prompt=PROMPTS[0], **options)
    expected = model.pipe.scheduler.timesteps.clone(), model.pipe.scheduler.sigmas.clone()
    timesteps, sigmas, _ = model.schedule(num_inference_steps, height, width)
    rounding = 1e-4 if expected[0].is_floating_point() else 1  # down to whole numbers; ours are not rounded
    torch.testing.assert_close(timesteps, expected[0].float(), rtol=0, atol=rounding)
    torch.testing.assert_close(timesteps, 1000 * sigmas[:-1], rtol=0, atol=1e-3)
    torch.testing.assert_close(sigmas, expected[1].float(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("side", [32, 512, 1024])
def test_levels_of_training_noise_are_those_of_sampling(model, monkeypatch, side):
    """Half through the schedule that they follow there is as much noise as half through fifty sampling steps."""
    monkeypatch.setattr(model.pipe, "scheduler", model.published_scheduler)
    middle, of_sampling = (model.schedule(n, side, side)[1][n // 2].item() for n in (model.level_steps, 50))
    assert middle == pytest.approx(of_sampling, abs=0.03) and middle > 0.2


@with_references
def test_prompts_do_not_see_each_other(model):
    """A prompt, with its pictures, gives the same velocity alone and beside a longer prompt with larger pictures; at
    the same latents, another prompt gives another one."""
    _, request = request_for(model)
    both = request.select(torch.arange(2))
    x = torch.cat([first_latents(request)[:1]] * 2)
    t = request.timesteps[1]
    with torch.no_grad():
        together = model.predict_velocity(x, t, both.conditioning, both.negative_conditioning, GUIDANCE)
        for i, prompt in enumerate(PROMPTS):
            prompts = prompts_for(model, [prompt])
            alone = model.encode(prompts, LENGTH, (HEIGHT, WIDTH), NUM_FRAMES)
            negative = model.encode_negative(prompts.negatives(""), GUIDANCE, LENGTH)
            one = model.predict_velocity(x[i : i + 1], t, alone, negative, GUIDANCE)
            torch.testing.assert_close(one, together[i : i + 1], rtol=0, atol=5e-6)
    assert (together[0] - together[1]).abs().max() > 1e-3


@with_references
def test_both_branches_of_guidance_are_one_batch(model):
    """Velocity and gradient equal those of two passes, but there is one call, with the negative rows last."""
    if not model.has_negative_prompt:
        pytest.skip("guidance takes no second pass")
    _, request = request_for(model)
    images = request.select(torch.arange(3))
    guided = (request.timesteps[:3], images.conditioning, images.negative_conditioning, GUIDANCE)
    model.transformer.requires_grad_(True)
    inputs = [first_latents(request).requires_grad_(), *model.transformer.parameters()]
    calls = []
    handle = model.transformer.register_forward_hook(lambda *_: calls.append(1))

    negative = {name: rows.expand(3, *rows.shape[1:]) for name, rows in images.negative_conditioning.items()}

    def of_two_passes(latents, timestep, conditioning, *_):
        velocity = model.forward(latents, timestep, conditioning)
        return model.guide(velocity, model.forward(latents, timestep, conditioning | negative), GUIDANCE)

    velocities = []
    gradients = []
    for way in (model.predict_velocity, of_two_passes):
        velocities.append(way(inputs[0], *guided))
        weights = torch.randn(velocities[0].shape, generator=torch.Generator().manual_seed(0))
        gradients.append(torch.autograd.grad((velocities[-1] * weights).sum(), inputs, allow_unused=True))
    handle.remove()
    model.transformer.requires_grad_(False)
    assert len(calls) == 1 + 2
    scale = velocities[1].abs().max().item()
    torch.testing.assert_close(velocities[0], velocities[1], rtol=0, atol=1e-5 * scale)
    largest = max(gradient.abs().max().item() for gradient in gradients[1] if gradient is not None)
    for one, other in zip(*gradients, strict=True):
        if other is not None:  # some are round-off alone
            atol = 1e-3 * other.abs().max().item() + 1e-6 * largest
            torch.testing.assert_close(one, other, rtol=0, atol=atol)
    assert gradients[1][0].abs().max() > 1e-2


@pytest.mark.parametrize("num_pictures", [1, 2])
@pytest.mark.parametrize(("height", "width"), [(32, 64), (96, 64)])
def test_an_edit_of_several_pictures_is_the_stock_pipelines(num_pictures, height, width, checkpoint, monkeypatch):
    """With guidance, and pictures that have the image's shape: then the pipeline's constant alone gives its size."""
    model = load(checkpoint("qwen_image_edit_plus"))
    monkeypatch.setattr(edit_plus, "VAE_IMAGE_SIZE", height * width)
    pictures = [picture(seed, (1 + seed) * width, (1 + seed) * height) for seed in range(num_pictures)]
    guided = {"guidance_scale": GUIDANCE, "negative_prompt": "blurred"}
    options = {"image_size": (height, width), "max_sequence_length": LENGTH, "num_inference_steps": 3, **guided}
    args = flow_grpo.Args(rollout="local", **options)
    with torch.no_grad():
        drawn = with_pictures({"a red sign": pictures})
        request = flow_grpo.make_request(args, model, drawn, torch.tensor([0]), [3])
    assert request.conditioning["source_latents"].shape[1] == num_pictures
    ours = flow_grpo.rollout(args, model, None, request)
    theirs = model.pipe(
        image=pictures,
        prompt="a red sign",
        negative_prompt="blurred",
        true_cfg_scale=GUIDANCE,
        height=height,
        width=width,
        num_inference_steps=3,
        latents=packed(model, first_latents(request)),
        output_type="latent",
    ).images
    torch.testing.assert_close(packed(model, ours.latents[:, -1]), theirs, rtol=0, atol=2e-5)


def test_a_long_prompt_of_an_edit_is_cut_and_its_pictures_are_not(checkpoint):
    """At --max_sequence_length tokens or later. The text encoder is causal, so what is left does not change."""
    model = load(checkpoint("qwen_image_edit_plus"))
    pictures = [picture(0, 500, 20), picture(1, 32, 32)]
    whole, cut = (model.encode_edits(["a sign " * 200], [pictures], length) for length in (900, 100))
    kept = 100 + 2 * model.source_tokens
    assert whole["prompt_embeds_mask"].sum() > kept == cut["prompt_embeds"].shape[1]
    assert cut["prompt_embeds_mask"].all()
    torch.testing.assert_close(cut["prompt_embeds"], whole["prompt_embeds"][:, :kept], rtol=0, atol=0)


@pytest.mark.fast
def test_a_picture_of_any_shape_has_room_among_the_tokens():
    """And each shape is one that the text encoder's processor takes."""
    pytest.importorskip("torchvision", reason="torchvision, which comes with vLLM-Omni, is not installed")
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    most = 0
    for ratio in np.geomspace(1 / 512, 512, 3001):
        width, height = max(16, round(16 * ratio)), max(16, round(16 / ratio))
        height, width = smart_resize(*size_to_see(Image.new("1", (width, height))))
        most = max(most, height * width // 28**2)
    assert 196 < most <= QwenImageEditPlus.source_tokens - len("Picture 1: ") - 2  # and two tokens around it


def test_branches_of_two_lengths_are_no_batch():
    prompts = {"prompt_embeds": torch.ones(2, 7, 3)}
    with pytest.raises(ValueError, match=r"^prompt_embeds: \(2, 7, 3\) .* \(1, 1, 3\) "):
        Family.predict_velocity(
            None, torch.ones(2, 1), torch.tensor(1.0), prompts, {"prompt_embeds": torch.ones(1, 1, 3)}, GUIDANCE
        )


def test_the_vae_decodes_and_encodes_a_few_images_at_a_time(model, monkeypatch):
    """A call takes at most PIXELS_AT_ONCE, here enough for two and a half of the three images or videos."""
    vae = model.pipe.vae
    _, request = request_for(model)
    seen = []
    for name in ("encode", "decode"):
        own = getattr(vae, name)
        monkeypatch.setattr(vae, name, lambda x, own=own, **options: seen.append(len(x)) or own(x, **options))
    latents = first_latents(request)
    whole = model.decode(latents)
    pixels = HEIGHT * WIDTH
    if model.makes_videos:
        pixels *= latents.shape[2] * model.pipe.vae_scale_factor_temporal
    monkeypatch.setattr("common.models.vae.PIXELS_AT_ONCE", int(2.5 * pixels))
    in_slices = model.decode(latents)
    assert_same_images(in_slices, whole)
    assert seen == [3, 2, 1]
    monkeypatch.setattr("common.models.vae.PIXELS_AT_ONCE", 1)  # less than an image
    assert_same_images(model.decode(latents), whole)
    assert seen == [3, 2, 1, 1, 1, 1]
    monkeypatch.setattr("common.models.vae.PIXELS_AT_ONCE", 3 * pixels)
    monkeypatch.setattr("common.models.vae.PIXELS_ON_CPU", 2 * pixels)
    assert_same_images(model.decode(latents), whole)
    assert seen == [3, 2, 1, 1, 1, 1, 2, 1]
    monkeypatch.setattr("common.models.vae.PIXELS_ON_CPU", 1)
    if not model.makes_videos:
        seen.clear()
        one_by_one = model.encode_images(whole, HEIGHT, WIDTH)
        monkeypatch.undo()
        torch.testing.assert_close(model.encode_images(whole, HEIGHT, WIDTH), one_by_one, rtol=0, atol=1e-4)
        assert seen == [1, 1, 1]


def test_pixels_are_what_decode_rounds_and_have_the_gradient_of_a_plain_call(model, monkeypatch):
    """Calls of the VAE are checkpointed: each decodes once more in the backward pass."""
    _, request = request_for(model)
    latents = first_latents(request).requires_grad_()
    calls = []
    decode = model.pipe.vae.decode
    monkeypatch.setattr(model.pipe.vae, "decode", lambda x, **options: calls.append(len(x)) or decode(x, **options))
    monkeypatch.setattr("common.models.vae.PIXELS_AT_ONCE", 1)  # less than an image
    decoded = model.decode(latents)
    arrays = [np.stack(video) for video in decoded] if model.makes_videos else [np.asarray(one) for one in decoded]
    gradients = []
    for expected_calls in ([1] * 6, [1] * 3):
        calls.clear()
        pixels = model.pixels(latents)
        assert pixels.min() >= 0 and pixels.max() <= 1
        rounded = (pixels.detach() * 255).round().to(torch.uint8)  # (B, 3, H, W), or (B, 3, F, H, W)
        assert np.array_equal(np.stack(arrays), rounded.movedim(1, -1).numpy())
        weights = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
        gradients += torch.autograd.grad((weights * pixels).sum(), latents)
        assert calls == expected_calls
        monkeypatch.setattr("common.models.vae.checkpoint", lambda function, x, **options: function(x))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert gradients[0].flatten(1).norm(dim=1).min() > 0


def test_images_and_latents(model):
    """encode_images is the reverse of decode: decoding an image's latents gives the VAE's reconstruction of it."""
    if model.makes_videos:
        pytest.skip("videos are decoded, and compared with the stock pipeline's above, and never encoded")
    generator = np.random.default_rng(0)
    image = diffusers.utils.numpy_to_pil(generator.random((1, HEIGHT, WIDTH, 3)))[0]
    latents = model.encode_images([image], HEIGHT, WIDTH)
    assert latents.shape == (1, *model.schedule(2, HEIGHT, WIDTH)[2]) and latents.isfinite().all()
    vae, processor = model.pipe.vae, model.pipe.image_processor
    pixels = processor.preprocess([image], HEIGHT, WIDTH)
    is_video = isinstance(vae, diffusers.AutoencoderKLQwenImage)  # an image is one frame of it
    with torch.no_grad():
        encoded = vae.encode(pixels[:, :, None] if is_video else pixels)
        encoded = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        decoded = vae.decode(encoded).sample
    assert_same_images(model.decode(latents), processor.postprocess(decoded[:, :, 0] if is_video else decoded))
    # the family has normalised them, so they are not the VAE's own
    assert not torch.allclose(latents.flatten(), encoded.flatten())
    assert all(isinstance(tensor, torch.Tensor) for tensor in model.picture_tensors())


# ---- LoRA ------------------------------------------------------------------------------------------------------------
def give_lora(model):
    """A LoRA of rank 4 and alpha 8 on the family's targets, whose B matrices are not 0."""
    add_policies(model, make_lora(type(model), rank=4, alpha=8), ["default"], seed=7)
    for name, parameter in model.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_lora_and_merged_weights_give_the_trainers_image_in_the_stock_pipeline(family, checkpoint, tmp_path):
    """`tools.lora merge` of the trainer's adapter writes a pipeline that diffusers loads by itself."""
    model = load(checkpoint(family))
    args, request = request_for(model)
    before = flow_grpo.rollout(args, model, None, request).latents
    give_lora(model)
    trajectories = flow_grpo.rollout(args, model, None, request)
    assert (trajectories.latents - before).abs().max() > 1e-2
    tensors, config = tensors_on_rank_0(model)
    adapted = {name.rpartition(".lora_")[0] for name in tensors}
    for target in model.lora_target_modules:
        assert any(name.endswith(f".{target}") for name in adapted), target
    save_weights(tmp_path / "adapter", model.pipe, tensors, config)
    # for loaders that read metadata; others know the tensors only
    assert read_lora(tmp_path / "adapter")[1].lora_alpha == 4

    stock = load(checkpoint(family)).pipe
    stock.load_lora_weights(load_file(tmp_path / "adapter/pytorch_lora_weights.safetensors"))
    noise = stock_latents(model, first_latents(request))
    prompts = [PROMPTS[row] for row in request.prompt_index]
    images, _ = stock_call(stock, noise, prompts, 4)
    assert_same_images(trajectories.images, images)

    files = [str(tmp_path / "adapter"), str(tmp_path / "merged")]
    lora.main(["merge", *files, "--model", str(checkpoint(family)), "--dtype", "float32"])

    stock = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "merged")
    assert type(stock) is type(model.pipe) and type(stock.scheduler) is type(model.published_scheduler)
    assert not any("lora" in name for name, _ in stock.transformer.named_parameters())
    stock.scheduler = model.pipe.scheduler  # Euler's, for Wan
    stock.set_progress_bar_config(disable=True)
    images, steps = stock_call(stock, noise, prompts, 4)
    assert_same_images(trajectories.images, images)
    latents, velocity = steps[-1]
    final = latents + velocity * (request.sigmas[-1] - request.sigmas[-2])  # an image's levels hide a tenth of a LoRA
    ours = made_frames(model, packed(model, trajectories.latents[:, -1]))
    torch.testing.assert_close(ours, made_frames(model, final), rtol=0, atol=1e-3)


def arguments(model):
    """Arguments of flow_grpo.rollout for a local ODE rollout."""
    args, request = request_for(model)
    return args, model, None, request


def test_the_tiny_sd35_has_all_kinds_of_block_and_its_lora_acts_in_each_attention(checkpoint):
    """Like SD3.5-medium, it has blocks with attn2, blocks without, and a last block that drops the text."""
    model = load(checkpoint("stable_diffusion_3"))
    kinds = {(block.attn2 is not None, block.context_pre_only) for block in model.transformer.transformer_blocks}
    assert kinds == {(True, False), (False, False), (False, True)}
    before = flow_grpo.rollout(*arguments(model)).latents
    give_lora(model)
    own = {name: p for name, p in model.transformer.named_parameters() if "lora_B" in name}
    assert sum(".attn2." in name for name in own) == 2 * 4  # to_q, to_k, to_v and to_out.0 of both blocks
    for name, parameter in own.items():
        if ".attn2." not in name:
            parameter.data.zero_()
    assert (flow_grpo.rollout(*arguments(model)).latents - before).abs().max() > 1e-2


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_compiled_in_bf16_the_first_ratio_is_exactly_1(checkpoint, one_rank):
    """With activation checkpointing and all kinds of block there are more graphs than dynamo's default limit. The
    rollout's graphs have no gradient, the update's have one."""
    train_with = ("compile", "activation_checkpointing")
    folder = checkpoint("stable_diffusion_3")
    changes = {"dtype": "bfloat16", "train_with": train_with, "num_inference_steps": 3, "sde_window_size": 0}
    changes["updates_per_rollout"] = 1
    args = flow_grpo.Args(rollout="local", image_size=(HEIGHT, WIDTH), guidance_scale=GUIDANCE, **changes)
    model = load_model(family_class(folder), str(folder), torch.bfloat16, "cpu")
    give_lora(model)
    torch._dynamo.utils.counters.clear()
    flow_grpo.shard(args, model, torch.device("cpu"))
    trained = [parameter for parameter in model.transformer.parameters() if parameter.requires_grad]
    with torch.no_grad():
        drawn = prompt_set(PROMPTS)
        request = flow_grpo.make_request(args, model, drawn, torch.tensor([0, 1]), SEEDS[:2], sde_steps=(0, 1))
    trajectories = flow_grpo.rollout(args, model, None, request)
    old, _ = flow_grpo.find_old_policy(args, model, None, request, trajectories)
    batch = flow_grpo.Batch(request, trajectories, old, torch.tensor([1.0, -1.0]))
    metrics = flow_grpo.update(args, UNTIMED, model, torch.optim.SGD(trained, lr=1.0), batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 8  # so it did compile
    assert metrics["actor/ratio_mean"] == 1 and metrics["actor/ratio_std"] == 0
    assert metrics["actor/grad_norm"] > 0


# ---- against the engine ----------------------------------------------------------------------------------------------
def start(folder, log, dtype="float32"):
    with forked_engines():
        return VLLMEngine(str(folder), dtype, 4, log, timeout_s=200, num_threads=1)


def assert_parity(engine, model, policy, lora):
    """Assert that both sample the same latents and compute the same log-probs for the engine's. Returns the latents."""
    args, request = request_for(model, sde_steps=(0, 1, 2))
    theirs = engine.generate(request, lora=lora)
    with acting(model, policy):
        ours = flow_grpo.rollout(args, model, None, request)
        log_probs = flow_grpo.recompute_log_probs(args, model, request, theirs).log_probs
    torch.testing.assert_close(log_probs, theirs.log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(theirs.latents, ours.latents, rtol=0, atol=1e-5)
    assert_same_images(theirs.images, ours.images)
    return theirs.latents


@pytest.mark.parametrize("family", WITH_ENGINE)
def test_the_engine_takes_full_weights_and_loras_and_samples_as_the_trainer_does(family, checkpoint, tmp_path):
    """With guidance, and with prompts of two lengths in a batch. It reads no weights of text encoders, not even at its
    start."""
    without = shutil.ignore_patterns("*.safetensors")
    folder = tmp_path / "model"
    shutil.copytree(
        checkpoint(family), folder, ignore=lambda path, names: without(path, names) if "text_enc" in path else ()
    )
    engine = start(folder, tmp_path / "engine.log")
    if "ti2v" not in family:  # whose transformer is wan's
        assert_full_weights_act(engine, load_as(family, checkpoint))
    for name in (family, *(name for name in WITH_REFERENCES if name.startswith(f"{family}:"))):
        assert_loras_act(engine, load_as(name, checkpoint))
    engine.close()


def assert_full_weights_act(engine, model):
    """Those of the model, once as they are, which it leaves in the engine, and once moved."""
    original = copy.deepcopy(model.transformer.state_dict())
    add_policies(model, None, ["default"], seed=0)
    args, request = request_for(model)
    drawn = prompts_for(model, PROMPTS[:1])
    one_image = flow_grpo.make_request(args, model, drawn, torch.tensor([0]), seeds=[0])  # equal to the bit
    engine.verify_push(*tensors_on_rank_0(model), one_image)
    torch.manual_seed(3)
    for parameter in model.transformer.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    engine.push(*tensors_on_rank_0(model))
    assert_parity(engine, model, "default", lora=True)
    engine.push(original, None)


def assert_loras_act(engine, model):
    """The base model, a LoRA and a second LoRA, each of which changes what is sampled."""
    give_lora(model)
    base = assert_parity(engine, model, "reference", lora=False)
    pushed = []
    for _ in range(2):
        tensors, config = tensors_on_rank_0(model)
        engine.push(tensors, config)
        pushed.append(assert_parity(engine, model, "default", lora=True))
        for name, parameter in model.transformer.named_parameters():
            if "lora_A" in name:
                parameter.data.mul_(-2)
    torch.testing.assert_close(assert_parity(engine, model, "reference", lora=False), base, rtol=0, atol=1e-5)
    assert (pushed[0] - base).abs().max() > 1e-2 and (pushed[1] - pushed[0]).abs().max() > 1e-2


@pytest.mark.parametrize("family", WITH_ENGINE)
def test_the_engine_samples_in_bf16(family, checkpoint, tmp_path, one_rank):
    """From a checkpoint in fp32."""
    engine = start(checkpoint(family), tmp_path / "engine.log", "bfloat16")
    model = load(checkpoint(family), torch.bfloat16)
    args, request = request_for(model, sde_steps=(0, 1, 2))
    theirs = engine.generate(request, lora=False)
    ours = flow_grpo.rollout(args, model, None, request).latents
    assert (theirs.latents - ours).square().mean().sqrt() < 0.05 * ours.square().mean().sqrt()
    scored = flow_grpo.recompute_log_probs(args, model, request, theirs)
    check_mismatch(request, theirs, scored, dtype="bfloat16")  # as a run is checked
    engine.close()


@pytest.mark.parametrize("name", WITHOUT_HOOKS)
def test_a_family_without_hooks_is_refused_for_the_engine(name, checkpoint):
    family = family_class(checkpoint(name))
    with pytest.raises(ValueError, match=f"^--rollout vllm: {family.__name__} .* vLLM-Omni's "):
        check_engine(family, checkpoint(name), ())


# ---- the scripts -----------------------------------------------------------------------------------------------------
# a sample of benchmarks/families.py. FLUX.1 and videos follow below; assets/embedded is a stable_diffusion_3
PAIRED = [
    ("grpo_guard.py", "qwen_image"),
    ("mix_grpo.py", "flux2_klein"),
    ("dpo_offline.py", "z_image"),
    ("flow_grpo.py", "krea2"),
]


@pytest.mark.parametrize(("script", "family"), PAIRED)
def test_a_script_trains_a_family_and_resumes(script, family, checkpoint, tmp_path):
    """Two steps in one run, or one step and another after a resume, give the same adapter to the bit."""
    options = ["--model", checkpoint(family), "--max_sequence_length", LENGTH]
    options += [*few_eval_prompts(tmp_path, 2), "--reward", "jpeg_compressibility", "--learning_rate", 1e-2]
    if script == "dpo_offline.py":
        options += ["--num_pair_prompts", 4, "--num_pairs", 2, "--num_inference_steps", 3]
    else:
        options += ["--rollout", "local", *TINY[:6], "--num_inference_steps", 3]
    assert_resumed_run_is_the_whole_one(tmp_path, script, options)


def assert_resumed_run_is_the_whole_one(folder, script, options):
    """Runs two steps in runs/whole, and the second one again in runs/cut."""
    whole, cut = (run / "adapter/pytorch_lora_weights.safetensors" for run in run_and_resume(folder, script, options))
    assert whole.read_bytes() == cut.read_bytes()


def test_two_ranks_train_a_family_as_one_does(checkpoint, tmp_path):
    """FLUX.1, with packed tokens and a guidance input: the same images, and the same adapter up to round-off."""
    options = ["--model", checkpoint("flux"), "--max_sequence_length", LENGTH, *few_eval_prompts(tmp_path, 2)]
    options += ["--rollout", "local", *TINY[:6], "--num_prompts", 2, "--num_inference_steps", 3]
    options += ["--micro_batch_size", 4, "--num_steps", 1]
    options += ["--reward", brightness_reward(tmp_path), "--guidance_scale", 3]
    assert run_here(tmp_path, "flow_grpo.py", *options, "--name", "one") is None
    torchrun(tmp_path, "flow_grpo.py", *options, "--name", "two", nproc=2)
    one, two = (read_metrics(tmp_path / "runs" / name)[1] for name in ("one", "two"))
    for name in ("critic/rewards/mean", "actor/grad_norm", "val/brightness/mean"):
        assert two[name] == pytest.approx(one[name], rel=1e-3)
    file = "adapter/pytorch_lora_weights.safetensors"
    one, two = (load_file(tmp_path / "runs" / name / file) for name in ("one", "two"))
    assert one.keys() == two.keys()
    changed = torch.cat([one[key].flatten() for key in one if "lora_B" in key])  # from 0
    differing = torch.cat([(two[key] - one[key]).flatten() for key in one if "lora_B" in key])
    assert changed.norm() > 0 and differing.norm() < 0.05 * changed.norm()


MOTION = """
import numpy


def motion(images, prompts, metadata):
    assert all(isinstance(video, list) and len(video) == 5 for video in images)
    return [numpy.stack(video).std(0).mean() for video in images]
"""


def test_a_script_trains_a_family_of_videos(checkpoint, tmp_path):
    """With dance steps, as in DanceGRPO. Rewards get all frames; all are saved, and a grid shows three."""
    (tmp_path / "motion.py").write_text(MOTION)
    options = ["--model", checkpoint("wan"), "--num_frames", 5, "--sde_type", "dance", "--guidance_scale", 2]
    options += ["--rollout", "local", "--num_prompts", 2, "--updates_per_rollout", 1, "--image_size", 16, 48]
    options += ["--reward", f"{tmp_path}/motion.py:motion", "--learning_rate", 1e-2]
    options += few_eval_prompts(tmp_path, 2)
    assert_resumed_run_is_the_whole_one(tmp_path, "flow_grpo.py", options)
    run = tmp_path / "runs" / "whole"
    before, after = (Image.open(run / "samples" / step / "00001.png") for step in ("0000", "0002"))
    assert before.n_frames == after.n_frames == 5 and before.size == (48, 16)
    assert Image.open(run / "grid_0002.png").size == (2 * (4 * 48 + 4), 4 * 3 * 16 + 18)
    assert np.abs(np.asarray(before.convert("RGB"), int) - np.asarray(after.convert("RGB"), int)).max() > 0


def test_a_size_or_guidance_that_a_family_cannot_take_is_refused(checkpoint, tmp_path, capfd):
    """Before anything loads, in one line that names the option."""
    schnell = with_config(checkpoint("flux"), tmp_path / "schnell", "transformer/config.json", guidance_embeds=False)
    distilled = with_config(checkpoint("flux2_klein"), tmp_path / "4b", "model_index.json", is_distilled=True)
    krea2 = checkpoint("krea2")
    turbo = with_config(krea2, tmp_path / "turbo", "model_index.json", is_distilled=True)
    wan, flux = checkpoint("wan_ti2v"), checkpoint("flux")
    second = ["diffusers", "WanTransformer3DModel"]
    a14b = with_config(wan, tmp_path / "a14b", "model_index.json", transformer_2=second)
    shutil.copytree(a14b / "transformer", a14b / "transformer_2")
    no_vae = with_config(flux, tmp_path / "no_vae", "model_index.json")
    (no_vae / "vae" / "config.json").unlink()
    (tmp_path / "motion.py").write_text(MOTION)
    own = ["--reward", "motion.py:motion"]
    for options, refused in (
        (["--model", a14b], "--model .*a14b: model_index.json: .* boundary_ratio .*"),
        (["--model", wan, "--num_frames", 4, "--image_size", 32, 64, *own], r"--num_frames 4: .* 4 k \+ 1, .*"),
        (["--model", wan, "--num_frames", 1, "--image_size", 32, 64], "--num_frames 1: .* 4 .* 1"),
        (["--model", wan, "--num_frames", 5], "--reward ocr: .*--num_frames 5; .*"),
        (["--model", no_vae], f"--model {no_vae}: .*config.json.*"),
        (["--model", wan, "--image_size", 32, 48], "--image_size 32 48: .* 32"),
        (["--model", flux, "--num_frames", 5, *own], "--num_frames 5: .* 1 .*"),
        (["--model", schnell, "--guidance_scale", 3.5], r"--guidance_scale 3\.5: .* 1"),
        (["--model", turbo, "--guidance_scale", 4], r"--guidance_scale 4: .* 1"),
        (["--model", krea2, "--num_frames", 5, *own], "--num_frames 5: .* 1 .*"),
        (["--model", krea2, "--image_size", 32, 36], "--image_size 32 36: .* 8"),
        (["--model", distilled, "--guidance_scale", 4], r"--guidance_scale 4: .* 1"),
    ):
        line = run_here(tmp_path, "flow_grpo.py", "--rollout", "local", *options)
        assert_one_line(line)
        assert re.fullmatch(f"flow_grpo.py: error: {refused}", line)
    assert "loading" not in capfd.readouterr().err


def with_config(checkpoint, folder, file, **changes):
    """A copy of a checkpoint's folder with changes in one .json file."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", ["flux", "flux2_klein", "krea2"])
def test_a_distilled_model_takes_its_steps_without_guidance(family, checkpoint, tmp_path):
    """FLUX.1-schnell, which has no guidance input, distilled klein and Krea 2 Turbo give the stock pipeline's image."""
    if family == "flux":
        changed = with_config(checkpoint(family), tmp_path / "m", "transformer/config.json", guidance_embeds=False)
    else:
        changed = with_config(checkpoint(family), tmp_path / "m", "model_index.json", is_distilled=True)
    model = load(changed)
    args, request = request_for(model, guidance_scale=1.0)
    assert request.negative_conditioning is None
    prompts = [PROMPTS[row] for row in request.prompt_index]
    noise = stock_latents(model, first_latents(request))
    images, _ = stock_call(
        model.pipe, noise, prompts, 4, guidance={"guidance_scale": 0.0 if family == "krea2" else 1.0}
    )
    assert_same_images(flow_grpo.rollout(args, model, None, request).images, images)


def test_offline_dpo_refuses_a_family_of_videos(checkpoint, tmp_path):
    (tmp_path / "motion.py").write_text(MOTION)
    video = ["--model", checkpoint("wan"), "--num_frames", 5, "--reward", "motion.py:motion"]
    line = run_here(tmp_path, "dpo_offline.py", *video)
    assert_one_line(line, "dpo_offline.py")
    assert re.search("--model .*dpo_offline.py ", line)


# ---- published sizes -------------------------------------------------------------------------------------------------
def published(name, checkpoint, depth=None):
    """The family's object around a published transformer, on the meta device, in bf16. depth: blocks of each kind."""
    family, transformer_class, config, _ = PUBLISHED[name]
    build = getattr(diffusers, transformer_class)
    if depth:
        options = inspect.signature(build).parameters.keys()
        config = config | dict.fromkeys({"num_layers", "num_single_layers", "n_layers"} & options, depth)
    model = copy.copy(load(checkpoint(family)))
    with torch.device("meta"):
        model.transformer = build(**config).to(torch.bfloat16).requires_grad_(False)
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_transformer(name, checkpoint):
    """It has the published number of parameters, FSDP units, and modules for each LoRA target."""
    model = published(name, checkpoint)
    family, _, _, billions = PUBLISHED[name]
    family = family.removesuffix("_kontext").removesuffix("_edit_plus")  # whose transformers are FLUX.1's, Qwen-Image's
    assert round(sum(p.numel() for p in model.transformer.parameters()) / 1e9, 1) == billions
    kinds = [type(module).__name__ for module in model.transformer.modules()]
    assert kinds.count(model.transformer._no_split_modules[0]) >= 5
    linear = [key for key, module in model.transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    for target in model.lora_target_modules:
        modules = [key for key in linear if key.endswith(f".{target}")]
        assert len(modules) >= 5, target
        if family in BY_DIFFUSERS_NAME:  # ComfyUI finds the adapter as it is saved
            assert {starred(key) for key in modules} <= BY_DIFFUSERS_NAME[family].keys(), target
    if family != "krea2":  # whose names in ComfyUI were not looked up
        assert {starred(key) for key in linear} <= names_in_a_file(family).keys()  # SD3.5-large has no attn2


def fake_conditioning(name, batch):
    """The conditioning of `batch` prompts on the meta device, with the widths of the published text encoders."""
    conditioning = {}
    for key, shape in GEOMETRY[name][2].items():
        conditioning[key] = torch.empty(batch, *shape, dtype=torch.bfloat16)
    if "prompt_embeds_mask" in conditioning:
        conditioning["prompt_embeds_mask"] = conditioning["prompt_embeds_mask"].long()
    if "num_tokens" in conditioning:
        conditioning["num_tokens"] = torch.empty(batch, dtype=torch.long)
    return conditioning


@pytest.mark.parametrize("name", GEOMETRY)
def test_a_published_step_at_512(name, checkpoint, monkeypatch):
    """With fake tensors: the published number of tokens, a velocity like the latents, a gradient per LoRA matrix.

    Of two blocks of each kind, which are alike; the test above builds all of them.
    """
    # Z-Image reads its numbers of tokens, and a fake tensor has no values
    monkeypatch.setattr(FakeTensor, "tolist", lambda counts: [256, 100, 256, 100][: len(counts)])
    expected_shape, tokens, _ = GEOMETRY[name]
    model = published(name, checkpoint, depth=2)
    model.pipe.vae_scale_factor = VAE_FACTOR
    if model.makes_videos:
        model.pipe.vae_scale_factor_spatial = 16 if "2.2" in name else VAE_FACTOR
        model.pipe.vae_scale_factor_temporal = 4
    takes_two_passes = model.encode_negative(prompt_set([""]), GUIDANCE, LENGTH) is not None
    with torch.device("meta"):
        add_policies(model, make_lora(type(model), rank=32, alpha=64), ["default"], seed=0)
    # as on a GPU, a tensor on another device, here the timestep, is an error unless it is moved
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        model.transformer = copy.deepcopy(model.transformer)
    shapes = []  # of the image tokens that the first block gets
    unit = model.transformer._no_split_modules[0]
    first_block = next(module for module in model.transformer.modules() if type(module).__name__ == unit)

    def keep_shape(block, args, kwargs):
        shapes.append((args[0] if args else kwargs["hidden_states"]).shape)

    first_block.register_forward_pre_hook(keep_shape, with_kwargs=True)
    timesteps, _, latent_shape = model.schedule(10, 512, 512, 33 if model.makes_videos else 1)
    assert latent_shape == expected_shape
    with mode, torch.device("meta"):
        latents = torch.empty(2, *latent_shape)
        conditioning = fake_conditioning(name, 2)
        negative = fake_conditioning(name, 1) if takes_two_passes else None
        with torch.no_grad():
            guided = model.predict_velocity(latents, timesteps[3:5], conditioning, negative, GUIDANCE)
        velocity = model.predict_velocity(latents, timesteps[3], conditioning)
        velocity.square().mean().backward()
    for v in (velocity, guided):
        assert v.shape == latents.shape and v.dtype == torch.float32
    assert shapes == [(4 if takes_two_passes else 2, *tokens), (2, *tokens)]
    trained = {key: p for key, p in model.transformer.named_parameters() if p.requires_grad}
    without = {key.partition(".lora_")[0] for key, p in trained.items() if p.grad is None}
    # nothing reads the text that comes out of Qwen-Image's last block
    assert without == ({"transformer_blocks.1.attn.to_add_out"} if name.startswith("Qwen/") else set())
    for p in trained.values():
        assert p.dtype == torch.float32 and (p.grad is None or p.grad.shape == p.shape)
