"""`ocr_scene` with an exemption: text that is repeated or added is not punished.

    torchrun --standalone flow_grpo.py --reward ocr_scene_contains

It needs nothing, like `ocr_scene`. This is the reward of Flow-GRPO's code, with RapidOCR's detector and reader instead
of PaddleOCR's. This reader knows Chinese as well: now and then it takes a sign such as & or = for one of Chinese text.
"""

from common.rewards.ocr import load, quoted_text, score_texts
from common.rewards.ocr_scene import read_scene

from PIL.Image import Image


def ocr_scene_contains(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[dict]:
    """The score of `ocr_scene`, in [0, 1], but 1 if the quoted text is part of the text in the image."""
    return score_texts(read_scene(images), prompts, contains=True)


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
ocr_scene_contains.check = quoted_text  # type: ignore[attr-defined]
ocr_scene_contains.load = load  # type: ignore[attr-defined]
