"""--track: metrics and validation images in wandb or TensorBoard too. The run's folder holds them all in any case.

A tracker is beside the run: its first error is one line, and the run goes on without it.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.errors import error_prefix, reason, truncate
from common.process import print_message
from common.run.plots import Picture

import numpy as np

# Settings of wandb.init: what it would send of the code is off. WANDB_DISABLE_GIT=false turns a part on again.
WANDB_SETTINGS: dict[str, Any] = {
    "disable_git": True,  # commit, remote, and what is not committed
    "save_code": False,  # the script, where the account's page asks for it
    "x_save_requirements": False,  # the installed packages
    "finish_timeout": 600.0,  # seconds that a finished run waits for its upload
    "finish_timeout_raises": True,
}


def check_tracker(track: str | bool) -> None:
    """ValueError: the package that --track needs is not installed, or wandb cannot log in."""
    package = "wandb" if track is True else track
    if package and importlib.util.find_spec(str(package)) is None:
        raise ValueError(f"--track {track}: needs a package that is not installed: pip install {package}")
    # rank 0, which will log, or python alone; a plan, which sets the number of ranks, needs no login
    if package == "wandb" and (os.environ.get("RANK") == "0" or "WORLD_SIZE" not in os.environ):
        import wandb  # slow, and seldom asked for

        with error_prefix(f"--track {track}: run `wandb login`, or set WANDB_MODE=offline", Exception):
            is_online = wandb.setup().settings.mode in ("online", "run", "shared")
            if is_online and not wandb.login(prompt=False):
                raise ValueError("there is no API key")


class Wandb:
    """A run of wandb, with a table of validation images, in WANDB_PROJECT (cleanflow) and WANDB_RUN_GROUP."""

    name = "wandb"
    is_lost = False

    def __init__(self, folder: Path, config: dict) -> None:
        """config: the options. The run's id stays in wandb_id.txt; wandb's files go to WANDB_DIR, or to `folder`, and
        its copies of images to WANDB_DATA_DIR, or to `folder`."""
        self.folder = folder
        self._wandb: Any = None
        with beside_the_run(self):
            import wandb  # slow, and seldom asked for

            self._wandb = wandb
            known = folder / "wandb_id.txt"
            if not known.exists():
                known.write_text(os.urandom(4).hex())
            wandb.init(
                project=os.environ.get("WANDB_PROJECT", "cleanflow"),
                name=folder.name,
                id=known.read_text().strip(),
                resume="allow",
                dir=os.environ.get("WANDB_DIR", str(folder)),
                config=config,
                settings={name: value for name, value in WANDB_SETTINGS.items() if _variable(name) not in os.environ},
            )
            # wandb's own default is in the home directory. No setting has it, and `init` warns of a changed environment
            os.environ.setdefault("WANDB_DATA_DIR", str(folder.absolute() / "wandb"))

    def log(self, step: int, metrics: dict[str, float], grid: list[Picture] | None) -> None:
        """Add the metrics of a step and, after an evaluation, its captioned images."""
        if self.is_lost:
            return
        with beside_the_run(self):
            table = {}
            if grid:
                rows = [[step, caption, self._wandb.Image(image)] for image, caption in grid]
                table["val/images"] = self._wandb.Table(["step", "prompt and score", "image"], rows)
            self._wandb.log(metrics | table, step=step)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        if not self.is_lost:
            with beside_the_run(self):
                self._wandb.finish()
        if self.is_lost:  # without it wandb prints a traceback at exit, where its helper is gone
            with suppress(Exception):
                self._wandb.teardown(exit_code=1)


def _variable(setting: str) -> str:
    """The environment variable of one of wandb's settings: WANDB__DISABLE_STATS of x_disable_stats."""
    return f"WANDB_{setting.removeprefix('x').upper()}"


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir runs` shows all runs."""

    name = "tensorboard"
    is_lost = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def log(self, step: int, metrics: dict[str, float], grid: list[Picture] | None) -> None:
        """Add the metrics of a step and, after an evaluation, its captioned images."""
        if self.is_lost:
            return
        with beside_the_run(self):
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter  # needs the package

                # what a killed run wrote after the checkpoint that it resumes from is hidden
                self._writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step)
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            for number, (image, caption) in enumerate(grid or []):
                self._writer.add_image(f"val/{number}", np.asarray(image.convert("RGB")), step, dataformats="HWC")
                self._writer.add_text(f"val/{number}", caption, step)
            self._writer.flush()

    def finish(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None and not self.is_lost:
            with beside_the_run(self):
                self._writer.close()


@contextmanager
def beside_the_run(tracker: Wandb | TensorBoard) -> Iterator[None]:
    """An exception in the block, of any type, becomes one line, and the tracker is lost: it gets nothing more."""
    try:
        yield
    except Exception as error:
        tracker.is_lost = True
        fault = f"--track {tracker.name}: {type(error).__name__}: {reason(error)}"
        kept = f"metrics and images stay in {tracker.folder}"
        print_message(truncate(f"{fault}; the run goes on without it, and {kept}"))


def start_tracker(track: str | bool, folder: Path, config: dict) -> Wandb | TensorBoard:
    """The tracker that --track names; True is wandb. A resumed run goes on in the one that it had."""
    return TensorBoard(folder) if track == "tensorboard" else Wandb(folder, config)
