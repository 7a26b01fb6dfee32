"""`python SCRIPT` without torchrun: a world of one rank in one process, which nobody can reach."""

from tests.conftest import ROOT, read_metrics, torchrun, without_times

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
# the script, in a process without a variable of torchrun's
ALONE = """import os, runpy
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
del os.environ["TORCHELASTIC_RUN_ID"]
runpy.run_path({script!r}, run_name="__main__")
"""


def test_python_alone_trains_as_torchrun_with_one_rank_and_opens_no_socket(tmp_path):
    """To the bit: metrics and the adapter. The other scripts join their world by the same function."""
    (tmp_path / "noted.py").write_text(NOTED)
    (tmp_path / "alone.py").write_text(ALONE.format(script=str(ROOT / "flow_grpo.py")))
    torchrun(tmp_path, "flow_grpo.py", *SMALLEST, "--name", "torchrun")
    (tmp_path / "sockets.txt").unlink()
    torchrun(tmp_path, tmp_path / "alone.py", *SMALLEST, "--name", "alone")
    assert set((tmp_path / "sockets.txt").read_text().splitlines()) == {"scored"}
    runs = [tmp_path / "runs" / name for name in ("torchrun", "alone")]
    expected, rows = (without_times(read_metrics(run)) for run in runs)
    assert rows == expected
    adapters = [(run / "adapter" / "pytorch_lora_weights.safetensors").read_bytes() for run in runs]
    assert adapters[0] == adapters[1]
