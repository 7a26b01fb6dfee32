#!/bin/bash
# The embedded model of scenes on a CPU: draw the objects, numbers, colours and places that GenEval's prompts ask for.
#     bash recipes/embedded_scenes.sh                          # flow_grpo.py; what you add overrides what is here
#     bash recipes/embedded_scenes.sh mix_grpo.py --seed 2     # another script with these options
# The reward is the fraction that is right by GenEval's rules, the detector NanoDet; evaluations have the rules
# themselves (docs/lab/scenes.md). Images have three sampling steps, as by default. The LoRA is of the layers that see
# the prompt, where a rollout's gradient is signal.
script=flow_grpo.py
if [[ ${1:-} == *.py ]]; then
    script=$1
    shift
fi
refuse() {
    echo "recipes/embedded_scenes.sh has no settings for $script" >&2
    exit 2
}
case ${SETTINGS_OF:-$script} in
    flow_grpo.py | grpo_guard.py | mix_grpo.py) set -- --kl_coef 0.005 "$@" ;; # whose KL is on the same scale
    dpo_offline.py | contrib/sft.py) refuse ;; # they sample nothing to train on
    contrib/draft.py | contrib/dmd2.py | contrib/tdm_r1.py) refuse ;; # they have no --rollout
    diffusion_nft.py | contrib/*.py) ;;                                        # others keep their own KL
    *)
        parent=$(sed -n '/^Parent: /{s/^Parent: \([^ @]*\).*/\1/p;q;}' "${SETTINGS_OF:-$script}" 2> /dev/null)
        if [ "$parent" ]; then # a fork has the settings of its parent
            SETTINGS_OF=$parent exec bash "$0" "$script" "$@"
        fi
        refuse
        ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export GENEVAL_DETECTOR=assets/nanodet
if grep -qs amx_bf16 /proc/cpuinfo; then # these cores compute in bf16 three times as fast
    export GENEVAL_DTYPE=${GENEVAL_DTYPE:-bfloat16}
    set -- --vae_dtype bfloat16 "$@"
fi
exec ${LAUNCH:-torchrun --standalone --shutdown_timeout 7200} "$script" --name scenes --rollout local \
    --model assets/embedded_scenes --image_size 128 128 --max_sequence_length 16 \
    --lora_target_modules linear_1 linear_2 context_embedder norm1_context.linear \
    add_q_proj add_k_proj add_v_proj to_add_out \
    --num_steps 40 --eval_every 10 --ema_decay 0.9 \
    --train_prompts assets/scenes_train.jsonl --eval_prompts assets/scenes_eval.jsonl --max_prompts 96 \
    --reward geneval.soft --eval_reward geneval --num_prompts 16 --group_size 8 \
    "$@"
