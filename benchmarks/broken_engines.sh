#!/usr/bin/env bash
# What a run says when its engine is broken in one of five ways, and the drift of an intact one: the table of "Known
# failures" in docs/flow_grpo.md.  ./benchmarks/broken_engines.sh | tee docs/records/broken_engines.txt
set -euo pipefail
cd "$(dirname "$0")/.."

small="--num_steps 3 --num_prompts 4 --group_size 4 --updates_per_rollout 1 --num_inference_steps 6 --max_prompts 2"
log=$(mktemp)
trap 'rm -rf "$log" runs/broken' EXIT
echo "# ./benchmarks/broken_engines.sh, commit $(git rev-parse --short HEAD), seed 1,$(grep -m1 "model name" /proc/cpuinfo | cut -d: -f2)"
for breakage in sigmas steps stale "stale --dtype bfloat16" bf16_latents "guidance --guidance_scale 3"; do
    rm -rf runs/broken
    # shellcheck disable=SC2086
    torchrun --standalone tests/broken_engine.py $breakage $small --name broken > "$log" 2>&1 || true
    echo "$breakage: $(grep -ao 'error: .*' "$log" | head -1)"
done
rm -rf runs/broken
# shellcheck disable=SC2086
torchrun --standalone flow_grpo.py $small --name broken > "$log" 2>&1
echo "intact: $(grep -o '"rollout_corr/logprob_abs_diff_max": [^,}]*' runs/broken/metrics.jsonl | tr '\n' ' ')"
