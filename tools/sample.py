"""Images of your own prompts before and after a run, from the same noise, side by side in one picture.

    python -m tools.sample runs/mine --prompts own.txt
    python -m tools.sample runs/mine path/to/adapter runs/mine/checkpoints/step_000030.pt --prompts own.txt \\
        --image_size 1024 1024 --num_inference_steps 40 --images_per_prompt 2

The first run's options say the model, its size, steps and guidance. Each run, adapter or LoRA checkpoint gets a
column of side_by_side.png behind the model's own, and a folder of images. "before" is the model without any LoRA: of a
run that began with --lora_path, name that adapter as well. It needs no reward and no torchrun. It takes
Euler steps along the ODE, whatever script made the run.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.cpu import repair_torchvision
from common.data import PromptSet
from common.errors import RunError, error_prefix
from common.files import check_format, load_checkpoint, read_prompts
from common.images import as_one_picture, save_png
from common.models import Family, check_schedules, count_long_prompts, find_family, load_model, on_device
from common.options import SharedArgs
from common.rollout import RolloutRequest
from common.run.checks import check_sources
from common.run.plots import save_grid
from common.run.recorded_options import check_code, from_record
from common.run.resuming import newest_record
from common.sde import image_seed, sde_step
from common.weights.adapter_files import read_lora
from common.weights.base_weights import quantise, quantise_encoders
from tools.compare import labels_of

import torch


# ---- what is sampled -------------------------------------------------------------------------------------------------
def read_options(run: Path, family: str | None = None, trusts_code: bool = False) -> dict[str, Any]:
    """{name: value} of a run's options, with `family`, if it is given (`as_given`), in the place of its own.

    Raises:
        ValueError: the folder is no run's, or another version's; or its family is code that is not taken.
    """
    if not (run / "args.json").is_file():
        raise ValueError(f"{run}: no run (it has no args.json): name a run first, adapters behind it")
    path = newest_record(run)
    with error_prefix(path, Exception):  # whatever it holds
        record = json.loads(path.read_text(encoding="utf-8"))
        check_format(record, "the file")
        options = from_record(dict(record["args"]), SharedArgs)
    if family is not None:
        return options | as_given(family)
    if not trusts_code:
        check_code({"family": options.get("family")}, SharedArgs, path, f"{run}: {path.name}")
    return options


def as_given(family: str | None) -> dict[str, Any]:
    """The option `family` as the tools take it: None where it is not given, "None" for the model's own."""
    return {"family": None if family == "None" else family}


def as_evaluated(
    options: dict[str, Any], image_size: list[int] | None, num_inference_steps: int | None, guidance_scale: float | None
) -> dict[str, Any]:
    """A run's options with the steps and the guidance of its evaluation, or with those that are given."""
    guidance = options.get("eval_guidance_scale") or options.get("guidance_scale", 1.0)
    return options | {
        "image_size": image_size or options["image_size"],
        "num_inference_steps": num_inference_steps or options["eval_num_inference_steps"],
        "guidance_scale": guidance if guidance_scale is None else guidance_scale,
    }


def read_policies(sources: Sequence[Path], model: str, first: str) -> dict[str, tuple[dict[str, torch.Tensor], Any]]:
    """{label: what read_policy reads} of the sources; `first` is the model's own label.

    LoRAs come first, so that none is put on the full weights of another policy.
    """
    labels = labels_of([first, *map(str, sources)])[1:]
    policies = {label: read_policy(source, model) for label, source in zip(labels, sources, strict=True)}
    return dict(sorted(policies.items(), key=lambda item: item[1][1] is None))


