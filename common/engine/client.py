"""The trainer's end of the vLLM-Omni engine: a child process per rank, reached over a pipe with bounded waits."""

import contextlib
import importlib.util
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path

from common.errors import RunError
from common.rollout import Trajectories
from common.stops import say

import torch
from PIL import Image

FULL_WEIGHTS = "full weights"
LORA = "a LoRA"
TENSORS_PER_MESSAGE = 16  # of full weights on their way to the engine: a message of all would be the model once more
# The trainer's variables that the engine gets: none with a key to a service, and not the RANK, WORLD_SIZE ... of
# torchrun, from which an engine would take itself for one of its workers
ENGINE_VARIABLES = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ|TMPDIR|TMP|TEMP|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|PYTHON.*|"
    "(LC|XDG|CONDA)_.*|CC|CXX|CPATH|LIBRARY_PATH|"
    "(HTTP|HTTPS|ALL|NO|http|https|all|no)_(PROXY|proxy)|(REQUESTS|CURL)_CA_BUNDLE|SSL_CERT_(FILE|DIR)|"
    "VLLM_(?!API_KEY).*|(HF|TRANSFORMERS|DIFFUSERS|TORCH|TORCHINDUCTOR|PYTORCH|ATEN|TRITON|FLASHINFER)_.*|HUGGING.*|"
    "(CUDA|NVIDIA|NCCL|CUBLAS|CUDNN|GOMP|KMP|MKL|MALLOC|GLIBC)_.*|OMP_(WAIT_POLICY|PROC_BIND|PLACES)"
)
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # which a model in a folder does not need


class EngineError(RunError):
    """The engine process failed, died or did not answer in time."""


def check_engine(rollout, family):
    """Look for vLLM-Omni, and for our hooks into its pipeline of the family, where `--rollout vllm` asks for them.

    Raises:
        ValueError: one is not there; with what to do.
    """
    if rollout != "vllm":
        return
    if getattr(family, "engine_pipeline", None) is None:
        raise ValueError(f"--rollout vllm: {family.__name__} has no hooks into vLLM-Omni's steps: pass --rollout local")
    if importlib.util.find_spec("vllm_omni") is None:
        raise ValueError(
            "--rollout vllm needs vLLM-Omni, which is not installed: pip install -r requirements.txt "
            "(requirements-cuda.txt on a GPU), or pass --rollout local"
        )


