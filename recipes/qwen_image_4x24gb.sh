#!/bin/bash
# Qwen-Image by Flow-GRPO on four 24 GB GPUs (RTX 4090); the trainer samples. Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From VeRL-Omni's script for text in pictures: size, the LoRA's rank, steps, guidance, noise, window, group, two
# optimizer steps per rollout, learning rate, Adam's epsilon, clip range (Flow-GRPO's pickscore_qwenimage: 1e-4). Ours:
# 16 prompts (there 32), a LoRA of the attention alone, and memory settings: it gathers a block at a time, because the
# transformer does not fit on one GPU.
# To see its memory before you start: python -m tools.plan rtx4090 recipes/qwen_image_4x24gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 4} flow_grpo.py \
    --model Qwen/Qwen-Image --dtype bfloat16 --image_size 512 512 --max_sequence_length 256 \
    --rollout local --train_with activation_checkpointing gather_blocks compile --prompt_cache embeddings \
    --lora_rank 64 --lora_alpha 128 --learning_rate 3e-4 --adam_eps 1e-8 --clip_range 1e-5 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 10 --guidance_scale 4 --noise_level 1.2 --sde_window_size 2 --sde_window_range 0 5 \
    --eval_num_inference_steps 50 \
    --num_prompts 16 --group_size 16 --updates_per_rollout 2 --micro_batch_size 2 \
    "$@"
