"""Checkpoints that are complete or not there."""

import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

from common.distributed import on_rank_0
from common.errors import RunError, reason, truncate
from common.files.disk import atomic_file

import torch

FORMAT = 5  # of args.json and of checkpoints; a file of another format is refused (`check_format`)
IS_FOLDER = 0x10  # the bit of a zip record's attributes that marks a folder


# ---- writing and reading one -----------------------------------------------------------------------------------------
def checkpoint_step(path: Path | str) -> int:
    """The step of a file named step_000030.pt, or -1 where it has another name."""
    number = Path(path).stem.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def saved_checkpoints(run: Path | str) -> list[Path]:
    """The files run/checkpoints/step_000030.pt, by step, the oldest first; none of them is half-written."""
    folder = Path(run) / "checkpoints"
    paths = [path for path in folder.glob("step_*.pt") if checkpoint_step(path) >= 0]
    return sorted(paths, key=checkpoint_step)


def checkpoint_path(run: Path | str, step: int) -> Path:
    """run/checkpoints/step_000030.pt."""
    return Path(run) / "checkpoints" / f"step_{step:06d}.pt"


def shards_of(path: Path) -> Path:
    """The folder with the tensors of a checkpoint of full weights (common/weights/shards.py); a LoRA has none."""
    return path.with_suffix(".shards")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: its file first, as shards without it are no checkpoint."""
    path.unlink()
    shutil.rmtree(shards_of(path), ignore_errors=True)


def save_checkpoint(run: Path | str, step: int, state: dict, keep: int) -> None:
    """Write `state` as run/checkpoints/step_000030.pt, then remove all but the newest `keep` (at least 1). On rank 0.

    state: nested dicts and lists of CPU tensors and plain values. A kill at any moment leaves the previous ones.

    Raises:
        RunError: the disk is full or fails in another way, or what was written cannot be loaded.
    """
    if not on_rank_0():
        return
    path = checkpoint_path(run, step)
    try:
        with atomic_file(path) as temporary:
            with open(temporary, "wb") as file:
                torch.save({**state, "script": Path(sys.argv[0]).stem}, file)
            load_checkpoint(temporary)  # read back before an older one goes
    except ValueError as error:  # of what was read back
        raise RunError(str(error)) from error
    saved = saved_checkpoints(run)
    up_to_this = saved[: saved.index(path) + 1]  # not those of later steps, which an older --resume left behind
    for old in up_to_this[:-keep]:
        remove_checkpoint(old)
    for stale in path.parent.glob(".step_*.new"):  # left by a kill
        stale.unlink()
    for folder in path.parent.glob("step_*.shards"):  # as well, where no file came
        if not folder.with_suffix(".pt").exists():
            shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(path: Path | str) -> dict:
    """What save_checkpoint was given, and the name of the `script` that wrote it, on the CPU. Every byte is checked
    against the file's CRC32s.

    Raises:
        ValueError: naming the file and why: it is missing, truncated, corrupt, or something else.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError("it is no file")  # a pipe would be waited for
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            if damaged:
                raise ValueError(f"bad CRC32 of {damaged}")
            # the one flag outside the checksums that harms: torch takes the record for a folder and reads none of it
            for record in archive.infolist():
                if record.external_attr & IS_FOLDER:
                    raise ValueError(f"{record.filename} is marked as a folder")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(saved, dict) or not isinstance(saved.get("script"), str):
            raise ValueError("torch saved it, but no script of ours")
        for name, (size, _) in saved.get("shards", {}).items():  # their CRC32s are checked by all ranks together
            file = Path(path).parent / name
            if not file.is_file() or file.stat().st_size != size:
                raise ValueError(f"{name} is missing or truncated")
        return saved
    except Exception as error:  # a flipped byte can make the readers of zip and pickle raise nearly anything
        first_line = reason(error).strip().partition("\n")[0]
        raise ValueError(truncate(f"{path} is not a whole checkpoint ({first_line})")) from error


def check_format(record: dict[str, Any], source: Path | str) -> None:
    """Raises ValueError where a version whose files have another format wrote this args.json or checkpoint."""
    found = record.get("format")
    if str(found) != str(FORMAT):  # YAML is read as texts
        fault = f"its format is {found}, and this version reads format {FORMAT}"
        raise ValueError(truncate(f"{source} was written by another version of CleanFlow: {fault}"))
