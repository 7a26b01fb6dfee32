"""One HTML file about one or several runs, to look at or to send: it needs no server and no network.

    python -m tools.report runs/mine
    python -m tools.report runs/mine runs/other --output compared.html

It has what looks wrong (the rules of docs/faq.md), the curves, the grids of every evaluation with a slider, the best,
worst and most changed samples of the last one, and the options in which the runs differ. The best has the highest
weighted total. What cannot be read is left out, and named on the page.
"""

import argparse
import base64
import html
import io
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from common.errors import RunError, error_prefix
from common.files import atomic_file
from common.images import as_one_picture, open_png
from common.run.record import changed_contents
from common.run.resuming import newest_record, of_the_score, records_at, resume_differences
from tools.compare import labels_of, overlay

from PIL import Image, ImageChops, ImageStat

SHOWN = 4  # samples of a kind
# on which an image and its scores do not depend
NOT_OF_AN_IMAGE = ("reward_weights", "best_by", "max_prompts", "eval_images_per_prompt")
FAQ = Path(__file__).parents[1] / "docs" / "faq.md"
STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #ccc }
img { max-width: 100%; height: auto } table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; border-bottom: 1px solid #eee;
  min-width: 5rem; overflow-wrap: anywhere }
.curves { overflow-x: auto } .curves img { min-width: 44rem }
.wrong { background: #fff3e0; padding: .5rem 1rem; border-left: 4px solid #e65100; margin: .5rem 0 }
.fine { background: #e8f5e9; padding: .5rem 1rem; border-left: 4px solid #2e7d32 }
figure img { width: 11rem; image-rendering: pixelated }
figure { display: inline-block; margin: .5rem 1rem .5rem 0; max-width: 24rem } figcaption { font-size: .85rem }
input[type=range] { width: 100% }
"""
SCRIPT = """
for (const box of document.querySelectorAll(".slider")) {
  const shown = box.querySelectorAll("img"), range = box.querySelector("input"), label = box.querySelector("output")
  const show = () => shown.forEach((image, i) => {
    image.hidden = i != range.value
    if (i == range.value) label.textContent = image.alt
  })
  range.addEventListener("input", show)
  show()
}
"""


# ---- files, of which a kill may have cut any -------------------------------------------------------------------------
@contextmanager
def leaving_out(subject: Path | str, unread: list[str]) -> Iterator[None]:
    """Whatever is wrong with a file, or its line, ends the block and becomes a line of `unread`."""
    try:
        with error_prefix(subject, Exception):
            yield
    except ValueError as error:
        unread.append(str(error))


def read_lines(file: Path, unread: list[str]) -> list[tuple[str, dict]]:
    """(file and line, record) of the lines of a .jsonl file that can be read."""
    found = []
    with leaving_out(file, unread):
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            where = f"{file}, line {number}"
            with leaving_out(where, unread):
                found.append((where, dict(json.loads(line))))
    return found


def read_rows(folder: Path, unread: list[str]) -> list[dict]:
    """A run's metrics by step."""
    rows = []
    for where, row in read_lines(folder / "metrics.jsonl", unread):
        with leaving_out(where, unread):
            wrong = [name for name, value in row.items() if not isinstance(value, int | float)]
            if wrong:
                raise ValueError(f"{wrong[0]} is not a number")
            if "training/global_step" not in row:
                raise ValueError("it has no training/global_step")
            rows.append(row)
    return rows


def read_record(folder: Path, unread: list[str]) -> dict:
    """A run's options, command and versions."""
    file = newest_record(folder)
    with leaving_out(file, unread):
        record = json.loads(file.read_text(encoding="utf-8"))
        return record | {"args": dict(record["args"]), "versions": dict(record.get("versions") or {})}
    return {"args": {}, "versions": {}}


# ---- what looks wrong ------------------------------------------------------------------------------------------------
class Finding(NamedTuple):
    """Something that looks wrong in a run."""

    what: str  # with its number
    place: "Place"  # where docs/faq.md explains it


class Place(NamedTuple):
    """A paragraph of docs/faq.md."""

    heading: str  # of the section
    item: int | None = None  # the number of the section's item, from 1; None: the section's first paragraph


def explanation(place: Place) -> str:
    """The paragraph's words, without Markdown's marks."""
    section = FAQ.read_text().split(f"## {place.heading}\n\n")[1].split("\n## ")[0]
    if place.item is None:
        text = section.split("\n\n")[0]
    else:
        text = re.split(r"^\d\. ", section, flags=re.MULTILINE)[place.item]
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)  # a link's words
    return " ".join(text.replace("`", "").replace("**", "").split())


def series(rows: Sequence[dict], name: str) -> list[float]:
    """The values of a metric in the rows that have it. LookupError: none has it."""
    found = [row[name] for row in rows if name in row]
    if not found:
        raise LookupError(name)
    return found


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last third. LookupError: there are fewer than three values."""
    if len(values) < 3:
        raise LookupError("fewer than three values")
    size = len(values) // 3
    return statistics.mean(values[:size]), statistics.mean(values[-size:])


def flat_reward(rows: Sequence[dict], options: dict) -> str | None:
    """Hardly any prompt has images that score differently, and the reward has not risen."""
    _, zero_std = thirds(series(rows, "critic/rewards/zero_std_ratio"))
    first, last = thirds(series(rows, "critic/rewards/mean"))
    if zero_std > 0.9 and not last > first + 0.02:
        return f"zero_std_ratio is {zero_std:.2f} at the end, and the reward has not risen ({first:.3f} to {last:.3f})"
    return None


def still_ratio(rows: Sequence[dict], options: dict) -> str | None:
    """The ratio to the old policy never leaves 1, over several optimizer steps a rollout."""
    counts = [options[name] for name in ("updates_per_rollout", "epochs_per_rollout") if name in options]
    has_several = math.prod(counts) > 1
    found = series(rows, "actor/ratio_std")[1:]
    if not found or (not has_several and len(counts) < 2):  # a fork may call the other one otherwise
        raise LookupError("a second step, or the number of updates")
    return "ratio_std is 0 in every step" if has_several and max(found) == 0 else None


def clipped(rows: Sequence[dict], options: dict) -> str | None:
    """Most of the update is cut away."""
    _, last = thirds(series(rows, "actor/pg_clipfrac"))
    return f"pg_clipfrac is {last:.2f} at the end (healthy: below 0.3)" if last > 0.3 else None


def no_gradient(rows: Sequence[dict], options: dict) -> str | None:
    """Half of the steps, or more, have no gradient."""
    found = series(rows, "actor/grad_norm")
    zeros = sum(value == 0 for value in found)
    return f"grad_norm is 0 in {zeros} of {len(found)} steps" if 2 * zeros >= len(found) else None


def less_diverse(rows: Sequence[dict], options: dict) -> str | None:
    """The images of a prompt become one."""
    first, last = thirds(series(rows, "critic/diversity"))
    return f"critic/diversity fell from {first:.3f} to {last:.3f}" if last < first / 2 else None


def held_out_falls(rows: Sequence[dict], options: dict) -> str | None:
    """Rewards of the evaluation fall, each by more than twice its two standard errors, while the total rises."""
    totals = series(rows, "val/weighted_total/mean")
    names = {name for row in rows for name in row if name.startswith("val/") and name.endswith("/mean")}
    falls = []
    compared = 0
    for name in sorted(names - {"val/weighted_total/mean"}):
        error = name.removesuffix("/mean") + "/stderr"
        found, errors = series(rows, name), [row[error] for row in rows if error in row]
        if len(found) < 2 or len(totals) < 2 or len(errors) != len(found):
            continue
        compared += 1
        bound = 2 * (errors[0] + errors[-1])
        if found[-1] < found[0] - bound and totals[-1] > totals[0]:
            falls.append(f"{name} fell from {found[0]:.3f} to {found[-1]:.3f} (by more than {bound:.3f})")
    if not compared:
        raise LookupError("two evaluations of a reward with its errors")
    return f"while the total rose, {' and '.join(falls)}" if falls else None


def mismatch_grows(rows: Sequence[dict], options: dict) -> str | None:
    """The engine's velocities leave the trainer's."""
    first, last = thirds(series(rows, "rollout_corr/velocity_diff_max"))
    return f"velocity_diff_max grew from {first:.2g} to {last:.2g}" if last > max(3 * first, 1e-3) else None


NOT_RISING = "The reward does not rise"
WORSE = Place("The reward rises and the images get worse")
# a rule raises LookupError where a run lacks the metrics that it reads, as a fork that has renamed them
RULES: dict[Callable[[Sequence[dict], dict], str | None], Place] = {
    flat_reward: Place(NOT_RISING, 1),
    still_ratio: Place(NOT_RISING, 3),
    clipped: Place(NOT_RISING, 4),
    no_gradient: Place(NOT_RISING, 3),
    less_diverse: WORSE,
    held_out_falls: WORSE,
    mismatch_grows: Place(NOT_RISING, 5),
}


def find_faults(rows: Sequence[dict], options: dict) -> tuple[list[Finding], int]:
    """What the RULES find in the rows of a metrics.jsonl of a run with these options, and how many of them could look,
    as the run has what they read."""
    faults = []
    could_look = 0
    for rule, place in RULES.items():
        with suppress(LookupError):
            what = rule(rows, options)
            could_look += 1
            if what:
                faults.append(Finding(what, place))
    return faults, could_look


# ---- pictures --------------------------------------------------------------------------------------------------------
def image_tag(image: Path | Image.Image, alt: str) -> str:
    """An <img> that holds the picture."""
    if isinstance(image, Path):
        data = image.read_bytes()
    else:
        buffer = io.BytesIO()
        image.save(buffer, "png")
        data = buffer.getvalue()
    return f'<img alt="{html.escape(alt, quote=True)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def curves(runs: dict[str, list[dict]]) -> str:
    """The curves of all runs, a colour for each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curves.png"
        overlay(runs, None, path)
        return f'<div class="curves">{image_tag(path, "curves")}</div>'


def grids(folder: Path, unread: list[str]) -> str:
    """A slider over the grids of a run's evaluations; "" where it has none."""
    images = []
    grids = [file for file in folder.glob("grid_*.png") if re.fullmatch(r"grid_\d+", file.stem)]
    for step, file in sorted((int(file.stem.removeprefix("grid_")), file) for file in grids):
        with leaving_out(file, unread):
            open_png(file)
            images.append(image_tag(file, f"step {step}"))
    if not images:
        return ""
    last = len(images) - 1
    slider = f'<input type="range" min="0" max="{last}" value="{last}" aria-label="evaluation">'
    return f'<div class="slider"><output></output>{slider}{"".join(images)}</div>'


class Sample(NamedTuple):
    """A prompt's image at the first and at the last evaluation."""

    record: dict  # of samples.jsonl, of the last one
    before: Image.Image | None
    after: Image.Image
    score: float | None  # the weighted total; None where one of its rewards failed, or it has none
    change: float  # RMS of the pixels' difference, 0 to 1


def made_of(record: dict) -> tuple[object, tuple[object, object]]:
    """A sample's file, and what its image is of: a run that goes on may have other prompts for evaluation."""
    return str(record.get("file")), (record.get("prompt"), record.get("seed"))


def evaluation_differences(run: Path, first: int, last: int) -> list[str]:
    """["eval_num_inference_steps: 6 -> 8"]: what decides an evaluation's images and scores, the weights apart, and was
    changed by a resume between the evaluations of two steps. ValueError: a record of the run's options cannot be read.
    """
    records = []
    for file in dict.fromkeys(records_at(run, first) + records_at(run, last)):
        with error_prefix(file, Exception):  # whatever it holds
            record = json.loads(file.read_text(encoding="utf-8"))
            records.append((of_an_image(record["args"]), dict(record.get("contents") or {})))
    (options, contents), *others = records
    found: list[str] = []
    for options_after, contents_after in others:
        found += resume_differences(options, options_after)
        changed = changed_contents(contents, contents_after)
        found += [f"{name} has other contents" for name, of_scores in changed if of_scores]
    return found


def of_an_image(options: dict) -> dict:
    """{name: value} of the options and settings that an image of an evaluation and each of its scores depend on."""
    found = of_the_score(options | {"best_by": "any"})  # with the settings of --eval_reward
    found["guidance_scale"] = found.pop("eval_guidance_scale") or found["guidance_scale"]
    found |= {name: options.get(name) for name in ("eval_reward", "family")}
    return {name: value for name, value in found.items() if name not in NOT_OF_AN_IMAGE}


def evaluations(folder: Path) -> list[Path]:
    """The folders of a run's evaluations, by step."""
    found = [path.parent for path in folder.glob("samples/*/samples.jsonl") if path.parent.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))  # 9995 comes before 10000


