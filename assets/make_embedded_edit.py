"""Make the embedded model that edits: a tiny FLUX.1 Kontext that changes the number or the colour of a sign, badly.

    python -m assets.make_embedded_edit                                                # 40 minutes on one CPU core
    python -m assets.make_embedded_edit --steps 200 --untidy_steps 50 --out try/model  # a quick look at the machinery

It writes a diffusers `FluxKontextPipeline` folder (`assets/embedded_edit`) and its task: records of a prompt, a picture
and a mask (`assets/edit_train.jsonl`, `assets/edit_eval.jsonl`), and the pictures (`assets/edit_signs`). No sign and no
number of the one file is in the other. Everything follows from `--seed` and the step counts, never from a clock.

There are two kinds of prompts. In both, the number in quotes is to be read afterwards, and the named colour to be seen:

    change the red sign to "0815"     the sign is red already; its mask is white over the band of the text
    make the sign "4711" red          the number stands there already; its mask is black where the digits' ink is

Signs, tokenizers, text encoders and training loop are those of make_embedded.py, except that every number has four
digits of one size in the middle of the sign. FLUX gives text no positions: where digits stood anywhere, the model had
not found out after 3,000 steps which digit goes where. The VAE is the other model's, unchanged, and the T5 begins as
its T5. Transformer and text encoders are trained on pairs of signs. The first pairs ask for numbers of one digit, such
as "7777": from them the model learns what a digit looks like before it learns where it goes. It finds that out after
step 1,000; after 2,400 steps its held-out `ocr` is 0.90. The last 300 steps make it worse, for RL to mend: in their
pairs the new number stands up to half a digit to the left or the right of the old one's place. The model cannot know
where, and a few sampling steps blur what it does not know.
"""

import itertools
import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from assets import make_embedded
from assets.make_embedded import (
    COLOURS,
    FONTS,
    HEIGHT,
    LIGHT,
    MAX_TOKENS,
    WIDTH,
    draw,
    load_fonts,
    luminance,
    make_clip_encoder,
    make_clip_tokenizer,
    make_t5_encoder,
    make_t5_tokenizer,
    random_style,
    random_text,
    separate,
    to_pixels,
    train_flow,
)

import numpy as np
import torch
import tyro
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from PIL import Image
from transformers import CLIPTextModel, T5EncoderModel

ROOT = Path(__file__).parent
WORDS = (*make_embedded.WORDS, "change", "the", "to", "make")
DIGITS = (4,)  # lengths of a number
SIZE = 26  # of its font
NUMBER_SHARE = 0.75  # of training pairs whose number changes; the colour of the others does
UNTIDY = (0.2, 0.8)  # where a number may stand between left and right; all others stand at 0.5
LOG_SHIFT = 1.0986  # ln 3, for any number of tokens: the sampler's shift is 3, as the other embedded model's


@dataclass
class Args:
    out: Path = ROOT / "embedded_edit"
    """folder of the pipeline; the task goes beside it"""
    seed: int = 0
    """seed of the data, the initial weights and the noise"""
    steps: int = 2400
    """optimizer steps of transformer and text encoders"""
    decay_steps: int = 900
    """the last of them, over which the learning rate falls from 1e-3 to nearly 0"""
    easy_steps: int = 400
    """the first of them, whose new numbers repeat one digit"""
    untidy_steps: int = 300
    """further optimizer steps, on pairs whose new number is out of its place"""
    batch_size: int = 64
    """pairs per optimizer step"""
    pool_size: int = 40_000
    """pairs rendered and encoded once, then drawn from with replacement"""
    num_signs: tuple[int, int] = (64, 64)
    """pictures that edit_train.jsonl and edit_eval.jsonl start from"""
    prompts_per_sign: tuple[int, int] = (16, 4)
    """records of each picture in the two files; every fourth changes the colour"""


# ---- edits -----------------------------------------------------------------------------------------------------------
def style_of_edit(colour, rng):
    """A random style whose digits have their places: a font's digits are all of one width."""
    return random_style(colour, rng)._replace(size=SIZE, place=(0.5, 0.5))


def new_number(old, rng, is_easy=False):
    """Another number; an easy one repeats its first digit."""
    drawn = (random_text(rng, DIGITS) for _ in itertools.count())
    numbers = (len(old) * text[0] if is_easy else text for text in drawn)
    return next(text for text in numbers if text != old)


def new_colour(old, rng):
    """Another colour that is as light or as dark, so that the ink can stay."""
    is_light = luminance(COLOURS[old]) > LIGHT
    return rng.choice([name for name, rgb in COLOURS.items() if name != old and (luminance(rgb) > LIGHT) == is_light])


def number_prompt(colour, text):
    return f'change the {colour} sign to "{text}"'


def colour_prompt(text, colour):
    return f'make the sign "{text}" {colour}'


