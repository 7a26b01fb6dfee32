"""A second judge of scenes, which no policy is trained on: a network that knows where each object is, in what paint.

    python -m benchmarks.scenes_judge --train 1200      # makes WEIGHTS anew, of scenes that code draws and spoils
    python -m benchmarks.scenes_judge                   # what it gets wrong: the tables of docs/lab/scenes_hacking.md
    python -m benchmarks.scenes_judge --runs RUN ...    # what it says of the images of runs
    python -m benchmarks.scenes_judge --labels          # and on images of trained policies that were labelled by eye
    bash recipes/embedded_scenes.sh --eval_reward geneval benchmarks/scenes_judge.py:second_judge

As a reward, the score is 1 where an image is right by GenEval's rules, `soft` is the fraction of the reward geneval,
and `exact` is 1 where an image is right and shows nothing else: every object in the number that is asked, and no other.
The network is trained on the very sprites that the tiny model learned from, and learns from the drawing what of an
object is there.

An image (128 px) becomes a map of 16 x 16 cells: the centre of an object of each kind is a peak (CenterNet, arXiv
1904.07850), beside each the paint of what is there. An object is there if 0.65 of it is seen, and not if less than 0.35
is; in between the map is not taught.
"""

import argparse
import functools
import json
import math
import random
from pathlib import Path

from assets.scenes import CELLS, GROUNDS, JITTER, SIDE, SPRITE, TAGS, draw_records, draw_scene, kinds, load_sprite
from benchmarks.geneval_scenes import spoil, wilson
from common.cpu import repair_torchvision
from common.rewards._geneval_rules import COLOURS, Detection, fraction_right, is_right

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

RECORDS = Path(__file__).parents[1] / "docs" / "lab" / "records"
WEIGHTS, LABELS = RECORDS / "scenes_judge.safetensors", RECORDS / "scenes_judge_labels.jsonl"
KINDS = kinds()
# the paint of a sprite in its own colours, by eye
OWN = dict(zip(KINDS, ("red", "red", "white", "red", "black", "red", "brown", "black"), strict=True))
CELL = 8  # pixels
THERE, GONE = 0.65, 0.35  # shares of an object that are seen
THRESHOLD = 0.5  # of a peak
BATCH, RATE = 64, 2e-3


class Judge(nn.Module):
    """(N, 3, 128, 128) in [0, 1] to logits (N, kinds + colours, 16, 16): centres of objects, then their paints."""

    def __init__(self, width=64, dilations=(1, 2, 4, 1, 2, 4)):
        super().__init__()
        sizes = (3, width // 2, width, width)
        self.stem = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in zip(sizes, sizes[1:], strict=False))
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(width, width, 3, 1, d, d), nn.Conv2d(width, width, 3, 1, 1)]) for d in dilations
        )
        self.head = nn.Conv2d(width, len(KINDS) + len(COLOURS), 1)
        nn.init.constant_(self.head.bias[: len(KINDS)], -3.0)  # centres are rare

    def forward(self, images):
        x = images - 0.5
        for conv in self.stem:
            x = F.silu(rms(conv(x)))
        for first, second in self.blocks:
            x = x + second(F.silu(rms(first(rms(x)))))
        return self.head(F.silu(rms(x)))


def rms(x):
    """Each image's features of a mean square of 1."""
    return x * torch.rsqrt(x.float().pow(2).mean((1, 2, 3), keepdim=True) + 1e-6).to(x.dtype)


# ---- scenes whose truth is known -------------------------------------------------------------------------------------
def draw(rng):
    """An image (PIL) of up to six objects, some of them half drawn or half hidden, and its objects: (kind, paint, x and
    y of the centre, the share of it that is seen)."""
    ground = rng.choice(GROUNDS) if rng.random() < 0.7 else tuple(rng.randint(60, 245) for _ in range(3))
    image, placed = Image.new("RGB", (SIDE, SIDE), ground), []
    count = rng.choices(range(7), (1, 4, 5, 4, 4, 1, 1))[0]
    cells = rng.sample(CELLS, 4)
    for number in range(count):
        kind = placed[-1][0] if placed and rng.random() < 0.5 else rng.choice(KINDS)
        paint = rng.choice(COLOURS) if rng.random() < 0.5 else None
        x, y = cells[number] if number < 4 and rng.random() < 0.7 else [rng.randint(0, SIDE - SPRITE) for _ in "xy"]
        x, y = (min(max(side + rng.randint(-JITTER, JITTER), 0), SIDE - SPRITE) for side in (x, y))
        sprite = load_sprite(kind, paint)
        alpha = np.asarray(sprite.getchannel("A"), dtype=float) / 255
        drawn = alpha * half(rng) if rng.random() < 0.25 else alpha
        image.paste(sprite, (x, y), Image.fromarray((drawn * 255).round().astype(np.uint8)))
        seen = np.zeros((SIDE, SIDE))
        seen[y : y + SPRITE, x : x + SPRITE] = drawn
        for before in placed:  # which this one covers
            before[4] = before[4] * (1 - seen)
        placed.append([kind, paint or OWN[kind], x + SPRITE / 2, y + SPRITE / 2, seen, alpha.sum()])
    return image, [(kind, paint, x, y, seen.sum() / whole) for kind, paint, x, y, seen, whole in placed]