def changed_since_first(folder: Path) -> list[str]:
    """What was changed between a run's first and last evaluation, so that their images cannot be compared."""
    steps = [int(path.name) for path in evaluations(folder)]
    with leaving_out(folder, []):  # the page has named the file
        return evaluation_differences(folder, steps[0], steps[-1])
    return ["its options cannot be read"]


def reward_weights(options: dict, records: Sequence[dict]) -> dict[str, float]:
    """{reward: weight} of the rewards that a run's total is of. Where no record has one of these, the only reward that
    the records have; {} where they have several, whose scales may differ."""
    names = [name.rpartition(":")[2] for name in options.get("reward") or ()]
    weights = dict(zip(names, options.get("reward_weights") or (), strict=False))
    found = {name: float(weight) for name, weight in weights.items() if any(name in record for record in records)}
    scored = {name for record in records for name, value in record.items() if isinstance(value, float)}
    return found or (dict.fromkeys(scored, 1.0) if len(scored) == 1 else {})


def weighted_total(record: dict, weights: dict[str, float]) -> float | None:
    """The weighted sum of those scores that a sample's prompt asks for; None where one failed, or there is none."""
    scores = [(record[name], weight) for name, weight in weights.items() if name in record]
    if not scores or not all(isinstance(score, float) for score, _ in scores):
        return None
    return sum(score * weight for score, weight in scores)


