# What the programs call1.sh to call5.sh share; they source it. It sets ROOT, the checkout, and
# begins to work in a folder of its own, WORK, which is removed at the end. What comes back is in $OUT, by default
# gpu_results/ of the folder where the program was started: NAME.md, the report, and NAME.tar.gz, with every part's log;
# of a second start NAME_2.md and NAME_2.tar.gz. The functions below take a part's name first: `plan plan sd35m ...` is
# part "plan".
#
#     PARTS="peers eager" bash benchmarks/gpu/call2.sh      # some parts alone
#     TINY=1 bash benchmarks/gpu/call2.sh                   # tiny models: tries the program on a CPU
#
# Where carry.sh prepared the checkout, the packages that it packed are unpacked and added to PYTHONPATH.
CALL=$(basename "$0" .sh)
SECONDS=0  # bash counts
TINY=${TINY:-}
if [ "$TINY" ]; then ENDS=${ENDS:-3000}; else ENDS=${ENDS:-$LIMIT}; fi
OUT=$(realpath -m "${OUT:-gpu_results}")
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
LOGS=$WORK/logs
NAME=$CALL
for ((number = 2; ; number++)); do
    [ -e "$OUT/$NAME.md" ] || break
    NAME=${CALL}_$number
done
REPORT=$OUT/$NAME.md
mkdir -p "$OUT" "$LOGS"
PATH=$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH  # python and torchrun may not be on it
export PATH PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1  # nothing is downloaded
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo  # the machine may have no other, nor a name for itself
export SIZED_FOLDER=$WORK/sized
if [ -f "$ROOT/.gpu/site.tar.xz" ]; then
    SITE=${TMPDIR:-/tmp}/cleanflow_site_$(cksum < "$ROOT/.gpu/site.tar.xz" | cut -d ' ' -f 1)
    if [ ! -f "$SITE/unpacked" ]; then
        python3 - "$ROOT/.gpu/site.tar.xz" "$SITE" <<'PYTHON' || exit 1
import sys, tarfile
from pathlib import Path
tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")
Path(sys.argv[2], "unpacked").touch()
PYTHON
    fi
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$SITE
fi
KIT=$ROOT/benchmarks/gpu

# Lines for the report, on stdin, without the folders of this machine: the last name of an absolute path stays
report() { sed -E 's#(^|[^A-Za-z0-9._/-])(/[A-Za-z0-9._+-]+)+/#\1#g' | tee -a "$REPORT"; }
say() { echo "$*" | report; }
fenced() { { echo; echo '```'; cat; echo '```'; echo; } | report; }

# Whether part NAME is among $PARTS, which is all where it is not set; `end` names words that were none
wanted() {
    echo "$1" >> "$WORK/parts"
    [ -z "${PARTS:-}" ] || [[ " $PARTS " == *" $1 "* ]]
}

# The line of a log that says what went wrong: torchrun's own come after it
reason() { grep -E 'Error|error:' "$LOGS/$1.log" | grep -vE 'elastic|ChildFailed|error_file' | tail -n 1 | cut -c 1-300; }

# Pack the logs: after every part, as a program that is cut short must leave them. Parts may end side by side
pack() {
    tar czf "$WORK/$BASHPID.gz" --warning=no-file-changed -C "$WORK" "$@" 2> /dev/null
    [ $? -le 1 ] && mv "$WORK/$BASHPID.gz" "$OUT/$NAME.tar.gz" # 1: another part's log grew meanwhile
}

