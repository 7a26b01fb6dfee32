"""How large is the image as a JPEG? Detailed images score high, plain images score low.

    torchrun --standalone flow_grpo.py --reward jpeg_incompressibility

It needs nothing.
"""

from common.rewards.jpeg_compressibility import jpeg_compressibility

from PIL.Image import Image


def jpeg_incompressibility(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """kB / 500 of the image as a JPEG of quality 95, above 0; a kB is 1000 bytes.

    By DDPO (arXiv 2305.13301), which has kB, as Flow-GRPO's code has; the 500 is that of `jpeg_compressibility`.
    """
    return [-score for score in jpeg_compressibility(images, prompts, metadata)]
