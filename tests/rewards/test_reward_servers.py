"""vlm_judge and http_scorer against real servers that are good, slow, broken, wrong or gone, and beside a rollout."""

import asyncio
import base64
import contextlib
import datetime
import functools
import io
import json
import math
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import flow_grpo
from common import scoring
from common.data import PromptSet
from common.errors import RunError
from common.files.pictures import StoredImage
from common.files.prompts import read_prompts
from common.rewards import _json_http as json_http
from common.rewards._judge_answers import read_axes, read_parts, read_score
from common.rewards._loading import load_rewards, reward_settings
from common.rewards.vlm_judge import QUESTION, QUESTION_OF_EDITS
from common.scoring import Scorer, score_images
from tests.conftest import ROOT, TINY, few_eval_prompts, read_metrics, run_here, without_times
from tools import published_scorers, scorer_server

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

fast = pytest.mark.fast

IMAGES = [Image.new("RGB", (4, 4), (0, 50 * i, 0)) for i in range(4)]
PROMPTS = PromptSet([f"prompt {i}" for i in range(4)], [{"n": i} for i in range(4)])
KINDS = ["vlm_judge", "http_scorer"]


# ---- a server --------------------------------------------------------------------------------------------------------
class Server(ThreadingHTTPServer):
    """Listens on a free port. `answer` is a function (path, body) -> (status, content); a GET has the body None."""

    daemon_threads = True

    def __init__(self, answer):
        self.answer = answer
        self.requests = []  # (path, body, headers) of every POST
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send(*self.server.answer(self.path, None))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers))
        self.send(*self.server.answer(self.path, body))

    def send(self, status, content=b""):
        if callable(status):  # it answers by itself
            with contextlib.suppress(OSError):  # the client no longer waits
                status(self)
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client no longer waits
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *args):
        pass


def shown(kind, body):
    """The images in a request."""
    if kind == "vlm_judge":
        content = body["messages"][0]["content"]
        encoded = [part["image_url"]["url"].split("base64,")[1] for part in content if part["type"] == "image_url"]
    else:
        encoded = [request["history"][-1]["image_b64"] for request in body["requests"]]
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in encoded]


def number(image):
    """The place of an image in IMAGES."""
    return image.getpixel((0, 0))[1] // 50


def completion(text, finish_reason="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]}


def good_answer(kind, path, body):
    """The answer of a server that gives image i of IMAGES the score i / 10."""
    if body is None:
        return 200, {"data": [{"id": "tiny"}]} if kind == "vlm_judge" else {"rewards": ["green", "other"]}
    numbers = [number(image) for image in shown(kind, body)]
    if kind == "vlm_judge":
        return 200, completion(f"Nothing is right.\nScore: {numbers[0]}")
    results = [{"green": {"green": n / 10}} for n in numbers]
    return 200, {"results": results, "errors": [{} for _ in numbers]}


@pytest.fixture
def serve(monkeypatch):
    """serve(kind, answer) starts a server and points the reward's settings at it.

    It returns the server, and the rewards as load_rewards returns them.
    """
    servers = []
    for name in os.environ:  # the developer's own
        if re.fullmatch(r"(VLM_JUDGE|HTTP_SCORER)_.*|(?i:\w+_proxy)", name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(json_http, "BACK_OFF_S", 0.01)

    def start(kind, answer=None, load=True, own_name="", **settings):
        server = Server(answer or (lambda *request: good_answer(kind, *request)))
        servers.append(server)
        prefix = f"{kind}_{own_name}".upper().rstrip("_")
        defaults = {"URL": server.url, "MODEL": "tiny", "REWARD": "green", "TIMEOUT_S": "20", "RETRIES": "2"}
        for name, value in (defaults | settings).items():
            monkeypatch.setenv(f"{prefix}_{name}", str(value))
        return server, load_rewards([kind], [1]) if load else None

    yield start
    for server in servers:
        server.stop()


def fault_of(rewards, reward_failure="mask"):
    """The one line with which scoring IMAGES ends the run. It is printed, so that a failure shows it."""
    with pytest.raises(RunError) as error:
        score_images(rewards, IMAGES, PROMPTS, reward_failure)
    line = str(error.value)
    assert "\n" not in line and len(line) < 700
    print(line)
    return line


# ---- several by name -------------------------------------------------------------------------------------------------
def serve_three(serve):
    """The servers of two judges and a scorer, whose settings stand under their names."""
    style, _ = serve("vlm_judge", load=False, own_name="style", MODEL="tiny")
    text, _ = serve("vlm_judge", load=False, own_name="text", MODEL="tiny", RANGE="0,5", API_KEY="secret")
    red, _ = serve("http_scorer", load=False, own_name="red", REWARD="green")
    return style, text, red


THREE = ["vlm_judge:style", "vlm_judge:text", "http_scorer:red"]


@fast
def test_two_judges_and_a_scorer_have_settings_of_their_own(serve):
    servers = serve_three(serve)
    rewards = load_rewards(THREE, [1, 1, 1])
    details = [{} for _ in IMAGES]
    scores = score_images(rewards, IMAGES, PROMPTS, details=details)
    assert scores.tolist() == [[i / 10, i / 5, i / 10] for i in range(4)]
    assert [len(server.requests) for server in servers] == [4, 4, 1]
    assert details[3] == {name: {"answer": "Nothing is right.\nScore: 3"} for name in ("style", "text")}
    keys = [{headers["Authorization"] for _, _, headers in server.requests} for server in servers]
    assert keys == [{None}, {"Bearer secret"}, {None}]  # nobody gets another's key
    assert reward_settings(rewards) == {
        "style": {"VLM_JUDGE_STYLE_URL": servers[0].url, "VLM_JUDGE_STYLE_MODEL": "tiny"},
        "text": {"VLM_JUDGE_TEXT_URL": servers[1].url, "VLM_JUDGE_TEXT_MODEL": "tiny", "VLM_JUDGE_TEXT_RANGE": "0,5"},
        "red": {"HTTP_SCORER_RED_URL": servers[2].url, "HTTP_SCORER_RED_REWARD": "green"},
    }


@fast
def test_a_judges_question_is_the_one_that_was_there_when_it_was_loaded(serve, tmp_path):
    """Not what the file has once the next judge's server, which may take an hour, has started."""
    question = tmp_path / "style.txt"
    question.write_text("Is it {prompt}? Score:")
    style, _ = serve("vlm_judge", load=False, own_name="style", PROMPT=question)

    def edit(path, body):  # asked for its models, while `text` is being loaded
        question.write_text("Another question on {prompt}. Score:")
        return good_answer("vlm_judge", path, body)

    serve("vlm_judge", edit, load=False, own_name="text")
    score_images(load_rewards(["vlm_judge:style", "vlm_judge:text"], [1, 1]), IMAGES[:1], PROMPTS.select([0]))
    (_, body, _) = style.requests[0]
    assert body["messages"][0]["content"][-1]["text"] == "Is it prompt 0? Score:"


@fast
def test_scores_of_a_named_judge_share_its_call(serve):
    server, _ = serve("vlm_judge", lambda path, body: three_lines(path, body), load=False, own_name="a", RANGE="1,5")
    rewards = load_rewards(["vlm_judge:a", "vlm_judge:a.style"], [1, 1])
    assert score_images(rewards, IMAGES[:1], PROMPTS.select([0])).tolist() == [[0.5, 0.25]]
    assert len(server.requests) == 1


def three_lines(path, body):
    lines = "Alignment Score (1-5): 4\nCoherence Score (1-5): 3\nStyle Score (1-5): 2"
    return good_answer("vlm_judge", path, None) if body is None else (200, completion(lines))


@fast
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["vlm_judge:none"], "--reward none: the environment variable VLM_JUDGE_NONE_URL is not set; for example"),
        (
            ["http_scorer:none"],
            "--reward none: the environment variable HTTP_SCORER_NONE_REWARD is not set; for example",
        ),
        (["ocr:mine"], "--reward ocr:mine: ocr has no settings by name, as vlm_judge and http_scorer have"),
        (["vlm_judge:My"], "--reward vlm_judge:My: 'My' must be of small letters, digits and _"),
        (["vlm_judge:style.stile"], "--reward vlm_judge:style.stile: vlm_judge returns no stile; it returns score, "),
        (["http_scorer:red.red"], "--reward http_scorer:red.red: http_scorer returns no red; it returns score"),
        (["geneval.sofd"], "--reward geneval.sofd: geneval returns no sofd; it returns score, soft"),
        (["vlm_judge:"], "--reward vlm_judge:: '' must be of small letters, digits and _"),
        (["vlm_judge:style", "http_scorer:style"], "two rewards are named style"),
    ],
)
def test_a_name_without_settings_is_refused_in_one_line(serve, names, told):
    serve_three(serve)
    with pytest.raises(ValueError) as error:
        load_rewards(names, [1] * len(names))
    assert told in str(error.value) and "\n" not in str(error.value)


