"""Do two commits compute the same? Runs the scripts at both and compares metrics and adapters.

    python benchmarks/same_numbers.py HEAD~1 HEAD --work /tmp/same --settings resumed short-2ranks full-2ranks
    python benchmarks/same_numbers.py HEAD ../my_checkout --scripts flow_grpo contrib/ram    # a folder as it is now
    python benchmarks/same_numbers.py HEAD~1 HEAD                                            # everything

The first command runs the five scripts and contrib's (without contrib/flow_grpo_ahead.py, which needs the engine) on 8
images a step: two steps, two epochs of two mini-batches, averaged weights, a KL to the reference, and a window of two
SDE steps, where a script has them. Its settings are

  - resumed: a LoRA on one rank, which stops after the first step and is resumed;
  - short-2ranks: a LoRA on two ranks;
  - full-2ranks: full weights on two ranks.

The other settings are longer, and of the five scripts alone. "defaults" takes 5 steps at their earlier defaults (no KL,
a constant rate; dpo_offline.py: pairs of 64 prompts, 64 a step, beta 100), "kl-ema-2ranks" the same on two ranks with a
KL and averaged weights. "vllm" takes 2 steps with `--rollout vllm`, contrib/flow_grpo_ahead.py as well.

Every metric except times and memory, and every tensor and byte of the saved weights, must be equal; with the engine,
metrics and tensors to 1e-6. A metric or a tensor that only one commit has is a failure. A finished run of a commit in
the work folder is not made again; runs of a folder are. A short setting takes about 5 seconds of a core for each rank
and run, so that a script's three take a minute on two idle cores for both sides, and the first command a quarter of an
hour. The long settings take much longer: each is 5 steps of 256 images, on both sides.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import random
import runpy
import shutil
import socket
import subprocess
import sys
from multiprocessing import connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # read at torch's import: more threads must not be forked, and would wait on others
from common.cpu import repair_torchvision
from common.weights.adapter_files import read_lora

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
FIVE = ("flow_grpo", "grpo_guard", "mix_grpo", "dpo_offline", "diffusion_nft")
CONTRIB = ("awm", "crd", "dance_grpo", "dgpo", "diffusion_opd", "dmd2", "draft", "flow_dppo", "flow_grpo_ahead")
CONTRIB += ("online_dpo", "ram", "sft", "tdm_r1", "tempflow_grpo", "v_grpo")
SCRIPTS = (*FIVE, *(f"contrib/{name}" for name in CONTRIB))
KL_COEF = {"diffusion_nft": 1e-4, "dpo_offline": None}  # offline DPO has no such term
UPDATES = ["--updates_per_rollout", "4", "--learning_rate", "1e-3"]  # of flow_grpo.py as well, as once
ENGINE_TOLERANCE = 1e-6
LIBRARIES = ("diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3", "matplotlib.figure", "peft")
LIBRARIES += ("rapidocr", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "tyro")

# ---- of the short settings -------------------------------------------------------------------------------------------
SMALL = "--num_inference_steps 4 --eval_num_inference_steps 2 --max_prompts 2 --ema_decay 0.9 --lr_schedule constant"
SMALL += " --reward assets/sign_colour.py:sign_colour"  # of the tree: of the image and its prompt, and smooth
ROLLOUT = "--num_prompts 4 --group_size 2 --updates_per_rollout 2 --epochs_per_rollout 2 --micro_batch_size 4"
WINDOW = "--sde_window_size 2 --sde_window_range 0 3"
OWN = {  # options of a script alone, or without one of these
    "flow_grpo": f"{ROLLOUT} {WINDOW} --kl_coef 0.04",
    "grpo_guard": f"{ROLLOUT} {WINDOW} --kl_coef 0.04",
    "mix_grpo": f"{ROLLOUT} {WINDOW} --kl_coef 0.04 --iters_per_group 1",
    "dpo_offline": "--num_pair_prompts 8 --group_size 2 --num_pairs 4 --micro_batch_size 2 --dpo_beta 100",
    "diffusion_nft": f"{ROLLOUT} --kl_coef 0.01",
    "contrib/awm": f"{ROLLOUT} --kl_coef 0.01",
    "contrib/crd": f"{ROLLOUT} --kl_coef 0.01",
    "contrib/dance_grpo": f"{ROLLOUT} {WINDOW} --kl_coef 0.04",
    "contrib/dgpo": f"{ROLLOUT} --kl_coef 0.01",
    "contrib/diffusion_opd": f"{ROLLOUT} {WINDOW}",  # and teachers
    "contrib/dmd2": "--num_prompts 8 --micro_batch_size 4 --fake_updates 2",
    "contrib/draft": "--num_prompts 8 --micro_batch_size 4 --gradient_steps 2",
    "contrib/flow_dppo": f"{ROLLOUT} {WINDOW} --kl_coef 0.04",
    "contrib/flow_grpo_ahead": f"{ROLLOUT} {WINDOW} --kl_coef 0.04",
    "contrib/online_dpo": f"{ROLLOUT} --kl_coef 0.01",
    "contrib/ram": ROLLOUT,
    "contrib/sft": "--num_records 4 --micro_batch_size 2 --caption_dropout 0.5",  # and records
    "contrib/tdm_r1": "--num_prompts 2 --group_size 4 --micro_batch_size 4 --fake_updates 2 --surrogate_updates 2",
    "contrib/tempflow_grpo": f"{ROLLOUT} {WINDOW} --sde_window_size 1 --kl_coef 0.04 --branches_per_seed 2",
    "contrib/v_grpo": f"{ROLLOUT} --old_kl_coef 0.1 --pairs_per_prompt 2",
}
SHORT = {"resumed": (1, ""), "short-2ranks": (2, ""), "full-2ranks": (2, " --lora_rank 0")}  # ranks, options
SETTINGS = (*SHORT, "defaults", "kl-ema-2ranks", "vllm")


def settings(files):
    """Yields (script, name of the setting, ranks, [options of each of its runs], tolerance). files: by script, the
    option that names what was written for it."""
    for setting, (ranks, more) in SHORT.items():
        for script in SCRIPTS:
            if script == "contrib/diffusion_opd" and setting == "full-2ranks":
                continue  # its teachers are LoRAs
            if script != "contrib/flow_grpo_ahead":
                options = short_options(script, files) + more.split()
                stops = [1, 2] if setting == "resumed" else [2]
                runs = [[*options, "--num_steps", str(stop)] for stop in stops]
                for again in runs[1:]:
                    again += ["--resume", "latest"]
                yield script, setting, ranks, runs, 0.0
    for script in FIVE:
        local = ["--rollout", "local"]
        if script == "dpo_offline":
            local = ["--num_pair_prompts", "64", "--num_pairs", "64", "--dpo_beta", "100"]
        else:
            local += UPDATES
        local += ["--lr_schedule", "constant", "--num_steps", "5"]
        kl_coef = KL_COEF.get(script, 0.04)
        yield script, "defaults", 1, [[*local, *(["--kl_coef", "0"] if kl_coef else [])]], 0.0  # without a KL, as once
        extras = ["--ema_decay", "0.9"] + (["--kl_coef", str(kl_coef)] if kl_coef else [])
        yield script, "kl-ema-2ranks", 2, [[*local, *extras]], 0.0
    for script in FIVE:
        if script != "dpo_offline":
            options = ["--rollout", "vllm", "--num_steps", "2", *UPDATES, "--lr_schedule", "constant", "--kl_coef", "0"]
            yield script, "vllm", 1, [options], ENGINE_TOLERANCE
    ahead = "contrib/flow_grpo_ahead"
    yield ahead, "vllm", 1, [[*short_options(ahead, files), "--num_steps", "2"]], ENGINE_TOLERANCE


def short_options(script, files):
    """The options of a short run."""
    options = f"{SMALL} {OWN[script]}".split() + files.get(script, [])
    if script == "contrib/sft":  # which has no rollout
        at = options.index("--num_inference_steps")
        del options[at : at + 2]
    if script not in ("dpo_offline", *(f"contrib/{name}" for name in ("dmd2", "draft", "sft", "tdm_r1"))):
        options += ["--rollout", "vllm" if script == "contrib/flow_grpo_ahead" else "local"]
    return options


def write_teachers(work):
    """Two LoRAs of random weights for the embedded model's first block, made once. Returns the option for them."""
    option = ["--teachers"]
    base = load_file(ROOT / "assets" / "embedded" / "transformer" / "diffusion_pytorch_model.safetensors")
    for seed in (1, 2):
        path = work / f"teacher_{seed}.safetensors"
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for module in ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_v"):
            rows, columns = base[f"{module}.weight"].shape
            tensors[f"transformer.{module}.lora_A.weight"] = 0.1 * torch.randn(16, columns, generator=generator)
            tensors[f"transformer.{module}.lora_B.weight"] = 0.1 * torch.randn(rows, 16, generator=generator)
        save_file(tensors, path)
        option.append(f"teacher_{seed}={path}")
    return option


