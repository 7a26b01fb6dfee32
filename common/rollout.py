"""What a rollout is asked for and gives back, whichever engine makes it; and the vLLM-Omni engine as a child process.

The local engine is a loop in each script (sample with the training transformer itself). The vLLM-Omni engine has a
process of its own (`common/vllm_engine.py`), clean of torchrun's environment, reached over a pipe with bounded waits.
"""
import contextlib
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass, fields, replace
from multiprocessing import Pipe
from pathlib import Path

import torch
from PIL import Image


@dataclass
class RolloutRequest:
    """B images of U prompts: everything the policy is, apart from its weights. Both engines get the same."""

    conditioning: dict[str, torch.Tensor]  # of the U distinct prompts, (U, ...) each
    negative_conditioning: dict[str, torch.Tensor] | None  # of the one negative prompt, (1, ...); None without guidance
    prompt_index: torch.Tensor  # (B,), each image's row of `conditioning`
    seeds: list[int]  # (B,), each image's noise: its initial latents first, then one draw per SDE step
    timesteps: torch.Tensor  # (T,) fp32 in (0, 1000]
    sigmas: torch.Tensor  # (T + 1,) fp32
    latent_shape: tuple[int, ...]  # (C, h, w) of one image
    sde_steps: tuple[int, ...]  # the W stochastic steps, of 0..T-1; the others are ODE steps
    sde_type: str
    noise_level: float
    guidance_scale: float
    height: int
    width: int
    sigma_max: float | None = None  # see sde_step; None: the schedule's second sigma, sigmas[1]
    initial_latents: torch.Tensor | None = None  # (B, C, h, w) to go on from; None: drawn from the seeds
    multistep_from: int | None = None  # the step from which DPM-Solver++ 2M takes over; None: none

    def __post_init__(self):
        if self.sigma_max is None:
            self.sigma_max = self.sigmas[1].item()

    def cpu(self):
        """The same request with its tensors on the CPU, for another process."""
        names = ("conditioning", "negative_conditioning")
        on_cpu = {n: getattr(self, n) and {k: v.cpu() for k, v in getattr(self, n).items()} for n in names}
        start = self.initial_latents
        return replace(self, **on_cpu, initial_latents=None if start is None else start.cpu())

    def select(self, rows):
        """The same request for some of its images; conditioning is expanded to one row per image."""
        index = self.prompt_index[rows]
        return replace(self, conditioning={k: v[index.to(v.device)] for k, v in self.conditioning.items()},
                       prompt_index=torch.arange(len(index)), seeds=[self.seeds[i] for i in rows.tolist()],
                       initial_latents=None if self.initial_latents is None else self.initial_latents[rows])


@dataclass
class Trajectories:
    """What was sampled, in the request's order. fp32."""

    latents: torch.Tensor  # (B, T + 1, ...), from noise to final latents; (B, 1, ...), the final ones, where W is 0
    prev_sample_means: torch.Tensor  # (B, W, ...), of the W SDE steps
    log_probs: torch.Tensor  # (B, W), the engine's own
    transition_stds: torch.Tensor  # (B, W)
    images: list  # B PIL images

    @staticmethod
    def from_steps(initial, outputs, images):
        """From the initial latents (B, ...) and the SDEStepOutput of all T steps, SDE and ODE."""
        latents, sde = [initial, *(o.prev_sample for o in outputs)], [o for o in outputs if o.log_prob is not None]
        if not sde:
            return Trajectories(latents[-1][:, None], *[initial.new_zeros(len(initial), 0)] * 3, images)
        columns = ([o.prev_sample_mean for o in sde], [o.log_prob for o in sde], [o.transition_std for o in sde])
        return Trajectories(torch.stack(latents, 1), *(torch.stack(column, 1) for column in columns), images)

    def to(self, device):
        return Trajectories(*(getattr(self, f.name).to(device) for f in fields(self)[:-1]), self.images)

    @staticmethod
    def cat(parts):
        return Trajectories(*[torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Trajectories)[:-1]],
                            images=[image for p in parts for image in p.images])


def check_engine(rollout):
    """Raises ValueError with what to do, where `--rollout vllm` is asked for and vLLM-Omni is not installed."""
    if rollout == "vllm" and importlib.util.find_spec("vllm_omni") is None:
        raise ValueError("--rollout vllm needs vLLM-Omni, which is not installed: pip install -r requirements.txt "
                         "(requirements-cuda.txt on a GPU), or pass --rollout local")


class EngineError(RuntimeError):
    """The engine process failed, died or did not answer in time."""


