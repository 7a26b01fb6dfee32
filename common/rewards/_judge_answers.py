"""What a judge's answer says, mapped to [0, 1]: its last score, UnifiedReward 2's three lines, the parts of an edit.

This is no reward; `vlm_judge` uses it.
"""

import re

NUMBER = r"[+-]?\d+(?:\.\d+)?"
SCORE = re.compile(rf"\s*({NUMBER})\s*(?:/\s*({NUMBER})\s*)?\.?\s*")  # 7 or 7/10, perhaps a full stop
PART = re.compile(rf"^\s*(instruction|preservation):\s*({NUMBER})(?:\s*/\s*({NUMBER}))?\s*\.?\s*$", re.MULTILINE)
# UnifiedReward 2's lines: "Style Score (1-5): 2.80"
AXIS = re.compile(
    rf"^\s*(alignment|coherence|style) score\s*(?:\(({NUMBER})-({NUMBER})\))?\s*:\s*({NUMBER})\s*\.?\s*$", re.MULTILINE
)
AXES = ("alignment", "coherence", "style")


def read_score(text: str, least: float, highest: float) -> float:
    """The number behind the last "Score:" of an answer, mapped from [least, highest] to [0, 1].

    Case and Markdown's asterisks do not count. Behind the number only "/10" (10 being the highest score) and a full
    stop may follow: "Score: 10 would be perfect" is no 10.

    Raises:
        ValueError: there is no such number, or it is outside of the range. It is not moved into the range.
    """
    _, found, behind = text.replace("*", "").lower().rpartition("score:")
    ending = SCORE.fullmatch(behind)
    if not found or not ending or (ending[2] and float(ending[2]) != highest):
        raise ValueError(f"an answer that does not end with Score: and a number: {text[-200:]!r}")
    score = float(ending[1])
    if not least <= score <= highest:
        raise ValueError(f"an answer whose score is not in {least:g} to {highest:g}: {text[-200:]!r}")
    return (score - least) / (highest - least)


def read_axes(text: str, least: float, highest: float, variable: str = "VLM_JUDGE_RANGE") -> dict[str, float]:
    """{"alignment": ..., "coherence": ..., "style": ...}, mapped as the score is; {} where an answer has no such line.

    variable: the setting that has the range, for messages.

    Raises:
        ValueError: one of the three is missing or twice there, or outside of the range, or is said to be of another.
    """
    found = AXIS.findall(text.replace("*", "").lower())
    if found and sorted(axis for axis, *_ in found) != list(AXES):
        raise ValueError(f"an answer without one line each of Alignment, Coherence and Style Score: {text[-200:]!r}")
    axes = {}
    for axis, low, high, number in found:
        is_of_range = not low or (float(low), float(high)) == (least, highest)
        if not is_of_range or not least <= float(number) <= highest:
            told = f"an answer whose {axis} score is not of {variable}, {least:g},{highest:g}"
            raise ValueError(f"{told}: {text[-200:]!r}")
        axes[axis] = (float(number) - least) / (highest - least)
    return axes


def read_parts(text: str, least: float, highest: float) -> dict[str, float]:
    """{"instruction": ..., "preservation": ...}: the numbers of such lines of an answer, as far as it has them.

    Mapped as the score is. A number outside of the range is left out, as the score does not depend on it.
    """
    parts = {}
    for name, number, most in PART.findall(text.replace("*", "").lower()):
        value = float(number)
        if least <= value <= highest and float(most or highest) == highest:
            parts[name] = (value - least) / (highest - least)
    return parts
