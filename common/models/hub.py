"""A model that is no folder: its index, from the hub."""

import re
from pathlib import Path

from common.errors import refusing

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import GatedRepoError

OTHER_KINDS = re.compile(r"stable-diffusion-(xl|v1|2)|sdxl|sd-v1|sd15")


def download_index(model: str) -> Path:
    """The model_index.json of a hub id, in the hub's cache.

    Raises:
        ValueError: it cannot be downloaded; of a gated model, in a line that says how it can.
    """
    try:
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
