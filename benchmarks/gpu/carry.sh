#!/usr/bin/env bash
# Prepare a checkout for a GPU machine without a network: pack what such a machine lacks, as small as it gets.
#
#     bash benchmarks/gpu/carry.sh        # in the root of a checkout, on a machine with pip; a minute, no GPU
#     pytest tests/by_hand/test_gpu_calls.py    # before: do the programs still run? minutes on a CPU
#
# It makes .gpu/, which git ignores: site.tar.xz (diffusers, tyro and what they import) and COMMIT.
# Send the checkout with it. torch, transformers, peft and accelerate must be on the GPU machine, for Python
# $PYTHON_VERSION, by default 3.12. rapidocr is not among them, so that no reward reads text. The whole must not be
# larger than $MOST_MIB, by default 64.
set -euo pipefail
[ -f flow_grpo.py ] || { echo "carry.sh: error: run it in the root of a checkout" >&2; exit 1; }
mkdir -p .gpu
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
pinned() { sed -n "s/^$1==/$1==/p" requirements-core.txt; }
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$WORK/wheels" \
    "$(pinned diffusers)" "$(pinned tyro)" docstring-parser typeguard importlib-metadata
python3 - "$WORK/wheels" .gpu/site.tar.xz <<'PYTHON'
import io, re, sys, tarfile, zipfile
from pathlib import Path

LEFT_OUT = re.compile(r".*/RECORD$")


def add(tar, name, data):
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = 0o644
    tar.addfile(entry, io.BytesIO(data))


with tarfile.open(sys.argv[2], "w:xz", preset=9) as tar:
    for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith("/") or LEFT_OUT.match(name):
                    continue
                add(tar, name, archive.read(name))
PYTHON
git describe --always --dirty --exclude '*' > .gpu/COMMIT
tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -cb --apparent-size | tail -n 1 | cut -f 1)
packed=$(du -sb --apparent-size .gpu | cut -f 1)
awk -v tree="$tree" -v packed="$packed" -v most="${MOST_MIB:-64}" 'BEGIN {
    printf "checkout %.1f MiB + .gpu %.1f MiB = %.1f of %d MiB\n", tree / 2^20, packed / 2^20, (tree + packed) / 2^20, most
    exit tree + packed > most * 2^20 }' ||
    { echo "carry.sh: error: too large: remove files, or let git ignore them" >&2; exit 1; }
cat <<'TEXT'
Send the checkout with .gpu/ to the GPU machine. There, in its root, one after the other:
    bash benchmarks/gpu/call1.sh    does it run, and learn (7 minutes)
    bash benchmarks/gpu/call2.sh    the size of SD3.5-medium: time, memory, peers (9 minutes)
    bash benchmarks/gpu/call3.sh    the sizes of FLUX.1-dev and Qwen-Image (9 minutes)
    bash benchmarks/gpu/call5.sh    kernels of attention, and the engine if it is there (4 to 15 minutes)
TEXT
