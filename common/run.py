"""The run folder: arguments and source, metrics, curves, image grids, adapters and checkpoints written so that a kill loses none."""
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from PIL import Image, ImageDraw


def create_run_folder(folder, args, script):
    """Make `folder` with args.json (the arguments as used, and the git hash) and a copy of the script.

    Raises:
        ValueError: the folder already holds a run.
    """
    folder = Path(folder)
    if (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} already holds a run: choose another --name, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(script).parent, capture_output=True, text=True)
    record = {"command": " ".join(sys.argv), "git_hash": git.stdout.strip() or None, "args": asdict(args)}
    (folder / "args.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    shutil.copy(script, folder / "source.py")
    return folder


@contextmanager
def atomic_folder(path):
    """Yield a temporary folder that takes the place of `path` once the block has ended and every file is on disk.

    A kill at any moment leaves the previous `path`, or the new one, whole.
    """
    path = Path(path)
    temporary, previous = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    for file in temporary.rglob("*"):
        if file.is_file():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
    shutil.rmtree(previous, ignore_errors=True)
    if path.exists():
        path.rename(previous)
    temporary.rename(path)
    shutil.rmtree(previous, ignore_errors=True)


class MetricLog:
    """One JSON line a step in metrics.jsonl; the same to wandb with `track`. NaN and infinity are refused by name."""

    def __init__(self, folder, args=None, track=False, project=None):
        self.path, self.wandb = Path(folder) / "metrics.jsonl", None
        if track:
            import wandb

            self.wandb = wandb.init(project=project, name=Path(folder).name, dir=folder, config=asdict(args))

    def log(self, step, metrics, images=None):
        """`images`: list of (PIL image, caption) for wandb's table."""
        metrics = {k: float(v) for k, v in metrics.items()}
        bad = [k for k, v in metrics.items() if not torch.isfinite(torch.tensor(v))]
        if bad:
            raise ValueError(f"step {step}: not a finite number: {', '.join(f'{k} = {metrics[k]}' for k in bad)}")
        with open(self.path, "a") as file:
            file.write(json.dumps({"training/global_step": step, **metrics}) + "\n")
        if self.wandb:
            table = {"val/images": [self._wandb_image(*pair) for pair in images]} if images else {}
            self.wandb.log({**metrics, **table}, step=step)

    @staticmethod
    def _wandb_image(image, caption):
        import wandb

        return wandb.Image(image, caption=caption)

    def close(self):
        if self.wandb:
            self.wandb.finish()


CURVES = {  # file panel -> metrics drawn in it
    "reward": ("critic/rewards/mean", "val/"),
    "zero-std groups, clip fraction": ("critic/rewards/zero_std_ratio", "actor/pg_clipfrac"),
    "gradient norm": ("actor/grad_norm",),
    "engine against trainer, |log-prob difference|": ("rollout_corr/logprob_abs_diff_max",),
}


def plot_curves(folder):
    """Draw curves.png from metrics.jsonl: a panel for each entry of CURVES; validation rewards with their standard error."""
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    figure, panels = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for panel, (title, prefixes) in zip(panels.flat, CURVES.items(), strict=True):
        names = sorted({k for row in rows for k in row if k.startswith(prefixes) and not k.endswith("/stderr")})
        for name in names:
            points = [(row["training/global_step"], row[name], row.get(f"{name.rpartition('/')[0]}/stderr")) for row in rows if name in row]
            steps, values, errors = zip(*points, strict=True)
            if name.startswith("val/"):
                panel.errorbar(steps, values, yerr=errors, marker="o", markersize=4, capsize=2, color="black", label=name, zorder=3)
            else:
                panel.plot(steps, values, linewidth=1.5, label=name)
        panel.set(title=title, xlabel="step")
        panel.grid(alpha=0.3)
        if names:
            panel.legend(fontsize=8)
    figure.savefig(Path(folder) / "curves.png", dpi=110)
    plt.close(figure)


def save_grid(path, images, captions, columns=8, scale=None):
    """Write a PNG of `images` (PIL, equal sizes) row by row, each over its caption; small images are enlarged."""
    width, height = images[0].size
    scale = scale or max(1, 160 // width)
    width, height, line = width * scale, height * scale, 14
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (width + 4), rows * (height + line + 4)), "white")
    for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
        corner = (i % columns * (width + 4), i // columns * (height + line + 4))
        sheet.paste(image.resize((width, height), Image.NEAREST), corner)
        ImageDraw.Draw(sheet).text((corner[0] + 1, corner[1] + height), caption, fill="black")
    sheet.save(path)


def save_adapter(folder, pipe_class, tensors, lora_config):
    """Write a LoRA as diffusers does, for `pipe.load_lora_weights(folder)`.

    tensors: {"module.lora_A.weight": tensor} relative to the transformer; the alpha and rank travel in the file's metadata.
    """
    with atomic_folder(folder) as temporary:
        pipe_class.save_lora_weights(temporary, transformer_lora_layers=tensors, transformer_lora_adapter_metadata=lora_config.to_dict())
