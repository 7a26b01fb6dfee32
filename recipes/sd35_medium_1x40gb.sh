#!/bin/bash
# Stable Diffusion 3.5 medium by Flow-GRPO on one 40 GB GPU (A100), with a vLLM-Omni engine. Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From Flow-GRPO's code (config/grpo.py, general_ocr_sd3_4gpu): size, LoRA, steps, guidance, noise, training on all
# steps except the last, 16 x 16 images, two optimizer steps per rollout, learning rate, Adam's epsilon, clip range,
# average (0.9 every eighth optimizer step). Ours: no KL, bf16 (there fp16), 256 tokens (there 128), batches, prompt
# cache.
# To see its memory before you start: python -m tools.plan a100-40 recipes/sd35_medium_1x40gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200} flow_grpo.py \
    --model stabilityai/stable-diffusion-3.5-medium --dtype bfloat16 --image_size 512 512 --max_sequence_length 256 \
    --rollout_batch_size 8 --prompt_cache embeddings --train_with compile \
    --lora_rank 32 --lora_alpha 64 --learning_rate 3e-4 --adam_eps 1e-8 --clip_range 1e-4 --ema_decay 0.987 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 10 --guidance_scale 4.5 --noise_level 0.7 --sde_window_size 0 \
    --eval_num_inference_steps 40 \
    --num_prompts 16 --group_size 16 --updates_per_rollout 2 --micro_batch_size 2 \
    "$@"
