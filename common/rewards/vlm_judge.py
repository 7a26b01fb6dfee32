"""A vision-language model as judge: it sees image and prompt, and its answer ends with a score.

    vllm serve Qwen/Qwen2.5-VL-7B-Instruct --port 8000
    export VLM_JUDGE_URL=http://127.0.0.1:8000/v1 VLM_JUDGE_MODEL=Qwen/Qwen2.5-VL-7B-Instruct
    torchrun --standalone flow_grpo.py --reward vlm_judge --reward_failure mask

It needs a server with OpenAI's chat completions, such as vLLM's, beside the run or on another machine, and these
environment variables, the same for all ranks; defaults stand at the end of the line:

    VLM_JUDGE_URL          address of the API, with its /v1
    VLM_JUDGE_MODEL        name of the model there
    VLM_JUDGE_PROMPT       file with the question, where {prompt} stands for the image's prompt; vlm_judge.txt here, or
                           vlm_judge_edit.txt for an edit, whose source is shown before it
    VLM_JUDGE_RANGE        least and highest score that the question allows; 0,10
    VLM_JUDGE_MAX_TOKENS   length of the longest answer; 512
    VLM_JUDGE_CONCURRENCY  a rank's questions under way at once; 16
    VLM_JUDGE_TIMEOUT_S    seconds from a request to the last byte of its answer; 120
    VLM_JUDGE_RETRIES      further attempts after no answer or a server's error, after 1, 2, 4 ... 30 s; 4
    VLM_JUDGE_API_KEY      sent as a bearer token, to this host alone; none
    VLM_JUDGE_SERVE        command that starts the server, one on each node, which ends with the run; none
    VLM_JUDGE_SLEEP        1: the server, vLLM's, frees its GPU while no image is scored; 0

They are read once, before any model loads. Then the server is asked whether it has the model.

Several judges in one run have names, vlm_judge:style and vlm_judge:text, which are also those of their metrics. Each
has settings of its own and none of the above: VLM_JUDGE_STYLE_URL, VLM_JUDGE_STYLE_MODEL, VLM_JUDGE_TEXT_URL and so on.
"""

import asyncio
import math
import os
from pathlib import Path
from typing import NamedTuple

from common.errors import RunError, error_prefix
from common.rewards._json_http import (
    RefusedRequest,
    Server,
    ServerError,
    ask,
    ask_for_each,
    ask_for_names,
    command,
    number_setting,
    png_base64,
    read_server,
    text_setting,
)
from common.rewards._judge_answers import AXES, read_axes, read_parts, read_score
from common.rewards._served import serve

from PIL.Image import Image

PREFIX = "VLM_JUDGE"
QUESTION = Path(__file__).with_name("vlm_judge.txt")
QUESTION_OF_EDITS = Path(__file__).with_name("vlm_judge_edit.txt")


class Settings(NamedTuple):
    prefix: str  # of the environment variables
    server: Server
    model: str
    questions: tuple[str, str]  # of an image, and of an edit; they contain {prompt}
    least: float
    highest: float
    max_tokens: int
    sleeps: bool


_settings: dict[str, Settings] = {}  # by prefix
_awake: set[str] = set()  # prefixes of judges that may sleep, and that this rank has woken


def vlm_judge(
    images: list[Image], prompts: list[str], metadata: list[dict], prefix: str = PREFIX
) -> list[dict | Exception]:
    """(score - least) / (highest - least), in [0, 1], for the score at the end of the judge's answer.

    The judge is asked at temperature 0. An image fails if its answer has no score or is cut short, or if the server
    refuses this request. A server that is gone, or that does not speak the protocol, ends the run.

    An answer may instead have UnifiedReward 2's three lines, "Alignment Score (1-5): N", then "Coherence" and "Style":
    the score is their mean, and the three become details beside it.

    Where a record has "image", the judge sees these pictures before their edit. Lines "Instruction: N" and
    "Preservation: N" of an answer become details beside the score, in [0, 1] as well.

    prefix: how the environment variables begin, VLM_JUDGE or that of a named judge.
    """
    settings = read_settings(prefix)
    if settings.sleeps and prefix not in _awake:
        asyncio.run(command(settings.server, "/wake_up"))
        _awake.add(prefix)
    shown = list(zip(images, prompts, [record.get("image", []) for record in metadata], strict=True))
    return ask_for_each(lambda one: judge(settings, *one), shown, settings.server.concurrency)


