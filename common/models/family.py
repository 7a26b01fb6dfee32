"""Model families: everything that differs between Stable Diffusion 3, FLUX.1, Wan and the others, in one file each.

To add a family, add a file to this folder; no other file changes. The file is found by its name: a checkpoint of
diffusers' `FluxPipeline` is served by the class `Flux` in common/models/flux.py. The class has the pipeline's name
without "Pipeline", and the file has the class's name in lower case, with underscores wherever you like them. A class in
any other file is named by --family. It inherits from `Family`, which says what each method takes and gives. Five
methods are a family's own: `check`, `conditioning_shapes`, `encode_batch`, `schedule` and `forward`. So are
`lora_target_modules` and, to sample in vLLM-Omni, `engine_pipeline`. The others have a default.
"""

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.cpu import memory_bytes
from common.data import PromptSet
from common.images import as_images
from common.models.vae import decode_in_slices, encode_in_slices, quantize, to_unit_range
from common.rollout import Images

import PIL.Image
import torch

if TYPE_CHECKING:  # importing it takes seconds
    import diffusers

Config = Mapping[str, Any]  # a config.json of diffusers
# The transformer's inputs that come from B prompts, by name: tensors (B, ...), masks included.
Conditioning = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
# Timesteps (T,) in (0, 1000] and sigmas (T + 1,) in [0, 1], both fp32 on the CPU, where a timestep is 1000 sigma; and
# the shape of one image's latents, (C, h, w), or of one video's, (C, f, h, w).
Schedule = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]

ENCODERS = ("text_encoder", "image_encoder")  # how the names of a pipeline's encoders begin
PROMPTS_AT_ONCE = 32  # per call of the text encoders: thousands at once would not fit on a GPU


