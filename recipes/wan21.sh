#!/bin/bash
# Wan 2.1 1.3B, text to video. Add your own --reward: a function of videos, which are lists of PIL images.
#     bash recipes/wan21.sh flow_grpo.py --name mine --train_prompts train.txt --eval_prompts test.txt
# Options that you add override those in this file. It starts eight ranks unless LAUNCH says otherwise.
# Never run by us on a GPU. The trainer samples; with --rollout vllm added, vLLM-Omni engines do.
# Shared: size, frames, tokens, LoRA, steps, group, learning rate and Adam's epsilon, from Flow-GRPO's code
# (config/grpo.py, general_ocr_wan2_1); 32 prompts are its 16 videos per GPU on eight. Ours: step kind and noise level,
# because its SDE has another noise. Not for dpo_offline.py, whose pairs are images.
script=${1:?"which script, flow_grpo.py for example"}
settings=(
    --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dtype bfloat16 --image_size 240 416 --num_frames 33
    --max_sequence_length 512
    --lora_rank 32 --lora_alpha 64 --learning_rate 1e-4 --adam_eps 1e-8
    --num_inference_steps 20 --eval_num_inference_steps 50
    --num_prompts 32 --group_size 4 --micro_batch_size 1 --train_with compile
)
case ${SETTINGS_OF:-$script} in
    flow_grpo.py)
        # Flow-GRPO's code: all steps except the last are trained. It averages the weights by 0.9 every eighth optimizer
        # step, which is 0.987 per step.
        settings+=(
            --rollout local
            --clip_range 1e-3 --kl_coef 0.004 --scale_rewards group --ema_decay 0.987 --updates_per_rollout 2
            --lr_schedule constant --num_steps 30
            --guidance_scale 4.5 --sde_type dance --noise_level 0.3 --sde_window_size 0
        )
        ;;
    grpo_guard.py)
        # The same with GRPO-Guard's clip range for text in pictures. Ours: the combination, without average.
        settings+=(
            --rollout local
            --clip_range 2e-6 --kl_coef 0.004 --scale_rewards group --updates_per_rollout 2
            --lr_schedule constant --num_steps 30
            --guidance_scale 4.5 --sde_type dance --noise_level 0.3 --sde_window_size 0
        )
        ;;
    mix_grpo.py)
        # Ours: a window of four steps, without average. Its videos of a prompt start from one noise, as DanceGRPO's do.
        settings+=(
            --rollout local
            --clip_range 1e-3 --kl_coef 0.004 --scale_rewards group --updates_per_rollout 2
            --lr_schedule constant --num_steps 30 --iters_per_group 25
            --guidance_scale 4.5 --sde_type dance --noise_level 0.3 --sde_window_size 4 --sde_window_range 0 19
        )
        ;;
    diffusion_nft.py)
        # Ours, except beta, the schedule and one optimizer step per rollout of Flow-Factory's example
        # (examples/nft/lora/wan21).
        settings+=(
            --rollout local
            --nft_beta 0.1 --kl_coef 0 --decay_schedule linear_to_0_5 --scale_rewards group --updates_per_rollout 1
        )
        ;;
    contrib/tempflow_grpo.py)
        # Ours: Flow-GRPO's settings, and one branching step, anywhere but at the last sampling step.
        SETTINGS_OF=flow_grpo.py exec bash "$0" "$script" --sde_window_size 1 --sde_window_range 0 19 "${@:2}"
        ;;
    *)
        parent=$(sed -n '/^Parent: /{s/^Parent: \([^ @]*\).*/\1/p;q;}' "${SETTINGS_OF:-$script}" 2> /dev/null)
        if [ "$parent" ]; then # a fork has the settings of its parent
            SETTINGS_OF=$parent exec bash "$0" "$@"
        fi
        echo "recipes/wan21.sh has no settings for $script" >&2
        exit 2
        ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} "$script" "${settings[@]}" "${@:2}"
