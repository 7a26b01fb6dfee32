"""Scenes: pictures of emoji of which GenEval's records are true, drawn by code. No program of its own.

A record asks for kinds of objects, their number, colour or place, in GenEval's wording. `random_records` makes records,
and `draw_scene` draws one: sprites of 48 px on a plain ground of 128 px. assets/make_sprites.py makes assets/sprites.
"""

import functools
import random
from pathlib import Path

from common.rewards._geneval_rules import COLOURS

import numpy as np
from PIL import Image

SPRITES = Path(__file__).parent / "sprites"
SIDE, SPRITE = 128, 48  # pixels
CELLS = ((10, 10), (70, 10), (10, 70), (70, 70))  # left and top of a sprite, up to JITTER off
JITTER = 6
GROUNDS = ((168, 200, 224), (150, 150, 150), (214, 196, 160))  # of scenes on a grid: RGB of 255
GRID, FINE_GRID = 16, 8  # pixels: a token of the embedded model's transformer, and of its VAE's training a latent
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
NUMBERS = {2: "two", 3: "three", 4: "four"}
PAINTS = {  # RGB of 255
    "red": (204, 36, 36),
    "orange": (244, 140, 24),
    "yellow": (248, 216, 48),
    "green": (48, 152, 64),
    "blue": (40, 88, 208),
    "purple": (124, 52, 168),
    "pink": (248, 148, 192),
    "brown": (120, 72, 40),
    "black": (32, 32, 36),
    "white": (242, 242, 240),
}
DARK = ("skateboard", "traffic light")  # kinds whose body is dark


# ---- sprites ---------------------------------------------------------------------------------------------------------
def kinds():
    """The kinds of objects that have a sprite, sorted."""
    return sorted(path.stem.replace("_", " ") for path in SPRITES.glob("*.png"))


@functools.cache
def load_sprite(kind, colour=None):
    """The sprite (RGBA) of a kind, in its own colours or painted."""
    sprite = Image.open(SPRITES / f"{kind.replace(' ', '_')}.png").convert("RGBA")
    if colour:
        sprite = paint(sprite, PAINTS[colour], kind in DARK)
    return sprite.resize((SPRITE, SPRITE), Image.Resampling.LANCZOS)


def paint(sprite, colour, is_dark):
    """The sprite with its body in another colour: what is colourful, or what is light where little is colourful; of
    kinds with a dark body, what is not colourful.

    The body's median becomes the colour; what is darker or lighter in the body stays so, at 0.6 of the contrast. The
    rest (wheels, windows, a face) keeps its colours.
    """
    pixels = np.asarray(sprite, dtype=float)
    rgb, alpha = pixels[..., :3], pixels[..., 3]
    light = rgb @ (0.299, 0.587, 0.114)
    most = rgb.max(-1)
    saturation = (most - rgb.min(-1)) / np.maximum(most, 1)
    opaque = alpha > 128
    colourful = (saturation > 0.35) & (most > 64)
    if is_dark:
        share = np.clip((0.5 - saturation) / 0.2, 0, 1)
    elif colourful[opaque].mean() > 0.3:
        share = np.clip((saturation - 0.2) / 0.25, 0, 1) * (most > 40)
    else:
        share = np.clip((light - 70) / 40, 0, 1)
    shade = 1 + 0.6 * (light / np.median(light[opaque & (share > 0.5)]) - 1)
    shade = shade[..., None]
    colour = np.array(colour, dtype=float)
    painted = np.where(shade < 1, colour * shade, colour + (255 - colour) * np.clip(shade - 1, 0, 1))
    mixed = rgb + (painted - rgb) * share[..., None]
    return Image.fromarray(np.dstack([mixed, alpha]).clip(0, 255).round().astype(np.uint8), "RGBA")


# ---- records ---------------------------------------------------------------------------------------------------------
def with_article(words):
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(kind):
    return {"bus": "buses", "scissors": "scissors"}.get(kind, f"{kind}s")


