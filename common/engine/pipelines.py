"""Hooks that make vLLM-Omni's own pipelines sample as the trainer does, and take the trainer's weights as tensors.

A family's pipeline is SDERolloutMixin over vLLM-Omni's native one (`engine_pipeline()` of common/models). Two hooks,
which every native denoising loop passes through, carry the sampling: `predict_noise_maybe_with_cfg` and
`scheduler_step_maybe_with_cfg`; `sde_step` is the trainer's.
"""

import functools
import importlib
import operator
import socket
import time
from dataclasses import dataclass, field

from common.engine.messages import fingerprint
from common.models import find_family
from common.noise import draw_noise
from common.rollout import Trajectories
from common.sde import SDEStepOutput, multistep_ode_step, sde_step
from common.vae import PIXELS_AT_ONCE

import torch
from torch.distributed import TCPStore
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension, _run_and_gather_rank_values
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.lora.request import LoRARequest

LORA_ID = 1
RolloutPipeline = None  # the class of the model's family, where vLLM-Omni imports it by name


def use_pipeline_of(model):
    """Put the class of the family of `model` where this process imports it: the engine's, and that of each worker."""
    global RolloutPipeline
    RolloutPipeline = find_family(model).engine_pipeline()


def listen_on_loopback():
    """Let torch's store, which listens on all interfaces, listen on this machine's own alone: its ranks are here."""

    def loopback_store(host_name, port, world_size=None, is_master=False, **options):
        if is_master:
            listener = socket.create_server(("127.0.0.1", port))
            options["master_listen_fd"] = listener.detach()  # the store closes it
        return TCPStore(host_name, port, world_size, is_master, **options)

    # by its whole name: torch.distributed.rendezvous is a function, too
    importlib.import_module("torch.distributed.rendezvous").TCPStore = loopback_store


def policy_lora():
    """The request for the adapter that was pushed; vLLM-Omni asks for a path, which nobody opens."""
    return LoRARequest(lora_name="policy", lora_int_id=LORA_ID, lora_path="/pushed-as-tensors")


@dataclass
class BatchUnderWay:
    """B images being sampled: the settings they share, as in RolloutRequest, and what their steps gave so far."""

    timesteps: torch.Tensor  # (T,)
    sigmas: list[float]  # T + 1
    sde_steps: tuple[int, ...]
    sde_type: str
    noise_level: float
    latent_shape: tuple[int, ...]
    sigma_max: float
    multistep_from: int | None
    means: bool  # whether the trainer asks for prev_sample_means
    prompts: list[dict]  # B, as server.image_prompts made them
    generators: list[torch.Generator]  # B
    starts: list[torch.Tensor]  # B latents to go on from, or none
    initial: torch.Tensor | None = None  # (B, ...), the latents of the first step
    outputs: list[SDEStepOutput] = field(default_factory=list)  # of the steps taken
    previous: tuple | None = None  # what multistep_ode_step hands to its next step

    @property
    def step(self):
        """Index of the step that comes next."""
        return len(self.outputs)


