#!/bin/bash
# FLUX.2-klein base 4B by Flow-GRPO on one 24 GB GPU (RTX 4090); the trainer samples. Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# From Flow-Factory's example (examples/grpo/lora/flux2_klein_base, set to the 9B model): size, the LoRA's rank, steps,
# guidance, noise, one trained step, drawn from the second to the fourth, group, two optimizer steps per rollout,
# advantages, learning rate, Adam's epsilon, clip range, average (0.9 every eighth optimizer step). Ours: 16 prompts
# (there 48), a LoRA of the attention alone, and memory settings.
# To see its memory before you start: python -m tools.plan rtx4090 recipes/flux2_klein_1x24gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200} flow_grpo.py \
    --model black-forest-labs/FLUX.2-klein-base-4B --dtype bfloat16 --image_size 384 384 --max_sequence_length 512 \
    --rollout local --train_with activation_checkpointing compile --prompt_cache embeddings \
    --lora_rank 64 --lora_alpha 128 --learning_rate 3e-4 --adam_eps 1e-8 --clip_range 1e-4 --ema_decay 0.987 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 8 --guidance_scale 4 --noise_level 0.7 --sde_window_size 1 --sde_window_range 1 4 \
    --eval_num_inference_steps 28 \
    --num_prompts 16 --group_size 16 --scale_rewards group --updates_per_rollout 2 --micro_batch_size 2 \
    "$@"
