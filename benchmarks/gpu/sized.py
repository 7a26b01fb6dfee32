"""Run a program of the project with a model of a published size whose random weights are drawn on the GPU.

    torchrun --standalone benchmarks/gpu/sized.py sd35m benchmarks/throughput.py flow_grpo.py --model MODEL ...
    torchrun --standalone benchmarks/gpu/sized.py sd35m flow_grpo.py --model MODEL --rollout local ...
    python benchmarks/gpu/sized.py sd35m tools.plan h100-80 flow_grpo.py --model MODEL ...

The first word is one of sd35m, flux and qwen, or a tiny one's name, such as tiny-sd35m, which tries this file on a CPU.
MODEL stands for the folder that is made for it: configs, small text encoders and a VAE of the published size. The
transformer is never on the disk: benchmarks/random_model.py writes up to 45 GB of it, and every run would read them
again. The folder lies in $SIZED_FOLDER, by default in the temporary folder, and is made once.

SIZED_FROZEN=sharded gives FSDP a LoRA's frozen weights, which the project leaves out on one rank. SIZED_PLAIN="norms
lora" leaves RMS norms and LoRA layers as diffusers and peft have them, or one of the two. No run logs perf/mfu,
which a process of its own would count in 10 to 30 seconds, beside what is measured.
"""

import os
import runpy
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.cpu import repair_torchvision
from common.models import loading
from common.run import utilisation
from common.weights import policy, sharding
from tests.published_models import PUBLISHED, VAES

import torch
from torch.distributed.fsdp import FSDPModule

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("SIZED_FOLDER") or Path(tempfile.gettempdir(), "cleanflow_sized"))
MODELS = {
    "sd35m": "stabilityai/stable-diffusion-3.5-medium",
    "flux": "black-forest-labs/FLUX.1-dev",
    "qwen": "Qwen/Qwen-Image",
}
NAMES = [*MODELS, *(f"tiny-{name}" for name in MODELS)]


def make_folder(name):
    """The checkpoint's folder of a name, made where it is not there. A full size has no weights of the transformer."""
    folder = FOLDER / name
    if folder.exists():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=FOLDER))
    write_pipeline(name, unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process, which began at the same time, was faster
        shutil.rmtree(unfinished)
    return folder


def write_pipeline(name, folder):
    """Write a checkpoint to `folder`; of a full size the file of the transformer's weights is that of a tiny one."""
    from benchmarks.random_model import TEXT_ENCODERS, wider  # slow, as the tiny models are
    from tests.tiny_models import FAMILIES, make_checkpoint

    import diffusers

    family, kind, config, _ = PUBLISHED[MODELS[name.removeprefix("tiny-")]]
    if name.startswith("tiny-"):
        make_checkpoint(family, folder)
        return
    torch.manual_seed(0)
    pipe = FAMILIES[family]()
    parts = {part: wider(getattr(pipe, part), changes) for part, changes in TEXT_ENCODERS[family].items()}
    pipe.register_modules(**parts, vae=type(pipe.vae)(**VAES[family]))
    if family == "stable_diffusion_3":
        pipe.tokenizer.model_max_length = pipe.tokenizer_2.model_max_length = 77
    pipe.save_pretrained(folder)
    with torch.device("meta"):
        getattr(diffusers, kind)(**config).save_config(folder / "transformer")


def draw_transformers():
    """Let DiffusionPipeline.from_pretrained draw the transformer in place of reading it."""
    from diffusers import DiffusionPipeline

    read_pipeline = DiffusionPipeline.from_pretrained.__func__

    def read_and_draw(kind, folder, *, dtype, **options):
        transformer = drawn_transformer(folder, dtype["default"])
        return read_pipeline(kind, folder, dtype=dtype, transformer=transformer, **options)

    DiffusionPipeline.from_pretrained = classmethod(read_and_draw)
    loading.check_transformer = lambda folder: None  # the folder's file is that of a tiny one


def drawn_transformer(folder, dtype):
    """The transformer of a checkpoint's folder with random weights, on the GPU if there is one."""
    import diffusers

    began = time.perf_counter()
    kind = getattr(diffusers, diffusers.DiffusionPipeline.load_config(folder)["transformer"][1])
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"):
        transformer = kind.from_config(kind.load_config(folder, subfolder="transformer"))
    torch.set_default_dtype(torch.float32)
    billions = sum(p.numel() for p in transformer.parameters()) / 1e9
    print(f"{billions:.2f} billion random weights in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return transformer


def shard_frozen_weights():
    """Let FSDP copy and cast a LoRA's frozen weights in every pass, as it does with all that it is given.

    The project leaves them out where a rank has all of them (common/weights/sharding.py). For runs of one rank.
    """
    sharding.keep_frozen_whole = lambda model, dtype: None
    FSDPModule.set_reshard_after_forward = lambda module, *args, **options: None
    FSDPModule.set_reshard_after_backward = lambda module, *args, **options: None


def count_no_flops():
    """Let a run log no perf/mfu."""
    utilisation.count_in_process = lambda *args: None


def leave_plain(words):
    """Do not fuse the norms, or the LoRA's products, of a transformer: add_policies calls policy.fuse_<word>."""
    for word in words:
        if word not in ("norms", "lora") or not hasattr(policy, f"fuse_{word}"):
            sys.exit(f"sized.py: error: SIZED_PLAIN={' '.join(words)}: {word} is nothing that is fused")
        setattr(policy, f"fuse_{word}", lambda *args, **kwargs: None)


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in NAMES:
        sys.exit(f"sized.py: error: sized.py NAME PROGRAM OPTIONS..., NAME one of {', '.join(NAMES)}")
    name, program, *options = sys.argv[1:]
    frozen = os.environ.get("SIZED_FROZEN")
    if frozen not in (None, "", "sharded"):
        sys.exit(f"sized.py: error: SIZED_FROZEN={frozen}: must be sharded")
    repair_torchvision()
    folder = make_folder(name)
    draw_transformers()
    count_no_flops()
    if frozen:
        shard_frozen_weights()
    leave_plain(os.environ.get("SIZED_PLAIN", "").split())
    options = [str(folder) if option == "MODEL" else option for option in options]
    if program.endswith(".py"):
        path = ROOT / program
        sys.argv = [str(path), *options]
        runpy.run_path(str(path), run_name="__main__")
    else:
        sys.argv[1:] = options
        runpy.run_module(program, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