class VLLMEngine:
    """A vLLM-Omni engine in a child process, which serves one rank.

    The child ends when this process does, however that ends. A call either returns, or raises EngineError, one line
    that names the child's log, within `timeout_s`.
    """

    def __init__(self, model, dtype, max_num_seqs, log_file, timeout_s, visible_device=None, num_threads=None):
        """Start loading at once; the first call waits.

        Args:
            model: a diffusers folder or hub id.
            dtype: "float32" or "bfloat16".
            max_num_seqs: images sampled at once, at most.
            log_file: where the child's output goes.
            timeout_s: seconds to wait for an answer.
            visible_device: CUDA index for the child, or None on CPU.
            num_threads: the child's, on CPU; None: as many as this process has.
        """
        self.timeout_s = timeout_s
        self.log_file = Path(log_file)
        self.pushed = None  # or LORA, or FULL_WEIGHTS
        self.ready = False
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        say(f"starting the rollout engine; its log: {self.log_file}")
        self.connection, child = Pipe()
        # -P: nothing is imported from the directory the run was started in
        command = [sys.executable, "-P", "-m", "common.engine.server", str(child.fileno()), str(os.getpid())]
        with open(self.log_file, "ab") as log:
            self.log_begins = log.tell()  # what is there is of the engines before this one
            self.process = subprocess.Popen(
                command,
                env=engine_environment(model, visible_device, num_threads or torch.get_num_threads()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[child.fileno()],
                # a signal to the trainer's process group asks for a stop after the step, and is not for the engine
                start_new_session=True,
            )
        child.close()
        self._send("start", {"model": str(model), "dtype": dtype, "max_num_seqs": max_num_seqs})

    def wait_ready(self):
        """Block until the engine has loaded; returns the seconds it took from its own start."""
        if not self.ready:
            self.startup_s = self._receive("start")
            self.ready = True
        return self.startup_s

    def generate(self, request, lora=True, finished=None):
        """RolloutRequest -> Trajectories, with what was last pushed or, `lora=False`, with the base model.

        An engine that has taken full weights no longer has the base model.

        Raises:
            EngineError: also where steps, latents or log-probs are not as many as the request asks for.
        """
        if self.pushed == FULL_WEIGHTS:
            if not lora:
                raise EngineError("the engine has taken full weights: it has no base model any more to generate with")
            lora = False  # what was pushed is the model itself
        answer = self._call("generate", request.cpu(), lora=lora)
        num_steps = answer.pop("num_steps")
        num_latents = answer["latents"].shape[1]
        num_log_probs = answer["log_probs"].shape[1]
        steps = len(request.timesteps)
        sde_steps = len(request.sde_steps)
        latents = steps + 1 if sde_steps else 1
        if (num_steps, num_latents, num_log_probs) != (steps, latents, sde_steps):
            raise EngineError(
                f"the engine took {num_steps} sampling steps where {steps} were asked for, and gave "
                f"{num_latents} latents and {num_log_probs} log-probs for {sde_steps} SDE steps; its log: "
                f"{self.log_file}"
            )
        pixels = answer.pop("images").numpy()  # (B, height, width, 3) uint8, of videos (B, frames, height, width, 3)
        images = [to_pil(image) for image in pixels]
        if finished:
            finished(range(len(images)), images)
        return Trajectories(**answer, images=images)

    def push(self, tensors, config):
        """Replace the engine's policy: CPU tensors by the names that diffusers and peft give them.

        With a LoraConfig they are an adapter, {"module.lora_A.weight": tensor}; with None the transformer's own
        weights, {"module.weight": tensor}, all or some of them. A run pushes the one or the other. Returns how many
        modules of the adapter, or tensors, the engine bound: all.

        Raises:
            EngineError: saying what the engine did not bind, or that it has taken the other kind before.
        """
        kind = FULL_WEIGHTS if config is None else LORA
        if self.pushed not in (None, kind):
            raise EngineError(f"{kind} cannot be pushed to an engine that has taken {self.pushed}: one or the other")
        self.pushed = kind
        if config is None:
            bound = self._push_weights(tensors)
            expected = len(tensors)
            what = "transformer's tensors"
        else:
            bound = self._push_lora(tensors, config)
            expected = len(tensors) // 2  # two matrices a module
            what = "adapter's modules"
        if bound != expected:
            raise EngineError(f"the engine bound {bound} of the {expected} {what}; its log: {self.log_file}")
        return bound

    def _push_lora(self, tensors, config):
        """Returns how many modules the engine bound. `config` goes as the dict that vLLM reads."""
        peft_config = {
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "target_modules": sorted(config.target_modules),
            "peft_type": "LORA",
            "bias": "none",
        }
        return self._call("push_lora", tensors, peft_config)

    def _push_weights(self, tensors):
        """Returns how many tensors the engine bound, of all messages."""
        items = list(tensors.items())
        bound = 0
        for i in range(0, len(items), TENSORS_PER_MESSAGE):
            bound += self._call("push_weights", dict(items[i : i + TENSORS_PER_MESSAGE]))
        return bound

    def verify_push(self, tensors, config, request):
        """Push for the first time, and prove that pushing works.

        LoRA: an adapter of the same modules, with noise in its zero matrices, must change the image of `request` and
        leave the base model's alone. Full weights: `tensors` must be those of the model the engine has loaded; their
        largest one, scaled, must change the image, and all of them must bring it back to the bit.

        Raises:
            EngineError: saying which of these failed.
        """
        if config is None:
            self._verify_weights(tensors, request)
        else:
            self._verify_lora(tensors, config, request)

    def _verify_lora(self, tensors, config, request):
        base = self.generate(request, lora=False).latents
        generator = torch.Generator().manual_seed(0)
        probe = {}
        for name, tensor in tensors.items():
            if "lora_B" in name:
                noise = torch.randn(tensor.shape, generator=generator).to(tensor)
                probe[name] = noise * 0.1
            else:
                probe[name] = tensor
        self.push(probe, config)
        if torch.equal(self.generate(request).latents, base):
            raise EngineError(f"a pushed adapter changes nothing in the engine's images; its log: {self.log_file}")
        if not torch.equal(self.generate(request, lora=False).latents, base):
            raise EngineError(f"a pushed adapter changes the engine's base model too; its log: {self.log_file}")
        self.push(tensors, config)

    def _verify_weights(self, tensors, request):
        base = self.generate(request, lora=False).latents
        largest = max(tensors, key=lambda name: tensors[name].numel())
        self.push({largest: tensors[largest] * 1.5}, None)
        if torch.equal(self.generate(request).latents, base):
            raise EngineError(f"a pushed weight changes nothing in the engine's images; its log: {self.log_file}")
        self.push(tensors, None)
        if not torch.equal(self.generate(request).latents, base):
            raise EngineError(
                "the trainer's weights, pushed, do not give the image that the engine made from the same "
                f"model's files; its log: {self.log_file}"
            )

    def close(self):
        """End the child; it has 20 s to leave by itself."""
        if self.process.poll() is not None:
            return
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
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._bounded(operation, self.connection.send_bytes, data)

    def _receive(self, operation):
        answered, value = pickle.loads(self._bounded(operation, self.connection.recv_bytes))
        if not answered:
            raise EngineError(
                f"the rollout engine failed during {operation}: {value}; Traceback and log: {self.log_file}"
            )
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
            raise EngineError(
                f"the rollout engine did not answer to {operation} within {self.timeout_s:g} s "
                f"(--engine_timeout_s) and was stopped; its log: {self.log_file}"
            )
        if not outcome:
            raise EngineError(self._describe_death(operation))
        return outcome[0]

    def _describe_death(self, operation):
        """One line: how the child ended, and the last line of its log."""
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:  # its pipe is closed but threads keep it alive
            self.process.kill()
            self.process.wait()
        code = self.process.returncode
        how = f"exit code {code}"
        if code < 0:
            how += f", {signal.Signals(-code).name}"
        written_bytes = self.log_file.read_bytes()[self.log_begins :]
        lines = written_bytes.decode(errors="replace").splitlines()
        written = [line.strip() for line in lines if line.strip()]
        last = written[-1] if written else "nothing"
        return f"the rollout engine died during {operation} ({how}); its log, {self.log_file}, ends with: {last}"


def to_pil(pixels):
    """(height, width, 3) uint8 -> a PIL image; (frames, height, width, 3), a video -> the list of its frames."""
    if pixels.ndim == 4:
        return [to_pil(frame) for frame in pixels]
    return Image.fromarray(pixels)


def engine_environment(model, visible_device, num_threads):
    """The child's environment variables: those of this process's that it needs, and what vLLM-Omni is to find."""
    env = {}
    for name, value in os.environ.items():
        if ENGINE_VARIABLES.fullmatch(name):
            env[name] = value
    here = Path(__file__).parent
    python_path = [str(here.parents[1]), str(here / "plugin"), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(path for path in python_path if path)  # an empty one is the working directory
    env["VLLM_NO_USAGE_STATS"] = "1"
    if Path(model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
        for name in HUB_TOKENS:
            env.pop(name, None)
    if visible_device is not None:
        names = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        device = names[visible_device] if len(names) > visible_device else str(visible_device)
        env["CUDA_VISIBLE_DEVICES"] = device
    else:
        env["TORCHDYNAMO_DISABLE"] = "1"
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # one malloc arena: what is freed in one of several is not reused in another (benchmarks/engine_memory.py)
        env["MALLOC_ARENA_MAX"] = "1"
        env["OMP_NUM_THREADS"] = str(num_threads)
    return env
