#!/usr/bin/env bash
# The fifth program, four minutes without vLLM and up to ten more with it: whether the engine can be had, what kernels of
# attention cost and how far their gradients are apart, Qwen-Image's step, and the engine itself. It installs nothing.
# See README.md.
#
# Its parts: engine_there, attention, qwen_native (as call3.sh's qwen), engine
LIMIT=900
ROOT=$(cd "$(dirname "$0")/.." && pwd)
[ -f "$ROOT/flow_grpo.py" ] || ROOT=$(dirname "$ROOT")
. "$ROOT/benchmarks/gpu/env.sh"
begin "Fifth call: attention, and the engine"
QWEN=(--image_size 512 512 --max_sequence_length 256 --lora_rank 64 --lora_alpha 128 --guidance_scale 4
    --num_inference_steps 10 --sde_window_size 2 --sde_window_range 0 5 --noise_level 1.2 --num_prompts 1 --group_size 4
    --updates_per_rollout 1 --micro_batch_size 2 --train_with activation_checkpointing)
FACTS=()
if [ "$TINY" ]; then
    QWEN=(--image_size 32 96 --max_sequence_length 160 --num_inference_steps 3 --sde_window_size 1 --num_prompts 1
        --group_size 4 --updates_per_rollout 1 --micro_batch_size 2 --train_with activation_checkpointing)
    FACTS=(--device "${DEVICE:-cpu}")
fi
OURS=(--model MODEL --num_steps 3 --rollout local --dtype bfloat16 --reward jpeg_incompressibility --kl_coef 0)

# first, so that a report of a minute says it: the rest goes on without the engine
try engine_there 120 python "$KIT/engine_there.py"
if [ -f "$LOGS/engine_there.log" ]; then fenced < "$LOGS/engine_there.log"; fi
try attention 180 python "$KIT/attention.py" ${TINY:+--tiny} # a process per shape and kernel
if [ -f "$LOGS/attention.log" ]; then fenced < "$LOGS/attention.log"; fi
throughput qwen_native qwen 200 "${OURS[@]}" "${QWEN[@]}"
if grep -qs 'the engine cannot be had' "$LOGS/engine_there.log"; then
    if wanted engine; then say "- engine: not run, the engine cannot be had"; fi
else
    try engine 600 python "$KIT/facts.py" --results "$WORK/facts_engine" --only engine "${FACTS[@]}"
    # also where a fact does not hold, which is a failure of the part
    if [ -f "$LOGS/engine.log" ]; then { echo; grep '^|' "$LOGS/engine.log"; echo; } | report; fi
fi
# the runs without their weights and images, and the logs of the facts, the engine's among them
mkdir -p runs facts_engine
find runs facts_engine -name '*.jsonl' -o -name '*.json' -o -name '*.log' -o -name curves.png > files
pack logs -T files
end
