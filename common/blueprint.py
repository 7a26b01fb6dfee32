"""A model without its weights: how large its parts are, and what a pass of it allocates and multiplies.

Everything comes from the model's configs. Its modules are built on the meta device, and a pass of the family's own code
is taken with fake tensors, which have shapes and no memory: what it costs is counted, not guessed.
"""

import inspect
import re
import weakref
from typing import NamedTuple

from common.policy import add_policies

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count


# ---- counting --------------------------------------------------------------------------------------------------------
def attention_flops(query, key, value, *args, **kwargs):
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward_flops(grad_out, query, key, value, *args, **kwargs):
    """Of the four products that a gradient needs; what a flash kernel computes once more is not counted."""
    return 2 * sdpa_flop_count(query.shape, key.shape, value.shape)


ATTENTION_FLOPS = {  # of the kernel that fake CPU tensors choose, which saves as much as those of a GPU
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


# layers whose weights the workers of an engine share out, by diffusers' names; each has all of the others
SPLIT = re.compile(r"\.(attn\d?|ff|ff_context|ffn|img_mlp|txt_mlp)\.")


class Meter(TorchDispatchMode):
    """Counts the FLOPs of matrix products, and the bytes of what is made and still alive, now and at their peak."""

    def __init__(self, known=()):
        """known: tensors that were there before."""
        super().__init__()
        self.flops = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self.seen = weakref.WeakKeyDictionary({tensor.untyped_storage(): True for tensor in known})

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        kernel = operation._overloadpacket
        if kernel in ATTENTION_FLOPS:
            self.flops += ATTENTION_FLOPS[kernel](*args, **kwargs)
        elif kernel in flop_registry:
            self.flops += flop_registry[kernel](*args, **kwargs, out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage):
        if storage not in self.seen:
            self.seen[storage] = True
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, num_bytes):
        self.live_bytes -= num_bytes


class Cost(NamedTuple):
    """Of one pass."""

    flops: int
    peak_bytes: int  # of what it has made and not let go; parameters and their gradients apart


