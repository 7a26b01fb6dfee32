"""The trainer's end of the vLLM-Omni engine: a child process per rank, reached over a pipe with bounded waits."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

from common.engine import messages
from common.errors import RunError
from common.rollout import Trajectories
from common.stops import say

import torch
from PIL import Image

FULL_WEIGHTS = "full weights"
LORA = "a LoRA"
BUCKET_BYTES = 1e9  # of full weights that are on their way to the engine at once
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


def check_engine(rollout, family, model, engine_devices=(), tensor_parallel=1):
    """Look for vLLM-Omni, for our hooks into its pipeline of the family, and for GPUs of the engines' own, where
    `--rollout vllm`, `--engine_devices` and `--engine_tensor_parallel` ask for them. model: a folder or hub id.

    Raises:
        ValueError: one is not there; with what to do.
    """
    if engine_devices or tensor_parallel > 1:
        check_devices(rollout, engine_devices, tensor_parallel)
    if rollout != "vllm":
        return
    if getattr(family, "engine_pipeline", None) is None:
        raise ValueError(f"--rollout vllm: {family.__name__} has no hooks into vLLM-Omni's steps: pass --rollout local")
    if importlib.util.find_spec("vllm_omni") is None:
        raise ValueError(
            "--rollout vllm needs vLLM-Omni, which is not installed: pip install -r requirements.txt "
            "(requirements-cuda.txt on a GPU), or pass --rollout local"
        )
    if tensor_parallel > 1:
        check_heads(model, tensor_parallel)


def check_devices(rollout, engine_devices, tensor_parallel=1):
    """Raises ValueError where --engine_devices does not name the GPUs for the engine of each rank of this machine,
    tensor_parallel each, none of them a rank's own: those are the first ones. On a CPU none are needed."""
    option = f"--engine_devices {' '.join(map(str, engine_devices))}"
    if not engine_devices:
        option = f"--engine_tensor_parallel {tensor_parallel}"
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_gpus = torch.cuda.device_count()
    if rollout != "vllm":
        raise ValueError(f"{option}: with --rollout {rollout} there is no engine")
    if not engine_devices and num_gpus:
        raise ValueError(f"{option}: needs --engine_devices, {tensor_parallel} for each of the {num_ranks} ranks here")
    if not engine_devices:
        return
    needed = num_ranks * tensor_parallel
    if len(engine_devices) != needed or len(set(engine_devices)) != needed:
        each = "a GPU" if tensor_parallel == 1 else f"{tensor_parallel} GPUs (--engine_tensor_parallel)"
        raise ValueError(f"{option}: must be {each} for each of the {num_ranks} ranks of this machine")
    for index in engine_devices:
        if not num_ranks <= index < num_gpus:
            raise ValueError(
                f"{option}: of the {num_gpus} GPUs seen here, from 0, the first {num_ranks} are the ranks' own; "
                f"{index} is none of the others"
            )


def check_heads(model, tensor_parallel):
    """Raises ValueError where the attention heads of the transformer cannot be dealt out to the engine's workers."""
    from diffusers import AutoModel  # slow

    num_heads = AutoModel.load_config(model, subfolder="transformer")["num_attention_heads"]
    if num_heads % tensor_parallel:
        raise ValueError(f"--engine_tensor_parallel {tensor_parallel}: does not divide the model's {num_heads} heads")


def engine_gpus(engine_devices, tensor_parallel, device):
    """The CUDA index of each worker of the engine of the rank that trains on `device`; None of one on a CPU. The first
    two are as the options."""
    if engine_devices:
        first = device.index * tensor_parallel
        return engine_devices[first : first + tensor_parallel]
    return (device.index,) * tensor_parallel