@fast
def test_a_judge_sleeps_while_nothing_is_scored(serve, monkeypatch):
    """One of two, by its own setting: woken by the first images of a rollout, asleep once all ranks have scores."""
    sleeping, _ = serve("vlm_judge", sleeper, load=False, own_name="style", URL="", SLEEP=1)
    monkeypatch.setenv("VLM_JUDGE_STYLE_URL", f"{sleeping.url}/v1")
    awake, _ = serve("vlm_judge", load=False, own_name="text")
    rewards = load_rewards(["vlm_judge:style", "vlm_judge:text"], [1, 1])
    waited = []
    monkeypatch.setattr(scoring, "gather_objects", lambda value: waited.append(len(sleeping.requests)) or [value])
    sleeping.requests.clear()
    for _ in range(2):
        score_images(rewards, IMAGES[:1], PROMPTS.select([0]))
        score_images(rewards, IMAGES[1:2], PROMPTS.select([1]))
        scoring.offload_rewards(rewards)
    paths = [path for path, _, _ in sleeping.requests]
    rollout = ["/wake_up", "/v1/chat/completions", "/v1/chat/completions", "/sleep?level=1"]
    assert paths == 2 * rollout and waited == [3, 7]  # when all ranks have been waited for it does not sleep yet
    assert [path for path, _, _ in awake.requests] == ["/chat/completions"] * 4
    monkeypatch.setenv("LOCAL_RANK", "1")  # whose first rank asks for all
    score_images(rewards, IMAGES[:1], PROMPTS.select([0]))
    scoring.offload_rewards(rewards)
    assert [path for path, _, _ in sleeping.requests[8:]] == rollout[:2]


def sleeper(path, body):
    """Of vLLM, whose answers to both commands are empty."""
    if path in ("/wake_up", "/sleep?level=1"):
        return 200, b""
    return good_answer("vlm_judge", path, body)


@fast
def test_a_judge_that_cannot_sleep_ends_the_run(serve):
    """In a line that names the setting: its memory would not be free."""

    def answer(path, body):
        return (404, b"Not Found") if path.startswith("/sleep") else sleeper(path, body)

    _, rewards = serve("vlm_judge", answer, SLEEP=1)
    with pytest.raises(RunError, match=r"VLM_JUDGE_SLEEP: http://127\.0\.0\.1:\d+/sleep.*404"):
        scoring.offload_rewards(rewards)


def test_a_run_trains_with_two_judges_and_a_scorer(serve, tmp_path):
    """Each has a metric of its own name, and best_adapter/ may be chosen by one; none is tried on grey images first."""

    def brightness(kind):
        return lambda path, body: mean_of(kind, body) if body else good_answer(kind, path, body)

    servers = [
        serve("vlm_judge", brightness("vlm_judge"), load=False, own_name="style")[0],
        serve("vlm_judge", brightness("vlm_judge"), load=False, own_name="text", RANGE="0,20")[0],
        serve("http_scorer", brightness("http_scorer"), load=False, own_name="red")[0],
    ]
    options = ["--reward", *THREE, "--reward_weights", 1, 1, 1, *TINY, "--rollout", "local", "--num_steps", 1]
    options += [*few_eval_prompts(tmp_path), "--best_by", "val/text/mean"]
    assert run_here(tmp_path, "flow_grpo.py", *options, "--name", "run") is None
    for row in read_metrics(tmp_path / "runs" / "run"):
        assert row["val/style/mean"] == pytest.approx(2 * row["val/text/mean"])
        assert row["val/style/mean"] == pytest.approx(row["val/red/mean"]) and row["val/red/mean"] > 0
    images = sum(len(shown("http_scorer", body)) for _, body, _ in servers[2].requests)
    assert [len(server.requests) for server in servers[:2]] == [images, images]


