"""JSON over HTTP to the servers of rewards: time-outs, retries after growing pauses, several requests at once.

This is no reward; `vlm_judge` and `http_scorer` use it.
"""

import asyncio
import base64
import contextlib
import functools
import io
import json
import math
import os
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from common.errors import reason, truncate
from common.process import print_message
from common.rewards._served import OWN_NODE

import httpx
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
    api_key: str  # sent as a bearer token if it is not empty; a redirect to another host does not take it along


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
    api_key = os.environ.get(f"{prefix}_API_KEY", "").strip()
    if not api_key.isascii() or not api_key.isprintable():  # the key itself is not shown
        raise ValueError(f"{prefix}_API_KEY: has a character that no header of HTTP can have")
    return Server(
        url=url,
        concurrency=number_setting(f"{prefix}_CONCURRENCY", concurrency, 1),
        timeout_s=number_setting(f"{prefix}_TIMEOUT_S", 120.0, 0.001),
        retries=number_setting(f"{prefix}_RETRIES", 4, 0),
        api_key=api_key,
    )


async def ask(server: Server, path: str, payload: dict | None = None) -> Any:  # any JSON
    """POST `payload` as JSON to the server's url + path, or GET if there is none, and parse the answer.

    Raises:
        ServerError: one line with the address and the outcome of the last attempt.
    """
    url = server.url + path
    body = await _answer(server, url, None if payload is None else json.dumps(payload).encode())
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"{url}: the answer is not JSON: {_excerpt(body)}") from None


async def command(server: Server, path: str) -> None:
    """POST {} to the path at the server's root, beside its API's /v1. Only vLLM's development mode takes such paths.

    Raises:
        ServerError: as of ask.
    """
    await _answer(server, server.url.removesuffix("/v1") + path, b"{}")


async def _answer(server: Server, url: str, content: bytes | None) -> bytes:
    """The bytes of the server's answer, in as many attempts as it is given."""
    for attempt in range(server.retries + 1):
        try:
            body = await _exchange(server, url, content)
        except _Unavailable as error:
            fault = str(error)
        else:
            _unanswered.discard(url)
            return body
        if attempt < server.retries:
            if url not in _unanswered:  # one line for all requests under way
                _unanswered.add(url)
                print_message(f"{url}: {fault}; asking again, up to {server.retries} times")
            await asyncio.sleep(min(BACK_OFF_S * 2**attempt, LONGEST_BACK_OFF_S))
    attempts = f", in each of {server.retries + 1} attempts" if server.retries else ""
    raise ServerError(f"{url}: {fault}{attempts}")


def ask_for_names(server: Server, path: str, read_names: Callable[[Any], Iterable]) -> list[str] | None:
    """The names that a server lists at `path`; None if it has no such address. Asked once, before a run.

    read_names: takes the names out of the parsed answer.

    Raises:
        ValueError: the server does not answer, or its answer has no names.
    """
    try:
        answer = asyncio.run(ask(server._replace(retries=0, timeout_s=min(server.timeout_s, 30.0)), path))
    except NotFound:
        return None
    except ServerError as error:
        raise ValueError(str(error)) from None
    try:
        return [str(name) for name in read_names(answer)]
    except (KeyError, TypeError):
        raise ValueError(f"{server.url}{path}: not a list of names: {str(answer)[:200]}") from None


def ask_for_each(ask_for: Callable[[Item], Awaitable[Result]], items: Sequence[Item], concurrency: int) -> list[Result]:
    """[await ask_for(item) for item in items], in that order, at most `concurrency` of them under way at once.

    The first exception is raised at once: no further item is begun, and requests under way are given up.
    """
    waiting = iter(enumerate(items))
    results: dict[int, Result] = {}  # by place

    async def work() -> None:
        for place, item in waiting:
            results[place] = await ask_for(item)

    async def work_together() -> None:
        await asyncio.gather(*[work() for _ in range(min(concurrency, len(items)))])

    asyncio.run(work_together())
    return [results[place] for place in range(len(items))]


class _Unavailable(Exception):
    """A fault that another attempt may mend."""


_certificates = functools.cache(ssl.create_default_context)  # what this machine trusts; httpx has a list of its own


async def _exchange(server: Server, url: str, content: bytes | None) -> bytes:
    """The bytes of the server's answer to one attempt."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # as LARGEST_ANSWER counts its bytes
    if server.api_key:
        headers["Authorization"] = f"Bearer {server.api_key}"
    client = httpx.AsyncClient(
        verify=_certificates(),
        timeout=None,  # httpx's begins again with every byte
        follow_redirects=True,
        trust_env=not url.startswith(OWN_NODE),  # no proxy between a run and a server on its own machine
    )
    method = "GET" if content is None else "POST"
    try:
        async with (
            asyncio.timeout(server.timeout_s),
            client,
            client.stream(method, url, content=content, headers=headers) as response,
        ):
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
                if len(body) > LARGEST_ANSWER:
                    break
    except TimeoutError:
        raise _Unavailable(f"no answer within {server.timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _Unavailable(f"no answer ({reason(error)})") from None
    if not response.is_success:
        fault = f"HTTP {response.status_code}: {_excerpt(body)}"
        if response.status_code in RETRIED:
            raise _Unavailable(fault)
        raise KINDS.get(response.status_code, ServerError)(f"{url}: {fault}")
    if len(body) > LARGEST_ANSWER:
        raise ServerError(f"{url}: the answer has more than {LARGEST_ANSWER} bytes")
    return bytes(body)


def _excerpt(body: bytes | bytearray) -> str:
    text = body.decode(errors="replace").strip()
    return truncate(text[:200]) if text else "nothing"


async def png_base64(image: Image) -> str:
    """A PIL image as a PNG, in base64. It takes long, so a thread does it while other requests go on."""

    def encode() -> str:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return base64.b64encode(buffer.getvalue()).decode()

    return await asyncio.to_thread(encode)


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
    with contextlib.suppress(ValueError):  # which the line below says in words of the setting
        value = type(default)(text)
        if at_least <= value < math.inf:
            return value
    wanted = "a whole number" if isinstance(default, int) else "a number"
    raise ValueError(f"{name}={text}: must be {wanted}, at least {at_least:g}")