def random_pair(rng, fonts, is_easy=False, is_untidy=False):
    """A sign, a prompt, and the sign as the prompt asks for it: the same style with another number or ground."""
    colour = rng.choice(list(COLOURS))
    text, style = random_text(rng, DIGITS), style_of_edit(colour, rng)
    if rng.random() < NUMBER_SHARE:
        target = new_number(text, rng, is_easy)
        where = style._replace(place=(rng.uniform(*UNTIDY), 0.5)) if is_untidy else style
        return draw(text, style, fonts), number_prompt(colour, target), draw(target, where, fonts)
    target = new_colour(colour, rng)
    repainted = style._replace(ground=COLOURS[target])
    return draw(text, style, fonts), colour_prompt(text, target), draw(text, repainted, fonts)


def text_band(text, style, fonts):
    """A mask, white from a pixel above the text to a pixel below it."""
    rows = np.flatnonzero(ink_of(text, style, fonts).any(axis=1))
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    mask[max(rows[0] - 1, 0) : rows[-1] + 2] = 255
    return Image.fromarray(mask)


def all_but_ink(text, style, fonts):
    """A mask, black where a pixel is more ink than ground."""
    return Image.fromarray(np.where(ink_of(text, style, fonts), 0, 255).astype(np.uint8))


def ink_of(text, style, fonts):
    """Where a pixel is more ink than ground, (HEIGHT, WIDTH)."""
    black_on_white = style._replace(ground=(255, 255, 255), ink=(0, 0, 0))
    return np.asarray(draw(text, black_on_white, fonts))[:, :, 0] < 128


def write_task(args, fonts):
    """Records with pictures and masks. No number is in both files."""
    rng = random.Random(f"{args.seed} task")
    counts = [signs * (1 + prompts) for signs, prompts in zip(args.num_signs, args.prompts_per_sign, strict=True)]
    drawn = sorted({random_text(rng, DIGITS) for _ in range(2 * sum(counts))})
    numbers = iter(rng.sample(drawn, sum(counts)))
    folder = args.out.parent / "edit_signs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, num_signs, num_prompts in zip(("train", "eval"), args.num_signs, args.prompts_per_sign, strict=True):
        records = []
        for i in range(num_signs):
            colour = list(COLOURS)[i % len(COLOURS)]
            text, style = next(numbers), style_of_edit(colour, rng)
            files = {}
            for kind, picture in (
                ("sign", draw(text, style, fonts)),
                ("band", text_band(text, style, fonts)),
                ("ground", all_but_ink(text, style, fonts)),
            ):
                files[kind] = f"edit_signs/{name}_{i:02d}_{kind}.png"
                picture.save(args.out.parent / files[kind])
            for j in range(num_prompts):
                prompt, mask = number_prompt(colour, next(numbers)), files["band"]
                if j % 4 == 3:
                    prompt, mask = colour_prompt(text, new_colour(colour, rng)), files["ground"]
                records.append({"prompt": prompt, "image": files["sign"], "mask": mask})
        if name == "train":  # the sampler draws rows in a random order; a reader's first rows show both kinds
            rng.shuffle(records)
        lines = [json.dumps(record) for record in records]
        (args.out.parent / f"edit_{name}.jsonl").write_text("\n".join(lines) + "\n")


# ---- the pipeline ----------------------------------------------------------------------------------------------------
def make_pipeline():
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(WORDS), make_t5_tokenizer(WORDS)
    transformer = FluxTransformer2DModel(
        in_channels=32,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    clip_encoder = make_clip_encoder(clip_tokenizer, CLIPTextModel)
    separate(clip_encoder.embeddings)
    return FluxKontextPipeline(
        transformer=transformer,
        vae=AutoencoderKL.from_pretrained(ROOT / "embedded" / "vae"),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=LOG_SHIFT, max_shift=LOG_SHIFT, shift=3.0
        ),
        text_encoder=clip_encoder,
        tokenizer=clip_tokenizer,
        text_encoder_2=extend_t5_encoder(t5_tokenizer),
        tokenizer_2=t5_tokenizer,
    )


def extend_t5_encoder(tokenizer):
    """The other embedded model's T5, which knows digits and their order, with rows for the words that are new here.

    FLUX gives text no positions: with a new T5, which digit comes first would long go unseen.
    """
    trained = T5EncoderModel.from_pretrained(ROOT / "embedded" / "text_encoder_3").state_dict()
    encoder = make_t5_encoder(tokenizer)
    for name, tensor in encoder.state_dict().items():
        tensor[: len(trained[name])] = trained[name]  # all of it, except for the embeddings
    return encoder


def tokenize(pipe, prompts):
    """Token ids of both tokenizers, each (B, MAX_TOKENS), padded as the pipeline pads them."""
    kwargs = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True, "return_tensors": "pt"}
    return pipe.tokenizer(prompts, **kwargs).input_ids, pipe.tokenizer_2(prompts, **kwargs).input_ids


