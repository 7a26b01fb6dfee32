"""`ocr` with an exemption: text that is repeated or added is not punished.

    torchrun --standalone flow_grpo.py --reward ocr_contains

It needs nothing, like `ocr`. Flow-GRPO's code has this exemption, its paper does not.
"""

from common.rewards.ocr import load, quoted_text, recognize, score_texts

from PIL.Image import Image


def ocr_contains(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[dict]:
    """The score of `ocr`, in [0, 1], but 1 if the quoted text is part of the recognised text."""
    return score_texts(recognize(images), prompts, contains=True)


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
ocr_contains.check = quoted_text  # type: ignore[attr-defined]
ocr_contains.load = load  # type: ignore[attr-defined]
