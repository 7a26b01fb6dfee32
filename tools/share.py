"""A folder with a run's policy as the hub takes it: weights, a model card and images. It is uploaded if you say where.

    python -m tools.share runs/mine --license apache-2.0
    python -m tools.share runs/mine --best --to user/name

The folder holds the LoRA with diffusers' names, or a transformer/ of full weights; README.md, the model card; the first
prompts of the evaluation before and after training. Nothing leaves this machine without --to, and no network is needed.
--to makes a new repository on the hub, which is private unless you add --public, and asks the hub for the base model's
licence and whether it is gated. A card names no folder of this machine: of a path outside of the checkout it has the
last part.
"""

import argparse
import ast
import inspect
import json
import math
import os
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.cpu import repair_torchvision
from common.errors import RunError, error_prefix
from common.files import checkpoint_step, saved_checkpoints, writing
from common.images import as_one_picture, open_png, save_png
from common.models import known_folder
from common.options import ASSETS
from common.run.plots import save_grid
from common.run.record import digest, script_source
from common.run.recorded_options import CHECKOUT, from_root
from common.run.resuming import newest_record, records_of, step_of_best
from common.weights.lora import LORA_FILES
from tools.bench import as_markdown
from tools.compare import mean_interval
from tools.protocol import digest_tensors
from tools.report import evaluation_differences, made_of, read_lines
from tools.sample import as_evaluated, read_options, read_policy

import httpx
from huggingface_hub import HfApi, ModelCard, ModelCardData, constants
from huggingface_hub.utils import validate_repo_id
from PIL import Image

FULL_WEIGHTS = "diffusion_pytorch_model.safetensors"
SHOWN = 8  # prompts of before_after.png
IN_A_ROW = 4
IN_THE_WIDGET = 4  # images beside the card
WIDEST = 384  # pixels of an image of before_after.png
COUNT_FROM_0 = ("Krea2Pipeline", "ZImagePipeline")  # pipelines whose guidance scale is ours minus 1
HUB_ERRORS = (OSError, ValueError, httpx.HTTPError)
TO_BE_NAMED = "your-name/your-model"  # in the card's code, without --to


# ---- what the run has ------------------------------------------------------------------------------------------------
class Policy(NamedTuple):
    """The weights that are shared."""

    folder: Path
    step: int  # the training step that they are of
    is_lora: bool

    @property
    def files(self) -> list[Path]:
        """One, or of a LoRA of two transformers up to two; none where there are no weights."""
        names = LORA_FILES.values() if self.is_lora else [FULL_WEIGHTS]
        return [self.folder / name for name in names if (self.folder / name).is_file()]


def find_policy(run: Path, is_best: bool) -> Policy:
    """A run's adapter/ or best_adapter/. ValueError: it has none, or they are of step 0 or of a step that
    is not known."""
    folder = run / ("best_adapter" if is_best else "adapter")
    policy = Policy(folder, 0, is_lora=any((folder / name).is_file() for name in LORA_FILES.values()))
    if not policy.files:
        raise ValueError(f"{folder}: has no weights; a run writes them with its checkpoints")
    step = step_of_best(run) if is_best else last_saved_step(run, policy.is_lora)
    if not 0 < step < math.inf:
        what = "from before training, which changes nothing" if step == 0 else "of a step that is not known"
        raise ValueError(f"{folder}: its weights are {what}")
    if is_best and not json.loads((folder / "best.json").read_text(encoding="utf-8")).get("is_saved", True):
        told = f"the run has not saved those of step {step:g}: if it has ended, resume it, which chooses again"
        raise ValueError(f"{folder}: its weights may be of an earlier step, as {told}")
    return policy._replace(step=int(step))


