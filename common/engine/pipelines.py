"""Hooks that make vLLM-Omni's pipelines sample as the trainer does, and take the trainer's weights as tensors.

The pipeline of a family is SDERolloutMixin over vLLM-Omni's native pipeline (`engine_pipeline` of common/models).
Every native denoising loop calls `predict_noise_maybe_with_cfg` and `scheduler_step_maybe_with_cfg`, and these two
hooks carry the sampling. `sde_step` is the trainer's own function.
"""

import functools
import importlib
import operator
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from common.engine.messages import fingerprint
from common.models import PIXELS_AT_ONCE, family_class
from common.rollout import RolloutRequest, Trajectories
from common.sde import SDEStepOutput, sde_step

import torch
import torch.nn.functional as F
from diffusers import ModelMixin
from torch.distributed import TCPStore
from transformers import PreTrainedModel
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.distributed.cfg_parallel import CFGParallelMixin
from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor
from vllm_omni.diffusion.layers import norm as omni_norm
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension, _run_and_gather_rank_values
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput
from vllm_omni.lora.request import LoRARequest

# the adapter that was pushed; vLLM-Omni asks for a path, which nobody opens
POLICY_LORA = LoRARequest(lora_name="policy", lora_int_id=1, lora_path="/pushed-as-tensors")
RolloutPipeline: "type[SDERolloutMixin]"  # the class of the model's family; vLLM-Omni imports it by this name

Tensors = dict[str, torch.Tensor]
Parts = dict[str, tuple[int, bool]]  # per tensor of a worker: its part's fingerprint, and whether that is only a part
Held = dict[str, int | None]  # per tensor of an engine: its fingerprint, or None where its workers disagree


class NoTextEncoder(torch.nn.Module):
    """Stands for a text encoder while a native pipeline is made. Prompts come encoded, so none is loaded."""

    config = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


@functools.cache
def load_no_text_encoders() -> None:
    """Make transformers give a NoTextEncoder, in this process, for a text encoder that is loaded from a pipeline.

    To drop them afterwards would be too late. With --engine_with sleep vLLM-Omni makes its pipeline in a memory pool,
    which keeps the memory of what is dropped later: each sleep would copy it to the host, and each call back to the
    GPU.
    """
    native = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]  # the function of a class method

    def from_pretrained(cls: type, *args: Any, subfolder: str = "", **kwargs: Any) -> torch.nn.Module:
        if subfolder.startswith("text_encoder"):
            return NoTextEncoder()
        module: torch.nn.Module = native(cls, *args, subfolder=subfolder, **kwargs)
        return module

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


@functools.cache
def load_vae_in_fp32() -> None:
    """Make diffusers load a pipeline's VAE in fp32, in this process, as the trainer does.

    Some native pipelines would load it in the transformer's dtype. In bf16 that rounds its weights, and a VAE that is
    made fp32 afterwards keeps them rounded.
    """
    native = ModelMixin.from_pretrained.__func__

    def from_pretrained(cls: type, *args: Any, subfolder: str = "", **kwargs: Any) -> torch.nn.Module:
        if subfolder == "vae":
            kwargs["torch_dtype"] = torch.float32
        module: torch.nn.Module = native(cls, *args, subfolder=subfolder, **kwargs)
        return module

    ModelMixin.from_pretrained = classmethod(from_pretrained)


def use_pipeline_of(model: str, family: str | None) -> None:
    """Define RolloutPipeline by the family of `model`, or by --family, in this process: the engine's, or a worker's."""
    global RolloutPipeline
    load_no_text_encoders()
    load_vae_in_fp32()
    RolloutPipeline = family_class(model, family).engine_pipeline(SDERolloutMixin)


def listen_on_loopback() -> None:
    """Make torch's store listen on the loopback interface alone, as all its ranks are on this machine.

    vLLM-Omni takes a port that was free some seconds ago. The store of a single rank takes one that is free now, as
    nobody else has to know it: engines that start together cannot be in each other's way.
    """

    def loopback_store(
        host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **options: Any
    ) -> TCPStore:
        if is_master:
            listener = socket.create_server(("127.0.0.1", 0 if world_size == 1 else port))
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()  # the store closes it
        return TCPStore(host_name, port, world_size, is_master, **options)

    # by its whole name, as torch.distributed.rendezvous is a function, which hides the module
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = loopback_store


