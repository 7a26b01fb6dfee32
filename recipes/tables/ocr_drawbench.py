"""The held-out prompts of ocr_drawbench.sh, and the rewards that each asks for."""

import os
from pathlib import Path


def texts() -> list[dict]:
    """Flow-GRPO's 1,018 prompts with a text in double quotes."""
    lines = Path(os.environ["FLOW_GRPO"], "dataset/ocr/test.txt").read_text(encoding="utf-8").splitlines()
    return [{"prompt": line, "rewards": ["ocr_scene_contains"]} for line in lines if line.strip()]


def drawbench() -> list[dict]:
    """DrawBench's 200 prompts, each of which stands five times in the file."""
    lines = Path(os.environ["DIFFUSION_NFT"], "dataset/drawbench/test.txt").read_text(encoding="utf-8").splitlines()
    rewards = ["clip_score", "aesthetic", "pickscore", "hpsv2"]
    return [{"prompt": line, "rewards": rewards} for line in dict.fromkeys(lines) if line.strip()]
