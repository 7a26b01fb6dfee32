"""vlm_judge and http_scorer against real servers that are good, slow, broken, wrong or gone, and beside a rollout."""

import base64
import contextlib
import datetime
import io
import json
import math
import socket
import subprocess
import sys
import threading
import time
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import flow_grpo
from common.data import PromptSet, read_prompts
from common.errors import RunError
from common.rewards import _json_http as json_http
from common.rewards.vlm_judge import QUESTION, QUESTION_OF_EDITS, read_parts, read_score
from common.scoring import Scorer, load_rewards, score_images
from common.source_images import SourceImage
from tests.conftest import ROOT, TINY, few_eval_prompts, read_metrics, run_here, without_times

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

    def send(self, status, content):
        if callable(status):  # it answers by itself
            status(self)
            return
        if status is None:  # the server dies in the middle of an answer
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"res')
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
    monkeypatch.setattr(json_http, "BACK_OFF_S", 0.01)

    def start(kind, answer=None, load=True, **settings):
        server = Server(answer or (lambda *request: good_answer(kind, *request)))
        servers.append(server)
        prefix = kind.upper()
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
    record = {"image": [SourceImage("red.png", file.getvalue())], "tag": "a"}
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


@fast
def test_the_scorer_is_sent_the_sources(serve):
    server, rewards = serve("http_scorer")
    score_images(rewards, IMAGES[:2], edits())
    first, _ = server.requests[-1][1]["requests"]
    (source,) = first["sources_b64"]
    assert Image.open(io.BytesIO(base64.b64decode(source))).getpixel((0, 0)) == (255, 0, 0)
    assert first["metadata"] == {"tag": "a"}


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
def test_the_scorer_is_not_sent_the_pictures_that_a_model_edits(serve, tmp_path):
    server, rewards = serve("http_scorer")
    IMAGES[0].resize((16, 16)).save(tmp_path / "source.png")
    path = tmp_path / "edits.jsonl"
    path.write_text('{"prompt": "make it red", "image": "source.png", "mask": "source.png", "n": 7}\n')
    score_images(rewards, IMAGES[:1], read_prompts(path, rewards))
    ((_, body, _),) = server.requests
    assert body["requests"][0]["metadata"] == {"n": 7}


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
        with pytest.raises(ValueError, match="an answer "):
            read_score(text, 0, 10)
    else:
        assert read_score(text, 0, 10) == pytest.approx(score, abs=1e-15)


@fast
def test_the_committed_question_asks_for_what_is_read():
    question = QUESTION.read_text()
    assert question.count("{prompt}") == 1 and question.rstrip().endswith("Score: N")
    assert read_score(question.replace("Score: N", "Score: 10"), 0, 10) == 1


# ---- servers that fail -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_server_is_waited_for_and_one_that_is_too_slow_ends_the_run(serve, kind):
    go_on = threading.Event()

    def slow(path, body):
        if body:
            go_on.wait(60)
        return good_answer(kind, path, body)

    _, rewards = serve(kind, slow)
    threading.Timer(0.3, go_on.set).start()
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [0, 0.1, 0.2, 0.3]
    assert go_on.is_set()
    go_on.clear()
    _, rewards = serve(kind, slow, TIMEOUT_S=1, RETRIES=1)
    assert "no answer within 1 s, in each of 2 attempts" in fault_of(rewards)
    go_on.set()


@fast
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("status", "told"), [(500, "HTTP 500: out of memory"), (None, "no answer (IncompleteRead")])
def test_a_fault_that_passes_is_retried_and_one_that_stays_ends_the_run(serve, kind, status, told):
    def failing(count):
        left = [count]

        def answer(path, body):
            if body is None or left[0] == 0:
                return good_answer(kind, path, body)
            left[0] -= 1
            return status, b"out of memory"

        return answer

    server, rewards = serve(kind, failing(2), CONCURRENCY=1)
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [0, 0.1, 0.2, 0.3]
    assert len(server.requests) == 2 + (4 if kind == "vlm_judge" else 1)
    server, rewards = serve(kind, failing(-1), CONCURRENCY=1)
    line = fault_of(rewards)
    assert f"reward {kind} raised ServerError: {server.url}" in line
    assert told in line and "in each of 3 attempts" in line
    assert len(server.requests) == 3


@fast
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_dies_between_requests_ends_the_run(serve, kind, capfd):
    server, rewards = serve(kind)
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [0, 0.1, 0.2, 0.3]
    server.stop()
    assert "no answer (Connection refused), in each of 3 attempts" in fault_of(rewards)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if server.url in line]  # one line for four requests
    assert line.endswith("no answer (Connection refused); asking again, up to 2 times")


