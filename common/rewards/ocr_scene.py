"""OCR of a whole image: does it show, anywhere, the text in double quotes in its prompt?

    torchrun --standalone flow_grpo.py --reward ocr_scene

It needs nothing: both networks (PP-OCR) come with RapidOCR and run on the CPU. A detector finds lines at any place, of
any size and number, and the recogniser of `ocr` reads each. If an image is one line of text, `ocr` is faster.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.distributed import cores_of_this_rank
from common.rewards.ocr import load, quoted_text, score_texts

from PIL.Image import Image


def ocr_scene(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[dict]:
    """max(1 - Levenshtein / len, 0) of all text read and the quoted text (Flow-GRPO, arXiv 2505.05470v5, section 5.1).

    In [0, 1]: 1 if the image shows that text and no other, 0 if it shows no text. Beside it stands what was `read`.
    """
    return score_texts(read_scene(images), prompts)


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
ocr_scene.check = quoted_text  # type: ignore[attr-defined]
ocr_scene.load = load  # type: ignore[attr-defined]


def read_scene(images: list[Image]) -> list[str]:
    """The text in each image: its lines from top to bottom, joined without spaces.

    Lines are ordered and chosen as in PaddleOCR, which Flow-GRPO's reward calls. Lines whose upper edges are less than
    10 pixels apart are read from left to right. A line is left out if the recogniser is less than half sure of it. No
    line is turned upright first. The networks get one image per call, so that the text read in an image does not depend
    on its neighbours.
    """
    # side by side: an image takes 0.12 s of one core (docs/rewards.md), for which a rollout on a GPU would wait
    return list(_threads().map(_read, images))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, cores_of_this_rank()), thread_name_prefix="ocr_scene")


def _read(image: Image) -> str:
    if not hasattr(_of_this_thread, "reader"):
        _of_this_thread.reader = _new_reader()
    lines = _of_this_thread.reader(image.convert("RGB")).txts  # None if the detector finds no line
    return "".join(lines or ())


_of_this_thread = threading.local()  # .reader: the networks, which keep state between detector and recogniser


def _new_reader() -> Any:  # a RapidOCR
    from rapidocr import RapidOCR  # slow

    return RapidOCR(
        params={
            "Global.use_cls": False,
            "Global.text_score": 0.5,
            # for the detector larger images are made smaller, and none is made larger; RapidOCR's default, at least
            # 736 pixels, takes twice the time
            "Det.limit_type": "max",
            "Det.limit_side_len": 960,
            "Global.log_level": "error",  # otherwise every image without text is a warning
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,  # images are read side by side instead
        }
    )