class SDERolloutMixin:
    """Stochastic steps, fp32 latents and exact timesteps for a native pipeline, and what was sampled in its output.

    Requests carry their common settings in extra_args["rollout"] and their own seed in the prompt. One without settings
    passes through: vLLM-Omni's dummy run at the start, the only one, after which the text encoders are let go.
    """

    supports_request_batch = True
    timestep_unit = 1  # the transformer takes t divided by this, t in (0, 1000]
    _run = None  # BatchUnderWay
    _pending_lora = None  # (tensors, config) between push_lora and the hook that vLLM-Omni calls
    bound_lora_modules = 0

    def forward(self, req, *args, **kwargs):
        batch = req
        if not isinstance(req, DiffusionRequestBatch):
            batch = DiffusionRequestBatch(requests=[req])
        extra_args = batch.sampling_params_list[0].extra_args or {}
        settings = extra_args.get("rollout")
        if settings is None:
            encoders = [name for name in self._modules if name.startswith("text_encoder")]
            for name in encoders:
                getattr(self, name).to(self.od_config.dtype)  # some have the checkpoint's
            output = super().forward(batch, *args, **kwargs)
            for name in encoders:
                setattr(self, name, None)  # prompts come encoded from now on
            return output
        params = batch.sampling_params_list[0]
        # one image at a time, where all would take gigabytes
        self.vae.use_slicing = len(batch.prompts) * params.height * params.width > PIXELS_AT_ONCE
        generators = [torch.Generator().manual_seed(prompt["seed"]) for prompt in batch.prompts]
        starts = [prompt["initial_latents"] for prompt in batch.prompts if "initial_latents" in prompt]
        run = BatchUnderWay(**settings, prompts=batch.prompts, generators=generators, starts=starts)
        self._run = run
        try:
            outputs = super().forward(batch, *args, **kwargs)
        finally:
            self._run = None
        if run.step != len(run.timesteps):
            raise RuntimeError(f"the pipeline took {run.step} steps, the schedule has {len(run.timesteps)}")
        if not isinstance(outputs, list):  # of a pipeline that takes one request at a time
            return self._with_trajectories([outputs], run)[0]
        return self._with_trajectories(outputs, run)

    def _with_trajectories(self, outputs, run):
        """The B outputs of the native pipeline, each with its own image's trajectory."""
        trajectories = Trajectories.from_steps(run.initial, run.outputs, images=[])
        latents = trajectories.latents.cpu()  # at once for all images: each copy waits for the GPU
        log_probs = trajectories.log_probs.cpu()
        transition_stds = trajectories.transition_stds.cpu()
        if run.means:
            means = trajectories.prev_sample_means.cpu()
        num_steps = torch.tensor(run.step)
        results = []
        for image, output in enumerate(outputs):
            rollout = {"transition_stds": transition_stds[image], "num_steps": num_steps}
            if run.means:
                rollout["prev_sample_means"] = means[image]
            result = DiffusionOutput(
                output={"payload": {"image": self.pixels(output)}, "metadata": {"rollout": rollout}},
                trajectory_latents=latents[image],
                trajectory_log_probs=log_probs[image],
                to_cpu=True,
            )
            results.append(result)
        return results

    def prepare_latents(self, *args, **kwargs):
        run = self._run
        if run is None:
            return super().prepare_latents(*args, **kwargs)
        if run.starts:
            run.initial = torch.stack(run.starts).to(self.device)
        else:
            shape = (len(run.generators), *run.latent_shape)
            run.initial = draw_noise(shape, run.generators, self.device)
        native = super().prepare_latents(*args, **kwargs)
        latents = self.pack(run.initial)
        return (latents, *native[1:]) if isinstance(native, tuple) else latents

    def pack(self, latents):
        """Latents (B, C, h, w) as the native loop holds them: here the same."""
        return latents

    def unpack(self, latents):
        """The reverse of pack."""
        return latents

    def pixels(self, output):
        """What was decoded for one request, (1, 3, height, width) or (1, 3, frames, height, width) in [-1, 1]."""
        return output.output

    def module_name(self, name):
        """vLLM-Omni's name of what diffusers calls `name`, a module of the transformer or the end of one: the same."""
        return name

    def weight_name(self, name):
        """vLLM-Omni's name of what diffusers calls `name`, a weight of the transformer; of q, k, v before they fuse."""
        return self.module_name(name)

    def predict_noise_maybe_with_cfg(
        self, do_true_cfg, true_cfg_scale, positive_kwargs, negative_kwargs, *args, **kwargs
    ):
        run = self._run
        if run is not None:
            branches = [positive_kwargs]
            if do_true_cfg:
                branches.append(negative_kwargs)
            # fp32: the native loop rounds it to the model's dtype
            timestep = run.timesteps[run.step].to(self.device) / self.timestep_unit
            for branch in branches:
                latents = branch["hidden_states"]
                branch["timestep"] = timestep.expand(len(latents))
                branch["hidden_states"] = latents.to(self.od_config.dtype)
        return super().predict_noise_maybe_with_cfg(
            do_true_cfg, true_cfg_scale, positive_kwargs, negative_kwargs, *args, **kwargs
        )

    def predict_noise(self, **kwargs):
        velocity = super().predict_noise(**kwargs)
        if self._run is None:
            return velocity
        return velocity.float()  # guidance is combined in fp32, as in the trainer

    def scheduler_step_maybe_with_cfg(self, noise_pred, t, latents, do_true_cfg, *args, **kwargs):
        run = self._run
        if run is None:
            return super().scheduler_step_maybe_with_cfg(noise_pred, t, latents, do_true_cfg, *args, **kwargs)
        i = run.step
        sigma = run.sigmas[i]
        sigma_next = run.sigmas[i + 1]
        latents = self.unpack(latents)
        noise_pred = self.unpack(noise_pred)
        if run.multistep_from is not None and i >= run.multistep_from:
            out, run.previous = multistep_ode_step(latents, noise_pred, sigma, sigma_next, run.previous)
        else:
            out = sde_step(
                latents,
                noise_pred,
                sigma,
                sigma_next,
                run.noise_level if i in run.sde_steps else 0.0,
                sde_type=run.sde_type,
                sigma_max=run.sigma_max,
                generator=run.generators,
            )
        run.outputs.append(out)
        return self.pack(out.prev_sample)

    def _load_diffusion_lora_adapter(self, *, lora_request, lora_path, dtype):
        """vLLM-Omni's hook: the adapter that was pushed, from tensors instead of a folder."""
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

    def _validate_diffusion_lora_binding(self, *, lora_model, bound_lora_names):
        """vLLM-Omni's hook after binding: how many of the adapter's modules act."""
        self.bound_lora_modules = len(bound_lora_names)


