"""Tiny random checkpoints of each family in diffusers' layout. They are made from configs; nothing is downloaded."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

from common.cpu import repair_torchvision

repair_torchvision()

from common.rewards.hpsv2 import FILE

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.wan import pipeline_wan_i2v
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

# the image-to-video pipeline's own encoding of prompts needs ftfy, which leaves ASCII as it is
if not hasattr(pipeline_wan_i2v, "ftfy"):
    pipeline_wan_i2v.ftfy = SimpleNamespace(fix_text=str)

EMBEDDED = Path(__file__).parents[1] / "assets" / "embedded"


def tokenizer(name):
    """A tokenizer of the embedded model: `tokenizer` is like CLIP's, `tokenizer_3` is like T5's."""
    return AutoTokenizer.from_pretrained(EMBEDDED / name)


def clip_text_encoder(width):
    tokens = tokenizer("tokenizer")
    config = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    return CLIPTextModel(config)


CLIP_PIXELS = 32  # a side of the images of make_clip's model
CLIP_WIDTH = 16  # of its embeddings


def make_clip(folder, seed):
    """A random CLIP of two layers, large enough that embeddings differ, with the embedded model's tokenizer."""
    tokens = AutoTokenizer.from_pretrained(EMBEDDED / "tokenizer", model_max_length=77)
    shared = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = shared | {"vocab_size": len(tokens), "max_position_embeddings": 77, "projection_dim": CLIP_WIDTH}
    text |= {"bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id}
    torch.manual_seed(seed)  # for the class embedding, which transformers draws
    vision = shared | {"image_size": CLIP_PIXELS, "patch_size": 8, "projection_dim": CLIP_WIDTH}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=CLIP_WIDTH))
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:  # not the biases, which all inputs share
            torch.nn.init.normal_(weight, std=0.3, generator=generator)
    torch.nn.init.constant_(model.logit_scale, 3.21)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": CLIP_PIXELS}, crop_size=CLIP_PIXELS).save_pretrained(folder)
    return folder


