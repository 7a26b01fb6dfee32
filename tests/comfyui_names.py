"""By which names ComfyUI finds the modules of a LoRA, read in its loader and in its models (no code of them is here).

Its loader (comfy/lora.py of Comfy-Org/ComfyUI, 17358c8: model_lora_keys_unet) makes a table {name in a LoRA's file:
weight of the model}. In it are
- `diffusion_model.NAME` for each weight `NAME.weight` of the model, and
- `transformer.NAME` by diffusers' NAME, for SD3 (mmdit_to_diffusers), FLUX.1 and FLUX.2 (flux_to_diffusers), Z-Image
  (z_image_to_diffusers; all three in comfy/utils.py, 09708ea) and Qwen-Image, whose modules have diffusers' names
  (comfy/ldm/qwen_image/model.py, 01f4512 of comfyanonymous/ComfyUI). Not for Wan (comfy/ldm/wan/model.py, 0c9a69a).
Modules of diffusers' that are rows of one matrix in ComfyUI (q, k, v) are found by `transformer.NAME` alone.

A module's tensors are `.lora_A.weight` and `.lora_B.weight`, or other pairs that we do not write. Without an `.alpha`
their product is added as it is (comfy/weight_adapter/lora.py, 6f98b15). Metadata are not read.

FLUX.2's modulation is called as in comfy/ldm/flux/model.py of a fork (silveroxides/ComfyUI, 80f503b): the stored copies
of ComfyUI's own file were older. diffusers' converter for FLUX.2's LoRAs has the same names.
"""

import re

