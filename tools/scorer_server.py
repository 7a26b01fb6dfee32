"""A reward behind HTTP, for --reward http_scorer: the protocol of common/rewards/http_scorer.py, with one reward.

    python tools/scorer_server.py 8080
    export HTTP_SCORER_URL=http://127.0.0.1:8080 HTTP_SCORER_REWARD=redness
    torchrun --standalone flow_grpo.py --reward http_scorer

It listens to this machine only. Before you open it to other machines, decide who may ask it. tools/published_scorers.py
serves ImageReward and HPSv3 by it.
"""

import base64
import io
import json
import select
import socket
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

Scorer = Callable[[Image.Image, str, dict], float]


def redness(image: Image.Image, prompt: str, metadata: dict) -> float:
    """How much more red than green and blue the image is, in [-1, 1]."""
    red, green, blue = np.asarray(image, dtype=float).mean((0, 1)) / 255
    return red - (green + blue) / 2


class Server(ThreadingHTTPServer):
    """Threads, as every rank of a run asks at the same time: a scorer is called in several at once."""

    def __init__(self, port: int, name: str, scorer: Scorer) -> None:
        self.name, self.scorer = name, scorer
        super().__init__(("127.0.0.1", port), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:  # a run asks this once, when it starts
        self.answer({"rewards": [self.server.name]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.server.name
        results: list[dict] = []
        errors: list[dict] = []
        for request in body["requests"]:
            if self.is_given_up():  # a run that waited too long asks again: its images would be scored twice
                return
            turn = request["history"][-1]  # the protocol's other servers know conversations; a run sends one turn
            try:
                image = Image.open(io.BytesIO(base64.b64decode(turn["image_b64"]))).convert("RGB")
                score = float(self.server.scorer(image, turn["text"], request["metadata"]))  # numpy's, too
                results.append({name: {name: score}})
                errors.append({})
            except Exception as error:  # of this image alone: report it, and never send a score instead
                results.append({})
                errors.append({name: repr(error)})
        self.answer({"results": results, "errors": errors})

    def is_given_up(self) -> bool:
        """Whether the client has closed its connection, before it has an answer."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def answer(self, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    Server(int(sys.argv[1]), "redness", redness).serve_forever()