def half(rng):
    """A factor for a sprite's alpha: fainter as a whole, or one side is missing."""
    if rng.random() < 0.5:
        return rng.random()
    kept, side = rng.randint(0, SPRITE), rng.randrange(4)
    return np.rot90(np.repeat((np.arange(SPRITE) < kept)[None].astype(float), SPRITE, 0), side)


def blur_and_noise(images, rng):
    """Images (N, 3, H, W) in [0, 1], each spoilt in its own way or not at all."""
    spoilt = []
    for image in images:
        if rng.random() < 0.5:
            sigma = rng.uniform(0.3, 2.0)
            taps = torch.exp(-0.5 * (torch.arange(-4.0, 5.0) / sigma) ** 2)
            taps = (taps / taps.sum()).expand(3, 1, 1, 9)
            padded = F.pad(image[None], (4, 4, 4, 4), mode="replicate")
            image = F.conv2d(F.conv2d(padded, taps, groups=3), taps.transpose(2, 3), groups=3)[0]
        if rng.random() < 0.5:
            image = image + rng.uniform(0, 0.12) * torch.randn(image.shape)
        if rng.random() < 0.3:
            image = (image - 0.5) * rng.uniform(0.7, 1.2) + 0.5 + rng.uniform(-0.1, 0.1)
        spoilt.append(image.clamp(0, 1))
    return torch.stack(spoilt)


@torch.no_grad()
def by_vae(images, objects, rng):
    """Images as the tiny model's VAE decodes them, from latents with noise in them, or with a part of another image's,
    whose objects are then not taught. Returns images and objects."""
    repair_torchvision()
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained("assets/embedded_scenes", subfolder="vae").float()
    with torch.autocast("cpu", torch.bfloat16):
        latents = torch.cat([vae.encode(part * 2 - 1).latent_dist.mean.float() for part in images.split(16)])
    scale, mixed = latents.std(), []
    for number, latent in enumerate(latents):
        other = rng.randrange(len(latents))
        if rng.random() < 0.3:
            share = rng.uniform(0.7, 1)
            latent = share * latent + (1 - share) * latents[other]
            faint = [(kind, paint, x, y, 0.5) for kind, paint, x, y, seen in objects[other] if seen > GONE]
            objects[number] = objects[number] + faint
        mixed.append(latent + rng.uniform(0, 0.5) * scale * torch.randn(latent.shape))
    with torch.autocast("cpu", torch.bfloat16):
        decoded = torch.cat([vae.decode(part).sample.float() for part in torch.stack(mixed).split(16)])
    return (decoded / 2 + 0.5).clamp(0, 1), objects


def to_maps(objects):
    """The heat (kinds, 16, 16) of an image's objects, 1 at a centre; 1 where it is taught; the paint of each centre
    (16, 16), -1 elsewhere."""
    size = SIDE // CELL
    heat, taught = torch.zeros(len(KINDS), size, size), torch.ones(len(KINDS), size, size)
    paints = torch.full((size, size), -1)
    rows = torch.arange(size, dtype=torch.float)
    for kind, paint, x, y, seen in objects:
        number, column, row = KINDS.index(kind), int(x // CELL), int(y // CELL)
        if seen >= THERE:
            near = torch.exp(-((rows[:, None] - row) ** 2 + (rows[None] - column) ** 2) / (2 * 0.7**2))
            heat[number] = torch.maximum(heat[number], near)
            paints[row, column] = COLOURS.index(paint)
        elif seen > GONE:
            taught[number, max(row - 2, 0) : row + 3, max(column - 2, 0) : column + 3] = 0
    taught[heat == 1] = 1
    return heat, taught, paints


def draw_batch(count, rng):
    scenes = [draw(rng) for _ in range(count)]
    return torch.stack([to_tensor(image) for image, _ in scenes]), [objects for _, objects in scenes]


def to_tensor(image):
    return torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32) / 255).permute(2, 0, 1)


