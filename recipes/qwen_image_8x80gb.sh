#!/bin/bash
# Qwen-Image by Flow-GRPO on eight 80 GB GPUs (H100); the trainer samples. Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From VeRL-Omni's script for text in pictures: size, the LoRA's rank, steps, guidance, noise, window, 32 x 16 images,
# two optimizer steps per rollout, learning rate, Adam's epsilon, clip range (Flow-GRPO's pickscore_qwenimage: 1e-4).
# Ours: a LoRA of the attention alone, batches, activation checkpointing, and no prompt cache, so that engines fit: at
# the start its text encoders could stand on a GPU beside an engine, 76 GB in all. They come to the GPU once per rollout.
# With vLLM-Omni engines, which we have never run on a GPU: --rollout vllm --rollout_batch_size 4
# To see its memory before you start: python -m tools.plan h100-80 recipes/qwen_image_8x80gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} flow_grpo.py \
    --model Qwen/Qwen-Image --dtype bfloat16 --image_size 512 512 --max_sequence_length 256 \
    --rollout local --train_with activation_checkpointing compile \
    --lora_rank 64 --lora_alpha 128 --learning_rate 3e-4 --adam_eps 1e-8 --clip_range 1e-5 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 10 --guidance_scale 4 --noise_level 1.2 --sde_window_size 2 --sde_window_range 0 5 \
    --eval_num_inference_steps 50 \
    --num_prompts 32 --group_size 16 --updates_per_rollout 2 --micro_batch_size 4 \
    "$@"
