"""Do two commits compute the same? Runs all five scripts at both and compares metrics and adapters.

    python benchmarks/same_numbers.py HEAD~1 HEAD --work /tmp/same

Each script runs 5 steps at its earlier defaults (no KL, a constant rate; dpo_offline.py: pairs of 64 prompts, 64 a
step, beta 100) with `--rollout local`, and again on two ranks with a KL to the reference and averaged weights. Every
metric except times and memory, and every tensor of the saved adapter, must be equal to the bit. The scripts that have
an engine run 2 steps with `--rollout vllm`, which must be equal to 1e-6. A metric or a tensor that only one commit has
is a failure. A finished run in the work folder is not made again.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu import repair_torchvision
from common.weights.adapter_files import read_lora

import torch

SCRIPTS = ("flow_grpo", "grpo_guard", "mix_grpo", "dpo_offline", "diffusion_nft")
KL_COEF = {"diffusion_nft": 1e-4, "dpo_offline": None}  # offline DPO has no such term
UPDATES = ["--updates_per_rollout", "4", "--learning_rate", "1e-3"]  # of flow_grpo.py as well, as once
ENGINE_TOLERANCE = 1e-6


def settings():
    """Yields (script, name of the setting, ranks, options, tolerance). "defaults" are those without a KL, as once."""
    for script in SCRIPTS:
        local = ["--rollout", "local"]
        if script == "dpo_offline":
            local = ["--num_pair_prompts", "64", "--num_pairs", "64", "--dpo_beta", "100"]
        else:
            local += UPDATES
        local += ["--lr_schedule", "constant"]
        kl_coef = KL_COEF.get(script, 0.04)
        yield script, "defaults", 1, [*local, "--num_steps", "5", *(["--kl_coef", "0"] if kl_coef else [])], 0.0
        extras = ["--ema_decay", "0.9"] + (["--kl_coef", str(kl_coef)] if kl_coef else [])
        yield script, "kl-ema-2ranks", 2, [*local, "--num_steps", "5", *extras], 0.0
    for script in SCRIPTS:
        if script != "dpo_offline":
            options = ["--rollout", "vllm", "--num_steps", "2", *UPDATES, "--lr_schedule", "constant", "--kl_coef", "0"]
            yield script, "vllm", 1, options, ENGINE_TOLERANCE


# ---- runs ------------------------------------------------------------------------------------------------------------
def check_out(commit, work):
    """A work tree of the commit under `work`, made once. Returns its folder."""
    full = subprocess.run(["git", "rev-parse", commit], capture_output=True, text=True, check=True).stdout.strip()
    folder = Path(work) / full[:7]
    if not folder.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(folder), full], check=True)
    return folder


def run(tree, script, setting, ranks, options):
    """The folder of the finished run."""
    name = f"{script}-{setting}"
    folder = tree / "runs" / name
    if not (folder / "adapter").exists():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command += [f"{script}.py", "--name", name, *options]
        print(f"{tree.name}: {script}.py {' '.join(options)} on {ranks} rank(s)", flush=True)
        done = subprocess.run(command, cwd=tree, capture_output=True)
        if done.returncode:
            sys.exit(done.stderr.decode()[-4000:])
    return folder


def metrics(folder):
    """{(step, name): value} of all that depends neither on the clock nor on the machine."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["training/global_step"], name): value
        for row in rows
        for name, value in row.items()
        if not name.startswith(("timing_s/", "timing_per_image_ms/", "perf/"))
    }


def strengths(adapter):
    """The tensors of a saved LoRA, its B matrices times alpha / rank: alpha may be in them or in the metadata."""
    tensors, config = read_lora(adapter)
    scale = config.lora_alpha / config.r
    return {name: tensor * scale if ".lora_B." in name else tensor for name, tensor in tensors.items()}


# ---- the comparison --------------------------------------------------------------------------------------------------
def difference(first, second):
    """The largest absolute difference of two numbers or tensors; inf where one is NaN or of another shape."""
    first, second = (torch.as_tensor(value, dtype=torch.float64) for value in (first, second))
    if first.shape != second.shape:
        return math.inf
    largest = (first - second).abs().max().item()
    return math.inf if math.isnan(largest) else largest


def compare(before, after, tolerance):
    """(the largest difference of any value, [a line for each fault]) of two dicts of numbers or tensors."""
    faults = [f"only before: {key}" for key in sorted(before.keys() - after.keys(), key=str)]
    faults += [f"only after: {key}" for key in sorted(after.keys() - before.keys(), key=str)]
    worst = 0.0
    for key in before.keys() & after.keys():
        found = difference(before[key], after[key])
        worst = max(worst, found)
        if found > tolerance:
            faults.append(f"{key}: {found:.2g} apart")
    return worst, faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--work", default="/tmp/same_numbers")
    options = parser.parse_args()
    repair_torchvision()  # before peft is imported beside a CPU build of torch
    trees = [check_out(commit, options.work) for commit in (options.before, options.after)]
    failed = False
    print(f"# {trees[0].name} against {trees[1].name}, torch {torch.__version__}")
    print("| script | setting | metrics | largest difference | adapter tensors | largest difference | verdict |")
    print("|---|---|---|---|---|---|---|")
    for script, setting, ranks, arguments, tolerance in settings():
        folders = [run(tree, script, setting, ranks, arguments) for tree in trees]
        numbers = [metrics(folder) for folder in folders]
        adapters = [strengths(folder / "adapter") for folder in folders]
        of_metrics, faults = compare(*numbers, tolerance)
        of_adapters, more_faults = compare(*adapters, tolerance)
        faults += more_faults
        failed |= bool(faults)
        verdict = "DIFFERENT" if faults else f"equal to {tolerance:g}" if tolerance else "equal to the bit"
        cells = [script, setting, len(numbers[0]), f"{of_metrics:.2g}", len(adapters[0]), f"{of_adapters:.2g}", verdict]
        print("|", " | ".join(map(str, cells)), "|", flush=True)
        for fault in faults[:20]:
            print(f"  {fault}")
        if len(faults) > 20:
            print(f"  and {len(faults) - 20} more")
    sys.exit(failed)


if __name__ == "__main__":
    main()