class VLLMEngine:
    """A vLLM-Omni engine in a child process, which serves one rank.

    The child ends when this process does, however that ends. A call either returns, or raises EngineError, one line
    that names the child's log, within `timeout_s`.
    """

    def __init__(self, model, dtype, max_num_seqs, log_file, timeout_s, gpus=(None,), num_threads=None, sleeps=False):
        """Start loading at once; the first call waits.

        Args:
            model: a diffusers folder or hub id.
            dtype: "float32" or "bfloat16".
            max_num_seqs: images sampled at once, at most.
            log_file: where the child's output goes.
            timeout_s: seconds to wait for an answer.
            gpus: the CUDA index, or None on CPU, of each process that its transformer is split over; of one, the
                child itself.
            num_threads: of each, on CPU; None: they share as many as this process has.
            sleeps: whether its weights leave the GPU after `generate`, until the next call.
        """
        self.dtype = getattr(torch, dtype)
        self.max_num_seqs = max_num_seqs
        self.timeout_s = timeout_s
        self.sleeps = sleeps
        self.log_file = Path(log_file)
        self.pushed = None  # or LORA, or FULL_WEIGHTS
        self.ready = False
        self.is_asleep = False
        self.num_asked = 0
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        say(f"starting the rollout engine; its log: {self.log_file}")
        num_threads = num_threads or max(1, torch.get_num_threads() // len(gpus))
        if sleeps and gpus[0] is None:
            say("--engine_sleep: on a CPU the engine has no GPU memory to give back")
        self.connection, child = Pipe()
        # -P: nothing is imported from the directory the run was started in
        command = [sys.executable, "-P", "-m", "common.engine.server", str(child.fileno()), str(os.getpid())]
        with open(self.log_file, "ab") as log:
            self.log_begins = log.tell()  # what is there is of the engines before this one
            self.process = subprocess.Popen(
                command,
                env=engine_environment(model, gpus, num_threads),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[child.fileno()],
                # a signal to the trainer's process group asks for a stop after the step, and is not for the engine
                start_new_session=True,
            )
        child.close()
        options = {"model": str(model), "dtype": dtype, "max_num_seqs": max_num_seqs, "enable_sleep_mode": sleeps}
        self._bounded("start", messages.send, self.connection, (options, len(gpus)))

    def wait_ready(self):
        """Block until the engine has loaded; returns the seconds it took from its own start."""
        if not self.ready:
            self.startup_s = self._answer(0, "start")
            self.ready = True
        return self.startup_s

    def generate(self, request, lora=True, num_means=None, finished=None):
        """RolloutRequest -> Trajectories, with what was last pushed or, `lora=False`, with the base model.

        The request goes in chunks of max_num_seqs images, one ahead of the one that is waited for, each with its own
        `timeout_s`. `finished(rows, images)` gets each chunk's images and their numbers, a range, while the engine
        samples the next one; what it raises ends the call, and the engine can be used again. Of
        prev_sample_means, as large as the latents of the SDE steps, those of the first num_means images come back, and
        of the others of their chunk; None: all.

        An engine that has taken full weights no longer has the base model.

        Raises:
            EngineError: also where steps, latents or log-probs are not as many as the request asks for.
        """
        if self.pushed == FULL_WEIGHTS:
            if not lora:
                raise EngineError("the engine has taken full weights: it has no base model any more to generate with")
            lora = False  # what was pushed is the model itself
        on_cpu = request.cpu()
        num_images = len(request.seeds)
        chunks = []
        for start in range(0, num_images, self.max_num_seqs):
            chunks.append(range(start, min(start + self.max_num_seqs, num_images)))

        wanted = num_images if num_means is None else num_means
        free_cached_memory()  # for the engine, which is another process
        asked = [self._ask_for(on_cpu, chunks, 0, lora=lora, num_means=wanted)]
        answers = []
        images = []
        for i, rows in enumerate(chunks):
            asked.append(self._ask_for(on_cpu, chunks, i + 1, lora=lora, num_means=wanted))
            answer = self._answer(asked[i], "generate")
            self._check_steps(request, answer)
            # (b, height, width, 3) uint8, of videos (b, frames, height, width, 3)
            chunk_images = [to_pil(image) for image in answer.pop("images").numpy()]
            answers.append(answer)
            images += chunk_images
            if finished:
                finished(rows, chunk_images)
        tensors = {}
        for name in answers[0]:
            tensors[name] = torch.cat([answer[name] for answer in answers if name in answer])
        if self.sleeps:
            self._call("fall_asleep")
            self.is_asleep = True
        return Trajectories(**tensors, images=images)

    def _ask_for(self, request, chunks, i, lora, num_means):
        """Ask for the images of the i-th chunk; for nothing behind the last one. Returns the call's number."""
        if i == len(chunks):
            return None
        part = select_images(request, chunks[i])
        means = chunks[i].start < num_means
        return self._ask("generate", part, lora=lora, means=means, is_last=i == len(chunks) - 1)

    def _check_steps(self, request, answer):
        """Takes num_steps out of an answer. Raises EngineError where it is not of the request's steps."""
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

    def push(self, tensors, config):
        """Replace the engine's policy: tensors by the names that diffusers and peft give them.

        With a LoraConfig they are an adapter, {"module.lora_A.weight": tensor}; with None the transformer's own
        weights, {"module.weight": tensor}, all or some of them. These may be any Mapping, which is asked for one tensor
        at a time, in its order; with a method `numel` for one that is gathered only then. A run pushes the one or the
        other. Returns how many modules of the adapter, or tensors, the engine bound: all.

        Raises:
            EngineError: saying what the engine did not bind, which tensor it holds is not the one that was pushed, or
                that it has taken the other kind before.
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
        tensors = {name: tensor.to("cpu", self.dtype) for name, tensor in tensors.items()}
        bound, held = self._call("push_lora", tensors, peft_config)
        if bound == len(tensors) // 2:
            pushed = {}
            for name, tensor in tensors.items():
                # as vLLM scales an adapter: B alone, in the engine's dtype
                is_scaled = "lora_B" in name and config.lora_alpha != config.r
                pushed[name] = messages.fingerprint(tensor * (config.lora_alpha / config.r) if is_scaled else tensor)
            self._check_held(pushed, held)
        return bound

    def _push_weights(self, tensors):
        """Returns how many tensors the engine bound, of all buckets."""
        bound = 0
        for names, num_bytes in self._buckets(tensors):
            memory = messages.Memory(num_bytes)
            try:
                bucket = {name: memory.put(tensors[name], self.dtype) for name in names}
                call = self._ask("push_weights", bucket, memory=memory)
            finally:
                memory.close()
            # while the engine loads them
            pushed = {name: messages.fingerprint(tensor) for name, tensor in bucket.items()}
            bound_here, held = self._answer(call, "push_weights")
            if bound_here == len(names):
                self._check_held(pushed, held)
            bound += bound_here
        return bound

    def _buckets(self, tensors):
        """The tensors' names in order, in lists of BUCKET_BYTES at most or of one, each with its size in bytes."""
        names = []
        total = 0
        for name in tensors:
            num_bytes = messages.padded(num_elements(tensors, name) * self.dtype.itemsize)
            if names and total + num_bytes > BUCKET_BYTES:
                yield names, total
                names = []
                total = 0
            names.append(name)
            total += num_bytes
        if names:
            yield names, total

    def _check_held(self, pushed, held):
        """Compare fingerprints of what was pushed and what the engine holds. Raises EngineError where they differ."""
        names = [*pushed, *(name for name in held if name not in pushed)]
        wrong = [name for name in names if held.get(name) != pushed.get(name)]
        if wrong:
            raise EngineError(
                f"the engine's policy is stale: {wrong[0]} in it is not what was pushed ({len(wrong)} of {len(names)} "
                f"tensors are not); its log: {self.log_file}"
            )

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
        largest = max(tensors, key=lambda name: num_elements(tensors, name))
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
            self._kill()
            self.process.wait()

    def _kill(self):
        """End the child and its workers: they are of its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _call(self, operation, *args, **kwargs):
        return self._answer(self._ask(operation, *args, **kwargs), operation)

    def _ask(self, operation, *args, memory=None, **kwargs):
        """Send a call; returns its number, for _answer. memory: where all tensors of the arguments lie, if they do."""
        self.wait_ready()
        if self.is_asleep:
            free_cached_memory()  # for its weights
            self.is_asleep = False
            self._call("get_up")
        self.num_asked += 1
        self._bounded(operation, messages.send, self.connection, (self.num_asked, operation, args, kwargs), memory)
        return self.num_asked

    def _answer(self, number, operation):
        """Wait for the answer of a call. Those of calls before it, which nobody waits for any more, are dropped."""
        answers = -1
        while answers != number:
            answers, succeeded, value = self._bounded(operation, messages.receive, self.connection)
        if not succeeded:
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
            self._kill()
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
            self._kill()
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


def select_images(request, rows):
    """The request for some of its images, with the conditioning of each of their prompts once. On the CPU."""
    rows = torch.tensor(rows)
    prompts, prompt_index = request.prompt_index[rows].unique(return_inverse=True)
    start = request.initial_latents
    return replace(
        request,
        conditioning={name: tensor[prompts] for name, tensor in request.conditioning.items()},
        prompt_index=prompt_index,
        seeds=[request.seeds[row] for row in rows.tolist()],
        initial_latents=None if start is None else start[rows],
    )


def free_cached_memory():
    """Give back to the GPU what torch keeps of this process's freed tensors."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def num_elements(tensors, name):
    """How many elements a tensor of a Mapping has; without gathering it, where the Mapping tells."""
    if hasattr(tensors, "numel"):
        return tensors.numel(name)
    return tensors[name].numel()


def to_pil(pixels):
    """(height, width, 3) uint8 -> a PIL image; (frames, height, width, 3), a video -> the list of its frames."""
    if pixels.ndim == 4:
        return [to_pil(frame) for frame in pixels]
    return Image.fromarray(pixels)


def engine_environment(model, gpus, num_threads):
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
    if gpus[0] is not None:
        names = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        devices = [names[index] if len(names) > index else str(index) for index in gpus]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    else:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # its workers are all on this machine
        env["TORCHDYNAMO_DISABLE"] = "1"
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # one malloc arena: what is freed in one of several is not reused in another (benchmarks/engine_memory.py)
        env["MALLOC_ARENA_MAX"] = "1"
        env["OMP_NUM_THREADS"] = str(num_threads)
    return env
