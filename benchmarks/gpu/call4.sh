#!/usr/bin/env bash
# The fourth program, planned for 20 minutes in two or three starts and never run on a GPU: from random weights to RL on
# scenes, and what they score by GenEval's rules. A start goes on where the last one ended: what it made lies in
# $FOLDER. See README.md.
#
# Its parts: draw, sft, rl, bench, report. They need assets/embedded_scenes (python -m assets.make_embedded_scenes).
LIMIT=585
ROOT=$(cd "$(dirname "$0")/.." && pwd)
[ -f "$ROOT/flow_grpo.py" ] || ROOT=$(dirname "$ROOT")
. "$ROOT/benchmarks/gpu/env.sh"
begin "Fourth call: from nothing"
SIZE=gpu
if [ "$TINY" ]; then SIZE=tiny; fi
FOLDER=${FOLDER:-$ROOT/runs/from_nothing_$SIZE} # git ignores it

# part NAME LIMIT: at most LIMIT seconds of the part; the next start goes on with it
part() {
    try "$1" "$2" env PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
        python -m benchmarks.from_nothing "$FOLDER" --size $SIZE --parts "$1"
}

part draw 120
part sft 570
part rl 560
part bench 180
part report 60
for file in README.md report.html seconds.json; do
    if [ -f "$FOLDER/$file" ]; then cp "$FOLDER/$file" "$OUT/${NAME}_$file"; fi
done
if [ -f "$FOLDER/bench/table.md" ]; then { echo; cat "$FOLDER/bench/table.md"; echo; } | report; fi
end
