"""`python SCRIPT` without torchrun: a world of one rank in one process, which nobody can reach."""

import os
import subprocess
import sys

from tests.conftest import ROOT, read_metrics, torchrun, without_times

import pytest

SMALLEST = ["--rollout", "local", "--num_prompts", 2, "--group_size", 4, "--num_inference_steps", 4, "--num_steps", 1]
SMALLEST += ["--eval_every", 1, "--max_prompts", 2, "--eval_num_inference_steps", 3, "--reward", "noted.py:noted"]
# brightness, and a line for each socket that the trainer has open while it scores
NOTED = """import numpy, psutil
def noted(images, prompts, metadata):
    with open("sockets.txt", "a") as file:
        file.write("scored\\n")
        file.writelines(f"{socket}\\n" for socket in psutil.Process().net_connections(kind="inet"))
    return [numpy.asarray(image).mean() / 255 for image in images]
"""


@pytest.mark.parametrize("script", ["flow_grpo.py", "contrib/awm.py"])
def test_python_alone_trains_as_torchrun_with_one_rank_and_opens_no_socket(script, tmp_path):
    """To the bit: metrics and the adapter."""
    (tmp_path / "noted.py").write_text(NOTED)
    torchrun(tmp_path, script, *SMALLEST, "--name", "torchrun")
    (tmp_path / "sockets.txt").unlink()
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    start = ["-m", "contrib.awm"] if script == "contrib/awm.py" else [ROOT / script]
    command = [*map(str, [sys.executable, *start, *SMALLEST]), "--name", "alone"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert set((tmp_path / "sockets.txt").read_text().splitlines()) == {"scored"}
    runs = [tmp_path / "runs" / name for name in ("torchrun", "alone")]
    expected, rows = (without_times(read_metrics(run)) for run in runs)
    assert rows == expected
    adapters = [(run / "adapter" / "pytorch_lora_weights.safetensors").read_bytes() for run in runs]
    assert adapters[0] == adapters[1]
