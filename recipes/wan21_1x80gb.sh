#!/bin/bash
# Wan 2.1 1.3B, text to video of 480 x 832 pixels and 81 frames, by Flow-GRPO on one 80 GB GPU (H100); the trainer
# samples. Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From Flow-GRPO's code (config/grpo.py, general_ocr_wan2_1, for 240 x 416 pixels and 33 frames): tokens, LoRA, steps,
# guidance, 4 x 4 videos per GPU, two optimizer steps per rollout, advantages, learning rate, Adam's epsilon, clip
# range, average (0.9 every eighth optimizer step). Ours: size, frames, step kind and noise, a window of two trained
# steps, evaluations of 16 videos, no KL, and memory settings. my_rewards.py:motion is your own file.
# On eight GPUs: LAUNCH="torchrun --standalone --nproc_per_node 8", and add --num_prompts 32.
# To see its memory before you start: python -m tools.plan h100-80 recipes/wan21_1x80gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200} flow_grpo.py \
    --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dtype bfloat16 --image_size 480 832 --num_frames 81 \
    --max_sequence_length 512 \
    --rollout local --train_with activation_checkpointing compile --prompt_cache embeddings \
    --lora_rank 32 --lora_alpha 64 --learning_rate 1e-4 --adam_eps 1e-8 --clip_range 1e-3 --ema_decay 0.987 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 20 --guidance_scale 4.5 --sde_type dance --noise_level 0.3 --sde_window_size 2 \
    --sde_window_range 0 19 --eval_num_inference_steps 50 --eval_every 20 --max_prompts 16 \
    --num_prompts 4 --group_size 4 --scale_rewards group --updates_per_rollout 2 --micro_batch_size 1 \
    --reward my_rewards.py:motion \
    "$@"
