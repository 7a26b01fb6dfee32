"""A reward behind HTTP, for --reward http_scorer: the protocol of common/rewards/http_scorer.py, with one reward.

    python tools/scorer_server.py 8080
    export HTTP_SCORER_URL=http://127.0.0.1:8080 HTTP_SCORER_REWARD=redness
    torchrun --standalone flow_grpo.py --reward http_scorer

It listens to this machine only. Before you open it to other machines, decide who may ask it.
"""

import base64
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


def redness(image: Image.Image, prompt: str, metadata: dict) -> float:
    """How much more red than green and blue the image is, in [-1, 1]."""
    red, green, blue = np.asarray(image, dtype=float).mean((0, 1)) / 255
    return red - (green + blue) / 2


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # a run asks this once, when it starts
        self.answer({"rewards": ["redness"]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        results: list[dict] = []
        errors: list[dict] = []
        for request in body["requests"]:
            turn = request["history"][-1]  # the protocol's other servers know conversations; a run sends one turn
            try:
                image = Image.open(io.BytesIO(base64.b64decode(turn["image_b64"]))).convert("RGB")
                results.append({"redness": {"redness": redness(image, turn["text"], request["metadata"])}})
                errors.append({})
            except Exception as error:  # of this image alone: report it, and never send a score instead
                results.append({})
                errors.append({"redness": repr(error)})
        self.answer({"results": results, "errors": errors})

    def answer(self, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    # threads, as every rank of a run asks at the same time
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
