#!/usr/bin/env bash
# The recorded runs of docs/comparison.md: five scripts at their defaults, three seeds each, with --rollout local
# (dpo_offline.py has no other). Then: python benchmarks/comparison.py docs/records
set -euo pipefail
cd "$(dirname "$0")/.."

for seed in 1 2 3; do
    for script in flow_grpo grpo_guard mix_grpo diffusion_nft dpo_offline; do
        name="$script-comparison-seed$seed"
        rollout="--rollout local"
        if [ "$script" = dpo_offline ]; then rollout=""; fi
        torchrun --standalone "$script.py" --name "$name" --seed "$seed" $rollout
        mkdir -p "docs/records/$name"
        cp "runs/$name/metrics.jsonl" "docs/records/$name/"
        sed "s#$PWD/##g" "runs/$name/args.json" > "docs/records/$name/args.json"
        python -m benchmarks.held_out "runs/$name/adapter" > "docs/records/$name/held_out.json"
    done
done
