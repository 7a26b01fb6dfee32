"""Model families: found by the name of their file, with the methods of one base class, loaded frozen."""

import json
import re
import sys
from types import SimpleNamespace

from common import models
from common.models.family import Family, on_device
from common.models.loading import family_class, find_family, load_model
from common.models.stable_diffusion_3 import StableDiffusion3
from common.models.vae import decode_in_slices, encode_in_slices, to_unit_range
from common.weights.lora import make_lora
from common.weights.policy import add_policies
from common.weights.start import prepare_prompts
from tests.conftest import EMBEDDED, embedded_model, prompt_set, run_here
from tests.tiny_models import FAMILIES, make_checkpoint

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

pytestmark = pytest.mark.fast


def pipeline_folder(folder, class_name):
    (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    return folder


def test_the_embedded_model_is_of_a_family():
    assert family_class(EMBEDDED) is family_class(str(EMBEDDED)) is StableDiffusion3


def test_a_family_without_a_method_is_no_model(tmp_path):
    """`Family` names the methods that each family must have; a loaded model has every attribute that it names."""

    class Nothing(Family):
        pass

    with pytest.raises(TypeError, match="abstract methods? .*check.*encode_batch.*forward.*schedule"):
        Nothing(None)
    model = embedded_model()
    assert model.has_engine_pipeline("") and not Nothing.has_engine_pipeline("")
    add_policies(model, make_lora(type(model), rank=4, alpha=32), ["default"], seed=0)
    assert {name for name in Family.__annotations__ if not hasattr(model, name)} == set()


def test_finding_a_family_checks_size_frames_and_guidance(tmp_path):
    assert find_family(EMBEDDED, 64, 192, 1, 4.5) is StableDiffusion3
    for size, frames, message in (
        ((64, 190), 1, "--image_size 64 190: .* 8"),
        ((64, 192), 5, "--num_frames 5: .* 1 .*"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            find_family(EMBEDDED, *size, frames)
    folder = pipeline_folder(tmp_path, "StableDiffusion3Pipeline")
    with pytest.raises(ValueError, match=f"^--model {tmp_path}: ") as error:
        find_family(folder, 64, 192, 1)
    assert "model_index.json: " in str(error.value) and "\n" not in str(error.value)


def test_a_new_file_is_a_new_family_and_nothing_else_changes(tmp_path, monkeypatch):
    """A file's name without underscores is the pipeline's class name in lower case without "pipeline"."""
    (tmp_path / "pixart_alpha.py").write_text(
        "from common.models.flux import Flux\n\n\nclass PixArtAlpha(Flux):\n    pass\n"
    )
    monkeypatch.setattr(models.loading, "__file__", str(tmp_path / "loading.py"))
    monkeypatch.setattr(models, "__path__", [str(tmp_path), *models.__path__])
    family = family_class(pipeline_folder(tmp_path, "PixArtAlphaPipeline"))
    assert family.__name__ == "PixArtAlpha"
    monkeypatch.delitem(sys.modules, "common.models.pixart_alpha")
    with pytest.raises(ValueError, match=" StableDiffusion3Pipeline .*docs/models.md"):
        family_class(EMBEDDED)


OWN_FAMILY = """
from common.models import Family
from common.models.stable_diffusion_3 import StableDiffusion3

NoFamily = print


class Half(Family):
    def encode_images(self, images, height, width):
        pass


class Mine(StableDiffusion3):
    @staticmethod
    def check(model, height, width, num_frames, guidance_scale=1.0):
        raise ValueError("--image_size 32 96: mine takes none")
"""


@pytest.fixture
def own_families(tmp_path):
    path = tmp_path / "my_families.py"
    path.write_text(OWN_FAMILY)
    return path


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("Other", "--family {path}:Other: {path} .* Other$"),
        ("NoFamily", r"--family {path}:NoFamily: .* Family \(common/models/family\.py\)"),
        (
            "Half",
            "--family {path}:Half: .* check, conditioning_shapes, encode_batch, forward, lora_target_modules, schedule",
        ),
    ],
)
def test_a_family_of_ones_own_that_cannot_work_is_one_line(name, refused, own_families):
    with pytest.raises(ValueError) as error:
        family_class("no/model", f"{own_families}:{name}")
    assert re.match(refused.format(path=own_families), str(error.value))


@pytest.mark.parametrize(
    "script", ["flow_grpo.py", "grpo_guard.py", "mix_grpo.py", "diffusion_nft.py", "dpo_offline.py"]
)
def test_a_script_takes_a_family_of_ones_own(script, own_families, tmp_path):
    line = run_here(tmp_path, script, "--family", f"{own_families}:Mine")
    assert line == f"{script}: error: --image_size 32 96: mine takes none"


def test_a_model_that_cannot_be_read_is_refused_in_one_line(tmp_path):
    wrong = {
        tmp_path: ".*model_index.json",
        "no/such/model": "",
        "./models": "",
    }
    for model, message in wrong.items():
        with pytest.raises(ValueError) as error:
            family_class(model)
        text = str(error.value)
        assert re.match(f"--model {model}: {message}", text) and "\n" not in text
    for content in ("{", "[]", "{}", "\ud800".encode("utf-8", "surrogatepass")):
        (tmp_path / "model_index.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=rf"^--model {tmp_path}: model_index.json: .") as error:
            family_class(tmp_path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"^--model {tmp_path}: PixArtAlphaPipeline .*docs/models.md"):
        family_class(pipeline_folder(tmp_path, "PixArtAlphaPipeline"))


def test_a_model_is_loaded_frozen_and_its_vae_in_fp32():
    model = embedded_model(torch.bfloat16)
    assert model.device == torch.device("cpu")
    modules = {name: part for name, part in model.pipe.components.items() if isinstance(part, torch.nn.Module)}
    assert {"transformer", "vae", "text_encoder"} <= modules.keys()
    for name, module in modules.items():
        assert not module.training and not any(p.requires_grad for p in module.parameters()), name
        dtypes = {p.dtype for p in module.parameters()}
        assert dtypes == {torch.float32 if name == "vae" else torch.bfloat16}, name


@torch.no_grad()
def test_latents_of_a_vae_without_a_shift():
    """AutoencoderKL has none by default. A missing shift counts as 0."""
    model = embedded_model()
    latents = torch.randn(1, model.transformer.config.in_channels, 8, 24, generator=torch.Generator().manual_seed(0))
    images = []
    for shift in (None, 0.0):
        model.pipe.vae.register_to_config(shift_factor=shift)
        images.append(model.decode(latents))
    encoded = model.encode_images(images[0], *images[0][0].size[::-1])
    assert images[0][0].tobytes() == images[1][0].tobytes()
    model.pipe.vae.register_to_config(shift_factor=None)
    assert torch.equal(model.encode_images(images[0], *images[0][0].size[::-1]), encoded)


@pytest.mark.parametrize(
    ("shape", "scale", "expected"),
    [
        ((9, 16, 64, 64), 64, [4, 4, 1]),  # 512 x 512
        ((3, 16, 128, 128), 64, [1, 1, 1]),  # 1024 x 1024
        ((2, 16, 256, 256), 64, [1, 1]),  # an image is more than a call should take, and still gets a call
        ((2, 16, 9, 30, 52), 256, [1, 1]),  # videos of 33 frames
        ((64, 16, 4, 12), 64, [64]),  # the embedded size
    ],
)
def test_how_many_images_a_call_of_the_vae_takes(shape, scale, expected):
    seen = []

    class VAE:
        dtype = torch.float32

        def decode(self, latents, return_dict):
            seen.append(len(latents))
            return (latents,)

        def encode(self, pixels):
            seen.append(len(pixels))
            return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: pixels))

    latents = torch.empty(shape, device="meta")
    assert decode_in_slices(VAE(), latents, scale).shape == shape and seen == expected
    if len(shape) == 4:
        seen.clear()
        pixels = torch.empty(shape[0], 3, shape[2] * 8, shape[3] * 8, device="meta")
        assert encode_in_slices(VAE(), pixels).shape == pixels.shape and seen == expected


