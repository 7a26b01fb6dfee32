"""GenEval's published rules beside common/rewards/_geneval_rules.py, on random detections.

    git clone https://github.com/djghosh13/geneval
    python benchmarks/geneval_pairs.py geneval

The functions `evaluate` and `relative_position` are taken from the published file, without mmdet; colours are drawn for
both. Every record of the published prompts meets 200 random images. Prints how many verdicts and places differ.
"""

import ast
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.rewards._geneval_rules import COLOURS, Detection, is_right, kept, places_of

import numpy as np

IMAGES = 200


def published(folder):
    """The published functions, with the published thresholds."""
    source = (folder / "evaluation" / "evaluate_images.py").read_text()
    wanted = [n for n in ast.parse(source).body if getattr(n, "name", "") in ("evaluate", "relative_position")]
    names = {"np": np, "COLORS": list(COLOURS), "POSITION_THRESHOLD": 0.1, "color_classification": colours_of_boxes}
    exec(compile(ast.Module(wanted, []), "published", "exec"), names)
    return names["evaluate"], names["relative_position"]


def colour(box):
    """A box's colour, the same for both: drawn from its numbers."""
    return COLOURS[int(sum(box[:4])) % 3]


def colours_of_boxes(image, objects, name):
    return [colour(box) for box, _ in objects]


def random_objects(record, draw):
    """Up to six objects of each class that the record names, a good part of them below the published threshold."""
    names = {clause["class"] for clause in [*record["include"], *record.get("exclude", [])]}
    objects = {}
    for name in sorted(names):
        objects[name] = []
        for _ in range(draw.randrange(7)):
            left, top = draw.uniform(0, 400), draw.uniform(0, 400)
            box = (left, top, left + draw.uniform(1, 200), top + draw.uniform(1, 200))
            objects[name].append(Detection(box, draw.uniform(0, 1)))
    return objects


def main():
    folder = Path(sys.argv[1])
    evaluate, relative_position = published(folder)
    records = [json.loads(line) for line in (folder / "prompts" / "evaluation_metadata.jsonl").read_text().splitlines()]
    draw = random.Random(0)
    verdicts = places = wrong_verdicts = wrong_places = right = 0
    for record in records:
        for _ in range(IMAGES):
            objects = kept(random_objects(record, draw), 0.9 if record["tag"] == "counting" else 0.3)
            theirs = {name: [(np.array([*d.box, d.score]), None) for d in found] for name, found in objects.items()}
            expected, _ = evaluate(None, theirs, record)
            found = is_right(record, objects, lambda name, ds: [colour(d.box) for d in ds])
            verdicts += 1
            right += expected
            wrong_verdicts += found != expected
            every = [d for ds in objects.values() for d in ds]
            for one, other in zip(every, every[1:], strict=False):
                pair = [(np.array([*d.box, d.score]), None) for d in (one, other)]
                places += 1
                wrong_places += places_of(one, other) != relative_position(*pair)
    print("| compared | number | of which right | differ |")
    print("|---|---|---|---|")
    print(f"| verdicts of {len(records)} records | {verdicts} | {right} | {wrong_verdicts} |")
    print(f"| places of two objects | {places} | | {wrong_places} |")


if __name__ == "__main__":
    main()
