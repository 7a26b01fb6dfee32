"""Model families: what differs between Stable Diffusion 3 and the next one, a file each, found by its name.

`FluxPipeline` of diffusers is looked for in common/models/flux.py: a file's name without its underscores is the
pipeline's class name in lower case without "pipeline". It holds one class, `Flux`, of this protocol; nothing outside
the file knows the family.
"""

import importlib
import itertools
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from common.refusals import refusing
from common.stops import say

import torch


class Family(Protocol):
    """What a family gives. Latents are (B, C, h, w) everywhere outside its file, of videos (B, C, f, h, w): one whose
    transformer takes packed tokens packs them inside. `conditioning` is a dict of tensors, (B, ...) each: what the
    transformer is told about B prompts, masks included. A family reuses the diffusers pipeline's own parts, and knows
    no algorithm."""

    lora_target_modules: tuple[str, ...]  # of the class: ends of the names of the attention projections
    # one that diffusers exports, with a `transformer` and `save_lora_weights`
    pipe: "diffusers.DiffusionPipeline"  # noqa: F821  (imported late: slow)
    # a diffusers ModelMixin with `_no_split_modules`, FSDP's units, its blocks first; with full weights another
    # policy's takes its place, so that a method always says self.transformer, never self.pipe.transformer
    transformer: torch.nn.Module
    device: torch.device  # set by load_model, which leaves everything on the CPU: see on_device; FSDP moves the rest

    def __init__(self, pipe): ...

    @staticmethod
    def check(model, height, width, num_frames, guidance_scale=1.0):
        """Raises ValueError naming the option where the family cannot make such an image or video, or takes no
        guidance; by the configs of `model`, a folder or hub id, alone."""

    @staticmethod
    def conditioning_shapes(transformer, max_sequence_length):
        """{name: shape} of the conditioning of one prompt, by the transformer's config alone, for --plan."""

    def encode_prompts(self, prompts, max_sequence_length):
        """B prompts -> conditioning, in the text encoders' dtype; of one length, whatever the other prompts are."""

    def encode_negative(self, guidance_scale, max_sequence_length):
        """Conditioning of the empty prompt, one row; None where guidance of that scale takes no second pass."""

    def schedule(self, num_inference_steps, height, width, num_frames=1):
        """Timesteps (T,) fp32, 1000 sigma, in (0, 1000]; sigmas (T + 1,); and the latents' (C, h, w), or (C, f, h, w)
        of a video."""

    def predict_velocity(self, latents, timestep, conditioning, negative_conditioning=None, guidance_scale=1.0):
        """v (B, ...) in fp32 at fp32 latents (B, ...) and timesteps 1000 sigma, one or (B,), guided as the
        family is guided.

        negative_conditioning has one row, for all.
        """

    def decode(self, latents):
        """Latents (B, ...) -> list of B PIL images, or of B videos: lists of PIL frames."""

    def encode_images(self, images, height, width):
        """List of B PIL images -> latents (B, ...): the reverse of decode, for offline DPO.

        None in place of the method: the family makes videos, and offline DPO refuses it.
        """

    def frozen_tensors(self):
        """All tensors that latents and conditioning depend on, in a fixed order: they key offline DPO's cache.

        Not there where encode_images is not.
        """

    @staticmethod
    def engine_pipeline():
        """vLLM-Omni's pipeline of the family with our hooks (common/engine/pipelines.py), built where vLLM is there.

        None in place of the method: there are no hooks, and the family is for --rollout local.

        The conditioning's names are that pipeline's prompt fields, with negative_ before those of the negative prompt.
        """


@contextmanager
def on_device(model, prefix):
    """Within the block those components of the pipeline whose names begin with `prefix` are on model.device: its text
    encoders ("text_encoder"), or its VAE ("vae").

    Else they wait on the CPU, so that training has the memory. What comes is a copy, which is let go at the end: the
    weights are frozen. T5-XXL's 10 GB take a second or more over PCIe, once a rollout and once an evaluation;
    --prompt_cache saves that. Where calls are many, a block around them all brings a component once: an inner block
    finds it there. On the CPU nothing moves.
    """
    waiting = []  # (tensor, its data on the CPU)
    for name, component in model.pipe.components.items():
        if name.startswith(prefix) and component is not None and component.device != model.device:
            for tensor in itertools.chain(component.parameters(), component.buffers()):
                waiting.append((tensor, tensor.data))
                tensor.data = tensor.data.to(model.device)
    yield
    for tensor, data in waiting:
        tensor.data = data
    if waiting and model.device.type == "cuda":
        torch.cuda.empty_cache()  # for the engine, which is another process


