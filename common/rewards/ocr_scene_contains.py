"""OCR of a whole picture with the reference code's exemption, which does not punish text that is repeated or added."""

from common.rewards.ocr import ocr_score, quoted_text
from common.rewards.ocr_scene import read_scene


def ocr_scene_contains(images, prompts, metadata):
    """`ocr_scene`, but 1 wherever the quoted text is contained in what was read (as in Flow-GRPO's code)."""
    pairs = zip(read_scene(images), prompts, strict=True)
    return [ocr_score(text, quoted_text(prompt), contains=True) for text, prompt in pairs]


ocr_scene_contains.check = quoted_text