@dataclass
class BatchUnderWay:
    """B images that are being sampled, and their steps so far."""

    request: RolloutRequest  # the settings that they share; it has no conditioning
    prompts: list[dict[str, Any]]  # B, from omni.image_prompts
    generators: list[torch.Generator]  # B
    initial: torch.Tensor  # (B, ...), the latents of the first step
    outputs: list[SDEStepOutput] = field(default_factory=list)  # of the steps taken

    @property
    def timestep(self) -> torch.Tensor:
        """() of the step that comes next, in (0, 1000]."""
        return self.request.timesteps[len(self.outputs)]


class TrainersRMSNorm(torch.nn.Module):
    """An RMS norm of queries and keys, computed as the trainer's (common/weights/norms.py).

    vLLM's own rounds before the weight as well, and so does vLLM-Omni's, of Wan, on a GPU. With these, log-probs in
    bf16 differ by more from the trainer's.
    """

    weight: torch.nn.Parameter
    variance_epsilon: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # without vLLM's `residual`, which no image model passes
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class TrainersKrea2RMSNorm(torch.nn.Module):
    """Krea 2's RMS norm, computed as the trainer's: vLLM-Omni adds 1 to the weight in bf16."""

    weight: torch.nn.Parameter
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.float() + 1.0
        return F.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)


def use_trainers_norms(transformer: torch.nn.Module) -> None:
    """Let vLLM's and vLLM-Omni's RMS norms compute as the trainer's. Their weights stay."""
    for module in transformer.modules():
        if type(module) in (RMSNorm, omni_norm.RMSNorm):
            module.__class__ = TrainersRMSNorm
        elif type(module).__name__ == "Krea2RMSNorm":
            module.__class__ = TrainersKrea2RMSNorm