def read_samples(folder: Path, unread: list[str]) -> list[Sample]:
    """The samples of a run's last evaluation, beside those of its first that have the same prompt and seed, if both
    were sampled and scored in the same way."""
    steps = evaluations(folder)
    if not steps:
        return []
    first, last = steps[0], steps[-1]
    is_pair = first != last and not changed_since_first(folder)
    firsts = read_lines(first / "samples.jsonl", unread) if is_pair else []
    made_first = dict(made_of(record) for _, record in firsts)
    lasts = read_lines(last / "samples.jsonl", unread)
    weights: dict[str, float] = {}
    with leaving_out(newest_record(folder), unread):  # an option of another type
        weights = reward_weights(read_record(folder, [])["args"], [record for _, record in lasts])
    found = []
    for where, record in lasts:
        with leaving_out(where, unread):
            file, other = last / record["file"], first / record["file"]
            with error_prefix(file, Exception):
                after = as_one_picture(open_png(file))
            before = None
            if made_of(record) in made_first.items() and other.is_file():  # the same file, prompt and seed
                with leaving_out(other, unread):
                    before = as_one_picture(open_png(other))
            change = 0.0
            if before is not None and before.size == after.size:
                squares = ImageStat.Stat(ImageChops.difference(before, after)).sum2
                change = math.sqrt(sum(squares) / (3 * before.width * before.height)) / 255
            score = weighted_total(record, weights)
            found.append(Sample(record | {"prompt": str(record["prompt"])}, before, after, score, change))
    return found


