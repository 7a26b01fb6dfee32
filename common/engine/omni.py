"""The trainer's calls as vLLM-Omni takes them: load an engine, sample a request's images, call its workers."""

import threading
from dataclasses import replace
from typing import Any

from common.engine import pipelines
from common.models import downloaded, plain_weights, quantize, to_unit_range
from common.rollout import RolloutRequest

import torch
from tqdm import tqdm
from vllm_omni.entrypoints import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.platforms import current_omni_platform


def load_engine(options: dict[str, Any], num_workers: int) -> Omni:
    """Load vLLM-Omni's engine with the rollout pipeline of the model's family.

    options: the arguments of Omni that the trainer chooses, and --family. num_workers: processes that the transformer
    is split over; with 1 the transformer is in this process.
    """
    # tqdm's default lock lies in a file in shared memory, which would be left behind if all processes were killed
    tqdm.set_lock(threading.RLock())
    family = options.pop("family", None)
    folder = downloaded(options["model"])  # the trainer's own files; vLLM-Omni would download the whole repository
    pipelines.use_pipeline_of(str(folder), family)
    if not pipelines.RolloutPipeline.supports_request_batch:
        options["max_num_seqs"] = 1
    stage = {
        # vLLM-Omni drops these as plain arguments (engine_backend=...) for a model for which it has a stage file
        "engine_backend": "common.engine.pipelines.RolloutDiffusionEngine",
        "tensor_parallel_size": num_workers,
        "devices": ",".join(map(str, range(num_workers))),
    }
    # vLLM-Omni imports its classes by name; the executor "uni" keeps the pipeline in this process
    with plain_weights(folder) as plain:
        return Omni(
            **options | {"model": str(plain)},
            distributed_executor_backend="uni" if num_workers == 1 else "common.engine.pipelines.RolloutExecutor",
            custom_pipeline_args={"pipeline_class": "common.engine.pipelines.RolloutPipeline", "family": family},
            stage_overrides={"0": stage},
            worker_extension_cls="common.engine.pipelines.RolloutWorkerExtension",
        )


def answer(omni: Omni, operation: str, *args: Any, **kwargs: Any) -> Any:  # each operation has its own
    """Answer a call of the trainer: `generate`, or a method of RolloutWorkerExtension, which its workers run."""
    if operation == "generate":
        return generate(omni, *args, **kwargs)
    result = omni.engine.collective_rpc(operation, args=args)  # it returns errors as dicts
    while isinstance(result, list):
        result = result[0]
    if isinstance(result, dict) and result.get("error"):
        raise RuntimeError(str(result["error"]))
    return result


# ---- sampling --------------------------------------------------------------------------------------------------------
def generate(omni: Omni, request: RolloutRequest, lora: bool, is_last: bool) -> dict[str, torch.Tensor]:
    """Sample the request's images, in its order. Returns fields of Trajectories on the CPU.

    The images are (B, height, width, 3) uint8, videos (B, frames, height, width, 3). vLLM-Omni gets a request per
    image.

    Args:
        lora: whether the adapter that was pushed acts.
        is_last: no chunk follows, so the GPU memory that this process has cached for the next one is released.
    """
    # what the images share; the tensors of each are in its prompt
    settings = replace(request, conditioning={}, negative_conditioning=None, initial_latents=None)
    params = OmniDiffusionSamplingParams(
        height=request.height,
        width=request.width,
        num_inference_steps=len(request.timesteps),
        guidance_scale=request.guidance_scale,
        true_cfg_scale=request.guidance_scale,  # Qwen-Image's name for it; FLUX.1 takes it with a negative prompt only
        lora_request=pipelines.POLICY_LORA if lora else None,
        extra_args={"request": settings},
    )
    pipelines.RolloutDiffusionEngine.images_to_come = len(request.seeds)
    outputs = omni.generate(image_prompts(request), params, use_tqdm=False)
    # they come in the order in which they were completed; an id begins with the number of the image
    outputs = sorted(outputs, key=lambda output: int(output.request_id.split("_")[0]))
    rollouts = [output.multimodal_output["metadata"]["rollout"] for output in outputs]
    fields = {
        "latents": torch.stack([output.trajectory_latents for output in outputs]),
        "prev_sample_means": torch.stack([rollout["prev_sample_means"] for rollout in rollouts]),
        "log_probs": torch.stack([output.trajectory_log_probs for output in outputs]),
        "transition_stds": torch.stack([rollout["transition_stds"] for rollout in rollouts]),
        "images": torch.cat([quantize(to_unit_range(image)) for output in outputs for image in output.images]),
    }
    if is_last:
        current_omni_platform.empty_cache()
    return fields


def image_prompts(request: RolloutRequest) -> list[dict[str, Any]]:
    """A dict per image: its conditioning by vLLM-Omni's names, its seed and, if given, its initial latents."""
    negative = request.negatives_of(request.prompt_index) or {}
    prompts = []
    for image, row in enumerate(request.prompt_index.tolist()):
        prompt: dict[str, Any] = {name: tensor[row] for name, tensor in request.conditioning.items()}
        for name, tensor in negative.items():
            prompt[f"negative_{name}"] = tensor[image % len(tensor)]  # a row for all images, or for each
        prompt["seed"] = request.seeds[image]
        if request.initial_latents is not None:
            prompt["initial_latents"] = request.initial_latents[image]
        prompts.append(prompt)
    return prompts
