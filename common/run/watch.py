"""Signs of reward hacking that no reward sees: how different a prompt's images are, and how far images drift."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.data import gather_shares
from common.distributed import gather, gather_groups, gather_objects, on_rank_0
from common.errors import UNREADABLE
from common.images import as_one_picture, open_png
from common.metrics import diversity, rms_difference, small_pictures
from common.process import print_message
from common.rollout import Images

import torch

# options that decide an evaluation's images beside weights, prompts, seeds, size and guidance
SAMPLED_BY = (
    "eval_num_inference_steps",
    "negative_prompt",
    "guidance_scale_2",
    "max_sequence_length",
    "dtype",
    "vae_dtype",
    "base_weights",
)


# ---- an evaluation ---------------------------------------------------------------------------------------------------
def watch_metrics(
    folder: Path, places: list[int], images: Images, images_per_prompt: int, options: dict[str, Any] | None
) -> dict[str, torch.Tensor]:
    """val/diversity (with several images per prompt) and val/drift_from_base of an evaluation in RUN/samples/STEP.

    The drift is the mean rms_difference between an image and the image of the same prompt and seed at step 0. A line
    says why where there is none to compare with; the metric is then missing. options: the run's, which must have
    sampled step 0 in the same way; None where there is no step 0 to look for. places (B,) and images: as save_samples
    took them. A collective; the metrics are the same on all ranks.
    """
    pictures = small_pictures(images)  # (B, D)
    num_images = int(gather(torch.tensor(places)).max()) + 1
    metrics = {}
    if images_per_prompt > 1:
        groups, _ = gather_groups(pictures, torch.tensor(places), images_per_prompt)
        metrics["val/diversity"] = gather(diversity(groups).sum()).sum() / (num_images // images_per_prompt)
    if options is None:
        return metrics
    base = gather_objects(_find_base(folder, options) if on_rank_0() else None)[0]
    before = None
    if base is not None:
        with suppress(Exception):  # a library reads them, which can raise nearly anything
            images_before = [open_png(base / f"{place:05d}.png") for place in places]
            if as_one_picture(images_before[0]).size == as_one_picture(images[0]).size:
                before = small_pictures(images_before)
    if not all(gather_objects(before is not None)):
        if on_rank_0():
            needed = "images of step 0 of the same prompts, seeds, size and sampling that can be read"
            print_message(f"no val/drift_from_base: neither {folder.parents[1]} nor a run that it resumes has {needed}")
        return metrics
    assert before is not None
    moved = gather_shares(rms_difference(pictures, before), num_images)  # (all images,)
    metrics["val/drift_from_base"] = moved.mean()
    return metrics


def _find_base(folder: Path, options: dict[str, Any]) -> Path | None:
    """The folder of step 0's images, if they are of the same prompts and seeds, and were sampled in the same way."""
    base = base_samples(folder.parents[1])
    if base is None:
        return None
    try:
        before = json.loads((base.parents[1] / "args.json").read_text())["args"]
        is_same = _made_of(base) == _made_of(folder) and _sampling(before) == _sampling(options)
    except (*UNREADABLE, KeyError, TypeError):
        return None
    return base if is_same else None


def _sampling(options: dict[str, Any]) -> list:
    """The values of SAMPLED_BY, and the guidance of evaluations."""
    guidance = options.get("eval_guidance_scale")
    return [*map(options.get, SAMPLED_BY), options.get("guidance_scale") if guidance is None else guidance]


def base_samples(run: Path) -> Path | None:
    """samples/0000 of a run; where it has none, of the run that it was started from, and so on; or None."""
    seen = set()
    while run not in seen:
        seen.add(run)
        samples = run / "samples" / "0000"
        if (samples / "samples.jsonl").is_file():
            return samples
        try:
            resume = json.loads((run / "args.json").read_text())["args"]["resume"]
        except (*UNREADABLE, KeyError, TypeError):
            return None
        if resume not in (None, "latest"):
            resume = Path(resume).absolute()
            run = resume.parents[1] if resume.suffix == ".pt" else resume
    return None


def _made_of(folder: Path) -> list[tuple]:
    """The (prompt, seed) of every image of an evaluation, by place."""
    records = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return [(record["prompt"], record["seed"]) for record in records]
