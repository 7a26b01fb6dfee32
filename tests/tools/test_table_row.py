"""recipes/tables/: training and measurement of a published row, in one command."""

import json
import subprocess
import sys

from tests.conftest import EMBEDDED, ROOT, read_metrics
from tests.tiny_models import PublishedMLP, make_hpsv2

import pytest
import torch


def test_a_published_table_row_comes_from_one_recipe(tmp_path, monkeypatch):
    """Trained on OCR and measured on DrawBench with four rewards, the model and the networks being tiny."""
    for name in ("assets", "common", "flow_grpo.py", "recipes", "tools"):  # a recipe is started in the checkout
        (tmp_path / name).symlink_to(ROOT / name)
    signs = (ROOT / "assets" / "eval_prompts.txt").read_text().splitlines()[:6]
    scenes = ["a cat", "a red cube on a blue one", "a cat"] * 2
    for file, prompts in (("ocr/train", signs[:4]), ("ocr/test", signs[4:]), ("drawbench/test", scenes)):
        path = tmp_path / "dataset" / f"{file}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(prompts) + "\n")
    torch.save(PublishedMLP().state_dict(), tmp_path / "aesthetic-model.pth")
    clip = make_hpsv2(tmp_path)
    for name in ("PICKSCORE_MODEL", "PICKSCORE_PROCESSOR", "CLIP_SCORE_MODEL", "AESTHETIC_CLIP", "HPSV2_PROCESSOR"):
        monkeypatch.setenv(name, str(clip))
    for name in ("HPSV2_MODEL", "AESTHETIC_MODEL", "FLOW_GRPO", "DIFFUSION_NFT"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("MODEL", str(EMBEDDED))
    monkeypatch.setenv("LAUNCH", f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 1")
    tiny = (
        "--image_size 32 96 --num_steps 1 --num_prompts 2 --group_size 2 --updates_per_rollout 1 --micro_batch_size 2"
    )
    tiny += " --num_inference_steps 2 --eval_num_inference_steps 2 --guidance_scale 1 --dtype float32 --rollout local"
    tiny += " --train_with"  # nothing: the recipe compiles
    recipe = ["bash", "recipes/tables/ocr_drawbench.sh", "row", *tiny.split()]
    done = subprocess.run(recipe, cwd=tmp_path, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith((tmp_path / "runs/bench_row/table.md").read_text() + "\n")
    texts, drawbench = json.loads((tmp_path / "runs/bench_row/bench.json").read_text())["benches"]
    rows = {row["reward"]: row for bench in (texts, drawbench) for row in bench["table"] if row["policy"] == "base"}
    assert list(rows) == ["ocr_scene_contains", "clip_score", "aesthetic", "pickscore", "hpsv2"]
    assert [len(scores) for scores in drawbench["results"][0]["scores"].values()] == [2] * 4  # each prompt once
    before = read_metrics(tmp_path / "runs" / "row")[0]
    for name, row in rows.items():  # noise goes by a prompt's place in its file, here and in the run's evaluation
        part = "texts" if name == "ocr_scene_contains" else "drawbench"
        assert row["mean"][0] == pytest.approx(before[f"val/{part}/{name}/mean"], rel=1e-4) and row["failed"] == 0
