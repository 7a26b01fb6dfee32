"""A --model that is no folder, or a folder that has no family: the hub's index, or an error that says what to do."""

import re
from pathlib import Path

from common.errors import refusing

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import GatedRepoError

OTHER_TASKS = re.compile("Img2Img|Inpaint|ControlNet|Control|Fill|Edit|PAG")
OTHER_KINDS = re.compile(r"stable-diffusion-(xl|v1|2)|sdxl|sd-v1|sd15")


def download_index(model: str) -> Path:
    """The model_index.json of a hub id, in the hub's cache.

    Raises:
        ValueError: it is a file, or cannot be downloaded; of a gated model, in a line that says how it can.
    """
    if model.endswith(".gguf"):
        what = "a GGUF file holds quantised weights of a transformer alone"
        raise ValueError(f"--model {model}: {what}: pass the full weights, in diffusers' layout")
    if Path(model).is_file():
        convert = f'PIPELINE.from_single_file("{model}").save_pretrained("FOLDER")'
        raise ValueError(
            f"--model {model}: a single file: convert it, {convert}, where PIPELINE is diffusers' class, such as "
            "StableDiffusion3Pipeline, and pass FOLDER"
        )
    try:
        if model.startswith((".", "/", "~")) or model.count("/") > 1:  # a path, and no hub id
            raise ValueError(f"--model {model}: no such folder")
        with refusing(f"--model {model}: no such folder, and no model that can be downloaded"):
            return Path(hf_hub_download(model, "model_index.json"))
    except ValueError as error:
        if OTHER_KINDS.search(model.lower()):
            old = "it looks like a model of before flow matching, which is not supported"
            raise ValueError(f"{error}; {old}") from error
        if not isinstance(error.__cause__, GatedRepoError):
            raise
        how = "accept the licence on its page on the hub, and log in with `hf auth login` or HF_TOKEN"
        raise ValueError(f"--model {model}: it is gated; {how} (docs/quickstart_gpu.md)") from error


def explain_pipeline(pipeline: str, files: list[Path]) -> str:
    """Which families there are, and what may be done about a pipeline class without one. files: of common/models/."""
    known = []
    for file in files:  # wan_image_to_video.py is of a family: it has a class WanImageToVideo(...)
        classes = re.findall(r"^class (\w+)\((?!ABC|NamedTuple)", file.read_text("utf-8"), re.MULTILINE)
        if file.stem.replace("_", "") in map(str.lower, classes):
            known.append(file.stem)
    told = f"supported: {', '.join(known)}"
    plain = OTHER_TASKS.sub("", pipeline)
    if plain != pipeline and plain.lower().removesuffix("pipeline") in [stem.replace("_", "") for stem in known]:
        told += f'; if its weights are those of {plain}, change "_class_name" in its model_index.json to that'
    return told