def last_saved_step(run: Path, is_lora: bool) -> int:
    """The step of adapter/: that at which the run ended or, of a LoRA, which each checkpoint writes, the newest
    checkpoint's. ValueError: neither is known."""
    file = run / "heartbeat.json"
    if file.is_file():
        with error_prefix(file, Exception):
            beat = json.loads(file.read_text(encoding="utf-8"))
            if beat["phase"] in ("finished", "stopped"):
                return int(beat["step"])
    saved = saved_checkpoints(run)
    if not is_lora or not saved:
        raise ValueError(f"{run}: the step of adapter/ is not known, as the run has not ended: resume it first")
    return checkpoint_step(saved[-1])


class Pair(NamedTuple):
    """A prompt's image at step 0 and at a later evaluation, from the same noise, as records of samples.jsonl."""

    before: dict
    after: dict
    files: tuple[Path, Path]


def read_pairs(run: Path, step: int) -> tuple[int, list[Pair]]:
    """The last evaluation up to `step`, and its images beside those of step 0, where both have the prompt and the seed;
    (0, []) where there is no such evaluation. ValueError: a file cannot be read."""
    found = [path.parent for path in run.glob("samples/*/samples.jsonl") if path.parent.name.isdecimal()]
    folders = {int(folder.name): folder for folder in found}
    last = max((number for number in folders if number <= step), default=0)
    if 0 not in folders or last == 0:
        return 0, []
    unread: list[str] = []
    before, after = (read_lines(folders[number] / "samples.jsonl", unread) for number in (0, last))
    pairs = []
    with error_prefix(folders[last] / "samples.jsonl", Exception):  # whatever a record holds
        firsts = {made_of(record): record for _, record in before}
        for _, record in after:
            if first := firsts.get(made_of(record)):
                files = (folders[0] / first["file"], folders[last] / record["file"])
                pairs.append(Pair(first, record, files))
    if unread:
        raise ValueError(unread[0])
    return last, pairs


# ---- what the card says of the base model ----------------------------------------------------------------------------
class Base(NamedTuple):
    """The model that was trained."""

    name: str  # its hub id, or a folder of assets/
    is_on_hub: bool
    license: dict[str, Any]  # the fields license, license_name and license_link of its own card
    is_gated: bool


def find_base(model: str, hub_id: str | None, asks_hub: bool) -> Base:
    """The base model by its hub id, and what its card says, as a folder or the cache has it or, if asked, the hub.

    Raises:
        ValueError: a folder's hub id is not given; or the hub does not know it, or cannot be asked.
    """
    is_on_hub = hub_id is not None or not Path(model).is_dir()
    name = hub_id or from_root(model)
    if not is_on_hub and not Path(model).resolve().is_relative_to(ASSETS.resolve()):
        raise ValueError(f"--base_model: needed, as {model} is a folder of this machine: what is its hub id?")
    said: dict[str, Any] = {}
    folder = known_folder(model)
    if folder and (folder / "README.md").is_file():
        with error_prefix(folder / "README.md", Exception):
            said = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
    is_gated = any(field.startswith("extra_gated") for field in said)
    if is_on_hub:
        with error_prefix(f"--base_model {name}", HUB_ERRORS):
            validate_repo_id(name)
            if asks_hub:
                info = HfApi().model_info(name)
                said = info.card_data.to_dict() if info.card_data else {}
                is_gated = bool(info.gated)
    fields = {field: said[field] for field in ("license", "license_name", "license_link") if said.get(field)}
    link = fields.get("license_link")
    if link and "://" not in link:  # a file of the base model's repository
        fields["license_link"] = f"{constants.ENDPOINT}/{name}/blob/main/{link}"
    return Base(name, is_on_hub, fields if "license" in fields else {}, is_gated)


def choose_license(name: str | None, link: str | None, base: Base) -> dict[str, Any]:
    """The card's fields of the licence: those given, otherwise the base model's. ValueError: it is not known."""
    if name is None:
        if link:
            raise ValueError("--license_link: pass --license too, the name of that licence")
        if not base.license:
            raise ValueError(f"--license: needed, as the licence of {base.name} is not known here")
        return base.license
    if link:
        return {"license": "other", "license_name": name, "license_link": link}
    if name == "other":
        raise ValueError("--license other: name it, and pass --license_link with its address")
    return {"license": name}


