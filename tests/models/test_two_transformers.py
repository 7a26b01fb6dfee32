"""Wan 2.2 A14B, whose transformers share the timesteps: against diffusers' pipelines, trained, saved and refused."""

import copy
import functools
import json

import flow_grpo
from common.models.wan import Wan
from common.weights.adapter_files import read_lora
from common.weights.lora import LORA_FILES, make_lora, save_policy, save_weights
from common.weights.policy import add_policies, tensors_on_rank_0
from tests.conftest import (
    TINY,
    assert_one_line,
    few_eval_prompts,
    read_metrics,
    run_and_resume,
    run_here,
    torchrun,
)
from tests.models.test_families import (
    GUIDANCE,
    MOTION,
    PROMPTS,
    assert_same_images,
    assert_same_steps,
    first_latents,
    give_lora,
    load,
    request_for,
    stock_call,
)
from tests.tiny_models import make_checkpoint
from tools import sample

import diffusers
import pytest
import torch
from safetensors.torch import load_file

FIRST, SECOND = LORA_FILES.values()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny checkpoint, made once."""
    return functools.cache(lambda family: make_checkpoint(family, tmp_path_factory.mktemp(family)))


def stock_of(folder):
    """diffusers' pipeline with Euler's scheduler, as our ODE steps are."""
    stock = diffusers.DiffusionPipeline.from_pretrained(folder)
    stock.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=stock.scheduler.config.flow_shift)
    stock.set_progress_bar_config(disable=True)
    return stock


def videos_of(stock, request, **guidance):
    """What stock_call returns for a request."""
    prompts = [PROMPTS[row] for row in request.prompt_index]
    guidance = {"guidance_scale": GUIDANCE, "negative_prompt": [""] * len(prompts), **guidance}
    return stock_call(stock, first_latents(request), prompts, 4, guidance)


# ---- passes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["wan_a14b", "wan_i2v_a14b"])
@pytest.mark.parametrize("guidance_scale_2", [None, 1.5])
def test_a_video_is_that_of_the_stock_pipeline(family, guidance_scale_2, checkpoint, monkeypatch):
    """Each of its four steps is by the transformer, and with the guidance, that diffusers takes for it."""
    model = load(checkpoint(family))
    model.guidance_scale_2 = guidance_scale_2
    args, request = request_for(model)
    boundary = model.transformer.boundary
    assert boundary == {"wan_a14b": 875, "wan_i2v_a14b": 900}[family]
    assert 0 < (request.timesteps < boundary).sum() < 4
    stock = stock_of(checkpoint(family))
    if guidance_scale_2:  # stock_call's pipelines of pictures have one guidance
        monkeypatch.setattr(
            type(stock), "__call__", functools.partialmethod(type(stock).__call__, guidance_scale_2=1.5)
        )
    images, steps = stock_call(stock, first_latents(request), [PROMPTS[row] for row in request.prompt_index], 4)
    assert_same_steps(model, request, steps)
    assert_same_images(flow_grpo.rollout(args, model, None, request).images, images)


def test_rows_of_one_batch_go_to_the_transformer_of_their_timestep(checkpoint):
    """Also in a pass with guidance, which has each row twice; each row's velocity is that which it has alone."""
    model = load(checkpoint("wan_a14b"))
    model.guidance_scale_2 = 1.5
    _, request = request_for(model)
    x, timestep = first_latents(request), torch.tensor([900.0, 874.9, 875.0])
    given = request.select(torch.arange(3))
    for scale in (1.0, GUIDANCE):
        together = model.predict_velocity(x, timestep, given.conditioning, given.negative_conditioning, scale)
        for row in range(3):
            one = request.select(torch.tensor([row]))
            expert, of_row = (
                (model.transformer.transformer, scale) if row != 1 else (model.transformer.transformer_2, 1.5)
            )
            alone = copy.copy(model)
            alone.transformer, alone.guidance_scale_2 = expert, None
            guidance = of_row if scale > 1 else 1.0
            inputs = (x[row : row + 1], timestep[row], one.conditioning, one.negative_conditioning, guidance)
            torch.testing.assert_close(together[row : row + 1], alone.predict_velocity(*inputs), rtol=0, atol=1e-5)


# ---- a LoRA ----------------------------------------------------------------------------------------------------------
def test_a_saved_lora_gives_the_trainers_video_in_the_stock_pipeline(checkpoint, tmp_path):
    """It is two files, which diffusers loads one by one, and --lora_path both."""
    model = load(checkpoint("wan_a14b"))
    give_lora(model)
    args, request = request_for(model)
    ours = flow_grpo.rollout(args, model, None, request).images
    tensors, config = tensors_on_rank_0(model)
    save_weights(tmp_path, model.pipe, tensors, config)
    stock = stock_of(checkpoint("wan_a14b"))
    without, _ = videos_of(stock, request)
    with pytest.raises(AssertionError):
        assert_same_images(ours, without)
    stock.load_lora_weights(tmp_path)
    with pytest.raises(AssertionError):
        assert_same_images(ours, videos_of(stock, request)[0])
    stock.load_lora_weights(tmp_path, weight_name=SECOND, load_into_transformer_2=True)
    assert_same_images(ours, videos_of(stock, request)[0])

    read, read_config = read_lora(tmp_path, checkpoint("wan_a14b"))
    assert read.keys() == tensors.keys() and read_config.lora_alpha == read_config.r == 4
    for name, tensor in tensors.items():
        torch.testing.assert_close(read[name], tensor * (2 if ".lora_B." in name else 1), rtol=0, atol=0)
    again = load(checkpoint("wan_a14b"))
    lora = make_lora(Wan, rank=0, alpha=1, model=str(checkpoint("wan_a14b")), path=str(tmp_path / FIRST))
    add_policies(again, lora, ["default"], seed=0)
    save_policy(tmp_path / "again", again, "default")
    for name in LORA_FILES.values():
        saved, first = (load_file(folder / name) for folder in (tmp_path / "again", tmp_path))
        assert all(torch.equal(saved[key], first[key]) for key in first | saved)
    sample.use(again, *sample.read_policy(tmp_path, str(checkpoint("wan_a14b"))))
    assert_same_images(ours, flow_grpo.rollout(args, again, None, request).images)


