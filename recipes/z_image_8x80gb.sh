#!/bin/bash
# Z-Image by Flow-GRPO on eight 80 GB GPUs (H100); the trainer samples, because the engine has no hooks for Z-Image.
# Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From Flow-Factory's example (examples/grpo/lora/z_image): size, the LoRA's rank, steps, guidance, noise, one trained
# step, drawn from the second to the fourth, 48 x 16 images, two optimizer steps per rollout, advantages, learning rate,
# Adam's epsilon, clip range, average (0.9 every eighth optimizer step). Its guidance of 4 is 5 here, because ours
# counts from 1. Ours: a LoRA of the attention alone, 256 tokens, and memory settings.
# To see its memory before you start: python -m tools.plan h100-80 recipes/z_image_8x80gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} flow_grpo.py \
    --model Tongyi-MAI/Z-Image --dtype bfloat16 --image_size 512 512 --max_sequence_length 256 \
    --rollout local --train_with activation_checkpointing compile \
    --lora_rank 64 --lora_alpha 128 --learning_rate 3e-4 --adam_eps 1e-8 --clip_range 1e-4 --ema_decay 0.987 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 10 --guidance_scale 5 --noise_level 0.7 --sde_window_size 1 --sde_window_range 1 4 \
    --eval_num_inference_steps 40 \
    --num_prompts 48 --group_size 16 --scale_rewards group --updates_per_rollout 2 --micro_batch_size 4 \
    "$@"
