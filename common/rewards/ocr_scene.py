"""OCR of a whole picture: does it show, anywhere, the text that its prompt puts in double quotes?

A detector finds the lines, at any place, size and number, and the recogniser of `ocr` reads each. Both are networks
that come with RapidOCR (PP-OCR) and run on the CPU. For a picture that is one line `ocr` is faster.
"""

import functools

from common.rewards.ocr import ocr_score, quoted_text

import numpy as np
import torch


def ocr_scene(images, prompts, metadata):
    """max(1 - Levenshtein / len, 0) of all that is read against the quoted text (Flow-GRPO, arXiv 2505.05470v5, 5.1).

    In [0, 1]: 1 where the picture shows that text and no other, 0 where it shows none.
    """
    texts = read_scene(images)
    return [ocr_score(text, quoted_text(prompt)) for text, prompt in zip(texts, prompts, strict=True)]


ocr_scene.check = quoted_text


def read_scene(images):
    """What stands in each image, a list of B strings: its lines from top to bottom, joined without a space.

    As in PaddleOCR, which Flow-GRPO's reward calls: lines whose upper edges are less than 10 pixels apart are read from
    left to right; what the recogniser is less than half sure of is left out; no line is turned upright first.
    One image a call: what is read in an image does not depend on its neighbours in the batch.
    """
    texts = []
    for image in images:
        rgb = np.asarray(image.convert("RGB"))  # (H, W, 3)
        bgr = np.ascontiguousarray(rgb[:, :, ::-1])
        lines = _reader()(bgr).txts  # None where the detector finds no line
        texts.append("".join(lines or ()))
    return texts


@functools.cache
def _reader():
    from rapidocr import RapidOCR

    return RapidOCR(
        params={
            "Global.use_cls": False,
            "Global.text_score": 0.5,
            # larger pictures are made smaller for the detector, none larger (RapidOCR's own, 736 at least, costs twice)
            "Det.limit_type": "max",
            "Det.limit_side_len": 960,
            "Global.log_level": "error",  # a picture without text is no warning
            "EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads(),
        }
    )
