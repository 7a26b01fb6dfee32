"""A model of 28 numbers, and a reward of an image and its prompt, for runs that a test computes by hand.

    --family tests/algorithms/toy_family.py:Toy --reward tests/algorithms/toy_family.py:closeness --image_size 2 2

An image has 2 x 2 latents x, and a prompt is three numbers: c, which is two, and whether some of its images fail.
The velocity is W (x, c, s), linear in all of them. --lora_rank 1 trains W + alpha B A. Latents are in the pixels to
4e-6 (benchmarks/exam_model.py).
"""

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path

from benchmarks.exam_model import to_images, to_latents
from common.models.family import Conditioning, Family, Schedule, Shapes

import torch
from diffusers import AutoencoderKL, ConfigMixin, ModelMixin, SD3Transformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from PIL import Image
from torch import Tensor

EMBEDDED = Path(__file__).parents[2] / "assets" / "embedded"
NUM_LATENTS, NUM_INPUTS = 4, 7
START = torch.tensor([[math.sin(1 + 3 * i + 5 * j) / 2 for j in range(NUM_INPUTS)] for i in range(NUM_LATENTS)])


class Block(torch.nn.Module):
    """v = W (x, c, s)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(NUM_INPUTS, NUM_LATENTS, bias=False)
        self.proj.weight.data = START.clone()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.proj(inputs)


class Transformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """One block, a unit of FSDP."""

    _no_split_modules = ("Block",)

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.block(inputs)


class Toy(Family):
    lora_target_modules = ("proj",)

    def __init__(self, pipe: object) -> None:
        super().__init__(pipe)
        self.transformer = self.pipe.transformer = Transformer().requires_grad_(False)

    @staticmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        if (height, width, num_frames) != (2, 2, 1):
            raise ValueError("--image_size: must be 2 2, of one frame")

    @staticmethod
    def conditioning_shapes(transformer: object, max_sequence_length: int) -> Shapes:
        return {"c": (2,)}

    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        return {"c": torch.tensor([numbers_of(prompt)[:2] for prompt in prompts])}

    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        """Uneven: 1, then squares, so that no two steps are equally long."""
        sigmas = torch.linspace(1, 0, num_inference_steps + 1) ** 1.5
        return 1000 * sigmas[:-1], sigmas, (1, 2, 2)

    def forward(self, latents: Tensor, timestep: Tensor, conditioning: Conditioning) -> Tensor:
        inputs = [latents.flatten(1), conditioning["c"], timestep[:, None] / 1000]
        return self.transformer(torch.cat(inputs, 1)).view_as(latents)

    def decode(self, latents: Tensor) -> list[Image.Image]:
        return to_images(latents)

    def encode_images(self, images: list[Image.Image], height: int, width: int) -> Tensor:
        return to_latents(images)

    def picture_tensors(self) -> list[Tensor]:
        return [torch.zeros(1)]


@functools.cache
def toy_model() -> Path:
    """A --model for Toy, which takes nothing of it but its class: a pipeline of SD3 whose transformer and VAE have a
    few weights, without text encoders. It loads in a fifth of the time that the embedded model takes."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(EMBEDDED / "scheduler", folder / "scheduler")
    sizes = ("attention_head_dim", "in_channels", "out_channels", "joint_attention_dim", "caption_projection_dim")
    sizes += ("pooled_projection_dim", "pos_embed_max_size", "sample_size")
    one = {"num_layers": 1, "num_attention_heads": 1}
    SD3Transformer2DModel(**one, **dict.fromkeys(sizes, 4)).save_pretrained(folder / "transformer")
    vae = {"block_out_channels": [4], "norm_num_groups": 4, "mid_block_add_attention": False}
    AutoencoderKL(**vae).save_pretrained(folder / "vae")
    index = json.loads((EMBEDDED / "model_index.json").read_text())
    for name, part in index.items():
        is_kept = name in ("scheduler", "transformer", "vae") or not isinstance(part, list)
        index[name] = part if is_kept else [None, None]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def numbers_of(prompt: str) -> list[float]:
    """The numbers of a prompt; of the empty negative prompt zeros."""
    return [float(word) for word in prompt.split()] or [0.0, 0.0, 0.0]


def closeness_of(x: list[float], prompt: str) -> float | None:
    """c_0 x_0 + c_1 x_1 - x_2^2 / 4; None where the prompt's third number is 1 and x_3 > 1."""
    c_0, c_1, may_fail = numbers_of(prompt)
    has_failed = may_fail == 1 and x[3] > 1
    return None if has_failed else c_0 * x[0] + c_1 * x[1] - x[2] ** 2 / 4


def closeness(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float | Exception]:
    """The reward."""
    found = zip(to_latents(images).flatten(1).double().tolist(), prompts, strict=True)
    scores = [closeness_of(x, prompt) for x, prompt in found]
    return [ValueError("failed") if score is None else score for score in scores]


def farness(images: list, prompts: list[str], metadata: list[dict]) -> list[float | Exception]:
    """What an evaluation alone asks for: 1 - closeness."""
    scores = closeness(images, prompts, metadata)
    return [score if isinstance(score, Exception) else 1.0 - float(score) for score in scores]


def closeness_or_0(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float | Exception]:
    """0 for every image of a prompt whose third number is 2, otherwise closeness."""
    scores = zip(closeness(images, prompts, metadata), prompts, strict=True)
    return [0.0 if numbers_of(prompt)[2] == 2 else score for score, prompt in scores]