@pytest.mark.parametrize(("left_out", "file"), [("transformer_2", FIRST), ("transformer", SECOND)])
def test_a_lora_of_one_transformer_is_one_file(left_out, file, checkpoint, tmp_path):
    """A batch that needs the other one alone has a gradient of 0, and not none."""
    folder = str(checkpoint("wan_a14b"))
    model = load(folder)
    lora = make_lora(Wan, rank=4, alpha=4, model=folder, target_modules=["to_q", f"not:{left_out}"])
    add_policies(model, lora, ["default"], seed=0)
    _, request = request_for(model)
    timestep = torch.full((3,), 100.0 if left_out == "transformer_2" else 1000.0)
    velocity = model.predict_velocity(first_latents(request), timestep, request.select(torch.arange(3)).conditioning)
    velocity.square().mean().backward()
    trained = [parameter for parameter in model.transformer.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad is not None and not parameter.grad.any() for parameter in trained)
    save_policy(tmp_path, model, "default")
    assert [path.name for path in tmp_path.iterdir()] == [file]
    read, config = read_lora(tmp_path, folder)
    assert {name.partition(".")[0] for name in read} == {"transformer", "transformer_2"} - {left_out}
    again = make_lora(Wan, rank=0, alpha=1, model=folder, path=str(tmp_path))
    add_policies(load(folder), again, ["default"], seed=0)


# ---- runs ------------------------------------------------------------------------------------------------------------
def options_of(folder, model):
    (folder / "motion.py").write_text(MOTION)
    options = ["--model", model, "--num_frames", 5, "--image_size", 16, 48, "--max_sequence_length", 32]
    options += ["--reward", f"{folder}/motion.py:motion", "--learning_rate", 1e-2]
    return [*options, *few_eval_prompts(folder, 2), "--rollout", "local", "--lr_schedule", "constant"]


def test_both_transformers_train_and_resume(checkpoint, tmp_path):
    options = [*options_of(tmp_path, checkpoint("wan_a14b")), "--num_prompts", 2, "--num_inference_steps", 4]
    options += [
        "--guidance_scale",
        2,
        "--guidance_scale_2",
        1.5,
        "--kl_coef",
        0.01,
        "--ema_decay",
        0.9,
        "--sde_window_size",
        0,
    ]
    runs = run_and_resume(tmp_path, "flow_grpo.py", options)
    for name in LORA_FILES.values():
        whole, cut = (run / "adapter" / name for run in runs)
        assert whole.read_bytes() == cut.read_bytes()
        assert any(tensor.any() for key, tensor in load_file(whole).items() if "lora_B" in key)
    assert read_metrics(tmp_path / "runs/whole")[1]["actor/on_policy_ratio_std"] == 0


def test_ranks_whose_rows_need_other_transformers_train_as_one_does(checkpoint, tmp_path):
    """DiffusionNFT's images have timesteps of their own, and each rank passes one image at a time; or two ranks
    pass it together."""
    options = [*options_of(tmp_path, checkpoint("wan_a14b")), *TINY[:6], "--num_prompts", 2]
    options += ["--num_inference_steps", 3, "--micro_batch_size", 1, "--num_steps", 2]
    assert run_here(tmp_path, "diffusion_nft.py", *options, "--name", "one") is None
    torchrun(tmp_path, "diffusion_nft.py", *options, "--name", "two", nproc=2)
    torchrun(tmp_path, "diffusion_nft.py", *options, "--name", "together", "--ranks_per_image", 2, nproc=2)
    one, two, together = (read_metrics(tmp_path / "runs" / name)[1:] for name in ("one", "two", "together"))
    for mine, theirs in zip(one + one, two + together, strict=True):
        for name in ("critic/rewards/mean", "actor/grad_norm", "actor/loss"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3)


# ---- refused ---------------------------------------------------------------------------------------------------------
def test_what_two_transformers_cannot_take_is_refused(checkpoint, tmp_path, capfd):
    two, one = checkpoint("wan_a14b"), make_checkpoint("wan", tmp_path / "wan")
    for options, refused in (
        (["--model", two, "--lora_rank", 0], "--lora_rank 0: "),
        (["--model", two, "--rollout", "vllm"], "--rollout vllm: Wan "),
        (["--model", one, "--guidance_scale_2", 2, "--guidance_scale", 2], "--guidance_scale_2 2: "),
        (["--model", two, "--guidance_scale_2", 2], "--guidance_scale_2 2: "),
        (["--model", two, "--guidance_scale_2", 0.5], "--guidance_scale_2 0.5: "),
    ):
        line = run_here(tmp_path, "flow_grpo.py", *options_of(tmp_path, two), *options)
        assert_one_line(line)
        assert line.startswith(f"flow_grpo.py: error: {refused}")
    assert "loading" not in capfd.readouterr().err
    config = json.loads((two / "transformer_2/config.json").read_text())
    (two / "transformer_2/config.json").write_text(json.dumps(config | {"num_layers": 1}))
    line = run_here(tmp_path, "flow_grpo.py", *options_of(tmp_path, two))
    assert_one_line(line)
    assert "num_layers" in line
    (two / "transformer_2/config.json").write_text(json.dumps(config))