class VLLMEngine:
    """A vLLM-Omni engine in a child process.

    It serves one rank. The child ends when this process does, however that ends; a call either returns, or raises
    EngineError with the child's traceback (or the end of its log) within `timeout_s`.
    """

    def __init__(self, model, dtype, max_num_seqs, log_file, timeout_s, visible_device=None, num_threads=None):
        """Start loading at once; the first call waits. `visible_device`: CUDA index for the child, or None on CPU."""
        self.timeout_s, self.log_file = timeout_s, Path(log_file)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.connection, child = Pipe()
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_") and k not in (
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
            "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")}
        here = Path(__file__).parent
        python_path = [str(here.parent), str(here / "vllm_plugin"), env.get("PYTHONPATH", "")]
        env |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": os.pathsep.join(python_path)}
        if Path(model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if visible_device is not None:
            names = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            env["CUDA_VISIBLE_DEVICES"] = names[visible_device] if len(names) > visible_device else str(visible_device)
        else:
            env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "OMP_NUM_THREADS": str(num_threads)}
        with open(self.log_file, "ab") as log:
            command = [sys.executable, "-m", "common.vllm_engine", str(child.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            pass_fds=[child.fileno()])
        child.close()
        self._send("start", {"model": str(model), "dtype": dtype, "max_num_seqs": max_num_seqs})
        self.ready = False

    def wait_ready(self):
        """Block until the engine has loaded; returns the seconds it took from its own start."""
        if not self.ready:
            self.startup_s, self.ready = self._receive("start"), True
        return self.startup_s

    def generate(self, request, lora=True):
        """RolloutRequest -> Trajectories, with the adapter last pushed or (`lora=False`) with the base model."""
        answer = self._call("generate", request.cpu(), lora=lora)
        return Trajectories(**{**answer, "images": [Image.fromarray(pixels) for pixels in answer["images"].numpy()]})

    def push_lora(self, tensors, config):
        """Replace the adapter: {"module.lora_A.weight": tensor} on the CPU, as peft names them, and its LoraConfig.

        Returns the number of modules the engine bound.
        """
        config = {"r": config.r, "lora_alpha": config.lora_alpha, "target_modules": sorted(config.target_modules),
                  "peft_type": "LORA", "bias": "none"}
        return self._call("push_lora", tensors, config)

    def verify_push(self, tensors, config, request):
        """Push the adapter for the first time, and prove that pushing works: an adapter of the same modules, with noise
        in its zero matrices, must bind every module, change the image of `request`, and leave the base model's alone.

        Raises:
            EngineError: saying which of the three failed.
        """
        base = self.generate(request, lora=False)
        generator = torch.Generator().manual_seed(0)
        probe = {k: torch.randn(v.shape, generator=generator).to(v) * 0.1 if "lora_B" in k else v
                 for k, v in tensors.items()}
        bound, modules = self.push_lora(probe, config), len(tensors) // 2
        if bound != modules:
            raise EngineError(f"the engine bound {bound} of the adapter's {modules} modules; its log: {self.log_file}")
        if torch.equal(self.generate(request).latents, base.latents):
            raise EngineError(f"a pushed adapter changes nothing in the engine's images; its log: {self.log_file}")
        if not torch.equal(self.generate(request, lora=False).latents, base.latents):
            raise EngineError(f"a pushed adapter changes the engine's base model too; its log: {self.log_file}")
        self.push_lora(tensors, config)

    def close(self):
        if self.process.poll() is None:
            self.connection.close()  # end of file: the child leaves its loop
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _call(self, operation, *args, **kwargs):
        self.wait_ready()
        self._send(operation, (operation, args, kwargs))
        return self._receive(operation)

    def _send(self, operation, message):
        self._bounded(operation, self.connection.send_bytes, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _receive(self, operation):
        ok, value = pickle.loads(self._bounded(operation, self.connection.recv_bytes))
        if not ok:
            raise EngineError(f"the rollout engine failed during {operation}; its traceback "
                              f"(log: {self.log_file}):\n{value}")
        return value

    def _bounded(self, operation, function, *args):
        """function(*args), for timeout_s at most: a stopped engine blocks a read and, its pipe full, a write too."""
        outcome = []

        def run():
            with contextlib.suppress(EOFError, OSError):  # the pipe closed: the engine died, which is told below
                outcome.append(function(*args))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if thread.is_alive():
            self.process.kill()
            raise EngineError(f"the rollout engine did not answer to {operation} within {self.timeout_s:g} s "
                              f"(--engine_timeout_s) and was stopped; its log: {self.log_file}")
        if not outcome:
            raise EngineError(self._describe_death(operation))
        return outcome[0]

    def _describe_death(self, operation):
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:  # its pipe is closed but threads keep it alive
            self.process.kill()
            self.process.wait()
        tail = self.log_file.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"the rollout engine died during {operation} (exit code {self.process.returncode}); "
                          f"the end of its log, {self.log_file}:", *tail])
