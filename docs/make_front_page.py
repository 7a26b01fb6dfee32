"""Pictures of README and docs/flow_grpo.md, from the records: docs/before_after.png, docs/scenes.png, docs/curve.png.

    python -m docs.make_front_page

The first shows the first images of the grids of README's first command, before training and after it, from the same
prompts and noise. The second shows the same of recipes/embedded_scenes.sh, a column for each part of GenEval. The third
shows the held-out rewards of flow_grpo.py at its defaults, a line per recorded seed.
"""

import json
import textwrap
from pathlib import Path

from common.run.plots import read_metrics

import matplotlib

matplotlib.use("Agg")  # files only: no window, so no display is needed
import matplotlib.pyplot as plt
from PIL import Image, ImageDraw, ImageFont

DOCS = Path(__file__).parent
RECORDS = DOCS / "lab" / "records"
GRIDS = RECORDS / "default-flow_grpo"
CELL = (196, 96)  # pixels of an image of a grid with its caption and margins
COLUMNS = 6
ROWS = 2
TITLE_HEIGHT = 26
SCENES = RECORDS / "scenes-flow_grpo-seed1"
HELD_OUT = DOCS.parent / "assets" / "scenes_eval.jsonl"
SCENE = 128  # pixels
GRID_CELL, GRID_COLUMNS = (132, 160), 8  # of its grids: pixels of a cell, cells in a row
SCENE_ROWS = 2
ROLLOUTS = 40
REWARDS = {"ocr": "C0", "sign_colour": "C1"}  # trained on, and only watched


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


def compose_scenes(path: Path) -> None:
    """Write the first scenes of both grids, six columns for the six parts, each pair below its prompt."""
    records = [json.loads(line) for line in HELD_OUT.read_text().splitlines()[: COLUMNS * SCENE_ROWS]]
    grids = [Image.open(SCENES / f"grid_{step:04d}.png") for step in (0, ROLLOUTS)]
    font, small = ImageFont.load_default(14), ImageFont.load_default(11)
    width, height = SCENE + 6, 2 * SCENE + 38
    sheet = Image.new("RGB", (60 + COLUMNS * width, TITLE_HEIGHT + SCENE_ROWS * height), "white")
    draw = ImageDraw.Draw(sheet)
    for i, record in enumerate(records):
        row, column = divmod(i, COLUMNS)
        left, top = 60 + column * width, TITLE_HEIGHT + row * height
        if row == 0:
            draw.text((left, 4), record["tag"], fill="black", font=font)
        prompt = "\n".join(textwrap.wrap(record["prompt"].removeprefix("a photo of "), 21))
        draw.text((left, top), prompt, fill="black", font=small, spacing=1)
        for k, grid in enumerate(grids):
            x, y = i % GRID_COLUMNS * GRID_CELL[0], i // GRID_COLUMNS * GRID_CELL[1]
            sheet.paste(grid.crop((x, y, x + SCENE, y + SCENE)), (left, top + 28 + k * (SCENE + 4)))
            if column == 0:
                draw.text((2, top + 28 + k * (SCENE + 4) + 55), ("before", "after")[k], fill="black", font=font)
    sheet.quantize(256).save(path, optimize=True)


def read_curve(run: Path, reward: str) -> list[tuple[int, float]]:
    """(rollouts, held-out reward) of each evaluation."""
    rows = [row for row in read_metrics(run) if f"val/{reward}/mean" in row]
    return [(row["training/global_step"], row[f"val/{reward}/mean"]) for row in rows]


def draw_curve(path: Path) -> None:
    """Write both rewards by rollouts: a line per seed, and their mean."""
    figure, axis = plt.subplots(figsize=(5.2, 2.6))
    for reward, color in REWARDS.items():
        curves = [read_curve(run, reward) for run in sorted(RECORDS.glob("default-flow_grpo-seed*"))]
        for curve in curves:
            axis.plot(*zip(*curve, strict=True), color=color, alpha=0.4, linewidth=1)
        means = []
        for points in zip(*curves, strict=True):  # the seeds' points of one evaluation
            means.append([sum(values) / len(values) for values in zip(*points, strict=True)])
        axis.plot(*zip(*means, strict=True), color=color, marker="o", markersize=3, label=reward)
    axis.set(xlabel="rollouts of 256 images", ylabel="held-out reward", ylim=(0.6, 1.0))
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    compose_grids(DOCS / "before_after.png")
    compose_scenes(DOCS / "scenes.png")
    draw_curve(DOCS / "curve.png")


if __name__ == "__main__":
    main()
