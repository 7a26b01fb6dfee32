"""What NanoDet gets wrong as GenEval's judge: scenes of which a record is true, and what `geneval` says of them.

    python -m benchmarks.geneval_scenes --choose    # kinds, classes that compete and thresholds, on scenes of seed 0
    python -m benchmarks.geneval_scenes             # the table of docs/lab/scenes.md, on scenes of seed 2
    python -m benchmarks.geneval_scenes --dtype bfloat16    # the same of a NanoDet that computes in bf16
    python -m benchmarks.geneval_scenes --vae assets/embedded_scenes    # what a VAE keeps of scenes on a fine grid
    python -m benchmarks.geneval_scenes --linear 16 24 32 48 --count 20    # what a linear code of 8 x 8 pixels keeps

Each scene also meets a record that is wrong by one thing: another kind, number, colour or place, or the two colours
exchanged. Intervals are Wilson's, of 95 %.
"""

import random
from dataclasses import dataclass
from typing import Literal

from assets.scenes import FINE_GRID, TAGS, draw_scene, kinds, random_record, random_scenes
from common.cpu import repair_torchvision
from common.rewards._box_colours import colours_of_boxes
from common.rewards._geneval_rules import COLOURS, fraction_right, is_right, kept
from common.rewards._nanodet import CHUNK, preprocess, read_nanodet, read_outputs, select

import numpy as np
import torch
import tyro
from PIL import Image

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
LOWEST = 0.1  # places that are less sure of every class are not kept


@dataclass
class Args:
    choose: bool = False
    """print what kinds, classes and thresholds are chosen by, in the place of the table"""
    count: int = 100
    """scenes of a part"""
    seed: int = 2
    """seed of the table's scenes; --choose takes 0"""
    detector: str = "assets/nanodet"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """what the detector computes in for the table, as GENEVAL_DTYPE"""
    vae: str = ""
    """a pipeline's folder: instead of the table, how many scenes are right before and after its VAE"""
    linear: tuple[int, ...] = ()
    """numbers for 8 x 8 pixels: the same of the best linear code, by principal components of 400 scenes of seed 0"""


# ---- scenes and outputs ----------------------------------------------------------------------------------------------
@torch.no_grad()
def look(model, images, dtype=torch.float32):
    """For each image the scores (places, 80) and boxes (places, 4) of the places that are sure of anything."""
    outputs = []
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        scores, boxes = read_outputs(model, preprocess(model, chunk), dtype)
        for image, score, box in zip(chunk, scores, boxes, strict=True):
            is_kept = score.amax(1) > LOWEST
            scale = torch.tensor([image.width, image.height] * 2) / model.settings["size"]
            outputs.append((score[is_kept].clone(), box[is_kept] * scale))
    return outputs


def judge(record, image, output, settings):
    """The score and the soft score of the reward geneval, of kept outputs."""
    threshold = settings["thresholds"].get(record["tag"], settings["other_threshold"])
    objects = kept(select(*output, settings), threshold)
    colours = lambda name, found: colours_of_boxes(image, found)
    return is_right(record, objects, colours), fraction_right(record, objects, colours)


def spoil(record, rng, names):
    """The record with one thing changed, so that it is wrong of the same scene."""
    clauses = [dict(clause) for clause in record["include"]]
    last, tag = clauses[-1], record["tag"]
    spoilt = {"tag": tag, "include": clauses}
    if tag in ("single_object", "two_object"):
        last["class"] = rng.choice([name for name in names if name not in {clause["class"] for clause in clauses}])
    elif tag == "counting":
        last["count"] = rng.choice([count for count in (2, 3, 4) if count != last["count"]])
        spoilt["exclude"] = [{"class": last["class"], "count": last["count"] + 1}]
    elif tag == "colors":
        last["color"] = rng.choice([colour for colour in COLOURS if colour != last["color"]])
    elif tag == "position":
        last["position"] = [OPPOSITE[last["position"][0]], 0]
    else:
        clauses[0]["color"], clauses[1]["color"] = clauses[1]["color"], clauses[0]["color"]
    return spoilt


