"""What several test files use: runs of the scripts, the embedded model with its policies, small inputs, the options.

Test modules import from here and never from each other. Scripts are imported inside the functions that need them, so
that a script that cannot be imported fails its own tests only.

Every test works in a temporary folder of its own, whatever lies in the checkout: the run of the README's first command
is in `runs/flow_grpo`, and a script that is checked or started there would refuse to write over it.
"""

import ast
import atexit
import collections
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import io
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from common import process
from common.cpu import repair_torchvision
from common.data import PromptSet
from common.engine import client
from common.engine.environment import engine_environment
from common.files import FORMAT, load_checkpoint, shards_of
from common.models.family import Family
from common.models.loading import family_class, load_model
from common.options import SharedArgs
from common.run import lock, plots
from common.run.checks import check_inputs
from common.run.inputs import Inputs
from common.run.run import Run
from common.scoring import Reward
from common.weights.lora import make_lora
from common.weights.policy import add_policies
from common.workload import Workload
from tests.warm_engine import fork_engines

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are those of a CPU, on a machine with GPUs too
repair_torchvision()  # as the scripts do

if "PYTEST_XDIST_WORKER" in os.environ:  # pytest -n 2: a core for each worker and for the processes that it starts
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["PYTEST_XDIST_WORKER"][2:]) % len(cores)]})
    torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "assets" / "embedded"
SCRIPTS = ["flow_grpo.py", "grpo_guard.py", "mix_grpo.py", "diffusion_nft.py", "dpo_offline.py"]
SIBLINGS = SCRIPTS[1:]
# a pass of so small a model costs about the same for 4 images as for 16; whole evaluations take most of so short a run
SMALL = ["--num_prompts", "4", "--group_size", "4", "--micro_batch_size", "8", "--rollout_batch_size", "16"]
SMALL += ["--num_inference_steps", "6", "--eval_num_inference_steps", "3", "--max_prompts", "8"]
CONSTANT = ["--lr_schedule", "constant"]  # a run that is lengthened has the steps of one that was longer from the start
SMALL += CONSTANT
TINY = ["--num_prompts", 4, "--group_size", 4, "--updates_per_rollout", 1, "--num_inference_steps", 6]
TINY += ["--eval_num_inference_steps", 3, "--max_prompts", 8, *CONSTANT]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the slow tests as well, where no file or folder is named")
    parser.addoption("--by_hand", action="store_true", help="those of tests/by_hand as well, where none is named")


