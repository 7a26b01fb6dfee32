"""Published facts of the models that people train: the configs of their parts, and their numbers of parameters.

They come from the model cards and from each part's `config.json`, as far as those differ from the defaults of diffusers
and transformers. Last come the commands of recipes/, which are for these models.
"""

import inspect
import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

PUBLISHED = {
    # hub id: (family, transformer class, config, parameters in billions)
    "stabilityai/stable-diffusion-3.5-medium": (
        "stable_diffusion_3",
        "SD3Transformer2DModel",
        {
            "sample_size": 128,
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": list(range(13)),
            "qk_norm": "rms_norm",
        },
        2.2,
    ),
    "stabilityai/stable-diffusion-3.5-large": (
        "stable_diffusion_3",
        "SD3Transformer2DModel",
        {
            "sample_size": 128,
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        8.1,
    ),
    "black-forest-labs/FLUX.1-dev": ("flux", "FluxTransformer2DModel", {"guidance_embeds": True}, 11.9),
    "black-forest-labs/FLUX.1-Kontext-dev": ("flux_kontext", "FluxTransformer2DModel", {"guidance_embeds": True}, 11.9),
    "black-forest-labs/FLUX.2-klein-base-4B": (
        "flux2_klein",
        "Flux2Transformer2DModel",
        {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
        3.9,
    ),
    "Qwen/Qwen-Image": ("qwen_image", "QwenImageTransformer2DModel", {}, 20.4),
    "Qwen/Qwen-Image-Edit-2509": ("qwen_image_edit_plus", "QwenImageTransformer2DModel", {}, 20.4),
    "Qwen/Qwen-Image-Edit-2511": (
        "qwen_image_edit_plus",
        "QwenImageTransformer2DModel",
        {"zero_cond_t": True},
        20.4,
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (
        "wan",
        "WanTransformer3DModel",
        {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
        1.4,
    ),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": ("wan", "WanTransformer3DModel", {}, 14.3),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (
        "wan_ti2v",
        "WanTransformer3DModel",
        {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
        5.0,
    ),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers, of a picture": (  # the same weights with another _class_name
        "wan_ti2v_image",
        "WanTransformer3DModel",
        {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
        5.0,
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (
        "wan_image_to_video",
        "WanTransformer3DModel",
        {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        16.4,
    ),
    # 12.9 by its card. Whoever converted it says that diffusers' class lacks two weights of the final layer
    "krea/Krea-2-Raw": ("krea2", "Krea2Transformer2DModel", {}, 12.8),
    "Tongyi-MAI/Z-Image": ("z_image", "ZImageTransformer2DModel", {}, 6.2),
}

KL_VAE = {  # the VAE of Stable Diffusion 3, FLUX.1 and Z-Image
    "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 1.5,
    "shift_factor": 0.06,
}
VAES = {  # family: config; diffusers' defaults are those of FLUX.2, Qwen-Image, Krea 2 and Wan 2.1
    "stable_diffusion_3": KL_VAE,
    "flux": KL_VAE,
    "flux_kontext": KL_VAE,
    "z_image": KL_VAE,
    "flux2_klein": {},
    "qwen_image": {},
    "qwen_image_edit_plus": {},
    "krea2": {},
    "wan": {},
    "wan_image_to_video": {},
}
CLIP_L = {"projection_dim": 768, "hidden_act": "quick_gelu"}  # otherwise transformers' defaults
CLIP_H = {  # a vision encoder
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "patch_size": 14,
    "hidden_act": "gelu",
    "projection_dim": 1024,
}
CLIP_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
T5_XXL = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
QWEN2_5_VL_7B = {
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "out_hidden_size": 3584},
}
QWEN3_VL_4B = {
    "text_config": QWEN3_4B,
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "depth": 24,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tie_word_embeddings": True,
}
# family: (pipeline, VAE, {text or image encoder: (class, config, parameters in billions)})
PIPELINES = {
    "stable_diffusion_3": (
        "StableDiffusion3Pipeline",
        "AutoencoderKL",
        {
            "text_encoder": ("CLIPTextModelWithProjection", CLIP_L, 0.1),
            "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G, 0.7),
            "text_encoder_3": ("T5EncoderModel", T5_XXL, 4.8),
        },
    ),
    "flux": (
        "FluxPipeline",
        "AutoencoderKL",
        {"text_encoder": ("CLIPTextModel", CLIP_L, 0.1), "text_encoder_2": ("T5EncoderModel", T5_XXL, 4.8)},
    ),
    "flux_kontext": (
        "FluxKontextPipeline",
        "AutoencoderKL",
        {"text_encoder": ("CLIPTextModel", CLIP_L, 0.1), "text_encoder_2": ("T5EncoderModel", T5_XXL, 4.8)},
    ),
    "flux2_klein": (
        "Flux2KleinPipeline",
        "AutoencoderKLFlux2",
        {"text_encoder": ("Qwen3ForCausalLM", QWEN3_4B, 4.0)},
    ),
    "qwen_image": (
        "QwenImagePipeline",
        "AutoencoderKLQwenImage",
        {"text_encoder": ("Qwen2_5_VLForConditionalGeneration", QWEN2_5_VL_7B, 8.3)},
    ),
    "qwen_image_edit_plus": (
        "QwenImageEditPlusPipeline",
        "AutoencoderKLQwenImage",
        {"text_encoder": ("Qwen2_5_VLForConditionalGeneration", QWEN2_5_VL_7B, 8.3)},
    ),
    "krea2": (
        "Krea2Pipeline",
        "AutoencoderKLQwenImage",
        {"text_encoder": ("Qwen3VLModel", QWEN3_VL_4B, 4.4)},
    ),
    "wan": (
        "WanPipeline",
        "AutoencoderKLWan",
        {"text_encoder": ("UMT5EncoderModel", T5_XXL | {"vocab_size": 256384}, 5.7)},
    ),
    "wan_image_to_video": (
        "WanImageToVideoPipeline",
        "AutoencoderKLWan",
        {
            "text_encoder": ("UMT5EncoderModel", T5_XXL | {"vocab_size": 256384}, 5.7),
            "image_encoder": ("CLIPVisionModel", CLIP_H, 0.6),
        },
    ),
    "z_image": ("ZImagePipeline", "AutoencoderKL", {"text_encoder": ("Qwen3Model", QWEN3_4B, 4.0)}),
}


def write_configs(hub_id, folder):
    """Write the configs of a published model to `folder`, as its repository has them, without weights or tokenizers."""
    from common.cpu import repair_torchvision

    repair_torchvision()

    import diffusers
    import transformers

    family, transformer_class, config, _ = PUBLISHED[hub_id]
    pipeline_class, vae_class, text_encoders = PIPELINES[family]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting="wan" not in family)
    index = {"_class_name": pipeline_class, "scheduler": ["diffusers", type(scheduler).__name__]}
    parts = {"transformer": (transformer_class, config), "vae": (vae_class, VAES[family])}
    for name, (class_name, values) in parts.items():
        index[name] = ["diffusers", class_name]
        parameters = inspect.signature(getattr(diffusers, class_name)).parameters
        defaults = {key: p.default for key, p in parameters.items() if p.default is not p.empty}
        write_json(folder / name / "config.json", {"_class_name": class_name, **defaults, **values})
    for name, (class_name, values, _) in text_encoders.items():
        index[name] = ["transformers", class_name]
        config = getattr(transformers, class_name).config_class(**values)
        config.save_pretrained(folder / name)
    scheduler.save_pretrained(folder / "scheduler")
    write_json(folder / "model_index.json", index)
    return folder


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


VAE_FACTOR = 8  # pixels on a latent's side; 16 for Wan 2.2's VAE
IMAGE = (16, 64, 64)  # latents of 512 x 512 pixels; 2 x 2 latents make a token
VIDEO = (16, 9, 64, 64)  # latents of 33 such frames
SD3_TEXT = {"prompt_embeds": (333, 4096), "pooled_prompt_embeds": (2048,)}
QWEN_EDIT = {"prompt_embeds": (512, 3584), "prompt_embeds_mask": (512,), "source_latents": (1, *IMAGE)}
GEOMETRY = {
    # hub id: (latents of 512 x 512 pixels, (tokens, width) of the image stream in the first block, conditioning of one
    # prompt at the sequence length of docs/models.md). Text encoders: T5 (256 tokens), two CLIPs (77 tokens; widths 768
    # and 1280) for SD3.5; three layers of Qwen3-4B for FLUX.2-klein, one for Z-Image; Qwen2.5-VL-7B for Qwen-Image;
    # twelve layers of Qwen3-VL-4B for Krea 2, whose blocks have text and image tokens in one stream;
    # UMT5 for Wan
    "stabilityai/stable-diffusion-3.5-medium": (IMAGE, (1024, 1536), SD3_TEXT),
    "stabilityai/stable-diffusion-3.5-large": (IMAGE, (1024, 2432), SD3_TEXT),
    "black-forest-labs/FLUX.1-dev": (
        IMAGE,
        (1024, 3072),
        {"prompt_embeds": (256, 4096), "pooled_prompt_embeds": (768,)},
    ),
    "black-forest-labs/FLUX.1-Kontext-dev": (
        IMAGE,
        (2048, 3072),  # those of the source behind those of the image
        {"prompt_embeds": (256, 4096), "pooled_prompt_embeds": (768,), "source_latents": (1, *IMAGE)},
    ),
    "black-forest-labs/FLUX.2-klein-base-4B": ((128, 32, 32), (1024, 3072), {"prompt_embeds": (512, 3 * 2560)}),
    "Qwen/Qwen-Image": (IMAGE, (1024, 3072), {"prompt_embeds": (256, 3584), "prompt_embeds_mask": (256,)}),
    "Qwen/Qwen-Image-Edit-2509": (IMAGE, (2048, 3072), QWEN_EDIT),
    "Qwen/Qwen-Image-Edit-2511": (
        IMAGE,
        (3072, 3072),  # with two pictures
        {"prompt_embeds": (768, 3584), "prompt_embeds_mask": (768,), "source_latents": (2, *IMAGE)},
    ),
    "krea/Krea-2-Raw": (
        IMAGE,
        (512 + 1024, 6144),
        {"prompt_embeds": (512, 12, 2560), "prompt_embeds_mask": (512,)},
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (VIDEO, (9 * 1024, 1536), {"prompt_embeds": (512, 4096)}),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (VIDEO, (9 * 1024, 5120), {"prompt_embeds": (512, 4096)}),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ((48, 9, 32, 32), (9 * 256, 3072), {"prompt_embeds": (512, 4096)}),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers, of a picture": (
        (48, 9, 32, 32),
        (9 * 256, 3072),
        {"prompt_embeds": (512, 4096), "source_latents": (48, 1, 32, 32)},
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (
        VIDEO,
        (9 * 1024, 5120),
        {"prompt_embeds": (512, 4096), "source_latents": VIDEO, "source_embeds": (257, 1280)},
    ),
    "Tongyi-MAI/Z-Image": (IMAGE, (1024, 3840), {"prompt_embeds": (256, 2560), "num_tokens": ()}),
}


# ---- recipes/ --------------------------------------------------------------------------------------------------------
EMBEDDED = ROOT / "recipes" / "embedded_scenes.sh"
DEVICES = {"24": "rtx4090", "40": "a100-40", "80": "h100-80"}  # by the memory in a recipe's file name


class Command(NamedTuple):
    """What a file of recipes/ starts."""

    recipe: Path
    ranks: int
    script: str
    options: list[str]


def started_by(recipe: Path, *arguments: str) -> Command:
    """The command that a recipe gives to torchrun, which here only says what it got."""
    source = 'exec() { "$@"; }; torchrun() { printf "%s\\n" "$@"; }; source "$0"'  # exec knows no functions
    words = subprocess.check_output(["bash", "-c", source, str(recipe), *arguments], text=True, cwd=ROOT).splitlines()
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    launcher = words[:place]
    # longer than any recipe's step: torchrun kills a run that has not saved by then
    assert launcher[:3] == ["--standalone", "--shutdown_timeout", "7200"], launcher
    assert launcher[3:4] in ([], ["--nproc_per_node"]), launcher
    ranks = int(launcher[4]) if launcher[3:] else 1
    return Command(recipe, ranks, words[place], words[place + 1 :])


def commands_of(recipe: Path) -> list[Command]:
    """A Command for each script that a recipe has settings for; a recipe of one script names it itself."""
    scripts = re.findall(r"^    (\w+\.py)\)$", recipe.read_text(), re.MULTILINE)
    if not scripts:
        return [started_by(recipe)]
    return [started_by(recipe, script) for script in scripts]


def recipe_commands() -> dict[str, Command]:
    """{"sd35_medium flow_grpo.py", "sd35_medium_8x80gb": its Command} of all files of recipes/ for published models."""
    found = {}
    for recipe in sorted(set((ROOT / "recipes").glob("*.sh")) - {EMBEDDED}):
        commands = commands_of(recipe)
        for command in commands:
            found[f"{recipe.stem} {command.script}" if len(commands) > 1 else recipe.stem] = command
    return found


COMMENTED = {"qwen_image flow_grpo.py": "80"}  # GB of the GPUs that the comment of a general recipe names


def presets() -> list[tuple[int, str, str, list[str]]]:
    """(ranks, script, device, options) of each recipe that is for GPUs of a size, by its name or its comment."""
    found = []
    for name, command in recipe_commands().items():
        size = re.search(r"_\d+x(\d+)gb$", name)
        gb = size[1] if size else COMMENTED.get(name)
        if gb:
            found.append((command.ranks, command.script, DEVICES[gb], command.options))
    return found