# ---- requests and scores ---------------------------------------------------------------------------------------------
@fast
def test_the_judge_is_shown_image_and_prompt(serve, tmp_path):
    question = tmp_path / "question.txt"
    question.write_text("{not a field} Is it {prompt}? {prompt}! Score:")
    settings = {"PROMPT": question, "RANGE": "-1,3", "MAX_TOKENS": 7, "API_KEY": "secret"}
    server, rewards = serve("vlm_judge", **settings)
    scores = score_images(rewards, IMAGES, PROMPTS)
    assert scores.tolist() == [[0.25], [0.5], [0.75], [1.0]]  # the scores 0 to 3 in the range -1 to 3
    assert len(server.requests) == 4
    for path, body, headers in server.requests:
        i = number(shown("vlm_judge", body)[0])
        picture, text = body["messages"][0]["content"]
        assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo")
        assert np.array_equal(np.asarray(shown("vlm_judge", body)[0]), np.asarray(IMAGES[i]))
        assert text == {"type": "text", "text": f"{{not a field}} Is it prompt {i}? prompt {i}! Score:"}
        assert (path, body["model"], body["temperature"], body["max_tokens"]) == ("/chat/completions", "tiny", 0, 7)
        assert headers["Authorization"] == "Bearer secret"


def edits():
    """Two prompts whose records have a picture, red, which `shown` would call the first."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(file, "PNG")
    record = {"image": [StoredImage("red.png", file.getvalue())], "tag": "a"}
    return PromptSet(["make it green", "make it blue"], [record, record])


@fast
def test_the_judge_sees_the_source_before_its_edit(serve):
    def answer(path, body):
        return good_answer("vlm_judge", path, body) if body is None else (200, completion(TWO_PARTS))

    server, rewards = serve("vlm_judge", answer)
    prompts = edits()
    details = [{}, {}]
    assert score_images(rewards, IMAGES[2:4], prompts, details=details).tolist() == [[0.4], [0.4]]
    assert details[0]["vlm_judge"] == {"instruction": 0.9, "preservation": 0.4, "answer": TWO_PARTS}
    _, body, _ = min(server.requests[-2:], key=lambda request: number(shown("vlm_judge", request[1])[1]))
    source, edit = shown("vlm_judge", body)
    assert source.getpixel((0, 0)) == (255, 0, 0) and number(edit) == 2
    question = body["messages"][0]["content"][-1]["text"]
    assert question == QUESTION_OF_EDITS.read_text().replace("{prompt}", "make it green")


TWO_PARTS = "The sign is green, and so is the wall.\n**Instruction:** 9\nPreservation: 4.\nScore: 4"


@fast
def test_a_part_of_a_score_outside_of_the_range_is_left_out():
    assert read_parts("Score: 4", 0, 10) == {}
    assert read_parts(TWO_PARTS, -1, 9) == {"instruction": 1, "preservation": 0.5}
    assert read_parts("Instruction: 7/10\nPreservation: 11\nScore: 4", 0, 10) == {"instruction": 0.7}
    assert read_parts("Instruction: 7/8\nScore: 4", 0, 10) == {}  # of another range


THREE_LINES = "**Alignment Score (1-5):** 2.5\nCoherence Score (1-5): 2\nStyle Score (1-5): 3"


@fast
def test_the_three_lines_of_unified_reward_2(serve):
    """In its own order, as its repository shows them."""
    answer = lambda path, body: good_answer("vlm_judge", path, body) if body is None else (200, completion(THREE_LINES))
    _, rewards = serve("vlm_judge", answer, RANGE="1,5")
    details = [{}]
    scores = score_images(rewards, IMAGES[:1], PROMPTS.select([0]), details=details)
    assert scores.tolist() == [[pytest.approx(1.5 / 4)]]
    said = details[0]["vlm_judge"]
    assert said.pop("answer") == THREE_LINES and said == {"alignment": 0.375, "coherence": 0.25, "style": 0.5}


@fast
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Score: 4", None),
        ("Style Score (1-5): 3\nScore: 4", "Alignment, Coherence.* Style"),
        (f"{THREE_LINES}\nStyle Score: 4", "Alignment, Coherence.* Style"),
        (THREE_LINES.replace("2.5", "5.5"), "alignment.*VLM_JUDGE_RANGE, 1,5"),
        (THREE_LINES.replace("(1-5): 3", "(1-10): 3"), "style.*VLM_JUDGE_RANGE, 1,5"),
    ],
)
def test_lines_of_another_kind_or_range_are_no_score(text, fault):
    if fault is None:
        assert read_axes(text, 1, 5) == {}
    else:
        with pytest.raises(ValueError, match=fault):
            read_axes(text, 1, 5)


@fast
def test_the_scorer_is_sent_the_fields_of_its_protocol(serve):
    server, rewards = serve("http_scorer", BATCH_SIZE=3, CONCURRENCY=1)
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [0, 0.1, 0.2, 0.3]
    bodies = [body for _, body, _ in server.requests]
    assert [path for path, _, _ in server.requests] == ["/score"] * 2
    assert [len(body["requests"]) for body in bodies] == [3, 1]
    for i, request in enumerate(bodies[0]["requests"] + bodies[1]["requests"]):
        assert set(request) == {"history", "required_rewards", "metadata"}
        assert request["required_rewards"] == ["green"] and request["metadata"] == {"n": i}
        assert [turn["text"] for turn in request["history"]] == [f"prompt {i}"]
    assert [number(image) for body in bodies for image in shown("http_scorer", body)] == [0, 1, 2, 3]
    assert "Authorization" not in server.requests[0][2]


@fast
def test_the_scorer_is_sent_the_source_beside_the_metadata_and_no_mask(serve, tmp_path):
    server, rewards = serve("http_scorer")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "source.png")
    path = tmp_path / "edits.jsonl"
    path.write_text('{"prompt": "make it green", "image": "source.png", "mask": "source.png", "n": 7}\n')
    score_images(rewards, IMAGES[:1], read_prompts(path, rewards))
    ((_, body, _),) = server.requests
    (request,) = body["requests"]
    assert request["metadata"] == {"n": 7}
    (source,) = request["sources_b64"]
    assert Image.open(io.BytesIO(base64.b64decode(source))).getpixel((0, 0)) == (255, 0, 0)


@fast
@pytest.mark.parametrize(
    ("wanted", "result", "score"),
    [
        ("green", {"green": {"any name": 3}}, 3),
        ("green", {"green": -2.5, "other": 1}, -2.5),
        ("green/b", {"green": {"a": 1, "b": 2}}, 2),
    ],
)
def test_a_result_is_a_number_or_one_of_several_by_name(serve, wanted, result, score):
    def answer(path, body):
        return (200, {"results": [result] * 4, "errors": [{}] * 4}) if body else good_answer("http_scorer", path, body)

    _, rewards = serve("http_scorer", answer, REWARD=wanted)
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [score] * 4


@fast
@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 0.7),
        ("Good.\n**Score:** 8/10", 0.8),
        ("**Score**: 10.", 1.0),
        ("score: 3\nNo: SCORE: 4.5 / 10 .\n", 0.45),
        ("Score: 10 would be perfect; I give 3.", None),
        ("Score: 5/100", None),
        ("Score: 7-8", None),
        ("Score: 7/", None),
        ("Score: 4.5, for the cat.", None),
        ("It scores 9 of 10.", None),
        ("Score: seven", None),
        ("Score: 4\nScore: ?", None),  # an earlier score never counts
        ("Score: 11", None),
        ("Score: -1", None),
        ("Score: 8,5", None),
        ("Score: 1e1", None),
        ("Score: 1.2.3", None),
        ("Score: 70%", None),
        ("Score: nan", None),
        ("Score:", None),
        ("", None),
    ],
)
def test_the_rule_by_which_an_answer_is_read(text, score):
    if score is None:
        with pytest.raises(ValueError, match=re.escape(repr(text[-200:]))):
            read_score(text, 0, 10)
    else:
        assert read_score(text, 0, 10) == pytest.approx(score, abs=1e-15)


@fast
def test_the_committed_question_asks_for_what_is_read():
    question = QUESTION.read_text()
    assert question.count("{prompt}") == 1 and question.rstrip().endswith("Score: N")
    assert read_score(question.replace("Score: N", "Score: 10"), 0, 10) == 1


# ---- servers that fail -----------------------------------------------------------------------------------------------
def cut_short(handler):
    """The server dies in the middle of an answer."""
    handler.wfile.write(b'HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n{"res')


def silent(handler):
    handler.connection.settimeout(20)
    handler.rfile.read(1)  # until the client leaves


def moved(handler, address):
    handler.send_response(307)
    handler.send_header("Location", address)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def dripping(start):
    """A server whose every byte comes within the time-out, which holds for the whole answer."""

    def drip(handler):
        handler.wfile.write(start)
        for _ in range(400):  # 20 s
            handler.wfile.write(b"a")
            time.sleep(0.05)

    return drip


def flooding(status):
    """A server whose answer does not end."""

    def flood(handler):
        handler.send_response(status)
        handler.end_headers()
        for _ in range(10_000):
            handler.server.sent += handler.wfile.write(b" " * 10_000)

    return flood


FAULTS = {  # what a server answers, how it is told, and whether another attempt may mend it
    "busy": ((500, b"out of memory"), "HTTP 500: out of memory", True),
    "cut short": ((cut_short, None), "(peer closed connection without sending complete message body", True),
    "silent": ((silent, None), " 0.5 s", True),
    "dripping headers": ((dripping(b"HTTP/1.0 200 OK\r\n"), None), " 0.5 s", True),
    "dripping body": ((dripping(b"HTTP/1.0 200 OK\r\n\r\n"), None), " 0.5 s", True),
    "no HTTP": (
        (lambda handler: handler.wfile.write(b"SSH-2.0\r\n\r\n"), None),
        "(illegal status line",
        True,
    ),
    "flooding": ((flooding(200), None), " 1000 ", False),
    "flooding an error": ((flooding(401), None), "HTTP 401: ", False),
    "in a circle": ((lambda handler: moved(handler, handler.path), None), "(Exceeded maximum allowed", True),
    "refusing a batch": ((413, b""), "HTTP 413: ", False),
    "forbidden": ((403, b"no\nkey"), "HTTP 403: no\\nkey", False),
}


@fast
@pytest.mark.parametrize("case", FAULTS)
def test_a_server_that_fails_ends_the_run(serve, case, monkeypatch, capfd):
    answer, told, is_retried = FAULTS[case]
    monkeypatch.setattr(json_http, "LARGEST_ANSWER", 1000)
    settings = {"TIMEOUT_S": 0.5 if "0.5" in told else 20, "RETRIES": 1, "CONCURRENCY": 1}
    good = functools.partial(good_answer, "http_scorer")
    server, rewards = serve("http_scorer", lambda path, body: answer if body else good(path, body), **settings)
    server.sent = 0
    line = fault_of(rewards)
    assert f"{server.url}/score: " in line and told in line and (" of 2 " in line) == is_retried
    if case != "in a circle":
        assert len(server.requests) == 1 + is_retried
    assert server.sent < 50e6  # what the sockets have taken in
    reported = [line for line in capfd.readouterr().err.splitlines() if server.url in line]
    assert len(reported) == is_retried and all(" 1 " in line.rpartition(";")[2] for line in reported)


@fast
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "answer",
    [*((code, b"busy") for code in (408, 425, 429, 500, 502, 503, 504)), (cut_short, None), (silent, None)],
)
def test_a_fault_that_passes_is_retried(serve, kind, answer):
    faults = iter([answer, answer])

    def failing(path, body):
        return (body and next(faults, None)) or good_answer(kind, path, body)

    server, rewards = serve(kind, failing, CONCURRENCY=1, TIMEOUT_S=0.5 if answer[0] is silent else 20)
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [0, 0.1, 0.2, 0.3]
    assert len(server.requests) == 2 + (4 if kind == "vlm_judge" else 1)


@fast
def test_the_pause_before_another_attempt_doubles_up_to_half_a_minute(serve, monkeypatch):
    serve("http_scorer", lambda path, body: (503, b""), load=False, RETRIES=7)
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(json_http, "BACK_OFF_S", 1.0)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(json_http.ServerError, match=" of 8 "):
        ask("/score", {})
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


@fast
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_dies_between_requests_ends_the_run(serve, kind, capfd):
    server, rewards = serve(kind)
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [0, 0.1, 0.2, 0.3]
    server.stop()
    assert re.search(r"\(All connection attempts failed\), .* of 3 ", fault_of(rewards))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if server.url in line]  # one line for four requests
    assert re.search(r"\(All connection attempts failed\); .* 2 ", line)


@fast
@pytest.mark.parametrize("payload", [None, {}])
def test_a_token_does_not_follow_a_redirect(serve, payload):
    """A redirect may lead to another host, which must not learn the token."""
    seen = []

    def elsewhere(handler):
        seen.append(handler.headers.get("Authorization"))
        handler.send(200, {})

    def here(handler):
        seen.append(handler.headers.get("Authorization"))
        moved(handler, f"{other.url}/elsewhere")

    other, _ = serve("http_scorer", lambda path, body: (elsewhere, None), load=False)
    serve("http_scorer", lambda path, body: (here, None), load=False, API_KEY="a-secret")
    assert ask("/score", payload) == {}
    assert seen == ["Bearer a-secret", None]


def ask(path, payload=None):
    """What http_scorer's server answers."""
    return asyncio.run(json_http.ask(json_http.read_server("HTTP_SCORER", "", concurrency=1), path, payload))