def pytest_configure(config: pytest.Config) -> None:
    """`pytest` alone takes the fast tests. Where files, folders or -m are given, they say what runs."""
    is_alone = config.args_source != pytest.Config.ArgsSource.ARGS and not config.option.markexpr
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers of -n get both
        config.option.by_hand |= not is_alone
    if is_alone and not config.getoption("--all"):
        config.option.markexpr = "fast"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/by_hand has the tests of past studies and of calls on a GPU. They run where it is named."""
    return collection_path == Path(__file__).parent / "by_hand" and not config.option.by_hand or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many slow tests first: of two workers none is left with a long file when the other one is done."""
    num_slow = collections.Counter(item.path for item in items if "fast" not in item.keywords)
    items.sort(key=lambda item: -num_slow[item.path])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is named at once, for a run that is ended before its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        told = report.longreprtext.splitlines()
        said = next((line for line in told if line.startswith("E ")), told[-1] if told else "")
        print(f"\n{report.nodeid} ({report.when}): {said.removeprefix('E').strip()}", file=sys.stderr, flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --durations N: the seconds of the N slowest files."""
    seconds: collections.Counter[str] = collections.Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if config.option.durations:
        terminalreporter.section("slowest files")
        for file, spent in seconds.most_common(config.option.durations):
            terminalreporter.write_line(f"{spent:8.1f}s {file}")


# ---- packages that may be missing ------------------------------------------------------------------------------------
def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


needs_engine = pytest.mark.skipif(not is_installed("vllm_omni"), reason="vLLM-Omni is not installed")
needs_tensorboard = pytest.mark.skipif(not is_installed("tensorboard"), reason="tensorboard is not installed")
needs_wandb = pytest.mark.skipif(not is_installed("wandb"), reason="wandb is not installed")


UNTIMED: Any = SimpleNamespace(timed=lambda name: contextlib.nullcontext())  # in the place of a Run


def skip_without_engine() -> None:
    """For fixtures and helpers that start an engine."""
    if not is_installed("vllm_omni"):
        pytest.skip("vLLM-Omni is not installed")


# ---- the working directory -------------------------------------------------------------------------------------------
@pytest.fixture(scope="session", autouse=True)
def away_from_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For fixtures of a module, which are made before a test's own folder."""
    os.chdir(tmp_path_factory.mktemp("working_directory"))


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins in its `tmp_path`."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Puts the handlers of the stop signals back, which a Run that owns its folder replaces."""
    saved = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    yield
    process.catch_stop_signals(0)
    for number, handler in saved.items():
        signal.signal(number, handler)


# ---- runs of the scripts ---------------------------------------------------------------------------------------------
def torchrun(
    folder: Path,
    script: str | Path,
    *args: object,
    nproc: int = 1,
    check: bool = True,
    draw_curves: bool = False,
    timeout: float = 420,
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository in `folder`, on ranks that the warm process forks, in half the time that torchrun
    takes to start them. Returns the finished process, output as text.

    Where the run must succeed (check), an exit code other than 0 fails the test. Without draw_curves, an empty
    curves.png stands in for the curves.
    """
    done = run_warm(folder, str(ROOT / script), list(map(str, args)), nproc, timeout, draw_curves)
    assert not check or done.returncode == 0, done.stdout[-6000:]
    return done


@functools.cache
def warm_process(library: Path | None) -> subprocess.Popen[str]:
    """tests/warm.py, started at the first run; it ends with this process, which closes its stdin.

    library: that of the fake CUDA device, whose kernels run in one thread.
    """
    command = [sys.executable, str(ROOT / "tests" / "warm.py"), *([str(library)] if library else [])]
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if library else {})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes)


@functools.cache
def warm_engine_process() -> tuple[subprocess.Popen[bytes], Path, dict[str, str]]:
    """tests/warm_engine.py, its folder and its environment. It ends with this process, which closes its stdin."""
    environment = engine_environment(EMBEDDED, [None], torch.get_num_threads())
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    command = [sys.executable, "-P", str(ROOT / "tests" / "warm_engine.py"), str(folder / "engines")]
    with open(folder / "log", "wb") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
    return process, folder, environment


def warm_engines() -> tuple[str, dict[str, str]]:
    """The socket of the process that forks engines, started at the first run with one, and its environment."""
    skip_without_engine()
    process, folder, environment = warm_engine_process()
    while process.poll() is None and not (folder / "engines").exists():  # it imports
        time.sleep(0.05)
    if process.poll() is not None:
        pytest.fail(f"tests/warm_engine.py ended:\n{(folder / 'log').read_text()[-6000:]}")
    return str(folder / "engines"), environment


@contextlib.contextmanager
def forked_engines(fork_workers: bool = False) -> Iterator[None]:
    """The engines that are started within are forked from tests/warm_engine.py, where that process has the environment
    that they need: that of a folder, one thread, no compiled blocks. They start with a third of the work.

    fork_workers: an engine of several workers forks them from itself."""
    with mock.patch.object(client, "subprocess"):  # to put it back
        fork_engines(*warm_engines(), fork_workers=fork_workers)
        yield


def run_warm(
    folder: Path,
    script: str,
    options: list[str],
    num_ranks: int,
    timeout: float,
    draw_curves: bool = False,
    library: Path | None = None,
    output: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """A run whose ranks the warm process forks. Its return code is that of the rank that failed first, or 0. What they
    print is in a file of `folder`, or in `output`."""
    process, output = warm_process(library), output or folder / "output_of_ranks.txt"
    output.write_text("")
    request = {
        "folder": str(folder),
        "script": script,
        "options": options,
        "num_ranks": num_ranks,
        "port": free_port(),
        "environment": dict(os.environ),
        "output": str(output),
        "engines": warm_engines() if "vllm" in options else None,
        "draw_curves": draw_curves,
    }
    timer = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    finally:
        timer.cancel()
    if not answer:  # the process is gone, with its ranks
        warm_process.cache_clear()
        pytest.fail(f"{script} took more than {timeout} seconds, or its process ended:\n{output.read_text()[-6000:]}")
    code = next((code for code in json.loads(answer) if code), 0)
    return subprocess.CompletedProcess([script, *options], code, output.read_text())


# asks for a run of one rank, and ends as that did
ASKS = """#!{python}
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link, link.makefile("rw") as file:
    link.connect({path!r})
    print(json.dumps([os.getcwd(), *sys.argv[1:]]), file=file, flush=True)
    code, output = json.loads(file.readline())
print(output, end="")
sys.exit(code)
"""


@pytest.fixture
def warm_torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`torchrun` of PATH asks this process for a run on a rank that the warm process forks, one run at a time. Returns
    the folder that PATH begins with."""
    folder = Path(tempfile.mkdtemp())  # of a short name, as that of a socket must be
    program, path = folder / "torchrun", str(folder / "runs")
    program.write_text(ASKS.format(python=sys.executable, path=path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def serve(listener: socket.socket) -> None:
        while True:
            link, _ = listener.accept()
            with link, link.makefile("rw") as file:
                words = json.loads(file.readline() or "[]")
                if not words:  # the test is done
                    return
                at = next(i for i, word in enumerate(words) if word.endswith(".py"))
                done = run_warm(Path(words[0]), words[at], words[at + 1 :], 1, 420, output=folder / "output")
                print(json.dumps([done.returncode, done.stdout]), file=file, flush=True)

    warm_process(None)
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(path)
        listener.listen()
        served = pool.submit(serve, listener)
        yield folder
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(path)
        served.result()
    shutil.rmtree(folder)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs, perhaps one that nobody has waited for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def one_rank_environment() -> dict[str, str]:
    """The variables that torchrun sets for the only rank of a run."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def run_here(folder: Path, script: str, *options: object) -> str | int | None:
    """Run the `__main__` block of an (imported, perhaps patched) script in `folder`, as torchrun's only rank.

    Drawing the curves takes a third of so short a run, so that an empty curves.png stands in for them.
    Returns the line that the run ended with, or None.
    """
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    block = ast.parse((ROOT / script).read_text()).body[-1]
    assert ast.unparse(block.test) == "__name__ == '__main__'"
    handlers = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    try:
        with (
            mock.patch.dict(os.environ, one_rank_environment()),
            contextlib.chdir(folder),
            mock.patch.object(sys, "argv", [str(ROOT / script), *map(str, options)]),
            mock.patch.object(plots, "draw_panels", lambda panels, path: path.touch()),
        ):
            exec(compile(ast.Module(block.body, []), script, "exec"), vars(module), {})
    except SystemExit as error:
        return error.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if dist.is_initialized():  # the run ended by an error
            dist.destroy_process_group()
        while lock._locks:  # a run's lock lasts as long as its process, which continues here
            lock._locks.popitem()[1].release()
        freeze_imports(len(sys.modules) // 100)


@functools.cache
def freeze_imports(hundreds_of_modules: int) -> None:
    """The collection at a run's end leaves alone what was imported, as in tests/warm.py: it takes a second otherwise,
    which is half of a run of the toy model. Again where more has been imported since."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def run_and_resume(folder: Path, script: str, options: Sequence[object]) -> tuple[Path, Path]:
    """Two training steps in runs/whole; in runs/cut the same run, resumed where its first step ended. Returns both."""
    steps = ["--num_steps", 2, "--save_every", 1, "--eval_every", 2, *CONSTANT]
    assert run_here(folder, script, *options, *steps, "--name", "whole") is None
    whole, cut = folder / "runs" / "whole", folder / "runs" / "cut"
    cut_after_a_step(whole, cut)
    assert run_here(folder, script, *options, *steps, "--name", "cut", "--resume", "latest") is None
    return whole, cut


def cut_after_a_step(whole: Path, cut: Path) -> None:
    """Copy a run of two steps, with a checkpoint of each (--save_every 1), without what its second step has written."""
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "adapter")
    for path in (*(cut / "checkpoints").glob("step_000002*"), cut / "samples" / "0002"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:2]))


def new_run(
    folder: Path,
    rewards: dict[str, Reward] | None = None,
    *,
    script: str = "",
    checkpoint: Path | None = None,
    num_images: int = 0,
    **options: Any,
) -> Run:
    """A run in `folder`, with the shared options' defaults and these options."""
    args = SharedArgs(name=str(folder.absolute()), **options)
    return Run(args, rewards or {}, script=script, checkpoint=checkpoint, workload=small_workload(num_images))


def small_workload(num_images: int = 0) -> Workload:
    """A step that samples no images, with one optimizer step."""
    return Workload(num_images=num_images, num_prompts=1, sampled_steps=0, trained_steps=1, policies=("default",))


def checked(args: SharedArgs, inputs: Inputs) -> Inputs:
    """check_inputs, as `prepare` of a script with these options calls it."""
    schedules = {"--num_inference_steps": args.num_inference_steps} if hasattr(args, "num_inference_steps") else {}
    own = {name: getattr(args, name) for name in ("guidance_scale", "group_size") if hasattr(args, name)}
    return check_inputs(args, inputs, small_workload(), schedules=schedules, **own)


def assert_one_line(line: str | int | None, script: str = "flow_grpo.py") -> None:
    """That a run ended with a line of the form of every error: "SCRIPT: error: ..."."""
    assert isinstance(line, str), line
    assert line.startswith(f"{script}: error: ") and "\n" not in line, line


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, in order."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without times, speeds and memory, which differ between equal runs."""
    return [{k: v for k, v in row.items() if not k.startswith(("timing_", "perf/"))} for row in rows]


def whole_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's state and, in place of the shards of full weights, their whole "tensors" by name."""
    state = load_checkpoint(path)
    if state.pop("shards", None):
        reader = HuggingFaceStorageReader(str(shards_of(path)))
        sizes = reader.read_metadata().state_dict_metadata
        state["tensors"] = {name: torch.empty(sizes[name].size) for name in sorted(sizes)}
        dcp.load(state["tensors"], storage_reader=reader, no_dist=True)
    return state


def assert_same(state: Any, expected: Any) -> None:
    """That two states of a run, of nested dicts and lists, are equal: types, order of keys, and tensors to the bit."""
    assert type(state) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert state.dtype == expected.dtype and torch.equal(state, expected)
    elif isinstance(expected, dict):
        assert list(state) == list(expected)
        for key, value in expected.items():
            assert_same(state[key], value)
    elif isinstance(expected, list | tuple):
        for one, other in zip(state, expected, strict=True):
            assert_same(one, other)
    else:
        assert state == expected


# ---- small inputs ----------------------------------------------------------------------------------------------------
def brightness_reward(folder: str | Path) -> str:
    """A reward that moves no more than the pixels do, for runs that are compared to round-off: one grey level of one
    pixel can change what OCR reads."""
    path = Path(folder) / "brightness.py"
    path.write_text(
        "import numpy\n\n\ndef brightness(images, prompts, metadata):\n"
        "    return [numpy.asarray(image).mean() / 255 for image in images]\n"
    )
    return f"{path}:brightness"


def brightness_and_redness(folder: str | Path) -> list[str]:
    """Two such rewards."""
    brightness = brightness_reward(folder)
    path = Path(folder) / "redness.py"
    path.write_text(
        "import numpy\n\n\ndef redness(images, prompts, metadata):\n"
        "    return [numpy.asarray(image)[..., 0].mean() / 255 for image in images]\n"
    )
    return [brightness, f"{path}:redness"]


def constant_reward(folder: str | Path) -> str:
    """A reward from which nothing can be learned."""
    path = Path(folder) / "constant.py"
    path.write_text("def constant(images, prompts, metadata):\n    return [0.1] * len(images)\n")
    return f"{path}:constant"


def good_adapter() -> dict[str, torch.Tensor]:
    """The tensors of a LoRA, as diffusers names them."""
    return {"transformer.a.lora_A.weight": torch.ones(2, 3), "transformer.a.lora_B.weight": torch.ones(3, 2)}


def good_state() -> dict[str, Any]:
    """What a script saves, small."""
    return {
        "format": FORMAT,
        "step": 10,
        "best": 0.5,
        "args": {"seed": 1, "reward": ("ocr",)},
        "sampler": {"position": 3},
        "rng": [{"torch": torch.arange(5)}],
        "policies": {"default": {"a.lora_A.weight": torch.arange(600.0).reshape(20, 30)}},
        "optimizer": {},
    }


def torch_bytes(value: object) -> bytes:
    """The bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def few_eval_prompts(folder: str | Path, count: int = 8) -> list[str | Path]:
    """A file with the first held-out prompts, for runs whose evaluation should be short."""
    path = Path(folder) / "eval.txt"
    path.write_text("\n".join((ROOT / "assets" / "eval_prompts.txt").read_text().splitlines()[:count]) + "\n")
    return ["--eval_prompts", path]


# ---- the embedded model in this process ------------------------------------------------------------------------------
@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of this process alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on_ranks(
    monkeypatch: pytest.MonkeyPatch, world_size: int, function: Callable[[int], Any]
) -> tuple[list[Any], list[torch.Tensor]]:
    """function(rank) on each of world_size ranks, which are threads of this process.

    Returns what each rank returned, and all tensors that a rank sent to another, or to all.
    """
    this = threading.local()
    together = threading.Barrier(world_size)
    slots: list[Any] = [None] * world_size
    boxes: dict[tuple[int, int], queue.Queue] = collections.defaultdict(queue.Queue)
    messages: list[torch.Tensor] = []

    def exchange(value: object) -> list[Any]:
        slots[this.rank] = value
        together.wait(60)
        found = list(slots)
        together.wait(60)
        return found

    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor) -> None:
        messages.append(tensor.clone())
        for part, other in zip(parts, exchange(tensor.clone()), strict=True):
            part.copy_(other)

    def all_gather_object(parts: list[Any], value: object) -> None:
        parts[:] = exchange(value)

    def isend(tensor: torch.Tensor, other: int) -> mock.Mock:
        messages.append(tensor.clone())
        boxes[this.rank, other].put(messages[-1])
        return mock.Mock()

    def recv(tensor: torch.Tensor, other: int) -> None:
        tensor.copy_(boxes[other, this.rank].get(timeout=60))

    def start(rank: int) -> object:
        this.rank = rank
        try:
            return function(rank)
        except BaseException:
            together.abort()
            raise

    replaced: dict[str, Callable] = {"get_rank": lambda: this.rank, "get_world_size": lambda: world_size}
    replaced |= {"all_gather": all_gather, "all_gather_object": all_gather_object, "isend": isend, "recv": recv}
    replaced |= {"barrier": lambda: exchange(None), "is_initialized": lambda: True}
    with monkeypatch.context() as patched, ThreadPoolExecutor(world_size) as threads:
        for name, stand_in in replaced.items():
            patched.setattr(dist, name, stand_in)
        running = [threads.submit(start, rank) for rank in range(world_size)]
        wait(running)
        failed = [e for run in running if (e := run.exception()) and not isinstance(e, threading.BrokenBarrierError)]
        if failed:
            raise failed[0]
        return [run.result() for run in running], messages


def prompt_set(prompts: Sequence[str]) -> PromptSet:
    """Prompts without metadata."""
    return PromptSet(list(prompts), [{}] * len(prompts))


def embedded_model(dtype: torch.dtype = torch.float32) -> Family:
    """The embedded model as it is, without a policy."""
    return load_model(family_class(EMBEDDED), EMBEDDED, dtype, torch.device("cpu"))


def lora_of(args: Any, family: type[Family]) -> Any:
    """The LoRA that a script's options ask for, as its `prepare` makes it."""
    return make_lora(
        family,
        model=args.model,
        path=args.lora_path,
        rank=args.lora_rank,
        alpha=args.lora_alpha,
        target_modules=args.lora_target_modules,
        base_weights=args.base_weights,
    )


def policy_without_fsdp(trained: bool = True, **changes: Any) -> tuple[Family, Any, Any]:
    """The embedded model with flow_grpo's LoRA, unsharded; `trained` gives it a LoRA that acts. `changes` are options.

    Returns the model, flow_grpo's Args and the LoraConfig.
    """
    flow_grpo = importlib.import_module("flow_grpo")
    args = dataclasses.replace(flow_grpo.Args(), num_inference_steps=6, eval_num_inference_steps=6, **changes)
    model = embedded_model(getattr(torch, args.dtype))
    lora = lora_of(args, type(model))
    add_policies(model, lora, ["default"], args.seed)
    if trained:
        for name, p in model.transformer.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.05)
    return model, args, lora.config