# ---- training --------------------------------------------------------------------------------------------------------
def loss_of(logits, heat, taught, paints):
    """CenterNet's focal loss of the centres, a mean over objects, and the paints' cross-entropy at the centres."""
    logits = logits.float()
    centres = logits[:, : len(KINDS)]
    log_p, log_q = F.logsigmoid(centres), F.logsigmoid(-centres)
    p = centres.sigmoid()
    is_centre = heat == 1
    focal = torch.where(is_centre, (1 - p) ** 2 * log_p, (1 - heat) ** 4 * p**2 * log_q)
    paint = F.cross_entropy(logits[:, len(KINDS) :], paints, ignore_index=-1)
    return -(focal * taught).sum() / is_centre.sum().clamp(min=1) + paint


def train(steps, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    judge = Judge().to(memory_format=torch.channels_last)
    pool, of_pool = by_vae(*draw_batch(1536, rng), rng)
    optimizer = torch.optim.AdamW(judge.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    third, mean = BATCH // 3, 0.0
    for step in range(steps):
        images, objects = draw_batch(BATCH - third, rng)
        chosen = rng.sample(range(len(pool)), third)
        images = torch.cat([blur_and_noise(images, rng), pool[chosen]])
        maps = [torch.stack(each) for each in zip(*map(to_maps, objects + [of_pool[n] for n in chosen]), strict=True)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = judge(images.contiguous(memory_format=torch.channels_last))
        loss = loss_of(logits, *maps)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean += loss.item() / 100
        if step % 100 == 99:
            print(f"step {step + 1}: loss {mean:.3f}", flush=True)
            mean = 0.0
    save_file({name: tensor.half().contiguous() for name, tensor in judge.state_dict().items()}, WEIGHTS)


# ---- judging ---------------------------------------------------------------------------------------------------------
@functools.cache
def load():
    judge = Judge().eval()
    judge.load_state_dict({name: tensor.float() for name, tensor in load_file(WEIGHTS).items()})
    return judge


@torch.no_grad()
def look(images):
    """{kind: detections} of each image (PIL, 128 px), and a function that gives the paints of detections."""
    seen = []
    for image in images:  # one by one: the same bits in any batch
        logits = load()(to_tensor(image.resize((SIDE, SIDE)))[None])[0]
        heat = logits[: len(KINDS)].sigmoid()
        is_peak = (heat == F.max_pool2d(heat, 3, 1, 1)) & (heat > THRESHOLD)
        paints = logits[len(KINDS) :].argmax(0)
        objects, paint_at = {}, {}
        for number, row, column in is_peak.nonzero().tolist():
            x, y = (column + 0.5) * CELL, (row + 0.5) * CELL
            box = (x - SPRITE / 2, y - SPRITE / 2, x + SPRITE / 2, y + SPRITE / 2)
            objects.setdefault(KINDS[number], []).append(Detection(box, heat[number, row, column].item()))
            paint_at[box] = COLOURS[int(paints[row, column])]
        objects = {kind: sorted(found, key=lambda one: -one.score) for kind, found in objects.items()}
        seen.append((objects, lambda _, found, paint_at=paint_at: [paint_at[each.box] for each in found]))
    return seen


def second_judge(images, prompts, metadata):
    """The reward: is an image right by the rules, and is it exactly what was asked?"""
    scores = []
    for record, (objects, colours) in zip(metadata, look(images), strict=True):
        right, soft = float(is_right(record, objects, colours)), fraction_right(record, objects, colours)
        scores.append({"score": right, "soft": soft, "exact": right * is_all(record, objects)})
    return scores


def is_all(record, objects):
    """Whether the objects are as many as a record asks for, and of no other kind."""
    asked = {clause["class"]: clause["count"] for clause in record["include"]}
    return {kind: len(found) for kind, found in objects.items() if found} == asked


second_judge.parts = ("soft", "exact")
second_judge.load = load


# ---- what it gets wrong ----------------------------------------------------------------------------------------------
def print_tables(count, seed):
    """True and false records of scenes, and the numbers of objects of spoilt ones."""
    print("| part | scenes | right | interval | exact | wrong records called right |\n|---|---|---|---|---|---|")
    rng = random.Random(seed)
    for tag in TAGS:
        records = draw_records(tag, count, seed)
        images = [draw_scene(record, rng) for record in records]
        scores = second_judge(images, [], records)
        wrong = sum(one["score"] for one in second_judge(images, [], [spoil(record, rng, KINDS) for record in records]))
        right, exact = (int(sum(one[key] for one in scores)) for key in ("score", "exact"))
        told = f"{right / count:.2f} | {wilson(right, count)} | {exact / count:.2f} | {wrong / count:.2f}"
        print(f"| {tag} | {count} | {told} |", flush=True)
    print("\n| scenes | objects | found | too many | in the right paint |\n|---|---|---|---|---|")
    for name in ("as drawn", "blur and noise", "by the VAE, with noise and parts of others"):
        torch.manual_seed(seed)
        images, objects = draw_batch(count * 2, rng)
        if name == "blur and noise":
            images = blur_and_noise(images, rng)
        elif name != "as drawn":
            images, objects = by_vae(images, objects, rng)
        print(f"| {name} | {' | '.join(count_objects(images, objects))} |", flush=True)


def count_objects(images, objects):
    """Cells of a table: objects that are there; found; found where none is; of the found ones in the right paint."""
    there = found = more = painted = 0
    pictures = [Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy()) for image in images]
    for (seen_here, colours), truth in zip(look(pictures), objects, strict=True):
        left = [[kind, box_centre(each), colours(kind, [each])[0]] for kind, all_ in seen_here.items() for each in all_]
        for kind, paint, x, y, share in truth:
            near = [each for each in left if each[0] == kind and max(abs(each[1][0] - x), abs(each[1][1] - y)) < 12]
            there += share >= THERE
            if near:
                left.remove(near[0])
                found += share >= THERE
                more += share <= GONE
                painted += share >= THERE and near[0][2] == paint
        more += len(left)
    return f"{there}", f"{found / there:.3f}", f"{more / there:.3f}", f"{painted / max(found, 1):.3f}"


def print_labels():
    """How often NanoDet and the judge say of 200 images of trained policies what a person said who saw no score."""
    labels = [json.loads(line) for line in LABELS.read_text().splitlines()]
    print("| images | question | by eye | NanoDet | of these wrong | judge | of these wrong |")
    print("|---|---|---|---|---|---|---|")
    for when in ("early", "middle", "late", "all", "sure"):
        chosen = [
            one for one in labels if when in (one["when"], "all") or (when == "sure" and not one["by_eye"]["unsure"])
        ]
        for key in ("right", "exact"):
            cells = []
            for judge in ("nanodet", "judge"):
                said = [one for one in chosen if one[judge][key]]
                cells += [f"{len(said)}", f"{sum(not one['by_eye'][key] for one in said)}"]
            by_eye = sum(one["by_eye"][key] for one in chosen)
            print(f"| {len(chosen)} {when} | {key} | {by_eye} | {' | '.join(cells)} |")


def print_runs(runs):
    """What the judge says of the images of runs' last evaluations, which their folders hold."""
    print("| run | step | images | geneval | geneval.soft | judge | judge.soft | exact |")
    print("|---|---|---|---|---|---|---|---|")
    for run in runs:
        folder = max((run / "samples").glob("[0-9]*"), key=lambda path: int(path.name))
        records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        images = [Image.open(folder / record["file"]).convert("RGB") for record in records]
        scores = second_judge(images, [], [record["metadata"] for record in records])
        logged = [[record.get(name) for record in records] for name in ("geneval", "geneval.soft")]
        columns = [[math.nan if score is None else score for score in column] for column in logged]
        columns += [[score[key] for score in scores] for key in ("score", "soft", "exact")]
        told = " | ".join(f"{sum(column) / len(column):.3f}" for column in columns)
        print(f"| {run.name} | {int(folder.name)} | {len(images)} | {told} |", flush=True)


def box_centre(detection):
    left, top, right, bottom = detection.box
    return (left + right) / 2, (top + bottom) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="make the weights; 0: print the tables")
    parser.add_argument("--labels", action="store_true", help="print the table of labelled images")
    parser.add_argument("--runs", nargs="+", type=Path, help="print the table of their last evaluations' images")
    parser.add_argument("--count", type=int, default=100, help="scenes of a part")
    parser.add_argument("--seed", type=int, default=2, help="of the tables' scenes; training has 0")
    args = parser.parse_args()
    if args.train:
        return train(args.train, seed=0)
    if args.labels:
        return print_labels()
    if args.runs:
        return print_runs(args.runs)
    return print_tables(args.count, args.seed)


if __name__ == "__main__":
    main()
