"""SD3.5-medium at its real size takes one step of flow_grpo.py on a CPU: seconds, ratio, and peak memory by its plan.

    python benchmarks/sd35_medium_step.py --scratch /data/scratch --rollout local
    python benchmarks/sd35_medium_step.py --scratch /data/scratch --rollout vllm      # needs about 20 GB of memory

Nothing is downloaded: the transformer and the VAE have their published configs and random weights, the text encoders
their published widths and two layers (benchmarks/random_model.py makes the checkpoint, 5 GB, kept in --scratch). bf16,
two images of 128 x 128 pixels in three sampling steps, micro-batches of one. The peak is of the PSS of all processes
under torchrun, summed: shared pages count once. A row is printed, and appended to --table.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.random_model import make_full_size
from tests.conftest import ROOT, brightness_reward, read_metrics

import psutil

HUB_ID = "stabilityai/stable-diffusion-3.5-medium"
OPTIONS = "--dtype bfloat16 --image_size 128 128 --max_sequence_length 256 --lora_rank 32 --lora_alpha 64 --num_steps 1"
OPTIONS += " --num_prompts 1 --group_size 2 --updates_per_rollout 1 --micro_batch_size 1 --rollout_batch_size 2"
OPTIONS += " --num_inference_steps 3 --sde_window_size 0 --eval_num_inference_steps 3 --max_prompts 1"
INTERVAL_S = 0.2  # between two looks at the memory
HEADER = "| rollout | seconds: start and step | step | rollout | update | ratio: mean | deviation | peak GB | plan GB |"


def proportional_set(process):
    """{"Pss": bytes, "Pss_Anon": ..., ...} of a process; nothing of one that has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    sizes = [line.split() for line in lines]
    return {name.rstrip(":"): 1024 * int(size) for name, size, _ in sizes if name.startswith("Pss")}


def watch(command, folder, log, samples):
    """Run a command in a folder. Returns its exit code, the seconds and the peak of its children's PSS in bytes."""
    start = time.time()
    peak = 0
    with open(log, "w") as output, open(samples, "w") as series:
        process = psutil.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            sizes = [proportional_set(child) for child in process.children(recursive=True)]
            total = sum(size.get("Pss", 0) for size in sizes)
            peak = max(peak, total)
            series.write(json.dumps([round(time.time() - start, 1), total, sizes]) + "\n")
            time.sleep(INTERVAL_S)
    return process.returncode, time.time() - start, peak


def planned_peak(command, folder):
    """Bytes that --plan cpu says the run needs at its peak."""
    done = subprocess.run([*command, "--plan", "cpu"], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout)
    line = next(line for line in done.stdout.splitlines() if line.startswith("peak"))
    return 1e9 * float(line.split()[1])


def main(args):
    args.scratch.mkdir(parents=True, exist_ok=True)
    checkpoint = args.scratch / "sd35-medium"
    if not checkpoint.exists():
        print(f"making {checkpoint}", flush=True)
        make_full_size(HUB_ID, checkpoint)
    run = f"sd35-medium-{args.rollout}"
    shutil.rmtree(args.scratch / "runs" / run, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(ROOT / "flow_grpo.py")]
    command += ["--model", str(checkpoint), "--rollout", args.rollout, "--name", run, *OPTIONS.split()]
    command += ["--reward", brightness_reward(args.scratch), *args.more]
    planned = planned_peak(command, args.scratch)
    log = args.scratch / f"{run}.log"
    code, seconds, peak = watch(command, args.scratch, log, args.scratch / f"{run}.jsonl")
    if code:
        raise SystemExit(f"exit code {code} after {seconds:.0f} s, peak {peak / 1e9:.1f} GB; its output: {log}")
    metrics = read_metrics(args.scratch / "runs" / run)[-1]
    times = [f"{metrics[f'timing_s/{name}']:.1f}" for name in ("step", "gen", "update_actor")]
    ratio = [f"{metrics['actor/ratio_mean']:.9f}", f"{metrics['actor/ratio_std']:.1e}"]
    memory = [f"{peak / 1e9:.2f}", f"{planned / 1e9:.2f} ({planned / peak - 1:+.0%})"]
    row = "| " + " | ".join([args.rollout, f"{seconds:.0f}", *times, *ratio, *memory]) + " |"
    if not args.table.exists():
        args.table.write_text(f"{HEADER}\n{'|---' * (HEADER.count('|') - 1)}|\n")
    with open(args.table, "a") as table:
        table.write(row + "\n")
    print(f"{HEADER}\n{row}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for the checkpoint and the runs")
    parser.add_argument("--rollout", choices=["local", "vllm"], default="local")
    parser.add_argument("--table", type=Path, default=Path("sd35_medium_step.md"))
    parser.add_argument("more", nargs="*", help="after --: options of flow_grpo.py")
    parsed = parser.parse_args()
    parsed.scratch = parsed.scratch.resolve()
    main(parsed)
