"""--track: metrics and validation images in wandb or TensorBoard too. The run's folder holds them all in any case."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from common.errors import error_prefix
from common.plots import Picture

import numpy as np


def check_tracker(track: str | bool) -> None:
    """ValueError: the package that --track needs is not installed, or wandb cannot log in."""
    package = "wandb" if track is True else track
    if package and importlib.util.find_spec(str(package)) is None:
        raise ValueError(f"--track {track}: needs a package that is not installed: pip install {package}")
    if package == "wandb" and os.environ.get("RANK") == "0":  # which will log; a plan needs no login
        import wandb  # slow, and seldom asked for

        with error_prefix(f"--track {track}: run `wandb login`, or set WANDB_MODE=offline", Exception):
            is_online = wandb.setup().settings.mode in ("online", "run", "shared")
            if is_online and not wandb.login(prompt=False):
                raise ValueError("there is no API key")


class Wandb:
    """A run of wandb, with a table of validation images, in WANDB_PROJECT (cleanflow) and WANDB_RUN_GROUP."""

    def __init__(self, folder: Path, config: dict) -> None:
        """config: the options. The run's id stays in wandb_id.txt; wandb's files go to WANDB_DIR, or to `folder`."""
        import wandb  # slow, and seldom asked for

        known = folder / "wandb_id.txt"
        if not known.exists():
            known.write_text(os.urandom(4).hex())
        place = os.environ.get("WANDB_DIR", str(folder))
        run_id = known.read_text().strip()
        self._wandb: Any = wandb
        project = os.environ.get("WANDB_PROJECT", "cleanflow")
        wandb.init(project=project, name=folder.name, id=run_id, resume="allow", dir=place, config=config)

    def log(self, step: int, metrics: dict[str, float], grid: list[Picture] | None) -> None:
        """Add the metrics of a step and, after an evaluation, its captioned images."""
        table = {}
        if grid:
            rows = [[step, caption, self._wandb.Image(image)] for image, caption in grid]
            table["val/images"] = self._wandb.Table(["step", "prompt and score", "image"], rows)
        self._wandb.log(metrics | table, step=step)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        self._wandb.finish()


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: dict[str, float], grid: list[Picture] | None) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # needs the package

            # what a killed run wrote after the checkpoint that it resumes from is hidden
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for number, (image, caption) in enumerate(grid or []):
            self._writer.add_image(f"val/{number}", np.asarray(image.convert("RGB")), step, dataformats="HWC")
            self._writer.add_text(f"val/{number}", caption, step)
        self._writer.flush()

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


def start_tracker(track: str | bool, folder: Path, config: dict) -> Wandb | TensorBoard:
    """The tracker that --track names; True is wandb. A resumed run goes on in the one that it had."""
    return TensorBoard(folder) if track == "tensorboard" else Wandb(folder, config)