# ---- the code that loads it ------------------------------------------------------------------------------------------
class Usage(NamedTuple):
    """How the policy is loaded in diffusers, and called as the run's evaluation was."""

    code: str
    task: str  # the hub's word for what the pipeline does


def usage_of(policy: Policy, base: Base, options: dict[str, Any], prompt: str, num_sources: int, source: str) -> Usage:
    """source: the hub id of what is shared. num_sources: images that a prompt of an edit has.

    Raises:
        ValueError: the model's files are not here, or diffusers has no such pipeline.
    """
    import diffusers  # slow

    folder = known_folder(options["model"])
    if folder is None:
        raise ValueError(f"--model {options['model']}: not on this machine, where its model_index.json is read")
    with error_prefix(folder / "model_index.json", Exception):
        pipeline = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
        takes = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    with error_prefix(folder / "transformer" / "config.json", Exception):
        config = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
    arguments = call_arguments(pipeline, takes, config, options, prompt, num_sources)
    dtype = f"torch.{options['dtype']}"
    names = [pipeline] if policy.is_lora else sorted([pipeline, config["_class_name"]])
    lines = ["import torch", f"from diffusers import {', '.join(names)}"]
    if pipeline == "QwenImageEditPlusPipeline":  # whose sources have no option for their size
        lines.append("from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus")
    helpers = ["export_to_video"] if "num_frames" in takes else []
    helpers += ["load_image"] if num_sources else []
    if helpers:
        lines.append(f"from diffusers.utils import {', '.join(helpers)}")
    lines.append("")
    if pipeline == "QwenImageEditPlusPipeline":
        height, width = options["image_size"]
        lines.append(f"pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE = {height} * {width}")
    if policy.is_lora:
        lines.append(f'pipe = {pipeline}.from_pretrained("{base.name}", dtype={dtype})')
        first, second = LORA_FILES.values()
        for name in [file.name for file in policy.files]:
            where = {first: "", second: ", load_into_transformer_2=True"}[name]
            weight = "" if policy.files[-1].name == first else f', weight_name="{name}"'
            lines.append(f'pipe.load_lora_weights("{source}"{weight}{where})')
    else:
        loaded = f'{config["_class_name"]}.from_pretrained("{source}", subfolder="transformer", dtype={dtype})'
        lines.append(f"transformer = {loaded}")
        lines.append(f'pipe = {pipeline}.from_pretrained("{base.name}", transformer=transformer, dtype={dtype})')
    lines.append('pipe.to("cuda" if torch.cuda.is_available() else "cpu")')
    lines += ["made = pipe(", *(f"    {name}={value!r}," for name, value in arguments.items()), ")"]
    if "num_frames" in takes:
        lines.append('export_to_video(made.frames[0], "video.mp4", fps=16)')
        task = "image-to-video" if num_sources else "text-to-video"
    else:
        lines.append('made.images[0].save("image.png")')
        task = "image-to-image" if num_sources else "text-to-image"
    return Usage("\n".join(lines), task)