class Family(ABC):
    """A loaded pipeline as the algorithms see it. A family reuses the pipeline's own parts and knows no algorithm.

    Outside of a family's file, latents of images are (B, C, h, w) and latents of videos are (B, C, f, h, w). A family
    whose transformer takes packed tokens packs and unpacks them in its own file.
    """

    # Ends of the names of the modules that a LoRA adapts without --lora_target_modules. Each family sets it.
    lora_target_modules: tuple[str, ...]
    longest_prompt = 512  # tokens, at most
    has_negative_prompt = True  # whether guidance moves away from one
    makes_videos = False  # if it does, --num_frames counts, and offline DPO refuses it: it has no `encode_vae`
    attention_kernels: tuple[str, ...] = ("native", "cudnn", "flash")  # that its transformer can take (--attention)
    masks_attention = False  # if its transformer passes a mask, as prompts are padded: then "native" alone
    is_split_by_engine = True  # whether vLLM-Omni splits its transformer over workers (--engine_devices)
    # The least and the most source images of a prompt, for a model that edits: all records of a run have equally many.
    num_sources = (0, 0)
    # Sampling steps of the schedule that the levels of training noise follow (contrib/sft.py, contrib/dmd2.py): so many
    # that it is a smooth curve, where its shift does not depend on their number.
    level_steps = 1000
    source_tokens = 0  # tokens of a source image, beside max_sequence_length, in a text encoder that sees it

    # A pipeline of diffusers that has a `transformer` and `save_lora_weights`.
    pipe: "diffusers.DiffusionPipeline"
    # Its `_no_split_modules` name FSDP's units, the blocks first. With full weights every policy has a transformer, and
    # this is the acting policy's: methods use self.transformer, never self.pipe.transformer.
    transformer: "diffusers.ModelMixin"
    # Where the model computes; `load_model` sets it. Weights wait on the CPU: FSDP, `keep_frozen_whole` or `quantise`
    # moves the transformer, and `on_device` moves the rest.
    device: torch.device

    frozen_policies = frozenset({"reference"})  # policies that no checkpoint holds, as training never changes them

    # `add_policies` (common/weights/policy.py) sets these four.
    num_updates: int  # optimizer steps that the trained policy has taken, which `optimizer_step` of a script counts
    is_lora: bool  # whether a LoRA is trained, or full weights
    trained: frozenset[str]  # the policies that take a gradient where they act: `default`, and a script's others
    policies: "dict[str, diffusers.ModelMixin]"  # the transformer of each policy; with a LoRA, one for all policies

    # The scripts' `load_policies` sets these two options: of a model of two transformers, and of its optimizers.
    guidance_scale_2: float | None = None
    adam_bits = 32

    def __init__(self, pipe: "diffusers.DiffusionPipeline") -> None:
        self.pipe = pipe
        self.transformer = pipe.transformer
        self.unsharded: set[torch.nn.Parameter] = set()  # frozen weights that FSDP leaves out, as each rank has all
        self.negative_cache: dict[tuple[str, int], Conditioning] = {}  # by prompt and length, for encode_negative
        # with --prompt_cache its `read`: B prompts, length -> what encode_prompts gave; `prepare_prompts` sets it
        self.kept_conditioning: Callable[[list[str], int], Conditioning] | None = None

    # ---- what each family defines ----
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
        """{name: shape} of one prompt's conditioning, from the transformer's config alone, for plans.

        A plan's pass gets zeros of these shapes, ones for a name that ends with `mask`, the number of tokens for ().
        """

    @abstractmethod
    def encode_batch(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """Conditioning of up to PROMPTS_AT_ONCE prompts, in the text encoders' dtype. They are on the device already.

        A prompt's conditioning depends on no other prompt; all prompts give the same length.
        """

    @abstractmethod
    def schedule(self, num_inference_steps: int, height: int, width: int, num_frames: int = 1) -> Schedule:
        """The pipeline's own timesteps and sigmas at this size, and the shape of one image's or video's latents."""

    @abstractmethod
    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """The velocity v (B, ...) in fp32, from one pass of the transformer at fp32 latents (B, ...), unguided.

        timestep: 1000 sigma, (B,), on the latents' device; it must not be rounded.
        """

    # ---- prompts: scripts call `encode` and `encode_negative`, which end in a family's `encode_batch` ----
    @torch.no_grad()
    def encode_prompts(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """Conditioning of B prompts, in the text encoders' dtype, by `encode_batch`."""
        batches = []
        with on_device(self, "text_encoder"):
            for i in range(0, len(prompts), PROMPTS_AT_ONCE):
                batches.append(self.encode_batch(prompts[i : i + PROMPTS_AT_ONCE], max_sequence_length))
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def encode_through_cache(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """encode_prompts, or what --prompt_cache has of it."""
        if self.kept_conditioning is None:
            return self.encode_prompts(prompts, max_sequence_length)
        kept = self.kept_conditioning(prompts, max_sequence_length)
        return {field: tensor.to(self.device) for field, tensor in kept.items()}

    def encode(
        self, prompts: PromptSet, max_sequence_length: int, image_size: tuple[int, int], num_frames: int = 1
    ) -> Conditioning:
        """Conditioning (U, ...) of U prompts and of their source images, brought to image_size.

        WanImageToVideo reads num_frames.
        """
        conditioning = self.encode_through_cache(prompts.prompts, max_sequence_length)
        if "image" in prompts.metadata[0]:  # then all of them have source images
            conditioning |= self.encode_sources(prompts.sources(), *image_size)
        return conditioning

    def encode_negative(
        self, negatives: PromptSet, guidance_scale: float, max_sequence_length: int
    ) -> Conditioning | None:
        """Conditioning of U negative prompts (U, ...), or their one row (1, ...) where all are equal; None if guidance
        of that scale needs no second pass, or the model takes no negative prompt.

        The one row is encoded once: the text encoders would come to the device again for each rollout.
        """
        prompts = negatives.prompts
        if guidance_scale <= 1 or not self.has_negative_prompt:
            return None
        if len(set(prompts)) > 1:
            return self.encode_negative_prompts(prompts, max_sequence_length)
        key = (prompts[0], max_sequence_length)
        if key not in self.negative_cache:  # only the last is kept: where records have theirs, they change
            self.negative_cache = {key: self.encode_negative_prompts(prompts[:1], max_sequence_length)}
        return self.negative_cache[key]

    def encode_negative_prompts(self, prompts: list[str], max_sequence_length: int) -> Conditioning:
        """As encode_through_cache. A model that encodes negative prompts otherwise overrides it, without the cache."""
        return self.encode_through_cache(prompts, max_sequence_length)

    # ---- the source images of a model that edits, which sets num_sources ----
    def encode_sources(self, sources: list[list[PIL.Image.Image]], height: int, width: int) -> Conditioning:
        """S source images of each of U prompts, at the image's size -> {"source_latents": (U, S, C, h, w)}, in fp32.

        Both branches of guidance get what has a name that begins with source_.
        """
        latents = self.encode_images([image for of_prompt in sources for image in of_prompt], height, width)
        return {"source_latents": latents.unflatten(0, (len(sources), -1))}

    def source_shapes(self, latent_shape: tuple[int, ...], count: int) -> Shapes:
        """{name: shape} of what encode_sources gives of one prompt with `count` source images, whose latents have this
        shape."""
        return {"source_latents": (count, *latent_shape)}

    # ---- the tokens that ranks of a sequence group divide, for a transformer with diffusers' `_cp_plan` ----
    def sequence_lengths(
        self, latent_shape: tuple[int, ...], max_sequence_length: int, num_sources: int
    ) -> dict[str, int]:
        """{option: tokens that it gives} of each sequence that --ranks_per_image divides; {}: it divides none.

        latent_shape: of one image or video. num_sources: source images of a prompt.
        """
        return {}

    # ---- the velocity, with guidance ----
    def predict_velocity(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Conditioning,
        negative_conditioning: Conditioning | None = None,
        guidance_scale: float = 1.0,
    ) -> torch.Tensor:
        """The velocity v (B, ...) in fp32, at fp32 latents (B, ...), with the guidance that the model is made for.

        A scale above 1 takes the negative prompts' velocity as well. The gradient goes through both.

        timestep: 1000 sigma, one number or (B,). negative_conditioning: the conditioning of the negative prompts,
        tensors (B, ...), or (1, ...) of one negative prompt for all B.
        """
        timestep = timestep.to(latents.device).expand(len(latents))
        if guidance_scale <= 1:
            return self.forward(latents, timestep, conditioning)
        if negative_conditioning is None:
            raise ValueError("guidance above 1 needs the negative prompt's conditioning")
        # one batch of 2B rows, the prompts' first, keeps a GPU busier than two of B, and FSDP gathers the weights once
        both = {}
        for name, tensor in conditioning.items():  # (B, ...)
            # (B, ...) or (1, ...); both branches see the same source images
            other = tensor if name.startswith("source_") else negative_conditioning[name]
            if other.shape[1:] != tensor.shape[1:]:
                shapes = f"{tuple(tensor.shape)} of the prompts, {tuple(other.shape)} of the negative"
                raise ValueError(f"{name}: {shapes}")
            both[name] = torch.cat([tensor, other.expand_as(tensor)])
        velocities = self.forward(torch.cat([latents, latents]), timestep.repeat(2), both)
        velocity, negative_velocity = velocities.chunk(2)
        return self.guide(velocity, negative_velocity, self.guidance_at(timestep, guidance_scale))

    def guidance_at(self, timestep: torch.Tensor, guidance_scale: float) -> float | torch.Tensor:
        """The scale at timesteps (B,), which is one, or broadcasts with velocities (B, ...) where they differ."""
        return guidance_scale

    def guide(
        self, velocity: torch.Tensor, negative_velocity: torch.Tensor, guidance_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """The guided velocity v_neg + g (v_pos - v_neg), (B, ...), at scale g above 1.

        A pipeline that counts guidance from 0 has v_pos + s (v_pos - v_neg), which is the same for s = g - 1.
        """
        return negative_velocity + guidance_scale * (velocity - negative_velocity)

    # ---- images ----
    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> Images:
        """Latents (B, ...) -> B PIL images, or B videos as lists of PIL frames, as the pipeline decodes them."""
        with on_device(self, "vae"):
            return self.to_images(self.pixels(latents))

    def pixels(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, ...) -> pixels (B, 3, H, W), or (B, 3, F, H, W), in [0, 1], which `decode` rounds to bytes.

        The gradient goes through. The VAE must be on the device, until the backward pass is done: both passes belong in
        one block `with on_device(model, "vae")`.
        """
        return to_unit_range(self.decode_vae(latents))

    @torch.no_grad()
    def encode_images(self, images: list[PIL.Image.Image], height: int, width: int) -> torch.Tensor:
        """B PIL images -> latents (B, ...), the mode of the VAE's posterior, the reverse of `decode`.

        Images of another size are resized.
        """
        with on_device(self, "vae"):
            return self.encode_vae(images, height, width)

    def to_images(self, pixels: torch.Tensor) -> list:
        """Pixels in [0, 1], (B, 3, H, W), or (B, 3, F, H, W) of videos -> what `decode` returns. For `decode`."""
        return as_images(quantize(pixels).cpu().numpy())

    # A family whose VAE is not diffusers' AutoencoderKL defines these two.
    def decode_vae(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, ...) -> pixels (B, 3, ...) in about [-1, 1]. For `pixels`: the VAE is on the device already."""
        vae = self.pipe.vae
        latents = latents.to(vae.device) / vae.config.scaling_factor + (vae.config.shift_factor or 0)
        return decode_in_slices(vae, latents, scale=self.pipe.vae_scale_factor**2)

    def encode_vae(self, images: list[PIL.Image.Image], height: int, width: int) -> torch.Tensor:
        """B PIL images -> latents (B, ...). For `encode_images`: the VAE is on the device already."""
        vae = self.pipe.vae
        pixels = self.pipe.image_processor.preprocess(images, height, width)
        latents = encode_in_slices(vae, pixels.to(vae.device))
        return (latents - (vae.config.shift_factor or 0)) * vae.config.scaling_factor

    def picture_tensors(self) -> list[torch.Tensor]:
        """All tensors that encode pictures, in fixed order, for the key of DPO's cache: the VAE's, its numbers among
        them, and an image encoder's."""
        config = self.pipe.vae.config
        scale_and_shift = [config.get("scaling_factor"), config.get("shift_factor")]
        scale_and_shift += [*(config.get("latents_mean") or ()), *(config.get("latents_std") or ())]
        numbers = [number for number in scale_and_shift if number is not None]
        tensors = [torch.tensor(numbers)] if numbers else []
        for name in ("vae", "image_encoder"):
            if self.pipe.components.get(name) is not None:
                tensors += self.pipe.components[name].state_dict().values()
        return tensors

    # ---- the engine ----
    @staticmethod
    def engine_pipeline(mixin: type) -> type:
        """vLLM-Omni's pipeline class of this family with our hooks. For the engine's process: it imports vLLM-Omni.

        mixin: SDERolloutMixin of common/engine/pipelines.py, the first base of the class; it says what the class may
        override. The pipeline takes the conditioning as prompt fields of the same names; those of the negative prompt
        begin with negative_. A family without this method samples with --rollout local only.
        """
        raise NotImplementedError

    @classmethod
    def has_engine_pipeline(cls, model: str | Path) -> bool:
        """Whether `engine_pipeline` is defined, and serves this model. Unlike that method it imports no vLLM-Omni."""
        return cls.engine_pipeline is not Family.engine_pipeline


@contextmanager
def on_device(model: Family, prefix: str) -> Iterator[None]:
    """Inside the block, components whose names begin with `prefix`, such as "text_encoder", are on model.device.

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

    Nothing changes on a CPU, or where the encoders of this host's ranks would take more than half of its memory, or of
    the job's limit: no other program can have pinned memory.
    """
    if model.device.type != "cuda":
        return
    tensors = []
    for name, component in model.pipe.components.items():
        if name.startswith(ENCODERS) and component is not None:
            tensors += [*component.parameters(), *component.buffers()]
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 2 * num_ranks * pinned_bytes(tensors) <= memory_bytes():
        for tensor in tensors:
            tensor.data = tensor.data.pin_memory()


def pinned_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors take in pinned memory: torch rounds each up to a power of two."""
    return sum(1 << (tensor.nbytes - 1).bit_length() for tensor in tensors if tensor.nbytes)
