"""What a reward does not see: how different a prompt's images are and how far they move; and what ends a run."""

import json
import math
import operator
import re
from pathlib import Path
from typing import NamedTuple

from common.distributed import gather, gather_objects, gather_rows, on_rank_0
from common.pictures import VAL_TOTAL, as_one_picture, open_png
from common.refusals import UNREADABLE, brief, reason
from common.sampler import gather_shares
from common.stops import say

import numpy as np
import torch

LARGEST = 96  # pixels of a side of what pictures are reduced to


# ---- pictures --------------------------------------------------------------------------------------------------------
def small_pictures(images):
    """(B, D) uint8 of B images or videos of one size (as_one_picture), the channels of their pixels.

    Each is reduced by a whole number, by means over boxes, so that no side is longer than LARGEST: composition and
    colour are left, and texture is not. Those of the embedded model are small enough as they are.
    """
    rows = []
    for image in images:
        picture = as_one_picture(image).convert("RGB")
        picture = picture.reduce(math.ceil(max(picture.size) / LARGEST))
        rows.append(torch.from_numpy(np.array(picture)).flatten())
    return torch.stack(rows)


def rms_difference(pictures, others):
    """(B,) root mean square difference of pictures (B, D) uint8 from others, of the range of a channel: in [0, 1]."""
    return ((pictures.double() - others.double()) / 255).square().mean(1).sqrt()


def diversity(pictures, group_size):
    """Mean over groups of the mean rms_difference between two pictures of a group: 0 where all are one picture.

    pictures: (P * group_size, D) uint8, group by group. In [0, 1]; black and white ones are 1 apart.
    """
    means = []
    for group in pictures.view(-1, group_size, pictures.shape[1]):
        distances = torch.pdist(group.double() / 255)  # (G (G - 1) / 2,), square roots of sums over D
        means.append(distances.mean() / math.sqrt(group.shape[1]))
    return torch.stack(means).mean()


def rollout_diversity(images, image_index, group_size):
    """`diversity` of a rollout, of whose images this rank has B, with their numbers (B,) among all. A collective."""
    return diversity(gather_rows(small_pictures(images), image_index), group_size)


# ---- an evaluation ---------------------------------------------------------------------------------------------------
def watch_metrics(folder, places, images, images_per_prompt):
    """val/diversity, of several images a prompt, and val/drift_from_base of an evaluation saved in RUN/samples/STEP.

    The drift is the mean rms_difference of an image from that of the same prompt and seed at step 0. Where there is
    none to compare with a line says why, and there is no drift. places (B,) and images: as save_samples took them. A
    collective; the same on all ranks.
    """
    pictures = small_pictures(images)  # (B, D)
    num_images = int(gather(torch.tensor(places)).max()) + 1
    metrics = {}
    if images_per_prompt > 1:
        metrics["val/diversity"] = diversity(gather_shares(pictures, num_images), images_per_prompt)
    base, problem = gather_objects(_find_base(folder) if on_rank_0() else None)[0]
    if problem is None:
        try:
            before = [open_png(base / f"{place:05d}.png") for place in places]
            if as_one_picture(before[0]).size != as_one_picture(images[0]).size:
                raise ValueError("of another size")
            before = small_pictures(before)
        except Exception as error:  # a library reads them, which can raise nearly anything
            problem = f"the images in {base} cannot be compared with ({reason(error)})"
    problems = [told for told in gather_objects(problem) if told]
    if problems:
        if on_rank_0():
            say(brief(f"no val/drift_from_base: {problems[0]}"))
        return metrics
    moved = gather_shares(rms_difference(pictures, before), num_images)  # (all images,)
    metrics["val/drift_from_base"] = moved.mean()
    return metrics


def _find_base(folder):
    """Where the images of step 0 are that an evaluation's in `folder` are compared with, and None; or None, and why."""
    folder = Path(folder)
    run = folder.parents[1]
    base = base_samples(run)
    if base is None:
        return None, f"neither {run} nor a run it goes on from has the images of an evaluation at step 0"
    try:
        is_same = _made_of(base) == _made_of(folder)
    except (*UNREADABLE, KeyError, TypeError):
        is_same = False
    if not is_same:
        return None, f"the images in {base} are of other prompts or seeds"
    return base, None


def base_samples(run):
    """samples/0000 of a run or, where it has none, of the run that its first start went on from, and so on; or None."""
    seen = set()
    while run not in seen:
        seen.add(run)
        samples = run / "samples" / "0000"
        if (samples / "samples.jsonl").is_file():
            return samples
        try:
            resume = json.loads((run / "args.json").read_text())["args"]["resume"]
        except (*UNREADABLE, KeyError, TypeError):
            return None
        if resume not in (None, "latest"):
            resume = Path(resume).absolute()
            run = resume.parents[1] if resume.suffix == ".pt" else resume
    return None


def _made_of(folder):
    """[(prompt, seed)] of the images of an evaluation, by place."""
    records = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return [(record["prompt"], record["seed"]) for record in records]


# ---- --stop_if -------------------------------------------------------------------------------------------------------
class StopRule(NamedTuple):
    """One of --stop_if: the run ends after an evaluation whose `metric` is below, or above, `limit`."""

    metric: str
    sign: str  # < or >
    limit: float

    def holds(self, value):
        compare = {"<": operator.lt, ">": operator.gt}[self.sign]
        return compare(value, self.limit)

    def __str__(self):
        return f"{self.metric}{self.sign}{self.limit:g}"


def read_stop_rules(texts):
    """The StopRules of --stop_if.

    Raises:
        ValueError: one is no metric of an evaluation, < or >, and a finite number.
    """
    rules = []
    for text in texts:
        match = re.fullmatch(r"\s*(val/[^\s<>]+)\s*([<>])\s*([-+.\d][^\s<>]*)\s*", text)
        try:
            limit = float(match[3])
        except (TypeError, ValueError):
            limit = math.nan
        if not math.isfinite(limit):
            must = "must be like 'val/ocr/mean<0.5': a metric of val/, < or >, a number; in quotes"
            raise ValueError(brief(f"--stop_if {text}: {must}"))
        rules.append(StopRule(match[1], match[2], limit))
    return rules


def check_stop_rules(rules, rewards, images_per_prompt):
    """Raises ValueError for a rule whose metric no evaluation logs that asks these rewards, by their names."""
    known = [*(f"val/{name}/mean" for name in rewards), VAL_TOTAL, "val/drift_from_base"]
    if images_per_prompt > 1:
        known.append("val/diversity")
    more = [f"val/{name}/failed" for name in rewards]
    more += [name.removesuffix("mean") + "stderr" for name in known if name.endswith("/mean")]
    for rule in rules:
        if rule.metric not in known + more:
            told = f"no evaluation logs {rule.metric}; there are {', '.join(known)}"
            raise ValueError(brief(f"--stop_if {rule}: {told}"))
