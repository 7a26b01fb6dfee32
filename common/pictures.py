"""The pictures of a run: curves.png of its metrics, its images and videos, and grids of captioned ones."""

import json
import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageSequence

WATCHED = ("val/diversity", "val/drift_from_base")
PANELS = {  # title -> metrics drawn in it; a name that ends with a slash: every reward's mean below it
    "reward": ("critic/rewards/mean", "critic/rewards/", "val/"),
    "zero-std groups, clip fraction": ("critic/rewards/zero_std_ratio", "actor/pg_clipfrac"),
    "gradient norm, KL to the reference": ("actor/grad_norm", "actor/kl_loss"),
    "diversity within a prompt, drift from step 0": ("critic/diversity", *WATCHED),
    "accuracy of the pairs": ("actor/implicit_accuracy",),
    "implicit rewards of the pairs": ("actor/margin", "actor/chosen_reward", "actor/rejected_reward"),
    "engine against trainer, |log-prob difference|": (
        "rollout_corr/logprob_abs_diff_mean",
        "rollout_corr/logprob_abs_diff_max",
    ),
}
VAL_TOTAL = "val/weighted_total/mean"
LINE_HEIGHT = 14  # pixels of a line of a caption, below an image
GAP = 4  # pixels between the images of a grid


def plot_curves(folder):
    """Draw curves.png from metrics.jsonl: the PANELS that the run has metrics for, in a colour each."""
    rows = read_metrics(folder)
    panels = {}  # as draw_panels takes them
    for title, wanted in PANELS.items():
        colours = {}  # a reward's is the same in training and evaluation
        for name in drawn_metrics(rows, wanted):
            colour = colours.setdefault(_drawn_with(rows, name), f"C{len(colours)}")
            panels.setdefault(title, []).append((name, name, rows, colour))
    draw_panels(panels, Path(folder) / "curves.png")


def read_metrics(folder):
    """The lines of a run's metrics.jsonl, a dict each."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def drawn_metrics(rows, wanted):
    """The metrics of a panel that the rows hold: those `wanted` and, below a name that ends with a slash, each reward's
    mean and the weighted total, unless that is one of them; of a single reward, of which it is a multiple, one of the
    two."""
    measured = sorted({name for row in rows for name in row})
    drawn = [name for name in measured if name in wanted]
    for prefix in (name for name in wanted if name.endswith("/")):
        below = [name for name in measured if name.startswith(prefix) and name.endswith("/mean")]
        if len(below) == 2:  # the one that is drawn whatever else is, or the reward's own
            below = [name for name in below if name in wanted] or [name for name in below if name != VAL_TOTAL]
        elif VAL_TOTAL in below and any(_is_total(rows, name) for name in below):  # the only one that is trained on
            below.remove(VAL_TOTAL)
        drawn += [name for name in below if name not in drawn]
    return drawn


def _drawn_with(rows, name):
    """Of a reward's curve in training the metric of its curve in evaluations, of another curve itself."""
    if name == "critic/rewards/mean":  # the weighted total, which may be drawn as the one reward that it is
        means = sorted({name for row in rows for name in row if name.startswith("val/") and name.endswith("/mean")})
        return next((name for name in means if _is_total(rows, name)), VAL_TOTAL)
    return name.replace("critic/rewards/", "val/")


def _is_total(rows, name):
    """Whether the metric is the weighted total under another name, to round-off."""
    values = [(row.get(name, math.nan), row[VAL_TOTAL]) for row in rows if VAL_TOTAL in row]
    return name != VAL_TOTAL and len(values) > 0 and all(math.isclose(value, total) for value, total in values)


def draw_panels(panels, path):
    """Write a PNG of the panels {title: [(label, metric, rows, colour)]}, each curve over the steps of its rows;
    validation rewards with their standard errors."""
    from matplotlib.figure import Figure  # slow

    num_rows = max(1, -(-len(panels) // 2))  # rounded up
    figure = Figure(figsize=(11, 3.5 * num_rows), layout="constrained")
    for number, (title, curves) in enumerate(panels.items(), 1):
        panel = figure.add_subplot(num_rows, 2, number)
        for label, name, rows, colour in curves:
            _draw_curve(panel, label, name, [row for row in rows if name in row], colour)
        panel.set(title=title, xlabel="step")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)  # below: it hides no curve
    figure.draw_without_rendering()  # the layout settles in the second pass, which the saving is
    figure.savefig(path, dpi=110)


def _draw_curve(panel, label, name, rows, colour):
    """Draw the metric `name` over the steps of the `rows`, all of which hold it."""
    steps = [row["training/global_step"] for row in rows]
    values = [row[name] for row in rows]
    if not name.startswith("val/"):
        dashes = "--" if name.startswith("critic/rewards/") and name.endswith("mean") else "-"
        panel.plot(steps, values, dashes, linewidth=1.5, label=label, color=colour)
        return
    errors = [row.get(name.removesuffix("/mean") + "/stderr") for row in rows]
    if None in errors:  # not of a mean
        errors = None
    style = {"marker": "o", "markersize": 4, "capsize": 2, "color": colour}
    panel.errorbar(steps, values, yerr=errors, label=label, zorder=3, **style)


def save_png(path, image):
    """Write a PIL image or a video, a list of PIL frames, as a PNG: of a video an animated one, which holds every frame
    to the bit, a tenth of a second each in a browser."""
    if not isinstance(image, list):
        image.save(path)
        return
    first, *others = image
    first.save(path, save_all=True, append_images=others)


def open_png(path):
    """What save_png has written there: a PIL image, or a list of PIL frames."""
    with Image.open(path) as file:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(file)]
    return frames[0] if len(frames) == 1 else frames


def as_one_picture(image):
    """A PIL image as it is; of a video, a list of PIL frames, the first, the middle and the last one, top to bottom."""
    if not isinstance(image, list):
        return image
    shown = sorted({0, len(image) // 2, len(image) - 1})
    width, height = image[0].size
    picture = Image.new("RGB", (width, len(shown) * height))
    for row, number in enumerate(shown):
        picture.paste(image[number], (0, row * height))
    return picture


def _end_that_fits(draw, line, width):
    """The end of a line of a caption that is at most `width` pixels long; no letter before it is measured."""
    line = " ".join(line.split())[-width:]  # no letter is narrower than a pixel
    while draw.textlength(line) > width:
        line = line[1:]
    return line


def save_grid(path, images, captions, columns=8, scale=None):
    """Write a PNG of `images` (PIL, equal sizes) row by row, each over its caption, of one line or several.

    Of a line that is too long its end is shown. Small images are enlarged `scale` times, None: to about 200 pixels.
    """
    width, height = images[0].size
    if scale is None:
        scale = max(1, 200 // width)
    width *= scale
    height *= scale
    cell_width = width + GAP
    lines = [caption.split("\n") for caption in captions]
    cell_height = height + LINE_HEIGHT * max(map(len, lines)) + GAP
    num_rows = -(-len(images) // columns)  # rounded up
    sheet = Image.new("RGB", (columns * cell_width, num_rows * cell_height), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (image, caption) in enumerate(zip(images, lines, strict=True)):
        row, column = divmod(i, columns)
        left = column * cell_width
        top = row * cell_height
        sheet.paste(image.resize((width, height), Image.NEAREST), (left, top))
        for number, line in enumerate(caption):
            corner = (left + 1, top + height + number * LINE_HEIGHT)
            draw.text(corner, _end_that_fits(draw, line, width), fill="black")
    sheet.save(path)
