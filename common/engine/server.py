"""The engine process: loads vLLM-Omni and answers the trainer's calls over a pipe, until the trainer is gone.

`client.py` runs it as `python -m common.engine.server FD PARENT`: the pipe's file descriptor and the trainer's process.
"""

import os
import queue
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

import common  # noqa: F401  (repairs torchvision before vllm imports it)
from common.engine import messages, pipelines

import torch
from tqdm import tqdm
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.platforms import current_omni_platform


def load_engine(options, num_workers):
    """vLLM-Omni's engine on the rollout pipeline of the model's family. `options`: those that come from the trainer;
    num_workers: processes that the transformer is split over, or 1 for this one."""
    from vllm_omni.entrypoints import Omni

    # in place of tqdm's own lock between processes: a file in shared memory, which a kill of all of them would leave
    tqdm.set_lock(threading.RLock())
    pipelines.use_pipeline_of(options["model"])
    if not pipelines.RolloutPipeline.supports_request_batch:
        options["max_num_seqs"] = 1
    stage = {
        # not as engine_backend and so on, which vLLM-Omni drops for a model that it has a stage file of
        "engine_backend": "common.engine.pipelines.RolloutDiffusionEngine",
        "tensor_parallel_size": num_workers,
        "devices": ",".join(map(str, range(num_workers))),
    }
    # vLLM-Omni imports its classes by name; the executor "uni" keeps the pipeline in this process
    return Omni(
        **options,
        enforce_eager=True,
        distributed_executor_backend="uni" if num_workers == 1 else "common.engine.pipelines.RolloutExecutor",
        diffusion_attention_config={"default": {"backend": "TORCH_SDPA"}},
        custom_pipeline_args={"pipeline_class": "common.engine.pipelines.RolloutPipeline"},
        stage_overrides={"0": stage},
        worker_extension_cls="common.engine.pipelines.RolloutWorkerExtension",
    )


def generate(omni, request, lora, means, is_last):
    """RolloutRequest -> fields of Trajectories as CPU tensors, and the number of steps taken.

    One engine request per image, in the request's order; `lora`: with the adapter that was pushed; `means`: with
    prev_sample_means; `is_last`: nothing follows, and the GPU memory that is cached for it is released. The images are
    (B, height, width, 3) uint8, videos (B, frames, height, width, 3).
    """
    params = OmniDiffusionSamplingParams(
        height=request.height,
        width=request.width,
        num_inference_steps=len(request.timesteps),
        guidance_scale=request.guidance_scale,
        true_cfg_scale=request.guidance_scale,  # Qwen-Image's name of it; FLUX.1 needs a negative prompt for it
        lora_request=pipelines.policy_lora() if lora else None,
        extra_args={"rollout": rollout_settings(request, means)},
    )
    pipelines.RolloutDiffusionEngine.images_to_come = len(request.seeds)
    outputs = omni.generate(image_prompts(request), params, use_tqdm=False)
    outputs = sorted(outputs, key=image_number)  # they come in completion order
    latents = [output.trajectory_latents for output in outputs]
    log_probs = [output.trajectory_log_probs for output in outputs]
    images = [quantize(image) for output in outputs for image in output.images]
    rollouts = [output.multimodal_output["metadata"]["rollout"] for output in outputs]
    stds = [rollout["transition_stds"] for rollout in rollouts]
    fields = {
        "latents": torch.stack(latents),
        "log_probs": torch.stack(log_probs),
        "transition_stds": torch.stack(stds),
        "num_steps": min(rollout["num_steps"].item() for rollout in rollouts),
        "images": torch.cat(images),
    }
    if means:
        fields["prev_sample_means"] = torch.stack([rollout["prev_sample_means"] for rollout in rollouts])
    if is_last:
        current_omni_platform.empty_cache()
    return fields


def rollout_settings(request, means):
    """What all images of a RolloutRequest share: what the pipeline's hooks read (pipelines.BatchUnderWay)."""
    return {
        "timesteps": request.timesteps,
        "sigmas": request.sigmas.tolist(),
        "sde_steps": request.sde_steps,
        "noise_level": request.noise_level,
        "sde_type": request.sde_type,
        "latent_shape": request.latent_shape,
        "sigma_max": request.sigma_max,
        "multistep_from": request.multistep_from,
        "means": means,
    }


