#!/usr/bin/env bash
# What only a GPU shows, in at most 25 minutes on one of 80 GB: does it learn, does it fit, is it fast. No download, no
# vLLM.
#
#     benchmarks/gpu.sh                      # all parts: embedded sd35-medium flux
#     benchmarks/gpu.sh flux qwen-image      # some of them; qwen-image, of 20 B, is not among "all"
#     TINY=1 benchmarks/gpu.sh               # all parts with tiny models, in minutes on a CPU: tries this script
#
# Everything is written to gpu_results/ (or $RESULTS): report.md, a JSON file of each measurement and a log of each
# command. A command that fails is a line of the report, and the next one is run. $WORK (a temporary folder) takes the
# checkpoints of random weights, up to 45 GB at a time, each removed after its part.
#
# embedded: the embedded task learns, in fp32 and bf16. The others: a model of that size and random weights, 512 x 512
# pixels, LoRA, bf16; memory by tools.plan on $PLAN, then benchmarks/throughput.py as it is and compiled.
set -uo pipefail
cd "$(dirname "$0")/.."
ROOT=$PWD
TINY=${TINY:-}
PLAN=${PLAN:-h100-80}  # the device that is planned for
MINUTES=${MINUTES:-$([ "$TINY" ] && echo 60 || echo 25)}  # a CPU takes its time to compile
RESULTS=$(realpath -m "${RESULTS:-gpu_results}")
WORK=${WORK:-$(mktemp -d)}
REPORT=$RESULTS/report.md
mkdir -p "$RESULTS" "$WORK"
cd "$WORK"
SECONDS=0  # bash counts

MISSING=$(python - <<'PYTHON'
import importlib.util
needed = "torch diffusers transformers peft tyro tqdm matplotlib rapidocr onnxruntime"
print(*[name for name in needed.split() if not importlib.util.find_spec(name)])
PYTHON
)
if [ -n "$MISSING" ]; then
    echo "gpu.sh: pip install -r requirements-core.txt first: not installed: $MISSING" >&2
    exit 1
fi

# the line of a log that says what went wrong: torchrun's own come after it
reason() {
    grep -iE "error|unrecognized" "$RESULTS/$1.log" | grep -vE "elastic|ChildFailed|error_file" | tail -n 1 | cut -c 1-300
}

# try NAME LIMIT COMMAND...: run it for LIMIT seconds at most, and never beyond MINUTES; its output is RESULTS/NAME.log
try() {
    local name=$1 limit=$2 began=$SECONDS status left
    shift 2
    left=$((MINUTES * 60 - SECONDS))
    if [ "$left" -le 10 ]; then
        echo "$name: not run, the $MINUTES minutes are over" | tee -a "$REPORT"
        return 1
    fi
    echo "$name: $*"
    if [ "$TINY" ]; then limit=$((4 * limit)); fi
    timeout --kill-after 10 $((limit < left ? limit : left)) "$@" > "$RESULTS/$name.log" 2>&1
    status=$?
    if [ "$status" -ne 0 ]; then
        echo "$name: failed, status $status (124: time was over) after $((SECONDS - began)) s: $(reason "$name")" |
            tee -a "$REPORT"
        echo >> "$REPORT"
    fi
    return $status
}

embedded() {
    local options=(--rollout local --num_steps 15 --eval_every 5 --max_prompts 128)
    if [ "$TINY" ]; then options=(--rollout local --num_steps 3 --num_prompts 8 --eval_every 3 --max_prompts 32); fi
    printf '\n## The embedded task\n\n' >> "$REPORT"
    for dtype in float32 bfloat16; do
        try "embedded-$dtype" 240 torchrun --standalone "$ROOT/flow_grpo.py" --name "$dtype" --dtype "$dtype" \
            "${options[@]}" && python - "$dtype" >> "$REPORT" <<'PYTHON'
import json, statistics, sys
rows = [json.loads(line) for line in open(f"runs/{sys.argv[1]}/metrics.jsonl")]
rewards = [f"{row['val/ocr/mean']:.3f}" for row in rows if "val/ocr/mean" in row]
seconds = statistics.median(row["timing_s/step"] for row in rows[1:])
print(f"{sys.argv[1]}: reward of held-out prompts {', '.join(rewards)}; {seconds:.2f} s a step, ", end="")
print(f"{rows[-1]['perf/max_memory_gb']:.2f} GB\n")
PYTHON
    done
}

