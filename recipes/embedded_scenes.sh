#!/bin/bash
# The embedded model of scenes on a CPU: draw the objects, numbers, colours and places that GenEval's prompts ask for.
#     bash recipes/embedded_scenes.sh                          # flow_grpo.py; what you add overrides what is here
#     bash recipes/embedded_scenes.sh mix_grpo.py --seed 2     # another script with these options
# Seven minutes on two cores. The reward is the fraction that is right by GenEval's rules, the detector NanoDet;
# evaluations have the rules themselves (docs/lab/scenes.md). Images have three sampling steps, as by default.
script=flow_grpo.py
if [[ ${1:-} == *.py ]]; then
    script=$1
    shift
fi
export GENEVAL_DETECTOR=assets/nanodet
${LAUNCH:-torchrun --standalone} "$script" --name scenes --rollout local \
    --model assets/embedded_scenes --image_size 128 128 --max_sequence_length 16 \
    --num_steps 40 --eval_every 10 \
    --train_prompts assets/scenes_train.jsonl --eval_prompts assets/scenes_eval.jsonl --max_prompts 96 \
    --reward geneval.soft --eval_reward geneval --num_prompts 16 --group_size 8 \
    "$@"