def image_prompts(request):
    """A dict for each of the B images: its conditioning by vLLM-Omni's names, its seed and, if given, its latents."""
    negative = request.negative_conditioning or {}
    prompts = []
    for image, row in enumerate(request.prompt_index.tolist()):
        prompt = {name: tensor[row] for name, tensor in request.conditioning.items()}
        for name, tensor in negative.items():
            prompt[f"negative_{name}"] = tensor[0]
        prompt["seed"] = request.seeds[image]
        if request.initial_latents is not None:
            prompt["initial_latents"] = request.initial_latents[image]
        prompts.append(prompt)
    return prompts


def image_number(output):
    """Which image of the request an output is of: request ids begin with it."""
    return int(output.request_id.split("_")[0])


def quantize(image):
    """A decoded image (1, 3, H, W) in [-1, 1] -> (1, H, W, 3) uint8, as diffusers' image processor rounds it; a video
    (1, 3, F, H, W) -> (1, F, H, W, 3)."""
    unit = (image.float() / 2 + 0.5).clamp(0, 1)
    pixels = (unit * 255).round().to(torch.uint8)
    return pixels.movedim(1, -1).contiguous()


def rpc(omni, method, *args):
    """Call a method of RolloutWorkerExtension; collective_rpc returns errors as dicts, which are raised here."""
    result = omni.engine.collective_rpc(method, args=args)
    while isinstance(result, list):
        result = result[0]
    if isinstance(result, dict) and result.get("error"):
        raise RuntimeError(str(result["error"]))
    return result


def answer(omni, operation, *args, **kwargs):
    """What an operation of the trainer's gives: sampling, or a method of RolloutWorkerExtension."""
    if operation == "generate":
        return generate(omni, *args, **kwargs)
    return rpc(omni, operation, *args)


def read_calls(connection, calls):
    """Put what the trainer asks for into a queue, while what it asked for before is done; None at the end."""
    try:
        while True:
            calls.put(messages.receive(connection))
    except (EOFError, OSError):  # the trainer closed its end
        calls.put(None)


def write_answers(connection, answers):
    """Send (number of the call, whether it succeeded, a value or one line about what failed), while the next is done.

    The log, which is our stderr, has the rest of what failed.
    """
    while True:
        number, succeeded, value = answers.get()
        try:
            messages.send(connection, (number, succeeded, value))
        except (BrokenPipeError, ConnectionError):  # the trainer closed its end
            return
        except Exception as error:
            traceback.print_exc()
            messages.send(connection, (number, False, one_line(error)))


def one_line(error):
    """For the trainer's screen: an exception's kind and text, the end of it where it is long."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    if len(line) >= 400:
        line = f"... {line[-400:]}"
    return line


def serve(connection):
    """Load, then answer one call after another; what fails is told and the engine lives on."""
    start = time.time()
    calls = queue.SimpleQueue()
    answers = queue.SimpleQueue()
    threading.Thread(target=write_answers, args=(connection, answers), daemon=True).start()
    options, num_workers = messages.receive(connection)
    try:
        omni = load_engine(options, num_workers)
    except Exception as error:
        traceback.print_exc()
        messages.send(connection, (0, False, one_line(error)))
        return
    answers.put((0, True, time.time() - start))
    threading.Thread(target=read_calls, args=(connection, calls), daemon=True).start()
    while True:
        call = calls.get()
        if call is None:
            break
        number, operation, args, kwargs = call
        try:
            answers.put((number, True, answer(omni, operation, *args, **kwargs)))
        except Exception as error:
            traceback.print_exc()
            answers.put((number, False, one_line(error)))
        del call, args, kwargs  # tensors of full weights, which would wait here for the next ones
    omni.close()


def exit_with_parent(parent):
    """End this process once `parent` is no longer its parent, whatever else it is doing."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=exit_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    serve(Connection(int(sys.argv[1])))
