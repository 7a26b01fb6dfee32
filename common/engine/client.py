"""The trainer's end of the vLLM-Omni engine: one child process per rank, reached over a pipe with bounded waits.

A rank starts a VLLMEngine, pushes its policy's weights, and asks for images: `push_policy`, `generate`. `verify_policy`
proves once per run that a push arrives, and that the engine samples as the script does. This side needs no vLLM; the
child is `server.py`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.distributed import failing_together, gather_objects, stop_early
from common.engine import messages
from common.engine.environment import TIMEOUT_S, engine_environment, engine_gpus
from common.engine.mismatch import check_sampling
from common.errors import RunError, truncate
from common.images import as_images
from common.models import Family
from common.options import EngineArgs
from common.process import print_message, stop_requested
from common.rollout import Images, RolloutRequest, Trajectories
from common.weights import policy_tensors, reshard, whole

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from peft import LoraConfig  # slow

ATTENTION = {"native": "TORCH_SDPA", "cudnn": "CUDNN_ATTN", "flash": "FLASH_ATTN"}  # --attention -> vLLM-Omni's name
BUCKET_BYTES = 1e9  # of full weights that are sent to the engine at once, and at most one tensor more


# the fingerprints by name of what was pushed, and of what the engine holds
Fingerprints = tuple[dict[str, int], dict[str, int | None]]


class EngineError(RunError):
    """The engine's process failed, died, or did not answer in time."""


