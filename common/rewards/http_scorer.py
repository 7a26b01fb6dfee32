"""A scorer of your own behind HTTP: any program that takes images as JSON and answers with numbers.

    python tools/scorer_server.py 8080 &        (such a server in 40 lines)
    export HTTP_SCORER_URL=http://127.0.0.1:8080 HTTP_SCORER_REWARD=redness
    torchrun --standalone flow_grpo.py --reward http_scorer

Use it for a reward whose packages do not fit beside this repository's, or whose network has a machine of its own. It
needs the server and these environment variables, the same for all ranks; defaults stand at the end of the line:

    HTTP_SCORER_URL          address of the server; images go to URL/score
    HTTP_SCORER_REWARD       the server's reward to ask for, or REWARD/METRIC if that gives several numbers
    HTTP_SCORER_BATCH_SIZE   the largest number of images in a request; 16
    HTTP_SCORER_CONCURRENCY  a rank's requests under way at once; 4
    HTTP_SCORER_TIMEOUT_S    seconds from a request to the last byte of its answer; 120
    HTTP_SCORER_RETRIES      further attempts after no answer or a server's error, after 1, 2, 4 ... 30 s; 4
    HTTP_SCORER_API_KEY      sent as a bearer token, to this host alone; none

A request is POSTed to URL/score:

    {"requests": [{"history": [{"text": PROMPT, "image_b64": PNG}], "required_rewards": [REWARD], "metadata": {...}}]}

    requests          one for each image
    history           one turn: the prompt, and the image as a PNG in base64
    required_rewards  HTTP_SCORER_REWARD without METRIC
    metadata          the other fields of the prompt's record, which JSON must be able to hold
    sources_b64       only for an edit: its record's pictures "image", as PNGs in base64; a "mask" is not sent

The answer has one entry for each request, in the same order:

    {"results": [{REWARD: {METRIC: NUMBER}}], "errors": [{}]}

    results           REWARD's number, finite, or its numbers by name; higher is better
    errors            {} if the image could be scored; otherwise {REWARD: TEXT}, or any object that is not empty

An error, or a number that is not finite, is that image's failure. Anything else that is wrong ends the run. At the
start GET URL/rewards is asked once for {"rewards": [NAME, ...]}; a server need not have it.

Several scorers in one run have names, http_scorer:red and http_scorer:sharp, also those of their metrics. Each
has settings of its own and none of the above: HTTP_SCORER_RED_URL, HTTP_SCORER_RED_REWARD and so on.
"""

import functools
import json
import math
import sys
from typing import Any, NamedTuple

from common.rewards._json_http import (
    Server,
    ServerError,
    ask,
    ask_for_each,
    ask_for_names,
    number_setting,
    png_base64,
    read_server,
    text_setting,
)

from PIL.Image import Image

PREFIX = "HTTP_SCORER"


class Settings(NamedTuple):
    server: Server
    reward: str
    metric: str  # empty if the reward has only one number
    batch_size: int


def http_scorer(
    images: list[Image], prompts: list[str], metadata: list[dict], prefix: str = PREFIX
) -> list[float | Exception]:
    """The server's score of each image, on the server's scale, or the exception that says why there is none.

    prefix: how the environment variables begin, HTTP_SCORER or that of a named scorer.
    """
    settings = read_settings(prefix)
    turns = list(zip(images, prompts, metadata, strict=True))
    size = settings.batch_size
    batches = [turns[i : i + size] for i in range(0, len(turns), size)]
    scored = ask_for_each(lambda batch: ask_for(settings, batch), batches, settings.server.concurrency)
    return [score for batch in scored for score in batch]


async def ask_for(settings: Settings, batch: list[tuple[Image, str, dict]]) -> list[float | Exception]:
    """The scores of a batch of (image, prompt, metadata): a float or an exception each."""
    requests = []
    for image, prompt, data in batch:
        turn = {"text": prompt, "image_b64": await png_base64(image)}
        request = {"history": [turn], "required_rewards": [settings.reward], "metadata": sent_fields(data)}
        if "image" in data:
            request["sources_b64"] = [await png_base64(source) for source in data["image"]]
        requests.append(request)
    answer = await ask(settings.server, "/score", {"requests": requests})
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


def read_score(settings: Settings, result: dict[str, Any], error: dict[str, Any]) -> float | Exception:
    """The score in one entry of "results", or the ValueError that the entry of "errors" stands for."""
    if error:  # under whatever name, because we ask for one reward
        return ValueError(str(error.get(settings.reward, error)))
    score: Any = result.get(settings.reward)
    if isinstance(score, dict):
        metrics = [settings.metric] if settings.metric else list(score)
        score = score.get(metrics[0]) if len(metrics) == 1 else None
    elif settings.metric:
        score = None  # a number without a name need not be the metric's
    is_number = isinstance(score, float) or (isinstance(score, int) and abs(score) <= sys.float_info.max)
    if isinstance(score, bool) or not is_number:
        wanted = "/".join(name for name in (settings.reward, settings.metric) if name)
        raise ServerError(
            f"{settings.server.url}/score: neither a number nor an error for {wanted}: {str(result)[:200]}"
        )
    return float(score) if math.isfinite(score) else ValueError(f"score {score}")


@functools.cache
def read_settings(prefix: str = PREFIX) -> Settings:
    """The Settings in the environment; raises ValueError, which names the variable that is missing or wrong."""
    reward, _, metric = text_setting(f"{prefix}_REWARD", "clip").partition("/")
    return Settings(
        server=read_server(prefix, "http://127.0.0.1:8080", concurrency=4),
        reward=reward,
        metric=metric,
        batch_size=number_setting(f"{prefix}_BATCH_SIZE", 16, 1),
    )


def load(prefix: str = PREFIX) -> None:
    """Raise ValueError for wrong settings, or if the server is not there or lacks the reward."""
    read_settings.cache_clear()
    settings = read_settings(prefix)
    names = ask_for_names(settings.server, "/rewards", lambda answer: answer["rewards"])
    if names is not None and settings.reward not in names:
        raise ValueError(f"{prefix}_REWARD={settings.reward}: not at the server, which has {', '.join(names)}")


def sent_fields(metadata: dict) -> dict:
    """A record's metadata without the pictures of an edit, "image" and "mask"."""
    pictures = ("image", "mask") if "image" in metadata else ()
    return {column: value for column, value in metadata.items() if column not in pictures}


def check_metadata(metadata: dict) -> None:
    """Raise ValueError, which names the column, for a value that JSON cannot hold: bytes, a date, a Decimal, a NaN."""
    for column, value in sent_fields(metadata).items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{column}: http_scorer cannot send it: {error}") from None


def variables(prefix: str) -> tuple[str, ...]:
    """The environment variables that scores depend on."""
    return (f"{prefix}_URL", f"{prefix}_REWARD")


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
http_scorer.settings = variables(PREFIX)  # type: ignore[attr-defined]
http_scorer.parts = ()  # type: ignore[attr-defined]
http_scorer.load = load  # type: ignore[attr-defined]
http_scorer.check_metadata = check_metadata  # type: ignore[attr-defined]
