"""How small is the image as a JPEG? Plain images score high, detailed images score low.

    torchrun --standalone flow_grpo.py --reward jpeg_compressibility

It needs nothing.
"""

import io

from PIL.Image import Image


def jpeg_compressibility(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """-kB / 500 of the image as a JPEG of quality 95, below 0; a kB is 1000 bytes.

    By DDPO (arXiv 2305.13301), which has -kB; the 500 is from Flow-GRPO's code.
    """
    scores = []
    for image in images:
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, format="JPEG", quality=95)
        scores.append(-buffer.tell() / 1000 / 500)
    return scores