def wilson(right, count):
    """The interval of 95 % of a share, as text."""
    z = 1.96
    share = right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return f"{max(0, middle - half):.2f} to {middle + half:.2f}"


# ---- choosing --------------------------------------------------------------------------------------------------------
def print_kinds(model):
    """A row per kind: how sure the detector is in its own colours and in ten paints, two scenes each, and of how many
    painted ones the pixels name the colour."""
    rng = random.Random(0)
    settings = model.settings | {"competing": kinds()}
    print("| kind | found | found painted | colour right | colours of which none is right |\n|---|---|---|---|---|")
    for kind in kinds():
        records = []
        for colour in (None, *COLOURS):
            records += [{"tag": "colors", "include": [{"class": kind, "count": 1, "color": colour}]}] * 2
        images = [draw_scene(record, rng) for record in records]
        found, right = [], []
        for record, image, output in zip(records, images, look(model, images), strict=True):
            plain = {"tag": "colors", "include": [{"class": kind, "count": 1}]}
            found.append(judge(plain, image, output, settings)[0])
            right.append(judge(record, image, output, settings)[0])
        missed = [colour for n, colour in enumerate(COLOURS) if not any(right[2 * n + 2 : 2 * n + 4])]
        print(
            f"| {kind} | {sum(found[:2])}/2 | {sum(found[2:])}/20 | {sum(right[2:])}/20 | {', '.join(missed)} |",
            flush=True,
        )


def print_thresholds(model, count):
    """Right and wrong records called right, by part, threshold and the classes that compete."""
    for tag in TAGS:
        scenes = random_scenes(tag, count, 0)
        rng = random.Random(0)
        wrong = [spoil(record, rng, kinds()) for _, record in scenes]
        outputs = look(model, [image for image, _ in scenes])
        for name, competing in (("kinds", kinds()), ("all 80", model.settings["classes"])):
            for threshold in (0.2, 0.25, 0.3, 0.35, 0.4):
                settings = model.settings | {"competing": competing, "thresholds": {}, "other_threshold": threshold}
                right = sum(judge(r, image, o, settings)[0] for (image, r), o in zip(scenes, outputs, strict=True))
                accepted = sum(
                    judge(r, image, o, settings)[0] for (image, _), r, o in zip(scenes, wrong, outputs, strict=True)
                )
                print(f"| {tag} | {name} | {threshold} | {right}/{count} | {accepted}/{count} |", flush=True)


# ---- the table -------------------------------------------------------------------------------------------------------
def print_table(model, count, seed, dtype=torch.float32):
    print("| part | scenes | right | interval | soft | wrong records called right |\n|---|---|---|---|---|---|")
    missed = {}
    for tag in TAGS:
        scenes = random_scenes(tag, count, seed)
        rng = random.Random(seed)
        outputs = look(model, [image for image, _ in scenes], dtype)
        right = accepted = soft = 0
        for (image, record), output in zip(scenes, outputs, strict=True):
            is_right_, fraction = judge(record, image, output, model.settings)
            right += is_right_
            soft += fraction
            accepted += judge(spoil(record, rng, kinds()), image, output, model.settings)[0]
            for clause in record["include"]:
                tried, failed = missed.setdefault(clause["class"], {}).setdefault(tag, (0, 0))
                missed[clause["class"]][tag] = (tried + 1, failed + (not is_right_))
        shares = " | ".join(f"{part / count:.2f}" for part in (soft, accepted))
        print(f"| {tag} | {count} | {right / count:.2f} | {wilson(right, count)} | {shares} |", flush=True)
    print("\nScenes that were called wrong, of all scenes with the kind:\n")
    print(f"| kind | {' | '.join(TAGS)} |\n|---|{'---|' * len(TAGS)}")
    for kind in kinds():
        cells = [missed.get(kind, {}).get(tag, (0, 0)) for tag in TAGS]
        print(f"| {kind} | {' | '.join(f'{failed}/{tried}' for tried, failed in cells)} |")


