#!/usr/bin/env bash
# The first training that we would run on one rented GPU of 80 GB, with published weights: Stable Diffusion 3.5 medium
# learns to draw the digits that its prompt asks for. Never run: our one half hour on a GPU had no published weights.
#
#     hf auth login                          # after accepting the model's licence on its page
#     benchmarks/first_training.sh           # what you add wins, except --name: --rollout local, --resume latest
#
# 100 steps of 16 prompts x 16 images. By tools.plan a step takes 250 s on an H100, and the whole 7 hours, without the
# five evaluations; --train_with compile makes it faster. It prints the hours that it took. The curve
# is runs/first_training/curves.png, and all of it report.html beside it: please send us that file in an issue.
set -euo pipefail
cd "$(dirname "$0")/.."
began=$SECONDS
bash recipes/sd35_medium_1x40gb.sh --reward ocr_scene_contains --micro_batch_size 8 \
    --num_steps 100 --eval_every 25 --max_prompts 64 "$@" --name first_training
awk -v seconds=$((SECONDS - began)) 'BEGIN { printf "%.2f hours\n", seconds / 3600 }'
${REPORT:-python -m tools.report} runs/first_training
