"""Run a script on a CUDA device made of host memory, and write down what it asked of the device:

    torchrun --standalone --nproc_per_node 2 tests/fake_cuda/launch.py flow_grpo.py --rollout local --num_steps 1

The script runs unchanged, with real numbers. $FAKE_CUDA_REPORT names a folder: each rank writes rank0.json, rank1.json
... into it, with counts by phase and by line. $FAKE_CUDA_DEVICES is the number of devices, by default one a rank.
README.md beside this file says what is checked, and what cannot be seen.
"""

import atexit
import ctypes
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_before_torch(library: Path) -> None:
    """Load torch's libraries and ours, in this order: torch asks for CUDA's hooks once, when it is imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    for path in (Path(spec.origin).parent / "lib" / "libtorch_python.so", library):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    sys.path[0] = str(ROOT)
    from tests.fake_cuda.build import built_library, library

    path = library()
    if not path.exists():
        path = built_library()  # imports torch, too late for this process
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]])
    load_before_torch(path)
    from tests.fake_cuda.torch_cuda import install  # imports torch

    num_devices = int(os.environ.get("FAKE_CUDA_DEVICES") or os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ledger = install(path, num_devices, script.parent)
    sys.path[0] = str(script.parent)  # as Python starts a script; the project may be another checkout's
    sys.argv = [str(script), *sys.argv[2:]]
    if (script.parent / "common").is_dir():
        ledger.watch_runs()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        folder = os.environ.get("FAKE_CUDA_REPORT")
        if folder:
            report = Path(folder) / f"rank{os.environ.get('RANK', '0')}.json"
            report.write_text(json.dumps(ledger.report(), indent=1))
    # autograd has a thread for each device, which asks for Python's lock as it starts. On a busy machine that can be
    # after this line, and a thread that asks while Python ends aborts the process: so Python does not end here
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
