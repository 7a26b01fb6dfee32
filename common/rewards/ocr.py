"""OCR of an image that is one line of text: does it show the text in double quotes in its prompt?

    torchrun --standalone flow_grpo.py --reward ocr        (prompts such as: a red sign that says "4711")

It needs nothing: the recognition network (PP-OCR) comes with RapidOCR and runs on the CPU. For text anywhere in an
image there is `ocr_scene`.
"""

import functools
import importlib.util
import logging
import unicodedata
from typing import Any, Final

from common.errors import error_prefix

from PIL.Image import Image

COMPARISON: Final = "NFKC"  # Unicode's form in which texts are compared; benches by another one are not compared


def ocr(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[dict]:
    """max(1 - Levenshtein / len, 0) of the recognised and the quoted text (Flow-GRPO, arXiv 2505.05470v5, section 5.1).

    In [0, 1]; see ocr_score. Beside each score stands the text that was `read`.
    """
    return score_texts(recognize(images), prompts)


def score_texts(texts: list[str], prompts: list[str], contains: bool = False) -> list[dict]:
    """The ocr_score of each text read, for the text that its prompt quotes, and the text."""
    return [
        {"score": ocr_score(text, quoted_text(prompt), contains), "read": text}
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def quoted_text(prompt: str) -> str:
    """The text between a prompt's first two double quotes, as it is compared.

    Raises:
        ValueError: there is no such text.
    """
    parts = prompt.split('"')
    text = compared(parts[1]) if len(parts) >= 3 else ""
    if not text:
        raise ValueError(f"OCR needs a prompt with text in double quotes, got: {prompt}")
    return text


def load() -> None:
    """Look for RapidOCR and onnxruntime, and import OpenCV below them, which some systems lack libraries for.

    The networks, whose import is slow, load with the first image: a wrong option is refused before.

    Raises:
        ValueError: one of them is not installed, or OpenCV does not load.
    """
    with error_prefix("cannot load RapidOCR", Exception):
        for package in ("rapidocr", "onnxruntime"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"{package} is not installed")
        importlib.import_module("cv2")


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
ocr.check = quoted_text  # type: ignore[attr-defined]
ocr.load = load  # type: ignore[attr-defined]


def compared(text: str) -> str:
    """The text in lower case, without white space, and in Unicode's form NFKC: the network reads digits and letters
    also as full-width ones, such as \uff14 for 4, which look alike in an image."""
    return "".join(unicodedata.normalize(COMPARISON, text).split()).lower()


def ocr_score(recognized: str, target: str, contains: bool = False) -> float:
    """1 - min(Levenshtein, len(target)) / len(target), in [0, 1], of both texts as they are `compared`.

    contains: the score is 1 if the target, which is not empty, is part of the recognised text.
    """
    recognized, target = compared(recognized), compared(target)
    if contains and target in recognized:
        return 1.0
    return 1 - min(levenshtein(recognized, target), len(target)) / len(target)


def levenshtein(a: str, b: str) -> int:
    """The least number of insertions, deletions and substitutions that turn `a` into `b`."""
    row = list(range(len(b) + 1))  # distances from a's first i letters, now i = 0, to each beginning of b
    for i, x in enumerate(a, 1):
        diagonal = row[0]
        row[0] = i
        for j, y in enumerate(b, 1):
            substitution = diagonal + (x != y)
            diagonal = row[j]
            row[j] = min(row[j] + 1, row[j - 1] + 1, substitution)
    return row[-1]


def recognize(images: list[Image]) -> list[str]:
    """The text that the recognition network reads in each image as one line, without looking for lines first.

    The network gets one image per call, so that the text read in an image does not depend on its neighbours.
    """
    texts = []
    for image in images:
        result = _recognizer()(image.convert("RGB"), use_det=False, use_cls=False, use_rec=True)
        texts.append(result.txts[0] if result.txts else "")
    return texts


@functools.cache
def _recognizer() -> Any:  # a RapidOCR
    from rapidocr import RapidOCR  # slow

    logging.getLogger("RapidOCR").setLevel(logging.WARNING)
    return RapidOCR(
        params={
            "Global.use_det": False,
            "Global.use_cls": False,
            "Global.log_level": "warning",
            # the least width: padding shorter lines to 320 pixels, the default, makes them 1.7 times slower
            "Rec.rec_img_shape": [3, 48, 48],
            # it runs beside the rollout, which loses more to a second, waiting thread than OCR gains
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    )
