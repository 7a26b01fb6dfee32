"""Run a program of the project with a model of a published size whose random weights are drawn on the GPU.

    torchrun --standalone benchmarks/gpu/sized.py sd35m benchmarks/throughput.py flow_grpo.py --model MODEL ...
    torchrun --standalone benchmarks/gpu/sized.py sd35m flow_grpo.py --model MODEL --rollout local ...
    python benchmarks/gpu/sized.py sd35m tools.plan h100-80 flow_grpo.py --model MODEL ...

The first word is one of sd35m, flux and qwen, or a tiny one's name, such as tiny-sd35m, which tries this file on a CPU.
MODEL stands for the folder that is made for it: configs, small text encoders and a VAE of the published size. The
transformer is never on the disk: benchmarks/random_model.py writes up to 45 GB of it, and every run would read them
again. The folder lies in $SIZED_FOLDER, by default in the temporary folder, and is made once.

SIZED_FROZEN=whole leaves a LoRA's frozen weights out of FSDP, and SIZED_FROZEN=sharded gives them to it, whatever the
project does by default; both are for one rank. SIZED_SDPA=cudnn, flash or efficient leaves torch's attention that
kernel alone. SIZED_MFU=1 lets the run log perf/mfu, whose count takes 10 to 30 seconds of an idle GPU.
"""

import os
import runpy
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.models.cpu import repair_torchvision
from common.monitor.profiling import count_flops
from tests.published_models import PUBLISHED, VAES

import torch
import torch.distributed.fsdp

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


def choose_frozen(where):
    """Give FSDP a LoRA's frozen weights ("sharded"), or leave them on the device, "whole". For shards of one rank."""
    fully_shard = torch.distributed.fsdp.fully_shard

    def shard(module, **options):
        names = [name for name, _ in module.named_parameters()]
        if any("lora_" in name for name in names):
            frozen = {p for name, p in module.named_parameters() if "lora_" not in name}
            if where == "whole":
                module.to(options["mesh"].device_type)  # FSDP moves only what it shards
            options["ignored_params"] = frozen if where == "whole" else set()
        return fully_shard(module, **options)

    torch.distributed.fsdp.fully_shard = shard  # before the script imports it


def choose_sdpa(kernel):
    """Leave torch's attention one kernel."""
    torch.backends.cuda.enable_flash_sdp(kernel == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(kernel == "efficient")
    torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
    torch.backends.cuda.enable_math_sdp(False)


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in NAMES:
        sys.exit(f"sized.py: error: sized.py NAME PROGRAM OPTIONS..., NAME one of {', '.join(NAMES)}")
    name, program, *options = sys.argv[1:]
    frozen = os.environ.get("SIZED_FROZEN")
    if frozen not in (None, "", "whole", "sharded"):
        sys.exit(f"sized.py: error: SIZED_FROZEN={frozen}: must be whole or sharded")
    repair_torchvision()
    folder = make_folder(name)
    draw_transformers()
    if not os.environ.get("SIZED_MFU"):
        sys.modules[count_flops.__module__].count_flops = lambda config: {}
    if frozen:
        choose_frozen(frozen)
    if os.environ.get("SIZED_SDPA"):
        choose_sdpa(os.environ["SIZED_SDPA"])
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
