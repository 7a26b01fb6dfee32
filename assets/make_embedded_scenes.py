"""Make the embedded model of scenes: a tiny Stable Diffusion 3 that draws what GenEval's prompts ask for, badly.

    python -m assets.make_embedded_scenes                                                   # an hour on two CPU cores
    python -m assets.make_embedded_scenes --vae_steps 4 --size tiny --out try/model --work try/work   # a quick look

It writes a diffusers `StableDiffusion3Pipeline` folder (`assets/embedded_scenes`) and the task, GenEval's records
(`assets/scenes_train.jsonl`, `assets/scenes_eval.jsonl`), of which assets/scenes.py draws pictures. Everything follows
from `--seed` and the step counts, never from a clock; another machine's round-off gives other bytes.

Two stages: (1) an AutoencoderKL (factor 8, 16 channels) learns to reconstruct scenes, (2) benchmarks/from_nothing.py
draws scenes into `--work`, and trains the SD3 transformer, of random weights, on them by contrib/sft.py. The text
encoders stay as they were initialised: every word is a token, and random layers keep which word stands where. The
autoencoder sees every kind in every colour, the transformer no held-out pair, colour or number. It stops early, where
counts, colours and places are often wrong, so that RL has a way to go.
"""

import json
import math
import random
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from assets.make_embedded import (
    make_clip_encoder,
    make_clip_tokenizer,
    make_t5_encoder,
    make_t5_tokenizer,
    separate,
    to_pixels,
)
from assets.scenes import (
    FINE_GRID,
    GRID,
    NUMBERS,
    PAINTS,
    SIDE,
    SPRITE,
    TAGS,
    draw_records,
    draw_scene,
    kinds,
    load_sprite,
    plural,
    random_ground,
)

import torch
import tyro
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image
from transformers import CLIPTextModelWithProjection

ROOT = Path(__file__).parent
CHANNELS, FACTOR = 16, 8  # of latents


@dataclass
class Args:
    out: Path = ROOT / "embedded_scenes"
    """folder of the pipeline; the records go beside it. One that is there keeps its VAE and text encoders"""
    seed: int = 0
    """seed of the data, the initial weights and the noise"""
    vae_steps: int = 4000
    """optimizer steps of the autoencoder"""
    vae_batch_size: int = 16
    """quarters of scenes per optimizer step of the autoencoder"""
    size: Literal["tiny", "laptop"] = "laptop"
    """how long the transformer is trained: a size of benchmarks/from_nothing.py"""
    work: Path = Path("runs/embedded_scenes")
    """folder of from_nothing's scenes and run; a second start continues them"""
    num_train_records: int = 256
    """records of each part in scenes_train.jsonl"""
    num_eval_records: int = 64
    """records of each part in scenes_eval.jsonl; all but single objects ask for what no training record asks for"""


# ---- scenes ----------------------------------------------------------------------------------------------------------
def words():
    """Each word that a prompt can have."""
    told = ["a an photo of and left right above below", *NUMBERS.values(), *PAINTS]
    told += [*kinds(), *map(plural, kinds())]
    return tuple(dict.fromkeys(" ".join(told).split()))


def write_task(args):
    """Records of the parts in turn, so that the first of a file are of all parts."""
    for name, count, held_out in (("train", args.num_train_records, False), ("eval", args.num_eval_records, True)):
        parts = [draw_records(tag, count, f"{args.seed} {name}", held_out) for tag in TAGS]
        lines = [json.dumps(record) for records in zip(*parts, strict=True) for record in records]
        (args.out.parent / f"scenes_{name}.jsonl").write_text("\n".join(lines) + "\n")


def random_scene(rng, grid):
    """A scene of a random part on a grid, and its prompt."""
    (record,) = draw_records(rng.choice(TAGS), 1, rng.random())
    return draw_scene(record, rng, grid), record["prompt"]