def read_policy(source: Path, model: str | None) -> tuple[dict[str, torch.Tensor], Any]:
    """A run's, an adapter's or a LoRA checkpoint's tensors, and its LoraConfig; None for full weights.

    model: that it is for; None checks only that its names are diffusers'.

    Raises:
        ValueError: there is none, or it is not for the model.
    """
    folder = source / "adapter" if (source / "adapter").is_dir() else source
    if not folder.exists():
        raise ValueError(f"{source}: no run, adapter or checkpoint")
    full_weights = folder / "diffusion_pytorch_model.safetensors"
    if folder.suffix != ".pt" and not full_weights.is_file():
        try:
            return read_lora(folder, model)
        except ValueError as error:  # which names the training scripts' option
            raise ValueError(str(error).removeprefix("--lora_path ")) from error
    state = load_checkpoint(folder) if folder.suffix == ".pt" else {}
    with error_prefix(source, Exception):  # whatever a library raises over its bytes
        if not state:
            from safetensors.torch import load_file

            tensors = load_file(full_weights)
        else:
            check_format(state, "the file")
            tensors = dict(state["policies"].get("ema", state["policies"]["default"]))
            if not any(".lora_A." in name for name in tensors):
                raise ValueError("a checkpoint of full weights: name the run, whose adapter/ has them")
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise ValueError(f"{name} has values that are NaN, infinite or integers")
        if not state:
            return tensors, None
        from peft import LoraConfig  # slow

        modules = sorted({name.rpartition(".lora_")[0] for name in tensors})
        rank = len(next(tensor for name, tensor in tensors.items() if ".lora_A." in name))
        return tensors, LoraConfig(r=rank, lora_alpha=state["args"]["lora_alpha"], target_modules=modules)


def use(model: Family, tensors: dict[str, torch.Tensor], config: Any) -> None:  # a LoraConfig, or None
    """Let the model be the policy of these tensors; the one before goes."""
    from peft import set_peft_model_state_dict  # slow

    transformer = model.transformer
    if getattr(transformer, "peft_config", None):
        transformer.unload_lora()
    if config is None:
        transformer.load_state_dict(tensors)
        return
    transformer.add_adapter(config)
    set_peft_model_state_dict(transformer, tensors)


# ---- sampling --------------------------------------------------------------------------------------------------------
def check_model(options: dict[str, Any], prompt_sets: Sequence[tuple[str, PromptSet]]) -> type[Family]:
    """The family of the options' model, which can make such images of these prompts.

    Raises:
        ValueError: it cannot; in one line that names the option, or the prompt.
    """
    height, width = options["image_size"]
    size = (height, width, options["num_frames"])
    length, own = options["max_sequence_length"], options.get("family")
    family = find_family(options["model"], *size, options["guidance_scale"], length, own)
    schedules = [("--num_inference_steps", options["num_inference_steps"], (height, width))]
    check_schedules(family, options["model"], schedules, options["num_frames"])
    check_sources(family.num_sources, prompt_sets)
    return family


def load(family: type[Family], options: dict[str, Any], device: torch.device | str) -> Family:
    """The options' model, whole on this device."""
    dtype, vae_dtype = getattr(torch, options["dtype"]), options.get("vae_dtype", "float32")
    model = load_model(family, options["model"], dtype, device, vae_dtype)
    if options.get("base_weights"):
        quantise_encoders(model)
        quantise(model, options["base_weights"])
    model.transformer.to(device)
    model.guidance_scale_2 = options.get("guidance_scale_2")
    return model


