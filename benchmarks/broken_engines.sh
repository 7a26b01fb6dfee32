#!/usr/bin/env bash
# What a run says when its engine is broken in one of five ways, in fp32 and in bf16, and how far an intact one is off:
# the table of "Known failures" in docs/flow_grpo.md.  ./benchmarks/broken_engines.sh | tee docs/records/broken_engines.txt
set -euo pipefail
cd "$(dirname "$0")/.."

small="--num_steps 3 --num_prompts 4 --group_size 4 --updates_per_rollout 1 --num_inference_steps 6 --max_prompts 2"
log=$(mktemp)
trap 'rm -rf "$log" runs/broken' EXIT
echo "# ./benchmarks/broken_engines.sh, commit $(git rev-parse --short HEAD), seed 1,$(grep -m1 "model name" /proc/cpuinfo | cut -d: -f2)"
for dtype in float32 bfloat16; do
    for breakage in sigmas steps stale bf16_latents "guidance --guidance_scale 3"; do
        rm -rf runs/broken
        # shellcheck disable=SC2086
        torchrun --standalone tests/broken_engine.py $breakage $small --dtype $dtype --name broken > "$log" 2>&1 || true
        echo "$dtype $breakage: $(grep -ao 'error: .*' "$log" | head -1)"
    done
    for guidance in 1 4.5; do
        rm -rf runs/broken
        # shellcheck disable=SC2086
        torchrun --standalone flow_grpo.py $small --dtype $dtype --guidance_scale $guidance --name broken > "$log" 2>&1
        found=$(grep -o '"rollout_corr/velocity_diff_max": [^,}]*' runs/broken/metrics.jsonl | cut -d: -f2 | tr '\n' ' ')
        echo "$dtype intact, guidance $guidance, velocity_diff_max: $found"
    done
done