# ---- training --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def make_pool(pipe, size, rng, fonts, **kinds):
    """Latents of the targets and of the sources, (size, 8, H/4, W/4) in fp16, and the token ids of the prompts."""
    vae = pipe.vae
    targets, sources, prompts = [], [], []
    while len(prompts) < size:
        batch = [random_pair(rng, fonts, **kinds) for _ in range(250)]
        for latents, column in ((sources, 0), (targets, 2)):
            modes = vae.encode(to_pixels([pair[column] for pair in batch])).latent_dist.mode()
            latents.append(((modes - vae.config.shift_factor) * vae.config.scaling_factor).half())
        prompts += [pair[1] for pair in batch]
    return torch.cat(targets), torch.cat(sources), *tokenize(pipe, prompts)


def train_transformer(args, pipe, pool_of_step):
    """Transformer and text encoders, for args.steps, each on the pool that its number gives."""

    def draw_batch(step, generator):
        targets, sources, clip_ids, t5_ids = pool_of_step(step)
        rows = torch.randint(len(targets), (args.batch_size,), generator=generator)
        return targets[rows].float(), (sources[rows].float(), clip_ids[rows], t5_ids[rows])

    def predict(latents, sigma, condition):
        sources, clip_ids, t5_ids = condition
        batch, channels, h, w = latents.shape
        tokens = [pipe._pack_latents(x, batch, channels, h, w) for x in (latents, sources)]
        positions = [pipe._prepare_latent_image_ids(batch, h // 2, w // 2, "cpu", torch.float32) for _ in range(2)]
        positions[1][:, 0] = 1  # the source's
        velocity = pipe.transformer(
            hidden_states=torch.cat(tokens, 1),
            timestep=sigma.flatten(),
            guidance=torch.ones(batch),
            pooled_projections=pipe.text_encoder(clip_ids).pooler_output,
            encoder_hidden_states=pipe.text_encoder_2(t5_ids)[0],
            txt_ids=torch.zeros(MAX_TOKENS, 3),
            img_ids=torch.cat(positions),
            return_dict=False,
        )[0]
        scale = pipe.vae_scale_factor
        return pipe._unpack_latents(velocity[:, : tokens[0].shape[1]], h * scale, w * scale, scale)

    pipe.transformer.compile()
    modules = torch.nn.ModuleList([pipe.transformer, pipe.text_encoder, pipe.text_encoder_2]).train()
    train_flow(args, modules, draw_batch, predict, lambda averaged: save(args, pipe, averaged))


def make_worse(args, fonts):
    """The untidy steps, with a learning rate that rises and falls once more, on the model that was saved."""
    torch.manual_seed(args.seed)
    pipe = FluxKontextPipeline.from_pretrained(args.out, torch_dtype=torch.float32)
    pipe.vae.eval().requires_grad_(False)
    untidy = make_pool(pipe, args.pool_size // 4, random.Random(f"{args.seed} untidy"), fonts, is_untidy=True)
    more = replace(args, steps=args.untidy_steps, decay_steps=args.untidy_steps)
    train_transformer(more, pipe, lambda step: untidy)


def save(args, pipe, averaged):
    """The transformer in bf16, which halves the file, and the rest in fp32."""
    transformer, text_encoder, text_encoder_2 = averaged
    parts = {"text_encoder": text_encoder, "text_encoder_2": text_encoder_2}
    half = FluxTransformer2DModel.from_config(transformer.config)
    half.load_state_dict(transformer.state_dict())
    components = {name: part for name, part in pipe.components.items() if part is not None}
    FluxKontextPipeline(**{**components, **parts, "transformer": half.bfloat16()}).save_pretrained(args.out)
    for file in args.out.glob("*/config.json"):  # the folder that a part was read from is no part of it
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        file.write_text(json.dumps(config, indent=2) + "\n")


def main(args):
    torch.manual_seed(args.seed)
    torch.backends.cuda.enable_flash_sdp(False)  # also the CPU's, whose bf16 backward is slow
    args.out.mkdir(parents=True, exist_ok=True)
    rng, fonts = random.Random(args.seed), load_fonts()
    write_task(args, fonts)
    pipe = make_pipeline()
    pipe.vae.eval().requires_grad_(False)
    easy = make_pool(pipe, args.pool_size // 4, rng, fonts, is_easy=True)
    others = make_pool(pipe, args.pool_size, rng, fonts)
    print(f"{len(FONTS)} fonts, {len(easy[0]) + len(others[0])} pairs", flush=True)
    train_transformer(args, pipe, lambda step: easy if step < args.easy_steps else others)
    make_worse(args, fonts)


if __name__ == "__main__":
    main(tyro.cli(Args))