def write_records(work):
    """Eight images of even colours and their prompts, made once. Returns the option for them."""
    lines = []
    for number in range(8):
        file = work / f"record_{number}.png"
        Image.new("RGB", (96, 32), (30 * number, 255 - 20 * number, 128)).save(file)
        lines.append(json.dumps({"prompt": f'a sign that says "{number}"', "image": file.name}) + "\n")
    (work / "records.jsonl").write_text("".join(lines))
    return ["--records", str(work / "records.jsonl")]


# ---- runs ------------------------------------------------------------------------------------------------------------
def check_out(commit, work):
    """(the tree of a commit, under `work` and made once, or of a folder; the folder for its runs)."""
    if Path(commit).is_dir():
        tree = Path(commit).resolve()
        runs = work / "runs" / tree.name
        shutil.rmtree(runs, ignore_errors=True)  # its files may have changed since
        return tree, runs
    full = subprocess.run(["git", "rev-parse", commit], capture_output=True, text=True, check=True).stdout.strip()
    tree = work / full[:7]
    if not tree.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), full], check=True)
    return tree, work / "runs" / tree.name


def run(tree, folder, script, ranks, options):
    """Run a script of the tree in this process' children, or end this program with the end of its output."""
    print(f"{tree.name}: {script}.py {' '.join(options)} on {ranks} rank(s)", flush=True)
    log = folder.with_suffix(".log")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [f"{script}.py", "--name", str(folder), *options]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=be_rank, args=(tree, arguments, rank, ranks, port, log)) for rank in range(ranks)]
    for process in processes:
        process.start()
    running = list(processes)
    while running:
        connection.wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in processes):
            for process in running:
                process.kill()
            sys.exit(f"{tree}: {' '.join(arguments)}\n{log.read_text()[-4000:]}")


