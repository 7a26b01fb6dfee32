"""JSON over HTTP to the servers of rewards: time-outs, retries after growing pauses, several requests at once.

This is no reward; `vlm_judge` and `http_scorer` use it.
"""

import base64
import http.client
import io
import json
import math
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from common.errors import brief, reason
from common.process import say

from PIL.Image import Image

BACK_OFF_S = 1.0  # the pause before the first retry, doubled before each further retry
LONGEST_BACK_OFF_S = 30.0
LARGEST_ANSWER = 64_000_000  # bytes
RETRIED = (408, 425, 429, 500, 502, 503, 504)  # HTTP codes of a server that is busy or was interrupted
Item = TypeVar("Item")
Result = TypeVar("Result")
Number = TypeVar("Number", int, float)

_unanswered: set[str] = set()  # addresses that we have reported as not answering


class ServerError(RuntimeError):
    """A server does not answer, or not as its protocol says. This is never one image's failure."""


class NotFound(ServerError):
    """The server has no such address: HTTP 404, 405, or 501 from Python's own server."""


class RefusedRequest(ServerError):
    """The server refuses one request, perhaps because its image is too large. Others may pass."""


KINDS = {404: NotFound, 405: NotFound, 501: NotFound, 400: RefusedRequest, 413: RefusedRequest, 422: RefusedRequest}


class Server(NamedTuple):
    """A server's address, and how long to wait for it."""

    url: str  # without a slash at its end
    concurrency: int  # a rank's requests under way at once
    timeout_s: float  # from an attempt's connection to the last byte of its answer
    retries: int  # further attempts if there is no answer, or an HTTP code of RETRIED
    api_key: str  # sent to this address as a bearer token if it is not empty; a redirect does not take it along


def read_server(prefix: str, example_url: str, concurrency: int) -> Server:
    """The Server that environment variables describe.

    PREFIX_URL has no default; PREFIX_CONCURRENCY has the default `concurrency`, PREFIX_TIMEOUT_S 120, PREFIX_RETRIES 4,
    and PREFIX_API_KEY none.

    Raises:
        ValueError: names the variable that is missing or wrong.
    """
    url = text_setting(f"{prefix}_URL", example_url).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{prefix}_URL={url}: must begin with http:// or https://, for example {example_url}")
    return Server(
        url=url,
        concurrency=number_setting(f"{prefix}_CONCURRENCY", concurrency, 1),
        timeout_s=number_setting(f"{prefix}_TIMEOUT_S", 120.0, 0.001),
        retries=number_setting(f"{prefix}_RETRIES", 4, 0),
        api_key=os.environ.get(f"{prefix}_API_KEY", "").strip(),
    )


def ask(server: Server, path: str, payload: dict | None = None) -> Any:  # any JSON
    """POST `payload` as JSON to the server's url + path, or GET if there is none, and parse the answer.

    Raises:
        ServerError: one line with the address and the outcome of the last attempt.
    """
    url = server.url + path
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if server.api_key:
        request.add_unredirected_header("Authorization", f"Bearer {server.api_key}")
    for attempt in range(server.retries + 1):
        try:
            body = _read(request, server.timeout_s)
        except _Unavailable as error:
            fault = str(error)
        else:
            _unanswered.discard(url)
            return _parse(url, body)
        if attempt < server.retries:
            if url not in _unanswered:  # one line for all requests under way
                _unanswered.add(url)
                say(f"{url}: {fault}; asking again, up to {server.retries} times")
            time.sleep(min(BACK_OFF_S * 2**attempt, LONGEST_BACK_OFF_S))
    attempts = f", in each of {server.retries + 1} attempts" if server.retries else ""
    raise ServerError(f"{url}: {fault}{attempts}")


def ask_for_names(server: Server, path: str, read_names: Callable[[Any], Iterable]) -> list[str] | None:
    """The names that a server lists at `path`; None if it has no such address. Asked once, before a run.

    read_names: takes the names out of the parsed answer.

    Raises:
        ValueError: the server does not answer, or its answer has no names.
    """
    try:
        answer = ask(server._replace(retries=0, timeout_s=min(server.timeout_s, 30.0)), path)
    except NotFound:
        return None
    except ServerError as error:
        raise ValueError(str(error)) from None
    try:
        return [str(name) for name in read_names(answer)]
    except (KeyError, TypeError):
        raise ValueError(f"{server.url}{path}: not a list of names: {str(answer)[:200]}") from None


