"""What two results must share to stand in one table, as digests and plain values, for tools/bench.py.

Versions, the card and the engine are no part of it.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.data import PromptSet
from common.files.pictures import DECODING, StoredImage
from common.rewards import reward_settings
from common.rewards._networks import LOADED
from common.rewards.ocr import COMPARISON
from common.rewards.vlm_judge import QUESTION, QUESTION_OF_EDITS
from common.run.record import digest, find_contents
from common.run.resuming import resume_differences
from common.scoring import Reward
from common.user_code import code_file

import torch

Protocol = dict[str, Any]
OF_SAMPLING: tuple[str, ...] = (
    "image_size",
    "num_inference_steps",
    "guidance_scale",
    "max_sequence_length",
    "negative_prompt",
)
OF_SAMPLING += ("num_frames", "reward_frames", "dtype", "vae_dtype", "base_weights")


def short_digest(text: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]], other: object = None) -> str:
    """A digest of named tensors, on whatever device, and of something else that prints."""
    hashed = hashlib.blake2b(str(other).encode(), digest_size=8)
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def digest_prompts(prompts: PromptSet) -> str:
    """A digest of the prompts with their records, and of the pictures that these name."""

    def plain(value: object) -> str:
        return short_digest(DECODING + value.read_bytes().hex()) if isinstance(value, StoredImage) else str(value)

    return short_digest(json.dumps([prompts.prompts, prompts.metadata], sort_keys=True, default=plain))


def reward_protocol(names: Sequence[str], rewards: dict[str, Reward]) -> Protocol:
    """What scores depend on: rewards, the weights of their networks, users' files, and settings. Servers may move.

    names: as --reward has them. rewards: loaded, and so are their networks.
    """
    settings = reward_settings(rewards)
    contents = find_contents({"reward_settings": settings}, names)
    networks = [  # a NanoDet with its thresholds and classes
        digest_tensors(network.state_dict().items(), getattr(network, "settings", None)) for network in LOADED.values()
    ]
    package = importlib.util.find_spec("rapidocr") if any(name.startswith("ocr") for name in names) else None
    if package and package.origin:
        networks.append(digest(sorted(Path(package.origin).parent.glob("models/*.onnx"))))
    values = {variable: value for of_reward in settings.values() for variable, value in of_reward.items()}
    loaded = {name for name, _ in LOADED}  # digested by their tensors, whatever their files are
    hashed = loaded | {value for value in values.values() if Path(value).is_file()}  # a folder may be a server's
    rules = {"ocr_comparison": COMPARISON} if any(name.startswith("ocr") for name in names) else {}
    judges = [of_reward for name, of_reward in settings.items() if name.partition(":")[0] == "vlm_judge"]
    if not all(any(variable.endswith("_PROMPT") for variable in of_judge) for of_judge in judges):
        rules["judge_questions"] = digest([QUESTION, QUESTION_OF_EDITS])
    return rules | {
        "rewards": list(rewards),
        "reward_networks": sorted(networks),
        "reward_files": sorted(
            f"{Path(name).name}: {content}"
            for name, content in contents.items()
            if name.partition("=")[2] not in loaded
        ),
        "reward_settings": {k: v for k, v in values.items() if v not in hashed and not k.endswith("_URL")},
    }


def sampling_protocol(options: dict[str, Any]) -> Protocol:
    """How images are sampled. A user's --sde_type and --family, which are loaded, have the digests of their files, and
    the family its name; without such files the protocol has neither."""
    kind, family = options["sde_type"], options.get("family")
    own = [text for text in (kind if options["sde_steps"] else None, family) if text and code_file(text)]
    sampler = "ode"
    if options["sde_steps"]:
        name = Path(kind).name if kind in own else kind
        sampler = f"{name}, noise {options['noise_level']}, steps {options['sde_steps']}"
    protocol = {"sampler": sampler} | {name: options[name] for name in OF_SAMPLING}
    if options.get("guidance_scale_2") is not None:
        protocol["guidance_scale_2"] = options["guidance_scale_2"]
    if own:
        contents = find_contents({}, own)
        protocol["sampling_files"] = sorted(f"{Path(name).name}: {content}" for name, content in contents.items())
    if family and code_file(family):
        protocol["family"] = family.rpartition(":")[2]
    return protocol


def check_match(one: Protocol, other: Protocol, ignore: Sequence[str] = ()) -> None:
    """ValueError: two protocols differ, in one line that names how."""
    differences = resume_differences(one, other, ignore)
    if differences:
        raise ValueError(f"another protocol: {'; '.join(differences)}")
