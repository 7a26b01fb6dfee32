"""The two pictures on the README's first screen, from the records: docs/before_after.png and docs/curve.png.

    python -m docs.make_front_page

The first shows the first images of one seed's grids, before training and after 30 rollouts, from the same prompts and
noise. The second shows the evaluation reward of three seeds of flow_grpo.py's default run over seconds of training.
"""

from pathlib import Path

from common.plots import read_metrics

import matplotlib

matplotlib.use("Agg")  # files only: no window, so no display is needed
import matplotlib.pyplot as plt
from PIL import Image, ImageDraw, ImageFont

DOCS = Path(__file__).parent
RECORDS = DOCS / "lab" / "records"
GRIDS = RECORDS / "flow_grpo-local-seed2"
CELL = (196, 82)  # pixels of an image of a grid with its caption and margins
COLUMNS = 6
ROWS = 2
TITLE_HEIGHT = 26
ROLLOUTS = 30


def compose_grids(path: Path) -> None:
    """Write the first cells of both grids, one above the other, each below its title."""
    font = ImageFont.load_default(16)
    width = COLUMNS * CELL[0]
    height = ROWS * CELL[1]
    sheet = Image.new("RGB", (width, 2 * (height + TITLE_HEIGHT)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (step, title) in enumerate([(0, "before training"), (ROLLOUTS, f"after {ROLLOUTS} rollouts")]):
        top = i * (height + TITLE_HEIGHT)
        grid = Image.open(GRIDS / f"grid_{step:04d}.png")
        draw.text((1, top + 3), title, fill="black", font=font)
        sheet.paste(grid.crop((0, 0, width, height)), (0, top + TITLE_HEIGHT))
    sheet.quantize(256).save(path, optimize=True)  # a palette: a third of the bytes, and no difference to the eye


def read_curve(run: Path) -> list[tuple[float, float]]:
    """(seconds of training, reward) of each evaluation, up to the rollout that the grids show."""
    seconds = 0.0
    curve = []
    for row in read_metrics(run):
        seconds += row.get("timing_s/step", 0.0)
        if "val/ocr/mean" in row and row["training/global_step"] <= ROLLOUTS:
            curve.append((seconds, row["val/ocr/mean"]))
    return curve


def draw_curve(path: Path) -> None:
    """Write reward by seconds of training: a line per seed, and their mean."""
    figure, axis = plt.subplots(figsize=(5.2, 2.6))
    curves = [read_curve(RECORDS / f"flow_grpo-vllm-seed{seed}") for seed in (1, 2, 3)]
    for curve in curves:
        axis.plot(*zip(*curve, strict=True), color="C0", alpha=0.4, linewidth=1)
    means = []
    for points in zip(*curves, strict=True):  # the seeds' points of one evaluation
        means.append([sum(values) / len(values) for values in zip(*points, strict=True)])
    axis.plot(*zip(*means, strict=True), color="C0", marker="o", markersize=3)
    axis.set(xlabel="seconds of training, one CPU core", ylabel="OCR reward", ylim=(0.6, 1.0))
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    compose_grids(DOCS / "before_after.png")
    draw_curve(DOCS / "curve.png")


if __name__ == "__main__":
    main()