def call_arguments(
    pipeline: str,
    takes: Collection[str],
    config: dict[str, Any],
    options: dict[str, Any],
    prompt: str,
    num_sources: int,
) -> dict[str, Any]:
    """The arguments of the pipeline's call for the size, steps and guidance of these options.

    takes: names of the arguments that it has. config: the transformer's.
    """
    height, width = options["image_size"]
    arguments: dict[str, Any] = {"prompt": prompt, "height": height, "width": width}
    if num_sources:
        names = [f"source{number or ''}.png" for number in range(num_sources)]
        opened = [f'load_image("{name}").resize(({width}, {height}))' for name in names]
        arguments = {"image": Code(opened[0] if num_sources == 1 else f"[{', '.join(opened)}]")} | arguments
    if "max_area" in takes:  # FLUX.1 Kontext would make about a million pixels
        arguments |= {"max_area": height * width, "_auto_resize": False}
    if "num_frames" in takes:
        arguments["num_frames"] = options["num_frames"]
    arguments["num_inference_steps"] = options["num_inference_steps"]
    scale = options["guidance_scale"]
    if "true_cfg_scale" in takes and not config.get("guidance_embeds"):  # a second pass, which needs a negative prompt
        arguments |= {"true_cfg_scale": scale}
        arguments |= {"negative_prompt": options["negative_prompt"]} if scale > 1 else {}
    else:
        arguments["guidance_scale"] = scale - 1 if pipeline in COUNT_FROM_0 else scale
        if options.get("guidance_scale_2") is not None:
            arguments["guidance_scale_2"] = options["guidance_scale_2"] if scale > 1 else scale
        if options["negative_prompt"] and "negative_prompt" in takes:
            arguments["negative_prompt"] = options["negative_prompt"]
    if "max_sequence_length" in takes:
        arguments["max_sequence_length"] = options["max_sequence_length"]
    return arguments


class Code(str):
    """A text that is code: its repr has no quotes."""

    def __repr__(self) -> str:
        return str(self)


