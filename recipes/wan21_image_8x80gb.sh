#!/bin/bash
# Wan 2.1 14B, video from a picture, by Flow-GRPO on eight 80 GB GPUs (H100); the trainer samples.
# Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# Each record names the image that its video starts with (docs/editing_and_video.md).
# From Flow-Factory's example (examples/grpo/lora/wan21/i2v.yaml): size, frames, the LoRA's rank, steps, guidance,
# noise, one trained step, drawn from the second to the fourth, 48 x 16 videos, two optimizer steps per rollout,
# advantages, learning rate, Adam's epsilon, clip range, average (0.9 every eighth optimizer step), 28 steps in
# evaluation (there at 480 pixels). Ours: a LoRA of the attention alone, 512 tokens, and memory settings.
# my_rewards.py:motion is your own file.
# To see its memory before you start: python -m tools.plan h100-80 recipes/wan21_image_8x80gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} flow_grpo.py \
    --model Wan-AI/Wan2.1-I2V-14B-480P-Diffusers --dtype bfloat16 --image_size 240 240 --num_frames 5 \
    --max_sequence_length 512 \
    --rollout local --train_with activation_checkpointing compile \
    --lora_rank 64 --lora_alpha 128 --learning_rate 1e-4 --adam_eps 1e-8 --clip_range 1e-4 --ema_decay 0.987 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 10 --guidance_scale 5 --noise_level 0.9 --sde_window_size 1 --sde_window_range 1 4 \
    --eval_num_inference_steps 28 \
    --num_prompts 48 --group_size 16 --scale_rewards group --updates_per_rollout 2 --micro_batch_size 4 \
    --reward my_rewards.py:motion \
    "$@"
