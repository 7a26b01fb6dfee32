#!/bin/bash
# Qwen-Image by Flow-GRPO on one 24 GB GPU (RTX 4090); the trainer samples. Never run by us on a GPU.
# The frozen base is in four bits: this needs torchao (pip install torchao==0.18.0) and 59 GB of host memory to start.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From VeRL-Omni's script for text in pictures: size, the LoRA's rank, steps, guidance, noise, window, group, two
# optimizer steps per rollout, learning rate, Adam's epsilon, clip range (Flow-GRPO's pickscore_qwenimage: 1e-4). Ours:
# 16 prompts (there 32), a LoRA of the attention alone, and memory settings, with the base in nf4.
# To see its memory before you start: python -m tools.plan rtx4090 recipes/qwen_image_1x24gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200} flow_grpo.py \
    --model Qwen/Qwen-Image --dtype bfloat16 --image_size 512 512 --max_sequence_length 256 \
    --rollout local --base_weights nf4 --train_with activation_checkpointing --prompt_cache embeddings \
    --lora_rank 64 --lora_alpha 128 --learning_rate 3e-4 --adam_eps 1e-8 --clip_range 1e-5 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 10 --guidance_scale 4 --noise_level 1.2 --sde_window_size 2 --sde_window_range 0 5 \
    --eval_num_inference_steps 50 \
    --num_prompts 16 --group_size 16 --updates_per_rollout 2 --micro_batch_size 1 \
    "$@"