def both_branches(forward, latents, timestep, conditioning, negative_conditioning):
    """v of the prompts and v of the negative prompt at the same latents, (B, ...) each, from one call of `forward`.

    One batch of 2B rows keeps a GPU busier than two of B, and FSDP gathers the weights once. Its rows are the prompts'
    first, then the negative prompt's, whose one row is repeated. forward: (latents, timestep, conditioning) -> v.
    """
    batch = len(latents)
    both = {}
    for name, tensor in conditioning.items():  # (B, ...)
        negative = negative_conditioning[name]  # (1, ...)
        if negative.shape[1:] != tensor.shape[1:]:
            raise ValueError(f"{name}: {tuple(tensor.shape)} of the prompts, {tuple(negative.shape)} of the negative")
        both[name] = torch.cat([tensor, negative.expand_as(tensor)])
    timestep = timestep.expand(batch).repeat(2)
    velocity = forward(torch.cat([latents, latents]), timestep, both)
    return velocity.chunk(2)


def compile_block(block):
    """torch.compile of a transformer's block in place, with the log-probs of its graph without gradient equal to those
    of its graph with it: the old ones come from the former, the new ones from the latter.

    By default they round at other places in bf16 (a ratio of 1 +- 6e-4 was seen in place of 1). Both now round between
    operations, as without compilation.
    """
    from torch._inductor import config as inductor_config  # slow

    inductor_config.emulate_precision_casts = True
    # SD3.5 has three kinds of block, each compiled anew with gradient, without and in checkpointing: dynamo stops at 8
    torch._dynamo.config.recompile_limit = 64
    block.compile()


def find_family(model):
    """Family class of a diffusers folder or hub id, from its model_index.json, before anything is loaded.

    Raises:
        ValueError: naming what is missing, or the pipelines that are supported.
    """
    folder = Path(model)
    if folder.is_dir():
        index = folder / "model_index.json"
        if not index.is_file():
            raise ValueError(f"--model {model}: not a diffusers pipeline (no model_index.json)")
    else:
        from huggingface_hub import hf_hub_download  # slow

        with refusing(f"--model {model}: no folder, and no model that can be fetched"):
            index = Path(hf_hub_download(model, "model_index.json"))
    with refusing(f"--model {model}: model_index.json", Exception):
        pipeline = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    wanted = str(pipeline).lower().removesuffix("pipeline")
    files = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")
    found = [stem for stem in files if stem.replace("_", "") == wanted]
    if not found:
        raise ValueError(f"--model {model}: {pipeline} is not supported; supported: {', '.join(files)}")
    module = importlib.import_module(f"common.models.{found[0]}")
    name = pipeline.removesuffix("Pipeline")
    if not hasattr(module, name):
        raise ValueError(f"--model {model}: common/models/{found[0]}.py has no class {name}")
    return getattr(module, name)


def check_model(family, model, height, width, num_frames, guidance_scale=1.0):
    """The family's `check`, whose configs may be missing or broken: ValueError in one line."""
    with refusing(f"--model {model}", (OSError, KeyError)):
        family.check(model, height, width, num_frames, guidance_scale)


def load_model(family, model, dtype, device):
    """The family's object around its frozen pipeline, in eval mode, on the CPU, with `device` as an attribute.

    fully_shard moves the transformer to it, block by block, and `on_device` the rest. The VAE stays fp32: its rounding
    would show.
    """
    import transformers  # slow, as diffusers is
    from diffusers import DiffusionPipeline
    from diffusers.utils.logging import disable_progress_bar

    say(f"loading {model}")
    disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipe = DiffusionPipeline.from_pretrained(model, dtype={"default": dtype, "vae": torch.float32})
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    model = family(pipe)
    model.device = torch.device(device)
    return model
