"""The networks of rewards: found by an environment variable, loaded once for all rewards, moved if asked.

This is no reward; those with a network use it. REWARD_OFFLOAD=1 moves their networks from the GPU to the CPU's memory
between rollouts.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from common.errors import error_prefix
from common.models import check_reachable
from common.process import print_message

import torch
from huggingface_hub import constants, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import repo_folder_name

LOADED: dict[tuple[str, str], torch.nn.Module] = {}  # by hub id or folder, and the name of what read it
Source = tuple[str, str]  # an environment variable, and the hub id or folder that it names


def weights_of(variable: str, default: str) -> Source:
    """An environment variable with the hub id or folder that it names."""
    return variable, os.environ.get(variable) or default


def load_network(source: Source, read: Callable[[str], torch.nn.Module]) -> Any:  # as `read` makes it
    """What `read` makes of a source's hub id or folder, frozen, on own_device: once for all rewards that use it.

    Raises:
        ValueError: names the variable and what is wrong with the weights; or REWARD_OFFLOAD is neither 0 nor 1.
    """
    wants_offload()  # a wrong REWARD_OFFLOAD is refused here, before anything loads
    name = source[1]
    key = (name, read.__qualname__)
    if key not in LOADED:
        with refusing_weights(source):
            check_hub(name)
            print_message(f"loading {name}")
            LOADED[key] = read(name).requires_grad_(False).eval()
    return LOADED[key].to(own_device())


def check_hub(name: str) -> None:
    """ValueError: nothing of a hub id is in the cache, and the hub refuses the connection or has no address. Its
    clients would try again for more than a minute."""
    if Path(name).exists():
        return
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    if not cached.exists():
        check_reachable(hf_hub_url(name, "config.json"))


def read_whole(model_class: Any, name: str, kind: str) -> Any:  # a class of transformers, and one of it
    """The model of a hub id or folder, in fp32; raises ValueError if its files lack some of its tensors."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    # fp32, because "auto" would take the checkpoint's dtype
    model, found = model_class.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
    if found["missing_keys"]:  # transformers has filled them with random numbers
        raise ValueError(f"not a whole {kind}: {len(found['missing_keys'])} of its tensors are missing")
    return model


def find_file(name: str, file: str) -> Path:
    """`name` itself if it is a file, otherwise `file` in that folder or hub id."""
    path = Path(name)
    if path.is_file():
        return path
    return path / file if path.is_dir() else Path(hf_hub_download(name, file))


def refusing_weights(source: Source) -> AbstractContextManager[None]:
    """Inside the block, any error over missing or broken weights becomes a ValueError of one line."""
    variable, name = source
    return error_prefix(f"cannot load {variable}={name}, set it to a hub id or a folder", Exception)


def own_device() -> torch.device:
    """This rank's GPU, which is the current device of every thread that calls rewards; without a GPU the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def offload() -> None:
    """Move the networks to the CPU until they are needed again, if REWARD_OFFLOAD is 1."""
    if wants_offload():
        for model in LOADED.values():
            model.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def wants_offload() -> bool:
    """Whether REWARD_OFFLOAD is 1; raises ValueError if it is neither 1 nor 0."""
    value = os.environ.get("REWARD_OFFLOAD", "").strip() or "0"
    if value not in ("0", "1"):
        raise ValueError(f"REWARD_OFFLOAD={value}: must be 0 or 1")
    return value == "1"
