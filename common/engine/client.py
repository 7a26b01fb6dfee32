"""The trainer's end of the vLLM-Omni engine: one child process per rank, reached over a pipe with bounded waits.

A rank starts a VLLMEngine, pushes its policy's weights, and asks for images: `push_policy`, `generate`. `verify_policy`
proves once per run that a push arrives, and that the engine samples as the script does. This side needs no vLLM; the
child is `server.py`.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common.distributed import gather_objects, stop_early
from common.engine import messages
from common.engine.launch import engine_environment
from common.engine.mismatch import check_sampling
from common.errors import RunError
from common.models.family import Family, Images
from common.process import print_message, stop_requested
from common.rollout import RolloutRequest, Trajectories
from common.weights.attention import ENGINE_NAMES
from common.weights.policy import policy_tensors, reshard

import numpy as np
import torch
from PIL import Image

if TYPE_CHECKING:
    from peft import LoraConfig  # slow

FULL_WEIGHTS = "full weights"
LORA = "a LoRA"
TIMEOUT_S = 1800.0  # longer than any start, chunk of images or push should take
BUCKET_BYTES = 1e9  # at most so many bytes of full weights are on their way to the engine at once

Result = TypeVar("Result")


class EngineError(RunError):
    """The engine's process failed, died, or did not answer in time."""


