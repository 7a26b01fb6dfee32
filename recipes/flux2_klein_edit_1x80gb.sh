#!/bin/bash
# FLUX.2-klein base 4B, edits of a picture, by Flow-GRPO on one 80 GB GPU (H100); the trainer samples.
# Never run by us on a GPU.
# Add your own --name, --train_prompts, --eval_prompts and --reward; options that you add override those in this file.
# Each record names its source image (docs/editing_and_video.md). Give the plan your --train_prompts: it counts the
# source images of the first record, and otherwise none.
# From UniRL's example (examples/diffusion/flux2_klein/flux2_klein_4b_editreward.yaml): size, tokens, the LoRA's rank,
# steps, no guidance, step kind and noise, three trained steps in the first half, group, two optimizer steps per
# rollout, learning rate, Adam's epsilon. Its clip range of 5e-3 is of log-probs in another unit; ours is that of
# Flow-Factory's example for text to image. Also ours: 16 prompts (there 64), the trained steps in a row (there any
# three), images of a group that start from different noise (there from one), a LoRA of the attention alone, 28 steps in
# evaluation, and memory settings.
# To see its memory before you start: python -m tools.plan h100-80 recipes/flux2_klein_edit_1x80gb.sh
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200} flow_grpo.py \
    --model black-forest-labs/FLUX.2-klein-base-4B --dtype bfloat16 --image_size 512 512 --max_sequence_length 512 \
    --rollout local --train_with activation_checkpointing compile \
    --lora_rank 16 --lora_alpha 32 --learning_rate 5e-5 --adam_eps 1e-8 --clip_range 1e-4 \
    --lr_schedule constant --kl_coef 0 --num_steps 30 \
    --num_inference_steps 10 --guidance_scale 1 --sde_type dance --noise_level 0.7 \
    --sde_window_size 3 --sde_window_range 0 5 --eval_num_inference_steps 28 \
    --num_prompts 16 --group_size 16 --updates_per_rollout 2 --micro_batch_size 4 \
    "$@"
