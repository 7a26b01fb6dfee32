"""Model families: everything that differs between Stable Diffusion 3, FLUX.1, Wan and the others, in one file each.

To add a family, add a file to this folder; no other file changes. The file is found by its name: a checkpoint of
diffusers' `FluxPipeline` is served by the class `Flux` in common/models/flux.py. The class has the pipeline's name
without "Pipeline", and the file has the class's name in lower case, with underscores wherever you like them. The class
inherits from `Family`, which says what each method takes and gives.
"""

import importlib
import itertools
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import RunError, refusing
from common.models.vae import pil_images, to_bfloat16
from common.process import say

import PIL.Image
import torch

if TYPE_CHECKING:  # importing these takes seconds
    from common.data import PromptSet

    import diffusers

ENCODERS = ("text_encoder", "image_encoder")  # how the names of a pipeline's encoders begin

Config = Mapping[str, Any]  # a config.json of diffusers
# The transformer's inputs that come from B prompts, by name: tensors (B, ...), masks included.
Conditioning = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
# Timesteps (T,) in (0, 1000] and sigmas (T + 1,) in [0, 1], both fp32 on the CPU, where a timestep is 1000 sigma; and
# the shape of one image's latents, (C, h, w), or of one video's, (C, f, h, w).
Schedule = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]
# B images, or B videos, each a list of frames.
Images = list[PIL.Image.Image] | list[list[PIL.Image.Image]]