# family: {module in diffusers: module in ComfyUI that it is, or is rows of}; * is a block's number. The loader finds
# `transformer.` + the left name
BY_DIFFUSERS_NAME = {
    "stable_diffusion_3": {
        "context_embedder": "context_embedder",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "transformer_blocks.*.attn.add_k_proj": "joint_blocks.*.context_block.attn.qkv",
        "transformer_blocks.*.attn.add_q_proj": "joint_blocks.*.context_block.attn.qkv",
        "transformer_blocks.*.attn.add_v_proj": "joint_blocks.*.context_block.attn.qkv",
        "transformer_blocks.*.attn.to_add_out": "joint_blocks.*.context_block.attn.proj",
        "transformer_blocks.*.attn.to_k": "joint_blocks.*.x_block.attn.qkv",
        "transformer_blocks.*.attn.to_out.0": "joint_blocks.*.x_block.attn.proj",
        "transformer_blocks.*.attn.to_q": "joint_blocks.*.x_block.attn.qkv",
        "transformer_blocks.*.attn.to_v": "joint_blocks.*.x_block.attn.qkv",
        "transformer_blocks.*.attn2.to_k": "joint_blocks.*.x_block.attn2.qkv",
        "transformer_blocks.*.attn2.to_out.0": "joint_blocks.*.x_block.attn2.proj",
        "transformer_blocks.*.attn2.to_q": "joint_blocks.*.x_block.attn2.qkv",
        "transformer_blocks.*.attn2.to_v": "joint_blocks.*.x_block.attn2.qkv",
        "transformer_blocks.*.ff.net.0.proj": "joint_blocks.*.x_block.mlp.fc1",
        "transformer_blocks.*.ff.net.2": "joint_blocks.*.x_block.mlp.fc2",
        "transformer_blocks.*.ff_context.net.0.proj": "joint_blocks.*.context_block.mlp.fc1",
        "transformer_blocks.*.ff_context.net.2": "joint_blocks.*.context_block.mlp.fc2",
        "transformer_blocks.*.norm1.linear": "joint_blocks.*.x_block.adaLN_modulation.1",
        "transformer_blocks.*.norm1_context.linear": "joint_blocks.*.context_block.adaLN_modulation.1",
    },
    "flux": {
        "context_embedder": "txt_in",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
        "single_transformer_blocks.*.attn.to_k": "single_blocks.*.linear1",
        "single_transformer_blocks.*.attn.to_q": "single_blocks.*.linear1",
        "single_transformer_blocks.*.attn.to_v": "single_blocks.*.linear1",
        "single_transformer_blocks.*.norm.linear": "single_blocks.*.modulation.lin",
        "single_transformer_blocks.*.proj_mlp": "single_blocks.*.linear1",
        "single_transformer_blocks.*.proj_out": "single_blocks.*.linear2",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
        "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "transformer_blocks.*.attn.add_k_proj": "double_blocks.*.txt_attn.qkv",
        "transformer_blocks.*.attn.add_q_proj": "double_blocks.*.txt_attn.qkv",
        "transformer_blocks.*.attn.add_v_proj": "double_blocks.*.txt_attn.qkv",
        "transformer_blocks.*.attn.to_add_out": "double_blocks.*.txt_attn.proj",
        "transformer_blocks.*.attn.to_k": "double_blocks.*.img_attn.qkv",
        "transformer_blocks.*.attn.to_out.0": "double_blocks.*.img_attn.proj",
        "transformer_blocks.*.attn.to_q": "double_blocks.*.img_attn.qkv",
        "transformer_blocks.*.attn.to_v": "double_blocks.*.img_attn.qkv",
        "transformer_blocks.*.ff.net.0.proj": "double_blocks.*.img_mlp.0",
        "transformer_blocks.*.ff.net.2": "double_blocks.*.img_mlp.2",
        "transformer_blocks.*.ff_context.net.0.proj": "double_blocks.*.txt_mlp.0",
        "transformer_blocks.*.ff_context.net.2": "double_blocks.*.txt_mlp.2",
        "transformer_blocks.*.norm1.linear": "double_blocks.*.img_mod.lin",
        "transformer_blocks.*.norm1_context.linear": "double_blocks.*.txt_mod.lin",
        "x_embedder": "img_in",
    },
    "flux2_klein": {
        "context_embedder": "txt_in",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
        "single_transformer_blocks.*.attn.to_out": "single_blocks.*.linear2",
        "single_transformer_blocks.*.attn.to_qkv_mlp_proj": "single_blocks.*.linear1",
        "transformer_blocks.*.attn.add_k_proj": "double_blocks.*.txt_attn.qkv",
        "transformer_blocks.*.attn.add_q_proj": "double_blocks.*.txt_attn.qkv",
        "transformer_blocks.*.attn.add_v_proj": "double_blocks.*.txt_attn.qkv",
        "transformer_blocks.*.attn.to_add_out": "double_blocks.*.txt_attn.proj",
        "transformer_blocks.*.attn.to_k": "double_blocks.*.img_attn.qkv",
        "transformer_blocks.*.attn.to_out.0": "double_blocks.*.img_attn.proj",
        "transformer_blocks.*.attn.to_q": "double_blocks.*.img_attn.qkv",
        "transformer_blocks.*.attn.to_v": "double_blocks.*.img_attn.qkv",
        "transformer_blocks.*.ff.linear_in": "double_blocks.*.img_mlp.0",
        "transformer_blocks.*.ff.linear_out": "double_blocks.*.img_mlp.2",
        "transformer_blocks.*.ff_context.linear_in": "double_blocks.*.txt_mlp.0",
        "transformer_blocks.*.ff_context.linear_out": "double_blocks.*.txt_mlp.2",
        "x_embedder": "img_in",
    },
    "qwen_image": {
        name: name
        for name in (
            "img_in",
            "norm_out.linear",
            "proj_out",
            "time_text_embed.timestep_embedder.linear_1",
            "time_text_embed.timestep_embedder.linear_2",
            "transformer_blocks.*.attn.add_k_proj",
            "transformer_blocks.*.attn.add_q_proj",
            "transformer_blocks.*.attn.add_v_proj",
            "transformer_blocks.*.attn.to_add_out",
            "transformer_blocks.*.attn.to_k",
            "transformer_blocks.*.attn.to_out.0",
            "transformer_blocks.*.attn.to_q",
            "transformer_blocks.*.attn.to_v",
            "transformer_blocks.*.img_mlp.net.0.proj",
            "transformer_blocks.*.img_mlp.net.2",
            "transformer_blocks.*.img_mod.1",
            "transformer_blocks.*.txt_mlp.net.0.proj",
            "transformer_blocks.*.txt_mlp.net.2",
            "transformer_blocks.*.txt_mod.1",
            "txt_in",
        )
    },
    "z_image": {
        "all_final_layer.2-1.adaLN_modulation.1": "final_layer.adaLN_modulation.1",
        "all_final_layer.2-1.linear": "final_layer.linear",
        "all_x_embedder.2-1": "x_embedder",
        "cap_embedder.1": "cap_embedder.1",
        "context_refiner.*.attention.to_k": "context_refiner.*.attention.qkv",
        "context_refiner.*.attention.to_out.0": "context_refiner.*.attention.out",
        "context_refiner.*.attention.to_q": "context_refiner.*.attention.qkv",
        "context_refiner.*.attention.to_v": "context_refiner.*.attention.qkv",
        "context_refiner.*.feed_forward.w1": "context_refiner.*.feed_forward.w1",
        "context_refiner.*.feed_forward.w2": "context_refiner.*.feed_forward.w2",
        "context_refiner.*.feed_forward.w3": "context_refiner.*.feed_forward.w3",
        "layers.*.adaLN_modulation.0": "layers.*.adaLN_modulation.0",
        "layers.*.attention.to_k": "layers.*.attention.qkv",
        "layers.*.attention.to_out.0": "layers.*.attention.out",
        "layers.*.attention.to_q": "layers.*.attention.qkv",
        "layers.*.attention.to_v": "layers.*.attention.qkv",
        "layers.*.feed_forward.w1": "layers.*.feed_forward.w1",
        "layers.*.feed_forward.w2": "layers.*.feed_forward.w2",
        "layers.*.feed_forward.w3": "layers.*.feed_forward.w3",
        "noise_refiner.*.adaLN_modulation.0": "noise_refiner.*.adaLN_modulation.0",
        "noise_refiner.*.attention.to_k": "noise_refiner.*.attention.qkv",
        "noise_refiner.*.attention.to_out.0": "noise_refiner.*.attention.out",
        "noise_refiner.*.attention.to_q": "noise_refiner.*.attention.qkv",
        "noise_refiner.*.attention.to_v": "noise_refiner.*.attention.qkv",
        "noise_refiner.*.feed_forward.w1": "noise_refiner.*.feed_forward.w1",
        "noise_refiner.*.feed_forward.w2": "noise_refiner.*.feed_forward.w2",
        "noise_refiner.*.feed_forward.w3": "noise_refiner.*.feed_forward.w3",
        "t_embedder.mlp.0": "t_embedder.mlp.0",
        "t_embedder.mlp.2": "t_embedder.mlp.2",
    },
}

