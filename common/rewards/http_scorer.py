"""A scorer of one's own behind HTTP: any program that takes images as JSON and answers with numbers.

For rewards whose packages do not stand beside this repository's, or whose network has a machine of its own.
docs/scorer_server.py is such a server in 40 lines. Settings are environment variables, the same for all ranks:

    HTTP_SCORER_URL          address of the server; images go to URL/score
    HTTP_SCORER_REWARD       which of its rewards is asked for; REWARD/METRIC where it gives several numbers
    HTTP_SCORER_BATCH_SIZE   images in a request, at most; 16
    HTTP_SCORER_CONCURRENCY  requests of a rank under way at once; 4
    HTTP_SCORER_TIMEOUT_S    seconds to wait for a connection, and for an answer; 120
    HTTP_SCORER_RETRIES      further attempts where there is no answer or a server's error, after 1, 2, 4 ... 30 s; 4
    HTTP_SCORER_API_KEY      sent as a bearer token; none

A request is POSTed to URL/score:

    {"requests": [{"history": [{"text": PROMPT, "image_b64": PNG}], "required_rewards": [REWARD], "metadata": {...}}]}

    requests          one for each image
    history           one turn: the prompt, and the image as a PNG in base64
    required_rewards  the one of HTTP_SCORER_REWARD, without METRIC
    metadata          the other fields of the prompt's record, which must be such as JSON has

The answer has an entry for each request, in their order:

    {"results": [{REWARD: {METRIC: NUMBER}}], "errors": [{}]}

    results           REWARD's number, finite, or its numbers by name; higher is better
    errors            {REWARD: TEXT}, or any other that is not empty, where that image could not be scored; {} where it
                      could

An error of an image, or a number that is not finite, is that image's failure; anything else is the run's. GET
URL/rewards, {"rewards": [NAME, ...]}, is asked for once at the start; a server need not have it.
"""

import functools
import json
import math
from typing import NamedTuple

from common.json_http import (
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


class Settings(NamedTuple):
    server: Server
    reward: str
    metric: str  # empty: the only one
    batch_size: int


def http_scorer(images, prompts, metadata):
    """What the server says of each image, on its own scale, or the exception that says why it does not."""
    settings = read_settings()
    turns = list(zip(images, prompts, metadata, strict=True))
    size = settings.batch_size
    batches = [turns[i : i + size] for i in range(0, len(turns), size)]
    scored = in_threads(lambda batch: ask_for(settings, batch), batches, settings.server.concurrency)
    return [score for batch in scored for score in batch]


def ask_for(settings, batch):
    """The scores of a batch of (image, prompt, metadata), a float or an exception each."""
    requests = []
    for image, prompt, data in batch:
        turn = {"text": prompt, "image_b64": png_base64(image)}
        requests.append({"history": [turn], "required_rewards": [settings.reward], "metadata": data})
    answer = ask(settings.server, "/score", {"requests": requests})
    url = f"{settings.server.url}/score"
    columns = []
    for field in ("results", "errors"):
        column = answer.get(field) if isinstance(answer, dict) else None
        if not isinstance(column, list) or not all(isinstance(entry, dict) for entry in column):
            raise ServerError(f'{url}: the answer has no "{field}", a list of objects: {str(answer)[:200]}')
        if len(column) != len(batch):
            raise ServerError(f'{url}: "{field}" has {len(column)} entries for {len(batch)} requests')
        columns.append(column)
    return [read_score(settings, result, error) for result, error in zip(*columns, strict=True)]


def read_score(settings, result, error):
    """The score in one entry of "results", or the ValueError that the entry of "errors" makes of it."""
    if error:  # under whatever name: one reward is asked for
        return ValueError(str(error.get(settings.reward, error)))
    score = result.get(settings.reward)
    if isinstance(score, dict):
        metrics = [settings.metric] if settings.metric else list(score)
        score = score.get(metrics[0]) if len(metrics) == 1 else None
    elif settings.metric:
        score = None  # a number without a name, which need not be the metric's
    if isinstance(score, bool) or not isinstance(score, int | float):
        wanted = "/".join(name for name in (settings.reward, settings.metric) if name)
        raise ServerError(
            f"{settings.server.url}/score: neither a number nor an error for {wanted}: {str(result)[:200]}"
        )
    return float(score) if math.isfinite(score) else ValueError(f"score {score}")


@functools.cache
def read_settings():
    """The Settings of the environment; raises ValueError, naming the variable that is missing or wrong."""
    reward, _, metric = text_setting("HTTP_SCORER_REWARD", "clip").partition("/")
    return Settings(
        server=read_server("HTTP_SCORER", "http://127.0.0.1:8080", concurrency=4),
        reward=reward,
        metric=metric,
        batch_size=number_setting("HTTP_SCORER_BATCH_SIZE", 16, 1),
    )


def load():
    """Refuse, before any model loads, settings that are wrong and a server that is not there or lacks the reward."""
    read_settings.cache_clear()
    settings = read_settings()
    names = ask_for_names(settings.server, "/rewards", lambda answer: answer["rewards"])
    if names is not None and settings.reward not in names:
        raise ValueError(f"HTTP_SCORER_REWARD={settings.reward}: not at the server, which has {', '.join(names)}")


def check_metadata(metadata):
    """Raises ValueError, naming the column, for what JSON does not have: the bytes, dates, Decimals of a .parquet."""
    for column, value in metadata.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(f"{column}: http_scorer cannot send it: {error}") from None


http_scorer.settings = ("HTTP_SCORER_URL", "HTTP_SCORER_REWARD")
http_scorer.load = load
http_scorer.check_metadata = check_metadata