# ---- options ---------------------------------------------------------------------------------------------------------
def declared_options(path: Path, class_name: str) -> dict[str, str | None]:
    """{name of a field: its docstring, or None} of a dataclass, from its source."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    body = next(node for node in classes if node.name == class_name).body
    options = {}
    for field, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            is_docstring = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            options[field.target.id] = below.value.value if is_docstring else None
    return options


def shared_options() -> dict[str, str | None]:
    """The options that all five scripts have, by name, with their docstrings."""
    return declared_options(ROOT / "common" / "options.py", "SharedArgs")


def own_options(script: str) -> dict[str, str | None]:
    """The options that a script declares itself, by name, with their docstrings."""
    return declared_options(ROOT / script, "Args")


def unread_options(script: str) -> list[str]:
    """The options of a script, and the shared ones, that neither it nor common/ reads: as `args.NAME`, as `self.NAME`
    in common/options.py, or as "NAME" elsewhere in common/."""
    read = set()
    for path in [ROOT / script, *(ROOT / "common").rglob("*.py")]:
        declares = path.name == "options.py"  # where a name in quotes is part of a check, or of a message
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("args", "self"):
                if ast.unparse(node.value) != "self" or declares:
                    read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not declares:
                read.add(node.value)
    return sorted((shared_options() | own_options(script)).keys() - read)


# ---- sources of the scripts ------------------------------------------------------------------------------------------
def definitions(script):
    """{name: source} of the functions and classes of a script, its options apart."""
    source = (ROOT / script).read_text()
    lines = source.splitlines()
    nodes = [n for n in ast.parse(source).body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name != "Args"]
    return {node.name: lines[node.lineno - 1 : node.end_lineno] for node in nodes}


def option_sources(script):
    """{name of an option: its type, default and docstring} of those that a script declares itself."""
    tree = ast.parse((ROOT / script).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    declared = {node.target.id: ast.unparse(node) for node in body if isinstance(node, ast.AnnAssign)}
    return {name: (declared[name], docstring) for name, docstring in own_options(script).items()}


def differing(base, other):
    """Names that two dictionaries share, with values that differ."""
    return {name for name in base.keys() & other.keys() if base[name] != other[name]}
