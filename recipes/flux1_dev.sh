#!/bin/bash
# FLUX.1-dev. Add your own --reward.
#     bash recipes/flux1_dev.sh flow_grpo.py --name mine --train_prompts train.txt --eval_prompts test.txt
# Options that you add override those in this file. It starts eight ranks unless LAUNCH says otherwise.
# Never run by us on a GPU. The trainer samples; with --rollout vllm added, vLLM-Omni engines do.
# Shared: size, the LoRA's rank, evaluation steps, micro-batch and Adam's epsilon, from Flow-GRPO's code
# (config/grpo.py, pickscore_flux). Ours: a LoRA of the attention alone (there also of the feed-forward layers), and 256
# tokens per prompt (there 128).
# Not for diffusion_nft.py: the model takes guidance as an input, and that script would train it at 1.
script=${1:?"which script, flow_grpo.py for example"}
settings=(
    --model black-forest-labs/FLUX.1-dev --dtype bfloat16 --image_size 512 512 --max_sequence_length 256
    --lora_rank 64 --lora_alpha 128 --adam_eps 1e-8
    --eval_num_inference_steps 28 --micro_batch_size 3 --train_with compile
)
case ${SETTINGS_OF:-$script} in
    flow_grpo.py)
        # Flow-GRPO's code, pickscore_flux. It averages the weights by 0.9 every eighth optimizer step, which is 0.987
        # per step.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-4 --ema_decay 0.987
            --lr_schedule constant --kl_coef 0 --num_steps 30
            --num_inference_steps 6 --guidance_scale 3.5 --noise_level 0.9 --sde_window_size 0
            --num_prompts 48 --group_size 24 --updates_per_rollout 2
        )
        ;;
    grpo_guard.py)
        # GRPO-Guard's clip range for text in pictures; it gives 4e-6 for PickScore. Ours: Flow-GRPO's learning rate,
        # sampling and images, without average.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 2e-6
            --lr_schedule constant --kl_coef 0 --num_steps 30
            --num_inference_steps 6 --guidance_scale 3.5 --noise_level 0.9 --sde_window_size 0
            --num_prompts 48 --group_size 24 --updates_per_rollout 2
        )
        ;;
    mix_grpo.py)
        # Flow-Factory's example for GRPO: one trained step, drawn from the second to the fourth, 48 x 16 images, clip
        # range (which MixGRPO's script for FLUX has as well). Its average is by 0.9 every eighth optimizer step. Ours:
        # the window moves as MixGRPO's does (there it jumps), and the images of a prompt start from one noise.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-4 --scale_rewards group --ema_decay 0.987
            --lr_schedule constant --kl_coef 0 --num_steps 30 --iters_per_group 25
            --num_inference_steps 10 --guidance_scale 3.5 --noise_level 0.7 --sde_window_size 1 --sde_window_range 1 4
            --num_prompts 48 --group_size 16 --updates_per_rollout 2
        )
        ;;
    dpo_offline.py)
        # Ours, except the learning rate and beta of VeRL-Omni's script for SD3.5-medium.
        settings+=(
            --learning_rate 2e-4 --dpo_beta 100
            --lr_schedule constant --num_steps 40 --num_pair_prompts 512 --num_pairs 64
            --num_inference_steps 28 --guidance_scale 3.5
            --micro_batch_size 4
        )
        ;;
    contrib/tempflow_grpo.py)
        # Ours: Flow-GRPO's settings, and one branching step, anywhere but at the last sampling step.
        SETTINGS_OF=flow_grpo.py exec bash "$0" "$script" --sde_window_size 1 --sde_window_range 0 5 "${@:2}"
        ;;
    *)
        parent=$(sed -n '/^Parent: /{s/^Parent: \([^ @]*\).*/\1/p;q;}' "${SETTINGS_OF:-$script}" 2> /dev/null)
        if [ "$parent" ]; then # a fork has the settings of its parent
            SETTINGS_OF=$parent exec bash "$0" "$@"
        fi
        echo "recipes/flux1_dev.sh has no settings for $script" >&2
        exit 2
        ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} "$script" "${settings[@]}" "${@:2}"