async def judge(settings: Settings, image: Image, prompt: str, sources: list[Image]) -> dict | Exception:
    """The score of one image and the judge's `answer`; or the ValueError or RefusedRequest that says why not.

    sources: what it is an edit of; [] where it is none.
    """
    content: list[dict] = []
    for picture in (*sources, image):
        url = f"data:image/png;base64,{await png_base64(picture)}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": settings.questions[bool(sources)].replace("{prompt}", prompt)})
    payload = {
        "model": settings.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": settings.max_tokens,
    }
    try:
        answer = await ask(settings.server, "/chat/completions", payload)
    except RefusedRequest as error:
        return error
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        text = "" if text is None else text
        is_cut = choice.get("finish_reason") == "length"
        if not isinstance(text, str):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ServerError(f"{settings.server.url}: no chat completion: {str(answer)[:200]}") from None
    try:
        if is_cut:  # the last number may be half of a number
            told = f"an answer cut at {settings.prefix}_MAX_TOKENS {settings.max_tokens}"
            raise ValueError(f"{told}: {text[-200:]!r}")
        axes = read_axes(text, settings.least, settings.highest, f"{settings.prefix}_RANGE")
        if axes:
            return {"score": sum(axes.values()) / len(axes), **axes, "answer": text}
        score = read_score(text, settings.least, settings.highest)
        parts = read_parts(text, settings.least, settings.highest) if sources else {}
        return {"score": score, **parts, "answer": text}
    except ValueError as error:
        return error


def read_settings(prefix: str = PREFIX) -> Settings:
    """The Settings in the environment when `load` was called, or now if it was not.

    Raises:
        ValueError: names the variable that is missing or wrong.
    """
    if prefix not in _settings:
        _settings[prefix] = _read_settings(prefix)
    return _settings[prefix]


def _read_settings(prefix: str) -> Settings:
    given = os.environ.get(f"{prefix}_PROMPT", "").strip()
    with error_prefix(f"{prefix}_PROMPT={given}"):
        question = Path(given or QUESTION).read_text(encoding="utf-8")
        question_of_edits = question if given else QUESTION_OF_EDITS.read_text(encoding="utf-8")
        if "{prompt}" not in question:
            raise ValueError("the question must contain {prompt}, for which we put the image's prompt")
    score_range = os.environ.get(f"{prefix}_RANGE", "").strip() or "0,10"
    try:
        least, highest = (float(number) for number in score_range.split(","))
    except ValueError:
        least = highest = math.nan
    if not -math.inf < least < highest < math.inf:
        raise ValueError(f"{prefix}_RANGE={score_range}: must be two numbers, the least score and the highest: 0,10")
    return Settings(
        prefix=prefix,
        server=read_server(prefix, "http://127.0.0.1:8000/v1", concurrency=16),
        model=text_setting(f"{prefix}_MODEL", "Qwen/Qwen2.5-VL-7B-Instruct"),
        questions=(question, question_of_edits),
        least=least,
        highest=highest,
        max_tokens=number_setting(f"{prefix}_MAX_TOKENS", 512, 1),
        sleeps=number_setting(f"{prefix}_SLEEP", 0, 0) > 0,
    )


def load(prefix: str = PREFIX) -> None:
    """Start the server, if asked. Raise ValueError for wrong settings, or if it is not there or lacks the model."""
    _settings.pop(prefix, None)  # and no other's: a question may be edited while the next judge's server starts
    settings = read_settings(prefix)
    if command := os.environ.get(f"{prefix}_SERVE", "").strip():
        serve(f"{prefix}_SERVE", command, settings.server.url)
    names = ask_for_names(settings.server, "/models", lambda answer: [model["id"] for model in answer["data"]])
    if names is None:
        raise ValueError(f"{prefix}_URL={settings.server.url}: no /models there; is its /v1 missing?")
    if settings.model not in names:
        raise ValueError(f"{prefix}_MODEL={settings.model}: not at the server, which has {', '.join(names)}")


def sleeps(prefix: str = PREFIX) -> bool:
    """Whether the judge sleeps while no image is scored."""
    return read_settings(prefix).sleeps


def offload(prefix: str = PREFIX) -> None:
    """Let the judge sleep, if it should; the first rank of a node asks for it.

    Raises:
        RunError: the server refuses, or is gone.
    """
    if sleeps(prefix):
        _awake.discard(prefix)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            try:
                asyncio.run(command(read_settings(prefix).server, "/sleep?level=1"))
            except ServerError as error:
                raise RunError(f"{prefix}_SLEEP: {error}") from error


def variables(prefix: str) -> tuple[str, ...]:
    """The environment variables that scores depend on."""
    return tuple(f"{prefix}_{setting}" for setting in ("URL", "MODEL", "PROMPT", "RANGE", "MAX_TOKENS"))


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
vlm_judge.settings = variables(PREFIX)  # type: ignore[attr-defined]
vlm_judge.parts = (*AXES, "instruction", "preservation")  # type: ignore[attr-defined]
vlm_judge.load = load  # type: ignore[attr-defined]
vlm_judge.offload = offload  # type: ignore[attr-defined]
vlm_judge.offloads_together = sleeps  # type: ignore[attr-defined]