def random_quarter(rng):
    """A quarter of a scene's size with one sprite, most of it or all."""
    colour = rng.choice((None, *PAINTS))
    kind = rng.choice(kinds())
    image = Image.new(
        "RGB", (SIDE // 2, SIDE // 2), random_ground(rng, [PAINTS[colour]] if colour else [], simple=True)
    )
    sprite = load_sprite(kind, colour)
    whole = range(0, SIDE // 2 - SPRITE + 1, FINE_GRID)
    places = whole if rng.random() < 0.7 else range(-SPRITE // 2, SIDE // 2, FINE_GRID)
    image.paste(sprite, (rng.choice(places), rng.choice(places)), sprite)
    return image


# ---- the pipeline ----------------------------------------------------------------------------------------------------
def make_vae():
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=CHANNELS,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=1,  # more groups lose the shade of a plain ground, which is then learned last
        sample_size=SIDE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def make_transformer(layers=4, heads=4, head_dim=32):
    width = heads * head_dim
    return SD3Transformer2DModel(
        sample_size=SIDE // FACTOR,
        patch_size=2,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=layers,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=128,
        caption_projection_dim=width,
        pooled_projection_dim=128,
        pos_embed_max_size=SIDE // FACTOR // 2,
        qk_norm="rms_norm",
    )


def make_pipeline():
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(words()), make_t5_tokenizer(words())
    encoders = [make_clip_encoder(clip_tokenizer, CLIPTextModelWithProjection) for _ in range(2)]
    for encoder in encoders:
        separate(encoder.text_model.embeddings)
    return StableDiffusion3Pipeline(
        transformer=make_transformer(),
        vae=make_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=encoders[0],
        tokenizer=clip_tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=clip_tokenizer,
        text_encoder_3=make_t5_encoder(t5_tokenizer),
        tokenizer_3=t5_tokenizer,
    )


# ---- training --------------------------------------------------------------------------------------------------------
def train_vae(args, vae, rng):
    """Most batches are of quarters, which are full of sprites; three of ten are of a quarter as many whole scenes."""
    with torch.no_grad():  # a posterior of deviation 1, as it is initialised, would hide what is encoded
        vae.encoder.conv_out.weight[CHANNELS:] = 0
        vae.encoder.conv_out.bias[CHANNELS:] = -6
    kernels = [weight for weight in vae.parameters() if weight.ndim == 4]
    # Muon takes matrices alone; these share the memory of the kernels
    matrices = [torch.nn.Parameter(weight.data.flatten(1)) for weight in kernels]
    others = [weight for weight in vae.parameters() if weight.ndim != 4]
    muon = torch.optim.Muon(matrices, lr=5e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    groups = [(group, group["lr"]) for optimizer in (muon, adam) for group in optimizer.param_groups]
    start, running = time.time(), 0.0
    for step in range(args.vae_steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / args.vae_steps))
        for group, lr in groups:
            group["lr"] = lr * min(1, (step + 1) / 100) * (0.01 + 0.99 * cosine)
        if rng.random() < 0.3:
            images = to_pixels([random_scene(rng, FINE_GRID)[0] for _ in range(max(1, args.vae_batch_size // 4))])
        else:
            images = to_pixels([random_quarter(rng) for _ in range(args.vae_batch_size)])
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(images).latent_dist
            reconstruction = vae.decode(posterior.sample()).sample.float()
        error = reconstruction - images
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = error.abs().mean() + 2 * error.square().mean() + 0.5 * edges + 2e-3 * kl
        vae.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        for matrix, weight in zip(matrices, kernels, strict=True):
            matrix.grad = weight.grad.flatten(1)
        muon.step()
        adam.step()
        running += error.square().mean().item()
        if step % 100 == 99:
            print(f"vae step {step + 1}: mse {running / 100:.5f}  {time.time() - start:.0f} s", flush=True)
            running = 0.0


@torch.no_grad()
def scale_latents(vae, rng):
    """Set the VAE's shift and scale, so that latents of scenes have the mean 0 and the deviation 1."""
    batches = (to_pixels([random_scene(rng, FINE_GRID)[0] for _ in range(100)]) for _ in range(20))
    latents = torch.cat([vae.encode(images).latent_dist.mode() for images in batches])
    shift, scale = round(latents.mean().item(), 4), round(1 / latents.std().item(), 4)
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    print("latents: shift", shift, "scale", scale, flush=True)


def write_scenes(folder, count, seed):
    """Draw `count` scenes, of all parts alike, into `folder`: PNGs, and records.jsonl of {"prompt", "image"}."""
    folder.mkdir(parents=True, exist_ok=True)
    for thousand in range(-(-count // 1000)):
        (folder / f"{thousand:03d}").mkdir(exist_ok=True)
    scenes = (repeat(folder), repeat(seed), range(count))
    if count <= 100:  # a process takes longer to start
        records = list(map(write_scene, *scenes))
    else:
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            records = list(pool.map(write_scene, *scenes, chunksize=100))
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_scene(folder, seed, number):
    """Draw a scene of a random part into `folder`. Returns its record."""
    rng = random.Random(f"{seed} scene {number}")
    scene, prompt = random_scene(rng, GRID)
    image = f"{number // 1000:03d}/{number:06d}.png"
    scene.save(folder / image)
    return {"prompt": prompt, "image": image}


def main(args):
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    write_task(args)
    if not (args.out / "model_index.json").exists():  # which is saved last
        pipe = make_pipeline()
        train_vae(args, pipe.vae, rng)
        pipe.vae.eval().requires_grad_(False)
        scale_latents(pipe.vae, rng)
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.bfloat16()  # which halves the files
        pipe.save_pretrained(args.out)
    program = [sys.executable, "-m", "benchmarks.from_nothing", str(args.work), "--model", str(args.out.resolve())]
    program += ["--size", args.size, "--seed", str(args.seed), "--parts", "draw", "sft"]
    subprocess.run(program, cwd=ROOT.parent, check=True)
    trained = SD3Transformer2DModel.from_pretrained(args.work / "base" / "transformer")
    config = {name: value for name, value in trained.config.items() if name != "_name_or_path"}  # a local path
    transformer = SD3Transformer2DModel.from_config(config)
    transformer.load_state_dict(trained.state_dict())
    transformer.bfloat16().save_pretrained(args.out / "transformer")


if __name__ == "__main__":
    main(tyro.cli(Args))