# The same for modules that the loader does not find by diffusers' names: it finds `diffusion_model.` + the right name
BY_OWN_NAME = {
    "flux2_klein": {
        "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
        "single_stream_modulation.linear": "single_stream_modulation.lin",
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    },
    "wan": {
        "blocks.*.attn1.to_k": "blocks.*.self_attn.k",
        "blocks.*.attn1.to_out.0": "blocks.*.self_attn.o",
        "blocks.*.attn1.to_q": "blocks.*.self_attn.q",
        "blocks.*.attn1.to_v": "blocks.*.self_attn.v",
        "blocks.*.attn2.to_k": "blocks.*.cross_attn.k",
        "blocks.*.attn2.to_out.0": "blocks.*.cross_attn.o",
        "blocks.*.attn2.to_q": "blocks.*.cross_attn.q",
        "blocks.*.attn2.to_v": "blocks.*.cross_attn.v",
        "blocks.*.ffn.net.0.proj": "blocks.*.ffn.0",
        "blocks.*.ffn.net.2": "blocks.*.ffn.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "proj_out": "head.head",
    },
}
BY_OWN_NAME["wan_ti2v"] = BY_OWN_NAME["wan"]
BY_OWN_NAME["wan_ti2v_image"] = BY_OWN_NAME["wan"]
BY_OWN_NAME["wan_image_to_video"] = BY_OWN_NAME["wan"] | {
    "blocks.*.attn2.add_k_proj": "blocks.*.cross_attn.k_img",
    "blocks.*.attn2.add_v_proj": "blocks.*.cross_attn.v_img",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
}


def starred(module: str) -> str:
    """The row of a module: * for the block's number."""
    return re.sub(r"^(\w+)\.\d+\.", r"\1.*.", module)


def names_in_a_file(family: str) -> dict[str, str]:
    """{module in diffusers: the name by which the loader finds it}."""
    by_diffusers_name = {module: f"transformer.{module}" for module in BY_DIFFUSERS_NAME.get(family, {})}
    return by_diffusers_name | {module: f"diffusion_model.{own}" for module, own in BY_OWN_NAME.get(family, {}).items()}
