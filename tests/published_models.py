"""What is published of the models that people train: their transformers' configs, and how many parameters they have.

Facts of the model cards and of the `transformer/config.json` of each, as far as they differ from diffusers' defaults.
Last come their recipes, the commands of docs/models.md.
"""

from pathlib import Path

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
    "Tongyi-MAI/Z-Image": ("z_image", "ZImageTransformer2DModel", {}, 6.2),
}

# Names of a LoRA's modules, after "transformer.", that ComfyUI maps to weights of its own: comfy/lora.py,
# model_lora_keys_unet (17358c8), with the tables of comfy/utils.py (09708ea). There a LoRA acts with strength 1 where
# its file has no alpha tensors, and metadata are not read. Qwen-Image's modules are called there as in diffusers. Wan's
# have no such names there.
JOINT = r"transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
COMFYUI_NAMES = {
    "stable_diffusion_3": JOINT + r"|transformer_blocks\.\d+\.attn2\.(to_[qkv]|to_out\.0)",
    "flux": JOINT + r"|single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)",
    "flux2_klein": JOINT + r"|single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)",
    "qwen_image": JOINT,
    "z_image": r"(layers|context_refiner|noise_refiner)\.\d+\.attention\.(to_[qkv]|to_out\.0)",
}

VAE_FACTOR = 8  # pixels of a latent's side; of Wan 2.2's VAE 16
IMAGE = (16, 64, 64)  # latents of 512 x 512 pixels; a token is of 2 x 2 of them
VIDEO = (16, 9, 64, 64)  # of 33 frames of them
SD3_TEXT = {"prompt_embeds": (333, 4096), "pooled_prompt_embeds": (2048,)}
GEOMETRY = {
    # hub id: (latents of 512 x 512 pixels, (tokens, width) of the first block's stream of them, conditioning of one
    # prompt, at the sequence length of docs/models.md: T5's 256 tokens and the CLIPs' 77 of SD3.5, CLIP-L's 768 and
    # bigG's 1280; three layers of Qwen3-4B of FLUX.2-klein, one of Z-Image; Qwen2.5-VL-7B of Qwen-Image; UMT5 of Wan)
    "stabilityai/stable-diffusion-3.5-medium": (IMAGE, (1024, 1536), SD3_TEXT),
    "stabilityai/stable-diffusion-3.5-large": (IMAGE, (1024, 2432), SD3_TEXT),
    "black-forest-labs/FLUX.1-dev": (
        IMAGE,
        (1024, 3072),
        {"prompt_embeds": (256, 4096), "pooled_prompt_embeds": (768,)},
    ),
    "black-forest-labs/FLUX.2-klein-base-4B": ((128, 32, 32), (1024, 3072), {"prompt_embeds": (512, 3 * 2560)}),
    "Qwen/Qwen-Image": (IMAGE, (1024, 3072), {"prompt_embeds": (256, 3584), "prompt_embeds_mask": (256,)}),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (VIDEO, (9 * 1024, 1536), {"prompt_embeds": (512, 4096)}),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (VIDEO, (9 * 1024, 5120), {"prompt_embeds": (512, 4096)}),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ((48, 9, 32, 32), (9 * 256, 3072), {"prompt_embeds": (512, 4096)}),
    "Tongyi-MAI/Z-Image": (IMAGE, (1024, 3840), {"prompt_embeds": (256, 2560), "num_tokens": ()}),
}


def recipes():
    """{(model, script): its command's options}, from the blocks of docs/models.md."""
    commands = {}
    for section in (ROOT / "docs" / "models.md").read_text().split("\n### ")[1:]:
        name = section.partition("\n")[0]
        lines = [line.partition(" ") for line in section.split("```")[1].strip().splitlines()]
        shared = " ".join(options for script, _, options in lines if script == "all")
        for script in dict.fromkeys(script for script, _, _ in lines if script != "all"):
            own = " ".join(options for other, _, options in lines if other == script)
            commands[name, script] = f"{shared} {own}".split()
    return commands
