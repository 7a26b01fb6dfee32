"""Make the embedded text-to-image model: a tiny Stable Diffusion 3 that renders the quoted digits of a prompt, badly.

    python -m assets.make_embedded                              # about half an hour on two CPU cores
    python -m assets.make_embedded --steps 200 --out try/model  # a quick look at the machinery

It writes a diffusers `StableDiffusion3Pipeline` folder (`assets/embedded`) and the disjoint prompt lists
(`assets/train_prompts.txt`, `assets/eval_prompts.txt`). Everything follows from `--seed` and the step counts, never
from a clock; another machine's round-off gives other bytes and the same band of OCR reward (0.40 to 0.65 before RL).

Three stages: (1) an AutoencoderKL (factor 4, 8 channels) learns to reconstruct signs, (2) a pool of signs is rendered
and encoded once, (3) the SD3 transformer and its three text encoders learn the velocity `noise - x0` on that pool,
short strings first. The fonts are the DejaVu ones that matplotlib ships (free to use and to embed).
"""

import copy
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.cpu import repair_torchvision

repair_torchvision()

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image, ImageDraw, ImageFont
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

HEIGHT, WIDTH = 32, 96
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif-Bold")
COLOURS = {
    "white": (244, 244, 240),
    "grey": (150, 152, 156),
    "black": (28, 28, 32),
    "red": (196, 48, 44),
    "orange": (238, 142, 44),
    "yellow": (246, 216, 72),
    "green": (52, 142, 78),
    "blue": (48, 86, 184),
    "purple": (122, 66, 158),
    "pink": (242, 170, 196),
}
LIGHT = 118  # luminance above which a ground is light, and its ink dark
WORDS = ("a", "sign", "that", "says", *COLOURS)
MAX_TOKENS = 16  # bos + "a red sign that says" (5) + quote + 6 digits + quote + eos = 15


@dataclass
class Args:
    out: Path = Path(__file__).parent / "embedded"
    """folder of the pipeline; the prompt lists go beside it"""
    seed: int = 0
    """seed of the data, the initial weights and the noise"""
    vae_steps: int = 1000
    """optimizer steps of the autoencoder, 48 images each"""
    steps: int = 7000
    """optimizer steps of transformer and text encoders"""
    decay_steps: int = 3000
    """the last of them, over which the learning rate falls from 1e-3 to nearly 0"""
    easy_steps: int = 600
    """the first of them, which see strings of 1 to 3 digits; the others see 3 to 6"""
    batch_size: int = 96
    """images per optimizer step of the transformer"""
    pool_size: int = 60_000
    """signs rendered and encoded once, then drawn from with replacement"""
    num_train_prompts: int = 4096
    """lines of train_prompts.txt"""
    num_eval_prompts: int = 256
    """lines of eval_prompts.txt; none of their texts is in train_prompts.txt"""


# ---- signs -----------------------------------------------------------------------------------------------------------
def load_fonts():
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    sizes = range(16, 27)
    return {(name, size): ImageFont.truetype(str(folder / f"{name}.ttf"), size) for name in FONTS for size in sizes}


def random_text(rng, lengths):
    return "".join(rng.choice("0123456789") for _ in range(rng.choice(lengths)))


def prompt_of(text, colour):
    return f'a {colour} sign that says "{text}"'


def write_prompts(args):
    """Prompts of 4 and 5 digits, the two lists disjoint. 3 digits are left out: their place on the sign is open by more
    than a digit's width, which a few sampling steps blur and RL mends last; 6 digits the model draws well already."""
    rng = random.Random(f"{args.seed} prompts")
    drawn = sorted({random_text(rng, (4, 5)) for _ in range(2 * (args.num_train_prompts + args.num_eval_prompts))})
    texts = rng.sample(drawn, args.num_train_prompts + args.num_eval_prompts)
    for name, some in (("train", texts[: args.num_train_prompts]), ("eval", texts[args.num_train_prompts :])):
        lines = [prompt_of(text, rng.choice(list(COLOURS))) for text in some]
        (args.out.parent / f"{name}_prompts.txt").write_text("\n".join(lines) + "\n")


def luminance(rgb):
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]


class Style(NamedTuple):
    """What a sign's colour leaves open: how light it is exactly, and what is written how and where."""

    ground: tuple[int, int, int]
    ink: tuple[int, int, int]
    font: str
    size: int
    place: tuple[float, float]  # of the text between left and right, top and bottom


def random_style(colour, rng):
    ground = tuple(min(255, max(0, c + rng.randint(-10, 10))) for c in COLOURS[colour])
    darkest, lightest = (0, 70) if luminance(ground) > LIGHT else (205, 255)
    ink = tuple(rng.randint(darkest, lightest) for _ in range(3))
    return Style(ground, ink, rng.choice(FONTS), rng.randint(17, 26), (rng.uniform(0.3, 0.7), rng.uniform(0.3, 0.7)))