class RolloutDiffusionEngine(DiffusionEngine):
    """Hands the pipeline's tensors through instead of converting them to PIL, and samples a chunk's images together."""

    images_to_come = 0  # of the chunk that the server is handing over, image by image

    def _wait_for_admission_if_needed_locked(self):
        """Let the first batch of a chunk be whole: by itself it would be of the images that had come by chance."""
        waiting = 0
        deadline = time.monotonic() + 5  # where no image follows another for so long, it failed on the way
        while self.scheduler.num_waiting_requests() < self.images_to_come and time.monotonic() < deadline:
            if self.scheduler.num_waiting_requests() > waiting:
                waiting = self.scheduler.num_waiting_requests()
                deadline = time.monotonic() + 5
            self._cv.wait(timeout=0.002)
        RolloutDiffusionEngine.images_to_come = 0

    def _init_process_hooks(self, od_config):
        super()._init_process_hooks(od_config)
        self.post_process_func = None
        self._post_process_accepts_sampling_params = False


class RolloutExecutor(MultiprocDiffusionExecutor):
    """vLLM-Omni's executor of several workers, which loses no batch. The word that a batch is sampled and its images
    come by two threads: images that overtake it are kept under the batch's id until it is split into requests. Where it
    was split after they were looked for there and before they were kept, nobody would ask for them again."""

    def _finish_output(self, async_output_id, result, exc):  # under the lock of what it reads
        requests = self._batch_split_map.pop(async_output_id, None)
        if requests is None:
            super()._finish_output(async_output_id, result, exc)
        else:
            self._deliver_batch_split(requests, result, exc and str(exc))


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """What vLLM-Omni's worker can do besides sampling: take a policy, and give its memory back for a while.

    Of several workers each has a part of the transformer. All take the whole of what is pushed, and cut their part out.
    """

    def init_device(self):
        listen_on_loopback()
        super().init_device()

    def re_init_pipeline(self, custom_pipeline_args):
        use_pipeline_of(self.od_config.model)
        super().re_init_pipeline(custom_pipeline_args)

    def fall_asleep(self):
        """Move the weights to host memory, and release what is cached."""
        self.sleep(level=1)

    def get_up(self):
        """Bring the weights back."""
        self.wake_up(["weights"])

    def push_lora(self, tensors, config):
        """{"module.lora_A.weight": tensor} and peft's config as a dict -> how many modules the pipeline bound, and a
        fingerprint of each matrix that acts, by the same names; of all workers.
        """
        return of_all_workers("push_lora", lambda: self._push_lora(tensors, config))

    def push_weights(self, tensors):
        """{diffusers name: tensor} of the transformer -> how many of them the pipeline loaded, and a fingerprint of
        each that it now has; of all workers.
        """
        return of_all_workers("push_weights", lambda: self._push_weights(tensors))

    def _push_lora(self, tensors, config):
        """This worker's (number of modules that were bound, {name: (fingerprint of its part, whether it is one)})."""
        pipeline = self.model_runner.pipeline
        names = {"transformer." + pipeline.module_name(name): name for name in tensors}
        prefix = "base_model.model."
        targets = [pipeline.module_name(target) for target in config["target_modules"]]
        prefixed = {prefix + name: tensors[names[name]] for name in names}
        pipeline._pending_lora = (prefixed, config | {"target_modules": targets})
        request = policy_lora()
        try:
            self.remove_lora(LORA_ID)
            if not self.add_lora(request):
                raise RuntimeError("vLLM-Omni did not take the adapter")
            self.lora_manager.set_active_adapter(request)
        finally:
            pipeline._pending_lora = None
        held = {}
        for full_name, matrix in self._lora_matrices().items():
            name = names.get(full_name, full_name)
            # the side that is not the rank's, which is padded
            side = 1 if "lora_A" in name else 0
            is_split = name in tensors and matrix.shape[side] < tensors[name].shape[side]
            held[name] = (fingerprint(matrix), is_split)
        return pipeline.bound_lora_modules, held

    def held_lora(self):
        """{"transformer.module.lora_A.weight": fingerprint} of what acts in this worker's layers."""
        return {name: fingerprint(matrix) for name, matrix in self._lora_matrices().items()}

    def _lora_matrices(self):
        """{"transformer.module.lora_A.weight": matrix} of those that act in this worker's layers, whatever adapter they
        are of, by vLLM-Omni's names.

        Of a layer that holds q, k and v each has its own. The rank is padded with zeros, which count for nothing in a
        fingerprint.
        """
        manager = self.lora_manager
        found = {}
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

    def _push_weights(self, tensors):
        """This worker's (number of tensors that were loaded, {name: (fingerprint of its part, whether it is one)})."""
        pipeline = self.model_runner.pipeline
        weights = [(f"transformer.{name}", tensor) for name, tensor in tensors.items()]
        try:
            loaded = pipeline.load_weights(weights)
        except KeyError as error:
            raise RuntimeError(f"the engine's transformer has no weight {error}") from None
        bound = 0
        held = {}
        own = dict(pipeline.transformer.named_parameters()) | dict(pipeline.transformer.named_buffers())
        for name, tensor in tensors.items():
            # pipelines tell either; of a slice Wan's tells the parameter only once all its slices have come at once
            if f"transformer.{name}" in loaded or f"transformer.{parameter_slice(pipeline, name)[0]}" in loaded:
                bound += 1
                weight = held_weight(pipeline, own, name)
                held[name] = (fingerprint(weight), weight.numel() < tensor.numel())
        return bound, held