def test_a_vae_without_a_posterior_is_encoded_in_slices(monkeypatch):
    """AutoencoderDC, which Sana has."""
    sizes = {}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_block_out_channels": (8, 8), f"{side}_layers_per_block": (1, 1)}
        sizes |= {f"{side}_block_types": "ResBlock", f"{side}_qkv_multiscales": ((), ())}
    vae = diffusers.AutoencoderDC(latent_channels=4, attention_head_dim=4, **sizes)
    pixels = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.encode(pixels).latent
    monkeypatch.setattr("common.models.vae.PIXELS_AT_ONCE", 2 * 16 * 16)
    torch.testing.assert_close(encode_in_slices(vae, pixels), expected, rtol=0, atol=1e-5)


class FakeGPU:
    """A device in name only: whatever moves there is copied on the CPU, so that a model can work there.

    `home` has the addresses of the tensors that wait on the CPU. A component whose tensors are elsewhere is on the
    device.
    """

    def __init__(self, model, monkeypatch):
        self.model = model
        self.copies = 0
        self.events = []  # work on the device
        model.device = torch.device("cuda", 0)
        self.home = {tensor.data_ptr() for part in self.components("") for tensor in part.state_dict().values()}
        own = torch.Tensor.to

        def to(tensor, *places, **options):
            if model.device in places or options.get("device") == model.device:
                self.copies += 1
                tensor = tensor.clone()
            elsewhere = [place for place in places if place != model.device]
            options.pop("device", None)
            return own(tensor, *elsewhere, **options) if elsewhere or options else tensor

        monkeypatch.setattr(torch.Tensor, "to", to)
        for mixin in (diffusers.ModelMixin, transformers.PreTrainedModel):
            monkeypatch.setattr(mixin, "device", property(self.device_of))
        # an engine that shares the GPU asks for the memory itself (common/engine/client.py)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("emptied"))

    def components(self, prefix):
        parts = self.model.pipe.components.items()
        return [part for name, part in parts if name.startswith(prefix) and isinstance(part, torch.nn.Module)]

    def device_of(self, component):
        return torch.device("cpu") if next(component.parameters()).data_ptr() in self.home else self.model.device

    def places(self):
        """Where all tensors of text encoders and VAE are: "encoders on the cpu, VAE on the cuda"."""
        found = []
        for prefix in ("text_encoder", "vae"):
            tensors = [tensor for part in self.components(prefix) for tensor in part.state_dict().values()]
            at_home = {tensor.data_ptr() in self.home for tensor in tensors}
            assert len(at_home) == 1  # all of them, buffers too
            found.append("waiting" if at_home.pop() else "there")
        return "encoders {}, VAE {}".format(*found)