def draw(text, style, fonts):
    """One sign, a picture of HEIGHT x WIDTH. A text that is too long for its size gets a smaller one."""
    size = style.size
    while size > 16 and fonts[style.font, size].getlength(text) > WIDTH - 6:
        size -= 1
    font = fonts[style.font, size]
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("RGB", (WIDTH, HEIGHT), style.ground)
    slack_x, slack_y = WIDTH - 4 - (right - left), HEIGHT - 4 - (bottom - top)
    x = 2 - left + slack_x * style.place[0]
    y = 2 - top + slack_y * style.place[1]
    ImageDraw.Draw(image).text((x, y), text, fill=style.ink, font=font)
    return image


def render_batch(texts, colours, rng, fonts):
    """Signs as float32 (B, 3, HEIGHT, WIDTH) in [-1, 1]."""
    signs = [draw(text, random_style(colour, rng), fonts) for text, colour in zip(texts, colours, strict=True)]
    return to_pixels(signs)


def to_pixels(pictures):
    """B pictures as float32 (B, 3, HEIGHT, WIDTH) in [-1, 1]."""
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2) / 127.5 - 1


# ---- components ------------------------------------------------------------------------------------------------------
def make_clip_tokenizer(words):
    """CLIP's byte-pair tokenizer with one token for each word of the prompts and one for each character."""
    vocab = {chr(c): i for i, c in enumerate(range(33, 127))}
    vocab.update({f"{chr(c)}</w>": len(vocab) + i for i, c in enumerate(range(33, 127))})
    merges = []
    for word in words:
        pieces = merge_pieces([*word[:-1], f"{word[-1]}</w>"], merges)
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            vocab.setdefault(pieces[0] + pieces[1], len(vocab))
            pieces = merge_pieces(pieces, merges)
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocab[special] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TOKENS, pad_token="<|endoftext|>")


def merge_pieces(pieces, merges):
    """Byte-pair encoding: of the neighbours that may merge those do first that come first in `merges`."""
    pieces = list(pieces)
    while pairs := [pair for pair in zip(pieces, pieces[1:], strict=False) if pair in merges]:
        at = list(zip(pieces, pieces[1:], strict=False)).index(min(pairs, key=merges.index))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


def make_t5_tokenizer(words):
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0), ("▁", -2.0)]
    pieces += [(chr(c), -3.0) for c in range(33, 127)] + [(f"▁{word}", -1.0) for word in words]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=MAX_TOKENS)


def make_clip_encoder(tokenizer, model_class):
    eos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=64,
        max_position_embeddings=MAX_TOKENS,
        hidden_act="gelu",
        bos_token_id=eos - 1,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return model_class(config)


def separate(embeddings):
    """At transformers' std of 0.02, which character stands where would long go unseen."""
    torch.nn.init.normal_(embeddings.token_embedding.weight, std=1.0)
    torch.nn.init.normal_(embeddings.position_embedding.weight, std=0.5)


def make_t5_encoder(tokenizer):
    config = T5Config(
        vocab_size=len(tokenizer), d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return T5EncoderModel(config)


def make_pipeline():
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(WORDS), make_t5_tokenizer(WORDS)
    transformer = SD3Transformer2DModel(
        sample_size=24,
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=64,
        qk_norm="rms_norm",
    )
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=8,
        sample_size=WIDTH,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    encoders = [make_clip_encoder(clip_tokenizer, CLIPTextModelWithProjection) for _ in range(2)]
    for encoder in encoders:
        separate(encoder.text_model.embeddings)
    return StableDiffusion3Pipeline(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=encoders[0],
        tokenizer=clip_tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=clip_tokenizer,
        text_encoder_3=make_t5_encoder(t5_tokenizer),
        tokenizer_3=t5_tokenizer,
    )


def tokenize(pipe, prompts):
    """Token ids of both tokenizer families, each (B, MAX_TOKENS), padded as the pipeline pads them."""
    kwargs = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True, "return_tensors": "pt"}
    clip_ids = pipe.tokenizer(prompts, **kwargs).input_ids
    return clip_ids, pipe.tokenizer_3(prompts, add_special_tokens=True, **kwargs).input_ids


def encode_tokens(pipe, clip_ids, t5_ids):
    """`StableDiffusion3Pipeline.encode_prompt` with a gradient: (B, 2 * MAX_TOKENS, 128) and pooled (B, 128)."""
    outs = [encoder(clip_ids, output_hidden_states=True) for encoder in (pipe.text_encoder, pipe.text_encoder_2)]
    clip_embeds = torch.cat([out.hidden_states[-2] for out in outs], -1)
    return torch.cat([clip_embeds, pipe.text_encoder_3(t5_ids)[0]], 1), torch.cat([out[0] for out in outs], -1)


