"""Make assets/sprites, pictures of the objects of assets/scenes.py, from an npm package of emoji.

npm pack emoji-datasource-google@16.0.0
python -m assets.make_sprites emoji-datasource-google-16.0.0.tgz
"""

import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

PACKAGE = "emoji-datasource-google-16.0.0.tgz"
SHA256 = "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438"
EMOJI = {  # files of the package by GenEval's names of the objects; docs/lab/scenes.md says why these
    "car": "1f697",
    "clock": "23f0",
    "laptop": "1f4bb",
    "motorcycle": "1f3cd-fe0f",
    "skateboard": "1f6f9",
    "stop sign": "1f6d1",
    "teddy bear": "1f9f8",
    "traffic light": "1f6a6",
}
NOTICE = """\
These pictures are Noto Emoji 2.048 (https://github.com/googlefonts/noto-emoji), of 64 px, unchanged.
Copyright Google LLC. Noto's image resources are licensed under the Apache License, Version 2.0 (LICENSE, beside this
file).

They were taken from the npm package emoji-datasource-google 16.0.0 (img/google/64), whose own licence follows.

"""


@dataclass
class Args:
    package: Annotated[Path, tyro.conf.Positional]
    """the file that `npm pack` writes"""
    out: Path = Path(__file__).parent / "sprites"
    """folder to write"""


def main(args: Args) -> None:
    digest = hashlib.sha256(args.package.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{args.package}: its SHA-256 is {digest}, that of {PACKAGE} is {SHA256}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(args.package) as package:
        for name, file in EMOJI.items():
            picture = package.extractfile(f"package/img/google/64/{file}.png").read()
            (args.out / f"{name.replace(' ', '_')}.png").write_bytes(picture)
        (args.out / "NOTICE").write_text(NOTICE + package.extractfile("package/LICENSE").read().decode())
    (args.out / "LICENSE").write_text((Path(__file__).parents[1] / "LICENSE").read_text())


if __name__ == "__main__":
    main(tyro.cli(Args))