# ---- the card's tables -----------------------------------------------------------------------------------------------
def public_path(text: str) -> str:
    """A path, also behind NAME=, as others may read it: from the checkout's root, otherwise its last part. A relative
    one is taken from there, and is cut only where it leads outside. Any other text stays as it is."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        name, equals, path = "", "", text
    path = from_root(path)
    is_inside = not os.path.isabs(path) and Path(os.path.normpath(CHECKOUT / path)).is_relative_to(CHECKOUT)
    return name + equals + (path if is_inside else Path(path).name)


def evaluation_table(pairs: Sequence[Pair]) -> list[str]:
    """A row for each reward: its mean over prompts before and after, and the difference with its interval."""
    names = {name: None for pair in pairs for name, value in pair.after.items() if isinstance(value, float)}
    rows = []
    for name in names:
        groups: dict[tuple[object, str], list[tuple[float, float]]] = {}  # by record and what it holds
        for pair in pairs:
            before, after = pair.before.get(name), pair.after.get(name)
            if isinstance(before, float) and isinstance(after, float):  # None: the reward failed
                held = json.dumps([pair.after.get(field) for field in ("prompt", "metadata", "image")], sort_keys=True)
                groups.setdefault((pair.after["group"], held), []).append((before, after))
        means = [tuple(map(statistics.fmean, zip(*scores, strict=True))) for scores in groups.values()]
        kinds = {held: number for number, (_, held) in enumerate(groups)}
        differences, rows_of_all = [after - before for before, after in means], [list(range(len(means)))]
        interval = mean_interval(differences, rows_of_all, [kinds[held] for _, held in groups])
        if interval is None:
            continue
        difference, low, high = interval
        told = f"{difference:+.3f}" + (" (no interval)" if low is None else f" [{low:+.3f}, {high:+.3f}]")
        before, after = map(statistics.fmean, zip(*means, strict=True))
        rows.append(f"| {name} | {before:.3f} | {after:.3f} | {told} |")
    return ["| reward | before | after | difference |", "|---|---|---|---|", *rows] if rows else []


def bench_tables(folder: Path, policy: Policy, model: str) -> list[str]:
    """The tables of a bench (tools.bench), of the base model and this policy alone.

    Raises:
        ValueError: the folder is no bench's, or it has no result of exactly these weights.
    """
    file = folder / "bench.json"
    tensors, config = read_policy(policy.folder, model)  # by whose names the bench has read them
    wanted = digest_tensors(tensors.items(), config and (config.r, config.lora_alpha))
    parts = []
    with error_prefix(f"--bench {file}", Exception):  # whatever it holds
        benches = json.loads(file.read_text(encoding="utf-8"))["benches"]
        for bench in benches:
            base, *others = bench["results"]
            found = [result["policy"] for result in others if result["key"].rpartition("-")[2] == wanted]
            if not found:
                raise ValueError(f"has no result of {policy.files[0]}: its policies are of other weights")
            shown = [base["policy"], found[0]]
            rows = [row for row in bench["table"] if row["policy"] in shown]
            settings = {name: public_path(value) for name, value in bench["protocol"]["reward_settings"].items()}
            protocol = bench["protocol"] | {"reward_settings": settings}
            text = as_markdown(public_path(bench["label"]), protocol, rows, ["base", "these weights"])
            parts.append(f"#{text}")  # a heading of the third level
    return parts


# ---- the card's sections ---------------------------------------------------------------------------------------------
def loading_section(usage: Usage, policy: Policy, base: Base, is_gated: bool, options: dict[str, Any]) -> list[str]:
    """The code, and what its reader must know."""
    lines = ["```python", usage.code, "```", ""]
    lines.append("Size, steps and guidance are those of the run's evaluation. See below for the versions of libraries.")
    if "load_image" in usage.code:
        lines.append("`source.png` is an image of yours, brought to the size of training.")
    if is_gated:
        lines.append("The base model is gated: accept its licence on its page, and log in with `hf auth login`.")
    if not base.is_on_hub:
        lines.append(f"`{base.name}` is a folder of CleanFlow's checkout: run the code there.")
    if not policy.is_lora:
        lines.append("This repository has the transformer alone. The other parts are the base model's.")
    else:
        lines.append("Ignore diffusers' lines about keys of text encoders: only the transformer was trained.")
    if policy.is_lora and options.get("base_weights"):
        lines.append("The LoRA was trained over a quantised base model; the code loads it on the full weights.")
    return lines


def images_section(num_prompts: int, step: int, policy: Policy) -> list[str]:
    """before_after.png, and what it shows."""
    lines = ["![Images before training and after it](before_after.png)", ""]
    lines.append(
        f"The first of the {num_prompts} prompts that the run evaluated, before training and after step {step},"
    )
    lines.append("from the same noise. They were not chosen.")
    if step != policy.step:
        lines.append(f"The weights are those of step {policy.step}, which has no evaluation.")
    return lines


def results_section(pairs: Sequence[Pair], step: int, is_best: bool, bench: Sequence[str]) -> list[str]:
    """The scores of the run's evaluation, and the tables of a bench; [] where there are none."""
    lines = []
    table = evaluation_table(pairs)
    if table:
        lines = [*table, ""]
        lines.append(
            f"Means over the prompts of the run's evaluation, before training and after step {step}. In brackets:"
        )
        lines.append(
            "the 95 % interval of the difference, over prompts, from the same noise. It does not speak of another"
        )
        lines.append("training run.")
        if is_best:
            lines.append("This evaluation was chosen because its score is the run's highest, so that it flatters.")
    if bench:
        told = "Measured by `tools.bench`: the base model, these weights, and their difference with its interval."
        lines += ["", told, "", *bench]
    return lines


