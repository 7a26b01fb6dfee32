"""`torch.cuda` for the fake device: what a CPU build of torch lacks in Python, and the ledger of what was asked for.

Streams and events do nothing, as everything has happened when an operator returns. Memory figures are the library's
counts. Random states are kept and given back, and no kernel draws from them: the scripts draw on the CPU.
"""

import contextlib
import importlib.util
import os
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fake_cuda.build import NAME

import torch
import torch.distributed as dist

HERE = str(Path(__file__).parent)
MEMORY = 80 * 10**9  # bytes of each device, as torch.cuda tells them; nothing runs out of memory
# kinds of entries for which the host waits until the device has done all that it was given
WAITS = ("read", "index", "up, waits", "down, waits", "synchronize")


# ---- the ledger ------------------------------------------------------------------------------------------------------
class Ledger:
    """Waits, copies, kernels and bytes of one process, by phase of the run and by line of ours."""

    def __init__(self, device: types.ModuleType, root: Path) -> None:
        self.device = device
        self.root = f"{root}{os.sep}"
        self.lines: Counter[tuple[str, str, str]] = Counter()  # (phase, kind, line) -> times
        self.bytes: Counter[tuple[str, str, str]] = Counter()
        self.kinds: Counter[str] = Counter()  # since the phase began
        self.moved: Counter[str] = Counter()  # bytes "up" to the device and "down" from it, since the phase began
        self.num_passes = 0  # of the transformer, since the process began
        self.phase = "start"
        self.phases: list[dict[str, Any]] = []  # one for each time that a phase was gone through
        self.began = self.mark()

    def note(self, kind: str, operator: str, num_bytes: int = 0) -> None:
        """Enter that the host waited for the device, or that bytes passed between them."""
        key = (self.phase, f"{kind} ({operator})", self.line_of_ours())
        self.lines[key] += 1
        self.bytes[key] += num_bytes
        self.kinds[kind] += 1
        if num_bytes:
            self.moved[kind.split(",")[0]] += num_bytes

    def line_of_ours(self) -> str:
        """The innermost line of the script's project, and the script's own where that is another."""
        found = []
        frame = sys._getframe(2)
        while frame:
            name = frame.f_code.co_filename
            if name.startswith(self.root) and not name.startswith(HERE):
                found.append(f"{name.removeprefix(self.root)}:{frame.f_lineno}")
            frame = frame.f_back
        if not found:
            return "autograd's thread, or torch's"
        of_script = [line for line in found if os.sep not in line]
        return " < ".join(dict.fromkeys([found[0], *of_script[:1]]))

    def mark(self) -> dict[str, int]:
        """What a phase is compared with at its end."""
        self.device.reset_peak()
        self.kinds.clear()
        self.moved.clear()
        return {"kernels": self.device.num_kernels(), "passes": self.num_passes}

    def begin(self, phase: str) -> None:
        """Enter the sums of the phase that ends here, and begin another."""
        sums = {
            "phase": self.phase,
            "passes": self.num_passes - self.began["passes"],
            "kernels": self.device.num_kernels() - self.began["kernels"],
            "waits": sum(self.kinds[kind] for kind in WAITS),
            "copies": sum(n for kind, n in self.kinds.items() if kind.startswith(("up", "down"))),
            "empty_cache": self.kinds["empty_cache"],
            "bytes_up": self.moved["up"],
            "bytes_down": self.moved["down"],
            "peak_bytes": self.device.peak_bytes(),
        }
        if any(sums[name] for name in ("kernels", "waits", "copies", "empty_cache")):
            self.phases.append(sums)
        self.phase = phase
        self.began = self.mark()

    @contextlib.contextmanager
    def within(self, phase: str, then: str | None = None) -> Iterator[None]:
        """A phase. It interrupts the one around it, which continues behind it unless another is named."""
        outer = self.phase
        self.begin(phase)
        yield
        self.begin(then or outer)

    def report(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        self.begin("end")
        lines = [
            {"phase": phase, "kind": kind, "line": line, "times": times, "bytes": self.bytes[phase, kind, line]}
            for (phase, kind, line), times in self.lines.most_common()
        ]
        return {"phases": self.phases, "lines": lines}

    def watch_runs(self) -> None:
        """Take the phases that a Run times, and count each model's passes. Call it when the project can be imported.

        No curves are drawn, which takes a third of so short a run.
        """
        from common.models.family import Family
        from common.run import plots
        from common.run.run import Run

        timed = Run.timed
        make = Family.__init__

        @contextlib.contextmanager
        def timed_phase(run: Run, name: str, **options: Any) -> Iterator[None]:
            with self.within(name, then="between"), timed(run, name, **options):
                yield

        def counted(family: Family, *args: Any, **kwargs: Any) -> None:
            make(family, *args, **kwargs)
            predict, encode = family.predict_velocity, family.encode_prompts

            def predict_velocity(*args: Any, **kwargs: Any) -> torch.Tensor:
                self.num_passes += 1
                return predict(*args, **kwargs)

            def encode_prompts(*args: Any, **kwargs: Any) -> dict:
                with self.within("encode"):
                    return encode(*args, **kwargs)

            family.predict_velocity = predict_velocity
            family.encode_prompts = encode_prompts

        plots.draw_panels = lambda panels, path: path.touch()
        Run.timed = timed_phase
        Family.__init__ = counted


# ---- streams and events ----------------------------------------------------------------------------------------------
class Stream:
    """The one stream of the device, on which everything has happened already."""

    ledger: Ledger
    cuda_stream = 0
    priority = 0
    device_type = 1  # as torch numbers kinds of devices
    stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.device_index = self.device.index

    def wait_stream(self, other: "Stream") -> None: ...

    def wait_event(self, event: "Event") -> None: ...

    def synchronize(self) -> None:
        self.ledger.note("synchronize", "Stream.synchronize")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """A point in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record()

    def record(self, stream: Stream | None = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None:
        Stream.ledger.note("synchronize", "Event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.seconds - self.seconds)


# ---- torch.cuda ------------------------------------------------------------------------------------------------------
def import_library(path: Path) -> types.ModuleType:
    """The library as a Python module."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(library: Path, num_devices: int, root: Path) -> Ledger:
    """Make "cuda" a device of this process. The library must have been loaded before torch (launch.py).

    root: the folder of the project whose lines the ledger names.
    """
    assert torch.version.cuda is None, "the fake device is for a CPU build of torch"
    device = import_library(library)
    device.set_num_devices(num_devices)
    ledger = Ledger(device, root)
    device.observe(ledger.note)
    Stream.ledger = ledger
    for name, value in functions(device, ledger, num_devices).items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, value if isinstance(value, type) else apart(value))
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.current_device_index = device.current_device
    torch.accelerator.current_stream = lambda device=None: Stream()
    torch.accelerator.device_count = lambda: num_devices
    let_storages_resize(device)
    let_nccl_be_found(device)
    return ledger


