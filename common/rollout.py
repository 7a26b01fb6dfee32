"""What a rollout is asked for and what it gives back, whichever engine makes it; and the vLLM-Omni engine as a child process.

The local engine is a loop in each script (sample with the training transformer itself). The vLLM-Omni engine lives in a process of
its own (`common/vllm_engine.py`), clean of torchrun's environment, and is reached over a pipe with bounded waits.
"""
import importlib.util
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from multiprocessing import Pipe
from pathlib import Path

import torch


@dataclass
class RolloutRequest:
    """B images of U prompts. Everything the policy is, apart from its weights, is in here; both engines get the same."""

    conditioning: dict[str, torch.Tensor]  # of the U distinct prompts, (U, ...) each
    negative_conditioning: dict[str, torch.Tensor] | None  # of the one negative prompt, (1, ...) each; None without guidance
    prompt_index: torch.Tensor  # (B,), each image's row of `conditioning`
    seeds: list[int]  # (B,), each image's noise: its initial latents first, then one draw per SDE step
    timesteps: torch.Tensor  # (T,) fp32 in (0, 1000]
    sigmas: torch.Tensor  # (T + 1,) fp32
    sde_steps: tuple[int, ...]  # the W stochastic steps, of 0..T-1; the others are ODE steps
    noise_level: float
    sde_type: str
    guidance_scale: float
    height: int
    width: int
    latent_shape: tuple[int, ...]

    def select(self, rows):
        """The same request for some of its images; conditioning is expanded to one row per image."""
        index = self.prompt_index[rows]
        return RolloutRequest(**{f.name: getattr(self, f.name) for f in fields(self)} | {
            "conditioning": {k: v[index.to(v.device)] for k, v in self.conditioning.items()},
            "prompt_index": torch.arange(len(index)), "seeds": [self.seeds[i] for i in rows.tolist()]})


@dataclass
class Trajectories:
    """What was sampled, in the request's order. fp32."""

    latents: torch.Tensor  # (B, T + 1, ...), from initial noise to the final latents
    prev_sample_means: torch.Tensor  # (B, W, ...), of the W SDE steps
    log_probs: torch.Tensor  # (B, W), the engine's own
    transition_stds: torch.Tensor  # (B, W)
    images: list  # B PIL images

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

    It serves one rank. The child ends when this process does, however that ends; a call either returns, or raises EngineError with the
    child's traceback (or the end of its log) within `timeout_s`.
    """

    def __init__(self, model, dtype, max_num_seqs, log_file, timeout_s, visible_device=None, num_threads=None):
        """Start loading at once; the first call waits for it. `visible_device`: CUDA index for the child, or None on CPU."""
        self.timeout_s, self.log_file = timeout_s, Path(log_file)
        self.connection, child = Pipe()
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_") and k not in (
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
            "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")}
        here = Path(__file__).parent
        env |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": os.pathsep.join([str(here.parent), str(here / "vllm_plugin"), env.get("PYTHONPATH", "")])}
        if Path(model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if visible_device is not None:
            visible = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
            env["CUDA_VISIBLE_DEVICES"] = visible[visible_device] if len(visible) > visible_device else str(visible_device)
        else:
            env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(num_threads)}
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "common.vllm_engine", str(child.fileno())], env=env, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, pass_fds=[child.fileno()])
        child.close()
        self._send({"model": str(model), "dtype": str(dtype).removeprefix("torch."), "max_num_seqs": max_num_seqs})
        self.ready = False

    def wait_ready(self):
        """Block until the engine has loaded; returns the seconds it took from its own start."""
        if not self.ready:
            self.startup_s, self.ready = self._receive("start"), True
        return self.startup_s

    def generate(self, request, images=True, lora=True):
        """Sample a RolloutRequest; `lora=False` samples the bare base model. Returns Trajectories without images decoded to PIL:
        `images` holds the decoded fp32 tensor (B, 3, H, W) in [-1, 1], or None."""
        return Trajectories(**self._call("generate", request, lora=lora))

    def push_lora(self, tensors, config):
        """Replace the adapter: {module.lora_A.weight: tensor} as peft names them, and {"r", "lora_alpha", "target_modules"}.

        Returns the number of modules the engine bound; it raises where one finds no module.
        """
        return self._call("push_lora", {k: v.detach().cpu() for k, v in tensors.items()}, config)

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
        self._send((operation, args, kwargs))
        return self._receive(operation)

    def _send(self, message):
        try:
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except (BrokenPipeError, ConnectionResetError):
            raise EngineError(self._describe_death("before a call")) from None

    def _receive(self, operation):
        deadline = time.monotonic() + self.timeout_s
        while not self.connection.poll(0.5):
            if self.process.poll() is not None and not self.connection.poll(0):
                raise EngineError(self._describe_death(f"during {operation}"))
            if time.monotonic() > deadline:
                self.process.kill()
                raise EngineError(f"the rollout engine did not answer to {operation} within {self.timeout_s:g} s "
                                  f"(--engine_timeout_s) and was stopped; its log: {self.log_file}")
        try:
            ok, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise EngineError(self._describe_death(f"during {operation}")) from None
        if not ok:
            raise EngineError(f"the rollout engine failed during {operation}; its traceback (log: {self.log_file}):\n{value}")
        return value

    def _describe_death(self, when):
        self.process.wait(10)
        tail = self.log_file.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"the rollout engine died {when} (exit code {self.process.returncode}); the end of its log, {self.log_file}:", *tail])
