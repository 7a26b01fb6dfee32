#!/bin/bash
# FLUX.1 Kontext. Each record names the picture that is edited. Add your own --reward.
#     bash recipes/flux1_kontext.sh flow_grpo.py --name mine --train_prompts train.jsonl --eval_prompts test.jsonl
# Options that you add override those in this file. It starts eight ranks unless LAUNCH says otherwise.
# Never run by us on a GPU. The trainer samples; with --rollout vllm added, vLLM-Omni engines do.
# Shared: size of image and picture, the LoRA's rank, guidance, micro-batch and Adam's epsilon, from Flow-Factory's
# example (examples/grpo/lora/flux1_kontext). Ours: a LoRA of the attention alone (there also of the feed-forward
# layers), 256 tokens per prompt, and evaluations of 28 steps at the size of training (there 20, at 512 x 512).
# Not for diffusion_nft.py: the model takes guidance as an input, and that script would train it at 1.
script=${1:?"which script, flow_grpo.py for example"}
settings=(
    --model black-forest-labs/FLUX.1-Kontext-dev --dtype bfloat16 --image_size 384 384 --max_sequence_length 256
    --lora_rank 64 --lora_alpha 128 --adam_eps 1e-8
    --num_inference_steps 10 --eval_num_inference_steps 28 --guidance_scale 2.5 --micro_batch_size 1 --train_with compile
)
case ${SETTINGS_OF:-$script} in
    flow_grpo.py)
        # The example: one trained step, drawn from the second to the fourth, 48 x 16 images, two optimizer steps per
        # rollout, the average by 0.9 every eighth optimizer step, which is 0.987 per step.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-4 --scale_rewards group --ema_decay 0.987
            --lr_schedule constant --kl_coef 0 --num_steps 30
            --noise_level 0.9 --sde_window_size 1 --sde_window_range 1 4
            --num_prompts 48 --group_size 16 --updates_per_rollout 2
        )
        ;;
    grpo_guard.py)
        # GRPO-Guard's clip range for text in pictures. Ours: the example's other settings with it, without average.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 2e-6 --scale_rewards group
            --lr_schedule constant --kl_coef 0 --num_steps 30
            --noise_level 0.9 --sde_window_size 1 --sde_window_range 1 4
            --num_prompts 48 --group_size 16 --updates_per_rollout 2
        )
        ;;
    mix_grpo.py)
        # The example's. Ours: the window moves as MixGRPO's does (there it jumps), and the images of a prompt start
        # from one noise.
        settings+=(
            --rollout local
            --learning_rate 3e-4 --clip_range 1e-4 --scale_rewards group --ema_decay 0.987
            --lr_schedule constant --kl_coef 0 --num_steps 30 --iters_per_group 25
            --noise_level 0.9 --sde_window_size 1 --sde_window_range 1 4
            --num_prompts 48 --group_size 16 --updates_per_rollout 2
        )
        ;;
    *)
        parent=$(sed -n '/^Parent: /{s/^Parent: \([^ @]*\).*/\1/p;q;}' "${SETTINGS_OF:-$script}" 2> /dev/null)
        if [ "$parent" ]; then # a fork has the settings of its parent
            SETTINGS_OF=$parent exec bash "$0" "$@"
        fi
        echo "recipes/flux1_kontext.sh has no settings for $script" >&2
        exit 2
        ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200 --nproc_per_node 8} "$script" "${settings[@]}" "${@:2}"
