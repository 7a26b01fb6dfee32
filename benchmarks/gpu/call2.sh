#!/usr/bin/env bash
# The second program, 9 minutes: a model of SD3.5-medium's size, 512 x 512, LoRA, bf16. The peers first, then ours:
# eager as diffusers and peft have it, with fused norms, and with fused LoRA layers as well; compiled; two images in a
# micro-batch. See README.md.
#
# Its parts: plan, peers, eager_plain, eager_norms, eager, compile, micro_2; and behind them, which a first start may not
# reach, micro_2_compile, trace, cudnn, vae_bf16, checkpointing, frozen, micro_2_frozen. On an H100 plan and peers took
# 49 seconds, an eager part 82, compile 136 and micro_2 85, which makes 516.
LIMIT=545
ROOT=$(cd "$(dirname "$0")/.." && pwd)
[ -f "$ROOT/flow_grpo.py" ] || ROOT=$(dirname "$ROOT")
. "$ROOT/benchmarks/gpu/env.sh"
begin "Second call: the size of SD3.5-medium"
SIZE=(--image_size 512 512 --max_sequence_length 256 --lora_rank 32 --lora_alpha 64 --num_inference_steps 10
    --guidance_scale 4.5 --sde_window_size 0 --num_prompts 2 --group_size 8 --updates_per_rollout 2
    --micro_batch_size 8 --clip_range 1e-4)
PEER=(--batch 8)
if [ "$TINY" ]; then
    SIZE=(--image_size 32 96 --max_sequence_length 160 --num_inference_steps 3 --sde_window_size 1 --num_prompts 1
        --group_size 4 --updates_per_rollout 1 --micro_batch_size 4)
    PEER=(--batch 2 --image_size 32 96 --text_tokens 237 --steps 3 --repeat 1)
fi
OURS=(--model MODEL --num_steps 3 --rollout local --dtype bfloat16 --reward jpeg_incompressibility --kl_coef 0 "${SIZE[@]}")
LESS=(--micro_batch_size 2 --num_prompts 1 --updates_per_rollout 1)

plan plan sd35m "${OURS[@]}" &
peers peers sd35m 110 "${PEER[@]}"
wait
SIZED_PLAIN="norms lora" throughput eager_plain sd35m 120 "${OURS[@]}"
SIZED_PLAIN=lora throughput eager_norms sd35m 120 "${OURS[@]}"
throughput eager sd35m 120 "${OURS[@]}"
throughput compile sd35m 200 "${OURS[@]}" --train_with compile
# the micro-batch of recipes for small GPUs, of 8 images: the host that launches limits it, if anything does
throughput micro_2 sd35m 110 "${OURS[@]}" "${LESS[@]}"
throughput micro_2_compile sd35m 160 "${OURS[@]}" "${LESS[@]}" --train_with compile
sized trace sd35m 100 flow_grpo.py --name trace "${OURS[@]}" --num_steps 2 --profile_steps 2 \
    --max_prompts 2 --eval_num_inference_steps 2 &&
    { echo; python "$KIT/trace_table.py" runs/trace/trace_0002.json; echo; } 2>&1 | report
throughput cudnn sd35m 120 "${OURS[@]}" --attention cudnn
throughput vae_bf16 sd35m 120 "${OURS[@]}" --vae_dtype bfloat16
throughput checkpointing sd35m 120 "${OURS[@]}" --train_with activation_checkpointing
# the other side of "frozen weights in and out of FSDP", of which every other part leaves them out
SIZED_FROZEN=sharded throughput frozen sd35m 100 "${OURS[@]}"
SIZED_FROZEN=sharded throughput micro_2_frozen sd35m 130 "${OURS[@]}" "${LESS[@]}"
if [ -f runs/trace/trace_0002.json ]; then gzip -c runs/trace/trace_0002.json > "$OUT/${NAME}_trace.json.gz"; fi
end