# model NAME HUB_ID OPTIONS...: make it, plan it, measure it
model() {
    local name=$1 hub_id=$2 tiny=()
    shift 2
    local options=(--model "$name" --rollout local --dtype bfloat16 --reward jpeg_incompressibility "$@")
    if [ "$TINY" ]; then
        tiny=(--tiny)
        options+=(--image_size 32 96 --max_sequence_length 160 --num_inference_steps 3 --sde_window_size 1)
        options+=(--num_prompts 1 --group_size 4 --updates_per_rollout 1 --micro_batch_size 2)
    fi
    printf '\n## %s\n\n' "$name" >> "$REPORT"
    if try "$name-make" 300 python "$ROOT/benchmarks/random_model.py" "$hub_id" "$WORK/$name" "${tiny[@]}"; then
        if try "$name-plan" 120 env PYTHONPATH="$ROOT" python -m tools.plan "$PLAN" "$ROOT/flow_grpo.py" "${options[@]}"; then
            { echo '```'; cat "$RESULTS/$name-plan.log"; echo '```'; echo; } >> "$REPORT"
        fi
        for how in eager compile; do
            local more=()
            if [ $how = compile ]; then more=(--train_with compile); fi
            if try "$name-$how" 360 torchrun --standalone "$ROOT/benchmarks/throughput.py" flow_grpo.py \
                --out "$RESULTS/$name-$how.json" --name "$name-$how" "${options[@]}" "${more[@]}"; then
                # the table, which begins with the command
                sed -n '/^    .*throughput.py/,$p' "$RESULTS/$name-$how.log" >> "$REPORT"
                echo >> "$REPORT"
            fi
        done
    fi
    rm -rf "${WORK:?}/$name"
}

sd35-medium() {
    model sd35-medium stabilityai/stable-diffusion-3.5-medium --image_size 512 512 --max_sequence_length 256 \
        --lora_rank 32 --lora_alpha 64 --guidance_scale 4.5 --num_inference_steps 10 --sde_window_size 0 \
        --num_prompts 4 --group_size 8 --updates_per_rollout 2 --micro_batch_size 8 --clip_range 1e-4
}

flux() {
    model flux black-forest-labs/FLUX.1-dev --image_size 512 512 --max_sequence_length 256 --lora_rank 64 \
        --lora_alpha 128 --guidance_scale 3.5 --num_inference_steps 6 --sde_window_size 0 --noise_level 0.9 \
        --num_prompts 2 --group_size 8 --updates_per_rollout 2 --micro_batch_size 4
}

qwen-image() {
    model qwen-image Qwen/Qwen-Image --image_size 512 512 --max_sequence_length 256 --lora_rank 64 --lora_alpha 128 \
        --guidance_scale 4 --num_inference_steps 10 --sde_window_size 2 --sde_window_range 0 5 --noise_level 1.2 \
        --num_prompts 2 --group_size 4 --updates_per_rollout 1 --micro_batch_size 1
}

PARTS=("$@")
if [ $# -eq 0 ]; then PARTS=(embedded sd35-medium flux); fi
{
    echo "# benchmarks/gpu.sh ${PARTS[*]}${TINY:+, tiny sizes}"
    echo
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2> /dev/null || echo "no GPU"
    python -c 'import torch; print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")'
    echo "commit $(git -C "$ROOT" rev-parse --short HEAD)"
} > "$REPORT"
for part in "${PARTS[@]}"; do "$part"; done
printf '\n%s s in all.\n' "$SECONDS" | tee -a "$REPORT"
echo "$REPORT"