def of_all_workers(operation, push):
    """What a push came to on all workers, as of one: (modules or tensors that all have bound, {name: fingerprint}).

    `push` is this worker's: () -> (number bound, {name: (fingerprint of its part, whether it is one)}).
    """
    workers = _run_and_gather_rank_values(operation, push)
    held = {}
    for name in dict.fromkeys(name for _, parts in workers for name in parts):
        held[name] = whole_fingerprint([parts.get(name) for _, parts in workers])
    return min(bound for bound, _ in workers), held


def whole_fingerprint(parts):
    """The fingerprint of a tensor by that of each worker's part, or copy: the xor of the parts is that of the whole.

    None, which is no tensor's, where copies differ, or a worker has nothing.
    """
    if None in parts:
        return None
    values = [value for value, _ in parts]
    is_split = [part for _, part in parts]
    if all(is_split):
        return functools.reduce(operator.xor, values)
    return values[0] if len(set(values)) == 1 and not any(is_split) else None


def parameter_slice(pipeline, name):
    """The pipeline's name of the parameter that diffusers' weight `name` is, or is a slice of, as q, k and v are.

    With the layer's slices before this one and with it, (0, 1) for k; None where it is the whole.
    """
    name = pipeline.weight_name(name)
    for stacked, part, shard in pipeline.transformer.stacked_params_mapping:
        if part in name:
            return name.replace(part, stacked), "qkv".index(shard)
    return name, None


def held_weight(pipeline, own, name):
    """The tensor, of the transformer's `own`, that diffusers' weight `name` was loaded into."""
    parameter, number = parameter_slice(pipeline, name)
    if number is None:
        return own[parameter]
    layer = pipeline.transformer.get_submodule(parameter.rpartition(".")[0])
    sizes = [size // layer.tp_size for size in layer.output_sizes]  # rows of q, k and v that this worker has
    return own[parameter].narrow(0, sum(sizes[:number]), sizes[number])
