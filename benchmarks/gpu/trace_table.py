"""Where a traced pass spends its time: kernels by kind, and how long the GPU waits for the host.

    python benchmarks/gpu/trace_table.py runs/NAME/trace_0003.json        # of a run with --profile_steps 3

Of the two passes that a trace holds. Between the first kernel's begin and the last one's end the GPU also waits for the
profiler, which slows the host: to see how idle it is otherwise, take these passes' seconds of a run without a trace.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

KINDS = (  # the first word that a kernel's name holds decides
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("matrix products", ("gemm", "cutlass", "nvjet", "sm90_xmma", "ampere_", "cublas", "mm_")),
    ("copies and casts", ("memcpy", "memset", "copy", "cast", "catarray", "fill")),
    ("reductions and norms", ("reduce", "norm", "softmax", "mean")),
    ("AdamW and lists of tensors", ("multi_tensor", "foreach", "adam")),
    ("pointwise", ("elementwise", "vectorized", "pointwise", "triton_poi")),
    ("compiled (Triton)", ("triton",)),
)
NUM_NAMES = 25  # kernels that are shown by name
LONGEST_NAME = 110


def kind_of(name):
    """The kind of a kernel, by its name."""
    name = re.sub("nocast|(load|store)with(out)?cast", "", name.lower())  # torch's pointwise kernels, of any operator
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "others")


def busy_us(kernels):
    """Microseconds in which at least one kernel runs, and those between the first begin and the last end."""
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    busy = 0.0
    reached = spans[0][0]
    for began, ended in spans:
        busy += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return busy, reached - spans[0][0]


def as_table(events):
    """The lines of Markdown for a trace's events."""
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        raise ValueError("no kernel in it: this is no trace of a GPU")
    by_kind, calls_by_kind, by_name, calls_by_name = Counter(), Counter(), Counter(), Counter()
    for event in kernels:
        kind = kind_of(event["name"])
        name = event["name"][:LONGEST_NAME]
        by_kind[kind] += event["dur"]
        calls_by_kind[kind] += 1
        by_name[name] += event["dur"]
        calls_by_name[name] += 1
    busy, whole = busy_us(kernels)
    on_host = [event["name"] for event in events if event.get("cat") == "cuda_runtime"]
    num_launches = sum("Launch" in name for name in on_host)
    waits = Counter(name for name in on_host if "Synchronize" in name)
    lines = [
        f"{whole / 1e3:.1f} ms, of which a kernel runs in {busy / whole:.1%}; {len(kernels)} kernels, "
        f"{num_launches} launches; waits of the host: {sum(waits.values())}",
        "",
        "| kind | ms | share of busy | kernels |",
        "|---|---|---|---|",
    ]
    for kind, spent in by_kind.most_common():
        lines.append(f"| {kind} | {spent / 1e3:.2f} | {spent / busy:.1%} | {calls_by_kind[kind]} |")
    lines += ["", "| kernel | ms | times |", "|---|---|---|"]
    for name, spent in by_name.most_common(NUM_NAMES):
        lines.append(f"| `{name}` | {spent / 1e3:.2f} | {calls_by_name[name]} |")
    return lines


def main():
    if len(sys.argv) != 2:
        sys.exit("trace_table.py: error: pass one file, a run's trace_STEP.json")
    path = Path(sys.argv[1])
    try:
        print("\n".join(as_table(json.loads(path.read_text())["traceEvents"])))
    except ValueError as error:
        sys.exit(f"trace_table.py: error: {path}: {error}")


if __name__ == "__main__":
    main()