# ---- codes -----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def through_vae(vae, images):
    """The images as the VAE decodes what it encodes, rounded to 8 bits."""
    decoded = []
    for start in range(0, len(images), CHUNK):
        pixels = [torch.from_numpy(np.array(image)) for image in images[start : start + CHUNK]]
        pixels = torch.stack(pixels).permute(0, 3, 1, 2) / 127.5 - 1  # (B, 3, H, W)
        again = vae.decode(vae.encode(pixels).latent_dist.mode()).sample
        again = ((again.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1)
        decoded += [Image.fromarray(image.numpy()) for image in again]
    return decoded


def linear_code(components, side=8):
    """A function that cuts images into squares of `side` pixels and keeps the components that tell most of them."""
    rng = random.Random(0)
    images = [draw_scene(random_record(rng.choice(TAGS), rng, kinds()), rng) for _ in range(400)]
    squares = torch.cat([to_squares(image, side) for image in images])
    mean = squares.mean(0)
    _, vectors = torch.linalg.eigh((squares - mean).T @ (squares - mean))
    basis = vectors[:, -components:]

    def through(images):
        decoded = []
        for image in images:
            again = (to_squares(image, side) - mean) @ basis @ basis.T + mean
            rows, columns = image.height // side, image.width // side
            pixels = again.view(rows, columns, side, side, 3).transpose(1, 2).reshape(image.height, image.width, 3)
            decoded.append(Image.fromarray(pixels.clamp(0, 255).round().byte().numpy()))
        return decoded

    return through


def to_squares(image, side):
    """(squares, side * side * 3), row by row."""
    pixels = torch.from_numpy(np.array(image)).float()
    rows, columns = image.height // side, image.width // side
    return pixels.view(rows, side, columns, side, 3).transpose(1, 2).reshape(rows * columns, -1)


def mean_square(images, others):
    """The mean squared difference of pixels, of which white is 1 and black is -1."""
    pairs = zip(images, others, strict=True)
    return np.mean([np.square(np.subtract(a, b, dtype=float) / 127.5).mean() for a, b in pairs])


def print_kept(model, through, count, seed, grid=FINE_GRID):
    """through: what takes images and returns them as they come out of a code."""
    errors = []
    print("| part | scenes | right | right after the code | of the right ones | interval |\n|---|---|---|---|---|---|")
    everywhere = [0, 0]
    for tag in TAGS:
        scenes = random_scenes(tag, count, seed, grid=grid)
        images = [image for image, _ in scenes]
        right, decoded = [], through(images)
        errors.append(mean_square(images, decoded))
        for seen in (images, decoded):
            outputs = look(model, seen)
            rows = zip(scenes, seen, outputs, strict=True)
            right.append([judge(record, image, output, model.settings)[0] for (_, record), image, output in rows])
        before, after = right
        kept_ones = sum(a and b for a, b in zip(before, after, strict=True))
        everywhere = [everywhere[0] + kept_ones, everywhere[1] + sum(before)]
        cells = [count, sum(before), sum(after), f"{kept_ones / sum(before):.2f}", wilson(kept_ones, sum(before))]
        print(f"| {tag} | {' | '.join(map(str, cells))} |", flush=True)
    share = f"{everywhere[0] / everywhere[1]:.3f} of all that were right ({wilson(*everywhere)})"
    print(f"\n{share}; error {np.mean(errors):.5f}")


def main(args):
    model = read_nanodet(args.detector).requires_grad_(False).eval()
    if args.vae:
        repair_torchvision()
        from diffusers import AutoencoderKL

        vae = AutoencoderKL.from_pretrained(args.vae, subfolder="vae", torch_dtype=torch.float32)
        vae.requires_grad_(False).eval()
        print_kept(model, lambda images: through_vae(vae, images), args.count, args.seed)
    elif args.linear:
        for components in args.linear:
            print(f"\n{components} numbers for 8 x 8 pixels:\n")
            print_kept(model, linear_code(components), args.count, args.seed, grid=0)
    elif args.choose:
        print_kinds(model)
        print()
        print_thresholds(model, args.count)
    else:
        print_table(model, args.count, args.seed, getattr(torch, args.dtype))


if __name__ == "__main__":
    main(tyro.cli(Args))
