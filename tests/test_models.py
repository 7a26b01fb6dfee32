"""Model families: found by the name of their file, of one protocol, loaded frozen."""

import json
import sys

from common import models
from common.models import Family, find_family
from common.models.stable_diffusion_3 import StableDiffusion3
from tests.conftest import EMBEDDED, ROOT, embedded_model

import pytest
import torch

pytestmark = pytest.mark.fast


def pipeline_folder(folder, class_name):
    (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    return folder


def test_the_embedded_model_is_of_a_family():
    assert find_family(EMBEDDED) is find_family(str(EMBEDDED)) is StableDiffusion3


def test_a_family_gives_what_the_protocol_says():
    wanted = {name for name in vars(Family) if callable(getattr(Family, name)) and not name.startswith("_")}
    assert len(wanted) > 6 and {name for name in wanted if not callable(getattr(StableDiffusion3, name, None))} == set()
    model = embedded_model()
    assert {name for name in Family.__annotations__ if not hasattr(model, name)} == set()


def test_a_new_file_is_a_new_family_and_nothing_else_changes(tmp_path, monkeypatch):
    """A file's name without underscores is the pipeline's class name in lower case without "pipeline"."""
    (tmp_path / "pixart_alpha.py").write_text("class PixArtAlpha:\n    pass\n")
    monkeypatch.setattr(models, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(models, "__path__", [str(tmp_path)])
    family = find_family(pipeline_folder(tmp_path, "PixArtAlphaPipeline"))
    assert family.__name__ == "PixArtAlpha"
    monkeypatch.delitem(sys.modules, "common.models.pixart_alpha")
    with pytest.raises(ValueError, match="StableDiffusion3Pipeline is not supported; supported: pixart_alpha$"):
        find_family(EMBEDDED)


def test_what_is_no_model_is_one_line(tmp_path):
    wrong = {
        tmp_path: "not a diffusers pipeline (no model_index.json)",
        "no/such/model": "no folder, and no model that can be fetched: Repo id must be in the form",
    }
    for model, message in wrong.items():
        with pytest.raises(ValueError) as error:
            find_family(model)
        text = str(error.value)
        assert text.startswith(f"--model {model}: {message}") and "\n" not in text
    for content in ("{", "[]", "{}", "\ud800".encode("utf-8", "surrogatepass")):
        (tmp_path / "model_index.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=rf"^--model {tmp_path}: model_index.json: .") as error:
            find_family(tmp_path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError) as error:
        find_family(pipeline_folder(tmp_path, "PixArtAlphaPipeline"))
    files = (ROOT / "common" / "models").glob("*.py")
    supported = ", ".join(sorted(file.stem for file in files if file.stem != "__init__"))
    assert str(error.value) == f"--model {tmp_path}: PixArtAlphaPipeline is not supported; supported: {supported}"


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
    """As AutoencoderKL's is by default: the one that is not there is 0."""
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
