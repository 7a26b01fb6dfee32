#!/bin/bash
# Qwen-Image, text in pictures: each prompt has the text to draw in double quotes.
#     bash recipes/qwen_image.sh flow_grpo.py --name mine --train_prompts train.txt --eval_prompts test.txt
# Options that you add override those in this file. It starts eight ranks unless LAUNCH says otherwise.
# Never run by us on a GPU. The trainer samples; with --rollout vllm added, vLLM-Omni engines do.
# Shared: size, the LoRA's rank, evaluation steps and Adam's epsilon, from VeRL-Omni's scripts and Flow-GRPO's code
# (config/grpo.py, pickscore_qwenimage, which has the micro-batch). Ours: a LoRA of the attention alone (VeRL-Omni's is
# also of the MLPs), and activation checkpointing: by tools.plan each of eight 80 GB GPUs then needs 61 GB for
# flow_grpo.py, and 65 GB with engines.
script=${1:?"which script, flow_grpo.py for example"}
settings=(
    --model Qwen/Qwen-Image --dtype bfloat16 --image_size 512 512 --max_sequence_length 256
    --lora_rank 64 --lora_alpha 128 --adam_eps 1e-8
    --eval_num_inference_steps 50 --micro_batch_size 4 --train_with activation_checkpointing compile
    --reward ocr_scene_contains
)
case ${SETTINGS_OF:-$script} in
    flow_grpo.py)
        # VeRL-Omni's script for text in pictures. Flow-GRPO's code has the same, for PickScore, with a clip range of
        # 1e-4.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-5
            --lr_schedule constant --kl_coef 0 --num_steps 30
            --num_inference_steps 10 --guidance_scale 4 --noise_level 1.2 --sde_window_size 2 --sde_window_range 0 5
            --num_prompts 32 --group_size 16 --updates_per_rollout 2
        )
        ;;
    grpo_guard.py)
        # VeRL-Omni's script for GRPO-Guard.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 2e-6
            --lr_schedule constant --kl_coef 0 --num_steps 30
            --num_inference_steps 10 --guidance_scale 4 --noise_level 1.2 --sde_window_size 2 --sde_window_range 0 5
            --num_prompts 32 --group_size 16 --updates_per_rollout 2
        )
        ;;
    mix_grpo.py)
        # VeRL-Omni's script for MixGRPO; the clip range is VeRL-Omni's default. Ours: the images of a prompt start from
        # one noise.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-4 --window_mode random
            --lr_schedule constant --kl_coef 0 --num_steps 30 --iters_per_group 25
            --num_inference_steps 10 --guidance_scale 4 --noise_level 1.2 --sde_window_size 2 --sde_window_range 0 5
            --num_prompts 32 --group_size 16 --updates_per_rollout 2
        )
        ;;
    dpo_offline.py)
        # Ours, except the learning rate and beta of VeRL-Omni's script for SD3.5-medium.
        settings+=(
            --learning_rate 2e-4 --dpo_beta 100
            --lr_schedule constant --num_steps 40 --num_pair_prompts 512 --num_pairs 64
            --num_inference_steps 50 --guidance_scale 4
        )
        ;;
    diffusion_nft.py)
        # VeRL-Omni's script for DiffusionNFT, which evaluates with 40 steps. `old` follows at every second rollout, as
        # there; its schedule counts optimizer steps here, and rollouts there.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --nft_beta 0.1 --kl_coef 1e-4
            --decay_schedule delayed_linear_to_0_999 --update_interval 2
            --num_inference_steps 10
            --num_prompts 24 --group_size 16 --updates_per_rollout 2
        )
        ;;
    contrib/tempflow_grpo.py)
        # Ours: Flow-GRPO's settings, and one branching step, within Flow-GRPO's range.
        SETTINGS_OF=flow_grpo.py exec bash "$0" "$script" --sde_window_size 1 "${@:2}"
        ;;
    *)
        parent=$(sed -n '/^Parent: /{s/^Parent: \([^ @]*\).*/\1/p;q;}' "${SETTINGS_OF:-$script}" 2> /dev/null)
        if [ "$parent" ]; then # a fork has the settings of its parent
            SETTINGS_OF=$parent exec bash "$0" "$@"
        fi
        echo "recipes/qwen_image.sh has no settings for $script" >&2
        exit 2
        ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} "$script" "${settings[@]}" "${@:2}"