@fast
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_token_does_not_follow_a_redirect(serve, method):
    """A redirect may lead to another host, which must not learn the token."""
    seen = []

    def moved(handler):
        seen.append(handler.headers.get("Authorization"))
        handler.send_response(302)
        handler.send_header("Location", f"{other.url}/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def elsewhere(handler):
        seen.append(handler.headers.get("Authorization"))
        handler.send(200, {})

    other, _ = serve("http_scorer", lambda path, body: (elsewhere, None), load=False)
    server, _ = serve("http_scorer", lambda path, body: (moved, None), load=False, API_KEY="a-secret")
    settings = json_http.read_server("HTTP_SCORER", server.url, concurrency=1)
    assert json_http.ask(settings, "/score", {} if method == "POST" else None) == {}
    assert seen == ["Bearer a-secret", None]


@fast
@pytest.mark.parametrize("part", ["headers", "body"])
def test_an_answer_that_drips_is_given_up(serve, part):
    """Each byte comes within the time-out, which holds for the whole answer."""
    has_ended = threading.Event()

    def drip(handler):
        with contextlib.suppress(OSError):  # the client no longer waits
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n" if part == "headers" else b"HTTP/1.0 200 OK\r\n\r\n")
            while not has_ended.wait(0.05):
                handler.wfile.write(b"a")

    server, _ = serve("http_scorer", lambda path, body: (drip, None), load=False, TIMEOUT_S=0.5, RETRIES=1)
    settings = json_http.read_server("HTTP_SCORER", server.url, concurrency=1)
    threading.Timer(20, has_ended.set).start()  # otherwise a failure would hang
    with pytest.raises(json_http.ServerError, match="no answer within 0.5 s, in each of 2 attempts"):
        json_http.ask(settings, "/score", {})
    assert not has_ended.is_set()
    has_ended.set()


@fast
@pytest.mark.parametrize("status", [200, 422])
def test_an_answer_without_end_is_refused_before_it_fills_the_memory(serve, monkeypatch, status):
    monkeypatch.setattr(json_http, "LARGEST_ANSWER", 1000)
    sent = []

    def flood(handler):
        handler.send_response(status)
        handler.end_headers()
        with contextlib.suppress(OSError):  # the client has left
            for _ in range(10_000):
                sent.append(handler.wfile.write(b" " * 10_000))

    server, _ = serve("http_scorer", lambda path, body: (flood, None), load=False)
    settings = json_http.read_server("HTTP_SCORER", server.url, concurrency=1)
    with pytest.raises(json_http.ServerError, match=r"/score: (the answer has more than 1000 bytes|HTTP 422)"):
        json_http.ask(settings, "/score", {})
    assert sum(sent) < 50e6  # what the sockets have taken in


GARBAGE = {
    "vlm_judge": [
        (b"<html>busy</html>", "the answer is not JSON: <html>busy</html>"),
        (b"", "the answer is not JSON: nothing"),
        ({}, "no chat completion"),
        ([], "no chat completion"),
        ({"choices": []}, "no chat completion"),
        ({"choices": [{"text": "Score: 5"}]}, "no chat completion"),
    ],
    "http_scorer": [
        (b"<html>busy</html>", "the answer is not JSON: <html>busy</html>"),
        (b"\xff" * 500, "the answer is not JSON"),
        ([1, 2, 3, 4], 'no "results", a list of objects'),
        ({"results": [0.1, 0.2, 0.3, 0.4], "errors": [{}] * 4}, 'no "results", a list of objects'),
        ({"results": [{"green": 1}] * 4}, 'no "errors", a list of objects'),
        ({"results": [{"green": 1}] * 3, "errors": [{}] * 4}, '"results" has 3 entries for 4 requests'),
        ({"results": [{"green": 1}] * 4, "errors": []}, '"errors" has 0 entries for 4 requests'),
        ({"results": [{"green": 1}] * 5, "errors": [{}] * 5}, '"results" has 5 entries for 4 requests'),
        ({"results": [{}] * 4, "errors": [{}] * 4}, "neither a number nor an error for green"),
        ({"results": [{"green": None}] * 4, "errors": [{}] * 4}, "neither a number nor an error for green"),
        ({"results": [{"green": "1"}] * 4, "errors": [{}] * 4}, "neither a number nor an error for green"),
        ({"results": [{"green": True}] * 4, "errors": [{}] * 4}, "neither a number nor an error for green"),
        ({"results": [{"green": {"a": 1, "b": 2}}] * 4, "errors": [{}] * 4}, "neither a number nor an error"),
        ({"results": [{"green": {}}] * 4, "errors": [{}] * 4}, "neither a number nor an error for green"),
    ],
}


@fast
@pytest.mark.parametrize(("kind", "content", "told"), [(kind, *case) for kind in KINDS for case in GARBAGE[kind]])
def test_garbage_is_never_a_score_and_never_one_images_failure(serve, kind, content, told):
    _, rewards = serve(kind, lambda path, body: (200, content) if body else good_answer(kind, path, body))
    assert told in fault_of(rewards)


@fast
@pytest.mark.parametrize("result", [{"green": 0.5}, {"green": {"blue": 0.5}}])
def test_a_number_that_is_not_the_metrics_is_not_taken_for_it(serve, result):
    def answer(path, body):
        return (200, {"results": [result] * 4, "errors": [{}] * 4}) if body else good_answer("http_scorer", path, body)

    _, rewards = serve("http_scorer", answer, REWARD="green/foo")
    assert f"neither a number nor an error for green/foo: {result}" in fault_of(rewards)


# the server's answer about image 1 alone; the other images get their scores
ONE_FAILS = {
    "no score": ("vlm_judge", (200, completion("I cannot judge this.")), "does not end with Score: and a number"),
    "no text": ("vlm_judge", (200, completion(None)), "does not end with Score: and a number"),
    "out of range": ("vlm_judge", (200, completion("Score: 55")), "whose score is not in 0 to 10"),
    "cut": ("vlm_judge", (200, completion("Score: 1", "length")), "cut at VLM_JUDGE_MAX_TOKENS 512"),
    "refused": ("vlm_judge", (400, b"image too large"), "HTTP 400: image too large"),
    "an error": ("http_scorer", ({}, {"green": "ValueError('too dark')"}), "too dark"),
    "an error of no name": ("http_scorer", ({"green": 0.0}, {"error": "boom"}), "{'error': 'boom'}"),
    "NaN": ("http_scorer", ({"green": {"green": math.nan}}, {}), "score nan"),
    "infinite": ("http_scorer", ({"green": math.inf}, {}), "score inf"),
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
    assert line.startswith(f"reward {kind} failed on image 1 (prompt: prompt 1): ") and told in line


@fast
def test_a_request_of_a_batch_that_is_refused_ends_the_run(serve):
    _, rewards = serve("http_scorer", lambda path, body: (413, b"") if body else good_answer("http_scorer", path, body))
    assert "HTTP 413: nothing" in fault_of(rewards)


# ---- settings --------------------------------------------------------------------------------------------------------
SETTINGS = {
    "vlm_judge": [
        ({"URL": ""}, "VLM_JUDGE_URL is not set; for example VLM_JUDGE_URL=http://127.0.0.1:8000/v1"),
        ({"URL": "localhost:8000"}, "VLM_JUDGE_URL=localhost:8000: must begin with http:// or https://"),
        ({"MODEL": " "}, "VLM_JUDGE_MODEL is not set"),
        ({"MODEL": "other"}, "VLM_JUDGE_MODEL=other: not at the server, which has tiny"),
        ({"PROMPT": "no/such.txt"}, "VLM_JUDGE_PROMPT=no/such.txt: No such file or directory"),
        ({"PROMPT": __file__ + "/x"}, "VLM_JUDGE_PROMPT="),
        ({"PROMPT": str(ROOT / "requirements.txt")}, "the question must contain {prompt}"),
        ({"RANGE": "10"}, "VLM_JUDGE_RANGE=10: must be two numbers"),
        ({"RANGE": "10,0"}, "VLM_JUDGE_RANGE=10,0: must be two numbers"),
        ({"RANGE": "0,nan"}, "VLM_JUDGE_RANGE=0,nan: must be two numbers"),
        ({"RETRIES": "-1"}, "VLM_JUDGE_RETRIES=-1: must be a whole number, at least 0"),
        ({"CONCURRENCY": "2.5"}, "VLM_JUDGE_CONCURRENCY=2.5: must be a whole number, at least 1"),
        ({"TIMEOUT_S": "inf"}, "VLM_JUDGE_TIMEOUT_S=inf: must be a number, at least 0.001"),
        ({"MAX_TOKENS": "0"}, "VLM_JUDGE_MAX_TOKENS=0: must be a whole number, at least 1"),
    ],
    "http_scorer": [
        ({"URL": ""}, "HTTP_SCORER_URL is not set; for example HTTP_SCORER_URL=http://127.0.0.1:8080"),
        ({"URL": "file:///etc/passwd"}, "HTTP_SCORER_URL=file:///etc/passwd: must begin with http"),
        ({"REWARD": ""}, "HTTP_SCORER_REWARD is not set"),
        ({"REWARD": "blue"}, "HTTP_SCORER_REWARD=blue: not at the server, which has green, other"),
        ({"BATCH_SIZE": "x"}, "HTTP_SCORER_BATCH_SIZE=x: must be a whole number, at least 1"),
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
        ((200, b"<html>"), "the answer is not JSON: <html>"),
        ((200, {"object": "list"}), "not a list of names"),
        ((200, []), "not a list of names"),
    ],
)
def test_a_server_of_another_kind_is_refused_before_any_model_loads(serve, kind, answer, told):
    with pytest.raises(ValueError) as error:
        serve(kind, lambda path, body: answer)
    assert told in str(error.value) and "\n" not in str(error.value)


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
    told = f"VLM_JUDGE_URL={server.url}: no /models there; is its /v1 missing?"
    assert str(error.value) == f"--reward vlm_judge: {told}"


@fast
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_not_there_is_refused(serve, kind, tmp_path):
    server, _ = serve(kind)
    server.stop()
    line = run_here(tmp_path, "flow_grpo.py", "--reward", kind, "--rollout", "local")
    assert line.startswith(f"flow_grpo.py: error: --reward {kind}: {server.url}/")
    assert line.endswith("no answer (Connection refused)")
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
    told = f"{path}, row 1: tag: http_scorer cannot send it: Object of type {kind} is not JSON serializable"
    with pytest.raises(ValueError) as error:
        read_prompts(path, rewards)
    assert str(error.value) == told
    _, others = serve("vlm_judge")
    assert read_prompts(path, others).metadata == [{"tag": None}, {"tag": value}]  # the judge does not send metadata


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
        server = json_http.read_server("HTTP_SCORER", "", 1)
        asked = {"history": [{"text": "a", "image_b64": "AAAA"}], "required_rewards": ["redness"], "metadata": {}}
        answer = json_http.ask(server, "/score", {"requests": [asked]})
        assert answer["results"] == [{}] and "UnidentifiedImageError" in answer["errors"][0]["redness"]
    finally:
        process.kill()
        process.wait()


# ---- beside a rollout ------------------------------------------------------------------------------------------------
@fast
def test_threads_keep_the_order_and_end_at_the_first_exception():
    begun = []

    def work(item):
        begun.append(item)
        assert threading.current_thread().daemon  # a server that hangs cannot keep a failed run from ending
        if item == 2:
            raise KeyError("two")
        return 10 * item

    assert json_http.in_threads(work, [3, 1, 0], 2) == [30, 10, 0]
    assert json_http.in_threads(work, [], 2) == []
    begun.clear()
    with pytest.raises(KeyError, match="two"):
        json_http.in_threads(work, [1, 2, 3, 4], 1)
    assert begun == [1, 2]


@fast
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_answers_changes_no_number(serve, kind):
    """All four requests are under way before any is answered, and the last image is answered first."""
    arrived = threading.Barrier(4)
    answered = [threading.Event() for _ in range(5)]
    answered[4].set()

    def last_first(path, body):
        if body:
            i = number(shown(kind, body)[0])
            arrived.wait(60)
            assert answered[i + 1].wait(60)
            answered[i].set()
        return good_answer(kind, path, body)

    _, rewards = serve(kind, last_first, BATCH_SIZE=1, CONCURRENCY=4)
    assert score_images(rewards, IMAGES, PROMPTS)[:, 0].tolist() == [0, 0.1, 0.2, 0.3]


@fast
def test_no_more_requests_than_allowed_are_under_way(serve):
    under_way = []
    most = []
    lock = threading.Lock()

    def count(path, body):
        if body:
            with lock:
                under_way.append(1)
                most.append(len(under_way))
            time.sleep(0.05)
            with lock:
                under_way.pop()
        return good_answer("vlm_judge", path, body)

    _, rewards = serve("vlm_judge", count, CONCURRENCY=2)
    score_images(rewards, IMAGES, PROMPTS)
    assert max(most) == 2


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

        def scores(self):
            waited_for.set()
            return super().scores()

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