def be_rank(tree, arguments, rank, ranks, port, log):
    """Run the script as torchrun would start it in the tree; the libraries are imported already, the project is not."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(tree)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "same_numbers"}
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        del sys.modules[name]
    sys.path.remove(str(ROOT))
    sys.path.insert(0, str(tree))
    random.seed()
    sys.argv = arguments
    name = arguments[0].removesuffix(".py").replace("/", ".")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


# ---- what a run leaves -----------------------------------------------------------------------------------------------
def metrics(folder):
    """{(step, name): value} of all that depends neither on the clock nor on the machine."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["training/global_step"], name): value
        for row in rows
        for name, value in row.items()
        if not name.startswith(("timing_s/", "timing_per_image_ms/", "perf/"))
    }


def weights(adapter):
    """The tensors of full weights or of a saved LoRA, whose B matrices are multiplied by alpha / rank: alpha may be in
    them or in the metadata."""
    if (adapter / "diffusion_pytorch_model.safetensors").exists():
        return load_file(adapter / "diffusion_pytorch_model.safetensors")
    tensors, config = read_lora(adapter)
    scale = config.lora_alpha / config.r
    return {name: tensor * scale if ".lora_B." in name else tensor for name, tensor in tensors.items()}


def weight_files(folder):
    """{name of a file: its bytes} of the weights in adapter/ and best_adapter/."""
    files = sorted(folder.glob("*adapter/*.safetensors"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


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


def compare_bytes(before, after):
    """[a line for each file that only one has, or whose bytes differ]."""
    return [
        f"{name}: other bytes" for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a commit, or a folder")
    parser.add_argument("after", help="a commit, or a folder")
    parser.add_argument("--work", default="/tmp/same_numbers")
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS, choices=SCRIPTS, metavar="SCRIPT")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, choices=SETTINGS, metavar="SETTING")
    options = parser.parse_args()
    work = Path(options.work).resolve()
    trees = [check_out(commit, work) for commit in (options.before, options.after)]
    files = {"contrib/diffusion_opd": write_teachers(work), "contrib/sft": write_records(work)}
    repair_torchvision()  # before peft is imported beside a CPU build of torch
    for name in LIBRARIES:
        importlib.import_module(name)
    failed = False
    print(f"# {trees[0][0].name} against {trees[1][0].name}, torch {torch.__version__}")
    print("| script | setting | metrics | largest difference | weights | largest difference | verdict |")
    print("|---|---|---|---|---|---|---|")
    for script, setting, ranks, runs, tolerance in settings(files):
        if script not in options.scripts or setting not in options.settings:
            continue
        folders = []
        for tree, of_tree in trees:
            folder = of_tree / f"{script.replace('/', '-')}-{setting}"
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not (folder / "finished").exists():
                shutil.rmtree(folder, ignore_errors=True)
                for arguments in runs:
                    run(tree, folder, script, ranks, arguments)
                (folder / "finished").touch()
            folders.append(folder)
        numbers = [metrics(folder) for folder in folders]
        tensors = [weights(folder / "adapter") for folder in folders]
        of_metrics, faults = compare(*numbers, tolerance)
        of_tensors, more_faults = compare(*tensors, tolerance)
        faults += more_faults
        if not tolerance:
            faults += compare_bytes(*map(weight_files, folders))
        failed |= bool(faults)
        verdict = "DIFFERENT" if faults else f"equal to {tolerance:g}" if tolerance else "equal to the bit"
        cells = [script, setting, len(numbers[0]), f"{of_metrics:.2g}", len(tensors[0]), f"{of_tensors:.2g}", verdict]
        print("|", " | ".join(map(str, cells)), "|", flush=True)
        for fault in faults[:20]:
            print(f"  {fault}")
        if len(faults) > 20:
            print(f"  and {len(faults) - 20} more")
    sys.exit(failed)


if __name__ == "__main__":
    main()