def training_section(run: Path, record: dict, options: dict[str, Any], algorithm: str) -> list[str]:
    """What was trained, by what, on what, and the command of each start."""
    weights = options.get("reward_weights") or ()
    rewards = [
        f"`{public_path(name)}`" + (f" (weight {weight:g})" if weight != 1 else "")
        for name, weight in zip(options.get("reward") or (), weights, strict=False)
    ]
    trained = f"a LoRA of rank {options['lora_rank']}" if options["lora_rank"] else "all weights of the transformer"
    if options.get("lora_path"):
        trained += f", begun from `{public_path(options['lora_path'])}`"
    if options.get("base_weights"):
        trained += f", over the base model in {options['base_weights']}"
    height, width = options["image_size"]
    frames = f", {options['num_frames']} frames" if options["num_frames"] > 1 else ""
    lines = [f"- algorithm: {algorithm}", f"- reward: {', '.join(rewards) or 'none'}", f"- trained: {trained}"]
    # a script of records, or of given pairs, reads no training prompts
    trained_on = next(name for name in ("records", "pairs", "train_prompts") if options.get(name) or "train" in name)
    for name, told in ((trained_on, trained_on.replace("train_", "")), ("eval_prompts", "held-out prompts")):
        given = options.get(name) or ()
        files = [f"`{public_path(text)}`" for text in ([given] if isinstance(given, str) else given)]
        lines.append(f"- {told}: {', '.join(files) or 'none'}")
    lines.append(f"- size: {height} x {width} pixels (height x width){frames}")
    if "learning_rate" in options:
        lines.append(f"- learning rate: {options['learning_rate']:g}")
    lines.append(f"- commit of CleanFlow: `{record.get('git_hash')}`")
    if record.get("script_git_hash"):
        lines.append(f"- commit of the script's own repository: `{record['script_git_hash']}`")
    versions = [f"{name} {version}" for name, version in record.get("versions", {}).items()]
    lines += [f"- versions: {', '.join(versions)}", f"- machine: {record.get('device')}"]
    commands = []
    for file in records_of(run):
        with error_prefix(file, Exception):
            words = shlex.split(json.loads(file.read_text(encoding="utf-8"))["command"])
        commands.append(shlex.join(map(public_path, words)))
    return [*lines, "", "Started by, without torchrun's own options:", "", "```", *commands, "```"]


def files_section(record: dict, policy: Policy) -> list[str]:
    """A row for each file that the run read, and for the weights that it wrote."""
    rows = []
    for name, content in record.get("contents", {}).items():
        option, space, text = name.partition(" ")
        shown = f"{option} {public_path(text)}" if space and option.startswith("--") else public_path(name)
        if name.startswith("code/"):  # its path may begin at the root of a disk
            shown = f"code {Path(name).name}"
        rows.append(f"| `{shown}` | {content} |")
    rows += [f"| `{file.name}` | {digest([file])} |" for file in policy.files]
    note = "The digest of what is above 64 MiB is that of 64 pieces of it."
    return ["| read or written | size and digest |", "|---|---|", *rows, "", note]


def license_section(own: dict[str, Any], base: Base) -> list[str]:
    """The names of both licences, where they differ."""
    lines = [f"{license_name(own)}."]
    if base.license and base.license != own:
        lines.append(f"The base model's is {license_name(base.license)}.")
    return lines


def license_name(fields: dict[str, Any]) -> str:
    """What a card's fields call the licence, as a link where they have one."""
    name = str(fields.get("license_name", fields["license"]))
    return f"[{name}]({fields['license_link']})" if "license_link" in fields else name


def algorithm_of(run: Path, script: str) -> str:
    """ "Flow-GRPO (arXiv 2505.05470v5), by `flow_grpo.py`": what the script's docstring begins with, and its name."""
    with error_prefix(run / "source.py", Exception):
        docstring = ast.get_docstring(ast.parse((run / "source.py").read_text(encoding="utf-8"))) or ""
    title = docstring.partition("\n")[0].partition(":")[0].rstrip(".")
    return f"{title}, by `{script}`" if title else f"`{script}`"


# ---- the folder ------------------------------------------------------------------------------------------------------
def write_weights(folder: Path, policy: Policy) -> None:
    """Copy the weights to where diffusers looks for them."""
    if policy.is_lora:
        for file in policy.files:
            shutil.copyfile(file, folder / file.name)
        return
    (folder / "transformer").mkdir()
    for name in (FULL_WEIGHTS, "config.json"):
        shutil.copyfile(policy.folder / name, folder / "transformer" / name)


