#!/bin/bash
# Wan 2.1 1.3B, text to video, by Flow-GRPO on one 24 GB GPU (RTX 4090); the trainer samples. Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From Flow-GRPO's code (config/grpo.py, general_ocr_wan2_1): size, frames, tokens, LoRA, steps, guidance, group, two
# optimizer steps per rollout, advantages, learning rate, Adam's epsilon, clip range, average (0.9 every eighth
# optimizer step). Ours: step kind and noise, a window of four trained steps, 16 prompts (there 4 per GPU), no KL, and
# memory settings. my_rewards.py:motion is your own file.
# To see its memory before you start: python -m tools.plan rtx4090 recipes/wan21_1x24gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200} flow_grpo.py \
    --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dtype bfloat16 --image_size 240 416 --num_frames 33 \
    --max_sequence_length 512 \
    --rollout local --train_with activation_checkpointing compile --prompt_cache embeddings \
    --lora_rank 32 --lora_alpha 64 --learning_rate 1e-4 --adam_eps 1e-8 --clip_range 1e-3 --ema_decay 0.987 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 20 --guidance_scale 4.5 --sde_type dance --noise_level 0.3 --sde_window_size 4 \
    --sde_window_range 0 19 --eval_num_inference_steps 50 \
    --num_prompts 16 --group_size 4 --scale_rewards group --updates_per_rollout 2 --micro_batch_size 1 \
    --reward my_rewards.py:motion \
    "$@"
