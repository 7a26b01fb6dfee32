"""What an image costs the built-in rewards: seconds, by wall and by the CPU's time, and what their weights take.

    OMP_NUM_THREADS=1 python benchmarks/reward_cost.py | tee docs/records/reward_cost.txt

The learned ones are random networks of the published sizes: CLIP ViT-L/14 and, for pickscore, ViT-H/14; they see every
picture at 224 x 224. Medians of 3 batches of 8 pictures with three lines of text each, after a first one; on the GPU,
where there is one, for the learned ones.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.rewards import clip_score, load_rewards

import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessorPil, CLIPModel

SIZES = {
    "l": ((768, 12, 12, 3072), (1024, 24, 16, 4096), 768),
    "h": ((1024, 24, 16, 4096), (1280, 32, 16, 5120), 1024),
}  # (width, layers, heads, MLP) of text and vision, and the width of embeddings
PROMPT = 'a shop window that says "fresh bread"'


def tower(width, layers, heads, mlp):
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
    }


def make_clip(folder, size):
    """A random CLIP of that size, as if it had been read from `folder`, where its processor is."""
    text, vision, width = SIZES[size]
    config = CLIPConfig(
        text_config=tower(*text), vision_config=tower(*vision) | {"patch_size": 14}, projection_dim=width
    )
    AutoTokenizer.from_pretrained("assets/embedded/tokenizer", model_max_length=77).save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)
    clip_score.LOADED[str(folder)] = CLIPModel(config).requires_grad_(False).eval()


def picture(size):
    image = Image.new("RGB", (size, size), "khaki")
    for row, text in enumerate(["fresh", "bread", "DAILY"]):
        font = ImageFont.load_default(size=size // 10)
        ImageDraw.Draw(image).text((size // 8, size * (row + 1) // 5), text, fill="navy", font=font)
    return image


def measure(reward, size):
    """Median seconds an image of size x size, of the clock and of this process's CPU time."""
    walls = []
    cpus = []
    images = [picture(size) for _ in range(8)]
    reward(images, [PROMPT] * 8, [{}] * 8)
    for _ in range(3):
        wall = time.perf_counter()
        cpu = time.process_time()
        reward(images, [PROMPT] * 8, [{}] * 8)
        walls.append((time.perf_counter() - wall) / 8)
        cpus.append((time.process_time() - cpu) / 8)
    return statistics.median(walls), statistics.median(cpus)


def main():
    cpu = subprocess.run("grep -m1 'model name' /proc/cpuinfo", shell=True, capture_output=True, text=True).stdout
    commit = subprocess.run("git rev-parse --short HEAD", shell=True, capture_output=True, text=True).stdout
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"# python benchmarks/reward_cost.py, commit {commit.strip()}, {cpu.partition(':')[2].strip()}, {gpu}")
    print(
        f"# torch {torch.__version__}, {torch.get_num_threads()} thread: seconds an image, of the clock and of the CPU"
    )
    names = {"jpeg_compressibility": None, "ocr": None, "ocr_scene": None}
    names |= {"clip_score": "l", "aesthetic": "l", "pickscore": "h"}
    with tempfile.TemporaryDirectory() as folder:
        clip = Path(folder) / "clip"
        layers = Path(folder) / "layers.pth"
        for variable in ("CLIP_SCORE_MODEL", "AESTHETIC_CLIP", "PICKSCORE_MODEL", "PICKSCORE_PROCESSOR"):
            os.environ[variable] = str(clip)
        os.environ["AESTHETIC_MODEL"] = str(layers)
        torch.save({"layers.0.weight": torch.zeros(1, 768), "layers.0.bias": torch.zeros(1)}, layers)
        for name, size_of_clip in names.items():
            if size_of_clip:
                clip_score.LOADED.clear()
                make_clip(clip, size_of_clip)
            reward = load_rewards([name], [1])[name]
            for size in (512,) if size_of_clip else (512, 1024):
                wall, cpu = measure(reward, size)
                print(f"{name} {size} x {size}: {wall:.3f} {cpu:.3f}", flush=True)
            if size_of_clip:
                weights = sum(p.numel() * p.element_size() for p in clip_score.LOADED[str(clip)].parameters())
                print(f"{name}: {weights / 1e9:.2f} GB of weights", flush=True)


if __name__ == "__main__":
    main()
