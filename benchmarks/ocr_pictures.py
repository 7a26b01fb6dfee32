"""What `ocr_scene` reads in pictures of known text, those of its tests, as a picture to look at.

    python -m benchmarks.ocr_pictures docs/records/ocr_scene.png

Below each picture stands what was read and both rewards' scores for a prompt that asks for the text that is drawn.
"""

import sys

from common.pictures import save_grid
from common.rewards.ocr_scene import ocr_scene, read_scene
from common.rewards.ocr_scene_contains import ocr_scene_contains
from tests.test_ocr_scene import PICTURES, draw

from PIL import Image

SIZE = (300, 200)  # that the pictures are shown at


def main(path):
    names = list(PICTURES)
    pictures = [draw(name) for name in names] + [draw(names[2], "white", ("black", "darkred"))]
    asked = [PICTURES[name][3] for name in names] + [PICTURES[names[2]][3]]
    shown, captions = [], []
    for picture, text in zip(pictures, asked, strict=True):
        prompts = [f'a picture that says "{text}"']
        scores = [score([picture], prompts, [{}])[0] for score in (ocr_scene, ocr_scene_contains)]
        captions.append(
            f"{picture.width} x {picture.height}: {read_scene([picture])[0]}\n{scores[0]:.2f}  {scores[1]:.2f}"
        )
        frame = Image.new("RGB", SIZE, "white")
        picture.thumbnail(SIZE)
        frame.paste(picture, ((SIZE[0] - picture.width) // 2, (SIZE[1] - picture.height) // 2))
        shown.append(frame)
    save_grid(path, shown, captions, columns=5)


if __name__ == "__main__":
    main(sys.argv[1])
