#!/bin/bash
# FLUX.1-dev by Flow-GRPO on four 24 GB GPUs (RTX 4090); the trainer samples. Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From Flow-GRPO's code (config/grpo.py, pickscore_flux): size, the LoRA's rank, steps, guidance, noise, two optimizer
# steps per rollout, learning rate, Adam's epsilon, clip range, average (0.9 every eighth optimizer step). Ours: a
# window of two trained steps, 16 x 16 images (there 48 x 24), a LoRA of the attention alone, 256 tokens (there 128),
# and memory settings: it gathers a block at a time, because the transformer does not fit on one GPU.
# To see its memory before you start: python -m tools.plan rtx4090 recipes/flux1_dev_4x24gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 4} flow_grpo.py \
    --model black-forest-labs/FLUX.1-dev --dtype bfloat16 --image_size 512 512 --max_sequence_length 256 \
    --rollout local --train_with activation_checkpointing gather_blocks compile --prompt_cache embeddings \
    --lora_rank 64 --lora_alpha 128 --learning_rate 3e-4 --adam_eps 1e-8 --clip_range 1e-4 --ema_decay 0.987 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 6 --guidance_scale 3.5 --noise_level 0.9 --sde_window_size 2 --sde_window_range 0 5 \
    --eval_num_inference_steps 28 \
    --num_prompts 16 --group_size 16 --updates_per_rollout 2 --micro_batch_size 4 \
    "$@"