def apart(function: Callable) -> Callable:
    """The same function as an object of its own: torch's compiler keeps a rule for each function of torch.cuda."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def functions(device: types.ModuleType, ledger: Ledger, num_devices: int) -> dict[str, Any]:
    """What takes the place of torch.cuda's own, by name."""
    state = torch.zeros(16, dtype=torch.uint8)  # of the generator: seed and offset

    def set_device(where: Any) -> None:
        index = where if isinstance(where, int) else torch.device(where).index
        if index is not None and index >= num_devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        device.exchange_device(-1 if index is None else index)

    def set_rng_state(new_state: torch.Tensor, *where: Any) -> None:
        state.copy_(new_state)

    properties = types.SimpleNamespace(
        name="fake CUDA", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32
    )
    live: Callable[..., int] = lambda *where: device.live_bytes()
    peak: Callable[..., int] = lambda *where: device.peak_bytes()
    nothing: Callable[..., None] = lambda *args: None
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": nothing,
        "init": nothing,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: num_devices,
        "current_device": device.current_device,
        "set_device": set_device,
        "_exchange_device": device.exchange_device,
        "_maybe_exchange_device": device.exchange_device,
        "get_device_name": lambda *where: properties.name,
        "get_device_capability": lambda *where: (properties.major, properties.minor),
        "get_device_properties": lambda *where: properties,
        "is_bf16_supported": lambda *args: True,
        # streams
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *where: Stream(),
        "default_stream": lambda *where: Stream(),
        "set_stream": nothing,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *where: ledger.note("synchronize", "torch.cuda.synchronize"),
        # memory
        "empty_cache": lambda: ledger.note("empty_cache", "torch.cuda.empty_cache"),
        "memory_allocated": live,
        "max_memory_allocated": peak,
        "memory_reserved": live,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": nothing,  # the ledger has the peaks by phase
        "mem_get_info": lambda *where: (MEMORY - device.live_bytes(), MEMORY),
        # random states
        "get_rng_state": lambda *where: state.clone(),
        "set_rng_state": set_rng_state,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
    }


def let_storages_resize(device: types.ModuleType) -> None:
    """FSDP takes and gives back a block's memory by the size of its storage."""
    resize_on_cpu = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize_on_cpu(storage, num_bytes)
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (0,), (1,))
        device.resize_storage(view, num_bytes)
        return storage

    torch.UntypedStorage.resize_ = resize_


def let_nccl_be_found(device: types.ModuleType) -> None:
    """A process group of "nccl" is one of gloo on the same bytes, after NCCL's checks."""

    def make(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        return device.nccl(dist.ProcessGroupGloo(store, rank, size, timeout))

    begin = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        begin(backend and backend.replace("nccl", "fake_nccl"), *args, **kwargs)

    dist.Backend.register_backend("fake_nccl", make, devices=["cuda"])
    dist.init_process_group = init_process_group
    dist.is_nccl_available = lambda: True