def as_open_clip(model):
    """A transformers CLIP's tensors by open_clip's names, which packs q, k and v and multiplies from the right."""
    own = model.state_dict()
    tensors = {"logit_scale": own["logit_scale"], "attn_mask": torch.zeros(77, 77)}
    tensors["visual.proj"] = own["visual_projection.weight"].T
    tensors["text_projection"] = own["text_projection.weight"].T
    tensors["visual.class_embedding"] = own["vision_model.embeddings.class_embedding"]
    tensors["visual.conv1.weight"] = own["vision_model.embeddings.patch_embedding.weight"]
    tensors["visual.positional_embedding"] = own["vision_model.embeddings.position_embedding.weight"]
    tensors["positional_embedding"] = own["text_model.embeddings.position_embedding.weight"]
    tensors["token_embedding.weight"] = own["text_model.embeddings.token_embedding.weight"]
    for theirs, ours in (
        ("visual.ln_pre", "vision_model.pre_layrnorm"),
        ("visual.ln_post", "vision_model.post_layernorm"),
    ):
        tensors |= {f"{theirs}.{kind}": own[f"{ours}.{kind}"] for kind in ("weight", "bias")}
    tensors |= {f"ln_final.{kind}": own[f"text_model.final_layer_norm.{kind}"] for kind in ("weight", "bias")}
    for block, tower in (("visual.transformer", "vision_model"), ("transformer", "text_model")):
        for number in range(2):
            layer = f"{tower}.encoder.layers.{number}"
            place = f"{block}.resblocks.{number}"
            for kind in ("weight", "bias"):
                parts = [own[f"{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                tensors[f"{place}.attn.in_proj_{kind}"] = torch.cat(parts)
                tensors[f"{place}.attn.out_proj.{kind}"] = own[f"{layer}.self_attn.out_proj.{kind}"]
                tensors[f"{place}.ln_1.{kind}"] = own[f"{layer}.layer_norm1.{kind}"]
                tensors[f"{place}.ln_2.{kind}"] = own[f"{layer}.layer_norm2.{kind}"]
                tensors[f"{place}.mlp.c_fc.{kind}"] = own[f"{layer}.mlp.fc1.{kind}"]
                tensors[f"{place}.mlp.c_proj.{kind}"] = own[f"{layer}.mlp.fc2.{kind}"]
    return {name: tensor.half() if tensor.dim() == 0 else tensor for name, tensor in tensors.items()}


def make_hpsv2(folder):
    """A tiny CLIP below the folder, which is returned, and in the folder its weights as HPSv2.1's are published."""
    clip = make_clip(folder / "clip", seed=1)
    state = {"epoch": 0, "state_dict": as_open_clip(CLIPModel.from_pretrained(clip))}
    torch.save(state, folder / FILE)
    return clip


class PublishedMLP(torch.nn.Module):
    """The layers of improved-aesthetic-predictor with its dropouts and weight names, but narrower."""

    def __init__(self):
        super().__init__()
        linear, dropout = torch.nn.Linear, torch.nn.Dropout
        self.layers = torch.nn.Sequential(
            linear(CLIP_WIDTH, 24), dropout(0.2), linear(24, 12), dropout(0.2), linear(12, 8), dropout(0.1),
            linear(8, 4), linear(4, 1),
        )  # fmt: skip


def autoencoder(latent_channels, factor=4):
    """An AutoencoderKL with `factor` x `factor` pixels per latent."""
    num_halvings = factor.bit_length() - 1
    return AutoencoderKL(
        latent_channels=latent_channels,
        block_out_channels=(8,) * num_halvings + (16,),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * (num_halvings + 1),
        up_block_types=("UpDecoderBlock2D",) * (num_halvings + 1),
        scaling_factor=0.36,
        shift_factor=0.11,
    )


def flux(vae_factor=4):
    """FLUX.1: two double and two single blocks; rotary positions in 4 + 6 + 6 of the 16 channels of a head."""
    t5 = T5EncoderModel.from_pretrained(EMBEDDED / "text_encoder_3")
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=t5.config.d_model,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder(4, vae_factor),
        text_encoder=clip_text_encoder(32),
        tokenizer=tokenizer("tokenizer"),
        text_encoder_2=t5,
        tokenizer_2=tokenizer("tokenizer_3"),
        transformer=transformer,
    )


def parts_of(pipe):
    """The components of a pipeline that are not None, by name."""
    return {name: part for name, part in pipe.components.items() if part is not None}


def flux_kontext(vae_factor=4):
    """FLUX.1 Kontext: a FLUX.1 dev whose pipeline takes a picture."""
    return FluxKontextPipeline(**parts_of(flux(vae_factor)))


def qwen_tokenizer(pipeline=QwenImagePipeline, more_special=()):
    """A byte-level BPE tokenizer like Qwen's, with merges learned from the pipeline's own prompt template."""
    template = Path(inspect.getfile(pipeline)).read_text().split('prompt_template_encode = "')[1].split('"')[0]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more_special]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([template, "a red sign that says"], trainer)
    vocabulary = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in vocabulary["merges"]]
    return Qwen2Tokenizer(vocab=vocabulary["vocab"], merges=merges, additional_special_tokens=special)