# ---- training --------------------------------------------------------------------------------------------------------
def train_vae(args, vae, rng, fonts):
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(args.vae_steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / args.vae_steps))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100) * (0.02 + 0.98 * cosine)
        colours = [rng.choice(list(COLOURS)) for _ in range(48)]
        images = render_batch([random_text(rng, (1, 2, 3, 4, 5, 6)) for _ in colours], colours, rng, fonts)
        posterior = vae.encode(images).latent_dist
        reconstruction = vae.decode(posterior.sample()).sample
        loss = (
            F.l1_loss(reconstruction, images)
            + 2 * F.mse_loss(reconstruction, images)
            + 2e-3 * posterior.kl().mean() / posterior.mean[0].numel()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            mse = F.mse_loss(reconstruction, images).item()
            print(f"vae step {step + 1}: loss {loss.item():.4f} mse {mse:.5f}", flush=True)


@torch.no_grad()
def make_pool(pipe, size, lengths, rng, fonts):
    """Latents (size, 8, H/4, W/4) in fp16 and the token ids of their prompts."""
    latents, prompts = [], []
    while len(prompts) < size:
        texts = [random_text(rng, lengths) for _ in range(250)]
        colours = [rng.choice(list(COLOURS)) for _ in texts]
        latents.append(pipe.vae.encode(render_batch(texts, colours, rng, fonts)).latent_dist.mode().half())
        prompts += [prompt_of(text, colour) for text, colour in zip(texts, colours, strict=True)]
    return torch.cat(latents), *tokenize(pipe, prompts)


def train_flow(args, modules, draw, predict, save):
    """Flow matching: the velocity noise - x0. Weights averaged over steps are saved as it goes.

    draw: (step, generator) -> latents x0 (B, C, h, w) and a batch's condition. predict: (latents, sigma (B, 1, 1, 1),
    condition) -> velocity. save: is given the averaged modules.
    """
    params = [p for p in modules.parameters() if p.requires_grad]
    ema = copy.deepcopy(modules).requires_grad_(False)
    optimizer = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    start, running = time.time(), 0.0
    for step in range(args.steps):
        falling = max(0.0, 1 - (args.steps - step) / args.decay_steps)  # 0, then up to 1 over decay_steps
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * falling)))
        x0, condition = draw(step, generator)
        u = torch.sigmoid(torch.randn(args.batch_size, generator=generator))
        sigma = (3 * u / (1 + 2 * u)).view(-1, 1, 1, 1)  # the sampler's shift of 3
        noise = torch.randn(x0.shape, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            velocity = predict((1 - sigma) * x0 + sigma * noise, sigma, condition)
        loss = F.mse_loss(velocity.float(), noise - x0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        decay = min(0.999, (step + 1) / (step + 10))
        with torch.no_grad():
            for average, p in zip(ema.parameters(), modules.parameters(), strict=True):
                average.lerp_(p, 1 - decay)
        running += loss.item()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {running / 100:.4f}  {time.time() - start:.0f} s", flush=True)
            running = 0.0
        if step % 500 == 499 or step + 1 == args.steps:
            save(ema)


def train_transformer(args, pipe, pools):
    """Transformer and text encoders, on the pools (short strings first)."""
    encoders = [pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3]
    empty = tokenize(pipe, [""])

    def draw(step, generator):
        latents, clip_ids, t5_ids = pools[step >= args.easy_steps]
        rows = torch.randint(len(latents), (args.batch_size,), generator=generator)
        clip_batch, t5_batch = clip_ids[rows].clone(), t5_ids[rows].clone()
        dropped = torch.rand(args.batch_size, generator=generator) < 0.08  # the empty prompt, for guidance
        clip_batch[dropped], t5_batch[dropped] = empty
        return latents[rows].float(), (clip_batch, t5_batch)

    def predict(latents, sigma, ids):
        prompt_embeds, pooled = encode_tokens(pipe, *ids)
        return pipe.transformer(
            hidden_states=latents,
            timestep=sigma.flatten() * 1000,
            encoder_hidden_states=prompt_embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]

    modules = torch.nn.ModuleList([pipe.transformer, *encoders]).train()
    train_flow(args, modules, draw, predict, lambda averaged: save(args, pipe, averaged))


def save(args, pipe, ema):
    averaged = dict(zip(("transformer", "text_encoder", "text_encoder_2", "text_encoder_3"), ema, strict=True))
    StableDiffusion3Pipeline(**{**pipe.components, **averaged}).save_pretrained(args.out)


def main(args):
    torch.manual_seed(args.seed)
    torch.backends.cuda.enable_flash_sdp(False)  # also the CPU's, whose bf16 backward takes half of a step
    args.out.mkdir(parents=True, exist_ok=True)
    rng, fonts = random.Random(args.seed), load_fonts()
    write_prompts(args)
    pipe = make_pipeline()
    train_vae(args, pipe.vae, rng, fonts)
    pipe.vae.eval().requires_grad_(False)
    pools = [
        make_pool(pipe, args.pool_size // 4, (1, 2, 3), rng, fonts),
        make_pool(pipe, args.pool_size, (3, 4, 5, 6), rng, fonts),
    ]
    latents = pools[1][0].float()
    shift, scale = round(latents.mean().item(), 4), round(1 / latents.std().item(), 4)
    pipe.vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    pools = [(((z.float() - shift) * scale).half(), *ids) for z, *ids in pools]
    print("latents: shift", shift, "scale", scale, flush=True)
    train_transformer(args, pipe, pools)


if __name__ == "__main__":
    main(tyro.cli(Args))