def test_encoders_and_vae_are_on_the_device_only_where_they_work(monkeypatch):
    model = embedded_model()
    latents = torch.randn(2, model.transformer.config.in_channels, 8, 24, generator=torch.Generator().manual_seed(0))
    images = model.decode(latents)
    encoded = model.encode_images(images, 64, 192)
    conditioning = model.encode_prompts(["a sign", "another"], 16)
    gpu = FakeGPU(model, monkeypatch)
    for part in (*gpu.components("text_encoder"), model.pipe.vae.decoder, model.pipe.vae.encoder):
        part.register_forward_hook(lambda *_: gpu.events.append(gpu.places()))
    for name, tensor in model.encode_prompts(["a sign", "another"], 16).items():
        assert torch.equal(tensor, conditioning[name])
    waiting = "encoders waiting, VAE waiting"
    assert gpu.events == ["encoders there, VAE waiting"] * 3 and gpu.places() == waiting
    gpu.events.clear()
    assert [image.tobytes() for image in model.decode(latents)] == [image.tobytes() for image in images]
    assert torch.equal(model.encode_images(images, 64, 192), encoded)
    assert gpu.events == ["encoders waiting, VAE there"] * 2 and gpu.places() == waiting


def test_a_block_around_all_calls_brings_a_component_once_and_copies_nothing_back(monkeypatch):
    model = embedded_model()
    gpu = FakeGPU(model, monkeypatch)
    weight = model.pipe.text_encoder_3.shared.weight
    content = weight.data.clone()
    with on_device(model, "text_encoder"):
        brought = gpu.copies
        assert brought == sum(len([*part.parameters(), *part.buffers()]) for part in gpu.components("text_encoder"))
        assert gpu.places() == "encoders there, VAE waiting"
        with on_device(model, "text_encoder"):
            assert gpu.copies == brought
        assert gpu.places() == "encoders there, VAE waiting"
        assert model.pipe.text_encoder_3.shared.weight is weight  # the same parameter, with other data
    assert gpu.places() == "encoders waiting, VAE waiting"
    assert gpu.copies == brought and torch.equal(weight, content)


