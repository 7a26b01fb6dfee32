#!/usr/bin/env bash
# The first program, 6 to 7 minutes: does the CUDA path run, is the first ratio 1, does it learn in bf16, does a run
# resume. Correctness, not time: parts run side by side on one GPU and 16 cores. See README.md.
#
# Its parts: facts, bf16 and resume (which needs bf16), fp32, grpo_guard, mix_grpo, diffusion_nft, dpo_offline, offload
LIMIT=395
ROOT=$(cd "$(dirname "$0")/.." && pwd)
[ -f "$ROOT/flow_grpo.py" ] || ROOT=$(dirname "$ROOT")
. "$ROOT/benchmarks/gpu/env.sh"
begin "First call: does it run, and learn"
export GENEVAL_DETECTOR=$ROOT/assets/nanodet
SCENES=(--model "$ROOT/assets/embedded_scenes" --image_size 128 128 --max_sequence_length 16)
SCENES+=(--train_prompts "$ROOT/assets/scenes_train.jsonl" --eval_prompts "$ROOT/assets/scenes_eval.jsonl")
SCENES+=(--reward geneval.soft --eval_reward geneval)
LEARN=(--num_steps 15 --eval_every 5 --max_prompts 96 --kl_coef 0 --lr_schedule constant)
MORE=(--num_steps 17)
SMALL=(--num_steps 2 --num_prompts 8 --group_size 4 --micro_batch_size 16 --max_prompts 16)
PAIRS=(--num_steps 2 --num_pair_prompts 8 --group_size 4 --num_pairs 8 --micro_batch_size 4 --max_prompts 8)
FACTS=()
THREADS=2
if [ "$TINY" ]; then
    LEARN=(--num_steps 1 --num_prompts 4 --max_prompts 4 --micro_batch_size 8)
    MORE=(--num_steps 2)
    SMALL=(--num_steps 1 --num_prompts 4 --group_size 4 --micro_batch_size 8 --max_prompts 4)
    PAIRS=(--num_steps 1 --num_pair_prompts 4 --group_size 4 --num_pairs 4 --micro_batch_size 4 --max_prompts 4)
    FACTS=(--device "${DEVICE:-cpu}" --only "${ONLY:-ratio}")
    THREADS=1
fi
LOCAL=(--rollout local)
HALF=(--dtype bfloat16 --reward jpeg_incompressibility)

# script NAME FILE LIMIT OPTIONS...: a run of a script on one GPU
script() {
    local name=$1 file=$2 limit=$3
    shift 3
    try "$name" "$limit" env OMP_NUM_THREADS=$THREADS torchrun --standalone "$ROOT/$file" --name "$name" "$@"
}

# one after the other: eight runs of flow_grpo.py, about 20 s each, one of them compiled
try facts 380 python "$KIT/facts.py" --results "$WORK/facts" --but engine "${FACTS[@]}" &
# meanwhile: it learns to draw scenes, 15 steps of 256 images; NanoDet judges them
{
    script bf16 flow_grpo.py 300 --dtype bfloat16 "${LOCAL[@]}" "${SCENES[@]}" "${LEARN[@]}" --save_every 3 &&
        try resume 120 env OMP_NUM_THREADS=$THREADS torchrun --standalone "$ROOT/flow_grpo.py" --name bf16 --resume latest "${MORE[@]}"
} &
script fp32 flow_grpo.py 300 "${LOCAL[@]}" "${SCENES[@]}" "${LEARN[@]}" &
{
    for name in grpo_guard mix_grpo diffusion_nft; do
        script $name $name.py 120 "${LOCAL[@]}" "${HALF[@]}" "${SMALL[@]}"
    done
    script dpo_offline dpo_offline.py 120 "${HALF[@]}" "${PAIRS[@]}"
    script offload flow_grpo.py 120 "${LOCAL[@]}" "${HALF[@]}" "${SMALL[@]}" --guidance_scale 2 \
        --train_with cpu_offload activation_checkpointing --kl_coef 0.04 --ema_decay 0.9
} &
wait

if [ -f "$LOGS/facts.log" ]; then { echo; grep '^|' "$LOGS/facts.log"; echo; } | report; fi
if [ -d runs ]; then python "$KIT/learned.py" runs/* | report; fi
# the runs without their weights and images, and the logs of the facts
mkdir -p runs facts
find runs facts -name '*.jsonl' -o -name '*.json' -o -name '*.log' -o -name curves.png > files
pack logs -T files
end