class _Unavailable(Exception):
    """A fault that another attempt may mend."""


def _read(request: urllib.request.Request, timeout_s: float) -> bytes:
    """The bytes of the server's answer, within timeout_s.

    A socket's own time-out begins again with every byte, so a thread waits at the socket and we wait for the thread. A
    thread that we no longer wait for ends with its connection.
    """
    outcomes: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def read() -> None:
        try:
            outcomes.put(_read_all(request, timeout_s))
        except Exception as error:
            outcomes.put(error)

    threading.Thread(target=read, daemon=True).start()
    try:
        outcome = outcomes.get(timeout=timeout_s)
    except queue.Empty:
        raise _Unavailable(f"no answer within {timeout_s:g} s") from None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _read_all(request: urllib.request.Request, timeout_s: float) -> bytes:
    """The bytes of the server's answer, of which each comes within timeout_s."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            body: bytes = response.read(LARGEST_ANSWER + 1)
            if response.length and len(body) <= LARGEST_ANSWER:  # bytes that were announced and did not come
                raise http.client.IncompleteRead(body, response.length)
    except urllib.error.HTTPError as error:
        fault = f"HTTP {error.code}: {_excerpt(_body(error))}"
        if error.code in RETRIED:
            raise _Unavailable(fault) from None
        raise KINDS.get(error.code, ServerError)(f"{request.full_url}: {fault}") from None
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)  # a URLError's
        if isinstance(cause, TimeoutError):
            raise _Unavailable(f"no answer within {timeout_s:g} s") from None
        raise _Unavailable(f"no answer ({reason(cause)})") from None
    if len(body) > LARGEST_ANSWER:
        raise ServerError(f"{request.full_url}: the answer has more than {LARGEST_ANSWER} bytes")
    return body


def _body(error: urllib.error.HTTPError) -> bytes:
    """The first bytes that came with an HTTP error."""
    try:
        return error.read(1000)
    except (OSError, http.client.HTTPException):
        return b""


def _parse(url: str, body: bytes) -> Any:  # any JSON
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"{url}: the answer is not JSON: {_excerpt(body)}") from None


def _excerpt(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return brief(text[:200]) if text else "nothing"


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], num_threads: int) -> list[Result]:
    """[function(item) for item in items], in that order, computed by at most num_threads threads.

    The first exception is raised at once, and no further item is begun. The threads are daemons, so that a server that
    hangs cannot keep a run from ending.
    """
    waiting: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()  # (place, item)
    finished: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()  # one for each item, None for success
    results: dict[int, Result] = {}  # by place
    for place, item in enumerate(items):
        waiting.put((place, item))
    has_ended = threading.Event()

    def work() -> None:
        while not has_ended.is_set():
            try:
                place, item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[place] = function(item)
                finished.put(None)
            except Exception as error:
                has_ended.set()
                finished.put(error)

    for _ in range(min(num_threads, len(items))):
        threading.Thread(target=work, daemon=True).start()
    for _ in items:
        error = finished.get()
        if error:
            raise error
    return [results[place] for place in range(len(items))]


def png_base64(image: Image) -> str:
    """A PIL image as a PNG, in base64."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


# ---- settings, environment variables ---------------------------------------------------------------------------------
def text_setting(name: str, example: str) -> str:
    """The environment variable `name`; raises ValueError if it is not set."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ValueError(f"the environment variable {name} is not set; for example {name}={example}")
    return value


def number_setting(name: str, default: Number, at_least: float) -> Number:
    """The environment variable `name`, or the default, as a finite number of the default's type.

    Raises:
        ValueError: the variable is no such number, or below `at_least`.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    kind = type(default)
    try:
        value = kind(text)
        is_valid = at_least <= value < math.inf
    except ValueError:
        is_valid = False
    if not is_valid:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}={text}: must be {wanted}, at least {at_least:g}")
    return value
