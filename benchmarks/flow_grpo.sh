#!/usr/bin/env bash
# The recorded runs of docs/flow_grpo.md: three seeds with each engine on one rank, and three on two ranks.
# About an hour and a half on two CPU cores. Records go to docs/records/, then: python benchmarks/summarize.py docs/records/flow_grpo-*
set -euo pipefail
cd "$(dirname "$0")/.."

run() {  # run NAME NPROC ARGUMENTS...
    local name=$1 nproc=$2
    shift 2
    torchrun --standalone --nproc_per_node "$nproc" flow_grpo.py --name "$name" "$@"
    mkdir -p "docs/records/$name"
    cp "runs/$name/metrics.jsonl" "runs/$name/curves.png" "docs/records/$name/"
    sed "s#$PWD/##g" "runs/$name/args.json" > "docs/records/$name/args.json"
}

for seed in 1 2 3; do
    run "flow_grpo-vllm-seed$seed" 1 --seed "$seed"
    run "flow_grpo-local-seed$seed" 1 --seed "$seed" --rollout local
    run "flow_grpo-2ranks-seed$seed" 2 --seed "$seed"
done
