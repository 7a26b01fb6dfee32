"""One step of flow_grpo.py on every model of docs/models.md at its published size, in bf16, where a GPU is at hand.

    python benchmarks/gpu_step.py --scratch /data/scratch                      # all, on all GPUs of this machine
    python benchmarks/gpu_step.py --scratch /data/scratch --only Qwen-Image -- --train_with activation_checkpointing
    python benchmarks/gpu_step.py --scratch /tmp/scratch --tiny                # tries this script, also on a CPU

Nothing is downloaded, and the weights are random. The transformer and the VAE have their published sizes; the text
encoders have the published widths, but few or thin layers, and tokenizers of a few hundred tokens: they are neither
timed, as each prompt is encoded once, nor do their gigabytes show. Image size, steps, guidance, tokens and LoRA are
those of docs/models.md. A rank makes two images of one prompt, in micro-batches of one, and updates once, so that the
ratio should be exactly 1. A checkpoint takes up to 45 GB on the disk and, while it loads, in each rank's host memory.

Options after -- go to flow_grpo.py. A row of each model is printed, and appended to --table.
"""

import argparse
import copy
import gc
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.conftest import brightness_reward, read_metrics, torchrun
from tests.published_models import PUBLISHED, recipes
from tests.tiny_models import FAMILIES, make_checkpoint

import diffusers
import torch

KL_VAE = {  # of Stable Diffusion 3, FLUX.1 and Z-Image
    "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 1.5,
    "shift_factor": 0.06,
}
VAES = {  # family: config; diffusers' defaults are FLUX.2's, Qwen-Image's and Wan's own
    "stable_diffusion_3": KL_VAE,
    "flux": KL_VAE,
    "z_image": KL_VAE,
    "flux2_klein": {},
    "qwen_image": {},
    "wan": {},
}
CLIP_L = {"hidden_size": 768, "projection_dim": 768, "max_position_embeddings": 77}
CLIP_G = {"hidden_size": 1280, "projection_dim": 1280, "max_position_embeddings": 77}
QWEN_2_5_ROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
TEXT_ENCODERS = {  # family: {text encoder: what differs in its config from that of the tiny one}
    "stable_diffusion_3": {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "text_encoder_3": {"d_model": 4096}},
    "flux": {"text_encoder": CLIP_L, "text_encoder_2": {"d_model": 4096}},
    "flux2_klein": {"text_encoder": {"hidden_size": 2560}},
    "qwen_image": {
        "text_encoder": {
            "text_config": {"hidden_size": 3584, "num_attention_heads": 28, "rope_parameters": QWEN_2_5_ROPE},
            "vision_config": {"out_hidden_size": 3584},
        }
    },
    "wan": {"text_encoder": {"d_model": 4096}},
    "z_image": {"text_encoder": {"hidden_size": 2560}},
}
HEADER = "| model | on | ranks | seconds: step | rollout | update | peak GB of rank 0 | first ratio: mean | deviation |"


def wider(encoder, changes):
    """A new text encoder like the tiny one, with `changes` in its config."""
    config = copy.deepcopy(encoder.config)
    for name, value in changes.items():
        if name.endswith("_config"):
            for key, inner in value.items():
                setattr(getattr(config, name), key, inner)
        else:
            setattr(config, name, value)
    return type(encoder)(config)


def make_full_size(hub_id, folder):
    """Write the checkpoint of a published model's size, of random weights, to `folder`."""
    family, transformer_class, config, _ = PUBLISHED[hub_id]
    torch.manual_seed(0)
    pipe = FAMILIES[family]()
    parts = {name: wider(getattr(pipe, name), changes) for name, changes in TEXT_ENCODERS[family].items()}
    parts["vae"] = type(pipe.vae)(**VAES[family])
    # drawn where that is fast, and in bf16 from the first: Qwen-Image's 20 billion in fp32 fill an 80 GB GPU
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        parts["transformer"] = getattr(diffusers, transformer_class)(**config)
    torch.set_default_dtype(torch.float32)
    pipe.register_modules(**parts)
    if family == "stable_diffusion_3":
        pipe.tokenizer.model_max_length = pipe.tokenizer_2.model_max_length = 77
    pipe.save_pretrained(folder)
    del pipe, parts
    gc.collect()
    torch.cuda.empty_cache()


def step(name, options, args):
    """Make the checkpoint and run the step. Returns the row."""
    hub_id = options[options.index("--model") + 1]
    checkpoint = args.scratch / name
    if not checkpoint.exists():
        print(f"{name}: making {checkpoint}", flush=True)
        make_checkpoint(PUBLISHED[hub_id][0], checkpoint) if args.tiny else make_full_size(hub_id, checkpoint)
    run = f"gpu_step-{name}"
    shutil.rmtree(args.scratch / "runs" / run, ignore_errors=True)
    small = ["--rollout", "local", "--num_steps", 1, "--num_prompts", args.ranks, "--group_size", 2]
    small += ["--updates_per_rollout", 1, "--micro_batch_size", 1, "--reward", brightness_reward(args.scratch)]
    small += ["--max_prompts", args.ranks, "--eval_num_inference_steps", 2, "--model", checkpoint, "--name", run]
    if args.tiny:
        small += ["--image_size", 32, 96, "--max_sequence_length", 160]
    torchrun(args.scratch, "flow_grpo.py", *options, *small, *args.more, nproc=args.ranks, timeout=3600)
    metrics = read_metrics(args.scratch / "runs" / run)[-1]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    seconds = [f"{metrics[key]:.1f}" for key in ("timing_s/step", "timing_s/gen", "timing_s/update_actor")]
    ratio = [f"{metrics['actor/ratio_mean']:.9f}", f"{metrics['actor/ratio_std']:.1e}"]
    memory = f"{metrics['perf/max_memory_gb']:.1f}"
    return "| " + " | ".join([name, device, str(args.ranks), *seconds, memory, *ratio]) + " |"


if __name__ == "__main__":
    models = {name: options for (name, script), options in recipes().items() if script == "flow_grpo.py"}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for the checkpoints and runs")
    parser.add_argument("--only", nargs="+", default=list(models), choices=list(models), metavar="MODEL")
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--tiny", action="store_true", help="tiny checkpoints and images instead")
    parser.add_argument("--table", type=Path, default=Path("gpu_step.md"))
    parser.add_argument("more", nargs="*", help="after --: options of flow_grpo.py")
    args = parser.parse_args()
    args.scratch = args.scratch.resolve()
    args.scratch.mkdir(parents=True, exist_ok=True)
    if not args.table.exists():
        args.table.write_text(f"{HEADER}\n{'|---' * (HEADER.count('|') - 1)}|\n")
    print(HEADER)
    for name in args.only:
        try:
            row = step(name, models[name], args)
        except Exception as error:  # out of memory, say: the other models are wanted all the same
            print(error, file=sys.stderr)
            row = f"| {name} | failed |" + " |" * (HEADER.count("|") - 3)
        if not args.keep:
            shutil.rmtree(args.scratch / name, ignore_errors=True)
        print(row, flush=True)
        with open(args.table, "a") as table:
            table.write(row + "\n")