@pytest.mark.parametrize(
    ("host_bytes", "ranks", "folder", "is_pinned"),
    [("enough", 1, None, True), ("enough", 3, None, False), ("too few", 1, None, False), ("enough", 1, "cache", False)],
)
def test_encoders_of_every_rollout_wait_in_pinned_memory_that_takes_half_the_hosts_at_most(
    host_bytes, ranks, folder, is_pinned, monkeypatch, one_rank, tmp_path
):
    """Each tensor takes a power of two of bytes there. The embedded encoders stand for larger ones."""
    model = embedded_model()
    gpu = FakeGPU(model, monkeypatch)
    tensors = [[*part.parameters(), *part.buffers()] for part in gpu.components("text_encoder")]
    tensors = [tensor for of_part in tensors for tensor in of_part]
    values = [tensor.data.clone() for tensor in tensors]
    needed = 0
    for tensor in tensors:
        size = 1
        while size < tensor.nbytes:
            size *= 2
        needed += size
    assert needed > sum(tensor.nbytes for tensor in tensors)
    pages = 2 * needed if host_bytes == "enough" else 2 * needed - 1
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": pages}[name])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr("common.weights.prompt_cache.PromptCache.add_missing", lambda *asked: None)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    prepare_prompts(model, ["a sign"], 16, folder and tmp_path / folder)
    assert len(pinned) == (len(tensors) if is_pinned else 0)
    assert all(map(torch.equal, tensors, values))
    for tensor, copy in zip(tensors, pinned, strict=False):
        assert tensor.data_ptr() == copy.data_ptr()


def test_on_the_cpu_nothing_moves(monkeypatch):
    model = embedded_model()
    monkeypatch.setattr(torch.Tensor, "to", lambda *_: pytest.fail("moved"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda *_: pytest.fail("pinned"))
    prepare_prompts(model, ["a sign"], 16, None)
    with on_device(model, "text_encoder"), on_device(model, "vae"):
        pass


def test_a_prompt_cache_brings_the_encoders_for_all_its_prompts_at_once(one_rank, tmp_path, monkeypatch):
    model = embedded_model()
    gpu = FakeGPU(model, monkeypatch)
    own = model.encode_prompts
    monkeypatch.setattr(model, "encode_prompts", lambda *asked: gpu.events.append(gpu.places()) or own(*asked))
    monkeypatch.setattr(
        "common.weights.prompt_cache.encoders_key", lambda model: gpu.events.append("key, " + gpu.places())
    )
    prepare_prompts(model, ["a sign", "another"], 16, tmp_path)
    there = "encoders there, VAE waiting"
    assert gpu.events == [f"key, {there}", there, there, there]  # the third prompt is the empty one
    assert gpu.places() == "encoders waiting, VAE waiting"
    gpu.events.clear()
    model.encode_through_cache(["another"], 16)
    assert gpu.events == []


def test_a_vae_in_bf16_moves_pixels_by_three_of_255_at_most():
    """As docs/lab/performance.md says of the embedded model. Latents are fp32 with both."""
    whole = embedded_model()
    rounded = load_model(type(whole), EMBEDDED, torch.float32, "cpu", vae_dtype="bfloat16")
    assert {p.dtype for p in rounded.pipe.vae.parameters()} == {torch.bfloat16}
    assert rounded.pipe.vae.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert whole.pipe.vae.dtype == rounded.transformer.dtype == torch.float32
    images = [Image.linear_gradient("L").resize((96, 32)).convert("RGB"), Image.new("RGB", (96, 32), "teal")]
    latents = whole.encode_images(images, 32, 96)
    of_rounded = rounded.encode_images(images, 32, 96)
    assert of_rounded.dtype == torch.float32
    assert 0 < (of_rounded - latents).abs().max() < 0.05 * latents.abs().max()
    pixels = [np.stack([np.asarray(image, dtype=int) for image in model.decode(latents)]) for model in (whole, rounded)]
    distance = abs(pixels[0] - pixels[1])
    assert 0 < distance.max() <= 3 and distance.mean() < 0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_the_vae_of_every_family_decodes_and_encodes_in_bf16(name, tmp_path):
    if name == "qwen_image_edit_plus":
        pytest.importorskip("torchvision", reason="torchvision, which comes with vLLM-Omni, is not installed")
    folder = str(make_checkpoint(name, tmp_path))
    model = load_model(family_class(folder), folder, torch.float32, "cpu", vae_dtype="bfloat16")
    frames = 5 if model.makes_videos else 1
    shape = model.schedule(2, 32, 64, frames)[2]
    images = model.decode(torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)))
    assert len(images) == 1
    if not model.makes_videos:
        latents = model.encode_images(images, 32, 64)
        assert latents.dtype == torch.float32 and latents.shape == (1, *shape)


