"""--attention: which kernel the trainer's transformers and the engine compute attention with."""

import importlib.util
import io
import re
import subprocess
import sys
from types import SimpleNamespace

import flow_grpo
from common.data import PromptSet
from common.engine.environment import engine_environment
from common.errors import RunError
from common.files.pictures import StoredImage
from common.models.loading import family_class, load_model
from common.run.command_line import parse_args
from common.weights import attention
from common.weights.attention import check_attention, check_machine, use_attention
from tests.conftest import EMBEDDED, TINY, forked_engines, needs_engine, run_here
from tests.engine.test_engine import start
from tests.tiny_models import FAMILIES, make_checkpoint

import pytest
import torch
from diffusers import Lumina2Transformer2DModel, SD3Transformer2DModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.fixture
def has_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_machine_that_cannot_take_the_kernel_is_named(tmp_path):
    line = run_here(tmp_path, "flow_grpo.py", *TINY, "--attention", "cudnn")
    assert re.match("flow_grpo.py: error: --attention cudnn: .* GPU; .* CPU ", line)


@pytest.mark.fast
def test_flash_needs_its_package(has_gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^--attention flash: .*flash-attn"):
        check_machine("flash")
    check_machine("cudnn")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    check_machine("flash")


@pytest.mark.fast
def test_a_plan_may_be_of_a_kernel_that_this_machine_has_not():
    """It passes its own words to the parser, and is for a GPU elsewhere."""
    words = ["--attention", "cudnn", "--dtype"]
    assert parse_args(flow_grpo.Args, "", [*words, "bfloat16"]).attention == "cudnn"
    with pytest.raises(ValueError, match="^--attention cudnn: .*--dtype bfloat16$"):
        parse_args(flow_grpo.Args, "", [*words, "float32"])


def test_options_that_do_not_fit_the_kernel_are_named(tmp_path):
    with pytest.raises(ValueError, match="^--attention cudnn: .*--dtype bfloat16$"):
        check_attention("cudnn", EMBEDDED, "float32")
    check_attention("cudnn", EMBEDDED, "bfloat16")
    flux = str(make_checkpoint("flux", tmp_path))
    with pytest.raises(ValueError, match="^--attention cudnn: Flux .* flash$"):
        check_attention("cudnn", flux, "bfloat16")
    check_attention("flash", flux, "bfloat16")
    with pytest.raises(ValueError, match="^--attention flash: StableDiffusion3 .* cudnn$"):
        check_attention("flash", EMBEDDED, "bfloat16")
    masked = str(make_checkpoint("qwen_image", tmp_path / "masked"))
    for kernel, why in (("flash", ""), ("cudnn", "NaN .* 196678")):
        with pytest.raises(ValueError, match=f"^--attention {kernel}: .*{why}.*QwenImage"):
            check_attention(kernel, masked, "bfloat16")


def velocity_of(folder, prompts):
    """A function () -> velocity of the tiny model of a family, one image of each prompt; and the model."""
    family = family_class(folder)
    model = load_model(family, folder, torch.float32, "cpu")
    model.policies = {"default": model.transformer}
    frames = 5 if model.makes_videos else 1
    timesteps, _, shape = model.schedule(2, 32, 64, frames)
    latents = torch.randn(len(prompts), *shape, generator=torch.Generator().manual_seed(0))
    picture = io.BytesIO()
    Image.new("RGB", (64, 32), "red").save(picture, "PNG")
    record = {"image": [StoredImage("red.png", picture.getvalue())]} if max(model.num_sources) else {}
    with torch.no_grad():
        encoded = model.encode(PromptSet(prompts, [record] * len(prompts)), 160, (32, 64), frames)

    @torch.no_grad()
    def velocity():
        return model.predict_velocity(latents, timesteps[0], encoded)

    return velocity, model


def test_native_is_never_cudnns_kernel():
    """torch would take it on an H100, where its plan of FLUX's backward pass is that of other strides."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        use_attention(SimpleNamespace(policies={}), "native")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # as --attention cudnn asks
            assert torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_native_is_offered_where_a_mask_is_passed(name, tmp_path, monkeypatch):
    """flash refuses a mask, and cuDNN's gradient can be NaN. Two prompts of different lengths show whether there is
    one."""
    masks = []
    backends = attention_dispatch._AttentionBackendRegistry._backends
    native = backends[AttentionBackendName.NATIVE]

    def noted(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask is not None)
        return native(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setitem(backends, AttentionBackendName.NATIVE, noted)
    velocity, model = velocity_of(str(make_checkpoint(name, tmp_path)), ["a sign", "a sign that is much longer " * 9])
    velocity()
    if not masks:
        pytest.skip("this transformer does not ask diffusers for its kernel")
    assert any(masks) == model.masks_attention == ("flash" not in model.attention_kernels)
    assert not (model.masks_attention and "cudnn" in model.attention_kernels)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernel_is_taken_by_every_family_that_says_so(name, tmp_path, monkeypatch):
    """torch's plain products stand for a GPU's kernel here: they run on a CPU, and calls of them can be counted."""
    monkeypatch.setitem(attention.DIFFUSERS_NAMES, "cudnn", "_native_math")
    monkeypatch.setitem(attention.SDPA_BACKENDS, "cudnn", SDPBackend.MATH)
    monkeypatch.setattr(
        attention_dispatch._AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE
    )  # use_attention sets it for the process
    backends = attention_dispatch._AttentionBackendRegistry._backends
    plain = backends[AttentionBackendName._NATIVE_MATH]
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setitem(backends, AttentionBackendName._NATIVE_MATH, counted)
    velocity, model = velocity_of(str(make_checkpoint(name, tmp_path)), ["a sign"])
    if "cudnn" not in model.attention_kernels:
        pytest.skip("it does not say so")
    native = velocity()
    assert not calls
    use_attention(model, "cudnn")
    other = velocity()
    torch.testing.assert_close(other, native, rtol=1e-4, atol=1e-5)
    assert bool(calls) != isinstance(model.transformer, SD3Transformer2DModel)  # which has the test below


def test_a_transformer_that_chooses_its_kernel_itself_is_refused(monkeypatch):
    """Lumina 2's, as CogView4's: diffusers leaves it as it is, without a message."""
    monkeypatch.setitem(attention.DIFFUSERS_NAMES, "cudnn", "_native_math")
    monkeypatch.setattr(
        attention_dispatch._AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE
    )  # use_attention sets it for the process
    transformer = Lumina2Transformer2DModel(
        hidden_size=32, num_layers=1, num_refiner_layers=1, num_attention_heads=2, axes_dim_rope=(4, 6, 6)
    )
    with pytest.raises(RunError, match="^--attention cudnn: Lumina2Transformer2DModel's Lumina2AttnProcessor2_0 "):
        use_attention(SimpleNamespace(policies={"default": transformer}), "cudnn")


@pytest.mark.parametrize("checkpoints", [False, True])
def test_stable_diffusion_3_computes_with_the_kernel_in_every_pass(checkpoints, tmp_path, monkeypatch):
    """The plain products stand for cuDNN's again. With activation checkpointing they are computed again, by the same
    kernel, and the gradient is that of torch's own kernel."""
    monkeypatch.setitem(attention.SDPA_BACKENDS, "cudnn", SDPBackend.MATH)
    monkeypatch.setattr(
        attention_dispatch._AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE
    )  # use_attention sets it for the process
    _, model = velocity_of(str(make_checkpoint("stable_diffusion_3", tmp_path)), ["a sign"])
    if checkpoints:
        model.transformer.enable_gradient_checkpointing()
    model.transformer.requires_grad_(True)
    timesteps, _, shape = model.schedule(2, 32, 64, 1)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    encoded = model.encode_prompts(["a sign"], 16)
    kernels = []

    def gradient_and_kernels():
        """The gradient of a weight before the attention, and the names of the attention kernels that ran."""
        model.transformer.zero_grad()
        with torch.profiler.profile() as profiler:
            model.predict_velocity(latents, timesteps[0], encoded).square().mean().backward()
        ran = {event.name for event in profiler.events() if "_scaled_dot_product" in event.name}
        kernels.append({name.removesuffix("_backward") for name in ran})
        return next(model.transformer.parameters()).grad.clone()

    native = gradient_and_kernels()
    use_attention(model, "cudnn")
    other = gradient_and_kernels()
    native_names, other_names = kernels
    assert native_names == {"aten::_scaled_dot_product_flash_attention_for_cpu"}
    assert other_names == {"aten::_scaled_dot_product_attention_math"}
    torch.testing.assert_close(other, native, rtol=1e-3, atol=1e-6)


@needs_engine
def test_the_engines_flash_attention_is_the_trainers(tmp_path, monkeypatch):
    """FlashAttention 2, although vLLM-Omni asks for 3 first, which it installs. Empty modules stand for both."""
    for module in ("fa3_fwd_interface", "flash_attn_interface", "flash_attn"):
        (tmp_path / f"{module}.py").write_text(
            "def flash_attn_func(): pass\nflash_attn_varlen_func = flash_attn_func\n"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import common.engine.server\nfrom vllm_omni.diffusion.attention.backends.utils import fa\n"
    code += "print('takes', fa.flash_attn_func.__module__)"
    env = engine_environment(EMBEDDED, (None,), 1)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert "takes flash_attn\n" in done.stdout, done.stdout + done.stderr[-2000:]


def test_the_engine_gets_the_same_kernel(tmp_path):
    """On a CPU it has torch's alone, and says which one it was asked for."""
    with forked_engines():
        engine = start(tmp_path, attention="cudnn")
    with pytest.raises(RuntimeError, match=" CUDNN_ATTN: .* TORCH_SDPA .* CPU"):
        engine.wait_ready()
    engine.close()
