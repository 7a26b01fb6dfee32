#!/usr/bin/env bash
# The embedded model learns: the recorded runs of docs/flow_grpo.md and docs/lab/, three seeds each.
#
#     benchmarks/learning_curves.sh                       # all parts: defaults engines factors siblings contrib edits
#     CPUS=0 benchmarks/learning_curves.sh siblings       # one part on one core, beside another with CPUS=1
#     python -m tools.compare docs/lab/records/*-local-seed* --output curves.png   # rewards over seeds, and curves
#
# defaults: the five scripts as they are, six seeds each, and README's first command. All other parts are of EARLIER
# defaults. engines: flow_grpo.py with vLLM-Omni, with the trainer's own sampling, and on two ranks (without CPUS).
# factors: one factor at a time. siblings: the other four scripts. contrib: five scripts of
# contrib/, and the teachers that one of them needs. edits: the embedded model of edits, with and without preservation
# as a reward. Log and options of each run go to docs/lab/records/NAME.
set -euo pipefail
cd "$(dirname "$0")/.."
RECORDS=docs/lab/records
EARLIER="--kl_coef 0 --lr_schedule constant --num_steps 30 --updates_per_rollout 4 --learning_rate 1e-3"
COLOUR=assets/sign_colour.py:sign_colour

run() {  # run NAME RANKS SCRIPT OPTIONS...
    local name=$1 ranks=$2 script=$3
    shift 3
    # $script is a file, or -m and a module of contrib/
    taskset -c "${CPUS:-0,1}" torchrun --standalone --nproc_per_node "$ranks" $script --name "$name" --resume latest "$@"
    mkdir -p "$RECORDS/$name"
    cp "runs/$name/metrics.jsonl" "$RECORDS/$name/"
    sed "s#$PWD/##g" "runs/$name/args.json" > "$RECORDS/$name/args.json"
}

defaults() {
    for script in flow_grpo grpo_guard mix_grpo diffusion_nft dpo_offline; do
        local rollout="--rollout local"
        if [ "$script" = dpo_offline ]; then rollout=""; fi
        for seed in 1 2 3 4 5 6; do
            run "default-$script-seed$seed" 1 "$script.py" --seed "$seed" $rollout --eval_reward "$COLOUR"
        done
        cp "runs/default-$script-seed1/curves.png" "$RECORDS/default-$script-seed1/"  # its page shows it
    done
    run default-flow_grpo 1 flow_grpo.py
    cp runs/default-flow_grpo/{grid_0000,grid_0040}.png "$RECORDS/default-flow_grpo/"
    python -m docs.make_front_page
}

engines() {
    for seed in 1 2 3; do
        run "flow_grpo-vllm-seed$seed" 1 flow_grpo.py $EARLIER --seed "$seed"
        run "flow_grpo-local-seed$seed" 1 flow_grpo.py $EARLIER --seed "$seed" --rollout local --num_steps 40
        run "flow_grpo-2ranks-seed$seed" 2 flow_grpo.py $EARLIER --seed "$seed"
    done
    cp runs/flow_grpo-vllm-seed1/curves.png "$RECORDS/flow_grpo-vllm-seed1/"  # pictures that pages show
    cp runs/flow_grpo-local-seed2/grid_00{00,30}.png "$RECORDS/flow_grpo-local-seed2/"
    cp runs/flow_grpo-local-seed1/grid_0030.png "$RECORDS/flow_grpo-local-seed1/"
}

factors() {
    local four="$EARLIER --rollout local --num_steps 10 --num_inference_steps 4 --eval_num_inference_steps 4"
    run flow_grpo-window-0 1 flow_grpo.py $four --sde_window_range 0 1
    run flow_grpo-window-1 1 flow_grpo.py $four --sde_window_range 1 2
    run flow_grpo-window-2 1 flow_grpo.py $four --sde_window_range 2 3
    run flow_grpo-window-all 1 flow_grpo.py $four --sde_window_size 0
    for seed in 1 2 3; do
        run "flow_grpo-kl04-seed$seed" 1 flow_grpo.py $EARLIER --seed "$seed" --rollout local --kl_coef 0.04
        run "flow_grpo-kl1-seed$seed" 1 flow_grpo.py $EARLIER --seed "$seed" --rollout local --kl_coef 1.0
        run "flow_grpo-dance-seed$seed" 1 flow_grpo.py $EARLIER --seed "$seed" --rollout local --sde_type dance
        run "flow_grpo-cps-seed$seed" 1 flow_grpo.py $EARLIER --seed "$seed" --rollout local --sde_type cps
        run "flow_grpo-both-steps-seed$seed" 1 flow_grpo.py $EARLIER --seed "$seed" --rollout local --sde_window_size 0
    done
}