class SDERolloutMixin(CFGParallelMixin):
    """Gives a native pipeline stochastic steps, fp32 latents and exact timesteps, and returns what it sampled.

    A vLLM-Omni request is one image. It carries the settings that all images share in extra_args, and its seed in the
    prompt. It brings prompt embeddings, not a prompt. The VAE is fp32, like the trainer's.
    """

    supports_request_batch = True
    as_one_request = False  # the native pipeline takes a batch's prompts as one request's, and gives one output for all
    timestep_unit = 1  # the transformer takes t divided by this, t in (0, 1000]
    no_text_encoder = NoTextEncoder  # for a native pipeline that loads one in a way of its own
    _run: BatchUnderWay  # within `forward`
    # adapter and config, from push_lora to vLLM-Omni's hook
    _pending_lora: tuple[Tensors, dict[str, Any]] | None = None
    weights_sources: list[Any]  # what the native pipeline asks its loader for, set by its __init__

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in [name for name in self._modules if name.startswith("text_encoder")]:
            setattr(self, name, None)
        self.weights_sources = [part for part in self.weights_sources if not part.prefix.startswith("text_encoder")]
        use_trainers_norms(self.transformer)

    def forward(self, batch: DiffusionRequestBatch, *args: Any, **kwargs: Any) -> list[DiffusionOutput]:
        params = batch.sampling_params_list[0]
        prompts = batch.prompts
        # decode one image at a time where all at once would take gigabytes
        self.vae.use_slicing = len(prompts) * params.height * params.width > PIXELS_AT_ONCE
        request = params.extra_args["request"]
        if "initial_latents" in prompts[0]:
            starts = torch.stack([prompt["initial_latents"] for prompt in prompts]).to(self.device)
            request = replace(request, initial_latents=starts)
        generators = [torch.Generator().manual_seed(prompt["seed"]) for prompt in prompts]
        initial = request.first_latents(generators, self.device)
        self._run = BatchUnderWay(request, prompts, generators, initial)
        native: Any = batch
        if self.as_one_request:
            native = SimpleNamespace(prompts=prompts, sampling_params=params)
        try:
            outputs = super().forward(native, *args, **kwargs)
            if not isinstance(outputs, list):  # of all images
                outputs = [DiffusionOutput(output=image[None]) for image in outputs.output]
            return self._with_trajectories(outputs, self._run)
        finally:
            del self._run

    def _with_trajectories(self, outputs: list[DiffusionOutput], run: BatchUnderWay) -> list[DiffusionOutput]:
        """The B outputs of the native pipeline, each with the trajectory of its image."""
        num_steps = len(run.request.timesteps)
        if len(run.outputs) != num_steps:
            raise RuntimeError(f"the pipeline took {len(run.outputs)} steps, the schedule has {num_steps}")
        trajectories = Trajectories.from_steps(run.initial, run.outputs, images=[])
        trajectories = trajectories.to("cpu")  # all images at once, as each copy waits for the GPU
        results = []
        for image, output in enumerate(outputs):
            rollout = {
                "transition_stds": trajectories.transition_stds[image],
                "prev_sample_means": trajectories.prev_sample_means[image],
            }
            result = DiffusionOutput(
                output={"payload": {"image": self.pixels(output)}, "metadata": {"rollout": rollout}},
                trajectory_latents=trajectories.latents[image],
                trajectory_log_probs=trajectories.log_probs[image],
                to_cpu=True,
            )
            results.append(result)
        return results

    def prepare_latents(self, *args: Any, **kwargs: Any) -> torch.Tensor | tuple:
        native = super().prepare_latents(*args, **kwargs)
        latents = self.pack(self._run.initial)
        return (latents, *native[1:]) if isinstance(native, tuple) else latents

    # ---- what a family reads ----
    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(C, h, w), or (C, f, h, w) of videos, in the batch under way."""
        return self._run.request.latent_shape

    def conditioning(self, name: str) -> torch.Tensor:
        """(B, ...), a part of the conditioning of the batch under way, such as "negative_prompt_embeds"."""
        return torch.stack([prompt[name] for prompt in self._run.prompts]).to(self.device)

    # ---- what a family overrides if its pipeline differs ----
    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, h, w) in the shape in which the native loop holds them."""
        return latents

    def unpack(self, latents: torch.Tensor) -> torch.Tensor:
        """The reverse of pack."""
        return latents

    def pixels(self, output: DiffusionOutput) -> torch.Tensor:
        """One request's decoded image (1, 3, height, width), or video (1, 3, frames, height, width), in [-1, 1]."""
        return output.output

    def module_name(self, name: str) -> str:
        """vLLM-Omni's name of a module of diffusers' transformer; `name` may be the end of a module's name."""
        return name

    def weight_name(self, name: str) -> str:
        """vLLM-Omni's name of a weight of diffusers' transformer; for q, k and v the name before they are fused."""
        return self.module_name(name)

    # ---- the two hooks of a sampling step ----
    def predict_noise_maybe_with_cfg(
        self,
        do_true_cfg: bool,
        true_cfg_scale: float,
        positive_kwargs: dict[str, Any],
        negative_kwargs: dict[str, Any] | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        # in fp32, where the native loop rounds it to the model's dtype
        timestep = self._run.timestep.to(self.device) / self.timestep_unit
        for branch in (positive_kwargs, negative_kwargs if do_true_cfg else None):
            if branch is not None:
                latents = branch["hidden_states"]
                branch["timestep"] = timestep.expand(len(latents))
                branch["hidden_states"] = latents.to(self.od_config.dtype)
        return super().predict_noise_maybe_with_cfg(
            do_true_cfg, true_cfg_scale, positive_kwargs, negative_kwargs, *args, **kwargs
        )

    def predict_noise(self, **kwargs: Any) -> torch.Tensor:
        return super().predict_noise(**kwargs).float()  # guidance is combined in fp32, as in the trainer

    def scheduler_step_maybe_with_cfg(
        self, noise_pred: torch.Tensor, t: torch.Tensor, latents: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        run = self._run
        request = run.request
        i = len(run.outputs)
        sigma, sigma_next = request.sigmas[i : i + 2].tolist()
        out = sde_step(
            self.unpack(latents),
            self.unpack(noise_pred),
            sigma,
            sigma_next,
            request.noise_level if i in request.sde_steps else 0.0,
            sde_type=request.sde_type,
            sigma_max=request.sigma_max,
            generator=run.generators,
        )
        run.outputs.append(out)
        return self.pack(out.prev_sample)

    # ---- taking an adapter ----
    def _load_diffusion_lora_adapter(
        self, *, lora_request: LoRARequest, lora_path: str, dtype: torch.dtype
    ) -> tuple[LoRAModel, PEFTHelper]:
        """vLLM-Omni's hook: make the adapter from the pushed tensors instead of a folder."""
        if self._pending_lora is None:
            raise RuntimeError("no adapter was pushed")
        tensors, config = self._pending_lora
        helper = PEFTHelper.from_dict(config)
        model = LoRAModel.from_lora_tensors(
            lora_model_id=lora_request.lora_int_id,
            tensors=tensors,
            peft_helper=helper,
            device="cpu",
            dtype=dtype,
            model_vocab_size=None,
            weights_mapper=None,
        )
        return model, helper


class RolloutDiffusionEngine(DiffusionEngine):
    """Passes the pipeline's tensors on without converting them to PIL, and samples the images of a chunk together."""

    images_to_come = 0  # of the chunk that omni.generate hands over, image by image

    def _wait_for_admission_if_needed_locked(self) -> None:
        """Wait for all images of a chunk. Otherwise its first batch would be those that happened to come first."""
        waiting = 0
        deadline = time.monotonic() + 5  # if no image follows within this time, it failed on the way
        while self.scheduler.num_waiting_requests() < self.images_to_come and time.monotonic() < deadline:
            if self.scheduler.num_waiting_requests() > waiting:
                waiting = self.scheduler.num_waiting_requests()
                deadline = time.monotonic() + 5
            self._cv.wait(timeout=0.002)
        RolloutDiffusionEngine.images_to_come = 0

    def run_startup_warmup(self) -> None:
        """Nothing: vLLM-Omni's dummy run brings a prompt, and there are no text encoders to encode it."""

    def _init_process_hooks(self, od_config: OmniDiffusionConfig) -> None:
        super()._init_process_hooks(od_config)
        self.pre_process_func = None  # requests come encoded; that of an editing model would ask for pictures
        self.post_process_func = None


class RolloutExecutor(MultiprocDiffusionExecutor):
    """vLLM-Omni's executor of several workers, mended so that it loses no batch.

    One thread learns that a batch is sampled, and splits it into requests; another thread brings the batch's images. If
    the images come first, they are kept under the batch's id until the split. The second thread looks for the split,
    finds none, and keeps the images. If the split falls between, nobody asks for the images again. So the second thread
    looks once more when it keeps them.
    """

    def _finish_output(
        self, async_output_id: str, result: DiffusionOutput | BatchRunnerOutput | None, exc: BaseException | None
    ) -> None:  # the caller holds the lock of _batch_split_map
        requests = self._batch_split_map.pop(async_output_id, None)
        if requests is None:
            super()._finish_output(async_output_id, result, exc)
        else:
            self._deliver_batch_split(requests, result, exc and str(exc))


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """Calls that vLLM-Omni's worker takes besides sampling: take a policy.

    If there are several workers, each has a part of the transformer. Every worker gets the whole tensors that are
    pushed, and cuts its part out.
    """

    def init_device(self) -> None:
        listen_on_loopback()
        super().init_device()

    def re_init_pipeline(self, custom_pipeline_args: dict[str, Any]) -> None:
        use_pipeline_of(self.od_config.model, custom_pipeline_args["family"])
        super().re_init_pipeline(custom_pipeline_args)

    def push_lora(self, tensors: Tensors, config: dict[str, Any]) -> Held:
        """Take an adapter: {"module.lora_A.weight": tensor}, and peft's config as a dict. Returns the fingerprint of
        each matrix that acts, by the same names."""
        return of_all_workers("push_lora", lambda: self._push_lora(tensors, config))

    def push_weights(self, tensors: Tensors) -> Held:
        """Take weights of the transformer, {diffusers name: tensor}. Returns the fingerprints of those it now has."""
        return of_all_workers("push_weights", lambda: self._push_weights(tensors))

    def _push_lora(self, tensors: Tensors, config: dict[str, Any]) -> Parts:
        pipeline = self.model_runner.pipeline
        names = {"transformer." + pipeline.module_name(name): name for name in tensors}
        targets = [pipeline.module_name(target) for target in config["target_modules"]]
        prefixed = {"base_model.model." + name: tensors[own] for name, own in names.items()}
        pipeline._pending_lora = (prefixed, config | {"target_modules": targets})
        try:
            self.remove_lora(POLICY_LORA.lora_int_id)
            if not self.add_lora(POLICY_LORA):
                raise RuntimeError("vLLM-Omni did not take the adapter")
            self.lora_manager.set_active_adapter(POLICY_LORA)
        except ValueError as error:
            raise ValueError(unbound_modules(str(error), names) or str(error)) from error
        finally:
            pipeline._pending_lora = None
        held = {}
        for full_name, matrix in self._lora_matrices().items():
            name = names.get(full_name, full_name)
            side = 1 if "lora_A" in name else 0  # not the rank's, which is padded
            is_split = name in tensors and matrix.shape[side] < tensors[name].shape[side]
            held[name] = (fingerprint(matrix), is_split)
        return held

    def _lora_matrices(self) -> Tensors:
        """The matrices of any adapter that act in this worker's layers: {"transformer.module.lora_A.weight": matrix}.

        The names are vLLM-Omni's. A layer that holds q, k and v has matrices for each of them. The rank is padded with
        zeros, which count for nothing in a fingerprint.
        """
        manager = self.lora_manager
        found: Tensors = {}
        for name, layer in manager._lora_modules.items():
            modules = [name]
            if len(layer.lora_a_stacked) > 1:
                parent, _, fused = name.rpartition(".")
                parts = manager._get_packed_sublayer_suffixes(fused, len(layer.lora_a_stacked))
                modules = [f"{parent}.{part}" for part in parts]
            for i, module in enumerate(modules):
                if layer._diffusion_lora_active_slices[i]:
                    found[f"{module}.lora_A.weight"] = layer.lora_a_stacked[i][0, 0]
                    found[f"{module}.lora_B.weight"] = layer.lora_b_stacked[i][0, 0]
        return found

    def _push_weights(self, tensors: Tensors) -> Parts:
        pipeline = self.model_runner.pipeline
        held = {}
        try:
            pipeline.load_weights([(f"transformer.{name}", tensor) for name, tensor in tensors.items()])
            own = dict(pipeline.transformer.named_parameters()) | dict(pipeline.transformer.named_buffers())
            for name, tensor in tensors.items():
                weight = held_weight(pipeline, own, name)
                held[name] = (fingerprint(weight), weight.numel() < tensor.numel())
        except KeyError as error:
            raise RuntimeError(f"the engine's transformer has no weight {error}") from None
        return held


# ---- what a push came to ---------------------------------------------------------------------------------------------
def of_all_workers(operation: str, push: Callable[[], Parts]) -> Held:
    """Run a worker's `push`, and join what all workers hold: the fingerprint of each whole tensor. A collective."""
    workers = _run_and_gather_rank_values(operation, push)
    names = dict.fromkeys(name for parts in workers for name in parts)
    return {name: whole_fingerprint([parts.get(name) for parts in workers]) for name in names}


def unbound_modules(message: str, names: dict[str, str]) -> str | None:
    """What to do where vLLM-Omni's message lists modules of an adapter that it has no LoRA for; None for any other.

    names: {its name of an adapter's tensor: our name}. Modules are named by their ends, without the blocks' numbers.
    """
    listed = re.search(r"unbound modules=\[(.*?)\]", message)
    if listed is None:
        return None
    own = {full.rpartition(".lora_")[0]: name.rpartition(".lora_")[0] for full, name in names.items()}
    modules = [own.get(module, module) for module in re.findall(r"'(.+?)'", listed[1])]
    ends = sorted({re.sub(r"^.*?\.\d+\.", "", module) for module in modules})
    given = " ".join(f"not:{end}" for end in ends)
    return f"the engine has no LoRA for these: add {given} to --lora_target_modules, or pass --rollout local"


def whole_fingerprint(parts: list[tuple[int, bool] | None]) -> int | None:
    """The fingerprint of a tensor, from each worker's (fingerprint, whether it holds only a part).

    The xor of the parts' fingerprints is that of the whole. None, which is no tensor's fingerprint, where copies
    differ, or a worker has nothing.
    """
    present = [part for part in parts if part is not None]
    if len(present) == len(parts) and all(is_part for _, is_part in present):
        return functools.reduce(operator.xor, [value for value, _ in present])
    value, is_part = present[0]
    return value if not is_part and parts == [present[0]] * len(parts) else None


def parameter_slice(pipeline: SDERolloutMixin, name: str) -> tuple[str, int | None]:
    """The name of the pipeline's parameter that holds diffusers' weight `name`, and which slice of it the weight is.

    q, k and v are the slices 0, 1 and 2 of one parameter. None: the weight is the whole parameter.
    """
    name = pipeline.weight_name(name)
    for stacked, part, shard in pipeline.transformer.stacked_params_mapping:
        if part in name:
            return name.replace(part, stacked), "qkv".index(shard)
    return name, None


def held_weight(pipeline: SDERolloutMixin, own: Tensors, name: str) -> torch.Tensor:
    """The tensor into which diffusers' weight `name` was loaded; `own` are the transformer's tensors by name."""
    parameter, number = parameter_slice(pipeline, name)
    if number is None:
        return own[parameter]
    layer = pipeline.transformer.get_submodule(parameter.rpartition(".")[0])
    sizes = [size // layer.tp_size for size in layer.output_sizes]  # rows of q, k and v that this worker has
    return own[parameter].narrow(0, sum(sizes[:number]), sizes[number])
