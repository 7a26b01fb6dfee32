"""OCR: does the image show the text that its prompt puts in double quotes? Read as one line, by a real network."""

import functools
import logging

import numpy as np


def ocr(images, prompts, metadata):
    """max(1 - Levenshtein / len, 0) of recognised against quoted text (Flow-GRPO, arXiv 2505.05470v5, section 5.1)."""
    texts = recognize(images)
    return [ocr_score(text, quoted_text(prompt)) for text, prompt in zip(texts, prompts, strict=True)]


def quoted_text(prompt):
    """The text between the first pair of double quotes, all white space dropped, lower-cased."""
    parts = prompt.split('"')
    text = "".join(parts[1].split()).lower() if len(parts) >= 3 else ""
    if not text:
        raise ValueError(f"OCR needs a prompt with text in double quotes, got: {prompt}")
    return text


ocr.check = quoted_text


def ocr_score(recognized, target, contains=False):
    """1 - min(Levenshtein, len(target)) / len(target), in [0, 1]; `contains`: 1 if the target is in what was read.

    White space and case do not count, in either. Raises ValueError for an empty target.
    """
    recognized = "".join(recognized.split()).lower()
    target = "".join(target.split()).lower()
    if not target:
        raise ValueError("OCR needs a target, got an empty one")
    if contains and target in recognized:
        return 1.0
    return 1 - min(levenshtein(recognized, target), len(target)) / len(target)


def levenshtein(a, b):
    """Least number of insertions, deletions and substitutions that turn string `a` into string `b`."""
    row = list(range(len(b) + 1))  # distances from a's first letters, none at first, to each beginning of b
    for i, x in enumerate(a, 1):
        diagonal = row[0]
        row[0] = i
        for j, y in enumerate(b, 1):
            substitution = diagonal + (x != y)
            diagonal = row[j]
            row[j] = min(row[j] + 1, row[j - 1] + 1, substitution)
    return row[-1]


def recognize(images):
    """Text that the PP-OCR recognition network reads in each image as one line (no detection), a list of B strings.

    One image a call: what is read in an image does not depend on its neighbours in the batch.
    """
    texts = []
    for image in images:
        rgb = np.asarray(image.convert("RGB"))  # (H, W, 3)
        bgr = np.ascontiguousarray(rgb[:, :, ::-1])
        result = _recognizer()(bgr, use_det=False, use_cls=False, use_rec=True)
        texts.append(result.txts[0] if result.txts else "")
    return texts


@functools.cache
def _recognizer():
    from rapidocr import RapidOCR

    logging.getLogger("RapidOCR").setLevel(logging.WARNING)
    return RapidOCR(
        params={
            "Global.use_det": False,
            "Global.use_cls": False,
            "Global.log_level": "warning",
            # least width: shorter lines are not padded to 320 pixels, which costs 1.7x
            "Rec.rec_img_shape": [3, 48, 48],
            # it runs beside the rollout: a second thread's waiting takes more from that than it gives here
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    )
