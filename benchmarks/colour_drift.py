"""How far the signs' colours, which the reward does not see, have moved in training.

    python benchmarks/colour_drift.py runs/flow_grpo 30
    python benchmarks/colour_drift.py runs/flow_grpo/grid_0000.png runs/flow_grpo/grid_0030.png

Of every held-out prompt the image before training and that of the given step, from the same seed: distance of their
median colours (the sign's ground), mean over channels, of 255. Prints the mean over images, and the share above 32; of
two grids, which hold the first 32 prompts, with one reward in their captions, also the range by the colour that the
prompt asks for.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

PROMPTS = Path(__file__).parents[1] / "assets" / "eval_prompts.txt"
CELL = (192, 64)  # of a grid's image, two times the embedded model's 96 x 32
STRIDE = (196, 82)  # to the next image: gap, and caption below
COLUMNS = 8


def ground(image):
    """Median colour (3,) of an image: that of the sign, as the digits cover less than half of it."""
    return np.median(np.asarray(image.convert("RGB"), dtype=float).reshape(-1, 3), axis=0)


def distance(before, after):
    return np.abs(ground(before) - ground(after)).mean()


def report(name, moved):
    moved = np.array(moved)
    print(f"{name}: {moved.mean():.1f}, {(moved > 32).mean():.0%} of {len(moved)} above 32")


def compare_samples(run, step):
    folders = [Path(run) / "samples" / f"{s:04d}" for s in (0, step)]
    before, after = (sorted(folder.glob("*.png")) for folder in folders)
    moved = [distance(Image.open(b), Image.open(a)) for b, a in zip(before, after, strict=True)]
    report(f"{Path(run).name}, step {step}", moved)


def cells(grid):
    """The images of a grid, row by row."""
    sheet = Image.open(grid)
    corners = [(column * STRIDE[0], row * STRIDE[1]) for row in range(4) for column in range(COLUMNS)]
    return [sheet.crop((x, y, x + CELL[0], y + CELL[1])) for x, y in corners]


def compare_grids(before, after):
    prompts = PROMPTS.read_text().splitlines()
    moved = [distance(b, a) for b, a in zip(cells(before), cells(after), strict=True)]
    report(f"{Path(after).parent.name}, {Path(after).stem}", moved)
    by_colour = {}
    for prompt, value in zip(prompts, moved, strict=False):
        by_colour.setdefault(prompt.split()[1], []).append(value)
    for colour, values in by_colour.items():
        print(f"  {colour}: {min(values):.1f} to {max(values):.1f} ({len(values)} signs)")


if __name__ == "__main__":
    if sys.argv[1].endswith(".png"):
        compare_grids(sys.argv[1], sys.argv[2])
    else:
        compare_samples(sys.argv[1], int(sys.argv[2]))
