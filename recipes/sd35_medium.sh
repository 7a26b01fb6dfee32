#!/bin/bash
# Stable Diffusion 3.5 medium, text in pictures: each prompt has the text to draw in double quotes.
#     bash recipes/sd35_medium.sh flow_grpo.py --name mine --train_prompts train.txt --eval_prompts test.txt
# Options that you add override those in this file. It starts eight ranks unless LAUNCH says otherwise.
# Never run by us on a GPU. The trainer samples; with --rollout vllm added, vLLM-Omni engines do.
# Shared: size, LoRA, evaluation steps, micro-batch and Adam's epsilon, from Flow-GRPO's code (config/grpo.py,
# general_ocr_sd3).
# Ours: bf16 (there fp16) and 256 tokens per prompt (there 128).
# Without guidance (its geneval_sd3_fast_nocfg), add: --guidance_scale 1 --sde_type cps --noise_level 0.8
# --sde_window_size 3 --sde_window_range 0 5 --clip_range 1e-5 --kl_coef 0
script=${1:?"which script, flow_grpo.py for example"}
settings=(
    --model stabilityai/stable-diffusion-3.5-medium --dtype bfloat16 --image_size 512 512 --max_sequence_length 256
    --lora_rank 32 --lora_alpha 64 --adam_eps 1e-8
    --eval_num_inference_steps 40 --micro_batch_size 9 --train_with compile
    --reward ocr_scene_contains
)
case ${SETTINGS_OF:-$script} in
    flow_grpo.py)
        # Flow-GRPO's code, general_ocr_sd3. It averages the weights by 0.9 every eighth optimizer step, which is 0.987
        # per step.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-4 --kl_coef 0.04 --ema_decay 0.987
            --lr_schedule constant --num_steps 30
            --num_inference_steps 10 --guidance_scale 4.5 --noise_level 0.7 --sde_window_size 0
            --num_prompts 48 --group_size 24 --updates_per_rollout 2
        )
        ;;
    grpo_guard.py)
        # GRPO-Guard's clip range for text in pictures. Ours: Flow-GRPO's learning rate, sampling and images, without KL
        # and average.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 2e-6
            --lr_schedule constant --kl_coef 0 --num_steps 30
            --num_inference_steps 10 --guidance_scale 4.5 --noise_level 0.7 --sde_window_size 0
            --num_prompts 48 --group_size 24 --updates_per_rollout 2
        )
        ;;
    mix_grpo.py)
        # Ours: Flow-GRPO's settings with a window of two steps, without KL and average. MixGRPO's script for FLUX has
        # the same clip range.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-4
            --lr_schedule constant --kl_coef 0 --num_steps 30 --iters_per_group 25
            --num_inference_steps 10 --guidance_scale 4.5 --noise_level 0.7 --sde_window_size 2 --sde_window_range 0 9
            --num_prompts 48 --group_size 24 --updates_per_rollout 2
        )
        ;;
    dpo_offline.py)
        # VeRL-Omni's script for offline DPO: learning rate, guidance, beta. Ours: 28 steps make a pair's images, and 64
        # pairs make a step (there 4).
        settings+=(
            --learning_rate 2e-4 --dpo_beta 100
            --lr_schedule constant --num_steps 40 --num_pair_prompts 512
            --num_inference_steps 28 --guidance_scale 4
            --num_pairs 64
        )
        ;;
    diffusion_nft.py)
        # DiffusionNFT's code (config/nft.py, sd3_ocr). Ours: Euler's steps sample (there dpm2).
        settings+=(
            --rollout local
            --learning_rate 3e-4 --nft_beta 0.1 --kl_coef 1e-4 --decay_schedule delayed_linear_to_0_999 --ema_decay 0.9
            --num_inference_steps 10 --timestep_fraction 0.99
            --num_prompts 48 --group_size 24 --updates_per_rollout 2
        )
        ;;
    contrib/tempflow_grpo.py)
        # Ours: Flow-GRPO's settings, and one branching step, anywhere but at the last sampling step.
        SETTINGS_OF=flow_grpo.py exec bash "$0" "$script" --sde_window_size 1 --sde_window_range 0 9 "${@:2}"
        ;;
    *)
        parent=$(sed -n '/^Parent: /{s/^Parent: \([^ @]*\).*/\1/p;q;}' "${SETTINGS_OF:-$script}" 2> /dev/null)
        if [ "$parent" ]; then # a fork has the settings of its parent
            SETTINGS_OF=$parent exec bash "$0" "$@"
        fi
        echo "recipes/sd35_medium.sh has no settings for $script" >&2
        exit 2
        ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} "$script" "${settings[@]}" "${@:2}"
