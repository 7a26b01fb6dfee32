"""A vision-language model as judge: it is shown image and prompt, and ends its answer with a score.

Any server with OpenAI's chat completions will do, vLLM's for one, started beside the run or on another machine:

    vllm serve Qwen/Qwen2.5-VL-7B-Instruct --port 8000
    export VLM_JUDGE_URL=http://127.0.0.1:8000/v1 VLM_JUDGE_MODEL=Qwen/Qwen2.5-VL-7B-Instruct
    torchrun --standalone flow_grpo.py --reward vlm_judge --reward_failure mask

Settings are environment variables, the same for all ranks:

    VLM_JUDGE_URL          address of the API, with its /v1
    VLM_JUDGE_MODEL        name of the model there
    VLM_JUDGE_PROMPT       file of the question, in which {prompt} becomes the image's; vlm_judge.txt beside this
    VLM_JUDGE_RANGE        least and highest score that the question allows; 0,10
    VLM_JUDGE_MAX_TOKENS   longest answer; 512
    VLM_JUDGE_CONCURRENCY  images of a rank that are asked about at once; 16
    VLM_JUDGE_TIMEOUT_S    seconds to wait for a connection, and for an answer; 120
    VLM_JUDGE_RETRIES      further attempts where there is no answer or a server's error, after 1, 2, 4 ... 30 s; 4
    VLM_JUDGE_API_KEY      sent as a bearer token; none

They are read once, before any model loads, and the server is asked for its models.
"""

import functools
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

from common.json_http import (
    RefusedRequest,
    Server,
    ServerError,
    ask,
    ask_for_names,
    in_threads,
    number_setting,
    png_base64,
    read_server,
    text_setting,
)
from common.refusals import refusing

QUESTION = Path(__file__).with_name("vlm_judge.txt")
NUMBER = r"[+-]?\d+(?:\.\d+)?"
SCORE = re.compile(rf"\s*({NUMBER})\s*(?:/\s*({NUMBER})\s*)?\.?\s*")  # 7, or 7/10, with or without a full stop


class Settings(NamedTuple):
    server: Server
    model: str
    question: str  # with {prompt} in it
    least: float
    highest: float
    max_tokens: int


def vlm_judge(images, prompts, metadata):
    """(score - least) / (highest - least), in [0, 1], of the score that the judge's answer ends with.

    Temperature 0. An answer without a score, cut short, or refused for this image is that image's failure; a server
    that is gone, or does not speak the protocol, is the run's.
    """
    settings = read_settings()
    pairs = list(zip(images, prompts, strict=True))
    return in_threads(lambda pair: judge(settings, *pair), pairs, settings.server.concurrency)


def judge(settings, image, prompt):
    """The score of one image or, in its place, the ValueError or RefusedRequest that says why there is none."""
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png_base64(image)}"}}
    question = {"type": "text", "text": settings.question.replace("{prompt}", prompt)}
    payload = {
        "model": settings.model,
        "messages": [{"role": "user", "content": [picture, question]}],
        "temperature": 0,
        "max_tokens": settings.max_tokens,
    }
    try:
        answer = ask(settings.server, "/chat/completions", payload)
    except RefusedRequest as error:
        return error
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        is_cut = choice.get("finish_reason") == "length"
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ServerError(f"{settings.server.url}: no chat completion: {str(answer)[:200]}") from None
    try:
        if is_cut:  # whose last number may be half of one
            raise ValueError(f"an answer cut at VLM_JUDGE_MAX_TOKENS {settings.max_tokens}: {str(text)[-200:]!r}")
        return read_score(text or "", settings.least, settings.highest)
    except ValueError as error:
        return error


def read_score(text, least, highest):
    """The number behind the last "Score:" of an answer, mapped from [least, highest] to [0, 1].

    Case and the asterisks of Markdown do not count. Behind the number may stand "/10", where 10 is the highest score,
    and a full stop, and nothing else: "Score: 10 would be perfect" is no 10.

    Raises:
        ValueError: there is no such number, or it is outside of the range: it is not moved into it.
    """
    _, found, behind = text.replace("*", "").lower().rpartition("score:")
    ending = SCORE.fullmatch(behind)
    if not found or not ending or (ending[2] and float(ending[2]) != highest):
        raise ValueError(f"an answer that does not end with Score: and a number: {text[-200:]!r}")
    score = float(ending[1])
    if not least <= score <= highest:
        raise ValueError(f"an answer whose score is not in {least:g} to {highest:g}: {text[-200:]!r}")
    return (score - least) / (highest - least)


@functools.cache
def read_settings():
    """The Settings of the environment; raises ValueError, naming the variable that is missing or wrong."""
    path = Path(os.environ.get("VLM_JUDGE_PROMPT", "").strip() or QUESTION)
    with refusing(f"VLM_JUDGE_PROMPT={path}"):
        question = path.read_text(encoding="utf-8")
        if "{prompt}" not in question:
            raise ValueError("the question must hold {prompt}, which the image's prompt takes the place of")
    score_range = os.environ.get("VLM_JUDGE_RANGE", "").strip() or "0,10"
    try:
        least, highest = (float(number) for number in score_range.split(","))
    except ValueError:
        least = highest = math.nan
    if not -math.inf < least < highest < math.inf:
        raise ValueError(f"VLM_JUDGE_RANGE={score_range}: must be two numbers, the least score and the highest: 0,10")
    return Settings(
        server=read_server("VLM_JUDGE", "http://127.0.0.1:8000/v1", concurrency=16),
        model=text_setting("VLM_JUDGE_MODEL", "Qwen/Qwen2.5-VL-7B-Instruct"),
        question=question,
        least=least,
        highest=highest,
        max_tokens=number_setting("VLM_JUDGE_MAX_TOKENS", 512, 1),
    )


def load():
    """Refuse, before any model loads, settings that are wrong and a server that is not there or lacks the model."""
    read_settings.cache_clear()
    settings = read_settings()
    names = ask_for_names(settings.server, "/models", lambda answer: [model["id"] for model in answer["data"]])
    if names is None:
        raise ValueError(f"VLM_JUDGE_URL={settings.server.url}: no /models there; is its /v1 missing?")
    if settings.model not in names:
        raise ValueError(f"VLM_JUDGE_MODEL={settings.model}: not at the server, which has {', '.join(names)}")


vlm_judge.settings = (
    "VLM_JUDGE_URL",
    "VLM_JUDGE_MODEL",
    "VLM_JUDGE_PROMPT",
    "VLM_JUDGE_RANGE",
    "VLM_JUDGE_MAX_TOKENS",
)
vlm_judge.load = load