def figure(sample: Sample) -> str:
    """A sample before and after, with its prompt and scores."""
    parts = [image_tag(sample.before, "before")] if sample.before else []
    parts.append(image_tag(sample.after, "after"))
    told = [f"{name} {value:.3f}" for name, value in sample.record.items() if isinstance(value, float)]
    caption = html.escape(f"{sample.record['prompt']} ({', '.join(told)})")
    return f"<figure>{' '.join(parts)}<figcaption>{caption}</figcaption></figure>"


def samples(folder: Path, unread: list[str]) -> str:
    """The best, worst and most changed samples of a run; "" where it has none."""
    found = read_samples(folder, unread)
    if not found:
        return ""
    shown = "there is one evaluation"
    if len(evaluations(folder)) > 1:
        has_before = any(sample.before for sample in found)
        shown = "each at the first evaluation, then at the last" if has_before else "none is the first one's as well"
        if changed := changed_since_first(folder):
            shown = f"the first one is not shown, as since then a resume changed {html.escape('; '.join(changed))}"
    ranked = sorted((sample.score, number) for number, sample in enumerate(found) if sample.score is not None)
    worst = [found[number] for _, number in ranked]
    kinds = {
        "best": worst[::-1],
        "worst": worst,
        "most changed": sorted(found, key=lambda sample: -sample.change),
    }
    parts = [f"<p>Prompts of the last evaluation; {shown}.</p>"]
    if len(ranked) < len(found):
        told = f"{len(found) - len(ranked)} of {len(found)} samples have no weighted total"
        parts.append(f"<p>{told}: they are neither best nor worst.</p>")
    for kind, ordered in kinds.items():
        if not ordered:
            continue
        parts.append(f"<h3>{kind.capitalize()}</h3>" + "".join(figure(sample) for sample in ordered[:SHOWN]))
    return "".join(parts)


