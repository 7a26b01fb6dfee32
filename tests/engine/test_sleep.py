"""--engine_with sleep: what is in the pool that sleep empties, and when the engine sleeps."""

import json
import subprocess
import sys

from common.engine.environment import engine_environment
from common.models.loading import family_class
from common.plan.memory import Blueprint
from common.weights.lora import make_lora
from tests.conftest import needs_engine
from tests.tiny_models import make_checkpoint

import torch


@needs_engine
def test_the_pool_that_sleeps_holds_the_transformer_and_the_vae_alone(tmp_path):
    """--engine_with sleep rests on two facts of vLLM-Omni: what it allocates inside of the pool's context, and that
    nothing of it is freed later, when the pool would keep it and every sleep would move it."""
    names = ["stable_diffusion_3", "flux"]  # with text encoders of transformers, and with vLLM-Omni's own
    models = {name: str(make_checkpoint(name, tmp_path / name)) for name in names}
    given = [word for name, model in models.items() for word in (model, tmp_path / f"{name}.json")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.recorded_pool", *given],
        env=engine_environment(models["flux"], (None,), 1),
        text=True,
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    for name, model in models.items():
        assert_pooled(json.loads((tmp_path / f"{name}.json").read_text()), model)


def assert_pooled(found, model):
    """That what was found in the pool is the transformer and the VAE of this model."""
    assert found["outside"] == []
    assert found["dropped"] <= 8000  # the scheduler's first timesteps and sigmas, a thousand each
    # the VAE and the transformer; tiny text encoders are a few hundred kilobytes
    family = family_class(model)
    blueprint = Blueprint(family, model, make_lora(family, rank=4, alpha=8), torch.float32)
    expected = 4 * blueprint.num_weights + blueprint.fp32_buffer_bytes + blueprint.vae_bytes
    assert expected <= found["pooled"] < expected + 0.1 * blueprint.text_encoder_bytes
