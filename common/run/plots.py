"""The pictures of a run: curves.png of its metrics, its images and videos, and grids of captioned ones."""

import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.distributed import data_rank, data_world_size, gather_objects, on_rank_0, sequence_rank
from common.errors import error_prefix
from common.files import atomic_file, without_nan, writing
from common.images import as_one_picture, save_png
from common.process import print_message
from common.rollout import Images

from PIL import Image, ImageDraw, ImageFont

WATCHED = ("val/diversity", "val/drift_from_base")
PANELS = {  # title -> metrics drawn in it; a name that ends with a slash stands for every reward's mean below it
    "reward": ("critic/rewards/", "val/"),
    "zero-std groups, clip fraction": ("critic/rewards/zero_std_ratio", "actor/pg_clipfrac"),
    "gradient norm": ("actor/grad_norm",),
    "KL to the reference": ("actor/kl_loss",),
    "diversity within a prompt, drift from step 0": ("critic/diversity", *WATCHED),
    "velocity's norm, of the reference's": ("actor/velocity_norm",),
    "accuracy of the pairs": ("actor/implicit_accuracy",),
    "implicit rewards of the pairs": ("actor/margin", "actor/chosen_reward", "actor/rejected_reward"),
    "engine against trainer, |log-prob difference|": (
        "rollout_corr/logprob_abs_diff_mean",
        "rollout_corr/logprob_abs_diff_max",
    ),
}
TRAIN_TOTAL = "critic/rewards/mean"
VAL_TOTAL = "val/weighted_total/mean"
TOTALS = (TRAIN_TOTAL, VAL_TOTAL)
Curve = tuple[str, str, list[dict], str]  # label, metric, rows of metrics.jsonl, colour
Picture = tuple[Image.Image, str]  # with its caption
LINE_HEIGHT = 14  # pixels of a line of a caption, below an image
GAP = 4  # pixels between the images of a grid


def plot_curves(folder: Path | str) -> None:
    """Draw curves.png from metrics.jsonl: the PANELS that the run has metrics for, in a colour each."""
    rows = read_metrics(folder)
    panels: dict[str, list[Curve]] = {}
    for title, wanted in PANELS.items():
        colours: dict[str, str] = {}  # a reward's colour is the same in training and evaluation
        for name in drawn_metrics(rows, wanted):
            in_evaluation = name.replace(TRAIN_TOTAL, VAL_TOTAL).replace("critic/rewards/", "val/")
            colour = colours.setdefault(in_evaluation, f"C{len(colours)}")
            panels.setdefault(title, []).append((name, name, rows, colour))
    draw_panels(panels, Path(folder) / "curves.png")


def read_metrics(folder: Path | str) -> list[dict]:
    """The lines of a run's metrics.jsonl, a dict each. A last one without its end, which a kill may leave or a run be
    writing, is left out, as a line of stderr says. ValueError: any other is no JSON."""
    file = Path(folder) / "metrics.jsonl"
    rows = []
    with error_prefix(file, ValueError):
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
            try:
                rows.append(json.loads(line))
            except ValueError:
                if line.endswith(b"\n"):
                    raise
                print_message(f"{file}, line {number}: is cut short, as a kill leaves one: left out")
    return rows


def drawn_metrics(rows: list[dict], wanted: tuple[str, ...]) -> list[str]:
    """The metrics of a panel that the rows hold: those `wanted` and, below a name that ends with a slash, the mean of
    every reward and the weighted total. A single reward and its total are one curve; totals of single files are none.
    """
    measured = sorted({name for row in rows for name in row})
    drawn = [name for name in measured if name in wanted]
    for prefix in (name for name in wanted if name.endswith("/")):
        below = [name for name in measured if name.startswith(prefix) and name.endswith("/mean")]
        below = [name for name in below if name == VAL_TOTAL or not name.endswith("/weighted_total/mean")]
        of_rewards = [name for name in below if name not in TOTALS]
        drawn += of_rewards if len(of_rewards) == 1 else below
    return drawn


def draw_panels(panels: dict[str, list[Curve]], path: Path | str) -> None:
    """Write a PNG of the panels, each a title and its curves. Validation rewards have bars of their standard errors."""
    from matplotlib.figure import Figure  # slow
    from matplotlib.ticker import MaxNLocator

    num_rows = max(1, -(-len(panels) // 2))  # rounded up
    figure = Figure(figsize=(11, 3.5 * num_rows), layout="constrained")
    for number, (title, curves) in enumerate(panels.items(), 1):
        panel = figure.add_subplot(num_rows, 2, number)
        for label, name, rows, colour in curves:
            measured = [row for row in rows if name in row]
            steps = [row["training/global_step"] for row in measured]
            values = [row[name] for row in measured]
            low, high = f"{name}/low", f"{name}/high"
            if measured and low in measured[0]:  # a mean over runs, with its range
                panel.fill_between(
                    steps, [r[low] for r in measured], [r[high] for r in measured], color=colour, alpha=0.2
                )
            if name.startswith("val/"):
                found: list = [row.get(name.removesuffix("/mean") + "/stderr") for row in measured]
                panel.errorbar(
                    steps,
                    values,
                    yerr=None if None in found else found,  # only a mean has them
                    label=label,
                    zorder=3,
                    marker="o",
                    markersize=4,
                    capsize=2,
                    color=colour,
                )
            else:
                dashes = "--" if name.startswith("critic/rewards/") and name.endswith("mean") else "-"
                panel.plot(steps, values, dashes, linewidth=1.5, label=label, color=colour)
        panel.set_title(title)
        panel.set_xlabel("step", loc="right")  # the legend hides the middle where it is long
        panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)  # below: it hides no curve
    figure.draw_without_rendering()  # the layout settles in the second pass, which the saving is
    figure.savefig(path, dpi=110)


def save_grid(path: Path | str, images: Sequence[Image.Image], captions: Sequence[str], columns: int = 8) -> None:
    """Write a PNG of `images` (PIL, equal sizes), at most `columns` in a row, each above its caption of any lines.

    A line that is too long shows its end, behind "…". Small images are enlarged to about 200 pixels.
    """
    from matplotlib import get_data_path  # slow

    width, height = images[0].size
    scale = max(1, 200 // width)
    width *= scale
    height *= scale
    cell_width = width + GAP
    lines = [caption.split("\n") for caption in captions]
    cell_height = height + LINE_HEIGHT * max(map(len, lines)) + GAP
    num_rows = math.ceil(len(images) / columns)
    columns = math.ceil(len(images) / num_rows)
    sheet = Image.new("RGB", (columns * cell_width, num_rows * cell_height), "white")
    draw = ImageDraw.Draw(sheet)
    draw.font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", 9)  # PIL's own has ASCII only
    for i, (image, caption) in enumerate(zip(images, lines, strict=True)):
        row, column = divmod(i, columns)
        left = column * cell_width
        top = row * cell_height
        sheet.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, top))
        for number, line in enumerate(caption):
            line = " ".join(line.split())
            if len(line) > width:  # no letter is narrower than a pixel: those before are not measured
                line = "…" + line[-width:]
            while draw.textlength(line) > width:
                line = "…" + line.removeprefix("…")[1:]
            draw.text((left + 1, top + height + number * LINE_HEIGHT), line, fill="black")
    sheet.save(path)