@fast
@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({"http_proxy": "http://PROXY"}, "http://scorer.invalid:1/score"),
        ({"HTTP_PROXY": "PROXY"}, "http://scorer.invalid:1/score"),  # as curl takes it
        ({"HTTP_PROXY": "http://PROXY", "NO_PROXY": "localhost,scorer.invalid"}, None),
        ({}, None),
    ],
)
def test_the_environments_proxy_is_asked(serve, monkeypatch, variables, asked):
    proxy, _ = serve("http_scorer", lambda path, body: (200, {"path": path}), load=False, RETRIES=0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("PROXY", proxy.url.removeprefix("http://")))
    monkeypatch.setenv("HTTP_SCORER_URL", "http://scorer.invalid:1")
    if asked:
        assert ask("/score") == {"path": asked}
    else:
        with pytest.raises(json_http.ServerError, match="^http://scorer.invalid:1/score:"):
            ask("/score")


@fast
def test_no_proxy_is_asked_for_a_server_on_this_machine(serve, monkeypatch):
    """As the one that VLM_JUDGE_SERVE starts."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    serve("http_scorer", lambda path, body: (200, {"path": path}), load=False, RETRIES=0)
    assert ask("/score") == {"path": "/score"}


GARBAGE = {
    "vlm_judge": [
        (b"<html>busy</html>", "JSON: <html>busy</html>"),
        (b"", "JSON: "),
        ({}, None),
        ([], None),
        ({"choices": []}, None),
        ({"choices": [{"text": "Score: 5"}]}, None),
        *(
            ({"choices": [{"message": {"content": content}}]}, None)
            for content in ([{"type": "text", "text": "Score: 5"}], 5, {"text": "Score: 5"}, True)
        ),
    ],
    "http_scorer": [
        (b"<html>busy</html>", "JSON: <html>busy</html>"),
        (b"\xff" * 500, "JSON"),
        ([1, 2, 3, 4], '"results"'),
        ({"results": [0.1, 0.2, 0.3, 0.4], "errors": [{}] * 4}, '"results"'),
        ({"results": [{"green": 1}] * 4}, '"errors"'),
        *(
            ({"results": [{"green": 1}] * results, "errors": [{}] * errors}, f" {wrong} ")
            for results, errors, wrong in ((3, 4, 3), (4, 0, 0), (5, 5, 5))
        ),
        *(
            ({"results": [result] * 4, "errors": [{}] * 4}, " green: ")
            for result in ({}, *({"green": odd} for odd in (None, "1", True, 10**400, {"a": 1, "b": 2}, {})))
        ),
    ],
}


@fast
@pytest.mark.parametrize(("kind", "content", "told"), [(kind, *case) for kind in KINDS for case in GARBAGE[kind]])
def test_garbage_is_never_a_score_and_never_one_images_failure(serve, kind, content, told):
    _, rewards = serve(kind, lambda path, body: (200, content) if body else good_answer(kind, path, body))
    assert (told or str(content)[:200]) in fault_of(rewards)


@fast
@pytest.mark.parametrize("result", [{"green": 0.5}, {"green": {"blue": 0.5}}])
def test_a_number_that_is_not_the_metrics_is_not_taken_for_it(serve, result):
    def answer(path, body):
        return (200, {"results": [result] * 4, "errors": [{}] * 4}) if body else good_answer("http_scorer", path, body)

    _, rewards = serve("http_scorer", answer, REWARD="green/foo")
    assert f" green/foo: {result}" in fault_of(rewards)


# the server's answer about image 1 alone; the other images get their scores
ONE_FAILS = {
    "no score": ("vlm_judge", (200, completion("I cannot judge this.")), "Score: "),
    "no text": ("vlm_judge", (200, completion(None)), "Score: "),
    "out of range": ("vlm_judge", (200, completion("Score: 55")), " 0 to 10"),
    "cut": ("vlm_judge", (200, completion("Score: 1", "length")), "cut at VLM_JUDGE_MAX_TOKENS 512"),
    "refused": ("vlm_judge", (400, b"image too large"), "HTTP 400: image too large"),
    "too large": ("vlm_judge", (413, b""), "HTTP 413: "),
    "not processed": ("vlm_judge", (422, b"no image"), "HTTP 422: no image"),
    "an error": ("http_scorer", ({}, {"green": "ValueError('too dark')"}), "too dark"),
    "an error of no name": ("http_scorer", ({"green": 0.0}, {"error": "boom"}), "{'error': 'boom'}"),
    "NaN": ("http_scorer", ({"green": {"green": math.nan}}, {}), "nan"),
    "infinite": ("http_scorer", ({"green": math.inf}, {}), "inf"),
    "both": ("http_scorer", ({"green": 0.0}, {"green": "timed out"}), "timed out"),
}


@fast
@pytest.mark.parametrize("case", ONE_FAILS)
def test_a_failure_of_one_image_is_masked_or_ends_the_run(serve, case):
    kind, failing, told = ONE_FAILS[case]

    def answer(path, body):
        status, content = good_answer(kind, path, body)
        if body and kind == "vlm_judge" and number(shown(kind, body)[0]) == 1:
            return failing
        if body and kind == "http_scorer":
            content["results"][1], content["errors"][1] = failing
        return status, content

    server, rewards = serve(kind, answer)
    scores = score_images(rewards, IMAGES, PROMPTS, "mask")[:, 0]
    assert scores[[0, 2, 3]].tolist() == [0, 0.2, 0.3] and scores[1].isnan()
    line = fault_of(rewards, "stop")
    assert re.match(rf".* {kind} .* 1 \(.* prompt 1\): ", line) and told in line


# ---- settings --------------------------------------------------------------------------------------------------------
SETTINGS = {
    "vlm_judge": [
        ({"URL": ""}, "VLM_JUDGE_URL=http://127.0.0.1:8000/v1"),
        ({"URL": "localhost:8000"}, "VLM_JUDGE_URL=localhost:8000: "),
        ({"MODEL": " "}, "VLM_JUDGE_MODEL "),
        ({"MODEL": "other"}, "VLM_JUDGE_MODEL=other: "),
        ({"PROMPT": "no/such.txt"}, "VLM_JUDGE_PROMPT=no/such.txt: No such file or directory"),
        ({"PROMPT": str(ROOT / "requirements.txt")}, "{prompt}"),
        ({"RANGE": "10,0"}, "VLM_JUDGE_RANGE=10,0: "),
        ({"RANGE": "0,nan"}, "VLM_JUDGE_RANGE=0,nan: "),
        ({"RETRIES": "-1"}, "VLM_JUDGE_RETRIES=-1: "),
        ({"CONCURRENCY": "2.5"}, "VLM_JUDGE_CONCURRENCY=2.5: "),
        ({"TIMEOUT_S": "inf"}, "VLM_JUDGE_TIMEOUT_S=inf: "),
        ({"API_KEY": "a\u0436"}, "VLM_JUDGE_API_KEY: "),
        ({"API_KEY": "two\nlines"}, "VLM_JUDGE_API_KEY: "),
    ],
    "http_scorer": [
        ({"URL": ""}, "HTTP_SCORER_URL=http://127.0.0.1:8080"),
        ({"URL": "file:///etc/passwd"}, "HTTP_SCORER_URL=file:///etc/passwd: "),
        ({"REWARD": ""}, "HTTP_SCORER_REWARD "),
        ({"REWARD": "blue"}, "HTTP_SCORER_REWARD=blue: "),
        ({"BATCH_SIZE": "x"}, "HTTP_SCORER_BATCH_SIZE=x: "),
    ],
}


@fast
@pytest.mark.parametrize(("kind", "settings", "told"), [(kind, *case) for kind in KINDS for case in SETTINGS[kind]])
def test_a_wrong_setting_is_refused_in_one_line(serve, kind, settings, told):
    with pytest.raises(ValueError) as error:
        serve(kind, **settings)
    line = str(error.value)
    assert line.startswith(f"--reward {kind}: ") and told in line and "\n" not in line
    print(line)


@fast
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((401, b"no key"), "HTTP 401: no key"),
        ((500, b"starting"), "HTTP 500: starting"),
        ((200, b"<html>"), "JSON: <html>"),
        ((200, {"object": "list"}), None),
        ((200, []), None),
    ],
)
def test_a_server_of_another_kind_is_refused_before_any_model_loads(serve, kind, answer, told):
    with pytest.raises(ValueError) as error:
        serve(kind, lambda path, body: answer)
    assert (told or str(answer[1])) in str(error.value) and "\n" not in str(error.value)


@fast
@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_without_a_list_is_a_scorer_and_no_judge(serve, status):
    """Every server of chat completions lists its models, so an address without a list lacks its /v1."""
    answers = {
        kind: lambda path, body, kind=kind: good_answer(kind, path, body) if body else (status, b"") for kind in KINDS
    }
    _, rewards = serve("http_scorer", answers["http_scorer"])
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [0, 0.1, 0.2, 0.3]
    server, _ = serve("vlm_judge", answers["vlm_judge"], load=False)
    with pytest.raises(ValueError) as error:
        load_rewards(["vlm_judge"], [1])
    told = f"--reward vlm_judge: VLM_JUDGE_URL={server.url}: .* /models .* /v1 "
    assert re.match(told, str(error.value))


@fast
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_not_there_is_refused(serve, kind, tmp_path):
    server, _ = serve(kind)
    server.stop()
    line = run_here(tmp_path, "flow_grpo.py", "--reward", kind, "--rollout", "local")
    assert line.startswith(f"flow_grpo.py: error: --reward {kind}: {server.url}/")
    assert line.endswith("(All connection attempts failed)")
    assert not (tmp_path / "runs").exists()


@fast
@pytest.mark.parametrize(
    ("value", "kind"),
    [(b"\x89PNG", "bytes"), (datetime.date(2025, 1, 2), "date"), (Decimal("1.5"), "Decimal"), ({"at": [b""]}, "bytes")],
)
def test_a_column_that_json_cannot_hold_is_refused_before_any_model_loads(serve, tmp_path, value, kind):
    _, rewards = serve("http_scorer")
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a mug", "a cup"], "tag": [1, 2]}), path)
    assert read_prompts(path, rewards).metadata == [{"tag": 1}, {"tag": 2}]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a mug", "a cup"], "tag": [None, value]}), path)
    told = f"{path}, row 1: tag: http_scorer .*: Object of type {kind} is not JSON serializable"
    with pytest.raises(ValueError) as error:
        read_prompts(path, rewards)
    assert re.fullmatch(told, str(error.value))
    _, others = serve("vlm_judge")
    assert read_prompts(path, others).metadata == [{"tag": None}, {"tag": value}]  # the judge does not send metadata


@fast
def test_a_nan_is_refused_as_json_has_none(serve, tmp_path):
    _, rewards = serve("http_scorer")
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a mug", "a cup"], "size": [1.0, math.nan]}), path)
    with pytest.raises(ValueError, match="row 1: size: http_scorer .*: Out of range float"):
        read_prompts(path, rewards)


@fast
def test_settings_are_those_of_the_start(serve, monkeypatch):
    _, rewards = serve("http_scorer")
    monkeypatch.setenv("HTTP_SCORER_REWARD", "other")
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [0, 0.1, 0.2, 0.3]


# ---- the example server ----------------------------------------------------------------------------------------------
@fast
def test_the_example_server_scores_and_says_what_it_cannot(serve, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "scorer_server.py", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        monkeypatch.setenv("HTTP_SCORER_URL", f"http://127.0.0.1:{port}/")
        monkeypatch.setenv("HTTP_SCORER_REWARD", "redness")
        rewards = load_rewards(["http_scorer"], [1])
        red = [Image.new("RGB", (4, 4), colour) for colour in ("red", "black", "white", (0, 255, 255))]
        assert score_images(rewards, red, PROMPTS)[:, 0].tolist() == pytest.approx([1, 0, 0, -1])
        asked = {"history": [{"text": "a", "image_b64": "AAAA"}], "required_rewards": ["redness"], "metadata": {}}
        answer = ask("/score", {"requests": [asked]})
        assert answer["results"] == [{}] and "UnidentifiedImageError" in answer["errors"][0]["redness"]
    finally:
        process.kill()
        process.wait()


@fast
def test_a_request_that_nobody_waits_for_is_not_scored_to_its_end(monkeypatch):
    """The scorer's first image takes until the client has gone; its score is numpy's, as users' scorers return."""
    has_begun, has_gone = threading.Event(), threading.Event()
    scored = []

    def scorer(image, prompt, metadata):
        scored.append(prompt)
        has_begun.set()
        has_gone.wait(30)
        return np.float32(0.5)

    server = scorer_server.Server(0, "slow", scorer)
    monkeypatch.setattr(scorer_server.Handler, "log_message", lambda *args: None)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        content = io.BytesIO()
        IMAGES[0].save(content, "PNG")
        turn = {"text": "a", "image_b64": base64.b64encode(content.getvalue()).decode()}
        asked = [{"history": [turn], "required_rewards": ["slow"], "metadata": {}}] * 3
        body = json.dumps({"requests": asked}).encode()
        with socket.create_connection(server.server_address) as client:
            client.sendall(b"POST /score HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            assert has_begun.wait(30)
        has_gone.set()
        with socket.create_connection(server.server_address) as client:  # of a client that waits
            client.sendall(b"POST /score HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["results"] == [{"slow": {"slow": 0.5}}] * 3
        assert len(scored) == 1 + 3
    finally:
        has_gone.set()
        server.shutdown()
        server.server_close()


STAND_INS = {
    "ImageReward": """
        from PIL import Image
        def load(name):
            assert name == "ImageReward-v1.0"
            return Model()
        class Model:
            def score(self, prompt, image):
                if not isinstance(image, Image.Image):
                    raise TypeError("as theirs")
                return len(prompt) + image.getpixel((0, 0))[0] / 255
        """,
    "hpsv3": """
        import torch
        class HPSv3RewardInferencer:
            def __init__(self, config_path=None, checkpoint_path=None, device="cuda", differentiable=False):
                assert device == "cuda"
            def reward(self, prompts, image_paths):
                mu = [len(prompt) + image.getpixel((0, 0))[0] / 255 for prompt, image in zip(prompts, image_paths)]
                return torch.tensor([[one, 0.1] for one in mu])  # mu and sigma
        """,
}


@fast
@pytest.mark.parametrize(("name", "package"), [("image_reward", "ImageReward"), ("hpsv3", "hpsv3")])
def test_published_scorers_ask_their_packages(name, package, serve, tmp_path, monkeypatch):
    """Stand-ins with the signatures of the packages; the server, the protocol and the reward are real."""
    (tmp_path / f"{package}.py").write_text(textwrap.dedent(STAND_INS[package]))
    monkeypatch.syspath_prepend(tmp_path)
    server = scorer_server.Server(0, name, published_scorers.SCORERS[name]())
    monkeypatch.setattr(scorer_server.Handler, "log_message", lambda *args: None)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        monkeypatch.setenv("HTTP_SCORER_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("HTTP_SCORER_REWARD", name)
        images = [Image.new("RGB", (4, 4), colour) for colour in ("red", "black")]
        prompts = PromptSet(["a sign", "a red sign"], [{}, {}])
        scores = score_images(load_rewards(["http_scorer"], [1]), images, prompts)
        assert scores[:, 0].tolist() == pytest.approx([7, 10])
        monkeypatch.setenv("HTTP_SCORER_REWARD", "clip")
        with pytest.raises(ValueError, match=f"HTTP_SCORER_REWARD=clip: .*{name}"):
            load_rewards(["http_scorer"], [1])
    finally:
        server.shutdown()
        server.server_close()
        monkeypatch.delitem(sys.modules, package)


JUDGED = ROOT / "tools" / "geneval2.py"


@fast
def test_geneval2_is_the_geometric_mean_of_the_right_answers(serve, tmp_path):
    """By hand: tokens with and without a space, a word and its digits, a wrong answer, and one that is not there."""
    tokens = {
        "How many mugs are in the image?": {"two": 0.3, "Two": 0.1, " 2": 0.2, "2": 0.1, "three": 0.2},  # 0.7
        "Are the mugs red?": {"Yes": 0.4, " yes": 0.1, "No": 0.5},  # 0.5
        "Are there any mugs in the image?": {"No": 1.0},  # 0
    }

    def answer(path, body):
        if body is None:
            return good_answer("vlm_judge", path, body)
        assert (body["max_tokens"], body["logprobs"], body["top_logprobs"], body["temperature"]) == (1, True, 20, 0)
        text = body["messages"][0]["content"][-1]["text"]
        if number(shown("vlm_judge", body)[0]) == 3:
            return 400, {"error": "too large"}
        asked = tokens[text.removesuffix(" Answer in one word.")]
        found = [{"token": token, "logprob": math.log(share)} for token, share in asked.items()]
        choice = {"message": {"content": "Yes"}, "logprobs": {"content": [{"token": "Yes", "top_logprobs": found}]}}
        return 200, {"choices": [choice]}

    pairs = [[question, "two" if "many" in question else "Yes"] for question in tokens]
    records = [pairs[:2], pairs, pairs[:1], pairs[:2]]
    serve("vlm_judge", answer, load=False)
    rewards = load_rewards([f"{JUDGED}:geneval2"], [1])
    lines = [json.dumps({"prompt": f"prompt {i}", "vqa_list": record}) for i, record in enumerate(records)]
    (tmp_path / "geneval2_data.jsonl").write_text("\n".join(lines))
    prompts = read_prompts(tmp_path / "geneval2_data.jsonl", rewards)
    details = [{} for _ in IMAGES]
    scores = score_images(rewards, IMAGES, prompts, "mask", details)[:, 0].tolist()
    assert scores == pytest.approx([math.sqrt(0.7 * 0.5), 0, 0.7, math.nan], nan_ok=True)
    assert [detail.get("geneval2") for detail in details[:3]] == [
        {"am": pytest.approx(0.6)},
        {"am": pytest.approx(0.4)},
        {"am": pytest.approx(0.7)},
    ]
    for bad in ({}, {"vqa_list": []}, {"vqa_list": [["Is it?"]]}, {"vqa_list": "Is it?"}):
        (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "a", **bad}))
        with pytest.raises(ValueError, match='bad.jsonl:1: .*geneval2 .*"vqa_list"'):
            read_prompts(tmp_path / "bad.jsonl", rewards)


@fast
def test_a_server_without_probabilities_is_no_judge_of_geneval2(serve):
    serve("vlm_judge", load=False)
    prompts = PromptSet(["a"], [{"vqa_list": [["Is it red?", "Yes"]]}])
    with pytest.raises(RunError, match="top_logprobs"):
        score_images(load_rewards([f"{JUDGED}:geneval2"], [1]), IMAGES[:1], prompts, "mask")


# ---- beside a rollout ------------------------------------------------------------------------------------------------
@fast
def test_answers_keep_their_order_few_are_asked_for_at_once_and_the_first_exception_ends_all():
    begun = []
    most = []

    async def work(item):
        begun.append(item)
        most.append(len(begun))
        await asyncio.sleep(0.01 * item)  # 90 s for 9000
        begun.remove(item)
        if item == 2:
            raise KeyError("two")
        return 10 * item

    assert json_http.ask_for_each(work, [3, 1, 0, 4], 2) == [30, 10, 0, 40] and max(most) == 2
    assert json_http.ask_for_each(work, [], 2) == []
    for items in ([2, 3], [9000, 2, 3]):  # nor is what is under way waited for
        with pytest.raises(KeyError, match="two"):
            json_http.ask_for_each(work, items, len(items) - 1)
    assert 3 not in begun


def mean_of(kind, body):
    """An answer whose score is the brightness of the images that the server got."""
    values = [float(np.asarray(image).mean() / 255) for image in shown(kind, body)]
    if kind == "vlm_judge":
        return 200, completion(f"Score: {10 * values[0]:.12f}")
    return 200, {"results": [{"green": value} for value in values], "errors": [{} for _ in values]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_asked_while_images_are_sampled_and_what_is_waited_for_is_timed(serve, kind, tmp_path, monkeypatch):
    """Rollout and server work at the same time: the second batch of images is handed over only after the server was
    asked about the first, and the server answers only after that. A rollout's last answer comes 0.2 s after the run has
    begun to wait for it, which the phase `reward` must show. The numbers are those of a plain server."""
    asked = threading.Event()
    sampled_on = threading.Event()
    waited_for = threading.Event()

    class Watched(Scorer):
        def add(self, rows, images):
            if all(image is None for image in self.images):
                for event in (asked, sampled_on, waited_for):
                    event.clear()
            elif not sampled_on.is_set():
                assert asked.wait(60)
                sampled_on.set()
            super().add(rows, images)

        def scores(self, *args, **kwargs):
            waited_for.set()
            return super().scores(*args, **kwargs)

    def slow(path, body):
        if body is None:
            return good_answer(kind, path, body)
        asked.set()
        assert sampled_on.wait(60)
        assert waited_for.wait(60)
        time.sleep(0.2)
        return mean_of(kind, body)

    def plain(path, body):
        return mean_of(kind, body) if body else good_answer(kind, path, body)

    options = ["--reward", kind, *TINY, "--micro_batch_size", 4, "--rollout", "local", "--num_steps", 2]
    options += few_eval_prompts(tmp_path)
    serve(kind, plain)
    assert run_here(tmp_path, "flow_grpo.py", *options, "--name", "plain") is None
    serve(kind, slow)
    monkeypatch.setattr(flow_grpo, "Scorer", Watched)
    assert run_here(tmp_path, "flow_grpo.py", *options, "--name", "slow") is None
    slow_rows = read_metrics(tmp_path / "runs" / "slow")
    assert without_times(slow_rows) == without_times(read_metrics(tmp_path / "runs" / "plain"))
    assert all(row["timing_s/reward"] >= 0.2 for row in slow_rows[1:])
    assert torch.tensor([row["critic/rewards/std_mean"] for row in slow_rows[1:]]).min() > 0