class VLLMEngine:
    """A vLLM-Omni engine in a child process, which serves one rank.

    The child ends when this process ends, however that happens. A call returns within `timeout_s`, or raises
    EngineError, whose one line names the child's log.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: str,
        max_num_seqs: int,
        log_file: str | Path,
        timeout_s: float = TIMEOUT_S,
        gpus: Sequence[int | None] = (None,),
        num_threads: int | None = None,
        engine_with: Collection[str] = (),
        attention: str = "native",
        family: str | None = None,
    ) -> None:
        """Start to load and return at once. The first call waits until the engine has loaded.

        Args:
            model: a diffusers folder or hub id.
            dtype: "float32" or "bfloat16".
            max_num_seqs: images that are sampled together, at most.
            log_file: where the child's output goes.
            timeout_s: seconds to wait for an answer.
            gpus: per worker that the transformer is split over, its CUDA index, or None on a CPU. A single worker is
                the child itself.
            num_threads: threads of each worker on a CPU. None: the workers share as many as this process has.
            engine_with: "sleep": the weights leave the GPU after `generate` and `push`, until the next call; "compile".
            attention: the kernel of the transformer's attention, as --attention names it.
            family: as --family names it.
        """
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.max_num_seqs = max_num_seqs
        self.timeout_s = timeout_s
        self.sleeps = "sleep" in engine_with
        self.log_file = Path(log_file)
        self.pushed: str | None = None  # LORA or FULL_WEIGHTS, once one was pushed
        self.startup_s: float | None = None
        self.is_asleep = False
        self.num_asked = 0
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        print_message(f"starting the rollout engine; its log: {self.log_file}")
        num_threads = num_threads or max(1, torch.get_num_threads() // len(gpus))
        if self.sleeps and gpus[0] is None:
            print_message("--engine_with sleep: on a CPU the engine has no GPU memory to give back")
        self.connection, child = Pipe()
        # -P: import nothing from the directory in which the run was started
        command = [sys.executable, "-P", "-m", "common.engine.server", str(child.fileno()), str(os.getpid())]
        with open(self.log_file, "ab") as log:
            self.log_begins = log.tell()  # earlier engines have written up to here
            self.process = subprocess.Popen(
                command,
                env=engine_environment(model, gpus, num_threads, "compile" in engine_with),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[child.fileno()],
                # a signal to the trainer's process group asks for a stop after the step; the engine must not get it
                start_new_session=True,
            )
        child.close()
        options = {
            "model": str(model),
            "family": family,
            "dtype": dtype,
            "max_num_seqs": max_num_seqs,
            "enable_sleep_mode": self.sleeps,
            "enforce_eager": "compile" not in engine_with,
            "diffusion_attention_config": {"default": {"backend": ENGINE_NAMES[attention]}},
        }
        self._bounded("launch", messages.send, self.connection, (options, len(gpus)))

    def wait_ready(self) -> float:
        """Block until the engine has loaded. Returns the seconds that it took, from the engine's own start.

        The first call is a collective: a signal or the end of --max_minutes, on any rank, ends all of them.
        """
        if self.startup_s is None:
            startup_s = 0.0
            try:
                startup_s = self._answer(0, "start")
            except EngineError:
                if not stop_requested():
                    raise
            if any(gather_objects(stop_requested())):  # no step has begun: there is nothing to finish
                stop_early("the rollout engine starts")
            self.startup_s = startup_s
        return self.startup_s

    # ---- sampling ----------------------------------------------------------------------------------------------------
    def generate(
        self,
        request: RolloutRequest,
        lora: bool = True,
        num_means: int | None = None,
        finished: Callable[[range, Images], None] | None = None,
    ) -> Trajectories:
        """Sample a request's images with the policy that was pushed last or, with `lora=False`, with the base model.

        The request is cut into chunks of max_num_seqs images, each with its own `timeout_s`. The engine has the next
        chunk already while this process waits for one. An engine that has taken full weights has no base model.

        Args:
            num_means: prev_sample_means are as large as the latents of the SDE steps, so only those of the first
                num_means images come back, and of the other images of their chunk. None: all of them.
            finished: gets each chunk's image numbers and images, while the engine samples the next chunk. An exception
                that it raises ends the call; the engine can be used again.

        Raises:
            EngineError: also where the number of steps, latents or log-probs is not the request's.
        """
        if self.pushed == FULL_WEIGHTS:
            if not lora:
                raise EngineError("the engine has taken full weights: it has no base model any more to generate with")
            lora = False  # the model itself is what was pushed
        on_cpu = request.cpu()
        num_images = len(request.seeds)
        chunks = []
        for start in range(0, num_images, self.max_num_seqs):
            chunks.append(range(start, min(start + self.max_num_seqs, num_images)))

        wanted = num_images if num_means is None else num_means
        free_cached_memory()  # for the engine, which is another process
        asked = [self._ask_for(on_cpu, chunks, 0, lora=lora, num_means=wanted)]
        answers = []
        images: list[Any] = []  # Images
        for i, rows in enumerate(chunks):
            asked.append(self._ask_for(on_cpu, chunks, i + 1, lora=lora, num_means=wanted))
            answer = self._answer(asked[i], "generate")
            self._check_steps(request, answer)
            chunk_images = to_pil(answer.pop("images").numpy())
            answers.append(answer)
            images += chunk_images
            if finished:
                finished(rows, chunk_images)
        tensors = {}
        for name in answers[0]:
            tensors[name] = torch.cat([answer[name] for answer in answers if name in answer])
        self._fall_asleep()
        return Trajectories(**tensors, images=images)

    def _ask_for(self, request: RolloutRequest, chunks: list[range], i: int, lora: bool, num_means: int) -> int | None:
        """Ask for the images of the i-th chunk. Returns the call's number; None, and asks nothing, behind the last."""
        if i == len(chunks):
            return None
        part = select_images(request, chunks[i])
        means = chunks[i].start < num_means
        return self._ask("generate", part, lora=lora, means=means, is_last=i == len(chunks) - 1)

    def _check_steps(self, request: RolloutRequest, answer: dict[str, Any]) -> None:
        """Take num_steps out of an answer. Raises EngineError if the answer does not have the request's steps."""
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

    # ---- pushing weights ---------------------------------------------------------------------------------------------
    def push_policy(self, model: Family, name: str = "default") -> int:
        """Push policy `name` of the trainer's model, as `push` does. A collective, as sharded tensors are gathered."""
        tensors, config = policy_tensors(model, name)
        return self.push(tensors, config)

    def push(self, tensors: Mapping[str, torch.Tensor], config: "LoraConfig | None") -> int:
        """Replace the engine's policy by tensors with the names that diffusers and peft give them.

        With a LoraConfig the tensors are an adapter, {"module.lora_A.weight": tensor}. With None they are weights of
        the transformer, {"module.weight": tensor}, all or some of them. The Mapping of full weights is asked for one
        tensor at a time, in its order, so it may gather each tensor when it is asked for; then it needs a method
        `numel(name)`. A run pushes either adapters or full weights.

        Returns the number of modules of the adapter, or of tensors, that the engine has bound, which is all of them.

        Raises:
            EngineError: the engine did not bind all of them, holds a tensor that is not the one that was pushed, or
                has taken the other kind before.
        """
        kind = FULL_WEIGHTS if config is None else LORA
        if self.pushed not in (None, kind):
            raise EngineError(f"{kind} cannot be pushed to an engine that has taken {self.pushed}: one or the other")
        self.pushed = kind
        if config is None:
            bound = self._push_weights(tensors)
            expected = len(tensors)
            parts = "transformer's tensors"
        else:
            bound = self._push_lora(tensors, config)
            expected = len(tensors) // 2  # two matrices a module
            parts = "adapter's modules"
        if bound != expected:
            raise EngineError(f"the engine bound {bound} of the {expected} {parts}; its log: {self.log_file}")
        self._fall_asleep()  # before the next rollout the trainer's text encoders come to this GPU
        return bound

    def _push_lora(self, tensors: Mapping[str, torch.Tensor], config: "LoraConfig") -> int:
        """Push an adapter; `config` is sent as the dict that vLLM reads. Returns the number of modules bound."""
        peft_config = {
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "target_modules": sorted(config.target_modules or ()),
            "peft_type": "LORA",
            "bias": "none",
        }
        tensors = {name: tensor.to("cpu", self.dtype) for name, tensor in tensors.items()}
        bound, held = self._call("push_lora", tensors, peft_config)
        if bound == len(tensors) // 2:
            pushed = {}
            for name, tensor in tensors.items():
                # vLLM scales an adapter so: B alone, in the engine's dtype
                is_scaled = "lora_B" in name and config.lora_alpha != config.r
                pushed[name] = messages.fingerprint(tensor * (config.lora_alpha / config.r) if is_scaled else tensor)
            self._check_held(pushed, held)
        return int(bound)

    def _push_weights(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Push full weights, bucket by bucket. Returns the number of tensors bound."""
        bound = 0
        buckets = list(self._buckets(tensors))
        # one memory for all buckets: the first write to a page takes five times as long as the next
        memory = messages.Memory(max(num_bytes for _, num_bytes in buckets))
        try:
            for names, _ in buckets:
                memory.end = 0
                bucket = {}
                pushed = {}
                for name in names:
                    tensor = tensors[name].to(self.dtype)
                    if tensor.is_cuda:  # a GPU makes fingerprints sooner; made before the copy, they prove it too
                        pushed[name] = messages.fingerprint(tensor)
                    bucket[name] = memory.put(tensor)
                call = self._ask("push_weights", bucket, memory=memory)
                # the CPU's while the engine loads them
                pushed |= {name: messages.fingerprint(tensor) for name, tensor in bucket.items() if name not in pushed}
                bound_here, held = self._answer(call, "push_weights")  # it has copied the bucket
                if bound_here == len(names):
                    self._check_held(pushed, held)
                bound += bound_here
        finally:
            memory.close()
        return bound

    def _buckets(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[list[str], int]]:
        """The tensors' names in order, in lists of at most BUCKET_BYTES or of one tensor, each with its bytes."""
        names: list[str] = []
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

    def _check_held(self, pushed: dict[str, int], held: dict[str, int | None]) -> None:
        """Compare fingerprints of the tensors that were pushed and that the engine holds. Raises EngineError."""
        names = [*pushed, *(name for name in held if name not in pushed)]
        wrong = [name for name in names if held.get(name) != pushed.get(name)]
        if wrong:
            raise EngineError(
                f"the engine's policy is stale: {wrong[0]} in it is not what was pushed ({len(wrong)} of {len(names)} "
                f"tensors are not); its log: {self.log_file}"
            )

    # ---- proving that a push arrives ---------------------------------------------------------------------------------
    def verify_policy(
        self,
        model: Family,
        request: RolloutRequest,
        sample_locally: Callable[[Family, RolloutRequest], Trajectories],
    ) -> None:
        """Push the trained policy for the first time, as `verify_push` does, and compare the engine's sampling of it
        with the script's own, sample_locally: `request` by the ODE and, if it has a noise level, by the SDE, in four of
        its sampling steps. A collective.

        Raises:
            EngineError: as `verify_push`.
            RunError: the two do not end at the same latents.
        """
        tensors, config = policy_tensors(model)
        self.verify_push(tensors, config, request)
        num_steps = len(request.timesteps)
        kept = torch.linspace(0, num_steps - 1, min(num_steps, 4)).round().long()  # the last step is one of them
        sigmas = torch.cat([request.sigmas[kept], request.sigmas[-1:]])
        request = replace(request, timesteps=request.timesteps[kept], sigmas=sigmas, sigma_max=None)
        noisy_steps = range(len(kept) - 1 if request.noise_level > 0 else 0)
        undecoded = copy(model)  # latents are compared: the plan has no room for the trainer's VAE beside an engine
        undecoded.decode = lambda latents: []  # type: ignore[method-assign]  # of this copy alone
        for sde_steps in dict.fromkeys([(), tuple(noisy_steps)]):
            one = replace(request, sde_steps=sde_steps)
            # a graph for one image would make torch compile the blocks again, for any number of images
            with torch.compiler.set_stance("force_eager"):
                ours = sample_locally(undecoded, one.select(torch.arange(len(one.seeds)))).to("cpu")
            dtype = str(self.dtype).removeprefix("torch.")
            check_sampling(one, ours, self.generate(one), dtype)
        reshard(model.transformer)  # `load` writes to the shards: weights that passes have cast are out of date then

    def verify_push(
        self, tensors: Mapping[str, torch.Tensor], config: "LoraConfig | None", request: RolloutRequest
    ) -> None:
        """Push for the first time, and prove by the image of `request` that pushing works.

        LoRA: an adapter of the same modules, with noise in its zero matrices, must change the image, and must not
        change the base model's image. Full weights: `tensors` must be those of the model that the engine has loaded.
        The largest tensor, scaled, must change the image; all of them must bring the image back to the bit.

        Raises:
            EngineError: saying which of these failed.
        """
        if config is None:
            self._verify_weights(tensors, request)
        else:
            self._verify_lora(tensors, config, request)

    def _verify_lora(self, tensors: Mapping[str, torch.Tensor], config: "LoraConfig", request: RolloutRequest) -> None:
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

    def _verify_weights(self, tensors: Mapping[str, torch.Tensor], request: RolloutRequest) -> None:
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

    # ---- calls to the child ------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End the child. It has 20 s to leave by itself, then it is killed."""
        if self.process.poll() is not None:
            return
        self.connection.close()  # the child reads the end of the pipe, and leaves its loop
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()

    def _kill(self) -> None:
        """Kill the child and its workers, which are of its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _call(self, operation: str, *args: Any, **kwargs: Any) -> Any:  # each operation has its own
        return self._answer(self._ask(operation, *args, **kwargs), operation)

    def _fall_asleep(self) -> None:
        """With `sleeps`, move the weights to host memory until the next call."""
        if self.sleeps:
            self._call("fall_asleep")
            self.is_asleep = True

    def _ask(self, operation: str, *args: object, memory: messages.Memory | None = None, **kwargs: object) -> int:
        """Send a call. Returns its number, for _answer. memory: as for messages.send."""
        self.wait_ready()
        if self.is_asleep:
            free_cached_memory()  # for the engine's weights
            self.is_asleep = False
            self._call("get_up")
        self.num_asked += 1
        self._bounded(operation, messages.send, self.connection, (self.num_asked, operation, args, kwargs), memory)
        return self.num_asked

    def _answer(self, number: int | None, operation: str) -> Any:  # each operation has its own
        """Wait for the answer of a call. Answers of earlier calls, for which nobody waits any more, are dropped."""
        answered = -1
        while answered != number:
            answered, succeeded, value = self._bounded(operation, messages.receive, self.connection)
        if not succeeded:
            raise EngineError(
                f"the rollout engine failed during {operation}: {value}; Traceback and log: {self.log_file}"
            )
        return value

    def _bounded(self, operation: str, function: Callable[..., Result], *args: object) -> Result:
        """function(*args), for at most timeout_s: a stopped engine blocks a read and, if the pipe is full, a write."""
        outcome = []
        refused: list[Exception] = []  # what cannot be sent, or must not be read

        def run() -> None:
            try:
                outcome.append(function(*args))
            except (EOFError, OSError):  # the pipe closed: the engine died, as is reported below
                return
            except (TypeError, pickle.UnpicklingError) as error:
                refused.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        deadline = time.monotonic() + self.timeout_s
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(min(1.0, self.timeout_s))
            if operation == "start" and stop_requested():
                self._kill()
                raise EngineError("stopped before it had loaded")  # `wait_ready` ends the run
        if thread.is_alive():
            self._kill()
            raise EngineError(
                f"the rollout engine did not answer to {operation} within {self.timeout_s:g} s and was stopped; "
                f"its log: {self.log_file}"
            )
        if refused:
            raise EngineError(f"{operation}: {refused[0]}; the engine's log: {self.log_file}") from refused[0]
        if not outcome:
            raise EngineError(self._describe_death(operation))
        return outcome[0]

    def _describe_death(self, operation: str) -> str:
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


def select_images(request: RolloutRequest, images: range) -> RolloutRequest:
    """The request for some of its images, on the CPU, with the conditioning of each of their prompts once."""
    rows = torch.tensor(images)
    prompts, prompt_index = request.prompt_index[rows].unique(return_inverse=True)
    start = request.initial_latents
    return replace(
        request,
        conditioning={name: tensor[prompts] for name, tensor in request.conditioning.items()},
        negative_conditioning=request.negatives_of(prompts),
        prompt_index=prompt_index,
        seeds=[request.seeds[row] for row in images],
        initial_latents=None if start is None else start[rows],
    )


def free_cached_memory() -> None:
    """Give the GPU memory back that torch caches of this process's freed tensors."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def num_elements(tensors: Mapping[str, torch.Tensor], name: str) -> int:
    """How many elements a tensor of a Mapping has. A Mapping with a method `numel` need not gather the tensor."""
    if hasattr(tensors, "numel"):
        return int(tensors.numel(name))
    return tensors[name].numel()


def to_pil(pixels: np.ndarray) -> Images:
    """(b, height, width, 3) uint8 -> b PIL images; (b, frames, height, width, 3) -> b videos, lists of PIL frames."""
    if pixels.ndim == 5:
        return [[Image.fromarray(frame) for frame in video] for video in pixels]
    return [Image.fromarray(image) for image in pixels]