@torch.no_grad()
def sample(
    model: Family,
    prompts: PromptSet,
    seeds: Sequence[int],
    options: dict[str, Any],
    sde_steps: tuple[int, ...] = (),
    batch_size: int = 1,
) -> list:
    """An image of each prompt from its own seed, by Euler steps along the ODE, except for sde_steps.

    Those are of the options' sde_type and noise_level.
    """
    height, width = options["image_size"]
    length, num_frames = options["max_sequence_length"], options["num_frames"]
    guidance_scale = options["guidance_scale"]
    timesteps, sigmas, latent_shape = model.schedule(options["num_inference_steps"], height, width, num_frames)
    images: list = []
    for rows in torch.arange(len(prompts)).split(batch_size):
        part = prompts.select(rows)
        negatives = part.negatives(options.get("negative_prompt", ""))
        own_seeds = [seeds[row] for row in rows.tolist()]
        request = RolloutRequest(
            conditioning=model.encode(part, length, (height, width), num_frames),
            negative_conditioning=model.encode_negative(negatives, guidance_scale, length),
            prompt_index=torch.arange(len(rows)),
            seeds=own_seeds,
            timesteps=timesteps.to(model.device),
            sigmas=sigmas,
            latent_shape=latent_shape,
            height=height,
            width=width,
            sde_steps=sde_steps,
            guidance_scale=guidance_scale,
        )
        generators = [torch.Generator().manual_seed(seed) for seed in own_seeds]
        x = request.first_latents(generators, model.device)
        for i, (sigma, sigma_next) in enumerate(zip(sigmas.tolist(), sigmas[1:].tolist(), strict=False)):
            v = model.predict_velocity(
                x, request.timesteps[i], request.conditioning, request.negative_conditioning, guidance_scale
            )
            # an ODE step is the same of every kind, and needs no file of yours
            sde_type, noise_level = "sde", 0.0
            if i in sde_steps:
                sde_type, noise_level = options["sde_type"], options["noise_level"]
            x = sde_step(
                x,
                v,
                sigma,
                sigma_next,
                noise_level,
                sde_type=sde_type,
                sigma_max=request.sigma_max,
                generator=generators,
            ).prev_sample
        images += model.decode(x)
    return images


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number above 0")
    return int(text)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The options by which images differ from those of a run's evaluation."""
    parser.add_argument("--image_size", nargs=2, type=positive, help="height and width (default: as the run evaluates)")
    parser.add_argument("--num_inference_steps", type=positive, help="default: the run's --eval_num_inference_steps")
    parser.add_argument("--guidance_scale", type=float, help="default: as the run evaluates")
    parser.add_argument("--family", metavar="FILE.py:CLASS", help="as the scripts take it (default: the run's)")
    trust_help = "take a run's family from outside this checkout's runs/ too (SECURITY.md)"
    parser.add_argument("--trust_code", choices=("True", "False"), default="False", help=trust_help)
    parser.add_argument("--images_per_prompt", type=positive, default=1)
    parser.add_argument("--max_prompts", type=int, default=0, help="only the first so many; 0: all")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="RUN", help="a run, then runs, adapters, checkpoints")
    parser.add_argument("--prompts", required=True, help="a file or function, as --eval_prompts takes it")
    parser.add_argument("--output", type=Path, help="folder to write (default: samples_of_PROMPTS in the first run)")
    add_sampling_options(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    repair_torchvision()  # before diffusers is imported
    try:
        folder = run(args)
    except (ValueError, RunError, OSError) as error:
        sys.exit(f"tools.sample: error: {error}")
    print(f"{folder}/side_by_side.png")


def run(args: argparse.Namespace) -> Path:
    """Sample with the model and with each source. Returns the folder that holds the pictures."""
    given = (args.image_size, args.num_inference_steps, args.guidance_scale)
    options = as_evaluated(read_options(args.sources[0], args.family, args.trust_code == "True"), *given)
    folder = args.output or args.sources[0] / f"samples_of_{Path(args.prompts).stem}"
    if folder.exists():
        raise ValueError(f"{folder} exists already: choose another --output")
    lines = read_prompts(args.prompts, max_prompts=args.max_prompts)
    prompts = lines.select(row for row in range(len(lines)) for _ in range(args.images_per_prompt))
    seeds = [image_seed("eval", i % args.images_per_prompt, i // args.images_per_prompt) for i in range(len(prompts))]
    family = check_model(options, [("--prompts", lines)])
    policies = read_policies(args.sources, options["model"], "before")
    model = load(family, options, args.device)
    count_long_prompts(model.pipe, prompts.prompts, options["max_sequence_length"])
    pictures: dict[str, list] = {}
    if "image" in lines.metadata[0]:
        height, width = options["image_size"]
        for number, of_all in enumerate(zip(*prompts.sources(), strict=True), start=1):
            resized = [source.resize((width, height)) for source in of_all]
            # beside a video, which is shown as three of its frames, three times
            pictures[f"source {number}"] = resized if options["num_frames"] == 1 else [[one] * 3 for one in resized]
    with on_device(model, "text_encoder"), on_device(model, "image_encoder"), on_device(model, "vae"):
        pictures["before"] = sample(model, prompts, seeds, options)
        for name, policy in policies.items():
            with error_prefix(name, Exception):  # of another model
                use(model, *policy)
            pictures[name] = sample(model, prompts, seeds, options)
    write(folder, pictures, prompts.prompts)
    return folder


def write(folder: Path, pictures: dict[str, list], prompts: Sequence[str]) -> None:
    """Write every image, and side_by_side.png: a row for each image, a column for each policy."""
    names = [name.strip("/").replace("/", "_") for name in pictures]
    cells = []
    captions = []
    for name, images in zip(names, pictures.values(), strict=True):
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(images):
            save_png(folder / name / f"{number:05d}.png", image)
    for row, prompt in enumerate(prompts):
        for name, images in zip(names, pictures.values(), strict=True):
            cells.append(as_one_picture(images[row]))
            captions.append(f"{name}\n{prompt}")
    save_grid(folder / "side_by_side.png", cells, captions, columns=len(names))


if __name__ == "__main__":
    main()