# ---- options ---------------------------------------------------------------------------------------------------------
def differing_options(records: dict[str, dict]) -> list[tuple[str, list[str]]]:
    """[(option, its value in each run)] of the options in which the runs differ. records: newest_record's, by label."""
    names = sorted({name for record in records.values() for name in record["args"]})
    rows = [(name, [json.dumps(record["args"].get(name)) for record in records.values()]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(cells)}</table>"


# ---- the page --------------------------------------------------------------------------------------------------------
def page(folders: Sequence[Path]) -> str:
    """The HTML of the runs in these folders.

    Raises:
        ValueError: a folder is no run's.
    """
    for folder in folders:
        if not newest_record(folder).is_file() and not (folder / "metrics.jsonl").is_file():
            raise ValueError(f"{folder}: no run (it has neither args.json nor metrics.jsonl)")
    labels = labels_of([str(folder) for folder in folders])
    unread: list[str] = []  # what is left out, and why
    runs = {label: read_rows(folder, unread) for label, folder in zip(labels, folders, strict=True)}
    records = {label: read_record(folder, unread) for label, folder in zip(labels, folders, strict=True)}
    parts = [f"<h1>{html.escape(', '.join(labels))}</h1>", "<h2>What looks wrong</h2>"]
    for (label, rows), folder in zip(runs.items(), folders, strict=True):
        with leaving_out(newest_record(folder), unread):  # an option of another type
            faults, could_look = find_faults(rows, records[label]["args"])
            for fault in faults:
                told = f"<b>{html.escape(label)}</b>: {html.escape(fault.what)}."
                parts.append(f'<p class="wrong">{told}<br>{html.escape(explanation(fault.place))}</p>')
            if rows:
                told = f"{could_look} of {len(RULES)} rules could look"
                if could_look < len(RULES):
                    told += " (the run lacks the metrics of the rest, or enough steps)"
                if could_look and not faults:
                    told += ". None found anything. They read metrics alone: look at the samples below as well"
                kind = ' class="fine"' if could_look and not faults else ""
                parts.append(f"<p{kind}><b>{html.escape(label)}</b>: {told}.</p>")
    if any(runs.values()):
        parts += ["<h2>Curves</h2>", curves(runs)]
    for label, folder in zip(labels, folders, strict=True):
        shown = [("Evaluations", grids(folder, unread)), ("Samples", samples(folder, unread))]
        parts += [f"<h2>{title}: {html.escape(label)}</h2>{content}" for title, content in shown if content]
    if len(folders) > 1:
        parts += ["<h2>Options that differ</h2>"]
        differing = differing_options(records)
        parts.append(table(["option", *labels], [[name, *values] for name, values in differing]))
    parts.append("<h2>How they were last started</h2>")
    started = []
    fields = {"command": "command", "commit": "git_hash", "commit of the script": "script_git_hash", "device": "device"}
    for title, name in fields.items():
        values = [str(record.get(name) or "") for record in records.values()]
        if any(values) or name != "script_git_hash":  # which few have
            started.append([title, *values])
    for library in sorted({name for record in records.values() for name in record["versions"]}):
        started.append([library, *(str(record["versions"].get(library, "")) for record in records.values())])
    parts.append(table(["", *labels], started))
    if unread:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in unread)
        parts.insert(1, f'<h2>Left out, as it cannot be read</h2><ul class="wrong">{lines}</ul>')
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    title = html.escape(", ".join(labels))
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>{title}</title><style>{STYLE}</style></head>'
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, help="the file (default: report.html in the first run)")
    args = parser.parse_args(argv)
    path = args.output or args.runs[0] / "report.html"
    try:
        content = page(args.runs)
        with atomic_file(path) as temporary:
            temporary.write_text(content, encoding="utf-8", errors="replace")
    except (OSError, ValueError, RunError) as error:
        sys.exit(f"tools.report: error: {error}")
    print(path)


if __name__ == "__main__":
    main()
