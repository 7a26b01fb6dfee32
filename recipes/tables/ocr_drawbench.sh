#!/bin/bash
# A row of Flow-GRPO's table: Stable Diffusion 3.5 medium trained on text in pictures, and measured beside its base on
# the held-out texts (OCR) and on DrawBench (CLIP score, aesthetic, PickScore, HPSv2.1).
#     FLOW_GRPO=../flow_grpo DIFFUSION_NFT=../DiffusionNFT bash recipes/tables/ocr_drawbench.sh mine --num_steps 1000
# The variables name clones of yifan123/flow_grpo and NVlabs/DiffusionNFT, of which the prompts are. `mine` is the run's
# name; options behind it go to the training. MODEL is another base. Both commands start eight ranks unless LAUNCH says
# otherwise. Never run by us on a GPU.
# The training is that of recipes/sd35_medium.sh, with 128 tokens as in Flow-GRPO's code. To go on with a run that ended,
# or to measure one that is trained, give the same command with --resume latest behind it.
# Ctrl-C lets the training save; a signal to this script alone does not reach it.
# The table lies in runs/bench_mine/table.md.
set -e
name=${1:?"which name for the run?"}
export FLOW_GRPO=${FLOW_GRPO:?"a clone of yifan123/flow_grpo"} DIFFUSION_NFT=${DIFFUSION_NFT:?"a clone of NVlabs/DiffusionNFT"}
here=recipes/tables/ocr_drawbench.py
model=${MODEL:-stabilityai/stable-diffusion-3.5-medium}
of_drawbench="clip_score aesthetic pickscore hpsv2"
bash recipes/sd35_medium.sh flow_grpo.py --name "$name" --model "$model" --max_sequence_length 128 \
    --reward ocr_scene_contains --eval_reward $of_drawbench \
    --train_prompts "$FLOW_GRPO/dataset/ocr/train.txt" --eval_prompts $here:texts $here:drawbench "${@:2}"
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} -m tools.bench "$model" \
    --runs "runs/$name" --prompts $here:texts $here:drawbench --reward ocr_scene_contains $of_drawbench \
    --output "runs/bench_$name"