def random_record(tag, rng, names):
    """A record of a part (tag) as GenEval's evaluation_metadata.jsonl has it."""
    one, two = rng.sample(names, 2)
    first = {"class": one, "count": 1}
    if tag == "single_object":
        return {"tag": tag, "include": [first], "prompt": f"a photo of {with_article(one)}"}
    if tag == "two_object":
        told = f"a photo of {with_article(one)} and {with_article(two)}"
        return {"tag": tag, "include": [first, {"class": two, "count": 1}], "prompt": told}
    if tag == "counting":
        count = rng.choice(list(NUMBERS))
        excluded = [{"class": one, "count": count + 1}]
        told = f"a photo of {NUMBERS[count]} {plural(one)}"
        return {"tag": tag, "include": [{"class": one, "count": count}], "exclude": excluded, "prompt": told}
    if tag == "colors":
        colour = rng.choice(COLOURS)
        told = f"a photo of {with_article(f'{colour} {one}')}"
        return {"tag": tag, "include": [first | {"color": colour}], "prompt": told}
    if tag == "position":
        place = rng.choice(("left of", "right of", "above", "below"))
        placed = {"class": two, "count": 1, "position": [place, 0]}
        return {
            "tag": tag,
            "include": [first, placed],
            "prompt": f"a photo of {with_article(two)} {place} {with_article(one)}",
        }
    colours = rng.sample(COLOURS, 2)
    told = " and ".join(with_article(f"{colour} {kind}") for colour, kind in zip(colours, (one, two), strict=True))
    coloured = [{"class": kind, "count": 1, "color": colour} for colour, kind in zip(colours, (one, two), strict=True)]
    return {"tag": tag, "include": coloured, "prompt": f"a photo of {told}"}


def is_held_out(record):
    """Whether a record asks for a pair of kinds, a kind in a colour or a kind in a number that no training record has:
    a quarter of the pairs and of the numbers, a fifth of the colours, spread evenly. A single object never is."""
    names = kinds()
    places = [names.index(clause["class"]) for clause in record["include"]]
    for place, clause in zip(places, record["include"], strict=True):
        if "color" in clause and (place + 3 * COLOURS.index(clause["color"])) % 5 == 0:
            return True
    if record["tag"] == "counting":
        return (places[0] + record["include"][0]["count"]) % 4 == 0
    return len(places) == 2 and sum(places) % 4 == 1


def draw_records(tag, count, seed, held_out=False):
    """`count` random records of a part, held out or not (single objects are both). The same may come again."""
    rng = random.Random(f"{seed} {tag} {held_out}")
    records = []
    while len(records) < count:
        record = random_record(tag, rng, kinds())
        if tag == "single_object" or is_held_out(record) == held_out:
            records.append(record)
    return records


# ---- pictures --------------------------------------------------------------------------------------------------------
def draw_scene(record, rng, grid=0):
    """An image (PIL, RGB) of which a record is true. grid: for a tiny model to learn from; the ground is one of
    GROUNDS, and sprites begin at multiples of `grid` pixels. 0: both are free."""
    clauses = record["include"]
    asked = [clause.get("color") for clause in clauses]
    image = Image.new("RGB", (SIDE, SIDE), random_ground(rng, [PAINTS[colour] for colour in asked if colour], grid > 0))
    objects = [clause for clause in clauses for _ in range(clause["count"])]
    for clause, cell in zip(objects, choose_cells(clauses, len(objects), rng), strict=True):
        sprite = load_sprite(clause["class"], clause.get("color"))
        place = [side + rng.randint(-JITTER, JITTER) for side in cell]
        if grid:
            place = [round(side / grid) * grid for side in place]
        image.paste(sprite, tuple(place), sprite)
    return image


def random_ground(rng, avoided, simple=False):
    """A plain colour, any or of GROUNDS, at least 90 (of 255, Euclid's distance) from the colours of the objects."""
    while True:
        ground = rng.choice(GROUNDS) if simple else tuple(rng.randint(110, 245) for _ in range(3))
        if all(np.linalg.norm(np.subtract(ground, colour)) > 90 for colour in avoided):
            return ground


def choose_cells(clauses, count, rng):
    """The cells of `count` objects; of a single object anywhere; of two with a place, the place is true."""
    if count == 1:
        return [(rng.randint(JITTER, SIDE - SPRITE - JITTER), rng.randint(JITTER, SIDE - SPRITE - JITTER))]
    place = clauses[-1].get("position")
    if not place:
        return rng.sample(CELLS, count)
    lower, higher = rng.choice(((0, 1), (2, 3)) if place[0] in ("left of", "right of") else ((0, 2), (1, 3)))
    second_first = place[0] in ("left of", "above")
    return [CELLS[higher], CELLS[lower]] if second_first else [CELLS[lower], CELLS[higher]]


def random_scenes(tag, count, seed, names=None, grid=0):
    """`count` pairs of an image and its record, of one part; names: of the kinds, all that have a sprite."""
    rng = random.Random(f"{seed} {tag}")
    records = [random_record(tag, rng, names or kinds()) for _ in range(count)]
    return [(draw_scene(record, rng, grid), record) for record in records]