siblings() {
    for seed in 1 2 3; do
        for script in grpo_guard mix_grpo diffusion_nft dpo_offline; do
            local rollout="$EARLIER --rollout local"
            if [ "$script" = dpo_offline ]; then rollout="--dpo_beta 100 --lr_schedule constant --num_steps 40 --num_pair_prompts 512 --num_pairs 64"; fi
            if [ "$script" = mix_grpo ]; then rollout="$rollout --iters_per_group 25"; fi
            run "$script-local-seed$seed" 1 "$script.py" --seed "$seed" $rollout
        done
    done
    for script in grpo_guard mix_grpo diffusion_nft dpo_offline; do  # the page of each shows one
        cp "runs/$script-local-seed1/curves.png" "$RECORDS/$script-local-seed1/"
    done
}

contrib() {
    for seed in 1 2 3; do
        run "crd-local-seed$seed" 1 "-m contrib.crd" --seed "$seed" --rollout local --eval_reward "$COLOUR"
        run "ram-local-seed$seed" 1 "-m contrib.ram" --seed "$seed" --rollout local --eval_reward "$COLOUR"
        run "tempflow_grpo-local-seed$seed" 1 "-m contrib.tempflow_grpo" --seed "$seed" --rollout local \
            --eval_reward "$COLOUR"
        run "v_grpo-local-seed$seed" 1 "-m contrib.v_grpo" --seed "$seed" --rollout local --eval_reward "$COLOUR"
    done
    for rate in 1e-3 3e-3; do  # V-GRPO's search
        for clip in 1e-2 1e-1; do
            run "v_grpo-rate$rate-clip$clip-seed100" 1 "-m contrib.v_grpo" --seed 100 --rollout local --num_steps 10 \
                --learning_rate "$rate" --clip_range "$clip"
        done
    done
    for eta in 50 10 3 1; do  # RAM's search: `old` hardly lags
        run "ram-eta$eta-seed100" 1 "-m contrib.ram" --seed 100 --rollout local --eval_reward "$COLOUR" \
            --num_steps 10 --reward_multiplier "$eta" --decay_schedule linear_to_0_5
    done
    # two teachers, of a seed that no student has, and a student of both
    run teacher-ocr 1 flow_grpo.py $EARLIER --seed 4 --rollout local --eval_reward "$COLOUR"
    run teacher-colour 1 flow_grpo.py $EARLIER --seed 4 --rollout local --reward "$COLOUR" --eval_reward ocr
    for seed in 1 2 3; do
        run "diffusion_opd-local-seed$seed" 1 "-m contrib.diffusion_opd" --seed "$seed" --rollout local \
            --teachers ocr=runs/teacher-ocr/adapter colour=runs/teacher-colour/adapter --reward ocr "$COLOUR" --reward_weights 1 1
    done
}

edits() {
    local task="--model assets/embedded_edit --train_prompts assets/edit_train.jsonl --eval_prompts assets/edit_eval.jsonl"
    local options="$EARLIER --rollout local --num_steps 36 --eval_every 12 --ema_decay 0.95"
    for seed in 1 2 3; do
        run "edit-ocr-seed$seed" 1 flow_grpo.py $task $options --seed "$seed" --eval_reward "$COLOUR"
        run "edit-both-seed$seed" 1 flow_grpo.py $task $options --seed "$seed" --eval_reward "$COLOUR" \
            --reward ocr preservation --reward_weights 1 4
    done
}

PARTS=("$@")
if [ $# -eq 0 ]; then PARTS=(defaults engines factors siblings contrib edits); fi
for part in "${PARTS[@]}"; do "$part"; done