class VLLMEngine:
    """A vLLM-Omni engine in a child process, which serves one rank.

    The child ends when this process ends, however that happens. A call waits at most `timeout_s` for each answer: of a
    start, a chunk of images, a bucket of weights. It returns or raises EngineError, whose one line names the child's
    log; `generate` may wait for the other ranks before it does.
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
        self.has_full_weights = False  # whether full weights were pushed, in place of a LoRA
        self.is_ready = False
        self.is_asleep = False
        self.num_asked = 0
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_begins = self.log_file.stat().st_size if self.log_file.exists() else 0  # after another start's lines
        print_message(f"starting the rollout engine; its log: {self.log_file}")
        num_threads = num_threads or max(1, torch.get_num_threads() // len(gpus))
        if self.sleeps and gpus[0] is None:
            print_message("--engine_with sleep: on a CPU the engine has no GPU memory to give back")
        self.connection, child = Pipe()
        # -P: import nothing from the directory in which the run was started
        command = [sys.executable, "-P", "-m", "common.engine.server", str(child.fileno()), str(os.getpid())]
        with open(self.log_file, "ab") as log:
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
            "init_timeout": TIMEOUT_S,  # vLLM-Omni's own, of the start; 600 s otherwise
            "enable_sleep_mode": self.sleeps,
            "enforce_eager": "compile" not in engine_with,
            "diffusion_attention_config": {"default": {"backend": ATTENTION[attention]}},
        }
        messages.send(self.connection, (options, len(gpus)))

    def wait_ready(self) -> None:
        """Block until the engine has loaded.

        The first call is a collective: a signal or the end of --max_minutes, on any rank, ends all of them.
        """
        if self.is_ready:
            return
        try:
            self._answer(0, "start")
        except EngineError:
            if not stop_requested():
                raise
        if any(gather_objects(stop_requested())):  # no step has begun: there is nothing to finish
            stop_early("the rollout engine starts")
        self.is_ready = True

    # ---- sampling ----------------------------------------------------------------------------------------------------
    def generate(
        self,
        request: RolloutRequest,
        lora: bool = True,
        finished: Callable[[range, Images], None] | None = None,
        alone: bool = False,
    ) -> Trajectories:
        """Sample a request's images with the policy that was pushed last or, with `lora=False`, with the base model.

        The request is cut into chunks of max_num_seqs images, each with its own `timeout_s`. An engine that has taken
        full weights has no base model any more.

        Args:
            finished: gets each chunk's image numbers and images, while the engine samples the next chunk. An exception
                that it raises ends the call; the engine can be used again.
            alone: whether another collective than Scorer.scores comes next on the other ranks.

        Raises:
            EngineError: the engine failed, died, or did not answer in time, and the rank samples alone.
            RolloutError: the same, but the other ranks raise it as well, in Scorer.scores: all can save.
        """
        try:
            return self._generate(request, lora, finished)
        except EngineError as error:
            if alone:
                raise
            with failing_together():  # the others are there when they have sampled
                raise error

    def _generate(
        self, request: RolloutRequest, lora: bool, finished: Callable[[range, Images], None] | None
    ) -> Trajectories:
        """`generate` on this rank. Raises EngineError."""
        on_cpu = request.cpu()
        chunks = torch.arange(len(request.seeds)).split(self.max_num_seqs)
        torch.cuda.empty_cache()  # for the engine, which is another process
        calls: list[int] = []
        answers = []
        images: Images = []
        for i, rows in enumerate(chunks):
            for ahead in chunks[len(calls) : i + 2]:  # the engine has the next chunk while this process waits for one
                call = self._ask(
                    "generate",
                    on_cpu.select(ahead),
                    lora=lora and not self.has_full_weights,
                    is_last=ahead is chunks[-1],
                )
                calls.append(call)
            answer = self._answer(calls[i], "generate")
            chunk_images = as_images(answer.pop("images").numpy())
            answers.append(answer)
            images += chunk_images
            if finished:
                finished(range(int(rows[0]), int(rows[-1]) + 1), chunk_images)
        tensors = {}
        for name in answers[0]:
            tensors[name] = torch.cat([answer[name] for answer in answers])
        self._fall_asleep()
        return Trajectories(**tensors, images=images)

    # ---- pushing weights ---------------------------------------------------------------------------------------------
    def push_policy(self, model: Family, name: str = "default") -> None:
        """Push policy `name` of the trainer's model, as `push` does. A collective, as sharded tensors are gathered."""
        self.push(*policy_tensors(model, name))

    def push(self, tensors: Mapping[str, torch.Tensor], config: "LoraConfig | None") -> None:
        """Replace the engine's policy by tensors with the names that diffusers and peft give them.

        With a LoraConfig the tensors are an adapter, {"module.lora_A.weight": tensor}. With None they are weights of
        the transformer, {"module.weight": tensor}, all or some of them. Sharded ones are gathered, full weights one at
        a time. A run pushes either adapters or full weights.

        Raises:
            EngineError: the engine lacks a tensor that was pushed, or holds another one.
        """
        self.has_full_weights = config is None
        pushed, held = self._push_lora(tensors, config) if config else self._push_weights(tensors)
        names = list(pushed | held)
        wrong = [name for name in names if held.get(name) != pushed.get(name)]
        if wrong:
            raise EngineError(
                f"the engine's policy is stale: {wrong[0]} in it is not what was pushed ({len(wrong)} of {len(names)} "
                f"tensors are not); its log: {self.log_file}"
            )
        self._fall_asleep()  # before the next rollout the trainer's text encoders come to this GPU

    def _push_lora(self, tensors: Mapping[str, torch.Tensor], config: "LoraConfig") -> Fingerprints:
        """Push an adapter; `config` is sent as the dict that vLLM reads."""
        peft_config = {
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "target_modules": sorted(config.target_modules or ()),
            "peft_type": "LORA",
            "bias": "none",
        }
        tensors = {name: whole(tensor).to("cpu", self.dtype) for name, tensor in tensors.items()}
        held = self._call("push_lora", tensors, peft_config)
        pushed = {}
        for name, tensor in tensors.items():
            # vLLM scales an adapter so: B alone, in the engine's dtype
            is_scaled = "lora_B" in name and config.lora_alpha != config.r
            pushed[name] = messages.fingerprint(tensor * (config.lora_alpha / config.r) if is_scaled else tensor)
        return pushed, held

    def _push_weights(self, tensors: Mapping[str, torch.Tensor]) -> Fingerprints:
        """Push full weights, bucket by bucket."""
        pushed: dict[str, int] = {}
        held: dict[str, int | None] = {}
        bucket: dict[str, torch.Tensor] = {}
        for name, shard in tensors.items():
            tensor = whole(shard).to(self.dtype)
            pushed[name] = messages.fingerprint(tensor)  # made before the copy, which it proves too
            bucket[name] = tensor.cpu()
            if sum(waiting.nbytes for waiting in bucket.values()) >= BUCKET_BYTES or len(pushed) == len(tensors):
                held |= self._call("push_weights", bucket)
                bucket = {}
        return pushed, held

    # ---- proving that a push arrives ---------------------------------------------------------------------------------
    def verify_policy(
        self,
        model: Family,
        request: RolloutRequest,
        sample_locally: Callable[[Family, RolloutRequest], Trajectories],
    ) -> None:
        """Push the trained policy for the first time, as `verify_push` does, and compare the engine's sampling of it
        with the script's own, sample_locally: `request` by the ODE and, if it has a noise level, by the SDE, in at most
        four of its sampling steps. A collective.

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
            check_sampling(one, ours, self.generate(one, alone=True), dtype)
        reshard(model.transformer)  # `load` writes to the shards: weights that passes have cast are out of date then

    def verify_push(
        self, tensors: Mapping[str, torch.Tensor], config: "LoraConfig | None", request: RolloutRequest
    ) -> None:
        """Push for the first time, and prove by the image of `request` that what is pushed acts.

        First comes a probe that must change the image: an adapter of the same modules, with noise in its zero matrices,
        or one of the full weights, scaled.

        Raises:
            EngineError: it does not change the image, or as `push`.
        """
        base = self.generate(request, lora=False, alone=True).latents
        generator = torch.Generator().manual_seed(0)
        probe = {}
        for name in tensors if config else [next(iter(tensors))]:
            tensor = whole(tensors[name])
            if config is None:
                probe[name] = tensor * 1.5
            elif "lora_B" in name:
                probe[name] = torch.randn(tensor.shape, generator=generator).to(tensor) * 0.1
            else:
                probe[name] = tensor
        self.push(probe, config)
        if torch.equal(self.generate(request, alone=True).latents, base):
            kind = "adapter" if config else "weight"
            raise EngineError(f"a pushed {kind} changes nothing in the engine's images; its log: {self.log_file}")
        self.push(tensors, config)

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
        """Kill the child. Its workers are of its process group, and have twenty seconds to end as it has.

        Until then so has multiprocessing's tracker, which removes the memory that they shared from /dev/shm.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a driver
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):  # none of them is left
            for _ in range(200):
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)
            os.killpg(self.process.pid, signal.SIGKILL)

    def _call(self, operation: str, *args: Any, **kwargs: Any) -> Any:  # each operation has its own
        return self._answer(self._ask(operation, *args, **kwargs), operation)

    def _fall_asleep(self) -> None:
        """With `sleeps`, move the weights to host memory until the next call, by vLLM-Omni's level 1."""
        if self.sleeps:
            self._call("sleep", 1)
            self.is_asleep = True

    def _ask(self, operation: str, *args: object, **kwargs: object) -> int:
        """Send a call. Returns its number, for _answer."""
        self.wait_ready()
        if self.is_asleep:
            torch.cuda.empty_cache()  # for the engine's weights
            self.is_asleep = False
            self._call("wake_up", ["weights"])
        self.num_asked += 1
        try:
            messages.send(self.connection, (self.num_asked, operation, args, kwargs))
        except ConnectionError:
            raise EngineError(self._describe_death(operation)) from None
        return self.num_asked

    def _answer(self, number: int, operation: str) -> Any:  # each operation has its own
        """Wait for the answer of a call. Answers of earlier calls, for which nobody waits any more, are dropped."""
        answered = -1
        while answered != number:
            self._wait_for_answer(operation)
            try:
                answered, succeeded, value = messages.receive(self.connection)
            except (EOFError, ConnectionError):
                raise EngineError(self._describe_death(operation)) from None
        if not succeeded:
            raise EngineError(
                f"the rollout engine failed during {operation}: {value}; Traceback and log: {self.log_file}"
            )
        return value

    def _wait_for_answer(self, operation: str) -> None:
        """Wait until the engine has sent something or has died, for at most timeout_s; longer, and it is killed."""
        deadline = time.monotonic() + self.timeout_s
        while not self.connection.poll(min(1.0, self.timeout_s)):
            if operation == "start" and stop_requested():
                self._kill()
                raise EngineError("stopped before it had loaded")  # `wait_ready` ends the run
            if time.monotonic() > deadline:
                self._kill()
                raise EngineError(
                    f"the rollout engine did not answer to {operation} within {self.timeout_s:g} s and was stopped; "
                    f"its log: {self.log_file}"
                )

    def _describe_death(self, operation: str) -> str:
        """One line: how the child ended, and where its log is."""
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:  # its pipe is closed but threads keep it alive
            self._kill()
            code = self.process.wait()
        how = f"exit code {code}"
        if code < 0:
            how += f", {signal.Signals(-code).name}"
        elif line := self._last_log_line():  # of a traceback the exception, such as that vLLM cannot be imported
            how += f", {truncate(line)}"
        return f"the rollout engine died during {operation} ({how}); its log: {self.log_file}"

    def _last_log_line(self) -> str:
        """The last line that this child has written to its log; "" if there is none."""
        with contextlib.suppress(OSError), open(self.log_file, "rb") as log:
            log.seek(self.log_begins)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1] if lines else ""
        return ""


def launch(args: EngineArgs, folder: Path, device: torch.device) -> VLLMEngine:
    """This rank's engine, by the options. It loads in the background, and logs to `folder`, the run's."""
    return VLLMEngine(
        args.model,
        args.dtype,
        args.rollout_batch_size or 32,
        folder / f"engine_rank{dist.get_rank()}.log",
        engine_with=args.engine_with,
        gpus=engine_gpus(args.engine_devices, device),
        attention=args.attention,
        family=args.family,
    )
