"""A reward behind HTTP, for --reward http_scorer: the protocol of common/rewards/http_scorer.py, with one reward.

    python docs/scorer_server.py 8080
    export HTTP_SCORER_URL=http://127.0.0.1:8080 HTTP_SCORER_REWARD=redness
    torchrun --standalone flow_grpo.py --reward http_scorer

It listens to this machine alone: who may ask it from others is for you to say.
"""

import base64
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


def redness(image, prompt, metadata):
    """How much more red than green and blue the image is, in [-1, 1]."""
    red, green, blue = np.asarray(image, dtype=float).mean((0, 1)) / 255
    return red - (green + blue) / 2


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):  # what is asked for at the start of a run
        self.answer({"rewards": ["redness"]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        results = []
        errors = []
        for request in body["requests"]:
            turn = request["history"][-1]
            try:
                image = Image.open(io.BytesIO(base64.b64decode(turn["image_b64"]))).convert("RGB")
                results.append({"redness": {"redness": redness(image, turn["text"], request["metadata"])}})
                errors.append({})
            except Exception as error:  # of this image alone; never a score in its place
                results.append({})
                errors.append({"redness": repr(error)})
        self.answer({"results": results, "errors": errors})

    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
