"""Wan image to video: trained, resumed, compared with the stock pipeline, planned and refused."""

import functools
import json
import shutil

import flow_grpo
from common.data import PromptSet
from common.files.pictures import StoredImage
from common.models.loading import family_class, find_family, load_model
from common.models.wan_image_to_video import IMAGE_TOKENS, WanImageToVideo
from tests.conftest import read_metrics, run_and_resume, run_here, torchrun
from tests.models.test_source_images import gradient, options_of, png
from tests.tiny_models import make_checkpoint

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

VIDEO_FAMILIES = ["wan_image_to_video", "wan_ti2v_image"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a family's tiny checkpoint, made once."""
    return functools.cache(lambda family: make_checkpoint(family, tmp_path_factory.mktemp(family)))


# ---- runs ------------------------------------------------------------------------------------------------------------
RUNS = [("flow_grpo.py", "wan_image_to_video"), ("diffusion_nft.py", "wan_ti2v_image")]


@pytest.mark.parametrize(("script", "family"), RUNS)
def test_a_model_of_videos_trains_and_resumes(script, family, checkpoint, tmp_path):
    """Its evaluations do not score `preservation`, which compares images."""
    options = [*options_of(tmp_path, checkpoint(family)), "--num_frames", 5]
    whole, cut = (run / "adapter/pytorch_lora_weights.safetensors" for run in run_and_resume(tmp_path, script, options))
    assert whole.read_bytes() == cut.read_bytes()
    assert any(tensor.any() for name, tensor in load_file(whole).items() if "lora_B" in name)
    runs = tmp_path / "runs"
    (first, *_) = (runs / "whole/samples/0002/samples.jsonl").read_text().splitlines()
    assert json.loads(first)["image"] == ["0.png"]
    rows = read_metrics(runs / "whole")
    assert any("val/like_the_source/mean" in row for row in rows)
    assert not any("val/preservation/mean" in row for row in rows)


def test_two_ranks_with_pictures_are_as_one(checkpoint, tmp_path):
    """Of the family that also has an image encoder."""
    options = [*options_of(tmp_path, checkpoint("wan_image_to_video")), "--num_steps", 1, "--num_prompts", 2]
    options += ["--micro_batch_size", 4]
    options += ["--guidance_scale", 2.5, "--num_frames", 5]
    assert run_here(tmp_path, "flow_grpo.py", *options, "--name", "one") is None
    torchrun(tmp_path, "flow_grpo.py", *options, "--name", "two", nproc=2)
    one, two = (read_metrics(tmp_path / "runs" / name)[1] for name in ("one", "two"))
    for name in ("critic/rewards/mean", "actor/grad_norm", "val/like_the_source/mean"):
        assert two[name] == pytest.approx(one[name], rel=1e-3)


def video_model(folder):
    """A Wan with Euler's scheduler, as our ODE steps are."""
    model = load_model(family_class(folder), str(folder), torch.float32, "cpu")
    model.pipe.set_progress_bar_config(disable=True)
    model.pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return model


def video_request(model, size, num_frames, sde_steps=(), **changes):
    """A request for one video of each of two prompts, whose pictures have another shape than the video."""
    records = [{"image": [StoredImage("a.png", png(gradient(*shape)))]} for shape in ((48, 40), (30, 70))]
    prompts = PromptSet(["a sign", "a red sign that turns"], records)
    options = {"num_inference_steps": 4, "guidance_scale": 2.5, "max_sequence_length": 32, **changes}
    args = flow_grpo.Args(rollout="local", image_size=size, num_frames=num_frames, **options)
    with torch.no_grad():
        drawn = prompts
        return args, flow_grpo.make_request(args, model, drawn, torch.tensor([0, 1]), [3, 4], sde_steps=sde_steps)


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_a_video_is_that_of_the_stock_pipeline(family, checkpoint):
    """Of its own picture, which the pipeline brings to the video's size and the image encoder to its own.

    tests/models/test_families.py has wider videos of 5 frames.
    """
    size, num_frames = (64, 32), 9
    model = video_model(checkpoint(family))
    args, request = video_request(model, size, num_frames)
    trajectories = flow_grpo.rollout(args, model, None, request)
    start = request.first_latents([torch.Generator().manual_seed(seed) for seed in request.seeds], "cpu")
    has_encoder = family == "wan_image_to_video"
    for row, (prompt, shape) in enumerate((("a sign", (48, 40)), ("a red sign that turns", (30, 70)))):
        stock = model.pipe(
            image=gradient(*shape),
            prompt=prompt,
            negative_prompt="",
            height=size[0],
            width=size[1],
            num_frames=num_frames,
            num_inference_steps=4,
            guidance_scale=2.5,
            latents=start[row : row + 1],
            max_sequence_length=512 if has_encoder else 32,
            output_type="latent",
        ).frames
        torch.testing.assert_close(trajectories.latents[row, -1], stock[0], rtol=0, atol=2e-5)
        (video,) = model.decode(stock)
        difference = np.asarray(np.stack(video), dtype=int) - np.stack(trajectories.images[row])
        assert len(video) == num_frames and np.abs(difference).max() <= 1


@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps", "cps_gauss"])
def test_the_first_frame_ends_at_the_picture_and_tells_no_policies_apart(sde_type, checkpoint):
    """Whatever the steps, and to the bit whatever the weights: other frames of the means differ."""
    model = video_model(checkpoint("wan_ti2v_image"))
    args, request = video_request(model, (32, 64), 9, sde_steps=(0, 1, 2), sde_type=sde_type, noise_level=0.7)
    source = request.conditioning["source_latents"][:, :, 0]
    trajectories = flow_grpo.rollout(args, model, None, request)
    latents, means = trajectories.latents, trajectories.prev_sample_means
    torch.testing.assert_close(latents[:, -1, :, 0], source, rtol=0, atol=1e-5)
    assert (latents[:, 1, :, 0] - source).abs().max() > 0.1  # at first it has noise
    for parameter in model.transformer.parameters():
        parameter.data.mul_(1.1)
    images = request.select(torch.arange(2))
    for i in request.sde_steps:
        with torch.no_grad():
            other = flow_grpo.policy_step(model, images, latents[:, i], i, prev_sample=latents[:, i + 1])
        assert torch.equal(other.prev_sample_mean[:, :, 0], means[:, i, :, 0])
        assert (other.prev_sample_mean[:, :, 1:] - means[:, i, :, 1:]).abs().max() > 1e-3


def test_what_the_latents_hold_in_the_first_frame_changes_no_other(checkpoint):
    model = video_model(checkpoint("wan_ti2v_image"))
    _, request = video_request(model, (32, 64), 9)
    x = torch.randn(2, *request.latent_shape, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, :, 0] += 1
    with torch.no_grad():
        one, other = (
            model.predict_velocity(latents, request.timesteps[1], request.conditioning) for latents in (x, changed)
        )
    assert torch.equal(one[:, :, 1:], other[:, :, 1:])
    sigma = request.timesteps[1] / 1000
    torch.testing.assert_close(
        other[:, :, 0] - one[:, :, 0], torch.full_like(one[:, :, 0], 1 / sigma), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_the_plan_counts_what_is_encoded_of_a_picture(family, checkpoint):
    from common.plan.memory import Blueprint

    model = video_model(checkpoint(family))
    _, request = video_request(model, (32, 64), 9)
    blueprint = Blueprint(type(model), str(checkpoint(family)), None, torch.float32)
    planned = blueprint.conditioning_shapes(32, (32, 64), 9)
    if family == "wan_image_to_video":  # the tiny encoder makes fewer tokens than the published one
        assert planned["source_embeds"][0] == IMAGE_TOKENS
        planned["source_embeds"] = (17, *planned["source_embeds"][1:])
    assert planned == {name: tuple(tensor.shape[1:]) for name, tensor in request.conditioning.items()}
    assert blueprint.velocity((32, 64), 9, 32, 2.5, train=True).flops > 0
    encoders = [model.pipe.text_encoder, model.pipe.image_encoder]
    num_weights = sum(p.numel() for encoder in encoders if encoder for p in encoder.parameters())
    assert blueprint.text_encoder_bytes == 4 * num_weights


def test_the_published_folder_of_ti2v_is_renamed_to_take_pictures(checkpoint, tmp_path):
    """Its index names WanPipeline, and no image encoder, not even as a missing one."""
    folder = tmp_path / "ti2v"
    shutil.copytree(checkpoint("wan_ti2v"), folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("WanPipeline", "WanImageToVideoPipeline"))
    assert "image_encoder" not in json.loads(index.read_text())
    assert find_family(folder, 32, 64, 9) is WanImageToVideo
    model = video_model(folder)
    args, request = video_request(model, (32, 64), 9)
    latents = flow_grpo.rollout(args, model, None, request).latents[:, -1]
    torch.testing.assert_close(latents[:, :, 0], request.conditioning["source_latents"][:, :, 0], rtol=0, atol=1e-5)


def test_a_transformer_that_takes_no_first_frame_is_refused(checkpoint, tmp_path):
    for family, part, changes, message in (
        ("wan", "model_index.json", {"_class_name": "WanImageToVideoPipeline"}, " 4 .* 12"),
        ("wan_image_to_video", "model_index.json", {"expand_timesteps": True}, " 12 .* 4"),
        ("wan_image_to_video", "transformer/config.json", {"pos_embed_seq_len": 34}, "(?!.* A14B)"),
        ("wan_image_to_video", "model_index.json", {"boundary_ratio": 0.9}, ".* A14B"),
    ):
        folder = tmp_path / f"{family}_{len(list(tmp_path.iterdir()))}"
        shutil.copytree(checkpoint(family), folder)
        config = json.loads((folder / part).read_text()) | changes
        (folder / part).write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"^--model {folder}: .*{message}"):
            find_family(folder, 32, 64, 9)