def qwen_image_autoencoder():
    """An AutoencoderKLQwenImage with 4 x 4 pixels per latent."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.7, 1.1, 2.0],
    )


def qwen_image():
    """Qwen-Image: two blocks, and a Qwen2.5-VL of two layers as text encoder."""
    tokens = qwen_tokenizer()
    text = {
        "vocab_size": len(tokens),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "pad_token_id": tokens.pad_token_id,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift_terminal=0.02, use_dynamic_shifting=True),
        vae=qwen_image_autoencoder(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokens,
        transformer=transformer,
    )


def qwen_image_edit_plus():
    """Qwen-Image-Edit-Plus: a Qwen-Image whose encoder has a vision tower, with attention in windows and in full.

    As in Qwen-Image-Edit-2511, the tokens of pictures are modulated as at the timestep 0.
    """
    pictures = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokens = qwen_tokenizer(QwenImageEditPlusPipeline, pictures)
    pipe = qwen_image()
    start, end, image, video = tokens.convert_tokens_to_ids(pictures)
    config = pipe.text_encoder.config
    config.text_config.vocab_size = len(tokens)
    config.text_config.pad_token_id = tokens.pad_token_id
    config.vision_config.depth = 2
    config.vision_config.fullatt_block_indexes = [1]
    config.image_token_id = image
    config.video_token_id = video
    config.vision_start_token_id = start
    config.vision_end_token_id = end
    transformer = QwenImageTransformer2DModel.from_config(pipe.transformer.config, zero_cond_t=True)
    return QwenImageEditPlusPipeline(
        scheduler=pipe.scheduler,
        vae=pipe.vae,
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokens,
        processor=Qwen2VLProcessor(Qwen2VLImageProcessor(), tokens, Qwen2VLVideoProcessor()),
        transformer=transformer,
    )


CHAT_TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] }}{% endfor %}"


def qwen3_config(tokens, num_layers):
    return Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )


def flux2_klein():
    """FLUX.2-klein: one double and two single blocks. Its encoder is a Qwen3 of 28 layers, of which it reads three."""
    tokens = qwen_tokenizer()
    tokens.chat_template = CHAT_TEMPLATE
    vae = AutoencoderKLFlux2(
        latent_channels=4,
        block_out_channels=(8, 8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=Qwen3ForCausalLM(qwen3_config(tokens, num_layers=28)),
        tokenizer=tokens,
        transformer=transformer,
    )


def z_image(vae_factor=4):
    """Z-Image: two blocks, and a refiner block for each stream."""
    tokens = qwen_tokenizer()
    tokens.chat_template = CHAT_TEMPLATE
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[512, 64, 64],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(4, vae_factor),
        text_encoder=Qwen3Model(qwen3_config(tokens, num_layers=3)),
        tokenizer=tokens,
        transformer=transformer,
    )


def krea2():
    """Krea 2: two blocks, a text block over layers and one over tokens; it reads three states of a Qwen3-VL.

    As published, two heads of queries share one of keys, and the schedule's shift grows up to 6400 tokens.
    """
    tokens = qwen_tokenizer()
    text = {
        "vocab_size": len(tokens),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        "pad_token_id": tokens.pad_token_id,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    transformer = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        timestep_embed_dim=32,
        text_hidden_dim=32,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=64,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    return Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
        vae=qwen_image_autoencoder(),
        text_encoder=Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision)),
        tokenizer=tokens,
        transformer=transformer,
        text_encoder_select_layers=(1, 2, 3),
    )


def wan(latent_channels=4, flow_shift=3.0, expand_timesteps=False, **vae_options):
    """Wan 2.1: two blocks, and a VAE of 8 x 8 pixels and 4 frames per latent like the published one."""
    tokens = tokenizer("tokenizer_3")
    text_config = UMT5Config(
        vocab_size=len(tokens), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, pad_token_id=tokens.pad_token_id
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=latent_channels,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0, 0.2, -0.1][:latent_channels],
        latents_std=[1.5, 0.7, 1.1, 2.0, 0.9, 1.3][:latent_channels],
        **vae_options,
    )
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,  # like 128, a size that vLLM-Omni splits into time, height and width as diffusers does
        in_channels=latent_channels,
        out_channels=latent_channels,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
    )
    # as published: shifted sigmas and a solver of higher order
    scheduler = UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=flow_shift, num_train_timesteps=1000
    )
    return WanPipeline(
        tokenizer=tokens,
        text_encoder=UMT5EncoderModel(text_config),
        vae=vae,
        scheduler=scheduler,
        transformer=transformer,
        expand_timesteps=expand_timesteps,
    )


def wan_a14b():
    """Wan 2.2 A14B: a transformer for high noise and one for low noise."""
    parts = parts_of(wan())
    torch.manual_seed(1)
    other = WanTransformer3DModel.from_config(parts["transformer"].config)
    return WanPipeline(**parts, transformer_2=other, boundary_ratio=0.875)


def wan_i2v_a14b():
    """Wan 2.2 I2V-A14B, which has no image encoder."""
    parts = parts_of(wan())
    config = {name: value for name, value in parts["transformer"].config.items() if not name.startswith("_")}
    config |= {"in_channels": 12}
    for name in ("transformer", "transformer_2"):
        parts[name] = WanTransformer3DModel(**config)
    return WanImageToVideoPipeline(boundary_ratio=0.9, **parts)


def wan_ti2v():
    """Wan 2.2 TI2V-5B: its VAE takes 2 x 2 pixels as one with 12 channels, its pipeline a timestep per token."""
    of_vae = {"is_residual": True, "patch_size": 2, "scale_factor_spatial": 16, "decoder_base_dim": 8}
    return wan(latent_channels=6, flow_shift=5.0, expand_timesteps=True, in_channels=12, out_channels=12, **of_vae)


def wan_image_to_video():
    """Wan 2.1 image to video: beside 4 channels of latents come 4 of masks and 4 of the picture, and its embeddings."""
    parts = parts_of(wan())
    config = {name: value for name, value in parts["transformer"].config.items() if not name.startswith("_")}
    config |= {"in_channels": 12, "image_dim": 16, "added_kv_proj_dim": 48}
    parts["transformer"] = WanTransformer3DModel(**config)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    encoder = CLIPVisionModel(CLIPVisionConfig(image_size=28, patch_size=7, **vision))
    processor = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28)
    return WanImageToVideoPipeline(image_encoder=encoder, image_processor=processor, **parts)


def wan_ti2v_image():
    """Wan 2.2 TI2V-5B as the pipeline of its first frame, which has no image encoder."""
    return WanImageToVideoPipeline(expand_timesteps=True, **parts_of(wan_ti2v()))


def stable_diffusion_3(vae_factor=4):
    """SD3.5-medium: three kinds of block, and norms of queries and keys.

    Two blocks have a second attention (attn2), one has none, and the last one drops the text.
    """
    t5 = T5EncoderModel.from_pretrained(EMBEDDED / "text_encoder_3")
    transformer = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=t5.config.d_model,
        caption_projection_dim=32,
        pooled_projection_dim=128,
        pos_embed_max_size=96,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    encoders = [
        CLIPTextModelWithProjection.from_pretrained(EMBEDDED / name) for name in ("text_encoder", "text_encoder_2")
    ]
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder(4, vae_factor),
        text_encoder=encoders[0],
        tokenizer=tokenizer("tokenizer"),
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer("tokenizer_2"),
        text_encoder_3=t5,
        tokenizer_3=tokenizer("tokenizer_3"),
        transformer=transformer,
    )


FAMILIES = {
    "stable_diffusion_3": stable_diffusion_3,
    "flux": flux,
    "flux_kontext": flux_kontext,
    "flux2_klein": flux2_klein,
    "qwen_image": qwen_image,
    "qwen_image_edit_plus": qwen_image_edit_plus,
    "krea2": krea2,
    "z_image": z_image,
    "wan": wan,
    "wan_ti2v": wan_ti2v,
    "wan_image_to_video": wan_image_to_video,
    "wan_ti2v_image": wan_ti2v_image,
}
OF_TWO_TRANSFORMERS = {"wan_a14b": wan_a14b, "wan_i2v_a14b": wan_i2v_a14b}


def make_checkpoint(family, folder, **options):
    """Write the tiny checkpoint of a family to `folder`, with the same bytes every time. Returns the folder."""
    torch.manual_seed(0)
    pipe = (FAMILIES | OF_TWO_TRANSFORMERS)[family](**options)
    for parameter in pipe.transformer.parameters():
        if parameter.dim() == 1:  # biases and norms start at 0 and 1, which would hide a mix-up
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    pipe.save_pretrained(folder)
    return folder
