"""A process that has imported what the scripts import, and forks their ranks from itself.

Importing torch, diffusers, transformers and OCR takes half of a run of two steps. `torchrun` in conftest.py sends its
runs here; the tests of kills, signals and restarts start the real torchrun.

    python tests/warm.py [LIBRARY]  reads a line of JSON for each run from stdin, and answers with the ranks' exit codes

LIBRARY is that of the fake CUDA device, which tests/fake_cuda/launch.py installs in a rank: torch must find it loaded.
"""

import atexit
import gc
import importlib
import importlib.util
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from warm_engine import fork_engines

ROOT = Path(__file__).parents[1]
LIBRARIES = ("diffusers.models.autoencoders.autoencoder_kl", "diffusers.models.transformers.transformer_sd3")
LIBRARIES += ("diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3", "matplotlib.figure", "peft")
LIBRARIES += ("rapidocr.main", "scipy.stats", "torch.distributed.checkpoint.state_dict")
LIBRARIES += ("torch.distributed.fsdp", "tyro")
SECONDS_TO_END = 30  # of the other ranks, where one has failed


def become_rank(request: dict[str, Any], rank: int) -> None:
    """Take the folder, the variables, the arguments and the output that torchrun would give this rank."""
    num_ranks = request["num_ranks"]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "warm"}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"])}
    os.chdir(request["folder"])
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [request["script"], *request["options"]]
    parent = Path(request["script"]).parent
    sys.path[:1] = [str(ROOT)] if parent.name == "contrib" else [str(parent), str(ROOT)]
    random.seed()  # as a new process would be; the seed of hashes stays the same in all ranks
    importlib.import_module("numpy").random.seed()
    if request["engines"]:
        fork_engines(*request["engines"])
    if not request["draw_curves"]:
        plots = importlib.import_module("common.run.plots")
        plots.draw_panels = lambda panels, path: path.touch()


def run_script(script: Path) -> None:
    """Run the script as Python would, and end this process at once: Python's exit would look through all that warm.py
    has imported."""
    code = 1
    try:
        if script.parent.name == "contrib":  # torchrun -m contrib.NAME, at the root
            runpy.run_module(f"contrib.{script.stem}", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # waits for the threads that Python would wait for
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_for_all(ranks: list[int]) -> list[int]:
    """The exit codes of the ranks' processes, in the order in which they ended. Where one fails, the others are ended,
    as torchrun does."""
    codes: dict[int, int] = {}
    deadline = None
    while len(codes) < len(ranks):
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in ranks:
            codes[process] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            for other in set(ranks) - codes.keys():
                os.kill(other, signal.SIGKILL if deadline and time.monotonic() > deadline else signal.SIGTERM)
            deadline = deadline or time.monotonic() + SECONDS_TO_END
        time.sleep(0.02)
    return list(codes.values())


def serve() -> None:
    """Answer the requests. Returns in the processes of the ranks, which run the script."""
    for line in sys.stdin:
        request, ranks = json.loads(line), []
        for rank in range(request["num_ranks"]):
            process = os.fork()
            if not process:
                become_rank(request, rank)
                return
            ranks.append(process)
        print(json.dumps(wait_for_all(ranks)), flush=True)
    sys.exit()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:]:
        importlib.import_module("tests.fake_cuda.launch").load_before_torch(Path(sys.argv[1]))
    from common.cpu import repair_torchvision

    repair_torchvision()  # before peft is imported beside a CPU build of torch
    for name in LIBRARIES:
        if importlib.util.find_spec(name.partition(".")[0]):  # scipy comes with vLLM-Omni
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        del sys.modules[name]  # a run imports the project itself
    sys.path.pop(0)
    gc.freeze()  # a rank's collections leave alone what was imported, and copy none of its pages
    serve()
    run_script(Path(sys.argv[0]))