# ---- the images of an evaluation -------------------------------------------------------------------------------------
def save_samples(
    folder: Path,
    places: Sequence[int],
    images: Images,
    records: Sequence[dict],
    *,
    shown: int = 32,
    has_surplus: bool = True,
) -> list[Picture] | None:
    """Write a rank's images as folder/PLACE.png, and rank 0 a line for each in samples.jsonl: its file, and its record.

    places (B,): the images' numbers over all ranks. has_surplus: share_of_rank dealt them, and an image that a rank has
    only to have as many as the others is left to the rank whose turn it is. A video becomes one animated PNG. records:
    B dicts {"prompt": ..., "seed": ..., "<reward>": score ...}. A collective: rank 0 gets the first `shown` as (PIL
    image, caption); the others get None.
    """
    samples: dict = {}  # by place: the record and, where it is shown, the picture
    files: dict[Path, Image.Image | list[Image.Image]] = {}
    for place, image, record in zip(places, images, records, strict=True):
        is_own = not has_surplus or place % data_world_size() == data_rank()
        if is_own and sequence_rank() == 0:  # for its sequence group, whose ranks have the same images
            path = folder / f"{place:05d}.png"
            files[path] = image
            picture = as_one_picture(image) if place < shown else None
            if "image" in record:
                record, picture = show_sources(record, picture, image)
            samples[place] = (record, picture)
    with writing(folder), ThreadPoolExecutor(4) as threads:
        folder.mkdir(parents=True, exist_ok=True)
        list(threads.map(save_png, files, files.values()))  # list raises what a thread raised
    parts = gather_objects(samples)
    if not on_rank_0():
        return None
    by_place = {place: sample for part in parts for place, sample in part.items()}
    with writing(folder):
        for earlier in folder.glob("[0-9]*.png"):  # of a start that made more images, before a kill
            if re.fullmatch("[0-9]{5}", earlier.stem) and int(earlier.stem) not in by_place:
                earlier.unlink(missing_ok=True)
    lines = []  # of samples.jsonl
    grid = []
    for place, (record, picture) in sorted(by_place.items()):
        line = without_nan({"file": f"{place:05d}.png", **record})
        lines.append(json.dumps(line, default=str, allow_nan=False) + "\n")
        if picture:
            grid.append((picture, _caption(record)))
    with atomic_file(folder / "samples.jsonl") as temporary:
        temporary.write_text("".join(lines))
    return grid


def show_sources(
    record: dict, picture: Image.Image | None, sample: Image.Image | list[Image.Image]
) -> tuple[dict, Image.Image | None]:
    """A sample's record with the names of its condition images; and its picture, if any, with them to its left.

    The picture is the sample, or shows a few frames of it; condition images are brought to the size of a frame.
    """
    named = record | {"image": [str(source) for source in record["image"]]}
    if picture is None:
        return named, None
    size = sample[0].size if isinstance(sample, list) else sample.size
    beside = Image.new("RGB", (size[0] * (len(record["image"]) + 1), picture.height), "white")
    for column, source in enumerate(record["image"]):
        beside.paste(source.decode().resize(size), (column * size[0], 0))
    beside.paste(picture, (beside.width - size[0], 0))
    return named, beside


def _caption(record: dict) -> str:
    """The prompt and its score; two on the next line, more on a line each; then what rewards said beside the scores."""
    others = {"prompt", "seed", "image", "details", "step", "group", "prompt_file", "metadata"}
    scores = {name: score for name, score in record.items() if name not in others}
    told = [f"{name} failed" if score is None else f"{name} {score:.2f}" for name, score in scores.items()]
    prompt = " ".join(record["prompt"].split())
    below = ("\n" if len(told) > 2 else "  ").join(told)
    lines = [f"{prompt}\n{below}" if len(told) > 1 else f"{prompt}  {below}".strip()]
    for said in record.get("details", {}).values():
        shown = [f"{key} {value}" if isinstance(value, str) else f"{key} {value:.2f}" for key, value in said.items()]
        lines.append("  ".join(shown))
    return "\n".join(lines)
