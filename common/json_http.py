"""JSON over HTTP to the servers of rewards: time-outs, bounded retries with back-off, several requests at once."""

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
from typing import NamedTuple

from common.refusals import brief, reason
from common.stops import say

BACK_OFF_S = 1.0  # before the first retry, twice as long before each further one
LONGEST_BACK_OFF_S = 30.0
RETRIED = (408, 425, 429, 500, 502, 503, 504)  # HTTP codes of a server that is busy, or was for a moment


_unanswered = set()  # addresses of which a line has said that they do not answer


class ServerError(RuntimeError):
    """A server that does not answer, or not as it should: nobody's score."""


class NotFound(ServerError):
    """HTTP 404, 405 or, of Python's own server, 501: the server has no such address."""


class RefusedRequest(ServerError):
    """One request that the server does not take, an image too large for it, say; others may pass."""


KINDS = {404: NotFound, 405: NotFound, 501: NotFound, 400: RefusedRequest, 413: RefusedRequest, 422: RefusedRequest}


class Server(NamedTuple):
    """A server's address and the bounds on waiting for it, read_server's."""

    url: str  # without a slash at its end
    concurrency: int  # requests of a rank under way at once
    timeout_s: float  # to wait for a connection, and for each piece of an answer
    retries: int  # further attempts where there is no answer, or one of RETRIED
    api_key: str  # sent as a bearer token; empty: none


def read_server(prefix, example_url, concurrency):
    """The Server of the environment variables PREFIX_URL, _CONCURRENCY (which has that default), _TIMEOUT_S (120),
    _RETRIES (4) and _API_KEY (none).

    Raises:
        ValueError: naming the variable that is missing or wrong.
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


def ask(server, path, payload=None):
    """What the Server answers to a POST of `payload` as JSON to its url + path, or to a GET without one, parsed.

    Raises:
        ServerError: in one line, with the address and what came of the last attempt.
    """
    url = server.url + path
    headers = {"Content-Type": "application/json"}
    if server.api_key:
        headers["Authorization"] = f"Bearer {server.api_key}"
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, headers)
    for attempt in range(server.retries + 1):
        try:
            body = _read(request, server.timeout_s)
        except _Unavailable as error:
            fault = error
        else:
            _unanswered.discard(url)
            return _parse(url, body)
        if attempt < server.retries:
            if url not in _unanswered:  # once for all requests under way
                _unanswered.add(url)
                say(f"{url}: {fault}; asking again, up to {server.retries} times")
            time.sleep(min(BACK_OFF_S * 2**attempt, LONGEST_BACK_OFF_S))
    attempts = f", in each of {server.retries + 1} attempts" if server.retries else ""
    raise ServerError(f"{url}: {fault}{attempts}")


def ask_for_names(server, path, read_names):
    """The names that the Server lists at `path`, before a run; None where it has no such address.

    read_names: a function of the parsed answer. Raises ValueError where the server is not there, or answers otherwise.
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
    """What another attempt may mend."""


def _read(request, timeout_s):
    """The bytes that the server answers with."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.read()
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


def _body(error):
    """What an HTTPError came with."""
    try:
        return error.read()
    except (OSError, http.client.HTTPException):
        return b""


def _parse(url, body):
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"{url}: the answer is not JSON: {_excerpt(body)}") from None


def _excerpt(body):
    text = body.decode(errors="replace").strip()
    return brief(text[:200]) if text else "nothing"


def in_threads(function, items, num_threads):
    """[function(item) for item in items], in that order, by at most num_threads threads.

    The first exception is raised at once and no further item begun. The threads are daemons: a server that hangs does
    not keep a run from ending.
    """
    waiting = queue.SimpleQueue()  # of (place, item)
    finished = queue.SimpleQueue()  # of (place, result, error)
    for place, item in enumerate(items):
        waiting.put((place, item))
    has_ended = threading.Event()

    def work():
        while not has_ended.is_set():
            try:
                place, item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                finished.put((place, function(item), None))
            except Exception as error:
                has_ended.set()
                finished.put((place, None, error))

    for _ in range(min(num_threads, len(items))):
        threading.Thread(target=work, daemon=True).start()
    results = [None] * len(items)
    for _ in items:
        place, result, error = finished.get()
        if error:
            raise error
        results[place] = result
    return results


def png_base64(image):
    """A PIL image as a PNG, in base64."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


# ---- settings, environment variables ---------------------------------------------------------------------------------
def text_setting(name, example):
    """The environment variable `name`; raises ValueError where it is not set."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ValueError(f"the environment variable {name} is not set; for example {name}={example}")
    return value


def number_setting(name, default, at_least):
    """The environment variable `name`, or the default, as a finite number of the default's type."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    kind = type(default)
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not at_least <= value < math.inf:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}={text}: must be {wanted}, at least {at_least:g}")
    return value
