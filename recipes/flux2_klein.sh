#!/bin/bash
# FLUX.2-klein base 4B. Add your own --reward.
#     bash recipes/flux2_klein.sh flow_grpo.py --name mine --train_prompts train.txt --eval_prompts test.txt
# Options that you add override those in this file. It starts eight ranks unless LAUNCH says otherwise.
# Never run by us on a GPU. The trainer samples; with --rollout vllm added, vLLM-Omni engines do.
# Shared: size, tokens, the LoRA's rank, evaluation steps and Adam's epsilon, from Flow-Factory's examples for klein
# base (examples/grpo and nft, lora/flux2_klein_base; the GRPO example is set to the 9B model). Ours: a LoRA of the
# attention alone (there also of the feed-forward layers), micro-batch, and evaluations at the size of training (there
# 1024 x 1024).
script=${1:?"which script, flow_grpo.py for example"}
settings=(
    --model black-forest-labs/FLUX.2-klein-base-4B --dtype bfloat16 --image_size 384 384 --max_sequence_length 512
    --lora_rank 64 --lora_alpha 128 --adam_eps 1e-8
    --eval_num_inference_steps 28 --micro_batch_size 4 --train_with compile
)
case ${SETTINGS_OF:-$script} in
    flow_grpo.py)
        # Flow-Factory's example for GRPO. It averages the weights by 0.9 every eighth optimizer step, which is 0.987
        # per step.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-4 --scale_rewards group --ema_decay 0.987
            --lr_schedule constant --kl_coef 0 --num_steps 30
            --num_inference_steps 8 --guidance_scale 4 --noise_level 0.7 --sde_window_size 1 --sde_window_range 1 4
            --num_prompts 48 --group_size 16 --updates_per_rollout 2
        )
        ;;
    grpo_guard.py)
        # The same with GRPO-Guard's clip range for text in pictures. Ours: the combination, without average.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 2e-6 --scale_rewards group
            --lr_schedule constant --kl_coef 0 --num_steps 30
            --num_inference_steps 8 --guidance_scale 4 --noise_level 0.7 --sde_window_size 1 --sde_window_range 1 4
            --num_prompts 48 --group_size 16 --updates_per_rollout 2
        )
        ;;
    mix_grpo.py)
        # The same with a window that moves. Ours: the combination, without average; the images of a prompt start from
        # one noise.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-4 --scale_rewards group
            --lr_schedule constant --kl_coef 0 --num_steps 30 --iters_per_group 25
            --num_inference_steps 8 --guidance_scale 4 --noise_level 0.7 --sde_window_size 1 --sde_window_range 1 4
            --num_prompts 48 --group_size 16 --updates_per_rollout 2
        )
        ;;
    dpo_offline.py)
        # Ours, except the learning rate and beta of VeRL-Omni's script for SD3.5-medium.
        settings+=(
            --learning_rate 2e-4 --dpo_beta 100
            --lr_schedule constant --num_steps 40 --num_pair_prompts 512 --num_pairs 64
            --num_inference_steps 28 --guidance_scale 4
        )
        ;;
    diffusion_nft.py)
        # Flow-Factory's example for DiffusionNFT. Ours: no guidance (there 4), and every timestep is trained (there two
        # of the first half).
        settings+=(
            --rollout local
            --learning_rate 1e-4 --nft_beta 0.1 --kl_coef 0 --decay_schedule linear_to_0_5 --scale_rewards group
            --num_inference_steps 8
            --num_prompts 48 --group_size 16 --updates_per_rollout 1
        )
        ;;
    *)
        parent=$(sed -n '/^Parent: /{s/^Parent: \([^ @]*\).*/\1/p;q;}' "${SETTINGS_OF:-$script}" 2> /dev/null)
        if [ "$parent" ]; then # a fork has the settings of its parent
            SETTINGS_OF=$parent exec bash "$0" "$@"
        fi
        echo "recipes/flux2_klein.sh has no settings for $script" >&2
        exit 2
        ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} "$script" "${settings[@]}" "${@:2}"
