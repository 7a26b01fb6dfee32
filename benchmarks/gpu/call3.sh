#!/usr/bin/env bash
# The third program, 8 to 9 minutes: models of FLUX.1-dev's size (12 B) and Qwen-Image's (20 B), LoRA, bf16, 512 x 512:
# do they fit one GPU as the plan says, and how fast are they. FLUX's pipeline in diffusers first. See README.md.
#
# Its parts: flux_peers, flux_plan, flux, flux_frozen, qwen_plan, qwen
LIMIT=515
ROOT=$(cd "$(dirname "$0")/.." && pwd)
[ -f "$ROOT/flow_grpo.py" ] || ROOT=$(dirname "$ROOT")
. "$ROOT/benchmarks/gpu/env.sh"
begin "Third call: the sizes of FLUX.1-dev and Qwen-Image"
FLUX=(--image_size 512 512 --max_sequence_length 256 --lora_rank 64 --lora_alpha 128 --guidance_scale 3.5
    --num_inference_steps 6 --sde_window_size 0 --noise_level 0.9 --num_prompts 1 --group_size 8 --updates_per_rollout 2
    --micro_batch_size 4)
QWEN=(--image_size 512 512 --max_sequence_length 256 --lora_rank 64 --lora_alpha 128 --guidance_scale 4
    --num_inference_steps 10 --sde_window_size 2 --sde_window_range 0 5 --noise_level 1.2 --num_prompts 1 --group_size 4
    --updates_per_rollout 1 --micro_batch_size 2 --train_with activation_checkpointing)
PEER=(--batch 4 --text_tokens 256 --steps 6 --guidance_scale 3.5)
if [ "$TINY" ]; then
    FLUX=(--image_size 32 96 --max_sequence_length 160 --num_inference_steps 3 --sde_window_size 1 --num_prompts 1
        --group_size 4 --updates_per_rollout 1 --micro_batch_size 2)
    QWEN=("${FLUX[@]}" --train_with activation_checkpointing)
    PEER=(--batch 2 --image_size 32 96 --text_tokens 160 --steps 3 --repeat 1)
fi
OURS=(--model MODEL --num_steps 3 --rollout local --dtype bfloat16 --reward jpeg_incompressibility --kl_coef 0)

peers flux_peers flux 100 "${PEER[@]}"
plan flux_plan flux "${OURS[@]}" "${FLUX[@]}" &
throughput flux flux 170 "${OURS[@]}" "${FLUX[@]}"
wait
SIZED_FROZEN=sharded throughput flux_frozen flux 130 "${OURS[@]}" "${FLUX[@]}"
plan qwen_plan qwen "${OURS[@]}" "${QWEN[@]}" &
throughput qwen qwen 200 "${OURS[@]}" "${QWEN[@]}"
wait
end