def write_images(folder: Path, pairs: Sequence[Pair]) -> list[dict]:
    """Write before_after.png and the images of the card's widget, whose field is returned."""
    shown = pairs[: min(SHOWN, len(pairs) // IN_A_ROW * IN_A_ROW or len(pairs))]
    columns = min(IN_A_ROW, len(shown))
    cells: list[Image.Image] = []
    captions: list[str] = []
    for first in range(0, len(shown), columns):
        for number, name in enumerate(("before", "after")):  # a row of each
            for pair in shown[first : first + columns]:
                image = as_one_picture(open_png(pair.files[number]))
                image.thumbnail((WIDEST, WIDEST * image.height))
                cells.append(image)
                record = (pair.before, pair.after)[number]
                scores = [f"{key} {value:.2f}" for key, value in record.items() if isinstance(value, float)]
                captions.append(f"{' '.join(record['prompt'].split())}\n{name}  {'  '.join(scores)}")
    save_grid(folder / "before_after.png", cells, captions, columns=columns)
    (folder / "images").mkdir()
    widget = []
    for number, pair in enumerate(shown[:IN_THE_WIDGET]):
        name = f"images/{number}.png"
        save_png(folder / name, as_one_picture(open_png(pair.files[1])))
        widget.append({"text": pair.after["prompt"], "output": {"url": name}})
    return widget


def make_folder(folder: Path, args: argparse.Namespace) -> None:
    """Write all that is shared to an empty folder.

    Raises:
        ValueError: something that a card must say is not known, or a file of the run cannot be read.
    """
    run: Path = args.run
    if not (run / "args.json").is_file():
        raise ValueError(f"{run}: no run (it has no args.json)")
    options = as_evaluated(read_options(run, trusts_code=True), None, None, None)  # which runs none
    record = json.loads(newest_record(run).read_text(encoding="utf-8"))
    policy = find_policy(run, args.best)
    digests = [digest([file]) for file in policy.files]
    if policy.is_lora:
        read_policy(policy.folder, None)  # refuses what is damaged or not finite
    base = find_base(options["model"], args.base_model, asks_hub=args.to is not None)
    own_license = choose_license(args.license, args.license_link, base)
    step, pairs = read_pairs(run, policy.step)
    prompt = pairs[0].after["prompt"] if pairs else "a prompt of yours"
    num_sources = len(pairs[0].after.get("image", ())) if pairs else 0
    usage = usage_of(policy, base, options, prompt, num_sources, args.to or TO_BE_NAMED)
    if not pairs:
        print(f"{run}: no images and no scores, which need an evaluation of step 0 and one up to step {policy.step}")
    elif changed := evaluation_differences(run, 0, step):
        pairs = []
        evaluated = f"the evaluations of steps 0 and {step} cannot be compared"
        print(f"{run}: no images and no scores, as {evaluated}: between them a resume changed {'; '.join(changed)}")
    tables = bench_tables(args.bench, policy, options["model"]) if args.bench else []
    if not args.bench and (run / "bench" / "bench.json").is_file():
        try:
            tables = bench_tables(run / "bench", policy, options["model"])
        except ValueError as error:  # it may be of the best adapter, where the last one is shared
            print(f"left out: {error}")
    script = (script_source(record.get("contents", {})) or "a script").removeprefix("source ")
    algorithm = algorithm_of(run, script)

    write_weights(folder, policy)
    widget = write_images(folder, pairs) if pairs else []
    sections = {
        "Use": loading_section(usage, policy, base, base.is_gated or args.gated, options),
        "Before and after": images_section(len({pair.after["group"] for pair in pairs}), step, policy) if pairs else [],
        "Results": results_section(pairs, step, args.best, tables),
        "Training": training_section(run, record, options, algorithm),
        "Files": files_section(record, policy),
        "Licence": license_section(own_license, base),
    }
    copies = [digest([folder / ("" if policy.is_lora else "transformer") / file.name]) for file in policy.files]
    if copies != digests or find_policy(run, args.best) != policy:  # a run that goes on has saved meanwhile
        raise ValueError(f"{policy.folder}: its weights have changed while they were shared: give the command again")
    what = "A LoRA for" if policy.is_lora else "The transformer of"
    steps = f"{policy.step} step{'s' if policy.step > 1 else ''}"
    about = f"{what} `{base.name}`, trained for {steps} with CleanFlow: {algorithm}."
    title = args.to.partition("/")[2] if args.to else run.resolve().name
    parts = [f"# {title}", about]
    parts += [f"## {heading}\n\n" + "\n".join(lines) for heading, lines in sections.items() if lines]
    text = "\n\n".join(parts)
    fields = dict(own_license)
    if base.is_on_hub:
        fields |= {"base_model": base.name, "base_model_relation": "adapter" if policy.is_lora else "finetune"}
    fields |= {"library_name": "diffusers", "pipeline_tag": usage.task}
    fields["tags"] = ["diffusers", "cleanflow", Path(script).stem, *(["lora"] if policy.is_lora else [])]
    fields["widget"] = widget or None
    data = ModelCardData(**fields)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(folder / "README.md")


# ---- the program -----------------------------------------------------------------------------------------------------
def upload(folder: Path, to: str, is_public: bool) -> str:
    """Make a repository of the hub, and upload the folder to it. Returns its address.

    Raises:
        ValueError: the hub refuses, for example as the repository exists already; the folder stays.
    """
    with error_prefix(f"{folder} is ready, but --to {to}", HUB_ERRORS):
        address = HfApi().create_repo(to, private=not is_public)
        HfApi().upload_folder(repo_id=to, folder_path=folder, commit_message="Share a policy trained with CleanFlow")
    return str(address)


def share(args: argparse.Namespace) -> str:
    """Make the folder and, with --to, upload it. Returns what to print."""
    folder: Path = args.output or args.run / "share"
    if folder.exists():
        raise ValueError(f"{folder} exists already: remove it, choose another --output, or run `hf upload ID {folder}`")
    if args.to is None and args.public:
        raise ValueError("--public: pass --to as well")
    if args.to is not None:
        with error_prefix(f"--to {args.to}"):
            if "/" not in args.to:
                raise ValueError("write user/name")
            validate_repo_id(args.to)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".share.") as temporary:
            made = Path(temporary) / "share"
            made.mkdir()
            make_folder(made, args)
            made.rename(folder)  # whole, or not there
    if args.to is None:
        return f"{folder}/README.md; to upload the folder: hf upload {TO_BE_NAMED} {folder} --private"
    return f"{folder}/README.md; uploaded to {upload(folder, args.to, args.public)}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.share", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--to", metavar="USER/NAME", help="upload to this new repository of the hub")
    parser.add_argument("--public", action="store_true", help="let everybody read that repository (default: private)")
    parser.add_argument("--best", action="store_true", help="share best_adapter/ (default: adapter/, the last one)")
    parser.add_argument("--license", metavar="NAME", help="the hub's word, such as apache-2.0 (default: the base's)")
    parser.add_argument("--license_link", metavar="URL", help="of a licence for which the hub has no word")
    parser.add_argument(
        "--base_model", metavar="USER/NAME", help="the hub id of the run's --model, where it is a folder"
    )
    parser.add_argument("--gated", action="store_true", help="the base model is gated (with --to the hub says so)")
    parser.add_argument(
        "--bench", type=Path, metavar="FOLDER", help="of tools.bench (default: RUN/bench if it is there)"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: RUN/share")
    args = parser.parse_args(argv)
    repair_torchvision()  # before diffusers is imported
    try:
        print(share(args))
    except (ValueError, OSError, RunError) as error:
        sys.exit(f"tools.share: error: {error}")


if __name__ == "__main__":
    main()
