"""The published rules of the reward geneval: does what was found in an image fulfil a prompt's record?

benchmarks/geneval_pairs.py compares them with the published code.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from PIL import Image

# COCO's objects in the order of the detector's labels, three of them under the names that the prompts have
NAMES = """
    person|bicycle|car|motorcycle|airplane|bus|train|truck|boat|traffic light|fire hydrant|stop sign
    parking meter|bench|bird|cat|dog|horse|sheep|cow|elephant|bear|zebra|giraffe|backpack|umbrella|handbag
    tie|suitcase|frisbee|skis|snowboard|sports ball|kite|baseball bat|baseball glove|skateboard|surfboard
    tennis racket|bottle|wine glass|cup|fork|knife|spoon|bowl|banana|apple|sandwich|orange|broccoli|carrot
    hot dog|pizza|donut|cake|chair|couch|potted plant|bed|dining table|toilet|tv|laptop|computer mouse
    tv remote|computer keyboard|cell phone|microwave|oven|toaster|sink|refrigerator|book|clock|vase|scissors
    teddy bear|hair drier|toothbrush
"""
CLASSES = [name.strip() for name in re.split(r"[|\n]", NAMES.strip())]
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
PLACES = ("left of", "right of", "above", "below")
MOST = 16  # detections of a class
MARGIN = 0.1  # of both sizes: nearer objects are neither left nor right of each other


Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


class Detection(NamedTuple):
    """An object that the detector has found."""

    box: Box
    score: float
    mask: Image.Image | None = None  # mode L, of the image's size: 255 where it is


Objects = dict[str, list[Detection]]  # by class, the surest first
Colours = Callable[[str, list[Detection]], Sequence[str]]  # of the detections of a class


def check_metadata(record: dict) -> None:
    """Raise ValueError where a prompt's record is not GenEval's. A field that is null, as columns of a table are, is as
    if it were not there."""
    clauses, excluded = record.get("include"), record.get("exclude") or []
    is_geneval = isinstance(record.get("tag"), str) and isinstance(clauses, list) and isinstance(excluded, list)
    if not is_geneval or not clauses or not all(isinstance(clause, dict) for clause in (*clauses, *excluded)):
        raise ValueError('the reward geneval needs "tag" and "include", as in GenEval\'s evaluation_metadata.jsonl')
    for number, clause in enumerate([*clauses, *excluded]):
        if clause.get("class") not in CLASSES:
            raise ValueError(f"geneval: the class {clause.get('class')!r} is none of COCO's 80")
        if type(clause.get("count")) is not int or clause["count"] < 1:
            raise ValueError(f"geneval: the count of {clause['class']} must be a whole number above 0")
        if clause.get("color") not in (None, *COLOURS):
            raise ValueError(f"geneval: the color {clause['color']!r} is none of {', '.join(COLOURS)}")
        place = clause.get("position")
        is_place = isinstance(place, list | tuple) and len(place) == 2 and place[0] in PLACES and type(place[1]) is int
        if place is not None and not (is_place and 0 <= place[1] < number):
            told = f"one of {', '.join(PLACES)}, and the number of an earlier clause"
            raise ValueError(f"geneval: the position of {clause['class']} must be {told}")


def is_right(record: dict, objects: Objects, colours: Colours) -> bool:
    """Whether the objects fulfil every clause of "include" and none of "exclude".

    A clause of "include" looks at its `count` surest objects: they must be so many, all of its colour, and each of
    them in its place relative to each object of an earlier clause, which must itself be fulfilled. colours(class,
    detections) names a colour for each.
    """
    fulfilled: list[list[Detection]] = []  # the objects of each clause; none where it is not fulfilled
    for clause in record["include"]:
        name = clause["class"]
        found = objects.get(name, [])[: clause["count"]]
        is_fulfilled = len(found) == clause["count"]
        if is_fulfilled and clause.get("color"):
            is_fulfilled = all(colour == clause["color"] for colour in colours(name, found))
        if is_fulfilled and clause.get("position"):
            place, number = clause["position"]
            others = fulfilled[number]
            is_fulfilled = len(others) > 0 and all(place in places_of(a, b) for a in found for b in others)
        fulfilled.append(found if is_fulfilled else [])
    excluded = record.get("exclude") or []
    too_many = any(len(objects.get(clause["class"], [])) >= clause["count"] for clause in excluded)
    return all(fulfilled) and not too_many


def places_of(one: Detection, other: Detection) -> set[str]:
    """Where one object is relative to the other: of "left of", "right of", "above", "below", none, one or two.

    The way between their centres, shortened in each direction by MARGIN of both sizes, must be more than half of the
    whole way.
    """
    offsets = []
    shortened = []
    for low, high in ((0, 2), (1, 3)):  # across, down
        offset = (one.box[low] + one.box[high] - other.box[low] - other.box[high]) / 2
        sizes = abs(one.box[high] - one.box[low]) + abs(other.box[high] - other.box[low])
        offsets.append(offset)
        shortened.append(math.copysign(max(abs(offset) - MARGIN * sizes, 0), offset))
    if all(abs(part) < 1e-3 for part in shortened):
        return set()
    across, down = (part / math.hypot(*offsets) for part in shortened)
    found = zip(PLACES, (across < -0.5, across > 0.5, down < -0.5, down > 0.5), strict=True)
    return {place for place, is_there in found if is_there}


def kept(objects: Objects, threshold: float) -> Objects:
    """The objects above the score, at most MOST of a class, the surest first."""
    found = {}
    for name, detections in objects.items():
        sure = [each for each in detections if each.score > threshold]
        found[name] = sorted(sure, key=lambda each: each.score, reverse=True)[:MOST]
    return {name: detections for name, detections in found.items() if detections}


def fraction_right(record: dict, objects: Objects, colours: Colours) -> float:
    """How much of "include" the objects fulfil, in [0, 1]: a mean of fractions, as Flow-GRPO trains (arXiv 2505.05470).

    A clause with n objects of its class where it asks for N gives 1 - |n - N| / N. If it names a colour or a place it
    gives a second number, which is 0 unless n = N: 1 - |m - N| / N, where m objects have the colour; 1 for a place in
    which each object is relative to each of an earlier, fulfilled clause, else 0. All objects above the threshold
    count, so that "exclude" has nothing to add in GenEval's records, whose excluded classes are included ones as well.
    A clause of "exclude" with another class gives a number, which is 0 if there are too many.

    Two departures from Flow-GRPO's published server: a fraction is never below 0, and a wrong place gives a 0, where
    the server gives a 0 and a 1.
    """
    fractions: list[float] = []
    fulfilled: list[list[Detection]] = []
    for clause in record["include"]:
        name, count = clause["class"], clause["count"]
        found = objects.get(name, [])
        parts = [share_of(len(found), count)]
        if clause.get("color"):
            right = list(colours(name, found)).count(clause["color"]) if len(found) == count else 0
            parts.append(share_of(right, count))
        if clause.get("position"):
            place, number = clause["position"]
            others = fulfilled[number]
            is_there = all(place in places_of(one, other) for one in found for other in others)
            parts.append(float(is_there and parts[-1] == 1 and len(others) > 0))
        fractions += parts
        fulfilled.append(found if all(part == 1 for part in parts) else [])
    included = {clause["class"] for clause in record["include"]}
    for clause in record.get("exclude") or []:
        if clause["class"] not in included:
            fractions.append(float(len(objects.get(clause["class"], [])) < clause["count"]))
    return sum(fractions) / len(fractions)


def share_of(found: int, asked: int) -> float:
    return max(1 - abs(found - asked) / asked, 0.0)