class Family(ABC):
    """A loaded pipeline as the algorithms see it. A family reuses the pipeline's own parts and knows no algorithm.

    Outside of a family's file, latents of images are (B, C, h, w) and latents of videos are (B, C, f, h, w). A family
    whose transformer takes packed tokens packs and unpacks them in its own file.
    """

    # Ends of the names of the modules that a LoRA adapts without --lora_target_modules. Each family sets it.
    lora_target_modules: tuple[str, ...]
    longest_prompt = 512  # tokens, at most
    has_negative_prompt = True  # whether guidance moves away from one
    attention_kernels: tuple[str, ...] = ("native", "cudnn", "flash")  # that its transformer can take (--attention)
    is_split_by_engine = True  # whether vLLM-Omni splits its transformer over workers (--engine_tensor_parallel)
    old_guidance_offset = 0.0  # added to a scale above 1 of a record of 0.1.0 (common/resuming.py)

    # Exported by diffusers, with a `transformer` and a `save_lora_weights`.
    pipe: "diffusers.DiffusionPipeline"
    # Its `_no_split_modules` name FSDP's units, the blocks first. With full weights every policy has a transformer, and
    # this is the acting policy's: methods use self.transformer, never self.pipe.transformer.
    transformer: "diffusers.ModelMixin"
    # Where the model computes. Weights wait on the CPU: FSDP moves the transformer, and `on_device` moves the rest.
    device: torch.device

    # `add_policies` (common/weights/policy.py) sets these two.
    is_lora: bool  # whether a LoRA is trained, or full weights
    policies: "dict[str, diffusers.ModelMixin]"  # the transformer of each policy; with a LoRA, one for all policies
    frozen = frozenset({"reference"})  # policies that no checkpoint holds, as training never changes them

    # Images (B of them, as a list), height, width -> latents (B, ...), the reverse of `decode`. Offline DPO needs it
    # and refuses a family without it, such as a family of videos. Define it as a method.
    encode_images: Callable[[list[PIL.Image.Image], int, int], torch.Tensor] | None = None
    # A model that edits sets the least and the most sources of a prompt; all records of a run have equally many. It
    # defines two methods: S pictures of each of B prompts, height, width -> their conditioning, in names that begin
    # with source_, which both branches of guidance get; the latents' shape, S -> {name: shape} of one prompt's.
    num_sources = (0, 0)
    source_tokens = 0  # of each, beside max_sequence_length, in a text encoder that sees them
    encode_sources: Callable[[list[list[PIL.Image.Image]], int, int], Conditioning] | None = None
    source_shapes: Callable[[tuple[int, ...], int], Shapes] | None = None
    # () -> vLLM-Omni's pipeline class of this family with our hooks (common/engine/pipelines.py). Define it as a static
    # method that imports vLLM-Omni inside. A family without it samples with --rollout local only. The pipeline takes
    # the conditioning as prompt fields of the same names; those of the negative prompt begin with negative_.
    engine_pipeline: Callable[[], type] | None = None

    def __init__(self, pipe: "diffusers.DiffusionPipeline") -> None:
        self.pipe = pipe
        self.transformer = pipe.transformer
        self.unsharded: set[torch.nn.Parameter] = set()  # quantised weights, which FSDP leaves whole (--base_weights)
        self.negative: dict[tuple[str, int], Conditioning] = {}  # by prompt and length; encode_negative fills it

    def keep_embeddings(self, prompts: list[str], max_sequence_length: int, folder: str | None) -> None:
        """Say how many prompts are too long. Encode them into `folder`, unless it is None. A collective."""
        from common.models.long_prompts import count_long_prompts

        count_long_prompts(self.pipe, prompts, max_sequence_length)
        if folder is None:
            pin_encoders(self)  # which come to the device for each rollout
        else:
            from common.weights.prompt_cache import cache_prompts  # only --prompt_cache needs it

            cache_prompts(self, prompts, max_sequence_length, folder)

    @staticmethod
    @abstractmethod
    def check(model: str | Path, height: int, width: int, num_frames: int, guidance_scale: float = 1.0) -> None:
        """Refuse a size, a number of frames or a guidance scale that the model cannot take, before anything is loaded.

        Reads the configs of `model`, a folder or hub id, and no weights.

        Raises:
            ValueError: names the option and what it must be.
        """

    @staticmethod
    @abstractmethod
    def conditioning_shapes(transformer: Config, max_sequence_length: int) -> Shapes:
        """{name: shape} of one prompt's conditioning, from the transformer's config alone. tools/plan.py needs it."""

    @abstractmethod
    def encode_prompts(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """Conditioning of B prompts, in the text encoders' dtype.

        A prompt's conditioning depends on no other prompt; all prompts give the same length.
        """

    def encode(
        self, prompts: "PromptSet", max_sequence_length: int, image_size: tuple[int, int], num_frames: int = 1
    ) -> Conditioning:
        """Conditioning of B prompts and their pictures, brought to image_size. WanImageToVideo reads num_frames."""
        conditioning = self.encode_prompts(prompts.prompts, max_sequence_length)
        if self.encode_sources and "image" in prompts.metadata[0]:
            conditioning |= self.encode_sources(prompts.sources(), *image_size)
        return conditioning

    def encode_negative(
        self, negatives: "PromptSet", guidance_scale: float, max_sequence_length: int
    ) -> Conditioning | None:
        """Conditioning of U negative prompts (U, ...), or their one row (1, ...) where all are equal; None if guidance
        of that scale needs no second pass.

        The one row is encoded once: the text encoders would come to the device again for each rollout.
        """
        prompts = negatives.prompts
        if guidance_scale <= 1:
            return None
        if len(set(prompts)) > 1:
            return self.encode_prompts(prompts, max_sequence_length)
        key = (prompts[0], max_sequence_length)
        if key not in self.negative:  # the last one alone is kept: each prompt may have its own
            self.negative = {key: self.encode_prompts(prompts[:1], max_sequence_length)}
        return self.negative[key]

    @abstractmethod
    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        """The pipeline's own timesteps and sigmas at this size, and the shape of one image's or video's latents."""

    @abstractmethod
    def predict_velocity(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Conditioning,
        negative_conditioning: Conditioning | None = None,
        guidance_scale: float = 1.0,
    ) -> torch.Tensor:
        """The velocity v (B, ...) in fp32, at fp32 latents (B, ...), with the guidance that the model is made for.

        timestep: 1000 sigma, one number or (B,); it must not be rounded. negative_conditioning: of the negative
        prompts, (B, ...) each, or of the one for all B, (1, ...).
        """

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> Images:
        """Latents (B, ...) -> B PIL images, or B videos as lists of PIL frames."""

    def to_images(self, pixels: torch.Tensor) -> list:
        """Pixels in [-1, 1], (B, 3, H, W), or (B, 3, F, H, W) of videos -> what `decode` returns. For `decode`."""
        return pil_images(pixels)

    def frozen_tensors(self) -> list[torch.Tensor]:
        """The key of offline DPO's cache: all tensors that `encode_images` and `encode_prompts` use, in fixed order."""
        raise NotImplementedError(f"{type(self).__name__} has no frozen_tensors")


# ---- finding and loading ---------------------------------------------------------------------------------------------
def find_family(
    model: str | Path,
    height: int,
    width: int,
    num_frames: int,
    guidance_scale: float = 1.0,
    max_sequence_length: int = 1,
) -> type[Family]:
    """The family of a diffusers folder or hub id, after its `check` of size, frames and guidance. Loads no weights.

    Raises:
        ValueError: one line that names the option and what is wrong: a model that is missing or not supported, a
            config that cannot be read, or what `check` refuses.
    """
    from common.models.layout import check_layout, check_sizes

    family = family_class(model)
    with refusing(f"--model {model}", (OSError, KeyError)):
        check_layout(model)
        family.check(model, height, width, num_frames, guidance_scale)
    check_sizes(family, model, (height, width), max_sequence_length)
    return family


def family_class(model: str | Path) -> type[Family]:
    """The family of a diffusers folder or hub id, from its model_index.json alone.

    Raises:
        ValueError: names what is missing, or the families that are supported.
    """
    folder = Path(model)
    if folder.is_dir():
        index = folder / "model_index.json"
        if not index.is_file():
            raise ValueError(f"--model {model}: not a diffusers pipeline (no model_index.json)")
    else:
        from common.models.hub import download_index  # a folder needs none of it

        index = download_index(str(model))
    with refusing(f"--model {model}: model_index.json", Exception):
        pipeline = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    wanted = str(pipeline).lower().removesuffix("pipeline")
    files = sorted(Path(__file__).parent.glob("*.py"))
    found = [file.stem for file in files if file.stem.replace("_", "") == wanted]
    if not found:
        from common.models.hub import explain_pipeline

        raise ValueError(f"--model {model}: {pipeline} is not supported; {explain_pipeline(pipeline, files)}")
    module = importlib.import_module(f"common.models.{found[0]}")
    name = pipeline.removesuffix("Pipeline")
    if not hasattr(module, name):
        raise ValueError(f"--model {model}: common/models/{found[0]}.py has no class {name}")
    return getattr(module, name)


def load_model(
    family: type[Family],
    model: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    base_weights: str | None = None,
    vae_dtype: str = "float32",
) -> Family:
    """Load a pipeline, frozen and in eval mode, and give it to its family.

    Everything stays on the CPU. Later fully_shard moves the transformer to `device`, block by block, and `on_device`
    moves the rest. The VAE is fp32, or bf16 by vae_dtype. With base_weights the text encoders are int8.
    """
    from common.models.layout import load_pipeline

    import transformers  # slow, as diffusers is
    from diffusers.utils.logging import disable_progress_bar

    say(f"loading {model}")
    disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # whose output is a view; we do not write into it
    try:
        with refusing(f"--model {model}", Exception):  # whatever a library raises over a stranger's files
            pipe = load_pipeline(model, dtype)
    except ValueError as error:
        raise RunError(str(error)) from error
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    if vae_dtype == "bfloat16":
        to_bfloat16(pipe.vae)
    # For --train_with compile: SD3.5 has three kinds of block, each with three graphs (with gradient, without, and
    # recomputed by activation checkpointing). By default dynamo stops compiling after 8.
    torch._dynamo.config.recompile_limit = 64
    loaded = family(pipe)
    loaded.device = torch.device(device)
    if base_weights:
        from common.weights.base_weights import quantise_encoders  # needs torchao

        quantise_encoders(loaded)
    return loaded


@contextmanager
def on_device(model: Family, prefix: str) -> Iterator[None]:
    """Inside the block, components whose names begin with `prefix` are on model.device: "text_encoder", or "vae".

    Outside it they wait on the CPU, which leaves the GPU's memory to training. The GPU gets a copy, which is dropped at
    the end: the weights are frozen, so nothing needs to be copied back. T5-XXL's 10 GB take a second or more over PCIe,
    once per rollout and once per evaluation; --prompt_cache saves that, and pinned memory (pin_encoders) is faster. Put
    one block around many calls: inner blocks find the components on the device already. On the CPU nothing moves.
    """
    waiting = []  # (tensor, its data on the CPU)
    for name, component in model.pipe.components.items():
        if name.startswith(prefix) and component is not None and component.device != model.device:
            for tensor in itertools.chain(component.parameters(), component.buffers()):
                waiting.append((tensor, tensor.data))
                # from pinned memory the host need not wait: the pass that reads the copy is queued behind it
                tensor.data = tensor.data.to(model.device, non_blocking=tensor.data.is_pinned())
    yield
    for tensor, data in waiting:
        tensor.data = data


def pin_encoders(model: Family) -> None:
    """Let the text and image encoders wait in pinned memory, which a GPU copies faster and without the host waiting.

    Nothing changes on a CPU, or where the encoders of this host's ranks would take more than half of its memory: no
    other program can have pinned memory.
    """
    if model.device.type != "cuda":
        return
    tensors = []
    for name, component in model.pipe.components.items():
        if name.startswith(ENCODERS) and component is not None:
            tensors += [*component.parameters(), *component.buffers()]
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 2 * num_ranks * pinned_bytes(tensors) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        for tensor in tensors:
            tensor.data = tensor.data.pin_memory()


def pinned_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors take in pinned memory: torch rounds each up to a power of two."""
    return sum(1 << (tensor.nbytes - 1).bit_length() for tensor in tensors if tensor.nbytes)


# ---- what several families need --------------------------------------------------------------------------------------
def both_branches(
    forward: Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor],
    latents: torch.Tensor,
    timestep: torch.Tensor,
    conditioning: Conditioning,
    negative_conditioning: Conditioning | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts' velocity and the negative prompt's at the same latents, (B, ...) each, from one call of `forward`.

    One batch of 2B rows keeps a GPU busier than two batches of B, and FSDP gathers the weights once. The prompts' rows
    come first; then come the negative prompts', of which one row serves all B. Both see the same condition images.
    forward: (latents, timestep, conditioning) -> v.
    """
    if negative_conditioning is None:
        raise ValueError("guidance above 1 needs the negative prompt's conditioning")
    batch = len(latents)
    both = {}
    for name, tensor in conditioning.items():  # (B, ...)
        # (B, ...) or (1, ...)
        negative = tensor if name.startswith("source_") else negative_conditioning[name]
        if negative.shape[1:] != tensor.shape[1:]:
            raise ValueError(f"{name}: {tuple(tensor.shape)} of the prompts, {tuple(negative.shape)} of the negative")
        both[name] = torch.cat([tensor, negative.expand_as(tensor)])
    timestep = timestep.expand(batch).repeat(2)
    velocity, negative_velocity = forward(torch.cat([latents, latents]), timestep, both).chunk(2)
    return velocity, negative_velocity


def check_image(height: int, width: int, num_frames: int, unit: int) -> None:
    """Raise ValueError for a video, or for a side that is no multiple of `unit` pixels."""
    if num_frames > 1:
        raise ValueError(f"--num_frames {num_frames}: this model makes images, which have 1 frame")
    check_multiples(height, width, unit)


def check_multiples(height: int, width: int, unit: int) -> None:
    """Raise ValueError for a side that is no multiple of `unit`, the side of a token in pixels."""
    if height % unit or width % unit:
        raise ValueError(f"--image_size {height} {width}: must be multiples of {unit}")


def sigma_schedule(
    scheduler: "diffusers.SchedulerMixin", **options: float | list[float] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Timesteps (T,) in (0, 1000] and sigmas (T + 1,) from about 1 to 0 of a scheduler, fp32 on the CPU.

    The scheduler's sigmas must be flow matching's; FlowMatchEulerDiscreteScheduler is the usual one. `options` are
    arguments of its set_timesteps, as the family's pipeline passes them: num_inference_steps or sigmas, and mu.
    Timesteps are not rounded.
    """
    scheduler.set_timesteps(device="cpu", **options)
    return scheduler.timesteps.float().clone(), scheduler.sigmas.float().clone()


def hash_bits(tensor: torch.Tensor) -> str:
    """A fingerprint of a tensor's dtype and bits, for the keys of caches. torch.hash_tensor alone ignores the dtype."""
    return f"{tensor.dtype} {torch.hash_tensor(tensor).view(torch.int64).item()}"
