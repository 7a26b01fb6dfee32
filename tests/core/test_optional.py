"""Optional parts of common/: what does not ask for one trains without it, and what does ends in one line.

import-linter sees that nothing imports a part (pyproject.toml); here they are deleted.
"""

import json
import re
import shutil
import subprocess
import sys

from tests.conftest import ROOT, run_warm, torchrun

import pytest
from PIL import Image

# part -> options of a run that asks for it
PARTS = {
    "curriculum.py": ["--curriculum", "mine.py:mine"],
    "engine": ["--rollout=vllm"],
    "pairs": None,  # of dpo_offline.py and contrib/sft.py alone
    "plan": ["--micro_batch_size", "0"],
    "files/parquet.py": ["--train_prompts", "prompts.parquet"],
    "files/pictures.py": ["--train_prompts", "edits.jsonl"],
    "rewards/preservation.py": ["--eval_prompts", "edits.jsonl"],
    "models/experts.py": None,  # of a model of two transformers
    "run/option_files.py": ["--args", "options.json"],
    "run/profiling.py": ["--profile_steps", "1"],
    "run/resuming.py": ["--resume", "runs/other"],
    "run/stop_rules.py": ["--stop_if", "val/ocr/mean>=0.9"],
    "run/tracking.py": ["--track", "tensorboard"],
    "run/utilisation.py": None,  # on GPUs, where a line says what is not logged
    "weights/adam_8bit.py": ["--adam_bits", "8"],
    "weights/adapter_files.py": ["--lora_path", "lora.safetensors"],
    "weights/base_weights.py": ["--base_weights", "int8"],
    "weights/prompt_cache.py": ["--prompt_cache", "cache"],
    "weights/shards.py": ["--lora_rank", "0"],
}
FAMILY = {"__init__", "family", "fingerprints", "loading", "long_prompts", "parts", "stable_diffusion_3", "vae"}
REWARD = {"__init__", "_loading", "_trial", "ocr"}
ONE_STEP = ["--rollout", "local", "--num_steps", "1", "--num_prompts", "2", "--group_size", "2", "--max_prompts", "2"]
COUNT = """
import runpy, sys
from pathlib import Path
runpy.run_path(sys.argv[0], run_name="__main__")
files = {module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
own = [Path(file) for file in files if "/common/" in file and "site-packages" not in file]
print("loaded:", len(own), "files,", sum(len(file.read_text().splitlines()) for file in own), "lines")
"""


@pytest.fixture
def copy(tmp_path):
    """flow_grpo.py with common/ and the embedded model, and the files that PARTS' options name."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "common", copy / "common", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "assets" / "embedded", copy / "assets" / "embedded")
    for name in ("flow_grpo.py", "assets/train_prompts.txt", "assets/eval_prompts.txt"):
        shutil.copy(ROOT / name, copy / name)
    Image.new("RGB", (96, 32)).save(copy / "a.png")
    (copy / "edits.jsonl").write_text(json.dumps({"prompt": 'a sign that says "4711"', "image": "a.png"}) + "\n")
    (copy / "mine.py").write_text("def mine(step, records, scores, weights):\n    return weights\n")
    (copy / "options.json").write_text(json.dumps({"num_steps": 1}))
    for name in ("prompts.parquet", "lora.safetensors"):
        (copy / name).touch()
    return copy


def delete(copy, part):
    place = copy / "common" / part
    shutil.rmtree(place) if place.is_dir() else place.unlink()


@pytest.mark.parametrize("part", PARTS)
def test_a_run_that_does_not_ask_for_a_part_trains_without_it(copy, part):
    delete(copy, part)
    assert "finished all 1 steps" in torchrun(copy, copy / "flow_grpo.py", *ONE_STEP).stdout


@pytest.mark.parametrize("part", [part for part in PARTS if PARTS[part]])
def test_a_run_that_asks_for_a_part_that_is_not_there_ends_in_one_line(copy, part):
    delete(copy, part)
    options = PARTS[part]
    done = run_warm(copy, str(copy / "flow_grpo.py"), [*ONE_STEP, *options], 1, timeout=100)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
    assert f"needs {copy / 'common' / part}".removesuffix(".py") in last, last
    assert any(word in last.replace(" ", "=") or word in last for word in (*options, "edits are scored")), last


def test_a_run_trains_without_all_parts_with_one_family_and_one_reward(copy):
    for part in PARTS:
        delete(copy, part)
    for folder, kept in (("models", FAMILY), ("rewards", REWARD)):
        for file in (copy / "common" / folder).glob("*.py"):
            if file.stem not in kept:
                file.unlink()
    command = [sys.executable, "-c", f"import sys; sys.argv[:] = sys.argv[1:]{COUNT}", "flow_grpo.py", *ONE_STEP]
    done = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0 and "finished all 1 steps" in done.stdout, done.stdout
    assert "leaked" not in done.stdout, done.stdout  # what a library says at exit of frozen objects
    loaded = re.search("loaded: .*", done.stdout)
    assert loaded
    print(loaded[0])  # `pytest -s` shows what the smallest run takes of common/