class Counts(torch.Tensor):
    """Whole numbers that a family reads, as Z-Image reads a prompt's number of tokens: real among fake tensors."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with unset_fake_temporarily():
            return super().__torch_function__(function, types, args, kwargs)


class Blueprint:
    """A model that has configs and no weights: how large its parts are, and what a pass of them costs."""

    def __init__(self, family, source, lora, dtype):
        """family: class of common/models; source: folder or hub id; lora: make_lora's; dtype: of the forward pass."""
        import diffusers  # slow
        import transformers

        index = diffusers.DiffusionPipeline.load_config(source)
        pipeline_class = getattr(diffusers, index["_class_name"])
        parts = {}
        for name, parameter in inspect.signature(pipeline_class).parameters.items():
            value = index.get(name)
            is_component = value is None or isinstance(value, list)  # [library, class]
            if parameter.default is parameter.empty or not is_component:
                parts[name] = None if is_component else value
        text_encoders = []
        for name, value in index.items():
            if name.startswith("text_encoder") and value[1]:
                config = transformers.AutoConfig.from_pretrained(source, subfolder=name)
                with torch.device("meta"):
                    text_encoders.append(getattr(transformers, value[1])(config))
        with torch.device("meta"):
            for name in ("transformer", "vae"):
                part_class = getattr(diffusers, index[name][1])
                parts[name] = part_class.from_config(part_class.load_config(source, subfolder=name))
                parts[name].requires_grad_(False).eval()
        parts["scheduler"] = getattr(diffusers, index["scheduler"][1]).from_pretrained(source, subfolder="scheduler")
        self.pipe = pipeline_class(**parts)
        # pixels stay tensors: fake ones are no images
        processor = type("Pixels", (), {"postprocess": lambda self, x: x, "postprocess_video": lambda self, x, **_: x})
        self.pipe.image_processor = self.pipe.video_processor = processor()

        self.source = source
        self.dtype = dtype
        self.text_encoder_bytes = sum(count(encoder) for encoder in text_encoders) * dtype.itemsize
        self.vae_bytes = 4 * count(self.pipe.vae)  # fp32
        self.num_weights = count(self.pipe.transformer)  # of the model itself: without a LoRA
        self.num_split = 0  # of them, what --engine_tensor_parallel divides
        for name, parameter in self.pipe.transformer.named_parameters():
            if SPLIT.search(name):
                self.num_split += parameter.numel()
        self.fp32_buffer_bytes = sum(buffer.nbytes for buffer in self.pipe.transformer.buffers())
        self.buffer_bytes = 0  # as from_pretrained rounds them
        for buffer in self.pipe.transformer.buffers():
            self.buffer_bytes += buffer.numel() * min(buffer.itemsize, dtype.itemsize)
        self.model = family(self.pipe)
        self.model.device = torch.device("cpu")
        with torch.device("meta"):
            add_policies(self.model, None if lora is None else (lora[0], None), ["default"])
        transformer = self.model.transformer
        self.num_trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
        blocks = [m for m in transformer.modules() if type(m).__name__ in transformer._no_split_modules]
        sizes = [count(block) for block in blocks]
        self.largest_block = max(sizes)
        self.outside_blocks = count(transformer) - sum(sizes)

        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        fake(transformer, self.mode, dtype)  # as FSDP gathers them
        fake(self.pipe.vae, self.mode, torch.float32)

    def latent_shape(self, image_size, num_frames):
        """(C, h, w) of an image's latents, or (C, f, h, w) of a video's."""
        return self.model.schedule(2, *image_size, num_frames)[2]

    def conditioning_shapes(self, length):
        """{name: shape} of the conditioning of one prompt of `length` tokens."""
        return self.model.conditioning_shapes(self.pipe.transformer.config, length)

    def conditioning(self, length):
        """That of one prompt: zeros in the model's dtype, masks and numbers of tokens as if all were there."""
        conditioning = {}
        for name, shape in self.conditioning_shapes(length).items():
            if shape == ():
                with unset_fake_temporarily():
                    conditioning[name] = torch.tensor([length]).as_subclass(Counts)
            elif name.endswith("mask"):
                conditioning[name] = torch.ones(1, *shape, dtype=torch.long)
            else:
                conditioning[name] = torch.zeros(1, *shape, dtype=self.dtype)
        return conditioning

    def conditioning_bytes(self, length):
        """Bytes of one prompt's conditioning."""
        shapes = self.conditioning_shapes(length)
        return sum(torch.Size(shape).numel() for shape in shapes.values()) * self.dtype.itemsize

    def velocity(self, image_size, num_frames, length, guidance_scale, *, train=False, checkpointing=False):
        """Cost of predict_velocity at one image; `train`: with its backward pass, `checkpointing`: in that way."""
        model = self.model
        if checkpointing:
            model.transformer.enable_gradient_checkpointing()
        timesteps, _, shape = model.schedule(2, *image_size, num_frames)
        tensors = [*model.transformer.parameters(), *model.transformer.buffers()]
        with self.mode, Meter(tensors) as meter, torch.set_grad_enabled(train):
            conditioning = self.conditioning(length)
            negative = self.conditioning(length) if guidance_scale > 1 else None
            latents = torch.zeros(1, *shape)
            velocity = model.predict_velocity(latents, timesteps[0], conditioning, negative, guidance_scale)
            if train:
                velocity.square().mean().backward()
        model.transformer.disable_gradient_checkpointing()
        return Cost(meter.flops, meter.peak_bytes)

    def decoding(self, batch, image_size, num_frames):
        """Cost of `decode` of the latents of `batch` images."""
        shape = self.latent_shape(image_size, num_frames)
        tensors = [*self.pipe.vae.parameters(), *self.pipe.vae.buffers()]
        with self.mode, Meter(tensors) as meter:
            self.model.decode(torch.zeros(batch, *shape))
        return Cost(meter.flops, meter.peak_bytes)


def count(module):
    """How many parameters a module has."""
    return sum(p.numel() for p in module.parameters())


def drop_gradient(parameter):
    parameter.grad = None


def fake(module, mode, dtype):
    """Give a module on the meta device fake tensors on the CPU, all its parameters of `dtype`."""
    with mode:
        for part in module.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    data = torch.empty(p.shape, dtype=dtype)
                    part._parameters[name] = torch.nn.Parameter(data, requires_grad=p.requires_grad)
                    if p.requires_grad:
                        part._parameters[name].register_post_accumulate_grad_hook(drop_gradient)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
