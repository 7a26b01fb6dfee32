#!/bin/bash
# Stable Diffusion 3.5 medium by Flow-GRPO on eight 80 GB GPUs (H100); the trainer samples. Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From Flow-GRPO's code (config/grpo.py, general_ocr_sd3): size, LoRA, steps, guidance, noise, training on all steps
# except the last, 48 x 24 images, two optimizer steps per rollout, learning rate, Adam's epsilon, clip range, KL,
# average (0.9 every eighth optimizer step), micro-batch. Ours: bf16 (there fp16), 256 tokens (there 128).
# With vLLM-Omni engines, which we have never run on a GPU: --rollout vllm --rollout_batch_size 16
# To see its memory before you start: python -m tools.plan h100-80 recipes/sd35_medium_8x80gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} flow_grpo.py \
    --model stabilityai/stable-diffusion-3.5-medium --dtype bfloat16 --image_size 512 512 --max_sequence_length 256 \
    --rollout local --train_with compile \
    --lora_rank 32 --lora_alpha 64 --learning_rate 3e-4 --adam_eps 1e-8 --clip_range 1e-4 \
    --lr_schedule constant --num_steps 30 \
    --kl_coef 0.04 --ema_decay 0.987 \
    --num_inference_steps 10 --guidance_scale 4.5 --noise_level 0.7 --sde_window_size 0 \
    --eval_num_inference_steps 40 \
    --num_prompts 48 --group_size 24 --updates_per_rollout 2 --micro_batch_size 9 \
    "$@"