# try NAME LIMIT COMMAND...: at most LIMIT seconds, never beyond ENDS; output in logs/NAME.log, a line in the report
try() {
    local name=$1 limit=$2 began=$SECONDS left=$((ENDS - SECONDS)) status took
    shift 2
    wanted "$name" || return 1
    if [ "$TINY" ]; then limit=$ENDS; fi  # of a GPU
    if [ "$left" -lt 15 ]; then
        say "- $name: not run, no time left"
        return 1
    fi
    limit=$((limit < left ? limit : left))
    # not asked to stop: a run would finish its step and save, on the GPU that the next part measures
    timeout --signal KILL $limit "$@" > "$LOGS/$name.log" 2>&1
    status=$?
    took=$((SECONDS - began))
    if [ $status -eq 0 ]; then
        say "- $name: $took s"
    elif [ $status -eq 137 ] && [ $took -ge $limit ]; then
        say "- $name: FAILED, its time was over after $took s"
    elif [ $status -eq 137 ] || grep -q 'Signal 9 (SIGKILL)' "$LOGS/$name.log"; then  # torchrun says so of a rank
        say "- $name: FAILED, killed after $took s, within its time: no memory was left, as it seems"
    else
        say "- $name: FAILED, status $status after $took s: $(reason "$name")"
    fi
    pack logs
    return $status
}

# sized NAME MODEL LIMIT PROGRAM...: a part that runs a program with a model of a published size
sized() {
    local name=$1 model=$2 limit=$3
    shift 3
    try "$name" "$limit" torchrun --standalone "$KIT/sized.py" "${TINY:+tiny-}$model" "$@"
}

# throughput NAME MODEL LIMIT OPTIONS...: seconds, memory and FLOPs of flow_grpo.py's step, whose table it reports
throughput() {
    local name=$1 model=$2 limit=$3
    shift 3
    sized "$name" "$model" "$limit" benchmarks/throughput.py flow_grpo.py --name "$name" "$@" &&
        { echo; sed -n '/^    .*throughput.py/,$p' "$LOGS/$name.log"; echo; } | report
}

# plan NAME MODEL OPTIONS...: what tools.plan says of the same options. It needs no GPU, and runs beside other parts
plan() {
    local name=$1 model=$2
    shift 2
    CUDA_VISIBLE_DEVICES='' try "$name" 150 python "$KIT/sized.py" "${TINY:+tiny-}$model" tools.plan \
        "${PLAN:-h100-80}" "$ROOT/flow_grpo.py" "$@" && grep -v 'it/s\]' "$LOGS/$name.log" | fenced  # no progress bars
}

# peers NAME MODEL LIMIT OPTIONS...: what others do with the same weights
peers() {
    local name=$1 model=$2 limit=$3
    shift 3
    try "$name" "$limit" python "$KIT/peers.py" "${TINY:+tiny-}$model" "$@"
    if [ -f "$LOGS/$name.log" ]; then grep '^{' "$LOGS/$name.log" | fenced; fi
}

begin() {
    cd "$WORK" || exit 1
    : > "$REPORT"
    {
        echo "# $1"
        echo
        echo "    ${TINY:+TINY=1 }${PARTS:+PARTS=\"$PARTS\" }bash benchmarks/gpu/$CALL.sh"
        echo
        nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm,power.limit --format=csv,noheader \
            2> /dev/null || echo "no GPU"
        python3 - <<'PYTHON' 2>&1
import importlib.metadata, importlib.util, sys
import torch
told = ["Python " + sys.version.split()[0], f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
told.append(f"cuDNN {torch.backends.cudnn.version()}")
for name in ("transformers", "diffusers", "peft", "numpy", "rapidocr", "vllm-omni"):
    try:
        told.append(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        told.append(f"{name} not installed")
print(", ".join(told))
PYTHON
        local commit disk
        commit=$(git -C "$ROOT" describe --always --dirty --exclude '*' 2> /dev/null ||
            cat "$ROOT/.gpu/COMMIT" 2> /dev/null || echo unknown)
        disk=$(df -h "$WORK" | awk 'NR == 2 {print $4}')
        echo "commit $commit, $(getconf _NPROCESSORS_ONLN) cores, $(free -g | awk '/Mem/ {print $2}') GiB, $disk of disk"
        echo
    } | report
}

end() {
    for word in ${PARTS:-}; do
        grep -qx "$word" "$WORK/parts" || say "- $word: not reached, or no part of this program"
    done
    say
    say "$SECONDS s in all."
    echo "$REPORT"
}
