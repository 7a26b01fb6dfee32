"""A model without its weights: the size of its parts, and the bytes and FLOPs of a pass.

Only the model's configs are read. Its modules are built on torch's meta device. Then the family's own code runs with
fake tensors, which have shapes but no memory: the cost of a pass is counted, not guessed. tools/plan.py uses this.
"""

import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import RunError
from common.models import ENCODERS, Conditioning, Family, pinned_bytes, pipeline_without_weights
from common.weights import LoRA, add_policies, linear_layers

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

if TYPE_CHECKING:  # importing these takes seconds
    import diffusers


# ---- counting --------------------------------------------------------------------------------------------------------
def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of attention: two matrix products."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward_flops(grad_out: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the four products that the gradient needs. A flash kernel's recomputed product is not counted."""
    return 2 * attention_flops(*args)


# With the attention kernel that torch chooses for fake CPU tensors. It keeps as much for the backward pass as a GPU's.
FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}

# Layers whose weights an engine divides among its workers, by diffusers' names. Each worker holds all other layers.
SPLIT = re.compile(r"\.(attn\d?|ff|ff_context|ffn|img_mlp|txt_mlp)\.")


class Meter(TorchDispatchMode):
    """Counts the FLOPs of matrix products, and the bytes of new tensors that are still alive, now and at the peak."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        """known: tensors that exist already and do not count."""
        super().__init__()
        self.flops = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self.seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:  # an operator may return anything
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in FLOPS:
            self.flops += FLOPS[func._overloadpacket](*args, **kwargs, out_val=out)
        storages = [tensor.untyped_storage() for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
        for storage in storages:
            if storage not in self.seen:
                self.seen.add(storage)
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._drop, storage.nbytes())
        return out

    def _drop(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


class FusedRMSNorm(torch.autograd.Function):
    """An RMS norm as CUDA's kernel has it, for passes of fake tensors.

    It is an operator forward that reads x (..., C) and writes as much, and an operator backward that reads x and the
    gradient. It keeps x and a number in fp32 for each row. The values are wrong.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        row = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, row)  # type: ignore[arg-type]  # None as well
        return x * (1 if weight is None else weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * x, None if weight is None else torch.empty_like(weight)


@contextmanager
def fused_rms_norms() -> Iterator[None]:
    """Put FusedRMSNorm where a GPU has that kernel. A CPU computes `F.rms_norm` in fp32, and keeps what it made."""
    native = F.rms_norm

    def rms_norm(
        x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        if len(shape) > 1 or (weight is not None and weight.dtype != x.dtype):
            return native(x, list(shape), weight, eps)
        y: torch.Tensor = FusedRMSNorm.apply(x, weight)
        return y

    # not by a TorchFunctionMode: it is off within `backward`, where activation checkpointing computes again
    F.rms_norm = rms_norm  # type: ignore[assignment]
    try:
        yield
    finally:
        F.rms_norm = native


class Cost(NamedTuple):
    """The cost of one pass."""

    flops: int
    peak_bytes: int  # at most so many bytes are held at once, besides parameters and their gradients


# ---- a model from its configs ----------------------------------------------------------------------------------------
class Counts(torch.Tensor):
    """Real whole numbers among fake tensors, for a family that reads them, as Z-Image reads a prompt's token count."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:  # an operator may return anything
        with unset_fake_temporarily():
            return super().__torch_function__(func, types, args, kwargs)


class Blueprint:
    """A model with configs and without weights: the size of its parts, and the cost of its passes."""

    def __init__(
        self,
        family: type[Family],
        source: str,
        lora: LoRA | None,
        dtype: torch.dtype,
        num_sources: int | None = None,
        vae_dtype: torch.dtype = torch.float32,
        fused_norms: bool = True,
    ) -> None:
        """source: a folder or hub id; lora: what make_lora returns; dtype: of the forward pass; num_sources: condition
        images of a prompt, by default the least that the family takes; fused_norms: an RMS norm is one kernel, as on a
        GPU."""
        self.dtype = dtype
        self.fused_norms = fused_norms
        self.num_sources = family.num_sources[0] if num_sources is None else num_sources
        self.pipe, encoders = build_pipeline(source)
        text_encoders = [encoder for name, encoder in encoders.items() if name.startswith("text_encoder")]
        transformer = self.pipe.transformer
        # a model of videos from pictures has an image encoder, which is used beside them
        self.text_encoder_bytes = sum(count(encoder) for encoder in encoders.values()) * dtype.itemsize
        self.pinned_encoder_bytes = 0  # as they wait for a GPU
        for encoder in encoders.values():
            encoder.to(dtype)
            self.pinned_encoder_bytes += pinned_bytes([*encoder.parameters(), *encoder.buffers()])
        self.num_encoder_linear = sum(num_linear(encoder) for encoder in text_encoders)
        self.vae_bytes = vae_dtype.itemsize * count(self.pipe.vae)
        self.num_weights = count(transformer)  # of the model itself, without a LoRA
        self.has_two_transformers = hasattr(transformer, "transformer_2")
        self.num_linear = num_linear(transformer)
        # the share of num_weights that an engine on several --engine_devices divides
        self.num_split = sum(p.numel() for name, p in transformer.named_parameters() if SPLIT.search(name))
        self.fp32_buffer_bytes = sum(buffer.nbytes for buffer in transformer.buffers())
        # rounded to dtype, as from_pretrained rounds them
        self.buffer_bytes = sum(b.numel() * min(b.itemsize, dtype.itemsize) for b in transformer.buffers())

        self.model = family(self.pipe)
        self.model.device = torch.device("cpu")
        self.model.to_images = list  # type: ignore[method-assign, assignment]  # fake pixels make no PIL images
        with torch.device("meta"):
            # a LoRA's tensors count by their shapes alone, which the config says
            new = None if lora is None else lora._replace(tensors=None, base_weights=None)
            add_policies(self.model, new, ["default"], seed=0)
        self.is_lora = self.model.is_lora
        transformer = self.model.transformer
        self.num_trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
        blocks = [m for m in transformer.modules() if type(m).__name__ in transformer._no_split_modules]
        sizes = [count(block) for block in blocks]
        self.largest_block = max(sizes)
        self.outside_blocks = count(transformer) - sum(sizes)

        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        fake(transformer, self.mode, dtype)  # the dtype in which FSDP gathers weights
        fake(self.pipe.vae, self.mode, vae_dtype)

    def latent_shape(self, image_size: tuple[int, int], num_frames: int) -> tuple[int, ...]:
        """(C, h, w) of an image's latents, or (C, f, h, w) of a video's."""
        height, width = image_size
        return self.model.schedule(2, height, width, num_frames)[2]

    def conditioning_shapes(
        self, length: int, image_size: tuple[int, int], num_frames: int = 1
    ) -> dict[str, tuple[int, ...]]:
        """{name: shape} of the conditioning of one prompt of `length` tokens, with its condition images if any."""
        length += self.num_sources * self.model.source_tokens
        shapes = self.model.conditioning_shapes(self.pipe.transformer.config, length)
        if self.num_sources:
            shapes |= self.model.source_shapes(self.latent_shape(image_size, num_frames), self.num_sources)
        return shapes

    def conditioning(self, length: int, image_size: tuple[int, int], num_frames: int) -> Conditioning:
        """The conditioning of one prompt of `length` tokens: zeros in the model's dtype, with nothing masked."""
        conditioning: Conditioning = {}
        for name, shape in self.conditioning_shapes(length, image_size, num_frames).items():
            if shape == ():
                with unset_fake_temporarily():
                    conditioning[name] = torch.tensor([length]).as_subclass(Counts)
            elif name.endswith("mask"):
                conditioning[name] = torch.ones(1, *shape, dtype=torch.long)
            else:
                conditioning[name] = torch.zeros(1, *shape, dtype=self.dtype)
        return conditioning

    def conditioning_bytes(self, length: int, image_size: tuple[int, int], num_frames: int = 1) -> int:
        """Bytes of one prompt's conditioning; latents of pictures are fp32."""
        shapes = self.conditioning_shapes(length, image_size, num_frames)
        itemsizes = {name: 4 if name == "source_latents" else self.dtype.itemsize for name in shapes}
        return sum(torch.Size(shape).numel() * itemsizes[name] for name, shape in shapes.items())

    def velocity(
        self,
        image_size: tuple[int, int],
        num_frames: int,
        length: int,
        guidance_scale: float,
        *,
        train: bool = False,
        checkpointing: bool = False,
    ) -> Cost:
        """Cost of predict_velocity for one image.

        train: with the backward pass; checkpointing: with activation checkpointing. Of many blocks in a row that are
        alike up to four are counted, and the others cost as much as the third and the fourth.

        Raises:
            RunError: a user's own family, or its transformer, reads numbers of a tensor.
        """
        model = self.model
        timesteps, _, shape = model.schedule(2, *image_size, num_frames)
        tensors = [*model.transformer.parameters(), *model.transformer.buffers()]

        def count_pass() -> Cost:
            norms = fused_rms_norms() if self.fused_norms else nullcontext()
            with self.mode, norms, Meter(tensors) as meter, torch.set_grad_enabled(train):
                conditioning = self.conditioning(length, image_size, num_frames)
                negative = self.conditioning(length, image_size, num_frames) if guidance_scale > 1 else None
                latents = torch.zeros(1, *shape)
                velocity = model.predict_velocity(latents, timesteps[0], conditioning, negative, guidance_scale)
                if train:
                    velocity.square().mean().backward()
            return Cost(meter.flops, meter.peak_bytes)

        if checkpointing:
            model.transformer.enable_gradient_checkpointing()
        try:
            cost = count_alike(model.transformer, count_pass, train)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            told = "its pass reads numbers of a tensor, so it cannot be planned from shapes"
            raise RunError(f"{type(model).__name__}: {told}") from error
        finally:
            model.transformer.disable_gradient_checkpointing()
        return cost

    def decoding(self, batch: int, image_size: tuple[int, int], num_frames: int, *, train: bool = False) -> Cost:
        """Cost of decoding the latents of `batch` images in one call; train: with the backward pass."""
        shape = self.latent_shape(image_size, num_frames)
        tensors = [*self.pipe.vae.parameters(), *self.pipe.vae.buffers()]
        with self.mode, Meter(tensors) as meter:
            if train:
                latents = torch.zeros(batch, *shape, requires_grad=True)
                self.model.pixels(latents).square().mean().backward()
            else:
                self.model.decode(torch.zeros(batch, *shape))
        return Cost(meter.flops, meter.peak_bytes)


def count_alike(transformer: torch.nn.Module, count_pass: Callable[[], Cost], train: bool) -> Cost:
    """The Cost of a pass through a transformer, by passes through a shorter one where these are two thirds of the work
    or less: each of its rows of blocks that are alike has two blocks, then one row after the other has three and four.

    All blocks are counted where the third and the fourth do not add the same: the peak has then moved from one place
    to another. So they are where blocks add no memory to a training pass: few of them leave the peak outside.
    """
    lists = block_lists(transformer)
    rows = [(blocks, row) for blocks in lists for row in alike_in_a_row(blocks) if len(row) > 4]
    num_blocks = sum(map(len, lists))
    num_shortest = num_blocks - sum(len(row) - 2 for _, row in rows)
    if (2 + 2 * len(rows)) * num_shortest + 3 * len(rows) > num_blocks * 2 / 3:
        return count_pass()
    with without_blocks([(blocks, row[2:]) for blocks, row in rows]):
        count_pass()  # the first pass makes what a model keeps for the next, such as frequencies of places
        cost = shortest = count_pass()
    for number, (_, row) in enumerate(rows):
        costs = [shortest]
        for length in (3, 4):
            lengths = [length if number == place else 2 for place in range(len(rows))]
            with without_blocks([(blocks, other[n:]) for (blocks, other), n in zip(rows, lengths, strict=True)]):
                costs.append(count_pass())
        third, fourth = (
            Cost(longer.flops - shorter.flops, longer.peak_bytes - shorter.peak_bytes)
            for shorter, longer in itertools.pairwise(costs)
        )
        if third != fourth or (train and third.flops and not third.peak_bytes):
            return count_pass()
        more = len(row) - 2
        cost = Cost(cost.flops + more * third.flops, cost.peak_bytes + more * third.peak_bytes)
    return cost


def block_lists(transformer: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """The lists of a transformer's blocks, by the classes that diffusers names."""
    classes: Sequence[str] = transformer._no_split_modules  # type: ignore[assignment]
    lists = [module for module in transformer.modules() if isinstance(module, torch.nn.ModuleList)]
    return [module for module in lists if any(type(block).__name__ in classes for block in module)]


def alike_in_a_row(blocks: torch.nn.ModuleList) -> list[list[str]]:
    """The names of a list's blocks, those in a row that are alike together: of one class, with layers, settings and
    tensors of the same names and sizes."""
    rows: list[list[str]] = []
    last = None
    for name, block in blocks.named_children():
        settings = [
            (place, type(layer), {k: v for k, v in vars(layer).items() if isinstance(v, int | float | str | None)})
            for place, layer in block.named_modules()
        ]
        weights = (*block.named_parameters(), *block.named_buffers())
        tensors = [(place, weight.shape, weight.requires_grad) for place, weight in weights]
        if (settings, tensors) != last:
            rows.append([])
        rows[-1].append(name)
        last = (settings, tensors)
    return rows


@contextmanager
def without_blocks(left_out: list[tuple[torch.nn.ModuleList, list[str]]]) -> Iterator[None]:
    """Take the blocks of these names out of their lists, of which one may stand here several times."""
    whole = {blocks: blocks._modules for blocks, _ in left_out}
    try:
        for blocks, modules in whole.items():
            out = {name for other, names in left_out if other is blocks for name in names}
            kept = [block for name, block in modules.items() if name not in out]
            blocks._modules = {str(place): block for place, block in enumerate(kept)}
        yield
    finally:
        for blocks, modules in whole.items():
            blocks._modules = modules


def build_pipeline(source: str) -> "tuple[diffusers.DiffusionPipeline, dict[str, torch.nn.Module]]":
    """pipeline_without_weights of a folder or hub id, and its encoders by name, on the meta device as well."""
    import transformers  # slow

    pipe = pipeline_without_weights(source)
    encoders = {}
    for name, value in pipe.load_config(source).items():
        if name.startswith(ENCODERS) and value[1]:
            config = transformers.AutoConfig.from_pretrained(source, subfolder=name)
            with torch.device("meta"):
                encoders[name] = getattr(transformers, value[1])(config)
    return pipe, encoders


def count(module: torch.nn.Module) -> int:
    """The number of a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def num_linear(module: torch.nn.Module) -> int:
    """The number of weights that --base_weights quantises."""
    return sum(layer.weight.numel() for layer in linear_layers(module).values())


def fake(module: torch.nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """Replace the tensors of a module on the meta device by fake tensors on the CPU, with parameters of `dtype`."""
    with mode:
        for part in module.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    data = torch.empty(p.shape, dtype=dtype)
                    parameter = torch.nn.Parameter(data, requires_grad=p.requires_grad)
                    if p.requires_grad:
                        parameter.register_post_accumulate_grad_hook(drop_gradient)
                    part._parameters[name] = parameter
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def drop_gradient(parameter: torch.Tensor) -> None:
    """Forget a parameter's gradient, whose bytes tools/plan.py counts apart."""
    parameter.grad = None