def test_pixels_become_images_as_in_diffusers():
    """Rounded on the device, and equal to the bit: random pixels, each exact half between two bytes, and a video."""
    random = torch.randn(4, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    halves = ((torch.arange(256) + 0.5) / 255 * 2 - 1).view(-1, 1, 1, 1).expand(-1, 3, 1, 1)
    for pixels in (random, halves):
        ours = embedded_model().to_images(to_unit_range(pixels))
        theirs = VaeImageProcessor().postprocess(pixels)
        assert [image.tobytes() for image in ours] == [image.tobytes() for image in theirs]
    video = random.view(2, 2, 3, 16, 24).movedim(1, 2)  # two videos of two frames
    frames = [frame.tobytes() for frames in embedded_model().to_images(to_unit_range(video)) for frame in frames]
    assert frames == [image.tobytes() for image in VaeImageProcessor().postprocess(random)]


@pytest.mark.fast
def test_the_negative_prompt_is_encoded_once_and_not_without_guidance(monkeypatch):
    model = embedded_model()
    asked = []
    encode = model.encode_prompts
    monkeypatch.setattr(
        model, "encode_prompts", lambda prompts, length: asked.append((prompts, length)) or encode(prompts, length)
    )
    assert model.encode_negative(prompt_set(["", ""]), 1.0, 16) is None
    first, second = (
        model.encode_negative(prompt_set(["", ""]), 2.0, 16),
        model.encode_negative(prompt_set([""]), 4.0, 16),
    )
    assert asked == [([""], 16)]
    for name, tensor in encode([""], 16).items():
        assert torch.equal(first[name], tensor) and torch.equal(second[name], tensor)
    model.encode_negative(prompt_set([""]), 2.0, 8)  # of another length it is another
    assert len(asked) == 2
    model.encode_negative(prompt_set(["blurred"] * 3), 2.0, 16)
    model.encode_negative(prompt_set(["blurred"]), 2.0, 16)
    assert asked[2:] == [(["blurred"], 16)]
    several = model.encode_negative(prompt_set(["blurred", "", "blurred"]), 2.0, 16)  # a row for each prompt
    for name, tensor in encode(["blurred", "", "blurred"], 16).items():
        assert torch.equal(several[name], tensor)
    # a family may encode them in its own way, and the one row is kept all the same
    other = []
    monkeypatch.setattr(model, "encode_negative_prompts", lambda *asked: other.append(asked) or dict(several))
    for _ in range(2):
        model.encode_negative(prompt_set(["ugly"] * 2), 2.0, 16)
    model.encode_negative(prompt_set(["ugly", ""]), 2.0, 16)
    assert other == [(["ugly"], 16), (["ugly", ""], 16)]
