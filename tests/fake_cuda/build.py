"""Builds device.cpp once a machine, with the machine's C++ compiler:  python tests/fake_cuda/build.py

The library is kept in the user's cache folder ($XDG_CACHE_HOME/cleanflow/fake_cuda, or ~/.cache/...), under a hash of
its source, of how it is compiled, and of the versions of torch and Python. A build takes half a minute of CPU.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

NAME = "fake_cuda_device"  # as Python imports it
SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}")
REQUIRED = "FAKE_CUDA_REQUIRED"  # set by .ci/run: there, a test that cannot run is a failure and no skip


def compiler() -> str | None:
    """The C++ compiler, $CXX or g++ or c++; None where there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def why_not() -> str | None:
    """Why the device cannot be built or used here, in one line; None where it can."""
    import torch  # the launcher reads this file before torch is imported

    if sys.platform != "linux":
        return "the fake CUDA device needs Linux"
    if torch.version.cuda is not None:
        return f"torch {torch.__version__} has a CUDA of its own: the fake device takes its place in a CPU build only"
    if library().exists():
        return None
    if compiler() is None:
        return "no C++ compiler: the fake CUDA device is built with g++ (apt install g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python.h: the fake CUDA device is built with Python's headers (apt install python3-dev)"
    return None


def library() -> Path:
    """The file of the built library, which may not exist yet. Does not import torch."""
    key = hashlib.sha256(SOURCE.read_bytes())
    for text in (*FLAGS, version("torch"), sys.version, sysconfig.get_platform()):
        key.update(text.encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not os.access(nearest, os.W_OK):  # a home that cannot be written, as in some containers
        cache = Path(tempfile.gettempdir())
    return cache / "cleanflow" / "fake_cuda" / key.hexdigest()[:16] / f"{NAME}.so"


def built_library() -> Path:
    """The file of the library, built where it is not there yet. Processes that ask at the same time build it once.

    Raises:
        RuntimeError: it cannot be built here, with the reason; or with the compiler's first error.
    """
    path = library()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            reason = why_not()
            if reason:
                raise RuntimeError(reason)
            compile_to(path)
    return path


def compile_to(path: Path) -> None:
    """Compile SOURCE. The file appears under its name when it is complete."""
    from torch.utils.cpp_extension import include_paths, library_paths  # slow

    unfinished = path.with_suffix(f".{os.getpid()}")
    includes = [f"-I{folder}" for folder in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{folder}" for folder in library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    command = [compiler() or "g++", *FLAGS, *includes, str(SOURCE), "-o", str(unfinished), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError(f"{SOURCE.name}: {(errors or ['the compiler failed'])[0]}")
    unfinished.replace(path)


if __name__ == "__main__":
    print(built_library())
